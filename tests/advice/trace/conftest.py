"""Rules are tested by their own figures: what a replay of the trace makes of them is tested apart."""

from __future__ import annotations

import pytest

from gputop.advice.trace.replayed import Cures


@pytest.fixture(autouse=True)
def not_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Cures, "saved", lambda self, verdict: (None, ""))

"""Kernels that are too small."""

from __future__ import annotations

import pytest

from tests.advice.trace.traces import KERNEL, STEP, STEPS, findings, job
from tests.trace.build import Builder


def many(kernel: float, gap: float) -> Builder:
    b = job()
    for i in range(STEPS):
        t = i * STEP + 100
        while t + kernel < (i + 1) * STEP:
            b.run(0, t, kernel, KERNEL, launch=max(t - 500, 0), launch_length=2)
            t += kernel + gap
    return b


@pytest.mark.parametrize(("kernel", "gap", "there"), [(10, 2, True), (10, 0.2, False), (30, 4, False)])
def test_pauses_between_short_kernels(kernel, gap, there):
    found = findings(many(kernel, gap).build())
    assert set(found) == ({"small_kernels"} if there else set())
    if there:
        f = found["small_kernels"]
        assert f.gain.step_time == pytest.approx(gap / (kernel + gap), abs=0.01) and f.severity == "high"
        assert f.evidence["below_20us_ratio"] == 1 and f.evidence["launch_pace_s"] == pytest.approx(12e-6)

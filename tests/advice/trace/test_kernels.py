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


def test_kernels_per_step_are_those_of_the_steps_where_the_window_is_longer():
    def kernels_of(b: Builder) -> float:
        return findings(b.build())["small_kernels"].evidence["kernels_per_step"]

    b = many(10, 2)
    alone = kernels_of(b)
    b.run(0, 20 * STEPS * STEP, 10, KERNEL)  # something else long after the last step
    assert kernels_of(b) == pytest.approx(alone) and alone > 100

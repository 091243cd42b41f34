"""Memory of a trace: room for a larger batch."""

from __future__ import annotations

import pytest

from gputop.diagnosis.diagnose import analyze_trace
from tests.advice.trace.traces import abstained, findings, healthy, input_bound, launch_bound
from tests.trace.build import Builder

GIB = 2**30




def with_memory(b: Builder, peak_gib: float, gpus: int = 1) -> Builder:
    for gpu in range(gpus):
        b.memory(5, f"GPU_{gpu}_bfc", int(peak_gib * GIB / 2), int((40 - peak_gib / 2) * GIB), int(peak_gib * GIB))
    return b


@pytest.mark.parametrize(("peak_gib", "factor"), [(1, 8), (8, 4), (17, 2)])
def test_headroom_keeps_below_ninety_percent(peak_gib, factor):
    f = findings(with_memory(launch_bound(), peak_gib))["batch_size_headroom"]
    assert f.evidence["factor"] == factor and factor * peak_gib <= 0.9 * 40
    assert f.gain.step_time == pytest.approx(0.75 * (1 - 1 / factor), abs=0.03)
    assert f.gain.per == "sample"  # the step itself gets longer
    assert f.severity == "medium"  # launch_bound claims the same idle time


def test_headroom_goes_by_the_fullest_gpu():
    b = with_memory(launch_bound(2), 4)
    b.memory(6, "GPU_1_bfc", 10 * GIB, 30 * GIB, 15 * GIB)
    assert findings(b)["batch_size_headroom"].evidence["factor"] == 2


@pytest.mark.parametrize("b", [
    with_memory(launch_bound(), 20),  # twice the batch might not fit
    with_memory(healthy(), 2),  # computes already
    with_memory(input_bound(), 2),  # a larger batch would wait for input just the same
], ids=["full", "busy", "input"])
def test_no_headroom(b):
    assert "batch_size_headroom" not in findings(b)


def test_headroom_abstains_without_the_allocator():
    a = analyze_trace(launch_bound().build())
    assert "GPU_<n>_bfc" in abstained(a)["batch_size_headroom"]
    partly = with_memory(launch_bound(2), 2, gpus=1)
    assert "batch_size_headroom" in abstained(analyze_trace(partly.build()))

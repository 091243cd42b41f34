from __future__ import annotations

import pytest

from gputop.analysis.steps.membership import work_of_steps
from gputop.analysis.steps.steps import find_steps
from gputop.diagnosis.diagnose import analyze_trace
from gputop.diagnosis.per_step import collectives_per_step, copies_per_step, functions_per_step, kernels_per_step
from gputop.diagnosis.report import text_report
from gputop.trace.model import Kind
from tests.trace.build import Builder, keras_steps

STEP, STEPS, KERNELS = 10_000, 6, 40
REDUCE = "ncclDevKernel_AllReduce_Sum_f32_RING_LL"


def host_ahead(lag: float, cut: float | None = None) -> Builder:
    """Each step launches as much within its first tenth, and the GPU works it off ``lag`` µs later. ``cut``: when the
    trace ends for the GPU."""
    b = keras_steps(Builder(), STEPS, STEP, STEP - 50)
    for step in range(STEPS):
        begin = step * STEP
        for i in range(KERNELS):
            name, kind = (REDUCE, Kind.COLLECTIVE) if i % 10 == 9 else (f"k{i % 3}", Kind.COMPUTE)
            b.run(0, begin + lag + i * 200, 190, name, kind=kind, launch=begin + 5 + i * 20)
        b.run(0, begin + lag, 50, "MemcpyH2D", kind=Kind.H2D, launch=begin + 3, size=1000, stream=2)
    if cut is not None:
        b._device = [event for event in b._device if event["start"] < cut]
    return b


@pytest.mark.parametrize(("lag", "cut"), [(10, None), (7_000, None), (17_000, None), (10, 53_000), (17_000, 62_000)])
def test_a_step_has_the_work_that_it_launched_whenever_the_gpu_did_it(lag: float, cut: float | None) -> None:
    a = analyze_trace(host_ahead(lag, cut).build())
    assert a.kernels is not None and a.steps is not None
    rows, by = kernels_per_step(a, a.kernels.by_name)
    assert by.basis == "per step"
    assert {own.name: own.count for own in rows} == {"k0": 12, "k1": 12, "k2": 12, REDUCE: 4}
    assert sum(own.share for own in rows) == pytest.approx(1)
    assert sum(own.time_s for own in rows) == pytest.approx(KERNELS * 190e-6)
    reduced = collectives_per_step(a)[0]
    assert [(own.operation, own.count, own.time_s) for own in reduced] == [("AllReduce", 4, pytest.approx(4 * 190e-6))]
    copied = copies_per_step(a)[0]
    assert [(own.direction, own.count, own.bytes) for own in copied] == [("h2d", 1, 1000)]


def test_a_full_queue_that_the_recording_does_not_see_emptied_shows_the_steps_by_their_kernels() -> None:
    """The host launches nine steps at once, then waits for the GPU with each; the GPU does six of its fifteen."""
    b = Builder()
    launches = [20 * step for step in range(9)] + [10_000 * (step - 8) for step in range(9, 15)]
    for step, launch in enumerate(launches):
        b.host("Optimizer.step#SGD.step", launch + 15, 2)
        b.host("aten::mm", launch, 10)
        for i in range(4):
            if step * 10_000 + 2_500 * i < 57_000:
                b.run(0, 100 + step * 10_000 + 2_500 * i, 2_400, f"k{i}", launch=launch + 1 + i)
    trace = b.build()
    steps = find_steps(trace)
    assert steps is not None and "the host runs ahead" in steps.times.anchor
    assert steps.times.durations_s == pytest.approx([10e-3] * steps.count, abs=2e-4) and steps.count in (4, 5)


def test_of_steps_that_rest_on_kernels_their_starts_count() -> None:
    b = Builder()
    for step in range(8):
        for i in range(12):
            b.run(0, step * 1_000 + i * 70, 60, f"layer{i}")
    trace = b.build()
    steps = find_steps(trace)
    assert steps is not None and not steps.call_ends_ns
    found = work_of_steps(trace, steps)
    assert found.count == steps.count and found.inside.sum() == 12 * found.count


def test_kernels_outside_of_steps_have_no_part_in_them() -> None:
    b = host_ahead(10)
    b.run(0, STEPS * STEP + 500, 90_000, "evaluation", launch=STEPS * STEP + 400)
    a = analyze_trace(b.build())
    assert a.kernels.by_name[0].name == "evaluation"  # in the window
    assert "evaluation" not in {own.name for own in kernels_per_step(a, a.kernels.by_name)[0]}
    idle = keras_steps(Builder(), STEPS, STEP, STEP - 50, first=5_000).run(0, 10, 20, launch=5)  # none in the steps
    assert "No kernel ran in the steps." in text_report(analyze_trace(idle.build()))


def test_a_step_calls_its_function_once() -> None:
    b = keras_steps(Builder(), STEPS, STEP, STEP - 50, first=2_000)
    for step in range(STEPS):
        b.host("multi_step_on_iterator", 2_000 + step * STEP + 100, STEP - 200, tf_function_call="notTraced-nonXla")
        b.run(0, 2_000 + step * STEP + 200, 9_000, launch=2_000 + step * STEP + 150)
    rows, by = functions_per_step(analyze_trace(b.build()))
    assert by.whole and [(own.calls, own.seconds) for own in rows] == [(1, pytest.approx((STEP - 200) * 1e-6))]

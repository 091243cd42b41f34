"""A larger batch: what it would save per sample, and whether memory has room for it."""

from __future__ import annotations

import pytest

from gputop.advice.trace.batch_size import BatchSizeHeadroom
from gputop.analysis.results import Analysis
from gputop.core.findings import Finding
from gputop.diagnosis.diagnose import analyze_trace
from gputop.trace.model import LaunchShape, Trace, TraceGpu
from tests.advice.trace.stalls import GIB, reducing, with_memory
from tests.advice.trace.traces import STEP, STEPS, fill, findings, healthy, input_bound, job, launch_bound, verdict

ID = "batch_size_headroom"


def anywhere(a: Analysis) -> dict[str, Finding]:
    """All findings, those that follow from another too."""
    left, out = list(a.findings), {}
    while left:
        f = left.pop()
        out[f.id] = f
        left += f.consequences
    return out


@pytest.mark.parametrize(("peak_gib", "factor"), [(1, 8), (8, 4), (17, 2)])
def test_headroom_keeps_below_ninety_percent(peak_gib, factor):
    f = anywhere(analyze_trace(with_memory(launch_bound(), peak_gib).build()))[ID]
    assert f.evidence["factor"] == factor and factor * peak_gib <= 0.9 * 40
    assert f.gain.step_time == pytest.approx(0.75 * (1 - 1 / factor), abs=0.03)
    assert f.gain.per == "sample"  # the step itself gets longer
    assert f.severity == "medium"  # launch_bound claims the same idle time


def test_headroom_goes_by_the_fullest_gpu_and_what_is_shared_out():
    b = with_memory(launch_bound(2), 4)
    b.memory(6, "GPU_1_bfc", 10 * GIB, 30 * GIB, 15 * GIB)
    assert anywhere(analyze_trace(b.build()))[ID].evidence["factor"] == 2
    v = judged(busy((50, 4000, "ApplyAdamKernel", None)))  # the optimizer is shared out
    assert v.factor == 8 and v.optimizer_s == pytest.approx(4e-3) and v.compute > 0.9
    assert v.share == pytest.approx((4e-3 + v.launch_s + v.host_s) * 7 / 8 / 20e-3) and v.share > 0.17
    v = judged(reducing(5_000.0).build())  # exposed allreduces are shared out and waiting in them is not
    assert v.allreduce_s == pytest.approx(5e-3, rel=0.02)
    late = verdict(reducing(300.0, late=4_000.0), ID)
    assert late is None or late.allreduce_s == pytest.approx(0.3e-3, rel=0.1)
    assert findings(reducing(5_000.0)).keys() >= {"communication_exposed"} - {ID}


@pytest.mark.parametrize("b", [
    with_memory(launch_bound(), 20),  # twice the batch might not fit
    with_memory(launch_bound(2), 20, gpus=1),  # nor on the one GPU that is known
    with_memory(healthy(), 2),  # there is nothing that more samples would share
    healthy(),
    with_memory(input_bound(), 2),  # a larger batch would wait for input just the same
], ids=["full", "one full", "busy", "busy, memory unknown", "input"])
def test_no_headroom(b):
    assert ID not in anywhere(analyze_trace(b.build()))


def test_what_helps_against_launches_is_told_once():
    for memory, told in ((8, "up to 4×"), (None, "raise the batch size if memory allows"), (38, None)):
        b = launch_bound() if memory is None else with_memory(launch_bound(), memory)
        of_batch = [f for f in findings(b).values() if "batch size" in f.action]
        assert [f.id for f in of_batch] == (["launch_bound"] if told else [])
        assert all(told in f.action and f.action.count("batch size per GPU") == (memory == 8) for f in of_batch)


@pytest.mark.parametrize("known", [0, 1])
def test_where_memory_is_not_known_the_gain_is_told_for_twice_the_batch(known):
    a = analyze_trace(with_memory(launch_bound(2), 2, gpus=known).build())
    f = anywhere(a)[ID]
    assert all(one.id != ID for one in (*a.abstained, *a.findings))  # launch_bound has the cure
    assert f.evidence["factor"] == 2 and "capacity_bytes" not in f.evidence and f.severity == "medium"
    assert f.gain.step_time == pytest.approx(0.75 / 2, abs=0.03)


def busy(*also: tuple[float, float, str, LaunchShape | None], sms: int | None = 132) -> Trace:
    """The GPU computes from 1 ms on; ``also`` are further kernels of each step: begin, length, name, shape."""
    b = with_memory(job(), 2)
    fill(b, 0, 1000 + sum(length for _, length, *_ in also), STEP, 196, 4, queued=90)
    for i in range(STEPS):
        b.run(0, i * STEP + 5, 40, "first", launch=i * STEP)
        for begin, length, name, shape in also:
            b.run(0, i * STEP + begin, length, name, launch=i * STEP, shape=shape)
    trace = b.build()
    trace.gpus = [TraceGpu("node", 0, compute_capability=(9, 0), sms=sms)]
    return trace


def judged(trace: Trace) -> BatchSizeHeadroom:
    v = verdict(trace, ID)
    assert isinstance(v, BatchSizeHeadroom)
    return v


def test_short_kernels_with_few_blocks_fill_the_gpu():
    few = LaunchShape((16, 1, 1), (256, 1, 1), 32, 0, 1.0)
    trace = busy(*((50 + 9 * i, 8.9, "relu", few) for i in range(300)))
    v = judged(trace)
    assert v.sms == 132 and v.few_blocks_s == pytest.approx(300 * 8.9e-6)
    assert v.filled_s == pytest.approx(300 * 8.9e-6 * (1 - 1 / 8)) and v.filled_s / 20e-3 > 0.11
    f = findings(trace)[ID]
    assert "relu (16 blocks" in f.why and "132 SMs" in f.why and f.evidence["few_blocks_s"] == v.few_blocks_s
    # So few blocks that run long: whether there will be more of them is not known.
    assert verdict(busy((50, 2700, "batch_norm", few)), ID) is None
    assert verdict(busy(*((50 + 9 * i, 8.9, "relu", few) for i in range(300)), sms=None), ID) is None


def test_nothing_is_promised_that_the_input_pipeline_cannot_feed():
    def piped(cost: float) -> Trace:
        b = with_memory(launch_bound(), 2)
        for i in range(STEPS):  # a batch is always there, and making one takes so long
            b.host("Iterator::Prefetch", i * STEP + 1, 5, line="python", id=1, parent_id=0)
            b.host("IteratorGetNextOp::DoCompute", i * STEP, 8, line="python")
            b.host("Iterator::Prefetch::Map", i * STEP + 10, cost, line="tf_data_private_threadpool/1", id=2,
                   parent_id=1)
        return b.build()

    slow, fast = judged(piped(17_000.0)), judged(piped(300.0))
    assert fast.input_s is None and fast.share > 0.5
    assert slow.input_s == pytest.approx(17e-3, rel=0.05) and slow.share == pytest.approx(0.15, abs=0.05)
    assert verdict(piped(19_500.0), ID) is None


@pytest.mark.parametrize("scope", ["forward", "transpose(jvp(forward))"])
def test_a_program_of_jax_that_shows_no_gradient_has_no_batch(scope: str):
    b = with_memory(launch_bound(), 1).host("PjitFunction(f)", 5, 1).host(f"jit(f)/{scope}/dot", 7, 1)
    assert (ID in anywhere(analyze_trace(b.build()))) == ("jvp" in scope)

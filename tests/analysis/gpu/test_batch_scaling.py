"""What a larger batch shares out and fills, counted event by event."""

from __future__ import annotations

import math

import pytest

from gputop.analysis.gpu.batch_scaling import batch_scaling
from gputop.analysis.gpu.device_time import timelines
from gputop.analysis.results import BatchScaling, FewBlocks
from gputop.analysis.steps.steps import find_steps
from gputop.trace.model import TraceGpu
from tests.analysis.gpu.launch_traces import H100, HUGE, SMS, STEP, STEPS, job, on, shape
from tests.diagnosis.real_traces import needs_data, trace_of
from tests.trace.build import Builder


def scaling(b: Builder, gpu: TraceGpu = H100) -> BatchScaling:
    trace = on(b, gpu)
    (own,) = batch_scaling(trace, timelines(trace), find_steps(trace))
    return own


def test_kernels_that_leave_sms_idle() -> None:
    own = scaling(job(
        (100, 8, "short", shape(33)),  # a quarter of the SMs: filled up to 4 times the batch
        (200, 100, "norm", shape(64)),  # few blocks that run long: their number may not follow the batch
        (400, 50, "gemm", shape(SMS)),  # a block on each SM, half of what it can hold
        (500, 60, "wave", shape(3 * SMS)),  # one wave and a half
        (600, 5, "wgrad_small", shape(8)),  # its grid is the weight's
        (700, 40, "unknown", None),
        (800, 10, "full", shape(4 * SMS)),  # two waves
    ))
    assert own.sms == SMS and own.optimizer_s is None
    assert own.few_blocks_s == pytest.approx(113e-6) and own.under_one_wave_s == pytest.approx(50e-6)
    assert own.last_wave_s == pytest.approx(60e-6 * (1 - 1.5 / 2))
    assert own.filled_s == {2: pytest.approx(4e-6), 4: pytest.approx(6e-6), 8: pytest.approx(6e-6)}
    assert own.few_blocks == (FewBlocks("norm", 64, pytest.approx(100e-6), 1.0),
                              FewBlocks("short", 33, pytest.approx(8e-6), 1.0),
                              FewBlocks("wgrad_small", 8, pytest.approx(5e-6), 1.0))
    assert scaling(job((100, 80, "gemm", shape(3 * SMS)))).last_wave_s == pytest.approx(80e-6 * (1 - 1.5 / 2))
    assert scaling(job((100, 80, "ApplyAdamKernel", shape(3 * SMS)))).last_wave_s is None  # follows the weights


def test_without_shapes_or_sms_grids_are_not_judged() -> None:
    kernels = ((100.0, 8.0, "short", shape(33)), (200.0, 30.0, "ApplyAdamKernel", shape(4)))
    without_sms = TraceGpu("node", 0, compute_capability=(9, 0))
    for own in (scaling(job(*kernels), without_sms), scaling(job(*((*k[:3], None) for k in kernels)))):
        assert own == BatchScaling(0, pytest.approx(30e-6))
    # Where it is not known what an SM holds waves are not judged.
    own = scaling(job((100, 8, "short", shape(3)), (300, 80, "wave", shape(30))),
                  TraceGpu("node", 0, compute_capability=(6, 1), sms=20))
    assert own.few_blocks_s == pytest.approx(8e-6) and own.last_wave_s is own.under_one_wave_s is None


def test_an_optimizer_is_known_by_its_name_its_op_and_the_call_that_launched_it() -> None:
    b = job((100, 30, "multi_tensor_apply_kernel", shape(4)), (200, 20, "elementwise_kernel", shape(4)))
    for i in range(STEPS):
        b.run(0, i * STEP + 300, 10, "EigenMetaKernel", op="adam/truediv:RealDiv", shape=shape(4))
        b.host("Optimizer.step#SGD.step", i * STEP + 185, 10, line="launch 0")  # launches the element-wise kernel
        b.host("Optimizer.step#SGD.step", i * STEP + 85, 300, line="another thread")
    own = scaling(b)
    assert own.optimizer_s == pytest.approx(60e-6) and own.few_blocks_s == 0
    b = job((100, 30, "gemm", shape(4)), (200, 20, "elementwise_kernel", shape(4)))
    for i in range(STEPS):  # a closure runs the model in the call, and autograd's thread its backward pass
        b.host("Optimizer.step#SGD.step", i * STEP + 5, 300, line="launch 0")
        b.host("autograd::engine::evaluate_function: MmBackward0", i * STEP + 120, 30, line="autograd")
    assert scaling(b).optimizer_s == pytest.approx(20e-6) and scaling(b).few_blocks_s == pytest.approx(30e-6)


def test_what_runs_beside_other_kernels_is_not_counted_twice() -> None:
    b = job((100, 40, "few", shape(4)))
    for i in range(STEPS):
        b.run(0, i * STEP + 100, 40, "few", shape=shape(4), stream=2)
        b.run(0, i * STEP + 300, 50, "ApplyAdamKernel", shape=shape(4))
        b.run(0, i * STEP + 310, 20, "forward", shape=shape(4 * SMS), stream=2)  # this grows
    own = scaling(b)
    assert own.optimizer_s == pytest.approx(30e-6)
    assert own.few_blocks_s == pytest.approx(40e-6)


def test_only_kernels_within_steps_count_and_no_grid_is_too_large() -> None:
    b = job((100, 8, "short", shape(33)))
    b.run(0, STEPS * STEP + 5000, 8, "short", shape=shape(33))
    assert scaling(b).few_blocks_s == pytest.approx(8e-6)
    assert batch_scaling(Builder().build(), (), None) == ()
    own = scaling(job((100, 8, "huge", HUGE)))
    assert own.few_blocks_s == 0 and own.last_wave_s is not None and math.isfinite(own.last_wave_s)


@needs_data
@pytest.mark.parametrize(("name", "sms", "optimizer_s", "few_s"), [
    # Summed over the events of the JSON, by "blocks per SM" < 1 and by multi_tensor_apply; nothing overlaps there.
    ("a100", 108, 2.078278e-3, 18.338164e-3),
    ("v100", 80, 5.532802e-3, 33.800828e-3),
])
def test_real_traces(name: str, sms: int, optimizer_s: float, few_s: float) -> None:
    trace = trace_of(name)
    (own,) = batch_scaling(trace, timelines(trace), None)
    assert own.sms == sms and own.optimizer_s == pytest.approx(optimizer_s) and own.few_blocks_s == pytest.approx(few_s)
    assert own.few_blocks[0].blocks == 64 and "bn_bw" in own.few_blocks[0].name  # a block per channel

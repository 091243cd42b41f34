"""PyTorch loops that reduce or zero gradients more often than they need, or run ops that train nothing."""

from __future__ import annotations

import pytest

from gputop.core.codec import encode
from gputop.trace.model import Kind
from tests.advice.trace.traces import STEP, STEPS, findings, verdict
from tests.trace.build import Builder

ENGINE = "autograd::engine::evaluate_function: "
NCCL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
FILL = "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>>(int)"


def accumulating(passes: int, *, last_only: bool = False, reducing: float = 0.4, gpu: bool = False,
                 idle_passes: int = 0, updates: int = 1) -> Builder:
    """Steps of ``passes`` forward and backward passes of DistributedDataParallel, of which each reduces for this share
    of its time, or the last one alone; before them forward passes without a backward pass."""
    b = Builder(gpus=int(gpu))
    every = passes + idle_passes
    length = STEP * 0.9 / every
    for i in range(STEPS):
        for k in range(every):
            t = i * STEP + k * length
            b.host("DistributedDataParallel.forward", t, length * 0.3, annotation=1)
            b.host("aten::linear", t + 1, length * 0.2, sequence=i * every + k)
            if k < idle_passes:
                continue
            b.host(f"{ENGINE}AddmmBackward0", t + length * 0.4, length * 0.1, line="backward", sequence=i * every + k)
            if not last_only or k == every - 1:
                at = t + length * 0.5
                b.host("c10d::allreduce_", at, 20, line="backward")
                b.host("nccl:all_reduce" if gpu else "gloo:all_reduce", at, length * reducing, line="reducer",
                       annotation=1)
                if gpu:
                    b.run(0, at + 10, length * reducing, NCCL, kind=Kind.COLLECTIVE, launch=at + 5, thread="reducer")
            if gpu:
                b.run(0, t + 5, length * 0.4, launch=t + 2)
        for update in range(updates):
            b.host(f"Optimizer.step#SGD{update}.step", i * STEP + STEP * 0.95 + update * 200, 100, annotation=1)
    return b


@pytest.mark.parametrize("gpu", [False, True])
def test_gradients_that_are_reduced_after_each_of_eight_backward_passes(gpu: bool) -> None:
    v = verdict(accumulating(8, gpu=gpu), "accumulation_sync")
    assert v.passes == 8 and v.reductions == 1 and v.share == pytest.approx(0.4 * 0.9 * 7 / 8, abs=0.03)
    assert "no_sync" in (findings(accumulating(8, gpu=gpu))["accumulation_sync"].snippet or "")


@pytest.mark.parametrize("job", [
    accumulating(1), accumulating(8, last_only=True), accumulating(8, reducing=0.02),
    accumulating(2, idle_passes=2),  # of a GAN: the generator's passes that only make images
])
def test_gradients_that_are_reduced_once_or_for_a_short_time(job: Builder) -> None:
    assert verdict(job, "accumulation_sync") is None


def zeroing(length: float, *, lists: bool = False, passes: int = 1, gpu: bool = False) -> Builder:
    """Four parameters, each filled with zeros for so long (µs), then added to as long in each backward pass."""
    b = Builder(gpus=int(gpu))
    for i in range(STEPS):
        t = i * STEP
        b.host(f"ProfilerStep#{i}", t, STEP - 1)
        b.host("Optimizer.zero_grad#SGD.zero_grad", t + 10, 4 * length + 100, annotation=1)
        fills = [(t + 20, 4 * length)] if lists else [(t + 20 + k * length, length - 1) for k in range(4)]
        for at, of_fill in fills:
            b.host("aten::_foreach_zero_" if lists else "aten::zero_", at, of_fill)
            if gpu:
                b.run(0, at, of_fill, FILL, launch=at + 1, launch_length=1)
        for backward in range(passes):
            for k in range(4):
                at = t + 5 * length + 500 + (backward * 4 + k) * (length + 10)
                b.host("torch::autograd::AccumulateGrad", at, length + 5, line="backward")
                b.host("aten::add_", at + 1, length, line="backward")
                if gpu:
                    b.run(0, at + 2, length - 3, launch=at + 2, launch_length=1, thread="backward")
        b.host("Optimizer.step#SGD.step", t + STEP - 200, 100, annotation=1)
    return b


@pytest.mark.parametrize(("job", "share"), [
    (zeroing(400), 0.16), (zeroing(400, passes=3), 0.16),
    (zeroing(500, lists=True), 0.1),  # how many gradients there are is not known
    (zeroing(400, gpu=True), 0.16),
])
def test_zeros_cost_what_writes_them_and_what_adds_to_them(job: Builder, share: float) -> None:
    assert verdict(job, "gradients_zeroed").share == pytest.approx(share, abs=0.01)
    assert "set_to_none=True" in (findings(job)["gradients_zeroed"].snippet or "")


def test_few_zeros_and_zeros_elsewhere_are_no_finding_nor_two_optimizers_two_updates() -> None:
    assert verdict(zeroing(50), "gradients_zeroed") is None
    b = Builder(gpus=0)
    for i in range(STEPS):
        b.host(f"ProfilerStep#{i}", i * STEP, STEP - 1).host("aten::zero_", i * STEP + 10, 10_000)
    assert verdict(b, "gradients_zeroed") is None
    assert verdict(accumulating(4, updates=2), "accumulation_sync").passes == 4
    assert verdict(accumulating(1, updates=2), "accumulation_sync") is None


def training(op: str, length: float, *inside: str, gpus: int = 0) -> Builder:
    """A model of one layer and, after the optimizer, an op of that many microseconds which holds others."""
    b = Builder(gpus=gpus)
    for i in range(STEPS):
        t = i * STEP
        b.host(f"ProfilerStep#{i}", t, STEP - 1)
        b.host("aten::to", t + 10, 3000, sequence=2 * i)
        b.host("aten::linear", t + 3_100, 2_000, sequence=2 * i).host("aten::addmm", t + 3_110, 1_900, sequence=2 * i)
        b.host(f"{ENGINE}AddmmBackward0", t + 5_200, 2_500, sequence=2 * i)
        b.host("aten::mm", t + 5_300, 2_000)
        b.host("Optimizer.step#SGD.step", t + 8_000, 2_000, annotation=1).host("aten::add", t + 8_100, 1_500)
        b.host(op, t + 10_500, length, sequence=2 * i + 2)
        for number, name in enumerate(inside):
            b.host(name, t + 10_500 + number * length / len(inside), length / len(inside) - 1)
        if gpus:
            b.run(0, t + 3_200, 3_000, launch=t + 3_150)
    return b


def test_an_op_that_no_gradient_passes_through_and_a_model_that_is_evaluated() -> None:
    gap = findings(training("aten::histogram", 6_000))["step_gap_host"]
    f, = gap.consequences  # what runs between steps, of which the op is a part
    assert f.id == "ops_without_gradient" and gap.evidence["share_ratio"] == pytest.approx(0.52, abs=0.01)
    assert f.severity == "high" and f.evidence["share_ratio"] == pytest.approx(0.3, abs=0.01)
    assert f.title.endswith("aten::histogram") and [c.name for c in f.culprits] == ["aten::histogram"]
    assert b"aten::histogram" in encode(f)  # no number of NumPy's is in it
    b = training("aten::linear", 6_000, "aten::addmm")
    for i in range(STEPS):
        b.host("aten::nll_loss_nd", i * STEP + 16_600, 200)
    f = findings(b)["ops_without_gradient"]
    assert f.title == "An evaluation in each step takes 32% of it" and f.gain.claim == "about"
    assert "every tenth step" in f.action and "validate" in (f.snippet or "")


@pytest.mark.parametrize("job", [
    training("aten::histogram", 1_000),  # a metric of 5%
    training("aten::linear", 6_000, "aten::addmm"),  # a teacher
    training("aten::relu", 6_000, "aten::copy_", "aten::mm"),
    training("aten::lerp_", 6_000),  # an average of the weights
    training("aten::_foreach_norm", 6_000),  # clipping
    training("aten::multinomial", 6_000),  # an action is drawn
    training("aten::histogram", 6_000, gpus=1),
])
def test_what_is_small_or_a_model_or_an_update_or_on_a_gpu_is_not_judged(job: Builder) -> None:
    assert verdict(job, "ops_without_gradient") is None


def logging(op: str, read: str) -> Builder:
    """After the backward pass 400 small ops, each of which is followed by what Python does with it."""
    b = training("aten::zeros", 10)
    for i in range(STEPS):
        for k in range(400):
            at = i * STEP + 12_000 + k * 12
            b.host(op, at, 5).host(read, at + 6, 3)
    return b


def test_ops_that_python_runs_between_steps_are_the_gap_unless_a_model_runs_there() -> None:
    read, clipping = (logging("aten::linalg_vector_norm", op) for op in ("aten::item", "aten::mul_"))
    v = verdict(read, "ops_without_gradient")
    assert v.share == pytest.approx(400 * 12 / STEP, rel=0.1)  # with Python's way from one to the next
    gap, = (f for id_, f in findings(read).items() if id_ != "eager_execution")
    assert (gap.id, [f.id for f in gap.consequences]) == ("step_gap_host", ["ops_without_gradient"])
    assert verdict(clipping, "ops_without_gradient") is None
    assert list(findings(clipping)) == ["step_gap_host"]
    average, teacher = (verdict(training(op, 6_000), "step_gap_host") for op in ("aten::lerp_", "aten::linear"))
    assert (average.share, teacher.share) == pytest.approx((0.52, 0.22), abs=0.01)
    assert verdict(training("aten::to", 6_000), "ops_without_gradient") is None  # ops of the model have gradients

"""Kernels whose work one kernel could do: what is found, and what only looks like it."""

from __future__ import annotations

import pytest

from gputop.trace.model import LaunchShape
from tests.advice.trace.traces import STEP, STEPS, abstained, findings, job, verdict
from tests.trace.build import Builder

BMM = "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_bf16_128x128_nn_align8>(Params)"
SCALE = "void at::native::vectorized_elementwise_kernel<4, at::native::AUnaryFunctor<c10::BFloat16>>(int)"
MASK = "void at::native::elementwise_kernel<128, 4, at::native::gpu_kernel_impl_nocast<masked_fill_kernel>>(int)"
COPY = "void at::native::elementwise_kernel<128, 4, at::native::direct_copy_kernel_cuda>(int)"
SOFTMAX = "void at::native::(anonymous namespace)::cunn_SoftMaxForward<8, c10::BFloat16, SoftMaxForwardEpilogue>(int)"
SHORT = "void (anonymous namespace)::softmax_warp_forward<float, float, float, 10, {}, false>(float*, int)"
BACKWARD = "void at::native::(anonymous namespace)::cunn_SoftMaxBackward<8, float, SoftMaxBackwardEpilogue>(int)"
LAYER_NORM = "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<float>(int)"
FLASH = "void flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128, 128, 4, cutlass::bfloat16_t>>(Flash_fwd_params)"
TOP_K = "void at::native::sbtopk::gatherTopK<float, unsigned int, 2, false>(float)"
FILL = "void at::native::batch_norm_backward_kernel<float>(float)"
ADD = "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>(int)"
NORM = "void cudnn::bn_fw_inf_1C11_kernel_NCHW<float, float, true, 1>(float, float, cudnnTensorStruct, float const*)"
MULTI = "void at::native::multi_tensor_apply_kernel<TensorListMetadata<4>, FusedAdamMathFunctor<float>>(int)"
BATCH, SINGLE = LaunchShape((4, 4, 64), (256, 1, 1)), LaunchShape((64, 4, 1), (256, 1, 1))
Kernels = list[tuple[str, float]]


def model(kernels: Kernels, times: int = 4, call: str | None = None, shape: LaunchShape | None = None,
          ahead: float | None = None, pause: float = 1, ops: dict[str, str] | None = None) -> Builder:
    """Each step: these kernels, so many times, then one that fills it. ``call``: the host's, around their launches.

    They are launched ``ahead`` µs before they begin, or all at the begin of the step; then the host waits for them.
    """
    b = job()
    b.host("aten::empty" if call is None or call.startswith(("aten", "Opt")) else "other", 0, 1)
    for i in range(STEPS):
        at, launch = i * STEP + 10, i * STEP + 1.0
        for name, length in kernels * times:
            launch = launch + 0.04 if ahead is None else max(at - ahead, 1)
            b.run(0, at, length, name, launch=launch, launch_length=0.02, shape=shape, op=(ops or {}).get(name))
            if call is not None:
                b.host(call, launch - 0.01, 0.04, line="launch 0")
            at += length + pause
        launch = launch + 0.04 if ahead is None else max(at - ahead, 0)
        b.run(0, at, (i + 1) * STEP - 2 - at, FILL, launch=launch, launch_length=0.02)
        if ahead is None:
            b.host("cuStreamSynchronize", launch + 0.1, (i + 1) * STEP - 1.1 - launch, line="launch 0")
    return b


def attention(softmax: str = SOFTMAX, after: str = SCALE, before: str = BMM) -> Kernels:
    return [(before, 300), (MASK, 100), (softmax, 200), (after, 50), (BMM, 300), (COPY, 20)]


def test_attention_in_separate_kernels():
    found = findings(model(attention(), call="aten::bmm"))["attention_unfused"]
    # Between the products: mask, softmax and dropout.
    assert found.evidence["between_products_s"] == pytest.approx(4 * 350e-6) and found.evidence["attentions_count"] == 4
    assert found.evidence["softmax_s"] == pytest.approx(4 * 200e-6)
    assert found.gain.step_time == pytest.approx(0.07, rel=0.01)
    assert "scaled_dot_product" in (found.snippet or "") and "cunn_SoftMaxForward" in found.why
    # The copy of the values before the second product is not counted; the backward pass is.
    v = verdict(model(attention(after=COPY) + attention(BACKWARD), 2, "aten::baddbmm"), "attention_unfused")
    assert v.between_s == pytest.approx(2 * (300 + 350) * 1e-6) and v.count == 4 and not v.fallback


def test_attention_by_the_ops_and_the_grid_alone():
    ops = {BMM: "block/attention/scores:BatchMatMulV2", SOFTMAX: "block/attention/softmax/Softmax:Softmax"}
    own = findings(model(attention(), call="other", ops=ops))["attention_unfused"]
    assert [c.name for c in own.culprits] == ["block/attention/softmax/Softmax"]
    assert verdict(model(attention(), call="other", shape=BATCH), "attention_unfused") is not None
    # XLA's softmax has the name of its fusion or of its op
    fusion = {"input_reduce_fusion": "jit_step/attention.softmax", BMM: "jit_step/dot.1"}
    assert verdict(model(attention("input_reduce_fusion"), call="other", ops=fusion), "attention_unfused") is not None
    assert verdict(model(attention(SHORT.format("false")), call="aten::bmm"), "attention_unfused") is not None
    paced = findings(model(attention(), call="aten::bmm", ahead=4, pause=80))
    assert "launch_bound" in paced and "attention_unfused" not in paced


@pytest.mark.parametrize(("kernels", "times", "call", "shape"), [
    (attention(), 1, "aten::bmm", None),  # one softmax in a step may be that of the outputs
    (attention(), 4, "aten::addmm", None),  # products of one matrix each
    (attention(), 4, "other", SINGLE),
    (attention(), 4, "other", None),  # whether they are batched is not known
    (attention(SHORT.format("true")), 4, "aten::bmm", None),  # the logarithm, for a loss
    (attention(after=TOP_K), 4, "aten::bmm", None),  # the router of a mixture of experts
    (attention(after=LAYER_NORM), 4, "aten::bmm", None),
    (attention(before=FLASH), 4, "aten::bmm", None),
    ([(FLASH, 500), (SCALE, 100), (BMM, 200)], 4, "aten::bmm", None),
    ([(BMM, 300), (SCALE, 50), (SOFTMAX, 9), (SCALE, 2), (BMM, 300)], 4, "aten::bmm", None),  # under 3% of the step
])
def test_what_is_no_unfused_attention(kernels, times, call, shape):
    assert verdict(model(kernels, times, call, shape), "attention_unfused") is None


def test_attention_that_has_fallen_back():
    b = model(attention(), call="aten::bmm")
    b.host("aten::_scaled_dot_product_attention_math", 5, 3, line="launch 0")
    found = findings(b)["attention_unfused"]
    assert found.snippet is None and "scaled_dot_product_attention runs as separate kernels here" in found.action


TO_NHWC = "void cudnn::ops::nchwToNhwcKernel<float, float, float, false, true>(cudnn::ops::nchw2nhwc_params_t<float>)"
SWAP = "void tensorflow::functor::SwapDimension1And2InTensor3UsingTiles<unsigned int, 256, 32, 32, false>(int)"
CONVOLUTION = "sm80_xmma_fprop_implicit_gemm_tf32f32_tf32f32_f32_nhwckrsc_nhwc_tilesize128x128x16"


@pytest.mark.parametrize(("name", "op", "there"), [
    (TO_NHWC, None, True), ("batched_transpose_32x32_half", None, True),
    (SWAP, "conv1/Conv2DBackpropFilter-0-TransposeNHWCToNCHW-LayoutOptimizer:Transpose", True),
    (SWAP, "conv1/Conv2D:Conv2D", True), (SWAP, "attention/transpose:Transpose", False), (SWAP, None, False),
    (CONVOLUTION, None, False), ("loop_transpose_fusion", None, False)])
def test_layout_conversions(name, op, there):
    found = findings(model([(name, 100), (CONVOLUTION, 400)], 10, call="aten::x", ops={name: op} if op else None))
    assert ("layout_conversions" in found) == there
    if there:
        own = found["layout_conversions"]
        assert own.evidence["conversions_count"] == 10 and own.gain.step_time == pytest.approx(0.05, rel=0.02)
        assert "channels_last" in (own.snippet or "")
        assert [c.name for c in own.culprits] == [op.split(":")[0] if op else "aten::x"]


@pytest.mark.parametrize("first", [ADD, NORM])
def test_element_wise_kernels_in_rows(first):
    kernels = [(BMM, 100), (first, 80), (SCALE, 80), (MASK, 80)]
    found = findings(model(kernels, 10, call="aten::x"))["elementwise_unfused"]
    assert found.evidence["chains_count"] == 10 and found.evidence["chained_s"] == pytest.approx(2.4e-3)
    assert found.gain.step_time == pytest.approx(0.12 * 0.5, rel=0.02) and "torch.compile" in (found.snippet or "")
    pairs = model([(BMM, 100), (ADD, 120), (SCALE, 120)], 10, call="aten::x")
    compiled = model([(ADD, 80), (SCALE, 80), (MASK, 80), ("triton_poi_fused_add_0", 80)], 10, call="aten::x")
    optimizer = model([(ADD, 80), (SCALE, 80), (MASK, 80)], 10, call="Optimizer.step#SGD.step")
    for none in (pairs, compiled, optimizer):
        assert "elementwise_unfused" not in findings(none)


@pytest.mark.parametrize(("call", "op", "count", "length", "there"), [
    ("Optimizer.step#SGD.step", None, 200, 2.0, True), ("other", "adam/update_3:ResourceApplyAdam", 200, 2.0, True),
    ("Optimizer.step#SGD.step", None, 20, 2.0, False),  # few
    ("Optimizer.step#SGD.step", None, 60, 100.0, False),  # large: their time is that of the memory
    ("aten::add", None, 200, 2.0, False),
])
def test_optimizers_with_kernels_for_each_variable(call, op, count, length, there):
    found = findings(model([(ADD, length)], count, call, pause=6, ops={ADD: op} if op else None))
    assert ("optimizer_unfused" in found) == there
    if there:
        own = found["optimizer_unfused"]
        assert own.evidence["kernels_per_step"] == 200 and own.evidence["pauses_s"] == pytest.approx(199 * 6e-6)
        assert own.gain.step_time == pytest.approx((199 * 6 + 200 * 2) / STEP)
        assert ("jit_compile" if op else "fused=True") in (own.snippet or "")


def test_without_steps_or_with_fused_kernels_no_optimizer_has_too_many():
    b = Builder()
    for i in range(60):
        b.run(0, 10 + i * (20 + i % 7), 2, f"kernel_{i}", launch=1, op="adam/update:ResourceApplyAdam")
    b.host("EagerExecute", 0, 1)
    assert "optimizer" in abstained(b)["optimizer_unfused"]
    assert "optimizer_unfused" not in findings(model([(MULTI, 300)], 4, "Optimizer.step#AdamW.step"))

"""Number types and tensor cores."""

from __future__ import annotations

import pytest

from gputop.advice.registry import limit
from gputop.advice.trace.inputs import GPU_ALLOCATOR
from gputop.diagnosis.diagnose import analyze, analyze_trace
from gputop.trace.model import Kind, Trace
from tests.advice.trace.traces import KERNEL, STEP, STEPS, findings, job, launched_ahead, verdict
from tests.records import replace
from tests.trace.build import Builder
from tests.trace.shares import NEEDS_SHARED, SHARED

SGEMM, HMMA = "volta_sgemm_128x64_nn", "ampere_fp16_s16816gemm_fp16_128x128_ldg8_f2f_stages_64x3_nn"

TF32 = "cutlass::Kernel<cutlass_80_tensorop_s1688gemm_128x256_16x3_tn_align4>"
ATTENTION = "fmha_cutlassF_f32_aligned_64x64_rf_sm80(AttentionKernel<float, cutlass::arch::Sm80, true, 64, 64, 64>)"
FLASH = "void flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128, 128, 4, false, false, cutlass::half_t, float> >(int)"
TO_HALF = "void at::native::unrolled_elementwise_kernel<copy_device_to_device, c10::Half, float>(c10::Half)"


def mixed(*parts: tuple[str, float], begin: float = 100) -> Builder:
    """Steps that run these kernels for these microseconds, in pieces of 100."""
    b = job()
    for i in range(STEPS):
        t = i * STEP + begin
        for name, length in parts:
            for _ in range(round(length / 100)):
                b.run(0, t, 99, name, launch=max(t - 90, 0))
                t += 100
    return launched_ahead(b)


def on(b: Builder, capability: tuple[int, int] | None, name: str = "") -> Trace:
    trace = b.build()
    trace.gpus[:] = [replace(gpu, compute_capability=capability, name=name) for gpu in trace.gpus]
    return trace


@pytest.mark.parametrize(("matmul_us", "severity"), [(600, None), (1_100, "low"), (3_000, "medium"), (9_000, "high")])
def test_fp32_matmuls_on_a_gpu_with_tensor_cores(matmul_us, severity):
    job = mixed((SGEMM, matmul_us), (KERNEL, 18_000 - matmul_us))
    found = findings(on(job, (7, 0))).get("tensor_cores_unused")
    assert (found and found.severity) == severity
    if found:
        assert found.gain.step_time == pytest.approx(matmul_us * 0.99 / STEP * 2 / 3, rel=0.03)
        assert "mixed_float16" in (found.snippet or "") and "float32" in (found.snippet or "")


def test_gpus_by_their_capability_or_their_kernels():
    b = mixed((SGEMM, 18_000))
    assert "tensor_cores_unused" not in findings(on(b, (6, 1)))
    assert "tensor_cores_unused" not in findings(on(b, (7, 5), "NVIDIA GeForce GTX 1660"))
    assert "tensor_cores_unused" in findings(on(b, None))  # a volta_ kernel runs on Volta and newer only
    assert "TF32" in findings(on(b, (8, 0)))["tensor_cores_unused"].action
    unknown = analyze_trace(on(mixed(("maxwell_sgemm_128x64_nn", 18_000)), None))
    assert "compute capability" in {a.id: a.missing for a in unknown.abstained}["tensor_cores_unused"]
    found = findings(on(mixed((HMMA, 18_000)), (8, 0)))  # tensor cores in use are no finding
    assert not found.keys() & {"tensor_cores_unused", "fp16_fallback", "dims_unaligned"}
    f = findings(on(mixed(("volta_hgemm_128x64_nn", 6_000), (HMMA, 12_000)), (8, 0)))["fp16_fallback"]
    assert f.evidence["fallback_16_bit_ratio"] == pytest.approx(1 / 3, abs=0.01) and f.severity == "high"


@pytest.mark.parametrize(("name", "half", "id_"), [
    (HMMA, 300, "tensor_cores_unused"), (HMMA, 2_000, "fp16_fallback"),
    # Conversions and element-wise kernels prove nothing.
    ("Mul_GPU_DT_HALF_DT_HALF_kernel", 2_000, "tensor_cores_unused"), (TO_HALF, 2_000, "tensor_cores_unused"),
    ("convert_fp32_to_bf16", 2_000, "tensor_cores_unused"), ("cast_kernel_fp16", 2_000, "tensor_cores_unused")])
def test_with_mixed_precision_on_fp32_matmuls_are_a_fallback(name, half, id_):
    parts = (SGEMM, 8_000), (name, half), (KERNEL, 10_000 - half)
    found = findings(on(mixed(*parts), (8, 0)))
    assert found.keys() & {"tensor_cores_unused", "fp16_fallback"} == {id_}


@pytest.mark.parametrize(("align", "there"), [(1, True), (2, True), (4, False), (8, False)])
def test_alignment_is_read_from_names(align, there):
    name = f"void cutlass::Kernel2<cutlass_80_tensorop_f16_s16816gemm_f16_64x64_32x6_nt_align{align}>(Params)"
    found = findings(on(mixed((name, 6_000), (KERNEL, 12_000)), (8, 0)))
    assert ("dims_unaligned" in found) == there
    if there:
        assert found["dims_unaligned"].evidence["aligned_bytes"] == 2 * align
        assert found["dims_unaligned"].gain.step_time == pytest.approx(0.15, abs=0.01)


@pytest.mark.parametrize(("name", "op", "products"), [
    ("nt_align1", None, ("other matmuls",)), ("nt_align1", "model/dense/MatMul:MatMul", ("other matmuls",)),
    ("nt_align1", "model/self_attention/einsum/Einsum:Einsum", ("attention",)),
    ("nt_align1", "model/scores:BatchMatMulV2", ("attention",)), ("nt_align1", "model/conv1:Conv2D", ("convolutions",)),
    ("fprop_nhwc_align1", None, ("convolutions",)), ("fmha_align1", None, ("attention",))])
def test_the_dimension_that_is_not_aligned_is_that_of_the_layer(name, op, products):
    kernel = f"void cutlass::Kernel2<cutlass_80_tensorop_f16_s16816gemm_f16_64x64_32x6_{name}>(Params)"
    b = mixed((KERNEL, 9_000))
    for i in range(STEPS):
        b.run(0, i * STEP + 10_000, 9_000, kernel, op=op)
    assert verdict(on(b, (8, 0)), "dims_unaligned").products == products


@pytest.mark.parametrize(("kernel", "multiple"), [
    ("cutlass::Kernel<cutlass_80_tensorop_s1688gemm_128x128_16x5_nt_align1>", 4),  # TF32: 16 bytes are four numbers
    ("cutlass::Kernel<cutlass_80_tensorop_f16_s16816gemm_f16_64x64_32x6_nt_align1>", 8)])
def test_the_multiple_is_that_of_the_type(kernel, multiple):
    found = findings(on(mixed((KERNEL, 9_000), (kernel, 9_000)), (8, 0)))["dims_unaligned"]
    assert f"a multiple of {multiple} (16 bytes)" in found.why and f"to multiples of {multiple} (64" in found.action


def test_padding_the_vocabulary_is_not_advised_for_attention_nor_where_names_do_not_tell():
    kernel = "void cutlass::Kernel2<cutlass_80_tensorop_f16_s16816gemm_f16_64x64_32x6_nt_align1>(Params)"
    b = mixed((KERNEL, 9_000), (kernel, 9_000))
    for event in b._device:
        event["op"] = "gradient_tape/model/self_attention/einsum/Einsum:Einsum" if event["name"] == kernel else None
    found = findings(on(b, (8, 0)))["dims_unaligned"]
    assert "sequence" in found.action and "does not change attention" in found.action
    assert found.snippet is not None and "vocabulary" not in found.snippet
    a = analyze_trace(on(mixed(("nvjet_tst_192x192_64x4_2x1_v_bz_coopB_TNT", 18_000)), (9, 0)))
    assert "dims_unaligned" in {x.id for x in a.abstained}


PRECISION = {"tensor_cores_unused", "sixteen_bit_unused", "fp16_fallback"}


@pytest.mark.parametrize(("name", "severity", "factor", "title"), [
    (ATTENTION, "high", "precision.speedup", "Attention in FP32 takes"),
    (TF32, "low", "precision.tf32_speedup", "Matrix kernels in TF32 take")])
def test_products_in_32_bits_on_tensor_cores_could_be_in_16(name, severity, factor, title):
    b = mixed((name, 10_000), (KERNEL, 8_000))
    for capability in ((8, 0), None):  # known, or by the kernel's own name
        found = findings(on(b, capability))
        assert found.keys() & PRECISION == {"sixteen_bit_unused"}
        own = found["sixteen_bit_unused"]
        assert own.severity == severity and "BF16" in own.action and own.title.startswith(title)
        assert own.gain.step_time == pytest.approx(0.5 * (1 - 1 / limit(factor)), abs=0.01)
    assert not findings(on(b, (6, 1))).keys() & PRECISION


def test_products_in_16_bits_are_left_alone_and_so_is_what_mixed_precision_leaves_out():
    assert not findings(on(mixed((FLASH, 9_000), (HMMA, 9_000)), (8, 0))).keys() & PRECISION
    v = verdict(on(mixed((HMMA, 4_000), (ATTENTION, 12_000)), (8, 0)), "tensor_cores_unused")
    assert v.id == "sixteen_bit_unused" and v.mixed and v.plain_fp32 == 0


@pytest.mark.skipif(not SHARED.exists(), reason=NEEDS_SHARED)
def test_attention_in_fp32_is_what_the_step_is_made_of():
    found = {f.id: f for f in analyze(str(SHARED / "cases" / "fp32_attention_tf32.pt.trace.json.gz")).findings}
    own = found["sixteen_bit_unused"]
    assert own.severity == "high" and own.gain.step_time == pytest.approx(0.69, abs=0.06)  # 69% on the real job
    assert "torch.autocast" in (own.snippet or "") and not found.keys() & {"fp16_fallback", "tensor_cores_unused"}


@pytest.mark.skipif(not SHARED.exists(), reason=NEEDS_SHARED)
def test_conversions_to_half_are_not_mixed_precision():
    analysis = analyze(str(SHARED / "cases" / "fp32_with_half_codec.pt.trace.json.gz"))
    assert {f.id for f in analysis.findings} & PRECISION == {"tensor_cores_unused"}
    assert analysis.kernels is not None and not any("fp64" in row.types for row in analysis.kernels.by_name)


def test_numbers_in_names_have_few_digits() -> None:
    """int() refuses more than 4,300: a trace with such a name was not analyzed."""
    analysis = analyze_trace(on(mixed((TF32.replace("align4", "align" + "8" * 5000), 18_000)), (8, 0)))
    assert analysis.kernels is not None and analysis.kernels.by_name
    assert GPU_ALLOCATOR.match(f"GPU_{'1' * 5000}_bfc") is None and GPU_ALLOCATOR.match("GPU_12_bfc")


# -- loss scaling -----------------------------------------------------------------------------------

def scaled(checks: int, op: str, wait: float = 0) -> Builder:
    """The host launches all up to the verdict at once, waits for its copy, and needs ``wait`` µs to launch on."""
    b = job()
    for i in range(STEPS):
        t, launch = i * STEP + 100, i * STEP + 20
        for k in range(80 + checks):
            name, length, of = (("Mul_GPU_DT_HALF_DT_HALF_kernel", 100, "gradient_tape/model/mul:Mul") if k < 80 else
                                ("IsFinite_GPU_DT_HALF_DT_BOOL_kernel", 10, f"{op}_{k}:IsFinite"))
            b.run(0, t, length, name, launch=launch + 2 * k, launch_length=1, op=of)
            t += length
        if wait:
            begun = launch + 2 * (80 + checks)
            b.run(0, t, 2, "MemcpyD2H", kind=Kind.D2H, launch=begun, launch_length=t + 4 - begun, size=1,
                  op="loss_scale/cond:If")
            t += 2 + wait
        then = t - 20 if wait else launch + 2 * (80 + checks)
        for k in range(80):
            b.run(0, t, 100, "Mul_GPU_DT_HALF_DT_HALF_kernel", launch=then + k, launch_length=1)
            t += 100
        b.host("cuStreamSynchronize", then + 81, t + 1 - then - 81, line="launch 0")
    return b


@pytest.mark.parametrize(("checks", "wait", "share"), [(20, 0, None), (120, 0, 0.06), (40, 600, 0.05)])
def test_loss_scaling_counts_its_checks_and_the_wait_for_the_verdict(checks, wait, share):
    found = findings(on(scaled(checks, "loss_scale_optimizer/IsFinite", wait), (7, 0)))
    if share is None:
        assert "loss_scaling" not in found
    else:
        f = found["loss_scaling"]
        assert f.gain.step_time == pytest.approx(share, abs=0.006)
        assert (f.evidence["verdict_wait_s"] > 0) == bool(wait)


def test_newer_gpus_are_advised_to_use_bfloat16():
    job = scaled(120, "loss_scale_optimizer/IsFinite")
    assert [verdict(on(job, capability), "loss_scaling").has_bf16 for capability in ((7, 0), (8, 0))] == [False, True]
    assert "BF16" in findings(on(job, (8, 0)))["loss_scaling"].action

"""Number types and tensor cores."""

from __future__ import annotations

import pytest

from gputop.diagnosis.diagnose import analyze_trace
from gputop.trace.model import Trace
from tests.advice.trace.traces import KERNEL, STEP, STEPS, findings, job, launched_ahead
from tests.records import replace
from tests.trace.build import Builder

SGEMM, HMMA = "volta_sgemm_128x64_nn", "ampere_fp16_s16816gemm_fp16_128x128_ldg8_f2f_stages_64x3_nn"


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


def test_tensor_cores_in_use_are_no_finding():
    found = findings(on(mixed((HMMA, 18_000)), (8, 0)))
    assert not found.keys() & {"tensor_cores_unused", "fp16_fallback", "dims_unaligned"}


@pytest.mark.parametrize(("half", "id_"), [(300, "tensor_cores_unused"), (2_000, "fp16_fallback")])
def test_with_mixed_precision_on_fp32_matmuls_are_a_fallback(half, id_):
    parts = (SGEMM, 8_000), ("Mul_GPU_DT_HALF_DT_HALF_kernel", half), (KERNEL, 10_000 - half)
    found = findings(on(mixed(*parts), (8, 0)))
    assert found.keys() & {"tensor_cores_unused", "fp16_fallback"} == {id_}


def test_sixteen_bit_matmuls_of_the_ordinary_cores_are_a_fallback():
    f = findings(on(mixed(("volta_hgemm_128x64_nn", 6_000), (HMMA, 12_000)), (8, 0)))["fp16_fallback"]
    assert f.evidence["fallback_16_bit_ratio"] == pytest.approx(1 / 3, abs=0.01) and f.severity == "high"


@pytest.mark.parametrize(("align", "there"), [(1, True), (2, True), (4, False), (8, False)])
def test_alignment_is_read_from_names(align, there):
    name = f"void cutlass::Kernel2<cutlass_80_tensorop_f16_s16816gemm_f16_64x64_32x6_nt_align{align}>(Params)"
    found = findings(on(mixed((name, 6_000), (KERNEL, 12_000)), (8, 0)))
    assert ("dims_unaligned" in found) == there
    if there:
        assert found["dims_unaligned"].evidence["aligned_bytes"] == 2 * align
        assert found["dims_unaligned"].gain.step_time == pytest.approx(0.15, abs=0.01)


def test_alignment_that_names_do_not_tell_is_not_judged():
    a = analyze_trace(on(mixed(("nvjet_tst_192x192_64x4_2x1_v_bz_coopB_TNT", 18_000)), (9, 0)))
    assert "dims_unaligned" in {x.id for x in a.abstained}

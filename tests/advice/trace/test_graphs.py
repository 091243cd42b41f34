"""CUDA graphs, and jobs that run a model without training it."""

from __future__ import annotations

import pytest

from gputop.advice.trace.job import Job
from gputop.advice.trace.launch import launch_pace_s
from gputop.diagnosis.diagnose import analyze, analyze_to_facts, analyze_trace
from tests.advice.trace.traces import STEP, STEPS, findings, verdict
from tests.trace.build import Builder
from tests.trace.shares import NEEDS_SHARED, SHARED

LOOP = "python"
ADD = "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>(int)"
ADAM = "void at::native::multi_tensor_apply_kernel<Metadata<4>, FusedAdamMathFunctor<float>>(int)"
COPY = "void at::native::multi_tensor_apply_kernel<Metadata<2>, CopyFunctor<c10::BFloat16>>(int)"
GEMM = "ampere_bf16_s16816gemm_bf16_64x64_sliced1x2_ldg8_f2f_stages_64x6_tn"


def recorded(each: int = 1, record_us: float = 4_000.0, last: str = ADAM, steps: int = STEPS) -> Builder:
    """Steps of 20 ms, one in ``each`` of which records its graph for so long before it launches it."""
    b = Builder()
    for i in range(steps):
        t = i * STEP
        b.host(f"ProfilerStep#{i}", t, STEP - 1, line=LOOP)
        if i % each == 0:
            b.host("cudaStreamBeginCapture", t + 100, 20, line=LOOP)
            b.host("cudaStreamEndCapture", t + record_us - 300, 20, line=LOOP)
            b.host("cudaGraphInstantiate", t + record_us - 200, 300, line=LOOP)
        b.host("cudaGraphLaunch", t + record_us + 200, 10, line=LOOP)
        for k in range(40):
            at = t + record_us + 220 + k * 380
            b.run(0, at, 370, (GEMM, ADD)[k % 2] if k < 39 else last, launch=t + record_us + 201, launch_length=8,
                  thread=LOOP)
    return b


def test_a_graph_recorded_anew_in_each_step_and_one_without_a_pace() -> None:
    v = verdict(recorded(), "graph_recapture")
    assert v.recorded == pytest.approx(1.0) and v.recording_s == pytest.approx(4.0e-3, rel=0.01)
    assert v.share == pytest.approx(1 / 6, abs=0.02)  # before the first event of all a GPU is not called idle
    found = findings(recorded())
    assert found["graph_recapture"].severity == "high" and "launch_bound" not in found
    assert "torch.cuda.graph" in (found["graph_recapture"].snippet or "")
    assert launch_pace_s(analyze_to_facts(recorded().build())) == (None, None)  # the kernels of a graph have no pace
    b = Builder()
    for k in range(40):
        b.run(0, 100 + 50 * k, 20, GEMM, launch=50 + 50 * k)
    assert launch_pace_s(analyze_to_facts(b.build()))[0] == pytest.approx(50e-6)


@pytest.mark.parametrize("job", [recorded(each=STEPS), recorded(each=3), recorded(record_us=600.0)])
def test_a_graph_recorded_once_or_now_and_then_or_quickly(job: Builder) -> None:
    assert verdict(job, "graph_recapture") is None


def small(last: str) -> Builder:
    """A graph of short kernels with pauses in each step."""
    b = Builder()
    for i in range(STEPS):
        t = i * 2_000.0
        b.host(f"ProfilerStep#{i}", t, 1_999, line=LOOP)
        b.host("aten::copy_", t + 5, 5, line=LOOP)
        b.host("cudaGraphLaunch", t + 20, 10, line=LOOP)
        for k in range(150):
            b.run(0, t + 40 + k * 13, 8, GEMM if k < 149 else last, launch=t + 21, launch_length=8, thread=LOOP)
        b.host("cudaDeviceSynchronize", t + 40, 1_945, line=LOOP)
    return b


@pytest.mark.parametrize(("last", "trains"), [(COPY, False), (ADAM, True)])
def test_where_a_graph_runs_no_advice_records_one(last: str, trains: bool) -> None:
    analysis = analyze_trace(small(last).build())
    found = {f.id: f for f in analysis.findings}
    assert found.keys() & {"small_kernels", "launch_bound"}
    for f in found.values():
        words = f"{f.why} {f.action} {f.snippet}"
        assert "reduce-overhead" not in words and "every 0 s" not in words
        assert trains or "optimizer" not in words
    facts = analyze_to_facts(small(last).build())
    job = Job.of(facts)
    assert job.graphs and job.trains is trains


@pytest.mark.skipif(not SHARED.exists(), reason=NEEDS_SHARED)
def test_inference_with_a_graph_and_copied_inputs() -> None:
    analysis = analyze(str(SHARED / "cases" / "graph_inference_foreach_copy.pt.trace.json.gz"))
    assert analysis.steps is not None and "optimizer" not in analysis.steps.anchor
    several = [*analysis.findings, *(own for f in analysis.findings for own in f.consequences)]
    assert several and not {f.id for f in several} & {
        "batch_size_headroom", "optimizer_unfused", "loss_scaling", "graph_recapture"}
    for f in several:
        words = f"{f.title} {f.why} {f.action} {f.snippet}"
        assert not any(word in words for word in ("optimizer", "train in", "every 0 s", "reduce-overhead")), words

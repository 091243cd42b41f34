"""Jobs that run a model without training it: by what they run, and what they are told."""

from __future__ import annotations

import re

import pytest

from gputop.advice.trace.job import Job
from gputop.diagnosis.diagnose import analyze_to_facts, analyze_trace
from gputop.text.units import seconds
from gputop.trace.model import Trace
from tests.trace.build import Builder

LOOP = "python"
CACHE = "void vllm::reshape_and_cache_flash_kernel<__nv_bfloat16, unsigned char>(__nv_bfloat16 const*)"
APPLY = "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<Metadata<2>, "
GEMM = "nvjet_tst_192x192_64x4_2x1_v_bz_coopB_TNT"


def decoding(*names: str, host: tuple[str, ...] = (), format: str = "chrome", tokens: int = 12, layers: int = 8,
             ) -> Trace:
    """A server's decode steps without marks: layers of short kernels, each launched by itself, 40 µs apart."""
    b = Builder(format=format)
    for event in host:
        b.host(event, 0, 5, line=LOOP)
    at = 10.0
    for _ in range(tokens):
        for _ in range(layers):
            for name in (GEMM, CACHE, *names):
                b.host("aten::linear" if name == GEMM else "_C_cache_ops::reshape_and_cache_flash", at, 30, line=LOOP)
                b.run(0, at + 12, 6, name, launch=at + 5, launch_length=5, thread=LOOP)
                at += 40
    b.host("aten::addmm", at + 40_000, 30, line=LOOP)  # the next request
    b.run(0, at + 40_012, 6, GEMM, launch=at + 40_005, thread=LOOP)
    return b.build()


@pytest.mark.parametrize(("name", "trains"), [
    (f"{APPLY}UnaryOpFunctor<long, 2, 1, 1>, std::plus<long> >(int)", False),  # counters
    (f"{APPLY}UnaryOpFunctor<c10::BFloat16, 2, 1, 1>, at::native::Copy<float, float> >(int)", False),  # inputs
    (f"{APPLY}UnaryOpFunctor<c10::BFloat16, 2, 1, 1>, at::native::Identity<float> >(int)", False),
    ("xmma_cudnn::implicit_gemm::strided_dgrad_indexed::kernel_helper_stage_0", False),  # a transposed convolution
    (f"{APPLY}FusedAdamMathFunctor<float>>(int)", True),
    ("sm80_xmma_wgrad_implicit_gemm_bf16", True), ("flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel", True),
])
def test_kernels_tell_whether_a_job_trains(name: str, trains: bool) -> None:
    assert Job.of(analyze_to_facts(decoding(name))).trains is trains


@pytest.mark.parametrize("host", [
    "torch/autograd/function.py(39): save_for_backward", "torch/optim/adamw.py(12): <module>",
    "<built-in method apply of FunctionMeta object>", "nn.Module: LoraAdamAdapter"])
def test_functions_of_python_do_not_train(host: str) -> None:
    assert Job.of(analyze_to_facts(decoding(host=(host,)))).trains is False


def test_a_job_that_also_serves_trains_and_one_marked_step_of_a_server_is_a_step() -> None:
    backward = decoding(host=("autograd::engine::evaluate_function: AddmmBackward0",))
    assert Job.of(analyze_to_facts(backward)).trains is True
    found = analyze_trace(serving("p", "step[EXTEND bs=15 toks=15360]", ""))  # one marked step of a server is a step
    assert found.steps is not None and found.steps.count == 1
    assert found.steps.anchor.startswith("ranges of an inference engine's steps that prefill")


@pytest.mark.parametrize(("host", "server"), [
    ("vllm/model_executor/layers/linear.py(234): apply", "vLLM"),
    ("/sgl-workspace/sglang/python/sglang/srt/layers/linear.py(3): forward", "SGLang"),
    ("model.py(3): forward", "vLLM")])
def test_the_server_is_named(host: str, server: str) -> None:
    facts = analyze_to_facts(decoding(host=(host,)))
    assert Job.of(facts).server == server


def serving(steps: str, prefill: str, decode: str) -> Trace:
    """A server's marked steps, "p" or "d": a prompt takes 40 ms, a token 4 ms, its kernels half of it."""
    b, at = Builder(format="chrome"), 1_000.0
    b.host("vllm/v1/worker/gpu_model_runner.py(1): execute_model", 0, 5, line=LOOP)
    for step in steps:
        name, kernels, length = (prefill, 30, 1_200.0) if step == "p" else (decode, 50, 40.0)
        b.host(name, at, kernels * length * 4 / 3 if step == "p" else 3_900, line=LOOP, annotation=1)
        for _ in range(kernels):
            b.host("aten::linear", at + 5, 30, line=LOOP)
            b.run(0, at + 12, length, GEMM, launch=at + 6, launch_length=5, thread=LOOP)
            at += length * (4 / 3 if step == "p" else 2)
    return b.build()


@pytest.mark.parametrize(("prefill", "decode"), [
    ("execute_8192_context_9(sq8155sk8430)_generation_0(sq0sk0)", "execute_37_context_0(sq0sk0)_generation_37(sq37)"),
    ("execute_context_2(512)_generation_5(5)", "execute_context_0(0)_generation_16(16)"),
    ("execute_new_2_cached_0", "execute_new_0_cached_16"), ("step[EXTEND bs=15 toks=15360]", "step[DECODE bs=16]")])
def test_prefill_and_decode_are_judged_apart(prefill: str, decode: str) -> None:
    for steps, name, count, step_s, other, other_s in (
            ("ddddpddddddddpdddd" * 2, "prefill", 4, 0.048, "decode", 0.128),
            ("ddddpdddddddddddddddddddd", "decode", 23, 0.004, "prefill", 0.048)):
        found = analyze_trace(serving(steps, prefill, decode))
        assert found.steps is not None and found.wall_time is not None
        assert found.steps.anchor == f"ranges of an inference engine's steps that {name}"
        assert (found.steps.count, found.steps.mean_s) == (count, pytest.approx(step_s, rel=0.02))
        times = {part.id: part.time_s for part in found.wall_time.parts}
        assert times["steps"] == pytest.approx(count * step_s, rel=0.02)
        assert times[other] == pytest.approx(other_s, rel=0.02)
        assert any(f"also contains {seconds(found.steps.left_out_s[other])} of {other}" in note.message
                   for note in found.trace.quality)


def test_a_server_is_not_told_how_to_train() -> None:
    analysis = analyze_trace(decoding(host=("vllm/v1/worker/gpu_model_runner.py(1): execute_model",)))
    ids = {own.id for f in analysis.findings for own in (f, *f.consequences)}
    assert "launch_bound" in ids
    assert not ids & {"unfinished_step", "time_outside_steps", "batch_size_headroom", "optimizer_unfused"}
    for f in analysis.findings:
        words = f"{f.title} {f.why} {f.action} {f.snippet}"
        assert not re.search("train|epoch|gradient|optimizer|DataLoader", words), words
        if f.id == "launch_bound":
            assert "vllm serve" in (f.snippet or "") and "CUDA graphs" in f.action


def test_layers_of_a_period_have_no_unfinished_step_and_no_graph_recorded_again() -> None:
    analysis = analyze_trace(decoding())
    assert analysis.steps is None or analysis.steps.unit == "period"
    assert analysis.wall_time is not None and not {part.id for part in analysis.wall_time.parts} & {"open"}
    assert not {f.id for f in analysis.findings} & {"unfinished_step", "graph_recapture", "time_outside_steps"}


def test_a_model_that_only_runs_on_a_cpu_does_not_train() -> None:
    """A loop over a DataLoader that evaluates, without a GPU: neither an optimizer nor training is named."""
    b = Builder(gpus=0, format="chrome")
    for i in range(30):
        b.host("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", i * 10_000, 3_000, line=LOOP)
        b.host("aten::linear", i * 10_000 + 3_100, 1_000, line=LOOP)
    trace = b.build()
    assert Job.of(analyze_to_facts(trace)).trains is False
    findings = {finding.id: finding for finding in analyze_trace(trace).findings}
    assert {"step_gap_host", "input_bound"} <= set(findings)
    said = " ".join(f"{f.title} {f.why} {f.action}" for f in findings.values())
    assert not re.search(r"optimizer|training loop|trains|epoch", said), said
    b.host("autograd::engine::evaluate_function: AddmmBackward0", 5_000, 100, line=LOOP)
    assert Job.of(analyze_to_facts(b.build())).trains is True

"""Waiting for launches, and kernels that are too small."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from gputop.diagnosis.diagnose import analyze_trace
from gputop.trace.model import Trace
from tests.advice.trace.traces import STEP, STEPS, abstained, fill, findings, input_bound, job, launch_bound, uneven
from tests.trace.build import Builder


@pytest.mark.parametrize("gpus", [1, 4])
def test_launch_bound(gpus):
    found = findings(launch_bound(gpus))
    assert set(found) == {"launch_bound"}
    f = found["launch_bound"]
    assert f.severity == "high" and f.gpus == tuple(range(gpus))
    # Keras does not compile steps under tf.distribute.
    assert ("jit_compile" if gpus == 1 else "auto_jit") in (f.snippet or "")
    assert f.evidence["kernel_median_s"] == pytest.approx(10e-6)
    if gpus == 1:
        assert f.evidence["launch_pace_s"] == pytest.approx(40e-6) and "40.0 µs" in f.why
    assert f.gain.step_time == pytest.approx(0.75, abs=0.03)


@pytest.mark.parametrize(("ops", "kernel_us", "expected_s"), [
    (5000, 10, 0.75 * 5000 * 0.4e-6 + 500 * 14e-6), (500, 10, 0.75 * 500 * 0.4e-6 + 500 * 14e-6), (500, 100, None)])
def test_time_that_pytorchs_profiler_takes_itself(ops, kernel_us, expected_s):
    """A launch for each kernel and its pause; to record an op takes the host 0.4 µs, a launch 14 µs."""
    b = Builder(gpus=1)
    fill(b, 0, 0, STEP, kernel_us, 3 * kernel_us)
    for i in range(STEPS):
        b.host(f"ProfilerStep#{i}", i * STEP, STEP, line="launch 0")
        for op in range(ops):
            b.host("aten::add", i * STEP + op * STEP / ops, 2, line="launch 0")
    f = findings(b)["launch_bound"]
    assert ("profiler overhead" in f.why) == ("recording_s" in f.evidence) == (expected_s is not None)
    if expected_s is not None:
        assert f.evidence["recording_s"] == pytest.approx(expected_s, rel=0.1)


def test_recording_a_launch_takes_no_longer_than_the_next_one_comes_after_it():
    b = Builder(gpus=1)
    for i in range(STEPS):
        b.host(f"ProfilerStep#{i}", i * STEP, STEP, line="launch 0").host("aten::add", i * STEP, 2, line="launch 0")
        for k in range(500):  # bursts of five
            at = i * STEP + 200 * (k // 5) + 4 * (k % 5)
            b.run(0, at + 3, 0.5, f"k{k % 7}", launch=at, launch_length=2)
    assert findings(b)["launch_bound"].evidence["recording_s"] == pytest.approx(500 * 4e-6, rel=0.1)


def test_idle_of_other_causes_is_not_launching():
    b = job()
    fill(b, 0, 0, STEP, 10, 30, queued=15_000)
    assert "launch_bound" not in findings(b)
    assert "launch_bound" not in findings(input_bound())  # idle that input explains is not launching
    assert "launch_bound" not in findings(uneven(2, 3.0))  # idle behind a busier GPU is not launching
    b = Builder()  # host work between steps is not launching
    for i in range(6):
        b.host("EagerExecute", i * 20_000, 8_000, is_func=1, eager_op="__inference_multi_step_on_iterator_42")
    fill(b, 0, 20, 8_000, 196, 4, queued=15)
    a = analyze_trace(b.build())
    assert a.breakdown is not None and a.breakdown.host > 0.5 * a.breakdown.total
    assert "launch_bound" not in {f.id for f in a.findings}


def test_launch_abstains_without_launches():
    b = job()
    for i in range(STEPS * 100):
        b.run(0, i * 200, 100, "add")
    a = analyze_trace(b.build())
    assert "correlation" in abstained(a)["launch_bound"] and not a.findings


def test_a_model_that_torch_compile_has_compiled_is_not_told_to_be_compiled():
    def snippet(*calls: str) -> tuple[str, str]:
        b = Builder(format="chrome")
        for i in range(STEPS):
            b.host(f"ProfilerStep#{i}", i * STEP, STEP - 1, line="thread 1", step_num=i)
            for call in ("aten::linear", *calls):
                b.host(call, i * STEP + 10, 20, line="thread 1")
        fill(b, 0, 50, STEP, 10, 30)
        f = findings(b)["launch_bound"]
        return f.action, f.snippet or ""

    assert "already compiled" not in snippet()[0] and "torch.compile(model" in snippet()[1]
    for call in ("Torch-Compiled Region: 0/0", "CompiledFunction"):
        action, code = snippet(call)
        assert "already compiled" in action and "graph_breaks" in code


@pytest.mark.parametrize(("length", "graphs"), [(STEP - 200, True), (STEP // 4, False)])
def test_waits_in_compiled_code_are_shortened_by_graphs_and_not_by_compiling_more(length, graphs):
    b = Builder(format="chrome")
    for i in range(STEPS):
        b.host(f"ProfilerStep#{i}", i * STEP, STEP - 1, line="launch 0", step_num=i)
        b.host("Torch-Compiled Region: 0/0", i * STEP + 60, length, line="launch 0")
        for k in range(3):
            b.host("cudaStreamSynchronize", i * STEP + STEP - 90 + 20 * k, 15, line="launch 0")
    fill(b, 0, 50, STEP, 10, 30)
    f = findings(b)["launch_bound"]
    assert ("replay CUDA graphs" in f.action) == graphs == ("reduce-overhead" in (f.snippet or ""))
    assert ("graph_breaks" in (f.snippet or "")) != graphs


def test_a_jitted_function_is_not_told_to_be_jitted():
    b = Builder()
    for i in range(STEPS):
        b.host("PjitFunction(train_step)", i * STEP, STEP - 50)
    fill(b, 0, 50, STEP, 10, 30)
    f = findings(b)["launch_bound"]
    assert "jax.jit" not in (f.snippet or "") and "scan" in (f.snippet or "") and "already compiled" in f.action


@pytest.mark.parametrize("waits", [False, True])
def test_a_program_of_cuda_alone_is_told_of_graphs_and_of_its_waits(waits):
    b = Builder(format="nsys")
    for i in range(500):
        b.run(0, i * 60 + 10, 20, "Fan1(float *, int)", launch=i * 60)
        if waits:
            b.host("cudaThreadSynchronize_v3020", i * 60 + 6, 26, line="launch 0")
    f = findings(b)["launch_bound"]
    assert "CUDA graph" in f.action and "compile" not in f.action and "batch" not in f.action
    assert f.action.startswith("Let the host wait") == waits


@pytest.mark.parametrize("before", [0, 400_000])
def test_layers_that_run_for_a_moment_of_the_recording_bring_no_verdict(before):
    b = Builder(format="chrome").host("aten::randperm", 0, 100, line="launch 0")
    for i in range(12):
        for k in range(20):
            at = before + 500 + (i * 20 + k) * 100
            b.host(f"aten::op{k}", at, 30, line="launch 0").run(0, at + 20, 10, f"kernel_{k}", launch=at + 5)
    analysis = analyze_trace(b.build())
    assert analysis.steps is not None and analysis.steps.unit == "period"
    found = findings(analysis)["launch_bound"]
    assert found.severity == ("low" if before else "high")


def many(kernel: float, gap: float) -> Builder:
    b = job()
    for i in range(STEPS):
        t = i * STEP + 100
        while t + kernel < (i + 1) * STEP:
            b.run(0, t, kernel, "add", launch=max(t - 500, 0), launch_length=2)
            t += kernel + gap
    return b


@pytest.mark.parametrize(("kernel", "gap", "there"), [(10, 2, True), (10, 0.2, False), (30, 4, False)])
def test_pauses_between_short_kernels(kernel, gap, there):
    found = findings(many(kernel, gap).build())
    assert set(found) == ({"small_kernels"} if there else set())
    if there:
        f = found["small_kernels"]
        assert f.gain.step_time == pytest.approx(gap / (kernel + gap), abs=0.01) and f.severity == "high"
        assert f.evidence["below_20us_ratio"] == 1 and f.evidence["launch_pace_s"] == pytest.approx(12e-6)


def test_pauses_between_kernels_that_make_a_batch_are_those_of_the_wait_for_it():
    b = many(10, 2)
    for i in range(STEPS):
        b.host("IteratorGetNextOp::DoCompute", i * STEP + 100, STEP - 200, line="tf_Compute/1")
    assert "small_kernels" not in {id_ for f in findings(b.build()).values() for id_ in f.ids}


def test_kernels_per_step_are_those_of_the_steps_where_the_window_is_longer():
    def kernels_of(b: Builder) -> float:
        return findings(b.build())["small_kernels"].evidence["kernels_per_step"]

    b = many(10, 2)
    alone = kernels_of(b)
    b.run(0, 20 * STEPS * STEP, 10, "add")  # something else long after the last step
    assert kernels_of(b) == pytest.approx(alone) and alone > 100


def on_gpu(capability: tuple[int, int], framework: str = "aten::add") -> Trace:
    """Short kernels with pauses, launched by ops of PyTorch or by a program of one's own."""
    b = Builder(gpus=1)
    fill(b, 0, 0, STEP, 10, 30)
    for i in range(STEPS):
        b.host(f"ProfilerStep#{i}" if framework == "aten::add" else "work", i * STEP, STEP, line="launch 0")
        b.host(framework, i * STEP, 2, line="launch 0")
    trace = b.build()
    trace.gpus[:] = [replace(gpu, compute_capability=capability) for gpu in trace.gpus]
    return trace


def test_gpus_that_torch_compile_does_not_know():
    old, new = (findings(on_gpu(capability))["launch_bound"] for capability in ((6, 0), (7, 0)))
    assert "torch.compile" in (new.snippet or "") and old.snippet is None
    assert "CUDA graph" in old.action and "compile" not in old.action


def test_a_program_without_a_framework_has_no_batch_and_no_layers():
    found = findings(on_gpu((8, 6), "cudaLaunchKernel"))
    f = found.get("small_kernels") or next(c for f in found.values() for c in f.consequences if c.id == "small_kernels")
    assert f.action.endswith("fuse them, or record them once as a CUDA graph.")
    below = {c.id for f in found.values() for c in f.consequences}
    assert "batch_size_headroom" not in found.keys() | below

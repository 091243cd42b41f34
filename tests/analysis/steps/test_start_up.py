"""A job's start, told from work that returns."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest

from gputop.analysis.steps.compilations import CUDNN, rebuilt, trials
from gputop.analysis.steps.start_up import start_end_ns, start_up_spans, up_to_profilers_stop, what_started
from gputop.analysis.steps.steps import find_steps
from gputop.core.captured_samples import JobCpus
from gputop.diagnosis.diagnose import analyze_trace
from gputop.trace.model import Kind
from gputop.trace.readers.load import load
from tests.trace.build import Builder

CASES = Path(__file__).resolve().parents[4] / "shared" / "data" / "cases"
REDZONE = "void redzone_checker(unsigned char*, unsigned char, unsigned long, unsigned long*)"


def functions(trace):
    """Functions that are traced or compiled again and again: name, in how many calls, and how many calls."""
    return [(function.name, function.built, function.calls) for function in rebuilt(trace)]


def launches(first: tuple[float, ...], count: int = 200, pace: float = 100.0, *, kernels: int = 20,
             long_later: float = 0.0) -> Builder:
    """``count`` short launch calls of ``kernels`` kernels in turn; the first calls take so long, and every fiftieth of
    the later ones ``long_later``."""
    b, at = Builder(gpus=1), 0.0
    for i in range(count):
        length = first[i] if i < len(first) else long_later if long_later and i % 50 == 49 else 5.0
        b.run(0, at + length + 5, 20, f"kernel_{i % kernels}", launch=at, launch_length=length)
        at += length + pace
    return b


def jax(calls: int, compiled: set[int], length: float = 3_000_000.0, name: str = "step") -> Builder:
    b, at = Builder(gpus=0), 0.0
    for i in range(calls):
        whole = length if i in compiled else 20_000.0
        b.host(f"PjitFunction({name})", at, whole)
        if i in compiled:
            b.host("backend_compile_and_load", at + 100, length * 0.9)
        b.host("PjRtCpuExecutable::Execute", at + whole - 10_000, 8_000)
        at += whole + 1_000
    return b


def kinds(trace):
    out: dict[str, float] = {}
    for span in start_up_spans(trace):
        out[span.kind] = out.get(span.kind, 0.0) + (span.end_ns - span.start_ns) / 1e9
    return out


@pytest.mark.parametrize("first", [(1_300_000.0,), tuple(1_000.0 + 1_400.0 * i for i in range(17))])
def test_first_launch_calls_that_load_are_a_start(first):
    trace = launches(first).build()
    assert kinds(trace) == {"loading": pytest.approx(sum(first) / 1e6)}
    assert start_end_ns(trace, start_up_spans(trace)) is not None


@pytest.mark.parametrize("b", [launches((30_000.0,), long_later=30_000.0), launches((5.0, 1_300_000.0), kernels=200)],
                         ids=["later ones are as long: no CPU, a full queue", "each kernel runs once"])
def test_long_calls_that_may_be_no_first_ones_are_no_loading(b: Builder) -> None:
    assert not kinds(b.build())


@pytest.mark.parametrize(("other", "loads"), [("add", 12.0), ("mul", 0.0)])
def test_the_first_launch_of_one_kernel_on_all_gpus_is_loading_if_each_kernel_runs_once(other, loads):
    b = Builder(gpus=2, format="nsys")
    for gpu, slow in enumerate(("add", other)):
        for i, name in enumerate(("add", "mul", *(f"k{k}" for k in range(18)))):
            at = 20_000 * i
            length = 12_000 if name == slow else 5
            b.run(gpu, at + length + 5, 3, name, launch=at, launch_length=length)
    assert sum(kinds(b.build()).values()) * 1e3 == pytest.approx(loads)


@pytest.mark.parametrize(("count", "kernels", "blocks", "loads"), [
    (14, 14, False, 49.0), (14, 14, True, 0.0), (14, 3, False, 0.0), (40, 40, False, 0.0)],
    ids=["a script's start", "calls wait for their kernels", "later ones are as long", "many"])
def test_of_few_launches_long_first_ones_are_loading(count, kernels, blocks, loads):
    b = Builder(format="nsys")
    for i in range(count):
        at = 100_000 * i
        b.run(0, at + (5 if blocks else 3_505), 3_490 if blocks else 3, f"k{i % kernels}", launch=at,
              launch_length=3_500)
    assert sum(kinds(b.build()).values()) * 1e3 == pytest.approx(loads)


@pytest.mark.parametrize(("first", "starts"), [("cuModuleGetLoadingMode", True), ("cudaGetDevice", False)])
def test_where_cuda_begins_its_first_call_creates_the_context_even_if_it_copies(first, starts):
    """Elsewhere the call may wait for kernels that were launched before the recording."""
    b = Builder(format="nsys").host(first, 0, 5).host("cudaMemcpyToSymbol", 100, 105_000)
    b.run(0, 105_000, 10, kind=Kind.H2D, launch=104_000)
    for i in range(60):
        b.run(0, 106_000 + 50 * i, 40, "force", launch=105_500 + 5 * i)
    assert kinds(b.build()) == ({"loading": pytest.approx(0.105, abs=0.001)} if starts else {})


@pytest.mark.parametrize("begins", [True, False])
def test_where_cuda_begins_its_first_launch_loads_a_module_also_after_a_copy(begins):
    b = Builder(format="nsys").host("cuModuleGetLoadingMode" if begins else "cudaGetDevice", 0, 5)
    b.host("cudaMalloc", 10, 50_000).run(0, 50_050, 5, kind=Kind.H2D, launch=50_020)
    for i in range(90):
        at = 50_100 + (15_000 + 25 * i if i else 0)
        b.host("cudaLaunchKernel", at, 15_000 if not i else 4)
        b.run(0, at + (15_005 if not i else 5), 8, "spread", launch=at, launch_length=15_000 if not i else 4)
    assert kinds(b.build()) == {"loading": pytest.approx(0.065 if begins else 0.05, abs=0.0002)}


def after_a_call(name: str, first: float = 1_000.0, gpu_before: bool = False) -> Builder:
    """Steps of a GPU behind one call of 40 s."""
    b = Builder(gpus=1)
    if gpu_before:
        b.run(0, 0, 20, "kernel_0", launch=0)
    b.host(name, first, 40_000_000, line="launch 0")
    for i in range(20):
        at = first + 40_001_000 + 100 * i
        b.run(0, at + 10, 80, f"kernel_{i % 2}", launch=at)
    return b


@pytest.mark.parametrize("name", ["cudaDeviceGetStreamPriorityRange", "cudaStreamCreateWithPriority", "cudaMalloc",
                                  "cudaGetDeviceCount", "hipGetDeviceCount", "cuInit", "cudaFuncGetAttributes",
                                  "cudaHostAlloc_v3020"])
def test_a_long_call_before_any_work_of_a_gpu_is_a_start(name):
    trace = after_a_call(name).build()
    assert [(s.kind, s.what) for s in start_up_spans(trace)] == [("loading", name)]
    assert start_end_ns(trace, start_up_spans(trace)) == 40_001_000_000
    a = analyze_trace(trace)
    assert "time_outside_steps" not in {f.id for f in a.findings}
    assert any(note.id == "start" and name in note.message for note in a.trace.quality)
    start_s = sum(part.time_s for part in a.wall_time.parts if part.id == "start")
    assert start_s > 0.99 * a.wall_time.recorded_s


@pytest.mark.parametrize("name", ["cudaDeviceSynchronize", "cudaLaunchKernel", "cudaEventRecord", "cudaMemcpyAsync",
                                  "cudaStreamWaitEvent", "cudaFreeAsync", "cuda_device_count", "cudnn_something"])
def test_calls_that_may_wait_for_work_from_before_the_recording_are_no_start(name):
    assert not kinds(after_a_call(name).build())


@pytest.mark.parametrize(("name", "loads"), [("cudaDeviceGetStreamPriorityRange", True), ("cudaMalloc", False),
                                             ("cudaHostRegister", False), ("cudaStreamCreate", True),
                                             ("cudaFree", False), ("cudaMemsetAsync", False)])
def test_behind_work_of_the_gpu_only_the_first_call_that_reserves_no_memory_is_a_start(name, loads):
    b = after_a_call(name, gpu_before=True)
    assert kinds(b.build()) == ({"loading": pytest.approx(40.0)} if loads else {})
    again = b.host(name, 50_000_000, 40_000, line="launch 0")
    assert kinds(again.build()) == ({"loading": pytest.approx(40.0)} if loads else {}), "the second is none"


def compiled_in(b: Builder, pauses: int, *, loads: bool = True, names: int = 9) -> Builder:
    """Kernels that are each compiled for 0.4 s, by no call of CUDA, before they are loaded and launched."""
    b.host("cudaMalloc", 0, 3_000, line="launch 0")
    for i in range(pauses):
        at = 400_000 * (i + 1)
        if loads:
            b.host("cuCtxSynchronize", at - 40, 5, line="launch 0")
            b.host("cuModuleLoadDataEx", at - 30, 20, line="launch 0")
        b.run(0, at + 10, 300, f"kernel_{i % names}", launch=at)
    return b


@pytest.mark.parametrize(("b", "starts"), [
    (compiled_in(Builder(format="nsys"), 5), True), (compiled_in(Builder(format="nsys"), 5, loads=False), False),
    (compiled_in(Builder(format="nsys"), 2), False), (compiled_in(Builder(), 5), False),
    (compiled_in(Builder(format="nsys"), 5, names=1), False)],
    ids=["kernels that are compiled", "pauses without a module", "few", "another profiler", "a kernel that ran before"])
def test_pauses_before_the_modules_of_new_kernels_are_a_start(b: Builder, starts: bool) -> None:
    trace = b.build()
    assert kinds(trace).get("modules", 0.0) == (pytest.approx(1.996, abs=0.01) if starts else 0.0)
    assert (start_end_ns(trace, start_up_spans(trace)) == 1_999_990_000) == starts


def test_calls_that_load_modules_are_a_start_wherever_they_are():
    b = launches(()).host("cuLibraryLoadData", 5_000, 40_000).host("cuModuleLoadData", 6_000, 1_000)
    spans = start_up_spans(b.build())
    assert [(s.kind, s.what, s.start_ns, s.end_ns) for s in spans] == [
        ("loading", "cuLibraryLoadData", 5_000_000, 45_000_000)]


@pytest.mark.parametrize("recorded", [True, False])
def test_code_that_cuda_loads_at_its_first_use_is_a_start_also_outside_of_launches(recorded, tmp_path):
    """As CUPTI's overheads tell in files of kineto; its own work is none."""
    events: list[dict] = []
    for i in range(100):
        loads = 4_000 if i < 20 else 0
        at = i * 40 + min(i, 20) * 4_000
        for cat, name, begin, length, pid, args in (
                ("cpu_op", "aten::mm", at, loads + 12, 9, {}),
                ("overhead", "Runtime Triggered Module Loading" if recorded else "Buffer Flush", at + 2, loads, -1, {}),
                ("cuda_runtime", "cudaLaunchKernel", at + loads + 3, 6, 9, {"correlation": i}),
                ("kernel", f"kernel_{i % 20}", at + loads + 10, 8, 0, {"correlation": i, "stream": 7, "device": 0})):
            events.append({"ph": "X", "cat": cat, "name": name, "pid": pid, "tid": 7, "ts": begin, "dur": length,
                           "args": args})
    path = tmp_path / "rank0.pt.trace.json"
    path.write_text(json.dumps({"traceEvents": [event for event in events if event["dur"]]}))
    trace = load([path])
    assert kinds(trace) == ({"loading": pytest.approx(0.08)} if recorded else {})
    assert (start_end_ns(trace, start_up_spans(trace)) is not None) == recorded
    assert "Buffer Flush" not in trace.names


def test_a_first_compilation_is_a_start_and_what_follows_is_judged_by_itself():
    trace = jax(30, {0}).build()
    spans = start_up_spans(trace)
    assert {span.what for span in spans} == {"step"} and kinds(trace).keys() == {"compilation", "tracing"}
    assert sum(kinds(trace).values()) == pytest.approx(2.7001)  # from the call's begin to the compilation's end
    a = analyze_trace(trace)
    assert a.steps is not None and a.steps.median_s == pytest.approx(0.021) and a.steps.count == 28
    assert "start" in {note.id for note in a.trace.quality} and not a.findings


def test_a_compilation_in_a_job_that_is_minutes_old_is_not_called_its_start():
    trace = jax(30, {0}).build()
    trace.job_cpus = JobCpus(2.0, age_s=600.0)
    assert start_end_ns(trace, start_up_spans(trace)) is None
    assert "start" not in {note.id for note in analyze_trace(trace).trace.quality}


@pytest.mark.parametrize("calls", [2, 3, 6])
def test_a_function_compiled_at_each_call_is_no_start(calls):
    trace = jax(calls, set(range(calls))).build()
    assert not start_up_spans(trace) and functions(trace) == [("step", calls, calls)]
    a = analyze_trace(trace)
    assert a.steps is not None and a.steps.median_s == pytest.approx(3.001, rel=0.001)
    assert a.steps.count >= calls - 1
    assert [f.id for f in a.findings] == ["retracing"] and a.findings[0].culprits[0].name == "step"
    assert not {"start", "start_up"} & {note.id for note in a.trace.quality}


@pytest.mark.parametrize(("kernels", "apart_ms", "whole"), [(2, 50, True), (30, 50, False), (2, 500, False)])
def test_the_runs_of_one_candidate_between_two_checks_are_trials(kernels, apart_ms, whole):
    b, apart = Builder(gpus=1), apart_ms * 1_000
    for i in range(5):
        b.run(0, i * apart, 100, REDZONE)
        for k in range(kernels if i < 4 else 0):
            b.run(0, i * apart + 200 + k * 1_000, 900, "volta_cgemm")
    tried_ns = trials(b.build())[CUDNN].total
    assert tried_ns == (4 * apart + 100 if whole else 5 * 100) * 1_000


def test_spans_do_not_overlap_and_are_in_order():
    b = Builder(gpus=1).host("train_step", 0, 900_000, tf_function_call="traced-xla", tracing_count=1)
    b.host("tf.function-graph_building", 1_000, 300_000).host("GpuCompiler::Compile", 400_000, 300_000, "pool")
    b.host("cuModuleLoadData", 600_000, 50_000, "pool")
    for i in range(20):
        b.run(0, 720_000 + i * 2_000, 100, REDZONE, launch=719_000 + i * 2_000)
    spans = start_up_spans(b.build())
    assert all(a.end_ns <= c.start_ns for a, c in pairwise(spans))
    assert [span.kind for span in spans] == ["tracing", "compilation", "loading", "compilation", "autotuning"]
    assert {span.what for span in spans} == {"train_step", "cuModuleLoadData", ""}


@pytest.mark.parametrize(("age_s", "starts"), [(None, True), (20.0, True), (600.0, False)])
def test_one_compiled_step_of_a_job_that_is_minutes_old_is_no_start(age_s, starts):
    b = Builder(gpus=0).host("one_step_on_iterator", 0, 3_000_000, tf_function_call="notTraced-xla")
    trace = b.host("CpuCompiler::Compile", 100, 2_900_000).build()
    trace.job_cpus = JobCpus(2.0, age_s=age_s)
    steps = find_steps(trace)
    assert steps is not None and steps.count == 1 and bool(steps.times.start_up) == starts


def test_a_step_that_compiles_twice_at_the_start_is_a_start():
    trace = jax(40, {0, 1}).build()  # as JAX does where the first call's arguments are not on the device yet
    assert not rebuilt(trace) and kinds(trace)["compilation"] == pytest.approx(5.4)
    a = analyze_trace(trace)
    assert a.steps is not None and a.steps.median_s == pytest.approx(0.021) and not a.findings


def test_every_tenth_call_that_compiles_returns_wherever_the_recording_ends():
    for calls in (22, 29, 36):
        assert rebuilt(jax(calls, set(range(0, calls, 10)), 200_000.0).build())


def test_what_is_compiled_for_several_shapes_before_the_steps_is_a_start():
    b = Builder(gpus=0)
    for i in range(6):
        b.host("PjitFunction(_normal)", i * 300_000, 290_000).host("backend_compile", i * 300_000 + 10, 280_000)
    for i in range(200):
        b.host("PjitFunction(step)", 1_800_000 + i * 20_000, 19_000)
    trace = b.build()
    assert not rebuilt(trace) and kinds(trace)["compilation"] == pytest.approx(1.68)


@pytest.mark.parametrize(("age_s", "hedged"), [(15.0, True), (600.0, False), (None, False)])
def test_of_a_young_job_without_steps_it_is_said_that_this_may_be_the_start(age_s, hedged):
    b = jax(1, {0})
    for begin in (0, 3_001_000):  # one in the call, one in a call that has not ended: what the edges cut counts
        b.host("HLO passes through layout assignment (jit_step)", begin + 200, 1_000, "tf_PjRtCompilerThreadPool/1")
    trace = b.build()
    assert functions(trace) == [("step", 2, 2)]
    trace.job_cpus = JobCpus(2.0, age_s=age_s)
    (f,) = analyze_trace(trace).findings
    assert f.id == "retracing" and ("job startup" in f.why) == hedged


@pytest.mark.parametrize(("function", "judged"), [("add", False), ("loss", True)])
def test_ops_that_compile_for_each_shape_as_a_job_starts_are_no_finding(function, judged):
    """As of a first evaluation outside of jax.jit: each is one of JAX's own ops and compiles once a shape."""
    b = Builder(gpus=0)
    for i, name in enumerate((function, "dot", function, function, "dot")):
        b.host(f"PjitFunction({name})", i * 900_000, 400_000).host("backend_compile", i * 900_000 + 10, 390_000)
    b.host("dot_fusion", 4_500_000, 2_100_000, "tf_XLAPjRtCpuClient/1")
    b.host("add_fusion", 6_600_000, 1_900_000, "tf_XLAPjRtCpuClient/1").host("Array.__float__", 8_490_000, 20_000)
    trace = b.build()
    trace.job_cpus = JobCpus(2.0, age_s=15.0)
    a = analyze_trace(trace)
    assert ("retracing" in {f.id for f in a.findings}) == judged
    rest = [(part.kind, part.what) for part in a.wall_time.parts if part.id == "no_steps"]
    assert rest == [("op", "dot_fusion")] or judged  # Python waits for other threads' ops


@pytest.mark.parametrize("whole", [1, 2])
def test_the_function_that_compiles_at_each_call_is_the_step_and_not_a_shorter_one(whole):
    """As jnp.asarray's, of a loop whose step compiles for most of the recording."""
    b, at = Builder(gpus=0), 0.0
    for i in range(2):  # the recording begins within a call of the step
        for _ in range(2):
            b.host("PjitFunction(stage)", at, 12_000).host("backend_compile", at + 10, 11_000)
            at += 13_000
        b.host("backend_compile", at + 10, 550_000)
        b.host("HLO passes through layout assignment (jit_step)", at + 20, 10_000)
        if whole > i:
            b.host("PjitFunction(step)", at, 600_000)
        at += 601_000
    a = analyze_trace(b.build())
    if whole == 2:
        assert a.steps is not None and a.steps.median_s == pytest.approx(0.627)
    assert a.findings[0].id == "retracing" and a.findings[0].culprits[0].name == "step"


def test_a_function_made_anew_in_the_loop_is_traced_anew():
    b = Builder(gpus=0)
    for i in range(12):
        b.host("step", i * 10_000, 9_000, tf_function_call="traced-nonXla", tracing_count=1)
        b.host("tf.function-graph_building", i * 10_000 + 10, 8_000)
    trace = b.build()
    assert functions(trace) == [("step", 11, 12)] and rebuilt(trace)[0].made == 12
    f = analyze_trace(trace).findings[0]
    assert f.id == "retracing" and "outside the loop" in f.action and "step" in f.title


def test_two_functions_of_one_name_are_each_traced_once():
    b = Builder(gpus=0)
    for i in range(12):
        traced = i in (0, 6)  # fit's and evaluate's
        b.host("one_step_on_iterator", i * 10_000, 9_000, tracing_count=1,
               tf_function_call="traced-nonXla" if traced else "notTraced-nonXla")
    assert not rebuilt(b.build())


@pytest.mark.parametrize(("long", "starts"), [((0, 1), True), ((2,), True), ((0, 14), False), ((17,), False)])
def test_the_first_convolutions_of_pytorch_are_a_start_unless_cudnn_chooses_anew(long, starts):
    b, at = Builder(gpus=1, format="chrome"), 0.0
    for i in range(20):
        length = 900_000.0 if i in long else 400.0
        b.host("aten::cudnn_convolution", at, length)
        b.run(0, at + length + 5, 300, launch=at + length - 50, thread="python")
        at += length + 500
    assert (kinds(b.build()).get("loading", 0.0) == pytest.approx(0.9 * len(long))) == starts


@pytest.mark.parametrize(("long", "starts"), [((0,), True), ((7,), False)])
def test_the_first_matrix_product_of_pytorch_loads_cublas(long, starts):
    b, at = Builder(gpus=1, format="chrome"), 0.0
    for i in range(10):
        length = 117_000.0 if i in long else 100.0
        b.host("aten::addmm", at, length).run(0, at + length + 5, 10, launch=at + length - 20, thread="python")
        at += length + 800
    assert ("loading" in kinds(b.build())) == starts


def test_a_first_pass_loads_in_most_of_its_convolutions():
    b, at = Builder(gpus=1, format="chrome"), 0.0
    # ms, as ResNet-18's took in its first inference on an RTX 3090
    for length in (102.44, 14.4, 0.07, 0.23, 0.05, 10.06, 3.05, 2.31, 0.07, 0.06, 3.96, 3.09, 6.83, 0.09, 0.06, 3.22,
                   4.03, 3.71, 0.09, 0.06):
        b.host("aten::cudnn_convolution", at, length * 1_000)
        b.run(0, at + length * 1_000 + 5, 20, launch=at + length * 1_000 - 50, thread="python")
        at += length * 1_000 + 100
    assert kinds(b.build())["loading"] == pytest.approx(0.10244)


def test_the_function_that_takes_most_time_is_named():
    b = jax(6, set(range(6)), 500_000.0)
    for i in range(12):  # as jnp.asarray compiles for each new shape
        at = i // 2 * 501_000 + 480_000 + i % 2 * 10_000
        b.host("PjitFunction(stage)", at, 9_000, "python 2")
        b.host("backend_compile_and_load", at + 10, 8_000, "python 2")
    assert [one.name for one in rebuilt(b.build())] == ["step", "stage"]


@pytest.mark.skipif(not CASES.is_dir(), reason="needs ../shared/data")
def test_one_launch_call_that_loads_libraries_is_said_and_left_out():
    trace = load([str(CASES / "cold_first_launch.pt.trace.json.gz")])
    (span,) = start_up_spans(trace)
    assert span.kind == "loading" and (span.end_ns - span.start_ns) / 1e9 == pytest.approx(1.337, rel=1e-4)
    a = analyze_trace(trace)
    assert a.gpus[0].busy > 0.9 and not a.findings and "start" in {note.id for note in a.trace.quality}


@pytest.mark.parametrize(("name", "starts", "begin_us"), [
    ("cudaFree_v3020", True, 0.0), ("cudaFree", True, 0.0), ("cudaStreamCreateWithFlags_v5000", True, 0.0),
    ("cudaMemsetAsync", True, 0.0), ("cudaMallocAsync_v11020", True, 0.0),  # wait for nothing
    ("cudaFree", False, 3_000_000.0),  # waits for kernels
    ("cudaDeviceSynchronize", False, 0.0), ("cudaMemcpyAsync", False, 0.0)])
def test_a_context_is_made_before_the_first_kernel(name: str, starts: bool, begin_us: float) -> None:
    b = Builder(format="nsys")
    b.host(name, begin_us, 2_500_000.0)
    for i in range(100):
        b.run(0, 2_600_000.0 + 200 * i, 150, f"kernel_{i % 10}", launch=2_599_900.0 + 200 * i)
    assert kinds(b.build()) == ({"loading": pytest.approx(2.5)} if starts else {})


@pytest.mark.parametrize(("begin", "begins"), [("cuInit", True), ("cudaGetDevice", False)])
def test_a_library_with_its_own_runtime_begins_cuda_again(begin: str, begins: bool) -> None:
    b = Builder(format="nsys").host("cudaMalloc", 0, 200_000).run(0, 200_100, 3, launch=200_050)
    b.host(begin, 200_300, 1).host("cudaFree", 201_000, 1_200_000).run(0, 1_401_100, 3, launch=1_401_050)
    assert kinds(b.build()) == {"loading": pytest.approx(1.4 if begins else 0.2)}


@pytest.mark.parametrize(("begin", "starts"), [
    ("cuDevicePrimaryCtxSetFlags_v2", True), ("cuModuleGetLoadingMode", True), ("cuDeviceGetCount", False)])
def test_a_context_may_be_made_without_an_event(begin: str, starts: bool) -> None:
    b = Builder(format="nsys").host(begin, 0, 2).host("cuStreamCreate", 72_000, 8)
    b.run(0, 73_000, 200, launch=72_990).host("cuDevicePrimaryCtxRelease_v2", 73_300, 17_000)
    spans = start_up_spans(b.build())
    assert [(span.kind, span.what, span.end_ns) for span in spans] == ([("loading", "", 72_000_000)] if starts else [])
    assert not starts or what_started(spans, 1 << 60) == "time without a CUDA call (72.0 ms)"
    b.host("cudaMalloc", 70_000, 1_500)  # which makes it: until then the program does work of its own
    assert "" not in {span.what for span in start_up_spans(b.build())}


def test_a_sum_of_several_calls_is_not_said_to_be_one_of_them() -> None:
    b = Builder(format="nsys").host("cudaMalloc", 0, 50_000).host("cudaStreamCreate", 60_000, 40_000)
    note = what_started(start_up_spans(b.run(0, 100_000, 200, launch=99_990).build()), 1 << 60)
    assert note == "loading of libraries and modules (cudaMalloc and others, 90.0 ms)"


@pytest.mark.parametrize("stop", ["$profiler.py:255 stop_trace", "ProfilerSession::Stop", "$profiler_v2.py:119 stop"])
def test_a_profilers_own_end_is_no_part_of_a_trace_of_the_cpu(stop: str) -> None:
    b = Builder(gpus=0).host("$train.py:3 main", 0, 90_000).host("PjitFunction(f)", 100, 39_000)
    b.host(stop, 40_000, 50_000).host("$json.py:4 dump", 41_000, 30_000)
    left = up_to_profilers_stop(b.build())
    assert left.window_ns[1] - left.window_ns[0] == 40_000_000 and left.host.end_ns.max() - left.window_ns[0] == 40e6
    assert analyze_trace(b.build()).trace.window_s == pytest.approx(0.04)
    gpu = Builder().host(stop, 40_000, 50_000).run(0, 0, 10).build()
    assert up_to_profilers_stop(gpu) is gpu, "its work may go on"


def captures(launched: bool) -> Builder:
    """Twelve layers alike, each recorded as a graph, as a server of language models does at its start; ``launched``:
    each graph runs at once."""
    b = Builder(gpus=1, format="chrome")
    b.run(0, 0, 3, "void at::native::FillFunctor<long>(int)", launch=0, thread="python")
    for layer in range(12):
        at = 1_000.0 * (layer + 1)
        b.host("cudaStreamBeginCapture", at, 5)
        for k, op in enumerate(("aten::mm", "aten::add", "aten::mul", "aten::gelu", "aten::linear")):
            b.host(op, at + 100 + 150 * k, 120)
        b.host("cudaStreamEndCapture", at + 870, 5)
        b.host("cudaGraphInstantiate", at + 880, 50)
        if launched:
            b.host("cudaGraphLaunch", at + 940, 5)
    return b


def test_layers_that_are_recorded_into_graphs_are_no_steps_but_a_start():
    found = analyze_trace(captures(launched=False).build())
    assert found.steps is not None and "recording of CUDA graphs" in found.steps.start_up and not found.findings
    in_use = analyze_trace(captures(launched=True).build())
    assert in_use.steps is not None and not in_use.steps.start_up


@pytest.mark.parametrize("name", [
    "executor_utils::Nvrtc::CompileProgram", "FusionKernelRuntime::compileFusionParallel",
    "/env/site-packages/triton/compiler/compiler.py(228): compile", "triton/runtime/autotuner.py(155): _bench",
    "torch/_inductor/runtime/triton_heuristics.py(800): benchmark_all_configs"])
def test_kernels_that_are_compiled_are_a_start(name):
    b = Builder(gpus=1)
    b.host(name, 0, 900_000).host("wrapper", 0, 950_000)
    for i in range(20):
        b.run(0, 950_000 + 100 * i, 50, "kernel", launch=949_000 + 100 * i)
    trace = b.build()
    assert kinds(trace) == {"kernel_compilation": pytest.approx(0.9)}
    assert start_end_ns(trace, start_up_spans(trace)) == 900_000_000


def test_long_calls_of_kernels_that_ran_before_are_no_loading():
    assert not kinds(launches((30_000.0,), long_later=30_000.0).build())  # threads without a CPU, full queues


def test_a_recording_in_which_each_kernel_runs_once_tells_no_first_launch():
    assert not kinds(launches((5.0, 1_300_000.0), kernels=200).build())

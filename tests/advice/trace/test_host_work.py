"""Host work between the steps, and ops placed on the host."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from gputop.advice.trace.host_work import StepGapHost, describe_step_gap_host, out_of_the_step
from gputop.advice.trace.job import CUSTOM, KERAS3, Job
from gputop.advice.trace.known_work import UserFunction, main_function
from gputop.advice.verdict import Explanation
from gputop.analysis.results import FlameNode, GapLines, GapWork, HostStacks, StackLine
from gputop.core.findings import Culprit
from gputop.diagnosis.diagnose import analyze_to_facts
from gputop.trace.model import Trace
from gputop.trace.readers.load import load
from gputop.trace.readers.xspace.reader import read_xspaces
from tests.advice.trace.host_jobs import BF16, EXECUTOR, found, gap, kernels, missing, placed, torch_gap
from tests.advice.trace.traces import STEP, STEPS
from tests.records import replace
from tests.trace.build import Builder, keras_steps
from tests.trace.readers.xspace.reference import Builder as XSpace

DATA = Path(__file__).resolve().parents[2] / "data"


@pytest.mark.parametrize(("share", "severity"), [(0.04, None), (0.08, "medium"), (0.3, "high")])
def test_the_gap_between_calls_is_rated_by_its_share(share, severity):
    f = found(gap(share)).get("step_gap_host")
    assert (f.severity if f else None) == severity
    if f:
        assert f.gain.step_time == pytest.approx(share, abs=0.01) and "Mean" in [c.name for c in f.culprits]
        assert "steps_per_execution" in (f.snippet or "") and f.gpus == (0,)


def test_a_gap_without_events_is_pythons_and_several_steps_a_call_save_at_least_it():
    f = found(gap(0.3, silent=True))["step_gap_host"]
    assert f.evidence["no_event_s"] == pytest.approx(0.3 * STEP / 1e6, rel=0.05)
    # Of four small jobs of Keras they saved 16 to 78%, and the gap was 8 to 54% of the step.
    gain = found(gap(0.3, gpus=0))["step_gap_host"].gain
    assert gain.claim == "at least" and gain.step_time == pytest.approx(0.3 * 15 / 16, rel=0.01)


@pytest.mark.parametrize(("others", "is_found"), [(0.035, False), (0.06, True)])
def test_the_start_of_an_epoch_is_no_work_between_all_steps(others: float, is_found: bool) -> None:
    """Two pauses of a step's length, as for an epoch's iterator, and what Keras itself takes between steps."""
    b, at = Builder(gpus=0), 0.0
    for i in range(121):
        b.host("train", at, STEP - 5, step_num=i, _r=1)
        b.host("train_function", at + 10, (1 - others) * STEP - 10, tf_function_call="notTraced-nonXla")
        b.host("EagerExecute", at + 10, (1 - others) * STEP - 20, eager_op="__inference_train_function_9", is_func=1)
        at += STEP * (2 if i in (40, 80) else 1)
    assert ("step_gap_host" in found(b)) is is_found
    assert is_found or "few long pauses" in missing(b)["step_gap_host"]


@pytest.mark.parametrize("function", ["train_function", "train_step"])
def test_marks_alone_do_not_make_a_loop_keras_where_its_functions_have_other_names(function: str) -> None:
    """TensorFlow's guide marks the steps of a loop of one's own with the name that Keras 2 uses."""
    b = Builder(gpus=0)
    for i in range(STEPS + 1):
        at = i * STEP
        b.host("train", at, STEP - 5, step_num=i, _r=1)
        b.host(function, at + 10, 0.7 * STEP, tf_function_call="notTraced-nonXla")
        b.host("EagerExecute", at + 20, 0.7 * STEP - 20, eager_op=f"__inference_{function}_9", is_func=1)
        b.host("EagerExecute", at + 0.75 * STEP, 0.2 * STEP, eager_op="Mean", is_func=0)
    f, keras = found(b)["step_gap_host"], function == "train_function"
    assert ("steps_per_execution" in (f.snippet or "")) is keras and ("callbacks" in f.action) is keras
    assert "GPU" not in f.action


def test_where_the_input_pipeline_sets_the_pace_of_a_cpu_job_no_saving_is_promised() -> None:
    """Of the real job: its callback takes 28% of the step, and without it the steps are not shorter."""
    f = {f.id: f for f in analyze_to_facts(load([DATA / "keras3_paced_by_input.xplane.pb.gz"])).analysis.findings}
    assert f["input_bound"].severity == "high"
    gap_ = f["step_gap_host"]
    assert gap_.severity == "low" and gap_.gain.step_time is None and gap_.evidence["share_ratio"] > 0.25
    assert "is slower" in gap_.why and gap_.evidence["pipeline_s"] == pytest.approx(0.0307, rel=0.05)


@pytest.mark.parametrize(("share", "severity"), [(0.04, None), (0.08, "medium"), (0.3, "high")])
def test_pythons_pauses_in_pytorch_are_the_gap(share, severity):
    f = found(torch_gap(share)).get("step_gap_host")
    assert (f.severity if f else None) == severity
    if f:
        assert f.gain.step_time == pytest.approx(share, abs=0.01)
        assert f.evidence["no_event_s"] == pytest.approx(f.evidence["gap_s"]) and "ProfilerStep" not in f.why


def test_python_inside_of_a_modules_call_is_no_work_between_calls() -> None:
    b = torch_gap(0.3)
    for i in range(STEPS):
        b.host("nn.Module: Net_0", i * STEP + 1, STEP - 10)
    assert "step_gap_host" not in found(b)


def test_a_real_job_of_pytorch_that_saves_at_each_step() -> None:
    """PyTorch 2.14 on a CPU, three steps; beside an own count of torch.save and of the loader's calls."""
    path = DATA / "pytorch_2_14_saves.pt.trace.json.gz"
    events = [e for e in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"] if e["ph"] == "X"]

    def mean_s(begin: str) -> float:
        return sum(e["dur"] for e in events if e["name"].startswith(begin)) / 3e6

    f = {f.id: f for f in analyze_to_facts(load([path])).analysis.findings}
    saved_s = mean_s("torch/serialization.py(944): save") + mean_s("torch/nn/modules/module.py(2199): state_dict")
    assert f["step_gap_host"].evidence["gap_s"] == pytest.approx(saved_s, rel=0.1)
    assert f["input_bound"].evidence["wait_s"] == pytest.approx(mean_s("enumerate(DataLoader)"), rel=0.02)
    assert "saving checkpoints" in f["step_gap_host"].why and "pybind11" not in f["step_gap_host"].why
    assert "torch.save" in f["step_gap_host"].snippet and f["step_gap_host"].culprits[0].name.startswith("train.py:25")


def test_a_collective_of_the_cpu_and_short_pauses_from_op_to_op_are_no_python() -> None:
    """While the backward pass waits for gloo it runs no op, on whatever thread gloo works."""
    b = torch_gap(0.3)
    for i in range(STEPS):
        b.host("gloo:all_reduce", (i + 0.6) * STEP, 0.4 * STEP, line="thread 7")
    assert "step_gap_host" not in found(b) and "step_gap_host" in found(torch_gap(0.3))
    assert "step_gap_host" not in found(torch_gap(0.3, pauses=20))


def test_the_steps_of_pytorch_on_a_cpu_are_no_calls_with_gaps_between_them(tmp_path: Path) -> None:
    """Two ranks whose steps overlap, as gloo's do."""
    paths = []
    for rank in range(2):
        events = [{"ph": "X", "cat": cat, "name": name, "pid": 100 + rank, "tid": 1, "ts": 1000 * i + 300 * rank + at,
                   "dur": dur}
                  for i in range(8) for cat, name, at, dur in (("user_annotation", f"ProfilerStep#{i}", 0, 990),
                                                               ("cpu_op", "aten::mm", 5, 900))]
        paths.append(tmp_path / f"rank{rank}.pt.trace.json")
        paths[-1].write_text(json.dumps({"distributedInfo": {"rank": rank}, "traceEvents": events}))
    analysis = analyze_to_facts(load(paths)).analysis
    assert analysis.steps is not None and analysis.steps.count >= 6 and analysis.gaps is None


def torch_op_on_the_cpu(inside: tuple[str, float]) -> Builder:
    """PyTorch: before the kernels of each step an op of 6 ms that starts no kernel; ``inside`` it another event."""
    b = Builder(gpus=1, format="chrome")
    for i in range(STEPS):
        at = i * STEP
        b.host(f"ProfilerStep#{i}", at, STEP - 2, step_num=i).host("aten::nonzero", at, 6000)
        b.host(inside[0], at + 10, inside[1])
        for start in range(round(at) + 6000, round(at + STEP) - 100, 100):
            b.host("aten::mm", start, 20)
            b.run(0, start + 5, 99, BF16, launch=start + 2, thread="python")
    return b


def test_an_op_of_pytorch_on_the_cpu_holds_the_gpu_up():
    f = found(torch_op_on_the_cpu(("cpu_work", 10)))
    assert f["host_placement"].severity == "high" and f["host_placement"].culprits[0].name == "aten::nonzero"
    assert "step_gap_host" not in f and f["host_placement"].gain.step_time == pytest.approx(0.3, abs=0.01)


@pytest.mark.parametrize("inside", [("aten::as_strided", 3.0), ("cudaStreamSynchronize", 5900.0)])
def test_an_op_of_pytorch_that_calls_others_or_the_gpu_is_not_on_the_cpu(inside):
    assert "host_placement" not in found(torch_op_on_the_cpu(inside))


@pytest.mark.parametrize("launches", [False, True])
def test_a_python_callback_in_a_jitted_step_holds_the_gpu_up(launches):
    b = Builder(gpus=1)
    for i in range(STEPS):
        at = i * STEP
        b.host("PjitFunction(train_step)", at, STEP - 50).host("jit_train_step:XLA GPU module", at + 20, STEP - 80)
        b.host("custom-call.7", at + 5000, 6000)
        for start in (*range(100, 5000, 100), *range(11_100, 19_800, 100)):
            b.run(0, at + start, 99, BF16, launch=at + start - 5, thread="python")
        if launches:  # a library's kernel
            b.run(0, at + 5100, 5890, BF16, launch=at + 5050, thread="python")
    f = found(b)
    assert set(f) == (set() if launches else {"host_placement"})
    if not launches:
        assert "jax.pure_callback" in f["host_placement"].action and f["host_placement"].severity == "high"


@pytest.mark.parametrize(("name", "api"), [
    ("SaveV2", "ModelCheckpoint"), ("WriteScalarSummary", "TensorBoard"), ("AnonymousIteratorV3", ".repeat()")])
def test_what_fills_the_gap_decides_the_cure(name, api):
    assert api in (found(gap(0.3, name=name))["step_gap_host"].snippet or "")


@pytest.mark.parametrize(("function", "ops", "calls", "instead"), [
    ("__inference_one_step_on_data_distributed_3", (), "predict()", "predict_on_batch"),
    ("__inference_multi_step_on_iterator_7", ("m/dense/MatMul:MatMul",), "evaluate()", "test_on_batch")])
def test_what_a_callback_predicts_or_evaluates_in_each_step_is_named(function, ops, calls, instead):
    """Most of the gap is the iterator that it makes: to make it once is no fix for these."""
    b = gap(0.3, name="AnonymousIteratorV3")
    for i in range(STEPS):
        at = (i + 0.9) * STEP
        b.host("EagerExecute", at, 20, is_func=1, eager_op=function)
        for op in ops:
            b.host(op, at + 5, 5, "tf_Compute/1")
    f = found(b)["step_gap_host"]
    assert f"{calls} runs in each step" in f.why and f.action.startswith(f"Call {calls} every")
    assert instead in (f.snippet or "") and ".repeat()" not in (f.snippet or "")


def test_what_is_no_work_between_steps():
    b = gap(0.3)
    for i in range(STEPS + 1):
        kernels(b, i, STEP * 0.7, STEP - 10, ahead=9_000)
    assert "step_gap_host" not in found(b)
    b = Builder(gpus=0)  # waiting for a result is not work between steps
    for i in range(8):
        b.host("train", i * 1000, 990, step_num=i, _r=1).host("PjitFunction(step)", i * 1000 + 5, 50)
        b.host("ThunkExecutor::Execute", i * 1000 + 60, 900, line="tf_XLAPjRtCpuClient/1")
    assert "step_gap_host" not in found(b)
    assert "host_tracer_level 2" in missing(Builder(gpus=1).run(0, 0, 100, launch=0))["step_gap_host"]
    one = keras_steps(Builder(gpus=1), 2, STEP, STEP / 2)
    kernels(one, 0, 20, STEP / 2)
    assert "two complete steps" in missing(one)["step_gap_host"]


@pytest.mark.parametrize(("share", "severity"), [(0.02, None), (0.08, "medium"), (0.3, "high")])
def test_ops_on_the_host_by_time(share, severity):
    f = found(placed(share)).get("host_placement")
    assert (f.severity if f else None) == severity
    if f:
        assert f.gain.step_time == pytest.approx(share, abs=0.01) and "py_function" in f.action
        assert "step_gap_host" not in found(placed(share))


@pytest.mark.parametrize("steps", [2, 3, 6, 12])
def test_an_op_at_the_head_of_each_step_counts_in_each(steps):
    """The GPU's first event comes at the end of the first step, in which nothing is known of it until then."""
    b = keras_steps(Builder(gpus=1), steps + 1, STEP, STEP - 10)
    for i in range(steps + 1):
        b.host("a/b:StringSplit", i * STEP + 20, STEP * 0.93, line=EXECUTOR)
        kernels(b, i, 25 + STEP * 0.93, STEP - 20)
    f = found(b)["host_placement"]
    assert f.evidence["share_ratio"] == pytest.approx(0.93, abs=0.01)
    assert f.gain.step_time == pytest.approx(0.93, abs=0.1) and f.culprits[0].time_s == pytest.approx(0.93 * STEP / 1e6)


def test_the_cure_fits_the_op():
    cures = {op: found(placed(0.3, f"a/b:{op}"))["host_placement"]
             for op in ("StringToHashBucketFast", "MatMul", "Where")}
    assert all(op in cure.action for op, cure in cures.items())
    assert len({cure.action.replace(op, "") for op, cure in cures.items()}) == 3
    assert {op for op, cure in cures.items() if ".map(" in (cure.snippet or "")} == {"StringToHashBucketFast"}
    update = found(placed(0.3, "Adam/update_words/Unique:Unique"))["host_placement"]
    assert "needs gradients" in update.action and ".map(" not in (update.snippet or "")


def test_ops_that_launch_or_wait_or_belong_to_the_input_are_no_placement():
    assert "host_placement" not in found(placed(0.3, "cond:While"))
    b = placed(0.3)
    for i in range(STEPS + 1):  # the op's own kernel, launched elsewhere
        b.run(0, i * STEP + 4_000 + 0.3 * STEP - 5, 4, op="model/py:EagerPyFunc", launch=i * STEP + 9_900)
    assert "host_placement" not in found(b)
    no_gpu = keras_steps(Builder(gpus=0), 5, STEP, STEP - 50).host("a:StringSplit", 10, 9_000, line="tf_Compute/1")
    assert "without a GPU" in missing(no_gpu)["host_placement"]
    assert "host_tracer_level" in missing(gap(0.3))["host_placement"]


@pytest.mark.parametrize("op", ["PyFunc:PyFunc", "metrics/EagerPyFunc:EagerPyFunc", "a:PyFuncStateless"])
def test_python_that_a_function_calls_counts_without_a_gpu(op):
    b = keras_steps(Builder(gpus=0), 6, STEP, STEP - 50)
    for i in range(6):
        b.host(op, i * STEP + 20, 0.6 * STEP, line=EXECUTOR)
        b.host("dense/MatMul:_MklMatMul", i * STEP + 20 + 0.6 * STEP, 0.3 * STEP, line=EXECUTOR)
    f = found(b)["host_placement"]
    assert f.evidence["share_ratio"] == pytest.approx(0.6, abs=0.01)
    assert "py_function" in f.action and "copied from the GPU" not in f.why
    assert "host_placement" not in found(keras_steps(Builder(gpus=0), 6, STEP, STEP - 50).host(
        "dense/MatMul:_MklMatMul", 20, 0.9 * STEP, line=EXECUTOR))


def test_an_op_of_a_function_of_tf_data_is_no_op_of_the_model():
    """A PyFunc in Dataset.from_generator runs on a thread of the pool that the model uses."""
    b = placed(0.3)
    for i in range(STEPS + 1):
        b.host("InstantiatedCapturedFunction::Run", i * STEP, STEP - 10, line="tf_data_iterator/1", id=9)
        b.host("ExecutorState::Process", i * STEP + 1, STEP - 12, line="tf_Compute/1", id=9)
    assert "host_placement" not in found(b)
    b = placed(0.3)
    for i in range(STEPS + 1):  # the model's own executor
        b.host("InstantiatedCapturedFunction::Run", i * STEP, STEP - 10, line="tf_data_iterator/1", id=9)
        b.host("ExecutorState::Process", i * STEP + 1, STEP - 12, line="tf_Compute/1", id=7)
    assert "host_placement" in found(b)


def ranks(*pauses_us: float) -> Trace:
    """Ranks without a GPU whose calls of the step take 30 ms together with the pauses after them."""
    files = []
    for rank, pause_us in enumerate(pauses_us):
        b = XSpace("node")
        line = b.line("/host:CPU", "python")
        for i in range(10):
            b.event("/host:CPU", line, "train", i * 30_000_000, round(30e6 - pause_us * 1e3), step_num=i, _r=1)
            b.event("/host:CPU", line, "EagerExecute", i * 30_000_000, round(30e6 - pause_us * 1e3) - 10,
                    is_func=1, eager_op="__inference_step_60")
        files.append((f"logs/node_{6009 + rank}.xplane.pb", "", b.bytes()))
    return read_xspaces(files)


def test_the_rank_that_holds_the_others_up_is_named_unless_all_pause_alike():
    finding = next(f for f in analyze_to_facts(ranks(100, 20_000)).analysis.findings if f.id == "step_gap_host")
    assert "on rank node_6010" in finding.title and "wait for this rank" in finding.why
    assert finding.evidence["gap_s"] == pytest.approx(0.020, rel=0.01)
    finding = next(f for f in analyze_to_facts(ranks(20_000, 15_000)).analysis.findings if f.id == "step_gap_host")
    assert "node_60" not in finding.title + finding.why


def lines(*times: tuple[str, float]) -> list[Culprit]:
    return [Culprit(name, "line", time_s) for name, time_s in times]


def flame(*nodes: tuple[str, int | None, float, float]) -> HostStacks:
    return HostStacks(basis="step", flame=tuple(FlameNode(line, "/u/t.py", *rest) for line, *rest in nodes))


CALLBACK = flame(("t.py:1 main", None, 1.0, 0.6), ("t.py:9 Log.norms", 0, 0.6, 0.6))


@pytest.mark.parametrize(("culprits", "stacks", "function"), [
    # Two lines of one function, within comprehensions.
    (lines(("t.py:9 Log.norms.<dictcomp>", 0.2), ("t.py:8 Log.norms", 0.2)), CALLBACK,
     ("norms", "t.py:9", False, "", 0.6)),
    (lines(("t.py:9 Log.on_train_batch_end", 0.4)), CALLBACK, ("Log.on_train_batch_end", "t.py:9", False)),
    (lines(("t.py:9 Log.norms", 0.2)), CALLBACK, None),  # less than half
    (lines(("torch/optim/adam.py:5 step", 0.6)), CALLBACK, None),  # a library's
    (lines(("t.py:3 <module>", 0.6)), CALLBACK, None),
    (lines(("t.py:9 main", 0.6)), flame(("t.py:7 main", None, 0.4, 0.0), ("t.py:9 main", None, 0.6, 0.6)),
     ("main", "t.py:9", True, "", 1.0, 1.0)),  # the loop itself
    (lines(("t.py:7 main", 0.6)), flame(("t.py:7 main", None, 1.0, 0.2)), ("main", "t.py:7", True, "", 1.0, 0.2)),
])
def test_the_function_that_takes_the_gap(culprits, stacks, function):
    assert main_function(culprits, 0.6, stacks) == (None if function is None else UserFunction(*function))


@pytest.mark.parametrize("loader", ["", "user", "grain", "keras", "torch", "datasets"])
def test_what_makes_batches_is_made_ahead_and_not_seldom(loader):
    stacks = HostStacks(basis="step", gaps=(GapLines("gap", 0.6, 9, 9, (
        StackLine("t.py:9 burn", "/u/t.py", 0.6, 1.0, loader=loader),)),))
    function = main_function(lines(("t.py:9 burn", 0.6)), 0.6, stacks)
    assert function is not None and function.loader == loader
    verdict = StepGapHost(gpus=(), share=0.6, gap_s=0.6, silent_s=0.6, work=(), executor_work=())
    words = out_of_the_step(Explanation("t", "w", {}, "a", "s", "g"), verdict, function)
    assert ("every N steps" in words.action) == (not loader) and "t.py:9" in words.action
    assert ("batches" in words.title) == bool(loader)
    if loader and loader != "user":
        assert "worker" in f"{words.action}{words.snippet}"
    alone = out_of_the_step(Explanation("t", "w", {}, "a", "s", "g"), replace(verdict, one_cpu=True), function)
    assert ("samples cheaper" in alone.action) == bool(loader) and "worker" not in (alone.snippet or "")
    # Of several functions that make a batch none takes most of the gap.
    small = tuple(StackLine(f"t.py:{line} part", "/u/t.py", 0.15, 0.25, loader=loader) for line in range(4))
    words = describe_step_gap_host(replace(verdict, lines=small), Job("step", 1.0, "tensorflow", CUSTOM, ()))
    assert ("batches" in words.title) == ("next batch" in words.action or "worker" in words.action) == bool(loader)


def test_a_call_of_fit_for_each_step_is_the_cause_and_not_the_calls_from_python():
    """As in an agent that trains on one sample at a time: a call of fit() makes an iterator."""
    job = Job("step", 1.0, "tensorflow", KERAS3, ())
    for each, once in ((2.0, True), (0.1, False)):
        work = (GapWork("tf.function-graph_building", 0.2, 3.0), GapWork("MakeIterator::MapDataset", 0.1, each))
        words = describe_step_gap_host(StepGapHost(
            gpus=(), share=0.6, gap_s=0.6, silent_s=0.1, work=work, executor_work=()), job)
        assert ("train_on_batch" in (words.snippet or "")) == ("fit() once" in words.action) == once
        assert ("steps_per_execution" in (words.snippet or "")) != once
        predicts = describe_step_gap_host(StepGapHost(gpus=(), share=0.6, gap_s=0.6, silent_s=0.1, work=work,
                                                      executor_work=(), phase="prediction"), job)
        assert ("predict_on_batch" in predicts.action) == once and "fit()" not in predicts.action


def test_an_evaluation_after_each_update_in_a_session_is_fetched_with_it():
    b = Builder(gpus=0)
    for i in range(50):
        at = 10_000 * i
        b.host("SessionRun", at, 5_900, "python 1").host("gradients/MatMul:MatMul", at + 100, 5_700, "tf_Compute/1")
        b.host("SessionRun", at + 6_000, 3_500, "python 1").host("MatMul:MatMul", at + 6_100, 3_300, "tf_Compute/1")
    f = found(b)["step_gap_host"]
    assert f.gain.step_time == pytest.approx(0.41, abs=0.01) and "in the call of session.run that trains" in f.action


def test_the_fix_names_the_function_or_the_line_of_the_loop():
    words = Explanation("t", "w", {}, "a", "s", "g")
    verdict = StepGapHost(gpus=(), share=0.6, gap_s=0.6, silent_s=0.6, work=(), executor_work=())
    assert "Move norms (t.py:9) out" in out_of_the_step(words, verdict, UserFunction("norms", "t.py:9", False)).action
    of_loop = out_of_the_step(words, verdict, UserFunction("main", "t.py:9", True))
    assert "main" not in f"{of_loop.action}{of_loop.snippet}" and "t.py:9" in of_loop.action
    predicts = StepGapHost(gpus=(), share=0.6, gap_s=0.6, silent_s=0.6, work=(), executor_work=(),
                           inside=("prediction",))
    assert out_of_the_step(words, predicts, UserFunction("main", "t.py:9", True)) is words


def one_traced_step(python: bool) -> Builder:
    """One step of a script that prepares its input in the midst of it; ``python``: with the functions of Python."""
    b = Builder(format="chrome")
    b.host("ProfilerStep#3", 0, 300_000)
    b.host("aten::empty", 100, 50).run(0, 200, 100, "copy", launch=120, thread="python")
    if python:
        b.host("serve.py(12): <module>", 10, 299_900).host("serve.py(55): preprocess", 1_000, 149_000)
    for k in range(70):
        b.host("aten::linear", 150_000 + 2_000 * k, 100)
        b.run(0, 150_200 + 2_000 * k, 1_900, BF16, launch=150_050 + 2_000 * k, thread="python")
    return b


def test_of_a_single_step_a_tracer_of_python_shows_what_ran_in_its_pause():
    f = found(one_traced_step(python=True))["step_gap_host"]
    assert f.evidence["share_ratio"] == pytest.approx(0.53, abs=0.02) and f.severity == "medium"
    assert "serve.py:55 preprocess" in [culprit.name for culprit in f.culprits]
    assert "two complete steps" in missing(one_traced_step(python=False))["step_gap_host"]
    of_many = one_traced_step(python=False).host("serve.py(12): <module>", 10, 299_900)
    for k in range(4):  # no function takes most of it, and a job that only runs a model has no loss
        of_many.host(f"serve.py({60 + k}): part_{k}", 1_000 + 37_000 * k, 36_000)
    f = found(of_many)["step_gap_host"]
    assert "Prepare the next inputs" in f.action and "loss" not in (f.snippet or "")

"""Lines of Python in gaps by the functions that the profiler's own tracer wrote into the trace."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gputop.analysis.host import python_tracer
from gputop.analysis.host.python_libraries import is_library_below_path, is_library_file
from gputop.analysis.host.python_stacks import BUILT_IN, PythonStacks, StackSpans, line_text
from gputop.analysis.host.python_tracer import function_text, traced_stacks
from gputop.analysis.results import Analysis, GapLines
from gputop.core.host_stacks import StackFrame
from gputop.diagnosis.diagnose import analyze_to_facts, analyze_trace
from gputop.diagnosis.report import text_report
from gputop.timeline.idle_gap_report import IdleGapRow, text_of
from gputop.timeline.idle_gaps import rank_idle_gaps
from gputop.trace.model import Trace
from gputop.trace.readers.load import load
from tests.analysis.host.stack_samples import sampled
from tests.timeline.make import find_idle_gaps
from tests.trace.build import Builder, keras_steps

DATA = Path(__file__).resolve().parents[2] / "data"
SLOW = {name: own["slow_unix_s"] for name, own in json.loads((DATA / "steps.json").read_text()).items()
        if "slow_unix_s" in own}
STEP_MS, CALL_MS, STEPS = 100, 60, 12


def traced(*, gpus: int = 0) -> Trace:
    """Steps of 100 ms, whose call takes 60 ms; in the rest a callback of the user's sleeps for 30 ms."""
    b = keras_steps(Builder(gpus=gpus), STEPS, STEP_MS * 1000, CALL_MS * 1000)
    for i in range(STEPS):
        begin = 1000 * STEP_MS * i
        b.host("$trainer.py:237 function", begin + 1, 1000 * CALL_MS - 2)
        if gpus:
            b.run(0, begin + 1000, 1000 * CALL_MS - 1000, launch=begin + 500)
        after = begin + 1000 * CALL_MS
        b.host("$callback_list.py:194 on_train_batch_end", after + 1000, 36_000)
        b.host("$metrics.py:12 log_all", after + 1500, 35_000)
        b.host("$metrics.py:4 confusion", after + 2000, 34_000)
        b.host("$time sleep", after + 3000, 30_000)
    return b.build()


def gap(analysis: Analysis, kind: str = "gap") -> GapLines:
    assert analysis.stacks is not None
    return next(own for own in analysis.stacks.gaps if own.gap == kind)


@pytest.mark.parametrize("gpus", [0, 1])
def test_a_gap_names_the_innermost_function_of_the_user_s_own(gpus):
    found = gap(analyze_trace(traced(gpus=gpus)))
    first = found.lines[0]
    assert (first.line, first.inner, first.traced) == ("metrics.py:4 confusion", "time.sleep (built-in)", True)
    assert first.s_per_step == pytest.approx(0.034, rel=0.05)
    assert found.seen == found.gaps


def test_a_thread_that_only_waits_for_others_is_not_the_loop():
    """A logger's thread sits in one call all the time; the loop's runs ops."""
    b = Builder(gpus=0, format="chrome")
    b.host("app/log.py(300): writer", 0, 90_000, line="thread 5 (python)")
    for i in range(9):
        b.host("app/train.py(7): step", 10_000 * i, 8_000).host("aten::mm", 10_000 * i + 100, 5_000)
    (stacks,) = traced_stacks(b.build())
    assert {10_000_000 * i for i in range(9)} <= set(stacks.loop.start.tolist()) and len(stacks.others) == 1


def test_the_finding_the_report_and_the_gaps_say_who_recorded_it():
    facts = analyze_to_facts(traced(gpus=1))
    analysis = facts.analysis
    (finding,) = [f for f in analysis.findings if f.id == "step_gap_host"]
    assert finding.culprits[0].name == "metrics.py:4 confusion" and finding.culprits[0].traced
    text = text_report(analysis, 100)
    assert "In Python, from the trace's own tracer: metrics.py:4 confusion" in text
    assert "which identifies a function by its first line" in " ".join(text.split()) and "$metrics" not in text
    assert Analysis.from_json(analysis.to_json()) == analysis
    gaps = rank_idle_gaps(facts, 3)
    assert "metrics.py:4 confusion, mostly in time.sleep (built-in), from the trace's own tracer" in " ".join(
        text_of(gaps, facts, 0, 300).split())
    assert all(own.python[0].line == "metrics.py:4 confusion" for own in find_idle_gaps(facts, 3))
    assert IdleGapRow.of(find_idle_gaps(facts, 1)[0], facts, 0).python[0].traced


def test_sampled_stacks_are_preferred_as_they_tell_lines_to_functions_and_these_to_the_reason_why_there_are_none():
    trace = traced()
    trace.no_stacks = "py-spy is not installed"
    stacks = analyze_trace(trace).stacks
    assert stacks is not None and stacks.source == "tracer" and not stacks.reason
    trace.origin_ns = 1000 * 10 ** 9
    trace.stacks = (sampled({"MainThread": [(0.0, "train.py:9 <module>")]}, STEPS * STEP_MS / 1e3),)
    stacks = analyze_trace(trace).stacks
    assert stacks is not None and stacks.source == "py-spy"


def raw_seconds(name: str, wanted: str) -> float:
    """All time of one function, summed up from the JSON itself."""
    document = json.loads(gzip.decompress((DATA / name).read_bytes()))
    return sum(event["dur"] for event in document["traceEvents"]
               if event.get("cat") == "python_function" and event["name"].endswith(wanted)) / 1e6


@pytest.mark.parametrize(("file", "lines"), [
    ("jax_python.xplane.pb.gz", ["metrics.py:6 confusion_matrix"]),
    ("pytorch_stack.pt.trace.json.gz", ["metrics.py:11 confusion_matrix", "metrics.py:6 confusion_matrix"]),
])
def test_real_jobs_slow_function_takes_as_long_as_they_logged_themselves(file, lines):
    """The job slept in line 11; PyTorch 2.15 tells the line, JAX the function."""
    trace = load([DATA / file])
    facts = analyze_to_facts(trace)
    begin, end = (trace.origin_ns + t for t in (facts.steps.spans.start[0], facts.steps.spans.end[-1]))
    truth_s = sum(b - a for a, b in SLOW[file.partition(".")[0]] if begin / 1e9 <= a and b <= end / 1e9 + 1e-3)
    found = {line.line: line for line in gap(facts.analysis).lines}
    assert next(iter(found)) == lines[0] and set(lines) <= set(found)
    told_s = sum(found[line].s_per_step for line in lines) * facts.steps.count
    assert told_s == pytest.approx(truth_s, rel=0.05)
    (finding,) = [f for f in facts.analysis.findings if f.id == "step_gap_host"]
    assert finding.culprits[0].name == lines[0] and finding.culprits[0].traced
    flame = facts.analysis.stacks.flame
    for number, node in enumerate(flame):
        assert sum(own.time_s for own in flame if own.parent == number) <= node.time_s * (1 + 1e-9)


def test_the_loop_s_own_python_in_the_wait_for_a_batch_is_named():
    """A DataLoader without workers decodes in the loop."""
    file = "pytorch_stack.pt.trace.json.gz"
    facts = analyze_to_facts(load([DATA / file]))
    assert facts.steps is not None
    line = gap(facts.analysis, "input").lines[0]
    assert line.line == "train_torch.py:18 decode"
    # The recorded steps are all but one of those that the file holds whole.
    batches = raw_seconds(file, ": decode") / 20 * 4
    assert line.s_per_step == pytest.approx(batches, rel=0.1)


calls = st.recursive(st.just([]), lambda inner: st.lists(
    st.tuples(st.integers(0, 5), st.integers(0, 3), st.integers(0, 3), inner), max_size=4), max_leaves=25)


@given(calls, calls)
def test_at_each_instant_the_stack_is_of_the_calls_that_are_open(first, second):
    """Against a look at all events one by one."""
    b = Builder(gpus=0)
    events: list[tuple[str, str, int, int]] = []

    def put(line: str, tree: list, at: int) -> int:
        for function, before, after, inner in tree:
            begin = at + before
            end = put(line, inner, begin + 1) + after + 1
            events.append((line, f"$own.py:{function + 1} f{function}", begin, end))
            at = end
        return at

    ends = {line: put(line, tree, 0) for line, tree in (("python", first), ("other", second))}
    for line, name, begin, end in events:
        b.host(name, begin, end - begin, line=line)
    if not events:
        return
    trace = b.build()
    (process,) = traced_stacks(trace)
    threads = [process.loop, *process.others]
    wanted = []
    for line in ends:
        own = [(begin, -end, number, name) for number, (on, name, begin, end) in enumerate(events) if on == line]
        if own:
            wanted.append([[name for _, _, name in sorted((a, e, name) for a, e, _, name in own if a <= t < -e)]
                           for t in range(ends[line] + 1)])
    seen = [[stack_at(process, thread, 1000 * t) for t in range(len(of_one))]
            for thread, of_one in matched(threads, wanted, trace)]
    assert sorted(seen) == sorted(wanted)


def matched(threads: list[StackSpans], wanted: list[list[list[str]]], trace: Trace) -> list:
    """Each thread with the truth that ends when it does."""
    offset = -min(int(trace.host.start_ns.min()), 0)
    left = list(wanted)
    out = []
    for thread in threads:
        last = (int(thread.end[-1]) + offset) // 1000 if len(thread.end) else 0
        own = min(left, key=lambda truth: abs(sum(1 for names in truth if names) and max(
            i for i, names in enumerate(truth) if names) + 1 - last))
        left.remove(own)
        out.append((thread, own))
    return out


def stack_at(process: PythonStacks, thread: StackSpans, time_ns: int) -> list[str]:
    at = int(np.searchsorted(thread.start, time_ns, side="right")) - 1
    if at < 0 or time_ns >= thread.end[at] or thread.stack[at] < 0:
        return []
    frames = (process.frames[i] for i in process.stacks[int(thread.stack[at])])
    return [f"${frame.file}:{frame.line} {frame.function}" for frame in frames]


def test_calls_that_reach_beyond_the_one_around_them_are_cut():
    b = Builder(gpus=0).host("$a.py:1 f", 0, 100).host("$b.py:1 g", 50, 60).host("$c.py:1 h", 130, 10)
    (process,) = traced_stacks(b.build())
    assert [stack_at(process, process.loop, 1000 * t) for t in (10, 60, 105, 120, 135)] == [
        ["$a.py:1 f"], ["$a.py:1 f", "$b.py:1 g"], [], [], ["$c.py:1 h"]]


def test_more_stacks_than_are_kept_count_for_the_functions_around_them(monkeypatch):
    monkeypatch.setattr(python_tracer, "_MAX_STACKS", 20)
    b = Builder(gpus=0).host("$a.py:1 main", 0, 1000)
    for i in range(20):
        b.host(f"$b.py:{i + 1} f", 5 + 5 * i, 2)
    (process,) = traced_stacks(b.build())
    assert len(process.stacks) == 1 and stack_at(process, process.loop, 6500) == ["$a.py:1 main"]


def test_a_recursion_without_end_is_bounded():
    b = Builder(gpus=0)
    for i in range(1000):
        b.host("$a.py:1 f", i, 4000 - 2 * i)
    (process,) = traced_stacks(b.build())
    assert max(map(len, process.stacks)) == 300


@pytest.mark.parametrize(("name", "shown"), [
    ("$train.py:31 step", "train.py:31 step"), ("$time sleep", "time.sleep (built-in)"),
    ("$builtins isinstance", "isinstance (built-in)"), ("$<unknown> append", "append (built-in)"),
    ("$tensorflow.python._pywrap_tfe TFE_Py_Execute", "_pywrap_tfe.TFE_Py_Execute (built-in)"),
    ("$<frozen importlib._bootstrap>:1022 _find", "<frozen importlib._bootstrap>:1022 _find"),
    ("app/metrics.py(6): confusion", "metrics.py:6 confusion"),
    ("C:\\job\\train.py(6): main", "C:\\job\\train.py:6 main"),
    ("torchjob.py(28): <module>", "torchjob.py:28 <module>"), ("<built-in function sleep>", "sleep (built-in)"),
    ("<built-in method run_backward of torch._C._Engine object>", "run_backward of torch._C._Engine (built-in)"),
    ("<built-in method from_numpy of type object>", "from_numpy (built-in)"),
    ("<built-in method write_record of pybind11_builtins.pybind11_detail_function_record_v1_system_libstdcpp object>",
     "write_record (built-in)"),
    ("<built-in method  of pybind11_builtins.pybind11_detail_function_record_v1_system_libstdcpp object>",
     "a function without a name (built-in)"),
    ("aten::mm", None), ("nn.Module: Net_0", None), ("ProfilerStep#3", None), ("void gemm(float*, int): x", None),
    ("PjitFunction(step)", None), ("$ 5", None), ("", None),
])
def test_functions_are_told_by_their_names(name: str, shown: str | None) -> None:
    assert function_text(name) == shown


def test_a_range_of_the_user_s_that_looks_like_a_function_is_none(tmp_path: Path) -> None:
    path = tmp_path / "rank0.pt.trace.json"
    path.write_text(json.dumps({"traceEvents": [
        {"ph": "X", "cat": "user_annotation", "name": "a.py(3): f", "pid": 1, "tid": 1, "ts": 10, "dur": 5}]}))
    assert traced_stacks(load([path])) == []


def test_methods_of_different_objects_have_one_name_and_callers_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "rank0.pt.trace.json"
    path.write_text(json.dumps({"traceEvents": [
        {"ph": "X", "cat": "python_function", "name": "train.py(3): f", "pid": 1, "tid": 1, "ts": 0, "dur": 100},
        *({"ph": "X", "cat": "python_function", "name": f"<built-in method add of Tensor object at 0x{i:x}>", "pid": 1,
           "tid": 1, "ts": 10 * i, "dur": 5, "args": {"CallFrom": caller}}
          for i, caller in enumerate(["train.py:7", "train.py:8", "other.py:9", "train.py:x", 5], 1))]}))
    trace = load([path])
    assert sum("built-in" in name for name in trace.names) == 1
    (process,) = traced_stacks(trace)
    lines = {process.frames[stack[0]].line for stack in process.stacks if len(stack) > 1}
    assert lines == {3, 7, 8}  # a caller in another file, or none at all, tells of no line


def test_files_are_told_by_their_package_or_without_a_path_by_their_names() -> None:
    below_path = {
        True: ("torch/nn/modules/linear.py", "threading.py", "<frozen os>", "multiprocessing/pool.py",
               "/usr/lib/python3.11/site-packages/x.py"),
        False: ("<stdin>", "train.py", "mylib/metrics.py", "/home/u/train.py")}
    by_name = {
        True: ("pjit.py", "polymorphic_function.py", "callback_list.py", "threading.py", "gen_math_ops.py",
               "__init__.py"),
        False: ("train.py", "metrics.py", "data.py"), None: ("util.py", "trainer.py")}
    assert {answer: tuple(file for file in files if is_library_below_path(file) is answer)
            for answer, files in below_path.items()} == below_path
    assert {answer: tuple(file for file in files if is_library_file(file) is answer)
            for answer, files in by_name.items()} == by_name


def test_a_file_of_a_shared_name_belongs_to_who_calls_it() -> None:
    empty = StackSpans(*(np.empty(0, np.int64) for _ in range(4)))
    names = ["train.py", "util.py", "pjit.py"]
    process = PythonStacks([StackFrame("f", name, 1) for name in names], [is_library_file(name) for name in names],
                           [(0, 1), (2, 1), (0, 2, 1), (1,)], empty, (), 100.0)
    assert [process.own(i) for i in range(4)] == [[0, 1], [], [0], []]
    assert line_text(StackFrame("time.sleep", BUILT_IN)) == "time.sleep (built-in)"

"""Which lines ran in gaps, by stacks of which only the changes are known."""

from __future__ import annotations

import random
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from gputop.advice.registry import rule_of
from gputop.advice.trace.advise import lines_of_finding
from gputop.advice.verdict import Verdict
from gputop.analysis.host.python_stacks import sampled_stacks, stack_spans
from gputop.analysis.host.stack_lines import CALLS_GAP, Lines, gap_lines, line_text, lines_of_gaps, process_lines
from gputop.analysis.results import Analysis, GapLines, HostStacks
from gputop.core.host_stacks import StackFrame
from gputop.diagnosis.diagnose import analyze_to_facts, analyze_trace
from gputop.diagnosis.report import text_report
from gputop.trace.intervals import EMPTY, Spans, coverage, merge, subtract, union
from gputop.trace.model import Trace
from tests.analysis.host.stack_samples import frame, sampled, with_samples
from tests.trace.build import Builder, keras_steps

FIT = "train.py:90 <module> > keras/src/trainer.py:371 fit"
STEP = f"{FIT} > tensorflow/python/execute.py:53 quick_execute"
METRICS = f"{FIT} > keras/src/callbacks.py:98 on_batch_end > metrics.py:112 confusion_matrix > numpy/core.py:5 add"
LOGS = f"{FIT} > keras/src/utils/progbar.py:93 update"
STEP_S, CALL_S, STEPS = 0.1, 0.06, 12


def trace_of(stacks, *, gpus=0, input_s=0.0, **sampling) -> Trace:
    """Steps of 100 ms, whose call takes 60 ms; the trace begins at the Unix time 1000 s."""
    b = keras_steps(Builder(gpus=gpus), STEPS, STEP_S * 1e6, CALL_S * 1e6)
    for i in range(STEPS):
        if gpus:
            b.run(0, i * STEP_S * 1e6 + 1000, CALL_S * 1e6 - 1000, launch=i * STEP_S * 1e6 + 500)
        if input_s:
            b.host("IteratorGetNextOp::DoCompute", i * STEP_S * 1e6 + 1000, input_s * 1e6, line="tf_Compute/1")
    return with_samples(b, stacks, STEPS * STEP_S, **sampling)


def analysis_of(stacks, **more) -> Analysis:
    return analyze_trace(trace_of(stacks, **more))


def gap(analysis: Analysis, kind: str = "gap") -> GapLines:
    assert analysis.stacks is not None
    return next(own for own in analysis.stacks.gaps if own.gap == kind)


def loop(in_gap: str, late_s: float = 0.005) -> list[tuple[float, str]]:
    changes = [(0.0, STEP)]
    for i in range(STEPS):
        changes += [(i * STEP_S + CALL_S + late_s, in_gap), ((i + 1) * STEP_S + late_s, STEP)]
    return changes[:-1]


def two_ranks() -> Trace:
    """Rank 1 sleeps in 30 of each 40 ms, and rank 0 waits for it in its backward pass."""
    b = Builder(gpus=0, format="chrome")
    sleep, backward = f"{FIT} > train.py:9 augment", f"{FIT} > torch/autograd/graph.py:979 _engine_run_backward"
    changes: list[list[tuple[float, str]]] = [[], []]
    for i in range(STEPS):
        at = i * 40_000
        for rank, begin in ((0, at), (1, at + 30_000)):
            b.host("aten::mm", begin, 4_000, line=f"rank {rank}")
            b.host("autograd::engine::evaluate_function: AddmmBackward0", begin + 4_000,
                   at + 38_000 - begin - 4_000, line=f"rank {rank}")
            b.host("Optimizer.step#SGD.step", at + 38_000, 1_990, line=f"rank {rank}", annotation=1)
        changes[0].append((at / 1e6, backward))
        changes[1] += [(at / 1e6, sleep), ((at + 30_000) / 1e6, backward)]
    trace = b.build()
    trace.lines = [replace(line, rank=int(line.name[-1])) for line in trace.lines]
    trace.paths = ["rank0.pt.trace.json", "rank1.pt.trace.json"]
    trace.origin_ns = 1000 * 10 ** 9
    trace.stacks = tuple(sampled({"MainThread": each}, STEPS * 0.04, rate_hz=1000.0) for each in changes)
    return trace


def test_the_gaps_of_one_rank_name_no_line_of_another():
    """Rank 0 is in its backward pass all the time, also while rank 1 sleeps."""
    found = gap(analyze_trace(two_ranks()))
    assert [line.line for line in found.lines] == ["train.py:9 augment"]
    assert found.s_per_step == pytest.approx(0.03, rel=0.05) and found.lines[0].share > 0.9


@pytest.mark.parametrize("gpus", [0, 1])  # with a GPU the gap is its idle time
def test_a_gap_names_the_user_s_line_that_every_step_does_not_run_in(gpus):
    found = gap(analysis_of({"MainThread": loop(METRICS)}, gpus=gpus))
    assert found.lines[0].line == "metrics.py:112 confusion_matrix"
    assert found.lines[0].inner == "numpy/core.py:5 add"
    assert found.lines[0].s_per_step == pytest.approx(0.04, rel=0.15) and found.s_per_step == pytest.approx(0.04, 0.05)
    assert (found.gaps, found.seen) == (STEPS - 1, STEPS - 1)


def test_a_tracer_shows_pauses_by_its_own_calls():
    process = sampled_stacks(sampled({"MainThread": [(0.0, STEP), (2.0, LOGS)]}, 4.0), 1000 * 10**9)
    within, steps = union([0], [4 * 10**9]), union([0], [2 * 10**9])
    assert Lines(process, steps).pauses(within, 0.0)[0].total == pytest.approx(2e9, rel=0.01)
    assert Lines(replace(process, rate_hz=float("inf")), steps).pauses(within, 0.0) == (EMPTY, EMPTY)


def test_a_stack_that_all_steps_have_is_around_them():
    """No change is seen in steps that run one stack: the line that calls fit names no pause before them."""
    changes = [(0.0, f"{FIT} > keras/src/backend.py:5 wait"), (1.0, STEP)]
    process = sampled_stacks(sampled({"MainThread": changes}, 4.0), 1000 * 10**9)
    wait, steps = (union([round(begin * 1e9)], [round(end * 1e9)]) for begin, end in ((0.2, 0.9), (2.0, 3.0)))
    ((line, *_),) = Lines(process, steps).of(wait)
    assert line_text(line) == "keras/…/backend.py:5 wait"


@pytest.mark.parametrize(("caller", "loader"), [
    ("keras/src/trainers/data_adapters/py_dataset_adapter.py:7 get", "keras"), ("grain/dataset/map.py:7 next", "grain"),
    ("torch/utils/data/dataloader.py:7 __next__", "torch"), ("datasets/arrow_dataset.py:7 __getitem__", "datasets"),
    ("keras/src/callbacks.py:7 on_batch_end", ""), ("data.py:7 make_batch", "user"), ("data.py:7 tokenize", "user"),
    ("data.py:7 Log.on_train_batch_end > data.py:8 decode", ""), ("data.py:7 eval_batch", "")])
def test_what_calls_a_line_to_make_a_batch_is_told(caller, loader):
    found = gap(analysis_of({"MainThread": loop(f"{FIT} > {caller} > data.py:6 burn")}))
    assert (found.lines[0].line, found.lines[0].loader) == ("data.py:6 burn", loader)


@pytest.mark.parametrize(("called", "saves"), [
    ("orbax/checkpoint/checkpointer.py:306 Checkpointer.save > etils/epath.py:9 mkdir", True),
    ("safetensors/torch.py:286 save_file", True), ("flax/serialization.py:60 to_bytes", True),
    ("keras/src/saving/saving_api.py:90 save_model", True), ("torch/serialization.py:900 save", True),
    ("torch/serialization.py:1500 load", False), ("numpy/lib/npyio.py:500 save", False),
    ("saving.py:9 save_figure", False)])
def test_a_line_that_has_a_library_save_a_checkpoint_is_told_as_that(called, saves):
    found = analysis_of({"MainThread": loop(f"{FIT} > train.py:12 keep > {called}")})
    first, host_work = gap(found).lines[0], {f.id: f for f in found.findings}["step_gap_host"]
    assert first.saves == saves
    assert ("saving checkpoints, train.py:12 keep (" in host_work.why) == saves == host_work.action.startswith("Save")


def test_where_only_a_library_ran_its_innermost_line_is_named():
    assert gap(analysis_of({"MainThread": loop(LOGS)})).lines[0].line == "keras/…/progbar.py:93 update"


def test_the_finding_names_the_lines_and_the_report_says_how_they_were_had():
    analysis = analysis_of({"MainThread": loop(METRICS)})
    (finding,) = [f for f in analysis.findings if f.id == "step_gap_host"]
    assert finding.culprits[0].kind == "line" and finding.culprits[0].name == "metrics.py:112 confusion_matrix"
    text = text_report(analysis, 100)
    assert re.search(r"Line +metrics\.py:112 confusion_matrix", text)
    assert "of each step: metrics.py:112 confusion" in text and "100 times a second" in text
    assert Analysis.from_json(analysis.to_json()) == analysis


@pytest.mark.parametrize(("share", "named"), [(0.4, True), (0.03, False)])
def test_a_finding_about_few_of_the_gaps_names_no_line_of_all_of_them(share, named):
    """As the finding that every 64th step is long, in a job whose callback takes most of every step."""
    rule = rule_of("long_steps", "trace")
    assert rule is not None
    facts = analyze_to_facts(trace_of({"MainThread": loop(METRICS)}))
    lines = lines_of_finding(rule, Verdict(gpus=(), share=share), facts)
    assert bool(lines) == named


@pytest.mark.parametrize(("gap_s", "named"), [(0.0016, False), (0.007, False), (0.012, True)])
def test_of_gaps_within_twice_the_error_of_the_samples_no_line_is_named(gap_s, named):
    """The samples may be 4 ms off: what was seen in so short a gap may have run in the step."""
    b, changes = keras_steps(Builder(gpus=0), 60, 20_000, 20_000 - gap_s * 1e6), [(0.0, STEP)]
    for i in range(60):
        changes += [(0.02 * (i + 1) - 0.8 * gap_s, METRICS), (0.02 * (i + 1), STEP)]
    trace = with_samples(b, {"MainThread": changes[:-1]}, 1.2, rate_hz=1000.0)
    assert bool(gap(analyze_trace(trace)).lines) == named


def test_a_line_that_begins_as_often_in_the_step_is_no_line_of_the_gaps():
    """A loop without functions: the lines of a step are seen in its gaps, too, where the clocks differ."""
    forward, backward, update, show = (f"train.py:{line} <module>" for line in (47, 48, 49, 50))
    changes = []
    for i in range(STEPS):
        at = i * STEP_S
        changes += [(at + 0.001, forward), (at + 0.02, backward), (at + 0.04, update)]
        changes += [(at + CALL_S + 0.002, backward), (at + CALL_S + 0.02, show)]
    named = [line.line for line in gap(analysis_of({"MainThread": changes})).lines]
    assert named == ["train.py:50 <module>"]


@pytest.mark.parametrize(("weight", "named"), [(4.0, ["best.py:8 keep"]), (0.05, [])])  # gaps: a tenth
def test_of_gaps_too_short_for_samples_the_loop_tells_what_it_calls_below_its_step(weight, named):
    """Steps of 5 ms whose gap takes 2 ms, with samples that may be 4 ms off: by lines, not by times."""
    loop = "train.py:90 main > train.py:{} train"
    parts = [("40", " > torch/nn/modules/module.py:7 Module._call_impl"), ("41", " > losses.py:3 loss"),
             ("42", " > torch/autograd/graph.py:9 _engine_run_backward"),
             ("43", " > torch/optim/adam.py:5 Adam.step"), ("44", " > best.py:8 keep > copy/copy.py:1 deepcopy")]
    b, changes, rng = Builder(gpus=0, format="chrome"), [], random.Random(7)
    for i in range(300):
        at = i * 5_000
        b.host("aten::mm", at, 1_500).host("autograd::engine::evaluate_function: MmBackward0", at + 1_500, 1_000)
        b.host("Optimizer.step#Adam.step", at + 2_500, 500, annotation=1).host("aten::copy_", at + 3_200, 1_500)
        number = rng.choices(range(5), (3, 2, 2, 1, weight))[0]  # whatever the step is at
        changes.append((at / 1e6, loop.format(parts[number][0]) + parts[number][1]))
    analysis = analyze_trace(with_samples(b, {"MainThread": changes}, 1.5, rate_hz=1000.0))
    found = gap(analysis)
    assert (found.seen, [line.line for line in found.lines]) == (0, named)
    if not named:
        return
    assert found.lines[0].s_per_step == pytest.approx(5e-3 * 4 / 12, rel=0.25)
    finding = next(f for f in analysis.findings if f.id == "step_gap_host")
    assert finding.action.startswith("Move keep (best.py:8) out of the training loop")
    assert finding.title == "keep (best.py:8) takes at least 29% of the step"
    assert finding.gain.step_time == finding.evidence["share_ratio"] == pytest.approx(0.29, abs=0.01)
    assert "Over all samples" in text_report(analysis, 100)


@pytest.mark.parametrize("own", ["log.py:9 Hist.on_train_batch_end", "keras/src/backend/core.py:409 to_numpy"])
def test_of_gaps_too_short_for_samples_a_callback_is_named_as_it_runs_after_each_batch_and_never_the_call_of_fit(own):
    loop = "train.py:5 <module> > keras/src/trainers/trainer.py:399 fit > {}"
    parts = [loop.format("tensorflow/python/eager/polymorphic_function.py:833 Function.__call__"),
             loop.format("keras/src/callbacks/callback_list.py:198 CallbackList.on_train_batch_end > "
                         + own)]
    b, rng = keras_steps(Builder(gpus=0), 300, 5_000, 2_500), random.Random(7)
    changes = [(i * 5e-3, rng.choice(parts)) for i in range(300)]
    trace = with_samples(b, {"MainThread": changes}, 1.5, rate_hz=1000.0)
    finding = next(f for f in analyze_trace(trace).findings if f.id == "step_gap_host")
    assert finding.action.startswith("Move Hist.on_train_batch_end (log.py:9) out") == own.startswith("log")
    assert finding.gain.claim == "about" or not own.startswith("log")
    assert "train.py" not in f"{finding.title}{finding.action}" and finding.culprits


def test_the_line_that_runs_the_step_is_none_of_the_gaps_in_which_its_thread_has_no_cpu():
    step, calls = "train.py:90 main > train.py:41 train > torch/{}", ("nn/modules/module.py:7 Module._call_impl",
                                                                     "optim/adam.py:5 Adam.step")
    b, changes = Builder(gpus=0, format="chrome"), []
    for i in range(20):
        at = i * 100_000
        b.host("aten::mm", at, 20_000).host("autograd::engine::evaluate_function: MmBackward0", at + 20_000, 10_000)
        b.host("Optimizer.step#Adam.step", at + 30_000, 10_000, annotation=1)
        changes += [(at / 1e6, step.format(calls[0])), (at / 1e6 + 0.03, step.format(calls[1])),
                    (at / 1e6 + 0.045, step.format(calls[0])), (at / 1e6 + 0.08, "train.py:90 main > log.py:3 write")]
    trace = with_samples(b, {"MainThread": changes}, 2.0, rate_hz=1000.0)
    assert [line.line for line in gap(analyze_trace(trace)).lines] == ["log.py:3 write"]


@pytest.mark.parametrize(("iterator", "named"), [("_SingleProcessDataLoaderIter", True),
                                                 ("_MultiProcessingDataLoaderIter", False)])
def test_the_loop_s_own_thread_is_named_where_it_makes_the_batches(iterator, named):
    """With num_workers=0 the wait for a batch is the dataset's own Python; with workers the loop waits in a queue."""
    b = Builder(gpus=0, format="chrome")
    fetch = "train.py:9 <module> > torch/utils/data/dataloader.py:7 __next__ > data.py:6 Slow.__getitem__"
    changes = []
    for i in range(STEPS):
        at = i * STEP_S
        b.host(f"enumerate(DataLoader)#{iterator}.__next__", at * 1e6, 60_000)
        b.host("aten::mm", at * 1e6 + 60_100, 39_000)
        b.host("Optimizer.step#SGD.step", at * 1e6 + 99_200, 700)
        changes += [(at + 0.002, fetch), (at + CALL_S + 0.01, "train.py:12 <module>")]
    trace = with_samples(b, {"MainThread": changes}, STEPS * STEP_S)
    f = next(f for f in analyze_trace(trace).findings if f.id == "input_bound")
    assert [c.name for c in f.culprits if c.kind == "line"] == (["data.py:6 Slow.__getitem__"] if named else [])
    # A sample of the step that falls into a wait is none of it, whatever of the user's is there.
    fetch = fetch.rpartition(" > ")[0]
    changes = [(at + shift, text) for at, text in changes for shift, text in (
        ((0.0, "model.py:4 forward"), (0.01, fetch)) if "__next__" in text else ((0.0, text),))]
    trace = with_samples(b, {"MainThread": changes}, STEPS * STEP_S)
    f = next(f for f in analyze_trace(trace).findings if f.id == "input_bound")
    assert [c.name for c in f.culprits if c.kind == "line"] == (["train.py:9 <module>"] if named else [])


def test_of_gaps_in_which_no_sample_fell_nothing_is_told():
    seldom = [(0.0, STEP), (0.55, METRICS), (0.561, STEP)]  # 5 samples a second
    found = gap(analysis_of({"MainThread": seldom}, rate_hz=5.0))
    assert found.seen < 3 and not found.lines and found.gaps == STEPS - 1


def test_a_stack_of_gaps_that_goes_on_is_in_the_next_gap_too():
    """The call of the step is so short that no sample falls into most of them, and the gap shorter than 3 intervals."""
    changes = [(0.0, STEP), (0.07, METRICS), (0.3, STEP), (0.37, METRICS), (0.9, STEP), (0.97, METRICS)]
    found = gap(analysis_of({"MainThread": changes}, rate_hz=60.0))
    assert found.seen >= STEPS - 2 and found.lines[0].line == "metrics.py:112 confusion_matrix"
    step_goes_on = [(0.0, STEP), (0.065, METRICS), (0.105, STEP), (0.165, METRICS), (0.205, STEP), (0.265, LOGS),
                    (0.305, STEP)]
    assert gap(analysis_of({"MainThread": step_goes_on}, rate_hz=60.0)).seen == 3


def test_a_wait_for_input_names_other_threads_and_not_those_that_wait_for_work():
    decode = [(0.0, "train.py:20 decode"), *((0.1 * i, f"train.py:{20 + i % 2} decode") for i in range(1, 12))]
    idle = [(0.001, "train.py:5 worker > lib/queue.py:1 get")]
    analysis = analysis_of({"MainThread": [(0.0, STEP)], "decoder": decode, "idle": idle}, input_s=0.05)
    names = [line.line for line in gap(analysis, "input").lines]
    assert names and all(name.endswith("decode") for name in names)
    assert sum(line.share for line in gap(analysis, "input").lines) == pytest.approx(1.0, abs=0.02)


def test_a_thread_that_was_seen_long_ago_is_not_charged():
    b = keras_steps(Builder(gpus=0), 60, STEP_S * 1e6, CALL_S * 1e6)
    for i in range(60):
        b.host("IteratorGetNextOp::DoCompute", i * STEP_S * 1e6 + 1000, 50_000, line="tf_Compute/1")
    short, asleep = [(0.0, "train.py:20 open"), (0.01, "train.py:21 decode")], [(0.0, "train.py:30 heartbeat")]
    trace = with_samples(b, {"MainThread": [(0.0, STEP)], "short": short, "asleep": asleep}, 6.0)
    (line,) = gap(analyze_trace(trace), "input").lines
    assert line.line == "train.py:21 decode" and line.share == pytest.approx(2.0 / 6.0, abs=0.05)


def test_a_loop_that_makes_its_batches_is_not_charged_with_other_threads():
    makes, other = "train.py:9 main > torch/utils/data/dataloader.py:7 next > train.py:20 load", "train.py:30 beat"
    changes, beats = [], []
    for i in range(10):
        changes += [(i * 0.1, makes), (i * 0.1 + 0.08, STEP)]
        beats += [(i * 0.1, f"{other} > train.py:31 write"), (i * 0.1 + 0.002, other)]
    for loads, names in ((True, {"train.py:20 load"}), (False, {"train.py:30 beat", "train.py:31 write"})):
        process = sampled_stacks(sampled({"MainThread": changes, "beat": beats}, 1.0), 1000 * 10**9, loads)
        waits = union([i * 10**8 for i in range(10)], [i * 10**8 + 8 * 10**7 for i in range(10)])
        found = gap_lines("input", [waits], 0.08, process_lines([process], union([0], [10**9]), [waits]))
        assert {line.line for line in found.lines} <= names and found.lines


def test_a_line_that_prepares_while_jaxs_programs_run_is_beside_their_calls():
    """The calls return at once and lie within the error of the samples' clock; the program runs for half of a step."""
    prepares, calls = (f"train.py:90 <module> > train.py:{line} main" for line in (11, 12))
    prepares += " > jax/_src/dtypes.py:7 dtype"
    b, changes = Builder(gpus=0), []
    for i in range(30):
        at = i * 40_000
        b.host("PjitFunction(train_step)", at + 38_000, 1_000)
        b.host("ThunkExecutor::Execute", at + 39_000, 20_000, line="tf_XLAPjRtCpuClient/7")
        changes += [(at / 1e6, prepares), (at / 1e6 + 0.038, calls)]
    found = gap(analyze_trace(with_samples(b, {"MainThread": changes}, 1.2, rate_hz=1000.0)))
    assert found.lines[0].line == "train.py:11 main" and found.lines[0].inner == "jax/…/dtypes.py:7 dtype"


def test_without_samples_the_reason_stands_where_they_would_help():
    trace = keras_steps(Builder(gpus=0), STEPS, STEP_S * 1e6, CALL_S * 1e6).build()
    assert analyze_trace(trace).stacks is None
    trace.no_stacks = "py-spy is not installed"
    analysis = analyze_trace(trace)
    assert analysis.stacks == HostStacks(reason="py-spy is not installed")
    assert "py-spy is not installed" in text_report(analysis, 100)


def test_the_flame_graph_adds_up():
    analysis = analysis_of({"MainThread": loop(METRICS)})
    flame = analysis.stacks.flame
    assert flame[0].line == "train.py:90 <module>" and flame[0].parent is None
    for number, node in enumerate(flame):
        assert sum(own.time_s for own in flame if own.parent == number) <= node.time_s * (1 + 1e-9)
        assert node.parent is None or node.parent < number
        assert node.gap_s <= node.time_s * (1 + 1e-9)
    assert not any("callbacks.py" in node.line for node in flame)  # it does nothing but pass the call on
    assert next(node for node in flame if "metrics.py" in node.line).gap_s == pytest.approx(0.036, abs=0.006)


@pytest.mark.parametrize(("text", "shown"), [
    ("/home/u/train.py", "train.py:7 f"), ("/e/lib/python3.11/site-packages/keras/src/utils/progbar.py",
                                           "keras/…/progbar.py:7 f"),
    ("/usr/lib/python3/dist-packages/six.py", "six.py:7 f"), ("<string>", "<string>:7 f"),
    ("/tmp/__autograph_generated_file8x.py", "f (AutoGraph)"), ("", ":7 f"),
])
def test_lines_are_named_as_one_would_look_for_them(text: str, shown: str) -> None:
    assert line_text(StackFrame("f", text, 7)) == shown
    qualified = "outer_factory.<locals>.inner_factory.<locals>.tf__load.<locals>.if_body.<locals>.<lambda>"
    assert line_text(StackFrame(qualified, "a.py", 3)) == "a.py:3 load.<lambda>"


@given(st.integers(0, 10 ** 6), st.floats(20.0, 1000.0), st.floats(0.02, 0.5), st.floats(0.02, 0.5))
def test_what_runs_in_gaps_is_charged_by_random_samples(seed: int, rate_hz: float, call_s: float, gap_s: float) -> None:
    """The truth is a loop of a call and a gap in which two lines run; samples come at random, as py-spy's do."""
    rng = random.Random(seed)
    period = call_s + gap_s
    steps = int(max(40, 400 / (rate_hz * gap_s)))

    def runs(t: float) -> str:
        at = t % period
        return STEP if at < call_s else METRICS if at < call_s + 0.75 * gap_s else LOGS

    t, changes = 0.0, [(0.0, STEP)]
    while (t := t + rng.expovariate(rate_hz)) < steps * period:
        if runs(t) != changes[-1][1]:
            changes.append((t, runs(t)))
    samples = sampled({"MainThread": changes}, steps * period, start_s=0.0, rate_hz=rate_hz)
    starts = (np.arange(steps) * period + call_s) * 1e9
    gaps = Spans(starts.astype(np.int64), (starts + gap_s * 1e9).astype(np.int64))
    window = union([0], [int(steps * period * 1e9)])
    lines = Lines(sampled_stacks(samples, 0), subtract(window, gaps))
    seen = lines.seen(gaps)
    times = {line_text(f).partition(":")[0]: time for f, time, *_ in lines.of(seen)}
    assert sum(times.values()) <= seen.total + 1000 * len(seen.start)
    assert all(time >= 0 for time in times.values())
    if rate_hz * min(call_s, gap_s) >= 10:  # several samples in each: then the parts are right, too
        assert times["metrics.py"] / seen.total == pytest.approx(0.75, abs=0.12)
        assert len(seen.start) >= 0.9 * steps


@given(st.lists(st.floats(0.0, 10.0), max_size=40), st.floats(1.0, 1000.0), st.integers(-10 ** 10, 10 ** 10))
def test_stacks_of_a_thread_are_disjoint_and_in_order(times: list[float], rate_hz: float, origin_ns: int) -> None:
    rising = sorted({round(t, 5) for t in times})
    samples = sampled({"MainThread": [(t, f"a.py:{i} f") for i, t in enumerate(rising)]}, 10.0, rate_hz=rate_hz)
    spans = stack_spans(samples, samples.threads[0], origin_ns)
    assert (spans.start <= spans.seen).all() and (spans.end[:-1] <= spans.start[1:]).all()
    assert (spans.end >= spans.start).all() and coverage(EMPTY, spans.start, spans.end).sum() == 0
    window = union([int(1000e9) - origin_ns], [int(1010e9) - origin_ns])
    if rising:
        assert coverage(window, spans.start, spans.end).sum() <= 10.0 * 1e9 + 1


def test_single_gaps_have_their_own_lines():
    samples = sampled({"MainThread": [(0.0, STEP), (0.5, METRICS), (0.6, STEP), (0.8, LOGS)]}, 1.0, start_s=0.0)
    lines = Lines(sampled_stacks(samples, 0), EMPTY)
    first, second, unseen = lines_of_gaps([lines], [(500_000_000, 600_000_000, "gap"), (800_000_000, 10 ** 9, "eager"),
                                                    (700_000_000, 701_000_000, "gap")])
    assert first[0].line == "metrics.py:112 confusion_matrix" and second[0].line == "train.py:90 <module>"
    assert not unseen
    assert frame("a.py:1 f").file == "/home/u/a.py"


def test_a_function_that_a_compiled_one_calls_is_named_on_whatever_thread():
    """TensorFlow calls numpy_function's Python on a thread of its executor, and the loop waits."""
    b = keras_steps(Builder(gpus=0), STEPS, STEP_S * 1e6, 0.99 * STEP_S * 1e6)
    for i in range(STEPS):
        b.host("PyFunc:PyFunc", i * STEP_S * 1e6 + 1000, 0.8 * STEP_S * 1e6, line="tf_Compute/1")
    called = "tensorflow/python/ops/script_ops.py:269 __call__ > loss.py:12 soft_dtw > loss.py:40 row"
    others = [(i * STEP_S + at, text) for i in range(STEPS) for at, text in ((0.001, called), (0.081, ""))]
    stacks = {"MainThread": [(0.0, STEP)], "executor": others, "writer": [(0.0, "log.py:7 write")]}
    analysis = analyze_trace(with_samples(b, stacks, STEPS * STEP_S))
    (finding,) = [finding for finding in analysis.findings if finding.id == "host_placement"]
    assert [(c.name, c.kind) for c in finding.culprits] == [("loss.py:12 soft_dtw", "line")]


def test_what_gputop_runs_in_the_job_is_no_culprit():
    """The guard that stands by in a job of PyTorch while it is recorded."""
    guard = "gputop_kineto:184 _Guard._run > gputop_kineto:190 _Guard._receive"
    stacks = {"MainThread": [(0.0, STEP)], "guard": [(i * STEP_S, guard) for i in range(STEPS)]}
    assert not gap(analysis_of(stacks, input_s=0.05), "input").lines


@pytest.mark.parametrize("steps_line", [166, 176])
def test_what_steps_run_too_is_told_by_the_line_that_calls_it(steps_line):
    """The loop calls a solver in each step, and once more for a test, in which no line of it takes half of the time."""
    inner = [f"solver.py:{n} solve > torch/nn/linear.py:9 forward" for n in range(6)]
    stacks = [(n * 0.01, f"demo.py:{176 if n > 80 else steps_line} <module> > {inner[n % 6]}") for n in range(120)]
    python = sampled_stacks(sampled({"MainThread": stacks}, 1.2), 1000 * 10**9)
    outside, gap = union([0], [800_000_000]), union([820_000_000], [1_200_000_000])
    lines = gap_lines(CALLS_GAP, [gap], 0.38, process_lines([python], merge(outside, gap), [gap])).lines
    assert (lines[0].line == "demo.py:176 <module>" and lines[0].share > 0.9) == (steps_line == 166)

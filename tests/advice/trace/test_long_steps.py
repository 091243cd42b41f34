"""Steps that take far longer than the others."""

from __future__ import annotations

import numpy as np
import pytest

from gputop.advice.trace.known_work import UserFunction
from gputop.advice.trace.long_steps import less_often
from gputop.advice.verdict import Explanation
from gputop.analysis.steps.long_steps import long_steps, period_of
from tests.advice.trace.long_step_traces import COUNT, STEP, job
from tests.advice.trace.traces import abstained, findings
from tests.analysis.host.stack_samples import sampled
from tests.trace.build import Builder


@pytest.mark.parametrize(("name", "words"), [
    ("SaveV2", "saving checkpoints"), ("WriteScalarSummary", "writing summaries"), ("gc", "garbage collection"),
    ("SetWeights", "SetWeights"), ("", "Python without events")])
def test_work_every_so_many_steps_is_told_with_its_steps(name, words):
    found = findings(job(dict.fromkeys(range(2, COUNT, 5), 20000.0), name))
    f = found["long_steps"]
    assert "Every 5th step takes 20.0 ms longer" in f.title and words in f.title
    assert "3, 8, 13, 18" in f.why.replace("Steps ", "") and f.evidence["every_steps"] == 5
    assert f.gain.step_time == pytest.approx(6 * 20 / (COUNT * 10 + 6 * 20), abs=0.01)
    # It is in no other step: no finding speaks of each step.
    assert "step_gap_host" not in found and {c.id for c in f.consequences} <= {
        "step_gap_host", "time_outside_steps", "batch_size_headroom"}


def test_long_steps_in_which_a_library_saves_are_told_by_the_line_that_calls_it():
    trace, begin = job(dict.fromkeys(range(2, COUNT, 5), 60_000.0)).build(), 0.0
    fit, changes = "train.py:90 <module> > keras/src/trainer.py:371 fit", list[tuple[float, str]]()
    for i in range(COUNT + 1):
        changes.append((begin, f"{fit} > tensorflow/python/execute.py:53 quick_execute"))
        begin += 0.0092
        if i % 5 == 2:
            changes.append((begin, f"{fit} > train.py:12 keep > torch/serialization.py:900 save"))
            begin += 0.06
        begin += 0.0008
    trace.origin_ns, trace.stacks = 1000 * 10 ** 9, (sampled({"MainThread": changes}, begin, rate_hz=1000.0),)
    f = findings(trace)["long_steps"]
    assert f.title.endswith("saving checkpoints (train.py:12 keep)") and f.action.startswith("Save less often")


def test_where_nsight_records_no_wait_for_a_batch_a_late_one_may_be_that():
    b, at = Builder(format="nsys"), 0.0
    for i in range(30):
        b.host(f"step {i}", at, 9_900, line="python/7")
        for k in range(3):
            b.run(0, at + 3_000 * k + 20, 2_900, "at::native::add", launch=at + 3_000 * k, thread="python/7")
        at += 10_000 + (40_000 if i in (4, 9, 21) else 0)
    f = findings(b)["long_steps"]
    assert "or the wait for a batch" in f.title and f.action.startswith("Give the DataLoader worker processes")


def test_batches_that_come_late_now_and_then_follow_from_the_input():
    found = findings(job({4: 50_000.0, 9: 50_000.0, 21: 50_000.0}, input_wait=True))
    assert "long_steps" in {f.id for f in found["input_bound"].consequences}
    alone = findings(job({4: 6_500.0, 9: 6_500.0}, input_wait=True))  # below what is called bound by input
    assert "input_bound" not in alone and "waiting for a batch" in alone["long_steps"].title


@pytest.mark.parametrize("long", [
    {}, {7: 14_000.0}, dict.fromkeys(range(0, COUNT, 2), 20000.0), {3: 2_000.0, 8: 2_000.0},
], ids=["none", "one of little weight", "every second", "not far"])
def test_no_long_steps(long):
    assert "long_steps" not in findings(job(long))


def test_long_steps_that_are_unlike_are_listed():
    f = findings(job({4: 6_500.0, 9: 90_000.0}))["long_steps"]
    assert f.title.startswith("2 of 30 steps take 6.5 ms to 90.0 ms longer") and "Step 10 is the longest." in f.why
    assert f.evidence["longest_more_s"] == pytest.approx(0.09)
    alike = findings(job({4: 60_000.0, 9: 70_000.0}))["long_steps"]
    assert alike.title.startswith("2 of 30 steps take 65.0 ms longer") and "longest" not in alike.why
    f = findings(job({4: 30_000.0, 9: 30_000.0, 21: 30_000.0}, kernel=True))["long_steps"]
    assert "3 of 30 steps" in f.title and "long_matmul" in f.title and "5, 10, 22" in f.why
    assert f.evidence["compute_more_s"] == pytest.approx(0.03)


@pytest.mark.parametrize(("more", "severity"), [(50_000.0, "low"), (100_000.0, "medium")])
def test_one_long_step_is_told_and_may_be_an_accident(more, severity):
    f = findings(job({7: more}))["long_steps"]
    assert f.severity == severity and f.title.startswith("Step 8 of 30 takes") and "once in this recording" in f.title
    assert f.gain.step_time is None and "how often it occurs" in f.gain.how


def test_steps_that_vary_or_are_few_are_not_called_long():
    rng = np.random.default_rng(3)
    assert long_steps(np.exp(0.25 * rng.standard_normal(200))) is None
    found = long_steps(np.array([1.0, 1.01, 0.99, 2.0] * 5))
    assert found is not None and found.every == 4 and found.indices.tolist() == [3, 7, 11, 15, 19]
    beside = np.array([1.0, 1.01, 0.99, 1.0, 2.0] * 5 + [1.0, 3.0])
    found = long_steps(beside)
    assert found is not None and found.every == 5 and found.indices.tolist() == [4, 9, 14, 19, 24]
    assert "8 complete steps" in abstained(job({2: 20_000.0, 4: 20_000.0}, count=6))["long_steps"]


def test_a_wait_between_two_calls_counts_once_without_a_gpu():
    b, begin = Builder(gpus=0), 0.0
    for i in range(COUNT + 1):
        wait = 20_000.0 if i % 5 == 2 else 10.0
        b.host("EagerExecute", begin, 9_000, is_func=1, eager_op="__inference_multi_step_on_iterator_42")
        b.host("IteratorGetNextOp::DoCompute", begin + 9_100, wait, line="tf_data_iterator_get_next/1")
        begin += STEP + wait
    f = next(f for f in findings(b)["input_bound"].consequences if f.id == "long_steps")
    assert f.evidence["more_s"] == pytest.approx(0.02, rel=0.01) and f.evidence["every_steps"] == 5


@pytest.mark.parametrize(("places", "every", "of_them"), [
    ((9, 19, 29, 39), 10, (9, 19, 29, 39)), ((9, 19, 26, 29, 39), 10, (9, 19, 29, 39)),
    ((9, 16, 19, 29), 10, (9, 19, 29)), ((3, 9, 19, 29, 39, 49, 59, 62), 10, (9, 19, 29, 39, 49, 59)),
    ((9, 19, 39, 49), None, ()),  # one is missing: no rhythm
    ((9, 19), None, ()), ((), None, ()), ((4,), None, ()), ((5, 5, 5, 5), None, ()),
    ((3, 10, 14, 25, 31, 33, 48), None, ()), ((9, 12, 16, 19, 22, 29), None, ()),
    ((25, 28, 31), None, ()),  # eight are missing before
])
def test_a_rhythm_is_one_with_an_accident_between(places, every, of_them):
    found, own = period_of(np.array(places, np.int64), max(places, default=0) + 1)
    assert (found, tuple(np.array(places, np.int64)[own])) == (every, of_them)


def test_a_rhythm_goes_on_to_the_last_step_and_the_first_ones_are_no_rare_steps():
    assert period_of(np.array([2, 5, 8]), 11)[0] == 3 and period_of(np.array([2, 5, 8]), 40)[0] is None
    # As of a PyTorch job on an H200, while its profiler began.
    durations = np.array([29.3, 30.0, 33.1, 28.7, 30.4, 29.8, 29.3, *[19.1, 22.4, 22.5, 20.0, 22.3] * 5]) / 1e3
    assert long_steps(durations) is None
    elsewhere = np.concatenate((durations[7:12], durations[:1], durations[12:24], durations[1:3], durations[24:]))
    assert long_steps(elsewhere) is not None


def test_steps_that_are_a_little_longer_are_accidents_beside_the_long_ones():
    durations = np.tile([1.0, 1.01, 0.99, 1.0], 50)
    durations[24::25] += 80.0
    durations[[7, 70, 140]] += 0.5
    pauses = long_steps(durations)
    assert pauses is not None and pauses.every == 25 and len(pauses.indices) == 8
    durations[[7, 70, 140]] += 20.0  # these are none: the rhythm is told of most of them at least
    pauses = long_steps(durations)
    assert pauses is not None and len(pauses.indices) == 11 and pauses.every is None


def test_a_function_whose_line_takes_the_time_is_named_and_what_may_run_within_it():
    """Stacks show the line that was running, not that Python collected garbage there."""
    words = Explanation("Every 25th step takes 80 ms longer: Python without events", "Python without events.", {}, "a",
                        "g",
                        "s")
    named = less_often(words, UserFunction("on_train_batch_end", "t.py:9", False))
    assert named.title.endswith("longer: on_train_batch_end (t.py:9)") and "gc.freeze()" in named.action
    assert less_often(words, UserFunction("main", "t.py:9", True, in_gaps=0.3)) is words, "the loop itself"
    line = less_often(words, UserFunction("main", "t.py:9", True, in_gaps=0.9))
    assert line.title.endswith("longer: t.py:9") and "main" not in f"{line.why}{line.action}"


def traced(more: float, function: str = "") -> Builder:
    """The 11th step takes ``more`` µs longer, in a function of Python's if given; a tracer recorded all steps."""
    b, at = job({10: more}), 0.0
    for i in range(COUNT + 1):
        long = more if i == 10 else 0.0
        b.host("$train.py:41 step", at + 1, 9_100)
        if long and function:
            b.host(f"$train.py:7 {function}", at + 9_150, long)
        at += STEP + long
    return b


def test_one_step_longer_without_an_event_of_a_tracer_may_be_an_accident():
    assert "long_steps" not in findings(traced(60_000.0))
    assert "long_steps" in findings(job({10: 60_000.0})), "no tracer: Python may have computed"
    assert "long_steps" in findings(traced(400_000.0)), "longer than a thread waits for a CPU"


def test_a_step_in_which_a_job_evaluates_is_told_as_that():
    f = findings(traced(400_000.0, "evaluate"))["long_steps"]
    assert f.title.endswith("an evaluation") and f.action.startswith("Evaluate less often")
    assert "an evaluation" not in findings(traced(400_000.0, "refresh"))["long_steps"].title

"""The rules on the time around the training steps."""

from __future__ import annotations

import pytest

from gputop.advice.trace.known_work import host_words
from gputop.analysis.results import HostWork, WallPart
from gputop.diagnosis.diagnose import analyze, analyze_trace
from gputop.diagnosis.report import limit_of, text_report
from gputop.diagnosis.wall_text import ENOUGH_STEPS, parts_share, wall_sentence
from tests.advice.trace.traces import abstained, findings, healthy, verdict
from tests.analysis.host.traces_of_epochs import MS, epochs, evaluate, train, with_stacks
from tests.records import replace
from tests.trace.build import Builder
from tests.trace.shares import NEEDS_SHARED, SHARED


def test_the_end_of_an_epoch_is_found_with_its_line():
    trace = with_stacks(epochs().build(), 11)
    finding = findings(trace)["time_outside_steps"]
    assert finding.severity == "high" and finding.gain.per == "recording" and finding.gain.by == "bound"
    assert finding.evidence["share_ratio"] == pytest.approx(1.2 / 1.62, rel=0.05)
    assert finding.evidence["every_training_steps"] == 8
    assert [(c.name, c.kind) for c in finding.culprits] == [("train.py:11 Save.on_epoch_end", "line")]
    assert finding.culprits[0].time_s == pytest.approx(1.2, rel=0.02)
    text = " ".join(text_report(analyze_trace(trace)).split())
    assert "train.py:11 Save.on_epoch_end" in text
    assert "No problem found" not in text and "Nothing to advise" not in text
    wall = analyze_trace(trace).wall_time
    assert wall is not None and "between steps 1.2" in wall_sentence(wall) and "on_epoch_end" in wall_sentence(wall)
    finding = findings(epochs())["time_outside_steps"]  # without stacks it is found without a name
    assert finding.severity == "high" and finding.culprits == () and "without events" in finding.title
    assert findings(epochs(pause=2 * MS)).keys().isdisjoint({"time_outside_steps", "unfinished_step"})


def test_what_was_not_recorded_is_told_apart_from_what_was():
    b = Builder(gpus=0)
    train(b, 0, 20)
    train(b, 1000 * MS, 20)
    wall = analyze_trace(replace(b.build(), unrecorded_ns=((int(0.2e9), int(1.0e9)),))).wall_time
    assert wall is not None
    sentence = wall_sentence(wall)
    assert sentence.startswith("400 ms of 1.20 s recorded: whole steps ") and "not recorded" not in sentence


def test_a_checkpoint_between_steps_has_its_own_fix():
    finding = findings(epochs(events=("SaveV2", "MergeV2Checkpoints")))["time_outside_steps"]
    assert "checkpoint" in finding.title and "ModelCheckpoint" in (finding.snippet or "")
    assert [c.kind for c in finding.culprits] == ["host"]  # an op, no line of Python


@pytest.mark.parametrize(("pause_ms", "told", "severity"), [(300, "290 ms", "low"), (2_000, "1.99 s", "medium")])
def test_one_pause_is_told_as_one(pause_ms, told, severity):
    b = Builder(gpus=0)
    end = train(b, 0, 20)
    evaluate(b, end + 100, 2)
    train(b, end + pause_ms * MS, 20)
    finding = findings(b)["time_outside_steps"]
    assert finding.evidence["stretches_count"] == 1 and finding.title.startswith(f"Once in this recording, {told} p")
    assert finding.severity == severity and finding.gain.step_time is None and "occurred once" in finding.gain.how


def few_steps(pause: float, gap: float) -> Builder:
    """Six steps of 10 ms with a kernel each, ``gap`` behind each of them and ``pause`` behind three."""
    b, at = Builder(gpus=1), 0.0
    for i in range(6):
        b.run(0, at + 200, 9.6 * MS, launch=at + 100)
        at = train(b, at, 1) + 100 + gap + (pause if i == 2 else 0)
    return b


def test_of_few_steps_a_long_pause_is_not_told_twice():
    """From eight steps on the step before the pause is a long one, and takes both."""
    found = findings(few_steps(300 * MS, 0))
    assert "step_gap_host" not in found
    assert [f.id for f in found["time_outside_steps"].consequences] == ["step_gap_host"]
    assert {"step_gap_host"} <= findings(few_steps(0, 5 * MS)).keys(), "a gap behind each step is its own finding"
    both = findings(few_steps(100 * MS, 30 * MS))
    assert "step_gap_host" in both and "step_gap_host" not in {
        c.id for f in both.values() for c in f.consequences}, "most of the gap is not that pause"


def validated(batches: int) -> Builder:
    b, at = Builder(gpus=0), 0.0
    for _ in range(4):
        end = train(b, at, 20)
        at = evaluate(b, end + 100, batches) + 100
    train(b, at, 2)
    return b


@pytest.mark.parametrize(("batches", "severity"), [(60, "high"), (20, "medium"), (4, "low"), (1, None)])
def test_validation_is_a_remark_until_it_takes_long(batches, severity):
    found = findings(validated(batches))
    assert (found["evaluation_share"].severity if "evaluation_share" in found else None) == severity
    if severity is not None:
        assert found["evaluation_share"].evidence["every_training_steps"] == 20
        assert "validation_freq" in found["evaluation_share"].action


def test_a_window_that_only_evaluates_says_nothing_of_its_share():
    b = Builder(gpus=0)
    evaluate(b, 0, 30)
    assert "evaluation_share" in abstained(b) and "evaluation_share" not in findings(b)


def test_a_step_that_had_not_ended_is_told():
    trace = train_then(Builder(gpus=0), silence_s=3.0)
    finding = findings(trace)["unfinished_step"]
    assert finding.severity == "medium" and finding.evidence["unfinished_s"] == pytest.approx(3.0, rel=0.02)
    assert finding.gain.step_time is None, "it came once"
    assert verdict(trace, "unfinished_step").usual_s == pytest.approx(0.01)
    b = Builder(gpus=0)
    evaluate(b, 0, 30)
    alone = b.build()
    alone.rank_windows_ns = {0: (0, alone.window_ns[1] + 3_000_000_000)}
    assert "unfinished_step" in abstained(alone), "the end of an evaluation is none"


def train_then(b: Builder, silence_s: float):
    train(b, 0, 30)
    trace = b.build()
    trace.rank_windows_ns = {0: (0, trace.window_ns[1] + int(silence_s * 1e9))}
    return trace


def open_wait(steps: int) -> Builder:
    """A loop that gets its batches at once, and waits for the next one when the recording ends."""
    b = Builder(gpus=0)
    for i in range(steps):
        b.host("IteratorGetNextOp::DoCompute", i * 10 * MS + 30, 20, line="tf_data_iterator_get_next/1")
    train(b, 0, steps)
    for i in range(200):
        b.host("Iterator::BatchV2::Map", (steps * 10 + 5 + i * 10) * MS, 9.9 * MS, line="tf_data_private_threadpool/1")
    return b


def test_an_open_wait_for_a_batch_is_input_wait_or_chance():
    found = findings(open_wait(5))
    assert found["input_bound"].severity == "high" and "unfinished_step" not in found
    assert found["input_bound"].evidence["unfinished_s"] == pytest.approx(2.0, rel=0.03)
    assert found["input_bound"].gain.per == "recording" and "recorded time" in found["input_bound"].title
    found = findings(open_wait(30))  # an open wait for one batch of many may be chance
    assert "input_bound" not in found and "waiting for a batch" in found["unfinished_step"].title
    assert found["unfinished_step"].gain.step_time is None
    assert "DataLoader" not in found["unfinished_step"].action, "tf.data has no such workers"


@pytest.mark.parametrize("times", [1, 2])
def test_host_work_where_no_step_is_found(times):
    """Once, beside a few kernels, it may be the program's only work."""
    b = Builder().host("ExecutorState::Process", 0, 10, line="tf_Compute/1").run(0, 0, 20 * MS, launch=0)
    for i in range(1, times + 1):
        b.host("load_library", (950 * i - 920) * MS, 900 * MS, line="launch 0")
        b.run(0, 950 * i * MS, 10 * MS, "k2", launch=(950 * i - 5) * MS)
    found = findings(b)
    assert ("time_outside_steps" in found) == (times > 1)
    if times > 1:
        finding = found["time_outside_steps"]
        assert [c.name for c in finding.culprits] == ["load_library"] and finding.evidence["share_ratio"] > 0.9


@pytest.mark.parametrize(("name", "launches", "is_pause"), [
    ("train", "launch 0", False), ("aten::empty", "", False), ("save_model", "", True), ("read", "other", True)])
def test_the_work_of_a_step_is_no_pause_where_no_step_is_found(name, launches, is_pause):
    b = Builder().host("aten::add", 0, 10, line="launch 0").run(0, 0, 20 * MS, launch=0)
    for i in range(1, 4):
        b.host(name, (950 * i - 920) * MS, 900 * MS, line="launch 0")
        for k in range(20):
            b.run(0, (950 * i + k * k / 40) * MS, 0.01 * MS, f"softmax_backward_{k}", thread=launches or "launch 0",
                  launch=((950 * i - 500 if launches else 950 * i - 10) + k / 10) * MS)
    assert ("time_outside_steps" in findings(b)) == is_pause
    assert ("time_outside_steps" in abstained(b)) != is_pause


def test_an_op_names_no_more_time_than_it_takes():
    part = WallPart("between", 10.0, kind="op", what="aten::empty", work=(HostWork("aten::empty", 2.5, 3),))
    assert part.named_s == 2.5 and host_words(part) == "25% in aten::empty"
    assert replace(part, kind="line").named_s == 10.0


def test_few_steps_are_no_clean_bill_and_many_are():
    for steps, enough in ((4, False), (ENOUGH_STEPS, False), (ENOUGH_STEPS + 4, True)):
        analysis = analyze_trace(healthy(steps=steps).build())
        assert not [f for f in analysis.findings if f.severity != "low"]
        assert limit_of(analysis).startswith("NO PROBLEM FOUND") == enough
        assert ("steps seen, 20 needed" in limit_of(analysis)) != enough
    trace = healthy(steps=ENOUGH_STEPS + 4).build()  # many steps in a small part of the recording are no clean bill
    trace.rank_windows_ns = {0: (-int(1e9), trace.window_ns[1])}
    text = limit_of(analyze_trace(trace))
    assert not text.startswith("NO PROBLEM FOUND") and "unfinished step" in text


@pytest.mark.skipif(not SHARED.exists(), reason=NEEDS_SHARED)
def test_a_start_that_loads_libraries_is_no_job():
    analysis = analyze(str(SHARED / "cases" / "cold_first_launch.pt.trace.json.gz"))
    assert not limit_of(analysis).startswith("NO PROBLEM FOUND") or not any(
        f.severity in ("high", "medium") for f in analysis.findings)


@pytest.mark.skipif(not SHARED.exists(), reason=NEEDS_SHARED)
@pytest.mark.parametrize("name", ["ddp_healthy", "ddp_gcall", "ddp_gcone", "ddp_sleep"])
def test_ranks_of_a_set_are_whole(name):
    analysis = analyze([str(path) for path in sorted((SHARED / "cases" / name).glob("*.gz"))])
    wall = analysis.wall_time
    assert wall is not None and len(wall.ranks) == 4 and parts_share(wall) > 0.99


def test_a_handful_of_kernels_is_no_job_that_waits_outside_its_steps():
    """A small script compiles and runs a few programs: all of its time lies between kernels."""
    b = Builder(format="nsys")
    for i in range(14):
        b.run(0, 90_000 * i + 100, 30, f"fusion_{i}", launch=90_000 * i + 50, thread="python/7")
    assert "hardly any kernel" in abstained(b)["time_outside_steps"]

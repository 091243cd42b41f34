from __future__ import annotations

import re

import pytest

from gputop.advice.registry import rule_of
from gputop.advice.verdict import Basis, Explanation, Verdict, finding
from gputop.core.findings import Culprit, Finding, Gain
from gputop.render.evidence_words import evidence, evidence_label
from gputop.render.finding_text import (
    VerdictLines,
    VerdictRow,
    culprits_text,
    finding_markdown,
    gain_basis,
    gain_sentence,
    gain_texts,
    plain_lines,
    verdict_of,
    what_if_text,
)
from tests.records import replace
from tests.tui.found import COMBINED, HEAVY, SMALL


def test_a_gain_is_what_is_saved_of_the_step_time_or_per_training_sample() -> None:
    assert gain_texts(HEAVY) == ("fix: 412 → 255 ms at best", "412 → 255 ms at best")
    assert gain_texts(replace(HEAVY, gain=replace(HEAVY.gain, before_s=1.2)))[1] == "1.20 s → 744 ms at best"
    old = replace(HEAVY, gain=replace(HEAVY.gain, before_s=None))
    assert gain_texts(old) == ("fix saves up to 38% of the step", "saves up to 38%")
    of_recorded = replace(HEAVY, gain=replace(HEAVY.gain, per="recording", before_s=None))
    assert gain_texts(of_recorded) == ("fix saves up to 38% of the time", "saves up to 38%"), "no step, no arrow"
    epoch = replace(HEAVY, gain=Gain(0.2, "a larger batch", "sample"))
    assert gain_texts(epoch)[0] == "fix saves up to 20% per training sample"
    replayed = replace(HEAVY, gain=Gain(0.38, "", by="replay", before_s=0.344))
    assert gain_texts(replayed) == ("fix: 344 → 213 ms", "344 → 213 ms")
    best = replace(HEAVY, gain=replace(HEAVY.gain, by="replay", claim="at most"))
    assert gain_texts(best) == gain_texts(HEAVY), "a replay of the best case promises no more than that"
    part, usual = (replace(HEAVY, gain=Gain(0.38, "", by="replay", claim=claim)) for claim in ("at least", "about"))
    assert gain_texts(part)[0] == "fix saves at least 38% of the step"
    assert gain_texts(usual)[0] == "fix saves about 38% of the step"
    assert gain_basis(part).startswith("Estimated by replaying the recorded steps, as a lower bound. ")
    assert "CPUs" not in gain_basis(part)
    for none in (None, 0.004):
        assert gain_texts(replace(HEAVY, gain=Gain(none, ""))) == ()


def test_what_is_left_with_the_chosen_cures_and_what_then_saves_most() -> None:
    heavy, small = (replace(f, gain=replace(f.gain, by="replay")) for f in (HEAVY, SMALL))
    both = (heavy.id, small.id)
    assert what_if_text((heavy, small), both, COMBINED) == (
        "With these 2 fixes: 412 → 239 ms (42% less). No other fix adds anything.")
    old = tuple(replace(f, gain=replace(f.gain, before_s=None)) for f in (heavy, small))
    assert what_if_text(old, both[::-1], COMBINED).startswith("With these 2 fixes: 42% less of the step.")
    assert what_if_text((heavy, small), both[1:], COMBINED) == (
        f"With this fix: 412 → 400 ms (3% less); next: {heavy.title} (39% more)")
    assert what_if_text((heavy, small), both, ()) == "With these 2 fixes: not computed"
    assert what_if_text((heavy, small), both[:1], ()) == (
        "With this fix: 412 → 255 ms (38% less)"), "what the other adds is not known"


def test_evidence_is_told_in_words() -> None:
    assert evidence_label("launch_wait_s") == "wait for launches"
    assert evidence_label("share_ratio") == "share of the evaluated time"
    assert evidence_label("first_gpu_sm_active_ratio") == "SM activity of GPU 0"
    assert evidence_label("h2d_bytes_per_step") == "bytes to the GPU, per step"
    assert evidence_label("pcie_rx_bytes_per_s") == "PCIe traffic to the GPU"


@pytest.mark.parametrize(("why", "share"), [
    ("For 24% of the step the GPUs wait.", "share of the step"),
    ("8 calls per window synchronize.", "share of the window"),
    ("FP32 matmuls take 70% of the kernel time.", "share of the evaluated time"),
    ("1.2 s of the 1.6 s recorded pass between steps.", "share of the recorded time")])
def test_a_share_says_what_it_is_of(why: str, share: str) -> None:
    finding = replace(HEAVY, title="GPUs wait", why=why, evidence={"share_ratio": 0.24})
    assert evidence(finding) == [(share, "24%")]


def test_culprits_are_told_by_name_with_their_time() -> None:
    teacher, metrics = Culprit("teacher/*", "layer", 0.159, only_on=(0,)), Culprit("metrics/TopK", "op", 0.027)
    own = replace(HEAVY, culprits=(teacher, replace(metrics, only_on=(0,)), *[replace(metrics, name="x")] * 2,
                                   Culprit("", "layer", 0.001, names=12)))
    assert culprits_text(own) == (
        "Only on GPU 0: teacher/* 159 ms, metrics/TopK 27.0 ms, x 27.0 ms per step, and 13 more ops")
    assert culprits_text(replace(HEAVY, culprits=(metrics,))) == "Ops: metrics/TopK 27.0 ms per step"
    window = replace(teacher, per="window", only_on=(), source="train.py:31")
    assert culprits_text(replace(HEAVY, culprits=(window, metrics))) == (
        "Layers and ops: teacher/* 159 ms (train.py:31), metrics/TopK 27.0 ms in the window")
    on_host = tuple(Culprit(name, "host", 0.002) for name in ("Mean", "SaveV2", "a", "b"))
    assert culprits_text(replace(HEAVY, culprits=on_host)).endswith("a 2.0 ms per step, and 1 more")
    assert culprits_text(replace(HEAVY, culprits=(Culprit("Adam/NcclAllReduce", "op"),))) == "Ops: Adam/NcclAllReduce"
    assert culprits_text(HEAVY) == ""


def test_culprits_of_several_gpus_and_what_waits_are_told_as_such() -> None:
    layers = tuple(Culprit(f"model/{name}/*", "layer", 0.02, only_on=(gpu,)) for gpu, name in enumerate(("a", "b")))
    assert culprits_text(replace(HEAVY, culprits=layers)) == (
        "Only on GPU 0 in model: a/* 20.0 ms; only on GPU 1: b/* 20.0 ms per step")
    late = replace(HEAVY, id="launch_bound", culprits=(Culprit("model/a/*", "layer", 0.02),))
    assert culprits_text(late) == "Waits for launches of layers: model/a/* 20.0 ms per step"
    assert culprits_text(replace(HEAVY, culprits=(Culprit("gpu_private_0", "thread"),))) == "Threads: gpu_private_0"
    stage = replace(HEAVY, id="input_bound", culprits=(Culprit("Map", "stage", 0.02),))
    assert culprits_text(stage) == "", "the finding's own words name the stage"


def test_culprits_share_their_scope_and_are_printable() -> None:
    long = tuple(Culprit(f"model/encoder/block_{i}/attention/\x1b[31mscores/BatchMatMul", "op", 0.01) for i in range(9))
    assert culprits_text(replace(HEAVY, culprits=long)).isprintable()
    line = Culprit("metrics.py:112 confusion_matrix", "line", 0.038, traced=True)
    traced = replace(HEAVY, culprits=(line, replace(line, name="a.py:1 f")))
    assert culprits_text(traced).startswith("In Python, from the trace's own tracer: metrics.py:112")
    longer = replace(HEAVY, culprits=(Culprit("net/mlp/MatMul", "op", 0.003, source="train.py:31", more_on=(2,)),))
    assert culprits_text(longer) == (
        "Longer on GPU 2 than on the others: net/mlp/MatMul +3.0 ms (train.py:31) per step")
    apart = replace(HEAVY, culprits=tuple(Culprit(f"net/model/{i}x/Conv2D", "op", 0.01) for i in range(9)))
    assert culprits_text(apart) == (
        "Ops in net/model: 0x/Conv2D 10.0 ms, 1x/Conv2D 10.0 ms, 2x/Conv2D 10.0 ms per step, and 6 more ops")


def test_a_bound_says_whether_it_is_the_most_or_the_least() -> None:
    wait = Verdict(gpus=(), share=0.4, claim="at least")
    words = Explanation(title="", why="", evidence={}, action="", gain="the wait, if it were gone", source="")
    rule = rule_of("retracing", "trace")
    least = finding(rule, wait, words, Basis(step_s=0.2))
    assert least.gain.at_least and gain_texts(least)[0] == "fix: 200 → 120 ms or less"
    short = finding(rule, wait, words, Basis(window=0.1)).gain
    assert (short.per, short.step_time, short.after_s) == ("recording", pytest.approx(0.04), None), "no step, no arrow"
    assert gain_basis(least) == ("The estimate is a lower bound. The wait, if it were gone. The fix also frees CPU "
                                 "time for the rest of the step, so it can save more.")
    either = finding(rule, replace(wait, claim="about"), words)
    assert either.gain.estimate and gain_texts(either)[1] == "saves about 40%"
    assert gain_basis(either) == (
        "The estimate is a typical value (27% to 53%). The wait, if it were gone. The fix may leave some of this time "
        "but also frees CPU time for the rest of the step, so it can save less or more.")
    most = finding(rule, replace(wait, gpus=(0,), claim="measured"), words)
    assert not most.gain.at_least and gain_texts(most)[1] == "saves up to 40%"
    assert gain_basis(most) == "The estimate is an upper bound. The wait, if it were gone."


def test_the_saving_is_a_sentence_with_and_without_a_figure() -> None:
    replayed = replace(HEAVY, gain=Gain(0.38, "", by="replay", assumption="Kernels take half."))
    assert gain_sentence(replayed).startswith("Estimated by replaying the recorded steps. ")
    assert gain_sentence(replace(HEAVY, gain=Gain(None, "a capture shows it"))) == (
        "Saving not estimated: a capture shows it")
    nothing = replace(HEAVY, gain=Gain(None, "none: this explains a value"))
    assert gain_sentence(nothing) == "Saves nothing: this explains a value"


def test_the_lines_are_in_the_order_in_which_they_are_read() -> None:
    line = Culprit("train.py:8 slow_augment", "line", 0.05)
    lines = [*plain_lines(verdict_of(replace(HEAVY, culprits=(line,))), 100, loud=True)]
    assert lines[:3] == [
        "GPU 0 DOES 2.2× THE WORK OF THE OTHERS    fix: 412 → 255 ms at best  [gpu0_oversubscribed]",
        "  Do    Keep metrics, variables and preprocessing off GPU 0; give each program its own GPUs.",
        "        CUDA_VISIBLE_DEVICES=1 python eval.py"]
    assert lines[3].startswith("  Why   Kernel time per step")
    assert lines[-1] == "  Line  train.py:8 slow_augment 50.0 ms per step"


def test_names_units_and_shares_are_not_in_capitals() -> None:
    for head, loud in (("Python in tf.data's map takes 67% of it", "PYTHON IN tf.data's MAP TAKES 67% of it"),
                       ("train_step is compiled for 25.0 ms", "train_step IS COMPILED FOR 25.0 ms")):
        assert next(plain_lines(VerdictLines(head), 100, loud=True)) == loud


def test_what_to_do_is_whole_where_a_reason_is_cut_by_sentences() -> None:
    long = "One thing is so. " * 20
    rows = [*plain_lines(VerdictLines("NO VERDICT", "4 steps seen, 20 needed", rows=(
        VerdictRow("Do", long), VerdictRow("Why", long))), 60, most=2)]
    text = "\n".join(rows)
    assert rows[0] == "NO VERDICT  4 steps seen, 20 needed" and all(len(row) <= 60 for row in rows)
    do, _, why = text.partition("  Why   ")
    assert " ".join(do.split()).count("One thing is so.") == 20 and len(why.splitlines()) == 2 and why.endswith(". …")


FINDING = Finding(id="input_bound", severity="high", title="Input *wait* takes 52%", why="The loop waits <b>.",
                  evidence={"input_wait_per_step_s": 0.157}, action="Let tf.data choose.",
                  snippet="ds.map(f)  # ```", gain=Gain(0.52, "by replay", by="replay", before_s=0.342),
                  gpus=(0, 1), source="a test")


def test_a_finding_pastes_as_markdown_and_brings_no_marks_of_its_own() -> None:
    text = finding_markdown(FINDING, simulated=True)
    assert text.startswith("**Input `*wait*` takes 52%** (high, GPU 0-1, fix: 342 → 164 ms) SIMULATED")
    assert "waits `<b>.`" in text and "Do: Let tf.data choose." in text
    assert "````\nds.map(f)  # ```\n````" in text, "a fence longer than those of the code"
    assert text.endswith("gputop, rule `input_bound`\n")


def test_names_of_a_trace_mention_nobody_and_lead_nowhere() -> None:
    """Whoever wrote the trace is not who pastes it."""
    hostile = "@everyone <!channel> https://evil.example @org/team `@x` ![a](https://evil.example)"
    text = finding_markdown(replace(FINDING, title=hostile, why=hostile, action=hostile, id="`@everyone"))
    outside = re.sub(r"(`+) ?.*?[^`]\1(?!`)", "", text)
    assert "everyone" in text and not re.search(r"@|<!|://|!\[", outside)

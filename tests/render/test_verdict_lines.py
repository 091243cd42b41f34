"""A verdict's lines as plain text: the head with the fix, then what to do with its code, why and which line."""

from __future__ import annotations

import re

from gputop.core.findings import Culprit, Finding, Gain
from gputop.render.verdict_lines import VerdictLines, VerdictRow, finding_markdown, plain_lines, verdict_of
from tests.records import replace
from tests.tui.found import HEAVY


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

from __future__ import annotations

import re

from gputop.core.findings import Finding, Gain
from gputop.render.finding_markdown import finding_markdown
from tests.records import replace

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

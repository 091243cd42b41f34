"""The demo's story in every scenario: what the first finding of a capture advises is what D does, and B then says that
it was reached."""

from __future__ import annotations

from itertools import pairwise

import pytest

from gputop.comparison.compare import compare_sides
from gputop.comparison.report_lines import text_report
from gputop.simulation.scenarios import SCENARIOS, find_jobs
from tests.comparison.captures import captured

# By scenario, for each of its fixes: a word that the advice and the fix have in common.
FIXES = {
    "gpu0-oversubscribed": ["metrics"], "input-bound": ["threads"], "launch-bound": ["compile"],
    "slow-callback": ["confusion_matrix"], "slow-checkpoint": ["in the background"], "hang": [], "healthy": [],
    "three-causes": ["metrics", "confusion_matrix", "backward"],
}


def test_every_scenario_has_its_story() -> None:
    assert {name: len(scenario.fixes) for name, scenario in SCENARIOS.items() if not scenario.hangs} == {
        name: len(words) for name, words in FIXES.items() if name != "hang"}


@pytest.mark.parametrize("name", [name for name, words in FIXES.items() if words])
def test_what_the_first_finding_advises_is_what_d_does_and_b_says_that_it_helped(name: str) -> None:
    for word, (before, job) in zip(FIXES[name], pairwise(find_jobs(name)), strict=True):  # each press of D
        a, b = captured(before), captured(job)
        first = a.findings[0]
        assert first.severity != "low"
        assert word in f"{first.action} {first.snippet}", "the advice"
        assert word.replace("_", " ") in job.title, "what D does"
        compared = compare_sides(a, b)
        entry = next(entry for entry in compared.advice if entry.id == first.id)
        text = text_report(compared)
        assert entry.status in ("gone", "weaker"), text
        assert [other.id for other in compared.advice if other.status == "new"] == []
        assert "NOT REACHED" not in text
        if name == "slow-checkpoint":  # a capture holds one of them: that proves no change of the step
            assert compared.headline.startswith(("NOT PROVEN", "Probably faster")), text
        else:
            assert compared.verdict == "better" and compared.headline.startswith("FASTER, certain"), text
            assert (entry.fulfilled, entry.outcome) == ("kept", "as promised")


def test_three_causes_can_be_tried_together() -> None:
    """All three have a replayed saving, and the replay knows every set of them."""
    side = captured(SCENARIOS["three-causes"])
    assert side.analysis is not None
    findings = [f for f in side.findings if f.severity != "low"]
    assert [f.id for f in findings] == ["gpu0_oversubscribed", "step_gap_host", "communication_exposed"]
    assert all(f.gain.by == "replay" for f in findings)
    assert max(len(gain.findings) for gain in side.analysis.what_if) == 3 and len(side.analysis.what_if) == 4

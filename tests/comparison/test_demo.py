"""The demo's story in every scenario: what the first finding of a capture advises is what D does, and B then says that
it was reached."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from gputop.comparison.compare import compare_sides
from gputop.comparison.report import text_report
from gputop.comparison.sides import Side, read_side
from gputop.simulation.loop import StepKind, TrainingLoop
from gputop.simulation.python_stacks import python_stacks
from gputop.simulation.scenarios import SCENARIOS, Scenario, find_jobs
from gputop.simulation.xspace import build_xspace
from gputop.trace.readers.stacks_file import write_stacks

ORIGIN_NS = 1_700_000_000 * 10**9
BEGIN_NS = 33 * 10**9
# By scenario, for each of its fixes: a word that the advice and the fix have in common.
FIXES = {
    "gpu0-oversubscribed": ["metrics"], "input-bound": ["threads"], "launch-bound": ["compile"],
    "slow-callback": ["confusion_matrix"], "slow-checkpoint": ["in the background"], "hang": [], "healthy": [],
    "three-causes": ["metrics", "confusion_matrix", "backward"],
}


def captured(folder: Path, scenario: Scenario) -> Side:
    """A capture as the monitor takes it: of an idle time that returns where that is what the scenario is about."""
    loop = TrainingLoop(scenario)
    begin_ns, end_ns = BEGIN_NS, BEGIN_NS + (2 if "launch" in scenario.id else 3.5) * 10**9
    if scenario.id.startswith("slow-checkpoint"):
        saves = next(s for s in loop.steps(BEGIN_NS, 10 * BEGIN_NS) if s.kind is StepKind.CHECKPOINT)
        begin_ns, end_ns = saves.start_ns - 3 * 10**9, saves.next_ns + 2 * 10**9
    own = folder / scenario.id
    own.mkdir()
    path = own / "demo-node.xplane.pb"
    path.write_bytes(build_xspace(loop, begin_ns, int(end_ns), ORIGIN_NS, "demo-node"))
    stacks = python_stacks(loop, begin_ns, int(end_ns), ORIGIN_NS)
    assert stacks is not None
    write_stacks(own, {path.name: stacks})
    return read_side(path)


def pairs(name: str, folder: Path) -> Iterator[tuple[Side, Side, Scenario]]:
    """Before and after each press of D."""
    before, *fixed = find_jobs(name)
    a = captured(folder, before)
    for job in fixed:
        b = captured(folder, job)
        yield a, b, job
        a = b


def test_every_scenario_has_its_story() -> None:
    assert {name: len(scenario.fixes) for name, scenario in SCENARIOS.items() if not scenario.hangs} == {
        name: len(words) for name, words in FIXES.items() if name != "hang"}


@pytest.mark.parametrize("name", [name for name, words in FIXES.items() if words])
def test_what_the_first_finding_advises_is_what_d_does_and_b_says_that_it_helped(name: str, tmp_path: Path) -> None:
    for word, (a, b, job) in zip(FIXES[name], pairs(name, tmp_path), strict=True):
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


def test_three_causes_can_be_tried_together(tmp_path: Path) -> None:
    """All three have a replayed saving, and the replay knows every set of them."""
    side = captured(tmp_path, SCENARIOS["three-causes"])
    assert side.analysis is not None
    findings = [f for f in side.findings if f.severity != "low"]
    assert [f.id for f in findings] == ["gpu0_oversubscribed", "step_gap_host", "communication_exposed"]
    assert all(f.gain.by == "replay" for f in findings)
    assert max(len(gain.findings) for gain in side.analysis.what_if) == 3 and len(side.analysis.what_if) == 4

"""The live rule about idle that returns: when it speaks, with which figures, and beside which other rules."""

from __future__ import annotations

import random
from functools import cache
from itertools import pairwise

import pytest

from gputop.advice.merge import merge_findings
from gputop.advice.verdict import Missing
from gputop.core.findings import Advice, Finding, Gain
from tests.advice.live.scene import Job, Level, Scene, abstained, after, get, ids, play, two, verdict

ALL = (0, 1, 2)


def pauses(period_s: float, idle_s: float, low: float = 0.0, first_s: float = 0.0) -> Level:
    rng = random.Random(1)
    return lambda t: low if (t - first_s) % period_s < idle_s else 0.85 + 0.05 * rng.random()


def alike(level: Level, **how: object) -> Scene:
    return Scene(dict.fromkeys(ALL, level), gpus=len(ALL), **how)  # type: ignore[arg-type]


@cache
def four_seconds_of_62() -> Advice:
    return after(alike(pauses(62, 4)), 800)


def test_idle_that_returns_is_found_with_its_period() -> None:
    advice = four_seconds_of_62()
    finding = get(advice, "recurring_idle")
    assert ids(advice) == ["recurring_idle"] and finding.gpus == ALL and finding.severity == "medium"
    assert finding.title == "GPUs 0-2 idle for 4.0 s every 62 s (6% of the last 10 min)"
    evidence = finding.evidence
    assert (evidence["idle_count"], evidence["window_s"]) == (9.0, 600.0)
    assert evidence["idle_s"] == pytest.approx(4, abs=0.1) and evidence["idle_period_s"] == pytest.approx(62, abs=0.2)
    assert evidence["next_idle_in_s"] == pytest.approx(62 * 13 - 799, abs=1.5)
    assert advice.limit == "", "time is lost, so nothing is said about what bounds the job"


@pytest.mark.parametrize(("period_s", "idle_s", "severity"), [
    (62, 1.0, None), (150, 3.0, None), (100, 4.0, "low"), (62, 4.0, "medium"), (62, 12.0, "high")])
def test_the_severity_is_that_of_the_share(period_s: float, idle_s: float, severity: str | None) -> None:
    seen = verdict(alike(pauses(period_s, idle_s)), 800, "recurring_idle")
    assert (None if seen is None else seen.severity) == severity


def test_before_the_third_time_it_abstains() -> None:
    for seconds, times in ((150.0, "once"), (215.0, "twice"), (260.0, "twice")):
        advice = after(alike(pauses(62, 4, first_s=10)), seconds)
        assert "recurring_idle" not in ids(advice)
        assert times in abstained(advice)["recurring_idle"]
    assert isinstance(verdict(alike(0.9), 60, "recurring_idle"), Missing), "the job's start is not over"
    assert verdict(alike(0.9), 400, "recurring_idle") is None


def test_only_coarse_utilization_only_some_gpus_and_waiting_meanwhile() -> None:
    level = pauses(62, 4)
    seen = verdict(Scene({2: level, 3: level}, gpus=4, fine=False), 800, "recurring_idle")
    assert seen.gpus == (2, 3) and seen.metric == "gpu_util" and seen.period_s == pytest.approx(62, abs=0.2)
    saving, waiting = pauses(62, 6), pauses(62, 6, low=0.25)  # a GPU that waits in a collective meanwhile is not idle
    seen = verdict(Scene({0: saving} | dict.fromkeys(ALL[1:], waiting), gpus=len(ALL)), 800, "recurring_idle")
    assert seen.gpus == (0,)


def test_gpus_that_are_idle_most_of_the_time_and_those_that_work_in_turn() -> None:
    seen = verdict(alike(pauses(60, 40)), 800, "recurring_idle")
    assert seen.gpus == ALL and seen.idle_ratio == pytest.approx(0.6, abs=0.01) and not seen.in_turn
    turns = Scene({gpu: pauses(60, 40, first_s=20.0 * gpu) for gpu in ALL}, gpus=len(ALL))
    assert verdict(turns, 800, "recurring_idle").in_turn
    server = Job(command="python -m vllm.entrypoints.openai.api_server")
    assert verdict(alike(pauses(60, 40), jobs=[server]), 800, "recurring_idle") is None, "it waits for requests"


def test_what_comes_irregularly_is_left_to_the_rules_that_know_a_cause() -> None:
    rng, begins = random.Random(2), [130.0]
    while begins[-1] < 800:
        begins.append(begins[-1] + rng.uniform(12, 70))
    level: Level = lambda t: 0.0 if any(b <= t < b + 5 for b in begins) else 0.75  # noqa: E731
    seen = verdict(alike(level), 800, "recurring_idle")
    assert seen.period_s is None and seen.times > 8
    busy_host = after(alike(level, cpu=0.99), 800)
    assert "host_cpu_saturated" in ids(busy_host) and "recurring_idle" not in ids(busy_host)
    regular = after(alike(lambda t: 0.0 if t % 40 < 5 else 0.75, cpu=0.99), 800)
    assert {"host_cpu_saturated", "recurring_idle"} <= set(ids(regular))


def test_a_job_that_has_just_begun_is_not_judged_by_the_one_before() -> None:
    level = pauses(62, 4)
    before, after_it = Job(100, until_s=700), Job(200, since_s=704)
    assert "recurring_idle" not in ids(after(alike(level, jobs=(before, after_it)), 900))
    assert "recurring_idle" in ids(after(alike(level, jobs=(before, after_it)), 1100))


def test_shown_it_stays_until_its_share_is_small_and_does_not_flicker() -> None:
    history, first = play(two(pauses(62, 7), interval_s=2.0), 20, start=480)
    assert "recurring_idle" in ids(first[-1])
    _, later = play(two(0.9, interval_s=2.0), 600, history, 500, first[-1].findings)
    shown = ["recurring_idle" in ids(advice) for advice in later]
    assert shown[0] and not shown[-1] and sum(a != b for a, b in pairwise(shown)) == 1
    rng = random.Random(4)  # its severity does not flicker
    begins = [130.0]
    while begins[-1] < 1500:
        begins.append(begins[-1] + 140 * rng.uniform(0.97, 1.03))
    scene = two(lambda t: 0.0 if any(b <= t < b + 7 for b in begins) else 0.9, interval_s=2.0)
    _, advices = play(scene, 1100, start=400)
    severities = [f.severity for advice in advices for f in advice.findings if f.id == "recurring_idle"]
    assert len(severities) > 250 and sum(a != b for a, b in pairwise(severities)) <= 1


@pytest.mark.parametrize("cause", ["long_steps", "time_outside_steps", "evaluation_share", "unfinished_step"])
def test_what_a_capture_of_the_idle_time_names_explains_it(cause: str) -> None:
    """Whether the recording held all of it, or ended in its midst."""
    live = get(four_seconds_of_62(), "recurring_idle")
    named = Finding(id=cause, severity="medium", title="a checkpoint", why="why", evidence={}, action="act",
                    source="test", gain=Gain(0.4, ""), gpus=ALL)
    (merged,) = merge_findings([named], [live])
    assert merged.id == cause and merged.consequences == (live,)

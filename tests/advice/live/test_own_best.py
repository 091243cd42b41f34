"""The live rule about a job that worked more before: when it speaks, and which changes it leaves alone."""

from __future__ import annotations

import math
import random

import pytest

from gputop.advice.live.advise import live_advice
from gputop.advice.live.node_view import Fall, fall_of
from gputop.core.findings import Advice
from gputop.telemetry.history import History
from tests.advice.live.scene import Job, Level, Scene, abstained, get, ids

BOTH = (0, 1)


def at_the_end(level: Level, seconds: float, **how: object) -> Advice:
    """Sampled every 5 s: the history of an hour has as many samples as the others have of minutes."""
    scene = Scene(dict.fromkeys(BOTH, level), gpus=2, interval_s=5.0, **how)  # type: ignore[arg-type]
    history = History(raw_samples=200)
    for tick in range(round(seconds / 5)):
        history.append(scene.sample(tick * 5.0))
    return live_advice(history, scene.sample((round(seconds / 5) - 1) * 5.0))


def falling(at_s: float, before: float = 0.88, after: float = 0.55) -> Level:
    rng = random.Random(1)
    return lambda t: (before if t < at_s else after) + rng.uniform(-0.03, 0.03)


def test_a_job_that_fell_is_told_both_levels_and_since_when() -> None:
    advice = at_the_end(falling(1500), 2280)
    finding = get(advice, "below_own_best")
    assert ids(advice) == ["below_own_best"] and (finding.severity, finding.gpus) == ("low", BOTH)
    assert finding.evidence["before_ratio"] == pytest.approx(0.88, abs=0.01)
    assert finding.evidence["after_ratio"] == pytest.approx(0.55, abs=0.01)
    assert finding.evidence["lasts_s"] in (720.0, 780.0)
    assert advice.limit, "nothing else is wrong"


@pytest.mark.parametrize(("level", "seconds"), [
    (falling(1500), 1700),  # for too short
    (falling(300), 1500),  # the high level was the job's start and little more
    (falling(1500, 0.88, 0.75), 2400),  # not by much
    (lambda t: 0.88 if t % 900 < 450 else 0.55, 3000),  # phases that take turns
    (lambda t: 0.88, 2400),
    (lambda t: 0.6 + 0.25 * math.sin(t / 200), 2400),
    (lambda t: 0.95 if 900 < t < 1000 else 0.55, 2400),  # a peak
])
def test_these_are_left_alone(level: Level, seconds: float) -> None:
    advice = at_the_end(level, seconds)
    assert "below_own_best" not in ids(advice) and "below_own_best" not in abstained(advice)


def test_low_activity_tells_of_it_itself_and_another_job_is_no_measure() -> None:
    finding = get(at_the_end(falling(1500, 0.88, 0.3), 2280), "low_sm_active")
    assert finding.evidence["before_ratio"] == pytest.approx(0.88, abs=0.01) and "88%" in finding.why
    assert "before_ratio" not in get(at_the_end(0.3, 2280), "low_sm_active").evidence
    jobs = (Job(100, until_s=1500), Job(200, since_s=1500))  # another job is no measure
    assert "below_own_best" not in ids(at_the_end(falling(1500), 2400, jobs=jobs))
    assert "below_own_best" in abstained(at_the_end(falling(1500), 2400, jobs=()))
    assert "below_own_best" in abstained(at_the_end(falling(1500), 2400, fine=False, util=0.9))


@pytest.mark.parametrize(("means", "fall"), [
    ([0.9] * 5 + [0.5] * 5, Fall(0.9, 0.5, 300.0)),
    ([0.9] * 4 + [0.5] * 5, None),
    ([0.9] * 5 + [0.5] * 4, None),
    ([0.5] * 3 + [0.9] * 5 + [0.5] * 5, None),
    ([0.9] * 9 + [math.nan] + [0.5] * 9, None),  # what lies before a gap may be of another time
    ([0.05] * 5 + [0.02] * 5, None),
    ([], None),
])
def test_the_minutes_decide(means: list[float], fall: Fall | None) -> None:
    assert fall_of(means) == fall

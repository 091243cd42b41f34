"""Idle that returns: planted in random histories, and healthy ones of several kinds in which there is none."""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable, Sequence
from itertools import pairwise, takewhile
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gputop.advice.live.recurring_idle import RecurringIdle, recurring_idle

START_S, TOTAL_S = 1_800_000_000.0, 600.0
Spans = Sequence[tuple[float, float]]


def readings(spans: Spans, rng: random.Random, interval_s: float = 1.0, total_s: float = TOTAL_S, noise: float = 0.05,
             step: tuple[float, float] | None = None, busy: float = 0.85, idle: float = 0.0,
             ) -> tuple[list[float], list[float]]:
    """A GPU that is idle in these spans, in order of time, as means over each interval. ``step``: length, and its busy
    part."""
    times, values, before_s, left = [], [], 0.0, deque(spans)
    for tick in range(1, round(total_s / interval_s) + 1):
        end_s = tick * interval_s + rng.uniform(-0.02, 0.02) * interval_s
        width_s = end_s - before_s
        while left and left[0][1] <= before_s:
            left.popleft()
        idle_s = sum(max(0.0, min(end, end_s) - max(begin, before_s))
                     for begin, end in takewhile(lambda span: span[0] < end_s, left))  # noqa: B023  called at once
        level = busy * (1 + rng.gauss(0, noise))
        if step is not None:
            level *= (_worked(end_s, *step) - _worked(before_s, *step)) / width_s
        part = idle_s / width_s
        times.append(START_S + end_s)
        values.append(min(1.0, max(0.0, level * (1 - part) + idle * part)))
        before_s = end_s
    return times, values


def _worked(until_s: float, length_s: float, part: float) -> float:
    return math.floor(until_s / length_s) * part * length_s + min(until_s % length_s, part * length_s)


def every(period_s: float, idle_s: float, rng: random.Random, total_s: float = TOTAL_S, first_s: float | None = None,
          jitter: float = 0.02) -> list[tuple[float, float]]:
    begin_s, out = first_s if first_s is not None else rng.uniform(0.2, 1) * period_s, []
    while begin_s < total_s:
        out.append((begin_s, begin_s + idle_s * (1 + rng.gauss(0, jitter))))
        begin_s += period_s * (1 + rng.gauss(0, jitter))
    return out


def found(spans: Spans, seed: int = 1, **how: object) -> list[RecurringIdle]:
    times, values = readings(sorted(spans), random.Random(seed), **how)  # type: ignore[arg-type]
    return recurring_idle(times, [values], [0.0])[0]


@given(st.integers(0, 2**32), st.sampled_from([0.2, 0.5, 1.0, 1.0, 2.0]), st.floats(15, 130), st.floats(0, 1),
       st.sampled_from([None, (0.3, 0.8), (1.1, 0.7), (2.3, 0.8)]), st.floats(0.01, 0.15))
def test_a_planted_period_and_length_are_found(seed: int, interval_s: float, period_s: float, part: float,
                                               step: tuple[float, float] | None, noise: float) -> None:
    rng = random.Random(seed)
    least_s = max(2.4, 4 * interval_s, 2 * step[0] if step is not None else 0.0)
    idle_s = least_s + part * max(0.0, 0.4 * period_s - least_s)
    planted = every(max(period_s, 2.5 * idle_s), idle_s, rng)
    times, values = readings(planted, rng, interval_s, noise=noise, step=step)
    one = recurring_idle(times, [values], [0.0])[0][0]
    distances = [after[0] - before[0] for before, after in pairwise(planted)]
    assert one.period_s == pytest.approx(median(distances), rel=0.06)
    between_s = step[0] * (1 - step[1]) if step is not None else 0.0  # which may lie before or after it
    assert median(own.idle_s for own in one.intervals) == pytest.approx(
        idle_s, abs=0.5 * max(0.5, interval_s) + 0.08 * idle_s + between_s)
    assert one.next_s is not None and one.next_s - one.intervals[-1].begin_s > 0.9 * one.period_s
    assert 0 < one.share < 0.5 and one.spread_s is not None and one.spread_s <= 0.1 * one.period_s


def accident(rng: random.Random) -> Spans:
    begin_s = rng.uniform(30, 550)
    return [(begin_s, begin_s + rng.uniform(3, 40))]


def twice(rng: random.Random) -> Spans:
    return [(begin_s, begin_s + rng.uniform(3, 30)) for begin_s in (rng.uniform(30, 250), rng.uniform(300, 550))]


HEALTHY: dict[str, Callable[[random.Random], tuple[Spans, dict[str, object]]]] = {
    "noise": lambda rng: ((), {"noise": rng.uniform(0.01, 0.3)}),
    "steps": lambda rng: ((), {"noise": rng.uniform(0.01, 0.2),
                               "step": (rng.uniform(0.05, 9), rng.uniform(0.4, 0.98))}),
    "an accident": lambda rng: (accident(rng), {}),
    "two accidents": lambda rng: (twice(rng), {}),
    "a start": lambda rng: ([(0.0, rng.uniform(20, 90))], {}),
    "an idle GPU": lambda rng: ([(0.0, TOTAL_S)], {"idle": rng.choice([0.0, 0.005])}),
}


@pytest.mark.parametrize("kind", HEALTHY)
def test_a_healthy_job_has_none(kind: str) -> None:
    rng = random.Random(kind)
    fired = 0
    for _ in range(60):
        spans, how = HEALTHY[kind](rng)
        fired += bool(found(spans, rng.randrange(2**32), interval_s=rng.choice([0.5, 1.0, 2.0, 5.0]), **how))
    assert fired == 0  # 0 of 9,000 when this was written


def test_what_comes_at_random_has_no_period() -> None:
    rng, regular, shown = random.Random(7), 0, 0
    for _ in range(60):
        begin_s, spans = 0.0, []
        mean_s = rng.uniform(15, 80)
        while begin_s < TOTAL_S:
            begin_s += rng.expovariate(1 / mean_s) + 4
            spans.append((begin_s, begin_s + rng.uniform(3.2, 6)))
        for one in found(spans, rng.randrange(2**32)):
            shown += 1
            regular += one.period_s is not None
    assert shown > 30 and regular <= 2


PLAIN = every(62.0, 4.1, random.Random(3), first_s=30.0)


def test_one_among_regular_ones_that_is_missing_or_irregular() -> None:
    (one,) = found([*PLAIN, (PLAIN[3][0] + 25, PLAIN[3][0] + 37)])
    assert one.period_s == pytest.approx(62, rel=0.03) and len(one.intervals) == len(PLAIN) and len(one.others) == 1
    assert one.others[0].idle_s == pytest.approx(12, abs=0.5)
    (one,) = found([*PLAIN[:4], *PLAIN[5:]])  # one that is missing does not double the period
    assert one.period_s == pytest.approx(62, rel=0.03) and not one.others
    long = every(170.0, 24.0, random.Random(4), first_s=75.0)  # of two kinds the regular one is told
    (one,) = found([*(s for s in PLAIN if not any(s[0] < e + 2 and b - 2 < s[1] for b, e in long)), *long])
    assert one.period_s == pytest.approx(62, rel=0.03)
    assert max(own.idle_s for own in one.intervals) < 6 and min(own.idle_s for own in one.others) > 20
    (one,) = found([(begin, end + (20 if i % 3 == 0 else 0)) for i, (begin, end) in enumerate(PLAIN)])
    assert one.period_s == pytest.approx(62, rel=0.03) and not one.others
    assert max(own.idle_s for own in one.intervals) == pytest.approx(24, abs=0.5)


def test_too_few_stopped_most_of_the_time_and_the_next_one() -> None:
    assert found(PLAIN, total_s=150.0) == []  # two
    (three,) = found(PLAIN, total_s=200.0)
    assert len(three.intervals) == 3 and three.period_s is None, "two equal distances are chance"
    (stopped,) = found([s for s in PLAIN if s[0] < 400])
    assert stopped.period_s is None and stopped.next_s is None
    assert found(every(60.0, 36.0, random.Random(5))) and found(every(60.0, 58.5, random.Random(5))) == []
    rare = [(at, at + 60) for at in (20.0, 85.0, 152.0, 230.0, 300.0, 420.0, 482.0)]
    assert found(rare) == [], "without a period most of the time is no pause"
    (often,) = found(every(60.0, 27.0, random.Random(5)))
    assert often.share == pytest.approx(0.45, abs=0.05)
    assert found(PLAIN, idle=0.2) == [] and len(found(PLAIN, idle=0.05)) == 1
    spans = every(62.0, 6.0, random.Random(6), first_s=39.0, jitter=0.0)  # the next one is that after one under way
    (one,) = found(spans, total_s=600.0)  # which began at 597 s
    assert one.next_s == pytest.approx(START_S + 39 + 62 * 10, abs=1.5)


def node(*spans: Spans, **how: object) -> tuple[list[float], list[list[float]]]:
    rows = [readings(own, random.Random(gpu), **how) for gpu, own in enumerate(spans)]  # type: ignore[arg-type]
    return rows[0][0], [values for _, values in rows]


def test_gpus_that_are_idle_together_are_one_and_others_another() -> None:
    other = every(45.0, 9.0, random.Random(8), first_s=20.0)
    times, values = node(PLAIN, PLAIN, other, (), other)
    groups, most = recurring_idle(times, values, [0.0] * 5)
    assert [one.gpus for one in groups] == [(2, 4), (0, 1)] and most == len(other)
    assert groups[1].period_s == pytest.approx(62, rel=0.03)


def test_the_start_of_a_job_missing_readings_and_a_time_without_samples_do_not_count() -> None:
    times, values = node(PLAIN, PLAIN)
    (late,), _ = recurring_idle(times, values, [START_S + 200, math.inf])
    assert late.gpus == (0,) and late.seen_s == pytest.approx(400, abs=2) and len(late.intervals) == 7
    values[1] = [math.nan if i % 7 == 0 else v for i, v in enumerate(values[1])]
    (both,), _ = recurring_idle(times, values, [0.0, 0.0])
    assert both.gpus == (0, 1) and both.period_s == pytest.approx(62, rel=0.03)
    assert recurring_idle(times, [[math.nan] * len(times)], [0.0]) == ([], 0)
    assert recurring_idle([], [[]], [0.0]) == ([], 0)
    times, values = node(PLAIN)  # a time without samples is not idle
    keep = [i for i, time_s in enumerate(times) if not any(b - 0.5 < time_s - START_S - 2 < e + 30 for b, e in PLAIN)]
    groups, _ = recurring_idle([times[i] for i in keep], [[values[0][i] for i in keep]], [0.0])
    assert all(own.idle_s < 10 for one in groups for own in one.intervals)

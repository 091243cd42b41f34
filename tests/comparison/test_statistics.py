"""Intervals of a change: how often they err where nothing changed, and what they find."""

from __future__ import annotations

import math
from itertools import accumulate

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from gputop.comparison.statistics import (
    BLOCKS,
    LOAD_SPREAD,
    LOAD_SPREAD_MOST,
    Drift,
    Interval,
    block_values,
    difference,
    ratio,
    student_quantile,
    threads_spread,
)
from tests.records import replace

series = arrays(float, st.integers(2, 60), elements=st.floats(1e-6, 1e3))


def steps(rng: np.random.Generator, count: int, correlation: float = 0.0, spread: float = 0.03) -> np.ndarray:
    """Around 1, first-order autoregressive and stationary from the first one on."""
    new = math.sqrt(1 - correlation**2)
    noise = rng.standard_normal(count).tolist()
    return 1 + spread * np.array([*accumulate(noise, lambda before, one: correlation * before + new * one)])


@pytest.mark.parametrize(("freedom", "table"), [(4, 4.604), (8, 3.355), (20, 2.845), (100, 2.626)])
def test_students_quantile_is_that_of_the_tables(freedom, table):
    assert student_quantile(0.995, freedom) == pytest.approx(table, rel=0.003)


@pytest.mark.parametrize(("count", "correlation"), [(8, 0.0), (20, 0.0), (20, 0.4), (60, 0.6), (200, 0.9)])
def test_unchanged_jobs_are_rarely_distinguished(count, correlation):
    rng = np.random.default_rng(5)
    false = 0
    for _ in range(250):
        found = difference([steps(rng, count, correlation)], [steps(rng, count, correlation)], 0.99)
        false += found is not None and found.excludes_zero
    assert false / 250 < 0.02


def test_slow_drift_and_another_level_of_each_run_are_no_change():
    """As reruns do: each run at a level of its own, and drifting by as much."""
    rng = np.random.default_rng(6)
    false = {difference: 0, ratio: 0}
    for _ in range(150):
        a, b = (steps(rng, 100, spread=0.01) * (1 + 0.03 * rng.standard_normal())
                * np.linspace(1, 1 + 0.03 * rng.standard_normal(), 100) for _ in range(2))
        for compared in false:
            found = compared([a], [b], 0.99, Drift(0.04, 0.04))
            false[compared] += found.excludes_zero
    assert max(false.values()) / 150 <= 0.05


@pytest.mark.parametrize("compared", [difference, ratio])
def test_ten_percent_are_found_over_twenty_steps(compared):
    rng = np.random.default_rng(7)
    found = 0
    for _ in range(100):
        a, b = steps(rng, 20), 0.9 * steps(rng, 20)
        one = compared([a], [b], 0.99, Drift(0.01, 0.01))
        found += one is not None and one.high < 0
    assert found >= 90


@pytest.mark.parametrize("compared", [difference, ratio])
def test_repeated_captures_find_what_one_pair_does_not(compared):
    rng = np.random.default_rng(8)
    once = often = 0
    for _ in range(50):
        runs = [[steps(rng, 40, spread=0.02) * level * (1 + 0.03 * rng.standard_normal()) for _ in range(4)]
                for level in (1.0, 0.9)]
        one = compared(runs[0][:1], runs[1][:1], 0.99, Drift(0.04, 0.04))
        four = compared(runs[0], runs[1], 0.99, Drift(0.02, 0.02))  # the floor of the mean of four
        once, often = once + (one is not None and one.high < 0), often + (four is not None and four.high < 0)
    assert often > 25 > once


def loaded(rng: np.random.Generator, count: int, level: float) -> np.ndarray:
    """Steps of a job that eight busy processes leave a part of the CPUs: runs differ by 15%, stretches of a run by 15
    %, and a step in ten waits for as long as four."""
    blocks = np.repeat(np.exp(0.15 * rng.standard_normal(8)), -(-count // 8))[:count]
    waits = np.where(rng.random(count) < 0.1, 1 + rng.exponential(3.0, count), 1.0)
    return level * np.exp(0.15 * rng.standard_normal()) * blocks * np.exp(0.2 * rng.standard_normal(count)) * waits


@pytest.mark.parametrize(("count", "by_threads", "seventy", "half_or_more"), [
    (16, False, 0.77, 0.82), (60, False, 0.95, 0.92), (250, False, 0.95, 0.92),
    (16, True, 0.87, 0.87), (60, True, 0.95, 0.92), (250, True, 0.95, 0.92)])  # two standard errors below the rates
def test_on_a_loaded_node_true_changes_are_found_and_reruns_are_none(count, by_threads, seventy, half_or_more):
    """Both error rates, as compare decides: the mean, then the median, each with 95% confidence. The job has half of
    two CPUs, which is ln 2 of load on either side."""
    rng = np.random.default_rng(count)
    spread = threads_spread(count) if by_threads else min(LOAD_SPREAD * math.log(2), LOAD_SPREAD_MOST)
    drift = Drift(0.08, 0.08, (0.0,), math.sqrt(2) * spread, by_threads)

    def called(fast: float) -> int:
        a, b = loaded(rng, count, 100.0), loaded(rng, count, 100.0 * fast)
        both = (ratio([a], [b], 0.95, drift, statistic=s) for s in (np.mean, np.median))
        return next((1 if one.high < 0 else -1 for one in both if one is not None and one.excludes_zero), 0)

    reruns = [called(1.0) for _ in range(400)]  # of 2,000, three to 25
    assert sum(map(abs, reruns)) / 400 <= 1 / 40
    for fast, least in ((0.3, seventy), (0.1, 0.99), (1 / 29, 0.99)):
        better = [called(fast) for _ in range(100)]
        assert better.count(1) / 100 >= least and -1 not in better
    # As many halves and more as there are, each as likely by the logarithm of what is left: from 0.5 to 0.05.
    better = [called(float(np.exp(rng.uniform(np.log(0.05), np.log(0.5))))) for _ in range(150)]
    assert better.count(1) / 150 >= half_or_more and -1 not in better


def test_a_step_29_times_as_fast_is_no_noise_however_much_the_slow_one_varies():
    rng = np.random.default_rng(9)
    slow = 0.5 * np.exp(0.6 * rng.standard_normal(12))
    fast = 0.5 / 29 * np.exp(0.4 * rng.standard_normal(200))
    by_difference, by_ratio = (f([slow], [fast], 0.95, Drift(0.2, 0.2)) for f in (difference, ratio))
    assert by_ratio is not None and by_ratio.high < -1
    assert by_difference is not None and by_difference.high - by_difference.low > by_ratio.of(slow.mean()).high + 0.5


def test_the_load_is_a_shift_of_one_side():
    even = np.full(20, 0.2)
    for loads, low, high in (((), 0.4, 0.4), ((0.0,), 0.4, 0.4), ((0.6,), -0.2, 0.4), ((-0.6, 0.1), 0.3, 1.0)):
        assert ratio([even], [even * math.exp(0.4)], 0.95, Drift(loads=loads))[:3] == pytest.approx((0.4, low, high))


def test_where_the_load_can_explain_the_spread_of_the_blocks_the_corrected_end_has_less_of_it():
    """Two sides whose CPU time per step is 24 and 8 ms, each stretched by a load that differs from block to block."""
    stretch = np.repeat([7.0, 10.0, 8.0, 11.0, 9.0], 40)
    slow, fast = 0.024 * stretch, 0.008 * stretch[::-1]
    unknown, known = (ratio([slow], [fast], 0.95, drift) for drift in (
        Drift(math.hypot(0.08, 0.6), math.hypot(0.08, 0.6)), Drift(0.08, 0.08, (0.05,), math.sqrt(2) * 0.2)))
    assert unknown is not None and known is not None and unknown.high > 0 > known.high
    drift = Drift(0.08, 0.08, (0.05,), math.sqrt(2) * 0.2)
    few = ratio([slow[::40]], [fast[::40]], 0.95, drift)
    assert few is not None and few.high > known.high, "of a step a block nothing says that the blocks are independent"
    assert ratio([slow[::40]], [fast[::40]], 0.95, replace(drift, by_threads=True)).high < few.high


def test_a_ratio_in_the_unit_of_its_figures():
    assert Interval(math.log(0.5), math.log(0.25), 0.0).of(8.0) == pytest.approx((-4.0, -6.0, 0.0))
    assert math.isfinite(Interval(0.0, 0.0, 1e9).of(1.0).high)


@given(series)
def test_a_series_does_not_differ_from_itself(a):
    for compared in (difference, ratio):
        found = compared([a], [a], 0.99)
        assert found is None or found.low <= 0 <= found.high


@given(series, series)
@example(np.ones(5), np.full(50, 1e-6))
def test_the_other_way_round_it_is_the_opposite(a, b):
    for compared in (difference, ratio):
        there = compared([a], [b], 0.99, Drift(0.01, 0.02, (0.3, 0.1), 0.2))
        back = compared([b], [a], 0.99, Drift(0.02, 0.01, (-0.3, -0.1), 0.2))
        assert (there is None) == (back is None)
        if there is not None and back is not None:
            scale = max(a.max(), b.max()) if compared is difference else 1.0
            assert (there.low, there.high) == pytest.approx((-back.high, -back.low), abs=1e-9 * scale)


@given(series, series, st.floats(1e-3, 1e3))
def test_a_ratio_does_not_depend_on_the_unit(a, b, factor):
    there, scaled = ratio([a], [b], 0.95), ratio([factor * a], [factor * b], 0.95)
    assert (there is None) == (scaled is None) and (there is None or scaled == pytest.approx(there, abs=1e-9))


def test_too_few_steps_tell_nothing():
    few = np.array([1.0, 1.1, 0.9, 1.0])
    assert difference([few], [np.linspace(1, 2, 20)], 0.99) is None
    assert difference([np.linspace(1, 2, 20), few], [np.linspace(1, 2, 20)], 0.99) is None
    assert difference([], [few], 0.99) is None is ratio([few], [few], 0.99)
    assert ratio([np.zeros(20)], [np.linspace(1, 2, 20)], 0.99) is None


def test_exact_steps_need_no_spread_but_that_of_reruns():
    exact = difference([np.full(6, 0.2)], [np.full(6, 0.21)], 0.99)
    assert exact is not None and (exact.low, exact.high) == pytest.approx((0.01, 0.01))
    reruns = difference([np.full(6, 0.2)], [np.full(6, 0.21)], 0.99, Drift(0.04, 0.04))
    assert reruns is not None and not reruns.excludes_zero
    assert reruns.high - reruns.estimate == pytest.approx(2.576 * 0.04 * np.hypot(0.2, 0.21), rel=1e-3)


def test_blocks_follow_one_another_over_time():
    assert block_values(np.arange(10.0)).tolist() == [0.5, 2.5, 4.5, 6.5, 8.5] and BLOCKS == 5
    assert block_values(np.array([1.0, 2.0])).tolist() == [1.0, 2.0]

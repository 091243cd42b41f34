"""Intervals of a change: how often they err where nothing changed, and what they find."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from gputop.comparison.statistics import BLOCKS, block_values, difference, student_quantile

series = arrays(float, st.integers(2, 60), elements=st.floats(1e-6, 1e3))


def steps(rng: np.random.Generator, count: int, correlation: float = 0.0, spread: float = 0.03) -> np.ndarray:
    """Around 1, first-order autoregressive and stationary from the first one on."""
    noise = rng.standard_normal(count)
    out = np.empty(count)
    out[0] = noise[0]
    for i in range(1, count):
        out[i] = correlation * out[i - 1] + np.sqrt(1 - correlation**2) * noise[i]
    return 1 + spread * out


@pytest.mark.parametrize(("freedom", "table"), [(4, 4.604), (8, 3.355), (20, 2.845), (100, 2.626)])
def test_students_quantile_is_that_of_the_tables(freedom, table):
    assert student_quantile(0.995, freedom) == pytest.approx(table, rel=0.003)


@pytest.mark.parametrize(("count", "correlation"), [(8, 0.0), (20, 0.0), (20, 0.4), (60, 0.6), (200, 0.9)])
def test_unchanged_jobs_are_rarely_distinguished(count, correlation):
    rng = np.random.default_rng(5)
    false = {np.mean: 0, np.median: 0}
    for _ in range(400):
        a, b = steps(rng, count, correlation), steps(rng, count, correlation)
        for statistic in false:
            found = difference([a], [b], 0.99, statistic=statistic)
            false[statistic] += found is not None and found.excludes_zero
    assert max(false.values()) / 400 < 0.02


def test_slow_drift_and_another_level_of_each_run_are_no_change():
    """As reruns do: each run at a level of its own, and drifting by as much."""
    rng = np.random.default_rng(6)
    false = 0
    for _ in range(300):
        a, b = (steps(rng, 100, spread=0.01) * (1 + 0.03 * rng.standard_normal())
                * np.linspace(1, 1 + 0.03 * rng.standard_normal(), 100) for _ in range(2))
        found = difference([a], [b], 0.99, (0.04, 0.04))
        assert found is not None
        false += found.excludes_zero
    assert false / 300 <= 0.05


def test_ten_percent_are_found_over_twenty_steps():
    rng = np.random.default_rng(7)
    found = 0
    for _ in range(200):
        a, b = steps(rng, 20), 0.9 * steps(rng, 20)
        both = [difference([a], [b], 0.99, (0.01, 0.01), statistic=s) for s in (np.mean, np.median)]
        found += any(one is not None and one.high < 0 for one in both)
    assert found >= 180


def test_repeated_captures_find_what_one_pair_does_not():
    rng = np.random.default_rng(8)
    once = often = 0
    for _ in range(50):
        runs = [[steps(rng, 40, spread=0.02) * level * (1 + 0.03 * rng.standard_normal()) for _ in range(4)]
                for level in (1.0, 0.9)]
        one = difference(runs[0][:1], runs[1][:1], 0.99, (0.04, 0.04))
        four = difference(runs[0], runs[1], 0.99, (0.02, 0.02))  # the floor of the mean of four
        once, often = once + (one is not None and one.high < 0), often + (four is not None and four.high < 0)
    assert often > 25 > once


@given(series)
def test_a_series_does_not_differ_from_itself(a):
    found = difference([a], [a], 0.99)
    assert found is None or found.low <= 0 <= found.high


@given(series, series)
def test_the_other_way_round_it_is_the_opposite(a, b):
    there, back = difference([a], [b], 0.99, (0.01, 0.02)), difference([b], [a], 0.99, (0.02, 0.01))
    assert (there is None) == (back is None)
    if there is not None and back is not None:
        scale = max(a.max(), b.max())
        assert (there.low, there.high) == pytest.approx((-back.high, -back.low), abs=1e-9 * scale)


def test_too_few_steps_tell_nothing():
    few = np.array([1.0, 1.1, 0.9, 1.0])
    assert difference([few], [np.linspace(1, 2, 20)], 0.99) is None
    assert difference([np.linspace(1, 2, 20), few], [np.linspace(1, 2, 20)], 0.99) is None
    assert difference([], [few], 0.99) is None


def test_exact_steps_need_no_spread_but_that_of_reruns():
    exact = difference([np.full(6, 0.2)], [np.full(6, 0.21)], 0.99)
    assert exact is not None and (exact.low, exact.high) == pytest.approx((0.01, 0.01))
    reruns = difference([np.full(6, 0.2)], [np.full(6, 0.21)], 0.99, (0.04, 0.04))
    assert reruns is not None and not reruns.excludes_zero
    assert reruns.high - reruns.estimate == pytest.approx(2.576 * 0.04 * np.hypot(0.2, 0.21), rel=1e-3)


def test_blocks_follow_one_another_over_time():
    assert block_values(np.arange(10.0)).tolist() == [0.5, 2.5, 4.5, 6.5, 8.5] and BLOCKS == 5
    assert block_values(np.array([1.0, 2.0])).tolist() == [1.0, 2.0]

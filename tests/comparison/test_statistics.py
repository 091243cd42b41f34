"""Intervals of a change: how often they err where nothing changed, and what they find."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from gputop.comparison.statistics import (
    effective_size,
    mean_difference,
    median_ratio,
    share_longer,
    student_quantile,
)

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


@pytest.mark.parametrize(("count", "correlation"), [(8, 0.0), (20, 0.0), (20, 0.4), (60, 0.6)])
def test_unchanged_jobs_are_rarely_distinguished(count, correlation):
    rng = np.random.default_rng(5)
    false = {"mean": 0, "median": 0}
    runs = 600
    for _ in range(runs):
        a, b = steps(rng, count, correlation), steps(rng, count, correlation)
        mean, median = mean_difference(a, b, 0.99), median_ratio(a, b, 0.99)
        false["mean"] += mean is not None and not mean.low <= 0 <= mean.high
        false["median"] += median is not None and not median.low <= 1 <= median.high
    assert max(false.values()) / runs < 0.04


def test_without_counting_neighbors_they_would_be():
    rng = np.random.default_rng(6)
    false = 0
    for _ in range(300):
        a, b = steps(rng, 60, 0.6), steps(rng, 60, 0.6)
        reach = 2.62 * np.sqrt(a.var(ddof=1) / 60 + b.var(ddof=1) / 60)
        false += abs(b.mean() - a.mean()) > reach
    assert false / 300 > 0.1


def test_ten_percent_are_found_over_twenty_steps():
    rng = np.random.default_rng(7)
    found = 0
    for _ in range(200):
        a, b = steps(rng, 20), 0.9 * steps(rng, 20)
        mean, median = mean_difference(a, b, 0.99), median_ratio(a, b, 0.99)
        found += mean is not None and median is not None and mean.high < 0 and median.high < 1
    assert found >= 190


@given(series)
def test_a_series_does_not_differ_from_itself(a):
    mean, median = mean_difference(a, a, 0.99), median_ratio(a, a, 0.99)
    assert mean is None or mean.low <= 0 <= mean.high
    assert median is None or median.low <= 1 <= median.high


@given(series, series)
def test_the_other_way_round_it_is_the_opposite(a, b):
    there, back = mean_difference(a, b, 0.99), mean_difference(b, a, 0.99)
    assert (there is None) == (back is None)
    if there is not None and back is not None:
        scale = max(a.max(), b.max())
        assert (there.low, there.high) == pytest.approx((-back.high, -back.low), abs=1e-9 * scale)
    ratio, inverse = median_ratio(a, b, 0.99), median_ratio(b, a, 0.99)
    assert (ratio is None) == (inverse is None)
    assert share_longer(a, b) == pytest.approx(1 - share_longer(b, a))


def test_the_estimate_is_that_of_the_medians():
    a, b = np.array([1.0, 1.1, 0.9, 1.2, 1.05, 5.0]), np.array([2.0, 2.1, 1.9, 2.2, 2.05, 0.1])
    found = median_ratio(a, b, 0.99)
    assert found is not None and found.estimate == pytest.approx(np.median(b) / np.median(a))
    assert found.low < found.estimate < found.high


def test_too_few_steps_tell_nothing():
    few = np.array([1.0, 1.1, 0.9, 1.0])
    many = np.linspace(1, 2, 20)[np.random.default_rng(0).permutation(20)]
    assert mean_difference(few, many, 0.99) is None and median_ratio(many, few, 0.99) is None


def test_a_trend_is_worth_few_steps():
    trend = np.linspace(1, 2, 20)
    assert effective_size(trend) < 2 < 15 < effective_size(trend[np.random.default_rng(0).permutation(20)])
    assert mean_difference(trend, trend, 0.99) is None


def test_exact_steps_need_no_spread():
    found = mean_difference(np.full(6, 0.2), np.full(6, 0.21), 0.99)
    assert found is not None and found.low == found.high == pytest.approx(0.01)


def test_share_longer_counts_pairs():
    assert share_longer(np.array([1.0, 2.0]), np.array([3.0, 4.0])) == 1
    assert share_longer(np.array([1.0, 2.0]), np.array([1.0, 2.0])) == 0.5
    assert share_longer(np.array([1.0, 3.0]), np.array([2.0])) == 0.5

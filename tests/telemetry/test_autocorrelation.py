from __future__ import annotations

import math
import random
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gputop.telemetry.autocorrelation import (
    LAGS_PER_SAMPLE,
    MIN_SAMPLES,
    Correlogram,
    Signal,
    autocorrelation,
    even_samples,
    lagged_products,
    mean_correlogram,
    normalize,
)


@given(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=400), st.integers(1, 450))
@example([0.0, 2.2250738585072014e-308], 2)
def test_the_products_by_whole_numbers_are_those_of_numpy(values: list[float], lags: int) -> None:
    wanted = [*np.correlate(values, values, "full")[len(values) - 1:], *[0.0] * lags][:lags]
    span = max(values) - min(values)
    off = 2 * len(values) * (span * math.sqrt(len(values) / 2**32)) * (max(map(abs, values)) + span) + 1e-6
    np.testing.assert_allclose(lagged_products(values, lags), wanted, atol=off, rtol=1e-9)


def test_uneven_samples_come_into_the_nearest_slots_and_a_slot_has_their_mean() -> None:
    samples = even_samples([0.0, 1.1, 1.9, 4.0, 4.9, 5.2], [[1.0, 2.0, math.nan, 4.0, 5.0, 7.0]])
    assert samples is not None and samples.interval_s == pytest.approx(0.9)
    assert samples.columns[0][:2] == [1.0, 2.0] and samples.columns[0][-2:] == [4.0, 6.0]
    assert len(samples.columns[0]) == 7 and all(map(math.isnan, samples.columns[0][2:5]))


def test_samples_before_a_long_pause_are_left_out() -> None:
    samples = even_samples([0.0, 1.0, 100.0, 101.0, 102.0], [[9.0, 9.0, 1.0, 2.0, 3.0]])
    assert samples is not None and samples.columns == [[1.0, 2.0, 3.0]]
    assert even_samples([0.0, 1.0], [[1.0, 2.0]]) is None and even_samples([5.0] * 3, [[1.0] * 3]) is None


def test_a_trend_is_taken_out_and_a_loud_stretch_counts_no_more_than_a_quiet_one() -> None:
    wave = [(1.0 + 9.0 * (i >= 200)) * math.sin(i) + 0.5 * i for i in range(400)]
    signal = normalize(wave, 41, 0.01)
    assert signal is not None and all(signal.present)
    quiet, loud = (np.std(signal.values[part]) for part in (slice(50, 150), slice(250, 350)))
    assert quiet == pytest.approx(1.0, rel=0.1) and loud == pytest.approx(1.0, rel=0.1)
    assert normalize([0.5] * 400, 41, 0.01) is None and normalize(wave[:MIN_SAMPLES - 1], 5, 0.01) is None


def test_r_of_a_wave_is_one_at_its_period_and_minus_one_at_half_of_it() -> None:
    values = [math.cos(2 * math.pi * i / 10) for i in range(400)]
    r, pairs = autocorrelation(Signal(values, [True] * 400), 30)
    assert r[0] == 1.0 and r[10 * LAGS_PER_SAMPLE] == pytest.approx(1.0, abs=0.01)
    assert r[5 * LAGS_PER_SAMPLE] == pytest.approx(-1.0, abs=0.01)
    assert r[2 * LAGS_PER_SAMPLE + 2] == pytest.approx(0.0, abs=0.05), "2.5 samples, between two of them"
    assert pairs[10 * LAGS_PER_SAMPLE] == 390


def test_samples_that_are_missing_make_no_pairs() -> None:
    rng = random.Random(1)
    present = [rng.random() < 0.5 for _ in range(200)]
    _, pairs = autocorrelation(Signal([1.0 * p for p in present], present), 3)
    assert pairs[LAGS_PER_SAMPLE] == pytest.approx(sum(a and b for a, b in pairwise(present)), 0.01)


def test_the_mean_of_correlograms_is_at_each_lag() -> None:
    mean = mean_correlogram([Correlogram([1.0, 0.5], [0.2, 0.4]), Correlogram([1.0, 0.1], [0.4, 0.2])])
    assert mean.r == pytest.approx([1.0, 0.3]) and mean.noise == pytest.approx([0.3, 0.3])

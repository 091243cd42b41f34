"""The search for a period in correlograms made by hand: waves whose peaks are where they are put."""

from __future__ import annotations

import math

import pytest

from gputop.telemetry.autocorrelation import LAGS_PER_SAMPLE, Correlogram, fundamental_lag, min_peak_ratio, shared_peak

LONGEST = 60  # samples


def wave(period: float, *, height: float = 0.8, noise: float = 0.1, half: float = 0.0) -> Correlogram:
    """A correlogram with peaks at the multiples of ``period`` samples; ``half``: how high those between them are."""
    r = []
    for p in range((2 * LONGEST + 2) * LAGS_PER_SAMPLE):
        turn = p / LAGS_PER_SAMPLE / period
        r.append(height * math.cos(2 * math.pi * turn) if not half else max(
            height * math.cos(2 * math.pi * turn), half * math.cos(2 * math.pi * (turn + 0.5))))
    return Correlogram(r, [noise] * len(r))


@pytest.mark.parametrize("period", [3.0, 7.25, 20.0])
def test_the_first_peak_is_the_fundamental_and_not_a_multiple(period: float) -> None:
    assert fundamental_lag(wave(period), LONGEST) == pytest.approx(period, abs=0.25)


@pytest.mark.parametrize(("half", "period"), [(0.5, 20.0), (0.79, 10.0)])
def test_a_lower_peak_before_the_highest_is_a_part_of_the_step_and_one_about_as_high_is_the_step(
        half: float, period: float) -> None:
    assert fundamental_lag(wave(20.0, half=half), LONGEST) == pytest.approx(period, abs=0.25)


def test_a_peak_below_the_noise_is_none() -> None:
    assert fundamental_lag(wave(8.0, height=0.3, noise=0.31), LONGEST) is None
    assert shared_peak({0: wave(8.0, height=0.3, noise=0.31)}, LONGEST) is None and shared_peak({}, LONGEST) is None


def test_all_gpus_share_a_period_that_is_read_from_its_last_multiple() -> None:
    peak = shared_peak({gpu: wave(9.1) for gpu in (2, 5, 7)}, LONGEST)
    assert peak is not None and peak.gpus == (2, 5, 7) and peak.lag == pytest.approx(9.1, abs=0.005)
    assert peak.height == pytest.approx(0.8, rel=0.02)
    assert peak.confidence == pytest.approx(1 - (0.1 / 0.8) ** 2, rel=0.02)


def test_the_larger_group_wins_and_of_equal_ones_the_higher_peak() -> None:
    slow, fast = wave(20.0), wave(7.0, height=0.95)
    for groups, gpus, lag in (({0: slow, 1: fast, 2: slow}, (0, 2), 20.0), ({0: slow, 1: fast}, (1,), 7.0)):
        peak = shared_peak(groups, LONGEST)
        assert peak is not None and peak.gpus == gpus and peak.lag == pytest.approx(lag, abs=0.1)


def test_a_gpu_too_noisy_for_a_period_of_its_own_joins_the_group_whose_peak_it_has() -> None:
    noisy = wave(9.0, height=0.09, noise=0.1)
    peak = shared_peak({0: wave(9.0), 1: noisy, 2: wave(9.0), 3: wave(26.0)}, LONGEST)
    assert fundamental_lag(noisy, LONGEST) is None
    assert peak is not None and peak.gpus == (0, 1, 2)


def test_short_lags_need_less_of_the_highest_peak() -> None:
    assert [min_peak_ratio(lag) for lag in (3.0, 5.0, 50.0)] == [0.55, 0.75, 0.85]

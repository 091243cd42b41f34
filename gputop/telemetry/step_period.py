"""The period of the training step, estimated from the live figures alone: nothing is attached to the job.

A job that repeats one step produces a signal that resembles itself one step later, and two and three steps
later. So the autocorrelation of the samples has a peak at the period, and it is the first of the peaks. The
result is an estimate and is called so.

Limits of sampling: a reading every T seconds says nothing about periods below 2 T (Nyquist), and next to
nothing below 2.5 T. Worse, a shorter step does not vanish: sampled every T seconds it can look like a longer
one (an alias). Readings that are means over T, as SM active is, damp the alias, to a half at 1.7 samples per
step and further below, but do not remove it. Only another interval tells them apart: a true period stays, an
alias moves.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from gputop.core.live_steps import LiveSteps

if TYPE_CHECKING:
    from gputop.telemetry.history import History

F64 = npt.NDArray[np.float64]

SAMPLES_PER_PERIOD = 2.5  # at least: Nyquist needs more than 2, and the peak must be separate from lag 0
MIN_SAMPLES = 32
MIN_PERIODS = 5  # repetitions in the window
WINDOW_SAMPLES, WINDOW_S, MAX_SAMPLES = 300, 120.0, 1200  # the window is the longer of the first two
FLAT = "flat: it hardly changes"
UNMEASURED = "nothing was measured"
TOO_FAST = "too fast: it repeats within 2.5 samples"
INTERVALS_S = (10.0, 5.0, 2.0, 1.0, 0.5, 0.2, 0.1)  # what the monitor offers

SURE = 0.6  # confidence; below it a period is as often an alias of shorter steps
MIN_CONFIDENCE = 0.4  # below it no period is reported: hardly above noise, mostly a broad alias
_SHORT_LAG = 20  # samples: longest lag of the first two correlations; the third uses all that the window allows
_FALSE_ALARMS = 0.001  # probability that the highest peak of a window of noise passes (normal distribution)
_LAGS_PER_SAMPLE = 4  # a period need not be a whole number of samples
# Short parts of a step, such as the gap between two steps, are aliased where steps have few samples; they lower
# every peak that falls between two samples. The mean of two neighbors removes most of that, but below three samples
# per step it removes the step itself as well.
_RAW_MAX_LAG = 3.0  # samples: shorter periods are searched in the samples themselves, longer ones in means of two
# Pairs (lag in samples below, share of the highest peak): the first peak of that share is the fundamental, later
# ones are its multiples.
_MIN_PEAK_RATIOS = ((4.0, 0.55), (6.0, 0.75), (float("inf"), 0.85))
_MAX_GAP = 4.0  # intervals: samples before a longer gap are ignored

# The metrics tried, in this order, and the standard deviation below which each counts as flat.
_SIGNALS = (("sm_active", 0.01), ("power_w", 5.0), ("gpu_util", 0.01))


@dataclass(frozen=True, slots=True)
class StepPeriodEstimate:
    """An estimated period, or why there is none: ``period_s`` and ``reason`` are never both set.

    ``confidence`` (0-1) is 1 - (n / p)^2, where p is the height of the peak in the autocorrelation and n the
    height that noise in a window of this length exceeds once in a thousand times: 0 means no better than
    noise, 1 the same shape each time in a long window. n follows Bartlett (1946, J. R. Stat. Soc. Suppl. 8,
    27-41): the autocorrelation of N samples scatters by sqrt((1 + 2 sum r_j^2) / N). The sum ends at the first
    zero of r, because the period itself must not count as noise; the quantile is for all lags together.

    ``metric`` is the metric it was found in. ``gpus`` are the columns that share the period, ``varying_gpus``
    the number of columns that are not flat. The samples, ``interval_s`` apart, can show periods from
    ``shortest_s`` to ``longest_s``.
    """

    period_s: float | None
    confidence: float = 0.0
    reason: str | None = None
    metric: str = ""
    gpus: tuple[int, ...] = ()
    varying_gpus: int = 0
    interval_s: float | None = None
    shortest_s: float | None = None
    longest_s: float | None = None


def max_interval_for(step_s: float) -> float | None:
    """The longest interval between samples that shows a step of ``step_s``; None: no offered interval does."""
    return next((i for i in INTERVALS_S if i * SAMPLES_PER_PERIOD <= step_s), None)


def steps_per_period(step_period: StepPeriodEstimate, step_s: float) -> int | None:
    """How many steps of ``step_s`` (from a trace) make one period; None where that is no whole number."""
    if step_period.period_s is None:
        return None
    count = step_period.period_s / step_s
    whole = round(count)
    # Up to 16 steps, a period that is 1 % off still tells one number from the next.
    return whole if 1 <= whole <= 16 and abs(count - whole) <= 0.1 else None


def is_undersampled(step_s: float, interval_s: float) -> bool:
    """Whether samples ``interval_s`` apart show steps of ``step_s`` only as an alias."""
    return step_s < 2 * interval_s


def median(values: F64) -> float:
    """The median of numbers without NaN. np.median would import numpy.ma, 1.3 MB that nothing else needs here."""
    middle = len(values) // 2
    lower = middle - 1 + len(values) % 2
    return float(np.partition(values, (lower, middle))[lower:middle + 1].mean())


def estimate_step_period(history: History) -> StepPeriodEstimate:
    """The step period in the newest minutes of ``history``; ``gpus`` index :attr:`History.uuids`."""
    times, _ = history.windows(_SIGNALS[0][0], 60.0)
    interval_s = median(np.diff(times[-32:])) if len(times) > 2 else 1.0
    reach_s = max(WINDOW_S, WINDOW_SAMPLES * interval_s)
    first: StepPeriodEstimate | None = None
    for metric, min_deviation in _SIGNALS:
        found = replace(estimate(*history.windows(metric, reach_s), min_deviation), metric=metric)
        if found.period_s is not None or found.reason == TOO_FAST:
            return found  # where the step is too fast for this metric, another one would show an alias
        if first is None and found.reason != UNMEASURED:
            first = found
    return first or found


def live_steps(history: History, most: int = 10) -> LiveSteps | None:
    """The step period in each of the last minutes of ``history``; None where none stands out."""
    found = estimate_step_period(history)
    end_s = history.newest_s
    if found.period_s is None or found.interval_s is None or end_s is None:
        return None
    # As long as a period takes to be sure (measured: 14 periods, 100 samples).
    stretch_s = max(30.0, 15 * found.period_s, 100 * found.interval_s)
    by_stretch = [estimate(*history.windows(found.metric, stretch_s, end_s=end_s - i * stretch_s))
                  for i in reversed(range(most))]
    sure = [one for one in by_stretch if one.period_s is not None and one.confidence >= SURE]
    if not sure:
        return None
    return LiveSteps(tuple(one.period_s for one in sure if one.period_s is not None),
                     min(one.confidence for one in sure), stretch_s, found.interval_s)


def estimate(times_s: F64, values: npt.NDArray[np.floating], min_deviation: float = 0.01) -> StepPeriodEstimate:
    """The period of ``values[n, gpu]`` sampled at the rising ``times_s[n]``; NaN is missing.

    Times may be uneven: only the newest stretch of similar intervals is used. A GPU whose standard deviation
    is below ``min_deviation`` is left out.
    """
    gridded = _grid(np.asarray(times_s, np.float64), np.asarray(values, np.float64))
    if gridded is None:
        return StepPeriodEstimate(None, reason="too short: hardly a sample")
    grid, interval_s = gridded
    max_lag = len(grid) // MIN_PERIODS
    seen = StepPeriodEstimate(None, interval_s=interval_s, shortest_s=SAMPLES_PER_PERIOD * interval_s,
                  longest_s=max_lag * interval_s)
    count = int((~np.isnan(grid)).sum(axis=0).max(initial=0))
    if not count:
        return replace(seen, reason=UNMEASURED)
    if count < MIN_SAMPLES:
        return replace(seen, reason=f"too short: {count} samples, {MIN_SAMPLES} are needed")
    if not (_standard_deviation(grid) > 0.5 * min_deviation).any():  # saves the correlations where nothing runs
        return replace(seen, reason=FLAT)
    short_lag = min(_SHORT_LAG, max_lag)
    correlations = (_Correlation(grid, short_lag, min_deviation, smooth=False),
                    _Correlation(grid, short_lag, min_deviation), _Correlation(grid, max_lag, min_deviation))
    if not any(correlation.gpus for correlation in correlations):
        return replace(seen, reason=FLAT)
    peaks = [peak for correlation in correlations if (peak := correlation.best()) is not None
             and (correlation.smooth or peak.lag < _RAW_MAX_LAG)]
    if not peaks:
        return replace(seen, reason="nothing repeats")
    shared = max(len(p.gpus) for p in peaks)
    highest = max(p.height for p in peaks if len(p.gpus) == shared)
    best = next(p for p in peaks if len(p.gpus) == shared and p.height >= _min_peak_ratio(p.lag) * highest)
    if best.confidence < MIN_CONFIDENCE:
        return replace(seen, reason="what repeats hardly stands out from noise")
    if best.lag < SAMPLES_PER_PERIOD:
        return replace(seen, reason=TOO_FAST)
    return replace(seen, period_s=best.lag * interval_s, confidence=best.confidence, gpus=best.gpus,
                   varying_gpus=max(len(correlation.gpus) for correlation in correlations))


def _grid(times_s: F64, values: F64) -> tuple[F64, float] | None:
    """The newest stretch of even sampling on a grid [slot, gpu], NaN where a slot has no sample, and its interval."""
    if len(times_s) < 3:
        return None
    gaps = np.diff(times_s)
    interval_s = median(gaps[-32:])
    if not interval_s > 0:
        return None
    odd = np.flatnonzero((gaps > _MAX_GAP * interval_s) | (gaps < interval_s / _MAX_GAP))
    first = int(odd[-1]) + 1 if len(odd) else 0
    most = min(MAX_SAMPLES, max(WINDOW_SAMPLES, round(WINDOW_S / interval_s)))
    slots = np.rint((times_s[first:] - times_s[-1]) / interval_s).astype(np.int64) + most - 1
    kept = values[first:][slots >= 0]
    slots = slots[slots >= 0]
    slots -= slots[0]
    grid = np.full((int(slots[-1]) + 1, values.shape[1]), np.nan)
    for gpu in range(values.shape[1]):
        known = ~np.isnan(kept[:, gpu])
        total = np.bincount(slots[known], kept[known, gpu], len(grid))
        hits = np.bincount(slots[known], minlength=len(grid))
        np.divide(total, hits, out=grid[:, gpu], where=hits > 0)
    return grid, interval_s


@dataclass(frozen=True, slots=True)
class _Peak:
    lag: float  # samples
    height: float
    confidence: float
    gpus: tuple[int, ...]


class _Correlation:
    """Autocorrelation r[lag, column] of the GPUs that vary, up to ``longest`` samples, at lags of 1/4 sample.

    Each column is first detrended and normalized to the same local deviation: otherwise a pause for an
    evaluation or a checkpoint would count for more than all the steps around it.
    """

    def __init__(self, grid: F64, longest: int, min_deviation: float, smooth: bool = True) -> None:
        present = ~np.isnan(grid)
        width = 2 * longest + 1
        trend = _moving_sum(np.where(present, grid, 0.0), width) / np.maximum(_moving_sum(present, width), 1.0)
        detrended = np.where(present, grid - trend, 0.0)
        deviation = np.sqrt(_moving_sum(detrended**2, width) / np.maximum(_moving_sum(present, width), 1.0))
        self.gpus = [g for g in range(grid.shape[1])
                     if present[:, g].sum() >= MIN_SAMPLES and median(deviation[present[:, g], g]) >= min_deviation]
        self.longest, self.smooth = longest, smooth
        if not self.gpus:
            return
        normalized = (detrended / np.maximum(deviation, 0.1 * min_deviation))[:, self.gpus]
        present = present[:, self.gpus]
        if smooth:
            present = present[1:] & present[:-1]
            normalized = np.where(present, normalized[1:] + normalized[:-1], 0.0)
        self.r, pairs = _autocorrelation(normalized, present, 2 * longest + 2)
        self.lags = np.arange(len(self.r)) / _LAGS_PER_SAMPLE
        quantile = NormalDist().inv_cdf(1 - _FALSE_ALARMS / (longest * len(self.gpus)))
        # Between the samples white noise is correlated: sin(pi l) / (pi l).
        self.noise = (quantile * np.sqrt(_bartlett_factor(self.r[::_LAGS_PER_SAMPLE]) / np.maximum(pairs, 1.0))
                      + np.maximum(0.0, np.sinc(self.lags))[:, None])

    def best(self) -> _Peak | None:
        """The peak of the period that most GPUs share."""
        if not self.gpus:
            return None
        columns = range(len(self.gpus))
        common = self._fundamental([*columns])
        if common is not None and all(self._is_fundamental(c, common) for c in columns):
            return self._peak([*columns], common)
        own = [self._fundamental([c]) for c in columns]
        found = []
        for lag in {common, *own} - {None}:
            assert lag is not None
            members = [c for c in columns if self._has_period(c, own[c], lag)]
            if members:
                found.append(self._peak(members, self._fundamental(members) or lag))
        return max(found, key=lambda peak: (len(peak.gpus), peak.height), default=None)

    def _peak(self, columns: list[int], lag: float) -> _Peak:
        r, noise = self._mean_of(columns)
        height = max(float(np.interp(lag, self.lags, r)), 1e-9)
        sure = max(0.0, 1 - (float(np.interp(lag, self.lags, noise)) / height) ** 2)
        return _Peak(self._refined_lag(columns, lag), height, sure, tuple(self.gpus[c] for c in columns))

    def _is_fundamental(self, column: int, lag: float) -> bool:
        """Whether a GPU has a peak there and no peak nearly as high before: then it is the GPU's own period too."""
        r, noise = self.r[:, column], self.noise[:, column]
        p = round(lag * _LAGS_PER_SAMPLE)
        around = slice(p - _lag_tolerance(p), p + _lag_tolerance(p) + 1)
        top = float(r[around].max())
        lobe = int((r <= 0).argmax())  # the end of the peak at lag 0
        before = float(r[lobe: round(0.7 * p)].max(initial=0.0))  # half and two thirds of the lag, and shorter ones
        return top > noise[p] and before < _min_peak_ratio(lag) * top

    def _mean_of(self, columns: list[int]) -> tuple[F64, F64]:
        return self.r[:, columns].mean(axis=1), self.noise[:, columns].mean(axis=1)

    def _fundamental(self, columns: list[int]) -> float | None:
        """The lag of the first peak about as high as the highest: the later ones are its multiples."""
        r, noise = self._mean_of(columns)
        peaks = []
        tops = np.flatnonzero((r[1:-1] >= r[:-2]) & (r[1:-1] > r[2:]) & (r[1:-1] > noise[1:-1])) + 1
        # Periods that are too fast are searched as well: otherwise a multiple would be taken for the period.
        for p in tops[(tops >= 2 * _LAGS_PER_SAMPLE) & (tops <= self.longest * _LAGS_PER_SAMPLE)].tolist():
            again = r[2 * p - _lag_tolerance(p): 2 * p + _lag_tolerance(p) + 1].max(initial=-1.0)
            if r[p] - r[:p].min() > noise[p] and again > 0.5 * noise[p]:
                peaks.append(p)
        highest = max((r[p] for p in peaks), default=0.0)
        return next((float(self.lags[p]) for p in peaks if r[p] >= _min_peak_ratio(self.lags[p]) * highest), None)

    def _has_period(self, column: int, own: float | None, lag: float) -> bool:
        """Whether a GPU has this period; a GPU too noisy to have found its ``own`` needs at least a peak there."""
        p = round(lag * _LAGS_PER_SAMPLE)
        if own is not None:
            return abs(own * _LAGS_PER_SAMPLE - p) <= _lag_tolerance(p)
        around = slice(p - _lag_tolerance(p), p + _lag_tolerance(p) + 1)
        r = self.r[around, column]
        return bool((r > 0.5 * self.noise[around, column]).any()) and 0 < int(r.argmax()) < len(r) - 1

    def _refined_lag(self, columns: list[int], lag: float) -> float:
        """The period read from the last multiple that stands out: the farther the multiple, the finer the result."""
        r, noise = self._mean_of(columns)
        slack = _lag_tolerance(round(lag * _LAGS_PER_SAMPLE))
        lag = _interpolated_peak(r, round(lag * _LAGS_PER_SAMPLE)) / _LAGS_PER_SAMPLE
        for k in range(2, len(r)):
            p = round(lag * k * _LAGS_PER_SAMPLE)
            if p + slack + 1 >= len(r):
                break
            top = p - slack + int(r[p - slack: p + slack + 1].argmax())
            if r[top] <= noise[top] or abs(top - p) == slack:
                break
            lag = _interpolated_peak(r, top) / _LAGS_PER_SAMPLE / k
        return lag


def _autocorrelation(values: F64, present: npt.NDArray[np.bool_], lags: int) -> tuple[F64, F64]:
    """r[lag, column] at multiples of 1/4 sample up to ``lags``, and the number of pairs of samples behind each."""
    size = 1 << (2 * len(values) - 1).bit_length()
    power = np.abs(np.fft.rfft(values, size, axis=0)) ** 2
    # Zero-padding the spectrum interpolates between the samples.
    products = np.fft.irfft(power, size * _LAGS_PER_SAMPLE, axis=0)[: lags * _LAGS_PER_SAMPLE] * _LAGS_PER_SAMPLE
    overlap = np.fft.irfft(np.abs(np.fft.rfft(present, size, axis=0)) ** 2, size, axis=0)[: lags + 1]
    fine = np.arange(lags * _LAGS_PER_SAMPLE) / _LAGS_PER_SAMPLE
    pairs = overlap[fine.astype(int)] + (fine % 1)[:, None] * (overlap[fine.astype(int) + 1 - (fine % 1 == 0)]
                                                               - overlap[fine.astype(int)])
    r = products / np.maximum(pairs, 1.0)
    return r / np.maximum(r[0], 1e-30), pairs


def _min_peak_ratio(lag: float) -> float:
    return next(share for limit, share in _MIN_PEAK_RATIOS if lag < limit)


def _lag_tolerance(p: int) -> int:
    """How far a peak may lie from its expected lag, in lags: jitter, and most of a sample."""
    return max(3 * _LAGS_PER_SAMPLE // 4, round(0.08 * p))


def _interpolated_peak(r: F64, p: int) -> float:
    """The maximum of the parabola through a peak and its neighbors."""
    bend = r[p - 1] - 2 * r[p] + r[p + 1]
    return p + (0.5 * float(r[p - 1] - r[p + 1]) / float(bend) if bend < 0 else 0.0)


def _moving_sum(columns: npt.NDArray[np.generic], width: int) -> F64:
    """The sum of each column over ``width`` slots around each slot; ``width`` is odd."""
    half = width // 2
    total = np.cumsum(np.pad(columns.astype(np.float64), ((half + 1, half), (0, 0))), axis=0)
    return np.asarray(total[width:] - total[:-width])


def _standard_deviation(grid: F64) -> F64:
    """Standard deviation of each column; 0 where it has no value."""
    present = ~np.isnan(grid)
    count = np.maximum(present.sum(axis=0), 1)
    mean = np.where(present, grid, 0.0).sum(axis=0) / count
    return np.asarray(np.sqrt((np.where(present, grid - mean, 0.0) ** 2).sum(axis=0) / count))


def _bartlett_factor(r: F64) -> F64:
    """Bartlett's factor for each column of r[lag, column]: how much correlated neighbors widen the scatter."""
    before_zero = np.logical_and.accumulate(r[1:] > 0, axis=0)
    return np.asarray(1 + 2 * np.sum(np.where(before_zero, r[1:] ** 2, 0.0), axis=0))

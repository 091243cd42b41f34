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

import math
from array import array
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, pairwise
from operator import mul
from statistics import NormalDist
from typing import TYPE_CHECKING

from gputop.core.live_steps import LiveSteps

if TYPE_CHECKING:
    from gputop.telemetry.history import History

Series = list[float]

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
_TAPS = 5  # samples on either side that a value between two samples is computed from
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


def median(values: Sequence[float]) -> float:
    """The median of numbers without NaN."""
    ordered, middle = sorted(values), len(values) // 2
    return ordered[middle] if len(values) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


def reach_s(interval_s: float) -> float:
    """How far back an estimate looks where a sample is taken every ``interval_s``."""
    return max(WINDOW_S, WINDOW_SAMPLES * interval_s)


def estimate_step_period(history: History) -> StepPeriodEstimate:
    """The step period in the newest minutes of ``history``; ``gpus`` index :attr:`History.uuids`."""
    times, _ = history.windows(_SIGNALS[0][0], 60.0)
    interval_s = median(_gaps(times[-32:])) if len(times) > 2 else 1.0
    window_s = reach_s(interval_s)
    first: StepPeriodEstimate | None = None
    for metric, min_deviation in _SIGNALS:
        found = replace(estimate(*history.windows(metric, window_s), min_deviation), metric=metric)
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


def estimate(times_s: Sequence[float], values: Sequence[Sequence[float]],
             min_deviation: float = 0.01) -> StepPeriodEstimate:
    """The period of ``values[gpu][n]`` sampled at the rising ``times_s[n]``; NaN is missing.

    Times may be uneven: only the newest stretch of similar intervals is used. A GPU whose standard deviation
    is below ``min_deviation`` is left out.
    """
    gridded = _grid(times_s, values)
    if gridded is None:
        return StepPeriodEstimate(None, reason="fewer than three samples so far")
    grid, interval_s = gridded
    max_lag = len(grid[0]) // MIN_PERIODS if grid else 0
    seen = StepPeriodEstimate(None, interval_s=interval_s, shortest_s=SAMPLES_PER_PERIOD * interval_s,
                  longest_s=max_lag * interval_s)
    count = max((sum([v == v for v in column]) for column in grid), default=0)
    if not count:
        return replace(seen, reason=UNMEASURED)
    if count < MIN_SAMPLES:
        return replace(seen, reason=f"{count} samples so far, {MIN_SAMPLES} are needed")
    # Saves the correlations where nothing runs.
    if not any(_standard_deviation(column) > 0.5 * min_deviation for column in grid):
        return replace(seen, reason=FLAT)
    short_lag = min(_SHORT_LAG, max_lag)
    short, long = (_normalized(grid, 2 * lag + 1, min_deviation) for lag in (short_lag, max_lag))
    correlations = (_Correlation(short, short_lag, smooth=False), _Correlation(short, short_lag),
                    _Correlation(long, max_lag))
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


def _gaps(times_s: Sequence[float]) -> Series:
    return [after - before for before, after in pairwise(times_s)]


def _grid(times_s: Sequence[float], values: Sequence[Sequence[float]]) -> tuple[list[Series], float] | None:
    """The newest stretch of even sampling on a grid [gpu][slot], NaN where a slot has no sample, and its interval."""
    if len(times_s) < 3:
        return None
    gaps = _gaps(times_s)
    interval_s = median(gaps[-32:])
    if not interval_s > 0:
        return None
    first = next((i for i in range(len(gaps), 0, -1)
                  if not interval_s / _MAX_GAP <= gaps[i - 1] <= _MAX_GAP * interval_s), 0)
    most = min(MAX_SAMPLES, max(WINDOW_SAMPLES, round(WINDOW_S / interval_s)))
    slots = [round((time_s - times_s[-1]) / interval_s) + most - 1 for time_s in times_s[first:]]
    begin = bisect_left(slots, 0)
    slots = [slot - slots[begin] for slot in slots[begin:]]
    grid = []
    for own in values:
        total, hits = [0.0] * (slots[-1] + 1), [0] * (slots[-1] + 1)
        for slot, value in zip(slots, own[first + begin:], strict=True):
            if value == value:
                total[slot] += value
                hits[slot] += 1
        grid.append([one / n if n else math.nan for one, n in zip(total, hits, strict=True)])
    return grid, interval_s


@dataclass(frozen=True, slots=True)
class _Peak:
    lag: float  # samples
    height: float
    confidence: float
    gpus: tuple[int, ...]


class _Correlation:
    """Autocorrelation r[column][lag] of the GPUs that vary, up to ``longest`` samples, at lags of 1/4 sample.

    ``normalized`` is of :func:`_normalized`.
    """

    def __init__(self, normalized: Mapping[int, tuple[Series, list[bool]]], longest: int, smooth: bool = True) -> None:
        self.longest, self.smooth = longest, smooth
        self.gpus = [*normalized]
        self.r: list[Series] = []
        self.noise: list[Series] = []
        self._means: dict[tuple[int, ...], tuple[Series, Series]] = {}
        if not self.gpus:
            return
        quantile = NormalDist().inv_cdf(1 - _FALSE_ALARMS / (longest * len(self.gpus)))
        # Between the samples white noise is correlated.
        white = [max(0.0, _sinc(lag / _LAGS_PER_SAMPLE)) for lag in range((2 * longest + 2) * _LAGS_PER_SAMPLE)]
        for values, present in normalized.values():
            if smooth:
                present = [a and b for a, b in pairwise(present)]
                values = [a + b if known else 0.0 for (a, b), known in zip(pairwise(values), present, strict=True)]
            r, pairs = _autocorrelation(values, present, 2 * longest + 2)
            factor = quantile * math.sqrt(_bartlett_factor(r[::_LAGS_PER_SAMPLE]))
            self.r.append(r)
            self.noise.append([factor / math.sqrt(n) + own for n, own in zip(pairs, white, strict=True)])

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
        height = max(_at(r, lag), 1e-9)
        sure = max(0.0, 1 - (_at(noise, lag) / height) ** 2)
        return _Peak(self._refined_lag(columns, lag), height, sure, tuple(self.gpus[c] for c in columns))

    def _is_fundamental(self, column: int, lag: float) -> bool:
        """Whether a GPU has a peak there and no peak nearly as high before: then it is the GPU's own period too."""
        r, noise = self.r[column], self.noise[column]
        p = round(lag * _LAGS_PER_SAMPLE)
        top = max(r[p - _lag_tolerance(p): p + _lag_tolerance(p) + 1])
        lobe = next((i for i, one in enumerate(r) if one <= 0), 0)  # the end of the peak at lag 0
        before = max(0.0, *r[lobe: round(0.7 * p)], 0.0)  # half and two thirds of the lag, and shorter ones
        return top > noise[p] and before < _min_peak_ratio(lag) * top

    def _mean_of(self, columns: list[int]) -> tuple[Series, Series]:
        key = tuple(columns)
        if key not in self._means:
            r, noise = ([sum(at) / len(key) for at in zip(*(of[c] for c in key), strict=True)]
                        for of in (self.r, self.noise))
            self._means[key] = r, noise
        return self._means[key]

    def _fundamental(self, columns: list[int]) -> float | None:
        """The lag of the first peak about as high as the highest: the later ones are its multiples."""
        r, noise = self._mean_of(columns)
        peaks = []
        lowest = [*accumulate(r, min)]
        # Periods that are too fast are searched as well: otherwise a multiple would be taken for the period.
        for p in range(2 * _LAGS_PER_SAMPLE, self.longest * _LAGS_PER_SAMPLE + 1):
            if not (r[p] > noise[p] and r[p - 1] <= r[p] > r[p + 1]):
                continue
            again = max(r[2 * p - _lag_tolerance(p): 2 * p + _lag_tolerance(p) + 1], default=-1.0)
            if r[p] - lowest[p - 1] > noise[p] and again > 0.5 * noise[p]:
                peaks.append(p)
        highest = max((r[p] for p in peaks), default=0.0)
        return next((p / _LAGS_PER_SAMPLE for p in peaks
                     if r[p] >= _min_peak_ratio(p / _LAGS_PER_SAMPLE) * highest), None)

    def _has_period(self, column: int, own: float | None, lag: float) -> bool:
        """Whether a GPU has this period; a GPU too noisy to have found its ``own`` needs at least a peak there."""
        p = round(lag * _LAGS_PER_SAMPLE)
        if own is not None:
            return abs(own * _LAGS_PER_SAMPLE - p) <= _lag_tolerance(p)
        around = slice(p - _lag_tolerance(p), p + _lag_tolerance(p) + 1)
        r = self.r[column][around]
        return (any(one > 0.5 * noise for one, noise in zip(r, self.noise[column][around], strict=True))
                and 0 < r.index(max(r)) < len(r) - 1)

    def _refined_lag(self, columns: list[int], lag: float) -> float:
        """The period read from the last multiple that stands out: the farther the multiple, the finer the result."""
        r, noise = self._mean_of(columns)
        slack = _lag_tolerance(round(lag * _LAGS_PER_SAMPLE))
        lag = _interpolated_peak(r, round(lag * _LAGS_PER_SAMPLE)) / _LAGS_PER_SAMPLE
        for k in range(2, len(r)):
            p = round(lag * k * _LAGS_PER_SAMPLE)
            if p + slack + 1 >= len(r):
                break
            top = r.index(max(r[p - slack: p + slack + 1]), p - slack)
            if r[top] <= noise[top] or abs(top - p) == slack:
                break
            lag = _interpolated_peak(r, top) / _LAGS_PER_SAMPLE / k
        return lag


def _normalized(grid: Sequence[Series], width: int, min_deviation: float) -> dict[int, tuple[Series, list[bool]]]:
    """The columns that vary, detrended and normalized to the same local deviation: otherwise a pause for an
    evaluation or a checkpoint would count for more than all the steps around it."""
    found = ((gpu, _normalized_column(column, width, min_deviation)) for gpu, column in enumerate(grid))
    return {gpu: normalized for gpu, normalized in found if normalized is not None}


def _normalized_column(column: Series, width: int, min_deviation: float) -> tuple[Series, list[bool]] | None:
    """A column without its trend over ``width`` slots and with the same deviation everywhere, 0 where nothing was
    measured; and where something was. None for a column that hardly changes."""
    present = [v == v for v in column]
    if sum(present) < MIN_SAMPLES:
        return None
    counts = [n or 1 for n in _moving_sum(present, width)]
    sums = _moving_sum([v if v == v else 0.0 for v in column], width)
    detrended = [v - total / n if v == v else 0.0 for v, total, n in zip(column, sums, counts, strict=True)]
    squares = _moving_sum([v * v for v in detrended], width)
    deviation = [math.sqrt(max(0.0, total) / n) for total, n in zip(squares, counts, strict=True)]
    if median([d for d, known in zip(deviation, present, strict=True) if known]) < min_deviation:
        return None
    least = 0.1 * min_deviation
    return [v / (d if d > least else least) for v, d in zip(detrended, deviation, strict=True)], present


def _autocorrelation(values: Series, present: Sequence[bool], lags: int) -> tuple[Series, Series]:
    """r at multiples of 1/4 sample up to ``lags``, and the number of pairs of samples behind each, 1 at least."""
    products = _products(values, lags + _TAPS + 1)
    overlap = ([max(0, len(values) - lag) for lag in range(lags + 1)] if all(present)
               else _products([float(known) for known in present], lags + 1))
    mirrored = products[_TAPS - 1:0:-1] + products  # the lag -j is the lag j
    r, pairs = [], []
    # Band-limited interpolation between the samples: each value is a sum of those around it.
    kernels = [_kernel(part / _LAGS_PER_SAMPLE) for part in range(_LAGS_PER_SAMPLE)]
    for lag in range(lags):
        around, step = mirrored[lag: lag + 2 * _TAPS], (overlap[lag + 1] - overlap[lag]) / _LAGS_PER_SAMPLE
        for part, kernel in enumerate(kernels):
            n = max(1.0, overlap[lag] + part * step)
            r.append((sum(map(mul, around, kernel)) if part else products[lag]) / n)
            pairs.append(n)
    height = max(r[0], 1e-30)
    return [one / height for one in r], pairs


_LEAST_SPREAD = 1e-100  # of values that differ at all: the square of the scale is to be a number


def _products(values: Sequence[float], lags: int) -> Series:
    """sum(values[i] * values[i + lag]) for each lag below ``lags``.

    By one multiplication of two whole numbers of thousands of digits (Kronecker substitution): the values, in fixed
    point, are the digits of one, and backwards those of the other, so that each digit of the product is the sum for one
    lag. Python multiplies such numbers in C by Karatsuba's way: for 1200 samples and 480 lags thirty times as fast as
    loops. The fixed point is as fine as leaves a sum within its 32 bits, a thousandth of the values' range or finer.
    """
    count, lowest = len(values), min(values)
    spread = max(values) - lowest
    scale = (math.sqrt(2**32 / count) - 1) / (spread if spread > _LEAST_SPREAD else 1.0)
    digits = array("I", [round((v - lowest) * scale) for v in values])
    product = int.from_bytes(digits.tobytes(), "little") * int.from_bytes(digits[::-1].tobytes(), "little")
    sums = array("I", product.to_bytes(8 * count, "little"))[count - 1:]
    # The digits are of raised values, because digits are not negative: what that has added is taken out again.
    before = [0, *accumulate(digits)]
    raised, whole, unit = -lowest * scale, before[-1], 1 / (scale * scale)
    out = [(total - raised * (before[count - lag] + whole - before[lag] - (count - lag) * raised)) * unit
           for lag, total in enumerate(sums[:lags])]
    return out + [0.0] * (lags - len(out))


def _sinc(x: float) -> float:
    return math.sin(math.pi * x) / (math.pi * x) if x else 1.0


@lru_cache
def _kernel(part: float) -> Series:
    """The weights of the samples from -TAPS + 1 to TAPS for the value at ``part`` of the way from 0 to 1 (Lanczos)."""
    return [_sinc(part - i) * _sinc((part - i) / _TAPS) for i in range(1 - _TAPS, _TAPS + 1)]


def _at(values: Series, lag: float) -> float:
    """The value at a lag in samples, on the line between its neighbors."""
    place = min(len(values) - 1.0, lag * _LAGS_PER_SAMPLE)
    low = min(int(place), len(values) - 2)
    return values[low] + (place - low) * (values[low + 1] - values[low])


def _min_peak_ratio(lag: float) -> float:
    return next(share for limit, share in _MIN_PEAK_RATIOS if lag < limit)


def _lag_tolerance(p: int) -> int:
    """How far a peak may lie from its expected lag, in lags: jitter, and most of a sample."""
    return max(3 * _LAGS_PER_SAMPLE // 4, round(0.08 * p))


def _interpolated_peak(r: Series, p: int) -> float:
    """The maximum of the parabola through a peak and its neighbors."""
    bend = r[p - 1] - 2 * r[p] + r[p + 1]
    return p + (0.5 * (r[p - 1] - r[p + 1]) / bend if bend < 0 else 0.0)


def _moving_sum(column: Sequence[float], width: int) -> Series:
    """The sum over ``width`` slots around each slot; ``width`` is odd."""
    half = width // 2
    total = [*accumulate(column)]
    total = [0.0] * (half + 1) + total + [total[-1]] * half
    return [after - before for before, after in zip(total, total[width:])]  # noqa: B905  the last have none


def _standard_deviation(column: Series) -> float:
    """Of what was measured; 0 where there is nothing."""
    known = [v for v in column if v == v]
    mean = sum(known) / max(1, len(known))
    return math.sqrt(sum([(v - mean) ** 2 for v in known]) / max(1, len(known)))


def _bartlett_factor(r: Sequence[float]) -> float:
    """Bartlett's factor of r[lag]: how much correlated neighbors widen the scatter."""
    total = 1.0
    for one in r[1:]:
        if one <= 0:
            break
        total += 2 * one * one
    return total

"""Autocorrelation of unevenly sampled signals with gaps, and the period that most of them share by its peaks. In pure
Python: the monitor does without NumPy.

1. :func:`even_samples`: put the newest stretch of similar intervals on an even grid of slots.
2. :func:`normalize`: take the trend out of a column, and give it the same local deviation everywhere: otherwise a pause
   for an evaluation or a checkpoint would count for more than all the steps around it.
3. :func:`correlogram`: correlate it with itself at each lag, between the samples too (:func:`autocorrelation`).
4. Say how high noise would rise at each lag. The autocorrelation of N samples of noise scatters by
   sqrt((1 + 2 sum r_j^2) / N): Bartlett (1946, J. R. Stat. Soc. Suppl. 8, 27-41). The sum ends at the first zero of r,
   because a period must not count as noise. The quantile is for all lags and GPUs together.
5. A peak is a lag at which r is a maximum above the noise, rises by more than the noise from the lowest point before
   it, and comes again at twice the lag.
6. The fundamental is the first peak about as high as the highest: later ones are its multiples. How high that is
   depends on the lag (:func:`min_peak_ratio`).
7. If each GPU has a peak at the fundamental of the GPUs' mean, and none nearly as high before it, that is the period of
   all.
8. Else each GPU has its own fundamental. Each of these, and that of the mean, is tried: the GPUs that have it are its
   group, and the group's mean tells the lag. The largest group wins, of equal ones that with the higher peak.
9. The lag is read from the last multiple that stands out: the farther the multiple, the finer the result.

Lags are in samples. An index into a correlogram is a lag in quarters of a sample.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from statistics import NormalDist, median
from typing import NamedTuple

from msgspec import Struct

Series = list[float]

LAGS_PER_SAMPLE = 4  # a period need not be a whole number of samples
MIN_SAMPLES = 32
WINDOW_SAMPLES, WINDOW_S, MAX_SAMPLES = 300, 120.0, 1200  # the window is the longer of the first two
_FALSE_ALARMS = 0.001  # probability that the highest peak of a window of noise passes (normal distribution)
_TAPS = 5  # samples on either side that a value between two samples is computed from
_MAX_GAP = 4.0  # intervals: samples before a longer gap are ignored
_NEWEST = 32  # samples, or gaps between them, that tell the interval
_MIN_RELATIVE_DEVIATION = 0.1  # factor of the least deviation of a column that varies: it is divided by no less
_MIN_SPREAD = 1e-100  # of values that differ at all: the square of the scale is to be a number


class EvenSamples(NamedTuple):
    """Samples ``interval_s`` apart: ``columns[gpu][slot]``, NaN where a slot has none."""

    columns: list[Series]
    interval_s: float


class Signal(NamedTuple):
    """A normalized column: 0 in slots where nothing was measured (``present`` is False)."""

    values: Series
    present: list[bool]


class Correlogram(NamedTuple):
    """Autocorrelation ``r`` at lags of 1/4 sample, and at each the height that noise hardly exceeds."""

    r: Series
    noise: Series


def standard_deviation(column: Series) -> float:
    """The standard deviation of what was measured; 0 where there is nothing."""
    measured = [v for v in column if v == v]
    mean = sum(measured) / max(1, len(measured))
    return math.sqrt(sum([(v - mean) ** 2 for v in measured]) / max(1, len(measured)))


def sampling_interval_s(times_s: Sequence[float]) -> float:
    """The usual interval between the newest of these samples, of three or more."""
    return median(_gaps(times_s[-_NEWEST:]))


# -- an even grid (1) -----------------------------------------------------------------------------------


def even_samples(times_s: Sequence[float], values: Sequence[Sequence[float]]) -> EvenSamples | None:
    """The newest stretch of ``values[gpu][n]``, sampled at the rising ``times_s[n]``, on a grid; None for fewer than
    three samples. A slot has the mean of its samples."""
    if len(times_s) < 3:
        return None
    gaps = _gaps(times_s)
    interval_s = median(gaps[-_NEWEST:])
    if not interval_s > 0:
        return None
    first = next((i for i in range(len(gaps), 0, -1)
                  if not interval_s / _MAX_GAP <= gaps[i - 1] <= _MAX_GAP * interval_s), 0)
    most = min(MAX_SAMPLES, max(WINDOW_SAMPLES, round(WINDOW_S / interval_s)))
    slots = [round((time_s - times_s[-1]) / interval_s) + most - 1 for time_s in times_s[first:]]
    begin = bisect_left(slots, 0)
    slots = [slot - slots[begin] for slot in slots[begin:]]
    return EvenSamples([_slot_means(slots, column[first + begin:]) for column in values], interval_s)


def _slot_means(slots: Sequence[int], values: Sequence[float]) -> Series:
    total, hits = [0.0] * (slots[-1] + 1), [0] * (slots[-1] + 1)
    for slot, value in zip(slots, values, strict=True):
        if value == value:
            total[slot] += value
            hits[slot] += 1
    return [t / n if n else math.nan for t, n in zip(total, hits, strict=True)]


def _gaps(times_s: Sequence[float]) -> Series:
    return [after - before for before, after in pairwise(times_s)]


# -- the same deviation everywhere (2) ------------------------------------------------------------------


def normalize(column: Series, width: int, min_deviation: float) -> Signal | None:
    """A column without its trend over ``width`` slots (odd) and with the same deviation everywhere; None for one that
    hardly changes, or has few samples."""
    present = [v == v for v in column]
    if sum(present) < MIN_SAMPLES:
        return None
    counts = [n or 1 for n in _moving_sum(present, width)]
    sums = _moving_sum([v if v == v else 0.0 for v in column], width)
    detrended = [v - total / n if v == v else 0.0 for v, total, n in zip(column, sums, counts, strict=True)]
    squares = _moving_sum([v * v for v in detrended], width)
    deviation = [math.sqrt(max(0.0, total) / n) for total, n in zip(squares, counts, strict=True)]
    if median([d for d, measured in zip(deviation, present, strict=True) if measured]) < min_deviation:
        return None
    least = _MIN_RELATIVE_DEVIATION * min_deviation
    return Signal([v / (d if d > least else least) for v, d in zip(detrended, deviation, strict=True)], present)


def _moving_sum(column: Sequence[float], width: int) -> Series:
    """The sum over ``width`` slots around each slot; ``width`` is odd."""
    half = width // 2
    total = [*accumulate(column)]
    total = [0.0] * (half + 1) + total + [total[-1]] * half
    return [after - before for before, after in zip(total, total[width:])]  # noqa: B905  the last have none


# -- correlation and noise (3, 4) -----------------------------------------------------------------------


def correlograms(signals: Sequence[Signal], longest: int, *, smooth: bool) -> list[Correlogram]:
    """The correlogram of each signal up to twice ``longest`` samples; ``smooth``: of the means of two neighbors."""
    if not signals:
        return []
    quantile = NormalDist().inv_cdf(1 - _FALSE_ALARMS / (longest * len(signals)))
    lags = 2 * longest + 2
    # Between the samples white noise is correlated.
    white = [max(0.0, _sinc(lag / LAGS_PER_SAMPLE)) for lag in range(lags * LAGS_PER_SAMPLE)]
    out = []
    for signal in signals:
        r, pairs = autocorrelation(_smoothed(signal) if smooth else signal, lags)
        factor = quantile * math.sqrt(_bartlett_factor(r[::LAGS_PER_SAMPLE]))
        out.append(Correlogram(r, [factor / math.sqrt(n) + w for n, w in zip(pairs, white, strict=True)]))
    return out


def mean_correlogram(of: Sequence[Correlogram]) -> Correlogram:
    return of[0] if len(of) == 1 else Correlogram(_means([c.r for c in of]), _means([c.noise for c in of]))


def _means(columns: Sequence[Series]) -> Series:
    count = len(columns)
    return [sum(row) / count for row in zip(*columns, strict=True)]


def _smoothed(signal: Signal) -> Signal:
    """The sums of two neighbors: their scale does not count."""
    present = [a and b for a, b in pairwise(signal.present)]
    return Signal([a + b if both else 0.0 for (a, b), both in zip(pairwise(signal.values), present, strict=True)],
                  present)


def autocorrelation(signal: Signal, lags: int) -> tuple[Series, Series]:
    """r at multiples of 1/4 sample up to ``lags``, and the number of pairs of samples behind each, 1 at least."""
    values, present = signal
    products = lagged_products(values, lags + _TAPS + 1)
    overlap = ([max(0, len(values) - lag) for lag in range(lags + 1)] if all(present)
               else lagged_products([float(measured) for measured in present], lags + 1))
    mirrored = products[_TAPS - 1:0:-1] + products  # the lag -j is the lag j
    r, pairs = [], []
    # Band-limited interpolation between the samples: each value is a sum of those around it.
    between = [_weighted_sums(mirrored, _kernel(part / LAGS_PER_SAMPLE), lags) for part in range(1, LAGS_PER_SAMPLE)]
    for lag, sums in enumerate(zip(products[:lags], *between, strict=True)):
        step = (overlap[lag + 1] - overlap[lag]) / LAGS_PER_SAMPLE
        for part, total in enumerate(sums):
            n = overlap[lag] + part * step
            if n < 1:
                n = 1.0
            r.append(total / n)
            pairs.append(n)
    height = max(r[0], 1e-30)
    return [value / height for value in r], pairs


def _weighted_sums(values: Series, weights: Series, count: int) -> Series:
    """The weighted sums of the values from each of the first ``count`` on, as many as there are weights.

    Written out for the ten weights of :func:`_kernel`: it takes two fifths of the time of a loop over them.
    """
    w0, w1, w2, w3, w4, w5, w6, w7, w8, w9 = weights
    from_each = [values[first: first + count] for first in range(2 * _TAPS)]
    return [a * w0 + b * w1 + c * w2 + d * w3 + e * w4 + f * w5 + g * w6 + h * w7 + i * w8 + j * w9
            for a, b, c, d, e, f, g, h, i, j in zip(*from_each, strict=True)]


def lagged_products(values: Sequence[float], lags: int) -> Series:
    """sum(values[i] * values[i + lag]) for each lag below ``lags``.

    By one multiplication of two whole numbers of thousands of digits (Kronecker substitution): the values, in fixed
    point, are the digits of one, and backwards those of the other, so that each digit of the product is the sum for one
    lag. Python multiplies such numbers in C by Karatsuba's way: for 1200 samples and 480 lags thirty times as fast as
    loops. The fixed point is as fine as leaves a sum within its 32 bits, a thousandth of the values' range or finer.
    """
    count, lowest = len(values), min(values)
    spread = max(values) - lowest
    scale = (math.sqrt(2**32 / count) - 1) / (spread if spread > _MIN_SPREAD else 1.0)
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


def _bartlett_factor(r: Sequence[float]) -> float:
    """Bartlett's factor of r[lag]: how much correlated neighbors widen the scatter."""
    total = 1.0
    for value in r[1:]:
        if value <= 0:
            break
        total += 2 * value * value
    return total


# -- the peaks (5 to 9) -----------------------------------------------------------------------------

# Pairs (lag in samples below, share of the highest peak): the first peak of that share is the fundamental. Sampling
# lowers the peaks of short lags most. All limits here are gputop's own figures; tests/telemetry/test_step_period.py
# tries them on simulated signals.
_MIN_PEAK_RATIOS = ((4.0, 0.55), (6.0, 0.75), (float("inf"), 0.85))
_JITTER = 0.08  # share of a lag by which a peak may be off it
# Height, in units of the noise, of the peak at twice the lag, or of a GPU too noisy for a fundamental of its own.
_MIN_MULTIPLE = 0.5
_SHORTER = 0.7  # factor of a lag, and less: half and two thirds of it
_MIN_HEIGHT = 1e-9  # so that the confidence of a peak at no height is a number


class SharedPeak(Struct, frozen=True):
    """A period of ``lag`` samples that ``gpus`` share, the height of its peak, and how sure it is (0 to 1)."""

    lag: float
    height: float
    confidence: float
    gpus: tuple[int, ...]


def shared_peak(correlograms: Mapping[int, Correlogram], longest: int) -> SharedPeak | None:
    """The peak of the period that most GPUs share, by GPU their correlograms; None where none has a period of up to
    ``longest`` samples."""
    if not correlograms:
        return None
    mean = mean_correlogram([*correlograms.values()])
    common = fundamental_lag(mean, longest)
    if common is not None and all(_is_fundamental(c, common) for c in correlograms.values()):
        return _peak((*correlograms,), mean, common)
    fundamentals = {gpu: fundamental_lag(c, longest) for gpu, c in correlograms.items()}
    peaks = []
    for lag in sorted(lag for lag in {common, *fundamentals.values()} if lag is not None):
        group = {gpu: c for gpu, c in correlograms.items() if _has_period(c, fundamentals[gpu], lag)}
        if group:
            mean = mean_correlogram([*group.values()])
            peaks.append(_peak((*group,), mean, fundamental_lag(mean, longest) or lag))
    return max(peaks, key=lambda peak: (len(peak.gpus), peak.height), default=None)


def min_peak_ratio(lag: float) -> float:
    """Least height of a peak at this lag to be the fundamental, as a share of the highest."""
    return next(share for limit, share in _MIN_PEAK_RATIOS if lag < limit)


def fundamental_lag(correlogram: Correlogram, longest: int) -> float | None:
    """The lag of the first peak about as high as the highest (5, 6); None where there is no peak."""
    r, noise = correlogram
    lowest = [*accumulate(r, min)]
    peaks = []
    # Periods that are too fast are searched as well: otherwise a multiple would be taken for the period.
    for p in range(2 * LAGS_PER_SAMPLE, longest * LAGS_PER_SAMPLE + 1):
        if r[p] > noise[p] and r[p - 1] <= r[p] > r[p + 1]:
            twice = max(r[2 * p - _tolerance(p): 2 * p + _tolerance(p) + 1], default=-1.0)
            if r[p] - lowest[p - 1] > noise[p] and twice > _MIN_MULTIPLE * noise[p]:
                peaks.append(p)
    highest = max((r[p] for p in peaks), default=0.0)
    lags = ((p, p / LAGS_PER_SAMPLE) for p in peaks)
    return next((lag for p, lag in lags if r[p] >= min_peak_ratio(lag) * highest), None)


def _is_fundamental(correlogram: Correlogram, lag: float) -> bool:
    """Return whether a GPU has a peak there and no peak nearly as high before: then it is the GPU's own period too
    (7)."""
    r, noise = correlogram
    p = round(lag * LAGS_PER_SAMPLE)
    top = max(r[p - _tolerance(p): p + _tolerance(p) + 1])
    lobe = next((i for i, height in enumerate(r) if height <= 0), 0)  # the end of the peak at lag 0
    before = max(0.0, *r[lobe: round(_SHORTER * p)], 0.0)
    return top > noise[p] and before < min_peak_ratio(lag) * top


def _has_period(correlogram: Correlogram, fundamental: float | None, lag: float) -> bool:
    """Return whether a GPU of this ``fundamental`` has the period of a group (8); one too noisy for a fundamental needs
    at least a peak there."""
    p = round(lag * LAGS_PER_SAMPLE)
    if fundamental is not None:
        return abs(fundamental * LAGS_PER_SAMPLE - p) <= _tolerance(p)
    around = slice(p - _tolerance(p), p + _tolerance(p) + 1)
    r, noise = correlogram.r[around], correlogram.noise[around]
    return (any(height > _MIN_MULTIPLE * n for height, n in zip(r, noise, strict=True))
            and 0 < r.index(max(r)) < len(r) - 1)


def _peak(gpus: tuple[int, ...], mean: Correlogram, lag: float) -> SharedPeak:
    height = max(_value_at(mean.r, lag), _MIN_HEIGHT)
    return SharedPeak(_refined_lag(mean, lag), height, max(0.0, 1 - (_value_at(mean.noise, lag) / height) ** 2), gpus)


def _refined_lag(correlogram: Correlogram, lag: float) -> float:
    """The lag by the last of its multiples that stands out (9)."""
    r, noise = correlogram
    slack = _tolerance(round(lag * LAGS_PER_SAMPLE))
    refined = _interpolated_peak(r, round(lag * LAGS_PER_SAMPLE)) / LAGS_PER_SAMPLE
    for k in range(2, len(r)):
        p = round(refined * k * LAGS_PER_SAMPLE)
        if p + slack + 1 >= len(r):
            break
        top = r.index(max(r[p - slack: p + slack + 1]), p - slack)
        if r[top] <= noise[top] or abs(top - p) == slack:
            break
        refined = _interpolated_peak(r, top) / LAGS_PER_SAMPLE / k
    return refined


def _interpolated_peak(r: Series, p: int) -> float:
    """The maximum of the parabola through a peak and its neighbors."""
    bend = r[p - 1] - 2 * r[p] + r[p + 1]
    return p + (0.5 * (r[p - 1] - r[p + 1]) / bend if bend < 0 else 0.0)


def _value_at(values: Series, lag: float) -> float:
    """The value at a lag in samples, on the line between its neighbors."""
    position = min(len(values) - 1.0, lag * LAGS_PER_SAMPLE)
    low = min(int(position), len(values) - 2)
    return values[low] + (position - low) * (values[low + 1] - values[low])


def _tolerance(p: int) -> int:
    """Distance that a peak may lie from its expected lag, in quarters of a sample: jitter, and most of a sample."""
    return max(3 * LAGS_PER_SAMPLE // 4, round(_JITTER * p))

"""The period that most GPUs share, by the peaks of their autocorrelation.

1. A peak is a lag at which r is a maximum above the noise, rises by more than the noise from the lowest point before
   it, and comes again at twice the lag.
2. The fundamental is the first peak about as high as the highest: later ones are its multiples. How high that is
   depends on the lag (:func:`min_peak_ratio`).
3. If each GPU has a peak at the fundamental of the GPUs' mean, and none nearly as high before it, that is the period of
   all.
4. Else each GPU has its own fundamental. Each of these, and that of the mean, is tried: the GPUs that have it are its
   group, and the group's mean tells the lag. The largest group wins, of equal ones that with the higher peak.
5. The lag is read from the last multiple that stands out: the farther the multiple, the finer the result.

Lags are in samples. An index into a correlogram is a lag in quarters of a sample.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate

from msgspec import Struct

from gputop.telemetry.autocorrelation import LAGS_PER_SAMPLE, Correlogram, Series, mean_correlogram

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
    """The lag of the first peak about as high as the highest (1, 2); None where there is no peak."""
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
    (3)."""
    r, noise = correlogram
    p = round(lag * LAGS_PER_SAMPLE)
    top = max(r[p - _tolerance(p): p + _tolerance(p) + 1])
    lobe = next((i for i, height in enumerate(r) if height <= 0), 0)  # the end of the peak at lag 0
    before = max(0.0, *r[lobe: round(_SHORTER * p)], 0.0)
    return top > noise[p] and before < min_peak_ratio(lag) * top


def _has_period(correlogram: Correlogram, fundamental: float | None, lag: float) -> bool:
    """Return whether a GPU of this ``fundamental`` has the period of a group (4); one too noisy for a fundamental needs
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
    """The lag by the last of its multiples that stands out (5)."""
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

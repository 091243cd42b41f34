"""The period of the training step, estimated from the live figures alone: nothing is attached to the job.

A job that repeats one step produces a signal that resembles itself one step later, and two and three steps later. So
the autocorrelation of the samples has a peak at the period, and it is the first of the peaks. The result is an estimate
and is called so.

1. Take the newest minutes of a metric, of the first in ``_SIGNALS`` that shows a period, as even samples.
2. Abstain if nothing was measured, too little, or nothing that varies.
3. Correlate the columns that vary with themselves (:mod:`gputop.telemetry.autocorrelation`), in three ways
   (``_Search``): short lags by the samples, short lags by means of two neighbors, and long lags by these.
4. Find in each the period that most GPUs share (:mod:`gputop.telemetry.autocorrelation`).
5. Of those that most GPUs share take the first that is about as high as the highest.
6. Abstain if it hardly stands out from noise, or is too short for these samples.

Limits of sampling: a reading every T seconds says nothing about periods below 2 T (Nyquist), and next to nothing below
2.5 T. Worse, a shorter step does not vanish: sampled every T seconds it can look like a longer one (an alias). Readings
that are means over T, as SM active is, damp the alias, to a half at 1.7 samples per step and further below, but do not
remove it. Only another interval shows which it is: a true period stays, an alias moves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

from gputop.core.captured_samples import SURE, LiveSteps
from gputop.telemetry.autocorrelation import (
    MIN_SAMPLES,
    WINDOW_S,
    WINDOW_SAMPLES,
    EvenSamples,
    SharedPeak,
    Signal,
    correlograms,
    even_samples,
    min_peak_ratio,
    normalize,
    sampling_interval_s,
    shared_peak,
    standard_deviation,
)

if TYPE_CHECKING:
    from gputop.telemetry.history import History

SAMPLES_PER_PERIOD = 2.5  # at least: Nyquist needs more than 2, and the peak must be separate from lag 0
MIN_PERIODS = 5  # repetitions in the window
FLAT = "flat: the signal hardly changes"
UNMEASURED = "nothing was measured"
TOO_FAST = "too fast: the signal repeats within 2.5 samples"
INTERVALS_S = (10.0, 5.0, 2.0, 1.0, 0.5, 0.2, 0.1)  # what the monitor offers

MIN_CONFIDENCE = 0.4  # below it no period is reported: hardly above noise, mostly a broad alias
_SHORT_LAG = 20  # samples: longest lag of the first two searches; the third uses all that the window allows
_NARROW = 0.5  # factor of the least deviation: a column with less hardly changes anywhere

# The metrics tried, in this order, and the standard deviation below which each counts as flat.
_SIGNALS = (("sm_active", 0.01), ("power_w", 5.0), ("gpu_util", 0.01))
# A stretch of live_steps: as long as a period takes to be sure (measured: 14 periods, 100 samples).
_MIN_STRETCH_S, _STRETCH_PERIODS, _STRETCH_SAMPLES, _STRETCHES = 30.0, 15, 100, 10


class _Search(Struct, frozen=True):
    """One way to correlate the samples: up to short lags or to all, in means of two neighbors (``smooth``) or in the
    samples themselves, for periods below ``below`` samples."""

    short: bool
    smooth: bool
    below: float


# Short parts of a step, such as the gap between two steps, are aliased where steps have few samples; they lower every
# peak that falls between two samples. The mean of two neighbors removes most of that, but below three samples per step
# it removes the step itself as well.
_SEARCHES = (_Search(short=True, smooth=False, below=3.0), _Search(short=True, smooth=True, below=float("inf")),
             _Search(short=False, smooth=True, below=float("inf")))


class StepPeriodEstimate(Struct, frozen=True):
    """An estimated period, or why there is none: ``period_s`` and ``reason`` are never both set.

    ``confidence`` (0-1) is 1 - (n / p)^2, where p is the height of the peak in the autocorrelation and n the
    height that noise in a window of this length exceeds once in a thousand times: 0 means no better than
    noise, 1 the same shape each time in a long window.

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


def reach_s(interval_s: float) -> float:
    """Seconds that an estimate looks back where a sample is taken every ``interval_s``."""
    return max(WINDOW_S, WINDOW_SAMPLES * interval_s)


def estimate_step_period(history: History) -> StepPeriodEstimate:
    """The step period in the newest minutes of ``history`` (1); ``gpus`` index :attr:`History.uuids`."""
    times, _ = history.windows(_SIGNALS[0][0], 60.0)
    window_s = reach_s(sampling_interval_s(times) if len(times) > 2 else 1.0)
    without = []
    for metric, min_deviation in _SIGNALS:
        result = replace(estimate(*history.windows(metric, window_s), min_deviation), metric=metric)
        # A step too fast for this metric would be shown by another one as an alias.
        if result.period_s is not None or result.reason == TOO_FAST:
            return result
        without.append(result)
    return next((result for result in without if result.reason != UNMEASURED), without[-1])


def live_steps(history: History) -> LiveSteps | None:
    """The step period in each of the last minutes of ``history``; None where none stands out."""
    newest = estimate_step_period(history)
    end_s = history.newest_s
    if newest.period_s is None or newest.interval_s is None or end_s is None:
        return None
    stretch_s = max(_MIN_STRETCH_S, _STRETCH_PERIODS * newest.period_s, _STRETCH_SAMPLES * newest.interval_s)
    stretches = [estimate(*history.windows(newest.metric, stretch_s, end_s=end_s - i * stretch_s))
                 for i in reversed(range(_STRETCHES))]
    sure = [(stretch.period_s, stretch.confidence) for stretch in stretches
            if stretch.period_s is not None and stretch.confidence >= SURE]
    if not sure:
        return None
    return LiveSteps(tuple(period_s for period_s, _ in sure), min(confidence for _, confidence in sure), stretch_s,
                     newest.interval_s)


def estimate(times_s: Sequence[float], values: Sequence[Sequence[float]],
             min_deviation: float = 0.01) -> StepPeriodEstimate:
    """The period of ``values[gpu][n]`` sampled at the rising ``times_s[n]`` (2 to 6); NaN is missing.

    Times may be uneven: only the newest stretch of similar intervals is used. A GPU whose standard deviation
    is below ``min_deviation`` is left out.
    """
    samples = even_samples(times_s, values)
    if samples is None:
        return StepPeriodEstimate(None, reason="fewer than three samples so far")
    columns, interval_s = samples
    max_lag = len(columns[0]) // MIN_PERIODS if columns else 0
    none = StepPeriodEstimate(None, interval_s=interval_s, shortest_s=SAMPLES_PER_PERIOD * interval_s,
                              longest_s=max_lag * interval_s)
    reason = _unusable(samples, min_deviation)
    if reason is not None:
        return replace(none, reason=reason)
    short_lag = min(_SHORT_LAG, max_lag)
    short, long = ({gpu: signal for gpu, column in enumerate(samples.columns)
                    if (signal := normalize(column, 2 * lag + 1, min_deviation)) is not None}
                   for lag in (short_lag, max_lag))
    if not short and not long:
        return replace(none, reason=FLAT)
    peaks = [peak for search in _SEARCHES
             if (peak := _search(search, *(short, short_lag) if search.short else (long, max_lag))) is not None]
    if not peaks:
        return replace(none, reason="nothing repeats")
    most_gpus = max(len(peak.gpus) for peak in peaks)
    shared = [peak for peak in peaks if len(peak.gpus) == most_gpus]
    highest = max(peak.height for peak in shared)
    best = next(peak for peak in shared if peak.height >= min_peak_ratio(peak.lag) * highest)  # (5)
    if best.confidence < MIN_CONFIDENCE:
        return replace(none, reason="the repetition barely stands out from the noise")
    if best.lag < SAMPLES_PER_PERIOD:
        return replace(none, reason=TOO_FAST)
    return replace(none, period_s=best.lag * interval_s, confidence=best.confidence, gpus=best.gpus,
                   varying_gpus=max(len(short), len(long)))


def _unusable(samples: EvenSamples, min_deviation: float) -> str | None:
    """Reason why these samples show no period (2); None where they may. It saves the correlations where nothing
    runs."""
    count = max((sum([v == v for v in column]) for column in samples.columns), default=0)
    if not count:
        return UNMEASURED
    if count < MIN_SAMPLES:
        return f"{count} of {MIN_SAMPLES} required samples so far"
    varies = any(standard_deviation(column) > _NARROW * min_deviation for column in samples.columns)
    return None if varies else FLAT


def _search(search: _Search, signals: Mapping[int, Signal], longest: int) -> SharedPeak | None:
    """The peak of the period that most GPUs share by one way to correlate (3, 4), if it is in its range."""
    by_gpu = dict(zip(signals, correlograms([*signals.values()], longest, smooth=search.smooth), strict=True))
    peak = shared_peak(by_gpu, longest)
    return peak if peak is not None and peak.lag < search.below else None

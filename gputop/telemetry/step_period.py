"""The period of the training step, estimated from the live figures alone: nothing is attached to the job.

A job that repeats one step leaves a signal that is like itself one step later. So the
autocorrelation of the samples has a peak at the period, its first: one step later it looks the
same, and so it does two and three steps later. What is found is an estimate and is called so.

What sampling cannot show. A reading every T seconds says nothing of periods under 2 T (Nyquist),
and next to nothing under 2.5 T. Worse, a shorter step does not vanish: seen every T seconds it can
look like a longer one (an alias). Readings that are means over T, as SM active is, damp it, to a half
at 1.7 samples a step and further below, but do not remove it. Only another interval tells: a true
period stays, an alias moves.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from gputop.telemetry.history import History

F64 = npt.NDArray[np.float64]

SAMPLES_PER_PERIOD = 2.5  # at least: Nyquist asks for more than 2, and the peak must stand free of lag 0
MIN_SAMPLES = 32
MIN_PERIODS = 5  # in the window: so often must it have come back
WINDOW_SAMPLES, WINDOW_S, MAX_SAMPLES = 300, 120.0, 1200  # the longer of the first two is looked at
FLAT = "flat: it hardly changes"
UNMEASURED = "nothing was measured"
TOO_FAST = "too fast: it repeats within 2.5 samples"
INTERVALS_S = (10.0, 5.0, 2.0, 1.0, 0.5, 0.2, 0.1)  # what the monitor offers

MIN_CONFIDENCE = 0.4  # under it nothing is said: not much above noise, a broad alias mostly
_FAST = 20  # samples: how far the first look goes; the second goes as far as the window allows
_FALSE_ALARMS = 0.001  # of a window of noise: how likely its highest peak may pass, by the normal distribution
_FINE = 4  # lags per sample: a period need not be whole samples
# What is short in a step, as the gap between two, is aliased if steps have few samples, and lowers every peak that
# falls between two samples. Means of neighbours free the signal of most of it, but under three samples a step of
# the step itself as well.
_RAW = 3.0  # samples: shorter periods are looked for in the samples themselves, longer ones in means of two
# Of the highest peak: the first one this high is the fundamental, later ones its multiples; by its lag in samples.
_AS_HIGH = ((4.0, 0.55), (6.0, 0.75), (float("inf"), 0.85))
_GAP = 4.0  # intervals without a sample after which what came before is not looked at

# What is looked at, in this order, and how much it must swing (standard deviation) not to count as flat.
_SIGNALS = (("sm_active", 0.01), ("power_w", 5.0), ("gpu_util", 0.01))


@dataclass(frozen=True, slots=True)
class StepPeriodEstimate:
    """An estimated period, or why there is none: ``period_s`` and ``reason`` are never both set.

    ``confidence`` (0-1) is 1 - (n / p)^2, where p is the height of the peak in the autocorrelation and
    n the height that noise in a window of this length stays below but once in a thousand times: 0 is as
    good as noise, 1 the same shape each time in a long window. n follows Bartlett (1946, J. R. Stat. Soc.
    Suppl. 8, 27-41): the autocorrelation of N samples scatters by sqrt((1 + 2 sum r_j^2) / N). The sum
    goes to the first zero of r, as the rhythm itself is not to count as noise, and the quantile is for all
    lags looked at together.

    ``metric`` is what it was found in; ``gpus`` are columns of the values that share it, of ``varying_gpus`` ones
    that are not flat. Periods from ``shortest_s`` to ``longest_s`` could have been seen, in samples
    ``interval_s`` apart.
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


def interval_for(step_s: float) -> float | None:
    """The longest interval between samples at which a step of ``step_s`` can be seen; None: at none."""
    return next((i for i in INTERVALS_S if i * SAMPLES_PER_PERIOD <= step_s), None)


def steps_in(step_period: StepPeriodEstimate, step_s: float) -> int | None:
    """How many steps of ``step_s`` (a trace's) make one period; None where it is no whole number of them."""
    if step_period.period_s is None:
        return None
    count = step_period.period_s / step_s
    # Up to here a period that is 1 % off still tells one number from the next.
    whole = round(count)
    return whole if 1 <= whole <= 16 and abs(count - whole) <= 0.1 else None


def too_short(step_s: float, interval_s: float) -> bool:
    """Whether samples ``interval_s`` apart cannot show steps of ``step_s`` but as an alias."""
    return step_s < 2 * interval_s


def estimate_step_period(history: History) -> StepPeriodEstimate:
    """The rhythm of the newest minutes of ``history``; ``gpus`` index :attr:`History.uuids`."""
    times, _ = history.windows(_SIGNALS[0][0], 60.0)
    interval_s = float(np.median(np.diff(times[-32:]))) if len(times) > 2 else 1.0
    reach_s = max(WINDOW_S, WINDOW_SAMPLES * interval_s)
    first: StepPeriodEstimate | None = None
    for metric, swing in _SIGNALS:
        found = replace(estimate(*history.windows(metric, reach_s), swing), metric=metric)
        if found.period_s is not None or found.reason == TOO_FAST:
            return found  # where it is too fast for this one, another would show its alias
        if first is None and found.reason != UNMEASURED:
            first = found
    return first or found


def estimate(times_s: F64, values: npt.NDArray[np.floating], swing: float = 0.01) -> StepPeriodEstimate:
    """The period of ``values[n, gpu]`` sampled at ``times_s[n]``, which rise; NaN is missing.

    Times may be uneven: what counts is the newest stretch in which the intervals are alike. A GPU whose
    values swing by less than ``swing`` (standard deviation) is left out.
    """
    gridded = _grid(np.asarray(times_s, np.float64), np.asarray(values, np.float64))
    if gridded is None:
        return StepPeriodEstimate(None, reason="too short: hardly a sample")
    grid, interval_s = gridded
    furthest = len(grid) // MIN_PERIODS
    seen = StepPeriodEstimate(None, interval_s=interval_s, shortest_s=SAMPLES_PER_PERIOD * interval_s,
                  longest_s=furthest * interval_s)
    count = int((~np.isnan(grid)).sum(axis=0).max(initial=0))
    if not count:
        return replace(seen, reason=UNMEASURED)
    if count < MIN_SAMPLES:
        return replace(seen, reason=f"too short: {count} samples, {MIN_SAMPLES} are needed")
    if not (_deviation(grid) > 0.5 * swing).any():  # spares what follows where nothing runs
        return replace(seen, reason=FLAT)
    near = min(_FAST, furthest)
    looks = (_Correlation(grid, near, swing, smooth=False), _Correlation(grid, near, swing),
             _Correlation(grid, furthest, swing))
    if not any(look.gpus for look in looks):
        return replace(seen, reason=FLAT)
    peaks = [peak for look in looks if (peak := look.best()) is not None and (look.smooth or peak.lag < _RAW)]
    if not peaks:
        return replace(seen, reason="nothing repeats")
    shared = max(len(p.gpus) for p in peaks)
    highest = max(p.height for p in peaks if len(p.gpus) == shared)
    best = next(p for p in peaks if len(p.gpus) == shared and p.height >= _as_high(p.lag) * highest)
    if best.confidence < MIN_CONFIDENCE:
        return replace(seen, reason="what repeats hardly stands out from noise")
    if best.lag < SAMPLES_PER_PERIOD:
        return replace(seen, reason=TOO_FAST)
    return replace(seen, period_s=best.lag * interval_s, confidence=best.confidence, gpus=best.gpus,
                   varying_gpus=max(len(look.gpus) for look in looks))


def _grid(times_s: F64, values: F64) -> tuple[F64, float] | None:
    """The newest stretch of even sampling on a grid [slot, gpu], NaN where a slot has no sample, and its interval."""
    if len(times_s) < 3:
        return None
    gaps = np.diff(times_s)
    interval_s = float(np.median(gaps[-32:]))
    if not interval_s > 0:
        return None
    odd = np.flatnonzero((gaps > _GAP * interval_s) | (gaps < interval_s / _GAP))
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
    """Autocorrelation r[lag, column] of the GPUs that swing, up to ``longest`` samples, at lags of 1/4 sample.

    Before, each column is freed of its slow changes and brought to the same swing everywhere: a pause
    for an evaluation or a checkpoint would otherwise count for more than all the steps around it.
    """

    def __init__(self, grid: F64, longest: int, swing: float, smooth: bool = True) -> None:
        there = ~np.isnan(grid)
        width = 2 * longest + 1
        slow = _moving(np.where(there, grid, 0.0), width) / np.maximum(_moving(there, width), 1.0)
        quick = np.where(there, grid - slow, 0.0)
        size = np.sqrt(_moving(quick**2, width) / np.maximum(_moving(there, width), 1.0))
        self.gpus = [g for g in range(grid.shape[1])
                     if there[:, g].sum() >= MIN_SAMPLES and np.median(size[there[:, g], g]) >= swing]
        self.longest, self.smooth = longest, smooth
        if not self.gpus:
            return
        even = (quick / np.maximum(size, 0.1 * swing))[:, self.gpus]
        there = there[:, self.gpus]
        if smooth:
            there = there[1:] & there[:-1]
            even = np.where(there, even[1:] + even[:-1], 0.0)
        self.r, pairs = _autocorrelation(even, there, 2 * longest + 2)
        self.lags = np.arange(len(self.r)) / _FINE
        quantile = NormalDist().inv_cdf(1 - _FALSE_ALARMS / (longest * len(self.gpus)))
        # Between the samples white noise is not free of correlation: sin(pi l) / (pi l).
        self.noise = (quantile * np.sqrt(_spread(self.r[::_FINE]) / np.maximum(pairs, 1.0))
                      + np.maximum(0.0, np.sinc(self.lags))[:, None])

    def best(self) -> _Peak | None:
        """The peak of the period that most GPUs share."""
        if not self.gpus:
            return None
        columns = range(len(self.gpus))
        together = self._fundamental([*columns])
        if together is not None and all(self._is_first(c, together) for c in columns):
            return self._peak([*columns], together)
        own = [self._fundamental([c]) for c in columns]
        found = []
        for lag in {together, *own} - {None}:
            assert lag is not None
            members = [c for c in columns if self._shares(c, own[c], lag)]
            if members:
                found.append(self._peak(members, self._fundamental(members) or lag))
        return max(found, key=lambda peak: (len(peak.gpus), peak.height), default=None)

    def _peak(self, columns: list[int], lag: float) -> _Peak:
        r, noise = self._of(columns)
        height = max(float(np.interp(lag, self.lags, r)), 1e-9)
        sure = max(0.0, 1 - (float(np.interp(lag, self.lags, noise)) / height) ** 2)
        return _Peak(self._exact(columns, lag), height, sure, tuple(self.gpus[c] for c in columns))

    def _is_first(self, column: int, lag: float) -> bool:
        """Whether a GPU has a peak there and none nearly as high before, so that it is its own period, too."""
        r, noise = self.r[:, column], self.noise[:, column]
        p = round(lag * _FINE)
        near = slice(p - _slack(p), p + _slack(p) + 1)
        top = float(r[near].max())
        lobe = int((r <= 0).argmax())  # where the peak at lag 0 has ended
        before = float(r[lobe: round(0.7 * p)].max(initial=0.0))  # half and two thirds of it, and what is shorter
        return top > noise[p] and before < _as_high(lag) * top

    def _of(self, columns: list[int]) -> tuple[F64, F64]:
        return self.r[:, columns].mean(axis=1), self.noise[:, columns].mean(axis=1)

    def _fundamental(self, columns: list[int]) -> float | None:
        """The first lag of those that stand out about as high as the highest: the others are its multiples."""
        r, noise = self._of(columns)
        peaks = []
        tops = np.flatnonzero((r[1:-1] >= r[:-2]) & (r[1:-1] > r[2:]) & (r[1:-1] > noise[1:-1])) + 1
        # What is too fast is looked for as well: else its multiple would be taken for it.
        for p in tops[(tops >= 2 * _FINE) & (tops <= self.longest * _FINE)].tolist():
            again = r[2 * p - _slack(p): 2 * p + _slack(p) + 1].max(initial=-1.0)
            if r[p] - r[:p].min() > noise[p] and again > 0.5 * noise[p]:
                peaks.append(p)
        highest = max((r[p] for p in peaks), default=0.0)
        return next((float(self.lags[p]) for p in peaks if r[p] >= _as_high(self.lags[p]) * highest), None)

    def _shares(self, column: int, own: float | None, lag: float) -> bool:
        """Whether it is a GPU's own period; one too noisy to have found any needs a peak there all the same."""
        p = round(lag * _FINE)
        if own is not None:
            return abs(own * _FINE - p) <= _slack(p)
        near = slice(p - _slack(p), p + _slack(p) + 1)
        r = self.r[near, column]
        return bool((r > 0.5 * self.noise[near, column]).any()) and 0 < int(r.argmax()) < len(r) - 1

    def _exact(self, columns: list[int], lag: float) -> float:
        """The period by the last of its multiples that stands out: the further, the finer it is read."""
        r, noise = self._of(columns)
        slack = _slack(round(lag * _FINE))
        lag = _top(r, round(lag * _FINE)) / _FINE
        for k in range(2, len(r)):
            p = round(lag * k * _FINE)
            if p + slack + 1 >= len(r):
                break
            top = p - slack + int(r[p - slack: p + slack + 1].argmax())
            if r[top] <= noise[top] or abs(top - p) == slack:
                break
            lag = _top(r, top) / _FINE / k
        return lag


def _autocorrelation(values: F64, there: npt.NDArray[np.bool_], lags: int) -> tuple[F64, F64]:
    """r[lag, column] at multiples of 1/4 up to ``lags``, and how many pairs of samples each rests on."""
    size = 1 << (2 * len(values) - 1).bit_length()
    power = np.abs(np.fft.rfft(values, size, axis=0)) ** 2
    # Zeros behind the highest frequency are values between the samples.
    products = np.fft.irfft(power, size * _FINE, axis=0)[: lags * _FINE] * _FINE
    overlap = np.fft.irfft(np.abs(np.fft.rfft(there, size, axis=0)) ** 2, size, axis=0)[: lags + 1]
    fine = np.arange(lags * _FINE) / _FINE
    pairs = overlap[fine.astype(int)] + (fine % 1)[:, None] * (overlap[fine.astype(int) + 1 - (fine % 1 == 0)]
                                                               - overlap[fine.astype(int)])
    r = products / np.maximum(pairs, 1.0)
    return r / np.maximum(r[0], 1e-30), pairs


def _as_high(lag: float) -> float:
    return next(share for limit, share in _AS_HIGH if lag < limit)


def _slack(p: int) -> int:
    """How far beside its place a peak may stand: jitter, and most of a sample."""
    return max(3 * _FINE // 4, round(0.08 * p))


def _top(r: F64, p: int) -> float:
    """Where the parabola through a peak and its neighbours is highest."""
    bend = r[p - 1] - 2 * r[p] + r[p + 1]
    return p + (0.5 * float(r[p - 1] - r[p + 1]) / float(bend) if bend < 0 else 0.0)


def _moving(columns: npt.NDArray[np.generic], width: int) -> F64:
    """The sum of each column over ``width`` slots around each slot; ``width`` is odd."""
    half = width // 2
    total = np.cumsum(np.pad(columns.astype(np.float64), ((half + 1, half), (0, 0))), axis=0)
    return np.asarray(total[width:] - total[:-width])


def _deviation(grid: F64) -> F64:
    """Standard deviation of each column, 0 where nothing is known."""
    there = ~np.isnan(grid)
    count = np.maximum(there.sum(axis=0), 1)
    mean = np.where(there, grid, 0.0).sum(axis=0) / count
    return np.asarray(np.sqrt((np.where(there, grid - mean, 0.0) ** 2).sum(axis=0) / count))


def _spread(r: F64) -> F64:
    """Bartlett's factor for each column of r[lag, column]: how much neighbours that are alike widen the scatter."""
    before_zero = np.logical_and.accumulate(r[1:] > 0, axis=0)
    return np.asarray(1 + 2 * np.sum(np.where(before_zero, r[1:] ** 2, 0.0), axis=0))

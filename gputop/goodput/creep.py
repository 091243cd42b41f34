"""Growing host memory: the trend of a series, told only where it is beyond doubt.

A job's memory rises while it starts, in teeth (a buffer that fills and is dropped), and in steps (a cache). None of
these is a leak. So a trend is told only where, after the warm-up, the *lowest* memory of each eighth is above that of
the eighth before, and both halves rise at about the rate of the whole. Slopes are medians of the slopes of all pairs
(P. K. Sen, J. Am. Stat. Assoc. 63, 1968), which a few odd points do not move. Over hours such a rise is told whatever
its end; over minutes only where it has come half the way to the limit, for there the question is no longer whether it
is a leak.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

F64 = npt.NDArray[np.float64]

MAX_POINTS = 512
_FIRST_WIDTH_S = 1.0
WARM_UP = 0.1  # share of a series that is passed over: start-up, first buffers
MIN_POINTS = 40
MIN_SPAN_S = 6 * 3600.0  # shorter, a cache or shuffle buffer that fills in the first epoch looks alike
MIN_NEAR_SPAN_S = 60.0  # span if the limit is as near as the beginning
NEAR_PARTS = 16  # over minutes: what has just stopped to rise is seen sooner
PARTS = 8  # parts, which all rise by chance once in 40,000 series without a trend
HALF_AGREES = 0.6  # each half's slope lies within this factor of the whole, and its inverse
MIN_GROWTH_BYTES = 256 << 20
MIN_GROWTH_OF_LIMIT = 0.02


class Trend(NamedTuple):
    """``low`` and ``high`` are the slopes of the slower and the faster half (bytes/s)."""

    bytes_per_s: float
    low: float
    high: float
    span_s: float


class Slice(NamedTuple):
    low: float
    high: float


class Series:
    """The lowest and highest value of each slice of time, in at most :data:`MAX_POINTS` slices, which widen as it
    grows."""

    def __init__(self) -> None:
        self.begin_s = self.end_s = 0.0
        self.first = self.last = 0.0
        self._width_s = _FIRST_WIDTH_S
        self._slices: dict[int, Slice] = {}

    def __len__(self) -> int:
        return len(self._slices)

    def add(self, time_s: float, value: float) -> None:
        if not self._slices:
            self.begin_s, self.first = time_s, value
        self.end_s, self.last = time_s, value
        number = int(time_s // self._width_s)
        extremes = self._slices.get(number, Slice(value, value))
        self._slices[number] = Slice(min(value, extremes.low), max(value, extremes.high))
        if len(self._slices) > MAX_POINTS:
            self._widen()

    def _widen(self) -> None:
        slices: dict[int, Slice] = {}
        for number, extremes in self._slices.items():
            other = slices.get(number // 2, extremes)
            slices[number // 2] = Slice(min(extremes.low, other.low), max(extremes.high, other.high))
        self._slices, self._width_s = slices, 2 * self._width_s

    def peak(self, bytes_per_s: float) -> float:
        """The highest value to be expected now of a series with that slope, by its last eighth: a limit is met by the
        teeth on top of a leak, not by its floor."""
        last = sorted(self._slices.items())[-max(1, len(self._slices) // PARTS):]
        now = last[-1][0]
        return max(extremes.high + bytes_per_s * self._width_s * (now - number) for number, extremes in last)

    def trend(self, limit_bytes: float | None) -> Trend | None:
        """Growth of the series; None where it does not grow beyond doubt."""
        points = sorted(self._slices.items())[int(len(self._slices) * WARM_UP):]
        times = np.array([number for number, _ in points], np.float64) * self._width_s
        values = np.array([extremes.low for _, extremes in points], np.float64)
        span_s = times[-1] - times[0] if len(points) >= MIN_POINTS else 0.0
        if span_s < MIN_NEAR_SPAN_S:
            return None
        parts = PARTS if span_s >= MIN_SPAN_S else NEAR_PARTS
        floors = [part.min() for part in np.array_split(values, parts)]
        if not (np.diff(floors) > 0).all():
            return None
        half = len(points) // 2
        whole, *halves = (slope(times[part], values[part]) for part in (slice(None), slice(half), slice(half, None)))
        agree = all(HALF_AGREES * whole <= half <= whole / HALF_AGREES for half in halves)
        enough = max(MIN_GROWTH_BYTES, MIN_GROWTH_OF_LIMIT * (limit_bytes or 0.0))
        if whole <= 0 or not agree or whole * span_s < enough:
            return None
        return Trend(whole, min(*halves, whole), max(*halves, whole), span_s)


def slope(times: F64, values: F64) -> float:
    """The median of the slopes of all pairs of points; the times differ."""
    i, j = np.triu_indices(len(times), 1)
    return float(np.median((values[j] - values[i]) / (times[j] - times[i])))

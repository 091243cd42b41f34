"""Host memory that creeps: the trend of a series, told only where it is beyond doubt.

A job's memory rises while it starts, in teeth (a buffer that fills and is dropped), and in steps (a cache). None of
these is a leak. So a trend is told only where, after the warm-up, the *lowest* memory of each eighth is above that of
the eighth before, and both halves rise at about the rate of the whole. Slopes are medians of the slopes of all pairs
(P. K. Sen, J. Am. Stat. Assoc. 63, 1968), which a few odd points do not move.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

F64 = npt.NDArray[np.float64]

MAX_POINTS = 512
_FIRST_WIDTH_S = 60.0
WARM_UP = 0.1  # share of a series that is passed over: start-up, first buffers
MIN_POINTS = 40
MIN_SPAN_S = 6 * 3600.0  # shorter, a cache or shuffle buffer that fills in the first epoch looks alike
PARTS = 8  # that all rise by chance once in 40,000 series without a trend
HALF_AGREES = 0.6  # each half's slope lies within this factor of the whole, and its inverse
MIN_GROWTH_BYTES = 256 << 20
MIN_GROWTH_OF_LIMIT = 0.02


class Trend(NamedTuple):
    """``low`` and ``high`` are the slopes of the slower and the faster half (bytes/s)."""

    bytes_per_s: float
    low: float
    high: float


class Series:
    """The lowest value of each slice of time, in at most :data:`MAX_POINTS` slices, which widen as it grows."""

    def __init__(self) -> None:
        self.begin_s = self.end_s = 0.0
        self.first = self.last = 0.0
        self._width_s = _FIRST_WIDTH_S
        self._slices: dict[int, float] = {}

    def __len__(self) -> int:
        return len(self._slices)

    def add(self, time_s: float, value: float) -> None:
        if not self._slices:
            self.begin_s, self.first = time_s, value
        self.end_s, self.last = time_s, value
        at = int(time_s // self._width_s)
        self._slices[at] = min(value, self._slices.get(at, value))
        if len(self._slices) > MAX_POINTS:
            self._widen()

    def _widen(self) -> None:
        slices: dict[int, float] = {}
        for at, value in self._slices.items():
            slices[at // 2] = min(value, slices.get(at // 2, value))
        self._slices, self._width_s = slices, 2 * self._width_s

    def trend(self, limit_bytes: float | None) -> Trend | None:
        """Its growth; None where it does not grow beyond doubt."""
        points = sorted(self._slices.items())[int(len(self._slices) * WARM_UP):]
        times = np.array([at for at, _ in points], np.float64) * self._width_s
        values = np.array([value for _, value in points], np.float64)
        if len(points) < MIN_POINTS or times[-1] - times[0] < MIN_SPAN_S:
            return None
        floors = [part.min() for part in np.array_split(values, PARTS)]
        if not (np.diff(floors) > 0).all():
            return None
        half = len(points) // 2
        whole, *halves = (slope(times[part], values[part]) for part in (slice(None), slice(half), slice(half, None)))
        agree = all(HALF_AGREES * whole <= own <= whole / HALF_AGREES for own in halves)
        enough = max(MIN_GROWTH_BYTES, MIN_GROWTH_OF_LIMIT * (limit_bytes or 0.0))
        if whole <= 0 or not agree or whole * (times[-1] - times[0]) < enough:
            return None
        return Trend(whole, min(*halves, whole), max(*halves, whole))


def slope(times: F64, values: F64) -> float:
    """The median of the slopes of all pairs of points; the times differ."""
    i, j = np.triu_indices(len(times), 1)
    return float(np.median((values[j] - values[i]) / (times[j] - times[i])))

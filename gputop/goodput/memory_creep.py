"""The host memory of a recording: which processes, groups or node creep, and when their limit is reached.

A job's memory rises while it starts, in teeth (a buffer that fills and is dropped), and in steps (a cache). None of
these is a leak. So a trend is told only where, after the warm-up, the *lowest* memory of each eighth is above that of
the eighth before, and both halves rise at about the rate of the whole. Slopes are medians of the slopes of all pairs
(P. K. Sen, J. Am. Stat. Assoc. 63, 1968), which a few odd points do not move. Over hours such a rise is told whatever
its end; over minutes only where it has come half the way to the limit, for there the question is no longer whether it
is a leak.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal, TypeVar

import numpy as np
import numpy.typing as npt
from msgspec import Struct, field

from gputop.core.samples import NodeSample, ProcessSample
from gputop.goodput.model import Creep

F64 = npt.NDArray[np.float64]
_What = Literal["process", "cgroup", "node"]

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


class Trend(Struct, frozen=True):
    """``low`` and ``high`` are the slopes of the slower and the faster half (bytes/s)."""

    bytes_per_s: float
    low: float
    high: float
    span_s: float


class MemorySlice(Struct, frozen=True):
    low: float
    high: float


class MemorySeries:
    """The lowest and highest value of each slice of time, in at most :data:`MAX_POINTS` slices, which widen as it
    grows."""

    def __init__(self) -> None:
        self.begin_s = self.end_s = 0.0
        self.first = self.last = 0.0
        self._width_s = _FIRST_WIDTH_S
        self._slices: dict[int, MemorySlice] = {}

    def __len__(self) -> int:
        return len(self._slices)

    def add(self, time_s: float, value: float) -> None:
        if not self._slices:
            self.begin_s, self.first = time_s, value
        self.end_s, self.last = time_s, value
        number = int(time_s // self._width_s)
        extremes = self._slices.get(number, MemorySlice(value, value))
        self._slices[number] = MemorySlice(min(value, extremes.low), max(value, extremes.high))
        if len(self._slices) > MAX_POINTS:
            slices: dict[int, MemorySlice] = {}  # twice as wide
            for number, extremes in self._slices.items():
                other = slices.get(number // 2, extremes)
                slices[number // 2] = MemorySlice(min(extremes.low, other.low), max(extremes.high, other.high))
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


# -- of a recording ---------------------------------------------------------------------------------

_K = TypeVar("_K")
_V = TypeVar("_V")

_MAX_SERIES = 256
_MISSED = 3.5  # samples before the end in which a process was not seen, and counts as running all the same


class _Use(Struct, frozen=True):
    used: float | None
    limit: float | None


class _Process(Struct):
    name: str
    pid: int
    group: str | None  # its control group with a memory limit
    series: MemorySeries = field(default_factory=MemorySeries)


class Memory:
    """Collects the series; ``job_name`` says what a process is called."""

    def __init__(self, job_name: Callable[[ProcessSample], str]) -> None:
        self._job_name = job_name
        self._processes: dict[tuple[int, float | None], _Process] = {}
        self._groups: dict[str, MemorySeries] = {}
        self._node = MemorySeries()
        self._last: dict[str | None, _Use] = {}  # by group; None: the node
        self._end_s = self._interval_s = 0.0

    def add(self, sample: NodeSample) -> None:
        self._interval_s = max(sample.time_s - self._end_s, 1.0)
        self._end_s = sample.time_s
        used = sample.host["memory_used_bytes"].value
        self._last[None] = _Use(used, sample.host["memory_total_bytes"].value)
        if used is not None:
            self._node.add(sample.time_s, used)
        seen: set[str] = set()
        for process in sample.processes:
            group = self._add_group(sample.time_s, process, seen)
            if process.rss_bytes.value is not None:
                self._process(process, group).series.add(sample.time_s, process.rss_bytes.value)

    def _add_group(self, time_s: float, process: ProcessSample, seen: set[str]) -> str | None:
        if process.cgroup is None:
            return None
        name, used, limit = (process.cgroup.name, process.cgroup["memory_used_bytes"].value,
                             process.cgroup["memory_limit_bytes"].value)
        if limit is None or used is None:
            return None
        if name not in seen:
            seen.add(name)
            self._last[name] = _Use(used, limit)
            _bounded(self._groups, name, MemorySeries, len).add(time_s, used)
        return name

    def _process(self, process: ProcessSample, group: str | None) -> _Process:
        entry = _bounded(self._processes, (process.pid, process.started_s),
                         lambda: _Process(self._job_name(process), process.pid, group), lambda p: len(p.series))
        entry.group = group
        return entry

    def creeps(self) -> Iterator[Creep]:
        """Processes, then the groups and the node in which no process accounts for it; fastest first."""
        candidates: list[tuple[_What, str, int | None, MemorySeries, str | None]] = [
            *(("process", process.name, process.pid, process.series, process.group)
              for process in self._processes.values()),
            *(("cgroup", name, None, series, name) for name, series in self._groups.items()),
            ("node", "all processes", None, self._node, None)]
        explained: set[str | None] = set()
        creeps = []
        for what, name, pid, series, group in candidates:
            if (what == "process" or group not in explained) and (trend := self._trend(series, group)) is not None:
                explained |= {group, None}
                creeps.append(self._creep(what, name, pid, series, trend, group))
        yield from sorted(creeps, key=lambda creep: -creep.bytes_per_s)

    def _trend(self, series: MemorySeries, group: str | None) -> Trend | None:
        trend = series.trend(self._use(group).limit)
        if trend is None or trend.span_s >= MIN_SPAN_S:
            return trend
        left = self._left_bytes(series, group, trend.bytes_per_s)
        return trend if left is not None and left <= trend.bytes_per_s * trend.span_s else None

    def _use(self, group: str | None) -> _Use:
        return self._last.get(group, _Use(None, None))

    def _left_bytes(self, series: MemorySeries, group: str | None, bytes_per_s: float) -> float | None:
        """Bytes left of the limit at the end; None where there is none, or the series had ended."""
        use, whole = self._use(group), self._node if group is None else self._groups.get(group)
        if use.used is None or use.limit is None or self._end_s - series.end_s > _MISSED * self._interval_s:
            return None
        return max(0.0, use.limit - max(use.used, whole.peak(bytes_per_s) if whole is not None else 0.0))

    def _creep(self, what: _What, name: str, pid: int | None, series: MemorySeries, trend: Trend,
               group: str | None) -> Creep:
        use, whole = self._use(group), self._node if group is None else self._groups.get(group)
        # What fills the limit is all that is under it; the process alone where that has no trend of its own.
        rate = (self._trend(whole, group) if whole is not None else None) or trend
        left = self._left_bytes(series, group, rate.bytes_per_s)
        in_s = [None if left is None else left / speed for speed in (rate.bytes_per_s, rate.high, rate.low)]
        return Creep(what=what, name=name, pid=pid, begin_s=series.begin_s, end_s=series.end_s,
                     first_bytes=series.first, last_bytes=series.last, bytes_per_s=trend.bytes_per_s,
                     limit=None if use.limit is None else "node" if group is None else "cgroup",
                     limit_bytes=use.limit, full_in_s=in_s[0], full_in_low_s=in_s[1], full_in_high_s=in_s[2])


def _bounded(table: dict[_K, _V], key: _K, make: Callable[[], _V], size: Callable[[_V], int]) -> _V:
    """The entry of ``key``, made where there is none; the smallest gives way where there are too many."""
    if key not in table:
        if len(table) >= _MAX_SERIES:
            del table[min(table, key=lambda candidate: size(table[candidate]))]
        table[key] = make()
    return table[key]

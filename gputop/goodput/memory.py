"""The host memory of a recording: which processes, groups or node creep, and when their limit is reached."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeVar

from gputop.core.samples import NodeSample, ProcessSample
from gputop.goodput.creep import MIN_SPAN_S, Series, Trend
from gputop.goodput.model import Creep

_K = TypeVar("_K")
_V = TypeVar("_V")

_MAX_SERIES = 256
_MISSED = 3.5  # samples before the end in which a process was not seen, and counts as running all the same


class _Use(NamedTuple):
    used: float | None
    limit: float | None


@dataclass(slots=True)
class _Process:
    name: str
    pid: int
    group: str | None  # its control group with a memory limit
    series: Series = field(default_factory=Series)


class Memory:
    """Collects the series; ``job_name`` says what a process is called."""

    def __init__(self, job_name: Callable[[ProcessSample], str]) -> None:
        self._job_name = job_name
        self._processes: dict[tuple[int, float | None], _Process] = {}
        self._groups: dict[str, Series] = {}
        self._node = Series()
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
            _bounded(self._groups, name, Series, len).add(time_s, used)
        return name

    def _process(self, process: ProcessSample, group: str | None) -> _Process:
        entry = _bounded(self._processes, (process.pid, process.started_s),
                         lambda: _Process(self._job_name(process), process.pid, group), lambda p: len(p.series))
        entry.group = group
        return entry

    def creeps(self) -> Iterator[Creep]:
        """Processes, then the groups and the node in which no process accounts for it; fastest first."""
        explained: set[str | None] = set()
        creeps = []
        for process in self._processes.values():
            trend = self._trend(process.series, process.group)
            if trend is not None:
                explained |= {process.group, None}
                creeps.append(self._creep("process", process.name, process.pid, process.series, trend, process.group))
        for name, series in self._groups.items():
            if name not in explained and (trend := self._trend(series, name)) is not None:
                explained.add(None)
                creeps.append(self._creep("cgroup", name, None, series, trend, name))
        if None not in explained and (trend := self._trend(self._node, None)) is not None:
            creeps.append(self._creep("node", "all processes", None, self._node, trend, None))
        yield from sorted(creeps, key=lambda creep: -creep.bytes_per_s)

    def _trend(self, series: Series, group: str | None) -> Trend | None:
        """Trend over hours whatever its end; over minutes where it has come half the way to the limit."""
        trend = series.trend(self._use(group).limit)
        if trend is None or trend.span_s >= MIN_SPAN_S:
            return trend
        left = self._left_bytes(series, group, trend.bytes_per_s)
        return trend if left is not None and left <= trend.bytes_per_s * trend.span_s else None

    def _use(self, group: str | None) -> _Use:
        return self._last.get(group, _Use(None, None))

    def _left_bytes(self, series: Series, group: str | None, bytes_per_s: float) -> float | None:
        """Bytes left of the limit at the end; None where there is none, or the series had ended."""
        use, whole = self._use(group), self._node if group is None else self._groups.get(group)
        if use.used is None or use.limit is None or self._end_s - series.end_s > _MISSED * self._interval_s:
            return None
        return max(0.0, use.limit - max(use.used, whole.peak(bytes_per_s) if whole is not None else 0.0))

    def _creep(self, what: Literal["process", "cgroup", "node"], name: str, pid: int | None, series: Series,
               trend: Trend, group: str | None) -> Creep:
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

"""The host memory of a recording: which processes, groups or node creep, and when their limit is reached."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeVar

from gputop.core.samples import NodeSample, ProcessSample
from gputop.goodput.creep import Series, Trend
from gputop.goodput.model import Creep

_K = TypeVar("_K")
_V = TypeVar("_V")

_MAX_SERIES = 256
_STILL_THERE_S = 300.0  # seen so shortly before the end, a process counts as running


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
        self._end_s = 0.0

    def add(self, sample: NodeSample) -> None:
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
        own = _bounded(self._processes, (process.pid, process.started_s),
                       lambda: _Process(self._job_name(process), process.pid, group), lambda p: len(p.series))
        own.group = group
        return own

    def creeps(self) -> Iterator[Creep]:
        """Processes, then the groups and the node in which no process accounts for it; fastest first."""
        explained: set[str | None] = set()
        found = []
        for process in self._processes.values():
            trend = process.series.trend(self._limit(process.group))
            if trend is not None:
                explained |= {process.group, None}
                found.append(self._creep("process", process.name, process.pid, process.series, trend, process.group))
        for name, series in self._groups.items():
            if name not in explained and (trend := series.trend(self._limit(name))) is not None:
                explained.add(None)
                found.append(self._creep("cgroup", name, None, series, trend, name))
        if None not in explained and (trend := self._node.trend(self._limit(None))) is not None:
            found.append(self._creep("node", "all processes", None, self._node, trend, None))
        yield from sorted(found, key=lambda creep: -creep.bytes_per_s)

    def _limit(self, group: str | None) -> float | None:
        return self._last.get(group, _Use(None, None)).limit

    def _creep(self, what: Literal["process", "cgroup", "node"], name: str, pid: int | None, series: Series,
               trend: Trend, group: str | None) -> Creep:
        use = self._last.get(group, _Use(None, None))
        whole = self._node if group is None else self._groups.get(group)
        # What fills the limit is all that is under it; the process alone where that has no trend of its own.
        rate = (whole.trend(use.limit) if whole is not None else None) or trend
        left = None
        if use.used is not None and use.limit is not None and self._end_s - series.end_s <= _STILL_THERE_S:
            left = max(0.0, use.limit - use.used)
        in_s = [None if left is None else left / own for own in (rate.bytes_per_s, rate.high, rate.low)]
        return Creep(what=what, name=name, pid=pid, begin_s=series.begin_s, end_s=series.end_s,
                     first_bytes=series.first, last_bytes=series.last, bytes_per_s=trend.bytes_per_s,
                     limit=None if use.limit is None else "node" if group is None else "cgroup",
                     limit_bytes=use.limit, full_in_s=in_s[0], full_in_low_s=in_s[1], full_in_high_s=in_s[2])


def _bounded(table: dict[_K, _V], key: _K, make: Callable[[], _V], size: Callable[[_V], int]) -> _V:
    """The entry of ``key``, made where there is none; the smallest gives way where there are too many."""
    if key not in table:
        if len(table) >= _MAX_SERIES:
            del table[min(table, key=lambda own: size(table[own]))]
        table[key] = make()
    return table[key]

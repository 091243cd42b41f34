"""What the trace readers share: interning names, joining launches, and putting columns together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from gputop.errors import NothingToSee
from gputop.trace.model import (
    I64,
    AllocatorEvents,
    DeviceEvents,
    HostEvents,
    Line,
    QualityNote,
    Trace,
    TraceGpu,
)

# Correlation ids are CUPTI's uint32 counters. Larger ones are not joined, so that a key of
# id and device fits an int64.
_MAX_CORRELATION = 1 << 40
_DEVICES = 1 << 20


_Events = TypeVar("_Events", DeviceEvents, HostEvents, AllocatorEvents)


class Names:
    """Strings by number, each once."""

    def __init__(self) -> None:
        self.list: list[str] = []
        self._index: dict[str, int] = {}

    def __getitem__(self, name: str) -> int:
        index = self._index.get(name)
        if index is None:
            index = self._index[name] = len(self.list)
            self.list.append(name)
        return index


@dataclass(slots=True)
class Parts:
    """A trace while it is read: columns in pieces, in absolute nanoseconds, unsorted.

    ``host_stats`` has one entry for each of ``host``: name → (rows of that piece, values).
    """

    names: Names = field(default_factory=Names)
    lines: list[Line] = field(default_factory=list)
    gpus: list[TraceGpu] = field(default_factory=list)
    hosts: list[str] = field(default_factory=list)
    device: list[DeviceEvents] = field(default_factory=list)
    host: list[HostEvents] = field(default_factory=list)
    allocator: list[AllocatorEvents] = field(default_factory=list)
    quality: list[QualityNote] = field(default_factory=list)

    def add_line(self, line: Line) -> int:
        self.lines.append(line)
        return len(self.lines) - 1

    def note(self, id_: str, message: str) -> None:
        note = QualityNote(id_, message)
        if note not in self.quality:
            self.quality.append(note)

    def finish(
        self, format_: str, paths: Sequence[str], *, wall_clock: bool,
        profile_window_ns: tuple[int, int] | None = None, simulated: bool = False, empty_fix: str = "",
    ) -> Trace:
        """Sort, shift to the first event and assemble.

        Raises NothingToSee, with ``empty_fix`` as its remedy, where there is no event at all;
        the notes on quality say why and go into the message.
        """
        device = _joined(self.device, DeviceEvents.empty())
        allocator = _joined(self.allocator, AllocatorEvents.empty())
        starts = [part.start_ns for part in self.host] + [device.start_ns, allocator.time_ns]
        if not any(len(s) for s in starts):
            raise no_events(paths, [note.message for note in self.quality], empty_fix)
        first = min(int(s.min()) for s in starts if len(s))
        for times in (*starts, device.end_ns, *(part.end_ns for part in self.host)):
            times -= first
        device.launch_ns[device.launch_line >= 0] -= first

        host = _joined(self.host, HostEvents.empty())
        order = np.argsort(host.start_ns, kind="stable")
        stats = _joined_stats(self.host, order)
        host = _take(host, order)
        host.stats = stats
        return Trace(
            format=format_, paths=list(paths), hosts=self.hosts, names=self.names.list, lines=self.lines,
            gpus=self.gpus, device=_take(device, np.argsort(device.start_ns, kind="stable")), host=host,
            allocator=_take(allocator, np.argsort(allocator.time_ns, kind="stable")),
            origin_ns=first if wall_clock else 0,
            profile_window_ns=profile_window_ns and (profile_window_ns[0] - first, profile_window_ns[1] - first),
            simulated=simulated, quality=self.quality,
        )


def no_events(paths: Sequence[str], reasons: Sequence[str], fix: str) -> NothingToSee:
    because = f": {' '.join(reasons)}" if reasons else "."
    return NothingToSee(f"There is no trace event in {', '.join(paths)}{because}", fix)


def launches(
    device_correlation: I64, device_id: I64, host_correlation: I64, host_device_id: I64,
) -> npt.NDArray[np.intp]:
    """For each device event the row of the first host call with its correlation id, or -1.

    Device ids take part where both sides number devices alike; ROCm's tracer puts another
    numbering on the host side, and CUPTI's ids are unique in a process anyway. Host rows must
    be sorted by start.
    """
    told = host_device_id >= 0
    by_device = bool(told.any()) and bool(np.isin(host_device_id[told], np.unique(device_id)).all())
    keys, rows = _keys(host_correlation, host_device_id if by_device else None)
    wanted, wanted_rows = _keys(device_correlation, device_id if by_device else None)
    out = np.full(len(device_correlation), -1, np.intp)
    out[wanted_rows] = _find(keys, rows, wanted)
    if by_device and not told.all():  # some calls do not say for which device they are
        keys, rows = _keys(np.where(told, -1, host_correlation), None)
        wanted, wanted_rows = _keys(np.where(out < 0, device_correlation, -1), None)
        out[wanted_rows] = _find(keys, rows, wanted)
    return out


def _keys(correlation: I64, device: I64 | None) -> tuple[I64, npt.NDArray[np.intp]]:
    """One integer per usable row, and those rows."""
    usable = (correlation > 0) & (correlation < _MAX_CORRELATION)
    if device is not None:
        usable &= (device >= 0) & (device < _DEVICES)
    rows = np.flatnonzero(usable)
    key = correlation[rows]
    return (key if device is None else key * _DEVICES + device[rows]), rows


def _find(keys: I64, rows: npt.NDArray[np.intp], wanted: I64) -> npt.NDArray[np.intp]:
    if not len(keys):
        return np.full(len(wanted), -1, np.intp)
    order = np.argsort(keys, kind="stable")
    keys = keys[order]
    at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[at] == wanted, rows[order[at]], -1)


def _joined(parts: list[_Events], empty: _Events) -> _Events:
    """One set of columns from many, without the stats."""
    if not parts:
        return empty
    return type(empty)(**{
        f.name: np.concatenate([getattr(part, f.name) for part in parts]) for f in fields(empty) if f.name != "stats"
    })


def _take(events: _Events, order: npt.NDArray[np.intp]) -> _Events:
    return type(events)(**{f.name: getattr(events, f.name)[order] for f in fields(events) if f.name != "stats"})


def _joined_stats(parts: Iterable[HostEvents], order: npt.NDArray[np.intp]) -> dict[str, tuple[I64, I64]]:
    """The sparse stats of all pieces, with rows as they are after sorting by ``order``."""
    pieces: dict[str, list[tuple[I64, I64]]] = {}
    base = 0
    for part in parts:
        for name, (rows, values) in part.stats.items():
            pieces.setdefault(name, []).append((rows + base, values))
        base += len(part)
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    out = {}
    for name, found in sorted(pieces.items()):
        rows = place[np.concatenate([rows for rows, _ in found])]
        by_row = np.argsort(rows, kind="stable")
        out[name] = (rows[by_row], np.concatenate([values for _, values in found])[by_row])
    return out


class Lookup:
    """A mapping of integers looked up for many keys at once; ``default`` for the others."""

    def __init__(self, table: Mapping[int, int], default: int = -1) -> None:
        self._default = default
        self._keys = np.fromiter(table.keys(), np.int64, len(table))
        self._values = np.fromiter(table.values(), np.int64, len(table))
        order = np.argsort(self._keys)
        self._keys, self._values = self._keys[order], self._values[order]
        self._dense: I64 | None = None
        if len(table) and self._keys[0] >= 0 and self._keys[-1] < 4 * len(table) + 1024:
            self._dense = np.full(int(self._keys[-1]) + 2, default, np.int64)
            self._dense[self._keys] = self._values

    def __call__(self, keys: I64) -> I64:
        if self._dense is not None:  # the last element stands for everything outside
            return self._dense[np.where((keys < 0) | (keys >= len(self._dense)), len(self._dense) - 1, keys)]
        if not len(self._keys):
            return np.full(len(keys), self._default, np.int64)
        at = np.minimum(np.searchsorted(self._keys, keys), len(self._keys) - 1)
        return np.where(self._keys[at] == keys, self._values[at], self._default)

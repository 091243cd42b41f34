"""The events of the hosts' planes of one XSpace: threads, allocators, and the calls that launch device events."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from gputop.trace.builder import IGNORED_EVENT, Collected, TraceBuilder, joined_stats
from gputop.trace.derived_lines import is_derived
from gputop.trace.int_map import IntMap
from gputop.trace.lookups import Mask, rows_of
from gputop.trace.model import I32, I64, TEXT_STATS, AllocatorEvents, Columns, HostEvents
from gputop.trace.readers.xspace.events import EventReader, LineNumbers
from gputop.trace.readers.xspace.hlo_indices import METADATA_PLANE, HloIndices
from gputop.trace.readers.xspace.recordings import FileRecording
from gputop.trace.readers.xspace.space import Space
from gputop.trace.readers.xspace.stats import floats, indices_in, integers, lookups, strings, whole_numbers
from gputop.trace.readers.xspace.xplane import Chunk, PlaneLines, XLine, XPlane, event_count

_ALLOCATOR = ("MemoryAllocation", "MemoryDeallocation")
_INTEGER_STATS = ("step_num", "group_id", "_r", "is_func", "tracing_count", "iter_num", "buffered_elements",
                  "id", "parent_id", "parallelism", "buffer_limit", "cpu_budget")
_LAUNCH_STATS = ("correlation_id", "device_id", "memcpy_details")
_ALLOCATOR_STATS = ("allocator_name", "bytes_allocated", "bytes_available", "peak_bytes_in_use", "tf_op",
                    "allocation_bytes", "addr", "fragmentation")
_HOST_STATS = (*_INTEGER_STATS, *TEXT_STATS, *_LAUNCH_STATS, *_ALLOCATOR_STATS)
# XLA's ops on a CPU: what they are, and the numbers that link their start to their end, "end: " and their name.
_CPU_STATS = ("hlo_op", "hlo_module", "program_id", "_p", "_c")
_END = "end: "


class HostCalls(Columns):
    """Host events with a correlation id: the calls that launched device events."""

    event: I32  # a row of the host events
    correlation: I64
    device_id: I32
    details: I32  # of copies, an index of the names


class HostPlanesReader:
    """Reads the hosts' planes of one file, recording by recording, into the builder."""

    def __init__(self, builder: TraceBuilder, host: str, space: Space, events: EventReader, lines: LineNumbers,
                 hlo: HloIndices) -> None:
        self._builder, self._host, self._events, self._lines, self._hlo = builder, host, events, lines, hlo
        # Without a GPU XLA's ops ran on the CPU, and the threads' events are all there is of them.
        self._stats = _HOST_STATS if space.has_gpus else (*_HOST_STATS, *_CPU_STATS)
        self._together = space.many_lines

    def read(self, recording: FileRecording) -> tuple[HostEvents, HostCalls]:
        """Read the events of a recording; returns them, and those that may have launched something."""
        planes = [plane for plane in recording.planes
                  if plane.name.startswith("/host:") and plane.name != METADATA_PLANE]
        room = sum(event_count(plane.lines) for plane in planes)
        host, calls = Collected(HostEvents, room), Collected(HostCalls, room)
        earlier: dict[tuple[str, int, str, int, int], tuple[XPlane, XLine]] = {}
        parts = [part for plane in planes for part in self._read_plane(
            plane, self._without_repeated(plane, earlier), recording.base_ns, host, calls)]
        for plane in planes:  # a line may be compared with those of all planes before its own
            self._events.forget(plane.lines)
        events = host.whole()
        events.stats = joined_stats(parts)
        if parts:
            self._builder.host.append(events)
        return events, calls.whole()

    def _without_repeated(self, plane: XPlane,
                          earlier: dict[tuple[str, int, str, int, int], tuple[XPlane, XLine]]) -> list[XLine]:
        """The lines of threads, without those whose events the recording has already; ``earlier`` are its lines."""
        lines = [xline for xline in plane.lines if not is_derived(xline.name, xline.id)]
        once = [xline for xline in lines if not self._repeats(plane, xline, earlier)]
        if len(once) < len(lines):
            self._builder.note("duplicate_events", (
                f"{plane.name} of {self._host or 'this host'}: some threads are in the trace more than once with "
                "identical events; gputop counts them once."))
        return once

    def _repeats(self, plane: XPlane, xline: XLine,
                 earlier: dict[tuple[str, int, str, int, int], tuple[XPlane, XLine]]) -> bool:
        """Return whether a line of that name and id has these very events, byte by byte, already."""
        if not len(xline.begin):
            return False
        key = plane.name, xline.id, xline.name, xline.timestamp_ns, len(xline.begin)
        before, first = earlier.setdefault(key, (plane, xline))
        if first is xline or (before.event_names, before.stat_names) != (plane.event_names, plane.stat_names):
            return False
        return self._events.same_bytes(first, xline)

    def _read_plane(self, plane: XPlane, lines: Sequence[XLine], base_ns: int, host: Collected[HostEvents],
                    calls: Collected[HostCalls]) -> Iterator[HostEvents]:
        """Read the events of these lines; yields those of each chunk as a part of ``host``, with their stats."""
        builder = self._builder
        names, references = lookups(plane, builder.names)
        noise = {i: 1 for i, name in plane.event_names.items() if name.startswith(IGNORED_EVENT)}
        skip = IntMap(noise, 0) if noise else None
        for decoded in self._events.read([PlaneLines(plane, lines, names, self._stats, skip, self._together)], base_ns):
            chunk, line = decoded.chunk, self._lines.of(decoded)
            keep = np.logical_and.reduce([chunk.name != builder.names[name] for name in _ALLOCATOR])
            if not keep.all():
                self._allocator_chunk(chunk, np.flatnonzero(~keep), references)
            first = len(host)
            events = host.more(int(np.count_nonzero(keep)))
            events.line[:] = np.broadcast_to(line, len(keep))[rows_of(keep)]
            self._set(events, chunk, keep, references)
            self._add_calls(chunk, keep, references, first, calls)
            yield events

    def _set(self, events: HostEvents, chunk: Chunk, keep: Mask, references: IntMap) -> None:
        """Set what a chunk tells of its events to ``keep``."""
        names, kept = self._builder.names, rows_of(keep)
        events.name[:], events.start_ns[:] = chunk.name[kept], chunk.start_ns[kept]
        events.end_ns[:] = chunk.end_ns[kept]
        row_after = np.cumsum(keep) - 1
        for stat in (*_INTEGER_STATS, *TEXT_STATS):
            column = chunk.stats.get(stat)
            if column is None:
                continue
            rows, values = (whole_numbers(column, names, references) if stat in _INTEGER_STATS
                            else column.strings(names, references))
            of_kept = np.flatnonzero(keep[rows])
            if len(of_kept):
                events.stats[stat] = (row_after[rows[of_kept]], values[of_kept])
        if "hlo_op" in chunk.stats or "_c" in chunk.stats:
            self._cpu_ops(events, chunk, kept, references)

    def _add_calls(self, chunk: Chunk, keep: Mask, references: IntMap, first: int, calls: Collected[HostCalls]) -> None:
        """Add those to ``keep``, of which the ``first`` has that row, that launch something."""
        n, correlation = len(keep), integers(chunk, "correlation_id", len(keep))
        chosen = (correlation > 0) & keep
        added, rows = calls.more(int(np.count_nonzero(chosen))), rows_of(chosen)
        if len(added):
            added.event[:], added.correlation[:] = (first - 1 + np.cumsum(keep))[rows], correlation[rows]
            # Of a number too large for a GPU another one is as good.
            added.device_id[:] = np.clip(integers(chunk, "device_id", n)[rows], -1, np.iinfo(np.int32).max)
            added.details[:] = strings(chunk, "memcpy_details", n, self._builder.names, references)[rows]

    def _cpu_ops(self, events: HostEvents, chunk: Chunk, kept: I64 | slice, references: IntMap) -> None:
        """Add the identity of XLA's ops that ran on the CPU, and their ends, which another event shows."""
        names, n = self._builder.names, len(chunk.name)
        op, module = (strings(chunk, stat, n, names, references)[kept] for stat in ("hlo_op", "hlo_module"))
        starts, ends = integers(chunk, "_p", n)[kept], integers(chunk, "_c", n)[kept]
        rows = np.flatnonzero(op >= 0)
        hlo_index = self._hlo(op[rows], module[rows], integers(chunk, "program_id", n)[kept][rows])
        events.stats["hlo"] = rows, hlo_index.astype(np.int64)
        events.stats["hlo_module"] = rows, module[rows]
        linked = rows[starts[rows] >= 0]
        events.stats["ends_with"] = linked, starts[linked]
        is_end = np.zeros(len(names.list), bool)
        for i in indices_in(chunk.name):
            is_end[i] = names.list[i].startswith(_END)
        rows = np.flatnonzero(is_end[events.name] & (ends >= 0))
        events.stats["ended"] = rows, ends[rows]

    def _allocator_chunk(self, chunk: Chunk, rows: I64, references: IntMap) -> None:
        names, n = self._builder.names, len(chunk.name)
        self._builder.allocator.append(AllocatorEvents(
            time_ns=chunk.start_ns[rows],
            allocator=strings(chunk, "allocator_name", n, names, references)[rows].astype(np.int32),
            in_use_bytes=integers(chunk, "bytes_allocated", n)[rows],
            available_bytes=integers(chunk, "bytes_available", n)[rows],
            peak_bytes=integers(chunk, "peak_bytes_in_use", n)[rows],
            tf_op=self._without_empty(strings(chunk, "tf_op", n, names, references)[rows]),
            is_free=chunk.name[rows] == names["MemoryDeallocation"],
            allocation_bytes=integers(chunk, "allocation_bytes", n)[rows],
            address=integers(chunk, "addr", n)[rows],
            fragmentation=floats(chunk, "fragmentation", n)[rows]))

    def _without_empty(self, text: I64) -> I32:
        """Texts, with -1 for empty ones: the allocators of older versions write a null pointer as "(null)"."""
        empty = [self._builder.names[name] for name in ("", "(null)")]
        return np.where(np.logical_or.reduce([text == i for i in empty]), -1, text).astype(np.int32)

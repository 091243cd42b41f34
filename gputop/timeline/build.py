"""Writes the file of a timeline: the rows from the trace, then what only its analysis tells."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
import numpy.typing as npt
from msgspec import Struct
from msgspec.structs import replace

from gputop.analysis.results import MAX_SEGMENTS
from gputop.analysis.steps.model import Steps
from gputop.core.errors import os_errors_as
from gputop.core.findings import TraceNote
from gputop.text.units import printable
from gputop.timeline.file_layout import Description, Extent, Writer
from gputop.timeline.model import KINDS, IdleGap, Row
from gputop.timeline.rows import NamedSpans, Rows, path_spans, rows_of, tracks
from gputop.trace.intervals import Spans
from gputop.trace.model import I64, U8, Trace

if TYPE_CHECKING:  # the analyses are loaded when the rows are there
    from gputop.advice.trace.facts import TraceFacts
    from gputop.timeline.idle_gaps import RankedIdleGap

_LAUNCHED_BY = ", launched by "
_NO_ROOM = ("Could not write the timeline",
            "Free some space, or set TMPDIR to a larger folder: a million events take about 60 MB.")


class RowsWritten:
    """An open, seekable file, empty before, with the rows of a timeline, which need no analysis; :meth:`finish` adds
    the critical path and the idle gaps. The row of the critical path is the last one, so that the others keep their
    keys, and its columns have room for it. Raises GputopError where the disk is full."""

    def __init__(self, trace: Trace, steps: Steps | None, file: BinaryIO) -> None:
        self._rows = rows = rows_of(trace, steps)
        with os_errors_as(*_NO_ROOM):
            self._out = Writer(file)
            self._tracks = _write_rows(trace, rows, self._out)
            bounds = steps.bounds_ns if steps is not None else ()
            self._out.column("steps", np.int64, [np.array(bounds, np.int64).ravel()])
        self._events = len(rows.kind)
        self._about: dict[str, Any] = {
            "window_ns": trace.window_ns, "paths": tuple(map(printable, trace.paths)), "simulated": trace.simulated,
            "events": trace.event_count, "streams": rows.streams, "no_counters": printable(rows.no_counters)}
        rows.forget_events()

    def describe(self, trace: Trace) -> Extent:
        """Write what the timeline of the rows alone is; returns where that stands. A row for the critical path is there
        already where there may be one: nothing is to move when it comes."""
        rows, tracks, out = self._rows, self._tracks, self._out
        awaited = int(any(row.kind == "gpu" for row in rows.rows) and out.count("steps") > 0)
        with os_errors_as(*_NO_ROOM):
            _write_texts(trace, rows, (), out)
            return out.describe(Description(
                **self._about, quality=_notes(trace.quality), rows=(*rows.rows, *[_path_row(rows)] * awaited),
                bounds=[*rows.bounds, *[(self._events,) * 2] * awaited], idle_gaps=(), idle_totals=(), basis="step",
                period_s=0.0, all=[*tracks.all, *[len(tracks.edges) - 1] * awaited],
                kinds=[*tracks.kinds, *[[(KINDS.index("host"), len(tracks.edges) - 1)]] * awaited],
                edges=[*tracks.edges, *tracks.edges[-1:] * awaited], pending=True))

    def finish(self, facts: TraceFacts) -> Extent:
        """Write the rest, of the facts of the same trace or of its end, where the begin is the job's start; returns
        where the whole timeline is described."""
        from gputop.timeline.idle_gaps import PER_CAUSE, rank_idle_gaps

        trace, rows, tracks, out = facts.trace, self._rows, self._tracks, self._out
        idle_gaps = rank_idle_gaps(facts, per_cause=PER_CAUSE)
        path = path_spans(facts.analysis.critical_path)
        with os_errors_as(*_NO_ROOM):
            if 0 < len(path.start) <= MAX_SEGMENTS:
                self._add_path(trace, path)
            else:
                path = NamedSpans()
            _write_texts(trace, rows, path.names, out)
            return out.describe(Description(
                **self._about, quality=_notes(facts.analysis.trace.quality), rows=tuple(rows.rows),
                bounds=rows.bounds, idle_gaps=_with_ends(trace, idle_gaps.ranked, rows), idle_totals=idle_gaps.totals,
                basis=facts.basis, period_s=facts.period_s, all=tracks.all, kinds=tracks.kinds, edges=tracks.edges))

    def _add_path(self, trace: Trace, path: NamedSpans) -> None:
        rows, tracks, out, count = self._rows, self._tracks, self._out, len(path.start)
        names = path.name + len(trace.names) + len(trace.hlo_ops) + len(rows.spans.names)
        for name, values in (("start", path.start), ("end", path.end), ("name", names), ("kind", path.kind),
                             ("level", np.zeros(count)), ("depth", path.depth), ("link", np.full(count, -1))):
            out.extend(name, values)
        rows.rows.append(_path_row(rows))
        rows.bounds.append((self._events, self._events + count))
        of_kind, spans = _tracks_of(path.start, path.end, path.kind, len(tracks.edges) - 1)
        tracks.all.append(len(tracks.edges) - 1)
        tracks.kinds.append(of_kind)
        for track in spans:
            tracks.edges.append(tracks.edges[-1] + len(track.start))
            for name, values in _span_columns(track):
                out.extend(name, values)


def _path_row(rows: Rows) -> Row:
    return Row(len(rows.rows), "path", "critical path", "Model", None)


def _notes(quality: Iterable[TraceNote]) -> tuple[tuple[str, str], ...]:
    return tuple((note.id, printable(note.message)) for note in quality)


def _write_rows(trace: Trace, rows: Rows, out: Writer) -> _Tracks:
    device, host, spans = trace.device, trace.host, rows.spans
    parts = ((device, rows.of_device), (host, rows.of_host), (host, rows.of_stage))
    out.column("start", np.int64, (*(events.start_ns[order] for events, order in parts), spans.start), MAX_SEGMENTS)
    out.column("end", np.int64, (*(events.end_ns[order] for events, order in parts), spans.end), MAX_SEGMENTS)
    out.column("name", np.int32, (*(events.name[order] for events, order in parts),
                                  spans.name + len(trace.names) + len(trace.hlo_ops)), MAX_SEGMENTS)
    out.column("kind", np.uint8, [rows.kind], MAX_SEGMENTS)
    out.column("level", np.float32, [spans.level], MAX_SEGMENTS)
    out.column("depth", np.uint16, [rows.depth], MAX_SEGMENTS)
    out.column("op", np.int32, [_ops(trace)[rows.of_device]])
    out.column("link", np.int32, _links(trace, rows), MAX_SEGMENTS)
    return _write_tracks(trace, rows, out)


def _write_texts(trace: Trace, rows: Rows, more: Sequence[str], out: Writer) -> None:
    """The names of the trace, of its ops, of the rows' own spans and those of ``more``."""
    shown = [printable(name) for name in (*trace.names, *(op.op_name for op in trace.hlo_ops), *rows.spans.names,
                                          *more)]
    for column, texts in (("text", shown), ("folded", [text.casefold() for text in shown])):
        raw = [text.encode("utf-8", "replace") + b"\n" for text in texts]
        out.column(column, np.uint8, [np.frombuffer(b"".join(raw), np.uint8)])
        out.column(f"{column}_end", np.int64, [np.cumsum([len(text) for text in raw], dtype=np.int64)])


class _Tracks(Struct, frozen=True):
    """Track of each row and the tracks of its kinds, and where each track begins."""

    all: list[int]
    kinds: list[list[tuple[int, int]]]
    edges: list[int]


def _write_tracks(trace: Trace, rows: Rows, out: Writer) -> _Tracks:
    """Write when each row shows something, in total and by kind, as tracks of spans with the time covered before each.
    A row of one kind has one track, and a GPU with one stream has that stream's."""
    spans: list[Spans] = []
    track_of: dict[tuple[int, ...], tuple[int, list[tuple[int, int]]]] = {}
    for row in rows.rows:
        keys = tuple(rows.streams.get(row.key, [row.key]))
        if keys in track_of:
            continue
        events = [np.arange(*rows.bounds[key]) for key in keys]
        first = len(spans)
        of_kind, new = _tracks_of(*_times(trace, rows, np.concatenate(events)), first)
        spans += new
        track_of[keys] = first, of_kind
    of_row = [track_of[tuple(rows.streams.get(row.key, [row.key]))] for row in rows.rows]
    for i, name in enumerate(("span_start", "span_end", "span_before")):
        out.column(name, np.int64, (_span_columns(keys)[i][1] for keys in spans), 2 * MAX_SEGMENTS)
    return _Tracks([first for first, _ in of_row], [of_kind for _, of_kind in of_row],
                   np.cumsum([0, *(len(s.start) for s in spans)]).tolist())


def _tracks_of(start: I64, end: I64, kind: U8, first: int) -> tuple[list[tuple[int, int]], list[Spans]]:
    """The tracks of a row, of which that of all kinds is number ``first``, and by kind which one is its."""
    whole, kinds = tracks(start, end, kind)
    spans, of_kind = [whole], []
    for code, part in kinds:
        if part is not whole:
            spans.append(part)
        of_kind.append((code, first if part is whole else first + len(spans) - 1))
    return of_kind, spans


def _span_columns(spans: Spans) -> tuple[tuple[str, I64], ...]:
    length = spans.end - spans.start
    return ("span_start", spans.start), ("span_end", spans.end), ("span_before", np.cumsum(length) - length)


def _times(trace: Trace, rows: Rows, events: I64) -> tuple[I64, I64, npt.NDArray[np.uint8]]:
    """Start, end and kind of these events of the file, which are all of one part of it."""
    n, m = len(rows.of_device), len(rows.of_device) + len(rows.of_host)
    if events[0] >= m + len(rows.of_stage):
        of_span = events - m - len(rows.of_stage)
        return rows.spans.start[of_span], rows.spans.end[of_span], rows.kind[events]
    if events[0] < n:
        rows_of_trace = rows.of_device[events]
        return trace.device.start_ns[rows_of_trace], trace.device.end_ns[rows_of_trace], rows.kind[events]
    rows_of_trace = rows.of_host[events - n] if events[0] < m else rows.of_stage[events - m]
    return trace.host.start_ns[rows_of_trace], trace.host.end_ns[rows_of_trace], rows.kind[events]


def _links(trace: Trace, rows: Rows) -> Iterator[npt.NDArray]:
    """Yield the launch of each device event among the host's events, and the other way round; -1 where there is none.
    The launch is the event of its thread with the start and end that the trace gives; where none has that end, the
    innermost with that start. An event that launched several is linked to the first."""
    device, host = trace.device, trace.host
    n, starts = len(rows.of_device), host.start_ns[rows.of_host]
    to_host, to_device = np.full(n, -1, np.int64), np.full(len(starts), -1, np.int64)
    line = device.launch_line[rows.of_device]
    by_thread = np.argsort(line, kind="stable")
    for row, (first, last) in zip(rows.rows, rows.bounds, strict=True):
        if row.kind != "thread":
            continue
        first, last = first - n, last - n
        thread = host.line[rows.of_host[first]]
        on_thread = by_thread[slice(*np.searchsorted(line, (thread, thread + 1), sorter=by_thread))]
        wanted, starts_on_thread = device.launch_ns[rows.of_device[on_thread]], starts[first:last]
        launch = np.searchsorted(starts_on_thread, wanted, side="right") - 1
        exact = (launch >= 0) & (starts_on_thread[np.maximum(launch, 0)] == wanted)
        on_thread, launch = on_thread[exact], launch[exact]
        launch = _ending(starts_on_thread, host.end_ns[rows.of_host[first:last]], launch,
                         device.launch_end_ns[rows.of_device[on_thread]])
        to_host[on_thread] = n + first + launch
        later_first = np.argsort(-device.start_ns[rows.of_device[on_thread]], kind="stable")
        to_device[first + launch[later_first]] = on_thread[later_first]  # the last one written, the earliest, stays
    yield to_host
    yield to_device
    yield np.full(len(rows.of_stage) + len(rows.spans.start), -1, np.int64)


def _ops(trace: Trace) -> npt.NDArray:
    """Op of each device event, as index into the file's names: XLA's by their scopes, where they are known."""
    device = trace.device
    if not trace.hlo_ops:
        return device.tf_op
    named = np.array([bool(op.op_name) for op in trace.hlo_ops] + [False])  # the last one answers for no op
    return np.where(named[device.hlo], device.hlo + len(trace.names), device.tf_op)


def _ending(starts: I64, ends: I64, last: I64, end: I64) -> I64:
    """Innermost of the events with the same start and with that end; the innermost of all if none has it."""
    match, candidate = last.copy(), last.copy()
    open_ = np.flatnonzero(ends[last] != end)
    while len(open_):
        candidate[open_] -= 1
        open_ = open_[(candidate[open_] >= 0) & (starts[np.maximum(candidate[open_], 0)] == starts[last[open_]])]
        fits = ends[candidate[open_]] == end[open_]
        match[open_[fits]] = candidate[open_[fits]]
        open_ = open_[~fits]
    return match


def _with_ends(trace: Trace, ranked: list[RankedIdleGap], rows: Rows) -> tuple[IdleGap, ...]:
    """The idle gaps; the device event that ended one becomes the (row, index) of its range, threads are called as their
    rows."""
    called = {printable(trace.lines[line].name): printable(name) for line, name in rows.threads.items()}
    event_index = np.empty(len(rows.of_device), np.int64)
    event_index[rows.of_device] = np.arange(len(event_index))
    first = np.array([rows.bounds[row.key][0] if row.kind == "stream" else -1 for row in rows.rows])
    streams = np.flatnonzero(first >= 0)  # in the order of the file
    out = []
    left_out = len(event_index) - len(trace.device)  # of the whole trace's events, before those of this one
    for idle_gap, event in ranked:
        if event is not None:
            event += left_out
            row = int(streams[np.searchsorted(first[streams], event_index[event], side="right") - 1])
            idle_gap = replace(idle_gap, ends=(row, int(event_index[event] - first[row])))
        name, launched, thread = idle_gap.ended_by.rpartition(_LAUNCHED_BY)
        doer, colon, what = idle_gap.host.partition(": ")
        out.append(replace(
            idle_gap, ended_by=name + launched + called.get(thread, thread), host=called.get(doer, doer) + colon + what,
            work=tuple(replace(work, thread=called.get(work.thread, work.thread)) for work in idle_gap.work)))
    return tuple(out)

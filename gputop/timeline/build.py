"""Writes the file of a timeline, from a trace and its analysis."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from gputop.advice.trace.facts import TraceFacts
from gputop.core.errors import GputopError
from gputop.text.units import printable
from gputop.timeline.idle_gaps import PER_CAUSE, IdleGaps, RankedIdleGap, rank_idle_gaps
from gputop.timeline.layout import Description, Writer
from gputop.timeline.model import IdleGap
from gputop.timeline.rows import Rows, rows_of, tracks
from gputop.trace.intervals import Spans
from gputop.trace.model import I64, Trace

_LAUNCHED_BY = ", launched by "


def build(facts: TraceFacts, file: BinaryIO) -> None:
    """Write the timeline to an open, seekable file that is empty.

    Raises GputopError where the disk is full.
    """
    rows = rows_of(facts.trace, facts.steps, facts.analysis.critical_path)
    found = rank_idle_gaps(facts, per_cause=PER_CAUSE)
    try:
        _write(facts, rows, found, Writer(file))
    except OSError as error:
        raise GputopError(f"The timeline could not be written: {error.strerror or error}",
                          "Free some space, or set TMPDIR to a folder with more: a million events take about 60 MB."
                          ) from error


def _write(facts: TraceFacts, rows: Rows, found: IdleGaps, out: Writer) -> None:
    trace, device, host = facts.trace, facts.trace.device, facts.trace.host
    parts = ((device, rows.of_device), (host, rows.of_host), (host, rows.of_stage))
    spans, ops = rows.spans, [op.op_name for op in trace.hlo_ops]
    out.column("start", np.int64, (*(events.start_ns[place] for events, place in parts), spans.start))
    out.column("end", np.int64, (*(events.end_ns[place] for events, place in parts), spans.end))
    out.column("name", np.int32, (*(events.name[place] for events, place in parts),
                                  spans.name + len(trace.names) + len(ops)))
    out.column("kind", np.uint8, [rows.kind])
    out.column("level", np.float32, [spans.level])
    out.column("depth", np.uint16, [rows.depth])
    out.column("op", np.int32, [_ops(trace)[rows.of_device]])
    out.column("link", np.int32, _links(trace, rows))
    tracks_of_rows = _tracks(trace, rows, out)
    shown = [printable(name) for name in (*trace.names, *ops, *spans.names)]
    for column, texts in (("text", shown), ("folded", [text.casefold() for text in shown])):
        raw = [text.encode("utf-8", "replace") + b"\n" for text in texts]
        out.column(column, np.uint8, [np.frombuffer(b"".join(raw), np.uint8)])
        out.column(f"{column}_end", np.int64, [np.cumsum([len(text) for text in raw], dtype=np.int64)])
    bounds = facts.steps.bounds_ns if facts.steps is not None else ()
    out.column("steps", np.int64, [np.array(bounds, np.int64).ravel()])
    out.finish(Description(
        window_ns=trace.window_ns, paths=tuple(map(printable, trace.paths)), simulated=trace.simulated,
        events=trace.event_count,
        quality=tuple((note.id, printable(note.message)) for note in facts.analysis.trace.quality),
        rows=tuple(rows.rows), bounds=rows.bounds, streams=rows.streams,
        idle_gaps=_with_ends(trace, found.ranked, rows), idle_totals=found.totals, basis=facts.basis,
        period_s=facts.period_s, no_counters=printable(rows.no_counters), **tracks_of_rows))


def _tracks(trace: Trace, rows: Rows, out: Writer) -> dict[str, Any]:
    """Write when each row shows something, in total and by kind, as tracks of spans with the time covered before each.

    Returns for each row its track and the tracks of its kinds, and where each track begins. A row of one kind has one
    track, and a GPU with one stream has that stream's.
    """
    spans: list[Spans] = []
    known: dict[tuple[int, ...], tuple[int, list[tuple[int, int]]]] = {}
    for row in rows.rows:
        own = tuple(rows.streams.get(row.key, [row.key]))
        if own in known:
            continue
        events = [np.arange(*rows.bounds[key]) for key in own]
        whole, kinds = tracks(*_times(trace, rows, np.concatenate(events)))
        first = len(spans)
        spans.append(whole)
        of_kind = []
        for code, part in kinds:
            if part is not whole:
                spans.append(part)
            of_kind.append((code, first if part is whole else len(spans) - 1))
        known[own] = first, of_kind
    of_row = [known[tuple(rows.streams.get(row.key, [row.key]))] for row in rows.rows]
    out.column("span_start", np.int64, (s.start for s in spans))
    out.column("span_end", np.int64, (s.end for s in spans))
    out.column("span_before", np.int64, (np.cumsum(s.end - s.start) - (s.end - s.start) for s in spans))
    return {"all": [first for first, _ in of_row], "kinds": [of_kind for _, of_kind in of_row],
            "edges": np.cumsum([0, *(len(s.start) for s in spans)]).tolist()}


def _times(trace: Trace, rows: Rows, events: I64) -> tuple[I64, I64, npt.NDArray[np.uint8]]:
    """Start, end and kind of these events of the file, which are all of one part of it."""
    n, m = len(rows.of_device), len(rows.of_device) + len(rows.of_host)
    if events[0] >= m + len(rows.of_stage):
        own = events - m - len(rows.of_stage)
        return rows.spans.start[own], rows.spans.end[own], rows.kind[events]
    if events[0] < n:
        place = rows.of_device[events]
        return trace.device.start_ns[place], trace.device.end_ns[place], rows.kind[events]
    place = rows.of_host[events - n] if events[0] < m else rows.of_stage[events - m]
    return trace.host.start_ns[place], trace.host.end_ns[place], rows.kind[events]


def _links(trace: Trace, rows: Rows) -> Iterator[npt.NDArray]:
    """For each device event the launch among the host's events, and the other way round; -1 where there is none.

    The launch is the event of its thread with the start and end that the trace gives; where none has that end, the
    innermost with that start. An event that launched several is linked to the first.
    """
    device, host = trace.device, trace.host
    n, starts = len(rows.of_device), host.start_ns[rows.of_host]
    to_host, to_device = np.full(n, -1, np.int64), np.full(len(starts), -1, np.int64)
    line = device.launch_line[rows.of_device]
    by_thread = np.argsort(line, kind="stable")
    ends_known = len(device.launch_end_ns) == len(device)
    for row, (first, last) in zip(rows.rows, rows.bounds, strict=True):
        if row.kind != "thread":
            continue
        first, last = first - n, last - n
        thread = host.line[rows.of_host[first]]
        known = by_thread[slice(*np.searchsorted(line, (thread, thread + 1), sorter=by_thread))]
        wanted, own = device.launch_ns[rows.of_device[known]], starts[first:last]
        at = np.searchsorted(own, wanted, side="right") - 1
        there = (at >= 0) & (own[np.maximum(at, 0)] == wanted)
        known, at = known[there], at[there]
        if ends_known:
            at = _ending(own, host.end_ns[rows.of_host[first:last]], at, device.launch_end_ns[rows.of_device[known]])
        to_host[known] = n + first + at
        later_first = np.argsort(-device.start_ns[rows.of_device[known]], kind="stable")
        to_device[first + at[later_first]] = known[later_first]  # the last one written, the earliest, stays
    yield to_host
    yield to_device
    yield np.full(len(rows.of_stage) + len(rows.spans.start), -1, np.int64)


def _ops(trace: Trace) -> npt.NDArray:
    """For each device event its op, as index into the file's names: XLA's by their scopes, where they are known."""
    device = trace.device
    if not trace.hlo_ops:
        return device.tf_op
    named = np.array([bool(op.op_name) for op in trace.hlo_ops] + [False])  # the last one answers for no op
    return np.where(named[device.hlo], device.hlo + len(trace.names), device.tf_op)


def _ending(starts: I64, ends: I64, at: I64, end: I64) -> I64:
    """Of the events with the same start the innermost with that end; the innermost of all if none has it."""
    found, place = at.copy(), at.copy()
    open_ = np.flatnonzero(ends[at] != end)
    while len(open_):
        place[open_] -= 1
        open_ = open_[(place[open_] >= 0) & (starts[np.maximum(place[open_], 0)] == starts[at[open_]])]
        fits = ends[place[open_]] == end[open_]
        found[open_[fits]] = place[open_[fits]]
        open_ = open_[~fits]
    return found


def _with_ends(trace: Trace, found: list[RankedIdleGap], rows: Rows) -> tuple[IdleGap, ...]:
    """The idle gaps; the device event that ended one becomes the (row, index) of its range, threads are called as their
    rows."""
    called = {printable(trace.lines[line].name): printable(name) for line, name in rows.threads.items()}
    place = np.empty(len(rows.of_device), np.int64)
    place[rows.of_device] = np.arange(len(place))
    first = np.array([rows.bounds[row.key][0] if row.kind == "stream" else -1 for row in rows.rows])
    streams = np.flatnonzero(first >= 0)  # in the order of the file
    out = []
    for idle_gap, event in found:
        if event is not None:
            row = int(streams[np.searchsorted(first[streams], place[event], side="right") - 1])
            idle_gap = replace(idle_gap, ends=(row, int(place[event] - first[row])))
        name, launched, thread = idle_gap.ended_by.rpartition(_LAUNCHED_BY)
        doer, colon, what = idle_gap.host.partition(": ")
        out.append(replace(
            idle_gap, ended_by=name + launched + called.get(thread, thread), host=called.get(doer, doer) + colon + what,
            work=tuple(replace(work, thread=called.get(work.thread, work.thread)) for work in idle_gap.work)))
    return tuple(out)

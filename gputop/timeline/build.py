"""From a trace and its analysis to the file of its timeline."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from gputop.errors import GputopError
from gputop.text import printable, seconds
from gputop.timeline.bubbles import Found, coldest
from gputop.timeline.layout import Writer
from gputop.timeline.rows import Rows, rows_of, tracks
from gputop.trace.intervals import Spans
from gputop.trace.model import I64, Trace
from gputop.trace.results import Analysis

_LARGEST = np.iinfo(np.int64).max


def build(trace: Trace, analysis: Analysis, file: BinaryIO) -> None:
    """Write the timeline to an open, seekable file that is empty.

    Raises GputopError where the disk is full or the trace's times cannot be drawn.
    """
    rows = rows_of(trace)
    found = coldest(trace, analysis)
    try:
        _write(trace, analysis, rows, found, Writer(file))
    except OSError as error:
        raise GputopError(f"The timeline could not be written: {error.strerror or error}",
                          "Free some space, or set TMPDIR to a folder with more: a million events take about 60 MB."
                          ) from error


def _write(trace: Trace, analysis: Analysis, rows: Rows, found: list[Found], out: Writer) -> None:
    device, host = trace.device, trace.host
    parts = ((device, rows.of_device), (host, rows.of_host), (host, rows.of_stage))
    out.column("start", np.int64, (events.start_ns[place] for events, place in parts))
    out.column("end", np.int64, (events.end_ns[place] for events, place in parts))
    out.column("name", np.int32, (events.name[place] for events, place in parts))
    out.column("kind", np.uint8, [rows.kind])
    out.column("depth", np.uint16, [rows.depth])
    out.column("op", np.int32, [device.tf_op[rows.of_device]])
    out.column("link", np.int32, _links(trace, rows))
    window = trace.window_ns
    told = _tracks(trace, rows, window, out)
    shown = [printable(name) for name in trace.names]
    for column, texts in (("text", shown), ("folded", [text.casefold() for text in shown])):
        raw = [text.encode("utf-8", "replace") + b"\n" for text in texts]
        out.column(column, np.uint8, [np.frombuffer(b"".join(raw), np.uint8)])
        out.column(f"{column}_end", np.int64, [np.cumsum([len(text) for text in raw], dtype=np.int64)])
    bounds = analysis.steps.bounds_ns if analysis.steps else ()
    out.column("steps", np.int64, [np.array(bounds, np.int64).ravel()])
    out.finish({
        "window_ns": window, "paths": [printable(path) for path in trace.paths], "simulated": trace.simulated,
        "events": trace.event_count, "quality": [[note.id, printable(note.message)] for note in analysis.quality],
        "rows": [asdict(row) for row in rows.rows], "bounds": rows.bounds,
        "streams": {str(gpu): own for gpu, own in rows.streams.items()}, **told,
        "bubbles": _with_ends(found, rows),
    })


def _tracks(trace: Trace, rows: Rows, window: tuple[int, int], out: Writer) -> dict[str, Any]:
    """Write when each row shows something, all and by kind, as tracks of spans with what is covered before each.

    All tracks lie on one line, each ``stride`` after the one before, so that one search serves all of them. Describes
    for each row its track and those of its kinds; a row of one kind has one track.
    """
    stride = window[1] - window[0] + 1
    all_of: list[int] = []
    by_kind: list[list[tuple[int, int]]] = []
    spans: list[Spans] = []
    for row in rows.rows:
        own = rows.streams.get(row.key, [row.key])
        events = [np.arange(*rows.bounds[key]) for key in own if rows.bounds[key][1] > rows.bounds[key][0]]
        whole, kinds = tracks(*_times(trace, rows, np.concatenate(events)))
        all_of.append(len(spans))
        spans.append(whole)
        by_kind.append([])
        for code, part in kinds:
            if part is not whole:
                spans.append(part)
            by_kind[-1].append((code, len(spans) - 1))
    if (len(spans) + 1) * stride >= _LARGEST:
        raise GputopError(f"The trace's times are up to {seconds(stride / 1e9)} apart; that cannot be drawn.",
                          "A clock was wrong, or the file is damaged.")
    out.column("span_start", np.int64, (s.start - window[0] + i * stride for i, s in enumerate(spans)))
    out.column("span_end", np.int64, (s.end - window[0] + i * stride for i, s in enumerate(spans)))
    out.column("span_before", np.int64, (np.cumsum(s.end - s.start) - (s.end - s.start) for s in spans))
    return {"stride": stride, "all": all_of, "kinds": by_kind,
            "edges": np.cumsum([0, *(len(s.start) for s in spans)]).tolist()}


def _times(trace: Trace, rows: Rows, events: I64) -> tuple[I64, I64, npt.NDArray[np.uint8]]:
    """Start, end and kind of these events of the file, all of one of its parts."""
    n, m = len(rows.of_device), len(rows.of_device) + len(rows.of_host)
    if events[0] < n:
        own, place = trace.device, rows.of_device[events]
        return own.start_ns[place], own.end_ns[place], rows.kind[events]
    place = rows.of_host[events - n] if events[0] < m else rows.of_stage[events - m]
    return trace.host.start_ns[place], trace.host.end_ns[place], rows.kind[events]


def _links(trace: Trace, rows: Rows) -> Iterator[npt.NDArray]:
    """For each device event the launch among the host's events, and the other way round; -1 where there is none.

    The launch is the event of its thread that begins and ends as the trace says; where none ends so, the innermost
    that begins then. What launched several has a link to the first.
    """
    device, host = trace.device, trace.host
    n = len(rows.of_device)
    thread = np.full(len(trace.lines) + 1, -1, np.int64)
    lines = host.line[rows.of_host]
    first = np.flatnonzero(np.diff(lines, prepend=-1)) if len(lines) else np.empty(0, np.int64)
    thread[lines[first]] = np.arange(len(first))
    low, high = trace.window_ns
    stride = high - low + 1
    keys = thread[lines] * stride + host.start_ns[rows.of_host] - low
    launch, line = device.launch_ns[rows.of_device], device.launch_line[rows.of_device]
    known = np.flatnonzero((launch >= low) & (launch <= high) & (thread[line] >= 0))
    wanted = thread[line[known]] * stride + launch[known] - low
    at = np.searchsorted(keys, wanted, side="right") - 1
    there = (at >= 0) & (keys[np.maximum(at, 0)] == wanted)
    known, at, wanted = known[there], at[there], wanted[there]
    if len(device.launch_end_ns) == len(device) and len(at):
        at = _ending(host.end_ns[rows.of_host], keys, at, wanted, device.launch_end_ns[rows.of_device[known]])
    to_host, to_device = np.full(n, -1, np.int64), np.full(len(rows.of_host), -1, np.int64)
    to_host[known] = n + at
    later_first = np.argsort(-device.start_ns[rows.of_device[known]], kind="stable")
    to_device[at[later_first]] = known[later_first]  # the last written counts: the earliest
    yield to_host
    yield to_device
    yield np.full(len(rows.of_stage), -1, np.int64)


def _ending(ends: I64, keys: I64, at: I64, wanted: I64, end: I64) -> I64:
    """From the innermost event out, the first with that end among those that begin at once; the innermost if none."""
    found, place = at.copy(), at.copy()
    open_ = np.flatnonzero(ends[at] != end)
    while len(open_):
        place[open_] -= 1
        open_ = open_[(place[open_] >= 0) & (keys[np.maximum(place[open_], 0)] == wanted[open_])]
        fits = ends[place[open_]] == end[open_]
        found[open_[fits]] = place[open_[fits]]
        open_ = open_[~fits]
    return found


def _with_ends(found: list[Found], rows: Rows) -> list[dict[str, Any]]:
    """The bubbles as JSON; the device event that ended one becomes the (row, index) of its range."""
    place = np.empty(len(rows.of_device), np.int64)
    place[rows.of_device] = np.arange(len(place))
    first = np.array([rows.bounds[row.key][0] if row.kind == "stream" else -1 for row in rows.rows])
    streams = np.flatnonzero(first >= 0)  # in the order of the file
    out = []
    for bubble, event in found:
        told = asdict(bubble)
        if event is not None:
            row = int(streams[np.searchsorted(first[streams], place[event], side="right") - 1])
            told["ends"] = (row, int(place[event] - first[row]))
        out.append(told)
    return out

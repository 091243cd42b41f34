"""Recording of CUDA and HIP graphs: launches in between run nothing."""

from __future__ import annotations

import numpy as np

from gputop.trace.intervals import EMPTY, Spans, merge, union
from gputop.trace.lookups import Mask, by_line, host_rows, name_mask
from gputop.trace.model import I64, Trace

GRAPH_LAUNCH = r"(?:cuda|cu|hip)GraphLaunch"
_BEGINS, _ENDS = r"(?:cuda|cu|hip)StreamBeginCapture", r"(?:cuda|cu|hip)StreamEndCapture"
_MADE = r"(?:cuda|cu|hip)GraphInstantiate"


def uses_graphs(trace: Trace) -> bool:
    """Return whether graphs are launched or recorded."""
    return bool(name_mask(trace, f"{GRAPH_LAUNCH}|{_BEGINS}").any())


def in_captures(trace: Trace, rows: I64) -> Mask:
    """Mask of these host events that lie in the capture of a graph on their thread."""
    host, inside = trace.host, np.zeros(len(rows), bool)
    begins, ends = host_rows(trace, _BEGINS), host_rows(trace, _ENDS)
    for line in np.unique(host.line[np.concatenate((begins, ends))]).tolist():
        begin, end = (host.start_ns[events[host.line[events] == line]] for events in (begins, ends))
        begun_before = len(end) > 0 and (not len(begin) or end[0] < begin[0])  # before the recording
        begun, ended = (np.searchsorted(times, host.start_ns[rows]) for times in (begin, end))
        inside |= (host.line[rows] == line) & (begun + begun_before > ended)
    return inside


def recordings(trace: Trace) -> tuple[Spans, I64]:
    """Spans from the begin of each capture to the end of the instantiation that follows on its thread (of the capture,
    where none does), or of the instantiation alone where nothing is captured; and when graphs were instantiated."""
    host = trace.host
    begun, made, ended = (host_rows(trace, name) for name in (_BEGINS, _MADE, _ENDS))
    spans = EMPTY
    begun_on, ended_on = (by_line(host.line[rows]) if len(rows) else {} for rows in (begun, ended))
    for line, places in (by_line(host.line[made]).items() if len(made) else ()):
        on_line, starts = made[places], host.start_ns[begun[begun_on.get(line, [])]]
        ends = host.end_ns[on_line]
        # The first capture after the instantiation before.
        first = np.searchsorted(starts, np.concatenate(([np.iinfo(np.int64).min], ends[:-1])))
        has_capture = first < len(starts)
        start = host.start_ns[on_line].copy()
        start[has_capture] = np.minimum(starts[first[has_capture]], start[has_capture])
        spans = merge(spans, union(start, ends))
    for line, places in begun_on.items():
        starts, ends = host.start_ns[begun[places]], host.end_ns[ended[ended_on.get(line, [])]]
        next_end = np.searchsorted(ends, starts)
        closed = next_end < len(ends)
        spans = merge(spans, union(starts[closed], ends[next_end[closed]]))
    return spans, host.start_ns[made]

"""Each instant of a GPU's time given to one device event: the work to what does it, the wait to what ends it.

The rules are those of the step's parts (``analysis/gpu/breakdown.py``): compute comes before collectives, those before
copies from and then to the host. Of two events of one kind that run at once, the instant counts for the one that began
first. So the sums over all events are the parts of the step, whatever runs side by side.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from gputop.analysis.gpu.device_time import GpuTimeline
from gputop.trace.intervals import Spans, coverage, intersect, merge, union
from gputop.trace.model import I64, U8, Kind, Trace

COMPUTE, COLLECTIVES, COPIES = range(3)  # what a device event is
_PRIORITY = ((COMPUTE, (Kind.COMPUTE, Kind.D2D, Kind.MEMSET, Kind.COPY_OTHER)),
             (COLLECTIVES, (Kind.COLLECTIVE, Kind.P2P)), (COPIES, (Kind.H2D,)), (COPIES, (Kind.D2H,)))


class DeviceShare(NamedTuple):
    """The events of one GPU: their rows, what they are, and the time within some spans that each gets."""

    rows: I64
    kind: U8  # COMPUTE, COLLECTIVES or COPIES
    busy_ns: I64
    wait_ns: I64  # idle before it
    rest_ns: int  # idle after the last of them


def device_share(trace: Trace, timeline: GpuTimeline, within: Spans) -> DeviceShare:
    """The time of a GPU within ``within``, given to its events."""
    device, rows = trace.device, timeline.rows
    start, end, kinds = timeline.start_ns, timeline.end_ns, device.kind[rows]
    busy = np.zeros(len(rows), np.int64)
    kind = np.zeros(len(rows), np.uint8)
    sets = ((timeline.compute, timeline.other), (timeline.collectives, timeline.p2p), (timeline.h2d,))
    earlier: list[Spans] = []  # what goes before a kind
    count_by_kind = np.bincount(kinds, minlength=len(Kind))
    for number, (what, members) in enumerate(_PRIORITY):
        earlier += sets[number - 1] if number else ()
        if not count_by_kind[list(members)].any():
            continue
        of_kind = np.zeros(len(Kind), bool)
        of_kind[list(members)] = True
        indices = np.flatnonzero(of_kind[kinds])
        everything = len(indices) == len(rows)
        first, last = (start, end) if everything else (start[indices], end[indices])
        until = np.maximum.accumulate(last)
        begin = first.copy()
        np.maximum(begin[1:], until[:-1], out=begin[1:])
        stop = np.maximum(begin, until)
        kind[indices] = what
        busy[indices] = coverage(within, begin, stop)
        if number:
            covered = intersect(union(begin, stop), within)
            hidden = merge(*(intersect(covered, spans) for spans in earlier))
            busy[indices] -= coverage(hidden, begin, stop)
    gaps = timeline.gaps
    lo, hi = timeline.window_ns
    bounds = Spans(np.concatenate((within.start[:1], gaps.start)), np.concatenate(([lo], gaps.end)))
    wait = np.zeros(len(rows), np.int64)
    idle = coverage(within, bounds.start, np.maximum(bounds.start, bounds.end))
    wait[gaps.resumes] = idle[1:]  # no two gaps end with one event
    wait[np.searchsorted(start, lo)] += idle[0]
    rest = int(coverage(within, [hi], [max(hi, int(within.end[-1]))])[0]) if len(within.end) else 0
    return DeviceShare(rows, kind, busy, wait, rest)

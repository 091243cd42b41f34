"""Calls in the middle of which a launching thread stopped: it had no CPU then, or waited for another thread's lock."""

from __future__ import annotations

import numpy as np

from gputop.analysis.gpu.device_time import GpuTimeline, launching_to
from gputop.trace.intervals import Spans
from gputop.trace.lookups import distinct, host_rows, launching_lines, numbered, spans_of
from gputop.trace.model import I64, Trace, once
from gputop.trace.nesting import nest

# Ops and calls that are no wait for a GPU, no allocation and no loading, which may take as long any time.
_CALLS = (r"(?:aten|c10d)::(?!.*(?:item|_local_scalar|nonzero|wait|barrier))|"
          r"(?:cu|cuda|hip)(?!\w*(?:Sync|Mem|Malloc|Free|Alloc|Host|Module|Library|Graph|Init|Device|Func))[A-Z]")
# Such a call itself takes so long, and so many times as long as it does usually, of so many; of so many kinds, as a
# thread stops anywhere, and no kind takes most of the time. For longer no thread lacks a CPU. gputop's own figures.
_LEAST_NS, _LONGEST_NS, _TIMES, _OF_KIND, _KINDS, _MOST = 1_000_000, 100_000_000, 20, 10, 5, 0.5


@once
def interrupted(trace: Trace) -> I64:
    """Rows of those calls, in order; none where they are of few kinds, so that a kind may be the reason."""
    host, rows = trace.host, host_rows(trace, _CALLS)
    length = host.end_ns[rows] - host.start_ns[rows]
    if len(distinct(host.name[rows[length >= _LEAST_NS]])) < _KINDS:  # what follows takes memory for each call
        return rows[:0]
    launches = np.isin(host.line[rows], launching_lines(trace))
    rows, length = rows[launches], length[launches]
    self_ns = nest(host.line[rows], host.start_ns[rows], host.end_ns[rows], host.name[rows], trace.names).own(length)
    _, kind = numbered(host.name[rows])
    stopped = (self_ns >= _LEAST_NS) & (self_ns <= _LONGEST_NS) & (2 * self_ns >= length)
    for number in distinct(kind[stopped]).tolist():
        mine = np.flatnonzero(kind == number)
        usual_ns = np.partition(self_ns[mine], half := len(mine) // 2)[half]
        stopped[mine] &= len(mine) >= _OF_KIND and self_ns[mine] >= _TIMES * usual_ns
    by_kind = np.bincount(kind[stopped], self_ns[stopped])
    few = np.count_nonzero(by_kind) < _KINDS or by_kind.max() > _MOST * by_kind.sum()
    return rows[:0] if few else rows[stopped]


def interruptions(trace: Trace, timeline: GpuTimeline) -> Spans:
    """Spans in which a thread that launches to this GPU stands still in such calls."""
    rows = interrupted(trace)
    return spans_of(trace, rows[launching_to(trace, timeline)[trace.host.line[rows]]])

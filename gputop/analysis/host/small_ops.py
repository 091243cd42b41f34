"""Small ops of PyTorch that Python starts one by one on the CPU, and the pauses between them.

An op of PyTorch takes 1 to 10 µs before it computes (dispatch, autograd, allocation), and Python some more until the
next one. What takes no longer than ``SMALL_NS``, and ``NESTED_NS`` for each op within it, hardly computes. Ops that lie
in another one count as that one's part, and what torch.compile has compiled is no op: its kernels have no events.
"""

from __future__ import annotations

import numpy as np
from msgspec import Struct

from gputop.trace.intervals import EMPTY, Spans, merge, subtract, union
from gputop.trace.lookups import Mask, host_rows, outermost_rows, spans_of
from gputop.trace.model import I64, Trace

# An op that takes longer computes for most of its time; a longer pause is Python's own work. gputop's own figures.
SMALL_NS, NESTED_NS, PAUSE_NS = 20_000, 5_000, 100_000
_OP = r"(?!autograd::|c10d::|record_param_comms)[\w.]+::\S"
_COMPILED = r"Torch-Compiled Region|CompiledFunction"


class SmallOps(Struct, frozen=True):
    """``rows`` are the host events of the ops, ``spans`` when they run and pass on to the next one; ``of`` how many ops
    there are in all, small and large."""

    rows: I64
    spans: Spans
    of: int


def small_ops(trace: Trace, lines: Mask) -> SmallOps:
    host, rows_of_lines, spans, count = trace.host, [], EMPTY, 0
    ops = host_rows(trace, _OP, lines)
    for line in np.unique(host.line[ops]).tolist():
        every = ops[host.line[ops] == line]
        rows = outermost_rows(trace, every)
        start, end, count = host.start_ns[rows], host.end_ns[rows], count + len(rows)
        begun = np.searchsorted(np.sort(host.start_ns[every]), (start, end))
        small = end - start <= SMALL_NS + NESTED_NS * (begun[1] - begun[0] - 1)
        pause = start[1:] - end[:-1]
        passes_on = (pause <= PAUSE_NS) & (small[1:] | small[:-1])
        rows_of_lines.append(rows[small])
        spans = merge(spans, union(start[small], end[small]), union(end[:-1][passes_on], start[1:][passes_on]))
    if not rows_of_lines:
        return SmallOps(ops[:0], EMPTY, 0)
    spans = subtract(spans, spans_of(trace, host_rows(trace, _COMPILED, lines)))
    return SmallOps(np.sort(np.concatenate(rows_of_lines)), spans, count)

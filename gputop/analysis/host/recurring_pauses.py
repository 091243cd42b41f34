"""Pauses of a PyTorch loop that come at the same place of its steps, and those that come anywhere.

Python that belongs to the loop pauses its ops at the same place in each step. A thread that has no CPU, or that waits
for another thread's turn with Python's lock, pauses anywhere.
"""

from __future__ import annotations

import numpy as np

from gputop.analysis.steps.model import Steps
from gputop.analysis.steps.pytorch_ops import outer_ops
from gputop.trace.intervals import Spans
from gputop.trace.lookups import host_rows
from gputop.trace.model import I64, Trace
from gputop.trace.threads import MAIN, busiest_line, lines_of

_RECURRING_SHARE = 0.5  # share of the steps that have a pause at this place. gputop's own figure
_OF_USUAL = 2.0  # times the median pause of a place; longer is what came on top. gputop's own figure


def recurring_share(trace: Trace, steps: Steps, pauses: Spans,
                    process: tuple[str, int | None] | None = None) -> float | None:
    """The share of this time in recurring pauses; None without pauses or ops. ``process``: the host and rank whose
    pauses these are, if of one.

    Of a pause that is longer than ``_OF_USUAL`` of the usual one at its place, only that much counts: a thread may lose
    its CPU where a short pause comes in each step.
    """
    chosen = recurring_pauses(trace, steps, pauses, process)
    if chosen is None:
        return None
    recurring, places = chosen
    order = np.argsort(places, kind="stable")
    length = (recurring.end - recurring.start)[order]
    of_places = np.split(length, np.flatnonzero(np.diff(places[order])) + 1) if len(places) else []
    counted = [float(np.minimum(lengths, _OF_USUAL * np.median(lengths)).sum()) for lengths in of_places]
    return sum(counted) / pauses.total


def recurring_pauses(trace: Trace, steps: Steps, pauses: Spans,
                     process: tuple[str, int | None] | None = None) -> tuple[Spans, I64] | None:
    """Pauses that come in most steps, after the same op and before the same op, counted from the step's begin, and a
    number for the place of each; None without pauses or ops."""
    host = trace.host
    lines = lines_of(trace, MAIN)
    if process is not None:
        lines &= np.array([line.host == process[0] and process[1] in (None, line.rank) for line in trace.lines], bool)
    rows = host_rows(trace, r"aten::", lines)
    if not len(rows) or not pauses.total:
        return None
    ops = outer_ops(trace, busiest_line(trace, host.line[rows]))
    edges = steps.edges_ns
    step = np.searchsorted(edges[:, 0], ops.start, side="right") - 1
    # Each op with the one before it, and how often that pair came before in its step.
    pair = np.concatenate(([-1], ops.name[:-1].astype(np.int64) * (len(trace.names) + 1) + ops.name[1:]))
    order = np.lexsort((np.arange(len(pair)), pair, step))
    new = np.concatenate(([True], (np.diff(pair[order]) != 0) | (np.diff(step[order]) != 0)))
    begin = np.flatnonzero(new)
    number = np.empty(len(pair), np.int64)
    number[order] = np.arange(len(pair)) - np.repeat(begin, np.diff(np.append(begin, len(pair))))
    after = np.searchsorted(ops.start, pauses.start)  # the op that ends each pause
    before_op = after < len(ops.start)
    key = np.stack((pair[after[before_op]], number[after[before_op]]), axis=1)
    places, which = np.unique(key, axis=0, return_inverse=True)
    of_step = np.searchsorted(edges[:, 0], pauses.start[before_op], side="right") - 1
    seen = np.unique(np.stack((which.reshape(-1), of_step), axis=1), axis=0)[:, 0]
    often = np.bincount(seen, minlength=len(places)) >= _RECURRING_SHARE * steps.count
    recurs = often[which.reshape(-1)]
    chosen = np.flatnonzero(before_op)[recurs]
    return Spans(pauses.start[chosen], pauses.end[chosen]), which.reshape(-1)[recurs]

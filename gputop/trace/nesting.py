"""Nested events: which call of a thread ran within which, and what each did itself."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from gputop.trace.lookups import FEW_LINES, alphabetical, by_line, rows_of, stable_order
from gputop.trace.model import I64, HostEvents


class Nesting(Struct, frozen=True):
    """Nesting of events: which event of a line lies directly inside which.

    ``parent`` holds a row for each row, -1 for outermost events and for those of no length, which
    are ignored. Two events of one line are nested or apart, as calls of a thread are.
    """

    parent: I64

    def own(self, values: npt.NDArray) -> npt.NDArray:
        """Each event's own part of an additive figure (a length, a coverage): less that of events directly inside."""
        inner = np.flatnonzero(self.parent >= 0)
        if not len(inner):
            return np.maximum(values, 0)
        inside = np.bincount(self.parent[inner], weights=values[inner], minlength=len(values))
        # Sums of integers below 2**53 are exact; events that overlap without nesting must not yield less than nothing.
        return np.maximum(values - inside.astype(np.int64), 0)

    def holder(self, passes_on: npt.NDArray[np.bool_]) -> I64:
        """Nearest event, itself or around it, that does not pass on, for each event; if all do, the outermost."""
        holder = np.arange(len(self.parent))
        while passes_on.any():
            up = self.parent[holder]
            moves = passes_on[holder] & (up >= 0)
            if not moves.any():
                return holder
            holder = np.where(moves, up, holder)
        return holder


def nest(line: npt.NDArray, start: I64, end: I64, name: npt.NDArray, names: Sequence[str]) -> Nesting:
    """The nesting of events in any order. Of two with the same start and end the first by name is outside."""
    n = len(start)
    parent = np.full(n, -1, np.int64)
    lasting = rows_of(end > start)
    if (start[lasting][1:] >= end[lasting][:-1]).all():  # one after the other
        return Nesting(parent)
    rows = nesting_order(line[lasting], start[lasting], end[lasting], name[lasting], names)
    rows = rows if isinstance(lasting, slice) else lasting[rows]
    depth = depths(line[rows], start[rows], end[rows])
    if not depth.any():
        return Nesting(parent)
    by_depth = stable_order(depth)
    bounds = np.searchsorted(depth[by_depth], np.arange(int(depth.max()) + 2))
    for level in range(1, len(bounds) - 1):
        outer = by_depth[bounds[level - 1]:bounds[level]]
        inner = by_depth[bounds[level]:bounds[level + 1]]
        parent[rows[inner]] = rows[outer[np.searchsorted(outer, inner) - 1]]
    return Nesting(parent)


def depths(line: npt.NDArray, start: I64, end: I64) -> I64:
    """Number of earlier events of its line that are still open at each event; events in :func:`nesting_order`."""
    depth = np.empty(len(start), np.int64)
    edges = [0, *(np.flatnonzero(np.diff(line)) + 1).tolist(), len(start)]
    if len(edges) > FEW_LINES and len(edges) * (span := int(end.max()) - int(start.min()) + 1) < 1 << 62:
        # One line after the other on one axis, so that all are searched at once.
        moved = np.repeat(np.arange(len(edges) - 1), np.diff(edges)) * span - start.min()
        lasts = end > start
        ends = np.sort((end + moved)[lasts])
        return np.cumsum(lasts) - lasts - np.searchsorted(ends, start + moved, side="right")
    for first, last in pairwise(edges):
        if (start[first + 1:last] >= end[first:last - 1]).all():  # one after the other
            depth[first:last] = 0
            continue
        begin, lasts = start[first:last], end[first:last] > start[first:last]
        ends = np.sort(end[first:last][lasts])
        depth[first:last] = np.cumsum(lasts) - lasts - np.searchsorted(ends, begin, side="right")
    return depth


def nesting_order(line: npt.NDArray, start: I64, end: I64, name: npt.NDArray, names: Sequence[str]) -> I64:
    """The order of events by line, start, length (longest first) and name."""
    order = np.argsort(start, kind="stable") if (start[1:] < start[:-1]).any() else np.arange(len(start))
    order = order[stable_order(line[order])]
    begins, of_line = start[order], line[order]
    same = (of_line[1:] == of_line[:-1]) & (begins[1:] == begins[:-1])
    if same.any():
        tied = np.zeros(len(order), bool)
        tied[1:] |= same
        tied[:-1] |= same
        some = order[tied]
        order[tied] = some[np.lexsort((alphabetical(names, name[some]), -end[some], start[some], line[some]))]
    return order


def begun_within(host: HostEvents, rows: I64, line: npt.NDArray, times_ns: I64) -> I64:
    """Number of these times, each on a thread (``line``), that lie within each of these host events on its thread."""
    out, times_on = np.zeros(len(rows), np.int64), by_line(line) if len(rows) else {}
    for thread, places in by_line(host.line[rows]).items():
        times, on_line = np.sort(times_ns[times_on.get(thread, places[:0])]), rows[places]
        out[places] = np.searchsorted(times, host.end_ns[on_line]) - np.searchsorted(times, host.start_ns[on_line])
    return out

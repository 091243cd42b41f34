"""Sets of time as sorted, disjoint, half-open intervals, in NumPy.

A :class:`Spans` holds int64 ``start`` and ``end`` of equal length with
``start[i] < end[i] < start[i + 1]``. Every function here takes and returns that form,
except :func:`union`, which makes it from any pile of intervals. Integers keep sums exact.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from gputop.trace.model import I64


class Spans(NamedTuple):
    """A set of instants: sorted, disjoint and non-touching ``[start, end)``."""

    start: I64
    end: I64

    @property
    def total(self) -> int:
        """Length of the set."""
        return int((self.end - self.start).sum())


EMPTY = Spans(np.empty(0, np.int64), np.empty(0, np.int64))


def union(start: npt.ArrayLike, end: npt.ArrayLike) -> Spans:
    """Merge intervals in any order; those of no or negative length count for nothing."""
    s = np.asarray(start, np.int64)
    e = np.asarray(end, np.int64)
    keep = e > s
    s, e = s[keep], e[keep]
    if not len(s):
        return EMPTY
    order = np.argsort(s, kind="stable")
    s = s[order]
    reach = np.maximum.accumulate(e[order])
    first = np.concatenate(([True], s[1:] > reach[:-1]))
    last = np.concatenate((first[1:], [True]))
    return Spans(s[first], reach[last])


def merge(*sets: Spans) -> Spans:
    """The instants that lie in any of the sets."""
    return union(np.concatenate([s.start for s in sets]), np.concatenate([s.end for s in sets])) if sets else EMPTY


def intersect(a: Spans, b: Spans) -> Spans:
    """The instants that lie in both sets."""
    if not len(a.start) or not len(b.start):
        return EMPTY
    if len(a.start) > len(b.start):
        a, b = b, a  # searching the longer for the shorter takes less
    # Interval i of a meets the run of b's intervals from `first` up to `last`.
    first = np.searchsorted(b.end, a.start, side="right")
    last = np.searchsorted(b.start, a.end, side="left")
    count = np.maximum(last - first, 0)
    which_a = np.repeat(np.arange(len(count)), count)
    offset = np.arange(int(count.sum())) - np.repeat(np.cumsum(count) - count, count)
    which_b = np.repeat(first, count) + offset
    return Spans(np.maximum(a.start[which_a], b.start[which_b]), np.minimum(a.end[which_a], b.end[which_b]))


def complement(a: Spans, lo: int, hi: int) -> Spans:
    """The instants of ``[lo, hi)`` that do not lie in ``a``."""
    inside = slice(np.searchsorted(a.end, lo, side="right"), np.searchsorted(a.start, hi, side="left"))
    start = np.concatenate((np.array([lo], np.int64), a.end[inside]))
    end = np.concatenate((a.start[inside], np.array([hi], np.int64)))
    keep = end > start
    return Spans(start[keep], end[keep])


def subtract(a: Spans, b: Spans) -> Spans:
    """The instants of ``a`` that do not lie in ``b``."""
    if not len(a.start) or not len(b.start):
        return a
    return intersect(a, complement(b, int(a.start[0]), int(a.end[-1])))


def covered_before(a: Spans, at: npt.ArrayLike) -> I64:
    """How much of ``a`` lies before each instant of ``at``."""
    t = np.asarray(at, np.int64)
    if not len(a.start):
        return np.zeros(t.shape, np.int64)
    length = a.end - a.start
    before = np.concatenate((np.zeros(1, np.int64), np.cumsum(length)))
    i = np.searchsorted(a.start, t, side="right")  # intervals that began at or before t
    last = np.maximum(i - 1, 0)
    beyond = np.where(i > 0, np.maximum(a.end[last] - t, 0), 0)
    return before[i] - beyond


def coverage(a: Spans, start: npt.ArrayLike, end: npt.ArrayLike) -> I64:
    """How much of ``a`` lies in each ``[start[i], end[i])``; those may overlap."""
    return covered_before(a, end) - covered_before(a, start)


def joined(a: Spans, reach: int) -> Spans:
    """``a`` with its holes shorter than ``reach`` filled."""
    if not len(a.start):
        return a
    apart = a.start[1:] - a.end[:-1] >= reach
    return Spans(a.start[np.concatenate(([True], apart))], a.end[np.concatenate((apart, [True]))])


def chained(times: npt.ArrayLike, reach: int) -> Spans:
    """From first to last instant of each run of ``times`` in which none is more than ``reach`` after the one before."""
    t = np.sort(np.asarray(times, np.int64))
    if not len(t):
        return EMPTY
    split = np.flatnonzero(np.diff(t) > reach)
    start = t[np.concatenate(([0], split + 1))]
    end = t[np.concatenate((split, [len(t) - 1]))]
    keep = end > start
    return Spans(start[keep], end[keep])

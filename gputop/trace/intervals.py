"""Sets of time as sorted, disjoint, half-open intervals, in NumPy.

A :class:`Spans` holds int64 ``start`` and ``end`` of equal length with
``start[i] < end[i] < start[i + 1]``. Every function here takes and returns that form,
except :func:`union`, which makes it from arbitrary intervals. Integers keep sums exact.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
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
        return int(self.end.sum() - self.start.sum())


_NEG_INF, _POS_INF = -(1 << 62), np.iinfo(np.int64).max
_STEPS, _FEW_DIVISOR = 2, 8  # how often the next interval is tried before the rest is searched; an eighth are few
_FEW_RUNS = 32  # runs of times in order, which are quicker merged than sorted
_LONG_RUN = 64  # intervals that are copied as a whole, not picked out
AT_ONCE = 1 << 15  # instants: what is computed of them stays in a core's cache
EMPTY = Spans(np.empty(0, np.int64), np.empty(0, np.int64))


def union(start: npt.ArrayLike, end: npt.ArrayLike) -> Spans:
    """Merge intervals in any order; those of no or negative length are ignored."""
    s, e = np.asarray(start, np.int64), np.asarray(end, np.int64)
    if not (long := e > s).all():
        keep = np.flatnonzero(long)
        s, e = s[keep], e[keep]
    if not len(s):
        return EMPTY
    # Starts and ends can be sorted separately: start i + 1 is apart from all earlier intervals if end i precedes it.
    s, e = in_order(s), in_order(e)
    if (apart := s[1:] > e[:-1]).all():
        return Spans(s, e)
    cut = np.flatnonzero(apart)
    return Spans(s[np.concatenate(([0], cut + 1))], e[np.append(cut, len(e) - 1)])


def in_order(times: I64) -> I64:
    """``times`` sorted. Made for those that are joined from runs in order, as of several threads or GPUs.

    NumPy's stable sort of integers merges such runs: of 8 and 16 it takes a quarter of the time of the default sort
    without vector instructions, which not every build and processor has, and about as long as with them.
    """
    falls = np.count_nonzero(times[1:] < times[:-1])
    return np.sort(times, kind="stable" if falls < _FEW_RUNS else None) if falls else times


def merge(*sets: Spans) -> Spans:
    """The instants that lie in any of the sets."""
    some = [s for s in sets if len(s.start)]
    if len(some) <= 1:
        return some[0] if some else EMPTY
    *others, longest = sorted(some, key=lambda s: len(s.start))
    if sum(len(s.start) for s in others) <= len(longest.start) // _LONG_RUN:
        # Neither is open in the holes that both have.
        few, lo, hi = merge(*others), min(int(s.start[0]) for s in some), max(int(s.end[-1]) for s in some)
        return complement(intersect(complement(longest, lo, hi), complement(few, lo, hi)), lo, hi)
    if sum(len(s.start) for s in some) > AT_ONCE:
        return _merge_by_parts(some)
    return union(np.concatenate([s.start for s in some]), np.concatenate([s.end for s in some]))


def _merge_by_parts(sets: Sequence[Spans]) -> Spans:
    """The same of many intervals, about ``AT_ONCE`` at a time in the order of their starts."""
    longest = max((s.start for s in sets), key=len)
    stride = max(AT_ONCE * len(longest) // sum(len(s.start) for s in sets), 1)
    places = [(0, *np.searchsorted(s.start, longest[stride::stride]).tolist(), len(s.start)) for s in sets]
    merged, last = [], EMPTY
    for part in zip(*map(pairwise, places), strict=True):
        some = [last, *(Spans(s.start[i:j], s.end[i:j]) for s, (i, j) in zip(sets, part, strict=True))]
        merged_part = union(np.concatenate([s.start for s in some]), np.concatenate([s.end for s in some]))
        # What begins later may touch the last one of these, and no other.
        merged.append(Spans(merged_part.start[:-1], merged_part.end[:-1]))
        last = Spans(merged_part.start[-1:], merged_part.end[-1:])
    merged.append(last)
    return Spans(np.concatenate([s.start for s in merged]), np.concatenate([s.end for s in merged]))


def intersect(a: Spans, b: Spans) -> Spans:
    """The instants that lie in both sets."""
    if not len(a.start) or not len(b.start):
        return EMPTY
    if len(a.start) > len(b.start):
        a, b = b, a
    if len(a.start) == 1:
        return _part(b, int(a.start[0]), int(a.end[0]))
    some = slice(np.searchsorted(b.end, a.start[0], side="right"), np.searchsorted(b.start, a.end[-1]))
    b = Spans(b.start[some], b.end[some])
    if len(b.start) >= _LONG_RUN * len(a.start):
        # Interval i of a meets the run of b's intervals from `first` up to `last`.
        first, last = np.searchsorted(b.end, a.start, side="right"), np.searchsorted(b.start, a.end)
        meets = np.flatnonzero(last > first)
        runs = [slice(i, j) for i, j in zip(first[meets].tolist(), last[meets].tolist(), strict=True)] or [slice(0)]
        start, end = (np.concatenate([column[run] for run in runs]) for column in b)
        stop = np.cumsum((last - first)[meets])
        begin = np.append(0, stop)[:-1]  # only the first and last of a run can extend beyond a's interval
        start[begin] = np.maximum(start[begin], a.start[meets])
        end[stop - 1] = np.minimum(end[stop - 1], a.end[meets])
        return Spans(start, end)
    start, end = _both_open(a, b)
    both = np.flatnonzero(start < end)
    return Spans(start[both], end[both])


def overlap(a: Spans, b: Spans) -> int:
    """Length of the instants that lie in both sets."""
    few, many = sorted((len(a.start), len(b.start)))
    if many >= _LONG_RUN * few:
        return intersect(a, b).total
    start, end = _both_open(a, b)
    end -= start
    return int(np.maximum(end, 0, out=end).sum())


def uncovered(a: Spans, b: Spans) -> int:
    """Length of the instants of ``a`` that do not lie in ``b``."""
    return a.total - overlap(a, b)


def _both_open(a: Spans, b: Spans) -> tuple[I64, I64]:
    """Edges between which both are open, where the first is before the second: the next begin of either, and an end."""
    start, end = np.concatenate((a.start, b.start)), np.concatenate((a.end, b.end))
    start.sort(kind="stable")  # merges the two runs
    end.sort(kind="stable")
    return start[1:], end[:-1]


def _part(a: Spans, lo: int, hi: int) -> Spans:
    """The instants of ``a`` in ``[lo, hi)``; columns that need no change are not copied."""
    some = slice(np.searchsorted(a.end, lo, side="right"), np.searchsorted(a.start, hi))
    start, end = a.start[some], a.end[some]
    return Spans(np.maximum(start, lo) if (start[:1] < lo).any() else start,
                 np.minimum(end, hi) if (end[-1:] > hi).any() else end)


def complement(a: Spans, lo: int, hi: int) -> Spans:
    """The instants of ``[lo, hi)`` that do not lie in ``a``."""
    inside = slice(np.searchsorted(a.end, lo, side="right"), np.searchsorted(a.start, hi, side="left"))
    start = np.concatenate((np.array([lo], np.int64), a.end[inside]))
    end = np.concatenate((a.start[inside], np.array([hi], np.int64)))
    # Only the first and the last can be of no length or less.
    some = slice(int(end[0] <= start[0]), len(end) - int(len(end) > 1 and end[-1] <= start[-1]))
    return Spans(start[some], end[some])


def subtract(a: Spans, b: Spans) -> Spans:
    """The instants of ``a`` that do not lie in ``b``."""
    if not len(a.start) or not len(b.start):
        return a
    return intersect(a, complement(b, int(a.start[0]), int(a.end[-1])))


def contains(a: Spans, times: I64) -> npt.NDArray[np.bool_]:
    """Mask of the instants, in any order, that lie in ``a``."""
    if len(a.start) <= 1:
        return (times >= a.start[:1]) & (times < a.end[:1]) if len(a.start) else np.zeros(len(times), bool)
    ends, out = np.append(_NEG_INF, a.end), np.empty(len(times), bool)
    for i in range(0, len(times), AT_ONCE):
        some = times[i:i + AT_ONCE]
        out[i:i + AT_ONCE] = some < ends.take(np.searchsorted(a.start, some, side="right"))
    return out


def at_or_before(a: I64, t: I64) -> I64:
    """Number of the sorted ``a`` at or before each instant of ``t``."""
    if t.ndim != 1 or len(t) < 4 * len(a) or (t[1:] < t[:-1]).any():
        return np.searchsorted(a, t, side="right")
    # Many instants in order: searching for the few of ``a`` among them is faster.
    return np.repeat(np.arange(len(a) + 1), np.diff(np.searchsorted(t, a), prepend=0, append=len(t)))


def _from(count: I64, a: I64, t: I64) -> I64:
    """Number of the sorted ``a`` at or before each instant of ``t``: ``count`` or more. Mostly it is a few more, which
    are quicker stepped over than searched."""
    if len(t) < len(a) // _FEW_DIVISOR:
        return np.searchsorted(a, t, side="right")
    after = np.append(a, _POS_INF)
    for _ in range(_STEPS):
        more = after.take(count) <= t
        if not more.any():
            return count
        count = count + more
    far = np.flatnonzero(after.take(count) <= t)
    count[far] = np.searchsorted(a, t[far], side="right")
    return count


def coverage(a: Spans, start: npt.ArrayLike, end: npt.ArrayLike) -> I64:
    """Length of ``a`` in each ``[start[i], end[i])``; those may overlap."""
    s, e = np.asarray(start, np.int64), np.asarray(end, np.int64)
    if len(a.start) == 1:
        covered = e.clip(a.start[0], a.end[0])
        covered -= s.clip(a.start[0], a.end[0])
        return covered
    # An empty interval before the first one answers for instants before it.
    ends = np.concatenate((np.array([_NEG_INF]), a.end))
    covered = np.zeros(len(ends), np.int64)
    np.cumsum(a.end - a.start, out=covered[1:])
    if s.ndim != 1 or len(s) <= AT_ONCE or (s[1:] < s[:-1]).any():
        return _coverage(a.start, ends, covered, s, e)
    out = np.empty(len(s), np.int64)
    for i in range(0, len(s), AT_ONCE):
        some = slice(i, i + AT_ONCE)
        first, last = np.searchsorted(a.start, (min(s[i], e[some].min()), max(s[some][-1], e[some].max())), "right")
        out[some] = _coverage(a.start[first:last], ends[first:last + 1], covered[first:last + 1], s[some], e[some])
    return out


def _coverage(starts: I64, ends: I64, covered: I64, s: I64, e: I64) -> I64:
    """The same. ``ends`` and ``covered`` are by number n of intervals that begin at or before an instant: when the last
    of these ends, and how much they cover."""
    before = at_or_before(starts, s)
    until = _from(before, starts, e) if (e >= s).all() else at_or_before(starts, e)
    # What the first n intervals cover, less the part of the last one after the instant.
    out = covered.take(until)
    after = ends.take(until)
    after -= e
    out -= np.maximum(after, 0, out=after)
    out -= covered.take(before)
    after = ends.take(before)
    after -= s
    out += np.maximum(after, 0, out=after)
    return out


def joined(a: Spans, reach: int) -> Spans:
    """``a`` with its holes shorter than ``reach`` filled."""
    wide = union(a.start, a.end + (more := max(reach - 1, 0)))
    return Spans(wide.start, wide.end - more)


def chained(times: Iterable[I64], reach: int) -> Spans:
    """Spans from first to last instant of each run of ``times`` in which none is more than ``reach`` after the one
    before. They come in parts, in any order."""
    runs = merge(EMPTY, *(union(part, part + reach) for part in times))
    keep = np.flatnonzero(runs.end - runs.start > reach)
    return Spans(runs.start[keep], runs.end[keep] - reach)

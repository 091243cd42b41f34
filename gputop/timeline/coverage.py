"""Coverage of each row of a timeline: unions of its ranges, from sums that are there for any zoom."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from gputop.timeline.file_layout import Description
from gputop.timeline.model import KINDS
from gputop.trace.model import I64

_BLOCK = 4096  # rows searched first; each further block is four times as large

class Coverage:
    """The tracks of a timeline: each is a union of ranges, spans in order of time, none over another. A row has one
    track of all its ranges and one of each kind, which together are the former. ``before`` sums the spans of a track up
    to each span, so that what a stretch of time holds is a difference of two."""

    def __init__(self, columns: Mapping[str, npt.NDArray], description: Description) -> None:
        self._start, self._end, self._before = (columns[f"span_{name}"] for name in ("start", "end", "before"))
        self._edges = np.array(description.edges, np.int64)  # of each track: its first span; one more
        self._all, self._kinds = description.all, description.kinds

    def picture(
        self, rows: Sequence[int], start_ns: int, end_ns: int, columns: int,
    ) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.uint8]]:
        """Share of each row and column that ranges cover, and the kind that covers most of it. Both of shape (rows,
        columns): float32 of 0-1, and uint8, an index into KINDS, 0 where nothing is. The columns are equal parts of
        ``start_ns`` to ``end_ns``, of a nanosecond at least."""
        if not len(rows) or columns < 1:
            return np.zeros((len(rows), max(columns, 0)), np.float32), np.zeros((len(rows), max(columns, 0)), np.uint8)
        low, high = column_edges(start_ns, end_ns, columns)
        of_row = [self._kinds[row] for row in rows]
        # A GPU with one stream has that stream's tracks.
        tracks, of_track = np.unique([track for kinds in of_row for _, track in kinds], return_inverse=True)
        covered = self._covered(tracks, low, high)
        first = np.cumsum([0, *(len(kinds) for kinds in of_row)])[:-1]
        covered = covered[of_track]
        share = np.add.reduceat(covered, first, axis=0) / (high - low)
        # The kind with the larger share wins; of equal shares the first, as for ranges that overlap.
        codes = np.array([code for kinds in of_row for code, _ in kinds], np.int64)[:, None]
        precedence = np.array([len(KINDS) - i for kinds in of_row for i, _ in enumerate(kinds)], np.int64)[:, None]
        best = np.maximum.reduceat((covered * (len(KINDS) + 1) + precedence) * len(KINDS) + codes, first, axis=0)
        return share.astype(np.float32), np.where(share > 0, best % len(KINDS), 0).astype(np.uint8)

    def _covered(self, tracks: I64, low: I64, high: I64) -> I64:
        """Nanoseconds of each track in each column, shape (tracks, columns)."""
        joint = bool((low[1:] == high[:-1]).all())
        instants = np.append(low, high[-1]) if joint else np.concatenate((low, high))
        before = self._until(tracks, instants)
        return np.diff(before, axis=1) if joint else before[:, len(low):] - before[:, :len(low)]

    def _until(self, tracks: I64, at_ns: I64) -> I64:
        """Nanoseconds of each track before each instant, shape (tracks, instants)."""
        if not len(self._start):  # nothing in the trace has a length
            return np.zeros((len(tracks), len(at_ns)), np.int64)
        last = np.empty((len(tracks), len(at_ns)), np.int64)
        first, stop = self._edges[tracks], self._edges[tracks + 1]
        ends = np.array((at_ns.min(), at_ns.max()))
        # First narrow each track to the spans within the instants: a search among all would leave the CPU's cache.
        for last_span, begin, end in zip(last, first.tolist(), stop.tolist(), strict=True):
            low, high = self._start[begin:end].searchsorted(ends, side="right").tolist()
            last_span[:] = self._start[begin + low:begin + high].searchsorted(at_ns, side="right")
            last_span += begin + low - 1
        inside = last >= first[:, None]
        last = np.maximum(last, 0, out=last)
        covered = self._before[last] + np.minimum(at_ns, self._end[last]) - self._start[last]
        return np.where(inside, covered, 0)

    def _last_span(self, row: int, time_ns: int) -> tuple[int, slice]:
        """The last span of the row that begins at or before that time, -1 if none, and which spans are the row's."""
        track = self._all[row]
        spans = slice(int(self._edges[track]), int(self._edges[track + 1]))
        last = int(np.searchsorted(self._start[spans], time_ns, side="right")) - 1
        return (spans.start + last if last >= 0 else -1), spans

    def running_since(self, row: int, time_ns: int) -> int | None:
        """Begin of the span of the row that time is in; None: nothing runs then."""
        last, spans = self._last_span(row, time_ns)
        return None if last < spans.start or self._end[last] <= time_ns else int(self._start[last])

    def next_gap(self, row: int, time_ns: int, minimum_ns: int, back: bool = False) -> tuple[int, int] | None:
        """The next stretch between two ranges in which the row shows nothing, of ``minimum_ns`` at least. It begins
        after ``time_ns``; with ``back`` it is the last that begins before."""
        last, spans = self._last_span(row, time_ns)
        if spans.stop - spans.start < 2:
            return None
        # Gap i is from the end of span i to the start of span i + 1.
        if back:
            last = max(last, spans.start - 1)
            if last >= spans.start and self._end[last] >= time_ns:
                last -= 1
            parts = blocks(spans.start, min(last + 1, spans.stop - 1), back=True)
        else:
            after = max(last, spans.start)
            if self._end[after] <= time_ns:
                after += 1
            parts = blocks(after, spans.stop - 1)
        for first, stop in parts:
            length = self._start[first + 1:stop + 1] - self._end[first:stop]
            long_gaps = np.flatnonzero(length >= minimum_ns)
            if len(long_gaps):
                gap = first + int(long_gaps[-1 if back else 0])
                return int(self._end[gap]), int(self._start[gap + 1])
        return None


def column_edges(start_ns: int, end_ns: int, columns: int) -> tuple[I64, I64]:
    """Begins and ends of the columns: one at the next one's start, or a nanosecond later if that is less."""
    each, rest = divmod(max(end_ns - start_ns, 0), columns)
    i = np.arange(columns + 1, dtype=np.int64)
    edges = start_ns + i * each + i * rest // columns
    return edges[:-1], np.maximum(edges[1:], edges[:-1] + 1)


def blocks(first: int, stop: int, back: bool = False) -> Iterator[tuple[int, int]]:
    """Yield ``first`` to ``stop`` in parts, for a search that mostly ends early: each is larger than the one before it,
    from one end or the other."""
    size = _BLOCK
    while first < stop:
        if back:
            yield max(first, stop - size), stop
            stop -= size
        else:
            yield first, min(stop, first + size)
            first += size
        size = min(4 * size, 1 << 20)

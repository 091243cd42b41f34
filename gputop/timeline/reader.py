"""A timeline as the screen reads it: what covers each column of a row, and the ranges by place and by name.

The file is mapped, so this process holds no events. A picture at any zoom takes one binary search in cumulative sums
for each edge of a column, however many events lie between the edges; there is no loop over events.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from gputop.core.codec import convert
from gputop.timeline.layout import Description, Place, damaged, mapped
from gputop.timeline.model import KINDS, Range

I64 = npt.NDArray[np.int64]
_BLOCK = 4096  # events searched first; each further block is four times as large
_NAMES_KEPT = 20_000
_COMPARED_NAMES = 8  # so few names are faster compared one by one than looked up


class Timeline:
    """One capture's timeline, read-only. Times are nanoseconds since the trace's origin.

    Rows are named by their ``key``. A GPU's row is the union of its streams, and what it shows are ranges of those.
    Not for several threads at once.
    """

    def __init__(self, columns: dict[str, npt.NDArray], about: dict[str, Any]) -> None:
        description = convert(about, Description)
        self.window_ns, self.simulated, self.paths = description.window_ns, description.simulated, description.paths
        self.events, self.quality = description.events, description.quality
        self.rows, self.idle_gaps = description.rows, description.idle_gaps
        self.no_counters = description.no_counters
        # Why the critical path and the idle gaps are not there yet; empty where they have been looked for.
        self.pending = "the trace is still being analyzed" if description.pending else ""
        self.idle_totals, self.basis, self.period_s = description.idle_totals, description.basis, description.period_s
        self.steps_ns: I64 = columns["steps"].reshape(-1, 2)
        self._columns = columns
        self._start, self._end = columns["start"], columns["end"]
        self._name, self._op = columns["name"], columns["op"]
        self._bounds, self._streams = description.bounds, description.streams
        self._span_start, self._span_end = columns["span_start"], columns["span_end"]
        self._span_before = columns["span_before"]
        self._edges = np.array(description.edges, np.int64)
        self._all, self._kinds = description.all, description.kinds
        self._texts: dict[int, str] = {}
        self._sought: tuple[str, npt.NDArray[np.bool_]] = "", np.empty(0, np.bool_)

    @classmethod
    def open(cls, file: str | Path | BinaryIO, section: Place | None = None) -> Timeline:
        """Open a timeline from a path or an open file, which may be closed afterwards. ``section``: where the rows lie
        in one that is still being written. Raises GputopError for a file that is no timeline."""
        try:
            if isinstance(file, (str, Path)):
                with Path(file).open("rb") as opened:
                    return cls(*mapped(opened, section))
            return cls(*mapped(file, section))
        except OSError as error:
            raise damaged(error.strerror or str(error)) from error
        except (KeyError, TypeError, ValueError) as error:
            raise damaged(f"its description is not as expected ({error})") from error

    def close(self) -> None:
        """Release the file. The timeline cannot be used afterwards."""
        self.__dict__.clear()

    def __enter__(self) -> Timeline:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # What covers the columns

    def picture(
        self, rows: Sequence[int], start_ns: int, end_ns: int, columns: int,
    ) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.uint8]]:
        """Share of each row and column that ranges cover, and the kind that covers most of it.

        Both of shape (rows, columns): float32 of 0-1, and uint8, an index into KINDS, 0 where nothing is. The columns
        are equal parts of ``start_ns`` to ``end_ns``, of a nanosecond at least.
        """
        if not len(rows) or columns < 1:
            return np.zeros((len(rows), max(columns, 0)), np.float32), np.zeros((len(rows), max(columns, 0)), np.uint8)
        low, high = _columns(start_ns, end_ns, columns)
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

    def coverage(self, row: int, start_ns: int, end_ns: int, columns: int) -> npt.NDArray[np.float32]:
        """The share of each column that ranges of this row cover; see :meth:`picture`."""
        return self.picture([row], start_ns, end_ns, columns)[0][0]

    def kinds(self, row: int, start_ns: int, end_ns: int, columns: int) -> npt.NDArray[np.uint8]:
        """Kind that covers most of each column, as index into KINDS; see :meth:`picture`."""
        return self.picture([row], start_ns, end_ns, columns)[1][0]

    def levels(self, row: int, start_ns: int, end_ns: int, columns: int) -> npt.NDArray[np.float32]:
        """Mean of a counter's row in each column as a share of its scale, NaN where it was not sampled."""
        first, last = self._bounds[row]
        low, high = _columns(start_ns, end_ns, columns)
        start, end = self._start[first:last], self._end[first:last]
        levels = self._columns["level"]
        level = levels[len(levels) - (len(self._start) - first):][:last - first]
        measured, weighted = (
            _until(start, end, weight, high) - _until(start, end, weight, low)
            for weight in (np.ones(len(start)), level.astype(np.float64)))
        is_measured = measured > 0
        return np.where(is_measured, weighted / np.where(is_measured, measured, 1.0), np.nan).astype(np.float32)

    def _covered(self, tracks: I64, low: I64, high: I64) -> I64:
        """Nanoseconds of each track in each column, shape (tracks, columns)."""
        joint = bool((low[1:] == high[:-1]).all())
        instants = np.append(low, high[-1]) if joint else np.concatenate((low, high))
        before = self._before(tracks, instants)
        return np.diff(before, axis=1) if joint else before[:, len(low):] - before[:, :len(low)]

    def _before(self, tracks: I64, at_ns: I64) -> I64:
        """Nanoseconds of each track before each instant, shape (tracks, instants)."""
        if not len(self._span_start):  # nothing in the trace has a length
            return np.zeros((len(tracks), len(at_ns)), np.int64)
        last = np.empty((len(tracks), len(at_ns)), np.int64)
        first, stop = self._edges[tracks], self._edges[tracks + 1]
        ends = np.array((at_ns.min(), at_ns.max()))
        # First narrow each track to the spans within the instants: a search among all would leave the CPU's cache.
        for last_span, begin, end in zip(last, first.tolist(), stop.tolist(), strict=True):
            low, high = self._span_start[begin:end].searchsorted(ends, side="right").tolist()
            last_span[:] = self._span_start[begin + low:begin + high].searchsorted(at_ns, side="right")
            last_span += begin + low - 1
        inside = last >= first[:, None]
        last = np.maximum(last, 0, out=last)
        covered = self._span_before[last] + np.minimum(at_ns, self._span_end[last]) - self._span_start[last]
        return np.where(inside, covered, 0)

    def _span_at(self, row: int, time_ns: int) -> tuple[int, slice]:
        """The last span of the row that begins at or before that time, -1 if none, and which spans are the row's."""
        track = self._all[row]
        spans = slice(int(self._edges[track]), int(self._edges[track + 1]))
        last = int(np.searchsorted(self._span_start[spans], time_ns, side="right")) - 1
        return (spans.start + last if last >= 0 else -1), spans

    def next_gap(self, row: int, time_ns: int, minimum_ns: int, back: bool = False) -> tuple[int, int] | None:
        """The next stretch between two ranges in which the row shows nothing, of ``minimum_ns`` at least.

        It begins after ``time_ns``; with ``back`` it is the last that begins before.
        """
        last, spans = self._span_at(row, time_ns)
        if spans.stop - spans.start < 2:
            return None
        # Gap i is from the end of span i to the start of span i + 1.
        if back:
            last = max(last, spans.start - 1)
            if last >= spans.start and self._span_end[last] >= time_ns:
                last -= 1
            blocks = _blocks(spans.start, min(last + 1, spans.stop - 1), back=True)
        else:
            after = max(last, spans.start)
            if self._span_end[after] <= time_ns:
                after += 1
            blocks = _blocks(after, spans.stop - 1)
        for first, stop in blocks:
            length = self._span_start[first + 1:stop + 1] - self._span_end[first:stop]
            long_gaps = np.flatnonzero(length >= minimum_ns)
            if len(long_gaps):
                gap = first + int(long_gaps[-1 if back else 0])
                return int(self._span_end[gap]), int(self._span_start[gap + 1])
        return None

    # The ranges

    def count(self, row: int, start_ns: int, end_ns: int) -> int:
        """Number of ranges that begin in this time."""
        return sum(stop - first for first, stop in (self._begun(source, start_ns, end_ns) for source in self._own(row)))

    def ranges(self, row: int, start_ns: int, end_ns: int, limit: int = 500, least_ns: int = 0) -> list[Range]:
        """The ranges that overlap this time and are at least ``least_ns`` long, by start; of more than ``limit`` the
        longest."""
        ranges = []
        for source in self._own(row):
            first, stop = self._begun(source, start_ns, end_ns)
            events = np.concatenate((self._open_at(source, start_ns, first), np.arange(first, stop)))
            if least_ns:
                events = events[self._end[events] - self._start[events] >= least_ns]
            if len(events) > limit:
                length = self._end[events] - self._start[events]
                events = np.sort(events[np.argpartition(length, len(events) - limit)[len(events) - limit:]])
            ranges += self._make_ranges(source, events)
        if len(self._own(row)) > 1:
            ranges = sorted(ranges, key=lambda r: r.start_ns - r.end_ns)[:limit]
            ranges.sort(key=lambda r: (r.start_ns, r.row, r.index))
        return ranges

    def range(self, row: int, index: int) -> Range:
        """The range of that identity. Raises IndexError where there is none."""
        first, last = self._bounds[row]
        if not 0 <= index < last - first:
            raise IndexError(f"row {row} has {last - first} ranges, not one of index {index}")
        return self._make_ranges(row, np.array([first + index]))[0]

    def at(self, row: int, time_ns: int) -> Range | None:
        """The innermost range there; of a GPU that on its busiest stream."""
        for source in self._own(row):
            first, _ = self._begun(source, time_ns + 1, time_ns + 1)
            open_ = self._open_at(source, time_ns, first, innermost=True)
            if len(open_):
                return self._make_ranges(source, open_[-1:])[0]
        return None

    def next_range(self, row: int, time_ns: int, back: bool = False, index: int | None = None) -> Range | None:
        """The next range that begins after that time (``back``: the last that begins before it).

        With the ``index`` of a range of this very row simply the next (last) one.
        """
        candidates = []
        for source in self._own(row):
            first, stop = self._bounds[source]
            if index is not None and source == row:
                event = first + index + (-1 if back else 1)
            else:
                side = self._begun(source, time_ns if back else time_ns + 1, time_ns)[0]
                event = side - 1 if back else side
            if first <= event < stop:
                candidates.append((int(self._start[event]), source, event))
        if not candidates:
            return None
        _, source, event = max(candidates) if back else min(candidates)
        return self._make_ranges(source, np.array([event]))[0]

    def search(
        self, text: str, row: int, time_ns: int, back: bool = False, index: int | None = None,
    ) -> Range | None:
        """The next range after a place (``back``: the last before it) whose name or op contains ``text``, in any case.

        Over streams and threads, by start, then row. The place is that of the range ``index`` of ``row``, which begins
        at ``time_ns``, or where there is no index that time on that row.
        """
        wanted = self._with_text(text)
        best: tuple[int, int, int] | None = None
        indices = np.flatnonzero(wanted).tolist()
        if not indices:
            return None
        for other_row, (first, stop) in enumerate(self._bounds):
            if first == stop or self.rows[other_row].kind in ("stage", "layer", "path", "counter"):
                continue
            if other_row == row and index is not None:
                start = first + index + (0 if back else 1)
            else:  # what begins then is after the place on rows below it, before it on rows above
                start = self._begun(other_row, time_ns + (other_row <= row), time_ns)[0] if not back else self._begun(
                    other_row, time_ns + (other_row < row), time_ns)[0]
            for low, high in _blocks(first, start, back=True) if back else _blocks(start, stop):
                if best is not None and (
                        self._start[high - 1] < best[0] if back else self._start[low] > best[0]):
                    break
                hits = _among(self._name[low:high], indices, wanted)
                if low < len(self._op):
                    hits |= _among(self._op[low:high], indices, wanted)
                matches = np.flatnonzero(hits)
                if len(matches):
                    event = low + int(matches[-1 if back else 0])
                    key = int(self._start[event]), other_row, event
                    best = key if best is None else max(best, key) if back else min(best, key)
                    break
        return None if best is None else self._make_ranges(best[1], np.array([best[2]]))[0]

    def linked(self, range_: Range) -> Range | None:
        """Launch on the host of a kernel or copy; of a launch what it launched, the first of several."""
        event = self._bounds[range_.row][0] + range_.index
        other = int(self._columns["link"][event])
        if not 0 <= other < len(self._start):
            return None
        row = next(i for i, (first, last) in enumerate(self._bounds) if first <= other < last)
        return self._make_ranges(row, np.array([other]))[0]

    def _own(self, row: int) -> Sequence[int]:
        """The rows that hold this one's events: itself, or a GPU's streams."""
        return self._streams.get(row) or (row,)

    def _begun(self, row: int, start_ns: int, end_ns: int) -> tuple[int, int]:
        """The first event of a row that begins at ``start_ns`` or later, and at ``end_ns`` or later."""
        first, last = self._bounds[row]
        low, high = np.searchsorted(self._start[first:last], (start_ns, end_ns)).tolist()
        return first + low, first + high

    def _open_at(self, row: int, time_ns: int, before: int, innermost: bool = False) -> I64:
        """Events of a row before this one that run at that time: none of them begins before the span does."""
        last, spans = self._span_at(row, time_ns)
        if last < spans.start or self._span_end[last] <= time_ns:
            return np.empty(0, np.int64)
        first = self._begun(row, int(self._span_start[last]), time_ns)[0]
        open_events = []
        for low, high in _blocks(first, before, back=True):
            open_events.append(low + np.flatnonzero(self._end[low:high] > time_ns))
            if innermost and len(open_events[-1]):
                break
        return np.concatenate(open_events[::-1]) if open_events else np.empty(0, np.int64)

    def _make_ranges(self, row: int, events: I64) -> list[Range]:
        first = self._bounds[row][0]
        ops = self._op[events].tolist() if len(events) and events[-1] < len(self._op) else [-1] * len(events)
        kind, depth = self._columns["kind"], self._columns["depth"]
        return [
            Range(row, event - first, start, end, self._text(name), KINDS[code], deep, self._text(op))
            for event, start, end, name, code, deep, op in zip(
                events.tolist(), self._start[events].tolist(), self._end[events].tolist(),
                self._name[events].tolist(), kind[events].tolist(), depth[events].tolist(), ops, strict=True)]

    # Names

    def _text(self, name: int) -> str:
        if name < 0:
            return ""
        text = self._texts.get(name)
        if text is None:
            ends = self._columns["text_end"]
            first = int(ends[name - 1]) if name else 0
            text = self._columns["text"][first:int(ends[name]) - 1].tobytes().decode("utf-8", "replace")
            if len(self._texts) >= _NAMES_KEPT:
                self._texts.clear()
            self._texts[name] = text
        return text

    def _with_text(self, text: str) -> npt.NDArray[np.bool_]:
        """Mask of the names that contain this text; the last entry, False, answers for no name."""
        folded = text.casefold()
        if self._sought[0] != folded or not len(self._sought[1]):
            ends = self._columns["folded_end"]
            mask = np.zeros(len(ends) + 1, np.bool_)
            if folded and "\n" not in folded and len(ends):
                # One match for each name: the rest of the name is part of the match.
                sought = re.compile(re.escape(folded.encode("utf-8", "replace")) + rb"[^\n]*")
                hits = [match.start() for match in sought.finditer(self._columns["folded"].data)]
                mask[np.searchsorted(ends, hits, side="right")] = True
            self._sought = folded, mask
        return self._sought[1]


def _until(start: I64, end: I64, weight: npt.NDArray[np.float64], at_ns: I64) -> npt.NDArray[np.float64]:
    """The weighted time of spans, none over another, before each instant."""
    before = np.concatenate(([0.0], np.cumsum((end - start) * weight)))
    last = np.searchsorted(start, at_ns, side="right")
    span = np.maximum(last - 1, 0)
    late = np.maximum(end[span] - at_ns, 0) * weight[span]
    return before[last] - np.where(last > 0, late, 0.0)


def _columns(start_ns: int, end_ns: int, columns: int) -> tuple[I64, I64]:
    """Begins and ends of the columns: one at the next one's start, or a nanosecond later if that is less."""
    each, rest = divmod(max(end_ns - start_ns, 0), columns)
    i = np.arange(columns + 1, dtype=np.int64)
    edges = start_ns + i * each + i * rest // columns
    return edges[:-1], np.maximum(edges[1:], edges[:-1] + 1)


def _among(names: npt.NDArray, wanted: list[int], mask: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """Mask of the names that are wanted; ``mask`` holds the same by name and is used where many are wanted."""
    if len(wanted) > _COMPARED_NAMES:
        return mask[names]
    out = names == wanted[0]
    for name in wanted[1:]:
        out |= names == name
    return np.asarray(out, np.bool_)


def _blocks(first: int, stop: int, back: bool = False) -> Iterator[tuple[int, int]]:
    """``first`` to ``stop`` in parts, each larger than the one before, from one end or the other."""
    size = _BLOCK
    while first < stop:
        if back:
            yield max(first, stop - size), stop
            stop -= size
        else:
            yield first, min(stop, first + size)
            first += size
        size = min(4 * size, 1 << 20)

"""A timeline as the screen reads it: what covers each column of a row, and the ranges by place and by name.

The file is mapped, so this process holds no events. A picture at any zoom takes one binary search in cumulative sums
for each edge of a column, however many events lie between the edges; there is no loop over events.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from gputop.core.codec import convert
from gputop.timeline.coverage import Coverage, blocks, column_edges
from gputop.timeline.file_layout import Description, Extent, damaged, mapped
from gputop.timeline.model import KINDS, Range
from gputop.trace.model import I64


class Timeline:
    """One capture's timeline, read-only. Times are nanoseconds since the trace's origin. Rows are named by their
    ``key``; what a GPU's row shows are ranges of its streams. Not for several threads at once."""

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
        self._texts = Texts(columns)
        self.columns = RangeColumns(columns, description.bounds, self._texts)
        self.coverage = Coverage(columns, description)
        self._streams = description.streams  # of the row of a GPU: those of its streams

    @classmethod
    def open(cls, file: BinaryIO, section: Extent) -> Timeline:
        """Open the timeline that is described at ``section`` of an open file, which may be closed afterwards. Raises
        GputopError for a file that is no timeline."""
        try:
            return cls(*mapped(file, section))
        except (KeyError, TypeError, ValueError) as error:
            raise damaged(f"its description is not valid ({error})") from error

    def close(self) -> None:
        """Release the file. The timeline cannot be used afterwards."""
        self.__dict__.clear()

    def count(self, row: int, start_ns: int, end_ns: int) -> int:
        """Number of ranges that begin in this time."""
        return sum(stop - first for first, stop in (
            self.columns.begun(source, start_ns, end_ns) for source in self._sources(row)))

    def ranges(self, row: int, start_ns: int, end_ns: int, limit: int = 500, least_ns: int = 0) -> list[Range]:
        """The ranges that overlap this time and are at least ``least_ns`` long, by start; of more than ``limit`` the
        longest."""
        ranges = []
        for source in self._sources(row):
            first, stop = self.columns.begun(source, start_ns, end_ns)
            events = np.concatenate((self._running(source, start_ns, first), np.arange(first, stop)))
            if least_ns:
                events = events[self.columns.lengths(events) >= least_ns]
            if len(events) > limit:
                length = self.columns.lengths(events)
                events = np.sort(events[np.argpartition(length, len(events) - limit)[len(events) - limit:]])
            ranges += self.columns.ranges(source, events)
        if len(self._sources(row)) > 1:
            ranges = sorted(ranges, key=lambda r: r.start_ns - r.end_ns)[:limit]
            ranges.sort(key=lambda r: (r.start_ns, r.row, r.index))
        return ranges

    def range(self, row: int, index: int) -> Range:
        """The range of that identity. Raises IndexError where there is none."""
        first, last = self.columns.bounds[row]
        if not 0 <= index < last - first:
            raise IndexError(f"row {row} has {last - first} ranges, not one of index {index}")
        return self.columns.range(row, first + index)

    def at(self, row: int, time_ns: int) -> Range | None:
        """The innermost range there; of a GPU that on its busiest stream."""
        for source in self._sources(row):
            first, _ = self.columns.begun(source, time_ns + 1, time_ns + 1)
            running = self._running(source, time_ns, first, innermost=True)
            if len(running):
                return self.columns.range(source, int(running[-1]))
        return None

    def next_range(self, row: int, time_ns: int, back: bool = False, index: int | None = None) -> Range | None:
        """The next range that begins after that time (``back``: the last that begins before it). With the ``index`` of
        a range of this very row simply the next (last) one."""
        candidates = []
        for source in self._sources(row):
            first, stop = self.columns.bounds[source]
            if index is not None and source == row:
                event = first + index + (-1 if back else 1)
            else:
                side = self.columns.begun(source, time_ns if back else time_ns + 1, time_ns)[0]
                event = side - 1 if back else side
            if first <= event < stop:
                candidates.append((int(self.columns.start[event]), source, event))
        if not candidates:
            return None
        _, source, event = max(candidates) if back else min(candidates)
        return self.columns.range(source, event)

    def search(self, text: str, row: int, time_ns: int, back: bool = False, index: int | None = None) -> Range | None:
        """The next range after a place (``back``: the last before it) whose name or op contains ``text``, in any case.
        Over streams and threads, by start, then row. The place is that of the range ``index`` of ``row``, which begins
        at ``time_ns``, or where there is no index that time on that row."""
        columns, wanted = self.columns, self._texts.containing(text)
        best: tuple[int, int, int] | None = None
        names = np.flatnonzero(wanted).tolist()
        if not names:
            return None
        for other_row, (first, stop) in enumerate(columns.bounds):
            if first == stop or self.rows[other_row].kind in ("stage", "layer", "path", "counter"):
                continue
            if other_row == row and index is not None:
                start = first + index + (0 if back else 1)
            else:  # what begins then is after the place on rows below it, before it on rows above
                later = other_row < row if back else other_row <= row
                start = columns.begun(other_row, time_ns + later, time_ns)[0]
            for low, high in blocks(first, start, back=True) if back else blocks(start, stop):
                if best is not None and (columns.start[high - 1] < best[0] if back else columns.start[low] > best[0]):
                    break
                matches = columns.named(low, high, names, wanted)
                if len(matches):
                    event = int(matches[-1 if back else 0])
                    key = int(columns.start[event]), other_row, event
                    best = key if best is None else max(best, key) if back else min(best, key)
                    break
        return None if best is None else columns.range(best[1], best[2])

    def linked(self, range_: Range) -> Range | None:
        """Launch on the host of a kernel or copy; of a launch what it launched, the first of several."""
        other = self.columns.linked(range_.row, range_.index)
        return None if other is None else self.columns.range(*other)

    def _sources(self, row: int) -> Sequence[int]:
        """The rows that hold this one's events: itself, or a GPU's streams."""
        return self._streams.get(row) or (row,)

    def _running(self, row: int, time_ns: int, before: int, innermost: bool = False) -> I64:
        """Events of a row before this one that run at that time: none of them begins before the span does."""
        since_ns = self.coverage.running_since(row, time_ns)
        if since_ns is None:
            return np.empty(0, np.int64)
        return self.columns.running(row, time_ns, since_ns, before, innermost)


_NAMES_KEPT = 20_000


class Texts:
    """The names of ranges and ops. Those read last are kept as strings, and what the last search found."""

    def __init__(self, columns: Mapping[str, npt.NDArray]) -> None:
        self._text, self._ends = columns["text"], columns["text_end"]
        self._folded, self._folded_ends = columns["folded"], columns["folded_end"]
        self._kept: dict[int, str] = {}
        self._search: tuple[str, npt.NDArray[np.bool_]] = "", np.empty(0, np.bool_)

    def __getitem__(self, name: int) -> str:
        """The name of that number; of a negative one empty."""
        if name < 0:
            return ""
        text = self._kept.get(name)
        if text is None:
            first = int(self._ends[name - 1]) if name else 0
            text = self._text[first:int(self._ends[name]) - 1].tobytes().decode("utf-8", "replace")
            if len(self._kept) >= _NAMES_KEPT:
                self._kept.clear()
            self._kept[name] = text
        return text

    def containing(self, text: str) -> npt.NDArray[np.bool_]:
        """Mask of the names that contain this text, in any case; the last entry, False, answers for no name."""
        folded = text.casefold()
        if self._search[0] != folded or not len(self._search[1]):
            ends = self._folded_ends
            mask = np.zeros(len(ends) + 1, np.bool_)
            if folded and "\n" not in folded and len(ends):
                # One match for each name: the rest of the name is part of the match.
                sought = re.compile(re.escape(folded.encode("utf-8", "replace")) + rb"[^\n]*")
                hits = [match.start() for match in sought.finditer(self._folded.data)]
                mask[np.searchsorted(ends, hits, side="right")] = True
            self._search = folded, mask
        return self._search[1]


_COMPARED_NAMES = 8  # so few names are faster compared one by one than looked up


class RangeColumns:
    """The events of all rows, those of a row together and by start: row ``i`` has the events from ``bounds[i][0]`` to
    before ``bounds[i][1]``, a GPU none, as its streams have them. Ops are of the first rows only, levels of the last,
    which are those of counters."""

    def __init__(self, columns: Mapping[str, npt.NDArray], bounds: Sequence[tuple[int, int]], texts: Texts) -> None:
        self.bounds = bounds
        self.start, self.end = columns["start"], columns["end"]
        self._name, self._op, self._kind, self._depth, self._level, self._link = (
            columns[name] for name in ("name", "op", "kind", "depth", "level", "link"))
        self._texts = texts

    def begun(self, row: int, start_ns: int, end_ns: int) -> tuple[int, int]:
        """The first event of a row that begins at ``start_ns`` or later, and at ``end_ns`` or later."""
        first, last = self.bounds[row]
        low, high = np.searchsorted(self.start[first:last], (start_ns, end_ns)).tolist()
        return first + low, first + high

    def running(self, row: int, time_ns: int, since_ns: int, before: int, innermost: bool = False) -> I64:
        """Events of a row that run at that time, of those from the first that begins at ``since_ns`` to this one; with
        ``innermost`` only the last few."""
        first = self.begun(row, since_ns, time_ns)[0]
        events = []
        for low, high in blocks(first, before, back=True):
            events.append(low + np.flatnonzero(self.end[low:high] > time_ns))
            if innermost and len(events[-1]):
                break
        return np.concatenate(events[::-1]) if events else np.empty(0, np.int64)

    def lengths(self, events: I64) -> I64:
        """Nanoseconds of each event."""
        return np.asarray(self.end[events] - self.start[events])

    def ranges(self, row: int, events: I64) -> list[Range]:
        """Events of a row, in order."""
        first = self.bounds[row][0]
        ops = self._op[events].tolist() if len(events) and events[-1] < len(self._op) else [-1] * len(events)
        columns = (column[events].tolist() for column in (self.start, self.end, self._name, self._kind, self._depth))
        return [
            Range(row, event - first, start, end, self._texts[name], KINDS[code], deep, self._texts[op])
            for event, start, end, name, code, deep, op in zip(events.tolist(), *columns, ops, strict=True)]

    def range(self, row: int, event: int) -> Range:
        return self.ranges(row, np.array([event]))[0]

    def linked(self, row: int, index: int) -> tuple[int, int] | None:
        """Row and event of the other end of a range: of a kernel its launch, of a launch the first it launched."""
        other = int(self._link[self.bounds[row][0] + index])
        if not 0 <= other < len(self.start):
            return None
        return next(i for i, (first, last) in enumerate(self.bounds) if first <= other < last), other

    def named(self, low: int, high: int, wanted: list[int], mask: npt.NDArray[np.bool_]) -> I64:
        """Events of one row, from ``low`` to before ``high``, whose name or op is wanted; ``mask`` holds the same by
        name."""
        hits = _among(self._name[low:high], wanted, mask)
        if low < len(self._op):
            hits |= _among(self._op[low:high], wanted, mask)
        return low + np.flatnonzero(hits)

    def levels(self, row: int, start_ns: int, end_ns: int, columns: int) -> npt.NDArray[np.float32]:
        """Mean of a counter's row in each column as a share of its scale, NaN where it was not sampled."""
        first, last = self.bounds[row]
        low, high = column_edges(start_ns, end_ns, columns)
        start, end = self.start[first:last], self.end[first:last]
        level = self._level[len(self._level) - (len(self.start) - first):][:last - first]
        measured, weighted = (
            _until(start, end, weight, high) - _until(start, end, weight, low)
            for weight in (np.ones(len(start)), level.astype(np.float64)))
        is_measured = measured > 0
        return np.where(is_measured, weighted / np.where(is_measured, measured, 1.0), np.nan).astype(np.float32)


def _until(start: I64, end: I64, weight: npt.NDArray[np.float64], at_ns: I64) -> npt.NDArray[np.float64]:
    """The weighted time of spans, none over another, before each instant."""
    before = np.concatenate(([0.0], np.cumsum((end - start) * weight)))
    last = np.searchsorted(start, at_ns, side="right")
    span = np.maximum(last - 1, 0)
    late = np.maximum(end[span] - at_ns, 0) * weight[span]
    return before[last] - np.where(last > 0, late, 0.0)


def _among(names: npt.NDArray, wanted: list[int], mask: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """Mask of the names that are wanted; ``mask`` holds the same by name and is used where many are wanted."""
    if len(wanted) > _COMPARED_NAMES:
        return mask[names]
    out = names == wanted[0]
    for name in wanted[1:]:
        out |= names == name
    return np.asarray(out, np.bool_)

"""The ranges of a timeline as columns."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from gputop.timeline.coverage import blocks, column_edges
from gputop.timeline.model import KINDS, Range
from gputop.trace.model import I64

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
    before ``bounds[i][1]``, a GPU none, as its streams have them.

    Ops are of the first rows only, levels of the last, which are those of counters.
    """

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

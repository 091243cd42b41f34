"""From queries of a timeline to the lines of its places, for one view. Reads the trace, knows no widget."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gputop.timeline.model import KINDS, Bubble, Range
from gputop.timeline.reader import Timeline
from gputop.tui.timeline_cells import BAR_CELLS, FULL, Line, bar_cells, lane, put_bar
from gputop.tui.timeline_head import rules
from gputop.tui.timeline_rows import Place
from gputop.tui.timeline_styles import cause_code
from gputop.tui.timeline_view import View

_KIND = {name: code for code, name in enumerate(KINDS)}
_NAMED = 4_000  # of more ranges in view, none is long enough for its name unless the others are far shorter
_NESTED = 2_000  # ranges of one unfolded thread that are looked at; of more, the longest


@dataclass(slots=True)
class Lane:
    """A place as drawn: its lines, top one first, without what is selected; and the share of the view covered."""

    lines: list[Line]
    share: float | None  # None: not known


class Idle:
    """The bubbles by GPU, in order of time, for colouring the ground under them."""

    def __init__(self, bubbles: Sequence[Bubble]) -> None:
        self._of: dict[int, tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.uint8]]] = {}
        for gpu in {g for b in bubbles for g in b.gpus}:
            own = sorted((b.start_ns, b.end_ns, cause_code(b.part)) for b in bubbles if gpu in b.gpus)
            starts, ends, parts = (np.array(column) for column in zip(*own, strict=True))
            self._of[gpu] = starts.astype(np.int64), ends.astype(np.int64), parts.astype(np.uint8)

    def causes(self, gpu: int | None, view: View, cells: int) -> npt.NDArray[np.uint8] | None:
        """Per cell the part of the step that its middle is lost to, as a code; 0: no bubble of a cell's width."""
        if gpu is None or gpu not in self._of:
            return None
        starts, ends, parts = self._of[gpu]
        middle = view.start_ns + ((np.arange(cells) + 0.5) * view.span_ns / cells).astype(np.int64)
        at = np.searchsorted(starts, middle, "right") - 1
        there = (at >= 0) & (middle < ends[at]) & (ends[at] - starts[at] >= view.span_ns / cells)
        return np.where(there, parts[at], 0).astype(np.uint8)


Lanes = dict[tuple[int, int, int], Lane]  # by the key of the place


def lanes(timeline: Timeline, idle: Idle, shown: Sequence[Place], view: View, cells: int, full: int = FULL) -> Lanes:
    """The lanes of these places by their keys; headings have none. ``full`` as in :func:`timeline_cells.lane`."""
    whole = [p for p in shown if p.rows and not p.depth]
    ruled = rules(timeline.steps_ns, view, cells)
    out: Lanes = {}
    if whole:
        keys = [row.key for p in whole for row in p.rows]
        shares, codes = timeline.picture(keys, view.start_ns, view.end_ns, 2 * cells)
        first = 0
        for place in whole:
            behind = first + len(place.rows)
            # Of a pool: how many of its threads are at work, and what the busiest of them does.
            cover, kinds = shares[first:behind].mean(axis=0), codes[first:behind].max(axis=0)
            row, first = place.rows[0], behind
            causes = idle.causes(row.gpu, view, cells) if row.kind == "gpu" else None
            lines = lane(cover, kinds, place.lines, causes, ruled, full)
            named = place.depth is None and len(place.rows) == 1
            if named and timeline.count(row.key, view.start_ns, view.end_ns) <= _NAMED:
                ranges = timeline.ranges(row.key, view.start_ns, view.end_ns, cells // 2)
                _put_names(lines, [r for r in ranges if not (r.depth and row.kind == "thread")], view, cells)
            out[place.key] = Lane(lines, float(cover.mean()))
    for key in {p.rows[0].key for p in shown if p.depth is not None}:
        levels = [p for p in shown if p.depth is not None and p.rows[0].key == key]
        out |= _nested(timeline, levels, view, cells, out, ruled)
    return out


def _put_names(lines: list[Line], ranges: Iterable[Range], view: View, cells: int) -> None:
    for r in ranges:
        first, last = bar_cells(view, cells, r.start_ns, r.end_ns)
        if last - first >= BAR_CELLS:
            put_bar(lines, first, last, r.name.removeprefix("void "), _KIND[r.kind])


def _nested(timeline: Timeline, levels: Sequence[Place], view: View, cells: int, drawn: Lanes,
            ruled: npt.NDArray[np.bool_]) -> Lanes:
    """One thread, a line a level of nesting; level 0 is ``drawn`` from its coverage already."""
    ranges = timeline.ranges(levels[0].rows[0].key, view.start_ns, view.end_ns, _NESTED)
    by_level: dict[int, list[Range]] = {}
    for r in ranges:
        by_level.setdefault(r.depth, []).append(r)
    out: Lanes = {}
    for place in levels:
        level = place.depth or 0
        own = by_level.get(level, [])
        if level == 0:
            made = drawn[place.key]
        else:
            cover = cover_of(own, view, 2 * cells)
            kinds = np.full(2 * cells, _KIND[own[0].kind] if own else 0, np.uint8)
            made = Lane(lane(cover, kinds, 1, None, ruled), float(cover.mean()) if len(ranges) < _NESTED else None)
        _put_names(made.lines, own, view, cells)
        out[place.key] = made
    return out


def cover_of(ranges: Sequence[Range], view: View, columns: int) -> npt.NDArray[np.float32]:
    """Share of each column that ranges in order of time, none over another, cover."""
    if not ranges:
        return np.zeros(columns, np.float32)
    starts = np.array([r.start_ns for r in ranges], np.float64)
    ends = np.array([r.end_ns for r in ranges], np.float64)
    edges = view.start_ns + np.arange(columns + 1) * (view.span_ns / columns)
    before = np.concatenate(([0.0], np.cumsum(ends - starts)))
    at = np.searchsorted(starts, edges, "right")
    over = np.where(at > 0, np.maximum(0.0, ends[np.maximum(at - 1, 0)] - edges), 0.0)
    return np.clip(np.diff(before[at] - over) * (columns / view.span_ns), 0, 1).astype(np.float32)

"""The lanes of a view, drawn from queries of the timeline. Reads the trace, knows no widget."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from gputop.text.units import NA, compact
from gputop.timeline.model import KINDS, IdleGap, Range
from gputop.timeline.read_timeline import Timeline
from gputop.trace.kernel_names import short_kernel
from gputop.tui.timeline.cells import (
    BAR_CELLS,
    FULL,
    CellLine,
    bar_cells,
    cause_code,
    draw_lines,
    least_bar_ns,
    put_bar,
)
from gputop.tui.timeline.descriptions import rules
from gputop.tui.timeline.viewport import NESTED, Place, View

_KIND = {name: code for code, name in enumerate(KINDS)}
_MAX_RANGES_NAMED = 200_000  # in view, of one row: their lengths are looked at for each picture
_LEAST_LEVEL = 1e-6
_MAX_NESTED_RANGES = 1_000  # of one unfolded thread, the longest ones


class DrawnPlace(Struct):
    """A place as drawn: its lines from the top, without the selection, and the share of the view that is covered."""

    lines: list[CellLine]
    share: float | None  # None: not known
    figure: str = ""  # in its place: the mean of a counter


class IdleGapParts:
    """The idle gaps by GPU, in order of time, for coloring the ground under them."""

    def __init__(self, idle_gaps: Sequence[IdleGap]) -> None:
        self._of: dict[int, tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.uint8]]] = {}
        for gpu in {g for b in idle_gaps for g in b.gpus}:
            gaps_of_gpu = sorted((b.start_ns, b.end_ns, cause_code(b.part)) for b in idle_gaps if gpu in b.gpus)
            starts, ends, parts = (np.array(column) for column in zip(*gaps_of_gpu, strict=True))
            self._of[gpu] = starts.astype(np.int64), ends.astype(np.int64), parts.astype(np.uint8)

    def causes(self, gpu: int | None, view: View, cells: int) -> npt.NDArray[np.uint8]:
        """Part, for each cell, of the step that its middle is lost to, as a code; 0: no idle gap of a cell's width."""
        if gpu is None or gpu not in self._of:
            return np.zeros(cells, np.uint8)
        starts, ends, parts = self._of[gpu]
        middle = view.start_ns + ((np.arange(cells) + 0.5) * view.span_ns / cells).astype(np.int64)
        index = np.searchsorted(starts, middle, "right") - 1
        in_gap = (index >= 0) & (middle < ends[index]) & (ends[index] - starts[index] >= view.span_ns / cells)
        return np.where(in_gap, parts[index], 0).astype(np.uint8)


Lanes = dict[tuple[int, int, int], DrawnPlace]  # by the key of the place


def draw_lanes(timeline: Timeline, idle: IdleGapParts, shown: Sequence[Place], view: View, cells: int,
               full: int = FULL) -> Lanes:
    """The lanes of these places by their keys; headings have none. ``full`` as in :func:`draw_lines`."""
    whole = [p for p in shown if p.rows and not p.depth]
    ruled = rules(timeline.steps_ns, view, cells)
    out: Lanes = {}
    if whole:
        rows = [row.key for p in whole for row in p.rows]
        cover, kinds = timeline.coverage.picture(rows, view.start_ns, view.end_ns, 2 * cells)
        sizes = [len(p.rows) for p in whole]
        first = np.cumsum([0, *sizes[:-1]])
        for i, key in enumerate(rows):
            if timeline.rows[key].kind == "counter":
                level = timeline.columns.levels(key, view.start_ns, view.end_ns, 2 * cells)
                # A measured zero is the lowest bar, no sample is nothing.
                cover[i] = np.where(np.isnan(level), 0, np.maximum(level, _LEAST_LEVEL))
        # Of a pool: how many of its threads are at work, and the kind of work.
        cover = (np.add.reduceat(cover, first, axis=0) / np.array(sizes)[:, None]).astype(np.float32)
        kinds = np.maximum.reduceat(kinds, first, axis=0)
        causes = np.stack([idle.causes(p.rows[0].gpu if p.rows[0].kind == "gpu" else None, view, cells) for p in whole])
        drawn = draw_lines(cover, kinds, [p.lines for p in whole], causes, ruled, full)
        for place, lines, share in zip(whole, drawn, cover.mean(axis=1).tolist(), strict=True):
            row = place.rows[0]
            if row.kind == "counter":
                mean = float(timeline.columns.levels(row.key, view.start_ns, view.end_ns, 1)[0])
                text = NA if mean != mean else compact(mean * row.full_scale, row.unit)
                out[place.key] = DrawnPlace(lines, share, text)
                continue
            if row.kind == "path" and timeline.pending:
                out[place.key] = DrawnPlace(lines, None)
                continue
            named = place.depth is None and len(place.rows) == 1
            if named and timeline.count(row.key, view.start_ns, view.end_ns) <= _MAX_RANGES_NAMED:
                ranges = timeline.ranges(row.key, view.start_ns, view.end_ns, cells // BAR_CELLS,
                                         least_bar_ns(view, cells))
                _put_names(lines, [r for r in ranges if not (r.depth and row.kind in NESTED)], view, cells)
            out[place.key] = DrawnPlace(lines, share)
    for key in {p.rows[0].key for p in shown if p.depth is not None}:
        levels = [p for p in shown if p.depth is not None and p.rows[0].key == key]
        out |= _nested(timeline, levels, view, cells, out, ruled)
    return out


def _put_names(lines: list[CellLine], ranges: Iterable[Range], view: View, cells: int) -> None:
    for r in ranges:
        first, last = bar_cells(view, cells, r.start_ns, r.end_ns)
        if last - first >= BAR_CELLS:
            put_bar(lines, first, last, bar_name(r, last - first - 1), _KIND[r.kind])


def bar_name(r: Range, room: int) -> str:
    """Text of a bar of this many cells: op and kernel, or where there is no room for both the op's last scope and name,
    or where no op is known the kernel without its namespaces."""
    kernel = short_kernel(r.name) if r.kind in ("compute", "collective") or r.name.startswith("_Z") else r.name
    op = "/".join(r.tf_op.rpartition(":")[0 if ":" in r.tf_op else 2].split("/")[-2:])
    both = f"{op} · {kernel}" if op and kernel != op else kernel
    if len(both) <= room:
        return both
    if op:
        return op if len(op) <= room else op.rpartition("/")[2]
    return kernel if len(kernel) <= room else kernel.rpartition("::")[2]


def _nested(timeline: Timeline, levels: Sequence[Place], view: View, cells: int, drawn: Lanes,
            ruled: npt.NDArray[np.bool_]) -> Lanes:
    """One thread, a line a level of nesting; level 0 is ``drawn`` from its coverage already."""
    ranges = timeline.ranges(levels[0].rows[0].key, view.start_ns, view.end_ns, _MAX_NESTED_RANGES)
    by_level: dict[int, list[Range]] = {}
    for r in ranges:
        by_level.setdefault(r.depth, []).append(r)
    deeper = [p for p in levels if p.depth]
    complete = len(ranges) < _MAX_NESTED_RANGES
    out: Lanes = {p.key: drawn[p.key] for p in levels if not p.depth}
    if deeper:
        cover = np.stack([cover_of(by_level.get(p.depth or 0, []), view, 2 * cells) for p in deeper])
        kinds = np.full(cover.shape, _KIND[ranges[0].kind] if ranges else 0, np.uint8)
        lines = draw_lines(cover, kinds, [1] * len(deeper), np.zeros((len(deeper), cells), np.uint8), ruled)
        shares = cover.mean(axis=1).tolist()
        out |= {p.key: DrawnPlace(lane_lines, share if complete else None)
                for p, lane_lines, share in zip(deeper, lines, shares, strict=True)}
    for place in levels:
        _put_names(out[place.key].lines, by_level.get(place.depth or 0, []), view, cells)
    return out


def cover_of(ranges: Sequence[Range], view: View, columns: int) -> npt.NDArray[np.float32]:
    """Share of each column that ranges in order of time, none over another, cover."""
    if not ranges:
        return np.zeros(columns, np.float32)
    starts = np.array([r.start_ns for r in ranges], np.float64)
    ends = np.array([r.end_ns for r in ranges], np.float64)
    edges = view.start_ns + np.arange(columns + 1) * (view.span_ns / columns)
    before = np.concatenate(([0.0], np.cumsum(ends - starts)))
    begun = np.searchsorted(starts, edges, "right")
    over = np.where(begun > 0, np.maximum(0.0, ends[np.maximum(begun - 1, 0)] - edges), 0.0)
    return np.clip(np.diff(before[begun] - over) * (columns / view.span_ns), 0, 1).astype(np.float32)

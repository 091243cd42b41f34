"""Layout of the monitor: what fits a terminal of which size, and how many lines each part gets. Pure.

Each line of the screen belongs to a part. A GPU is a line of figures with its lane before them, as on a node with
many GPUs, or a stack of lanes, one for each metric, as on a node with few. What a screen has beyond that goes to the
processes, to the recommendations and to the lane of the host's CPUs.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import cached_property
from typing import NamedTuple

from msgspec import Struct

from gputop.tui.monitor.columns import FURTHER_LANES, MAIN

MAX_LANE_LINES = 8  # as many bands of levels as two halves of each line show


class SizeClass(Struct, frozen=True):
    """A class of the style sheet that the main screen has below a size; it hides panels or puts them differently."""

    name: str
    below_columns: int
    below_lines: int
    reserved_lines: int | None  # kept below the GPU table, so that the recommendations stay on the screen


# From the smallest on: the first one that applies says how many lines are reserved.
SIZE_CLASSES = (
    SizeClass("tiny", 40, 12, 1),
    SizeClass("low", 0, 14, 5),
    SizeClass("short", 0, 20, 7),
    _NARROW := SizeClass("narrow", 120, 0, None),
)
_AXIS_FROM = 20  # lines; lower screens have none for the axis of time
_OTHER_LINES = 5  # header, title of the table, host, job, keys
_LINES_WITHOUT_GPUS = 6  # header, why there is no GPU, host, job, keys
# Columns; on a narrower screen a single process would take them from the recommendations. Without GPUs there are lines.
_ONE_PROCESS_BESIDE_FROM = 160
# The recommendations: so many on a screen of 24 lines, one more for each eight further ones, between these. The least
# is the frame and a recommendation: title, why, what to do.
_ADVICE_LINES, _LEAST_ADVICE_LINES, _MAX_ADVICE_LINES = 9, 7, 14
# Of the process panel below the recommendations: its frame and heading, the rows it has without them on a low screen,
# and, without GPUs, the most of the lines left.
_PROCESS_FRAME_LINES, _BARE_ROWS, _MAX_PROCESS_SHARE = 3, 2, 2 / 5
_PANEL_LINES = 10  # of the recommendations and the processes on a screen that is too low for all of this
_BANDS_FROM = 3  # lines of a lane that shows bands of levels: up to there the recommendations give it their lines
_STACKED_FROM = 2 + 5  # lines of a GPU, from which on its metrics have lanes of their own
_ALL_LANES_FROM = 24  # lines of a GPU, from which on it has each of FURTHER_LANES that can be read
_FIRST_LANES = 5
_TABLE_LANES = ("tensor", "dram")  # below the main one where the other figures are columns of a table
_ONE_LINE = ("memory", "temperature")  # lanes that hardly change


class LaneLines(NamedTuple):
    """A lane of each GPU and its height."""

    lane: str  # of :mod:`gputop.tui.monitor.columns`
    lines: int


class TableRows(Struct, frozen=True, dict=True):
    """The lines of the GPU table: what stands above the GPUs, those of each GPU, and the host's below them."""

    lanes: tuple[LaneLines, ...] = (LaneLines(MAIN, 1),)  # of each GPU, from the top; figures stand beside a single one
    host_lines: int = 0  # of the lane of the host's CPUs below the GPUs, one at most
    has_axis: bool = False

    @property
    def is_stacked(self) -> bool:
        """Return whether each GPU has a lane for each figure, instead of columns."""
        return len(self.lanes) > 1 + len(_TABLE_LANES)

    @cached_property
    def of_gpu(self) -> tuple[tuple[str, int], ...]:
        """The lane of each line of a GPU, and its row in that lane."""
        return tuple((lane, row) for lane, lines in self.lanes for row in range(lines))

    @property
    def per_gpu(self) -> int:
        return len(self.of_gpu)

    @property
    def top(self) -> int:
        """Lines above the first GPU: the title, and the axis of time."""
        return 1 + self.has_axis

    def lines(self, gpus: int) -> int:
        """Lines of the whole table; without GPUs their place says so."""
        return self.top + max(1, gpus) * self.per_gpu + self.host_lines

    def y_of(self, gpu: int) -> int:
        """The first line of a GPU, or of the host below the last one."""
        return self.top + gpu * self.per_gpu

    def gpu_at(self, y: int) -> int:
        """The GPU whose line this is: -1 above the first, and beyond the last one below it."""
        return max(-1, (y - self.top) // self.per_gpu)

    def hidden(self, gpus: int, scrolled: int, shown: int) -> tuple[int, int]:
        """Number of GPUs above and below the ``shown`` lines of the table, ``scrolled`` lines down."""
        above = max(0, -((self.top - scrolled) // self.per_gpu)) if scrolled > self.top else 0
        return above, max(0, gpus - (scrolled + shown - self.top) // self.per_gpu)


class Layout(NamedTuple):
    """The main screen at one size."""

    classes: frozenset[str]
    rows: TableRows
    table_lines: int  # of these that are shown; the table can be scrolled
    hidden_gpus: int  # below them; the line after the table counts them
    process_lines: int | None  # None: as high as the recommendations next to it

    @property
    def bare_processes(self) -> bool:
        """Return whether the process panel has neither frame nor heading."""
        return self.process_lines is not None and self.process_lines <= _BARE_ROWS


def layout(columns: int, lines: int, gpus: int, processes: int, unread: frozenset[str] = frozenset()) -> Layout:
    """The layout for a terminal of this size on a node with so many GPUs and processes on them.

    ``unread``: further lanes whose metric no GPU can read; the first have a line for the reason.
    """
    below = (processes <= 1 or not gpus) and columns < _ONE_PROCESS_BESIDE_FROM
    applying = [size for size in SIZE_CLASSES
                if columns < size.below_columns or lines < size.below_lines or (below and size is _NARROW)]
    classes = frozenset(size.name for size in applying)
    if gpus and not classes.intersection(("tiny", "short")):
        return _with_panels(classes, lines, gpus, processes, unread)
    reserved = next((size.reserved_lines for size in applying if size.reserved_lines is not None), 0)
    axis = bool(gpus) and lines >= _AXIS_FROM
    per_gpu = _between(1, (lines - _OTHER_LINES - axis - _PANEL_LINES) // gpus, MAX_LANE_LINES) if gpus else 1
    rows = TableRows((LaneLines(MAIN, per_gpu),), 0, axis)
    shown = min(rows.lines(gpus), max(2, lines - reserved)) if gpus else rows.lines(0)
    process_lines = None
    if "narrow" in classes:
        process_lines = _BARE_ROWS if gpus else _process_lines_without_gpus(lines, processes)
    hidden = max(0, gpus - max(0, shown - 1 - axis) // per_gpu)
    return Layout(classes, rows, shown, hidden, process_lines)


def _with_panels(classes: frozenset[str], lines: int, gpus: int, processes: int, unread: frozenset[str]) -> Layout:
    room = lines - _OTHER_LINES - 1  # without the axis
    advice = _between(_LEAST_ADVICE_LINES, _ADVICE_LINES + (lines - 24) // 8, _MAX_ADVICE_LINES)
    bare = framed = 0
    if "narrow" in classes:
        bare = _between(1, processes, _BARE_ROWS)
        framed = _PROCESS_FRAME_LINES + _between(1, processes, lines // 6)
    else:
        advice = _between(advice, processes + _PROCESS_FRAME_LINES, max(advice, min(_MAX_ADVICE_LINES, lines // 3)))
    for process_lines in (framed, bare):
        rows = room - advice - process_lines
        if rows // gpus >= _STACKED_FROM:
            lanes, host_lines = _stacked(rows, gpus, unread)
            break
    else:
        least = min(_BANDS_FROM, (room - _LEAST_ADVICE_LINES - bare) // gpus)
        per_gpu = max(1, least, (room - advice - bare) // gpus)
        readable = [lane for lane in _TABLE_LANES if lane not in unread][:max(0, per_gpu - _BANDS_FROM)]
        lanes, host_lines = _grown({MAIN: 1, **dict.fromkeys(readable, 1)}, per_gpu), 0
        spare = room - per_gpu * gpus
        if spare < _LEAST_ADVICE_LINES + bare:  # with one line each
            shown = max(1, room - _LEAST_ADVICE_LINES - bare - 1)
            return Layout(classes, TableRows(lanes, 0, True), 2 + shown, gpus - shown, bare or None)
        process_lines = framed if spare - framed >= _ADVICE_LINES else bare
        spare -= process_lines
        host_lines = _between(0, spare - advice, 1)
    table = TableRows(lanes, host_lines, True)
    return Layout(classes, table, table.lines(gpus), 0, process_lines or None)


def _stacked(rows: int, gpus: int, unread: frozenset[str]) -> tuple[tuple[LaneLines, ...], int]:
    """The lanes of each GPU, and the lines of the host's lane, which together take ``rows`` or little less."""
    host_lines = min(1, rows - _STACKED_FROM * gpus)
    per_gpu = (rows - host_lines) // gpus
    further = FURTHER_LANES[:_FIRST_LANES]
    if per_gpu >= _ALL_LANES_FROM:
        further += tuple(lane for lane in FURTHER_LANES[_FIRST_LANES:] if lane not in unread)
    return _grown({MAIN: 2, **dict.fromkeys(further, 1)}, per_gpu, unread), host_lines


def _grown(heights: dict[str, int], per_gpu: int, fixed: Collection[str] = ()) -> tuple[LaneLines, ...]:
    """The lanes with their heights grown to ``per_gpu`` lines: three for the main one while tensor cores and DRAM get
    two and another one gets one. Those that hardly change, or that are ``fixed``, keep their line."""
    weights = {lane: 3 if lane == MAIN else 2 if lane in _TABLE_LANES else 1 for lane in heights
               if lane not in _ONE_LINE and lane not in fixed}
    for _ in range(per_gpu - sum(heights.values())):
        low = min((lane for lane in weights if heights[lane] < MAX_LANE_LINES),
                  key=lambda lane: (heights[lane] + 1) / weights[lane], default="")
        if low:
            heights[low] += 1
    return tuple(LaneLines(lane, lines) for lane, lines in heights.items())


def _process_lines_without_gpus(lines: int, processes: int) -> int:
    most = int((lines - _LINES_WITHOUT_GPUS) * _MAX_PROCESS_SHARE)
    if not processes or most <= _BARE_ROWS + _PROCESS_FRAME_LINES:
        return _between(1, processes, _BARE_ROWS)
    return min(processes + _PROCESS_FRAME_LINES, most)


def _between(least: int, value: int, most: int) -> int:
    return max(least, min(value, most))

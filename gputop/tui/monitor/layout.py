"""What of the monitor fits a terminal of which size. Pure."""

from __future__ import annotations

from typing import NamedTuple

from gputop.tui.monitor.columns import has_axis, lines_per_gpu


class SizeClass(NamedTuple):
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
RESERVED_LINES = 13
_LINES_WITHOUT_GPUS = 6  # header, why there is no GPU, host, job, keys
# Of the process panel where it is below the recommendations: what it needs, and at most this share of the lines left.
# Where frame and heading would leave it no more rows than these, it has the rows without them, and so has one process
# beside GPUs.
_PROCESS_FRAME_LINES, _BARE_ROWS, _MAX_PROCESS_SHARE = 3, 2, 2 / 5
_OTHER_LINES = 4  # header, host, job, keys
_LEAST_ADVICE_LINES = 5  # the frame and a recommendation: title, why, what to do
# Columns; on a narrower screen a single process would take them from the recommendations. Without GPUs there are lines.
_ONE_PROCESS_BESIDE_FROM = 160


class Layout(NamedTuple):
    """The main screen at one size."""

    classes: frozenset[str]
    lines_per_gpu: int
    has_axis: bool
    max_table_lines: int  # of the GPU table; the GPUs beyond them can be scrolled to
    process_lines: int | None  # None: as high as the recommendations beside it

    @property
    def bare_processes(self) -> bool:
        """Whether the process panel has neither frame nor heading."""
        return self.process_lines is not None and self.process_lines <= _BARE_ROWS


def layout(columns: int, lines: int, gpus: int, processes: int) -> Layout:
    """The layout for a terminal of this size on a node with so many GPUs and processes on them."""
    below = (processes <= 1 or not gpus) and columns < _ONE_PROCESS_BESIDE_FROM
    found = [size for size in SIZE_CLASSES
             if columns < size.below_columns or lines < size.below_lines or (below and size is _NARROW)]
    reserved = next((size.reserved_lines for size in found if size.reserved_lines is not None), RESERVED_LINES)
    classes = frozenset(size.name for size in found)
    per_gpu, axis = lines_per_gpu(lines, gpus) if gpus else 1, bool(gpus) and has_axis(lines)
    process_lines = _process_lines(lines, gpus, processes) if "narrow" in classes else None
    # Where the processes are below the recommendations, high lanes would leave these no line.
    while per_gpu > 1 and process_lines is not None and (
            lines - _OTHER_LINES - 1 - axis - gpus * per_gpu - process_lines < _LEAST_ADVICE_LINES):
        per_gpu -= 1
    return Layout(classes, per_gpu, axis, max(2, lines - reserved), process_lines)


def _process_lines(lines: int, gpus: int, processes: int) -> int:
    free = lines - RESERVED_LINES if gpus else lines - _LINES_WITHOUT_GPUS
    most = int(free * _MAX_PROCESS_SHARE)
    if processes <= bool(gpus) or most <= _BARE_ROWS + _PROCESS_FRAME_LINES:
        return max(1, min(processes, _BARE_ROWS))
    return min(processes + _PROCESS_FRAME_LINES, most)

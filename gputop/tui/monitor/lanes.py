"""The spectrogram's cells: history slices turned into glyphs and styles, kept while they last.

A column is one slice of time on a fixed grid: slice boundaries are multiples of the slice's length. A picture that
scrolls therefore moves by whole columns and never shimmers. Between two samples only the newest slices change;
all others are drawn once.

With one or two rows, height and color both show the mean level. With more rows each half row is a band of levels,
and its brightness is the share of samples that reach it: a GPU that is busy half of the time is dim up to the top,
and a GPU that is half busy is bright up to the middle.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from msgspec import Struct
from rich.segment import Segment
from rich.style import Style

from gputop.core.metrics import GPU_METRICS
from gputop.render.palette import BLANK_STYLE, BOLD, IDLE_SHADE, SHADES, STEPS, bar_style, cell_style, step_of
from gputop.text.units import BLANK, reads_zero

if TYPE_CHECKING:
    from gputop.telemetry.history import History, Lane

Cell = tuple[str, Style]
Column = tuple[Cell, ...]  # top to bottom

DEFAULT_SPAN_S = 240.0
SPANS_S = (60.0, 120.0, 240.0, 600.0, 1800.0, 3600.0, 4 * 3600.0, 12 * 3600.0)  # the steps of the zoom
_REDRAWS_PER_SLICE = 2  # of the newest column; the figure beside it is always of the newest sample
_GHOST_SHADE = 4  # shade of a background that every sample reaches, of SHADES


class TimeView(Struct, frozen=True):
    """Part of the past that is on screen. ``end_s`` None follows the newest sample."""

    slice_s: float = 5.0
    end_s: float | None = None


class LaneWindow(Struct, frozen=True):
    """The slices on screen: column 0 is slice ``first``, which starts at ``first * slice_s`` (Unix time)."""

    first: int
    columns: int
    slice_s: float

    @classmethod
    def of(cls, view: TimeView, newest_s: float, columns: int) -> LaneWindow:
        end_s = view.end_s if view.end_s is not None else newest_s
        return cls(int(end_s // view.slice_s) - columns + 1, columns, view.slice_s)

    def column(self, time_s: float) -> int:
        """Column of a time; outside of 0 … ``columns - 1`` it is not on screen."""
        return int(time_s // self.slice_s) - self.first

    def begin_s(self, column: int) -> float:
        return (self.first + column) * self.slice_s


def common_scale(history: History, metric: str, span_s: float, end_s: float | None) -> float | None:
    """100% of a metric without a scale of its own: the largest single sample still kept of the time in view, on any
    GPU, rounded up to 1, 2, 5 or 10 of its decimal place. None: it has one, or there is nothing but zeros."""
    if GPU_METRICS[metric].full_scale is not None:
        return None
    _, values = history.windows(metric, span_s, end_s=end_s)
    largest = max((v for readings in values for v in readings if v == v), default=0.0)
    if largest <= 0:
        return None
    step = 10.0 ** math.floor(math.log10(largest))
    return next(m * step for m in (1, 2, 5, 10) if m * step >= largest)


def blank_column(rows: int) -> Column:
    """A slice without a sample: a dot on the lowest row, which differs from a measured zero."""
    return ((" ", BLANK_STYLE),) * (rows - 1) + ((BLANK, BLANK_STYLE),)


def column(rows: int, mean: float, reach: Sequence[float], muted: bool = False) -> Column:
    """One slice as ``rows`` cells; ``mean`` 0-1 and ``reach[i]`` the share of samples at level i or above."""
    if rows <= 2:
        # Too low for bands: a bar of the mean in eighths; above it, in the background, a ghost of the
        # share of samples that reach there.
        cells = []
        for row in range(rows - 1, -1, -1):
            eighths = min(8, max(0, round(mean * rows * 8) - 8 * row))
            if row == 0:
                eighths = max(1, eighths)  # a measured zero is the lowest bar, but dim; any activity is one
                if reads_zero(mean):
                    cells.append(_idle(muted))
                    continue
            above = (row + eighths / 8) / rows
            free = math.ceil(above * len(reach)) / len(reach)  # the first level that begins above the bar
            ghost = 0 if rows == 1 or free >= (row + 1) / rows else round(
                _share_between(reach, free, (row + 1) / rows) * _GHOST_SHADE)
            top = step_of(above)
            cells.append((" ▁▂▃▄▅▆▇█"[eighths], bar_style(top, step_of((row + 1) / rows), ghost, muted)))
        return tuple(cells)
    return _bands(rows, tuple(reach), not reads_zero(mean), muted)


@lru_cache(4096)  # with a few samples in a slice there are few ways in which they can lie
def _bands(rows: int, reach: tuple[float, ...], active: bool, muted: bool) -> Column:
    bands = 2 * rows
    halves = []
    for band in range(bands):
        share = _share_between(reach, band / bands, (band + 1) / bands)
        shade = 0 if share < 0.02 else max(1, round(share * (SHADES - 1)))
        if band == 0 and active:  # any activity is as bright as it can be
            shade = SHADES - 1
        halves.append((round(band / (bands - 1) * (STEPS - 1)), shade))
    # Where no sample reaches, a space: a copy of the screen as text keeps the outline, and a space needs no color.
    cells = [(" ▀"[any(shade for _, shade in halves[i:i + 2])], cell_style(halves[i + 1], halves[i], muted))
             for i in range(bands - 2, -1, -2)]
    return (*cells[:-1], cells[-1] if active else _idle(muted))


def _idle(muted: bool) -> Cell:
    """A measured zero: the lowest bar, dim. It is neither a little activity nor nothing measured."""
    return "▁", cell_style((0, IDLE_SHADE), (0, 0), muted)


def _share_between(reach: Sequence[float], low: float, high: float) -> float:
    """Mean of ``reach`` over the levels from ``low`` to ``high`` (0-1)."""
    levels = len(reach)
    first, last = low * levels, high * levels
    total = sum(reach[i] * (min(last, i + 1) - max(first, i)) for i in range(int(first), min(levels, math.ceil(last))))
    return total / (last - first)


def with_cursor(cell: Cell) -> Cell:
    """A cell with the cursor in time on it: a line down all GPUs. The figures beside the lane tell its level."""
    return "┃", BOLD + Style(bgcolor=cell[1].bgcolor)


def merged(cells: Iterable[Cell]) -> list[Cell]:
    """Cells from left to right, neighbors of one style together."""
    out: list[Cell] = []
    for text, style in cells:
        if out and out[-1][1] == style:
            out[-1] = (out[-1][0] + text, style)
        else:
            out.append((text, style))
    return out


class LaneSignal(Struct, frozen=True):
    """Signal that a lane shows. Without ``metrics`` it is the lane of the host's CPUs.

    Of several ``metrics`` the larger level of each slice is drawn (both directions of a full-duplex link: the busier
    one is what saturates).
    """

    gpu: str
    metrics: tuple[str, ...]
    full_scale: float | None = None  # 100% of a metric that has no scale of its own
    interval_s: float = 0.0  # a sample fills the slices of this time before it, and half as much again: ticks jitter


class LaneCache:
    """The columns of one lane, oldest first, brought up to date by :meth:`update`."""

    def __init__(self, muted: bool = False) -> None:
        self.columns: deque[Column] = deque()
        self._means: deque[float] = deque()  # level 0-1 of each column, NaN: nothing measured
        self._muted = muted
        self._key: tuple[object, ...] = ()
        self._drawn_s = 0.0  # time of the sample it was last drawn for
        self._last_index = 0  # slice number (start / slice_s) of the newest column

    def update(self, history: History | None, signal: LaneSignal, view: TimeView, width: int, rows: int,
               newest_s: float | None = None) -> int:
        """Bring the lane to ``newest_s`` or to the newest sample; returns how many columns at the right look different.
        """
        filled = int(1.5 * signal.interval_s / view.slice_s)
        key = (signal.gpu, signal.metrics, view, width, rows, signal.full_scale, filled, history is None)
        same, self._key = key == self._key, key
        if history is None or width <= 0 or history.newest_s is None:
            self.columns = deque([blank_column(rows)] * max(0, width), maxlen=max(0, width))
            self._means.clear()
            return 0 if same else width
        end_s = view.end_s if view.end_s is not None else newest_s or history.newest_s
        index = int(end_s // view.slice_s)
        redraw_s = view.slice_s / _REDRAWS_PER_SLICE
        if same and self._means and index == self._last_index and 0 <= end_s - self._drawn_s < redraw_s:
            return 0
        behind, self._last_index = index - self._last_index, index
        self._drawn_s = end_s
        if not same or not 0 <= behind < width or not self._means:
            count, before = width, []
            self.columns, self._means = deque(maxlen=width), deque(maxlen=width)
        else:
            # The newest slice may have been incomplete when it was drawn: it is drawn again.
            count, before = behind + 1, [*self.columns]
            self.columns.pop()
            self._means.pop()
        lane_end_s = (index + 1) * view.slice_s
        self._extend([history.lane(signal.gpu, metric, end_s=lane_end_s, slice_s=view.slice_s, slices=count,
                                   full_scale=signal.full_scale) for metric in signal.metrics]
                     or [history.host_cpu_lane(end_s=lane_end_s, slice_s=view.slice_s, slices=count)], rows, filled)
        if not behind and before:
            return 0 if self.columns[-1] == before[-1] else 1
        same_columns = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(before, self.columns, strict=False))
        return width - sum(1 for _ in same_columns)

    def _extend(self, lanes: Sequence[Lane], rows: int, filled: int) -> None:
        """Append the slices, taking the lane with the higher mean level where there are several; a slice also fills
        up to ``filled`` empty ones before it."""
        prepared = [_filled(*_levels(lane), filled) for lane in lanes]
        for i in range(len(prepared[0][0])):
            mean, reach = math.nan, prepared[0][1][i]
            for means, reaches in prepared:
                if means[i] == means[i] and not means[i] <= mean:  # NaN: nothing measured
                    mean, reach = means[i], reaches[i]
            self._means.append(mean)
            self.columns.append(blank_column(rows) if mean != mean
                                else column(rows, min(1.0, max(0.0, mean)), reach, self._muted))

    def mean(self) -> float | None:
        """Mean level 0-1 over what is shown; None where nothing was measured."""
        measured = [m for m in self._means if m == m]
        return sum(measured) / len(measured) if measured else None

    def mean_at(self, column: int) -> float | None:
        """Mean level 0-1 of one slice; None where nothing was measured."""
        mean = self._means[column] if 0 <= column < len(self._means) else math.nan
        return mean if mean == mean else None

    def newest(self, y: int, cursor: int | None = None) -> Segment:
        """Row ``y`` of the newest slice; ``cursor`` is the column it is on."""
        cell = self.columns[-1][y]
        return Segment(*(with_cursor(cell) if cursor == len(self.columns) - 1 else cell))

    def row(self, y: int, cursor: int | None = None) -> list[Segment]:
        """Row ``y`` (0 is the top) without its newest cell, as segments; neighbors of one style merged."""
        out: list[Segment] = []
        text, style = "", None
        for i, col in enumerate(itertools.islice(self.columns, len(self.columns) - 1)):
            glyph, cell = col[y] if i != cursor else with_cursor(col[y])
            if cell is style:
                text += glyph
            else:
                if text:
                    out.append(Segment(text, style))
                text, style = glyph, cell
        if text:
            out.append(Segment(text, style))
        return out


def _filled(means: list[float], reaches: list[list[float]], most: int) -> tuple[list[float], list[list[float]]]:
    """Fill up to ``most`` empty slices before each measured one with its values."""
    room = 0
    for i in range(len(means) - 1, -1, -1):
        if means[i] == means[i]:
            room = most
        elif room > 0:
            means[i], reaches[i] = means[i + 1], reaches[i + 1]
            room -= 1
    return means, reaches


def _levels(lane: Lane) -> tuple[list[float], list[list[float]]]:
    """Mean level 0-1 and, per slice, the share of samples reaching each level.

    Where 100% is not known (a driver that hides the power limit, say) there are no levels: all NaN.
    """
    full = lane.full_scale or math.nan
    reaches = [[*itertools.accumulate(reversed(shares))][::-1] for shares in lane.levels]
    return [mean / full for mean in lane.mean], reaches

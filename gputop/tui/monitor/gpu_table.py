"""The GPU table: each GPU has a spectrogram, with its newest figures beside it."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, ClassVar

from rich.segment import Segment
from textual import events
from textual.binding import BindingType
from textual.containers import ScrollableContainer
from textual.geometry import Region, Size
from textual.message import Message
from textual.strip import Strip
from textual.widget import Widget

from gputop.core.samples import OK, GpuSample, HostSample, NodeSample
from gputop.render.gpu_columns import COLUMNS
from gputop.render.palette import ACCENT, DIM, PLAIN
from gputop.render.styled_text import StyledText, crop, wrap
from gputop.render.time_slices import slice_for
from gputop.session.event_log import EventLog
from gputop.text.units import fit, percent, printable, rate_gb
from gputop.tui.keys import key
from gputop.tui.monitor import stacked_lanes, time_axis
from gputop.tui.monitor.columns import (
    ACTIVITY,
    SECOND,
    Field,
    Part,
    figures_of,
    mean_text,
    parts,
    plan,
    second_line,
    title_texts,
)
from gputop.tui.monitor.lanes import DEFAULT_SPAN_S, SPANS_S, LaneCache, LaneSignal, TimeView, Window, common_scale
from gputop.tui.monitor.layout import LaneLines, Layout
from gputop.tui.monitor.stacked_lanes import HOST, MAIN, figure_key
from gputop.tui.monitor.status_lines import bar
from gputop.tui.monitor.time_cursor import TimeCursor
from gputop.tui.terminal.escape_codes import MAX_SHIFT_COLUMNS
from gputop.tui.widgets.cached_lines import CachedLinesWidget

if TYPE_CHECKING:
    from gputop.telemetry.history import History

_LANES = {column.id: column for column in COLUMNS if column.draw == "spectrogram"}
# Moving the lanes is most of what a young picture costs: they move once they have so much new to show, a share of the
# history there is, and at the latest after so many seconds, as once a slice is that long, or columns that the terminal
# still moves by itself. The bars and figures beside them follow each sample.
_MOVE_SHARE, _MOVE_LATEST_S = 0.25, 5.0
# Of the time in view, at least: to show all of it, slices of twice the length would leave half a lane empty.
_COVERED = 0.8
_NAMED_FROM = 8  # cells before a lane: the number of the GPU and the name of the lane
_PARTS = 6  # three lanes, each followed by its newest slice and figures


class Pane(CachedLinesWidget):
    """One part of the table, for all GPUs. Parts are widgets because Textual repaints a changed
    cell with all that is left of it in its widget: narrow widgets keep that little."""

    def __init__(self, table: GpuTable) -> None:
        super().__init__()
        self._table = table
        self.part: Part | None = None

    def render_line(self, y: int) -> Strip:
        return self.strip(self._table.runs(self.part, y), self.part.width) if self.part else self.strip((), 0)

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        return self._table.lines


_RESERVED = (" GiB reserved", " reserved")  # behind "76.4/79.6", the longest that has room


class GpuTable(Widget, can_focus=True):
    """All GPUs. :meth:`update_view` brings it to the newest sample, repainting only what changed."""

    BINDINGS: ClassVar[list[BindingType]] = [
        key("up,k", "move(-1)", "up", "select the GPU above"),
        key("down,j", "move(1)", "down", "select the GPU below"),
        key("enter", "details", "details of the GPU", "all its readings, and the source of each or why it is missing"),
    ]
    PANEL = "GPUs"

    class Opened(Message):
        """All readings of a GPU are wanted."""

        def __init__(self, gpu: GpuSample) -> None:
            super().__init__()
            self.gpu = gpu

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self.metric = ACTIVITY
        self._stack: tuple[LaneLines, ...] = (LaneLines(MAIN, 1),)  # the lanes of each GPU
        self.rows_per_gpu = 1
        self._rows: list[tuple[str, int]] = [(MAIN, 0)]  # of each line of a GPU: which lane it belongs to, and its row
        self._host_lines = 0  # of the lane of the host's CPUs
        self.axis_lines = 0  # 1 with the axis of time and its marks
        self.span_s = DEFAULT_SPAN_S
        self.interval_s = 1.0  # between samples
        self._longest_interval_s = 0.0  # so far: older samples may be further apart
        self._stretches = True  # the picture is shorter while there is less history; until the user zooms
        self.end_s: float | None = None  # None follows the newest sample
        self._lanes_end_s: float | None = None  # the newest sample that the lanes show
        self.time = TimeCursor()  # with a cursor the figures are those of the slice under it
        self.selected = 0
        self.sample: NodeSample | None = None
        self._reserved: frozenset[int] = frozenset()  # GPUs whose memory is reserved, so that its use is not known
        self._history: History | None = None
        self._marks: EventLog | None = None
        self._width = 0
        self._fields: dict[str, Field] = {}
        self._panes = [Pane(self) for _ in range(_PARTS)]
        self._lanes: dict[tuple[str, str], LaneCache] = {}
        self._activity: dict[str, str] = {}
        self._figures: dict[str, dict[str, StyledText]] = {}
        self._title = self._no_gpu = ""
        self._axis: list[StyledText] = []
        self._axis_of: tuple[object, ...] = ()  # what it was made of
        self._full_scales: dict[str, float | None] = {}  # 100% of each lane whose metric has no scale of its own
        self._picture: tuple[object, ...] = ()  # what the lanes were last drawn for

    def compose(self) -> Iterable[Widget]:
        yield from self._panes

    # -- what is shown ------------------------------------------------------------------------

    @property
    def gpus(self) -> tuple[GpuSample, ...]:
        return self.sample.gpus if self.sample else ()

    @property
    def lines(self) -> int:
        return self._top + max(1, len(self.gpus)) * self.rows_per_gpu + self._host_lines

    @property
    def _is_stacked(self) -> bool:
        """Return whether each GPU has further lanes."""
        return len(self._stack) > 1

    def hidden(self, scrolled: int, shown: int) -> tuple[int, int]:
        """Number of GPUs above and below the ``shown`` lines of the table, ``scrolled`` lines down."""
        lines = self.rows_per_gpu
        above = max(0, -((self._top - scrolled) // lines)) if scrolled > self._top else 0
        below = len(self.gpus) - (scrolled + shown - self._top) // lines
        return above, max(0, below)

    @property
    def _top(self) -> int:
        """Lines above the first GPU."""
        return 1 + self.axis_lines

    @property
    def _main_width(self) -> int:
        return max(1, self._fields["main"].width) if self._fields else 1

    @property
    def view(self) -> TimeView:
        span_s, shortest_s = self.span_s, 0.0
        if self._stretches and self.end_s is None and self._history is not None \
                and (oldest_s := self._history.oldest_s) is not None:
            age_s = (self._history.newest_s or oldest_s) - oldest_s
            span_s, shortest_s = min(span_s, age_s), min(self.interval_s, span_s / self._main_width)
        return TimeView(slice_for(_COVERED * span_s, self._main_width, _COVERED * shortest_s), self.end_s)

    @property
    def span_shown_s(self) -> float:
        """Seconds from the left to the right edge of the main lane."""
        return self.view.slice_s * self._main_width

    def metrics_of(self, gpu: GpuSample) -> tuple[str, ...]:
        """The metric of the main lane for this GPU, after the ladder."""
        return self._activity_of(gpu) if self.metric == ACTIVITY else (self.metric,)

    def _activity_of(self, gpu: GpuSample) -> tuple[str]:
        which, now = gpu.activity()
        uuid = gpu.info.uuid
        if now.value is not None:
            self._activity[uuid] = which
        elif uuid not in self._activity and self._history is not None:
            # Lost or not responding since before this screen: the lane shows what there was.
            _, fine = self._history.window(uuid, "sm_active", self.span_shown_s)
            self._activity[uuid] = "gpu_util" if all(v != v for v in fine) else "sm_active"
        return (self._activity.get(uuid, which),)

    def take_layout(self, fitted: Layout) -> None:
        """Give each GPU its lanes, the host its own, and the axis a line."""
        shape = (fitted.lanes, fitted.host_lines, int(fitted.has_axis))
        if shape != (self._stack, self._host_lines, self.axis_lines):
            self._stack, self._host_lines, self.axis_lines = shape
            self._rows = [(lane, row) for lane, lines in self._stack for row in range(lines)]
            self.rows_per_gpu = len(self._rows)
            self._lay_out()

    def note_reserved(self, gpus: Collection[int]) -> None:
        """Say of the memory of these GPUs that it is reserved; with the next sample."""
        self._reserved = frozenset(gpus)

    def update_view(self, sample: NodeSample | None, history: History | None, marks: EventLog | None = None) -> None:
        """Take over the newest sample and repaint what differs from the screen."""
        before, self.sample, self._history, self._marks = self.gpus, sample, history, marks
        self._longest_interval_s = max(self._longest_interval_s, self.interval_s)
        if len(before) != len(self.gpus):
            self._lay_out()
        self._repaint()

    def _lay_out(self) -> None:
        """Columns for the present width, and which pane draws which."""
        if not self._width:
            return
        fields = stacked_lanes.fields_of(self._width) if self._is_stacked else plan(self._width)
        self._fields = {f.key: f for f in fields}
        self._figures.clear()
        self._lanes.clear()
        self._picture = ()
        cut = parts(fields)
        for i, pane in enumerate(self._panes):
            pane.part = cut[i] if i < len(cut) else None
            pane.display = pane.part is not None
            if pane.part is not None:
                pane.styles.width = pane.part.width
            pane.refresh(layout=True)

    def _repaint(self) -> None:
        if self.size.width and self.size.width != self._width:
            self._width = self.size.width
            self._lay_out()
        if not self._fields:
            return
        self._lanes_end_s = self._lanes_end()
        self._update_cursor()
        self._full_scales = self._common_scales()
        now = "now" if self.time.slice is None else "mean"
        title = "".join(title_texts(self._fields.values(), self._main_title(), now))
        if self.sample is not None and not self.gpus:
            title, self._no_gpu = self._why_no_gpu(self.sample.source)
        if title != self._title:
            self._title = title
            self._refresh_line(0)
        if self.axis_lines:
            self._update_axis()
        views = {f.key: self._view_of(f) for f in self._fields.values() if f.is_lane}
        picture = (views, self._lanes_end_s, self._full_scales, self.metric, self._history,
                   self.rows_per_gpu, [gpu.info.uuid for gpu in self.gpus])
        moved, self._picture = picture != self._picture, picture
        dirty: dict[Pane, list[Region]] = {pane: [] for pane in self._panes if pane.part is not None}
        y = self._top
        for gpu in self.gpus:
            drawn = self._update_lanes(gpu, views) if moved else dict.fromkeys(views, 0)
            self._note_changes(dirty, y, self.rows_per_gpu, gpu.info.uuid, drawn, self._figures_of(gpu))
            y += self.rows_per_gpu
        if self._host_lines and self.gpus and self.sample is not None:
            columns = self._update_host_lane(views[MAIN]) if moved else 0
            self._note_changes(dirty, y, self._host_lines, HOST, {MAIN: columns}, self._host_figures(self.sample.host))
        for pane, regions in dirty.items():
            if regions:
                pane.refresh(*regions)

    def _note_changes(self, dirty: dict[Pane, list[Region]], y: int, lines: int, device: str, drawn: dict[str, int],
                      figures: dict[str, StyledText]) -> None:
        """Note what differs from the screen in the ``lines`` from ``y`` on, those of one GPU or of the host.

        ``drawn``: how many columns at the right of each of its lanes look different.
        """
        shown = self._figures.get(device, {})
        self._figures[device] = figures
        message_changed = figures.get("message") != shown.get("message")
        for pane, regions in dirty.items():
            assert pane.part is not None
            columns = drawn.get(pane.part.lane.key, 0)
            if message_changed or (columns > 1 and not pane.part.newest):
                regions.append(Region(0, y, pane.part.width, lines))
            elif pane.part.newest:
                if columns:
                    regions.append(Region(0, y, 1, lines))
                regions += self._changed_figures(pane.part, y, device, figures, shown)

    def _common_scales(self) -> dict[str, float | None]:
        """100% of the lanes whose metric has no scale of its own."""
        history = self._history
        if history is None:
            return {}
        metrics: dict[str, tuple[str, ...]] = {MAIN: (self.metric,) if self.metric != ACTIVITY else ()}
        metrics |= {lane: stacked_lanes.LANES[lane].metrics for lane, _ in self._stack[1:]}
        scales: dict[str, float | None] = {}
        for lane, lane_metrics in metrics.items():
            known_scales = [scale for metric in lane_metrics
                            if (scale := common_scale(history, metric, self.span_shown_s, self.end_s)) is not None]
            if known_scales:
                scales[lane] = max(known_scales)
        return scales

    @property
    def _full_scale(self) -> float | None:
        """Full scale of the main lane."""
        return self._full_scales.get(MAIN)

    def _lanes_end(self) -> float | None:
        """The newest sample that the lanes are to show; they move by some seconds at a time."""
        history, shown_s = self._history, self._lanes_end_s
        if history is None or (newest_s := history.newest_s) is None or shown_s is None or self.time.time_s is not None:
            return history.newest_s if history is not None else None
        wait_s = min(_MOVE_LATEST_S, MAX_SHIFT_COLUMNS * self.view.slice_s,
                     _MOVE_SHARE * (newest_s - (history.oldest_s or newest_s)))
        return shown_s if 0 <= newest_s - shown_s < wait_s - self.interval_s / 2 else newest_s  # ticks jitter

    def _why_no_gpu(self, reason: str) -> tuple[str, str]:
        """Reason why there is no GPU and how there would be one: the sentences that fit into two lines."""
        whole = re.split(r"(?<=[.]) ", printable(f"No GPU here. {reason}"))
        count = next((n for n in range(len(whole), 1, -1) if len(wrap(" ".join(whole[:n]), self._width - 2, 3)) < 3), 2)
        lines = wrap(" ".join(whole[:count]), self._width - 2, 2)
        return " " + lines[0].ljust(self._width), " " + "".join(lines[1:])

    def _refresh_line(self, y: int) -> None:
        for pane in self._panes:
            pane.refresh(Region(0, y, pane.size.width, 1))

    def _changed_figures(self, part: Part, y: int, device: str, new: dict[str, StyledText],
                         old: dict[str, StyledText]) -> Iterator[Region]:
        for line, mark in self._figure_lines(device):
            changed = [f for f in part.fields if new.get(mark(f.key)) != old.get(mark(f.key))]
            if changed:
                x, end = changed[0].x - part.x, changed[-1].x + changed[-1].width - part.x
                yield Region(x, y + line, end - x, 1)

    def _figure_lines(self, device: str) -> Iterator[tuple[int, Callable[[str], str]]]:
        """The lines of a device that have figures, and the key in its figures of a field there."""
        rows = [(HOST, row) for row in range(self._host_lines)] if device == HOST else self._rows
        for line, (lane, row) in enumerate(rows):
            if row <= 1:
                yield line, partial(figure_key, lane, mark=SECOND if row else "")

    def _figures_of(self, gpu: GpuSample) -> dict[str, StyledText]:
        gpu = self.time.at_cursor(gpu)
        reserved = gpu.info.index in self._reserved
        if self._is_stacked:
            figures = self._stacked_figures(gpu)
            key = figure_key("memory", "note")
            if reserved and key in figures:
                width = self._fields["note"].width
                figures[key] = fit(next((note for note in _RESERVED if len(note) <= width), ""), width), DIM
            return figures
        figures = figures_of(gpu, self.metric, self._fields)
        if self.rows_per_gpu > 1:
            figures |= second_line(gpu, self._lanes[gpu.info.uuid, MAIN].mean(), self.metric, self._full_scale)
            if reserved and "memory" in figures:
                figures["memory" + SECOND] = ("reserved", DIM)
        return figures

    def _stacked_figures(self, gpu: GpuSample) -> dict[str, StyledText]:
        """The figures next to each lane of a GPU, by :func:`figure_key`."""
        out = stacked_lanes.figures_of_gpu(gpu, self.metric, [lane for lane, _ in self._stack], self._fields)
        if gpu.state != OK:
            return out
        for slot, lines in self._stack:
            mean = self._lanes[gpu.info.uuid, slot].mean() if lines > 1 else None
            if mean is not None:
                lane = stacked_lanes.lane_shown(slot, self.metric)
                metric = self.metric if slot == MAIN else (stacked_lanes.LANES[lane].metrics or (ACTIVITY,))[0]
                text = mean_text(gpu, metric, mean, self._full_scales.get(slot))
                out[figure_key(slot, "value", SECOND)] = (f"mean {text}", DIM)
        return out

    def _host_figures(self, host: HostSample) -> dict[str, StyledText]:
        """The figures next to the lane of the host's CPUs; those of the slice under the cursor, where there is one."""
        after = [f for f in self._parts_of(MAIN)[1].fields if f.key not in ("bar", self._value_key)]
        figures = stacked_lanes.host_figures(host, sum(field.width for field in after))
        level = host["cpu_ratio"].value
        if (cursor := self._cursor_in(self._fields[MAIN])) is not None:
            level = self._lanes[HOST, HOST].mean_at(cursor)
            figures["value"] = ("N/A" if level is None else percent(level), PLAIN)
        out = {figure_key(HOST, self._value_key): figures["value"]}
        if level is not None and "bar" in self._fields:
            out[figure_key(HOST, "bar")] = bar(level, self._fields["bar"].width - 1)
        note = figures.get("note")
        if note is not None and after:  # over the columns of a GPU that the host has no figures for
            text = note[0]
            for field in after:
                out[figure_key(HOST, field.key)] = (text[:field.width].ljust(field.width), note[1])
                text = text[field.width:]
        return out

    @property
    def _value_key(self) -> str:
        """The field with the main lane's newest value."""
        return "value" if self._is_stacked else "now"

    def _parts_of(self, lane: str) -> list[Part]:
        return [pane.part for pane in self._panes if pane.part is not None and pane.part.lane.key == lane]

    def _update_lanes(self, gpu: GpuSample, views: Mapping[str, TimeView]) -> dict[str, int]:
        """Bring the lanes of a GPU to the newest sample; how many columns at the right of each field look different."""
        if not self._is_stacked:
            return {key: self._update_lane(gpu, key, _LANES[key].metrics or self.metrics_of(gpu), view,
                                           self.rows_per_gpu, _LANES[key].muted) for key, view in views.items()}
        drawn = 0
        for slot, lines in self._stack:
            lane = stacked_lanes.lane_shown(slot, self.metric)
            metrics = self.metrics_of(gpu) if slot == MAIN else (
                stacked_lanes.LANES[lane].metrics or self._activity_of(gpu))
            muted = slot != MAIN and stacked_lanes.LANES[lane].muted
            drawn = max(drawn, self._update_lane(gpu, slot, metrics, views[MAIN], lines, muted))
        return {MAIN: drawn}

    def _update_lane(self, gpu: GpuSample, key: str, metrics: tuple[str, ...], view: TimeView, lines: int,
                     muted: bool) -> int:
        field = self._fields[MAIN if self._is_stacked else key]
        cache = self._lanes.setdefault((gpu.info.uuid, key), LaneCache(muted=muted))
        signal = LaneSignal(gpu.info.uuid, metrics, self._full_scales.get(key), self._longest_interval_s)
        return cache.update(self._history, signal, view, field.width, lines, self._lanes_end_s)

    def _update_host_lane(self, view: TimeView) -> int:
        cache = self._lanes.setdefault((HOST, HOST), LaneCache(muted=True))
        signal = LaneSignal(HOST, (), interval_s=self._longest_interval_s)
        return cache.update(self._history, signal, view, self._main_width, self._host_lines, self._lanes_end_s)

    def _view_of(self, field: Field) -> TimeView:
        """A narrow lane shows the same span as the main one, in longer slices."""
        view = self.view
        return view if field.key == "main" else TimeView(slice_for(self.span_shown_s, field.width), view.end_s)

    # -- in time ------------------------------------------------------------------------------

    def _window(self, columns: int, slice_s: float) -> Window | None:
        """Window of a lane of so many columns; None before there is anything."""
        end_s = self._lanes_end_s
        return None if end_s is None else Window.of(TimeView(slice_s, self.end_s), end_s, columns)

    @property
    def window(self) -> Window | None:
        """Window of the main lane."""
        return self._window(self._main_width, self.view.slice_s)

    def scroll_in_time(self, by: int) -> None:
        """The cursor a slice, or else the picture a quarter of it; past the newest sample it follows again."""
        history = self._history
        if self.time.time_s is not None:
            self.cursor(by)
        elif history is not None and history.newest_s is not None and history.oldest_s is not None:
            newest, span = history.newest_s, self.span_shown_s
            end = (self.end_s if self.end_s is not None else newest) + by * span / 4
            self.end_s = None if end >= newest else max(end, min(newest, history.oldest_s + span / 4))
            self._repaint()

    def zoom(self, by: int) -> None:
        """Show more time, or less."""
        nearest = min(range(len(SPANS_S)), key=lambda i: abs(SPANS_S[i] - self.span_s))
        self.span_s = SPANS_S[min(len(SPANS_S) - 1, max(0, nearest + by))]
        self._stretches = False
        self._repaint()

    def follow(self) -> None:
        """Back to now, picture and figures."""
        self.end_s = self.time.time_s = None
        self._repaint()

    def cursor(self, by: int) -> None:
        """Move the cursor by slices; with 0, put it there or take it away."""
        window, history = self.window, self._history
        if by == 0 and self.time.time_s is not None:
            self.follow()
        elif window is not None and history is not None and history.newest_s is not None \
                and history.oldest_s is not None:
            self.time.move(by, window, history.oldest_s, history.newest_s)
            self._repaint()

    def _update_cursor(self) -> None:
        if self.time.time_s is None and self.time.slice is None:
            return
        window, history = self.window, self._history
        if window is not None and history is not None and history.newest_s is not None:
            end_s = self.time.keep_on_screen(window, history.newest_s)
            if end_s is not None:
                self.end_s = None if end_s >= history.newest_s else end_s
        if self.time.update(self.window, history, self._marks, self.gpus):
            for pane in self._panes:
                pane.refresh()

    def _cursor_in(self, field: Field) -> int | None:
        """The column of the cursor in a lane."""
        if self.time.time_s is None:
            return None
        window = self._window(field.width, self._view_of(field).slice_s)
        return None if window is None else window.column(self.time.time_s)

    def _update_axis(self) -> None:
        window = self.window
        if window is None:
            self._axis, self._axis_of = [], ()
            return
        marks = self._marks.between(window.begin_s(0), window.begin_s(window.columns)) if self._marks else []
        following, cursor_s, x = self.end_s is None, self.time.time_s, self._fields["main"].x
        made_of = (window, tuple(marks), following, cursor_s, self.time.slice, x, self._width)
        if made_of == self._axis_of:
            return
        self._axis_of = made_of
        line = time_axis.axis(window, marks, following, cursor_s)
        notes = time_axis.axis_notes(marks, self.time.slice)
        self._axis = time_axis.append_notes([(" " * x, DIM), *line], notes, x + window.columns, self._width)
        self._refresh_line(1)

    # -- drawing ------------------------------------------------------------------------------

    def _main_title(self) -> str:
        width, clock = self._main_width, self.time.slice
        name = time_axis.metric_name(self.metric, self.gpus)
        if self._full_scale is not None and self.metric != ACTIVITY:
            name += f" (full height {rate_gb(self._full_scale)})"
        if clock is not None:
            return clock.title(name, width)
        return time_axis.title(name, self.span_shown_s, self.end_s, width)

    def runs(self, part: Part, y: int) -> list[StyledText] | list[Segment]:
        """Line ``y`` of a part."""
        if y == 0:
            return [(self._title[part.x:part.x + part.width], DIM if self.time.slice is None else ACCENT)]
        if y < self._top:
            return crop(self._axis, part.x, part.width)
        index, line = divmod(y - self._top, self.rows_per_gpu)
        if index >= len(self.gpus):
            if self.gpus:
                return self._host_runs(part, y - self._top - len(self.gpus) * self.rows_per_gpu)
            if y != self._top:
                return []
            text = self._no_gpu if self.sample is not None else "  waiting for the first sample…"
            return [(text[part.x:part.x + part.width], DIM)]
        gpu = self.gpus[index]
        figures = self._figures.get(gpu.info.uuid, {})
        message = figures.get("message")
        start = self._fields["main"].x + self._main_width
        # A GPU without values: its state takes the place of the figures.
        state_text = fit(" " + message[0], self._width - start) if message and line == 0 else ""
        if message and part.lane.key != "main":
            return [(state_text[part.x - start:part.x - start + part.width], message[1])]
        slot, row = self._rows[line]
        cache = self._lanes.get((gpu.info.uuid, slot if self._is_stacked else part.lane.key))
        row = row if self._is_stacked else line
        if cache is None or not cache.columns or len(cache.columns) != part.lane.width:
            return []
        cursor = self._cursor_in(part.lane)
        if not part.newest:
            runs = [self._index(gpu, figures, index, part.lane.x - part.x, line)]
            reason = stacked_lanes.reason_text(gpu, stacked_lanes.lane_shown(slot, self.metric)) if (
                slot != MAIN and row == 0 and gpu.state == OK) else ""
            if reason:
                return [*runs, Segment(fit(reason, part.lane.width - 1), DIM)]
            return [*runs, *cache.row(row, cursor)]
        if message:
            return [cache.newest(row, cursor), Segment(state_text[:part.width - 1], message[1])]
        mark = SECOND if row else ""
        return [cache.newest(row, cursor),
                *self._figure_runs(part, figures, slot, mark, row <= 1)]

    def _host_runs(self, part: Part, row: int) -> list[StyledText] | list[Segment]:
        """A line of the lane of the host's CPUs."""
        cache = self._lanes.get((HOST, HOST))
        if part.lane.key != MAIN or not 0 <= row < self._host_lines or cache is None \
                or len(cache.columns) != part.lane.width:
            return []
        cursor = self._cursor_in(part.lane)
        if part.newest:
            return [cache.newest(row, cursor),
                    *self._figure_runs(part, self._figures.get(HOST, {}), HOST, SECOND if row else "", row <= 1)]
        width = part.lane.x - part.x
        name = ("CPU" if width < _NAMED_FROM else "    CPUs") if row == 0 else ""
        return [Segment(fit(name[:width], width), DIM), *cache.row(row, cursor)]

    def _index(self, gpu: GpuSample, figures: dict[str, StyledText], index: int, width: int, line: int) -> Segment:
        """Text before a lane: the GPU's number and, where the table has the focus, a pointer; in a stack the name of
        the lane."""
        text, style = figures.get("gpu", ("", PLAIN)) if line == 0 and width > 1 else ("", PLAIN)
        if text and index == self.selected and self.has_focus:
            text, style = f"›{gpu.info.label}", ACCENT
        slot, row = self._rows[line]
        if self._is_stacked and row == 0 and width > self._fields["gpu"].width:
            name = (stacked_lanes.main_name(self.metric, gpu) if slot == MAIN
                    else stacked_lanes.LANES[stacked_lanes.lane_shown(slot, self.metric)].name)
            text = text.ljust(self._fields["gpu"].width) + name
            style = style if line == 0 else DIM
        return Segment(fit(text, width), style)

    def _figure_runs(self, part: Part, figures: dict[str, StyledText], slot: str, mark: str,
                     shown: bool) -> list[Segment]:
        out = []
        for field in part.fields if shown else ():
            text, style = figures.get(figure_key(slot, field.key, mark), ("", PLAIN))
            out.append(Segment(fit(text, field.width, right=field.draw != "flags"), style))
        return out

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        return self.lines

    def on_resize(self) -> None:
        self._repaint()

    # -- selecting ----------------------------------------------------------------------------

    def _select(self, index: int) -> None:
        self.selected = min(max(0, index), max(0, len(self.gpus) - 1))
        self._panes[0].refresh()
        if isinstance(self.parent, ScrollableContainer):
            y = self._top + self.selected * self.rows_per_gpu
            self.parent.scroll_to_region(Region(0, y, 1, self.rows_per_gpu), animate=False)

    def action_move(self, by: int) -> None:
        self._select(self.selected + by)

    def action_details(self) -> None:
        if self.selected < len(self.gpus):
            self.post_message(self.Opened(self.gpus[self.selected]))

    def on_click(self, event: events.Click) -> None:
        """Puts the cursor there in time and selects the GPU; a second click on the same place opens its details."""
        index = (event.y - self._top) // self.rows_per_gpu
        on_gpu = event.y >= self._top and index < len(self.gpus)
        again = on_gpu and index == self.selected and self.has_focus
        if on_gpu:
            self._select(index)
        window = self.window
        column = event.screen_x - self.region.x - self._fields["main"].x if self._fields else -1
        if window is not None and 0 <= column < window.columns and event.y > 0:
            again = again and self.time.time_s is not None and window.column(self.time.time_s) == column
            self.time.put(window, column)
            self._repaint()
        if again:
            self.action_details()

    def on_focus(self) -> None:
        self._panes[0].refresh()

    def on_blur(self) -> None:
        self._panes[0].refresh()


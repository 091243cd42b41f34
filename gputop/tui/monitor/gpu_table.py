"""The GPU table: each GPU has a spectrogram, with its newest figures beside it."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

from rich.segment import Segment
from textual import events
from textual.binding import BindingType
from textual.containers import ScrollableContainer
from textual.geometry import Region, Size
from textual.strip import Strip
from textual.widget import Widget

from gputop.core.samples import OK, UNIFIED_MEMORY, GpuSample, HostSample, NodeSample
from gputop.render.palette import ACCENT, DIM, PLAIN
from gputop.render.styled_text import StyledText, crop, wrap
from gputop.session.event_log import EventLog
from gputop.text.units import fit, percent, printable, rate_gb
from gputop.tui.keys import key, up_and_down
from gputop.tui.monitor import columns, time_axis
from gputop.tui.monitor.columns import ACTIVITY, HOST, MAIN, Field, Figures, Part
from gputop.tui.monitor.layout import Layout, TableRows
from gputop.tui.monitor.status_lines import bar
from gputop.tui.monitor.time_axis import AxisLine
from gputop.tui.monitor.visible_time import LaneSet, VisibleTime
from gputop.tui.terminal.textual_private import DrawnOnce
from gputop.tui.widgets.cached_lines import CachedLinesWidget, LinesWidget, MessageAbout

if TYPE_CHECKING:
    from gputop.telemetry.history import History

_NAMED_FROM = 8  # cells before a lane: the number of the GPU and the name of the lane
_BEFORE_LANES = frozenset({"gpu", "name", "reason"})  # the figures before a lane and in its place
_PARTS = 6  # three lanes, each followed by its newest slice and figures


class Pane(CachedLinesWidget):
    """One part of the table, for all GPUs. Parts are widgets because Textual repaints a changed
    cell with all that is left of it in its widget: narrow widgets keep that little."""

    def __init__(self, table: GpuTable) -> None:
        super().__init__()
        self._table = table
        self.part: Part | None = None
        self._changed: list[Region] = []  # since it was repainted

    def render_line(self, y: int) -> Strip:
        return self.strip(self._table.runs(self.part, y), self.part.width) if self.part else self.strip((), 0)

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        return self._table.lines

    def note_line(self, y: int) -> None:
        """Note that a whole line looks different."""
        self._changed.append(Region(0, y, self.size.width, 1))

    def note_changes(self, y: int, lines: int, columns: int, figures: Sequence[tuple[int, Collection[str]]]) -> None:
        """Note what looks different in the lines of a lane, from ``y`` on: so many of its ``columns`` at the right, and
        of the ``figures`` on each line those with these keys."""
        part = self.part
        if part is None:
            return
        if any("message" in keys for _, keys in figures):  # it takes the place of all figures of a GPU
            self._changed.append(Region(0, 0, part.width, self._table.lines))
        elif not part.newest:
            if columns > 1 or any(not _BEFORE_LANES.isdisjoint(keys) for _, keys in figures):
                self._changed.append(Region(0, y, part.width, lines))
        else:
            if columns:
                self._changed.append(Region(0, y, 1, lines))
            for line, keys in figures:
                fields = [field for field in part.fields if field.key in keys]
                if fields:
                    begin, end = fields[0].x, fields[-1].x + fields[-1].width
                    self._changed.append(Region(begin - part.x, line, end - begin, 1))

    def repaint(self) -> None:
        """Repaint what looks different, at once."""
        changed, self._changed = self._changed, []
        if changed:
            self.refresh(*changed)


class GpuTable(DrawnOnce, can_focus=True):
    """All GPUs. :meth:`update_view` brings it to the newest sample, repainting only what changed."""

    BINDINGS: ClassVar[list[BindingType]] = [
        *up_and_down("GPU"),
        key("enter", "details", "GPU details", "all readings of the GPU, each with its source or why it is missing"),
    ]
    PANEL = "GPUs"

    class Opened(MessageAbout[GpuSample]):
        """All readings of a GPU are wanted."""

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self.metric = ACTIVITY
        self.selected = 0
        self.sample: NodeSample | None = None
        self.time = VisibleTime()
        self.rows = TableRows()
        self._lanes = LaneSet(self.time)
        self._axis = AxisLine()
        self._events: EventLog | None = None
        self._reserved: frozenset[int] = frozenset()  # GPUs whose memory is reserved, so that its use is not known
        self._width = 0
        self._fields: dict[str, Field] = {}
        self._figures: dict[str, Figures] = {}  # by device
        self._title = self._no_gpu = ""
        self._panes = [Pane(self) for _ in range(_PARTS)]

    def compose(self) -> Iterable[Widget]:
        yield from self._panes

    # -- what is shown ------------------------------------------------------------------------

    @property
    def gpus(self) -> tuple[GpuSample, ...]:
        return self.sample.gpus if self.sample else ()

    @property
    def lines(self) -> int:
        return self.rows.lines(len(self.gpus))

    def take_layout(self, fitted: Layout, width: int) -> None:
        """Give each GPU its lanes, the host its own, and the axis a line; ``width`` is that of the terminal, which the
        table will have if it has none yet and needs no scrollbar."""
        if fitted.rows != self.rows or not self._width:
            self.rows, self._width = fitted.rows, self._width or width
            self._lay_out()

    def note_reserved(self, gpus: Collection[int]) -> None:
        """Say of the memory of these GPUs that it is reserved; with the next sample."""
        self._reserved = frozenset(gpus)

    def update_view(self, sample: NodeSample | None, history: History | None, events: EventLog | None = None) -> None:
        """Take over the newest sample and repaint what differs from the screen."""
        before, self.sample, self.time.history, self._events = self.gpus, sample, history, events
        if len(before) != len(self.gpus):
            self._lay_out()
        self._repaint()

    def _lay_out(self) -> None:
        """Columns for the present width, and which pane draws which."""
        if not self._width:
            return
        fields = columns.fields_of(self._width) if self.rows.is_stacked else columns.plan(self._width)
        self._fields = {f.key: f for f in fields}
        self.time.columns = max(1, self._fields[MAIN].width)
        self._figures.clear()
        self._lanes.clear()
        cut = columns.parts(fields)
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
        time, gpus, rows = self.time, self.gpus, self.rows
        time.advance()
        if time.update_cursor(self._events, gpus):
            for pane in self._panes:
                pane.refresh()
        drawn = self._lanes.update(gpus, self.metric, rows, self._fields)
        changed_lines = [0] * self._update_title()
        if rows.has_axis and self._axis.update(time, self._events, self._fields[MAIN].x, self._width):
            changed_lines.append(1)
        for y in changed_lines:
            for pane in self._panes:
                pane.note_line(y)
        for index, gpu in enumerate(gpus):
            uuid = gpu.info.uuid
            self._update_device(uuid, rows.y_of(index), rows.lanes, drawn.get(uuid, {}), self._figures_of(gpu))
        if rows.host_lines and gpus and self.sample is not None:
            self._update_device(HOST, rows.y_of(len(gpus)), ((HOST, rows.host_lines),), drawn.get(HOST, {}),
                                self._host_figures(self.sample.host))
        for pane in self._panes:
            pane.repaint()

    def _update_device(self, device: str, y: int, lanes: Sequence[tuple[str, int]], drawn: Mapping[str, int],
                       figures: Figures) -> None:
        """Take over the figures of a GPU or of the host and have the panes note what looks different.

        ``y`` is the first of its lines, ``lanes`` how many each has, ``drawn`` how many columns of each are new.
        """
        before, self._figures[device] = self._figures.get(device, {}), figures
        for lane, lines in lanes:
            changed = [(y + row, {key for key, _ in new.items() ^ old.items()}) for row in range(min(lines, 2))
                       if (new := figures.get((lane, row), {})) != (old := before.get((lane, row), {}))]
            for pane in self._panes if changed or drawn else ():
                if pane.part is not None and (lane == MAIN or pane.part.lane.key == MAIN):
                    columns = drawn.get(pane.part.lane.key if lane == MAIN else lane, 0)
                    pane.note_changes(y, lines, columns, changed)
            y += lines

    def _update_title(self) -> bool:
        """Bring the title up to date; returns whether it looks different."""
        now = "now" if self.time.cursor.slice is None else "mean"
        title = "".join(columns.title_texts(self._fields.values(), self._main_title(), now))
        if self.sample is not None and not self.gpus:
            title, self._no_gpu = self._why_no_gpu(self.sample.source)
        before, self._title = self._title, title
        return title != before

    def _why_no_gpu(self, reason: str) -> tuple[str, str]:
        """Reason why there is no GPU and how there would be one: the sentences that fit into two lines."""
        whole = re.split(r"(?<=[.]) ", printable(f"There is no GPU here. {reason}"))
        count = next((n for n in range(len(whole), 1, -1) if len(wrap(" ".join(whole[:n]), self._width - 2, 3)) < 3), 2)
        lines = wrap(" ".join(whole[:count]), self._width - 2, 2)
        return " " + lines[0].ljust(self._width), " " + "".join(lines[1:])

    def _figures_of(self, gpu: GpuSample) -> Figures:
        """The figures next to the lanes of a GPU, now or under the cursor."""
        gpu = self.time.cursor.at_cursor(gpu)
        uuid, rows, scales = gpu.info.uuid, self.rows, self._lanes.full_scales
        note = "reserved" if gpu.info.index in self._reserved else (
            "host's" if gpu["memory_used_bytes"].source == UNIFIED_MEMORY else "")
        if rows.is_stacked:
            figures = columns.figures_of_gpu(gpu, self.metric, [lane for lane, _ in rows.lanes], self._fields)
            for lane, lines in rows.lanes if gpu.state == OK else ():
                figures[lane, 0]["name"] = columns.name_of(lane, self.metric, gpu), DIM
                if lines > 1 and (mean := self._lanes.mean(uuid, lane)) is not None:
                    figures.setdefault((lane, 1), {})["value"] = columns.mean_figure(
                        gpu, lane, self.metric, mean, scales.get(lane))
            if note and "note" in (memory := figures.get(("memory", 0), {})):
                width = self._fields["note"].width
                notes = (f" GiB {note}", f" {note}")
                memory["note"] = fit(next((text for text in notes if len(text) <= width), ""), width), DIM
            return figures
        figures = {(MAIN, 0): columns.figures_of(gpu, self.metric, self._fields)}
        named = [field for key, field in self._fields.items() if key in ("bar", "now")][:1]  # none in a few columns
        for lane, _ in rows.lanes[1:] if gpu.state == OK else ():
            name = f" {columns.name_of(lane, self.metric, gpu)}"
            figures[lane, 0] = {field.key: (name.ljust(field.width), DIM) for field in named}
        if rows.per_gpu > 1:
            mean = self._lanes.mean(uuid, MAIN)
            figures[MAIN, 1] = second = columns.second_line(gpu, mean, self.metric, scales.get(MAIN))
            if note and "memory" in figures[MAIN, 0]:
                second["memory"] = (note, DIM)
        return figures

    def _host_figures(self, host: HostSample) -> Figures:
        """The figures next to the lane of the host's CPUs; those of the slice under the cursor, where there is one."""
        value_key = "value" if self.rows.is_stacked else "now"  # the field with the main lane's newest value
        newest = next(pane.part for pane in self._panes if pane.part is not None and pane.part.newest)
        after = [f for f in newest.fields if f.key not in ("bar", value_key)]
        figures = columns.host_figures(host, sum(field.width for field in after))
        level = host["cpu_ratio"].value
        if (cursor := self.time.cursor_column(self.time.columns)) is not None:
            level = self._lanes.mean_at(HOST, HOST, cursor)
            figures["value"] = ("N/A" if level is None else percent(level), PLAIN)
        out = {value_key: figures["value"]}
        if level is not None and "bar" in self._fields:
            out["bar"] = bar(level, self._fields["bar"].width - 1)
        note = figures.get("note")
        if note is not None and after:  # over the columns of a GPU that the host has no figures for
            text = note[0]
            for field in after:
                out[field.key] = (text[:field.width].ljust(field.width), note[1])
                text = text[field.width:]
        return {(HOST, 0): out}

    # -- drawing ------------------------------------------------------------------------------

    def _main_title(self) -> str:
        time = self.time
        name = time_axis.metric_name(self.metric, self.gpus)
        full_scale = self._lanes.full_scales.get(MAIN)
        if full_scale is not None and self.metric != ACTIVITY:
            name += f" (full height {rate_gb(full_scale)})"
        if time.cursor.slice is not None:
            return time.cursor.slice.title(name, time.columns)
        return time_axis.title(name, time.shown_s, time.end_s, time.columns)

    def runs(self, part: Part, y: int) -> Sequence[StyledText | Segment]:
        """Line ``y`` of a part."""
        rows, gpus = self.rows, self.gpus
        if y == 0:
            return [(self._title[part.x:part.x + part.width], DIM if self.time.cursor.slice is None else ACCENT)]
        if y < rows.top:
            return crop(self._axis.runs, part.x, part.width)
        if not gpus:
            text = self._no_gpu if self.sample is not None else "  waiting for the first sample…"
            return [(text[part.x:part.x + part.width], DIM)] if y == rows.top else []
        index = rows.gpu_at(y)
        if index >= len(gpus):
            return self._host_runs(part, y - rows.y_of(len(gpus)))
        return self._gpu_runs(part, index, y - rows.y_of(index))

    def _gpu_runs(self, part: Part, index: int, line: int) -> Sequence[StyledText | Segment]:
        gpu, (slot, row) = self.gpus[index], self.rows.of_gpu[line]
        figures = self._figures.get(gpu.info.uuid, {})
        message = figures.get((MAIN, 0), {}).get("message")
        start = self._fields[MAIN].x + self.time.columns
        # A GPU without values: its state takes the place of the figures.
        state_text = fit(" " + message[0], self._width - start) if message and line == 0 else ""
        if message and part.lane.key != MAIN:
            return [(state_text[part.x - start:part.x - start + part.width], message[1])]
        if part.lane.key != MAIN and line:  # below a lane that has one line
            return [Segment(" " * (part.lane.width if not part.newest else 1), DIM), *(
                _figure_runs(part, figures.get((slot, row), {})) if part.newest else ())]
        lane = self._lanes.get(gpu.info.uuid, part.lane.key if slot == MAIN else slot, part.lane.width)
        if lane is None:
            return []
        cursor = self.time.cursor_column(part.lane.width)
        if message and part.newest:
            return [lane.newest(row, cursor), Segment(state_text[:part.width - 1], message[1])]
        if part.newest:
            return [lane.newest(row, cursor), *_figure_runs(part, figures.get((slot, row), {}))]
        name = self._index(gpu, index, part.lane.x - part.x, line)
        reason, _ = figures.get((slot, row), {}).get("reason", ("", DIM))
        return [name, *([Segment(fit(reason, part.lane.width - 1), DIM)] if reason else lane.row(row, cursor))]

    def _host_runs(self, part: Part, row: int) -> Sequence[StyledText | Segment]:
        lane = self._lanes.get(HOST, HOST, part.lane.width)
        if part.lane.key != MAIN or not 0 <= row < self.rows.host_lines or lane is None:
            return []
        cursor = self.time.cursor_column(part.lane.width)
        if part.newest:
            return [lane.newest(row, cursor), *_figure_runs(part, self._figures.get(HOST, {}).get((HOST, row), {}))]
        width = part.lane.x - part.x
        name = ("CPU" if width < _NAMED_FROM else "    CPUs") if row == 0 else ""
        return [Segment(fit(name[:width], width), DIM), *lane.row(row, cursor)]

    def _index(self, gpu: GpuSample, index: int, width: int, line: int) -> Segment:
        """Text before a lane: the GPU's number and, where the table has the focus, a pointer; in a stack the name of
        the lane."""
        figures = self._figures.get(gpu.info.uuid, {}).get((MAIN, 0), {})
        text, style = figures.get("gpu", ("", PLAIN)) if line == 0 and width > 1 else ("", PLAIN)
        if text and index == self.selected and self.has_focus:
            text, style = f"›{gpu.info.label}", ACCENT
        slot, row = self.rows.of_gpu[line]
        if self.rows.is_stacked and row == 0 and width > self._fields["gpu"].width:
            text = text.ljust(self._fields["gpu"].width) + columns.name_of(slot, self.metric, gpu)
            style = style if line == 0 else DIM
        return Segment(fit(text, width), style)

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        return self.lines

    def on_resize(self) -> None:
        self._repaint()

    # -- selecting ----------------------------------------------------------------------------

    def _select(self, index: int) -> None:
        self.selected = min(max(0, index), max(0, len(self.gpus) - 1))
        self._panes[0].refresh()
        if isinstance(self.parent, ScrollableContainer):
            region = Region(0, self.rows.y_of(self.selected), 1, self.rows.per_gpu)
            self.parent.scroll_to_region(region, animate=False)

    def action_move(self, by: int) -> None:
        self._select(self.selected + by)

    def action_details(self) -> None:
        if self.selected < len(self.gpus):
            self.post_message(self.Opened(self.gpus[self.selected]))

    def on_click(self, event: events.Click) -> None:
        """Puts the cursor there in time and selects the GPU; a second click on the same place opens its details."""
        index = self.rows.gpu_at(event.y)
        on_gpu = 0 <= index < len(self.gpus)
        again = on_gpu and index == self.selected and self.has_focus
        if on_gpu:
            self._select(index)
        window, cursor = self.time.window, self.time.cursor
        column = event.screen_x - self.region.x - self._fields[MAIN].x if self._fields else -1
        if window is not None and 0 <= column < window.columns and event.y > 0:
            again = again and cursor.time_s is not None and window.column(cursor.time_s) == column
            cursor.put(window, column)
            self._repaint()
        if again:
            self.action_details()

    def on_focus(self) -> None:
        self._panes[0].refresh()

    def on_blur(self) -> None:
        self._panes[0].refresh()


class HiddenGpus(LinesWidget):
    """Line below the table: the number of GPUs above and below those that the screen has room for."""

    def __init__(self, box: ScrollableContainer) -> None:
        super().__init__(id="more")
        self._box, self._rows, self._gpus, self._shown_lines = box, TableRows(), 0, 0

    def on_mount(self) -> None:
        self.watch(self._box, "scroll_y", self.count, init=False)

    def fit(self, fitted: Layout, gpus: int) -> None:
        """Give the table of so many GPUs its lines; what is beyond them can be scrolled to."""
        self._rows, self._gpus, self._shown_lines = fitted.rows, gpus, fitted.table_lines
        self._box.styles.max_height = fitted.table_lines
        self.display = bool(fitted.hidden_gpus)
        self.count()

    def count(self) -> None:
        """Show the numbers for where the table is scrolled to."""
        above, below = self._rows.hidden(self._gpus, self._box.scroll_offset.y, self._shown_lines)
        runs = [(f"{above} more ↑", DIM)] * bool(above) + [(f"{below} more ↓", DIM)] * bool(below)
        self.show([[(" ", DIM), *[part for run in runs for part in (run, ("   ", DIM))]]])


def _figure_runs(part: Part, figures: Mapping[str, StyledText]) -> list[Segment]:
    """The figures of a part on one line; none where the line has none."""
    out = []
    for field in part.fields if figures else ():
        text, style = figures.get(field.key, ("", PLAIN))
        out.append(Segment(fit(text, field.width, right=field.draw != "flags"), style))
    return out

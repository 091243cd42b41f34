"""The GPUs: a spectrogram row each, with the figures of now beside it."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, ClassVar

from rich.segment import Segment
from textual import events
from textual.binding import Binding, BindingType
from textual.containers import ScrollableContainer
from textual.geometry import Region, Size
from textual.message import Message
from textual.strip import Strip
from textual.widget import Widget

from gputop.metrics import BYTES_PER_S, GPU_METRICS
from gputop.samples import OK, GpuSample, NodeSample
from gputop.text import fit
from gputop.tui.columns import (
    ACTIVITY,
    COARSE_MARK,
    PCIE,
    SECOND,
    Field,
    Part,
    figures_of,
    parts,
    plan,
    second_line,
    title_texts,
)
from gputop.tui.lanes import DEFAULT_SPAN_S, LaneCache, TimeView, slice_for
from gputop.tui.lines import Grounded
from gputop.tui.palette import ACCENT, DIM, PLAIN
from gputop.tui.runs import Run

if TYPE_CHECKING:
    from gputop.history import History

_PARTS = 9  # three lanes of two parts, and the figures after each


class Pane(Grounded):
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


class GpuTable(Widget, can_focus=True):
    """All GPUs. :meth:`update_view` brings it to the newest sample, repainting only what changed."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up,k", "move(-1)", "up", show=False),
        Binding("down,j", "move(1)", "down", show=False),
        Binding("enter", "details", "details", show=False),
    ]

    class Opened(Message):
        """All readings of a GPU are wanted."""

        def __init__(self, gpu: GpuSample) -> None:
            super().__init__()
            self.gpu = gpu

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self.metric = ACTIVITY
        self.rows_per_gpu = 1
        self.span_s = DEFAULT_SPAN_S
        self.end_s: float | None = None  # None follows the newest sample
        self.selected = 0
        self.sample: NodeSample | None = None
        self._history: History | None = None
        self._width = 0
        self._fields: dict[str, Field] = {}
        self._panes = [Pane(self) for _ in range(_PARTS)]
        self._lanes: dict[tuple[str, str], LaneCache] = {}
        self._activity: dict[str, str] = {}
        self._figures: dict[str, dict[str, Run]] = {}
        self._title = ""
        self._full_scale: float | None = None

    def compose(self) -> Iterable[Widget]:
        yield from self._panes

    # -- what is shown ------------------------------------------------------------------------

    @property
    def gpus(self) -> tuple[GpuSample, ...]:
        return self.sample.gpus if self.sample else ()

    @property
    def lines(self) -> int:
        return 1 + max(1, len(self.gpus)) * self.rows_per_gpu

    @property
    def _main_width(self) -> int:
        return max(1, self._fields["main"].width) if self._fields else 1

    @property
    def view(self) -> TimeView:
        return TimeView(slice_for(self.span_s, self._main_width), self.end_s)

    @property
    def span_shown_s(self) -> float:
        """Seconds from the left to the right edge of the main lane."""
        return self.view.slice_s * self._main_width

    def metrics_of(self, gpu: GpuSample) -> tuple[str, ...]:
        """The metric of the main lane for this GPU, after the ladder."""
        if self.metric != ACTIVITY:
            return (self.metric,)
        which, now = gpu.activity()
        uuid = gpu.info.uuid
        if now.value is not None:
            self._activity[uuid] = which
        elif uuid not in self._activity and self._history is not None:
            # Lost or not responding since before this screen: the lane shows what there was.
            _, fine = self._history.window(uuid, "sm_active", self.span_shown_s)
            self._activity[uuid] = "gpu_util" if all(v != v for v in fine.tolist()) else "sm_active"
        return (self._activity.get(uuid, which),)

    def resize_rows(self, rows_per_gpu: int) -> None:
        """Give each GPU this many lines."""
        if rows_per_gpu != self.rows_per_gpu:
            self.rows_per_gpu = rows_per_gpu
            self._lay_out()

    def update_view(self, sample: NodeSample | None, history: History | None) -> None:
        """Take over the newest sample and repaint what differs from the screen."""
        before, self.sample, self._history = self.gpus, sample, history
        if len(before) != len(self.gpus):
            self._lay_out()
        self._repaint()

    def _lay_out(self) -> None:
        """Columns for the present width, and which pane draws which."""
        if not self._width:
            return
        fields = plan(self._width)
        self._fields = {f.key: f for f in fields}
        self._figures.clear()
        self._lanes.clear()
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
        title = "".join(title_texts(self._fields.values(), self._main_title(self._main_width)))
        if title != self._title:
            self._title = title
            for pane in self._panes:
                pane.refresh(Region(0, 0, pane.size.width, 1))
        self._full_scale = self._common_scale()
        for i, gpu in enumerate(self.gpus):
            y = 1 + i * self.rows_per_gpu
            lanes = {f.key: self._update_lane(gpu, f) for f in self._fields.values() if f.key in _LANES}
            figures = self._figures_of(gpu)
            shown = self._figures.get(gpu.info.uuid, {})
            self._figures[gpu.info.uuid] = figures
            if figures.get("message") != shown.get("message"):
                for pane in self._panes:
                    pane.refresh(Region(0, y, pane.size.width, self.rows_per_gpu))
                continue
            for pane in self._panes:
                if pane.part is None:
                    continue
                if pane.part.kind == "figures":
                    self._refresh_figures(pane, y, figures, shown)
                elif lanes[pane.part.fields[-1].key] > (1 if pane.part.kind == "lane" else 0):
                    pane.refresh(Region(0, y, pane.part.width, self.rows_per_gpu))

    def _refresh_figures(self, pane: Pane, y: int, new: dict[str, Run], old: dict[str, Run]) -> None:
        assert pane.part is not None
        for row, mark in enumerate(("", SECOND)[:self.rows_per_gpu]):
            changed = [f for f in pane.part.fields if new.get(f.key + mark) != old.get(f.key + mark)]
            if changed:
                x, end = changed[0].x - pane.part.x, changed[-1].x + changed[-1].width - pane.part.x
                pane.refresh(Region(x, y + row, end - x, 1))

    def _figures_of(self, gpu: GpuSample) -> dict[str, Run]:
        figures = figures_of(gpu, self.metric)
        if self.rows_per_gpu > 1:
            figures |= second_line(gpu, self._lanes[gpu.info.uuid, "main"].mean())
        return figures

    def _update_lane(self, gpu: GpuSample, field: Field) -> int:
        """Bring a lane to the newest sample; how many columns at its right look different."""
        metrics = _LANES[field.key] or self.metrics_of(gpu)
        view = self.view
        if field.key != "main":
            # A narrow lane shows the same span as the main one, in longer slices.
            view = TimeView(slice_for(view.slice_s * self._main_width, field.width), view.end_s)
        cache = self._lanes.setdefault((gpu.info.uuid, field.key), LaneCache(muted=field.key == "memory_lane"))
        return cache.update(self._history, gpu.info.uuid, metrics, view, field.width, self.rows_per_gpu,
                            self._full_scale if field.key == "main" else None)

    def _common_scale(self) -> float | None:
        """100 % of a metric without a scale of its own: the largest single sample still kept of the time in view,
        on any GPU, rounded up."""
        if self.metric == ACTIVITY or GPU_METRICS[self.metric].full_scale is not None or self._history is None:
            return None
        _, values = self._history.windows(self.metric, self.span_shown_s, end_s=self.end_s)
        largest = max((v for v in values.ravel().tolist() if v == v), default=0.0)
        if largest <= 0:
            return None
        step = 10.0 ** math.floor(math.log10(largest))
        return next(m * step for m in (1, 2, 5, 10) if m * step >= largest)

    # -- drawing ------------------------------------------------------------------------------

    def _main_title(self, width: int) -> str:
        if self.metric == ACTIVITY:
            kinds = {g.activity()[0] for g in self.gpus if g.state == OK}
            name = GPU_METRICS["gpu_util"].label if kinds == {"gpu_util"} else GPU_METRICS["sm_active"].label
            if len(kinds) > 1:
                name += f" ({COARSE_MARK} coarse)"
        else:
            metric = GPU_METRICS[self.metric]
            name = metric.label + (" GB/s" if metric.unit == BYTES_PER_S else "")
        span = self.span_shown_s
        if self.end_s is None:
            length = f"{span / 60:.0f} min" if span >= 90 else f"{span:.0f} s"
            title, short = f"{name}, last {length}", f"{name} {length}"
        else:
            start, end = (time.strftime("%H:%M:%S", time.localtime(t)) for t in (self.end_s - span, self.end_s))
            title, short = f"{name}, {start} to {end} (end: back to now)", f"{name} to {end}"
        return title if len(title) <= width else short

    def runs(self, part: Part, y: int) -> list[Run] | list[Segment]:
        """Line ``y`` of a part."""
        if y == 0:
            return [(self._title[part.x:part.x + part.width], DIM)]
        index, row = divmod(y - 1, self.rows_per_gpu)
        if index >= len(self.gpus):
            waiting = not self.gpus and y == 1 and part.x == 0
            return [("  waiting for the first sample…", DIM)] if waiting else []
        gpu = self.gpus[index]
        figures = self._figures.get(gpu.info.uuid, {})
        field = part.fields[-1]
        message = figures.get("message")
        if message and part.fields[0].key != "gpu" and field.key != "main":
            # A GPU without values: its state takes the place of the figures.
            start = self._main_width + self._fields["main"].x
            text = fit(" " + message[0], self._width - start) if row == 0 else ""
            return [(text[part.x - start:part.x - start + part.width], message[1])]
        if part.kind == "figures":
            return self._figure_runs(part, figures, row)
        cache = self._lanes.get((gpu.info.uuid, field.key))
        if cache is None or not cache.columns or len(cache.columns) != field.width:
            return []
        if part.kind == "head":
            return [cache.head(row)]
        return [self._index(gpu, figures, index, field.x - part.x, row), *cache.row(row)]

    def _index(self, gpu: GpuSample, figures: dict[str, Run], index: int, width: int, row: int) -> Segment:
        """What stands before a lane: the GPU's number and, where the table has the focus, a pointer."""
        text, style = figures.get("gpu", ("", PLAIN)) if row == 0 and width > 1 else ("", PLAIN)
        if text and index == self.selected and self.has_focus:
            text, style = f"›{gpu.info.label}", ACCENT
        return Segment(fit(text, width), style)

    def _figure_runs(self, part: Part, figures: dict[str, Run], row: int) -> list[Run]:
        out: list[Run] = []
        for field in part.fields if row <= 1 else ():
            text, style = figures.get(field.key + (SECOND if row else ""), ("", PLAIN))
            out.append((fit(text, field.width, right=not field.key.startswith("flag")), style))
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
            y = 1 + self.selected * self.rows_per_gpu
            self.parent.scroll_to_region(Region(0, y, 1, self.rows_per_gpu), animate=False)

    def action_move(self, by: int) -> None:
        self._select(self.selected + by)

    def action_details(self) -> None:
        if self.selected < len(self.gpus):
            self.post_message(self.Opened(self.gpus[self.selected]))

    def on_click(self, event: events.Click) -> None:
        index = (event.y - 1) // self.rows_per_gpu
        if event.y >= 1 and index < len(self.gpus):
            again = index == self.selected and self.has_focus
            self._select(index)
            if again:
                self.action_details()

    def on_focus(self) -> None:
        self._panes[0].refresh()

    def on_blur(self) -> None:
        self._panes[0].refresh()


# Lane -> its metrics; the main one's are chosen by key.
_LANES: dict[str, tuple[str, ...]] = {"main": (), "memory_lane": ("memory_used_bytes",), "pcie_lane": PCIE}

"""The GPUs: a spectrogram row each, with the figures of now beside it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from rich.segment import Segment
from rich.style import Style
from textual import events
from textual.binding import Binding, BindingType
from textual.containers import ScrollableContainer
from textual.geometry import Region, Size
from textual.message import Message
from textual.strip import Strip

from gputop.metrics import GPU_METRICS, LANE_METRICS
from gputop.samples import OK, GpuSample, NodeSample, Reading
from gputop.tui.format import clean, fit, rate_gb, reading
from gputop.tui.lanes import DEFAULT_SPAN_S, LaneCache, TimeView, slice_for
from gputop.tui.lines import Grounded
from gputop.tui.palette import ACCENT, BAD, BOLD, DIM, PLAIN, WARN

if TYPE_CHECKING:
    from gputop.history import History

ACTIVITY = "activity"  # the main lane's default: SM active, or coarse utilization where that is all there is
METRICS: tuple[str, ...] = (ACTIVITY, *(m for m in LANE_METRICS if m != "sm_active"))
_COARSE_MARK = "~"
SECOND = "/2"  # key of a column's second line
_PCIE = ("pcie_rx_bytes_per_s", "pcie_tx_bytes_per_s")


@dataclass(frozen=True, slots=True)
class Field:
    """A column of the table: a lane or a figure."""

    key: str
    x: int
    width: int
    title: str = ""
    title_width: int = 0  # a title may reach over the figure that follows its lane


def plan(width: int) -> list[Field]:
    """Which columns fit a terminal of this width, and where; the main lane takes what is left."""
    right: list[tuple[str, int, str]] = []  # key, width, title
    if width >= 30:
        right.append(("now", 6, "now"))
    if width >= 110:
        right += [("tensor_active", 7, "tensor"), ("dram_active", 6, "dram")]
    if width >= 80:
        lane = 8 if width < 110 else 10 if width < 150 else 14
        right += [("memory_lane", lane, "Memory GiB"), ("memory", 10, ""), ("pcie_lane", lane, "PCIe RX/TX GB/s"),
                  ("pcie", 10, "")]
    elif width >= 50:
        right.append(("memory", 10, "Mem GiB"))
    if width >= 150:
        right += [("nvlink", 12, "NVLink GB/s"), ("clock", 10, "SM clock")]
    if width >= 60:
        right += [("power", 6 if width < 110 else 9, "power"), ("temperature", 5, "temp")]
    if width >= 110:
        right.append(("flags", 4 if width < 150 else 14, ""))
    gpu_width = 4
    main = max(0, width - gpu_width - sum(w for _, w, _ in right) - sum(k.endswith("_lane") for k, _, _ in right))
    fields = [Field("gpu", 0, gpu_width, "GPU", 4), Field("main", gpu_width, main, "", main)]
    x = gpu_width + main
    for i, (key, field_width, title) in enumerate(right):
        if key.endswith("_lane"):
            x += 1  # air before a lane
            fields.append(Field(key, x, field_width, title, field_width + right[i + 1][1]))
        else:
            fields.append(Field(key, x, field_width, title, field_width))
        x += field_width
    return fields


class GpuTable(Grounded, can_focus=True):
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
        self._sample: NodeSample | None = None
        self._history: History | None = None
        self._full_scale: float | None = None
        self._fields: list[Field] = []
        self._lanes: dict[tuple[str, str], LaneCache] = {}
        self._activity: dict[str, str] = {}
        self._figures: dict[str, dict[str, tuple[str, Style]]] = {}
        self._title: list[tuple[str, Style]] = []

    # -- what is shown ------------------------------------------------------------------------

    @property
    def view(self) -> TimeView:
        main = next((f.width for f in self._fields if f.key == "main"), 1)
        return TimeView(slice_for(self.span_s, main), self.end_s)

    @property
    def span_shown_s(self) -> float:
        """Seconds from the left to the right edge of the main lane."""
        return self.view.slice_s * max(1, next((f.width for f in self._fields if f.key == "main"), 1))

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

    def update_view(self, sample: NodeSample | None, history: History | None) -> None:
        """Take over the newest sample and repaint what differs from the screen."""
        grown = len(sample.gpus) != len(self._sample.gpus) if sample and self._sample else True
        self._sample, self._history = sample, history
        if grown:
            self.refresh(layout=True)
        self._repaint()

    def _repaint(self) -> None:
        width = self.size.width
        if not width:
            return
        if not self._fields or self._fields[-1].x + self._fields[-1].width != width:
            self._fields = plan(width)
            self._figures.clear()
            self._lanes.clear()
            self.refresh()
        title = self._title_line()
        if title != self._title:
            self._title = title
            self.refresh(Region(0, 0, width, 1))
        self._full_scale = self._common_scale()
        for i, gpu in enumerate(self._sample.gpus if self._sample else ()):
            y = 1 + i * self.rows_per_gpu
            self._repaint_lanes(gpu, y)
            figures = figures_of(gpu, self.metric)
            if self.rows_per_gpu > 1:
                mean = self._lanes[gpu.info.uuid, "main"].mean()
                figures |= second_line(gpu, mean)
            shown = self._figures.get(gpu.info.uuid, {})
            if figures.get("message") != shown.get("message"):
                self.refresh(Region(0, y, width, self.rows_per_gpu))
            elif figures != shown:
                for row, mark in enumerate(("", SECOND)[:self.rows_per_gpu]):
                    changed = [f for f in self._fields if figures.get(f.key + mark) != shown.get(f.key + mark)]
                    if changed:
                        x, end = changed[0].x, changed[-1].x + changed[-1].width
                        self.refresh(Region(x, y + row, end - x, 1))
            self._figures[gpu.info.uuid] = figures

    def _common_scale(self) -> float | None:
        """100 % of a metric without a scale of its own: the largest value in view on any GPU, rounded up."""
        if self.metric == ACTIVITY or GPU_METRICS[self.metric].full_scale is not None or self._history is None:
            return None
        _, values = self._history.windows(self.metric, self.span_shown_s, end_s=self.end_s)
        largest = max((v for v in values.ravel().tolist() if v == v), default=0.0)
        if largest <= 0:
            return None
        step = 10.0 ** math.floor(math.log10(largest))
        return next(m * step for m in (1, 2, 5, 10) if m * step >= largest)

    def _repaint_lanes(self, gpu: GpuSample, y: int) -> None:
        wanted: Mapping[str, tuple[str, ...]] = {
            "main": self.metrics_of(gpu), "memory_lane": ("memory_used_bytes",), "pcie_lane": _PCIE}
        view = self.view
        main_width = next(f.width for f in self._fields if f.key == "main")
        for field in self._fields:
            metrics = wanted.get(field.key)
            if metrics is None:
                continue
            cache = self._lanes.setdefault((gpu.info.uuid, field.key), LaneCache(muted=field.key == "memory_lane"))
            # A narrow lane shows the same span as the main one, in longer slices.
            lane_view = view if field.key == "main" else TimeView(
                slice_for(view.slice_s * main_width, field.width), view.end_s)
            changed = cache.update(self._history, gpu.info.uuid, metrics, lane_view, field.width, self.rows_per_gpu,
                                   self._full_scale if field.key == "main" else None)
            if changed:
                x = field.x + field.width - changed
                self.refresh(Region(x, y, changed, self.rows_per_gpu))

    # -- drawing ------------------------------------------------------------------------------

    def _title_line(self) -> list[tuple[str, Style]]:
        runs = []
        x = 0
        for field in self._fields:
            if field.x < x or not field.title_width:
                continue  # covered by the title of the lane before
            runs.append((" " * (field.x - x), DIM))
            text = self._main_title(field.width) if field.key == "main" else field.title
            figure = field.key not in ("gpu", "main") and not field.key.endswith("_lane")
            runs.append((fit(text, field.title_width, right=figure), DIM))
            x = field.x + field.title_width
        return runs

    def _main_title(self, width: int) -> str:
        gpus = self._sample.gpus if self._sample else ()
        if self.metric == ACTIVITY:
            kinds = {g.activity()[0] for g in gpus if g.state == OK}
            name = GPU_METRICS["gpu_util"].label if kinds == {"gpu_util"} else GPU_METRICS["sm_active"].label
            if len(kinds) > 1:
                name += f" ({_COARSE_MARK} coarse)"
        else:
            name = GPU_METRICS[self.metric].label
        span = self.span_shown_s
        if self.end_s is None:
            length = f"{span / 60:.0f} min" if span >= 90 else f"{span:.0f} s"
            title, short = f"{name}, last {length}", f"{name} {length}"
        else:
            start, end = (time.strftime("%H:%M:%S", time.localtime(t)) for t in (self.end_s - span, self.end_s))
            title, short = f"{name}, {start} to {end} (end: back to now)", f"{name} {start}–{end}"
        return title if len(title) <= width else short

    def render_line(self, y: int) -> Strip:
        width = self.size.width
        if not self._fields:
            return self.strip(())
        if y == 0:
            return self.strip(self._title)
        index, row = divmod(y - 1, self.rows_per_gpu)
        gpus = self._sample.gpus if self._sample else ()
        if index >= len(gpus):
            text = "  waiting for the first sample…" if not gpus and y == 1 else ""
            return self.strip([(fit(text, width), DIM)])
        segments = self._gpu_segments(gpus[index], row)
        if row == 0 and index == self.selected and self.has_focus:
            segments[0] = Segment(fit(f"›{gpus[index].info.index}", self._fields[0].width), ACCENT)
        return self.strip(segments)

    def _gpu_segments(self, gpu: GpuSample, row: int) -> list[Segment]:
        figures = self._figures.get(gpu.info.uuid, {})
        message = figures.get("message")
        segments: list[Segment] = []
        x = 0
        for field in self._fields:
            if field.x > x:
                segments.append(Segment(" " * (field.x - x)))
            cache = self._lanes.get((gpu.info.uuid, field.key))
            if cache is not None:
                segments += cache.row(row) if len(cache.columns) == field.width else [Segment(" " * field.width)]
            elif message and field.key not in ("gpu", "main"):
                # A GPU without values: its state takes the place of the figures.
                rest = self.size.width - field.x
                text = message[0] if row == 0 else ""
                segments.append(Segment(fit(" " + text, rest), message[1]))
                return segments
            elif row <= 1:
                text, style = figures.get(field.key if row == 0 else field.key + SECOND, ("", PLAIN))
                left = field.key in ("gpu", "flags")
                segments.append(Segment(fit(text, field.width, right=not left), style))
            else:
                segments.append(Segment(" " * field.width))
            x = field.x + field.width
        return segments

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        return 1 + max(1, len(self._sample.gpus) if self._sample else 1) * self.rows_per_gpu

    def on_resize(self) -> None:
        self._repaint()

    # -- selecting ----------------------------------------------------------------------------

    def _select(self, index: int) -> None:
        count = len(self._sample.gpus) if self._sample else 0
        self.selected = min(max(0, index), max(0, count - 1))
        self.refresh()
        if isinstance(self.parent, ScrollableContainer):
            y = 1 + self.selected * self.rows_per_gpu
            self.parent.scroll_to_region(Region(0, y, 1, self.rows_per_gpu), animate=False)

    def action_move(self, by: int) -> None:
        self._select(self.selected + by)

    def action_details(self) -> None:
        if self._sample and self.selected < len(self._sample.gpus):
            self.post_message(self.Opened(self._sample.gpus[self.selected]))

    def on_click(self, event: events.Click) -> None:
        index = (event.y - 1) // self.rows_per_gpu
        if event.y >= 1 and self._sample and index < len(self._sample.gpus):
            again = index == self.selected and self.has_focus
            self._select(index)
            if again:
                self.action_details()

    def on_focus(self) -> None:
        self.refresh()

    def on_blur(self) -> None:
        self.refresh()


def figures_of(gpu: GpuSample, metric: str) -> dict[str, tuple[str, Style]]:
    """The figures of one GPU by column, as text with its style."""
    out: dict[str, tuple[str, Style]] = {"gpu": (f" {gpu.info.index}", BOLD)}
    if gpu.state != OK:
        out["gpu"] = (f" {gpu.info.index}", BAD)
        out["message"] = (clean(f"{gpu.state}: {gpu.message}" if gpu.message else gpu.state), BAD)
        return out
    if metric == ACTIVITY:
        which, now = gpu.activity()
        mark = _COARSE_MARK if which == "gpu_util" and now.value is not None else ""
        out["now"] = (mark + reading(now), BOLD if now.value is not None else DIM)
    else:
        out["now"] = _figure(gpu[metric])
    out["tensor_active"] = _figure(gpu["tensor_active"])
    out["dram_active"] = _figure(gpu["dram_active"])
    used, total = gpu["memory_used_bytes"], gpu["memory_total_bytes"]
    out["memory"] = _pair(used, total, _gib)
    out["pcie"] = _pair(gpu[_PCIE[0]], gpu[_PCIE[1]], rate_gb)
    out["nvlink"] = _pair(gpu["nvlink_rx_bytes_per_s"], gpu["nvlink_tx_bytes_per_s"], rate_gb)
    clock, clock_max = gpu["sm_clock_hz"], gpu["sm_clock_max_hz"]
    slow = clock.value is not None and clock_max.value is not None and clock.value < 0.85 * clock_max.value
    out["clock"] = (_figure(clock)[0], WARN if slow and gpu.clock_event_reasons else _figure(clock)[1])
    power, limit = gpu["power_w"], gpu["power_limit_w"]
    out["power"] = _power(power, limit)
    out["temperature"] = (reading(gpu["temperature_c"]).replace("°C", "°"), _figure(gpu["temperature_c"])[1])
    reasons = [r for r in gpu.clock_event_reasons if r != "idle"]
    out["flags"] = (" " + ", ".join(reasons), WARN)
    return out


def second_line(gpu: GpuSample, mean: float | None) -> dict[str, tuple[str, Style]]:
    """What stands below the figures where a GPU has more than one line: means and limits."""
    out: dict[str, tuple[str, Style]] = {}
    if gpu.state != OK:
        return out
    if mean is not None:
        out["now" + SECOND] = (f"ø {100 * mean:.0f}%", DIM)
    limit, clock_max = gpu["power_limit_w"].value, gpu["sm_clock_max_hz"].value
    if limit is not None:
        out["power" + SECOND] = (f"/{limit:.0f}W", DIM)
    if clock_max is not None:
        out["clock" + SECOND] = (f"/{clock_max / 1e6:.0f}MHz", DIM)
    gen, width = gpu["pcie_gen"].value, gpu["pcie_width"].value
    if gen is not None and width is not None:
        out["pcie" + SECOND] = (f"gen{gen:.0f} x{width:.0f}", DIM)
    return out


def _figure(r: Reading) -> tuple[str, Style]:
    return reading(r), DIM if r.value is None else PLAIN


def _pair(a: Reading, b: Reading, text: Callable[[float], str]) -> tuple[str, Style]:
    if a.value is None and b.value is None:
        return "N/A", DIM
    parts = ["N/A" if r.value is None else text(r.value) for r in (a, b)]
    return "/".join(parts), PLAIN


def _gib(value: float) -> str:
    gib = value / 2**30
    return f"{gib:.0f}" if gib >= 99.5 or abs(gib - round(gib)) < 0.05 else f"{gib:.1f}"


def _power(power: Reading, limit: Reading) -> tuple[str, Style]:
    if power.value is None:
        return "N/A", DIM
    at_limit = limit.value is not None and power.value >= 0.98 * limit.value
    return f"{power.value:.0f}W", WARN if at_limit else PLAIN


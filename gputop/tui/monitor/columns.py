"""The GPU table on the terminal: which columns fit its width, and what one GPU says in each. Pure, no widgets.

Where there is room a GPU has a lane of each metric. The first lane is the main one, of the metric that the user
chooses; the others are in the order in which they come with more room. Each has the same fields: a name before it, then
a bar, the newest value, and a note with the unit or the limit; on its second line the mean of what it shows.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

from msgspec import Struct

from gputop.core.metrics import BYTES_PER_S, GPU_METRICS, LANE_METRICS, RATIO
from gputop.core.samples import OK, GpuSample, HostSample
from gputop.render.gpu_columns import COLUMNS, NVLINK, PCIE, Draw, Figure, flags_of, plain_figure
from gputop.render.palette import BAD, BOLD, DIM, PLAIN, WARN
from gputop.render.styled_text import StyledText
from gputop.text.units import NA, compact, fit, percent, printable, rate_gb
from gputop.tui.monitor.status_lines import bar

ACTIVITY = "activity"  # the main lane's default: SM active, or coarse utilization where that is all there is
METRICS: tuple[str, ...] = (ACTIVITY, *(m for m in LANE_METRICS if m != "sm_active"))
Figures = dict[tuple[str, int], dict[str, StyledText]]  # by lane and row of the lane, then by field
_TONES = {"strong": BOLD, "text": PLAIN, "dim": DIM, "warn": WARN, "bad": BAD}


class Field(Struct, frozen=True):
    """A column of the table as it is laid out."""

    key: str  # the column's id
    draw: Draw
    x: int
    width: int
    title: str = ""
    title_width: int = 0  # the title of a lane reaches over the figure that follows it

    @property
    def is_lane(self) -> bool:
        return self.draw == "spectrogram"


def plan(width: int) -> list[Field]:
    """Columns that fit a terminal of this width, and where; the main lane takes what is left."""
    sizes = {column.id: column.cells_at(width) for column in COLUMNS}
    shown = [column for column in COLUMNS if sizes[column.id] or column.id == "main"]
    gaps = sum(column.draw == "spectrogram" for column in shown) - 1  # one cell before each lane but the main one
    sizes["main"] = max(0, width - sum(sizes.values()) - gaps)
    fields: list[Field] = []
    x = 0
    for column, following in zip(shown, [*shown[1:], None], strict=True):
        size = title_size = sizes[column.id]
        if column.draw == "spectrogram" and column.id != "main":
            x += 1
            title_size += sizes[following.id] if following is not None else 0
        fields.append(Field(column.id, column.draw, x, size, column.heading_in("screen"), title_size))
        x += size
    return fields


class Part(Struct, frozen=True):
    """Neighboring columns that change together: they are one widget, so that the rest stays as it is.

    ``lane`` says which: the lane in ``fields``, after the GPU's number, which changes once per slice; or the
    lane's newest slice and the figures of ``fields`` after it, which change with each sample.
    """

    x: int
    width: int
    lane: Field
    fields: tuple[Field, ...]

    @property
    def newest(self) -> bool:
        """Return whether it is the lane's newest slice and what follows, not the slices before."""
        return self.lane not in self.fields


def parts(fields: list[Field]) -> list[Part]:
    """The columns cut into parts, left to right, without holes; the first two are the GPU's number and a lane."""
    out: list[Part] = []
    x = 0
    for field in fields:
        if field.draw == "label":
            continue
        if field.is_lane:
            newest = field.x + field.width - 1
            out.append(Part(x, newest - x, field, (*(f for f in fields if f.draw == "label" and not x), field)))
            out.append(Part(newest, 1, field, ()))
        else:
            last = out.pop()
            out.append(Part(last.x, field.x + field.width - last.x, last.lane, (*last.fields, field)))
        x = field.x + field.width
    return out


def title_texts(fields: Iterable[Field], main_title: str, now: str = "now") -> Iterator[str]:
    """The line above the table, piece by piece; ``now`` is what the figures are of."""
    x = 0
    for field in fields:
        if field.x < x or not field.title_width:
            continue  # covered by the title of the lane before
        yield " " * (field.x - x)
        text = main_title if field.key == "main" else now if field.key == "now" else field.title
        yield fit(text, field.title_width, right=field.draw in ("figure", "flags"))
        x = field.x + field.title_width


def figures_of(gpu: GpuSample, metric: str, fields: Mapping[str, Field]) -> dict[str, StyledText]:
    """The figures of one GPU by column, as text with its style; ``metric`` is that of the main lane."""
    # A MIG instance stands under its GPU, and "0:1" begins a column further left than " 0".
    label = f" {gpu.info.label}" if gpu.info.mig is None else gpu.info.label
    if gpu.state != OK:
        return {"gpu": (label, BAD), "message": (printable(gpu.trouble), BAD)}
    out = {column.id: styled(column.figure_of(gpu, "screen")) for column in _FIGURES if column.id in fields}
    out["gpu"] = (label, BOLD if gpu.info.mig is None else PLAIN)
    if "bar" in fields:
        out["bar"] = bar_of(gpu, metric, fields["bar"].width - 1)
    if metric != ACTIVITY:
        now = gpu[metric]
        if now.value is not None and now.unit == BYTES_PER_S:  # the column is narrow: the lane's title has the unit
            out["now"] = rate_gb(now.value), PLAIN
        else:
            out["now"] = styled(plain_figure(now))
    for key, form in _NARROW_FORMS.items():
        if key in out:
            text, style = out[key]
            out[key] = form(text), style
    return out


def bar_of(gpu: GpuSample, metric: str, cells: int) -> StyledText:
    """The present value of the main lane's metric as a share of its full scale; blank where either is not known."""
    now = gpu.activity()[1] if metric == ACTIVITY else gpu[metric]
    scale = GPU_METRICS["sm_active" if metric == ACTIVITY else metric].full_scale
    most = gpu[scale].value if isinstance(scale, str) else scale
    if now.value is None or not most:
        return "", PLAIN
    return bar(now.value / most, cells)


def styled(figure: Figure) -> StyledText:
    return figure[0], _TONES[figure[1]]


# The first word of what is wrong, where there is room for three letters.
_SHORT = {"Xid": "Xid", "ECC": "ECC", "remap": "row", "power": "pwr", "thermal": "hot", "slowdown": "hw"}


def _short(flags: str) -> str:
    """The first flag, the gravest, in three letters."""
    return _SHORT.get(flags.removeprefix("hw ").replace(",", " ").split()[0], "clk")


_FIGURES = tuple(column for column in COLUMNS if column.screen and column.figure)
_NARROW_FORMS: dict[str, Callable[[str], str]] = {
    "temperature": lambda text: text.replace("°C", "°"),
    "flags": lambda text: f" {text}",
    "flag": lambda text: f" {_short(text)}" if text else "",
}


def mean_text(gpu: GpuSample, metric: str, mean: float, full_scale: float | None) -> str:
    """The mean of what a lane shows, a share of its full height, in the metric's unit, in five cells."""
    description = GPU_METRICS["sm_active" if metric == ACTIVITY else metric]
    scale = description.full_scale
    most = full_scale if scale is None else gpu[scale].value if isinstance(scale, str) else scale
    if description.unit == RATIO or not most:
        return percent(mean)
    return compact(mean * most, description.unit)


def second_line(
    gpu: GpuSample, mean: float | None, metric: str = ACTIVITY, full_scale: float | None = None,
) -> dict[str, StyledText]:
    """Figures of a GPU's second line, by column: means and limits.

    ``mean`` is that of the main lane, 0-1; ``full_scale`` 100% of a metric without a scale of its own.
    """
    out: dict[str, StyledText] = {}
    if gpu.state != OK:
        return out
    if mean is not None:
        out["now"] = (f"ø {mean_text(gpu, metric, mean, full_scale)}", DIM)
    limit, clock_max = gpu["power_limit_w"].value, gpu["sm_clock_max_hz"].value
    if limit is not None:
        out["power"] = (f"/{limit:.0f}W", DIM)
    if clock_max is not None:
        out["clock"] = (f"/{clock_max / 1e6:.0f}MHz", DIM)
    gen, width = gpu["pcie_gen"].value, gpu["pcie_width"].value
    if gen is not None and width is not None:
        out["pcie"] = (f"gen{gen:.0f} x{width:.0f}", DIM)
    return out


MAIN = "main"
HOST = "host_cpu"  # of the node, below its GPUs


class FurtherLane(Struct, frozen=True):
    """A lane below the main one. ``column`` is the entry of the GPU table that has its figure."""

    name: str  # at most 7 cells
    metrics: tuple[str, ...]  # of several the larger level is drawn
    column: str
    unit: str = ""  # of the figure, where that does not carry it
    muted: bool = False


LANES: dict[str, FurtherLane] = {
    "sm": FurtherLane("SM", (), "now"),  # once the main lane shows another metric
    "tensor": FurtherLane("tensor", ("tensor_active",), "tensor_active"),
    "dram": FurtherLane("DRAM", ("dram_active",), "dram_active"),
    "memory": FurtherLane("memory", ("memory_used_bytes",), "memory", "GiB", muted=True),
    "pcie": FurtherLane("PCIe", PCIE, "pcie", "GB/s"),
    "power": FurtherLane("power", ("power_w",), "power"),
    "nvlink": FurtherLane("NVLink", NVLINK, "nvlink", "GB/s"),
    "clock": FurtherLane("clock", ("sm_clock_hz",), "clock"),
    "temperature": FurtherLane("temp", ("temperature_c",), "temperature", muted=True),
}
FURTHER_LANES = tuple(lane for lane in LANES if lane != "sm")
_COLUMNS = {column.id: column for column in COLUMNS}
_MAIN_NAMES = {"tensor_flop_util": "FLOPs", "pcie_rx_bytes_per_s": "PCIe RX", "pcie_tx_bytes_per_s": "PCIe TX",
               "nvlink_rx_bytes_per_s": "NVL RX", "nvlink_tx_bytes_per_s": "NVL TX", "gpu_util": "util",
               **{lane.metrics[0]: lane.name for lane in LANES.values() if len(lane.metrics) == 1}}

_NAME_CELLS, _VALUE_CELLS, _GAP = 8, 10, 1
_NOTE_CELLS = ((60, 10), (110, 16), (170, 24))  # cells of the note by width of the terminal: from this width on
_NAMES_FROM = 50  # columns


def fields_of(width: int) -> list[Field]:
    """The fields of every lane on a terminal of this width; the lane takes what is left."""
    number = _COLUMNS["gpu"].cells_at(width)
    name = _NAME_CELLS if width >= _NAMES_FROM else 0
    bar_cells = _COLUMNS["bar"].cells_at(width)
    note = next((cells for least, cells in reversed(_NOTE_CELLS) if width >= least), 0)
    sizes = {"gpu": number, "name": name, MAIN: 0, "bar": bar_cells, "value": _VALUE_CELLS, "note": note}
    sizes[MAIN] = max(0, width - sum(sizes.values()))
    fields: list[Field] = []
    x = 0
    for key, cells in sizes.items():
        draw = {"gpu": "label", "name": "label", MAIN: "spectrogram"}.get(key, "figure")
        title = {"gpu": "GPU", "value": "now"}.get(key, "")
        fields.append(Field(key, draw, x, cells, title, cells))  # type: ignore[arg-type]
        x += cells
    return fields


def lane_shown(lane: str, main_metric: str) -> str:
    """The lane in this place: that of the SM activity takes the place of the one that the main lane shows already."""
    return "sm" if lane != MAIN and main_metric in LANES[lane].metrics else lane


def unread_lanes(gpus: Sequence[GpuSample]) -> frozenset[str]:
    """The further lanes whose metric none of the GPUs that answer can read."""
    answering = [gpu for gpu in gpus if gpu.state == OK]
    return frozenset(key for key in FURTHER_LANES if answering and not any(
        gpu[metric].value is not None for gpu in answering for metric in LANES[key].metrics))


def name_of(lane: str, main_metric: str, gpu: GpuSample) -> str:
    if lane != MAIN:
        return LANES[lane_shown(lane, main_metric)].name
    if main_metric in GPU_METRICS:
        return _MAIN_NAMES.get(main_metric, main_metric)
    coarse = gpu.state == OK and gpu.activity()[0] == "gpu_util"
    return _MAIN_NAMES["gpu_util"] if coarse else LANES["sm"].name


def figures_of_gpu(gpu: GpuSample, metric: str, places: Sequence[str], fields: Mapping[str, Field]) -> Figures:
    """The figures next to the lanes of a GPU in these ``places``; ``metric`` is the main one."""
    main = figures_of(gpu, metric, {"now": fields["value"], "bar": fields["bar"]})
    if gpu.state != OK:
        return {(MAIN, 0): main}
    lanes = {slot: lane_shown(slot, metric) for slot in places}
    first, second = _main_notes(gpu, fields["note"].width, lanes.values())
    out = {(MAIN, 0): {"gpu": main["gpu"], "bar": main["bar"], "value": main["now"], "note": first},
           (MAIN, 1): {"note": second}}
    for slot, lane in lanes.items():
        if slot != MAIN:
            out[slot, 0] = figures_of_lane(gpu, lane, fields)
    return out


def mean_figure(gpu: GpuSample, slot: str, main_metric: str, mean: float, full_scale: float | None) -> StyledText:
    """The mean of what the lane in this place shows, a share of its full height, in the metric's unit."""
    lane = lane_shown(slot, main_metric)
    metric = main_metric if slot == MAIN else (LANES[lane].metrics or (ACTIVITY,))[0]
    return f"mean {mean_text(gpu, metric, mean, full_scale)}", DIM


def figures_of_lane(gpu: GpuSample, lane: str, fields: Mapping[str, Field]) -> dict[str, StyledText]:
    """The figures of a further lane by field; the ``reason`` why it has none takes the place of the lane."""
    entry, note_cells = LANES[lane], fields["note"].width
    column = _COLUMNS[entry.column]
    figure: Figure = column.figure(gpu, entry.unit or column.heading) if column.figure is not None else ("", "text")
    readings = [gpu[metric] for metric in entry.metrics]
    measured = not readings or any(reading.value is not None for reading in readings)
    reason = "" if measured else printable(f"N/A: {readings[0].reason}")
    out = {"value": styled(figure), "reason": (reason, DIM)}
    if figure[0] != NA and (note := _first_that_fits(_notes(gpu, lane, entry), note_cells - _GAP)):
        out["note"] = (" " + note.ljust(note_cells - _GAP), DIM)
    return out


def _notes(gpu: GpuSample, lane: str, entry: FurtherLane) -> Iterator[str]:
    """Yield the notes after a value, the longest first."""
    if lane == "pcie" and gpu["pcie_gen"].value is not None and gpu["pcie_width"].value is not None:
        yield f"{entry.unit} gen{gpu['pcie_gen'].value:.0f} x{gpu['pcie_width'].value:.0f}"
    limit = {"power": "power_limit_w", "clock": "sm_clock_max_hz", "temperature": "temperature_slowdown_c"}.get(lane)
    if limit is not None and (most := gpu[limit].value) is not None:
        yield {"power": f"of {most:.0f}W", "clock": f"of {most / 1e6:.0f}MHz",
               "temperature": f"slows at {most:.0f}°C"}[lane]
    yield entry.unit


def _main_notes(gpu: GpuSample, cells: int, shown: Collection[str]) -> tuple[StyledText, StyledText]:
    """Notes after the main lane's value and, on the next line, after its mean: faults and what holds the clocks down,
    then those of temperature, clock and memory that have no lane here (``shown`` are those that have one)."""
    flags, tone = flags_of(gpu)
    figures = [figure for lane in ("temperature", "clock") if lane not in shown
               and (column := _COLUMNS[LANES[lane].column]).figure is not None
               and (figure := column.figure(gpu, column.heading)[0]) != NA]
    quiet = _first_that_fits((" ".join(figures), *figures[:1]), cells - _GAP)
    quiet_text: StyledText = (" " + quiet.ljust(cells - _GAP), DIM) if quiet else ("", PLAIN)
    if not flags:
        return quiet_text, ("", PLAIN)
    return styled((" " + ", ".join(flags).ljust(cells - _GAP), tone)), quiet_text


def host_figures(host: HostSample, note_cells: int) -> dict[str, StyledText]:
    cpu = host["cpu_ratio"]
    out: dict[str, StyledText] = {"value": (NA if cpu.value is None else percent(cpu.value), PLAIN)}
    if host.cpu_count:
        full = f", {host.full_cores} full" if host.full_cores else ""
        notes = (f"of {host.cpu_count} cores{full}", f"of {host.cpu_count} cores", f"of {host.cpu_count}")
        out["note"] = (" " + _first_that_fits(notes, note_cells - _GAP).ljust(note_cells - _GAP), DIM)
    return out


def _first_that_fits(texts: Sequence[str] | Iterator[str], cells: int) -> str:
    return next((text for text in texts if len(text) <= cells), "")

"""The lanes that a GPU has where there is room for one of each metric: their names, and what stands next to each.

Pure, no widgets. The first lane is the main one, of the metric that the user chooses; the others are in the order in
which they come with more room. Each has the same fields: a name before it, then a bar, the newest value, and a note
with the unit or the limit; on its second line the mean of what it shows.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from msgspec import Struct

from gputop.core.metrics import GPU_METRICS
from gputop.core.samples import OK, GpuSample, HostSample
from gputop.render.gpu_columns import COLUMNS, NVLINK, PCIE, Figure, flags_of
from gputop.render.palette import DIM, PLAIN
from gputop.render.styled_text import StyledText
from gputop.text.units import NA, percent, printable
from gputop.tui.monitor.columns import ACTIVITY, Field, Figures, figures_of, mean_text, styled

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


def main_name(metric: str, gpu: GpuSample | None = None) -> str:
    """The short name of the main lane's metric."""
    if metric in GPU_METRICS:
        return _MAIN_NAMES.get(metric, metric)
    coarse = gpu is not None and gpu.state == OK and gpu.activity()[0] == "gpu_util"
    return _MAIN_NAMES["gpu_util"] if coarse else LANES["sm"].name


def lane_shown(lane: str, main_metric: str) -> str:
    """The lane in this place: that of the SM activity takes the place of the one that the main lane shows already."""
    return "sm" if lane != MAIN and main_metric in LANES[lane].metrics else lane


def unread_lanes(gpus: Sequence[GpuSample]) -> frozenset[str]:
    """The further lanes whose metric none of the GPUs that answer can read."""
    answering = [gpu for gpu in gpus if gpu.state == OK]
    return frozenset(key for key in FURTHER_LANES if answering and not any(
        gpu[metric].value is not None for gpu in answering for metric in LANES[key].metrics))


def name_of(lane: str, main_metric: str, gpu: GpuSample) -> str:
    """The short name of the lane in this place."""
    return main_name(main_metric, gpu) if lane == MAIN else LANES[lane_shown(lane, main_metric)].name


def reason_text(gpu: GpuSample, lane: str) -> str:
    """Reason why a further lane has no value; "" where it has one."""
    readings = [gpu[metric] for metric in LANES[lane].metrics]
    if not readings or any(reading.value is not None for reading in readings):
        return ""
    return printable(f"N/A: {readings[0].reason}")


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
    out = {"value": styled(figure), "reason": (reason_text(gpu, lane), DIM)}
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
    quiet_text: StyledText = (" " + quiet.ljust(max(0, cells - _GAP)), DIM) if quiet else ("", PLAIN)
    if not flags:
        return quiet_text, ("", PLAIN)
    return styled((" " + ", ".join(flags).ljust(max(0, cells - _GAP)), tone)), quiet_text


def host_figures(host: HostSample, note_cells: int) -> dict[str, StyledText]:
    """The figures of the lane of the host's CPUs."""
    cpu = host["cpu_ratio"]
    out: dict[str, StyledText] = {"value": (NA if cpu.value is None else percent(cpu.value), PLAIN)}
    if host.cpu_count:
        full = f", {host.full_cores} full" if host.full_cores else ""
        notes = (f"of {host.cpu_count} cores{full}", f"of {host.cpu_count} cores", f"of {host.cpu_count}")
        out["note"] = (" " + _first_that_fits(notes, note_cells - _GAP).ljust(max(0, note_cells - _GAP)), DIM)
    return out


def _first_that_fits(texts: Sequence[str] | Iterator[str], cells: int) -> str:
    return next((text for text in texts if len(text) <= cells), "")

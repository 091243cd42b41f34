"""The columns of the GPU table: which fit a width, and what one GPU says in each. Pure, no widgets."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from rich.style import Style

from gputop.core.metrics import BYTES_PER_S, LANE_METRICS
from gputop.core.samples import OK, GpuSample, Reading
from gputop.render.palette import BAD, BOLD, DIM, PLAIN, WARN
from gputop.text.units import fit, printable, rate_gb, reading

ACTIVITY = "activity"  # the main lane's default: SM active, or coarse utilization where that is all there is
METRICS: tuple[str, ...] = (ACTIVITY, *(m for m in LANE_METRICS if m != "sm_active"))
PCIE = ("pcie_rx_bytes_per_s", "pcie_tx_bytes_per_s")
COARSE_MARK = "~"
MAX_LINES_PER_GPU = 8  # as many bands of levels as two halves of each show
PANEL_LINES = 10
AXIS_FROM_HEIGHT = 20  # lower screens have no line for it
_NARROWEST_FULL = 78  # 80 columns, with a scroll bar too
SECOND = "/2"  # key of a column's second line


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
    # What makes the main lane shorter comes when there is room for both: from 110 columns on it has 45 or more.
    if width >= 140:
        lane = 10 if width < 190 else 14
        right += [("memory_lane", lane, "Memory GiB"), ("memory", 10, ""), ("pcie_lane", lane, "PCIe RX/TX GB/s"),
                  ("pcie", 10, "")]
    elif width >= 50:
        right.append(("memory", 11, "Mem GiB"))
        if width >= _NARROWEST_FULL:
            right.append(("pcie", 11, "PCIe GB/s"))
    if width >= 170:
        right += [("nvlink", 12, "NVLink GB/s"), ("clock", 10, "SM clock")]
    if width >= 60:
        right += [("power", 6 if width < 110 else 9, "power"), ("temperature", 5, "temp")]
    if width >= _NARROWEST_FULL:
        right.append(("flag", 4, "") if width < 150 else ("flags", 14, ""))
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


@dataclass(frozen=True, slots=True)
class Part:
    """Neighbouring columns that change together: they are one widget, so that the rest stays as it is.

    ``lane`` says which: the lane in ``fields``, after the GPU's number, which changes once per slice; or the
    lane's newest slice and the figures of ``fields`` after it, which change with each sample.
    """

    x: int
    width: int
    lane: Field
    fields: tuple[Field, ...]

    @property
    def newest(self) -> bool:
        """Whether it is the lane's newest slice and what follows, not the slices before."""
        return self.lane not in self.fields


def parts(fields: list[Field]) -> list[Part]:
    """The columns cut into parts, left to right, without holes; the first two are the GPU's number and a lane."""
    out: list[Part] = []
    x = 0
    for field in fields:
        if field.key == "gpu":
            continue
        if field.key == "main" or field.key.endswith("_lane"):
            newest = field.x + field.width - 1
            out.append(Part(x, newest - x, field, (*(f for f in fields if f.key == "gpu" and not x), field)))
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
        figure = field.key not in ("gpu", "main") and not field.key.endswith("_lane")
        yield fit(text, field.title_width, right=figure)
        x = field.x + field.title_width


def lines_per_gpu(height: int, gpus: int) -> int:
    """How many lines a GPU gets on a screen of this height, once the panels have what they need.

    Above four, as long as all GPUs together take no more than half of the screen.
    """
    gpus = max(1, gpus)
    spare = height - 5 - has_axis(height) - PANEL_LINES  # header, title, host, job, footer
    return min(MAX_LINES_PER_GPU, max(1, min(spare // gpus, max(4, height // 2 // gpus))))


def has_axis(height: int) -> bool:
    """Whether a screen of this height has a line for the axis of time and its marks."""
    return height >= AXIS_FROM_HEIGHT


def figures_of(gpu: GpuSample, metric: str) -> dict[str, tuple[str, Style]]:
    """The figures of one GPU by column, as text with its style."""
    # A MIG instance stands under its GPU: "0:1" begins a column further left than " 0".
    label = f" {gpu.info.label}" if gpu.info.mig is None or len(gpu.info.label) < 4 else gpu.info.label
    out: dict[str, tuple[str, Style]] = {"gpu": (label, BOLD if gpu.info.mig is None else PLAIN)}
    if gpu.state != OK:
        out["gpu"] = (label, BAD)
        message = gpu.message.removeprefix(f"GPU {gpu.info.label} ")
        if message == gpu.message:  # else it says the state itself
            message = f"{gpu.state}: {message}" if message else gpu.state
        out["message"] = (printable(message), BAD)
        return out
    if metric == ACTIVITY:
        which, now = gpu.activity()
        mark = COARSE_MARK if which == "gpu_util" and now.value is not None else ""
        out["now"] = (mark + reading(now), BOLD if now.value is not None else DIM)
    else:
        now = gpu[metric]
        # The column is narrow: the unit of a rate stands in the lane's title.
        fits = now.value is not None and now.unit == BYTES_PER_S
        out["now"] = (rate_gb(now.value or 0.0), PLAIN) if fits else _figure(now)
    out["tensor_active"] = _figure(gpu["tensor_active"])
    out["dram_active"] = _figure(gpu["dram_active"])
    used, total = gpu["memory_used_bytes"], gpu["memory_total_bytes"]
    out["memory"] = _pair(used, total, _gib)
    out["pcie"] = _pair(gpu[PCIE[0]], gpu[PCIE[1]], rate_gb)
    out["nvlink"] = _pair(gpu["nvlink_rx_bytes_per_s"], gpu["nvlink_tx_bytes_per_s"], rate_gb)
    clock, clock_max = gpu["sm_clock_hz"], gpu["sm_clock_max_hz"]
    slow = clock.value is not None and clock_max.value is not None and clock.value < 0.85 * clock_max.value
    out["clock"] = (_figure(clock)[0], WARN if slow and gpu.clock_event_reasons else _figure(clock)[1])
    power, limit = gpu["power_w"], gpu["power_limit_w"]
    out["power"] = _power(power, limit)
    out["temperature"] = (reading(gpu["temperature_c"]).replace("°C", "°"), _figure(gpu["temperature_c"])[1])
    faults = _faults(gpu)
    flags = faults + [r for r in gpu.clock_event_reasons if r != "idle"]
    style = BAD if faults else WARN
    out["flags"] = (" " + ", ".join(flags), style)
    first = flags[0].removeprefix("hw ").split()[0] if flags else ""
    out["flag"] = (" " + _SHORT.get(first, "clk") if flags else "", style)
    return out


# The first word of what is wrong, where there is room for three letters: the worst comes first.
_SHORT = {"Xid": "Xid", "ECC": "ECC", "remap": "row", "power": "pwr", "thermal": "hot", "slowdown": "hw"}


def _faults(gpu: GpuSample) -> list[str]:
    """Signs of a fault in a word each."""
    out = [f"Xid {gpu.xids[-1].xid}"] if gpu.xids else []
    if gpu["ecc_uncorrected"].value:
        out.append("ECC")
    if gpu["row_remap_failed"].value or gpu["row_remap_pending"].value:
        out.append("remap")
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

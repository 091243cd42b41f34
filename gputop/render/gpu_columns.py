"""The columns of every table of GPUs, one entry each, and the figures that stand in them.

Three views lay these columns out: the monitor's table on the terminal, the snapshot as text, and the page (HTML). An
entry says what the column shows, what it is called and how much room it takes in each of them.
A column whose size is missing in a view is not shown there. A new column is one entry in :data:`COLUMNS`.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Literal

from msgspec import Struct

from gputop.core.metrics import FAULTS, GPU_METRICS
from gputop.core.samples import FAILED, GpuSample, NodeSample, Reading
from gputop.text.units import NA, bytes_, percent, printable, ranges, rate_gb, reading

View = Literal["screen", "text", "page"]
Draw = Literal["label", "spectrogram", "figure", "flags"]
Tone = Literal["strong", "text", "dim", "warn", "bad"]  # names of the palette's colors
Figure = tuple[str, Tone]

COARSE_MARK = "~"  # before a utilization that says only that some kernel ran
PCIE = ("pcie_rx_bytes_per_s", "pcie_tx_bytes_per_s")
NVLINK = ("nvlink_rx_bytes_per_s", "nvlink_tx_bytes_per_s")
_MAX_XID_TEXTS = 3  # of one GPU
_POWER_LIMIT_RATIO = 0.98  # from this share of its limit on, power is shown as limited
_SLOW_CLOCK_RATIO = 0.85  # below this share of its maximum, an SM clock is shown as slowed down


class GpuColumn(Struct, frozen=True):
    """One column. The names in ``headings`` are those of views that differ from ``heading``."""

    id: str
    heading: str
    draw: Draw = "figure"
    metrics: tuple[str, ...] = ()  # whose readings it shows; two are the directions of a link, in and out
    limit: str = ""  # the metric that is 100% of the first one
    figure: Callable[[GpuSample, str], Figure] | None = None  # of a GPU, to stand under a heading
    screen: tuple[tuple[int, int], ...] = ()  # cells by width of the terminal: from this width on, so many
    text: int = 0  # cells
    page: bool = False
    headings: Mapping[str, str] = {}
    muted: bool = False  # drawn in quiet colors, so that it does not outshine the activity

    def heading_in(self, view: View) -> str:
        return self.headings.get(view, self.heading)

    def figure_of(self, gpu: GpuSample, view: View) -> Figure:
        """The text in ``view``. It carries its unit unless the heading there names the unit."""
        return self.figure(gpu, self.heading_in(view)) if self.figure is not None else ("", "text")

    def cells_at(self, width: int) -> int:
        """Width of the column on a terminal of this width; 0: not shown."""
        return next((cells for least, cells in reversed(self.screen) if width >= least), 0)


# -- figures ---------------------------------------------------------------------------------------


def plain_figure(r: Reading) -> Figure:
    return reading(r), "dim" if r.value is None else "text"


def activity_text(gpu: GpuSample) -> str:
    """Activity of the SMs; the coarse utilization, where nothing better is known, carries its mark."""
    which, now = gpu.activity()
    return (COARSE_MARK if which == "gpu_util" else "") + reading(now)


def clock_limits(gpu: GpuSample) -> list[str]:
    """Limiters that hold the clocks of a working GPU down."""
    return [reason for reason in gpu.clock_event_reasons if reason != "idle"]


def clock_text(gpu: GpuSample) -> str:
    """The SM clock against its maximum, and what the driver says holds it down; empty where either is not known."""
    now, most = gpu["sm_clock_hz"].value, gpu["sm_clock_max_hz"].value
    if now is None or not most:
        return ""
    if now >= most:
        return "at its maximum"
    reasons = ", ".join(gpu.clock_event_reasons) or gpu.clock_events_reason or "the driver gives no reason"
    return f"{percent(1 - now / most)} below its maximum: {reasons}"


def flags_of(gpu: GpuSample) -> tuple[list[str], Tone]:
    """Faults in a word each, then what holds the clocks down; the tone of the gravest."""
    faults = [f"Xid {gpu.xids[-1].xid}"] if gpu.xids else []
    faults += dict.fromkeys(fault.flag for metric, fault in FAULTS.items() if fault.flag and gpu[metric].value)
    return faults + clock_limits(gpu), "bad" if faults else "warn"


def fault_texts(gpu: GpuSample) -> list[str]:
    """Words for a GPU's Xid faults since gputop started and for its counters of faults."""
    out = [f"Xid {x.xid} at {time.strftime('%H:%M:%S', time.localtime(x.time_s))}" for x in gpu.xids[-_MAX_XID_TEXTS:]]
    if len(gpu.xids) > _MAX_XID_TEXTS:
        out[0] = f"{len(gpu.xids)} Xid errors, the last: {out[0]}"
    return out + [fault.state or f"{GPU_METRICS[metric].label} {reading(gpu[metric])}"
                  for metric, fault in FAULTS.items() if gpu[metric].value]


def unread_text(sample: NodeSample | None) -> str:
    """GPUs that cannot be read, and why; "" where there are none. A finding tells of those that are lost or hang."""
    failed = [gpu for gpu in sample.gpus if gpu.state == FAILED] if sample is not None else []
    if not failed:
        return ""
    alike = [gpu for gpu in failed if gpu.message == failed[0].message]
    others = sorted({gpu.info.index for gpu in failed} - {gpu.info.index for gpu in alike})
    also = f" GPU {ranges(others)} cannot be read either." if others else ""
    if len({gpu.info.index for gpu in alike}) == 1 and alike[0].message.startswith("GPU "):  # it names the GPU itself
        return printable(alike[0].message) + also
    shown = ranges(sorted({gpu.info.index for gpu in alike}))
    return f"GPU {shown} cannot be read: {printable(failed[0].message).rstrip('.')}.{also}"


def _activity(gpu: GpuSample, heading: str) -> Figure:
    return activity_text(gpu), "dim" if gpu.activity()[1].value is None else "strong"


def _single(metric: str) -> Callable[[GpuSample, str], Figure]:
    return lambda gpu, heading: plain_figure(gpu[metric])


def _memory(gpu: GpuSample, heading: str) -> Figure:
    used, total = gpu["memory_used_bytes"], gpu["memory_total_bytes"]
    return _pair(used, total, _gib if heading.endswith("GiB") else bytes_)


def _link(metrics: tuple[str, str]) -> Callable[[GpuSample, str], Figure]:
    def figure(gpu: GpuSample, heading: str) -> Figure:
        text, tone = _pair(gpu[metrics[0]], gpu[metrics[1]], rate_gb)
        return text if heading.endswith("GB/s") or text == NA else f"{text} GB/s", tone

    return figure


def _clock(gpu: GpuSample, heading: str) -> Figure:
    now, most = gpu["sm_clock_hz"], gpu["sm_clock_max_hz"]
    slow = now.value is not None and most.value is not None and now.value < _SLOW_CLOCK_RATIO * most.value
    text, tone = plain_figure(now)
    return text, "warn" if slow and gpu.clock_event_reasons else tone


def _power(gpu: GpuSample, heading: str) -> Figure:
    power, limit = gpu["power_w"], gpu["power_limit_w"]
    text, tone = plain_figure(power)
    limited = power.value is not None and limit.value is not None and power.value >= _POWER_LIMIT_RATIO * limit.value
    return text, "warn" if limited else tone


def _flags(gpu: GpuSample, heading: str) -> Figure:
    flags, tone = flags_of(gpu)
    return ", ".join(flags), tone


def _pair(a: Reading, b: Reading, text: Callable[[float], str]) -> Figure:
    if a.value is None and b.value is None:
        return NA, "dim"
    return "/".join(NA if r.value is None else text(r.value) for r in (a, b)), "text"


def _gib(value: float) -> str:
    gib = value / 2**30
    return f"{gib:.0f}" if gib >= 99.5 or abs(gib - round(gib)) < 0.05 else f"{gib:.1f}"


# -- the table -------------------------------------------------------------------------------------

COLUMNS: tuple[GpuColumn, ...] = (
    GpuColumn("gpu", "GPU", "label", screen=((0, 4),), text=4),
    GpuColumn("main", "", "spectrogram"),  # of a metric that the user chooses; it takes the room that is left
    GpuColumn("bar", "", screen=((60, 7), (110, 9), (140, 11), (190, 17))),  # the figure after it, as a bar
    GpuColumn("now", "SM", figure=_activity, screen=((30, 6),), text=7, page=True, headings={"screen": "now"}),
    GpuColumn("tensor_active", "tensor", metrics=("tensor_active",), figure=_single("tensor_active"),
              screen=((110, 7),), text=7, page=True),
    GpuColumn("tensor_flop_util", "tensor FLOPs est.", metrics=("tensor_flop_util",),
              figure=_single("tensor_flop_util"), page=True),
    GpuColumn("dram_active", "DRAM", metrics=("dram_active",), figure=_single("dram_active"),
              screen=((110, 6),), text=6, page=True),
    # What makes the main lane shorter comes when there is room for both: from 110 cells on it has 36 or more.
    GpuColumn("memory_lane", "Memory GiB", "spectrogram", metrics=("memory_used_bytes",),
              screen=((140, 10), (190, 14)), muted=True),
    GpuColumn("memory", "memory", metrics=("memory_used_bytes",), limit="memory_total_bytes", figure=_memory,
              screen=((50, 11), (140, 10)), text=14, page=True, headings={"screen": "Mem GiB"},
              muted=True),
    GpuColumn("pcie_lane", "PCIe RX/TX GB/s", "spectrogram", metrics=PCIE, screen=((140, 10), (190, 14))),
    GpuColumn("pcie", "PCIe", metrics=PCIE, figure=_link(PCIE), screen=((78, 11), (140, 10)), text=18,
              page=True, headings={"screen": "PCIe GB/s", "text": "PCIe RX/TX"}),
    GpuColumn("nvlink", "NVLink", metrics=NVLINK, figure=_link(NVLINK), screen=((170, 12),), page=True,
              headings={"screen": "NVLink GB/s"}),
    GpuColumn("clock", "SM clock", metrics=("sm_clock_hz",), figure=_clock, screen=((170, 10),), text=9, page=True),
    GpuColumn("power", "power", metrics=("power_w",), limit="power_limit_w", figure=_power,
              screen=((60, 6), (110, 9)), text=6, page=True),
    GpuColumn("temperature", "temp", metrics=("temperature_c",), figure=_single("temperature_c"),
              screen=((60, 5),), text=6, page=True, muted=True),
    GpuColumn("flag", "", "flags", figure=_flags, screen=((78, 4), (150, 0))),  # the first one, in three letters
    GpuColumn("flags", "", "flags", figure=_flags, screen=((150, 14),)),
)
MUTED_METRICS = frozenset(metric for column in COLUMNS if column.muted for metric in column.metrics)


_LEFT_OUT = ("NVIDIA", "Tesla", "GeForce", "Quadro")


@lru_cache(64)
def short_gpu_name(name: str) -> str:
    """"NVIDIA H100 80GB HBM3" → "H100 80GB": the maker and the memory technology do not tell GPUs apart."""
    words = [w for w in name.split() if w not in _LEFT_OUT and not w.startswith("HBM")]
    return printable(" ".join(words)) or printable(name)


def gpu_kinds(sample: NodeSample) -> str:
    """"8×H100 80GB": the GPUs counted by name, those that have only their number as unknown. A MIG instance of a GPU
    that is listed itself is not counted. Empty without a GPU."""
    whole = {g.info.index for g in sample.gpus if g.info.mig is None}
    kinds = Counter("unknown" if g.info.name == f"GPU {g.info.index}" else short_gpu_name(g.info.name)
                    for g in sample.gpus if g.info.mig is None or g.info.index not in whole)
    return " + ".join(f"{n}×{name}" for name, n in kinds.items())


def numa_gpus(sample: NodeSample) -> dict[int, list[int]]:
    """The whole GPUs by the NUMA node that they are near, as far as it is known."""
    nodes: dict[int, list[int]] = {}
    for g in sample.gpus:
        if g.info.numa_node is not None and g.info.mig is None:
            nodes.setdefault(g.info.numa_node, []).append(g.info.index)
    return dict(sorted(nodes.items()))

"""Figures of a node for gputop on another one: what the columns and rules of a cluster need, some 200 bytes a GPU: as
JSON arrays in the order of the fields, figures to five digits.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from statistics import fmean
from typing import TYPE_CHECKING, Annotated

from msgspec import Meta, Struct

from gputop.core.metrics import GPU_METRICS
from gputop.core.samples import MAX_GPUS, OK, GpuSample, NodeSample, ProcessSample

if TYPE_CHECKING:
    from gputop.telemetry.history import History

# New ones at the end: an older gputop reads what it knows.
FIGURES = ("tensor_active", "memory_used_bytes", "memory_total_bytes", "power_w", "power_limit_w", "sm_clock_hz",
           "temperature_c", "memory_temperature_c", "pcie_width", "ecc_uncorrected", "rows_remap_failed",
           "clock_reasons", "xid", "sm_active", "gr_active", "gpu_util")
_METRICS = {"rows_remap_failed": "row_remap_failed"}
_MAX_HOLDERS, _MAX_FIGURES = 64, 64
_TEXT_CHARS = 300
_Text = Annotated[str, Meta(max_length=_TEXT_CHARS)]


class GpuHolder(Struct, frozen=True, array_like=True):
    """A process that computes on a GPU."""

    user: _Text | None = None
    program: _Text = ""
    container: _Text | None = None
    started_s: float | None = None
    pid: int | None = None


class NodeGpu(Struct, frozen=True, array_like=True):
    """A GPU or MIG instance. ``values`` are of :data:`FIGURES`; None: not known."""

    uuid: _Text
    label: _Text
    model: _Text = ""
    kind: _Text = ""
    activity: float | None = None
    values: Annotated[tuple[float | None, ...], Meta(max_length=_MAX_FIGURES)] = ()
    holders: Annotated[tuple[GpuHolder, ...], Meta(max_length=_MAX_HOLDERS)] = ()

    @property
    def figures(self) -> dict[str, float]:
        return {name: value for name, value in zip(FIGURES, self.values, strict=False) if value is not None}


class NodeAnswer(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A node now. A GPU that is divided into MIG instances has its work in them, and is not among ``gpus``."""

    hostname: _Text
    gpus: Annotated[tuple[NodeGpu, ...], Meta(max_length=MAX_GPUS)]
    source: _Text = ""
    simulated: bool = False


def answer_of(sample: NodeSample, history: History, seconds: float) -> NodeAnswer:
    """Return what is wanted of a node's newest sample and of its history over some seconds."""
    holders = [(process, GpuHolder(
        _text(process.user), _program(process.command), _text(process.container), process.started_s, process.pid))
        for process in sample.processes]
    return NodeAnswer(hostname=sample.host.hostname[:_TEXT_CHARS], source=sample.source[:_TEXT_CHARS],
                      simulated=sample.simulated, gpus=tuple(
                          _gpu(gpu, holders, history, seconds) for gpu in sample.gpus if not gpu.info.mig_mode))


def _gpu(gpu: GpuSample, processes: Sequence[tuple[ProcessSample, GpuHolder]], history: History,
         seconds: float) -> NodeGpu:
    def figure(metric: str) -> float | None:
        """Return the mean of the last seconds, of what has no history the newest value."""
        values = [value for value in history.window(gpu.info.uuid, metric, seconds)[1] if value == value] if (
            GPU_METRICS[metric].lane and gpu.info.uuid in history.uuids) else []
        return fmean(values) if values else gpu[metric].value

    metric, activity = gpu.activity()
    measured = activity.value is not None
    read = {"clock_reasons": gpu.clock_event_bits, "xid": gpu.xids[-1].xid if gpu.xids else None}
    computing = (holder for process, holder in processes if (held := process.gpus.get(gpu.info.index)) is not None
           and "C" in held.kind and held.mig in (None, gpu.info.mig))
    return NodeGpu(
        gpu.info.uuid[:_TEXT_CHARS], gpu.info.label[:_TEXT_CHARS], (gpu.info.name or "")[:_TEXT_CHARS],
        ("sm_active" if metric == "sm_active" else "util") if measured else "",
        _short(figure(metric)) if measured and gpu.state == OK else None,
        tuple(_short(read[name] if name in read else figure(_METRICS.get(name, name))) for name in FIGURES),
        tuple(islice(computing, _MAX_HOLDERS)))


def _short(value: float | None) -> float | None:
    if value is None:
        return None
    rounded = float(f"{value:.5g}")
    return int(rounded) if rounded.is_integer() else rounded


def _text(text: str | None) -> str | None:
    return None if text is None else text[:_TEXT_CHARS]


def _program(command: str | None) -> str:
    """The script of a command, else its first word."""
    words: Iterable[str] = (command or "").split()
    first = next(iter(words), "?")
    return next((word for word in words if word.endswith(".py")), first).rpartition("/")[2][:_TEXT_CHARS]

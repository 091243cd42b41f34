"""Answer of gputop on a node to ``gputop cluster --nodes``: what its columns and rules need, some 200 bytes a GPU.

``gputop snapshot --format node`` prints it as JSON: arrays in the order of the fields, figures to five digits. Of a
node with an older gputop the whole snapshot is brought to the same form.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from gputop.core import codec
from gputop.core.errors import GputopError
from gputop.core.samples import MAX_GPUS, OK, GpuSample, NodeSample

SCHEMA = "gputop.node/1"
FORMAT = "node"
FIGURES = ("tensor_active", "memory_used_bytes", "memory_total_bytes", "power_w", "power_limit_w", "sm_clock_hz",
           "temperature_c", "memory_temperature_c", "pcie_width", "ecc_uncorrected", "rows_remap_failed",
           "clock_reasons", "xid")  # new ones at the end: an older gputop reads what it knows
_METRICS = {"rows_remap_failed": "row_remap_failed"}
_MAX_HOLDERS, _MAX_FIGURES, _MAX_VALUES = 64, 64, 50_000
_TEXT_CHARS = 300
_Text = Annotated[str, Meta(max_length=_TEXT_CHARS)]


class Holder(Struct, frozen=True, array_like=True):
    """A process that computes on a GPU."""

    user: _Text | None = None
    program: _Text = ""
    container: _Text | None = None
    started_s: float | None = None


class NodeGpu(Struct, frozen=True, array_like=True):
    """A GPU or MIG instance. ``values`` are of :data:`FIGURES`; None: not known."""

    uuid: _Text
    label: _Text
    model: _Text = ""
    kind: _Text = ""
    activity: float | None = None
    values: Annotated[tuple[float | None, ...], Meta(max_length=_MAX_FIGURES)] = ()
    holders: Annotated[tuple[Holder, ...], Meta(max_length=_MAX_HOLDERS)] = ()

    @property
    def figures(self) -> dict[str, float]:
        return {name: value for name, value in zip(FIGURES, self.values, strict=False) if value is not None}


class NodeAnswer(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A node now. A GPU that is divided into MIG instances has its work in them, and is not among ``gpus``."""

    hostname: _Text
    gpus: Annotated[tuple[NodeGpu, ...], Meta(max_length=MAX_GPUS)]
    source: _Text = ""
    simulated: bool = False
    schema: str = SCHEMA


def answer_of_sample(sample: NodeSample) -> NodeAnswer:
    """Return what is wanted of a node's sample."""
    return NodeAnswer(hostname=sample.host.hostname[:_TEXT_CHARS], source=sample.source[:_TEXT_CHARS],
                      simulated=sample.simulated,
                      gpus=tuple(_gpu(gpu, sample) for gpu in sample.gpus if not gpu.info.mig_mode))


def encode(sample: NodeSample) -> str:
    """The answer as JSON. Its last line is the closing bracket: a login may print more after it."""
    text = msgspec.json.encode(answer_of_sample(sample)).decode()
    return f'{{"schema":"{SCHEMA}",{text[1:-1]}\n}}\n'


def read_answer(data: bytes, older: Callable[[bytes], NodeSample]) -> NodeAnswer:
    """Return what a node has answered; raises GputopError where it is nothing that gputop prints. ``older`` reads the
    whole snapshot, which an older gputop prints."""
    if f'"{SCHEMA}"'.encode() not in data[:100]:
        return answer_of_sample(older(data))
    try:
        return msgspec.convert(codec.parse(data, _MAX_VALUES), NodeAnswer)
    except (ValueError, msgspec.ValidationError) as error:
        raise GputopError(f"it cannot be read: {error}") from None


def _gpu(gpu: GpuSample, sample: NodeSample) -> NodeGpu:
    metric, activity = gpu.activity()
    xid = gpu.xids[-1].xid if gpu.xids else None
    read: dict[str, Any] = {"clock_reasons": gpu.clock_event_bits, "xid": xid}
    values = [read[name] if name in read else gpu[_METRICS.get(name, name)].value for name in FIGURES]
    holders = (p for p in sample.processes if (held := p.gpus.get(gpu.info.index)) is not None and "C" in held.kind
               and held.mig in (None, gpu.info.mig))
    has_activity = activity.value is not None
    return NodeGpu(
        gpu.info.uuid[:_TEXT_CHARS], gpu.info.label[:_TEXT_CHARS], (gpu.info.name or "")[:_TEXT_CHARS],
        ("sm_active" if metric == "sm_active" else "util") if has_activity else "",
        _short(activity.value) if gpu.state == OK else None, tuple(map(_short, values)),
        tuple(Holder(_text(p.user), _program(p.command), _text(p.container), p.started_s)
              for p, _ in zip(holders, range(_MAX_HOLDERS), strict=False)))


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

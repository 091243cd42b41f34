"""The names that an expression can use, each with its unit and a sentence, and the units. Screens, docs and checks are
made of it.

``path`` says where the value of a name about a trace stands in :class:`gputop.analysis.results.Analysis`, of one with
a pattern in a row of its table.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal, NamedTuple

from msgspec import Struct

from gputop.core import metrics
from gputop.core.metrics import GPU_METRICS, HOST_METRICS, LANE_METRICS, RATIO


class Unit(NamedTuple):
    """A dimension, by the exponents of its base units. Values are always in base units."""

    seconds: int = 0
    bytes: int = 0
    watts: int = 0
    celsius: int = 0

    def times(self, other: Unit) -> Unit:
        return Unit(*(a + b for a, b in zip(self, other, strict=True)))

    def over(self, other: Unit) -> Unit:
        return Unit(*(a - b for a, b in zip(self, other, strict=True)))

    def __str__(self) -> str:
        above = "·".join(_power(name, n) for name, n in zip(_SYMBOLS, self, strict=True) if n > 0)
        below = "·".join(_power(name, -n) for name, n in zip(_SYMBOLS, self, strict=True) if n < 0)
        return f"{above or '1'}/{below}" if below else above or "no unit"


NONE = Unit()
SECONDS, BYTES, WATTS, CELSIUS, HERTZ = Unit(1), Unit(0, 1), Unit(0, 0, 1), Unit(0, 0, 0, 1), Unit(-1)
BYTES_PER_S = Unit(-1, 1)
_SYMBOLS = ("s", "B", "W", "°C")
OF_METRIC = {metrics.RATIO: NONE, metrics.COUNT: NONE, metrics.BYTES: BYTES, metrics.BYTES_PER_S: BYTES_PER_S,
             metrics.WATTS: WATTS, metrics.CELSIUS: CELSIUS, metrics.HERTZ: HERTZ}
# What ends the name of a figure in documents, from which texts choose the unit (gputop.text.units.figure).
SUFFIX = {SECONDS: "_s", BYTES: "_bytes", BYTES_PER_S: "_bytes_per_s", WATTS: "_w", CELSIUS: "_c", HERTZ: "_hz"}

_SIZES = {"": 1, "k": 10 ** 3, "M": 10 ** 6, "G": 10 ** 9, "T": 10 ** 12,
          "Ki": 2 ** 10, "Mi": 2 ** 20, "Gi": 2 ** 30, "Ti": 2 ** 40}
# As written after a number: its dimension, and how many base units it is.
LITERALS: dict[str, tuple[Unit, float]] = {
    "%": (NONE, 0.01), "W": (WATTS, 1.0), "kW": (WATTS, 1e3), "C": (CELSIUS, 1.0), "°C": (CELSIUS, 1.0),
    "ns": (SECONDS, 1e-9), "us": (SECONDS, 1e-6), "µs": (SECONDS, 1e-6), "ms": (SECONDS, 1e-3), "s": (SECONDS, 1.0),
    "min": (SECONDS, 60.0), "h": (SECONDS, 3600.0),
    **{f"{prefix}Hz": (HERTZ, float(_SIZES[prefix])) for prefix in ("", "k", "M", "G")},
    **{f"{prefix}B": (BYTES, float(size)) for prefix, size in _SIZES.items()},
    **{f"{prefix}B/s": (BYTES_PER_S, float(size)) for prefix, size in _SIZES.items()},
}
EXAMPLE = {NONE: "40%", SECONDS: "300ms", BYTES: "70GiB", WATTS: "600W", CELSIUS: "85C", HERTZ: "1.2GHz",
           BYTES_PER_S: "10GB/s"}


def _power(name: str, exponent: int) -> str:
    return name if exponent == 1 else f"{name}^{exponent}"


Source = Literal["live", "trace"]
AGGREGATES = ("mean", "min", "max", "median")  # of the readings of a time; of the GPUs
MIN_WINDOW_S, MAX_WINDOW_S = 1.0, 3600.0


class Quantity(Struct, frozen=True):
    """``per_gpu``: each GPU has its own. ``past``: its history can be asked. ``needs``: what it is missing for.
    ``ratio``: without a unit, and told in percent."""

    name: str
    unit: Unit
    help: str
    per_gpu: bool = False
    past: bool = False
    path: str = ""
    needs: str = ""
    ratio: bool = False

    def document_name(self, text: str) -> str:
        """The name of its figure in documents, which ends with the unit; ``text`` is as it stands in an expression."""
        suffix = SUFFIX.get(self.unit, "_ratio" if self.ratio else "")
        name = re.sub(r"[^A-Za-z0-9]+", "_", text).strip("_")
        return name if name.endswith(suffix) else name + suffix


def _by_name(*quantities: Quantity) -> dict[str, Quantity]:
    return {quantity.name: quantity for quantity in quantities}


_LIVE = _by_name(
    Quantity("activity", NONE, "SM active, or coarse utilization if SM activity is not available", True, True,
             ratio=True),
    *(Quantity(m.id, OF_METRIC[m.unit], m.help, True, m.id in LANE_METRICS, ratio=m.unit == RATIO)
      for m in GPU_METRICS.values()),
    Quantity("gpu.index", NONE, "number of the GPU, as in nvidia-smi", True),
    Quantity("gpu.processes", NONE, "processes that compute on the GPU", True),
    *(Quantity(f"host.{m.id}", OF_METRIC[m.unit], m.help, past=m.id == "cpu_ratio",
               ratio=m.unit == RATIO) for m in HOST_METRICS.values()))

_STEPS = "training steps in the trace"
_PARTS = "training steps and GPU activity in the trace"
_GPU = "GPU activity in the trace"
_WORK = "XLA programs in the trace, or --flops-per-step"
_TRACE = _by_name(
    Quantity("step.time", SECONDS, "mean length of a step", path="steps.mean_s", needs=_STEPS),
    Quantity("step.median", SECONDS, "median length of a step", path="steps.median_s", needs=_STEPS),
    Quantity("step.p95", SECONDS, "95th percentile of the step length", path="steps.p95_s", needs=_STEPS),
    Quantity("step.count", NONE, "complete steps in the trace", path="steps.count", needs=_STEPS),
    Quantity("step.input_wait", SECONDS, "time per step that the training loop waits for a batch",
             path="input.wait_s_per_step", needs="the training loop's calls for a batch"),
    *(Quantity(f"step.{part}", SECONDS, f"part of the mean step: {what}", path=f"breakdown.{part}", needs=_PARTS)
      for part, what in (("input", "waiting for input while no GPU is busy"), ("h2d", "exposed copies to the GPUs"),
                         ("compute", "compute kernels"), ("collectives", "exposed collectives"),
                         ("d2h", "exposed copies to the host"),
                         ("launch", "GPU idle while the host launches kernels"),
                         ("host", "GPU idle while the host does something else"), ("idle", "the rest"))),
    Quantity("gap.time", SECONDS, "time between the end of a step's call and the next call",
             path="gaps.total_s_per_step", needs="calls to the step function on the host"),
    *(Quantity(f"gpu.{name}", unit, text, True, path=path, needs=_GPU, ratio=text.startswith("share"))
      for name, unit, text, path in (
        ("index", NONE, "number of the GPU in the job", "gpu"),
        ("busy", NONE, "share of the time in which any event ran on the GPU", "busy"),
        ("compute", NONE, "share of the time in which a compute kernel ran", "compute"),
        ("collectives", NONE, "share of the time in which a collective ran", "collectives"),
        ("collectives_exposed", NONE, "share of the time with a collective but no compute", "collectives_exposed"),
        ("copies", NONE, "share of the time in which a copy ran", "copies"),
        ("copies_exposed", NONE, "share of the time in which only a copy ran", "copies_exposed"),
        ("kernels_per_s", HERTZ, "kernels started", "kernels_per_s"),
        ("kernel_median", SECONDS, "median length of a kernel", "kernel_median_s"),
        ("launch_delay", SECONDS, "median time from a launch to its kernel", "launch_delay_median_s"),
        ("compute_per_step", SECONDS, "compute kernels per step", "compute_s_per_step"),
        ("tensor_core", NONE, "share of the kernel time in tensor core kernels", "tensor_core_time"))),
    Quantity("collectives.waiting", NONE, "share of the collectives' time spent waiting for the last GPU",
             path="collectives.waiting", needs="collectives of all GPUs in the trace", ratio=True),
    Quantity("collectives.per_step", NONE, "collectives per step", path="collectives.count_per_step",
             needs="collectives and steps in the trace"),
    *(Quantity(f"memory.{name}", unit, text, path=name, needs="the GPU allocators' records",
               ratio=unit == NONE) for name, unit, text in (
        ("peak", BYTES, "highest memory use of the fullest GPU allocator"),
        ("peak_ratio", NONE, "highest memory use, as a share of the allocator's limit"),
        ("headroom", BYTES, "least free memory during the window, over the GPUs' allocators"),
        ("fragmentation", NONE, "highest share of free memory outside the largest block"))),
    Quantity("functions.retracings", NONE, "number of times a tf.function was retraced", path="functions.retracings",
             needs="TensorFlow functions on the host"),
    Quantity("xla.compilations", NONE, "XLA compilations during the window", path="functions.xla_compilations",
             needs="TensorFlow functions on the host"),
    Quantity("xla.compile_time", SECONDS, "time that XLA spent compiling", path="functions.xla_compile_s",
             needs="TensorFlow functions on the host"),
    Quantity("ops.eager_share", NONE, "share of eagerly run ops in the time of all ops", path="ops.eager_share",
             needs="eagerly run ops and calls to tf.functions", ratio=True),
    Quantity("limits.mfu", NONE, "model FLOPs utilization", path="limits.mfu", needs=_WORK, ratio=True),
    Quantity("limits.hfu", NONE, "hardware FLOPs utilization", path="limits.hfu", needs=_WORK, ratio=True),
    Quantity("trace.window", SECONDS, "length of the trace", path="trace.window_s"),
    Quantity("trace.events", NONE, "events in the trace", path="trace.events"))

NAMES: Mapping[Source, Mapping[str, Quantity]] = {"live": _LIVE, "trace": _TRACE}
# What is a part of another figure: the quotient of both is a share.
PARTS_OF: Mapping[str, tuple[str, ...]] = {
    "step.time": tuple(name for name in _TRACE if name.startswith("step.") and _TRACE[name].path.startswith(
        ("breakdown.", "input."))),
    "memory_total_bytes": ("memory_used_bytes", "memory_reserved_bytes"),
    "host.memory_total_bytes": ("host.memory_used_bytes",)}


class NamedRows(Struct, frozen=True):
    """Rows of a trace that a pattern with ``*`` and ``?`` chooses by name; their figures are summed."""

    name: str
    help: str
    fields: Mapping[str, Quantity]
    needs: str


TABLES: Mapping[str, NamedRows] = {table.name: table for table in (
    NamedRows("layer", "phases, layers and ops of the step, selected by path: layer(\"decoder/*\")", _by_name(
        Quantity("time", SECONDS, "time per step and GPU that they keep the GPU busy", path="device_s"),
        Quantity("wait", SECONDS, "GPU idle time before their kernels", path="wait_s"),
        Quantity("share", NONE, "busy and idle time, as a share of the step", path="share", ratio=True),
        Quantity("kernels", NONE, "kernels per step and GPU", path="kernels")),
        "layers, which need op names in the trace"),
    NamedRows("kernel", "kernels selected by name, over all GPUs and the whole trace: kernel(\"*gemm*\")", _by_name(
        Quantity("time", SECONDS, "their time, summed", path="time_s"),
        Quantity("share", NONE, "as a share of the time of all kernels", path="share", ratio=True),
        Quantity("count", NONE, "how many ran", path="count")), "kernels in the trace"),
    NamedRows("op", "like kernel(), but selected by the op that launched the kernels", _by_name(
        Quantity("time", SECONDS, "total time of the op's kernels", path="time_s"),
        Quantity("share", NONE, "as a share of the time of all kernels", path="share", ratio=True),
        Quantity("count", NONE, "how many ran", path="count")), "op names in the trace"),
)}
# Functions of figures, and of conditions, over the GPUs.
FUNCTIONS: Mapping[str, str] = {
    "min(a, b)": "the smaller", "max(a, b)": "the larger", "abs(a)": "without its sign",
    "gpus.mean(a)": "mean over the GPUs that have the value; also gpus.min, gpus.max, gpus.median, gpus.sum",
    "gpus.count(c)": "number of GPUs that meet a condition; also gpus.any, gpus.all",
    'finding("id")': "whether the built-in rule with this ID produced a finding",
}

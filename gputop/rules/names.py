"""The names that an expression can use, each with its unit and a sentence. Screens, docs and checks are made of it.

``path`` says where the value of a name about a trace stands in :class:`gputop.analysis.results.Analysis`, of one with
a pattern in a row of its table.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal

from msgspec import Struct

from gputop.core.metrics import GPU_METRICS, HOST_METRICS, LANE_METRICS, RATIO
from gputop.rules.dimensions import BYTES, HERTZ, NONE, OF_METRIC, SECONDS, SUFFIX, Unit

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
    Quantity("activity", NONE, "SM active; if that cannot be read, coarse utilization", True, True,
             ratio=True),
    *(Quantity(m.id, OF_METRIC[m.unit], m.help, True, m.id in LANE_METRICS, ratio=m.unit == RATIO)
      for m in GPU_METRICS.values()),
    Quantity("gpu.index", NONE, "number of the GPU, as nvidia-smi counts", True),
    Quantity("gpu.processes", NONE, "processes that compute on the GPU", True),
    *(Quantity(f"host.{m.id}", OF_METRIC[m.unit], m.help, past=m.id == "cpu_ratio",
               ratio=m.unit == RATIO) for m in HOST_METRICS.values()),
)

_STEPS = "training steps in the trace"
_PARTS = "training steps and GPU activity in the trace"
_GPU = "GPU activity in the trace"
_WORK = "XLA's programs in the trace, or --flops-per-step"
_TRACE = _by_name(
    Quantity("step.time", SECONDS, "mean length of a step", path="steps.mean_s", needs=_STEPS),
    Quantity("step.median", SECONDS, "median length of a step", path="steps.median_s", needs=_STEPS),
    Quantity("step.p95", SECONDS, "95% of the steps are shorter", path="steps.p95_s", needs=_STEPS),
    Quantity("step.count", NONE, "whole steps in the trace", path="steps.count", needs=_STEPS),
    Quantity("step.input_wait", SECONDS, "time per step in which the training loop waits for a batch",
             path="input.wait_s_per_step", needs="the training loop's calls for a batch"),
    *(Quantity(f"step.{part}", SECONDS, f"part of the mean step: {what}", path=f"breakdown.{part}", needs=_PARTS)
      for part, what in (("input", "waiting for input, no GPU busy"), ("h2d", "exposed copies to the GPUs"),
                         ("compute", "compute kernels"), ("collectives", "exposed collectives"),
                         ("d2h", "exposed copies to the host"),
                         ("launch", "GPU idle while the host launches"),
                         ("host", "GPU idle while the host does something else"), ("idle", "the rest"))),
    Quantity("gap.time", SECONDS, "time per step between the end of its call and the next",
             path="gaps.total_s_per_step", needs="calls of the step's function on the host"),
    *(Quantity(f"gpu.{name}", unit, text, True, path=path, needs=_GPU, ratio=text.startswith("share"))
      for name, unit, text, path in (
        ("index", NONE, "number of the GPU, as the job counts", "gpu"),
        ("busy", NONE, "share of the time in which anything ran", "busy"),
        ("compute", NONE, "share in which a compute kernel ran", "compute"),
        ("collectives", NONE, "share in which a collective ran", "collectives"),
        ("collectives_exposed", NONE, "share in which a collective ran and no compute", "collectives_exposed"),
        ("copies", NONE, "share in which a copy ran", "copies"),
        ("copies_exposed", NONE, "share in which a copy ran and nothing else", "copies_exposed"),
        ("kernels_per_s", HERTZ, "kernels started", "kernels_per_s"),
        ("kernel_median", SECONDS, "median length of a kernel", "kernel_median_s"),
        ("launch_delay", SECONDS, "median time from a launch to its kernel", "launch_delay_median_s"),
        ("compute_per_step", SECONDS, "compute kernels in a step", "compute_s_per_step"),
        ("tensor_core", NONE, "share of the kernel time on tensor cores", "tensor_core_time"))),
    Quantity("collectives.waiting", NONE, "share of the collectives' time that is waiting for the last GPU",
             path="collectives.waiting", needs="collectives of all GPUs in the trace", ratio=True),
    Quantity("collectives.per_step", NONE, "collectives in a step", path="collectives.count_per_step",
             needs="collectives and steps in the trace"),
    *(Quantity(f"memory.{name}", unit, text, path=name, needs="the GPU allocators' records",
               ratio=unit == NONE) for name, unit, text in (
        ("peak", BYTES, "highest memory in use, of the fullest allocator of a GPU"),
        ("peak_ratio", NONE, "the same, of the memory that it may have"),
        ("headroom", BYTES, "least memory left in the window, over the GPUs' allocators"),
        ("fragmentation", NONE, "highest share of free memory outside the largest block"))),
    Quantity("functions.retracings", NONE, "times a tf.function was traced again", path="functions.retracings",
             needs="TensorFlow's functions on the host"),
    Quantity("xla.compilations", NONE, "compilations by XLA in the window", path="functions.xla_compilations",
             needs="TensorFlow's functions on the host"),
    Quantity("xla.compile_time", SECONDS, "time in which XLA compiled", path="functions.xla_compile_s",
             needs="TensorFlow's functions on the host"),
    Quantity("ops.eager_share", NONE, "time of ops run eagerly, of that of all ops", path="ops.eager_share",
             needs="ops run eagerly and calls of tf.functions", ratio=True),
    Quantity("limits.mfu", NONE, "model FLOPs utilization", path="limits.mfu", needs=_WORK, ratio=True),
    Quantity("limits.hfu", NONE, "hardware FLOPs utilization", path="limits.hfu", needs=_WORK, ratio=True),
    Quantity("trace.window", SECONDS, "length of the trace", path="trace.window_s"),
    Quantity("trace.events", NONE, "events in the trace", path="trace.events"),
)

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
    NamedRows("layer", "phases, layers and ops of the step, by path: layer(\"decoder/*\")", _by_name(
        Quantity("time", SECONDS, "time per step and GPU in which they keep the GPU busy", path="device_s"),
        Quantity("wait", SECONDS, "idle time of the GPU that ends with their kernels", path="wait_s"),
        Quantity("share", NONE, "busy and idle time, of the step", path="share", ratio=True),
        Quantity("kernels", NONE, "kernels per step and GPU", path="kernels")),
        "layers: names of ops in the trace"),
    NamedRows("kernel", "kernels by name, over all GPUs and the whole trace: kernel(\"*gemm*\")", _by_name(
        Quantity("time", SECONDS, "their time, summed", path="time_s"),
        Quantity("share", NONE, "of the time of all kernels", path="share", ratio=True),
        Quantity("count", NONE, "how many ran", path="count")), "kernels in the trace"),
    NamedRows("op", "kernels by the op that launched them, as kernel()", _by_name(
        Quantity("time", SECONDS, "the time of its kernels, summed", path="time_s"),
        Quantity("share", NONE, "of the time of all kernels", path="share", ratio=True),
        Quantity("count", NONE, "how many ran", path="count")), "ops that the trace names"),
)}
# Functions of figures, and of conditions, over the GPUs.
FUNCTIONS: Mapping[str, str] = {
    "min(a, b)": "the smaller", "max(a, b)": "the larger", "abs(a)": "without its sign",
    "gpus.mean(a)": "of a value over the GPUs that have it; also gpus.min, gpus.max, gpus.median, gpus.sum",
    "gpus.count(c)": "how many GPUs meet a condition; also gpus.any, gpus.all",
    'finding("id")': "whether gputop's own rule of that id found something",
}

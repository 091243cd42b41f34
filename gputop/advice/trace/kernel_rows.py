"""Kernels of the steps by their rows: in order, in chains of element-wise ones, and what their names say."""

from __future__ import annotations

import numpy as np

from gputop.advice.registry import limit
from gputop.advice.trace.facts import TraceFacts, once_per_trace
from gputop.advice.verdict import Verdict
from gputop.analysis.layers.culprits import Events
from gputop.analysis.what_if.cure import NO_ROWS, Cure
from gputop.trace.host_calls import launched_in_calls
from gputop.trace.kernel_names import short_kernel, split_op
from gputop.trace.lookups import Mask, name_mask, stable_order
from gputop.trace.model import I64, Trace

_FUSED = ("Assumes that a fused chain of element-wise kernels reads two tensors and writes one; a compiler may fuse "
          "less or more.")
UNCERTAIN = ("uncertain: assumes that a fused chain reads two tensors and writes one in total, whereas now each kernel "
             "reads and writes its own")
_PLAIN_PRODUCTS = ("MatMul", "_FusedMatMul", "SparseMatMul")


@once_per_trace
def kernels_in_steps(facts: TraceFacts) -> I64:
    """Rows of the kernels that begin within the steps, those of a GPU in order of time. Read-only: several rules ask
    for them."""
    rows = np.concatenate([NO_ROWS, *(timeline.events.start + timeline.within(facts.steps, timeline.kernel_places)
                                      for timeline in facts.gpu_timelines)])
    rows.flags.writeable = False
    return rows


def by_stream(trace: Trace, rows: I64) -> I64:
    """The same rows stream by stream, each in their order."""
    return rows[stable_order(trace.device.line[rows])]


class ChainedKernels(Verdict, frozen=True, kw_only=True):
    chained_s: float  # per step and GPU, in chains of element-wise kernels
    chains: float  # rows per step and GPU


def chained_kernels(facts: TraceFacts, kernels: I64, chained: Mask) -> tuple[float, ChainedKernels]:
    """Seconds that fusing would save per step (or window) and GPU, and the verdict, without a share, on the rows of at
    least ``xla_off.chain`` such kernels one after the other on a stream. A fused row reads two tensors and writes one,
    as each kernel does now."""
    device = facts.trace.device
    line = device.line[kernels]
    begins = np.ones(len(kernels), bool)
    begins[1:] = (chained[1:] != chained[:-1]) | (line[1:] != line[:-1])
    row = np.cumsum(begins) - 1
    count = np.bincount(row)
    length = np.bincount(row, weights=device.end_ns[kernels] - device.start_ns[kernels])
    long = (count >= limit("xla_off.chain")) & chained[begins]
    saved = float((length[long] * (1 - 1.5 / count[long])).sum())
    per = 1e9 * facts.steps_or_window * len(facts.active)
    rows = kernels[long[row]]
    return saved / per, ChainedKernels(
        gpus=facts.active_numbers, claim="about", chained_s=float(length[long].sum()) / per,
        chains=float(long.sum()) * 1e9 / per,
        events=Events(rows), cure=Cure(scaled=((rows, 1.5 / count[row[long[row]]]),), assumes=_FUSED))


def plain_name(kernel: str) -> str:
    """A kernel's name without return type, namespaces, template arguments and parameters."""
    return short_kernel(kernel).removesuffix("<…>").rpartition("::")[2][:60] or kernel[:60]


def batched_products(trace: Trace, kernels: I64) -> Mask:
    """Mask of these products that are of many matrices at once: by the op, the host's call, or the grid's third
    dimension; those of which none is known do not count."""
    device = trace.device
    types = [split_op(trace.names[i])[1] if i >= 0 else "" for i in device.tf_op[kernels].tolist()]
    by_op = np.array([bool(kind) and kind not in _PLAIN_PRODUCTS for kind in types], bool)
    has_op = device.tf_op[kernels] >= 0
    if name_mask(trace, "aten::").any():
        by_call = launched_in_calls(trace, kernels, r"aten::(?:badd)?bmm$")
    else:
        deep = np.array([shape.grid[2] > 1 for shape in trace.launch_shapes] + [False], bool)
        by_call = deep[device.shape[kernels]]
    return np.where(has_op, by_op, by_call)

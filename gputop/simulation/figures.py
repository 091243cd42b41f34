"""The live figures of simulated operations, as integrals over time.

For each GPU and step a curve gives, at every moment, how much of each quantity has accumulated
since the step's start. A live figure is the difference of two integrals over the time
between; so figures of small windows add up to those of a large one, exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from gputop.simulation.program import F64, I64, KERNEL_KINDS, StepProgram
from gputop.simulation.scenarios import GPU_COUNT, Scenario
from gputop.simulation.timeline import CopyEvent, StreamOps

# Ratios integrate to seconds, bytes to bytes, dynamic power to joules.
GPU_QUANTITIES = (
    "sm_active", "gr_active", "sm_occupancy", "tensor_active", "dram_active", "fp32_active", "fp16_active",
    "pcie_rx_bytes", "pcie_tx_bytes", "nvlink_bytes", "dynamic_j")
HOST_QUANTITIES = ("launch_cpu_s", "write_bytes")

# Watts that full activity of each part adds to the idle board, chosen so that a GPU full of
# tensor-core GEMMs draws some 650 W of an H100's 700 W.
_SM_W, _TENSOR_W, _DRAM_W, _FP32_W = 190.0, 420.0, 110.0, 90.0
_DRAM_BYTES_PER_S = 3.35e12  # bandwidth of an H100 SXM's HBM3

_ACTIVITY = ("sm_active", "sm_occupancy", "tensor_active", "dram_active", "fp32_active", "fp16_active")
# While a kernel of that kind runs, as shares of the whole GPU, in the range such kernels show on an H100.
_KERNEL_ACTIVITY: dict[str, tuple[float, ...]] = {
    "gemm": (0.97, 0.17, 0.70, 0.34, 0.02, 0.0),
    "norm": (0.92, 0.44, 0.0, 0.70, 0.14, 0.0),
    "bias": (0.95, 0.80, 0.0, 0.82, 0.03, 0.05),
    "softmax": (0.96, 0.71, 0.0, 0.78, 0.11, 0.02),
    "ew": (0.95, 0.84, 0.0, 0.86, 0.02, 0.06),
    "act": (0.96, 0.82, 0.0, 0.80, 0.20, 0.0),
    "reduce": (0.88, 0.52, 0.0, 0.66, 0.08, 0.02),
    "loss": (0.90, 0.40, 0.0, 0.48, 0.16, 0.0),
    "mean": (0.88, 0.52, 0.0, 0.66, 0.08, 0.0),
    "apply": (0.96, 0.75, 0.0, 0.90, 0.09, 0.0),
}
_ACTIVITY_TABLE = np.array([_KERNEL_ACTIVITY[kind] for kind in KERNEL_KINDS])
# A collective is resident on as many SMs as it has channels (24 of 132), moving data or waiting.
_NCCL_SM = 24 / 132
_NCCL_OCCUPANCY = _NCCL_SM * 17 / 64  # 17 of 64 warps
_NCCL_TRANSFER_DRAM = 0.16
_COPY_QUANTITY = {"H2D": "pcie_rx_bytes", "D2H": "pcie_tx_bytes", "P2P": "nvlink_bytes"}


class StepOps(NamedTuple):
    """The operations of one GPU in one step. ``transfer_ns``: the last part of each collective, which moves data."""

    program: StepProgram
    compute: StreamOps
    collectives: StreamOps
    transfer_ns: I64
    copies: tuple[CopyEvent, ...]


class Curve(Struct, frozen=True):
    """Piecewise linear integrals: ``total[i]`` is what has accumulated until ``knots_ns[i]``."""

    knots_ns: npt.NDArray[np.int64]
    total: F64  # [knots, quantities]

    def at(self, time_ns: int) -> F64:
        """Accumulated values until then, one per quantity."""
        i = int(self.knots_ns.searchsorted(time_ns, side="right")) - 1
        if i < 0:
            return np.zeros(self.total.shape[1])
        if i >= len(self.knots_ns) - 1:
            return self.total[-1]
        left, right = self.knots_ns[i], self.knots_ns[i + 1]
        share = (time_ns - int(left)) / int(right - left)
        return self.total[i] + (self.total[i + 1] - self.total[i]) * share


def gpu_curve(ops: StepOps, scenario: Scenario) -> Curve:
    """The integrals of :data:`GPU_QUANTITIES` over one GPU's step."""
    compute, collectives = ops.compute, ops.collectives
    moving = collectives.end - ops.transfer_ns
    copy_times = np.array([(c.start, c.end) for c in ops.copies], np.int64).ravel()
    knots = np.unique(np.concatenate([[0], *compute[1:3], *collectives[1:3], moving, copy_times]))
    rates = np.zeros((len(knots) - 1, len(GPU_QUANTITIES)))
    if not len(rates):
        return Curve(knots, np.zeros((1, len(GPU_QUANTITIES))))
    middle = (knots[:-1] + knots[1:]) / 2
    column = {name: rates[:, i] for i, name in enumerate(GPU_QUANTITIES)}

    if len(compute.row):
        index, active = _running(compute.start, compute.end, middle)
        kind = ops.program.kind[compute.row[index]]
        activity = _ACTIVITY_TABLE[kind] * active[:, None] * scenario.sm_fill
        for i, name in enumerate(_ACTIVITY):
            column[name] += activity[:, i]
        column["gr_active"] += active

    if len(collectives.row):
        index, active = _running(collectives.start, collectives.end, middle)
        transfer = active * (middle >= moving[index])
        column["sm_active"] += _NCCL_SM * active
        column["sm_occupancy"] += _NCCL_OCCUPANCY * active
        column["dram_active"] += _NCCL_TRANSFER_DRAM * transfer
        np.maximum(column["gr_active"], active, out=column["gr_active"])
        # A ring passes every byte 2·(n-1)/n times, in and out alike.
        ring = scenario.gradient_bytes / scenario.job.comm_count * 2 * (GPU_COUNT - 1) / GPU_COUNT
        column["nvlink_bytes"] += transfer * ring / np.maximum(ops.transfer_ns[index], 1) * 1e9

    for copy in ops.copies:
        active = (middle >= copy.start) & (middle < copy.end)
        rate = copy.copy.size / max(copy.end - copy.start, 1) * 1e9
        column[_COPY_QUANTITY[copy.copy.way]] += active * rate
        column["dram_active"] += active * rate / _DRAM_BYTES_PER_S

    for name in ("sm_active", "dram_active"):
        np.minimum(column[name], 1.0, out=column[name])
    column["dynamic_j"] += (
        _SM_W * column["sm_active"] + _TENSOR_W * column["tensor_active"]
        + _DRAM_W * column["dram_active"] + _FP32_W * column["fp32_active"])
    return _integrate(knots, rates)


def waiting_rates() -> F64:
    """Rates of :data:`GPU_QUANTITIES` per second, while a GPU waits in a collective for another one."""
    rates = {"sm_active": _NCCL_SM, "gr_active": 1.0, "sm_occupancy": _NCCL_OCCUPANCY, "dynamic_j": _SM_W * _NCCL_SM}
    return np.array([rates.get(name, 0.0) for name in GPU_QUANTITIES])


def host_curve(gpus: Sequence[StepOps], body_ns: int) -> Curve:
    """The integrals of :data:`HOST_QUANTITIES` in a step: CPU time of the launching threads."""
    launched = [ops.compute for ops in gpus if len(ops.compute.row)]
    spans = [(int(ops.launch[0]), int(ops.launch_end[-1])) for ops in launched]
    knots = np.unique(np.array([0, body_ns, *(t for span in spans for t in span)], np.int64))
    middle = (knots[:-1] + knots[1:]) / 2
    busy = np.zeros(len(middle))
    for begin, end in spans:
        busy += (middle >= begin) & (middle < end)
    return _integrate(knots, np.stack([busy, np.zeros(len(middle))], axis=1))


def checkpoint_curve(size_bytes: int, body_ns: int) -> Curve:
    """The integrals of :data:`HOST_QUANTITIES` while one thread writes a checkpoint."""
    return _integrate(np.array([0, body_ns], np.int64), np.array([[1.0, size_bytes / body_ns * 1e9]]))


def _running(start: I64, end: I64, times: F64) -> tuple[npt.NDArray[np.intp], F64]:
    """State per moment: the last operation begun on a stream, and 1.0 if it still runs."""
    last = np.searchsorted(start, times, side="right") - 1
    index = np.maximum(last, 0)
    return index, ((last >= 0) & (times < end[index])).astype(np.float64)


def _integrate(knots_ns: npt.NDArray[np.int64], rates: F64) -> Curve:
    total = np.zeros((len(knots_ns), rates.shape[1]))
    np.cumsum(rates * (np.diff(knots_ns) / 1e9)[:, None], axis=0, out=total[1:])
    return Curve(knots_ns, total)

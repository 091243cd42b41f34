"""What a monitor reads while simulated operations run: figures as integrals over time.

For each GPU and step a curve gives, at every moment, how much of each quantity has gathered
since the step's start. A live figure is the difference of two integrals over the time
between; so figures of small windows add up to those of a large one, exactly.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gputop.simulation import kernels
from gputop.simulation.program import StepKind, Stream
from gputop.simulation.scenarios import GPU_COUNT, Scenario
from gputop.simulation.step import SimulatedStep, StepOps

F64 = npt.NDArray[np.float64]

# Ratios integrate to seconds, bytes to bytes, dynamic power to joules.
GPU_QUANTITIES = (
    "sm_active", "gr_active", "sm_occupancy", "tensor_active", "dram_active", "fp32_active", "fp16_active",
    "pcie_rx_bytes", "pcie_tx_bytes", "nvlink_bytes", "dynamic_j",
)
HOST_QUANTITIES = ("launch_cpu_s", "write_bytes")

# Watts that full activity of each part adds to the idle board, chosen so that a GPU full of
# tensor-core GEMMs draws some 650 W of an H100's 700 W.
_SM_W, _TENSOR_W, _DRAM_W, _FP32_W = 190.0, 420.0, 110.0, 90.0

_ACTIVITY = ("sm_active", "sm_occupancy", "tensor_active", "dram_active", "fp32_active", "fp16_active")
_TABLE = np.array([[k.sm, k.occupancy, k.tensor, k.dram, k.fp32, k.fp16] for k in kernels.KERNELS.values()])


@dataclass(frozen=True, slots=True)
class Curve:
    """Piecewise linear integrals: ``total[i]`` is what has gathered until ``knots_ns[i]``."""

    knots_ns: npt.NDArray[np.int64]
    total: F64  # [knots, quantities]

    def at(self, time_ns: int) -> F64:
        """What has gathered until then, one value per quantity."""
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
    moving = ops.end_ns - ops.transfer_ns
    knots = np.unique(np.concatenate([[0], ops.start_ns, ops.end_ns, moving]))
    rates = np.zeros((len(knots) - 1, len(GPU_QUANTITIES)))
    if not len(rates):
        return Curve(knots, np.zeros((1, len(GPU_QUANTITIES))))
    middle = (knots[:-1] + knots[1:]) / 2
    column = {name: rates[:, i] for i, name in enumerate(GPU_QUANTITIES)}

    row, active = _running(ops, Stream.COMPUTE, middle)
    if len(row):
        activity = _TABLE[ops.program.kernel[row]] * active[:, None] * scenario.sm_fill
        for i, name in enumerate(_ACTIVITY):
            column[name] += activity[:, i]
        column["gr_active"] += active

    row, active = _running(ops, Stream.COLLECTIVE, middle)
    if len(row):
        transfer = active * (middle >= moving[row])
        column["sm_active"] += kernels.NCCL_SM * active
        column["sm_occupancy"] += kernels.NCCL_OCCUPANCY * active
        column["dram_active"] += kernels.NCCL_TRANSFER_DRAM * transfer
        np.maximum(column["gr_active"], active, out=column["gr_active"])
        # A ring passes every byte 2·(n-1)/n times, in and out alike.
        ring = ops.program.bytes[row] * 2 * (GPU_COUNT - 1) / GPU_COUNT
        column["nvlink_bytes"] += transfer * ring / np.maximum(ops.transfer_ns[row], 1) * 1e9

    for stream, name in ((Stream.H2D, "pcie_rx_bytes"), (Stream.D2H, "pcie_tx_bytes"), (Stream.P2P, "nvlink_bytes")):
        row, active = _running(ops, stream, middle)
        if len(row):
            rate = ops.program.bytes[row] / np.maximum(ops.end_ns[row] - ops.start_ns[row], 1) * 1e9
            column[name] += active * rate
            column["dram_active"] += active * rate / 3.35e12  # of an H100 SXM's HBM3 bandwidth

    for name in ("sm_active", "dram_active"):
        np.minimum(column[name], 1.0, out=column[name])
    column["dynamic_j"] += (
        _SM_W * column["sm_active"] + _TENSOR_W * column["tensor_active"]
        + _DRAM_W * column["dram_active"] + _FP32_W * column["fp32_active"]
    )
    return _integrate(knots, rates)


def host_curve(step: SimulatedStep, scenario: Scenario) -> Curve:
    """The integrals of :data:`HOST_QUANTITIES`: CPU time of the launching threads, bytes to disk."""
    if step.kind is StepKind.CHECKPOINT:
        knots = np.array([0, step.body_ns], np.int64)
        write = scenario.checkpoint_bytes / step.body_ns * 1e9
        return _integrate(knots, np.array([[1.0, write]]))
    spans = [(int(g.launch_ns[0]), int(g.launch_end_ns[-1])) for g in step.gpus if len(g.launch_ns)]
    knots = np.unique(np.array([0, step.body_ns, *(t for span in spans for t in span)], np.int64))
    middle = (knots[:-1] + knots[1:]) / 2
    busy = np.zeros(len(middle))
    for begin, end in spans:
        busy += (middle >= begin) & (middle < end)
    return _integrate(knots, np.stack([busy, np.zeros(len(middle))], axis=1))


def _running(ops: StepOps, stream: Stream, at: F64) -> tuple[npt.NDArray[np.intp], F64]:
    """Per moment: the row of the last operation begun on that stream, and 1.0 if it still runs."""
    rows = ops.rows(stream)
    if not len(rows):
        return rows, np.zeros(len(at))
    last = np.searchsorted(ops.start_ns[rows], at, side="right") - 1
    row = rows[np.maximum(last, 0)]
    return row, ((last >= 0) & (at < ops.end_ns[row])).astype(np.float64)


def _integrate(knots_ns: npt.NDArray[np.int64], rates: F64) -> Curve:
    total = np.zeros((len(knots_ns), rates.shape[1]))
    np.cumsum(rates * (np.diff(knots_ns) / 1e9)[:, None], axis=0, out=total[1:])
    return Curve(knots_ns, total)

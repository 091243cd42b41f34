"""Time of a GPU's kernels that a larger batch shares out, and the part of the GPU that it would fill.

A step with ``f`` times the samples needs ``f`` times the kernel time, except for two kinds of kernels. The optimizer's
work on the parameters, whose number does not change. And a kernel with fewer blocks than the GPU has SMs leaves SMs
idle: with ``f`` times the blocks it takes no longer until each SM has one. Blocks and SMs are facts of the trace; that
the grid grows with the batch is not: batch normalization has a block per channel, a weight's gradient one per tile of
the weight. Such kernels loop over the batch within a block and run long, so only short ones count as filled.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from gputop.analysis.gpu.device_time import GpuTimeline, gpu_number
from gputop.analysis.results import BatchScaling, FewBlocks
from gputop.analysis.steps.membership import in_steps
from gputop.analysis.steps.model import Steps
from gputop.trace.intervals import union
from gputop.trace.lookups import OPTIMIZER_CALL, Mask, launched_in_calls, name_mask, optimizer_names, rows_of
from gputop.trace.model import F64, I64, Trace
from gputop.trace.occupancy import resident_blocks

FACTORS = (2, 4, 8)  # of the batch, for which the saving is computed
# So short a kernel is for the most part the latency of its start and of memory: gputop's own figure. ResNet-50's
# batch normalization, with a block per channel, takes 15 µs and more.
SHORT_NS = 10_000
_TOP = 5
# Their grids follow the weights, not the batch.
_OF_WEIGHTS = r"(?i).*(?:wgrad|backpropfilter|biasgrad|bias_grad|splitkreduce)"


def batch_scaling(
    trace: Trace, gpu_timelines: Sequence[GpuTimeline], steps: Steps | None,
) -> tuple[BatchScaling, ...]:
    """Seconds per step, or in the window without steps, of each GPU that ran compute kernels within."""
    device = trace.device
    optimizer, of_weights = optimizer_names(trace), name_mask(trace, _OF_WEIGHTS)
    shapes = trace.launch_shapes
    blocks = np.array([min(math.prod(shape.grid), 1 << 40) for shape in shapes] + [0], np.int64)  # the last: not told
    out = []
    for timeline in gpu_timelines:
        places = timeline.computing_places
        if steps is not None:
            places = places[rows_of(in_steps(timeline.start_ns[places], steps))]
        if not len(places):
            continue
        rows = timeline.rows[places]
        start, end, name = timeline.start_ns[places], timeline.end_ns[places], device.name[rows]
        optimizes = optimizer[name] | optimizer[device.tf_op[rows]] | launched_in_calls(trace, rows, OPTIMIZER_CALL)
        unit = 1e9 * (steps.count if steps is not None else 1)
        alone = _Alone(start, end)
        gpu, sms = gpu_number(trace, timeline.gpu), trace.gpus[timeline.gpu].sms
        optimizer_s = alone.ns(optimizes) / unit if optimizes.any() else None
        if sms is None or not len(device.shape) or not (device.shape[rows] >= 0).any():
            out.append(BatchScaling(gpu, optimizer_s))
            continue
        shape = device.shape[rows]
        in_grid = np.where(optimizes, 0, blocks[shape])
        few = (in_grid > 0) & (in_grid < sms)
        # Kernels that overlap are not added up, and those beside larger ones fill nothing.
        length: F64 = (end - start).astype(np.float64)
        few_share = alone.ns(few) / max(float(length[few].sum()), 1.0)
        length *= np.where(few, few_share, alone.share)
        short = few & (end - start <= SHORT_NS) & ~of_weights[name]
        used, time = in_grid[short] / sms, length[short]
        waves = _waves(trace, timeline.gpu, sms, blocks)[shape]
        waves[optimizes] = 0
        last = waves > 1
        fill_known = bool((waves > 0).any())
        out.append(BatchScaling(
            gpu, optimizer_s, sms=sms, few_blocks_s=float(length[few].sum()) / unit,
            filled_s={f: float((time * (1 - np.maximum(used, 1 / f))).sum()) / unit for f in FACTORS},
            last_wave_s=float((length[last] * (1 - waves[last] / np.ceil(waves[last]))).sum()) / unit
            if fill_known else None,
            under_one_wave_s=float(length[(waves > 0) & (waves < 1) & ~few].sum()) / unit if fill_known else None,
            few_blocks=_longest(trace, name[few], shape[few], length[few], blocks, unit)))
    return tuple(out)


class _Alone:
    """Kernels by start and end. ``share``: how long any ran, of the sum of their lengths."""

    def __init__(self, start: I64, end: I64) -> None:
        self._start, self._end = start, end
        self._any = union(start, end).total
        self.share = self._any / max(int((end - start).sum()), 1)

    def ns(self, chosen: Mask) -> int:
        """The time in which no other kernels than these run."""
        return self._any - union(self._start[~chosen], self._end[~chosen]).total


def _waves(trace: Trace, gpu: int, sms: int, blocks: I64) -> F64:
    """Number of times that the GPU must be filled with blocks (Nsight Compute's waves), by launch shape; 0 where not
    known."""
    capability = trace.gpus[gpu].compute_capability
    resident = [resident_blocks(capability, math.prod(shape.block), shape.registers, shape.shared_bytes) or 0
                for shape in trace.launch_shapes] + [0]
    room = np.array(resident, np.float64) * sms
    return np.divide(blocks, room, out=np.zeros(len(blocks)), where=room > 0)


def _longest(
    trace: Trace, name: npt.NDArray, shape: npt.NDArray, length: F64, blocks: I64, unit: float,
) -> tuple[FewBlocks, ...]:
    """The names that took most time, each with the number of blocks with which it took most of it."""
    if not len(name):
        return ()
    times = np.bincount(name.astype(np.int64) + 1, weights=length)
    counts = np.bincount(name.astype(np.int64) + 1)
    out = []
    for i in np.argsort(-times, kind="stable")[:_TOP].tolist():
        if not counts[i]:
            break
        of_name = name == i - 1
        most = int(np.argmax(np.bincount(shape[of_name], weights=length[of_name])))
        out.append(FewBlocks(trace.names[i - 1] if i else "", int(blocks[most]),
                             float(times[i]) / unit, float(counts[i]) * 1e9 / unit))
    return tuple(out)

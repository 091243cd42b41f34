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

from gputop.analysis.gpu.device_time import GpuTimeline, gpu_number
from gputop.analysis.gpu.sm_use import largest_names
from gputop.analysis.results import BatchScaling, FewBlocks
from gputop.analysis.steps.model import Steps
from gputop.trace.host_calls import OPTIMIZER_CALL, launched_in_calls
from gputop.trace.intervals import union
from gputop.trace.lookups import name_mask, optimizer_names
from gputop.trace.model import F64, I64, Trace
from gputop.trace.occupancy import resident_blocks

FACTORS = (2, 4, 8)  # of the batch, for which the saving is computed
# So short a kernel is for the most part the latency of its start and of memory: gputop's own figure. ResNet-50's
# batch normalization, with a block per channel, takes 15 µs and more.
SHORT_NS = 10_000
# Their grids follow the weights, not the batch.
_OF_WEIGHTS = ("wgrad", "backpropfilter", "biasgrad", "bias_grad", "splitkreduce")


def batch_scaling(trace: Trace, gpu_timelines: Sequence[GpuTimeline], steps: Steps | None) -> tuple[BatchScaling, ...]:
    """Seconds per step, or in the window without steps, of each GPU that ran compute kernels within."""
    device = trace.device
    optimizer, of_weights = optimizer_names(trace), name_mask(trace, "", _OF_WEIGHTS)
    shapes = trace.launch_shapes
    blocks = np.array([min(math.prod(shape.grid), 1 << 40) for shape in shapes] + [0], np.int64)  # the last: not told
    out = []
    for timeline in gpu_timelines:
        places = timeline.within(steps, timeline.computing_places)
        if not len(places):
            continue
        rows = timeline.events.start + places
        start, end, name = timeline.start_ns[places], timeline.end_ns[places], device.name[rows]
        optimizes = optimizer[name] | optimizer[device.tf_op[rows]] | launched_in_calls(trace, rows, OPTIMIZER_CALL)
        unit = 1e9 * (steps.count if steps is not None else 1)
        running_ns = union(start, end).total
        gpu, sms = gpu_number(trace, timeline.gpu), trace.gpus[timeline.gpu].sms
        # The time in which no other kernels than the optimizer's run.
        others = ~optimizes
        optimizer_s = (running_ns - union(start[others], end[others]).total) / unit if optimizes.any() else None
        if sms is None or not (device.shape[rows] >= 0).any():
            out.append(BatchScaling(gpu, optimizer_s))
            continue
        shape = device.shape[rows]
        in_grid = np.where(optimizes, 0, blocks[shape])
        few = (in_grid > 0) & (in_grid < sms)
        # Kernels that overlap are not added up, and those beside larger ones fill nothing.
        length: F64 = (end - start).astype(np.float64)
        few_share = (running_ns - union(start[~few], end[~few]).total) / max(float(length[few].sum()), 1.0)
        length *= np.where(few, few_share, running_ns / max(int((end - start).sum()), 1))
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
            few_blocks=tuple(FewBlocks(text, int(blocks[main]), time / unit, float(of_name.sum()) * 1e9 / unit)
                             for text, of_name, time, main in largest_names(trace, rows[few], length[few]))))
    return tuple(out)


def _waves(trace: Trace, gpu: int, sms: int, blocks: I64) -> F64:
    """Number of times that the GPU must be filled with blocks (Nsight Compute's waves), by launch shape; 0 where not
    known."""
    capability = trace.gpus[gpu].compute_capability
    resident = [resident_blocks(capability, math.prod(shape.block), shape.registers, shape.shared_bytes) or 0
                for shape in trace.launch_shapes] + [0]
    room = np.array(resident, np.float64) * sms
    return np.divide(blocks, room, out=np.zeros(len(blocks)), where=room > 0)

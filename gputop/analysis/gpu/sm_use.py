"""Part of a GPU that its kernels use while they run: the share of its SMs that have work.

A GPU counts as busy while any kernel runs, be it one block on one of 132 SMs. The algorithm, for each GPU:

1. A launch of ``b`` blocks of ``w`` warps on ``S`` SMs, of which one holds ``r`` blocks, runs in ``b / (S r)`` waves
   (Nsight Compute's "waves per SM"). Its blocks are spread evenly, as the hardware does: with ``b < S`` some SMs have
   none.
2. An SM has four schedulers, each of which serves warps of its own (CUDA C++ Programming Guide, "Technical
   Specifications per Compute Capability", 7.0 to 9.0): with fewer than four warps some of them have none.
   ``width`` of a launch is the share of the GPU's schedulers (of its SMs, where ``r`` is not known) that have a warp in
   its fullest wave, of whose lanes a block of less than a warp uses its threads alone. No assumption goes into it.
3. The last wave of a launch of several holds fewer blocks. ``tail`` is the width of all its waves, if they take equally
   long, as a share of that of a full one. Where blocks differ in length, or ``r`` is not known, it is 1 or too small.
4. Launches that run at once share the GPU: at each instant their widths are added, up to 1.
5. Launches whose grid is not in the trace count as full. ``known`` says how much of the time the others take.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from gputop.analysis.gpu.device_time import GpuTimeline, gpu_number
from gputop.analysis.results import NarrowKernel, SmUse
from gputop.analysis.steps.model import Steps
from gputop.trace.intervals import union
from gputop.trace.lookups import Mask, numbered
from gputop.trace.model import F64, I64, Trace, TraceGpu
from gputop.trace.occupancy import SCHEDULERS, LaunchShape, resident_blocks

_TOP = 5
NARROW = 0.5  # kernels that use no more of the GPU are named: gputop's own figure
_WARP = 32


def sm_use(trace: Trace, gpu_timelines: Sequence[GpuTimeline], steps: Steps | None) -> tuple[SmUse, ...]:
    """Use of the SMs of each GPU that ran compute kernels, in seconds per step or, without steps, in the window."""
    out = []
    for timeline in gpu_timelines:
        places = timeline.within(steps, timeline.computing_places)
        if not len(places):
            continue
        gpu, unit = trace.gpus[timeline.gpu], 1e9 * (steps.count if steps is not None else 1)
        rows, start, end = timeline.events.start + places, timeline.start_ns[places], timeline.end_ns[places]
        number, compute_s = gpu_number(trace, timeline.gpu), union(start, end).total / unit
        if gpu.sms is None or not trace.launch_shapes:
            out.append(SmUse(number, compute_s))
            continue
        shapes = trace.launch_shapes
        width, full_waves = _of_shapes(shapes, gpu)
        shape = trace.device.shape[rows]
        used_ns = _covered(start, end, width[shape])
        length: F64 = (end - start).astype(np.float64)
        narrow = width[shape] <= NARROW
        # The names that leave most of the GPU empty, each with the launch shape with which it does so most.
        emptiest = largest_names(trace, rows[narrow], (length * (1 - width[shape]))[narrow])
        out.append(SmUse(
            number, compute_s, sms=gpu.sms, used_s=used_ns / unit,
            tail_s=(used_ns - _covered(start, end, (width * full_waves)[shape])) / unit,
            known=float(length[shape >= 0].sum() / max(length.sum(), 1.0)),
            narrow=tuple(NarrowKernel(
                name=name, blocks=math.prod(shapes[main].grid), threads=math.prod(shapes[main].block),
                width=float(width[main]), time_s_per_step=float(length[narrow][chosen].sum()) / unit,
                count_per_step=float(chosen.sum()) * 1e9 / unit) for name, chosen, _, main in emptiest)))
    return tuple(out)


def narrow_kernels(trace: Trace, gpu_timelines: Sequence[GpuTimeline], steps: Steps | None) -> I64:
    """Rows of the compute kernels that use no more than ``NARROW`` of their GPU."""
    out = [np.zeros(0, np.int64)]
    for timeline in gpu_timelines:
        gpu = trace.gpus[timeline.gpu]
        if gpu.sms is not None and trace.launch_shapes:
            rows = timeline.events.start + timeline.within(steps, timeline.computing_places)
            out.append(rows[_of_shapes(trace.launch_shapes, gpu)[0][trace.device.shape[rows]] <= NARROW])
    return np.concatenate(out)


def _of_shapes(shapes: Sequence[LaunchShape], gpu: TraceGpu) -> tuple[F64, F64]:
    """``width`` and ``tail`` of each launch shape; the last, which is that of -1, of a launch without one."""
    both = [launch_width(shape, gpu) for shape in shapes] + [(1.0, 1.0)]
    return np.array([width for width, _ in both]), np.array([tail for _, tail in both])


def launch_width(shape: LaunchShape, gpu: TraceGpu) -> tuple[float, float]:
    """``width`` and ``tail`` of one launch; see the module. The GPU's SMs must be known."""
    assert gpu.sms is not None
    blocks, threads = math.prod(shape.grid), math.prod(shape.block)
    resident = resident_blocks(gpu.compute_capability, threads, shape.registers, shape.shared_bytes)
    lanes = min(threads / _WARP, 1.0)
    if resident is None:
        return min(blocks / gpu.sms, 1.0) * lanes, 1.0
    room, warps = resident * gpu.sms, -(-threads // _WARP)
    if blocks <= room:
        return _width(blocks, warps, gpu.sms) * lanes, 1.0
    waves, left = divmod(blocks, room)
    full = _width(room, warps, gpu.sms)
    return full * lanes, (waves + _width(left, warps, gpu.sms) / full) / (waves + 1) if left else 1.0


def _width(blocks: int, warps: int, sms: int) -> float:
    """Share of the GPU's schedulers with a warp, of blocks of so many ``warps`` that are resident at once."""
    each, more = divmod(blocks, sms)
    used = (sms - more) * min(each * warps, SCHEDULERS) + more * min((each + 1) * warps, SCHEDULERS)
    return used / (sms * SCHEDULERS)


def _covered(start: I64, end: I64, width: F64) -> float:
    """Nanoseconds of these events, each instant weighted by the sum of their widths, at most 1."""
    edges = np.concatenate((start, end))
    order = np.argsort(edges, kind="stable")
    level = np.cumsum(np.concatenate((width, -width))[order])[:-1]
    return float((np.minimum(level, 1.0) * np.diff(edges[order])).sum())


def largest_names(trace: Trace, rows: I64, weights: F64) -> Iterator[tuple[str, Mask, float, int]]:
    """The names of device events that have most weight: of each which of the ``rows`` have it, the sum of their
    weights, and the launch shape with which it has most of that."""
    device = trace.device
    names, which = numbered(device.name[rows])
    sums = np.bincount(which, weights=weights)
    for i in np.argsort(-sums, kind="stable")[:_TOP].tolist():
        chosen = which == i
        main = int(np.argmax(np.bincount(device.shape[rows[chosen]], weights=weights[chosen])))
        yield trace.names[names[i]] if names[i] >= 0 else "", chosen, float(sums[i]), main

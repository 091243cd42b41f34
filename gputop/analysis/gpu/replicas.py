"""The GPUs of a job against each other: their work, whether they run side by side, and who begins late.

GPUs that compute nothing take no part: they may be idle on purpose.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

import numpy as np

from gputop.analysis.gpu.concurrency import concurrency
from gputop.analysis.gpu.device_time import GpuTimeline, gpu_number
from gputop.analysis.results import LaunchOrder, Replicas, ReplicaWork, StepSkew
from gputop.analysis.steps.membership import in_steps
from gputop.analysis.steps.model import Steps
from gputop.trace.intervals import coverage, union
from gputop.trace.model import I64, Kind, Trace

_MIN_STEPS = 2
_LAUNCHES_KNOWN = 0.5  # share of a GPU's compute kernels; below, what is known may be another thread's alone


def replicas(trace: Trace, gpu_timelines: Sequence[GpuTimeline], steps: Steps | None) -> Replicas:
    """All comparisons that the trace allows."""
    gpu_timelines = [timeline for timeline in gpu_timelines if timeline.compute.total]
    basis = "window" if steps is None else steps.times.unit
    parts = ("work", "compute", "busy", "first_kernel", "launches")
    if len(gpu_timelines) < 2:
        reason = "only one GPU computes in this trace" if gpu_timelines else "no GPU computes in this trace"
        return Replicas(basis, missing=dict.fromkeys(parts, reason))
    work = _work(trace, gpu_timelines, steps)
    ratio = next((w.compute_ratio for w in work if w.gpu == 0), None)
    missing: dict[str, str] = {}
    if any(note.id == "no_common_clock" for note in trace.quality):
        missing = dict.fromkeys(parts[1:], "the files are not on one clock")
        return Replicas(basis, work, ratio, missing=missing)
    windows = [timeline.window_ns for timeline in gpu_timelines]
    within = (union([min(a for a, _ in windows)], [max(b for _, b in windows)])
              if steps is None else steps.spans)
    numbers = [gpu_number(trace, timeline.gpu) for timeline in gpu_timelines]
    launched = [_launched(trace, timeline.computing) for timeline in gpu_timelines]
    by_launch = all(len(rows) for rows in launched)
    first = _first_kernels(trace, launched if by_launch else [timeline.computing for timeline in gpu_timelines],
                           trace.device.launch_ns if by_launch else trace.device.start_ns, steps)
    skew = launches = None
    if by_launch:
        launches = _launch_order(trace, gpu_timelines, launched, first)
    else:
        missing["launches"] = "the trace does not show which host calls launched the kernels of every GPU"
    if steps is None or steps.count < _MIN_STEPS:
        missing["first_kernel"] = "no steps were found" if steps is None else "it has only one step"
    elif len(first.start_ns) < _MIN_STEPS:
        missing["first_kernel"] = "fewer than two steps have compute kernels on every GPU"
    else:
        skew = _skew(numbers, first.start_ns)
    compute, busy = (concurrency(spans, within, numbers) for spans in (
        [timeline.compute for timeline in gpu_timelines], [timeline.busy for timeline in gpu_timelines]))
    if compute is None:
        missing["compute"] = missing["busy"] = "the time to compare is empty or longer than a day"
    return Replicas(basis, work, ratio, compute, busy, skew, launches, missing)


def _work(trace: Trace, gpu_timelines: Sequence[GpuTimeline], steps: Steps | None) -> tuple[ReplicaWork, ...]:
    device = trace.device
    amounts, sizes = [], []
    for timeline in gpu_timelines:
        if steps is None:
            rows, compute, per = timeline.rows, timeline.compute.total, 1
        else:
            bounds = steps.edges_ns
            rows = timeline.rows[in_steps(timeline.start_ns, steps)]
            compute, per = int(coverage(timeline.compute, bounds[:, 0], bounds[:, 1]).sum()), steps.count
        kind = device.kind[rows]
        copies = rows[(kind >= Kind.H2D) & (kind <= Kind.COPY_OTHER)]
        known_sizes = device.bytes[copies]
        known_sizes = known_sizes[known_sizes >= 0]
        amounts.append((compute / per / 1e9, int((kind == Kind.COMPUTE).sum()) / per, len(copies) / per))
        sizes.append(int(known_sizes.sum()) / per if len(known_sizes) or not len(copies) else None)
    out = []
    for i, (timeline, work, size) in enumerate(zip(gpu_timelines, amounts, sizes, strict=True)):
        others = [median(a[j] for k, a in enumerate(amounts) if k != i) for j in range(3)]
        ratios = [mine / other if other else None for mine, other in zip(work, others, strict=True)]
        gpu = trace.gpus[timeline.gpu]
        out.append(ReplicaWork(gpu_number(trace, timeline.gpu), gpu.host, gpu.rank, *work, size, *ratios))
    return tuple(out)


def _launched(trace: Trace, rows: I64) -> I64:
    """Kernels with a known launch, in order of it; none where most have none."""
    launch = trace.device.launch_ns[rows]
    with_launch = np.flatnonzero(launch >= 0)
    if len(with_launch) < _LAUNCHES_KNOWN * len(rows):
        return rows[:0]
    # stable: launches are nearly in order already, which that sort makes use of
    return rows[with_launch[np.argsort(launch[with_launch], kind="stable")]]


class _First(NamedTuple):
    """Shape (steps, GPUs), of the steps in which every GPU has a compute kernel: when the first one started on the
    device, and when the first and the last were launched (or started, where launches are not known)."""

    start_ns: I64
    from_ns: I64
    to_ns: I64


def _first_kernels(trace: Trace, rows: Sequence[I64], by: I64, steps: Steps | None) -> _First:
    """A kernel belongs to the step during which it was launched: it may run long after that.

    ``rows`` are the kernels of each GPU in order of ``by``.
    """
    bounds = np.array(steps.bounds_ns if steps else [], np.int64).reshape(-1, 2)
    columns: tuple[list[I64], ...] = ([], [], [])
    on_all_gpus = np.ones(len(bounds), bool)
    for kernels in rows:
        lo, hi = np.searchsorted(by[kernels], bounds[:, 0]), np.searchsorted(by[kernels], bounds[:, 1])
        on_all_gpus &= hi > lo
        first, last = kernels[np.minimum(lo, len(kernels) - 1)], kernels[np.maximum(hi, 1) - 1]
        for column, values in zip(columns, (trace.device.start_ns[first], by[first], by[last]), strict=True):
            column.append(values)
    return _First(*(np.stack(column, axis=1)[on_all_gpus] for column in columns))


def _skew(numbers: Sequence[int], start_ns: I64) -> StepSkew:
    behind = start_ns - start_ns.min(axis=1, keepdims=True)
    worst = behind.max(axis=1)
    last = np.bincount(np.argmax(behind, axis=1)[worst > 0], minlength=len(numbers))
    return StepSkew(
        steps=len(worst), median_s=float(np.median(worst)) / 1e9, p95_s=float(np.percentile(worst, 95)) / 1e9,
        behind_median_s={n: float(m) / 1e9 for n, m in zip(numbers, np.median(behind, axis=0), strict=True)},
        last={n: int(c) for n, c in zip(numbers, last, strict=True) if c},
    )


def _typical(lengths: I64) -> int:
    """The length that half of all elements' runs reach: some short runs beside long ones count for little."""
    falling = np.sort(lengths)[::-1]
    return int(falling[np.searchsorted(np.cumsum(falling), lengths.sum() / 2)])


def _launch_order(
    trace: Trace, gpu_timelines: Sequence[GpuTimeline], rows: Sequence[I64], first: _First,
) -> LaunchOrder:
    device = trace.device
    numbers = [gpu_number(trace, timeline.gpu) for timeline in gpu_timelines]
    threads = [set((np.flatnonzero(np.bincount(device.launch_line[r] + 1)) - 1).tolist()) for r in rows]
    serves = Counter(thread for of_gpu in threads for thread in of_gpu)
    shared = np.array(sorted(thread for thread, gpus in serves.items() if gpus > 1), np.int64)
    all_ = np.concatenate(rows)
    by_shared = all_[np.isin(device.launch_line[all_], shared)] if len(shared) else all_[:0]
    turns = None
    if len(by_shared):
        # stable: the GPUs' launches come one after the other, each in order, which that sort makes use of
        order = by_shared[np.argsort(device.launch_ns[by_shared], kind="stable")]
        if len(shared) > 1:
            order = order[np.argsort(device.launch_line[order], kind="stable")]
        turn = (np.diff(device.launch_line[order]) != 0) | (np.diff(device.gpu[order]) != 0)
        turns = _typical(np.diff(np.flatnonzero(np.concatenate(([True], turn, [True])))))
    count = len(first.start_ns)
    delay = span = sequence = share = None
    if count >= _MIN_STEPS:
        begin = first.from_ns
        behind = np.median(begin - begin.min(axis=1, keepdims=True), axis=0)
        delay = {n: float(b) / 1e9 for n, b in zip(numbers, behind, strict=True)}
        spans = np.median(first.to_ns - begin, axis=0)
        span = {n: float(s) / 1e9 for n, s in zip(numbers, spans, strict=True)}
        orders = Counter(map(tuple, np.argsort(begin, axis=1, kind="stable").tolist()))
        best, times = min(orders.items(), key=lambda item: (-item[1], item[0]))
        sequence, share = tuple(numbers[i] for i in best), times / count
    return LaunchOrder(
        threads={n: len(of_gpu) for n, of_gpu in zip(numbers, threads, strict=True)},
        shared_launches=len(by_shared) / len(all_), launches_per_turn=turns, steps=count,
        delay_median_s=delay, span_median_s=span, order=sequence, order_share=share,
    )

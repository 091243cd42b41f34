"""The GPUs of a job against each other: their work, whether they run side by side, and who begins late.

GPUs that compute nothing take no part: they may be idle on purpose.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from statistics import median

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from gputop.analysis.gpu.device_time import GpuTimeline, gpu_number
from gputop.analysis.results import Concurrency, LaunchOrder, PairOverlap, Replicas, ReplicaWork, StepSkew
from gputop.analysis.steps.membership import in_steps
from gputop.analysis.steps.model import Steps
from gputop.trace.intervals import Spans, coverage, in_order, intersect, union
from gputop.trace.model import F64, I64, Kind, Trace

_MIN_STEPS = 2
_LAUNCHES_KNOWN = 0.5  # share of a GPU's compute kernels; below, what is known may be another thread's alone
_PAIRS_KEPT = 28  # all of eight GPUs
_MAX_FOR_PAIRS = 16
_CODE_BITS = _MAX_FOR_PAIRS  # the low bits of an edge; the others hold its time, up to a day in nanoseconds
_MINUS_ONE = (1 << _CODE_BITS) - 1  # as a code: sums wrap around
_EDGES_AT_ONCE = 1 << 16
_LONGEST_NS = 86_400 * 10**9


def replicas(trace: Trace, gpu_timelines: Sequence[GpuTimeline], steps: Steps | None) -> Replicas:
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
        missing = dict.fromkeys(parts[1:], "the files do not share one clock")
        return Replicas(basis, work, ratio, missing=missing)
    windows = [timeline.window_ns for timeline in gpu_timelines]
    within = (union([min(a for a, _ in windows)], [max(b for _, b in windows)]) if steps is None else steps.spans)
    numbers = [gpu_number(trace, timeline.gpu) for timeline in gpu_timelines]
    compute, busy = (concurrency(spans, within, numbers) for spans in (
        [timeline.compute for timeline in gpu_timelines], [timeline.busy for timeline in gpu_timelines]))
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
        missing["first_kernel"] = "no steps were found" if steps is None else "the trace has only one step"
    elif len(first.start_ns) < _MIN_STEPS:
        missing["first_kernel"] = "fewer than two steps have compute kernels on every GPU"
    else:
        behind = first.start_ns - first.start_ns.min(axis=1, keepdims=True)
        worst = behind.max(axis=1)
        last = np.bincount(np.argmax(behind, axis=1)[worst > 0], minlength=len(numbers)).tolist()
        skew = StepSkew(
            steps=len(worst), median_s=float(np.median(worst)) / 1e9, p95_s=float(np.percentile(worst, 95)) / 1e9,
            behind_median_s={n: float(m) / 1e9 for n, m in zip(numbers, np.median(behind, axis=0), strict=True)},
            last={n: count for n, count in zip(numbers, last, strict=True) if count})
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


def concurrency(active: Sequence[Spans], within: Spans, gpus: Sequence[int]) -> Concurrency | None:
    """Concurrency of two or more sets of time, of the GPUs numbered ``gpus``; None if ``within`` is empty or longer
    than a day."""
    whole, n = within.total, len(active)
    if not 0 < whole <= int(within.end[-1]) - int(within.start[0]) < _LONGEST_NS or n < 2:
        return None
    inside = [intersect(spans, within) for spans in active]
    active_time: npt.NDArray | None = None
    if n <= _MAX_FOR_PAIRS:
        # By the set of active GPUs, as bits: every edge turns one of them over.
        active_time = _time_by_state(inside, [(1 << gpu, 1 << gpu) for gpu in range(n)], np.bitwise_xor, 1 << n)
        exactly = np.bincount(_members(n).sum(axis=1), weights=active_time) / whole
    else:
        exactly = _time_by_state(inside, [(1, _MINUS_ONE)] * n, np.add, n + 1) / whole
    exactly[0] = 1 - sum(exactly[1:].tolist())  # also the time before the first edge and after the last
    ratios = [spans.total / whole for spans in inside]
    by_chance = np.ones(1)
    for ratio in sorted(ratios):
        by_chance = np.convolve(by_chance, (1 - ratio, ratio))
    return Concurrency(
        tuple(max(float(x), 0.0) for x in exactly), tuple(max(float(x), 0.0) for x in by_chance),
        _alone(exactly), _alone(by_chance),
        () if active_time is None else _pairs(active_time, [spans.total for spans in inside], whole, gpus))


def _time_by_state(inside: Sequence[Spans], codes: Sequence[tuple[int, int]], turn: np.ufunc, states: int) -> F64:
    """Time (ns) of each state from the first edge to the last. The state is 0 at first; a set's begin and end turn it
    to another one by their codes. Goes through the time in parts: what is computed of one stays in a core's cache."""
    out = np.zeros(states)
    first = min((int(spans.start[0]) for spans in inside if len(spans.start)), default=0)
    last = max((int(spans.end[-1]) for spans in inside if len(spans.start)), default=0)
    parts = 2 * sum(len(spans.start) for spans in inside) // _EDGES_AT_ONCE + 1
    stops = np.linspace(first, last, parts + 1)[1:].astype(np.int64) if parts > 1 else np.array([last])
    stops[-1] = last + 1
    columns = [(column, code, [0, *np.searchsorted(column, stops).tolist()])
               for spans, pair in zip(inside, codes, strict=True) for column, code in zip(spans, pair, strict=True)]
    time, state = 0, 0
    for i in range(parts):
        edges = [np.array([time << _CODE_BITS | state])]
        edges += [column[cuts[i]:cuts[i + 1]] - first << _CODE_BITS | code for column, code, cuts in columns]
        edge = np.concatenate(edges)
        edge[1:] = in_order(edge[1:])
        times = edge >> _CODE_BITS
        held = turn.accumulate(edge.astype(np.uint16), dtype=np.uint16)
        out += np.bincount(held[:-1], weights=np.diff(times), minlength=states)
        time, state = int(times[-1]), int(held[-1])
    return out


def _members(n: int) -> npt.NDArray:
    """Shape (2**n, n): 1 where the set of that number has that member."""
    return (np.arange(1 << n)[:, None] >> np.arange(n)) & 1


def _alone(level: npt.NDArray) -> float | None:
    any_ = float(level[1:].sum())
    return float(level[1]) / any_ if any_ > 1e-12 else None


def _pairs(active_time: npt.NDArray, totals: Sequence[int], whole: int, gpus: Sequence[int]) -> tuple[PairOverlap, ...]:
    """The pairs that overlap least, from the time each set of GPUs is active."""
    n = len(totals)
    member = _members(n).astype(np.float64)
    both = (member * active_time[:, None]).T @ member
    out = []
    for i in range(n):
        for j in range(i + 1, n):
            shorter, longer = sorted((totals[i], totals[j]))
            if shorter:
                out.append(PairOverlap((gpus[i], gpus[j]), float(both[i, j]) / shorter, longer / whole))
    out.sort(key=lambda pair: (pair.overlap, pair.gpus))
    return tuple(out[:_PAIRS_KEPT])


def _launched(trace: Trace, rows: I64) -> I64:
    """Kernels with a known launch, in order of it; none where most have none."""
    launch = trace.device.launch_ns[rows]
    with_launch = np.flatnonzero(launch >= 0)
    if len(with_launch) < _LAUNCHES_KNOWN * len(rows):
        return rows[:0]
    # stable: launches are nearly in order already, which that sort makes use of
    return rows[with_launch[np.argsort(launch[with_launch], kind="stable")]]


class _First(Struct, frozen=True):
    """Shape (steps, GPUs), of the steps in which every GPU has a compute kernel: when the first one started on the
    device, and when the first and the last were launched (or started, where launches are not known)."""

    start_ns: I64
    from_ns: I64
    to_ns: I64


def _first_kernels(trace: Trace, rows: Sequence[I64], by: I64, steps: Steps | None) -> _First:
    """A kernel belongs to the step during which it was launched: it may run long after that. ``rows`` are the kernels
    of each GPU in order of ``by``."""
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
    by_shared = np.empty(0, np.int64)
    if len(shared):
        by_shared = np.concatenate([r[np.isin(device.launch_line[r], shared)] for r in rows])
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
        shared_launches=len(by_shared) / sum(map(len, rows)), launches_per_turn=turns, steps=count,
        delay_median_s=delay, span_median_s=span, order=sequence, order_share=share)

"""Kernels by name, by TF op and by op type; and by size."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from gputop.analysis.gpu.device_time import GpuTimeline, gpu_number
from gputop.analysis.results import GpuPart, KernelRow, Kernels, KernelSizes
from gputop.analysis.steps.membership import WorkOfSteps, in_steps
from gputop.analysis.steps.model import Steps
from gputop.trace.kernel_names import UNKNOWN, classify, split_op
from gputop.trace.lookups import numbered, rows_of
from gputop.trace.model import F64, I32, I64, Kind, Trace
from gputop.trace.occupancy import LaunchShape

TOP = 50  # rows kept by time over all GPUs
_TOP_OF_GPU = 5  # and by time on each of them
_GPUS_FOR_TOP = 64  # if there are no more than this many
# 1.25 µs to 20.48 ms by factors of 2, so that both ends of the launch latency, 20 and 40 µs, are bounds.
SIZE_BOUNDS_NS = tuple(1250 << i for i in range(15))
_MEDIAN_BITS = 48  # of a duration: three days; the rest is for the group
_MediansOf = Callable[[I64, int], F64]  # by the group of each kind, and how many groups there are


class _Kinds(Struct, frozen=True):
    """The kernels that differ in name, op, GPU or launch shape, a row each, and the sums over all alike. ``name`` and
    ``op`` are indices into ``Trace.names`` plus 1, ``cell`` is gpu * len(classes) + class with the GPU's place among
    the timelines. Lengths are whole nanoseconds as floats, so that sums are exact."""

    name: I64
    op: I64
    cell: I64
    shape: I64  # index into Trace.launch_shapes; their number where not told
    kernels: F64  # how many
    length: F64
    step_kernels: F64 | None  # of those that belong to the whole steps; None without steps
    step_length: F64 | None
    classes: list[tuple[str, bool | None]]  # number type, tensor cores or not
    gpus: list[int]  # numbers
    steps: int  # how many whole ones these are


def kernels(trace: Trace, gpu_timelines: Sequence[GpuTimeline], of_steps: WorkOfSteps | None = None) -> Kernels | None:
    """The tables of all kernels, or None where no GPU ran any."""
    if not any(len(timeline.kernel_places) for timeline in gpu_timelines):
        return None
    of_gpu = [_kernels_of(trace, timeline, of_steps) for timeline in gpu_timelines]
    kinds = _kinds(trace, of_gpu, [gpu_number(trace, timeline.gpu) for timeline in gpu_timelines], of_steps)
    by_op = by_type = None
    if kinds.op.any():
        used = np.unique(kinds.op)
        split = [split_op(trace.names[i - 1]) if i else (UNKNOWN, UNKNOWN) for i in used.tolist()]
        tables = []
        for part in (0, 1):
            labels = sorted({pair[part] for pair in split})
            index = {label: i for i, label in enumerate(labels)}
            of_kind = np.array([index[pair[part]] for pair in split], np.int64)[np.searchsorted(used, kinds.op)]
            tables.append(_table(trace, of_kind, labels.__getitem__, len(labels), kinds))
        by_op, by_type = tables
    has_occupancy = any(s.occupancy is not None for s in trace.launch_shapes)
    of_each_gpu = _sums(kinds.cell // len(kinds.classes), kinds.length, len(kinds.gpus))
    return Kernels(
        count=sum(len(of_one.which) for of_one in of_gpu), time_s=float(kinds.length.sum()) / 1e9,
        time_s_by_gpu={gpu: float(time) / 1e9 for gpu, time in zip(kinds.gpus, of_each_gpu, strict=True)},
        by_name=_table(trace, kinds.name, lambda i: trace.names[i - 1] if i else "", len(trace.names) + 1, kinds,
                       lambda group, n: _medians(group, of_gpu, n)),
        by_op=by_op, by_op_type=by_type, occupancy_is=trace.occupancy_is if has_occupancy else None)


class _KernelsOf(Struct, frozen=True):
    """One GPU's kernels: which combination of name, op and launch shape each has, and its length in whole nanoseconds;
    of each combination the columns and sums of :class:`_Kinds`, where -1 is none."""

    which: I32
    length: I64
    name: I64
    op: I64
    shape: I64
    kernels: F64
    sums: list[F64]  # of the length, and where steps are known of those within them and of their length


def _kernels_of(trace: Trace, timeline: GpuTimeline, of_steps: WorkOfSteps | None) -> _KernelsOf:
    device, places = trace.device, timeline.kernel_places
    rows, length = timeline.events.start + places, timeline.end_ns[places] - timeline.start_ns[places]
    which, (name, op, shape) = _combinations([device.name[rows], device.tf_op[rows], device.shape[rows]])
    weights: list[npt.NDArray] = [length]
    if of_steps is not None:
        inside = of_steps.inside[rows]
        weights += [inside, length * inside]
    kernels = np.bincount(which, minlength=len(name)).astype(np.float64)
    return _KernelsOf(which.astype(np.int32), length, name, op, shape, kernels,
                      [_sums(which, weight, len(name)) for weight in weights])


def _combinations(columns: Sequence[npt.NDArray]) -> tuple[I64, list[I64]]:
    """Number, for each row, of its combination of these ids (or -1), and the columns of the distinct combinations."""
    distinct_ids, which = numbered(columns[0])
    values = [distinct_ids]
    for column in columns[1:]:
        distinct_ids, column_which = numbered(column)
        both, which = numbered(which * len(distinct_ids) + column_which)
        values = [*(value[both // len(distinct_ids)] for value in values), distinct_ids[both % len(distinct_ids)]]
    return which, values


def _kinds(trace: Trace, of_gpu: Sequence[_KernelsOf], gpus: list[int], of_steps: WorkOfSteps | None) -> _Kinds:
    """The kinds of all GPUs' kernels, one GPU's after the other's."""
    def joined(column: str) -> npt.NDArray:
        return np.concatenate([getattr(of_one, column) for of_one in of_gpu])

    name, shape = joined("name"), joined("shape")
    sums = [np.concatenate(column) for column in zip(*(of_one.sums for of_one in of_gpu), strict=True)]
    gpu = np.repeat(np.arange(len(gpus)), [len(of_one.name) for of_one in of_gpu])
    used, name_index = numbered(name)
    of_name = [classify(trace.names[i] if i >= 0 else "")[1:] for i in used.tolist()]
    classes = sorted(set(of_name), key=str)
    code = np.array([classes.index(kind) for kind in of_name], np.int64)[name_index]
    length, *of_whole_steps = sums
    step_kernels, step_length = of_whole_steps if of_steps is not None else (None, None)
    return _Kinds(
        name + 1, joined("op") + 1, gpu * len(classes) + code, np.where(shape >= 0, shape, len(trace.launch_shapes)),
        joined("kernels"), length, step_kernels, step_length, classes, gpus,
        of_steps.count if of_steps is not None else 0)


def _by_type(classes: Sequence[tuple[str, bool | None]], times: Sequence[float],
             ) -> tuple[dict[str, float], float, float]:
    """Time by number type, and on tensor cores and on the others, as far as it is known."""
    types: dict[str, float] = {}
    for (dtype, _), part in zip(classes, times, strict=True):
        if part:
            types[dtype] = types.get(dtype, 0.0) + part
    tensor, other = (math.fsum(t for (_, on), t in zip(classes, times, strict=True) if on is x) for x in (True, False))
    return types, tensor, other


def _table(
    trace: Trace, key: I64, label: Callable[[int], str], size: int, kinds: _Kinds, medians_of: _MediansOf | None = None,
) -> tuple[KernelRow, ...]:
    """Rows by falling time; ``key`` has the group of each kind, below ``size``. With medians it is the table by name.
    """
    by_name, count = medians_of is not None, _sums(key, kinds.kernels, size)
    kept = _kept(key, kinds, count, label)
    row_of = np.full(size, len(kept), np.int64)
    row_of[kept] = np.arange(len(kept))
    group, n = row_of[key], len(kept) + 1  # the last group is the rest
    # Shape (group, GPU, class)
    cells = (n, len(kinds.gpus), len(kinds.classes))
    cell = group * (cells[1] * cells[2]) + kinds.cell
    times = _sums(cell, kinds.length, math.prod(cells)).reshape(cells)
    counts = _sums(cell, kinds.kernels, math.prod(cells)).reshape(cells).sum(axis=2)
    medians = medians_of(group, n) if medians_of is not None else None
    shapes = _shapes(trace, group, kinds, n)
    step_count, step_s = None, None
    if kinds.step_kernels is not None and kinds.step_length is not None:
        step_count = _sums(group, kinds.step_kernels, n) / kinds.steps
        step_s = _sums(group, kinds.step_length, n) / kinds.steps / 1e9
    whole = times.sum(axis=(0, 2))
    out = []
    for i in range(n):
        if not counts[i].any():
            continue  # no rest
        rest, shape = i == len(kept), shapes[i]
        name = "" if rest else label(int(kept[i]))
        of_gpu, time = times[i].sum(axis=1), max(float(times[i].sum()), 1e-9)
        types, tensor, other = _by_type(kinds.classes, times[i].sum(axis=0).tolist())
        out.append(KernelRow(
            name=name, count=int(counts[i].sum()), time_s=float(times[i].sum()) / 1e9,
            mean_s=float(times[i].sum()) / int(counts[i].sum()) / 1e9,
            median_s=float(medians[i]) / 1e9 if medians is not None else None,
            share=float(times[i].sum()) / max(float(whole.sum()), 1.0),
            types={dtype: part / time for dtype, part in sorted(types.items(), key=lambda item: (-item[1], item[0]))},
            tensor_core=tensor / time if tensor + other else None, tensor_core_known=(tensor + other) / time,
            occupancy=shape.occupied_ns / shape.known_ns if shape.known_ns else None,
            occupancy_known=shape.known_ns / time,
            by_gpu={gpu: GpuPart(int(c), float(t) / 1e9, float(t) / max(float(all_), 1.0))
                    for gpu, c, t, all_ in zip(kinds.gpus, counts[i], of_gpu, whole, strict=True) if c},
            shape=shape.main if by_name and not rest else None,
            shapes=shape.kinds if by_name and not rest else 0,
            collective=by_name and not rest and classify(name).kind is Kind.COLLECTIVE,
            names=int((count[row_of == len(kept)] > 0).sum()) if rest else 1,
            count_per_step=None if step_count is None else float(step_count[i]),
            time_s_per_step=None if step_s is None else float(step_s[i])))
    return tuple(out)


def _kept(key: I64, kinds: _Kinds, count: npt.NDArray, label: Callable[[int], str]) -> I64:
    """The groups that get a row of their own, by falling time, then by name so that the order is always the same."""
    time = _sums(key, kinds.length, len(count))
    used = np.flatnonzero(count)
    chosen = set(_largest(used, time[used], TOP, label))
    if 1 < len(kinds.gpus) <= _GPUS_FOR_TOP and len(used) > TOP:
        gpu = kinds.cell // len(kinds.classes)
        for on_gpu in (np.flatnonzero(gpu == i) for i in range(len(kinds.gpus))):
            time_on_gpu = _sums(key[on_gpu], kinds.length[on_gpu], len(count))
            present = np.flatnonzero(time_on_gpu)
            chosen |= set(_largest(present, time_on_gpu[present], _TOP_OF_GPU, label))
    return np.array(sorted(chosen, key=lambda k: (-time[k], label(k))), np.int64)


def _sums(key: I64, weights: npt.NDArray, size: int) -> F64:
    return np.bincount(key, weights=weights, minlength=size).astype(np.float64, copy=False)


def _largest(keys: I64, values: F64, n: int, label: Callable[[int], str]) -> list[int]:
    if len(keys) > n:
        at_least = np.partition(values, len(values) - n)[len(values) - n]
        keys, values = keys[values >= at_least], values[values >= at_least]
    pairs = sorted(zip(keys.tolist(), values.tolist(), strict=True), key=lambda p: (-p[1], label(p[0])))
    return [k for k, _ in pairs[:n]]


def _medians(group: I64, of_gpu: Sequence[_KernelsOf], n: int) -> F64:
    """The median length of each group, by one sort of both in one integer. ``group``: that of each kind."""
    mask, first, ends = (1 << _MEDIAN_BITS) - 1, 0, np.cumsum([len(of_one.length) for of_one in of_gpu])
    both = np.empty(ends[-1], np.int64)
    for of_one, part in zip(of_gpu, np.split(both, ends[:-1]), strict=True):
        np.minimum(of_one.length, mask, out=part)
        part |= (group[first:first + len(of_one.name)] << _MEDIAN_BITS)[of_one.which]
        first += len(of_one.name)
    both.sort()
    begin = np.searchsorted(both, np.arange(n + 1) << _MEDIAN_BITS)
    size, last = np.diff(begin), len(both) - 1
    lower = both[np.minimum(begin[:-1] + np.maximum(size - 1, 0) // 2, last)] & mask
    upper = both[np.minimum(begin[:-1] + size // 2, last)] & mask
    return (lower + upper) / 2


class _Shapes(Struct, frozen=True):
    """Launch shapes of a group: the one with most time, how many, the time of those whose occupancy is known,
    and that time weighted by it."""

    main: LaunchShape | None = None
    kinds: int = 0
    known_ns: float = 0.0
    occupied_ns: float = 0.0


def _shapes(trace: Trace, group: I64, kinds: _Kinds, n: int) -> list[_Shapes]:
    all_ = trace.launch_shapes
    if not all_:
        return [_Shapes()] * n
    many = len(all_) + 1
    used, which = np.unique(group * many + kinds.shape, return_inverse=True)
    times = np.bincount(which, weights=kinds.length)
    has_time = times > 0
    shapes_of: list[list[tuple[LaunchShape, float]]] = [[] for _ in range(n)]
    for code, time in zip(used[has_time].tolist(), times[has_time].tolist(), strict=True):
        if code % many < len(all_):
            shapes_of[code // many].append((all_[code % many], time))
    out = []
    for shapes in shapes_of:
        main = min(shapes, key=lambda s: (-s[1], s[0].grid, s[0].block, s[0].registers, s[0].shared_bytes),
                   default=(None,))[0]
        rated = [(shape.occupancy, time) for shape, time in shapes if shape.occupancy is not None]
        # fsum: the result does not hang on the order in which shapes were met
        out.append(_Shapes(main, len(shapes), math.fsum(t for _, t in rated), math.fsum(o * t for o, t in rated)))
    return out


def kernel_sizes(trace: Trace, gpu_timelines: Sequence[GpuTimeline], steps: Steps | None) -> tuple[KernelSizes, ...]:
    """A histogram of each GPU that ran compute kernels."""
    bounds = np.array(SIZE_BOUNDS_NS)
    out = []
    for timeline in gpu_timelines:
        places = timeline.computing_places
        if not len(places):
            continue
        start = timeline.start_ns[places]
        length = timeline.end_ns[places] - start
        bucket = np.searchsorted(bounds, length, side="right")
        count, time = _histogram(bucket, length)
        per_step = None
        if steps is not None:
            inside = rows_of(in_steps(start, steps))
            per_step = [part / steps.count for part in _histogram(bucket[inside], length[inside])]
        out.append(KernelSizes(
            gpu=gpu_number(trace, timeline.gpu), bounds_s=tuple(b / 1e9 for b in SIZE_BOUNDS_NS),
            count=tuple(int(c) for c in count), time_s=tuple(float(t) / 1e9 for t in time),
            count_per_step=None if per_step is None else tuple(float(c) for c in per_step[0]),
            time_s_per_step=None if per_step is None else tuple(float(t) / 1e9 for t in per_step[1]),
            below_20us=float((length < 20_000).mean()), below_40us=float((length < 40_000).mean())))
    return tuple(out)


def _histogram(bucket: I64, length: I64) -> tuple[npt.NDArray, F64]:
    n = len(SIZE_BOUNDS_NS) + 1
    return np.bincount(bucket, minlength=n), _sums(bucket, length.astype(np.float64), n)

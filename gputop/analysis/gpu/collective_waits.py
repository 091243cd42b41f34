"""Exposed communication taken apart: the transfer itself, and waiting for the GPU that arrives last.

A collective moves data from the moment its last GPU has entered it; before that the others wait inside
the kernel. Only time with neither a compute kernel nor a copy beside it counts, and only that within
steps, where there are any.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from gputop.analysis.gpu.breakdown import late_by_host
from gputop.analysis.gpu.collectives import by_operation, matched, of_gpus
from gputop.analysis.gpu.device_time import GpuTimeline, gpu_number
from gputop.analysis.steps.membership import in_steps
from gputop.analysis.steps.model import Steps
from gputop.trace.intervals import EMPTY, Spans, coverage, intersect, merge, subtract, union
from gputop.trace.model import F64, I64, Trace


@dataclass(frozen=True, slots=True)
class CollectiveWaits:
    """Seconds per step, or in the window without steps.

    ``waiting_s`` and ``transfer_s`` are exposed, by GPU, ``allreduce_s`` the part of the latter in AllReduces;
    ``waiting`` says when that waiting is. ``bare_s`` is the part of the transfers beside which no GPU does anything
    else: of each collective what the GPU shows that hides most of it. Where a GPU was
    early, a transfer lies bare on it that a later one hides; that costs the step nothing.
    ``late_s`` is how much earlier the collectives would have begun had the last GPU come when the others did (the
    median of them), as far as that was exposed, by the GPU that was last; ``late_times`` counts in how many
    collectives each was. ``late_by_host_s`` is the part of it for which the last GPU had waited for its host longer
    than the others since the collective before. ``count`` is of matched collectives; ``durations_s`` are the
    transfers of AllReduces one by one, ``allreduce_exposed`` the share of their time that is bare. ``unmatched`` says
    why some operations are not in here, by operation.

    Where only one GPU ran collectives (the trace of one rank) nothing can be matched: ``alone_s`` is its exposed time
    in them, transfer and waiting together (None: several GPUs ran some), and ``durations_s`` are of its AllReduces
    as they were, upper bounds of the transfers.
    """

    waiting_s: Mapping[int, float]
    transfer_s: Mapping[int, float]
    bare_s: float
    late_s: Mapping[int, float]
    late_times: Mapping[int, int]
    late_by_host_s: float
    count: int
    durations_s: tuple[float, ...]
    allreduce_exposed: float
    unmatched: Mapping[str, str]
    waiting: Mapping[int, Spans]
    alone_s: float | None = None
    allreduce_s: Mapping[int, float] = field(default_factory=dict)


def collective_waits(trace: Trace, gpu_timelines: Sequence[GpuTimeline], steps: Steps | None) -> CollectiveWaits | None:
    """None where no GPU ran a collective."""
    device = trace.device
    ran, rows = of_gpus(trace, gpu_timelines)
    if not rows:
        return None
    if len(ran) == 1:
        return _of_one_rank(trace, ran[0], rows[0], steps)
    late_of = late_by_host(trace, gpu_timelines, steps.bounds_ns if steps is not None else (trace.window_ns,))
    gpu_timelines = ran
    beside = [merge(timeline.compute, timeline.h2d, timeline.d2h, timeline.other) for timeline in gpu_timelines]
    per = steps.count if steps is not None else 1
    within = None if steps is None else steps.spans
    waits: list[list[Spans]] = [[EMPTY] for _ in gpu_timelines]
    moves: list[list[Spans]] = [[EMPTY] for _ in gpu_timelines]
    reduces = [EMPTY for _ in gpu_timelines]
    late = np.zeros(len(gpu_timelines))
    times = np.zeros(len(gpu_timelines), np.int64)
    durations: list[float] = []
    unmatched: dict[str, str] = {}
    count = bare_ns = exposed_ns = all_ns = 0
    by_host_ns = 0.0
    for name, own in by_operation(trace, rows).items():
        there = [i for i, r in enumerate(own) if len(r)]
        found = matched(trace, [own[i] for i in there])
        if isinstance(found, str):
            unmatched[name] = found
            continue
        if steps is not None:
            found = found[_begun_in_steps(device.start_ns[found].max(axis=1), steps)]
        if not len(found):
            continue
        start, end = device.start_ns[found], device.end_ns[found]
        begun = start.max(axis=1)
        count += len(found)
        waiting, hidden, bare = begun[:, None] - start, np.empty_like(start), np.empty_like(start)
        for j, i in enumerate(there):
            waits[i].append(union(start[:, j], begun))
            moves[i].append(union(begun, end[:, j]))
            hidden[:, j] = coverage(beside[i], start[:, j], begun)
            bare[:, j] = end[:, j] - begun - coverage(beside[i], begun, end[:, j])
        bare_ns += int(bare.min(axis=1).sum())
        whole = waiting.sum(axis=1)
        exposed = np.where(whole > 0, 1 - hidden.sum(axis=1) / np.maximum(whole, 1), 0.0)
        ahead = np.median(np.sort(start, axis=1)[:, :-1], axis=1)
        last = np.argmax(start, axis=1)
        behind = _behind_by_host([late_of.get(gpu_timelines[i].gpu, EMPTY) for i in there], start, begun, last)
        by_host_ns += float((np.minimum(behind, begun - ahead) * exposed).sum())
        np.add.at(late, np.array(there)[last], (begun - ahead) * exposed)
        np.add.at(times, np.array(there)[last[whole > 0]], 1)
        if name == "AllReduce":
            for i in there:
                reduces[i] = moves[i][-1]
            durations = ((end - start).min(axis=1) / 1e9).tolist()
            exposed_ns += int(bare.min(axis=1).sum())
            all_ns += int((end - begun[:, None]).min(axis=1).sum())
    numbers = [gpu_number(trace, timeline.gpu) for timeline in gpu_timelines]

    def exposed_of(i: int, spans: Spans, less: Spans) -> Spans:
        left = subtract(subtract(spans, beside[i]), less)
        return left if within is None else intersect(left, within)

    moved = [merge(*own) for own in moves]
    waiting_of = {n: exposed_of(i, merge(*waits[i]), moved[i]) for i, n in enumerate(numbers)}
    transfer = {n: exposed_of(i, moved[i], EMPTY).total / per / 1e9 for i, n in enumerate(numbers)}
    return CollectiveWaits(
        waiting_s={n: spans.total / per / 1e9 for n, spans in waiting_of.items()},
        transfer_s=transfer, bare_s=min(bare_ns / per / 1e9, *transfer.values()),
        late_s={n: float(s) / per / 1e9 for n, s in zip(numbers, late, strict=True) if s > 0},
        late_times={n: int(k) for n, k in zip(numbers, times, strict=True) if k},
        late_by_host_s=by_host_ns / per / 1e9, count=count, durations_s=tuple(durations),
        allreduce_exposed=exposed_ns / all_ns if all_ns else 0.0, unmatched=unmatched,
        waiting=waiting_of,
        allreduce_s={n: exposed_of(i, reduces[i], EMPTY).total / per / 1e9 for i, n in enumerate(numbers)},
    )


def _of_one_rank(trace: Trace, timeline: GpuTimeline, rows: I64, steps: Steps | None) -> CollectiveWaits:
    device = trace.device
    if steps is not None:
        rows = rows[_begun_in_steps(device.start_ns[rows], steps)]
    beside = merge(timeline.compute, timeline.h2d, timeline.d2h, timeline.other)

    def bare(own: I64) -> int:
        spans = subtract(union(device.start_ns[own], device.end_ns[own]), beside)
        return (spans if steps is None else intersect(spans, steps.spans)).total

    unmatched, durations, exposed = {}, np.empty(0, np.int64), 0.0
    for name, (own,) in by_operation(trace, [rows]).items():
        unmatched[name] = str(matched(trace, [own]))
        if name == "AllReduce":
            durations = device.end_ns[own] - device.start_ns[own]
            exposed = bare(own) / max(int(durations.sum()), 1)
    return CollectiveWaits(
        waiting_s={}, transfer_s={}, bare_s=0.0, late_s={}, late_times={}, late_by_host_s=0.0, count=0,
        durations_s=tuple((durations / 1e9).tolist()), allreduce_exposed=exposed, unmatched=unmatched, waiting={},
        alone_s=bare(rows) / (steps.count if steps is not None else 1) / 1e9,
    )


def _begun_in_steps(begun_ns: I64, steps: Steps) -> I64:
    """Places of the collectives that began within steps; matched ones are nearly in order of time, not quite."""
    order = np.argsort(begun_ns, kind="stable")
    return np.sort(order[in_steps(begun_ns[order], steps)])


def _behind_by_host(waits: Sequence[Spans], start: I64, begun: I64, last: I64) -> F64:
    """How much longer than the others (their median) the last GPU waited for its host since the collective before.

    ``waits`` is when each GPU did, ``start`` of shape (collectives, GPUs) when it arrived, ``last`` who came last.
    """
    order = np.argsort(begun, kind="stable")
    since = np.empty_like(begun)
    since[order] = np.append(min((own.start[0] for own in waits if len(own.start)), default=0), begun[order[:-1]])
    waited = np.stack([coverage(own, np.minimum(since, start[:, j]), start[:, j]) for j, own in enumerate(waits)], 1)
    rows = np.arange(len(last))
    own = waited[rows, last].astype(np.float64)
    others = waited.astype(np.float64)
    others[rows, last] = np.nan
    return np.maximum(own - np.nanmedian(others, axis=1), 0.0)

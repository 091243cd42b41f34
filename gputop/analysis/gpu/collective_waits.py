"""Exposed communication taken apart: the transfer itself, and waiting for the GPU that arrives last.

A collective moves data from the moment its last GPU has entered it; before that the others wait inside the kernel. Only
time with neither a compute kernel nor a copy beside it counts, and only that within steps, where there are any.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from msgspec import Struct, field

from gputop.analysis.gpu.breakdown import IdleByGpu
from gputop.analysis.gpu.collectives import by_operation, matched, of_gpus
from gputop.analysis.gpu.device_time import GpuTimeline, gpu_number
from gputop.analysis.steps.membership import step_of
from gputop.analysis.steps.model import Steps
from gputop.trace.intervals import EMPTY, Spans, coverage, intersect, merge, subtract, union
from gputop.trace.model import F64, I64, Trace

# A collective is held up by the host where its last GPU had no work for this long more than the others had: a launch
# takes a tenth of it.
_HELD_UP_NS = 100_000
_MAIN_GAPS, _MOST_OF_DELAY = 0.1, 0.5  # gaps of a tenth of a delay are its gaps, if they are half of it together


class CollectiveWaits(Struct, frozen=True):
    """Seconds per step, or in the window without steps.

    ``waiting_s`` and ``transfer_s`` are exposed, by GPU, ``allreduce_s`` the part of the latter in AllReduces;
    ``waiting`` says when that waiting is. ``bare_s`` is the part of the transfers beside which no GPU does anything
    else: of each collective what the GPU shows that hides most of it. Where a GPU was
    early, a transfer lies bare on it that a later one hides; that costs the step nothing.
    ``late_s`` is how much earlier the collectives would have begun had the last GPU come when the others did (the
    median of them), as far as that was exposed, by the GPU that was last; ``late_times`` counts in how many
    collectives each was. ``late_by_host_s`` is the part of it for which the last GPU had waited for its host longer
    than the others since the collective before. ``held_up_s`` is that part by the GPU that was last, its host's waits
    for a batch included, and ``held_up`` when that GPU had no work for it. ``count`` is of matched collectives;
    ``durations_s`` are the transfers of AllReduces one by one, ``allreduce_exposed`` the share of their time that is
    bare. ``unmatched`` says why some operations are not in here, by operation.

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
    held_up_s: Mapping[int, float] = field(default_factory=dict)
    held_up: Mapping[int, Spans] = field(default_factory=dict)


def collective_waits(
    trace: Trace, gpu_timelines: Sequence[GpuTimeline], steps: Steps | None, idle: IdleByGpu,
) -> CollectiveWaits | None:
    """None where no GPU ran a collective. ``idle``: of the steps' bounds or, without steps, the window."""
    device = trace.device
    ran, rows = of_gpus(gpu_timelines)
    if not rows:
        return None
    if len(ran) == 1:
        return _of_one_rank(trace, ran[0], rows[0], steps)
    late = [idle.late.get(timeline.gpu, EMPTY) for timeline in ran]
    sums = _Sums(trace, ran, late, [
        merge(spans, idle.starved.get(timeline.gpu, EMPTY), _before_first_launch(trace, timeline, steps))
        for timeline, spans in zip(ran, late, strict=True)])
    unmatched: dict[str, str] = {}
    for name, rows_by_gpu in by_operation(trace, rows).items():
        members = [i for i, r in enumerate(rows_by_gpu) if len(r)]
        operations = matched(trace, [rows_by_gpu[i] for i in members])
        if isinstance(operations, str):
            unmatched[name] = operations
            continue
        if steps is not None:
            operations = operations[step_of(device.start_ns[operations].max(axis=1), steps) >= 0]
        if len(operations):
            sums.add(name, members, device.start_ns[operations], device.end_ns[operations])
    return sums.result(steps, unmatched)


class _Sums:
    """Sums over the matched collectives of all operations, by the GPUs that ran some (indices into ``timelines``)."""

    def __init__(self, trace: Trace, timelines: Sequence[GpuTimeline], waits_for_host: Sequence[Spans],
                 without_work: Sequence[Spans]) -> None:
        """``without_work``: when each GPU waits for its host or for a batch."""
        self._numbers, self._timelines = [gpu_number(trace, timeline.gpu) for timeline in timelines], timelines
        self._waits_for_host, self._without_work = waits_for_host, without_work
        self._held_up: list[list[Spans]] = [[EMPTY] for _ in timelines]
        self._held_up_ns = np.zeros(len(timelines))
        self._waits: list[list[Spans]] = [[EMPTY] for _ in timelines]
        self._moves: list[list[Spans]] = [[EMPTY] for _ in timelines]
        self._allreduces = [EMPTY for _ in timelines]
        self._late_ns = np.zeros(len(timelines))
        self._late_times = np.zeros(len(timelines), np.int64)
        self._late_by_host_ns = 0.0
        self._count = self._bare_ns = 0
        self._allreduce_s: list[float] = []
        self._allreduce_bare_ns = self._allreduce_ns = 0

    def add(self, operation: str, members: Sequence[int], start: I64, end: I64) -> None:
        """Add the collectives of one operation. ``start`` and ``end`` have the shape (collectives, ``members``)."""
        begun = start.max(axis=1)
        self._count += len(start)
        waiting, hidden, bare = begun[:, None] - start, np.empty_like(start), np.empty_like(start)
        for j, i in enumerate(members):
            self._waits[i].append(union(start[:, j], begun))
            self._moves[i].append(union(begun, end[:, j]))
            beside = self._timelines[i].load
            hidden[:, j] = coverage(beside, start[:, j], begun)
            bare[:, j] = end[:, j] - begun - coverage(beside, begun, end[:, j])
        bare_ns = int(bare.min(axis=1).sum())
        self._bare_ns += bare_ns
        whole = waiting.sum(axis=1)
        exposed = np.where(whole > 0, 1 - hidden.sum(axis=1) / np.maximum(whole, 1), 0.0)
        ahead = np.median(np.sort(start, axis=1)[:, :-1], axis=1)
        last = np.argmax(start, axis=1)
        behind = _behind_by_host([self._waits_for_host[i] for i in members], start, begun, last)
        self._late_by_host_ns += float((np.minimum(behind, begun - ahead) * exposed).sum())
        without_work = [self._without_work[i] for i in members]
        held_ns = np.minimum(_behind_by_host(without_work, start, begun, last), begun - ahead) * exposed
        since = _since_collective_before(without_work, begun)
        for j, i in enumerate(members):
            mine = np.flatnonzero((last == j) & (held_ns >= _HELD_UP_NS))
            self._held_up_ns[i] += float(held_ns[mine].sum())
            self._held_up[i].append(_holding_up(without_work[j], since[mine], start[mine, j], held_ns[mine]))
        np.add.at(self._late_ns, np.array(members)[last], (begun - ahead) * exposed)
        np.add.at(self._late_times, np.array(members)[last[whole > 0]], 1)
        if operation == "AllReduce":
            for i in members:
                self._allreduces[i] = self._moves[i][-1]
            self._allreduce_s = ((end - start).min(axis=1) / 1e9).tolist()
            self._allreduce_bare_ns = bare_ns
            self._allreduce_ns = int((end - begun[:, None]).min(axis=1).sum())

    def result(self, steps: Steps | None, unmatched: Mapping[str, str]) -> CollectiveWaits:
        """Result per step where there are steps, and then of the time within them."""
        per = steps.count if steps is not None else 1
        within = None if steps is None else steps.spans

        def judged(spans: Spans) -> Spans:
            return spans if within is None else intersect(spans, within)

        numbers, waiting = self._numbers, dict[int, Spans]()
        transfer_s, allreduce_s = dict[int, float](), dict[int, float]()
        for i, n in enumerate(numbers):
            beside, moved = self._timelines[i].load, merge(*self._moves[i])
            waiting[n] = judged(subtract(subtract(merge(*self._waits[i]), beside), moved))
            transfer_s[n] = judged(subtract(moved, beside)).total / per / 1e9
            allreduce_s[n] = judged(subtract(self._allreduces[i], beside)).total / per / 1e9
        return CollectiveWaits(
            waiting_s={n: spans.total / per / 1e9 for n, spans in waiting.items()}, transfer_s=transfer_s,
            bare_s=min(self._bare_ns / per / 1e9, *transfer_s.values()),
            late_s={n: float(ns) / per / 1e9 for n, ns in zip(numbers, self._late_ns, strict=True) if ns > 0},
            late_times={n: int(k) for n, k in zip(numbers, self._late_times, strict=True) if k},
            late_by_host_s=self._late_by_host_ns / per / 1e9, count=self._count, durations_s=tuple(self._allreduce_s),
            allreduce_exposed=self._allreduce_bare_ns / self._allreduce_ns if self._allreduce_ns else 0.0,
            unmatched=unmatched, waiting=waiting, allreduce_s=allreduce_s,
            held_up_s={n: float(ns) / per / 1e9 for n, ns in zip(numbers, self._held_up_ns, strict=True) if ns > 0},
            held_up={n: merge(*self._held_up[i]) for i, n in enumerate(numbers) if self._held_up_ns[i] > 0})


def _of_one_rank(trace: Trace, timeline: GpuTimeline, rows: I64, steps: Steps | None) -> CollectiveWaits:
    device = trace.device
    if steps is not None:
        rows = rows[step_of(device.start_ns[rows], steps) >= 0]
    beside = timeline.load

    def bare(events: I64) -> int:
        spans = subtract(union(device.start_ns[events], device.end_ns[events]), beside)
        return (spans if steps is None else intersect(spans, steps.spans)).total

    unmatched, durations, exposed = {}, np.empty(0, np.int64), 0.0
    for name, (events,) in by_operation(trace, [rows]).items():
        unmatched[name] = str(matched(trace, [events]))
        if name == "AllReduce":
            durations = device.end_ns[events] - device.start_ns[events]
            exposed = bare(events) / max(int(durations.sum()), 1)
    return CollectiveWaits(
        waiting_s={}, transfer_s={}, bare_s=0.0, late_s={}, late_times={}, late_by_host_s=0.0, count=0,
        durations_s=tuple((durations / 1e9).tolist()), allreduce_exposed=exposed, unmatched=unmatched, waiting={},
        alone_s=bare(rows) / (steps.count if steps is not None else 1) / 1e9)


def _before_first_launch(trace: Trace, timeline: GpuTimeline, steps: Steps | None) -> Spans:
    """Span from the begin of the steps to the GPU's first event, where that was launched later."""
    first = timeline.rows[:1]
    if steps is None or not len(first) or trace.device.launch_ns[first[0]] < steps.bounds_ns[0][0]:
        return EMPTY
    return union([steps.bounds_ns[0][0]], trace.device.start_ns[first])


def _behind_by_host(waits: Sequence[Spans], start: I64, begun: I64, last: I64) -> F64:
    """Extra time (ns) that the last GPU waited for its host since the previous collective, over the others' median.
    ``waits`` is when each GPU did, ``start`` of shape (collectives, GPUs) when it arrived, ``last`` who came last."""
    since = _since_collective_before(waits, begun)
    waited = np.stack([coverage(wait, np.minimum(since, start[:, j]), start[:, j]) for j, wait in enumerate(waits)], 1)
    rows = np.arange(len(last))
    of_last = waited[rows, last].astype(np.float64)
    others = waited.astype(np.float64)
    others[rows, last] = np.nan
    return np.maximum(of_last - np.nanmedian(others, axis=1), 0.0)


def _since_collective_before(waits: Sequence[Spans], begun: I64) -> I64:
    """Start of the collective before each; before the first, the time at which a GPU first waited."""
    order = np.argsort(begun, kind="stable")
    since = np.empty_like(begun)
    since[order] = np.append(min((spans.start[0] for spans in waits if len(spans.start)), default=0), begun[order[:-1]])
    return since


def _holding_up(without_work: Spans, since: I64, arrived: I64, delay_ns: F64) -> Spans:
    """The gaps of one GPU that delay collectives: those between ``since`` and ``arrived`` of each. Where few long gaps
    are most of the delay, without the short ones, which the other GPUs have as well."""
    order = np.argsort(arrived, kind="stable")
    since, arrived, delay_ns = since[order], arrived[order], delay_ns[order]
    gaps = intersect(without_work, union(since, arrived))
    if not len(gaps.start):
        return EMPTY
    of = np.minimum(np.searchsorted(arrived, gaps.end), len(arrived) - 1)
    length = gaps.end - gaps.start
    long = length >= _MAIN_GAPS * delay_ns[of]
    in_long = np.bincount(of[long], length[long], len(arrived))
    kept = long | (in_long < _MOST_OF_DELAY * delay_ns)[of]
    return Spans(gaps.start[kept], gaps.end[kept])

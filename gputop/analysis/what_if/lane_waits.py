"""Waits of host lanes, for a GPU or for a batch, and pauses of which a trace does not show whether they are waits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from msgspec import Struct

from gputop.analysis.steps.training_loops import HANDED_OVER_NS, WORKERS, TrainingLoop
from gputop.analysis.what_if.dependencies import (
    HELD_NS,
    LATENCY_NS,
    NEG_INF,
    POS_INF,
    EventLaunches,
    Flags,
    HostLanes,
    ReplayEvents,
)
from gputop.analysis.what_if.host_waits import SYNCHRONIZE, waits_for_copy
from gputop.trace.intervals import EMPTY, Spans, merge, union
from gputop.trace.lookups import detect_framework, host_rows, name_mask
from gputop.trace.model import I64, Kind, Trace

# So many pauses tell how steady they are; one spread is clearly the larger by this factor, and by a latency.
_SEVERAL, _CLEARLY, _STEADY_NS = 8, 4, 5_000
_LAUNCHING = r"^(?:cuda|cu|hip)(?:(?:Graph)?Launch(?!HostFunc)|Mem(?:cpy|set)\w*Async)"
# A longer wait for a batch ends when the batch is there, however early the loop asked; to fetch one that is ready
# takes PyTorch up to 2 ms of a step of 174 ms.
_INPUT_WAIT_NS, _INPUT_WAIT_SHARE = 100_000, 0.02
# Iterators that work on threads of their own, next to the loop.
_BACKGROUND_ITERATORS = r"Iterator::.*(?:Prefetch|Parallel|MapAndBatch)|enumerate\(DataLoader\)#_Multi"


class StepMarks(Struct, frozen=True):
    """The steps of a trace as the replay needs them. ``by_host``: calls of the host mark them; ``median_s``: 0 without
    steps; ``edges_ns``: begins and ends of all steps, flat."""

    by_host: bool
    median_s: float
    edges_ns: I64


class Waits(NamedTuple):
    """Waits of host lanes, in order of lane and end; the first of each lane is at :data:`NEG_INF`. Shape (waits,).
    ``on`` is the event that is waited for, -1 for a batch."""

    lane: I64
    begin: I64
    end: I64
    on: I64

    def of_lane(self, lane: int) -> I64:
        """The waits (indices) of a lane, the one at NEG_INF first."""
        return np.flatnonzero(self.lane == lane)


class LaneTimes(NamedTuple):
    """Stretches of time of host lanes, in any order; ns, shape (stretches,)."""

    lane: I64
    begin: I64
    end: I64

    def of_lane(self, lane: int) -> Spans:
        """Stretches of one lane; they may touch."""
        return Spans(self.begin[self.lane == lane], self.end[self.lane == lane])


def find_waits(trace: Trace, events: ReplayEvents, lanes: HostLanes, launches: EventLaunches,
               loops: Sequence[TrainingLoop], marks: StepMarks, *,
               ambiguous: bool = False) -> tuple[Waits, LaneTimes, Spans]:
    """Find the waits of host lanes, their fetches, which are waits for a batch that is made when it is asked for, and
    the time of pauses that look the same whether the host waits for the GPUs or is busy. ``ambiguous``: they are waits.

    1. Synchronizing calls of launching threads may wait, and so may launching calls of :data:`HELD_NS` and more.
    2. Where the trace need not have all calls that wait, pauses in launching may (:func:`_pauses`).
    3. Each of them waits for the event of its GPUs that ended last in it and was launched before; without one it does
       not wait. A call that lasts as long as its own copy with the host waits for that (:func:`_held_copies`).
    4. A loop's long waits for a batch are waits where the input pipeline works ahead, else fetches, which take as long
       as they take.
    5. Waits of a lane follow one another: each begins after the one before it and after the last launch in it.
    """
    syncs = host_rows(trace, SYNCHRONIZE)
    syncs = syncs[lanes.of_line[trace.host.line[syncs]] >= 0]
    calls = [LaneTimes(lanes.of_line[trace.host.line[syncs]], trace.host.start_ns[syncs], trace.host.end_ns[syncs]),
             _held_launches(events, launches), _held_at_end(trace, lanes, launches)]
    unclear = EMPTY
    if detect_framework(trace) != "pytorch":  # whose waits are all calls of the CUDA runtime
        for lane in range(lanes.size):
            pauses, unsure = _pauses(lane, events, lanes, launches, marks, ambiguous=ambiguous)
            calls.append(pauses)
            unclear = merge(unclear, unsure)
    called = LaneTimes(*(np.concatenate(column).astype(np.int64) for column in zip(*calls, strict=True)))
    on = _ended_last(called._replace(end=called.end + (LATENCY_NS if ambiguous else 0)), events, lanes, launches)
    batches = _batch_waits(trace, lanes, loops, marks)
    waits = [Waits(*(column[on >= 0] for column in (*called, on))), _held_copies(events, launches)]
    if name_mask(trace, _BACKGROUND_ITERATORS).any():
        waits.append(Waits(*batches, np.full(len(batches.lane), -1)))
        batches = LaneTimes(*(column[:0] for column in batches))
    first = np.full(lanes.size, NEG_INF)
    waits.append(Waits(np.arange(lanes.size), first, first, np.full(lanes.size, -1)))
    every = Waits(*(np.concatenate(column).astype(np.int64) for column in zip(*waits, strict=True)))
    return _in_turn(every, events, lanes, launches), batches, unclear


def _held_launches(events: ReplayEvents, launches: EventLaunches) -> LaneTimes:
    """Launching calls that may have waited. One whose kernel ran meanwhile did not wait for room in the queue, it was
    slow by itself; one that copies from or to the host may wait for the copy."""
    slow = (events.end <= launches.end) & ~_with_host(events)
    held = np.flatnonzero(_held(launches) & ~slow & ~_lasts_as_its_copy(events, launches))
    return LaneTimes(launches.lane[held], launches.begin[held], launches.end[held])


def _held_at_end(trace: Trace, lanes: HostLanes, launches: EventLaunches) -> LaneTimes:
    """Launching calls that may have waited and whose event is not in the trace: with a full queue, those of its last
    stretch."""
    host = trace.host
    calls = np.flatnonzero(name_mask(trace, _LAUNCHING).take(host.name) & (host.end_ns - host.start_ns >= HELD_NS))
    lane = lanes.of_line[host.line[calls]]
    last = np.array([of_lane[-1] if len(of_lane) else POS_INF for of_lane in launches.by_lane] + [POS_INF], np.int64)
    held = host.start_ns[calls] > last[lane]
    return LaneTimes(lane[held], host.start_ns[calls][held], host.end_ns[calls][held])


def _held_copies(events: ReplayEvents, launches: EventLaunches) -> Waits:
    """Calls that return when their own copy from or to the host has ended, as those with pageable memory do."""
    held = np.flatnonzero(_held(launches) & _lasts_as_its_copy(events, launches))
    return Waits(launches.lane[held], launches.begin[held], launches.end[held], held)


def _held(launches: EventLaunches) -> Flags:
    return (launches.lane >= 0) & (launches.end - launches.begin >= HELD_NS)


def _lasts_as_its_copy(events: ReplayEvents, launches: EventLaunches) -> Flags:
    """Mask of the copies with the host whose call ends while they run, and waits for them
    (:func:`~gputop.analysis.what_if.host_waits.waits_for_copy`)."""
    return _with_host(events) & (events.end > launches.end) & waits_for_copy(
        launches.begin, launches.end, events.start, events.end)


def _with_host(events: ReplayEvents) -> Flags:
    return (events.kind == Kind.H2D) | (events.kind == Kind.D2H)


def _batch_waits(trace: Trace, lanes: HostLanes, loops: Sequence[TrainingLoop], marks: StepMarks) -> LaneTimes:
    """The long waits of loops for a batch, by the lanes of their threads, or of their hosts where these are unknown."""
    usual_ns = HANDED_OVER_NS if name_mask(trace, WORKERS).any() else _INPUT_WAIT_NS
    longest_fetch_ns = max(usual_ns, marks.median_s * 1e9 * _INPUT_WAIT_SHARE)
    parts = []
    for loop in loops:
        of_loop = {int(lanes.of_line[loop.line])} if loop.line >= 0 else {
            lane for gpu, lane in lanes.of_gpu.items() if trace.gpus[gpu].host == loop.host}
        long = loop.waits.end - loop.waits.start >= longest_fetch_ns
        parts += [LaneTimes(np.full(int(long.sum()), lane), loop.waits.start[long], loop.waits.end[long])
                  for lane in of_loop - {-1}]
    return LaneTimes(*(np.concatenate([np.empty(0, np.int64), *(part[i] for part in parts)]) for i in range(3)))


def _pauses(lane: int, events: ReplayEvents, lanes: HostLanes, launches: EventLaunches, marks: StepMarks, *,
            ambiguous: bool) -> tuple[LaneTimes, Spans]:
    """Pauses in which a lane waits in calls that are not recorded; and those that may be such (ns).

    1. A lane that launches nothing until all its GPUs' work is done has *drained* them; a wait for a copy may return
       before.
    2. It waited for them where it then goes on soon.
    3. Where it goes on later, the pauses between the same two kernels tell: a host that waits goes on a steady time
       after the GPU, a busy one a steady time after its last launch. Where both are as steady it is ambiguous.
    4. A lane that launches nothing for a time although its GPUs have work for half as long again is held back by them:
       it is no more ahead than it may be.
    """
    of_lane = np.flatnonzero(np.isin(events.gpu, lanes.gpus(lane)))
    unknown, launched = of_lane[launches.begin[of_lane] == NEG_INF], of_lane[launches.begin[of_lane] > NEG_INF]
    launched = launched[np.argsort(launches.begin[launched], kind="stable")]
    unknown = unknown[np.argsort(events.start[unknown], kind="stable")]
    begin = launches.begin[launched]
    called = np.maximum.accumulate(launches.end[launched])
    next_launch = np.append(begin[1:], POS_INF)[:len(launched)]
    begun = np.searchsorted(events.start[unknown], next_launch)
    work_end = np.maximum(np.maximum.accumulate(events.end[launched]),
                          np.append(NEG_INF, np.maximum.accumulate(events.end[unknown]))[begun])
    if marks.by_host:
        edges = np.append(np.sort(marks.edges_ns), POS_INF)
        next_launch = np.minimum(next_launch, edges[np.searchsorted(edges, work_end)])
    since, wait = next_launch - work_end, work_end - called
    copied = np.maximum.accumulate(np.where(_with_host(events)[launched], events.end[launched], NEG_INF))
    sooner = np.where(copied == work_end, np.maximum(wait // 10, LATENCY_NS), LATENCY_NS)

    drained = np.flatnonzero((since >= -sooner) & (wait >= HELD_NS) & (next_launch < POS_INF))
    may_wait, waited = _waited(since[drained], wait[drained], _kernel_pairs(events, launched, drained))
    unsure = drained[may_wait & ~waited]
    drained = drained[may_wait if ambiguous else waited]
    ahead = np.append(events.start[launched][1:] - begin[1:], 0)[:len(launched)]
    held = (next_launch - called >= HELD_NS) & (ahead >= (next_launch - called) // 2)
    end = next_launch.copy()
    end[drained] = np.minimum(next_launch[drained], work_end[drained] + LATENCY_NS)
    held[drained] = True
    return (LaneTimes(np.full(int(held.sum()), lane), called[held], end[held]), union(called[unsure], work_end[unsure]))


def _kernel_pairs(events: ReplayEvents, launched: I64, drained: I64) -> I64:
    """A number for each pair of kernels before and after a pause; shape (drained,)."""
    if not len(drained):
        return drained
    name = events.name[launched].astype(np.int64)
    return np.unique(name[drained] << 32 | name[np.minimum(drained + 1, len(name) - 1)], return_inverse=True)[1]


def _waited(since: I64, wait: I64, pair: I64) -> tuple[Flags, Flags]:
    """Masks of the pauses in which the lane may have waited, and in which it did. ``since``: from the end of the GPUs'
    work to the next launch; ``wait``: from the last launch to the end of the GPUs' work (ns)."""
    after_gpu, after_launch = _spread(pair, since), _spread(pair, wait + since)
    may_wait = _CLEARLY * after_launch >= after_gpu
    soon = since <= wait // 4
    return may_wait, may_wait & (since >= 0) & (soon | (_CLEARLY * after_gpu < after_launch))


def _spread(group: I64, value: I64) -> I64:
    """Distance between the quartiles of the values in each value's group, and no less than they vary in any job; in a
    group of few it is not known and as small."""
    order = np.lexsort((value, group))
    _, first, number, count = np.unique(group[order], return_index=True, return_inverse=True, return_counts=True)
    ranked = value[order]
    spread = ranked[first + 3 * count // 4] - ranked[first + count // 4]
    out = np.empty_like(value)
    out[order] = np.where(count >= _SEVERAL, np.maximum(spread, _STEADY_NS), _STEADY_NS)[number]
    return out


def _ended_last(calls: LaneTimes, events: ReplayEvents, lanes: HostLanes, launches: EventLaunches) -> I64:
    """Event of the lane's GPUs that ended last in each call, and was launched before it; else the copy with the host
    that a call of :data:`HELD_NS` and more waited for, though by the clocks it still ran; -1: none."""
    out = np.full(len(calls.lane), -1, np.int64)
    for lane in np.unique(calls.lane).tolist():
        by_end = np.flatnonzero(np.isin(events.gpu, lanes.gpus(lane)) & (events.work > 0))
        by_end = by_end[np.argsort(events.end[by_end], kind="stable")]
        if not len(by_end):
            continue
        of_lane = np.flatnonzero(calls.lane == lane)
        begin, end = calls.begin[of_lane], calls.end[of_lane]
        ended = np.searchsorted(events.end[by_end], end, side="right") - 1
        last = by_end[np.maximum(ended, 0)]
        good = (ended >= 0) & (events.end[last] > begin) & (launches.begin[last] <= begin)
        out[of_lane[good]] = last[good]
        copies = by_end[_with_host(events)[by_end]]
        if len(copies):
            runs = copies[np.minimum(np.searchsorted(events.end[copies], end, side="right"), len(copies) - 1)]
            held = ~good & (end - begin >= HELD_NS) & (events.end[runs] > end) & (launches.begin[runs] <= begin)
            held &= waits_for_copy(begin, end, events.start[runs], events.end[runs])
            out[of_lane[held]] = runs[held]
    return out


def _in_turn(waits: Waits, events: ReplayEvents, lanes: HostLanes, launches: EventLaunches) -> Waits:
    """Waits by lane and end; of each what lies after the one before it, and after the last launch in it. What ended
    before the lane itself began to wait was not waited for."""
    order = np.lexsort((waits.end, waits.lane))
    lane, begin, end, on = (column[order] for column in waits)
    for number in range(lanes.size):
        of_lane = np.flatnonzero((lane == number) & (end > NEG_INF))
        begin[of_lane] = launches.last_before(number, begin[of_lane], end[of_lane])
    follows = np.append(False, lane[1:] == lane[:-1])[:len(lane)]
    begin = np.where(follows, np.maximum(begin, np.roll(end, 1)), begin)
    kept = (end == NEG_INF) | ((end > begin) & ((on < 0) | (events.end[on] > begin)))
    return Waits(lane[kept], begin[kept], end[kept], on[kept])

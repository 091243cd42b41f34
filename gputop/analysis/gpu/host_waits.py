"""Calls in which the host waits for a GPU, and the idle time of the GPU that follows from them.

While a thread waits it launches nothing, so the GPU's queue runs empty, and the GPU stands still until launching is
ahead of it again. How long, a replay of the recorded launches tells: each device event starts no sooner than its
launch and than the end of what ran before it on that GPU. The waits are taken out, which makes all later launches
earlier. The unchanged replay gives the recorded times exactly, so what changes is what the waits cost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from gputop.analysis.gpu.collectives import by_operation, matched, of_gpus
from gputop.analysis.gpu.device_time import GpuTimeline
from gputop.analysis.steps.model import Steps
from gputop.trace.intervals import EMPTY, Spans, union
from gputop.trace.lookups import host_rows
from gputop.trace.model import I64, Kind, MemoryKind, Trace

_SYNCHRONIZE = r"(cu|cuda|hip)(Stream|Event|Device|Ctx)Synchronize"
# A wait for a batch that is longer ends when the batch is there, however early the loop came to ask for it: its
# own figure, several times what a call takes that finds a batch ready.
_INPUT_WAIT_NS = 100_000
_LONG_AGO = -(1 << 61)
_EVER = 1 << 61  # an event that may end earlier by any time
_LEFT_OUT = -2
_CLOCK_ERROR_NS = 100_000  # between host and GPU; a wait was seen to return 5 µs before its copy ended
_MAX_ROUNDS = 32  # in which what GPUs wait for each other in collectives must settle
_NEAR_STEP_NS = 100_000  # what marks a step may be an event somewhat after its first launch


class HostWaits(NamedTuple):
    """Calls that return when work of a GPU is done: their threads, and when they run; any order.

    ``copy`` is the row of the copy that is waited for, -1 for a synchronization without one.
    """

    line: I64
    start_ns: I64
    end_ns: I64
    copy: I64

    def chosen(self, rows: I64) -> HostWaits:
        """Those for one of these copies."""
        keep = np.isin(self.copy, rows)
        return HostWaits(*(column[keep] for column in self))


def host_waits(trace: Trace, staged_bytes: float) -> HostWaits:
    """All such calls whose thread launches work.

    A copy with the host is waited for where its call lasts until it ends, or where the thread synchronizes next.
    Copies of more than ``staged_bytes`` with pageable memory are left out, they wait by nature, and so are
    synchronizations for them.
    """
    device, host = trace.device, trace.host
    copies = np.flatnonzero(((device.kind == Kind.H2D) | (device.kind == Kind.D2H)) & (device.launch_ns >= 0))
    pageable = (device.src[copies] == MemoryKind.PAGEABLE) | (device.dst[copies] == MemoryKind.PAGEABLE)
    waits_by_nature = pageable & (device.bytes[copies] > staged_bytes)
    held = copies[:0]
    if len(device.launch_end_ns) == len(device):
        held = copies[(device.launch_end_ns[copies] >= device.end_ns[copies]) & ~waits_by_nature]
    syncs = host_rows(trace, _SYNCHRONIZE)
    copy = _copies_of(trace, syncs, copies)
    copy[np.isin(copy, copies[waits_by_nature])] = _LEFT_OUT
    syncs, copy = syncs[copy != _LEFT_OUT], copy[copy != _LEFT_OUT]
    return HostWaits(
        np.concatenate((device.launch_line[held], host.line[syncs])).astype(np.int64),
        np.concatenate((device.launch_ns[held], host.start_ns[syncs])),
        np.concatenate((device.launch_end_ns[held] if len(held) else device.launch_ns[held], host.end_ns[syncs])),
        np.concatenate((held, copy)))


def _copies_of(trace: Trace, syncs: I64, copies: I64) -> I64:
    """For each synchronization the row of the copy that it waits for: the last work that its thread launched before.
    -1 where that is something else, ``_LEFT_OUT`` where the thread launches nothing at all."""
    device, host = trace.device, trace.host
    is_copy = np.zeros(len(device), bool)
    is_copy[copies] = True
    out = np.full(len(syncs), _LEFT_OUT, np.int64)
    for thread in np.unique(host.line[syncs]).tolist():
        mine = np.flatnonzero(host.line[syncs] == thread)
        rows = np.flatnonzero((device.launch_line == thread) & (device.launch_ns >= 0))
        if not len(rows):
            continue
        rows = rows[np.argsort(device.launch_ns[rows], kind="stable")]
        begin, end = host.start_ns[syncs[mine]], host.end_ns[syncs[mine]]
        at = np.searchsorted(device.launch_ns[rows], begin, side="right") - 1
        last = rows[np.maximum(at, 0)]
        waited = (at >= 0) & is_copy[last] & (device.end_ns[last] <= end + _CLOCK_ERROR_NS)
        out[mine] = np.where(waited, last, -1)
    return out


@dataclass(frozen=True, slots=True)
class WaitCost:
    """What the host's waits cost one GPU. ``idle``: when it is idle and would not be without them. ``ends_ns``: when
    each of its events, and all before it, was done; ``earlier_ns``: how much earlier that would be."""

    idle: Spans
    ends_ns: I64
    earlier_ns: I64

    def saved_ns(self, within: Spans) -> int:
        """How much shorter these spans would be: no less than nothing."""
        known = np.append(self.earlier_ns, 0)  # the last one answers for instants before the first event
        at = (np.searchsorted(self.ends_ns, edge, side="right") - 1 for edge in (within.end, within.start))
        later, sooner = (known[i] for i in at)
        return int(np.maximum(later - sooner, 0).sum())


def cost_of_waits(
    trace: Trace, gpu_timelines: Sequence[GpuTimeline], waits: HostWaits, input_waits: Spans,
) -> dict[int, WaitCost]:
    """By GPU (index into ``Trace.gpus``), what the waits cost; none where the replay does not settle.

    Of a wait counts the time after the last launch to the GPU within it: while another thread launches, the GPU has
    work. ``input_waits``: when the loop waits for a batch, which does not come sooner because it is asked for sooner.
    A collective ends when the last of its GPUs has come, and one whose partners are not known no sooner than it did.
    """
    if not len(waits.start_ns):
        return {}
    replays = [_Replay.of(trace, timeline, waits, input_waits) for timeline in gpu_timelines]
    if not any(replay.earlier_ns.any() for replay in replays):
        return {}
    together, alone = _collectives(trace, gpu_timelines)
    waiting = np.zeros(len(trace.device), np.int64)
    for found in together:
        start = trace.device.start_ns[found]
        waiting[found] = start.max(axis=1, keepdims=True) - start
    for replay in replays:
        replay.work = np.maximum(replay.work - waiting[replay.rows], 0)
    sooner = [np.full(len(found), _EVER, np.int64) for found in together]
    for _ in range(_MAX_ROUNDS):
        for replay in replays:
            limits = np.full(len(trace.device), _EVER, np.int64)
            limits[alone] = 0
            for found, own in zip(together, sooner, strict=True):
                limits[found] = own[:, None]
            replay.run(limits[replay.rows])
        settled = True
        for i, found in enumerate(together):
            start = trace.device.start_ns[found]
            arrives = np.full(len(trace.device), -_LONG_AGO, np.int64)
            for replay in replays:
                arrives[replay.rows] = replay.begins_earlier_ns
            left = start.max(axis=1, keepdims=True) - start + arrives[found]
            now = np.minimum(sooner[i], np.maximum(left.min(axis=1), 0))
            settled &= bool((now == sooner[i]).all())
            sooner[i] = now
        if settled:
            return {timeline.gpu: replay.cost() for timeline, replay in zip(gpu_timelines, replays, strict=True)}
    return {}


def _collectives(trace: Trace, gpu_timelines: Sequence[GpuTimeline]) -> tuple[list[I64], I64]:
    """The collectives matched across GPUs, shape (collectives, GPUs), and the rows of those that are not."""
    _, rows = of_gpus(trace, gpu_timelines)
    together, alone = [], rows
    for own in by_operation(trace, rows).values():
        found = matched(trace, [r for r in own if len(r)])
        if not isinstance(found, str):
            together.append(found)
            alone = [np.setdiff1d(r, found) for r in alone]
    return together, np.concatenate([np.empty(0, np.int64), *alone])


class _Replay:
    """The events of one GPU, in order of their starts, and what they wait for.

    ``before`` is when all that began earlier was done, ``host_part`` the part of the idle time until an event's
    start that its launch came too late, ``dependent`` the rest of it, ``work`` what the event adds to the busy time,
    without waiting for other GPUs.
    """

    def __init__(self, rows: I64, start: I64, end: I64, launch: I64, called: I64, earlier: I64) -> None:
        self.rows, self.earlier_ns = rows, earlier
        self.reach = np.maximum.accumulate(end)
        self.before = np.concatenate((start[:1], self.reach[:-1]))
        idle = np.maximum(start - self.before, 0)
        # When the host's part of the gap is over. The rest, the latency of a launch that came in time, stays as it is.
        until = np.where(launch > self.before, start, np.clip(called, self.before, np.maximum(start, self.before)))
        self.host_part = np.where((idle > 0) & (launch >= 0), until - self.before, 0)
        self.dependent = idle - self.host_part
        self.work = np.maximum(end - np.maximum(start, self.before), 0)
        self.arrival = np.where(self.host_part > 0, until, np.minimum(launch, self.before)) - earlier
        self.arrival[launch < 0] = _LONG_AGO  # where the launch is not known, the event follows the one before
        self.arrival[:1] = start[:1]
        self.ends = self.reach
        self.begins_earlier_ns = np.zeros(len(rows), np.int64)

    @classmethod
    def of(cls, trace: Trace, timeline: GpuTimeline, waits: HostWaits, input_waits: Spans) -> _Replay:
        device = trace.device
        rows = timeline.rows[device.end_ns[timeline.rows] > device.start_ns[timeline.rows]]
        launch = device.launch_ns[rows]
        called = device.launch_end_ns[rows] if len(device.launch_end_ns) == len(device) else launch
        earlier = _earlier(launch, _time_saved(trace, rows, waits), input_waits)
        return cls(rows, device.start_ns[rows], device.end_ns[rows], launch, called, earlier)

    def run(self, sooner: I64) -> None:
        """Replay; ``sooner`` says by how much at most each event can end earlier than it did."""
        add = self.dependent + self.work
        done = np.cumsum(add)
        least = np.maximum(self.arrival + add, self.reach - sooner)
        self.ends = done + np.maximum.accumulate(least - done)
        ended = np.concatenate((self.ends[:1] - add[:1], self.ends[:-1]))
        begins = np.maximum(self.arrival, ended) + self.dependent
        self.begins_earlier_ns = self.before + self.host_part + self.dependent - begins

    def cost(self) -> WaitCost:
        ended = np.concatenate((self.before[:1], self.ends[:-1]))
        left = np.maximum(self.arrival - ended, 0)
        less = np.clip(self.host_part - left, 0, self.host_part)
        return WaitCost(union(self.before, self.before + less), self.reach, self.reach - self.ends)


def _time_saved(trace: Trace, rows: I64, waits: HostWaits) -> Spans:
    """The time of the waits in which nothing was launched to the GPU of these rows, in spans that end with a wait."""
    device = trace.device
    known = rows[device.launch_ns[rows] >= 0]
    launches = np.sort(device.launch_ns[known])
    own_copy = np.isin(waits.copy, rows)
    threads = np.unique(device.launch_line[known])
    of_gpu = own_copy | np.isin(waits.line, threads)
    start, end = waits.start_ns[of_gpu], waits.end_ns[of_gpu]
    if not len(start):
        return EMPTY
    calls = known[device.kind[known] == Kind.COMPUTE]
    usual = 0
    if len(device.launch_end_ns) == len(device) and len(calls):
        usual = int(np.median(np.maximum(device.launch_end_ns[calls] - device.launch_ns[calls], 0)))
    last = np.searchsorted(launches, end) - 1
    begun = np.where(last >= 0, launches[np.maximum(last, 0)], start)
    # A call that does not wait takes time as well: as long as launching a kernel.
    return union(np.maximum(start, begun) + usual, end)


def _earlier(launch: I64, saved: Spans, input_waits: Spans) -> I64:
    """By how much each launch comes earlier: all of the time saved until then, since the last long wait for input."""
    total = np.concatenate((np.zeros(1, np.int64), np.cumsum(saved.end - saved.start)))
    so_far = total[np.searchsorted(saved.end, launch, side="right")]
    long = input_waits.end - input_waits.start >= _INPUT_WAIT_NS
    fed = np.concatenate((np.full(1, _LONG_AGO), input_waits.end[long]))
    return so_far - total[np.searchsorted(saved.end, fed[np.searchsorted(fed, launch, side="right") - 1], side="right")]


def before_steps(trace: Trace, timeline: GpuTimeline, steps: Steps | None) -> Spans:
    """Idle gaps of the GPU that end in the first kernel of a step: there the host has more to do than to wait.

    None where the steps rest on kernels: one such gap is then wherever the GPU is idle longest.
    """
    if steps is None or not steps.call_ends_ns:
        return EMPTY
    gaps = timeline.gaps
    kernels = trace.device.start_ns[timeline.kernels]
    after = np.append(kernels, timeline.window_ns[1])[np.searchsorted(kernels, gaps.end)]
    edges = np.sort(steps.edges_ns.ravel())
    chosen = np.searchsorted(edges, gaps.start, side="right") != np.searchsorted(
        edges, after + _NEAR_STEP_NS, side="right")
    return Spans(gaps.start[chosen], gaps.end[chosen])

"""A replay of the recorded window: how long its steps would take with a cure applied.

The window is a graph of what waits for what. Events of a stream run one after the other, each no sooner than its
launch (and a latency). Where an event began later than both, it waited for another stream: an edge from the event of
the same GPU that ended just before. Threads that launch to the same GPUs are one host lane: it goes on as recorded,
the time between calls included, but where it waited for a GPU or for a batch it goes on when these are ready. A
collective moves data once its last GPU has come.

Between two points where lanes wait for each other an event's end is the maximum over launches of a sum of durations:
such stretches ("pieces") are reduced by NumPy at once, and only the pieces are gone through one by one, in order of
their recorded times. That is a max-plus system, solved exactly, in time linear in events.

The same idea: Zhu et al., Daydream (USENIX ATC 2020); ByteDance's what-if analysis of stragglers (OSDI 2025).
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from gputop.analysis.gpu.collectives import by_operation, matched, of_gpus
from gputop.analysis.gpu.device_time import GpuTimeline
from gputop.analysis.steps.model import Steps
from gputop.analysis.steps.training_loops import training_loops
from gputop.analysis.what_if.cure import Cure
from gputop.trace.intervals import EMPTY, Spans, coverage, intersect, merge, subtract, union
from gputop.trace.lookups import detect_framework, host_rows, name_mask
from gputop.trace.model import I64, Trace

SYNCHRONIZE = r"(cu|cuda|hip)(Stream|Event|Device|Ctx)Synchronize"
TOLERANCE = 0.03  # of the step; Daydream's own errors are of this size
MIN_UNCLEAR = 0.01  # of the step
# A launch takes effect, a stream goes on, and a wait returns within some microseconds (2-10 µs measured; more under
# load). What is longer has another reason.
_LATENCY_NS = 20_000
_RETURNS_NS = 50_000  # a wait, in a loaded host
_HELD_NS = 100_000  # a launching call of this length waits for something
_MUCH = 10  # times the time since another stream's event: most of the wait was for it
# So many pauses tell how steady they are; one spread is clearly the larger by this factor, and by a latency.
_SEVERAL, _CLEARLY, _STEADY_NS = 8, 4, 5_000
_LAUNCHING_GAP_NS = 1_000_000  # as of the breakdown's part "launch"
# A longer wait for a batch ends when the batch is there, however early the loop asked; to fetch one that is ready
# takes PyTorch up to 2 ms of a step of 174 ms.
_INPUT_WAIT_NS, _INPUT_WAIT_SHARE = 100_000, 0.02
LONG_AGO, EVER = -(1 << 60), 1 << 60
_MAX_EVENTS = 100_000  # device events that are replayed: so many whole steps stand for the window
# Iterators that work on threads of their own, beside the loop.
_AHEAD = r"Iterator::.*(?:Prefetch|Parallel|MapAndBatch)|enumerate\(DataLoader\)#_Multi"


class Waits(NamedTuple):
    """When host lanes wait, one after the other in each lane; the first of each lane is before everything.

    ``on`` is the place of the event that is waited for, -1 for a batch; ``row`` its row, of copies only.
    """

    lane: I64
    begin: I64
    end: I64
    on: I64
    row: I64


class Replay:
    """The graph of one trace. Times are nanoseconds of the trace's clock."""

    def __init__(self, trace: Trace, gpu_timelines: Sequence[GpuTimeline], steps: Steps | None) -> None:
        self.trace = trace
        self.spans = _replayed_spans(trace, gpu_timelines, steps)
        self._by_host = False
        if steps is not None and steps.call_ends_ns:
            begins, calls = steps.edges_ns[:, 0], trace.host.start_ns
            self._by_host = bool((calls[np.minimum(np.searchsorted(calls, begins), len(calls) - 1)] == begins).all())
        self._steps_s = steps.times.median_s if steps is not None else 0.0
        self._steps_ns = steps.edges_ns.ravel() if steps is not None else np.empty(0, np.int64)
        lo, hi = int(self.spans.start[0]), int(self.spans.end[-1])
        device = trace.device
        rows = np.flatnonzero((device.end_ns > lo) & (device.start_ns < hi))
        # In an order of their own: what begins at one instant must not count in the order of the file.
        self._rank = np.empty(len(trace.lines), np.int64)
        self._rank[sorted(range(len(trace.lines)), key=lambda i: (
            trace.lines[i].gpu, trace.lines[i].host, trace.lines[i].name))] = np.arange(len(trace.lines))
        lanes, lane = np.unique(self._rank[device.line[rows]], return_inverse=True)
        order = np.lexsort((device.launch_ns[rows], device.end_ns[rows], device.start_ns[rows], lane))
        self.rows, self.lane, self.lanes = rows[order], lane[order], len(lanes)
        self.recorded_ns = self.modeled_ns = self.unclear_ns = 0
        self._waiting: Replay | None = None
        if not len(rows):
            return
        self._place = np.full(len(device), -1, np.int64)
        self._place[self.rows] = np.arange(len(self.rows))
        self._first = np.concatenate(([True], self.lane[1:] != self.lane[:-1]))
        self._times()
        self._host_lanes()
        self._latencies()
        self.loops = training_loops(trace)
        self.waits = self._find_waits()
        self._find_collectives(gpu_timelines)
        self._cut()
        self.recorded_ns = self._run(None, exact=True)
        self.modeled_ns = self._run(None, exact=False)

    @property
    def error(self) -> float:
        """By how much of the steps the graph alone, with usual latencies, misses the recorded time (ratio)."""
        return abs(self.modeled_ns - self.recorded_ns) / max(self.spans.total, 1) if len(self.rows) else 1.0

    @property
    def unclear(self) -> float:
        """Share of the steps in which the trace does not tell whether the host waits for the GPUs or is busy, where it
        counts; else 0."""
        share = self.unclear_ns / max(self.spans.total, 1)
        return share if share >= MIN_UNCLEAR else 0.0

    @property
    def cost(self) -> int:
        """What one replay takes, in units of about 0.07 µs: each event, and each piece or wait that is gone through."""
        return len(self.rows) + 15 * len(self.order) if len(self.rows) else 0

    def saved(self, cure: Cure) -> float:
        """Share of the step that the cure saves."""
        return (self.recorded_ns - self._run(cure, exact=True)) / max(self.spans.total, 1)

    def saved_if_waiting(self, cure: Cure) -> float:
        """The same where the host, in each pause in which the GPUs ran out of work, waited for them to do so: such a
        pause looks the same whether the host waits, in a call that is not recorded, or is busy."""
        if self._waiting is None:
            self._waiting = copy(self)
            self._waiting.waits = self._waiting._find_waits(unclear=True)
            self._waiting._cut()
            self._waiting.recorded_ns = self._waiting._run(None, exact=True)
        return self._waiting.saved(cure)

    # -- the graph ------------------------------------------------------------------------------------

    def _times(self) -> None:
        """``start``, ``end`` and ``before``, the end of what ran before in the stream."""
        device = self.trace.device
        start, end = device.start_ns[self.rows], device.end_ns[self.rows]
        far = int(end.max()) - int(start.min()) + 1
        self.end = np.maximum.accumulate(end + self.lane * far) - self.lane * far
        self.before = np.where(self._first, LONG_AGO, np.roll(self.end, 1))
        self.start = np.maximum(start, self.before)
        self.work = self.end - self.start

    def _host_lanes(self) -> None:
        """Threads that launch to the same GPU are one lane. ``host`` is an event's lane, -1 where its launch is not
        known."""
        device = self.trace.device
        line, gpu = device.launch_line[self.rows].astype(np.int64), device.gpu[self.rows].astype(np.int64)
        known = (device.launch_ns[self.rows] >= 0) & (line >= 0)
        pairs = np.unique(line[known] * (1 << 16) + gpu[known])
        lane_of: dict[int, int] = {}  # by thread, and by GPU below 0
        for thread, own in zip((pairs >> 16).tolist(), (pairs & 0xFFFF).tolist(), strict=True):
            old, new = lane_of.setdefault(thread, len(lane_of)), lane_of.setdefault(-1 - own, len(lane_of))
            if old != new:
                lane_of = {key: new if value == old else value for key, value in lane_of.items()}
        threads = sorted((int(self._rank[key]), value) for key, value in lane_of.items() if key >= 0)
        numbers = {value: i for i, value in enumerate(dict.fromkeys(value for _, value in threads))}
        of_line = np.full(len(self.trace.lines) + 1, -1, np.int64)
        for key, value in lane_of.items():
            if key >= 0:
                of_line[key] = numbers[value]
        self.host_lanes, self.host_of_line = len(numbers), of_line
        self.host_of_gpu = {-1 - key: numbers[value] for key, value in lane_of.items() if key < 0}
        self.host = np.where(known, of_line[line], -1)
        self.launch = np.where(known, np.minimum(device.launch_ns[self.rows], self.start), LONG_AGO)
        called = device.launch_end_ns[self.rows] if len(device.launch_end_ns) == len(device) else self.launch
        self.called = np.where(known, np.maximum(called, self.launch), LONG_AGO)

    def _latencies(self) -> None:
        """From launch to start, and from the end of what was before, as recorded and as usual; waits for other
        streams."""
        known = self.host >= 0
        since_launch, since_before = self.start - self.launch, self.start - self.before
        usual_launch = _usual(since_launch[known & (self.launch > self.before)])
        usual_pause = _usual(since_before[known & (self.before > self.launch + 4 * usual_launch)])
        launched = np.minimum(since_launch, usual_launch)
        paused = np.minimum(since_before, usual_pause)
        by_launch = self.launch + launched >= self.before + paused
        rest = self.start - np.maximum(self.launch + launched, self.before + paused)
        small = rest <= _LATENCY_NS
        in_call = ~small & known & by_launch & (self.start <= self.called + _LATENCY_NS)
        late = ~(small | in_call) | (self._first & ~known)
        # A call that lasts may itself wait for another stream, as one that copies to pageable memory. What was late by
        # much may go on later after what it waited for than what was late by little.
        within = np.maximum(np.where(in_call, _RETURNS_NS, _LATENCY_NS), rest // _MUCH)
        self.source, self.since_source = self._other_streams(
            np.flatnonzero(late | (in_call & (rest >= _HELD_NS))), within)
        in_call &= self.source < 0
        late &= self.source < 0
        # What is launched by a call that the trace does not have was launched just before. Without any host it begins
        # when it did, or as long after the one before; what waited for a time before the window begins when it did.
        lanes = np.array([self.host_of_gpu.get(gpu, -1) for gpu in range(len(self.trace.gpus))], np.int64)
        unseen = np.flatnonzero(late & ~known)
        self.host[unseen] = lanes[self.trace.device.gpu[self.rows[unseen]]]
        by_host = np.zeros(len(rest), bool)
        by_host[unseen] = (self.host[unseen] >= 0) | self._first[unseen]
        queued = late & known & self._first
        by_host |= queued
        self.host[queued] = -1
        self.launch = np.where(by_host, self.start - usual_launch, self.launch)
        self.fixed = by_host & (self.host < 0)
        left, own = late & ~by_host, small | in_call
        # The rest counts for what the event waited for; where that is not known, for whatever comes last.
        self.launched = np.where(by_host, usual_launch, launched + np.where((own & by_launch) | left, rest, 0))
        self.paused = paused + np.where((own & ~by_launch) | left, rest, 0)
        self.unexplained = np.where(left & by_launch, rest, 0)  # part of ``launched``
        self._usual_launched = np.where(in_call, self.launched, usual_launch)
        self._usual_paused = np.full(len(rest), usual_pause, np.int64)
        self.launches = [np.sort(self.launch[self.host == lane]) for lane in range(self.host_lanes)]

    def _other_streams(self, late: I64, within: I64) -> tuple[I64, I64]:
        """For events that began late (places) the event of the same GPU that ended last before, and the time since;
        -1 where none ended just before, ``within`` (by place) so many ns."""
        source, since = np.full(len(self.rows), -1, np.int64), np.zeros(len(self.rows), np.int64)
        gpu = self.trace.device.gpu[self.rows]
        for own in np.unique(gpu[late]).tolist():
            here = np.flatnonzero(gpu == own)
            here = here[np.argsort(self.end[here], kind="stable")]
            mine = late[gpu[late] == own]
            at = np.searchsorted(self.end[here], self.start[mine], side="right") - 1
            found = here[np.maximum(at, 0)]
            apart = self.start[mine] - self.end[found]
            good = (at >= 0) & (apart <= within[mine]) & (self.lane[found] != self.lane[mine]) & (self.work[found] > 0)
            source[mine[good]], since[mine[good]] = found[good], apart[good]
        return source, since

    def _find_waits(self, *, unclear: bool = False) -> Waits:
        """``unclear``: pauses that may be waits are."""
        trace = self.trace
        host = trace.host
        syncs = host_rows(trace, SYNCHRONIZE)
        syncs = syncs[self.host_of_line[host.line[syncs]] >= 0]
        held = np.flatnonzero((self.host >= 0) & (self.called - self.launch >= _HELD_NS))
        parts = [(self.host_of_line[host.line[syncs]], host.start_ns[syncs], host.end_ns[syncs]),
                 (self.host[held], self.launch[held], self.called[held])]
        if detect_framework(trace) != "pytorch":  # whose waits are all calls of the CUDA runtime
            parts += self._silent_waits(unclear)
        lane, begin, end = (np.concatenate(column).astype(np.int64) for column in zip(*parts, strict=True))
        on = self._ended_last(lane, begin, end + (_LATENCY_NS if unclear else 0))
        keep = on >= 0
        out = [np.stack((lane, begin, end, on))[:, keep]]
        self.with_loop = np.zeros((3, 0), np.int64)  # waits for a batch that is made when it is asked for
        ahead = bool(name_mask(trace, _AHEAD).any())
        for loop in self.loops:
            lanes = {int(self.host_of_line[loop.line])} if loop.line >= 0 else {
                own for gpu, own in self.host_of_gpu.items() if trace.gpus[gpu].host == loop.host}
            for own in lanes - {-1}:
                waits = loop.waits
                usual_ns = self._steps_s * 1e9 * _INPUT_WAIT_SHARE
                long = waits.end - waits.start >= max(_INPUT_WAIT_NS, usual_ns)
                found = np.stack((np.full(int(long.sum()), own), waits.start[long], waits.end[long]))
                if ahead:
                    out.append(np.concatenate((found, np.full((1, found.shape[1]), -1))))
                else:
                    self.with_loop = np.concatenate((self.with_loop, found), axis=1)
        out.append(np.array([[lane, LONG_AGO, LONG_AGO, -1] for lane in range(self.host_lanes)], np.int64).reshape(
            -1, 4).T)
        return self._in_turn(np.concatenate(out, axis=1))

    def _silent_waits(self, unclear: bool) -> list[tuple[I64, I64, I64]]:
        """Where calls that wait are not recorded: a lane that launches nothing until all its GPUs' work is done, and
        then soon goes on, has waited for it; one that launches nothing for a time although its GPUs have work for
        half as long again is held back by them: it is no more ahead than it may be.

        Where a lane goes on later than soon, the pauses between the same two kernels tell: a host that waits goes on
        a steady time after the GPU, a busy one a steady time after its last launch. Where both are as steady it is
        unclear."""
        out = []
        device = self.trace.device
        for lane in range(self.host_lanes):
            gpus = [gpu for gpu, of in self.host_of_gpu.items() if of == lane]
            mine = np.flatnonzero(np.isin(device.gpu[self.rows], gpus))
            unknown, mine = mine[self.launch[mine] == LONG_AGO], mine[self.launch[mine] > LONG_AGO]
            mine = mine[np.argsort(self.launch[mine], kind="stable")]
            unknown = unknown[np.argsort(self.start[unknown], kind="stable")]
            launches = self.launch[mine]
            called = np.maximum.accumulate(self.called[mine])
            next_ = np.append(launches[1:], EVER)[:len(mine)]
            begun = np.searchsorted(self.start[unknown], next_)
            reach = np.maximum(np.maximum.accumulate(self.end[mine]),
                               np.append(LONG_AGO, np.maximum.accumulate(self.end[unknown]))[begun])
            if self._by_host:
                edges = np.append(np.sort(self._steps_ns), EVER)
                next_ = np.minimum(next_, edges[np.searchsorted(edges, reach)])
            since, wait = next_ - reach, reach - called
            drained = np.flatnonzero((since >= -_LATENCY_NS) & (wait >= _HELD_NS) & (next_ < EVER))
            name = device.name[self.rows[mine]].astype(np.int64)
            between = np.unique(name[drained] << 32 | name[np.minimum(drained + 1, len(name) - 1)],
                                return_inverse=True)[1] if len(drained) else drained
            after_gpu, after_launch = _spread(between, since[drained]), _spread(between, (wait + since)[drained])
            may_wait = _CLEARLY * after_launch >= after_gpu
            soon = since[drained] <= wait[drained] // 4
            waited = may_wait & (since[drained] >= 0) & (soon | (_CLEARLY * after_gpu < after_launch))
            if not unclear:
                self.unclear_ns += int(wait[drained[may_wait & ~waited]].sum())
            drained = drained[may_wait if unclear else waited]
            ahead = np.append(self.start[mine][1:] - launches[1:], 0)[:len(mine)]
            held = (next_ - called >= _HELD_NS) & (ahead >= (next_ - called) // 2)
            end = next_.copy()
            end[drained] = np.minimum(next_[drained], reach[drained] + _LATENCY_NS)
            held[drained] = True
            out.append((np.full(int(held.sum()), lane), called[held], end[held]))
        return out

    def _ended_last(self, lane: I64, begin: I64, end: I64) -> I64:
        """For each wait the event (place) of its lane's GPUs that ended last in it; -1 where none did."""
        out = np.full(len(lane), -1, np.int64)
        gpu = self.trace.device.gpu[self.rows]
        for own in np.unique(lane).tolist():
            gpus = [number for number, of in self.host_of_gpu.items() if of == own]
            here = np.flatnonzero(np.isin(gpu, gpus) & (self.work > 0))
            here = here[np.argsort(self.end[here], kind="stable")]
            mine = np.flatnonzero(lane == own)
            if not len(here):
                continue
            at = np.searchsorted(self.end[here], end[mine], side="right") - 1
            found = here[np.maximum(at, 0)]
            good = (at >= 0) & (self.end[found] > begin[mine]) & (self.launch[found] <= begin[mine])
            out[mine[good]] = found[good]
        return out

    def _in_turn(self, found: I64) -> Waits:
        """Waits by lane and end; of each what lies after the one before, and after the last launch meanwhile."""
        lane, begin, end, on = found[:, np.lexsort((found[2], found[0]))]
        for own, launches in enumerate(self.launches):
            mine = np.flatnonzero((lane == own) & (end > LONG_AGO))
            at = np.searchsorted(launches, end[mine]) - 1
            last = launches[np.maximum(at, 0)] if len(launches) else begin[mine]
            begin[mine] = np.maximum(begin[mine], np.where(at >= 0, last, begin[mine]))
        same = np.concatenate(([False], lane[1:] == lane[:-1]))
        begin = np.where(same, np.maximum(begin, np.roll(end, 1)), begin)
        # What ended before the lane itself began to wait was not waited for.
        some = (end == LONG_AGO) | ((end > begin) & ((on < 0) | (self.end[on] > begin)))
        lane, begin, end, on = lane[some], begin[some], end[some], on[some]
        row = np.where(on >= 0, self.rows[on] if len(self.rows) else -1, -1)
        return Waits(lane, begin, end, on, row)

    def _find_collectives(self, gpu_timelines: Sequence[GpuTimeline]) -> None:
        """``collective`` is an event's number among those matched across GPUs, else -1; ``transfer`` the time that
        it lasts once all have come."""
        self.collective = np.full(len(self.rows), -1, np.int64)
        self.transfer = self.work.copy()
        self.collectives = 0
        _, rows = of_gpus(self.trace, gpu_timelines)
        rows = [own[self._place[own] >= 0] for own in rows]
        for own in by_operation(self.trace, rows).values():
            found = matched(self.trace, [r for r in own if len(r)])
            if isinstance(found, str):
                continue
            place = self._place[found]
            place = place[(place >= 0).all(axis=1)]
            begun = self.start[place].max(axis=1, keepdims=True) if len(place) else self.start[place]
            self.collective[place] = self.collectives + np.arange(len(place))[:, None]
            self.transfer[place] = np.maximum(self.end[place] - begun, 0)
            self.collectives += len(place)
        members = np.flatnonzero(self.collective >= 0)
        self.begun = np.zeros(self.collectives, np.int64)
        np.maximum.at(self.begun, self.collective[members], self.start[members])

    # -- pieces ---------------------------------------------------------------------------------------

    def _cut(self) -> None:
        """Cut the streams where lanes wait for each other, and note the order in which pieces are gone through."""
        waits, n = self.waits, len(self.rows)
        self.after = np.zeros(n, np.int64)  # the last wait of the host before an event's launch; beyond them: no host
        for lane in range(self.host_lanes):
            own = np.flatnonzero(waits.lane == lane)
            mine = np.flatnonzero(self.host == lane)
            self.after[mine] = own[np.searchsorted(waits.end[own], self.launch[mine], side="right") - 1]
        # An event of unknown launch cuts nothing: it follows the one before.
        self.after[self.fixed] = len(waits.lane)
        placed = (self.host >= 0) | self._first
        after = self.after[np.maximum.accumulate(np.where(placed, np.arange(n), 0))]
        begins = self._first | (self.source >= 0) | (self.collective >= 0)
        begins[1:] |= (after[1:] != after[:-1]) | (self.collective[:-1] >= 0)
        ends = np.concatenate((waits.on[waits.on >= 0], self.source[self.source >= 0], self._at_edges().ravel()))
        ends = ends[(ends >= 0) & (ends < n - 1)]
        begins[ends + 1] = True
        self.head = np.flatnonzero(begins)
        self.tail = np.append(self.head[1:], n) - 1
        self.piece = np.cumsum(begins) - 1
        heads = self.head
        pieces, count = len(heads), len(waits.lane)
        when = np.concatenate((waits.end, self.start[heads], self.begun))
        # At one instant waits come first, collectives last: those that launch, and those that are arrived at.
        self.order = np.lexsort((np.repeat((0, 1, 2), (count, pieces, self.collectives)), when)).tolist()
        self.piece_lane = self.lane[heads].tolist()
        self._piece_host = self.host[heads].tolist()
        self.piece_wait = after[heads].tolist()
        self.piece_source = np.where(self.source[heads] >= 0, self.piece[self.source[heads]], -1).tolist()
        self.piece_collective = self.collective[heads].tolist()
        self.wait_on = np.where(waits.on >= 0, self.piece[waits.on], -1).tolist()

    def _at_edges(self) -> I64:
        """By edge of the replayed time and stream the last event begun before, -1: none; shape (edges, streams)."""
        edges = np.stack((self.spans.start, self.spans.end), axis=1).ravel()
        out = np.full((len(edges), self.lanes), -1, np.int64)
        firsts = np.append(np.flatnonzero(self._first), len(self.rows))
        for lane in range(self.lanes):
            a, b = firsts[lane], firsts[lane + 1]
            at = np.searchsorted(self.start[a:b], edges) - 1
            out[:, lane] = np.where(at >= 0, a + at, -1)
        self._edges, self._edge_events = edges, out
        return out

    # -- a replay -------------------------------------------------------------------------------------

    def _run(self, cure: Cure | None, *, exact: bool) -> int:
        """The time of all steps together. ``exact``: with the recorded latencies, else with the usual ones."""
        waits = self.waits
        left = self._left(cure)
        paused = self.paused if exact else np.where(self._first, 0, self._usual_paused)
        launched = self.launched if exact else self._usual_launched
        if cure is not None and cure.pauses:
            paused = np.where(paused <= 2 * _LATENCY_NS, 0, paused)
            launched = np.minimum(launched, _LATENCY_NS)
        paused = np.where(self._first, 0, paused)
        removed = self._removed(cure)
        launch = self.launch - self._removed_until(removed, self.host, self.launch) if removed else self.launch
        work = _scaled(self.work, left)
        transfer = _scaled(self.transfer, left)
        # Ends within a piece: the latest over its launches of the launch and all work from there on.
        add = paused + work
        done = np.cumsum(add)
        by_launch = np.where(self.launch > LONG_AGO, launch + launched + work - done, LONG_AGO)
        latest = (np.maximum.reduceat(by_launch, self.head) + done[self.tail]).tolist()
        whole = (done[self.tail] - done[self.head] + add[self.head]).tolist()
        first_pause = paused[self.head].tolist()
        since = (self.since_source if exact else np.minimum(self.since_source, _LATENCY_NS))[self.head].tolist()
        moved = transfer[self.head].tolist()
        begin = (waits.begin - self._removed_until(removed, waits.lane, waits.begin)).tolist()
        end = (waits.end - self._removed_until(removed, waits.lane, waits.end)).tolist()
        returns = waits.end - np.where(waits.on >= 0, self.end[waits.on], waits.end)
        returns = (returns if exact else np.minimum(returns, _RETURNS_NS)).tolist()
        gone = np.zeros(len(waits.lane), bool) if cure is None or not len(cure.waits) else (
            (waits.on >= 0) & ((cure.waits < 0).any() | np.isin(waits.row, cure.waits)))
        supplied = self._supplied(cure)
        ends, sooner, gained = self._solve(latest, whole, first_pause, since, moved, begin, end, returns, gone.tolist(),
                                   supplied, cure is not None and cure.together)
        return self._steps_time(np.array(ends, np.int64), np.array(sooner, np.int64), np.array(gained, np.int64),
                                removed)

    def _solve(
        self, latest: list[int], whole: list[int], first_pause: list[int], since: list[int], moved: list[int],
        begin: list[int], end: list[int], returns: list[int], gone: list[bool], supplied: list[int], together: bool,
    ) -> tuple[list[int], list[int], list[int]]:
        """When each piece ends, by how much each host lane is ahead after each of its waits, and how much more it is
        by collectives that came after the wait and before the next."""
        count, pieces = len(begin), len(latest)
        lane_of, wait_of, source, collective = (
            self.piece_lane, self.piece_wait, self.piece_source, self.piece_collective)
        piece_host = self._piece_host
        on, host_lane = self.wait_on, self.waits.lane.tolist()
        ended, ends = [LONG_AGO] * self.lanes, [LONG_AGO] * pieces
        sooner, ahead = [0] * (count + 1), [0] * (self.host_lanes + 1)
        arrived: list[list[tuple[int, int]]] = [[] for _ in range(self.collectives)]
        # What the lane of a GPU gains that no longer comes last to collectives; in all, and until each wait.
        gained, until = [0] * (self.host_lanes + 1), [0] * (count + 1)
        for node in self.order:
            if node < count:
                lane = host_lane[node]
                at = begin[node] - ahead[lane]
                if on[node] >= 0:
                    ready = LONG_AGO if gone[node] else ends[on[node]] + returns[node]
                else:
                    ready = supplied[node]
                sooner[node] = ahead[lane] = end[node] - (ready if ready > at else at)
                until[node] = gained[lane]
            elif node < count + pieces:
                p = node - count
                lane = lane_of[p]
                time = ended[lane] + whole[p]
                launched = latest[p] - sooner[wait_of[p]] - gained[piece_host[p]] + until[wait_of[p]]
                if launched > time:
                    time = launched
                if source[p] >= 0:
                    other = ends[source[p]] + since[p] + whole[p] - first_pause[p]
                    if other > time:
                        time = other
                if collective[p] >= 0:
                    arrived[collective[p]].append((time - whole[p] + first_pause[p], p))
                ended[lane] = ends[p] = time
            else:
                c = node - count - pieces
                came = arrived[c]
                begun, last = max(came)
                if together and len(came) > 1:
                    others = sorted(came)[:-1]
                    late, begun = begun, (others[(len(others) - 1) // 2][0] + others[len(others) // 2][0]) // 2
                    lane = piece_host[last]
                    if lane >= 0:
                        gained[lane] += late - begun
                        ahead[lane] += late - begun
                for _, p in came:
                    ended[lane_of[p]] = ends[p] = begun + moved[p]
        last_wait = dict(zip(host_lane, range(count), strict=True))
        ends_of_lanes = set(last_wait.values())
        for lane, wait in last_wait.items():
            until[wait] = gained[lane] - until[wait]
        return ends, sooner, [until[wait] if wait in ends_of_lanes else 0 for wait in range(count)]

    def _steps_time(self, ends: I64, sooner: I64, gained: I64, removed: dict[int, Spans]) -> int:
        """The time from edge to edge of the steps: an edge is when the GPUs have done what they had begun by then and,
        where calls of the host mark the steps, the host was there."""
        events = self._edge_events
        reached = np.where(events >= 0, ends[self.piece[events]], LONG_AGO).max(axis=1)
        waits = self.waits
        for lane in range(self.host_lanes if self._by_host else 0):
            own = np.flatnonzero(waits.lane == lane)
            wait = own[np.searchsorted(waits.end[own], self._edges, side="right") - 1]
            reached = np.maximum(reached, self._edges - sooner[wait] - gained[wait] * (self._edges > self._edges[0])
                                 - self._removed_until(removed, np.full(len(self._edges), lane), self._edges))
        begun = np.where(reached > LONG_AGO // 2, reached, self._edges)
        return int((begun[1::2] - begun[::2]).sum())

    # -- a cure ---------------------------------------------------------------------------------------

    def _left(self, cure: Cure | None) -> npt.NDArray[np.float64] | None:
        """What is left of each event's duration (ratio); None: all."""
        if cure is None or not cure.scaled:
            return None
        left = np.ones(len(self.rows))
        for rows, ratio in cure.scaled:
            place = self._place[rows]
            inside = place >= 0
            left[place[inside]] *= ratio[inside] if isinstance(ratio, np.ndarray) else ratio
        return left

    def _removed(self, cure: Cure | None) -> dict[int, Spans]:
        """By host lane the time that it no longer needs, waits left out."""
        if cure is None:
            return {}
        parts: dict[int, list[Spans]] = {}
        for gpu, spans in cure.host.items():
            if gpu in self.host_of_gpu:
                parts.setdefault(self.host_of_gpu[gpu], []).append(spans)
        if cure.launching:
            for lane, launches in enumerate(self.launches):
                near = np.flatnonzero(np.diff(launches) <= _LAUNCHING_GAP_NS)
                parts.setdefault(lane, []).append(union(launches[near], launches[near + 1]))
        if cure.input_left < 1.0:
            for lane in np.unique(self.with_loop[0]).tolist():
                _, begin, end = self.with_loop[:, self.with_loop[0] == lane]
                begin = begin + (cure.input_left * (end - begin)).astype(np.int64)
                parts.setdefault(lane, []).append(union(begin, end))
        waits, out = self.waits, {}
        replayed = union(self.spans.start[:1], self.spans.end[-1:])
        for lane, several in parts.items():
            own = (waits.lane == lane) & (waits.end > LONG_AGO)
            out[lane] = intersect(subtract(merge(EMPTY, *several), union(waits.begin[own], waits.end[own])), replayed)
        return {lane: spans for lane, spans in out.items() if len(spans.start)}

    def _removed_until(self, removed: dict[int, Spans], lane: I64, t: I64) -> I64:
        """How much of a lane's removed time lies before each instant."""
        out = np.zeros(len(t), np.int64)
        for own, spans in removed.items():
            mine = np.flatnonzero(lane == own)
            out[mine] = coverage(spans, np.full(len(mine), LONG_AGO), t[mine])
        return out

    def _supplied(self, cure: Cure | None) -> list[int]:
        """For each wait for a batch when the batch is there: as recorded, less what all batches until then come
        sooner."""
        waits = self.waits
        out = waits.end.copy()
        if cure is not None and cure.input_left < 1.0:
            for lane in range(self.host_lanes):
                own = np.flatnonzero((waits.lane == lane) & (waits.on < 0) & (waits.end > LONG_AGO))
                out[own] -= np.cumsum((1 - cure.input_left) * (waits.end[own] - waits.begin[own])).astype(np.int64)
        return out.tolist()


def _replayed_spans(trace: Trace, gpu_timelines: Sequence[GpuTimeline], steps: Steps | None) -> Spans:
    """The steps; where there are very many events as many steps from the middle on as can be replayed; without steps
    the time from the first device event to the last."""
    device = trace.device
    if steps is None:
        windows = [timeline.window_ns for timeline in gpu_timelines]
        return union([min(lo for lo, _ in windows)], [max(hi for _, hi in windows)])
    edges = steps.edges_ns
    events = np.searchsorted(device.start_ns, edges.ravel()).reshape(-1, 2)
    if events[-1, 1] - events[0, 0] > _MAX_EVENTS:
        first = len(edges) // 2
        last = int(np.searchsorted(events[:, 1], events[first, 0] + _MAX_EVENTS, side="right"))
        first = int(np.searchsorted(events[:, 0], events[max(last - 1, first), 1] - _MAX_EVENTS))
        edges = edges[min(first, last - 1):max(last, first + 1)]
    return union(edges[:, 0], edges[:, 1])


def _usual(latencies: I64) -> int:
    """The mean of those that are no more than a latency."""
    some = latencies[latencies <= _LATENCY_NS]
    return int(some.mean()) if len(some) else 0


def _spread(group: I64, value: I64) -> I64:
    """For each value the distance between the quartiles of its group's values, and no less than they vary in any job;
    in a group of few it is not known and as small."""
    order = np.lexsort((value, group))
    _, first, own, count = np.unique(group[order], return_index=True, return_inverse=True, return_counts=True)
    ranked = value[order]
    spread = ranked[first + 3 * count // 4] - ranked[first + count // 4]
    out = np.empty_like(value)
    out[order] = np.where(count >= _SEVERAL, np.maximum(spread, _STEADY_NS), _STEADY_NS)[own]
    return out


def _scaled(times: I64, left: npt.NDArray[np.float64] | None) -> I64:
    return times if left is None else (times * left).astype(np.int64)

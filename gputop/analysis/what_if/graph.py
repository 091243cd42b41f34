"""What waits for what in the recorded window: the graph that a replay goes through.

Events of a stream run one after the other, each no sooner than its launch (and a latency). Where an event began later
than both, it waited for another stream: an edge from the event of the same GPU that ended just before. Threads that
launch to the same GPUs are one host lane: it goes on as recorded, the time between calls included, but where it waited
for a GPU or for a batch it goes on when these are ready. A collective moves data once its last GPU has come.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from gputop.analysis.gpu.collectives import by_operation, matched, of_gpus
from gputop.analysis.gpu.device_time import GpuTimeline
from gputop.analysis.steps.model import Steps
from gputop.analysis.steps.training_loops import training_loops
from gputop.analysis.what_if.host_waits import SYNCHRONIZE
from gputop.trace.intervals import EMPTY, Spans, intersect, merge, union
from gputop.trace.lookups import alphabetical, detect_framework, host_rows, name_mask
from gputop.trace.model import I64, Kind, Trace

# A launch takes effect, a stream goes on, and a wait returns within some microseconds (2-10 µs measured; more under
# load). What is longer has another reason.
LATENCY_NS = 20_000
RETURNS_NS = 50_000  # a wait, in a loaded host
_HELD_NS = 100_000  # a launching call of this length waits for something
_MUCH = 10  # times the time since another stream's event: most of the wait was for it
# So many pauses tell how steady they are; one spread is clearly the larger by this factor, and by a latency.
_SEVERAL, _CLEARLY, _STEADY_NS = 8, 4, 5_000
# A longer wait for a batch ends when the batch is there, however early the loop asked; to fetch one that is ready
# takes PyTorch up to 2 ms of a step of 174 ms.
_INPUT_WAIT_NS, _INPUT_WAIT_SHARE = 100_000, 0.02
LONG_AGO, EVER = -(1 << 60), 1 << 60
MAX_EVENTS = 100_000  # device events that are replayed: so many whole steps stand for the window
# Iterators that work on threads of their own, beside the loop.
_AHEAD = r"Iterator::.*(?:Prefetch|Parallel|MapAndBatch)|enumerate\(DataLoader\)#_Multi"


class Waits(NamedTuple):
    """When host lanes wait, one after the other in each lane; the first of each lane is before everything.

    ``on`` is the place of the event that is waited for, -1 for a batch.
    """

    lane: I64
    begin: I64
    end: I64
    on: I64


class Graph:
    """The graph of one trace. Times are nanoseconds of the trace's clock."""

    def __init__(self, trace: Trace, gpu_timelines: Sequence[GpuTimeline], steps: Steps | None,
                 max_events: int = MAX_EVENTS) -> None:
        self.trace = trace
        self.spans = _replayed_spans(trace, gpu_timelines, steps, max_events)
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
        order = np.lexsort((
            np.append(self._rank, -1)[device.launch_line[rows]], alphabetical(trace.names, device.name[rows]),
            device.launch_ns[rows], device.end_ns[rows], device.start_ns[rows], lane))
        self.rows, self.lane, self.lanes = rows[order], lane[order], len(lanes)
        self.unclear_ns = 0
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

    # -- events and their launches --------------------------------------------------------------------

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
        calls = (self.called - self.launch)[known & (device.kind[self.rows] == Kind.COMPUTE)]
        self.usual_call = int(np.median(calls)) if len(calls) else 0  # what a call takes that waits for nothing

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
        small = rest <= LATENCY_NS
        in_call = ~small & known & by_launch & (self.start <= self.called + LATENCY_NS)
        late = ~(small | in_call) | (self._first & ~known)
        # A call that lasts may itself wait for another stream, as one that copies to pageable memory. What was late by
        # much may go on later after what it waited for than what was late by little.
        within = np.maximum(np.where(in_call, RETURNS_NS, LATENCY_NS), rest // _MUCH)
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
        # A call whose kernel ran meanwhile did not wait for room in the queue, it was slow by itself; one that copies
        # from or to the host may wait for the copy.
        kind = trace.device.kind[self.rows]
        slow = (self.end <= self.called) & (kind != Kind.H2D) & (kind != Kind.D2H)
        held = np.flatnonzero((self.host >= 0) & (self.called - self.launch >= _HELD_NS) & ~slow)
        parts = [(self.host_of_line[host.line[syncs]], host.start_ns[syncs], host.end_ns[syncs]),
                 (self.host[held], self.launch[held], self.called[held])]
        if detect_framework(trace) != "pytorch":  # whose waits are all calls of the CUDA runtime
            parts += self._silent_waits(unclear)
        lane, begin, end = (np.concatenate(column).astype(np.int64) for column in zip(*parts, strict=True))
        on = self._ended_last(lane, begin, end + (LATENCY_NS if unclear else 0))
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
        out, pauses = [], EMPTY
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
            drained = np.flatnonzero((since >= -LATENCY_NS) & (wait >= _HELD_NS) & (next_ < EVER))
            name = device.name[self.rows[mine]].astype(np.int64)
            between = np.unique(name[drained] << 32 | name[np.minimum(drained + 1, len(name) - 1)],
                                return_inverse=True)[1] if len(drained) else drained
            after_gpu, after_launch = _spread(between, since[drained]), _spread(between, (wait + since)[drained])
            may_wait = _CLEARLY * after_launch >= after_gpu
            soon = since[drained] <= wait[drained] // 4
            waited = may_wait & (since[drained] >= 0) & (soon | (_CLEARLY * after_gpu < after_launch))
            if not unclear:
                unsure = drained[may_wait & ~waited]
                pauses = merge(pauses, union(called[unsure], reach[unsure]))
            drained = drained[may_wait if unclear else waited]
            ahead = np.append(self.start[mine][1:] - launches[1:], 0)[:len(mine)]
            held = (next_ - called >= _HELD_NS) & (ahead >= (next_ - called) // 2)
            end = next_.copy()
            end[drained] = np.minimum(next_[drained], reach[drained] + LATENCY_NS)
            held[drained] = True
            out.append((np.full(int(held.sum()), lane), called[held], end[held]))
        if not unclear:
            self.unclear_ns = intersect(pauses, self.spans).total  # once, however many lanes pause together
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
        for own in range(self.host_lanes):
            mine = np.flatnonzero((lane == own) & (end > LONG_AGO))
            begin[mine] = self._last_launch(own, begin[mine], end[mine])
        same = np.concatenate(([False], lane[1:] == lane[:-1]))
        begin = np.where(same, np.maximum(begin, np.roll(end, 1)), begin)
        # What ended before the lane itself began to wait was not waited for.
        some = (end == LONG_AGO) | ((end > begin) & ((on < 0) | (self.end[on] > begin)))
        lane, begin, end, on = lane[some], begin[some], end[some], on[some]
        return Waits(lane, begin, end, on)

    def _launches_next(self, lane: int, at: I64) -> I64:
        """The threads (lines) that launch next in a host lane after each instant, -1: none."""
        mine = np.flatnonzero((self.host == lane) & (self.launch > LONG_AGO))
        mine = mine[np.argsort(self.launch[mine], kind="stable")]
        line = np.append(self.trace.device.launch_line[self.rows[mine]].astype(np.int64), -1)
        return line[np.searchsorted(self.launch[mine], at)]

    def _last_launch(self, lane: int, begin: I64, end: I64) -> I64:
        """For each call of a host lane when the lane launched last before its end, no sooner than it began."""
        launches = np.append(LONG_AGO, self.launches[lane])
        return np.maximum(begin, launches[np.searchsorted(launches, end) - 1])

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



def _replayed_spans(trace: Trace, gpu_timelines: Sequence[GpuTimeline], steps: Steps | None, max_events: int) -> Spans:
    """The steps; where there are very many events as many steps from the middle on as can be replayed; without steps
    the time from the first device event to the last."""
    device = trace.device
    if steps is None:
        windows = [timeline.window_ns for timeline in gpu_timelines]
        return union([min(lo for lo, _ in windows)], [max(hi for _, hi in windows)])
    edges = steps.edges_ns
    events = np.searchsorted(device.start_ns, edges.ravel()).reshape(-1, 2)
    if events[-1, 1] - events[0, 0] > max_events:
        first = len(edges) // 2
        last = int(np.searchsorted(events[:, 1], events[first, 0] + max_events, side="right"))
        first = int(np.searchsorted(events[:, 0], events[max(last - 1, first), 1] - max_events))
        edges = edges[min(first, last - 1):max(last, first + 1)]
    return union(edges[:, 0], edges[:, 1])


def _usual(latencies: I64) -> int:
    """The mean of those that are no more than a latency."""
    some = latencies[latencies <= LATENCY_NS]
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

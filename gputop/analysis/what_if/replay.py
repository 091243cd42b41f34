"""A replay of the recorded window: how long its steps would take with a cure applied.

Between two points where lanes of :mod:`~gputop.analysis.what_if.graph` wait for each other an event's end is the
maximum over launches of a sum of durations: such stretches ("pieces") are reduced by NumPy at once, and only the pieces
are gone through one by one, in order of their recorded times. That is a max-plus system, solved exactly, in time linear
in events.

The same idea: Zhu et al., Daydream (USENIX ATC 2020); ByteDance's what-if analysis of stragglers (OSDI 2025).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from gputop.analysis.gpu.device_time import GpuTimeline
from gputop.analysis.steps.model import Steps
from gputop.analysis.what_if.cure import AS_RECORDED, Cure
from gputop.analysis.what_if.dependencies import LATENCY_NS, NEG_INF, RETURNS_NS
from gputop.analysis.what_if.graph import Graph, build_graph, with_ambiguous_waits
from gputop.trace.intervals import EMPTY, Spans, coverage, intersect, merge, subtract, union
from gputop.trace.model import I64, Trace

TOLERANCE = 0.03  # share of the step; Daydream's own errors are of this size
MIN_AMBIGUOUS = 0.01  # share of the step
_LAUNCHING_GAP_NS = 1_000_000  # as of the breakdown's part "launch"

_Removed = Mapping[int, Spans]  # by host lane the time that it no longer needs


class Replay(Struct, frozen=True, dict=True):
    """The graph of one trace and what replays of the unchanged steps give: ``recorded_ns`` is their time, and
    ``modeled_ns`` that which the graph alone gives, with usual latencies."""

    graph: Graph
    recorded_ns: int
    modeled_ns: int

    @property
    def spans(self) -> Spans:
        return self.graph.spans

    @property
    def error(self) -> float:
        """Ratio of the steps by which the graph alone, with usual latencies, misses the recorded time."""
        return abs(self.modeled_ns - self.recorded_ns) / max(self.spans.total, 1)

    @property
    def ambiguous_wait_ratio(self) -> float:
        """Share of the steps in which the trace does not tell whether the host waits for the GPUs or is busy, where it
        counts; else 0."""
        share = self.graph.ambiguous_ns / max(self.spans.total, 1)
        return share if share >= MIN_AMBIGUOUS else 0.0

    @property
    def cost(self) -> int:
        """Cost of one replay, in units of about 0.07 µs: each event, and each piece or wait that is gone through."""
        return len(self.graph.events.row) + 15 * len(self.graph.pieces.order)

    def saved(self, cure: Cure) -> float:
        """Share of the step that the cure saves."""
        return (self.recorded_ns - steps_time_ns(self.graph, run_replay(self.graph, cure))) / max(self.spans.total, 1)

    def saved_if_waiting(self, cure: Cure) -> float:
        """The same where the host, in each pause in which the GPUs ran out of work, waited for them to do so: such a
        pause looks the same whether the host waits, in a call that is not recorded, or is busy."""
        return self._waiting.saved(cure)

    @cached_property
    def _waiting(self) -> Replay:
        return replay_graph(with_ambiguous_waits(self.graph), self.modeled_ns)


def replay_window(trace: Trace, gpu_timelines: Sequence[GpuTimeline], steps: Steps | None) -> Replay | None:
    """The replay of a trace's steps, or of its window; None where no device event runs in it."""
    graph = build_graph(trace, gpu_timelines, steps)
    return None if graph is None else replay_graph(graph)


def replay_graph(graph: Graph, modeled_ns: int | None = None) -> Replay:
    """The replay of a graph; ``modeled_ns``: what the graph alone gives, where that is known."""
    if modeled_ns is None:
        modeled_ns = steps_time_ns(graph, run_replay(graph, AS_RECORDED, exact=False))
    return Replay(graph, steps_time_ns(graph, run_replay(graph, AS_RECORDED)), modeled_ns)


# -- a replay -----------------------------------------------------------------------------------------------


class _Durations(NamedTuple):
    """Durations by event, in ns: its ``work``, the pause before it and it (``added``), and the sum of all until its end
    (``elapsed``). ``by_launch`` is its end by its launch alone, less ``elapsed``; ``since_source`` the time from the
    end of the event of another stream that it waits for. All as the cure leaves them."""

    work: I64
    added: I64
    elapsed: I64
    by_launch: I64
    since_source: I64


class _PieceTimes(NamedTuple):
    """Times by piece, in ns: its end by its launches alone, were its host lane as recorded (``launched``), its length,
    the pause before its head, the time since the source of its head, and the transfer of its collective."""

    launched: list[int]
    length: list[int]
    head_pause: list[int]
    since_source: list[int]
    transfer: list[int]


class _WaitTimes(NamedTuple):
    """Times by wait of a host lane, in ns: its begin and end less the host time that is removed before them, how long
    after the end of its event it returns, whether its call is canceled, and when the batch that it waits for is
    ready."""

    begin: list[int]
    end: list[int]
    returns: list[int]
    canceled: list[bool]
    input_ready: list[int]


class ReplayRun(Struct, frozen=True):
    """A replay, in ns. ``ends`` is when each piece ends, ``earlier`` by how much earlier than ``durations.by_launch``
    its events were launched, ``ahead`` by how much a host lane is ahead of the recording after each wait, and
    ``gained`` what it gains in addition by collectives before its next wait."""

    durations: _Durations
    removed: _Removed
    ends: I64
    earlier: I64
    ahead: I64
    gained: I64


def run_replay(graph: Graph, cure: Cure, *, exact: bool = True) -> ReplayRun:
    """Go through the graph with a cure. ``exact``: with the recorded latencies, else with the usual ones.

    1. Scale the events' durations, remove the host's time, cancel its calls.
    2. Reduce each piece to its length and to its end by its launches alone.
    3. Solve for the pieces' ends and the host lanes' waits (:func:`_solve`).
    """
    waits, pieces = graph.waits, graph.pieces
    ratio, removed = _ratio_left(graph, cure), _removed_time(graph, cure)
    durations = _durations(graph, cure, ratio, removed, exact)
    work, added, elapsed, by_launch, since_source = durations
    head, tail = pieces.head, pieces.tail
    launched = np.maximum.reduceat(by_launch, head) + elapsed[tail]
    canceled = np.zeros(len(waits.lane), bool)  # those that end in a call that is no longer made
    for lane, _, call_begin, call_end in _canceled_calls(graph, cure):
        of_lane = np.flatnonzero((waits.lane == lane) & (waits.on >= 0))
        within = union(call_begin, call_end + LATENCY_NS)
        canceled[of_lane] = coverage(within, waits.end[of_lane] - 1, waits.end[of_lane]) > 0
    begin = waits.begin - _removed_before(removed, waits.lane, waits.begin)
    end = waits.end - _removed_before(removed, waits.lane, waits.end)
    begin = np.where(canceled, np.minimum(begin + graph.launches.usual_call_ns, end), begin)
    returns = waits.end - np.where(waits.on >= 0, graph.events.end[waits.on], waits.end)
    returns = returns if exact else np.minimum(returns, RETURNS_NS)
    ends, by_launches, ahead, gained = (np.array(times, np.int64) for times in _solve(
        graph,
        _PieceTimes(launched.tolist(), (elapsed[tail] - elapsed[head] + added[head]).tolist(),
                    (added - work)[head].tolist(), since_source[head].tolist(),
                    _scaled(graph.collectives.transfer, ratio)[head].tolist()),
        _WaitTimes(begin.tolist(), end.tolist(), returns.tolist(), canceled.tolist(), _input_ready(graph, cure)),
        together=cure.together))
    return ReplayRun(durations, removed, ends, launched - by_launches, ahead, gained)


def _durations(graph: Graph, cure: Cure, ratio: npt.NDArray[np.float64] | None, removed: _Removed, exact: bool,
               ) -> _Durations:
    events, launches, delays = graph.events, graph.launches, graph.delays
    pause = delays.after_previous if exact else delays.usual_after_previous
    latency = delays.after_launch if exact else delays.usual_after_launch
    if cure.pauses:
        pause = np.where(pause <= 2 * LATENCY_NS, 0, pause)
        latency = np.minimum(latency, LATENCY_NS)
    launch = launches.begin - _removed_before(removed, launches.lane, launches.begin)
    work = _scaled(events.work, ratio)
    added = np.where(events.first, 0, pause) + work
    elapsed = np.cumsum(added)
    by_launch = np.where(launches.begin > NEG_INF, launch + latency + work - elapsed, NEG_INF)
    return _Durations(work, added, elapsed, by_launch,
                      delays.since_source if exact else np.minimum(delays.since_source, LATENCY_NS))


def _solve(graph: Graph, times: _PieceTimes, waits: _WaitTimes, *, together: bool,
           ) -> tuple[list[int], list[int], list[int], list[int]]:
    """Go through waits, pieces and collectives in the order of their recorded times. Returns the ends of the pieces,
    their ends by their launches alone, and ``ahead`` and ``gained`` of :class:`ReplayRun`.

    1. A wait: the lane goes on when what it waits for is ready, no sooner than it came to the wait. What it then has
       gained on the recording is how much it is ahead.
    2. A piece: it ends its length after the end of the one before it in its stream, no sooner than its launches, less
       what their lane is ahead, and its source allow.
    3. A collective: all members end a transfer after the last has come. ``together``: the last comes with the median
       of the others, and its lane is ahead by as much from then on.
    """
    pieces = graph.pieces
    count, number_of_pieces = len(waits.begin), len(times.launched)
    begin, end, returns, canceled, input_ready = waits
    _, length, head_pause, since_source, transfer = times
    launched = times.launched.copy()
    stream_of, lane_of, wait_of, source, collective = (
        pieces.stream, pieces.lane, pieces.wait, pieces.source, pieces.collective)
    on, wait_lane = pieces.wait_on, graph.waits.lane.tolist()
    stream_end, ends = [NEG_INF] * graph.events.streams, [NEG_INF] * number_of_pieces
    ahead, lane_ahead = [0] * (count + 1), [0] * (graph.lanes.size + 1)
    arrivals: list[list[tuple[int, int]]] = [[] for _ in range(len(graph.collectives.begun))]
    # What the lane of a GPU gains that no longer comes last to collectives; in all, and until each wait.
    lane_gained, gained_until = [0] * (graph.lanes.size + 1), [0] * (count + 1)
    for node in pieces.order:
        if node < count:
            lane = wait_lane[node]
            came = begin[node] - lane_ahead[lane]
            if on[node] >= 0:
                ready = NEG_INF if canceled[node] else ends[on[node]] + returns[node]
            else:
                ready = input_ready[node]
            ahead[node] = lane_ahead[lane] = end[node] - (ready if ready > came else came)
            gained_until[node] = lane_gained[lane]
        elif node < count + number_of_pieces:
            p = node - count
            stream = stream_of[p]
            time = stream_end[stream] + length[p]
            launched[p] = by_launch = (
                launched[p] - ahead[wait_of[p]] - lane_gained[lane_of[p]] + gained_until[wait_of[p]])
            if by_launch > time:
                time = by_launch
            if source[p] >= 0:
                by_source = ends[source[p]] + since_source[p] + length[p] - head_pause[p]
                if by_source > time:
                    time = by_source
            if collective[p] >= 0:
                arrivals[collective[p]].append((time - length[p] + head_pause[p], p))
            stream_end[stream] = ends[p] = time
        else:
            arrived = arrivals[node - count - number_of_pieces]
            begun, last = max(arrived)
            if together and len(arrived) > 1:
                others = sorted(arrived)[:-1]
                late, begun = begun, (others[(len(others) - 1) // 2][0] + others[len(others) // 2][0]) // 2
                lane = lane_of[last]
                if lane >= 0:
                    lane_gained[lane] += late - begun
                    lane_ahead[lane] += late - begun
            for _, p in arrived:
                stream_end[stream_of[p]] = ends[p] = begun + transfer[p]
    last_wait = dict(zip(wait_lane, range(count), strict=True))
    gained = [0] * count
    for lane, wait in last_wait.items():
        gained[wait] = lane_gained[lane] - gained_until[wait]
    return ends, launched, ahead, gained


def steps_time_ns(graph: Graph, run: ReplayRun) -> int:
    """The time from boundary to boundary of the steps: there the GPUs have done what they had begun by then and, where
    calls of the host mark the steps, the host has come."""
    boundary_ns, last_event = graph.boundaries
    reached = np.where(last_event >= 0, run.ends[graph.pieces.of_event[last_event]], NEG_INF).max(axis=1)
    for lane in range(graph.lanes.size if graph.marks.by_host else 0):
        of_lane = graph.waits.of_lane(lane)
        wait = of_lane[np.searchsorted(graph.waits.end[of_lane], boundary_ns, side="right") - 1]
        gained = run.gained[wait] * (boundary_ns > boundary_ns[0])
        reached = np.maximum(reached, boundary_ns - run.ahead[wait] - gained - _removed_before(
            run.removed, np.full(len(boundary_ns), lane), boundary_ns))
    begun = np.where(reached > NEG_INF // 2, reached, boundary_ns)
    return int((begun[1::2] - begun[::2]).sum())


# -- events -------------------------------------------------------------------------------------------------


def event_times(graph: Graph, cure: Cure) -> tuple[I64, I64]:
    """Begin and end of each event with the fix (ns), shape (events,).

    1. The first event of a piece ends after the one before it in its stream and after its source.
    2. The others end as much later as their durations take, no sooner than the latest of their launches allows.
    3. The events of a collective end with their pieces.
    """
    run, pieces, head = run_replay(graph, cure), graph.pieces, graph.pieces.head
    work, added, elapsed, by_launch, since_source = run.durations
    previous_end = np.append(NEG_INF, run.ends[:-1])[:len(head)]
    previous_end[graph.events.first[head]] = NEG_INF
    source = graph.delays.source[head]
    by_source = np.where(source >= 0, run.ends[pieces.of_event[source]] + (since_source - added + work)[head], NEG_INF)
    first = np.maximum(previous_end, by_source) - (elapsed - added)[head]
    end = elapsed + np.maximum(first[pieces.of_event],
                               _latest_so_far(by_launch, pieces.of_event) - run.earlier[pieces.of_event])
    begin = end - work
    meets = graph.collectives.of_event >= 0
    end[meets] = run.ends[pieces.of_event[meets]]
    return begin, end


def _latest_so_far(values: I64, group: I64) -> I64:
    """The greatest of each group's values up to each one; groups are numbered in order."""
    order = np.argsort(values, kind="stable")
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    offset = group * len(order)
    return values[order[np.maximum.accumulate(rank + offset) - offset]]


def idle_saved(graph: Graph, cure: Cure) -> dict[int, Spans]:
    """Part of the idle gaps of each GPU (index into ``Trace.gpus``) that it does not have with the fix: of each gap the
    first."""
    begin, end = event_times(graph, cure)
    events, out = graph.events, {}
    for gpu in np.unique(events.gpu).tolist():
        of_gpu = np.flatnonzero((events.gpu == gpu) & (events.work > 0))
        of_gpu = of_gpu[np.lexsort((events.end[of_gpu], events.start[of_gpu]))]
        busy_until = np.maximum.accumulate(events.end[of_gpu])[:-1]
        idle = np.maximum(events.start[of_gpu][1:] - busy_until, 0)
        left = np.maximum(begin[of_gpu][1:] - np.maximum.accumulate(end[of_gpu])[:-1], 0)
        out[gpu] = union(busy_until, busy_until + np.maximum(idle - left, 0))
    return out


# -- a cure -------------------------------------------------------------------------------------------------


def _scaled(times: I64, ratio: npt.NDArray[np.float64] | None) -> I64:
    return times if ratio is None else (times * ratio).astype(np.int64)


def _ratio_left(graph: Graph, cure: Cure) -> npt.NDArray[np.float64] | None:
    """Ratio of each event's duration that is left; None: all."""
    if not cure.scaled:
        return None
    left = np.ones(len(graph.events.row))
    for rows, ratio in cure.scaled:
        event = graph.events.of_row[rows]
        replayed = event >= 0
        left[event[replayed]] *= ratio[replayed] if isinstance(ratio, np.ndarray) else ratio
    return left


def _removed_time(graph: Graph, cure: Cure) -> _Removed:
    """Time, by host lane, that it no longer needs, within the replayed time and without its waits.

    1. What the cure removes of the threads that launch to a GPU.
    2. With ``launching`` the time from one launch to the next, where they follow one another closely.
    3. Calls that are no longer made, from the lane's last launch in them, unless it goes on in another thread.
    4. With ``input_left`` that part of its fetches.
    """
    launches, parts = graph.launches, dict[int, list[Spans]]()
    for gpu, spans in cure.host.items():
        if gpu in graph.lanes.of_gpu:
            parts.setdefault(graph.lanes.of_gpu[gpu], []).append(spans)
    if cure.launching:
        for lane, begins in enumerate(launches.by_lane):
            near = np.flatnonzero(np.diff(begins) <= _LAUNCHING_GAP_NS)
            parts.setdefault(lane, []).append(union(begins[near], begins[near + 1]))
    for lane, line, begin, end in _canceled_calls(graph, cure):
        begin = launches.last_before(lane, begin, end) + launches.usual_call_ns
        of_lane = np.flatnonzero((launches.lane == lane) & (launches.begin > NEG_INF))
        of_lane = of_lane[np.argsort(launches.begin[of_lane], kind="stable")]
        launching = np.append(graph.trace.device.launch_line[graph.events.row[of_lane]], -1)
        held = launching[np.searchsorted(launches.begin[of_lane], end)] == line  # its own thread launches next
        parts.setdefault(lane, []).append(union(np.minimum(begin, end)[held], end[held]))
    if cure.input_left < 1.0:
        for lane in np.unique(graph.fetches.lane).tolist():
            begin, end = graph.fetches.of_lane(lane)
            begin = begin + (cure.input_left * (end - begin)).astype(np.int64)
            parts.setdefault(lane, []).append(union(begin, end))
    waits, out = graph.waits, {}
    replayed = union(graph.spans.start[:1], graph.spans.end[-1:])
    for lane, several in parts.items():
        of_lane = waits.of_lane(lane)[1:]
        out[lane] = intersect(subtract(
            merge(EMPTY, *several), union(waits.begin[of_lane], waits.end[of_lane])), replayed)
    return {lane: spans for lane, spans in out.items() if len(spans.start)}


def _canceled_calls(graph: Graph, cure: Cure) -> Iterator[tuple[int, I64, I64, I64]]:
    """Yield the calls that are no longer made by host lane, in order of their ends: lane, threads, begins and ends."""
    if not len(cure.calls.line):
        return
    line, start, end = cure.calls
    lanes = graph.lanes.of_line[line]
    for lane in range(graph.lanes.size):
        of_lane = np.flatnonzero(lanes == lane)
        of_lane = of_lane[np.argsort(end[of_lane], kind="stable")]
        yield lane, line[of_lane], start[of_lane], end[of_lane]


def _removed_before(removed: _Removed, lane: I64, t: I64) -> I64:
    """Removed time of a lane before each instant (ns)."""
    out = np.zeros(len(t), np.int64)
    for number, spans in removed.items():
        of_lane = np.flatnonzero(lane == number)
        out[of_lane] = coverage(spans, np.full(len(of_lane), NEG_INF), t[of_lane])
    return out


def _input_ready(graph: Graph, cure: Cure) -> list[int]:
    """Time at which the batch is there for each wait for a batch: as recorded, less what all batches until then come
    sooner."""
    waits = graph.waits
    out = waits.end.copy()
    if cure.input_left < 1.0:
        for lane in range(graph.lanes.size):
            of_lane = np.flatnonzero((waits.lane == lane) & (waits.on < 0) & (waits.end > NEG_INF))
            out[of_lane] -= np.cumsum((1 - cure.input_left) * (waits.end[of_lane] - waits.begin[of_lane])).astype(
                np.int64)
    return out.tolist()

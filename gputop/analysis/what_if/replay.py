"""A replay of the recorded window: how long its steps would take with a cure applied.

Between two points where lanes of :mod:`~gputop.analysis.what_if.graph` wait for each other an event's end is the
maximum over launches of a sum of durations: such stretches ("pieces") are reduced by NumPy at once, and only the pieces
are gone through one by one, in order of their recorded times. That is a max-plus system, solved exactly, in time linear
in events.

The same idea: Zhu et al., Daydream (USENIX ATC 2020); ByteDance's what-if analysis of stragglers (OSDI 2025).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import copy
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from gputop.analysis.gpu.device_time import GpuTimeline
from gputop.analysis.steps.model import Steps
from gputop.analysis.what_if.cure import Cure
from gputop.analysis.what_if.graph import LATENCY_NS, LONG_AGO, MAX_EVENTS, RETURNS_NS, Graph
from gputop.trace.intervals import EMPTY, Spans, coverage, intersect, merge, subtract, union
from gputop.trace.model import I64, Trace

TOLERANCE = 0.03  # of the step; Daydream's own errors are of this size
MIN_UNCLEAR = 0.01  # of the step
_LAUNCHING_GAP_NS = 1_000_000  # as of the breakdown's part "launch"


class _Durations(NamedTuple):
    """By place: an event's ``work``, the pause before it and it (``add``), and the sum of all until its end (``done``).
    ``by_launch`` is its end by its launch alone, less ``done``; ``since`` the time from the end of an event of another
    stream that it waits for. All as the cure leaves them."""

    work: I64
    add: I64
    done: I64
    by_launch: I64
    since: I64


class _Run(NamedTuple):
    """The result of a replay, in ns.

    ``removed`` is by host lane the time that it no longer needs. ``ends`` is when each piece ends, ``earlier`` by how
    much earlier than ``durations.by_launch`` its events were launched. ``sooner`` is by how much a host lane is ahead
    of the recording after each wait, ``gained`` what it gains in addition by collectives before its next wait.
    """

    durations: _Durations
    removed: dict[int, Spans]
    ends: I64
    earlier: I64
    sooner: I64
    gained: I64


class Replay(Graph):
    """The graph of one trace, replayed. ``recorded_ns`` is the time of all steps; ``modeled_ns`` that which the graph
    alone gives, with usual latencies."""

    def __init__(self, trace: Trace, gpu_timelines: Sequence[GpuTimeline], steps: Steps | None,
                 max_events: int = MAX_EVENTS) -> None:
        super().__init__(trace, gpu_timelines, steps, max_events)
        self.recorded_ns = self.modeled_ns = 0
        self._waiting: Replay | None = None
        if len(self.rows):
            self.recorded_ns = self._steps_time(self._run(None, exact=True))
            self.modeled_ns = self._steps_time(self._run(None, exact=False))

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
        return (self.recorded_ns - self._steps_time(self._run(cure, exact=True))) / max(self.spans.total, 1)

    def saved_if_waiting(self, cure: Cure) -> float:
        """The same where the host, in each pause in which the GPUs ran out of work, waited for them to do so: such a
        pause looks the same whether the host waits, in a call that is not recorded, or is busy."""
        if self._waiting is None:
            waiting = copy(self)
            waiting.waits = waiting._find_waits(unclear=True)
            waiting._cut()
            waiting.recorded_ns = waiting._steps_time(waiting._run(None, exact=True))
            self._waiting = waiting  # complete: rules ask from several threads
        return self._waiting.saved(cure)

    def times(self, cure: Cure | None) -> tuple[I64, I64]:
        """When each event begins and ends with the cure, by place."""
        run, heads = self._run(cure, exact=True), self.head
        work, add, done, by_launch, since = run.durations
        before = np.append(LONG_AGO, run.ends[:-1])[:len(heads)]
        before[self._first[heads]] = LONG_AGO
        source = self.source[heads]
        by_source = np.where(source >= 0, run.ends[self.piece[source]] + (since - add + work)[heads], LONG_AGO)
        first = np.maximum(before, by_source) - (done - add)[heads]
        end = done + np.maximum(first[self.piece], self._latest_so_far(by_launch) - run.earlier[self.piece])
        begin = end - work
        end[self.collective >= 0] = run.ends[self.piece[self.collective >= 0]]
        return begin, end

    def _latest_so_far(self, values: I64) -> I64:
        """The greatest of each piece's values up to each one."""
        order = np.argsort(values, kind="stable")
        rank = np.empty_like(order)
        rank[order] = np.arange(len(order))
        before = self.piece * len(order)
        return values[order[np.maximum.accumulate(rank + before) - before]]

    def idle_saved(self, cure: Cure) -> dict[int, Spans]:
        """By GPU (index into ``Trace.gpus``) the part of its idle gaps that it does not have with the cure: of each gap
        the first."""
        begin, end = self.times(cure)
        gpu, out = self.trace.device.gpu[self.rows], {}
        for own in np.unique(gpu).tolist():
            here = np.flatnonzero((gpu == own) & (self.work > 0))
            here = here[np.lexsort((self.end[here], self.start[here]))]
            done = np.maximum.accumulate(self.end[here])[:-1]
            idle = np.maximum(self.start[here][1:] - done, 0)
            left = np.maximum(begin[here][1:] - np.maximum.accumulate(end[here])[:-1], 0)
            out[own] = union(done, done + np.maximum(idle - left, 0))
        return out

    # -- a replay -------------------------------------------------------------------------------------

    def _run(self, cure: Cure | None, *, exact: bool) -> _Run:
        """``exact``: with the recorded latencies, else with the usual ones."""
        waits = self.waits
        left, removed = self._left(cure), self._removed(cure)
        durations = self._durations(cure, left, removed, exact)
        work, add, done, by_launch, since = durations
        # Ends within a piece: the latest over its launches of the launch and all work from there on.
        latest = np.maximum.reduceat(by_launch, self.head) + done[self.tail]
        launched = latest.tolist()
        whole = done[self.tail] - done[self.head] + add[self.head]
        gone = self._gone(cure)
        begin = waits.begin - self._removed_until(removed, waits.lane, waits.begin)
        end = waits.end - self._removed_until(removed, waits.lane, waits.end)
        begin = np.where(gone, np.minimum(begin + self.usual_call, end), begin)
        returns = waits.end - np.where(waits.on >= 0, self.end[waits.on], waits.end)
        returns = returns if exact else np.minimum(returns, RETURNS_NS)
        ends, sooner, gained = self._solve(
            launched, whole.tolist(), (add - work)[self.head].tolist(), since[self.head].tolist(),
            _scaled(self.transfer, left)[self.head].tolist(), begin.tolist(), end.tolist(), returns.tolist(),
            gone.tolist(), self._supplied(cure), cure is not None and cure.together)
        return _Run(durations, removed, np.array(ends, np.int64), latest - np.array(launched, np.int64),
                    np.array(sooner, np.int64), np.array(gained, np.int64))

    def _durations(self, cure: Cure | None, left: npt.NDArray[np.float64] | None, removed: dict[int, Spans],
                   exact: bool) -> _Durations:
        paused = self.paused if exact else self._usual_paused
        launched = self.launched if exact else self._usual_launched
        if cure is not None and cure.pauses:
            paused = np.where(paused <= 2 * LATENCY_NS, 0, paused)
            launched = np.minimum(launched, LATENCY_NS)
        launch = self.launch - self._removed_until(removed, self.host, self.launch) if removed else self.launch
        work = _scaled(self.work, left)
        add = np.where(self._first, 0, paused) + work
        done = np.cumsum(add)
        by_launch = np.where(self.launch > LONG_AGO, launch + launched + work - done, LONG_AGO)
        return _Durations(work, add, done, by_launch,
                          self.since_source if exact else np.minimum(self.since_source, LATENCY_NS))

    def _solve(
        self, latest: list[int], whole: list[int], first_pause: list[int], since: list[int], moved: list[int],
        begin: list[int], end: list[int], returns: list[int], gone: list[bool], supplied: list[int], together: bool,
    ) -> tuple[list[int], list[int], list[int]]:
        """When each piece ends, by how much each host lane is ahead after each of its waits, and how much more it is
        by collectives that came after the wait and before the next. ``latest``, each piece's end by its launches, is
        brought to that with what its host lane is ahead."""
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
                latest[p] = launched = latest[p] - sooner[wait_of[p]] - gained[piece_host[p]] + until[wait_of[p]]
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

    def _steps_time(self, run: _Run) -> int:
        """The time from edge to edge of the steps: an edge is when the GPUs have done what they had begun by then and,
        where calls of the host mark the steps, the host was there."""
        events = self._edge_events
        reached = np.where(events >= 0, run.ends[self.piece[events]], LONG_AGO).max(axis=1)
        waits = self.waits
        for lane in range(self.host_lanes if self._by_host else 0):
            own = np.flatnonzero(waits.lane == lane)
            wait = own[np.searchsorted(waits.end[own], self._edges, side="right") - 1]
            gained = run.gained[wait] * (self._edges > self._edges[0])
            reached = np.maximum(reached, self._edges - run.sooner[wait] - gained - self._removed_until(
                run.removed, np.full(len(self._edges), lane), self._edges))
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
        for lane, line, begin, end in self._calls(cure):
            begin = self._last_launch(lane, begin, end) + self.usual_call
            held = self._launches_next(lane, end) == line  # else the lane went on in another thread
            parts.setdefault(lane, []).append(union(np.minimum(begin, end)[held], end[held]))
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

    def _calls(self, cure: Cure | None) -> Iterator[tuple[int, I64, I64, I64]]:
        """By host lane the calls that are no longer made, in order of their ends: thread, begin and end."""
        if cure is None or not len(cure.calls.line):
            return
        line, start, end = cure.calls
        lanes = self.host_of_line[line]
        for lane in range(self.host_lanes):
            own = np.flatnonzero(lanes == lane)
            own = own[np.argsort(end[own], kind="stable")]
            yield lane, line[own], start[own], end[own]

    def _gone(self, cure: Cure | None) -> npt.NDArray[np.bool_]:
        """Whether each wait ends in a call that is no longer made."""
        waits = self.waits
        out = np.zeros(len(waits.lane), bool)
        for lane, _, begin, end in self._calls(cure):
            own = np.flatnonzero((waits.lane == lane) & (waits.on >= 0))
            within = union(begin, end + LATENCY_NS)
            out[own] = coverage(within, waits.end[own] - 1, waits.end[own]) > 0
        return out

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


def _scaled(times: I64, left: npt.NDArray[np.float64] | None) -> I64:
    return times if left is None else (times * left).astype(np.int64)

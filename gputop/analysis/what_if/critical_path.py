"""The critical path of a typical step, and by how much what is not on it could grow.

For each event of the replay's graph the recorded times tell which of its dependencies came last. The path is followed
back along these, from the end of the step after the typical one, so that work across the end of the typical step is
followed to what waits for it; then it is cut to the typical step. The slack is that of the critical path method, from
a backward pass through the same graph: by how much an event can end later before the step after it ends later.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from gputop.analysis.gpu.device_time import gpu_number
from gputop.analysis.results import CriticalPath, PathKind, PathSegment, Slack
from gputop.analysis.steps.model import Steps
from gputop.analysis.what_if.dependencies import NEG_INF, POS_INF
from gputop.analysis.what_if.graph import Graph
from gputop.analysis.what_if.host_waits import SYNCHRONIZE
from gputop.analysis.what_if.replay import TOLERANCE, Replay
from gputop.render.step_parts import PATH_KINDS
from gputop.text.units import percent
from gputop.trace.intervals import EMPTY, Spans, contains, intersect, subtract, union
from gputop.trace.lookups import by_line, name_mask, numbered
from gputop.trace.model import I32, I64, Kind, Trace
from gputop.trace.nesting import nest, nesting_order

_KINDS = tuple(PATH_KINDS)
_INPUT, _HOST, _LAUNCH, _KERNEL, _COPY, _COLLECTIVE, _SYNC, _IDLE = range(len(_KINDS))
_OF_DEVICE = np.array([_COLLECTIVE if kind == Kind.COLLECTIVE else _KERNEL if kind == Kind.COMPUTE else _COPY
                       for kind in Kind])
# Stretches of the step in which short segments are told as one. They are 300 to 599; as many segments at most are long,
# and divide the short ones once more: MAX_SEGMENTS is more than all.
_MAX_SEGMENTS = 300
_MAX_ROWS = 40  # of what is not on the path
_LONGEST_NAME = 160
_FAR = 1 << 40  # ns; more than any slack that counts


class _Times(NamedTuple):
    """Stretches of time: what they are, on which line of the trace (-1: none), under which of its names (-1: none)."""

    start: I64
    end: I64
    kind: I64
    line: I64 | I32
    name: I64 | I32

    def chosen(self, which: npt.NDArray) -> _Times:
        return _Times(*(column[which] for column in self))


def _together(several: list[_Times]) -> _Times:
    return _Times(*(np.concatenate([np.empty(0, np.int64), *columns]) for columns in zip(*several, strict=True))
                  ) if several else _Times(*[np.empty(0, np.int64)] * 5)


def critical_path(replay: Replay | None, steps: Steps | None) -> CriticalPath | None:
    """The critical path of a typical step; None without steps, or where no GPU ran in them.

    1. Choose the step whose length is nearest to the median (:func:`_typical`).
    2. Walk back from the event that ends last in the step after it (:class:`_Walk`), and cut the path to the step.
    3. Of what is not on the path compute the slack (:func:`slack`).
    """
    if steps is None or replay is None:
        return None
    graph = replay.graph
    step, lo, hi, horizon = _typical(graph, steps)
    ends = _begun_last(graph, horizon)
    if not len(ends):
        return None
    if replay.error > TOLERANCE:
        return CriticalPath(step, lo, hi, reason=(
            f"The replayed time of the unmodified {steps.times.unit}s is off by {percent(replay.error)}, so the trace "
            "does not show everything that the GPUs wait for."))
    walk = _Walk(graph, lo, hi)
    path = walk.back_from(int(ends[np.argmax(graph.events.end[ends])]))
    rest, room = _off_path(graph, walk, lo, hi, ends)
    (path, rest), places, names = _texts(graph.trace, path, rest)
    return CriticalPath(
        step, lo, hi, tuple(_by_kind(path, rest, room)), tuple(_segments(path, places, names, lo, hi)),
        tuple(_slack_rows(rest, room, places, names)),
        reason="" if not replay.ambiguous_wait_ratio else (
            f"For {percent(replay.ambiguous_wait_ratio)} of the time it is unclear whether the host waits for the GPUs "
            "or is busy; the path counts this time as busy."))


def _typical(graph: Graph, steps: Steps) -> tuple[int, int, int, int]:
    """The step whose length, and that of the one after it, is nearest to the median: its number, begin and end, and
    the end of the one after it, its own where none follows at once."""
    edges = steps.edges_ns
    inside = np.flatnonzero((edges[:, 0] >= graph.spans.start[0]) & (edges[:, 1] <= graph.spans.end[-1]))
    apart = np.abs((edges[:, 1] - edges[:, 0])[inside] - steps.times.median_s * 1e9)
    follows = np.append(edges[inside[1:], 0] == edges[inside[:-1], 1], False)
    worst = np.maximum(apart, np.append(apart[1:], 0))
    nearest = int(np.argmin(np.where(follows, worst, POS_INF) if follows.any() else apart))
    step = int(inside[nearest])
    return step, int(edges[step, 0]), int(edges[step, 1]), int(edges[step + int(follows[nearest]), 1])


def _begun_last(graph: Graph, instant: int) -> I64:
    """Last event of each stream that began before an instant."""
    begun = np.flatnonzero(graph.events.start < instant)
    stream = graph.events.stream[begun]
    return begun[np.append(stream[1:] != stream[:-1], True)] if len(begun) else begun


class _Walk:
    """Follows the path back from an event to the dependency that came last, and so on to the begin of the step."""

    def __init__(self, graph: Graph, lo: int, hi: int) -> None:
        self._graph, self._lo, self._hi = graph, lo, hi
        events, launches, delays, meets = graph.events, graph.launches, graph.delays, graph.collectives.of_event
        n = len(events.row)
        launched = np.where(launches.begin > NEG_INF, launches.begin + delays.after_launch, NEG_INF)
        self._follows = (delays.source < 0) & (events.previous_end > NEG_INF) & (
            launched < events.previous_end + delays.after_previous)
        # The last event up to each one that did not just follow the one before it, or that waited for other GPUs.
        self._run_begin = np.maximum.accumulate(np.where(self._follows & (meets < 0), 0, np.arange(n)))
        within = np.flatnonzero(events.end > lo)
        streams, first = np.unique(events.stream[within], return_index=True)
        self._first = dict(zip(streams.tolist(), within[first].tolist(), strict=True))
        members = np.flatnonzero(meets >= 0)
        self._by_collective = members[np.argsort(meets[members], kind="stable")]
        self._collective = meets[self._by_collective]
        self._path: list[_Times] = []
        self.on_path = np.zeros(n, bool)
        host = graph.trace.host
        self.host_rows = np.flatnonzero(host.end_ns[:np.searchsorted(host.start_ns, hi)] > lo)
        self.host: dict[int, list[tuple[int, int]]] = {}  # by lane when the path is with it

    def back_from(self, last: int) -> _Times:
        """The stretches of the path, in order of time. They fill the step.

        1. Where nothing more was begun by the end of the step, the rest of it is its host's.
        2. From an event go back through those that it followed at once, then to what the first of these waited for.
        3. Where that is the host, go back to its last wait, and on from what it waited for.
        4. Name what the host did meanwhile.
        """
        graph, event, end = self._graph, last, int(self._graph.events.end[last])
        if end < self._hi:
            waits = graph.waits
            earlier = np.flatnonzero((waits.lane == int(graph.launches.lane[last])) & (waits.end <= self._hi))
            if len(earlier):
                event = self._through_host(int(graph.launches.lane[last]), self._hi, int(earlier[-1]))
            else:
                self._add(end, self._hi, _IDLE)
        for _ in range(2 * len(graph.events.row)):
            if event < 0 or graph.events.end[event] <= self._lo:
                break
            event = self._through_events(event)
        for lane, spans in self.host.items():
            self._path.append(host_time(graph, lane, union(*zip(*spans, strict=True)), self.host_rows))
        path = _together(self._path)
        return path.chosen(np.argsort(path.start, kind="stable"))

    def _add(self, begin: int, end: int, kind: int, line: int = -1, name: int = -1) -> None:
        begin, end = max(begin, self._lo), min(end, self._hi)
        if end > begin:
            self._path.append(_Times(*(np.array([value], np.int64) for value in (begin, end, kind, line, name))))

    def _through_events(self, event: int) -> int:
        """Add the event to the path, and those right before it in its stream that each followed at once. Returns the
        event that the first of these waited for, -1 where that is before the step."""
        graph, events, device = self._graph, self._graph.events, self._graph.trace.device
        number = int(graph.collectives.of_event[event])
        if number >= 0 and graph.collectives.begun[number] < events.end[event]:
            row = events.row[event]
            self._add(int(graph.collectives.begun[number]), int(events.end[event]), _COLLECTIVE, int(device.line[row]),
                      int(device.name[row]))
            members = self._by_collective[slice(*np.searchsorted(self._collective, (number, number + 1)))]
            self.on_path[members] = True
            return self._before(int(members[np.argmax(events.start[members])]))
        first = min(max(int(self._run_begin[event]), self._first[int(events.stream[event])]), event)
        stops = first < event and graph.collectives.of_event[first] >= 0
        run = np.arange(first + stops, event + 1)
        self.on_path[run] = True
        follows = run if stops else run[1:]
        for begin, end, kind, of in (
            (events.start[run], events.end[run], _OF_DEVICE[events.kind[run]], run),
            (events.previous_end[follows], events.start[follows], np.full(len(follows), _IDLE), follows),
        ):
            begin, end = np.maximum(begin, self._lo), np.minimum(end, self._hi)
            name = np.where(kind == _IDLE, -1, events.name[of])
            self._path.append(_Times(begin, end, kind, device.line[events.row[of]], name).chosen(end > begin))
        return first if stops else self._before(first)

    def _before(self, event: int) -> int:
        """Predecessor that an event's begin waited for."""
        events, launches, delays = self._graph.events, self._graph.launches, self._graph.delays
        begin = int(events.start[event])
        line = int(self._graph.trace.device.line[events.row[event]])
        if delays.source[event] >= 0:
            source = int(delays.source[event])
            self._add(int(events.end[source]), begin, _IDLE, line)
            return source
        if self._follows[event]:
            self._add(int(events.previous_end[event]), begin, _IDLE, line)
            return event - 1
        launch, lane = int(launches.begin[event]), int(launches.lane[event])
        if launch == NEG_INF:
            self._add(self._lo, begin, _IDLE, line)
            return -1
        shown = begin - int(delays.unexplained[event])
        self._add(shown, begin, _IDLE, line)
        self._add(launch, shown, _LAUNCH, line)
        if lane < 0:
            self._add(self._lo, launch, _IDLE, line)
            return -1
        return self._through_host(lane, launch, int(self._graph.pieces.after_wait[event]))

    def _through_host(self, lane: int, until: int, wait: int) -> int:
        """Back through what the host did since its last wait to the event that it waited for."""
        graph, waits = self._graph, self._graph.waits
        ended = int(waits.end[wait])
        begin, until = max(ended, self._lo), min(until, self._hi)
        if until > begin:
            self.host.setdefault(lane, []).append((begin, until))
        if ended <= self._lo:
            return -1
        if waits.on[wait] >= 0:
            source = int(waits.on[wait])
            self._add(int(graph.events.end[source]), ended, _SYNC,
                      int(graph.trace.device.launch_line[graph.events.row[source]]))
            return source
        # A batch that was waited for was in the making since the one before it came, whatever the loop did meanwhile.
        self._add(self._lo, ended, _INPUT)
        return -1


# -- the host ---------------------------------------------------------------------------------------------


def host_time(graph: Graph, lane: int, within: Spans, rows: I64) -> _Times:
    """Work of the threads of a host lane within these spans, of its events among ``rows``.

    1. Up to each launch it is the thread that launches next (a turn).
    2. In a turn cut the time where an event of the thread begins or ends, and where it launches or fetches a batch.
    3. Each part is the innermost event then; launching, synchronizing and fetching go before other kinds.
    """
    trace, host = graph.trace, graph.trace.host
    if not len(within.start):
        return _together([])
    lo, hi = int(within.start[0]), int(within.end[-1])
    launch, called, thread = _launches_near(graph, lane, lo, hi)
    if not len(launch):
        return _Times(within.start, within.end, np.full(len(within.start), _HOST), *[
            np.full(len(within.start), -1, np.int64)] * 2)
    fetches = union(*graph.fetches.of_lane(lane))
    sync = name_mask(trace, SYNCHRONIZE)
    turn = np.flatnonzero(thread[1:] != thread[:-1])
    turn_edges = np.concatenate(([NEG_INF], np.minimum(called[turn], launch[turn + 1]), [POS_INF]))
    thread_of_turn = thread[np.append(turn, len(thread) - 1)]
    out = []
    for line, mine in by_line(thread_of_turn).items():
        spans = intersect(union(turn_edges[:-1][mine], turn_edges[1:][mine]), within)
        if not len(spans.start):
            continue
        since, event = _innermost(trace, rows[host.line[rows] == line])
        begin = np.unique(np.concatenate((
            spans.start, spans.end, since, launch[thread == line], called[thread == line], fetches.start,
            fetches.end)))
        begin = begin[(begin >= lo) & (begin <= hi)]
        begin = begin[contains(spans, begin)]
        end = np.append(begin[1:], hi)
        end = np.minimum(end, spans.end[np.searchsorted(spans.start, begin, side="right") - 1])
        shown = np.append(-1, event)[np.searchsorted(since, begin, side="right")]
        name = np.full(len(begin), -1)
        open_ = np.flatnonzero(shown >= 0)
        open_ = open_[host.end_ns[shown[open_]] > begin[open_]]
        name[open_] = host.name[shown[open_]]
        last = np.searchsorted(launch, begin, side="right") - 1
        launching = (last >= 0) & (begin < called[last]) & (thread[last] == line)
        fetching = contains(fetches, begin)
        kind = np.select((launching, sync[name], fetching), (_LAUNCH, _SYNC, _INPUT), _HOST)
        out.append(_Times(begin, end, kind, np.full(len(begin), line), name))
    return _together(out)


def _launches_near(graph: Graph, lane: int, lo: int, hi: int) -> tuple[I64, I64, I64]:
    """The launches of a lane between two instants, and as long before and after: begin, the end of the latest call so
    far, and thread (line). Those of calls that the trace does not have are left out."""
    launches = graph.launches
    near = (launches.begin >= 2 * lo - hi) & (launches.begin <= 2 * hi - lo)
    mine = np.flatnonzero(near & (launches.lane == lane))
    mine = mine[np.argsort(launches.begin[mine], kind="stable")]
    called = np.maximum.accumulate(launches.end[mine])
    thread = graph.trace.device.launch_line[graph.events.row[mine]].astype(np.int64)
    seen = thread >= 0
    return launches.begin[mine][seen], called[seen], thread[seen]


def _innermost(trace: Trace, rows: I64) -> tuple[I64, I64]:
    """Times from which each of these events of one thread is the innermost one, and its row (-1: none)."""
    host = trace.host
    rows = rows[host.end_ns[rows] > host.start_ns[rows]]
    rows = rows[nesting_order(host.line[rows], host.start_ns[rows], host.end_ns[rows], host.name[rows], trace.names)]
    start, end, line, name = host.start_ns[rows], host.end_ns[rows], host.line[rows], host.name[rows]
    parent = nest(line, start, end, name, trace.names).parent
    rank = np.arange(len(rows))
    since = np.concatenate((end, start))
    event = np.concatenate((np.append(rows, -1)[parent], rows))
    sequence = np.lexsort((np.concatenate((-rank, rank)), np.repeat((0, 1), len(rows)), since))
    since, event = since[sequence], event[sequence]
    last = np.append(since[1:] != since[:-1], True)[:len(since)]
    return since[last], event[last]


# -- slack ------------------------------------------------------------------------------------------------


class _Room(Struct, frozen=True):
    """Delays that pieces can have before what they wait for is delayed; ns, lists by piece.

    ``head``: the pause before the head that is not needed. ``to_tail``: the sum of such pauses after the head.
    ``launch``: the least that a launch of the piece can be later if its end is not to be, and ``launch_at_end`` if the
    last events of the streams are not to be. ``head_at_end``: how much later the head can begin for the same.
    ``source``: how much later the source of the head can end.
    """

    head: list[int]
    to_tail: list[int]
    launch: list[int]
    launch_at_end: list[int]
    head_at_end: list[int]
    source: list[int]


def slack(graph: Graph, ends: I64) -> tuple[I64, I64, I64]:
    """Times by which each event can end later, each be launched later, and each host lane go on later after each of its
    waits, before the last of the events ``ends``, one of each stream, ends later. ns; :data:`POS_INF` and more: by any
    time.

    1. Reduce each piece to the pauses in it that are not needed, and to its tightest launch.
    2. Go back through all nodes in the reverse of the replay's order: each hands the room that it has to what it
       waited for (:func:`_rooms_backward`).
    3. Within a piece an event has the room of the piece's end and of the pauses after it.
    """
    events, launches, delays, pieces = graph.events, graph.launches, graph.delays, graph.pieces
    pause = np.where(events.previous_end > NEG_INF, events.start - events.previous_end - delays.after_previous, 0)
    pauses = np.cumsum(pause)
    in_time = np.where(launches.begin > NEG_INF, events.start - launches.begin - delays.after_launch, POS_INF)
    at_end = np.full(len(events.row), POS_INF, np.int64)  # what the last events leave to those before them in a piece
    for last in ends.tolist():
        before = slice(pieces.head[pieces.of_event[last]], last + 1)
        at_end[before] = events.end[ends].max() - events.end[last] + pauses[last] - pauses[before]
    head, tail = pieces.head, pieces.tail
    source = delays.source[head]
    room = _Room(
        pause[head].tolist(), (pauses[tail] - pauses[head]).tolist(),
        launch=(np.minimum.reduceat(in_time - pauses, head) + pauses[tail]).tolist(),
        launch_at_end=np.minimum.reduceat(in_time + at_end, head).tolist(), head_at_end=at_end[head].tolist(),
        source=np.where(source >= 0, (events.start - delays.since_source)[head] - events.end[source], 0).tolist())
    end_room, lane_room, collective_room = _rooms_backward(graph, room)
    later = np.minimum(end_room[pieces.of_event] + pauses[tail][pieces.of_event] - pauses, at_end)
    arrives = later.copy()
    members = np.flatnonzero(graph.collectives.of_event >= 0)
    number = graph.collectives.of_event[members]
    arrives[members] = collective_room[number] + graph.collectives.begun[number] - events.start[members]
    return later, in_time + arrives, lane_room


def _rooms_backward(graph: Graph, room: _Room) -> tuple[I64, I64, I64]:
    """The backward pass: by how much each piece can end later, each host lane go on later after each of its waits, and
    each collective begin later (ns)."""
    waits, pieces, begun = graph.waits, graph.pieces, graph.collectives.begun.tolist()
    count, number_of_pieces = len(waits.lane), len(pieces.head)
    head_start = graph.events.start[pieces.head].tolist()
    end_room, lane_room = [POS_INF] * number_of_pieces, [POS_INF] * (count + 1)
    waited = (waits.end - waits.begin).tolist()
    collective = [POS_INF] * len(begun)
    members: list[list[int]] = [[] for _ in begun]
    for p, number in enumerate(pieces.collective):
        if number >= 0:
            members[number].append(p)
    first_waits = np.append(True, waits.lane[1:] != waits.lane[:-1]).tolist()
    for node in reversed(pieces.order):
        if node < count:
            on = pieces.wait_on[node]
            if on >= 0:
                end_room[on] = min(end_room[on], lane_room[node])
            if not first_waits[node]:
                lane_room[node - 1] = min(lane_room[node - 1], lane_room[node] + waited[node])
        elif node < count + number_of_pieces:
            p = node - count
            number = pieces.collective[p]
            if number < 0:
                left = min(end_room[p] + room.to_tail[p], room.head_at_end[p])
                launch = min(end_room[p] + room.launch[p], room.launch_at_end[p])
            else:
                left = collective[number] + begun[number] - head_start[p]
                launch = left + room.launch[p]
            if p and pieces.stream[p - 1] == pieces.stream[p]:
                end_room[p - 1] = min(end_room[p - 1], left + room.head[p])
            source, wait = pieces.source[p], pieces.wait[p]
            if source >= 0:
                end_room[source] = min(end_room[source], left + room.source[p])
            lane_room[wait] = min(lane_room[wait], launch)
        else:
            number = node - count - number_of_pieces
            collective[number] = min(min(end_room[p], room.head_at_end[p]) for p in members[number])
    return np.array(end_room, np.int64), np.array(lane_room[:count], np.int64), np.array(collective, np.int64)


def _off_path(graph: Graph, walk: _Walk, lo: int, hi: int, ends: I64) -> tuple[_Times, I64]:
    """Work of the step's GPUs and hosts that is not on the path, and the slack of each (ns)."""
    device, events, waits = graph.trace.device, graph.events, graph.waits
    later, launch_later, goes_on_later = slack(graph, ends)
    off = np.flatnonzero((events.end > lo) & (events.start < hi) & (events.work > 0) & ~walk.on_path)
    rows = events.row[off]
    out = [_Times(np.maximum(events.start[off], lo), np.minimum(events.end[off], hi), _OF_DEVICE[device.kind[rows]],
                  device.line[rows], device.name[rows])]
    room = [later[off]]
    for lane in range(graph.lanes.size):
        of_lane = waits.of_lane(lane)
        busy = subtract(union([lo], [hi]), union(waits.begin[of_lane[1:]], waits.end[of_lane[1:]]))
        on_path = union(*zip(*walk.host[lane], strict=True)) if lane in walk.host else EMPTY
        times = host_time(graph, lane, subtract(busy, on_path), walk.host_rows)
        times = times.chosen((times.kind != _HOST) | (times.name >= 0))  # what shows nothing may be doing nothing
        out.append(times)
        room.append(_host_slack(graph, lane, times.end, launch_later, goes_on_later))
    return _together(out), np.concatenate(room)


def _host_slack(graph: Graph, lane: int, instants: I64, launch_later: I64, goes_on_later: I64) -> I64:
    """Time by which a host lane can be later from these instants on: its launches until its next wait, and that
    wait."""
    waits, launches, of_lane = graph.waits, graph.launches, graph.waits.of_lane(lane)
    mine = np.flatnonzero((launches.lane == lane) & (launch_later < _FAR))
    mine = mine[np.argsort(launches.begin[mine], kind="stable")]
    turn = graph.pieces.after_wait[mine] - of_lane[0]
    # The least from each launch on to the last one before the next wait: those after later waits count for more.
    least = np.minimum(launch_later[mine], _FAR) + turn * 2 * _FAR
    least = np.append(np.minimum.accumulate(least[::-1])[::-1], POS_INF)
    wait = np.searchsorted(waits.end[of_lane], instants, side="right") - 1
    until = np.append((waits.end - waits.begin + goes_on_later)[of_lane[1:]], POS_INF)[wait]
    return np.minimum(least[np.searchsorted(launches.begin[mine], instants)] - wait * 2 * _FAR, until)


# -- the record -------------------------------------------------------------------------------------------


def _by_kind(path: _Times, rest: _Times, room: I64) -> Iterator[PathKind]:
    for kind, id_ in enumerate(_KINDS):
        on, off = path.kind == kind, rest.kind == kind
        yield PathKind(id_, int((path.end - path.start)[on].sum()) / 1e9, int((rest.end - rest.start)[off].sum()) / 1e9,
                       _seconds(room[off].min()) if off.any() else None)


def _seconds(room_ns: int) -> float | None:
    return max(int(room_ns), 0) / 1e9 if room_ns < _FAR else None


def _texts(trace: Trace, *parts: _Times) -> tuple[list[_Times], list[str], list[str]]:
    """The parts with places and names numbered in the order of their texts, which the order in a file does not change;
    the texts by number."""
    lines, names = (np.unique(np.concatenate(ids)) for ids in zip(*((p.line, p.name) for p in parts), strict=True))
    out = []
    for ids, text in ((lines, _place), (names, lambda _, name: trace.names[name][:_LONGEST_NAME] if name >= 0 else "")):
        texts = [text(trace, index) for index in ids.tolist()]
        labels = sorted(set(texts))
        number = {label: i for i, label in enumerate(labels)}
        out.append((ids, np.array([number[label] for label in texts], np.int64), labels))
    (lines, of_line, places), (names, of_name, known_names) = out
    return [p._replace(line=of_line[np.searchsorted(lines, p.line)], name=of_name[np.searchsorted(names, p.name)])
            for p in parts], places, known_names


def _segments(path: _Times, places: list[str], names: list[str], lo: int, hi: int) -> Iterator[PathSegment]:
    """Stretches that are long by themselves, and of the others as many as lie in a part of the step as one, which is
    called what most of it is."""
    if not len(path.start):  # nothing was waited for, in a damaged trace
        return
    width = max((hi - lo) // _MAX_SEGMENTS, 1)
    length = path.end - path.start
    long, part = length >= width, (path.start - lo) // width
    new = np.append(True, long[1:] | long[:-1] | (part[1:] != part[:-1]))[:len(length)]
    group = np.cumsum(new) - 1
    sizes = len(path.start), len(_KINDS), len(places), len(names)
    what = np.ravel_multi_index((group, path.kind, path.line, path.name), sizes)
    _, first, same = np.unique(what, return_index=True, return_inverse=True)
    most = np.lexsort((np.bincount(same, weights=length), group[first]))
    most = first[most[np.append(np.flatnonzero(np.diff(group[first][most])), len(most) - 1)]] if len(most) else most
    count = np.bincount(group)
    begin, end = path.start[new], path.end[np.append(np.flatnonzero(new)[1:], len(new)) - 1]
    for i, main in enumerate(most.tolist()):
        yield PathSegment(_KINDS[int(path.kind[main])], names[int(path.name[main])], places[int(path.line[main])],
                          int(begin[i]), int(end[i]), int(count[i]))


def _slack_rows(rest: _Times, room: I64, places: list[str], names: list[str]) -> Iterator[Slack]:
    """Rows of slack, those with most time first."""
    sizes = len(_KINDS), len(places), len(names)
    distinct, what = numbered(np.ravel_multi_index((rest.kind, rest.line, rest.name), sizes))
    count, time = np.bincount(what), np.bincount(what, weights=rest.end - rest.start)
    least = np.full(len(count), POS_INF, np.int64)
    np.minimum.at(least, what, room)
    for row in np.argsort(-time, kind="stable")[:_MAX_ROWS].tolist():
        kind, line, name = np.unravel_index(distinct[row], sizes)
        yield Slack(_KINDS[kind], names[name], places[line], int(count[row]), float(time[row]) / 1e9,
                    _seconds(least[row]))


def _place(trace: Trace, index: int) -> str:
    if index < 0:
        return ""
    line = trace.lines[index]
    if line.gpu >= 0:
        return f"GPU {gpu_number(trace, line.gpu)} {line.name}"
    return f"{line.host} {line.name}" if len(trace.hosts) > 1 else line.name

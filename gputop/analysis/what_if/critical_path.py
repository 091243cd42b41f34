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

from gputop.analysis.gpu.device_time import gpu_number
from gputop.analysis.results import CriticalPath, PathKind, PathSegment, Slack
from gputop.analysis.steps.model import Steps
from gputop.analysis.what_if.graph import EVER, LONG_AGO
from gputop.analysis.what_if.host_waits import SYNCHRONIZE
from gputop.analysis.what_if.replay import TOLERANCE, Replay
from gputop.render.step_parts import PATH_KINDS
from gputop.text.units import percent
from gputop.trace.intervals import EMPTY, Spans, coverage, intersect, subtract, union
from gputop.trace.lookups import name_mask
from gputop.trace.model import I32, I64, Kind, Trace
from gputop.trace.nesting import nest, nesting_order

_KINDS = tuple(PATH_KINDS)
_INPUT, _HOST, _LAUNCH, _KERNEL, _COPY, _COLLECTIVE, _SYNC, _IDLE = range(len(_KINDS))
_OF_DEVICE = np.array([_COLLECTIVE if kind == Kind.COLLECTIVE else _KERNEL if kind == Kind.COMPUTE else _COPY
                       for kind in Kind])
# Stretches of the step in which short segments are told as one. They are 300 to 599; as many segments at most are long,
# and divide the short ones once more: MAX_SEGMENTS is more than all.
_MOST_SEGMENTS = 300
_MOST_ROWS = 40  # of what is not on the path
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


def critical_path(replay: Replay, steps: Steps | None) -> CriticalPath | None:
    """None without steps, or where no GPU ran in them."""
    if steps is None or not len(replay.rows):
        return None
    step, lo, hi, horizon = _typical(replay, steps)
    ends = _begun_last(replay, horizon)
    if not len(ends):
        return None
    if replay.error > TOLERANCE:
        return CriticalPath(step, lo, hi, reason=(
            f"A replay of the unchanged {steps.times.unit}s misses their time by {percent(replay.error)}: the trace "
            "does not show all that the GPUs wait for."))
    walk = _Walk(replay, lo, hi)
    path = walk.back_from(int(ends[np.argmax(replay.end[ends])]))
    rest, room = _off_path(replay, walk, lo, hi, ends)
    (path, rest), places, names = _texts(replay.trace, path, rest)
    return CriticalPath(
        step, lo, hi, tuple(_by_kind(path, rest, room)), tuple(_segments(path, places, names, lo, hi)),
        tuple(_slack_rows(rest, room, places, names)),
        reason="" if not replay.unclear else (
            f"In {percent(replay.unclear)} of the time the trace does not tell whether the host waits for the GPUs or "
            "is busy: the path takes it for busy."))


def _typical(replay: Replay, steps: Steps) -> tuple[int, int, int, int]:
    """The step whose length, and that of the one after it, is nearest to the median: its number, begin and end, and
    the end of the one after it, its own where none follows at once."""
    edges = steps.edges_ns
    inside = np.flatnonzero((edges[:, 0] >= replay.spans.start[0]) & (edges[:, 1] <= replay.spans.end[-1]))
    apart = np.abs((edges[:, 1] - edges[:, 0])[inside] - steps.times.median_s * 1e9)
    follows = np.append(edges[inside[1:], 0] == edges[inside[:-1], 1], False)
    worst = np.maximum(apart, np.append(apart[1:], 0))
    at = int(np.argmin(np.where(follows, worst, EVER) if follows.any() else apart))
    step = int(inside[at])
    return step, int(edges[step, 0]), int(edges[step, 1]), int(edges[step + int(follows[at]), 1])


def _begun_last(replay: Replay, at: int) -> I64:
    """Of each stream the last event that began before an instant (places)."""
    begun = np.flatnonzero(replay.start < at)
    return begun[np.append(replay.lane[begun][1:] != replay.lane[begun][:-1], True)] if len(begun) else begun


class _Walk:
    """Follows the path back from an event to the dependency that came last, and so on to the begin of the step."""

    def __init__(self, replay: Replay, lo: int, hi: int) -> None:
        self._replay, self._lo, self._hi = replay, lo, hi
        n = len(replay.rows)
        launched = np.where(replay.launch > LONG_AGO, replay.launch + replay.launched, LONG_AGO)
        self._goes_on = (replay.source < 0) & (replay.before > LONG_AGO) & (launched < replay.before + replay.paused)
        # The last event up to each one that did not just follow the one before it, or that waited for other GPUs.
        self._run = np.maximum.accumulate(np.where(self._goes_on & (replay.collective < 0), 0, np.arange(n)))
        within = np.flatnonzero(replay.end > lo)
        lanes, first = np.unique(replay.lane[within], return_index=True)
        self._first = dict(zip(lanes.tolist(), within[first].tolist(), strict=True))
        members = np.flatnonzero(replay.collective >= 0)
        self._by_collective = members[np.argsort(replay.collective[members], kind="stable")]
        self._collective = replay.collective[self._by_collective]
        self._out: list[_Times] = []
        self.on_path = np.zeros(n, bool)
        events = replay.trace.host
        self.host_rows = np.flatnonzero(events.end_ns[:np.searchsorted(events.start_ns, hi)] > lo)
        self.host: dict[int, list[tuple[int, int]]] = {}  # by lane when the path is with it

    def back_from(self, last: int) -> _Times:
        """The stretches of the path, in order of time. They fill the step."""
        replay, at, end = self._replay, last, int(self._replay.end[last])
        if end < self._hi:  # nothing more was begun by then: the rest of the step is its host's
            lane = int(replay.host[last])
            waits = replay.waits
            own = np.flatnonzero((waits.lane == lane) & (waits.end <= self._hi))
            if len(own):
                at = self._through_host(lane, self._hi, int(own[-1]))
            else:
                self._add(end, self._hi, _IDLE)
        for _ in range(2 * len(replay.rows)):
            if at < 0 or replay.end[at] <= self._lo:
                break
            at = self._at_end(at)
        for lane, spans in self.host.items():
            self._out.append(host_time(replay, lane, union(*zip(*spans, strict=True)), self.host_rows))
        path = _together(self._out)
        return path.chosen(np.argsort(path.start, kind="stable"))

    def _add(self, begin: int, end: int, kind: int, line: int = -1, name: int = -1) -> None:
        begin, end = max(begin, self._lo), min(end, self._hi)
        if end > begin:
            self._out.append(_Times(*(np.array([value], np.int64) for value in (begin, end, kind, line, name))))

    def _at_end(self, at: int) -> int:
        """Add the event to the path, and those right before it in its stream that each followed at once. Returns the
        event that the first of these waited for, -1 where that is before the step."""
        replay, device = self._replay, self._replay.trace.device
        number = int(replay.collective[at])
        if number >= 0 and replay.begun[number] < replay.end[at]:
            row = replay.rows[at]
            self._add(int(replay.begun[number]), int(replay.end[at]), _COLLECTIVE, int(device.line[row]),
                      int(device.name[row]))
            members = self._by_collective[slice(*np.searchsorted(self._collective, (number, number + 1)))]
            self.on_path[members] = True
            return self._before(int(members[np.argmax(replay.start[members])]))
        first = min(max(int(self._run[at]), self._first[int(replay.lane[at])]), at)
        stops = first < at and replay.collective[first] >= 0
        run = np.arange(first + stops, at + 1)
        rows = replay.rows[run]
        self.on_path[run] = True
        follows = run if stops else run[1:]
        for begin, end, kind, own in (
            (replay.start[run], replay.end[run], _OF_DEVICE[device.kind[rows]], rows),
            (replay.before[follows], replay.start[follows], np.full(len(follows), _IDLE), replay.rows[follows]),
        ):
            begin, end = np.maximum(begin, self._lo), np.minimum(end, self._hi)
            name = np.where(kind == _IDLE, -1, device.name[own])
            self._out.append(_Times(begin, end, kind, device.line[own], name).chosen(end > begin))
        return first if stops else self._before(first)

    def _before(self, at: int) -> int:
        """What an event's begin waited for."""
        replay = self._replay
        begin = int(replay.start[at])
        line = int(replay.trace.device.line[replay.rows[at]])
        if replay.source[at] >= 0:
            source = int(replay.source[at])
            self._add(int(replay.end[source]), begin, _IDLE, line)
            return source
        if self._goes_on[at]:
            self._add(int(replay.before[at]), begin, _IDLE, line)
            return at - 1
        launch, lane = int(replay.launch[at]), int(replay.host[at])
        if launch == LONG_AGO:
            self._add(self._lo, begin, _IDLE, line)
            return -1
        shown = begin - int(replay.unexplained[at])
        self._add(shown, begin, _IDLE, line)
        self._add(launch, shown, _LAUNCH, line)
        if lane < 0:
            self._add(self._lo, launch, _IDLE, line)
            return -1
        return self._through_host(lane, launch, int(replay.after[at]))

    def _through_host(self, lane: int, until: int, wait: int) -> int:
        """Back through what the host did since its last wait to the event that it waited for."""
        replay, waits = self._replay, self._replay.waits
        ended = int(waits.end[wait])
        begin, until = max(ended, self._lo), min(until, self._hi)
        if until > begin:
            self.host.setdefault(lane, []).append((begin, until))
        if ended <= self._lo:
            return -1
        if waits.on[wait] >= 0:
            source = int(waits.on[wait])
            self._add(int(replay.end[source]), ended, _SYNC, int(replay.trace.device.launch_line[replay.rows[source]]))
            return source
        # A batch that was waited for was in the making since the one before it came, whatever the loop did meanwhile.
        self._add(self._lo, ended, _INPUT)
        return -1


# -- the host ---------------------------------------------------------------------------------------------


def host_time(replay: Replay, lane: int, within: Spans, rows: I64) -> _Times:
    """What the threads of a host lane did within these spans: up to each launch the thread that launches next, and of
    its events, among ``rows``, the innermost."""
    trace, host = replay.trace, replay.trace.host
    if not len(within.start):
        return _together([])
    lo, hi = int(within.start[0]), int(within.end[-1])
    near = (replay.launch >= 2 * lo - hi) & (replay.launch <= 2 * hi - lo)  # and as long before and after
    mine = np.flatnonzero(near & (replay.host == lane))
    mine = mine[np.argsort(replay.launch[mine], kind="stable")]
    launch, called = replay.launch[mine], np.maximum.accumulate(replay.called[mine])
    thread = trace.device.launch_line[replay.rows[mine]].astype(np.int64)
    seen = thread >= 0  # others were launched by calls that the trace does not have
    launch, called, thread = launch[seen], called[seen], thread[seen]
    if not len(launch):
        return _Times(within.start, within.end, np.full(len(within.start), _HOST), *[
            np.full(len(within.start), -1, np.int64)] * 2)
    batch = union(*replay.with_loop[1:, replay.with_loop[0] == lane])
    sync = name_mask(trace, SYNCHRONIZE)
    turn = np.flatnonzero(thread[1:] != thread[:-1])
    turns = np.concatenate(([LONG_AGO], np.minimum(called[turn], launch[turn + 1]), [EVER]))
    of_turn = thread[np.append(turn, len(thread) - 1)]
    out = []
    for own in np.unique(of_turn).tolist():
        spans = intersect(union(turns[:-1][of_turn == own], turns[1:][of_turn == own]), within)
        if not len(spans.start):
            continue
        at, event = _innermost(trace, rows[host.line[rows] == own])
        edges = np.unique(np.concatenate((spans.start, spans.end, at, launch[thread == own], called[thread == own],
                                          batch.start, batch.end)))
        edges = edges[(edges >= lo) & (edges <= hi)]
        edges = edges[coverage(spans, edges, edges + 1) > 0]
        end = np.append(edges[1:], hi)
        end = np.minimum(end, spans.end[np.searchsorted(spans.start, edges, side="right") - 1])
        shown = np.append(-1, event)[np.searchsorted(at, edges, side="right")]
        name = np.full(len(edges), -1)
        open_ = np.flatnonzero(shown >= 0)
        open_ = open_[host.end_ns[shown[open_]] > edges[open_]]
        name[open_] = host.name[shown[open_]]
        last = np.searchsorted(launch, edges, side="right") - 1
        launching = (last >= 0) & (edges < called[last]) & (thread[last] == own)
        fetching = coverage(batch, edges, edges + 1) > 0
        kind = np.select((launching, sync[name], fetching), (_LAUNCH, _SYNC, _INPUT), _HOST)
        out.append(_Times(edges, end, kind, np.full(len(edges), own), name))
    return _together(out)


def _innermost(trace: Trace, rows: I64) -> tuple[I64, I64]:
    """From when on which of these events of one thread is the innermost one (row, -1: none)."""
    host = trace.host
    rows = rows[host.end_ns[rows] > host.start_ns[rows]]
    rows = rows[nesting_order(host.line[rows], host.start_ns[rows], host.end_ns[rows], host.name[rows], trace.names)]
    start, end, line, name = host.start_ns[rows], host.end_ns[rows], host.line[rows], host.name[rows]
    parent = nest(line, start, end, name, trace.names).parent
    rank = np.arange(len(rows))
    at = np.concatenate((end, start))
    event = np.concatenate((np.append(rows, -1)[parent], rows))
    sequence = np.lexsort((np.concatenate((-rank, rank)), np.repeat((0, 1), len(rows)), at))
    at, event = at[sequence], event[sequence]
    last = np.append(at[1:] != at[:-1], True)[:len(at)]
    return at[last], event[last]


# -- slack ------------------------------------------------------------------------------------------------


def slack(replay: Replay, ends: I64) -> tuple[I64, I64, I64]:
    """By how much each event (place) can end later, each be launched later, and each host lane go on later after each
    of its waits, before the last of the events ``ends``, one of each stream, ends later. ns; :data:`EVER` and more:
    by any time."""
    room = np.where(replay.before > LONG_AGO, replay.start - replay.before - replay.paused, 0)
    before = np.cumsum(room)  # within a piece an event may be later by the pauses between it and the last one as well
    in_time = np.where(replay.launch > LONG_AGO, replay.start - replay.launch - replay.launched, EVER)
    at_end = np.full(len(replay.rows), EVER, np.int64)  # what the last events leave to those before them in their piece
    for last in ends.tolist():
        own = slice(replay.head[replay.piece[last]], last + 1)
        at_end[own] = replay.end[ends].max() - replay.end[last] + before[last] - before[own]
    to_tail = before[replay.tail] - before[replay.head]
    nearest = (np.minimum.reduceat(in_time - before, replay.head) + before[replay.tail]).tolist()
    nearest_at_end = np.minimum.reduceat(in_time + at_end, replay.head).tolist()
    to_tail, head_at_end, head_room = to_tail.tolist(), at_end[replay.head].tolist(), room[replay.head].tolist()
    since_source = (replay.start - replay.since_source)[replay.head]
    source_room = np.where(replay.source[replay.head] >= 0, since_source - replay.end[replay.source[replay.head]], 0
                           ).tolist()
    head_start, begun = replay.start[replay.head].tolist(), replay.begun.tolist()
    waits = replay.waits
    count, pieces = len(waits.lane), len(replay.head)
    end_room, host = [EVER] * pieces, [EVER] * (count + 1)
    waited = (waits.end - waits.begin).tolist()
    collective = [EVER] * len(begun)  # by how much all can come later
    members: list[list[int]] = [[] for _ in begun]
    for p, number in enumerate(replay.piece_collective):
        if number >= 0:
            members[number].append(p)
    first_waits = np.append(True, waits.lane[1:] != waits.lane[:-1]).tolist()
    for node in reversed(replay.order):
        if node < count:
            on = replay.wait_on[node]
            if on >= 0:
                end_room[on] = min(end_room[on], host[node])
            if not first_waits[node]:
                host[node - 1] = min(host[node - 1], host[node] + waited[node])
        elif node < count + pieces:
            p = node - count
            number = replay.piece_collective[p]
            if number < 0:
                left = min(end_room[p] + to_tail[p], head_at_end[p])
                launch = min(end_room[p] + nearest[p], nearest_at_end[p])
            else:
                left = collective[number] + begun[number] - head_start[p]
                launch = left + nearest[p]
            if p and replay.piece_lane[p - 1] == replay.piece_lane[p]:
                end_room[p - 1] = min(end_room[p - 1], left + head_room[p])
            source, wait = replay.piece_source[p], replay.piece_wait[p]
            if source >= 0:
                end_room[source] = min(end_room[source], left + source_room[p])
            host[wait] = min(host[wait], launch)
        else:
            own = node - count - pieces
            collective[own] = min(min(end_room[p], head_at_end[p]) for p in members[own])
    later = np.minimum(np.array(end_room, np.int64)[replay.piece] + before[replay.tail][replay.piece] - before, at_end)
    arrives = later.copy()
    place = np.flatnonzero(replay.collective >= 0)
    number = replay.collective[place]
    arrives[place] = np.array(collective, np.int64)[number] + replay.begun[number] - replay.start[place]
    return later, in_time + arrives, np.array(host[:count], np.int64)


def _off_path(replay: Replay, walk: _Walk, lo: int, hi: int, ends: I64) -> tuple[_Times, I64]:
    """What the step's GPUs and hosts did that is not on the path, and the slack of each (ns)."""
    device = replay.trace.device
    later, launch_later, goes_on_later = slack(replay, ends)
    places = np.flatnonzero((replay.end > lo) & (replay.start < hi) & (replay.work > 0) & ~walk.on_path)
    rows = replay.rows[places]
    out = [_Times(np.maximum(replay.start[places], lo), np.minimum(replay.end[places], hi),
                  _OF_DEVICE[device.kind[rows]], device.line[rows], device.name[rows])]
    room = [later[places]]
    waits = replay.waits
    for lane in range(replay.host_lanes):
        own = np.flatnonzero(waits.lane == lane)
        busy = subtract(union([lo], [hi]), union(waits.begin[own[1:]], waits.end[own[1:]]))
        on_path = union(*zip(*walk.host[lane], strict=True)) if lane in walk.host else EMPTY
        found = host_time(replay, lane, subtract(busy, on_path), walk.host_rows)
        found = found.chosen((found.kind != _HOST) | (found.name >= 0))  # what shows nothing may be doing nothing
        out.append(found)
        room.append(_host_slack(replay, lane, own, found.end, launch_later, goes_on_later))
    return _together(out), np.concatenate(room)


def _host_slack(replay: Replay, lane: int, waits: I64, at: I64, launch_later: I64, goes_on_later: I64) -> I64:
    """By how much a host lane can be later from these instants on: its launches until its next wait, and that wait."""
    mine = np.flatnonzero((replay.host == lane) & (launch_later < _FAR))
    mine = mine[np.argsort(replay.launch[mine], kind="stable")]
    launch, turn = replay.launch[mine], replay.after[mine] - waits[0]
    # The least from each launch on to the last one before the next wait: those after later waits count for more.
    least = np.minimum(launch_later[mine], _FAR) + turn * 2 * _FAR
    least = np.append(np.minimum.accumulate(least[::-1])[::-1], EVER)
    own = np.searchsorted(replay.waits.end[waits], at, side="right") - 1
    until = np.append(replay.waits.end[waits][1:] - replay.waits.begin[waits][1:] + goes_on_later[waits[1:]], EVER)[own]
    return np.minimum(least[np.searchsorted(launch, at)] - own * 2 * _FAR, until)


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
    for ids, text in ((lines, _place), (names, _name)):
        texts = [text(trace, own) for own in ids.tolist()]
        known = sorted(set(texts))
        number = {own: i for i, own in enumerate(known)}
        out.append((ids, np.array([number[own] for own in texts], np.int64), known))
    (lines, of_line, places), (names, of_name, known_names) = out
    return [p._replace(line=of_line[np.searchsorted(lines, p.line)], name=of_name[np.searchsorted(names, p.name)])
            for p in parts], places, known_names


def _segments(path: _Times, places: list[str], names: list[str], lo: int, hi: int) -> Iterator[PathSegment]:
    """Stretches that are long by themselves, and of the others as many as lie in a part of the step as one, which is
    called what most of it is."""
    if not len(path.start):  # nothing was waited for, in a damaged trace
        return
    width = max((hi - lo) // _MOST_SEGMENTS, 1)
    length = path.end - path.start
    long, part = length >= width, (path.start - lo) // width
    new = np.append(True, long[1:] | long[:-1] | (part[1:] != part[:-1]))[:len(length)]
    group = np.cumsum(new) - 1
    _, what = np.unique(np.stack((path.kind, path.line, path.name)), axis=1, return_inverse=True)
    what = what.ravel()
    _, first, same = np.unique(group * (len(what) + 1) + what, return_index=True, return_inverse=True)
    most = np.lexsort((np.bincount(same, weights=length), group[first]))
    most = first[most[np.append(np.flatnonzero(np.diff(group[first][most])), len(most) - 1)]] if len(most) else most
    count = np.bincount(group)
    begin, end = path.start[new], path.end[np.append(np.flatnonzero(new)[1:], len(new)) - 1]
    for i, own in enumerate(most.tolist()):
        yield PathSegment(_KINDS[int(path.kind[own])], names[int(path.name[own])], places[int(path.line[own])],
                          int(begin[i]), int(end[i]), int(count[i]))


def _slack_rows(rest: _Times, room: I64, places: list[str], names: list[str]) -> Iterator[Slack]:
    """What takes most time first."""
    distinct, what = np.unique(np.stack((rest.kind, rest.line, rest.name)), axis=1, return_inverse=True)
    what = what.ravel()
    count, time = np.bincount(what), np.bincount(what, weights=rest.end - rest.start)
    least = np.full(len(count), EVER, np.int64)
    np.minimum.at(least, what, room)
    for own in np.argsort(-time, kind="stable")[:_MOST_ROWS].tolist():
        kind, line, name = distinct[:, own].tolist()
        yield Slack(_KINDS[kind], names[name], places[line], int(count[own]), float(time[own]) / 1e9,
                    _seconds(least[own]))


def _name(trace: Trace, name: int) -> str:
    return trace.names[name][:_LONGEST_NAME] if name >= 0 else ""


def _place(trace: Trace, line: int) -> str:
    if line < 0:
        return ""
    own = trace.lines[line]
    if own.gpu >= 0:
        return f"GPU {gpu_number(trace, own.gpu)} {own.name}"
    return f"{own.host} {own.name}" if len(trace.hosts) > 1 else own.name

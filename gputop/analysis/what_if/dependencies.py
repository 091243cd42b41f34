"""The device events that are replayed, and what each of them waits for.

An event begins after its launch and a latency, after the event before it in its stream and a pause, or after an event
of another stream of its GPU. Threads that launch to the same GPUs are one host lane.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from gputop.trace.lookups import alphabetical
from gputop.trace.model import I32, I64, Kind, Trace

# A launch takes effect, a stream goes on, and a wait returns within some microseconds (2-10 µs measured; more under
# load). What is longer has another reason.
LATENCY_NS = 20_000
RETURNS_NS = 50_000  # a wait, in a loaded host
HELD_NS = 100_000  # a launching call of this length waits for something
_WAIT_DOMINATES_FACTOR = 10  # times the time since another stream's event: most of the wait was for it
NEG_INF, POS_INF = -(1 << 60), 1 << 60  # instants before and after all others

Flags = npt.NDArray[np.bool_]


class ReplayEvents(Struct, frozen=True):
    """The device events that are replayed, ordered by stream and begin. An event's index is its index here.

    Columns have the shape (events,), times are ns of the trace's clock. ``row`` is the row in ``Trace.device``, where
    ``gpu``, ``kind`` and ``name`` stand; ``first`` whether the event is the first of its stream, ``previous_end`` the
    end of the one before it in its stream (NEG_INF: none). No event begins before ``previous_end``. ``of_row`` has the
    index of each row of the trace, -1: not replayed.
    """

    row: I64
    stream: I64
    gpu: npt.NDArray
    kind: npt.NDArray
    name: npt.NDArray
    first: Flags
    start: I64
    end: I64
    previous_end: I64
    work: I64
    of_row: I32

    @property
    def streams(self) -> int:
        return int(self.stream[-1]) + 1 if len(self.stream) else 0


class HostLanes(Struct, frozen=True):
    """Threads that launch to a GPU in common, as one lane. ``of_line`` is the lane of each line of the trace, -1: none;
    its last entry is -1, for no line. ``size`` is the number of lanes, ``of_gpu`` has the lane of each GPU that a lane
    launches to."""

    size: int
    of_line: I64
    of_gpu: Mapping[int, int]

    def gpus(self, lane: int) -> list[int]:
        return [gpu for gpu, number in self.of_gpu.items() if number == lane]


class EventLaunches(Struct, frozen=True):
    """The launch of each event, shape (events,): its host lane (-1: unknown), and when its call begins and ends
    (NEG_INF: unknown). ``usual_call_ns`` is the median length of a kernel's call, ``by_lane`` the begins of all
    launches of each lane, sorted."""

    lane: I64
    begin: I64
    end: I64
    usual_call_ns: int
    by_lane: tuple[I64, ...]

    def last_before(self, lane: int, begin: I64, end: I64) -> I64:
        """Last launch of the lane before the end of each of its calls, no sooner than the call began."""
        launches = np.append(NEG_INF, self.by_lane[lane])
        return np.maximum(begin, launches[np.searchsorted(launches, end) - 1])


class Delays(Struct, frozen=True):
    """Delays between events and what they wait for; ns, shape (events,).

    ``source`` is the event of another stream that it waits for (-1: none), ``since_source`` the time since its end.
    ``after_launch`` and ``after_previous`` are the latency of the launch and the pause in the stream as recorded,
    ``usual_after_launch`` and ``usual_after_previous`` as usual. ``unexplained`` is the part of ``after_launch`` that
    has no reason in the trace. ``fixed``: the event begins when it did, whatever its host does.
    """

    source: I64
    since_source: I64
    after_launch: I64
    after_previous: I64
    usual_after_launch: I64
    usual_after_previous: I64
    unexplained: I64
    fixed: Flags


def line_order(trace: Trace) -> I64:
    """The rank of each line by its GPU, host and name: the order of lines in a file never counts. Shape (lines,)."""
    rank = np.empty(len(trace.lines), np.int64)
    rank[sorted(range(len(trace.lines)), key=lambda i: (
        trace.lines[i].gpu, trace.lines[i].host, trace.lines[i].name))] = np.arange(len(trace.lines))
    return rank


def events_between(trace: Trace, lo: int, hi: int, line_rank: I64) -> ReplayEvents | None:
    """The device events that run between two instants (ns); None: there are none.

    1. Sort by stream, begin and end; what begins and ends at one instant by launch and name.
    2. An event ends no sooner than those before it in its stream, and begins no sooner than they end.
    """
    device = trace.device
    rows = np.flatnonzero((device.end_ns > lo) & (device.start_ns < hi))
    if not len(rows):
        return None
    stream = np.unique(line_rank[device.line[rows]], return_inverse=True)[1]
    order = np.lexsort((
        np.append(line_rank, -1)[device.launch_line[rows]], alphabetical(trace.names, device.name[rows]),
        device.launch_ns[rows], device.end_ns[rows], device.start_ns[rows], stream))
    rows, stream = rows[order], stream[order]
    of_row = np.full(len(device), -1, np.int32)
    of_row[rows] = np.arange(len(rows))
    first = np.append(True, stream[1:] != stream[:-1])
    start, end = device.start_ns[rows], device.end_ns[rows]
    apart = stream * (int(end.max()) - int(start.min()) + 1)  # keeps the running maximum within a stream
    end = np.maximum.accumulate(end + apart) - apart
    previous_end = np.where(first, NEG_INF, np.roll(end, 1))
    start = np.maximum(start, previous_end)
    return ReplayEvents(rows, stream, device.gpu[rows], device.kind[rows], device.name[rows], first, start, end,
                        previous_end, end - start, of_row)


def host_lanes(trace: Trace, events: ReplayEvents, line_rank: I64) -> HostLanes:
    """Group the threads that launch the events.

    1. Take the distinct pairs of launching thread and GPU.
    2. Join what they connect: two threads that launch to one GPU, two GPUs that one thread launches to.
    3. Number the groups by their first thread in ``line_rank``.
    """
    device = trace.device
    line = device.launch_line[events.row].astype(np.int64)
    seen = (device.launch_ns[events.row] >= 0) & (line >= 0)
    pairs = np.unique(line[seen] * (1 << 16) + events.gpu[seen])
    group: dict[int, int] = {}  # by thread, and by GPU below 0
    for thread, gpu in zip((pairs >> 16).tolist(), (pairs & 0xFFFF).tolist(), strict=True):
        old, new = group.setdefault(thread, len(group)), group.setdefault(-1 - gpu, len(group))
        if old != new:
            group = {key: new if value == old else value for key, value in group.items()}
    threads = sorted((int(line_rank[key]), value) for key, value in group.items() if key >= 0)
    number = {value: i for i, value in enumerate(dict.fromkeys(value for _, value in threads))}
    of_line = np.full(len(trace.lines) + 1, -1, np.int64)
    for key, value in group.items():
        if key >= 0:
            of_line[key] = number[value]
    return HostLanes(len(number), of_line, {-1 - key: number[value] for key, value in group.items() if key < 0})


def recorded_launches(trace: Trace, events: ReplayEvents, lanes: HostLanes) -> EventLaunches:
    """The launches as the trace has them. A launch begins no later than its event."""
    device = trace.device
    line = device.launch_line[events.row].astype(np.int64)
    seen = (device.launch_ns[events.row] >= 0) & (line >= 0)
    begin = np.where(seen, np.minimum(device.launch_ns[events.row], events.start), NEG_INF)
    end = np.where(seen, np.maximum(device.launch_end_ns[events.row], begin), NEG_INF)
    calls = (end - begin)[seen & (events.kind == Kind.COMPUTE)]
    return _launches(np.where(seen, lanes.of_line[line], -1), begin, end, int(np.median(calls)) if len(calls) else 0,
                     lanes.size)


def _launches(lane: I64, begin: I64, end: I64, usual_call_ns: int, lanes: int) -> EventLaunches:
    by_lane = tuple(np.sort(begin[lane == number]) for number in range(lanes))
    return EventLaunches(lane, begin, end, usual_call_ns, by_lane)


def find_delays(events: ReplayEvents, lanes: HostLanes, launches: EventLaunches) -> tuple[EventLaunches, Delays]:
    """Find what each event waited for, and the launches, with those that the trace does not have.

    1. The usual latency is the mean time from launch to begin where the stream was free, and the usual pause that from
       the end of the previous event where the launch was early.
    2. What is left of an event's wait after both is its rest. Up to :data:`LATENCY_NS` it belongs to whichever came
       last, and so does a rest that ends within the launching call.
    3. Of the others, and of launching calls of :data:`HELD_NS` and more, the event of the same GPU that ended just
       before is the source.
    4. What is then still late and has no known launch was launched just before it began, by the host lane of its GPU.
       Without a lane it begins when it did, and so does the first of a stream that waited with a known launch.
    5. The rest counts for what the event waited for; where that is not known, for both.
    """
    seen = launches.lane >= 0
    since_launch, since_previous = events.start - launches.begin, events.start - events.previous_end
    usual_launch = _usual(since_launch[seen & (launches.begin > events.previous_end)])
    usual_pause = _usual(since_previous[seen & (events.previous_end > launches.begin + 4 * usual_launch)])
    after_launch = np.minimum(since_launch, usual_launch)
    after_previous = np.minimum(since_previous, usual_pause)
    by_launch = launches.begin + after_launch >= events.previous_end + after_previous
    rest = events.start - np.maximum(launches.begin + after_launch, events.previous_end + after_previous)

    small = rest <= LATENCY_NS
    in_call = ~small & seen & by_launch & (events.start <= launches.end + LATENCY_NS)
    late = ~(small | in_call) | (events.first & ~seen)
    # A call that lasts may itself wait for another stream, as one that copies to pageable memory. What was late by
    # much may go on later after what it waited for than what was late by little.
    within = np.maximum(np.where(in_call, RETURNS_NS, LATENCY_NS), rest // _WAIT_DOMINATES_FACTOR)
    source, since_source = _other_streams(events, np.flatnonzero(late | (in_call & (rest >= HELD_NS))), within)
    in_call &= source < 0
    late &= source < 0

    unseen = np.flatnonzero(late & ~seen)
    lane = launches.lane.copy()
    lane[unseen] = np.array([lanes.of_gpu.get(gpu, -1) for gpu in range(int(events.gpu.max()) + 1)], np.int64)[
        events.gpu[unseen]]
    just_before = np.zeros(len(rest), bool)
    just_before[unseen] = (lane[unseen] >= 0) | events.first[unseen]
    queued = late & seen & events.first
    just_before |= queued
    lane[queued] = -1
    begin = np.where(just_before, events.start - usual_launch, launches.begin)

    unknown, explained = late & ~just_before, small | in_call
    after_launch = np.where(just_before, usual_launch,
                            after_launch + np.where((explained & by_launch) | unknown, rest, 0))
    return _launches(lane, begin, launches.end, launches.usual_call_ns, lanes.size), Delays(
        source, since_source, after_launch,
        after_previous=after_previous + np.where((explained & ~by_launch) | unknown, rest, 0),
        usual_after_launch=np.where(in_call, after_launch, usual_launch),
        usual_after_previous=np.full(len(rest), usual_pause, np.int64),
        unexplained=np.where(unknown & by_launch, rest, 0), fixed=just_before & (lane < 0))


def _other_streams(events: ReplayEvents, late: I64, within: I64) -> tuple[I64, I64]:
    """Event of another stream of the same GPU that ended last before each event of ``late`` began, and the time since;
    -1 where none ended ``within`` so many ns (by event). Both have the shape (events,)."""
    source, since = np.full(len(events.row), -1, np.int64), np.zeros(len(events.row), np.int64)
    for gpu in np.unique(events.gpu[late]).tolist():
        by_end = np.flatnonzero(events.gpu == gpu)
        by_end = by_end[np.argsort(events.end[by_end], kind="stable")]
        waiting = late[events.gpu[late] == gpu]
        ended = np.searchsorted(events.end[by_end], events.start[waiting], side="right") - 1
        last = by_end[np.maximum(ended, 0)]
        apart = events.start[waiting] - events.end[last]
        good = (ended >= 0) & (apart <= within[waiting]) & (events.stream[last] != events.stream[waiting]) & (
            events.work[last] > 0)
        source[waiting[good]], since[waiting[good]] = last[good], apart[good]
    return source, since


def _usual(latencies: I64) -> int:
    """The mean of those that are no more than a latency."""
    short = latencies[latencies <= LATENCY_NS]
    return int(short.mean()) if len(short) else 0

"""The graph of waits in the recorded window, through which a replay goes.

Events of a stream run one after the other, each no sooner than its launch (:mod:`~.dependencies`). A host lane goes on
as recorded, the time between calls included, but where it waited for a GPU or for a batch it goes on when these are
ready (:mod:`~.lane_waits`). A collective moves data once its last GPU has come.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from msgspec import Struct

from gputop.analysis.gpu.collectives import by_operation, matched, of_gpus
from gputop.analysis.gpu.device_time import GpuTimeline
from gputop.analysis.steps.model import Steps
from gputop.analysis.steps.training_loops import TrainingLoop, training_loops
from gputop.analysis.what_if.dependencies import (
    Delays,
    EventLaunches,
    HostLanes,
    ReplayEvents,
    events_between,
    find_delays,
    host_lanes,
    line_order,
    recorded_launches,
)
from gputop.analysis.what_if.lane_waits import LaneTimes, StepMarks, Waits, find_waits
from gputop.trace.intervals import Spans, overlap, union
from gputop.trace.model import I64, Trace

MAX_EVENTS = 100_000  # device events that are replayed: so many whole steps stand for the window


class Matched(Struct, frozen=True):
    """Collectives matched across GPUs. ``of_event`` is the collective of each event (-1: none) and ``transfer`` the
    time that the event lasts once all GPUs have come (ns), both (events,); ``begun`` is when the last GPU came to each
    collective (ns), shape (collectives,)."""

    of_event: I64
    transfer: I64
    begun: I64


class Pieces(Struct, frozen=True):
    """Stretches of a stream in which nothing waits for another stream or host lane but in its first event.

    ``of_event`` is the piece of each event, ``after_wait`` the last wait of its host lane before its launch (the number
    of waits: none), both (events,). ``order`` has all nodes of the replay in the order of their recorded times: wait w
    is w, piece p is waits + p, collective c is waits + pieces + c. The others are by piece: its first and last event
    (``head``, ``tail``), its stream, and what its head has: host lane, last wait, the piece that is its source, its
    collective (-1: none). ``wait_on`` has, by wait, the piece that is waited for, -1 for a batch.
    """

    of_event: I64
    after_wait: I64
    order: list[int]
    head: I64
    tail: I64
    stream: list[int]
    lane: list[int]
    wait: list[int]
    source: list[int]
    collective: list[int]
    wait_on: list[int]


class Boundaries(NamedTuple):
    """Begin and end of each replayed span (ns; two a span), and the last event of each stream that began before it, -1:
    none; shape (boundaries, streams)."""

    at: I64
    last_event: I64


class Graph(NamedTuple):
    """The graph of one trace. Times are nanoseconds of the trace's clock. ``spans`` is the time that is replayed,
    ``ambiguous_ns`` how much of it the pauses are in which the trace does not tell whether the host waits for the GPUs
    or is busy."""

    trace: Trace
    spans: Spans
    marks: StepMarks
    events: ReplayEvents
    lanes: HostLanes
    launches: EventLaunches
    delays: Delays
    loops: list[TrainingLoop]
    waits: Waits
    fetches: LaneTimes
    ambiguous_ns: int
    collectives: Matched
    boundaries: Boundaries
    pieces: Pieces


def build_graph(trace: Trace, gpu_timelines: Sequence[GpuTimeline], steps: Steps | None) -> Graph | None:
    """The graph of a trace; None where no device event runs in the time that is replayed.

    1. Choose the time: the steps, or as many of them as have :data:`MAX_EVENTS`; without steps the whole window.
    2. Order the device events by stream.
    3. Group the threads that launch them into host lanes.
    4. Explain each event's begin: by its launch, the event before it, or one of another stream.
    5. Find when host lanes wait, for a GPU or for a batch.
    6. Match collectives across GPUs.
    7. Cut the streams into pieces where anything waits for anything else.
    """
    spans = _replayed_spans(gpu_timelines, steps)
    line_rank = line_order(trace)
    events = events_between(trace, int(spans.start[0]), int(spans.end[-1]), line_rank)
    if events is None:
        return None
    marks = _step_marks(trace, steps)
    lanes = host_lanes(trace, events, line_rank)
    launches, delays = find_delays(events, lanes, recorded_launches(trace, events, lanes))
    loops = training_loops(trace)
    waits, fetches, ambiguous = find_waits(trace, events, lanes, launches, loops, marks)
    collectives = _find_collectives(trace, events, gpu_timelines)
    boundaries = _boundaries(spans, events)
    return Graph(trace, spans, marks, events, lanes, launches, delays, loops, waits, fetches,
                 overlap(ambiguous, spans), collectives, boundaries,
                 split_into_pieces(events, launches, delays, waits, collectives, boundaries))


def with_ambiguous_waits(graph: Graph) -> Graph:
    """The graph of the same trace in which the host, in each ambiguous pause, waits for the GPUs."""
    waits, _, _ = find_waits(graph.trace, graph.events, graph.lanes, graph.launches, graph.loops, graph.marks,
                             ambiguous=True)
    return graph._replace(waits=waits, pieces=split_into_pieces(
        graph.events, graph.launches, graph.delays, waits, graph.collectives, graph.boundaries))


def _step_marks(trace: Trace, steps: Steps | None) -> StepMarks:
    if steps is None:
        return StepMarks(False, 0.0, np.empty(0, np.int64))
    by_host = False
    if steps.call_ends_ns:
        begins, calls = steps.edges_ns[:, 0], trace.host.start_ns
        by_host = bool((calls[np.minimum(np.searchsorted(calls, begins), len(calls) - 1)] == begins).all())
    return StepMarks(by_host, steps.times.median_s, steps.edges_ns.ravel())


def _replayed_spans(gpu_timelines: Sequence[GpuTimeline], steps: Steps | None) -> Spans:
    """The steps; where there are very many events as many steps from the middle on as can be replayed; without steps
    the time from the first device event to the last."""
    if steps is None:
        windows = [timeline.window_ns for timeline in gpu_timelines]
        return union([min(lo for lo, _ in windows)], [max(hi for _, hi in windows)])
    edges = steps.edges_ns
    events = np.sum([np.searchsorted(timeline.start_ns, edges) for timeline in gpu_timelines], axis=0)
    if events[-1, 1] - events[0, 0] > MAX_EVENTS:
        first = len(edges) // 2
        last = int(np.searchsorted(events[:, 1], events[first, 0] + MAX_EVENTS, side="right"))
        first = int(np.searchsorted(events[:, 0], events[max(last - 1, first), 1] - MAX_EVENTS))
        edges = edges[min(first, last - 1):max(last, first + 1)]
    return union(edges[:, 0], edges[:, 1])


def _find_collectives(trace: Trace, events: ReplayEvents, gpu_timelines: Sequence[GpuTimeline]) -> Matched:
    """Matched collectives of which all GPUs' events are replayed."""
    of_event, transfer = np.full(len(events.row), -1, np.int64), events.work.copy()
    begun = [np.empty(0, np.int64)]
    _, rows_by_gpu = of_gpus(gpu_timelines)
    replayed = [rows[events.of_row[rows] >= 0] for rows in rows_by_gpu]
    count = 0
    for operations in by_operation(trace, replayed).values():
        rows = matched(trace, [rows_of_gpu for rows_of_gpu in operations if len(rows_of_gpu)])
        if isinstance(rows, str):
            continue
        members = events.of_row[rows]
        members = members[(members >= 0).all(axis=1)]
        if not len(members):
            continue
        last_start = events.start[members].max(axis=1)
        of_event[members] = count + np.arange(len(members))[:, None]
        transfer[members] = np.maximum(events.end[members] - last_start[:, None], 0)
        begun.append(last_start)
        count += len(members)
    return Matched(of_event, transfer, np.concatenate(begun))


def _boundaries(spans: Spans, events: ReplayEvents) -> Boundaries:
    edges = np.stack((spans.start, spans.end), axis=1).ravel()
    last = np.full((len(edges), events.streams), -1, np.int64)
    firsts = np.append(np.flatnonzero(events.first), len(events.row))
    for stream in range(events.streams):
        lo, hi = firsts[stream], firsts[stream + 1]
        before = np.searchsorted(events.start[lo:hi], edges) - 1
        last[:, stream] = np.where(before >= 0, lo + before, -1)
    return Boundaries(edges, last)


def split_into_pieces(events: ReplayEvents, launches: EventLaunches, delays: Delays, waits: Waits, collectives: Matched,
                      boundaries: Boundaries) -> Pieces:
    """Cut the streams where they, or host lanes, wait for each other.

    1. Find for each event the last wait of its host lane before its launch. An event of unknown launch has that of the
       one before it: it cuts nothing.
    2. A piece begins with the first event of a stream, with one that waits for another stream, with each event of a
       collective and the one after it, where a wait lies between two launches, and after an event that something
       waits for or that is the last before a boundary.
    3. Order waits, pieces and collectives by their recorded times. At one instant waits come first, which launch, and
       collectives last, which are arrived at.
    """
    count, n = len(waits.lane), len(events.row)
    after = np.zeros(n, np.int64)
    for lane in range(len(launches.by_lane)):
        of_lane, launched = waits.of_lane(lane), np.flatnonzero(launches.lane == lane)
        after[launched] = of_lane[np.searchsorted(waits.end[of_lane], launches.begin[launched], side="right") - 1]
    after[delays.fixed] = count
    placed = (launches.lane >= 0) | events.first
    last_known = after[np.maximum.accumulate(np.where(placed, np.arange(n), 0))]

    meets = collectives.of_event >= 0
    begins = events.first | (delays.source >= 0) | meets
    begins[1:] |= (last_known[1:] != last_known[:-1]) | meets[:-1]
    ends = np.concatenate((waits.on, delays.source, boundaries.last_event.ravel()))
    begins[ends[(ends >= 0) & (ends < n - 1)] + 1] = True
    head, of_event = np.flatnonzero(begins), np.cumsum(begins) - 1

    when = np.concatenate((waits.end, events.start[head], collectives.begun))
    kind = np.repeat((0, 1, 2), (count, len(head), len(collectives.begun)))
    return Pieces(
        of_event, after, np.lexsort((kind, when)).tolist(), head, np.append(head[1:], n) - 1,
        stream=events.stream[head].tolist(), lane=launches.lane[head].tolist(), wait=last_known[head].tolist(),
        source=np.where(delays.source[head] >= 0, of_event[delays.source[head]], -1).tolist(),
        collective=collectives.of_event[head].tolist(),
        wait_on=np.where(waits.on >= 0, of_event[waits.on], -1).tolist())

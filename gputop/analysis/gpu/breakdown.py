"""Breakdown of the step: eight exclusive parts that sum to it exactly.

Each instant of each GPU that took part goes to the first of these that holds, and the
parts are averaged over those GPUs:

1. ``compute``: a kernel that is no collective runs, or the GPU copies or clears its own memory;
2. ``collectives``: a collective or a GPU-to-GPU copy runs (so this is the exposed part);
3. ``h2d``, then ``d2h``: a copy from or to the host runs;
4. ``input``: the training loop waits for a batch and none of its GPUs runs anything;
5. ``idle``: this GPU waits for another one, which works all the while;
6. ``launch``: the event that ends the gap was launched after the gap began, or its launching call is not done
   yet, and the host was launching work meanwhile (launches close together, inside a tf.function where one is traced);
7. ``host``: the same, but the host was doing something else;
8. ``idle``: the rest (work was queued, the launch is not in the trace, or the GPU started long after it).

The time before a GPU's first event may be such a gap, unless that event waited in a queue. What was launched before the
recording may have no event in it: the gap begins later than the process' events by the longest time that recorded work
took from its launch to its end, or when the process has waited for the whole GPU. The time after the last event is
such a gap up to the end of the process' events, if that event's launch is known and the process launches nothing later
that has no event. No event of the host, no cause: such time is ``idle``.

Without any GPU in the trace there is ``input``, and all else is ``host``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

import numpy as np
from msgspec import Struct

from gputop.analysis.gpu.device_time import (
    GpuTimeline,
    any_busy,
    event_after,
    gpu_number,
    launch_delays_ns,
    waits_for_another,
)
from gputop.analysis.results import StepRuns, TypicalStep
from gputop.analysis.steps.model import Steps
from gputop.analysis.steps.training_loops import TrainingLoop, training_loops
from gputop.render.step_parts import PART_IDS
from gputop.trace.graph_captures import in_captures
from gputop.trace.intervals import AT_ONCE, EMPTY, Spans, chained, coverage, intersect, merge, overlap, subtract, union
from gputop.trace.lookups import host_rows, host_stat, rows_of, spans_of
from gputop.trace.model import F64, I64, Trace

# Launches further apart than this are not one stretch of launching (nsys-ai counts GPU gaps from 1 ms).
LAUNCHING_GAP_NS = 1_000_000
# The first event of a GPU that begins so long after its call waited in a queue. gputop's own figure.
_QUEUED_NS = 1_000_000
SLOTS = 400  # of a typical step: more cannot be told apart on a page
_WAITS_FOR_ALL = r"(?:cuda|hip)(?:Device|Thread)Synchronize|cuCtxSynchronize"
_LAUNCHES = r"(?:cu|cuda|hip(?:Ext)?)(?:Module)?(?:Graph)?(?:Launch|Mem(?:cpy|set))"

# By GPU (index into ``Trace.gpus``) and part, when the part holds.
PartsByGpu = Mapping[int, Mapping[str, Spans]]


class IdleByGpu(Struct, frozen=True):
    """Idle spans by GPU that took part (index into ``Trace.gpus``): the loop that feeds it waits for a batch and none
    of that loop's GPUs is busy, or it waits for its host: the instants of the parts ``launch`` and ``host``."""

    starved: Mapping[int, Spans]
    late: Mapping[int, Spans]


def breakdown_by_step(trace: Trace, by_gpu: PartsByGpu, bounds: Sequence[tuple[int, int]]) -> dict[str, F64]:
    """Seconds of each part, mean of the GPUs, in each of ``bounds`` (disjoint, in order), of which ``by_gpu`` are the
    :func:`parts_by_gpu`; by part, of shape (len(bounds),). Without GPUs on the host."""
    parts, gpus = {name: [parts[name] for parts in by_gpu.values()] for name in PART_IDS}, len(by_gpu)
    if not gpus:
        within = union([a for a, _ in bounds], [b for _, b in bounds])
        parts["input"].append(intersect(merge(EMPTY, *(loop.waits for loop in training_loops(trace))), within))
        parts["host"].append(subtract(within, parts["input"][0]))
    start, end = np.array(bounds, np.int64).reshape(-1, 2).T
    return {name: sum((coverage(spans, start, end) for spans in parts[name]), np.zeros(len(bounds), np.int64))
            / (1e9 * max(gpus, 1)) for name in PART_IDS}


def parts_by_gpu(
    trace: Trace, gpu_timelines: Sequence[GpuTimeline], bounds: Sequence[tuple[int, int]],
    idle: IdleByGpu | None = None,
) -> dict[int, dict[str, Spans]]:
    """Spans of each part on each GPU that took part (index into ``Trace.gpus``). ``idle``: the same bounds'
    :func:`idle_by_gpu`, where that is known."""
    within = union([a for a, _ in bounds], [b for _, b in bounds])
    idle = idle_by_gpu(trace, gpu_timelines, bounds) if idle is None else idle
    launching = _launching(trace, within) if idle.late else EMPTY
    return {timeline.gpu: _gpu_parts(timeline, within, idle.starved[timeline.gpu], idle.late[timeline.gpu], launching)
            for timeline in gpu_timelines if timeline.gpu in idle.late}


def _gpu_parts(timeline: GpuTimeline, within: Spans, waiting: Spans, late: Spans, launching: Spans) -> dict[str, Spans]:
    """Exclusive parts of one GPU's time within ``within``; together they are all of it."""
    left = within
    parts: dict[str, Spans] = {}

    def take(name: str, spans: Spans) -> None:
        nonlocal left
        parts[name] = intersect(left, spans)
        left = subtract(left, parts[name])

    take("compute", merge(timeline.compute, timeline.other))
    take("collectives", merge(timeline.collectives, timeline.p2p))
    take("h2d", timeline.h2d)
    take("d2h", timeline.d2h)
    take("input", waiting)
    return {**parts, "launch": intersect(late, launching), "host": subtract(late, launching),
            "idle": subtract(left, late)}


def idle_by_gpu(trace: Trace, gpu_timelines: Sequence[GpuTimeline], bounds: Sequence[tuple[int, int]]) -> IdleByGpu:
    """Idle spans that several analyses need of the same ``bounds`` (disjoint, in order)."""
    within = union([a for a, _ in bounds], [b for _, b in bounds])
    gpu_timelines = [timeline for timeline in gpu_timelines if overlap(timeline.busy, within)]
    starved = _starved(trace, gpu_timelines, training_loops(trace))
    processes = dict[tuple[str, int], _Process]()
    late = {}
    for timeline in gpu_timelines:
        name = process_of(trace, timeline.gpu)
        edges = EMPTY
        if within.start[0] < timeline.window_ns[0] or timeline.window_ns[1] < within.end[-1]:
            if name not in processes:
                processes[name] = _process(trace, name)
            edges = _late_at_edges(trace, timeline, within, processes[name])
        waits = merge(starved[timeline.gpu], waits_for_another(
            timeline, of_one_process(trace, gpu_timelines, timeline.gpu), edges))
        late[timeline.gpu] = subtract(intersect(merge(timeline.late, edges), within), waits)
    return IdleByGpu(starved, late)


def typical_step(trace: Trace, gpu_timelines: Sequence[GpuTimeline], steps: Steps | None,
                 by_gpu: PartsByGpu | None) -> TypicalStep | None:
    """Picture of one step as it went, GPU by GPU, for documents that outlive the trace; ``by_gpu`` are the parts of all
    steps. None where the trace has no steps, or no GPU ran in the typical one."""
    if steps is None or by_gpu is None:
        return None
    durations = np.array([(end - begin) / 1e9 for begin, end in steps.bounds_ns])
    step = int(np.argmin(np.abs(durations - steps.times.median_s)))
    begin, end = steps.bounds_ns[step]
    whole = union([begin], [end])
    gpus = {timeline.gpu: by_gpu[timeline.gpu] for timeline in gpu_timelines if overlap(timeline.busy, whole)}
    if not gpus:
        return None
    edges = np.linspace(begin, end, SLOTS + 1).round().astype(np.int64)
    runs = []
    for gpu, parts in gpus.items():
        names = list(parts)
        most = np.argmax([coverage(intersect(spans, whole), edges[:-1], edges[1:]) for spans in parts.values()], axis=0)
        cuts = [0, *(np.flatnonzero(np.diff(most)) + 1).tolist(), SLOTS]
        runs.append(StepRuns(gpu_number(trace, gpu), tuple((names[most[a]], a, b) for a, b in pairwise(cuts))))
    return TypicalStep(step, float(durations[step]), SLOTS, tuple(sorted(runs, key=lambda r: r.gpu)))


def unseen_before_first_event(gpu_timelines: Sequence[GpuTimeline], steps: Steps, parts: PartsByGpu) -> dict[int, int]:
    """Time (ns), by GPU (index into ``Trace.gpus``), before its first event in which nothing shows whether it worked:
    of the steps, whose ``parts`` these are."""
    begin = steps.edges_ns[:1, 0]
    return {timeline.gpu: int(coverage(parts[timeline.gpu]["idle"], begin, np.array(timeline.window_ns[:1])).sum())
            for timeline in gpu_timelines if timeline.gpu in parts and timeline.window_ns[0] > begin[0]}


def bounds_judged(trace: Trace, gpu_timelines: Sequence[GpuTimeline], steps: Steps | None) -> Sequence[tuple[int, int]]:
    """The steps; without steps the time from the first device event to the last, or the window without any."""
    if steps is not None:
        return steps.bounds_ns
    if not gpu_timelines:
        return (trace.window_ns,)
    begins, ends = zip(*(timeline.window_ns for timeline in gpu_timelines), strict=True)
    return ((min(begins), max(ends)),)


def of_one_process(trace: Trace, gpu_timelines: Sequence[GpuTimeline], gpu: int) -> list[GpuTimeline]:
    """The GPUs of the process that this one belongs to. Only among these one waits for another without a collective: of
    another process the host knows nothing."""
    process = process_of(trace, gpu)
    return [timeline for timeline in gpu_timelines if process_of(trace, timeline.gpu) == process]


def process_of(trace: Trace, gpu: int) -> tuple[str, int]:
    """Host and rank of the process that this GPU (index into ``Trace.gpus``) belongs to."""
    return trace.gpus[gpu].host, trace.gpus[gpu].rank


class _Process(Struct, frozen=True):
    """Events of one process' host (ns): the begin of the first and the end of the last (empty without any), the ends of
    its waits for the whole GPU, and the begins of its launches and copies, in order."""

    window_ns: I64
    synchronized_ns: I64
    launches_ns: I64


def _process(trace: Trace, process: tuple[str, int]) -> _Process:
    host = trace.host
    of_process = np.array([line.gpu < 0 and (line.host, line.rank) == process for line in trace.lines] + [False], bool)
    rows = rows_of(of_process.take(host.line))
    start, end = host.start_ns[rows], host.end_ns[rows]
    waits, launches = (rows[of_process[host.line[rows]]] for rows in (
        host_rows(trace, _WAITS_FOR_ALL), host_rows(trace, _LAUNCHES)))
    launches = launches[~in_captures(trace, launches)]
    return _Process(np.array([start[0], end.max()]) if len(start) else start[:0], host.end_ns[waits],
                    host.start_ns[launches])


def _late_at_edges(trace: Trace, timeline: GpuTimeline, within: Spans, process: _Process) -> Spans:
    """The time before this GPU's first event and after its last one in which it waits for its host, see above."""
    device = trace.device
    if not len(process.window_ns):
        return EMPTY
    first, last = timeline.window_ns
    end = min(int(within.end[-1]), int(process.window_ns[1]))
    launch = device.launch_ns[timeline.events]
    spans = []
    if (launch >= 0).any():
        longest = int((timeline.end_ns - launch)[launch >= 0].max())
        done = process.synchronized_ns[process.synchronized_ns < first]
        begin = max(int(within.start[0]), min(int(process.window_ns[0]) + longest, *done[:1].tolist(), first))
        resumed = event_after(
            trace, timeline.rows[timeline.start_ns == first], Spans(np.array([begin]), np.array([first])))
        delay = launch_delays_ns(trace, resumed, np.array([first]))
        if begin < device.launch_ns[resumed[0]] and delay[0] <= _QUEUED_NS:
            spans.append((begin, first))
    launched = launch[timeline.end_ns == last].max()
    later = process.launches_ns[np.searchsorted(process.launches_ns, launched, side="right"):]
    if last < end and launched >= 0 and np.isin(later, device.launch_ns[device.launch_ns > launched]).all():
        spans.append((last, end))
    return union([a for a, _ in spans], [b for _, b in spans])


def _starved(trace: Trace, gpu_timelines: Sequence[GpuTimeline], waiting: Sequence[TrainingLoop]) -> dict[int, Spans]:
    """Spans by GPU in which the loop that feeds it waits for a batch and none of that loop's GPUs is busy. A loop bound
    to a thread feeds the GPUs that thread launches on, any other loop those of its host."""
    out = {timeline.gpu: EMPTY for timeline in gpu_timelines}
    for loop in waiting:
        fed = [timeline for timeline in gpu_timelines
               if loop.line >= 0 and (trace.device.launch_line[timeline.events] == loop.line).any()]
        fed = fed or [timeline for timeline in gpu_timelines if trace.gpus[timeline.gpu].host == loop.host]
        starved = subtract(loop.waits, any_busy(trace, fed))
        for timeline in fed:
            out[timeline.gpu] = merge(out[timeline.gpu], starved)
    return out


def _launching(trace: Trace, within: Spans) -> Spans:
    """Spans in which the host was launching work: runs of launches close together, inside tf.functions where there are
    any. What lies outside ``within`` may be left out."""
    device = trace.device
    lo, hi = int(within.start[0]) - LAUNCHING_GAP_NS, int(within.end[-1]) + LAUNCHING_GAP_NS

    def launches() -> Iterator[I64]:
        for i in range(0, len(device), AT_ONCE):
            first = device.launch_ns[i:i + AT_ONCE]
            near = rows_of((first >= max(lo - LAUNCHING_GAP_NS, 0)) & (first <= hi))
            first = first[near]
            # A launch takes effect at the device's start, so the stretch reaches up to there for short delays.
            begun = device.start_ns[i:i + AT_ONCE][near]
            yield first
            yield begun[rows_of(begun - first <= LAUNCHING_GAP_NS)]

    runs = chained(launches(), LAUNCHING_GAP_NS)
    rows, values = host_stat(trace.host, "is_func")
    rows = rows[values == 1]
    return intersect(runs, spans_of(trace, rows)) if len(rows) else runs

"""Marks of steps in a trace: those of profilers, of frameworks, of viewers, and ranges that the user numbered."""

from __future__ import annotations

import numpy as np

from gputop.analysis.results import SESSION_RUN
from gputop.analysis.steps.anchors import Anchors, first_to_last, steps_of_ranks
from gputop.analysis.steps.loop_selection import other_loops, select_loop, within_each_step
from gputop.analysis.steps.optimizer_calls import updates_ns
from gputop.analysis.steps.phases import EVALUATION, PREDICTION, TRAINING, UNKNOWN
from gputop.analysis.steps.user_ranges import RepeatedSteps, named_ranges, names_parts, numbered_ranges, repeated_steps
from gputop.trace.intervals import joined
from gputop.trace.lookups import host_rows, host_stat, spans_of
from gputop.trace.model import I64, Trace
from gputop.trace.threads import GRAPH_EXECUTOR, busiest_line

_PROFILER_STEP = r"ProfilerStep#\d+$"
_KERAS2_MARKERS = {"train": TRAINING, "test": EVALUATION, "predict": PREDICTION}


def profiler_steps(trace: Trace) -> Anchors | None:
    """Kineto's ``ProfilerStep#<n>``, of all ranks."""
    rows = host_rows(trace, _PROFILER_STEP)
    if not len(rows):
        return None
    start, end = steps_of_ranks(trace, rows)
    return Anchors("ProfilerStep# markers", "high", start, end, start)


def session_run(trace: Trace) -> Anchors | None:
    """The one ``session.run`` that a timeline of TensorFlow 1 holds; of several, where files were joined into one, each
    up to the next: the source of the graph's part on one device of one task runs once in each."""
    if not any(line.name.startswith(GRAPH_EXECUTOR) for line in trace.lines):
        return None
    (begin, end), sources = trace.window_ns, host_rows(trace, "_SOURCE:")
    sources = sources[trace.host.line[sources] == trace.host.line[sources[:1]]]
    start = np.unique(trace.host.start_ns[sources])  # a run may have been drawn several times
    edges = start if len(start) > 1 else np.array([begin, end])
    start = edges[:max(len(start), 1)]
    return Anchors(SESSION_RUN, "medium", start, start, start, bounds_ns=np.stack((edges[:-1], edges[1:]), axis=1))


def step_markers(trace: Trace) -> Anchors | None:
    """Events with ``step_num``: Keras 2 (``train``), tf.profiler.experimental.Trace, JAX's StepTraceAnnotation.

    1. Of the thread with most of them.
    2. Of ``train``, ``test`` and ``predict`` the first; of other names the one that takes most time.
    3. Markers of each name end a step, but those of evaluations and predictions that each step holds. A name that ends
       with the number, "train 109" of XProf's viewer, is the one without.
    """
    host = trace.host
    all_rows, numbers = host_stat(host, "step_num")
    if not len(all_rows):
        return None
    kept = host.line[all_rows] == busiest_line(trace, host.line[all_rows])
    rows, marker_of = all_rows[kept], dict[str, int]()
    named = zip(host.name[rows].tolist(), numbers[kept].tolist(), strict=True)
    name = np.array([marker_of.setdefault(trace.names[i].removesuffix(f" {number}"), i) for i, number in named])
    title_of = {marker: title for title, marker in marker_of.items()}
    phase_of = {marker: _KERAS2_MARKERS.get(title, UNKNOWN) for marker, title in title_of.items()}
    loop = select_loop(trace, name, host.end_ns[rows] - host.start_ns[rows], phase_of)
    inside, phases_inside = within_each_step(trace, rows, name, loop.function, phase_of)
    if phases_inside:
        rows, name = rows[~inside], name[~inside]
        loop = select_loop(trace, name, host.end_ns[rows] - host.start_ns[rows], phase_of)
    steps = rows[name == loop.function]
    title, start, end, edges = (title_of[loop.function], host.start_ns[steps], host.end_ns[steps],
                                host.start_ns[rows])
    if names_parts(f"{title} 0"):
        number = [(value,) for value in numbers[np.searchsorted(all_rows, steps)].tolist()]
        repeated = repeated_steps(trace, steps, number, trace.lines[host.line[steps[0]]].rank, by_name=True)
        if repeated is None:
            return None
        start, end, edges = _of_repeated(trace, repeated)
        title = f"rounds of {title}" if repeated.parts else title
    return Anchors(
        f"{title} markers with step_num", "high", start, end, edges, phase=loop.phase,
        # Markers of other names may be of epochs, around those of the steps.
        left_out_s={phase: time_s for phase, time_s in loop.left_out_s.items() if phase != UNKNOWN},
        other_loops=other_loops(trace, rows, name, {
            marker: phase for marker, phase in phase_of.items()
            if marker != loop.function and phase != UNKNOWN and phase not in phases_inside}),
        inside=phases_inside)


def numbered_steps(trace: Trace) -> Anchors | None:
    """Ranges of the user's that number the iterations (:mod:`gputop.analysis.steps.user_ranges`). Those that
    evaluate end a step, and are another loop."""
    ranges = numbered_ranges(trace)
    if ranges is None:
        return None
    host = trace.host
    if ranges.repeated is None:
        start, end = steps_of_ranks(trace, ranges.rows)
        edges, of = start, ""
    else:
        start, end, edges = _of_repeated(trace, ranges.repeated)
        of = "rounds of " if ranges.repeated.parts else ""
    evaluations = spans_of(trace, ranges.evaluations)
    loops = {}
    if len(ranges.evaluations):
        loops[EVALUATION] = joined(evaluations, int(np.median(evaluations.end - evaluations.start)) + 1)
    return Anchors(f'{of}ranges "{ranges.name}"', "high", start, end,
                   np.concatenate((edges, host.start_ns[ranges.evaluations])),
                   phase=EVALUATION if ranges.evaluates else UNKNOWN, other_loops=loops)


def _of_repeated(trace: Trace, steps: RepeatedSteps) -> tuple[I64, I64, I64]:
    """Begins, ends and edges (ns) of these steps. The optimizer that follows several ranges ends their step; without
    one it is not known what behind them is the step's, and each step is as long as that to the next."""
    host, rows = trace.host, steps.rows
    start, end = host.start_ns[rows[:, 0]], host.end_ns[rows[:, 1]]
    edges = start if steps.end_row is None else np.append(start, host.start_ns[steps.end_row])
    if not steps.parts or not len(rows):
        return start, end, edges
    begins, ends = updates_ns(trace, trace.lines[host.line[rows[0, 0]]].rank)
    last = np.searchsorted(begins, np.append(edges, np.iinfo(np.int64).max)[1:len(start) + 1]) - 1
    if not len(begins) or not ((last >= 0) & (begins[last] >= start)).all():
        return start, start, edges
    return start, np.maximum(end, ends[last]), edges


def named_steps(trace: Trace) -> Anchors | None:
    """Ranges of the user's that name the step, or its parts in turn (:mod:`gputop.analysis.steps.user_ranges`)."""
    ranges = named_ranges(trace)
    if ranges is None:
        return None
    edges = np.concatenate((ranges.start_ns, *(spans.start for spans in ranges.others.values())))
    return Anchors(f"ranges {ranges.name}", "medium", ranges.start_ns, ranges.end_ns, edges,
                   phase=EVALUATION if ranges.evaluates else UNKNOWN,
                   left_out_s={phase: spans.total / 1e9 for phase, spans in ranges.others.items()},
                   other_loops=ranges.others)


def viewer_steps(trace: Trace) -> Anchors | None:
    """The steps that XProf marked in the file, from the first GPU's begin to the last one's end, or to the next step's
    begin."""
    events = trace.step_events
    if not len(events):
        return None
    start, end = first_to_last(events.name, events.start_ns, events.end_ns)
    order = np.argsort(start, kind="stable")
    start, end = start[order], end[order]
    end = np.minimum(end, np.append(start[1:], np.iinfo(np.int64).max))
    bounds = np.stack((start, end), axis=1)[end > start]
    start = bounds[:, 0]
    return Anchors("the steps that XProf marked in the file", "medium", start, start, start,
                   bounds_ns=bounds) if len(bounds) else None

"""Training steps: where each begins and ends, and what that rests on.

Anchors are tried in order of trust. A step runs from the start of one anchor to the start
of the next, so that the gap between two calls belongs to the step before it. Where nothing
marks steps and nothing surely repeats, there are none: :func:`find_steps` returns None.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from gputop.analysis.results import StepTimes
from gputop.analysis.steps.compilations import AGAIN, outermost, rebuilt
from gputop.analysis.steps.jax_calls import marking_calls
from gputop.analysis.steps.kernel_sequence import kernel_sequence
from gputop.analysis.steps.model import Steps
from gputop.analysis.steps.numbered_ranges import numbered_ranges
from gputop.analysis.steps.phases import EVALUATION, PREDICTION, TRAINING, UNKNOWN, phases
from gputop.analysis.steps.pytorch_loops import LoopSteps, batch_steps, op_sequence, optimizer_steps
from gputop.analysis.steps.start_up import TRIES, StartUpSpan, past_start, start_up_spans
from gputop.analysis.steps.training_loops import GET_NEXT
from gputop.text.units import seconds
from gputop.trace.int_map import IntMap
from gputop.trace.intervals import EMPTY, Spans, coverage, joined, merge, union
from gputop.trace.lookups import COMPILE, distinct, host_rows, host_stat, name_mask, rows_of
from gputop.trace.model import I64, Kind, Trace
from gputop.trace.threads import MAIN, busiest_line, lines_of

# Keras 3 names its step functions so, in fit and evaluate alike; Keras 2 without markers: train_function and so on.
_KERAS = r"(?:(?:one|multi)_step_on_(?:iterator|data)\w*|(?:train|test|predict)_function)"
_KERAS_OPS = rf"__inference_{_KERAS}_\d+$"
_KERAS_EVENTS = rf"{_KERAS}$"
_NUMBER = re.compile(r"_\d+$")
_REPLICA = re.compile(r"(?:^|/)replica_(\d{1,3})/")  # of the first no name tells: tf.distribute's MirroredStrategy
_MARKED = {"train": TRAINING, "test": EVALUATION, "predict": PREDICTION}  # Keras 2's own markers
_WANTED = (TRAINING, UNKNOWN, EVALUATION, PREDICTION)  # which loop of a window its steps are taken from, first to last
# A step that takes this many times the median of those after it, at the head of the window, is warm-up
# (compilation, autotuning, a launch queue that still fills). gputop's own figure.
_WARM_UP_FACTOR = 2.0
# Markers whose own end meets the next one's start within this share of the step are contiguous: then the
# last marker is a whole step too.
_CONTIGUOUS_SHARE = 0.02
# The host runs ahead of the GPU where the steps' kernels take this many times as long as the host's calls for them:
# then its marks tell no step time. The smaller factor does where each step's kernels begin a step late or more, so that
# the GPU never waits for the host. gputop's own figures; a queue that is merely deep keeps the same pace.
_AHEAD_FACTOR, _BEHIND_A_STEP_FACTOR = 1.5, 1.05
# The profiler's own end, in JAX and in TensorFlow's and PyTorch's Python.
_PROFILER_STOP = (r"\$profiler\.py:\d+ stop_trace|ProfilerSession::(?:CollectData|Stop)|stop_trace$|"
                  r"\$profiler_v2\.py:\d+ stop")
_FEW = 3  # steps; of fewer each may be the first
_START_UP_SHARE = 0.5  # of a step that goes into compilation, or other work of a start
_BY_KERNELS = ", by their kernels: the host runs ahead"
_LOOP_APART = 3.0  # median pauses between the calls of one loop that are still its own. gputop's own figure
# Two calls that take this share of the recording, each so long that it hardly holds more, are its steps. gputop's own
# figures.
_LONG_CALLS, _LONG_CALL_NS = 0.5, 10**9
_MIN_LOOP_CALLS = 3  # calls of one name, to be taken for those of a loop


@dataclass(frozen=True, slots=True)
class _Anchors:
    """What marks steps: ``edges_ns`` are all starts that end a step, ``start_ns`` those of steps themselves."""

    what: str
    confidence: str
    start_ns: I64
    end_ns: I64
    edges_ns: I64
    min_steps: int
    packs_iterations: bool = False
    phase: str = UNKNOWN
    left_out_s: Mapping[str, float] = field(default_factory=dict)
    bounds_ns: I64 | None = None  # of the steps, shape (n, 2), where they are known one by one and not by their starts
    unit: str = "step"
    other_loops: Mapping[str, Spans] = field(default_factory=dict)  # as of Steps
    builds: bool = False  # each of them compiles: a long one at the head is no warm-up
    most_warm_up: int | None = None  # leading steps; where more are far longer than the others, all are kept


def find_steps(trace: Trace) -> Steps | None:
    """The steps of the window by the most trusted anchor there is, or None where nothing is sure enough."""
    finders: tuple[Callable[[Trace], _Anchors | None], ...] = (
        _profiler_steps, _step_markers, _keras_functions, _numbered, _rebuilt_executions, _jax_executions,
        _root_functions, _few_calls, _long_calls, _viewer_steps, _eager_loop, _optimizer_calls, _batches,
        _kernel_sequence, _op_sequence,
    )
    start_up, again = start_up_spans(trace), rebuilt(trace)
    for finder in finders:
        anchors = finder(trace)
        if anchors is None:
            continue
        bounds, whole = _bounds(anchors)
        bounds = _recorded(trace, bounds)
        bounds = _without_profilers_end(trace, bounds)
        settled, first = _without_start_up(trace, bounds, start_up)
        settled, dropped = (settled, 0) if anchors.builds else _without_warm_up(settled, anchors.most_warm_up)
        dropped += first
        warm_up, bounds = bounds[:dropped], settled
        # A function that is built again and again for longer than these steps take is what the job repeats.
        taken_ns = int((bounds[:, 1] - bounds[:, 0]).sum())
        if again and not anchors.builds and anchors.confidence != "high" and again[0].time_ns > taken_ns:
            continue
        # Calls whose lengths never settle are not the steps of a loop.
        if len(bounds) >= anchors.min_steps and (anchors.confidence == "high" or dropped <= len(bounds)):
            calls, on_gpu = bounds, _on_the_gpu(trace, bounds)
            if on_gpu is not None:
                anchors = replace(anchors, what=f"{anchors.what}{_BY_KERNELS}",
                                  end_ns=anchors.start_ns)  # the calls are no part of these steps
                bounds = on_gpu
            found = _steps(trace, anchors, bounds, calls, dropped + len(anchors.start_ns) - whole)
            return replace(found, warm_up_ns=tuple(map(tuple, warm_up.tolist())), other_loops=anchors.other_loops)
    return None


def find_overview_steps(trace: Trace, overview: Trace, steps: Steps | None) -> Steps | None:
    """The steps of an overview of ``trace``, of the same kind as those of the trace itself where it has some: with none
    where the overview shows no whole one. None where the two cannot be told to be alike.

    An overview has calls but no ops: which function trains and which evaluates is known from the trace.
    """
    if not len(overview.host):
        return None
    found = find_steps(replace(overview, function_phases=_function_phases(trace)))
    if steps is None:
        return found
    anchor = steps.times.anchor.partition(_BY_KERNELS)[0]
    if found is not None:
        return found if found.times.anchor == anchor and found.times.phase == steps.times.phase else None
    return Steps((), steps.times) if steps.call_ends_ns or anchor != steps.times.anchor else None


def _function_phases(trace: Trace) -> dict[str, str]:
    rows, function = _calls_of_functions(trace)
    found = phases(trace, rows, np.asarray(function, np.int64)) if len(rows) else {}
    return {trace.names[name]: phase for name, phase in found.items() if phase != UNKNOWN}


def _bounds(anchors: _Anchors) -> tuple[I64, int]:
    """(start, end) of the steps that are whole, shape (n, 2), and their number."""
    if anchors.bounds_ns is not None:
        return anchors.bounds_ns, len(anchors.bounds_ns)
    edges = np.unique(anchors.edges_ns)
    start = np.unique(anchors.start_ns)
    after = np.searchsorted(edges, start, side="right")
    has_next = after < len(edges)
    bounds = np.stack((start[has_next], edges[after[has_next]]), axis=1)
    if not has_next.all() and len(start):
        own_end = int(anchors.end_ns[np.argmax(anchors.start_ns)])
        order = np.argsort(anchors.start_ns, kind="stable")
        gaps = anchors.start_ns[order][1:] - anchors.end_ns[order][:-1]
        length = own_end - int(start[-1])
        if anchors.min_steps == 1 and length > 0 and (
            not len(gaps) or abs(float(np.median(gaps))) <= _CONTIGUOUS_SHARE * length
        ):
            bounds = np.concatenate((bounds, [[int(start[-1]), own_end]]))
    return bounds, len(bounds)


def _recorded(trace: Trace, bounds: I64) -> I64:
    """Those of the steps that were recorded whole (``Trace.unrecorded_ns``)."""
    for begin, end in trace.unrecorded_ns:
        bounds = bounds[(bounds[:, 1] <= begin) | (bounds[:, 0] >= end)]
    return bounds


def _without_warm_up(bounds: I64, most: int | None) -> tuple[I64, int]:
    """Leave out the leading steps that are far off the median of the rest: up to the first that is like those kept;
    none where that is more than ``most``.

    Where long steps come again and again (a function traced anew) the first one is no warm-up.
    """
    length = bounds[:, 1] - bounds[:, 0]
    dropped = 0
    while len(length) - dropped >= 3:
        if _alike(length[dropped], float(np.median(length[dropped + 1:]))):
            break
        dropped += 1
    if dropped:
        like_kept = np.flatnonzero(_alike(length[:dropped], float(np.median(length[dropped:]))))
        dropped = int(like_kept[0]) if len(like_kept) else dropped
    return (bounds, 0) if most is not None and dropped > most else (bounds[dropped:], dropped)


def _without_profilers_end(trace: Trace, bounds: I64) -> I64:
    """Leave out steps in which the profiler itself ended or wrote its trace, unless that is all of them."""
    stops = trace.host.start_ns[host_rows(trace, _PROFILER_STOP)]
    if not len(stops) or not len(bounds):
        return bounds
    holds = np.searchsorted(stops, bounds[:, 1]) > np.searchsorted(stops, bounds[:, 0])
    return bounds if holds.all() else bounds[~holds]


def _without_start_up(trace: Trace, bounds: I64, start_up: Sequence[StartUpSpan]) -> tuple[I64, int]:
    """Leave out leading steps in which kernels were tried out, or which are mostly such work as a job does once at its
    start, where steps without that follow."""
    tried = _instants(trace, TRIES)
    if not len(bounds) or not (len(tried) or start_up):
        return bounds, 0
    once = union([span.start_ns for span in start_up], [span.end_ns for span in start_up])
    starts = coverage(once, bounds[:, 0], bounds[:, 1]) >= _START_UP_SHARE * (bounds[:, 1] - bounds[:, 0])
    tries = np.searchsorted(tried, bounds[:, 1]) > np.searchsorted(tried, bounds[:, 0])
    clean = np.flatnonzero(~(starts | tries))
    return (bounds[clean[0]:], int(clean[0])) if len(clean) else (bounds, 0)


def _instants(trace: Trace, pattern: str) -> I64:
    """When device events of such names begin, in order."""
    mask = name_mask(trace, pattern)
    return trace.device.start_ns[mask[trace.device.name]] if mask.any() else np.empty(0, np.int64)


def _start_up(trace: Trace, bounds: I64) -> str:
    """What of a job's start ran in every one of these steps; empty: nothing known, or the job is past its start.

    A function that is compiled in two or more calls is none: it returns.
    """
    if past_start(trace):
        return ""
    tried = _instants(trace, TRIES)
    in_each = np.searchsorted(tried, bounds[:, 1]) - np.searchsorted(tried, bounds[:, 0])
    if (in_each > 0).all():
        return f"autotuning, in which cuDNN tries out its algorithms ({in_each.sum()} kernels that check its results)"
    if len(bounds) == 1 and _one_after_the_other(trace, bounds[0]):
        return "replicas that begin one after the other"
    few = len(bounds) < _FEW and not rebuilt(trace)
    rows = host_rows(trace, COMPILE) if few else np.empty(0, np.int64)
    compiling = coverage(union(trace.host.start_ns[rows], trace.host.end_ns[rows]), bounds[:, 0], bounds[:, 1])
    if (compiling > _START_UP_SHARE * (bounds[:, 1] - bounds[:, 0])).all():
        return f"compilation by XLA ({seconds(compiling.sum() / 1e9)})"
    return ""


def _one_after_the_other(trace: Trace, bounds: I64) -> bool:
    """Whether each GPU begins its first kernel after another one's last, as where each sets up in its turn."""
    device, (begin, end) = trace.device, bounds
    rows = np.flatnonzero((device.kind == Kind.COMPUTE) & (device.start_ns >= begin) & (device.start_ns < end))
    spans = sorted((int(device.start_ns[own].min()), int(device.end_ns[own].max())) for own in (
        rows[device.gpu[rows] == gpu] for gpu in np.unique(device.gpu[rows])))
    return len(spans) > 1 and all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))


def _on_the_gpu(trace: Trace, bounds: I64) -> I64 | None:
    """From the first kernel launched in a step to the first launched after it, where the host runs ahead; else None."""
    device = trace.device
    rows = rows_of((device.launch_ns >= bounds[0, 0]) & (device.kind <= Kind.COLLECTIVE))
    launch, start, end = device.launch_ns[rows], device.start_ns[rows], device.end_ns[rows]
    if not len(launch):
        return None
    # In the order of their starts the first launched at an instant or later is the first to exceed all before it.
    first = np.searchsorted(np.maximum.accumulate(launch), bounds)
    edges = np.append(start, end.max())[first]
    # What is launched after the last step may come much later.
    own = end[launch < bounds[-1, 1]]
    edges[-1, 1] = min(edges[-1, 1], own.max()) if len(own) else edges[-1, 0]
    behind = (edges[:, 0] - bounds[:, 0] >= bounds[:, 1] - bounds[:, 0]).all()
    factor = _BEHIND_A_STEP_FACTOR if behind else _AHEAD_FACTOR
    ahead = edges[-1, 1] - edges[0, 0] >= factor * (bounds[-1, 1] - bounds[0, 0])
    length = edges[:, 1] - edges[:, 0]  # uneven where other threads launch a step's kernels after its call
    return edges if ahead and (length > 0).all() and _alike(length, float(np.median(length))).all() else None


def _alike(length_ns: I64, usual_ns: float) -> npt.NDArray[np.bool_]:
    return (usual_ns / _WARM_UP_FACTOR <= length_ns) & (length_ns <= usual_ns * _WARM_UP_FACTOR)


def _steps(trace: Trace, anchors: _Anchors, bounds: I64, calls: I64, dropped: int) -> Steps:
    length_s = (bounds[:, 1] - bounds[:, 0]) / 1e9
    times = StepTimes(
        anchor=anchors.what,
        confidence=anchors.confidence if len(bounds) >= 2 else "low",
        count=len(bounds),
        median_s=float(np.median(length_s)),
        mean_s=float(length_s.mean()),
        p95_s=float(np.percentile(length_s, 95)),
        durations_s=tuple(length_s.tolist()),
        dropped=dropped,
        iterations_per_step=_iterations(trace, calls) if anchors.packs_iterations else 1.0,
        phase=anchors.phase, left_out_s=anchors.left_out_s, unit=anchors.unit, start_up=_start_up(trace, bounds),
    )
    call_ends = _call_ends(anchors, bounds)
    return Steps(tuple(map(tuple, bounds.tolist())), times, call_ends,
                 int(anchors.end_ns.max()) if call_ends else None)


def _call_ends(anchors: _Anchors, bounds: I64) -> tuple[int, ...]:
    """The end of the call or marker that begins each step, the last of several; () where anchors are instants."""
    if not (anchors.end_ns > anchors.start_ns).all():
        return ()
    order = np.lexsort((anchors.end_ns, anchors.start_ns))
    at = np.searchsorted(anchors.start_ns[order], bounds[:, 0], side="right") - 1
    return tuple(anchors.end_ns[order][at].tolist())


def _iterations(trace: Trace, bounds: I64) -> float:
    """Optimizer steps in one anchor (Keras' steps_per_execution), by its calls of IteratorGetNext.

    Every replica of a MirroredStrategy has its own iterator, so the count is divided by the
    GPUs that ran kernels, or on CPUs by the replicas that ops are named for, where that leaves whole iterations.
    """
    start = trace.host.start_ns[host_rows(trace, GET_NEXT)]
    calls = np.searchsorted(start, bounds[:, 1]) - np.searchsorted(start, bounds[:, 0])
    count = float(np.median(calls))
    replicas = len(distinct(trace.device.gpu[trace.device.kind == Kind.COMPUTE]))
    if not replicas and count > 1:
        replicas = 1 + max((int(found[1]) for name in trace.names if (found := _REPLICA.search(name))), default=0)
    if replicas > 1 and count % replicas == 0:
        count /= replicas
    return max(count, 1.0)


def _step_markers(trace: Trace) -> _Anchors | None:
    """Events with ``step_num``: Keras 2 (``train``), tf.profiler.experimental.Trace, JAX StepTraceAnnotation."""
    rows, _ = host_stat(trace.host, "step_num")
    if not len(rows):
        return None
    host = trace.host
    rows = rows[host.line[rows] == busiest_line(trace, host.line[rows])]
    # Of train, test and predict the first; of other names the one that takes most time. All of them end a step.
    name, phase, left_out = _loop(trace, host.name[rows], host.end_ns[rows] - host.start_ns[rows], {
        name: _MARKED.get(trace.names[name], UNKNOWN) for name in np.unique(host.name[rows]).tolist()})
    left_out.pop(UNKNOWN, None)  # markers inside each other, of epochs and steps
    own = rows[host.name[rows] == name]
    loops = _other_loops(trace, rows, {other: _MARKED[trace.names[other]] for other in np.unique(
        host.name[rows]).tolist() if other != name and trace.names[other] in _MARKED}, host.name[rows])
    return _Anchors(f"{trace.names[name]} markers with step_num", "high", host.start_ns[own], host.end_ns[own],
                    host.start_ns[rows], min_steps=1, phase=phase, left_out_s=left_out, other_loops=loops)


def _loop(
    trace: Trace, key: npt.NDArray, length_ns: I64, phase_of: Mapping[int, str],
) -> tuple[int, str, dict[str, float]]:
    """Which of several loops' functions or markers the steps are taken from, its phase, and the seconds of the rest.

    Training before what is not known, that before evaluation and prediction; then the one that takes most time.
    """
    kinds, which, counts = np.unique(key, return_inverse=True, return_counts=True)
    times = np.bincount(which, weights=length_ns)
    repeats = counts > 1 if (counts > 1).any() else counts > 0
    chosen = min(np.flatnonzero(repeats).tolist(),
                 key=lambda i: (_WANTED.index(phase_of[int(kinds[i])]), -times[i], trace.names[kinds[i]]))
    left_out: dict[str, float] = {}
    for i, kind in enumerate(kinds.tolist()):
        if i != chosen and (phase_of[kind] != phase_of[int(kinds[chosen])] or phase_of[kind] == UNKNOWN):
            left_out[phase_of[kind]] = left_out.get(phase_of[kind], 0.0) + float(times[i]) / 1e9
    return int(kinds[chosen]), phase_of[int(kinds[chosen])], left_out


def _profiler_steps(trace: Trace) -> _Anchors | None:
    """Kineto's ``ProfilerStep#<n>``."""
    rows = host_rows(trace, r"ProfilerStep#\d+$")
    if not len(rows):
        return None
    start, end = _of_ranks(trace, rows)
    return _Anchors("ProfilerStep# markers", "high", start, end, start, min_steps=1)


def _numbered(trace: Trace) -> _Anchors | None:
    """Ranges of the user's that number the iterations (:mod:`gputop.analysis.steps.numbered_ranges`)."""
    found = numbered_ranges(trace)
    if found is None:
        return None
    host = trace.host
    start, end = _of_ranks(trace, found.rows)
    loops = {}
    if len(found.evaluations):
        calls = union(host.start_ns[found.evaluations], host.end_ns[found.evaluations])
        reach = int(np.median(calls.end - calls.start)) + 1
        loops[EVALUATION] = joined(calls, reach)
    return _Anchors(f'ranges "{found.name}"', "high", start, end,
                    np.concatenate((start, host.start_ns[found.evaluations])), min_steps=1,
                    phase=EVALUATION if found.evaluates else UNKNOWN, other_loops=loops)


def _optimizer_calls(trace: Trace) -> _Anchors | None:
    return _of_loop(trace, optimizer_steps(trace))


def _batches(trace: Trace) -> _Anchors | None:
    return _of_loop(trace, batch_steps(trace))


def _op_sequence(trace: Trace) -> _Anchors | None:
    return _of_loop(trace, op_sequence(trace))


def _of_loop(trace: Trace, found: LoopSteps | None) -> _Anchors | None:
    """What marks the steps of a PyTorch loop (:mod:`gputop.analysis.steps.pytorch_loops`), which may have run for long:
    many slow steps at the begin are no start."""
    return found and _Anchors(found.what, found.confidence, found.start_ns, found.end_ns, found.edges_ns, min_steps=2,
                              unit=found.unit, phase=found.phase, other_loops=found.other_loops,
                              most_warm_up=0 if past_start(trace) else _FEW)


def _of_ranks(trace: Trace, rows: I64) -> tuple[I64, I64]:
    """The begin and end of each step that these events mark, by name. Where several ranks mark the same step it begins
    with the first one, and ends with the first one that ends it: that one begins the next step, and the last step is
    as long as the others. A single step ends with the last rank."""
    host = trace.host
    start, end = _first_to_last(host.name[rows], host.start_ns[rows], host.end_ns[rows])
    if len(start) > 1:
        names, which = np.unique(host.name[rows], return_inverse=True)
        end = np.full(len(names), np.iinfo(np.int64).max)
        np.minimum.at(end, which, host.end_ns[rows])
    return start, end


def _first_to_last(name: npt.NDArray, start_ns: I64, end_ns: I64) -> tuple[I64, I64]:
    """For each name when the first of its events starts and the last one ends; in the order of the names' numbers."""
    names, which = np.unique(name, return_inverse=True)
    start = np.full(len(names), np.iinfo(np.int64).max)
    end = np.full(len(names), np.iinfo(np.int64).min)
    np.minimum.at(start, which, start_ns)
    np.maximum.at(end, which, end_ns)
    return start, end


def _keras_functions(trace: Trace) -> _Anchors | None:
    """Calls of Keras' step functions. Not bare FunctionRun: most of those sit on tf.data threads."""
    host = trace.host
    rows, op, what = _keras_calls(trace)
    if len(rows) < 2:
        return None
    op = _one_for_retraced(trace, rows, op)
    # Training and validation are functions of their own, in Keras 3 by the same name.
    phase_of = phases(trace, rows, op)
    name, phase, left_out = _loop(trace, op, host.end_ns[rows] - host.start_ns[rows], phase_of)
    what += {EVALUATION: ", which evaluates", PREDICTION: ", which predicts"}.get(phase, "")
    own = rows[op == name]
    return _Anchors(what, "high", host.start_ns[own], host.end_ns[own], host.start_ns[rows],
                    min_steps=2, packs_iterations=True, phase=phase, left_out_s=left_out,
                    other_loops=_other_loops(trace, rows, {f: p for f, p in phase_of.items() if f != name}, op))


def _keras_calls(trace: Trace) -> tuple[I64, I64, str]:
    """Rows of the calls of Keras' step functions, the functions (indices into names), and what they are."""
    host = trace.host
    rows, op = _calls_of_functions(trace)
    keras = name_mask(trace, _KERAS_OPS)[op]
    if keras.any():
        return rows[keras], op[keras], "calls of Keras' step function (EagerExecute)"
    rows, _ = host_stat(host, "tf_function_call")
    rows = rows[name_mask(trace, _KERAS_EVENTS)[host.name[rows]]]
    return rows, host.name[rows].astype(np.int64), "calls of Keras' step function (tf_function_call)"


def _few_calls(trace: Trace) -> _Anchors | None:
    """A single call of Keras' step function, up to the end of what it launched; of two the first, up to the second.

    What follows the last call, such as the callback that ends the profile, is no part of it.
    """
    rows, op, what = _keras_calls(trace)
    if not len(rows):
        return None
    host, device = trace.host, trace.device
    phase_of = phases(trace, rows, op)
    name, phase, left_out = _loop(trace, op, host.end_ns[rows] - host.start_ns[rows], phase_of)
    loops = _other_loops(trace, rows, {f: p for f, p in phase_of.items() if f != name}, op)
    rows = rows[op == name]
    start, end = host.start_ns[rows], host.end_ns[rows]
    bounds = np.stack((start[:-1], start[1:]), axis=1)
    if len(rows) == 1:
        own = (device.launch_ns >= start[0]) & (device.launch_ns < end[0])
        bounds = np.array([[start[0], max(int(end[0]), int(device.end_ns[own].max(initial=0)))]])
    return _Anchors(what, "low", start, end, start, min_steps=1, packs_iterations=True, phase=phase,
                    left_out_s=left_out, bounds_ns=bounds, other_loops=loops)


def _long_calls(trace: Trace) -> _Anchors | None:
    """Two calls of one tf.function that take half of the recording: steps too long for more of them."""
    host = trace.host
    rows, op = _calls_of_functions(trace)
    if not len(rows):
        return None
    op = np.asarray(_one_for_retraced(trace, rows, op), np.int64)
    length = host.end_ns[rows] - host.start_ns[rows]
    own = op == _longest(trace, op, length)
    begin, end = trace.window_ns
    rows = rows[own]
    if len(rows) != 2 or length[own].min() < _LONG_CALL_NS or length[own].sum() < _LONG_CALLS * (end - begin):
        return None
    start, ends = host.start_ns[rows], host.end_ns[rows]
    name = int(op[own][0])
    return _Anchors(f"calls of the tf.function {trace.names[name]}", "low", start, ends, start, min_steps=1,
                    phase=TRAINING if phases(trace, rows, op[own]).get(name) == TRAINING else UNKNOWN)


def _viewer_steps(trace: Trace) -> _Anchors | None:
    """The steps that XProf has marked in the file, from the first GPU's begin to the last one's end."""
    events = trace.step_events
    if not len(events):
        return None
    start, end = _first_to_last(events.name, events.start_ns, events.end_ns)
    order = np.argsort(start, kind="stable")
    start, end = start[order], end[order]
    end = np.minimum(end, np.append(start[1:], np.iinfo(np.int64).max))
    long = end > start
    start, end = start[long], end[long]
    return _Anchors("the steps that XProf marked in the file", "medium", start, start, start, min_steps=1,
                    bounds_ns=np.stack((start, end), axis=1)) if len(start) else None


def _rebuilt_executions(trace: Trace) -> _Anchors | None:
    """Calls of the jitted function that is compiled again and again, where that takes most of the recording: two such
    calls are a loop."""
    again, (begin, end) = rebuilt(trace), trace.window_ns
    if not again or again[0].time_ns < _START_UP_SHARE * (end - begin):
        return None
    name = f"PjitFunction({again[0].name})"
    rows = host_rows(trace, re.escape(name) + "$")
    rows = np.sort(outermost(trace, rows))
    if len(rows) < AGAIN:
        return None
    start, ends = trace.host.start_ns[rows], trace.host.end_ns[rows]
    return _Anchors(f"calls of {name}", "medium" if len(rows) >= _MIN_LOOP_CALLS else "low", start, ends, start,
                    min_steps=1, builds=True)


def _jax_executions(trace: Trace) -> _Anchors | None:
    """Calls of the jitted function that takes most time, from Python (:mod:`gputop.analysis.steps.jax_calls`)."""
    return _repeating(trace, marking_calls(trace), "calls of {}")


def _root_functions(trace: Trace) -> _Anchors | None:
    """Custom loops: the tf.function called from Python that takes most time, one that trains before others."""
    rows, op = _calls_of_functions(trace)
    anchors = _repeating(trace, rows, "calls of the tf.function {}", _one_for_retraced(trace, rows, op))
    if anchors is None:  # traced anew at every call, it is another function each time
        rows, _ = host_stat(trace.host, "tf_function_call")
        anchors = _repeating(trace, rows, "calls of the tf.function {}")
    return anchors


def _eager_loop(trace: Trace) -> _Anchors | None:
    """Loops without a function: the calls for the next batch from Python."""
    rows, op = host_stat(trace.host, "eager_op")
    rows = rows[name_mask(trace, r"IteratorGetNext")[op] & lines_of(trace, MAIN)[trace.host.line[rows]]]
    found = _repeating(trace, rows, "calls for a batch from Python (eager IteratorGetNext)", trace.host.name[rows])
    return found and replace(found, confidence="low")


def _one_for_retraced(trace: Trace, rows: I64, op: I64) -> I64:
    """The functions of these calls; those that differ by the number that each tracing gives and are known to
    train are one: traced anew, a function goes on under another number. Training and evaluation stay apart."""
    first: dict[str, int] = {}
    same: dict[int, int] = {}
    for name, phase in sorted(phases(trace, rows, np.asarray(op, np.int64)).items()):
        same[name] = first.setdefault(_NUMBER.sub("", trace.names[name]), name) if phase == TRAINING else name
    return IntMap(same)(np.asarray(op, np.int64)) if same else op


def _repeating(trace: Trace, rows: I64, what: str, key: npt.NDArray | None = None) -> _Anchors | None:
    host = trace.host
    if not len(rows):
        return None
    key = host.name[rows] if key is None else key
    line = host.line[rows]
    names, counts = np.unique(key, return_counts=True)
    often = np.isin(key, names[counts >= _MIN_LOOP_CALLS])
    if not often.any():
        return None
    rows, key, line = rows[often], key[often], line[often]
    phase_of = phases(trace, rows, np.asarray(key, np.int64))
    training = [name for name, phase in phase_of.items() if phase == TRAINING]
    length = host.end_ns[rows] - host.start_ns[rows]
    trains = np.isin(key, training) if training else np.ones(len(key), bool)
    chosen = _longest(trace, key[trains], length[trains])
    other_rows, chosen_rows, line = rows[key != chosen], rows[key == chosen], line[key == chosen]
    loop = _phase_of_most(phase_of, key[key != chosen], length[key != chosen])
    rows = chosen_rows[line == busiest_line(trace, line)]
    # A call can be recorded twice, one event inside the other: only the outer one counts.
    reach = np.maximum.accumulate(host.end_ns[rows])
    rows = rows[np.concatenate(([True], host.end_ns[rows][1:] > reach[:-1]))]
    start = host.start_ns[rows]
    pauses = _pauses(start, host.start_ns[other_rows], host.end_ns[other_rows])
    return _Anchors(what.format(trace.names[chosen]), "medium", start, host.end_ns[rows],
                    np.concatenate((start, pauses.start)), min_steps=2,
                    phase=TRAINING if chosen in training else UNKNOWN,
                    other_loops={loop: pauses} if len(pauses.start) else {})


def _phase_of_most(phase_of: Mapping[int, str], key: npt.NDArray, length: I64) -> str:
    """What most of the time in these calls evaluates or predicts; UNKNOWN where most of it is neither."""
    shares = {phase: sum(int(length[key == name].sum()) for name, own in phase_of.items() if own == phase)
              for phase in (EVALUATION, PREDICTION)}
    most = max(shares, key=lambda phase: shares[phase])
    return most if 2 * shares[most] > int(length.sum()) else UNKNOWN


def _pauses(start: I64, other_start: I64, other_end: I64) -> Spans:
    """Where another loop ran between two of these starts of steps (an evaluation), from its first call, which ends the
    step, to the end of its last one.

    The others are calls of other functions, which may belong to every step (metrics): another loop is where there are
    far more of them than there usually are.
    """
    if len(start) < 3 or not len(other_start):
        return EMPTY
    order = np.argsort(other_start, kind="stable")
    other_start, other_end = other_start[order], other_end[order]
    first, last = np.searchsorted(other_start, start[:-1]), np.searchsorted(other_start, start[1:])
    usual = int(np.median(last - first))
    pause = np.flatnonzero(last - first > 2 * usual + 2)
    return union(other_start[first[pause] + usual], np.minimum(other_end[last[pause] - 1], start[pause + 1]))


def _other_loops(trace: Trace, rows: I64, phase_of: Mapping[int, str], key: npt.NDArray) -> dict[str, Spans]:
    """By phase when these calls ran one after the other, ``key`` by ``key``: the time between two of them is their
    loop's where it is no longer than usual."""
    host, spans = trace.host, dict[str, Spans]()
    for name, phase in phase_of.items():
        own = rows[np.asarray(key) == name]
        calls = union(host.start_ns[own], host.end_ns[own])
        apart = calls.start[1:] - calls.end[:-1]
        length = float(np.median(calls.end - calls.start)) if len(calls.start) else 0.0
        reach = max(length, _LOOP_APART * float(np.median(apart)) if len(apart) else 0.0)
        spans[phase] = merge(spans.get(phase, EMPTY), joined(calls, int(reach) + 1))
    return spans


def _calls_of_functions(trace: Trace) -> tuple[I64, I64]:
    """Rows of EagerExecute events that run a tf.function, and its name; not on TensorFlow's own threads."""
    host = trace.host
    functions, is_func = host_stat(host, "is_func")
    rows, op = host_stat(host, "eager_op")
    keep = np.isin(rows, functions[is_func == 1])
    rows, op = rows[keep], op[keep]
    pool = np.array([line.name.startswith("tf_") for line in trace.lines], bool)
    outside = ~pool[host.line[rows]] if len(rows) else np.zeros(0, bool)
    return rows[outside], op[outside]


def _kernel_sequence(trace: Trace) -> _Anchors | None:
    found = kernel_sequence(trace)
    if found is None:
        return None
    what = f"a sequence of {found.period} kernels that GPU {trace.gpus[found.gpu].ordinal} repeats"
    return _Anchors(f"{what}, the optimizer's among them" if found.is_step else what, "low", found.start_ns,
                    found.start_ns, found.start_ns, min_steps=2, unit="step" if found.is_step else "period")


def _longest(trace: Trace, key: npt.NDArray, length_ns: I64) -> int:
    """The name whose events take most time together, of several the first in the alphabet."""
    kinds, which = np.unique(key, return_inverse=True)
    times = np.bincount(which, weights=length_ns)
    return min(kinds[times == times.max()].tolist(), key=lambda kind: trace.names[kind])

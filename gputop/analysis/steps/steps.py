"""Training steps: where each begins and ends, and what that rests on.

1. Try the ways to find steps (``STEP_DETECTORS``) in order of trust: the first whose events pass 2 to 4 wins.
2. Cut the time into whole steps, each from the start of one event to the start of the next, so that the gap between two
   calls belongs to the step before it. Leave out incomplete ones and those of the job's start
   (:mod:`gputop.analysis.steps.whole_steps`).
3. Reject what only repeats if a function is built again and again for longer than these steps take: the job repeats
   that.
4. Reject too few steps, and, unless events surely mark steps, calls of which most are warm-up: those whose lengths
   never settle are not of a loop. What repeats within one forward pass is a layer.
5. Where the host runs ahead of the GPU take the steps by their kernels (:mod:`gputop.analysis.steps.whole_steps`).
6. Compute the figures of them all.

Where nothing marks steps and nothing surely repeats, there are none: :func:`find_steps` returns None.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from gputop.analysis.results import StepTimes
from gputop.analysis.steps import function_calls, step_marks
from gputop.analysis.steps.anchors import BY_THEIR, Anchors
from gputop.analysis.steps.compilations import Rebuilt, rebuilt
from gputop.analysis.steps.jax_calls import gradient_functions
from gputop.analysis.steps.kernel_sequence import kernel_sequence
from gputop.analysis.steps.model import Steps
from gputop.analysis.steps.phases import TRAINING, UNKNOWN, phases
from gputop.analysis.steps.pytorch_loops import batch_steps, op_sequence, optimizer_steps
from gputop.analysis.steps.start_up import past_start, start_up_in_all, start_up_spans
from gputop.analysis.steps.training_loops import GET_NEXT
from gputop.analysis.steps.whole_steps import WholeSteps, steps_on_gpu, whole_steps
from gputop.core.findings import TraceNote
from gputop.trace.complete_part import longest_recording, up_to_last_gpu_event
from gputop.trace.intervals import coverage, union
from gputop.trace.lookups import distinct, host_rows
from gputop.trace.model import I64, Kind, Trace

_MOMENT = 0.005  # share of the recording. gputop's own figure
_BY_KERNELS = f"{BY_THEIR}kernels: the host runs ahead"
_REPLICA = re.compile(r"(?:^|/)replica_(\d{1,3})/")  # of the first no name tells: tf.distribute's MirroredStrategy
_FORWARD_PASS = r"nn\.Module: |(?i:(?:\w+[_ ./:])?forward(?:[_ ]pass)?)$"
_FEW_WARM_UP = 3  # steps that a loop, which may have run for long, leaves out at the head. gputop's own figure


class StepDetector(Struct, frozen=True):
    """One way to find steps.

    ``name`` says what marks them and ``applies`` in which jobs, for people. ``detect`` returns the events that mark
    steps, or None without those that it ``needs``. ``min_steps`` is how many steps are enough: 1 where one event is
    surely one step. At the head of the trace at most ``max_warm_up`` long steps are left out (None: any number); of
    jobs known to be past their start none, if it is a number. ``packs_iterations``: one call may run several
    iterations. ``builds``: each of the calls compiles its function.
    """

    name: str
    detect: Callable[[Trace], Anchors | None]
    applies: str
    needs: str
    min_steps: int
    max_warm_up: int | None = None
    packs_iterations: bool = False
    builds: bool = False


# From the most trusted on. `make reference` makes a table of the docs from these rows.
STEP_DETECTORS = (
    StepDetector("profiler steps", step_marks.profiler_steps, "PyTorch: the loop calls `prof.step()`",
                 "`ProfilerStep#N`", min_steps=1),
    StepDetector("session.run", step_marks.session_run, "TensorFlow 1: a timeline of `tf.RunMetadata`",
                 "a device executor", min_steps=1),
    StepDetector("step markers", step_marks.step_markers, "TensorFlow, Keras 2, JAX: the loop marks its steps",
                 "events with `step_num`", min_steps=1),
    StepDetector("Keras's step functions", function_calls.keras_calls, "Keras 3, and Keras 2 without markers",
                 "two calls to a step function", min_steps=2, packs_iterations=True),
    StepDetector("numbered ranges", step_marks.numbered_steps, "any: numbered user ranges mark the iterations",
                 "three NVTX or `record_function` ranges such as `step N`, or repeating `micro_batch N` ranges",
                 min_steps=1),
    StepDetector("recompiled function", function_calls.rebuilt_calls,
                 "JAX: recompiling one function takes most of the time", "two calls that compile the function",
                 min_steps=1, max_warm_up=0, builds=True),
    StepDetector("jitted function", function_calls.jax_calls, "JAX: a loop calls jitted functions",
                 "three `PjitFunction` calls to one function, or a repeating sequence of such calls", min_steps=2),
    StepDetector("tf.function", function_calls.function_calls, "TensorFlow: a custom loop calls a tf.function",
                 "three calls to the function, as `EagerExecute` or `tf_function_call`", min_steps=2),
    StepDetector("one Keras call", function_calls.few_keras_calls, "Keras: a recording with one or two steps",
                 "one call to a step function", min_steps=1, packs_iterations=True),
    StepDetector("two long calls", function_calls.long_calls,
                 "TensorFlow: a recording with one or two steps of a custom loop",
                 "two calls to a tf.function, each at least one second long", min_steps=1),
    StepDetector("XProf's steps", step_marks.viewer_steps, "any: XProf has opened and saved the file",
                 "XProf's step line", min_steps=1),
    StepDetector("calls of session.run", function_calls.session_calls, "TensorFlow 1: a loop calls `session.run`",
                 "three `SessionRun` calls of one thread", min_steps=2),
    StepDetector("eager batches", function_calls.eager_batches, "TensorFlow: a loop runs ops without a tf.function",
                 "three calls to `IteratorGetNext` from Python", min_steps=2),
    StepDetector("optimizer steps", optimizer_steps, "PyTorch: an unmarked loop", "three calls to `Optimizer.step#`",
                 min_steps=2, max_warm_up=_FEW_WARM_UP),
    StepDetector("DataLoader's batches", batch_steps, "PyTorch: a loop without an optimizer",
                 "four batches from the `DataLoader`", min_steps=2, max_warm_up=_FEW_WARM_UP),
    StepDetector("named ranges", step_marks.named_steps, "any: user ranges name the step or its phases",
                 "three ranges such as `train_step` or `token N`, or `forward`, `backward`, and `optimizer`",
                 min_steps=1, max_warm_up=_FEW_WARM_UP),
    StepDetector("sequence of kernels", kernel_sequence, "any: a recording of GPU activity only",
                 "ten kernels or more that repeat three times on one GPU, or three that do 100 times", min_steps=2),
    StepDetector("sequence of ops", op_sequence, "PyTorch: a loop without an optimizer or a `DataLoader`",
                 "a repeating sequence of ops on the only thread that runs ops", min_steps=2, max_warm_up=_FEW_WARM_UP),
)


def find_steps(trace: Trace) -> Steps | None:
    """The steps of the window by the most trusted events there are, or None where nothing is sure enough."""
    start_up, rebuilt_functions = start_up_spans(trace), rebuilt(trace)
    for detector in STEP_DETECTORS:
        anchors = detector.detect(trace)
        if anchors is None:
            continue
        max_warm_up = detector.max_warm_up and (0 if past_start(trace) else detector.max_warm_up)
        whole = whole_steps(trace, anchors, start_up, one_is_enough=detector.min_steps == 1, max_warm_up=max_warm_up)
        if _are_steps(detector, anchors, whole, rebuilt_functions) and not (
                # The mark of the only step was set as the recording ended.
                (anchors.confidence == "high" and len(whole.bounds_ns) == 1
                 and float(np.ptp(whole.bounds_ns[0])) < _MOMENT * float(np.ptp(trace.window_ns))) or (
                    anchors.unit == "period" and _in_one_pass(trace, whole.bounds_ns))):
            return _steps(trace, detector, anchors, whole)
    return None


def find_overview_steps(trace: Trace, overview: Trace, steps: Steps | None) -> Steps | None:
    """The steps of an overview of ``trace``, of the same kind as those of the trace itself where it has some: with none
    where the overview shows no whole one. None where the two cannot be told to be alike. An overview has calls but no
    ops: which function trains and which evaluates is known from the trace."""
    if not len(overview.host):
        return None
    rows, function = function_calls.calls_of_functions(trace)
    phase_of = phases(trace, rows, np.asarray(function, np.int64)) if len(rows) else {}
    phase_of |= dict.fromkeys(np.flatnonzero(gradient_functions(trace)).tolist(), TRAINING)
    overview_steps = find_steps(replace(overview, function_phases={
        trace.names[index]: phase for index, phase in phase_of.items() if phase != UNKNOWN}))
    if steps is None:
        return overview_steps
    anchor = steps.times.anchor.partition(BY_THEIR)[0]
    if overview_steps is not None:
        alike = overview_steps.times.anchor == anchor and overview_steps.times.phase == steps.times.phase
        return overview_steps if alike else None
    return Steps((), steps.times) if steps.call_ends_ns or anchor != steps.times.anchor else None


def _are_steps(detector: StepDetector, anchors: Anchors, whole: WholeSteps, functions: Sequence[Rebuilt]) -> bool:
    """Return whether these are steps of a loop (3, 4); ``functions`` are those that are built again and again."""
    surely_marked = anchors.confidence == "high"
    bounds = whole.bounds_ns
    if not surely_marked and not detector.builds and functions and (
            functions[0].time_ns > int((bounds[:, 1] - bounds[:, 0]).sum())):
        return False
    return len(bounds) >= detector.min_steps and (surely_marked or len(whole.warm_up_ns) <= len(bounds))


def _in_one_pass(trace: Trace, bounds_ns: I64) -> bool:
    """Return whether one forward pass, as a range or a module of PyTorch shows it, holds all of these periods."""
    rows = host_rows(trace, _FORWARD_PASS)
    begin, end = bounds_ns[0, 0], bounds_ns[-1, 1]
    return bool(((trace.host.start_ns[rows] <= begin) & (trace.host.end_ns[rows] >= end)).any())


def _steps(trace: Trace, detector: StepDetector, anchors: Anchors, whole: WholeSteps) -> Steps:
    """The steps and their figures (5, 6)."""
    on_gpu = None if detector.detect is kernel_sequence else steps_on_gpu(trace, whole.bounds_ns)
    if on_gpu is not None and len(whole.warm_up_ns):  # where the host is ahead, only what is long on the GPU is warm-up
        every = steps_on_gpu(trace, np.concatenate((whole.warm_up_ns, whole.bounds_ns)))
        on_gpu, whole = (on_gpu, whole) if every is None else (every, replace(whole, warm_up_ns=whole.warm_up_ns[:0]))
    bounds = whole.bounds_ns if on_gpu is None else on_gpu
    length_s = (bounds[:, 1] - bounds[:, 0]) / 1e9
    times = StepTimes(
        anchor=anchors.name if on_gpu is None else f"{anchors.name}{_BY_KERNELS}",
        confidence=anchors.confidence if len(bounds) >= 2 else "low",
        count=len(bounds), median_s=float(np.median(length_s)), mean_s=float(length_s.mean()),
        p95_s=float(np.percentile(length_s, 95)), durations_s=tuple(length_s.tolist()),
        dropped=len(whole.warm_up_ns) + whole.incomplete,
        iterations_per_step=_iterations(trace, anchors, whole.bounds_ns) if detector.packs_iterations else 1.0,
        phase=anchors.phase, left_out_s=anchors.left_out_s, unit=anchors.unit, start_up=start_up_in_all(trace, bounds))
    # Where the host runs ahead its calls are no part of the steps.
    call_ends = _call_ends(anchors, bounds) if on_gpu is None else ()
    return Steps(tuple(map(tuple, bounds.tolist())), times, call_ends,
                 last_call_ns=int(anchors.end_ns.max()) if call_ends else None,
                 warm_up_ns=tuple(map(tuple, whole.warm_up_ns.tolist())), inside=anchors.inside,
                 other_loops=anchors.other_loops)


def _call_ends(anchors: Anchors, bounds: I64) -> tuple[int, ...]:
    """The end of the call or marker that begins each step, the last of several; () where anchors are instants."""
    if not (anchors.end_ns > anchors.start_ns).all():
        return ()
    order = np.lexsort((anchors.end_ns, anchors.start_ns))
    begins_step = np.searchsorted(anchors.start_ns[order], bounds[:, 0], side="right") - 1
    return tuple(anchors.end_ns[order][begins_step].tolist())


def _iterations(trace: Trace, anchors: Anchors, bounds: I64) -> float:
    """Optimizer steps in one call (Keras' steps_per_execution), by the calls of IteratorGetNext during it, or in the
    step if there are none: a callback may read batches as well. Every replica of a MirroredStrategy has its own
    iterator, so the count is divided by the GPUs that ran kernels, or on CPUs by the replicas that ops are named for,
    where that leaves whole iterations."""
    start = trace.host.start_ns[host_rows(trace, GET_NEXT)]
    of_calls = union(anchors.start_ns, anchors.end_ns)
    during = start[coverage(of_calls, start, start + 1) > 0]
    start = during if len(during) else start
    calls = np.searchsorted(start, bounds[:, 1]) - np.searchsorted(start, bounds[:, 0])
    count = float(np.median(calls))
    replicas = len(distinct(trace.device.gpu[trace.device.kind == Kind.COMPUTE]))
    if not replicas and count > 1:
        numbers = [int(match[1]) for name in trace.names if (match := _REPLICA.search(name))]
        replicas = 1 + max(numbers, default=0)
    if replicas > 1 and count % replicas == 0:
        count /= replicas
    return max(count, 1.0)


def detect_steps(trace: Trace) -> tuple[Trace, Steps | None]:
    """The trace up to the last event of a GPU, without steps only its longest recording; and the steps."""
    trace = up_to_last_gpu_event(trace)
    steps = find_steps(trace)
    if steps is None and trace.unrecorded_ns:  # shares of the whole window would count what is missing as idle
        trace = longest_recording(trace)
        trace.quality = [*trace.quality, TraceNote("one_recording", "Without steps, gputop analyzes only the "
                                                                      "longest part of the recording.")]
    return trace, steps

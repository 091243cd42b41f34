"""Phase of a step function: it trains, evaluates or predicts. Keras 3 gives all of them the same names, so the ops
tell."""

from __future__ import annotations

from functools import cache, partial

import numpy as np

from gputop.analysis.results import StepTimes
from gputop.core.findings import TraceNote
from gputop.text.units import seconds
from gputop.trace.intervals import Spans, in_order
from gputop.trace.lookups import host_rows, name_mask, spans_of
from gputop.trace.model import I64, Trace
from gputop.trace.threads import INPUT, MAIN, busiest_line, lines_of

TRAINING, EVALUATION, PREDICTION, UNKNOWN = "training", "evaluation", "prediction", "unknown"
SERVES = ("prefill", "decode")  # of the steps of a server of models

_NAMED = (
    (TRAINING, r"(?:__inference_)?train_function"),
    (EVALUATION, r"(?:__inference_)?test_function"),
    # Keras 3's make_predict_function; in fit and evaluate the function called from Python is one on an iterator.
    (PREDICTION, r"(?:__inference_)?(?:predict_function|(?:one|multi)_step_on_data)"),
)
# Ops of the backward pass and of optimizers: tf.GradientTape's scope, tf.gradients', and their types.
_BACKWARD = (r"(?:.*/)?(?:gradient_tape|gradients)/|.*:(?:\w+Grad(?:V\d)?|\w+Backprop\w*|(?:Resource)?\w*Apply[A-Z]\w*|"
             r"AssignSubVariableOp)$")
_BACKWARD_WORDS = ("grad", "backprop", "apply", "assignsub")
# Ops as TensorFlow writes them into a trace, scope/name:Type, without those that any step function has.
_FORWARD = (r"[A-Za-z0-9.][\w.\\/>-]*:(?!Optional|IteratorGetNext|NoOp|Identity|Const|ReadVariableOp|Assign|Cast|Add|"
            r"StatefulPartitionedCall|PartitionedCall|DivNoNan|Xla|_Xla)[A-Z_]\w*$")
# Where XLA runs the step, its fusions stand for the ops and tell nothing.
_XLA_RUNS = (r"\w*Executable::Execute|ThunkExecutor::|.*:(?:XlaLaunch|_XlaRun|XLA GPU module)$|"
             r"Resolve constant globals$|Build buffer allocations$|PJRT_LoadedExecutable")


def phases(trace: Trace, rows: I64, key: I64) -> dict[int, str]:
    """The phase of each function in ``key`` (indices into the trace's names) called at ``rows`` of the host's events.
    By what runs in the same process during its calls: backward ops say training; other ops of a model and no XLA say
    evaluation, or prediction by the name. UNKNOWN where no op is traced."""
    named = {phase: name_mask(trace, pattern) for phase, pattern in _NAMED}
    times = cache(partial(_times_by_rank, trace))  # of few kinds, and mostly those on the host's threads suffice

    def ran(pattern: str, *words: str) -> bool:
        return any(_within(times(pattern, words, on_gpu).get(rank), of_rank)
                   for on_gpu in (False, True) for rank, of_rank in spans.items())

    rank_of_line = np.array([line.rank for line in trace.lines], np.int64)
    order = np.argsort(key, kind="stable")
    functions, first = np.unique(key[order], return_index=True)
    out = {}
    for function, calls in zip(functions.tolist(), np.split(rows[order], first)[1:], strict=True):
        rank_of_call = rank_of_line[trace.host.line[calls]]
        spans = {rank: spans_of(trace, called) for rank, called in (
            (rank, calls[rank_of_call == rank]) for rank in np.unique(rank_of_call).tolist())}
        by_name = next((phase for phase, mask in named.items() if mask[function]),
                       trace.function_phases.get(trace.names[function], UNKNOWN))
        out[function] = by_name
        if ran(_BACKWARD, *_BACKWARD_WORDS):
            out[function] = TRAINING
        elif by_name == UNKNOWN and ran(_FORWARD) and not ran(_XLA_RUNS):
            out[function] = EVALUATION
    return out


def session_runs(trace: Trace) -> tuple[I64, I64]:
    """Calls of TensorFlow 1's ``session.run`` in which ops of a backward pass or of an optimizer begin, or all where
    none trains; and the others. Of the thread with most calls."""
    host, rows = trace.host, host_rows(trace, "SessionRun$", lines_of(trace, MAIN))
    if not len(rows):
        return rows, rows
    rows = rows[host.line[rows] == busiest_line(trace, host.line[rows])]
    times = np.sort(host.start_ns[host_rows(trace, _BACKWARD, ~lines_of(trace, INPUT), _BACKWARD_WORDS)])
    trains = np.searchsorted(times, host.end_ns[rows]) > np.searchsorted(times, host.start_ns[rows])
    return (rows[trains], rows[~trains]) if trains.any() else (rows, rows[:0])


def evaluation_note(steps: StepTimes) -> list[TraceNote]:
    """Note for a window that holds something else than training."""
    if steps.phase in (EVALUATION, PREDICTION):
        return [TraceNote("evaluation", (
            f"The recorded steps are {steps.phase}. If the job also trains, capture it while it is training."))]
    if UNKNOWN in steps.left_out_s:
        return [TraceNote("evaluation", (
            f"The recording also contains another Keras step function ({seconds(steps.left_out_s[UNKNOWN])}). No op "
            "shows which of the two trains, so the steps may be of either kind. Capture while only fit runs."))]
    if steps.left_out_s:
        parts = " and ".join(f"{seconds(time)} of {phase}" for phase, time in sorted(steps.left_out_s.items()))
        return [TraceNote("evaluation", (
            f"The recording also contains {parts}. The steps exclude this time, but values per GPU include it."))]
    return []


def _within(times_ns: I64 | None, spans: Spans) -> bool:
    """Return whether one of the times lies in one of the spans."""
    return times_ns is not None and bool(
        (np.searchsorted(times_ns, spans.end) > np.searchsorted(times_ns, spans.start)).any())


def _times_by_rank(trace: Trace, pattern: str, words: tuple[str, ...], on_gpu: bool) -> dict[int, I64]:
    """Times, by rank, at which ops of such names start on threads other than tf.data's, or are launched to a GPU, in
    order."""
    host, device = trace.host, trace.device
    if on_gpu:
        mask = name_mask(trace, pattern, words)
        if not mask.any():
            return {}
        rows = np.flatnonzero((mask.take(device.tf_op) | mask.take(device.name)) & (device.launch_ns >= 0))
        times, rank = device.launch_ns[rows], np.array([gpu.rank for gpu in trace.gpus], np.int64)[device.gpu[rows]]
    else:
        rows = host_rows(trace, pattern, ~lines_of(trace, INPUT), words)
        times, rank = host.start_ns[rows], np.array([line.rank for line in trace.lines], np.int64)[host.line[rows]]
    return {number: in_order(times[rank == number]) for number in np.unique(rank).tolist()}

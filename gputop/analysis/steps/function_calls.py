"""Calls from Python that begin the steps of TensorFlow and JAX jobs that mark none.

Keras's step functions are told by their names. Of other functions those of a loop are found in this order
(:func:`repeating_calls`):

1. Keep the functions that are called ``_MIN_LOOP_CALLS`` times or more.
2. Of those that are known to train, or of all where no function is, take the one whose calls take most time.
3. Of its calls keep those on the thread that makes most of them, and of calls within each other the outer one: one call
   can be recorded twice.
4. Far more calls of the other functions than usual between two steps are another loop, which ends the step.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from gputop.analysis.steps import loop_selection
from gputop.analysis.steps.anchors import Anchors
from gputop.analysis.steps.compilations import AGAIN, rebuilt
from gputop.analysis.steps.jax_calls import (
    by_executions,
    gradient_functions,
    is_own_op,
    marking_calls,
    outer_calls,
    own_ops,
)
from gputop.analysis.steps.phases import EVALUATION, PREDICTION, TRAINING, UNKNOWN, phases, session_runs
from gputop.analysis.steps.start_up import mostly_start_up, start_up_spans
from gputop.trace.int_map import IntMap
from gputop.trace.intervals import Spans
from gputop.trace.lookups import Mask, host_rows, host_stat, name_mask, outermost_rows
from gputop.trace.model import I64, Trace
from gputop.trace.threads import MAIN, busiest_line, lines_of

# Keras 3 names its step functions so, in fit and evaluate alike; Keras 2 without markers: train_function and so on.
_KERAS = r"(?:(?:one|multi)_step_on_(?:iterator|data)\w*|(?:train|test|predict)_function)"
_KERAS_OPS = rf"__inference_{_KERAS}_\d+$"
_KERAS_EVENTS = rf"{_KERAS}$"
_TRACING_NUMBER = re.compile(r"_\d+$")  # TensorFlow gives each tracing of a function the next one
_MIN_LOOP_CALLS = 3  # calls of one function, to be taken for those of a loop
# Two calls that take this share of the recording, each so long that it hardly holds more, are its steps. gputop's own
# figures.
_LONG_CALLS_SHARE, _LONG_CALL_NS = 0.5, 10**9
_EVALUATES = re.compile(r"(?i)eval|valid|test|accura|metric")
_MIN_REBUILD_SHARE = 0.5  # share of the recording that goes into building one function anew. gputop's own figure


# -- Keras ----------------------------------------------------------------------------------------------


class _KerasCalls(NamedTuple):
    """Calls of Keras's step functions: ``rows`` of the host's events, and the function of each (index into
    ``Trace.names``). ``name`` says what the calls are, for people."""

    rows: I64
    function: I64
    name: str


def keras_calls(trace: Trace) -> Anchors | None:
    """Calls of Keras's step functions, two or more. Not bare FunctionRun: most of those sit on tf.data's threads.
    Training and validation are functions of their own, in Keras 3 by the same name. Calls of both end a step, unless
    both belong to each step: a callback predicts after each batch."""
    host, calls = trace.host, _calls_of_keras(trace)
    if len(calls.rows) < 2:
        return None
    calls = calls._replace(function=_merge_retraced(trace, calls.rows, calls.function))
    calls, inside = _apart_from_calls_of_each_step(trace, calls)
    loop, loops = _loops_of_keras(trace, calls)
    steps = calls.rows[calls.function == loop.function]
    which = {EVALUATION: ", which evaluates", PREDICTION: ", which predicts"}.get(loop.phase, "")
    return Anchors(calls.name + which, "high", host.start_ns[steps], host.end_ns[steps], host.start_ns[calls.rows],
                   phase=loop.phase, left_out_s=loop.left_out_s, other_loops=loops, inside=inside)


def few_keras_calls(trace: Trace) -> Anchors | None:
    """A single call of Keras's step function, up to the end of what it launched; of two the first, up to the second, or
    the second where the first is mostly the job's start. What follows the last call, such as the callback that ends the
    profile, is no part of it."""
    host, device, calls = trace.host, trace.device, _calls_of_keras(trace)
    if not len(calls.rows):
        return None
    loop, loops = _loops_of_keras(trace, calls)
    steps = calls.rows[calls.function == loop.function]
    start, end = host.start_ns[steps], host.end_ns[steps]
    bounds = np.stack((start[:-1], start[1:]), axis=1)
    if len(steps) == 2 and mostly_start_up(start_up_spans(trace), bounds)[0]:
        steps, start, end = steps[1:], start[1:], end[1:]
    if len(steps) == 1:
        launched = (device.launch_ns >= start[0]) & (device.launch_ns < end[0])
        bounds = np.array([[start[0], max(int(end[0]), int(device.end_ns[launched].max(initial=0)))]])
    return Anchors(calls.name, "low", start, end, start, bounds_ns=bounds, phase=loop.phase,
                   left_out_s=loop.left_out_s, other_loops=loops)


def _calls_of_keras(trace: Trace) -> _KerasCalls:
    """Calls of Keras by the ops that run them; without such ops by their own events."""
    host = trace.host
    rows, function = calls_of_functions(trace)
    keras = name_mask(trace, _KERAS_OPS)[function]
    if keras.any():
        return _KerasCalls(rows[keras], function[keras], "calls of Keras' step function (EagerExecute)")
    rows, _ = host_stat(host, "tf_function_call")
    rows = rows[name_mask(trace, _KERAS_EVENTS)[host.name[rows]]]
    return _KerasCalls(rows, host.name[rows].astype(np.int64), "calls of Keras' step function (tf_function_call)")


def _loops_of_keras(trace: Trace, calls: _KerasCalls) -> tuple[loop_selection.SelectedLoop, dict[str, Spans]]:
    """The loop that steps are taken from, and by phase when the others ran."""
    phase_of = phases(trace, calls.rows, calls.function)
    length_ns = trace.host.end_ns[calls.rows] - trace.host.start_ns[calls.rows]
    loop = loop_selection.select_loop(trace, calls.function, length_ns, phase_of)
    return loop, loop_selection.other_loops(trace, calls.rows, calls.function, {
        function: phase for function, phase in phase_of.items() if function != loop.function})


def _apart_from_calls_of_each_step(trace: Trace, calls: _KerasCalls) -> tuple[_KerasCalls, tuple[str, ...]]:
    """The calls without those that most steps of the selected loop hold, as the training waits for them each time; and
    the phases of these."""
    phase_of = phases(trace, calls.rows, calls.function)
    start = trace.host.start_ns[calls.rows]
    loop = loop_selection.select_loop(trace, calls.function, trace.host.end_ns[calls.rows] - start, phase_of).function
    inside, phases_inside = loop_selection.within_each_step(trace, calls.rows, calls.function, loop, phase_of)
    return calls._replace(rows=calls.rows[~inside], function=calls.function[~inside]), phases_inside


# -- loops of the user's own ----------------------------------------------------------------------------


def rebuilt_calls(trace: Trace) -> Anchors | None:
    """Calls of the jitted function that is compiled again and again, where that takes most of the recording: two such
    calls are a loop, unless it is one of JAX's own ops, which a step calls for many shapes."""
    functions, (begin, end) = rebuilt(trace), trace.window_ns
    if not functions or is_own_op(functions[0].name) or functions[0].time_ns < _MIN_REBUILD_SHARE * (end - begin):
        return None
    name = f"PjitFunction({functions[0].name})"
    rows = outermost_rows(trace, host_rows(trace, re.escape(name) + "$"), by_name=True)
    if len(rows) < AGAIN:
        return None
    start = trace.host.start_ns[rows]
    return Anchors(f"calls of {name}", "medium" if len(rows) >= _MIN_LOOP_CALLS else "low", start,
                   trace.host.end_ns[rows], start)


def jax_calls(trace: Trace) -> Anchors | None:
    """Calls from Python of the jitted function that takes most time, one that computes gradients before others
    (:mod:`gputop.analysis.steps.jax_calls`). Where most of a step runs outside of it, as ops one by one, its calls are
    instants: they do not hold the step."""
    rows, is_op = marking_calls(trace), own_ops(trace)
    host = trace.host
    loop = "a loop of JAX's own ops" if is_op[host.name[rows]].any() else "calls of {}"
    anchors = repeating_calls(trace, rows, host.name[rows], loop, gradient_functions(trace))
    ops = outer_calls(trace)
    ops = ops[is_op[host.name[ops]]]
    if anchors and (anchors.end_ns - anchors.start_ns).sum() < (host.end_ns[ops] - host.start_ns[ops]).sum():
        anchors = anchors._replace(end_ns=anchors.start_ns)
    return anchors and by_executions(trace, anchors)


def function_calls(trace: Trace) -> Anchors | None:
    """Calls from Python of the tf.function that takes most time, one that trains before others."""
    rows, function = calls_of_functions(trace)
    name = "calls of the tf.function {}"
    anchors = repeating_calls(trace, rows, _merge_retraced(trace, rows, function), name)
    if anchors is None:  # traced anew at every call, it is another function each time
        rows, _ = host_stat(trace.host, "tf_function_call")
        anchors = repeating_calls(trace, rows, trace.host.name[rows], name)
    return anchors


def long_calls(trace: Trace) -> Anchors | None:
    """Two calls of one tf.function that take half of the recording: steps too long for more of them."""
    host = trace.host
    rows, function = calls_of_functions(trace)
    if not len(rows):
        return None
    function = np.asarray(_merge_retraced(trace, rows, function), np.int64)
    length_ns = host.end_ns[rows] - host.start_ns[rows]
    longest = loop_selection.longest_function(trace, function, length_ns)
    calls, length_ns = rows[function == longest], length_ns[function == longest]
    begin, end = trace.window_ns
    if len(calls) != 2 or length_ns.min() < _LONG_CALL_NS or length_ns.sum() < _LONG_CALLS_SHARE * (end - begin):
        return None
    start = host.start_ns[calls]
    trains = phases(trace, calls, np.full(2, longest)).get(longest) == TRAINING
    return Anchors(f"calls of the tf.function {trace.names[longest]}", "low", start, host.end_ns[calls], start,
                   phase=TRAINING if trains else UNKNOWN)


def eager_batches(trace: Trace) -> Anchors | None:
    """Loops without a function: the calls for the next batch from Python."""
    rows, op = host_stat(trace.host, "eager_op")
    rows = rows[name_mask(trace, r"IteratorGetNext")[op] & lines_of(trace, MAIN)[trace.host.line[rows]]]
    anchors = repeating_calls(trace, rows, trace.host.name[rows],
                              "calls for a batch from Python (eager IteratorGetNext)")
    return anchors and anchors._replace(confidence="low")


def session_calls(trace: Trace) -> Anchors | None:
    """Calls of TensorFlow 1's ``session.run``, those that train if any does. Others in between are work of the loop, as
    an evaluation after each update, or where far more come than usual another loop."""
    steps, others = session_runs(trace)
    return None if len(steps) < _MIN_LOOP_CALLS else _loop(
        trace, "calls of session.run", steps, others, TRAINING if len(others) else UNKNOWN, EVALUATION)


def calls_of_functions(trace: Trace) -> tuple[I64, I64]:
    """Rows of EagerExecute events that run a tf.function, not on TensorFlow's own threads, and the function of each."""
    host = trace.host
    functions, is_func = host_stat(host, "is_func")
    rows, op = host_stat(host, "eager_op")
    runs = np.isin(rows, functions[is_func == 1])
    rows, op = rows[runs], op[runs]
    outside = ~np.array([line.name.startswith("tf_") for line in trace.lines], bool)[host.line[rows]]
    return rows[outside], op[outside]


def _merge_retraced(trace: Trace, rows: I64, function: I64) -> I64:
    """The functions of these calls, those as one that differ by the number of their tracing and are known to train:
    traced anew, a function goes on under another number. Training and evaluation stay apart."""
    first: dict[str, int] = {}
    merged: dict[int, int] = {}
    for index, phase in sorted(phases(trace, rows, np.asarray(function, np.int64)).items()):
        merged[index] = (first.setdefault(_TRACING_NUMBER.sub("", trace.names[index]), index) if phase == TRAINING
                         else index)
    return IntMap(merged)(np.asarray(function, np.int64)) if merged else function


def repeating_calls(trace: Trace, rows: I64, function: npt.NDArray, name: str,
                    trains: Mask | None = None) -> Anchors | None:
    """The calls of a loop, by the rules above, of these calls of functions (indices into ``Trace.names``); ``name`` has
    a place for the function's, and ``trains`` is a mask of names that are known to train. None where no function is
    called often enough."""
    if not len(rows):
        return None
    host = trace.host
    functions, counts = np.unique(function, return_counts=True)
    often = np.isin(function, functions[counts >= _MIN_LOOP_CALLS])
    if not often.any() or (trains is not None and trains[function].any() and not trains[function[often]].any()):
        return None
    rows, function = rows[often], function[often]
    length = host.end_ns[rows] - host.start_ns[rows]
    phase_of = phases(trace, rows, np.asarray(function, np.int64))
    training = [index for index, phase in phase_of.items() if phase == TRAINING or (
        trains is not None and trains[index])]
    candidates = np.isin(function, training) if training else np.ones(len(function), bool)
    loop = loop_selection.longest_function(trace, function[candidates], length[candidates])
    in_loop = function == loop
    steps, others = rows[in_loop], rows[~in_loop]
    steps = outermost_rows(trace, steps[host.line[steps] == busiest_line(trace, host.line[steps])])  # (3)
    if trains is not None and trains[loop]:  # what else runs, without a gradient, evaluates or predicts
        phase_of |= {index: EVALUATION if _EVALUATES.search(trace.names[index]) else PREDICTION
                     for index, phase in phase_of.items() if phase == UNKNOWN and not trains[index]}
    return _loop(trace, name.format(trace.names[loop]), steps, others, TRAINING if loop in training else UNKNOWN,
                 loop_selection.phase_of_most(function[~in_loop], length[~in_loop], phase_of))


def _loop(trace: Trace, name: str, steps: I64, others: I64, phase: str, phase_of_others: str) -> Anchors:
    """The loop of which these calls are the steps, and by phase the loops that ``others`` of its calls make (4)."""
    host, start = trace.host, trace.host.start_ns[steps]
    pauses = loop_selection.pauses_for_other_calls(start, host.start_ns[others], host.end_ns[others])
    return Anchors(name, "medium", start, host.end_ns[steps], np.concatenate((start, pauses.start)), phase=phase,
                   other_loops={phase_of_others: pauses} if len(pauses.start) else {})

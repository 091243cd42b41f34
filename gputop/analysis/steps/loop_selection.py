"""Choice of the loop of a recording that the steps are taken from, and the spans of the others.

1. Each function, or each name of a marker, that is called again and again is a loop.
2. The steps are those of a loop that trains; without one of a loop of which nothing tells what it does, then of an
   evaluation, then of a prediction. Of several such loops the one that takes most time.
3. The others' seconds are left out of the steps, by phase.
4. Another loop runs from the first of its calls to the last, through the pauses that are usual between them.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from gputop.analysis.steps.phases import EVALUATION, PREDICTION, TRAINING, UNKNOWN
from gputop.trace.intervals import EMPTY, Spans, joined, merge, union
from gputop.trace.lookups import spans_of
from gputop.trace.model import I64, Trace

_ORDER = (TRAINING, UNKNOWN, EVALUATION, PREDICTION)  # of the loops that steps are taken from, first to last
_MIN_HELD = 3  # steps with a call of another loop, before it is taken for a part of each step. gputop's own figure
# A pause of so many medians between two calls of one loop is still the loop's. gputop's own figure.
_LOOP_PAUSE_FACTOR = 3.0


class SelectedLoop(Struct, frozen=True):
    """The loop that steps are taken from: its function or marker (index into ``Trace.names``) and phase, and by phase
    the seconds in calls of the others."""

    function: int
    phase: str
    left_out_s: dict[str, float]


def select_loop(trace: Trace, function: npt.NDArray, length_ns: I64, phase_of: Mapping[int, str]) -> SelectedLoop:
    """The loop whose calls are the steps (2, 3), of calls of these functions, each of that length. A function that is
    called once is none where another is called twice. Of equals the first in the alphabet."""
    functions, which, counts = np.unique(function, return_inverse=True, return_counts=True)
    times = np.bincount(which, weights=length_ns)
    repeats = counts > 1 if (counts > 1).any() else counts > 0
    selected = min(np.flatnonzero(repeats).tolist(), key=lambda i: (
        _ORDER.index(phase_of[int(functions[i])]), -times[i], trace.names[functions[i]]))
    selected_phase = phase_of[int(functions[selected])]
    left_out: dict[str, float] = {}
    for i, phase in enumerate(phase_of[other] for other in functions.tolist()):
        if i != selected and (phase != selected_phase or phase == UNKNOWN):
            left_out[phase] = left_out.get(phase, 0.0) + float(times[i]) / 1e9
    return SelectedLoop(int(functions[selected]), selected_phase, left_out)


def longest_function(trace: Trace, function: npt.NDArray, length_ns: I64) -> int:
    """The function whose calls take most time together; of equals the first in the alphabet."""
    functions, which = np.unique(function, return_inverse=True)
    times = np.bincount(which, weights=length_ns)
    return min(functions[times == times.max()].tolist(), key=lambda index: trace.names[index])


def other_loops(trace: Trace, rows: I64, function: npt.NDArray, phase_of: Mapping[int, str]) -> dict[str, Spans]:
    """Spans by phase in which the loops of ``phase_of`` ran (4). ``rows`` of the host's events are calls of each
    ``function``."""
    spans: dict[str, Spans] = {}
    for other, phase in phase_of.items():
        of_other = rows[np.asarray(function) == other]
        calls = spans_of(trace, of_other)
        # The longest pause between two of a loop's calls: a usual call, or some usual pauses.
        length = float(np.median(calls.end - calls.start)) if len(calls.start) else 0.0
        pauses = calls.start[1:] - calls.end[:-1]
        reach = int(max(length, _LOOP_PAUSE_FACTOR * float(np.median(pauses)) if len(pauses) else 0.0))
        spans[phase] = merge(spans.get(phase, EMPTY), joined(calls, reach + 1))
    return spans


def within_each_step(trace: Trace, rows: I64, function: npt.NDArray, loop: int,
                     phase_of: Mapping[int, str]) -> tuple[npt.NDArray[np.bool_], tuple[str, ...]]:
    """Mask of the calls at ``rows`` of the host's events that belong to evaluations or predictions that most steps of
    the ``loop`` hold, on each of its threads, as the training waits for a callback that makes them after each batch;
    and their phases."""
    line, start_ns = trace.host.line[rows], trace.host.start_ns[rows]
    inside = np.zeros(len(rows), bool)
    phases_inside = set()
    for other, phase in phase_of.items():
        if other != loop and phase in (EVALUATION, PREDICTION) and all(
                _held_by_most(start_ns[(function == other) & (line == thread)],
                              start_ns[(function == loop) & (line == thread)])
                for thread in np.unique(line[function == loop]).tolist()):
            inside |= function == other
            phases_inside.add(phase)
    return inside, tuple(sorted(phases_inside))


def _held_by_most(call_start_ns: I64, step_start_ns: I64) -> bool:
    """Return whether a call begins in more than half of the times between two of these starts of steps, and in
    ``_MIN_HELD`` of them or more."""
    held = np.unique(np.searchsorted(np.sort(step_start_ns), call_start_ns, side="right"))
    held = held[(held > 0) & (held < len(step_start_ns))]
    return len(held) >= _MIN_HELD and 2 * len(held) > len(step_start_ns) - 1


def pauses_for_other_calls(start_ns: I64, other_start_ns: I64, other_end_ns: I64) -> Spans:
    """Spans in which another loop (an evaluation) ran between two of these starts of steps: from its first call, which
    ends the step, to the end of its last one. Calls of other functions may belong to every step (metrics): another loop
    is where far more of them run between two starts than usually do."""
    if len(start_ns) < 3 or not len(other_start_ns):
        return EMPTY
    order = np.argsort(other_start_ns, kind="stable")
    other_start, other_end = other_start_ns[order], other_end_ns[order]
    first, last = np.searchsorted(other_start, start_ns[:-1]), np.searchsorted(other_start, start_ns[1:])
    usual = int(np.median(last - first))
    pause = np.flatnonzero(last - first > 2 * usual + 2)
    return union(other_start[first[pause] + usual], np.minimum(other_end[last[pause] - 1], start_ns[pause + 1]))


def phase_of_most(function: npt.NDArray, length_ns: I64, phase_of: Mapping[int, str]) -> str:
    """Phase of most of the time in these calls, evaluate or predict; UNKNOWN where most of it does neither."""
    times = {phase: sum(int(length_ns[function == index].sum()) for index, of_index in phase_of.items()
                        if of_index == phase)
             for phase in (EVALUATION, PREDICTION)}
    most = max(times, key=lambda phase: times[phase])
    return most if 2 * times[most] > int(length_ns.sum()) else UNKNOWN

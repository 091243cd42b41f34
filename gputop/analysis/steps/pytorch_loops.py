"""The steps of a PyTorch job that marks none, as a capture from the middle of its run records it.

What repeats on the loop's thread shows them, of events that lie in no other event of that thread
(:mod:`gputop.analysis.steps.pytorch_ops`):

1. ``Optimizer.step#`` ends a step. Where one step calls several (a GAN's), their names and the nodes of the backward
   pass before each come again after that many calls.
2. The step begins with its first batch of the DataLoader, as many before the optimizer's call as most steps fetch;
   without one with the first op that follows the call before (zeroing of gradients apart, unless the pause is there).
3. Far more ops than usual between a call and the next step's begin are another loop: an evaluation if a model runs
   forward and not backward in it.
4. Without an optimizer a step is from batch to batch of the DataLoader; batches without a backward pass, next to
   batches with one, are an evaluation. Without any backward pass nothing shows whether a loop evaluates or infers.
5. Without both the sequence of ops shows the steps, if one repeats and no longer one explains it as well: a step where
   it holds a backward pass, else a period of which nothing shows what it is. Where two threads run ops, none is the
   loop's.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from gputop.analysis.steps.anchors import Anchors
from gputop.analysis.steps.optimizer_calls import period_of_calls
from gputop.analysis.steps.phases import EVALUATION, PREDICTION, UNKNOWN
from gputop.analysis.steps.pytorch_ops import Ops, outer_ops, thread_of_ops
from gputop.analysis.steps.sequence_period import FEWEST, sequence_period
from gputop.analysis.steps.training_loops import LOADER
from gputop.trace.host_calls import OPTIMIZER_CALL
from gputop.trace.intervals import union
from gputop.trace.lookups import Mask, host_rows, outermost_rows
from gputop.trace.model import I64, Trace
from gputop.trace.threads import MAIN, busiest_line, lines_of

# All of these are gputop's own figures.
_MIN_NAMES = 3  # of ops in a period: a benchmark of one op has no steps
_LOCAL, _KEPT = 1 / 3, 0.8  # of all ops: those of a name lie in less; those that are looked at, at least


# -- with an optimizer ----------------------------------------------------------------------------------


class _StepCalls(Struct, frozen=True):
    """Begin of each step's first call of an optimizer and end of its last one (ns); and as indices into the thread's
    ops the first op from there on: ``first_op`` of the first call, ``next_op`` behind the last."""

    first_ns: I64
    last_end_ns: I64
    first_op: I64
    next_op: I64


def optimizer_steps(trace: Trace) -> Anchors | None:
    """Steps that end with calls of an optimizer (1 to 3); None where fewer than three are recorded."""
    host = trace.host
    rows = host_rows(trace, OPTIMIZER_CALL, lines_of(trace, MAIN))
    if len(rows) < FEWEST:
        return None
    line = busiest_line(trace, host.line[rows])
    rows = outermost_rows(trace, rows[host.line[rows] == line], by_name=True)
    ops = outer_ops(trace, line)
    start, end = host.start_ns[rows], host.end_ns[rows]
    period = period_of_calls(host.name[rows], _work_between(trace, ops, start))
    first = _first_of_step(ops, start, end, period)
    count = (len(rows) - first) // period
    if count < FEWEST:
        return None
    calls = np.arange(count) * period + first
    first_ns, last_end_ns = start[calls], end[calls + period - 1]
    anchors = _steps_of_calls(ops, _StepCalls(first_ns, last_end_ns, np.searchsorted(ops.start, first_ns),
                                              np.searchsorted(ops.start, last_end_ns)))
    return anchors if period == 1 else anchors._replace(name=f"groups of {period} {anchors.name}")


def _work_between(trace: Trace, ops: Ops, start: I64) -> I64:
    """Number of nodes of the backward pass between each of these calls and the next; of launches where no node is
    recorded."""
    if len(ops.backward_ns):
        return ops.backward_nodes(start[:-1], start[1:])
    launched = np.sort(trace.device.launch_ns[trace.device.launch_ns >= 0])
    return np.diff(np.searchsorted(launched, start))


def _first_of_step(ops: Ops, start: I64, end: I64, period: int) -> int:
    """Index of the first call that begins a step: the one before which more batches are fetched than before others, or
    gradients zeroed more often; else the one before which most time passes without an op, or now and then: logging,
    evaluations and ends of epochs lie between steps."""
    if period == 1:
        return 0
    calls = np.arange(1, len(start))  # what precedes the first call was not recorded whole
    batches = np.diff(np.searchsorted(ops.start[ops.is_batch], start))
    zeroed = np.diff(np.searchsorted(ops.start[ops.is_zero_grad], start))
    stretch = start[1:] - end[:-1]
    following = np.searchsorted(ops.start, end[:-1])
    pause = np.append(ops.start, start[-1])[following] - end[:-1]

    def order(first: int) -> tuple[float, float, float]:
        alike = calls % period == first
        return (-float(np.median(batches[alike])), -float(np.median(zeroed[alike])),
                float(np.median(stretch[alike]) - (stretch + pause)[alike].mean()))

    return min(range(period), key=order)


def _steps_of_calls(ops: Ops, calls: _StepCalls) -> Anchors:
    """The steps that end with these calls (2, 3)."""
    batches = np.concatenate(([0], np.cumsum(ops.is_batch)))
    fetched = batches[calls.first_op[1:]] - batches[calls.next_op[:-1]]
    usual, often = Counter(fetched.tolist()).most_common(1)[0]
    by_batch = usual > 0 and 2 * often >= len(fetched)
    begins = _begins_by_batch(ops, calls, usual) if by_batch else _begins_by_sequence(ops, calls)
    start_ns = np.array([first_ns if begin == first_op else int(ops.start[begin]) for begin, first_op, first_ns in zip(
        begins, calls.first_op.tolist(), calls.first_ns.tolist(), strict=True)], np.int64)
    recorded = np.array(begins) >= 0
    ops_between = np.array(begins[1:]) - calls.next_op[:-1]
    usually = int(np.median(ops_between))
    between = [(int(calls.next_op[i]) + usually, begins[i + 1])
               for i in np.flatnonzero(ops_between > 2 * usually + 2).tolist()]
    loops = [(phase, *span) for span in between if (phase := _phase(ops, *span)) is not None]
    after = int(calls.next_op[-1])  # what follows the last step begins with the first of these
    # One that was recorded in part is told by those that were recorded whole.
    alike = {phase for phase, _, _ in loops} - {UNKNOWN}
    loops += [(phase, first, stop) for first, stop in ((0, begins[0]), (after + usually, len(ops.start)))
              if stop - first > usually + 2 and (phase := _phase(ops, first, stop)) in alike]
    tail = after + np.flatnonzero(ops.is_batch[after:]) if by_batch else np.arange(after + usually, len(ops.start))
    edges = np.concatenate((start_ns[recorded], ops.start[[first for _, first, _ in loops]], ops.start[tail[:1]]))
    return Anchors("calls of Optimizer.step", "medium", start_ns[recorded], calls.last_end_ns[recorded], edges,
                   other_loops={phase: union([int(ops.start[first]) for other, first, _ in loops if other == phase],
                                             [int(ops.end[stop - 1]) for other, _, stop in loops if other == phase])
                                for phase in dict.fromkeys(phase for phase, _, _ in loops)})


def _begins_by_batch(ops: Ops, calls: _StepCalls, usual: int) -> list[int]:
    """The op that is each step's first batch, ``usual`` batches before its call; of the first step -1 where it was not
    recorded."""
    batches = np.flatnonzero(ops.is_batch)
    begins = []
    for i, first_batch in enumerate((np.searchsorted(batches, calls.first_op) - usual).tolist()):
        low = int(calls.next_op[i - 1]) if i else 0
        if first_batch >= 0 and batches[first_batch] >= low:
            begins.append(int(batches[first_batch]))
        else:
            begins.append(low if i else -1)
    return begins


def _begins_by_sequence(ops: Ops, calls: _StepCalls) -> list[int]:
    """Each step's first op, by the sequence of names that most steps have; of the first step -1 where that was not
    recorded."""
    first, begin, stop = int(calls.first_op[0]), calls.next_op[:-1], calls.first_op[1:]
    sequences = [ops.name[low:high].tobytes() for low, high in zip(begin.tolist(), stop.tolist(), strict=True)]
    common, often = Counter(sequences).most_common(1)[0]
    usual = np.frombuffer(common, ops.name.dtype) if common and 2 * often >= len(sequences) else ops.name[:0]
    others = np.append(np.flatnonzero(~ops.is_zero_grad), len(ops.is_zero_grad))
    zeroing = np.minimum(others[np.searchsorted(others, begin)], stop) - begin  # ops that begin each sequence
    lead = int(np.median(zeroing))
    # The pause between two steps is before the gradients are zeroed, or after.
    kept = lead if lead and _pauses_after_zeroing(ops, calls, zeroing == lead, lead) else 0
    ahead = len(usual) - kept  # ops of a step before its optimizer is called
    recorded = 0 < ahead <= first and (ops.name[first - ahead:first] == usual[kept:]).all()
    return [first - ahead if recorded else -1, *(
        _begin_in(ops.name[low:high], usual, lead, kept) + low
        for low, high in zip(begin.tolist(), stop.tolist(), strict=True))]


def _pauses_after_zeroing(ops: Ops, calls: _StepCalls, usual: Mask, lead: int) -> bool:
    """Return whether more time passes without an op behind the ``lead`` ops that zero gradients than before them, in
    the steps that have as many as is usual, and ops behind them."""
    begin, stop = calls.next_op[:-1], calls.first_op[1:]
    steps = np.flatnonzero(usual & (stop - begin > lead))
    zeroing = begin[steps]
    before = ops.start[zeroing] - calls.last_end_ns[:-1][steps]
    behind = ops.start[zeroing + lead] - ops.end[zeroing + lead - 1]
    return bool(len(steps) and before.sum() < behind.sum())


def _begin_in(names: npt.NDArray, usual: npt.NDArray, lead: int, kept: int) -> int:
    """Index of the op between two steps' calls that is the next step's first: behind ``kept`` ops, or, if there are
    more than usual, where the ``usual`` sequence begins that ends with the next call, with or without its ``lead``
    ops."""
    begin = len(names) - len(usual)
    if len(usual) and begin > 0:
        if (names[begin:] == usual).all():
            return begin + kept
        if (names[begin + lead:] == usual[lead:]).all():
            return begin + lead
    return min(kept, len(names))


def _phase(ops: Ops, first: int, stop: int) -> str | None:
    """Phase of the ops from ``first`` to before ``stop``, between two steps: an evaluation by a DataLoader's batches, a
    prediction of other data, a loop that trains otherwise, or none."""
    begin_ns, end_ns = ops.start[first:first + 1], ops.end[stop - 1:stop]
    if ops.backward_nodes(begin_ns, end_ns)[0]:
        return UNKNOWN
    if not ops.runs_model(begin_ns, end_ns)[0]:
        return None
    return EVALUATION if ops.is_batch[first:stop].any() else PREDICTION


# -- without one ----------------------------------------------------------------------------------------


def batch_steps(trace: Trace) -> Anchors | None:
    """Steps from batch to batch of the DataLoader (4); None where fewer than three begin."""
    host = trace.host
    rows = host_rows(trace, LOADER, lines_of(trace, MAIN))
    if len(rows) <= FEWEST:
        return None
    ops = outer_ops(trace, busiest_line(trace, host.line[rows]))
    batches = np.setdiff1d(np.flatnonzero(ops.is_batch), ops.ended()[0])
    if len(batches) <= FEWEST:
        return None
    edges = ops.start[batches]
    start, next_start = edges[:-1], edges[1:]
    trains = ops.backward_nodes(start, next_start) > 0
    name = "batches of the DataLoader"
    if not trains.any():
        return Anchors(f"{name}, without a backward pass", "medium", start, start, edges)
    evaluates = ~trains & ops.runs_model(start, next_start)
    if trains.sum() < FEWEST <= evaluates.sum():
        return Anchors(f"{name}, which evaluate", "medium", start[evaluates], start[evaluates], edges, phase=EVALUATION)
    last_end = ops.end[batches[1:] - 1]
    loops = {EVALUATION: union(start[evaluates], last_end[evaluates])} if evaluates.any() else {}
    return Anchors(name, "medium", start[trains], start[trains], edges, other_loops=loops)


def op_sequence(trace: Trace) -> Anchors | None:
    """The sequence of ops that the loop's thread repeats (5); None where nothing surely does."""
    line = thread_of_ops(trace)
    if line is None:
        return None
    ops = _without_edges(outer_ops(trace, line))
    period = sequence_period(ops.name)
    if period is None or len(np.unique(ops.name[:period])) < _MIN_NAMES:
        return None
    start = _begins_of_sequence(ops, period)
    if len(start) <= FEWEST:
        return None
    trains = bool((ops.backward_nodes(start[:-1], start[1:]) > 0).all())
    name = f"a sequence of {period} ops that the loop's thread repeats"
    return Anchors(f"{name}, including a backward pass" if trains else name, "medium" if trains else "low",
                   start, start, start, unit="step" if trains else "period")


def _without_edges(ops: Ops) -> Ops:
    """The ops without what is left at the recording's edges of ops that had begun before it or had not ended with it,
    and have no event: the ops in them, which else are in no sequence. All of them where that is much."""
    _, which = np.unique(ops.name, return_inverse=True)
    indices = np.arange(len(which))
    first, last = np.full(len(which) + 1, len(which)), np.zeros(len(which) + 1, np.int64)
    np.minimum.at(first, which, indices)
    np.maximum.at(last, which, indices)
    local = np.flatnonzero((last - first)[which] < _LOCAL * len(which))
    edges = np.concatenate(([-1], local, [len(which)]))
    longest = int(np.argmax(np.diff(edges))) if len(which) else 0
    kept = slice(int(edges[longest]) + 1, int(edges[longest + 1]))
    return ops.part(kept) if kept.stop - kept.start >= _KEPT * len(which) else ops


def _begins_of_sequence(ops: Ops, period: int) -> I64:
    """Begins of the op that comes once in each period, of several the one behind the widest pause; none where no op
    does."""
    _, which, counts = np.unique(ops.name, return_inverse=True, return_counts=True)
    pause = np.concatenate(([0], ops.start[1:] - ops.end[:-1]))
    once = np.flatnonzero(np.abs(counts * period - len(ops.name)) <= period).tolist()
    if not once:
        return ops.start[:0]
    chosen = min(once, key=lambda kind: (-float(np.median(pause[which == kind])), int(np.argmax(which == kind))))
    return ops.start[which == chosen]

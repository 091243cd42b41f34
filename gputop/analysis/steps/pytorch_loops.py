"""The steps of a PyTorch job that marks none, as a capture from the middle of its run records it.

PyTorch runs ops one by one, and no call holds a step. What repeats on the loop's thread tells, of events that lie in no
other event of that thread; functions of Python and ranges of the user's are passed over:

1. ``Optimizer.step#`` ends a step. Where one step calls several (a GAN's), their names and the nodes of the backward
   pass before each come again after that many calls.
2. The step begins with its first batch of the DataLoader, as many before the optimizer's call as most steps fetch;
   without one with the first op that follows the call before (zeroing of gradients apart, unless the pause is there).
3. Far more ops than usual between a call and the next step's begin are another loop: an evaluation if a model runs
   forward and not backward in it.
4. Without an optimizer a step is from batch to batch of the DataLoader; batches without a backward pass, next to
   batches with one, are an evaluation. Without any backward pass nothing tells evaluation from inference.
5. Without both the sequence of ops tells, if one repeats and no longer one explains it as well: a step where it holds a
   backward pass, else a period of which nothing tells what it is. Where two threads run ops, none is the loop's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from gputop.analysis.steps.compilations import outermost
from gputop.analysis.steps.phases import EVALUATION, UNKNOWN
from gputop.analysis.steps.sequence_period import FEWEST, sequence_period
from gputop.analysis.steps.training_loops import LOADER
from gputop.trace.intervals import Spans, merge, union
from gputop.trace.lookups import OPTIMIZER_CALL, Mask, by_line, host_rows, host_stat, name_mask
from gputop.trace.model import I64, Trace
from gputop.trace.threads import MAIN, busiest_line, lines_of

_MARKS = rf"Optimizer\.(?:step|zero_grad)#|{LOADER}"
_ZERO_GRAD = r"Optimizer\.zero_grad#"
_OPS = rf"[\w.]+::\S|{_MARKS}|Torch-Compiled Region|CompiledFunction|\w+Backward\d*$"
_BACKWARD = r"autograd::engine::evaluate_function"
# Ops with weights, or what torch.compile made of them: a model runs.
_FORWARD = (r"aten::(?:linear|addmm|mm|bmm|matmul|baddbmm|_?convolution|conv\w+|embedding\w*|lstm|gru|layer_norm|"
            r"\w*batch_norm|\w*attention\w*|_transformer_encoder_layer_fwd)$|Torch-Compiled Region")
_MOST_OPTIMIZERS = 8  # that one step of training calls
# An evaluation between two calls makes two of these comparisons fail: a period is one that few more fail than of the
# best, and most hold. gputop's own figures.
_ABOUT_AS_GOOD, _MOST = 0.1, 0.6
_MIN_NAMES = 3  # of ops in a period: a benchmark of one op has no steps
_LOCAL, _KEPT = 1 / 3, 0.8  # of all ops: those of a name lie in less; those that are looked at, at least
_ANOTHER_THREAD = 0.3  # of the time in ops of the busiest thread: which of the two is the loop's is not known


class LoopSteps(NamedTuple):
    """Steps begin at ``start_ns``, their last call of an optimizer ends at ``end_ns`` (their begin where none is
    called), and each lasts until the next of ``edges_ns``."""

    what: str
    confidence: str
    start_ns: I64
    end_ns: I64
    edges_ns: I64
    unit: str = "step"
    phase: str = UNKNOWN
    other_loops: Mapping[str, Spans] = {}


class Ops(NamedTuple):
    """The outermost ops of one thread, in order of time; ``backward_ns`` are the begins of the backward pass's nodes in
    its process, ``forward_ns`` of ops with weights on the thread."""

    name: npt.NDArray
    start: I64
    end: I64
    is_batch: Mask
    is_zero_grad: Mask
    backward_ns: I64
    forward_ns: I64

    def first_at(self, time_ns: int) -> int:
        return int(np.searchsorted(self.start, time_ns))

    def nodes(self, begin_ns: I64, end_ns: I64) -> I64:
        """How many nodes of the backward pass begin in each of these times."""
        return np.searchsorted(self.backward_ns, end_ns) - np.searchsorted(self.backward_ns, begin_ns)


def outer_ops(trace: Trace, line: int) -> Ops:
    """Those of this thread, which is of Python."""
    host = trace.host
    rows = host_rows(trace, _OPS)
    ranges = host_stat(host, "annotation")[0]
    ranges = ranges[~name_mask(trace, _MARKS)[host.name[ranges]]]
    rows = rows[(host.line[rows] == line) & ~np.isin(rows, ranges)]
    rows = rows[np.lexsort((-host.end_ns[rows], host.start_ns[rows]))]
    forward = rows[name_mask(trace, _FORWARD)[host.name[rows]]]
    if len(rows):
        reach = np.maximum.accumulate(host.end_ns[rows])
        rows = rows[np.concatenate(([True], host.start_ns[rows][1:] >= reach[:-1]))]
    process = trace.lines[line].host, trace.lines[line].rank
    of_process = np.array([(one.host, one.rank) == process for one in trace.lines], bool)
    backward = host_rows(trace, _BACKWARD)
    backward = backward[of_process[host.line[backward]]]
    name = host.name[rows]
    return Ops(name, host.start_ns[rows], host.end_ns[rows], name_mask(trace, LOADER)[name],
                name_mask(trace, _ZERO_GRAD)[name], host.start_ns[backward], host.start_ns[forward])


# -- with an optimizer ----------------------------------------------------------------------------------

def optimizer_steps(trace: Trace) -> LoopSteps | None:
    """Steps that end with calls of an optimizer (1 to 3); None where fewer than three are recorded."""
    host = trace.host
    rows = host_rows(trace, OPTIMIZER_CALL)
    rows = rows[lines_of(trace, MAIN)[host.line[rows]]]
    if len(rows) < FEWEST:
        return None
    line = busiest_line(trace, host.line[rows])
    rows = np.sort(outermost(trace, rows[host.line[rows] == line]))
    ops = outer_ops(trace, line)
    start, end = host.start_ns[rows], host.end_ns[rows]
    work = ops.nodes(start[:-1], start[1:])
    if not len(ops.backward_ns):
        launched = np.sort(trace.device.launch_ns[trace.device.launch_ns >= 0])
        work = np.diff(np.searchsorted(launched, start))
    period = _period_of_calls(host.name[rows], work)
    first = _first_of_step(ops, start, end, period)
    count = (len(rows) - first) // period
    if count < FEWEST:
        return None
    calls = np.arange(count) * period + first
    return _from_calls(ops, start[calls], end[calls + period - 1])


def _period_of_calls(name: npt.NDArray, work: I64) -> int:
    """After how many calls the optimizers' names and the work before each come again; 1 where nothing tells.

    The shortest for which about as many of them do as for the best.
    """
    for alike_with_work in (True, False):
        shares = {}
        for period in range(1, min(_MOST_OPTIMIZERS, len(work) // 2) + 1):
            alike = name[1:][period:] == name[1:][:-period]
            if alike_with_work:
                alike &= work[period:] == work[:-period]
            shares[period] = float(alike.mean())
        best = max(shares.values(), default=0.0)
        if best >= _MOST:
            return next(period for period, share in shares.items() if share >= best - _ABOUT_AS_GOOD)
    return 1


def _first_of_step(ops: Ops, start: I64, end: I64, period: int) -> int:
    """Which of the first calls begins a step: the one before which more batches are fetched than before others, or
    gradients zeroed more often; else the one before which most time passes without an op, or now and then: logging,
    evaluations and ends of epochs lie between steps."""
    if period == 1:
        return 0
    at = np.arange(1, len(start))  # what precedes the first call was not recorded whole
    batches = np.diff(np.searchsorted(ops.start[ops.is_batch], start))
    zeroed = np.diff(np.searchsorted(ops.start[ops.is_zero_grad], start))
    stretch = start[1:] - end[:-1]
    following = np.searchsorted(ops.start, end[:-1])
    pause = np.append(ops.start, start[-1])[following] - end[:-1]
    places = [at % period == place for place in range(period)]
    return min(range(period), key=lambda place: (
        -float(np.median(batches[places[place]])), -float(np.median(zeroed[places[place]])),
        float(np.median(stretch[places[place]]) - (stretch + pause)[places[place]].mean())))


def _from_calls(ops: Ops, first_ns: I64, last_end_ns: I64) -> LoopSteps:
    """Steps of which the first call of an optimizer begins at ``first_ns`` and the last one ends at ``last_end_ns``."""
    # What lies between two steps' calls, as places in ``ops``, and the same after the last one.
    begin = np.searchsorted(ops.start, last_end_ns)
    stop = np.searchsorted(ops.start, first_ns)
    batches = np.concatenate(([0], np.cumsum(ops.is_batch)))
    fetched = batches[stop[1:]] - batches[begin[:-1]]
    usual, often = Counter(fetched.tolist()).most_common(1)[0]
    if usual and 2 * often >= len(fetched):
        begins = _begins_by_batch(ops, begin, stop, usual)
    else:
        begins = _begins_by_sequence(ops, begin, stop, last_end_ns)
    start_ns = np.array([first if at == stop_at else int(ops.start[at]) for at, stop_at, first in zip(
        begins, stop.tolist(), first_ns.tolist(), strict=True)], np.int64)
    before = np.array(begins[1:]) - begin[:-1]
    usually = int(np.median(before))
    edges, loops = [start_ns], dict[str, list[tuple[int, int]]]()
    for i in np.flatnonzero(before > 2 * usually + 2).tolist():
        at, until = int(begin[i]) + usually, begins[i + 1]
        span = int(ops.start[at]), int(ops.end[until - 1])
        phase = _phase(ops, *span)
        if phase is not None:
            loops.setdefault(phase, []).append(span)
            edges.append(np.array(span[:1], np.int64))
    tail = _tail(ops, int(begin[-1]), usually, by_batch=bool(usual))
    if tail is not None:
        edges.append(np.array([tail], np.int64))
    whole = np.array(begins) >= 0
    return LoopSteps("calls of Optimizer.step", "medium", start_ns[whole], last_end_ns[whole],
                     np.concatenate([start_ns[whole], *edges[1:]]), other_loops={
                         phase: union(*zip(*spans, strict=True)) for phase, spans in loops.items()})


def _begins_by_batch(ops: Ops, begin: I64, stop: I64, usual: int) -> list[int]:
    """The place of each step's first batch; of the first step -1 where it was not recorded."""
    at = np.flatnonzero(ops.is_batch)
    last = np.searchsorted(at, stop) - usual
    out = []
    for i, place in enumerate(last.tolist()):
        low = int(begin[i - 1]) if i else 0
        recorded = place >= 0 and at[place] >= low
        out.append(int(at[place]) if recorded else low if i else -1)
    return out


def _begins_by_sequence(ops: Ops, begin: I64, stop: I64, end_ns: I64) -> list[int]:
    """The place of each step's first op, by the sequence of names that most steps have; of the first step -1 where that
    was not recorded."""
    first, begin, stop = int(stop[0]), begin[:-1], stop[1:]
    sequences = [ops.name[low:high].tobytes() for low, high in zip(begin.tolist(), stop.tolist(), strict=True)]
    common, often = Counter(sequences).most_common(1)[0]
    length = len(common) // ops.name.itemsize if 2 * often >= len(sequences) else 0
    usual = np.frombuffer(common, ops.name.dtype) if length else ops.name[:0]
    zeroing = _leading(ops.is_zero_grad, begin, stop)
    lead = int(np.median(zeroing))
    if lead:  # the pause is before the gradients are zeroed, or after
        within = np.flatnonzero((zeroing == lead) & (stop - begin > lead))
        at = begin[within]
        before = ops.start[at] - end_ns[:-1][within]
        behind = ops.start[at + lead] - ops.end[at + lead - 1]
        kept = 0 if not len(within) or before.sum() >= behind.sum() else lead
    else:
        kept = 0
    ahead = length - kept  # ops of a step before its optimizer is called
    out = [first - ahead if 0 < ahead <= first and (ops.name[first - ahead:first] == usual[kept:]).all() else -1]
    for low, high in zip(begin.tolist(), stop.tolist(), strict=True):
        place = min(low + kept, high)
        if length and high - low > length:
            if (ops.name[high - length:high] == usual).all():
                place = high - length + kept
            elif (ops.name[high - length + lead:high] == usual[lead:]).all():
                place = high - length + lead
        out.append(place)
    return out


def _leading(mask: Mask, begin: I64, stop: I64) -> I64:
    """How many ops at the begin of each of these sequences are in ``mask``."""
    others = np.append(np.flatnonzero(~mask), len(mask))
    return np.minimum(others[np.searchsorted(others, begin)], stop) - begin


def _phase(ops: Ops, begin_ns: int, end_ns: int) -> str | None:
    """What the ops between two steps are: an evaluation, a loop that trains otherwise, or none."""
    if ops.nodes(np.array([begin_ns]), np.array([end_ns]))[0]:
        return UNKNOWN
    runs = np.searchsorted(ops.forward_ns, end_ns) > np.searchsorted(ops.forward_ns, begin_ns)
    return EVALUATION if runs else None


def _tail(ops: Ops, begin: int, usually: int, *, by_batch: bool) -> int | None:
    """When what follows the last step begins."""
    if by_batch:
        at = begin + np.flatnonzero(ops.is_batch[begin:])[:1]
        return int(ops.start[at[0]]) if len(at) else None
    return int(ops.start[begin + usually]) if begin + usually < len(ops.start) else None


# -- without one ----------------------------------------------------------------------------------------

def batch_steps(trace: Trace) -> LoopSteps | None:
    """Steps from batch to batch of the DataLoader (4); None where fewer than three begin."""
    host = trace.host
    rows = host_rows(trace, LOADER)
    rows = rows[lines_of(trace, MAIN)[host.line[rows]]]
    if len(rows) <= FEWEST:
        return None
    ops = outer_ops(trace, busiest_line(trace, host.line[rows]))
    at = np.flatnonzero(ops.is_batch)
    # The call that finds no further batch and the next epoch's first one follow each other.
    at = at[np.append(np.diff(at) > 1, True)] if len(at) else at
    if len(at) <= FEWEST:
        return None
    start, behind = ops.start[at], ops.end[np.append(at[1:], len(ops.end)) - 1]
    trains = ops.nodes(start[:-1], start[1:]) > 0
    what = "batches of the DataLoader"
    if not trains.any():
        return LoopSteps(f"{what}, without a backward pass", "medium", start[:-1], start[:-1], start)
    evaluates = ~trains & (np.searchsorted(ops.forward_ns, start[1:]) > np.searchsorted(ops.forward_ns, start[:-1]))
    if trains.sum() < FEWEST <= evaluates.sum():
        step_starts = start[:-1][evaluates]
        return LoopSteps(f"{what}, which evaluate", "medium", step_starts, step_starts, start, phase=EVALUATION)
    step_starts, loops = start[:-1][trains], dict[str, Spans]()
    if evaluates.any():
        loops[EVALUATION] = union(start[:-1][evaluates], behind[:-1][evaluates])
    return LoopSteps(what, "medium", step_starts, step_starts, start, other_loops=loops)


def op_sequence(trace: Trace) -> LoopSteps | None:
    """The sequence of ops that the loop's thread repeats (5); None where nothing surely does."""
    line = _line_of_ops(trace)
    if line is None:
        return None
    ops = _without_edges(outer_ops(trace, line))
    period = sequence_period(ops.name)
    if period is None or len(np.unique(ops.name[:period])) < _MIN_NAMES:
        return None
    start = _begins_of_sequence(ops, period)
    if len(start) <= FEWEST:
        return None
    trains = bool((ops.nodes(start[:-1], start[1:]) > 0).all())
    what = f"a sequence of {period} ops that the loop's thread repeats"
    return LoopSteps(f"{what}, a backward pass among them" if trains else what, "medium" if trains else "low",
                     start, start, start, "step" if trains else "period")


def _without_edges(ops: Ops) -> Ops:
    """Without what is left at the recording's edges of ops that had begun before it or had not ended with it, and have
    no event: the ops in them, which else are in no sequence. All of them where that is much."""
    _, which = np.unique(ops.name, return_inverse=True)
    at = np.arange(len(which))
    first, last = np.full(len(which) + 1, len(which)), np.zeros(len(which) + 1, np.int64)
    np.minimum.at(first, which, at)
    np.maximum.at(last, which, at)
    local = np.flatnonzero((last - first)[which] < _LOCAL * len(which))
    edges = np.concatenate(([-1], local, [len(which)]))
    longest = int(np.argmax(np.diff(edges))) if len(which) else 0
    kept = slice(int(edges[longest]) + 1, int(edges[longest + 1]))
    if kept.stop - kept.start < _KEPT * len(which):
        return ops
    return ops._replace(name=ops.name[kept], start=ops.start[kept], end=ops.end[kept], is_batch=ops.is_batch[kept],
                        is_zero_grad=ops.is_zero_grad[kept])


def _begins_of_sequence(ops: Ops, period: int) -> I64:
    """When the op begins that comes once in each period, of several the one behind the widest pause; none where no op
    does."""
    _, which, counts = np.unique(ops.name, return_inverse=True, return_counts=True)
    pause = np.concatenate(([0], ops.start[1:] - ops.end[:-1]))
    once = np.flatnonzero(np.abs(counts * period - len(ops.name)) <= period).tolist()
    if not once:
        return ops.start[:0]
    chosen = min(once, key=lambda kind: (-float(np.median(pause[which == kind])), int(np.argmax(which == kind))))
    return ops.start[which == chosen]


def _line_of_ops(trace: Trace) -> int | None:
    """The thread whose ops are no backward pass of another one's; None where several could be the loop's."""
    host = trace.host
    rows = host_rows(trace, r"aten::")
    rows = rows[lines_of(trace, MAIN)[host.line[rows]]]
    backward = host_rows(trace, _BACKWARD)
    of_engine = np.bincount(host.line[backward], minlength=len(trace.lines))
    times = []
    for line, at in by_line(host.line[rows]).items():
        spans = union(host.start_ns[rows[at]], host.end_ns[rows[at]])
        within = union(host.start_ns[backward[host.line[backward] == line]],
                       host.end_ns[backward[host.line[backward] == line]]) if of_engine[line] else None
        ops_ns = spans.total if within is None else merge(spans, within).total - within.total
        times.append((ops_ns, line))
    times.sort(reverse=True)
    if not times or (len(times) > 1 and times[1][0] > _ANOTHER_THREAD * times[0][0]):
        return None
    return times[0][1]

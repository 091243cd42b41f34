"""Work of the host while no GPU worked: the names that fill a step's gaps."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from gputop.analysis.gpu.device_time import GpuTimeline, any_busy
from gputop.analysis.host.python_tracer import function_text
from gputop.analysis.results import GapWork, StepGaps
from gputop.analysis.steps.model import Steps
from gputop.analysis.steps.optimizer_calls import users_ranges
from gputop.analysis.steps.user_ranges import named_ranges, numbered_ranges
from gputop.trace.host_calls import BACKWARD_NODE
from gputop.trace.intervals import AT_ONCE, Spans, coverage, intersect, subtract
from gputop.trace.lookups import FEW_LINES, host_stat, launching_lines, name_mask, numbered, rows_of, spans_of
from gputop.trace.model import I64, Trace, once
from gputop.trace.nesting import nest
from gputop.trace.threads import EXECUTOR, MAIN, lines_of

TOP = 12  # names kept of each kind of thread
# Calls that only pass an op on: their time is that op's.
_WRAPPERS = (r"(?:TFE_Py_FastPathExecute_C|TFE_Py_ExecuteCancelable|EagerKernelExecute|KernelAndDevice(?:Func|Op)::Run|"
             r"EagerCopyToDevice|ValidateInputTypeAndPlacement|FunctionRun|ExecutorState::Process)$")
_CALLS = r"(?:cuda|hip|cu)[A-Z]"  # of CUDA's and HIP's interfaces: no ranges of the user's
_WITHIN = 0.99  # share of a range in which no GPU works: it lies within a gap
_EAGER_PREFIX = re.compile(r"EagerLocalExecute: ")
_MARKER = r"ProfilerStep#\d+$"  # PyTorch's mark of a step; others have a number of the step


def step_gaps(trace: Trace, gpu_timelines: Sequence[GpuTimeline], steps: Steps | None) -> StepGaps | None:
    """The host's work in the steps' gaps; None without steps, or where the trace does not tell gaps.

    With GPUs a gap is time within steps in which none of them is busy. Without, it is the time from the end of a step's
    own call to the start of the next step; None for PyTorch, whose steps are no calls. A name's time is that of its
    events less that of events inside them on the same thread. Mean per step; of several training loops (ranks) the
    mean, of executor threads the sum.
    """
    if steps is None:
        return None
    calls = step_calls(trace, steps)
    within = steps.spans
    if gpu_timelines:
        gaps, what = subtract(within, any_busy(trace, gpu_timelines)), "while no GPU is busy within the step"
    elif len(calls) and not trace.gpus and not name_mask(trace, _MARKER)[trace.host.name[calls]].any():
        gaps = subtract(within, spans_of(trace, calls))
        what = "from the end of a step's call to the start of the next call"
    else:
        return None
    launching = launching_lines(trace)
    main = loop_lines(trace, np.ones(len(trace.lines), bool), calls)
    main_work, silent_ns = work_in(trace, gaps, main)
    executor = lines_of(trace, EXECUTOR)
    executor[launching] = True
    executor_work, _ = work_in(trace, gaps, executor & ~main)
    return StepGaps(
        what=what, total_s_per_step=gaps.total / steps.count / 1e9,
        count_per_step=len(gaps.start) / steps.count,
        no_event_s_per_step=silent_ns / steps.count / 1e9 if main.any() else None,
        main=ranked_work(main_work, max(len(processes(trace, main)), 1) * steps.count),
        executor=ranked_work(executor_work, steps.count))


def step_calls(trace: Trace, steps: Steps) -> I64:
    """Rows of the host events that marked the steps, as far as the steps rest on events with a length."""
    host = trace.host
    if not steps.call_ends_ns:
        return np.empty(0, np.int64)
    begin = steps.edges_ns[:, 0]
    end = np.array(steps.call_ends_ns, np.int64)
    first = np.searchsorted(host.start_ns, begin, side="left")
    last = np.searchsorted(host.start_ns, begin, side="right")
    count = last - first
    rows = np.repeat(first, count) + np.arange(int(count.sum())) - np.repeat(np.cumsum(count) - count, count)
    ours = (host.end_ns[rows] == np.repeat(end, count)) & (host.end_ns[rows] > host.start_ns[rows])
    return np.asarray(rows[ours & lines_of(trace, MAIN)[host.line[rows]]], np.int64)


def loop_lines(trace: Trace, lines: npt.NDArray[np.bool_], calls: I64) -> npt.NDArray[np.bool_]:
    """Mask of the threads that call the steps; where these are no calls, that launch kernels, else the busiest one.
    And of autograd's, for which the others wait."""
    out, main = np.zeros(len(trace.lines), bool), lines & lines_of(trace, MAIN)
    out[trace.host.line[calls]] = True
    out &= main
    if not out.any():
        out[launching_lines(trace)] = True
        out &= main
    if not out.any() and main.any() and len(trace.host):
        events = np.bincount(trace.host.line, minlength=len(trace.lines)) * main
        out[int(events.argmax())] = True
    out[trace.host.line[name_mask(trace, BACKWARD_NODE).take(trace.host.name)]] = True
    return out & main


class Charge(Struct, frozen=True):
    """Host events within gaps: the name that the time of each counts for, and the time itself. ``name`` indexes
    ``Trace.names``; what only passes an op on counts for the op. ``own_ns`` is an event's time within the gaps less
    that of events inside it, ``outer_ns`` all of it for an event that is in no other, else 0. ``holder`` is the place
    of the event that has the name."""

    name: I64
    own_ns: I64
    outer_ns: I64
    holder: I64


def charge(trace: Trace, rows: I64, inside_ns: I64, line: npt.NDArray) -> Charge:
    """``rows``: those host events that lie within the gaps for ``inside_ns``, which is above 0; ``line``: what sets
    them apart into sequences that nest, their threads or finer."""
    host = trace.host
    nesting = nest(line, host.start_ns[rows], host.end_ns[rows], host.name[rows], trace.names)
    label = host.name[rows].astype(np.int64)
    eager, op = host_stat(host, "eager_op")
    eager_index = np.searchsorted(eager, rows)
    names_op = eager_index < len(eager)
    names_op[names_op] = eager[eager_index[names_op]] == rows[names_op]
    label[names_op] = op[eager_index[names_op]]
    passes_on = name_mask(trace, _WRAPPERS)[label]
    passes_on |= name_mask(trace, _EAGER_PREFIX.pattern)[label] & (nesting.parent >= 0) & names_op[nesting.parent]
    in_gap = _ranges(trace)[rows] & (inside_ns >= _WITHIN * (host.end_ns[rows] - host.start_ns[rows]))
    passes_on |= in_gap & (nesting.parent >= 0) & in_gap[nesting.parent]  # the user's outer range says more
    holder = nesting.holder(passes_on & ~names_op)
    return Charge(label[holder], nesting.own(inside_ns), np.where(nesting.parent < 0, inside_ns, 0), holder)


@once
def _ranges(trace: Trace) -> npt.NDArray[np.bool_]:
    """Mask of the host events that may be ranges of the user's."""
    out = np.zeros(len(trace.host), bool)
    out[users_ranges(trace)] = True
    return out & ~name_mask(trace, _CALLS).take(trace.host.name)


@once
def marks(trace: Trace) -> npt.NDArray[np.bool_]:
    """Mask of the host events that are marks of steps, or hold one: an epoch, the whole training. They are around the
    work, and none of it themselves."""
    host = trace.host
    is_mark = name_mask(trace, _MARKER).take(host.name)
    is_mark[host_stat(host, "step_num")[0]] = True
    if (numbered := numbered_ranges(trace)) is not None:
        is_mark[numbered.rows] = True
    if (named := named_ranges(trace)) is not None:
        is_mark[named.rows] = True
    marked = np.flatnonzero(is_mark)
    for line in np.unique(host.line[marked]).tolist():
        of_line = marked[host.line[marked] == line]
        rows = np.flatnonzero(host.line == line)
        first = np.searchsorted(host.start_ns[of_line], host.start_ns[rows])
        ends = np.append(host.end_ns[of_line], np.iinfo(np.int64).max)
        is_mark[rows[ends[first] <= host.end_ns[rows]]] = True
    return is_mark


def shown_name(name: str) -> str:
    """An op's name without what eager execution puts before it, and a function of Python as its lines are shown."""
    return function_text(name) or _EAGER_PREFIX.sub("", name)


def work_in(trace: Trace, gaps: Spans, chosen: npt.NDArray[np.bool_]) -> tuple[dict[str, tuple[int, int]], int]:
    """Work by name (own nanoseconds within the gaps, number of events) on the chosen lines, and the gap time in which
    none of a process's shows an event but :func:`marks`, the mean of the processes."""
    work, silent_ns = grouped_work(trace, gaps, chosen, chosen, np.zeros(1, np.int64), np.zeros(1, np.int64))
    return work.get(0, {}), int(silent_ns[0])


def processes(trace: Trace, lines: npt.NDArray[np.bool_]) -> dict[tuple[str, int], list[int]]:
    """The chosen lines by process."""
    out: dict[tuple[str, int], list[int]] = {}
    for line in np.flatnonzero(lines).tolist():
        out.setdefault((trace.lines[line].host, trace.lines[line].rank), []).append(line)
    return out


def grouped_work(trace: Trace, gaps: Spans, chosen: npt.NDArray[np.bool_], loop_lines: npt.NDArray[np.bool_],
                 ends: I64, group: I64) -> tuple[dict[int, dict[str, tuple[int, int]]], npt.NDArray[np.float64]]:
    """:func:`work_in` by group, the time without an event of the ``loop_lines``. ``ends``: of the stretches that hold
    the gaps, ``group``: the number of each one's group."""
    host = trace.host
    names, sums = len(trace.names), dict[int, tuple[float, float]]()  # by group and name
    outer = [np.empty(0, np.int64)]

    def of_group(start: I64) -> I64:
        numbers: I64 = group[np.minimum(np.searchsorted(ends, start, side="right"), len(ends) - 1)]
        return numbers

    def by_group(spans: Spans) -> npt.NDArray[np.float64]:
        return np.bincount(of_group(spans.start), spans.end - spans.start, int(group.max(initial=0)) + 1).astype(float)

    for mine in lines_apart(host.line, chosen) if len(host) else ():
        inside = coverage(gaps, host.start_ns[mine], host.end_ns[mine])
        within = rows_of((inside > 0) & ~marks(trace)[mine])
        mine, inside = mine[within], inside[within]  # what holds such an event is such an event
        if not len(mine):
            continue
        charged, of_row = charge(trace, mine, inside, host.line[mine]), of_group(host.start_ns[mine])
        holds = np.zeros(len(mine), bool)
        holds[charged.holder[rows_of(charged.own_ns > 0)]] = True
        keys, which = numbered(of_row * names + charged.name)
        times, events = np.bincount(which, charged.own_ns, len(keys)), np.bincount(which, holds, len(keys))
        for key, time, count in zip(keys.tolist(), times.tolist(), events.tolist(), strict=True):
            before = sums.get(key, (0, 0))
            sums[key] = before[0] + time, before[1] + count
        outer.append(mine[loop_lines[host.line[mine]] & (charged.outer_ns > 0)])
    out: dict[int, dict[str, tuple[int, int]]] = {}
    for key, (time, count) in sorted(sums.items()):
        if time:
            by_name, text = out.setdefault(key // names, {}), shown_name(trace.names[key % names])
            earlier = by_name.get(text, (0, 0))
            by_name[text] = earlier[0] + int(time), earlier[1] + int(count)
    rows, by_process = np.concatenate(outer), processes(trace, loop_lines)
    with_event = [by_group(intersect(gaps, spans_of(trace, rows[np.isin(host.line[rows], lines)])))
                  for lines in by_process.values()]
    return out, by_group(gaps) - sum(with_event, np.zeros(1)) / max(len(by_process), 1)


def lines_apart(line: npt.NDArray, chosen: npt.NDArray[np.bool_]) -> Iterator[I64]:
    """Indices of each chosen line with many events in this column, and of all others of them together: what is computed
    of one stays in a core's cache. Where many lines have, all are together: each costs a pass over the column."""
    many = chosen & (np.bincount(line, minlength=len(chosen)) > AT_ONCE)
    many &= many.sum() <= FEW_LINES
    for one in np.flatnonzero(many).tolist():
        yield np.flatnonzero(line == one)
    if (others := chosen & ~many).any():
        yield np.flatnonzero(others.take(line))


def longest_on_host(trace: Trace, names: Collection[str], within: Spans) -> dict[str, float]:
    """Begin (seconds), by name, of the event that lies longest in ``within``. ``names`` are of host events or of eager
    ops, as :func:`work_in` gives them; those without such an event are left out."""
    host, number = trace.host, np.full(len(trace.names) + 1, -1, np.int64)  # the last one answers for no name
    wanted = {name: i for i, name in enumerate(names)}
    for i, text in enumerate(map(shown_name, trace.names)):
        if text in wanted:
            number[i] = wanted[text]
    eager, op = host_stat(host, "eager_op")
    own_name = np.flatnonzero(number.take(host.name) >= 0)
    rows = np.concatenate((own_name, eager[number[op] >= 0]))
    which = np.concatenate((number[host.name[own_name]], number[op][number[op] >= 0]))
    inside = coverage(within, host.start_ns[rows], host.end_ns[rows])
    out = {}
    for i, name in enumerate(names):
        of_name = np.flatnonzero((which == i) & (inside > 0))
        if len(of_name):
            out[name] = int(host.start_ns[rows[of_name[inside[of_name].argmax()]]]) / 1e9
    return out


def ranked_work(work: dict[str, tuple[int, int]], per: float) -> tuple[GapWork, ...]:
    first = sorted(work.items(), key=lambda item: (-item[1][0], item[0]))[:TOP]
    return tuple(GapWork(name, time / per / 1e9, count / per) for name, (time, count) in first)

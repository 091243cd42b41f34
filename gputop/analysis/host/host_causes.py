"""Causes for which the host keeps the GPUs waiting: one for each instant.

Each instant in which a GPU stands still by the host's fault (the parts ``launch`` and ``host`` of the
breakdown) goes to the first of these that holds:

1. ``tracing``: a function is being traced or compiled, until its first op runs;
2. ``eager``: Python runs ops one by one; only where the model itself runs so, and of PyTorch on a CPU where they are
   so small that starting them is most of their time (:mod:`gputop.analysis.host.host_ops`);
3. ``placement``: a long op runs on the host and starts no kernel, inside a call;
4. ``gap``: the host is in no function's call: Python between the steps; of PyTorch on a CPU, what follows the
   optimizer's call without a model (metrics, averages of weights) is that, too, beside a model what ops take no time of
   their own, and so are pauses from op to op that are too long for the start of an op and come at the same place in
   most steps;
5. ``dispatch``: the rest: inside a call the next launch is late.

Without a GPU the same division of all time within the steps that is not spent waiting for input; there
``eager`` is Python's part from op to op, and ``dispatch`` holds the computing.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from msgspec import Struct

from gputop.analysis.gpu.breakdown import IdleByGpu
from gputop.analysis.gpu.device_time import GpuTimeline
from gputop.analysis.host.gaps import processes, ranked_work, work_in
from gputop.analysis.host.host_spans import COLLECTIVE, HostSpans, host_spans
from gputop.analysis.host.launch_threads import input_on_shared_threads, work_by_line
from gputop.analysis.results import GapWork, HostOps
from gputop.analysis.steps.model import Steps
from gputop.analysis.steps.pytorch_ops import FORWARD, outer_ops
from gputop.analysis.steps.training_loops import training_loops
from gputop.trace.host_calls import OPTIMIZER_CALL
from gputop.trace.intervals import EMPTY, Spans, coverage, in_order, intersect, merge, overlap, subtract, union
from gputop.trace.lookups import computes_on_cpu, host_rows, rows_of
from gputop.trace.model import I64, Trace
from gputop.trace.threads import EXECUTOR, INPUT, MAIN, busiest_line, lines_of

# A launch is held up where the time since the one before is this many times the usual and at least so long.
STALL_FACTOR, STALL_NS = 5.0, 100_000
# The model itself runs eagerly from this share of the host's time in TensorFlow (XProf's limit) and this
# number of ops a step on: fewer are a callback's. gputop's own figure.
EAGER_SHARE, EAGER_OPS = 0.10, 50
# In JAX so few are the model's, where other functions hardly take part of the time in calls. gputop's own figures.
_ALONE, _OPS_ALONE = 0.9, 8
# One rank's gaps hold the others up where they are so many times as long as each other rank's. gputop's own figure.
SLOW_HOST = 2.0

CAUSES = ("tracing", "eager", "placement", "gap", "dispatch")


class Late(Struct, frozen=True):
    """One GPU and when it waits for the host, by cause; without GPUs one process, ``timeline`` None. ``process`` are
    its host and rank, None where the processes have hosts of their own, or GPUs."""

    process: tuple[str, int | None]
    timeline: GpuTimeline | None
    by_cause: dict[str, Spans]


class HostCauses(Struct, frozen=True):
    """Seconds per step (of the window, where there are no steps), mean over the GPUs; exclusive.

    ``placement_s`` and ``gap_s`` are None where the trace does not show ops, or calls of functions. ``placement_s`` and
    ``placement`` are of the steps that begin after the GPUs' first event, where there are some: what runs on the host
    at the head of a step before it is not known to keep a GPU waiting, and would be missed. ``gap_s`` and its work are
    without the time before that event, where a step begins after it: such a gap came once. ``placement`` are the ops on
    the host, ``gap_main`` and ``gap_executor`` the work in the gaps by name, ``gap_silent_s`` gap time without any
    event on Python's threads that call functions. ``stalled`` is the share of ``dispatch_s`` in launches held up far
    longer than usual, None without launches. ``gap_host`` is the one of several hosts (ranks; of one host ``gap_rank``)
    whose gaps are far longer than those of all others: then the gaps are its own, since the others wait for it.
    ``input_together`` is the share of the time of launches held up in which tf.data's threads work, and
    ``input_threads`` the mean number of them at work then; None without such launches or threads.
    ``input_shared_threads`` are those among them that TensorFlow's own ops need as well. ``divided`` is the division
    itself, of each GPU or, without one, host. ``gap_recurring`` is the share of the gaps that come at the same place in
    most steps, None unless PyTorch runs without a GPU.
    """

    tracing_s: float
    eager_s: float
    placement_s: float | None
    gap_s: float | None
    dispatch_s: float
    stalled: float | None
    placement: tuple[GapWork, ...] = ()
    gap_main: tuple[GapWork, ...] = ()
    gap_executor: tuple[GapWork, ...] = ()
    gap_silent_s: float | None = None
    gap_host: str | None = None
    input_together: float | None = None
    input_threads: float | None = None
    input_shared_threads: float = 0.0
    divided: tuple[Late, ...] = ()
    gap_recurring: float | None = None
    gap_rank: int | None = None


def runs_eagerly(ops: HostOps | None) -> bool:
    """Return whether the model itself runs op by op, and not only a callback: then the ops are many in each step, or,
    in JAX, no function is called beside them."""
    if ops is None or ops.eager_share is None or ops.eager_share < EAGER_SHARE:
        return False
    jax = all(op.name.startswith("PjitFunction(") for op in ops.eager)
    if ops.eager_ops_per_step is None or (jax and ops.eager_share == 1.0):
        return sum(op.count for op in ops.eager) >= EAGER_OPS
    return ops.eager_ops_per_step >= (_OPS_ALONE if jax and ops.eager_share >= _ALONE else EAGER_OPS)


def host_causes(
    trace: Trace, gpu_timelines: Sequence[GpuTimeline], steps: Steps | None, ops: HostOps | None,
    idle: IdleByGpu,
) -> HostCauses | None:
    """The division; None where the trace has no host event, or not the work of the job's GPUs. ``idle``: of the
    steps' bounds or, without steps, the window."""
    if not len(trace.host) or not (gpu_timelines or computes_on_cpu(trace)):
        return None
    late, hosts = late_by_cause(trace, gpu_timelines, steps, ops, idle)
    if not late:
        return None
    bounds = _bounds(trace, steps)
    parts = {cause: sum(waits.by_cause[cause].total for waits in late) for cause in CAUSES}
    placed = merge(*(waits.by_cause["placement"] for waits in late))
    held_up = [intersect(waits.by_cause["dispatch"], _held_up(trace, waits.timeline))
               for waits in late if waits.timeline is not None]
    stalled = merge(EMPTY, *held_up)
    unit = 1e9 * len(bounds) * len(late)
    first_ns = max((timeline.window_ns[0] for timeline in gpu_timelines), default=0)  # of the last GPU to begin
    # The steps in which it is known all the time whether the GPUs work: those that begin after the first event of each;
    # all, where those are none or there are no GPUs.
    seen = union(*zip(*([edges for edges in bounds if edges[0] >= first_ns] or bounds), strict=True))
    placed = intersect(placed, seen)
    placed_ns = sum(overlap(waits.by_cause["placement"], seen) for waits in late)
    # The time before that, where a step begins after it.
    once = union([bounds[0][0]], [first_ns]) if bounds[0][0] < first_ns <= bounds[-1][0] else EMPTY
    # The steps that are not seen may be far longer or shorter.
    whole_ns = sum(end - begin for begin, end in bounds)
    steps_seen = seen.total * len(bounds) / whole_ns if whole_ns and seen.total else 1.0
    of_hosts = list(hosts.values())
    together, threads, shared = _input_at_work(trace, stalled)
    slow = _slow_host(late)
    of_slow = [subtract(one.by_cause["gap"], once) for one in late if slow is None or one.process == slow]
    gap_s = sum(of_gpu.total for of_gpu in of_slow) / len(of_slow) / len(bounds) / 1e9
    gaps = merge(*of_slow)
    main, executor, silent = _work(trace, gaps, len(bounds), of_hosts if slow is None else [hosts[slow]])
    return HostCauses(
        tracing_s=parts["tracing"] / unit, eager_s=parts["eager"] / unit,
        placement_s=placed_ns / (1e9 * steps_seen * len(late)) if any(h.shows_ops for h in of_hosts) else None,
        gap_s=gap_s if any(len(h.calls.start) for h in of_hosts) else None,
        dispatch_s=parts["dispatch"] / unit,
        stalled=sum(s.total for s in held_up) / parts["dispatch"] if gpu_timelines and parts["dispatch"] else None,
        placement=_by_op(trace, placed, of_hosts, steps_seen),
        gap_main=main, gap_executor=executor,
        # Of the gaps of any process; ``gap_s`` is their mean.
        gap_silent_s=None if silent is None else silent * gap_s / max(gap_s, gaps.total / len(bounds) / 1e9, 1e-9),
        gap_host=slow[0] if slow is not None else None, gap_rank=slow[1] if slow is not None else None,
        input_together=together, input_threads=threads,
        input_shared_threads=shared,
        divided=tuple(late),
        gap_recurring=recurring_share(trace, steps, gaps, slow) if steps is not None and not trace.gpus else None)


def late_by_cause(
    trace: Trace, gpu_timelines: Sequence[GpuTimeline], steps: Steps | None, ops: HostOps | None,
    idle: IdleByGpu,
) -> tuple[list[Late], dict[tuple[str, int | None], HostSpans]]:
    """The same division instant by instant, of each GPU that took part (each process, where there is none), and what
    each of their processes was at. Empty where no GPU ran within the steps."""
    late = _late(trace, gpu_timelines, _bounds(trace, steps), idle)
    eagerly = runs_eagerly(ops)
    hosts = {process: host_spans(trace, process[0], runs_eagerly=eagerly, rank=process[1])
             for process in {process for process, _, _ in late}}
    out = []
    for process, line, left in late:
        spans = hosts[process]
        knows_calls = bool(len(spans.calls.start))
        in_calls = spans.calls if knows_calls else left
        if steps is not None and line is None and spans.short_ops is not None:
            # From the end of each step's call to the step's end; of marked steps from that of the optimizer's last.
            begin, ends = steps.edges_ns.T
            called = np.minimum(steps.call_ends_ns, ends) if steps.call_ends_ns else ends
            updates = in_order(trace.host.end_ns[host_rows(trace, OPTIMIZER_CALL)])
            last = np.append(updates, 0)[np.searchsorted(updates, called, side="right") - 1]  # 0: none is before
            behind = union(np.where(last > begin, last, called), ends)
            # Neither a model nor a collective begins in these, in whatever process.
            begun = np.sort(trace.host.start_ns[host_rows(trace, f"{FORWARD}|{COLLECTIVE}")])
            without = np.searchsorted(begun, behind.end) == np.searchsorted(begun, behind.start)
            in_calls = subtract(in_calls, merge(intersect(spans.short_ops, behind),
                                                Spans(behind.start[without], behind.end[without])))
            recurring = recurring_pauses(trace, steps, spans.short_pauses, process)
            in_calls = subtract(in_calls, recurring[0]) if recurring is not None else in_calls
        by_cause = {}
        eager = spans.eager if spans.short_ops is None else intersect(spans.eager, in_calls)
        for cause, instants in (("tracing", spans.tracing), ("eager", eager),
                                ("placement", intersect(spans.placed, in_calls))):
            by_cause[cause] = intersect(left, instants)
            left = subtract(left, by_cause[cause])
        by_cause["gap"] = subtract(left, in_calls) if knows_calls else EMPTY
        by_cause["dispatch"] = intersect(left, in_calls) if knows_calls else left
        out.append(Late(process, line, by_cause))
    return out, hosts


def _slow_host(late: Sequence[Late]) -> tuple[str, int | None] | None:
    """The process whose gaps are ``SLOW_HOST`` times as long as those of every other, or longer; None without one."""
    gaps: dict[tuple[str, int | None], list[int]] = {}
    for one in late:
        gaps.setdefault(one.process, []).append(one.by_cause["gap"].total)
    longest = sorted(((sum(of) / len(of), process) for process, of in gaps.items()), key=lambda one: -one[0])
    if len(longest) < 2 or not longest[0][0] or longest[0][0] < SLOW_HOST * longest[1][0]:
        return None
    return longest[0][1]


def _bounds(trace: Trace, steps: Steps | None) -> Sequence[tuple[int, int]]:
    return steps.bounds_ns if steps is not None else (trace.window_ns,)


def _late(
    trace: Trace, gpu_timelines: Sequence[GpuTimeline], bounds: Sequence[tuple[int, int]], idle: IdleByGpu,
) -> list[tuple[tuple[str, int | None], GpuTimeline | None, Spans]]:
    """(process, GPU, when that GPU waits for the host); without GPUs (process, None, when it does not wait for
    input)."""
    by_rank = trace.format == "chrome" and len(trace.paths) > 1
    if gpu_timelines:
        gpus = [(trace.gpus[timeline.gpu], timeline) for timeline in gpu_timelines if timeline.gpu in idle.late]
        return [((gpu.host, gpu.rank if by_rank else None), timeline, idle.late[timeline.gpu])
                for gpu, timeline in gpus]
    within = union([a for a, _ in bounds], [b for _, b in bounds])
    processes = sorted({(line.host, line.rank if by_rank else None) for line in trace.lines}, key=str)
    waiting = training_loops(trace)
    return [((host, rank), None, subtract(within, merge(EMPTY, *(
        loop.waits for loop in waiting if loop.host == host and (
            rank is None or loop.line < 0 or trace.lines[loop.line].rank == rank))))) for host, rank in processes]


def _held_up(trace: Trace, timeline: GpuTimeline) -> Spans:
    """Spans from the end of one launch to the start of the next one to this GPU, where that is far longer than
    usual."""
    device = trace.device
    rows = timeline.rows[rows_of(device.launch_ns[timeline.events] >= 0)]
    if len(rows) < 2:
        return EMPTY
    start = device.launch_ns[rows]
    if (start[1:] < start[:-1]).any():
        order = np.argsort(start, kind="stable")
        rows, start = rows[order], start[order]
    end = np.maximum.accumulate(device.launch_end_ns[rows])
    apart = start[1:] - end[:-1]
    usual = float(np.median(np.maximum(apart, 0)))
    long = apart > max(STALL_FACTOR * usual, STALL_NS)
    return union(end[:-1][long], start[1:][long])


def _input_at_work(trace: Trace, stalled: Spans) -> tuple[float | None, float | None, float]:
    """Share of this time in which tf.data works, the number of its threads, and that of threads which are not its
    own."""
    of_input = lines_of(trace, INPUT)
    if not stalled.total or not of_input.any():
        return None, None, 0.0
    work = [intersect(spans, stalled) for line, spans in work_by_line(trace) if of_input[line]]
    shared = [intersect(spans, stalled) for spans in input_on_shared_threads(trace).values()]
    together = merge(EMPTY, *work, *shared).total
    if not together:
        return 0.0, 0.0, 0.0
    on_shared = sum(spans.total for spans in shared)
    return together / stalled.total, (sum(spans.total for spans in work) + on_shared) / together, on_shared / together


def _by_op(trace: Trace, placed: Spans, hosts: Sequence[HostSpans], steps: float) -> tuple[GapWork, ...]:
    host = trace.host
    rows = np.concatenate([h.placed_rows for h in hosts])
    inside = coverage(placed, host.start_ns[rows], host.end_ns[rows])
    rows, inside = rows[inside > 0], inside[inside > 0]
    names, which = np.unique(host.name[rows], return_inverse=True)
    times, counts = np.bincount(which, weights=inside), np.bincount(which)
    return ranked_work({trace.names[name]: (int(time), int(count)) for name, time, count in zip(
        names.tolist(), times.tolist(), counts.tolist(), strict=True)}, steps)


def _work(
    trace: Trace, gaps: Spans, steps: int, hosts: Sequence[HostSpans],
) -> tuple[tuple[GapWork, ...], tuple[GapWork, ...], float | None]:
    """Names in the gaps on the threads that call functions and on executors', and the time without an event."""
    calling = np.zeros(len(trace.lines), bool)
    for spans_of_host in hosts:
        calling[trace.host.line[spans_of_host.call_rows]] = True
    calling &= lines_of(trace, MAIN)
    if not gaps.total or not calling.any():
        return (), (), None
    main, silent_ns = work_in(trace, gaps, calling)
    executor, _ = work_in(trace, gaps, lines_of(trace, EXECUTOR))
    per = steps * len(processes(trace, calling))
    return ranked_work(main, per), ranked_work(executor, steps), silent_ns / steps / 1e9


# -- recurring pauses ---------------------------------------------------------------------------------
#
# Pauses of a PyTorch loop that come at the same place of its steps, and those that come anywhere.
#
# Python that belongs to the loop pauses its ops at the same place in each step. A thread that has no CPU, or that
# waits for another thread's turn with Python's lock, pauses anywhere.

_RECURRING_SHARE = 0.5  # share of the steps that have a pause at this place. gputop's own figure
_OF_USUAL = 2.0  # times the median pause of a place; longer is what came on top. gputop's own figure


def recurring_share(trace: Trace, steps: Steps, pauses: Spans,
                    process: tuple[str, int | None] | None = None) -> float | None:
    """The share of this time in recurring pauses; None without pauses or ops. ``process``: the host and rank whose
    pauses these are, if of one. Of a pause that is longer than ``_OF_USUAL`` of the usual one at its place, only that
    much counts: a thread may lose its CPU where a short pause comes in each step."""
    chosen = recurring_pauses(trace, steps, pauses, process)
    if chosen is None:
        return None
    recurring, places = chosen
    order = np.argsort(places, kind="stable")
    length = (recurring.end - recurring.start)[order]
    of_places = np.split(length, np.flatnonzero(np.diff(places[order])) + 1) if len(places) else []
    counted = [float(np.minimum(lengths, _OF_USUAL * np.median(lengths)).sum()) for lengths in of_places]
    return sum(counted) / pauses.total


def recurring_pauses(trace: Trace, steps: Steps, pauses: Spans,
                     process: tuple[str, int | None] | None = None) -> tuple[Spans, I64] | None:
    """Pauses that come in most steps, after the same op and before the same op, counted from the step's begin, and a
    number for the place of each; None without pauses or ops."""
    host = trace.host
    lines = lines_of(trace, MAIN)
    if process is not None:
        lines &= np.array([line.host == process[0] and process[1] in (None, line.rank) for line in trace.lines], bool)
    rows = host_rows(trace, r"aten::", lines)
    if not len(rows) or not pauses.total:
        return None
    ops = outer_ops(trace, busiest_line(trace, host.line[rows]))
    edges = steps.edges_ns
    step = np.searchsorted(edges[:, 0], ops.start, side="right") - 1
    # Each op with the one before it, and how often that pair came before in its step.
    pair = np.concatenate(([-1], ops.name[:-1].astype(np.int64) * (len(trace.names) + 1) + ops.name[1:]))
    order = np.lexsort((np.arange(len(pair)), pair, step))
    new = np.concatenate(([True], (np.diff(pair[order]) != 0) | (np.diff(step[order]) != 0)))
    begin = np.flatnonzero(new)
    number = np.empty(len(pair), np.int64)
    number[order] = np.arange(len(pair)) - np.repeat(begin, np.diff(np.append(begin, len(pair))))
    after = np.searchsorted(ops.start, pauses.start)  # the op that ends each pause
    before_op = after < len(ops.start)
    key = np.stack((pair[after[before_op]], number[after[before_op]]), axis=1)
    places, which = np.unique(key, axis=0, return_inverse=True)
    of_step = np.searchsorted(edges[:, 0], pauses.start[before_op], side="right") - 1
    seen = np.unique(np.stack((which.reshape(-1), of_step), axis=1), axis=0)[:, 0]
    often = np.bincount(seen, minlength=len(places)) >= _RECURRING_SHARE * steps.count
    recurs = often[which.reshape(-1)]
    chosen = np.flatnonzero(before_op)[recurs]
    return Spans(pauses.start[chosen], pauses.end[chosen]), which.reshape(-1)[recurs]

"""Division of the recorded time: every second of every rank in one named part.

For each rank, from the begin to the end of its recording (the profiler's own, where the trace holds them, else its
first and last event), in this order:

1. time that was not recorded;
2. the whole training steps, and the steps left out as warm-up, which are the job's start. The pause that follows a
   step's call belongs to it, unless it is longer than a usual step and a usual pause together, and than the usual
   spread of pauses explains, and the host's own: that is the end of an epoch;
3. the loops of evaluations, predictions and other calls, outside of those steps: from the first call between two
   steps to the last one, and of Keras what it does right before and after them (making and freeing iterators), where no
   line of the user's runs in it;
4. the work of a start (:mod:`gputop.analysis.steps.start_up`) outside of both, as far as no step precedes it, the
   profiler's own, and what ends the program: calls that free and unload after the last work of the GPUs;
5. before the first step or loop and after the last one: up to ``OPEN_STEPS`` usual steps are edges, what is longer is
   a step or a wait that had begun before the recording or had not ended with it. Events are written when they end, so
   such a step has none. Where a period is all that is known, which may be a layer, what is longer is other work;
6. what is left lies between steps: the time in which a GPU of the rank works, and the rest, by what the host did.

Without steps all but 1 and 4 is the GPUs' work, and the rest by what the host did.

A stretch between steps is named by what fills half of it: waiting for a batch, a known kind of work
(:mod:`gputop.analysis.host.work_kinds`), a line of Python, an op, or no event. Stretches of one kind are one part;
those that only a line or an op names are one by that.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import PurePosixPath
from typing import TypeVar

import numpy as np
import numpy.typing as npt
from msgspec import Struct, structs

from gputop.analysis.gpu.device_time import GpuTimeline, any_busy
from gputop.analysis.host import work_kinds
from gputop.analysis.host.gaps import grouped_work, loop_lines, step_calls
from gputop.analysis.host.python_libraries import PASS_ON, is_library, is_library_file
from gputop.analysis.host.python_stacks import PythonStacks
from gputop.analysis.host.shuffle_fills import sample_spans
from gputop.analysis.host.stack_lines import CALLS_GAP, PLACEMENT_GAP, Lines, gap_lines, process_lines
from gputop.analysis.host.tf_data import PYTHON_OP
from gputop.analysis.results import Account, HostWork, RankWallTime, StackLine, StepSeries, WallPart, WallTime
from gputop.analysis.steps.compilations import function_name
from gputop.analysis.steps.long_steps import period_of, usual_limit
from gputop.analysis.steps.model import Steps
from gputop.analysis.steps.phases import EVALUATION, PREDICTION, SERVES
from gputop.analysis.steps.start_up import tear_down
from gputop.analysis.steps.steps import find_overview_steps
from gputop.analysis.steps.training_loops import training_loops
from gputop.trace.complete_part import host_taken
from gputop.trace.intervals import EMPTY, Spans, complement, coverage, intersect, joined, merge, subtract, union
from gputop.trace.lookups import detect_framework, host_rows, page_reads, rows_of, spans_of
from gputop.trace.model import I64, Trace
from gputop.trace.threads import EXECUTOR, INPUT, MAIN, lines_of

# Usual steps: at an edge of the recording there is one that began before it or had not ended, and the pause to the
# next. gputop's own figure.
OPEN_STEPS = 2.5
_STOPS_NS = 10**9  # time of TensorFlow's profiler to stop on busy CPUs; measured up to 0.6 s
_MAIN_SHARE = 0.5  # share of a stretch: what fills it, names it
_WHOLE = 0.9  # share of the recording: a range that lasts for so much of it is its program
_KNOWN_STEPS = 5  # so many show how long a usual one takes
_LULL = 0.5  # part of a usual step: what begins sooner after its call, or after more of its own work, belongs to it
_ONE_BY_ONE = 16  # stretches that are named each by itself, the longest ones; all others together
_WORTH_ITS_NAME = 0.005  # share of the recording
_NAMES = 4  # of the host's work that are kept of each part
_SUMMARY = work_kinds.PATTERN_OF_KIND["summary"]
_FLUSHES = r"FlushSummaryWriter\b"
_OP = re.compile(r"[A-Z][A-Za-z0-9]*")  # of TensorFlow's
_READS = rf"(?:EagerLocalExecute: )?{work_kinds.READ_VARIABLE}$"
_XLA_PROGRAM = r"ThunkExecutor::Execute"
_CLIPPED = "clipped"  # the note of a trace whose GPU events stop before the recording does
_AT_WORK = 0.5  # share of a wait that had not ended: tf.data's threads work meanwhile
_PHASES = (EVALUATION, PREDICTION)
_OF_STEPS = ("steps", "periods")  # their parts come first
SAMPLED = "sampled"  # kind of the steps that Python's stacks alone show: their number is estimated
_NO_STEPS = "no_steps"
_HALF = 0.5  # factor of the longest gap from which another one is of its kind
_KERAS = "Keras"  # in the anchor of steps that are its
_PYTHON = re.compile(r"i?python|pt_|thread/")  # names of its threads; "thread": the report has no name
_PROFILER = "profiler"  # a kind of host work that is a part of its own: the job has no such time otherwise
_PROFILES = rf"\$?(?:{work_kinds.PATTERN_OF_KIND[_PROFILER]})"
_CLEANS_UP = ("freeing", "iterator", "datasets")  # kinds of host work at the end of an evaluation, and at its begin
_NO_NAME = ("input", "python", "silent", "unknown")  # kinds of host work that may be any
_SETS_UP = (*_CLEANS_UP, "compilation", "op", "line", "python", "silent", "unknown")


T = TypeVar("T")


class _Stretch(Struct, frozen=True):
    """Part ``id`` from ``start_ns`` to ``end_ns``; ``idle`` is the time in it in which no GPU of the rank works."""

    id: str
    start_ns: int
    end_ns: int
    idle: Spans


class _Named(Struct, frozen=True):
    stretch: _Stretch
    kind: str
    what: str
    work: dict[str, tuple[int, int]]  # by name: nanoseconds, events
    silent_ns: int | None


class _Rank(Struct, frozen=True):
    """A process of the job. ``busy``: a GPU of it works; ``computes``: that, or XLA computes on its CPU.
    ``loop_lines`` are the threads of its training loop."""

    number: int
    host: str
    window: Spans
    busy: Spans
    computes: Spans
    lines: npt.NDArray[np.bool_]
    loop_lines: npt.NDArray[np.bool_]
    waits: Spans
    python: Sequence[Lines]
    reads_per_step: float = 0.0  # of variables, from Python: a model that runs op by op makes many


class RankDivision(Struct, frozen=True):
    """The recording of one rank: its ``parts`` with the time of each, and those of its ``overview`` with what lies
    between the two. ``waits`` are those of its loops for a batch."""

    number: int
    host: str
    waits: Spans
    parts: tuple[tuple[WallPart, Spans], ...]
    overview: tuple[WallPart, ...] = ()
    sampled: bool = False  # its lines of Python are those of samples,
    error_s: float = 0.0  # off by so much

    def rank_time(self) -> RankWallTime:
        parts = _ordered(part for part, _ in self.parts)
        parts = summed((*parts, *self.overview)) if self.overview else parts
        total_s = math.fsum(part.time_s for part in parts)
        missing_s = math.fsum(part.time_s for part in parts if part.id == "unrecorded")
        return RankWallTime(self.number, self.host, total_s, total_s - missing_s, parts)


class Division(Struct, frozen=True):
    """The recording of all ``ranks``, and the steps of trace and overview, where two are in a row and train."""

    ranks: tuple[RankDivision, ...]
    known_by: str
    in_trace: StepSeries | None
    in_overview: StepSeries | None


def divide(trace: Trace, gpu_timelines: Sequence[GpuTimeline], steps: Steps | None,
           python: Sequence[PythonStacks] = (), start: Spans = EMPTY) -> Division | None:
    """Divide the recorded time; None where the trace has no time. ``python``: the stacks of its processes, ``start``:
    when they did what a job does once, at its start. A rank's overview is divided like its trace, and what lies between
    the two was not recorded."""
    in_overviews = {number: find_overview_steps(trace, overview, steps) for number, overview in trace.overviews.items()}
    if steps is None:
        steps = next((Steps((), in_rank.times) for in_rank in in_overviews.values() if in_rank is not None), None)
    ranks = [rank for rank in _ranks(trace, gpu_timelines, steps, python) if rank.window.total]
    if not ranks:
        return None
    divided = []
    longest: tuple[Trace, Steps] | None = None
    for index, rank in enumerate(ranks):
        stacks = _of_process(python, index, len(ranks))
        overview, in_overview = trace.overviews.get(rank.number), in_overviews.get(rank.number)
        seldom: tuple[WallPart, ...] = ()
        if overview is not None and in_overview is not None:
            if longest is None or in_overview.count > longest[1].count:
                longest = overview, in_overview
            seldom = _of_overview(rank.window, overview, in_overview, stacks,
                                  steps.spans if steps is not None else EMPTY)
        divided.append(RankDivision(
            rank.number, rank.host, rank.waits, _parts(trace, steps, rank, start), seldom,
            any(not one.exact for one in stacks), max((one.error_ns for one in stacks), default=0) / 1e9))
    return Division(tuple(divided), "profiler" if trace.rank_windows_ns else "events", _series(trace, steps),
                    _series(*longest) if longest is not None else None)


def wall_time(division: Division | None, account: Account | None = None) -> WallTime | None:
    """The division as documents have it, with the account: the mean of the ranks, and these where there are several."""
    if division is None:
        return None
    ranks = [rank.rank_time() for rank in division.ranks]
    total_s, recorded_s = (sum(times) / len(ranks) for times in zip(
        *((rank.total_s, rank.recorded_s) for rank in ranks), strict=True))
    series = [one for one in (division.in_trace, division.in_overview) if one is not None]
    count = sum(len(one.durations_s) for one in series)
    return WallTime(
        total_s, recorded_s, ranks[0].parts if len(ranks) == 1 else _mean(ranks), division.known_by,
        math.fsum(s for one in series for s in (*one.durations_s, *one.pauses_s)) / count if count else None,
        division.in_trace.pauses_s if division.in_trace is not None else (), tuple(ranks) if len(ranks) > 1 else (),
        division.in_overview, account=account)


def _of_overview(window: Spans, overview: Trace, steps: Steps, python: Sequence[PythonStacks],
                 in_detail: Spans) -> tuple[WallPart, ...]:
    """Parts of a rank's overview, and what lies between it and the detail's ``window``. The stacks of the steps
    ``in_detail`` tell what a step runs."""
    (rank,) = _ranks(overview, (), steps, python, in_detail)[:1]
    if not rank.window.total:
        return ()
    begin, end = (int(edge[0]) for edge in (window.start, window.end))
    own_begin, own_end = (int(edge[0]) for edge in (rank.window.start, rank.window.end))
    between_ns = max(own_begin - end, begin - own_end, 0)
    between = (WallPart("unrecorded", between_ns / 1e9, 1, longest_s=between_ns / 1e9, at_s=min(end, own_end) / 1e9),)
    return (*(part for part, _ in _parts(overview, steps, rank, EMPTY)), *(between if between_ns else ()))


def _of_process(python: Sequence[T], index: int, ranks: int) -> Sequence[T]:
    """The Python of one rank's process. Of several ranks it is known where each has some."""
    if ranks == 1:
        return python
    return python[index:index + 1] if len(python) == ranks else ()


def _series(trace: Trace, steps: Steps | None) -> StepSeries | None:
    """The steps of one recording, where two are in a row and train."""
    if steps is None or steps.count < 2 or steps.times.phase in _PHASES:
        return None
    starts, ends = steps.edges_ns.T
    pauses_ns = starts[1:] - ends[:-1] - coverage(_spans(trace.unrecorded_ns), ends[:-1], starts[1:])
    return StepSeries(steps.times.durations_s, tuple((pauses_ns / 1e9).tolist()))


def _spans(pairs: Iterable[tuple[int, int]]) -> Spans:
    listed = list(pairs)
    return union([a for a, _ in listed], [b for _, b in listed])


# -- the ranks ------------------------------------------------------------------------------------------

def _ranks(trace: Trace, gpu_timelines: Sequence[GpuTimeline], steps: Steps | None,
           python: Sequence[PythonStacks], more_steps: Spans = EMPTY) -> list[_Rank]:
    of_line = np.array([line.rank for line in trace.lines], np.int64)
    of_gpu = {timeline.gpu: trace.gpus[timeline.gpu].rank for timeline in gpu_timelines}
    numbers = sorted({int(of_line[line]) for line in np.unique(trace.host.line).tolist()} | set(of_gpu.values()))
    if gpu_timelines:  # a process without a GPU of its own (a launcher) is no rank
        numbers = [number for number in numbers if number in of_gpu.values()] or numbers
    calls = step_calls(trace, steps) if steps is not None else np.empty(0, np.int64)
    # Of several threads of an unknown program that launch nothing none is known to be the loop's.
    loop_is_known = bool(gpu_timelines) or detect_framework(trace) != "unknown" or len(np.unique(trace.host.line)) == 1
    on_cpu = host_rows(trace, _XLA_PROGRAM, lines_of(trace, EXECUTOR))  # JAX's calls return before
    out = []
    for number in numbers:
        lines = of_line == number
        hosts = {trace.lines[line].host for line in np.flatnonzero(lines).tolist()}
        busy = any_busy(trace, (timeline for timeline in gpu_timelines if of_gpu[timeline.gpu] == number))
        waits = merge(EMPTY, *(loop.waits for loop in training_loops(trace) if loop.host in hosts and (
            loop.line < 0 or lines[loop.line])))
        out.append(_Rank(
            number, next(iter(sorted(hosts)), ""), _window(trace, number, lines, busy), busy,
            merge(busy, spans_of(trace, on_cpu[lines[trace.host.line[on_cpu]]])), lines,
            loop_lines(trace, lines, calls) & loop_is_known, waits, (), _reads_per_step(trace, lines, steps)))
    within = steps.spans if steps is not None else _spans((trace.window_ns,))
    gaps = [complement(subtract(within, _long_pauses(steps, rank)[0]), *trace.window_ns) if steps is not None else EMPTY
            for rank in out]
    processes = process_lines(python, merge(within, more_steps), gaps) if gaps else []
    return [structs.replace(rank, python=_of_process(processes, index, len(out))) for index, rank in enumerate(out)]


def _reads_per_step(trace: Trace, lines: npt.NDArray[np.bool_], steps: Steps | None) -> float:
    """Number of variables that Python's threads among these read in a usual step."""
    if steps is None or not steps.count:
        return 0.0
    rows = host_rows(trace, _READS)
    start = np.sort(trace.host.start_ns[rows[(lines & lines_of(trace, MAIN))[trace.host.line[rows]]]])
    return float(np.median(np.diff(np.searchsorted(start, steps.edges_ns), axis=1)))


def _window(trace: Trace, number: int, lines: npt.NDArray[np.bool_], busy: Spans) -> Spans:
    """Window from the begin of the rank's recording to its end. Work of a GPU may go on after the profiler's own end,
    which is when it has stopped: a little later than it records."""
    host = trace.host
    rows = rows_of(lines.take(host.line)) if len(host) else np.empty(0, np.int64)
    start, end = host.start_ns[rows], host.end_ns[rows]
    edges = [*((int(start[0]), int(end.max())) if len(start) else ()),
             *((int(busy.start[0]), int(busy.end[-1])) if len(busy.start) else ()),
             *trace.rank_windows_ns.get(number, ())[:1]]
    if not edges:
        return EMPTY
    last, stopped = max(edges), trace.rank_windows_ns.get(number, (0, 0))[1]
    return _spans([(min(edges), stopped if stopped > last + _STOPS_NS else last)])


# -- the division ---------------------------------------------------------------------------------------

def _parts(trace: Trace, steps: Steps | None, rank: _Rank, start: Spans) -> tuple[tuple[WallPart, Spans], ...]:
    unrecorded = intersect(rank.window, _unrecorded(trace, rank))
    left = subtract(rank.window, unrecorded)
    samples = sample_spans(trace)
    pauses_by_stacks, rest = _shown_by_stacks(unrecorded, samples, rank, steps)
    divided: dict[str, Spans] = {"unrecorded": subtract(unrecorded, merge(pauses_by_stacks, rest))}

    def take(id_: str, spans: Spans) -> None:
        nonlocal left
        divided[id_] = merge(divided.get(id_, EMPTY), intersect(left, spans))
        left = subtract(left, spans)

    first, last = int(rank.window.start[0]), int(rank.window.end[-1])
    pauses = EMPTY
    if steps is not None:
        pauses = EMPTY if steps.times.start_up else _unlike_usual(trace, steps, rank, *_long_pauses(steps, rank))
        take("start" if steps.times.start_up else _id_of_steps(steps), subtract(steps.spans, pauses))
        take("start", _spans(steps.warm_up_ns))
        for phase, spans in _whole_loops(steps).items():
            take(phase if phase in (*_PHASES, *SERVES) else "iterations", spans)
        recorded = merge(pauses, *(spans for id_, spans in divided.items() if id_ != "unrecorded"))
        # Without a step of its own, where the other recording has some, all of it is an edge.
        first, last = (int(recorded.start[0]), int(recorded.end[-1])) if len(recorded.start) else (last, last)
    take("start", intersect(start, _spans([(int(rank.window.start[0]), first)]) if steps is not None else rank.window))
    take(_PROFILER, _of_profiler(trace, steps, rank, last))
    if len(rank.busy.end):
        take("end", tear_down(trace, rank.lines, int(rank.busy.end[-1])))
    pauses_by_stacks = subtract(pauses_by_stacks, merge(EMPTY, *divided.values()))
    left = subtract(left, pauses_by_stacks)
    for phase, function in ((EVALUATION, work_kinds.EVALUATES), (PREDICTION, work_kinds.PREDICTS)):
        loops = _spans(edges for edges in _cut(pauses_by_stacks, ()) if rank.python[0].runs(function, _spans([edges])))
        divided[phase] = merge(divided.get(phase, EMPTY), loops)
        pauses_by_stacks = subtract(pauses_by_stacks, loops)
    stretches = _stretches(left, rank, steps, (first, last), unrecorded, samples)
    setups = _loop_setups(trace, stretches, divided, steps, rank)
    if len(setups.start):
        take(EVALUATION, setups)
        stretches = [stretch for stretch in stretches if stretch.start_ns not in setups.start]
    idle = merge(EMPTY, *(stretch.idle for stretch in stretches))
    edges = _spans((s.start_ns, s.end_ns) for s in stretches if s.id == "edges")
    of_gpu = subtract(subtract(left, idle), edges)
    out = [(_loop_part(id_, spans, steps), spans) for id_, spans in divided.items() if spans.total]
    if steps is not None and (in_steps := intersect(unrecorded, rest)).total:
        out.append((WallPart(_id_of_steps(steps), in_steps.total / 1e9,
                             round(in_steps.total / 1e9 / steps.times.mean_s), SAMPLED), in_steps))
    stretches += [_Stretch("between", *edges, _spans([edges])) for edges in _cut(pauses_by_stacks, ())]
    stretches.sort(key=lambda stretch: stretch.start_ns)
    out += [(WallPart("gpu_work", of_gpu.total / 1e9, len(of_gpu.start)), of_gpu)] if of_gpu.total else []
    out += [(WallPart("edges", edges.total / 1e9, sum(s.id == "edges" for s in stretches)), edges)] * bool(edges.total)
    return (*out, *_named_parts(_named(trace, rank, [s for s in stretches if s.id != "edges" and s.idle.total]), steps))


def _shown_by_stacks(unrecorded: Spans, samples: Spans, rank: _Rank, steps: Steps | None) -> tuple[Spans, Spans]:
    """Pauses between steps while an overview is sampled, as Python's stacks show them, and the rest of that time, in
    which the stacks are those of steps."""
    if steps is None or not len(samples.start) or not rank.python:
        return EMPTY, EMPTY
    return rank.python[0].pauses(_spans([(int(unrecorded.start[0]), int(samples.end[-1]))]),
                                 OPEN_STEPS * steps.times.median_s * 1e9)


def _long_pauses(steps: Steps, rank: _Rank) -> tuple[Spans, Spans]:
    """Pauses that follow the calls of some steps, if they take longer than a usual step and in most of it nothing
    computes and the loop does not wait for a batch: the ends of epochs. And those that follow the other calls. A step's
    own work may end after its call."""
    if not steps.call_ends_ns or steps.count < _KNOWN_STEPS:
        return EMPTY, EMPTY
    end = steps.edges_ns[:, 1]
    begin = np.minimum(np.array(steps.call_ends_ns, np.int64), end)
    usual_ns = steps.times.median_s * 1e9
    if len(rank.computes.start):
        lull_ns = round(_LULL * usual_ns)
        computing = joined(rank.computes, max(lull_ns, 1))
        next_ = np.minimum(np.searchsorted(computing.end, begin, side="right"), len(computing.end) - 1)
        begin = np.where(computing.start[next_] <= begin + lull_ns, np.clip(computing.end[next_], begin, end), begin)
    taken = coverage(merge(rank.computes, rank.waits), begin, end)
    pauses = (end - begin).astype(np.float64)
    # A call may be the lesser part of its step, and what follows it takes longer at times.
    usual_ns = max(usual_ns + float(np.median(pauses)), usual_limit(pauses))
    long = (end - begin > usual_ns) & (taken < _MAIN_SHARE * (end - begin))
    return Spans(begin[long], end[long]), Spans(begin[~long], end[~long])


def _unlike_usual(trace: Trace, steps: Steps, rank: _Rank, long: Spans, usual: Spans) -> Spans:
    """The long pauses but those with the work of the usual ones, which took longer this time, and those that end what a
    prediction in each step began: they belong to their steps."""
    if not len(long.start):
        return long
    start, end = np.concatenate((long.start, usual.start)), np.concatenate((long.end, usual.end))
    order = np.argsort(start, kind="stable")
    stretches = [_Stretch("between", *edges, subtract(_spans([edges]), rank.busy)) for edges in zip(
        start[order].tolist(), end[order].tolist(), strict=True)]
    group = np.minimum(order, len(long.start))
    work, silent = _work(trace, rank, stretches, group)
    idle = subtract(long, rank.busy), subtract(usual, rank.busy)
    single = [_spans([edges]) for edges in zip(*map(np.ndarray.tolist, long), strict=True)]
    names = [_name(trace, rank, intersect(idle[number == len(long.start)], span), work.get(number, {}),
                   silent.get(number), "between")
             for number, span in enumerate((*single, usual))]
    usual_name = same_work(*names.pop())
    unlike = np.array([(same_work(*name) != usual_name or name[0] in _NO_NAME)
                       and not (steps.inside and name[0] in _CLEANS_UP) for name in names], bool)
    return Spans(long.start[unlike], long.end[unlike])


def _id_of_steps(steps: Steps) -> str:
    """Periods may be layers of the model and are not called steps."""
    if steps.times.phase in _PHASES:
        return steps.times.phase
    return "periods" if steps.times.unit == "period" else "steps"


def _whole_loops(steps: Steps) -> dict[str, Spans]:
    """Loops between two steps, by phase, each from its first call to its last one."""
    edges = steps.edges_ns[:, 0]
    out = {}
    for phase, calls in steps.other_loops.items():
        between = np.searchsorted(edges, calls.start)
        first = np.flatnonzero(np.diff(between, prepend=-1))
        last = np.append(first[1:], len(between)) - 1
        out[phase] = union(calls.start[first], calls.end[last])
    return out


def _loop_setups(trace: Trace, stretches: Sequence[_Stretch], divided: Mapping[str, Spans], steps: Steps | None,
                 rank: _Rank) -> Spans:
    """Stretches of Keras that lead to an evaluation's first call, and those that follow its last one and free what it
    has used. What else comes after it are callbacks at the end of an epoch, checkpoints among them."""
    loops = divided.get(EVALUATION, EMPTY)
    if steps is None or _KERAS not in steps.times.anchor or not len(loops.start):
        return EMPTY
    around_loops = [s for s in stretches if s.idle.total and (s.end_ns in loops.start or s.start_ns in loops.end)]
    named = [(one.stretch, one.kind, _first_line(rank, one.stretch.idle)) for one in _named(trace, rank, around_loops)]
    # Python in a library's wrapper around a call is no code of the user's, and no callback of the library.
    return _spans((stretch.start_ns, stretch.end_ns) for stretch, kind, first in named
                  if not _line(first, user=True) and (
                      kind in (_SETS_UP if stretch.end_ns in loops.start else _CLEANS_UP) or (
                          kind == "python" and first is not None and PurePosixPath(first.file).name in PASS_ON)))


def _of_profiler(trace: Trace, steps: Steps | None, rank: _Rank, last_ns: int) -> Spans:
    """Spans in which the profiler starts or stops. TensorBoard's callback, which stops its own after the last step,
    writes the graph that it has traced; the last that its thread shows is that it flushes the file."""
    spans = spans_of(trace, host_rows(trace, _PROFILES, rank.lines, ("profiler", "_trace")))
    flushes = host_rows(trace, _FLUSHES, rank.loop_lines)
    if steps is None or not len(flushes):
        return spans
    starts = trace.host.start_ns
    if starts[rank.loop_lines.take(trace.host.line)].max() > starts[flushes].max():
        return spans
    begin, end = max(last_ns, steps.last_call_ns or 0), int(rank.window.end[-1])
    return merge(spans, _spans([(min(begin, end), end)]))


def _unrecorded(trace: Trace, rank: _Rank) -> Spans:
    spans = _spans(trace.unrecorded_ns)
    if any(note.id == _CLIPPED for note in trace.quality):
        spans = merge(spans, _spans([(trace.window_ns[1], int(rank.window.end[-1]))]))
    return spans


def _stretches(left: Spans, rank: _Rank, steps: Steps | None, recorded_ns: tuple[int, int],
               unrecorded: Spans, samples: Spans) -> list[_Stretch]:
    """Stretches of what is left, each up to the next step or loop. What begins or ends with a pause of the recorder is
    at an edge, too; no sample is long enough for a step that did not end."""
    if steps is None:
        return [_Stretch(_NO_STEPS, int(left.start[0]), int(left.end[-1]), subtract(left, rank.busy))] if len(
            left.start) else []
    usual_ns = steps.times.median_s * 1e9
    idle = subtract(left, rank.busy)
    out = []
    # The last call belongs to no whole step, and has ended.
    last = steps.last_call_ns if steps.last_call_ns is not None else recorded_ns[1]
    cuts = (*recorded_ns, last) if last - recorded_ns[1] <= OPEN_STEPS * usual_ns else recorded_ns
    for start, end in _cut(left, cuts):
        at_edge = (end <= recorded_ns[0] or start >= recorded_ns[1] or start in unrecorded.end
                   or end in unrecorded.start)
        longer = "open" if steps.times.unit == "step" else "no_steps"
        in_sample = len(samples.start) and coverage(samples, [start], [end]).any()
        id_ = "between" if not at_edge else longer if end - start > OPEN_STEPS * usual_ns and not in_sample else "edges"
        out.append(_Stretch(id_, start, end, intersect(idle, _spans([(start, end)]))))
    return out


def _cut(spans: Spans, cuts: Iterable[int]) -> Iterator[tuple[int, int]]:
    for start, end in zip(spans.start.tolist(), spans.end.tolist(), strict=True):
        yield from pairwise([start, *sorted({cut for cut in cuts if start < cut < end}), end])


def _loop_part(id_: str, spans: Spans, steps: Steps | None) -> WallPart:
    """A part that is named by its id; of steps how many there are."""
    each = spans
    if steps is not None and id_ == _id_of_steps(steps) and steps.count:
        each = Spans(*steps.edges_ns.T)
    length = each.end - each.start
    longest = int(length.argmax())
    return WallPart(id_, spans.total / 1e9, len(each.start), longest_s=int(length[longest]) / 1e9,
                    at_s=int(each.start[longest]) / 1e9,
                    every_steps=None if id_ in (*_OF_STEPS, "unrecorded", "start") else _every(spans.start, steps))


def _every(starts: I64, steps: Steps | None) -> int | None:
    """Number of training steps from one to the next, where it is the same at least twice; some accidents in between do
    not count."""
    if steps is None:
        return None
    return period_of(np.searchsorted(steps.edges_ns[:, 0], np.sort(starts)), steps.count)[0]


# -- what the host did -----------------------------------------------------------------------------------

def _named(trace: Trace, rank: _Rank, stretches: Sequence[_Stretch]) -> list[_Named]:
    """The stretches by name, the long ones each by itself."""
    if not stretches:
        return []
    least = _WORTH_ITS_NAME * rank.window.total
    order = sorted(range(len(stretches)), key=lambda i: -stretches[i].idle.total)
    alone = {i for i in order[:_ONE_BY_ONE] if stretches[i].idle.total >= least or stretches[i].id == "open"}
    group = np.array([i if i in alone else len(stretches) for i in range(len(stretches))])
    work, silent = _work(_without_whole(trace, rank.window), rank, stretches, group)
    out = []
    for number in sorted(alone):
        one, did, quiet = stretches[number], work.get(number, {}), silent.get(number)
        out.append(_Named(one, *_name(trace, rank, one.idle, did, quiet, one.id), did, quiet))
    rest = [stretch for i, stretch in enumerate(stretches) if i not in alone]
    if rest:
        together = merge(EMPTY, *(stretch.idle for stretch in rest))
        work_times, quiet = work.get(len(stretches), {}), silent.get(len(stretches))
        kind, what = _name(trace, rank, together, work_times, quiet, rest[0].id)
        total = sum(stretch.idle.total for stretch in rest)
        for stretch in rest:  # the names of all of them, divided by their lengths
            part = stretch.idle.total / total
            shared = {name: (round(time * part), 0) for name, (time, _) in work_times.items()}
            out.append(_Named(stretch, kind, what, shared, None if quiet is None else round(quiet * part)))
    return out


def _without_whole(trace: Trace, window: Spans) -> Trace:
    """The trace without ranges of NVTX that last for the whole recording: they name the program and not its work."""
    whole = trace.host.end_ns - trace.host.start_ns >= _WHOLE * window.total
    if trace.format != "nsys" or not whole.any():
        return trace
    return structs.replace(trace, host=host_taken(trace.host, ~whole))


def _work(trace: Trace, rank: _Rank, stretches: Sequence[_Stretch], group: I64,
          ) -> tuple[dict[int, dict[str, tuple[int, int]]], dict[int, int]]:
    """Own time, by group of stretches, of each name on the loop's threads and the executors', and the time in which the
    loop's threads show no event."""
    idle = Spans(np.concatenate([s.idle.start for s in stretches]), np.concatenate([s.idle.end for s in stretches]))
    has_loop = bool(rank.loop_lines.any())
    others = rank.lines & lines_of(trace, EXECUTOR, *(() if has_loop else (MAIN,)))
    work, silent_ns = grouped_work(trace, idle, rank.loop_lines | others, rank.loop_lines,
                                   np.array([stretch.end_ns for stretch in stretches]), group)
    return work, {number: round(silent_ns[number]) for number in group.tolist()} if has_loop else {}


def _name(trace: Trace, rank: _Rank, idle: Spans, work: Mapping[str, tuple[int, int]], silent_ns: int | None,
          id_: str) -> tuple[str, str]:
    """The kind of host work that fills half of this time, and its name."""
    total = idle.total
    if coverage(rank.waits, idle.start, idle.end).sum() >= _MAIN_SHARE * total or (
            rank.python and rank.python[0].runs(work_kinds.WAITS, idle)):
        return "input", ""
    first = _first_line(rank, idle)
    line, user = _line(first), _line(first, user=True)
    names = sorted(work, key=lambda name: -work[name][0])
    for kind, pattern in work_kinds.WORK_KINDS:
        alike = [name for name in names if re.match(pattern, name)]
        if alike and sum(work[name][0] for name in alike) >= _MAIN_SHARE * total:
            return kind, _called(trace, rank, idle) or line or alike[0] if kind == "compilation" else line or alike[0]
    silent = silent_ns is not None and silent_ns >= _MAIN_SHARE * total
    stretches = max(len(idle.start), 1)
    many = work_kinds.MANY_VARIABLES * stretches
    reads = work.get(work_kinds.READ_VARIABLE, (0, 0))[1]
    ops = sum(count for name, (_, count) in work.items() if _OP.fullmatch(name))
    # Python writes what it has read, unless ops compute with it: those that are run one by one read for each.
    if silent and reads >= many + rank.reads_per_step * stretches and 2 * reads >= ops:
        return "checkpoint", line or work_kinds.READ_VARIABLE
    if not silent and sum(count for name, (_, count) in work.items() if re.match(_SUMMARY, name)) >= many:
        return "summary", line or names[0]  # ops make histograms and images of what they write
    if first is not None and first.saves:
        return "checkpoint", first.line
    if first is not None and work_kinds.COMPILES.search(f"{first.file} {first.line}"):
        return "compilation", _called(trace, rank, idle) or first.line
    if first is not None and silent and work_kinds.FREES_ITERATOR.search(f"{first.file} {first.line}"):
        return "freeing", first.line
    if silent and rank.python and (loop := rank.python[0].alone(work_kinds.NEXT_BATCH, idle)):
        return "freeing", loop
    if names and re.match(PYTHON_OP, names[0]):  # on any thread, which runs the user's Python
        user = _line(_first_line(rank, idle, PLACEMENT_GAP), user=True) or user
    if user or line:
        return "line", user or line
    if names and work[names[0]][0] >= _MAIN_SHARE * total:
        return "op", names[0]
    if id_ == "open" and _input_works(trace, rank, idle):
        return "input", ""
    if silent and coverage(page_reads(trace), idle.start, idle.end).sum() >= _MAIN_SHARE * total:
        return "managed", ""
    # Nsight records any program, and XLA's profiler those of other languages. Python may wait for other threads' ops.
    if silent and sum(time for time, _ in work.values()) < _MAIN_SHARE * total:
        python = detect_framework(trace) != "unknown" or any(
            line.gpu < 0 and _PYTHON.match(line.name) for line in trace.lines)
        return ("python" if python else "silent"), ""
    return ("op", names[0]) if names else ("unknown", "")


def _called(trace: Trace, rank: _Rank, idle: Spans) -> str:
    """The function of JAX's whose call fills this time; "" without one."""
    rows = host_rows(trace, r"PjitFunction\(", rank.loop_lines)
    covered = coverage(idle, trace.host.start_ns[rows], trace.host.end_ns[rows])
    longest = int(np.argmax(covered)) if len(rows) else -1
    return function_name(trace.names[trace.host.name[rows[longest]]]) if len(rows) and (
        covered[longest] >= _MAIN_SHARE * idle.total) else ""


def _line(first: StackLine | None, *, user: bool = False) -> str:
    """The line of Python that ran in most of this time, or the line of the ``user``'s own code; "" where none did, or
    nobody knows. Lines of libraries that only pass a call on name nothing."""
    if first is None:
        return ""
    library = is_library(first.file) if "/" in first.file else is_library_file(first.file)
    return "" if library and (user or PurePosixPath(first.file).name in PASS_ON) else first.line


def _first_line(rank: _Rank, idle: Spans, gap: str = "gap") -> StackLine | None:
    if not rank.python or not idle.total:
        return None
    firsts = (gap_lines(kind, [idle], idle.total / 1e9, rank.python).lines[:1] for kind in (gap, CALLS_GAP))
    return next((first for (first,) in filter(None, firsts) if first.share >= _MAIN_SHARE), None)


def _input_works(trace: Trace, rank: _Rank, idle: Spans) -> bool:
    """Return whether tf.data's threads work most of this time, while those that run ops show nothing: the loop then
    waits for a batch whose call has not ended."""
    host = trace.host

    def covered(lines: npt.NDArray[np.bool_]) -> float:
        rows = rows_of(lines.take(host.line))
        spans = joined(spans_of(trace, rows), 1)
        return float(coverage(spans, idle.start, idle.end).sum()) / idle.total

    loop = rank.loop_lines | (rank.lines & lines_of(trace, EXECUTOR))
    return covered(rank.lines & lines_of(trace, INPUT)) >= _AT_WORK and covered(loop) < 1 - _AT_WORK


def same_work(kind: str, what: str) -> tuple[str, str]:
    """Key that the parts of one kind of work have in common. A known kind of work is one, whichever of its lines took
    longest."""
    return kind, what if kind in ("line", "op") else ""


def _named_parts(named: Sequence[_Named], steps: Steps | None) -> list[tuple[WallPart, Spans]]:
    groups: dict[tuple[str, str, str], list[_Named]] = {}
    for one in named:
        id_ = _PROFILER if one.kind == _PROFILER else one.stretch.id
        groups.setdefault((id_, *same_work(one.kind, one.what)), []).append(one)
    out = []
    for (id_, kind, _), stretches in groups.items():
        longest = max(stretches, key=lambda one: one.stretch.idle.total)
        work: dict[str, tuple[int, int]] = {}
        for one in stretches:
            for name, (time, count) in one.work.items():
                before = work.get(name, (0, 0))
                work[name] = before[0] + time, before[1] + count
        most = sorted(work.items(), key=lambda item: (-item[1][0], item[0]))[:_NAMES]
        silent = [one.silent_ns for one in stretches if one.silent_ns is not None]
        count, longest_ns, start_ns = len(stretches), longest.stretch.idle.total, longest.stretch.start_ns
        if id_ == _NO_STEPS:
            gaps = longest.stretch.idle
            length = gaps.end - gaps.start
            longest_ns, start_ns = int(length.max()), int(gaps.start[length.argmax()])
            count = int((length >= _HALF * longest_ns).sum())
            if count * longest_ns < gaps.total:  # shorter ones take more than these
                count = 0
        out.append((WallPart(
            id_, sum(one.stretch.idle.total for one in stretches) / 1e9, count, kind, longest.what, longest_ns / 1e9,
            start_ns / 1e9,
            _every(np.array([one.stretch.start_ns for one in stretches]), steps) if id_ == "between" else None,
            tuple(HostWork(name, time / 1e9, count) for name, (time, count) in most),
            sum(silent) / 1e9 if silent else None), merge(EMPTY, *(one.stretch.idle for one in stretches))))
    return out


def _mean(ranks: Sequence[RankWallTime]) -> tuple[WallPart, ...]:
    """The parts of all ranks, each of the mean length."""
    parts = [structs.replace(part, time_s=part.time_s / len(ranks), count=0) for rank in ranks for part in rank.parts]
    most: dict[tuple[str, ...], int] = {}
    for part in (part for rank in ranks for part in rank.parts):
        most[_key(part)] = max(most.get(_key(part), 0), part.count)
    return tuple(structs.replace(part, count=most[_key(part)]) for part in summed(parts))


def _key(part: WallPart) -> tuple[str, ...]:
    return part.id, *same_work(part.kind, part.what)


def summed(parts: Iterable[WallPart]) -> tuple[WallPart, ...]:
    """Parts of one name as one, as they are of the longest of them."""
    groups: dict[tuple[str, ...], list[WallPart]] = {}
    for part in parts:
        groups.setdefault(_key(part), []).append(part)
    out = []
    for same in groups.values():
        longest = max(same, key=lambda part: part.longest_s)
        every = {part.every_steps for part in same if part.every_steps is not None}
        out.append(structs.replace(
            longest, time_s=sum(part.time_s for part in same), count=sum(part.count for part in same),
            every_steps=every.pop() if len(every) == 1 else None))
    return _ordered(out)


def _ordered(parts: Iterable[WallPart]) -> tuple[WallPart, ...]:
    return tuple(sorted(parts, key=lambda part: (part.id not in _OF_STEPS, -part.time_s)))

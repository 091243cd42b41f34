"""Calls in which a function is traced by Python or compiled by XLA, and functions to which that happens anew."""

from __future__ import annotations

import re

import numpy as np
from msgspec import Struct

from gputop.trace.intervals import EMPTY, Spans, coverage, in_order, joined, merge, union
from gputop.trace.lookups import COMPILE, Mask, by_line, host_rows, host_stat, name_mask, outermost_rows, spans_of
from gputop.trace.model import I64, Kind, Trace, once
from gputop.trace.nesting import begun_within, nest
from gputop.trace.threads import GRAPH_EXECUTOR

TRACING = r"tf\.function-graph_building$"
PJIT = r"PjitFunction\("  # JAX's call of a jitted function
# XLA's passes over the program of a function of JAX, once for each compilation on a CPU.
_MODULE = re.compile(r"HLO passes through layout assignment \(jit_(.+)\)$")
OVER = 2  # times the longest distance between two of what returns, without one: it does not. gputop's own figure
_FIRST_RUN = 2.0  # times a usual call. gputop's own figure
_NO_ROWS = np.empty(0, np.int64)
AGAIN = 2  # calls in which one function is built: once may be for another shape, as the last batch of an epoch


class Builds(Struct, frozen=True):
    """Calls that trace or compile their function, in order of time. A call of JAX or TensorFlow in which XLA compiles
    is one, and a call of a tf.function that says it traced. None lies in another call of its name and thread."""

    rows: I64  # of the host's events
    # When the last tracing or compilation in it ends; the call's end where neither is recorded, or where the rest takes
    # far longer than a usual call: TensorFlow optimizes the graph that it traced.
    built_ns: I64


class Rebuilt(Struct, frozen=True):
    """A function that is traced or compiled in ``AGAIN`` of its calls or more, up to the recording's end."""

    name: str
    built: int  # calls in which that happens, without the first call of a tf.function that was made in the window
    calls: int
    made: int  # calls that are the first of a new tf.function of this name; JAX does not tell, so 0
    time_ns: int  # from the begin of such calls to the end of tracing and compiling


@once
def builds(trace: Trace) -> Builds:
    """All calls of the recording that trace or compile."""
    host = trace.host
    rows, mode = host_stat(host, "tf_function_call")
    traces = name_mask(trace, "traced")[mode]
    calls = np.concatenate((rows, host_rows(trace, PJIT)))
    compiling = host_rows(trace, COMPILE)
    compiles = holds(trace, calls, host.start_ns[compiling])
    compiles[: len(rows)] |= traces
    outer = outermost_rows(trace, calls[compiles], by_name=True)
    inside, built = built_within(trace, outer, np.concatenate((host_rows(trace, TRACING), compiling)))
    built = np.where(inside, built, host.end_ns[outer])
    usual_at, usual = by_line(host.name[rows]), ~np.isin(rows, outer)
    for name, mine in by_line(host.name[outer]).items():
        others = rows[usual_at.get(name, _NO_ROWS)][usual[usual_at.get(name, _NO_ROWS)]]
        if len(others):
            rest_ns = host.end_ns[outer[mine]] - built[mine]
            far_ns = _FIRST_RUN * float(np.median(host.end_ns[others] - host.start_ns[others]))
            built[mine] += rest_ns * (rest_ns >= max(_LONG_NS, far_ns))
    return Builds(outer, built)


def built_within(trace: Trace, calls: I64, work: I64) -> tuple[Mask, I64]:
    """Mask of the calls in which some of the ``work`` begins, of events that trace or compile, and when the last of it
    ends there, with the call at most."""
    host = trace.host
    work = work[np.argsort(host.start_ns[work], kind="stable")]
    last = np.searchsorted(host.start_ns[work], host.end_ns[calls]) - 1
    inside = (last >= 0) & (np.append(host.start_ns[work], 0)[last] >= host.start_ns[calls])
    built = np.append(np.maximum.accumulate(host.end_ns[work]), 0)[last]
    return np.asarray(inside, bool), np.minimum(built, host.end_ns[calls])


def tracing_within(trace: Trace, calls: I64) -> tuple[I64, I64]:
    """Time and number of the tracings of which each call is the nearest call around; each instant counts once."""
    host, inner = trace.host, host_rows(trace, TRACING)
    rows = np.concatenate((calls, inner))
    nesting = nest(host.line[rows], host.start_ns[rows], host.end_ns[rows], host.name[rows], trace.names)
    is_call = np.arange(len(rows)) < len(calls)
    self_ns = nest(host.line[inner], host.start_ns[inner], host.end_ns[inner], host.name[inner], trace.names).own(
        host.end_ns[inner] - host.start_ns[inner])
    around = nesting.holder(~is_call)[len(calls):]
    counted = is_call[around]
    return (np.bincount(around[counted], weights=self_ns[counted], minlength=len(calls)).astype(np.int64),
            np.bincount(around[counted], minlength=len(calls)))


@once
def first_calls(trace: Trace) -> I64:
    """Rows of the calls of tf.functions that count one tracing, or no more than begin in the call itself: if such a
    call traces, it is the first one. TensorFlow traces a function that makes variables twice."""
    calls, count = host_stat(trace.host, "tracing_count")
    return calls[count <= np.maximum(tracing_within(trace, calls)[1], 1)]


@once
def rebuilt(trace: Trace) -> tuple[Rebuilt, ...]:
    """Functions that are built again and again, the one that takes most time first. A tf.function of the same name that
    is new counts as the same function: the program makes it anew. One such call is its first. A function that has not
    been built for long, by its calls or by time, is left out, as one that a job's start builds for several shapes."""
    all_builds, host, window_end = builds(trace), trace.host, trace.window_ns[1]
    rows, _ = host_stat(host, "tf_function_call")
    new = np.isin(all_builds.rows, first_calls(trace))
    calls = outermost_rows(trace, np.concatenate((rows, host_rows(trace, PJIT))), by_name=True)
    cut = _of_cut_calls(trace, calls)
    out = []
    own_at, calls_at = by_line(host.name[all_builds.rows]), by_line(host.name[calls])
    for one in {**own_at, **cut}:
        indices, unseen = own_at.get(one, _NO_ROWS), cut.get(one, (_NO_ROWS, _NO_ROWS))
        made = int(new[indices].sum())
        built = len(indices) + len(unseen[0]) - min(made, 1)
        if built < AGAIN:
            continue
        own_begin, own_end = host.start_ns[all_builds.rows[indices]], all_builds.built_ns[indices]
        begin = np.sort(np.concatenate((own_begin, unseen[0])))
        end = int(np.concatenate((own_end, unseen[1])).max())
        all_calls = np.sort(np.concatenate((host.start_ns[calls[calls_at.get(one, _NO_ROWS)]], unseen[0])))
        positions = np.searchsorted(all_calls, begin)  # far more calls may follow the last than ever lay between two
        if len(all_calls) - 1 - int(positions[-1]) <= OVER * int(np.diff(positions).max()) and (
                window_end - end <= OVER * (end - int(begin[0]))):
            time_ns = int((own_end - own_begin).sum() + (unseen[1] - unseen[0]).sum())
            out.append(Rebuilt(function_name(trace.names[one]), built, len(all_calls), made if made > 1 else 0,
                               time_ns))
    return tuple(sorted(out, key=lambda one: (-one.time_ns, one.name)))


def _of_cut_calls(trace: Trace, calls: I64) -> dict[int, tuple[I64, I64]]:
    """Begins and ends, by name of JAX' call (index into the trace's names), of XLA's work on its function outside of
    all recorded calls of it: those were open at an edge of the recording, and have no event."""
    host = trace.host
    rows = host_rows(trace, _MODULE.pattern)
    numbers = {name: i for i, name in enumerate(trace.names) if name.startswith("PjitFunction(")} if len(rows) else {}
    calls_at = by_line(host.name[calls]) if len(rows) else {}
    out = {}
    for name, indices in by_line(host.name[rows]).items():
        module = _MODULE.match(trace.names[name])
        number = numbers.get(f"PjitFunction({module[1]})") if module is not None else None
        if number is None:
            continue
        outside, around = rows[indices], calls[calls_at.get(number, _NO_ROWS)]
        order = np.argsort(host.start_ns[around], kind="stable")
        inside = np.searchsorted(host.start_ns[around[order]], host.start_ns[outside], side="right") - 1
        ends = np.maximum.accumulate(host.end_ns[around[order]])
        outside = outside[(inside < 0) | (host.start_ns[outside] >= np.append(ends, 0)[inside])]
        if len(outside):
            out[number] = host.start_ns[outside], host.end_ns[outside]
    return out


def function_name(name: str) -> str:
    """The function that an event's name is about: ``step`` of ``PjitFunction(step)``."""
    return re.sub(r"^PjitFunction\((.*)\)$", r"\1", name)


def holds(trace: Trace, rows: I64, times_ns: I64) -> Mask:
    """Mask of these events that contain one of these instants."""
    times = in_order(times_ns)
    start, end = trace.host.start_ns[rows], trace.host.end_ns[rows]
    return np.asarray(np.searchsorted(times, end) > np.searchsorted(times, start), bool)


# -- autotuning ---------------------------------------------------------------------------------------
#
# Trials of kernels: cuDNN, Triton and torch.compile run each candidate some times and keep the fastest.
#
# A convolution of PyTorch records CUDA events only for trials (``cudnn.benchmark``); TensorFlow and XLA check the
# buffers around each candidate ("redzone"). Triton empties the GPU's cache before each run, and records two events
# around it.

CUDNN, TRITON, COMPILER = "cuDNN", "Triton", "torch.compile"
CONVOLUTION = r"aten::(?:(?:cudnn|miopen)_convolution\w*|convolution_backward)$"
_EVENTS = r"(?:cuda|hip)EventRecord(?:WithFlags)?(?:_v\d+)?$"
_FINDS = r"(?:cudnn|miopen)Find\w*Algorithm\w*$"
_BY_COMPILER = (r"\w+_template_autotuning(?: \(dynamo_timed\))?$|CachingAutotuner\.(?:benchmark_all_configs|"
                r"coordinate_descent_tuning|combo_sequential_autotune)(?: \(dynamo_timed\))?$")
_BY_TRITON = (r"(?:.*/)?(?:triton/runtime/autotuner\.py\(\d+\): _bench|triton/testing\.py\(\d+\): do_bench|"
              r"triton_heuristics\.py\(\d+\): benchmark_all_configs)$")
_EMPTIES_CACHE = r".*FillFunctor<int>"
_TWO_EVENTS, _RUNS = 4, 10  # records in a convolution: two candidates; runs of one candidate (Triton: 100 ms of them)
_LONG_NS = 20_000_000  # a convolution's op of TensorFlow 1: far longer than a launch
_STARTS = 3  # steps that may all be a start: batches of training, the last of them, and of an evaluation
_APART_NS = 10_000_000  # kernels that are tried one after the other, with work of the host between
_OF_CANDIDATE, _CANDIDATE_NS = 16, 200_000_000  # kernels between two checks, and their time on a small GPU


@once
def trials(trace: Trace) -> dict[str, Spans]:
    """The time in which kernels are tried out, by who tries them."""
    device, checks = trace.device, name_mask(trace, r"(?i).*redzone", ("redzone",))
    checked = np.flatnonzero(checks.take(device.name)) if checks.any() else np.empty(0, np.int64)
    host, calls, events = trace.host, host_rows(trace, CONVOLUTION), host_rows(trace, _EVENTS)
    by_events = calls[begun_within(host, calls, host.line[events], host.start_ns[events]) >= _TWO_EVENTS]
    begin, end = device.start_ns[checked], device.end_ns[checked]
    first = np.flatnonzero((np.diff(checked) <= _OF_CANDIDATE) & (begin[1:] - end[:-1] <= _CANDIDATE_NS))  # of two
    tried = union(np.append(begin, begin[first]), np.append(end, end[first + 1]))
    return {CUDNN: merge(joined(tried, _APART_NS), _chosen(trace),
                         spans_of(trace, np.concatenate((host_rows(trace, _FINDS), by_events)))),
            TRITON: merge(spans_of(trace, host_rows(trace, _BY_TRITON)), _by_triton(trace)),
            COMPILER: spans_of(trace, host_rows(trace, _BY_COMPILER))}


def _by_triton(trace: Trace) -> Spans:
    """Runs of a kernel, of which each comes behind one that empties the cache, and with two events of its own."""
    device, recorded = trace.device, np.sort(trace.host.start_ns[host_rows(trace, _EVENTS)])
    empties = name_mask(trace, _EMPTIES_CACHE, ("fillfunctor",))
    spans, kernels = EMPTY, np.flatnonzero(device.kind <= Kind.COLLECTIVE)
    for places in by_line(device.gpu[kernels]).values() if empties.any() and len(recorded) else ():
        rows = kernels[places]
        empty = empties.take(device.name[rows])
        ends = np.flatnonzero(np.append(empty[1:] == empty[:-1], True)) + 1  # of stretches that alternate
        begins = np.concatenate(([0], ends[:-1]))
        begins += ~empty[begins]  # what ran before is none of them
        long = ends - begins >= 2 * _RUNS
        for begin, end in zip(begins[long].tolist(), ends[long].tolist(), strict=True):
            first, last = device.launch_ns[rows[[begin, end - 1]]].tolist()
            events = np.searchsorted(recorded, last) - np.searchsorted(recorded, first)
            if min(first, last) >= 0 and events >= end - begin - _TWO_EVENTS:
                spans = merge(spans, union([first], [device.end_ns[rows[begin:end]].max()]))
    return joined(spans, _APART_NS)


def _chosen(trace: Trace) -> Spans:
    """Convolutions' ops on the host of a timeline of TensorFlow 1 that take far longer than a launch: cuDNN tries out
    algorithms, whose kernels may not be recorded, or is loaded."""
    host = trace.host
    rows = host_rows(trace, r".*:\w*Conv[23]D\w*$", words=("conv",))
    rows = rows[[trace.lines[line].name.startswith(f"{GRAPH_EXECUTOR} GPU") for line in host.line[rows].tolist()]]
    return spans_of(trace, rows[host.end_ns[rows] - host.start_ns[rows] >= _LONG_NS])


def tried_again(trace: Trace, by: str, steps_ns: I64) -> I64:
    """Steps (of shape (steps, 2)) in which kernels are tried, where that comes back in the loop; else none: those with
    which a recording begins are the job's start."""
    tried = coverage(trials(trace)[by], steps_ns[:, 0], steps_ns[:, 1]) > 0
    start = int(tried.argmin()) if not tried.all() else 0 if len(tried) > _STARTS else len(tried)
    again = start + np.flatnonzero(tried[start:])
    return again if len(again) > 1 else again[:0]

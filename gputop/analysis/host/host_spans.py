"""Spans in which a host traces or compiles functions, runs them, runs ops eagerly, and runs ops that no GPU does."""

from __future__ import annotations

import re

import numpy as np
from msgspec import Struct

from gputop.analysis.host.functions import XLA_RUN
from gputop.analysis.host.host_ops import OP, PAUSE_NS, RUNS, of_input_pipeline, single_ops, small_ops
from gputop.analysis.host.interruptions import interrupted
from gputop.analysis.host.python_tracer import NAME as FUNCTION_NAME
from gputop.analysis.host.tf_data import PYTHON_OP
from gputop.analysis.steps.compilations import PJIT, TRACING, built_within, holds
from gputop.analysis.steps.jax_calls import outer_calls, own_ops
from gputop.analysis.steps.phases import session_runs
from gputop.analysis.steps.torch_compilations import compiling, script_builds, torch_builds
from gputop.trace.intervals import EMPTY, Spans, complement, in_order, joined, merge, subtract, union
from gputop.trace.lookups import COMPILE, Mask, detect_framework, host_rows, host_stat, name_mask, rows_of, spans_of
from gputop.trace.model import I64, Kind, Trace
from gputop.trace.nesting import begun_within
from gputop.trace.threads import MAIN, lines_of

# An op that takes longer than launching several kernels does (20-40 µs each) holds the GPU up by itself.
LONG_OP_NS = 100_000
# Ops one after the other from Python; a longer pause is something else that Python does.
EAGER_PAUSE_NS = 1_000_000
TRACED = 10  # times as long a pause, where a tracer slows each function of Python down. gputop's own figure

# Ops that wait for others or hold others: their time is not their own.
_NOT_ITS_OWN = (
    r".*:(?=\w+$)(?:\w*(?:(?:Partitioned|Remote)Call|While|If|Case|Arg|Retval)$|"
    r"\w*(?:Send|Recv|Iterator|Dequeue|Enqueue)|Optional|NoOp$|Collective|Nccl|_?Xla|Barrier)")
# XLA's own threads run what Python called, later than the call; and Python that waits for a result does nothing else.
_XLA_THREAD = re.compile(r"tf_XLA|py_xla_execute|tf_pjrt")
_WAITS = (r"(?:\$\S+ )?(?:try_to_block|block_until_ready|_?[Aa]wait\w*|result)$|[\w:]*(?:::Await|BlockHost\w*)$|"
          r"(?:cu|cuda|hip)\w*Synchronize(?:_v\d)?$|Wait for ")
_RUNS_OP = r"KernelAndDevice(?:Op|Func)::Run$"
# What a compiled function hands to Python in its midst, of JAX jax.pure_callback, io_callback, debug.print.
PYTHON_CALLBACK = rf"(?:\S*_callback|debug_print)\b|{PYTHON_OP}"
_XLA_CALLBACK = rf"(?:{PYTHON_CALLBACK}|custom-call)"
# PyTorch calls no function for a step: Python runs its ops one by one, and each ends in calls of the CUDA runtime.
_TORCH_OP = r"(?:aten|autograd|c10d|torch\w*)::"
_RUNTIME = r"(?:cu|cuda|hip)[A-Z]\w+$"
# Collectives of the CPU, on threads of their own, for which the backward pass waits without an op.
COLLECTIVE = r"(?:gloo|mpi|ucc):\w"
_TORCH_WORK = (rf"[\w.]+::\S|{_RUNTIME}|\w+Backward\d*$|Torch-Compiled |CompiledFunction|"
               r"Optimizer\.(?:step|zero_grad)#|nn\.Module: ")


class HostSpans(Struct, frozen=True):
    """One host. ``calls`` is when functions of whatever framework are called or run, or Python waits for them, in
    PyTorch when it runs ops without a long pause, or a collective of the CPU runs; none where no call is traced.
    ``placed_rows`` are the host events of long ops that start no kernel, ``placed`` is when they run, ``call_rows`` the
    events of calls (PyTorch: of ops); ``shows_ops``: whether ops on the host are traced at all.
    """

    tracing: Spans
    eager: Spans
    placed: Spans
    placed_rows: I64
    calls: Spans
    call_rows: I64
    shows_ops: bool
    short_ops: Spans | None = None  # of PyTorch without a GPU: when Python runs no op that takes long
    short_pauses: Spans = EMPTY  # of the same, within ``calls``: longer than the start of an op takes


def host_spans(trace: Trace, host: str, *, runs_eagerly: bool, rank: int | None = None) -> HostSpans:
    """``runs_eagerly``: the model itself does, so that Python from op to op counts as eager execution; of PyTorch on a
    CPU its small ops always do. ``rank``: only what this process on the host did."""
    here = np.array([line.host == host and line.gpu < 0 and rank in (None, line.rank) for line in trace.lines], bool)
    main = here & lines_of(trace, MAIN)
    not_input = here.take(trace.host.line) & ~of_input_pipeline(trace)
    ops = np.flatnonzero(name_mask(trace, OP).take(trace.host.name) & not_input)
    runs = host_rows(trace, XLA_RUN)
    runs = runs[not_input[runs]]
    traced, called = _calls(trace, main)
    of_jax, functions_of_jax = _calls_of_jax(trace, here)
    if len(functions_of_jax) and not runs_eagerly:  # such ops are what Python does between the steps
        called = called[~own_ops(trace)[trace.host.name[called]]]
    begun = _first_runs(trace, here, ops, runs, not_input) if len(traced) else traced
    xla = np.array([bool(_XLA_THREAD.match(line.name)) for line in trace.lines], bool)
    executing = np.flatnonzero((here & xla).take(trace.host.line))
    waiting = host_rows(trace, _WAITS, main, ("wait", "block", "result", "synchronize"))
    calls = merge(spans_of(trace, np.concatenate((called, runs, executing, waiting))),
                  _pending(trace, called, executing)) if len(called) else EMPTY
    short_ops, short_pauses = None, EMPTY
    torch = _TORCH_WORK if host_rows(trace, _TORCH_OP).size else (  # Nsight may show the runtime's calls and no op
        "" if trace.format == "nsys" and detect_framework(trace) == "pytorch" else None)
    if not len(called) and torch is not None:
        called = host_rows(trace, torch, main)
        ops = _innermost(trace, host_rows(trace, r"aten::", main))
        calls, short_ops, short_pauses = _torch_calls(trace, here, called, ops)
    elif host_rows(trace, PJIT).size:  # what else looks like an op is a part of the runtime
        ops = _innermost(trace, np.flatnonzero(name_mask(trace, _XLA_CALLBACK).take(trace.host.name) & not_input))
    placed_rows = _placed(trace, ops) if trace.gpus else _python_callbacks(trace, ops)
    tracing = merge(_tracing(trace, here, traced, begun), compiling(trace, main), *(
        union(builds.start_ns, builds.end_ns) for builds in (*torch_builds(trace, main), *script_builds(trace))))
    eager = EMPTY
    pause_ns = EAGER_PAUSE_NS * (TRACED if name_mask(trace, FUNCTION_NAME).any() else 1)
    if short_ops is not None:
        eager = small_ops(trace, main).spans
    elif runs_eagerly:
        rows = single_ops(trace, main)[0]
        if len(of_jax) and not len(rows):
            # The call of a small op is itself Python's part: the op takes less time than its call.
            others = np.concatenate((np.setdiff1d(called, host_rows(trace, PJIT)), functions_of_jax, waiting,
                                     _of_long(trace, executing)))
            eager = subtract(joined(spans_of(trace, of_jax), pause_ns), spans_of(trace, others))
        else:
            eager = subtract(joined(spans_of(trace, rows), pause_ns), calls)
            if not trace.gpus:  # on a CPU the ops are the model's own computing
                eager = subtract(eager, spans_of(trace, np.concatenate((ops, host_rows(trace, _RUNS_OP)))))
    return HostSpans(
        tracing=tracing, eager=eager, placed=spans_of(trace, placed_rows),
        placed_rows=placed_rows, calls=calls, call_rows=called, shows_ops=bool(len(ops)),
        short_ops=short_ops, short_pauses=short_pauses)


def _torch_calls(trace: Trace, here: Mask, called: I64, ops: I64) -> tuple[Spans, Spans | None, Spans]:
    """``calls``, ``short_ops`` and ``short_pauses`` of :class:`HostSpans` for PyTorch."""
    waited_for = host_rows(trace, COLLECTIVE, here)
    at_work = spans_of(trace, np.concatenate((called, waited_for)))
    calls = joined(at_work, EAGER_PAUSE_NS)
    if trace.gpus:
        return calls, None, EMPTY
    short_ops = complement(spans_of(trace, np.concatenate((_of_long(trace, ops), waited_for))), *trace.window_ns)
    if name_mask(trace, FUNCTION_NAME).any():  # a tracer of Python makes pauses of its own
        return calls, short_ops, EMPTY
    return calls, short_ops, subtract(calls, joined(at_work, PAUSE_NS))


def _of_long(trace: Trace, rows: I64) -> I64:
    """Rows of these events that last long for an op."""
    return rows[trace.host.end_ns[rows] - trace.host.start_ns[rows] >= LONG_OP_NS]


def _calls(trace: Trace, main: Mask) -> tuple[I64, I64]:
    """Rows of calls that trace or compile their function, and of all calls, on threads of Python."""
    host = trace.host
    tf_rows, mode = host_stat(host, "tf_function_call")
    keep = main[host.line[tf_rows]] & ~name_mask(trace, "eager$")[mode]  # tf.config.run_functions_eagerly
    tf_rows, mode = tf_rows[keep], mode[keep]
    traces = name_mask(trace, "traced")[mode]
    functions, is_func = host_stat(host, "is_func")
    functions = functions[is_func == 1]
    pjit = host_rows(trace, PJIT, main)
    compiling = host.start_ns[host_rows(trace, COMPILE)]
    compiles = np.concatenate((tf_rows[holds(trace, tf_rows, compiling) & ~traces],
                               pjit[holds(trace, pjit, compiling)]))
    called = np.concatenate((tf_rows, functions[main[host.line[functions]]], pjit, session_runs(trace)[0]))
    return np.concatenate((tf_rows[traces], compiles)), called


def _pending(trace: Trace, called: I64, executing: I64) -> Spans:
    """Time from the end of each of these calls until XLA's threads begin its program, where they began nothing during
    the call: Python may go on, and waits for the result sooner or later."""
    start, end = trace.host.start_ns[called], trace.host.end_ns[called]
    begun = trace.host.start_ns[executing[trace.host.end_ns[executing] > trace.host.start_ns[executing]]]
    first, following = (np.append(np.sort(times), np.iinfo(np.int64).max)[np.searchsorted(np.sort(times), after)]
                        for times, after in ((begun, start), (start, end)))
    waits = (first > end) & (first < following)
    return union(end[waits], first[waits])


def _first_runs(trace: Trace, here: Mask, ops: I64, runs: I64, not_input: Mask) -> I64:
    """Times at which something of a function runs on this host or is launched, in order."""
    host, device = trace.host, trace.device
    started = host_rows(trace, RUNS)
    started = started[not_input[started]]
    launches = device.launch_ns[rows_of((device.launch_line >= 0) & here.take(device.launch_line))]
    return in_order(np.concatenate((host.start_ns[ops], host.start_ns[started], host.start_ns[runs], launches)))


def _tracing(trace: Trace, here: Mask, calls: I64, begun: I64) -> Spans:
    """Spans from each call that traces until its function begins to run: after building, compiling or, where neither is
    traced, from the call's start on. To the end of building where nothing is seen to run."""
    start, end = trace.host.start_ns[calls], trace.host.end_ns[calls]
    inside, built = built_within(
        trace, calls, np.concatenate((host_rows(trace, TRACING, here), host_rows(trace, COMPILE, here))))
    after = np.where(inside, built, start)
    first = np.append(begun, np.iinfo(np.int64).max)[np.searchsorted(begun, after)]
    return union(start, np.where(first <= end, first, np.where(inside, after, end)))


def _calls_of_jax(trace: Trace, here: Mask) -> tuple[I64, I64]:
    """Rows of calls of JAX's own ops, and of the user's jitted functions."""
    rows = outer_calls(trace)
    rows = rows[here[trace.host.line[rows]]]
    is_op = own_ops(trace)[trace.host.name[rows]]
    return rows[is_op], rows[~is_op]


def _innermost(trace: Trace, rows: I64) -> I64:
    """Events among these, in order of time, that hold no other of them on their thread: what only calls other ops
    (views of many tensors) computes nothing itself."""
    host = trace.host
    rows = rows[np.argsort(host.line[rows], kind="stable")]
    line, start, end = host.line[rows], host.start_ns[rows], host.end_ns[rows]
    holds_next = (line[1:] == line[:-1]) & (start[1:] < end[:-1])
    return np.sort(rows[~np.append(holds_next, False)[:len(rows)]])


def _python_callbacks(trace: Trace, ops: I64) -> I64:
    """Long events among these in which a compiled function runs Python: without a GPU all other ops are its own
    computing, custom calls (LAPACK) among them."""
    long = _of_long(trace, ops)
    return long[name_mask(trace, PYTHON_CALLBACK)[trace.host.name[long]]]


def _placed(trace: Trace, ops: I64) -> I64:
    """The host events of ops that take long and start no kernel, neither by name nor on their thread; PyTorch's that
    call the CUDA runtime at all work for the GPU or wait for it. What a thread stopped in the middle of takes no time
    itself."""
    host, device = trace.host, trace.device
    long = np.setdiff1d(_of_long(trace, ops), interrupted(trace))
    kernels = device.kind <= Kind.COLLECTIVE
    on_gpu = np.zeros(len(trace.names) + 1, bool)
    on_gpu[device.tf_op[rows_of(kernels)]] = True
    on_gpu[-1] = False
    long = long[~on_gpu[host.name[long]] & ~name_mask(trace, _NOT_ITS_OWN)[host.name[long]]]
    if not len(long):
        return long
    launched, runtime = rows_of(kernels & (device.launch_line >= 0)), host_rows(trace, _RUNTIME)
    calls_gpu = begun_within(host, long, device.launch_line[launched], device.launch_ns[launched]) > 0
    torch = name_mask(trace, r"aten::")[host.name[long]]
    torch &= begun_within(host, long, host.line[runtime], host.start_ns[runtime]) > 0
    return long[~(calls_gpu | torch)]

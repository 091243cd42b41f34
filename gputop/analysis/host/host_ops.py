"""TensorFlow's ops on the host: which run there, which only start work on a GPU, and what runs eagerly, in JAX too."""

from __future__ import annotations

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from gputop.analysis.results import EagerOp, HostOps, OpType
from gputop.analysis.steps.jax_calls import outer_calls, own_ops
from gputop.analysis.steps.model import Steps
from gputop.core.findings import TraceNote
from gputop.text.units import counted
from gputop.trace.host_calls import within_calls
from gputop.trace.intervals import EMPTY, Spans, contains, coverage, merge, overlap, subtract, union
from gputop.trace.lookups import (
    LAUNCH_CALLS,
    Mask,
    computes_on_cpu,
    host_rows,
    host_stat,
    name_mask,
    outermost_rows,
    spans_of,
)
from gputop.trace.model import I64, Trace
from gputop.trace.nesting import begun_within, nest
from gputop.trace.threads import INPUT, MAIN, lines_of

TOP = 20
_PRODUCTS_ON_CPU = 0.1  # share of the executors' time. gputop's own figure
# scope/name:Type, as tensorflow/core/framework/op_def_builder.cc and node_def_util.cc allow names.
OP = r"[A-Za-z0-9.][\w.\\/>-]*:[A-Z_]\w*$"
FOR_A_BATCH = r"(?:\w*Iterator\w*|OptionalHasValue|OptionalGetValue)$"


def host_ops(trace: Trace, steps: Steps | None) -> HostOps | None:
    """Ops by type, most time first, and the eager ones; None where the trace has none. Those of tf.data are left out,
    whatever threads they run on. Host time is exclusive of ops inside on the thread."""
    host = trace.host
    is_op = name_mask(trace, OP)
    within = steps.spans if steps is not None else union([trace.window_ns[0]], [trace.window_ns[1] + 1])
    rows = np.flatnonzero(is_op.take(host.name) & ~of_input_pipeline(trace)) if len(host) else np.empty(0, np.int64)
    rows = rows[contains(within, host.start_ns[rows])]
    eager_rows, eager_op = _eager_calls(trace, within)
    device = trace.device
    on_gpu = np.flatnonzero(is_op.take(device.tf_op) & contains(within, device.start_ns))
    if not len(rows) and not len(eager_rows) and not len(on_gpu):
        return None
    types = _types(trace, rows, on_gpu)
    share, eager = _eager(trace, within, eager_rows, eager_op)
    return HostOps(
        basis="window" if steps is None else "steps",
        host_s=sum(t.host_s for t in types if t.placement == "host"), device_s=sum(t.device_s for t in types),
        types=tuple(types[:TOP]), eager_share=share,
        eager_ops_per_step=None if steps is None else len(eager_rows) / steps.count, eager=eager[:TOP])


def _types(trace: Trace, rows: I64, on_gpu: I64) -> list[OpType]:
    """Most time on the host or a GPU first: of the host's events ``rows`` and the device's ``on_gpu``. Ops of one type
    in both places are two entries."""
    host, device, names = trace.host, trace.device, len(trace.names)
    nesting = nest(host.line[rows], host.start_ns[rows], host.end_ns[rows], host.name[rows], trace.names)
    by_call = device.launch_ns >= 0
    launches = begun_within(host, rows, device.launch_line[by_call], device.launch_ns[by_call]) > 0
    count = np.bincount(host.name[rows], minlength=names)
    host_ns, device_ns = (np.bincount(name, time_ns, names).astype(np.int64) for name, time_ns in (
        (host.name[rows], nesting.own(host.end_ns[rows] - host.start_ns[rows])),
        (device.tf_op[on_gpu], device.end_ns[on_gpu] - device.start_ns[on_gpu])))
    placed = np.zeros(names, bool)
    placed[host.name[rows[launches]]] = True
    placed[device.tf_op[on_gpu]] = True
    # Whether there is any link from ops to GPUs at all; of a job without GPUs everything is on the host.
    linked = computes_on_cpu(trace) or bool(placed.any())
    groups: dict[tuple[str, str | None], list[int]] = {}
    for i in np.flatnonzero((count > 0) | (device_ns > 0)).tolist():
        placement = "gpu" if placed[i] else "host" if linked else None
        groups.setdefault((trace.names[i].rsplit(":", 1)[1], placement), []).append(i)
    out = []
    for (type_, placement), members in groups.items():
        longest = min(members, key=lambda i: (-max(host_ns[i], device_ns[i]), trace.names[i]))
        out.append(OpType(type_, placement, int(count[members].sum()), int(host_ns[members].sum()) / 1e9,
                          int(device_ns[members].sum()) / 1e9, trace.names[longest].rsplit(":", 1)[0]))
    return sorted(out, key=lambda op: (-max(op.host_s, op.device_s), op.type, op.placement or ""))


def single_ops(trace: Trace, lines: Mask) -> tuple[I64, I64]:
    """Rows and ops of EagerExecute that run a single op on these threads, calls for a batch left out."""
    host = trace.host
    flags, is_func = host_stat(host, "is_func")
    rows, op = host_stat(host, "eager_op")
    keep = ~np.isin(rows, flags[is_func == 1]) & ~name_mask(trace, FOR_A_BATCH)[op] & lines[host.line[rows]]
    return rows[keep], op[keep]


def _eager_calls(trace: Trace, within: Spans) -> tuple[I64, I64]:
    """The same on Python's threads, those that begin within this time. In JAX, calls of its own ops from Python, each a
    program of its own."""
    rows, op = single_ops(trace, lines_of(trace, MAIN))
    if not len(rows) and len(rows := outer_calls(trace)):
        rows = rows[own_ops(trace)[trace.host.name[rows]]]
        op = trace.host.name[rows].astype(np.int64)
    keep = contains(within, trace.host.start_ns[rows])
    return rows[keep], op[keep]


def eager_types(trace: Trace) -> set[str]:
    """The types of the ops that Python ran one by one."""
    _, op = single_ops(trace, lines_of(trace, MAIN))
    return {trace.names[i] for i in np.unique(op).tolist()}


def _eager(trace: Trace, within: Spans, rows: I64, op: I64) -> tuple[float | None, tuple[EagerOp, ...]]:
    """The eager share of the time that Python spends in ops and functions, and the ops by name."""
    host = trace.host
    flags, is_func = host_stat(host, "is_func")
    called = flags[is_func == 1]
    called = called[lines_of(trace, MAIN)[host.line[called]]]
    jitted = outer_calls(trace)
    called = np.concatenate((called, jitted[~own_ops(trace)[host.name[jitted]]])) if len(jitted) else called
    in_functions = spans_of(trace, called)
    functions = int(coverage(in_functions, within.start, within.end).sum())
    length = host.end_ns[rows] - host.start_ns[rows]
    alone = length - coverage(in_functions, host.start_ns[rows], host.end_ns[rows])
    eager = int(alone.sum())
    names, which = np.unique(op, return_inverse=True)
    ops = [EagerOp(trace.names[name], int(count), float(time) / 1e9) for name, count, time in zip(
        names.tolist(), np.bincount(which), np.bincount(which, weights=alone), strict=True)]
    share = eager / (eager + functions) if eager + functions else None
    return share, tuple(sorted(ops, key=lambda o: (-o.seconds, o.name)))


# -- executors ----------------------------------------------------------------------------------------
#
# Owner of the ops on the threads that all of TensorFlow shares: the model, or functions of tf.data.

# tf.data starts a stage's function under an id, and executors run it under the same one, on threads of tf.data's own
# or on those that the model uses as well (tensorflow/core/data/captured_function.cc).
STARTS_FUNCTION = r"InstantiatedCapturedFunction::Run"
RUNS = r"ExecutorState::Process$"


def input_executors(trace: Trace) -> I64:
    """Rows of the executors' runs for functions of tf.data, on any thread."""
    started, runs = host_rows(trace, STARTS_FUNCTION), host_rows(trace, RUNS)
    having, ids = host_stat(trace.host, "id")
    started_ids = ids[np.isin(having, started)]
    keep = np.isin(having, runs) & np.isin(ids, started_ids[started_ids != 0])
    return np.asarray(having[keep], np.int64)


def of_input_pipeline(trace: Trace) -> Mask:
    """Mask of the host events that belong to the input pipeline: all on tf.data's threads, and on others what begins
    while their executor runs a function of tf.data."""
    host = trace.host
    on_threads = lines_of(trace, INPUT).take(host.line) if len(host) else np.zeros(0, bool)
    return on_threads | within_calls(trace, input_executors(trace), host.line, host.start_ns)


def of_model_executors(trace: Trace) -> Spans:
    """Spans in which an executor, of TensorFlow or XLA, runs functions other than those of tf.data."""
    rows = host_rows(trace, rf"{RUNS}|ThunkExecutor::")
    return spans_of(trace, rows[~of_input_pipeline(trace)[rows]])


def without_idle_gpus(trace: Trace) -> Trace:
    """The trace without GPUs of which it has no event, where the model ran on the CPU. The executor shows products
    (MatMul, Conv2D) of a CPU alone, and no allocator but a GPU's is traced. A GPU's ops exchange data with the host
    (_Send), and what launches them may be traced."""
    notes = [note for note in trace.quality if note.id not in ("empty_device_plane", "no_device_events")]
    if len(notes) == len(trace.quality) or len(trace.device) or len(trace.allocator) or len(
            host_rows(trace, rf"{LAUNCH_CALLS}|.*:_(?:Host)?(?:Send|Recv)$")):
        return trace
    products, executors = host_rows(trace, r".*:\w*(?:MatMul|Conv[23]D)\w*$"), of_model_executors(trace)
    if overlap(spans_of(trace, products), executors) <= _PRODUCTS_ON_CPU * executors.total:
        return trace
    return replace(trace, gpus=[], found={}, quality=[TraceNote("no_gpu", (
        f"The model ran on the CPU, although the profiler lists {counted(len(trace.gpus), 'GPU')}. To use a GPU, check "
        "tf.config.list_physical_devices('GPU'). All time except input wait counts as host time.")), *notes])


# -- small ops ----------------------------------------------------------------------------------------
#
# Small ops of PyTorch that Python starts one by one on the CPU, and the pauses between them.
#
# An op of PyTorch takes 1 to 10 µs before it computes (dispatch, autograd, allocation), and Python some more until the
# next one. What takes no longer than ``SMALL_NS``, and ``NESTED_NS`` for each op within it, hardly computes. Ops that
# lie in another one count as that one's part, and what torch.compile has compiled is no op: its kernels have no events.

# An op that takes longer computes for most of its time; a longer pause is Python's own work. gputop's own figures.
SMALL_NS, NESTED_NS, PAUSE_NS = 20_000, 5_000, 100_000
_OP = r"(?!autograd::|c10d::|record_param_comms)[\w.]+::\S"
_COMPILED = r"Torch-Compiled Region|CompiledFunction"


class SmallOps(Struct, frozen=True):
    """``rows`` are the host events of the ops, ``spans`` when they run and pass on to the next one; ``of`` how many ops
    there are in all, small and large."""

    rows: I64
    spans: Spans
    of: int


def small_ops(trace: Trace, lines: Mask) -> SmallOps:
    host, rows_of_lines, spans, count = trace.host, [], EMPTY, 0
    ops = host_rows(trace, _OP, lines)
    for line in np.unique(host.line[ops]).tolist():
        every = ops[host.line[ops] == line]
        rows = outermost_rows(trace, every)
        start, end, count = host.start_ns[rows], host.end_ns[rows], count + len(rows)
        begun = np.searchsorted(np.sort(host.start_ns[every]), (start, end))
        small = end - start <= SMALL_NS + NESTED_NS * (begun[1] - begun[0] - 1)
        pause = start[1:] - end[:-1]
        passes_on = (pause <= PAUSE_NS) & (small[1:] | small[:-1])
        rows_of_lines.append(rows[small])
        spans = merge(spans, union(start[small], end[small]), union(end[:-1][passes_on], start[1:][passes_on]))
    if not rows_of_lines:
        return SmallOps(ops[:0], EMPTY, 0)
    spans = subtract(spans, spans_of(trace, host_rows(trace, _COMPILED, lines)))
    return SmallOps(np.sort(np.concatenate(rows_of_lines)), spans, count)

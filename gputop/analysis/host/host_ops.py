"""TensorFlow's ops on the host: which run there, which only start work on a GPU, and what runs eagerly, in JAX too."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from gputop.analysis.host.executors import of_input_pipeline
from gputop.analysis.results import EagerOp, HostOps, OpType
from gputop.analysis.steps.jax_calls import outer_calls, own_ops
from gputop.analysis.steps.model import Steps
from gputop.trace.intervals import Spans, contains, coverage, in_order, union
from gputop.trace.lookups import Mask, host_stat, name_mask, spans_of
from gputop.trace.model import I64, Trace
from gputop.trace.nesting import nest
from gputop.trace.threads import MAIN, lines_of

TOP = 20
# scope/name:Type, as tensorflow/core/framework/op_def_builder.cc and node_def_util.cc allow names.
OP = r"[A-Za-z0-9.][\w.\\/>-]*:[A-Z_]\w*$"
FOR_A_BATCH = r"(?:\w*Iterator\w*|OptionalHasValue|OptionalGetValue)$"


def host_ops(trace: Trace, steps: Steps | None) -> HostOps | None:
    """Ops by type, most time first, and the eager ones; None where the trace has none.

    Those of tf.data are left out, whatever threads they run on. Host time is exclusive of ops inside on the thread.
    """
    host = trace.host
    is_op = name_mask(trace, OP)
    within = steps.spans if steps is not None else union([trace.window_ns[0]], [trace.window_ns[1] + 1])
    rows = np.flatnonzero(is_op.take(host.name) & ~of_input_pipeline(trace)) if len(host) else np.empty(0, np.int64)
    rows = rows[contains(within, host.start_ns[rows])]
    eager_rows, eager_op = eager_calls(trace, within)
    if not len(eager_rows):
        eager_rows = eager_calls_of_jax(trace, within)
        eager_op = host.name[eager_rows].astype(np.int64)
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
        eager_ops_per_step=None if steps is None else len(eager_rows) / steps.count, eager=eager[:TOP],
    )


def _types(trace: Trace, rows: I64, on_gpu: I64) -> list[OpType]:
    """Most time on the host or a GPU first: of the host's events ``rows`` and the device's ``on_gpu``. Ops of one type
    in both places are two entries."""
    host, device, names = trace.host, trace.device, len(trace.names)
    nesting = nest(host.line[rows], host.start_ns[rows], host.end_ns[rows], host.name[rows], trace.names)
    launches = _launches(trace, rows)
    count = np.bincount(host.name[rows], minlength=names)
    host_ns, device_ns = (np.bincount(name, time_ns, names).astype(np.int64) for name, time_ns in (
        (host.name[rows], nesting.own(host.end_ns[rows] - host.start_ns[rows])),
        (device.tf_op[on_gpu], device.end_ns[on_gpu] - device.start_ns[on_gpu])))
    placed = np.zeros(names, bool)
    placed[host.name[rows[launches]]] = True
    placed[device.tf_op[on_gpu]] = True
    # Whether there is any link from ops to GPUs at all; without GPUs everything is on the host.
    linked = not trace.gpus or bool(placed.any())
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


def _launches(trace: Trace, rows: I64) -> npt.NDArray[np.bool_]:
    """Mask of the host events that contain a launch of their own thread."""
    device, host = trace.device, trace.host
    with_launch = device.launch_ns >= 0
    if not with_launch.any() or not len(rows):
        return np.zeros(len(rows), bool)
    span = int(max(host.end_ns.max(), device.launch_ns.max())) + 2
    if span * len(trace.lines) >= 1 << 62:  # one key of thread and time would not fit
        return np.zeros(len(rows), bool)
    times = in_order(device.launch_line[with_launch].astype(np.int64) * span + device.launch_ns[with_launch])
    base = host.line[rows].astype(np.int64) * span
    return np.searchsorted(times, base + host.end_ns[rows]) > np.searchsorted(times, base + host.start_ns[rows])


def single_ops(trace: Trace, lines: Mask) -> tuple[I64, I64]:
    """Rows and ops of EagerExecute that run a single op on these threads, calls for a batch left out."""
    host = trace.host
    flags, is_func = host_stat(host, "is_func")
    rows, op = host_stat(host, "eager_op")
    keep = ~np.isin(rows, flags[is_func == 1]) & ~name_mask(trace, FOR_A_BATCH)[op] & lines[host.line[rows]]
    return rows[keep], op[keep]


def eager_calls(trace: Trace, within: Spans) -> tuple[I64, I64]:
    """The same on Python's threads, those that begin within this time."""
    rows, op = single_ops(trace, lines_of(trace, MAIN))
    keep = contains(within, trace.host.start_ns[rows])
    return rows[keep], op[keep]


def eager_calls_of_jax(trace: Trace, within: Spans) -> I64:
    """Rows of calls of JAX's own ops from Python, each a program of its own."""
    rows = outer_calls(trace)
    rows = rows[own_ops(trace)[trace.host.name[rows]]] if len(rows) else rows
    return rows[contains(within, trace.host.start_ns[rows])]


def eager_types(trace: Trace) -> set[str]:
    """The types of the ops that Python ran one by one."""
    if not len(trace.host):
        return set()
    _, op = eager_calls(trace, union([trace.host.start_ns[0]], [trace.host.end_ns.max() + 1]))
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

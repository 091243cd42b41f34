"""TensorFlow's ops on the host: which run there, which only start work on a GPU, and what runs eagerly, in JAX too."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from gputop.analysis.host.executors import of_input_pipeline
from gputop.analysis.results import EagerOp, HostOps, OpType
from gputop.analysis.steps.jax_calls import outer_calls, own_ops
from gputop.analysis.steps.model import Steps
from gputop.trace.intervals import Spans, coverage, in_order, union
from gputop.trace.lookups import host_stat, name_mask
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
    within = _within(trace, steps)
    rows = np.flatnonzero(is_op[host.name] & ~of_input_pipeline(trace)) if len(host) else np.empty(0, np.int64)
    rows = rows[_begins_in(within, host.start_ns[rows])]
    eager_rows, eager_op = eager_calls(trace, within)
    if not len(eager_rows):
        eager_rows = eager_calls_of_jax(trace, within)
        eager_op = host.name[eager_rows].astype(np.int64)
    device = trace.device
    on_gpu = np.flatnonzero(is_op[device.tf_op] & _begins_in(within, device.start_ns))
    if not len(rows) and not len(eager_rows) and not len(on_gpu):
        return None
    ops = _Ops(trace)
    nesting = nest(host.line[rows], host.start_ns[rows], host.end_ns[rows], host.name[rows], trace.names)
    ops.add_host(host.name[rows], nesting.own(host.end_ns[rows] - host.start_ns[rows]), _launches(trace, rows))
    ops.add_device(device.tf_op[on_gpu], device.end_ns[on_gpu] - device.start_ns[on_gpu])
    types = ops.types()
    share, eager = _eager(trace, within, eager_rows, eager_op)
    return HostOps(
        basis="window" if steps is None else "steps",
        host_s=sum(t.host_s for t in types if t.placement == "host"), device_s=sum(t.device_s for t in types),
        types=tuple(types[:TOP]), eager_share=share,
        eager_ops_per_step=None if steps is None else len(eager_rows) / steps.count, eager=eager[:TOP],
    )


class _Ops:
    """Time and placement by full op name, gathered column by column."""

    def __init__(self, trace: Trace) -> None:
        n = len(trace.names)
        self._trace = trace
        self._count, self._host, self._device = (np.zeros(n, np.int64) for _ in range(3))
        self._placed = np.zeros(n, bool)
        # Whether there is any link from ops to GPUs at all; without GPUs everything is on the host.
        self._linked = not trace.gpus

    def add_host(self, name: npt.NDArray, own_ns: I64, launches: npt.NDArray[np.bool_]) -> None:
        n = len(self._count)
        self._count += np.bincount(name, minlength=n)
        self._host += np.bincount(name, weights=own_ns, minlength=n).astype(np.int64)
        self._placed[name[launches]] = True
        self._linked |= bool(launches.any())

    def add_device(self, name: npt.NDArray, length_ns: I64) -> None:
        self._device += np.bincount(name, weights=length_ns, minlength=len(self._device)).astype(np.int64)
        self._placed[name] = True
        self._linked |= bool(len(name))

    def types(self) -> list[OpType]:
        """Most time on the host or a GPU first. Ops of one type in both places are two entries."""
        groups: dict[tuple[str, str | None], list[int]] = {}
        for i in np.flatnonzero((self._count > 0) | (self._device > 0)).tolist():
            placement = "gpu" if self._placed[i] else "host" if self._linked else None
            groups.setdefault((self._trace.names[i].rsplit(":", 1)[1], placement), []).append(i)
        out = []
        for (type_, placement), members in groups.items():
            indices = np.array(members)
            longest = min(members, key=lambda i: (-max(self._host[i], self._device[i]), self._trace.names[i]))
            out.append(OpType(type_, placement, int(self._count[indices].sum()), int(self._host[indices].sum()) / 1e9,
                              int(self._device[indices].sum()) / 1e9, self._trace.names[longest].rsplit(":", 1)[0]))
        return sorted(out, key=lambda op: (-max(op.host_s, op.device_s), op.type, op.placement or ""))


def _within(trace: Trace, steps: Steps | None) -> Spans:
    if steps is None:
        low, high = trace.window_ns
        return union([low], [high + 1])
    return steps.spans


def _begins_in(spans: Spans, times: I64) -> npt.NDArray[np.bool_]:
    if not len(spans.start):
        return np.zeros(len(times), bool)
    last_span = np.searchsorted(spans.start, times, side="right") - 1
    return (last_span >= 0) & (times < spans.end[np.maximum(last_span, 0)])


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


def eager_calls(trace: Trace, within: Spans) -> tuple[I64, I64]:
    """Rows and ops of EagerExecute that run a single op from Python, calls for a batch left out."""
    host = trace.host
    flags, is_func = host_stat(host, "is_func")
    rows, op = host_stat(host, "eager_op")
    keep = ~np.isin(rows, flags[is_func == 1]) & ~name_mask(trace, FOR_A_BATCH)[op]
    keep &= lines_of(trace, MAIN)[host.line[rows]] & _begins_in(within, host.start_ns[rows])
    return rows[keep], op[keep]


def eager_calls_of_jax(trace: Trace, within: Spans) -> I64:
    """Rows of calls of JAX's own ops from Python, each a program of its own."""
    rows = outer_calls(trace)
    rows = rows[own_ops(trace)[trace.host.name[rows]]] if len(rows) else rows
    return rows[_begins_in(within, trace.host.start_ns[rows])]


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
    in_functions = union(host.start_ns[called], host.end_ns[called])
    functions = int(coverage(in_functions, within.start, within.end).sum())
    length = host.end_ns[rows] - host.start_ns[rows]
    alone = length - coverage(in_functions, host.start_ns[rows], host.end_ns[rows])
    eager = int(alone.sum())
    names, which = np.unique(op, return_inverse=True)
    ops = [EagerOp(trace.names[name], int(count), float(time) / 1e9) for name, count, time in zip(
        names.tolist(), np.bincount(which), np.bincount(which, weights=alone), strict=True)]
    share = eager / (eager + functions) if eager + functions else None
    return share, tuple(sorted(ops, key=lambda o: (-o.seconds, o.name)))

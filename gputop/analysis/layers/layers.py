"""Time of the step by phase, by layer of the model, and by line of source."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from msgspec import Struct

from gputop.analysis.gpu.device_time import GpuTimeline
from gputop.analysis.host.host_ops import eager_types
from gputop.analysis.layers import tree
from gputop.analysis.layers.culprits import op_keys
from gputop.analysis.layers.pytorch import CallScopes, call_scopes
from gputop.analysis.layers.scopes import Scope, scope_of, trainings
from gputop.analysis.results import Layers
from gputop.analysis.steps.model import Steps
from gputop.trace.intervals import Spans, coverage, intersect, merge, union
from gputop.trace.model import F64, I64, U8, HloOp, Kind, Trace

COMPUTE, COLLECTIVES, COPIES = range(3)  # what a device event is
_PRIORITY = ((COMPUTE, (Kind.COMPUTE, Kind.D2D, Kind.MEMSET, Kind.COPY_OTHER)),
             (COLLECTIVES, (Kind.COLLECTIVE, Kind.P2P)), (COPIES, (Kind.H2D,)), (COPIES, (Kind.D2H,)))
_MOVES = {COLLECTIVES: "collectives", COPIES: "copies"}  # roots of the table
_MAIN_KERNEL = 0.1  # share of an op's time: what takes less does not count its executions


class OpUse(Struct):
    """Time of one op of a program in all steps and on all GPUs together, and its number of runs."""

    op: HloOp
    device_ns: float
    executions: float
    phase: str
    kernel: str  # the name of the kernel that took most time


class LayerTimes(Struct, frozen=True):
    """The table, and for the limit ladder the use of each of XLA's ops in all ``steps``, of all GPUs together."""

    table: Layers
    ops: tuple[OpUse, ...]
    steps: int  # times GPUs
    calls: CallScopes | None  # of PyTorch's kernels


def layer_times(trace: Trace, gpu_timelines: Sequence[GpuTimeline], steps: Steps | None) -> LayerTimes | None:
    """The mean step by layer, or without steps the time from the first device event to the last; mean over the GPUs
    that worked then. None where no device event names an op and none ran in a CUDA graph, or nothing ran.
    """
    device = trace.device
    begins, ends = zip(*(timeline.window_ns for timeline in gpu_timelines), strict=True)
    within = steps.spans if steps is not None else union([min(begins)], [max(ends)])
    count = steps.count if steps is not None else 1
    shares = [share for timeline in gpu_timelines if (share := device_share(timeline, within)).busy_ns.any()]
    calls = call_scopes(trace)
    if not shares or not ((device.tf_op >= 0).any() or trace.hlo_ops or calls is not None or trace.cuda_graphs):
        return None
    many = len(trace.hlo_ops)
    # Of the ops; the last two are none: of a kernel, and of a copy.
    size = (many + len(trace.names) if calls is None else len(calls.scopes)) + 2
    columns = [_sums(trace, share, size, calls) for share in shares]
    device_ns, wait_ns, kernels = (sum(column) for column in zip(*columns, strict=True))
    unit = len(shares) * count
    executions, kernel_of = _executions(trace, shares, many)
    scope_of_use = _pytorch_scope(calls, size) if calls is not None else _op_scope(trace, shares, size)
    root, ops = tree.ScopeSums(), []
    used = np.flatnonzero((device_ns + wait_ns + kernels) > 0)
    for key in used.tolist():
        what, op = divmod(key, size)
        node = tree.ScopeSums(float(device_ns[key]), float(wait_ns[key]), float(kernels[key]))
        hlo = trace.hlo_ops[op] if op < many else None
        phase, path = scope_of_use(what, op)
        if hlo is not None and what == COMPUTE:
            times = float(executions[op])
            ops.append(OpUse(hlo, node.device_ns, times, phase, kernel_of[op]))
            node.ran(hlo, times)
        tree.put(root, phase, path, node, hlo.source if hlo is not None else "")
    rest = float(sum(share.rest_ns for share in shares))
    if rest:
        tree.put(root, tree.AFTER, (), tree.ScopeSums(wait_ns=rest))
    no_op = tree.IN_GRAPHS if trace.cuda_graphs else tree.MAYBE_IN_GRAPHS if trace.hlo_ops else {}
    reasons = {**no_op, **tree.no_layers(root, framework(trace, calls is not None))}
    table = Layers(
        basis=steps.times.unit if steps is not None else "window", total_s=within.total / count / 1e9, gpus=len(shares),
        rows=tuple(tree.table_rows(root, unit, reasons)), sources=tree.source_lines(root, unit))
    return LayerTimes(table, tuple(ops), unit, calls)


_ScopeOfUse = Callable[[int, int], tuple[str, tuple[str, ...]]]  # of what a device event does and its op


def _pytorch_scope(calls: CallScopes, size: int) -> _ScopeOfUse:
    def scope(what: int, op: int) -> tuple[str, tuple[str, ...]]:
        phase, path = calls.scopes[op] if op < size - 2 else Scope(tree.NO_CALL, ())
        return _MOVES.get(what, phase), path

    return scope


def _op_scope(trace: Trace, shares: Sequence[DeviceShare], size: int) -> _ScopeOfUse:
    """Scopes of XLA's ops, and after them of TensorFlow's, which have names."""
    many = len(trace.hlo_ops)
    modules, eager = _modules(trace, shares, many), eager_types(trace)
    training = trainings(trace.hlo_ops, modules)

    def scope(what: int, op: int) -> tuple[str, tuple[str, ...]]:
        of_xla = op < many
        name = trace.hlo_ops[op].op_name if of_xla else trace.names[op - many] if op < size - 2 else ""
        trains = of_xla and training[op]
        if what in _MOVES:
            return _MOVES[what], scope_of(name, trains).path if of_xla or ":" in name else ()
        phase, path = tree.place_of(name, of_xla, trains)
        if phase == tree.NO_OP and op == size - 1:
            phase = tree.LOCAL_COPIES
        if phase != "optimizer" and path == (name.rpartition(":")[2],) and path[0] in eager:
            phase = tree.EAGER
        return phase, path

    return scope


class DeviceShare(Struct, frozen=True):
    """The events of one GPU: where they lie in the trace, what they are, and the time within some spans that each
    gets."""

    events: slice
    kind: U8  # COMPUTE, COLLECTIVES or COPIES
    busy_ns: I64
    wait_ns: I64  # idle before it
    rest_ns: int  # idle after the last of them


def device_share(timeline: GpuTimeline, within: Spans) -> DeviceShare:
    """Each instant of a GPU's time within ``within``, given to one of its events: the work to what does it, the wait to
    what ends it.

    The rules are those of the step's parts (:mod:`gputop.analysis.gpu.breakdown`): compute comes before collectives,
    those before copies from and then to the host. Of two events of one kind that run at once, the instant counts for
    the one that began first. So the sums over all events are the parts of the step, whatever runs side by side.
    """
    start, end, kinds = timeline.start_ns, timeline.end_ns, timeline.kind
    busy = np.zeros(len(start), np.int64)
    kind = np.zeros(len(start), np.uint8)
    sets = ((timeline.compute, timeline.other), (timeline.collectives, timeline.p2p), (timeline.h2d,))
    earlier: list[Spans] = []  # what goes before a kind
    count_by_kind = np.bincount(kinds, minlength=len(Kind))
    for number, (what, members) in enumerate(_PRIORITY):
        earlier += sets[number - 1] if number else ()
        if not count_by_kind[list(members)].any():
            continue
        of_kind = np.zeros(len(Kind), bool)
        of_kind[list(members)] = True
        indices = np.flatnonzero(of_kind[kinds])
        everything = len(indices) == len(start)
        first, last = (start, end) if everything else (start[indices], end[indices])
        until = np.maximum.accumulate(last)
        begin = first.copy()
        np.maximum(begin[1:], until[:-1], out=begin[1:])
        stop = np.maximum(begin, until)
        kind[indices] = what
        busy[indices] = coverage(within, begin, stop)
        if number:
            covered = intersect(union(begin, stop), within)
            hidden = merge(*(intersect(covered, spans) for spans in earlier))
            busy[indices] -= coverage(hidden, begin, stop)
    gaps = timeline.gaps
    lo, hi = timeline.window_ns
    bounds = Spans(np.concatenate((within.start[:1], gaps.start)), np.concatenate(([lo], gaps.end)))
    wait = np.zeros(len(start), np.int64)
    idle = coverage(within, bounds.start, np.maximum(bounds.start, bounds.end))
    wait[timeline.resumes] = idle[1:]  # no two gaps end with one event
    wait[np.searchsorted(start, lo)] += idle[0]
    rest = int(coverage(within, [hi], [max(hi, int(within.end[-1]))])[0]) if len(within.end) else 0
    return DeviceShare(timeline.events, kind, busy, wait, rest)


def _sums(trace: Trace, share: DeviceShare, size: int, calls: CallScopes | None) -> tuple[F64, F64, F64]:
    """Work, wait and kernels of each op: ``kind * size`` + its number."""
    kind, key = trace.device.kind[share.events], op_keys(trace, share.events, calls)
    copied = np.isin(kind, (Kind.D2D, Kind.MEMSET, Kind.COPY_OTHER))
    key = np.where(key < 0, size - 2 + copied, key) + share.kind.astype(np.int64) * size
    length = 3 * size
    kernel = (kind <= Kind.COLLECTIVE) & (share.busy_ns > 0)
    busy, wait, count = (np.bincount(key, weights, length).astype(np.float64, copy=False)
                         for weights in (share.busy_ns, share.wait_ns, kernel))
    return busy, wait, count


def framework(trace: Trace, pytorch: bool) -> str:
    """The key of :data:`gputop.analysis.layers.tree.NO_LAYERS`; "" for TensorFlow, whose ops name their layers."""
    if pytorch:
        return "nsys" if trace.format == "nsys" else "pytorch"
    return "jax" if any(op.op_name.startswith("jit(") for op in trace.hlo_ops) else ""


def _executions(trace: Trace, shares: Sequence[DeviceShare], many: int) -> tuple[F64, list[str]]:
    """Number of runs of each op of a program on all GPUs, and its longest kernel's name. An op may start several
    kernels, and a helper of them more than once: it ran as often as the rarest of its main ones."""
    executions, names = np.zeros(many), [""] * many
    if not many:
        return executions, names
    rows = np.concatenate([share.events.start + np.flatnonzero((share.kind == COMPUTE) & (share.busy_ns > 0))
                           for share in shares])
    busy = np.concatenate([share.busy_ns[(share.kind == COMPUTE) & (share.busy_ns > 0)] for share in shares])
    with_op = trace.device.hlo[rows] >= 0
    rows, busy = rows[with_op], busy[with_op]
    pairs = trace.device.hlo[rows].astype(np.int64) * (len(trace.names) + 1) + trace.device.name[rows] + 1
    kinds, which = np.unique(pairs, return_inverse=True)
    count, time = np.bincount(which, minlength=len(kinds)), np.bincount(which, busy, minlength=len(kinds))
    of_op = kinds // (len(trace.names) + 1)
    longest = np.zeros(many)
    np.maximum.at(longest, of_op, time)
    total = np.bincount(of_op, time, minlength=many)
    main = (time >= _MAIN_KERNEL * total[of_op]) | (time == longest[of_op])
    least = np.full(many, np.inf)
    np.minimum.at(least, of_op[main], count[main])
    for i in np.flatnonzero(time == longest[of_op]).tolist():
        name = int(kinds[i] % (len(trace.names) + 1)) - 1
        names[of_op[i]] = trace.names[name] if name >= 0 else ""
    return np.where(np.isfinite(least), least, 0.0), names


def _modules(trace: Trace, shares: Sequence[DeviceShare], many: int) -> list[str]:
    """The program of each of its ops; ``Trace.names`` has them as ``program/op``."""
    of_op = np.full(many + 1, -1, np.int64)  # the last entry takes what is of no program
    for share in shares if many else ():
        of_op[trace.device.hlo[share.events]] = trace.device.tf_op[share.events]
    return [trace.names[i].rsplit("/", 1)[0] if i >= 0 else "" for i in of_op[:many].tolist()]

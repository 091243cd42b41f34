"""Where the step goes by phase, by layer of the model, and by line of source."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from gputop.analysis.gpu.device_time import GpuTimeline
from gputop.analysis.layers.device_share import COLLECTIVES, COMPUTE, COPIES, DeviceShare, device_share
from gputop.analysis.layers.pytorch import CallScopes, call_scopes
from gputop.analysis.layers.scopes import PHASES, Scope, differentiates, scope_of
from gputop.analysis.results import LayerRow, Layers, SourceLine
from gputop.analysis.steps.model import Steps
from gputop.trace.intervals import union
from gputop.trace.model import F64, HloOp, Kind, Trace

NO_CALL = "launched by no op"
NO_OP, NO_PROGRAM, NO_SCOPE = "no op named", "XLA ops without their program", "no layer named"
AFTER = "after the last kernel"
REASONS = {
    NO_OP: ("These kernels name no op. Where XLA runs them as CUDA graphs, a capture with "
            "XLA_FLAGS=--xla_gpu_enable_command_buffer= shows their ops."),
    NO_PROGRAM: "The capture does not hold the compiled program of these ops, which names their layers.",
    NO_SCOPE: "XLA made these ops itself (layouts, copies, constants): they name no layer.",
    NO_CALL: ("The launches of these kernels lie in no op of PyTorch, or are not in the trace, as those of a CUDA "
              "graph's kernels."),
    AFTER: "Idle time that no kernel of the window ends.",
}
_ORDER = (*PHASES, "collectives", "copies", NO_SCOPE, NO_PROGRAM, NO_OP, NO_CALL, AFTER)
_FOLDED_BELOW = 0.005  # of the whole: one row for all of them
_MAX_DEPTH, _MAX_ROWS, _MAX_SOURCES = 12, 400, 30
_MAIN_KERNEL = 0.1  # of an op's time: what takes less does not count its executions


@dataclass(slots=True)
class OpUse:
    """What one op of a program took, in all steps and on all GPUs together, and how often it ran."""

    op: HloOp
    device_ns: float
    executions: float
    phase: str
    kernel: str  # the name of the kernel that took most time


@dataclass(slots=True)
class _Node:
    """Sums of a scope and all below it. ``known_ns`` is the device time of the ops whose FLOPs are known."""

    device_ns: float = 0.0
    wait_ns: float = 0.0
    kernels: float = 0.0
    flops: float = 0.0
    known_ns: float = 0.0
    bytes: float = 0.0
    children: dict[str, _Node] = field(default_factory=dict)
    sources: dict[str, float] = field(default_factory=dict)

    def add(self, other: _Node) -> None:
        self.device_ns += other.device_ns
        self.wait_ns += other.wait_ns
        self.kernels += other.kernels
        self.flops += other.flops
        self.known_ns += other.known_ns
        self.bytes += other.bytes


@dataclass(frozen=True, slots=True)
class LayerTimes:
    """The table, and for the limit ladder the use of each of XLA's ops in all ``steps``, of all GPUs together."""

    table: Layers
    ops: tuple[OpUse, ...]
    steps: int  # times GPUs


def layer_times(
    trace: Trace, gpu_timelines: Sequence[GpuTimeline], steps: Steps | None,
) -> LayerTimes | None:
    """The mean step by layer, or without steps the time from the first device event to the last; mean over the GPUs
    that worked then. None where no device event names an op, or nothing ran.
    """
    device = trace.device
    begins, ends = zip(*(timeline.window_ns for timeline in gpu_timelines), strict=True)
    within = steps.spans if steps is not None else union([min(begins)], [max(ends)])
    count = steps.count if steps is not None else 1
    shares = [share for timeline in gpu_timelines
              if (share := device_share(trace, timeline, within)).busy_ns.any()]
    calls = call_scopes(trace)
    if not shares or not ((device.tf_op >= 0).any() or trace.hlo_ops or calls is not None):
        return None
    many = len(trace.hlo_ops)
    size = (many + len(trace.names) if calls is None else len(calls.scopes)) + 1  # of the ops; the last one is none
    columns = [_sums(trace, share, many, size, calls) for share in shares]
    device_ns, wait_ns, kernels = (sum(column) for column in zip(*columns, strict=True))
    unit = len(shares) * count
    executions, kernel_of = _executions(trace, shares, many)
    root, ops = _Node(), []
    modules = _modules(trace, shares, many)
    training = {module for i, module in enumerate(modules) if differentiates(trace.hlo_ops[i].op_name)}
    used = np.flatnonzero((device_ns + wait_ns + kernels) > 0)
    for key in used.tolist():
        what, op = divmod(key, size)
        node = _Node(float(device_ns[key]), float(wait_ns[key]), float(kernels[key]))
        hlo = trace.hlo_ops[op] if op < many else None
        if calls is not None:
            phase, path = _place_of_call(calls.scopes[op] if op < size - 1 else None, what)
        else:
            name = hlo.op_name if hlo is not None else trace.names[op - many] if op < size - 1 else ""
            phase, path = _place(name, what, hlo is not None, hlo is not None and modules[op] in training)
        if hlo is not None and what == COMPUTE:
            times = float(executions[op])
            ops.append(OpUse(hlo, node.device_ns, times, phase, kernel_of[op]))
            node.bytes = times * (hlo.bytes or 0)
            if hlo.flops is not None:
                node.known_ns, node.flops = node.device_ns, times * sum(number for _, number in hlo.flops)
        _put(root, (phase, *path[:_MAX_DEPTH]), node, hlo.source if hlo is not None else "")
    rest = float(sum(share.rest_ns for share in shares))
    if rest:
        _put(root, (AFTER,), _Node(wait_ns=rest), "")
    table = Layers(
        basis=steps.times.unit if steps is not None else "window", total_s=within.total / count / 1e9, gpus=len(shares),
        rows=tuple(_rows(root, unit)), sources=_sources(root, unit))
    return LayerTimes(table, tuple(ops), unit)


def _sums(
    trace: Trace, share: DeviceShare, many: int, size: int, calls: CallScopes | None,
) -> tuple[F64, F64, F64]:
    """Work, wait and kernels of each op: ``kind * size`` + its number."""
    device, rows = trace.device, share.rows
    key = device.tf_op[rows].astype(np.int64) if calls is None else calls.of_event[rows]
    key[key < 0] = size - 1 - many
    key += many
    if many:
        hlo = device.hlo[rows]
        key = np.where(hlo >= 0, hlo, key)
    key += share.kind.astype(np.int64) * size
    length = 3 * size
    kernel = (device.kind[rows] <= Kind.COLLECTIVE) & (share.busy_ns > 0)
    busy, wait, count = (np.bincount(key, weights, length).astype(np.float64, copy=False)
                         for weights in (share.busy_ns, share.wait_ns, kernel))
    return busy, wait, count


def _executions(trace: Trace, shares: Sequence[DeviceShare], many: int) -> tuple[F64, list[str]]:
    """How often each op of a program ran on all GPUs, and its longest kernel's name.

    An op may start several kernels, and a helper of them more than once: it ran as often as the rarest of its main
    ones.
    """
    executions, names = np.zeros(many), [""] * many
    if not many:
        return executions, names
    rows = np.concatenate([share.rows[(share.kind == COMPUTE) & (share.busy_ns > 0)] for share in shares])
    busy = np.concatenate([share.busy_ns[(share.kind == COMPUTE) & (share.busy_ns > 0)] for share in shares])
    known = trace.device.hlo[rows] >= 0
    rows, busy = rows[known], busy[known]
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
        of_op[trace.device.hlo[share.rows]] = trace.device.tf_op[share.rows]
    return [trace.names[i].rsplit("/", 1)[0] if i >= 0 else "" for i in of_op[:many].tolist()]


def _place(name: str, what: int, has_program: bool, training: bool) -> tuple[str, tuple[str, ...]]:
    """Root of the table and path below it."""
    if what in (COLLECTIVES, COPIES):
        path = scope_of(name, training).path if has_program or ":" in name else ()
        return "collectives" if what == COLLECTIVES else "copies", path
    if not name and not has_program:
        return NO_OP, ()
    if not has_program and ":" not in name:
        return NO_PROGRAM, (name,)
    scope = scope_of(name, training)
    return (scope.phase, scope.path) if scope.path else (NO_SCOPE, (name,) if name else ())


def _place_of_call(scope: Scope | None, what: int) -> tuple[str, tuple[str, ...]]:
    path = scope.path if scope is not None else ()
    if what in (COLLECTIVES, COPIES):
        return "collectives" if what == COLLECTIVES else "copies", path
    return (scope.phase, path) if scope is not None else (NO_CALL, ())


def _put(root: _Node, path: tuple[str, ...], node: _Node, source: str) -> None:
    at = root
    at.add(node)
    for part in path:
        at = at.children.setdefault(part, _Node())
        at.add(node)
    if source:
        for whose in (root, at):
            whose.sources[source] = whose.sources.get(source, 0.0) + node.device_ns


def _rows(root: _Node, unit: int) -> list[LayerRow]:
    """The tree in order, parents before children, siblings by falling time; what costs little is one row."""
    rows: list[LayerRow] = []
    whole = root.device_ns + root.wait_ns
    least = _FOLDED_BELOW * whole

    def row(name: str, parent: int | None, node: _Node) -> None:
        rows.append(LayerRow(
            name=name, parent=parent, device_s=node.device_ns / unit / 1e9, wait_s=node.wait_ns / unit / 1e9,
            share=(node.device_ns + node.wait_ns) / whole if whole else 0.0, kernels=node.kernels / unit,
            flops=node.flops / unit if node.known_ns else None,
            flops_known=node.known_ns / node.device_ns if node.device_ns else 0.0,
            bytes=node.bytes / unit if node.bytes else None,
            source=max(node.sources, key=lambda s: node.sources[s], default=""),
            reason=REASONS.get(name, "") if parent is None else ""))

    def visit(name: str, parent: int | None, node: _Node) -> None:
        while len(node.children) == 1:  # a scope that holds nothing but one other
            (inner, child), = node.children.items()
            if parent is None or child.kernels != node.kernels or child.wait_ns != node.wait_ns:
                break
            name, node = f"{name}/{inner}", child
        row(name, parent, node)
        below(node, len(rows) - 1)

    def below(node: _Node, parent: int) -> None:
        children = sorted(node.children.items(), key=lambda item: (-item[1].device_ns - item[1].wait_ns, item[0]))
        shown = [(name, child) for name, child in children if child.device_ns + child.wait_ns >= least]
        if len(rows) + len(shown) > _MAX_ROWS:
            shown = []
        for name, child in shown:
            visit(name, parent, child)
        others = children[len(shown):]
        if shown and others:
            rest = _Node()
            for _, child in others:
                rest.add(child)
            row(f"{len(others)} more", parent, rest)

    for name in _ORDER:
        if name in root.children:
            visit(name, None, root.children[name])
    return rows


def _sources(root: _Node, unit: int) -> tuple[SourceLine, ...] | None:
    """Lines of source by device time; None where the programs name none."""
    if not root.sources:
        return None
    lines = sorted(root.sources.items(), key=lambda item: (-item[1], item[0]))
    return tuple(SourceLine(line, time / unit / 1e9, time / root.device_ns if root.device_ns else 0.0)
                 for line, time in lines[:_MAX_SOURCES])

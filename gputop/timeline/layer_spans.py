"""Rows of spans that no single event of the trace is: the phases of the step and the layers of the model on the GPU
that works most, or on the CPU of a job without one, and the critical path of a typical step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from msgspec import Struct, field

from gputop.analysis.layers.cpu_layers import op_spans
from gputop.analysis.layers.pytorch import call_scopes
from gputop.analysis.layers.scopes import differentiates, scope_of
from gputop.analysis.results import CriticalPath
from gputop.analysis.steps.model import Steps
from gputop.render.step_parts import path_kind
from gputop.timeline.model import KINDS
from gputop.trace.model import I64, U8, Kind, Trace

F32 = npt.NDArray[np.float32]
_LEVELS = 3  # phase, layer, layer within
_OF_PATH = {"input": "input", "host": "host", "launch": "host", "sync": "host", "kernel": "compute", "copy": "copy",
            "collective": "collective", "idle": "memset"}  # kinds of the path, by the kind of range with their color


class NamedSpans(Struct):
    """Spans by start, outer ones first; ``name`` indexes ``names``, ``kind`` KINDS."""

    gpu: int = -1  # index into Trace.gpus
    start: I64 = field(default_factory=lambda: np.empty(0, np.int64))
    end: I64 = field(default_factory=lambda: np.empty(0, np.int64))
    name: I64 = field(default_factory=lambda: np.empty(0, np.int64))
    depth: npt.NDArray[np.uint16] = field(default_factory=lambda: np.empty(0, np.uint16))
    kind: U8 = field(default_factory=lambda: np.empty(0, np.uint8))
    names: list[str] = field(default_factory=list)
    level: F32 = field(default_factory=lambda: np.empty(0, np.float32))  # of a counter, 0-1 of its scale; empty: none

    def followed_by(self, other: NamedSpans) -> NamedSpans:
        """Join both, the other's after these."""
        columns = {name: np.concatenate((getattr(self, name), getattr(other, name)))
                   for name in ("start", "end", "depth", "kind")}
        levels = [part.level if len(part.level) else np.zeros(len(part.start), np.float32) for part in (self, other)]
        return NamedSpans(self.gpu, name=np.concatenate((self.name, other.name + len(self.names))),
                          names=[*self.names, *other.names], level=np.concatenate(levels), **columns)


def path_spans(path: CriticalPath | None) -> NamedSpans:
    """The segments of the critical path; none where there is no path."""
    if path is None or not path.segments:
        return NamedSpans()
    start, end = (np.array([getattr(s, edge) for s in path.segments], np.int64) for edge in ("start_ns", "end_ns"))
    return NamedSpans(
        -1, start, end, np.arange(len(start)), np.zeros(len(start), np.uint16),
        np.array([KINDS.index(_OF_PATH.get(s.kind, "host")) for s in path.segments], np.uint8),
        [f"{path_kind(s.kind)[0]}: {s.name}" if s.name else path_kind(s.kind)[0] for s in path.segments])


def layer_spans(trace: Trace, steps: Steps | None) -> NamedSpans:
    """A phase (``depth`` 0), in it layers (1), in those what they consist of (2), of the kernels that name an op; in a
    trace without a GPU of the ops that its CPU runs, on the host with most of them. None where there is no such. A span
    is from the start of its first kernel to the end of its last, with nothing of another phase, layer or step between
    them.
    """
    ops = _of_cpu(trace) if not trace.gpus else _of_gpu(trace)
    if ops is None:
        return NamedSpans()
    start_ns, end_ns, which, paths, gpu = ops
    step = np.zeros(len(which), np.int64)
    if steps is not None:
        step = np.searchsorted(steps.edges_ns[:, 0], start_ns, side="right")
    names: dict[str, int] = {}
    spans: list[tuple[I64, I64, I64, I64]] = []
    for level in range(_LEVELS):
        reaches_level = np.array([len(path) > level for path in paths])
        keys = [path[:level + 1] for path in paths]
        number = {key: i for i, key in enumerate(dict.fromkeys(keys))}
        code = np.array([number[key] for key in keys])[which]
        first = np.flatnonzero(np.append(True, (code[1:] != code[:-1]) | (step[1:] != step[:-1])))
        end = np.maximum.reduceat(end_ns, first)
        start = start_ns[first]
        end[:-1] = np.minimum(end[:-1], start[1:])  # of streams or threads side by side the earlier one gives way
        kept = reaches_level[which[first]] & (end > start)
        op = which[first[kept]]
        text = np.zeros(len(paths), np.int64)
        for used in np.flatnonzero(np.bincount(op, minlength=len(paths))).tolist():
            text[used] = names.setdefault(paths[used][level], len(names))
        spans.append((start[kept], end[kept], text[op], np.full(len(op), level)))
    start, end, name, depth = (np.concatenate(column) for column in zip(*spans, strict=True))
    order = np.lexsort((depth, start))
    return NamedSpans(gpu, start[order], end[order], name[order], depth[order].astype(np.uint16),
                      np.full(len(order), KINDS.index("compute"), np.uint8), list(names))


def _of_gpu(trace: Trace) -> tuple[I64, I64, I64, list[tuple[str, ...]], int] | None:
    """Start, end and path of the named kernels of the GPU that works most, and that GPU."""
    device, calls = trace.device, call_scopes(trace)
    named = (device.tf_op >= 0) | (device.hlo >= 0) if calls is None else calls.of_event >= 0
    rows = np.flatnonzero((device.kind == Kind.COMPUTE) & named & (device.end_ns > device.start_ns))
    if not len(rows):
        return None
    gpu = int(np.bincount(device.gpu[rows], weights=device.end_ns[rows] - device.start_ns[rows]).argmax())
    rows = rows[device.gpu[rows] == gpu]
    if calls is not None:
        which = calls.of_event[rows]
        paths = [(scope.phase, *scope.path)[:_LEVELS] for scope in calls.scopes]
    else:
        ops, which = np.unique(device.hlo[rows].astype(np.int64) * (len(trace.names) + 1) + device.tf_op[rows] + 1,
                               return_inverse=True)
        paths = _paths(trace, ops)
    return device.start_ns[rows], device.end_ns[rows], which, paths, gpu


def _of_cpu(trace: Trace) -> tuple[I64, I64, I64, list[tuple[str, ...]], int] | None:
    """Start, end and path of the ops of the host that runs most of them. Of ops side by side, on several threads, an
    instant is of the one that began first."""
    ops = op_spans(trace)
    if ops is None or not len(ops.which):
        return None
    hosts = sorted({line.host for line in trace.lines})
    host = np.array([hosts.index(line.host) for line in trace.lines])[ops.line]
    of_host = np.flatnonzero(host == np.bincount(host, weights=ops.end_ns - ops.start_ns).argmax())
    start, until = ops.start_ns[of_host].copy(), np.maximum.accumulate(ops.end_ns[of_host])
    np.maximum(start[1:], until[:-1], out=start[1:])
    lasts = until > start
    paths = ([path[:_LEVELS] for path in ops.paths] if ops.modules else
             _without_common([(phase, path) for phase, *path in ops.paths]))
    return start[lasts], until[lasts], ops.which[of_host][lasts], paths, -1


def _paths(trace: Trace, ops: I64) -> list[tuple[str, ...]]:
    """Phase and at most two layers of each op (an index into Trace.hlo_ops, and one into Trace.names, plus 1), without
    the scopes that all ops of the phase are in."""
    named = []
    for hlo, name in (divmod(op, len(trace.names) + 1) for op in ops.tolist()):
        of_hlo = trace.hlo_ops[hlo] if hlo >= 0 else None
        text = trace.names[name - 1] if name else ""
        named.append((text, None) if of_hlo is None else (of_hlo.op_name, text.rsplit("/", 1)[0]))
    training = {module for name, module in named if differentiates(name)}
    return _without_common([scope_of(name, module is not None and module in training) for name, module in named])


def _without_common(scopes: Sequence[tuple[str, Sequence[str]]]) -> list[tuple[str, ...]]:
    """Phase and at most two layers of each, without the op itself and the scopes that all ops of the phase are in."""
    around: dict[str, int] = {}  # by phase, how many scopes all its ops share
    first: dict[str, Sequence[str]] = {}
    for phase, path in ((phase, path[:-1]) for phase, path in scopes):
        shared = first.setdefault(phase, path)[:around.get(phase, len(path))]
        around[phase] = next((i for i, (a, b) in enumerate(zip(shared, path, strict=False)) if a != b),
                             min(len(shared), len(path)))
    return [(phase, *path[:-1][around[phase]:][:_LEVELS - 1]) for phase, path in scopes]

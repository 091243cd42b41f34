"""Rows of a trace's timeline, in the order they are drawn, and the events of each.

The last rows are what was sampled of the GPUs while they were captured. Samples and trace have the Unix time of one
machine: where the trace tells its own, nothing is estimated. A sample tells of the time since the one before it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from msgspec import Struct, field
from msgspec.structs import replace

from gputop.analysis.gpu.device_time import gpu_number
from gputop.analysis.host.tf_data import ITERATOR, iterator_paths
from gputop.analysis.layers.cpu_layers import op_spans
from gputop.analysis.layers.pytorch import call_scopes
from gputop.analysis.layers.scopes import scope_of, trainings
from gputop.analysis.results import CriticalPath
from gputop.analysis.steps.model import Steps
from gputop.analysis.steps.training_loops import BATCH_WAIT
from gputop.core.captured_samples import CounterLane, GpuCounters
from gputop.core.metrics import BYTES_PER_S, GPU_METRICS, HERTZ, RATIO
from gputop.core.samples import Reading
from gputop.render.step_parts import path_kind
from gputop.text.units import printable, ranges, reading
from gputop.timeline.model import KINDS, Row, RowKind
from gputop.trace.intervals import Spans, merge, subtract, union
from gputop.trace.lookups import name_mask
from gputop.trace.model import I64, U8, Kind, Line, Trace
from gputop.trace.nesting import depths, nesting_order
from gputop.trace.threads import EXECUTOR, INPUT, MAIN, POOL, labels, lines_of, role

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
    """Scopes of ops by :func:`_without_common`: an index into Trace.hlo_ops, and one into Trace.names, plus 1."""
    named = [(hlo, trace.names[name - 1] if name else "") for hlo, name in (
        divmod(op, len(trace.names) + 1) for op in ops.tolist())]
    programs = {hlo: name.rsplit("/", 1)[0] for hlo, name in named if hlo >= 0}
    training = dict(zip(programs, trainings([trace.hlo_ops[hlo] for hlo in programs], [*programs.values()]),
                        strict=True))
    return _without_common([scope_of(trace.hlo_ops[hlo].op_name if hlo >= 0 else name, training.get(hlo, False))
                            for hlo, name in named])


def _without_common(scopes: Sequence[tuple[str, Sequence[str]]]) -> list[tuple[str, ...]]:
    """Phase and at most two layers of each, without the op itself and the scopes that all ops of the phase are in."""
    around: dict[str, int] = {}  # by phase, how many scopes all its ops share
    first: dict[str, Sequence[str]] = {}
    for phase, path in ((phase, path[:-1]) for phase, path in scopes):
        shared = first.setdefault(phase, path)[:around.get(phase, len(path))]
        around[phase] = next((i for i, (a, b) in enumerate(zip(shared, path, strict=False)) if a != b),
                             min(len(shared), len(path)))
    return [(phase, *path[:-1][around[phase]:][:_LEVELS - 1]) for phase, path in scopes]


_INPUT_CALL = f"{ITERATOR}|{BATCH_WAIT}"
_OF_DEVICE = {
    Kind.COMPUTE: "compute", Kind.COLLECTIVE: "collective", Kind.H2D: "h2d", Kind.D2H: "d2h", Kind.D2D: "d2d",
    Kind.P2P: "p2p", Kind.COPY_OTHER: "copy", Kind.MEMSET: "memset",
}
# Where ranges of several kinds overlap an instant belongs to the first of these, in the order of the step's
# breakdown; the host's work for input goes before the call around it.
_KIND_PRECEDENCE = ("compute", "d2d", "memset", "copy", "collective", "p2p", "h2d", "d2h", "input", "host", "counter")
_ROLES = (MAIN, EXECUTOR, INPUT, POOL)


class Rows(Struct):
    """The rows and their events. ``of_device`` and ``of_host`` are the trace's events in the order of the file: those
    of a row lie together, by start, outer events before inner ones. ``of_stage`` are host events again, by stage.

    ``spans`` are no events of the trace and come last. ``bounds`` gives by row its first event and the one after its
    last, over all four; equal for a GPU, whose ``streams`` are given instead. ``kind``, ``depth``: of each event,
    ``kind`` as index into KINDS.
    """

    rows: list[Row] = field(default_factory=list)
    bounds: list[tuple[int, int]] = field(default_factory=list)
    streams: dict[int, list[int]] = field(default_factory=dict)
    threads: dict[int, str] = field(default_factory=dict)  # what threads are called, by line of the trace
    of_device: I64 = field(default_factory=lambda: np.empty(0, np.int64))
    of_host: I64 = field(default_factory=lambda: np.empty(0, np.int64))
    of_stage: I64 = field(default_factory=lambda: np.empty(0, np.int64))
    spans: NamedSpans = field(default_factory=NamedSpans)
    no_counters: str = ""  # why a capture by gputop has no samples of the GPUs
    kind: U8 = field(default_factory=lambda: np.empty(0, np.uint8))
    depth: npt.NDArray[np.uint16] = field(default_factory=lambda: np.empty(0, np.uint16))

    def forget_events(self) -> None:
        """Free what is needed no more once the events are written: all but the device events' places."""
        self.of_host = self.of_stage = np.empty(0, np.int64)
        self.kind, self.depth = np.empty(0, np.uint8), np.empty(0, np.uint16)

    def add(self, kind: RowKind, label: str, group: str, gpu: int | None, first: int, last: int, depth: int = 0) -> int:
        self.rows.append(Row(len(self.rows), kind, printable(label), printable(group), gpu, depth))
        self.bounds.append((first, last))
        return len(self.rows) - 1


def rows_of(trace: Trace, steps: Steps | None = None) -> Rows:
    """Each GPU with its streams, the busiest first, and what was sampled of it; host threads, those that launch first;
    tf.data's stages; the phases and layers of the GPU that runs most, or of the CPU."""
    out = Rows()
    device_kind, host_kind = _kinds(trace)
    device, host = trace.device, trace.host
    line_of_row = _device_order(trace)
    counters, out.no_counters = counter_rows(trace)
    of_counter: list[tuple[int, NamedSpans]] = []  # by row
    order_of_rows, device_depth, bounds = _sorted(
        trace, device.line, device.start_ns, device.end_ns, device.name, line_of_row)
    out.of_device = order_of_rows
    for gpu in sorted(np.unique(device.gpu).tolist(), key=lambda g: gpu_number(trace, g)):
        number = gpu_number(trace, gpu)
        group = f"GPU {number}" + (f" {trace.gpus[gpu].host}" if len(trace.hosts) > 1 else "")
        above = out.add("gpu", f"GPU {number}", group, number, 0, 0)
        out.streams[above] = [
            out.add("stream", trace.lines[line].name, group, number, *bounds[line],
                    int(device_depth[slice(*bounds[line])].max()))
            for line in line_of_row if line in bounds and trace.lines[line].gpu == gpu]
        for counter in counters:
            if counter.gpu == number:
                of_counter.append((out.add("counter", counter.label, group, number, 0, 0), counter.spans))
                out.rows[-1] = replace(out.rows[-1], unit=counter.unit, full_scale=counter.full_scale)
    order = _host_order(trace)
    out.threads = labels(trace, order)
    order_of_rows, host_depth, bounds = _sorted(trace, host.line, host.start_ns, host.end_ns, host.name, order)
    out.of_host, before = order_of_rows, len(out.of_device)
    for line in order:
        if line in bounds:
            first, last = bounds[line]
            out.add("thread", out.threads[line], _host_group(trace, trace.lines[line]), None, before + first,
                    before + last, int(host_depth[first:last].max()))
    _add_stages(trace, out)
    layers = layer_spans(trace, steps)
    first = len(out.of_device) + len(out.of_host) + len(out.of_stage)
    if len(layers.start):
        gpu = gpu_number(trace, layers.gpu) if layers.gpu >= 0 else None  # None: of the CPU
        out.add("layer", "phase", "Model", gpu, first, first + len(layers.start), int(layers.depth.max()))
        first += len(layers.start)
    out.spans = layers.followed_by(NamedSpans())
    for key, spans in of_counter:
        out.bounds[key] = (first, first + len(spans.start))
        out.spans, first = out.spans.followed_by(spans), out.bounds[key][1]
    out.kind = np.concatenate((device_kind[out.of_device], host_kind[out.of_host], host_kind[out.of_stage],
                               out.spans.kind))
    flat = np.zeros(len(out.of_stage), np.uint16)
    out.depth = np.concatenate((device_depth, host_depth, flat, out.spans.depth))
    return out


def _host_group(trace: Trace, thread: Line) -> str:
    """The heading of a thread's host: "Host node1"; of a job of several ranks "Host node1 rank 2, GPU 2"."""
    words = ["Host", thread.host] if thread.host else ["Host"]
    if len({line.rank for line in trace.lines}) > 1:
        gpus = [gpu_number(trace, i) for i, gpu in enumerate(trace.gpus) if (gpu.host, gpu.rank) == (
            thread.host, thread.rank)]
        words.append(f"rank {thread.rank}" + (f", GPU{'s' if len(gpus) > 1 else ''} {ranges(gpus)}" if gpus else ""))
    return " ".join(words)


def _kinds(trace: Trace) -> tuple[U8, U8]:
    """The kinds of the device events and of the host events, as indices into KINDS."""
    of_kind = np.array([KINDS.index(_OF_DEVICE[kind]) for kind in Kind], np.uint8)
    is_input = name_mask(trace, _INPUT_CALL).take(trace.host.name) | lines_of(trace, INPUT).take(trace.host.line)
    return (of_kind[trace.device.kind], np.where(is_input, KINDS.index("input"), KINDS.index("host")).astype(np.uint8))


def _device_order(trace: Trace) -> list[int]:
    """Lines of streams: by GPU, the busiest first."""
    device = trace.device
    busy = np.bincount(device.line, weights=device.end_ns - device.start_ns, minlength=len(trace.lines))
    lines = np.unique(device.line).tolist()
    return sorted(lines, key=lambda line: (
        gpu_number(trace, trace.lines[line].gpu), -busy[line], trace.lines[line].name, line))


def _host_order(trace: Trace) -> list[int]:
    """Lines of threads: by host and rank, those that launch most first, then by role, then by time in events."""
    host, launch = trace.host, trace.device.launch_line
    launches = np.bincount(launch[launch >= 0], minlength=len(trace.lines))
    busy = np.bincount(host.line, weights=host.end_ns - host.start_ns, minlength=len(trace.lines))
    return sorted(np.unique(host.line).tolist(), key=lambda line: (
        trace.lines[line].host, trace.lines[line].rank, -launches[line], _ROLES.index(role(trace.lines[line].name)),
        -busy[line], trace.lines[line].name, line))


def _sorted(
    trace: Trace, line: npt.NDArray, start: I64, end: I64, name: npt.NDArray, order: list[int],
) -> tuple[I64, npt.NDArray[np.uint16], dict[int, tuple[int, int]]]:
    """Events in the order of their lines given by ``order``, their depths, and by line the first and one after the
    last."""
    rank = np.zeros(len(trace.lines) + 1, np.int32)
    rank[order] = np.arange(len(order))
    of_event = rank[line]
    by_line = nesting_order(of_event, start, end, name, trace.names)
    of_event = of_event[by_line]
    depth = np.minimum(depths(of_event, start[by_line], end[by_line]), np.iinfo(np.uint16).max).astype(np.uint16)
    edges = np.searchsorted(of_event, np.arange(len(order) + 1)).tolist()
    return by_line, depth, {line_number: (edges[i], edges[i + 1]) for i, line_number in enumerate(order)}


def _add_stages(trace: Trace, out: Rows) -> None:
    """A row for each stage of tf.data's pipelines, its calls on all threads together."""
    rows, path, paths = iterator_paths(trace)
    if not len(rows):
        return
    # Of ranges that begin together the longest comes first, as in every other row.
    by_path = np.lexsort((-trace.host.end_ns[rows], trace.host.start_ns[rows], path))
    edges = np.searchsorted(path[by_path], np.arange(len(paths) + 1)).tolist()
    out.of_stage = rows[by_path]
    before = len(out.of_device) + len(out.of_host)
    last = [p.rpartition("::")[2] for p in paths]
    for i, text in enumerate(paths):
        label = last[i] if last.count(last[i]) == 1 else text.removeprefix("Root::")
        out.add("stage", label, "tf.data", None, before + edges[i], before + edges[i + 1])


def tracks(start: I64, end: I64, kind: U8) -> tuple[Spans, list[tuple[int, Spans]]]:
    """Spans in which a row shows any range, and the same divided into exclusive kinds: (index into KINDS, its part)."""
    codes = [code for code in map(KINDS.index, _KIND_PRECEDENCE) if (kind == code).any()]
    if len(codes) == 1:
        whole = union(start, end)
        return whole, [(codes[0], whole)]
    parts: list[tuple[int, Spans]] = []
    whole = union(start[:0], end[:0])
    for code in codes:
        spans = union(start[kind == code], end[kind == code])
        parts.append((code, subtract(spans, whole)))
        whole = merge(whole, spans)
    return whole, parts


_MAX_GAP = 2.5  # intervals: after a longer pause a sample tells of one interval alone
_IN_LABEL = {BYTES_PER_S: " GB/s", HERTZ: " MHz"}  # the figure beside the row has no room for these units


class CounterRow(Struct, frozen=True):
    """One metric of one GPU (the job's number); a span for each sample, its level against ``full_scale``."""

    gpu: int
    label: str
    unit: str
    full_scale: float
    spans: NamedSpans


def counter_rows(trace: Trace) -> tuple[list[CounterRow], str]:
    """The rows by GPU, in the order of the lanes of the monitor, and why a capture by gputop has none of some GPUs."""
    counters = trace.counters
    if counters is None:  # of another tool
        return [], ""
    if not counters.gpus:
        return [], counters.reason or "no GPU was sampled during the capture"
    if not trace.origin_ns:
        return [], "the trace does not show when it was captured"
    ends = np.round(np.array(counters.times_s, np.float64) * 1e9).astype(np.int64) - trace.origin_ns
    largest: dict[str, float] = {}
    for lane_of in counters.gpus.values():
        for metric, lane in lane_of.items():
            largest[metric] = max(largest.get(metric, 0.0), *(v or 0.0 for v in lane.values), 0.0)
    rows = [_row(gpu, metric, lane_of[metric], _starts(ends, counters), ends, largest[metric] or 1.0, trace.window_ns)
            for gpu, lane_of in sorted(counters.gpus.items()) for metric in GPU_METRICS if metric in lane_of]
    rows = [row for row in rows if len(row.spans.start)]
    return rows, counters.reason if rows else "there are no samples in the recorded time"


def _starts(ends: I64, counters: GpuCounters) -> I64:
    """Time since which each sample counts: that of the one before it; one interval before the first or after a
    pause."""
    usual = round(counters.interval_s * 1e9)
    before = np.append(ends[:1] - usual, ends[:-1])
    return np.where(ends - before > _MAX_GAP * usual, ends - usual, before)


def _row(gpu: int, metric: str, lane: CounterLane, starts: I64, ends: I64, largest: float,
         window_ns: tuple[int, int]) -> CounterRow:
    """``largest``: of all GPUs, the scale of a metric that has none of its own."""
    about, scale = GPU_METRICS[metric], lane.full_scale or largest
    values = np.array([np.nan if value is None else value for value in lane.values], np.float64)
    start, end = np.maximum(starts, window_ns[0]), np.minimum(ends, window_ns[1])
    sampled = np.flatnonzero(np.isfinite(values) & (end > start))
    full = "" if about.unit == RATIO or lane.full_scale is None else f" of {reading(Reading(scale, about.unit))}"
    names = [f"{about.label} {reading(Reading(value, about.unit))}{full}" for value in values[sampled].tolist()]
    spans = NamedSpans(
        -1, start[sampled], end[sampled], np.arange(len(sampled)), np.zeros(len(sampled), np.uint16),
        np.full(len(sampled), KINDS.index("counter"), np.uint8), names,
        np.clip(values[sampled] / scale, 0, 1).astype(np.float32))
    return CounterRow(gpu, about.label + _IN_LABEL.get(about.unit, ""), about.unit, scale, spans)

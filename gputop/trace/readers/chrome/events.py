"""One Chrome trace file as columns, read in one pass."""

from __future__ import annotations

import math
import re
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from functools import cache, lru_cache
from itertools import count
from operator import attrgetter
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec import UNSET, Struct, field

from gputop.core.errors import GputopError, NoDataError
from gputop.trace import kernel_names
from gputop.trace.builder import IGNORED_EVENT, TraceBuilder, encodable
from gputop.trace.model import F64, I64, TEXT_STATS, Kind
from gputop.trace.readers.chrome import records
from gputop.trace.readers.chrome.json_stream import read_list
from gputop.trace.readers.content import MemoryWatch, too_big

DEVICE_CATEGORIES = {"kernel": Kind.COMPUTE, "gpu_memcpy": Kind.COPY_OTHER, "memcpy": Kind.COPY_OTHER,
                     "gpu_memset": Kind.MEMSET, "memset": Kind.MEMSET}
HOST = -1  # in the column ``category``; else the Kind of the category
_TS, _DUR, _CATEGORY, _ROW = (attrgetter(*names) for names in (("ts",), ("dur",), ("cat",), ("pid", "tid")))
_SHAPE = attrgetter("grid", "block", "registers", "shared", "occupancy")
# What an event is by its category: a number of its own where its arguments are read in a way of their own.
_ANY, _CALL, _PYTHON, _RANGE, _NO_CATEGORY, _OVERHEAD, _SKIPPED, _RECORDED = range(-1, -9, -1)
_GROUPS = {
    **DEVICE_CATEGORIES, "cpu_op": _CALL, "cuda_runtime": _CALL, "cuda_driver": _CALL, "python_function": _PYTHON,
    "user_annotation": _RANGE, "": _NO_CATEGORY, "trace": _RECORDED,
    "overhead": _OVERHEAD, **dict.fromkeys(("gpu_user_annotation", "ac2g", "fwdbwd", "async_cpu_to_gpu"), _SKIPPED)}
# CUPTI's overheads that are CUDA's, also without a profiler: code comes to the GPU at its first use.
CODE_LOADING = ("Runtime Triggered Module Loading", "Lazy Function Loading", "Driver Compiler")
_MEMBERS = frozenset(("distributedInfo", "baseTimeNanoseconds", "host_name", "deviceProperties", "otherData"))
_RECORDING = "PyTorch Profiler ("  # kineto's event that lasts as long as the recording
# Phases of spans that belong to no thread and need not nest, with those that Chrome no longer writes; and phases of
# spans whose begin and end are two events.
_ASYNCHRONOUS, _BEGINS_OR_ENDS = frozenset("bneSTpF"), frozenset("BE")
_SPANS_AND_FLOWS = frozenset("Xstf")
_NCCL_CATEGORIES = frozenset(("GROUP", "GROUP_API", "COLL", "COLL_API", "P2P", "P2P_API", "PROXY", "NET"))
_HOROVOD_NAME = "NEGOTIATE_"
_EXAMPLE_CHARS = 48  # of a span's name
_RECORD_AGAIN = "Record the job with the PyTorch profiler, or with `nsys profile --trace=cuda,nvtx`"
_STEP = re.compile(r"ProfilerStep#(\d{1,15})$")
_COPY_ENDS = re.compile(r"\((\w+) -> (\w+)\)")
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+>$")  # of the object whose method is called: another name for each
# The surest first: a host may be called node03.
_RANKS_IN_NAME = tuple(re.compile(rf"{word}[_-]?(\d{{1,6}})", re.IGNORECASE) for word in ("rank", "worker", "node"))
_GRADIENT, _REDUCES = "torch::autograd::AccumulateGrad", re.compile(r"nccl:(?:all_?reduce|_?reduce_scatter)")
# PyTorch's own convolutions on the CPU, without oneDNN.
_OWN_CONVOLUTIONS = frozenset(("aten::_slow_conv2d_forward", "aten::_nnpack_spatial_convolution"))
# PyTorch's gradients of embedding tables that fill a whole table: where among their inputs its number of rows stands.
_DENSE_TABLES = {"aten::embedding_dense_backward": 2, "aten::_embedding_bag_dense_backward": 5}
_SIZED = frozenset((_GRADIENT, *_DENSE_TABLES, *_OWN_CONVOLUTIONS))
_MAX_DIMENSIONS = 64  # as many as a tensor of PyTorch can have
_MAX_DEVICE = 1 << 20

# Of each event; ``row`` numbers its (pid, tid).
EVENT = np.dtype([("ts", "f8"), ("dur", "f8"), ("correlation", "i8"), ("row", "i4"), ("name", "i4"),
                  ("category", "i1")])
# Of those with arguments that may be of a device, ``at`` being their index: ``stream`` numbers the (pid, stream) where
# the arguments name a stream; ``bytes`` are of a copy or memset, ``message_bytes`` of a collective.
DETAIL = np.dtype([("at", "i8"), ("bytes", "i8"), ("message_bytes", "i8"), ("stream", "i4"), ("device", "i4"),
                   ("tf_op", "i4"), ("shape", "i4"), ("src", "u1"), ("dst", "u1")])
# Stats of host events in TensorFlow's exports, all of them text there: kept sparse, as numbers and as names.
_NUMBERS = frozenset(("is_func", "tracing_count", "iter_num", "buffered_elements", "id", "parent_id", "parallelism",
                      "buffer_limit", "cpu_budget"))
_HASHES = frozenset(("id", "parent_id"))  # all 64 bits, so half of them are negative
_STATS = (*_NUMBERS, *TEXT_STATS)
# Memory of one event until the trace is assembled, in both forms of its columns.
_EVENT_BYTES = 4 * EVENT.itemsize
# What an allocator of PyTorch holds after an allocation or a release, as profile_memory=True records it.
_MEMORY = "[memory]"
MEMORY = np.dtype([("ts", "f8"), ("allocated", "i8"), ("gpu", "i4")])  # gpu -1: host memory
_CPU_DEVICE = 0  # c10::DeviceType


class ChromeFile(Struct):
    """A file's complete events (dtype ``EVENT``, times in µs), and what names its processes and threads."""

    path: str
    rank: int
    host: str
    base_ns: int  # Unix time of ts 0, or 0
    devices: dict[int, dict[str, Any]]
    events: npt.NDArray[np.void]
    details: npt.NDArray[np.void]
    rows: list[tuple[Any, Any]]
    processes: dict[Any, str]
    threads: dict[tuple[Any, Any], str]
    damaged: bool
    simulated: bool  # gputop has made it of a simulated job
    window_us: tuple[float, float] | None = None  # begin and end of the recording itself, where kineto wrote them
    stats: dict[str, tuple[I64, I64]] = field(default_factory=dict)  # name → (index into ``events``, value or name)
    memory: npt.NDArray[np.void] = field(default_factory=lambda: np.empty(0, MEMORY))


def read_file(path: str, pieces: Iterable[bytes], order: int, builder: TraceBuilder, limit_bytes: float) -> ChromeFile:
    """Read the file; ``order`` is its rank where the file does not say it. Names and launch shapes go to ``builder``.

    Raises GputopError where it is no Chrome trace or its events need more memory than ``limit_bytes``, NoDataError
    where its only spans are of kinds that are not read.
    """
    events = _Events(path, builder, limit_bytes, MemoryWatch(limit_bytes),
                     cache(lambda about: builder.shape(kernel_names.kineto_shape(*about))))
    members, has_list, damaged = read_list(_counted(pieces, builder), "traceEvents", _MEMBERS, events.take,
                                           records.decode_events, records.event_of)
    if not has_list and not damaged:
        raise GputopError(f"{path} is JSON but not a Chrome trace: it has no \"traceEvents\" list.",
                          "Give a trace exported by the PyTorch profiler, TensorBoard or JAX.")
    columns = events.columns()
    if not (columns["dur"] > 0).any() and (refusal := events.unread.refusal(path)) is not None:
        raise refusal
    if damaged and not events.seen:
        raise GputopError(f"{path} is not a Chrome trace, or it is truncated before its first event.",
                          "Give a trace exported by the PyTorch profiler, TensorBoard or JAX, or copy the file again.")
    info, base = members.get("distributedInfo"), members.get("baseTimeNanoseconds")
    rank = info.get("rank") if isinstance(info, dict) else None
    if not isinstance(rank, int) or not 0 <= rank < 1 << 31:
        name = path.rsplit("/", 1)[-1]
        in_name = next((match for pattern in _RANKS_IN_NAME if (match := pattern.search(name)) is not None), None)
        rank = int(in_name[1]) if in_name is not None else order
    devices, other = members.get("deviceProperties"), members.get("otherData")
    return ChromeFile(
        path, rank, text_of(members.get("host_name") or ""),
        base if isinstance(base, int) and 0 <= base < 1 << 61 else 0,
        {d["id"]: d for d in devices if isinstance(d, dict) and isinstance(d.get("id"), int)}
        if isinstance(devices, list) else {},
        columns, events.details(), list(events.rows), events.processes, events.threads, damaged,
        isinstance(other, dict) and other.get("simulated") is True, events.window_us, events.sparse(), events.memory())


def _counted(pieces: Iterable[bytes], builder: TraceBuilder) -> Iterator[bytes]:
    """The pieces, each giving the names as much more room."""
    for piece in pieces:
        builder.names.allow_for(len(piece))
        yield piece


class _UnreadSpans(Struct):
    """Number of events of spans that are not read, the name of the first, and which program writes such."""

    asynchronous: int = 0
    begins_and_ends: int = 0
    first_name: str = ""
    writer: str = ""

    def add(self, event: records.Event) -> None:
        """Count the event, if its phase is one of such spans."""
        phase, name = event.ph, event.name
        if phase in _ASYNCHRONOUS:
            self.asynchronous += 1
        elif phase in _BEGINS_OR_ENDS:
            self.begins_and_ends += 1
        else:
            return
        self.first_name = self.first_name or name
        if phase == "b" and event.cat in _NCCL_CATEGORIES:
            self.writer = "NCCL"
        elif phase == "B" and name.startswith(_HOROVOD_NAME):
            self.writer = "Horovod"

    def refusal(self, path: str) -> NoDataError | None:
        """Return what the file is, for one in which nothing else takes time; None without such spans."""
        if self.writer == "NCCL":
            return NoDataError(f"{path} is a dump of NCCL's profiler plugin: it shows collectives and network "
                               "transfers, but no GPU or thread activity.",
                               f"{_RECORD_AGAIN}; both show NCCL's kernels along with all others.")
        if self.writer == "Horovod":
            return NoDataError(f"{path} is a Horovod timeline: it shows when each tensor was reduced, but no GPU or "
                               "thread activity.", f"{_RECORD_AGAIN}.")
        if self.asynchronous:
            example = f', such as "{encodable(self.first_name[:_EXAMPLE_CHARS])}"' if self.first_name else ""
            return NoDataError(f"{path} has only asynchronous spans ({self.asynchronous:,} events{example}). These are "
                               "not on a thread or stream, so gputop cannot see what ran when.", f"{_RECORD_AGAIN}.")
        if self.begins_and_ends:
            return NoDataError(f"{path} stores the start and end of each span as separate events (\"B\" and \"E\"), "
                               "which gputop does not read.", f"{_RECORD_AGAIN}.")
        return None


@lru_cache(maxsize=4096)
def _group(category: str) -> int:
    return _GROUPS.get(category.lower(), _ANY)


class _Events(Struct):
    """Receives some events after the others and makes columns of what the trace needs of them."""

    path: str
    builder: TraceBuilder
    limit_bytes: float
    watch: MemoryWatch
    shape: Callable[[tuple[Any, ...]], int]  # of a launch, by what the arguments say
    seen: int = 0
    window_us: tuple[float, float] | None = None
    rows: defaultdict[Any, int] = field(default_factory=lambda: defaultdict(count().__next__))  # numbered as they come
    processes: dict[Any, str] = field(default_factory=dict)
    threads: dict[tuple[Any, Any], str] = field(default_factory=dict)
    unread: _UnreadSpans = field(default_factory=_UnreadSpans)
    _count: int = 0  # of events in the pieces
    _stats: dict[str, tuple[array[int], array[int]]] = field(default_factory=dict)
    _pieces: list[npt.NDArray[np.void]] = field(default_factory=list)
    _details: list[npt.NDArray[np.void]] = field(default_factory=list)
    _memory: tuple[array[Any], ...] = field(default_factory=lambda: (array("d"), array("q"), array("q")))

    def take(self, events: list[records.Event]) -> None:
        self.seen += len(events)
        self.watch.check(self.path)
        if self._count * _EVENT_BYTES > self.limit_bytes:
            raise too_big(self.path, self.limit_bytes)
        spans = [event for event in events if event.ph == "X"]
        for event in [event for event in events if event.ph not in _SPANS_AND_FLOWS]:
            self._other(event)
        if spans:
            self._spans(spans)

    def columns(self) -> npt.NDArray[np.void]:
        columns = _joined(self._pieces, EVENT)
        steps = {i: int(marker[1]) for i, name in enumerate(self.builder.names.list)
                 if (marker := _STEP.match(name)) is not None}
        if steps:
            rows = np.flatnonzero(np.isin(columns["name"], list(steps)))
            self._append("step_num", rows, np.array([steps[i] for i in columns["name"][rows].tolist()], np.int64), 0)
        return columns

    def details(self) -> npt.NDArray[np.void]:
        return _joined(self._details, DETAIL)

    def memory(self) -> npt.NDArray[np.void]:
        return np.array(list(zip(*self._memory, strict=True)), MEMORY)

    def sparse(self) -> dict[str, tuple[I64, I64]]:
        stats, self._stats = self._stats, {}
        return {name: (np.array(rows, np.int64), np.array(values, np.int64)) for name, (rows, values) in stats.items()}

    def _other(self, event: records.Event) -> None:
        args = event.args
        if event.ph == "M" and args is not None:
            name = "" if args.name is UNSET else text_of(args.name)
            if event.name == "process_name":
                self.processes[event.pid] = name
            elif event.name == "thread_name":
                self.threads[event.pid, event.tid] = name.strip()
        elif event.ph == "i" and event.name == _MEMORY and args is not None:
            allocated = records.integer(args.allocated)
            if records.finite(event.ts) and allocated >= 0:
                gpu = -1 if args.device_type == _CPU_DEVICE else min(records.integer(args.device_id), _MAX_DEVICE)
                for column, value in zip(self._memory, (event.ts, allocated, gpu), strict=True):
                    column.append(value)
        else:
            self.unread.add(event)

    def _spans(self, spans: list[records.Event]) -> None:
        spans, groups, ts, dur = self._kept(spans)
        names = [event.name for event in spans]
        args = [event.args or records.NO_ARGS for event in spans]
        python, ranges, calls, unnamed = (
            np.flatnonzero(groups == group) for group in (_PYTHON, _RANGE, _CALL, _NO_CATEGORY))
        for i in python.tolist():
            if " at 0x" in names[i]:
                names[i] = _ADDRESS.sub(">", names[i])
            if isinstance(args[i].call_from, str):
                self._append_one("called_from", i, self.builder.names[args[i].call_from])
        self._append("annotation", ranges, np.ones(len(ranges), np.int64), self._count)
        for i in ranges.tolist():
            if _REDUCES.match(names[i]):
                self._keep_elements(i, args[i])
        piece = np.empty(len(spans), EVENT)
        piece["ts"], piece["dur"], piece["category"], piece["correlation"] = ts, dur, np.maximum(groups, HOST), -1
        piece["name"] = np.fromiter(map(self.builder.names.__getitem__, names), np.int32, len(spans))
        piece["row"] = np.fromiter(map(self.rows.__getitem__, map(_ROW, spans)), np.int32, len(spans))
        of_calls = [args[i] for i in calls.tolist()]
        piece["correlation"][calls] = records.integers([about.correlation for about in of_calls])
        self._append("sequence", calls, records.integers([about.sequence for about in of_calls]), self._count)
        for i, about in zip(calls.tolist(), of_calls, strict=True):
            if about.input_type is not None or names[i] in _SIZED:
                self._keep_sizes(i, names[i], about)
        for i in unnamed.tolist():
            self._keep(i, args[i])
        detailed = np.array([i for i in np.flatnonzero((groups != _CALL) & (groups != _PYTHON)).tolist()
                             if args[i] is not records.NO_ARGS], np.int64)
        if len(detailed):
            self._detail(piece, detailed, [spans[i] for i in detailed.tolist()], [args[i] for i in detailed.tolist()])
        self._pieces.append(piece)
        self._count += len(piece)

    def _kept(self, spans: list[records.Event]) -> tuple[list[records.Event], npt.NDArray[np.int8], F64, F64]:
        """The spans that are read, with their groups, times and durations."""
        ts, dur = (np.fromiter(map(of, spans), np.float64, len(spans)) for of in (_TS, _DUR))
        groups = np.fromiter(map(_group, map(_CATEGORY, spans)), np.int8, len(spans))
        kept = (np.abs(ts) < records.MOST_US) & (dur >= 0) & (dur < records.MOST_US)
        for event in [spans[i] for i in np.flatnonzero(kept & (groups == _RECORDED)).tolist()]:
            if event.name.startswith(_RECORDING):
                begin, end = self.window_us or (event.ts, event.ts)
                self.window_us = min(begin, event.ts), max(end, event.ts + event.dur)
        kept &= groups > _SKIPPED
        for i in np.flatnonzero(groups == _OVERHEAD).tolist():
            kept[i] &= spans[i].name in CODE_LOADING
        for i in np.flatnonzero(groups == _NO_CATEGORY).tolist():
            kept[i] &= spans[i].pid != "Spans" and not spans[i].name.startswith(IGNORED_EVENT)
        if kept.all():
            return spans, groups, ts, dur
        return [spans[i] for i in np.flatnonzero(kept).tolist()], groups[kept], ts[kept], dur[kept]

    def _detail(self, piece: npt.NDArray[np.void], rows: I64, spans: list[records.Event],
                args: list[records.Args]) -> None:
        """Append what the arguments of events say of work on a device; ``rows`` is where these stand in the piece."""
        piece["correlation"][rows] = records.integers(
            [about.correlation_id if about.correlation == -1 else about.correlation for about in args])
        steps = records.integers([about.step_num for about in args])
        for i in np.flatnonzero(steps >= 0).tolist():
            if _STEP.match(spans[i].name) is None:
                self._append_one("step_num", int(rows[i]), int(steps[i]))
        details = np.empty(len(rows), DETAIL)
        details["at"] = rows + self._count
        details["device"] = np.minimum(records.integers([about.device for about in args]), _MAX_DEVICE)
        streams = [event.tid if about.stream is UNSET else about.stream
                   for event, about in zip(spans, args, strict=True)]
        if not set(map(type, streams)) <= {int, str}:
            streams = list(map(records.hashable, streams))
        of_rows = map(self.rows.__getitem__, zip([event.pid for event in spans], streams, strict=True))
        details["stream"] = np.fromiter(of_rows, np.int32, len(spans))
        details["message_bytes"] = [
            kernel_names.kineto_message_bytes(about.dtype, about.in_elements, about.out_elements) if about.dtype else -1
            for about in args]
        sizes, ops = records.integers([about.bytes for about in args]).tolist(), [-1] * len(args)
        ends = [_ends(event.name) for event in spans]
        shapes = list(map(self.shape, map(_SHAPE, args)))
        for i, about in enumerate(args):
            if about.memcpy_details:
                copy = kernel_names.copy_details(str(about.memcpy_details))
                sizes[i], ends[i] = copy.bytes if sizes[i] < 0 else sizes[i], ends[i] or (copy.src, copy.dst)
            if about.kernel_details and shapes[i] < 0 and isinstance(about.kernel_details, str):
                shapes[i] = self.builder.shape(kernel_names.launch_shape(about.kernel_details))
            if about.tf_op or about.hlo_op or about.hlo_module or about.annotation or about.op is not UNSET:
                ops[i] = _op(about, self.builder)
        details["bytes"], details["shape"], details["tf_op"] = sizes, shapes, ops
        details["src"], details["dst"] = np.array([pair or (0, 0) for pair in ends], np.uint8).T
        self._details.append(details)

    def _keep(self, i: int, args: records.Args) -> None:
        """Keep the stats of TensorFlow's event at ``i`` of the piece that is appended next."""
        for name in _STATS:
            raw = getattr(args, name)
            if raw is UNSET:
                continue
            if name in _HASHES and type(raw) is int and -(1 << 63) <= raw < 1 << 63:
                self._append_one(name, i, raw)
                continue
            value = records.integer(raw) if name in _NUMBERS else self.builder.names[str(raw)]
            if value >= 0:
                self._append_one(name, i, value)

    def _keep_sizes(self, i: int, name: str, args: records.Args) -> None:
        """Keep what PyTorch's op at ``i`` says of its inputs."""
        if name == _GRADIENT:
            self._keep_elements(i, args)
        elif name in _DENSE_TABLES:
            self._keep_table(i, args, _DENSE_TABLES[name])
        elif name in _OWN_CONVOLUTIONS and (batch := _first_size(records.plain(args.input_dims))) >= 0:
            self._append_one("batch", i, batch)
        if isinstance(args.input_type, list) and "double" in args.input_type:
            self._append_one("float64", i, 1)

    def _keep_elements(self, i: int, args: records.Args) -> None:
        shapes = records.plain(args.input_dims)
        elements = _elements(records.plain(args.old_input_dims) if shapes is UNSET else shapes)
        if elements >= 0:
            self._append_one("elements", i, elements)

    def _keep_table(self, i: int, args: records.Args, rows_at: int) -> None:
        shapes, values = records.plain(args.input_dims), records.plain(args.concrete_inputs)
        if not isinstance(shapes, list) or not isinstance(values, list) or len(values) <= rows_at:
            return
        gradient, indices, rows = _elements(shapes), _elements(shapes[1:]), records.integer(values[rows_at])
        width = records.integer(shapes[0][-1]) if gradient > 0 else -1
        if 0 < rows < 1 << 40 and 0 < width < 1 << 20 and indices > 0:
            for name, value in (("table_rows", rows), ("table_elements", rows * width), ("indices", indices)):
                self._append_one(name, i, value)

    def _append_one(self, name: str, i: int, value: int) -> None:
        rows, values = self._stats.setdefault(name, (array("q"), array("q")))
        rows.append(self._count + i)
        values.append(value)

    def _append(self, name: str, places: npt.NDArray[np.intp], values: I64, base: int) -> None:
        """Append those values of a stat that are not -1; ``places`` count from ``base`` on."""
        kept = values >= 0
        if kept.any():
            for column, numbers in zip(self._stats.setdefault(name, (array("q"), array("q"))),
                                       (places[kept] + base, values[kept]), strict=True):
                column.frombytes(numbers.astype(np.int64).tobytes())


def _joined(pieces: list[npt.NDArray[np.void]], dtype: np.dtype[np.void]) -> npt.NDArray[np.void]:
    """The pieces as one; empties the list."""
    joined = np.concatenate(pieces) if pieces else np.empty(0, dtype)
    pieces.clear()
    return joined


def text_of(value: Any) -> str:
    return encodable(str(value))


def _elements(shapes: Any) -> int:
    """Elements of the first input, a tensor (``[2, 3]``) or a list of tensors (``[[2], [3]]``); -1: not told."""
    first = shapes[0] if isinstance(shapes, list) and shapes else None
    if not isinstance(first, list) or not first:
        return -1
    sizes = [math.prod(size if 0 <= (size := records.integer(n)) < 1 << 40 else -1 for n in shape[:_MAX_DIMENSIONS])
             for shape in (first if isinstance(first[0], list) else [first]) if isinstance(shape, list)]
    return records.integer(sum(sizes)) if min(sizes, default=-1) >= 0 else -1


def _first_size(shapes: Any) -> int:
    """The first size of the first input; -1: not told."""
    first = shapes[0] if isinstance(shapes, list) and shapes else None
    return records.integer(first[0]) if isinstance(first, list) and first else -1


@lru_cache(maxsize=65536)
def _ends(name: str) -> tuple[int, int] | None:
    """The kinds of memory at both ends of a copy, where its name has them."""
    ends = _COPY_ENDS.search(name)
    return None if ends is None else (kernel_names.memory_kind(ends[1]), kernel_names.memory_kind(ends[2]))


def _op(args: records.Args, builder: TraceBuilder) -> int:
    op, hlo, module = (str(text or "") for text in (args.tf_op, args.hlo_op, args.hlo_module))
    if op and op != "XlaModule:":
        return builder.names[op]
    if isinstance(args.op, str) and args.name is not UNSET:  # a node of TensorFlow 1's graph
        return builder.names[f"{args.name}:{args.op}"] if args.name != "unknown" else -1
    if not hlo:
        hlo = kernel_names.op_of_annotation(str(args.annotation or ""))
    return builder.names[f"{module}/{hlo}" if module else hlo] if hlo else -1

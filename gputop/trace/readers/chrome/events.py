"""One Chrome trace file as columns, read in one pass."""

from __future__ import annotations

import math
import re
from array import array
from collections.abc import Iterable, Iterator
from typing import Any, TypeGuard

import numpy as np
import numpy.typing as npt
from msgspec import Struct, field

from gputop.core.errors import GputopError, NoDataError
from gputop.trace import kernel_names
from gputop.trace.builder import IGNORED_EVENT, TraceBuilder, encodable
from gputop.trace.model import I64, TEXT_STATS, Kind
from gputop.trace.readers.chrome.json_stream import read_list
from gputop.trace.readers.content import MemoryWatch, too_big

DEVICE_CATEGORIES = {"kernel": Kind.COMPUTE, "gpu_memcpy": Kind.COPY_OTHER, "memcpy": Kind.COPY_OTHER,
                     "gpu_memset": Kind.MEMSET, "memset": Kind.MEMSET}
HOST = -1  # in the column ``category``; else the Kind of the category
_WITHOUT_DETAILS = frozenset(("cpu_op", "cuda_runtime", "cuda_driver", "python_function"))
_SKIPPED_CATEGORIES = frozenset(("gpu_user_annotation", "trace", "overhead", "ac2g", "fwdbwd", "async_cpu_to_gpu"))
_MEMBERS = frozenset(("distributedInfo", "baseTimeNanoseconds", "host_name", "deviceProperties", "otherData"))
_RECORDING = "PyTorch Profiler ("  # kineto's event that lasts as long as the recording
# Phases of spans that belong to no thread and need not nest, with those that Chrome no longer writes; and phases of
# spans whose begin and end are two events.
_ASYNCHRONOUS, _BEGINS_OR_ENDS = frozenset("bneSTpF"), frozenset("BE")
_NCCL_CATEGORIES = frozenset(("GROUP", "GROUP_API", "COLL", "COLL_API", "P2P", "P2P_API", "PROXY", "NET"))
_HOROVOD_NAME = "NEGOTIATE_"
_EXAMPLE_CHARS = 48  # of a span's name
_RECORD_AGAIN = "Record the job with the PyTorch profiler, or with `nsys profile --trace=cuda,nvtx`"
_STEP = re.compile(r"ProfilerStep#(\d{1,15})$")
_DECIMAL = re.compile(r"\s{0,8}-?[0-9]{1,24}(?:\.[0-9]{0,24})?(?:[eE][-+]?[0-9]{1,3})?\s{0,8}")
_COPY_ENDS = re.compile(r"\((\w+) -> (\w+)\)")
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+>$")  # of the object whose method is called: another name for each
# The surest first: a host may be called node03.
_RANKS_IN_NAME = tuple(re.compile(rf"{word}[_-]?(\d{{1,6}})", re.IGNORECASE) for word in ("rank", "worker", "node"))
_GRADIENT, _REDUCES = "torch::autograd::AccumulateGrad", re.compile(r"nccl:(?:all_?reduce|_?reduce_scatter)")
# PyTorch's own convolutions on the CPU, without oneDNN.
_OWN_CONVOLUTIONS = frozenset(("aten::_slow_conv2d_forward", "aten::_nnpack_spatial_convolution"))
# PyTorch's gradients of embedding tables that fill a whole table: where among their inputs its number of rows stands.
_DENSE_TABLES = {"aten::embedding_dense_backward": 2, "aten::_embedding_bag_dense_backward": 5}
_MAX_DIMENSIONS = 64  # as many as a tensor of PyTorch can have
_BATCH = 1 << 14
_MAX_DEVICE = 1 << 20

# ``row`` and ``stream`` number the (pid, tid) of the event and, where its arguments name a stream, the (pid, stream);
# ``bytes`` are of a copy or memset, ``message_bytes`` of a collective.
EVENT = np.dtype([("ts", "f8"), ("dur", "f8"), ("correlation", "i8"), ("step", "i8"), ("bytes", "i8"),
                  ("message_bytes", "i8"), ("row", "i4"), ("stream", "i4"), ("name", "i4"), ("device", "i4"),
                  ("tf_op", "i4"), ("shape", "i4"), ("category", "i1"), ("src", "u1"), ("dst", "u1")])
# Stats of host events in TensorFlow's exports, all of them text there: kept sparse, as numbers and as names.
_NUMBERS = frozenset(("is_func", "tracing_count", "iter_num", "buffered_elements", "id", "parent_id", "parallelism",
                      "buffer_limit", "cpu_budget"))
_HASHES = frozenset(("id", "parent_id"))  # all 64 bits, so half of them are negative
_STATS = _NUMBERS.union(TEXT_STATS)
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
    events = _Events(path, builder, limit_bytes, MemoryWatch(limit_bytes))
    members, has_list, damaged = read_list(_counted(pieces, builder), "traceEvents", _MEMBERS, events.take)
    if not has_list and not damaged:
        raise GputopError(f"{path} is JSON, but not a Chrome trace: it has no list \"traceEvents\".",
                          "Give the trace that the PyTorch profiler, TensorBoard or JAX exported.")
    columns = events.columns()
    if not (columns["dur"] > 0).any() and (refusal := events.unread.refusal(path)) is not None:
        raise refusal
    if damaged and not events.seen:
        raise GputopError(f"{path} is not a Chrome trace, or is cut off before its first event.",
                          "Give the trace that the PyTorch profiler, TensorBoard or JAX exported; copy it again.")
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
        columns, events.rows, events.processes, events.threads, damaged,
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

    def add(self, event: dict[str, Any], phase: str) -> None:
        """Count the event, if its phase is one of such spans."""
        if phase in _ASYNCHRONOUS:
            self.asynchronous += 1
        elif phase in _BEGINS_OR_ENDS:
            self.begins_and_ends += 1
        else:
            return
        name = str(event.get("name", ""))
        self.first_name = self.first_name or name
        if phase == "b" and event.get("cat") in _NCCL_CATEGORIES:
            self.writer = "NCCL"
        elif phase == "B" and name.startswith(_HOROVOD_NAME):
            self.writer = "Horovod"

    def refusal(self, path: str) -> NoDataError | None:
        """Return what the file is, for one in which nothing else takes time; None without such spans."""
        if self.writer == "NCCL":
            return NoDataError(f"{path} is a dump of NCCL's profiler plugin: it shows collectives and network "
                               "transfers, but no work of a GPU or a thread.",
                               f"{_RECORD_AGAIN}; both show NCCL's kernels next to all others.")
        if self.writer == "Horovod":
            return NoDataError(f"{path} is Horovod's timeline: it shows when each tensor was reduced, but no work of a "
                               "GPU or a thread.", f"{_RECORD_AGAIN}.")
        if self.asynchronous:
            example = f', such as "{encodable(self.first_name[:_EXAMPLE_CHARS])}"' if self.first_name else ""
            return NoDataError(f"{path} has only asynchronous spans ({self.asynchronous:,} events{example}). "
                               "They lie on no thread or stream, so gputop cannot see what ran when.",
                               f"{_RECORD_AGAIN}.")
        if self.begins_and_ends:
            return NoDataError(f"{path} has the begins and ends of its spans as single events (\"B\" and \"E\"), which "
                               "gputop does not read.", f"{_RECORD_AGAIN}.")
        return None


class _Events(Struct):
    """Receives one event after the other and appends what the trace needs of it to columns."""

    path: str
    builder: TraceBuilder
    limit_bytes: float
    watch: MemoryWatch
    seen: int = 0
    window_us: tuple[float, float] | None = None
    rows: list[tuple[Any, Any]] = field(default_factory=list)
    processes: dict[Any, str] = field(default_factory=dict)
    threads: dict[tuple[Any, Any], str] = field(default_factory=dict)
    _row_numbers: dict[tuple[Any, Any], int] = field(default_factory=dict)
    _stats: dict[str, tuple[array[int], array[int]]] = field(default_factory=dict)
    _batch: list[tuple[Any, ...]] = field(default_factory=list)
    _pieces: list[npt.NDArray[np.void]] = field(default_factory=list)
    _memory: list[tuple[float, int, int]] = field(default_factory=list)
    _memory_pieces: list[npt.NDArray[np.void]] = field(default_factory=list)
    unread: _UnreadSpans = field(default_factory=_UnreadSpans)

    def take(self, event: Any) -> None:
        self.seen += 1
        if not self.seen % _BATCH:
            self.watch.check(self.path)
        if not isinstance(event, dict):
            return
        phase = event.get("ph")
        if phase == "X":
            self._complete(event)
        elif phase == "M":
            self._name(event)
        elif phase == "i" and event.get("name") == _MEMORY:
            self._allocation(event.get("ts"), event.get("args"))
        elif isinstance(phase, str):
            self.unread.add(event, phase)

    def memory(self) -> npt.NDArray[np.void]:
        pieces = [*self._memory_pieces, np.array(self._memory, MEMORY)]
        self._memory, self._memory_pieces = [], []
        return np.concatenate(pieces)

    def _allocation(self, ts: Any, args: Any) -> None:
        allocated = integer(args.get("Total Allocated")) if isinstance(args, dict) else -1
        if not _finite(ts) or allocated < 0:
            return
        gpu = -1 if args.get("Device Type") == _CPU_DEVICE else min(integer(args.get("Device Id")), _MAX_DEVICE)
        self._memory.append((ts, allocated, gpu))
        if len(self._memory) == _BATCH:
            self._memory_pieces.append(np.array(self._memory, MEMORY))
            self._memory.clear()

    def columns(self) -> npt.NDArray[np.void]:
        self._flush()
        pieces, self._pieces = self._pieces, []
        return np.concatenate(pieces) if pieces else np.empty(0, EVENT)

    def sparse(self) -> dict[str, tuple[I64, I64]]:
        stats, self._stats = self._stats, {}
        return {name: (np.array(rows, np.int64), np.array(values, np.int64)) for name, (rows, values) in stats.items()}

    def _keep(self, args: dict[str, Any]) -> None:
        """Keep the stats of the event that is appended next."""
        for name in args.keys() & _STATS:
            raw = args[name]
            if name in _HASHES and type(raw) is int and -(1 << 63) <= raw < 1 << 63:
                self._append_stat(name, raw)
                continue
            value = integer(raw) if name in _NUMBERS else self.builder.names[str(raw)]
            if value >= 0:
                self._append_stat(name, value)

    def _keep_elements(self, args: dict[str, Any]) -> None:
        elements = _elements(args.get("Input Dims", args.get("Input dims")))
        if elements >= 0:
            self._append_stat("elements", elements)

    def _keep_table(self, args: dict[str, Any], rows_at: int) -> None:
        shapes, values = args.get("Input Dims"), args.get("Concrete Inputs")
        if not isinstance(shapes, list) or not isinstance(values, list) or len(values) <= rows_at:
            return
        gradient, indices, rows = _elements(shapes), _elements(shapes[1:]), integer(values[rows_at])
        width = integer(shapes[0][-1]) if gradient > 0 else -1
        if 0 < rows < 1 << 40 and 0 < width < 1 << 20 and indices > 0:
            for name, value in (("table_rows", rows), ("table_elements", rows * width), ("indices", indices)):
                self._append_stat(name, value)

    def _append_stat(self, name: str, value: int) -> None:
        rows, values = self._stats.setdefault(name, (array("q"), array("q")))
        rows.append(len(self._pieces) * _BATCH + len(self._batch))
        values.append(value)

    def _flush(self) -> None:
        self.watch.check(self.path)
        if self._batch:
            self._pieces.append(np.array(self._batch, EVENT))
            self._batch.clear()
        if len(self._pieces) * _BATCH * _EVENT_BYTES > self.limit_bytes:
            raise too_big(self.path, self.limit_bytes)

    def _name(self, event: dict[str, Any]) -> None:
        args = event.get("args")
        if not isinstance(args, dict):
            return
        pid, name = hashable(event.get("pid")), text_of(args.get("name", ""))
        if event.get("name") == "process_name":
            self.processes[pid] = name
        elif event.get("name") == "thread_name":
            self.threads[pid, hashable(event.get("tid"))] = name.strip()

    def _complete(self, event: dict[str, Any]) -> None:
        ts, dur = event.get("ts"), event.get("dur", 0)
        if isinstance(ts, str) or isinstance(dur, str):  # some programs write all numbers so
            ts, dur = _number(ts), _number(dur)
        if not _finite(ts) or not _finite(dur) or dur < 0:
            return
        category, pid = str(event.get("cat", "")).lower(), hashable(event.get("pid"))
        if category == "trace" and str(event.get("name", "")).startswith(_RECORDING):
            begin, end = self.window_us or (ts, ts)
            self.window_us = min(begin, ts), max(end, ts + dur)
        if category in _SKIPPED_CATEGORIES or (category == "" and pid == "Spans"):
            return
        name, args = str(event.get("name", "")), event.get("args")
        if name.startswith(IGNORED_EVENT):
            return
        args = args if isinstance(args, dict) else {}
        if category == "user_annotation":
            self._append_stat("annotation", 1)
            if _REDUCES.match(name):
                self._keep_elements(args)
        elif category == "python_function":
            name = _ADDRESS.sub(">", name)
            if isinstance(args.get("CallFrom"), str):
                self._append_stat("called_from", self.builder.names[args["CallFrom"]])
        tid = hashable(event.get("tid"))
        row = self._row(pid, tid)
        index, kind = self.builder.names[name], DEVICE_CATEGORIES.get(category, HOST)
        if not args or category in _WITHOUT_DETAILS:  # most events, and only of the host
            correlation, sequence = integer(args.get("correlation")), integer(args.get("Sequence number"))
            if sequence >= 0:
                self._append_stat("sequence", sequence)
            if name == _GRADIENT:
                self._keep_elements(args)
            elif name in _DENSE_TABLES:
                self._keep_table(args, _DENSE_TABLES[name])
            types = args.get("Input type")
            if isinstance(types, list) and "double" in types:
                self._append_stat("float64", 1)
            if name in _OWN_CONVOLUTIONS and (batch := _first_size(args.get("Input Dims"))) >= 0:
                self._append_stat("batch", batch)
            self._batch.append((ts, dur, correlation, _step(name, args), -1, -1, row, row, index, -1, -1, -1, kind, 0,
                                0))
        else:
            correlation = integer(args.get("correlation", args.get("correlation_id")))
            size, src, dst = _copy(name, args)
            device = min(integer(args.get("device")), _MAX_DEVICE)
            stream = self._row(pid, hashable(args["stream"])) if "stream" in args else row
            if category == "":
                self._keep(args)
            self._batch.append((
                ts, dur, correlation, _step(name, args), size, kernel_names.kineto_message_bytes(args), row, stream,
                index, device, _op(args, self.builder), self.builder.shape(kernel_names.kineto_shape(args)), kind, src,
                dst))
        if len(self._batch) == _BATCH:
            self._flush()

    def _row(self, pid: Any, tid: Any) -> int:
        number = self._row_numbers.setdefault((pid, tid), len(self.rows))
        if number == len(self.rows):
            self.rows.append((pid, tid))
        return number


def hashable(value: Any) -> Any:
    return value if isinstance(value, (int, str)) else str(value)


def text_of(value: Any) -> str:
    return encodable(str(value))


def _number(value: Any) -> Any:
    """The number that a text spells; what is none as it is."""
    return float(value) if isinstance(value, str) and _DECIMAL.fullmatch(value) else value


def _finite(value: Any) -> TypeGuard[float]:
    """Return whether a value is a number of µs that, with any offset, fits an int64 of nanoseconds."""
    return isinstance(value, (int, float)) and -2e15 < value < 2e15


def _step(name: str, args: dict[str, Any]) -> int:
    marker = _STEP.match(name) if name.startswith("ProfilerStep#") else None
    return int(marker[1]) if marker else integer(args["step_num"]) if "step_num" in args else -1


def _elements(shapes: Any) -> int:
    """Elements of the first input, a tensor (``[2, 3]``) or a list of tensors (``[[2], [3]]``); -1: not told."""
    first = shapes[0] if isinstance(shapes, list) and shapes else None
    if not isinstance(first, list) or not first:
        return -1
    sizes = [math.prod(size if 0 <= (size := integer(n)) < 1 << 40 else -1 for n in shape[:_MAX_DIMENSIONS])
             for shape in (first if isinstance(first[0], list) else [first]) if isinstance(shape, list)]
    return integer(sum(sizes)) if min(sizes, default=-1) >= 0 else -1


def _first_size(shapes: Any) -> int:
    """The first size of the first input; -1: not told."""
    first = shapes[0] if isinstance(shapes, list) and shapes else None
    return integer(first[0]) if isinstance(first, list) and first else -1


def _copy(name: str, args: dict[str, Any]) -> tuple[int, int, int]:
    """Bytes and the kinds of memory at both ends, if the event is a copy or memset."""
    details = kernel_names.copy_details(str(args.get("memcpy_details", "")))
    size = integer(args.get("bytes"))
    ends = _COPY_ENDS.search(name)
    src, dst = (kernel_names.memory_kind(e) for e in ends.groups()) if ends else (details.src, details.dst)
    return size if size >= 0 else details.bytes, src, dst


def _op(args: dict[str, Any], builder: TraceBuilder) -> int:
    op, hlo, module = (str(args.get(k) or "") for k in ("tf_op", "hlo_op", "hlo_module"))
    if op and op != "XlaModule:":
        return builder.names[op]
    if isinstance(args.get("op"), str) and "name" in args:  # a node of TensorFlow 1's graph
        return builder.names[f"{args['name']}:{args['op']}"]
    if not hlo:
        hlo = kernel_names.op_of_annotation(str(args.get("annotation") or ""))
    return builder.names[f"{module}/{hlo}" if module else hlo] if hlo else -1


def integer(value: Any) -> int:
    """A non-negative integer that fits, also from text; -1 for everything else."""
    if isinstance(value, str) and re.fullmatch(r"[0-9]{1,18}", value):
        value = int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 62 else -1

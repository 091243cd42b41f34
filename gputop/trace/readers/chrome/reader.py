"""Chrome trace JSON into a Trace: of PyTorch's kineto, and exports of TensorBoard and JAX.

Times are microseconds, as floats. Several files are the ranks of one job. Files are streamed: the memory needed
grows with the number of events, not with the text (docs/contributing/trace-notes.md, "Chrome and kineto JSON").
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gputop.core.errors import GputopError
from gputop.core.findings import TraceNote
from gputop.trace import kernel_names, limits
from gputop.trace.builder import MAX_GPUS, TraceBuilder
from gputop.trace.derived_lines import STEPS, is_derived, streams
from gputop.trace.launch_join import Launches, set_launches
from gputop.trace.lookups import TORCH_HOST_MEMORY, Mask, by_line, computes_on_cpu, distinct
from gputop.trace.model import I64, AllocatorEvents, DeviceEvents, HostEvents, Kind, Line, StepEvents, Trace, TraceGpu
from gputop.trace.occupancy import sm_count, with_estimate
from gputop.trace.quality import note_empty_planes
from gputop.trace.readers.chrome.events import HOST, ChromeFile, read_file, text_of
from gputop.trace.readers.chrome.records import integer
from gputop.trace.readers.clock_file import HostClock, clocks_of
from gputop.trace.readers.content import as_utf8, memory_limit, read_chunks, tpu_error
from gputop.trace.threads import GRAPH_EXECUTOR, NOT_NUMBERED

_GPU_PROCESS = re.compile(r"/(?:device:GPU|gpu):(\d{1,3})(?!\d)")  # the second in early versions of TensorFlow 1
_GPU_PLANE, _TPU_PROCESS = re.compile(r"/device:GPU:(\d{1,3})$"), re.compile(r"/device:TPU:\d")  # in exports of XSpaces
_PROCESS_STREAM = re.compile(r"/(?:stream:(\w+)|memcpy Compute$)")
# TensorFlow 1's timeline of one session.run: the ops of a device are run by one executor, and a tid is a row of the
# drawing. What its GPUs do is there three times: by stream, of all streams, and copies apart.
_EXECUTOR = re.compile(r"/(?:device:)?([cg]pu:\d+) Compute$", re.IGNORECASE)
_TAKES_BATCH = re.compile(r"IteratorGetNext|QueueDequeue|Unstage")
_EDGE = re.compile(r"edge_\d+_(.+):MEMCPY")  # the copy of a node's result between the devices of its graph
_TIMED_OPS = "CUDA functions"  # a process of PyTorch before 1.8: each op of the host again, between two events of CUDA
_REPEATED = frozenset(("stream all", "stream memcpy"))
_AMD = re.compile(r"AMD|Radeon|Instinct|\bMI\d{3}", re.IGNORECASE)  # whose grids may be in threads, not in blocks
_NO_THREAD = re.compile(r"thread 0 \(")  # where kineto writes the Python functions of threads that run no op
_API = re.compile(r"(?:cu|cuda|hip)[A-Z]")
_ON_HOST_ALONE = re.compile(rf"{_API.pattern}|(?:aten|torch|autograd|c10d)::|\$|ProfilerStep#|\w+Op::|Eager|Executor")
_NS_PER_US = 1000
_NEITHER, _ON_HOST, _STEPS = -1, -2, -3


def read_files(files: Sequence[Path]) -> Trace:
    """The ranks of one job. Raises as :func:`read_chrome`, and GputopError for files that cannot be read."""
    damaged: set[str] = set()
    return read_chrome([(str(file), as_utf8(read_chunks(file, damaged))) for file in files], damaged=damaged,
                       limit_bytes=memory_limit(), known_clocks=clocks_of(files))


def read_chrome(files: Sequence[tuple[str, Iterable[bytes]]], *, damaged: Collection[str] = (),
                limit_bytes: float = float("inf"), known_clocks: Mapping[str, HostClock] | None = None) -> Trace:
    """One Trace from the JSON of one or several ranks, each given as its text in pieces.

    ``damaged`` names files known to be incomplete, by the time they have been read; ``known_clocks`` are, by path, what
    the capture measured of the hosts' clocks. A file among several that is no Chrome trace is left out with a note.
    Raises GputopError where none is one or the events of each need more memory than ``limit_bytes``, NoDataError where
    none has a complete event.
    """
    builder = TraceBuilder()
    loaded = _loaded(files, builder, limit_bytes)
    for file in loaded:
        if file.base_ns and (clock := (known_clocks or {}).get(file.path)) is not None:
            file.base_ns -= clock.offset_ns
    cut = sorted(f.path for f in loaded if f.damaged or f.path in damaged)
    if cut:
        builder.note("truncated", f"{', '.join(cut)}: truncated or damaged. gputop read "
                                  f"{sum(len(f.events) for f in loaded)} events before the damage; the rest is "
                                  "missing.")
    starts = [float(f.events["ts"].min()) if len(f.events) else 0.0 for f in loaded]
    clock_ns = _common_clock(loaded, starts, builder)
    gpus = [(d.get("computeMajor"), d.get("computeMinor"), d.get("numSms")) for f in loaded for d in f.devices.values()]
    paths = [f.path for f in loaded]
    ranks = [_Rank(file, start, at_ns, builder) for file, start, at_ns in zip(loaded, starts, clock_ns, strict=True)]
    for rank in ranks:
        rank.read()
    if cut and not builder.gpus and sum(rank.list_gpus() for rank in ranks):
        builder.note("no_device_events", "The trace names GPUs, but gputop could not read any GPU events, so it is "
                                         "unknown where the step's time goes.")
    is_unix = all(t > 10**18 for t in clock_ns)  # after 2001, so not since the machine started
    trace = builder.finish(paths, to_unix_ns=0 if is_unix else None, simulated=any(f.simulated for f in loaded),
                           windows_ns={rank.number: rank.window_ns for rank in ranks if rank.window_ns is not None},
                           empty_fix="Export the trace again from a run that was profiled while it worked, with the "
                                     "PyTorch profiler's export_chrome_trace(), TensorBoard or JAX.")
    if gpus:  # kineto, whose occupancy depends on the grid's size
        trace.occupancy_is = "estimated"
        if all(gpu == gpus[0] for gpu in gpus):
            trace.launch_shapes = [with_estimate(shape, *gpus[0]) for shape in trace.launch_shapes]
        if computes_on_cpu(trace):
            trace.quality.append(TraceNote("unused_gpu", "This trace shows no work on any GPU of the machine: the job "
                                                         "or the profiler used only the CPU."))
    return trace


def _loaded(files: Sequence[tuple[str, Iterable[bytes]]], builder: TraceBuilder,
            limit_bytes: float) -> list[ChromeFile]:
    """The files that can be read, by their ranks. Raises GputopError where there is none."""
    loaded, errors = [], []
    for order, (path, pieces) in enumerate(files):
        try:
            file = read_file(path, pieces, order, builder, limit_bytes)
            used = {file.rows[row][0] for row in distinct(file.events["row"]).tolist()}
            if tpus := [pid for pid in used if _TPU_PROCESS.match(file.processes.get(pid, ""))]:
                raise tpu_error(path, len(tpus))
            loaded.append(file)
        except GputopError as error:
            errors.append(error)
    if not loaded:
        raise errors[0]
    for bad in errors:
        builder.note("unreadable_file", f"{bad.message} gputop leaves out this file.")
    if len({file.rank for file in loaded}) < len(loaded):  # ranks that are not known or not unique: number the files
        for order, file in enumerate(loaded):
            file.rank = order
    return sorted(loaded, key=lambda file: file.rank)


def _common_clock(files: Sequence[ChromeFile], starts: Sequence[float], builder: TraceBuilder) -> list[int]:
    """Time of each file's first event on the job's clock, in nanoseconds."""
    # Whole microseconds and the rest are converted separately: the product of both exceeds a float's precision.
    first_ns = [file.base_ns + int(start) * _NS_PER_US + round((start - int(start)) * _NS_PER_US)
                for file, start in zip(files, starts, strict=True)]
    filled = [i for i, file in enumerate(files) if len(file.events)]
    last_us = {i: float((files[i].events["ts"] + files[i].events["dur"]).max()) for i in filled}
    ends = [first_ns[i] + round((last_us[i] - starts[i]) * _NS_PER_US) for i in filled]
    if filled and max(first_ns[i] for i in filled) >= min(ends):
        builder.note("no_common_clock", (
            "The files do not overlap in time: they do not share a clock or are not from the same capture. gputop "
            "aligned their starts; do not compare times between ranks."))
        return [0] * len(files)
    return first_ns


class _Rank:
    """One file on its way into ``builder``."""

    def __init__(self, file: ChromeFile, start_us: float, at_ns: int, builder: TraceBuilder) -> None:
        self._file, self._start_us, self._at_ns, self._builder = file, start_us, at_ns, builder
        self._gpus: dict[int, int] = {}
        if file.host and file.host not in builder.hosts:
            builder.hosts.append(file.host)

    @property
    def number(self) -> int:
        return self._file.rank

    @property
    def window_ns(self) -> tuple[int, int] | None:
        """Begin and end of the profiler itself, on the job's clock; None where the file does not say."""
        if self._file.window_us is None:
            return None
        begin, end = (round((time_us - self._start_us) * _NS_PER_US) + self._at_ns for time_us in self._file.window_us)
        return begin, end

    def read(self) -> None:
        details = self._file.details
        streams = self._file.events["row"].copy()
        streams[details["at"]] = details["stream"]
        ordinal = self._with_few_lines(self._ordinals(), streams)
        on_host, on_device = ordinal == _ON_HOST, ordinal >= 0
        host, device = self._file.events[on_host], self._file.events[on_device]
        steps = self._file.events[ordinal == _STEPS]
        self._file.events = self._file.events[:0]
        self._allocators()
        if all(_API.match(self._builder.names.list[name]) for name in distinct(host["name"]).tolist()):
            self._file.window_us = None  # what the host did is not recorded: it may be the profiler's own start
        if len(host):
            start, end = self._ns(host)
            nodes = np.isin(host["row"], [row for row, (pid, _) in enumerate(self._file.rows) if self._executor(pid)])
            events = HostEvents(self._lines(-1, host["row"]), self._names(host, nodes, on_host), start, end)
            row = np.cumsum(on_host) - 1
            for name, (rows, values) in self._file.stats.items():
                here = on_host[rows]
                if here.any():
                    events.stats[name] = (row[rows[here]], values[here])
            self._builder.host.append(events)
        if len(steps):
            self._builder.steps.append(StepEvents(steps["name"].copy(), *self._ns(steps)))
        if len(device):
            out = self._device(device, ordinal[on_device], streams[on_device])
            detailed = on_device[details["at"]]
            _add_details(out, (np.cumsum(on_device) - 1)[details["at"][detailed]], details[detailed])
            self._builder.device.append(out)
            if len(host):
                _join(out, self._builder.host[-1], host["correlation"].copy())
            if len(host) and nodes.any():
                _join_nodes(out, self._builder.host[-1], self._builder.names.list)
        elif planes := {int(gpu[1]) for name in self._file.processes.values() if (gpu := _GPU_PLANE.match(name))}:
            for number in sorted(planes & set(range(MAX_GPUS))):
                self._gpu(number)
            note_empty_planes(self._builder, self._file.host, [0] * len(planes), (), host["name"])

    def _names(self, host: npt.NDArray[np.void], nodes: Mask, on_host: Mask) -> npt.NDArray[np.int32]:
        """Names of events on the host: nodes of TensorFlow 1's graph are called as later versions call them."""
        name = host["name"].copy()
        if not nodes.any():
            return name
        names, details = self._builder.names, self._file.details
        op = np.full(len(on_host), -1, np.int32)
        op[details["at"]] = details["tf_op"]
        of_node = nodes & (op[on_host] >= 0)
        name[of_node] = op[on_host][of_node]
        for number in np.unique(host["name"][nodes]).tolist():
            if _TAKES_BATCH.match(names.list[number]):
                name[nodes & (host["name"] == number)] = names[f"{names.list[number]}Op::DoCompute"]
        return name

    def _with_few_lines(self, ordinal: I64, streams: npt.NDArray[np.int32]) -> I64:
        """Leave out the threads and streams with the fewest events, where the file has more than are read."""
        if not len(ordinal):
            return ordinal
        rows = np.where(ordinal >= 0, streams, self._file.events["row"])
        counts = np.bincount(rows)
        if np.count_nonzero(counts) <= limits.MAX_CHROME_LINES:
            return ordinal
        kept = np.zeros(len(counts), bool)
        kept[np.argsort(-counts, kind="stable")[:limits.MAX_CHROME_LINES]] = True
        self._builder.note("left_out", f"The trace has {np.count_nonzero(counts):,} threads and streams. gputop left "
                                       f"out the smallest ones, with {np.count_nonzero(~kept[rows]):,} events in "
                                       "total.")
        return np.where(kept[rows], ordinal, _NEITHER)

    def _allocators(self) -> None:
        """Add what this rank's allocators held, each under a name of its own."""
        memory, self._file.memory = self._file.memory, self._file.memory[:0]
        for gpu in np.unique(memory["gpu"]).tolist():
            of_gpu = memory[memory["gpu"] == gpu]
            in_use = of_gpu["allocated"].astype(np.int64)
            unknown = np.full(len(of_gpu), -1, np.int64)
            name = f"rank {self.number}: {TORCH_HOST_MEMORY if gpu < 0 else f'memory of GPU {gpu}'}"
            self._builder.allocator.append(AllocatorEvents(
                self._at_ns + np.rint((of_gpu["ts"] - self._start_us) * _NS_PER_US).astype(np.int64),
                np.full(len(of_gpu), self._builder.names[name], np.int32), in_use, unknown, in_use.copy(),
                np.full(len(of_gpu), -1, np.int32), np.zeros(len(of_gpu), bool), unknown, unknown.copy(),
                np.full(len(of_gpu), np.nan)))

    def list_gpus(self) -> int:
        """Add the GPUs that the file names, with events or without; returns their number."""
        for ordinal in self._file.devices:
            if 0 <= ordinal < MAX_GPUS:
                self._gpu(ordinal)
        return len(self._gpus)

    def _device(self, events: npt.NDArray[np.void], ordinal: I64, streams: npt.NDArray[np.int32]) -> DeviceEvents:
        out = DeviceEvents.empty(len(events))
        out.start_ns, out.end_ns = self._ns(events)
        out.name[:], out.correlation[:] = events["name"], events["correlation"]
        for number, on_gpu in by_line(ordinal).items():
            out.gpu[on_gpu] = gpu = self._gpu(number)
            out.line[on_gpu] = self._lines(gpu, streams[on_gpu])
        names, which = np.unique(out.name, return_inverse=True)
        out.kind[:] = np.array([kernel_names.classify(self._builder.names.list[i]).kind for i in names.tolist()],
                               np.uint8)[which]
        # The category distinguishes copies from kernels where the name does not.
        by_category = (events["category"] > Kind.COMPUTE) & (out.kind <= Kind.COLLECTIVE)
        out.kind[by_category] = events["category"][by_category]
        return out

    def _ordinals(self) -> I64:
        """Ordinal of the GPU that each event ran on, or _ON_HOST, _STEPS or _NEITHER."""
        events, file = self._file.events, self._file
        device_ids = np.array([integer(pid) for pid, _ in file.rows], np.int64)  # kineto: the process is the GPU
        by_names = self._ordinals_by_names(np.unique(events["row"][events["category"] == HOST]).tolist())
        if not len(events):
            return np.empty(0, np.int64)
        if (events["category"] == HOST).all() and (by_names < 0).all():
            by_names[self._nameless_streams()] = 0
        device = device_ids[events["row"]]
        with_device = file.details[file.details["device"] >= 0]
        device[with_device["at"]] = with_device["device"]
        device[device >= MAX_GPUS] = _NEITHER
        return np.where(events["category"] == HOST, by_names[events["row"]], device)

    def _ordinals_by_names(self, used: Sequence[int]) -> I64:
        """The same for rows without a category, by the names of their processes and threads; ``used`` have events."""
        out = np.full(len(self._file.rows), _NEITHER, np.int64)
        lines: dict[int, dict[str, list[int]]] = {}  # of each GPU those that may be streams
        for row in used:
            pid, tid = self._file.rows[row]
            name = self._row_name(pid, tid)
            gpu = _GPU_PROCESS.search(self._file.processes.get(pid, ""))
            if pid == _TIMED_OPS:
                self._builder.note("lost_kernels", (
                    "The file has no kernels, only times of ops on the GPU, which early versions of PyTorch took. "
                    "Record with torch.profiler.profile."))
            elif gpu is None or self._executor(pid):
                out[row] = _ON_HOST
            elif name == STEPS:
                out[row] = _STEPS
            elif not is_derived(name, tid):
                lines.setdefault(int(gpu[1]), {}).setdefault(name, []).append(row)
        for ordinal, of_gpu in lines.items():
            kept = streams(of_gpu)
            for name in kept:
                out[of_gpu[name]] = ordinal
            if left := of_gpu.keys() - kept - _REPEATED:
                self._builder.note_other_lines(self._file.host, ordinal, left)
        return out

    def _nameless_streams(self) -> list[int]:
        """Rows without any name or category, as tools that use CUPTI themselves write them, with work of a GPU alone:
        kernels, and nothing that only a host does."""
        events, file, names = self._file.events, self._file, self._builder.names.list
        on_gpu = np.array([kernel_names.only_on_gpu(name) for name in names])
        of_host = np.array([_ON_HOST_ALONE.match(name) is not None for name in names])
        rows = [row for row, (pid, tid) in enumerate(file.rows)
                if pid not in file.processes and (pid, tid) not in file.threads]
        surely, never = (set(distinct(events["row"][chosen[events["name"]]]).tolist()) for chosen in (on_gpu, of_host))
        return sorted((surely - never) & set(rows))

    def _executor(self, pid: Any) -> str:
        """The device, such as ``GPU:0``, whose ops this process of TensorFlow 1's timeline shows; "" of any other."""
        match = _EXECUTOR.search(self._file.processes.get(pid, ""))
        return match[1].upper() if match else ""

    def _ns(self, events: npt.NDArray[np.void]) -> tuple[I64, I64]:
        """Starts and ends. The first event's time is subtracted before the conversion to nanoseconds, because a
        float of microseconds since 1970 is exact to a quarter of a microsecond only."""
        start = np.rint((events["ts"] - self._start_us) * _NS_PER_US).astype(np.int64) + self._at_ns
        return start, start + np.rint(events["dur"] * _NS_PER_US).astype(np.int64)

    def _gpu(self, ordinal: int) -> int:
        if ordinal not in self._gpus:
            self._gpus[ordinal] = len(self._builder.gpus)
            about = self._file.devices.get(ordinal, {})
            major, minor, memory = (about.get(k) for k in ("computeMajor", "computeMinor", "totalGlobalMem"))
            self._builder.gpus.append(TraceGpu(
                self._file.host, ordinal, self._file.rank, str(about.get("name", "")),
                (major, minor) if isinstance(major, int) and isinstance(minor, int) else None,
                memory if isinstance(memory, int) else None,
                None if _AMD.search(str(about.get("name", ""))) else sm_count(about.get("numSms"))))
        return self._gpus[ordinal]

    def _row_name(self, pid: Any, tid: Any) -> str:
        if executor := self._executor(pid):
            return f"{GRAPH_EXECUTOR} {executor}/{tid}"
        stream = _PROCESS_STREAM.search(self._file.processes.get(pid, ""))  # TensorFlow 1 makes each stream a process
        if (pid, tid) == (0, 0) and _NO_THREAD.match(self._file.threads.get((pid, tid), "")):
            return NOT_NUMBERED
        return f"stream {stream[1] or 'memcpy'}" if stream else self._file.threads.get((pid, tid), "")

    def _lines(self, gpu: int, rows: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        """New lines of the trace for the rows of the file, numbered as they first occur."""
        distinct, first, which = np.unique(rows, return_index=True, return_inverse=True)
        lines = np.empty(len(distinct), np.int32)
        for i in np.argsort(first).tolist():
            pid, tid = self._file.rows[int(distinct[i])]
            name = self._row_name(pid, tid) or text_of(f"stream {tid}" if gpu >= 0 else f"thread {tid}")
            lines[i] = self._builder.add_line(Line(self._file.host, gpu, name, self._file.rank))
        return lines[which]


def _add_details(out: DeviceEvents, rows: I64, details: npt.NDArray[np.void]) -> None:
    """Add what is known of the events of these rows."""
    kinds = out.kind[rows]
    moves = kinds > Kind.COLLECTIVE  # copies and memsets
    out.tf_op[rows], out.shape[rows] = details["tf_op"], details["shape"]
    out.bytes[rows] = np.where(moves, details["bytes"],
                               np.where(kinds == Kind.COLLECTIVE, details["message_bytes"], -1))
    out.src[rows] = np.where(moves & (kinds != Kind.MEMSET), details["src"], 0)
    out.dst[rows] = np.where(moves, details["dst"], 0)


def _join(device: DeviceEvents, host: HostEvents, correlation: I64) -> None:
    calls = np.flatnonzero(correlation > 0)
    none = np.full(len(calls), -1, np.int64)
    call = Launches(correlation[calls], none, host.start_ns[calls], ()).find(device.correlation, device.correlation)
    set_launches(device, np.append(calls, -1)[call], host.start_ns, host.end_ns, host.line)


def _join_nodes(device: DeviceEvents, host: HostEvents, names: Sequence[str]) -> None:
    """Set the launches of a graph's kernels to their nodes' ops on the host, of those that ran once: within the op, or
    at its end, as the launch itself is not recorded. The host issues copies of results later, when they begin."""
    nodes, first, count = np.unique(host.name, return_index=True, return_counts=True)
    by_node = {names[node].rpartition(":")[0]: node for node in nodes.tolist()}
    edges = {op: by_node.get(edge[1], -1) for op in distinct(device.tf_op).tolist()
             if op >= 0 and (edge := _EDGE.match(names[op]))}
    node_of = np.array([edges.get(op, op) for op in device.tf_op.tolist()], np.int64)
    index = np.minimum(np.searchsorted(nodes, node_of), len(nodes) - 1)
    rows = np.flatnonzero((node_of >= 0) & (nodes[index] == node_of) & (count[index] == 1))
    op = first[index[rows]]
    started = device.start_ns[rows] >= host.start_ns[op]
    rows, op = rows[started], op[started]
    is_copy = node_of[rows] != device.tf_op[rows]
    latest = np.where(is_copy, device.start_ns[rows], host.end_ns[op])
    device.launch_ns[rows] = np.minimum(device.start_ns[rows], latest)
    device.launch_end_ns[rows], device.launch_line[rows] = np.maximum(host.end_ns[op], latest), host.line[op]

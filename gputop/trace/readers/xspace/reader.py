"""XSpaces of the profiler servers of TensorFlow and JAX into a Trace (docs/contributing/trace-notes.md, "XSpace")."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import numpy as np

from gputop.core.errors import GputopError
from gputop.trace import kernel_names, limits
from gputop.trace.builder import IGNORED_EVENT, Collected, TraceBuilder, joined_stats
from gputop.trace.derived_lines import STEPS, is_derived, streams
from gputop.trace.int_map import IntMap, LazyTable
from gputop.trace.launch_join import Launches, set_launches
from gputop.trace.model import (
    I32,
    I64,
    AllocatorEvents,
    DeviceEvents,
    HostEvents,
    Kind,
    Line,
    StepEvents,
    Trace,
    TraceGpu,
)
from gputop.trace.occupancy import sm_count
from gputop.trace.parallel import pool
from gputop.trace.quality import (
    INSUFFICIENT_RIGHTS,
    note_clipping,
    note_empty_planes,
    note_messages,
    note_serialized,
    note_unrecorded,
)
from gputop.trace.readers.clock_file import HostClock, read_clocks
from gputop.trace.readers.clock_skew import HostSlices, align
from gputop.trace.readers.content import Data, MemoryWatch, memory_limit, read_all, too_big
from gputop.trace.readers.xspace.hlo import Program, find_programs
from gputop.trace.readers.xspace.hlo_work import hlo_op
from gputop.trace.readers.xspace.recordings import split_recordings, unrecorded_between
from gputop.trace.readers.xspace.stats import (
    floats,
    indices_in,
    integers,
    lookups,
    op_names,
    set_copies,
    strings,
    whole_numbers,
)
from gputop.trace.readers.xspace.wire import LENGTH, Steps, read_fields, tag
from gputop.trace.readers.xspace.xplane import Chunk, Losses, Source, XLine, XPlane, read_events, read_plane

_PLANES, _ERRORS, _WARNINGS, _HOSTNAMES = (tag(number, LENGTH) for number in (1, 2, 3, 4))
_TPU_PLANE = "/device:TPU:"
_GPU_PLANE = re.compile(r"/device:GPU:(\d{1,3})(?!\d)")
_SIMULATED_PLANE = "/gputop:simulated"
_ALLOCATOR = ("MemoryAllocation", "MemoryDeallocation")

# Of one file; the hosts' names and messages that are looked at, and the bytes of each.
_AT_MOST = {_PLANES: limits.MAX_PLANES, _ERRORS: limits.MAX_MESSAGES, _WARNINGS: limits.MAX_MESSAGES,
            _HOSTNAMES: limits.MAX_MESSAGES}
_COUNTED = {_PLANES: "planes", _ERRORS: "errors", _WARNINGS: "warnings", _HOSTNAMES: "host names"}
_MAX_TEXT_BYTES = 4 * limits.MAX_NOTE_CHARS
_MANY_LINES = 256  # in a file with more of them short ones are decoded together

# The most memory that one event takes until the trace is assembled.
_EVENT_BYTES = 250

_DEVICE_STATS = ("correlation_id", "memcpy_details", "kernel_details", "tf_op", "annotation", "hlo_op",
                 "hlo_module", "program_id", "cuda_graph_id")
_INTEGER_STATS = ("step_num", "group_id", "_r", "is_func", "tracing_count", "iter_num", "buffered_elements",
                  "id", "parent_id", "parallelism", "buffer_limit", "cpu_budget")
_STRING_STATS = ("eager_op", "tf_function_call", "function_name", "name", "shapes")
_LAUNCH_STATS = ("correlation_id", "device_id", "memcpy_details")
_ALLOCATOR_STATS = ("allocator_name", "bytes_allocated", "bytes_available", "peak_bytes_in_use", "tf_op",
                    "allocation_bytes", "addr", "fragmentation", "region_type")
_HOST_STATS = (*_INTEGER_STATS, *_STRING_STATS, *_LAUNCH_STATS, *_ALLOCATOR_STATS)
# XLA's ops on a CPU: what they are, and the numbers that link their start to their end, "end: " and their name.
_CPU_STATS = ("hlo_op", "hlo_module", "program_id", "_p", "_c")
_END = "end: "


@dataclass(slots=True)
class _HostCalls:
    """Host events with a correlation id: the calls that launched device events."""

    correlation: I64
    device_id: I64
    start_ns: I64
    end_ns: I64
    line: I32 | I64
    name: I32 | I64
    details: I32 | I64  # of copies, an index of the names

    def __len__(self) -> int:
        return len(self.correlation)

    @classmethod
    def empty(cls) -> _HostCalls:
        wide, narrow = np.empty(0, np.int64), np.empty(0, np.int32)
        return cls(wide, wide, wide, wide, narrow, narrow, narrow)


class _Gpu(NamedTuple):
    """A GPU whose plane is read: its place among those of the trace, the plane's texts by the ids of references, and
    the launch shapes (indices of the builder's) by the names of kernels' details."""

    number: int
    references: IntMap
    shape_of: LazyTable
    source: Source


def read_files(files: Sequence[Path]) -> Trace:
    """The hosts of one capture, on one clock where the capture or the collectives tell it. Raises as
    :func:`read_xspaces`, and GputopError for files that cannot be read."""
    damaged: set[str] = set()
    limit = memory_limit()
    clocks = {folder: read_clocks(folder) for folder in {file.parent for file in files}} if len(files) > 1 else {}
    # One after the other: the bytes of a file are given back before those of the next are read.
    return read_xspaces(((str(file), re.sub(r"\.xplane\.pb(\.gz)?$|\.pb(\.gz)?$", "", file.name),
                          partial(read_all, file, damaged, limit)) for file in files),
                        damaged=damaged, limit_bytes=limit,
                        known_clocks={str(file): clock for file in files
                                      if (clock := clocks.get(file.parent, {}).get(file.name.removesuffix(".gz")))})


def read_xspaces(
    files: Iterable[tuple[str, str, Data | Callable[[], Data]]], *, damaged: Collection[str] = (),
    limit_bytes: float = float("inf"), known_clocks: Mapping[str, HostClock] | None = None,
) -> Trace:
    """One Trace from the XSpaces of one capture, one per host or process, in the order of their ranks.

    ``files`` holds the path, the host's name in case the XSpace has none, and the bytes or a function that
    reads them; ``damaged`` the paths found to be incomplete meanwhile (a cut-off gzip stream);
    ``known_clocks``, by path, what the capture measured of the clocks.
    A file among several that is no XSpace, or needs more memory than ``limit_bytes``, is left out
    with a note. Raises GputopError where that is all of them, NoDataError where none has an event.
    """
    capture = _Capture(damaged, limit_bytes, known_clocks or {})
    with pool() as threads, pool(beside=1) as decoders:
        for path, fallback_host, data in files:
            capture.read(path, fallback_host, data, _Pools(threads, decoders))
    return capture.finish()


class _File(NamedTuple):
    """One of the files of a capture."""

    path: str
    data: Data
    fallback_host: str  # its host's name, in case the file has none
    rank: int
    clock: HostClock | None  # what the capture measured of its host's clock


class _Pools(NamedTuple):
    """Threads that read a file."""

    threads: ThreadPoolExecutor  # work while the reader waits for them
    decoders: ThreadPoolExecutor  # work next to it


class _Capture:
    """The files of one capture, read one after the other into one trace."""

    def __init__(self, damaged: Collection[str], limit_bytes: float, known_clocks: Mapping[str, HostClock]) -> None:
        self._damaged, self._known_clocks = damaged, known_clocks
        self._builder = TraceBuilder()
        self._watch = MemoryWatch(limit_bytes)
        self._errors: list[GputopError] = []
        self._losses = Losses()
        self._surplus: Counter[str] = Counter()
        self._simulated, self._wall_clock = False, True
        self._cut: set[str] = set()
        # Of each file that was read.
        self._paths: list[str] = []
        self._hosts: list[HostSlices] = []
        self._windows: list[tuple[int, int] | None] = []
        self._unrecorded: list[list[tuple[int, int]]] = []  # between its recordings

    def read(self, path: str, fallback_host: str, data: Data | Callable[[], Data], pools: _Pools) -> None:
        """Read a file; one that cannot be read is remembered with its error. Nothing keeps its bytes afterwards."""
        builder = self._builder
        try:
            file = _File(path, data() if callable(data) else data, fallback_host, len(self._paths),
                         self._known_clocks.get(path))
            reader = _XSpace(file, builder, self._losses, pools, self._watch)
        except GputopError as error:
            self._errors.append(error.with_traceback(None))  # whose frames hold the bytes
            return
        self._paths.append(path)
        if reader.damaged:
            self._cut.add(path)
        self._surplus.update(reader.surplus)
        device, host, allocator = len(builder.device), len(builder.host), len(builder.allocator)
        reader.read()
        self._windows.append(note_clipping(builder, reader.host, builder.device[device:], builder.host[host:],
                                           reader.window_ns))
        self._unrecorded.append(reader.unrecorded_ns)
        self._hosts.append(HostSlices(
            reader.host, reader.machine, slice(device, len(builder.device)), slice(host, len(builder.host)),
            slice(allocator, len(builder.allocator)), reader.clock))
        self._wall_clock = self._wall_clock and reader.wall_clock
        self._simulated = self._simulated or reader.simulated

    def finish(self) -> Trace:
        """The trace of all files. Raises GputopError where none could be read, NoDataError where none has an event."""
        if self._errors and not self._paths:
            raise self._errors[0]
        builder = self._builder
        self._note_left_out()
        moved = self._align()
        windows = {rank: (window[0] + by, window[1] + by) for rank, (window, by) in enumerate(
            zip(self._windows, moved, strict=True)) if window is not None}
        fix = (INSUFFICIENT_RIGHTS[1] if any(q.id == "empty_device_plane" for q in builder.quality) else
               "Capture while the job trains, for at least a few steps, with host_tracer_level 2.")
        trace = builder.finish(
            self._paths, to_unix_ns=0 if self._wall_clock else None,
            windows_ns=windows, simulated=self._simulated, empty_fix=fix)
        note_serialized(trace)
        unrecorded = sorted((begin + by, end + by) for spans, by in zip(self._unrecorded, moved, strict=True)
                            for begin, end in spans)
        if self._wall_clock and unrecorded:
            trace.unrecorded_ns = tuple((begin - trace.origin_ns, end - trace.origin_ns) for begin, end in unrecorded)
            note_unrecorded(trace)
        return trace

    def _note_left_out(self) -> None:
        """Notes on the files that could not be read, and on what could not be read of the others."""
        builder, losses = self._builder, self._losses
        for error in self._errors:
            builder.note("unreadable_file", f"{error.message} It is left out.")
        cut = self._cut | set(self._damaged) & set(self._paths)
        if cut:
            events = sum(len(p) for group in (builder.device, builder.host, builder.allocator) for p in group)
            builder.note("truncated", f"{', '.join(sorted(cut))}: cut off or damaged. {events} events could be read; "
                         "everything after the damage is missing. Capture again, or copy the file again.")
        if any(self._surplus.values()):
            builder.note("left_out", "This trace has more than a profiler writes. Left out: "
                         f"{', '.join(f'{count:,} {what}' for what, count in self._surplus.items() if count)}.")
        if losses.malformed:
            builder.note("truncated", f"Malformed events, left out: {losses.malformed}.")
        if losses.unnamed:
            builder.note("truncated" if cut else "unnamed_events",
                         f"Events whose names the file does not hold, left out: {losses.unnamed}.")

    def _align(self) -> list[int]:
        """Bring the hosts to one clock where that can be done; returns by how much each was moved (ns)."""
        if len(self._paths) > 1 and self._wall_clock:
            return align(self._builder, self._hosts)
        if len(self._paths) > 1:
            self._builder.note("no_common_clock", "Not every host's file shows when it was captured: times of "
                                                  "different hosts cannot be compared.")
        return [0] * len(self._hosts)


class _XSpace:
    """Reads one file into ``builder``."""

    def __init__(self, file: _File, builder: TraceBuilder, losses: Losses, pools: _Pools, watch: MemoryWatch) -> None:
        """Raises GputopError for what is no XSpace or takes more memory than ``watch`` allows."""
        path, data, fallback_host, rank, self.clock = file
        self._data, self._builder, self._losses, self._rank = data, builder, losses, rank
        self._threads, self._decoders, self._watch, self._path = *pools, watch, path
        self._gpus: dict[int, int] = {}
        space = read_fields(data, 0, len(data), (_PLANES, _ERRORS, _WARNINGS, _HOSTNAMES), _AT_MOST)
        builder.names.allow_for(len(data))
        self.surplus = Counter({what: space.surplus.get(this, 0) for this, what in _COUNTED.items()})
        self._planes: list[XPlane] = []
        self.damaged = space.damaged
        self._read_planes(*space.pairs(_PLANES), watch.limit_bytes)
        texts = {which: self._texts(space.pairs(which, whole=True)) for which in (_ERRORS, _WARNINGS, _HOSTNAMES)}
        if data and not self._planes and not any(texts.values()):
            raise GputopError(f"{path} is not an XSpace: no plane can be read from it.",
                              "Give the <host>.xplane.pb that the profiler wrote, or copy it again.")
        self._errors, self._warnings = texts[_ERRORS], texts[_WARNINGS]
        self.machine = next((h for h in texts[_HOSTNAMES] if h), fallback_host)
        # Another process of the same machine is another host: threads, GPUs and steps of the two must stay apart.
        self.host = self.machine if self.machine not in builder.hosts else f"{self.machine} rank {rank}"
        _refuse_tpus(path, self._planes)
        self.simulated = any(p.name == _SIMULATED_PLANE for p in self._planes)
        self._recordings = [(planes, *self._clock(planes)) for planes in split_recordings(self._planes)]
        self._base_ns = 0  # of the recording that is being read
        self.wall_clock = all(wall_clock for _, _, wall_clock, _ in self._recordings)
        windows = [window for *_, window in self._recordings if window is not None]
        self.window_ns = (min(w[0] for w in windows), max(w[1] for w in windows)) if windows else None
        self.unrecorded_ns = unrecorded_between(windows) if len(windows) == len(self._recordings) else []
        # Lines by plane and id: those of this recording, and of one before it in the file.
        self._lines: dict[tuple[str, int], int] = {}
        self._known_lines: dict[tuple[str, int], int] = {}
        self._host_lines: dict[tuple[str, int, str, int, int], tuple[XPlane, XLine]] = {}  # of this recording
        self._hlo_steps = Steps(limits.MAX_HLO_FIELDS)
        self._programs = {key: span for plane in self._planes if plane.name == "/host:metadata"
                          for key, span in find_programs(data, *plane.span, self._hlo_steps).items()}
        self._read_programs: dict[tuple[str, int], Program] = {}
        self._hlo_indices: dict[tuple[int, int, int], int] = {}
        self._shape_of: dict[tuple[int, int] | None, LazyTable] = {}
        self._kind_of = LazyTable(lambda name: kernel_names.classify(builder.names.list[name]).kind)

    def _read_planes(self, begins: I64, ends: I64, limit_bytes: float) -> None:
        """Raises GputopError once what the planes hold needs more memory than ``limit_bytes``."""
        needs_bytes = float(len(self._data))
        max_events = int(min((limit_bytes - needs_bytes) / _EVENT_BYTES, 1 << 62)) + 1
        for begin, end in zip(begins.tolist(), ends.tolist(), strict=True):
            if begin >= end:
                continue
            # On one core: these are many small operations, for which several threads take as long and more CPU time.
            plane = read_plane(self._data, begin, end, max_events)
            self._watch.check(self._path)
            self.surplus.update(plane.surplus)
            self.damaged = self.damaged or plane.damaged
            needs_bytes += (_EVENT_BYTES * sum(len(line.begin) for line in plane.lines)
                            + limits.LINE_BYTES * len(plane.lines)
                            + limits.METADATA_BYTES * (len(plane.event_names) + len(plane.stat_names)))
            if needs_bytes > limit_bytes:
                raise too_big(self._path, limit_bytes)
            if plane.name or plane.lines or plane.stats:
                self._planes.append(plane)
        lines = 0
        for plane in self._planes:
            room = limits.MAX_LINES - lines
            self.surplus["lines"] += max(len(plane.lines) - room, 0)
            del plane.lines[room:]
            lines += len(plane.lines)
        self._many_lines = lines > _MANY_LINES

    def _texts(self, spans: tuple[I64, I64]) -> list[str]:
        return [self._data[b:min(e, b + _MAX_TEXT_BYTES)].decode("utf-8", "replace")
                for b, e in zip(*(s.tolist() for s in spans), strict=True)]

    def _clock(self, planes: Sequence[XPlane]) -> tuple[int, bool, tuple[int, int] | None]:
        """Offset to add to the lines' times, whether the result is Unix time, and the recording's window.

        See "Clocks" in docs/contributing/trace-notes.md.
        """
        stats = next((p.stats for p in planes if p.name == "Task Environment"), {})
        start, stop = stats.get("profile_start_time"), stats.get("profile_stop_time")
        latest = max((ln.timestamp_ns for p in planes for ln in p.lines if len(ln.begin)), default=0)
        absolute = latest > 10**18  # after 2001
        ahead = self.clock.offset_ns if self.clock is not None else 0
        if not isinstance(start, int) or not 0 < start < 1 << 61:
            began = self.clock.began_ns if self.clock is not None else None
            if not absolute and began is not None:
                return began, True, None
            return -ahead if absolute else 0, absolute, None
        window = (start - ahead, stop - ahead) if isinstance(stop, int) and start <= stop < 1 << 61 else None
        return (0 if absolute else start) - ahead, True, window

    def read(self) -> None:
        """Read all events, and add the quality notes about the file."""
        if self.host not in self._builder.hosts:
            self._builder.hosts.append(self.host)
        for planes, base_ns, *_ in self._recordings:
            self._base_ns = base_ns
            self._read_recording(planes)
            self._known_lines |= self._lines
            self._lines.clear()
            self._host_lines.clear()
        note_messages(self._builder, self._errors, self._warnings)

    def _read_recording(self, planes: Sequence[XPlane]) -> None:
        builder = self._builder
        of_hosts = [plane for plane in planes if plane.name.startswith("/host:") and plane.name != "/host:metadata"]
        collected = Collected(_HostCalls.empty(), sum(_events_of(plane.lines) for plane in of_hosts))
        for plane in of_hosts:
            self._read_host(plane, collected)
        calls = collected.whole()
        of_gpus = sorted((plane for plane in planes if _ordinal(plane) is not None), key=lambda p: _ordinal(p) or 0)
        if of_gpus:
            sorted_calls = self._threads.submit(Launches, calls.correlation, calls.device_id, calls.start_ns,
                                                [_ordinal(p) or 0 for p in planes])
            device, whole = self._read_devices(of_gpus)
            launches = sorted_calls.result()
            list(self._threads.map(lambda events: self._join(events, launches, calls), chain.from_iterable(device)))
            if len(whole):
                builder.device.append(whole)
            note_empty_planes(builder, self.host, [sum(len(events) for events in pieces) for pieces in device],
                              self._errors + self._warnings, calls.name)

    def _read_devices(self, planes: Sequence[XPlane]) -> tuple[list[list[DeviceEvents]], DeviceEvents]:
        """The events of each GPU, in pieces of which none is empty, and all of them, of which those are parts."""
        gpus = [self._gpu(plane) for plane in planes]
        collected = Collected(DeviceEvents.empty(), sum(_events_of(gpu.source.lines) for gpu in gpus))
        pieces: list[list[DeviceEvents]] = [[] for _ in planes]
        index_of = {id(gpu.source): index for index, gpu in enumerate(gpus)}
        for source, line, chunk in self._events([gpu.source for gpu in gpus]):
            if len(chunk.name):
                index = index_of[id(source)]
                pieces[index].append(collected.add(self._device_chunk(chunk, gpus[index], line)))
        marked = [gpu.source._replace(lines=[xline for xline in plane.lines if xline.name == STEPS], stats=())
                  for gpu, plane in zip(gpus, planes, strict=True)]
        for _, _, chunk, lost in read_events(self._data, marked, self._decoders):
            self._losses.add(lost)
            self._builder.steps.append(StepEvents(chunk.name.astype(np.int32), chunk.start_ns + self._base_ns,
                                                  chunk.end_ns + self._base_ns))
        return pieces, collected.whole()

    def _gpu(self, plane: XPlane) -> _Gpu:
        """The GPU of this plane, which is one of the trace now."""
        builder, stats = self._builder, plane.stats
        major, minor, memory, kilohertz = (stats.get(k) for k in (
            "compute_cap_major", "compute_cap_minor", "memory_size", "clock_rate"))
        name = stats.get("gpu_device_name") or stats.get("device_name") or ""
        ordinal = _ordinal(plane) or 0
        gpu = self._gpus.setdefault(ordinal, len(builder.gpus))
        if gpu == len(builder.gpus):
            builder.gpus.append(TraceGpu(
                self.host, ordinal, self._rank, name=str(name),
                compute_capability=(major, minor) if isinstance(major, int) and isinstance(minor, int) else None,
                memory_bytes=memory if isinstance(memory, int) else None,
                sms=sm_count(stats.get("core_count")) if stats.get("device_vendor", "Nvidia") == "Nvidia" else None,
                clock_hz=1e3 * kilohertz if isinstance(kilohertz, int) and 0 < kilohertz < 1 << 24 else None,
            ))
        names, references = lookups(plane, builder.names)
        nvidia = builder.gpus[gpu].compute_capability if stats.get("device_vendor") == "Nvidia" else None
        source = Source(plane, self._streams(plane), names, _DEVICE_STATS, together=self._many_lines)
        return _Gpu(gpu, references, self._shapes_of(nvidia), source)

    def _shapes_of(self, nvidia: tuple[int, int] | None) -> LazyTable:
        """``nvidia``: the compute capability, of a GPU of NVIDIA's (ROCm has similar numbers)."""
        builder = self._builder
        return self._shape_of.setdefault(nvidia, LazyTable(lambda details: builder.shape(
            kernel_names.launch_shape(builder.names.list[details], nvidia))))

    def _streams(self, plane: XPlane) -> list[XLine]:
        lines = [xline for xline in plane.lines if not is_derived(xline.name, xline.id)]
        names = {xline.name for xline in lines if len(xline.begin)}
        kept = streams(names)
        if names - kept:
            self._builder.note_other_lines(self.host, _ordinal(plane) or 0, names - kept)
        return [xline for xline in lines if xline.name in kept]

    def _events(self, sources: Sequence[Source]) -> Iterator[tuple[Source, int | I64, Chunk]]:
        """The events of these sources in chunks, with the number of the line in the trace, or of each event's."""
        last_line, line = None, -1
        for source, lines, chunk, lost in read_events(self._data, sources, self._decoders):
            self._watch.check(self._path)
            self._losses.add(lost)
            if chunk.line is not None:
                numbers = np.array([self._line_number(source.plane, xline) for xline in lines])
                yield source, numbers[chunk.line], chunk
                continue
            whole = lines[0].whole or lines[0]
            if whole is not last_line:
                last_line, line = whole, self._line_number(source.plane, whole)
            yield source, line, chunk

    def _line_number(self, plane: XPlane, xline: XLine) -> int:
        """Number of a line in the trace: a new one, or that of an earlier recording in the file."""
        key = plane.name, xline.id
        number = self._known_lines.pop(key, None)
        if number is None:
            ordinal = _ordinal(plane)
            gpu = -1 if ordinal is None else self._gpus[ordinal]
            number = self._builder.add_line(Line(self.host, gpu, xline.name, self._rank))
        self._lines[key] = number
        return number

    def _device_chunk(self, chunk: Chunk, gpu: _Gpu, line: int | I64) -> DeviceEvents:
        references = gpu.references
        names, n = self._builder.names, len(chunk.name)
        out = DeviceEvents.empty(n)
        out.gpu[:], out.line[:], out.name[:] = gpu.number, line, chunk.name
        out.start_ns, out.end_ns = chunk.start_ns + self._base_ns, chunk.end_ns + self._base_ns
        out.kind = self._kind_of(chunk.name).astype(np.uint8)
        out.correlation = integers(chunk, "correlation_id", n)
        set_copies(out, strings(chunk, "memcpy_details", n, names, references), names)
        details = strings(chunk, "kernel_details", n, names, references)
        out.shape = gpu.shape_of(details).astype(np.int32)
        out.tf_op = op_names(chunk, n, names, references).astype(np.int32)
        if "hlo_op" in chunk.stats and self._programs:
            op, module = (strings(chunk, stat, n, names, references) for stat in ("hlo_op", "hlo_module"))
            out.hlo = self._hlo(op, module, integers(chunk, "program_id", n))
        if "cuda_graph_id" in chunk.stats and not self._builder.cuda_graphs:
            in_graph = integers(chunk, "cuda_graph_id", n) > 0
            self._builder.cuda_graphs = bool((in_graph & (out.tf_op < 0) & (out.kind <= Kind.COLLECTIVE)).any())
        return out

    def _hlo(self, op: I64, module: I64, program: I64) -> I32:
        """The programs' ops that these kernels belong to, as indices of the builder's ``hlo_ops``; -1: not known."""
        mixed = np.unique(program, return_inverse=True)[1]
        for column in (module, op):  # the product stays small: chunks are, and names are far fewer than 2^31
            mixed = np.unique(mixed * (len(self._builder.names.list) + 1) + column + 1, return_inverse=True)[1]
        _, first, which = np.unique(mixed, return_index=True, return_inverse=True)
        indices = []
        for key in zip(op[first].tolist(), module[first].tolist(), program[first].tolist(), strict=True):
            if key not in self._hlo_indices:
                self._hlo_indices[key] = self._find_hlo_op(*key)
            indices.append(self._hlo_indices[key])
        return np.array(indices, np.int32)[which]

    def _find_hlo_op(self, op: int, module: int, program: int) -> int:
        names = self._builder.names.list
        if op < 0 or module < 0:
            return -1
        named = [key for key in self._programs if key[0] == names[module]]
        # An older XLA writes no program_id: the module's name tells, if only one program has it.
        key = (names[module], program) if program >= 0 else named[0] if len(named) == 1 else None
        span = self._programs.get(key) if key is not None else None
        if key is None or span is None:
            return -1
        if key not in self._read_programs:
            self._read_programs[key] = Program(self._data, *span, self._hlo_steps)
        hlo = hlo_op(self._read_programs[key], names[op])
        if hlo is None:
            return -1
        self._builder.hlo_ops.append(hlo)
        return len(self._builder.hlo_ops) - 1

    def _read_host(self, plane: XPlane, calls: Collected[_HostCalls]) -> None:
        builder = self._builder
        names, references = lookups(plane, builder.names)
        noise = {i: 1 for i, name in plane.event_names.items() if name.startswith(IGNORED_EVENT)}
        skip = IntMap(noise, 0) if noise else None
        lines = [xline for xline in plane.lines if not is_derived(xline.name, xline.id)]
        once = [xline for xline in lines if not self._repeats(plane, xline)]
        if len(once) < len(lines):
            builder.note("duplicate_events", f"{plane.name} of {self.host or 'this host'}: threads that are in the "
                                             "trace more than once, event by event the same, are counted once.")
        wanted = _HOST_STATS if any(_ordinal(p) is not None for p in self._planes) else (*_HOST_STATS, *_CPU_STATS)
        collected = Collected(HostEvents.empty(), _events_of(once))
        parts: list[HostEvents] = []
        for _, line, chunk in self._events([Source(plane, once, names, wanted, skip, self._many_lines)]):
            chunk.start_ns += self._base_ns
            chunk.end_ns += self._base_ns
            is_allocator = np.logical_or.reduce([chunk.name == builder.names[name] for name in _ALLOCATOR])
            if is_allocator.any():
                self._allocator_chunk(chunk, np.flatnonzero(is_allocator), references)
            events = self._host_chunk(chunk, ~is_allocator, references, line, calls)
            parts.append(collected.add(events))
            parts[-1].stats = events.stats
        if parts:
            events = collected.whole()
            events.stats = joined_stats(parts)
            builder.host.append(events)

    def _repeats(self, plane: XPlane, xline: XLine) -> bool:
        """Return whether a line of that name and id has these very events, byte by byte, already."""
        if not len(xline.begin):
            return False
        key = plane.name, xline.id, xline.name, xline.timestamp_ns, len(xline.begin)
        before, first = self._host_lines.setdefault(key, (plane, xline))
        if first is xline or (before.event_names, before.stat_names) != (plane.event_names, plane.stat_names):
            return False
        one, two = (self._data[int(line.begin[0]):int(line.end[-1])] for line in (first, xline))
        return one == two

    def _host_chunk(
        self, chunk: Chunk, keep: np.ndarray, references: IntMap, line: int | I64, calls: Collected[_HostCalls],
    ) -> HostEvents:
        """The events to ``keep``, and all that launch something among the ``calls``."""
        names, n = self._builder.names, len(chunk.name)
        kept, lines = np.flatnonzero(keep), np.broadcast_to(line, n)
        events = HostEvents(lines[kept].astype(np.int32), chunk.name[kept].astype(np.int32),
                            chunk.start_ns[kept], chunk.end_ns[kept])
        row_after = np.cumsum(keep) - 1
        for stat in (*_INTEGER_STATS, *_STRING_STATS):
            column = chunk.stats.get(stat)
            if column is None:
                continue
            rows, values = (whole_numbers(column, names, references) if stat in _INTEGER_STATS
                            else column.strings(names, references))
            of_kept = np.flatnonzero(keep[rows])
            if len(of_kept):
                events.stats[stat] = (row_after[rows[of_kept]], values[of_kept])
        if "hlo_op" in chunk.stats or "_c" in chunk.stats:
            self._cpu_ops(events, chunk, kept, references)
        correlation = integers(chunk, "correlation_id", n)
        rows = np.flatnonzero(correlation > 0)
        if len(rows):
            calls.add(_HostCalls(
                correlation[rows], integers(chunk, "device_id", n)[rows], chunk.start_ns[rows], chunk.end_ns[rows],
                lines[rows], chunk.name[rows], strings(chunk, "memcpy_details", n, names, references)[rows]))
        return events

    def _cpu_ops(self, events: HostEvents, chunk: Chunk, kept: np.ndarray, references: IntMap) -> None:
        """Add the identity of XLA's ops that ran on the CPU, and their ends, which another event shows."""
        names, n = self._builder.names, len(chunk.name)
        op, module = (strings(chunk, stat, n, names, references)[kept] for stat in ("hlo_op", "hlo_module"))
        starts, ends = integers(chunk, "_p", n)[kept], integers(chunk, "_c", n)[kept]
        rows = np.flatnonzero(op >= 0)
        hlo_index = self._hlo(op[rows], module[rows], integers(chunk, "program_id", n)[kept][rows])
        events.stats["hlo"] = rows, hlo_index.astype(np.int64)
        events.stats["hlo_module"] = rows, module[rows]
        linked = rows[starts[rows] >= 0]
        events.stats["ends_with"] = linked, starts[linked]
        is_end = np.zeros(len(names.list), bool)
        for i in indices_in(chunk.name):
            is_end[i] = names.list[i].startswith(_END)
        rows = np.flatnonzero(is_end[events.name] & (ends >= 0))
        events.stats["ended"] = rows, ends[rows]

    def _allocator_chunk(self, chunk: Chunk, rows: I64, references: IntMap) -> None:
        names, n = self._builder.names, len(chunk.name)
        self._builder.allocator.append(AllocatorEvents(
            time_ns=chunk.start_ns[rows],
            allocator=strings(chunk, "allocator_name", n, names, references)[rows].astype(np.int32),
            in_use_bytes=integers(chunk, "bytes_allocated", n)[rows],
            available_bytes=integers(chunk, "bytes_available", n)[rows],
            peak_bytes=integers(chunk, "peak_bytes_in_use", n)[rows],
            tf_op=self._without_empty(strings(chunk, "tf_op", n, names, references)[rows]),
            is_free=chunk.name[rows] == names["MemoryDeallocation"],
            allocation_bytes=integers(chunk, "allocation_bytes", n)[rows],
            address=integers(chunk, "addr", n)[rows],
            fragmentation=floats(chunk, "fragmentation", n)[rows],
            region_type=self._without_empty(strings(chunk, "region_type", n, names, references)[rows]),
        ))

    def _without_empty(self, text: I64) -> I32:
        """Texts, with -1 for empty ones: the allocators of older versions write a null pointer as "(null)"."""
        empty = [self._builder.names[name] for name in ("", "(null)")]
        return np.where(np.logical_or.reduce([text == i for i in empty]), -1, text).astype(np.int32)

    def _join(self, device: DeviceEvents, launches: Launches, calls: _HostCalls) -> None:
        """Set the launches, and for copies what only the host's call contains (ROCm)."""
        names = self._builder.names
        ordinal = self._builder.gpus[int(device.gpu[0])].ordinal  # the events are those of one plane
        rows, call = set_launches(
            device, launches.find(device.correlation, np.full(len(device), ordinal)), calls.start_ns, calls.end_ns,
            calls.line)
        is_copy = (device.kind >= Kind.H2D) & (device.kind <= Kind.COPY_OTHER) & (device.bytes < 0)
        of_copies = np.flatnonzero(is_copy[rows])
        rows, call = rows[of_copies], call[of_copies]
        copies = DeviceEvents.empty(len(rows))
        set_copies(copies, calls.details[call], names)
        device.bytes[rows], device.src[rows], device.dst[rows] = copies.bytes, copies.src, copies.dst
        way_of = np.full(len(names.list), Kind.COPY_OTHER, np.uint8)
        for i in indices_in(calls.name[call]):
            way = kernel_names.copy_way(names.list[i])
            way_of[i] = Kind.COPY_OTHER if way is None else way
        unknown = device.kind[rows] == Kind.COPY_OTHER
        device.kind[rows[unknown]] = way_of[calls.name[call[unknown]]]


def _events_of(lines: Iterable[XLine]) -> int:
    return sum(len(line.begin) for line in lines)


def _refuse_tpus(path: str, planes: Sequence[XPlane]) -> None:
    """Raises GputopError for a trace of TPUs alone: without what ran on them its host would seem to be all there is."""
    if any(_ordinal(plane) is not None for plane in planes):
        return
    tpus = sum(plane.name.startswith(_TPU_PLANE) and any(len(line.begin) for line in plane.lines) for plane in planes)
    if tpus:
        raise GputopError(f"{path} is of {tpus} TPU{'' if tpus == 1 else 's'}, which gputop does not read.",
                          "Open it with XProf: pip install xprof; xprof --logdir FOLDER.")


def _ordinal(plane: XPlane) -> int | None:
    match = _GPU_PLANE.match(plane.name)
    return int(match[1]) if match else None

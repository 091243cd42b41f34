"""The events of the GPUs' planes of one XSpace: kernels and copies, with the calls that launched them, and steps."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain

import numpy as np
from msgspec import Struct

from gputop.trace import kernel_names
from gputop.trace.builder import Collected, TraceBuilder
from gputop.trace.derived_lines import STEPS, is_derived, streams
from gputop.trace.int_map import IntMap, LazyTable
from gputop.trace.launch_join import Launches, set_launches
from gputop.trace.model import I64, DeviceEvents, HostEvents, Kind, StepEvents, TraceGpu
from gputop.trace.occupancy import sm_count
from gputop.trace.readers.xspace.events import EventReader, LineNumbers
from gputop.trace.readers.xspace.hlo_indices import HloIndices
from gputop.trace.readers.xspace.host_events import HostCalls
from gputop.trace.readers.xspace.recordings import FileRecording
from gputop.trace.readers.xspace.space import Space, ordinal
from gputop.trace.readers.xspace.stats import indices_in, integers, lookups, op_names, set_copies, strings
from gputop.trace.readers.xspace.xplane import Chunk, PlaneLines, XLine, XPlane, event_count

_DEVICE_STATS = ("correlation_id", "memcpy_details", "kernel_details", "tf_op", "annotation", "hlo_op",
                 "hlo_module", "program_id", "cuda_graph_id")
_ABSENT = ("launch_ns", "launch_line", "launch_end_ns", "bytes", "src", "dst", "hlo")  # of most events


class _Gpu(Struct, frozen=True):
    """A GPU whose plane is read: its place among those of the trace, the plane's texts by the ids of references, and
    the launch shapes (indices of the builder's) by the names of kernels' details."""

    number: int
    references: IntMap
    shape_of: LazyTable
    source: PlaneLines


class Gpus:
    """The GPUs of one file, as their planes describe them; those of the trace by the host's numbers."""

    def __init__(self, builder: TraceBuilder, host: str, rank: int) -> None:
        self._builder, self._host, self._rank = builder, host, rank
        self._numbers: dict[int, int] = {}
        self._shape_of: dict[tuple[int, int] | None, LazyTable] = {}

    def open(self, plane: XPlane, together: bool) -> _Gpu:
        """The GPU of this plane, which is one of the trace from now on."""
        builder, stats = self._builder, plane.stats
        number = self._numbers.setdefault(ordinal(plane) or 0, len(builder.gpus))
        if number == len(builder.gpus):
            builder.gpus.append(self._described(plane))
        names, references = lookups(plane, builder.names)
        nvidia = builder.gpus[number].compute_capability if stats.get("device_vendor") == "Nvidia" else None
        source = PlaneLines(plane, self._streams(plane), names, _DEVICE_STATS, together=together)
        shapes = self._shape_of.setdefault(nvidia, LazyTable(lambda details: builder.shape(  # ROCm has similar numbers
            kernel_names.launch_shape(builder.names.list[details], nvidia))))
        return _Gpu(number, references, shapes, source)

    def _described(self, plane: XPlane) -> TraceGpu:
        stats = plane.stats
        major, minor, memory, kilohertz = (stats.get(k) for k in (
            "compute_cap_major", "compute_cap_minor", "memory_size", "clock_rate"))
        return TraceGpu(
            self._host, ordinal(plane) or 0, self._rank,
            name=str(stats.get("gpu_device_name") or stats.get("device_name") or ""),
            compute_capability=(major, minor) if isinstance(major, int) and isinstance(minor, int) else None,
            memory_bytes=memory if isinstance(memory, int) else None,
            sms=sm_count(stats.get("core_count")) if stats.get("device_vendor", "Nvidia") == "Nvidia" else None,
            clock_hz=1e3 * kilohertz if isinstance(kilohertz, int) and 0 < kilohertz < 1 << 24 else None)

    def _streams(self, plane: XPlane) -> list[XLine]:
        lines = [xline for xline in plane.lines if not is_derived(xline.name, xline.id)]
        names = {xline.name for xline in lines if len(xline.begin)}
        kept = streams(names)
        if names - kept:
            self._builder.note_other_lines(self._host, ordinal(plane) or 0, names - kept)
        return [xline for xline in lines if xline.name in kept]


class DeviceReader:
    """Reads the GPUs' planes of one file, recording by recording, into the builder."""

    def __init__(self, builder: TraceBuilder, gpus: Gpus, space: Space, events: EventReader, lines: LineNumbers,
                 hlo: HloIndices) -> None:
        self._builder, self._gpus, self._events, self._lines, self._hlo = builder, gpus, events, lines, hlo
        self._kind_of = LazyTable(lambda name: kernel_names.classify(builder.names.list[name]).kind)
        self._together = space.many_lines

    def read(self, recording: FileRecording, host: HostEvents, calls: HostCalls,
             threads: ThreadPoolExecutor) -> list[int]:
        """Read the events of a recording, which these ``calls``, events of ``host``, launched; returns how many each
        plane of a GPU has."""
        planes = sorted((plane for plane in recording.planes if ordinal(plane) is not None),
                        key=lambda plane: ordinal(plane) or 0)
        if not planes:
            return []
        sorted_calls = threads.submit(Launches, calls.correlation, calls.device_id, host.start_ns[calls.event],
                                      [ordinal(plane) or 0 for plane in recording.planes])
        pieces, whole = self._read_planes(planes, recording.base_ns)
        launches = sorted_calls.result()
        list(threads.map(lambda events: self._join(events, launches, host, calls),
                         chain.from_iterable(pieces) if len(calls) else ()))
        if len(whole):
            self._builder.device.append(whole)
        return [sum(map(len, of_plane)) for of_plane in pieces]

    def _read_planes(self, planes: Sequence[XPlane], base_ns: int) -> tuple[list[list[DeviceEvents]], DeviceEvents]:
        """The events of each GPU, in pieces of which none is empty, and all of them, of which those are parts."""
        gpus = [self._gpus.open(plane, self._together) for plane in planes]
        collected = Collected(DeviceEvents, sum(event_count(gpu.source.lines) for gpu in gpus), *_ABSENT)
        pieces: list[list[DeviceEvents]] = [[] for _ in planes]
        index_of = {id(gpu.source): index for index, gpu in enumerate(gpus)}
        for decoded in self._events.read([gpu.source for gpu in gpus], base_ns):
            index = index_of[id(decoded.source)]
            line = self._lines.of(decoded, gpus[index].number)
            if n := len(decoded.chunk.name):
                pieces[index].append(collected.more(n))
                self._set(pieces[index][-1], decoded.chunk, gpus[index], line)
            self._events.forget(decoded.lines)
        marked = [gpu.source._replace(lines=[xline for xline in plane.lines if xline.name == STEPS], stats=())
                  for gpu, plane in zip(gpus, planes, strict=True)]
        for decoded in self._events.read(marked, base_ns):
            steps = decoded.chunk
            self._builder.steps.append(StepEvents(steps.name.astype(np.int32), steps.start_ns, steps.end_ns))
        return pieces, collected.whole()

    def _set(self, out: DeviceEvents, chunk: Chunk, gpu: _Gpu, line: int | I64) -> None:
        """Set what a chunk tells of its events."""
        references, names, n = gpu.references, self._builder.names, len(out)
        out.gpu[:], out.line[:], out.name[:] = gpu.number, line, chunk.name
        out.start_ns[:], out.end_ns[:] = chunk.start_ns, chunk.end_ns
        out.kind[:] = self._kind_of(chunk.name)
        out.correlation[:] = integers(chunk, "correlation_id", n)
        set_copies(out, strings(chunk, "memcpy_details", n, names, references), names)
        out.shape[:] = gpu.shape_of(strings(chunk, "kernel_details", n, names, references))
        out.tf_op[:] = op_names(chunk, n, names, references)
        if "hlo_op" in chunk.stats and self._hlo.has_programs:
            op, module = (strings(chunk, stat, n, names, references) for stat in ("hlo_op", "hlo_module"))
            out.hlo[:] = self._hlo(op, module, integers(chunk, "program_id", n))
        if "cuda_graph_id" in chunk.stats and not self._builder.cuda_graphs:
            in_graph = integers(chunk, "cuda_graph_id", n) > 0
            self._builder.cuda_graphs = bool((in_graph & (out.tf_op < 0) & (out.kind <= Kind.COLLECTIVE)).any())

    def _join(self, device: DeviceEvents, launches: Launches, host: HostEvents, calls: HostCalls) -> None:
        """Set the launches, and for copies what only the host's call contains (ROCm)."""
        names = self._builder.names
        ordinal = self._builder.gpus[int(device.gpu[0])].ordinal  # the events are those of one plane
        call = launches.find(device.correlation, np.full(len(device), ordinal))
        event = np.where(call >= 0, calls.event[call], np.int64(-1))
        rows = set_launches(device, event, host.start_ns, host.end_ns, host.line)
        is_copy = (device.kind >= Kind.H2D) & (device.kind <= Kind.COPY_OTHER) & (device.bytes < 0)
        rows = rows[is_copy[rows]]
        copies = DeviceEvents.empty(len(rows))
        set_copies(copies, calls.details[call[rows]], names)
        device.bytes[rows], device.src[rows], device.dst[rows] = copies.bytes, copies.src, copies.dst
        way_of = np.full(len(names.list), Kind.COPY_OTHER, np.uint8)
        name = host.name[event[rows]]
        for i in indices_in(name):
            way = kernel_names.copy_way(names.list[i])
            way_of[i] = Kind.COPY_OTHER if way is None else way
        unknown = device.kind[rows] == Kind.COPY_OTHER
        device.kind[rows[unknown]] = way_of[name[unknown]]

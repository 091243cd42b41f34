"""XSpaces of the profiler servers of TensorFlow and JAX into a Trace (docs/contributing/trace-notes.md, "XSpace")."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from gputop.core.errors import GputopError
from gputop.trace.builder import TraceBuilder
from gputop.trace.model import Trace
from gputop.trace.parallel import pool
from gputop.trace.quality import (
    INSUFFICIENT_RIGHTS,
    note_clipping,
    note_empty_planes,
    note_messages,
    note_serialized,
    note_unrecorded,
)
from gputop.trace.readers.clock_file import HostClock, clocks_of
from gputop.trace.readers.clock_skew import HostSlices, align, align_starts
from gputop.trace.readers.content import Data, MemoryWatch, memory_limit, read_all
from gputop.trace.readers.xspace.device_events import DeviceReader, Gpus
from gputop.trace.readers.xspace.events import EventReader, LineNumbers
from gputop.trace.readers.xspace.hlo_indices import HloIndices
from gputop.trace.readers.xspace.host_events import HostPlanesReader
from gputop.trace.readers.xspace.recordings import read_recordings
from gputop.trace.readers.xspace.space import read_space
from gputop.trace.readers.xspace.xplane import Losses


def read_files(files: Sequence[Path]) -> Trace:
    """The hosts of one capture, on one clock where the capture or the collectives tell it. Raises as
    :func:`read_xspaces`, and GputopError for files that cannot be read."""
    damaged: set[str] = set()
    limit = memory_limit()
    # One after the other: the bytes of a file are given back before those of the next are read.
    return read_xspaces(((str(file), re.sub(r"\.xplane\.pb(\.gz)?$|\.pb(\.gz)?$", "", file.name),
                          partial(read_all, file, damaged, limit)) for file in files),
                        damaged=damaged, limit_bytes=limit, known_clocks=clocks_of(files))


def read_xspaces(files: Iterable[tuple[str, str, Data | Callable[[], Data]]], *, damaged: Collection[str] = (),
                 limit_bytes: float = float("inf"), known_clocks: Mapping[str, HostClock] | None = None) -> Trace:
    """One Trace from the XSpaces of one capture, one per host or process, in the order of their ranks.

    ``files`` holds the path, the host's name in case the XSpace has none, and the bytes or a function that reads them;
    ``damaged`` the paths found to be incomplete meanwhile (a cut-off gzip stream); ``known_clocks``, by path, what the
    capture measured of the clocks. A file among several that is no XSpace, or needs more memory than ``limit_bytes``,
    is left out with a note. Raises GputopError where that is all of them, NoDataError where none has an event.
    """
    with pool() as threads, pool(beside=1) as decoders:
        capture = _Capture(damaged, limit_bytes, known_clocks or {}, threads, decoders)
        for path, fallback_host, data in files:
            capture.read(path, fallback_host, data)
    return capture.finish()


class _Capture:
    """The files of one capture, read one after the other into one trace."""

    def __init__(self, damaged: Collection[str], limit_bytes: float, known_clocks: Mapping[str, HostClock],
                 threads: ThreadPoolExecutor, decoders: ThreadPoolExecutor) -> None:
        """``threads`` work while the reader waits for them, ``decoders`` next to it."""
        self._damaged, self.known_clocks = damaged, known_clocks
        self.threads, self.decoders = threads, decoders
        self.builder = TraceBuilder()
        self.watch = MemoryWatch(limit_bytes)
        self._errors: list[GputopError] = []
        self.losses = Losses()
        self._surplus: Counter[str] = Counter()
        self._simulated, self._wall_clock = False, True
        self._cut: set[str] = set()
        # Of each file that was read.
        self.paths: list[str] = []
        self._hosts: list[HostSlices] = []
        self._windows: list[tuple[int, int] | None] = []
        self._unrecorded: list[list[tuple[int, int]]] = []  # between its recordings

    def read(self, path: str, fallback_host: str, data: Data | Callable[[], Data]) -> None:
        """Read a file; one that cannot be read is remembered with its error. Nothing keeps its bytes afterwards."""
        builder = self.builder
        try:
            reader = _XSpace(self, path, data() if callable(data) else data, fallback_host)
        except GputopError as error:
            self._errors.append(error.with_traceback(None))  # whose frames hold the bytes
            return
        self.paths.append(path)
        if reader.space.damaged:
            self._cut.add(path)
        self._surplus.update(reader.space.surplus)
        device, host, allocator = len(builder.device), len(builder.host), len(builder.allocator)
        reader.read()
        self._windows.append(note_clipping(builder, reader.host, builder.device[device:], builder.host[host:],
                                           reader.recordings.window_ns))
        self._unrecorded.append(reader.recordings.unrecorded_ns)
        self._hosts.append(HostSlices(
            reader.host, reader.machine, slice(device, len(builder.device)), slice(host, len(builder.host)),
            slice(allocator, len(builder.allocator)), reader.clock))
        self._wall_clock = self._wall_clock and reader.recordings.wall_clock
        self._simulated = self._simulated or reader.space.simulated

    def finish(self) -> Trace:
        """The trace of all files. Raises GputopError where none could be read, NoDataError where none has an event."""
        if self._errors and not self.paths:
            raise self._errors[0]
        builder = self.builder
        self._note_left_out()
        moved = self._align()
        windows = {rank: (window[0] + by, window[1] + by) for rank, (window, by) in enumerate(
            zip(self._windows, moved, strict=True)) if window is not None}
        fix = (INSUFFICIENT_RIGHTS[1] if any(q.id == "empty_device_plane" for q in builder.quality) else
               "Capture at least a few steps while the job trains, with host_tracer_level 2.")
        trace = builder.finish(
            self.paths, to_unix_ns=0 if self._wall_clock else None,
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
        builder, losses = self.builder, self.losses
        for error in self._errors:
            builder.note("unreadable_file", f"{error.message} gputop leaves out this file.")
        cut = self._cut | set(self._damaged) & set(self.paths)
        if cut:
            events = sum(len(p) for group in (builder.device, builder.host, builder.allocator) for p in group)
            builder.note("truncated", f"{', '.join(sorted(cut))}: truncated or damaged. gputop read {events} events; "
                                      "everything after the damage is missing. Capture again, or copy the file again.")
        if any(self._surplus.values()):
            surplus = ", ".join(f"{count:,} {what}" for what, count in self._surplus.items() if count)
            builder.note("left_out", f"This trace has more entries than a profiler writes. Left out: {surplus}.")
        if losses.malformed:
            builder.note("left_out", f"gputop left out malformed events: {losses.malformed}.")
        if losses.unnamed:
            builder.note("truncated" if cut else "unnamed_events",
                         f"gputop left out events whose names are not in the file: {losses.unnamed}.")

    def _align(self) -> list[int]:
        """Bring the hosts to one clock where that can be done; returns by how much each was moved (ns)."""
        if len(self.paths) < 2:
            return [0] * len(self._hosts)
        if self._wall_clock:
            return align(self.builder, self._hosts)
        self.builder.note("no_common_clock", "Not every host's file shows when it was captured: gputop aligned their "
                                             "starts. Do not compare times between hosts.")
        return align_starts(self.builder, self._hosts)


class _XSpace:
    """Reads one file into the builder of its capture."""

    def __init__(self, capture: _Capture, path: str, data: Data, fallback_host: str) -> None:
        """``fallback_host`` is its host's name, in case the file has none. Raises GputopError for what is no XSpace or
        takes more memory than the capture's watch allows."""
        builder, rank, self.clock = capture.builder, len(capture.paths), capture.known_clocks.get(path)
        self._builder, self._threads = builder, capture.threads
        builder.names.allow_for(len(data))
        self.space = space = read_space(path, data, capture.watch)
        self.machine = space.machine or fallback_host
        # Another process of the same machine is another host: threads, GPUs and steps of the two must stay apart.
        self.host = self.machine if self.machine not in builder.hosts else f"{self.machine} rank {rank}"
        self.recordings = read_recordings(space.planes, self.clock)
        events = EventReader(path, data, capture.losses, capture.watch, capture.decoders)
        self._lines, hlo = LineNumbers(builder, self.host, rank), HloIndices(data, space.planes, builder)
        self._host_reader = HostPlanesReader(builder, self.host, space, events, self._lines, hlo)
        self._device_reader = DeviceReader(builder, Gpus(builder, self.host, rank), space, events, self._lines, hlo)

    def read(self) -> None:
        """Read all events, and add the quality notes about the file."""
        builder, space = self._builder, self.space
        if self.host not in builder.hosts:
            builder.hosts.append(self.host)
        for recording in self.recordings.each:
            self._lines.begin_recording()
            host, calls = self._host_reader.read(recording)
            counts = self._device_reader.read(recording, host, calls, self._threads)
            if counts:
                note_empty_planes(builder, self.host, counts, [*space.errors, *space.warnings], host.name[calls.event])
        note_messages(builder, space.errors, space.warnings)

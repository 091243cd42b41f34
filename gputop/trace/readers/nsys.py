"""An Nsight Systems report, exported to SQLite, into a Trace. The file is only ever read.

Which tables and columns exist depends on the version and on what was traced, so each is optional
(docs/contributing/trace-notes.md, "Nsight Systems SQLite").
"""

from __future__ import annotations

import os
import re
import sqlite3
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from gputop.core.errors import EXIT_USAGE, GputopError
from gputop.text.units import first_few, percent, seconds
from gputop.trace import kernel_names
from gputop.trace.builder import MAX_GPUS, TraceBuilder, row_hashes
from gputop.trace.int_map import IntMap
from gputop.trace.launch_join import Launches, set_launches
from gputop.trace.model import I64, DeviceEvents, HostEvents, Kind, Line, MemoryKind, Trace, TraceGpu
from gputop.trace.occupancy import LaunchShape, sm_count, theoretical_occupancy
from gputop.trace.quality import note_messages
from gputop.trace.readers.content import MemoryWatch, memory_limit, open_trace, too_big

_KERNELS, _COPIES, _MEMSETS, _GRAPHS = (
    f"CUPTI_ACTIVITY_KIND_{kind}" for kind in ("KERNEL", "MEMCPY", "MEMSET", "GRAPH_TRACE"))
_CALLS = "CUPTI_ACTIVITY_KIND_RUNTIME"
# Calls of the system and of MPI, with the column of their name.
_OTHER_CALLS = (("OSRT_API", "nameId"), *((f"MPI_{kind}_EVENTS", "textId") for kind in (
    "P2P", "COLLECTIVES", "START_WAIT", "OTHER")))
_ACTIVITIES = (_KERNELS, _COPIES, _MEMSETS, _GRAPHS, _CALLS, "NVTX_EVENTS")
_TABLES = frozenset((*_ACTIVITIES, *dict(_OTHER_CALLS), "COMPOSITE_EVENTS", "StringIds", "ThreadNames", "PROCESSES",
                     "DIAGNOSTIC_EVENT", "ENUM_CUDA_MEM_KIND", "TARGET_INFO_GPU", "TARGET_INFO_CUDA_DEVICE",
                     "TARGET_INFO_SYSTEM_ENV", "TARGET_INFO_SESSION_START_TIME", "ANALYSIS_DETAILS"))
# CUpti_ActivityMemcpyKind; copies to and from arrays are classified by direction.
_COPY_KINDS = {1: Kind.H2D, 2: Kind.D2H, 3: Kind.H2D, 4: Kind.D2H, 5: Kind.D2D, 6: Kind.D2D, 7: Kind.D2D,
               8: Kind.D2D, 10: Kind.P2P, 11: Kind.H2D, 12: Kind.D2H, 13: Kind.D2D}
_MIGRATIONS = (11, 12, 13)  # of managed memory, as pages are touched or prefetched
_COPY_NAMES = {Kind.H2D: "MemcpyH2D", Kind.D2H: "MemcpyD2H", Kind.D2D: "MemcpyD2D", Kind.P2P: "MemcpyP2P",
               Kind.COPY_OTHER: "MemcpyOther", Kind.MEMSET: "Memset"}
_PROCESS = ~0xFFFFFF  # a global thread id is the global process id plus the thread's 24 bits
_VERSION = re.compile(r"(?<=[a-z])_v\d{4,5}(?=$|_ptsz$|_ptds$)")  # "cudaLaunchKernel_v7000": of the API, no other call
# Calls of the C library that wait for a file, a terminal or the network, and MPI's, which wait for other processes.
# What waits for another thread tells nothing.
_WAITS = re.compile(r"MPI_|(?:f|p)?(?:read|write)(?:v|64)?$|f?(?:get|put)(?:c|s|char)$|get(?:line|delim|char)$|"
                              r"f(?:data)?sync$|fflush$|(?:f|fd)?open(?:64|at)?$|recv(?:from|msg)?$|accept4?$|connect$")
_LATE, _LATE_NS = 0.5, 1_000_000_000  # share and length of the time before the first call of CUDA that are worth a note
_LONG_NS = 1_000_000  # of such a call: shorter ones are too many to keep
# "No OpenGL events collected. Does the process use OpenGL?" stands there for each kind of event and process.
_MISSED = re.compile(r"No (\w+) events collected\b")
_MISSED_TABLES = {"CUDA": _ACTIVITIES, "NVTX": ("NVTX_EVENTS",)}  # of any other kind gputop reads none
_MEMORY_KINDS = {0: 1, 1: 2, 2: 3, 3: 5, 4: 4, 5: 3, 6: 4}  # ENUM_CUDA_MEM_KIND to MemoryKind
_RANGES = (59, 60)  # NVTX: push/pop and start/end ranges
# PyTorch's emit_nvtx numbers each call, which would make every name unique.
_NUMBERING = re.compile(r", (?:op_id|seq) = .*", re.DOTALL)
_SHAPE = ("gridX", "gridY", "gridZ", "blockX", "blockY", "blockZ", "registersPerThread", "staticSharedMemory",
          "dynamicSharedMemory")
_EXPORT = "To export: nsys export --type sqlite report.nsys-rep"
_MAX_NS = 1 << 61
_BATCH = 1 << 14
_MAX_MESSAGES, _MAX_MESSAGE_CHARS = 5, 300  # of each severity that become notes
_SCHEMA_BYTES = 1 << 16  # SQLite's description of a table may be longer than the text in the file
# Most steps of SQLite's virtual machine for a file: a row of ten bytes or more takes about forty; _STEPS is the part
# that does not grow with the file.
_STEPS, _STEPS_PER_BYTE, _STEPS_AT_ONCE = 10_000_000, 20, 10_000
_ROW_BYTES = 4  # at least: its place on the page, length, id and header


def read_files(files: Sequence[Path]) -> Trace:
    """One report. Raises as :func:`read_nsys`, and GputopError for several reports or one that is too big."""
    if len(files) > 1:
        raise GputopError(f"gputop cannot combine several Nsight Systems reports: {first_few(files, 4)}.",
                          "Analyze one report at a time. If you run `nsys profile` on the whole job, it creates one "
                          "report for all ranks.", EXIT_USAGE)
    limit = memory_limit()
    with open_trace(files[0]) as file:
        if os.fstat(file.fileno()).st_size > limit:
            raise too_big(files[0], limit)
    return read_nsys(files[0], limit)


def read_nsys(path: Path, limit_bytes: float = float("inf")) -> Trace:
    """The report's GPU activity, launches and NVTX ranges.

    Raises GputopError where the file is no such export or takes more memory than ``limit_bytes``, NoDataError where it
    has no activity.
    """
    # immutable: no lock and no journal beside it, so that read-only folders work as well
    uri = f"{path.resolve().as_uri()}?mode=ro&immutable=1"
    try:
        connection = sqlite3.connect(uri, uri=True)
    except sqlite3.Error as error:
        raise GputopError(f"cannot open {path}: {error}.", "Check the permissions of the file.") from error
    connection.execute("PRAGMA trusted_schema = OFF")  # the schema is the file's: no function in it may do anything
    connection.text_factory = lambda raw: raw.decode("utf-8", "replace")
    size = path.stat().st_size
    # A file whose pages refer to each other in circles may yield nothing, without end.
    steps = iter(range((_STEPS + size * _STEPS_PER_BYTE) // _STEPS_AT_ONCE))
    connection.set_progress_handler(lambda: next(steps, None) is None, _STEPS_AT_ONCE)
    try:
        return _Report(connection, str(path), size, MemoryWatch(limit_bytes)).read()
    finally:
        connection.close()


class _Calls(NamedTuple):
    """CUDA calls, sorted by start."""

    correlation: I64
    process: I64
    start_ns: I64
    end_ns: I64
    line: npt.NDArray[np.int32]


class _Report:
    def __init__(self, connection: sqlite3.Connection, path: str, file_bytes: int, watch: MemoryWatch) -> None:
        self._db, self._path, self._watch = connection, path, watch
        self._builder = TraceBuilder()
        self._damage: list[str] = []
        self._file_bytes = file_bytes
        self._builder.names.allow_for(file_bytes)
        self._thread_lines: dict[int, int] = {}
        tables = self._tables()
        if not tables and self._damage:
            # SQLite refuses a file that is shorter than its header says, unless writable_schema allows for a
            # broken schema. Nothing can be written: the connection is read-only.
            self._db.execute("PRAGMA writable_schema = ON")
            tables = self._tables()
        # Generated columns, which are computed, are not in table_info.
        self._columns = {t: {r[1] for rows in self._fetch(f'PRAGMA table_info("{t}")') for r in rows} for t in tables
                         if t in _TABLES}
        if self._damage and not self._columns:
            raise GputopError(f"{path} is damaged: {self._damage[0]}.", f"Export the report again. {_EXPORT}")
        if not set(self._columns) & {*_ACTIVITIES, "StringIds", "TARGET_INFO_GPU"}:
            raise GputopError(f"{path} is an SQLite file but not an Nsight Systems export.", _EXPORT)
        self._lengths_ns: list[int] = self._integers("ANALYSIS_DETAILS", ("duration",)).ravel().tolist()
        self._strings = {i: s for i, s in self._select("StringIds", ("id", "value"))
                         if isinstance(i, int) and isinstance(s, str)}
        self._thread_names = {
            pid: str(name).rsplit("/", 1)[-1] for pid, name in self._select("PROCESSES", ("globalPid", "name"))} | {
            tid: self._strings.get(i, "") for tid, i in self._select("ThreadNames", ("globalTid", "nameId"))}

    def _tables(self) -> list[str]:
        # Not views and virtual tables, whose rows are computed, by whatever the file says.
        query = "SELECT name FROM sqlite_master WHERE type = 'table' AND sql LIKE 'CREATE TABLE%'"
        return [row[0] for rows in self._fetch(query) for row in rows if isinstance(row[0], str)]

    def read(self) -> Trace:
        builder = self._builder
        host = next((str(v) for n, v in self._select("TARGET_INFO_SYSTEM_ENV", ("name", "value"), text=True)
                     if n == "Hostname"), "")
        if host:
            builder.hosts.append(host)
        calls = self._read_calls(host)
        self._read_ranges(host)
        self._read_devices(host, calls)
        self._note_late_calls(calls)
        messages = [(severity, text) for severity, text in self._select("DIAGNOSTIC_EVENT", ("severity", "text"))
                    if isinstance(text, str) and not self._is_no_news(text)]
        errors, warnings = (  # 3 and 2 of ENUM_DIAGNOSTIC_SEVERITY_LEVEL
            [text[:_MAX_MESSAGE_CHARS] for severity, text in messages if severity == level][:_MAX_MESSAGES]
            for level in (3, 2))
        note_messages(builder, errors, warnings)
        if self._damage:
            builder.note("truncated", f"{self._path} is damaged ({self._damage[0]}); gputop uses the readable part.")
        return builder.finish([self._path], to_unix_ns=self._to_unix(), windows_ns=self._window(),
                              empty_fix="Record with `nsys profile --trace=cuda,nvtx`.")

    def _note_late_calls(self, calls: _Calls) -> None:
        """A note where the program ran for most of the recording before it called CUDA, which no event shows."""
        seen = np.concatenate([self._integers(table, ("start",)).ravel() for table in ("COMPOSITE_EVENTS", "OSRT_API")])
        seen = seen[seen >= 0]
        if len(seen) and len(calls.start_ns) and self._builder.device:
            before_ns, all_ns = calls.start_ns[0] - seen.min(), calls.end_ns.max() - seen.min()
            if before_ns >= max(_LATE * all_ns, _LATE_NS):
                self._builder.note("late_calls", (
                    f"The program ran for {seconds(before_ns / 1e9)} before its first CUDA call, "
                    f"{percent(before_ns / all_ns)} of the time until its last one. gputop evaluates only the time "
                    "from the first call on."))

    def _window(self) -> dict[int, tuple[int, int]]:
        """Begin and end of the recording of a program without work on a GPU: its calls of CUDA show little of it."""
        if self._builder.device:
            return {}
        last = max((int(events.end_ns.max()) for events in self._builder.host), default=0)
        return {line.rank: (0, ns) for ns in self._lengths_ns if last <= ns < _MAX_NS for line in self._builder.lines}

    def _is_no_news(self, message: str) -> bool:
        """Return whether Nsight Systems only misses what gputop does not read, or what another process has."""
        missed = _MISSED.match(message)
        tables = _MISSED_TABLES.get(missed[1], ()) if missed is not None else ()
        return missed is not None and (not tables or any(table in self._columns for table in tables))

    def _to_unix(self) -> int | None:
        """Event times are on the system's clock, or (older versions) count from the session's start."""
        for utc, clock in self._integers("TARGET_INFO_SESSION_START_TIME", ("utcEpochNs", "systemClockNs"), 0).tolist():
            if 0 < utc < _MAX_NS and 0 <= clock < _MAX_NS:
                return utc - clock
        return None

    def _read_calls(self, host: str) -> _Calls:
        rows = self._integers(_CALLS, ("start", "end", "globalTid", "nameId", "correlationId"))
        rows = rows[_sane(rows[:, 0], rows[:, 1])]
        rows = rows[np.argsort(rows[:, 0], kind="stable")]
        line = self._host_lines(rows[:, 2], host)
        name = self._names_of(rows[:, 3], _VERSION)
        if len(rows):
            self._builder.host.append(HostEvents(line, name, rows[:, 0].copy(), rows[:, 1].copy()))
            self._read_other_calls(host, rows)
        return _Calls(rows[:, 4], rows[:, 2] & _PROCESS, rows[:, 0], rows[:, 1], line)

    def _read_other_calls(self, host: str, calls: I64) -> None:
        """Long waits of the threads that call CUDA, from their first such call to the last one."""
        rows = np.concatenate([self._integers(table, ("start", "end", "globalTid", name))
                               for table, name in _OTHER_CALLS])
        waits = [i for i, name in self._strings.items() if _WAITS.match(name)]
        rows = rows[(rows[:, 0] >= calls[0, 0]) & (rows[:, 1] <= calls[:, 1].max()) & (
            rows[:, 1] - rows[:, 0] >= _LONG_NS) & np.isin(rows[:, 2], calls[:, 2]) & np.isin(rows[:, 3], waits)]
        if len(rows):
            self._builder.host.append(HostEvents(self._host_lines(rows[:, 2], host), self._names_of(rows[:, 3]),
                                                 rows[:, 0].copy(), rows[:, 1].copy()))

    def _read_ranges(self, host: str) -> None:
        names = self._builder.names
        columns = ("start", "end", "eventType", "globalTid", "textId")
        numbers = self._integers("NVTX_EVENTS", columns)
        texts = [row[0] for row in self._select("NVTX_EVENTS", ("text",), text=True)]
        n = min(len(numbers), len(texts))  # they differ only where the file is damaged
        numbers, texts = numbers[:n], texts[:n]
        # A range that nobody closed ends with the recording, or has no end: what the host did meanwhile is not known.
        keep = np.isin(numbers[:, 2], _RANGES) & _sane(numbers[:, 0], numbers[:, 1]) & ~np.isin(
            numbers[:, 1], self._lengths_ns)
        rows = numbers[keep]
        if len(rows):
            of_rows = [texts[i] or self._strings.get(text_id, "")
                       for i, text_id in zip(np.flatnonzero(keep).tolist(), rows[:, 4].tolist(), strict=True)]
            number = {text: names[_NUMBERING.sub("", text)] for text in dict.fromkeys(of_rows)}
            name = np.array([number[text] for text in of_rows], np.int32)
            self._builder.host.append(HostEvents(
                self._host_lines(rows[:, 3], host), name, rows[:, 0].copy(), rows[:, 1].copy()))

    def _read_devices(self, host: str, calls: _Calls) -> None:
        common = ("start", "end", "deviceId", "streamId", "correlationId", "globalPid")
        kernel = self._integers(_KERNELS, (*common, "demangledName", "shortName", *_SHAPE))
        copy = self._integers(_COPIES, (*common, "bytes", "copyKind", "srcKind", "dstKind"))
        memset = self._integers(_MEMSETS, (*common, "bytes", "memKind"))
        graph = self._integers(_GRAPHS, common)
        kernel, copy, memset, graph = (rows[_sane(rows[:, 0], rows[:, 1]) & (rows[:, 2] >= 0) & (rows[:, 2] < MAX_GPUS)]
                                       for rows in (kernel, copy, memset, graph))
        names, memory = self._builder.names, self._memory_kinds()
        a, b = len(kernel), len(kernel) + len(copy)
        c = b + len(memset)
        out = DeviceEvents.empty(c + len(graph))
        has_name = np.isin(kernel[:, 6], np.fromiter(self._strings, np.int64, len(self._strings)))
        out.name[:a] = self._names_of(np.where(has_name, kernel[:, 6], kernel[:, 7]))
        distinct, which = np.unique(out.name[:a], return_inverse=True)
        kinds = [kernel_names.classify(names.list[i]).kind for i in distinct.tolist()]
        out.kind[:a] = np.array(kinds, np.uint8)[which]
        out.kind[a:b] = IntMap({i: int(kind) for i, kind in _COPY_KINDS.items()}, int(Kind.COPY_OTHER))(copy[:, 7])
        for kind in np.unique(out.kind[a:b]).tolist():
            out.name[a:b][out.kind[a:b] == kind] = names[_COPY_NAMES[Kind(kind)]]
        if len(memset):
            out.name[b:c], out.kind[b:c] = names[_COPY_NAMES[Kind.MEMSET]], Kind.MEMSET
        if len(graph):
            out.name[c:] = names["CUDA graph"]
            self._builder.note("whole_graphs", (
                f"The report has {len(graph):,} launches of whole CUDA graphs, without their kernels. Record with "
                "--cuda-graph-trace=node to see the kernels."))
        out.bytes[a:b], out.bytes[b:c] = copy[:, 6], memset[:, 6]
        out.src[a:b], out.dst[a:b], out.dst[b:c] = memory(copy[:, 8]), memory(copy[:, 9]), memory(memset[:, 7])
        migrated = a + np.flatnonzero(np.isin(copy[:, 7], _MIGRATIONS))
        out.src[migrated] = out.dst[migrated] = MemoryKind.MANAGED
        rows = np.concatenate([kernel[:, :6], copy[:, :6], memset[:, :6], graph])
        out.start_ns, out.end_ns, out.correlation = (rows[:, i].copy() for i in (0, 1, 4))
        if len(out):
            self._place(out, rows, host)
            self._shapes(out, kernel[:, 8:])
            self._join(out, rows[:, 5], calls)
            self._builder.device.append(out)

    def _place(self, out: DeviceEvents, rows: I64, host: str) -> None:
        """Set GPUs and streams. A process may number its devices differently; the report then contains the mapping."""
        about = {row[0]: row for row in self._select(
            "TARGET_INFO_GPU", ("id", "name", "totalMemory", "computeMajor", "computeMinor", "smCount"))}
        physical = {(pid, cuda): gpu for gpu, cuda, pid in self._select(
            "TARGET_INFO_CUDA_DEVICE", ("gpuId", "cudaId", "pid")) if isinstance(gpu, int) and 0 <= gpu < MAX_GPUS}
        triples, where = np.unique(rows[:, [2, 3, 5]], axis=0, return_inverse=True)
        where = where.reshape(-1)
        owners = {}
        for device, _, process in triples.tolist():
            owners[device, process] = physical.get((process >> 24 & 0xFFFFFF, device), device)
        ranks = {process: i for i, process in enumerate(sorted({process for _, process in owners}))}
        index: dict[int, int] = {}
        for (_, process), ordinal in sorted(owners.items(), key=lambda item: item[1]):
            if ordinal not in index:
                index[ordinal] = len(self._builder.gpus)
                self._builder.gpus.append(_gpu(host, ordinal, ranks[process], about.get(ordinal)))
        gpus = [index[owners[device, process]] for device, _, process in triples.tolist()]
        lines = [self._builder.add_line(Line(host, gpu, f"Stream #{stream}", ranks[process]))
                 for gpu, (_, stream, process) in zip(gpus, triples.tolist(), strict=True)]
        for tid, line in self._thread_lines.items():
            if tid & _PROCESS in ranks:
                self._builder.lines[line] = replace(self._builder.lines[line], rank=ranks[tid & _PROCESS])
        out.gpu[:], out.line[:] = np.array(gpus)[where], np.array(lines)[where]

    def _shapes(self, out: DeviceEvents, kernels_: I64) -> None:
        """Set the launch shapes of the kernels, which are the first rows, with the occupancy computed from each."""
        builder = self._builder
        gpu = out.gpu[:len(kernels_)].astype(np.int64)
        # Equal hashes are taken for equal rows.
        _, first, where = np.unique(row_hashes((gpu, *kernels_.T)), return_index=True, return_inverse=True)
        shapes = []
        for row, i in zip(kernels_[first].tolist(), gpu[first].tolist(), strict=True):
            x, y, z, bx, by, bz, registers, static, dynamic = row
            plausible = all(0 < n < 1 << 32 for n in row[:6])
            shared = static + dynamic if static >= 0 and dynamic >= 0 else -1
            shapes.append(builder.shape(LaunchShape((x, y, z), (bx, by, bz), registers, shared, theoretical_occupancy(
                builder.gpus[i].compute_capability, bx * by * bz, registers, shared)) if plausible else None))
        out.shape[:len(kernels_)] = np.array(shapes, np.int32)[where]

    def _join(self, out: DeviceEvents, process: I64, calls: _Calls) -> None:
        """Set the launches, by correlation id, which counts per process."""
        processes = np.unique(process)
        on_gpus = np.isin(calls.process, processes)
        index = np.searchsorted(processes, calls.process)
        calls_of = Launches(np.where(on_gpus, calls.correlation, -1), np.where(on_gpus, index, -1), calls.start_ns,
                            range(len(processes)))
        set_launches(out, calls_of.find(out.correlation, np.searchsorted(processes, process)), calls.start_ns,
                     calls.end_ns, calls.line)

    def _memory_kinds(self) -> IntMap:
        """The report's own table of memory kinds, else the schema's documented numbers."""
        table = {i: kernel_names.memory_kind(label) for i, label in self._select("ENUM_CUDA_MEM_KIND", ("id", "label"))
                 if isinstance(i, int) and isinstance(label, str)}
        return IntMap(table or _MEMORY_KINDS, 0)

    def _host_lines(self, global_tids: I64, host: str) -> npt.NDArray[np.int32]:
        for tid in np.unique(global_tids).tolist():
            if tid not in self._thread_lines:
                name = self._thread_names.get(tid) or self._thread_names.get(tid & _PROCESS) or "thread"
                self._thread_lines[tid] = self._builder.add_line(Line(host, -1, f"{name}/{tid & 0xFFFFFF}"))
        return IntMap(self._thread_lines)(global_tids).astype(np.int32)

    def _names_of(self, string_ids: I64, without: re.Pattern[str] | None = None) -> npt.NDArray[np.int32]:
        """Numbers of the names, each less what matches ``without``."""
        names = self._builder.names
        used = {i: self._strings.get(i, "") for i in np.unique(string_ids).tolist()}
        if without is not None:
            used = {i: without.sub("", name) for i, name in used.items()}
        return IntMap({i: names[name] for i, name in used.items()})(string_ids).astype(np.int32)

    def _integers(self, table: str, columns: Sequence[str], absent: int = -1) -> I64:
        """A table as int64 columns; an absent column, a NULL and what is no number become ``absent``."""
        present = self._columns.get(table, set())
        casts = [f'COALESCE(CAST("{c}" AS INTEGER), {absent})' if c in present else str(absent) for c in columns]
        if not present:
            return np.empty((0, len(columns)), np.int64)
        pieces = [np.empty((0, len(columns)), np.int64)]
        for rows in self._fetch(f'SELECT {", ".join(casts)} FROM "{table}"', _BATCH):
            pieces.append(np.array(rows, np.int64).reshape(len(rows), len(columns)))
        return np.concatenate(pieces)

    def _select(self, table: str, columns: Sequence[str], *, text: bool = False) -> list[tuple[Any, ...]]:
        """A small table as Python values; an absent column is None, ``text`` makes everything else a string."""
        present = self._columns.get(table, set())
        if not present:
            return []
        wanted = [(f'CAST("{c}" AS TEXT)' if text else f'"{c}"') if c in present else "NULL" for c in columns]
        return [row for rows in self._fetch(f'SELECT {", ".join(wanted)} FROM "{table}"') for row in rows]

    def _fetch(self, query: str, at_once: int = 1) -> Iterator[list[tuple[Any, ...]]]:
        """Rows in batches. Damage ends them early and is added to ``_damage``.

        Pages of a damaged file that refer to each other in circles would yield rows or text without end, so no more
        is read than the file has room for. That is looked at after so many rows: after each where they may hold text.
        """
        rows: list[tuple[Any, ...]] = []
        room, before = self._file_bytes + _SCHEMA_BYTES, 0
        try:
            cursor = self._db.execute(query)
            while room >= 0:
                rows.extend(islice(cursor, at_once))  # where damage ends it, the rows before it stay
                if len(rows) == before:
                    break
                room -= _ROW_BYTES * (len(rows) - before)
                if at_once == 1:
                    room -= sum([len(value) for value in rows[-1] if isinstance(value, (str, bytes))])
                before = len(rows)
                if before >= _BATCH:
                    self._watch.check(self._path)
                    yield rows
                    rows, before = [], 0
            else:
                self._damage.append("a table claims more rows than the file can contain")
        except (sqlite3.Error, ValueError) as error:  # ValueError: text in the schema that cannot be decoded
            self._damage.append("reading takes many more steps than the file size allows"
                                if str(error) == "interrupted" else str(error))
        if rows:
            yield rows


def _sane(start: I64, end: I64) -> npt.NDArray[np.bool_]:
    """Mask of the events whose times are known. A GPU's clock may be behind the session's start."""
    return (start > -_MAX_NS) & (start != -1) & (end >= start) & (end != -1) & (end < _MAX_NS)


def _gpu(host: str, ordinal: int, rank: int, about: tuple[Any, ...] | None) -> TraceGpu:
    _, name, memory, major, minor, sms = about or (None,) * 6
    return TraceGpu(host, ordinal, rank, str(name or ""),
                    (major, minor) if isinstance(major, int) and isinstance(minor, int) else None,
                    memory if isinstance(memory, int) and memory > 0 else None, sm_count(sms))

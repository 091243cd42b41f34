"""An Nsight Systems report, exported to SQLite, into a Trace. The file is only ever read.

Tables: NVIDIA, "Nsight Systems, Exporter SQLite schema"; which ones and which columns exist
depends on the version and on what was traced, so each is optional.
"""

from __future__ import annotations

import re
import sqlite3
from pathlib import Path

import numpy as np

from gputop.errors import GputopError
from gputop.trace import kernels
from gputop.trace.columns import Parts, launches
from gputop.trace.model import I64, DeviceEvents, HostEvents, Kind, Line, Trace, TraceGpu

_KERNELS, _COPIES, _MEMSETS = (f"CUPTI_ACTIVITY_KIND_{kind}" for kind in ("KERNEL", "MEMCPY", "MEMSET"))
_CALLS = "CUPTI_ACTIVITY_KIND_RUNTIME"
_ACTIVITIES = (_KERNELS, _COPIES, _MEMSETS, _CALLS, "NVTX_EVENTS")
# CUpti_ActivityMemcpyKind; copies to and from arrays count by direction.
_COPY_KINDS = {1: Kind.H2D, 2: Kind.D2H, 3: Kind.H2D, 4: Kind.D2H, 5: Kind.D2D, 6: Kind.D2D, 7: Kind.D2D,
               8: Kind.D2D, 10: Kind.P2P, 11: Kind.H2D, 12: Kind.D2H, 13: Kind.D2D}
_COPY_NAMES = {Kind.H2D: "MemcpyH2D", Kind.D2H: "MemcpyD2H", Kind.D2D: "MemcpyD2D", Kind.P2P: "MemcpyP2P",
               Kind.COPY_OTHER: "MemcpyOther", Kind.MEMSET: "Memset"}
_PROCESS = ~0xFFFFFF  # a global thread id is the global process id plus the thread's 24 bits
_RANGES = (59, 60)  # NVTX: push/pop and start/end ranges
# PyTorch's emit_nvtx numbers each call, which would make every name unique.
_NUMBERING = re.compile(r", (?:op_id|seq) = .*", re.DOTALL)
_MAX_NS = 1 << 61


def read_nsys(path: Path) -> Trace:
    """The report's GPU activity, launches and NVTX ranges.

    Raises GputopError where the file is no such export, NothingToSee where it has no activity.
    """
    # immutable: no lock and no journal beside it, so that read-only folders work as well
    uri = f"{path.resolve().as_uri()}?mode=ro&immutable=1"
    try:
        connection = sqlite3.connect(uri, uri=True)
    except sqlite3.Error as error:
        raise GputopError(f"{path} cannot be opened: {error}.", "Check that the file may be read.") from error
    connection.text_factory = lambda raw: raw.decode("utf-8", "replace")
    try:
        return _Report(connection, str(path)).read()
    finally:
        connection.close()


class _Report:
    def __init__(self, connection: sqlite3.Connection, path: str) -> None:
        self._db, self._path = connection, path
        self._parts = Parts()
        self._damage: list[str] = []
        rows = self._rows("SELECT name FROM sqlite_master WHERE type = 'table'")
        tables = [row[0] for row in rows if isinstance(row[0], str)]
        self._columns = {t: {r[1] for r in self._rows(f'PRAGMA table_info("{t}")')} for t in tables
                         if re.fullmatch(r"\w+", t)}
        if self._damage and not self._columns:
            raise GputopError(f"{path} is damaged: {self._damage[0]}.", "Export the report again: nsys export --type sqlite")
        if not set(self._columns) & {*_ACTIVITIES, "StringIds", "TARGET_INFO_GPU"}:
            raise GputopError(f"{path} is an SQLite file, but no export of Nsight Systems.",
                              "Make one with: nsys export --type sqlite report.nsys-rep")
        self._strings = {i: s for i, s in self._select("StringIds", {"id": -1, "value": ""}, texts=("value",))}

    def read(self) -> Trace:
        parts = self._parts
        host = self._text("TARGET_INFO_SYSTEM_ENV", "value", "name = 'Hostname'")
        parts.hosts.append(host)
        calls = self._read_calls(host)
        self._read_ranges(host)
        self._read_devices(host, calls)
        if self._damage:
            parts.note("truncated", f"{self._path} is damaged ({self._damage[0]}): some of its tables could not be read "
                                    "to the end.")
        start = self._integers("TARGET_INFO_SESSION_START_TIME", {"utcEpochNs": 0, "systemClockNs": 0})
        offset = int(start[0, 0] - start[0, 1]) if len(start) and 0 < start[0, 0] < _MAX_NS else 0
        trace = parts.finish("nsys", [self._path], wall_clock=False,
                             empty_fix="Record with `nsys profile --trace=cuda,nvtx` while the job trains.")
        first = self._first_ns
        trace.origin_ns = first + offset if offset else 0
        return trace

    @property
    def _first_ns(self) -> int:
        return self._first

    def _read_devices(self, host: str, calls: tuple[I64, I64, I64, I64]) -> None:
        common = {"start": -1, "end": -1, "deviceId": -1, "streamId": -1, "correlationId": -1, "globalPid": -1}
        kernel = self._integers(_KERNELS, {**common, "demangledName": -1, "shortName": -1})
        copy = self._integers(_COPIES, {**common, "bytes": -1, "copyKind": 0, "srcKind": -1, "dstKind": -1})
        memset = self._integers(_MEMSETS, {**common, "bytes": -1, "memKind": -1})
        memory = self._memory_kinds()
        names = self._parts.names
        out = DeviceEvents.empty(len(kernel) + len(copy) + len(memset))
        a, b = len(kernel), len(kernel) + len(copy)
        kernel_names = np.where(np.isin(kernel[:, 6], list(self._strings)), kernel[:, 6], kernel[:, 7])
        for i in np.unique(kernel_names).tolist():
            text = self._strings.get(i, "")
            at = np.flatnonzero(kernel_names == i)
            out.name[at], out.kind[at] = names[text], kernels.classify(text).kind
        for i in np.unique(copy[:, 7]).tolist():
            kind = _COPY_KINDS.get(i, Kind.COPY_OTHER)
            at = a + np.flatnonzero(copy[:, 7] == i)
            out.name[at], out.kind[at] = names[_COPY_NAMES[kind]], kind
        out.bytes[a:b], out.bytes[b:] = copy[:, 6], memset[:, 6]
        out.src[a:b], out.dst[a:b], out.dst[b:] = memory(copy[:, 8]), memory(copy[:, 9]), memory(memset[:, 7])
        if len(memset):
            out.name[b:], out.kind[b:] = names["Memset"], Kind.MEMSET
        rows = np.concatenate([kernel[:, :6], copy[:, :6], memset[:, :6]])
        out.start_ns, out.end_ns, out.correlation = rows[:, 0].copy(), rows[:, 1].copy(), rows[:, 4].copy()
        out = self._place(out, rows, host)
        if len(out):
            self._join(out, rows, calls)
            self._parts.device.append(out)

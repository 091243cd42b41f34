"""An Nsight Systems report as SQLite."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping, Sequence
from pathlib import Path

PROCESS = [(1 << 48) | (pid << 24) for pid in (500, 501)]
TABLES = {
    "StringIds": "id INTEGER, value TEXT",
    "CUPTI_ACTIVITY_KIND_KERNEL": "start INTEGER, end INTEGER, deviceId INTEGER, streamId INTEGER, "
                                  "correlationId INTEGER, globalPid INTEGER, demangledName INTEGER, shortName INTEGER",
    "CUPTI_ACTIVITY_KIND_MEMCPY": "start INTEGER, end INTEGER, deviceId INTEGER, streamId INTEGER, "
                                  "correlationId INTEGER, globalPid INTEGER, bytes INTEGER, copyKind INTEGER, "
                                  "srcKind INTEGER, dstKind INTEGER",
    "CUPTI_ACTIVITY_KIND_MEMSET": "start INTEGER, end INTEGER, deviceId INTEGER, streamId INTEGER, "
                                  "correlationId INTEGER, globalPid INTEGER, bytes INTEGER",
    "CUPTI_ACTIVITY_KIND_RUNTIME": "start INTEGER, end INTEGER, globalTid INTEGER, correlationId INTEGER, "
                                   "nameId INTEGER",
    "TARGET_INFO_GPU": "id INTEGER, name TEXT, totalMemory INTEGER, computeMajor INTEGER, computeMinor INTEGER, "
                       "smCount INTEGER",
    "TARGET_INFO_CUDA_DEVICE": "gpuId INTEGER, cudaId INTEGER, pid INTEGER",
    "TARGET_INFO_SESSION_START_TIME": "utcEpochNs INTEGER, systemClockNs INTEGER",
    "TARGET_INFO_SYSTEM_ENV": "name TEXT, value TEXT",
    "NVTX_EVENTS": "start INTEGER, end INTEGER, eventType INTEGER, text TEXT, globalTid INTEGER, textId INTEGER",
    "ThreadNames": "nameId INTEGER, globalTid INTEGER",
}
# Two processes that each call their GPU 0; both use correlation id 7.
ROWS = {
    "StringIds": [(1, "ampere_sgemm_128x64_tn"), (2, "ncclDevKernel_AllReduce_Sum_f32"), (3, "cudaLaunchKernel"),
                  (4, "forward"), (5, "python3")],
    "CUPTI_ACTIVITY_KIND_KERNEL": [(1100, 1200, 0, 7, 7, PROCESS[0], 1, 3), (1150, 1300, 0, 7, 7, PROCESS[1], None, 2)],
    "CUPTI_ACTIVITY_KIND_MEMCPY": [(1300, 1310, 0, 7, 8, PROCESS[0], 4096, 1, 0, 2),
                                   (1320, 1330, 0, 7, 9, PROCESS[0], 512, 99, None, None)],
    "CUPTI_ACTIVITY_KIND_MEMSET": [(1400, 1410, 0, 7, None, PROCESS[0], 64)],
    "CUPTI_ACTIVITY_KIND_RUNTIME": [(1010, 1020, PROCESS[0] + 500, 7, 3), (1000, 1005, PROCESS[1] + 501, 7, 3)],
    "TARGET_INFO_GPU": [(2, "H100", 80 << 30, 9, 0, 132), (3, "H100", 80 << 30, 9, 0, -1)],
    "TARGET_INFO_CUDA_DEVICE": [(2, 0, 500), (3, 0, 501)],
    "TARGET_INFO_SESSION_START_TIME": [(1_700_000_000_000_000_000, 500)],
    "TARGET_INFO_SYSTEM_ENV": [("CpuCores", "18"), ("Hostname", "node")],
    "NVTX_EVENTS": [(1001, 1500, 59, "aten::mm, op_id = 12", PROCESS[0] + 500, None),
                    (1002, 1400, 60, None, PROCESS[0] + 500, 4), (1003, None, 59, "open", PROCESS[0] + 500, None),
                    (1004, 1005, 34, "mark", PROCESS[0] + 500, None)],
    "ThreadNames": [(5, PROCESS[0] + 500)],
}


def report(path: Path, without: tuple[str, ...] = (), *changes: str | tuple[str, Sequence[object]]) -> Path:
    """``changes``: statements of SQL, each with its values if it has some."""
    return write_tables(path, {table: ROWS[table] for table in TABLES if table not in without}, *changes)


def write_tables(path: Path, rows_of: Mapping[str, Sequence[tuple[object, ...]]],
                 *changes: str | tuple[str, Sequence[object]]) -> Path:
    """A report of these of the tables, with these rows."""
    database = sqlite3.connect(path)
    for table, rows in rows_of.items():
        database.execute(f"CREATE TABLE {table} ({TABLES[table]})")
        for row in rows:
            database.execute(f"INSERT INTO {table} VALUES ({','.join('?' * len(row))})", row)
    for change in changes:
        database.execute(*((change,) if isinstance(change, str) else change))
    database.commit()
    database.close()
    return path

"""An Nsight Systems report of a PyTorch loop whose iterations are numbered NVTX ranges. Times are milliseconds."""

from __future__ import annotations

import sqlite3
from pathlib import Path

_PROCESS = (1 << 48) | (500 << 24)
_MS = 1_000_000
_TABLES = {
    "StringIds": "id INTEGER, value TEXT",
    "CUPTI_ACTIVITY_KIND_KERNEL": "start INTEGER, end INTEGER, deviceId INTEGER, streamId INTEGER, "
                                  "correlationId INTEGER, globalPid INTEGER, demangledName INTEGER, shortName INTEGER",
    "CUPTI_ACTIVITY_KIND_RUNTIME": "start INTEGER, end INTEGER, globalTid INTEGER, correlationId INTEGER, "
                                   "nameId INTEGER",
    "TARGET_INFO_GPU": "id INTEGER, name TEXT",
    "NVTX_EVENTS": "start INTEGER, end INTEGER, eventType INTEGER, text TEXT, globalTid INTEGER",
    "ThreadNames": "nameId INTEGER, globalTid INTEGER",
}
_KERNELS = 20  # of each iteration


def numbered_report(path: Path, mark: str, *, steps: int = 30, work: int = 60, pause: int = 90,
                    restart: int = 1 << 30, ops: bool = True) -> Path:
    """``mark`` names each iteration's range, as "step {}"; in each run "layer 0" to "layer 3" and kernels. The numbers
    start over after ``restart`` iterations. ``ops``: PyTorch's are recorded, else its kernels alone tell of it."""
    database = sqlite3.connect(path)
    for table, columns in _TABLES.items():
        database.execute(f"CREATE TABLE {table} ({columns})")

    def add(table: str, *row: object) -> None:
        database.execute(f"INSERT INTO {table} VALUES ({','.join('?' * len(row))})", row)

    kernel = "sm90_xmma_gemm_bf16bf16_bf16f32_tn" if ops else "void at::native::elementwise_kernel<128, 4>"
    for number, text in ((1, kernel), (3, "cudaLaunchKernel"), (5, "python3")):
        add("StringIds", number, text)
    add("TARGET_INFO_GPU", 0, "NVIDIA H100 80GB HBM3")
    add("ThreadNames", 5, _PROCESS + 500)
    each = work * _MS // _KERNELS
    for i in range(steps):
        begin = i * (work + pause) * _MS
        add("NVTX_EVENTS", begin, begin + work * _MS, 59, mark.format(i % restart), _PROCESS + 500)
        for layer in range(4):
            at = begin + layer * work * _MS // 4
            add("NVTX_EVENTS", at, at + work * _MS // 4, 59, f"layer {layer}", _PROCESS + 500)
        for k in range(_KERNELS):
            at, correlation = begin + k * each, 1 + i * _KERNELS + k
            if ops:
                add("NVTX_EVENTS", at, at + 200_000, 59, f"aten::mm, op_id = {correlation}", _PROCESS + 500)
            add("CUPTI_ACTIVITY_KIND_RUNTIME", at + 1000, at + 9000, _PROCESS + 500, correlation, 3)
            add("CUPTI_ACTIVITY_KIND_KERNEL", at + 12_000, at + each - 5000, 0, 7, correlation, _PROCESS, 1, 1)
    database.commit()
    database.close()
    return path

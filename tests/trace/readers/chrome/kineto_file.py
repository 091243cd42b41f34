"""A Chrome trace as PyTorch's profiler writes it."""

from __future__ import annotations

from typing import Any

COPY = "Memcpy HtoD (Pinned -> Device)"


def event(cat: str, name: str, ts: float, dur: float, *, pid: Any = 100, tid: Any = 1, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "pid": pid, "tid": tid, "ts": ts, "dur": dur, "args": args}


def kineto(rank: int = 0, base: int = 0, start: float = 1_700_000_000_000_000.0) -> dict[str, Any]:
    return {
        "distributedInfo": {"rank": rank}, "baseTimeNanoseconds": base, "host_name": "node",
        "deviceProperties": [{"id": i, "name": "H100", "totalGlobalMem": 80 << 30, "computeMajor": 9, "computeMinor": 0}
                             for i in range(8)],
        "traceEvents": [
            {"ph": "M", "name": "thread_name", "pid": 100, "tid": 1, "args": {"name": "thread 1 (python)"}},
            {"ph": "M", "name": "process_name", "pid": rank, "tid": 0, "args": {"name": "python"}},
            {"ph": "M", "name": "process_labels", "pid": rank, "tid": 0, "args": {"labels": f"GPU {rank}"}},
            event("user_annotation", "ProfilerStep#7", start, 100),
            event("cpu_op", "aten::mm", start + 1, 9, **{"External id": 3}),
            event("cuda_runtime", "cudaLaunchKernel", start + 2.5, 4, correlation=11),
            event("cuda_runtime", "cudaMemcpyAsync", start + 8, 4, correlation=12),
            {"ph": "s", "id": 11, "pid": 100, "tid": 1, "ts": start, "cat": "ac2g", "name": "ac2g"},
            event("kernel", "ampere_sgemm_128x64_tn", start + 10, 5.25, pid=rank, tid=7, device=rank, stream=7,
                  correlation=11),
            event("gpu_memcpy", COPY, start + 20, 2, pid=rank, tid=7, device=rank, stream=7, correlation=12, bytes=832),
            event("gpu_memset", "Memset (Device)", start + 30, 2, pid=rank, tid=7, device=rank, stream=7,
                  correlation=13, bytes=64),
            event("gpu_user_annotation", "ProfilerStep#7", start, 100, pid=rank, tid=7),
            event("Trace", "PyTorch Profiler (0)", start, 100, pid="Spans", tid="PyTorch Profiler")]}

"""An Nsight Systems report of a PyTorch loop whose iterations are numbered NVTX ranges. Times are milliseconds."""

from __future__ import annotations

from pathlib import Path

from tests.trace.readers.nsys_report import PROCESS, write_tables

_MS = 1_000_000
_THREAD = PROCESS[0] + 500
_KERNELS = 20  # of each iteration


def numbered_report(path: Path, mark: str, *, steps: int = 30, work: int = 60, pause: int = 90,
                    restart: int = 1 << 30, ops: bool = True) -> Path:
    """``mark`` names each iteration's range, as "step {}"; in each run "layer 0" to "layer 3" and kernels. The numbers
    start over after ``restart`` iterations. ``ops``: PyTorch's are recorded, else its kernels alone tell of it."""
    kernel = "sm90_xmma_gemm_bf16bf16_bf16f32_tn" if ops else "void at::native::elementwise_kernel<128, 4>"
    ranges: list[tuple[int, int, str]] = []
    calls: list[tuple[object, ...]] = []
    kernels: list[tuple[object, ...]] = []
    each = work * _MS // _KERNELS
    for i in range(steps):
        begin = i * (work + pause) * _MS
        ranges.append((begin, begin + work * _MS, mark.format(i % restart)))
        for layer in range(4):
            at = begin + layer * work * _MS // 4
            ranges.append((at, at + work * _MS // 4, f"layer {layer}"))
        for k in range(_KERNELS):
            at, correlation = begin + k * each, 1 + i * _KERNELS + k
            if ops:
                ranges.append((at, at + 200_000, f"aten::mm, op_id = {correlation}"))
            calls.append((at + 1000, at + 9000, _THREAD, correlation, 3))
            kernels.append((at + 12_000, at + each - 5000, 0, 7, correlation, PROCESS[0], 1, 1))
    return write_tables(path, {
        "StringIds": [(1, kernel), (3, "cudaLaunchKernel"), (5, "python3")],
        "TARGET_INFO_GPU": [(0, "NVIDIA H100 80GB HBM3", None, None, None, None)], "ThreadNames": [(5, _THREAD)],
        "NVTX_EVENTS": [(begin, end, 59, text, _THREAD, None) for begin, end, text in ranges],
        "CUPTI_ACTIVITY_KIND_RUNTIME": calls, "CUPTI_ACTIVITY_KIND_KERNEL": kernels})

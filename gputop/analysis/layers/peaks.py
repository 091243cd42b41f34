"""Peaks of GPUs: dense FLOPs by number type and bytes of their memory, as NVIDIA's data sheets state them.

Without sparsity. A GPU is known by its name or, as XSpaces name none, by compute capability, sms, memory
and clock, where those tell it from others. What is not in the table has no peak: computing one from cores and clock
misses boards that NVIDIA limits (H20, A10G, GeForce with FP32 accumulation), by up to a factor of four.
"""

from __future__ import annotations

import re

from msgspec import Struct

from gputop.trace.model import TraceGpu

_T = 1e12


class GpuPeak(Struct, frozen=True):
    """FLOPs per second by number type, bytes per second of the memory, and where both are from."""

    name: str
    flops: dict[str, float]
    bytes_per_s: float
    source: str


class _Row(Struct, frozen=True):
    """``sms``, ``gb`` (memory, from and to) and ``ghz`` (clock, from and to) tell the GPU where it has no name."""

    name: str
    pattern: str
    capability: tuple[int, int]
    sms: int | None
    gb: tuple[float, float]
    ghz: tuple[float, float]
    tflops: dict[str, float]  # bf16, tf32, fp32, fp8, fp16 (as bf16, where it stands)
    bytes_per_s: float


def _types(half: float | None, tf32: float | None, fp32: float | None, fp8: float | None = None,
           fp16: float | None = None) -> dict[str, float]:
    tflops_of = {"bf16": half, "fp16": fp16 or half, "tf32": tf32, "fp32": fp32, "fp8": fp8}
    return {dtype: tflops * _T for dtype, tflops in tflops_of.items() if tflops is not None}


_ANY = (0.0, 1e9)
_HOPPER = _types(989.4, 494.7, 66.9, 1978.9)
_HOPPER_NVL = _types(835.5, 417.5, 60.0, 1670.5)
_ROWS = (
    _Row("H200", r"(?<!G)H200(?! NVL)", (9, 0), 132, (130, 160), (1.9, 3), _HOPPER, 4.8e12),
    _Row("H200 NVL", r"H200 NVL", (9, 0), 132, (130, 160), (1, 1.9), _HOPPER_NVL, 4.8e12),
    _Row("GH200 96GB", r"GH200(?! 144)", (9, 0), 132, (95, 110), (1.9, 3), _HOPPER, 4.0e12),
    _Row("GH200 144GB", r"GH200 144", (9, 0), None, _ANY, _ANY, _HOPPER, 4.9e12),
    _Row("H100 NVL", r"H100 NVL", (9, 0), 132, (95, 110), (1, 1.9), _HOPPER_NVL, 3.9e12),
    _Row("H100 PCIe", r"H100 PCIe", (9, 0), 114, (70, 90), _ANY, _types(756.0, 378.0, 51.2, 1513.0), 2.0e12),
    _Row("H800 PCIe", r"H800 PCIe", (9, 0), None, _ANY, _ANY, _types(756.0, 378.0, 51.2, 1513.0), 2.0e12),
    _Row("H800", r"H800(?! PCIe| NVL)", (9, 0), None, _ANY, _ANY, _HOPPER, 3.35e12),
    _Row("H100 SXM", r"H100(?! PCIe| NVL).*HBM3|H100 SXM", (9, 0), 132, (70, 90), _ANY, _HOPPER, 3.35e12),
    _Row("H20 141GB", r"H20-3e", (9, 0), 78, (130, 160), _ANY, _types(148.0, 74.0, 44.0, 296.0), 4.8e12),
    _Row("H20", r"H20\b(?!-)", (9, 0), 78, (95, 110), _ANY, _types(148.0, 74.0, 44.0, 296.0), 4.0e12),
    _Row("A100 40GB", r"A100.*40GB", (8, 0), 108, (38, 46), _ANY, _types(312.0, 156.0, 19.5), 1.555e12),
    _Row("A100 80GB PCIe", r"A[18]00 80GB PCIe|A[18]00-PCIE-80GB", (8, 0), None, _ANY, _ANY,
         _types(312.0, 156.0, 19.5), 1.935e12),
    _Row("A100 80GB SXM", r"A[18]00.*80GB", (8, 0), 108, (76, 90), _ANY, _types(312.0, 156.0, 19.5), 2.039e12),
    _Row("V100 PCIe", r"V100-PCIE", (7, 0), 80, _ANY, (1, 1.45), _types(None, None, 14.0, fp16=112.0), 0.9e12),
    _Row("V100 SXM2", r"V100-SXM2", (7, 0), 80, _ANY, (1.45, 1.56), _types(None, None, 15.7, fp16=125.0), 0.9e12),
    _Row("T4", r"\bT4\b", (7, 5), 40, (14, 17), _ANY, _types(None, None, 8.1, fp16=65.0), 0.32e12),
    _Row("A10", r"\bA10\b", (8, 6), 72, (22, 26), _ANY, _types(125.0, 62.5, 31.2), 0.6e12),
    _Row("L4", r"\bL4\b", (8, 9), 58, (22, 26), _ANY, _types(121.0, 60.0, 30.3, 242.0), 0.3e12),
    _Row("L40S", r"L40S", (8, 9), None, _ANY, _ANY, _types(362.0, 183.0, 91.6, 733.0), 0.864e12),
    _Row("B200", r"(?<!G)B200", (10, 0), 148, (185, 196), _ANY, _types(2250.0, 1100.0, 75.0, 4500.0), 8.0e12),
)
# Held against NVIDIA's figures as its partners repeat them: the data sheets of H100 (SXM, PCIe), H200, A100
# (nvidia-1758950), V100, T4, L4, L40S.
# H100 NVL and H200 NVL: NVIDIA's pages of both as several repositories cite them, half of 1,671 with sparsity (of
# the H200 NVL they are preliminary there).
# A10: its data sheet, "125 TF | 250 TF*", as two cite it; 72 SMs, 600 GB/s, 31.2 TFLOPs in FP32 by two lists of boards.
# H20: 78 SMs (Geekbench's log), 148, 74 and 44 TFLOPs, 4.0 TB/s with 96 GB of HBM3 and 4.8 TB/s with 141 GB of HBM3e
# (citsjtu2020/LLM-Prof, zangshuxian.com and others agree); NVIDIA publishes no data sheet.
# GH200: its data sheet, 96 GB of HBM3 at 4 TB/s and 144 GB of HBM3e at 4.9 TB/s, the GPU as the H100 SXM: OpenCL
# reports 132 SMs at 1,980 MHz (66.9 TFLOPs in FP32) and 97,280 MiB, and reads 3.6 TB/s (mredenti/PowerCapping).
# H800: as the H100, with less FP64 and NVLink (DeepSeek's report on the hardware of V3; citsjtu2020/LLM-Prof); NVIDIA
# publishes no data sheet of it either.
# B200: the HGX board at 1,000 W as NVIDIA's technical overview of Blackwell has it (glennklockwood.com cites it; FP32
# is 75 by other lists, 80 there), eight GPUs with 64 TB/s in a DGX B200 (server-parts.eu); docs.vultr.com names
# 8.0 TB/s and saw 179 GB. 148 SMs, 183,359 MiB by the driver, as several logs show; a GB200 has more.
_QUOTED = ("H20", "H20 141GB", "H800", "H800 PCIe")
# The fastest type that a model trains in without a change of its numerics: 16 bit.
_BEST = ("bf16", "fp16")


def peak_of(gpu: TraceGpu) -> GpuPeak | None:
    """The peak of a GPU of a trace; None where it is not in the table or cannot be told from others."""
    for row in _ROWS:
        if re.search(row.pattern, gpu.name) if gpu.name else _fits(row, gpu):
            source = f"NVIDIA's data sheet for the {row.name}, dense"
            if row.name in _QUOTED:
                source = f"the {row.name} as several lists quote it, dense; its data sheet was not found"
            return GpuPeak(row.name, row.tflops, row.bytes_per_s, source)
    return None


def _fits(row: _Row, gpu: TraceGpu) -> bool:
    if row.sms is None or (gpu.compute_capability, gpu.sms) != (row.capability, row.sms):
        return False
    gb, ghz = (gpu.memory_bytes or 0) / 1e9, (gpu.clock_hz or 0) / 1e9
    return row.gb[0] <= gb <= row.gb[1] and row.ghz[0] <= ghz <= row.ghz[1]


def best_type(peak: GpuPeak) -> str:
    return next(dtype for dtype in _BEST if dtype in peak.flops)

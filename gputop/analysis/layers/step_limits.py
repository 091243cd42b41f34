"""The limit ladder: from the step as it is down to what its work would take at this GPU's limit, in steps that sum.

The waiting and what is not overlapped are the step's parts. The rest is compute: of each op of a compiled program its
FLOPs and bytes are known, so that its time can be held against its roofline, the longer of FLOPs / peak and bytes /
memory bandwidth (Williams, Waterman, Patterson: "Roofline", CACM 2009). MFU is the time of the model's FLOPs at the
peaks of the types they are computed in, as a share of the step; what is computed again counts for HFU only
(Chowdhery et al., "PaLM", 2022, appendix B).
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from msgspec import Struct
from msgspec.structs import replace

from gputop.analysis.layers.layers import LayerTimes, OpUse
from gputop.analysis.layers.scopes import scope_of
from gputop.analysis.results import Breakdown, GpuUse, Limits, LimitStep, Peak, RooflinePoint
from gputop.analysis.steps.model import Steps
from gputop.trace.kernel_names import classify
from gputop.trace.model import TraceGpu

MIN_COVERAGE = 0.7  # share of the compute time, below which there is no single figure
_MAX_POINTS, _MAX_NAME = 60, 160
_WAITING = ("input", "host", "launch", "idle")
_EXPOSED = ("collectives", "h2d", "d2h")


def limits(
    parts: Breakdown | None, times: LayerTimes | None, gpus: Sequence[TraceGpu], steps: Steps, uses: Sequence[GpuUse],
    given_flops: float | None = None,
) -> Limits | None:
    """The ladder of the mean step. ``uses``: what the GPUs did, for the number types by the kernels' names.
    ``given_flops``: those of one iteration on all ``gpus`` together, as the user states them; they take the place of
    what the programs tell. None where nothing was computed."""
    if parts is None or not gpus or not parts.compute:
        return None
    known_steps = [LimitStep(part, getattr(parts, part) or 0.0) for part in (*_WAITING, *_EXPOSED)]
    kinds = {replace(gpu, host="", ordinal=0, rank=0) for gpu in gpus}
    peak = peak_of(gpus[0]) if len(kinds) == 1 else None
    if peak is None:
        reason = "The GPUs are of different models." if len(kinds) > 1 else (
            "The peak of this GPU is unknown because gputop's table does not list it, or the trace does not name it.")
    elif given_flops is not None and steps.times.unit != "step":
        reason = "You gave the FLOPs of a step, but the repeated part of this trace may be a layer."
    elif given_flops is not None:
        return _of_given(parts, known_steps, peak, given_flops * steps.times.iterations_per_step / len(gpus), uses)
    elif times is not None and times.ops:
        return _of_ops(parts, known_steps, peak, times)
    else:
        reason = "The trace has no FLOPs for its kernels. Use --flops-per-step N to set the FLOPs of a step."
    return Limits(step_s=parts.total, steps=(*known_steps, LimitStep("unknown", parts.compute)), reason=reason)


def _of_given(
    parts: Breakdown, known_steps: list[LimitStep], peak: GpuPeak, flops: float, uses: Sequence[GpuUse],
) -> Limits:
    """Limits with the user's FLOPs: the type is the one that most kernel time has, of those whose names tell."""
    compute = parts.compute or 0.0
    by_name = dict.fromkeys(peak.flops, 0.0)
    for use in uses:
        for dtype, share in (use.kernel_time_by_type or {}).items():
            if dtype in by_name:
                by_name[dtype] += share
    best = best_type(peak)
    used = max(by_name, key=lambda dtype: by_name[dtype]) if any(by_name.values()) else best
    ideal = flops / max(peak.flops[used], peak.flops[best])
    at_used = flops / peak.flops[used]
    mfu = at_used / parts.total
    sound = at_used <= compute
    split = (LimitStep("kernels", compute - at_used), LimitStep("types", at_used - ideal), LimitStep("limit", ideal))
    return Limits(
        step_s=parts.total, gpu=peak.name,
        steps=(*known_steps, *(split if sound else (LimitStep("unknown", compute),))),
        peaks=(Peak(used, peak.flops[used], peak.source),), bytes_per_s=peak.bytes_per_s, flops=flops,
        flops_source="given", coverage=1.0, mfu=mfu if sound else None,
        reason="" if sound else (
            f"{flops:.3g} FLOPs per step and GPU would take longer at the {used} peak than the kernels took, so the "
            "given number is too large or covers more GPUs than the trace."))


def _of_ops(parts: Breakdown, known_steps: list[LimitStep], peak: GpuPeak, times: LayerTimes) -> Limits:
    compute = parts.compute or 0.0
    total = dict.fromkeys(("measured", "roofline", "ideal"), 0.0)
    model = hardware = model_flops = 0.0
    used: dict[str, float] = {}
    work: dict[str, list[float]] = {}  # by op: seconds, FLOPs and bytes per step
    types: dict[str, str] = {}
    best = peak.flops[best_type(peak)]
    for use in times.ops:
        typed = _typed(use, peak)
        if typed is None or use.op.bytes is None or not use.executions:
            continue
        measured = use.device_ns / times.steps / 1e9
        per_step = use.executions / times.steps
        memory = per_step * use.op.bytes / peak.bytes_per_s
        at_used = per_step * sum(n / peak.flops[dtype] for dtype, n in typed.items())
        at_best = per_step * sum(n / (max(best, peak.flops[dtype])) for dtype, n in typed.items())
        roofline = min(measured, max(at_used, memory))
        total["measured"] += measured
        total["roofline"] += roofline
        total["ideal"] += min(roofline, max(at_best, memory))
        hardware += at_used
        if use.phase != "recomputation":
            model += at_used
            model_flops += per_step * sum(typed.values())
        if typed and measured:
            name = "/".join(scope_of(use.op.op_name, True).path) or use.op.op_name or use.kernel
            types[name] = max(typed, key=lambda dtype: typed[dtype])
            sums = work.setdefault(name, [0.0, 0.0, 0.0])
            for i, value in enumerate((measured, per_step * sum(typed.values()), per_step * use.op.bytes)):
                sums[i] += value
        for dtype in typed:
            used[dtype] = used.get(dtype, 0.0) + per_step * typed[dtype]
    coverage = total["measured"] / compute if compute else 0.0
    enough = coverage >= MIN_COVERAGE
    points = sorted((RooflinePoint(name[:_MAX_NAME], types[name], time, flops / time, flops / moved)
                     for name, (time, flops, moved) in work.items() if moved), key=lambda p: (-p.time_s, p.name))
    return Limits(
        points=tuple(points[:_MAX_POINTS]),
        step_s=parts.total, gpu=peak.name, bytes_per_s=peak.bytes_per_s, flops=model_flops, flops_source="programs",
        steps=(*known_steps, LimitStep("unknown", max(compute - total["measured"], 0.0)),
               LimitStep("kernels", total["measured"] - total["roofline"]),
               LimitStep("types", total["roofline"] - total["ideal"]), LimitStep("limit", total["ideal"])),
        peaks=tuple(Peak(dtype, peak.flops[dtype], peak.source) for dtype in sorted(used, key=lambda d: -used[d])),
        coverage=coverage, mfu=model / parts.total if enough and used else None,
        hfu=hardware / parts.total if enough and used else None,
        reason="" if enough else (f"FLOPs and bytes are known for only {coverage:.0%} of the compute time, so there is "
                                  "no single value."))


def _typed(use: OpUse, peak: GpuPeak) -> dict[str, float] | None:
    """FLOPs of one execution by the type that they are computed in; None where they or its peak are not known. FP32
    operands go through TF32 units where the kernel's name says tensor cores, or says nothing: the faster peak claims
    less of a limit."""
    if use.op.flops is None:
        return None
    typed: dict[str, float] = {}
    for dtype, number in use.op.flops:
        if dtype == "fp32" and "tf32" in peak.flops:
            kernel = classify(use.kernel)
            dtype = "fp32" if kernel.tensor_core is False else "tf32"
        if number and dtype not in peak.flops:
            return None
        if number:
            typed[dtype] = typed.get(dtype, 0.0) + number
    return typed


# -- peaks --------------------------------------------------------------------------------------------
#
# Peaks of GPUs: dense FLOPs by number type and bytes of their memory, as NVIDIA's data sheets state them.
#
# Without sparsity. A GPU is known by its name or, as XSpaces name none, by compute capability, sms, memory and clock,
# where those tell it from others. What is not in the table has no peak: computing one from cores and clock misses
# boards that NVIDIA limits (H20, A10G, GeForce with FP32 accumulation), by up to a factor of four.

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

"""The limit ladder: from the step as it is down to what its work would take at this GPU's limit, in steps that sum.

The waiting and what is not overlapped are the step's parts. The rest is compute: of each op of a compiled program its
FLOPs and bytes are known, so that its time can be held against its roofline, the longer of FLOPs / peak and bytes /
memory bandwidth (Williams, Waterman, Patterson: "Roofline", CACM 2009). MFU is the time of the model's FLOPs at the
peaks of the types they are computed in, as a share of the step; what is computed again counts for HFU only
(Chowdhery et al., "PaLM", 2022, appendix B).
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from gputop.analysis.layers.layers import LayerTimes, OpUse
from gputop.analysis.layers.peaks import GpuPeak, best_type, peak_of
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
    what the programs tell. None where nothing was computed.
    """
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
    """FLOPs of one execution by the type that they are computed in; None where they or its peak are not known.

    FP32 operands go through TF32 units where the kernel's name says tensor cores, or says nothing: the faster peak
    claims less of a limit.
    """
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

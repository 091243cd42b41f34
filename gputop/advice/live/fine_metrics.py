"""The live rule about what cannot be seen: GPUs of which only coarse utilization is known."""

from __future__ import annotations

from gputop.advice.live.node_view import NodeView, gpus_text
from gputop.advice.verdict import Explanation, Missing, Verdict


class NoFineMetrics(Verdict, frozen=True, kw_only=True):
    window_s: float
    reason: str | None  # why there is no SM activity


def judge_no_fine_metrics(view: NodeView) -> NoFineMetrics | Missing | None:
    """Coarse utilization alone: a kernel on one SM counts like one on all."""
    window_s = view.seconds("no_fine_metrics.window_s")
    # A history filled in at the start has coarse utilization alone: that memory was read shows that the GPU itself was
    # sampled all the time.
    coarse = [g for g in view.whole_gpus if not view.window("sm_active", window_s).count[view.column(g)] and all(
        view.mean(g, m, window_s) is not None for m in ("gpu_util", "memory_used_bytes"))]
    if not coarse:
        if any(view.mean(g, "sm_active", window_s) is not None for g in view.whole_gpus):
            return None
        return Missing(f"{window_s:.0f} s of utilization readings")
    return NoFineMetrics(gpus=tuple(g.info.index for g in coarse), severity="low", window_s=window_s,
                         reason=coarse[0]["sm_active"].reason)


def describe_no_fine_metrics(v: NoFineMetrics) -> Explanation:
    return Explanation(
        title=f"{gpus_text(v.gpus)}: only coarse utilization",
        why="Coarse utilization is the share of time during which any kernel ran: 100% may mean that only one SM was "
            f"busy, or that GPUs waited for each other. SM activity is missing: {v.reason}.",
        evidence={"window_s": v.window_s, "coarse_gpus_count": float(len(v.gpus))},
        brief=f"SM activity is missing: {v.reason}.", unknown="what do the kernels do?",
        action="Press c to see what the kernels do. Live SM activity needs a Hopper or newer GPU (GPM), or a DCGM host "
               "engine that watches it on a Volta or newer data-center GPU (dcgm-exporter, or gputop --dcgm-watch; "
               "gputop --help describes its cost).",
        gain="none: this finding is about what gputop can measure, not about the job",
        source="NVML: definition of utilization; GPM: Hopper and newer; DCGM field 1002")

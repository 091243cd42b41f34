"""Live rules that look at the GPUs alone: power limits, missing measurements."""

from __future__ import annotations

from gputop.advice.finding import Abstained, Finding, Gain
from gputop.advice.live_view import View, gpus_text
from gputop.advice.thresholds import limit
from gputop.samples import GpuSample
from gputop.text import percent

POWER_REASONS = ("power cap",)


def no_fine_metrics(view: View) -> Finding | Abstained | None:
    """Only coarse utilization: a kernel on one SM counts like one on all."""
    window_s = view.seconds("no_fine_metrics.window_s")
    coarse = [g for g in view.working if _only_coarse(view, g, window_s)]
    if not coarse:
        if any(view.mean(g, "sm_active", window_s) is not None for g in view.working):
            return None
        return Abstained("no_fine_metrics", f"{window_s:.0f} s of utilization readings")
    reason = coarse[0]["sm_active"].reason
    return Finding(
        id="no_fine_metrics", severity="low", origin="live", gpus=tuple(g.info.index for g in coarse),
        evidence={"window_s": window_s, "coarse_gpus_count": float(len(coarse))},
        title=f"{gpus_text(coarse)}: only coarse utilization",
        why="Coarse utilization is the share of time in which any kernel ran: 100 % can be one busy SM, or GPUs "
            f"waiting for each other. SM activity is missing: {reason}.",
        action="Capture a trace (c) to see what the kernels do; SM activity live needs a Hopper or newer GPU (GPM), or "
               "on data-centre cards from Volta on a DCGM host engine that watches it (dcgm-exporter, or gputop "
               "--dcgm-watch; its help says what that costs).",
        source="NVML: definition of utilization; GPM: Hopper and newer; DCGM field 1002",
        gain=Gain(None, "this is about what can be seen, not about the job"),
    )


def _only_coarse(view: View, gpu: GpuSample, window_s: float) -> bool:
    # A history filled in at the start has coarse utilization alone: that memory was read shows
    # that the GPU itself was looked at all the time.
    watched = all(view.mean(gpu, m, window_s) is not None for m in ("gpu_util", "memory_used_bytes"))
    return watched and view.readings_count(gpu, "sm_active", window_s) == 0


def power_capped(view: View) -> Finding | Abstained | None:
    """Clocks held down by the power limit for most of the window."""
    window_s = view.seconds("window_s")
    capped: list[tuple[GpuSample, dict[str, float]]] = []
    judged = 0
    for gpu in view.boards:
        share = view.history.clock_event_share(gpu.info.uuid, POWER_REASONS, window_s)
        power = _ratio_of(view, gpu, "power_w", "power_limit_w", window_s)
        clock = _ratio_of(view, gpu, "sm_clock_hz", "sm_clock_max_hz", window_s)
        if clock is None or (share is None and power is None):
            continue
        judged += 1
        at_limit = (share is not None and share >= view.limit("power_capped", "share_", gpu.info.index)) or (
            power is not None and power >= view.limit("power_capped", "power_", gpu.info.index))
        if at_limit and clock <= view.limit("power_capped", "clock_", gpu.info.index):
            figures = {"sm_clock_of_max_ratio": clock}
            if share is not None:
                figures["power_cap_share_ratio"] = share
            if power is not None:
                figures["power_of_limit_ratio"] = power
            capped.append((gpu, figures))
    if not judged:
        return Abstained("power_capped", f"{window_s:.0f} s of SM clock with its maximum, and power with its limit or "
                                         "clock event reasons")
    if not capped:
        return None
    worst, figures = min(capped, key=lambda c: c[1]["sm_clock_of_max_ratio"])
    down = 1 - figures["sm_clock_of_max_ratio"]
    indices = sorted(gpu.info.index for gpu, _ in capped)
    watts = worst["power_limit_w"].value
    at = f"the power limit of {watts:.0f} W" if watts is not None else "the power limit"
    return Finding(
        id="power_capped", severity="medium" if down >= limit("power_capped.medium") else "low", origin="live",
        gpus=tuple(indices), evidence={"window_s": window_s, **figures},
        title=f"{gpus_text(indices)} held back by the power limit",
        why=f"GPU {worst.info.index} ran at {percent(1 - down)} of its highest SM clock over the last {window_s:.0f} s "
            f"because of {at}. Kernels bound by arithmetic slow down with the clock; those bound by memory hardly do.",
        action="Compare the limit with the card's default; if somebody lowered it, have it raised. At the default "
               "limit this is the card's speed: fewer or cheaper operations (lower precision) help, not tuning.",
        snippet="nvidia-smi -q -d POWER" + (f" -i {indices[0]}" if len(indices) == 1 else ""),
        source="NVML clock event reason 'SW power cap', power against enforced limit; limits: gputop",
        gain=Gain(None, "depends on how much of the step is bound by the clock, which telemetry does not show"),
    )


def _ratio_of(view: View, gpu: GpuSample, metric: str, scale: str, window_s: float) -> float | None:
    mean, full = view.mean(gpu, metric, window_s), gpu[scale].value
    return mean / full if mean is not None and full else None

"""Live rules that look at the GPUs alone: heat, power limits, missing measurements."""

from __future__ import annotations

from gputop.advice.live.node_view import View, gpus_text
from gputop.advice.registry import limit, source
from gputop.core.findings import Abstained, Finding, Gain, Severity
from gputop.core.samples import GpuSample
from gputop.text.units import percent

POWER_REASONS = ("power cap",)
THERMAL_REASONS = ("thermal", "hw thermal")
SLOWDOWN_REASONS = (*THERMAL_REASONS, "hw slowdown")  # the last one can have other causes than heat


def no_fine_metrics(view: View) -> Finding | Abstained | None:
    """Only coarse utilization: a kernel on one SM counts like one on all."""
    window_s = view.seconds("no_fine_metrics.window_s")
    coarse = [g for g in view.whole_gpus if _only_coarse(view, g, window_s)]
    if not coarse:
        if any(view.mean(g, "sm_active", window_s) is not None for g in view.whole_gpus):
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


def thermal_throttled(view: View) -> Finding | Abstained | None:
    """Clocks held down by heat."""
    window_s = view.seconds("thermal_throttled.window_s")
    hot: list[tuple[GpuSample, dict[str, float]]] = []
    judged = False
    for gpu in view.readable_gpus:
        clock = _ratio_of(view, gpu, "sm_clock_hz", "sm_clock_max_hz", window_s)
        heat = _heat(view, gpu, window_s)
        if clock is None or heat is None:
            continue
        judged = True
        index = gpu.info.index
        share = heat["thermal_share_ratio"]
        if share >= view.limit("thermal_throttled", "share_", index) and clock <= view.limit(
                "thermal_throttled", "clock_", index):
            hot.append((gpu, {"window_s": window_s, "sm_clock_of_max_ratio": clock, **heat}))
    if not hot:
        return None if judged else Abstained(
            "thermal_throttled", f"{window_s:.0f} s of SM clock with its maximum, and clock event reasons or the core "
                                 "temperature with that at which clocks are slowed down")
    worst, evidence = min(hot, key=lambda h: h[1]["sm_clock_of_max_ratio"])
    clock = evidence["sm_clock_of_max_ratio"]
    was_high = any(f.id == "thermal_throttled" and f.severity == "high" for f in view.previous)
    severity: Severity = "high" if clock <= limit("thermal_throttled.high_" + ("leave" if was_high else "enter")) \
        else "medium"
    at = f" at {evidence['temperature_c']:.0f} °C" if "temperature_c" in evidence else ""
    if "temperature_slowdown_c" in evidence:
        at += f" (slowdown at {evidence['temperature_slowdown_c']:.0f} °C)"
    gpus = [g for g, _ in hot]
    return Finding(
        id="thermal_throttled", severity=severity, origin="live", gpus=tuple(sorted(g.info.index for g in gpus)),
        evidence=evidence, title=f"{gpus_text(gpus)} slowed down by heat",
        why=f"GPU {worst.info.index}{at} ran at {percent(clock)} of its highest SM clock, and was held down by heat in "
            f"{percent(evidence['thermal_share_ratio'])} of the last {window_s:.0f} s. In synchronous training all "
            "GPUs wait for the slowest.",
        action="Have the cooling looked at: fans, dust, air flow, inlet temperature, neighbours in the rack. Until "
               "then a lower power limit keeps the clock even.",
        snippet="nvidia-smi -q -d TEMPERATURE,PERFORMANCE" + (f" -i {gpus[0].info.index}" if len(gpus) == 1 else ""),
        source="NVML clock event reasons 'SW thermal', 'HW thermal', 'HW slowdown'; "
               + source("thermal_throttled.near_c_enter"),
        gain=Gain(None, "kernels bound by arithmetic gain what the clock gains; telemetry does not show which are"),
    )


def _heat(view: View, gpu: GpuSample, window_s: float) -> dict[str, float] | None:
    """In which share of the window heat held the clocks down; None where that cannot be told."""
    mean, slowdown = view.mean(gpu, "temperature_c", window_s), gpu["temperature_slowdown_c"].value
    out = {}
    if mean is not None:
        out["temperature_c"] = mean
        if slowdown is not None:
            out["temperature_slowdown_c"] = slowdown
    near_c = view.limit("thermal_throttled", "near_c_", gpu.info.index)
    near = mean is not None and slowdown is not None and mean >= slowdown - near_c
    share = view.clock_event_share(gpu, SLOWDOWN_REASONS if near else THERMAL_REASONS, window_s)
    if share is None:
        if mean is None or slowdown is None:
            return None
        share = float(mean >= slowdown)  # by the temperature alone
    return {"thermal_share_ratio": share} | out


def power_capped(view: View) -> Finding | Abstained | None:
    """Clocks held down by the power limit for most of the window."""
    window_s = view.seconds("window_s")
    by_heat = view.gpus_left_out("power_capped")
    capped: list[tuple[GpuSample, dict[str, float]]] = []
    judged = 0
    for gpu in view.readable_gpus:
        share = view.clock_event_share(gpu, POWER_REASONS, window_s)
        power = _ratio_of(view, gpu, "power_w", "power_limit_w", window_s)
        clock = _ratio_of(view, gpu, "sm_clock_hz", "sm_clock_max_hz", window_s)
        if clock is None or (share is None and power is None):
            continue
        judged += 1
        at_limit = (share is not None and share >= view.limit("power_capped", "share_", gpu.info.index)) or (
            power is not None and power >= view.limit("power_capped", "power_", gpu.info.index))
        if gpu.info.index in by_heat:
            continue
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

"""Live rules about clocks that are held down: by heat, by the power limit."""

from __future__ import annotations

from msgspec import Struct

from gputop.advice.live.node_view import NodeView, gpus_text
from gputop.advice.registry import limit, source
from gputop.advice.verdict import Explanation, Missing, Verdict
from gputop.core.samples import GpuSample
from gputop.text.units import percent

POWER_REASONS = ("power cap",)
THERMAL_REASONS = ("thermal", "hw thermal")
SLOWDOWN_REASONS = (*THERMAL_REASONS, "hw slowdown")  # the last one can have other causes than heat


def _ratio_of(view: NodeView, gpu: GpuSample, metric: str, scale: str, window_s: float) -> float | None:
    mean, full = view.mean(gpu, metric, window_s), gpu[scale].value
    return mean / full if mean is not None and full else None


# -- thermal_throttled ------------------------------------------------------------------------------

class _Heat(Struct, frozen=True):
    gpu: int
    clock: float  # SM clock, of its maximum
    share: float  # of the window in which heat held the clocks down
    temperature_c: float | None
    slowdown_c: float | None  # at which clocks are slowed down


class ThermalThrottled(Verdict, frozen=True, kw_only=True):
    window_s: float
    worst: _Heat


def judge_thermal_throttled(view: NodeView) -> ThermalThrottled | Missing | None:
    """Clocks held down by heat."""
    rule, window_s = "thermal_throttled", view.seconds("thermal_throttled.window_s")
    judged = [heat for gpu in view.readable_gpus if (heat := _heat(view, gpu, window_s)) is not None]
    hot = [heat for heat in judged if heat.share >= view.limit(rule, "share_", heat.gpu)
           and heat.clock <= view.limit(rule, "clock_", heat.gpu)]
    if not hot:
        return None if judged else Missing(
            f"{window_s:.0f} s of SM clock with its maximum, and clock event reasons or the core temperature with its "
            "slowdown limit")
    worst = min(hot, key=lambda heat: heat.clock)
    leave = "leave" if view.was_shown_as(rule, "high") else "enter"
    return ThermalThrottled(
        gpus=tuple(sorted(heat.gpu for heat in hot)), window_s=window_s, worst=worst,
        severity="high" if worst.clock <= limit(f"{rule}.high_{leave}") else "medium",
    )


def _heat(view: NodeView, gpu: GpuSample, window_s: float) -> _Heat | None:
    """The clock, and in which share of the window heat held it down; None where that cannot be told."""
    clock = _ratio_of(view, gpu, "sm_clock_hz", "sm_clock_max_hz", window_s)
    mean, slowdown = view.mean(gpu, "temperature_c", window_s), gpu["temperature_slowdown_c"].value
    near_c = view.limit("thermal_throttled", "near_c_", gpu.info.index)
    near = mean is not None and slowdown is not None and mean >= slowdown - near_c
    share = view.clock_event_share(gpu, SLOWDOWN_REASONS if near else THERMAL_REASONS, window_s)
    if share is None and mean is not None and slowdown is not None:
        share = float(mean >= slowdown)  # by the temperature alone
    if clock is None or share is None:
        return None
    return _Heat(gpu.info.index, clock, share, mean, None if mean is None else slowdown)


def describe_thermal_throttled(v: ThermalThrottled) -> Explanation:
    worst = v.worst
    evidence = {"window_s": v.window_s, "sm_clock_of_max_ratio": worst.clock, "thermal_share_ratio": worst.share}
    degrees = ""
    if worst.temperature_c is not None:
        evidence["temperature_c"] = worst.temperature_c
        degrees = f" at {worst.temperature_c:.0f} °C"
    if worst.slowdown_c is not None:
        evidence["temperature_slowdown_c"] = worst.slowdown_c
        degrees += f" (slowdown begins at {worst.slowdown_c:.0f} °C)"
    return Explanation(
        title=f"{gpus_text(v.gpus)} slowed down by heat",
        why=f"GPU {worst.gpu}{degrees} ran at {percent(worst.clock)} of its highest SM clock. Heat slowed it down for "
            f"{percent(worst.share)} of the last {v.window_s:.0f} s. In synchronous training all GPUs wait for the "
            "slowest one.",
        evidence=evidence,
        brief=f"GPU {worst.gpu}{degrees} runs at {percent(worst.clock)} of its highest SM clock.",
        action="Have the cooling checked: fans, dust, air flow, inlet temperature, neighbors in the rack. Until "
               "then a lower power limit keeps the clock even.",
        snippet="nvidia-smi -q -d TEMPERATURE,PERFORMANCE" + (f" -i {v.gpus[0]}" if len(v.gpus) == 1 else ""),
        gain="kernels bound by arithmetic gain as much as the clock; live samples do not show which kernels those are",
        source="NVML clock event reasons 'SW thermal', 'HW thermal', 'HW slowdown'; "
               + source("thermal_throttled.near_c_enter"),
    )


# -- power_capped -----------------------------------------------------------------------------------

class _PowerCap(Struct, frozen=True):
    gpu: int
    clock: float  # SM clock, of its maximum
    share: float | None  # of the samples in which the driver named the power limit
    power: float | None  # of the limit
    limit_w: float | None


class PowerCapped(Verdict, frozen=True, kw_only=True):
    window_s: float
    worst: _PowerCap


def judge_power_capped(view: NodeView) -> PowerCapped | Missing | None:
    """Clocks held down by the power limit for most of the window."""
    rule, window_s = "power_capped", view.seconds("window_s")
    by_heat = view.gpus_left_out(rule)
    judged = [cap for gpu in view.readable_gpus if (cap := _power_cap(view, gpu, window_s)) is not None]
    if not judged:
        return Missing(f"{window_s:.0f} s of SM clock with its maximum, and power with its limit or clock event "
                       "reasons")
    capped = [cap for cap in judged if cap.gpu not in by_heat and _at_limit(view, cap)
              and cap.clock <= view.limit(rule, "clock_", cap.gpu)]
    if not capped:
        return None
    worst = min(capped, key=lambda cap: cap.clock)
    return PowerCapped(
        gpus=tuple(sorted(cap.gpu for cap in capped)), window_s=window_s, worst=worst,
        severity="medium" if 1 - worst.clock >= limit("power_capped.medium") else "low",
    )


def _power_cap(view: NodeView, gpu: GpuSample, window_s: float) -> _PowerCap | None:
    share = view.clock_event_share(gpu, POWER_REASONS, window_s)
    power = _ratio_of(view, gpu, "power_w", "power_limit_w", window_s)
    clock = _ratio_of(view, gpu, "sm_clock_hz", "sm_clock_max_hz", window_s)
    if clock is None or (share is None and power is None):
        return None
    return _PowerCap(gpu.info.index, clock, share, power, gpu["power_limit_w"].value)


def _at_limit(view: NodeView, cap: _PowerCap) -> bool:
    return (cap.share is not None and cap.share >= view.limit("power_capped", "share_", cap.gpu)) or (
        cap.power is not None and cap.power >= view.limit("power_capped", "power_", cap.gpu))


def describe_power_capped(v: PowerCapped) -> Explanation:
    worst = v.worst
    evidence = {"window_s": v.window_s, "sm_clock_of_max_ratio": worst.clock}
    if worst.share is not None:
        evidence["power_cap_share_ratio"] = worst.share
    if worst.power is not None:
        evidence["power_of_limit_ratio"] = worst.power
    cap = f"the power limit of {worst.limit_w:.0f} W" if worst.limit_w is not None else "the power limit"
    return Explanation(
        title=f"{gpus_text(v.gpus)} slowed down by the power limit",
        why=f"GPU {worst.gpu} ran at {percent(worst.clock)} of its highest SM clock over the last {v.window_s:.0f} s "
            f"because of {cap}. Kernels bound by arithmetic slow down with the clock; those bound by memory hardly do.",
        evidence=evidence,
        brief=f"GPU {worst.gpu} runs at {percent(worst.clock)} of its highest SM clock.",
        action="Compare the limit with the card's default. If somebody lowered it, have it raised. At the default "
               "limit this is the card's full speed, and only fewer or cheaper operations (lower precision) help.",
        snippet="nvidia-smi -q -d POWER" + (f" -i {v.gpus[0]}" if len(v.gpus) == 1 else ""),
        gain="depends on how much of the step depends on the clock; live samples do not show that",
        source="NVML clock event reason 'SW power cap', power against enforced limit; gputop's own limits",
    )

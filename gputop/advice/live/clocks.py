"""Live rules about SM clocks that are held down: by heat, by a fault or a setting, by the power limit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from gputop.advice.fix_code import code
from gputop.advice.live.node_view import NodeView, gpus_text
from gputop.advice.registry import limit, source
from gputop.advice.verdict import Explanation, Missing, Verdict, known
from gputop.core.samples import GpuSample
from gputop.text.units import percent

POWER_REASONS = ("power cap",)
THERMAL_REASONS = ("thermal", "hw thermal")
SLOWDOWN_REASONS = (*THERMAL_REASONS, "hw slowdown")  # the last one can have other causes than heat
_SETTING, _HIGH = "application clocks", "thermal_throttled.high_"
# Of each other reason of the driver, the gravest first: its name in a title, the cause, and what to do.
_HELD: Mapping[str, tuple[str, str, str]] = {
    "power brake": (
        "power brake", "The server or its power supply signals that the GPU must draw less power",
        "Have the power supplies, the power cables, and the power budget of the server and its rack checked."),
    "hw slowdown": (
        "hardware slowdown", "The GPU protects itself from a peak of power, a weak power supply, or heat",
        "Have the power cables and the cooling of this GPU checked. If the slowdown persists after a reboot, have the "
        "board examined."),
    _SETTING: ("clock setting", "A setting of the driver limits the clock", "Unless it is intended, reset the clocks."),
}


class Clock(Struct, frozen=True):
    """The SM clock of one GPU, of its maximum, and the share of the samples in which something holds it down."""

    gpu: int
    clock: float
    share: float | None
    temperature_c: float | None = None
    slowdown_c: float | None = None  # at which clocks are slowed down
    power: float | None = None  # of the limit
    limit_w: float | None = None
    default_w: float | None = None  # the limit of the card as it was made

    @property
    def degrees(self) -> str:
        now = "" if self.temperature_c is None else f" at {self.temperature_c:.0f} °C"
        return now + ("" if self.slowdown_c is None else f" (slowdown begins at {self.slowdown_c:.0f} °C)")


class ClocksHeld(Verdict, frozen=True, kw_only=True):
    window_s: float
    worst: Clock
    held_by: str = _SETTING  # one of those above


def _clock(view: NodeView, gpu: GpuSample, reasons: Sequence[str], window_s: float) -> Clock | None:
    """The clock, and how often the driver gave one of these reasons; None where the clock is not known."""
    clock, temperature_c = view.share(gpu, "sm_clock_hz", window_s, "sm_clock_max_hz"), view.mean(
        gpu, "temperature_c", window_s)
    if clock is None:
        return None
    return Clock(gpu.info.index, clock, view.history.clock_event_share(gpu.info.uuid, reasons, window_s),
                 temperature_c, None if temperature_c is None else gpu["temperature_slowdown_c"].value,
                 view.share(gpu, "power_w", window_s, "power_limit_w"), gpu["power_limit_w"].value,
                 gpu["power_limit_default_w"].value)


def _held(clocks: Sequence[Clock], window_s: float, high: float, medium: float, reason: str = _SETTING) -> ClocksHeld:
    """The verdict on these GPUs; ``high``, ``medium``: from which clock of the slowest down those severities hold."""
    worst = min(clocks, key=lambda clock: clock.clock)
    return ClocksHeld(
        gpus=tuple(sorted(clock.gpu for clock in clocks)), window_s=window_s, worst=worst, held_by=reason,
        severity="high" if worst.clock <= high else "medium" if worst.clock <= medium else "low")


def judge_thermal_throttled(view: NodeView) -> ClocksHeld | Missing | None:
    """Clocks held down by heat."""
    rule, window_s = "thermal_throttled", view.seconds("thermal_throttled.window_s")
    judged = [heat for gpu in view.readable_gpus if (heat := _heat(view, gpu, window_s)) is not None]
    hot = [heat for heat in judged if (heat.share or 0.0) >= view.limit(rule, "share_", heat.gpu)
           and heat.clock <= view.limit(rule, "clock_", heat.gpu)]
    if not hot:
        return None if judged else Missing(
            f"{window_s:.0f} s of the SM clock, its maximum, and either the clock event reasons or the core "
            "temperature and its slowdown limit")
    return _held(hot, window_s, view.level(rule, _HIGH, "high"), medium=1.0)


def _heat(view: NodeView, gpu: GpuSample, window_s: float) -> Clock | None:
    """The clock, and in which share of the window heat held it down; None where that cannot be told."""
    mean, slowdown = view.mean(gpu, "temperature_c", window_s), gpu["temperature_slowdown_c"].value
    near_c = view.limit("thermal_throttled", "near_c_", gpu.info.index)
    near = mean is not None and slowdown is not None and mean >= slowdown - near_c
    heat = _clock(view, gpu, SLOWDOWN_REASONS if near else THERMAL_REASONS, window_s)
    if heat is not None and heat.share is None and mean is not None and slowdown is not None:
        heat = replace(heat, share=float(mean >= slowdown))  # by the temperature alone
    return None if heat is None or heat.share is None else heat


def describe_thermal_throttled(v: ClocksHeld) -> Explanation:
    worst = v.worst
    return Explanation(
        title=f"{gpus_text(v.gpus)} thermally throttled",
        why=f"GPU {worst.gpu}{worst.degrees} ran at {percent(worst.clock)} of its maximum SM clock and was thermally "
            f"throttled for {percent(worst.share or 0.0)} of the last {v.window_s:.0f} s. {_WAIT}",
        evidence=_evidence(v, "thermal_share_ratio"),
        brief=f"GPU {worst.gpu}{worst.degrees} runs at {percent(worst.clock)} of its maximum SM clock.",
        action="Have the cooling checked: fans, dust, air flow, inlet temperature, and neighbors in the rack. Until "
               "then, a lower power limit keeps the clock stable.",
        snippet=_here(v, code("thermal_throttled", "state")), gain=_GAIN,
        source="NVML clock event reasons 'SW thermal', 'HW thermal', 'HW slowdown'; "
               + source("thermal_throttled.near_c_enter"))


_GAIN = ("unknown, because live samples do not show how much of the time is compute-bound and speeds up with the "
         "clock")


_WAIT = "In synchronous training, all GPUs wait for the slowest one."


def _evidence(v: ClocksHeld, share: str) -> dict[str, float]:
    return known({"window_s": v.window_s, "sm_clock_of_max_ratio": v.worst.clock, share: v.worst.share,
                  "temperature_c": v.worst.temperature_c, "temperature_slowdown_c": v.worst.slowdown_c})


def _here(v: ClocksHeld, commands: str | None) -> str:
    """Commands of nvidia-smi, each for the GPU of the verdict if it is a single one."""
    gpu = f" -i {v.gpus[0]}" if len(v.gpus) == 1 else ""
    return "\n".join(f"{line}{gpu}" for line in (commands or "").splitlines())


def judge_clocks_limited(view: NodeView) -> ClocksHeld | Missing | None:
    """Clocks of working GPUs held down by a fault of the hardware other than heat, or by a setting."""
    rule, window_s = "clocks_limited", view.seconds("thermal_throttled.window_s")
    left_out, judged = view.gpus_left_out(rule), False
    held: dict[str, list[Clock]] = {}
    for gpu in view.readable_gpus:
        index, activity = gpu.info.index, view.activity(gpu, window_s)
        clocks = {reason: clock for reason in _HELD if (clock := _clock(view, gpu, (reason,), window_s)) is not None
                  and clock.share is not None}
        judged |= bool(clocks)
        if activity is None or activity[1] < limit(f"{rule}.busy") or index in left_out:
            continue  # idle GPUs run slower on purpose
        for reason, clock in clocks.items():
            if reason == _SETTING:  # a pause lowers the mean, and a setting the highest one
                clock = replace(clock, clock=max(view.values(gpu, "sm_clock_hz", window_s))
                                / (gpu["sm_clock_max_hz"].value or 1.0))
            if (clock.share or 0.0) >= view.limit(rule, "share_", index) and clock.clock <= view.limit(
                    rule, "set_" if reason == _SETTING else "clock_", index):
                held.setdefault(reason, []).append(clock)
                break
    for reason in _HELD:
        if reason in held:
            fault = reason != _SETTING
            return _held(held[reason], window_s, fault * view.level(rule, _HIGH, "high"), float(fault), reason)
    return None if judged else Missing(f"{window_s:.0f} s of the SM clock, its maximum, and clock event reasons")


def describe_clocks_limited(v: ClocksHeld) -> Explanation:
    worst, setting = v.worst, v.held_by == _SETTING
    name, cause, action = _HELD.get(v.held_by, _HELD[_SETTING])
    warm = f" It is{worst.degrees}." if worst.degrees and v.held_by == "hw slowdown" else ""
    return Explanation(
        title=f"{gpus_text(v.gpus)} at {percent(worst.clock)} of {'its' if len(v.gpus) == 1 else 'their'} maximum SM "
              f"clock: {name}",
        why=f"In {percent(worst.share or 0.0)} of the samples of the last {v.window_s:.0f} s, the driver named a "
            f"{name} as the reason for the low clock of GPU {worst.gpu}{worst.degrees}. {cause}. {_WAIT}",
        evidence=_evidence(v, "held_share_ratio"),
        brief=f"{cause}, so compute-bound kernels run slower." if setting else f"{cause}.{warm}",
        action=action, snippet=_here(v, code("clocks_limited", "reset" if setting else "state")), gain=_GAIN,
        source="NVML clock event reasons; " + source(
            "clocks_limited.set_enter" if setting else "thermal_throttled.clock_enter"))


def judge_power_capped(view: NodeView) -> ClocksHeld | Missing | None:
    """Clocks held down by the power limit for most of the window."""
    rule, window_s = "power_capped", view.seconds("window_s")
    left_out = view.gpus_left_out(rule)
    judged = [cap for gpu in view.readable_gpus if (cap := _clock(view, gpu, POWER_REASONS, window_s)) is not None
              and (cap.share is not None or cap.power is not None)]
    if not judged:
        return Missing(f"{window_s:.0f} s of SM clock, its maximum, and either power with its limit or clock event "
                       "reasons")
    capped = [cap for cap in judged if cap.gpu not in left_out and (
        (cap.share is not None and cap.share >= view.limit("power_capped", "share_", cap.gpu))
        or (cap.power is not None and cap.power >= view.limit("power_capped", "power_", cap.gpu)))
              and cap.clock <= view.limit(rule, "clock_", cap.gpu)]
    if not capped:
        return None
    return _held(capped, window_s, high=0.0, medium=1 - limit("power_capped.medium"))


def describe_power_capped(v: ClocksHeld) -> Explanation:
    worst = v.worst
    cap = f"the power limit of {worst.limit_w:.0f} W" if worst.limit_w is not None else "the power limit"
    action, snippet = ("Compare the limit with the card's default. If somebody lowered the limit, have it raised. At "
                       "the default limit, the card runs at full speed, and only fewer or cheaper operations help.",
                       "nvidia-smi -q -d POWER")
    if worst.limit_w is not None and worst.default_w is not None:
        if round(worst.limit_w) < round(worst.default_w):
            cap += f", which is below the card's default of {worst.default_w:.0f} W"
            action = "Have the limit raised, unless the data center keeps it low on purpose."
            snippet = f"sudo nvidia-smi -pl {worst.default_w:.0f}"
        elif round(worst.limit_w) == round(worst.default_w):
            cap += ", the card's default"
            action = "At its default limit, the card runs as fast as it can. Only fewer or cheaper operations help."
    return Explanation(
        title=f"{gpus_text(v.gpus)} slowed down by the power limit",
        why=f"GPU {worst.gpu} ran at {percent(worst.clock)} of its maximum SM clock over the last {v.window_s:.0f} s "
            f"because of {cap}. Compute-bound kernels slow down with the clock, but memory-bound kernels hardly do.",
        evidence=known({"window_s": v.window_s, "sm_clock_of_max_ratio": worst.clock,
                        "power_cap_share_ratio": worst.share, "power_of_limit_ratio": worst.power,
                        "power_limit_w": worst.limit_w, "power_limit_default_w": worst.default_w}),
        brief=f"GPU {worst.gpu} runs at {percent(worst.clock)} of its maximum SM clock because of {cap}.",
        action=action, snippet=_here(v, snippet), gain=_GAIN,
        source="NVML clock event reason 'SW power cap', power and its enforced limit; gputop's own thresholds")

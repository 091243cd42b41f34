"""Rules about what delays a job: a GPU, or all GPUs of a node, that work less than the others of the job; or a busy GPU
whose clocks are low."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gputop.advice.fleet import job_view
from gputop.advice.registry import limit, source
from gputop.advice.verdict import Missing
from gputop.cluster.model import Gpu, History, Job, LowClock, brief
from gputop.text.units import counted, percent

_TO_SIGMA = 1.4826  # of the median absolute deviation, for a normal distribution
# NVML's clock event reasons, by bit (nvml.h): those that somebody can mend.
_THERMAL, _POWER, _SET = 0x20 | 0x40, 0x04 | 0x80, 0x02
_IDLE = 0x01  # the clocks are low because the GPU has nothing to do: no cause of that
_ONE_KIND = Missing("one kind of activity for all GPUs of the job; SM activity of some GPUs cannot be compared with "
                    "utilization of others (dcgm-exporter: add DCGM_FI_PROF_SM_ACTIVE, since 4.9 "
                    "DCGM_FI_PROF_SM_UTIL_RATIO, to its counters on all nodes)")


def _lasts(view: job_view.JobView, histories: Sequence[History | None]) -> tuple[float, bool]:
    """Seconds for which these have been below the mean of those GPUs of the job that worked."""
    idle, busy = (dict(view.past(history)) for history in (view.job.idle_history, view.job.idle.busy_history))
    of_job = {time_s: value * (1 + idle.get(time_s, 0.0) / busy[time_s] if busy.get(time_s) else 1.0)
              for time_s, value in view.past(view.job.history)}
    values_at: dict[float, list[float]] = {}
    for history in histories:
        for time_s, value in view.past(history):
            values_at.setdefault(time_s, []).append(value)
    past = sorted((time_s, of_job[time_s] - sum(values) / len(values)) for time_s, values in values_at.items()
                  if time_s in of_job)
    return view.lasts_s(past, lambda _, below: below >= limit("straggler_gpu.leave"))


def _is_old(view: job_view.JobView) -> bool:
    """Return whether it is known that means are not of the time before the job, and its ranks have started."""
    return view.age_s is not None and view.age_s >= limit("straggler_gpu.age_s")


class SlowNode(job_view.FleetVerdict, frozen=True, kw_only=True):
    activity: float
    median: float


def judge_slow_node(view: job_view.JobView) -> SlowNode | Missing | None:
    """The GPUs of a node work less than those of the job's other nodes."""
    job = view.job
    if job.kind == "mixed":
        return _ONE_KIND
    if job.nodes is None or job.nodes < limit("slow_node.nodes") or job.node_median is None:
        return None
    most = job.node_median - limit("straggler_gpu.below")
    low = [node for node in job.low_nodes
           if node.activity is not None and limit("held_idle.activity") < node.activity < most]
    if not low or 2 * len(low) >= job.nodes or view.is_younger(limit("straggler_gpu.age_s")):
        return None
    if not _is_old(view):
        return job_view.NO_PAST
    low.sort(key=lambda node: node.activity or 0.0)
    worst, names = low[0], tuple(node.name for node in low)
    lasts_s, seen = _lasts(view, [gpu.history for gpu in job.low_gpus if gpu.node in names])
    return SlowNode(
        job=job.id, count=job.gpus, nodes=names, places=names, lasts_s=lasts_s or None, since_exact=seen,
        lost=sum(job.node_median - (node.activity or 0.0) for node in low) * (job.gpus / job.nodes),
        activity=worst.activity or 0.0, median=job.node_median,
        severity="high" if job.node_median - (worst.activity or 0.0) >= limit("straggler_gpu.high") else "medium")


def describe_slow_node(v: SlowNode) -> job_view.FleetWords:
    others = f" Also below the median: {', '.join(v.places[1:])}." if len(v.places) > 1 else ""
    return job_view.FleetWords(
        title=f"Node {v.places[0] if v.places else '?'} is less active than the other nodes of job {v.job}",
        why=f"The GPUs of this node have been {percent(v.activity)} active{job_view.lasting(v)}, compared with "
            f"a median of {percent(v.median)} over the job's nodes.{others}",
        evidence=job_view.evidence(v, {"activity_ratio": v.activity, "median_ratio": v.median}),
        action="Look at the host of this node with gputop (h): CPUs, disks, network, and other programs. Unequal "
               "work per node is another possible cause.",
        source=source("straggler_gpu.below"), label=f"slow node {brief(v.places[0]) if v.places else '?'}")


class Straggler(job_view.FleetVerdict, frozen=True, kw_only=True):
    """``cause``: the word for what explains the worst of them (:data:`_REASONS`), "" where nothing does."""

    activity: float
    median: float
    cause: str
    value: float | None  # of the figure that explains it
    usual: float | None  # the same figure of the other GPUs


def judge_straggler_gpu(view: job_view.JobView) -> Straggler | Missing | None:
    """Single GPUs work less than the others of their job."""
    job = view.job
    if job.kind == "mixed":
        return _ONE_KIND
    peers = job.gpus - (job.idle.quiet or 0)  # a GPU that does nothing is no peer of those that work
    if job.median is None or peers <= limit("straggler_gpu.peers"):
        return None
    most = job.median - max(limit("straggler_gpu.below"), limit("straggler_gpu.mads") * _TO_SIGMA * (job.mad or 0.0))
    low = [gpu for gpu in job.low_gpus if gpu.node not in view.explained and gpu.activity is not None
           and limit("held_idle.activity") < gpu.activity < most]
    if not low or 2 * len(low) >= peers or view.is_younger(limit("straggler_gpu.age_s")):
        return None
    if not _is_old(view):
        return job_view.NO_PAST
    worst = low[0]
    lasts_s, seen = _lasts(view, [worst.history])
    cause, value, usual = _reason(worst, job)
    return Straggler(
        job=job.id, count=job.gpus, places=tuple(gpu.name for gpu in low), lasts_s=lasts_s or None, since_exact=seen,
        lost=sum(job.median - (gpu.activity or 0.0) for gpu in low), activity=worst.activity or 0.0, median=job.median,
        cause=cause, value=value, usual=usual,
        severity="high" if job.median - (worst.activity or 0.0) >= limit("straggler_gpu.high") else "medium")


def _reason(gpu: Gpu, job: Job) -> tuple[str, float | None, float | None]:
    """Explanation of a slow GPU: first what slows it now, then faults that may be old."""
    clock, usual = gpu.figures.get("sm_clock_hz"), job.peers.get("sm_clock_hz")
    idle = int(gpu.figures.get("clock_reasons", 0)) == _IDLE
    if clock is not None and usual and clock < limit("straggler_gpu.clock") * usual and not idle:
        return _limiter(gpu.figures, job.peers), clock, usual
    return _fault(gpu.figures, job)


def _limiter(figures: Mapping[str, float], peers: Mapping[str, float]) -> str:
    """Limiter that holds the clocks of a GPU down, "clock" where no figure tells."""
    bits = int(figures.get("clock_reasons", 0))
    hot = figures.get("temperature_c", 0.0) >= limit("straggler_gpu.hot_c")
    power, most, usual = figures.get("power_w", 0.0), figures.get("power_limit_w"), peers.get("power_limit_w")
    if bits & _THERMAL or (hot and not bits & _POWER):
        return "thermal"
    if most and usual and most < limit("straggler_gpu.power") * usual and power >= limit("straggler_gpu.power") * most:
        return "power limit"
    if bits & _POWER or (most and power >= limit("straggler_gpu.power") * most):
        return "power"
    if bits & _SET:
        return "set"
    if figures.get("thermal_violation"):
        return "thermal"
    return "power" if figures.get("power_violation") else "clock"


def _fault(figures: Mapping[str, float], job: Job) -> tuple[str, float | None, float | None]:
    """Fault, other than a limiter of the clocks, that can slow a GPU."""
    width, usual = figures.get("pcie_width"), job.peers.get("pcie_width")
    if width and usual and width < usual:
        return "pcie", width, usual
    if figures.get("rows_remap_failed"):
        return "remap", figures["rows_remap_failed"], None
    if figures.get("ecc_uncorrected"):
        return "ecc", figures["ecc_uncorrected"], None
    if figures.get("xid"):  # the last one, however long ago
        return "xid", figures["xid"], None
    return "", None, None


# What holds clocks down, and what to do about it.
_HELD = {
    "thermal": ("it is too hot", "Check the cooling: air flow, fans, room temperature."),
    "power": ("its power is limited",
              "Compare its power limit with those of the other GPUs (nvidia-smi -q -d POWER), and look at the node's "
              "power supply."),
    "power limit": ("its power limit is lower than those of the other GPUs",
                    "Compare the limits (nvidia-smi -q -d POWER), and raise this GPU's limit with nvidia-smi -pl."),
    "set": ("its application clocks are set low",
            "Compare the clocks (nvidia-smi -q -d CLOCK), and reset this GPU's clocks with nvidia-smi -rac."),
    "clock": ("", "Run nvidia-smi -q -d PERFORMANCE on its node to see what limits the clocks. nvidia-smi -rgc "
                  "removes a clock lock."),
}


def _because(v: Straggler | LowClockGpu) -> tuple[str, str]:
    """Reason why the worst of them is slow, and the action."""
    value, usual = v.value or 0.0, v.usual or 0.0
    clocks = f"Its SM clock is {value / 1e6:.0f} MHz; the others run at {usual / 1e6:.0f} MHz"
    if v.cause in _HELD:
        reason, action = _HELD[v.cause]
        return f"{clocks}{f': {reason}' if reason else ''}.", action
    return {
        "remap": ("A row of this GPU's memory could not be replaced.", "Drain the node: the board is due for service."),
        "ecc": (f"This GPU has {value:.0f} uncorrectable memory errors.",
                "Drain the node and reset the GPU; if errors return, the board is due for service."),
        "pcie": (f"Its PCIe link runs with {value:.0f} lanes, and the others with {usual:.0f}.",
                 "Drain the node and reseat the board. If that does not help, replace the board or the riser."),
        "xid": (f"No exported metric shows the reason. The last Xid of this GPU is {value:.0f}, at an unknown time.",
                f"Look up Xid {value:.0f} in the kernel log of its node (dmesg)."),
    }.get(v.cause, ("No exported metric shows the reason.",
                  "Look at the process and host of this GPU: the CPU may be shared or far from the GPU, the "
                  "rank's input pipeline may be slow, or the rank may have less work."))


def describe_straggler_gpu(v: Straggler) -> job_view.FleetWords:
    reason, action = _because(v)
    more = f" Also below the median: {', '.join(v.places[1:])}." if len(v.places) > 1 else ""
    first = v.places[0] if v.places else "?"
    return job_view.FleetWords(
        title=f"GPU {first} is less active than the other GPUs of job {v.job}",
        why=f"This GPU has been {percent(v.activity)} active{job_view.lasting(v)}, compared with a median of "
            f"{percent(v.median)} over the job's {v.count} GPUs. {reason}{more}",
        evidence=job_view.evidence(v, {"activity_ratio": v.activity, "median_ratio": v.median}),
        action=action, source=source("straggler_gpu.mads", "straggler_gpu.below"),
        label=f"straggler {brief(first)}")


class LowClockGpu(job_view.FleetVerdict, frozen=True, kw_only=True):
    """``cause``: what holds the clock of the lowest down, or what else is known of it; ``others``: how many more."""

    activity: float
    clock_hz: float
    median_hz: float
    others: int
    held: str
    cause: str
    value: float | None
    usual: float | None


def judge_low_clock_gpu(view: job_view.JobView) -> LowClockGpu | Missing | None:
    """Busy GPUs run at a lower SM clock than the others of their job, which wait for them in collectives."""
    job = view.job
    if not job.low_clocks or job.gpus <= limit("straggler_gpu.peers"):
        return None
    if job.kind == "mixed":
        return _ONE_KIND
    if view.is_younger(limit("straggler_gpu.age_s")):
        return None  # its means are still of the time before it, or its ranks still start up
    low = [low_clock for low_clock in job.low_clocks if _is_low(low_clock, job)
           and view.explained.isdisjoint((low_clock.gpu.node, low_clock.gpu.name))]
    if not low:
        return None
    if not _is_old(view):
        return job_view.NO_PAST
    worst = min(low, key=lambda low_clock: low_clock.clock_hz / low_clock.median_hz)
    if worst.mad_hz > limit("low_clock_gpu.spread") * worst.median_hz \
            or worst.low > limit("low_clock_gpu.share") * worst.gpus:
        return Missing("similar clocks on most GPUs of the job; the SM clocks differ so much that no GPU is an outlier")
    worst_gpu = worst.gpu
    lasts_s, seen = _lasts_low(view, worst)
    held = _limiter(worst_gpu.figures, job.peers)
    cause, value, usual = _fault(worst_gpu.figures, job) if held == "clock" else ("", None, None)
    return LowClockGpu(
        job=job.id, count=worst.gpus, places=tuple(one.gpu.name for one in low), lasts_s=lasts_s or None,
        since_exact=seen, lost=sum(1.0 - one.clock_hz / one.median_hz for one in low),
        activity=worst_gpu.activity or 0.0, clock_hz=worst.clock_hz, median_hz=worst.median_hz,
        others=max(worst.low, len(low)) - 1, held=held, cause=cause, value=value, usual=usual,
        severity="high" if worst.clock_hz <= limit("low_clock_gpu.high") * worst.median_hz else "medium")


def _is_low(slow: LowClock, job: Job) -> bool:
    """Return whether a clock is low though the GPU works as much as the others, and they are enough to tell."""
    least = max(limit("low_clock_gpu.busy"), (job.activity or 0.0) - limit("straggler_gpu.below"))
    spread = limit("straggler_gpu.mads") * _TO_SIGMA * slow.mad_hz
    return (slow.gpus > limit("straggler_gpu.peers") and slow.gpu.activity is not None and slow.gpu.activity >= least
            and slow.clock_hz < min(limit("low_clock_gpu.clock") * slow.median_hz, slow.median_hz - spread)
            and int(slow.gpu.figures.get("clock_reasons", 0)) != _IDLE)


def _lasts_low(view: job_view.JobView, slow: LowClock) -> tuple[float, bool]:
    """Seconds for which the GPU has been busy at a clock this far below what the others run at now."""
    of_job = dict(view.past(view.job.history))
    active = dict(view.past(slow.gpu.history))
    past = [(time_s, clock if active.get(time_s, 0.0) > limit("low_clock_gpu.busy") else slow.median_hz)
            for time_s, clock in view.past(slow.history) if time_s in of_job]
    return view.lasts_s(past, lambda _, clock: clock < limit("low_clock_gpu.leave") * slow.median_hz)


def describe_low_clock_gpu(v: LowClockGpu) -> job_view.FleetWords:
    reason, action = _HELD.get(v.held, _HELD["clock"])
    fault = f" {_because(v)[0]}" if v.cause else ""
    named = ", ".join(v.places[1:])
    unnamed = v.others - len(v.places) + 1
    also = (f" The clock is also low on {named}{f' and {unnamed} more' if unnamed > 0 else ''}." if named
            else f" The clocks of {counted(v.others, 'other GPU')} are also low." if v.others else "")
    first = v.places[0] if v.places else "?"
    return job_view.FleetWords(
        title=f"GPU {first} runs at a lower clock than the other GPUs of job {v.job}",
        why=f"Its SM clock is {v.clock_hz / 1e6:,.0f} MHz (5-minute mean)"
            f"{f' and has been low{job_view.lasting(v)}' if v.lasts_s else ''}. The median of the {v.count} busy GPUs "
            f"of the same model is {v.median_hz / 1e6:.0f} MHz.{f' The reason is that {reason}.' if reason else ''} "
            f"This GPU is active for {percent(v.activity)} of the time. In synchronous training, the others wait for "
            f"it.{fault}{also}",
        evidence=job_view.evidence(v, {"sm_clock_hz": v.clock_hz, "median_sm_clock_hz": v.median_hz,
                                       "activity_ratio": v.activity}),
        action=action, source=source("low_clock_gpu.clock", "straggler_gpu.mads"),
        label=f"low clock {brief(first)}")

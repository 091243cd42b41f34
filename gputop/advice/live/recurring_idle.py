"""Idle that returns while the job runs: validation, checkpoints, the end of an epoch, seen without any capture."""

from __future__ import annotations

import math
from statistics import median

from gputop.advice.live.frameworks import NO_FIGURE
from gputop.advice.live.node_view import NodeView, gpus_text
from gputop.advice.registry import limit, source
from gputop.advice.verdict import Explanation, Missing, Verdict
from gputop.core.findings import HIGH_SHARE, MEDIUM_SHARE, Severity
from gputop.telemetry.recurring_idle import OCCURRENCES, RecurringIdle, recurring_idle
from gputop.text.units import counted, percent

_LONG_STEP_S = 60.0  # one step may last as long, so that the pause is a part of each
_KEPT = 0.8  # a severity is kept down to this factor of the share at which it begins
_EQUAL_LENGTH_FACTOR = 1.5  # lengths within this factor are told as one


class ReturningIdle(Verdict, frozen=True, kw_only=True):
    window_s: float  # that was looked at
    metric: str  # sm_active, or gpu_util where that is not known
    activity: float  # while at work
    idle_ratio: float  # of the window
    times: int
    idle_s: float  # one of them (median)
    shortest_s: float
    longest_s: float
    period_s: float | None  # None: irregular
    period_spread_s: float | None
    next_in_s: float | None
    other_times: int  # that do not fit the period
    other_s: float


def judge_recurring_idle(view: NodeView) -> ReturningIdle | Missing | None:
    """GPUs at work that are idle again and again, for longer than between steps, and together."""
    window_s, rule = view.seconds("recurring_idle.window_s"), "recurring_idle"
    recent_s = view.seconds("window_s")
    activity = next((recent for gpu in view.warmed_up_gpus if (recent := view.activity(gpu, recent_s))), None)
    if activity is None:
        return view.not_at_work(recent_s)
    metric = activity[0]
    window = view.window(metric, window_s)
    left_out = view.gpus_left_out(rule)
    since_s = [math.inf] * len(window.values)
    index_of: dict[int, int] = {}
    for gpu in view.warmed_up_gpus:
        if gpu.info.index not in left_out:
            column = view.column(gpu)
            index_of[column] = gpu.info.index
            since_s[column] = view.sample.time_s - view.age_on_s(gpu) + limit("idle_gpu.age_s")
    recurring, times = recurring_idle(window.times, window.values, since_s)
    explained = view.gpus_explained_by("host_cpu_saturated", "pcie_saturated", "network_bound", "gpu0_oversubscribed",
                                       "low_sm_active")
    for one in recurring:
        gpus = tuple(sorted(index_of[column] for column in one.gpus))
        # What comes irregularly is how those look.
        if one.share >= view.limit(rule, "share_", gpus[0]) and (one.period_s is not None or not explained & set(gpus)):
            return _verdict(view, one, gpus, metric)
    if 0 < times < OCCURRENCES:
        return Missing(f"{OCCURRENCES} idle times, which have occurred only {'once' if times == 1 else 'twice'} so far")
    return None


def _severity(view: NodeView, share: float) -> Severity:
    """Severity by the share, which moves a little with each idle time that enters or leaves the window."""
    levels: tuple[tuple[Severity, float], ...] = (("high", HIGH_SHARE), ("medium", MEDIUM_SHARE))
    for severity, least in levels:
        if share >= least * (_KEPT if view.was_shown_as("recurring_idle", severity) else 1.0):
            return severity
    return "low"


def _verdict(view: NodeView, one: RecurringIdle, gpus: tuple[int, ...], metric: str) -> ReturningIdle:
    sample = view.sample
    lengths = sorted(interval.idle_s for interval in one.intervals)
    return ReturningIdle(
        gpus=gpus, severity=_severity(view, one.share), window_s=one.seen_s, metric=metric, activity=one.usual,
        idle_ratio=one.share, times=len(lengths), idle_s=median(lengths), shortest_s=lengths[0], longest_s=lengths[-1],
        period_s=one.period_s,
        # No distance is known better than to half of an interval between samples.
        period_spread_s=None if one.spread_s is None else max(one.spread_s, 0.5 * (sample.interval_s or 0.0)),
        next_in_s=None if one.next_s is None else max(0.0, one.next_s - sample.time_s),
        other_times=len(one.others), other_s=sum(interval.idle_s for interval in one.others))


def describe_recurring_idle(v: ReturningIdle) -> Explanation:
    last, alike = f"the last {_time(v.window_s)}", v.longest_s <= _EQUAL_LENGTH_FACTOR * v.shortest_s
    times = f"{'The GPU was' if len(v.gpus) == 1 else 'The GPUs were'} idle {v.times} times"
    span = f"{_time(v.shortest_s)} to {_time(v.longest_s)}"
    long = _time(v.idle_s) if alike or v.period_s is not None else span
    evidence = {"window_s": v.window_s, "idle_of_window_ratio": v.idle_ratio, "idle_count": float(v.times),
                "idle_s": v.idle_s, "longest_idle_s": v.longest_s}
    if v.period_s is None:
        title = (f"{gpus_text(v.gpus)} idle {v.times} times in {last}, for {long}{' each' if alike else ''} "
                 f"({percent(v.idle_ratio)} of the time)")
        # Three, or regular ones that have stopped, may be regular all the same.
        how = f"{times}, for {_time(v.idle_s) if alike else span} each, at no regular interval."
    else:
        title = f"{gpus_text(v.gpus)} idle for {long} every {_time(v.period_s)} ({percent(v.idle_ratio)} of {last})"
        how = (f"{times}, every {_time(v.period_s)} (± {_time(v.period_spread_s or 0.0)}), for "
               f"{_time(v.idle_s) if alike else span} each.")
        evidence |= {"idle_period_s": v.period_s, "idle_period_spread_s": v.period_spread_s or 0.0,
                     "next_idle_in_s": v.next_in_s or 0.0}
    if v.other_times:
        evidence |= {"other_idle_count": float(v.other_times), "other_idle_s": v.other_s}
        how += (f" Another {counted(v.other_times, 'idle period')} ({_time(v.other_s)} in total) "
                f"{'does' if v.other_times == 1 else 'do'} not fit this interval.")
    what = "SM activity" if v.metric == "sm_active" else "Utilization"
    step = (f" If your step time is about {_time(v.period_s)}, this idle time recurs in every step."
            if v.period_s is not None and v.period_s < _LONG_STEP_S else "")
    return Explanation(
        title=title,
        why=f"{what} is {percent(v.activity)} outside of the idle periods. {how} Validation, checkpoints, epoch ends, "
            f"logging, and garbage collection make GPUs wait like this.{step}",
        evidence=evidence, unknown="validation, a checkpoint, logging, or garbage collection?",
        brief=f"{times} in {last}." if v.period_s is not None else f"{times}, at no regular interval.",
        action="Press c: a capture that covers one of these idle periods shows what the host is doing. "
               "Do that work less often, or in the background while the GPUs run the next steps.",
        gain=f"at most {percent(v.idle_ratio)}, the share of idle time; {NO_FIGURE}",
        source="SM activity from GPM or DCGM, otherwise NVML utilization; "
               + source("recurring_idle.share_enter", "recurring_idle.window_s"),
    )


def _time(seconds: float) -> str:
    """Duration as people compare it with a clock: 4.1 s, 62 s, 2.5 min, 10 min."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    return f"{seconds:.0f} s" if seconds < 119.5 else f"{seconds / 60:.1f}".removesuffix(".0") + " min"

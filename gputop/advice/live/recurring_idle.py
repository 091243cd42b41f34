"""Idle that returns while the job runs: validation, checkpoints, the end of an epoch, seen without any capture."""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import pairwise
from statistics import median

from msgspec import Struct
from msgspec.structs import replace

from gputop.advice.live.jobs import waits_for
from gputop.advice.live.node_view import NodeView, gpus_text
from gputop.advice.registry import limit, source
from gputop.advice.verdict import NO_FIGURE, Explanation, Missing, Verdict
from gputop.core.findings import HIGH_SHARE, MEDIUM_SHARE, Severity
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
    in_turn: bool  # one of the GPUs works at any time


def judge_recurring_idle(view: NodeView) -> ReturningIdle | Missing | None:
    """GPUs at work that are idle again and again, for longer than between steps, and together."""
    window_s, rule = view.seconds("recurring_idle.window_s"), "recurring_idle"
    recent_s = view.seconds("window_s")
    activity = next((recent for gpu in view.warmed_up_gpus if (recent := view.activity(gpu, recent_s))), None)
    if activity is None:
        return view.not_at_work(recent_s)
    metric = activity[0]
    window = view.window(metric, window_s)
    left_out = view.gpus_left_out(rule) | {i for p in view.processes if waits_for(p) for i in p.gpus}
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
        other_times=len(one.others), other_s=sum(interval.idle_s for interval in one.others), in_turn=one.in_turn)


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
    cause = "Validation, checkpoints, epoch ends, logging, and garbage collection make GPUs wait like this."
    brief = f"{times} in {last}." if v.period_s is not None else f"{times}, at no regular interval."
    action = ("Press c: a capture that covers one of these idle periods shows what the host is doing. "
              "Do that work less often, or in the background while the GPUs run the next steps.")
    if v.in_turn:
        cause = brief = "The GPUs are never idle at the same time: they work one after another."
        action = "Give each GPU a part of every batch, or split the batches so that all stages work at the same time."
    return Explanation(
        title=title,
        why=f"{what} is {percent(v.activity)} outside of the idle periods. {how} {cause}{step}",
        evidence=evidence, unknown="validation, a checkpoint, logging, or garbage collection?" * (not v.in_turn),
        brief=brief, action=action,
        gain=f"at most {percent(v.idle_ratio)}, the share of idle time; {NO_FIGURE}",
        source="SM activity from GPM or DCGM, otherwise NVML utilization; "
               + source("recurring_idle.share_enter", "recurring_idle.window_s"))


def _time(seconds: float) -> str:
    """Duration as people compare it with a clock: 4.1 s, 62 s, 2.5 min, 10 min."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    return f"{seconds:.0f} s" if seconds < 119.5 else f"{seconds / 60:.1f}".removesuffix(".0") + " min"


# -- the intervals: how long, how often, and whether the next can be told ------------------------
# A GPU is idle where its activity is a small share of its own usual one. Only what lasts for several samples counts,
# so the rhythm of ordinary steps does not. A reading is the mean of the time before it: the readings at both edges of
# an interval tell what part of their time was idle, so lengths are finer than the sampling.
# Pure Python: the monitor looks for this every few seconds.

BELOW = 0.1  # share of the usual activity; a GPU that evaluates, or waits in a collective, is above it
MIN_USUAL = 0.1  # a GPU that does next to nothing has nothing to be idle from
MIN_IDLE_S, MIN_IDLE_SAMPLES = 2.0, 3.0  # the longer of the two
MIN_PERIOD_S = 10.0  # idle time that returns sooner may be the job's step
_STEP_IDLES = 4.0  # what lasts no longer than this times the idle of a step is the rhythm of the steps
MOST_IDLE = 0.9  # share of the time: above it too little work is seen to tell its usual activity
MOST_IRREGULAR = 0.5  # the same for idle times without a period: above it the idle is the usual state
OCCURRENCES = 3
REGULAR_OCCURRENCES = 4  # two gaps out of three agree by chance too often
_REGULAR_PART = 0.75  # share of the intervals that have to fit the period
_TOLERANCE = 0.1  # share of the period, from each interval to the next
_CANDIDATES = 6  # newest intervals whose distances are tried as the period
_TWO_KINDS = 1.8  # lengths that differ by this factor may have different causes
_TOGETHER = 0.75  # share of the intervals of two GPUs that overlap
_MIN_SAMPLES = 16
_IN_TURN = 1.3  # GPUs at work on average, at most, of those that take turns
_FINEST_S = 0.5  # distance of samples: of more frequent ones some are enough for intervals of seconds
_SORTED = 200  # readings at least that the usual activity is taken from, if there are more
_OVERDUE_PERIODS = 1.6  # periods since the last interval, after which it no longer returns
_MAX_GAP = 3.0  # intervals without a sample
_RUNS = re.compile(rb"\x01+")


class Idle(Struct, frozen=True):
    """One idle interval; the next may begin soon after it."""

    begin_s: float
    end_s: float
    idle_s: float  # without what lies between its parts


class RecurringIdle(Struct, frozen=True):
    """Intervals in which these GPUs (columns) are idle together, oldest first.

    ``period_s`` is from the begin of one to the begin of the next, ``spread_s`` the most by which one of the distances
    differs from it, ``next_s`` the expected begin of the next; all None where they come irregularly. ``others`` are
    further ones, as of another cause, which do not fit the period. ``seen_s`` is the time that was looked at.
    """

    gpus: tuple[int, ...]
    usual: float  # activity while at work
    seen_s: float
    intervals: tuple[Idle, ...]
    others: tuple[Idle, ...] = ()
    period_s: float | None = None
    spread_s: float | None = None
    next_s: float | None = None
    in_turn: bool = False  # one of them works at any time

    @property
    def share(self) -> float:
        """Share of the time that was looked at."""
        return sum(one.idle_s for one in self.intervals) / self.seen_s


class _Seen(Struct, frozen=True):
    """The intervals of one GPU, or of several together."""

    usual: float
    seen_s: float
    intervals: list[Idle]
    open_since_s: float | None  # idle at the end
    idle_ratio: float  # of the time


def recurring_idle(times_s: Sequence[float], values: Sequence[Sequence[float]], since_s: Sequence[float],
                   ) -> tuple[list[RecurringIdle], int]:
    """Idle times that return in ``values[gpu][n]``, read at the rising ``times_s[n]`` (NaN is missing), the costliest
    first; and how often the GPU with most of them was idle at all, which may be too seldom.

    ``since_s``: of each GPU the time from which on it counts, such as the end of its job's start.
    """
    if len(times_s) < _MIN_SAMPLES:
        return [], 0
    interval_s = median([after - before for before, after in pairwise(times_s[-32:])])
    if interval_s > 0 and (every := int(_FINEST_S / interval_s)) > 1:
        times_s, values, interval_s = times_s[::every], [of_gpu[::every] for of_gpu in values], interval_s * every
    seen: dict[int, _Seen] = {}
    for gpu, (of_gpu, begin_s) in enumerate(zip(values, since_s, strict=True)):
        intervals = _intervals(times_s, of_gpu, begin_s, interval_s)
        if intervals is not None and intervals.idle_ratio <= MOST_IDLE:
            seen[gpu] = intervals
    out = []
    for gpus in _together(seen):
        # As one GPU: all of them idle. Without a reading of one the moment is unknown.
        joint = _intervals(times_s, [*map(sum, zip(*(values[gpu] for gpu in gpus), strict=True))],
                           max(since_s[gpu] for gpu in gpus), interval_s) if len(gpus) > 1 else None
        returning = _recurring(gpus, joint or seen[gpus[0]], times_s[-1],
                           sum(seen[gpu].usual for gpu in gpus) / len(gpus))
        if returning is not None and (returning.period_s is not None or returning.share <= MOST_IRREGULAR):
            in_turn = joint is None and 1 < len(gpus) <= _IN_TURN / (1.0 - returning.share)
            out.append(replace(returning, in_turn=in_turn))
    out.sort(key=lambda one: -one.share * len(one.gpus))
    return out, max((len(one.intervals) for one in seen.values()), default=0)


def _intervals(times_s: Sequence[float], values: Sequence[float], since_s: float, interval_s: float) -> _Seen | None:
    """None where there are none, or where too little is known."""
    if since_s > times_s[0]:
        first = bisect_left(times_s, since_s)
        times_s, values = times_s[first:], values[first:]
    total = sum(values)
    if total != total:  # something is missing
        present = [i for i, v in enumerate(values) if v == v]
        times_s, values = [times_s[i] for i in present], [values[i] for i in present]
    if len(values) < _MIN_SAMPLES or min(values) > BELOW * max(values):
        return None
    ordered = sorted(values[::1 + len(values) // _SORTED])
    # With less than nine tenths of the readings idle the upper twentieth begins at a usual one.
    first_busy = bisect_left(ordered, 0.5 * ordered[19 * len(ordered) // 20])
    usual = ordered[(first_busy + len(ordered)) // 2]
    if usual < MIN_USUAL:
        return None
    below = BELOW * usual
    runs = [match.span() for match in _RUNS.finditer(bytes([v <= below for v in values]))]
    seen_s = times_s[-1] - times_s[0]
    open_since_s = None
    parts: list[Idle] = []
    for a, b in runs:
        if a == 0:
            continue  # since when is not known
        width_s = times_s[a - 1] - times_s[a - 2] if a > 1 else 0.0
        begin_s = times_s[a - 1] - max(0.0, 1 - values[a - 1] / usual) * width_s
        if b == len(values):
            open_since_s = begin_s
        elif times_s[b] - times_s[a - 1] < _MAX_GAP * interval_s + 1.5 * (b - a + 1) * interval_s:
            end_s = times_s[b - 1] + max(0.0, 1 - values[b] / usual) * (times_s[b] - times_s[b - 1])
            parts.append(Idle(begin_s, end_s, end_s - begin_s))
    shortest_s = max(MIN_IDLE_S, MIN_IDLE_SAMPLES * interval_s)
    if len(parts) * MIN_PERIOD_S > seen_s:  # idle in each step, or an alias of that
        usual_s = sorted(part.idle_s for part in parts)[len(parts) // 4]
        shortest_s = max(shortest_s, _STEP_IDLES * usual_s)
    intervals = [one for one in _joined(parts, max(1.0, 1.5 * interval_s)) if one.idle_s >= shortest_s]
    open_s = times_s[-1] - open_since_s if open_since_s is not None else 0.0
    return _Seen(usual, seen_s, intervals, open_since_s, (sum(one.idle_s for one in intervals) + open_s) / seen_s)


def _joined(parts: Iterable[Idle], gap_s: float) -> list[Idle]:
    """Join idle times over short interruptions: a kernel or two in the midst of a validation on the host."""
    out: list[Idle] = []
    for part in parts:
        if out and part.begin_s - out[-1].end_s <= min(gap_s, 0.5 * out[-1].idle_s, 0.5 * part.idle_s):
            out[-1] = Idle(out[-1].begin_s, part.end_s, out[-1].idle_s + part.idle_s)
        else:
            out.append(part)
    return out


def _together(seen: dict[int, _Seen]) -> list[list[int]]:
    """The GPUs whose intervals are mostly the same, in groups."""
    rest = sorted((gpu for gpu, one in seen.items() if one.intervals), key=lambda gpu: -len(seen[gpu].intervals))
    out = []
    while rest:
        first = seen[rest[0]].intervals
        group = [gpu for gpu in rest if gpu == rest[0] or (
            _overlapping(first, seen[gpu].intervals) >= _TOGETHER * max(len(first), len(seen[gpu].intervals)))]
        out.append(sorted(group))
        rest = [gpu for gpu in rest if gpu not in group]
    return out


def _overlapping(a: Sequence[Idle], b: Sequence[Idle]) -> int:
    """Number of idle times of both that overlap."""
    i = j = count = 0
    while i < len(a) and j < len(b):
        if a[i].begin_s < b[j].end_s and b[j].begin_s < a[i].end_s:
            count += 1
        if a[i].end_s < b[j].end_s:
            i += 1
        else:
            j += 1
    return count


def _recurring(gpus: Sequence[int], seen: _Seen, now_s: float, usual: float) -> RecurringIdle | None:
    """None where it does not return, or so soon that it may be the job's step."""
    idle = seen.intervals
    # Of two kinds, as of checkpoints and validation, each may be regular alone.
    sets = [idle, *_two_kinds(idle)]
    for candidates in sorted(sets, key=lambda kind: (kind is not idle, -sum(one.idle_s for one in kind))):
        fit = _regular([one.begin_s for one in candidates])
        if fit is None:
            continue
        hits, period_s, spread_s = fit
        last_s = hits[-1]
        if now_s - last_s > _OVERDUE_PERIODS * period_s or period_s < MIN_PERIOD_S:
            continue
        if seen.open_since_s is not None and abs(seen.open_since_s - last_s - period_s) <= 2 * _TOLERANCE * period_s:
            last_s = seen.open_since_s
        next_s = last_s + period_s
        while next_s + _TOLERANCE * period_s < now_s:  # it may be a little late
            next_s += period_s
        members = tuple(one for one in candidates if one.begin_s in hits)
        return RecurringIdle(tuple(gpus), usual, seen.seen_s, members,
                             tuple(one for one in idle if one not in members), period_s, spread_s, next_s)
    if len(idle) < OCCURRENCES or (idle[-1].begin_s - idle[0].begin_s) / (len(idle) - 1) < MIN_PERIOD_S:
        return None
    return RecurringIdle(tuple(gpus), usual, seen.seen_s, tuple(idle))


def _two_kinds(idle: Sequence[Idle]) -> list[list[Idle]]:
    """Short and long ones, where the lengths fall apart."""
    lengths = sorted(one.idle_s for one in idle)
    factor, border = max(((b / a, b) for a, b in pairwise(lengths)), default=(1.0, 0.0))
    if factor < _TWO_KINDS:
        return []
    return [[one for one in idle if one.idle_s < border], [one for one in idle if one.idle_s >= border]]


def _regular(begins_s: Sequence[float]) -> tuple[list[float], float, float] | None:
    """Rising times among these that come regularly, their period, and the most by which a distance differs from it;
    None where too few do. Single ones may be missing, and single ones may lie between."""
    least = max(REGULAR_OCCURRENCES, _REGULAR_PART * len(begins_s))
    if len(begins_s) < least:
        return None
    newest = begins_s[-_CANDIDATES - 1:]
    candidates = [b - a for a, b in pairwise(newest)] + [b - a for a, b in zip(newest, newest[2:], strict=False)]
    best: tuple[list[float], float, float] | None = None
    for candidate in candidates:
        for first in (0, 1):
            fit = _chain(begins_s[first:], candidate)
            if fit is None or len(fit[0]) < least:
                continue
            if len(fit[0]) == len(begins_s):
                return fit
            if best is None or len(fit[0]) > len(best[0]):
                best = fit
    return best


def _chain(times_s: Sequence[float], candidate_s: float) -> tuple[list[float], float, float] | None:
    """The times that follow the first at ``candidate_s`` or, now and then, at twice that."""
    hits, distances, skipped = [times_s[0]], [], 0
    for time_s in times_s[1:]:
        since_s = time_s - hits[-1]
        for times in (1, 2):
            if abs(since_s / times - candidate_s) <= _TOLERANCE * candidate_s:
                hits.append(time_s)
                distances.append(since_s / times)
                skipped += times - 1
                break
    if not distances or 3 * skipped > len(distances):
        return None
    period_s = median(distances)
    spread_s = max(abs(distance - period_s) for distance in distances)
    return (hits, period_s, spread_s) if spread_s <= _TOLERANCE * period_s else None

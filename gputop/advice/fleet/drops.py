"""A job whose activity fell and stayed down."""

from __future__ import annotations

from statistics import median

from gputop.advice.fleet.job_view import (
    HOUR_S,
    NO_PAST,
    NO_STEP,
    FleetVerdict,
    FleetWords,
    JobView,
    evidence,
    lasting,
)
from gputop.advice.registry import limit, source
from gputop.advice.verdict import Missing
from gputop.text.units import percent


class ActivityDrop(FleetVerdict, frozen=True, kw_only=True):
    before: float
    after: float


def judge_activity_drop(view: JobView) -> ActivityDrop | Missing | None:
    """The activity was steady, fell by two fifths at least, and has stayed down."""
    job = view.job
    past = view.past(job.history)
    if len(past) < 2 or job.history is None:
        return NO_PAST
    step_s = job.history.step_s
    short = max(1, round(limit("activity_drop.after_s") / step_s))
    first = max(1, round(limit("activity_drop.before_s") / step_s))
    values = [value for _, value in past]
    if len(values) < first + short:
        return None  # too young
    # A drop of long ago leaves less than half of the slices above: the level before is that of the best ones.
    level = sorted(values)[-first]
    if level < limit("activity_drop.before"):
        return None
    above = [i for i, value in enumerate(values) if value >= limit("activity_drop.steady") * level]
    begin = above[-1] + 1
    before, after = values[:begin], values[begin:]
    if len(after) < short or len(before) < first:
        return None
    if len(above) < 0.8 * begin or median(after) > limit("activity_drop.ratio") * median(before):
        return None
    lasts_s = view.now_s - max(past[begin - 1][0], past[begin][0] - 2 * step_s)  # whatever was in a gap between
    lost = job.gpus * (median(before) - median(after)) * lasts_s / HOUR_S
    return ActivityDrop(gpus=(), job=job.id, count=job.gpus, lasts_s=lasts_s, gpu_hours_lost=lost,
                        before=median(before), after=median(after), severity="medium")


def describe_activity_drop(v: ActivityDrop) -> FleetWords:
    return FleetWords(
        title=f"The activity of job {v.job} has fallen to {percent(v.after)}",
        why=f"Its {v.count} GPUs were active {percent(v.before)} of the time. They have been active {percent(v.after)} "
            f"of the time{lasting(v)}.",
        evidence=evidence(v, {"before_ratio": v.before, "after_ratio": v.after}),
        action="Look in the job's log for what changed at that time: another phase of the training, another data set, "
               "or slower storage. gputop compare shows what differs between two captures.",
        gain=NO_STEP, source=source("activity_drop.ratio", "activity_drop.after_s"),
        label=f"fell {percent(v.before)} → {percent(v.after)}",
    )

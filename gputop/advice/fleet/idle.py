"""GPUs that a job holds and does not use: all of them, or some; and a job whose activity fell and stayed down."""

from __future__ import annotations

from statistics import median

from gputop.advice.fleet import job_view
from gputop.advice.registry import limit, source
from gputop.advice.verdict import Missing
from gputop.cluster.model import Job
from gputop.text.units import percent, seconds

_SOURCE = "Princeton's jobstats: reports GPUs that a job holds without using them; gputop's own thresholds"
_NOTHING_YET = Missing("data on the activity of all GPUs of the job")
_GAPS = Missing("activity of all GPUs of the job over the last 15 minutes; some GPUs have no samples for part of this "
                "time and are idle now")


class HeldIdle(job_view.FleetVerdict, frozen=True, kw_only=True):
    memory_used_ratio: float | None


def judge_held_idle(view: job_view.JobView) -> HeldIdle | Missing | None:
    """No GPU of the job has done anything for a quarter of an hour."""
    job, window_s = view.job, limit("held_idle.window_s")
    if job.idle_gpus is None or not job.gpus:
        return _NOTHING_YET
    if view.is_younger(window_s):
        return None
    if job.idle_gpus < job.gpus:
        return _GAPS if _has_gaps(job) else None
    # The mean of a large job would hide that one of its GPUs worked; of one without samples nobody knows.
    known_s, seen = view.lasts_s(view.past(job.idle.busy_history), lambda _, busy: busy <= 0)
    lasts_s = max(window_s, known_s)
    hours = job.gpus * lasts_s / job_view.HOUR_S
    used, whole = job.memory_used_bytes, job.memory_total_bytes
    return HeldIdle(
        job=job.id, count=job.gpus, lost=job.gpus, lasts_s=lasts_s, since_exact=seen and known_s >= window_s,
        severity="high" if hours >= limit("held_idle.high_gpu_hours") else "medium",
        memory_used_ratio=used / whole if used is not None and whole else None)


def _has_gaps(job: Job) -> bool:
    """Return whether GPUs do nothing now of which it is not known whether they did in the window."""
    return (job.idle.quiet is not None and job.idle.quiet > (job.idle_gpus or 0)
            and job.idle.seen is not None and job.idle.seen < job.gpus)


def describe_held_idle(v: HeldIdle) -> job_view.FleetWords:
    memory = "" if v.memory_used_ratio is None else f" {percent(v.memory_used_ratio)} of GPU memory is in use."
    return job_view.FleetWords(
        title=f"Job {v.job} holds " + ("a GPU but does not use it" if v.count == 1 else
                                       f"{v.count} GPUs but does not use them"),
        why=f"{'The GPU has' if v.count == 1 else 'The GPUs have'} been idle{job_view.lasting(v)}.{memory}",
        evidence=job_view.evidence(v, {"gpus_count": float(v.count), "memory_used_ratio": v.memory_used_ratio}),
        action="Ask the job's owner whether the job is hanging, is waiting for data, or is a forgotten session. Run "
               "gputop on a node of the job to see the processes.",
        source=_SOURCE, label=f"held, idle {'' if v.since_exact else '> '}{seconds(v.lasts_s or 0.0)}")


class PartlyUsed(job_view.FleetVerdict, frozen=True, kw_only=True):
    idle_count: int


def judge_partly_used_job(view: job_view.JobView) -> PartlyUsed | Missing | None:
    """Some GPUs of the job have done nothing for a quarter of an hour while others worked."""
    job = view.job
    if job.idle_gpus is None or not job.gpus:
        return _NOTHING_YET
    idle = job.idle_gpus
    if idle >= job.gpus or view.is_younger(limit("held_idle.window_s")):
        return None
    if _has_gaps(job):
        return _GAPS
    if not idle:
        return None
    past = view.past(job.idle.busy_history)
    measured = dict(view.past(job.idle_history))
    gpus = max((busy + measured.get(time_s, 0.0) for time_s, busy in past), default=0.0)
    known_s, seen = view.lasts_s(past, lambda _, busy: busy <= gpus - idle)
    lasts_s = max(limit("held_idle.window_s"), known_s)
    low = job.idle.names or tuple(gpu.name for gpu in job.low_gpus
                                  if (gpu.activity or 0.0) <= limit("held_idle.activity"))
    return PartlyUsed(
        job=job.id, count=job.gpus, idle_count=idle, lost=idle, places=low, lasts_s=lasts_s,
        since_exact=seen and known_s >= lasts_s,
        severity="high" if idle / job.gpus >= limit("partly_used_job.high") else "medium")


def describe_partly_used_job(v: PartlyUsed) -> job_view.FleetWords:
    places = f", including {', '.join(v.places)}" if v.places else ""
    return job_view.FleetWords(
        title=f"Job {v.job} uses {v.count - v.idle_count} of its {v.count} GPUs",
        why=f"{v.idle_count} of the job's {v.count} GPUs have been idle{job_view.lasting(v)}{places}, while the others "
            "work.",
        evidence=job_view.evidence(v, {"gpus_count": float(v.count), "idle_gpus_count": float(v.idle_count)}),
        action="Request as many GPUs as the training uses, or start a worker for each GPU. The number of workers "
               "depends on the number of processes (srun --ntasks, torchrun --nproc-per-node) and the devices of the "
               "distribution strategy.",
        source=_SOURCE, label=f"uses {v.count - v.idle_count} of {v.count} GPUs")


class ActivityDrop(job_view.FleetVerdict, frozen=True, kw_only=True):
    before: float
    after: float


def judge_activity_drop(view: job_view.JobView) -> ActivityDrop | Missing | None:
    """The activity was steady, fell by two fifths at least, and has stayed down."""
    job = view.job
    past = view.past(job.history)
    if len(past) < 2 or job.history is None:
        return job_view.NO_PAST
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
    return ActivityDrop(job=job.id, count=job.gpus, lasts_s=lasts_s, before=median(before), after=median(after),
                        lost=job.gpus * (median(before) - median(after)), severity="medium")


def describe_activity_drop(v: ActivityDrop) -> job_view.FleetWords:
    return job_view.FleetWords(
        title=f"The activity of job {v.job} has fallen to {percent(v.after)}",
        why=f"The job's {v.count} GPUs were {percent(v.before)} active before and have been only {percent(v.after)} "
            f"active{job_view.lasting(v)}.",
        evidence=job_view.evidence(v, {"before_ratio": v.before, "after_ratio": v.after}),
        action="Look in the job's log for what changed at that time: another training phase, another dataset, or "
               "slower storage. gputop compare shows what differs between two captures.",
        source=source("activity_drop.ratio", "activity_drop.after_s"),
        label=f"fell {percent(v.before)} → {percent(v.after)}")

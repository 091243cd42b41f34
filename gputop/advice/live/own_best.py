"""A job that worked more for minutes than it does now: its own best is a level that it can reach on these GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from msgspec import Struct

from gputop.advice.live.frameworks import NO_FIGURE
from gputop.advice.live.node_view import NodeView, gpus_text
from gputop.advice.registry import limit, source
from gputop.advice.verdict import Explanation, Missing, Verdict
from gputop.core.samples import GpuSample
from gputop.text.units import percent

SLICE_S, _MOST_SLICES = 60.0, 1440  # of the history, which has them for a day


class Fall(Struct, frozen=True):
    """SM activity was steady at ``best`` and has stayed at ``now`` for ``lasts_s``."""

    best: float
    now: float
    lasts_s: float


class BelowOwnBest(Verdict, frozen=True, kw_only=True):
    fall: Fall


def fall_of(means: Sequence[float]) -> Fall | None:
    """Fall of the means of whole minutes (oldest first); None where there is none, or where it comes and goes."""
    unknown = max((i for i, mean in enumerate(means) if mean != mean), default=-1)
    values = means[unknown + 1:]
    rule = "below_own_best"
    held, lasts = (max(1, round(limit(f"{rule}.{name}") / SLICE_S)) for name in ("before_s", "after_s"))
    if len(values) < held + lasts or values[-1] > limit(f"{rule}.ratio") * max(values):
        return None  # as nearly always
    level = sorted(values)[-held]
    above = [i for i, value in enumerate(values) if value >= limit(f"{rule}.steady") * level]
    begin = above[-1] + 1 if above else 0
    before, after = values[:begin], values[begin:]
    # All of it: a job whose phases take turns has no level of its own.
    if len(above) < begin or len(before) < held or len(after) < lasts or level < limit("unused_gpu.peer_busy"):
        return None
    best = median(before)
    return Fall(best, median(after), len(after) * SLICE_S) if max(after) <= limit(f"{rule}.ratio") * best else None


def falls(view: NodeView) -> dict[int, Fall]:
    """Falls by GPU, for jobs that are past their start; those that are idle or without a process are left out."""
    slices = max(1, min(_MOST_SLICES, round(limit("below_own_best.window_s") / SLICE_S)))
    end_s, means = view.history.slice_means("sm_active", SLICE_S, slices)
    out = {}
    for gpu in view.warmed_up_gpus:
        # Without the job's start, which is not its level.
        known_s = view.age_on_s(gpu) - limit("idle_gpu.age_s") - (view.sample.time_s - end_s)
        of_gpu = means[view.column(gpu)][-max(1, int(min(slices, known_s / SLICE_S))):]
        if (fall := fall_of(of_gpu)) is not None:
            out[gpu.info.index] = fall
    return out


def judge_below_own_best(view: NodeView) -> BelowOwnBest | Missing | None:
    """GPUs that have worked less for minutes than the same job did on them before."""
    at_work = [gpu for gpu in view.warmed_up_gpus if view.age_on_s(gpu) < float("inf")]
    fine = [gpu for gpu in at_work if view.mean(gpu, "sm_active", view.seconds("window_s")) is not None]
    if not fine:
        return _unknown(at_work) or view.not_at_work(view.seconds("window_s"))
    left_out = view.gpus_left_out("below_own_best")
    listed = {gpu.info.index for gpu in fine}
    fallen = {index: fall for index, fall in falls(view).items() if index in listed and index not in left_out}
    if not fallen:
        return None
    return BelowOwnBest(
        gpus=tuple(sorted(fallen)), severity="low",
        fall=Fall(*(median([getattr(fall, name) for fall in fallen.values()]) for name in ("best", "now", "lasts_s"))))


def _unknown(at_work: Sequence[GpuSample]) -> Missing | None:
    reason = next((gpu["sm_active"].reason for gpu in at_work if gpu["sm_active"].reason), None)
    return Missing(f"SM activity of {gpus_text(at_work)}: {reason}") if reason else None


def describe_below_own_best(v: BelowOwnBest) -> Explanation:
    fall, work = v.fall, "works" if len(v.gpus) == 1 else "work"
    minutes = round(fall.lasts_s / 60)
    return Explanation(
        title=f"{gpus_text(v.gpus)} {work} at {percent(fall.now)} SM activity, {percent(fall.best)} until "
              f"{minutes} min ago",
        why=f"The same job held {percent(fall.best)} SM activity for minutes, and has stayed at {percent(fall.now)} "
            f"for {minutes} min: these GPUs can reach more with this job. Another phase of it, such as evaluation, "
            "longer sequences or another data set, looks the same.",
        evidence={"before_ratio": fall.best, "after_ratio": fall.now, "lasts_s": fall.lasts_s},
        brief="Another phase of the job, such as evaluation or longer sequences, looks the same.",
        action="Look in the job's log for what changed at that time. On the host, look at storage, at other programs "
               "that use the CPUs, and at memory that runs out.",
        gain=NO_FIGURE,
        source="GPM/DCGM SM activity by the minute; " + source("below_own_best.ratio", "below_own_best.before_s"),
    )

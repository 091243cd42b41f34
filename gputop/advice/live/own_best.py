"""A job that worked more for minutes than it does now: its own best is a level that it can reach on these GPUs."""

from __future__ import annotations

from statistics import median

from gputop.advice.live.node_view import Fall, NodeView, falls, gpus_text
from gputop.advice.registry import source
from gputop.advice.verdict import NO_FIGURE, Explanation, Missing, Verdict
from gputop.text.units import percent


class BelowOwnBest(Verdict, frozen=True, kw_only=True):
    fall: Fall


def judge_below_own_best(view: NodeView) -> BelowOwnBest | Missing | None:
    """GPUs that have worked less for minutes than the same job did on them before."""
    at_work = [gpu for gpu in view.warmed_up_gpus if view.age_on_s(gpu) < float("inf")]
    fine = [gpu for gpu in at_work if view.mean(gpu, "sm_active", view.seconds("window_s")) is not None]
    if not fine:
        reason = next((gpu["sm_active"].reason for gpu in at_work if gpu["sm_active"].reason), None)
        return (Missing(f"data on SM activity of {gpus_text(at_work)}: {reason}") if reason else
                view.not_at_work(view.seconds("window_s")))
    left_out = view.gpus_left_out("below_own_best")
    listed = {gpu.info.index for gpu in fine}
    fallen = {index: fall for index, fall in falls(view).items() if index in listed and index not in left_out}
    if not fallen:
        return None
    return BelowOwnBest(
        gpus=tuple(sorted(fallen)), severity="low",
        fall=Fall(*(median([getattr(fall, name) for fall in fallen.values()]) for name in ("best", "now", "lasts_s"))))


def describe_below_own_best(v: BelowOwnBest) -> Explanation:
    fall, work = v.fall, "runs" if len(v.gpus) == 1 else "run"
    minutes = round(fall.lasts_s / 60)
    return Explanation(
        title=f"{gpus_text(v.gpus)} {work} at {percent(fall.now)} SM activity, down from {percent(fall.best)} "
              f"{minutes} min ago",
        why=f"This job sustained {percent(fall.best)} SM activity for several minutes, then stayed at "
            f"{percent(fall.now)} for {minutes} min, so these GPUs can run this job at higher utilization. A change in "
            "the job's work, such as evaluation, longer sequences, or another dataset, looks the same.",
        evidence={"before_ratio": fall.best, "after_ratio": fall.now, "lasts_s": fall.lasts_s},
        brief="A change in the job's work, such as evaluation or longer sequences, looks the same.",
        action="Look in the job's log for what changed at that time. On the host, look at storage, other programs "
               "that use the CPUs, and free memory.",
        gain=NO_FIGURE,
        source="SM activity per minute, from GPM or DCGM; " + source("below_own_best.ratio", "below_own_best.before_s"))

"""Falls of the SM activity of a job from a level that it held for minutes."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from msgspec import Struct

from gputop.advice.live.node_view import NodeView
from gputop.advice.registry import limit

SLICE_S, _MOST_SLICES = 60.0, 1440  # of the history, which has them for a day


class Fall(Struct, frozen=True):
    """SM activity was steady at ``best`` and has stayed at ``now`` for ``lasts_s``."""

    best: float
    now: float
    lasts_s: float


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

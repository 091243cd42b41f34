"""The rank of a job for which the others wait, by minutes of live activity. Pure.

Ranks that train in step meet in collectives. Who comes first waits there in a kernel of NCCL: its utilization stays at
100%, while its tensor cores and most of its SMs stand still. So the rank that always comes last differs from all
others, in one of two ways: its GPU alone is idle at times, as its host is late, or its GPU alone works all the time.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, median, pstdev

from msgspec import Struct

from gputop.telemetry.ring_buffers import Series

SLICE_S = 10.0  # of the history
_SLICES_KNOWN = 0.8  # of the window; the rest may be pauses, such as a checkpoint
_LEAST_WORK = 0.02  # tensor activity, as a share of time: below it the ranks' work cannot be compared
_PAUSE = 0.5  # of the median work of the slices: below it the job saves, evaluates or starts
_STEADY = 0.25  # standard deviation of the job's work over its mean; phases that take turns differ by more
_NEVER_IDLE = 0.03  # of the time, by utilization, which misses a reading now and then


class RankActivity(Struct, frozen=True):
    """A GPU of the job in each slice, oldest first; NaN where nothing was read. ``work``: tensor activity × SM clock,
    in cycles per second."""

    util: Series
    sm_active: Series
    tensor_active: Series
    sm_clock_hz: Series

    @property
    def work(self) -> Series:
        return [tensor * clock for tensor, clock in zip(self.tensor_active, self.sm_clock_hz, strict=True)]


class RankDelay(Struct, frozen=True):
    """``number`` of the GPU among those given. ``late``: it is idle for ``own`` of the time, the others for ``others``;
    not so: it is slow, and these are their SM activity. ``slices``: the share in which it stood out. ``clock``: its SM
    clock over the median of the others."""

    number: int
    late: bool
    own: float
    others: float
    slices: float
    clock: float


class DelayLimits(Struct, frozen=True):
    """``gap``: by how much it differs from each other one. ``slices``: in which share of them. ``alike``: how far the
    work of a rank may be from the median of all."""

    gap: float
    slices: float
    alike: float


def slow_rank(ranks: Sequence[RankActivity], limits: DelayLimits) -> RankDelay | str | None:
    """The rank that is always last; None where none is, or the reason why that cannot be told.

    1. Slices count in which all figures of all GPUs are known and the job works: its work is above half of its median.
       Where they are fewer than 80% of the window, nothing is said.
    2. The work of a GPU is its tensor activity times its SM clock. Ranks that do the same per step and meet in each
       have done the same in each slice, whatever their clocks. Where the work of one is off the median, the ranks are
       stages of a pipeline, or have shards of different size: which of them is late by nature is not known.
    3. Where the work of the whole job varies from slice to slice, phases take turns: nothing is said.
    4. Late: in nearly every slice the same GPU is idle for longer than each other one, and those are never idle. The
       others have done the same work, so that their busy time is longer by a wait.
    5. Slow: no GPU is idle, and in nearly every slice the same one has more SM activity than each other one. The others
       have done the same work in less time, and waited for the rest of it.
    """
    works = [rank.work for rank in ranks]
    of_job = [fmean(works_then) for works_then in zip(*works, strict=True)]
    slices = [n for n, work in enumerate(of_job) if work == work
              and all(rank.util[n] == rank.util[n] and rank.sm_active[n] == rank.sm_active[n] for rank in ranks)]
    usual = median([of_job[n] for n in slices]) if slices else 0.0
    slices = [n for n in slices if of_job[n] >= _PAUSE * usual]
    if len(slices) < _SLICES_KNOWN * len(of_job):
        return ("minutes in which all GPUs of the job work, with utilization, SM activity, tensor activity and clocks")
    if min(fmean([rank.tensor_active[n] for n in slices]) for rank in ranks) < _LEAST_WORK:
        return "work on tensor cores, which gputop uses to compare the ranks"
    means = [fmean([work[n] for n in slices]) for work in works]
    if any(abs(mean - median(means)) > limits.alike * median(means) for mean in means):
        return "ranks that do the same work, unlike pipeline stages or uneven shards"
    if pstdev([of_job[n] for n in slices]) > _STEADY * fmean([of_job[n] for n in slices]):
        return "steady work, but the job alternates between phases"
    idle = [[1.0 - rank.util[n] for n in slices] for rank in ranks]
    late = _first(idle, limits)
    if late is not None and (
            max(fmean(ratios) for number, ratios in enumerate(idle) if number != late[0]) <= _NEVER_IDLE):
        return _found(True, idle, *late, ranks, slices)
    active = [[rank.sm_active[n] for n in slices] for rank in ranks]
    slow = _first(active, limits)
    if slow is not None and max(map(fmean, idle)) <= _NEVER_IDLE:
        return _found(False, active, *slow, ranks, slices)
    return None


def _first(values: Sequence[Sequence[float]], limits: DelayLimits) -> tuple[int, float] | None:
    """The rank whose value is above each other's by the gap, and the share of slices in which it is; None where that
    are too few."""
    number = max(range(len(values)), key=lambda rank: fmean(values[rank]))
    others = [max(then) for then in zip(*(work for rank, work in enumerate(values) if rank != number), strict=True)]
    above = sum(work - other >= limits.gap for work, other in zip(values[number], others, strict=True))
    share = above / len(others)
    return (number, share) if share >= limits.slices else None


def _found(late: bool, values: Sequence[Sequence[float]], number: int, share: float,
           ranks: Sequence[RankActivity], slices: Sequence[int]) -> RankDelay:
    clocks = [fmean([rank.sm_clock_hz[n] for n in slices]) for rank in ranks]
    others = [rank for rank in range(len(ranks)) if rank != number]
    return RankDelay(number, late, fmean(values[number]), fmean([fmean(values[rank]) for rank in others]), share,
                     clocks[number] / median([clocks[rank] for rank in others]))

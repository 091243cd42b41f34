"""The rank for which the others wait: simulated minutes of jobs that have one, and of jobs that have none."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest

from gputop.advice.live.ranks import RankActivity, RankDelay, slow_rank

SLICES, CLOCK_HZ = 30, 1.98e9
WAIT_SM = 0.12  # SMs that a kernel of NCCL keeps
Each = Callable[[int, int, random.Random], float]  # by slice and rank


@dataclass(frozen=True)
class Job:
    """A job whose ranks meet in each step. Seconds of a step: ``compute`` at the usual clock, ``host`` before it with
    the GPU idle; ``clock`` as a share of the usual one; ``tensor``: share of the compute on tensor cores."""

    ranks: int = 8
    compute: Each = lambda slice, rank, rng: 1.0
    host: Each = lambda slice, rank, rng: 0.0
    clock: Each = lambda slice, rank, rng: 1.0
    tensor: float = 0.5
    noise: float = 0.01
    pauses: Sequence[int] = field(default=())  # slices in which the job saves

    def activity(self, seed: int = 3) -> list[RankActivity]:
        rng = random.Random(seed)
        rows: list[list[tuple[float, ...]]] = [[] for _ in range(self.ranks)]
        for number in range(SLICES):
            clocks = [self.clock(number, rank, rng) for rank in range(self.ranks)]
            compute = [self.compute(number, rank, rng) for rank in range(self.ranks)]
            host = [self.host(number, rank, rng) for rank in range(self.ranks)]
            busy = [c / clock for c, clock in zip(compute, clocks, strict=True)]
            step = max(h + b for h, b in zip(host, busy, strict=True)) + 0.05
            for rank in range(self.ranks):
                if number in self.pauses:
                    rows[rank].append((0.0, 0.0, 0.0, CLOCK_HZ))
                    continue
                wait = step - host[rank] - busy[rank]
                sm = (0.9 * busy[rank] + WAIT_SM * wait) / step
                shares = [min(1.0, max(0.0, value + rng.gauss(0, self.noise))) for value in (
                    1 - host[rank] / step, sm, self.tensor * busy[rank] / step)]
                rows[rank].append((*shares, CLOCK_HZ * clocks[rank]))
        return [RankActivity(*(list(column) for column in zip(*own, strict=True))) for own in rows]


def found(job: Job) -> RankDelay:
    outcome = slow_rank(job.activity(), "enter")
    assert isinstance(outcome, RankDelay), outcome
    return outcome


def of(rank: int, value: float, usual: float) -> Each:
    return lambda slice, own, rng: value if own == rank else usual


def test_a_rank_whose_host_is_late_and_a_gpu_with_a_low_clock() -> None:
    late = found(Job(host=of(5, 0.2, 0.0)))
    assert (late.number, late.late) == (5, True) and late.slices == 1.0
    assert late.own == pytest.approx(0.2 / 1.25, abs=0.02) and late.others < 0.02 and late.clock == pytest.approx(1.0)
    slow = found(Job(clock=of(2, 0.8, 1.0)))  # a GPU with a low clock
    assert (slow.number, slow.late) == (2, False) and slow.clock == pytest.approx(0.8)
    assert slow.own > slow.others + 0.1
    assert found(Job(host=of(0, 0.2, 0.0), pauses=(7, 20))).number == 0  # a checkpoint now and then does not hide it
    outcome = slow_rank(Job(host=of(0, 0.2, 0.0), pauses=range(12)).activity(), "enter")
    assert isinstance(outcome, str) and "minutes in which" in outcome


@pytest.mark.parametrize("job", [
    Job(), Job(ranks=3),
    Job(host=lambda slice, rank, rng: 0.2),  # all wait for their hosts
    Job(host=lambda slice, rank, rng: 0.2 if rank in (2, 5) else 0.0),  # two of them
    Job(host=lambda slice, rank, rng: 0.2 if rank == slice % 8 else 0.0),  # another one each time
    Job(host=lambda slice, rank, rng: rng.expovariate(20)),  # ragged, by chance
    Job(host=of(5, 0.2, 0.05)),  # the others are idle too: launches, not only waiting
    Job(host=of(5, 0.05, 0.0)),  # a moment
    Job(clock=of(2, 0.97, 1.0)),  # one boost step
    Job(host=lambda slice, rank, rng: 0.3 if rank == 5 and slice < 10 else 0.0),  # it was, and is no longer
], ids=["even", "three", "host-bound", "two", "in turns", "by chance", "all idle", "a moment", "boost", "for a while"])
def test_jobs_without_one(job: Job) -> None:
    for seed in range(5):
        assert slow_rank(job.activity(seed), "enter") is None


@pytest.mark.parametrize(("job", "words"), [
    (Job(compute=of(7, 1.25, 1.0)), "pipeline stages"),  # the last stage has the head, the others wait for it
    (Job(compute=lambda slice, rank, rng: 1.0 - 0.08 * rank), "pipeline stages"),
    (Job(compute=of(1, 0.1, 1.0), host=of(1, 0.5, 0.0)), "pipeline stages"),  # it evaluates, or serves the others
    (Job(host=lambda slice, rank, rng: 2.0 * (slice % 3) + (0.2 if rank == 5 else 0.0)), "alternates between phases"),
    (Job(tensor=0.01, host=of(5, 0.2, 0.0)), "tensor cores"),
])
def test_jobs_of_which_nothing_can_be_said(job: Job, words: str) -> None:
    outcome = slow_rank(job.activity(), "enter")
    assert isinstance(outcome, str) and words in outcome, outcome


@pytest.mark.parametrize("metric", ["util", "sm_active", "tensor_active", "sm_clock_hz"])
def test_a_figure_that_is_missing(metric: str) -> None:
    ranks = Job(host=of(5, 0.2, 0.0)).activity()
    getattr(ranks[3], metric)[:] = [math.nan] * SLICES
    outcome = slow_rank(ranks, "enter")
    assert isinstance(outcome, str) and "minutes in which" in outcome

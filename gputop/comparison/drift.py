"""Run-to-run variation of a job: the least difference that counts as a change.

All are logarithms of factors: what disturbs a job multiplies its time.
"""

from __future__ import annotations

import math

from gputop.comparison.live_step import live_spread
from gputop.comparison.sides import Side
from gputop.comparison.statistics import Drift
from gputop.core.job_cpus import JobCpus

# Standard deviation of the mean step between reruns of one unchanged job, as a share of it. On the CPU: measured with
# nothing beside it, 7 and 9% where the step computes there (benchmarks/compare_reruns.md). With GPUs: gputop's own
# assumption, not measured; clocks and temperature differ.
CPU_DRIFT = 0.08
GPU_DRIFT = 0.01
# Where other processes fill the CPUs: by this share of the logarithm of the most that they can make of a step it still
# varies from run to run once it is divided by that, and by no more than by LOAD_SPREAD_MOST, which is by how much the
# CPU time of a step does (benchmarks/compare_loaded.md).
LOAD_SPREAD = 0.3
LOAD_SPREAD_MOST = 0.2
# A job that finds this share of its CPUs busy, its own use included, is slowed down by what else runs. gputop's own.
_FULL = 0.9
_MIN_CPUS = 0.01


def drift_of(a: Side, b: Side) -> Drift:
    """The variation of both sides, no less than that over the minutes before each capture, and what the load of other
    processes explains of their difference."""
    slowed = _slowdowns(a, b)
    spread = math.hypot(*(min(LOAD_SPREAD * slowdown, LOAD_SPREAD_MOST) / _runs(side)
                          for side, slowdown in zip((a, b), slowed, strict=True)))
    return Drift(_deviation(a), _deviation(b), slowed[1] - slowed[0], spread)


def load_effect(a: Side, b: Side) -> float:
    """Logarithm of the factor by which a step of B may be longer than one of A only because other processes left it
    less of the CPUs; negative: shorter. 0 if that is not known, or if the CPUs were not full."""
    return drift_of(a, b).load


def cpus_of(side: Side) -> JobCpus | None:
    return side.analysis.trace.job_cpus if side.analysis is not None else None


def _slowdowns(a: Side, b: Side) -> tuple[float, float]:
    """Return of both sides the logarithm of the factor by which other processes made its steps longer at most; the
    least of three bounds, of those that both sides know:

    1. A step that needs CPUs all the time is longer by the CPUs that there are over those that were left to the job.
    2. A thread that never sleeps takes longer by the time that it waits for a CPU over the time that it has one
       (``JobCpus.stretch``). A job that sleeps leaves the CPUs to others, which the first bound mistakes for load.
    3. Whatever a step does, no more of it than ``waited`` is waiting, as long as less than one thread waits on average.
    """
    one, other = cpus_of(a), cpus_of(b)
    if one is None or other is None or not (_full(one) or _full(other)):
        return 0.0, 0.0
    if any(cpus.used is None or cpus.others is None for cpus in (one, other)):
        return 0.0, 0.0
    by_waits = one.stretch is not None and other.stretch is not None
    return _slowdown(one, by_waits=by_waits), _slowdown(other, by_waits=by_waits)


def _slowdown(cpus: JobCpus, *, by_waits: bool) -> float:
    left = max(min(cpus.limit, cpus.allowed - (cpus.others or 0.0)), cpus.used or 0.0, _MIN_CPUS)
    bounds = [math.log(max(cpus.limit, _MIN_CPUS) / left)]
    if by_waits and cpus.stretch is not None and cpus.waited is not None:
        bounds += [math.log(cpus.stretch), *((-math.log1p(-cpus.waited),) if cpus.waited < 1 else ())]
    return max(0.0, min(bounds))


def _full(cpus: JobCpus) -> bool:
    return cpus.busy is not None and cpus.busy >= _FULL * cpus.allowed


def _deviation(side: Side) -> float:
    """Standard deviation of the logarithm of a side's mean step, over as many runs as it has captures of."""
    usual = GPU_DRIFT if side.analysis is not None and side.analysis.gpus else CPU_DRIFT
    return max(usual, live_spread(side)) / _runs(side)


def _runs(side: Side) -> float:
    """The root of the number of a side's captures, by which the spread of their mean is less than that of one."""
    return math.sqrt(1 + len(side.repeats))

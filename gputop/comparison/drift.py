"""By how much reruns of one job differ, whatever changed in it: what a change must exceed to be called one."""

from __future__ import annotations

import math

from gputop.comparison.live_step import live_spread
from gputop.comparison.sides import Side
from gputop.core.job_cpus import JobCpus

# Standard deviation of the mean step between reruns of one unchanged job, as a share of it. On the CPU: measured with
# nothing beside it, 7 and 9 % where the step computes there (benchmarks/compare_reruns.md). With GPUs: gputop's own
# assumption, not measured; clocks and temperature differ.
CPU_DRIFT = 0.08
GPU_DRIFT = 0.01
# A job that finds this share of its CPUs busy, its own use included, is slowed down by what else runs. gputop's own.
_FULL = 0.9


def drift_of(a: Side, b: Side) -> tuple[float, float]:
    """Of both sides the standard deviation between runs as a share of the mean, and no less than that over the minutes
    before each capture; with what the load explains."""
    load = load_effect(a, b) / 2
    of_a, of_b = (math.hypot(_floor(side) / math.sqrt(1 + len(side.repeats)), load) for side in (a, b))
    return of_a, of_b


def load_effect(a: Side, b: Side) -> float:
    """Logarithm of how much longer a step of one side may be only because other processes left it less of the CPUs;
    0 where that is not known, or where its CPUs were not full."""
    cpus = [cpus_of(side) for side in (a, b)]
    if not any(one is not None and _full(one) for one in cpus):
        return 0.0
    left = [max(one.limit - one.others, one.used, 0.01) for one in cpus
            if one is not None and one.used is not None and one.others is not None]
    return abs(math.log(left[0] / left[1])) if len(left) == 2 else 0.0


def cpus_of(side: Side) -> JobCpus | None:
    return side.analysis.trace.job_cpus if side.analysis is not None else None


def _full(cpus: JobCpus) -> bool:
    return cpus.busy is not None and cpus.busy >= _FULL * cpus.allowed


def _floor(side: Side) -> float:
    usual = GPU_DRIFT if side.analysis is not None and side.analysis.gpus else CPU_DRIFT
    return max(usual, live_spread(side))

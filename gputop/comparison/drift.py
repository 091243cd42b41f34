"""Run-to-run variation of a job: the least difference that counts as a change, and the live step times by which it is
also known.

All variations are logarithms of factors: what disturbs a job multiplies its time.
"""

from __future__ import annotations

import math
from statistics import median

import numpy as np

from gputop.comparison.sides import Side
from gputop.comparison.statistics import MIN_STEPS, Drift
from gputop.core.captured_samples import SURE, JobCpus, LiveSteps, is_undersampled, steps_per_period
from gputop.trace.model import F64

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
# The same if the waits of each thread tell what the load made of a step: the most for a capture of very many steps; by
# how much single steps vary, as the load meets each anew (0.2 to 1.0 measured), so that few steps whose blocks are
# alike by chance are not taken for sure; and the share of the logarithm by which the load made more of one side's steps
# than of the other's (benchmarks/compare_loaded.md: 0.17, and 0.4).
THREADS_SPREAD_MOST = 0.2
STEP_SPREAD = 0.8
UNEVEN_LOAD = 0.5
# A job that finds this share of its CPUs busy, its own use included, is slowed down by what else runs. gputop's own.
_FULL = 0.9
_MIN_CPUS = 0.01
_COVERED = 0.5  # of the recording are steps. gputop's own.
_FEW = 0.1  # of the CPUs that the job itself used. gputop's own.


def drift_of(a: Side, b: Side) -> Drift:
    """The variation of both sides, no less than that over the minutes before each capture, and what the load of other
    processes explains of their difference."""
    first, second = _slowdowns(a, b)
    if not first or not second:
        return Drift(_deviation(a), _deviation(b))
    loads = tuple(y - x for x, y in zip(first, second, strict=True))
    by_threads = len(first) > 1
    spreads = (min(LOAD_SPREAD * max(loaded), threads_spread(side.steps.count if side.steps is not None else 1)
                   if by_threads else LOAD_SPREAD_MOST) / _runs(side) for side, loaded in ((a, first), (b, second)))
    spread = math.hypot(*spreads, UNEVEN_LOAD * max(map(abs, loads)) if by_threads else 0.0)
    return Drift(_deviation(a), _deviation(b), loads, spread, by_threads)


def threads_spread(steps: int) -> float:
    """Return the most by which the mean of so many steps, corrected by the waits of each thread, varies between runs,
    as a standard deviation of its logarithm."""
    return math.hypot(THREADS_SPREAD_MOST, STEP_SPREAD / math.sqrt(steps))


def cpus_of(side: Side) -> JobCpus | None:
    return side.analysis.trace.job_cpus if side.analysis is not None else None


def _slowdowns(a: Side, b: Side) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return of both sides the logarithms of factors by which other processes may have made its steps longer, found
    alike; empty where the CPUs were not full, or that is not known."""
    one, other = cpus_of(a), cpus_of(b)
    if one is None or other is None or not (_full(one) or _full(other)):
        return (), ()
    if any(cpus.used is None or cpus.others is None for cpus in (one, other)):
        return (), ()
    by_threads = _by_threads(one), _by_threads(other)
    if all(by_threads) and _covers(a) and _covers(b):
        return by_threads
    by_waits = one.stretch is not None and other.stretch is not None
    return (_most(one, by_waits=by_waits),), (_most(other, by_waits=by_waits),)


def _covers(side: Side) -> bool:
    """Return whether the steps are most of the recording, which the waits are of."""
    analysis, steps = side.analysis, side.steps
    return analysis is not None and steps is not None and (
        steps.count * steps.mean_s >= _COVERED * analysis.trace.window_s)


def _by_threads(cpus: JobCpus) -> tuple[float, ...]:
    """Return the two ends of what the load made of a step, by the waits of each thread; empty if they are not known.

    Without load, a step is the time in which all threads sleep, which load does not lengthen, and the CPU time of all.
    That took its time

    1. one thread after the other, or
    2. by as many at once as were ready at once while any was, if there are CPUs for them.

    A step that waits for the job's child processes is not to be reckoned so: their threads are not among these.
    """
    if cpus.asleep is None or cpus.waited is None or not cpus.used:
        return ()
    if cpus.children is None or cpus.children > _FEW * cpus.used:
        return ()
    at_once = min(cpus.limit, (cpus.used + cpus.waited) / max(1 - cpus.asleep, _MIN_CPUS))
    return tuple(max(0.0, -math.log(cpus.asleep + cpus.used / parallel)) for parallel in (1.0, max(1.0, at_once)))


def _most(cpus: JobCpus, *, by_waits: bool) -> float:
    """Return the logarithm of the factor by which other processes made a step longer at most; the least of three
    bounds:

    1. A step that needs CPUs all the time is longer by the CPUs that there are over those that were left to the job.
    2. A thread that never sleeps takes longer by the time that it waits for a CPU over the time that it has one
       (``JobCpus.stretch``). A job that sleeps leaves the CPUs to others, which the first bound mistakes for load.
    3. Whatever a step does, no more of it than ``waited`` is waiting, as long as less than one thread waits on average.
    """
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


# -- the live step time ------------------------------------------------------------------------------
#
# A capture shows seconds of a job. What the monitor saw in the minutes before tells how much its steps differ over
# time, and whether they are as many per minute as the capture says.


def live_steps_s(side: Side, other: Side | None = None) -> F64 | None:
    """The time of a step, per iteration, in each stretch of the minutes before the capture; None where the live signal
    does not show the trace's steps for sure, or only in few stretches.

    A period may be of several steps. Of how many, the trace tells; where its steps are too far from what was live, the
    ``other`` side's trace does.
    """
    live = _sure(side)
    if live is None:
        return None
    count = _steps_per_period(side) or (_steps_per_period(other) if other is not None else None)
    return None if count is None else np.array(live.period_s) / count / side.iterations


def live_spread(side: Side) -> float:
    """Standard deviation of the live step times as a share of their mean; 0 where they are not known."""
    steps_s = live_steps_s(side)
    return 0.0 if steps_s is None else float(steps_s.std(ddof=1) / steps_s.mean())


def _sure(side: Side) -> LiveSteps | None:
    live = side.live_steps
    if side.steps is None or live is None or len(live.period_s) < MIN_STEPS:
        return None
    return None if live.confidence < SURE or is_undersampled(side.steps.median_s, live.interval_s) else live


def _steps_per_period(side: Side) -> int | None:
    live = _sure(side)
    return None if live is None or side.steps is None else (
        steps_per_period(median(live.period_s), side.steps.median_s))

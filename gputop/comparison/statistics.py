"""Two series of steps against each other: an interval for what changed between two captures, not within them.

The steps of one capture say little of the next one: load, clocks and memory drift over seconds and differ from run to
run, however many steps are averaged. (Of reruns of unchanged jobs the interval of a mean whose steps were counted as
independent called most changed: ``benchmarks/compare_reruns.md``.) Therefore

1. Each capture is cut into :data:`BLOCKS` blocks over time. The spread of their means (or medians) is taken for that of
   captures themselves, not divided by the number of blocks: averaging does not remove noise whose slow parts are as
   strong as its fast ones, such as 1/f noise (D. W. Allan, Proc. IEEE 54, 1966). For steps that are independent this is
   cautious: the interval is as wide as that of one block. Several captures of one side are averaged, and their own
   spread counts where it is the larger.
2. Runs of one job differ by a floor (:class:`Drift`) even where both captures are even: what differs between processes
   is constant within each (T. Kalibera and R. Jones, "Rigorous benchmarking in reasonable time", ISMM 2013).
3. Both are put together as B. L. Welch did (Biometrika 34, 1947), the floor as known:
   variance = v_a / n_a + v_b / n_b + floor_a² + floor_b², of n captures each, and Student's t of
   variance² / Σ((v / n)² / freedom) degrees of freedom.
4. Times are compared by the logarithm of their ratio (:func:`ratio`), figures that may be 0 by their difference
   (:func:`difference`). What disturbs a job multiplies its time: a step of 500 ms that varies by half says nothing of
   one of 17 ms by its 250 ms, and by half of 17 ms it says all (P. J. Fleming and J. J. Wallace, "How not to lie with
   statistics", Commun. ACM 29, 1986, on ratios; J. Aitchison and J. A. C. Brown, "The Lognormal Distribution", 1957).
   The interval of a ratio is the same, whichever side is called A.
5. Where other processes fill the CPUs, a step is longer by a factor that lies between 1 and what they can have made of
   it (:func:`drift_of`). The interval holds the change as it was recorded, and the change if each side is
   divided by its factor, whose spread between runs is ``Drift.load_spread``: what the load did to the blocks has gone,
   but for the error of their mean, which falls with their number once each has several steps. Where the waits of each
   thread for a CPU were measured, all blocks are averaged: what they differ by is the scheduler's, anew in each step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import NormalDist, median
from typing import Any, NamedTuple

import numpy as np
from msgspec import Struct

from gputop.comparison.sides import Side
from gputop.core.captured_samples import SURE, JobCpus, LiveSteps, is_undersampled, steps_per_period
from gputop.trace.model import F64

# With four steps on each side no rank order is rarer than 1 in 35: the verdict would rest on the assumed distribution.
MIN_STEPS = 5
_STEPS_OF_A_BLOCK = 20  # with fewer on average the blocks are not taken for independent
BLOCKS = 5  # fewer leave too few degrees of freedom, more are shorter than what drifts
Statistic = Callable[..., Any]  # np.mean or np.median: of a series, or with an axis of each row


class Interval(NamedTuple):
    """A change and where it lies with the confidence asked for."""

    estimate: float
    low: float
    high: float

    @property
    def excludes_zero(self) -> bool:
        return self.low > 0 or self.high < 0

    def of(self, a: float) -> Interval:
        """This interval of ln(B / A) as one of B - A, in the unit of A's figure ``a``."""
        return Interval(*(a * math.expm1(min(log, _MAX_LOG)) for log in self))


class Drift(Struct, frozen=True):
    """Difference between runs of one job, whatever changed in it: the least that counts as a change.

    ``a`` and ``b`` are standard deviations of the logarithm of each side's mean between runs; about its share of the
    mean. ``loads`` are logarithms of factors by which a step of B may be longer than one of A only because other
    processes took more of the CPUs; negative: shorter. Each of them may have happened, and all between 0 and them.
    ``load_spread`` is the standard deviation of a change that is corrected by one of them, ``a`` and ``b`` apart.
    ``by_threads``: they come from the waits of each thread.
    """

    a: float = 0.0
    b: float = 0.0
    loads: tuple[float, ...] = ()
    load_spread: float = 0.0
    by_threads: bool = False

    @property
    def load(self) -> float:
        """The largest of the ``loads``, either way; 0 if there is none."""
        return max(self.loads, key=abs, default=0.0)

    @property
    def floor(self) -> float:
        """The variance of a change between two runs."""
        return self.a**2 + self.b**2

    def interval(self, change: float, below: float, above: float, corrected: tuple[float, float]) -> Interval:
        """The interval of a change that reaches ``below`` and ``above`` it as it was recorded, and by ``corrected`` if
        the load made all of what it can have made."""
        return Interval(change, min((change - below, *(change - load - corrected[0] for load in self.loads))),
                        max((change + above, *(change - load + corrected[1] for load in self.loads))))


_MAX_LOG = 700.0  # exp of it is still finite
_NO_DRIFT = Drift()


def block_values(series: F64, statistic: Statistic = np.mean) -> F64:
    """The statistic of each of BLOCKS stretches of the series, or of each step where there are fewer."""
    count = min(BLOCKS, len(series))
    size, longer = divmod(len(series), count)  # the first blocks have a step more
    end = longer * (size + 1)
    blocks = series[:end].reshape(longer, size + 1), series[end:].reshape(count - longer, size)
    return np.concatenate([statistic(block, axis=1) for block in blocks if len(block)])


def ratio(a: Sequence[F64], b: Sequence[F64], confidence: float, drift: Drift = _NO_DRIFT, *,
          statistic: Statistic = np.mean) -> Interval | None:
    """ln(statistic(b) / statistic(a)), of the means over the captures of each side.

    The interval holds every change that the load may hide. None where a series is too short to tell, or a block is not
    above 0.
    """
    if min(map(len, (*a, *b)), default=0) < MIN_STEPS:
        return None
    sides = [_Captures.of(side, statistic) for side in (a, b)]
    if min(float(np.min(blocks)) for side in sides for blocks in side.blocks) <= 0:
        return None
    variances = [side.logarithms().variance for side in sides]
    averaged = [BLOCKS if drift.by_threads else min(BLOCKS, max(1.0, min(map(len, side)) / _STEPS_OF_A_BLOCK))
                for side in (a, b)]
    reach = _reach(variances, drift.floor, confidence, averaged if drift.by_threads else (1.0, 1.0))
    corrected = _reach(variances, drift.floor + drift.load_spread**2, confidence, averaged)
    return drift.interval(math.log(sides[1].mean / sides[0].mean), reach, reach, (corrected, corrected))


def difference(a: Sequence[F64], b: Sequence[F64], confidence: float, drift: Drift = _NO_DRIFT) -> Interval | None:
    """mean(b) - mean(a), in the unit of the series, as means over the captures of each side.

    Half of what the load may hide is taken as a spread of either side. None where a series is too short to tell.
    """
    if min(map(len, (*a, *b)), default=0) < MIN_STEPS:
        return None
    sides = [_Captures.of(side, np.mean) for side in (a, b)]
    estimate = sides[1].mean - sides[0].mean
    floor = sum((share**2 + (drift.load / 2) ** 2 + drift.load_spread**2 / 2) * side.mean ** 2
                for share, side in zip((drift.a, drift.b), sides, strict=True))
    reach = _reach([side.variance for side in sides], floor, confidence)
    return Interval(estimate, estimate - reach, estimate + reach)


class _Captures(Struct, frozen=True):
    """The captures of one side: the statistic of each, and of the blocks of each."""

    values: F64
    blocks: tuple[F64, ...]

    @classmethod
    def of(cls, side: Sequence[F64], statistic: Statistic) -> _Captures:
        return cls(np.array([statistic(series) for series in side]),
                   tuple(block_values(series, statistic) for series in side))

    def logarithms(self) -> _Captures:
        return _Captures(np.log(self.values), tuple(map(np.log, self.blocks)))

    @property
    def mean(self) -> float:
        return float(np.mean(self.values))

    @property
    def variance(self) -> tuple[float, float]:
        """The variance of the side's mean, and its degrees of freedom."""
        variance = float(np.mean([values.var(ddof=1) for values in self.blocks]))
        freedom = float(sum(len(values) - 1 for values in self.blocks))
        count = len(self.values)
        if count > 1 and (between := float(self.values.var(ddof=1))) > variance:
            variance, freedom = between, count - 1
        return variance / count, freedom


def _reach(
    variances: Sequence[tuple[float, float]], floor: float, confidence: float,
    averaged: Sequence[float] = (1.0, 1.0),
) -> float:
    """Return how far the interval reaches to either side of the estimate; ``variances`` are those of the sides, each
    with its degrees of freedom, and ``floor`` is one that is known. ``averaged``: how many independent blocks the mean
    of a side is of."""
    parts = [(variance / count, freedom) for (variance, freedom), count in zip(variances, averaged, strict=True)]
    variance = sum(variance for variance, _ in parts) + floor
    freedom = variance**2 / total if (total := sum(v**2 / n for v, n in parts)) > 0 else math.inf
    return student_quantile(0.5 + confidence / 2, freedom) * math.sqrt(variance)


# There Student's t is the normal distribution. A variance next to zero gives more, which has no fourth power.
_MAX_FREEDOM = 1e9


def student_quantile(p: float, freedom: float) -> float:
    """Quantile of Student's t for p > 0.5 by its expansion in 1 / freedom.

    M. Abramowitz and I. A. Stegun, Handbook of Mathematical Functions, 26.7.5. At 99% two-sided it is right
    to 0.3% from 4 degrees of freedom, too small by 4% at 2.
    """
    z, freedom = NormalDist().inv_cdf(p), min(freedom, _MAX_FREEDOM)
    terms = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return sum(term / freedom**k for k, term in enumerate(terms))


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
    live_s = live_steps_s(side)
    return max(usual, 0.0 if live_s is None else float(live_s.std(ddof=1) / live_s.mean())) / _runs(side)


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


def _sure(side: Side) -> LiveSteps | None:
    live = side.live_steps
    if side.steps is None or live is None or len(live.period_s) < MIN_STEPS:
        return None
    return None if live.confidence < SURE or is_undersampled(side.steps.median_s, live.interval_s) else live


def _steps_per_period(side: Side) -> int | None:
    live = _sure(side)
    return None if live is None or side.steps is None else (
        steps_per_period(median(live.period_s), side.steps.median_s))

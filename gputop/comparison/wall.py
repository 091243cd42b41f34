"""Wall time per training step: a step and all that lies between it and the next one, ends of epochs and evaluations.

Most of what lies between steps comes in few long pauses, and how many of them a recording holds is chance: one more of
3 s in 10 s is no change of the job. So the two kinds of time have intervals of their own:

* steps with the short pauses behind them are a series, as the steps alone are (:mod:`gputop.comparison.statistics`);
* long pauses are a renewal process (D. R. Cox, "Renewal Theory", 1962): their time per step is their mean length by
  the mean number of steps from one to the next, and as sure as both are even, which is little of three and much of
  twenty, and most where they come every N steps. One or two of them do not tell their distances: there may be one more
  or one less in a recording, wherever it began, and beyond that as many as come at random, of any length (of the
  other side's distances and lengths, where it tells them). So one or two pauses decide nothing by themselves, and a
  side without any has up to as many as would be unseen by chance.

A pause that is open at an edge of the recording is not counted, for its length is not known, but there may be one of
its length. Runs of one job differ by a floor as in :mod:`gputop.comparison.statistics`, here of the whole wall time.
The intervals are put together as G. Y. Zou and A. Donner did (Stat. Med. 27, 2008), on the logarithms as of any ratio:
by the squares of what lies between each estimate and its bound.
"""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np
from msgspec import Struct

from gputop.analysis.results import StepSeries
from gputop.comparison.sides import Side
from gputop.comparison.statistics import BLOCKS, Drift, Interval, ratio, student_quantile
from gputop.trace.model import F64

# A pause as long as this part of a usual step is a long one. gputop's own figure.
_LONG = 0.5
# With fewer, neither the spread of their lengths nor that of their distances is known.
ENOUGH_PAUSES = 3
# A stretch at an edge of the recording that takes this part of it is a pause that may have to be counted; the same
# share of a recording that has to be named.
_OPEN_SHARE = 0.05
_MOST = 1 - 1e-9  # of a wall time may be pauses that another recording need not hold
_OPEN, _PROFILER = "open", "profiler"


class Walls(Struct, frozen=True):
    """The wall time of one side's captures, per iteration. ``usual_s`` holds for each capture its steps with the short
    pause behind each, ``steps`` is the number of iterations in all, ``per_anchor`` in a step of the trace. ``apart``
    are the trace's steps from one long pause to the next, ``open_s`` is the longest time that is open at an edge."""

    usual_s: tuple[F64, ...]
    steps: float
    per_anchor: float
    pauses_s: F64
    apart: F64
    open_s: float

    @classmethod
    def of(cls, side: Side) -> Walls | None:
        """None where the wall time of a capture is not known."""
        usual, pauses, apart, steps, open_s = [], [], [], 0.0, 0.0
        for capture in (side, *side.repeats):
            times, wall = capture.steps, capture.analysis.wall_time if capture.analysis is not None else None
            if times is None or wall is None or wall.per_step_s is None:
                return None
            recordings = [StepSeries(times.durations_s, wall.pauses_s), wall.overview]
            of_capture = []
            for series in recordings:
                if series is None or not series.pauses_s:
                    continue
                if not (len(series.pauses_s) + 1 == len(series.durations_s) and min(series.durations_s) > 0
                        and min(series.pauses_s) >= 0):
                    return None
                behind = np.array([*series.pauses_s, 0.0])
                long_gaps = np.flatnonzero(behind >= _LONG * times.median_s)
                pauses.append(behind[long_gaps])
                apart.append(np.diff(long_gaps))
                behind[long_gaps] = 0.0
                of_capture.append((np.array(series.durations_s) + behind) / capture.iterations)
                steps += len(behind) * capture.iterations
            if not of_capture:
                return None
            # One series: steps of the detail are longer than those of the overview by what recording them takes.
            usual.append(np.concatenate(of_capture))
            open_s = max([open_s, *(part.time_s for part in wall.parts if part.id == _OPEN and part.kind != _PROFILER
                                    and part.time_s >= _OPEN_SHARE * wall.recorded_s)])
        return cls(tuple(usual), steps, side.iterations, np.concatenate(pauses), np.concatenate(apart), open_s)

    @property
    def per_step_s(self) -> float:
        return float(np.mean([series.mean() for series in self.usual_s])) + float(self.pauses_s.sum()) / self.steps

    @property
    def share_of_steps(self) -> float:
        """The share that steps with their short pauses have of the wall time."""
        return 1 - float(self.pauses_s.sum()) / self.steps / self.per_step_s

    def factors(self, other: Walls, confidence: float) -> tuple[float, float]:
        """:meth:`reach_s` as logarithms of factors of the wall time."""
        below_s, above_s = self.reach_s(other, confidence)
        return -math.log1p(-min(below_s / self.per_step_s, _MOST)), math.log1p(above_s / self.per_step_s)

    @property
    def longest_s(self) -> float:
        return float(self.pauses_s.max(initial=0.0))

    def reach_s(self, other: Walls, confidence: float) -> tuple[float, float]:
        """Return how far below and above what was recorded the time of long pauses per step may lie."""
        per_step_s = float(self.pauses_s.sum()) / self.steps
        if self.distances is not None:
            own_s = float(self.pauses_s.mean() / self.apart.mean()) / self.per_anchor
            times = student_quantile(0.5 + confidence / 2, len(self.apart))
            reach = own_s * times * math.hypot(self.distances, self.lengths) / math.sqrt(len(self.apart))
            more_s = max(0.0, self.open_s - self.longest_s) / self.steps
            return max(0.0, per_step_s - max(0.0, own_s - reach)), max(0.0, own_s + reach - per_step_s) + more_s
        other_distances = other.distances
        distances, lengths = (1.0, 1.0) if other_distances is None else (other_distances, other.lengths)
        longest = max(self.longest_s, self.open_s) or max(other.longest_s, other.open_s)
        count = max(len(self.pauses_s), 1)
        mean = float(self.pauses_s.mean()) if len(self.pauses_s) else longest
        times = NormalDist().inv_cdf(0.5 + confidence / 2)
        varies = math.sqrt(count) * mean * math.hypot(distances, lengths)
        reach = (longest * math.sqrt(len(self.usual_s)) + times * varies) / self.steps
        return min(per_step_s, reach), reach

    @property
    def distances(self) -> float | None:
        """Standard deviation of the steps between one long pause and the next as a share of their mean; None where
        there are too few."""
        enough = len(self.apart) >= ENOUGH_PAUSES - 1
        return float(self.apart.std(ddof=1) / self.apart.mean()) if enough else None

    @property
    def lengths(self) -> float:
        """The same of the lengths of the long pauses; of three or more."""
        return float(self.pauses_s.std(ddof=1) / self.pauses_s.mean())


def wall_difference(a: Walls, b: Walls, work: float, confidence: float, drift: Drift) -> tuple[Interval, bool] | None:
    """The change of the wall time per step, for the same work, and whether long pauses are most of its uncertainty;
    None where there are too few steps.

    Reckoned by logarithms, as :func:`gputop.comparison.statistics.ratio` does: each side's bound of its pauses is a
    factor of its wall time, and the bound of the steps counts by the share that steps have of it.
    """
    usual = ratio(a.usual_s, [series / work for series in b.usual_s], confidence)
    if usual is None:
        return None
    steps = max(walls.share_of_steps for walls in (a, b)) * (usual.estimate - usual.low)
    times = NormalDist().inv_cdf(0.5 + confidence / 2)
    floor = times * math.sqrt(drift.floor)
    (below_a, above_a), (below_b, above_b) = a.factors(b, confidence), b.factors(a, confidence)
    averaged = steps / math.sqrt(BLOCKS)
    spread = math.hypot(averaged if drift.by_threads else steps, floor)
    below, above = math.hypot(spread, above_a, below_b), math.hypot(spread, below_a, above_b)
    spread = math.hypot(averaged, floor, times * drift.load_spread)
    corrected = math.hypot(spread, above_a, below_b), math.hypot(spread, below_a, above_b)
    change = math.log(b.per_step_s / work / a.per_step_s)
    of_pauses = math.hypot(below_a + above_a, below_b + above_b) > 2 * math.hypot(steps, floor)
    return drift.interval(change, below, above, corrected).of(a.per_step_s), of_pauses

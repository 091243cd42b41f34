"""Two series of steps against each other: an interval for what changed between two captures, not within them.

The steps of one capture say little of the next one: load, clocks and memory drift over seconds and differ from run to
run, however many steps are averaged. (Of reruns of unchanged jobs the interval of a mean whose steps were counted as
independent called most changed: ``benchmarks/compare_reruns.md``.) Therefore

* each capture is cut into :data:`BLOCKS` blocks over time, and the spread of their means (or medians) is taken for
  that of captures themselves, not divided by the number of blocks: averaging does not remove noise whose slow parts
  are as strong as its fast ones, such as 1/f noise (D. W. Allan, Proc. IEEE 54, 1966). For steps that are independent
  this is cautious: the interval is as wide as that of one block;
* runs of one job differ by a floor (``drift``, a share) even where both captures are even: what differs between
  processes is constant within each (T. Kalibera and R. Jones, "Rigorous benchmarking in reasonable time", ISMM 2013);
* both are put together as B. L. Welch did (Biometrika 34, 1947), the floor as known.

Several captures of one side are averaged, and their own spread counts where it is the larger.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

from gputop.trace.model import F64

# With four steps on each side no rank order is rarer than 1 in 35: the verdict would rest on the assumed distribution.
MIN_STEPS = 5
BLOCKS = 5  # fewer leave too few degrees of freedom, more are shorter than what drifts


class Interval(NamedTuple):
    """A change and where it lies with the confidence asked for."""

    estimate: float
    low: float
    high: float

    @property
    def excludes_zero(self) -> bool:
        return self.low > 0 or self.high < 0


def block_values(series: F64, statistic: Callable[[F64], float] = np.mean) -> F64:
    """The statistic of each of BLOCKS stretches of the series, or of each step where there are fewer."""
    return np.array([statistic(part) for part in np.array_split(series, min(BLOCKS, len(series)))])


def difference(a: Sequence[F64], b: Sequence[F64], confidence: float, drift: tuple[float, float] = (0.0, 0.0), *,
               statistic: Callable[[F64], float] = np.mean) -> Interval | None:
    """statistic(b) - statistic(a), in the unit of the series, as means over the captures of each side.

    ``drift`` is, of each side, the standard deviation between runs as a share of their mean. None where a series is
    too short to tell.
    """
    if min(map(len, (*a, *b)), default=0) < MIN_STEPS:
        return None
    means = [float(np.mean([statistic(series) for series in side])) for side in (a, b)]
    estimate = means[1] - means[0]
    parts: list[tuple[float, float]] = []  # variance of a side's mean, and its degrees of freedom
    for side in (a, b):
        blocks = [block_values(series, statistic) for series in side]
        variance = float(np.mean([values.var(ddof=1) for values in blocks]))
        freedom = float(sum(len(values) - 1 for values in blocks))
        if len(side) > 1:
            between = float(np.var([statistic(series) for series in side], ddof=1))
            if between > variance:
                variance, freedom = between, len(side) - 1
        parts.append((variance / len(side), freedom))
    floor = sum((share * mean) ** 2 for share, mean in zip(drift, means, strict=True))
    sampled = sum(variance for variance, _ in parts)
    variance = sampled + floor
    if variance <= 0:
        return Interval(estimate, estimate, estimate)
    freedom = variance**2 / total if (total := sum(v**2 / n for v, n in parts)) > 0 else math.inf
    reach = student_quantile(0.5 + confidence / 2, freedom) * math.sqrt(variance)
    return Interval(estimate, estimate - reach, estimate + reach)


def student_quantile(p: float, freedom: float) -> float:
    """Quantile of Student's t for p > 0.5 by its expansion in 1 / freedom.

    M. Abramowitz and I. A. Stegun, Handbook of Mathematical Functions, 26.7.5. At 99 % two-sided it is right
    to 0.3 % from 4 degrees of freedom, too small by 4 % at 2.
    """
    z = NormalDist().inv_cdf(p)
    terms = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return sum(term / freedom**k for k, term in enumerate(terms))

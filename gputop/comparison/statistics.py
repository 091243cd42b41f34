"""Two series of steps against each other: an interval for what changed, neighboring steps being alike.

Both intervals are two-sided, deterministic, and None where the series are too short to tell.

* :func:`median_ratio`: the distribution-free interval for a ratio of medians of R. M. Price and
  D. G. Bonett, "Distribution-free confidence intervals for difference and ratio of medians",
  J. Stat. Comput. Simul. 72 (2002): the variance of a log median from two of its order statistics.
* :func:`mean_difference`: B. L. Welch's t interval for means of unequal variance (Biometrika 34, 1947).

Steps are not independent: a slow one is often followed by another. Each series therefore counts
for n (1 - r) / (1 + r) steps, the effective size of a first-order autoregression (G. V. Bayley and
J. M. Hammersley, J. R. Stat. Soc. Suppl. 8, 1946), with r the correlation of neighbors, corrected
for its bias in short series (M. G. Kendall, Biometrika 41, 1954) and never taken as negative.
"""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

from gputop.trace.model import F64

# With four steps on each side no rank order is rarer than 1 in 35: the verdict would rest on the assumed distribution.
MIN_STEPS = 5
_MIN_EFFECTIVE = 2.0  # below, a variance rests on less than one degree of freedom
_MAX_CORRELATION = 0.95
_SAME = 1e-9  # relative spread of what is one and the same figure but for rounding


class Interval(NamedTuple):
    """A change and where it lies with the confidence asked for."""

    estimate: float
    low: float
    high: float


def effective_size(series: F64) -> float:
    """How many independent steps a series (shape (n,), n >= 2) is worth; from about n / 39 to n."""
    n = len(series)
    if _exact(series):
        return float(n)
    deviation = series - series.mean()
    square = float(deviation @ deviation)
    r = float(deviation[1:] @ deviation[:-1]) / square
    r = min(max(r + (1 + 4 * r) / n, 0.0), _MAX_CORRELATION)
    return n * (1 - r) / (1 + r)


def _exact(series: F64) -> bool:
    return float(np.ptp(series)) <= _SAME * abs(float(series.mean()))


def mean_difference(a: F64, b: F64, confidence: float) -> Interval | None:
    """mean(b) - mean(a), in the unit of the series."""
    if min(len(a), len(b)) < MIN_STEPS:
        return None
    estimate = float(b.mean() - a.mean())
    sizes, variances = [], []
    for series in (a, b):
        size = effective_size(series)
        if size < _MIN_EFFECTIVE:
            return None
        sizes.append(size)
        variances.append(0.0 if _exact(series) else float(series.var(ddof=1)) / size)
    variance = sum(variances)
    if variance <= 0:
        return Interval(estimate, estimate, estimate)
    freedom = variance**2 / sum(v**2 / (size - 1) for v, size in zip(variances, sizes, strict=True))
    reach = student_quantile(0.5 + confidence / 2, freedom) * math.sqrt(variance)
    return Interval(estimate, estimate - reach, estimate + reach)


def median_ratio(a: F64, b: F64, confidence: float) -> Interval | None:
    """median(b) / median(a) of positive series."""
    if min(len(a), len(b)) < MIN_STEPS or min(a.min(), b.min()) <= 0:
        return None
    variance = 0.0
    for series in (a, b):
        size = effective_size((series > np.median(series)).astype(float))
        if size < _MIN_EFFECTIVE:
            return None
        variance += _log_median_variance(series) * len(series) / size
    estimate = math.log(float(np.median(b)) / float(np.median(a)))
    reach = NormalDist().inv_cdf(0.5 + confidence / 2) * math.sqrt(variance)
    return Interval(math.exp(estimate), math.exp(estimate - reach), math.exp(estimate + reach))


def share_longer(a: F64, b: F64) -> float:
    """Share of all pairs of a step of A and one of B in which B's is longer, ties half: Mann and Whitney's U / (n m).

    H. B. Mann and D. R. Whitney, Ann. Math. Stat. 18, 1947.
    """
    ordered = np.sort(a)
    below = np.searchsorted(ordered, b, side="left") + np.searchsorted(ordered, b, side="right")
    return float(below.sum()) / (2 * len(a) * len(b))


def _log_median_variance(series: F64) -> float:
    """Price and Bonett: the distance of the c-th smallest and largest, against the chance that they miss the median."""
    n = len(series)
    c = max(1, round((n + 1) / 2 - math.sqrt(n)))
    ordered = np.sort(series)
    # Sum of C(n, i) / 2^(n - 1) for i < c, by logarithms: n may be thousands.
    logs = [math.lgamma(n + 1) - math.lgamma(i + 1) - math.lgamma(n - i + 1) - (n - 1) * math.log(2) for i in range(c)]
    missed = sum(math.exp(log) for log in logs)
    return (math.log(ordered[n - c] / ordered[c - 1]) / (2 * NormalDist().inv_cdf(1 - missed / 2))) ** 2


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

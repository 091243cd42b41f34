"""Steps that take far longer than the others, now and then or every so many."""

from __future__ import annotations

import numpy as np
from msgspec import Struct

from gputop.trace.model import F64, I64

# Fewer steps do not tell a rhythm from an accident. A step is long where it has 0.3 usual steps more than the median,
# and that is also beyond the spread of the others: six times their standard deviation, estimated by the median
# absolute deviation (times 1.4826). More than a third of the steps are not rare. gputop's own figures.
MIN_STEPS = 8
_MORE, _DEVIATIONS, _MAD = 0.3, 6.0, 1.4826
_MAX_SHARE_OF_STEPS = 1 / 3
_MIN_PERIODIC = 3
_ONE_SHARE = 0.05  # share of all steps' time: one long step is worth a word where it has that much more than the others
# Less than this share of what the longest step takes more is an accident beside it: eight pauses of 350 ms every 25
# steps are no less so for three steps that took 2 ms longer. gputop's own figure.
_OF_LONGEST = 0.05
# Most of the first steps of a recording are no rare ones: the profiler begins (7 of 32 steps took 30 ms for 22: H200,
# PyTorch 2.11).
_AT_THE_HEAD = 1.5
_TRIED = 16  # distances between long steps, the most common ones
_PERIODIC = 0.75  # share of the long steps; the others are accidents beside them


class LongSteps(Struct, frozen=True):
    """``indices`` are theirs among the steps, from 0; ``every`` is their distance where it is always the same, and then
    others that are long, too, are left out: accidents."""

    indices: I64
    more_s: F64  # by how much each is longer
    usual_s: float  # median of the other steps
    every: int | None


def long_steps(durations_s: F64, judged_s: F64 | None = None) -> LongSteps | None:
    """None where no steps are far longer than most, or too few steps are known. ``judged_s``: the part of each step
    that is compared; all of it unless given."""
    if len(durations_s) < MIN_STEPS:
        return None
    judged = durations_s if judged_s is None else judged_s
    usual = float(np.median(judged))
    long = np.flatnonzero(judged > max(usual + _MORE * float(np.median(durations_s)), usual_limit(judged)))
    if not 1 <= len(long) <= _MAX_SHARE_OF_STEPS * len(durations_s):
        return None
    all_long = long
    long = long[judged[long] - usual >= _OF_LONGEST * (judged[long].max() - usual)]
    if len(long) == 1 and judged[long[0]] - usual < _ONE_SHARE * float(durations_s.sum()):
        return None
    usual_s, usual = float(np.median(np.delete(durations_s, all_long))), float(np.median(np.delete(judged, all_long)))
    if len(long) >= _MIN_PERIODIC and long[-1] < _AT_THE_HEAD * len(long):
        return None
    every, periodic = period_of(long, len(durations_s))
    long = long if every is None else long[periodic]  # without steps that are long for other reasons
    return LongSteps(long, judged[long] - usual, usual_s, every)


def usual_limit(times: F64) -> float:
    """The longest of these times, of one for each step, that their usual spread explains."""
    usual = float(np.median(times))
    return usual + _DEVIATIONS * _MAD * float(np.median(np.abs(times - usual)))


def period_of(places: I64, count: int) -> tuple[int | None, I64]:
    """Number of steps by which most of these (rising) positions lie apart, none missing among all ``count`` steps, and
    those positions; None where that holds of fewer than three, or of too few of them. Each distance between a place and
    one of the two after it is tried: an accident between two makes one of them two shorter ones."""
    apart, times = np.unique(np.concatenate((np.diff(places), places[2:] - places[:-2])), return_counts=True)
    apart, times = apart[apart > 0], times[apart > 0]
    best, which = None, places[:0]
    for every in apart[np.argsort(-times, kind="stable")][:_TRIED].tolist():
        remainder, counts = np.unique(places % every, return_counts=True)
        alike = np.flatnonzero(places % every == remainder[np.argmax(counts)])
        if len(alike) > len(which) and (np.diff(places[alike]) == every).all() and (
                max(places[alike[0]], count - places[alike[-1]]) <= every):
            best, which = every, alike
    if len(which) < max(_MIN_PERIODIC, _PERIODIC * len(places)):
        return None, places[:0]
    return best, which

"""Period, in calls or ops, after which the sequence of their names repeats."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

FEWEST = 3  # periods, or calls
# Of the calls have the name of that a period before: a step that logs has some more. Below the larger share a longer
# period may be the step's: a layer repeats within a step, and so does a step within those from one log to the next.
# gputop's own figures.
_ALIKE, _SURELY = 0.9, 0.995
_TRIED = 32  # names that may tell the period, those of fewest calls first


def sequence_period(name: npt.NDArray) -> int | None:
    """The period; None where the sequence does not repeat, or may do so in two ways."""
    kinds, counts = np.unique(name, return_counts=True)
    alike, distances = dict[int, float](), set[int]()
    for kind in kinds[np.argsort(counts, kind="stable")][:_TRIED].tolist():
        calls = np.flatnonzero(name == kind)
        if len(calls) < FEWEST:
            continue
        apart = np.diff(calls)
        period = int(np.median(apart))
        distances.add(period)
        if float((apart == period).mean()) >= _ALIKE:
            alike[period] = float((name[period:] == name[:-period]).mean())
    periods = [period for period, share in sorted(alike.items()) if share >= _ALIKE]
    if not periods or (alike[periods[0]] < _SURELY and max(distances) > periods[0]):
        return None
    return periods[0]

"""Calls of optimizers that one training step makes."""

from __future__ import annotations

import numpy.typing as npt

from gputop.trace.model import I64

# Both lines are gputop's own figures.
_MAX_OPTIMIZERS = 8  # that one step of training calls
# An evaluation between two calls makes two comparisons of a call with a later one fail: a period is one that few more
# fail than of the best, and that most hold.
_ABOUT_AS_GOOD, _MOST = 0.1, 0.6


def period_of_calls(name: npt.NDArray, work: I64) -> int:
    """Number of calls after which the optimizers' names and the work before each come again; 1 where nothing tells.

    The shortest for which about as many of them do as for the best.
    """
    for with_work in (True, False):
        shares = {}
        for period in range(1, min(_MAX_OPTIMIZERS, len(work) // 2) + 1):
            alike = name[1:][period:] == name[1:][:-period]
            if with_work:
                alike &= work[period:] == work[:-period]
            shares[period] = float(alike.mean())
        best = max(shares.values(), default=0.0)
        if best >= _MOST:
            return next(period for period, share in shares.items() if share >= best - _ABOUT_AS_GOOD)
    return 1

"""Estimated savings of fixes: arithmetic on figures of the step, each function one assumption.

All results are shares of ``step_s``, between 0 and 1; a length of 0 saves nothing. They are bounds by
the one thing that is changed: nothing else of the step is assumed to get better or worse.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from statistics import mean


def removed(seconds: float, step_s: float) -> float:
    """Time that is simply no longer there: a wait, an idle stretch, a copy."""
    return min(max(seconds, 0.0) / step_s, 1.0) if step_s > 0 else 0.0


def faster(seconds: float, factor: float, step_s: float) -> float:
    """The same work at ``factor`` times the rate."""
    return removed(seconds * (1 - 1 / factor), step_s) if factor > 1 else 0.0


def overlapped(exposed_s: float, free_compute_s: float, step_s: float) -> float:
    """Communication moved beside compute: no more than there is compute without communication beside it already."""
    return removed(min(exposed_s, max(free_compute_s, 0.0)), step_s)


def merged(count: float, needed: float, latency_s: float, exposed: float, step_s: float) -> float:
    """``needed`` collectives instead of ``count``: what is saved is the fixed time of each one less, as far as
    it is ``exposed`` (share)."""
    return removed(max(count - needed, 0.0) * latency_s * exposed, step_s)


def at_rate(seconds: float, wanted_s: float, exposed: float, step_s: float) -> float:
    """A transfer that takes ``wanted_s`` instead of ``seconds``, as far as it is ``exposed`` (share)."""
    return removed(max(seconds - wanted_s, 0.0) * exposed, step_s)


def equalized(work_s: Mapping[int, float], step_s: float) -> float:
    """The same work spread evenly over the GPUs, where the step follows its slowest GPU."""
    return removed(max(work_s.values(), default=0.0) - mean(work_s.values()), step_s) if work_s else 0.0


def side_by_side(any_active_s: float, work_s: Iterable[float], step_s: float) -> float:
    """GPUs that worked by turns work at the same time: the longest one's share is left of the time in which any did."""
    return removed(any_active_s - max(work_s, default=0.0), step_s)


def started_together(delay_s: float, idle_s: float, step_s: float) -> float:
    """The last GPU begins when the first one does, as far as it stood still until then."""
    return removed(min(delay_s, max(idle_s, 0.0)), step_s)

"""Estimated savings of fixes, as shares of ``step_s`` between 0 and 1; a length of 0 saves nothing.

They are bounds by the one thing that is changed: nothing else of the step is assumed to get better or worse.
"""

from __future__ import annotations


def removed(seconds: float, step_s: float) -> float:
    """Time that is simply no longer there: a wait, an idle stretch, a copy."""
    return min(max(seconds, 0.0) / step_s, 1.0) if step_s > 0 else 0.0


def faster(seconds: float, factor: float, step_s: float) -> float:
    """The same work at ``factor`` times the rate."""
    return removed(seconds * (1 - 1 / factor), step_s) if factor > 1 else 0.0

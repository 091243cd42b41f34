"""The step time in the minutes before each capture, by the live signal: whether a change is more than drift.

A capture shows seconds of a job. What the monitor saw in the minutes before tells how much its steps differ over time,
and whether they are as many per minute as the capture says.
"""

from __future__ import annotations

from statistics import median

import numpy as np

from gputop.comparison.sides import Side
from gputop.comparison.statistics import MIN_STEPS
from gputop.core.live_steps import LiveSteps
from gputop.telemetry.step_period import SURE, StepPeriodEstimate, is_undersampled, steps_per_period
from gputop.trace.model import F64


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
    analysis = side.analysis
    live = analysis.trace.live_steps if analysis is not None else None
    if analysis is None or analysis.steps is None or live is None or len(live.period_s) < MIN_STEPS:
        return None
    return None if live.confidence < SURE or is_undersampled(analysis.steps.median_s, live.interval_s) else live


def _steps_per_period(side: Side) -> int | None:
    live = _sure(side)
    if live is None or side.analysis is None or side.analysis.steps is None:
        return None
    return steps_per_period(StepPeriodEstimate(median(live.period_s)), side.analysis.steps.median_s)

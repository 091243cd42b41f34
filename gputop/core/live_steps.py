"""The step period by the live signal alone, as of the minutes before a capture."""

from __future__ import annotations

from msgspec import Struct

SURE = 0.6  # confidence of a period; below it, it is as often an alias of shorter steps
_MAX_S = 1e9
_MAX_STEPS_PER_PERIOD, _WHOLE = 16, 0.1  # a period that is 1% off still shows which whole number of steps it has


class LiveSteps(Struct, frozen=True):
    """``period_s`` is the step period in each stretch of ``stretch_s`` seconds in which one stood out, oldest first;
    ``confidence`` the least of them (0-1). The samples were ``interval_s`` apart: shorter steps are not seen.

    ``idle_period_s`` is after how long an idle time of the GPUs returned, each of ``idle_s``; None: at no regular
    interval, in the ``seen_s`` seconds for which the job was watched."""

    period_s: tuple[float, ...]
    confidence: float
    stretch_s: float
    interval_s: float
    idle_s: float = 0.0
    idle_period_s: float | None = None
    seen_s: float = 0.0

    def __post_init__(self) -> None:
        if not all(0 < value < _MAX_S for value in (self.stretch_s, self.interval_s, *self.period_s)):
            raise ValueError("an impossible time")


def steps_per_period(period_s: float, step_s: float) -> int | None:
    """Number of steps of ``step_s`` (from a trace) in one period; None where that is no whole number."""
    count = period_s / step_s
    whole = round(count)
    return whole if 1 <= whole <= _MAX_STEPS_PER_PERIOD and abs(count - whole) <= _WHOLE else None


def is_undersampled(step_s: float, interval_s: float) -> bool:
    """Return whether samples ``interval_s`` apart show steps of ``step_s`` only as an alias."""
    return step_s < 2 * interval_s

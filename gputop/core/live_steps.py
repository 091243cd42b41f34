"""The step period in the minutes before a capture, by the live signal alone."""

from __future__ import annotations

from msgspec import Struct

_MAX_S = 1e9


class LiveSteps(Struct, frozen=True):
    """``period_s`` is the step period in each stretch of ``stretch_s`` seconds in which one stood out, oldest first;
    ``confidence`` the least of them (0-1). The samples were ``interval_s`` apart: shorter steps are not seen."""

    period_s: tuple[float, ...]
    confidence: float
    stretch_s: float
    interval_s: float

    def __post_init__(self) -> None:
        if not all(0 < value < _MAX_S for value in (self.stretch_s, self.interval_s, *self.period_s)):
            raise ValueError("an impossible time")

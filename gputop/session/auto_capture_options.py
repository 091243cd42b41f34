"""Options of captures that gputop makes by itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import Struct

if TYPE_CHECKING:
    from gputop.rules.expression import Condition


class DipRule(Struct, frozen=True):
    """Rule for when a GPU dips: the first of ``metrics`` that has readings is below ``factor`` of its median, or
    ``level``; or when ``condition`` holds for it."""

    text: str
    metrics: tuple[str, ...]
    hold_s: float
    factor: float | None = None
    level: float | None = None
    condition: Condition | None = None


class AutoCaptureOptions(Struct, frozen=True):
    """Values of ``--on-dip``, ``--dip-every``, ``--dip-max`` and ``--dip-before``.

    ``before_s`` is 0 where the job is not to be recorded continuously.
    """

    rule: DipRule
    min_interval_s: float = 600.0
    max_captures: int = 20
    before_s: float = 0.0

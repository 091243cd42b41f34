"""Options of a session from the command line. Nothing here takes long to import."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct, field

if TYPE_CHECKING:
    from gputop.rules.expression import Condition

DEFAULT_CAPTURE_S = 10.0
DEFAULT_LOGDIR = "gputop-traces"
DEFAULT_RULE = "sm<0.6*median for 5s"  # read by gputop.session.auto_capture


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
    """Values of ``--on-dip``, ``--dip-every`` and ``--dip-max``."""

    rule: DipRule
    min_interval_s: float = 600.0
    max_captures: int = 20


class Options(Struct, frozen=True):
    interval_s: float = 1.0
    attach: tuple[str, ...] = ()
    logdir: Path = field(default_factory=lambda: Path(DEFAULT_LOGDIR))
    capture_s: float = DEFAULT_CAPTURE_S
    discover: bool = True
    auto_capture: AutoCaptureOptions | None = None  # None: a dip starts no capture
    stacks: bool | None = None  # sample Python stacks during captures; None: of jobs of gputop's own user

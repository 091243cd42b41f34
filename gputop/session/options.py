"""What the command line decides of a session. Nothing here takes long to import."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gputop.rules.expression import Condition

DEFAULT_CAPTURE_S = 10.0
DEFAULT_LOGDIR = "gputop-traces"
DEFAULT_RULE = "sm<0.6*median for 5s"  # read by gputop.session.auto_capture.dip_rules


@dataclass(frozen=True, slots=True)
class DipRule:
    """When a GPU dips: the first of ``metrics`` that has readings is below ``factor`` of its median, or ``level``; or
    when ``condition`` holds for it."""

    text: str
    metrics: tuple[str, ...]
    hold_s: float
    factor: float | None = None
    level: float | None = None
    condition: Condition | None = None


@dataclass(frozen=True, slots=True)
class AutoCaptureOptions:
    """What ``--on-dip``, ``--dip-every``, ``--dip-max`` and ``--dip-before`` decide.

    ``before_s`` is 0 where the job is not to be recorded continuously.
    """

    rule: DipRule
    min_interval_s: float = 600.0
    max_captures: int = 20
    before_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Options:
    """What the command line decides of a session."""

    interval_s: float = 1.0
    attach: tuple[str, ...] = ()
    logdir: Path = field(default_factory=lambda: Path(DEFAULT_LOGDIR))
    capture_s: float = DEFAULT_CAPTURE_S
    discover: bool = True
    auto_capture: AutoCaptureOptions | None = None  # None: a dip starts no capture
    stacks: bool | None = None  # sample Python stacks during captures; None: of jobs of gputop's own user

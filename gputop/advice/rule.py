"""The record of a rule, one with everything the rest of gputop has to know about it.

The records stand in :mod:`gputop.advice.trace_rules`, :mod:`gputop.advice.live_rules` and
:mod:`gputop.advice.fleet_rules`; :mod:`gputop.advice.registry` joins them and finds one by its id. A record imports no
rule's code: it names the module.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any, Literal, cast

from msgspec import Struct

Origin = Literal["trace", "live", "fleet"]
# by_share: by what the fix saves of the step. by_share_capped: the same, medium at most on a small sample.
# own: the rule's own judgment.
SeverityKind = Literal["by_share", "by_share_capped", "own"]


class Limit(Struct, frozen=True):
    """A threshold. A live rule that shows a finding at ``…enter`` keeps it until the signal is past ``…leave``, so
    that a value near the limit does not make the panel flicker."""

    id: str  # rule, dot, what it limits
    value: float
    unit: str
    source: str


class Rule(Struct, frozen=True, kw_only=True):
    """One rule. Its ``module``, below ``gputop.advice`` and named from the package of its origin, has a function
    ``judge_<id>``, which computes the verdict, and ``describe_<id>``, which writes the finding from it."""

    id: str
    module: str
    limits: tuple[Limit, ...] = ()
    shared_limits: tuple[str, ...] = ()  # ids of limits it reads that are not its own
    also: tuple[str, ...] = ()  # further ids that its findings can have
    severity: SeverityKind = "own"
    needs: tuple[str, ...] = ()  # inputs without which it abstains (gputop.advice.trace.inputs, .live.inputs)
    silent_for: tuple[str, ...] = ()  # frameworks of which it says nothing
    training_only: bool = False  # says nothing about a window that evaluates or predicts
    needs_training: bool = False  # says nothing of a job that runs a model without training it
    costs_time: bool = True  # False: it explains a figure or names a limit
    # -- of a trace rule
    # Parts of the account (of the step, or around the steps of the recording) that it can explain, that which it is
    # about first.
    parts: tuple[str, ...] = ()
    # Kinds of gaps (gputop.analysis.host.stack_lines.GAPS) whose lines of Python are what it is about.
    gaps: tuple[str, ...] = ()
    events: frozenset[str] = frozenset()  # kinds of events on the timeline that stand for it
    # -- of a live rule, or of one about a fleet
    follows_from: tuple[str, ...] = ()  # findings of a trace that explain it
    yields_to: tuple[str, ...] = ()  # live findings that account for a GPU's state: it leaves such GPUs out
    same_as: tuple[str, ...] = ()  # ids under which a trace names the same cause
    hides_limit: bool = False  # where it is found, nothing is said about what bounds the job
    holds_up_job: bool = False  # it names one GPU, for which all GPUs of the job wait
    leads: bool = False  # no GPU of the job does anything: it stands before all that a capture's fixes save

    @property
    def origin(self) -> Origin:
        """The input it judges: a trace, the live samples of a node, or a fleet."""
        return cast(Origin, self.module.partition(".")[0])

    @property
    def ids(self) -> tuple[str, ...]:
        """All ids its findings can have."""
        return (self.id, *self.also)

    def function(self, verb: Literal["judge", "describe"]) -> Any:
        """The rule's function of that name; imports its module."""
        return getattr(_module(f"gputop.advice.{self.module}"), f"{verb}_{self.id}")


_module = cache(import_module)  # of a module that is there, too, importlib takes ten times as long

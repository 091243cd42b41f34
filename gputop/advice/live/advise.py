"""The live advice: all live rules over the history of the node. Pure: no clock, no hardware.

A new rule is a record in :mod:`gputop.advice.live_rules` and two functions in a module of this package:
``judge_<id>`` takes the :class:`NodeView` and returns a verdict, what is missing, or None where nothing is wrong;
``describe_<id>`` writes the words of the finding from the verdict.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from msgspec import structs
from msgspec.structs import replace

from gputop.advice.live.bottleneck import live_limit
from gputop.advice.live.node_view import NodeView
from gputop.advice.live.user_rules import HeldConditions, user_live_outcomes
from gputop.advice.live_rules import LIVE_RULES
from gputop.advice.python_rules import guarded, python_rules
from gputop.advice.rule import Rule
from gputop.advice.user_registry import UserRules
from gputop.advice.verdict import Missing, Verdict, finding, of_type
from gputop.core.findings import Abstained, Advice, Finding, collect
from gputop.core.samples import NodeSample
from gputop.ranks.model import Report
from gputop.telemetry.history import History

# By the name under ``needs`` of a record: what is missing of an input, None where nothing is.
MISSING: Mapping[str, Callable[[NodeView], Missing | None]] = {
    "processes": lambda view: None if view.processes else view.no_process(),
}


def live_advice(history: History, sample: NodeSample, previous: tuple[Finding, ...] = (),
                ranks: Report | None = None, held: HeldConditions | None = None,
                unprotected: tuple[int, ...] | None = None) -> Advice:
    """Judge the last minutes. ``sample`` is the newest in ``history``; ``previous`` are the findings shown until now,
    which stay until their signal is clearly gone. ``ranks`` and ``unprotected``: see :class:`NodeView`. ``held`` is
    what the user's own rules keep from one sample to the next."""
    view = NodeView(history, sample, previous, ranks, unprotected)
    outcomes: list[Finding | Abstained | None] = []
    for rule in (*LIVE_RULES, *python_rules("live")):
        outcome = guarded(rule, partial(_outcome, rule, view))
        if isinstance(outcome, Finding):
            view.note(outcome)
        outcomes.append(outcome)
    outcomes += [*UserRules.not_loaded, *user_live_outcomes(view, {} if held is None else held)]
    return replace(collect(outcomes), limit=live_limit(view) or "")


def _outcome(rule: Rule, view: NodeView) -> Finding | Abstained | None:
    verdict = next((missing for need in rule.needs if (missing := MISSING[need](view)) is not None), None)
    if verdict is None:
        verdict = rule.function("judge")(view)
    if verdict is None:
        return None
    if isinstance(verdict, Missing):
        return Abstained(rule.id, verdict.what)
    of_type(verdict, Verdict, "judge")
    verdict = structs.replace(verdict, framework=view.framework(verdict.gpus))
    return finding(rule, verdict, rule.function("describe")(verdict))

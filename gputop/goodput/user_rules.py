"""The user's own live rules over the samples of days: for how long each held, how often and where.

As the monitor judges them, every :data:`EVERY_S`. A rule of which a figure is missing is not judged in that time.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from gputop.advice.live.node_view import NodeView
from gputop.advice.live.user_rules import HeldConditions, user_live_outcomes
from gputop.advice.user_registry import UserRules
from gputop.core.findings import Abstained, Finding
from gputop.core.samples import NodeSample
from gputop.goodput.model import OwnRuleReport
from gputop.telemetry.history import History

EVERY_S = 10.0


@dataclass(slots=True)
class _Time:
    title: str
    severity: str
    judged_s: float = 0.0
    held_s: float = 0.0
    times: int = 0
    longest_s: float = 0.0
    now_s: float = 0.0  # of the stretch in which it holds
    last_s: float | None = None
    gpus: set[int] = field(default_factory=set)
    missing: str | None = None


class OwnRules:
    """Takes samples in the order of time. Without rules it does nothing."""

    def __init__(self) -> None:
        self._rules = {rule.id: _Time(rule.title, rule.severity)
                       for rule in UserRules.rules if rule.condition.source == "live"}
        self._forget()

    def _forget(self) -> None:
        self._history, self._held = History(), HeldConditions()
        self._since_s: float | None = None  # what has not been judged yet begins here
        for time in self._rules.values():
            time.now_s = 0.0

    def add(self, sample: NodeSample, seconds: float) -> None:
        """``seconds``: the time that the sample stands for; 0 behind a gap, where nothing of before counts."""
        if not self._rules:
            return
        if not seconds:
            self._forget()
        self._history.append(sample)
        if self._since_s is None:
            self._since_s = sample.time_s
        elif sample.time_s - self._since_s >= EVERY_S:
            self._judge(sample, sample.time_s - self._since_s)
            self._since_s = sample.time_s

    def _judge(self, sample: NodeSample, seconds: float) -> None:
        outcomes = {outcome.id: outcome
                    for outcome in user_live_outcomes(NodeView(self._history, sample, (), None), self._held)}
        for id_, time in self._rules.items():
            outcome = outcomes.get(id_)
            if isinstance(outcome, Abstained):
                time.missing, time.now_s = outcome.missing, 0.0
                continue
            time.judged_s += seconds
            if not isinstance(outcome, Finding):
                time.now_s = 0.0
                continue
            time.times += not time.now_s
            time.now_s += seconds
            time.held_s += seconds
            time.longest_s = max(time.longest_s, time.now_s)
            time.last_s = sample.time_s
            time.gpus |= set(outcome.gpus)

    def reports(self) -> list[OwnRuleReport]:
        """Reports of the rules, those that held longest first."""
        return [OwnRuleReport(id=id_, title=time.title, severity=time.severity, gpus=sorted(time.gpus),
                              judged_s=time.judged_s, held_s=time.held_s, times=time.times, longest_s=time.longest_s,
                              last_s=time.last_s, missing=None if time.judged_s else time.missing or "enough samples")
                for id_, time in sorted(self._rules.items(), key=lambda pair: -pair[1].held_s)]

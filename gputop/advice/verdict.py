"""What the two functions of a rule hand back: a verdict in numbers, and the words written from it.

A verdict has no sentence and the words compute nothing, so either can change without the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from gputop.advice.rule import Rule
from gputop.core.findings import Finding, Gain, Severity, at_most, severity_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Something costs time, or will make the job fail. Each rule adds its own numbers."""

    gpus: tuple[int, ...]
    share: float = 0.0  # of the step, or of the window without steps, that it costs; 0 where that is not known
    saving: float | None = None  # what a fix would save of the step; None: all of the share
    severity: Severity | None = None  # the rule's own judgment; None: it follows from the share
    id: str | None = None  # of the finding, where the rule has several


class Missing(NamedTuple):
    """The rule cannot judge: what it would have needed, and how to get that."""

    what: str


@dataclass(frozen=True, slots=True)
class Explanation:
    """The words of a finding, and its evidence with the names that documents use."""

    title: str
    why: str
    evidence: Mapping[str, float]  # base units, the unit in the name
    action: str
    gain: str  # what the estimated saving assumes, or why there is none
    source: str  # where the rule and its limits come from
    snippet: str | None = None
    per: Literal["step", "sample"] = "step"


def finding(
    rule: Rule, verdict: Verdict, words: Explanation, caveat: str | None = None, remark: str | None = None,
) -> Finding:
    """The finding of a rule. ``caveat`` says what little it rests on: it caps the severity where the rule's does.

    ``remark`` is a sentence that caps nothing.
    """
    why = f"{words.why} {remark}" if remark else words.why
    severity = verdict.severity or severity_of(verdict.share)
    if caveat and rule.severity == "by_share_capped":
        severity, why = at_most(severity, "medium"), f"{why} {caveat}"
    saving = (verdict.share or None) if verdict.saving is None else verdict.saving
    return Finding(
        id=verdict.id or rule.id, severity=severity, title=words.title, why=why, evidence=words.evidence,
        action=words.action, source=words.source, gain=Gain(saving, words.gain, words.per), gpus=verdict.gpus,
        snippet=words.snippet, origin=rule.origin,
    )

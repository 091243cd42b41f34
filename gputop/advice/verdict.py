"""The results of a rule's two functions: a verdict in numbers, and the words written from it.

A verdict has no sentence and the words compute nothing, so either can change without the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from msgspec import Struct, field

from gputop.advice.rule import Rule
from gputop.core.findings import Claim, Culprit, Finding, Gain, Severity, at_most, severity_of
from gputop.text.units import percent

ONCE = "this occurred once in the recording, so capture a longer trace to see how often it occurs"
# The same in saved analyses of earlier versions.
ONCE_TEXTS = (ONCE, "it came once in this recording, and how often it comes is unknown: a longer capture shows that")
NO_TIME = "none: a fix prevents a failure and saves no time"
NO_FIGURE = "live samples contain no step boundaries, so capture a trace to get a per-step estimate"  # for the gain


class Verdict(Struct, frozen=True, kw_only=True):
    """Something costs time, or will make the job fail. Each rule adds its own numbers."""

    gpus: tuple[int, ...]
    share: float = 0.0  # of the step, or of the window without steps, that it costs; 0 where that is not known
    saving: float | None = None  # what a fix would save of the step; None: all of the share
    # How the saving relates to what the fix brings; "measured" is "at most" where there is no replay. None: nothing can
    # be said of it, not even a bound.
    claim: Claim | None = "measured"
    severity: Severity | None = None  # the rule's own judgment; None: it follows from the saving
    severest: Severity = "high"  # a cap
    id: str | None = None  # of the finding, where the rule has several
    # gputop.analysis.what_if.cure.Cure, which live rules must not import: what the advice changes in the recorded
    # steps. None: it cannot be replayed.
    cure: Any = None
    # When it costs time, along each GPU (index into Trace.gpus; -1: the hosts of a job without one), besides what its
    # cure takes out: gputop.trace.intervals.Spans. Of waits for another GPU, when that one is held up, and the waits.
    spans: Mapping[int, Any] = field(default_factory=dict)
    others_wait: Mapping[int, Any] = field(default_factory=dict)
    # Of a rule that knows it: how its share is divided among parts of the account, in any unit. Else the rule's parts
    # are taken in their order.
    of_parts: Mapping[str, float] = field(default_factory=dict)
    # gputop.analysis.layers.culprits.Events, or a list of them, one for each GPU: what it means on the GPUs, to be
    # named by ops and layers.
    events: Any = None
    culprits: tuple[Culprit, ...] = ()  # of the host, which it has named already
    framework: str = ""  # of a live rule, set by live_advice: what the processes on these GPUs train with

    @property
    def most(self) -> float | None:
        """Upper bound of the share that is saved; None where no figure can be given."""
        if self.claim is None:
            return None
        return (self.share or None) if self.saving is None else self.saving


class Missing(Struct, frozen=True):
    """The rule cannot judge: what it would have needed, and how to get that."""

    what: str


class Explanation(Struct, frozen=True):
    """The words of a finding, and its evidence with the names that documents use."""

    title: str
    why: str
    evidence: Mapping[str, float]  # base units, the unit in the name
    action: str
    source: str  # where the rule and its limits come from
    gain: str = ""  # what the saving assumes, or why there is none; "": what the cure does
    snippet: str | None = None
    per: Literal["step", "sample", "recording"] = "step"
    brief: str = ""  # of a live rule: the reason as one short sentence
    unknown: str = ""  # of a live rule: what a capture or the stacks of the ranks would show, "which copies?"


def known(figures: Mapping[str, float | None]) -> dict[str, float]:
    """Return the figures of a finding's evidence without those that are not known (None)."""
    return {name: value for name, value in figures.items() if value is not None}


class Basis(Struct, frozen=True):
    """Basis of a finding besides its verdict."""

    caveat: str | None = None  # a sentence that says what little it is
    replayed: float | None = None  # what a replay with the verdict's fix saves; None: there is none
    not_replayed: str = ""  # a sentence that says why there is none
    step_s: float | None = None  # the mean step, of which the verdict's shares are; None: there is none
    window: float = 1.0  # without steps: the time that they are of, as a share of the recorded time
    culprits: tuple[Culprit, ...] = ()
    severest: Severity = "high"  # a cap, whatever the rule
    claims: Mapping[str, float] = field(default_factory=dict)  # seconds by part of the account,
    most: float = 1.0  # and the share that they are: no more is saved


_VERDICT_ALONE = Basis()
_BESIDES = {
    "at least": " The fix also frees CPU time for the rest of the step, so it can save more.",
    "about": " The fix may leave some of this time but also frees CPU time for the rest of the step, so it can save "
             "less or more.",
}


def finding(rule: Rule, verdict: Verdict, words: Explanation, basis: Basis = _VERDICT_ALONE) -> Finding:
    gain = _gain(verdict, words, basis)
    by_gain = severity_of(verdict.share if gain.step_time is None else gain.step_time)
    severity = verdict.severity or by_gain
    if gain.by == "replay":
        severity = at_most(severity, by_gain)
    return Finding(
        id=verdict.id or rule.id, severity=at_most(at_most(severity, basis.severest), verdict.severest),
        title=words.title, why=f"{words.why} {basis.caveat}" if basis.caveat else words.why,
        evidence=words.evidence, action=words.action, source=words.source,
        gain=gain, gpus=verdict.gpus, snippet=words.snippet,
        origin=rule.origin, culprits=basis.culprits, brief=words.brief, unknown=words.unknown, claims=basis.claims)


def _gain(verdict: Verdict, words: Explanation, basis: Basis) -> Gain:
    most, claim = verdict.most, verdict.claim
    if most is None or claim is None:
        return Gain(None, words.gain, words.per)
    most = min(most, basis.most)
    either = claim in _BESIDES  # no upper bound
    before_s = basis.step_s if words.per == "step" else None
    per, window = words.per, 1.0
    if per == "step" and before_s is None:
        per, window = "recording", basis.window
    if basis.replayed is None or verdict.cure is None:
        how = words.gain or verdict.cure.assumes.rstrip(".")
        sentence = f"{how[:1].upper()}{how[1:]}. {basis.not_replayed}".rstrip()
        if not verdict.gpus:  # the step runs on the CPUs that the fix frees
            sentence += _BESIDES.get(claim, "")
        return Gain(most * window, how, per, "bound", sentence, claim=claim if either else "at most", before_s=before_s)
    how = "replaying the recorded steps with the fix"
    how += ("; the fix can save more" if claim == "at least" else "; uses a typical factor, not a bound"
            if claim == "about" else f"; the upper bound is {percent(most)}")
    saved = min(basis.replayed, most) * window
    return Gain(saved, how, per, "replay", verdict.cure.assumes, claim=claim, before_s=before_s)

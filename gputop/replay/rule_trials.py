"""Trials of the user's own rules on a trace, or on the samples of a recording."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from msgspec import Struct

from gputop.advice.live.advise import live_advice
from gputop.advice.live.node_view import NodeView
from gputop.advice.live.user_rules import HeldConditions, user_live_outcomes
from gputop.advice.trace.user_rules import missing, over_budget, user_outcome
from gputop.advice.user_registry import user_rules
from gputop.analysis.results import Analysis
from gputop.core.findings import Abstained, Finding
from gputop.core.samples import NodeSample
from gputop.telemetry.history import History

_EVERY_S = 1.0  # as a session runs the live rules


class Trial(Struct, kw_only=True):
    """One rule or budget. ``outcome``: it "holds" (of a budget: is "kept" or "exceeded"), does "not hold", or cannot
    be told for want of what is ``missing``. Of a recording: ``times`` it began to hold, first at ``first_s`` (Unix
    time), and the share ``held_ratio`` of the samples in which it did."""

    id: str
    on: str  # live, trace or budget
    when: str
    outcome: str
    missing: str = ""
    gpus: tuple[int, ...] = ()
    evidence: dict[str, float] = {}
    times: int = 0
    first_s: float | None = None
    held_ratio: float | None = None


class TrialsDocument(Struct, frozen=True, tag_field="schema", tag="gputop.rule-trials/1"):
    trials: tuple[Trial, ...]


def over_trace(analysis: Analysis) -> list[Trial]:
    """The rules on traces, and the budgets."""
    trials = []
    for rule in user_rules().rules:
        if rule.condition.source == "trace":
            trials.append(_tell(Trial(id=rule.id, on="trace", when=rule.condition.text, outcome=""),
                                user_outcome(rule, analysis)))
    for budget in user_rules().budgets:
        over, outcomes = over_budget(budget, analysis)
        trials.append(Trial(
            id=budget.id, on="budget", when=budget.condition.text,
            outcome="cannot be told" if over is None else "exceeded" if over else "kept",
            missing=missing(outcomes) if over is None else "", evidence={
                quantity.document_name(of): value for of_gpu in outcomes.values()
                for of, (value, quantity) in of_gpu.figures.items()} if len(outcomes) == 1 else {},
            gpus=tuple(gpu for gpu, of_gpu in outcomes.items() if gpu is not None and of_gpu.holds is False)))
    return trials


def over_samples(samples: Iterable[NodeSample]) -> list[Trial]:
    """The live rules, run as a session runs them, from the first sample to the last."""
    trials = {rule.id: Trial(id=rule.id, on="live", when=rule.condition.text, outcome="does not hold", held_ratio=0.0)
              for rule in user_rules().rules if rule.condition.source == "live"}
    held_in = dict.fromkeys(trials, 0)
    before: set[str] = set()
    judged = 0
    for time_s, outcomes in _outcomes(samples):
        judged += 1
        now = set()
        for outcome in outcomes:
            if outcome.id not in trials:
                continue
            trial = trials[outcome.id]
            if isinstance(outcome, Finding):
                now.add(trial.id)
                held_in[trial.id] += 1
                trial.times += trial.id not in before
                trial.first_s = time_s if trial.first_s is None else trial.first_s
            if isinstance(outcome, Finding) or not trial.times:
                _tell(trial, outcome)
        for id_ in trials.keys() - {outcome.id for outcome in outcomes}:
            if not trials[id_].times:
                _tell(trials[id_], None)
        before = now
    for id_, trial in trials.items():
        trial.held_ratio = held_in[id_] / judged if judged else None
    return list(trials.values())


def _outcomes(samples: Iterable[NodeSample]) -> Iterator[tuple[float, Sequence[Finding | Abstained]]]:
    """Yield the verdicts of the live rules with the time of the sample; of gputop's own only where a rule of the user
    asks for them."""
    ask_all = any(reference.finding for rule in user_rules().rules for reference in rule.condition.references)
    history, held, previous = History(), HeldConditions(), tuple[Finding, ...]()
    judged_s = float("-inf")
    for sample in samples:
        history.append(sample)
        if 0 <= sample.time_s - judged_s < _EVERY_S:
            continue
        judged_s = sample.time_s
        if ask_all:
            advice = live_advice(history, sample, previous, held=held)
            previous = advice.findings
            yield judged_s, (*advice.findings, *advice.abstained)
        else:
            yield judged_s, user_live_outcomes(NodeView(history, sample, ()), held)


def _tell(trial: Trial, outcome: Finding | Abstained | None) -> Trial:
    trial.outcome, trial.missing = "does not hold", ""
    if isinstance(outcome, Finding):
        trial.outcome, trial.gpus, trial.evidence = "holds", outcome.gpus, dict(outcome.evidence)
    elif isinstance(outcome, Abstained):
        trial.outcome, trial.missing = "cannot be told", outcome.missing
    return trial

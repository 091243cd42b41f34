"""The advice from a trace: all its rules over one analysis. Pure: no clock, no files.

A new rule is a record in :mod:`gputop.advice.trace_rules` and two functions in a module of this package:
``judge_<id>`` takes :class:`TraceFacts` and returns a verdict, what is missing, or None where nothing is wrong;
``describe_<id>`` writes the words of the finding from the verdict and the :class:`Job`.
"""

from __future__ import annotations

from functools import partial

import msgspec

from gputop.advice.causes import fold_consequences
from gputop.advice.evaluation_caveats import with_evaluation_caveat
from gputop.advice.python_rules import guarded, python_rules
from gputop.advice.registry import Own
from gputop.advice.rule import Rule
from gputop.advice.trace.facts import TraceFacts
from gputop.advice.trace.inputs import MISSING
from gputop.advice.trace.job import Job
from gputop.advice.trace.own_rules import with_own_rules
from gputop.advice.trace.replayed import Cures
from gputop.advice.trace_rules import TRACE_RULES
from gputop.advice.verdict import Missing, Verdict, finding
from gputop.analysis.layers.culprits import named_events
from gputop.core.findings import MIN_SHARE, Abstained, Advice, Culprit, Finding, collect


def trace_advice(facts: TraceFacts) -> Advice:
    """What all rules have to say about one trace, what follows from another finding under it."""
    job, steps, cures = Job.of(facts), facts.analysis.steps, Cures(facts)
    advice = collect(with_evaluation_caveat(guarded(rule, partial(_outcome, rule, facts, job, cures)), steps)
                     for rule in (*TRACE_RULES, *python_rules("trace")))
    findings, what_if = cures.together(fold_consequences(advice.findings, cures.rest))
    abstained = (*advice.abstained, *Own.not_loaded)
    judged = msgspec.structs.replace(facts.analysis, findings=findings, abstained=abstained)
    return with_own_rules(Advice(findings, abstained, what_if=what_if), judged)


def _outcome(rule: Rule, facts: TraceFacts, job: Job, cures: Cures) -> Finding | Abstained | None:
    if facts.framework in rule.silent_for:
        return None
    for need in rule.needs:
        missing = MISSING[need](facts)
        if missing is not None:
            return Abstained(rule.id, missing)
    steps = facts.analysis.steps
    if steps is not None and steps.start_up and rule.costs_time:
        return Abstained(rule.id, f"steps after the start: those of this window hold {steps.start_up}")
    verdict = rule.function("judge")(facts)
    if verdict is None:
        return None
    if isinstance(verdict, Missing):
        return Abstained(rule.id, verdict.what)
    replayed, reason = cures.saved(verdict)
    if replayed is not None and replayed < MIN_SHARE and rule.costs_time:
        return None
    made = finding(rule, verdict, rule.function("describe")(verdict, job), facts.small_sample_caveat,
                   facts.few_steps_caveat, replayed, reason, _culprits(verdict, facts))
    if replayed is not None and verdict.cure is not None:
        cures.by_finding[made.id] = verdict.cure
    return made


def _culprits(verdict: Verdict, facts: TraceFacts) -> tuple[Culprit, ...]:
    if verdict.events is None:
        return verdict.culprits
    return named_events(facts.trace, verdict.events, facts.judged_spans, facts.steps_or_window, facts.basis,
                        facts.active_numbers)

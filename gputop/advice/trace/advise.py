"""The advice from a trace: all its rules over one analysis. Pure: no clock, no files.

A new rule is a record in :mod:`gputop.advice.trace_rules` and two functions in a module of this package:
``judge_<id>`` takes :class:`TraceFacts` and returns a verdict, what is missing, or None where nothing is wrong;
``describe_<id>`` writes the words of the finding from the verdict and the :class:`Job`.
"""

from __future__ import annotations

from functools import partial
from itertools import zip_longest

import msgspec
import numpy as np
from msgspec.structs import replace

from gputop.advice.causes import fold_consequences
from gputop.advice.evaluation_caveats import with_evaluation_caveat
from gputop.advice.python_rules import guarded, python_rules
from gputop.advice.rule import Rule
from gputop.advice.trace.facts import TraceFacts
from gputop.advice.trace.host_work import StepGapHost, main_function, out_of_the_step
from gputop.advice.trace.inputs import MISSING
from gputop.advice.trace.job import Job
from gputop.advice.trace.long_steps import LongStepsFound, less_often
from gputop.advice.trace.replayed import Cures
from gputop.advice.trace.user_rules import with_user_rules
from gputop.advice.trace_rules import TRACE_RULES
from gputop.advice.user_registry import UserRules
from gputop.advice.verdict import Basis, Explanation, Missing, Verdict, bound, finding, of_type
from gputop.analysis.layers.culprits import MAX_CULPRITS, named_events
from gputop.core.findings import LARGE_SHARE, MIN_SHARE, Abstained, Advice, Culprit, Finding, collect
from gputop.text.units import percent, reads_zero
from gputop.trace.lookups import numbered
from gputop.trace.model import Kind
from gputop.trace.parallel import pool

_COMPUTE = "compute"  # part of the step, and kind of events
_WORTH_NAMING = 0.05  # share of the gaps: a line that runs so long there is named by the finding
# Share of their time: a finding that costs less is about few of them, such as those of every 64th step.
_ABOUT_THEM = 0.5


def trace_advice(facts: TraceFacts) -> Advice:
    """Judge one trace by all rules; findings that follow from another one stand under it."""
    job, steps, cures = Job.of(facts), facts.analysis.steps, Cures(facts)
    with pool() as threads:  # each rule is a pure function of the facts; those of others, in Python, need not be
        outcomes = [*threads.map(lambda rule: _outcome(rule, facts, job, cures), TRACE_RULES)]
    outcomes += [guarded(rule, partial(_outcome, rule, facts, job, cures)) for rule in python_rules("trace")]
    advice = collect(with_evaluation_caveat(outcome, steps) for outcome in outcomes)
    findings, what_if = cures.together(fold_consequences(advice.findings, cures.rest))
    abstained = (*advice.abstained, *UserRules.not_loaded)
    judged = msgspec.structs.replace(facts.analysis, findings=findings, abstained=abstained)
    return with_user_rules(Advice(findings, abstained, what_if=what_if), judged)


def _outcome(rule: Rule, facts: TraceFacts, job: Job, cures: Cures) -> Finding | Abstained | None:
    if facts.framework in rule.silent_for or (rule.needs_training and job.trains is False):
        return None
    for need in rule.needs:
        missing = MISSING[need](facts)
        if missing is not None:
            return Abstained(rule.id, missing)
    steps = facts.analysis.steps
    if steps is not None and steps.start_up and rule.costs_time:
        return Abstained(rule.id, f"steps after the start: the steps of this window contain {steps.start_up}")
    verdict = rule.function("judge")(facts)
    if verdict is None:
        return None
    if isinstance(verdict, Missing):
        return Abstained(rule.id, verdict.what)
    of_type(verdict, Verdict, "judge")
    most = bound(verdict)
    if rule.costs_time and most is not None and reads_zero(most):
        return None
    replayed, reason = cures.saved(verdict)
    if replayed is not None and replayed < MIN_SHARE and rule.costs_time:
        most = most or 0.0
        return None if most < LARGE_SHARE else Abstained(
            rule.id, f"proof that the {facts.basis} waits for it: it is {percent(most)} of the {facts.basis}, but a "
                     f"replay without it saves {percent(replayed)}")
    words = of_type(rule.function("describe")(verdict, job), Explanation, "describe")
    # Lines and events of the gaps within steps are no culprits of what lies around the steps.
    culprits = verdict.culprits if words.per == "recording" else _culprits(rule, verdict, facts)
    if isinstance(verdict, (StepGapHost, LongStepsFound)):
        function = main_function(culprits, verdict.share * facts.period_s, facts.analysis.stacks)
        if function is not None:
            words = (out_of_the_step(words, verdict, function) if isinstance(verdict, StepGapHost) else
                     less_often(words, function))
    made = finding(rule, verdict, words, Basis(
        facts.small_sample_caveat, facts.few_steps_caveat, replayed, reason, culprits,
        severest="low" if facts.hardly_any_kernels and rule.costs_time else "high"))
    if _COMPUTE in rule.events and _COMPUTE in rule.parts:
        made = replace(made, ncu=_ncu(verdict, facts))
    if replayed is not None and verdict.cure is not None:
        cures.by_finding[made.id] = verdict.cure
    return made


def _ncu(verdict: Verdict, facts: TraceFacts) -> str:
    """Command to look at the kernel with the most time among those of the verdict."""
    if verdict.events is None or facts.analysis.kernels is None:
        return ""
    device, rows = facts.trace.device, verdict.events.rows
    rows = rows[device.kind[rows] == Kind.COMPUTE]
    names, which = numbered(device.name[rows])
    time = np.bincount(which, weights=device.end_ns[rows] - device.start_ns[rows])
    lines = {row.name: row.ncu for row in facts.analysis.kernels.by_name}
    by_time = [(-ns, facts.trace.names[i]) for i, ns in zip(names.tolist(), time.tolist(), strict=True) if i >= 0]
    return next((line for _, name in sorted(by_time) if (line := lines.get(name, ""))), "")


def _culprits(rule: Rule, verdict: Verdict, facts: TraceFacts) -> tuple[Culprit, ...]:
    if lines := lines_of_finding(rule, verdict, facts):
        return lines
    if verdict.events is None:
        return verdict.culprits
    several = verdict.events if isinstance(verdict.events, list) else [verdict.events]
    named = [named_events(facts.trace, events, facts.analyzed_spans, facts.steps_or_window, facts.basis,
                          facts.active_numbers, facts.calls) for events in several]
    if len(named) == 1:
        return named[0]
    # Of each GPU its first, then the second of each; the rest of a GPU, which has no name, is not told.
    return tuple(one for rank in zip_longest(*named) for one in rank if one is not None and one.name)[:MAX_CULPRITS]


def lines_of_finding(rule: Rule, verdict: Verdict, facts: TraceFacts) -> tuple[Culprit, ...]:
    """The lines of Python that ran in the gaps that the finding is about, where they take more of them than any event
    that the trace itself names."""
    stacks = facts.analysis.stacks
    causes = {"dispatch" if cause == "launching" else cause for cause in rule.idle_gaps}
    of_causes = [gaps for gaps in stacks.gaps if gaps.gap in causes] if stacks is not None else []
    if stacks is None or not of_causes or (verdict.events is not None and not getattr(verdict.events, "idle", False)):
        return ()
    most = max(of_causes, key=lambda gaps: gaps.s_per_step)
    if verdict.share * facts.period_s < _ABOUT_THEM * most.s_per_step:
        return ()
    lines = tuple(Culprit(line.line, "line", line.s_per_step, stacks.basis, traced=line.traced) for line in most.lines
                  if line.share >= _WORTH_NAMING)
    # A stage of the input pipeline is no rival: the lines are what it runs.
    culprit_s = max((culprit.time_s or 0.0 for culprit in verdict.culprits if culprit.kind != "stage"), default=0.0)
    if lines and lines[0].traced:  # functions that the trace names are what runs in these lines, or calls them
        return lines if sum(line.s_per_step for line in most.lines) >= _ABOUT_THEM * culprit_s else ()
    return lines if lines and (lines[0].time_s or 0.0) >= culprit_s else ()

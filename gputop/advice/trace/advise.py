"""The advice from a trace: all its rules over one analysis. Pure: no clock, no files."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import combinations, zip_longest

import msgspec
import numpy as np
from msgspec.structs import replace

from gputop.advice.causes import Claimed, fold_consequences
from gputop.advice.registry import limit, rule_of
from gputop.advice.rule import Rule
from gputop.advice.trace.facts import OF_ONE_KERNEL, TraceFacts
from gputop.advice.trace.general_programs import for_general
from gputop.advice.trace.host_work import StepGapHost, out_of_the_step
from gputop.advice.trace.inputs import MISSING
from gputop.advice.trace.job import Job
from gputop.advice.trace.known_work import main_function
from gputop.advice.trace.long_steps import LongStepsFound, less_often
from gputop.advice.trace.unrecorded import as_unrecorded
from gputop.advice.trace.user_rules import with_user_rules
from gputop.advice.trace_rules import TRACE_RULES
from gputop.advice.verdict import Basis, Explanation, Missing, Verdict, finding
from gputop.analysis.host.host_spans import PYTHON_CALLBACK
from gputop.analysis.layers.culprits import MAX_CULPRITS, named_events
from gputop.analysis.results import SESSION_RUN, StepTimes
from gputop.analysis.steps.phases import EVALUATION, PREDICTION, UNKNOWN
from gputop.analysis.steps.training_loops import BATCH_WAIT
from gputop.analysis.what_if.cure import NO_ROWS, Cure, combined
from gputop.analysis.what_if.replay import TOLERANCE
from gputop.core.findings import (
    LARGE_SHARE,
    MIN_SHARE,
    Abstained,
    Advice,
    CombinedGain,
    Culprit,
    Finding,
    at_most,
    collect,
)
from gputop.text.units import percent, reads_zero, seconds
from gputop.trace.intervals import EMPTY, Spans, merge, union
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
    # Each rule is a pure function of the facts.
    with pool(facts.trace.event_count) as threads:
        outcomes = [*threads.map(lambda rule: _outcome(rule, facts, job, cures), TRACE_RULES)]
    advice = collect(with_evaluation_caveat(for_general(outcome) if outcome is not None and job.general else outcome,
                                            steps) for outcome in outcomes)
    findings, what_if = cures.together(fold_consequences(advice.findings, facts.claimed))
    judged = msgspec.structs.replace(facts.analysis, findings=findings, abstained=advice.abstained)
    return with_user_rules(Advice(findings, advice.abstained, what_if=what_if), judged)


def _outcome(rule: Rule, facts: TraceFacts, job: Job, cures: Cures) -> Finding | Abstained | None:
    if facts.framework in rule.silent_for or (
            rule.needs_training and (job.trains is False or job.general)):
        return None
    for need in rule.needs:
        missing = MISSING[need](facts)
        if missing is not None:
            return Abstained(rule.id, missing)
    of_kernels = _COMPUTE in rule.events or rule.parts == (_COMPUTE,)
    if of_kernels and facts.hardly_a_kernel and (rule.id not in OF_ONE_KERNEL or facts.of_recorded < LARGE_SHARE):
        return Abstained(rule.id, f"at least {limit('few.judged_kernels'):.0f} kernels; capture a longer trace")
    steps = facts.analysis.steps
    if steps is not None and steps.start_up and rule.costs_time:
        return Abstained(rule.id, f"steps after startup; the recorded steps include {steps.start_up}")
    verdict = rule.function("judge")(facts)
    if verdict is None:
        return None
    if isinstance(verdict, Missing):
        return Abstained(rule.id, verdict.what)
    most = verdict.most
    if rule.costs_time and most is not None and reads_zero(most):
        return None
    replayed, reason = cures.saved(verdict)
    if replayed is not None and replayed < MIN_SHARE and rule.costs_time:
        return None if not most or most < LARGE_SHARE else Abstained(
            rule.id, f"proof that this cause delays the {facts.basis}; it takes {percent(most)} of the {facts.basis}, "
                     f"but replaying the {facts.basis} without it saves {percent(replayed)}")
    words = rule.function("describe")(verdict, job)
    if facts.of_recorded < 1 and rule.costs_time and words.per != "recording" and (
            0 < max(verdict.share, most or 0.0) * facts.of_recorded < MIN_SHARE):
        return Abstained(rule.id, f"more GPU work: it takes only {seconds(facts.period_s)} of this recording")
    # Lines and events of the gaps within steps are no culprits of what lies around the steps.
    culprits = verdict.culprits if words.per == "recording" else _culprits(rule, verdict, facts)
    words, verdict = _with_function(words, verdict, culprits, facts)
    claims, share = _claims(rule, verdict, words, facts)
    made = as_unrecorded(finding(rule, verdict, words, Basis(
        facts.caveat if rule.costs_time else None, replayed, reason, culprits=culprits,
        step_s=facts.period_s if facts.steps is not None else None, window=facts.of_recorded,
        severest=facts.severest(rule, words.per), claims=claims, most=share)), facts)
    if _COMPUTE in rule.events and _COMPUTE in rule.parts:
        made = replace(made, ncu=_ncu(verdict, facts))
    made = _for_program(made, job, steps)
    if replayed is not None and verdict.cure is not None:
        cures.by_finding[made.id] = verdict.cure
    spans = _spans(verdict, facts)
    claimed_ns = sum(claims.values()) * 1e9 * max(len(facts.parts), 1)
    facts.claimed[made.id] = Claimed(
        spans, min(claimed_ns / max(sum(of_gpu.total for of_gpu in spans.values()), 1), 1.0), verdict.others_wait)
    return made


def _for_program(made: Finding, job: Job, steps: StepTimes | None) -> Finding:
    """The finding with code that names what the program is, and the version that it is for."""
    if job.trains is False:
        made = replace(made, **{name: line.replace("train.py", "main.py") for name in ("snippet", "ncu")
                                if (line := getattr(made, name))})
    of_tf2 = made.snippet and steps is not None and steps.anchor == SESSION_RUN
    return replace(made, snippet=f"# in TensorFlow 2:\n{made.snippet}") if of_tf2 else made


def _with_function(words: Explanation, verdict: Verdict, culprits: Sequence[Culprit], facts: TraceFacts,
                   ) -> tuple[Explanation, Verdict]:
    """The words of a finding about the host, with the function of the user's that takes most of its time; without a
    GPU all of the function's time goes with it."""
    if not isinstance(verdict, (StepGapHost, LongStepsFound)):
        return words, verdict
    function = main_function(culprits, verdict.share * facts.period_s, facts.analysis.stacks)
    if function is None:
        return words, verdict
    if isinstance(verdict, LongStepsFound):
        return less_often(words, function), verdict
    reworded = out_of_the_step(words, verdict, function)
    if reworded is not words and verdict.claim not in (None, "at most"):
        verdict = replace(verdict, claim=facts.on_cpus("about"), saving=None)
    if facts.active or reworded is words or function.holds_loop or function.loader:
        return reworded, verdict
    # No more than so many samples prove.
    share = min(function.time_s / facts.period_s, 1.0)
    samples = facts.analysis.stacks.rate_hz * facts.period_s * facts.steps_or_window if facts.analysis.stacks else 0.0
    share -= 2 * math.sqrt(share * (1 - share) / samples) if samples else 0.0
    if share <= verdict.share:
        return reworded, verdict
    return replace(reworded, title=f"{function.name} ({function.location}) takes at least {percent(share)} of the step",
                   evidence={**reworded.evidence, "share_ratio": share},
                   why=f"{reworded.why} The samples of Python's stack show {function.name} and its ops for "
                       f"{seconds(function.time_s)} of each step."), replace(verdict, saving=share)


def _spans(verdict: Verdict, facts: TraceFacts) -> dict[int, Spans]:
    """Return when the finding's seconds are, by GPU. Two fixes can each make the same kernels faster, so none claims
    these."""
    device, several = facts.trace.device, [verdict.spans]
    if verdict.cure is not None:
        rows = np.concatenate([NO_ROWS, *(rows for rows, _ in verdict.cure.scaled)])
        rows = rows[device.kind[rows] != Kind.COMPUTE]
        several += [verdict.cure.host, {gpu: union(device.start_ns[of_gpu], device.end_ns[of_gpu])
                    for gpu in facts.parts if len(of_gpu := rows[device.gpu[rows] == gpu])}]
    return {gpu: merge(EMPTY, *(spans[gpu] for spans in several if gpu in spans))
            for gpu in {gpu for spans in several for gpu in spans}}


def _claims(rule: Rule, verdict: Verdict, words: Explanation, facts: TraceFacts) -> tuple[dict[str, float], float]:
    """Seconds of the recording that the finding is about, by part of the account, which has at least as many; and the
    share that they are of what its own share is of."""
    account, wall = facts.analysis.account, facts.analysis.wall_time
    if account is None or wall is None or not rule.costs_time:
        return {}, 1.0
    parts, claims = account.claimable(verdict.of_parts or rule.parts), dict[str, float]()
    whole_s = wall.recorded_s if words.per == "recording" else account.steps * account.mean_s
    saved = verdict.most or 0.0 if words.per != "sample" else 0.0
    left_s = max(verdict.share, saved, words.evidence.get("share_ratio", 0.0)) * whole_s
    divided = sum(verdict.of_parts.values())
    for id_ in sorted(parts, key=lambda id_: rule.parts.index(id_) if id_ in rule.parts else len(rule.parts)):
        taken = min(parts[id_], left_s * verdict.of_parts.get(id_, 0.0) / divided if divided else left_s)
        if taken > 0:
            claims[id_] = taken
            left_s -= 0.0 if divided else taken
    return claims, min(sum(claims.values()) / whole_s, 1.0) if whole_s and words.per != "sample" else 1.0


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
    of_all_steps = isinstance(verdict, StepGapHost)  # as are the lines of gaps that no sample saw
    of_causes = [gaps for gaps in stacks.gaps if gaps.gap in rule.gaps and (gaps.seen or of_all_steps)
                 ] if stacks is not None else []
    if stacks is None or not of_causes or (verdict.events is not None and not getattr(verdict.events, "idle", False)):
        return ()
    most = max(of_causes, key=lambda gaps: gaps.s_per_step)
    if verdict.share * facts.period_s < _ABOUT_THEM * most.s_per_step:
        return ()
    lines = tuple(Culprit(line.line, "line", line.s_per_step, stacks.basis, traced=line.traced) for line in most.lines
                  if line.share >= _WORTH_NAMING)
    # A stage of the input pipeline is no rival, nor is the wait for a batch or an op that calls Python: the lines are
    # what they run.
    culprit_s = max((culprit.time_s or 0.0 for culprit in verdict.culprits if not (
        culprit.kind == "stage" or re.match(f"{BATCH_WAIT}|{PYTHON_CALLBACK}", culprit.name))), default=0.0)
    if lines and lines[0].traced:  # functions that the trace names are what runs in these lines, or calls them
        return lines if sum(line.s_per_step for line in most.lines) >= _ABOUT_THEM * culprit_s else ()
    return lines if lines and (lines[0].time_s or 0.0) >= culprit_s else ()


# -- what a window that does not train, or may not, says of its training ---------------------------

_CAPTURE = "capture again while the job trains (in Keras: during fit())"


def with_evaluation_caveat(outcome: Finding | Abstained | None, steps: StepTimes | None) -> Finding | Abstained | None:
    """The outcome of a rule, true for what ran in the window: said more softly, or not at all.

    How a job evaluates says nothing about memory, precision or gradients of its training. Of the rest the fix may be
    right for the evaluation, which is what ran; it is not known to save time of the training.
    """
    if steps is None or not isinstance(outcome, Finding):
        return outcome
    if steps.phase in (EVALUATION, PREDICTION):
        rule = rule_of(outcome.id, "trace")
        if rule is not None and rule.training_only:
            return Abstained(outcome.id, f"training steps. The recorded steps are {steps.phase}; {_CAPTURE}")
        worst = at_most(outcome.severity, "medium" if steps.count >= limit("few.steps") else "low")
        return replace(outcome, severity=worst, why=(
            f"{outcome.why} The recording shows {steps.phase}. If the job also trains, {_CAPTURE} first."))
    if steps.phase == UNKNOWN and UNKNOWN in steps.left_out_s:
        return replace(outcome, severity=at_most(outcome.severity, "medium"), why=(
            f"{outcome.why} The trace does not show whether these steps train or evaluate: {_CAPTURE}."))
    return outcome


# -- what the fixes save by a replay of the recorded steps: each alone, and with those before it ------

_MAX_COMBINED = 5  # findings of which every set is replayed: 31
_MAX_COST = 4_000_000  # about 0.3 s


class Cures:
    def __init__(self, facts: TraceFacts) -> None:
        self._facts = facts
        self._replay = facts.replay
        self.by_finding: dict[str, Cure] = {}

    def saved(self, verdict: Verdict) -> tuple[float | None, str]:
        """The share of the step that the verdict's cure saves; None with the reason, a sentence, where a replay cannot
        tell or says clearly more than the upper bound."""
        most = verdict.most
        if verdict.cure is None or most is None or self._replay is None:
            return None, ""
        if self._replay.error > TOLERANCE:
            return None, ("The saving was not estimated by replay: the replayed time of the unmodified "
                          f"{self._facts.basis} is off by {percent(self._replay.error)}, so the trace does not show "
                          "everything that the GPUs wait for.")
        saved = max(self._replay.saved(verdict.cure), 0.0)
        if_waiting = saved
        if self._replay.ambiguous_wait_ratio:
            if_waiting = max(self._replay.saved_if_waiting(verdict.cure), 0.0)
        if abs(min(saved, most) - min(if_waiting, most)) >= MIN_SHARE:
            return None, (f"The trace does not show whether the host waits for the GPUs during its pauses: replaying "
                          f"saves {percent(if_waiting)} if the host waits and {percent(saved)} if it is busy.")
        if saved - most >= MIN_SHARE:
            return None, (f"Replaying the recorded {self._facts.basis} with this fix predicts larger savings "
                          f"({percent(saved)}), so gputop shows the smaller bound.")
        return saved, ""

    def together(self, findings: Iterable[Finding]) -> tuple[tuple[Finding, ...], tuple[CombinedGain, ...]]:
        """The findings, each with what it saves together with those before it; and what sets of them save."""
        several = tuple(findings)
        alone = {f.id: f.gain.step_time or 0.0 for f in several if f.gain.by == "replay" and f.id in self.by_finding}
        if self._replay is None:
            return several, ()
        cost = self._replay.cost * (2 if self._replay.ambiguous_wait_ratio else 1)
        saved = combinations_saved(alone, self._saved_together, _MAX_COST // max(cost, 1))
        ids = list(alone)
        together = {finding_id: saved[tuple(ids[:i + 1])] for i, finding_id in enumerate(ids)}
        return (tuple(replace(f, gain=replace(f.gain, together=together[f.id])) if f.id in together else f
                      for f in several),
                tuple(CombinedGain(chosen, share) for chosen, share in saved.items() if len(chosen) > 1))

    def _saved_together(self, ids: Iterable[str]) -> float:
        """Saving of several fixes, of the step or the recorded time; the smaller of both estimates where the trace does
        not show what the host does in its pauses."""
        if self._replay is None:
            return 0.0
        cure = combined(self.by_finding[id_] for id_ in ids)
        saved = self._replay.saved(cure)
        if self._replay.ambiguous_wait_ratio:
            saved = min(saved, self._replay.saved_if_waiting(cure))
        return saved * self._facts.of_recorded


def combinations_saved(
    alone: Mapping[str, float], saved: Callable[[tuple[str, ...]], float], most: int,
) -> dict[tuple[str, ...], float]:
    """Savings of sets of findings, the ids in the order of ``alone``: each alone, the first two, three and so on, and
    the other sets of the first five, as far as ``most`` replays go. A set saves no less than one that it contains."""
    ids = tuple(alone)
    out: dict[tuple[str, ...], float] = {(finding_id,): share for finding_id, share in alone.items()}
    for size in range(2, len(ids) + 1):
        for chosen in combinations(ids[:_MAX_COMBINED], size) if size <= _MAX_COMBINED else [ids[:size]]:
            if chosen != ids[:size]:
                most -= 1
                if most < 0:
                    continue
            out[chosen] = max(saved(chosen), *(share for other, share in out.items() if set(other) < set(chosen)))
    return out

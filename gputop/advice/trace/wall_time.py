"""The recorded time around the training steps: ends of epochs, checkpoints, evaluations, steps that had not ended.

What came once in the recording is told in seconds: a share of a recording says nothing of a job that does it once an
hour, so it is no saving, and never of high severity.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
from msgspec import structs

from gputop.advice.fix_code import code
from gputop.advice.registry import limit, source
from gputop.advice.trace.facts import HOST_EVENTS, TraceFacts, new_workers, recorded_spans, severity_by_limits
from gputop.advice.trace.input_fixes import FIRST_WORKERS, KEEP_WORKERS, ODD_BATCH, WORKERS_OR_SELDOM
from gputop.advice.trace.job import KERAS, PYTORCH, Job, is_general, trains
from gputop.advice.trace.known_work import NEW_WORKERS, NO_TRAINING, SELDOM_WORK, WORK, KnownWork, host_words
from gputop.advice.trace.other_programs import may_be_others
from gputop.advice.verdict import ONCE, Explanation, Missing, Verdict, known
from gputop.analysis.host.wall_time import same_work, summed
from gputop.analysis.results import WallPart, WallTime
from gputop.analysis.steps.phases import EVALUATION, PREDICTION
from gputop.core.findings import Culprit
from gputop.text.units import counted, percent, seconds
from gputop.trace.host_calls import launched_in_calls
from gputop.trace.intervals import EMPTY, intersect, merge

_OUTSIDE, _OPEN, _NO_STEPS = "between", "open", "no_steps"
_STEPS = "steps"
_UNNAMED = ("python", "silent", "unknown")  # kinds of host work of which no event tells more
_LINE = re.compile(r":\d+ ")  # "train.py:11 Save.on_epoch_end"; a known kind of work may be named by an op
_WORK_OF_KIND: dict[str, KnownWork] = {kind.kind: kind for kind in (*WORK, *SELDOM_WORK)}
_CALLBACKS = ("Do this work less often, move it to a thread, or make epochs longer (steps_per_epoch): callbacks "
              "(on_train_batch_end, on_epoch_end) and epoch starts delay the training.")
_OF_A_PROGRAM = ("Find out what the program computes meanwhile (perf record, or nsys profile --sample=process-tree). "
                 "Move this work to the GPU, or do it while the GPU works.")


class TimeOutsideSteps(Verdict, frozen=True, kw_only=True):
    parts: Sequence[WallPart]  # between steps, with the open ones of the same name; those of most time first
    recorded_s: float
    steps: int  # 0: none were found
    per_step_s: float | None  # time from step to step, with what lies between
    pauses_show: bool  # it is longer than the steps alone
    between_per_step_s: float | None  # of it what lies between; None: no steps were found
    new_workers: bool = False  # PyTorch's DataLoader starts its workers anew in most of this time


def judge_time_outside_steps(facts: TraceFacts) -> TimeOutsideSteps | Missing | None:
    """The job's host holds up the training between its steps, or where no step is found: at the end of an epoch, while
    it saves, in the pause between two ranges."""
    wall, steps = facts.analysis.wall_time, facts.analysis.steps
    if wall is None or wall.recorded_s <= 0:
        return Missing("data on the total time of a recording")
    if steps is not None and (steps.count < limit("host.steps") or steps.phase in (EVALUATION, PREDICTION)):
        return Missing("two complete training steps to see what happens between steps; capture a longer trace")
    if steps is None and not facts.active:
        return Missing("training steps, because the rule evaluates the time outside of steps")
    if steps is not None and steps.unit != "step":
        return Missing("marked steps: the repeated part may be a layer, and the rest may be part of the same step")
    ids = (_OUTSIDE,) if steps is not None else (_NO_STEPS,)
    parts = [part for part in wall.parts if part.id in ids]
    # What has the same name at an edge of the recording is the same work, of which the end was not seen.
    names = {same_work(part.kind, part.what) for part in parts if part.kind not in ("unknown", "input")}
    parts += [part for part in wall.parts if part.id == _OPEN and same_work(part.kind, part.what) in names]
    if steps is None and trains(facts) is False and all(part.kind in (*_UNNAMED, "line", "op") for part in parts):
        return Missing(f"to know whether the job had any work; {NO_TRAINING}")
    share = sum(part.time_s for part in parts) / wall.recorded_s
    if share < limit("time_outside_steps.share"):
        return None
    # But for its longest stretch it is no more than any loop has.
    once = share - max(part.longest_s for part in parts) / wall.recorded_s < limit("time_outside_steps.share")
    why_not = _no_loop(facts, wall, parts, once) if steps is None else None
    if why_not is None and once and max(part.longest_s for part in parts) < limit("time_outside_steps.once"):
        why_not = "a second pause of that length, because the first may be coincidence; capture a longer trace"
    why_not = why_not or _of_others(facts, max(parts, key=lambda part: part.time_s), share)
    if why_not is not None:
        return Missing(why_not)
    return TimeOutsideSteps(
        gpus=facts.active_numbers, share=share,
        claim=None if once else "at most" if facts.framework == "unknown" else facts.on_cpus("about"),
        severest=("medium" if share >= limit("unfinished_step.medium") else "low") if once else "high",
        parts=summed(structs.replace(part, id=ids[0]) for part in parts),
        new_workers=new_workers(facts).total / 1e9 >= limit("step_gap_host.named") * share * wall.recorded_s,
        spans=recorded_spans(facts, parts), recorded_s=wall.recorded_s, per_step_s=wall.per_step_s,
        steps=steps.count if steps is not None else 0,
        pauses_show=steps is not None and wall.pauses_show(steps.mean_s),
        between_per_step_s=(sum(part.time_s for part in parts if part.id == _OUTSIDE) / (wall.steps or steps.count)
                            if steps is not None else None),
        culprits=_culprits(parts))


def _no_loop(facts: TraceFacts, wall: WallTime, parts: Sequence[WallPart], once: bool) -> str | None:
    """Reason why a pause cannot be told from the work of a step in a recording without steps."""
    if facts.hardly_any_kernels and (once or all(part.kind in _UNNAMED for part in parts)):
        return "more GPU work, because hardly any kernels run here; capture while the job trains"
    if any(part.id == "start" and part.time_s >= limit("time_outside_steps.share") * wall.recorded_s
           for part in wall.parts):
        return "training steps, because this recording begins with job startup"
    if all(part.kind == "unknown" for part in parts):
        return f"data on host activity while no GPU works{HOST_EVENTS}"
    first = max(parts, key=lambda part: part.time_s)
    if facts.framework == "unknown" and not (is_general(facts) and first.kind == "silent" and _pauses(facts, parts)):
        return "a training loop; this trace contains neither steps nor framework activity"
    kernels = np.arange(len(facts.trace.device))
    if first.kind == "op" and (launched_in_calls(facts.trace, kernels, re.escape(first.what)).any() or (
            facts.framework == "pytorch" and "::" in first.what)):  # one of its operators
        return "training steps, because the work that takes this time may be that of a step"
    return None


def _pauses(facts: TraceFacts, parts: Sequence[WallPart]) -> bool:
    """Return whether the GPUs pause again and again for this work, between their first event and their last."""
    spans = intersect(merge(EMPTY, *recorded_spans(facts, parts).values()), facts.analyzed_spans)
    lengths = np.sort(spans.end - spans.start)
    return bool(lengths[:-1].sum() >= limit("time_outside_steps.share") * facts.analyzed_spans.total)


def _of_others(facts: TraceFacts, part: WallPart, share: float) -> str | None:
    """Reason why other processes may have made this part so long: nothing but its length speaks for the job's own
    Python."""
    if part.kind not in _UNNAMED or part.every_steps is not None:
        return None
    return may_be_others(facts, share, silent=part.kind in ("python", "silent"))


def _culprits(parts: Sequence[WallPart]) -> tuple[Culprit, ...]:
    """Culprits that have a name, each once with its time in the recording."""
    times: dict[tuple[str, str], list[WallPart]] = {}
    for part in parts:
        if part.what:
            times.setdefault((part.what, "line" if _LINE.search(part.what) else "host"), []).append(part)
    culprits = [Culprit(what, kind, sum(part.named_s for part in same_name), "window",
                        at_s=max(same_name, key=lambda part: part.longest_s).at_s)
                for (what, kind), same_name in times.items()]
    return tuple(sorted(culprits, key=lambda one: -(one.time_s or 0.0)))


def describe_time_outside_steps(v: TimeOutsideSteps, job: Job) -> Explanation:
    time_s, longest_s = sum(part.time_s for part in v.parts), max(part.longest_s for part in v.parts)
    first = v.parts[0]
    what = NEW_WORKERS if v.new_workers and job.loop == PYTORCH and first.kind in _UNNAMED else host_words(first)
    between = "between training steps" if v.steps else "while no GPU works and no step is found"
    why = f"{seconds(time_s)} of the {seconds(v.recorded_s)} recorded ({percent(v.share)}) pass {between}. "
    why += "Host activity during this time: " + "; ".join(
        f"{host_words(part)} for {seconds(part.named_s)}{_often(part)}" for part in v.parts[:3]) + "."
    if v.per_step_s is not None and v.pauses_show:
        why += f" Including this time, a training step takes {seconds(v.per_step_s)} of wall time."
    action, snippet = _fix(first, job) if what != NEW_WORKERS else (KEEP_WORKERS, code("input_bound", "torch"))
    evidence = known({
        "outside_s": time_s, "share_ratio": v.share, "recorded_s": v.recorded_s, "longest_s": longest_s,
        "stretches_count": float(sum(part.count for part in v.parts)) or None,
        "every_training_steps": float(first.every_steps) if first.every_steps else None,
        "per_training_step_s": v.per_step_s, "between_per_step_s": v.between_per_step_s})
    return Explanation(
        title=(f"Once in this recording, {seconds(longest_s)} pass {between}: {what}" if v.claim is None else
               f"{percent(v.share)} of the time passes {between}: {what}"), why=why, evidence=evidence, action=action,
        snippet=snippet, per="recording", source=source("time_outside_steps.share"),
        gain=ONCE if v.claim is None else "assumes that this work overlaps with training or is removed")


def _often(part: WallPart) -> str:
    if part.every_steps:
        return f" (every {counted(part.every_steps, 'step')}, at most {seconds(part.longest_s)} each)"
    return f" ({part.count} times, at most {seconds(part.longest_s)} each)" if part.count > 1 else ""


def _fix(part: WallPart, job: Job) -> tuple[str, str | None]:
    stacks = code("time_outside_steps", "stacks")
    recognized = _WORK_OF_KIND.get(part.kind)
    if recognized is not None:
        return recognized.action, recognized.code(job)
    if part.kind == "workers":
        return FIRST_WORKERS, None
    if job.loop == PYTORCH and (part.kind == "input" or (part.kind in _UNNAMED and job.trains is not False)):
        return WORKERS_OR_SELDOM, code("input_bound", "torch")
    if part.kind == "input":
        return ODD_BATCH, None
    if part.id == _OUTSIDE and job.loop in KERAS:
        return _CALLBACKS, None
    if part.id == _OPEN and part.kind == "op":  # an op that any step may run
        return "Capture a longer trace to see whether such a step occurs again and what takes longer in it.", None
    if part.kind == "line" and "/" in part.what.partition(":")[0]:  # its package is shown of a library alone
        return "Find out what the library is waiting for here; its other threads may show that.", stacks
    if part.kind == "silent":
        return _OF_A_PROGRAM, None
    if part.what:
        return "Move this work out of the training loop to a background thread, or do it less often.", None
    return "Find out what the host does during this time, and move it out of the loop or do it less often.", stacks


class EvaluationShare(Verdict, frozen=True, kw_only=True):
    evaluation_s: float
    recorded_s: float
    loops: int
    every_steps: int | None
    training_s: float
    predicts: bool  # most of it does


def judge_evaluation_share(facts: TraceFacts) -> EvaluationShare | Missing | None:
    """A good part of the recorded time evaluates, beside training."""
    wall, steps = facts.analysis.wall_time, facts.analysis.steps
    if wall is None or steps is None:
        return Missing("training steps in addition to the evaluation")
    if steps.phase in (EVALUATION, PREDICTION):
        return Missing(f"training steps; all recorded steps are {steps.phase}")
    parts = [part for part in wall.parts if part.id in (EVALUATION, PREDICTION)]
    time_s = sum(part.time_s for part in parts)
    if not parts or time_s < limit("evaluation_share.share") * wall.recorded_s:
        return None
    share = time_s / wall.recorded_s
    longest = max(parts, key=lambda part: part.time_s)
    loops = sum(part.count for part in parts)
    return EvaluationShare(
        gpus=facts.active_numbers, share=share, claim="measured" if loops > 1 else None,
        severity=severity_by_limits("evaluation_share", share) if loops > 1 else "low",
        evaluation_s=time_s, recorded_s=wall.recorded_s, loops=loops, every_steps=longest.every_steps,
        training_s=sum(part.time_s for part in wall.parts if part.id == _STEPS), predicts=longest.id == PREDICTION)


_VALIDATE_LESS = "Validate less often or on fewer batches, if the results allow it: validation_freq, validation_steps."
_PREDICT_LESS = ("Predict less often, or for more samples in one call: a policy that acts can serve many environments "
                 "at once. If this is validation, run it less often or on fewer batches.")
_PREDICT_ONE = " For a single batch, use predict_on_batch(x), which creates no dataset, unlike predict()."


def describe_evaluation_share(v: EvaluationShare, job: Job) -> Explanation:
    often = f", every {counted(v.every_steps, 'step')}" if v.every_steps else ""
    what, more = ("Prediction", "") if v.predicts else ("Evaluation", " (validation)")
    why = (f"{what} took {seconds(v.evaluation_s)} of the {seconds(v.recorded_s)} recorded ({percent(v.share)}"
           f"{often}), and training steps took {seconds(v.training_s)}.")
    evidence = known({
        "evaluation_s": v.evaluation_s, "share_ratio": v.share, "recorded_s": v.recorded_s,
        "evaluations_count": float(v.loops), "every_training_steps": float(v.every_steps) if v.every_steps else None})
    in_keras = job.loop in KERAS
    action = _PREDICT_LESS + _PREDICT_ONE * in_keras if v.predicts else _VALIDATE_LESS if in_keras else (
        "Evaluate less often or on fewer batches, if the results allow it (validation frequency and size).")
    return Explanation(
        title=(f"One {what.lower()}{more} of {seconds(v.evaluation_s)} in this recording" if v.claim is None else
               f"{what}{more} takes {percent(v.share)} of the time{often}"), why=why, evidence=evidence,
        action=action, snippet=None if v.predicts else code("evaluation_share", *job.keys), per="recording",
        gain=ONCE if v.claim is None else f"assumes that no {what.lower()} runs",
        source=source("evaluation_share.share"))


class UnfinishedStep(Verdict, frozen=True, kw_only=True):
    part: WallPart
    recorded_s: float
    usual_s: float


def judge_unfinished_step(facts: TraceFacts) -> UnfinishedStep | Missing | None:
    """No step ends at the begin or the end of the recording for far longer than a step takes: one that had begun
    before, or that had not ended. Waits for a batch are those of input_bound."""
    wall, steps = facts.analysis.wall_time, facts.analysis.steps
    if wall is None or steps is None or steps.unit != "step" or steps.count < limit("unfinished_step.steps") or (
            steps.phase in (EVALUATION, PREDICTION)):  # their loop ends, and joins its results
        return Missing(f"{limit('unfinished_step.steps'):.0f} complete training steps to know how long a step takes")
    between = {same_work(part.kind, part.what) for part in wall.parts if part.id == _OUTSIDE}
    parts = [part for part in wall.parts if part.id == _OPEN and (
        part.kind == "unknown" or same_work(part.kind, part.what) not in between)]
    if not parts:
        return None
    part = max(parts, key=lambda part: part.time_s)
    share = part.time_s / wall.recorded_s
    # Steps that were recorded whole and took longer are judged by what is seen of them.
    if share < limit("time_outside_steps.share") or part.longest_s <= max(steps.durations_s, default=0.0):
        return None
    others = _of_others(facts, part, share)
    if others is not None:
        return Missing(others)
    spans = recorded_spans(facts, [part])
    if part.kind in _UNNAMED and facts.starts_of_workers(spans):
        part = structs.replace(part, kind="workers")
    return UnfinishedStep(gpus=facts.active_numbers, share=share, part=part, recorded_s=wall.recorded_s, spans=spans,
                          severity="medium" if share >= limit("unfinished_step.medium") else "low",
                          claim=None, usual_s=steps.median_s, culprits=_culprits([part]))


def describe_unfinished_step(v: UnfinishedStep, job: Job) -> Explanation:
    part, what = v.part, host_words(v.part)
    meanwhile = (f"Host activity during this time: {what}." if part.kind not in (*_UNNAMED, "line") else
                 f"Python runs {part.what} during this time." if part.kind == "line" else
                 "The thread of the training loop shows no event during this time.")
    action, snippet = _fix(part, job)
    return Explanation(
        title=f"No step ends during one stretch of {seconds(part.longest_s)} in this recording: {what}",
        why=(f"At the start or end of the recording, no step ends for {seconds(part.longest_s)}, while a typical step "
             f"takes {seconds(v.usual_s)}. A step or a wait takes at least this long, but its start or end was not "
             f"recorded. {meanwhile}"),
        evidence={"unfinished_s": part.time_s, "share_ratio": v.share, "recorded_s": v.recorded_s,
                  "usual_step_s": v.usual_s},
        action=action, snippet=snippet, gain=ONCE, per="recording", source=source("time_outside_steps.share"))


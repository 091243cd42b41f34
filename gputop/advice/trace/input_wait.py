"""The input pipeline: does the step wait for its next batch?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from msgspec.structs import replace

from gputop.advice.registry import limit, source
from gputop.advice.trace.facts import (
    TraceFacts,
    input_spans,
    on_host,
    recorded_spans,
    recorder_s,
    waits_for_input,
    without_recorder,
)
from gputop.advice.trace.input_fixes import FIRST_WORKERS, NEVER_EMPTY, InputFix
from gputop.advice.trace.input_pace import input_fix, slowest_by_name, waits_in_steps
from gputop.advice.trace.job import Job
from gputop.advice.trace.other_programs import may_be_others
from gputop.advice.verdict import ONCE, Explanation, Missing, Verdict
from gputop.analysis.host.gaps import ranked_work, work_in
from gputop.analysis.host.tf_data import iterator_paths
from gputop.analysis.results import SESSION_RUN, WallTime
from gputop.analysis.steps.long_steps import MIN_STEPS
from gputop.analysis.steps.training_loops import HANDED_OVER_NS, loads_itself, training_loops
from gputop.analysis.what_if.cure import Cure
from gputop.core.findings import HIGH_SHARE, MEDIUM_SHARE, Claim, Culprit
from gputop.text.units import percent, seconds
from gputop.trace.intervals import EMPTY, Spans, coverage, intersect, merge
from gputop.trace.threads import EXECUTOR, INPUT, MAIN, lines_of

_WORTH_NAMING = 0.01  # share of the waits
_MOST = 0.5  # share of the only step, with idle GPUs: a single wait is told, accident or not. gputop's own figure
_CERTAIN = 0.95  # of a share, if the profiler's work is that little of it
_ON_GPUS: Mapping[Claim, Claim] = {"at most": "at most", "about": "at most"}  # where freed CPUs save nothing


class InputBound(Verdict, frozen=True, kw_only=True):
    wait_ratio: float  # share of the loop's time in its calls for a batch, whether GPUs work meanwhile or not
    fix: InputFix
    slowest_stage: tuple[str, float] | None  # where the fix knows no costs: tf.data's longest stage and its seconds
    starts: Sequence[float] = ()  # seconds of each start of workers, if most of the wait is for their first batches
    open_s: float | None = None  # that the loop waits at the edges of the recording, for a batch that did not come
    recorded_s: float | None = None  # where the share is of that
    waited_s: float | None = None  # per step, with the profiler's work, where the share is without
    recording_s: float = 0.0  # that the profiler takes of the recorded waits; it is in no share


def judge_input_bound(facts: TraceFacts) -> InputBound | Missing | None:
    """The GPUs stand still while the training loop waits for a batch."""
    steps, share, wall = facts.steps, facts.shares["input"], facts.analysis.wall_time
    open_s = sum(part.time_s for part in wall.parts if part.id == "open" and part.kind == "input") if wall else 0.0
    is_open = wall is not None and open_s >= limit("input_bound.share") * wall.recorded_s
    if _is_odd_batch(facts, is_open=is_open):
        return Missing("a second long wait for a batch, because the first may be coincidence; capture a longer trace")
    if wall is not None and is_open:
        return _open_wait(facts, wall, open_s)
    single = steps is not None and steps.times.anchor != SESSION_RUN and max(  # else no accident
        steps.count, _waits_like(facts, share)) < limit("input_bound.steps")
    if single and (share < _MOST or not facts.active):
        return Missing("a second wait for a batch, because the first may be coincidence; capture a longer trace")
    if steps is not None and steps.inside and steps.call_ends_ns:  # predict() in each step waits for its own batches
        of_training = intersect(waits_for_input(facts), steps.call_spans)
        share = min(share, of_training.total / facts.analyzed_spans.total)
    least, waited_s = share, share * facts.period_s
    same_cpus = facts.framework == "pytorch" and not facts.active and loads_itself(facts.trace, facts.analyzed_spans)
    if same_cpus:
        share, least = without_recorder(facts, waited_s, waits_for_input(facts))
    # Of a recording with mostly single elements of tf.data, what recording costs is in the pipeline.
    elements = 2 * lines_of(facts.trace, INPUT)[facts.trace.host.line].sum() > len(facts.trace.host)
    more_s = wall.recording_s(steps.times.median_s) if wall is not None and steps is not None and elements else 0.0
    if more_s and share >= limit("input_bound.share"):
        share = least = max(waited_s - more_s, 0.0) / (facts.period_s - more_s)
        if share < limit("input_bound.share"):
            return Missing(f"a wait for batches that is longer than the {seconds(more_s)} that detailed recording adds "
                           "to a step")
    if share < limit("input_bound.share"):
        return None
    fix = input_fix(facts, share * facts.period_s)
    if fix.fast_enough and (reason := NEVER_EMPTY if fix.never_empty else may_be_others(facts, share, silent=False)):
        return Missing(reason)
    if (verdict := _verdict(facts, fix, share, {})).starts:
        return verdict
    saving = None if fix.step_s is None else min(max(1 - fix.step_s / facts.period_s, 0.0), share)
    left, assumes = 0.0, "Assumes that each batch is ready when the loop asks for it."
    if fix.step_s is not None:
        wait_s = share * facts.period_s
        left = min(max((fix.step_s - facts.period_s + wait_s) / wait_s, 0.0), 1.0)
        assumes = f"Assumes that {fix.how}. The wait for batches then falls by {percent(1 - left)}."
    claim = facts.on_cpus(fix.claim, _ON_GPUS.get(fix.claim, "measured"))
    counted = recorder_s(facts, waits_for_input(facts)) if least < _CERTAIN * share else 0.0
    counted = counted or min(more_s, waited_s)
    if single or ((counted or same_cpus) and claim == "measured"):
        # As the profiler's part is; and samples made ahead leave caches and memory to the step.
        claim = "at most" if single else "about"
    return replace(
        verdict, saving=saving, claim=claim, cure=Cure(input_left=left, assumes=assumes), waited_s=waited_s,
        severest="low" if least < MEDIUM_SHARE else "high", recording_s=counted)


def _is_odd_batch(facts: TraceFacts, *, is_open: bool) -> bool:
    """Return whether the loop waits long for one batch of many alone: such a step is long_steps', and one that did not
    end, whose wait ``is_open``, is unfinished_step's."""
    if facts.steps is None or facts.steps.count < MIN_STEPS:
        return False
    waits = intersect(waits_for_input(facts), facts.analyzed_spans)
    by_workers = facts.framework == "pytorch" and not loads_itself(facts.trace, facts.analyzed_spans)
    length = (waits.end - waits.start)[waits.end - waits.start >= by_workers * HANDED_OVER_NS]
    longest, least_ns = length.max(initial=0), limit("input_bound.share") * facts.analyzed_spans.total
    left = length.sum() - longest
    return bool(left < (2 * least_ns if longest > left else least_ns) and (is_open or length.sum() >= least_ns))


def _open_wait(facts: TraceFacts, wall: WallTime, open_s: float) -> InputBound:
    """The loop waits at an edge of the recording, far longer than in its steps: all waits, as a share of the time."""
    wait_s = facts.shares["input"] * facts.period_s * facts.steps_or_window + open_s
    opened = recorded_spans(facts, [part for part in wall.parts if part.id == "open" and part.kind == "input"])
    verdict = _verdict(facts, input_fix(facts, wait_s), min(wait_s / wall.recorded_s, 1.0), opened)
    return replace(verdict, open_s=open_s, recorded_s=wall.recorded_s)


def _verdict(facts: TraceFacts, fix: InputFix, share: float, opened: Mapping[int, Spans]) -> InputBound:
    waited = facts.analysis.input
    assert waited is not None
    spans = {gpu: merge(waits, opened.get(gpu, EMPTY)) for gpu, waits in input_spans(facts).items()}
    if starts := facts.starts_of_workers(spans):
        fix = InputFix(FIRST_WORKERS, tells=" Most of this is the wait for a first batch after workers start, which "
                                            "more workers do not make shorter.")
    stage = slowest_by_name(waited.stages) if not fix.tells else None
    return InputBound(culprits=_culprits(facts, fix, stage), gpus=facts.active_numbers, share=share, fix=fix,
                      spans=spans, wait_ratio=waited.wait_ratio, starts=starts, claim=None if starts else "measured",
                      severity=None if not starts else "medium" if share >= HIGH_SHARE else "low",
                      slowest_stage=None if stage is None else (stage, waited.stages[stage]))


def _culprits(facts: TraceFacts, fix: InputFix, stage: str | None) -> tuple[Culprit, ...]:
    """The slowest stage of tf.data, in its call that lies longest in waits; of loops that load by themselves what runs
    in the waits."""
    trace, waits = facts.trace, waits_for_input(facts)
    loads = any(loop.line >= 0 for loop in training_loops(trace))
    stage = fix.stage.rpartition("::")[2] if fix.stage else stage
    if loads or stage is None:
        of_loop = (MAIN,) if loads or facts.framework == "pytorch" else (MAIN, EXECUTOR)
        time_by_name = work_in(trace, waits, lines_of(trace, *of_loop))[0]
        work = [item for item in ranked_work(time_by_name, facts.steps_or_window * max(len(facts.trace.hosts), 1))
                if item.s_per_step * 1e9 * facts.steps_or_window >= _WORTH_NAMING * waits.total]
        named = on_host(facts, work, waits)
        return tuple(replace(one, kind="stage") for one in named) if loads and facts.framework != "pytorch" else named
    rows, path, paths = iterator_paths(trace)
    chosen = np.array([text == fix.stage if fix.stage else text.rpartition("::")[2] == stage for text in paths], bool)
    rows = rows[chosen[path]]
    inside = coverage(waits, trace.host.start_ns[rows], trace.host.end_ns[rows])
    longest_s = int(trace.host.start_ns[rows[inside.argmax()]]) / 1e9 if inside.any() else None
    return (Culprit(stage, "stage", (fix.numbers or {}).get("slowest_stage_s"), facts.basis, at_s=longest_s),)


def _waits_like(facts: TraceFacts, share: float) -> int:
    """Number of a loop's waits in the window, incomplete steps included, of at least half of its wait for each batch of
    a step; the loop that did so most often."""
    each_ns = share * facts.period_s * 1e9 / max(waits_in_steps(facts), 1)
    return max((int((loop.waits.end - loop.waits.start >= 0.5 * each_ns).sum())
                for loop in training_loops(facts.trace)), default=0)


def describe_input_bound(v: InputBound, job: Job) -> Explanation:
    basis = "recorded time" if v.open_s else job.basis
    evidence = {"wait_s": v.waited_s or v.share * (v.recorded_s or job.period_s), "share_ratio": v.share,
                "get_next_ratio": v.wait_ratio}
    loop = "loop" if job.trains is False else "training loop"
    why = f"The {loop} waits for its next batch for {percent(v.share)} of the {basis}"
    why += " while no GPU has work." if v.gpus else " (the trace has no GPU)."
    if v.open_s and not v.starts:
        evidence["unfinished_s"] = v.open_s
        why += (f" The wait includes {seconds(v.open_s)} at the start or end of the recording, during which no batch "
                "arrived, so the actual wait is longer.")
    why += v.fix.tells
    if v.recording_s:
        evidence["recording_s"] = v.recording_s
        why += f" About {seconds(v.recording_s)} of profiler overhead in these waits is not counted."
    if v.slowest_stage is not None and job.framework != "pytorch":
        evidence["slowest_stage_s"] = v.slowest_stage[1]
        why += f" tf.data spends most of its time in its {v.slowest_stage[0]} stage."
    evidence.update(v.fix.numbers or {})
    gain = "assumes that every batch is ready in time"
    if job.framework == "pytorch" and v.gpus:
        gain += "; handing over large batches from workers and pinning them also takes time"
    if v.fix.step_s is not None:
        gain = f"assumes that the step then takes as long as its slowest remaining part, and that {v.fix.how}"
    title = f"Input wait takes {percent(v.share)} of the {basis}"
    if v.starts:
        times, gain = "once", ONCE
        if len(v.starts) > 1:
            times, gain = f"{len(v.starts)} times", "capture a longer trace to see how often workers start"
        title = (f"The DataLoader takes {seconds(sum(v.starts))} to start its workers and load a first batch, {times} "
                 "in this recording")
    return Explanation(
        title=title, why=why, evidence=evidence,
        action=v.fix.action, snippet=v.fix.snippet, gain=gain, per="recording" if v.open_s or v.starts else "step",
        source=source("input_bound.share"))

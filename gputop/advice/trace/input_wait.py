"""The input pipeline: does the step wait for its next batch?"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from msgspec.structs import replace

from gputop.advice.fix_code import code
from gputop.advice.registry import limit, source
from gputop.advice.trace.cpus import may_be_others
from gputop.advice.trace.facts import TraceFacts, loads_itself, new_workers, on_host, waits_for_input
from gputop.advice.trace.input_fixes import (
    KEEP_WORKERS,
    MOST_TO_EXPECT,
    InputFix,
    fix_of_loader,
    keras_workers,
    suggest_fix,
    suggest_fix_by_name,
)
from gputop.advice.trace.job import KERAS2, KERAS3, Job, training_loop
from gputop.advice.verdict import Explanation, Missing, Verdict
from gputop.analysis.host.gaps import ranked_work, work_in
from gputop.analysis.host.launch_threads import cpu_budget
from gputop.analysis.host.tf_data import iterator_paths, python_s
from gputop.analysis.results import WallTime
from gputop.analysis.steps.long_steps import MIN_STEPS
from gputop.analysis.steps.membership import in_steps
from gputop.analysis.steps.step_marks import SESSION_RUN
from gputop.analysis.steps.training_loops import training_loops
from gputop.analysis.what_if.cure import Cure
from gputop.core.findings import Claim, Culprit
from gputop.text.units import percent, seconds
from gputop.trace.intervals import EMPTY, coverage, intersect, merge, subtract
from gputop.trace.threads import EXECUTOR, MAIN, lines_of

_WORTH_NAMING = 0.01  # share of the waits
_KERAS = {KERAS2: 2, KERAS3: 3}  # generations
_ROWS = ("aten::select", "aten::as_strided", "aten::stack", "aten::unsqueeze", "aten::cat")  # x[i], and torch.stack
# Ops that compute nothing: views and copies of a row.
_OF_ROWS = frozenset((*_ROWS, *(f"aten::{name}" for name in (
    "slice", "narrow", "view", "reshape", "squeeze", "expand", "permute", "transpose", "detach", "alias", "empty",
    "clone", "copy_", "to", "_to_copy", "lift_fresh", "index", "item", "_local_scalar_dense", "resize_"))))
# Share of the waits, and rows of a batch, from which these are worth it; the rest is Python around them. gputop's own
# figures.
_MOSTLY_ROWS, _MANY_ROWS = 0.4, 64
_ON_GPUS: Mapping[Claim, Claim] = {"at most": "at most", "about": "at most"}  # where freed CPUs save nothing
_WORKERS = 8  # to begin with, where the CPUs are not known
_CPUS_FULL_RATIO = 0.9  # share of the CPUs that are busy; above it no further worker finds one


class InputBound(Verdict, frozen=True, kw_only=True):
    wait_ratio: float  # share of the loop's time in its calls for a batch, whether GPUs work meanwhile or not
    fix: InputFix
    slowest_stage: tuple[str, float] | None  # where the fix knows no costs: tf.data's longest stage and its seconds
    open_s: float | None = None  # that the loop waits at the edges of the recording, for a batch that did not come
    recorded_s: float | None = None  # where the share is of that


def judge_input_bound(facts: TraceFacts) -> InputBound | Missing | None:
    """The GPUs stand still while the training loop waits for a batch."""
    assert facts.shares is not None
    steps, share, wall = facts.steps, facts.shares["input"], facts.analysis.wall_time
    open_s = sum(part.time_s for part in wall.parts if part.id == "open" and part.kind == "input") if wall else 0.0
    if (odd := _odd_batch(facts)) is not None:
        return odd
    if wall is not None and open_s >= limit("input_bound.share") * wall.recorded_s:
        return _open_wait(facts, wall, open_s)
    # A single wait may be an accident; several in one long step, or one more in a step that is not whole, are none.
    if steps is not None and steps.times.anchor != SESSION_RUN and max(
            steps.count, _waits_like(facts, share)) < limit("input_bound.steps"):
        return Missing("a second wait for a batch, because one can be chance: capture longer")
    if steps is not None and steps.inside and steps.call_ends_ns:  # predict() in each step waits for its own batches
        of_training = intersect(waits_for_input(facts), steps.call_spans)
        share = min(share, of_training.total / facts.analyzed_spans.total)
    if share < limit("input_bound.share"):
        return None
    fix = _input_fix(facts, share * facts.period_s)
    others = may_be_others(facts, share, silent=False) if fix.fast_enough else None
    if others is not None:
        return Missing(others)
    saving = None if fix.step_s is None else min(max(1 - fix.step_s / facts.period_s, 0.0), share)
    left, assumes = 0.0, "Each batch is ready when the loop asks for it."
    if fix.step_s is not None:
        wait_s = share * facts.period_s
        left = min(max((fix.step_s - facts.period_s + wait_s) / wait_s, 0.0), 1.0)
        assumes = f"{fix.how[:1].upper()}{fix.how[1:]}: {percent(1 - left)} less waiting for batches."
    return replace(
        _verdict(facts, fix, share), saving=saving, claim=facts.on_cpus(fix.claim, _ON_GPUS.get(fix.claim, "measured")),
        cure=Cure(input_left=left, assumes=assumes))


def _odd_batch(facts: TraceFacts) -> Missing | None:
    """The loop waits long for one batch of many alone: such a step is long_steps', and one that did not end is
    unfinished_step's."""
    if facts.steps is None or facts.steps.count < MIN_STEPS:
        return None
    waits = intersect(waits_for_input(facts), facts.analyzed_spans)
    others = waits.total - int((waits.end - waits.start).max(initial=0))
    if others >= limit("input_bound.share") * facts.analyzed_spans.total:
        return None
    return Missing("a second long wait for a batch, because one can be chance: capture longer")


def _open_wait(facts: TraceFacts, wall: WallTime, open_s: float) -> InputBound:
    """The loop waits at an edge of the recording, far longer than in its steps: all waits, as a share of the time."""
    assert facts.shares is not None
    wait_s = facts.shares["input"] * facts.period_s * facts.steps_or_window + open_s
    verdict = _verdict(facts, _input_fix(facts, wait_s), min(wait_s / wall.recorded_s, 1.0))
    return replace(verdict, open_s=open_s, recorded_s=wall.recorded_s)


def _verdict(facts: TraceFacts, fix: InputFix, share: float) -> InputBound:
    waited = facts.analysis.input
    assert waited is not None
    stage = _slowest_by_name(waited.stages) if not fix.tells else None
    return InputBound(culprits=_culprits(facts, fix, stage), gpus=facts.active_numbers, share=share, fix=fix,
                      wait_ratio=waited.wait_ratio,
                      slowest_stage=None if stage is None else (stage, waited.stages[stage]))


def paced_by_input(facts: TraceFacts) -> float | None:
    """Seconds that the input pipeline takes for the batches of a step, where the steps follow one another at its pace:
    it works beside them and is never ahead. What else the loop does meanwhile costs no time. None where that is not
    so, or not known."""
    if facts.shares is None or facts.steps is None or facts.shares["input"] < limit("input_bound.share"):
        return None
    fix = _input_fix(facts, facts.shares["input"] * facts.period_s)
    if fix.beside_s is None or (fix.numbers or {}).get("buffer_empty_ratio", 0.0) < limit("input_bound.empty"):
        return None
    return fix.beside_s


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
    each_ns = share * facts.period_s * 1e9 / max(_waits_in_steps(facts), 1)
    return max((int((loop.waits.end - loop.waits.start >= 0.5 * each_ns).sum())
                for loop in training_loops(facts.trace)), default=0)


def _waits_in_steps(facts: TraceFacts) -> int:
    """Number of a loop's waits for a batch within the steps: the loop that did so most often."""
    if facts.steps is None:
        return 0
    return max((int(in_steps(loop.waits.start, facts.steps).sum()) for loop in training_loops(facts.trace)), default=0)


def _slowest_by_name(stages: Mapping[str, float]) -> str | None:
    """The stage with by far the most self time; None where two are about equal: self time holds waiting, too, so that
    little between them tells nothing."""
    first, second, *_ = *sorted(stages.values(), reverse=True), 0.0, 0.0
    if not first or second > limit("input_bound.second_stage") * first:
        return None
    return max(stages, key=lambda name: stages[name])


def _input_fix(facts: TraceFacts, wait_s: float) -> InputFix:
    """Fix by the pipeline with the longest waits; in general terms where the trace does not show its stages."""
    if facts.framework == "pytorch":
        return _loader_fix(facts)
    if any(loop.line >= 0 for loop in training_loops(facts.trace)):
        return InputFix(*fix_of_loader("grain"), None, "", tells=" grain makes it when the loop asks for it.")
    waited, steps = facts.analysis.input, facts.steps
    if waited is None:
        return suggest_fix_by_name(None)
    pipeline = next((pipeline for pipeline in waited.pipelines if pipeline.batches), None)
    fix = None
    if pipeline is not None and steps is not None:
        per_step = max(steps.times.iterations_per_step, _waits_in_steps(facts) / steps.count)
        fix = suggest_fix(pipeline, facts.period_s, wait_s, per_step, cpu_budget(facts.trace),
                          python_s(facts.trace), facts.trace.job_cpus)
    fix = fix or suggest_fix_by_name(_slowest_by_name(waited.stages), prefetches=any(
        stage.name.startswith("Prefetch") for other in waited.pipelines for stage in other.stages))
    keras = _KERAS.get(training_loop(facts))
    return fix if keras is None else keras_workers(fix, pipeline, keras)


def _loader_fix(facts: TraceFacts) -> InputFix:
    """PyTorch's DataLoader: workers where it has none, more of them where CPUs are free for them."""
    cpus, anew = facts.trace.job_cpus, new_workers(facts)
    workers = _WORKERS if cpus is None else max(1, min(_WORKERS, int(cpus.limit)))
    snippet = code("input_bound", "torch" if facts.trace.gpus else "torch-cpu", WORKERS=workers)
    if loads_itself(facts):
        rows = _rows_per_batch(facts)
        if rows >= _MANY_ROWS:
            return InputFix(
                "Take a whole batch from the tensors at once: let a BatchSampler choose the rows, with batch_size=None."
                " Workers would copy row by row as well.", code("input_bound", "rows"), None, "",
                tells=f" The DataLoader takes {rows:,.0f} rows of a batch from tensors one by one, and stacks them "
                      "again.")
        return InputFix(fix_of_loader("torch")[0], snippet, None, "",
                        tells=" The DataLoader loads each batch in the training process (num_workers=0).")
    waits = merge(EMPTY, *(loop.waits for loop in training_loops(facts.trace)))
    if anew.total >= subtract(waits, anew).total:
        return InputFix(
            KEEP_WORKERS, snippet, None, "",
            tells=f" The DataLoader starts its workers anew for each pass over its data, {len(anew.start)} times in "
                  f"this recording; from the last batch to the next one that takes "
                  f"{seconds(anew.total / len(anew.start) / 1e9)}.")
    if cpus is not None and cpus.busy is not None and cpus.busy >= _CPUS_FULL_RATIO * cpus.allowed:
        children = cpus.children or 0.0
        tells = (f" Its workers keep {children:.2g} of {cpus.allowed:.3g} CPUs busy, and no CPU is idle."
                 if children >= 0.5 * (cpus.programs or 0.0) > 0 else f" None of the {cpus.allowed:.3g} CPUs is idle.")
        return InputFix(
            "More workers would wait for CPUs: make a sample cheaper (decode, tokenize and resize once, and store the "
            "result), or give the job more CPUs. More workers than CPUs only cost memory and switching.", snippet,
            None, "", tells=tells)
    return InputFix("Give the DataLoader more workers and let them run ahead.", snippet, None, "")


def _rows_per_batch(facts: TraceFacts) -> float:
    """Number of rows that the training process takes from tensors for a batch, one by one; 0 where that and stacking
    them is the smaller part of its waits, or where it also computes with what it takes: then it makes samples."""
    waits = waits_for_input(facts)
    work = work_in(facts.trace, waits, lines_of(facts.trace, MAIN))[0]
    time = sum(work.get(name, (0, 0))[0] for name in _ROWS)
    batches = max(_waits_in_steps(facts), 1)
    computes = any(calls >= _MANY_ROWS * batches for name, (_, calls) in work.items()
                   if name.startswith("aten::") and name not in _OF_ROWS)
    return work.get(_ROWS[0], (0, 0))[1] / batches if time >= _MOSTLY_ROWS * waits.total and not computes else 0.0


def describe_input_bound(v: InputBound, job: Job) -> Explanation:
    basis = "recorded time" if v.open_s else job.basis
    evidence = {"wait_s": v.share * (v.recorded_s or job.period_s), "share_ratio": v.share,
                "get_next_ratio": v.wait_ratio}
    loop = "loop" if job.trains is False else "training loop"
    why = f"For {percent(v.share)} of the {basis} the {loop} waits for its next batch"
    why += " and no GPU has work." if v.gpus else "; the trace has no GPU."
    if v.open_s:
        evidence["unfinished_s"] = v.open_s
        why += (f" {seconds(v.open_s)} of it are at the start or the end of the recording: that batch did not come "
                "while gputop recorded, so the wait is longer.")
    why += v.fix.tells
    if v.slowest_stage is not None and job.framework != "pytorch":
        evidence["slowest_stage_s"] = v.slowest_stage[1]
        why += f" tf.data spends most of its time in its stage {v.slowest_stage[0]}."
    evidence.update(v.fix.numbers or {})
    gain = "all input wait while no GPU works, if every batch were ready in time"
    if job.framework == "pytorch" and v.gpus:
        gain += "; to hand large batches over from workers, and to pin them, takes time as well"
    if v.fix.step_s is not None:
        how = v.fix.how.replace(MOST_TO_EXPECT, "") if v.claim in ("at least", "about") else v.fix.how
        gain = f"the step then takes as long as its slowest remaining part, assuming that {how}"
    return Explanation(
        title=f"Input wait takes {percent(v.share)} of the {basis}", why=why, evidence=evidence,
        action=v.fix.action, snippet=v.fix.snippet, gain=gain, per="recording" if v.open_s else "step",
        source=source("input_bound.share"),
    )

"""The fix for the input of a job, and whether the input sets the pace of the steps."""

from __future__ import annotations

from collections.abc import Mapping

from gputop.advice.fix_code import code
from gputop.advice.registry import limit
from gputop.advice.trace.facts import TraceFacts, new_workers, waits_for_input
from gputop.advice.trace.input_fixes import (
    CHEAPER,
    KEEP_WORKERS,
    InputFix,
    fix_of_loader,
    keras_workers,
    suggest_fix,
    suggest_fix_by_name,
)
from gputop.advice.trace.job import KERAS2, KERAS3, training_loop
from gputop.analysis.host.gaps import work_in
from gputop.analysis.host.launch_threads import cpu_budget
from gputop.analysis.host.tf_data import python_s
from gputop.analysis.steps.membership import in_steps
from gputop.analysis.steps.training_loops import loads_itself, training_loops
from gputop.text.units import counted_cpus, seconds
from gputop.trace.intervals import EMPTY, merge, uncovered
from gputop.trace.threads import MAIN, lines_of

_KERAS = {KERAS2: 2, KERAS3: 3}  # generations
_ROWS = ("aten::select", "aten::as_strided", "aten::stack", "aten::unsqueeze", "aten::cat")  # x[i], and torch.stack
# Ops that compute nothing: views and copies of a row.
_OF_ROWS = frozenset((*_ROWS, *(f"aten::{name}" for name in (
    "slice", "narrow", "view", "reshape", "squeeze", "expand", "permute", "transpose", "detach", "alias", "empty",
    "clone", "copy_", "to", "_to_copy", "lift_fresh", "index", "item", "_local_scalar_dense", "resize_"))))
# Share of the waits, and rows of a batch, from which these are worth it; the rest is Python around them. gputop's own
# figures.
_MOSTLY_ROWS, _MANY_ROWS = 0.4, 64
_WORKERS = 8  # to begin with, where the CPUs are not known
_CPUS_FULL_RATIO = 0.9  # share of the CPUs that are busy; above it no further worker finds one


def paced_by_input(facts: TraceFacts) -> float | None:
    """Seconds that the input pipeline takes for the batches of a step, where the steps follow one another at its pace:
    it works beside them and is never ahead. What else the loop does meanwhile costs no time. None where that is not
    so, or not known."""
    input_share = facts.shares.get("input", 0.0)
    if facts.steps is None or input_share < limit("input_bound.share"):
        return None
    fix = input_fix(facts, input_share * facts.period_s)
    if fix.beside_s is None or (fix.numbers or {}).get("buffer_empty_ratio", 0.0) < limit("input_bound.empty"):
        return None
    return fix.beside_s


def waits_in_steps(facts: TraceFacts) -> int:
    """Number of a loop's waits for a batch within the steps: the loop that did so most often."""
    if facts.steps is None:
        return 0
    return max((int(in_steps(loop.waits.start, facts.steps).sum()) for loop in training_loops(facts.trace)), default=0)


def slowest_by_name(stages: Mapping[str, float]) -> str | None:
    """The stage with by far the most self time; None where two are about equal: self time holds waiting, too, so that
    little between them tells nothing."""
    first, second, *_ = *sorted(stages.values(), reverse=True), 0.0, 0.0
    if not first or second > limit("input_bound.second_stage") * first:
        return None
    return max(stages, key=lambda name: stages[name])


def input_fix(facts: TraceFacts, wait_s: float) -> InputFix:
    """Fix by the pipeline with the longest waits; in general terms where the trace does not show its stages."""
    if facts.framework == "pytorch":
        return _loader_fix(facts, wait_s)
    if any(loop.line >= 0 for loop in training_loops(facts.trace)):
        return InputFix(*fix_of_loader("grain"), tells=" grain prepares batches only when the loop asks.")
    waited, steps = facts.analysis.input, facts.steps
    if waited is None:
        return suggest_fix_by_name(None)
    pipeline = next((pipeline for pipeline in waited.pipelines if pipeline.batches), None)
    fix = None
    if pipeline is not None and steps is not None:
        per_step = max(steps.times.iterations_per_step, waits_in_steps(facts) / steps.count)
        fix = suggest_fix(pipeline, facts.period_s, wait_s, per_step, cpu_budget(facts.trace),
                          python_s(facts.trace), facts.trace.job_cpus)
    fix = fix or suggest_fix_by_name(slowest_by_name(waited.stages), prefetches=any(
        stage.name.startswith("Prefetch") for other in waited.pipelines for stage in other.stages))
    keras = _KERAS.get(training_loop(facts))
    return fix if keras is None else keras_workers(fix, pipeline, keras)


def _loader_fix(facts: TraceFacts, wait_s: float) -> InputFix:
    """PyTorch's DataLoader: workers where it has none, more of them where CPUs are free for them."""
    cpus, anew = facts.trace.job_cpus, new_workers(facts)
    workers = _WORKERS if cpus is None else max(1, min(_WORKERS, int(cpus.limit)))
    key = "torch" if facts.trace.gpus else "torch-cpu"
    snippet = code("input_bound", key, WORKERS=workers)
    if loads_itself(facts.trace, facts.analyzed_spans):
        rows = _rows_per_batch(facts)
        if rows >= _MANY_ROWS:
            return InputFix(
                "Take a whole batch from the tensors in one op: let a BatchSampler choose the rows, with "
                "batch_size=None. Workers would also copy row by row.", code("input_bound", "rows"),
                tells=f" The DataLoader takes the {rows:,.0f} rows of a batch from tensors one by one and stacks them "
                      "again.")
        tells = " The DataLoader loads each batch in the training process (num_workers=0)"
        by_job = cpus is not None and (cpus.used or 0.0) >= _CPUS_FULL_RATIO * cpus.limit
        if cpus is not None and cpus.limit < 2 and (by_job or (cpus.busy or 0.0) >= _CPUS_FULL_RATIO * cpus.allowed):
            busy = f"the job keeps the {counted_cpus(cpus.limit)} that it may use busy" if by_job else "no CPU is idle"
            return InputFix(*fix_of_loader("torch", one_cpu=True), tells=f"{tells}, and {busy}.")
        # As for tf.data: the CPU time of a step stays, on the CPUs that are free to the job.
        floor_s = facts.period_s * cpus.used / cpus.free if cpus is not None and cpus.used is not None else 0.0
        step_s = min(max(facts.period_s - wait_s, wait_s / workers, floor_s), facts.period_s)
        return InputFix(fix_of_loader("torch")[0], snippet, step_s, tells=f"{tells}.",
                        how=f"each of {workers} workers is as fast as the training process now")
    waits = merge(EMPTY, *(loop.waits for loop in training_loops(facts.trace)))
    if anew.total >= uncovered(waits, anew):
        return InputFix(
            KEEP_WORKERS, snippet,
            tells=f" The DataLoader restarts its workers for each pass over its data ({len(anew.start)} times in this "
                  f"recording), so the time from the last batch of a pass to the next batch is "
                  f"{seconds(anew.total / len(anew.start) / 1e9)}.")
    if cpus is not None and cpus.busy is not None and cpus.busy >= _CPUS_FULL_RATIO * cpus.allowed:
        children = cpus.children or 0.0
        tells = (f" The DataLoader workers keep {children:.2g} of {cpus.allowed:.3g} CPUs busy, and no CPU is idle."
                 if children >= 0.5 * (cpus.programs or 0.0) > 0 else f" None of the {cpus.allowed:.3g} CPUs is idle.")
        return InputFix(
            f"{CHEAPER} More workers would only wait for CPUs and cost memory and context switches.", snippet,
            tells=tells)
    # How many there are and how long each takes for a batch, a trace does not show.
    return InputFix("Give the DataLoader more workers, and let them prepare batches ahead of time.",
                    code("input_bound", key, WORKERS="2 * num_workers"), claim="at most")


def _rows_per_batch(facts: TraceFacts) -> float:
    """Number of rows that the training process takes from tensors for a batch, one by one; 0 where that and stacking
    them is the smaller part of its waits, or where it also computes with what it takes: then it makes samples."""
    waits = waits_for_input(facts)
    work = work_in(facts.trace, waits, lines_of(facts.trace, MAIN))[0]
    time = sum(work.get(name, (0, 0))[0] for name in _ROWS)
    batches = max(waits_in_steps(facts), 1)
    computes = any(calls >= _MANY_ROWS * batches for name, (_, calls) in work.items()
                   if name.startswith("aten::") and name not in _OF_ROWS)
    return work.get(_ROWS[0], (0, 0))[1] / batches if time >= _MOSTLY_ROWS * waits.total and not computes else 0.0

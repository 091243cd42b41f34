"""The input pipeline: does the step wait for its next batch?"""

from __future__ import annotations

from gputop.advice.registry import limit, source
from gputop.advice.trace.facts import HOST_EVENTS, TraceFacts
from gputop.advice.trace.input_fixes import InputFix, suggest_fix, suggest_fix_by_name
from gputop.analysis.host.launch_threads import cpu_budget
from gputop.core.findings import Abstained, Finding, Gain
from gputop.text.units import percent

_LOADER = InputFix(
    "Give the DataLoader more workers and let them run ahead.",
    "DataLoader(..., num_workers=8, prefetch_factor=4, persistent_workers=True, pin_memory=True)", None, "")


def input_bound(facts: TraceFacts) -> Finding | Abstained | None:
    """The GPUs stand still while the training loop waits for a batch."""
    waited = facts.analysis.input
    if waited is None:
        return Abstained("input_bound", "the training loop's calls for a batch " + (
            "(enumerate(DataLoader)), which torch.profiler records with ProfilerActivity.CPU"
            if facts.framework == "pytorch" else
            f"(tf.data's IteratorGetNext){HOST_EVENTS}"))
    if facts.shares is None:
        return Abstained("input_bound", (
            "GPU activity: whether the GPUs stand still while the loop waits for a batch; see `gputop doctor` for the "
            "right to profile"))
    steps = facts.analysis.steps
    if steps is not None and steps.count < limit("input_bound.steps"):
        return Abstained("input_bound", "a second whole step: one wait can be an accident; capture longer")
    share = facts.shares["input"]
    if share < limit("input_bound.share"):
        return None
    wait_s = share * facts.period_s
    evidence = {"wait_s": wait_s, "share_ratio": share, "get_next_ratio": waited.wait_ratio}
    why = f"For {percent(share)} of the {facts.basis} the training loop waits for its next batch"
    why += " and no GPU has work." if facts.active else "; the trace has no GPU."
    found = _input_fix(facts, wait_s)
    if found.tells:
        why += found.tells
    elif stage := next(iter(waited.stages), None):
        evidence["slowest_stage_s"] = waited.stages[stage]
        why += f" Most of tf.data's time goes into its stage {stage}."
    evidence.update(found.numbers or {})
    gain, how = share, "all waiting for input while no GPU works, if every batch were ready when asked for"
    if found.step_s is not None:
        gain = min(max(1 - found.step_s / facts.period_s, 0.0), share)
        how = f"the step follows its slowest part that is left, assuming that {found.how}"
    return Finding(
        id="input_bound", severity=facts.capped_severity(share),
        title=f"Waits for input {percent(share)} of the {facts.basis}",
        why=facts.with_caveat(why), evidence=evidence, action=found.action, snippet=found.snippet, gain=Gain(gain, how),
        gpus=tuple(gpu.gpu for gpu in facts.active), source=source("input_bound.share"),
    )


def _input_fix(facts: TraceFacts, wait_s: float) -> InputFix:
    """By the pipeline waited for most; in general terms where the trace does not show its stages."""
    if facts.framework == "pytorch":
        return _LOADER
    waited, steps = facts.analysis.input, facts.analysis.steps
    if waited is None:
        return suggest_fix_by_name(None)
    pipeline = next((pipeline for pipeline in waited.pipelines if pipeline.batches), None)
    found = None
    if pipeline is not None and steps is not None:
        found = suggest_fix(pipeline, facts.period_s, wait_s, steps.iterations_per_step, cpu_budget(facts.trace))
    return found or suggest_fix_by_name(next(iter(waited.stages), None))

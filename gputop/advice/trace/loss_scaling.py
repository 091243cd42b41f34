"""Kernels and waits that dynamic loss scaling adds to a step in mixed precision."""

from __future__ import annotations

import numpy as np

from gputop.advice import savings
from gputop.advice.fix_code import code
from gputop.advice.registry import limit, source
from gputop.advice.trace.copy_costs import cost_of_calls
from gputop.advice.trace.facts import TraceFacts
from gputop.advice.trace.job import Job
from gputop.advice.verdict import Explanation, Verdict
from gputop.analysis.layers.culprits import Events
from gputop.analysis.what_if.cure import Cure
from gputop.analysis.what_if.host_waits import host_waits
from gputop.text.units import percent, reads_zero
from gputop.trace.intervals import overlap, union
from gputop.trace.lookups import name_mask
from gputop.trace.model import Kind

_CHECK = r"(?is).*(?:loss_?scal|amp_update_scale|amp_non_finite|multi_tensor_unscale)"
_CHECK_WORDS = ("lossscal", "loss_scal", "amp_update_scale", "amp_non_finite", "multi_tensor_unscale")
_FINITE = r"(?is).*(?:is_?(?:all_)?finite|all_?finite)"
_HAVE_BF16 = (8, 0)
_FUSED = {"tensorflow": ", and let XLA fuse the checks", "jax": ", inside the jitted step"}


class LossScaling(Verdict, frozen=True, kw_only=True):
    checks_s: float  # scaling, unscaling and checking gradients on the GPU, per step and GPU
    verdict_wait_s: float  # the GPU idle until the host knows whether all gradients are finite
    kernels: int
    has_bf16: bool | None  # None: the compute capability is not known


def judge_loss_scaling(facts: TraceFacts) -> LossScaling | None:
    """Dynamic loss scaling checks and scales every gradient, and makes the host wait for the verdict."""
    device, judged, table = facts.trace.device, facts.analyzed_spans, facts.analysis.kernels
    mask = name_mask(facts.trace, _CHECK, _CHECK_WORDS)
    if mask.take(device.tf_op).any() or (table is not None and any(row.types.get("fp16") for row in table.by_name)):
        mask = mask | name_mask(facts.trace, _FINITE, ("finite",))
    hit = np.asarray(mask.take(device.tf_op) | mask.take(device.name), bool)
    if not hit.any():
        return None
    # The predicate's copy: what the GPU stands still for after it.
    copied = np.flatnonzero(hit & (device.kind >= Kind.H2D) & (device.kind <= Kind.COPY_OTHER))
    waits = host_waits(facts.trace, limit("copies_pageable.bytes")).chosen(copied)
    cost = cost_of_calls(facts, waits.calls)
    checks_ns = kernels = 0
    for timeline in facts.gpu_timelines:
        checking = timeline.rows[hit[timeline.events]]
        checks_ns += overlap(union(device.start_ns[checking], device.end_ns[checking]), judged)
        kernels += int((device.kind[checking] == Kind.COMPUTE).sum())
    per = len(facts.gpu_timelines) * facts.steps_or_window
    share = savings.removed(checks_ns / 1e9 / per + cost.seconds(facts), facts.period_s)
    if share < limit("loss_scaling.share"):
        return None
    capability = facts.least_capability
    return LossScaling(
        gpus=facts.active_numbers, share=share, spans=cost.idle, checks_s=checks_ns / 1e9 / per,
        verdict_wait_s=cost.seconds(facts), kernels=kernels, events=Events(np.flatnonzero(hit)),
        has_bf16=None if capability is None else capability >= _HAVE_BF16,
        cure=Cure(scaled=((np.flatnonzero(hit), 0.0),), calls=waits.calls, assumes=(
            "Assumes that gradients are neither scaled nor checked, and the host does not wait for the result.")))


def describe_loss_scaling(v: LossScaling, job: Job) -> Explanation:
    why = (f"Scaling, unscaling, and checking gradients take {percent(v.checks_s / job.period_s)} of the "
           f"{job.basis} on the GPU")
    why += (f", and the GPU waits another {percent(v.verdict_wait_s / job.period_s)} for the host to read the result."
            if not reads_zero(v.verdict_wait_s / job.period_s) else ".")
    action = {
        True: "Train in BF16, whose range makes loss scaling unnecessary.",
        False: f"Use a static loss scale once you know a value that works{_FUSED.get(job.framework, '')}.",
        None: "Train in BF16, which needs no loss scaling (Ampere and newer), or use a static loss scale.",
    }[v.has_bf16]
    return Explanation(
        title=f"Dynamic loss scaling takes {percent(v.share)} of the {job.basis}", why=why,
        evidence={"checks_s": v.checks_s, "verdict_wait_s": v.verdict_wait_s, "share_ratio": v.share,
                  "kernels": float(v.kernels)},
        action=action, snippet=code("loss_scaling", *((f"bf16-{job.framework}",) if v.has_bf16 else ()), *job.keys),
        source=source("loss_scaling.share") + "; TensorFlow mixed-precision guide")

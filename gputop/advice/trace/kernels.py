"""Kernels that are too small to keep a GPU busy, and those that dynamic loss scaling adds."""

from __future__ import annotations

import re
from statistics import median

import numpy as np

from gputop.advice import savings
from gputop.advice.registry import limit, source
from gputop.advice.trace.facts import TraceFacts
from gputop.analysis.gpu.device_time import idle_after
from gputop.analysis.host.launch_threads import by_line
from gputop.core.findings import Abstained, Finding, Gain
from gputop.text.units import percent
from gputop.trace.intervals import Spans, intersect, union
from gputop.trace.model import Kind

# A pause between two queued kernels, or one launch; longer ones have other causes.
_PAUSE_NS = 40_000
_FUSE = {
    "tensorflow": "model.compile(optimizer, loss, jit_compile=True)  # custom loop: @tf.function(jit_compile=True)",
    "jax": "train_step = jax.jit(train_step, donate_argnums=0)  # one jit around the whole step; lax.scan over time "
           "steps",
    "pytorch": 'model = torch.compile(model, mode="reduce-overhead")  # fuses kernels, replays them as a CUDA graph',
}
_CHECK = re.compile(r"loss_?scal|amp_update_scale|amp_non_finite|multi_tensor_unscale", re.IGNORECASE)
_FINITE = re.compile(r"is_?(all_)?finite|all_?finite", re.IGNORECASE)


def small_kernels(facts: TraceFacts) -> Finding | Abstained | None:
    """Most kernels are shorter than launching one takes, and the pauses between them add up."""
    gpus = facts.active
    if not gpus or facts.shares is None:
        return Abstained("small_kernels", "GPU activity in the trace")
    sizes = [size for size in facts.analysis.kernel_sizes if size.below_20us is not None]
    if not sizes:
        return None
    short = sum(sum(size.count) * (size.below_20us or 0.0) for size in sizes) / sum(sum(size.count) for size in sizes)
    if short < limit("small_kernels.count"):
        return None
    within = facts.judged_spans
    pauses = []
    for timeline in facts.gpu_timelines:
        length = timeline.gaps.end - timeline.gaps.start
        brief = length <= _PAUSE_NS
        pauses.append(intersect(Spans(timeline.gaps.start[brief], timeline.gaps.end[brief]), within).total)
    seconds = sum(pauses) / len(pauses) / facts.steps_or_window / 1e9
    share = savings.removed(seconds, facts.period_s)
    if share < limit("small_kernels.share"):
        return None
    kernel_s = median(gpu.kernel_median_s for gpu in gpus if gpu.kernel_median_s is not None)
    kernels = sum(gpu.kernels for gpu in gpus) / len(gpus)
    evidence = {"below_20us_ratio": short, "kernel_median_s": kernel_s, "pauses_s": seconds, "share_ratio": share,
                "kernels_per_s": sum(gpu.kernels_per_s for gpu in gpus) / len(gpus)}
    pace = launch_pace_s(facts)
    why = (f"{percent(short)} of the kernels run for less than 20 µs (median {kernel_s * 1e6:.2g} µs), which is "
           f"what launching one takes; the pauses between kernels are {percent(share)} of the {facts.basis}.")
    if pace is not None:
        evidence["launch_pace_s"] = pace
        why += f" The host launches one every {pace * 1e6:.2g} µs."
    if facts.analysis.steps is not None:
        evidence["kernels_per_step"] = kernels * facts.period_s * len(gpus) / sum(gpu.window_s for gpu in gpus)
    return Finding(
        id="small_kernels", severity=facts.capped_severity(share),
        title=f"Pauses between {kernel_s * 1e6:.2g} µs kernels take {percent(share)} of the {facts.basis}",
        why=facts.with_caveat(why), evidence=evidence,
        action="Do the same work in fewer, larger kernels: fuse them with XLA, batch small ops together, use fused "
               "layers and optimizers, and raise the batch size if memory allows.",
        snippet=_FUSE.get(facts.framework),
        gain=Gain(share, "at most: all pauses between kernels, if the same work were done in a few large ones"),
        gpus=tuple(gpu.gpu for gpu in gpus),
        source=source("small_kernels.kernel_s", "small_kernels.share") + "; nsys-ai: kinds of kernels below 10 µs",
    )


def launch_pace_s(facts: TraceFacts) -> float | None:
    """Median time from one launch to the next on a thread; None where launches are not known."""
    device = facts.trace.device
    known = np.flatnonzero((device.launch_ns >= 0) & (device.kind <= Kind.COLLECTIVE))
    if len(known) < 2:
        return None
    apart = np.concatenate([np.diff(np.sort(device.launch_ns[known[at]])) for at in
                            by_line(device.launch_line[known]).values()])
    return float(np.median(apart)) / 1e9 if len(apart) else None


def loss_scaling(facts: TraceFacts) -> Finding | Abstained | None:
    """Dynamic loss scaling checks and scales every gradient, and makes the host wait for the verdict."""
    if not facts.active or facts.shares is None:
        return Abstained("loss_scaling", "GPU activity in the trace")
    device, names = facts.trace.device, facts.trace.names
    named = np.array([_CHECK.search(name) is not None for name in names] + [False])
    finite = np.array([_FINITE.search(name) is not None for name in names] + [False])
    table = facts.analysis.kernels
    half = table is not None and any(row.types.get("fp16") for row in table.by_name)
    mask = named | finite if half or named[device.tf_op].any() else named
    hit = mask[device.tf_op] | mask[device.name]
    if not hit.any():
        return None
    checks, waits, count = 0, 0, 0
    within = facts.judged_spans
    for timeline in facts.gpu_timelines:
        own = timeline.rows[hit[timeline.rows]]
        spans = union(device.start_ns[own], device.end_ns[own])
        checks += intersect(spans, within).total
        # The predicate's copy: what the GPU stands still for after it, until the host launches on.
        copied = own[(device.kind[own] >= Kind.H2D) & (device.kind[own] <= Kind.COPY_OTHER)]
        waits += intersect(idle_after(facts.trace, timeline, device.end_ns[copied], facts.analysis.steps), within).total
        count += int((device.kind[own] == Kind.COMPUTE).sum())
    per = 1e9 * len(facts.gpu_timelines) * facts.steps_or_window
    share = savings.removed((checks + waits) / per, facts.period_s)
    if share < limit("loss_scaling.share"):
        return None
    capability = min((gpu.compute_capability for gpu in facts.trace.gpus if gpu.compute_capability), default=None)
    bf16 = capability is not None and capability >= (8, 0)
    why = (f"Scaling, unscaling and checking gradients takes {percent(checks / per / facts.period_s)} of the "
           f"{facts.basis} on the GPU")
    why += f", and waiting for the verdict on the host {percent(waits / per / facts.period_s)}." if waits else "."
    action = ("Train in BF16, whose range needs no loss scaling." if bf16 else
              "Use a static loss scale once a value is known to hold, and let XLA fuse the checks.")
    if capability is None:
        action = "Train in BF16, which needs no loss scaling (Ampere and newer), or use a static loss scale."
    return Finding(
        id="loss_scaling", severity=facts.capped_severity(share),
        title=f"Dynamic loss scaling takes {percent(share)} of the {facts.basis}", why=facts.with_caveat(why),
        evidence={"checks_s": checks / per, "verdict_wait_s": waits / per, "share_ratio": share,
                  "kernels": float(count)},
        action=action, snippet=_snippet(facts.framework, bf16),
        gain=Gain(share, "all of it: BF16 needs none, a static scale fused by XLA next to none"),
        gpus=tuple(gpu.gpu for gpu in facts.active), source=source("loss_scaling.share") + "; TensorFlow "
                                                                                           "mixed-precision guide",
    )


def _snippet(framework: str, bf16: bool) -> str | None:
    if framework == "tensorflow":
        return ("keras.mixed_precision.set_global_policy('mixed_bfloat16')" if bf16 else
                "loss = compute_loss(y, model(x, training=True)) * 1024.0  # a static scale, in a custom loop\n"
                "grads = [g / 1024.0 for g in tape.gradient(loss, model.trainable_variables)]")
    if framework == "pytorch" and bf16:
        return "with torch.autocast('cuda', dtype=torch.bfloat16):  # no GradScaler"
    return None

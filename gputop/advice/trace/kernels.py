"""Kernels that are too small to keep a GPU busy."""

from __future__ import annotations

from statistics import median

import numpy as np

from gputop.advice import savings
from gputop.advice.registry import limit, source
from gputop.advice.trace.facts import TraceFacts
from gputop.advice.trace.job import Job
from gputop.advice.trace.launch import launch_pace_s
from gputop.advice.trace.snippets import GRAPH_BREAKS, xla_on_step
from gputop.advice.verdict import Explanation, Verdict
from gputop.analysis.layers.culprits import Events
from gputop.analysis.what_if.cure import Cure
from gputop.text.units import percent, seconds
from gputop.trace.intervals import Spans, coverage, intersect
from gputop.trace.model import Kind

# A pause between two queued kernels, or one launch; longer ones have other causes.
_PAUSE_NS = 40_000
_COMPILED = {
    "jax": "state, outputs = jax.lax.scan(layer, state, stacked_params)  # layers or time steps alike, in place of a "
           "loop",
    "pytorch": GRAPH_BREAKS,
}
_COMPILER = {"tensorflow": " with XLA", "jax": " with XLA", "pytorch": " with torch.compile"}
_FUSE = {
    "jax": "train_step = jax.jit(train_step, donate_argnums=0)  # one jit around the whole step; lax.scan over time "
           "steps",
    "pytorch": 'model = torch.compile(model, mode="reduce-overhead")  # fuses kernels, replays them as a CUDA graph',
}
# Where CUDA graphs run already, by framework and whether the model is compiled.
_IN_GRAPHS = {("pytorch", False): "model = torch.compile(model)  # fuses kernels before they are recorded",
              ("pytorch", True): GRAPH_BREAKS}


class SmallKernels(Verdict, frozen=True, kw_only=True):
    short_ratio: float  # share of the kernels that run for less than 20 µs
    kernel_median_s: float
    pauses_s: float  # between kernels, per step and GPU
    kernels_per_s: float
    pace_s: float | None  # from one launch to the next; None: not known
    kernels_per_step: float | None


def judge_small_kernels(facts: TraceFacts) -> SmallKernels | None:
    """Most kernels are shorter than launching one takes, and the pauses between them add up."""
    gpus = facts.active
    sizes = [size for size in facts.analysis.kernel_sizes if size.below_20us is not None]
    if not sizes:
        return None
    short = sum(sum(size.count) * (size.below_20us or 0.0) for size in sizes) / sum(sum(size.count) for size in sizes)
    if short < limit("small_kernels.count"):
        return None
    pauses_s = _pauses_s(facts)
    share = savings.removed(pauses_s, facts.period_s)
    if share < limit("small_kernels.share"):
        return None
    per_step = [sum(size.count_per_step) for size in sizes if size.count_per_step is not None]
    return SmallKernels(
        gpus=facts.active_numbers, share=share, short_ratio=short, pauses_s=pauses_s,
        kernel_median_s=median(gpu.kernel_median_s for gpu in gpus if gpu.kernel_median_s is not None),
        kernels_per_s=sum(gpu.kernels_per_s for gpu in gpus) / len(gpus), pace_s=launch_pace_s(facts),
        kernels_per_step=sum(per_step) / len(per_step) if per_step else None,
        events=_short(facts), cure=Cure(launching=True, pauses=True, assumes=(
            "A few large kernels do the work of these kernels in the same time, without pauses between them and "
            "without time for launches.")),
    )


def _short(facts: TraceFacts) -> Events:
    """The short kernels, each with the pause before it."""
    device = facts.trace.device
    time = np.zeros(len(device), np.int64)
    for timeline in facts.gpu_timelines:
        gaps = timeline.gaps
        time[gaps.after] = np.where(gaps.end - gaps.start <= _PAUSE_NS, gaps.end - gaps.start, 0)
    rows = np.flatnonzero((device.kind == Kind.COMPUTE) & (
        device.end_ns - device.start_ns < limit("small_kernels.kernel_s") * 1e9))
    length = coverage(facts.analyzed_spans, device.start_ns[rows], device.end_ns[rows])
    return Events(rows, np.where(length > 0, length + time[rows], 0))


def _pauses_s(facts: TraceFacts) -> float:
    """Mean seconds per step (or in the window) and GPU in pauses between kernels."""
    pauses, judged = [], facts.analyzed_spans
    for timeline in facts.gpu_timelines:
        brief = timeline.gaps.end - timeline.gaps.start <= _PAUSE_NS
        pauses.append(intersect(Spans(timeline.gaps.start[brief], timeline.gaps.end[brief]), judged).total)
    return sum(pauses) / len(pauses) / facts.steps_or_window / 1e9


def describe_small_kernels(v: SmallKernels, job: Job) -> Explanation:
    evidence = {"below_20us_ratio": v.short_ratio, "kernel_median_s": v.kernel_median_s, "pauses_s": v.pauses_s,
                "share_ratio": v.share, "kernels_per_s": v.kernels_per_s}
    median = f"{seconds(v.kernel_median_s)}"
    launch = "" if job.graphs else ", which is the time that one launch takes"
    why = (f"{percent(v.short_ratio)} of the kernels run for less than 20 µs (median {median}){launch}. The pauses "
           f"between kernels take {percent(v.share)} of the {job.basis}.")
    if v.pace_s is not None:
        evidence["launch_pace_s"] = v.pace_s
        why += f" The host launches one kernel every {seconds(v.pace_s)}."
    if v.kernels_per_step is not None:
        evidence["kernels_per_step"] = v.kernels_per_step
    layers = "use fused layers" if job.trains is False else "use fused layers and optimizers"
    if job.graphs:
        start, snippet = "A CUDA graph launches kernels already, so only fewer, larger kernels help", _IN_GRAPHS.get(
            (job.framework, job.compiled))
    else:
        start, snippet = "Do the same work in fewer, larger kernels", xla_on_step(job) if (
            job.framework == "tensorflow") else (_COMPILED if job.compiled else _FUSE).get(job.framework)
    return Explanation(
        title=f"Pauses between short kernels (median {median}) take {percent(v.share)} of the {job.basis}", why=why,
        evidence=evidence,
        action=f"{start}: fuse them{_COMPILER.get(job.framework, '')}, batch small ops together, {layers}, and raise "
               "the batch size if memory allows.",
        snippet=snippet,
        gain="at most: all pauses between kernels, if the same work were done in a few large ones",
        source=source("small_kernels.kernel_s", "small_kernels.share") + "; nsys-ai: kinds of kernels below 10 µs",
    )

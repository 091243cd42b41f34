"""Kernels with too few thread blocks to fill the GPU: it is busy, and most of it has no work."""

from __future__ import annotations

from statistics import fmean

from gputop.advice import savings
from gputop.advice.registry import limit, source
from gputop.advice.trace.facts import TraceFacts
from gputop.advice.trace.fusion import plain_name
from gputop.advice.trace.job import Job
from gputop.advice.trace.snippets import is_keras
from gputop.advice.verdict import Explanation, Missing, Verdict
from gputop.analysis.gpu.sm_use import narrow_kernels
from gputop.analysis.layers.culprits import Events
from gputop.analysis.results import NarrowKernel
from gputop.core.findings import Severity
from gputop.text.units import percent, seconds

_SHOWN = 3
_GUIDES = ("Nsight Compute: small grid, tail effect; NVIDIA, Matrix Multiplication Background: wave and tile "
           "quantization; CUDA C++ Programming Guide: four schedulers per SM")
_MORE_BLOCKS = {
    "pytorch": 'model = torch.compile(model, mode="max-autotune")  # measures tiles and split-K for each product\n'
               "# and a larger batch, which gives each kernel more blocks",
    "jax": "outputs = jax.vmap(model, in_axes=(None, 0))(params, inputs)  # several inputs in each kernel",
    "tensorflow": "ds = ds.batch(8 * batch_size)  # more blocks in each kernel",
}
_INFERENCE = ("y = model(torch.cat(requests))  # several requests in each kernel\n"
              'model = torch.compile(model, mode="max-autotune")  # measures tiles and split-K for each product')


class SmallGrids(Verdict, frozen=True, kw_only=True):
    """``share`` is the time in which the empty part of the GPU could have worked. Times are per step and GPU."""

    used: float  # share of the GPU that has a warp while kernels run
    compute: float  # share of the time in which kernels run
    empty_s: float  # compute, weighted by the part of the GPU that is empty
    tail_s: float  # further, in last waves, if all blocks of a kernel take equally long
    sms: int
    kernels: tuple[NarrowKernel, ...]  # those that leave most of it empty


def judge_small_grids(facts: TraceFacts) -> SmallGrids | Missing | None:
    """Kernels run, yet a large part of the GPU's SMs, or of their schedulers, has no warp of them.

    What spreading them would save is not known: how many blocks a kernel has follows from its work and its tiles.
    """
    least = limit("small_grids.share") * facts.period_s
    widths = [use for use in facts.analysis.sm_use if use.gpu in facts.active_numbers]
    if not widths or fmean(use.compute_s for use in widths) < least:
        return None
    judged = [use for use in widths if use.used_s is not None and use.known >= limit("small_grids.known")]
    if not judged:
        return Missing("the grids of the kernels, or the number of the GPU's SMs")
    empty_by_gpu = [use.compute_s - (use.used_s or 0.0) for use in judged]
    empty_s = fmean(empty_by_gpu)
    share = savings.removed(empty_s, facts.period_s)
    if share < limit("small_grids.share"):
        return None
    most = judged[empty_by_gpu.index(max(empty_by_gpu))]
    return SmallGrids(
        gpus=tuple(use.gpu for use in judged), share=share, saving_unknown=True, severity=_severity(share),
        used=1 - empty_s / fmean(use.compute_s for use in judged),
        compute=fmean(use.compute_s for use in judged) / facts.period_s, empty_s=empty_s,
        tail_s=fmean(use.tail_s or 0.0 for use in judged), sms=most.sms or 0, kernels=most.narrow,
        events=Events(narrow_kernels(facts.trace, facts.gpu_timelines, facts.steps)))


def _severity(share: float) -> Severity:
    """Below that of a finding that says what it saves."""
    return "high" if share >= limit("small_grids.high") else "medium" if share >= limit("small_grids.medium") else "low"


def describe_small_grids(v: SmallGrids, job: Job) -> Explanation:
    times: dict[tuple[str, int], float] = {}
    for kernel in v.kernels:
        key = plain_name(kernel.name), kernel.blocks
        times[key] = times.get(key, 0.0) + kernel.time_s_per_step
    longest = ", ".join(f"{name} ({blocks} block{'' if blocks == 1 else 's'}, {seconds(time_s)})"
                        for (name, blocks), time_s in list(times.items())[:_SHOWN])
    text = (f"Kernels run for {percent(v.compute)} of the {job.basis}, with too few blocks or warps for the GPU's "
           f"{v.sms} SMs. On average {percent(v.used)} of these have work. A monitor shows a GPU as busy while any "
           "block runs.")
    text += f" Most is left empty by {longest}." if longest else ""
    if v.tail_s >= 0.01 * job.period_s:
        text += (f" The last waves of other kernels leave up to {percent(v.tail_s / job.period_s)} more empty, if all "
                "blocks of a kernel take equally long.")
    batch = ("Give each kernel more work: put several requests into one batch, or run them on several streams at once."
             if job.trains is False else
             "Give each kernel more work: a larger batch if the training allows it, or independent branches on "
             "several streams.")
    return Explanation(
        title=f"Kernels use {percent(v.used)} of the GPU while they run", why=text,
        evidence={"used_of_gpu_ratio": v.used, "compute_ratio": v.compute, "empty_gpu_s": v.empty_s,
                  "share_ratio": v.share, "last_wave_s": v.tail_s, "sm_count": float(v.sms)},
        action=f"{batch} In custom kernels, use smaller tiles or split the sum (split-K), so that the grid has at "
               "least one block for each SM.",
        snippet=_snippet(job),
        gain="unknown: the empty part is not a saving, because only a test shows how far these kernels can be spread",
        source=f"{source('small_grids.share', 'small_grids.high')}; {_GUIDES}",
    )


def _snippet(job: Job) -> str | None:
    if job.framework == "pytorch" and job.trains is False:
        return _INFERENCE
    if is_keras(job):
        return "model.fit(x, y, batch_size=8 * batch_size)  # or ds.batch: more blocks in each kernel"
    return _MORE_BLOCKS.get(job.framework)

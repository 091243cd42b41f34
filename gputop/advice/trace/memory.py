"""Memory: is it nearly full, or is there room to give the GPU more work at a time?"""

from __future__ import annotations

import math
from dataclasses import dataclass

from gputop.advice.registry import limit, source
from gputop.advice.trace.facts import TraceFacts
from gputop.advice.trace.inputs import ALLOCATOR_RECORDS, gpu_allocators, launch_calls
from gputop.advice.trace.job import Job
from gputop.advice.trace.launch import judge_launch_bound
from gputop.advice.verdict import Explanation, Missing, Verdict
from gputop.core.findings import HIGH_SHARE, Severity, at_most, severity_of
from gputop.text.units import bytes_, percent

_ROOM = {
    "tensorflow": "optimizer = keras.optimizers.Adam(gradient_accumulation_steps=4)  # Keras 3, with a batch a "
                  "quarter the size\n"
                  "TF_GPU_ALLOCATOR=cuda_malloc_async python train.py  # against fragmentation",
    "jax": "block = jax.checkpoint(block)  # recomputes activations in the backward pass",
    "pytorch": "x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)",
}


# -- memory_pressure --------------------------------------------------------------------------------

@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPressure(Verdict):
    fullest: int  # the GPU whose allocator was fullest
    peak_bytes: int
    capacity_bytes: int
    fragmentation: float | None  # share of the free memory outside the largest free block, at most
    in_pieces: bool
    holder: tuple[str, int] | None  # the op that held most of what was allocated in the window, and its bytes


def judge_memory_pressure(facts: TraceFacts) -> MemoryPressure | None:
    """The allocator's peak is close to its capacity: a larger batch, or a piece of fragmentation, ends the job.

    Going by the allocator, never by NVML's "memory used": TensorFlow reserves nearly all memory at its start.
    """
    used = gpu_allocators(facts, {gpu.gpu for gpu in facts.analysis.gpus})
    share = {gpu: use.peak_bytes / use.capacity_bytes for gpu, use in used.items()}
    worst = max(share, key=lambda gpu: share[gpu])
    if share[worst] < limit("trace_memory.warn"):
        return None
    use = used[worst]
    pieces = use.fragmentation_max
    in_pieces = pieces is not None and pieces >= limit("trace_memory.fragmented")
    severity: Severity = "low"
    if share[worst] >= limit("trace_memory.critical"):
        # "High" is for jobs that will fail: nothing left, or what is left is of no use.
        severity = "high" if share[worst] >= limit("trace_memory.full") and in_pieces else "medium"
    top = use.holders[0] if use.holders else None
    return MemoryPressure(
        gpus=tuple(sorted(gpu for gpu, part in share.items() if part >= limit("trace_memory.warn"))),
        severity=severity, fullest=worst, peak_bytes=use.peak_bytes, capacity_bytes=use.capacity_bytes,
        fragmentation=pieces, in_pieces=in_pieces, holder=None if top is None else (top.op, top.bytes),
    )


def describe_memory_pressure(v: MemoryPressure, job: Job) -> Explanation:
    full, left = v.peak_bytes / v.capacity_bytes, v.capacity_bytes - v.peak_bytes
    evidence = {"peak_bytes": float(v.peak_bytes), "capacity_bytes": float(v.capacity_bytes), "peak_ratio": full,
                "left_bytes": float(left)}
    why = f"At its peak the allocator of GPU {v.fullest} had {bytes_(left)} of {bytes_(v.capacity_bytes)} left."
    if v.fragmentation is not None:
        evidence["fragmentation_ratio"] = v.fragmentation
        if v.in_pieces:
            why += f" Up to {percent(v.fragmentation)} of its free memory was outside the largest free block."
    if v.holder is not None:
        why += f" Of what was allocated in the window {v.holder[0]} held most, {bytes_(v.holder[1])}."
    fragments_less = v.in_pieces and job.framework == "tensorflow"
    return Explanation(
        title=f"GPU {v.fullest}'s allocator was {percent(full)} full", why=why, evidence=evidence,
        action="Make room before it fails: a smaller batch with gradient accumulation, mixed precision, or "
               "recomputation of activations"
               + ("; TensorFlow's asynchronous allocator fragments less." if fragments_less else "."),
        snippet=_ROOM.get(job.framework),
        gain="no time: it keeps the job from running out of memory",
        source=source("trace_memory.warn", "trace_memory.critical"),
    )


# -- batch_size_headroom ----------------------------------------------------------------------------

@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSizeHeadroom(Verdict):
    factor: float  # by which the batch can grow
    compute: float  # share of the time
    launch_wait: float  # share of the step
    peak_bytes: int  # of the fullest GPU's allocator
    capacity_bytes: int
    caveat: str | None  # what little this rests on


def judge_batch_size_headroom(facts: TraceFacts) -> BatchSizeHeadroom | Missing | None:
    """GPUs compute little, launching costs much, and the allocator shows room for a larger batch.

    The factor is a power of two that fits even if all memory in use, weights included, grew
    with the batch; in truth only activations do.
    """
    assert facts.shares is not None
    gpus = facts.active
    compute = sum(gpu.compute for gpu in gpus) / len(gpus)
    launch = facts.shares["launch"]
    if facts.shares["input"] >= limit("input_bound.share"):
        return None
    if compute >= limit("batch_size_headroom.compute") and launch < HIGH_SHARE:
        return None
    numbers = {gpu.gpu for gpu in gpus}
    used = gpu_allocators(facts, numbers)
    if set(used) != numbers:
        return Missing(ALLOCATOR_RECORDS)
    tightest = max(used.values(), key=lambda use: use.peak_bytes / use.capacity_bytes)
    if tightest.peak_bytes <= 0:
        return None
    room = limit("batch_size_headroom.memory") * tightest.capacity_bytes / tightest.peak_bytes
    if room < limit("batch_size_headroom.factor"):
        return None
    factor = min(2.0 ** math.floor(math.log2(room)), limit("batch_size_headroom.factor_max"))
    share = launch * (1 - 1 / factor)
    if share < limit("batch_size_headroom.share"):
        return None
    severity, caveat = severity_of(share), facts.small_sample_caveat
    # The same idle time is claimed once: launch_bound names its cause, this a way to live with it.
    if caveat or (launch_calls(facts) is None and judge_launch_bound(facts) is not None):
        severity = at_most(severity, "medium")
    return BatchSizeHeadroom(
        gpus=tuple(sorted(numbers)), share=share, severity=severity, factor=factor, compute=compute,
        launch_wait=launch, peak_bytes=tightest.peak_bytes, capacity_bytes=tightest.capacity_bytes, caveat=caveat,
    )


def describe_batch_size_headroom(v: BatchSizeHeadroom, job: Job) -> Explanation:
    why = (f"The GPUs compute {percent(v.compute)} of the time and wait for launches {percent(v.launch_wait)} of the "
           f"{job.basis}, which more samples per step would share; at its peak the fullest GPU uses "
           f"{percent(v.peak_bytes / v.capacity_bytes)} of the memory its allocator has.")
    if v.caveat:
        why += f" {v.caveat}"
    return Explanation(
        title=f"Memory has room for {v.factor:.0f}× the batch", why=why,
        evidence={"peak_bytes": float(v.peak_bytes), "capacity_bytes": float(v.capacity_bytes),
                  "compute_ratio": v.compute, "launch_wait_ratio": v.launch_wait, "factor": v.factor},
        action=f"Raise the batch size per GPU, doubling it up to {v.factor:.0f}×, and adjust the learning rate.",
        snippet=f"batch_size *= {v.factor:.0f}  # per GPU; warm the learning rate up to its new value",
        gain=f"assumes that launching takes as long per step at {v.factor:.0f}× the batch and that compute grows in "
             "proportion; the step gets longer; not in addition to launch_bound",
        per="sample", source=source("batch_size_headroom.compute", "batch_size_headroom.memory"),
    )

"""Memory: is it nearly full?"""

from __future__ import annotations

from gputop.advice.registry import limit, source
from gputop.advice.trace.facts import TraceFacts
from gputop.advice.trace.inputs import gpu_allocators
from gputop.advice.trace.job import Job
from gputop.advice.trace.training_loop import KERAS3
from gputop.advice.verdict import Explanation, Verdict
from gputop.core.findings import Severity
from gputop.text.units import percent, size

_ROOM = {
    KERAS3: "optimizer = keras.optimizers.Adam(gradient_accumulation_steps=4)  # with a batch a quarter the size",
    "tensorflow": "TF_GPU_ALLOCATOR=cuda_malloc_async python train.py  # against fragmentation",
    "jax": "block = jax.checkpoint(block)  # recomputes activations in the backward pass",
    "pytorch": "x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)",
}


class MemoryPressure(Verdict, frozen=True, kw_only=True):
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
    why = f"At its peak the allocator of GPU {v.fullest} had {size(left)} of {size(v.capacity_bytes)} left."
    if v.fragmentation is not None:
        evidence["fragmentation_ratio"] = v.fragmentation
        if v.in_pieces:
            why += f" Up to {percent(v.fragmentation)} of its free memory was outside the largest free block."
    if v.holder is not None:
        why += f" {v.holder[0]} held most of the memory that was allocated in the window: {size(v.holder[1])}."
    fragments_less = v.in_pieces and job.framework == "tensorflow"
    return Explanation(
        title=f"GPU {v.fullest}'s allocator was {percent(full)} full", why=why, evidence=evidence,
        action="Make room before an allocation fails: use a smaller batch with gradient accumulation, mixed precision, "
               "or recomputation of activations"
               + ("; TensorFlow's asynchronous allocator fragments less." if fragments_less else "."),
        snippet=_ROOM.get(job.loop, _ROOM.get(job.framework)),
        gain="none: this prevents an out-of-memory error and saves no time",
        source=source("trace_memory.warn", "trace_memory.critical"),
    )

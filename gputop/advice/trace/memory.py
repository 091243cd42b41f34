"""Memory: is there room to give the GPU more work at a time?"""

from __future__ import annotations

import math
import re

from gputop.advice.registry import limit, source
from gputop.advice.trace.facts import TraceFacts
from gputop.advice.trace.launch import launch_bound
from gputop.analysis.results import AllocatorUse
from gputop.core.findings import HIGH_SHARE, Abstained, Finding, Gain, Severity, at_most, severity_of
from gputop.text.units import bytes_, percent

_RECORDS = ("the GPU allocators' records (GPU_<n>_bfc: in use, available); TensorFlow's and JAX's own captures hold "
            "them, other tools' do not")
_ROOM = {
    "tensorflow": "optimizer = keras.optimizers.Adam(gradient_accumulation_steps=4)  # Keras 3, with a batch a "
                  "quarter the size\n"
                  "TF_GPU_ALLOCATOR=cuda_malloc_async python train.py  # against fragmentation",
    "jax": "block = jax.checkpoint(block)  # recomputes activations in the backward pass",
    "pytorch": "x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)",
}
_GPU_ALLOCATOR = re.compile(r"GPU_(\d+)_bfc$", re.IGNORECASE)


def _allocators(facts: TraceFacts, gpus: set[int]) -> dict[int, AllocatorUse]:
    """The GPU allocators of these GPUs that tell their capacity."""
    used = {}
    for use in facts.analysis.memory:
        match = _GPU_ALLOCATOR.match(use.allocator)
        if match and int(match[1]) in gpus and use.capacity_bytes > 0:
            used[int(match[1])] = use
    return used


def memory_pressure(facts: TraceFacts) -> Finding | Abstained | None:
    """The allocator's peak is close to its capacity: a larger batch, or a piece of fragmentation, ends the job.

    Going by the allocator, never by NVML's "memory used": TensorFlow reserves nearly all memory at its start.
    """
    used = _allocators(facts, {gpu.gpu for gpu in facts.analysis.gpus})
    if not used:
        return Abstained("memory_pressure", _RECORDS)
    share = {gpu: use.peak_bytes / use.capacity_bytes for gpu, use in used.items()}
    worst = max(share, key=lambda gpu: share[gpu])
    full = share[worst]
    if full < limit("trace_memory.warn"):
        return None
    use, detail = used[worst], used[worst].detail
    pieces = None if detail is None else detail.fragmentation_max
    in_pieces = pieces is not None and pieces >= limit("trace_memory.fragmented")
    severity: Severity = "low"
    if full >= limit("trace_memory.critical"):
        # "High" is for jobs that will fail: nothing left, or what is left is of no use.
        severity = "high" if full >= limit("trace_memory.full") and in_pieces else "medium"
    left = use.capacity_bytes - use.peak_bytes
    evidence = {"peak_bytes": float(use.peak_bytes), "capacity_bytes": float(use.capacity_bytes), "peak_ratio": full,
                "left_bytes": float(left)}
    why = f"At its peak the allocator of GPU {worst} had {bytes_(left)} of {bytes_(use.capacity_bytes)} left."
    if pieces is not None:
        evidence["fragmentation_ratio"] = pieces
        if in_pieces:
            why += f" Up to {percent(pieces)} of its free memory was outside the largest free block."
    if detail is not None and detail.holders:
        top = detail.holders[0]
        why += f" Of what was allocated in the window {top.op} held most, {bytes_(top.bytes)}."
    return Finding(
        id="memory_pressure", severity=severity, title=f"GPU {worst}'s allocator was {percent(full)} full", why=why,
        evidence=evidence,
        action="Make room before it fails: a smaller batch with gradient accumulation, mixed precision, or "
               "recomputation of "
               "activations" + ("; TensorFlow's asynchronous allocator fragments less." if in_pieces and
                                facts.framework == "tensorflow" else "."),
        snippet=_ROOM.get(facts.framework),
        gain=Gain(None, "no time: it keeps the job from running out of memory"),
        gpus=tuple(sorted(gpu for gpu, part in share.items() if part >= limit("trace_memory.warn"))),
        source=source("trace_memory.warn", "trace_memory.critical"),
    )


def batch_size_headroom(facts: TraceFacts) -> Finding | Abstained | None:
    """GPUs compute little, launching costs much, and the allocator shows room for a larger batch.

    The factor is a power of two that fits even if all memory in use, weights included, grew
    with the batch; in truth only activations do.
    """
    gpus = facts.active
    if not gpus or facts.shares is None:
        return Abstained("batch_size_headroom", "GPU activity in the trace")
    compute = sum(gpu.compute for gpu in gpus) / len(gpus)
    launch = facts.shares["launch"]
    if facts.shares["input"] >= limit("input_bound.share"):
        return None
    if compute >= limit("batch_size_headroom.compute") and launch < HIGH_SHARE:
        return None
    numbers = {gpu.gpu for gpu in gpus}
    used = _allocators(facts, numbers)
    if set(used) != numbers:
        return Abstained("batch_size_headroom", _RECORDS)
    tightest = max(used.values(), key=lambda use: use.peak_bytes / use.capacity_bytes)
    if tightest.peak_bytes <= 0:
        return None
    room = limit("batch_size_headroom.memory") * tightest.capacity_bytes / tightest.peak_bytes
    if room < limit("batch_size_headroom.factor"):
        return None
    factor = min(2.0 ** math.floor(math.log2(room)), limit("batch_size_headroom.factor_max"))
    gain = launch * (1 - 1 / factor)
    if gain < limit("batch_size_headroom.share"):
        return None
    severity = severity_of(gain)
    why = (f"The GPUs compute {percent(compute)} of the time and wait for launches {percent(launch)} of the "
           f"{facts.basis}, which more samples per step would share; at its peak the fullest GPU uses "
           f"{percent(tightest.peak_bytes / tightest.capacity_bytes)} of the memory its allocator has.")
    # The same idle time is claimed once: launch_bound names its cause, this a way to live with it.
    if facts.small_sample_caveat or isinstance(launch_bound(facts), Finding):
        severity = at_most(severity, "medium")
    if facts.small_sample_caveat:
        why += f" {facts.small_sample_caveat}"
    return Finding(
        id="batch_size_headroom", severity=severity, title=f"Memory has room for {factor:.0f}× the batch", why=why,
        evidence={
            "peak_bytes": float(tightest.peak_bytes), "capacity_bytes": float(tightest.capacity_bytes),
            "compute_ratio": compute, "launch_wait_ratio": launch, "factor": factor,
        },
        action=f"Raise the batch size per GPU, doubling it up to {factor:.0f}×, and adjust the learning rate.",
        snippet=f"batch_size *= {factor:.0f}  # per GPU; warm the learning rate up to its new value",
        gain=Gain(gain, f"assumes that launching takes as long per step at {factor:.0f}× the batch and that compute "
                        "grows in proportion; the step gets longer; not in addition to launch_bound", per="sample"),
        gpus=tuple(sorted(numbers)),
        source=source("batch_size_headroom.compute", "batch_size_headroom.memory"),
    )

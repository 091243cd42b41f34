"""Memory: is there room to give the GPU more work at a time?"""

from __future__ import annotations

import math
import re

from gputop.advice.finding import Abstained, Finding, Gain, severity_of
from gputop.advice.thresholds import limit, source
from gputop.advice.trace_facts import TraceFacts

_GPU_ALLOCATOR = re.compile(r"GPU_(\d+)_bfc$", re.IGNORECASE)


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
    if compute >= limit("batch_size_headroom.compute") or facts.shares["input"] >= limit("input_bound.share"):
        return None
    numbers = {gpu.gpu for gpu in gpus}
    used = {}
    for use in facts.analysis.memory:
        match = _GPU_ALLOCATOR.match(use.allocator)
        if match and int(match[1]) in numbers and use.capacity_bytes > 0:
            used[int(match[1])] = use
    if set(used) != numbers:
        return Abstained("batch_size_headroom", (
            "the GPU allocators' records (GPU_<n>_bfc: in use, available); TensorFlow's and JAX's own captures hold "
            "them, other tools' do not"))
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
    return Finding(
        id="batch_size_headroom", severity=severity_of(gain), title=f"Memory has room for {factor:.0f}× the batch",
        why=f"The GPUs compute {compute:.0%} of the time and wait for launches {launch:.0%} of the {facts.basis}, "
            "which costs the same per step whatever the batch; at its peak the fullest GPU uses "
            f"{tightest.peak_bytes / tightest.capacity_bytes:.0%} of the memory its allocator has.",
        evidence={
            "peak_bytes": float(tightest.peak_bytes), "capacity_bytes": float(tightest.capacity_bytes),
            "compute_ratio": compute, "launch_wait_ratio": launch, "factor": factor,
        },
        action=f"Raise the batch size per GPU, doubling it up to {factor:.0f}×, and adjust the learning rate.",
        snippet=f"batch_size *= {factor:.0f}  # per GPU; warm the learning rate up to its new value",
        gain=Gain(gain, f"time per sample, if launching takes as long per step at {factor:.0f}× the batch and "
                        "compute grows in proportion; not in addition to launch_bound"),
        gpus=tuple(sorted(numbers)),
        source=source("batch_size_headroom.compute", "batch_size_headroom.memory"),
    )

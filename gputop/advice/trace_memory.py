"""Memory: is there room to give the GPU more work at a time?"""

from __future__ import annotations

import math
import re

from gputop.advice.finding import Abstained, Finding, Gain, at_most, severity_of
from gputop.advice.thresholds import limit, source
from gputop.advice.trace_facts import TraceFacts
from gputop.advice.trace_launch import launch_bound
from gputop.text import percent

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
    severity = severity_of(gain)
    why = (f"The GPUs compute {percent(compute)} of the time and wait for launches {percent(launch)} of the "
           f"{facts.basis}, which more samples per step would share; at its peak the fullest GPU uses "
           f"{percent(tightest.peak_bytes / tightest.capacity_bytes)} of the memory its allocator has.")
    # The same idle time is claimed once: launch_bound names its cause, this a way to live with it.
    if facts.few or isinstance(launch_bound(facts), Finding):
        severity = at_most(severity, "medium")
    if facts.few:
        why += f" {facts.few}"
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

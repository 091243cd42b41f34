"""One list out of trace findings and live ones: a cause seen both ways is one entry."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace

from gputop.advice.thresholds import limit
from gputop.core.findings import Finding, ranked

# A cause can have one id live and another from a trace; the trace knows more, so it stays.
_SAME_CAUSE = {
    "gpu0_oversubscribed": {"gpu0_oversubscribed", "replica_imbalance"},
    "tensor_idle": {"tensor_cores_unused", "fp16_fallback"},
}

# What telemetry sees of a cause that only a trace can name.
_FOLLOWS_FROM = {
    "low_sm_active": {
        "input_bound", "step_gap_host", "thread_contention", "launch_bound", "small_kernels", "eager_execution",
        "retracing", "host_placement", "copies_excessive", "copies_pageable", "sync_copies", "communication_exposed",
        "collective_waiting", "replica_imbalance", "gpu0_oversubscribed", "serial_gpus", "staggered_launch",
        "allreduce_count", "allreduce_slow", "batch_size_headroom",
    },
    "host_cpu_saturated": {"input_bound", "thread_contention", "step_gap_host", "host_placement"},
    "pcie_saturated": {"copies_excessive", "copies_pageable", "sync_copies", "communication_exposed", "allreduce_slow"},
}


def merge_findings(trace: Iterable[Finding], live: Iterable[Finding], trace_age_s: float = 0.0,
                   allocators_known: bool = False, job_gpus: Collection[int] | None = None) -> tuple[Finding, ...]:
    """Rank both together; a cause seen both ways is one entry.

    A live finding that has the trace's own name is left out; one that follows from what a fresh
    trace (of at most ``merge.fresh_s``) names is folded under that, where it adds its evidence.
    ``allocators_known``: the trace tells the true head-room, so the advice to capture for it is done.
    ``job_gpus``: the GPUs of the traced job in the numbers of the live findings, None where they are not
    known. A live finding on any other GPU has a cause of its own.
    """
    top = list(ranked(trace))
    known = {id_ for f in top for id_ in f.ids}
    fresh = trace_age_s <= limit("merge.fresh_s")
    only_live = []
    for finding in live:
        if allocators_known and finding.id == "memory_preallocated":
            continue
        if job_gpus is not None and not set(finding.gpus) <= set(job_gpus):
            only_live.append(finding)
            continue
        if known & _SAME_CAUSE.get(finding.id, {finding.id}):
            continue
        causes = _FOLLOWS_FROM.get(finding.id, set()) if fresh else set()
        place = next((i for i, f in enumerate(top) if f.severity != "low" and f.ids & causes), None)
        if place is None:
            only_live.append(finding)
        else:
            top[place] = replace(top[place], consequences=(*top[place].consequences, finding))
    return ranked([*top, *only_live])

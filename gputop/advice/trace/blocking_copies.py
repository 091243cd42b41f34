"""How copies are done: from pageable memory, or with the host waiting for each."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gputop.advice import savings
from gputop.advice.registry import limit, source
from gputop.advice.trace.facts import TraceFacts
from gputop.advice.trace.job import Job
from gputop.advice.verdict import Explanation, Missing, Verdict
from gputop.analysis.gpu.device_time import idle_after
from gputop.analysis.steps.membership import in_steps
from gputop.analysis.steps.training_loops import training_loops
from gputop.text.units import percent
from gputop.trace.intervals import EMPTY, intersect, merge, subtract, union
from gputop.trace.lookups import host_rows
from gputop.trace.model import I64, Kind, MemoryKind, Trace

_PIN = {
    "tensorflow": "ds = ds.prefetch(tf.data.AUTOTUNE)  # pass the dataset to model.fit instead of NumPy arrays:\n"
                  "# tf.data hands batches over in pinned buffers; one GPU: also ds.apply(\n"
                  "#     tf.data.experimental.prefetch_to_device('/GPU:0')) as its last stage",
    "jax": "batch = jax.device_put(next(batches), sharding)  # for the next step, right after launching this one",
    "pytorch": "DataLoader(..., pin_memory=True)\nx = x.to(device, non_blocking=True)",
}
_FETCH = {
    "tensorflow": "loss_sum.assign_add(loss)  # stay on the GPU in the loop; loss_sum.numpy() every 100 steps\n"
                  "y = tf.where(condition, a, b)  # in place of a Python if on a tensor's value",
    "jax": "losses.append(loss)  # an array on the GPU; jax.device_get(losses) every 100 steps",
    "pytorch": "running += loss.detach()  # no .item(), .cpu(), print(loss) or Python if on a tensor in the loop",
}
_LARGE_BYTES = 1_000_000  # copies that run at the link's rate
_SYNCHRONIZE = r"(cu|cuda|hip)(Stream|Event|Device|Ctx)Synchronize|(cu|cuda|hip)Memcpy(?!.*Async)"


# -- copies_pageable --------------------------------------------------------------------------------

@dataclass(frozen=True, slots=True, kw_only=True)
class CopiesPageable(Verdict):
    pageable_s: float  # per step and GPU, with nothing beside the copies
    pageable_of_copies: float  # share of the time of all copies with the host that nothing hides
    bytes_per_s: float
    pinned_bytes_per_s: float | None  # of this trace's large pinned copies; None: it has none


def judge_copies_pageable(facts: TraceFacts) -> CopiesPageable | Missing | None:
    """Copies from or to pageable memory, which the driver stages: slower than the link and not beside compute."""
    assert facts.shares is not None
    if facts.shares["h2d"] + facts.shares["d2h"] < limit("copies_pageable.share"):
        return None
    if all(gpu.copies_pageable_s is None for gpu in facts.active):
        return Missing("the kind of memory at the copies' ends (kind_src, kind_dst: from TensorFlow 2.11 on)")
    device, judged = facts.trace.device, facts.judged_spans
    exposed = whole = moved = pageable_ns = pinned_ns = pinned_bytes = 0
    for timeline in facts.gpu_timelines:
        kind, src, dst = (column[timeline.rows] for column in (device.kind, device.src, device.dst))
        host_end = np.where(kind == Kind.H2D, src, np.where(kind == Kind.D2H, dst, MemoryKind.UNKNOWN))
        large = device.bytes[timeline.rows] > limit("copies_pageable.bytes")
        own = timeline.rows[(host_end == MemoryKind.PAGEABLE) & large]
        hidden = merge(timeline.compute, timeline.collectives)
        exposed += intersect(subtract(union(device.start_ns[own], device.end_ns[own]), hidden), judged).total
        whole += intersect(subtract(merge(timeline.h2d, timeline.d2h), hidden), judged).total
        moved += int(device.bytes[own].sum())
        pageable_ns += int((device.end_ns[own] - device.start_ns[own]).sum())
        pinned = timeline.rows[(host_end == MemoryKind.PINNED) & (device.bytes[timeline.rows] >= _LARGE_BYTES)]
        pinned_ns += int((device.end_ns[pinned] - device.start_ns[pinned]).sum())
        pinned_bytes += int(device.bytes[pinned].sum())
    exposed_s = exposed / len(facts.gpu_timelines) / facts.steps_or_window / 1e9
    share = savings.removed(exposed_s, facts.period_s)
    if share < limit("copies_pageable.share") or exposed < limit("copies_pageable.part") * whole:
        return None
    return CopiesPageable(
        gpus=facts.active_numbers, share=share, pageable_s=exposed_s, pageable_of_copies=exposed / whole,
        bytes_per_s=moved / pageable_ns * 1e9, pinned_bytes_per_s=pinned_bytes / pinned_ns * 1e9 if pinned_ns else None,
    )


def describe_copies_pageable(v: CopiesPageable, job: Job) -> Explanation:
    evidence = {"pageable_s": v.pageable_s, "share_ratio": v.share, "pageable_of_copies_ratio": v.pageable_of_copies,
                "pageable_bytes_per_s": v.bytes_per_s}
    why = (f"For {percent(v.share)} of the {job.basis} the GPUs do nothing but copy from or to pageable memory, at "
           f"{v.bytes_per_s / 1e9:.1f} GB/s: the driver stages such copies through a buffer of its own and holds the "
           "host meanwhile.")
    if v.pinned_bytes_per_s is not None:
        evidence["pinned_bytes_per_s"] = v.pinned_bytes_per_s
        why += f" Pinned copies in this trace run at {v.pinned_bytes_per_s / 1e9:.1f} GB/s."
    return Explanation(
        title=f"Copies with pageable memory take {percent(v.share)} of the {job.basis}", why=why, evidence=evidence,
        action="Feed from pinned memory (tf.data's own buffers, a pinned DataLoader) and copy the next batch while "
               "this one computes.",
        snippet=_PIN.get(job.framework),
        gain="at most: pinned copies run at the link's rate and beside compute",
        source=source("copies_pageable.share", "copies_pageable.bytes"),
    )


# -- sync_copies ------------------------------------------------------------------------------------

@dataclass(frozen=True, slots=True, kw_only=True)
class SyncCopies(Verdict):
    idle_s: float  # after the copies, per step and GPU
    count: float  # copies per step and GPU
    mean_bytes: float


def judge_sync_copies(facts: TraceFacts) -> SyncCopies | Missing | None:
    """The host waits for copies in the midst of the step, so the GPU runs out of work each time."""
    device, steps = facts.trace.device, facts.steps
    copies = (device.kind >= Kind.H2D) & (device.kind <= Kind.COPY_OTHER)
    if not copies.any():
        return None
    if not (device.launch_ns[copies] >= 0).any():
        return Missing("the host calls that made the copies (correlation ids); capture with host tracing on")
    held = held_copies(facts.trace, np.flatnonzero(copies))
    idle_ns, count, size = 0, 0, 0
    judged = facts.judged_spans
    input_waits = merge(EMPTY, *(loop.waits for loop in training_loops(facts.trace)))
    for timeline in facts.gpu_timelines:
        own = timeline.rows[np.isin(timeline.rows, held)]
        after = idle_after(facts.trace, timeline, device.end_ns[own], steps)
        idle_ns += subtract(intersect(after, judged), input_waits).total
        blocking = own[np.isin(device.end_ns[own], after.start)]
        inside = blocking if steps is None else blocking[in_steps(device.start_ns[blocking], steps)]
        count += len(inside)
        size += int(np.maximum(device.bytes[inside], 0).sum())
    per = len(facts.gpu_timelines) * facts.steps_or_window
    idle_s = idle_ns / per / 1e9
    share = savings.removed(idle_s, facts.period_s)
    if share < limit("sync_copies.share"):
        return None
    return SyncCopies(gpus=facts.active_numbers, share=share, idle_s=idle_s, count=count / per,
                      mean_bytes=size / max(count, 1))


def describe_sync_copies(v: SyncCopies, job: Job) -> Explanation:
    return Explanation(
        title=f"Waiting for copies in the midst of the step costs {percent(v.share)} of the {job.basis}",
        why=f"{v.count:.3g} copies per {job.basis} and GPU ({v.mean_bytes:,.0f} bytes each on average) make the host "
            f"wait for all work before them; it launches on only then, and the GPU stands still for "
            f"{percent(v.share)} of the {job.basis}.",
        evidence={"idle_after_copies_s": v.idle_s, "share_ratio": v.share, f"copies_per_{job.basis}": v.count,
                  "mean_bytes": v.mean_bytes},
        action="Do not read values back within the step: keep losses, metrics and conditions on the GPU, and fetch "
               "them every so many steps.",
        snippet=_FETCH.get(job.framework),
        gain="at most: the idle time after these copies, if the host launched on without waiting",
        source=source("sync_copies.share") + "; nsys expert rules: synchronous copies, blocking calls",
    )


def held_copies(trace: Trace, copies: I64) -> I64:
    """The copies that the host waited for: their call lasts until they end, or the thread synchronizes then.

    Large copies with pageable memory are left out: they wait by nature (copies_pageable).
    """
    device, host = trace.device, trace.host
    pageable = (device.src[copies] == MemoryKind.PAGEABLE) | (device.dst[copies] == MemoryKind.PAGEABLE)
    copies = copies[~pageable | (device.bytes[copies] <= limit("copies_pageable.bytes"))]
    held = np.zeros(len(copies), bool)
    if len(device.launch_end_ns) == len(device):
        held |= device.launch_end_ns[copies] >= device.end_ns[copies]
    rows = host_rows(trace, _SYNCHRONIZE)
    for thread in np.unique(host.line[rows]).tolist():
        own = rows[host.line[rows] == thread]
        begin, end = host.start_ns[own], np.maximum.accumulate(host.end_ns[own])
        here = np.flatnonzero(device.launch_line[copies] == thread)
        # The last wait of the thread that began before the copy was over, if after its launch, and ended after it.
        at = np.searchsorted(begin, device.end_ns[copies[here]], side="right") - 1
        known = at >= 0
        held[here] |= known & (begin[at] >= device.launch_ns[copies[here]]) & (end[at] >= device.end_ns[copies[here]])
    return copies[held]


def pinned_rate(facts: TraceFacts) -> float | None:
    """Bytes per second of pinned copies of a megabyte and more with the host: what the slowest link in a node does."""
    device = facts.trace.device
    up = (device.kind == Kind.H2D) & (device.src == MemoryKind.PINNED)
    down = (device.kind == Kind.D2H) & (device.dst == MemoryKind.PINNED)
    rows = np.flatnonzero((up | down) & (device.bytes >= _LARGE_BYTES))
    if not len(rows):
        return None
    return float(np.median(device.bytes[rows] / np.maximum(device.end_ns[rows] - device.start_ns[rows], 1))) * 1e9

"""Collectives: exposed, too many, too slow, or only waiting for a GPU that is late."""

from __future__ import annotations

import math

import numpy as np

from gputop.advice import savings
from gputop.advice.registry import limit, source
from gputop.advice.trace.blocking_copies import pinned_rate
from gputop.advice.trace.facts import TraceFacts
from gputop.analysis.results_device import CollectiveOp
from gputop.core.findings import Abstained, Finding, Gain
from gputop.text.units import percent, ranges, seconds

_OVERLAP = {
    "tensorflow": "strategy = tf.distribute.MirroredStrategy(\n"
                  "    cross_device_ops=tf.distribute.NcclAllReduce(num_packs=4))  # a pack goes out while others "
                  "are computed",
    "jax": "XLA_FLAGS=--xla_gpu_enable_latency_hiding_scheduler=true",
    "pytorch": "model = DistributedDataParallel(model, gradient_as_bucket_view=True)  # reduces during the backward "
               "pass",
}
_MERGE = {
    "tensorflow": "strategy = tf.distribute.MirroredStrategy(\n"
                  "    cross_device_ops=tf.distribute.NcclAllReduce(num_packs=1))  # one AllReduce for all gradients",
    "jax": "XLA_FLAGS=--xla_gpu_all_reduce_combine_threshold_bytes=134217728",
    "pytorch": "model = DistributedDataParallel(model, bucket_cap_mb=100)",
}
_DEBUG = "NCCL_DEBUG=INFO python train.py 2>&1 | grep ' via '  # P2P or NVLS is wanted; SHM and NET/Socket are slow"


def _missing(facts: TraceFacts, id_: str) -> Abstained | None:
    """Why the rule cannot judge collectives that do take time; None where there is nothing to judge."""
    unmatched = facts.waits.unmatched if facts.waits else {}
    reason = next(iter(unmatched.values()), "")
    return Abstained(id_, (
        f"the collectives of all GPUs of the job, to tell waiting from transfer: {reason} (several ranks' files can be "
        "analysed together)")) if reason else None


def _judged(facts: TraceFacts, id_: str) -> Abstained | bool | None:
    """True where exposed collectives take enough of the step and can be judged."""
    if not facts.active or facts.shares is None:
        return Abstained(id_, "GPU activity in the trace")
    if facts.waits is None or facts.shares["collectives"] < limit("collectives.share"):
        return None
    return True if facts.waits.count else _missing(facts, id_)


def communication_exposed(facts: TraceFacts) -> Finding | Abstained | None:
    """Transfers that all GPUs have joined, with nothing computed meanwhile."""
    judged = _judged(facts, "communication_exposed")
    if judged is not True:
        return judged or None
    waits, gpus = facts.waits, facts.active
    assert waits is not None
    exposed = waits.bare_s
    free = _free_compute(facts)
    share = savings.overlapped(exposed, free, facts.period_s)
    if exposed < limit("collectives.share") * facts.period_s:
        return None
    waiting = sum(waits.waiting_s.values()) / len(waits.waiting_s)
    return Finding(
        id="communication_exposed", severity=facts.capped_severity(share),
        title=f"Communication that nothing hides takes {percent(exposed / facts.period_s)} of the {facts.basis}",
        why=facts.with_caveat(
            f"For {percent(exposed / facts.period_s)} of the {facts.basis} the GPUs exchange data, all of them "
            f"having arrived, and compute nothing; {free * 1e3:.3g} ms of compute per {facts.basis} have no "
            "communication beside them."),
        evidence={"exposed_transfer_s": exposed, "share_ratio": exposed / facts.period_s, "exposed_waiting_s": waiting,
                  "free_compute_s": free, **_per_step(facts)},
        action="Reduce gradients in a few packs while the backward pass is still running, or communicate less often by "
               "accumulating gradients.",
        snippet=_OVERLAP.get(facts.framework),
        gain=Gain(share, "at most: the exposed transfer, as far as there is compute to hide it behind"),
        gpus=tuple(gpu.gpu for gpu in gpus), source=source("collectives.share") + "; nsys-ai: overlap below 30 %",
    )


def _free_compute(facts: TraceFacts) -> float:
    """Mean seconds per step, or in the window, in which a GPU computes and does not communicate."""
    own = [(gpu.compute - (gpu.collectives - gpu.collectives_exposed)) * gpu.window_s for gpu in facts.active]
    windows = [gpu.window_s for gpu in facts.active]
    return max(sum(own), 0.0) / sum(windows) * facts.period_s


def _per_step(facts: TraceFacts) -> dict[str, float]:
    found = facts.analysis.collectives
    return {} if found is None or found.count_per_step is None else {"collectives_per_step": found.count_per_step}


def collective_waiting(facts: TraceFacts) -> Finding | Abstained | None:
    """Inside their collectives the GPUs wait for one that arrives late."""
    judged = _judged(facts, "collective_waiting")
    if judged is not True:
        return judged or None
    waits = facts.waits
    assert waits is not None
    late = sum(waits.late_s.values())
    share = savings.removed(late, facts.period_s)
    if share < limit("collectives.share"):
        return None
    names = sorted(waits.late_s, key=lambda gpu: -waits.late_s[gpu])
    main = names[0]
    alone = waits.late_s[main] >= limit("collective_waiting.one") * late
    gpus = (main,) if alone else tuple(sorted(gpu for gpu in names if waits.late_s[gpu] >= 0.1 * late))
    waiting = sum(waits.waiting_s.values()) / len(waits.waiting_s)
    told = facts.analysis.collectives
    who = f"GPU {main} arrives last" if alone else f"GPUs {ranges(gpus)} take turns to arrive last"
    others = "other GPU waits" if len(waits.waiting_s) == 2 else "others wait"
    why = (f"{who}{f' at {waits.late_times.get(main, 0)} of {waits.count} collectives' if alone else ''}, and the "
           f"{others} inside them: {seconds(waiting)} per {facts.basis} and GPU that nothing hides.")
    if told is not None and told.waiting is not None:
        why += f" Of all time in collectives {percent(told.waiting)} is waiting."
    return Finding(
        id="collective_waiting", severity=facts.capped_severity(share),
        title=(f"The {others} {percent(share)} of the {facts.basis} for GPU {main} in collectives" if alone else
               f"GPUs wait {percent(share)} of the {facts.basis} for each other in collectives"),
        why=facts.with_caveat(why),
        evidence={"late_s": late, "share_ratio": share, "exposed_waiting_s": waiting, "late_gpu": float(main),
                  "late_gpu_part_ratio": waits.late_s[main] / late, "late_by_host_ratio": waits.late_by_host_s / late,
                  "last_to_arrive_count": float(waits.late_times.get(main, 0)),
                  "collectives": float(waits.count),
                  **({} if told is None or told.waiting is None else {"waiting_of_collectives_ratio": told.waiting})},
        action=f"Find what delays GPU {main} before its collectives: its process's launches, its share of input, "
               "its CPU cores and NUMA node." if alone else
               "Make the GPUs arrive together: equal shapes and batches, input ready on all of them, no work on one "
               "process that the others do not have.",
        snippet="numactl --cpunodebind=0 --membind=0 python train.py  # per process: the node `nvidia-smi topo -m` "
                "names"
                if alone else None,
        gain=Gain(share, "if the last GPU came to each collective when the others did (their median); a faster network "
                         "saves nothing of it"),
        gpus=gpus, source=source("collectives.share") + "; HTA: stragglers by late start; true transfer is the "
                                                        "shortest duration over the GPUs",
    )


def _allreduce(facts: TraceFacts) -> CollectiveOp | None:
    found = facts.analysis.collectives
    return next((op for op in found.operations if op.operation == "AllReduce"), None) if found is not None else None


def _bytes(facts: TraceFacts, op: CollectiveOp, gpus: int) -> float | None:
    """What a GPU reduces per step (or in the window): told by the trace, else four bytes for each parameter."""
    steps = facts.analysis.steps
    if op.bytes is not None:
        per_call = op.bytes / op.count
        return per_call * (op.count / gpus if op.count_per_step is None else op.count_per_step)
    if facts.params is None or steps is None:
        return None
    return 4.0 * facts.params * steps.iterations_per_step


def allreduce_count(facts: TraceFacts) -> Finding | Abstained | None:
    """Many small AllReduces per step where a few would do: each costs its latency."""
    judged = _judged(facts, "allreduce_count")
    if judged is not True:
        return judged or None
    waits, op = facts.waits, _allreduce(facts)
    steps = facts.analysis.steps
    if waits is None or op is None or not waits.durations_s:
        return None
    if steps is None or op.count_per_step is None:
        return Abstained("allreduce_count", "training steps, to count AllReduces per step")
    count = op.count_per_step / steps.iterations_per_step
    if count <= limit("allreduce_count.many"):
        return None
    typical, least = (float(np.percentile(waits.durations_s, q)) for q in (50, 10))
    moved = _bytes(facts, op, len(waits.transfer_s))
    if moved is not None:
        per = moved / op.count_per_step
        if per >= limit("allreduce_count.message_bytes"):
            return None
        needed = max(1, math.ceil(moved / steps.iterations_per_step / limit("allreduce_count.bucket_bytes")))
    elif typical > limit("allreduce_count.latency_s"):
        return Abstained("allreduce_count", f"the model's parameters (--params N): whether {count:.0f} AllReduces "
                                            f"per step of {typical * 1e3:.2g} ms are too small is not known")
    else:
        per, needed = None, 1
    share = savings.merged(count, needed, least, waits.allreduce_exposed,
                           facts.period_s / steps.iterations_per_step)
    if share < limit("collectives.share"):
        return None
    evidence = {"allreduces_per_step": count, "needed_per_step": float(needed), "median_transfer_s": typical,
                "latency_s": least, "exposed_ratio": waits.allreduce_exposed, "share_ratio": share}
    if per is not None:
        evidence["mean_message_bytes"] = per
    size = "" if per is None else f" of {per / 1e6:.2g} MB on average"
    return Finding(
        id="allreduce_count", severity=facts.capped_severity(share),
        title=f"{count:.0f} AllReduces per step, where {needed} would do",
        why=facts.with_caveat(
            f"Each step runs {count:.0f} AllReduces{size}, {typical * 1e6:.3g} µs each (median), which is mostly their "
            f"latency; packed into {needed} the same gradients pay it {needed} time{'' if needed == 1 else 's'}."),
        evidence=evidence,
        action="Pack gradients so that each AllReduce carries tens of megabytes.",
        snippet=_MERGE.get(facts.framework),
        gain=Gain(share, "assumes that each AllReduce less saves the time of the shortest ones, as far as it is "
                         "exposed"),
        gpus=tuple(gpu.gpu for gpu in facts.active),
        source=source("allreduce_count.many", "allreduce_count.bucket_bytes", "allreduce_count.latency_s"),
    )


def allreduce_slow(facts: TraceFacts) -> Finding | Abstained | None:
    """The transfer itself, waiting left out, takes far longer than its bytes need even over the node's slowest link."""
    judged = _judged(facts, "allreduce_slow")
    if judged is not True:
        return judged or None
    waits, op = facts.waits, _allreduce(facts)
    if waits is None or op is None or op.transfer_s is None:
        return None if op is None else _missing(facts, "allreduce_slow")
    gpus = len(op.exposed_s)
    steps = facts.analysis.steps
    seconds = sum(waits.durations_s) / (steps.count if steps else 1)
    if seconds * waits.allreduce_exposed < limit("collectives.share") * facts.period_s:
        return None
    moved = _bytes(facts, op, gpus)
    if moved is None:
        return Abstained("allreduce_slow", "the model's parameters (--params N): how long an AllReduce of them "
                                           "should take")
    if len({gpu.host for gpu in facts.trace.gpus}) > 1:
        return Abstained("allreduce_slow", "the bandwidth between the hosts of this job")
    rate = pinned_rate(facts)
    if rate is None:
        return Abstained("allreduce_slow", "the links' bandwidth: the trace has no large pinned copy to measure "
                                           "PCIe by")
    count = len(waits.durations_s) / (steps.count if steps else 1)
    wanted = 2 * (gpus - 1) / gpus * moved / rate + count * limit("allreduce_slow.latency_s")
    if seconds < limit("allreduce_slow.factor") * wanted:
        return None
    share = savings.at_rate(seconds, wanted, waits.allreduce_exposed, facts.period_s)
    if share < limit("collectives.share"):
        return None
    return Finding(
        id="allreduce_slow", severity=facts.capped_severity(share),
        title=f"AllReduce takes {seconds / wanted:.1f}× what its bytes need",
        why=facts.with_caveat(
            f"{moved / 1e6:,.0f} MB per {facts.basis} are reduced in {seconds * 1e3:.3g} ms, waiting left out: "
            f"{moved / seconds / 1e9:.2g} GB/s. Even over PCIe, at the {rate / 1e9:.1f} GB/s of this trace's pinned "
            f"copies, a ring would take {wanted * 1e3:.3g} ms."),
        evidence={"transfer_s": seconds, "wanted_s": wanted, f"bytes_per_{facts.basis}": moved,
                  "bytes_per_s": moved / seconds,
                  "link_bytes_per_s": rate, "exposed_ratio": waits.allreduce_exposed, "share_ratio": share},
        action="See which transport NCCL uses: direct GPU-to-GPU (NVLink, PCIe P2P) is wanted, not sockets or "
               "copies through host memory; check NCCL_P2P_DISABLE, ACS/IOMMU settings and the container's /dev/shm.",
        snippet=_DEBUG,
        gain=Gain(share, "if it ran at the rate of the PCIe link, as far as it is exposed; NVLink is faster still"),
        gpus=tuple(gpu.gpu for gpu in facts.active),
        source=source("allreduce_slow.factor", "allreduce_slow.latency_s") + "; a ring moves 2(n-1)/n of the bytes "
                                                                             "over each link",
    )

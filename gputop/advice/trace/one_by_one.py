"""Values that a loop on the host reads one by one, as a metric sample by sample; found by the rule sync_copies."""

from __future__ import annotations

import numpy as np

from gputop.advice import savings
from gputop.advice.registry import limit, source
from gputop.advice.trace.facts import TraceFacts, removed_host_time
from gputop.advice.trace.job import Job
from gputop.advice.verdict import Explanation, Verdict
from gputop.analysis.layers.culprits import Events
from gputop.analysis.what_if.cure import Cure
from gputop.analysis.what_if.host_waits import HostWaits
from gputop.text.units import count, percent
from gputop.trace.intervals import EMPTY, Spans, coverage, intersect, merge, subtract, union
from gputop.trace.lookups import host_rows
from gputop.trace.model import I64, Kind

_COUNT_ON_GPU = {
    "pytorch": "right += (logits.argmax(1) == labels).sum()  # right: a tensor on the GPU\n"
               "print(right.item() / samples)  # once an epoch, or every hundred steps",
    "jax": "right += (logits.argmax(1) == labels).sum()  # inside jit; float(right) every hundred steps",
    "tensorflow": "right.assign_add(tf.reduce_sum(tf.cast(tf.argmax(logits, 1) == labels, tf.int64)))  # in the step",
}
_VALUE_BYTES = 64  # a number, or a few
_LAUNCHES_BETWEEN = 4  # kernels between two values: they only prepare the next one


class ReadsOneByOne(Verdict, frozen=True, kw_only=True):
    idle_s: float  # of the GPU from the first of these values to the last, per step and GPU
    reads: float  # per step and GPU
    mean_bytes: float
    item: bool  # whether tensor.item() and its kind read values


def reads_one_by_one(facts: TraceFacts, waits: HostWaits) -> ReadsOneByOne | None:
    """Many values that a loop on the host reads one by one, as a metric sample by sample: the host's whole time in it
    costs, not only its waits.

    1. Take the copies of single values to the host that are waited for, and join those that follow one another on a
       thread, within a step, with no more than a few launches between two.
    2. Of the rows that are long enough count the GPUs' idle time between the first value and the last.
    """
    loops = _loops(facts, waits)
    if not loops:
        return None
    device = facts.trace.device
    copied, begins, ends = zip(*loops, strict=True)
    rows, reading = np.concatenate(copied), intersect(union(begins, ends), facts.analyzed_spans)
    others = removed_host_time(facts, "tracing", "eager", "gap")
    idle = {timeline.gpu: subtract(intersect(Spans(timeline.gaps.start, timeline.gaps.end), reading),
                                   merge(EMPTY, others.get(timeline.gpu, EMPTY)))
            for timeline in facts.gpu_timelines}
    per = len(facts.gpu_timelines) * facts.steps_or_window
    idle_s = sum(spans.total for spans in idle.values()) / per / 1e9
    share = savings.removed(idle_s, facts.period_s)
    if share < limit("sync_copies.share"):
        return None
    rows.sort()
    return ReadsOneByOne(
        gpus=facts.active_numbers, share=share, idle_s=idle_s, reads=len(rows) / per,
        mean_bytes=float(device.bytes[rows].mean()),
        item=facts.framework == "pytorch" and bool(len(host_rows(facts.trace, r"aten::(?:item|_local_scalar_dense)$"))),
        events=Events(rows, np.full(len(rows), round(idle_s * 1e9 * per / len(rows)), np.int64)), cure=Cure(
            at_least=True, host=idle, calls=waits.chosen(rows).calls, scaled=((rows, 0.0),), assumes=(
                "The values are computed together and read once; the kernels and calls stay.")))


def _loops(facts: TraceFacts, waits: HostWaits) -> list[tuple[I64, int, int]]:
    """The rows of such copies that are long enough: copies, begin of the first wait, end of the last (ns)."""
    device, steps = facts.trace.device, facts.steps
    if steps is None:
        return []
    single = coverage(facts.analyzed_spans, waits.start_ns, waits.start_ns + 1) > 0
    single &= (waits.copy >= 0) & (device.kind[waits.copy] == Kind.D2H)
    single &= (device.bytes[waits.copy] >= 0) & (device.bytes[waits.copy] <= _VALUE_BYTES)
    out = []
    for line in np.unique(waits.line[single]).tolist():
        chosen = np.flatnonzero(single & (waits.line == line))
        chosen = chosen[np.argsort(waits.start_ns[chosen], kind="stable")]
        launches = np.sort(device.launch_ns[(device.launch_line == line) & (device.kind == Kind.COMPUTE)])
        begin = waits.start_ns[chosen]
        between = np.diff(np.searchsorted(launches, begin))
        step = np.searchsorted(steps.edges_ns[:, 0], begin, side="right")
        for row in np.split(chosen, np.flatnonzero((np.diff(step) > 0) | (between > _LAUNCHES_BETWEEN)) + 1):
            copies = np.unique(waits.copy[row])  # a call that copies and one that synchronizes wait for the same
            if len(copies) >= limit("sync_copies.one_by_one"):
                out.append((copies, int(waits.start_ns[row[0]]), int(waits.end_ns[row].max())))
    return out


def describe_one_by_one(v: ReadsOneByOne, job: Job) -> Explanation:
    by = " with .item()" if v.item else ""
    return Explanation(
        title=f"Reading {count(v.reads)} values one by one costs {percent(v.share)} of the {job.basis}",
        why=f"The host reads {count(v.reads)} single values per {job.basis} and GPU{by}. At each one it waits for all "
            f"earlier work, then prepares the next. The GPU is idle for {percent(v.share)} of the {job.basis} "
            "meanwhile.",
        evidence={"idle_after_copies_s": v.idle_s, "share_ratio": v.share, f"copies_per_{job.basis}": v.reads,
                  "mean_bytes": v.mean_bytes},
        action="Compute the values of all samples at once on the GPU. Read one result, once every hundred steps.",
        snippet=_COUNT_ON_GPU.get(job.framework),
        gain="at most: the idle time from the first of these values to the last",
        source=source("sync_copies.share", "sync_copies.one_by_one"),
    )

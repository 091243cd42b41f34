"""Rules about the way of copies: from pageable memory, or with the host waiting for each; and other waits for the
GPU."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
from msgspec import Struct

from gputop.advice import savings
from gputop.advice.fix_code import code
from gputop.advice.registry import limit, source
from gputop.advice.trace.copy_costs import KEEP_THERE, LARGE_BYTES, copied_back, cost_of_calls, fetch_fix, fetching_ops
from gputop.advice.trace.facts import TraceFacts, exposed_ns, removed_host_time
from gputop.advice.trace.job import Job
from gputop.advice.verdict import Explanation, Missing, Verdict, known
from gputop.analysis.layers.culprits import Events
from gputop.analysis.steps.user_ranges import OF_ENGINE
from gputop.analysis.what_if.cure import Calls, Cure
from gputop.analysis.what_if.dependencies import Flags
from gputop.analysis.what_if.host_waits import HostWaits, host_waits, waits_again
from gputop.text.units import count, listed, percent, size
from gputop.trace.intervals import EMPTY, Spans, coverage, intersect, merge, overlap, subtract, union
from gputop.trace.lookups import host_rows
from gputop.trace.model import I64, Kind, MemoryKind

_WAYS = {"h2d": "copies to the GPU", "d2h": "copies to the host"}
_ACTIONS = {
    "h2d": "Do not send small values to the GPU within the step: create them on the GPU, keep them there, or copy them "
           "asynchronously from pinned memory.",
    "d2h": "Do not read values back within the step: keep losses, metrics, and conditions on the GPU, and fetch them "
           "every hundred steps.",
    "results": "Do not read values back one by one: keep results and conditions on the GPU within a step, and copy all "
               "of them to pinned memory at once.",
    "sync": "Do not synchronize within the step: work on a stream stays in order without it, and CUDA events measure "
            "time without blocking.",
}
# Of copies that are no single values.
_ACTIONS_IF_LARGE = {
    "h2d": "Do not wait for large copies to the GPU: copy the next batch from pinned memory, on a separate stream, "
           "while this step computes.",
    "d2h": "Do not wait for large results: copy them to pinned memory on a separate stream.",
}


# Bytes per second of pinned copies over PCIe with 16 lanes, by the major compute capability. 55 GB/s were measured with
# an H200 (PCIe 5); of PCIe 3 and 4, with 15.8 and 31.5 GB/s, five sixths are usual.
_LINKS = {7: 13e9, 8: 26e9}
_FASTEST_LINK = 55e9
_ALLOCATED = "Allocate these arrays in pinned memory (cudaHostAlloc), or pin them (cudaHostRegister)."
_PINNED_BY = {"tensorflow": " (tf.data does this)", "pytorch": " (a DataLoader with pin_memory=True)"}


class CopiesPageable(Verdict, frozen=True, kw_only=True):
    pageable_s: float  # per step and GPU, with nothing beside the copies
    pageable_of_copies: float  # share of the time of all copies with the host that nothing hides
    bytes_per_s: float
    pinned_bytes_per_s: float | None  # of this trace's large pinned copies; None: it has none
    way: str  # "h2d" or "d2h": which of them take most time
    fetching: tuple[str, ...]  # ops whose results are copied to the host
    results_bytes: float  # mean of a copy to the host
    back: int = 0  # times that they come back (:func:`copied_back`)
    alone: bool = False  # none of them could run beside a kernel


def judge_copies_pageable(facts: TraceFacts) -> CopiesPageable | Missing | None:
    """Copies from or to pageable memory, which the driver stages: slower than the link and not beside compute."""
    if facts.shares["h2d"] + facts.shares["d2h"] < limit("copies_pageable.share"):
        return None
    gpus = [gpu for gpu in facts.analysis.gpus if gpu.busy]
    if all(gpu.copies_pageable_s is None for gpu in gpus):
        return Missing("data on the memory type (pinned or pageable) of the copies" + (
            " (kind_src, kind_dst: TensorFlow 2.11 or newer)" if facts.framework == "tensorflow" else ""))
    device, judged = facts.trace.device, facts.analyzed_spans
    copies = []
    exposed = whole = moved = pageable_ns = pinned_ns = pinned_bytes = down_ns = 0
    for timeline in facts.gpu_timelines:
        kind, src, dst = (column[timeline.events] for column in (device.kind, device.src, device.dst))
        host_end = np.where(kind == Kind.H2D, src, np.where(kind == Kind.D2H, dst, MemoryKind.UNKNOWN))
        large = device.bytes[timeline.events] > limit("copies_pageable.bytes")
        pageable = timeline.rows[(host_end == MemoryKind.PAGEABLE) & large]
        copies.append(pageable)
        hidden = merge(timeline.compute, timeline.collectives)
        exposed += overlap(subtract(union(device.start_ns[pageable], device.end_ns[pageable]), hidden), judged)
        whole += overlap(subtract(merge(timeline.h2d, timeline.d2h), hidden), judged)
        moved += int(device.bytes[pageable].sum())
        length = device.end_ns[pageable] - device.start_ns[pageable]
        pageable_ns += int(length.sum())
        down_ns += int(length[device.kind[pageable] == Kind.D2H].sum())
        pinned = timeline.rows[(host_end == MemoryKind.PINNED) & (device.bytes[timeline.events] >= LARGE_BYTES)]
        pinned_ns += int((device.end_ns[pinned] - device.start_ns[pinned]).sum())
        pinned_bytes += int(device.bytes[pinned].sum())
    exposed_s = exposed / len(facts.gpu_timelines) / facts.steps_or_window / 1e9
    share = savings.removed(exposed_s, facts.period_s)
    if share < limit("copies_pageable.share") or exposed < limit("copies_pageable.part") * whole:
        return None
    rows = np.concatenate(copies)
    calls = _staging_calls(facts, rows)
    cost = cost_of_calls(facts, calls)
    idle_s = cost.seconds(facts)
    pinned_rate = pinned_bytes / pinned_ns * 1e9 if pinned_ns else None
    alone, left, removed = _when_pinned(facts, rows, pinned_rate or _link_rate(facts))
    down = rows[device.kind[rows] == Kind.D2H]
    return CopiesPageable(
        saving=savings.removed(exposed_s * removed + idle_s, facts.period_s), spans=cost.idle,
        gpus=tuple(gpu.gpu for gpu in gpus), share=share, pageable_s=exposed_s, pageable_of_copies=exposed / whole,
        bytes_per_s=moved / pageable_ns * 1e9, pinned_bytes_per_s=pinned_rate, alone=bool(alone.all()),
        way="d2h" if 2 * down_ns > pageable_ns else "h2d", fetching=fetching_ops(facts),
        results_bytes=float(device.bytes[down].mean()) if len(down) else 0.0,
        back=copied_back(facts), events=Events(rows, exposed_ns(facts, rows)),
        cure=Cure(scaled=((rows[~alone], left[0]), (rows[alone], left[1])), calls=calls, assumes=(
            "Assumes that pinned copies are as fast as the link." if alone.all() else
            "Assumes that pinned copies overlap with compute and the host does not wait for them.")))


def _when_pinned(facts: TraceFacts, rows: I64, rate: float) -> tuple[Flags, list[float], float]:
    """Mask of the copies that run beside no kernel whatever their memory, those before the first one and after the last
    of a recording without steps; the shares of their time that the others and they take from pinned memory, and the
    share of all their time that this saves. Pinned copies run next to the kernels, and take longer than these where
    there is much to copy."""
    device, alone = facts.trace.device, np.zeros(len(rows), bool)
    for timeline in facts.gpu_timelines if facts.steps is None else ():
        places = timeline.computing_places
        if len(places):
            alone |= (device.gpu[rows] == timeline.gpu) & (
                (device.end_ns[rows] <= timeline.start_ns[places].min())
                | (device.start_ns[rows] >= timeline.end_ns[places].max()))
    length_s, pinned_s = (device.end_ns[rows] - device.start_ns[rows]) / 1e9, device.bytes[rows] / rate
    compute_s = facts.shares["compute"] * facts.period_s * len(facts.gpu_timelines) * facts.steps_or_window
    left = [min(max(pinned_s[of].sum() - beside_s, 0.0) / max(length_s[of].sum(), 1e-9), 1.0)
            for of, beside_s in ((~alone, compute_s), (alone, 0.0))]
    return alone, left, 1 - float(np.where(alone, left[1], left[0]) @ length_s) / float(length_s.sum())


def _link_rate(facts: TraceFacts) -> float:
    """Bytes per second of pinned copies that the GPUs' generation is known for; the fastest where it is unknown."""
    majors = [gpu.compute_capability[0] for gpu in facts.trace.gpus if gpu.compute_capability is not None]
    return min((_LINKS.get(max(major, min(_LINKS)), _FASTEST_LINK) for major in majors), default=_FASTEST_LINK)


def _staging_calls(facts: TraceFacts, rows: I64) -> Calls:
    """The calls that copy these, which stage the bytes and return when the last are on their way, and the
    synchronizations for them."""
    trace, device = facts.trace, facts.trace.device
    waits = host_waits(trace, math.inf).chosen(rows).calls
    rows = rows[device.launch_ns[rows] >= 0]
    made = device.launch_line[rows].astype(np.int64), device.launch_ns[rows], device.launch_end_ns[rows]
    keep = ~waits_again(trace, made[0], made[2])
    return Calls(*(np.concatenate((call[keep], wait)) for call, wait in zip(made, waits, strict=True)))


def describe_copies_pageable(v: CopiesPageable, job: Job) -> Explanation:
    evidence = known({
        "pageable_s": v.pageable_s, "share_ratio": v.share, "pageable_of_copies_ratio": v.pageable_of_copies,
        "pageable_bytes_per_s": v.bytes_per_s, "pinned_bytes_per_s": v.pinned_bytes_per_s})
    down = v.way == "d2h"
    why = (f"For {percent(v.share)} of the {job.basis}, the GPUs do nothing but copy data to or from pageable memory, "
           f"at {v.bytes_per_s / 1e9:.1f} GB/s. The driver moves such copies through a staging buffer while the host "
           "waits.")
    if v.pinned_bytes_per_s is not None:
        why += f" Pinned copies in this trace run at {v.pinned_bytes_per_s / 1e9:.1f} GB/s."
    fetch, fetch_snippet = fetch_fix(v.fetching, job)
    if v.results_bytes >= LARGE_BYTES:
        fetch, fetch_snippet = _ACTIONS_IF_LARGE["d2h"], code("sync_copies", f"large-d2h-{job.framework}")
    if v.back:
        down, fetch, fetch_snippet = True, f"{KEEP_THERE.format(v.back)} Copy the rest from pinned memory.", None
    elif v.alone and job.framework == "unknown":
        down, fetch = True, _ALLOCATED
    return Explanation(
        title=f"Pageable memory copies take {percent(v.share)} of the {job.basis}", why=why, evidence=evidence,
        action=fetch if down else (
            f"Copy from pinned memory{_PINNED_BY.get(job.framework, '')}, and copy the next batch while the current "
            "one is being processed."),
        snippet=fetch_snippet if down else code("copies_pageable", *job.keys),
        source=source("copies_pageable.share", "copies_pageable.bytes"))


_OF_TOKENS = 2  # waits per step for the sampled tokens, and for their probabilities


class WaitedCopies(Struct, frozen=True):
    """Copies of one way."""

    count: float  # per step and GPU
    mean_bytes: float


class SyncCopies(Verdict, frozen=True, kw_only=True):
    idle_s: float  # that follows from the waits, per step and GPU
    copies: Mapping[str, WaitedCopies]  # by way, "h2d" and "d2h": those that the host waited for
    syncs: float  # other calls in which it waited, per step and GPU
    way: str  # what most of them are: "h2d", "d2h" or "sync"


def judge_sync_copies(facts: TraceFacts) -> SyncCopies | ReadsOneByOne | Missing | None:
    """The host waits for copies, or for the GPU itself, in the midst of the step, so the GPU runs out of work."""
    device = facts.trace.device
    copies = (device.kind >= Kind.H2D) & (device.kind <= Kind.COPY_OTHER)
    waits = host_waits(facts.trace, limit("copies_pageable.bytes"))
    if copies.any() and not (device.launch_ns[copies] >= 0).any():
        return Missing("data on the host calls that issued the copies (correlation IDs); capture with host tracing "
                       "enabled")
    cost, one_by_one = cost_of_calls(facts, waits.calls), reads_one_by_one(facts, waits)
    if one_by_one is not None and one_by_one.idle_s > cost.seconds(facts):
        return one_by_one
    # What something else explains: functions traced or run op by op, Python between two calls of functions.
    others = removed_host_time(facts, "tracing", "eager", "gap")
    cost = cost._replace(idle={gpu: subtract(idle, others.get(gpu, EMPTY)) for gpu, idle in cost.idle.items()})
    idle_s = cost.seconds(facts)
    share = savings.removed(idle_s, facts.period_s)
    if share < limit("sync_copies.share"):
        return None
    last_wait = np.concatenate([_last_waits(facts, waits, gpu, idle.end) for gpu, idle in cost.idle.items()])
    blocking = np.unique(last_wait[last_wait >= 0])
    rows = waits.copy[blocking][waits.copy[blocking] >= 0]
    of_copy = last_wait >= 0
    of_copy[of_copy] = waits.copy[last_wait[of_copy]] >= 0
    length = np.concatenate([idle.end - idle.start for idle in cost.idle.values()])
    idle_ns = np.bincount(waits.copy[last_wait[of_copy]], length[of_copy], len(device)).astype(np.int64)
    upwards = device.kind[rows] == Kind.H2D
    of_way = {"d2h": rows[~upwards], "h2d": rows[upwards]}
    ways = {**{way: len(copied) for way, copied in of_way.items()}, "sync": len(blocking) - len(rows)}
    per = len(facts.gpu_timelines) * _steps_with_cost(facts, waits.start_ns[blocking])
    if facts.steps is not None and OF_ENGINE in facts.steps.times.anchor and len(blocking) <= _OF_TOKENS * per:
        return Missing("waits for more than the tokens of a step, which a server needs to schedule the next one")
    return SyncCopies(
        gpus=facts.active_numbers, share=share, spans=cost.idle, idle_s=idle_s, syncs=ways["sync"] / per,
        copies={way: WaitedCopies(len(copied) / per, float(np.maximum(device.bytes[copied], 0).mean()))
                for way, copied in of_way.items() if len(copied)},
        way=max(ways, key=lambda way: ways[way]), events=Events(rows, idle_ns[rows]),
        cure=Cure(calls=waits.calls, assumes=(
            "Assumes that the host keeps launching instead of waiting for copies or synchronization.")))


def _last_waits(facts: TraceFacts, waits: HostWaits, gpu: int, idle_end_ns: I64) -> I64:
    """Last wait of the GPU's own process to end before each of these ends of the GPU's idle times; -1: none."""
    trace = facts.trace
    process = (trace.gpus[gpu].host, trace.gpus[gpu].rank)
    of_process = np.array([(line.host, line.rank) == process for line in trace.lines], bool)
    chosen = np.flatnonzero(of_process[waits.line])
    chosen = chosen[np.lexsort((waits.start_ns[chosen], waits.line[chosen], waits.end_ns[chosen]))]
    index = np.searchsorted(waits.end_ns[chosen], idle_end_ns, side="right") - 1
    return np.where(index >= 0, chosen[np.maximum(index, 0)], -1) if len(chosen) else np.full(len(index), -1, np.int64)


def _steps_with_cost(facts: TraceFacts, waits_ns: I64) -> float:
    """Number of steps of these waits: without the last one where it has fewer than the others, as the idle time that
    follows a wait at a step's end lies behind it."""
    replayed, steps = facts.replayed_steps, facts.steps
    if steps is None or steps.count < limit("host.steps") or round(replayed, 6) != steps.count:
        return replayed
    in_step = np.searchsorted(steps.edges_ns[:, 0], waits_ns, side="right") - 1
    waits = np.bincount(in_step[in_step >= 0], minlength=steps.count)
    return replayed - 1 if waits[-1] < np.median(waits[:-1]) else replayed


def describe_sync_copies(v: SyncCopies | ReadsOneByOne, job: Job) -> Explanation:
    if isinstance(v, ReadsOneByOne):
        return describe_one_by_one(v, job)
    evidence = {"idle_after_copies_s": v.idle_s, "share_ratio": v.share}
    made = []
    of_way = v.copies.get(v.way)
    if v.copies:
        main = of_way or max(v.copies.values(), key=lambda copies: copies.count)
        evidence |= {f"copies_per_{job.basis}": sum(copies.count for copies in v.copies.values()),
                     "mean_bytes": main.mean_bytes}
    for way, copies in sorted(v.copies.items(), key=lambda item: -item[1].count):
        made.append(f"{count(copies.count)} {_WAYS[way]} ({size(copies.mean_bytes)} each on average)")
    if v.syncs:
        evidence[f"syncs_per_{job.basis}"] = v.syncs
        made.append(f"{count(v.syncs)} synchronizing call{'' if v.syncs == 1 else 's'}")
    what = ("the GPU" if v.way == "sync" else "copies") + (
        "" if job.basis == "window" else " in the middle of the step")
    large = of_way is not None and of_way.mean_bytes > limit("copies_pageable.bytes")
    way = "results" if job.trains is False and not large and v.way == "d2h" else v.way
    return Explanation(
        title=f"Waiting for {what} costs {percent(v.share)} of the {job.basis}",
        why=f"In {job.each}, the host waits for all earlier work on the GPU at these calls (per GPU): "
            f"{listed(made)}. When the host launches again, the GPU's queue is empty. The GPU is idle until the host "
            f"gets ahead again, for {percent(v.share)} of the {job.basis} in total.",
        evidence=evidence, action=(_ACTIONS_IF_LARGE if large else _ACTIONS).get(way, _ACTIONS["d2h"]),
        snippet=code("sync_copies", f"{'large-' if large else ''}{way}-{job.framework}"),
        source=source("sync_copies.share") + "; nsys expert rules: synchronous copies, blocking calls")


# -- values that a loop on the host reads one by one -------------------------------------------------

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
        gpus=facts.active_numbers, share=share, claim="at least", idle_s=idle_s, reads=len(rows) / per,
        mean_bytes=float(device.bytes[rows].mean()),
        item=facts.framework == "pytorch" and bool(len(host_rows(facts.trace, r"aten::(?:item|_local_scalar_dense)$"))),
        events=Events(rows, np.full(len(rows), round(idle_s * 1e9 * per / len(rows)), np.int64)), cure=Cure(
            host=idle, calls=waits.chosen(rows).calls, scaled=((rows, 0.0),), assumes=(
                "Assumes that the values are computed together and read once, and that nothing else changes.")))


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
        why=f"In {job.each}, the host reads {count(v.reads)} scalars per GPU{by}. At each read, the host waits "
            f"for all earlier work before it prepares the next op. The GPU is idle during these waits, for "
            f"{percent(v.share)} of the {job.basis}.",
        evidence={"idle_after_copies_s": v.idle_s, "share_ratio": v.share, f"copies_per_{job.basis}": v.reads,
                  "mean_bytes": v.mean_bytes},
        action="Compute the values of all samples together on the GPU, and read one result every hundred steps.",
        snippet=code("sync_copies", f"each-{job.framework}"),
        source=source("sync_copies.share", "sync_copies.one_by_one"))

"""Memory: is it allocated, freed or moved while the job trains, is it nearly full, or does each step leave some
allocated, as a list of losses with their graphs does?"""

from __future__ import annotations

import re

import numpy as np

from gputop.advice import savings
from gputop.advice.fix_code import code
from gputop.advice.registry import limit, source
from gputop.advice.trace.copy_costs import cost_of_calls
from gputop.advice.trace.facts import TraceFacts
from gputop.advice.trace.inputs import gpu_allocators
from gputop.advice.trace.job import Job
from gputop.advice.verdict import Explanation, Missing, Verdict, known
from gputop.analysis.steps.membership import step_of
from gputop.analysis.steps.model import Steps
from gputop.analysis.what_if.cure import Calls, Cure
from gputop.core.findings import Culprit, Severity
from gputop.text.units import count, percent, seconds, size
from gputop.trace.intervals import coverage, union
from gputop.trace.lookups import TORCH_HOST_MEMORY, host_rows, how_to_mark_steps, migrations
from gputop.trace.model import I64, AllocatorEvents, Kind

# -- allocation_in_steps ----------------------------------------------------------------------------

# Of device and pinned memory, and the driver's calls that map it in pieces; not the stream-ordered …Async ones. Nsight
# adds a version to names.
_CALLS = (r"(?:cuda|hip)(?:Malloc(?:3D|Array|Pitch|Managed|Host)?|Free(?:Array|Host)?|HostAlloc|HostRegister)"
          r"(?:_v\d+)?$|cuMem(?:Alloc(?:Host|Managed|Pitch)?|Free(?:Host)?|HostAlloc|Create|Release|Map|Unmap|SetAccess)"
          r"(?:_v\d+)?$|hipMem(?:AllocHost|AllocPitch|Create|Release|Map|Unmap|SetAccess)$")
_FREES = r"\w*(?:Free|Release|Unmap)"


class AllocationInSteps(Verdict, frozen=True, kw_only=True):
    idle_s: float  # that follows from the calls, per step and GPU
    calls_s: float  # that they take on the host, per step
    count: float  # per step
    frees: float  # of them, per step
    names: tuple[str, ...]


def judge_allocation_in_steps(facts: TraceFacts) -> AllocationInSteps | Missing | None:
    """Memory is allocated or freed by the driver step after step, for which the GPU waits, as after each cudaFree."""
    trace, steps = facts.trace, facts.steps
    host = trace.host
    rows = host_rows(trace, _CALLS)
    if not len(rows):
        return None
    # A program without steps allocates and frees throughout: a cache that fills up frees nothing.
    frees = rows[np.isin(rows, host_rows(trace, _FREES))]
    slices = (host.start_ns[frees] - trace.window_ns[0]) * _SLICES // max(int(np.ptp(trace.window_ns)), 1)
    again = steps is None and len(np.unique(slices)) >= _IN_MOST and len(frees) >= max(_CALLS_MIN, len(rows) // 4)
    if not again and (steps is None or steps.count < limit("allocation_in_steps.steps")):
        return Missing(f"three steps to distinguish recurring calls ({_call_names(facts, rows)[0]}) from calls at job "
                       "startup")
    if facts.basis == "period":
        return Missing("to know which of the repeated sequences are steps, because the layers of a first pass fill the "
                       f"allocator's cache. Mark steps with {how_to_mark_steps(trace)}")
    if steps is not None:
        step = step_of(host.start_ns[rows], steps)
        rows, step = rows[step >= 0], step[step >= 0]
        # Caches of the frameworks fill in the first steps; what recurs is in most of them.
        if len(np.unique(step)) <= limit("allocation_in_steps.recurring") * steps.count:
            return None
    calls = Calls(host.line[rows].astype(np.int64), host.start_ns[rows], host.end_ns[rows])
    cost = cost_of_calls(facts, calls)
    idle_s = cost.seconds(facts)
    share = savings.removed(idle_s, facts.period_s)
    if share < limit("allocation_in_steps.share"):
        return None
    names = _call_names(facts, rows)
    return AllocationInSteps(
        culprits=tuple(_calls_of(facts, rows, name) for name in names),
        gpus=facts.active_numbers, share=share, spans=cost.idle, idle_s=idle_s, count=len(rows) / facts.steps_or_window,
        calls_s=float((host.end_ns[rows] - host.start_ns[rows]).sum()) / facts.steps_or_window / 1e9,
        frees=float(np.isin(rows, frees).sum()) / facts.steps_or_window, names=names,
        cure=Cure(calls=calls, assumes=(
            "Assumes that memory comes from a pool, so that these calls take no longer than launches.")))


_SLICES, _IN_MOST, _CALLS_MIN = 10, 8, 20  # of the window; so many of them have such calls; in all


def _calls_of(facts: TraceFacts, rows: I64, name: str) -> Culprit:
    """Culprit of these calls of that name, at the longest of them."""
    host = facts.trace.host
    of_name = np.array([i for i in rows.tolist() if _plain(facts.trace.names[host.name[i]]) == name])
    length = host.end_ns[of_name] - host.start_ns[of_name]
    return Culprit(name, "host", float(length.sum()) / facts.steps_or_window / 1e9, facts.basis,
                   at_s=int(host.start_ns[of_name[length.argmax()]]) / 1e9)


def _plain(name: str) -> str:
    return name.split("_v", 1)[0]


def _call_names(facts: TraceFacts, rows: I64) -> tuple[str, ...]:
    """The calls' names, those of most time first."""
    host = facts.trace.host
    time = np.bincount(host.name[rows], weights=host.end_ns[rows] - host.start_ns[rows] + 1)
    order = sorted(np.flatnonzero(time).tolist(), key=lambda i: (-time[i], facts.trace.names[i]))
    return tuple(dict.fromkeys(_plain(facts.trace.names[i]) for i in order[:3]))


def describe_allocation_in_steps(v: AllocationInSteps, job: Job) -> Explanation:
    frees = (f"{count(v.frees)} of these calls free memory, and such a call may block until all work on the GPU is "
             "done. " if v.frees else "")
    when = "during steps" if job.basis == "step" else "repeatedly"
    return Explanation(
        title=f"Allocating device memory {when} costs {percent(v.share)} of the {job.basis}",
        why=f"{count(v.count)} calls per {job.basis} ({', '.join(v.names)}) allocate or free memory through the driver "
            f"and take {seconds(v.calls_s)} on the host. {frees}These calls leave the GPU idle for {percent(v.share)} "
            f"of the {job.basis}.",
        evidence={"idle_after_calls_s": v.idle_s, "calls_s": v.calls_s, f"calls_per_{job.basis}": v.count,
                  f"frees_per_{job.basis}": v.frees, "share_ratio": v.share},
        action=f"Reuse memory{' across steps' if job.basis == 'step' else ''}, with a caching or pooling allocator. If "
               "the allocator already has a cache, find out what empties it: full memory, or an explicit call.",
        snippet=code("allocation_in_steps", job.framework),
        source=source("allocation_in_steps.share", "allocation_in_steps.recurring"))


_PREFETCH = r"(?:cu|cuda|hip)MemPrefetch(?:Async|BatchAsync)"


class ManagedMemory(Verdict, frozen=True, kw_only=True):
    migration_s: float  # per step and GPU
    count: float  # migrations per step and GPU
    to_gpu_bytes: float  # per step and GPU
    to_host_bytes: float


def judge_managed_memory(facts: TraceFacts) -> ManagedMemory | Missing | None:
    """Pages of managed memory move between host and GPU while the job trains: kernels that touch them wait."""
    trace = facts.trace
    device = trace.device
    rows = np.flatnonzero(migrations(device))
    if not len(rows):
        return None
    judged, per = facts.analyzed_spans, len(facts.gpu_timelines) * facts.steps_or_window
    rows = rows[coverage(judged, device.start_ns[rows], device.start_ns[rows] + 1) > 0]
    each = [rows[device.gpu[rows] == timeline.gpu] for timeline in facts.gpu_timelines]
    spans = [union(device.start_ns[of_gpu], device.end_ns[of_gpu]) for of_gpu in each]
    migration_s = sum(of_gpu.total for of_gpu in spans) / per / 1e9
    share = savings.removed(migration_s, facts.period_s)
    if share < limit("managed_memory.share"):
        return None
    if len(host_rows(trace, _PREFETCH)):
        return Missing("to know which migrations of managed memory were prefetched, and which ones a kernel waited for")
    up, down = (int(np.maximum(device.bytes[rows[device.kind[rows] == way]], 0).sum()) for way in (Kind.H2D, Kind.D2H))
    return ManagedMemory(
        gpus=facts.active_numbers, share=share, migration_s=migration_s, count=len(rows) / per,
        spans=dict(zip((timeline.gpu for timeline in facts.gpu_timelines), spans, strict=True)),
        to_gpu_bytes=up / per, to_host_bytes=down / per)


def describe_managed_memory(v: ManagedMemory, job: Job) -> Explanation:
    back = (" Memory moves both ways, so either the host also uses the memory, or it does not fit on the GPU."
            if v.to_host_bytes >= limit("managed_memory.back") * v.to_gpu_bytes else "")
    return Explanation(
        title=f"Managed memory moves between host and GPU for {percent(v.share)} of the {job.basis}",
        why=f"In {job.each}, {count(v.count)} migrations per GPU move {size(v.to_gpu_bytes)} of memory to the GPU and "
            f"{size(v.to_host_bytes)} to the host, because a kernel or the host uses pages that are elsewhere. Kernels "
            f"wait for these migrations for {percent(v.share)} of the {job.basis}.{back}",
        evidence={"migrations_s": v.migration_s, "migrations_count": v.count, "to_gpu_bytes": v.to_gpu_bytes,
                  "to_host_bytes": v.to_host_bytes, "share_ratio": v.share},
        action="Prefetch the data that the next kernels read, or keep it in device memory. If the data does not fit, "
               "use a smaller batch.",
        snippet=code("managed_memory", job.framework), source=source("managed_memory.share"),
        gain="assumes that the memory is already where it is used, without any migration")


_NO_GAIN = "none: a fix prevents an out-of-memory error and saves no time"


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
        fragmentation=pieces, in_pieces=in_pieces, holder=None if top is None else (top.op, top.bytes))


def describe_memory_pressure(v: MemoryPressure, job: Job) -> Explanation:
    full, left = v.peak_bytes / v.capacity_bytes, v.capacity_bytes - v.peak_bytes
    why = f"At peak, the allocator of GPU {v.fullest} had {size(left)} of {size(v.capacity_bytes)} left."
    if v.fragmentation is not None and v.in_pieces:
        why += f" Up to {percent(v.fragmentation)} of the free memory was outside the largest free block."
    if v.holder is not None:
        why += f" {v.holder[0]} held most of the memory allocated in the window ({size(v.holder[1])})."
    fragments_less = v.in_pieces and job.framework == "tensorflow"
    return Explanation(
        title=f"GPU {v.fullest}'s allocator was {percent(full)} full", why=why,
        evidence=known({"peak_bytes": float(v.peak_bytes), "capacity_bytes": float(v.capacity_bytes),
                        "peak_ratio": full, "left_bytes": float(left), "fragmentation_ratio": v.fragmentation}),
        action="Free memory before an allocation fails: use a smaller batch with gradient accumulation, mixed "
               "precision, or activation recomputation"
               + (". TensorFlow's asynchronous allocator reduces fragmentation." if fragments_less else "."),
        snippet=code("memory_pressure", *job.keys), gain=_NO_GAIN,
        source=source("trace_memory.warn", "trace_memory.critical"))


_HOUR_S = 3600.0
_ONLY_RANK = re.compile(r"rank \d+: ")


class MemoryGrowth(Verdict, frozen=True, kw_only=True):
    allocator: str
    per_step_bytes: float
    bytes_per_s: float
    steps: int
    on_host: bool


def judge_memory_growth(facts: TraceFacts) -> MemoryGrowth | Missing | None:
    """The least that an allocator holds in a step rises from each step to the next, at about one rate.

    The first step is left out: what is freed in it may have been allocated before the records began.
    """
    events, steps = facts.trace.allocator, facts.steps
    complete = (events.allocator >= 0) & (events.in_use_bytes >= 0)
    if not complete.any():
        return Missing("data on the memory held by PyTorch's allocators, which torch.profiler records with "
                       "profile_memory=True. Without that option, `gputop record` can still show host memory growth "
                       "over hours")
    if steps is None or steps.count < limit("memory_growth.steps"):
        return Missing(f"{limit('memory_growth.steps'):.0f} complete steps; capture a longer trace")
    if facts.basis == "period":
        return Missing("to know which of the repeated op sequences are steps, because the layers of one pass keep "
                       f"their activations. Mark steps with {how_to_mark_steps(facts.trace)}")
    growth = {}
    for allocator in np.unique(events.allocator[complete]).tolist():
        rows = np.flatnonzero(complete & (events.allocator == allocator))
        per_step = _growth(_floors(events, rows, steps)[1:])
        if per_step is not None:
            growth[facts.trace.names[allocator]] = per_step
    if not growth:
        return None
    fastest = max(growth, key=lambda name: growth[name])
    per_s = growth[fastest] / steps.times.mean_s
    if per_s * _HOUR_S < limit("memory_growth.bytes_per_hour"):
        return None
    ranks = {_ONLY_RANK.match(name) for name in growth}
    return MemoryGrowth(
        gpus=(), severity="medium", allocator=fastest if len(ranks) > 1 else _ONLY_RANK.sub("", fastest),
        per_step_bytes=growth[fastest], bytes_per_s=per_s, steps=steps.count,
        on_host=fastest.endswith(TORCH_HOST_MEMORY))


def _floors(events: AllocatorEvents, rows: I64, steps: Steps) -> I64:
    """The least that is in use in each step; without an event in a step what was in use before."""
    time, in_use = events.time_ns[rows], events.in_use_bytes[rows]
    first, last = (np.searchsorted(time, edge) for edge in (steps.edges_ns[:, 0], steps.edges_ns[:, 1]))
    before = in_use[np.maximum(first - 1, 0)]
    return np.array([held if a == b else int(in_use[a:b].min())
                     for a, b, held in zip(first.tolist(), last.tolist(), before.tolist(), strict=True)], np.int64)


def _growth(floors: I64) -> float | None:
    """Bytes per step; None where they do not rise in nearly every step, or not at about one rate in both halves."""
    more = np.diff(floors)
    if (more > 0).mean() < limit("memory_growth.rising"):
        return None
    halves = sorted(float(np.mean(half)) for half in np.array_split(more, 2))
    if halves[0] < limit("memory_growth.halves") * halves[1]:
        return None
    return float(np.median(more))


def describe_memory_growth(v: MemoryGrowth, job: Job) -> Explanation:
    hour = v.bytes_per_s * _HOUR_S
    where = "host memory" if v.on_host else "GPU memory"
    return Explanation(
        title=f"Each step leaves {size(v.per_step_bytes)} of {where} allocated: {size(hour)} an hour",
        why=(f"Over {v.steps} steps of {seconds(job.period_s)}, the {v.allocator} grew from each step to the next, by "
             f"{size(v.per_step_bytes)} per step (median). The program keeps references to tensors of earlier steps."),
        evidence={"grows_bytes_per_step": v.per_step_bytes, "grows_bytes_per_s": v.bytes_per_s},
        action=("Keep numbers from past steps, not tensors with their graphs. Look for lists, dicts, and attributes "
                "that grow in the loop: losses, outputs, a sum of losses."),
        snippet=code("memory_growth", "pytorch"), gain=_NO_GAIN,
        source=source("memory_growth.rising", "memory_growth.steps"))

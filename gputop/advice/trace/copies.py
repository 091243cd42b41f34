"""Copies: does the GPU spend its time moving data instead of computing?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from gputop.advice import savings
from gputop.advice.fix_code import code, joined
from gputop.advice.registry import limit, source
from gputop.advice.trace.copy_costs import KEEP_THERE, copied_back, fetch_fix, fetching_ops
from gputop.advice.trace.facts import TraceFacts, exposed_ns, once_per_trace
from gputop.advice.trace.job import Job
from gputop.advice.verdict import Explanation, Missing, Verdict
from gputop.analysis.layers.culprits import Events
from gputop.analysis.results import GpuUse
from gputop.analysis.what_if.cure import NO_ROWS, Cure
from gputop.text.units import percent
from gputop.trace.intervals import coverage, overlap, union
from gputop.trace.lookups import distinct, host_rows, migrations, spans_of
from gputop.trace.model import Kind, MemoryKind

_FEWER = ("Move fewer bytes to the GPU: send data in a compact type (uint8, bfloat16), convert it on the GPU, and keep "
          "tables and constants there.")
_H2D = f"{_FEWER} Copy the next batch while the current one is being processed."
_H2D_OF_A_PROGRAM = ("Keep arrays on the GPU from kernel to kernel (in OpenACC and OpenMP, a data region around the "
                     "loop). Copy only what changes, and copy the next part while the current one is being processed.")
_SWAPPED = ("The step swaps tensors to host memory and back. Swap fewer of them, or swap them earlier. Or use a "
            "smaller batch, or recompute activations in the backward pass (gradient checkpointing).")
_SWAPS = r".*:_CopyFrom(?:GpuToHost|HostToGpu)$"  # TensorFlow's Large Model Support
_OFFLOADED = ("Keep the parameters on the GPU instead of in host memory (CPU offload), in 16-bit precision or sharded "
              "over more GPUs if they do not fit. Or copy the next layer's parameters while this layer computes.")
_MAYBE_OFFLOADED = "If parameters are in host memory (CPU offload), keep them on the GPU. Otherwise: "
# What copies the parameters of a layer before it runs: PyTorch's FSDP, accelerate's hooks, DeepSpeed's ZeRO.
_FETCHES = (r"FSDP::(?:pre_|backward_prefetch|all_gather)|fsdp::all_gather_copy_in|FullyShardedDataParallel\._pre_|"
            r"(?:.*/)?accelerate/hooks\.py\(\d+\): pre_forward|(?:.*/)?deepspeed/runtime/(?:zero|swap_tensor)/")
_FETCHES_WORDS = ("fsdp::", "fullysharded", "accelerate/hooks", "deepspeed/runtime")
# Bytes of a copy that may be a weight; rounds of such copies, with kernels between. gputop's own figures.
_LARGE, _ROUNDS = 1 << 20, 8
_PAGEABLE = "Most of the copy time is due to pageable memory. "
_PINNED = {
    "tensorflow": "Use tf.data instead of NumPy arrays and prefetch, so that copies use pinned buffers and overlap "
                  "with compute.",
    "pytorch": "Let the DataLoader pin its batches (pin_memory=True) and copy them with non_blocking=True, so that "
               "copies overlap with compute.",
    "": "Copy from pinned memory ahead of the step, so that copies overlap with compute.",
}
_D2D = "Avoid copies within the GPU: fix layouts and concatenations where they originate{}."
_FUSED_AWAY = {"tensorflow": ", or let XLA fuse the copies away", "jax": ", inside one jit, so that XLA can fuse them",
               "pytorch": ", or let torch.compile fuse the copies away"}
_STAGED = (" JAX stages NumPy arrays in pinned memory; the host's copy to that memory takes additional time, which is "
           "not part of this share.")
_KINDS = {"h2d": Kind.H2D, "d2h": Kind.D2H, "d2d": Kind.D2D}


class CopiesExcessive(Verdict, frozen=True, kw_only=True):
    ways: Mapping[str, float]  # h2d, d2h: share of the step; d2d: of the device window
    worst: str  # the way that takes most
    rates: Mapping[str, float]  # number, bytes and rate of the copies of that way, by their names in the evidence
    pageable: float | None  # share of the time of copies with the host; None: not known
    compute: float  # share of the step
    offloaded: bool | None = False  # most are parameters that lie in the host's memory; None: perhaps
    fetching: tuple[str, ...] = ()  # ops whose results are copied to the host, those of most time first
    back: int = 0  # times that they come back (:func:`copied_back`)
    swapped: bool = False  # ops swap tensors to the host and back


def judge_copies_excessive(facts: TraceFacts) -> CopiesExcessive | Missing | None:
    """Copies take a large part of the time with no compute and no collective beside them.

    Copies from and to the host are judged together, as shares of the step. Those within the GPU count as its own work
    in the breakdown: what they take is a share of the device window, from a GPU's first event to its last.
    """
    if facts.steps is None and not facts.active:
        return Missing("kernels; a trace with only copies shows job startup, so capture while the job trains")
    gpus = [gpu for gpu in facts.analysis.gpus if gpu.busy]
    # Those within a GPU are no more than the copies that nothing hides.
    within = [min(gpu.copies_s.get("d2d", 0.0) / gpu.window_s, gpu.copies_exposed or 0.0) for gpu in gpus]
    ways = {"h2d": facts.shares["h2d"], "d2h": facts.shares["d2h"], "d2d": sum(within) / len(gpus)}
    worst = max(ways, key=lambda way: ways[way])
    share = ways["d2d"] if worst == "d2d" else ways["h2d"] + ways["d2h"]
    if share < limit("copies_excessive.share"):
        return None
    if worst != "d2d" and migrations(facts.trace.device)[_copies(facts, ["h2d", "d2h"]).rows].all():
        return None  # they are judge_managed_memory's
    swapped = worst != "d2d" and len(host_rows(facts.trace, _SWAPS)) > 1
    of_kind = [gpu for gpu in gpus if gpu.copies_pageable_s is not None]
    known_s = sum(gpu.copies_s.get(way, 0.0) for gpu in of_kind for way in ("h2d", "d2h"))
    pageable_s = sum(gpu.copies_pageable_s or 0.0 for gpu in of_kind)
    return CopiesExcessive(
        gpus=tuple(gpu.gpu for gpu in gpus), share=share, ways=ways, worst=worst, rates=_rates(gpus, worst, facts),
        pageable=pageable_s / known_s if known_s else None, compute=facts.shares["compute"],
        offloaded=offloaded(facts), fetching=fetching_ops(facts), back=copied_back(facts),
        swapped=swapped, events=None if swapped else _copies(facts, [worst]), cure=Cure(
            scaled=((_copies(facts, ["d2d"] if worst == "d2d" else ["h2d", "d2h"]).rows, 0.0),),
            assumes="Assumes that these copies are avoided or overlap with compute."),
        # JAX's host copies each array to pinned memory and back as well: that goes, too, and is not counted.
        # A replay does not know which ops wait for a tensor that is swapped.
        claim=None if not facts.active else "at least" if swapped else (
            "about" if facts.framework == "jax" and worst != "d2d" else "measured"))


@once_per_trace
def offloaded(facts: TraceFacts) -> bool | None:
    """Return whether most bytes that are copied to the GPUs are parameters that lie in the host's memory: what fetches
    a layer's parameters copies them. None: they come in as many rounds of a step, which may be those of micro-batches.
    """
    device, trace = facts.trace.device, facts.trace
    rows = np.flatnonzero((device.kind == Kind.H2D) & (device.bytes > 0))
    half = device.bytes[rows].sum() / 2
    rows = rows[device.bytes[rows] >= _LARGE]
    if device.bytes[rows].sum() < max(half, 1):
        return False
    fetches = spans_of(trace, host_rows(trace, _FETCHES, words=_FETCHES_WORDS))
    fetched = coverage(fetches, device.launch_ns[rows], device.launch_ns[rows] + 1) > 0
    if fetched.sum() > facts.steps_or_window and device.bytes[rows[fetched]].sum() >= half:
        return True
    rounds = 0
    for timeline in facts.gpu_timelines:
        computing_ns = timeline.start_ns[timeline.computing_places]
        copied_ns = device.start_ns[rows[device.gpu[rows] == timeline.gpu]]
        rounds = max(rounds, len(np.unique(np.searchsorted(computing_ns, copied_ns))))
    return None if rounds >= _ROUNDS * facts.steps_or_window and facts.basis == "step" else False


def _copies(facts: TraceFacts, ways: Sequence[str]) -> Events:
    """The copies of these ways, each with the time that nothing hides."""
    rows = np.flatnonzero(np.isin(facts.trace.device.kind, [_KINDS[way] for way in ways]))
    return Events(rows, exposed_ns(facts, rows))


def _snippet(way: str, job: Job) -> str | None:
    if job.framework != "tensorflow":
        return None
    if way == "d2d":
        return job.xla
    return joined(None if len(job.gpus) > 1 else code("copies_excessive", "ahead"), code("copies_excessive", *job.keys))


def describe_copies_excessive(v: CopiesExcessive, job: Job) -> Explanation:
    within = v.worst == "d2d"
    basis = "GPU's recorded time" if within else job.basis
    evidence = {f"{way}_of_{'window' if way == 'd2d' else job.basis}_ratio": value
                for way, value in v.ways.items() if value}
    evidence.update(v.rates)
    if v.pageable is not None and not within:
        evidence["pageable_ratio"] = v.pageable
    fetch, fetch_snippet = fetch_fix(v.fetching, job)
    h2d = _H2D_OF_A_PROGRAM if job.framework == "unknown" else _H2D if v.claim else _FEWER
    action, pinned = {"h2d": h2d, "d2h": fetch, "d2d": _D2D.format(_FUSED_AWAY.get(job.framework, ""))}[v.worst], ""
    snippet = fetch_snippet if v.worst == "d2h" else _snippet(v.worst, job)
    if v.worst == "h2d" and v.pageable is not None:
        if v.pageable >= limit("copies_excessive.pageable"):
            action = _PAGEABLE + _PINNED.get(job.framework, _PINNED[""])
        else:
            beside = " or overlapping with compute" if v.claim else ""
            pinned = _STAGED if job.framework == "jax" else (
                f" The memory is already pinned, so only moving fewer bytes{beside} helps.")
    rate = v.rates.get(f"{v.worst}_bytes_per_s")
    name = {"h2d": "to the GPU", "d2h": "back to the host", "d2d": "within the GPU"}[v.worst]
    why = f"For {percent(v.share)} of the {basis}, the GPUs only copy data{'' if within else ', mostly'} {name}"
    why += f" at {rate / 1e9:.1f} GB/s." if rate else "."
    if v.offloaded and v.worst == "h2d":
        action, snippet = _OFFLOADED, code("copies_excessive", "offload") if job.framework == "pytorch" else None
    elif v.offloaded is None and v.worst == "h2d":
        action = _MAYBE_OFFLOADED + action[:1].lower() + action[1:]
    elif (v.back or v.swapped) and not within:
        action, snippet = _SWAPPED if v.swapped else KEEP_THERE.format(v.back), None
    other = "d2h" if v.worst == "h2d" else "h2d"
    if not within and not v.back and not v.swapped and v.ways[other] >= limit("copies_excessive.share"):
        action += f" {fetch if other == 'd2h' else h2d}"
    if v.claim is None:
        how = "nothing shows which of these copies the job needs, because no kernel runs"
    elif within:
        how = " or overlap with compute, and takes their share of the GPU's recorded time as that of the step"
    else:  # copies hide behind no more compute than there is
        how = " or overlap with compute" if v.compute >= v.share else (
            f"; overlap with the existing compute saves {percent(v.compute)}")
    return Explanation(
        title=f"Copies{' within the GPU' if within else ''} take {percent(v.share)} of the {basis}", why=why + pinned,
        evidence=evidence, action=action, snippet=snippet, source=source("copies_excessive.share"),
        gain=how if v.claim is None else f"assumes that all exposed copies are avoided{how}")


def _rates(gpus: list[GpuUse], way: str, facts: TraceFacts) -> dict[str, float]:
    """Bytes, number and rate of the copies that way, per GPU; per step where there are steps."""
    seconds = sum(gpu.copies_s.get(way, 0.0) for gpu in gpus)
    sizes = [gpu.copies_bytes.get(way) for gpu in gpus if way in gpu.copies_s]
    windows = sum(gpu.window_s for gpu in gpus)
    scale = facts.period_s / windows if windows else 0.0
    per = "in_window" if facts.basis == "window" else f"per_{facts.basis}"
    out = {f"{way}_count_{per}": sum(gpu.copies_count.get(way, 0) for gpu in gpus) * scale}
    counted = [size for size in sizes if size is not None]
    if counted and len(counted) == len(sizes) and seconds:
        out[f"{way}_bytes_{per}"] = sum(counted) * scale
        out[f"{way}_bytes_per_s"] = sum(counted) / seconds
    return out


_SHOWN_STREAMS = 4


class DefaultStream(Verdict, frozen=True, kw_only=True):
    exposed_s: float  # pinned copies with the host, with nothing beside them, per step and GPU
    bytes_per_s: float
    streams: tuple[str, ...]


def judge_default_stream(facts: TraceFacts) -> DefaultStream | None:
    """All kernels and copies of a GPU are on one stream, so that pinned copies cannot run beside compute."""
    if offloaded(facts):
        return None
    device, judged = facts.trace.device, facts.analyzed_spans
    exposed = moved = whole = 0
    lines: dict[str, None] = {}
    rows = [NO_ROWS]
    for timeline in facts.gpu_timelines:
        copied_rows = timeline.rows[np.flatnonzero((timeline.kind == Kind.H2D) | (timeline.kind == Kind.D2H))]
        host_end = np.where(device.kind[copied_rows] == Kind.H2D, device.src[copied_rows], device.dst[copied_rows])
        pinned = host_end == MemoryKind.PINNED
        copied_rows = copied_rows[pinned & (device.bytes[copied_rows] > limit("copies_pageable.bytes"))]
        if not len(copied_rows):
            continue
        streams = distinct(device.line[timeline.events])
        if len(streams) > 1:
            return None
        lines[facts.trace.lines[int(streams[0])].name] = None
        copied = union(device.start_ns[copied_rows], device.end_ns[copied_rows])
        exposed += overlap(copied, judged)
        whole += int((device.end_ns[copied_rows] - device.start_ns[copied_rows]).sum())
        moved += int(device.bytes[copied_rows].sum())
        rows.append(copied_rows)
    exposed_s = exposed / len(facts.gpu_timelines) / facts.steps_or_window / 1e9
    share = savings.removed(min(exposed_s, facts.shares["compute"] * facts.period_s), facts.period_s)
    if share < limit("default_stream.share"):
        return None
    copies = np.concatenate(rows)
    return DefaultStream(gpus=facts.active_numbers, share=share, exposed_s=exposed_s, bytes_per_s=moved / whole * 1e9,
                         streams=tuple(lines)[:_SHOWN_STREAMS], events=Events(copies), cure=Cure(
                             scaled=((copies, max(1 - share * facts.period_s / exposed_s, 0.0)),),
                             assumes="Assumes that these copies overlap with compute, if there is enough compute."))


def describe_default_stream(v: DefaultStream, job: Job) -> Explanation:
    return Explanation(
        title=f"Copies on the same stream as the kernels cost {percent(v.share)} of the {job.basis}",
        why=f"All kernels and copies of a GPU use one stream ({', '.join(v.streams)}) and wait for each other. Pinned "
            f"copies between host and GPU take {percent(v.exposed_s / job.period_s)} of the {job.basis}, at "
            f"{v.bytes_per_s / 1e9:.1f} GB/s, and could overlap with compute.",
        evidence={"exposed_copies_s": v.exposed_s, "bytes_per_s": v.bytes_per_s, "share_ratio": v.share},
        action="Copy the next batch on a separate stream while the current one is being processed.",
        snippet=code("default_stream", job.framework), source=source("default_stream.share"))

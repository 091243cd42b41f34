"""The figures that an analysis of a simulated trace must find, computed from the timeline it was written from."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gputop.simulation.program import I64
from gputop.simulation.timeline import MS, JobTimeline
from tests.advice.labeled.programs import KINDS, MATMULS
from tests.advice.labeled.timelines import lead_steps

_MATMULS = [KINDS.index(kind) for kind in MATMULS]

Spans = list[tuple[int, int]]


@dataclass(frozen=True)
class GpuTruth:
    """Shares of the time from the GPU's first event in the window to its last; seconds."""

    busy: float
    compute: float
    collectives: float
    exposed: float
    copies: float
    kernels: int
    copied_bytes: dict[str, int]
    copied_s: dict[str, float]
    copied: dict[str, int]
    launch_delay_s: float | None
    matmul_share: float  # of the compute kernels' summed time


@dataclass(frozen=True)
class Truth:
    step_starts_ns: list[int]  # anchors in the window
    step_mean_s: float | None  # of the whole steps in the window, a warm-up step included
    wait_ratio: float | None
    gpus: list[GpuTruth]
    collective_waiting: float | None
    collectives_per_step: float


def capture_window(timeline: JobTimeline) -> tuple[int, int]:
    """The capture's begin and end: anywhere within the first and the last step, as of a user's key press."""
    job, steps = timeline.job, timeline.steps
    if not job.clip:
        return 0, timeline.end + 2 * MS
    rng = job.rng("window")
    first = [s.start for s in steps if s.first]
    at = lead_steps(job)
    low, high = first[at], first[-1]
    begin = low + int(float(rng.uniform(0.1, 0.9)) * (first[at + 1] - low))
    end = high + int(float(rng.uniform(0.1, 0.9)) * (timeline.end - high))
    return begin, end


def truth(t: JobTimeline) -> Truth:
    begin, end = capture_window(t)
    starts = [anchor for anchor in _anchors(t) if begin <= anchor[0] and anchor[1] <= end]
    edges = [a for a, _ in starts]
    mean = (edges[-1] - edges[0]) / (len(edges) - 1) / 1e9 if len(edges) > 1 else None
    ratio = None
    if mean is not None:
        waits = [(s.request, s.ready) for s in t.steps if s.request >= begin and s.ready <= end]
        inside = sum(max(0, min(b, edges[-1]) - max(a, edges[0])) for a, b in waits)
        ratio = inside / (edges[-1] - edges[0])
    seen = t.job.captured_gpus
    gpus = [_gpu(t, g, begin, end) for g in range(seen)]
    return Truth(edges, mean, ratio, gpus, _waiting(t, begin, end) if seen > 1 else None,
                 t.job.comm_count * t.job.iterations if t.job.gpus > 1 and t.job.comm_ms else 0)


def _anchors(t: JobTimeline) -> Spans:
    """Begin and end of what marks each step: the call, or the marker around it."""
    own = t.job.style in ("custom", "jax_pjit")
    out: Spans = []
    for step in t.steps:
        if step.first:
            out.append((step.ready + 20_000 if own else step.start, step.back))
        else:
            out[-1] = (out[-1][0], step.back)
    return out


def _gpu(t: JobTimeline, gpu: int, begin: int, end: int) -> GpuTruth:
    kernels, collectives = ([ops.select((ops.start >= begin) & (ops.end <= end)) for ops in (
        t.compute[gpu], t.collectives[gpu])])
    copies = [c for c in t.copies[gpu] if c.start >= begin and c.end <= end]
    moved = [(c.start, c.end) for c in copies]
    compute = _pairs(kernels.start, kernels.end)
    collected = _pairs(collectives.start, collectives.end)
    every = compute + collected + moved
    whole = max(b for _, b in every) - min(a for a, _ in every)
    ways = {way: [c for c in copies if c.copy.way == way] for way in sorted({c.copy.way for c in copies})}
    delays = np.concatenate([(ops.start - ops.launch_end)[ops.launch_end >= begin] for ops in (kernels, collectives)])
    matmul = np.isin(t.programs[gpu].kind, _MATMULS)[kernels.row]
    length = kernels.end - kernels.start
    return GpuTruth(
        busy=_union(every) / whole, compute=_union(compute) / whole, collectives=_union(collected) / whole,
        exposed=(_union(compute + collected) - _union(compute)) / whole, copies=_union(moved) / whole,
        kernels=len(kernels.row) + len(collectives.row),
        copied_bytes={way.lower(): sum(c.copy.size for c in own) for way, own in ways.items()},
        copied_s={way.lower(): sum(c.end - c.start for c in own) / 1e9 for way, own in ways.items()},
        copied={way.lower(): len(own) for way, own in ways.items()},
        launch_delay_s=float(np.median(delays)) / 1e9 if len(delays) else None,
        matmul_share=float(length[matmul].sum() / length.sum()) if len(length) else 0.0,
    )


def _waiting(t: JobTimeline, begin: int, end: int) -> float | None:
    """1 - transfer / summed time of the collectives that all GPUs have in the window."""
    if not len(t.collectives[0].row):
        return None
    start = np.stack([ops.start for ops in t.collectives])
    stop = np.stack([ops.end for ops in t.collectives])
    seen = (start.min(axis=0) >= begin) & (stop.max(axis=0) <= end)
    length = (stop - start)[:, seen]
    return float(1 - length.min(axis=0).sum() * len(length) / length.sum())


def _pairs(start: I64, stop: I64) -> Spans:
    return list(zip(start.tolist(), stop.tolist(), strict=True))


def _union(spans: Spans) -> int:
    total, reach = 0, -(1 << 62)
    for a, b in sorted(spans):
        total += max(0, b - max(a, reach))
        reach = max(reach, b)
    return total

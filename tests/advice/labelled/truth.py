"""What a trace's figures must come out as, from the timeline it was written from: the generator's own account."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tests.advice.labelled.program import I64
from tests.advice.labelled.record import window
from tests.advice.labelled.timeline import Timeline

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


def truth(t: Timeline) -> Truth:
    begin, end = window(t)
    starts = [anchor for anchor in _anchors(t) if begin <= anchor[0] and anchor[1] <= end]
    edges = [a for a, _ in starts]
    mean = (edges[-1] - edges[0]) / (len(edges) - 1) / 1e9 if len(edges) > 1 else None
    ratio = None
    if mean is not None:
        waits = [(s.request, s.ready) for s in t.steps if s.request >= begin and s.ready <= end]
        inside = sum(max(0, min(b, edges[-1]) - max(a, edges[0])) for a, b in waits)
        ratio = inside / (edges[-1] - edges[0])
    seen = 0 if t.job.cpu_only else t.job.seen_gpus or t.job.gpus
    gpus = [_gpu(t, g, begin, end) for g in range(seen)]
    return Truth(edges, mean, ratio, gpus, _waiting(t, begin, end) if seen > 1 else None,
                 t.job.comm_count * t.job.iterations if t.job.gpus > 1 and t.job.comm_ms else 0)


def _anchors(t: Timeline) -> Spans:
    """Begin and end of what marks each step: the call, or the marker around it."""
    own = t.job.style in ("custom", "jax_pjit")
    out: Spans = []
    for step in t.steps:
        if step.first:
            out.append((step.ready + 20_000 if own else step.start, step.back))
        else:
            out[-1] = (out[-1][0], step.back)
    return out


def _gpu(t: Timeline, gpu: int, begin: int, end: int) -> GpuTruth:
    name, _, start, stop, _, launched = t.compute[gpu].columns()
    seen = (start >= begin) & (stop <= end)
    _, _, c_start, c_stop, _, c_launched = t.collectives[gpu].columns()
    c_seen = (c_start >= begin) & (c_stop <= end)
    copies = [c for c in t.copies[gpu] if c.start >= begin and c.end <= end]
    moved = [(c.start, c.end) for c in copies]
    compute = _pairs(start[seen], stop[seen])
    collected = _pairs(c_start[c_seen], c_stop[c_seen])
    every = compute + collected + moved
    whole = max(b for _, b in every) - min(a for a, _ in every)
    ways = sorted({c.copy.way for c in copies})
    delays = np.concatenate(((start - launched)[seen & (launched >= begin)],
                             (c_start - c_launched)[c_seen & (c_launched >= begin)]))
    matmul = np.isin(name, np.unique(t.programs[gpu].name[t.programs[gpu].matmul]))
    length = (stop - start)[seen]
    return GpuTruth(
        busy=_union(every) / whole, compute=_union(compute) / whole, collectives=_union(collected) / whole,
        exposed=(_union(compute + collected) - _union(compute)) / whole, copies=_union(moved) / whole,
        kernels=int(seen.sum() + c_seen.sum()),
        copied_bytes={w.lower(): sum(c.copy.size for c in copies if c.copy.way == w) for w in ways},
        copied_s={w.lower(): sum(c.end - c.start for c in copies if c.copy.way == w) / 1e9 for w in ways},
        copied={w.lower(): sum(1 for c in copies if c.copy.way == w) for w in ways},
        launch_delay_s=float(np.median(delays)) / 1e9 if len(delays) else None,
        matmul_share=float(length[matmul[seen]].sum() / length.sum()) if len(length) else 0.0,
    )


def _waiting(t: Timeline, begin: int, end: int) -> float | None:
    """1 - transfer / summed time of the collectives that all GPUs have in the window."""
    columns = [rows.columns() for rows in t.collectives]
    if not len(columns[0][2]):
        return None
    start = np.stack([c[2] for c in columns])
    stop = np.stack([c[3] for c in columns])
    seen = (start.min(axis=0) >= begin) & (stop.max(axis=0) <= end)
    length = (stop - start)[:, seen]
    return float(1 - length.min(axis=0).sum() * len(columns) / length.sum())


def _pairs(start: I64, stop: npt.NDArray[np.int64]) -> Spans:
    return list(zip(start.tolist(), stop.tolist(), strict=True))


def _union(spans: Spans) -> int:
    total, reach = 0, -(1 << 62)
    for a, b in sorted(spans):
        total += max(0, b - max(a, reach))
        reach = max(reach, b)
    return total

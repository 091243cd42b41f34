"""Collectives across GPUs: how much of their time moves data and how much waits for the last GPU.

The i-th collective of every GPU is taken to be the same one. That holds only if all GPUs
ran equally many and the ends of each lie together; otherwise the match is not made, with
the reason.
"""

from __future__ import annotations

import numpy as np

from gputop.trace.device_time import GpuTimeline, gpu_number
from gputop.trace.model import I64, Kind, Trace
from gputop.trace.results import Collectives, Steps

# A collective ends on all GPUs together; further apart the match is wrong (traces.md §3: 7 µs were measured).
_END_TOLERANCE_NS = 1_000_000


def collectives(trace: Trace, lines: list[GpuTimeline], steps: Steps | None) -> Collectives | None:
    """Collectives of the whole trace, or None where no GPU ran any."""
    device = trace.device
    rows = [line.rows[device.kind[line.rows] == Kind.COLLECTIVE] for line in lines]
    if not any(len(r) for r in rows):
        return None
    summed = sum(int((device.end_ns[r] - device.start_ns[r]).sum()) for r in rows)
    per_step = None
    if steps is not None:
        taking_part = [r for r in rows if len(r)]
        bounds = np.array(steps.bounds_ns)
        inside = sum(int((np.searchsorted(np.sort(device.start_ns[r]), bounds[:, 1])
                          - np.searchsorted(np.sort(device.start_ns[r]), bounds[:, 0])).sum()) for r in taking_part)
        per_step = inside / len(taking_part) / steps.count

    def unmatched(reason: str) -> Collectives:
        return Collectives(per_step, summed / 1e9, None, None, None, reason)

    lines = [line for line, r in zip(lines, rows, strict=True) if len(r)]
    rows = [r for r in rows if len(r)]
    if len(rows) < 2:
        return unmatched("only one GPU of the job is in the trace")
    rows = _seen_by_all(trace, rows)
    counts = sorted({len(r) for r in rows})
    if len(counts) > 1:
        return unmatched(f"the GPUs ran different numbers of them, {counts[0]} to {counts[-1]}")
    # Shape (collective, GPU), by start: every GPU issues them in the same order.
    by_start = [r[np.argsort(device.start_ns[r], kind="stable")] for r in rows]
    start = np.stack([device.start_ns[r] for r in by_start], axis=1)
    end = np.stack([device.end_ns[r] for r in by_start], axis=1)
    apart = int((end.max(axis=1) - end.min(axis=1)).max())
    if apart > _END_TOLERANCE_NS:
        return unmatched(f"matched by order their ends lie up to {apart / 1e6:.1f} ms apart, so the order differs")
    transfer = int((end - start).min(axis=1).sum()) * len(rows)
    matched = int((end - start).sum())
    last = np.bincount(np.argmax(start, axis=1), minlength=len(rows))
    return Collectives(
        per_step, summed / 1e9, transfer / 1e9, 1 - transfer / matched if matched else None,
        {gpu_number(trace, line.gpu): int(n) for line, n in zip(lines, last, strict=True) if n},
    )


def _seen_by_all(trace: Trace, rows: list[I64]) -> list[I64]:
    """Leave out what only some GPUs have at the window's edges: a collective ends on all of them together.

    Where that leaves a GPU none, all stay: then no match will be made.
    """
    end = trace.device.end_ns
    lo = max(int(end[r].min()) for r in rows) - _END_TOLERANCE_NS
    hi = min(int(end[r].max()) for r in rows) + _END_TOLERANCE_NS
    kept = [r[(end[r] >= lo) & (end[r] <= hi)] for r in rows]
    return kept if all(len(r) for r in kept) else rows

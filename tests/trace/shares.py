"""Shares of a GPU's time straight from the columns, to check the readers against known traces."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from gputop.trace.model import Kind, Trace

SHARED = Path(__file__).resolve().parents[2] / "../shared/data"
NEEDS_SHARED = f"the real traces are not here ({SHARED})"


def union_ns(start: np.ndarray, end: np.ndarray) -> int:
    if not len(start):
        return 0
    order = np.argsort(start)
    start, end = start[order], end[order]
    before = np.concatenate([start[:1], np.maximum.accumulate(end)[:-1]])
    return int(np.maximum(end - np.maximum(start, before), 0).sum())


def shares(trace: Trace, gpu: int) -> dict[str, float]:
    """Window in ms and percentages of it: busy, compute, comm, exposed, copies; median kernel delay in µs."""
    d = trace.device
    mine = d.gpu == gpu
    start, end, kind = d.start_ns[mine], d.end_ns[mine], d.kind[mine]
    window = int(end.max() - start.min())
    compute, comm = kind == Kind.COMPUTE, kind == Kind.COLLECTIVE

    def percent(rows: np.ndarray) -> float:
        return 100 * union_ns(start[rows], end[rows]) / window

    launched = mine & (d.launch_ns >= 0) & (d.kind <= Kind.COLLECTIVE)
    return {
        "window": window / 1e6, "busy": percent(kind >= 0), "compute": percent(compute), "comm": percent(comm),
        "exposed": percent(compute | comm) - percent(compute), "copies": percent(kind >= Kind.H2D),
        "delay": float(np.median((d.start_ns - d.launch_end_ns)[launched])) / 1e3}

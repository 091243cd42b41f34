"""Copies of one GPU by direction: time, bytes, count, and how much of it is pageable memory."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gputop.trace.model import I64, Kind, MemoryKind, Trace

DIRECTIONS = {"h2d": Kind.H2D, "d2h": Kind.D2H, "d2d": Kind.D2D, "p2p": Kind.P2P, "other": Kind.COPY_OTHER}


@dataclass(frozen=True, slots=True)
class Copies:
    """By direction ("h2d", "d2h", "d2d", "p2p", "other"), only those that occur.

    ``seconds`` are sums over copies (streams may overlap); ``bytes`` is None where the
    trace does not tell the size of any copy that way, else the sum of those it tells.
    ``pageable_s`` is the part of h2d and d2h time whose host end is pageable memory, None
    where the trace does not tell the kind of memory.
    """

    seconds: dict[str, float]
    bytes: dict[str, int | None]
    count: dict[str, int]
    pageable_s: float | None


def copies(trace: Trace, rows: I64) -> Copies:
    """The copies among these device events. Memsets are none."""
    device = trace.device
    length = device.end_ns - device.start_ns
    seconds: dict[str, float] = {}
    sizes: dict[str, int | None] = {}
    count: dict[str, int] = {}
    for name, kind in DIRECTIONS.items():
        own = rows[device.kind[rows] == kind]
        if len(own):
            told = device.bytes[own] >= 0
            seconds[name] = int(length[own].sum()) / 1e9
            sizes[name] = int(device.bytes[own][told].sum()) if told.any() else None
            count[name] = len(own)
    return Copies(seconds, sizes, count, _pageable_s(trace, rows))


def _pageable_s(trace: Trace, rows: I64) -> float | None:
    device = trace.device
    up, down = rows[device.kind[rows] == Kind.H2D], rows[device.kind[rows] == Kind.D2H]
    own = np.concatenate((up, down))
    end = np.concatenate((device.src[up], device.dst[down]))
    if not (end != MemoryKind.UNKNOWN).any():
        return None
    pageable = own[end == MemoryKind.PAGEABLE]
    return int((device.end_ns[pageable] - device.start_ns[pageable]).sum()) / 1e9

"""Copies by direction: time, bytes, count, how much of it is pageable memory; and by kind of memory and TF op."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from gputop.analysis.results import CopyRow, CopyTable, OpCopies
from gputop.analysis.steps.membership import WorkOfSteps
from gputop.trace.kernel_names import split_op
from gputop.trace.model import I64, Kind, MemoryKind, Trace

_TOP_OPS = 20
DIRECTIONS = {"h2d": Kind.H2D, "d2h": Kind.D2H, "d2d": Kind.D2D, "p2p": Kind.P2P, "other": Kind.COPY_OTHER}


def copies(trace: Trace, rows: I64) -> tuple[dict[str, float], dict[str, int | None], dict[str, int]]:
    """Seconds, bytes and number of the copies among these device events, by the directions that occur. Memsets are
    none. Seconds are sums over copies (streams may overlap); bytes are None where the trace does not tell the size of
    any copy that way, else the sum of those it tells."""
    device = trace.device
    seconds: dict[str, float] = {}
    sizes: dict[str, int | None] = {}
    count: dict[str, int] = {}
    for name, kind in DIRECTIONS.items():
        in_direction = rows[device.kind[rows] == kind]
        if len(in_direction):
            count[name], sizes[name], seconds[name], _ = _sums(trace, in_direction)
    return seconds, sizes, count


def pageable_s(trace: Trace, rows: I64) -> float | None:
    """Seconds of copies from or to the host among these device events whose host end is pageable memory; None where the
    trace does not tell the kind of memory."""
    device = trace.device
    up, down = rows[device.kind[rows] == Kind.H2D], rows[device.kind[rows] == Kind.D2H]
    both = np.concatenate((up, down))
    end = np.concatenate((device.src[up], device.dst[down]))
    if not (end != MemoryKind.UNKNOWN).any():
        return None
    pageable = both[end == MemoryKind.PAGEABLE]
    return int((device.end_ns[pageable] - device.start_ns[pageable]).sum()) / 1e9


def copy_table(trace: Trace, rows_of: Mapping[int, I64], of_steps: WorkOfSteps | None) -> CopyTable | None:
    """All copies by GPU, direction and memory; ``rows_of`` are device rows, in order of time, by the GPU's number. None
    where there is no copy."""
    device = trace.device
    names = {kind: name for name, kind in DIRECTIONS.items()}
    out: list[CopyRow] = []
    all_: list[I64] = []
    for gpu, rows in rows_of.items():
        copied = rows[(device.kind[rows] >= Kind.H2D) & (device.kind[rows] <= Kind.COPY_OTHER)]
        if not len(copied):
            continue
        all_.append(copied)
        kind, src = device.kind[copied].astype(np.int64), device.src[copied].astype(np.int64)
        way = (kind << 16) | (src << 8) | device.dst[copied]
        for code in np.unique(way).tolist():
            chosen = way == code
            count, size, time, rate = _sums(trace, copied[chosen])
            row = (gpu, names[Kind(code >> 16)], _memory(code >> 8 & 255), _memory(code & 255), count, size, time, rate)
            if of_steps is None:
                out.append(CopyRow(*row))
                continue
            sums = _sums(trace, copied[chosen & of_steps.inside[copied]])
            out.append(CopyRow(*row, sums[0] / of_steps.count, None if sums[1] is None and sums[0]
                               else (sums[1] or 0) / of_steps.count, sums[2] / of_steps.count))
    if not all_:
        return None
    by_op, others = _by_op(trace, np.concatenate(all_), names)
    return CopyTable(tuple(out), by_op, others)


def _memory(kind: int) -> str:
    return MemoryKind(kind).name.lower()


def _sums(trace: Trace, rows: I64) -> tuple[int, int | None, float, float | None]:
    """Count, bytes, seconds, and bytes per second of the copies whose size is known."""
    device = trace.device
    length = device.end_ns[rows] - device.start_ns[rows]
    has_size = device.bytes[rows] >= 0
    size = int(device.bytes[rows][has_size].sum()) if has_size.any() else None
    time = int(length[has_size].sum())
    return len(rows), size, int(length.sum()) / 1e9, size / time * 1e9 if size is not None and time else None


def _by_op(trace: Trace, rows: I64, names: Mapping[Kind, str]) -> tuple[tuple[OpCopies, ...] | None, float]:
    device = trace.device
    with_op = rows[device.tf_op[rows] >= 0]
    if not len(with_op):
        return None, 0.0
    groups: dict[tuple[str, str], list[I64]] = {}
    key = device.tf_op[with_op].astype(np.int64) << 8 | device.kind[with_op]
    order = np.argsort(key, kind="stable")
    for group in np.split(with_op[order], np.flatnonzero(np.diff(key[order])) + 1):
        op = split_op(trace.names[device.tf_op[group[0]]])[0]
        groups.setdefault((op, names[Kind(int(device.kind[group[0]]))]), []).append(group)
    out = [OpCopies(op, way, *_sums(trace, np.concatenate(group))[:3]) for (op, way), group in groups.items()]
    out.sort(key=lambda row: (-row.time_s, row.op, row.direction))
    return tuple(out[:_TOP_OPS]), math.fsum(row.time_s for row in out[_TOP_OPS:])

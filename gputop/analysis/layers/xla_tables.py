"""Embedding tables that a program of XLA's updates as wholes, by the bytes that its ops must read and write.

1. The gradient of a lookup is a ``scatter-add`` in the backward pass (JAX names it "transpose(jvp(…))/scatter-add"),
   over zeros as large as the table: a ``broadcast_in_dim`` in the same scope, whose bytes are the table's. Without one
   XLA has put the zeros into the scatter, which then writes the table once and reads none.
2. The bytes that the scatter has besides are the rows that a step looks up, with their indices.
3. Ops without matrix products whose bytes are a small multiple of the table's go over all of it: the optimizer's.
4. A matrix product that reads as much as the table may be of the table (weights tied to the output), whose gradient is
   dense then, or of a layer as large, whose optimizer looks alike: nothing is said.
"""

from __future__ import annotations

import numpy as np
from msgspec import Struct

from gputop.analysis.steps.membership import in_steps, work_of_steps
from gputop.analysis.steps.model import Steps
from gputop.trace.intervals import union
from gputop.trace.lookups import host_stat
from gputop.trace.model import F64, I64, HloOp, Trace

_SCATTER, _ZEROS, _BACKWARD = "/scatter-add", "/broadcast_in_dim", "transpose("
_MOST_PASSES = 12  # over a table: AdamW reads four arrays of its size and writes three, in one op. gputop's own figure
_EXACT = 0.005  # share of the table's bytes by which a multiple may be off: scalars, rows. gputop's own figure
_LEAST_BYTES = 1 << 20  # of a table. gputop's own figure
_NS = 1e-9


class XlaTables(Struct, frozen=True):
    """Times are per step and GPU."""

    table_bytes: int  # of the largest
    used: float  # share of the tables' bytes that a step looks up at most
    sources: tuple[str, ...]  # places of the lookups, "model.py:31"
    gradients_s: float
    optimizer_s: float
    spent_s: float  # of both; without GPUs ops may run at once


class _Table(Struct, frozen=True):
    table_bytes: int
    rows_bytes: int
    source: str


def xla_tables(trace: Trace, steps: Steps, *, gpus: int) -> tuple[XlaTables, I64] | None:
    """Find tables that the steps update as wholes, and the device events that do or, without GPUs that ran any, host
    events; None without such a table, or where nothing tells it apart."""
    if not any(op.op_name.endswith(_SCATTER) and _BACKWARD in op.op_name for op in trace.hlo_ops):
        return None
    rows, hlo, begin, end, count = _events(trace, steps, on_gpus=gpus > 0)
    used_ops = {number: trace.hlo_ops[number] for number in np.unique(hlo).tolist()}
    tables = {number: table for number, op in used_ops.items() if (table := _table(op, used_ops)) is not None}
    if not tables:
        return None
    smallest = min(table.table_bytes for table in tables.values())
    if any(op.flops and op.bytes is not None and op.bytes >= smallest for op in used_ops.values()):
        return None
    sizes = {table.table_bytes for table in tables.values()}
    whole = {number for number, op in used_ops.items()
             if op.flops == () and any(_passes_over(op.bytes, size_bytes) for size_bytes in sizes)}
    gradients = {number for number in whole if used_ops[number].op_name.endswith(_ZEROS)} | set(tables)
    optimizer = whole - gradients
    chosen = np.isin(hlo, list(gradients | optimizer))
    length: F64 = (end - begin).astype(np.float64)
    total_ns = float(length[chosen].sum()) if gpus else float(union(begin[chosen], end[chosen]).total)
    all_bytes = sum(table.table_bytes for table in tables.values())
    per = max(count, 1) * max(gpus, 1)
    return XlaTables(
        table_bytes=max(sizes), used=min(sum(table.rows_bytes for table in tables.values()) / all_bytes, 1.0),
        sources=tuple(dict.fromkeys(table.source for table in tables.values() if table.source)),
        gradients_s=float(length[np.isin(hlo, list(gradients))].sum()) * _NS / per,
        optimizer_s=float(length[np.isin(hlo, list(optimizer))].sum()) * _NS / per,
        spent_s=total_ns * _NS / per), rows[chosen]


def _events(trace: Trace, steps: Steps, *, on_gpus: bool) -> tuple[I64, I64, I64, I64, int]:
    """Rows within steps that run a known op, the op of each, their begins and ends (ns), and the number of steps."""
    if on_gpus:
        device, work = trace.device, work_of_steps(trace, steps)
        rows = np.flatnonzero(work.inside & (device.hlo >= 0))
        return rows, device.hlo[rows].astype(np.int64), device.start_ns[rows], device.end_ns[rows], work.count
    host = trace.host
    rows, hlo = host_stat(host, "hlo")
    chosen = hlo >= 0
    rows, hlo = rows[chosen], hlo[chosen]
    inside = in_steps(host.start_ns[rows], steps)
    rows, hlo = rows[inside], hlo[inside]
    return rows, hlo, host.start_ns[rows], host.end_ns[rows], steps.count


def _table(op: HloOp, ops: dict[int, HloOp]) -> _Table | None:
    """The table whose gradient this op scatters (1, 2); None of another op."""
    if not op.op_name.endswith(_SCATTER) or _BACKWARD not in op.op_name or op.bytes is None:
        return None
    scope = op.op_name.removesuffix(_SCATTER)
    zeros = [other.bytes for other in ops.values() if other.op_name == scope + _ZEROS and other.bytes
             and _LEAST_BYTES <= other.bytes <= op.bytes // 2]
    if zeros:
        table_bytes = max(zeros)
        return _Table(table_bytes, max(op.bytes - 2 * table_bytes, 0), op.source)
    if op.bytes < _LEAST_BYTES:
        return None
    lookups = [other.bytes for other in ops.values() if other.op_name.endswith("/gather") and other.bytes
               and other.source == op.source and _BACKWARD not in other.op_name]
    # A lookup reads its rows and writes them.
    rows_bytes = sum(lookups) // 2
    return _Table(op.bytes - rows_bytes, rows_bytes, op.source) if 0 < rows_bytes < op.bytes else None


def _passes_over(op_bytes: int | None, table_bytes: int) -> bool:
    """Return whether an op of so many bytes goes over the table once or a few times, and over nothing else."""
    passes = round((op_bytes or 0) / table_bytes)
    return 1 <= passes <= _MOST_PASSES and abs((op_bytes or 0) - passes * table_bytes) <= _EXACT * table_bytes

"""TensorFlow's embedding tables that a step reads or writes as a whole, by the names and times of its ops.

Captures hold no sizes of tensors, but the graph's names and times show what is as large as a table:

1. A lookup is ``ResourceGather``, or ``GatherV2`` with a ``ReadVariableOp`` of its own, outside of gradients and
   optimizers.
2. The scope of an optimizer is one that assigns variables. Its ``UnsortedSegmentSum`` makes a sparse gradient as large
   as its table. With ``Unique`` in the scope it only sums rows that were looked up twice.
3. Ops of that scope that take about as long as such a sum go over a whole table or its moments. Where more variables
   than lookups take as long, some of them are no tables, and only the sums count.
4. ``ReadVariableOp`` of a lookup hands a variable over without time, unless the variable was updated sparsely: then it
   copies the whole table (TensorFlow's copy-on-read mode). An optimizer that updates rows (``ResourceScatter…``) and
   assigns no variable of that size, but whose ops take as long as that copy, goes over whole tables, too.
5. The time of a lookup, as a share of an op over a whole table, is about the share of the rows in use: all of these
   ops are bound by memory.
"""

from __future__ import annotations

import re
from statistics import median

import numpy as np
from msgspec import Struct

from gputop.analysis.steps.membership import in_steps, work_of_steps
from gputop.analysis.steps.model import Steps
from gputop.trace.intervals import union
from gputop.trace.lookups import name_mask
from gputop.trace.model import I32, I64, Trace

_LOOKUP = r".*\b(?:ResourceGather|GatherV2)$"
_OP = re.compile(r"(?:StatefulPartitionedCall/|PartitionedCall/)*(?:(?P<scope>.*)/)?(?P<op>[^/:]+):(?P<type>\w+)$")
_UPDATES = ("AssignAddVariableOp", "AssignSubVariableOp", "AssignVariableOp")
_GRADIENT = "gradient_tape"
_SAME_SIZE_FACTOR = 5.0  # times of ops over tensors of one size lie within it: one reads one tensor, another three
_NS = 1e-9


class TableUpdates(Struct, frozen=True):
    """Times are per step and GPU."""

    lookups: tuple[str, ...]  # ops or layers, "functional_1/items_1"
    optimizers: tuple[str, ...]  # scopes
    gradients_s: float
    optimizer_s: float
    copies_s: float  # of tables, for lookups
    spent_s: float  # of all of these; without GPUs several run at once
    used: float  # share of the tables' rows that a step looks up, about
    mixed: bool  # other variables are as large as tables, and the optimizer's time is not counted


class _Op(Struct, frozen=True):
    scope: str
    op: str
    type: str
    time_ns: float


def table_updates(trace: Trace, steps: Steps, *, gpus: int) -> tuple[TableUpdates, I64] | None:
    """Find ops over whole tables within the steps, and their device events or, without GPUs that ran any, host events;
    None without lookups or such ops."""
    if not name_mask(trace, _LOOKUP, ("gather",)).any():
        return None
    name, rows, time_ns, count = _events(trace, steps, on_gpus=gpus > 0)
    total_ns = np.bincount(name[rows], weights=time_ns[rows], minlength=len(trace.names))
    ops = {number: _Op(match["scope"] or "", match["op"], match["type"], float(total_ns[number]))
           for number in np.unique(name[rows]).tolist() if (match := _OP.match(trace.names[number])) is not None}
    assigning = {op.scope for op in ops.values() if op.type in _UPDATES and op.scope}
    lookups = _lookups(ops, assigning)
    if not lookups:
        return None
    gather_ns = median(op.time_ns for op, _ in lookups.values())
    assigning -= {op.scope for op in ops.values() if op.type.startswith("Unique")}
    gradients = {number for number, op in ops.items()
                 if op.type == "UnsortedSegmentSum" and op.scope in assigning and _GRADIENT not in op.scope}
    copies = {read for op, read in lookups.values() if read is not None and ops[read].time_ns > op.time_ns}
    updating = {op.scope for op in ops.values() if op.type.startswith("ResourceScatter")}
    whole, mixed = (_table_sized(ops, gradients, {ops[number].scope for number in gradients}, len(lookups)) if gradients
                    else _table_sized(ops, copies, updating & assigning, 0))
    table_sized = gradients | whole | copies
    if not table_sized:
        return None
    chosen = rows[np.isin(name[rows], list(table_sized))]
    begin, end = (trace.device.start_ns, trace.device.end_ns) if gpus else (trace.host.start_ns, trace.host.end_ns)
    total = float((end[chosen] - begin[chosen]).sum()) if gpus else union(begin[chosen], end[chosen]).total
    per = max(count, 1) * max(gpus, 1)
    return TableUpdates(
        lookups=tuple(dict.fromkeys(op.scope or op.op for op, _ in lookups.values())),
        optimizers=tuple(sorted({ops[number].scope.split("/")[0] for number in gradients | whole})),
        gradients_s=sum(ops[number].time_ns for number in gradients) * _NS / per,
        optimizer_s=sum(ops[number].time_ns for number in whole) * _NS / per,
        copies_s=sum(ops[number].time_ns for number in copies) * _NS / per, spent_s=total * _NS / per,
        used=min(gather_ns / median(ops[number].time_ns for number in gradients or copies), 1.0),
        mixed=mixed), chosen


def _events(trace: Trace, steps: Steps, *, on_gpus: bool) -> tuple[I32, I64, I64, int]:
    """Names, the rows within steps that have one, all durations (ns), and the number of steps."""
    if on_gpus:
        device, work = trace.device, work_of_steps(trace, steps)
        return (device.tf_op, np.flatnonzero(work.inside & (device.tf_op >= 0)), device.end_ns - device.start_ns,
                work.count)
    host = trace.host
    rows = np.flatnonzero(in_steps(host.start_ns, steps) & (host.name >= 0))
    return host.name, rows, host.end_ns - host.start_ns, steps.count


def _lookups(ops: dict[int, _Op], assigning: set[str]) -> dict[int, tuple[_Op, int | None]]:
    """Lookups, each with the op that reads its variable, if it is one of its own."""
    reads = {op.scope: number for number, op in ops.items() if op.type == "ReadVariableOp"}
    out: dict[int, tuple[_Op, int | None]] = {}
    for number, op in ops.items():
        if op.scope in assigning or _GRADIENT in op.scope:
            continue
        read = reads.get(f"{op.scope}/{op.op}" if op.scope else op.op)
        if op.type == "ResourceGather" or (op.type == "GatherV2" and read is not None):
            out[number] = op, read
    return out


def _table_sized(ops: dict[int, _Op], sums: set[int], scopes: set[str], tables: int) -> tuple[set[int], bool]:
    """Other ops of these scopes that take as long as the ops over whole tables; whether more than ``tables`` variables
    that are assigned as wholes are as large, and no op counts."""
    if not sums:
        return set(), False
    usual_ns = median(ops[number].time_ns for number in sums)
    whole = {number for number, op in ops.items() if op.scope in scopes and number not in sums
             and usual_ns / _SAME_SIZE_FACTOR <= op.time_ns <= usual_ns * _SAME_SIZE_FACTOR}
    # An optimizer assigns each variable by one kind of these ops, and its moments by the others.
    updates = [count for kind in _UPDATES if (count := sum(ops[number].type == kind for number in whole))]
    return (set(), True) if min(updates, default=0) > tables else (whole, False)

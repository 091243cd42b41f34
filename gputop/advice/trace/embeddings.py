"""Embedding tables: does each step read and write a whole table for the few rows that it looks up?"""

from __future__ import annotations

from typing import Any

import numpy as np
from msgspec import Struct

from gputop.advice import savings
from gputop.advice.fix_code import code
from gputop.advice.registry import limit, source
from gputop.advice.trace.facts import TraceFacts, host_rows_in_steps
from gputop.advice.trace.job import Job
from gputop.advice.verdict import Explanation, Missing, Verdict
from gputop.analysis.layers.culprits import Events
from gputop.analysis.layers.table_updates import TableUpdates, table_updates
from gputop.analysis.layers.xla_tables import XlaTables, xla_tables
from gputop.analysis.steps.membership import in_steps
from gputop.analysis.what_if.cure import Cure
from gputop.core.findings import MIN_SHARE, Culprit
from gputop.text.units import count, percent, reads_zero, seconds, size
from gputop.trace.host_calls import GRADIENT, OPTIMIZER_CALL, within_calls, work_of
from gputop.trace.intervals import coverage
from gputop.trace.lookups import host_rows, host_stat, name_mask, optimizer_names
from gputop.trace.model import F64, I64, Kind, Trace

_BACKWARD = r"aten::(?:embedding_dense_backward|_embedding_bag_dense_backward)$"
# Kernels of that gradient: PyTorch's own, and those that torch.compile makes.
_KERNEL = (r".*\b(?:embedding_backward_feature_kernel|compute_grad_weight|sum_and_scatter)|"
           r"triton_\w*embedding_(?:bag_)?dense_backward")
_NODE = r"autograd::engine::evaluate_function: Embedding\w*Backward\d*$"
_ADD = r"aten::add_?$"
_SHAPES = "the shapes of embedding tables and gradients, which torch.profiler.profile(record_shapes=True) records"
_SIZES = ("the sizes of embedding tables, which kernels do not show: record the model without torch.compile, with "
          "torch.profiler.profile(record_shapes=True)")
_ROWS_ALONE = ("Assumes that looked-up rows cost only their share of the table's time, and that merging their indices "
               "takes no time.")
_NS = 1e-9
_SHOWN_LOOKUPS = 3


class EmbeddingDense(Verdict, frozen=True, kw_only=True):
    """``saving`` leaves the part of the time that the rows in use take of their table."""

    rows: int  # of the largest table
    width: int
    used: float  # share of the tables' rows that a step looks up at most
    tables_part: float  # of all gradients' elements
    backward_s: float  # per step: gradients as large as the tables
    optimizer_s: float  # per step: the optimizer's time for the tables


class TablesAsWhole(Verdict, frozen=True, kw_only=True):
    """The same in TensorFlow, whose captures hold no shapes."""

    tables: TableUpdates


class TablesInXla(Verdict, frozen=True, kw_only=True):
    """The same in a program of XLA's, whose ops' bytes show the tables."""

    tables: XlaTables


def judge_embedding_dense(facts: TraceFacts) -> EmbeddingDense | TablesAsWhole | TablesInXla | Missing | None:
    """Embedding tables are read and written as wholes for the few rows that a step looks up."""
    return _judge_tables(facts) if facts.framework in ("jax", "tensorflow") else _judge_pytorch(facts)


def _judge_tables(facts: TraceFacts) -> TablesAsWhole | TablesInXla | None:
    """JAX: scatters of gradients over zeros as large as a table, and the ops over as many bytes. TensorFlow: ops that
    take as long as what makes a table's gradient dense; see the modules of the analysis."""
    if facts.steps is None:
        return None
    updated = (xla_tables if facts.framework == "jax" else table_updates)(
        facts.trace, facts.steps, gpus=len(facts.active))
    if updated is None:
        return None
    tables, rows = updated
    share = savings.removed(tables.spent_s * (1 - tables.used), facts.period_s)
    if tables.used > limit("embedding_dense.used") or share < limit("embedding_dense.share"):
        return None
    figures: dict[str, Any] = {
        "gpus": facts.active_numbers, "share": share, "claim": facts.on_cpus("about", "at most"),
        "events": Events(rows) if facts.active else None,
        "cure": Cure(scaled=((rows, tables.used),) if facts.active else (), assumes=_ROWS_ALONE)}
    if isinstance(tables, XlaTables):
        lines = tuple(Culprit(source, "line") for source in tables.sources)
        return TablesInXla(tables=tables, culprits=lines, **figures)
    return TablesAsWhole(tables=tables, culprits=tuple(Culprit(lookup, "op") for lookup in tables.lookups), **figures)


def _judge_pytorch(facts: TraceFacts) -> EmbeddingDense | Missing | None:
    """Gradients of embedding tables fill the whole table, and the optimizer goes over all of it.

    1. Calls of the dense gradient within the steps, with their shapes: rows, width, and how many indices were looked
       up. Where another layer adds to the same gradient (weights tied to the output), the table needs a dense one.
    2. The optimizer's time for the tables is its time by their part of all gradients' elements: optimizers are bound
       by memory.
    3. Of both times the part of the rows that no index of a step can have touched is saved at most.
    """
    trace = facts.trace
    calls = _untied(trace, host_rows(trace, _BACKWARD))
    if not len(calls):
        return _without_calls(facts)
    if facts.steps is None:
        return Missing("steps to measure how much of a step is spent on embedding tables")
    calls = calls[in_steps(trace.host.start_ns[calls], facts.steps)]
    if not len(calls):
        return None
    per = facts.steps_or_window * max(len(facts.active), 1)
    backward = _Work.of(facts, calls)
    optimizer = _Work.of(facts, host_rows_in_steps(facts, OPTIMIZER_CALL))
    if savings.removed((backward.time_s + optimizer.time_s) / per, facts.period_s) < limit("embedding_dense.share"):
        return None
    sized = [_values(trace, calls, name) for name in ("table_rows", "table_elements", "indices")]
    gradients = host_rows_in_steps(facts, GRADIENT)
    elements = _values(trace, gradients, "elements")
    if any(values is None for values in sized) or elements is None:
        # Filling a large table takes a good part of what its optimizer takes.
        small = savings.removed(backward.time_s / per, facts.period_s) < MIN_SHARE
        return None if small else Missing(_SHAPES)
    rows, of_tables, indices = (values for values in sized if values is not None)
    largest = int(np.argmax(of_tables))
    used = float(np.minimum(indices / rows, 1.0) @ of_tables) / float(of_tables.sum())
    part = min(float(of_tables.sum()) / max(float(elements.sum()), 1.0), 1.0)
    if used > limit("embedding_dense.used"):
        return None
    times = backward.time_s / per, part * optimizer.time_s / per
    share = savings.removed(sum(times) * (1 - used), facts.period_s)
    if share < limit("embedding_dense.share"):
        return None
    return EmbeddingDense(
        gpus=facts.active_numbers, share=share, claim="at most", rows=int(rows[largest]),
        width=int(of_tables[largest] // rows[largest]), used=used, tables_part=part, backward_s=times[0],
        optimizer_s=times[1], events=Events(np.concatenate((backward.rows, optimizer.rows))) if facts.active else None,
        cure=Cure(scaled=((backward.rows, used), (optimizer.rows, 1 - part * (1 - used))), assumes=(
            "Assumes that looked-up rows cost only their share of the table's time, and that sorting and merging their "
            "indices takes no time.")))


def _without_calls(facts: TraceFacts) -> Missing | None:
    """Return what is missing where kernels compute dense gradients of tables and no op tells their sizes: in programs
    of torch.compile's, and in Nsight's reports. None where they and the optimizer's kernels take little."""
    trace, device = facts.trace, facts.trace.device
    of_tables = name_mask(trace, _KERNEL)
    if not facts.active or not of_tables.take(device.name).any() or len(host_rows(trace, _BACKWARD)):
        return None
    chosen = (of_tables | optimizer_names(trace)).take(device.name) & (device.kind == Kind.COMPUTE)
    chosen &= coverage(facts.analyzed_spans, device.start_ns, device.end_ns) > 0
    per = facts.steps_or_window * len(facts.active)
    time_s = float((device.end_ns[chosen] - device.start_ns[chosen]).sum()) * _NS
    little = savings.removed(time_s / per, facts.period_s) < limit("embedding_dense.share")
    return None if little else Missing(_SIZES)


class _Work(Struct, frozen=True):
    """Cost of the host's calls: time of the kernels that they launch (device events) or, without a GPU, their own."""

    time_s: float
    rows: I64

    @classmethod
    def of(cls, facts: TraceFacts, calls: I64) -> _Work:
        trace = facts.trace
        if not facts.active:
            return cls(work_of(trace, calls).total * _NS, np.empty(0, np.int64))
        device = trace.device
        kernels = np.flatnonzero(device.kind != Kind.COLLECTIVE)
        rows = kernels[within_calls(trace, calls, device.launch_line[kernels], device.launch_ns[kernels])]
        return cls(float((device.end_ns[rows] - device.start_ns[rows]).sum()) * _NS, rows)


def _values(trace: Trace, rows: I64, name: str) -> F64 | None:
    """A stat of these host events; None where one of them has none, or there are no events."""
    event_rows, values = host_stat(trace.host, name)
    chosen = np.isin(event_rows, rows)
    return values[chosen].astype(np.float64) if len(rows) and int(chosen.sum()) == len(rows) else None


def _untied(trace: Trace, calls: I64) -> I64:
    """Gradients without those to which the engine adds another one of the same table: after the gradient's own
    function, within the engine's event around it."""
    host = trace.host
    nodes, adds = host_rows(trace, _NODE), host_rows(trace, _ADD)
    tied = np.zeros(len(calls), bool)
    for line in np.unique(host.line[calls]).tolist():
        mine = np.flatnonzero(host.line[calls] == line)
        around, added = nodes[host.line[nodes] == line], adds[host.line[adds] == line]
        if not len(around) or not len(added):
            continue
        node = around[np.maximum(np.searchsorted(host.start_ns[around], host.start_ns[calls[mine]], "right") - 1, 0)]
        first = np.searchsorted(host.start_ns[added], host.end_ns[calls[mine]])
        begin = np.append(host.start_ns[added], np.iinfo(np.int64).max)[first]
        tied[mine] = (host.end_ns[node] >= host.end_ns[calls[mine]]) & (begin < host.end_ns[node])
    return calls[~tied]


def describe_embedding_dense(v: EmbeddingDense | TablesAsWhole | TablesInXla, job: Job) -> Explanation:
    if isinstance(v, TablesAsWhole):
        return _describe_tensorflow(v.tables, job)
    if isinstance(v, TablesInXla):
        return _describe_xla(v.tables, job)
    spent = v.backward_s + v.optimizer_s
    return Explanation(
        title=_title(v.used),
        why=f"Embedding tables (the largest: {count(v.rows)} × {v.width}) get gradients as large as the tables, and "
            f"the optimizer reads and writes all rows. These gradients and updates take {seconds(spent)} per "
            f"{job.basis}: {seconds(v.backward_s)} for the gradients and {seconds(v.optimizer_s)} for the optimizer. A "
            "step needs to change only the rows that it looks up.",
        evidence={"table_rows_count": float(v.rows), "used_rows_ratio": v.used, "dense_gradients_s": v.backward_s,
                  "dense_optimizer_s": v.optimizer_s, "tables_of_gradients_ratio": v.tables_part,
                  "share_ratio": spent / job.period_s},
        action="Make the tables' gradients sparse, and give the tables an optimizer that updates only the rows in use. "
               "Such an optimizer decays the moments of only these rows and has no weight decay, so compare the loss.",
        snippet=code("embedding_dense", "pytorch"),
        source=source("embedding_dense.share", "embedding_dense.used"))


def _title(used: float) -> str:
    part = "less than 1%" if reads_zero(used) else percent(used)
    return f"Whole embedding tables are updated although only {part} of the rows are used"


def _describe_xla(v: XlaTables, job: Job) -> Explanation:
    return Explanation(
        title=_title(v.used),
        why=f"Embedding tables (the largest: {size(v.table_bytes)}) get gradients as large as the tables, and the "
            f"optimizer reads and writes all rows, which takes {seconds(v.spent_s)} per {job.basis}. A step needs "
            "to change only the rows that it looks up.",
        evidence={"table_bytes": float(v.table_bytes), "used_rows_ratio": v.used, "dense_gradients_s": v.gradients_s,
                  "dense_optimizer_s": v.optimizer_s, "share_ratio": v.spent_s / job.period_s},
        action="Look up the rows outside the differentiated function, and add their gradient only to these rows, with "
               "the table donated. The table then uses plain SGD, so compare the loss.",
        snippet=code("embedding_dense", "jax"), source=source("embedding_dense.share", "embedding_dense.used"))


def _describe_tensorflow(v: TableUpdates, job: Job) -> Explanation:
    lookups = ", ".join(v.lookups[:_SHOWN_LOOKUPS]) + (", …" if len(v.lookups) > _SHOWN_LOOKUPS else "")
    why = (f"The lookup in embedding tables ({lookups}) takes about {percent(v.used)} of the time of one pass over a "
           "table. ")
    whole_update = v.gradients_s or v.optimizer_s
    if v.gradients_s:
        in_optimizer = f" and {seconds(v.optimizer_s)} for the update" if v.optimizer_s else ""
        why += (f"The optimizer ({', '.join(v.optimizers)}) makes the tables' sparse gradients as large as the tables "
                f"and updates all rows: {seconds(v.gradients_s)} per {job.basis} for the gradients{in_optimizer}. ")
        if v.mixed:
            why += "Other variables may be as large, so the rest of the optimizer's time is not counted. "
    elif v.optimizer_s:
        why += (f"The optimizer ({', '.join(v.optimizers)}) gets sparse gradients but still processes all rows, which "
                f"takes {seconds(v.optimizer_s)} per {job.basis}. ")
    if v.copies_s:
        why += (f"Each read copies the whole table, which takes {seconds(v.copies_s)} per {job.basis}: TensorFlow does "
                "this for variables that an optimizer updates sparsely. ")
    evidence = {"used_rows_ratio": v.used, "dense_gradients_s": v.gradients_s, "dense_optimizer_s": v.optimizer_s,
                "table_copies_s": v.copies_s, "share_ratio": v.spent_s / job.period_s}
    action = "Look up rows with an op that reads only these rows."
    if whole_update:
        action += (" Give the tables an optimizer that updates only these rows, such as SGD without momentum or the "
                   "Adam variant below, which decays the moments of only these rows, so compare the loss.")
    takes = "updated" if whole_update else "copied"
    return Explanation(
        title=f"Whole embedding tables are {takes} for the rows of a batch: {percent(v.spent_s / job.period_s)} of the "
              f"{job.basis}",
        why=why.rstrip(), evidence=evidence, action=action, snippet=code(
            "embedding_dense", "lazy-adam" if whole_update else "lookup"),
        source=source("embedding_dense.share", "embedding_dense.used"))

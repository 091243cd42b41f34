"""Time of a step by phase and layer in a job without a GPU: by the ops that its CPU runs.

TensorFlow's executors tell each op with its thread, from its beginning to its end, and so does PyTorch. XLA's ops (JAX,
``jit_compile``) end on any thread: an event "end: " with the number of the start tells when (openxla/xla,
``xla/backends/cpu/runtime/thunk_executor.cc``). Of ops side by side, on several threads, each gets an equal part of the
time: so the sum over all is the time in which any op runs, and an op that shares the CPU with another is not charged
twice. The collectives beside which no op runs are one row, an executor without an op another, and the rest of the step
the last. An op's work on threads of a pool below it is in its time, as it waits for that.
"""

from __future__ import annotations

import re

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from gputop.analysis.host.host_ops import OP, of_input_pipeline, of_model_executors, single_ops
from gputop.analysis.host.host_spans import COLLECTIVE
from gputop.analysis.layers import tree
from gputop.analysis.layers.layers import framework
from gputop.analysis.layers.pytorch import op_scopes
from gputop.analysis.layers.scopes import Scope, trainings
from gputop.analysis.results import Layers
from gputop.analysis.steps.model import Steps
from gputop.trace.intervals import Spans, at_or_before, contains, in_order, intersect, merge, uncovered, union
from gputop.trace.lookups import computes_on_cpu, host_rows, host_stat, name_mask, spans_of, values_at
from gputop.trace.model import F64, I64, Trace
from gputop.trace.nesting import nest
from gputop.trace.threads import MAIN, lines_of

# What runs other ops, which have events of their own: XLA's by opcode, or by name where the program is not known.
_HOLDS_OPS = frozenset({"while", "conditional", "call", "async-start", "async-update", "async-done"})
_HOLDS_OPS_BY_NAME = re.compile(r"(?:while|conditional|call|async-\w+)(?:\.\d+)?$")
# TensorFlow's ops that wait for a program of XLA's, and what an executor shows while an op starts.
_RUNS_XLA = r".*:(?:_?Xla(?:Run|Launch\w*)|(?:Stateful)?PartitionedCall)$"
_CALLS, _FUNCTION = r"ExecutorState::ProcessAsync::Start$", r"(?:.*/)?(?:Stateful)?PartitionedCall"


class _Ops(Struct, frozen=True):
    """Op events: rows of the host, where each ends by another event's word (else -1), and what each is: an index of
    hlo_ops, or that many plus the one of its name."""

    rows: I64
    done_ns: I64
    key: I64
    phase: npt.NDArray[np.object_]  # of which its name tells nothing; empty: its name tells
    scopes: tuple[Scope, ...] = ()  # of PyTorch's; the key indexes them


def cpu_layers(trace: Trace, steps: Steps | None) -> Layers | None:
    """The mean step by layer, or without steps the time from the first op to the last. None where the job uses a GPU,
    or no op took time."""
    ops = _ops(trace)
    if ops is None:
        return None
    start, end = trace.host.start_ns[ops.rows], trace.host.end_ns[ops.rows]
    within = steps.spans if steps is not None else union([start.min()], [max(end.max(), ops.done_ns.max())])
    if not within.total:
        return None
    time_ns = _shared(trace, ops, within)
    count, many = (steps.count if steps is not None else 1), len(trace.hlo_ops)
    inside = contains(within, start)
    root, training = tree.ScopeSums(), _training(trace)
    kinds, which = _kinds(ops)
    for (key, unnamed), time, runs in zip(kinds, np.bincount(which, time_ns).tolist(),
                                          np.bincount(which, inside).tolist(), strict=True):
        if not time and not runs:
            continue
        node = tree.ScopeSums(time, 0.0, runs)
        hlo = trace.hlo_ops[key] if key < many and not ops.scopes else None
        if hlo is not None:
            node.ran(hlo, runs)
        tree.put(root, *_place(trace, ops, key, unnamed, training), node, hlo.source if hlo is not None else "")
    if not root.device_ns:
        return None
    named = union(start, np.maximum(end, ops.done_ns))
    for name, spans in (("collectives", spans_of(trace, host_rows(trace, COLLECTIVE))),
                        (tree.EXECUTOR, of_model_executors(trace)), (tree.NO_OP_RUNS, within)):
        if (left_ns := float(uncovered(intersect(spans, within), named))) or name == tree.NO_OP_RUNS:
            runs = name == tree.EXECUTOR
            tree.put(root, name, (), tree.ScopeSums(left_ns * runs, left_ns * (not runs)))
        named = merge(named, spans)
    how = tree.no_layers(root, framework(trace, bool(ops.scopes)))
    return Layers(basis=steps.times.unit if steps is not None else "window", total_s=within.total / count / 1e9, gpus=0,
                  rows=tuple(tree.table_rows(root, count, how)), sources=tree.source_lines(root, count))


class OpSpans(Struct, frozen=True):
    """Ops of a CPU's job that are in no other op, by start: ``line`` is the thread on which each begins; ``paths`` has
    its phase and scopes for each of ``which``. ``modules``: PyTorch's, of which not each ends with an op."""

    start_ns: I64
    end_ns: I64
    line: npt.NDArray[np.int32]
    which: I64
    paths: list[tuple[str, ...]]
    modules: bool


def op_spans(trace: Trace) -> OpSpans | None:
    """Spans of each op; None as for :func:`cpu_layers`."""
    ops = _ops(trace)
    if ops is None:
        return None
    host, training = trace.host, _training(trace)
    start, end = host.start_ns[ops.rows], np.maximum(host.end_ns[ops.rows], ops.done_ns)
    parent = nest(host.line[ops.rows], start, host.end_ns[ops.rows], host.name[ops.rows], trace.names).parent
    outer = np.flatnonzero((parent < 0) & (end > start))
    outer = outer[np.argsort(start[outer], kind="stable")]
    kinds, which = _kinds(ops)
    places = (_place(trace, ops, *kind, training) for kind in kinds)
    return OpSpans(start[outer], end[outer], host.line[ops.rows[outer]], which[outer],
                   [(phase, *path) for phase, path in places], bool(ops.scopes))


def _place(trace: Trace, ops: _Ops, key: int, unnamed: str, training: list[bool | None]) -> tuple[str, tuple[str, ...]]:
    """Phase and path of an op by its key; ``unnamed``: the phase where its name tells nothing."""
    if ops.scopes:
        return ops.scopes[key].phase, ops.scopes[key].path
    many = len(trace.hlo_ops)
    name = trace.hlo_ops[key].op_name if key < many else trace.names[key - many]
    return (unnamed, (name,)) if unnamed else tree.place_of(name, key < many, key < many and training[key])


def _training(trace: Trace) -> list[bool | None]:
    """Part of each of ``hlo_ops`` in a training program, as :func:`trainings` has it."""
    (_, hlo), (_, module) = host_stat(trace.host, "hlo"), host_stat(trace.host, "hlo_module")
    programs = dict(zip(hlo.tolist(), module.tolist(), strict=True))
    return trainings(trace.hlo_ops, [programs.get(i) for i in range(len(trace.hlo_ops))])


def _ops(trace: Trace) -> _Ops | None:
    """The model's ops of any framework. What only runs others is none. None where the job uses a GPU, or has no op."""
    host, many = trace.host, len(trace.hlo_ops)
    if not len(host) or not computes_on_cpu(trace):
        return None
    if (pytorch := op_scopes(trace)) is not None:
        rows, scopes = pytorch
        return _Ops(rows, np.full(len(rows), -1, np.int64), scopes.of_event, np.full(len(rows), "", object),
                    tuple(scopes.scopes)) if len(rows) else None
    xla, hlo = host_stat(host, "hlo")
    is_op = name_mask(trace, OP) & ~(name_mask(trace, _RUNS_XLA, ("xla", "partitionedcall")) if len(xla) else False)
    tf_ops = np.flatnonzero(is_op.take(host.name) & ~of_input_pipeline(trace))
    eager, eager_op = single_ops(trace, lines_of(trace, MAIN))
    holds = np.array([op.opcode in _HOLDS_OPS for op in trace.hlo_ops] + [False])
    named = np.array([_HOLDS_OPS_BY_NAME.match(name) is not None for name in trace.names])
    kept = np.flatnonzero(~np.where(hlo >= 0, holds[hlo], named[host.name[xla]]))
    xla, hlo = xla[kept], hlo[kept]
    calls, called = host_stat(host, "name") if not len(xla) else (np.empty(0, np.int64), np.empty(0, np.int64))
    some = name_mask(trace, _CALLS)[host.name[calls]] & name_mask(trace, _FUNCTION)[called]
    calls, called = calls[some], called[some]
    rows = np.concatenate((tf_ops, xla, eager, calls))
    done = np.full(len(rows), -1, np.int64)
    done[len(tf_ops):len(tf_ops) + len(xla)] = _ends(trace, xla)
    key = np.concatenate((many + host.name[tf_ops], np.where(hlo >= 0, hlo, many + host.name[xla]), many + eager_op,
                          many + called))
    phase = np.repeat(np.array(["", tree.EAGER, tree.COMPILED], object),
                      (len(tf_ops) + len(xla), len(eager), len(calls)))
    return _Ops(rows, done, key.astype(np.int64), phase) if len(rows) else None


def _ends(trace: Trace, rows: I64) -> I64:
    """End of the op that began at each of these rows; -1: with the event itself, or not told."""
    host = trace.host
    machine = np.array([trace.hosts.index(line.host) if line.host in trace.hosts else -1 for line in trace.lines])
    starts, number = host_stat(host, "ends_with")
    ends, ended = host_stat(host, "ended")
    if not len(starts) or not len(ends):
        return np.full(len(rows), -1, np.int64)
    numbers, which = np.unique(np.concatenate((number, ended)), return_inverse=True)
    which += len(numbers) * (machine[host.line[np.concatenate((starts, ends))]] + 1)
    done = np.full(int(which.max()) + 1, -1, np.int64)
    done[which[len(starts):]] = host.end_ns[ends]
    has_end, start = values_at(starts, which[:len(starts)], rows)
    return np.where(has_end & (done[start] > host.end_ns[rows]), done[start], -1)


def _shared(trace: Trace, ops: _Ops, within: Spans) -> I64:
    """The time within ``within`` that each op gets."""
    host = trace.host
    start, end = host.start_ns[ops.rows], host.end_ns[ops.rows]
    nesting = nest(host.line[ops.rows], start, end, host.name[ops.rows], trace.names)
    late = np.flatnonzero(ops.done_ns >= 0)
    outer = np.flatnonzero((nesting.parent < 0) & (end > start))
    begins = in_order(np.concatenate((start[outer], end[late])))
    stops = in_order(np.concatenate((end[outer], ops.done_ns[late])))
    times = in_order(np.concatenate((begins, stops, within.start, within.end)))
    inside = at_or_before(within.start, times) - at_or_before(within.end, times)
    running = ((at_or_before(begins, times) - at_or_before(stops, times)) * inside)[:-1]
    length = np.diff(times)
    passed: F64 = np.cumsum(np.append(0, length / np.maximum(running, 1) * (running > 0)))

    def until(when: I64) -> I64:
        return np.rint(np.interp(when, times, passed)).astype(np.int64)

    time_ns = nesting.own(until(end) - until(start))
    time_ns[late] += until(ops.done_ns[late]) - until(end[late])
    return time_ns


def _kinds(ops: _Ops) -> tuple[list[tuple[int, str]], I64]:
    """Key of each kind of op, with its phase where its name says none, and of which kind each op is."""
    phases = list(dict.fromkeys(ops.phase.tolist()))
    phase = np.array([phases.index(name) for name in ops.phase.tolist()], np.int64)
    kinds, which = np.unique(ops.key * len(phases) + phase, return_inverse=True)
    return [(kind // len(phases), phases[kind % len(phases)]) for kind in kinds.tolist()], which

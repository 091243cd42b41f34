"""Calls around other events: what runs or is launched in them, and when an optimizer's updates."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from gputop.trace.intervals import Spans, contains, in_order, union
from gputop.trace.lookups import Mask, distinct, host_rows, values_at
from gputop.trace.model import I64, Trace, once

# As PyTorch's profiler marks them.
OPTIMIZER_CALL, BACKWARD_NODE = r"Optimizer\.step#", r"autograd::engine::evaluate_function"
GRADIENT = r"torch::autograd::AccumulateGrad$"


def process_of(trace: Trace, rows: I64) -> I64:
    """A number for the process of each of these events of the host."""
    numbers: dict[tuple[str, int | None], int] = {}
    of_line = [numbers.setdefault((line.host, line.rank), len(numbers)) for line in trace.lines]
    return np.array(of_line, np.int64)[trace.host.line[rows]]


@once
def _updates(trace: Trace) -> tuple[I64, I64]:
    """Rows of the optimizers' calls, and when each begins to update (ns): one that runs a closure, as Lightning's all
    do, behind the last node of the closure's backward pass, on whatever thread of the process."""
    calls, nodes = host_rows(trace, OPTIMIZER_CALL), host_rows(trace, BACKWARD_NODE)
    begin, of_call, of_node = trace.host.start_ns[calls], process_of(trace, calls), process_of(trace, nodes)
    for process in np.unique(of_call).tolist():
        mine, ends = of_call == process, in_order(trace.host.end_ns[nodes[of_node == process]])
        last = np.searchsorted(ends, trace.host.end_ns[calls[mine]], side="right") - 1
        begin[mine] = np.maximum(begin[mine], np.append(ends, -1)[last])
    return calls, begin


def begins_ns(trace: Trace, rows: I64) -> I64:
    """Begins (ns) of these events of the host, of an optimizer's call that of its update."""
    is_call, update_ns = values_at(*_updates(trace), rows)
    return np.where(is_call, update_ns, trace.host.start_ns[rows])


def work_of(trace: Trace, rows: I64) -> Spans:
    """Spans of these events of the host, as :func:`begins_ns` has them."""
    return union(begins_ns(trace, rows), trace.host.end_ns[rows])


def launched_in_calls(trace: Trace, rows: I64, pattern: str) -> Mask:
    """Mask of these device events that a host event of such a name launched."""
    calls, device = host_rows(trace, pattern), trace.device
    return (within_calls(trace, calls, device.launch_line[rows], device.launch_ns[rows]) if len(calls)
            else np.zeros(len(rows), bool))


def within_calls(trace: Trace, calls: I64, line: npt.NDArray, time_ns: I64) -> Mask:
    """Mask of these times, each on its thread, in which one of these host events runs there, as :func:`work_of` has
    them; -1 is no time."""
    out, of_call = np.zeros(len(line), bool), trace.host.line[calls]
    for number in distinct(of_call).tolist():
        mine = np.flatnonzero((line == number) & (time_ns >= 0))
        out[mine] = contains(work_of(trace, calls[of_call == number]), time_ns[mine])
    return out

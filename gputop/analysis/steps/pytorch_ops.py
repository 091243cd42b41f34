"""The outermost ops of a thread of a PyTorch job: what a loop that marks no steps is told by."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from gputop.analysis.steps.training_loops import LOADER, WORKERS
from gputop.trace.host_calls import BACKWARD_NODE
from gputop.trace.intervals import EMPTY, Spans, merge, union
from gputop.trace.lookups import Mask, by_line, host_rows, host_stat, name_mask, outermost_rows, spans_of
from gputop.trace.model import I64, Trace, once
from gputop.trace.threads import MAIN, lines_of

_MARKS = rf"Optimizer\.(?:step|zero_grad)#|{LOADER}"
_ZERO_GRAD = r"Optimizer\.zero_grad#"
_OPS = rf"[\w.]+::\S|{_MARKS}|Torch-Compiled Region|CompiledFunction|\w+Backward\d*$"
_SEED = r"aten::random_$"  # of each new iterator of a DataLoader
# Ops with weights, or what torch.compile made of them: a model runs.
FORWARD = (r"aten::(?:linear|addmm|mm|bmm|matmul|baddbmm|_?convolution|conv\w+|embedding\w*|lstm|gru|layer_norm|"
            r"\w*batch_norm|\w*attention\w*|_transformer_encoder_layer_fwd)$|Torch-Compiled Region")
# Of the time in ops of the busiest thread: if another one has more, which of the two is the loop's is not known.
# gputop's own figure.
_ANOTHER_THREAD = 0.3


class Ops(NamedTuple):
    """The outermost ops of one thread, in order of time; functions of Python and ranges of the user's are passed over.
    ``backward_ns`` are the begins of the backward pass's nodes in its process, ``forward_ns`` of ops with weights on
    the thread, ``seed_ns`` of seeds."""

    name: npt.NDArray
    start: I64
    end: I64
    is_batch: Mask
    is_zero_grad: Mask
    backward_ns: I64
    forward_ns: I64
    seed_ns: I64

    def backward_nodes(self, begin_ns: I64, end_ns: I64) -> I64:
        """Number of nodes of the backward pass that begin in each of these times."""
        return np.searchsorted(self.backward_ns, end_ns) - np.searchsorted(self.backward_ns, begin_ns)

    def runs_model(self, begin_ns: I64, end_ns: I64) -> Mask:
        """Mask of these times in which an op with weights begins."""
        return np.asarray(np.searchsorted(self.forward_ns, end_ns) > np.searchsorted(self.forward_ns, begin_ns), bool)

    def ended(self) -> tuple[I64, I64]:
        """Indices of the calls for a batch that found no further one, and of the first calls of the new iterators that
        follow them, with nothing but the seed between."""
        batches = np.flatnonzero(self.is_batch)
        last, first = batches[:-1], batches[1:]
        edges = self.start[last], self.start[first]
        seeded = np.searchsorted(self.seed_ns, edges[1]) > np.searchsorted(self.seed_ns, edges[0])
        idle = (self.backward_nodes(*edges) == 0) & ~self.runs_model(*edges)
        ends = (first == last + 1) | (seeded & idle)
        return last[ends], first[ends]

    def part(self, kept: slice) -> Ops:
        """Some of the ops one after the other."""
        return self._replace(name=self.name[kept], start=self.start[kept], end=self.end[kept],
                             is_batch=self.is_batch[kept], is_zero_grad=self.is_zero_grad[kept])


def outer_ops(trace: Trace, line: int) -> Ops:
    """The ops of this thread, which runs Python."""
    host = trace.host
    only = np.arange(len(trace.lines)) == line
    rows = host_rows(trace, _OPS, only)
    ranges = host_stat(host, "annotation")[0]
    ranges = ranges[~name_mask(trace, _MARKS)[host.name[ranges]]]
    rows = rows[~np.isin(rows, ranges)]
    forward = rows[name_mask(trace, FORWARD)[host.name[rows]]]
    rows = outermost_rows(trace, rows)
    name, process = host.name[rows], (trace.lines[line].host, trace.lines[line].rank)
    backward = host_rows(trace, BACKWARD_NODE, np.array([(one.host, one.rank) == process for one in trace.lines], bool))
    return Ops(name, host.start_ns[rows], host.end_ns[rows], name_mask(trace, LOADER)[name],
               name_mask(trace, _ZERO_GRAD)[name], host.start_ns[backward], host.start_ns[forward],
               host.start_ns[host_rows(trace, _SEED, only)])


@once
def workers_started(trace: Trace) -> tuple[Spans, Spans]:
    """Spans in which a loop's DataLoader starts workers, from a new iterator's seed to its first batch; and in which it
    ends workers and starts new ones, from the call that finds no further batch."""
    started, anew = EMPTY, EMPTY
    for line in np.unique(trace.host.line[host_rows(trace, WORKERS)]).tolist():
        ops = outer_ops(trace, line)
        last, first = ops.ended()
        anew = merge(anew, union(ops.start[last], ops.end[first]))
        of_workers, seed, read, drawn = (name_mask(trace, pattern)[ops.name] for pattern in (
            WORKERS, _SEED, r"aten::item$", r"aten::rand(?:perm|int)$"))
        # Read at once. With a sampler's own, rows are drawn at once, for workers that stay as well.
        seeds = np.flatnonzero(seed[:-2] & read[1:-1] & ~drawn[2:])
        batches = np.concatenate((np.flatnonzero(ops.is_batch), [-1]))
        first = batches[np.searchsorted(batches[:-1], seeds)]
        edges = ops.start[seeds], ops.start[first]
        begin = (first >= 0) & of_workers[first] & (ops.backward_nodes(*edges) == 0) & ~ops.runs_model(*edges)
        started = merge(started, union(ops.start[seeds[begin]], ops.end[first[begin]]))
    return started, anew


def thread_of_ops(trace: Trace) -> int | None:
    """The thread whose ops are no backward pass of another one's; None where several could be the loop's."""
    host = trace.host
    rows = host_rows(trace, r"aten::", lines_of(trace, MAIN))
    backward = host_rows(trace, BACKWARD_NODE)
    times = []
    for line, indices in by_line(host.line[rows]).items():
        of_line, nodes = rows[indices], backward[host.line[backward] == line]
        ops = spans_of(trace, of_line)
        within = spans_of(trace, nodes)
        times.append((merge(ops, within).total - within.total, line))
    times.sort(reverse=True)
    if not times or (len(times) > 1 and times[1][0] > _ANOTHER_THREAD * times[0][0]):
        return None
    return times[0][1]

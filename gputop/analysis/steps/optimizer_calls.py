"""Calls of optimizers: how many of them one training step makes, and when they are."""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from gputop.analysis.steps.model import Steps
from gputop.core.findings import TraceNote
from gputop.text.units import seconds
from gputop.trace.host_calls import OPTIMIZER_CALL
from gputop.trace.lookups import distinct, host_rows, host_stat, optimizer_names
from gputop.trace.model import I64, Trace

MAX_CHARS = 120  # of the name of a range
# Ranges of the user's around the optimizer: "optimizer", "opt_step".
OPTIMIZER_RANGE = re.compile(r"(?:^|[^a-zA-Z]|[a-z](?=[A-Z]))(?i:optim(?:izer)?(?:[ _.:-]?(?:step|update))?|"
                             r"opt[ _.:-]?step|DeepSpeedEngine\.step)\W{0,8}$")
# Of an optimizer that is none of PyTorch's own: Keras', DeepSpeed's.
_UPDATE_OPS = r"aten::(?:_fused_(?:adam|adagrad|sgd)\w*|_foreach_(?:addcdiv|sqrt)_?)$"
# Keras accumulates gradients in the other branch.
_UPDATE_BRANCH = (r"(?:StatefulPartitionedCall/|PartitionedCall/)*(?:\w{0,16}adam|adagrad|adadelta|adafactor|sgd|"
                  r"rmsprop|ftrl|lion|lamb|muon)\w{0,16}/cond/then/.*:Assign\w+$")
# multi_tensor_apply on gradients, as for logs of their norm: no update.
_NO_UPDATE = re.compile(r"(?i)norm|unscale|multi_tensor_scale")
# Both lines are gputop's own figures.
_MAX_OPTIMIZERS = 8  # that one step of training calls
# An evaluation between two calls makes two comparisons of a call with a later one fail: a period is one that few more
# fail than of the best, and that most hold.
_ABOUT_AS_GOOD, _MOST = 0.1, 0.6


def period_of_calls(name: npt.NDArray, work: I64) -> int:
    """Number of calls after which the optimizers' names and the work before each come again; 1 where nothing tells. The
    shortest for which about as many of them do as for the best."""
    for with_work in (True, False):
        shares = {}
        for period in range(1, min(_MAX_OPTIMIZERS, len(work) // 2) + 1):
            alike = name[1:][period:] == name[1:][:-period]
            if with_work:
                alike &= work[period:] == work[:-period]
            shares[period] = float(alike.mean())
        best = max(shares.values(), default=0.0)
        if best >= _MOST:
            return next(period for period, share in shares.items() if share >= best - _ABOUT_AS_GOOD)
    return 1


def updates_ns(trace: Trace, rank: int) -> tuple[I64, I64]:
    """Begins, in order, and ends (ns) of what this process does to run its optimizer: its calls, the user's ranges
    around it, its ops, or launches of its kernels; the first of these that there are."""
    lines = np.array([line.rank == rank for line in trace.lines] + [False], bool)  # the last one answers for no line
    host, device = trace.host, trace.device
    for events in _events_of_updates(trace):
        rows = events[lines[host.line[events]]]
        if len(rows):
            return host.start_ns[rows], host.end_ns[rows]
    mask = optimizer_names(trace).copy()
    mask[[index for index in np.flatnonzero(mask).tolist() if _NO_UPDATE.search(trace.names[index])]] = False
    is_update = (mask.take(device.name) | mask.take(device.tf_op)) & (device.launch_ns >= 0)
    rows = np.flatnonzero(is_update & lines.take(device.launch_line))
    rows = rows[np.argsort(device.launch_ns[rows], kind="stable")]
    return device.launch_ns[rows], device.launch_end_ns[rows]


def _events_of_updates(trace: Trace) -> Iterator[I64]:
    """Yield rows of the host events that show updates, of each kind."""
    yield host_rows(trace, OPTIMIZER_CALL)
    rows = users_ranges(trace)
    names = [index for index in distinct(trace.host.name[rows]).tolist()
             if len(trace.names[index]) <= MAX_CHARS and OPTIMIZER_RANGE.search(trace.names[index])]
    yield rows[np.isin(trace.host.name[rows], names)]
    yield host_rows(trace, _UPDATE_OPS)
    yield host_rows(trace, _UPDATE_BRANCH)


def users_ranges(trace: Trace) -> I64:
    """Rows of the host events that may be ranges of the user's: NVTX and ``record_function``."""
    return np.arange(len(trace.host)) if trace.format == "nsys" else host_stat(trace.host, "annotation")[0]


# -- accumulation -------------------------------------------------------------------------------------
#
# Gradient accumulation: steps of which the optimizer runs in every so many-th. Such steps are parts of an update
# (micro-batches), whatever their marks are called. Those with the optimizer are longer than the others by its work, so
# the median step is none of them.

_FEWEST, _EVENLY = 3, 0.9  # updates, and share of them that lie equally far apart. gputop's own figures


def steps_per_update(trace: Trace, steps: Steps) -> int | None:
    """Number of steps from one update to the next; None where the optimizer runs in each step, or nothing shows it."""
    if steps.count < 2 * _FEWEST:
        return None
    for rank in sorted({line.rank for line in trace.lines}):
        begin, end = updates_ns(trace, rank)
        if not len(begin):
            continue
        updates = np.sort(begin if steps.call_ends_ns else _on_gpus(trace, begin, end))
        edges = steps.edges_ns
        updated = np.flatnonzero(np.searchsorted(updates, edges[:, 1]) > np.searchsorted(updates, edges[:, 0]))
        if len(updated) < _FEWEST:
            return None
        apart = np.diff(updated)
        usual = int(np.median(apart))
        return usual if usual > 1 and float((apart == usual).mean()) >= _EVENLY else None
    return None


def accumulation_note(trace: Trace, steps: Steps) -> list[TraceNote]:
    """A note that each step is a part of an update."""
    count = steps_per_update(trace, steps)
    if count is None:
        return []
    return [TraceNote("accumulation", (
        f"The optimizer runs in one of {count} steps, so the job accumulates gradients. Each step is a micro-batch, "
        f"and an update takes {count} steps ({seconds(count * steps.times.mean_s)} on average)."))]


def _on_gpus(trace: Trace, begin: I64, end: I64) -> I64:
    """Starts (ns) of the device events that are launched in these calls, which are in order; the calls' own begins
    without any, as where the host's time is the steps'."""
    device = trace.device
    call = np.searchsorted(begin, device.launch_ns, side="right") - 1
    within = (call >= 0) & (device.launch_ns <= end[call])
    return device.start_ns[within] if within.any() else begin

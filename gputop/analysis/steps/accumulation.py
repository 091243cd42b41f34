"""Gradient accumulation: steps of which the optimizer runs in every so many-th.

Such steps are parts of an update (micro-batches), whatever their marks are called. Those with the optimizer are longer
than the others by its work, so the median step is none of them.
"""

from __future__ import annotations

import numpy as np

from gputop.analysis.steps.model import Steps
from gputop.analysis.steps.optimizer_calls import updates_ns
from gputop.core.findings import TraceNote
from gputop.text.units import seconds
from gputop.trace.model import I64, Trace

_FEWEST, _MOST = 3, 0.9  # updates, and share of them that lie equally far apart. gputop's own figures


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
        return usual if usual > 1 and float((apart == usual).mean()) >= _MOST else None
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

"""The optimizer of a PyTorch job on a CPU: what of the step its calls take, and what one call for all tensors saves."""

from __future__ import annotations

import numpy as np
from msgspec import Struct

from gputop.advice.trace.facts import TraceFacts, host_rows_in_steps, once_per_trace, without_recorder
from gputop.trace.host_calls import GRADIENT, OPTIMIZER_CALL, work_of
from gputop.trace.intervals import Spans, coverage, intersect
from gputop.trace.lookups import host_rows

# What one call for all parameters leaves of the optimizer's calls, and for each parameter: of AdamW with 16 to 1,200
# tensors 12-16%, of SGD with 162 tensors 2.5 µs for each (PyTorch 2.13 on a CPU), and 0.1 ms for the call itself: of
# Adam with 6 tensors 25-40% are left, and with 48 26% (2.14).
_CALL_LEFT, _TENSOR_S, _CALL_S = 0.15, 2.5e-6, 1e-4
_MOSTLY_HELD_UP = 0.9  # share of the time: what little a thread then runs is no measure


class OptimizerTime(Struct, frozen=True):
    """``share`` of the usual step without the profiler's part, ``saved`` of it by one call for all parameters;
    ``spans`` are the calls within the steps, ``tensors`` the parameters with a gradient in each."""

    share: float
    saved: float
    spans: Spans
    tensors: float


@once_per_trace
def optimizer_time(facts: TraceFacts) -> OptimizerTime:
    calls = intersect(work_of(facts.trace, host_rows(facts.trace, OPTIMIZER_CALL)), facts.analyzed_spans)
    # Another program may hold up a single call for long.
    begin, end = np.reshape(facts.trace.window_ns if facts.steps is None else facts.steps.edges_ns, (-1, 2)).T
    usual = float(np.median(coverage(calls, begin, end) / np.maximum(np.subtract(end, begin), 1)))
    held_up = part_held_up(facts)
    ran_s = facts.period_s * (1 - held_up)
    share, _ = without_recorder(facts, usual * ran_s, calls, held_up)
    tensors = len(host_rows_in_steps(facts, GRADIENT)) / (facts.steps_or_window * facts.processes)
    left = max(_CALL_LEFT * share, _TENSOR_S * tensors / ran_s) + _CALL_S / ran_s
    return OptimizerTime(share, share - left, calls, tensors)


def part_held_up(facts: TraceFacts) -> float:
    """Share of the time in which other programs hold the main threads up; 0 where it is not known, or nearly all."""
    cpus = facts.trace.job_cpus
    held_up = cpus.held_up if cpus is not None and cpus.held_up is not None else 0.0
    return held_up if held_up < _MOSTLY_HELD_UP else 0.0

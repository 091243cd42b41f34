"""The advice from a trace: all rules over its analysis. Pure: no clock, no files.

A new rule is one function here in RULES and its record in ``trace_rules.py``. It returns a
finding, an abstention where its inputs are missing, or None where it sees nothing wrong.
"""

from __future__ import annotations

from collections.abc import Callable

from gputop.advice.causes import fold_consequences
from gputop.advice.evaluation_caveats import with_evaluation_caveat
from gputop.advice.trace.balance import replica_imbalance
from gputop.advice.trace.blocking_copies import copies_pageable, sync_copies
from gputop.advice.trace.collectives import allreduce_count, allreduce_slow, collective_waiting, communication_exposed
from gputop.advice.trace.compilation import eager_execution, retracing, xla_off
from gputop.advice.trace.copies import copies_excessive
from gputop.advice.trace.facts import TraceFacts
from gputop.advice.trace.host_work import host_placement, step_gap_host
from gputop.advice.trace.input_wait import input_bound
from gputop.advice.trace.kernels import loss_scaling, small_kernels
from gputop.advice.trace.launch import launch_bound
from gputop.advice.trace.memory import batch_size_headroom, memory_pressure
from gputop.advice.trace.precision import dims_unaligned, fp16_fallback, tensor_cores_unused
from gputop.advice.trace.replicas import serial_gpus, staggered_launch
from gputop.advice.trace.thread_contention import thread_contention
from gputop.core.findings import Abstained, Advice, Finding, collect

RULES: tuple[Callable[[TraceFacts], Finding | Abstained | None], ...] = (
    input_bound, launch_bound, small_kernels, replica_imbalance, serial_gpus, staggered_launch,
    communication_exposed, allreduce_count, allreduce_slow, collective_waiting,
    copies_excessive, copies_pageable, sync_copies,
    tensor_cores_unused, fp16_fallback, dims_unaligned, loss_scaling,
    batch_size_headroom, memory_pressure,
    step_gap_host, thread_contention, eager_execution, retracing, xla_off, host_placement,
)


def advise(facts: TraceFacts) -> Advice:
    """What all rules have to say about one trace, what follows from another finding under it."""
    advice = collect(with_evaluation_caveat(rule(facts), facts.analysis.steps) for rule in RULES)
    return Advice(fold_consequences(advice.findings), advice.abstained)

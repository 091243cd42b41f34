"""The live advice: all live rules over the history of the node. Pure: no clock, no hardware."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from gputop.advice.live.activity import dram_bound, low_sm_active, spinning, tensor_idle
from gputop.advice.live.bottleneck import live_limit
from gputop.advice.live.hardware_faults import hardware_error
from gputop.advice.live.host_cpu import host_cpu_saturated
from gputop.advice.live.node_view import View
from gputop.advice.live.pcie import pcie_link_degraded, pcie_saturated
from gputop.advice.live.processes import (
    gpu0_oversubscribed,
    idle_gpu,
    memory_preallocated,
    memory_pressure,
    shared_gpu,
    unused_gpu,
)
from gputop.advice.live.throttling import no_fine_metrics, power_capped, thermal_throttled
from gputop.core.findings import Abstained, Advice, Finding, collect
from gputop.core.samples import NodeSample
from gputop.telemetry.history import History

# Causes before their symptoms: a rule leaves out the GPUs whose state one before it accounts for.
RULES: tuple[Callable[[View], Finding | Abstained | None], ...] = (
    hardware_error, idle_gpu, unused_gpu, gpu0_oversubscribed, shared_gpu, thermal_throttled, power_capped,
    memory_pressure, memory_preallocated, no_fine_metrics, pcie_link_degraded, pcie_saturated, host_cpu_saturated,
    spinning, dram_bound, low_sm_active, tensor_idle,
)


def live_advice(history: History, sample: NodeSample, previous: tuple[Finding, ...] = ()) -> Advice:
    """What the last minutes say. ``sample`` is the newest in ``history``; ``previous`` are the
    findings shown until now, which stay until their signal is clearly gone."""
    view = View(history, sample, previous)
    outcomes = []
    for rule in RULES:
        outcome = rule(view)
        if isinstance(outcome, Finding):
            view.note(outcome)
        outcomes.append(outcome)
    return replace(collect(outcomes), limit=live_limit(view) or "")

"""The live advice: all live rules over the history of the node. Pure: no clock, no hardware."""

from __future__ import annotations

from collections.abc import Callable

from gputop.advice.finding import Abstained, Advice, Finding, collect
from gputop.advice.live_devices import no_fine_metrics, power_capped
from gputop.advice.live_hardware import hardware_error
from gputop.advice.live_processes import gpu0_oversubscribed, idle_gpu, memory_preallocated, shared_gpu, unused_gpu
from gputop.advice.live_view import View
from gputop.history import History
from gputop.samples import NodeSample

RULES: tuple[Callable[[View], Finding | Abstained | None], ...] = (
    hardware_error, idle_gpu, unused_gpu, gpu0_oversubscribed, shared_gpu, power_capped, memory_preallocated,
    no_fine_metrics,
)


def live_advice(history: History, sample: NodeSample, previous: tuple[Finding, ...] = ()) -> Advice:
    """What the last minute says. ``sample`` is the newest in ``history``; ``previous`` are the
    findings shown until now, which stay until their signal is clearly gone."""
    view = View(history, sample, previous)
    return collect(rule(view) for rule in RULES)

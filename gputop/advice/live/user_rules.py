"""The user's own live rules: their conditions over the node, for each GPU where they use names that each GPU has."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from functools import cached_property

from msgspec import Struct, field

from gputop.advice.live.node_view import NodeView
from gputop.advice.registry import limit
from gputop.advice.user_registry import user_rules
from gputop.advice.user_rules import Figures, in_words, user_finding
from gputop.core.findings import Abstained, Finding
from gputop.core.samples import GpuSample, Reading
from gputop.rules.check import Reference
from gputop.rules.expression import ConditionOutcome, Value
from gputop.rules.rule_file import RuleText

KEPT_S = 5.0  # a finding stays so long after its condition last held: a figure near a limit does not make it flicker
_FORGOTTEN_S = 60.0  # without a sample for so long, or before the last one: the clock was set, a recording moved
_ACTIVITY = ("sm_active", "gpu_util")


class Held(Struct):
    """Time since which a condition holds, when it held last, and what it read then."""

    since_s: float
    last_s: float
    figures: Figures = field(default_factory=dict)
    shown: bool = False


# By rule and GPU (None: of the node). What outlives a sample of the rules; whoever runs them keeps it.
HeldConditions = dict[tuple[str, int | None], Held]


class LiveValues:
    def __init__(self, view: NodeView) -> None:
        self._view = view

    @cached_property
    def _by_index(self) -> Mapping[int, GpuSample]:
        return {gpu.info.index: gpu for gpu in self._view.readable_gpus}

    @cached_property
    def gpus(self) -> list[int]:
        return list(self._by_index)

    def read(self, reference: Reference, gpu: int | None) -> tuple[Value, str]:
        if reference.finding:
            return self._view.found(reference.finding), ""
        name = reference.quantity.name
        if gpu is None:
            return self._of_host(name.removeprefix("host."), reference.window_s)
        sample = self._by_index[gpu]
        if name == "gpu.index":
            return float(gpu), ""
        if name == "gpu.processes":
            return _processes(sample)
        if reference.window_s:
            return self._past(sample, reference)
        reading = sample.activity()[1] if name == "activity" else sample[name]
        return _known(reading)

    def _past(self, gpu: GpuSample, reference: Reference) -> tuple[Value, str]:
        seconds = self._view.enough(reference.window_s)
        name = reference.quantity.name
        for metric in _ACTIVITY if name == "activity" else (name,):
            mean = self._view.mean(gpu, metric, seconds)
            if mean is None:
                continue
            if reference.aggregate == "mean":
                return mean, ""
            return _AGGREGATES[reference.aggregate](self._view.values(gpu, metric, seconds)), ""
        now = gpu.activity()[1] if name == "activity" else gpu[name]
        return None, now.reason or f"{seconds:g} s of readings"

    def _of_host(self, name: str, window_s: float) -> tuple[Value, str]:
        if not window_s:
            return _known(self._view.sample.host[name])
        seconds = self._view.enough(window_s)
        points = [p for p in self._view.host(seconds) if p.cpu_ratio is not None]
        if len(points) < limit("min_readings") or points[-1].time_s - points[0].time_s < limit("coverage") * seconds:
            return None, f"{seconds:g} s of readings"
        return statistics.fmean(p.cpu_ratio for p in points if p.cpu_ratio is not None), ""


_AGGREGATES: Mapping[str, Callable[[list[float]], float]] = {"min": min, "max": max, "median": statistics.median}


def _known(reading: Reading) -> tuple[Value, str]:
    return reading.value, reading.reason or ""


def _processes(gpu: GpuSample) -> tuple[Value, str]:
    if gpu.processes_reason is not None:
        return None, gpu.processes_reason
    return float(sum("C" in process.kind for process in gpu.processes)), ""


def user_live_outcomes(view: NodeView, held: HeldConditions) -> list[Finding | Abstained]:
    """Judge the user's own live rules; ``held`` is kept from sample to sample, and changed."""
    values = LiveValues(view)
    outcomes = [_outcome(rule, values, view.sample.time_s, held)
                for rule in user_rules().rules if rule.condition.source == "live"]
    return [outcome for outcome in outcomes if outcome is not None]


def _outcome(rule: RuleText, values: LiveValues, now_s: float, held: HeldConditions) -> Finding | Abstained | None:
    shown: dict[int | None, Figures] = {}
    missing: list[str] = []
    outcomes = rule.condition.judge(values)
    for gpu, outcome in outcomes.items():
        missing += outcome.missing
        kept = _update(rule, outcome, held, (rule.id, gpu), now_s)
        if kept is not None and kept.shown:
            shown[gpu] = kept.figures
    if shown:
        return user_finding(rule, "live", [gpu for gpu in shown if gpu is not None], list(shown.values()))
    if len(missing) and not any(key[0] == rule.id for key in held):
        return Abstained(rule.id, in_words(missing))
    return Abstained(rule.id, "a GPU that can be read") if not outcomes else None


def _update(rule: RuleText, outcome: ConditionOutcome, held: HeldConditions, key: tuple[str, int | None],
            now_s: float) -> Held | None:
    """Update what is kept of a condition by this sample; ``shown``: it has held for long enough, and does or just
    did."""
    kept = held.get(key)
    if kept is not None and not 0 <= now_s - kept.last_s <= _FORGOTTEN_S:
        kept = None
    if outcome.holds:
        kept = kept or Held(now_s, now_s)
        kept.last_s, kept.figures = now_s, outcome.figures
        kept.shown |= now_s - kept.since_s >= rule.hold_s
    elif kept is not None and not (kept.shown and now_s - kept.last_s <= KEPT_S):
        kept = None
    if kept is None:
        held.pop(key, None)
    else:
        held[key] = kept
    return kept

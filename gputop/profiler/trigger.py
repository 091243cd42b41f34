"""When a GPU dips: a rule, and what of the history fulfils it. Pure but for what it remembers.

A rule reads ``METRIC < LEVEL for SECONDS``: ``sm<0.6*median for 5s``, ``power<200W``, ``tensor<10% for 30s``.
The median is the GPU's own over the last minutes, so that one rule fits idle and busy GPUs alike.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from gputop.errors import EXIT_USAGE, GputopError
from gputop.metrics import GPU_METRICS, RATIO, WATTS
from gputop.text import ratio

if TYPE_CHECKING:
    from gputop.history import History

DEFAULT_RULE = "sm<0.6*median for 5s"
BASELINE_S = 300.0  # what a GPU's own median is taken over
# Before that much is known there is no "usual" to dip from; a job's warm-up has passed by then, too.
LEAST_BASELINE_S = 30.0
# A GPU that is usually next to idle has nothing to dip from.
LEAST_MEDIAN = 0.10
_DEFAULT_HOLD_S = 5.0
_BASELINE_AGE_S = 5.0  # medians are not worth taking anew with every sample
_RECOVERED = 0.5  # of the way from the threshold back to the median, before another dip can be one

_METRICS = {"sm": ("sm_active", "gpu_util"), "util": ("gpu_util",), "tensor": ("tensor_active",),
            "dram": ("dram_active",), "power": ("power_w",)}
_RULE = re.compile(r"(?P<metric>[a-z]+)\s*<\s*(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>\*\s*median|%|w)?"
                   r"(?:\s+for\s+(?P<hold>\d+(?:\.\d+)?)\s*s)?", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Rule:
    """``metrics`` are the ids to look at, the first that has readings; below ``factor`` of the median, or ``level``."""

    text: str
    metrics: tuple[str, ...]
    hold_s: float
    factor: float | None = None
    level: float | None = None


def parse_rule(text: str) -> Rule:
    """Raises GputopError (wrong usage) with what a rule looks like."""
    match = _RULE.fullmatch(text.strip())
    metrics = _METRICS.get(match["metric"].lower()) if match else None
    if match is None or metrics is None:
        raise _usage(text, f"a rule names one of {', '.join(_METRICS)}")
    number, unit = float(match["number"]), re.sub(r"\s", "", match["unit"] or "").lower()
    hold_s = float(match["hold"]) if match["hold"] else _DEFAULT_HOLD_S
    if not 1 <= hold_s <= 3600:
        raise _usage(text, "a dip lasts 1 to 3600 s")
    plain = " ".join(text.split())
    if unit == "*median":
        if not 0 < number < 1:
            raise _usage(text, "a share of the median lies between 0 and 1")
        return Rule(plain, metrics, hold_s, factor=number)
    expected = GPU_METRICS[metrics[0]].unit
    if unit == "%":
        number /= 100
    if (unit == "w") != (expected == WATTS) or (expected == RATIO and not 0 < number <= 1):
        raise _usage(text, "power is in W, the others are ratios (0.3) or percentages (30%)")
    return Rule(plain, metrics, hold_s, level=number)


def _usage(text: str, why: str) -> GputopError:
    return GputopError(f"{text!r} is no rule for a dip: {why}", f'For example --on-dip "{DEFAULT_RULE}".', EXIT_USAGE)


@dataclass(frozen=True, slots=True)
class Dip:
    """A GPU that fulfils the rule: since when (Unix time), its mean since then, and what it is held against."""

    uuid: str
    metric: str
    began_s: float
    now_s: float
    value: float
    median: float | None
    threshold: float

    def text(self, gpu: str) -> str:
        """For people: "GPU 3: SM active 31% for 5 s, usually 92%"."""
        about = GPU_METRICS[self.metric]

        def figure(value: float) -> str:
            return ratio(value) if about.unit == RATIO else f"{value:.0f} W"

        usual = "" if self.median is None else f", usually {figure(self.median)}"
        return f"GPU {gpu}: {about.label} {figure(self.value)} for {self.now_s - self.began_s:.0f} s{usual}"


@dataclass(slots=True)
class _Gpu:
    """What is remembered of one GPU."""

    armed: bool = True
    low_since_s: float | None = None
    median: float | None = None
    median_s: float = -math.inf
    metric: str | None = None


@dataclass(slots=True)
class Trigger:
    """Looks at a history with each new sample. A GPU that has dipped is armed again once it has recovered."""

    rule: Rule
    _gpus: dict[str, _Gpu] = field(default_factory=dict)

    @property
    def suspects(self) -> bool:
        """Whether a GPU is low now, be it not long enough yet."""
        return any(gpu.low_since_s is not None for gpu in self._gpus.values())

    def look(self, history: History) -> Dip | None:
        """The first GPU that has just fulfilled the rule, if any. Call it once per sample."""
        found: Dip | None = None
        for uuid in history.uuids:
            dip = self._look_at(history, uuid, self._gpus.setdefault(uuid, _Gpu()))
            found = found or dip
        return found

    def _look_at(self, history: History, uuid: str, gpu: _Gpu) -> Dip | None:
        now_s = history.newest_s
        assert now_s is not None
        if not 0 <= now_s - gpu.median_s < _BASELINE_AGE_S and gpu.low_since_s is None:
            gpu.metric, gpu.median = self._usual(history, uuid)
            gpu.median_s = now_s
        if gpu.metric is None:
            return None
        times, values = history.window(uuid, gpu.metric, self.rule.hold_s + 1.0)
        threshold = self._threshold(gpu.median)
        if threshold is None or not len(values) or times[-1] < now_s or np.isnan(values[-1]):
            gpu.low_since_s = None  # not measured is not low
            return None
        value = float(values[-1])
        if value >= threshold:
            gpu.low_since_s = None
            if value >= threshold + _RECOVERED * ((gpu.median or threshold) - threshold):
                gpu.armed = True
            return None
        if gpu.low_since_s is None or gpu.low_since_s > now_s:  # the second: the clock was set back
            gpu.low_since_s = float(times[-1])
        if not gpu.armed or now_s - gpu.low_since_s < self.rule.hold_s:
            return None
        gpu.armed = False
        low = values[times >= gpu.low_since_s]
        return Dip(uuid, gpu.metric, gpu.low_since_s, now_s, float(np.nanmean(low)), gpu.median, threshold)

    def _threshold(self, median: float | None) -> float | None:
        if self.rule.level is not None:
            return self.rule.level
        return None if median is None or self.rule.factor is None else self.rule.factor * median

    def _usual(self, history: History, uuid: str) -> tuple[str | None, float | None]:
        """The metric there are readings of, and its median; None where it is too early or too low to have one."""
        for metric in self.rule.metrics:
            times, values = history.window(uuid, metric, BASELINE_S)
            known = ~np.isnan(values)
            if not known.any():
                continue
            if times[known][-1] - times[known][0] < LEAST_BASELINE_S:
                return metric, None
            median = float(np.median(values[known]))
            full = 1.0 if GPU_METRICS[metric].unit == RATIO else 0.0
            return metric, median if median >= LEAST_MEDIAN * full else None
        return None, None

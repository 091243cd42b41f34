"""The rules for a dip. Pure functions.

A rule reads ``METRIC < LEVEL for SECONDS``: ``sm<0.6*median for 5s``, ``power<200W``, ``tensor<10% for 30s``.
The median is the GPU's own over the last minutes, so that one rule fits idle and busy GPUs alike. Or it is a condition
in the language of rules of one's own, for each GPU: ``sm_active.mean(10s) < 40% and power_w > 200W for 5s``.
"""

from __future__ import annotations

import re

from gputop.core.errors import EXIT_USAGE, GputopError
from gputop.core.metrics import GPU_METRICS, RATIO, WATTS
from gputop.rules.expression import condition
from gputop.rules.lexer import Mistake
from gputop.rules.rule_file import quantity
from gputop.rules.units import SECONDS
from gputop.session.options import DEFAULT_RULE, DipRule

_DEFAULT_HOLD_S = 5.0

_METRICS = {"sm": ("sm_active", "gpu_util"), "util": ("gpu_util",), "tensor": ("tensor_active",),
            "dram": ("dram_active",), "power": ("power_w",)}
_RULE = re.compile(r"(?P<metric>[a-z]+)\s*<\s*(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>\*\s*median|%|w)?"
                   r"(?:\s+for\s+(?P<hold>\d+(?:\.\d+)?)\s*s)?", re.IGNORECASE)
_SHORT = re.compile(r"\s*([a-z]+)\s*[<>=]", re.IGNORECASE)


def parse_rule(text: str) -> DipRule:
    """Raises GputopError (wrong usage) with what a rule looks like."""
    match = _RULE.fullmatch(text.strip())
    metrics = _METRICS.get(match["metric"].lower()) if match else None
    if match is None or metrics is None:
        return _condition(text)
    number, unit = float(match["number"]), re.sub(r"\s", "", match["unit"] or "").lower()
    hold_s = float(match["hold"]) if match["hold"] else _DEFAULT_HOLD_S
    if not 1 <= hold_s <= 3600:
        raise _usage(text, "a dip lasts 1 to 3600 s")
    plain = " ".join(text.split())
    if unit == "*median":
        if not 0 < number < 1:
            raise _usage(text, "a share of the median is between 0 and 1")
        return DipRule(plain, metrics, hold_s, factor=number)
    expected = GPU_METRICS[metrics[0]].unit
    if unit == "%":
        number /= 100
    if (unit == "w") != (expected == WATTS) or (expected == RATIO and not 0 < number <= 1):
        raise _usage(text, "power is in W, the others are ratios (0.3) or percentages (30%)")
    return DipRule(plain, metrics, hold_s, level=number)


def _condition(text: str) -> DipRule:
    short = _SHORT.match(text)
    if short is not None and short[1].lower() in _METRICS:
        raise _usage(text, f"{short[1]} < needs a level, or a part of the median: {short[1]}<0.6*median, "
                           f"{short[1]}<{'200W' if short[1].lower() == 'power' else '40%'}, each with for 5s")
    when, _, lasts = text.rpartition(" for ")
    try:
        hold_s, unit = quantity(lasts.strip()) if when else (_DEFAULT_HOLD_S, SECONDS)
        parsed = condition(when or text, "live")
    except Mistake as mistake:
        raise _usage(text, f"{mistake.message}, at character {mistake.pos + 1}; or it is METRIC < LEVEL with one of "
                           f"{', '.join(_METRICS)}") from None
    if not parsed.per_gpu:
        raise _usage(text, "gputop judges a dip for each GPU: use a metric that each GPU has, such as sm_active")
    if unit != SECONDS or not 1 <= hold_s <= 3600:
        raise _usage(text, "a dip lasts 1 to 3600 s")
    return DipRule(" ".join(text.split()), (), hold_s, condition=parsed)


def _usage(text: str, reason: str) -> GputopError:
    return GputopError(f"{text!r} is not a rule for a dip: {reason}", f'For example --on-dip "{DEFAULT_RULE}".',
                       EXIT_USAGE)

"""Plausible ranges of a driver's values, and the reasons for the others.

Sick drivers were seen to report success together with all bits set, stale memory or several
thousand percent. The limits are wide: they catch impossible values, not rare ones.
"""

from __future__ import annotations

from gputop.core.metrics import BYTES, BYTES_PER_S, CELSIUS, COUNT, GPU_METRICS, HERTZ, RATIO, WATTS
from gputop.core.samples import Reading

MAX_PID = 1 << 22  # Linux, PID_MAX_LIMIT
MAX_COUNTER = 1 << 63  # bytes: four years of PCIe 5.0 at full speed

# By unit: lowest and highest plausible value. A ratio may be slightly above 1: drivers round.
_BY_UNIT: dict[str, tuple[float, float]] = {
    RATIO: (0.0, 1.05),
    CELSIUS: (-50.0, 150.0),  # a GPU shuts down below 130
    WATTS: (0.0, 10e3),
    HERTZ: (0.0, 10e9),
    BYTES: (0.0, float(64 << 40)),
    BYTES_PER_S: (0.0, 20e12),
}
_SMALLEST_NONZERO = 1e-9  # no measurement gives so small a value; misread bits do
_ABOVE_ZERO = 1e-9  # for metrics of which 0 is not plausible
_BY_METRIC: dict[str, tuple[float, float]] = {
    "memory_total_bytes": (_ABOVE_ZERO, _BY_UNIT[BYTES][1]),
    "power_limit_w": (_ABOVE_ZERO, _BY_UNIT[WATTS][1]),
    "sm_clock_max_hz": (_ABOVE_ZERO, _BY_UNIT[HERTZ][1]),
    "memory_clock_max_hz": (_ABOVE_ZERO, _BY_UNIT[HERTZ][1]),
    "temperature_slowdown_c": (_ABOVE_ZERO, _BY_UNIT[CELSIUS][1]),
    "pcie_gen": (1.0, 16.0),
    "pcie_width": (1.0, 64.0),
    # A count says nothing of its scale: each has its own. Errors that are corrected may come a thousand a second; those
    # that are not end jobs. A GPU has some hundred spare rows (512 on an A100).
    "ecc_corrected": (0.0, 1e9),
    "ecc_uncorrected": (0.0, 1e6),
    "ecc_uncorrected_lifetime": (0.0, 1e7),
    "rows_remapped": (0.0, 8192.0),
    "row_remap_pending": (0.0, 1.0),
    "row_remap_failed": (0.0, 1.0),
}
# A metric of a unit without limits has to have its own: a KeyError here tells of a new one.
_LIMITS = {metric.id: _BY_METRIC.get(metric.id) or _BY_UNIT[metric.unit] for metric in GPU_METRICS.values()}


def implausible_reason(metric: str, value: float) -> str | None:
    """Reason why ``value``, in the metric's unit, is implausible; None if it is plausible."""
    low, high = _LIMITS[metric]
    if low <= value <= high and not 0 < value < _SMALLEST_NONZERO:  # the first is false for NaN
        return None
    return implausible_text(value, GPU_METRICS[metric].unit)


def plausible_reading(metric: str, value: float, source: str, coarse: bool = False) -> Reading:
    """The reading of a value from the driver, or from DCGM: missing, with the reason, if it is implausible."""
    unit = GPU_METRICS[metric].unit
    reason = implausible_reason(metric, value)
    if reason is not None:
        return Reading.missing(unit, reason, source)
    return Reading(min(value, 1.0) if unit == RATIO else value, unit, source, None, coarse)


def implausible_text(value: float, unit: str) -> str:
    """The reason to show in place of such a value."""
    if unit == RATIO:
        value, unit = value * 100, "%"
    elif unit == HERTZ:
        value, unit = value / 1e6, "MHz"
    shown = f"{value:.10g}" if unit == COUNT else f"{value:.10g}%" if unit == "%" else f"{value:.10g} {unit}"
    return f"the driver reported an impossible value, {shown}"

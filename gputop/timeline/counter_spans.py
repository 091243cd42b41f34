"""Rows of what was sampled of the GPUs while they were captured, on the trace's clock.

Samples and trace have the Unix time of one machine: where the trace tells its own, nothing is estimated. A sample tells
of the time since the one before it, so a value is known to that time and no better.
"""

from __future__ import annotations

import numpy as np
from msgspec import Struct

from gputop.core.captured_samples import CounterLane, GpuCounters
from gputop.core.metrics import BYTES_PER_S, GPU_METRICS, HERTZ, RATIO
from gputop.core.samples import Reading
from gputop.text.units import reading
from gputop.timeline.layer_spans import NamedSpans
from gputop.timeline.model import KINDS
from gputop.trace.model import I64, Trace

_MAX_GAP = 2.5  # intervals: after a longer pause a sample tells of one interval alone
_IN_LABEL = {BYTES_PER_S: " GB/s", HERTZ: " MHz"}  # the figure beside the row has no room for these units


class CounterRow(Struct, frozen=True):
    """One metric of one GPU (the job's number); a span for each sample, its level against ``full_scale``."""

    gpu: int
    label: str
    unit: str
    full_scale: float
    spans: NamedSpans


def counter_rows(trace: Trace) -> tuple[list[CounterRow], str]:
    """The rows by GPU, in the order of the lanes of the monitor, and why a capture by gputop has none of some GPUs."""
    counters = trace.counters
    if counters is None:  # of another tool
        return [], ""
    if not counters.gpus:
        return [], counters.reason or "no GPU was sampled during the capture"
    if not trace.origin_ns:
        return [], "the trace does not show when it was captured"
    ends = np.round(np.array(counters.times_s, np.float64) * 1e9).astype(np.int64) - trace.origin_ns
    largest: dict[str, float] = {}
    for lane_of in counters.gpus.values():
        for metric, lane in lane_of.items():
            largest[metric] = max(largest.get(metric, 0.0), *(v or 0.0 for v in lane.values), 0.0)
    rows = [_row(gpu, metric, lane_of[metric], _starts(ends, counters), ends, largest[metric] or 1.0, trace.window_ns)
            for gpu, lane_of in sorted(counters.gpus.items()) for metric in GPU_METRICS if metric in lane_of]
    rows = [row for row in rows if len(row.spans.start)]
    return rows, counters.reason if rows else "there are no samples in the recorded time"


def _starts(ends: I64, counters: GpuCounters) -> I64:
    """Time since which each sample counts: that of the one before it; one interval before the first or after a
    pause."""
    usual = round(counters.interval_s * 1e9)
    before = np.append(ends[:1] - usual, ends[:-1])
    return np.where(ends - before > _MAX_GAP * usual, ends - usual, before)


def _row(gpu: int, metric: str, lane: CounterLane, starts: I64, ends: I64, largest: float,
         window_ns: tuple[int, int]) -> CounterRow:
    """``largest``: of all GPUs, the scale of a metric that has none of its own."""
    about, scale = GPU_METRICS[metric], lane.full_scale or largest
    values = np.array([np.nan if value is None else value for value in lane.values], np.float64)
    start, end = np.maximum(starts, window_ns[0]), np.minimum(ends, window_ns[1])
    sampled = np.flatnonzero(np.isfinite(values) & (end > start))
    full = "" if about.unit == RATIO or lane.full_scale is None else f" of {reading(Reading(scale, about.unit))}"
    names = [f"{about.label} {reading(Reading(value, about.unit))}{full}" for value in values[sampled].tolist()]
    spans = NamedSpans(
        -1, start[sampled], end[sampled], np.arange(len(sampled)), np.zeros(len(sampled), np.uint16),
        np.full(len(sampled), KINDS.index("counter"), np.uint8), names,
        np.clip(values[sampled] / scale, 0, 1).astype(np.float32))
    return CounterRow(gpu, about.label + _IN_LABEL.get(about.unit, ""), about.unit, scale, spans)

"""The cost of calls that the GPU waits for, and the rate that copies can have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from gputop.advice.trace.facts import TraceFacts
from gputop.analysis.what_if.cure import Calls, Cure
from gputop.analysis.what_if.host_waits import before_steps
from gputop.analysis.what_if.replay import idle_saved
from gputop.trace.intervals import EMPTY, Spans, intersect, merge, subtract
from gputop.trace.model import Kind, MemoryKind

LARGE_BYTES = 1_000_000  # copies that run at the link's rate


class IdleOfCalls(NamedTuple):
    """The GPU's idle time within the replayed steps that follows from calls of the host, and how much shorter the steps
    would be without them: where GPUs wait for each other, less than that."""

    idle: Spans
    saved_ns: int

    @property
    def seconds(self) -> float:
        return min(self.idle.total, self.saved_ns) / 1e9


def cost_of_calls(facts: TraceFacts, calls: Calls) -> dict[int, IdleOfCalls]:
    """Cost of these calls by the replay, by GPU (index into ``Trace.gpus``): neither what it waits for a batch, nor
    what is before a step's first kernel."""
    trace, replay = facts.trace, facts.replay
    if replay is None or not len(calls.line):
        return {}
    cure = Cure(calls=calls, assumes="")
    saved_ns = max(round(replay.saved(cure) * replay.spans.total), 0)
    input_waits = merge(EMPTY, *(loop.waits for loop in replay.graph.loops))
    idle = idle_saved(replay.graph, cure) if saved_ns else {}
    return {timeline.gpu: IdleOfCalls(subtract(
        intersect(idle[timeline.gpu], replay.spans),
        merge(input_waits, before_steps(trace, timeline, facts.steps))), saved_ns)
        for timeline in facts.gpu_timelines if timeline.gpu in idle}


def idle_of(cost: Mapping[int, IdleOfCalls]) -> dict[int, Spans]:
    """The idle time of each GPU alone."""
    return {gpu: of_gpu.idle for gpu, of_gpu in cost.items()}


def pinned_rate(facts: TraceFacts) -> float | None:
    """Bytes per second of pinned copies of a megabyte and more with the host: what the slowest link in a node does."""
    device = facts.trace.device
    up = (device.kind == Kind.H2D) & (device.src == MemoryKind.PINNED)
    down = (device.kind == Kind.D2H) & (device.dst == MemoryKind.PINNED)
    rows = np.flatnonzero((up | down) & (device.bytes >= LARGE_BYTES))
    if not len(rows):
        return None
    return float(np.median(device.bytes[rows] / np.maximum(device.end_ns[rows] - device.start_ns[rows], 1))) * 1e9

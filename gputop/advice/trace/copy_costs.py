"""The cost of calls that the GPU waits for, and the rate that copies can have."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from gputop.advice.fix_code import code
from gputop.advice.trace.facts import TraceFacts, once_per_trace
from gputop.advice.trace.job import Job
from gputop.analysis.what_if.cure import Calls, Cure
from gputop.analysis.what_if.host_waits import before_steps
from gputop.analysis.what_if.replay import idle_saved
from gputop.trace.intervals import EMPTY, Spans, intersect, merge, subtract
from gputop.trace.model import Kind, MemoryKind

LARGE_BYTES = 1_000_000  # copies that run at the link's rate
_MOST, _ROUNDS = 0.5, 3  # share of the copied bytes; times
KEEP_THERE = ("Keep the data on the GPU between kernels: {:,} times, data is copied to the host and back before the "
              "next kernel.")


class CostOfCalls(NamedTuple):
    """The GPUs' idle time within the replayed steps that follows from calls of the host, and how much shorter the steps
    would be without them: where GPUs wait for each other, less than that."""

    idle: dict[int, Spans]  # by GPU (index into ``Trace.gpus``)
    saved_ns: int

    def seconds(self, facts: TraceFacts) -> float:
        """Cost per step and GPU."""
        cost_ns = sum(min(idle.total, self.saved_ns) for idle in self.idle.values())
        return cost_ns / 1e9 / (len(facts.gpu_timelines) * facts.replayed_steps)


def cost_of_calls(facts: TraceFacts, calls: Calls) -> CostOfCalls:
    """Cost of these calls by the replay: neither what a GPU waits for a batch, nor what is before a step's first
    kernel."""
    replay = facts.replay
    if replay is None or not len(calls.line):
        return CostOfCalls({}, 0)
    cure = Cure(calls=calls, assumes="")
    saved_ns = max(round(replay.saved(cure) * replay.spans.total), 0)
    input_waits = merge(EMPTY, *(loop.waits for loop in replay.graph.loops))
    idle = idle_saved(replay.graph, cure) if saved_ns else {}
    return CostOfCalls({timeline.gpu: subtract(
        intersect(idle[timeline.gpu], replay.spans),
        merge(input_waits, before_steps(timeline, facts.steps)))
        for timeline in facts.gpu_timelines if timeline.gpu in idle}, saved_ns)


@once_per_trace
def copied_back(facts: TraceFacts) -> int:
    """Times that large arrays go to the host after a kernel and come back, as many and of the same bytes, before the
    next one, where that is most of what is copied; else 0."""
    device, best = facts.trace.device, 0
    for timeline in facts.gpu_timelines:
        kind, size = timeline.kind, device.bytes[timeline.events]
        turn = np.cumsum(kind == Kind.COMPUTE)  # the rows are in order of time
        ways = [(size >= LARGE_BYTES) & (kind == way) for way in (Kind.D2H, Kind.H2D)]
        (down, downs), (up, ups) = ([np.bincount(turn[way], weights, minlength=len(turn) + 1) for weights in (
            size[way], None)] for way in ways)
        back = (down > 0) & (down == up) & (downs == ups)
        if 2 * down[back].sum() >= _MOST * size[(kind == Kind.D2H) | (kind == Kind.H2D)].sum():
            best = max(best, int(back.sum()))
    return best if best >= _ROUNDS else 0


def pinned_rate(facts: TraceFacts) -> float | None:
    """Bytes per second of pinned copies of a megabyte and more with the host: what the slowest link in a node does."""
    device = facts.trace.device
    up = (device.kind == Kind.H2D) & (device.src == MemoryKind.PINNED)
    down = (device.kind == Kind.D2H) & (device.dst == MemoryKind.PINNED)
    rows = np.flatnonzero((up | down) & (device.bytes >= LARGE_BYTES))
    if not len(rows):
        return None
    return float(np.median(device.bytes[rows] / np.maximum(device.end_ns[rows] - device.start_ns[rows], 1))) * 1e9


# -- fetching -----------------------------------------------------------------------------------------
#
# Copies of results to the host: the ops that ask for them, and the fix.

_D2H = "Read results back less often: keep losses and metrics on the GPU and fetch them every hundred steps."
_D2H_OF_A_PROGRAM = "Read results back once, after the last kernel that changes them."
_SUMMARIES = "Write summaries and histograms every few hundred steps, because each one fetches tensors from the GPU."
_PLACED = ("Keep these ops on the GPU, or fetch their results once every many steps: an op on the host fetches its "
           "inputs from the GPU.")
# What the op is that most of the copies to the host are for, the fix, and its code in Keras and in a loop of one's own.
_FETCHING = (
    (re.compile(r"summary|histogram", re.IGNORECASE), _SUMMARIES,
     "step_gap_host", ("summary-keras3", "summary-custom")),
    (re.compile(r"py_?func|numpy_func|print|string|regex|unique|lookup|assert", re.IGNORECASE), _PLACED,
     "host_placement", ("placed", "placed")),
    (re.compile(r"edge_\d+_"), "Fetch fewer and smaller tensors, and not in each run: session.run copies each fetched "
     "tensor to the host.", "copies_excessive", ("fetch", "fetch")),
)


def fetching_ops(facts: TraceFacts) -> tuple[str, ...]:
    """The ops whose results are copied to the host, as far as the trace names them: those of most time first."""
    table = facts.analysis.copies
    return tuple(row.op for row in (table.by_op if table is not None else None) or () if row.direction == "d2h")[:3]


def fetch_fix(ops: Sequence[str], job: Job) -> tuple[str, str | None]:
    """Fix for copies to the host that these ops ask for, and its code."""
    for pattern, action, page, keys in _FETCHING:
        if ops and pattern.search(ops[0]):
            return action, None if job.framework != "tensorflow" else code(page, keys[0 if job.keras else 1])
    if job.framework == "unknown":
        return _D2H_OF_A_PROGRAM, None
    return _D2H, code("copies_excessive", "d2h-keras") if job.keras else code("sync_copies", f"d2h-{job.framework}")

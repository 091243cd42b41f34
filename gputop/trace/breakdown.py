"""Where the step goes: eight exclusive parts that sum to it exactly.

Each instant of each GPU that took part goes to the first of these that holds, and the
parts are averaged over those GPUs:

1. ``compute``: a kernel that is no collective runs, or the GPU copies or clears its own memory;
2. ``collectives``: a collective or a GPU-to-GPU copy runs (so this is the exposed part);
3. ``h2d``, then ``d2h``: a copy from or to the host runs;
4. ``input``: the training loop waits for a batch and none of its GPUs runs anything;
5. ``idle``: this GPU waits for another one, which works all the while;
6. ``launch``: the event that ends the gap was launched after the gap began, and the host was
   launching work meanwhile (launches close together, inside a tf.function where one is traced);
7. ``host``: the same, but the host was doing something else;
8. ``idle``: the rest (work was queued, or the launch is not in the trace).

Without any GPU in the trace there is ``input``, and all else is ``host``.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gputop.trace.device_time import GpuTimeline, idle_by_host, waits_for_another
from gputop.trace.input_pipeline import Loop, loops
from gputop.trace.intervals import EMPTY, Spans, chained, intersect, merge, subtract, union
from gputop.trace.model import Trace
from gputop.trace.query import stat
from gputop.trace.results import Breakdown

# Launches further apart than this are not one stretch of launching (nsys-ai counts GPU gaps from 1 ms).
LAUNCHING_GAP_NS = 1_000_000
# A stretch of idle time this long in which one other GPU is busy for this share is spent waiting for that GPU.
# Below, gaps between launches coincide with other GPUs' kernels by chance. gputop's own figures.
WAIT_FOR_GPU_NS = 1_000_000
WAIT_FOR_GPU_SHARE = 0.8

_PARTS = ("input", "h2d", "compute", "collectives", "d2h", "launch", "host", "idle")


def breakdown(trace: Trace, lines: Sequence[GpuTimeline], bounds: Sequence[tuple[int, int]]) -> Breakdown:
    """Mean over ``bounds`` (disjoint, in order), in seconds."""
    within = union([a for a, _ in bounds], [b for _, b in bounds])
    waiting = loops(trace)
    parts = dict.fromkeys(_PARTS, 0)
    lines = [line for line in lines if intersect(line.busy, within).total]
    if not lines:
        parts["input"] = intersect(merge(EMPTY, *(loop.waits for loop in waiting)), within).total
        parts["host"] = within.total - parts["input"]
    starved = _starved(trace, lines, waiting)
    launching = _launching(trace) if lines else EMPTY
    for line in lines:
        for name, length in _gpu_parts(line, lines, within, starved[line.gpu], launching).items():
            parts[name] += length
    unit = 1e9 * len(bounds) * max(len(lines), 1)
    return Breakdown(**{name: length / unit for name, length in parts.items()})


def _gpu_parts(
    line: GpuTimeline, lines: list[GpuTimeline], within: Spans, waiting: Spans, launching: Spans,
) -> dict[str, int]:
    """Exclusive nanoseconds of one GPU within ``within``; they sum to its length."""
    left = within
    parts: dict[str, int] = {}

    def take(name: str, spans: Spans) -> None:
        nonlocal left
        taken = intersect(left, spans)
        parts[name] = parts.get(name, 0) + taken.total
        left = subtract(left, taken)

    take("compute", merge(line.compute, line.other))
    take("collectives", merge(line.collectives, line.p2p))
    take("h2d", line.h2d)
    take("d2h", line.d2h)
    take("input", waiting)
    take("idle", waits_for_another(line, lines, WAIT_FOR_GPU_NS, WAIT_FOR_GPU_SHARE))
    by_host = idle_by_host(line)
    take("launch", intersect(by_host, launching))
    take("host", by_host)
    take("idle", left)
    return parts


def _starved(trace: Trace, lines: Sequence[GpuTimeline], waiting: Sequence[Loop]) -> dict[int, Spans]:
    """For each GPU when the loop that feeds it waits for a batch and none of that loop's GPUs is busy.

    A loop bound to a thread feeds the GPUs that thread launches on, any other loop those of its host.
    """
    out = {line.gpu: EMPTY for line in lines}
    for loop in waiting:
        fed = [line for line in lines if loop.line >= 0 and (trace.device.launch_line[line.rows] == loop.line).any()]
        fed = fed or [line for line in lines if trace.gpus[line.gpu].host == loop.host]
        starved = subtract(loop.waits, merge(EMPTY, *(line.busy for line in fed)))
        for line in fed:
            out[line.gpu] = merge(out[line.gpu], starved)
    return out


def _launching(trace: Trace) -> Spans:
    """When the host was launching work: runs of launches close together, inside tf.functions where there are any."""
    device = trace.device
    known = device.launch_ns >= 0
    # A launch takes effect at the device's start, so the stretch reaches up to there for short delays.
    first = device.launch_ns[known]
    begun = device.start_ns[known]
    soon = begun - first <= LAUNCHING_GAP_NS
    runs = chained(np.concatenate((first, begun[soon])), LAUNCHING_GAP_NS)
    rows, values = stat(trace.host, "is_func")
    rows = rows[values == 1]
    if not len(rows):
        return runs
    inside = union(trace.host.start_ns[rows], trace.host.end_ns[rows])
    return intersect(runs, inside)

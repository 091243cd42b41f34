"""The ranks of a job side by side: what each does in a step, and which of them to look at.

Where the ranks step together, one sets the pace and the others wait for it in their collectives: the rank with most
load, or one that its host holds up. The latter shows by its waiting alone: it has the least.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
from msgspec import Struct

from gputop.analysis.gpu.collective_waits import CollectiveWaits
from gputop.analysis.gpu.device_time import GpuTimeline, gpu_number
from gputop.analysis.results import RankTimes
from gputop.analysis.steps.model import Steps
from gputop.trace.intervals import coverage, subtract
from gputop.trace.model import Trace


def rank_times(trace: Trace, gpu_timelines: Sequence[GpuTimeline], steps: Steps | None,
               waits: CollectiveWaits | None) -> tuple[RankTimes, ...]:
    """The GPUs that compute, in the trace's order; none without steps, or with fewer than two such GPUs. Definitions:
    ``load_s`` is the time with a compute kernel or a copy. ``waiting_s`` is the exposed wait for the last rank, as in
    :mod:`gputop.analysis.gpu.collective_waits`; ``communication_s`` the rest of the time in collectives that no load
    hides. ``other_s`` is what remains of the step: the GPU is idle. All are means over the steps."""
    ranks = [timeline for timeline in gpu_timelines if timeline.compute.total]
    if steps is None or len(ranks) < 2:
        return ()
    bounds = steps.edges_ns
    per_step = np.empty((2, len(ranks), len(bounds)), np.int64)  # load, and exposed time in collectives
    for i, timeline in enumerate(ranks):
        load = timeline.load
        for of_rank, spans in zip(per_step[:, i], (load, subtract(timeline.collectives, load)), strict=True):
            of_rank[:] = coverage(spans, bounds[:, 0], bounds[:, 1])
    most = np.bincount(per_step[0].argmax(axis=0), minlength=len(ranks))
    step_s = float((bounds[:, 1] - bounds[:, 0]).mean()) / 1e9
    out = []
    for i, timeline in enumerate(ranks):
        number, gpu = gpu_number(trace, timeline.gpu), trace.gpus[timeline.gpu]
        load_s, exposed_s = (per_step[:, i].mean(axis=1) / 1e9).tolist()
        # Without a match with those of other ranks a collective's waiting cannot be told from its transfer.
        waiting_s = waits.waiting_s.get(number) if waits is not None else None
        communication_s = max(0.0, exposed_s - (waiting_s or 0.0))
        out.append(RankTimes(number, gpu.host, gpu.rank, load_s, communication_s, waiting_s,
                             max(0.0, step_s - load_s - exposed_s), int(most[i])))
    return tuple(out)


_WAITING_SPREAD_FACTOR = 1.5  # times the spread of the load: then that of the waiting is not due to the load


class Extremes(Struct, frozen=True):
    """The ranks with least, median and most load or waiting, as ``by`` says, each with that word; without a median
    where there are two; none where there is one."""

    by: Literal["load", "waiting"]
    ranks: tuple[tuple[str, RankTimes], ...]


def least_median_most(ranks: Sequence[RankTimes]) -> Extremes:
    """Rank with the least, the median and the most load; of waiting where that differs more between the ranks than
    their load can explain."""
    loads = [rank.load_s for rank in ranks]
    waits = [rank.waiting_s for rank in ranks if rank.waiting_s is not None]
    by: Literal["load", "waiting"] = "load"
    if waits and len(waits) == len(ranks) and (
            max(waits) - min(waits) > _WAITING_SPREAD_FACTOR * (max(loads) - min(loads))):
        by = "waiting"
    ordered = sorted(ranks, key=lambda rank: (rank.load_s if by == "load" else rank.waiting_s or 0.0))
    if len(ordered) < 2:
        return Extremes(by, ())
    median = (("median", ordered[(len(ordered) - 1) // 2]),) if len(ordered) > 2 else ()
    return Extremes(by, (("least", ordered[0]), *median, ("most", ordered[-1])))

"""Samples of a job's GPUs that the monitor took while the job was captured."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated

from msgspec import Meta, Struct, field

MAX_VALUES = 40_000  # of all lanes together: some 300 kB of JSON
_LAST_TIME_S = 4e9  # the year 2096
_Values = Annotated[tuple[float | None, ...], Meta(max_length=MAX_VALUES)]


class CounterLane(Struct, frozen=True):
    """One metric of one GPU, a value for each sample in the metric's unit; None: not measured then.

    ``full_scale`` is what it is drawn against; None: the largest value.
    """

    values: _Values
    full_scale: float | None = None


class GpuCounters(Struct, frozen=True):
    """``gpus`` are the job's own numbers of its GPUs, with the lanes by metric.

    ``times_s`` is the Unix time of each sample by this machine's clock, rising. A value is of the time since the sample
    before it or, as clocks are, of that instant. ``interval_s`` is the usual time between two samples. Where lanes are
    missing, of all GPUs or of some, ``reason`` says why.
    """

    times_s: _Values = ()
    interval_s: float = 1.0
    gpus: Mapping[int, Mapping[str, CounterLane]] = field(default_factory=dict)
    reason: str = ""

    def __post_init__(self) -> None:
        times = [time_s for time_s in self.times_s if time_s is not None]
        if len(times) < len(self.times_s) or times != sorted(times) or any(not 0 <= t < _LAST_TIME_S for t in times):
            raise ValueError("the sample times do not increase")
        lanes = [lane for of_gpu in self.gpus.values() for lane in of_gpu.values()]
        if any(len(lane.values) != len(times) for lane in lanes) or len(lanes) * len(times) > MAX_VALUES:
            raise ValueError("some lanes do not have a value for each sample")
        if not 0 < self.interval_s < _LAST_TIME_S or any(
                lane.full_scale is not None and lane.full_scale <= 0 for lane in lanes):
            raise ValueError("an interval or a scale is not positive")


def joined(workers: Mapping[int, tuple[GpuCounters, str]], gpus: Mapping[int, tuple[int, int]]) -> GpuCounters | None:
    """The samples of several workers that were captured together, by the numbers of their GPUs in the trace.

    ``workers`` has each worker's samples and name, ``gpus`` the worker of each GPU and its number there. A worker that
    was sampled at other times than most, as on another machine, is left out, with the reason.
    """
    if not workers:
        return None
    times = max((counters.times_s for counters, _ in workers.values()), key=len)
    reasons = [f"{name}: {counters.reason or 'sampled at other times than the others'}"
               for counters, name in workers.values() if not counters.gpus or counters.times_s != times]
    lanes = {number: workers[worker][0].gpus[index] for number, (worker, index) in gpus.items()
             if worker in workers and workers[worker][0].times_s == times and index in workers[worker][0].gpus}
    every = max(1, math.ceil(len(times) * sum(map(len, lanes.values())) / MAX_VALUES))  # of many each n-th
    return GpuCounters(
        times_s=times[::every], interval_s=every * max(counters.interval_s for counters, _ in workers.values()),
        gpus={number: {metric: CounterLane(lane.values[::every], lane.full_scale) for metric, lane in index.items()}
              for number, index in lanes.items()}, reason="; ".join(reasons))

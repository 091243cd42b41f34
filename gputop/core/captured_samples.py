"""Measurements of a job beside its trace: samples of its GPUs and the CPUs that it could use while it was captured, and
its step period in the minutes before."""

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


# -- the step period by the live signal alone -------------------------------------------------------

SURE = 0.6  # confidence of a period; below it, it is as often an alias of shorter steps
_MAX_S = 1e9
_MAX_STEPS_PER_PERIOD, _WHOLE = 16, 0.1  # a period that is 1% off still shows which whole number of steps it has


class LiveSteps(Struct, frozen=True):
    """``period_s`` is the step period in each stretch of ``stretch_s`` seconds in which one stood out, oldest first;
    ``confidence`` the least of them (0-1). The samples were ``interval_s`` apart: shorter steps are not seen.

    ``idle_period_s`` is after how long an idle time of the GPUs returned, each of ``idle_s``; None: at no regular
    interval, in the ``seen_s`` seconds for which the job was watched."""

    period_s: tuple[float, ...]
    confidence: float
    stretch_s: float
    interval_s: float
    idle_s: float = 0.0
    idle_period_s: float | None = None
    seen_s: float = 0.0

    def __post_init__(self) -> None:
        if not all(0 < value < _MAX_S for value in (self.stretch_s, self.interval_s, *self.period_s)):
            raise ValueError("an impossible time")


def steps_per_period(period_s: float, step_s: float) -> int | None:
    """Number of steps of ``step_s`` (from a trace) in one period; None where that is no whole number."""
    count = period_s / step_s
    whole = round(count)
    return whole if 1 <= whole <= _MAX_STEPS_PER_PERIOD and abs(count - whole) <= _WHOLE else None


def is_undersampled(step_s: float, interval_s: float) -> bool:
    """Return whether samples ``interval_s`` apart show steps of ``step_s`` only as an alias."""
    return step_s < 2 * interval_s


# -- CPUs -------------------------------------------------------------------------------------------

class CpuUser(Struct, frozen=True):
    """A process beside the job's, and the CPUs that it kept busy; ``child``: the job or a child of it started it."""

    pid: int
    name: str
    cpus: float
    child: bool = False


class JobCpus(Struct, frozen=True):
    """All in CPUs: 1.5 is one and a half.

    ``allowed`` is the number of CPUs that the process may run on (sched_getaffinity(2)), ``quota`` what its control
    groups grant (None: no limit). ``used`` are the CPUs that the job kept busy, ``others`` those of the allowed ones
    that everything else did, both as means over the recording; None: not measured. Of ``others`` the processes that the
    job started did ``children``, its other ranks on this node ``ranks``, and gputop, which recorded it, ``gputop``;
    None: not known. ``busiest`` are the processes beside the job, its ranks and gputop that used most. ``held_up`` is
    the share of the recording in which the job's main thread was ready to run and had no CPU; ``waited`` is how many of
    its threads were so, on average. ``asleep`` is the share of the recording in which none of its threads ran or was
    ready to run, reckoned as if each slept whatever the others did. The profiler's own threads count for neither of the
    two. ``threads`` is how many ran or were ready to run for a tenth of the recording or more, ``main`` the CPUs that
    its main thread kept busy, ``cores`` how many cores the allowed CPUs are. ``children_waited`` is the share of the
    recording in which the one of the processes that the job started that waited most was ready to run and had no CPU.
    ``age_s`` is for how long the process had run when it began.
    """

    allowed: float
    quota: float | None = None
    used: float | None = None
    others: float | None = None
    children: float | None = None
    ranks: float | None = None
    gputop: float | None = None
    busiest: tuple[CpuUser, ...] = ()
    held_up: float | None = None
    waited: float | None = None
    age_s: float | None = None
    threads: int | None = None
    cores: int | None = None
    main: float | None = None
    asleep: float | None = None
    children_waited: float | None = None

    @property
    def busy(self) -> float | None:
        """Number of the allowed CPUs that were busy, whoever used them; None: not measured."""
        return None if self.used is None or self.others is None else self.used + self.others

    @property
    def stretch(self) -> float | None:
        """Factor by which the job's work on CPUs took longer because its threads waited for them: for each second that
        a thread ran, the seconds that it was ready to run. Its own threads' waiting for each other counts, too. None:
        not measured."""
        return None if not self.used or self.waited is None else (self.used + self.waited) / self.used

    @property
    def programs(self) -> float | None:
        """The CPUs that other programs kept busy, and processes that the job started; None: not measured."""
        return None if self.others is None else max(0.0, self.others - (self.ranks or 0.0) - (self.gputop or 0.0))

    @property
    def limit(self) -> float:
        """CPUs that the job can use at most, however little else runs."""
        return self.allowed if self.quota is None else min(self.allowed, self.quota)

    @property
    def free(self) -> float:
        """CPUs for the job beside what else runs: no less than it used, or than one."""
        return max(min(self.limit, self.allowed - (self.others or 0.0)), self.used or 0.0, min(1.0, self.limit))

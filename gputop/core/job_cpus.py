"""The CPUs that a job could use while it was captured."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CpuUser:
    """A process beside the job's, and the CPUs that it kept busy; ``child``: the job or a child of it started it."""

    pid: int
    name: str
    cpus: float
    child: bool = False


@dataclass(frozen=True, slots=True)
class JobCpus:
    """All in CPUs: 1.5 is one and a half.

    ``allowed`` is the number of CPUs that the process may run on (sched_getaffinity(2)), ``quota`` what its control
    groups grant (None: no limit). ``used`` are the CPUs that the job kept busy, ``others`` those of the allowed ones
    that everything else did, both as means over the recording; None: not measured. ``children`` is that part of
    ``others`` which the job's own child processes did. ``busiest`` are the processes that did most of it. ``age_s`` is
    for how long the process had run when its recording began.
    """

    allowed: float
    quota: float | None = None
    used: float | None = None
    others: float | None = None
    children: float | None = None
    busiest: tuple[CpuUser, ...] = ()
    age_s: float | None = None

    @property
    def limit(self) -> float:
        """No more than this, however little else runs."""
        return self.allowed if self.quota is None else min(self.allowed, self.quota)

    @property
    def free(self) -> float:
        """For the job beside what else runs: no less than it used, or than one."""
        return max(min(self.limit, self.allowed - (self.others or 0.0)), self.used or 0.0, min(1.0, self.limit))

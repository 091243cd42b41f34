"""The CPUs that a job could use while it was captured."""

from __future__ import annotations

from msgspec import Struct


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

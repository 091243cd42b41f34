"""Which CPUs a job may use and has used while it is captured, from /proc."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gputop.core.job_cpus import JobCpus
from gputop.session.cpu_users import CpuUsers, Users
from gputop.sources.host import proc_files
from gputop.sources.host.cgroups import Cgroups
from gputop.sources.host.cpu import CpuTimes, read_times

if TYPE_CHECKING:
    from gputop.profiler.recording import Progress

_MIN_S = 0.2  # the counters have steps of 10 ms
# Threads' waits are one file each, about 10 µs to read: so often in a second, and not of a process with more threads.
_THREADS_PERIOD_S = 0.5
_MAX_THREADS = 1024


@dataclass(frozen=True, slots=True)
class _Sample:
    time_s: float
    job_ticks: int
    node: CpuTimes
    waited_ns: int | None  # by its main thread, ready to run but without a CPU
    age_s: float | None


@dataclass(frozen=True, slots=True)
class _ThreadWaits:
    """How long each thread of the job, by its number, has been ready to run without a CPU; None: not known."""

    time_s: float
    ns: dict[str, int] | None

    def since(self, first: _ThreadWaits) -> float | None:
        """How many threads waited on average since ``first``; those that ended meanwhile are not counted."""
        if self.ns is None or first.ns is None or self.time_s - first.time_s < _MIN_S:
            return None
        waited_ns = sum(max(0, ns - first.ns.get(thread, 0)) for thread, ns in self.ns.items())
        return waited_ns / 1e9 / (self.time_s - first.time_s)


class _Job:
    """One process, sampled at the beginning of its recording and again and again until its end."""

    def __init__(self, pid: int, root: Path) -> None:
        self._pid, self._root = pid, root
        self._first = self._last = self._sample()
        self._first_waits = self._last_waits = self._thread_waits()

    def sample(self, begin: bool) -> None:
        self._last = self._sample()
        if begin or time.monotonic() - self._last_waits.time_s >= _THREADS_PERIOD_S:
            self._last_waits = self._thread_waits()
        if begin:
            self._first, self._first_waits = self._last, self._last_waits

    def _sample(self) -> _Sample | None:
        try:
            stat = proc_files.parse_stat(proc_files.read(f"{self._root}/proc/{self._pid}/stat"))
        except OSError:
            return None
        node = read_times(self._root)
        if stat is None or isinstance(node, str):
            return None
        return _Sample(time.monotonic(), stat.cpu_ticks, node, self._waited_ns(), self._age_s(stat.start))

    def _waited_ns(self, thread: str = "") -> int | None:
        """The second figure of /proc/PID/schedstat, or of a thread's; None where the kernel does not count it."""
        folder = f"{self._root}/proc/{self._pid}" + (f"/task/{thread}" if thread else "")
        try:
            _, waited, *_ = proc_files.read(f"{folder}/schedstat").split()
            return int(waited)
        except (OSError, ValueError):
            return None

    def _thread_waits(self) -> _ThreadWaits:
        try:
            threads = [task.name for task in Path(f"{self._root}/proc/{self._pid}/task").iterdir()]
        except OSError:
            threads = []
        if not 0 < len(threads) <= _MAX_THREADS:
            return _ThreadWaits(time.monotonic(), None)
        waited_ns = {thread: ns for thread in threads if (ns := self._waited_ns(thread)) is not None}
        return _ThreadWaits(time.monotonic(), waited_ns or None)

    def _age_s(self, start_ticks: int) -> float | None:
        try:
            up_s = float(proc_files.read(f"{self._root}/proc/uptime").split()[0])
        except (OSError, ValueError, IndexError):
            return None
        age_s = up_s - start_ticks / os.sysconf("SC_CLK_TCK")
        return age_s if 0 <= age_s < float("inf") else None

    def cpus(self, users: Users | None) -> JobCpus | None:
        """None where the process cannot be seen. ``users``: who else was busy, as it sees them."""
        try:
            allowed = os.sched_getaffinity(self._pid)
            group, own = (proc_files.read(f"{self._root}/proc/{of}/cgroup", proc_files.LARGE_BYTES)
                          for of in (self._pid, "self"))
        except OSError:
            return None
        limit = Cgroups(time.monotonic, self._root).read(group, own=group == own)["cpu_limit_cores"].value
        used = others = held_up = waited = None
        first, last = self._first, self._last
        if first is not None and last is not None and last.time_s - first.time_s >= _MIN_S:
            per_s = os.sysconf("SC_CLK_TCK") * (last.time_s - first.time_s)
            used = max(0.0, (last.job_ticks - first.job_ticks) / per_s)
            busy = sum(last.node.cores[n][0] - first.node.cores[n][0] for n in allowed
                       if n in last.node.cores and n in first.node.cores)
            others = max(0.0, busy / per_s - used)
            waited = self._last_waits.since(self._first_waits)
            if first.waited_ns is not None and last.waited_ns is not None:
                held_up = min(1.0, max(0.0, (last.waited_ns - first.waited_ns) / 1e9 / (last.time_s - first.time_s)))
        # Which of the node's CPUs a process used is not known: where the job may not use all of them, none is named.
        if users is None or others is None or first is None or len(allowed) < len(first.node.cores):
            users = None
        return JobCpus(
            float(len(allowed)), limit, used, others, held_up=held_up, waited=waited,
            age_s=None if first is None else first.age_s,
            children=users and users.children, ranks=users and users.ranks, gputop=users and users.gputop,
            busiest=users.busiest if users else ())


class JobCpusWatch:
    """Receives the progress of a capture and hands it on; its jobs are sampled while they are recorded."""

    def __init__(self, pids: Iterable[tuple[str, int | None]], report: Callable[[Progress], None],
                 root: Path = Path("/")) -> None:
        """``pids``: addresses of servers and the process of each on this machine, where that is known."""
        self._pids = {address: pid for address, pid in pids if pid is not None and pid != os.getpid()}
        self._jobs = {address: _Job(pid, root) for address, pid in self._pids.items()}
        self._users = CpuUsers(root)
        self._report = report
        self._phase = ""

    def __call__(self, progress: Progress) -> None:
        if progress.phase in ("probing", "recording", "overview"):
            begin = progress.phase not in (self._phase, "overview")
            for job in self._jobs.values():
                job.sample(begin=begin)
            if self._jobs:
                self._users.sample(begin=begin)
        self._phase = progress.phase
        self._report(progress)

    def cpus(self, address: str) -> JobCpus | None:
        if address not in self._jobs:
            return None
        return self._jobs[address].cpus(self._users.of(self._pids[address], self._pids.values()))

"""CPUs that a job may use and has used while it is captured, and the processes that keep the node's CPUs busy
meanwhile, the job's and others. From /proc."""

from __future__ import annotations

import heapq
import math
import os
import re
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from msgspec import Struct

from gputop.core.captured_samples import CpuUser, JobCpus
from gputop.core.proc import children_by_parent, process_ids, read_or_empty, stat_of, with_descendants
from gputop.sources.host import proc_files
from gputop.sources.host.cgroups import Cgroups
from gputop.sources.host.cpu import CpuTimes, parse_cpus, read_times
from gputop.sources.host.proc_files import Stat
from gputop.text.units import printable

if TYPE_CHECKING:
    from gputop.profiler.recording import Progress

_MIN_S = 0.2  # the counters have steps of 10 ms
# Threads' waits are one file each, about 10 µs to read: so often in a second, and not of a process with more threads.
_THREADS_PERIOD_S = 0.5
_MAX_THREADS = 1024
_HAS_WORK = 0.1  # share of the time in which a thread runs or wants to: less is a timer's
_PROFILER = b"grpcpp_sync_ser"  # a thread of TensorFlow's and JAX's profiler server, which polls its recording
_MAX_SIBLINGS_READ = 4096  # CPUs
_AGAIN_S = 0.5  # least time from one sample of all processes to the next
_MAX_COST = 0.02  # share of a core that this takes: 10 µs per process of the node
_NAMED = 5  # processes
_WORTH_NAMING = 0.05  # CPUs
_DIGITS = re.compile(rb"\d+")


class _ThreadTime(NamedTuple):
    ran_ns: int
    waited_ns: int  # ready to run, but without a CPU


class _ThreadShare(Struct, frozen=True):
    """Shares of the time in which a thread had a CPU, and in which it waited for one."""

    ran: float
    waited: float

    @property
    def ready(self) -> float:
        return self.ran + self.waited


class _Sample(Struct, frozen=True):
    time_s: float
    job_ticks: int
    node: CpuTimes
    main: _ThreadTime | None  # of its main thread
    age_s: float | None


class _ThreadTimes(Struct, frozen=True):
    """The time of each thread of the job so far, by its number; None: not known."""

    time_s: float
    threads: dict[str, _ThreadTime] | None

    def since(self, first: _ThreadTimes) -> dict[str, _ThreadShare] | None:
        """The shares of the time since ``first`` of each thread that is there now; None: not known."""
        if self.threads is None or first.threads is None or self.time_s - first.time_s < _MIN_S:
            return None
        ns = 1e9 * (self.time_s - first.time_s)
        return {thread: _ThreadShare(*(max(0, now - then) / ns for now, then in zip(
                    last, first.threads.get(thread, _ThreadTime(0, 0)), strict=True)))
                for thread, last in self.threads.items()}


def _thread_time(folder: str) -> _ThreadTime | None:
    """The first two figures of its schedstat, a process's main thread or any; None where the kernel does not count."""
    try:
        ran, waited, *_ = proc_files.read(f"{folder}/schedstat").split()
        return _ThreadTime(int(ran), int(waited))
    except (OSError, ValueError):
        return None


class _Job:
    """One process, sampled at the beginning of its recording and again and again until its end."""

    def __init__(self, pid: int, root: Path) -> None:
        self._pid, self._root = pid, root
        self._first = self._last = self._sample()
        self._first_times = self._last_times = self._thread_times()

    def sample(self, begin: bool) -> None:
        self._last = self._sample()
        if begin or time.monotonic() - self._last_times.time_s >= _THREADS_PERIOD_S:
            self._last_times = self._thread_times()
        if begin:
            self._first, self._first_times = self._last, self._last_times

    def _sample(self) -> _Sample | None:
        stat, node = stat_of(self._pid, self._root / "proc"), read_times(self._root)
        if stat is None or isinstance(node, str):
            return None
        return _Sample(time.monotonic(), stat.cpu_ticks, node, _thread_time(f"{self._root}/proc/{self._pid}"),
                       self._age_s(stat.start))

    def _thread_times(self) -> _ThreadTimes:
        folder = f"{self._root}/proc/{self._pid}/task"
        try:
            threads = [task.name for task in Path(folder).iterdir()]
        except OSError:
            threads = []
        if not 0 < len(threads) <= _MAX_THREADS:
            return _ThreadTimes(time.monotonic(), None)
        times = {thread: thread_time for thread in threads
                 if (thread_time := _thread_time(f"{folder}/{thread}")) is not None}
        return _ThreadTimes(time.monotonic(), times or None)

    def _thread_shares(self) -> list[_ThreadShare] | None:
        """The shares of its threads, without those of the profiler that have work; None: not known."""
        shares = self._last_times.since(self._first_times)
        return None if shares is None else [share for thread, share in shares.items()
                                            if share.ready < _HAS_WORK or not self._is_profilers(thread)]

    def _is_profilers(self, thread: str) -> bool:
        return read_or_empty(f"{self._root}/proc/{self._pid}/task/{thread}/comm").rstrip(b"\n") == _PROFILER

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
            group, own_group = (proc_files.read(f"{self._root}/proc/{of}/cgroup", proc_files.LARGE_BYTES)
                                for of in (self._pid, "self"))
        except OSError:
            return None
        limit = Cgroups(time.monotonic, self._root).read(group, is_own=group == own_group)["cpu_limit_cores"].value
        used = others = held_up = waited = threads = main = asleep = None
        first, last = self._first, self._last
        if first is not None and last is not None and last.time_s - first.time_s >= _MIN_S:
            per_s = os.sysconf("SC_CLK_TCK") * (last.time_s - first.time_s)
            used = max(0.0, (last.job_ticks - first.job_ticks) / per_s)
            busy = sum(last.node.cores[n][0] - first.node.cores[n][0] for n in allowed
                       if n in last.node.cores and n in first.node.cores)
            others = max(0.0, busy / per_s - used)
            if (shares := self._thread_shares()) is not None:
                waited = sum(share.waited for share in shares)
                threads = sum(share.ready >= _HAS_WORK for share in shares)
                asleep = math.prod(max(0.0, 1 - share.ready) for share in shares)
            if first.main is not None and last.main is not None:
                ran, held_up = (max(0.0, (now - then) / 1e9 / (last.time_s - first.time_s))
                                for now, then in zip(last.main, first.main, strict=True))
                held_up, main = min(1.0, held_up), min(1.0, ran)
        # Which of the node's CPUs a process used is not known: where the job may not use all of them, only those are
        # named that it started, which run on its CPUs.
        is_seen = others is not None and first is not None and len(allowed) >= len(first.node.cores)
        seen = users if users is None or is_seen else users.started_by_job() if others is not None else None
        return JobCpus(
            float(len(allowed)), limit, used, others, held_up=held_up, waited=waited,
            age_s=None if first is None else first.age_s, threads=threads, cores=_cores(allowed, self._root), main=main,
            asleep=asleep, **(seen._asdict() if seen is not None else {}))


def _cores(cpus: Collection[int], root: Path) -> int | None:
    """Number of cores that these CPUs are, of which each may be several; None where the kernel does not say."""
    cores = set()
    for cpu in sorted(cpus)[:_MAX_SIBLINGS_READ]:
        try:
            siblings = parse_cpus(proc_files.read(
                f"{root}/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").decode("ascii", "replace"))
        except OSError:
            return None
        cores.add(siblings or frozenset((cpu,)))
    return len(cores) or None


def _allowed(pid: int) -> set[int]:
    """The CPUs that a process may run on; none where it has ended."""
    try:
        return os.sched_getaffinity(pid)
    except OSError:
        return set()


class Users(NamedTuple):
    """CPUs, as means over the recording: those of the job's child processes, of its other ranks and what they started,
    of gputop and what it started, and the processes that used most beside all these ranks and gputop; of the child that
    waited most for a CPU the share of the time (its main thread), None: not known."""

    children: float
    ranks: float | None
    gputop: float | None
    busiest: tuple[CpuUser, ...]
    children_waited: float | None = None

    def started_by_job(self) -> Users | None:
        """Return the part that is known if only the job's child processes are: None where they had no work."""
        return self._replace(ranks=None, gputop=None, busiest=tuple(user for user in self.busiest if user.child)) if (
            self.children) else None


class CpuUsers:
    """Samples all processes at the beginning of a recording and again and again until its end, and how long the
    children of these ``jobs`` waited for a CPU."""

    def __init__(self, root: Path, jobs: Collection[int] = ()) -> None:
        self._proc, self._jobs = root / "proc", set(jobs)
        self._first_times: dict[int, _ThreadTime] = {}
        self._last_times: dict[int, _ThreadTime] = {}
        self._first: Mapping[int, Stat] = {}
        self._last: Mapping[int, Stat] = {}  # since the begin, also of those that have ended
        self._first_s = self._last_s = self._cost_s = 0.0

    def sample(self, begin: bool) -> None:
        now_s = time.monotonic()
        if not begin and now_s - self._last_s < max(_AGAIN_S, self._cost_s / _MAX_COST):
            return
        began_s = time.thread_time()
        self._last, self._last_s = {**({} if begin else self._last), **self._read()}, now_s
        self._last_times = {pid: thread_time for pid in self._started_by(self._jobs) - self._jobs
                            if (thread_time := _thread_time(f"{self._proc}/{pid}")) is not None}
        self._cost_s = time.thread_time() - began_s
        if begin:
            self._first, self._first_s, self._first_times = self._last, now_s, self._last_times

    def _read(self) -> dict[int, Stat]:
        try:
            return {pid: stat for pid in process_ids(self._proc) if (stat := stat_of(pid, self._proc)) is not None}
        except OSError:
            return {}

    def of(self, pid: int, captured: Collection[int]) -> Users | None:
        """Seen from the process ``pid``; ``captured`` are the ranks that are recorded with it. None: not measured."""
        first, last = self._first, self._last
        time_s = self._last_s - self._first_s
        if time_s < _AGAIN_S or pid not in last:
            return None
        per_s = os.sysconf("SC_CLK_TCK") * time_s
        allowed = _allowed(pid)
        children = {of for of in self._started_by({pid}) - {pid} if not allowed or _allowed(of) <= allowed}
        before = {of: stat.cpu_ticks for of, stat in first.items() if of in last and last[of].start == stat.start}
        # Workers that the job starts anew for each pass over its data may have no work at the begin.
        cpus = {of: max(0, stat.cpu_ticks - before.get(of, 0)) / per_s for of, stat in last.items()
                if of in before or of in children}
        ranks = self._started_by({*captured, *self._like(pid)} - {pid}) - children - {pid}
        gputop = self._started_by({os.getpid()}) - children - ranks - {pid}
        others = {of: used for of, used in cpus.items()
                  if of != pid and of not in ranks and of not in gputop and used >= _WORTH_NAMING}
        most = heapq.nsmallest(_NAMED, others, key=lambda of: (-others[of], of))
        of_children, of_ranks, of_gputop = (sum(cpus.get(of, 0.0) for of in some) for some in (children, ranks, gputop))
        waited = [min((self._last_times[of].waited_ns - self._first_times[of].waited_ns) / 1e9 / time_s, 1.0)
                  for of in children & self._first_times.keys() & self._last_times.keys() & cpus.keys()]
        return Users(of_children, of_ranks, of_gputop, tuple([
            CpuUser(of, printable(last[of].name), others[of], of in children) for of in most]),
            max(waited, default=None))

    def _started_by(self, pids: Collection[int]) -> set[int]:
        return with_descendants(pids, children_by_parent((pid, stat.parent) for pid, stat in self._last.items()))

    def _like(self, pid: int) -> set[int]:
        """Processes that the same parent has started with the same command, numbers in it aside: other ranks."""
        seen = self._last[pid]
        if seen.parent <= 1 or not (command := self._command(pid)):
            return set()
        return {of for of, stat in self._last.items() if of != pid and stat.parent == seen.parent
                and stat.name == seen.name and self._command(of) == command}

    def _command(self, pid: int) -> bytes:
        return _DIGITS.sub(b"", read_or_empty(f"{self._proc}/{pid}/cmdline", proc_files.LARGE_BYTES))


class JobCpusWatch:
    """Receives the progress of a capture and hands it on; its jobs are sampled while they are recorded."""

    def __init__(self, pids: Iterable[tuple[str, int | None]], report: Callable[[Progress], None],
                 root: Path = Path("/")) -> None:
        """``pids``: addresses of servers and the process of each on this machine, where that is known."""
        self._pids = {address: pid for address, pid in pids if pid is not None and pid != os.getpid()}
        self._jobs = {address: _Job(pid, root) for address, pid in self._pids.items()}
        self._users = CpuUsers(root, self._pids.values())
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

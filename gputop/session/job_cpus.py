"""Which CPUs a job may use and has used while it is captured, from /proc."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gputop.core.job_cpus import JobCpus
from gputop.sources.host import proc_files
from gputop.sources.host.cgroups import Cgroups
from gputop.sources.host.cpu import CpuTimes, read_times

if TYPE_CHECKING:
    from gputop.profiler.client import Progress

_MIN_S = 0.2  # the counters have steps of 10 ms


@dataclass(frozen=True, slots=True)
class _Sample:
    time_s: float
    job_ticks: int
    node: CpuTimes


class _Job:
    """One process, sampled at the beginning of its recording and again and again until its end."""

    def __init__(self, pid: int, root: Path) -> None:
        self._pid, self._root = pid, root
        self._first = self._last = self._sample()

    def sample(self, begin: bool) -> None:
        self._last = self._sample()
        if begin:
            self._first = self._last

    def _sample(self) -> _Sample | None:
        try:
            stat = proc_files.parse_stat(proc_files.read(f"{self._root}/proc/{self._pid}/stat"))
        except OSError:
            return None
        node = read_times(self._root)
        return None if stat is None or isinstance(node, str) else _Sample(time.monotonic(), stat.cpu_ticks, node)

    def cpus(self) -> JobCpus | None:
        """None where the process cannot be seen."""
        try:
            allowed = os.sched_getaffinity(self._pid)
            group, own = (proc_files.read(f"{self._root}/proc/{of}/cgroup", proc_files.LARGE_BYTES)
                          for of in (self._pid, "self"))
        except OSError:
            return None
        limit = Cgroups(time.monotonic, self._root).read(group, own=group == own)["cpu_limit_cores"].value
        used = others = None
        first, last = self._first, self._last
        if first is not None and last is not None and last.time_s - first.time_s >= _MIN_S:
            per_s = os.sysconf("SC_CLK_TCK") * (last.time_s - first.time_s)
            used = max(0.0, (last.job_ticks - first.job_ticks) / per_s)
            busy = sum(last.node.cores[n][0] - first.node.cores[n][0] for n in allowed
                       if n in last.node.cores and n in first.node.cores)
            others = max(0.0, busy / per_s - used)
        return JobCpus(float(len(allowed)), limit, used, others)


class JobCpusWatch:
    """Receives the progress of a capture and hands it on; its jobs are sampled while they are recorded."""

    def __init__(self, pids: Iterable[tuple[str, int | None]], report: Callable[[Progress], None],
                 root: Path = Path("/")) -> None:
        """``pids``: addresses of servers and the process of each on this machine, where that is known."""
        self._jobs = {address: _Job(pid, root) for address, pid in pids if pid is not None and pid != os.getpid()}
        self._report = report
        self._phase = ""

    def __call__(self, progress: Progress) -> None:
        if progress.phase in ("probing", "recording", "overview"):
            for job in self._jobs.values():
                job.sample(begin=progress.phase not in (self._phase, "overview"))
        self._phase = progress.phase
        self._report(progress)

    def cpus(self, address: str) -> JobCpus | None:
        return self._jobs[address].cpus() if address in self._jobs else None

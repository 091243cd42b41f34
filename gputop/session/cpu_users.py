"""Processes that keep the node's CPUs busy while a job is recorded, from /proc: those of the job, and others."""

from __future__ import annotations

import heapq
import os
import re
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import NamedTuple

from gputop.core.job_cpus import CpuUser
from gputop.core.proc import children_by_parent, process_ids, stat_of, with_descendants
from gputop.sources.host import proc_files
from gputop.sources.host.proc_files import Stat
from gputop.text.units import printable

_AGAIN_S = 0.5  # least time from one sample to the next
_MAX_COST = 0.02  # share of a core: 10 µs per process of the node
_NAMED = 5  # processes
_WORTH_NAMING = 0.05  # CPUs
_DIGITS = re.compile(rb"\d+")


class Users(NamedTuple):
    """CPUs, as means over the recording: those of the job's child processes, of its other ranks and what they started,
    of gputop and what it started, and the processes that used most beside all these ranks and gputop."""

    children: float
    ranks: float
    gputop: float
    busiest: tuple[CpuUser, ...]


class CpuUsers:
    """Samples all processes at the beginning of a recording and again and again until its end."""

    def __init__(self, root: Path) -> None:
        self._proc = root / "proc"
        self._first: Mapping[int, Stat] = {}
        self._last: Mapping[int, Stat] = {}
        self._first_s = self._last_s = self._cost_s = 0.0

    def sample(self, begin: bool) -> None:
        now_s = time.monotonic()
        if not begin and now_s - self._last_s < max(_AGAIN_S, self._cost_s / _MAX_COST):
            return
        began_s = time.thread_time()
        self._last, self._last_s = self._read(), now_s
        self._cost_s = time.thread_time() - began_s
        if begin:
            self._first, self._first_s = self._last, now_s

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
        cpus = {of: max(0, stat.cpu_ticks - first[of].cpu_ticks) / per_s for of, stat in last.items()
                if of in first and first[of].start == stat.start}
        children = self._started_by({pid}) - {pid}
        ranks = self._started_by({*captured, *self._like(pid)} - {pid}) - children - {pid}
        gputop = self._started_by({os.getpid()}) - children - ranks - {pid}
        others = {of: used for of, used in cpus.items()
                  if of != pid and of not in ranks and of not in gputop and used >= _WORTH_NAMING}
        most = heapq.nsmallest(_NAMED, others, key=lambda of: (-others[of], of))
        of_children, of_ranks, of_gputop = (sum(cpus.get(of, 0.0) for of in some) for some in (children, ranks, gputop))
        return Users(of_children, of_ranks, of_gputop, tuple([
            CpuUser(of, printable(last[of].name), others[of], of in children) for of in most]))

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
        try:
            return _DIGITS.sub(b"", proc_files.read(f"{self._proc}/{pid}/cmdline", proc_files.LARGE_BYTES))
        except OSError:
            return b""

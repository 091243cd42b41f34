"""The process table of the node: the parent of each process, those with most CPU and memory; and CPU and storage I/O of
processes with their descendants. From the counters of two samples."""

from __future__ import annotations

import heapq
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from msgspec import Struct

from gputop.core.metrics import BYTES, BYTES_PER_S, COUNT
from gputop.core.proc import process_ids, user_name
from gputop.core.samples import HostProcess, Reading
from gputop.sources.host import proc_files
from gputop.sources.host.proc_files import FIRST, Stat
from gputop.text.units import printable

SOURCE = "/proc"
PERIOD_S = 5.0  # a scan costs about 10 µs per process of the node
MAX_COST = 0.005  # share of a core: nodes of ten thousand processes are scanned less often
NOT_SCANNED_YET = "gputop has not read the process table yet"
_FIRST_SCAN_S = 0.9  # not at the first tick, which the first frame waits for
_TOP = 8  # by CPU, and as many by memory


class ProcessTable:
    """Scans every process in ``proc``. Used by one thread."""

    def __init__(self, clock: Callable[[], float], proc: Path = Path("/proc"), *,
                 read: Callable[[str, int], bytes] = proc_files.read,
                 cpu_clock: Callable[[], float] = time.thread_time) -> None:
        """``cpu_clock`` returns the CPU time of the calling thread in seconds; ``read`` is :func:`proc_files.read`."""
        self._clock, self._proc, self._read, self._cpu_clock = clock, proc, read, cpu_clock
        self._ticks_per_s = os.sysconf("SC_CLK_TCK")
        self._page_bytes = os.sysconf("SC_PAGE_SIZE")
        self._due_s = clock() + _FIRST_SCAN_S
        self._before: dict[Member, int] = {}  # CPU ticks
        self._before_s: float | None = None
        self._named: dict[tuple[Member, bytes], tuple[str | None, str | None]] = {}  # user and command
        self._leading: list[tuple[int, Stat, float | None]] = []  # PID, stat, cores in use
        self._reason: str | None = NOT_SCANNED_YET
        self._top: tuple[HostProcess, ...] | None = ()

    def stat(self, pid: int) -> Stat | str:
        """The process's /proc/PID/stat, or why it cannot be read."""
        try:
            return (proc_files.parse_stat(self._read(f"{self._proc}/{pid}/stat", proc_files.SMALL_BYTES))
                    or proc_files.UNPARSABLE)
        except OSError as error:
            return proc_files.reason_of(error)

    def scan(self) -> dict[int, int]:
        """Read every process's stat now; returns the parent of each PID. Raises OSError."""
        now_s, began_s = self._clock(), self._cpu_clock()
        stats = {pid: stat for pid in process_ids(self._proc) if isinstance(stat := self.stat(pid), Stat)}
        before, before_s = self._before, self._before_s
        self._before, self._before_s = {(pid, stat.start): stat.cpu_ticks for pid, stat in stats.items()}, now_s
        elapsed_s = 0.0 if before_s is None else now_s - before_s
        cores: dict[int, float] = {}
        if elapsed_s > 0:
            per_tick = 1 / self._ticks_per_s / elapsed_s
            cores = {pid: max(0, ticks - before[pid, start]) * per_tick
                     for (pid, start), ticks in self._before.items() if (pid, start) in before}
        busiest = heapq.nlargest(_TOP, cores, key=cores.__getitem__)
        largest = heapq.nlargest(_TOP, stats, key=lambda pid: stats[pid].rss_pages)
        self._leading = [(pid, stats[pid], cores.get(pid)) for pid in dict.fromkeys((*busiest, *largest))]
        self._top, self._reason = None, None
        self._due_s = now_s + max(PERIOD_S, (self._cpu_clock() - began_s) / MAX_COST)
        return {pid: stat.parent for pid, stat in stats.items()}

    def scan_if_due(self) -> None:
        """Scan as :meth:`scan` does, where a scan is due; :meth:`top` has the reason where it failed."""
        if self._clock() >= self._due_s:
            try:
                self.scan()
            except OSError as error:
                self._due_s = self._clock() + PERIOD_S
                self._leading, self._top, self._reason = [], (), f"/proc: {error.strerror}"

    def top(self) -> tuple[tuple[HostProcess, ...], str | None]:
        """The processes with most CPU and most memory in the last scan, or why there are none."""
        if self._top is None:
            self._named = {(key := ((pid, stat.start), stat.name)): self._named.get(key) or self._who(pid, stat)
                           for pid, stat, _ in self._leading}
            self._top = tuple([self._sample(*leading) for leading in self._leading])
        return self._top, self._reason

    def _sample(self, pid: int, stat: Stat, cores: float | None) -> HostProcess:
        user, command = self._named[(pid, stat.start), stat.name]
        return HostProcess(pid, user, command,
                           Reading.missing(COUNT, FIRST, SOURCE) if cores is None else Reading(cores, COUNT, SOURCE),
                           Reading(float(stat.rss_pages * self._page_bytes), BYTES, SOURCE))

    def _who(self, pid: int, stat: Stat) -> tuple[str | None, str | None]:
        folder = f"{self._proc}/{pid}"
        try:
            command = proc_files.command(self._read(f"{folder}/cmdline", proc_files.LARGE_BYTES), stat.name)
            uid = proc_files.parse_status(self._read(f"{folder}/status", proc_files.LARGE_BYTES)).uid
        except OSError:
            return None, printable(stat.name)
        return None if uid is None else printable(user_name(uid)), command


# -- rates of processes with their descendants ------------------------------------------------------

FAMILY_SOURCE = "/proc, with child processes"

Member = tuple[int, int]  # PID and start: identifies a process uniquely


class Counts(Struct, frozen=True):
    """Use of one process since it started."""

    parent: int
    cpu_ticks: int
    io_bytes: tuple[int, int] | None  # read from and written to storage; None: see ``io_reason``
    io_reason: str = ""


class Rates(Struct, frozen=True):
    """Rates of a process with its descendants: cores in use, storage bytes per second."""

    cpu_cores: Reading
    io_read_bytes_per_s: Reading
    io_write_bytes_per_s: Reading


Family = dict[Member, Counts]  # a process, the first, and its descendants


class FamilyRates:
    """Rates between each sample of the counters and the one before, which it keeps."""

    def __init__(self, ticks_per_s: int) -> None:
        self._ticks_per_s = ticks_per_s
        self._before: dict[Member, Counts] = {}
        self._before_s: float | None = None

    def update(self, now_s: float, families: Mapping[int, Family],
             is_alive: Callable[[Member], bool]) -> dict[int, Rates]:
        """The rates of each family since the sample before.

        A member seen for the first time counts from now on: what it used before belongs to
        no interval. ``is_alive`` is called for members that are in no family any more.
        """
        before, before_s = self._before, self._before_s
        self._before = {member: counts for family in families.values() for member, counts in family.items()}
        self._before_s = now_s
        elapsed_s = 0.0 if before_s is None else now_s - before_s
        ended = {m for m in before.keys() - self._before.keys() if not is_alive(m)}
        inherited = _inherited(before, ended)
        return {key: self._rates(family, before, inherited, elapsed_s) for key, family in families.items()}

    def _rates(self, family: Family, before: Mapping[Member, Counts], inherited: Mapping[int, list[Member]],
               elapsed_s: float) -> Rates:
        first = next(iter(family))
        if first not in before or elapsed_s <= 0:
            return no_rates(FIRST)
        in_both = [(member, counts, before[member]) for member, counts in family.items() if member in before]
        ticks = sum(now.cpu_ticks - then.cpu_ticks for _, now, then in in_both)
        cores = Reading(max(0, ticks) / self._ticks_per_s / elapsed_s, COUNT, FAMILY_SOURCE)
        refused = next((counts.io_reason for counts in family.values() if counts.io_bytes is None), None)
        if refused is not None:
            missing = Reading.missing(BYTES_PER_S, refused, FAMILY_SOURCE)
            return Rates(cores, missing, missing)
        moved = [0, 0]
        for (pid, _), now, then in in_both:
            if now.io_bytes is None or then.io_bytes is None:
                continue  # readable only since now: counts from here on
            for i in (0, 1):
                more = now.io_bytes[i] - then.io_bytes[i]
                for ended in inherited.get(pid, ()):
                    had = before[ended].io_bytes
                    if had is not None and more >= had[i]:
                        more -= had[i]
                moved[i] += max(0, more)
        read, written = (Reading(count / elapsed_s, BYTES_PER_S, FAMILY_SOURCE) for count in moved)
        return Rates(cores, read, written)


def _inherited(before: Mapping[Member, Counts], ended: set[Member]) -> dict[int, list[Member]]:
    """The members that have ended, by the PID of their nearest living ancestor.

    The kernel adds the I/O of a child to its parent's when the parent collects it (``wait_task_zombie`` in
    kernel/exit.c). The child's I/O was already counted while it lived, so it is subtracted from the parent's. A parent
    that ignores SIGCHLD does not collect it: then its counter has not grown by that much, and nothing is subtracted.
    """
    parents = {member[0]: before[member].parent for member in ended}
    out: dict[int, list[Member]] = {}
    for member in sorted(ended):
        ancestor = before[member].parent
        for _ in parents:  # bounded: PIDs read at different times might form a circle
            ancestor = parents.get(ancestor, ancestor)
        out.setdefault(ancestor, []).append(member)
    return out


def no_rates(reason: str) -> Rates:
    missing = Reading.missing(BYTES_PER_S, reason, FAMILY_SOURCE)
    return Rates(Reading.missing(COUNT, reason, FAMILY_SOURCE), missing, missing)

"""What the host knows of the processes that hold GPUs: user, command, CPU of them and their workers."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gputop.metrics import BYTES, COUNT
from gputop.samples import GpuProcess, GpuSample, ProcessSample, Reading
from gputop.text import printable

SOURCE = "/proc"
CPU_SOURCE = "/proc, with child processes"
TABLE_PERIOD_S = 5.0  # a look at the whole process table: about 10 µs per process of the node
FIRST = "first look: a rate needs two"
ENDED = "the process has ended"
ZOMBIE = "zombie: it has ended, but its parent has not collected it"
HIDDEN = "not visible to this user (/proc is mounted with hidepid): run as root"
OTHER_NAMESPACE = "not in this PID namespace: run on the host or with --pid=host"
DENIED = "access denied: run as root or as the process's user"

# The inode of the first PID namespace is fixed (PROC_PID_INIT_INO in include/linux/proc_ns.h).
_FIRST_PID_NAMESPACE = "pid:[4026531836]"


@dataclass(frozen=True, slots=True)
class Stat:
    """The part of /proc/PID/stat that is used here."""

    state: str  # "R", "S", "D", "Z" …
    parent: int
    cpu_ticks: int  # user and system time of all threads
    threads: int
    start: int  # ticks since boot; with the PID it names a process for good
    rss_pages: int


def parse_stat(text: bytes) -> Stat | None:
    """Parse /proc/PID/stat (proc(5)); None if it is cut short.

    The command, in parentheses, may itself hold spaces and parentheses: fields are counted
    from the last one.
    """
    fields = text.rpartition(b")")[2].split()
    if len(fields) < 22:
        return None
    return Stat(
        state=fields[0].decode(),
        parent=int(fields[1]),
        cpu_ticks=int(fields[11]) + int(fields[12]),
        threads=int(fields[17]),
        start=int(fields[19]),
        rss_pages=int(fields[21]),
    )


@dataclass(slots=True)
class _Known:
    """A process met before: what does not change, and what the next rate is reckoned from."""

    start: int
    user: str | None = None
    command: str | None = None
    reason: str | None = None
    children: tuple[int, ...] = ()
    cpu_ticks: dict[tuple[int, int], int] = field(default_factory=dict)  # (PID, start) -> ticks used
    cpu_s: float | None = None  # when cpu_ticks was read


class ProcessTable:
    """Joins PIDs of NVML with the host's processes. Used by one thread."""

    def __init__(self, psutil: Any, clock: Callable[[], float], proc: Path = Path("/proc")) -> None:
        self._psutil = psutil
        self._clock = clock
        self._proc = proc
        self._known: dict[int, _Known] = {}
        self._table_due_s = clock()
        self._ticks_per_s = os.sysconf("SC_CLK_TCK")
        self._boot_s = float(psutil.boot_time())
        self._page_bytes = os.sysconf("SC_PAGE_SIZE")
        try:
            self._nested = os.fspath((proc / "self/ns/pid").readlink()) != _FIRST_PID_NAMESPACE
        except OSError:
            self._nested = False  # not told: take the PIDs as they are

    def read(self, gpus: Sequence[GpuSample]) -> tuple[ProcessSample, ...]:
        """One entry per PID that any of ``gpus`` lists, in the order of the first GPU it holds.

        CPU is in cores and counts the process with all its descendants: a training job's
        input pipeline often runs in worker processes. A descendant that holds a GPU itself
        has its own entry and is not counted twice.
        """
        holders: dict[int, dict[int, GpuProcess]] = {}
        for gpu in gpus:
            for process in gpu.processes:
                holders.setdefault(process.pid, {})[gpu.info.index] = process
        stats: dict[int, Stat] = {}
        absent: dict[int, str] = {}
        newcomers = False
        for pid in holders:
            stat = self._stat(pid)
            known = self._known.get(pid)
            if stat is not None and (known is None or known.start != stat.start):
                known = None if self._is_another(pid) else self._meet(pid, stat.start)
                newcomers |= known is not None
            if stat is None or known is None:
                absent[pid] = self._why_absent(pid)
            elif stat.state == "Z":
                absent[pid] = ZOMBIE
            else:
                stats[pid] = stat
                self._known[pid] = known
        for pid in self._known.keys() - stats.keys():
            del self._known[pid]
        if self._known and (newcomers or self._clock() >= self._table_due_s):
            self._table_due_s = self._clock() + TABLE_PERIOD_S
            self._look_at_table()
        return tuple(
            self._sample(pid, held, stats[pid]) if pid in stats else missing_process(pid, held, absent[pid])
            for pid, held in holders.items()
        )

    def _sample(self, pid: int, held: dict[int, GpuProcess], stat: Stat) -> ProcessSample:
        known = self._known[pid]
        rss = Reading(float(stat.rss_pages * self._page_bytes), BYTES, SOURCE)
        cores = self._cpu_cores(pid, stat, known)
        return ProcessSample(
            pid,
            known.user,
            known.command,
            cores,
            rss,
            stat.threads,
            held,
            known.reason,
            stat.parent,
            self._boot_s + stat.start / self._ticks_per_s,
        )

    def _cpu_cores(self, pid: int, stat: Stat, known: _Known) -> Reading:
        now_s = self._clock()
        ticks = {(pid, stat.start): stat.cpu_ticks}
        for child in known.children:
            of_child = self._stat(child)
            if of_child is not None:
                ticks[child, of_child.start] = of_child.cpu_ticks
        before, known.cpu_ticks = known.cpu_ticks, ticks
        before_s, known.cpu_s = known.cpu_s, now_s
        if before_s is None or now_s <= before_s:
            return Reading.missing(COUNT, FIRST, CPU_SOURCE)
        # A member seen for the first time counts from here on: what it used before belongs to no interval.
        used = sum(count - before[member] for member, count in ticks.items() if member in before)
        return Reading(used / self._ticks_per_s / (now_s - before_s), COUNT, CPU_SOURCE)

    # -- who a process is ----------------------------------------------------------------

    def _meet(self, pid: int, start: int) -> _Known:
        known = _Known(start)
        self._read_identity(pid, known)
        return known

    def _read_identity(self, pid: int, known: _Known) -> None:
        psutil = self._psutil
        try:
            process = psutil.Process(pid)
            known.user = printable(process.username())  # the uid as text where it has no name
            words = process.cmdline()
            known.command = printable(" ".join(words)) or f"[{printable(process.name())}]"
            known.reason = None
        except psutil.ZombieProcess:
            known.reason = ZOMBIE
        except psutil.NoSuchProcess:
            known.reason = ENDED
        except psutil.AccessDenied:
            known.reason = DENIED

    def _is_another(self, pid: int) -> bool:
        """Whether the process of this number in here is some other than the one NVML means.

        NVML's PIDs are the host's. In a container the same number can belong to a process
        that has nothing to do with the GPU.
        """
        if not self._nested:
            return False
        try:
            return not any(
                os.fspath(entry.readlink()).startswith("/dev/nvidia")
                for entry in (self._proc / str(pid) / "fd").iterdir()
            )
        except OSError:
            return True

    def _why_absent(self, pid: int) -> str:
        if self._nested:
            return OTHER_NAMESPACE
        try:
            os.kill(pid, 0)  # signal 0 only asks whether it exists
        except (ProcessLookupError, OverflowError):
            return ENDED
        except PermissionError:
            return HIDDEN
        return HIDDEN

    # -- the process table -----------------------------------------------------------------

    def _look_at_table(self) -> None:
        """Find the descendants of every known process; commands may have changed, too."""
        children: dict[int, list[int]] = {}
        for pid, parent in self._parents():
            children.setdefault(parent, []).append(pid)
        for root, known in self._known.items():
            found: list[int] = []
            below = list(children.get(root, ()))
            while below:
                pid = below.pop()
                if pid not in self._known:
                    found.append(pid)
                    below += children.get(pid, ())
            known.children = tuple(found)
            self._read_identity(root, known)

    def _parents(self) -> Iterator[tuple[int, int]]:
        with os.scandir(self._proc) as entries:
            pids = [int(entry.name) for entry in entries if entry.name.isdecimal()]
        for pid in pids:
            stat = self._stat(pid)
            if stat is not None:
                yield pid, stat.parent

    def _stat(self, pid: int) -> Stat | None:
        try:
            with open(f"{self._proc}/{pid}/stat", "rb") as file:  # noqa: PTH123  called per process and tick
                text = file.read()
        except OSError:  # it ended meanwhile
            return None
        return parse_stat(text)


def missing_process(pid: int, held: dict[int, GpuProcess], why: str) -> ProcessSample:
    """A process of which the host can tell nothing, and why."""
    return ProcessSample(
        pid, None, None, Reading.missing(COUNT, why), Reading.missing(BYTES, why), gpus=held, reason=why
    )

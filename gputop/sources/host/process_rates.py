"""CPU and storage I/O of processes with their descendants, from the counters of two samples."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from msgspec import Struct

from gputop.core.metrics import BYTES_PER_S, COUNT
from gputop.core.samples import Reading
from gputop.sources.host.proc_files import FIRST

SOURCE = "/proc, with child processes"

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
        cores = Reading(max(0, ticks) / self._ticks_per_s / elapsed_s, COUNT, SOURCE)
        refused = next((counts.io_reason for counts in family.values() if counts.io_bytes is None), None)
        if refused is not None:
            missing = Reading.missing(BYTES_PER_S, refused, SOURCE)
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
        read, written = (Reading(count / elapsed_s, BYTES_PER_S, SOURCE) for count in moved)
        return Rates(cores, read, written)


def _inherited(before: Mapping[Member, Counts], ended: set[Member]) -> dict[int, list[Member]]:
    """The members that have ended, by the PID of their nearest living ancestor.

    The kernel adds the I/O of a child to its parent's when the parent collects it
    (``wait_task_zombie`` in kernel/exit.c). The child's I/O was already counted while it lived,
    so it is subtracted from the parent's. A parent that ignores SIGCHLD does not collect it:
    then its counter has not grown by that much, and nothing is subtracted.
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
    missing = Reading.missing(BYTES_PER_S, reason, SOURCE)
    return Rates(Reading.missing(COUNT, reason, SOURCE), missing, missing)

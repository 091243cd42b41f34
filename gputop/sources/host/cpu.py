"""CPU of the host, all cores and each, from one read of /proc/stat; and the NUMA nodes that a process is bound to."""

from __future__ import annotations

import os
import re
from pathlib import Path

from msgspec import Struct

from gputop.core.proc import read_or_empty
from gputop.core.samples import CgroupSample
from gputop.sources.host import proc_files

_STAT_BYTES = 1 << 20  # 1000 cores and 10,000 interrupts take a quarter of it
_COUNTED = 8  # user nice system idle iowait irq softirq steal; guest and guest_nice are already in user and nice
_IDLE, _IOWAIT = 3, 4


class CpuTimes(Struct, frozen=True):
    """Kernel ticks since boot: (busy, idle, iowait) of all cores and, by number, of each that is online."""

    total: tuple[int, int, int]
    cores: dict[int, tuple[int, int, int]]


def parse_cpu(text: bytes) -> CpuTimes | None:
    """Parse the first lines of /proc/stat (proc(5)); None if they are malformed."""
    total: tuple[int, int, int] | None = None
    cores: dict[int, tuple[int, int, int]] = {}
    for line in text.split(b"\n"):
        if not line.startswith(b"cpu"):
            break
        name, *fields = line.split()
        try:
            ticks = [int(field) for field in fields[:_COUNTED]]
            idle, waiting = ticks[_IDLE], ticks[_IOWAIT]
            times = sum(ticks) - idle - waiting, idle, waiting
            if name == b"cpu":
                total = times
            else:
                cores[int(name[3:])] = times
        except (ValueError, IndexError):
            return None
    return None if total is None else CpuTimes(total, cores)


def shares(now: tuple[int, int, int], before: tuple[int, int, int]) -> tuple[float, float] | None:
    """Busy and iowait share of the time between two samples; None where no kernel tick (10 ms) has passed.

    The kernel's idle and iowait counters can go back a little; that counts as 0.
    """
    busy, idle, waiting = (max(0, a - b) for a, b in zip(now, before, strict=True))
    passed = busy + idle + waiting
    return (busy / passed, waiting / passed) if passed else None


def core_ratios(now: CpuTimes, before: CpuTimes) -> tuple[float, ...]:
    """Busy share of each core that was online in both samples, in order of their numbers, rounded to 0.01."""
    both = ((n, shares(times, before.cores[n])) for n, times in now.cores.items() if n in before.cores)
    return tuple([round(core_shares[0], 2) for _, core_shares in sorted(both) if core_shares is not None])


def cpu_limit(own_group: CgroupSample | None, online: int | None) -> float | None:
    """Number of cores that gputop may use: the smaller of what its control groups and its affinity grant.

    None where that is all ``online`` cores, or their number is not known.
    """
    usable = float(len(os.sched_getaffinity(0)))
    granted = None if own_group is None else own_group["cpu_limit_cores"].value
    limit = usable if granted is None else min(usable, granted)
    return None if online is None or limit >= online else limit


def read_times(root: Path) -> CpuTimes | str:
    """The counters now, or why there are none."""
    try:
        times = parse_cpu(proc_files.read(f"{root}/proc/stat", _STAT_BYTES))
    except OSError as error:
        return f"/proc/stat: {error.strerror}"
    return "/proc/stat is malformed" if times is None else times


# -- NUMA nodes -------------------------------------------------------------------------------------

_NODE = re.compile(r"node(\d{1,4})")
_MAX_CPU = 65_536  # far above NR_CPUS of any kernel


def parse_cpus(text: str) -> frozenset[int]:
    """The CPUs of a list such as "0-3,8"; empty where it is malformed (cpuset(7), List Format)."""
    cpus: set[int] = set()
    for part in text.strip().split(","):
        first, dash, last = part.partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()) or len(part) > 16:
            return frozenset()
        begin, end = int(first), int(last or first)
        if not begin <= end < _MAX_CPU:
            return frozenset()
        cpus.update(range(begin, end + 1))
    return frozenset(cpus)


def cpus_by_node(root: Path = Path("/")) -> dict[int, frozenset[int]]:
    """The CPUs of each NUMA node that has any; empty where the kernel does not tell."""
    nodes = [(path, _NODE.fullmatch(path.name)) for path in (root / "sys/devices/system/node").glob("node*")]
    return {int(node[1]): cpus for path, node in nodes if node is not None
            and (cpus := parse_cpus(read_or_empty(f"{path}/cpulist").decode("ascii", "replace")))}


def bound_to(allowed: frozenset[int], nodes: dict[int, frozenset[int]]) -> tuple[int, ...]:
    """The nodes that have all CPUs a process may use; empty where it may use some of each node."""
    held = sorted(node for node, cpus in nodes.items() if cpus & allowed)
    return tuple(held) if len(held) < len(nodes) else ()

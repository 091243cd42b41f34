"""Limits of what this process takes of the node: its memory, and whom the kernel kills first where there is none left;
and the threads of libraries."""

from __future__ import annotations

import contextlib
import gc
import math
import os
import resource
from collections.abc import Mapping
from pathlib import Path

# /proc/PID/oom_score_adj (proc(5)): the kernel kills the process with the highest score, and a job is worth more than
# what watches it. Raising one's own needs no rights.
OOM_SCORE = "/proc/self/oom_score_adj"
ANALYSIS_SCORE = 1000  # before anything else
MONITOR_SCORE = 500
# Variables that NumPy reads as it is imported, for one's own process: a job that is started gets none of them.
NUMPY_SETTINGS = {
    # Else its OpenBLAS starts a thread for each CPU, which spins for a tenth of a second (seen with two): on the CPUs
    # of the job, at each start and each analysis. Nothing here multiplies large matrices.
    "OPENBLAS_NUM_THREADS": "1",
    # Else it asks the kernel for pages of 2 MB for each array from 4 MB on. They have to be cleared as a whole and,
    # where memory is in pieces, put together first; the arrays of an analysis are too many and too short-lived for
    # that: a seventh of its CPU time on a virtual machine (docs/project/cost.md).
    "NUMPY_MADVISE_HUGEPAGE": "0",
}
_CGROUPS = Path("/sys/fs/cgroup")
_PROC = Path("/proc")
# cgroup v2, and v1 below its memory controller: limit, use, and what of the use can be reclaimed.
_FILES = (("memory.max", "memory.current", "inactive_file"),
          ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"))
_CGROUP_BYTES = 1 << 16
_NO_LIMIT = 1 << 60  # v1 writes "none" as the largest multiple of a page
# mallopt(3), by the numbers of glibc's malloc.h. The heap has blocks up to 32 MB, the most that can be set, and keeps
# up to 1 GB that is free.
_ONE_HEAP = {-8: 1}  # M_ARENA_MAX
_KEEP_FREED = {**_ONE_HEAP, -3: 32 << 20, -1: 1 << 30}  # M_MMAP_THRESHOLD, M_TRIM_THRESHOLD


def free_bytes(proc: Path = _PROC, root: Path = _CGROUPS) -> float:
    """The least of what is free on the node, in each control group of this process up to the top (which a job may
    share with it), and below its own limits of address space and data (setrlimit(2))."""
    process_folder = proc / "self"
    left = [left_in(cgroup) for cgroup in control_groups("self", proc, root)]
    with contextlib.suppress(OSError, ValueError, IndexError):
        meminfo = dict(line.split(":", 1) for line in (proc / "meminfo").read_text().splitlines())
        left.append(int(meminfo["MemAvailable"].split()[0]) * 1024.0)
    with contextlib.suppress(OSError, ValueError, IndexError):
        pages = (process_folder / "statm").read_text().split()
        for limit, used in ((resource.RLIMIT_AS, pages[0]), (resource.RLIMIT_DATA, pages[5])):
            soft = resource.getrlimit(limit)[0]
            if soft != resource.RLIM_INFINITY:
                left.append(max(0.0, soft - int(used) * os.sysconf("SC_PAGE_SIZE")))
    return min((bytes_ for bytes_ in left if bytes_ is not None), default=math.inf)


def control_groups(pid: int | str, proc: Path = _PROC, root: Path = _CGROUPS,
                   controller: str = "memory") -> frozenset[Path]:
    """The control groups of a process, of one controller, from its own to the top, as far as they can be seen."""
    try:
        with (proc / str(pid) / "cgroup").open("rb") as file:
            text = file.read(_CGROUP_BYTES)
    except OSError:
        return frozenset()
    cgroups: set[Path] = set()
    for line in os.fsdecode(text).split("\n"):  # a group's name may be of any bytes but this one
        number, _, rest = line.partition(":")
        controllers, colon, path = rest.partition(":")
        if not number or not colon or (controllers and controller not in controllers.split(",")):
            continue
        if ".." in path.split("/"):  # outside of what is mounted here (cgroup_namespaces(7))
            path = ""
        top = root / controller if controllers else root
        # Inside a container the path is often the host's; its own limit then stands at the top.
        cgroups |= {top, *(p for p in (top / path.lstrip("/"), *(top / path.lstrip("/")).parents) if top in p.parents)}
    return frozenset(d for d in cgroups if os.path.isdir(d))  # noqa: PTH112  Path.is_dir raises for too long a name


def left_in(cgroup: Path) -> float | None:
    """Bytes left below a cgroup's limit, caches that give way counted as free; None without a limit."""
    for limit_file, use_file, reclaimable in _FILES:
        try:
            limit = (cgroup / limit_file).read_text().strip()
            if limit == "max" or int(limit) >= _NO_LIMIT:
                return None
            use = int((cgroup / use_file).read_text())
            stat = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
            return max(0.0, int(limit) - use + int(stat.get(reclaimable, 0)))
        except (OSError, ValueError):
            continue
    return None


def offer_to_oom_killer(score: int) -> None:
    """Have the kernel kill this process before others with a lower score; never lowers its score."""
    file = Path(OOM_SCORE)
    with contextlib.suppress(OSError, ValueError):
        if int(file.read_text()) < score:
            file.write_text(f"{score}\n")


def set_oom_score(score: bytes) -> None:
    """Write one's own, as it was read, in a process that was just forked: by system calls alone. Down to what it began
    with needs no rights (proc_pid_oom_score_adj(5))."""
    with contextlib.suppress(OSError):
        descriptor = os.open(OOM_SCORE, os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.write(descriptor, score)
        finally:
            os.close(descriptor)


def share_one_heap() -> None:
    """Let all threads allocate from one heap: their own ones hold 3 MB that is free. Only glibc has it."""
    _set_allocator(_ONE_HEAP)


def keep_freed_memory() -> None:
    """Have the C library keep what this process frees, for its next arrays (glibc only), and seldom search for garbage.

    An analysis makes thousands of arrays of some megabytes. The C library gives the pages of each back to the kernel,
    which has to clear new ones for the next: a tenth of the time of an analysis, and more in a virtual machine.
    """
    seldom_search_for_garbage()
    _set_allocator(_KEEP_FREED)


def seldom_search_for_garbage() -> None:
    """Search more than the usual 700 new objects at a time: that took a twentieth of the CPU time of the monitor and of
    a short analysis, which leave next to no garbage that only a search finds."""
    gc.set_threshold(10_000)


def _set_allocator(settings: Mapping[int, int]) -> None:
    import ctypes

    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        for parameter, value in settings.items():
            mallopt(parameter, value)


def resident_bytes(pid: int | str | None) -> int | None:
    """Memory of a process now ("self": this one); None where it cannot be read (proc_pid_statm(5))."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return None

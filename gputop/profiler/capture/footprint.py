"""What a capture may take of memory and disk, and what it took of the job's memory."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path

from gputop.profiler.capture.plan import FreeResources
from gputop.profiler.discovery import is_training
from gputop.profiler.probe import is_local
from gputop.profiler.storage import listening_pid

_CGROUPS = Path("/sys/fs/cgroup")
# cgroup v2, and v1 below its memory controller: limit, use, and what of the use can be reclaimed.
_FILES = (("memory.max", "memory.current", "inactive_file"),
          ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"))
_NO_LIMIT = 1 << 60  # v1 writes "none" as the largest multiple of a page


def job_pid(address: str, pid: int | None) -> int | None:
    """The server's process on this machine, as far as it can be known: not one that only leads to it (ssh -L)."""
    if pid is None and is_local(address):
        pid = listening_pid(address)
        if pid is not None and pid != os.getpid() and is_training(pid) is False:
            return None
    return pid


def free_resources(address: str, pid: int | None, logdir: Path) -> FreeResources:
    """What is free for a capture from ``address``, whose process is ``pid`` where it is known."""
    import psutil

    unknown: list[str] = []
    here = pid is not None or is_local(address)
    if not here:
        unknown.append(f"{address} is on another machine: whether its memory holds the capture is not known")
    elif pid is None:
        unknown.append(f"the process that serves {address} cannot be seen: a memory limit of its own is not known")
    own_dirs = memory_cgroups(os.getpid())
    job_dirs = memory_cgroups(pid) if pid is not None else own_dirs
    node: float = psutil.virtual_memory().available
    shared, job_only, own_only = (
        min((left for d in dirs if (left := left_in(d)) is not None), default=None)
        for dirs in (own_dirs & job_dirs, job_dirs - own_dirs, own_dirs - job_dirs))
    return FreeResources(min(node, shared) if shared is not None else node, job_only, own_only, free_disk_bytes(logdir),
                here, tuple(unknown))


def memory_cgroups(pid: int, proc: Path = Path("/proc"), root: Path = _CGROUPS) -> frozenset[Path]:
    """The memory cgroups of a process from its own to the top, as far as they can be seen from here."""
    try:
        lines = (proc / str(pid) / "cgroup").read_text().splitlines()
    except OSError:
        return frozenset()
    found: set[Path] = set()
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        top = root / "memory" if controllers else root
        # Inside a container the path is often the host's; its own limit then stands at the top.
        found |= {top, *(p for p in (top / path.lstrip("/"), *(top / path.lstrip("/")).parents) if top in p.parents)}
    return frozenset(d for d in found if d.is_dir())


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


def free_disk_bytes(folder: Path) -> float | None:
    """Free where ``folder`` is or would be."""
    for place in (folder, *folder.parents):
        with contextlib.suppress(OSError):
            return shutil.disk_usage(place).free
    return None


def resident_bytes(pid: int | None) -> int | None:
    """Memory of a process now; None where it cannot be read (proc_pid_statm(5))."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return None

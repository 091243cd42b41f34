"""Memory and disk that a capture may take, and what it took of the job's memory."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path

from gputop.core.job_limits import LimitFacts, read_limits
from gputop.core.own_memory import control_groups, left_in
from gputop.profiler.addresses import is_local, listening_pid, process_of
from gputop.profiler.capture.plan import FreeResources
from gputop.profiler.discovery import is_training


def job_pid(address: str, pid: int | None) -> int | None:
    """The server's process on this machine, as far as it can be known: not one that only leads to it (ssh -L)."""
    if pid is None and is_local(address):
        pid = listening_pid(address)
        if pid is not None and pid != os.getpid() and is_training(pid) is False:
            return None
    return pid


def free_resources(address: str, pid: int | None, logdir: Path) -> FreeResources:
    """Return what is free for a capture from ``address``, whose process is ``pid`` where it is known."""
    import psutil

    unknown: list[str] = []
    here = pid is not None or is_local(address)
    if not here:
        unknown.append(f"{address} is on another machine, so gputop cannot check whether its memory is sufficient")
    elif pid is None:
        unknown.append(f"gputop cannot see the process that serves {address}, so the process's memory limit is unknown")
    own_dirs = control_groups(os.getpid())
    job_dirs = control_groups(pid) if pid is not None else own_dirs
    node: float = psutil.virtual_memory().available
    shared, job_only, own_only = (
        min((left for d in dirs if (left := left_in(d)) is not None), default=None)
        for dirs in (own_dirs & job_dirs, job_dirs - own_dirs, own_dirs - job_dirs))
    limits = read_limits(pid, Path("/tmp") if process_of(address) is not None else None) if pid else LimitFacts()
    of_job = [float(part) for part in (job_only, limits.memory_left_bytes) if part is not None]
    return FreeResources(min(node, shared) if shared is not None else node, min(of_job, default=None), own_only,
                         free_disk_bytes(logdir), limits.disk_bytes, here, tuple(unknown))


def free_disk_bytes(folder: Path) -> float | None:
    """Free where ``folder`` is or would be."""
    for ancestor in (folder, *folder.parents):
        with contextlib.suppress(OSError):
            return shutil.disk_usage(ancestor).free
    return None

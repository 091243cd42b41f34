"""Limits of the kernel for a process, and what it has taken: threads, address space, open files, bytes of a file, disk.

At a limit nothing more is given: a thread cannot be started, and a library aborts. So they are read before gputop has a
job take more.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping
from itertools import islice
from pathlib import Path

from msgspec import Struct

from gputop.core.own_memory import control_groups
from gputop.core.proc import process_ids, read, status_fields, user_name

_PROC, _CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")
_LIMIT = re.compile(rb"^(Max [a-z ]*[a-z]) +(unlimited|\d+) ", re.MULTILINE)
_CAP_SYS_RESOURCE, _CAP_SYS_ADMIN = 1 << 24, 1 << 21  # include/uapi/linux/capability.h
FIRST_USER_NAMESPACE = "user:[4026531837]"  # PROC_USER_INIT_INO in include/linux/proc_ns.h: the host's
_LIMITS_BYTES, _MAX_FILES = 1 << 14, 1 << 20  # more open files are as many
# Names of proc_pid_limits
PROCESSES, ADDRESS_SPACE, DATA, FILES, FILE_SIZE, STACK = (
    "Max processes", "Max address space", "Max data size", "Max open files", "Max file size", "Max stack size")


class LimitFacts(Struct, frozen=True, kw_only=True):
    """``limits`` are the soft ones by the names of /proc/PID/limits, without those that are unlimited. ``user_threads``
    are all that its user has on this node, None where that limit does not hold for it or they cannot be counted.
    ``groups``: of each control group with a limit of tasks its path, pids.max and pids.current. ``disk_bytes`` are free
    in ``folder``, which the job will write to. None: it cannot be read."""

    limits: Mapping[str, int] = {}
    user: str = ""
    user_threads: int | None = None
    groups: tuple[tuple[str, int, int], ...] = ()
    threads: int = 0
    size_bytes: int | None = None
    data_bytes: int | None = None
    files: int | None = None
    folder: str = ""
    disk_bytes: int | None = None

    @property
    def memory_left_bytes(self) -> int | None:
        """Bytes left below the limits of address space and data; None without one."""
        used = ((ADDRESS_SPACE, self.size_bytes), (DATA, self.data_bytes))
        return min((max(0, self.limits[name] - taken) for name, taken in used
                    if name in self.limits and taken is not None), default=None)


def read_limits(pid: int, folder: Path | None = None, proc: Path = _PROC, root: Path = _CGROUPS) -> LimitFacts:
    """The limits of a process, and what it and its user take; what cannot be read is left out. ``folder``: where the
    job will write, as it sees it."""
    try:
        limits = {name.decode(): int(value) for name, value in
                  _LIMIT.findall(read(f"{proc}/{pid}/limits", _LIMITS_BYTES)) if value != b"unlimited"}
        status = status_fields(pid, proc)
        uid = int(status[b"Uid"].split()[0])  # the real one: its threads are counted
        threads = int(status.get(b"Threads", b"0"))
    except (OSError, KeyError, ValueError, IndexError):
        return LimitFacts()
    files = None
    with contextlib.suppress(OSError), os.scandir(proc / str(pid) / "fd") as opened:
        files = sum(1 for _ in islice(opened, _MAX_FILES))
    disk = None
    if folder is not None:
        with contextlib.suppress(OSError):
            space = os.statvfs(proc / str(pid) / "root" / str(folder).lstrip("/"))
            disk = space.f_bavail * space.f_frsize if space.f_favail or not space.f_files else 0
    counted = PROCESSES in limits and not _is_exempt(pid, uid, status, proc)
    return LimitFacts(
        limits=limits, user=user_name(uid), user_threads=_threads_of(uid, proc) if counted else None,
        groups=tuple(_groups(pid, proc, root)), threads=threads, size_bytes=_kilobytes(status, b"VmSize"),
        data_bytes=_kilobytes(status, b"VmData"), files=files, folder=str(folder or ""), disk_bytes=disk)


def _is_exempt(pid: int, uid: int, status: Mapping[bytes, bytes], proc: Path) -> bool:
    """Return whether RLIMIT_NPROC does not hold for a process: for the host's root, and for two capabilities, which
    count in the host's user namespace only (copy_process in the kernel's fork.c)."""
    try:
        if os.fspath((proc / str(pid) / "ns/user").readlink()) != FIRST_USER_NAMESPACE:
            return False
        return uid == 0 or bool(int(status[b"CapEff"], 16) & (_CAP_SYS_RESOURCE | _CAP_SYS_ADMIN))
    except (OSError, KeyError, ValueError):
        return False


def _threads_of(uid: int, proc: Path) -> int | None:
    """All threads of a user that can be seen from here."""
    total = 0
    try:
        pids = process_ids(proc)
    except OSError:
        return None
    for pid in pids:
        with contextlib.suppress(OSError, KeyError, ValueError, IndexError):
            status = status_fields(pid, proc)
            total += int(status[b"Threads"]) if int(status[b"Uid"].split()[0]) == uid else 0
    return total


def _groups(pid: int, proc: Path, root: Path) -> list[tuple[str, int, int]]:
    limited = []
    for group in control_groups(pid, proc, root, controller="pids"):
        with contextlib.suppress(OSError, ValueError):  # "max" is no limit
            most, now = (int((group / name).read_text()) for name in ("pids.max", "pids.current"))
            limited.append((str(group), most, now))
    return sorted(limited)


def _kilobytes(status: Mapping[bytes, bytes], name: bytes) -> int | None:
    try:
        return int(status[name].split()[0]) * 1024
    except (KeyError, ValueError, IndexError):
        return None

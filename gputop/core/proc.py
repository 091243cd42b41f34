"""Reading /proc/PID of processes that may belong to anybody: a bounded number of bytes, parsed in linear time.

A process decides how long its maps, environment and command line are (prctl(2), PR_SET_MM): hundreds of megabytes cost
it nothing.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pwd
import re
import signal
import struct
from collections.abc import Iterable, Iterator
from functools import cache, lru_cache
from pathlib import Path
from typing import NamedTuple

from msgspec import Struct

COMMAND_BYTES = 1 << 16  # a command line is cut there
ENVIRON_BYTES = 1 << 20
MAPS_BYTES = 64 << 20  # a large job maps some ten thousand regions of a hundred bytes
_STATUS_BYTES = 1 << 20  # a process may be in 65,536 groups
_PART_BYTES = 1 << 16
FIRST_PID_NAMESPACE = "pid:[4026531836]"  # PROC_PID_INIT_INO in include/linux/proc_ns.h: the host's
CAP_SYS_PTRACE = 1 << 19  # include/uapi/linux/capability.h


def read(path: str, limit: int = 4096) -> bytes:
    """The file's first ``limit`` bytes. Raises OSError."""
    fd = os.open(path, os.O_RDONLY)
    try:
        parts = []
        while limit > 0 and (part := os.read(fd, min(limit, _PART_BYTES))):
            parts.append(part)
            limit -= len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)
    finally:
        os.close(fd)


def read_or_empty(path: str, limit: int = 4096) -> bytes:
    """Read the first ``limit`` bytes of a file; empty where it cannot be read."""
    try:
        return read(path, limit)
    except OSError:
        return b""


def read_maps(pid: int | str, proc: Path = Path("/proc")) -> bytes:
    """Read /proc/PID/maps of a process up to a bound. Raises OSError."""
    return read(f"{proc}/{pid}/maps", MAPS_BYTES)


@cache  # with the clock it moves by a second: starts would not be equal
def boot_time_s(proc: Path = Path("/proc")) -> float | None:
    """Unix time at which the kernel was booted (proc_stat(5)); None where that cannot be read."""
    try:
        lines = read(f"{proc}/stat", ENVIRON_BYTES).splitlines()
        return next(float(line.split()[1]) for line in lines if line.startswith(b"btime "))
    except (OSError, StopIteration, ValueError, IndexError):
        return None


# struct pidfd_info of linux/pidfd.h: the mask of what is asked for and answered, and the status as wait(2) gives it.
_PIDFD_INFO, _PIDFD_INFO_EXIT = struct.Struct("=Q52xi"), 1 << 3
_PIDFD_GET_INFO = 3 << 30 | _PIDFD_INFO.size << 16 | 0xFF << 8 | 11


class Stat(Struct, frozen=True):
    """The part of /proc/PID/stat that is used here."""

    name: bytes  # of the program, 15 bytes at most
    state: str  # "R", "S", "D", "Z" …
    parent: int
    cpu_ticks: int  # user and system time of all threads
    threads: int
    start: int  # ticks since boot; with the PID it identifies a process uniquely
    rss_pages: int
    exit_code: int  # as wait(2) gives it, of a process that has ended and whose parent has not waited for it; else 0


def parse_stat(text: bytes) -> Stat | None:
    """Parse /proc/PID/stat (proc(5)); None if it is truncated or malformed. The command, in parentheses, may itself
    hold spaces and parentheses: fields are counted from the last one."""
    head, _, tail = text.rpartition(b")")
    fields = tail.split()
    if len(fields) < 22:
        return None
    try:
        return Stat(
            name=head.partition(b"(")[2],
            state=fields[0].decode("ascii"),
            parent=int(fields[1]),
            cpu_ticks=int(fields[11]) + int(fields[12]),
            threads=int(fields[17]),
            start=int(fields[19]),
            rss_pages=int(fields[21]),
            exit_code=int(fields[49]) if len(fields) > 49 else 0)
    except ValueError:
        return None


def read_stat(pid: int | str, proc: Path = Path("/proc")) -> Stat:
    """Read /proc/PID/stat. Raises OSError, also where it is malformed."""
    stat = parse_stat(read(f"{proc}/{pid}/stat"))
    if stat is None:
        raise OSError(f"{proc}/{pid}/stat is malformed")
    return stat


def stat_of(pid: int, proc: Path = Path("/proc")) -> Stat | None:
    """/proc/PID/stat of a process; None where it is gone or cannot be read."""
    try:
        return read_stat(pid, proc)
    except OSError:
        return None


def end_of(pid: int, pidfd: int) -> str:
    """Return how a process ended: "by SIGSEGV", "with status 1". From Linux 6.15 on by ``pidfd``, which was
    opened before; else only until its parent has waited for it, and "" from then on."""
    info = bytearray(_PIDFD_INFO.size)
    _PIDFD_INFO.pack_into(info, 0, _PIDFD_INFO_EXIT, 0)
    code = None
    with contextlib.suppress(OSError):
        fcntl.ioctl(pidfd, _PIDFD_GET_INFO, info)
        mask, code = _PIDFD_INFO.unpack(info)
        code = code if mask & _PIDFD_INFO_EXIT else None
    stat = stat_of(pid) if code is None else None
    if stat is not None and stat.state == "Z":
        code = stat.exit_code
    if code is None:
        return ""
    number = code & 0x7F
    with contextlib.suppress(ValueError):
        return f"by {signal.Signals(number).name}" if number else f"with status {code >> 8}"
    return f"by signal {number}"


def process_ids(proc: Path = Path("/proc")) -> list[int]:
    """All visible PIDs. Raises OSError."""
    with os.scandir(proc) as entries:
        return [int(entry.name) for entry in entries if entry.name.isdecimal()]


def children_by_parent(parents: Iterable[tuple[int, int]]) -> dict[int, list[int]]:
    """The children of each process, of PIDs with their parents'."""
    children: dict[int, list[int]] = {}
    for pid, parent in parents:
        children.setdefault(parent, []).append(pid)
    return children


def with_descendants(pids: Iterable[int], children: dict[int, list[int]]) -> set[int]:
    """``pids`` and all that they have started, and those."""
    family: set[int] = set()
    queue = list(pids)
    while queue:
        pid = queue.pop()
        if pid not in family:
            family.add(pid)
            queue += children.get(pid, ())
    return family


def started_s(pid: int, proc: Path = Path("/proc")) -> float | None:
    """Unix time at which a process began (proc_pid_stat(5), field 22); None where that cannot be read."""
    booted_s = boot_time_s(proc)
    try:
        return None if booted_s is None else booted_s + read_stat(pid, proc).start / os.sysconf("SC_CLK_TCK")
    except OSError:
        return None


def cpu_time_ns(pid: int) -> int | None:
    """CPU time of all its threads until now, to the nanosecond (/proc/PID/task/TID/schedstat); None where it has ended
    or the kernel does not keep it. One that moves says that the process runs."""
    total = None
    try:
        with os.scandir(f"/proc/{pid}/task") as tasks:
            for task in tasks:
                with contextlib.suppress(OSError, ValueError, IndexError):
                    total = (total or 0) + int(read(f"{task.path}/schedstat").split()[0])
    except OSError:
        return None
    return total


def waited_for_cpu_s(pid: int) -> float:
    """Seconds that a process's main thread could have run and had no CPU; 0 where the kernel does not count them."""
    try:
        return int(read(f"/proc/{pid}/schedstat").split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


def status_fields(pid: int | str, proc: Path = Path("/proc")) -> dict[bytes, bytes]:
    """Names and values of its /proc/PID/status. Raises OSError."""
    return dict(re.findall(rb"^(\w+):[ \t]*(.*)$", read(f"{proc}/{pid}/status", _STATUS_BYTES), re.MULTILINE))


def effective_uid(pid: int, proc: Path = Path("/proc")) -> int | None:
    """The effective user of a process (proc_pid_status(5)); None where it is gone."""
    with contextlib.suppress(OSError, KeyError, ValueError, IndexError):
        return int(status_fields(pid, proc)[b"Uid"].split()[1])
    return owner(pid, proc)


def owner(pid: int, proc: Path = Path("/proc")) -> int | None:
    """User of a process; None where it is gone."""
    try:
        return (proc / str(pid)).stat().st_uid
    except OSError:
        return None


def environ_of(pid: int, proc: Path = Path("/proc")) -> dict[str, str]:
    """The environment that a process was started with; empty where it may not be read."""
    text = read_or_empty(f"{proc}/{pid}/environ", ENVIRON_BYTES).decode("utf-8", "replace")
    return {name: value for name, equals, value in (entry.partition("=") for entry in text.split("\0")) if equals}


def command_of(pid: int, proc: Path = Path("/proc")) -> str:
    """The words of a process's command with spaces between them; "" where it may not be read."""
    text = read_or_empty(f"{proc}/{pid}/cmdline", COMMAND_BYTES).decode("utf-8", "replace")
    return text.rstrip("\0").replace("\0", " ")


def effective_capabilities(pid: int | str, proc: Path = Path("/proc")) -> int | None:
    """The effective capabilities of a process as bits (capabilities(7)); None where they cannot be read."""
    try:
        return int(status_fields(pid, proc)[b"CapEff"], 16)
    except (OSError, KeyError, ValueError):
        return None


def shares_root(pid: int) -> bool:
    """Return whether a path leads a process to where it leads gputop. Raises OSError where that may not be known."""
    process = Path(f"/proc/{pid}")
    return (process / "ns/mnt").samefile("/proc/self/ns/mnt") and (process / "root").samefile("/")


def pid_namespace(proc: Path = Path("/proc")) -> str:
    """The PID namespace of this process, as :data:`FIRST_PID_NAMESPACE`. Raises OSError."""
    return os.fspath((proc / "self/ns/pid").readlink())


@lru_cache(4096)
def user_name(uid: int) -> str:
    """Name of a user, or its number: a container's may have no name here."""
    try:
        return pwd.getpwuid(uid).pw_name
    except (KeyError, OverflowError):
        return str(uid)


class Mapping(NamedTuple):
    """A line of /proc/PID/maps (proc_pid_maps(5))."""

    start: int
    end: int
    permissions: str  # such as "r-xp"
    offset: int  # in the file
    path: str  # "" without one


def mappings(maps: bytes) -> Iterator[Mapping]:
    """The mappings of a process; lines that are none, such as the last one where the text was cut, are left out."""
    for line in maps.split(b"\n"):
        fields = line.split(None, 5)
        if len(fields) < 5:
            continue
        first, _, last = fields[0].partition(b"-")
        try:
            start, end, offset = int(first, 16), int(last, 16), int(fields[2], 16)
        except ValueError:
            continue
        path = os.fsdecode(fields[5]) if len(fields) > 5 else ""
        yield Mapping(start, end, fields[1].decode("ascii", "replace"), offset, path)

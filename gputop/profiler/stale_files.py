"""What a gputop that was killed in the middle of a capture left in a logdir, and whether its owner is dead.

Whatever is of use only while a capture runs carries in its name who made it: ``<place>-<pid>-<start>``, where
the place stands for the machine since it was booted and the PID namespace, and the start (in clock ticks, as
proc_pid_stat(5) has it) tells a process from a later one with its number. So a logdir can be shared between
hosts, containers and users: of its own place a gputop knows which process lives; of others it does not, and
leaves theirs alone for a day, several times as long as a capture can last. File locks would not tell more: over
NFS they may be missing, or unknown to other hosts.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import re
import secrets
import shutil
import time
from pathlib import Path

_NAME = re.compile(r"\.(?:gputop-probe-[0-9a-f]{8}|(?P<host>.+))"
                   r"\.(?P<place>[0-9a-f]{12})-(?P<pid>[0-9]+)-(?P<start>[0-9]+)(?(host)\.partial)")
_PROC = Path("/proc")
_FOREIGN_MAX_AGE_S = 24 * 3600.0
_MAX_RUNS = 256  # the newest are looked at: a look into each is a round trip on a network file system


def probe_name() -> str:
    """A new name for a folder of a probe's trace."""
    return f".gputop-probe-{secrets.token_hex(4)}.{_owner()}"


def partial_name(host: str) -> str:
    """The name of a trace while it is written."""
    return f".{host[:100]}.{_owner()}.partial"  # with the rest within the 255 bytes of a name


def remove_stale_files(logdir: Path) -> None:
    """Remove what dead captures of this user left in a logdir, as far as it can be; nothing else, and no error."""
    try:
        logdir = logdir.expanduser()
    except RuntimeError:  # no such user: the capture itself says so
        return
    here = _place()
    profiles = logdir / "plugins" / "profile"
    newest = sorted(_names(profiles), reverse=True)[:_MAX_RUNS]
    for folder in (logdir, *(profiles / run for run in newest)):
        for name in _names(folder):
            match = _NAME.fullmatch(name)
            if match is not None:
                with contextlib.suppress(OSError):
                    _clear(folder / name, match, here)


def _names(folder: Path) -> list[str]:
    with contextlib.suppress(OSError):
        return [path.name for path in folder.iterdir()]
    return []


def _clear(path: Path, named: re.Match[str], here: str | None) -> None:
    """Raises OSError."""
    about = path.lstat()
    if about.st_uid != os.geteuid():
        return
    if named["place"] == here:
        over = not _lives(int(named["pid"]), int(named["start"]))
    else:
        over = time.time() - about.st_mtime > _FOREIGN_MAX_AGE_S
    if over and named["host"] is None:
        shutil.rmtree(path)
    elif over:
        path.unlink()
        path.parent.rmdir()  # the run's folder, if there is nothing else in it


def _lives(pid: int, start: int) -> bool:
    try:
        state, began = _state(str(pid))
    except (FileNotFoundError, ProcessLookupError):
        return False
    return began == start and state not in "ZX"  # killed, and nobody has asked how it ended


def _state(pid: str) -> tuple[str, int]:
    """State and start of a process (proc_pid_stat(5)); raises OSError."""
    fields = (_PROC / pid / "stat").read_text(errors="replace").rpartition(")")[2].split()
    return fields[0], int(fields[19])


def _owner() -> str:
    """This process, as the names have it; where the system does not tell, one that no other takes for its own."""
    place = _place()
    with contextlib.suppress(OSError):
        if place is not None:
            return f"{place}-{os.getpid()}-{_state('self')[1]}"
    return f"{secrets.token_hex(6)}-0-0"


def _place() -> str | None:
    """Where the number and start of a process name it; None where that is not known."""
    own = _PROC / "self"
    with contextlib.suppress(OSError):
        if str(own.readlink()) != str(os.getpid()):  # this /proc counts processes as another namespace does
            return None
        times = own / "ns" / "time"  # in another one the starts of processes count from another moment
        parts = (platform.node(), (_PROC / "sys/kernel/random/boot_id").read_text(), (own / "ns" / "pid").readlink(),
                 times.readlink() if times.is_symlink() else "")
        return hashlib.sha256("\0".join(map(str, parts)).encode()).hexdigest()[:12]
    return None

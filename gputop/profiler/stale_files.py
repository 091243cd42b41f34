"""Files that a gputop killed in the middle of a capture left in a logdir, and whether its process is dead.

The name of a file that is of use only during a capture ends in its owner, ``<place>-<pid>-<start>``. The place
identifies the boot of the machine and the PID namespace. The start, in clock ticks as in proc_pid_stat(5),
distinguishes a process from a later one with the same pid. So hosts, containers and users can share a logdir: for
its own place gputop knows which processes live; files of other places it removes when they are older than a day,
several times as long as a capture can last. File locks would not be better: over NFS they may be missing, or
unknown to other hosts.
"""

from __future__ import annotations

import contextlib
import os
import platform
import re
import time
from pathlib import Path

from gputop.core.files import Folder, untrusted_ancestor
from gputop.core.proc import read_stat

_NAME = re.compile(r"\.(?:gputop-probe-[0-9a-f]{8}|(?P<host>.+))"
                   r"\.(?P<place>[0-9a-f]{12})-(?P<pid>[0-9]+)-(?P<start>[0-9]+)(?(host)\.partial)")
_PROC = Path("/proc")
_FOREIGN_MAX_AGE_S = 24 * 3600.0
_MAX_RUNS = 256  # only the newest are examined: each is a round trip on a network file system


def probe_name() -> str:
    """A new name for a folder of a probe's trace."""
    return f".gputop-probe-{os.urandom(4).hex()}.{_owner()}"


def partial_name(host: str) -> str:
    """The name of a trace while it is written."""
    return f".{host[:100]}.{_owner()}.partial"  # with the rest within the 255 bytes of a name


def remove_stale_files(logdir: Path) -> None:
    """Remove what dead captures of this user left in a logdir, as far as possible. Raises nothing. In a logdir that
    another user could exchange nothing is removed."""
    try:
        logdir = logdir.expanduser()
    except RuntimeError:  # no such user: the capture itself says so
        return
    here, profiles = _place(), logdir / "plugins" / "profile"
    if untrusted_ancestor(profiles) is not None:
        return
    with contextlib.suppress(OSError), Folder(logdir) as folder:
        _remove_stale_in(folder, here)
    with contextlib.suppress(OSError), Folder(profiles) as parent:
        for run in sorted(parent.names(), reverse=True)[:_MAX_RUNS]:
            with contextlib.suppress(OSError):
                with parent.enter(run) as folder:
                    removed = _remove_stale_in(folder, here)
                if removed:
                    parent.remove_folder(run)  # if there is nothing else in it


def _remove_stale_in(folder: Folder, here: str | None) -> bool:
    """Remove the stale files of a folder; returns whether there was one. Raises OSError where it cannot be listed."""
    removed = False
    for name in folder.names():
        match = _NAME.fullmatch(name)
        if match is None:
            continue
        with contextlib.suppress(OSError):
            if not _is_stale(folder.state(name), match, here):
                continue
            if match["host"] is None:
                folder.remove_tree(name)
            else:
                folder.remove(name)
                removed = True
    return removed


def _is_stale(state: os.stat_result, named: re.Match[str], here: str | None) -> bool:
    """Raises OSError where it is not known whether its process lives."""
    if state.st_uid != os.geteuid():
        return False
    if named["place"] == here:
        return not lives(int(named["pid"]), int(named["start"]))
    return time.time() - state.st_mtime > _FOREIGN_MAX_AGE_S


def lives(pid: int, start: int) -> bool:
    """Return whether the process of this PID that began then runs. Raises OSError where that may not be read."""
    try:
        stat = read_stat(pid)
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.start == start and stat.state not in "ZX"  # Z: killed, and its parent has not waited for it yet


def _owner() -> str:
    """This process as an owner in file names; a random owner where the system does not tell."""
    namespace = _place()
    with contextlib.suppress(OSError):
        if namespace is not None:
            return f"{namespace}-{os.getpid()}-{read_stat('self').start}"
    return f"{os.urandom(6).hex()}-0-0"


def _place() -> str | None:
    """The place within which pid and start identify a process; None where that is not known."""
    process = _PROC / "self"
    with contextlib.suppress(OSError):
        if str(process.readlink()) != str(os.getpid()):  # this /proc counts processes as another namespace does
            return None
        times = process / "ns" / "time"  # in another one the starts of processes count from another moment
        parts = (platform.node(), (_PROC / "sys/kernel/random/boot_id").read_text(),
                 (process / "ns" / "pid").readlink(),
                 times.readlink() if times.is_symlink() else "")
        import hashlib  # OpenSSL's 5 MB come with the first capture, not with the search for servers

        return hashlib.sha256("\0".join(map(str, parts)).encode()).hexdigest()[:12]
    return None

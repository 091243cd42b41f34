"""Binding a socket as a process of another user or container would: with its root and its file rights.

The name that a socket is bound with is the one that its peers see. kineto ends the job (std::terminate) at a datagram
from a name that does not begin with its folder, so the name must be the job's, and cannot lead through /proc.
A thread of gputop's takes the job's root and its user's file rights, for this one call, and ends. Both are a thread's
own: credentials(7), setfsuid(2), unshare(2) with CLONE_FS.
"""

from __future__ import annotations

import ctypes
import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path

_CLONE_FS = 0x200  # linux/sched.h


def run(pid: int, uid: int, call: Callable[[], None]) -> None:
    """Call ``call`` where paths are those of process ``pid``, with the file rights of ``uid``. Raises OSError."""
    elsewhere, other_user = not _shares_root(pid), uid != os.geteuid()
    if not elsewhere and not other_user:
        call()
        return
    failures: list[OSError] = []

    def work() -> None:
        try:
            if elsewhere:
                _unshare_file_system()
                os.chroot(f"/proc/{pid}/root")
            if other_user:
                _take_file_rights(uid)
            call()
        except OSError as error:
            failures.append(error)

    thread = threading.Thread(target=work, name="gputop-as-process")
    thread.start()
    thread.join()
    if failures:
        raise failures[0]


def fix(error: OSError) -> str:
    """What helps against an error of :func:`run`."""
    if error.errno in (errno.EPERM, errno.EACCES):
        return "Run gputop as the job's user, and as root if the job runs in a container."
    return "The folder must be there and writable for the job's user."


def _shares_root(pid: int) -> bool:
    """Whether a path leads the process to where it leads gputop. Raises OSError where that may not be known."""
    process = Path(f"/proc/{pid}")
    return (process / "ns/mnt").samefile("/proc/self/ns/mnt") and (process / "root").samefile("/")


def _unshare_file_system() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_FS) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _take_file_rights(uid: int) -> None:
    """Those of this thread; the kernel takes root's right to enter and change everything from it, too."""
    libc = ctypes.CDLL(None)
    libc.setfsuid(uid)
    if libc.setfsuid(-1) != uid:  # it returns the one before, and no errors
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

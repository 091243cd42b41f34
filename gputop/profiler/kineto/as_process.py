"""Using files as a process of another user or container would: with its file rights, and with its root.

Whatever a user puts in the way of root's gputop, a link or in a mount namespace of their own a mount, leads to nothing
that they could not reach themselves. A thread of gputop's takes the rights, for this one call, and ends. They are a
thread's own: credentials(7), setfsuid(2), unshare(2) with CLONE_FS.

The name that a socket is bound with is the one that its peers see. kineto ends the job (std::terminate) at a datagram
from a name that does not begin with its folder, so the name must be the job's, and cannot lead through /proc:
:func:`run` takes the job's root, too.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from gputop.core.proc import shares_root, status_fields

T = TypeVar("T")
_CLONE_FS = 0x200  # linux/sched.h
_CAPABILITY_VERSION = 0x20080522  # linux/capability.h, version 3
_SETGROUPS = {"x86_64": 116, "aarch64": 159}  # of asm/unistd.h: the C library's own would change all threads


def run(pid: int, uid: int, call: Callable[[], T]) -> T:
    """Return the result of ``call`` where paths are those of process ``pid`` of ``uid``, with its file rights. Raises
    what ``call`` raises, and OSError."""
    return _in_thread(pid, uid, call, elsewhere=not shares_root(pid), capable=False)


def with_rights(pid: int, uid: int, call: Callable[[], T]) -> T:
    """Call as :func:`run` does, where paths are gputop's own, and may lead through the process's /proc/PID/root: for a
    call that follows no link after that."""
    return _in_thread(pid, uid, call, elsewhere=False, capable=True)


def _in_thread(pid: int, uid: int, call: Callable[[], T], *, elsewhere: bool, capable: bool) -> T:
    other_user = uid != os.geteuid()
    if not elsewhere and not other_user:
        return call()

    def work() -> T:
        gid, groups = _groups(pid, uid) if other_user else (0, [])
        if elsewhere:
            _call("unshare", _CLONE_FS)
            os.chroot(f"/proc/{pid}/root")
        if other_user:
            _take_file_rights(uid, gid, groups)
        if not capable:  # a user or a container's root may not follow /proc/PID/root of others, as this machine's may
            _call("capset", (ctypes.c_uint * 2)(_CAPABILITY_VERSION, 0), (ctypes.c_uint * 6)())
        return call()

    with ThreadPoolExecutor(1, "gputop-as-process") as thread:
        return thread.submit(work).result()


def fix(error: OSError) -> str:
    """Fix for an error of :func:`run`."""
    if error.errno in (errno.EPERM, errno.EACCES):
        return "Run gputop as the job's user, and as root if the job runs in a container."
    return "The folder must exist, and the job's user must be able to write to it."


def _groups(pid: int, uid: int) -> tuple[int, list[int]]:
    """The group of a process and its further ones. Raises OSError where it has ended or is another user's."""
    try:
        status = status_fields(pid)
        if int(status[b"Uid"].split()[1]) != uid:
            raise ValueError
        return int(status[b"Gid"].split()[1]), [int(group) for group in status[b"Groups"].split()]
    except (ValueError, KeyError, IndexError):
        raise OSError(errno.ESRCH, os.strerror(errno.ESRCH)) from None


def _take_file_rights(uid: int, gid: int, groups: list[int]) -> None:
    """Take these file rights for this thread; the kernel takes root's right to change everything from it, too."""
    libc = ctypes.CDLL(None)
    _call("syscall", _SETGROUPS.get(platform.machine(), -1), len(groups), (ctypes.c_uint * len(groups))(*groups))
    libc.setfsgid(gid)
    libc.setfsuid(uid)
    if (libc.setfsgid(-1), libc.setfsuid(-1)) != (gid, uid):  # they return the one before, and no errors
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))


def _call(function: str, *arguments: object) -> None:
    """Call a function of the C library. Raises OSError."""
    if ctypes.CDLL(None, use_errno=True)[function](*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))

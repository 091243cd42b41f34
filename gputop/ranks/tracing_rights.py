"""Rights to look into a process, and the reason where the kernel denies it."""

from __future__ import annotations

import os
from pathlib import Path

from gputop.core.errors import GputopError
from gputop.core.proc import CAP_SYS_PTRACE, effective_capabilities, user_name

YAMA = Path("/proc/sys/kernel/yama/ptrace_scope")


def check_rights(pid: int, folder: Path, uid: int, command: str, alternative: str = "",
                 proc: Path = Path("/proc"), yama: Path = YAMA) -> None:
    """Raises GputopError, the reason named, where the kernel would not let this process of user ``uid`` be traced.

    ``folder`` is the process's in ``proc``; ``command`` is gputop's that wants to, ``alternative`` what else there is.
    Opening its memory asks the kernel the very question (ptrace(2), PTRACE_MODE_ATTACH) and changes nothing.
    """
    try:
        with (folder / "mem").open("rb"):
            return
    except PermissionError:
        pass
    except OSError:
        raise GputopError(f"process {pid} has ended", "") from None
    scope = _ptrace_scope(yama)
    again = f"sudo gputop {command} {pid}"
    if scope == 3:
        raise GputopError("kernel.yama.ptrace_scope is 3 on this node: until a reboot with another setting, no process "
                          "can read another one, not even as root", alternative)
    if os.geteuid() not in (0, uid):
        raise GputopError(f"process {pid} belongs to {user_name(uid)}",
                          f"Run gputop as that user, or {again}. {alternative}")
    if os.geteuid() == 0:
        capabilities = effective_capabilities("self", proc)
        if capabilities is not None and not capabilities & CAP_SYS_PTRACE:
            raise GputopError("this container lacks the capability SYS_PTRACE",
                              "Start the container with --cap-add=SYS_PTRACE (Kubernetes: "
                              f"securityContext.capabilities.add), or run gputop {command} on the host. {alternative}")
        raise GputopError(f"the kernel does not allow gputop to read process {pid}, not even as root",
                          f"A security module or a user namespace prevents it. {alternative}")
    if scope == 1:
        raise GputopError("kernel.yama.ptrace_scope is 1 on this node: only root can read non-child processes",
                          f"{again}; or, until the next boot, sudo sysctl kernel.yama.ptrace_scope=0. {alternative}")
    if scope == 2:
        raise GputopError("kernel.yama.ptrace_scope is 2 on this node: only root can read other processes",
                          f"{again}. {alternative}")
    raise GputopError(f"the kernel does not allow gputop to read process {pid}",
                      "The process may have gained privileges since its start, or a security module prevents it: "
                      f"{again}. {alternative}")


def _ptrace_scope(yama: Path) -> int:
    try:
        return int(yama.read_text())
    except (OSError, ValueError):  # a kernel without Yama
        return 0

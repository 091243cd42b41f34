"""The processes of a job on this node: what their environment says, what keeps one from running, and who may look into
it."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Literal

from msgspec import Struct

from gputop.core.errors import GputopError
from gputop.core.proc import (
    CAP_SYS_PTRACE,
    ENVIRON_BYTES,
    effective_capabilities,
    process_ids,
    read_or_empty,
    stat_of,
    status_fields,
    user_name,
)
from gputop.sources.host import proc_files
from gputop.text import redaction
from gputop.text.units import printable

_PROC = Path("/proc")


def local_addresses() -> frozenset[str]:
    import psutil

    local = set()
    with contextlib.suppress(OSError):
        for addresses in psutil.net_if_addrs().values():
            local |= {a.address.partition("%")[0] for a in addresses if a.family in (socket.AF_INET, socket.AF_INET6)}
    return frozenset(local)


def environment(pid: int, names: Iterable[str], proc: Path = _PROC) -> Mapping[str, str]:
    """Values of these variables of a process, as far as they are set and may be read; nothing else of it is kept."""
    environ = read_or_empty(f"{proc}/{pid}/environ", ENVIRON_BYTES)
    return {name: value for name in names if (value := proc_files.variable(environ, name.encode())) is not None}


def command_line(pid: int, proc: Path = _PROC) -> str:
    """Command of a process, the secrets in it hidden; "" where it is gone."""
    try:
        raw = proc_files.read(f"{proc}/{pid}/cmdline", proc_files.LARGE_BYTES)
    except OSError:
        return ""
    return redaction.command(proc_files.command(raw, b""))


def rank_label(pid: int, proc: Path = _PROC) -> str:
    """Label of a process in its job, as "rank 3" or "worker 1"; "" where its environment has none."""
    from gputop.profiler.discovery import RANK_VARIABLES, rank_of

    return rank_of(environment(pid, ("TF_CONFIG", *RANK_VARIABLES), proc)) or ""


def training_processes(proc: Path = _PROC) -> list[int]:
    """The processes that have TensorFlow, JAX or CUDA loaded, as far as that may be read; gputop's own is left out."""
    from gputop.profiler.discovery import is_training

    return sorted(pid for pid in process_ids(proc) if pid != os.getpid() and is_training(pid, proc))


# -- what keeps a process from running --------------------------------------------------------------

State = Literal["stopped", "frozen", "waiting", "ended"]
_NAME_CHARS = 60
# Functions of the kernel in which a process sleeps (/proc/PID/wchan), by what they begin with, and what for.
_FREEZERS = ("__refrigerator", "do_freezer_trap")
_WAITS = (("nfs", "a network file system"), ("rpc_", "a network file system"), ("ceph", "a network file system"),
          ("fuse_", "a user-space file system"), ("io_schedule", "a disk"), ("folio_wait", "a disk"),
          ("wait_on_page", "a disk"), ("blk_", "a disk"), ("jbd2_", "a disk"), ("nv", "the GPU's driver"),
          ("uvm_", "the GPU's driver"), ("os_acquire", "the GPU's driver"))


class Halt(Struct, frozen=True):
    """Reason why a process does not run: a signal, a debugger, its control group, a call of the kernel, its own end. A
    stack shows where a process stands and not that it stands still: one that is stopped in a collective looks like
    those that wait there for it. ``text`` goes on after the name of the process: "is stopped …"."""

    state: State
    text: str


def halt_of(pid: int, proc: Path = Path("/proc")) -> Halt | None:
    """Return what keeps a process from running now; None where nothing does, or it is gone."""
    stat = stat_of(pid, proc)
    if stat is None:
        return None
    if stat.state in ("Z", "X"):
        return Halt("ended", f"has ended, but its parent (pid {stat.parent}) has not reaped it (a zombie)")
    sleeps_in = _sleeps_in(pid, proc)
    if sleeps_in in _FREEZERS:
        return Halt("frozen", "is frozen by its control group: use docker unpause or scontrol resume, or write 0 to "
                              "the group's cgroup.freeze")
    if stat.state in ("T", "t"):
        tracer = _tracer(pid, proc)
        if tracer:
            return Halt("stopped", f"is stopped by a debugger (pid {tracer}{_named(tracer, proc)}): detach or stop it")
        return Halt("stopped", f"is stopped (SIGSTOP or a debugger): kill -CONT {pid}")
    if stat.state == "D":
        what = next((f" for {what}" for begin, what in _WAITS if sleeps_in.startswith(begin)), "")
        where = f", in {sleeps_in}" if sleeps_in else ""
        return Halt("waiting", f"is waiting in the kernel{what} (state D{where}) and ignores all signals")
    return None


def ended_siblings(pids: list[int], everybody: list[int], proc: Path = Path("/proc")) -> list[int]:
    """Return the processes that have ended beside these, and that the parent which started both has not taken note
    of."""
    parents = {stat.parent for pid in pids if (stat := stat_of(pid, proc)) is not None and stat.parent > 1}
    return [pid for pid in everybody if (stat := stat_of(pid, proc)) is not None and stat.state == "Z"
            and stat.parent in parents and stat.name.startswith(b"python")]


def _sleeps_in(pid: int, proc: Path) -> str:
    text = printable(read_or_empty(f"{proc}/{pid}/wchan").decode("ascii", "replace"))[:_NAME_CHARS]
    return "" if text == "0" else text


def _tracer(pid: int, proc: Path) -> int:
    try:
        return int(status_fields(pid, proc).get(b"TracerPid", b"0"))
    except (OSError, ValueError):
        return 0


def _named(pid: int, proc: Path) -> str:
    stat = stat_of(pid, proc)
    return "" if stat is None else f", {printable(stat.name.decode('utf-8', 'replace'))}"


# -- rights to look into a process ------------------------------------------------------------------

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

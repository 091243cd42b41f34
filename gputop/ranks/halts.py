"""Reasons why a process does not run: a signal, a debugger, its control group, a call of the kernel, its own end.

A stack shows where a process stands and not that it stands still: one that is stopped in a collective looks like those
that wait there for it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from msgspec import Struct

from gputop.core.proc import read, stat_of, status_fields
from gputop.text.units import printable

State = Literal["stopped", "frozen", "waiting", "ended"]
_NAME_CHARS = 60
# Functions of the kernel in which a process sleeps (/proc/PID/wchan), by what they begin with, and what for.
_FREEZERS = ("__refrigerator", "do_freezer_trap")
_WAITS = (("nfs", "a network file system"), ("rpc_", "a network file system"), ("ceph", "a network file system"),
          ("fuse_", "a user-space file system"), ("io_schedule", "a disk"), ("folio_wait", "a disk"),
          ("wait_on_page", "a disk"), ("blk_", "a disk"), ("jbd2_", "a disk"), ("nv", "the GPU's driver"),
          ("uvm_", "the GPU's driver"), ("os_acquire", "the GPU's driver"))


class Halt(Struct, frozen=True):
    """``text`` goes on after the name of the process: "is stopped …"."""

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
    try:
        text = printable(read(f"{proc}/{pid}/wchan").decode("ascii", "replace"))[:_NAME_CHARS]
    except OSError:
        return ""
    return "" if text == "0" else text


def _tracer(pid: int, proc: Path) -> int:
    try:
        return int(status_fields(pid, proc).get(b"TracerPid", b"0"))
    except (OSError, ValueError):
        return 0


def _named(pid: int, proc: Path) -> str:
    stat = stat_of(pid, proc)
    return "" if stat is None else f", {printable(stat.name.decode('utf-8', 'replace'))}"

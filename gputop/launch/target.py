"""The process that ``gputop attach`` names, and why gputop may not or cannot start a profiler server in it."""

from __future__ import annotations

import contextlib
import os
import platform
from pathlib import Path

from msgspec import Struct

from gputop.core.errors import GputopError, NoDataError
from gputop.core.framework import loaded_frameworks
from gputop.core.proc import (
    COMMAND_BYTES,
    children_by_parent,
    command_of,
    process_ids,
    read,
    read_maps,
    read_stat,
    stat_of,
    user_name,
)
from gputop.launch.inside.gputop_kineto import is_launcher
from gputop.profiler import sockets
from gputop.profiler.capture.requirements import check_limits
from gputop.ranks.processes import YAMA, check_rights
from gputop.text import redaction
from gputop.text.commands import short_command
from gputop.text.units import printable

WHAT_STARTING_DOES = (
    "gputop makes the job's Python start the profiler server of TensorFlow or JAX, once, between two steps. The server "
    "stays until the process ends and costs nothing until it is used. Before Python 3.14, this pauses one idle thread "
    "for about 1 ms. In a job with many small operations, a 10 s capture cost about 0.7 s of training time. In our "
    "tests on CPUs, no capture crashed a job. After a capture, a job with a lot of free memory returns it to the "
    "system, which takes 0.1 to 0.3 s of the main thread's time.")
_ALTERNATIVE = "Or restart the job with gputop run."
MAX_TRAINING = 64  # processes of one launcher that are named
SERVED = frozenset({"tensorflow", "jax"})  # whose profiler server gputop can start


class Target(Struct, frozen=True):
    """A process that can be asked to start a server."""

    pid: int
    command: str  # its secrets hidden
    uid: int
    user: str
    started: int  # field 22 of /proc/PID/stat: with the pid, the process's identity
    same_network: bool  # else it lives in a container with a network of its own


def examine(pid: int, proc: Path = Path("/proc"), yama: Path = YAMA, *,
            frameworks: frozenset[str] = SERVED, started: int | None = None) -> Target:
    """Inspect a process without touching it. Raises GputopError with the reason why it cannot be a target.

    ``frameworks``: those of :mod:`gputop.core.framework` that it must have loaded one of. ``started``: when the process
    began that is meant, by an earlier :class:`Target`: by now the PID may be another's."""
    folder = proc / str(pid)
    try:
        status = dict(line.split(":\t", 1) for line in (folder / "status").read_text().splitlines() if ":\t" in line)
        command = redaction.command(printable(read(f"{folder}/cmdline", COMMAND_BYTES).replace(b"\0", b" ").strip()))
        uid = folder.stat().st_uid
    except OSError:
        raise NoDataError(f"there is no process {pid}",
                          "ps or nvidia-smi shows the right PID. PIDs differ inside and outside a container.") from None
    user = user_name(uid)
    state = status.get("State", "?")[0]
    if state in "ZX":
        raise GputopError(f"process {pid} has ended", "It is a zombie: its parent has not reaped it yet.")
    try:
        (folder / "exe").readlink()
    except FileNotFoundError:
        raise GputopError(f"process {pid} is a kernel thread", "Give the PID of the training job.") from None
    except OSError:  # someone else's: said below
        pass
    tracer = status.get("TracerPid", "0").strip()
    if tracer != "0":
        raise GputopError(f"process {tracer} (a debugger, strace, …) is attached to process {pid}",
                          "Stop that program first.")
    if state in "Tt":
        raise GputopError(f"process {pid} is stopped", f"Resume it first: kill -CONT {pid}")
    check_rights(pid, folder, uid, "attach", _ALTERNATIVE, proc, yama)
    try:
        loaded = loaded_frameworks(read_maps(pid, proc))
        process_started = read_stat(pid, proc).start
    except OSError:
        raise GputopError(f"process {pid} has ended", "") from None
    if started not in (None, process_started):
        raise GputopError(f"process {pid} has ended, and another one has its PID", "Nothing was done.")
    if (not loaded & frameworks or is_launcher(command.split())) and (started_by_it := training(pid, proc)):
        which = f"process {started_by_it[0]}" if len(started_by_it) == 1 else f"{len(started_by_it)} processes"
        theirs = short_command(command_of(started_by_it[0], proc))
        raise GputopError(f"process {pid} ({command[:60]}) is a launcher; {which} that it started "
                          f"{'trains' if len(started_by_it) == 1 else 'train'}: {printable(theirs[:60])}",
                          f"gputop capture {' '.join(map(str, started_by_it))}")
    if not loaded & frameworks:
        without = "no PyTorch" if frameworks == {"pytorch"} else "neither TensorFlow, JAX nor PyTorch"
        raise GputopError(f"process {pid} ({command[:60]}) has {without} loaded",
                          "Name the Python process that trains, or wait until it has imported its framework.")
    check_limits(pid, proc)
    same_network = True
    with contextlib.suppress(OSError):
        same_network = sockets.network_namespace(proc, pid) == sockets.network_namespace(proc, os.getpid())
    return Target(pid, command, uid, user, process_started, same_network)


def training(pid: int, proc: Path = Path("/proc")) -> list[int]:
    """The PIDs of the processes that a launcher has started and that train, as far as they can be read; not what
    these have started, such as DataLoader's workers."""
    parents = {other: stat.parent for other in process_ids(proc) if (stat := stat_of(other, proc)) is not None}
    children = children_by_parent(parents.items())
    trainers: list[int] = []
    queue = list(children.get(pid, ()))
    while queue and len(trainers) < MAX_TRAINING:
        child = queue.pop(0)
        try:
            trains = loaded_frameworks(read_maps(child, proc)) and not is_launcher(command_of(child, proc).split())
        except OSError:  # another user's, or it has ended
            continue
        if trains:
            trainers.append(child)
        else:
            queue += children.get(child, ())
    return sorted(trainers)


def check_same(process: Target) -> None:
    """Raises GputopError where the pid has become another process's since :func:`examine`. To be called after the
    process's memory has been opened: what is open stays the former one's."""
    stat = stat_of(process.pid)
    if stat is None or stat.start != process.started:
        raise GputopError(f"process {process.pid} has ended", "Nothing was done.")


def check_machine() -> None:
    """Raises GputopError on machines where gputop cannot borrow a thread."""
    if platform.machine() != "x86_64":
        raise GputopError(f"before Python 3.14, gputop attach supports only x86-64, not {platform.machine()}",
                          _ALTERNATIVE)

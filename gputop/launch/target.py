"""The process that ``gputop attach`` names, why gputop may not or cannot start a profiler server in it, and the
processes of a job: what a launcher has started, and its ranks."""

from __future__ import annotations

import contextlib
import os
import platform
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from msgspec import Struct

from gputop.core.errors import GputopError, NoDataError
from gputop.core.framework import loaded_frameworks
from gputop.core.proc import (
    COMMAND_BYTES,
    MAPS_BYTES,
    children_by_parent,
    command_of,
    environ_of,
    owner,
    process_ids,
    read,
    read_maps,
    read_or_empty,
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


def is_pytorch(pid: int) -> bool:
    """Return whether a process is captured by PyTorch: a TensorFlow or JAX job may have that loaded for its data."""
    loaded = loaded_frameworks(read_or_empty(f"/proc/{pid}/maps", MAPS_BYTES))
    return "pytorch" in loaded and not loaded & SERVED


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


# -- the ranks of a PyTorch job on this node: they meet at one address, as torchrun and env:// have it ----

MAX_RANKS = 64  # ranks of one node
_MEETING = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,252}:[0-9]{1,5}")  # nothing that a shell or ssh reads otherwise
_THIS_NODE = frozenset(("localhost", "127.0.0.1", "0.0.0.0"))
_NUMBER = re.compile(r"[0-9]{1,7}")


def is_meeting_address(text: str) -> bool:
    """Return whether it can be the address at which the ranks of a job meet."""
    return _MEETING.fullmatch(text) is not None


def meeting_address(environ: Mapping[str, str]) -> str | None:
    """Address where a rank meets the others (MASTER_ADDR and MASTER_PORT), the job's identity on all its nodes; None
    where it is no rank, or no other node can reach that address."""
    text = f"{environ.get('MASTER_ADDR', '')}:{environ.get('MASTER_PORT', '')}"
    is_rank = is_meeting_address(text) and _NUMBER.fullmatch(environ.get("RANK", "")) is not None
    return text if is_rank and environ["MASTER_ADDR"] not in _THIS_NODE else None


def ranks_elsewhere(environ: Mapping[str, str]) -> int:
    """Number of ranks of a process's job on other nodes, as torchrun says; 0 where it does not."""
    both = environ.get("WORLD_SIZE", ""), environ.get("LOCAL_WORLD_SIZE", "")
    if not all(_NUMBER.fullmatch(text) for text in both):
        return 0
    everywhere, here = map(int, both)
    return max(0, everywhere - here) if meeting_address(environ) is not None else 0


def find_ranks(address: str, proc: Path = Path("/proc")) -> list[int]:
    """The PIDs of the ranks on this node that meet at ``address``, by rank, as far as their environment may be read.
    Raises GputopError where they are of several users: a job is one user's, and anybody can set these variables."""
    environs = {pid: environ_of(pid, proc) for pid in process_ids(proc)}
    ranks = {pid: int(environ["RANK"]) for pid, environ in environs.items() if meeting_address(environ) == address}
    rank_pids = []
    for pid in ranks:
        stat = stat_of(pid, proc)
        # A rank's children, such as its DataLoader's workers, have its environment.
        if stat is not None and ranks.get(stat.parent) != ranks[pid] and is_pytorch(pid):
            rank_pids.append(pid)
    users = {uid for pid in rank_pids if (uid := owner(pid, proc)) is not None}
    if len(users) > 1:
        uids = ", ".join(map(str, sorted(users)))
        raise GputopError(f"processes of several users (uid {uids}) use the rendezvous address {address}, so gputop "
                          "does not know whose job it is", "Run gputop as the job's user on that node.")
    return sorted(rank_pids, key=ranks.__getitem__)[:MAX_RANKS]


def meeting_addresses(pids: Sequence[int], proc: Path = Path("/proc")) -> set[str]:
    """Addresses where the jobs of these processes meet; of all that may be read, if none is named."""
    environs = (environ_of(pid, proc) for pid in pids or process_ids(proc))
    return {address for environ in environs if (address := meeting_address(environ)) is not None}

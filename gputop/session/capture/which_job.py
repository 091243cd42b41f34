"""Choice of the job that is meant: whether a server is of a job that was started again, and which of several comes
first. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from msgspec import Struct

from gputop.core.samples import ProcessSample
from gputop.profiler.capture.records import CaptureRecord, Server, usable
from gputop.text.commands import command_of, script_of

_SAME_START_S = 2.0  # the kernel's boot time, from which starts are counted, moves by a second with the clock
_CLEARLY_MORE = 1.1  # factor of memory: a job next to one that holds as much does not take its place with each sample


class HeldGpus(Struct, frozen=True):
    """Use of GPUs by a server's process and its children: GPU indices, and their memory together; None: not known."""

    gpus: tuple[int, ...] = ()
    memory_bytes: float | None = None


def gpu_use(server: Server, processes: Iterable[ProcessSample]) -> HeldGpus:
    """The GPUs that the server's process or a child of it holds, by a sample's ``processes``."""
    if server.pid is None:
        return HeldGpus()
    of_job = [p for p in processes if server.pid in (p.local_pid or p.pid, p.parent_pid)]
    memory = [p.gpu_memory_bytes for p in of_job if p.gpu_memory_bytes is not None]
    return HeldGpus(tuple(sorted({gpu for p in of_job for gpu in p.gpus})), sum(memory) if memory else None)


def same_job(server: Server, ended: Server) -> bool:
    """Return whether a server that answers now is of the job that has ended, started again: the same user and the same
    command, or at the same address the same script with other options.

    An unknown user or command is never the same: anybody can listen at an address that has become free.
    """
    if server.pid is None or (server.owner, server.user) != (ended.owner, ended.user):
        return False
    command, before = command_of(server.description), command_of(ended.description)
    if not command or command == before:
        return bool(command)
    return server.address == ended.address and script_of(command) == script_of(before)


def same_process(pid: int | None, started_s: float | None, server: Server) -> bool | None:
    """Return whether that is the server's process; None where that is not known."""
    if pid is None or server.pid is None:
        return None
    if pid != server.pid:
        return False
    if started_s is None or server.started_s is None:
        return None
    return abs(started_s - server.started_s) <= _SAME_START_S


def is_of_earlier_job(record: CaptureRecord, servers: Sequence[Server]) -> bool:
    """Return whether a capture is of another job than that of the first of these servers, or of an earlier start of it;
    False where that is not known. Those that were named together, and those with its command, are its workers."""
    if not servers:
        return False
    first, command = servers[0], command_of(servers[0].description)
    workers = [s for s in servers
               if s == first or (first.asked and s.asked) or (command and command_of(s.description) == command)]
    same = [same_process(record.pid, record.started_s, s) for s in workers]
    if True in same:
        return False
    if first.started_s is not None and first.started_s > record.time_s:
        return True
    if None not in same:
        return True
    before = command_of(record.job)
    return bool(first.pid is not None and command and before and command != before)


def jobs_of(servers: Iterable[Server], processes: Sequence[ProcessSample]) -> list[Server]:
    """A server of each job that was found and answers; workers of one user's command are one job. gputop's own user's
    come first, of these the jobs that hold most GPU memory."""
    of_job: dict[tuple[str, str], list[Server]] = {}
    for server in servers:
        if server.problem is None and not server.asked:
            of_job.setdefault((server.owner, command_of(server.description)), []).append(server)

    def order(workers: list[Server]) -> tuple[bool, bool, float]:
        uses = [gpu_use(server, processes) for server in workers]
        return (bool(workers[0].owner), not any(use.gpus for use in uses), -sum(use.memory_bytes or 0 for use in uses))

    return [workers[0] for workers in sorted(of_job.values(), key=order)]


def only_job_on_gpus(jobs: Sequence[Server], processes: Sequence[ProcessSample]) -> Server | None:
    """The only one of these jobs that holds a GPU; None where none or several do, or it is another user's."""
    on_gpus = [server for server in jobs if gpu_use(server, processes).gpus]
    return on_gpus[0] if len(on_gpus) == 1 and not on_gpus[0].owner else None


def unserved_on_gpus(servers: Sequence[Server], processes: Sequence[ProcessSample],
                     user: str) -> tuple[ProcessSample, ...]:
    """The user's processes of a framework on the GPUs, while no answering server's process holds one."""
    if any(gpu_use(server, processes).gpus for server in usable(servers)):
        return ()
    return tuple(p for p in processes if p.gpus and p.framework and p.user == user)


def in_order(servers: Sequence[Server], watched: Server | None, processes: Sequence[ProcessSample],
             shown: Server | None = None) -> tuple[Server, ...]:
    """Named servers, then that of the ``watched`` job, then gputop's own user's, of these the one whose process holds
    most GPU memory; the one ``shown`` first stays there unless another holds clearly more."""
    def order(server: Server) -> tuple[bool, bool, bool, bool, float]:
        use, key = gpu_use(server, processes), (server.address, server.pid)
        is_shown = shown is not None and key == (shown.address, shown.pid)
        return (not server.asked, watched is None or key != (watched.address, watched.pid), bool(server.owner),
                not use.gpus, -(use.memory_bytes or 0) * (_CLEARLY_MORE if is_shown else 1))

    return tuple(sorted(servers, key=order))

"""Asks the debug server of PyTorch: each rank of a job that runs one serves over HTTP what its flight recorder holds.

``torch.distributed.debug.start_debug_server()`` opens a TCP port in each rank, torchrun's ``worker_main()`` a UNIX
socket. Both answer from a thread of C++, which the kernel knows as "pt_workerserver": also while Python is stuck. The
way to an answer:

1. Only a process with that thread is asked.
2. Its server is a socket that it holds itself: one that listens on all interfaces, or the UNIX socket that
   TORCH_WORKER_SERVER_SOCKET names. The other sockets of PyTorch, gloo and NCCL listen at one address; the one on which
   the ranks meet is left out by its port.
3. Nothing is sent before the kernel has said that the socket which answers is that process's.
4. The server lists its handlers. NCCL's recorder is asked first, whole; then the one of other backends, such as gloo,
   which newer versions of PyTorch show without what has completed.
5. One answer shows a rank that is a moment late like one that never comes: there are two, some seconds apart, and only
   where no rank has launched anything in between do they say who is missing.

Where py-spy shows no stack, the server does: it takes the interpreter's lock for that, and so has none of a rank whose
Python holds the lock for ever.

Whoever wrote the job's programs chose what its server answers: it is bounded in bytes, in time and in values.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import re
import socket
import struct
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from gputop.core.bounded_http import Connection
from gputop.core.codec import parse
from gputop.core.errors import GputopError
from gputop.core.files import folder_of_process
from gputop.core.proc import read
from gputop.profiler import sockets
from gputop.ranks import stacks
from gputop.ranks.flight_recorder import Dump, Dumps, dumps_by_rank, jobs_of, rank_of_process, read_dump
from gputop.ranks.halts import halt_of
from gputop.ranks.processes import command_line, environment, rank_label
from gputop.ranks.stacks import Frame, ProcessStacks, ThreadStack
from gputop.text.units import printable, ranges

APART_S = 3.0  # between the two answers: a job that works launches some collectives meanwhile
_PROC = Path("/proc")
_THREAD = "pt_workerserver"  # c10d/control_plane/WorkerServer.cpp
_SOCKET_VARIABLE, _MEETING_PORT = "TORCH_WORKER_SERVER_SOCKET", "MASTER_PORT"
# Handlers, in the order of asking, and whether they leave out what has completed (c10d/control_plane/Handlers.cpp,
# c10d/ProcessGroupNCCL.cpp).
_HANDLERS = (("dump_nccl_trace_json", "?includecollectives=true&onlyactive=false", False),
             ("fr_trace_json", "", True))
_TRACEBACK = "dump_traceback"  # the same folder, PythonHandlers.cpp: what Python's faulthandler writes
_TRACEBACK_BYTES, _MAX_LINES = 4 << 20, 20_000  # it writes 100 threads with 100 frames each at most
_THREAD_LINE = re.compile(r"(?:Current thread|Thread) 0x[0-9a-fA-F]+(?: \[(.{0,100})\])? \(most recent call first\):")
_FRAME_LINE = re.compile(r' {2}File "([^"]{0,1000})", line (\d{1,9}|\?\?\?) in (.{0,1000})')
_CUT = "..."  # more threads than it shows
_NAME_CHARS = 300
_TIMEOUT_S = 5.0  # of a process, for all its requests
_MAX_BYTES = 16 << 20  # 2,000 entries, PyTorch's default, take some 2 MB
_LIST_BYTES = 64 << 10
_MAX_THREADS = 10_000  # of a process, whose names are read
_MAX_PORTS = 4  # of a process
_MAX_PATH = 100  # bytes of a UNIX socket's path (unix(7): 108)
_AT_ONCE = 16
_NAME = "the answer"
_CREDENTIALS = struct.Struct("3i")  # struct ucred: process, user, group
_LOOPBACKS = ("::1", "127.0.0.1")
_READING = threading.Lock()  # one answer at a time: some megabytes become a hundred times as much for a moment


class Answers(Struct, frozen=True):
    """Answers of the servers of one job's processes, and what could not be asked. ``moved``: ranks launched or ended
    collectives since they were asked before."""

    pids: tuple[int, ...]
    dumps: Dumps
    moved: bool = False


class _NoServer(GputopError):
    """A process that runs none."""


def ask(pids: Iterable[int], proc: Path = _PROC) -> tuple[Answers, ...]:
    """Ask the servers of these processes, job by job; jobs of which no process runs one are left out. Blocks for 5 s
    for each sixteen processes at most."""
    jobs, _ = jobs_of(pids, proc)
    serving = [job for job in jobs if any(_serves(pid, proc) for pid in job)]
    return tuple(Answers(tuple(job), _of_job(job, proc)) for job in serving)


def compared(first: Sequence[Answers], last: Sequence[Answers]) -> tuple[Answers, ...]:
    """The newer answers, each with whether its job has moved since the older ones. A rank that answered only once does
    not count."""
    before = {job.pids: {dump.rank: _progress(dump) for dump in job.dumps.dumps} for job in first}
    out = []
    for job in last:
        older = before.get(job.pids, {})
        twice = tuple(dump for dump in job.dumps.dumps if dump.rank in older)
        once = [dump.rank for dump in job.dumps.dumps if dump.rank not in older]
        problems = (f"rank{'s' * (len(once) > 1)} {ranges(once, ', ')}: answered only once",) if once else ()
        out.append(Answers(job.pids, Dumps(twice, (*job.dumps.problems, *problems)),
                           any(older[dump.rank] != _progress(dump) for dump in twice)))
    return tuple(out)


def read_stacks(pids: Iterable[int], *, native: bool = False, proc: Path = _PROC) -> tuple[ProcessStacks, ...]:
    """The stacks by py-spy as :func:`gputop.ranks.stacks.read_all`; where that shows none, those by the debug server.

    Raises GputopError where py-spy is not installed and no server shows any.
    """
    problem = None
    try:
        processes = stacks.read_all(pids, native=native)
    except GputopError as error:
        problem = error
        processes = tuple(ProcessStacks(pid, rank_label(pid, proc), command_line(pid, proc), problem=error,
                                        halt=halt_of(pid, proc))
                          for pid in list(dict.fromkeys(pids))[:stacks.MAX_PROCESSES])

    def by_server(process: ProcessStacks) -> ProcessStacks:
        if process.problem is None or not _serves(process.pid, proc):
            return process
        ends_s = time.monotonic() + _TIMEOUT_S
        with contextlib.suppress(GputopError):
            for server in _servers(process.pid, proc):
                with contextlib.suppress(GputopError, OSError, http.client.HTTPException):
                    if threads := server.threads(ends_s):
                        note = f"the stacks are by PyTorch's debug server, as {process.problem.message}."
                        return replace(process, threads=threads, problem=None, note=note)
        return process

    with ThreadPoolExecutor(_AT_ONCE, "gputop-debug-servers") as threads:
        processes = tuple(threads.map(by_server, processes))
    if problem is not None and not any(process.threads for process in processes):
        raise problem
    return processes


def read_traceback(text: str) -> tuple[ThreadStack, ...]:
    """The threads in what Python's faulthandler writes, the newest first; those without a frame are left out. The last
    one is the main thread, unless some were cut off. What runs is not told."""
    threads: list[tuple[str, list[Frame]]] = []
    cut = False
    for line in text.splitlines()[:_MAX_LINES]:
        if heading := _THREAD_LINE.fullmatch(line):
            threads.append((printable(heading[1] or ""), []))
        elif threads and (frame := _FRAME_LINE.fullmatch(line)):
            file, number, function = frame.groups()
            threads[-1][1].append(Frame(printable(function)[-_NAME_CHARS:], printable(file)[-_NAME_CHARS:],
                                        int(number) or None if number.isdecimal() else None))
        cut = cut or line == _CUT
    return tuple(ThreadStack(name, number == len(threads) - 1 and not cut, False, tuple(frames))
                 for number, (name, frames) in enumerate(threads) if frames)


def _progress(dump: Dump) -> object:
    """Value that differs once a rank has launched or ended anything: the recorder's newest number, and by group how
    many collectives it holds that have ended, which the GPU may go on with while the host waits."""
    return dump.newest_record, dump.messages, [
        (group.name, len(group.collectives), sum(one.ended for one in group.collectives)) for group in dump.groups]


def _of_job(pids: Sequence[int], proc: Path) -> Dumps:
    def one(pid: int) -> Dump | GputopError:
        try:
            return _of_process(pid, proc)
        except GputopError as error:
            return error

    with ThreadPoolExecutor(_AT_ONCE, "gputop-debug-servers") as threads:
        answers = dict(zip(pids, threads.map(one, pids), strict=True))
    dumps = [answer for answer in answers.values() if isinstance(answer, Dump)]
    problems = [f"process {pid}: {answer.message}" for pid, answer in answers.items()
                if isinstance(answer, GputopError) and not isinstance(answer, _NoServer)]
    if without := [pid for pid, answer in answers.items() if isinstance(answer, _NoServer)]:
        problems.append(f"process{'es' if len(without) > 1 else ''} {ranges(without, ', ')}: no debug server runs in "
                        f"{'them' if len(without) > 1 else 'it'}")
    return dumps_by_rank(dumps, problems)


def _serves(pid: int, proc: Path) -> bool:
    """Return whether a thread of the server runs in it."""
    with contextlib.suppress(OSError), os.scandir(proc / str(pid) / "task") as threads:
        for number, thread in enumerate(threads):
            if number == _MAX_THREADS:
                break
            with contextlib.suppress(OSError):
                if read(f"{thread.path}/comm", 64).decode("utf-8", "replace").rstrip("\n") == _THREAD:
                    return True
    return False


def _of_process(pid: int, proc: Path) -> Dump:
    """Raises GputopError, :class:`_NoServer` where no server runs."""
    if not _serves(pid, proc):
        raise _NoServer("no debug server runs there")
    rank = rank_of_process(pid, proc)
    ends_s = time.monotonic() + _TIMEOUT_S
    problem = GputopError("its debug server's socket is not among those that gputop may see")
    for server in _servers(pid, proc):
        try:
            return server.dump(rank, ends_s)
        except GputopError as error:
            problem = error
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "strerror", None) or error or type(error).__name__
            problem = GputopError(f"its debug server does not answer: {printable(str(reason))[:200]}")
    raise problem


class _Server(Struct, frozen=True):
    """Server of a process: at a TCP port (0: none), or at a UNIX socket, whose path is that of its own root."""

    pid: int
    proc: Path
    port: int = 0
    path: str = ""

    def dump(self, rank: int, ends_s: float) -> Dump:
        """Dump of what its recorder holds. Raises GputopError, OSError, HTTPException."""
        names = self._handlers(ends_s)
        empty: Dump | None = None
        for handler, query, only_active in _HANDLERS:
            if handler not in names:
                continue
            asked_s = time.time()
            data = self._request("POST", f"/handler/{handler}{query}", ends_s, _MAX_BYTES)
            with _READING:
                dump = read_dump(data, rank, _NAME, asked_s, only_active=only_active)
            if any(group.collectives for group in dump.groups) or dump.messages:
                return dump
            empty = empty or dump
        if empty is None:
            raise GputopError("its debug server has no handler that reads the flight recorder")
        return empty

    def threads(self, ends_s: float) -> tuple[ThreadStack, ...]:
        """The Python stacks of its process. Raises the same."""
        if _TRACEBACK not in self._handlers(ends_s):
            return ()
        data = self._request("POST", f"/handler/{_TRACEBACK}", ends_s, _TRACEBACK_BYTES)
        return read_traceback(data.decode("utf-8", "replace"))

    def _handlers(self, ends_s: float) -> list[object]:
        try:
            names = parse(self._request("GET", "/handler/", ends_s, _LIST_BYTES))
        except ValueError:
            names = None
        if not isinstance(names, list):
            raise GputopError(f"what listens at {self._address} does not answer like PyTorch's debug server")
        return names

    @property
    def _address(self) -> str:
        return f"port {self.port}" if self.port else printable(self.path)[:_MAX_PATH]

    def _request(self, method: str, path: str, ends_s: float, most_bytes: int) -> bytes:
        """The body of an answer; each request has a connection of its own, whose other end is checked."""
        connection = Connection("localhost", timeout=_TIMEOUT_S)
        connection.bound(ends_s, most_bytes)
        try:
            connect = self._connect_tcp if self.port else self._connect_unix
            connection.sock = connect(connection.limits.left_s())
            connection.request(method, path, headers={"Connection": "close", "Accept": "application/json"})
            answer = connection.getresponse()
            body = answer.read(most_bytes + 1)
            if answer.status != http.client.OK:
                raise GputopError(f"its debug server answered {answer.status}")
            return body
        finally:
            connection.close()

    def _connect_tcp(self, timeout_s: float) -> socket.socket:
        """A connection to the port of the process. Raises OSError, and GputopError where it is another's."""
        refused: OSError | GputopError = ConnectionRefusedError("nobody listens")
        for host in _LOOPBACKS:
            try:
                connection = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
            except OSError as error:  # a kernel without IPv6
                refused = error
                continue
            try:
                connection.settimeout(timeout_s)
                connection.connect((host, self.port))
                listening = sockets.listening_inodes(self.proc, host, self.port)
                if listening and listening <= sockets.open_inodes(self.proc, self.pid):
                    return connection
                refused = GputopError(f"another process listens at {self._address}")
            except OSError as error:
                refused = refused if isinstance(refused, GputopError) else error
            connection.close()
        raise refused

    def _connect_unix(self, timeout_s: float) -> socket.socket:
        """The same to its UNIX socket."""
        path = Path(self.path)
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            # A link would lead to any socket of root's.
            with folder_of_process(self.pid, path.parent, self.proc) as folder, folder.socket(path.name) as socket_path:
                connection.settimeout(timeout_s)
                connection.connect(socket_path)
            size = _CREDENTIALS.size
            pid, _, _ = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
            if pid != self.pid:
                raise GputopError(f"another process listens at {self._address}")
        except (OSError, GputopError):
            connection.close()
            raise
        return connection


def _servers(pid: int, proc: Path) -> Iterator[_Server]:
    """Yield the servers that a process may run. Raises GputopError where gputop cannot get there."""
    environ = environment(pid, (_SOCKET_VARIABLE, _MEETING_PORT), proc)
    path = environ.get(_SOCKET_VARIABLE, "")
    if path.startswith("/") and len(os.fsencode(path)) <= _MAX_PATH:
        yield _Server(pid, proc, path=path)
    try:
        network = sockets.network_namespace(proc, pid)
        elsewhere = network != sockets.network_namespace(proc, os.getpid())
    except OSError as error:
        raise GputopError(f"its network may not be seen: {error.strerror or error}") from None
    if elsewhere:
        raise GputopError("its debug server is in a network of its own: run gputop stacks in its container")
    held = sockets.open_inodes(proc, pid)
    if not held:
        raise GputopError("gputop may not see its sockets: run gputop as its user or as root")
    ports = sorted(listener.port for listener in sockets.listeners(proc, pid, network)
                   if listener.inode in held and str(listener.port) != environ.get(_MEETING_PORT))
    for port in ports[:_MAX_PORTS]:
        yield _Server(pid, proc, port=port)

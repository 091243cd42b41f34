"""Starts a profiler server in a process that runs without one.

The process's own interpreter runs :mod:`gputop.launch.inside.gputop_serve`, in its main thread, at the next point
where Python itself would run a signal handler: no relevant lock is held there, and nothing else is interrupted.
The request is made by Python's remote execution where it has that (3.14, :mod:`gputop.launch.remote_exec`), else by
``Py_AddPendingCall``, which a thread of the process that sleeps is made to call (:mod:`gputop.launch.inject`).
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from msgspec import Struct

from gputop.core.codec import parse
from gputop.core.errors import GputopError, os_errors_as
from gputop.core.files import folder_of_process
from gputop.core.own_memory import resident_bytes
from gputop.core.proc import cpu_time_ns, stat_of
from gputop.launch import environment, remote_exec, target
from gputop.launch.deadline import Deadline, in_time
from gputop.launch.elf import addresses_in
from gputop.launch.inject import call_with_text
from gputop.launch.inside.gputop_serve import socket_name
from gputop.profiler import sockets
from gputop.profiler.addresses import parse_address, process_of, split_address
from gputop.profiler.discovery import find_servers
from gputop.profiler.kineto import as_process
from gputop.profiler.xprof.probe import probe
from gputop.text.units import printable

ANSWER_TIMEOUT_S = 30.0  # the request lapses after this time
_WATCH_S = 1.0  # for whether a process runs: most jobs compute or poll more often
_GIVE_BACK_TIMEOUT_S = 2.0
_GIVEN_BACK_BYTES = 32 << 20  # what a job at work does not free of itself within a fraction of a second
_POLL_PERIOD_S, _FREED_POLL_S = 0.3, 0.02
_SCRIPTS = Path("/tmp")  # in the job's root
_PROC = Path("/proc")


def serving(pid: int) -> str | None:
    """The address of the profiler server that a process already has; None without one."""
    return next((server.address for server in find_servers([pid]).servers if server.pid == pid), None)


class Ready(Struct, frozen=True):
    """A process that can be captured at ``address``; ``line`` says that in words."""

    address: str
    line: str


def start_server(process: target.Target, port: int = 0) -> Ready:
    """Start a server; ``port`` 0 is any. Returns that it answers. Raises GputopError."""
    token = environment.new_token()
    listen = "local" if process.same_network else "all"  # the loopback of another network is out of reach
    source = (environment.INSIDE / "gputop_serve.py").read_text()
    source += f"\nserve_now({token!r}, {port}, {listen!r}, {time.time() + ANSWER_TIMEOUT_S})\n"
    text = silent_text(source, "gputop_serve")
    before = set() if process.same_network else _listening(process.pid)
    with contextlib.closing(Announcements(token, process.uid)) as announcements, running_in(process, text):
        if process.same_network:
            announced = announcements.receive(ANSWER_TIMEOUT_S)
        else:
            announced = _wait_for_listener(process.pid, before)
    if announced is None:
        raise no_answer(process.pid, ANSWER_TIMEOUT_S)
    if announced.address is None:
        raise GputopError(announced.line, "The job itself continues.")
    probe(announced.address)
    return Ready(announced.address, announced.line)


def give_back(process: target.Target) -> None:
    """Have the process return to the kernel what its C library keeps free; blocks until it has, or for 2 s, after which
    it does not. Raises GputopError.

    Its main thread is held for 0.1 s of CPU time per 700 MiB (TensorFlow 2.21, glibc 2.36)."""
    until_s, before = time.time() + _GIVE_BACK_TIMEOUT_S, resident_bytes(process.pid) or 0
    source = f"import ctypes, time\nif time.time() < {until_s}:\n ctypes.CDLL(None).malloc_trim(0)\n"
    with running_in(process, silent_text(source, "gputop_give_back")):
        while time.time() < until_s and before - (resident_bytes(process.pid) or 0) < _GIVEN_BACK_BYTES:
            time.sleep(_FREED_POLL_S)


def no_answer(pid: int, waited_s: float) -> GputopError:
    """The error of a process that has not run what it was requested to, with what it does now. Blocks for a second."""
    return GputopError(
        f"Process {pid} did not answer within {waited_s:.0f} s: its main thread is running native code or is idle, or "
        f"it is not allowed to open a socket (seccomp). {state_now(pid)}",
        f"py-spy dump --pid {pid} shows where the thread is. The request is no longer valid.")


def state_now(pid: int, watched_s: float = _WATCH_S) -> str:
    """Sentence on whether a process still runs after a request, by its CPU time. Blocks for a second."""
    before_ns = cpu_time_ns(pid)
    time.sleep(watched_s)
    now_ns, stat = cpu_time_ns(pid), stat_of(pid)
    if stat is None or stat.state in "ZX":
        return "The process has since ended. If nothing else explains this, the request is the likely cause."
    if stat.state in "Tt":
        return "The process is stopped (by SIGSTOP or a debugger)."
    if before_ns is None or now_ns is None:
        return "The operating system does not show whether the process is still running; check its log."
    if now_ns == before_ns:
        return (f"None of its threads ran in the last {watched_s:g} s: the process is waiting or hanging. gputop's "
                "request may be the cause; check the job's log.")
    return (f"Its threads are running ({(now_ns - before_ns) / 1e6:.0f} ms of CPU time in the last {watched_s:g} s).")


def silent_text(source: str, name: str) -> str:
    """Python's text that runs ``source``, in a namespace of its own, and silent; for both ways of running it.

    It runs in the job's main module, which may have names of its own for ``compile`` or ``exec``, as nanoGPT has, and
    may be iterating over them: it looks them up elsewhere, and binds none.
    """
    return (f"try:\n (lambda b: b.exec(b.compile(b.bytes.fromhex('{source.encode().hex()}'), '{name}', 'exec'), "
            f"{{'__name__': '{name}'}}))(__import__('builtins'))\nexcept Exception:\n pass\n")


@contextlib.contextmanager
def running_in(process: target.Target, text: str) -> Iterator[None]:
    """Request the process to run ``text``, in the way its Python supports. Remote execution that has not run by the
    end of the block is withdrawn; a pending call cannot be withdrawn, but finds that it is too late."""
    with remote_exec.memory_of(process.pid) as memory:
        target.check_same(process)
        slot = in_time(process.pid, memory, lambda duplicate, _: remote_exec.find_slot(process.pid, duplicate))
        if slot is None:
            _add_pending_call(process, memory, text)
            yield
            return
        requested = threading.Event()

        def request(duplicate: int, _: Deadline) -> None:
            remote_exec.request(duplicate, slot, script)
            requested.set()

        with _script(process, text) as script:
            try:
                in_time(process.pid, memory, request)
                yield
            finally:
                if requested.is_set():
                    in_time(process.pid, memory, lambda duplicate, _: remote_exec.withdraw(duplicate, slot))


@contextlib.contextmanager
def _script(process: target.Target, text: str) -> Iterator[Path]:
    """A file in the process's own /tmp, for the time of the block; yields its path as the process sees it. The job's
    user may have made that root, a link for /tmp included, which would lead into the host."""
    name = f"gputop-{environment.new_token()}.py"
    with contextlib.ExitStack() as stack:
        with os_errors_as(f"cannot write a script to {_SCRIPTS} of process {process.pid}",
                          f"The script needs a few kilobytes there, and {_SCRIPTS} must not be a link."):
            # Kept open: after the process has ended there is no other way into its container.
            folder = stack.enter_context(folder_of_process(process.pid, _SCRIPTS))
            file = as_process.with_rights(process.pid, process.uid, lambda: folder.create(name))
            stack.callback(folder.remove, name)
            with open(file, "w") as script:  # noqa: PTH123  a descriptor
                script.write(text)
        yield _SCRIPTS / name


def _add_pending_call(process: target.Target, memory: int, text: str) -> None:
    target.check_machine()
    functions = in_time(process.pid, memory,
                        lambda _, __: addresses_in(process.pid, ("Py_AddPendingCall", "PyRun_SimpleString")))
    # A pending call is int (*)(void *); int PyRun_SimpleString(const char *) fits that.
    status = call_with_text(process.pid, memory, functions["Py_AddPendingCall"],
                            functions["PyRun_SimpleString"], text.encode())
    if status != 0:
        raise GputopError(f"process {process.pid} has a full queue of pending calls",
                          "Its main thread has not run Python for a long time: it is in native code or hanging.")


def _wait_for_listener(pid: int, before: set[int]) -> Announcement | None:
    """Wait until a process in a network namespace of its own, from which no announcement arrives, listens with sockets
    other than ``before``, and check that the server is reachable."""
    deadline = time.monotonic() + ANSWER_TIMEOUT_S
    while time.monotonic() < deadline:
        if _listening(pid) - before:
            discovery = find_servers([pid])
            for server in discovery.servers:
                if server.pid == pid:
                    return Announcement(server.address, f"profiler server at {server.address} (process {pid})")
            if discovery.notes:
                raise GputopError(discovery.notes[0], "The server was started anyway.")
        time.sleep(_POLL_PERIOD_S)
    return None


def _listening(pid: int) -> set[int]:
    """The inodes of the sockets that it listens on at all interfaces, as profiler servers do."""
    held = sockets.holders(_PROC, {listener.inode for listener in sockets.listeners(_PROC, pid, 0)})
    return {inode for inode, pids in held.items() if pid in pids}


# -- what the process announces: its server's address, or why it has none ------------------------

_LONGEST_BYTES = 4096


class Announcement(Struct, frozen=True):
    """``address`` is None where no server could be started; ``line`` is the whole message."""

    address: str | None
    line: str


class Announcements:
    """Receives what :mod:`gputop.launch.inside.gputop_serve` tells under ``token``, on a thread of its own.

    The socket has a name in the kernel, so no file is left behind. The kernel authenticates the sender;
    announcements of users other than root and ``user`` (default: gputop's own user) are ignored, and those of servers
    that the sender's user does not have.
    """

    def __init__(self, token: str, user: int | None = None) -> None:
        self._users = {0, os.getuid() if user is None else user}
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._socket.bind(socket_name("run", token))

    def start(self, on_announcement: Callable[[Announcement], None]) -> None:
        threading.Thread(target=self._receive, args=(on_announcement,), name="gputop-announcements",
                         daemon=True).start()

    def receive(self, timeout_s: float) -> Announcement | None:
        """The next announcement, instead of :meth:`start`; None if none comes within ``timeout_s``."""
        self._socket.settimeout(timeout_s)
        with contextlib.suppress(TimeoutError, BlockingIOError):
            return self._next()
        return None

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _receive(self, on_announcement: Callable[[Announcement], None]) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                on_announcement(self._next())

    def _next(self) -> Announcement:
        """Raises OSError."""
        while True:
            data, sender, _ = sockets.receive(self._socket, _LONGEST_BYTES)
            if sender is None or sender[1] not in self._users:
                continue
            with contextlib.suppress(ValueError, KeyError, TypeError):
                message = parse(data)
                address, line = message["address"], printable(str(message["line"]))
                if isinstance(address, str) and process_of(address) is not None:
                    address = f"pid:{sender[0]}"  # in a PID namespace of its own it knows another number
                elif address is not None and not _is_served_by(address, sender[1]):
                    continue
                return Announcement(None if address is None else printable(str(address)), line)


def _is_served_by(address: object, uid: int) -> bool:
    """Return whether a user listens at an address of this machine's loopback: gputop captures there without a question,
    and a job may announce the server of another user, or another machine."""
    try:
        host, port = split_address(parse_address(str(address)))
    except (GputopError, ValueError):
        return False
    return host == "127.0.0.1" and sockets.listening_uids(_PROC, host, port) == {uid}

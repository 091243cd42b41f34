"""Starting a profiler server in a process that has been running without one.

The process's own interpreter runs :mod:`gputop.launch.inside.gputop_serve`, in its main thread, at the next point
where Python itself would run a signal handler: no lock is held there that matters, and nothing else is interrupted.
It is asked by ``sys.remote_exec`` where its Python has that (3.14), else by ``Py_AddPendingCall``, which a thread of
the process that sleeps is made to call (:mod:`gputop.launch.inject`).
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from gputop.errors import GputopError
from gputop.launch import environment, target
from gputop.launch.announcements import Announcement, Announcements
from gputop.launch.elf import addresses_in
from gputop.launch.inject import call_with_text
from gputop.profiler.discovery import find_servers
from gputop.profiler.probe import probe
from gputop.text import printable

PATIENCE_S = 30.0  # until the process must have come to it; then it lets be
_REMOTE_EXEC_MINOR = 14
_LOOK_PERIOD_S = 1.0


def serving(pid: int) -> str | None:
    """The address of the profiler server that a process has already; None without one."""
    return next((server.address for server in find_servers([pid]).servers if server.pid == pid), None)


def start_server(process: target.Target, port: int = 0) -> Announcement:
    """Start one; ``port`` 0 is any. Returns what the process told, its server probed. Raises GputopError."""
    token = environment.new_token()
    listen = "local" if process.same_network else "all"  # the loopback of another network is out of reach
    source = (environment.INSIDE / "gputop_serve.py").read_text()
    source += f"\nserve_now({token!r}, {port}, {listen!r}, {time.time() + PATIENCE_S})\n"
    with contextlib.ExitStack() as stack:
        announcements = stack.enter_context(contextlib.closing(Announcements(token, lambda _: None)))
        if process.minor is not None and process.minor >= _REMOTE_EXEC_MINOR:
            stack.enter_context(_remote_exec(process, source))
        else:
            _pending_call(process, source)
        told = announcements.receive(PATIENCE_S) if process.same_network else _found(process.pid)
    if told is None:
        raise GputopError(
            f"process {process.pid} has not come to it within {PATIENCE_S:.0f} s: its main thread does not run Python, "
            "but native code or nothing at all",
            f"py-spy dump --pid {process.pid} shows where it is. The request has lapsed; nothing was changed.")
    if told.address is None:
        raise GputopError(told.line, "The job itself goes on.")
    probe(told.address)
    return told


def _found(pid: int) -> Announcement | None:
    """For a process in a network of its own, which what it tells cannot leave: look whether its server answers."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        discovery = find_servers([pid])
        for server in discovery.servers:
            if server.pid == pid:
                return Announcement(server.address, f"profiler server at {server.address} (process {pid})")
        if discovery.notes:
            raise GputopError(discovery.notes[0], "Its server has been started all the same.")
        time.sleep(_LOOK_PERIOD_S)
    return None


def _pending_call(process: target.Target, source: str) -> None:
    target.check_machine()
    functions = addresses_in(process.pid, ("Py_AddPendingCall", "PyRun_SimpleString"))
    # int (*)(void *) is what a pending call is, and int PyRun_SimpleString(const char *) can be one.
    text = (f"try:\n exec(compile(bytes.fromhex('{source.encode().hex()}'), 'gputop_serve', 'exec'), "
            "{'__name__': 'gputop_serve'})\nexcept Exception:\n pass\n")
    status = call_with_text(process.pid, functions["Py_AddPendingCall"], functions["PyRun_SimpleString"],
                            text.encode())
    if status != 0:
        raise GputopError(f"process {process.pid} has a full queue of pending calls",
                          "Its main thread has not run Python for long; try again when it does.")


@contextlib.contextmanager
def _remote_exec(process: target.Target, source: str) -> Iterator[None]:
    """Ask through the process's own interpreter, since only one of the same version can; within the block its
    script lies in the process's own /tmp."""
    folder = Path(f"/proc/{process.pid}/root/tmp")
    try:
        with tempfile.NamedTemporaryFile("w", suffix=".py", prefix="gputop-", dir=folder, delete=False) as script:
            script.write(source)
    except OSError as error:
        raise GputopError(f"no script can be put into /tmp of process {process.pid}: {error.strerror}",
                          "It needs a few kilobytes there.") from None
    path = Path(script.name)
    try:
        if os.geteuid() == 0:
            os.chown(path, Path(f"/proc/{process.pid}").stat().st_uid, -1)
        code = "import sys; sys.remote_exec(int(sys.argv[1]), sys.argv[2])"
        command = [f"/proc/{process.pid}/exe", "-I", "-c", code, str(process.pid), f"/tmp/{path.name}"]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=PATIENCE_S,
                              check=False)
        if done.returncode != 0:
            said = printable((done.stderr.strip().splitlines() or ["no reason given"])[-1])
            raise GputopError(f"Python's remote execution in process {process.pid} failed: {said}",
                              "Where it is switched off (PYTHON_DISABLE_REMOTE_DEBUG, -X disable-remote-debug), start "
                              "the job anew with gputop run.")
        yield
    except (OSError, subprocess.TimeoutExpired) as error:
        raise GputopError(f"the interpreter of process {process.pid} cannot be run: {error}", "") from None
    finally:
        path.unlink(missing_ok=True)

"""Processes of TensorFlow, and of PyTorch, for tests, forked from one that has imported it: each import takes three
seconds of a CPU.

``start`` runs a script or a module of the tests in a process of its own, as ``python SCRIPT ARGUMENTS`` does. Whoever
looks at the process (/proc, py-spy) sees the command and the environment that it was started with.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
_MAX_REQUEST_BYTES = 1 << 17
_RUNS = -1  # in the place of an exit status
_ROOM_BYTES = 1 << 15  # for the command, and for the environment, of a process that is forked
# PyTorch without torch.compile, unless the script that imports it so is told "plain".
WITHOUT_COMPILE = """
import sys, types
import torch
def leave_out(name, **members):
    module = sys.modules["torch." + name] = types.SimpleNamespace(**members)
    setattr(torch, name, module)

if sys.argv[1] != "plain":
    leave_out("_dynamo", disable=lambda function, *_, **__: function, graph_break=lambda *_, **__: None,
              trace_rules=types.SimpleNamespace(clear_lru_cache=lambda: None))
    leave_out("_inductor", config=types.SimpleNamespace(triton=types.SimpleNamespace(cudagraphs=False)))
    sys.modules["torch._inductor.config"] = torch._inductor.config
"""
TENSORFLOW = "import tensorflow as tf; tf.keras.Sequential"  # which loads Keras


class Forked:
    """A process that was forked; what tests need of :class:`subprocess.Popen`."""

    def __init__(self, command: Sequence[str], environ: dict[str, str], stderr: int | None = None,
                 imports: str = TENSORFLOW) -> None:
        """``stderr``: a descriptor; None: a pipe as for the others. ``imports``: what the process that forks ran."""
        self._server = _server(command[0], imports)
        inputs, outputs, errors = os.pipe(), os.pipe(), os.pipe()
        theirs = [inputs[0], outputs[1], errors[1]]
        self.stdin, self.stdout, self.stderr = os.fdopen(inputs[1], "w"), os.fdopen(outputs[0]), os.fdopen(errors[0])
        self._status: int | None = None
        try:
            self.pid = self._server.ask({"command": command, "environ": environ},
                                        theirs if stderr is None else [*theirs[:2], stderr])
        finally:
            for fd in theirs:
                os.close(fd)

    def poll(self) -> int | None:
        """Exit status, negative after a signal; None while it runs."""
        if self._status is None:
            status = self._server.ask({"ended": self.pid})
            self._status = None if status == _RUNS else os.waitstatus_to_exitcode(status)
        return self._status

    def wait(self, timeout_s: float = 60.0) -> int:
        """Exit status; raises TimeoutError if it goes on for longer than so many seconds."""
        if self.poll() is None:
            watched = os.pidfd_open(self.pid)
            try:
                if not select.select([watched], [], [], timeout_s)[0]:
                    raise TimeoutError
            finally:
                os.close(watched)
        status = self.poll()
        assert status is not None
        return status

    def communicate(self, text: str = "") -> tuple[str, None]:
        """Write a text, and return the output to its end."""
        with contextlib.suppress(BrokenPipeError):
            self.stdin.write(text)
            self.stdin.close()
        out = self.stdout.read()
        self.stdout.close()
        self.stderr.close()
        self.wait()
        return out, None

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


def start(script: Path, arguments: Sequence[str], environ: dict[str, str], stderr: int | None = None) -> Forked:
    """Run ``python SCRIPT ARGUMENTS`` with an environment."""
    return Forked([sys.executable, str(script), *arguments], environ, stderr)


class _Server:
    """The process that forks. It ends with this one."""

    def __init__(self, python: str, imports: str) -> None:
        self._lock = threading.Lock()
        self._connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            subprocess.Popen(
                [python, str(Path(__file__).resolve()), str(theirs.fileno()), imports, "-" * _ROOM_BYTES],
                stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()],
                env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1", "PYTHONSAFEPATH": "1",
                     "PYTHONPATH": str(ROOT), "ROOM": "-" * _ROOM_BYTES})

    def ask(self, request: dict[str, Any], fds: Sequence[int] = ()) -> int:
        with self._lock:
            socket.send_fds(self._connection, [json.dumps(request).encode()], fds)
            return int(self._connection.recv(64))


_server = functools.cache(_Server)


def _serve(connection: socket.socket, imports: str) -> None:
    """Fork for each request, until the connection ends."""
    exec(imports, {})
    while True:
        data, fds, *_ = socket.recv_fds(connection, _MAX_REQUEST_BYTES, 3)
        if not data:
            return
        request = json.loads(data)
        if "ended" in request:
            pid, status = os.waitpid(request["ended"], os.WNOHANG)
            connection.sendall(str(status if pid else _RUNS).encode())
            continue
        pid = os.fork()
        if not pid:
            connection.close()
            _become(request["command"], request["environ"], fds)
        for fd in fds:
            os.close(fd)
        connection.sendall(str(pid).encode())


def _become(command: list[str], environ: dict[str, str], fds: Sequence[int]) -> None:
    """Run the script that a command names, with these descriptors as standard input, output and error."""
    for number, fd in enumerate(fds):
        os.dup2(fd, number)
        os.close(fd)
    os.environ.clear()
    os.environ.update(environ)
    _show(command, [f"{name}={value}" for name, value in environ.items()])
    sys.argv[:] = command[1:]
    status = 1
    try:
        runpy.run_path(command[1], run_name="__main__")
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001  as Python does at its end
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(status)


def _show(*areas: Sequence[str]) -> None:
    """Write the command and the environment to where /proc reads them, over those that the process began with."""
    numbers = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    for words, first in zip(areas, (45, 47), strict=True):  # arg_start, arg_end, env_start, env_end of proc(5)
        begin, end = int(numbers[first]), int(numbers[first + 1])
        text = os.fsencode("\0".join(words))
        assert len(text) < end - begin, "there is no room for the command or the environment"
        ctypes.memmove(begin, text.ljust(end - begin, b"\0"), end - begin)


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])), sys.argv[2])

"""Programs that are run for what they print, here or by the system's ssh on another node, with an end to both time
and bytes."""

from __future__ import annotations

import errno
import os
import select
import selectors
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from typing import IO

from msgspec import Struct

from gputop.core.errors import GputopError
from gputop.text.units import printable

_ERROR_BYTES = 1 << 16  # of stderr that are kept
_MAX_ERROR_BYTES = 8 << 20  # a program that says more there is ended
_ERROR_CHARS = 300
_PIECE_BYTES, _PIECES = 1 << 16, 16
_FOLLOW_S = 0.5
NO_SUCH_PROGRAM = 127  # the shell's status


class Ended(Struct, frozen=True):
    """End of a program. ``error``: the end of what it said on stderr, in one line."""

    out: bytes
    error: str
    status: int
    in_time: bool
    in_bounds: bool  # it did not print more than was allowed


class ErrorTail:
    """The end of what a program says on stderr, read as it comes: a flood takes neither memory nor a disk.

    A thread reads until the program and its children have closed the pipe, or :meth:`close`.
    """

    def __init__(self, stream: IO[bytes], on_flood: Callable[[], object] = lambda: None, *,
                 follow: bool = True) -> None:
        """``stream``: the pipe, which is closed here. ``on_flood``: called once more than 8 MiB have come. Without
        ``follow`` no thread reads, only :meth:`text`: a flood fills the pipe and holds the program up."""
        self._stream, self._on_flood = stream, on_flood
        self._lock, self._closed = threading.Lock(), threading.Event()
        self._tail, self._bytes = b"", 0
        os.set_blocking(stream.fileno(), False)
        self._follows = follow
        if follow:
            threading.Thread(target=self._follow, name="gputop-stderr", daemon=True).start()

    @property
    def is_flood(self) -> bool:
        return self._bytes > _MAX_ERROR_BYTES

    def text(self) -> str:
        """The last lines so far, in one line; all of them once the program has ended."""
        self._read()
        lines = [line for line in self._tail.splitlines() if line.strip()]
        return printable(b" ".join(lines[-3:]))[-_ERROR_CHARS:]

    def close(self) -> None:
        """Read no more. The thread, which may wait for the pipe, closes it."""
        self._closed.set()
        if not self._follows:
            self._stream.close()

    def _follow(self) -> None:
        waiting = select.poll()
        waiting.register(self._stream.fileno(), select.POLLIN)
        while not self._closed.is_set():
            if waiting.poll(1000 * _FOLLOW_S) and not self._read():
                break
            if self.is_flood:
                self._on_flood()
        with self._lock:
            self._stream.close()

    def _read(self) -> bool:
        """Take what is there; False at its end."""
        with self._lock:
            for _ in range(_PIECES):
                if self._stream.closed:
                    return False
                try:
                    piece = os.read(self._stream.fileno(), _PIECE_BYTES)
                except BlockingIOError:
                    return True
                if not piece:
                    return False
                self._tail = (self._tail + piece)[-_ERROR_BYTES:]
                self._bytes += len(piece)
        return True


def run_program(words: Sequence[str], timeout_s: float, max_bytes: int) -> Ended:
    """Run a program until it ends, ``timeout_s`` have passed, or it has printed more than ``max_bytes``; it is then
    killed. Raises OSError where it cannot start.

    Processes that the program itself started may go on: they are not waited for, even where they hold the pipe open.
    """
    process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                               env={**os.environ, "LC_ALL": "C"})
    assert process.stdout is not None and process.stderr is not None
    errors = ErrorTail(process.stderr, process.kill)
    until_s = time.monotonic() + timeout_s
    try:
        out, in_time = _output(process, until_s, max_bytes)
        if in_time and len(out) <= max_bytes:
            process.wait(max(0.0, until_s - time.monotonic()))
    except subprocess.TimeoutExpired:
        in_time = False
    finally:
        process.kill()  # nothing where it has ended
        process.stdout.close()
        process.wait()
        error = errors.text()
        errors.close()
    return Ended(out, error, process.returncode, in_time, len(out) <= max_bytes and not errors.is_flood)


def _output(process: subprocess.Popen[bytes], until_s: float, max_bytes: int) -> tuple[bytes, bool]:
    """Read what it prints until it closes the pipe, or a byte too many; and whether it did so in time."""
    assert process.stdout is not None
    out = bytearray()
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while len(out) <= max_bytes:
            if not selector.select(max(0.0, until_s - time.monotonic())):
                return bytes(out), False
            piece = os.read(process.stdout.fileno(), min(1 << 16, max_bytes + 1 - len(out)))
            if not piece:
                break
            out += piece
    return bytes(out), True


def run_on(login: str, login_port: int | None, command: list[str], timeout_s: float, max_bytes: int) -> bytes:
    """Return what a program prints, here or, with ``login``, on that node by ssh.

    Raises FileNotFoundError where there is no such program, OSError, or GputopError.
    """
    words = command
    if login:
        port = [] if login_port is None else ["-p", str(login_port)]
        words = ["ssh", "-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=5", "-o", "ClearAllForwardings=yes",
                 "-o", "ForwardAgent=no", *port, "--", login, *command]
    ended = run_program(words, timeout_s, max_bytes)
    if not ended.in_bounds:
        raise GputopError(f"{command[0]} printed more than {max_bytes / 1e6:.0f} MB")
    if login and ended.status == NO_SUCH_PROGRAM:
        raise FileNotFoundError(errno.ENOENT, ended.error, command[0])
    if ended.status != 0:
        reason = ended.error or f"status {ended.status}"
        raise GputopError(f"{command[0]} " + (f"failed: {reason}" if ended.in_time
                                              else f"did not finish within {timeout_s:.0f} s"))
    return ended.out

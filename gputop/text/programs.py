"""Programs that are run for what they print, here or by the system's ssh on another node, with an end to both time
and bytes."""

from __future__ import annotations

import contextlib
import errno
import os
import selectors
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, NamedTuple

from gputop.core.errors import GputopError
from gputop.core.files import unnamed_file
from gputop.text.units import printable

_ERROR_BYTES = 1 << 16
_ERROR_CHARS = 300
NO_SUCH_PROGRAM = 127  # the shell's status


class Ended(NamedTuple):
    """End of a program. ``error``: the end of what it said on stderr, in one line."""

    out: bytes
    error: str
    status: int
    in_time: bool
    in_bounds: bool  # it did not print more than was allowed


def run_program(words: Sequence[str], timeout_s: float, max_bytes: int,
                started: Callable[[subprocess.Popen[bytes]], None] = lambda process: None) -> Ended:
    """Run a program until it ends, ``timeout_s`` have passed, or it has printed more than ``max_bytes``; it is then
    killed. Raises OSError where it cannot start.

    ``started`` is given the process, so that the caller can end it. Processes that the program itself started may go
    on: they are not waited for, even where they hold the pipe open.
    """
    with unnamed_file(Path(tempfile.gettempdir())) as err:
        process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=err,
                                   env={**os.environ, "LC_ALL": "C"})
        until_s = time.monotonic() + timeout_s
        try:
            started(process)
            out, in_time = _output(process, until_s, max_bytes)
            if in_time and len(out) <= max_bytes:
                process.wait(max(0.0, until_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            in_time = False
        finally:
            process.kill()  # nothing where it has ended
            assert process.stdout is not None
            process.stdout.close()
            process.wait()
        error = last_lines(err)
    return Ended(out, error, process.returncode, in_time, len(out) <= max_bytes)


def last_lines(err: IO[bytes]) -> str:
    """The end of what a program said into a file, in one line."""
    with contextlib.suppress(OSError):
        err.seek(max(0, err.seek(0, os.SEEK_END) - _ERROR_BYTES))
    lines = [line for line in err.read(_ERROR_BYTES).splitlines() if line.strip()]
    return printable(b" ".join(lines[-3:]))[-_ERROR_CHARS:]


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
        words = ["ssh", "-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=5", *port, "--", login, *command]
    ended = run_program(words, timeout_s, max_bytes)
    if not ended.in_bounds:
        raise GputopError(f"{command[0]} printed more than {max_bytes / 1e6:.0f} MB")
    if login and ended.status == NO_SUCH_PROGRAM:
        raise FileNotFoundError(errno.ENOENT, ended.error, command[0])
    if ended.status != 0:
        reason = ended.error or f"status {ended.status}"
        raise GputopError(f"{command[0]} " + (f"failed: {reason}" if ended.in_time
                                              else f"did not end within {timeout_s:.0f} s"))
    return ended.out

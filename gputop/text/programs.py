"""Programs that are run for what they print, here or by the system's ssh on another node, with an end to both time
and bytes."""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from gputop.core.errors import GputopError
from gputop.core.files import unnamed_file
from gputop.text.units import printable

_ERROR_BYTES = 1 << 16
_ERROR_CHARS = 300
NO_SUCH_PROGRAM = 127  # the shell's status


class Ended(NamedTuple):
    """How a program ended. ``error``: the end of what it said on stderr, in one line."""

    out: bytes
    error: str
    status: int
    in_time: bool
    in_bounds: bool  # it did not print more than was allowed


def run_program(words: Sequence[str], timeout_s: float, max_bytes: int,
                started: Callable[[subprocess.Popen[bytes]], None] = lambda process: None) -> Ended:
    """Run it to its end, or to that of the time or of the bytes it may print. Raises OSError where it cannot start.

    ``started`` is given the process, so that somebody else can end it.
    """
    with unnamed_file(Path(tempfile.gettempdir())) as err:
        process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=err,
                                   env={**os.environ, "LC_ALL": "C"})
        timer = threading.Timer(timeout_s, process.kill)
        timer.start()
        try:
            started(process)
            assert process.stdout is not None
            out = process.stdout.read(max_bytes + 1)
            if len(out) > max_bytes:
                process.kill()
            process.stdout.close()
            process.wait()
        finally:
            in_time = timer.is_alive()
            timer.cancel()
        with contextlib.suppress(OSError):
            err.seek(max(0, err.seek(0, os.SEEK_END) - _ERROR_BYTES))
        lines = [line for line in err.read(_ERROR_BYTES).splitlines() if line.strip()]
    error = printable(b" ".join(lines[-3:]))[-_ERROR_CHARS:]
    return Ended(out, error, process.returncode, in_time, len(out) <= max_bytes)


def run_on(login: str, login_port: int | None, command: list[str], timeout_s: float, max_bytes: int) -> bytes:
    """What a program prints, here or, with ``login``, on that node by ssh.

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
        raise FileNotFoundError(2, ended.error, command[0])
    if ended.status != 0:
        why = ended.error or f"status {ended.status}"
        raise GputopError(f"{command[0]} " + (f"failed: {why}" if ended.in_time
                                              else f"did not end within {timeout_s:.0f} s"))
    return ended.out

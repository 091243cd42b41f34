"""Doors behind which something is wrong, each in another way: what the campaign must notice."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path

from gputop.core.errors import GputopError
from tests.campaign.target import Target


def _fine(folder: Path, data: bytes) -> None:
    (folder / "inside").write_bytes(data)
    print("fine: 1 µs, ✓")
    raise GputopError("damaged")


def _warned(folder: Path, data: bytes) -> None:
    warnings.warn_explicit("overflow", RuntimeWarning, "/x/gputop/y.py", 1)


def _thread(folder: Path, data: bytes) -> None:
    thread = threading.Thread(target=lambda: 1 / 0)
    thread.start()
    thread.join()


def _connection(folder: Path, data: bytes) -> None:
    with socket.socket() as sock, contextlib.suppress(OSError):
        sock.setblocking(False)
        sock.connect(("192.0.2.1", 9))


def _endless(folder: Path, data: bytes) -> None:
    while True:
        pass


def _slow(folder: Path, data: bytes) -> None:
    began_s = time.process_time()
    while time.process_time() - began_s < 0.3:
        pass


PLANTED: dict[str, tuple[Callable[[Path, bytes], object], str]] = {
    "fine": (_fine, ""),
    "traceback": (lambda folder, data: {}["x"], "traceback: KeyError"),
    "thread": (_thread, "traceback in a thread: ZeroDivisionError"),
    "warning": (_warned, "warning: RuntimeWarning"),
    "escape": (lambda folder, data: print("a\x1b]0;title\x07"), "unprintable on the terminal: '\\x1b'"),
    "direction": (lambda folder, data: print("a\u202eb", file=sys.stderr), "unprintable on the terminal: '\\u202e'"),
    "outside": (lambda folder, data: (folder.parent.parent / "x").write_text("x"), "opened outside: "),
    "bait": (lambda folder, data: (folder.parent / "bait" / "secret").read_text(), "opened outside: bait"),
    "removed": (lambda folder, data: Path("/nonexistent/x").unlink(missing_ok=True), "os.remove outside: "),
    "connection": (_connection, "connected to '192.0.2.1'"),
    "process": (lambda folder, data: subprocess.run(["true"], check=False), "subprocess.Popen: "),
    "memory": (lambda folder, data: len(os.urandom(1) * (400 << 20)), "memory: "),
    "slow": (_slow, "slow: 0."),
    "killed": (lambda folder, data: os.kill(os.getpid(), signal.SIGSEGV), "died: "),
    "endless": (_endless, "hang: more than 1 s of CPU"),
}
_SEED = b"what is read without harm"


def _except_seed(run: Callable[[Path, bytes], object]) -> Callable[[Path, bytes], object]:
    return lambda folder, data: None if data == _SEED else run(folder, data)


TARGETS = {name: Target(name, "bytes", lambda _: [_SEED], _except_seed(run), most_cpu_s=0.2 if name == "slow" else 30.0)
           for name, (run, _) in PLANTED.items()}

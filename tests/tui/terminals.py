"""Real pseudo-terminals with a program in them, and what they show."""

from __future__ import annotations

import codecs
import contextlib
import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from gputop.tui.terminal.cell_grid import CellGrid
from tests.waiting import PATIENCE_S

_TORN = re.compile(r"(?:\x1b(?:\[[0-?]*[ -/]*|\][^\x07\x1b]*)?)?\Z")


class Terminal:
    """A pseudo-terminal; the program in it is the leader of its session. Nothing is read unless asked for."""

    def __init__(self, size: tuple[int, int], command: Sequence[str], env: dict[str, str] | None = None,
                 pass_fds: Sequence[int] = (), answers: bool = False) -> None:
        """``answers``: reports the place of the cursor on request, as terminals do."""
        # Not pty.fork: where gRPC runs in this process, its handlers for a fork can deadlock or abort the child.
        self.fd, self.theirs = pty.openpty()
        self.raw = bytearray()  # everything it was sent
        self.cells = CellGrid(*(max(1, n) for n in size))
        self.answers = answers
        self._answered = 0
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self._torn = ""  # the beginning of a sequence whose end has not been read
        self.resize(*size)
        self.attributes = termios.tcgetattr(self.theirs)
        tty = os.ttyname(self.theirs)  # the first terminal that the leader of a new session opens becomes its own
        self.program = subprocess.Popen(
            ["/bin/sh", "-c", f'exec "$@" <{tty} >{tty} 2>&1', "sh", *command],
            env={**os.environ, "TERM": "xterm-256color", "COLORTERM": "truecolor", **(env or {})},
            start_new_session=True, pass_fds=pass_fds)

    def resize(self, columns: int, rows: int) -> None:
        fcntl.ioctl(self.fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        if columns and rows:
            self.cells.resize(columns, rows)

    def press(self, keys: str) -> None:
        os.write(self.fd, keys.encode())

    def read(self, timeout_s: float) -> bool:
        """Take what is there; False where nothing came."""
        if not select.select([self.fd], [], [], timeout_s)[0]:
            return False
        try:
            data = os.read(self.fd, 65536)
        except OSError:  # the last writer is gone
            return False
        self.take(data)
        asked = self.raw.count(b"\x1b[6n")
        if self.answers and asked > self._answered:
            self._answered = asked
            x, y = self.cells.cursor
            self.press(f"\x1b[{y + 1};{x + 1}R")
        return bool(data)

    def take(self, data: bytes) -> None:
        """Show what was read."""
        self.raw += data
        text = self._torn + self._decode(data)
        whole = len(text) - len(_TORN.search(text)[0])  # type: ignore[index]
        self._torn = text[whole:]
        self.cells.feed(text[:whole])

    @property
    def text(self) -> str:
        """What stands on the screen."""
        self.cells.update()
        return "\n".join("".join(row).rstrip() for row in self.cells._chars)

    def until(self, seen: str | Callable[[str], object]) -> str:
        """Read until the screen shows a text, or something is true of it; returns the screen."""
        holds = (lambda text: seen in text) if isinstance(seen, str) else seen
        deadline_s = time.monotonic() + PATIENCE_S
        while not holds(self.text):
            assert time.monotonic() < deadline_s, f"not seen: {seen!r} on\n{self.text}\n{bytes(self.raw[-1500:])!r}"
            assert self.program.poll() is None or self.read(0), f"it has ended:\n{self.text}"
            self.read(0.5)
        return self.text

    def ended(self) -> int:
        """Wait for the program's end without reading, then take what it left; its exit status."""
        status = self.program.wait(PATIENCE_S)
        while self.read(0):
            pass
        return status

    def given_back(self) -> bool:
        """Whether the terminal is as it was: line discipline, screen, cursor, mouse, paste, keyboard."""
        sent = bytes(self.raw)

        def last(on: bytes, off: bytes) -> bool:
            return sent.rfind(off) > sent.rfind(on) or on not in sent

        modes = (1049, 1000, 1003, 1006, 2004, 1004)
        pairs = [(f"\x1b[?{mode}h".encode(), f"\x1b[?{mode}l".encode()) for mode in modes]
        return (termios.tcgetattr(self.theirs) == self.attributes and all(last(on, off) for on, off in pairs)
                and last(b"\x1b[?25l", b"\x1b[?25h") and last(b"\x1b[?7l", b"\x1b[?7h")
                and sent.count(b"\x1b[>") <= sent.count(b"\x1b[<u"))

    def close(self) -> None:
        if self.program.poll() is None:
            self.program.kill()
            self.program.wait()
        os.close(self.fd)
        os.close(self.theirs)


@contextlib.contextmanager
def terminal(size: tuple[int, int] = (120, 40), *arguments: str, **more: Any) -> Iterator[Terminal]:
    """``gputop`` with these arguments in a terminal; ``command`` in its place where given."""
    command = more.pop("command", None) or [sys.executable, "-m", "gputop", *arguments]
    there = Terminal(size, command, **more)
    try:
        yield there
    finally:
        there.close()

"""Writing to a terminal without blocking the program.

A terminal may stop reading at any time (a stalled SSH link, the scrollback of tmux, XOFF), and a write to
it then blocks. So a thread of its own writes, one update at a time. A caller with a newer update waits until
:attr:`TerminalWriter.busy` is false, and then sends the newest state.
"""

from __future__ import annotations

import contextlib
import os
import select
import termios
import threading
from collections.abc import Callable

_GIVE_UP_CHECK_PERIOD_S = 0.1  # how often a blocked writer checks whether it has been told to give up


def _reopened(fd: int) -> int:
    """The same terminal opened once more for non-blocking writes; ``fd`` itself where it has no name.

    O_NONBLOCK belongs to the open file description. Set on ``fd`` itself it would also hold for the shell and every
    other program on this terminal, and would stay set.
    """
    flags = os.O_WRONLY | os.O_NOCTTY | os.O_NONBLOCK
    with contextlib.suppress(OSError):
        return os.open(os.ttyname(fd), flags)
    return fd


class TerminalWriter:
    """Writes to the terminal ``fd`` from a daemon thread. What is sent to a terminal that is gone is dropped."""

    def __init__(self, fd: int, drained: Callable[[], None]) -> None:
        """``drained`` is called in the writer's thread each time everything is written."""
        self._given, self._fd = fd, _reopened(fd)
        self._drained = drained
        self._queue: list[bytes] = []
        self._change = threading.Condition()
        self._writing = False
        self._given_up = False
        self._ended = False
        self.gone = False
        threading.Thread(target=self._run, name="gputop-terminal", daemon=True).start()

    @property
    def busy(self) -> bool:
        """Return whether something is still to be written."""
        return (self._writing or bool(self._queue)) and not self.gone

    def send(self, data: bytes) -> None:
        """Write ``data`` after what was sent before; returns at once."""
        with self._change:
            if data and not self._ended and not self.gone:
                self._queue.append(data)
                self._change.notify_all()

    def wait(self, timeout_s: float) -> bool:
        """Wait until everything is written; False where that takes longer than ``timeout_s``."""
        with self._change:
            return self._change.wait_for(lambda: not self.busy, timeout_s)

    def give_up(self, last: bytes) -> None:
        """Drop what the terminal has not taken, from the queue and from the kernel, and write ``last`` instead."""
        with self._change:
            self._given_up = True
            with contextlib.suppress(OSError, termios.error):
                termios.tcflush(self._fd, termios.TCOFLUSH)  # before the last of it is there to be dropped, too
            self._queue[:] = [last]
            self._change.notify_all()

    def close(self) -> None:
        """End the thread once the queue is empty. Does not wait."""
        with self._change:
            self._ended = True
            self._change.notify_all()

    def _run(self) -> None:
        try:
            while self._write_next():
                pass
        except OSError:  # EIO: the terminal has been closed; SIGHUP tells the program
            with self._change:
                self.gone = True
                self._queue.clear()
                self._change.notify_all()
        if self._fd != self._given:
            os.close(self._fd)

    def _write_next(self) -> bool:
        """Write what is in the queue; False at the end."""
        with self._change:
            self._writing = False
            self._change.notify_all()
            self._change.wait_for(lambda: self._queue or self._ended)
            if not self._queue:
                return False
            left = memoryview(b"".join(self._queue))
            self._queue.clear()
            self._writing, self._given_up = True, False
        while left and not self._given_up:
            try:
                left = left[os.write(self._fd, left):]
            except BlockingIOError:
                select.select([], [self._fd], [], _GIVE_UP_CHECK_PERIOD_S)
        with self._change:
            self._writing = bool(self._queue)
        if not self._writing:
            self._drained()
        return True

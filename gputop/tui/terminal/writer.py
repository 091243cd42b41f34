"""The line to the terminal: a writer that cannot hold up the program, and a judgement of how fast it drains.

A terminal may stop reading at any time (a stalled SSH link, the scrollback of tmux, XOFF), and a write to
it then blocks. So writes are made by a thread of their own, one update at a time; whoever has another one
waits until :attr:`TerminalWriter.busy` is over, and sends what is true by then.
"""

from __future__ import annotations

import contextlib
import os
import select
import termios
import threading
import time
from collections.abc import Callable

# A line is slow after so many updates in a row that took so long to land; one long stall does not make it slow.
SLOW_S, SLOW_UPDATES = 0.5, 3
# How long a slow line is spared before the full picture is tried again; doubled each time that was too early.
SPARE_S, SPARE_MAX_S = 120.0, 3600.0
TRIAL_S = 60.0  # slow again within this time: too early
_GIVE_UP_CHECK_PERIOD_S = 0.1  # how often a writer that waits for the terminal sees whether it has been given up


class SlowLinkDetector:
    """Whether the line is slow, with hysteresis, from how long each update took to land. Pure."""

    def __init__(self) -> None:
        self.slow = False
        self.bytes_per_s: float | None = None  # as last seen while the line was full
        self._late = 0
        self._since_s = 0.0
        self._spare_s = SPARE_S

    def landed(self, size_bytes: int, took_s: float, now_s: float) -> bool:
        """An update has reached the terminal, ``now_s`` on any clock. True where :attr:`slow` changed."""
        if took_s >= SLOW_S:
            self._late += 1
            self.bytes_per_s = size_bytes / took_s
            if self.slow:
                self._since_s = now_s
            elif self._late >= SLOW_UPDATES:
                if self._since_s and now_s - self._since_s < TRIAL_S:
                    self._spare_s = min(SPARE_MAX_S, 2 * self._spare_s)
                self.slow, self._since_s = True, now_s
                return True
            return False
        self._late = 0
        if self.slow and now_s - self._since_s >= self._spare_s:
            self.slow, self._since_s = False, now_s
            return True
        if not self.slow and now_s - self._since_s >= TRIAL_S:
            self._spare_s = SPARE_S
        return False


def _opened_anew(fd: int) -> int:
    """The same terminal opened once more, so that writes do not block; ``fd`` itself where it has no name.

    The flag that makes them so belongs to what was opened: set on ``fd`` itself, the shell and
    everything else with this terminal would have it, too, and keep it.
    """
    flags = os.O_WRONLY | os.O_NOCTTY | os.O_NONBLOCK
    with contextlib.suppress(OSError):
        return os.open(os.ttyname(fd), flags)
    return fd


class TerminalWriter:
    """Writes to the terminal ``fd`` from a daemon thread. A terminal that is gone takes everything silently."""

    def __init__(self, fd: int, drained: Callable[[int, float], None]) -> None:
        """``drained(size_bytes, took_s)`` is called in the writer's thread each time all is written."""
        self._given, self._fd = fd, _opened_anew(fd)
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
        """Whether something is still to be written."""
        return (self._writing or bool(self._queue)) and not self.gone

    def send(self, data: bytes) -> None:
        """Write ``data`` after what was sent before; returns at once."""
        with self._change:
            if data and not self._ended and not self.gone:
                self._queue.append(data)
                self._change.notify_all()

    def wait(self, patience_s: float) -> bool:
        """Wait until all is written; False where that took longer than ``patience_s``."""
        with self._change:
            return self._change.wait_for(lambda: not self.busy, patience_s)

    def give_up(self, last: bytes) -> None:
        """Drop what the terminal has not taken, in the queue and in the kernel, and write ``last`` instead."""
        with self._change:
            self._queue[:] = [last]
            self._given_up = True
            self._change.notify_all()
        with contextlib.suppress(OSError, termios.error):
            termios.tcflush(self._fd, termios.TCOFLUSH)

    def close(self) -> None:
        """No more is written once the queue is empty. Does not wait."""
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
            data = b"".join(self._queue)
            self._queue.clear()
            self._writing, self._given_up = True, False
        began_s = time.monotonic()
        left = memoryview(data)
        while left and not self._given_up:
            try:
                left = left[os.write(self._fd, left):]
            except BlockingIOError:
                select.select([], [self._fd], [], _GIVE_UP_CHECK_PERIOD_S)
        with self._change:
            self._writing = bool(self._queue)
        if not self._writing:
            self._drained(len(data), time.monotonic() - began_s)
        return True

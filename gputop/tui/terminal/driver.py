"""Textual's driver for a terminal that may be slow, stalled or gone.

Textual's own driver writes through a thread with a queue of 30 writes. When a terminal stops reading, the queue
fills and the event loop blocks: no samples are shown, and no key is answered, not even q. Here drawing never waits for
the terminal. Frames go into a grid of cells (:mod:`gputop.tui.terminal.cell_grid`). What differs from the screen is
sent once the terminal has taken the update before (:class:`TerminalWriter`): on a slow link frames
are left out, on a stalled one all of them, and the newest is drawn when the link drains.

What the kernel or an SSH connection has buffered counts as written. So an update ends with a query for the cursor's
position (DSR 6), which every terminal answers, and until the answer arrives the update counts as on its way. The
driver does not wait for a terminal that has never answered.
"""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import os
import select
import signal
import sys
import termios
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from textual import constants, events
from textual.geometry import Size
from textual.message import Message

from gputop.core.signal_handlers import FATAL_SIGNALS, EndBySignal, fatal_handlers
from gputop.tui.terminal.cell_grid import CellGrid
from gputop.tui.terminal.textual_private import OpenLinuxDriver

if TYPE_CHECKING:
    from textual.app import App

_CURSOR_QUERY = "\x1b[6n"
_CURSOR_QUERY_PERIOD_S = 1.0
# An answer may be lost, as when a session was detached: after this time the next update is sent without it.
_ANSWER_TIMEOUT_S, _ANSWER_TIMEOUT_MAX_S = 4.0, 60.0
_EXIT_TIMEOUT_S = 0.3  # how long the end may wait for the terminal
_TAKE_OVER_S = 2.0  # how long the first frame stays if nobody says that the app has drawn its own
_LAST_TIMEOUT_S = 2.0  # the same for a signal that ends the process, perhaps because the node is overloaded
# For a terminal that has not taken everything: cancel a torn sequence, end a synchronized frame, reset colors, restore
# modes and screen as LinuxDriver.stop_application_mode does.
_RESTORE = ("\x18\x1b[?2026l\x1b[m\x1b[?2004l\x1b[?7h\x1b[?2048l\x1b[?1000l\x1b[?1003l\x1b[?1015l\x1b[?1006l"
            "\x1b[<u\x1b[?1049l\x1b[?25h\x1b[?1004l")


class WakingEvent(threading.Event):
    """An event that ``select`` can wait for: the file ``wakes`` is readable while it is set."""

    def __init__(self) -> None:
        super().__init__()
        self.wakes, self._wake = os.pipe()

    def set(self) -> None:
        if not self.is_set():
            os.write(self._wake, b"!")
        super().set()

    def clear(self) -> None:
        if self.is_set():
            os.read(self.wakes, 1)
        super().clear()

    def close(self) -> None:
        """Close the files; the event may not be used after that."""
        os.close(self.wakes)
        os.close(self._wake)


class StallProofDriver(OpenLinuxDriver):
    """Draws without ever waiting for the terminal."""

    _heard_size: Size | None = None  # of the terminal; Textual asks before there is a grid

    def __init__(self, app: App[Any], *, debug: bool = False, mouse: bool = True,
                 size: tuple[int, int] | None = None) -> None:
        super().__init__(app, debug=debug, mouse=mouse, size=size)
        # The terminal itself, even where standard error is redirected: gputop 2> log.
        streams = (sys.__stdout__, sys.__stderr__)
        self._out = next((stream.fileno() for stream in streams if stream and stream.isatty()), 2)
        self.cells = CellGrid(*self.terminal_size())
        self._input_exit: WakingEvent | None = None  # the exit_event of the input thread
        self._lock = threading.RLock()  # Textual's input thread and its signal handlers write, too
        self._writer: TerminalWriter | None = None
        self._leaving = False  # from now on only modes are sent, no cells
        self._keeps_first_frame = False  # until the app has drawn all of its own: Textual begins with an empty screen
        self._scheduled = False
        self._retry: asyncio.TimerHandle | None = None
        self._answers = False  # the terminal has answered once
        self._answered = threading.Event()  # cleared while an answer is awaited
        self._answered.set()
        self._asked_s = 0.0
        self._asked_at = (0, 0)  # where the cursor was put
        self._fastest_answer_s = 60.0  # the round trip
        self._answer_timeout_s = _ANSWER_TIMEOUT_S

    # -- life ---------------------------------------------------------------------------------

    def start_application_mode(self) -> None:
        with self._lock:
            self._writer = TerminalWriter(self._out, partial(self._in_loop, self._send))
            self.exit_event = self._input_exit = WakingEvent()
            self._leaving = False
            self._answered.set()
            self.terminal_size()
            self.cells.forget()
        self._handle_fatal_signals()
        super().start_application_mode()
        frame = getattr(self.app, "first_frame", None)
        if frame is not None and frame.taken():
            self.cells.withdraw("\x1b[?1049h")
            self._keeps_first_frame = True
            self.event_loop.call_later(_TAKE_OVER_S, self.take_over)

    def stop_application_mode(self) -> None:
        if self._answers:
            # An answer that arrives after the end would appear as input of the shell.
            self._answered.wait(min(_EXIT_TIMEOUT_S, 2 * self._fastest_answer_s + 0.05))
        self._leaving = True
        super().stop_application_mode()
        self._leave_fatal_signals()

    def close(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.send(self.cells.controls().encode("utf-8", "replace"))
            if not writer.wait(_EXIT_TIMEOUT_S):
                writer.give_up(_RESTORE.encode())
                writer.wait(_EXIT_TIMEOUT_S)
            writer.close()
        super().close()
        input_exit, self._input_exit = self._input_exit, None
        if input_exit is not None:
            input_exit.close()

    def _handle_fatal_signals(self) -> None:
        if threading.current_thread() is threading.main_thread():
            for number, handler in fatal_handlers(self.restore_at_once).items():
                signal.signal(number, handler)

    def _leave_fatal_signals(self) -> None:
        if threading.current_thread() is threading.main_thread():
            for number in FATAL_SIGNALS:
                if isinstance(signal.getsignal(number), EndBySignal):
                    signal.signal(number, signal.SIG_DFL)

    def restore_at_once(self) -> None:
        """Give the terminal back from a signal handler, whatever the rest of the program is doing."""
        self._leaving = True
        if self.attrs_before is not None:
            with contextlib.suppress(OSError, termios.error):
                termios.tcsetattr(self.fileno, termios.TCSANOW, self.attrs_before)
        writer = self._writer
        if writer is not None:
            writer.give_up(_RESTORE.encode())
            writer.wait(_LAST_TIMEOUT_S)

    def on_continue(self) -> None:
        # After a plain SIGSTOP the application mode was never left. Entering it a second time would save the raw
        # terminal's settings as those to restore at the end.
        if self._writer is not None and self.resumes_on_continue:
            self.suspend_application_mode()
        super().on_continue()

    # -- out ----------------------------------------------------------------------------------

    def write(self, data: str) -> None:
        with self._lock:
            size = self._heard_size  # taken between two updates: a signal may come in the middle of one
            if size is not None and (self.cells.width, self.cells.height) != (size.width, size.height):
                self.cells.resize(size.width, size.height)
            self.cells.feed(data)
            if self._scheduled:
                return
            self._scheduled = True
        self._in_loop(self._send)

    def take_over(self) -> None:
        """Draw over the first frame, which stays until then; without one there is nothing to do."""
        if self._keeps_first_frame:
            self._keeps_first_frame = False
            self._send()

    def redraw(self) -> None:
        """Draw the whole screen again, after something else has written on it."""
        with self._lock:
            self.cells.forget()
        self.write("")

    def _send(self) -> None:
        """Send what differs from the screen, if the terminal has taken the update before."""
        with self._lock:
            self._scheduled = False
            writer = self._writer
            if writer is None or writer.busy or self._leaving or self._keeps_first_frame or not self.cells.due:
                return  # where the writer is busy, this is called again when it has drained
            now_s = time.monotonic()
            if not self._answered.is_set():
                left_s = self._asked_s + self._answer_timeout_s - now_s
                if left_s > 0:
                    if self._retry is None:
                        self._retry = self.event_loop.call_later(left_s, self._send_again)
                    return
                self._answer_timeout_s = min(_ANSWER_TIMEOUT_MAX_S, 2 * self._answer_timeout_s)
                self._answered.set()
            data = self.cells.update()
            if self._writer is not writer:  # stopped and continued meanwhile: the grid forgot before this was done
                self.cells.forget()
                self._in_loop(self._send)
                return
            if now_s - self._asked_s >= _CURSOR_QUERY_PERIOD_S:
                data += _CURSOR_QUERY
                self._asked_s, self._asked_at = now_s, self.cells.cursor
                if self._answers:
                    self._answered.clear()
            writer.send(data.encode("utf-8", "replace"))

    def _send_again(self) -> None:
        self._retry = None
        self._send()

    def _in_loop(self, call: Callable[..., None], *args: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended; close() sends the rest
            self.event_loop.call_soon_threadsafe(call, *args)

    # -- in -----------------------------------------------------------------------------------

    def run_input_thread(self) -> None:
        """Post what is typed, until :attr:`exit_event` is set.

        Textual's own thread checks that event ten times a second, which took a tenth of the monitor's CPU time.
        """
        exit_event = self._input_exit
        assert exit_event is not None
        parser = self.input_parser()
        decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        timeouts = 0  # in a row; after two the parser is in no sequence any more
        while not exit_event.is_set():
            timeout_s = constants.ESCAPE_DELAY if timeouts < 2 else None
            ready, _, _ = select.select([self.fileno, exit_event.wakes], (), (), timeout_s)
            timeouts = 0 if ready else timeouts + 1
            if self.fileno in ready:
                typed = b""
                with contextlib.suppress(OSError):
                    typed = os.read(self.fileno, 4096)
                if not typed:  # the terminal is gone: SIGHUP or the thread that draws ends the app
                    exit_event.wait()
                elif text := decode(typed):  # empty while a character is not complete
                    for message in parser.feed(text):
                        self.process_message(message)
            for message in parser.tick():
                self.process_message(message)

    def process_message(self, message: Message) -> None:
        """Consume the terminal's answers in the input thread, and pass everything else to the app."""
        if isinstance(message, events.CursorPosition):
            if (message.x, message.y) == self._asked_at:  # shift+F3 reads like an answer
                self._answers = True
                self._answered.set()
                self._in_loop(self._on_answer, time.monotonic() - self._asked_s)
            return
        if isinstance(message, events.Resize):
            self._heard_size = message.size
        elif isinstance(message, events.Key):
            self._answered.set()  # a user is there: do not wait for an answer that may be lost
        super().process_message(message)

    def _on_answer(self, took_s: float) -> None:
        self._answer_timeout_s = _ANSWER_TIMEOUT_S
        self._fastest_answer_s = min(self._fastest_answer_s, took_s)
        self._send()

    def terminal_size(self) -> tuple[int, int]:
        """The size of the terminal that is drawn on; one that reports 0x0 counts as 80x24."""
        with contextlib.suppress(OSError):
            size = os.get_terminal_size(self._out)
            if size.columns > 0 and size.lines > 0:
                self._heard_size = Size(size.columns, size.lines)
                return size.columns, size.lines
        return super().terminal_size()


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
    """Writes to the terminal ``fd`` from a daemon thread, one update at a time. What is sent to a terminal that is gone
    is dropped.

    A terminal may stop reading at any time (a stalled SSH link, the scrollback of tmux, XOFF), and a write to it then
    blocks. A caller with a newer update waits until :attr:`busy` is false, and then sends the newest state.
    """

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

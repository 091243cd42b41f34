"""Textual's driver for a terminal that may be slow, stalled or gone.

Textual's own writes through a thread with a queue of 30 writes; when a terminal stops reading, the queue
fills and the event loop stands still: no samples are shown, no key is obeyed, not even q. Here nothing
that is drawn waits for the terminal. Frames go into a grid of cells (:mod:`gputop.tui.terminal.cell_grid`), and what
differs from the screen is sent once the line has taken the update before (:mod:`gputop.tui.terminal.writer`): on a
slow line frames are left out, on a stalled one all of them, and the newest is drawn when it drains.

What the kernel or an SSH connection has buffered counts as written, so each update ends with the question
where the cursor is (DSR 6), which every terminal answers: while the answer is out, the update is taken to
be on its way. A terminal that has never answered is not waited for.
"""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import os
import select
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from textual import constants, events
from textual._xterm_parser import XTermParser
from textual.drivers.linux_driver import LinuxDriver
from textual.geometry import Size
from textual.message import Message

from gputop.tui.terminal.cell_grid import CellGrid
from gputop.tui.terminal.writer import SlowLinkDetector, TerminalWriter

if TYPE_CHECKING:
    from textual.app import App

_CURSOR_QUERY = "\x1b[6n"
_CURSOR_QUERY_PERIOD_S = 1.0
# An answer may be lost (a session that was detached): then the next update goes out after this long.
_ANSWER_TIMEOUT_S, _ANSWER_TIMEOUT_MAX_S = 4.0, 60.0
_EXIT_TIMEOUT_S = 0.3  # how long leaving may wait for the terminal
# For a terminal that has not taken all: cancel a torn sequence, end a synchronised frame, no colours, give
# back modes and screen as LinuxDriver.stop_application_mode does.
_RESTORE = ("\x18\x1b[?2026l\x1b[m\x1b[?2004l\x1b[?7h\x1b[?2048l\x1b[?1000l\x1b[?1003l\x1b[?1015l\x1b[?1006l"
            "\x1b[<u\x1b[?1049l\x1b[?25h\x1b[?1004l")


class WakingEvent(threading.Event):
    """An event that who waits for a file can wait for as well: ``wakes`` is readable while it is set."""

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
        """Give the files back; it is not used after that."""
        os.close(self.wakes)
        os.close(self._wake)


class StallProofDriver(LinuxDriver):
    """Draws without ever waiting for the terminal; posts :class:`LinkSpeedChanged` to the app."""

    class LinkSpeedChanged(Message):
        """The line has become slow, or is no longer."""

        def __init__(self, slow: bool) -> None:
            super().__init__()
            self.slow = slow

    def __init__(self, app: App[Any], *, debug: bool = False, mouse: bool = True,
                 size: tuple[int, int] | None = None) -> None:
        super().__init__(app, debug=debug, mouse=mouse, size=size)
        # The screen, even where messages go elsewhere: gputop 2> log.
        streams = (sys.__stdout__, sys.__stderr__)
        self._out = next((stream.fileno() for stream in streams if stream and stream.isatty()), 2)
        self.slow_link = SlowLinkDetector()
        self.cells = CellGrid(*self._get_terminal_size())
        self._ending: WakingEvent | None = None  # the exit_event of an input thread
        self._lock = threading.RLock()  # Textual's input thread writes, too; so do its signal handlers
        self._writer: TerminalWriter | None = None
        self._leaving = False  # only modes are sent any more, no cells
        self._scheduled = False
        self._retry: asyncio.TimerHandle | None = None
        self._answers = False  # the terminal has answered once
        self._answered = threading.Event()  # clear while an answer is out
        self._answered.set()
        self._asked_s = 0.0
        self._asked_at = (0, 0)  # where the cursor was put
        self._sent_bytes = 0  # since the question
        self._quickest_s = 60.0  # an answer took at least so long: the way there and back
        self._answer_timeout_s = _ANSWER_TIMEOUT_S

    # -- life ---------------------------------------------------------------------------------

    def start_application_mode(self) -> None:
        with self._lock:
            self._writer = TerminalWriter(self._out, self._drained)
            self.exit_event = self._ending = WakingEvent()
            self._leaving = False
            self._answered.set()
            self._get_terminal_size()
            self.cells.forget()
        super().start_application_mode()
        frame = getattr(self._app, "first_frame", None)
        if frame is not None and frame.taken():
            self.cells.withdraw("\x1b[?1049h")  # it stands there until what follows is drawn over it

    def stop_application_mode(self) -> None:
        if self._answers:
            # An answer that came after the end would be typed into the shell.
            self._answered.wait(min(_EXIT_TIMEOUT_S, 2 * self._quickest_s + 0.05))
        self._leaving = True
        super().stop_application_mode()

    def close(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.send(self.cells.controls().encode("utf-8", "replace"))
            if not writer.wait(_EXIT_TIMEOUT_S):
                writer.give_up(_RESTORE.encode())
                writer.wait(_EXIT_TIMEOUT_S)
            writer.close()
        super().close()
        ending, self._ending = self._ending, None
        if ending is not None:
            ending.close()

    def _sigcont_application(self, *_: object) -> None:
        # After a plain SIGSTOP the application mode was never left, and starting it once more would take
        # the raw terminal for what to restore in the end.
        if self._writer is not None and self._auto_restart:
            self.suspend_application_mode()
        super()._sigcont_application()

    # -- out ----------------------------------------------------------------------------------

    def write(self, data: str) -> None:
        with self._lock:
            self.cells.feed(data)
            if self._scheduled:
                return
            self._scheduled = True
        self._in_loop(self._send)

    def redraw(self) -> None:
        """Draw the whole screen again: something else has written on it."""
        with self._lock:
            self.cells.forget()
        self.write("")

    def _send(self) -> None:
        """Send what differs from the screen, if the line has taken the update before."""
        with self._lock:
            self._scheduled = False
            writer = self._writer
            if writer is None or writer.busy or self._leaving or not self.cells.due:
                return  # busy: comes here again when the line has drained
            now_s = time.monotonic()
            if not self._answered.is_set():
                left_s = self._asked_s + self._answer_timeout_s - now_s
                if left_s > 0:
                    if self._retry is None:
                        self._retry = self._loop.call_later(left_s, self._send_again)
                    return
                self._answer_timeout_s = min(_ANSWER_TIMEOUT_MAX_S, 2 * self._answer_timeout_s)
                self._answered.set()
            data = self.cells.update()
            if now_s - self._asked_s >= _CURSOR_QUERY_PERIOD_S:
                data += _CURSOR_QUERY
                self._asked_s, self._asked_at, self._sent_bytes = now_s, self.cells.cursor, 0
                if self._answers:
                    self._answered.clear()
            self._sent_bytes += len(data)
            writer.send(data.encode("utf-8", "replace"))

    def _send_again(self) -> None:
        self._retry = None
        self._send()

    def _drained(self, size_bytes: int, took_s: float) -> None:
        """All is written; called by the line's thread."""
        self._in_loop(self._landed, size_bytes, took_s, self._answers)

    def _landed(self, size_bytes: int, took_s: float, answered_later: bool) -> None:
        if not answered_later and self.slow_link.landed(size_bytes, took_s, time.monotonic()):
            self._app.post_message(self.LinkSpeedChanged(self.slow_link.slow))
        self._send()

    def _in_loop(self, call: Callable[..., None], *args: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended: close() sends the rest
            self._loop.call_soon_threadsafe(call, *args)

    # -- in -----------------------------------------------------------------------------------

    def run_input_thread(self) -> None:
        """Hand on what is typed, until :attr:`exit_event`. Textual's own asks ten times a second whether it is set,
        which took a tenth of the monitor's CPU."""
        ending = self._ending
        assert ending is not None
        parser = XTermParser(self._debug)
        decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        silences = 0  # for how long nothing came; two end every sequence the parser may be in
        while not ending.is_set():
            patience_s = constants.ESCAPE_DELAY if silences < 2 else None
            ready, _, _ = select.select([self.fileno, ending.wakes], (), (), patience_s)
            silences = 0 if ready else silences + 1
            if self.fileno in ready:
                typed = b""
                with contextlib.suppress(OSError):
                    typed = os.read(self.fileno, 4096)
                if not typed:  # the terminal is gone: SIGHUP, or the thread that draws, ends the app
                    ending.wait()
                elif text := decode(typed):  # not half a character
                    for message in parser.feed(text):
                        self.process_message(message)
            for message in parser.tick():
                self.process_message(message)

    def process_message(self, message: Message) -> None:
        """In the input thread: what the terminal answers stays here, everything else goes to the app."""
        if isinstance(message, events.CursorPosition):
            if (message.x, message.y) == self._asked_at:  # shift+F3 reads like an answer
                self._answers = True
                self._answered.set()
                self._in_loop(self._answer, time.monotonic() - self._asked_s)
            return
        if isinstance(message, events.Resize):
            self._resized(message.size)
        elif isinstance(message, events.Key):
            self._answered.set()  # somebody is there: do not wait for an answer that may be lost
        super().process_message(message)

    def _answer(self, took_s: float) -> None:
        self._answer_timeout_s = _ANSWER_TIMEOUT_S
        self._quickest_s = min(self._quickest_s, took_s)
        self._landed(self._sent_bytes, took_s - self._quickest_s, False)

    def _get_terminal_size(self) -> tuple[int, int]:
        """Of the terminal that is drawn on; one without a size (0x0) is taken for 80x24."""
        with contextlib.suppress(OSError):
            size = os.get_terminal_size(self._out)
            if size.columns > 0 and size.lines > 0:
                self._resized(Size(size.columns, size.lines))
                return size.columns, size.lines
        return super()._get_terminal_size()

    def _resized(self, size: Size) -> None:
        cells = getattr(self, "cells", None)  # Textual asks for the size before there are any
        if cells is not None and (cells.width, cells.height) != (size.width, size.height):
            with self._lock:
                cells.resize(size.width, size.height)

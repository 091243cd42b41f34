"""All that gputop uses of Textual and that Textual keeps private, in one place.

A release of Textual may change any of it without notice, so pyproject.toml allows the versions up to the next major
one. Seen to work: Textual 6.0.0 and 8.2.8, the oldest and the newest allowed ones at the time (tests/tui).
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterable
from typing import Any

from textual._xterm_parser import XTermParser
from textual.app import App
from textual.driver import Driver
from textual.drivers.linux_driver import LinuxDriver
from textual.events import Key


def driver_of(app: App[Any]) -> Driver | None:
    """Driver that draws the app; None before it runs."""
    return app._driver


class FaultReportingApp(App[int]):
    """An app that hands out the fault which ended it; Textual would print a traceback with the values of locals."""

    fault: BaseException | None = None

    def panic(self, *renderables: Any) -> None:
        """End by a fault that Textual has words of its own for, such as an error in a style sheet."""
        if self.fault is None:
            first = renderables[0] if renderables else ""
            self.fault = first if isinstance(first, Exception) else RuntimeError(str(first))
        self._close_messages_no_wait()

    def _fatal_error(self) -> None:
        if self.fault is None:
            self.fault = sys.exc_info()[1] or self._exception or RuntimeError("Textual has failed")
        self._close_messages_no_wait()

    def run(self, *arguments: Any, **options: Any) -> int | None:
        """Run the app; raises the fault that ended it, once the terminal has been restored."""
        status = super().run(*arguments, **options)
        if self.fault is not None:
            raise self.fault
        return status


class _Parser(XTermParser):
    """Reads escape and a key as two keys, however soon the second comes.

    Textual makes one of them, with alt, as terminals send that; for some keys it drops the escape. No key here is with
    alt, and escape and q, typed fast or read at once on a slow link, must not be lost.
    """

    def _sequence_to_key_events(self, sequence: str, alt: bool = False) -> Iterable[Key]:
        if alt:
            yield Key("escape", "\x1b")
        yield from super()._sequence_to_key_events(sequence)


class OpenLinuxDriver(LinuxDriver):
    """Textual's driver for Linux terminals, with public names for what a subclass of it needs."""

    @property
    def app(self) -> App[Any]:
        return self._app

    @property
    def event_loop(self) -> asyncio.AbstractEventLoop:
        return self._loop

    @property
    def resumes_on_continue(self) -> bool:
        """Return whether SIGCONT enters the application mode again; not while an external program has the terminal."""
        return self._auto_restart

    def input_parser(self) -> XTermParser:
        """Makes events of what is typed."""
        return _Parser(self._debug)

    def terminal_size(self) -> tuple[int, int]:
        """Columns and lines; asked at the start, and again after a change."""
        return super()._get_terminal_size()

    def _get_terminal_size(self) -> tuple[int, int]:
        return self.terminal_size()

    def on_continue(self) -> None:
        """Called after SIGCONT."""
        super()._sigcont_application()

    def _sigcont_application(self, *_: object) -> None:
        self.on_continue()

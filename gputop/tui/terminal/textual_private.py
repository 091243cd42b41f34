"""All that gputop uses of Textual and that Textual keeps private, in one place.

A release of Textual may change any of it without notice, so pyproject.toml allows the versions up to the next major
one. Seen to work: Textual 6.0.0 and 8.2.8, the oldest and the newest allowed ones at the time (tests/tui).
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

from textual._xterm_parser import XTermParser
from textual.app import App
from textual.driver import Driver
from textual.drivers.linux_driver import LinuxDriver
from textual.events import Key
from textual.filter import LineFilter
from textual.geometry import Region
from textual.strip import Strip
from textual.widget import Widget


def driver_of(app: App[Any]) -> Driver | None:
    """Driver that draws the app; None before it runs."""
    return app._driver


_refreshed: ContextVar[set[Widget] | None] = ContextVar("refreshed", default=None)  # for the frame that is being made


@contextlib.contextmanager
def one_frame(app: App[Any]) -> Iterator[None]:
    """Draw what is refreshed meanwhile in one frame, at the end.

    Textual wakes the task of each widget, which posts a message to the screen, whose task starts a timer that draws:
    of a monitor with a frame a second that is a fifth of the CPU time.
    """
    refreshed: set[Widget] = set()
    token = _refreshed.set(refreshed)
    try:
        yield
    finally:
        _refreshed.reset(token)
    screen = app.screen
    if screen.outer_size != app.size or screen._layout_required:
        # The screen has yet to hear of a new size; what is drawn before that would be of the old one.
        for widget in refreshed:
            widget.check_idle()
        return
    for widget in refreshed:
        more = (widget._layout_required or widget._scroll_required or widget._recompose_required
                or widget._refresh_styles_required or app._batch_count)
        if more or widget not in screen._compositor:
            widget.check_idle()
        elif widget._repaint_required:
            widget._repaint_required = False
            if widget.display:
                screen._dirty_widgets.add(widget)
    screen._on_timer_update()


class DrawnOnce(Widget):
    """A widget that keeps its lines until it is refreshed, and is drawn by :func:`one_frame`.

    For each frame, Textual asks all widgets for their lines, and makes the borders and empty grounds among them anew.
    """

    _kept: tuple[Region, Sequence[LineFilter], list[Strip]] | None = None

    def render_lines(self, crop: Region) -> list[Strip]:
        filters = self.get_line_filters()
        if self._kept is None or self._kept[:2] != (crop, filters):
            self._kept = crop, filters, super().render_lines(crop)
        return self._kept[2]

    def notify_style_update(self) -> None:
        self._kept = None
        super().notify_style_update()

    def _set_dirty(self, *regions: Region) -> None:
        self._kept = None
        super()._set_dirty(*regions)

    def check_idle(self) -> None:
        refreshed = _refreshed.get()
        if refreshed is None:
            super().check_idle()
        else:
            refreshed.add(self)


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

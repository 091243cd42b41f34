"""What the tests use of Textual and what Textual keeps private, in one place."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from typing import Any
from weakref import WeakKeyDictionary

import pytest
from textual import events
from textual._context import active_app
from textual.app import App
from textual.css.model import RuleSet
from textual.css.stylesheet import Stylesheet
from textual.notifications import Notification
from textual.screen import Screen
from textual.strip import Strip
from textual.timer import Timer

from tests.waiting import PATIENCE_S


def notifications(app: App[Any]) -> list[Notification]:
    """Those that are on the screen, oldest first."""
    return list(app._notifications)


def messages(app: App[Any]) -> list[str]:
    return [notification.message for notification in app._notifications]


def message_text(app: App[Any]) -> str:
    return "\n".join(messages(app))


def clear_notifications(app: App[Any]) -> None:
    app._notifications.clear()


def screen_strips(app: App[Any]) -> list[Strip]:
    """The screen as it is drawn, line by line."""
    return app.screen._compositor.render_strips(app.size)


def forward_to_screen(app: App[Any], event: events.Event) -> None:
    """As if the driver had posted the event."""
    app.screen._forward_event(event)


def exits(app: App[Any]) -> bool:
    return bool(app._exit) or not app.is_running


DISPLAY = "_display"  # the method of an app that sends a frame to the terminal


def draw_when_settled(app: App[Any]) -> None:
    """Frames are sent to no terminal, and a pilot composes one when nothing else is to be done: a key or another size
    takes several, each of which is the whole screen where a box dims what is behind it."""
    setattr(app, DISPLAY, lambda *_: None)
    _settling[app] = False


# -- what makes pilots cheap --------------------------------------------------------------------


_settling: WeakKeyDictionary[App[Any], bool] = WeakKeyDictionary()  # whether a frame is due, where it waits for that
_compose_frame = Screen._compositor_refresh


def _compose_later(screen: Screen[Any]) -> None:
    if screen.app in _settling and screen is screen.app.screen:
        _settling[screen.app] = True
    else:
        _compose_frame(screen)


class _Parsed(dict[tuple[Any, ...], list[RuleSet]]):
    def clear(self) -> None:
        """Keeps what is parsed: a style sheet clears its own cache for other variables, whose sheets are apart here."""


def make_pilots_cheap(patch: pytest.MonkeyPatch) -> None:
    """Pilots wait for what is to be done and no longer, which Textual does by sleeping; and apps share the rules that
    they parse of the same styles and variables, a fifth of what it takes to start one."""
    for name in ("textual.app.wait_for_idle", "textual.pilot.wait_for_idle"):
        patch.setattr(name, wait_for_idle)
    patch.setattr(Screen, "_compositor_refresh", _compose_later)
    parsed: dict[frozenset[tuple[str, str]], _Parsed] = defaultdict(_Parsed)
    patch.setattr(Stylesheet, "_parse_cache", property(lambda sheet: parsed[frozenset(sheet._variables.items())],
                                                       lambda *_: None), raising=False)


_WINDOW_S = 0.002
_IDLE_RATIO = 0.25  # of the window, that a process without work may compute
_SOON_S = 0.02  # a timer of Textual's own, such as that of a resize, is waited for


async def wait_for_idle(_: float = 0, max_sleep: float = 1.0) -> None:
    """As Textual's, which sleeps for 20 ms at a time, twice for each key: until no message waits in the app, its
    screen is drawn and the process has nothing to compute."""
    begin_s = time.monotonic()
    while True:
        before_s = time.process_time()
        await asyncio.sleep(_WINDOW_S)
        busy, waited_s = _busy(active_app.get()), time.monotonic() - begin_s
        if busy:
            if waited_s > max_sleep + PATIENCE_S:
                return
        elif waited_s > max_sleep or time.process_time() - before_s < _IDLE_RATIO * _WINDOW_S:
            return


def _busy(app: App[Any]) -> bool:
    """Whether anything is about to happen; a frame that is due is drawn now."""
    if not app._screen_stack:
        return False
    screen = app._screen_stack[-1]
    if screen._update_timer._active.is_set():
        screen._on_timer_update()
        return True
    if any(not pump._message_queue.empty() or any(map(_soon, pump._timers))
           for pump in (app, *screen.walk_children(with_self=True))):
        return True
    if due := _settling.get(app, False):
        _settling[app] = False
        _compose_frame(screen)
    return due


def _soon(timer: Timer) -> bool:
    return timer._repeat == 0 and timer._interval <= _SOON_S and timer._task is not None and not timer._task.done()

"""What the tests use of Textual and what Textual keeps private, in one place."""

from __future__ import annotations

from typing import Any

from textual import events
from textual.app import App
from textual.notifications import Notification
from textual.strip import Strip


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


def draw_to_nobody(app: App[Any]) -> None:
    """Frames are composed and sent to no terminal."""
    setattr(app, DISPLAY, lambda *_: None)

"""Copying through the terminal (OSC 52), which works over SSH: the text goes to the machine one sits at."""

from __future__ import annotations

import os
from typing import Any, Protocol


class CopyingApp(Protocol):
    """Interface that is needed of the app."""

    def copy_to_clipboard(self, text: str) -> None: ...

    def notify(self, message: str, *, title: str = "", severity: Any = "information", timeout: float | None = None,
               markup: bool = True) -> None: ...


def copy(app: CopyingApp, text: str, what: str) -> None:
    """Hand ``text`` to the terminal and say so; no terminal reports whether it took it."""
    app.copy_to_clipboard(text)
    lines = len(text.splitlines())
    size = f"{lines} line{'s' if lines != 1 else ''}"
    app.notify(f"{what} ({size}) was sent to the terminal's clipboard (OSC 52). {_must_allow()}", title="Copied")


def _must_allow() -> str:
    if os.environ.get("TMUX"):
        return "If nothing pastes, run tmux set -g set-clipboard on; the terminal must also allow it."
    if os.environ.get("STY"):
        return "GNU screen may not pass the text on."
    return "If nothing pastes, allow the clipboard in the terminal's settings."

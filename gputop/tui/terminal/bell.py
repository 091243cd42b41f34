"""Sequences that have the terminal ring its bell and show a notification."""

from __future__ import annotations

import os

from gputop.text.units import printable

_MAX_CHARS = 200


def bell(text: str) -> str:
    """OSC 9 with the text, for the terminals that know it, and the bell for all of them.

    tmux keeps OSC 9 to itself; with ``allow-passthrough`` it hands on what is wrapped so, and the bell always.
    """
    shown = f"\x1b]9;{printable(text)[:_MAX_CHARS]}\x07"
    if os.environ.get("TMUX"):
        shown = "\x1bPtmux;" + shown.replace("\x1b", "\x1b\x1b") + "\x1b\\"
    return f"{shown}\x07"

"""How the user wants the monitor to look and to begin: from the command line and the config file, once settled."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

from rich.color import ColorSystem

from gputop.render.palette import SCHEMES
from gputop.tui.terminal.color_support import SYSTEMS, Colors, Glyphs, TerminalPalette

DEFAULT_THEME = "gputop-dark"


@dataclass(frozen=True, slots=True)
class Preferences:
    """``low_bandwidth`` None: as fast as the line drains. ``metric`` "" and ``span_s`` None: the monitor's own."""

    theme: str = DEFAULT_THEME
    colors: Colors = "truecolor"
    glyphs: Glyphs = "unicode"
    low_bandwidth: bool | None = None
    metric: str = ""
    span_s: float | None = None
    warnings: tuple[str, ...] = ()  # of the config file
    keep_theme: Callable[[str], str] | None = None  # remembers the choice of a theme; says what went wrong, or ""

    def tell_textual(self) -> None:
        """How many colours there are; Textual asks once, when it is imported."""
        names = {ColorSystem.TRUECOLOR: "truecolor", ColorSystem.EIGHT_BIT: "256"}
        os.environ["TEXTUAL_COLOR_SYSTEM"] = names.get(SYSTEMS[self.colors], "standard")

    def palette(self) -> TerminalPalette:
        """Before Textual is there to say whether its theme is a dark one."""
        own = self.theme.removeprefix("gputop-")
        light = any(word in self.theme for word in ("light", "latte", "dawn"))
        return TerminalPalette(own if own in SCHEMES else "light" if light else "dark", self.colors, self.glyphs)

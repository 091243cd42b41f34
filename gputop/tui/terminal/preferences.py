"""Preferences of how the monitor looks and starts, as the command line and the config file say together."""

from __future__ import annotations

import os
from collections.abc import Callable

from msgspec import Struct
from rich.color import ColorSystem

from gputop.render.palette import SCHEMES
from gputop.tui.terminal.color_support import SYSTEMS, Colors, Glyphs, TerminalPalette

DEFAULT_THEME = "gputop-dark"


def full_theme_name(name: str) -> str:
    """The name of a theme of gputop's own that may be given in short ("light"); any other name as it is."""
    return f"gputop-{name}" if name in SCHEMES else name


class Preferences(Struct, frozen=True):
    """``metric`` "" and ``span_s`` None: the defaults."""

    theme: str = DEFAULT_THEME
    colors: Colors = "truecolor"
    glyphs: Glyphs = "unicode"
    metric: str = ""
    span_s: float | None = None
    warnings: tuple[str, ...] = ()  # of the config file
    keep_theme: Callable[[str], str] | None = None  # saves the choice of a theme; returns what went wrong, or ""

    def set_textual_colors(self) -> None:
        """Tell Textual how many colors there are; it reads this once, when it is imported."""
        names = {ColorSystem.TRUECOLOR: "truecolor", ColorSystem.EIGHT_BIT: "256"}
        os.environ["TEXTUAL_COLOR_SYSTEM"] = names.get(SYSTEMS[self.colors], "standard")

    def palette(self) -> TerminalPalette:
        """The palette of the first frame. Textual, which knows whether a theme is dark, is not imported yet."""
        scheme = self.theme.removeprefix("gputop-")
        light = any(word in self.theme for word in ("light", "latte", "dawn"))
        return TerminalPalette(scheme if scheme in SCHEMES else "light" if light else "dark", self.colors, self.glyphs)

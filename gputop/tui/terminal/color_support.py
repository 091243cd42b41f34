"""Colors and glyphs of the views, translated into what the theme and the terminal have; the one table for both.

Views draw with the styles of :mod:`gputop.render.palette`, in the dark theme's colors, and with any glyph. On the way
to the screen a :class:`TerminalPalette` translates colors into those of another theme, the nearest of 256, a choice of
16, or attributes alone, and glyphs into those which a console or an ASCII terminal has. It knows which level a color
of the ramp stands for, so that with few colors a cell becomes a density glyph.

On the dark theme, with all colors and glyphs, there is nothing to translate (:attr:`TerminalPalette.plain`).
"""

from __future__ import annotations

import os
import re
import unicodedata
from collections.abc import Callable, Mapping
from functools import cache
from math import atan2, degrees, hypot
from typing import Literal

from msgspec import Struct
from rich.color import Color, ColorSystem, ColorType
from rich.style import Style

from gputop.render.palette import DARK, LIGHT, SCHEMES, SHADES, STEPS, Rgb, blank_rgb, level_rgb, oklch_rgb
from gputop.render.step_parts import PART_BY_ID

Colors = Literal["truecolor", "256", "16", "none"]
Glyphs = Literal["unicode", "console", "ascii"]

# -- what the terminal can show ---------------------------------------------------------------

_TRUECOLOR_TERMS = ("kitty", "alacritty", "foot", "wezterm", "ghostty", "-direct")
_TERMS_WITHOUT_COLOR = ("vt100", "vt102", "vt220", "xterm-mono", "ansi-m")


def terminal_colors(env: Mapping[str, str] | None = None) -> Colors:
    """Colors that the terminal says it can show; none where NO_COLOR (no-color.org) is set."""
    env = os.environ if env is None else env
    term = env.get("TERM", "dumb").lower()
    if env.get("NO_COLOR") or term in ("dumb", "unknown") or term.startswith(_TERMS_WITHOUT_COLOR):
        return "none"
    if env.get("COLORTERM", "").lower() in ("truecolor", "24bit") or any(name in term for name in _TRUECOLOR_TERMS):
        return "truecolor"
    return "256" if "256" in term else "16"


def terminal_glyphs(env: Mapping[str, str] | None = None) -> Glyphs:
    """All glyphs, those of the kernel's console, or ASCII where the locale names another charset than UTF-8.

    Without a locale, and with C or POSIX, UTF-8 is assumed, as Python does (PEP 538): containers seldom set a locale,
    and the terminals in use understand UTF-8.
    """
    env = os.environ if env is None else env
    name = next((env[key] for key in ("LC_ALL", "LC_CTYPE", "LANG") if env.get(key)), "").upper()
    charset = name.partition(".")[2].partition("@")[0].replace("-", "")
    if charset not in ("", "UTF8"):
        return "ascii"
    return "console" if env.get("TERM", "").lower().startswith("linux") else "unicode"


SYSTEMS: dict[Colors, ColorSystem] = {
    "truecolor": ColorSystem.TRUECOLOR, "256": ColorSystem.EIGHT_BIT, "16": ColorSystem.STANDARD,
    "none": ColorSystem.STANDARD}  # Rich needs a system for attributes as well; the colors are removed before

# -- glyphs -----------------------------------------------------------------------------------

_BLOCKS = frozenset("▁▂▃▄▅▆▇█▏▎▍▌▋▊▉▀▐░▒▓")
DENSITY = " ░▒▓█"  # a share in quarters, where brightness cannot show it

# Replacements of the same width for glyphs that the kernel's console font (CP437 and a little more) lacks.
_CONSOLE = {
    **dict(zip("▁▂▃▅▆▇", "__▄▄██", strict=True)),  # a little must not look like half
    **dict(zip("▖▗▙▟", "▄▄██", strict=True)), **dict(zip("▏▎▍▋▊▉", " ▌▌▌██", strict=True)), "▔": "▀", "▕": "▐",
    **dict(zip("╭╮╰╯", "┌┐└┘", strict=True)), "●": "•", "◐": "o", "○": "o", "…": "~", "›": ">", "✗": "x", "✓": "√",
    "—": "-", "–": "-", "−": "-", "→": ">", "←": "<", "↑": "^", "↓": "v", "⏵": ">", "⏸": "=", "▶": ">",
    "“": '"', "”": '"', "‘": "'", "’": "'", "⚠": "!", "▸": ">", "▾": "v", "◀": "<", "◆": "+", "│": "│", "┊": "│",
    "▲": "^", "▼": "v", "△": "^", "▽": "v", "⏎": "┘", "\ufffd": "?",
}
_ASCII = {
    **dict(zip("▁▂▃▄▅▆▇█", "_.:-=+*#", strict=True)), **dict(zip("▏▎▍▌▋▊▉", "  --==#", strict=True)), "▐": "-",
    **dict(zip("▖▗▙▟", "..**", strict=True)),
    "▔": "-", "▕": "|", "▀": '"', "░": ".", "▒": ":", "▓": "+", "■": "#", "□": ".", "▪": "#", "▰": "#", "▱": "-",
    **dict.fromkeys("─━═╌┄┈╴╶╸╺", "-"), **dict.fromkeys("│┃║┊┆╎╵╷", "|"),
    **dict.fromkeys("┌┐└┘├┤┬┴┼╭╮╰╯┏┓┗┛┣┫┳┻╋╞╡╔╗╚╝", "+"),
    "●": "*", "◐": "o", "○": ".", "◌": ".", "·": ".", "•": "*", "…": "~", "›": ">", "‹": "<", "»": ">", "«": "<",
    "✗": "x", "✓": "v", "✔": "v", "✘": "x", "ø": "m", "×": "x", "→": ">", "←": "<", "↑": "^", "↓": "v", "↔": "=",
    "⇥": ">", "⏎": "<", "°": "C", "−": "-", "—": "-", "–": "-", "‐": "-", "µ": "u", "“": '"', "”": '"', "‘": "'",
    "’": "'", "⚠": "!", "◆": "+", "◇": "+", "▶": ">", "▸": ">", "▾": "v", "◀": "<", "▲": "^", "▼": "v", "△": "^",
    "▽": "v", "⏵": ">", "⏸": "=", "≥": ">", "≤": "<", "≈": "~", "±": "~", "⋯": "~", "\ufffd": "?",
}


_CHANGE = re.compile(r"(?<=\S) → (?=\S)")  # from one value to another: "331 > 157 ms" would read as a comparison


class _AsciiTable(dict[int, str]):
    """Table for ``str.translate``: other characters become their letter without accents, or ? for each cell they
    take."""

    def __missing__(self, code: int) -> str:
        if code < 128:
            out = chr(code)
        else:
            from rich.cells import get_character_cell_size  # most terminals never need it

            char = chr(code)
            plain = unicodedata.normalize("NFKD", char).encode("ascii", "ignore").decode()
            cells = get_character_cell_size(char)
            out = plain if len(plain) == cells == 1 else "?" * cells
        self[code] = out
        return out


_TABLES: dict[Glyphs, dict[int, str]] = {
    "console": {ord(char): to for char, to in _CONSOLE.items()},
    "ascii": _AsciiTable({ord(char): to for char, to in _ASCII.items()}),
}

# -- colors ----------------------------------------------------------------------------------

_MEANT: dict[Rgb, str] = {Color.parse(color).get_truecolor(): name for name, color in DARK.names.items()}
_OF_LIGHT = {Color.parse(color).get_truecolor() for color in LIGHT.names.values()}  # from the style sheet
_TEXTS = ("text", "strong", "dim", "warn", "bad", "accent", "ground")
# Numbers among the 16 colors of any terminal: on a dark ground, on a light one.
_NAMES_16: dict[str, tuple[int, int]] = {
    "text": (7, 0), "strong": (15, 0), "dim": (7, 0), "warn": (11, 5), "bad": (9, 1), "accent": (14, 4),
    "ground": (0, 15), "surface": (0, 15), "panel": (0, 15), "border": (8, 8),
    **{part.id: part.ansi for part in PART_BY_ID.values()},
}
_LEVELS_16 = ((4, 12, 6, 14, 11), (6, 12, 4, 5, 0))
_MUTED_16 = ((8, 7), (7, 8))


@cache
def _levels() -> dict[Rgb, tuple[int, int, bool]]:
    """Color of the dark ramp → (step, shade, muted). Where two fall together the more usual one is kept."""
    out: dict[Rgb, tuple[int, int, bool]] = {}
    for muted in (False, True):
        for shade in (SHADES - 1, *range(SHADES - 1)):
            for step in range(STEPS):
                out.setdefault(level_rgb(step, shade, muted), (step, shade, muted))
    return out


def _lab(rgb: Rgb) -> tuple[float, float, float]:
    """8-bit sRGB to OKLab."""
    r, g, b = (c / 255 / 12.92 if c <= 10.31 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in rgb)
    long = (0.4122214708 * r + 0.5363325363 * g + 0.0514459929 * b) ** (1 / 3)
    medium = (0.2119034982 * r + 0.6806995451 * g + 0.1073969566 * b) ** (1 / 3)
    short = (0.0883024619 * r + 0.2817188376 * g + 0.6299787005 * b) ** (1 / 3)
    return (0.2104542553 * long + 0.7936177850 * medium - 0.0040720468 * short,
            1.9779984951 * long - 2.4285922050 * medium + 0.4505937099 * short,
            0.0259040371 * long + 0.7827717662 * medium - 0.8086757660 * short)


def _with_lightness(rgb: Rgb, lightness: float) -> Rgb:
    """The same hue with another lightness."""
    _, a, b = _lab(rgb)
    return oklch_rgb(lightness, hypot(a, b), degrees(atan2(b, a)))


@cache
def _palette_256() -> list[tuple[int, tuple[float, float, float]]]:
    """The 240 colors that are the same on every terminal, with their OKLab."""
    cube = (0, 95, 135, 175, 215, 255)
    colors = [(16 + 36 * r + 6 * g + b, (cube[r], cube[g], cube[b]))
              for r in range(6) for g in range(6) for b in range(6)]
    colors += [(232 + i, (8 + 10 * i,) * 3) for i in range(24)]
    return [(number, _lab(rgb)) for number, rgb in colors]


@cache
def nearest_256(rgb: Rgb, gray: bool = False) -> int:
    """The nearest of 256 colors, or of their grays. Lightness counts double: the order of the levels depends on it."""
    lightness, a, b = _lab(rgb)
    return min(_palette_256()[216 if gray else 0:], key=lambda entry: 2 * (entry[1][0] - lightness) ** 2
               + (entry[1][1] - a) ** 2 + (entry[1][2] - b) ** 2)[0]


def _rgb_of(color: Color | None) -> Rgb | None:
    if color is None or color.type != ColorType.TRUECOLOR or color.triplet is None:
        return None
    return color.triplet.red, color.triplet.green, color.triplet.blue


class TerminalPalette:
    """Translates styles and text for a theme's scheme and for the colors and glyphs of a terminal."""

    def __init__(self, scheme: str = "dark", colors: Colors = "truecolor", glyphs: Glyphs = "unicode") -> None:
        self.scheme, self.colors, self.glyphs = scheme, colors, glyphs
        # Whether there is nothing to translate.
        self.plain = (scheme, colors, glyphs) == ("dark", "truecolor", "unicode")
        self._light = scheme == "light"
        self._styles: dict[Style, Style] = {}
        self._table = _TABLES.get(glyphs)

    def run(self, text: str, style: Style | None) -> tuple[str, Style | None]:
        """One run of text as this terminal shows it; as many cells as before."""
        if style is not None:
            if self.colors in ("16", "none") and ("▀" in text or "█" in text):
                text = self._shapes(text, style)
            elif self.glyphs == "ascii" and "▀" in text:  # a letter has one color
                text, style = self._shapes(text, style), self._one_level(style)
            style = self.style(style)
            if style.reverse and self.colors == "none" and not _BLOCKS.isdisjoint(text):
                style += Style(reverse=False)  # in reverse a bar would look like its background
        if self._table is not None and not text.isascii():
            if self.glyphs == "ascii":
                text = text.replace("°C", " C")
            text = _CHANGE.sub("-> ", text).translate(self._table)
        return text, style

    def style(self, style: Style) -> Style:
        """A style as this terminal shows it."""
        if self.plain:
            return style
        shown = self._styles.get(style)
        if shown is None:
            shown = self._styles[style] = self._without_color(style) if self.colors == "none" else self._colored(style)
        return shown

    def ground(self, name: str = "ground") -> Style:
        """The theme's ground, surface or panel; a null style where there are no colors."""
        return self.style(Style(bgcolor=DARK.names[name]))

    # -- shapes in place of colors ------------------------------------------------------------

    def _shapes(self, text: str, style: Style) -> str:
        """Cells whose meaning is in their color alone, as glyphs."""
        upper = _levels().get(_rgb_of(style.color) or (-1, 0, 0))
        if "▀" in text and upper is not None:
            lower = _levels().get(_rgb_of(style.bgcolor) or (-1, 0, 0))
            if lower is not None:
                share = (upper[1] + lower[1]) / 2 / (SHADES - 1)
                # A little is not nothing.
                quarters = round(4 * share) or (1 if share >= 0.06 else 0)
                text = text.replace("▀", DENSITY[quarters])
        if "█" in text and self.colors == "none":
            part = _MEANT.get(_rgb_of(style.color) or (-1, 0, 0))
            if part in PART_BY_ID:
                text = text.replace("█", PART_BY_ID[part].letter)
        return text

    def _one_level(self, style: Style) -> Style:
        """The style of two levels above each other as that of the upper one at its brightest, on the ground."""
        level = _levels().get(_rgb_of(style.color) or (-1, 0, 0))
        if level is None:
            return style
        color = Color.from_rgb(*level_rgb(level[0], SHADES - 1, level[2]))
        return style + Style(color=color, bgcolor=DARK.names["ground"])

    def _without_color(self, style: Style) -> Style:
        """Attributes alone. A loud background, as of a badge or what is selected, becomes reverse video."""
        ground = style.bgcolor
        loud = False
        if ground is not None and not ground.is_default:
            rgb = _rgb_of(ground) or tuple(ground.get_truecolor())
            if rgb not in _levels():
                lightness, a, b = _lab(rgb)  # type: ignore[arg-type]
                chroma = hypot(a, b)
                # A tint, as of a selected row, is not loud.
                loud = lightness > 0.6 or (lightness > 0.4 and chroma > 0.05)
                if self._light:
                    loud = 0.3 < lightness < 0.86 and chroma > 0.025
        return Style(bold=style.bold, italic=style.italic, underline=style.underline, strike=style.strike,
                     reverse=True if loud else style.reverse, meta=style.meta or None)

    # -- colors -------------------------------------------------------------------------------

    def _colored(self, style: Style) -> Style:
        ground = _rgb_of(style.bgcolor)
        color, bgcolor = self._color(style.color, ground), self._color(style.bgcolor, None, is_ground=True)
        if self._light and _MEANT.get(_rgb_of(style.color) or (-1, 0, 0)) in _TEXTS:
            color = self._readable(color, bgcolor)
        if color is style.color and bgcolor is style.bgcolor:
            return style
        return style + Style(color=color, bgcolor=bgcolor)

    def _color(self, color: Color | None, ground: Rgb | None, is_ground: bool = False) -> Color | None:
        """The color that replaces this one; ``ground`` is the color behind it."""
        rgb = _rgb_of(color)
        if rgb is None:
            return color  # one of the terminal's own
        level, name = _levels().get(rgb), _MEANT.get(rgb)
        if self.colors == "16":
            number = self._number_16(level, name, is_ground)
            if number is not None:
                return Color.from_ansi(number)
        if self.scheme != "dark":
            if name is not None:
                rgb = _rgb_of(Color.parse(SCHEMES[self.scheme].names[name])) or rgb
            elif level is not None:
                rgb = level_rgb(*level, self.scheme)
            elif rgb == blank_rgb():
                rgb = blank_rgb(self.scheme)
            elif self._light and rgb not in _OF_LIGHT:
                rgb = self._on_light(rgb, ground, is_ground)
        if self.colors == "256":
            # The muted ramp is nearly gray. Without this its nearest colors would alternate between gray and blue.
            return Color.from_ansi(nearest_256(rgb, gray=level is not None and level[2]))
        return Color.from_rgb(*rgb)  # Rich reduces it to 16 colors where necessary

    def _number_16(self, level: tuple[int, int, bool] | None, name: str | None, is_ground: bool) -> int | None:
        if name is not None:
            return _NAMES_16[name][self._light]
        if level is None:
            return None
        step, shade, muted = level
        ramp = (_MUTED_16 if muted else _LEVELS_16)[self._light]
        # The share is shown by the density of the glyph, so the background is the ground.
        return (15 if self._light else 0) if is_ground or shade == 0 else ramp[step * len(ramp) // STEPS]

    @staticmethod
    def _readable(color: Color | None, ground: Color | None) -> Color | None:
        """The color of a text; a contrasting one where its lightness is close to that of its background."""
        text, behind = _rgb_of(color), _rgb_of(ground)
        if text is None or behind is None or abs(_lab(text)[0] - _lab(behind)[0]) > 0.35:
            return color
        return Color.parse(LIGHT.names["strong" if _lab(behind)[0] > 0.6 else "ground"])

    @staticmethod
    def _on_light(rgb: Rgb, ground: Rgb | None, is_ground: bool) -> Rgb:
        """The color for a light ground in place of one that a view mixed for a dark ground."""
        lightness = _lab(rgb)[0]
        if is_ground:
            return _with_lightness(rgb, 1.10 - lightness) if lightness < 0.4 else rgb
        on_dark = ground is not None and _lab(ground)[0] < 0.4  # that ground becomes light
        on_color = ground is not None and 0.4 <= _lab(ground)[0] < 0.8  # kept, as is a text that was chosen for it
        if on_color or (lightness <= 0.6 and not on_dark):
            return rgb
        return _with_lightness(rgb, min(0.56, 1.10 - lightness) if lightness > 0.35 else 1.10 - lightness)


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

"""Colors of the screen, named by what they mean. Every module takes its colors from here.

A style stands for a meaning, in the colors of the dark theme on a terminal with all colors. Before it reaches the
screen, :mod:`gputop.tui.terminal.color_support` translates it into what the theme and the terminal can show: the
colors of another theme, 256 or 16 colors, or attributes alone; and glyphs into those that the terminal has.
A view therefore draws in one way only and does not ask which terminal it is on. It gives levels and shares by
:func:`bar_style` and :func:`cell_style`, a part of the step by :data:`PART_STYLE`, and as glyphs what must be
readable without color. Colors that are not from here are translated by their lightness alone.

The ramp runs in OKLCH (Björn Ottosson's OKLab, 2020): lightness rises evenly from dark to light, so the order is
readable without hue. The hue turns from blue over green-teal to warm yellow, the axis that red-green color
blindness leaves intact. On a light ground the ramp is reversed: higher levels are darker.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache

from msgspec import Struct, field
from rich.color import Color
from rich.style import Style

from gputop.render.step_parts import PARTS

STEPS = 32  # distinct levels of color; more cannot be told apart on a terminal
SHADES = 9  # distinct brightnesses of one level: nothing … full
IDLE_SHADE = 4  # of the lowest bar for a measured zero, which is neither nothing nor a little

Rgb = tuple[int, int, int]


class Scheme(Struct, frozen=True):
    """Colors of a theme for the levels and the names. Pairs run from the lowest level to the highest."""

    lightness: tuple[float, float]
    chroma: tuple[float, float]
    hue: tuple[float, float]
    lane: tuple[float, float, float]  # OKLCH of the empty lane: visible as a track, never mistaken for a level
    muted: tuple[float, float]  # lightness of lanes that stand beside the main one and must not outshine it
    blank: float  # lightness of the dot where nothing was measured
    names: Mapping[str, str] = field(default_factory=dict)  # meaning → #rrggbb


DARK = Scheme((0.52, 0.92), (0.10, 0.11), (285.0, 92.0), (0.205, 0.012, 270.0), (0.42, 0.66), 0.42, {
    "text": "#d7dae0", "strong": "#f2f4f8", "dim": "#8b93a5", "warn": "#e5b567", "bad": "#ff6b7a", "accent": "#57c7d4",
    "ground": "#101218", "surface": "#161a23", "panel": "#1b1f2a", "border": "#3b4252",
    **{part.id: part.dark for part in PARTS}})
LIGHT = Scheme((0.63, 0.22), (0.10, 0.10), (98.0, 285.0), (0.96, 0.006, 270.0), (0.74, 0.48), 0.70, {
    "text": "#2a2f3a", "strong": "#0b0e14", "dim": "#5b6372", "warn": "#8a5a00", "bad": "#b3122b", "accent": "#00697a",
    "ground": "#fafafa", "surface": "#f1f2f5", "panel": "#e4e7ec", "border": "#b4bac6",
    **{part.id: part.light for part in PARTS}})
# Names after Okabe and Ito, "Color Universal Design" (2008), lightened for a black ground.
CONTRAST = Scheme((0.49, 0.97), (0.14, 0.13), (262.0, 100.0), (0.14, 0.0, 0.0), (0.44, 0.72), 0.60, {
    "text": "#ffffff", "strong": "#ffffff", "dim": "#c8c8c8", "warn": "#f0e442", "bad": "#ff8a3d", "accent": "#5cc8ff",
    "ground": "#000000", "surface": "#0a0a0a", "panel": "#1c1c1c", "border": "#9a9a9a",
    **{part.id: part.contrast for part in PARTS}})


def oklch_rgb(lightness: float, chroma: float, hue_degrees: float) -> Rgb:
    """OKLCH to 8-bit sRGB; matrices from the OKLab publication."""
    a = chroma * math.cos(math.radians(hue_degrees))
    b = chroma * math.sin(math.radians(hue_degrees))
    long = (lightness + 0.3963377774 * a + 0.2158037573 * b) ** 3
    medium = (lightness - 0.1055613458 * a - 0.0638541728 * b) ** 3
    short = (lightness - 0.0894841775 * a - 1.2914855480 * b) ** 3
    linear = (
        4.0767416621 * long - 3.3077115913 * medium + 0.2309699292 * short,
        -1.2684380046 * long + 2.6097574011 * medium - 0.3413193965 * short,
        -0.0041960863 * long - 0.7034186147 * medium + 1.7076147010 * short,
    )

    def encode(value: float) -> int:
        value = min(1.0, max(0.0, value))
        value = 12.92 * value if value <= 0.0031308 else 1.055 * value ** (1 / 2.4) - 0.055
        return round(255 * value)

    red, green, blue = linear
    return encode(red), encode(green), encode(blue)


def _mix(low: float, high: float, share: float) -> float:
    return low + (high - low) * share


@cache
def level_rgb(step: int, shade: int = SHADES - 1, muted: bool = False, scheme: str = "dark") -> Rgb:
    """Color of level ``step`` (0 … STEPS-1), faded to the ground by ``shade`` (0 … SHADES-1).

    ``muted`` is the ramp of lanes that stand beside the main one and must not outshine it.
    """
    s = SCHEMES[scheme]
    share = step / (STEPS - 1)
    full = (_mix(*s.lightness, share), _mix(*s.chroma, share), _mix(*s.hue, share))
    if muted:
        full = (_mix(*s.muted, share), 0.05, 250.0)
    if not shade:
        return oklch_rgb(*s.lane)  # one ground behind all levels
    strength = shade / (SHADES - 1)
    return oklch_rgb(_mix(s.lane[0], full[0], strength), _mix(s.lane[1], full[1], strength), full[2])


def step_of(level: float) -> int:
    """Color step of a level 0-1 (values outside are clipped)."""
    return min(STEPS - 1, max(0, int(level * STEPS)))


@cache
def bar_style(step: int, ghost_step: int = 0, ghost_shade: int = 0, muted: bool = False) -> Style:
    """A bar of this level; behind it the lane's ground, or a ghost of another level."""
    return Style(color=Color.from_rgb(*level_rgb(step, muted=muted)),
                 bgcolor=Color.from_rgb(*level_rgb(ghost_step if ghost_shade else 0, ghost_shade, muted)))


@cache
def cell_style(upper: tuple[int, int], lower: tuple[int, int], muted: bool = False) -> Style:
    """A half-block cell ▀: (step, shade) of its upper and lower half."""
    return Style(color=Color.from_rgb(*level_rgb(*upper, muted)), bgcolor=Color.from_rgb(*level_rgb(*lower, muted)))


SCHEMES: dict[str, Scheme] = {"dark": DARK, "light": LIGHT, "contrast": CONTRAST}


def blank_rgb(scheme: str = "dark") -> Rgb:
    """The dot where nothing was measured."""
    return oklch_rgb(SCHEMES[scheme].blank, 0.012, 270.0)


BLANK_STYLE = Style(color=Color.from_rgb(*blank_rgb()), bgcolor=Color.from_rgb(*level_rgb(0, 0)))

# Every style names its color, so that a line need not be combined with the widget's own on each repaint.
PLAIN = Style(color=DARK.names["text"])
BOLD = Style(color=DARK.names["strong"], bold=True)
DIM = Style(color=DARK.names["dim"])
WARN = Style(color=DARK.names["warn"])
BAD = Style(color=DARK.names["bad"], bold=True)
ACCENT = Style(color=DARK.names["accent"])
GAIN = ACCENT + Style(bold=True)

# The parts of a training step by id, wherever they are drawn.
PART_STYLE = {part.id: Style(color=part.dark) for part in PARTS}


@cache
def on(ground: Color, style: Style | None) -> Style:
    """``style`` with ``ground`` behind it, unless it brings a background of its own."""
    if style is None:
        return Style(bgcolor=ground)
    return style if style.bgcolor is not None else style + Style(bgcolor=ground)


SEVERITY_STYLE = {"high": BAD, "medium": WARN, "low": ACCENT}
# The shape tells the severity where color cannot.
SEVERITY_MARK = {"high": "●", "medium": "◐", "low": "○"}

"""Colours of the spectrogram: perceptually even, safe for colour-blind eyes, computed once.

The ramp runs in OKLCH (Björn Ottosson's OKLab, 2020): lightness rises evenly from dark to
light, so order is readable without hue; hue turns from blue over green-teal to warm yellow,
the axis that red-green colour blindness leaves intact.
"""

from __future__ import annotations

import math
from functools import cache

from rich.color import Color
from rich.style import Style

STEPS = 32  # distinct levels of colour; more cannot be told apart on a terminal
SHADES = 9  # distinct brightnesses of one level: nothing … full

_LIGHTNESS = (0.36, 0.90)
_CHROMA = (0.13, 0.15)
_HUE = (285.0, 92.0)
_GROUND = (0.17, 0.012, 270.0)  # the empty lane: visible as a track, never mistaken for a level

BLANK = "·"  # nothing was measured here; a measured zero draws as the lowest bar


def _rgb(lightness: float, chroma: float, hue_degrees: float) -> tuple[int, int, int]:
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
def level_rgb(step: int, shade: int = SHADES - 1, muted: bool = False) -> tuple[int, int, int]:
    """Colour of level ``step`` (0 … STEPS-1), faded to the ground by ``shade`` (0 … SHADES-1).

    ``muted`` is the ramp of lanes that stand beside the main one and must not outshine it.
    """
    share = step / (STEPS - 1)
    full = (_mix(*_LIGHTNESS, share), _mix(*_CHROMA, share), _mix(*_HUE, share))
    if muted:
        full = (_mix(0.34, 0.66, share), 0.05, 250.0)
    strength = shade / (SHADES - 1)
    return _rgb(_mix(_GROUND[0], full[0], strength), _mix(_GROUND[1], full[1], strength), full[2])


def step_of(level: float) -> int:
    """Colour step of a level 0-1 (values outside are clipped)."""
    return min(STEPS - 1, max(0, int(level * STEPS)))


@cache
def bar_style(step: int, ghost_step: int = 0, ghost_shade: int = 0, muted: bool = False) -> Style:
    """A bar of this level; behind it the lane's ground, or a ghost of another level."""
    return Style(color=Color.from_rgb(*level_rgb(step, muted=muted)),
                 bgcolor=Color.from_rgb(*level_rgb(ghost_step if ghost_shade else 0, ghost_shade, muted)))


@cache
def cell_style(upper: tuple[int, int], lower: tuple[int, int], muted: bool = False) -> Style:
    """A half-block cell: (step, shade) of its upper and lower half."""
    return Style(color=Color.from_rgb(*level_rgb(*upper, muted)), bgcolor=Color.from_rgb(*level_rgb(*lower, muted)))


BLANK_STYLE = Style(color=Color.from_rgb(*_rgb(0.38, 0.012, 270.0)), bgcolor=Color.from_rgb(*level_rgb(0, 0)))

# Every style names its colour, so that a line need not be combined with the widget's own on each repaint.
PLAIN = Style(color="#d7dae0")
BOLD = Style(color="#f2f4f8", bold=True)
DIM = Style(color="#8b93a5")
WARN = Style(color="#e5b567")
BAD = Style(color="#ff6b7a", bold=True)
ACCENT = Style(color="#57c7d4")


@cache
def on(ground: Color, style: Style | None) -> Style:
    """``style`` with ``ground`` behind it, unless it brings a background of its own."""
    if style is None:
        return Style(bgcolor=ground)
    return style if style.bgcolor is not None else style + Style(bgcolor=ground)


SEVERITY_STYLE = {"high": BAD, "medium": WARN, "low": ACCENT}
# The shape tells the severity where colour cannot.
SEVERITY_MARK = {"high": "●", "medium": "◐", "low": "○"}

"""Colors: even steps of lightness, for every eye, in every form; glyphs: a form for every terminal."""

from __future__ import annotations

import itertools
from typing import get_args

import pytest
from rich.color import Color
from rich.style import Style

from gputop.render.palette import (
    BAD,
    DIM,
    PART_STYLE,
    PLAIN,
    SCHEMES,
    SHADES,
    STEPS,
    Rgb,
    bar_style,
    cell_style,
    level_rgb,
)
from gputop.tui.terminal.color_support import (
    DENSITY,
    Colors,
    TerminalPalette,
    _levels,
    nearest_256,
    terminal_colors,
    terminal_glyphs,
)

# What eyes without one kind of cone see: Machado, Oliveira and Fernandes, "A Physiologically-based Model for
# Simulation of Color Vision Deficiency" (2009), severity 1.0, on linear sRGB.
BLIND = {
    "protan": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "deutan": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881)),
    "tritan": ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.303900)),
    "normal": ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0)),
}


def lab(rgb: Rgb, eye: str = "normal") -> tuple[float, float, float]:
    """CIELAB under D65 (CIE 15:2004) of an sRGB color as that eye sees it."""
    linear = [c / 255 / 12.92 if c <= 10.31 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in rgb]
    r, g, b = (min(1.0, max(0.0, sum(m * c for m, c in zip(row, linear, strict=True)))) for row in BLIND[eye])
    xyz = ((0.4124564 * r + 0.3575761 * g + 0.1804375 * b) / 0.95047, 0.2126729 * r + 0.7151522 * g + 0.0721750 * b,
           (0.0193339 * r + 0.1191920 * g + 0.9503041 * b) / 1.08883)
    x, y, z = (t ** (1 / 3) if t > 0.008856 else 7.787 * t + 16 / 116 for t in xyz)
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


def lightness(rgb: Rgb, eye: str = "normal") -> float:
    return lab(rgb, eye)[0]


def far(one: Rgb, other: Rgb, eye: str = "normal") -> float:
    """CIE76 difference; 2.3 is just noticeable."""
    return sum((a - b) ** 2 for a, b in zip(lab(one, eye), lab(other, eye), strict=True)) ** 0.5


@pytest.mark.parametrize("muted", [False, True])
@pytest.mark.parametrize("eye", BLIND)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_lightness_runs_one_way_in_even_steps_for_every_eye(scheme: str, eye: str, muted: bool) -> None:
    ramp = [lightness(level_rgb(step, muted=muted, scheme=scheme), eye) for step in range(STEPS)]
    steps = [b - a for a, b in itertools.pairwise(ramp)]
    way = -1 if scheme == "light" else 1
    assert all(way * step > -0.05 for step in steps), "the simulation clips at white"
    mean = sum(steps) / len(steps)
    if eye == "normal":
        assert abs(ramp[-1] - ramp[0]) > (20 if muted else 42), "most of what there is beyond three times the ground"
        assert all(0.5 * abs(mean) < way * step < 1.7 * abs(mean) for step in steps)


@pytest.mark.parametrize("eye", BLIND)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_quarter_of_the_scale_is_a_clear_difference_for_every_eye(scheme: str, eye: str) -> None:
    for step in range(STEPS - 8):
        assert far(level_rgb(step, scheme=scheme), level_rgb(step + 8, scheme=scheme), eye) > 10


@pytest.mark.parametrize("scheme", SCHEMES)
def test_shares_fade_to_a_ground_that_is_no_level(scheme: str) -> None:
    lowest, ground = (((lightness(level_rgb(0, shade, scheme=scheme)) + 16) / 116) ** 3 for shade in (SHADES - 1, 0))
    brighter, darker = sorted((lowest, ground), reverse=True)
    assert (brighter + 0.05) / (darker + 0.05) >= 3, "what little there is stands out: WCAG for graphics"
    for step in (0, STEPS // 2, STEPS - 1):
        ramp = [lightness(level_rgb(step, shade, scheme=scheme)) for shade in range(SHADES)]
        assert ramp == sorted(ramp, reverse=scheme == "light")
        assert far(level_rgb(0, 0, scheme=scheme), level_rgb(step, scheme=scheme)) > 15


@pytest.mark.parametrize("scheme", SCHEMES)
def test_what_is_read_has_the_contrast_of_wcag_aa(scheme: str) -> None:
    names = SCHEMES[scheme].names

    def luminance(name: str) -> float:
        return ((lightness(tuple(Color.parse(names[name]).get_truecolor())) + 16) / 116) ** 3  # type: ignore[arg-type]

    for name, ground in itertools.product(("text", "strong", "dim", "warn", "bad", "accent"), ("ground", "panel")):
        high, low = sorted((luminance(name), luminance(ground)), reverse=True)
        assert (high + 0.05) / (low + 0.05) > (7 if scheme == "contrast" else 4.5), (name, ground)


def ansi_rgb(number: int) -> Rgb:
    return tuple(Color.from_ansi(number).get_truecolor())  # type: ignore[return-value]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_in_256_colors_more_is_never_less(scheme: str) -> None:
    ramp = [lightness(ansi_rgb(nearest_256(level_rgb(step, scheme=scheme)))) for step in range(STEPS)]
    way = -1 if scheme == "light" else 1
    assert all(way * (b - a) > -1.5 for a, b in itertools.pairwise(ramp)), "one gray level at most"
    assert len(set(ramp)) >= 8


def test_in_16_colors_levels_are_colors_and_shares_densities() -> None:
    palette = TerminalPalette("dark", "16")
    seen = []
    for step in range(STEPS):
        text, style = palette.run("█▅", bar_style(step))
        assert text == "█▅" and style is not None and style.color is not None and style.color.number is not None
        seen.append(style.color.number)
    assert len(dict.fromkeys(seen)) == 5 and [n for n, _ in itertools.groupby(seen)] == list(dict.fromkeys(seen))
    glyphs = [palette.run("▀", cell_style((20, shade), (10, shade)))[0] for shade in range(SHADES)]
    assert [DENSITY.index(g) for g in glyphs] == sorted(DENSITY.index(g) for g in glyphs)
    assert glyphs[0] == " " and glyphs[1] == "░" and glyphs[-1] == "█"


@pytest.mark.parametrize("glyphs", ["unicode", "console", "ascii"])
def test_without_color_nothing_but_attributes_is_left_and_levels_are_glyphs(glyphs: str) -> None:
    palette = TerminalPalette("dark", "none", glyphs)  # type: ignore[arg-type]
    for style in (BAD, PLAIN, DIM, bar_style(3), cell_style((3, 8), (0, 8)), *PART_STYLE.values()):
        shown = palette.style(style)
        assert shown.color is None and shown.bgcolor is None and shown.bold == style.bold
    heights = [palette.run(bar, bar_style(9))[0] for bar in "▁▄█"]
    assert len(set(heights)) == 3
    shares = {palette.run("▀", cell_style((20, shade), (10, shade)))[0] for shade in range(SHADES)}
    assert len(shares) == 5
    parts = {palette.run("██", style)[0] for style in PART_STYLE.values()}
    assert len(parts) == len(PART_STYLE) and all(len(part) == 2 for part in parts)
    badge = palette.style(Style(color="black", bgcolor="yellow", bold=True))
    assert badge.reverse and badge.bold, "a badge stays one"
    assert not palette.style(cell_style((3, 8), (3, 8))).reverse, "levels do not become reverse video"


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("colors", get_args(Colors))
def test_every_form_keeps_width_and_every_glyph_gets_one(scheme: str, colors: str) -> None:
    from rich.cells import cell_len

    text = "".join(chr(c) for c in (*range(0x20, 0x250), *range(0x2010, 0x2600), *range(0x2800, 0x2900))
                   if chr(c).isprintable()) + "漢字 e\u0301 \u200b ⚡"
    for glyphs in ("unicode", "console", "ascii"):
        shown, _ = TerminalPalette(scheme, colors, glyphs).run(text, bar_style(3))  # type: ignore[arg-type]
        assert cell_len(shown) == cell_len(text)
        assert glyphs != "ascii" or shown.isascii()


def test_on_the_console_a_higher_bar_is_never_lower_and_a_little_is_not_half() -> None:
    assert TerminalPalette("dark", "16", "console").run("▁▂▃▄▅▆▇█", None)[0] == "__▄▄▄███"


def test_the_colors_of_levels_can_be_mapped_back() -> None:
    wrong = [(level, mapped) for level in itertools.product(range(STEPS), range(1, SHADES), (False, True))
             if (mapped := _levels()[level_rgb(*level)])[1] != level[1]]
    assert not wrong, "where two fall together, they are of one share"


def test_on_a_light_ground_dark_colors_of_views_turn_light_and_the_theme_s_own_stay() -> None:
    palette = TerminalPalette("light")
    mixed = palette.style(Style(color="#d7dae0", bgcolor="#161921"))
    assert mixed.bgcolor is not None and lightness(tuple(mixed.bgcolor.get_truecolor())) > 80  # type: ignore[arg-type]
    for color in SCHEMES["light"].names.values():
        kept = palette.style(Style(color=color, bgcolor=SCHEMES["light"].names["ground"]))
        assert kept.color == Style(color=color).color
    faint = palette.style(Style(color="#c8d0e0", bgcolor="#fafafa"))
    assert faint.color is not None and lightness(tuple(faint.color.get_truecolor())) < 60  # type: ignore[arg-type]


@pytest.mark.parametrize(("env", "colors"), [
    ({"COLORTERM": "truecolor", "TERM": "xterm"}, "truecolor"), ({"TERM": "xterm-kitty"}, "truecolor"),
    ({"TERM": "xterm-256color"}, "256"), ({"TERM": "tmux-256color"}, "256"), ({"TERM": "linux"}, "16"),
    ({"TERM": "screen"}, "16"), ({"TERM": "vt100"}, "none"), ({"TERM": "dumb"}, "none"), ({}, "none"),
    ({"COLORTERM": "truecolor", "TERM": "xterm", "NO_COLOR": "1"}, "none"),
    ({"COLORTERM": "truecolor", "TERM": "xterm", "NO_COLOR": ""}, "truecolor"),
])
def test_colors_follow_the_terminal(env: dict[str, str], colors: str) -> None:
    assert terminal_colors(env) == colors


@pytest.mark.parametrize(("env", "glyphs"), [
    ({"LANG": "en_US.UTF-8"}, "unicode"), ({"LANG": "de_DE.ISO-8859-1"}, "ascii"), ({}, "unicode"),
    ({"LANG": "C"}, "unicode"), ({"LC_ALL": "ja_JP.eucJP", "LANG": "en_US.UTF-8"}, "ascii"),
    ({"LANG": "en_US.utf8", "TERM": "linux"}, "console"), ({"LC_CTYPE": "C.UTF-8", "LC_ALL": ""}, "unicode"),
])
def test_glyphs_follow_locale_and_console(env: dict[str, str], glyphs: str) -> None:
    assert terminal_glyphs(env) == glyphs


@pytest.mark.parametrize("colors", ["truecolor", "256"])
def test_ascii_with_colors_shows_levels_by_density_in_one_color(colors: str) -> None:
    palette = TerminalPalette("dark", colors, "ascii")  # type: ignore[arg-type]
    shown = [palette.run("▀▀", cell_style((20, shade), (10, shade))) for shade in range(SHADES)]
    assert {text[0] for text, _ in shown} == set(" .:+#")
    assert len({str(style.color) for _, style in shown[1:] if style is not None}) == 1
    assert len({str(style.bgcolor) for _, style in shown if style is not None}) == 1
    assert palette.run("58°C 88°", PLAIN)[0] == "58 C 88C"


@pytest.mark.parametrize("glyphs", ["console", "ascii"])
def test_a_change_of_a_value_does_not_read_as_a_comparison(glyphs: str) -> None:
    palette = TerminalPalette("dark", "truecolor", glyphs)  # type: ignore[arg-type]
    assert palette.run("step 331 → 157 ms", bar_style(3))[0] == "step 331-> 157 ms"
    assert palette.run("  → Use prefetch.", bar_style(3))[0] == "  > Use prefetch.", "an action's mark"

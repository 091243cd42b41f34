"""Colors of the timeline. The style of a cell is a code, so that lines can be composed as arrays.

A code holds the kind of work (0: none), the cause of idleness, and flags: on a vertical line, part of a
named bar, selected, linked to the selection, on the selected row.
"""

from __future__ import annotations

from functools import cache

from rich.color import Color
from rich.style import Style

from gputop.render.palette import BOLD, DARK, Rgb, level_rgb
from gputop.render.step_parts import PART_IDS
from gputop.timeline.model import KINDS

# The part of the step whose color a kind of work has; a counter is none.
PART_OF = {"compute": "compute", "collective": "collectives", "h2d": "h2d", "d2h": "d2h", "d2d": "d2h", "p2p": "d2h",
           "copy": "h2d", "memset": "idle", "host": "host", "input": "input", "counter": "accent"}
KIND_STYLE = {kind: Style(color=DARK.names[part]) for kind, part in PART_OF.items()}

KIND_MASK = 0xF
CAUSE_SHIFT, CAUSE_MASK = 4, 0xF  # one more than the index into PART_IDS, 0: not known
RULED, BAR, SELECTED, LINKED, ROW = 0x100, 0x200, 0x400, 0x800, 0x1000


def _rgb(color: str) -> Rgb:
    return int(color[1:3], 16), int(color[3:5], 16), int(color[5:7], 16)


_LANE = level_rgb(0, 0)
_ROW_LANE: Rgb = (29, 34, 46)
_CURSOR: Rgb = (38, 84, 99)
_INK, _LIGHT, _RULE = (_rgb(DARK.names[name]) for name in ("ground", "strong", "border"))

assert len(KINDS) <= KIND_MASK and len(PART_IDS) < CAUSE_MASK  # the limits of the bits of a code


def mix(one: Rgb, other: Rgb, share: float) -> Rgb:
    """A mixture of two colors: ``share`` of the other one."""
    return (round(one[0] + (other[0] - one[0]) * share), round(one[1] + (other[1] - one[1]) * share),
            round(one[2] + (other[2] - one[2]) * share))


def cause_code(part: str) -> int:
    """The cause of idle time, a part of the step, as the number in a code, not yet shifted."""
    return PART_IDS.index(part) + 1


@cache
def style_of(code: int) -> Style:
    """The style of a cell with this code."""
    kind = KINDS[code & KIND_MASK]
    cause = code >> CAUSE_SHIFT & CAUSE_MASK
    lane = _ROW_LANE if code & ROW else _LANE
    color = _rgb(DARK.names[PART_OF[kind]]) if kind else _RULE
    if code & BAR:
        if code & SELECTED:
            return _style(_INK, mix(color, _LIGHT, 0.75), bold=True)
        if code & LINKED:
            return _style(_INK, mix(color, _LIGHT, 0.4), bold=True, underline=True)
        return _style(_INK, color)
    ground = mix(_LANE, _rgb(DARK.names[PART_IDS[cause - 1]]), 0.3) if cause else lane
    if code & RULED and kind:
        ground, color = mix(ground, _RULE, 0.35), mix(color, lane, 0.3)
    if code & (SELECTED | LINKED):
        ground = _CURSOR
        color = mix(color, _LIGHT, 0.7 if code & SELECTED else 0.4)
    return _style(color, ground)


@cache
def _style(color: Rgb, ground: Rgb, bold: bool = False, underline: bool = False) -> Style:
    return Style(color=Color.from_rgb(*color), bgcolor=Color.from_rgb(*ground), bold=bold or None,
                 underline=underline or None)


# The steps in the header, in turns; the one under the cursor.
STEP = (Style(color=DARK.names["text"], bgcolor="#222838"), Style(color=DARK.names["text"], bgcolor="#2c3343"))
STEP_HERE = BOLD + Style(bgcolor="#26545f")
RULE = Style(color=DARK.names["border"])

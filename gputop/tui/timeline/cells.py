"""Cells of the timeline and their colors: coverage as glyphs, ranges as named bars. Pure.

A cell is two half columns wide and eight eighths high. Where both halves are covered about equally,
the height of the glyph shows the share; where they differ, quarters of the cell show which half is covered.
The color shows the kind of work only, so that the lanes are readable without color.

The style of a cell is a code, so that lines can be composed as arrays. It holds the kind of work (0: none), the cause
of idleness, and flags: on a vertical line, part of a named bar, selected, linked to the selection, on the selected row.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
import numpy.typing as npt
from msgspec import Struct
from rich.cells import cell_len
from rich.color import Color
from rich.segment import Segment
from rich.style import Style

from gputop.render.palette import BOLD, DARK, Rgb, level_rgb
from gputop.render.step_parts import PART_IDS
from gputop.text.units import fit
from gputop.timeline.model import KINDS
from gputop.tui.timeline.viewport import View

Shares = npt.NDArray[np.float32]
Codes = npt.NDArray[np.int32]
Bools = npt.NDArray[np.bool_]

FULL = 7  # eighths of the height of a cell that is fully covered; the last eighth separates the rows
BAR_CELLS = 3  # a range needs that many whole cells to get a bar
_MAX_EDGE_RATIO = 1 / 8  # share of a cell that may be uncovered at either end of a bar
_MIN_CELLS_FOR_CUT_NAME = 5

# They change the character before and have no width of their own: behind a bar's edge one would shift the row.
_NO_SKIN_TONES = dict.fromkeys(range(0x1F3FB, 0x1F400), "\ufffd")
_HEIGHTS = " ▁▂▃▄▅▆▇█"
_QUARTERS = {(0, 0): " ", (0, 1): "▗", (1, 0): "▖", (1, 1): "▄", (0, 2): "▐", (2, 0): "▌", (1, 2): "▟", (2, 1): "▙",
             (2, 2): "█"}


def _glyph(left: int, right: int) -> str:
    """The glyph for two half columns, each 0-8 eighths high."""
    if abs(left - right) <= 2:
        return _HEIGHTS[(left + right + 1) // 2]
    return _QUARTERS[(left + 2) // 4, (right + 2) // 4]  # to none, half or all


_GLYPHS = np.array([_glyph(left, right) for left in range(9) for right in range(9)])


class CellLine(Struct):
    """One line of cells: a glyph each (two cells wide: the next is empty) and the code of its style."""

    glyphs: list[str]
    codes: Codes

    def copy(self) -> CellLine:
        return CellLine(self.glyphs, self.codes.copy())  # glyphs are not changed once a lane is done

    def put(self, begin: int, text: Sequence[str], code: int) -> None:
        """Draw over the cells from ``begin`` on; text beyond the ends of the line is cut off."""
        first, last = max(0, begin), min(len(self.glyphs), begin + len(text))
        if first < last:
            self.glyphs[first:last] = text[first - begin:last - begin]
            self.codes[first:last] = code

    def mark(self, first: int, last: int, flag: int) -> None:
        """Set a flag of the style on these cells."""
        self.codes[max(0, first):max(0, last)] |= flag

    def segments(self) -> list[Segment]:
        """The line as segments, one for each run of cells of one style."""
        if not self.glyphs:
            return []
        ends = (np.flatnonzero(self.codes[1:] != self.codes[:-1]) + 1).tolist()
        glyphs, codes = self.glyphs, self.codes.tolist()
        return [Segment("".join(glyphs[begin:end]), style_of(codes[begin]))
                for begin, end in zip([0, *ends], [*ends, len(glyphs)], strict=True)]


def draw_lines(cover: Shares, kinds: npt.NDArray[np.uint8], lines: Sequence[int], causes: npt.NDArray[np.uint8],
               rules: Bools, full: int = FULL) -> list[list[CellLine]]:
    """The coverage of rows as cells: for each row its lines from the top. Draws all rows at once, for speed.

    ``cover`` 0-1 and ``kinds`` (indices into :data:`~gputop.timeline.model.KINDS`) are of shape (rows, 2 × cells),
    ``lines`` is the number of lines of each row. ``causes``, (rows, cells), is the cause of idle time in a cell
    (:func:`~gputop.tui.timeline.cells.cause_code`, 0: not known), ``rules``, (cells,), marks the vertical lines.
    ``full``: eighths of the top line that stand for full coverage.
    """
    rows, cells = len(cover), cover.shape[1] // 2
    many = np.array(lines, np.int32)
    most = (8 * (many - 1) + full)[:, None]
    levels = np.rint(cover * most).astype(np.int32)
    np.clip(levels, cover > 0, most, out=levels)  # a small share is still visible
    pair = kinds.reshape(rows, cells, 2)
    kind = np.where(cover[:, 0::2] >= cover[:, 1::2], pair[:, :, 0], pair[:, :, 1]).astype(np.int32)

    row = np.repeat(np.arange(rows), many)  # from here on a row is one line
    below = 8 * (np.repeat(np.cumsum(many), many) - 1 - np.arange(len(row)))[:, None, None]
    levels = levels.reshape(rows, cells, 2)[row]
    part = np.clip(levels - below, 0, 8)
    # Where one half ends in the line below, a low other half is left out of this line.
    part[(part.max(axis=2) <= 2) & (levels.min(axis=2) < below[:, :, 0])] = 0
    index = part[:, :, 0] * 9 + part[:, :, 1]
    glyphs = _GLYPHS[index]
    codes = np.where(index > 0, kind[row], 0) | causes.astype(np.int32)[row] << CAUSE_SHIFT
    glyphs[rules & (index == 0)] = "│"
    codes[:, rules] |= RULED
    drawn = [CellLine(*line) for line in zip(glyphs.tolist(), codes, strict=True)]
    ends = np.cumsum(many).tolist()
    return [drawn[end - count:end] for end, count in zip(ends, many.tolist(), strict=True)]


def bar_cells(view: View, cells: int, start_ns: int, end_ns: int) -> tuple[int, int]:
    """The cells that a range covers but for an eighth: the first and the one after the last, within the view."""
    scale = cells / view.span_ns
    first = -int(-((start_ns - view.start_ns) * scale - _MAX_EDGE_RATIO) // 1)
    last = int(((end_ns - view.start_ns) * scale + _MAX_EDGE_RATIO) // 1)
    return max(0, first), min(cells, last)


def least_bar_ns(view: View, cells: int) -> int:
    """The duration below which a range never gets a bar, wherever it begins within a cell."""
    return int((BAR_CELLS - 2 * _MAX_EDGE_RATIO) * view.span_ns / cells)


def touched_cells(view: View, cells: int, start_ns: int, end_ns: int) -> tuple[int, int]:
    """The cells that a range covers at least in part; one or more for a range within the view."""
    if end_ns < view.start_ns or start_ns >= view.end_ns:
        return 0, 0
    scale = cells / view.span_ns
    first = max(0, int((start_ns - view.start_ns) * scale))
    last = -int(-(end_ns - view.start_ns) * scale // 1)
    return min(first, cells - 1), min(cells, max(first + 1, last))


def spread_out(text: str) -> list[str]:
    """``text`` by cells: a wide character is followed by an empty cell, an accent joins its letter."""
    if text.isascii():
        return list(text)
    out: list[str] = []
    for char in text:
        width = cell_len(char)
        if width == 0 and out:
            out[-1] += char
        else:
            out += [char, ""][:max(1, width)]
    return out


def put_bar(lines: Sequence[CellLine], first: int, last: int, name: str, code: int) -> None:
    """Draw a bar over these cells, with a thin left edge that separates it from a neighbor of the same kind. Where
    there is no room for its name, the coverage that is drawn already stays.

    On a single line it fills the cells; on several lines a gap at the top separates it from the row above, as
    :data:`FULL` does.
    """
    room = last - first
    if len(name) >= room and room < _MIN_CELLS_FOR_CUT_NAME:
        return  # cut to a letter or two it would say nothing, and an empty bar among full ones looks like a gap
    text = ["▏", *spread_out(fit(name.translate(_NO_SKIN_TONES), room - 1))]
    named = 0 if len(lines) == 1 else 1
    for i, line in enumerate(lines):
        if i == 0 and len(lines) > 1:
            line.put(first, ["▆", *"▇" * (room - 1)], code)
        else:
            line.put(first, text if i == named else ["▏", *" " * (room - 1)], code | BAR)


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

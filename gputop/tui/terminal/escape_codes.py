"""The shortest escape sequences that draw spans of text on a terminal: their order and their codes.

Most of what a monitor sends is color: a style takes 20 to 40 bytes, a changed figure two, a cursor address seven. So
spans of one style are drawn one after the other, wherever on the screen they are; the terminal shows a frame at once.
Where a lane has moved by a slice, the terminal itself shifts its cells, and only the new slice is sent.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from operator import is_not, ne, or_
from typing import NamedTuple

SgrCodes = str  # SGR parameters after a reset: "1;38;2;215;218;224"

_OFF = {"1": "22", "2": "22", "3": "23", "4": "24", "7": "27"}
MIN_CELLS_SAVED = 7  # a shift must save this many cells; its codes are as long as one or two cells with colors
MAX_SHIFT_COLUMNS = 6  # longer shifts are not searched for
_EQUAL_CELLS = re.compile(b"\0{%d,}" % MIN_CELLS_SAVED)
_MAX_BACKSPACES = 3  # as long as the shortest sequence that goes back


class StyledSpan(NamedTuple):
    """Text of one style in one row, each character one cell wide."""

    y: int
    x: int
    style: SgrCodes
    text: str


class Shift(NamedTuple):
    """The cells from ``begin`` to ``end`` of a row go ``by`` columns left; the last ``by`` are then unknown."""

    begin: int
    end: int
    by: int


@lru_cache(4096)
def parse_sgr(style: SgrCodes) -> tuple[frozenset[str], str, str]:
    """The attributes, the color and the background that SGR parameters set."""
    attributes: set[str] = set()
    color = ground = ""
    codes = iter(style.split(";"))
    for code in codes:
        if code in ("", "0"):
            attributes, color, ground = set(), "", ""
        elif code in ("38", "48"):
            kind = next(codes, "5")
            values = [next(codes, "0") for _ in range(3 if kind == "2" else 1)]
            text = ";".join([code, kind, *values])
            color, ground = (text, ground) if code == "38" else (color, text)
        elif code in ("39", "49"):
            color, ground = ("", ground) if code == "39" else (color, "")
        elif len(code) == 2 and code[0] in "39":
            color = code
        elif (len(code) == 2 and code[0] == "4") or (len(code) == 3 and code[:2] == "10"):
            ground = code
        elif code in _OFF.values():
            attributes -= {on for on, off in _OFF.items() if off == code}
        else:
            attributes.add(code)
    return frozenset(attributes), color, ground


@lru_cache(4096)
def sgr_transition(before: SgrCodes, after: SgrCodes) -> str:
    """The shortest sequence from one style to another."""
    if before == after:
        return ""
    old, new = parse_sgr(before), parse_sgr(after)
    whole = ["", *sorted(new[0]), *filter(None, new[1:])]
    gone = old[0] - new[0]
    if gone <= _OFF.keys():
        off = {_OFF[code] for code in gone}
        # 22 ends both bold and faint.
        codes = [*sorted(off), *sorted(code for code in new[0] if code not in old[0] or _OFF.get(code) in off)]
        codes += [new[1] or "39"] if new[1] != old[1] else []
        codes += [new[2] or "49"] if new[2] != old[2] else []
        if not codes:
            return ""
        whole = min(codes, whole, key=lambda code: len(";".join(code)))
    return "\x1b[" + ";".join(whole) + "m"


def cursor_to(y: int, x: int) -> str:
    """The sequence that moves the cursor; both counted from 0."""
    return f"\x1b[{y + 1};{x + 1}H" if x else f"\x1b[{y + 1}H"


def move(y: int, x: int, to_y: int, to_x: int) -> str:
    """The shortest of the sequences that move the cursor from one cell to another; all counted from 0."""
    whole = cursor_to(to_y, to_x)
    if y < 0:
        return whole
    vertical = "" if y == to_y else _step(to_y - y, "B", "A")
    back = x - to_x
    if 0 < back <= _MAX_BACKSPACES:
        return min(vertical + "\b" * back, whole, key=len)
    horizontal = "" if not back else "\r" if not to_x else _step(-back, "C", "D")
    return min(vertical + horizontal, whole, key=len)


def _step(by: int, forward: str, back: str) -> str:
    return f"\x1b[{abs(by) if abs(by) > 1 else ''}{forward if by > 0 else back}"


def spans_text(spans: Sequence[StyledSpan], width: int) -> tuple[list[str], SgrCodes]:
    """The text that draws the spans, given from top to bottom and left to right, and the style that is set after it.

    No style is set before it.
    """
    out: list[str] = []
    style, cursor = "", (-1, -1)
    for y, x, next_style, text in _ordered(spans):
        if cursor != (y, x):
            # Behind the last column the cursor may be in the next row.
            out.append(cursor_to(y, x) if cursor[1] >= width else move(cursor[0], cursor[1], y, x))
        if next_style is not style:
            out.append(sgr_transition(style, next_style))
        out.append(text)
        style, cursor = next_style, (y, x + len(text))
    return out, style


def _ordered(spans: Sequence[StyledSpan]) -> list[StyledSpan]:
    """The spans of one style after each other, and similar styles near each other.

    A span that is the only one of its style stays behind its left neighbor, which saves the cursor address.
    """
    times = Counter([span[2] for span in spans])
    chains: list[list[StyledSpan]] = []
    end = -1, -1
    for span in spans:
        y, x, style, text = span
        if times[style] == 1 and end == (y, x):
            chains[-1].append(span)
        else:
            chains.append([span])
        end = y, x + len(text)

    chains.sort(key=lambda chain: (_place(chain[0].style), len(chain)))
    return [span for chain in chains for span in chain]


@lru_cache(4096)
def _place(style: SgrCodes) -> tuple[str, str, list[str]]:
    """A sort key for styles: first what takes most bytes to change."""
    attributes, color, ground = parse_sgr(style)
    return ground, color, sorted(attributes)


def find_shifts(changed: bytes, chars: Sequence[str], styles: Sequence[SgrCodes], shown_chars: Sequence[str],
                shown_styles: Sequence[SgrCodes], columns: Iterable[int]) -> list[Shift]:
    """The stretches of a row that have moved to the left, where a shift sends fewer bytes than drawing them.

    ``changed`` are the :func:`differences` of the row from the one shown, ``columns`` the lengths of shifts to look
    for. Of two stretches that touch only one is shifted, because the first shift would move the second stretch.
    """
    shifts: list[Shift] = []
    first, last = changed.find(1), changed.rfind(1)  # a shift saves nothing left or right of them
    chars, styles = chars[first:last + 1], styles[first:last + 1]
    for by in columns:
        # Runs of cells that were ``by`` columns further right.
        before = slice(first + by, last + by + 1)
        for run in _EQUAL_CELLS.finditer(differences(chars, styles, shown_chars[before], shown_styles[before])):
            begin, end = first + run.start(), first + run.end() + by
            if changed.count(1, begin, end) - by >= MIN_CELLS_SAVED and all(
                    end <= m.begin or m.end <= begin for m in shifts):
                shifts.append(Shift(begin, end, by))
    return sorted(shifts)


def differences(chars: Sequence[str], styles: Sequence[SgrCodes], others: Sequence[str],
                other_styles: Sequence[SgrCodes]) -> bytes:
    """A 1 for each cell that differs between two rows, else a 0; as long as the shorter row.

    Styles are compared by identity. Where equal ones are different objects, more is sent than necessary.
    """
    if chars == others:  # a lane changes its colors, a figure its text
        return bytes(map(is_not, styles, other_styles))
    if styles == other_styles:
        return bytes(map(ne, chars, others))
    return bytes(map(or_, map(ne, chars, others), map(is_not, styles, other_styles)))


def shifts_text(shifts: Mapping[Shift, Sequence[int]]) -> Iterator[str]:
    """Shift rows, those of each shift from top to bottom.

    In all of them the first cells are deleted, then as many are inserted at the end, so that the cells beyond come back
    to their place: from one row to the next the cursor then only goes down.
    """
    cursor = -1, -1
    for shift, rows in shifts.items():
        by = shift.by if shift.by > 1 else ""
        for x, code in ((shift.begin, "P"), (shift.end - shift.by, "@")):
            for y in rows:
                yield f"{move(*cursor, y, x)}\x1b[{by}{code}"
                cursor = y, x

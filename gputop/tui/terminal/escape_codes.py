"""The shortest text that brings strokes to a terminal: which first, and with which codes.

Most of what a monitor sends is colour: a style is 20 to 40 bytes, a figure that changed two, an address seven. So
strokes of one style are drawn together, wherever on the screen they are; a terminal shows a frame whole.
A lane that moved by a slice is moved by the terminal itself, and only the new slice is sent.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from operator import is_not, ne, or_
from typing import NamedTuple

Pen = str  # SGR parameters after a reset: "1;38;2;215;218;224"

_OFF = {"1": "22", "2": "22", "3": "23", "4": "24", "7": "27"}
WORTH_MOVING = 8  # cells that a move must save: its codes are as long as one or two of them in colour
_FAR = 2  # columns a move is looked for
_ALIKE = re.compile(b"\0{%d,}" % (WORTH_MOVING - _FAR))


class Stroke(NamedTuple):
    """Text in one pen, in one row, each character one cell wide."""

    y: int
    x: int
    pen: Pen
    text: str


class Move(NamedTuple):
    """The cells from ``begin`` to ``end`` of a row go ``by`` columns to the left; the last ``by`` are then unknown."""

    begin: int
    end: int
    by: int


@lru_cache(4096)
def parts_of(pen: Pen) -> tuple[frozenset[str], str, str]:
    """Attributes, colour and background of a pen."""
    attributes: set[str] = set()
    color = ground = ""
    codes = iter(pen.split(";"))
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
def change(before: Pen, after: Pen) -> str:
    """The shortest sequence from one pen to another."""
    if before == after:
        return ""
    old, new = parts_of(before), parts_of(after)
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


def address(y: int, x: int) -> str:
    """Puts the cursor there; counted from 0."""
    return f"\x1b[{y + 1};{x + 1}H" if x else f"\x1b[{y + 1}H"


def text_of(strokes: Sequence[Stroke], width: int) -> tuple[list[str], Pen]:
    """What draws the strokes, given from top to bottom and left to right, from no pen on; and the pen in the end."""
    out: list[str] = []
    pen, at = "", (-1, -1)
    for y, x, next_pen, text in _ordered(strokes):
        if at[0] == y and at[1] < x and at[1] < width:  # in the last column it may be in the next row
            by = x - at[1]
            out.append(f"\x1b[{by}C" if by > 1 else "\x1b[C")
        elif at != (y, x):
            out.append(address(y, x))
        if next_pen is not pen:
            out.append(change(pen, next_pen))
        out.append(text)
        pen, at = next_pen, (y, x + len(text))
    return out, pen


def _ordered(strokes: Sequence[Stroke]) -> list[Stroke]:
    """Strokes of one pen after each other, like pens near each other.

    What is alone with its pen follows its neighbour: there is no code to save, but an address.
    """
    times = Counter([stroke[2] for stroke in strokes])
    chains: list[list[Stroke]] = []
    end = -1, -1
    for stroke in strokes:
        y, x, pen, text = stroke
        if times[pen] == 1 and end == (y, x):
            chains[-1].append(stroke)
        else:
            chains.append([stroke])
        end = y, x + len(text)

    chains.sort(key=lambda chain: (_place(chain[0].pen), len(chain)))
    return [stroke for chain in chains for stroke in chain]


@lru_cache(4096)
def _place(pen: Pen) -> tuple[str, str, list[str]]:
    """Sorts pens by what costs most to change."""
    attributes, color, ground = parts_of(pen)
    return ground, color, sorted(attributes)


def moves(changed: bytes, chars: Sequence[str], pens: Sequence[Pen], shown_chars: Sequence[str],
          shown_pens: Sequence[Pen]) -> list[Move]:
    """Which stretches of a row have moved to the left, where that saves more than it costs.

    ``changed`` are its :func:`differences` from the one shown.
    Of two stretches that touch only one is moved, as the second would be moved by the first.
    """
    found: list[Move] = []
    for by in range(1, _FAR + 1):
        # Where what was ``by`` columns to the right stands now: from one end of a run to the other.
        for run in _ALIKE.finditer(differences(chars, pens, shown_chars[by:], shown_pens[by:])):
            begin, end = run.start(), run.end() + by
            if changed.count(1, begin, end) >= WORTH_MOVING and all(end <= m.begin or m.end <= begin for m in found):
                found.append(Move(begin, end, by))
    return sorted(found)


def differences(chars: Sequence[str], pens: Sequence[Pen], others: Sequence[str],
                other_pens: Sequence[Pen]) -> bytes:
    """A 1 for each cell that is not the same on two rows, else a 0; as long as the shorter one.

    Equal pens are taken to be the same object: where they are not, more is sent than need be.
    """
    return bytes(map(or_, map(ne, chars, others), map(is_not, pens, other_pens)))


def move_text(y: int, move: Move) -> str:
    """Has the terminal delete the first cells and insert as many at the end: what is beyond stays where it is."""
    by = move.by if move.by > 1 else ""
    on = move.end - move.begin - move.by
    return f"{address(y, move.begin)}\x1b[{by}P\x1b[{on}C\x1b[{by}@"

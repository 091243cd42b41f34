"""The shortest text that brings spans to a terminal: which first, and with which codes.

Most of what a monitor sends is color: a style is 20 to 40 bytes, a figure that changed two, an address seven. So
spans of one style are drawn together, wherever on the screen they are; a terminal shows a frame whole.
A lane that moved by a slice is moved by the terminal itself, and only the new slice is sent.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from operator import is_not, ne, or_
from typing import NamedTuple

SgrCodes = str  # SGR parameters after a reset: "1;38;2;215;218;224"

_OFF = {"1": "22", "2": "22", "3": "23", "4": "24", "7": "27"}
MIN_CELLS_SAVED = 8  # cells that a move must save: its codes are as long as one or two of them in color
_MAX_SHIFT_COLUMNS = 2  # columns a move is looked for
_EQUAL_CELLS = re.compile(b"\0{%d,}" % (MIN_CELLS_SAVED - _MAX_SHIFT_COLUMNS))


class StyledSpan(NamedTuple):
    """Text in one sgr, in one row, each character one cell wide."""

    y: int
    x: int
    sgr: SgrCodes
    text: str


class Shift(NamedTuple):
    """The cells from ``begin`` to ``end`` of a row go ``by`` columns to the left; the last ``by`` are then unknown."""

    begin: int
    end: int
    by: int


@lru_cache(4096)
def parse_sgr(sgr: SgrCodes) -> tuple[frozenset[str], str, str]:
    """Attributes, color and background of a sgr."""
    attributes: set[str] = set()
    color = ground = ""
    codes = iter(sgr.split(";"))
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
    """The shortest sequence from one sgr to another."""
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
    """Puts the cursor there; counted from 0."""
    return f"\x1b[{y + 1};{x + 1}H" if x else f"\x1b[{y + 1}H"


def spans_text(spans: Sequence[StyledSpan], width: int) -> tuple[list[str], SgrCodes]:
    """What draws the spans, given from top to bottom and left to right, from no sgr on; and the sgr in the end."""
    out: list[str] = []
    sgr, at = "", (-1, -1)
    for y, x, next_sgr, text in _ordered(spans):
        if at[0] == y and at[1] < x and at[1] < width:  # in the last column it may be in the next row
            by = x - at[1]
            out.append(f"\x1b[{by}C" if by > 1 else "\x1b[C")
        elif at != (y, x):
            out.append(cursor_to(y, x))
        if next_sgr is not sgr:
            out.append(sgr_transition(sgr, next_sgr))
        out.append(text)
        sgr, at = next_sgr, (y, x + len(text))
    return out, sgr


def _ordered(spans: Sequence[StyledSpan]) -> list[StyledSpan]:
    """Strokes of one sgr after each other, like sgrs near each other.

    What is alone with its sgr follows its neighbor: there is no code to save, but an address.
    """
    times = Counter([span[2] for span in spans])
    chains: list[list[StyledSpan]] = []
    end = -1, -1
    for span in spans:
        y, x, sgr, text = span
        if times[sgr] == 1 and end == (y, x):
            chains[-1].append(span)
        else:
            chains.append([span])
        end = y, x + len(text)

    chains.sort(key=lambda chain: (_place(chain[0].sgr), len(chain)))
    return [span for chain in chains for span in chain]


@lru_cache(4096)
def _place(sgr: SgrCodes) -> tuple[str, str, list[str]]:
    """Sorts sgrs by what costs most to change."""
    attributes, color, ground = parse_sgr(sgr)
    return ground, color, sorted(attributes)


def find_shifts(changed: bytes, chars: Sequence[str], sgrs: Sequence[SgrCodes], shown_chars: Sequence[str],
          shown_sgrs: Sequence[SgrCodes]) -> list[Shift]:
    """Which stretches of a row have moved to the left, where that saves more than it costs.

    ``changed`` are its :func:`differences` from the one shown.
    Of two stretches that touch only one is moved, as the second would be moved by the first.
    """
    found: list[Shift] = []
    for by in range(1, _MAX_SHIFT_COLUMNS + 1):
        # Where what was ``by`` columns to the right stands now: from one end of a run to the other.
        for run in _EQUAL_CELLS.finditer(differences(chars, sgrs, shown_chars[by:], shown_sgrs[by:])):
            begin, end = run.start(), run.end() + by
            if changed.count(1, begin, end) >= MIN_CELLS_SAVED and all(end <= m.begin or m.end <= begin for m in found):
                found.append(Shift(begin, end, by))
    return sorted(found)


def differences(chars: Sequence[str], sgrs: Sequence[SgrCodes], others: Sequence[str],
                other_sgrs: Sequence[SgrCodes]) -> bytes:
    """A 1 for each cell that is not the same on two rows, else a 0; as long as the shorter one.

    Equal sgrs are taken to be the same object: where they are not, more is sent than need be.
    """
    return bytes(map(or_, map(ne, chars, others), map(is_not, sgrs, other_sgrs)))


def shift_text(y: int, shift: Shift) -> str:
    """Has the terminal delete the first cells and insert as many at the end: what is beyond stays where it is."""
    by = shift.by if shift.by > 1 else ""
    on = shift.end - shift.begin - shift.by
    return f"{cursor_to(y, shift.begin)}\x1b[{by}P\x1b[{on}C\x1b[{by}@"

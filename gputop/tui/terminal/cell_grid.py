"""Grids of what the terminal shows and what it should show, cell by cell; only the difference is sent.

Textual writes whole regions with the full style of each text, although on a monitor few cells change from one second
to the next. Here its output is drawn into a grid, and :meth:`CellGrid.update` returns the shortest text that brings
the terminal to that state. Frames can be dropped, too: any number of frames may be fed between two updates, and one
update brings a terminal that has not read for a minute up to date.

The grid interprets what Textual and an update draw with: cursor addresses, SGR, text. Everything else (modes, the
clipboard, the bell) is passed on in order, before the cells. Rows with characters whose width differs between
terminals are sent whole, so that an error cannot spread.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache
from itertools import compress, count
from operator import is_not

from rich.cells import get_character_cell_size

from gputop.tui.terminal import escape_codes
from gputop.tui.terminal.escape_codes import MAX_SHIFT_COLUMNS, MIN_CELLS_SAVED, SgrCodes, Shift, StyledSpan

# One cell each on every terminal: Latin, punctuation, arrows, mathematics, boxes, blocks, shapes, braille.
_ONE_CELL = "[ -~\xa0-\u02ff\u2010-\u2027\u2039\u203a\u2190-\u21ff\u2200-\u22ff\u2500-\u25fc\u2800-\u28ff]"
_NARROW = re.compile(f"{_ONE_CELL}*")
_TOKEN = re.compile(
    rf"\x1b\[([0-9;]+)m({_ONE_CELL}+)\x1b\[0?m"  # most of the output: a text with its style, and a reset
    r"|\x1b\[([0-?]*)([ -/]*[@-~])"  # CSI
    r"|\x1b\].*?(?:\x07|\x1b\\)|\x1b[PX^_].*?\x1b\\"  # OSC and other strings
    r"|\x1b[^\[\]PX^_]|[\x00-\x1a\x1c-\x1f\x7f]", re.S)
_CHANGED = re.compile(b"\x01+")
_MAX_ROWS_WITHOUT_SHIFT = 6  # in a row; as lanes move together, the screen then shows something else
_SYNC = re.compile(r"\?2026")
_MAX_GAP_REWRITTEN = 4  # writing so few unchanged cells again takes fewer bytes than moving the cursor over them


def _after(style: SgrCodes, parameters: str) -> SgrCodes:
    """The style after a sequence with these parameters."""
    if style and parameters not in ("", "0") and not parameters.startswith("0;"):
        return f"{style};{parameters}"
    return parameters.removeprefix("0").lstrip(";")


@lru_cache(4096)
def _styles_of(parameters: str) -> tuple[SgrCodes, SgrCodes]:
    """The style that these parameters set after a reset, and the same for a space."""
    style = _after("", parameters)
    return _same(style), _blank(style)


@lru_cache(4096)
def _same(style: SgrCodes) -> SgrCodes:
    """The first of equal styles, so that equality can be tested by identity."""
    return style


@lru_cache(4096)
def _blank(style: SgrCodes) -> SgrCodes:
    """The style of a space: without its color, which is invisible unless a line goes through it."""
    attributes, _, ground = escape_codes.parse_sgr(style)
    return _same(style if attributes & {"4", "7", "9", "21", "53"} else ground)


class CellGrid:
    """The grid of a terminal of ``width`` by ``height`` cells; what the terminal shows is unknown at first."""

    def __init__(self, width: int, height: int) -> None:
        self.synchronized = False  # the terminal asked for frames in brackets (mode 2026)
        self.resize(width, height)

    def resize(self, width: int, height: int) -> None:
        """Another size. Terminals differ in what they keep on the screen, so what it shows is unknown."""
        self.width, self.height = max(1, width), max(1, height)
        self._chars = [[" "] * self.width for _ in range(self.height)]
        self._styles = [[""] * self.width for _ in range(self.height)]
        self._wide: set[int] = set()  # rows with a character of uncertain width
        self._x = self._y = 0
        self._style: SgrCodes = ""
        self._controls: list[str] = []
        self.forget()

    def forget(self) -> None:
        """Forget what the terminal shows: the next update draws every cell."""
        self._shown_chars: list[list[str]] = [[]] * self.height
        self._shown_styles: list[list[SgrCodes]] = [[]] * self.height
        self._dirty = set(range(self.height))

    @property
    def due(self) -> bool:
        """Return whether there is anything to send."""
        return bool(self._dirty or self._controls)

    @property
    def cursor(self) -> tuple[int, int]:
        """Column and row, from 0, where an update leaves the cursor."""
        return self._x, self._y

    def controls(self) -> str:
        """Sequences that were written besides text, without the cells; used when the screen is restored."""
        out, self._controls = "".join(self._controls), []
        return out

    def withdraw(self, control: str) -> None:
        """Remove this control from what is still to be sent."""
        self._controls = [other for other in self._controls if other != control]

    def feed(self, data: str) -> None:
        """Draw what was written; nothing is sent."""
        position = 0
        texts: list[tuple[str, str]] = []  # side by side, with their parameters; put down together
        for match in _TOKEN.finditer(data):
            start, (parameters, text) = match.start(), match.group(1, 2)
            if texts and (start > position or text is None):
                self._put_styled(texts)
                texts = []
            if start > position:
                self._put(data[position:start])
            position = match.end()
            if text is None:
                self._control(match)
            elif self._style:
                self._style = _after(self._style, parameters)
                self._put(text)
                self._style = ""
            else:
                texts.append((text, parameters))
        if texts:
            self._put_styled(texts)
        if position < len(data):
            self._put(data[position:])

    def _control(self, match: re.Match[str]) -> None:
        whole, parameters, final = match.group(0, 3, 4)
        if final == "m":
            self._style = _after(self._style, parameters)
        elif final in ("H", "f"):
            y, _, x = parameters.partition(";")
            self._y, self._x = int(y or 1) - 1, int(x or 1) - 1
        elif final in ("C", "D"):
            self._x += int(parameters or 1) * (1 if final == "C" else -1)
        elif final in ("A", "B"):
            self._y += int(parameters or 1) * (1 if final == "B" else -1)
        elif whole == "\b":
            self._x -= 1
        elif final in ("P", "@"):
            self._shift(int(parameters or 1), final == "P")
        elif whole == "\n":
            self._y += 1
        elif whole == "\r":
            self._x = 0
        elif final in ("h", "l") and _SYNC.fullmatch(parameters):
            self.synchronized = True  # the brackets go around the update, not around what is fed
        elif whole.startswith("\x1b]8;"):
            pass  # links are not drawn
        else:
            self._controls.append(whole)

    def _shift(self, cells: int, left: bool) -> None:
        """Delete cells at the cursor, or insert blank ones; the cells to their right move."""
        if 0 <= self._y < self.height:
            self._dirty.add(self._y)
            for row, blank in ((self._chars[self._y], " "), (self._styles[self._y], _same(""))):
                behind = row[self._x:]
                gap = [blank] * min(cells, len(behind))
                row[self._x:] = [*behind[cells:], *gap] if left else [*gap, *behind[:len(behind) - len(gap)]]

    def _put(self, text: str) -> None:
        """Text in the current style."""
        if self._y not in self._wide and _NARROW.fullmatch(text):
            style, blank = _styles_of(self._style)
            self._put_narrow(text, [blank if text.isspace() else style] * len(text))
        else:
            self._put_wide(text)

    def _put_styled(self, texts: list[tuple[str, str]]) -> None:
        """Texts of which each character is one cell, in the styles of these parameters."""
        if self._y in self._wide:
            for text, parameters in texts:
                self._style = _styles_of(parameters)[0]
                self._put_wide(text)
            self._style = ""
            return
        styles: list[SgrCodes] = []
        for text, parameters in texts:
            style, blank = _styles_of(parameters)
            styles += [blank if text.isspace() else style] * len(text)
        self._put_narrow("".join([text for text, _ in texts]), styles)

    def _put_narrow(self, text: str, styles: list[SgrCodes]) -> None:
        """Text of which each character is one cell, on a row of such."""
        x, y = self._x, self._y
        self._x = end = x + len(text)
        if not 0 <= y < self.height:
            return
        if end > self.width:
            end = max(x, self.width)
            text, styles = text[:end - x], styles[:end - x]
        self._dirty.add(y)
        self._chars[y][x:end] = text
        self._styles[y][x:end] = styles

    def _put_wide(self, text: str) -> None:
        """Character by character: the second cell of a wide one is empty, a combining one joins the cell before."""
        if not 0 <= self._y < self.height:
            return
        self._dirty.add(self._y)
        chars, styles = self._chars[self._y], self._styles[self._y]
        self._wide.add(self._y)
        for char in text:
            cells = get_character_cell_size(char)
            if cells == 0:
                before = min(self._x, self.width) - 1
                if before >= 1 and chars[before] == "":
                    before -= 1
                if before >= 0:
                    chars[before] += char
                continue
            if self._x + cells <= self.width:
                if chars[self._x] == "" and self._x:
                    chars[self._x - 1] = " "  # half of a wide character is left: terminals blank it
                after = self._x + cells
                if after < self.width and chars[after] == "":
                    chars[after] = " "
                chars[self._x:after] = [char, *[""] * (cells - 1)]
                styles[self._x:after] = [_same(self._style)] * cells
            self._x += cells

    def update(self) -> str:
        """The text that makes the terminal show what was fed; from then on it counts as shown."""
        out = [self.controls()]
        frame: list[str] = []
        spans: list[StyledSpan] = []
        rows_without_shift = 0  # in a row, of those that changed much
        shifts: set[int] = set()  # found in the row above: lanes move together
        shifted: dict[Shift, list[int]] = {}
        for y in sorted(self._dirty):
            chars, styles = self._chars[y], self._styles[y]
            shown_chars, shown_styles = self._shown_chars[y], self._shown_styles[y]
            if chars == shown_chars and styles == shown_styles:
                continue
            if not shown_chars or y in self._wide:
                frame += self._whole(y)
            else:
                changed = escape_codes.differences(chars, styles, shown_chars, shown_styles)
                if rows_without_shift < _MAX_ROWS_WITHOUT_SHIFT and changed.count(1) >= MIN_CELLS_SAVED:
                    row_shifts = escape_codes.find_shifts(changed, chars, styles, shown_chars, shown_styles,
                                                          sorted(shifts) or range(1, MAX_SHIFT_COLUMNS + 1))
                    shifts = {shift.by for shift in row_shifts}
                    rows_without_shift = 0 if row_shifts else rows_without_shift + 1
                    for shift in row_shifts:
                        shifted.setdefault(shift, []).append(y)
                        for row, unknown in ((shown_chars, ""), (shown_styles, "?")):
                            row[shift.begin:shift.end] = [*row[shift.begin + shift.by:shift.end], *[unknown] * shift.by]
                    if row_shifts:
                        changed = escape_codes.differences(chars, styles, shown_chars, shown_styles)
                spans += self._changed_spans(y, changed)
            self._shown_chars[y], self._shown_styles[y] = chars[:], styles[:]
        self._dirty.clear()
        drawn, style = escape_codes.spans_text(spans, self.width)
        frame = [*escape_codes.shifts_text(shifted), *frame, *drawn]
        if frame:
            frame.append("\x1b[m" if style else "")
            frame.append(escape_codes.cursor_to(self._y, self._x))  # screen readers and input methods look there
            out += ["\x1b[?2026h", *frame, "\x1b[?2026l"] if self.synchronized else frame
        return "".join(out)

    def _whole(self, y: int) -> Iterator[str]:
        """A row that is unknown or has uncertain widths, from left to right; no style is set after it."""
        chars, styles = self._chars[y], self._styles[y]
        if y in self._wide and all(map(_NARROW.fullmatch, chars)) and "" not in chars:
            self._wide.discard(y)  # sent whole once more
        yield escape_codes.cursor_to(y, 0)
        style = ""
        for start, end in _runs(styles, 0, self.width):
            yield escape_codes.sgr_transition(style, styles[start])
            yield from chars[start:end]
            style = styles[start]
        yield "\x1b[m" if style else ""

    def _changed_spans(self, y: int, changed: bytes) -> Iterator[StyledSpan]:
        """The spans of a row that differ."""
        chars, styles = self._chars[y], self._styles[y]
        spans: list[tuple[int, int]] = []
        for run in _CHANGED.finditer(changed):
            x, behind = run.span()
            start, end = spans[-1] if spans else (0, -_MAX_GAP_REWRITTEN - 1)
            if x - end <= _MAX_GAP_REWRITTEN and len(set(styles[end - 1:x + 1])) == 1:
                spans[-1] = (start, behind)
            else:
                spans.append((x, behind))
        for span in spans:
            for start, end in _runs(styles, *span):
                yield StyledSpan(y, start, styles[start], "".join(chars[start:end]))


def _runs(styles: list[SgrCodes], begin: int, end: int) -> list[tuple[int, int]]:
    """Stretches of one style: first column and the one behind the last."""
    if end - begin == 1:
        return [(begin, end)]
    turns = list(compress(count(begin + 1), map(is_not, styles[begin + 1:end], styles[begin:end - 1])))
    return list(zip([begin, *turns], [*turns, end], strict=True))

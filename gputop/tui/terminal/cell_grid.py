"""What the terminal shows and what it should show, cell by cell: the difference is all that is sent.

Textual writes whole regions with every style spelled out; on a monitor few cells change from one second
to the next. So what it writes is drawn here into a grid, and :meth:`CellGrid.update` gives the shortest text
that brings the terminal there. It also makes frames droppable: between two calls any number of frames may
be fed, and a terminal that was not read for a minute is brought up to date by one update.

Understood is what Textual and an update draw with: cursor addresses, SGR, text. Everything else (modes, the clipboard,
a bell) is passed on in order, ahead of the cells. Rows with characters whose width terminals disagree
about are sent whole, so that an error cannot spread.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache
from itertools import compress, count
from operator import is_not

from rich.cells import get_character_cell_size

from gputop.tui.terminal.escape_codes import (
    MIN_CELLS_SAVED,
    SgrCodes,
    StyledSpan,
    cursor_to,
    differences,
    find_shifts,
    parse_sgr,
    sgr_transition,
    shift_text,
    spans_text,
)

# One cell each on every terminal: Latin, punctuation, arrows, mathematics, boxes, blocks, shapes, braille.
_ONE_CELL = "[ -~\xa0-\u02ff\u2010-\u2027\u2039\u203a\u2190-\u21ff\u2200-\u22ff\u2500-\u25fc\u2800-\u28ff]"
_NARROW = re.compile(f"{_ONE_CELL}*")
_TOKEN = re.compile(
    rf"\x1b\[([0-9;]+)m({_ONE_CELL}+)\x1b\[0?m"  # nearly all there is: a text in its style, and a reset
    r"|\x1b\[([0-?]*)([ -/]*[@-~])"  # CSI
    r"|\x1b\].*?(?:\x07|\x1b\\)|\x1b[PX^_].*?\x1b\\"  # OSC and other strings
    r"|\x1b[^\[\]PX^_]|[\x00-\x1a\x1c-\x1f\x7f]", re.S)
_CHANGED = re.compile(b"\x01+")
_MAX_ROWS_WITHOUT_SHIFT = 6  # after so many rows that did not move it is another picture: lanes move together
_SYNC = re.compile(r"\?2026")
_MAX_GAP_REWRITTEN = 4  # unchanged cells up to here are cheaper written again than stepped over


def _after(sgr: SgrCodes, parameters: str) -> SgrCodes:
    """The sgr that a sequence with these parameters makes of one."""
    if sgr and parameters not in ("", "0") and not parameters.startswith("0;"):
        return f"{sgr};{parameters}"
    return parameters.removeprefix("0").lstrip(";")


@lru_cache(4096)
def _sgr_of(parameters: str) -> tuple[SgrCodes, SgrCodes]:
    """The sgr that these parameters make after a reset, and what it is for a space."""
    sgr = _after("", parameters)
    return _same(sgr), _blank(sgr)


@lru_cache(4096)
def _same(sgr: SgrCodes) -> SgrCodes:
    """Of equal sgrs the first, so that identity tells whether two are equal."""
    return sgr


@lru_cache(4096)
def _blank(sgr: SgrCodes) -> SgrCodes:
    """The sgr of a space: its color cannot be seen, unless a line goes through it."""
    attributes, _, ground = parse_sgr(sgr)
    return _same(sgr if attributes & {"4", "7", "9", "21", "53"} else ground)


class CellGrid:
    """The grid of a terminal of ``width`` by ``height``, of which nothing is known at first."""

    def __init__(self, width: int, height: int) -> None:
        self.synchronized = False  # the terminal asked for frames in brackets (mode 2026)
        self.resize(width, height)

    def resize(self, width: int, height: int) -> None:
        """Another size; terminals differ in what they leave on the screen, so nothing is known of it."""
        self.width, self.height = max(1, width), max(1, height)
        self._chars = [[" "] * self.width for _ in range(self.height)]
        self._sgrs = [[""] * self.width for _ in range(self.height)]
        self._wide: set[int] = set()  # rows with a character whose width is not sure
        self._x = self._y = 0
        self._sgr: SgrCodes = ""
        self._controls: list[str] = []
        self.forget()

    def forget(self) -> None:
        """Nothing is known of what the terminal shows: the next update draws every cell."""
        self._shown_chars: list[list[str]] = [[]] * self.height
        self._shown_sgrs: list[list[SgrCodes]] = [[]] * self.height
        self._dirty = set(range(self.height))

    @property
    def due(self) -> bool:
        """Whether an update would say anything."""
        return bool(self._dirty or self._controls)

    @property
    def cursor(self) -> tuple[int, int]:
        """Column and row, from 0, where an update leaves the cursor."""
        return self._x, self._y

    def controls(self) -> str:
        """What was written besides text, without the cells; for when the screen is given back."""
        out, self._controls = "".join(self._controls), []
        return out

    def withdraw(self, control: str) -> None:
        """Do not send this control, if it has not been sent."""
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
            elif self._sgr:
                self._sgr = _after(self._sgr, parameters)
                self._put(text)
                self._sgr = ""
            else:
                texts.append((text, parameters))
        if texts:
            self._put_styled(texts)
        if position < len(data):
            self._put(data[position:])

    def _control(self, match: re.Match[str]) -> None:
        whole, parameters, final = match.group(0, 3, 4)
        if final == "m":
            self._sgr = _after(self._sgr, parameters)
        elif final in ("H", "f"):
            y, _, x = parameters.partition(";")
            self._y, self._x = int(y or 1) - 1, int(x or 1) - 1
        elif final == "C":
            self._x += int(parameters or 1)
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
        """Delete cells at the cursor, or insert blank ones; what is behind them moves."""
        if 0 <= self._y < self.height:
            self._dirty.add(self._y)
            for row, blank in ((self._chars[self._y], " "), (self._sgrs[self._y], _same(""))):
                behind = row[self._x:]
                gap = [blank] * min(cells, len(behind))
                row[self._x:] = [*behind[cells:], *gap] if left else [*gap, *behind[:len(behind) - len(gap)]]

    def _put(self, text: str) -> None:
        """Text in the present sgr."""
        if self._y not in self._wide and _NARROW.fullmatch(text):
            sgr, blank = _sgr_of(self._sgr)
            self._put_narrow(text, [blank if text.isspace() else sgr] * len(text))
        else:
            self._put_wide(text)

    def _put_styled(self, texts: list[tuple[str, str]]) -> None:
        """Texts of which each character is one cell, in the styles of these parameters."""
        if self._y in self._wide:
            for text, parameters in texts:
                self._sgr = _sgr_of(parameters)[0]
                self._put_wide(text)
            self._sgr = ""
            return
        sgrs: list[SgrCodes] = []
        for text, parameters in texts:
            sgr, blank = _sgr_of(parameters)
            sgrs += [blank if text.isspace() else sgr] * len(text)
        self._put_narrow("".join([text for text, _ in texts]), sgrs)

    def _put_narrow(self, text: str, sgrs: list[SgrCodes]) -> None:
        """Text of which each character is one cell, on a row of such."""
        x, y = self._x, self._y
        self._x = end = x + len(text)
        if not 0 <= y < self.height:
            return
        if end > self.width:
            end = max(x, self.width)
            text, sgrs = text[:end - x], sgrs[:end - x]
        self._dirty.add(y)
        self._chars[y][x:end] = text
        self._sgrs[y][x:end] = sgrs

    def _put_wide(self, text: str) -> None:
        """Character by character: the second cell of a wide one is empty, combining ones join the cell before."""
        if not 0 <= self._y < self.height:
            return
        self._dirty.add(self._y)
        chars, sgrs = self._chars[self._y], self._sgrs[self._y]
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
                sgrs[self._x:after] = [_same(self._sgr)] * cells
            self._x += cells

    def update(self) -> str:
        """What to send for the terminal to show what was fed; from then on it is taken to show it."""
        out = [self.controls()]
        frame: list[str] = []
        spans: list[StyledSpan] = []
        still = 0  # rows that changed much and did not shift, one after the other
        for y in sorted(self._dirty):
            chars, sgrs = self._chars[y], self._sgrs[y]
            shown_chars, shown_sgrs = self._shown_chars[y], self._shown_sgrs[y]
            if chars == shown_chars and sgrs == shown_sgrs:
                continue
            if not shown_chars or y in self._wide:
                frame += self._whole(y)
            else:
                changed = differences(chars, sgrs, shown_chars, shown_sgrs)
                if still < _MAX_ROWS_WITHOUT_SHIFT and changed.count(1) >= MIN_CELLS_SAVED:
                    found = find_shifts(changed, chars, sgrs, shown_chars, shown_sgrs)
                    still = 0 if found else still + 1
                    for shift in found:
                        frame.append(shift_text(y, shift))
                        for row, unknown in ((shown_chars, ""), (shown_sgrs, "?")):
                            row[shift.begin:shift.end] = [*row[shift.begin + shift.by:shift.end], *[unknown] * shift.by]
                    if found:
                        changed = differences(chars, sgrs, shown_chars, shown_sgrs)
                spans += self._changed_spans(y, changed)
            self._shown_chars[y], self._shown_sgrs[y] = chars[:], sgrs[:]
        self._dirty.clear()
        drawn, sgr = spans_text(spans, self.width)
        frame += drawn
        if frame:
            frame.append("\x1b[m" if sgr else "")
            frame.append(cursor_to(self._y, self._x))  # screen readers and input methods look there
            out += ["\x1b[?2026h", *frame, "\x1b[?2026l"] if self.synchronized else frame
        return "".join(out)

    def _whole(self, y: int) -> Iterator[str]:
        """A row of which nothing is known, or not how wide its characters are: from left to right, in no sgr after."""
        chars, sgrs = self._chars[y], self._sgrs[y]
        if y in self._wide and all(map(_NARROW.fullmatch, chars)) and "" not in chars:
            self._wide.discard(y)  # this once it is sent whole
        yield cursor_to(y, 0)
        sgr = ""
        for start, end in _runs(sgrs, 0, self.width):
            yield sgr_transition(sgr, sgrs[start])
            yield from chars[start:end]
            sgr = sgrs[start]
        yield "\x1b[m" if sgr else ""

    def _changed_spans(self, y: int, changed: bytes) -> Iterator[StyledSpan]:
        """What differs in a row."""
        chars, sgrs = self._chars[y], self._sgrs[y]
        spans: list[tuple[int, int]] = []
        for run in _CHANGED.finditer(changed):
            x, behind = run.span()
            start, end = spans[-1] if spans else (0, -_MAX_GAP_REWRITTEN - 1)
            if x - end <= _MAX_GAP_REWRITTEN and len(set(sgrs[end - 1:x + 1])) == 1:
                spans[-1] = (start, behind)
            else:
                spans.append((x, behind))
        for span in spans:
            for start, end in _runs(sgrs, *span):
                yield StyledSpan(y, start, sgrs[start], "".join(chars[start:end]))


def _runs(sgrs: list[SgrCodes], begin: int, end: int) -> list[tuple[int, int]]:
    """Stretches of one sgr, first and end column."""
    if end - begin == 1:
        return [(begin, end)]
    turns = list(compress(count(begin + 1), map(is_not, sgrs[begin + 1:end], sgrs[begin:end - 1])))
    return list(zip([begin, *turns], [*turns, end], strict=True))

"""JSON documents that are one long list, streamed: only a few elements of the text are in memory at a time."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Collection, Iterable
from typing import Any

# Characters held at a time. Elements are parsed one by one by the standard library's C parser, which is as fast as
# parsing the whole document.
_TEXT = 1 << 18
# A longer element or member counts as damage: parsed, it could need 25 times as much memory.
MAX_VALUE = 1 << 22
# A number, or a constant such as NaN, may continue after the loaded text, so this many characters must follow it.
_AHEAD = 32

_AFTER_NUMBER = frozenset(",]} \t\r\n")

# What C's printf writes for a float that is no number. JSON has no such constants; kineto and others write them all the
# same. Of an object's member at once: no string holds a quote that is not escaped. Elsewhere where the parser fails.
_CONSTANT = r"([-+]?)(?:(nan)(?:\(\w{0,20}\))?|inf(?:inity)?)(?=[\s,}\]])"
_MEMBERS = re.compile(rf'((?<!\\)"\s{{0,8}}:\s{{0,8}}){_CONSTANT}', re.IGNORECASE)
_ONE = re.compile(rf"(){_CONSTANT}", re.IGNORECASE)
_MAX_ONES = 100  # of a file: for each the text is copied, and the element parsed again

_BLANK = re.compile(r"[ \t\r\n]*")
_BETWEEN = re.compile(r"[ \t\r\n,]*")


class Damaged(ValueError):
    """The text ends early or is no JSON from here on."""


def read_list(
    pieces: Iterable[bytes], member: str, keep: Collection[str], take: Callable[[Any], None],
) -> tuple[dict[str, Any], bool, bool]:
    """Hand each element of a list to ``take``: that of the document's ``member``, or the document itself.

    Returns the other members named in ``keep``, whether there was such a list, and whether the text is damaged;
    what precedes the damage has been handed over. Missing and surplus commas between elements are accepted, because
    programs write traces with either. So is the end of the text behind an element of a document that is the list: the
    format allows it, for programs that write until they are ended.
    """
    text = _Text(pieces)
    kept: dict[str, Any] = {}
    has_member = False
    try:
        first = text.peek()
        if first == "[":
            has_member = True
            text.skip()
            text.elements(take, may_end=True)
        elif first == "{":
            text.skip()
            while (name := text.key()) is not None:
                if name == member and text.peek() == "[":
                    has_member = True
                    text.skip()
                    text.elements(take)
                else:
                    value = text.value()
                    if name in keep:
                        kept[name] = value
        else:
            raise Damaged
        text.end()
    except Damaged:
        return kept, has_member, True
    return kept, has_member, False


def _spelled(match: re.Match[str]) -> str:
    """A constant as Python's parser has it."""
    return match[1] + ("NaN" if match[3] else f"{match[2].removeprefix('+')}Infinity")


class _Text:
    """The loaded text and the position in it. Every method raises Damaged where it cannot go on."""

    def __init__(self, pieces: Iterable[bytes]) -> None:
        self._pieces = iter(pieces)
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")("replace")
        self._scan = json.JSONDecoder().scan_once  # type: ignore[attr-defined]  # public in name, absent in the stubs
        self._text, self._at, self._whole = "", 0, False
        self._ones = 0  # constants spelled one by one

    def _more(self) -> bool:
        """Load twice as much text from here on, _TEXT at least, or the rest; False where the end was reached before."""
        rest = self._text[self._at:]
        if self._whole or len(rest) > MAX_VALUE:
            return False
        parts, size, wanted = [rest], len(rest), max(2 * len(rest), _TEXT)
        while size < wanted:
            piece = next(self._pieces, None)
            parts.append(self._decoder.decode(piece or b"", final=piece is None))
            size += len(parts[-1])
            if piece is None:
                self._whole = True
                break
        self._text, self._at = "".join(parts), 0
        return True

    def peek(self) -> str:
        """The next character that is not blank; "" at the end."""
        while True:
            self._at = _BLANK.match(self._text, self._at).end()  # type: ignore[union-attr]
            if self._at < len(self._text):
                return self._text[self._at]
            if not self._more():
                return ""

    def skip(self) -> None:
        self._at += 1

    def key(self) -> str | None:
        """The name of an object's next member, its colon passed; None at the object's end."""
        while (char := self.peek()) == ",":
            self.skip()
        if char == "}":
            self.skip()
            return None
        name = self.value() if char == '"' else None
        if not isinstance(name, str) or self.peek() != ":":
            raise Damaged
        self.skip()
        return name

    def value(self) -> Any:
        if not self.peek():
            raise Damaged
        while True:
            try:
                value, end = self._scan(self._text, self._at)
            except (StopIteration, ValueError, RecursionError) as error:
                error_pos = error.value if isinstance(error, StopIteration) else getattr(error, "pos", None)
                if isinstance(error_pos, int) and error_pos >= self._at and self._spell_constants(error_pos):
                    continue
            else:
                if self._whole or len(self._text) - end >= _AHEAD:
                    # A number is whole only where something follows that cannot belong to it.
                    if isinstance(value, (int, float)) and self._text[end:end + 1] not in _AFTER_NUMBER:
                        raise Damaged
                    self._at = end
                    return value
            if not self._more():
                raise Damaged

    def _spell_constants(self, error_pos: int) -> bool:
        """Spell constants that are no JSON as Python's parser does: those of members in all of the loaded text, or the
        one at this place, where the parser failed. False: there is none."""
        rest = self._text[self._at:]
        spelled = _MEMBERS.sub(_spelled, rest)
        if spelled == rest and self._ones < _MAX_ONES and (one := _ONE.match(self._text, error_pos)) is not None:
            self._ones += 1
            spelled = rest[:error_pos - self._at] + _spelled(one) + self._text[one.end():]
        if spelled == rest:
            return False
        self._text, self._at = spelled, 0
        return True

    def elements(self, take: Callable[[Any], None], *, may_end: bool = False) -> None:
        """Hand over the elements of a list and pass its end, or the text's, if that ``may_end`` it."""
        scan, between = self._scan, _BETWEEN.match
        while True:
            text, pos, last = self._text, self._at, len(self._text) - _AHEAD
            try:
                while True:
                    pos = between(text, pos).end()  # type: ignore[union-attr]
                    value, end = scan(text, pos)
                    if end > last:
                        break
                    pos = end
                    take(value)
            except (StopIteration, ValueError, RecursionError):
                pass  # the end of the list or of the loaded text, or damage
            self._at = pos
            while (char := self.peek()) == ",":
                self.skip()
            if char == "]":
                self.skip()
                return
            if not char and may_end:
                return
            take(self.value())

    def end(self) -> None:
        """Raise unless only blanks follow. Asks for all pieces, because the last may contain a checksum."""
        if self.peek():
            raise Damaged

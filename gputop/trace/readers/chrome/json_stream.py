"""JSON documents that are one long list, streamed: only a few elements of the text are in memory at a time.

Objects whose text fits a type are decoded as such, all that are loaded at once: this takes a tenth of the time. Where
one does not fit, elements are parsed one by one until the next text is loaded.
"""

from __future__ import annotations

import codecs
import json
import math
import re
from collections.abc import Callable, Collection, Iterable
from typing import Any, TypeVar

import msgspec

_T = TypeVar("_T")
_TEXT = 1 << 18  # characters held at a time
# A longer element or member counts as damage: parsed, it could need 25 times as much memory.
MAX_VALUE = 1 << 22
# A number, or a constant such as NaN, may continue after the loaded text, so this many characters must follow it.
_AHEAD = 32

_AFTER_NUMBER = frozenset(",]} \t\r\n")
# The end of an object that another one follows, and how many braces and blanks are looked at to find the last.
_ENDS = re.compile(r"\}[ \t\r\n]*,[ \t\r\n]*\Z")
_MAX_TRIES, _MAX_BETWEEN = 64, 64
_MAX_DIGITS = 4300  # of an integer, as Python has it

# What C's printf writes for a float that is no number. JSON has no such constants; kineto and others write them all the
# same. Of an object's member at once: no string holds a quote that is not escaped. Elsewhere where the parser fails.
_CONSTANT = r"[-+]?(?:nan(?:\(\w{0,20}\))?|inf(?:inity)?)(?=[\s,}\]])"
_MEMBERS = re.compile(rf'((?<!\\)"\s{{0,8}}:\s{{0,8}}){_CONSTANT}', re.IGNORECASE)
_ONE = re.compile(rf"(){_CONSTANT}", re.IGNORECASE)
_MAX_ONES = 100  # of a file: for each the text is copied, and the element parsed again

_BLANK = re.compile(r"[ \t\r\n]*")
_BETWEEN = re.compile(r"[ \t\r\n,]*")


class Damaged(ValueError):
    """The text ends early or is no JSON from here on."""


def decoder(kind: type[_T]) -> Callable[[Any], _T]:
    """Decoder of JSON of a type. It raises msgspec.DecodeError or RecursionError where the text does not fit."""
    return msgspec.json.Decoder(kind).decode


def read_list(pieces: Iterable[bytes], member: str, keep: Collection[str], take: Callable[[list[_T]], None],
              decode: Callable[[str], list[_T]], convert: Callable[[Any], _T]) -> tuple[dict[str, Any], bool, bool]:
    """Hand the elements of a list to ``take``, some at a time: that of the document's ``member``, or the document
    itself. ``decode`` makes them of the text of a list of objects, ``convert`` of any JSON value.

    Returns the other members named in ``keep``, whether there was such a list, and whether the text is damaged;
    what precedes the damage has been handed over. Missing and surplus commas between elements are accepted, because
    programs write traces with either. So is the end of the text behind an element of a document that is the list: the
    format allows it, for programs that write until they are ended. Constants that JSON does not have, such as NaN,
    count as null.
    """
    text = _Text(pieces)
    kept: dict[str, Any] = {}
    has_member = False
    try:
        first = text.peek()
        if first == "[":
            has_member = True
            text.skip()
            text.elements(take, decode, convert, may_end=True)
        elif first == "{":
            text.skip()
            while (name := text.key()) is not None:
                if name == member and text.peek() == "[":
                    has_member = True
                    text.skip()
                    text.elements(take, decode, convert)
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
    """Text in a constant's place."""
    return match[1] + "null"


class _Text:
    """The loaded text and the position in it. Every method raises Damaged where it cannot go on."""

    def __init__(self, pieces: Iterable[bytes]) -> None:
        self._pieces = iter(pieces)
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")("replace")
        json_decoder = json.JSONDecoder(parse_constant=lambda _: None, parse_int=lambda text: (
            int(text) if len(text) < _MAX_DIGITS else math.inf))
        self._scan = json_decoder.scan_once  # type: ignore[attr-defined]  # public in name, absent in the stubs
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

    def elements(self, take: Callable[[list[_T]], None], decode: Callable[[str], list[_T]],
                 convert: Callable[[Any], _T], *, may_end: bool = False) -> None:
        """Hand over the elements of a list and pass its end, or the text's, if that ``may_end`` it."""
        ended = False
        while not ended:
            if (objects := self._objects(decode)) is not None:
                take(objects)
                if self._more():
                    continue
            values: list[Any] = []
            try:
                ended = self._values(values, may_end)
            finally:
                take([convert(value) for value in values])

    def _objects(self, decode: Callable[[str], list[_T]]) -> list[_T] | None:
        """The objects that lie in the loaded text and that another one follows, decoded and passed; None where one does
        not fit or there is none."""
        begin = _BETWEEN.match(self._text, self._at).end()  # type: ignore[union-attr]
        brace = len(self._text)
        for _ in range(_MAX_TRIES):
            brace = self._text.rfind("{", begin, brace)
            if brace < 0 or (before := _ENDS.search(self._text, max(brace - _MAX_BETWEEN, begin), brace)) is not None:
                break
        if brace < 0 or before is None:
            return None
        # If the brace were inside of an object or a string, the text up to here would not be a whole list.
        text = f"[{self._text[begin:before.start() + 1]}]"
        try:
            try:
                objects = decode(text)
            except msgspec.DecodeError:
                objects = decode(_MEMBERS.sub(_spelled, text))
        except (msgspec.DecodeError, RecursionError):
            return None
        self._at = before.start() + 1
        return objects

    def _values(self, values: list[Any], may_end: bool) -> bool:
        """Parse elements one by one into ``values``, those of the loaded text and one more; whether the list ended."""
        scan, between = self._scan, _BETWEEN.match
        text, pos, last = self._text, self._at, len(self._text) - _AHEAD
        try:
            while True:
                pos = between(text, pos).end()  # type: ignore[union-attr]
                value, end = scan(text, pos)
                if end > last:
                    break
                pos = end
                values.append(value)
        except (StopIteration, ValueError, RecursionError):
            pass  # the end of the list or of the loaded text, or damage
        self._at = pos
        while (char := self.peek()) == ",":
            self.skip()
        if char == "]":
            self.skip()
            return True
        if not char and may_end:
            return True
        values.append(self.value())
        return False

    def end(self) -> None:
        """Raise unless only blanks follow. Asks for all pieces, because the last may contain a checksum."""
        if self.peek():
            raise Damaged

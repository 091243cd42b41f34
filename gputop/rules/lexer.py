"""An expression as words: numbers with their units, names, texts in quotes, operators."""

from __future__ import annotations

import math
import re

from msgspec import Struct

from gputop.rules.units import LITERALS, NONE, Unit

MAX_CHARS = 2000
_UNIT = "|".join(re.escape(unit) for unit in sorted(LITERALS, key=len, reverse=True))
_WORD = re.compile(rf"""
    (?P<space>\s+)
  | (?P<number>(?:\d+(?:\.\d+)?|\.\d+)(?:[eE][+-]?\d+)?)(?:[ ]?(?P<unit>{_UNIT})(?![A-Za-z0-9_µ°%]))?
  | (?P<name>[A-Za-z_][A-Za-z0-9_]*)
  | "(?P<text>[^"\n]*)" | '(?P<single>[^'\n]*)'
  | (?P<operator><=|>=|==|!=|[-+*/<>().,])
""", re.VERBOSE)
_ATTACHED = re.compile(r"[\w°%]{1,12}")
_INSTEAD = {"=": "==", "&": "and", "|": "or", "!": "not", "^": "a product", "{": "(…)",
            "[": "gpu.index == 0 and …, if you mean GPU 0"}


class Mistake(ValueError):
    """Mistake in an expression, and the character at which it is."""

    def __init__(self, message: str, pos: int) -> None:
        super().__init__(message)
        self.message, self.pos = message, pos


class Word(Struct, frozen=True):
    """``kind`` is number, name, text, operator or end; ``value`` that of a number in base units."""

    kind: str
    text: str
    pos: int
    end: int
    value: float = 0.0
    unit: Unit = NONE


def words(source: str) -> list[Word]:
    """The words of an expression, the last one of the kind "end". Raises :class:`Mistake`."""
    if len(source) > MAX_CHARS:
        raise Mistake(f"an expression has at most {MAX_CHARS} characters", MAX_CHARS)
    out: list[Word] = []
    pos = 0
    while pos < len(source):
        match = _WORD.match(source, pos)
        if match is None:
            raise _unknown(source, pos)
        if match.lastgroup != "space":
            out.append(_word(source, match))
        pos = match.end()
    return [*out, Word("end", "the end", len(source), len(source))]


def _word(source: str, match: re.Match[str]) -> Word:
    begin, end = match.span()
    if match["number"] is not None:
        attached = _ATTACHED.match(source, end)
        if attached is not None:
            units = ", ".join(literal for literal in LITERALS if "/" not in literal)
            raise Mistake(f"there is no unit {attached[0]}: {units}", end)
        unit, factor = LITERALS[match["unit"]] if match["unit"] else (NONE, 1.0)
        value = float(match["number"]) * factor
        if not math.isfinite(value):
            raise Mistake("this number is too large", begin)
        return Word("number", match[0], begin, end, value, unit)
    if match["name"] is not None:
        return Word("name", match[0], begin, end)
    if match["operator"] is not None:
        return Word("operator", match[0], begin, end)
    return Word("text", match["text"] if match["text"] is not None else match["single"], begin, end)


def _unknown(source: str, pos: int) -> Mistake:
    char = source[pos]
    if char in "\"'":
        return Mistake("this text has no closing quote", pos)
    instead = f": write {_INSTEAD[char]}" if char in _INSTEAD else ""
    shown = char if char.isprintable() else f"U+{ord(char):04X}"
    return Mistake(f"{shown} has no meaning here{instead}", pos)

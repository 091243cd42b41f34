"""Positions of the values of a TOML document: tomllib returns the values alone, and a mistake in one has a line and a
column."""

from __future__ import annotations

import re
import sys
from bisect import bisect_right
from typing import Any, NamedTuple

_PART = r"(?:[A-Za-z0-9_-]+|\"[^\"\n]*\"|'[^'\n]*')"
_KEY = re.compile(rf"\s*({_PART}(?:\s*\.\s*{_PART})*)\s*=[ \t]*")
_ONE_LINE = re.compile(r'"(?!"")')  # the begin of a text in which escapes count
_ESCAPE = re.compile(r"\\(?:u[0-9A-Fa-f]{4}|U[0-9A-Fa-f]{8}|.)")
_AT = re.compile(r"(.*?) \(at (?:line (\d+), column (\d+)|end of document)\)", re.S)


_MAX_DOTS = 250  # of a line: tomllib takes time by the square of a key's parts


class TomlPlace(NamedTuple):
    """Line and column count from 1."""

    line: int = 1
    column: int = 1


class TomlMistake(ValueError):
    def __init__(self, message: str, position: TomlPlace) -> None:
        super().__init__(message)
        self.message, self.place = message, position


def parse_toml(text: str) -> dict[str, Any]:
    """Raises :class:`TomlMistake`."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib

    for number, line in enumerate(text.split("\n"), 1):
        if line.count(".") > _MAX_DOTS:
            raise TomlMistake(f"a line has more than {_MAX_DOTS} dots", TomlPlace(number))
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise TomlMistake("the file is nested too deeply", TomlPlace()) from None
    except ValueError as error:
        match = _AT.fullmatch(str(error))
        if match is None:
            raise TomlMistake(str(error), TomlPlace()) from None
        position = TomlPlace(int(match[2]), int(match[3])) if match[2] else TomlPlace(text.count("\n") + 1)
        raise TomlMistake(match[1], position) from None


class Places:
    """Finds the keys of a document: those of the n-th ``[[table]]`` by table, n (from 0) and key."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._line_starts = [0, *(match.end() for match in re.finditer("\n", text))]
        self._values: dict[tuple[str, int, str], int] = {}
        self._keys: dict[tuple[str, int, str], int] = {}
        self._tables: dict[tuple[str, int], int] = {}
        self._scan()

    def table(self, name: str, number: int = 0) -> TomlPlace:
        return self._at(self._tables.get((name, number), 0))

    def value(self, table: str, number: int, key: str, value: object = None, offset: int = 0) -> TomlPlace:
        """A value; of a text its character ``offset``, also behind escapes where it stands in one line."""
        start = self._values.get((table, number, key))
        if start is None:
            return self.table(table, number)
        if isinstance(value, str):
            begin = self._text.find(value, start, start + len(value) + 8)
            if begin >= 0:
                start = begin + offset
            elif _ONE_LINE.match(self._text, start):
                start += 1
                for _ in range(offset):
                    escape = _ESCAPE.match(self._text, start)
                    start = escape.end() if escape else start + 1
                start = min(start, len(self._text))
        return self._at(start)

    def key(self, table: str, number: int, key: str) -> TomlPlace:
        start = self._keys.get((table, number, key))
        return self.table(table, number) if start is None else self._at(start)

    def _at(self, offset: int) -> TomlPlace:
        line = bisect_right(self._line_starts, offset)
        return TomlPlace(line, offset - self._line_starts[line - 1] + 1)

    def _scan(self) -> None:
        table, number, counts = "", 0, dict[str, int]()
        offset, closing = 0, ""
        for line in self._text.splitlines(keepends=True):
            start, offset = offset, offset + len(line)
            if closing:  # inside a text of several lines
                if closing in line:
                    closing = ""
                continue
            if header := _header(line):
                marks, table = header
                number = counts.get(table, 0) if marks == "[[" else 0
                counts[table] = number + 1
                self._tables[table, number] = start
            elif key := _KEY.match(line):
                self._values[table, number, _plain(key[1])] = start + key.end()
                self._keys[table, number, _plain(key[1])] = start + key.start(1)
                rest = line[key.end():]
                if rest[:3] in ('"""', "'''") and rest[:3] not in rest[3:]:
                    closing = rest[:3]


def _header(line: str) -> tuple[str, str] | None:
    """Brackets, "[" or "[[", and the name in them, of a line that begins as the header of a table does. In time linear
    in the line, which may as well be one of a list's."""
    text = line.lstrip()
    marks = "[[" if text.startswith("[[") else "[" if text.startswith("[") else ""
    name, closed, _ = text[len(marks):].partition("]")
    return (marks, _plain(name.strip())) if marks and closed and name.strip() else None


def _plain(key: str) -> str:
    """A key without the quotes and the space around its parts."""
    return ".".join(part.strip(" \t\"'") for part in key.split("."))

"""JSON documents to typed values and back, by msgspec: results, findings, snapshots, what a worker process answers.

A document may come from anywhere: an older version, an editor, an attacker. Everything is checked on the way in:
how many values it has and how deep they are, the types, and that each number is finite and of a size that can be
computed with. A key that the type does not have is ignored, one that is missing has its default. :func:`parse` is the
one door: nothing else calls ``json.loads``, whose RecursionError is no ValueError (tests/core/test_codec.py looks).
"""

from __future__ import annotations

import json
import math
import re
import threading
from typing import Any, TypeVar

import msgspec

from gputop.core.errors import GputopError

T = TypeVar("T")
S = TypeVar("S", bound=msgspec.Struct)
MAX_VALUES = 5_000_000  # of a document; each takes some 100 bytes as an object, and as little as two in the text
MAX_DEPTH = 200
MAX_NUMBER = 1e30  # above what anything measures, and still safe to add and to multiply
_LEARNS = threading.Lock()  # two threads in which msgspec looks at one type for the first time end the process
_MAX_INTEGER = 10 ** 30
_NAMES = {"array": "a list", "object": "an object", "str": "a text", "int": "a whole number", "float": "a number",
          "bool": "true or false", "null": "null"}
_DAMAGED = "Copy the file again, or create a new one."
_PLACE = re.compile(r"(.*?)(?: - at `(?:key in `)?\$\.?(.*?)`)?$", re.S)
_MISMATCH = re.compile(r"Expected (`.*?`.*?), got (`.*?`)$")
_OUT_OF_BOUNDS = re.compile(r"Expected `(.*?)` (.+?)$")
_MISSING = re.compile(r"Object missing required field `(.*?)`$")


class TooManyValues(ValueError):
    """A document that is larger than is read."""


def encode(value: object) -> bytes:
    """``value`` as compact JSON. Lone surrogates, which a command line may hold, come back from :func:`parse`. Raises
    ValueError for a number that is not finite."""
    return json.dumps(msgspec.to_builtins(value, str_keys=True), allow_nan=False, separators=(",", ":")).encode()


def document_of(kind: type[S], value: object, **other: Any) -> S:
    """A document of type ``kind``: the attributes of ``value`` that have its fields' names, but for ``other``."""
    return kind(**{name: other[name] if name in other else getattr(value, name) for name in kind.__struct_fields__})


def to_document(value: object, *, finite: bool = False) -> Any:
    """``value`` as JSON-ready objects, lists, texts and numbers; keys in the order of the fields. ``finite``: null
    takes the place of each number that JSON does not have."""
    return _with_lists(msgspec.to_builtins(value, str_keys=True), finite)


def _with_lists(value: Any, finite: bool) -> Any:
    """msgspec leaves tuples as they are; JSON has none."""
    if isinstance(value, dict):
        return {key: _with_lists(item, finite) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_with_lists(item, finite) for item in value]
    return None if finite and isinstance(value, float) and not math.isfinite(value) else value


def from_document(document: object, kind: type[T], name: str, fix: str = _DAMAGED) -> T:
    """A value of type ``kind`` out of parsed JSON; raises GputopError that calls the document ``name``."""
    try:
        return convert(document, kind)
    except ValueError as error:
        raise GputopError(f"{name} is damaged: {error}", fix) from error


def convert(document: object, kind: type[T], *, any_number: bool = False) -> T:
    """The same; raises ValueError that says what is wrong where. ``any_number``: numbers may be infinite or NaN. What
    is of the right type already is taken as it is: dataclasses and structs."""
    if not any_number:
        check_numbers(document)
    try:
        with _LEARNS:
            return msgspec.convert(document, kind, str_keys=True)
    except msgspec.ValidationError as error:
        raise ValueError(_plain(str(error))) from error
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def parse(text: str | bytes | bytearray, most_values: int = MAX_VALUES) -> Any:
    """The JSON document in a text; raises ValueError where it holds none, or one of more values
    (:class:`TooManyValues`) or deeper than is read."""
    marks = (b",", b"[", b"{") if isinstance(text, (bytes, bytearray)) else (",", "[", "{")
    commas, lists, objects = map(text.count, marks)  # type: ignore[arg-type]  # those inside of texts count as well
    if commas + lists + objects > most_values:
        raise TooManyValues(f"it has more than {most_values:,} values")
    try:
        document = json.loads(text, parse_constant=_refuse)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if lists + objects > MAX_DEPTH:
        _check_depth(document)
    return document


def _check_depth(document: object) -> None:
    level: list[Any] = [[document]]
    for _ in range(MAX_DEPTH + 1):
        level = [item for value in level for item in (value.values() if isinstance(value, dict) else value)
                 if isinstance(item, (dict, list))]
        if not level:
            return
    raise ValueError("it is nested too deeply")


def check_numbers(document: object) -> None:
    """Raise ValueError for a number that is not finite, or larger than any measurement."""
    waiting = [document]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            waiting.extend(value.values())
        elif isinstance(value, (list, tuple)):
            waiting.extend(value)
        elif isinstance(value, float):
            if not math.isfinite(value):
                raise ValueError(f"{value} is not a number")
            if abs(value) > MAX_NUMBER:
                raise ValueError(f"{value:g} is too large")
        elif isinstance(value, int) and abs(value) > _MAX_INTEGER:
            raise ValueError("a whole number is too large")


def _refuse(constant: str) -> float:
    raise ValueError(f"{constant} is not a number")


def _plain(message: str) -> str:
    """msgspec's message with the place first: ``gpus[0].index: null where a whole number belongs``."""
    what, path = _PLACE.fullmatch(message).groups()  # type: ignore[union-attr]
    if match := _MISMATCH.match(what):
        kinds = re.findall(r"\w+", match[1])
        belongs = " or ".join(_NAMES[k] for k in kinds if k in _NAMES) or match[1]
        what = f"{match[2].strip('`')} where {belongs} belongs"
    elif match := _MISSING.match(what):
        what = f"{match[1]} is missing"
    elif match := _OUT_OF_BOUNDS.match(what):
        what = f"not {_NAMES.get(match[1], match[1])} {match[2]}"
    return f"{path}: {what}" if path else what

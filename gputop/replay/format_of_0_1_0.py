"""Reader of recordings of version 1, which gputop 0.1.0 wrote.

Its records besides those of :mod:`gputop.replay.format`::

    DICTIONARY  strings and schemas used from here on (JSON, zlib)
    SAMPLE      time f64 (Unix s), count u32, deflated u8; the numbers of one sample

A *schema* is one object without its numbers and texts: a GPU's readings, say, with metric, unit, source and reason of
each. It is written once and then named by its number. What is left of a sample is a list of numbers, stored as what
differs from the list before. A recording may come from anywhere: what its words make is checked against the types of
:mod:`gputop.core.samples`.
"""

from __future__ import annotations

import struct
import zlib
from typing import Any

from msgspec import Struct

from gputop.core.codec import convert, parse
from gputop.core.samples import NodeSample
from gputop.replay.format import MAX_RECORD_BYTES, SAMPLE, DamagedRecord

DICTIONARY = 2
_SAMPLE_HEAD = struct.Struct("<dIB")  # time, count of numbers, whether they are deflated
_MAX_NUMBERS = 1 << 20
_MAX_DICTIONARY_BYTES = 20 << 20  # of a segment
_MAX_DEPTH, _MAX_WORK = 8, 1 << 20  # levels and items of one sample, which has four, and 2,000 on 16 GPUs
# Two bits of a number say how it is stored: as before, as float32, as thousandths in an int32, as float64.
_SAME, _THOUSANDTHS = 0, 2
_STORED = {1: "f", _THOUSANDTHS: "i", 3: "d"}
# What decoding raises on bytes that passed their CRC and are wrong all the same.
_WRONG = (ValueError, TypeError, KeyError, IndexError, OverflowError, RecursionError, struct.error, zlib.error)


class _Dictionary(Struct):
    """The texts and schemas that are named by their number from here on, in the order of their numbers."""

    texts: list[str]
    shapes: list[list[Any]]


def _inflate(data: bytes, limit: int) -> bytes:
    inflate = zlib.decompressobj()
    out = inflate.decompress(data, limit)
    if not inflate.eof:
        raise DamagedRecord("a record is too large or ends early")
    return out


def _unpack(data: bytes, count: int, previous: list[float]) -> list[float]:
    """The numbers of a sample. Raises ValueError, IndexError or struct.error where ``data`` does not hold so many."""
    if count > _MAX_NUMBERS:
        raise ValueError(f"a sample of {count} numbers")
    offset = -(-count // 4)
    how = [data[i >> 2] >> 2 * (i & 3) & 3 for i in range(count)]
    numbers = [previous[i] if kind == _SAME else 0.0 for i, kind in enumerate(how)]
    for kind, letter in _STORED.items():
        places = [i for i, stored in enumerate(how) if stored == kind]
        form = struct.Struct(f"<{len(places)}{letter}")
        for i, value in zip(places, form.unpack_from(data, offset), strict=True):
            numbers[i] = value / 1000 if kind == _THOUSANDTHS else value
        offset += form.size
    if offset != len(data):
        raise ValueError(f"a sample has {len(data) - offset} extra bytes")
    return numbers


class OldDecoder:
    """A :class:`gputop.replay.format.Decoder` of that version."""

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._schemas: list[list[Any]] = []
        self._dictionary_bytes = self._next_number = self._work = 0
        self._numbers: list[float] = []

    def take(self, kind: int, payload: bytes) -> bool:
        try:
            if kind == DICTIONARY:
                self._learn(_inflate(payload, MAX_RECORD_BYTES))
            elif kind == SAMPLE:
                _, count, deflated = _SAMPLE_HEAD.unpack_from(payload)
                packed = payload[_SAMPLE_HEAD.size:]
                self._numbers = _unpack(_inflate(packed, 9 * _MAX_NUMBERS) if deflated else packed, count,
                                        self._numbers)
        except _WRONG as error:
            raise DamagedRecord(f"cannot be decoded: {error}") from error
        return kind == SAMPLE

    def _learn(self, text: bytes) -> None:
        self._dictionary_bytes += len(text)
        if self._dictionary_bytes > _MAX_DICTIONARY_BYTES:
            raise DamagedRecord("a segment has too many strings")
        dictionary = convert(parse(text), _Dictionary)
        self._texts += dictionary.texts
        self._schemas += dictionary.shapes

    def sample(self) -> NodeSample:
        self._next_number = self._work = 0
        try:
            sample = convert(self._object(NodeSample.__name__, 0), NodeSample, any_number=True)
        except _WRONG as error:
            raise DamagedRecord(f"cannot be decoded: {error}") from error
        if self._next_number != len(self._numbers):
            raise DamagedRecord("a sample has extra numbers")
        return sample

    def _number(self) -> float:
        self._next_number += 1
        return self._numbers[self._next_number - 1]

    # Each of these makes a document of what a schema and the next numbers say.

    def _object(self, name: str, depth: int) -> dict[str, Any]:
        named, *schema = self._schemas[int(self._number())]
        self._work += len(schema[-1])
        if named != name or depth > _MAX_DEPTH or self._work > _MAX_WORK:
            raise DamagedRecord("a sample has an invalid structure")
        if name == "readings":
            return {metric: self._reading(*reading) for metric, *reading in schema[0]}
        return {field: self._item(item, depth + 1) for field, item in zip(*schema, strict=True)}

    def _reading(self, slot: str | None, unit: str, source: str, reason: str | None, coarse: bool) -> dict[str, Any]:
        value = None if slot is None else self._item(slot, 0)
        return {"value": value, "unit": unit, "source": source or None, "reason": reason, "coarse": coarse}

    def _item(self, item: Any, depth: int) -> Any:
        if isinstance(item, str):
            number = self._number()
            return number if item == "f" else self._texts[int(number)] if item == "s" else (
                int(number) if abs(number) < float("inf") else number)
        if item is None or isinstance(item, bool):
            return item
        tag, *parts = item
        if tag == "p":
            return self._object(parts[0], depth)
        self._work += len(item)
        if tag == "t":
            return [self._item(part, depth) for part in parts]
        if tag == "m":
            return {key: self._item(part, depth) for key, part in parts}
        if tag == "r":
            return self._reading(*parts)
        if tag == "int":
            return int(parts[0])
        raise DamagedRecord(f"unknown item {tag!r}")

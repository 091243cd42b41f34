"""Decoding of records back to samples. A recording may come from anywhere: the codec checks its strings and schemas,
and each sample against the types of ``gputop.core.samples`` before anything is built from it."""

from __future__ import annotations

import math
import struct
import zlib
from typing import Any, Literal

import numpy as np
from msgspec import Struct

from gputop.core.codec import convert, parse
from gputop.core.samples import NodeSample, Reading
from gputop.replay.format import (
    F64,
    FLOAT,
    INT,
    MAX_NUMBERS,
    MAX_RECORD_BYTES,
    READINGS,
    SAMPLE_HEAD,
    SEGMENT_DICTIONARY_BYTES,
    Dictionary,
    unpack,
)

_MAX_DEPTH = 8  # a sample has four levels
# Size of a segment's dictionaries: the writer begins another segment after so much. 20 kB of a file may hold 16 MB.
_MAX_DICTIONARY_BYTES = SEGMENT_DICTIONARY_BYTES + MAX_RECORD_BYTES
_MAX_WORK = 1 << 20  # items of one sample; 16 GPUs with 10 processes each need about 2000


class Damaged(Exception):
    """A record does not hold what it should."""


# What decoding raises on bytes that passed their CRC and are wrong all the same.
_WRONG = (ValueError, TypeError, KeyError, IndexError, OverflowError, RecursionError, struct.error, zlib.error)


class _Object(Struct, array_like=True):
    """The schema of one object: for each field what stands for its value."""

    name: str
    fields: tuple[str, ...]
    items: tuple[Literal["f", "i", "s"] | bool | list[Any] | None, ...]


class _Slot(Struct, array_like=True):
    """A reading without its number; ``slot`` says of which kind that is, None where there is only a reason."""

    metric: str
    slot: Literal["f", "i"] | None
    unit: str
    source: str
    reason: str | None
    coarse: bool

    def __post_init__(self) -> None:
        if (self.slot is None) != (self.reason is not None):
            raise ValueError("a reading has a value or a reason")

    def row(self) -> list[Any]:
        """Metric, slot, unit, source, coarse, and the reading that it gave last."""
        source = self.source or None
        missing = Reading(None, self.unit, source, self.reason, self.coarse) if self.slot is None else None
        return [self.metric, self.slot, self.unit, source, self.coarse, missing]


class _Readings(Struct, array_like=True):
    """The schema of a mapping of metric ids to readings."""

    name: Literal["readings"]
    slots: tuple[_Slot, ...]


def _schema(raw: list[Any]) -> tuple[str, list[Any]]:
    """The schema's name, and its (field, item) or its rows."""
    if raw[0] == READINGS:
        return READINGS, [slot.row() for slot in convert(raw, _Readings).slots]
    schema = convert(raw, _Object)
    return schema.name, list(zip(schema.fields, schema.items, strict=True))


def _inflate(data: bytes, limit: int) -> bytes:
    inflate = zlib.decompressobj()
    out = inflate.decompress(data, limit)
    if not inflate.eof:
        raise Damaged("a record is too large or ends early")
    return out


class Decoder:
    """Reads the records of one segment in their order."""

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._schemas: list[tuple[str, list[Any]]] = []
        self._dictionary_bytes = 0
        self._previous: F64 = np.empty(0)
        self._numbers: list[float] = []
        self._at = 0
        self._work = 0

    def learn(self, payload: bytes) -> None:
        """Learn strings and schemas. Raises :class:`Damaged`."""
        try:
            text = _inflate(payload, MAX_RECORD_BYTES)
            self._dictionary_bytes += len(text)
            if self._dictionary_bytes > _MAX_DICTIONARY_BYTES:
                raise Damaged("a segment has too many texts")
            dictionary = convert(parse(text), Dictionary)
            self._texts += dictionary.texts
            self._schemas += map(_schema, dictionary.shapes)
        except _WRONG as error:
            raise Damaged(f"cannot be decoded: {error}") from error

    def advance(self, payload: bytes) -> None:
        """Take over the numbers of a sample; cheap, where the sample itself is not asked for."""
        try:
            _, count, deflated = SAMPLE_HEAD.unpack_from(payload)
            packed = payload[SAMPLE_HEAD.size:]
            self._previous = unpack(_inflate(packed, 9 * MAX_NUMBERS) if deflated else packed, count, self._previous)
        except _WRONG as error:
            raise Damaged(f"cannot be decoded: {error}") from error

    def sample(self) -> NodeSample:
        """The sample of the last :meth:`advance`."""
        self._numbers, self._at, self._work = self._previous.tolist(), 0, 0
        try:
            sample = convert(self._object(NodeSample.__name__, 0), NodeSample, any_number=True)
        except _WRONG as error:
            raise Damaged(f"cannot be decoded: {error}") from error
        if self._at != len(self._numbers):
            raise Damaged("a sample has numbers left over")
        return sample

    def _next(self) -> float:
        self._at += 1
        return self._numbers[self._at - 1]

    # Each of these makes a document of what a schema and the next numbers say.

    def _object(self, name: str, depth: int) -> dict[str, Any]:
        named, entries = self._schemas[int(self._next())]
        self._work += len(entries)
        if named != name or depth > _MAX_DEPTH or self._work > _MAX_WORK:
            raise Damaged("a sample is not made as samples are")
        if name == READINGS:
            return self._readings(entries)
        return {field: self._item(item, depth + 1) for field, item in entries}

    def _readings(self, rows: list[list[Any]]) -> dict[str, Reading]:
        numbers, position = self._numbers, self._at
        out = {}
        for row in rows:
            metric, slot, unit, source, coarse, last = row
            if slot is not None:
                value = numbers[position]
                position += 1
                # A limit or a total is the same again; not so 0, which may be -0.
                if last is None or last.value != value or not value:
                    row[5] = last = (
                        Reading(int(value) if slot == INT and math.isfinite(value) else value, unit, source, None,
                                coarse))
            out[metric] = last
        self._at = position
        return out

    def _item(self, item: Any, depth: int) -> Any:
        if isinstance(item, str):
            number = self._next()
            return number if item == FLOAT else int(number) if item == INT else self._texts[int(number)]
        if item is None or isinstance(item, bool):
            return item
        tag = item[0]
        if tag == "p":
            return self._object(item[1], depth)
        self._work += len(item)
        if tag == "t":
            return [self._item(part, depth) for part in item[1:]]
        if tag == "m":
            return {key: self._item(part, depth) for key, part in item[1:]}
        if tag == "r":
            _, slot, unit, source, reason, coarse = item
            value = None if slot is None else self._item(slot, depth)
            return {"value": value, "unit": unit, "source": source or None, "reason": reason, "coarse": coarse}
        if tag == "int":
            return int(item[1])
        raise Damaged(f"unknown item {tag!r}")

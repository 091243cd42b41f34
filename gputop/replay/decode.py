"""From records back to samples. What a file says is checked against the types of
``gputop.core.samples`` before anything is built from it: a recording may come from anywhere.
"""

from __future__ import annotations

import json
import struct
import types
import typing
import zlib
from collections.abc import Mapping
from typing import Any, Union

import numpy as np

from gputop.core.samples import NodeSample, Reading
from gputop.replay.format import (
    CLASSES,
    F64,
    FIELDS,
    FLOAT,
    INT,
    MAX_NUMBERS,
    MAX_RECORD_BYTES,
    READINGS,
    SAMPLE_HEAD,
    TEXT,
    unpack,
)

_MAX_DEPTH = 8  # a sample has four levels
_MAX_MADE = 64
_MAX_WORK = 1 << 20  # items of all schemas used by one sample; 16 GPUs with 10 processes each need about 2000


class Damaged(Exception):
    """A record does not hold what it should."""


# What decoding raises on bytes that passed their CRC and are wrong all the same.
_WRONG = (ValueError, TypeError, KeyError, IndexError, OverflowError, AttributeError, RecursionError, struct.error,
          zlib.error)


class _Schema:
    """One object without its numbers: items by field, or rows of (metric, slot, unit, …) for readings."""

    def __init__(self, raw: list[Any]) -> None:
        self.name = raw[0]
        self.fields: list[tuple[str, Any]] = []
        self.rows: list[list[Any]] = []  # metric, slot, unit, source, coarse, the reading it gave last
        self.made: dict[tuple[float, ...], Any] = {}  # objects by their numbers, where those rarely change
        if self.name == READINGS:
            for metric, slot, *rest in raw[1]:
                ready = _reading_schema([slot, *rest])
                self.rows.append([metric, slot, rest[0], rest[1], rest[3], ready])
                if not isinstance(metric, str):
                    raise Damaged(f"a metric is called {metric!r}")
            self.work = len(self.rows)
            self.constant = False
            return
        if not isinstance(self.name, str):
            raise Damaged("a schema without a name")
        known = _HINTS.get(self.name, {})
        for field, item in zip(raw[1], raw[2], strict=True):
            if field in known and not _fits(known[field], item):
                raise Damaged(f"{self.name}.{field} is recorded as something else")
            self.fields.append((field, item))
        self.work = _count(raw[2])
        self.constant = all(isinstance(item, bool) or item in (None, INT, TEXT) for item in raw[2])


def _count(item: Any) -> int:
    return 1 + sum(_count(part) for part in item) if isinstance(item, list) else 1


def _inflate(data: bytes, limit: int) -> bytes:
    inflate = zlib.decompressobj()
    out = inflate.decompress(data, limit)
    if not inflate.eof:
        raise Damaged("a record is too large or ends early")
    return out


def _reading_schema(raw: list[Any]) -> Reading | None:
    """Check slot, unit, source, reason, coarse; the reading itself where it has no value."""
    slot, unit, source, reason, coarse = raw
    texts = isinstance(unit, str) and isinstance(source, str) and isinstance(coarse, bool)
    if not texts or slot not in (None, FLOAT, INT) or (slot is None) != isinstance(reason, str):
        raise Damaged("a reading is recorded as something else")
    return Reading(None, unit, source, reason, coarse) if slot is None else None


def _fits(hint: Any, item: Any) -> bool:
    """Whether a value recorded as ``item`` will be of the type ``hint``."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, types.UnionType):
        return any(_fits(arg, item) for arg in args)
    if hint is type(None):
        return item is None
    if hint is bool:
        return isinstance(item, bool)
    if hint is float:
        return item in (FLOAT, INT)
    if hint is int:
        return item == INT or _is(item, "int")
    if hint is str:
        return bool(item == TEXT)
    if hint is Reading:
        return _is(item, "r") and (_reading_schema(item[1:]) is None or True)
    if origin is tuple:
        return _is(item, "t") and all(_fits(args[0], part) for part in item[1:])
    if origin is not None and issubclass(origin, Mapping):
        if args[1] is Reading and item == ["p", READINGS]:
            return True
        return _is(item, "m") and all(isinstance(key, args[0]) and _fits(args[1], part) for key, part in item[1:])
    return isinstance(hint, type) and bool(item == ["p", hint.__name__])


def _is(item: Any, tag: str) -> bool:
    return isinstance(item, list) and bool(item) and item[0] == tag


_HINTS: dict[str, dict[str, Any]] = {name: typing.get_type_hints(cls) for name, cls in CLASSES.items()}


class Decoder:
    """Reads the records of one segment in their order."""

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._schemas: list[_Schema] = []
        self._previous: F64 = np.empty(0)
        self._numbers: list[float] = []
        self._at = 0
        self._work = 0

    def learn(self, payload: bytes) -> None:
        """Learn strings and schemas. Raises :class:`Damaged`."""
        try:
            dictionary = json.loads(_inflate(payload, MAX_RECORD_BYTES))
            if not all(isinstance(text, str) for text in dictionary["texts"]):
                raise Damaged("a text is recorded as something else")
            self._texts += dictionary["texts"]
            self._schemas += [_Schema(schema) for schema in dictionary["shapes"]]
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
            sample = self._part(NodeSample.__name__, 0)
        except _WRONG as error:
            raise Damaged(f"cannot be decoded: {error}") from error
        if self._at != len(self._numbers) or not isinstance(sample, NodeSample):
            raise Damaged("a sample has numbers left over")
        return sample

    def _next(self) -> float:
        self._at += 1
        return self._numbers[self._at - 1]

    def _part(self, name: str, depth: int) -> Any:
        schema = self._schemas[int(self._next())]
        self._work += schema.work
        if schema.name != name or depth > _MAX_DEPTH or self._work > _MAX_WORK:
            raise Damaged("a sample is not made as samples are")
        if name == READINGS:
            return self._readings(schema)
        start = self._at
        if schema.constant:  # a GPU's name and address: the same at each look
            end = start + sum(isinstance(item, str) for _, item in schema.fields)
            made = schema.made.get(tuple(self._numbers[start:end]))
            if made is not None:
                self._at = end
                return made
        known = FIELDS.get(name, ())
        values = {}
        for field, item in schema.fields:
            value = self._item(item, depth + 1)
            if field in known:
                values[field] = value
        cls = CLASSES.get(name)
        if cls is None:
            return None  # of a later gputop; its numbers are read past
        made = cls(**values)
        if schema.constant and len(schema.made) < _MAX_MADE:
            schema.made[tuple(self._numbers[start:self._at])] = made
        return made

    def _readings(self, schema: _Schema) -> dict[str, Reading]:
        numbers, at = self._numbers, self._at
        out = {}
        for row in schema.rows:
            metric, slot, unit, source, coarse, last = row
            if slot is not None:
                value = numbers[at]
                at += 1
                # A limit or a total is the same again; not so 0, which may be -0.
                if last is None or last.value != value or not value:
                    row[5] = last = Reading(value if slot == FLOAT else int(value), unit, source, None, coarse)
            out[metric] = last
        self._at = at
        return out

    def _item(self, item: Any, depth: int) -> Any:
        if item is None or isinstance(item, bool):
            return item
        if isinstance(item, str):
            number = self._numbers[self._at]
            self._at += 1
            return number if item == FLOAT else int(number) if item == INT else self._texts[int(number)]
        tag = item[0]
        if tag == "p":
            return self._part(item[1], depth)
        if tag == "t":
            return tuple([self._item(part, depth) for part in item[1:]])
        if tag == "m":
            return {key: self._item(part, depth) for key, part in item[1:]}
        if tag == "r":
            slot, unit, source, reason, coarse = item[1:]
            value = None if slot is None else self._next() if slot == FLOAT else int(self._next())
            return Reading(value, unit, source, reason, coarse)
        if tag == "int":
            return int(item[1])
        raise Damaged(f"unknown item {tag!r}")

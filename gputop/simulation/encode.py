"""Protobuf wire format, encoded by the column: a hundred thousand events in one call.

Only what an XSpace needs. Every part of a message is a block of bytes, one row per event,
with each row's length; a message is its parts row by row, behind their lengths.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt
from msgspec import Struct

U8 = npt.NDArray[np.uint8]
I64 = npt.NDArray[np.int64]
StatValue = int | float | str
Stats = Mapping[str, StatValue]

_VARINT, _FIXED64, _BYTES = 0, 1, 2
_CHUNK_ROWS = 32_768

# XStat's fields by the kind of value.
UINT, INT, REF = 3, 4, 7
_STAT_DOUBLE, _STAT_STR = 2, 5


_BYTE = [bytes([value]) for value in range(256)]


@lru_cache(maxsize=1 << 14)
def varint(value: int) -> bytes:
    """A varint; negative numbers as 64-bit two's complement."""
    if 0 <= value < 0x80:
        return _BYTE[value]
    value &= (1 << 64) - 1
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def field_varint(number: int, value: int) -> bytes:
    return varint(number << 3 | _VARINT) + varint(value)


def field_bytes(number: int, value: bytes | str) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return varint(number << 3 | _BYTES) + varint(len(data)) + data


def stat(metadata_id: int, value: StatValue) -> bytes:
    """An XStat with its own value, without the field it is in."""
    head = field_varint(1, metadata_id)
    if isinstance(value, str):
        return head + field_bytes(_STAT_STR, value)
    if isinstance(value, float):
        return head + bytes([_STAT_DOUBLE << 3 | _FIXED64]) + struct.pack("<d", value)
    return head + field_varint(UINT if value >= 0 else INT, value)


def stat_ref(metadata_id: int, target_id: int) -> bytes:
    """An XStat whose value is the name of another stat metadata."""
    return field_varint(1, metadata_id) + field_varint(REF, target_id)


class StatColumn(Struct, frozen=True):
    """A stat that every event of a group has: its metadata id, the kind of value and the values."""

    metadata_id: int
    kind: int  # UINT, INT or REF
    values: npt.NDArray[np.integer]


def events(metadata_id: npt.NDArray[np.integer], offset_ps: I64, duration_ps: I64, columns: Sequence[StatColumn] = (),
           constant_stats: Sequence[bytes] = ()) -> bytes:
    """XEvents as the field ``events`` of an XLine. All values must be non-negative."""
    pieces = []
    for first in range(0, len(offset_ps), _CHUNK_ROWS):
        rows = slice(first, first + _CHUNK_ROWS)
        parts = [
            *_number(1, metadata_id[rows]), *_number(2, offset_ps[rows]), *_number(3, duration_ps[rows]),
            *(part for column in columns for part in _stat_parts(column, rows)),
            *(_same(field_bytes(4, constant), len(offset_ps[rows])) for constant in constant_stats)]
        length = np.sum([part.length for part in parts], axis=0)
        pieces.append(_join([_same(bytes([4 << 3 | _BYTES]), len(offset_ps[rows])), _varints(length), *parts]))
    return b"".join(pieces)


class _Part(Struct, frozen=True):
    data: U8  # [rows, width]
    length: I64  # bytes used of each row


def _same(data: bytes, rows: int) -> _Part:
    return _Part(np.broadcast_to(np.frombuffer(data, np.uint8), (rows, len(data))), np.full(rows, len(data), np.int64))


def _varints(values: npt.NDArray[np.integer]) -> _Part:
    left = values.astype(np.uint64)
    length = np.ones(len(left), np.int64)
    columns = []
    while True:
        more = left > 0x7F
        columns.append((left & np.uint64(0x7F)).astype(np.uint8) | (more.astype(np.uint8) << 7))
        if not more.any():
            return _Part(np.stack(columns, axis=1), length)
        length += more
        left >>= np.uint64(7)


def _number(field: int, values: npt.NDArray[np.integer]) -> tuple[_Part, _Part]:
    return _same(bytes([field << 3 | _VARINT]), len(values)), _varints(values)


def _stat_parts(column: StatColumn, rows: slice) -> list[_Part]:
    value = _varints(column.values[rows])
    head = field_varint(1, column.metadata_id) + bytes([column.kind << 3 | _VARINT])
    n = len(value.length)
    # A stat is shorter than 128 bytes, so that its length is one byte.
    length = (value.length + len(head)).astype(np.uint8)[:, None]
    return [_same(bytes([4 << 3 | _BYTES]), n), _Part(length, np.ones(n, np.int64)), _same(head, n), value]


def _join(parts: Sequence[_Part]) -> bytes:
    rows = len(parts[0].length)
    width = sum(part.data.shape[1] for part in parts)
    data = np.empty((rows, width), np.uint8)
    used = np.empty((rows, width), bool)
    begin = 0
    for part in parts:
        size = part.data.shape[1]
        data[:, begin:begin + size] = part.data
        used[:, begin:begin + size] = np.arange(size) < part.length[:, None]
        begin += size
    return data[used].tobytes()


class Plane:
    """An XPlane in the making: names become metadata ids as they are used."""

    def __init__(self, name: str, plane_id: int = 0) -> None:
        self._name = name
        self._id = plane_id
        self._events: dict[str, int] = {}
        self._stats: dict[str, int] = {}
        self._lines: list[bytes] = []
        self._own_stats: list[bytes] = []

    def event_id(self, name: str) -> int:
        return self._events.setdefault(name, len(self._events) + 1)

    def stat_id(self, name: str) -> int:
        return self._stats.setdefault(name, len(self._stats) + 1)

    def ref_ids(self, names: Sequence[str]) -> I64:
        """Ids of strings that events refer to, in the order given."""
        return np.array([self.stat_id(name) for name in names], np.int64)

    def add_stat(self, name: str, value: StatValue) -> None:
        self._own_stats.append(stat(self.stat_id(name), value))

    def event(self, name: str, offset_ns: int, duration_ns: int, values: Stats | None = None) -> bytes:
        """One XEvent as the field ``events`` of an XLine; strings among ``values`` by reference, as TraceMe's are."""
        body = (field_varint(1, self.event_id(name)) + field_varint(2, offset_ns * 1000)
                + field_varint(3, duration_ns * 1000))
        for key, value in (values or {}).items():
            body += field_bytes(4, stat_ref(self.stat_id(key), self.stat_id(value)) if isinstance(value, str)
                                else stat(self.stat_id(key), value))
        return field_bytes(4, body)

    def add_line(self, line_id: int, name: str, timestamp_ns: int, event_bytes: Sequence[bytes]) -> None:
        data = b"".join(event_bytes)
        if data:
            head = field_varint(1, line_id) + field_bytes(2, name) + field_varint(3, timestamp_ns)
            self._lines.append(head + data)

    def finish(self) -> bytes:
        """The XPlane as the field ``planes`` of an XSpace."""
        out = [field_varint(1, self._id), field_bytes(2, self._name)]
        out += [field_bytes(3, line) for line in self._lines]
        for number, names in ((4, self._events), (5, self._stats)):
            for name, key in names.items():
                metadata = field_varint(1, key) + field_bytes(2, name)
                out.append(field_bytes(number, field_varint(1, key) + field_bytes(2, metadata)))
        out += [field_bytes(6, one) for one in self._own_stats]
        return field_bytes(1, b"".join(out))

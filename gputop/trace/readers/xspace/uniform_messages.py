"""Events whose bytes are laid out alike, decoded together without a walk from field to field.

Most events of a line differ in their numbers only: kernels that have another name, other times and another correlation
id, each written with as many bytes. One of them is read byte by byte. All whose tags, lengths and ids of stats equal
its own, and whose numbers end where its numbers end, have their fields at the same places.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from msgspec import Struct

from gputop.trace.model import I64
from gputop.trace.readers.xspace import fields
from gputop.trace.readers.xspace.wire import FIXED64, LENGTH, U64, VARINT, Block

_WORD = 8  # bytes
_MAX_EVENT_BYTES = 256
# Of a chunk's events of one length: fewer are left to the walk, and so is what remains after so many tries.
_FEW_EVENTS, _MAX_TRIES = 64, 8
_NUMBERS = (fields.EVENT_METADATA_ID, fields.EVENT_OFFSET_PS, fields.EVENT_DURATION_PS)
_MORE = 0x80  # bit of a number's byte: another one follows
_ALL_BITS = (1 << 64) - 1


class ValuePlace(NamedTuple):
    """Position of a value in each event of a layout; ``tag`` is that of its field."""

    tag: int
    begin: int
    length: int
    stat_id: int = 0  # of the stat whose value it is


class _Layout(Struct, frozen=True):
    """The bits that its events share, as words of eight bytes, and where their values lie."""

    mask: U64
    bits: U64
    numbers: tuple[ValuePlace, ...]  # of the events themselves
    stats: tuple[ValuePlace, ...]


class UniformMessages(Struct, frozen=True):
    """Events of one layout: their rows in the chunk, where they begin in the block, and their bytes: a row of
    ``words`` has the same eight bytes of each.
    """

    rows: I64
    begin: I64
    layout: _Layout
    words: U64

    def numbers(self) -> Iterator[tuple[int, I64]]:
        """Tag and values of each field of the events themselves."""
        return ((field.tag, self._bits(field).view(np.int64)) for field in self.layout.numbers)

    def value(self, stat: ValuePlace) -> U64:
        """The bits of a stat's values; of texts the length."""
        if stat.tag & 7 == LENGTH:
            return np.full(len(self.begin), stat.length, np.uint64)
        return self._bits(stat)

    def _bits(self, field: ValuePlace) -> U64:
        word, before = divmod(field.begin, _WORD)
        bits = self.words[word] >> np.uint64(8 * before)
        if before + field.length > _WORD:
            bits |= self.words[word + 1] << np.uint64(64 - 8 * before)
        return bits if field.tag & 7 == FIXED64 else _number(bits, field.length)


def find_uniform(block: Block, begin: I64, end: I64) -> tuple[list[UniformMessages], I64]:
    """Groups of events that are laid out alike, and the rows of all others, in order.

    ``begin`` and ``end`` are the events' places in the block. The events of a group are well-formed, and a walk would
    find the same in them.
    """
    length = end - begin
    groups: list[UniformMessages] = []
    if len(begin) < _FEW_EVENTS or begin.min() < 0 or end.max() > block.length:
        return groups, np.arange(len(begin))
    sizes = np.bincount(np.clip(length, 0, _MAX_EVENT_BYTES + 1), minlength=_MAX_EVENT_BYTES + 2)
    sizes[[0, -1]] = 0  # what is none, and what is longer
    for size in np.flatnonzero(sizes >= _FEW_EVENTS).tolist():
        rows = np.flatnonzero(length == size)
        groups.extend(_of_one_size(block, rows, begin[rows], size))
    if sum(len(alike.rows) for alike in groups) == len(begin):
        return groups, np.empty(0, np.int64)
    alone = np.ones(len(begin), bool)
    for alike in groups:
        alone[alike.rows] = False
    return groups, np.flatnonzero(alone)


def _of_one_size(block: Block, rows: I64, begin: I64, size: int) -> Iterator[UniformMessages]:
    words = _words(block, begin, size)
    for _ in range(_MAX_TRIES):
        first = int(begin[0])
        layout = _layout(block.bytes[first:first + size].tobytes())
        if layout is None:
            others = np.arange(1, len(rows))
        else:
            differing = (words[0] ^ layout.bits[0]) & layout.mask[0]
            for word, bits, mask in zip(words[1:], layout.bits[1:], layout.mask[1:], strict=True):
                differing |= (word ^ bits) & mask
            others = np.flatnonzero(differing)
            if not len(others):
                yield UniformMessages(rows, begin, layout, words)
                return
            if len(rows) - len(others) >= _FEW_EVENTS:
                same = np.flatnonzero(differing == 0)
                yield UniformMessages(rows[same], begin[same], layout, words.take(same, axis=1))
        if len(others) < _FEW_EVENTS:
            return
        rows, begin, words = rows[others], begin[others], words.take(others, axis=1)


def _words(block: Block, begin: I64, size: int) -> U64:
    """The bytes of these events, a row for each eight of them; beyond an event's end they are any."""
    count = -(-size // _WORD)
    # A view of so many bytes at every place, overlapping.
    views = np.ndarray((len(block.bytes) - count * _WORD + 1,), f"V{count * _WORD}", block.bytes, strides=(1,))
    return np.ascontiguousarray(views[begin].view("<u8").reshape(-1, count).T)


def _number(bits: U64, length: int) -> U64:
    """The numbers whose bytes are the lowest ``length`` of ``bits``: seven bits of each byte, the lowest first."""
    bits = bits & np.uint64(0x7F7F7F7F7F7F7F7F >> 8 * (_WORD - length))
    for size in (1, 2, 4):  # bytes of 7 bits to pairs of 14, those to 28, and those to 56
        if length > size:
            lower = ((1 << 7 * size) - 1) * sum(1 << shift for shift in range(0, 64, 16 * size))
            upper = lower << 7 * size & _ALL_BITS
            bits = (bits & np.uint64(lower)) | ((bits >> np.uint64(size)) & np.uint64(upper))
    return bits


def _layout(raw: bytes) -> _Layout | None:
    """The layout of this event; None where it has what only the walk can judge, as an unknown field."""
    mask = bytearray(b"\xff" * len(raw))
    numbers, stats = [], []
    pos = 0
    while pos < len(raw):
        if raw[pos] in _NUMBERS:
            stop = _number_end(raw, pos + 1, len(raw))
            numbers.append(ValuePlace(raw[pos], pos + 1, stop - pos - 1))
            mask[pos + 1:stop] = bytes([_MORE]) * (stop - pos - 1)
        elif raw[pos] == fields.EVENT_STAT and pos + 1 < len(raw) and raw[pos + 1] < _MORE:
            stop = pos + 2 + raw[pos + 1]
            stat = _stat(raw, pos + 2, stop) if stop <= len(raw) else None
            if stat is None:
                return None
            stats.append(stat)
            mask[stat.begin:stop] = bytes([_MORE if stat.tag & 7 == VARINT else 0]) * stat.length
        else:
            return None
        if stop <= pos:
            return None
        pos = stop
    end = bytes(-len(raw) % _WORD)
    bits = np.frombuffer(raw + end, "<u8")
    return _Layout(shared := np.frombuffer(bytes(mask) + end, "<u8"), bits & shared, tuple(numbers), tuple(stats))


def _stat(raw: bytes, pos: int, stop: int) -> ValuePlace | None:
    """The place of the value of a stat that has an id and a value, in this order, and nothing else."""
    value = _number_end(raw, pos + 1, stop) if pos < stop and raw[pos] == fields.STAT_METADATA_ID else 0
    if not 0 < value < stop - 1 or raw[value] not in fields.STAT_VALUES:
        return None
    stat_id = sum((byte & ~_MORE) << 7 * i for i, byte in enumerate(raw[pos + 1:value]))
    tag, begin = raw[value], value + 1
    if tag & 7 == VARINT:
        end = _number_end(raw, begin, stop)
    elif tag & 7 == FIXED64:
        end = begin + 8
    else:
        end = begin + 1 + raw[begin] if raw[begin] < _MORE else 0
        begin += 1
    return ValuePlace(tag, begin, end - begin, stat_id) if end == stop else None


def _number_end(raw: bytes, pos: int, stop: int) -> int:
    """The place after the number that begins there; 0 where it does not end before ``stop`` or within a word."""
    for i in range(pos, min(pos + _WORD, stop)):
        if raw[i] < _MORE:
            return i + 1
    return 0

"""The protobuf wire format, read with NumPy: many small messages of one type at a time.

Nothing here knows a schema, trusts a length or raises on bad bytes: what is cut off or
malformed is reported as such and the rest is read. Format:
https://protobuf.dev/programming-guides/encoding/. A *tag* is the field's number and wire
type as they stand on the wire, ``number << 3 | type``; comparing whole tags ignores fields
of an unexpected type, as protobuf's own parsers do.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from gputop.trace.model import I64

Data = bytes | bytearray
U64 = npt.NDArray[np.uint64]
Bools = npt.NDArray[np.bool_]
Bytes = npt.NDArray[np.uint8]

VARINT, FIXED64, LENGTH, FIXED32 = 0, 1, 2, 5
# A varint read past the end of a message stays inside the padded copy: a tag of up to 10
# bytes, a value of up to 10, and a word of 8 read at its last byte.
_PADDING = 32
_MAX_VARINT_BYTES = 10
# A run longer than _FEW_BYTES is walked from guesses _STRIDE apart, each looked for in the _SEARCHED
# bytes from there and confirmed by that many fields after it.
_FEW_BYTES, _STRIDE, _SEARCHED, _CONFIRMED = 1 << 17, 1 << 11, 128, 12
# Walked at a time: little at first, since a run may end soon, and never so much that it takes memory.
_WINDOW, _MAX_WINDOW = 1 << 22, 1 << 24
_LONGEST = (1 << 14) + 3  # of the fields of a run, with tag and length

_BYTE = np.uint64(0xFF)
_LAST = np.uint64(0x8080808080808080)  # the top bit of a byte is clear on a varint's last byte
_SEVEN = np.uint64(0x7F7F7F7F7F7F7F7F)
_LOW, _SEVENTH = np.uint64(0x7F), np.uint64(7)
_ONE, _EIGHT = np.uint64(1), np.uint64(8)


def tag(number: int, wire_type: int) -> int:
    return number << 3 | wire_type


@dataclass(slots=True)
class Fields:
    """The fields of one message: ``spans`` holds begin, end, begin, end … of each wanted
    length-delimited field, ``values`` the last value of each other wanted field.

    ``damaged`` says the message ended early or stopped making sense. Where that was inside a
    length-delimited field, ``cut`` is its tag, and its last span is shortened to what is there.
    """

    spans: dict[int, array[int]]
    values: dict[int, int] = field(default_factory=dict)
    damaged: bool = False
    cut: int | None = None

    def pairs(self, wanted: int, *, whole: bool = False) -> tuple[I64, I64]:
        """Begins and ends of a length-delimited field, one row per occurrence; ``whole``: but for a cut one."""
        both = np.frombuffer(self.spans[wanted], np.int64) if self.spans[wanted] else np.empty(0, np.int64)
        if whole and self.cut == wanted:
            both = both[:-2]
        return both[0::2], both[1::2]

    def last(self, wanted: int) -> tuple[int, int] | None:
        spans = self.spans[wanted]
        return (spans[-2], spans[-1]) if spans else None


def read_fields(data: Data, begin: int, end: int, wanted: Collection[int]) -> Fields:
    """Walk one message from ``begin`` to ``end`` and note where its wanted fields lie.

    A plain loop, because each field's place follows from the one before; runs of one field,
    such as the events of a line, take a shorter way.
    """
    out = Fields({t: array("q") for t in wanted if t & 7 == LENGTH})
    pos, end, before = begin, min(end, len(data)), -1
    while pos < end:
        this = data[pos]
        pos += 1
        if this >= 0x80:
            this, pos = _read_varint(data, pos - 1, end)
        elif this == before and this in out.spans:
            places, pos = _run(data, pos - 1, end, this)
            out.spans[this].frombytes(_spans(data, places))
            before = -1
            continue
        kind = this & 7
        before = this
        if pos >= end or this < 8:  # nothing follows the tag, or field number 0
            out.damaged = True
            break
        if kind == LENGTH:
            length = data[pos]
            pos += 1
            if length >= 0x80:
                length, pos = _read_varint(data, pos - 1, end)
            stop = pos + length
            if length < 0 or stop > end:
                out.damaged, out.cut, stop = True, this, end
                if length < 0:
                    break
            spans = out.spans.get(this)
            if spans is not None:
                spans.append(pos)
                spans.append(stop)
            pos = stop
        elif kind == VARINT:
            value, pos = _read_varint(data, pos, end)
            if value < 0:
                out.damaged = True
                break
            if this in wanted:
                out.values[this] = value
        elif kind in (FIXED64, FIXED32):
            pos += 8 if kind == FIXED64 else 4
            if pos > end:
                out.damaged = True
        else:  # groups are long gone, 6 and 7 never were
            out.damaged = True
            break
    return out


def _run(data: Data, pos: int, end: int, wanted: int) -> tuple[I64, int]:
    """Where the fields of a run begin, as far as they have this tag, lengths below 16 kB and
    end before ``end``; and where the run stops, which may be at once."""
    places: list[int] = []
    append = places.append
    last = end - 3
    few = min(last, pos + _FEW_BYTES)
    while pos < few and data[pos] == wanted:
        length = data[pos + 1]
        if length < 0x80:
            stop = pos + length + 2
        else:
            high = data[pos + 2]
            if high >= 0x80:
                break
            stop = pos + (length & 0x7F) + (high << 7) + 3
        if stop > end:
            break
        append(pos)
        pos = stop
    found, window = [np.array(places, np.int64)], _WINDOW
    goes_on = pos >= few
    while goes_on and pos < last:
        stop = min(end, pos + window)
        more, pos = _long_run(np.frombuffer(data, np.uint8, stop), pos, wanted)
        found.append(more)
        goes_on = stop < end and pos > stop - _LONGEST  # it ended for want of data, not of fields
        window = min(2 * window, _MAX_WINDOW)
    return np.concatenate(found), pos


def _long_run(raw: Bytes, pos: int, wanted: int) -> tuple[I64, int]:
    """The same of a long run, walked from many places at once.

    Each place is guessed: a few kilobytes apart, what looks like such a field and like some more
    that follow. Fields of the same tag inside the wanted ones, as an event's stats are, look the
    same, but going from one to the next soon leads out of them. Each walk has to arrive exactly
    where the next begins; from the first that does not, all is left to be walked again. So what
    is found is what one walk from the beginning finds.
    """
    last = len(raw) - 3
    guesses = np.arange(pos + _STRIDE, last - _STRIDE, _STRIDE)
    around = guesses[:, None] + np.arange(_SEARCHED)
    which, offset = np.nonzero(raw[around] == wanted)
    at = around[which, offset]
    for _ in range(_CONFIRMED):
        at, ok = _next(raw, at, wanted)
        at, which = at[ok], which[ok]
    _, first = np.unique(which, return_index=True)
    begin = np.unique(np.append(at[first], pos))
    limit = np.append(begin[1:], last)
    here, walked = begin.copy(), []
    row = np.arange(len(begin))
    while len(row):
        after, ok = _next(raw, here[row], wanted)
        row, after = row[ok], after[ok]
        walked.append((row, here[row]))
        here[row] = after
        row = row[after < limit[row]]
    good = len(begin) if (arrived := here[:-1] == begin[1:]).all() else int(np.argmin(arrived)) + 1
    rows, places = (np.concatenate(column) for column in zip(*walked, strict=True))
    return np.sort(places[rows < good]), int(here[good - 1])


def _next(raw: Bytes, at: I64, wanted: int) -> tuple[I64, Bools]:
    """Where the fields that begin there end, and whether they are of the run."""
    inside = np.minimum(at, len(raw) - 3)
    low, high = raw[inside + 1].astype(np.int64), raw[inside + 2].astype(np.int64)
    long = low >= 0x80
    stop = inside + 2 + np.where(long, (low & 0x7F) + (high << 7) + 1, low)
    return stop, (at < len(raw) - 3) & (raw[inside] == wanted) & ~(long & (high >= 0x80)) & (stop <= len(raw))


def _spans(data: Data, at: I64) -> bytes:
    """Begin and end of the contents of the fields of a run, as int64 pairs."""
    raw = np.frombuffer(data, np.uint8)
    low, high = raw[at + 1].astype(np.int64), raw[at + 2].astype(np.int64)
    long = low >= 0x80
    begin = at + 2 + long
    return np.stack([begin, begin + np.where(long, (low & 0x7F) + (high << 7), low)], axis=1).tobytes()


def _read_varint(data: Data, pos: int, end: int) -> tuple[int, int]:
    """Value and the position after it; the value is -1 where there is no whole varint."""
    value = 0
    for i in range(_MAX_VARINT_BYTES):
        if pos + i >= end:
            return -1, end
        byte = data[pos + i]
        value |= (byte & 0x7F) << (7 * i)
        if byte < 0x80:
            return value & 0xFFFFFFFFFFFFFFFF, pos + i + 1
    return -1, end


def signed(value: int) -> int:
    """An int64 from the unsigned value that stands on the wire."""
    return value - (1 << 64) if value >= 1 << 63 else value


@dataclass(slots=True)
class Round:
    """One field of each message that still has one. ``rows`` says of which messages.

    ``value`` is the varint's or fixed field's bits; a length-delimited field lies in
    ``begin`` … ``end``, positions in the block's data.
    """

    rows: I64
    tag: U64
    value: U64
    begin: I64
    end: I64

    def of(self, wanted: int) -> Bools:
        return self.tag == np.uint64(wanted)


class Block:
    """A stretch of the data that holds many messages of one type, copied with room to over-read."""

    def __init__(self, data: Data, begin: int, end: int) -> None:
        begin, end = max(begin, 0), min(end, len(data))
        self.base = begin
        self.bytes = np.zeros(max(end - begin, 0) + _PADDING, np.uint8)
        self.bytes[: end - begin] = np.frombuffer(data, np.uint8, max(end - begin, 0), begin)
        # The eight bytes at every position, overlapping: no copy.
        self.words: U64 = np.ndarray((len(self.bytes) - 7,), "<u8", self.bytes, strides=(1,))

    def first_varint(self, wanted: int, begin: I64) -> tuple[I64, I64]:
        """The value of the first field where it has this (one-byte) tag and two bytes at most, else -1;
        and the place after it, which may lie beyond the message's end.

        A glance that spares walking through messages nobody wants.
        """
        word = self.words[begin]
        low, high = word >> _EIGHT & _BYTE, word >> np.uint64(16) & _BYTE
        short = low < 0x80
        value = np.where(short, low, (low & np.uint64(0x7F)) | high << np.uint64(7))
        known = ((word & _BYTE) == np.uint64(wanted)) & (short | (high < 0x80))
        return np.where(known, value.view(np.int64), -1), begin + np.where(short, 2, 3)

    def walk(self, begin: I64, end: I64, broken: Bools) -> Iterator[Round]:
        """All messages side by side, field after field, in the order each has them.

        ``begin`` and ``end`` are positions in this block; ``broken`` (one per message) is set
        for those that are malformed. The fields such a message had before the damage are
        yielded; the caller decides about them.
        """
        inside = (begin >= 0) & (begin <= end) & (end <= len(self.bytes) - _PADDING)
        broken |= ~inside
        rows = np.flatnonzero(inside & (begin < end))
        pos, stop = begin[rows], end[rows]
        while len(rows):
            tags, value, after = self._tag_and_varint(pos)
            kind = tags & np.uint64(7)
            is_length = kind == np.uint64(LENGTH)
            # A length is added only after it is known to fit; nothing overflows.
            room = (stop - after).astype(np.uint64)
            bad = (after < 0) | (after > stop) | (tags < _EIGHT) | (is_length & (value > room))
            plain = kind == np.uint64(VARINT)
            finish = np.where(is_length & ~bad, after + value.astype(np.int64), after)
            if not (plain | is_length).all():
                bad |= ~(plain | is_length | (kind == np.uint64(FIXED64)) | (kind == np.uint64(FIXED32)))
                self._read_fixed(pos, stop, tags, kind, value, finish, bad)
            if bad.any():
                broken[rows[bad]] = True
                ok = ~bad
                rows, stop, tags, value, after, finish = (a[ok] for a in (rows, stop, tags, value, after, finish))
            yield Round(rows, tags, value, after, finish)
            pos = finish
            more = pos < stop
            if not more.all():
                rows, pos, stop = rows[more], pos[more], stop[more]

    def _tag_and_varint(self, pos: I64) -> tuple[U64, U64, I64]:
        """Tags, the varints after them and the positions after those (-1: malformed)."""
        word = self.words[pos]
        tags = word & _BYTE
        value, size = _decode(word >> _EIGHT)
        after = pos + 1 + size
        # Tags of two bytes (field 16 and up) and varints of more than seven: few.
        odd = np.flatnonzero((tags >= np.uint64(0x80)) | (size == 8))
        if len(odd):
            tags[odd], at = self._varint(pos[odd])
            value[odd], end = self._varint(np.maximum(at, 0))
            after[odd] = np.where(at < 0, -1, end)
        return tags, value, after

    def _varint(self, pos: I64) -> tuple[U64, I64]:
        """Varints of any length at these positions, and the positions after them (-1: none)."""
        pos = np.minimum(pos, len(self.words) - 3)
        word = self.words[pos]
        value, size = _decode(word)
        long = np.flatnonzero((word & _LAST) == _LAST)
        after = pos + size
        if len(long):
            at = pos[long]
            ninth, tenth = self.bytes[at + 8].astype(np.uint64), self.bytes[at + 9].astype(np.uint64)
            eight = _squeeze(word[long] & _SEVEN) | (ninth & np.uint64(0x7F)) << np.uint64(56)
            value[long] = np.where(ninth < 0x80, eight, eight | tenth << np.uint64(63))
            after[long] = np.where(ninth < 0x80, at + 9, np.where(tenth < 0x80, at + 10, -1))
        return value, after

    def _read_fixed(self, pos: I64, stop: I64, tags: U64, kind: U64, value: U64, finish: I64, bad: Bools) -> None:
        """Put right, in place, what was read as a varint but is a fixed32 or fixed64."""
        for wire_type, size, mask in ((FIXED64, 8, 0xFFFFFFFFFFFFFFFF), (FIXED32, 4, 0xFFFFFFFF)):
            rows = np.flatnonzero(kind == np.uint64(wire_type))
            at = np.where(tags[rows] < 0x80, pos[rows] + 1, self._varint(pos[rows])[1])
            fits = (at >= 0) & (at + size <= stop[rows])
            bad[rows] = ~fits | (tags[rows] < _EIGHT)
            value[rows] = self.words[np.where(fits, at, 0)] & np.uint64(mask)
            finish[rows] = at + size

    def text(self, begin: int, end: int) -> str:
        return self.bytes[begin:end].tobytes().decode("utf-8", "replace")


def _decode(word: U64) -> tuple[U64, I64]:
    """The varint at the start of each little-endian word, and its size; size 8 where it may go on."""
    long = (word >> _SEVENTH) & _ONE
    two = word & (long << np.uint64(15))  # the second byte goes on, too
    if not two.any():  # lengths and ids, most of them
        size = long.view(np.int64) + 1
        return word & _LOW | (word >> _ONE) & (np.uint64(0x3F80) * long), size
    last = ~word & _LAST
    lowest = last & (~last + _ONE)
    size = (lowest.astype(np.float64).view(np.int64) >> 52) - 1022 >> 3  # from the exponent: 2**7 is 1 byte
    size[lowest == 0] = 8
    return _squeeze(word & (lowest + (lowest - _ONE)) & _SEVEN), size


def _squeeze(x: U64) -> U64:
    """Drop the top bit of each of the eight bytes and close the gaps."""
    x = (x & np.uint64(0x007F007F007F007F)) | (x & np.uint64(0x7F007F007F007F00)) >> _ONE
    x = (x & np.uint64(0x00003FFF00003FFF)) | (x & np.uint64(0x3FFF00003FFF0000)) >> np.uint64(2)
    return (x & np.uint64(0x000000000FFFFFFF)) | (x & np.uint64(0x0FFFFFFF00000000)) >> np.uint64(4)

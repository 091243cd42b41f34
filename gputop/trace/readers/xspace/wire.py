"""The protobuf wire format, read with NumPy: many small messages of one type at a time.

Nothing here knows a schema, trusts a length or raises on bad bytes: cut-off and malformed messages are reported and the
rest is read. Format: https://protobuf.dev/programming-guides/encoding/. A *tag* is the field's number and wire type as
encoded, ``number << 3 | type``; comparing whole tags ignores fields of an unexpected type, as protobuf's own parsers
do.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterator, Mapping

import numpy as np
import numpy.typing as npt
from msgspec import Struct, field

from gputop.trace.model import I64
from gputop.trace.readers.content import Data

U64 = npt.NDArray[np.uint64]
Bools = npt.NDArray[np.bool_]
Bytes = npt.NDArray[np.uint8]

VARINT, FIXED64, LENGTH, FIXED32 = 0, 1, 2, 5
# A field read past the end of a message stays inside the padded copy: a tag of up to 10 bytes, a value of
# up to 10, one byte more.
_PADDING = 32
_MAX_VARINT_BYTES = 10
# A run of fields longer than _SERIAL_BYTES is walked from up to _MAX_WALKS guessed places, at least
# _MIN_STRIDE_BYTES apart. Each guess is searched for in the _SEARCH_BYTES from there and confirmed by
# _CONFIRMING_FIELDS fields that follow it.
_SERIAL_BYTES, _MAX_WALKS, _MIN_STRIDE_BYTES, _SEARCH_BYTES, _CONFIRMING_FIELDS = 1 << 17, 1 << 13, 1 << 10, 32, 4
# Bytes walked at a time: few at first, since a run may end soon, and never so many that memory grows.
_FIRST_WINDOW_BYTES, _MAX_WINDOW_BYTES, _WINDOW_FIELDS = 1 << 22, 1 << 24, 1 << 19
_FIELDS_PER_STEP = 16  # of a run, which takes a tenth of the time for each
_MAX_FIELD_BYTES = (1 << 14) + 3  # of a field of a run, with tag and length

_NOWHERE = 1 << 62  # a position beyond all data
_NO_LIMIT: Mapping[int, int] = {}
# Fields of one message that Block reads, each in a pass of its own over all messages. Events of TensorFlow, JAX and
# XProf have up to 40; one that has more than this is malformed.
MAX_FIELDS = 128


def tag(number: int, wire_type: int) -> int:
    return number << 3 | wire_type


class Quota(Struct):
    """Number of further fields that may be walked one by one, in one message or in several; of a run many count as
    one."""

    left: int


class Fields(Struct):
    """The fields of one message: ``spans`` holds begin, end, begin, end … of each wanted
    length-delimited field, ``values`` the last value of each other wanted field.

    ``damaged``: the message ended early or became invalid. Where that was inside a
    length-delimited field, ``cut`` is its tag, and its last span is shortened to the data that exist.
    ``surplus``: how many fields of a tag were passed over because there are more than are read.
    """

    spans: dict[int, array[int]]
    values: dict[int, int] = field(default_factory=dict)
    damaged: bool = False
    cut: int | None = None
    surplus: dict[int, int] = field(default_factory=dict)

    def pairs(self, wanted: int, *, whole: bool = False) -> tuple[I64, I64]:
        """Begins and ends of a length-delimited field, one row per occurrence; ``whole`` leaves out a cut one."""
        both = np.frombuffer(self.spans[wanted], np.int64) if self.spans[wanted] else np.empty(0, np.int64)
        if whole and self.cut == wanted:
            both = both[:-2]
        return both[0::2], both[1::2]

    def last(self, wanted: int) -> tuple[int, int] | None:
        spans = self.spans[wanted]
        return (spans[-2], spans[-1]) if spans else None


def read_fields(data: Data, begin: int, end: int, wanted: Collection[int],
                at_most: Mapping[int, int] = _NO_LIMIT, *, steps: Quota | None = None, enough: bool = False) -> Fields:
    """Walk one message from ``begin`` to ``end`` and note where its wanted fields lie.

    ``at_most`` holds the largest number of fields with a tag; more are skipped and counted, or, with ``enough``,
    the walk ends with the last of them. It also ends where no ``steps`` are left.

    A plain loop, because each field's place follows from the one before. Runs of one field,
    such as the events of a line, are read by :func:`_repeated_field`.
    """
    out = Fields({t: array("q") for t in wanted if t & 7 == LENGTH})
    pos, end, before = begin, min(end, len(data)), -1
    while pos < end:
        if steps is not None:
            steps.left -= 1
            if steps.left < 0:
                break
        this = data[pos]
        pos += 1
        if this >= 0x80:
            this, pos = read_varint(data, pos - 1, end)
        elif this == before and this in out.spans:
            room = at_most.get(this, _NOWHERE) - len(out.spans[this]) // 2
            most = _NOWHERE if steps is None else _FIELDS_PER_STEP * steps.left
            places, count, pos = _repeated_field(data, pos - 1, end, this, room, most)
            if steps is not None:
                steps.left -= count // _FIELDS_PER_STEP
            out.spans[this].frombytes(_spans(data, places, pos)[:max(room, 0)].tobytes())
            if count > room:
                out.surplus[this] = out.surplus.get(this, 0) + count - max(room, 0)
                if enough:
                    break
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
                length, pos = read_varint(data, pos - 1, end)
            stop = pos + length
            if length < 0 or stop > end:
                out.damaged, out.cut, stop = True, this, end
                if length < 0:
                    break
            spans = out.spans.get(this)
            if spans is not None:
                if at_most and len(spans) >= 2 * at_most.get(this, _NOWHERE):
                    out.surplus[this] = out.surplus.get(this, 0) + 1
                    if out.cut == this:
                        out.cut = None
                else:
                    spans.append(pos)
                    spans.append(stop)
                if enough and len(spans) >= 2 * at_most.get(this, _NOWHERE):
                    break
            pos = stop
        elif kind == VARINT:
            value, pos = read_varint(data, pos, end)
            if value < 0:
                out.damaged = True
                break
            if this in wanted:
                out.values[this] = value
        elif kind in (FIXED64, FIXED32):
            pos += 8 if kind == FIXED64 else 4
            if pos > end:
                out.damaged = True
        else:  # groups are deprecated, 6 and 7 are undefined
            out.damaged = True
            break
    return out


def _repeated_field(data: Data, pos: int, end: int, wanted: int, room: int, most: int) -> tuple[I64, int, int]:
    """Begins of the fields of a run with this tag, their number, and where the run stops, which may be at once.

    It stops at a field of 16 kB or more, at one that does not end before ``end``, and soon after ``most`` fields. Of
    more than ``room`` fields the places of so many and one are returned."""
    places: list[int] = []
    append = places.append
    last = end - 3
    serial_end = min(last, pos + _SERIAL_BYTES)
    while pos < serial_end and data[pos] == wanted:
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
    # Short fields take many times their size in memory while they are walked.
    largest = min(_MAX_WINDOW_BYTES, _WINDOW_FIELDS * max(_SERIAL_BYTES // max(len(places), 1), 2))
    pieces, window = [np.array(places, np.int64)], min(_FIRST_WINDOW_BYTES, largest)
    total = kept = len(places)
    goes_on = pos >= serial_end
    while goes_on and pos < last and total <= most:
        stop = min(end, pos + window)
        more, pos = _repeated_field_parallel(np.frombuffer(data, np.uint8, stop), pos, wanted)
        total += len(more)
        more = more[:max(room + 1 - kept, 0)]
        kept += len(more)
        pieces.append(more)
        goes_on = stop < end and pos > stop - _MAX_FIELD_BYTES  # the window ended, not the run
        window = min(2 * window, largest)
    return np.concatenate(pieces), total, pos


def _repeated_field_parallel(raw: Bytes, pos: int, wanted: int) -> tuple[I64, int]:
    """The same for a long run, walked from many places in parallel.

    1. Guess places some kilobytes apart that look like such a field with some more behind it. A guess may lie
       inside a field, because the stats of an event have the event's tag; walking on soon leads out of the field.
    2. Walk from each guess to the next one.
    3. Of each walk keep what comes after the end of the walk before it, provided that it reached that end. At
       the first walk that did not, stop: the caller continues from there.

    The result is what one walk from the beginning finds.
    """
    last = len(raw) - 3
    begin = _guesses(raw, pos, wanted)
    limit = np.append(begin[1:], last)
    here, walked = begin.copy(), []
    row, passed = np.arange(len(begin)), np.zeros(len(begin), np.int64)
    while len(row):
        pos_of = here[row]
        after, ok = _next(raw, pos_of, wanted)
        if not ok.all():
            row, pos_of, after = row[ok], pos_of[ok], after[ok]
        walked.append((row, pos_of))
        passed[row] += 1
        here[row] = after
        more = after < limit[row]
        if not more.all():
            row = row[more]
    ends = np.cumsum(passed)
    places = np.empty(int(ends[-1]), np.int64)
    first = ends - passed
    for step, (row, pos_of) in enumerate(walked):
        places[first[row] + step] = pos_of  # a walk that is at its n-th place has n before it
    good = len(begin)
    if (here[:-1] != begin[1:]).any():
        rows = np.repeat(np.arange(len(begin)), passed)
        before = np.concatenate(([pos], here[:-1]))  # where the walk before ended
        arrived = here == before  # it may have covered this one
        arrived[rows[places == before[rows]]] = True
        good = good if arrived.all() else int(np.argmin(arrived))
        places = np.sort(places[(rows < good) & (places >= before[rows])], kind="stable")
    return places, int(here[good - 1])


def _guesses(raw: Bytes, pos: int, wanted: int) -> I64:
    """``pos`` and further places in order, at most one per stride, where such fields seem to begin."""
    last = len(raw) - 3
    stride = max(_MIN_STRIDE_BYTES, (last - pos) // _MAX_WALKS)
    first = pos + stride
    count = max(-(-(last - stride - first) // stride), 0)
    searched = np.lib.stride_tricks.as_strided(raw[first:], (count, _SEARCH_BYTES), (stride, 1), writeable=False)
    which, offset = np.nonzero(searched == wanted)
    guess = first + which * stride + offset
    for _ in range(_CONFIRMING_FIELDS):
        after, ok = _next(raw, guess, wanted)
        guess = np.sort(after[ok & (after < last)])
        guess = guess[np.diff(guess, prepend=-1) > 0]  # walks that have met
    which = (guess - pos) // stride
    return np.concatenate(([pos], guess[np.diff(which, prepend=0) > 0]))


def _next(raw: Bytes, begin: I64, wanted: int) -> tuple[I64, Bools]:
    """Ends of the fields that begin at ``begin``, and whether they belong to the run. Each begin lies at least three
    bytes before the end of the data."""
    low = raw.take(begin + 1)
    long = low >= 0x80
    stop = begin + 2 + low
    ok = raw.take(begin) == wanted
    if long.any():
        some = np.flatnonzero(long)
        high = raw.take(begin[some] + 2)
        stop[some] += (high.astype(np.int64) << 7) - 0x7F
        ok[some] &= high < 0x80
    return stop, ok & (stop <= len(raw))


def _spans(data: Data, begin: I64, stop: int) -> I64:
    """Begin and end of the contents of the fields of a run that stops there, as rows of int64."""
    spans = np.empty((len(begin), 2), np.int64)
    spans[:, 0] = begin + 2 + (np.frombuffer(data, np.uint8).take(begin + 1) >= 0x80)
    spans[:-1, 1], spans[-1:, 1] = begin[1:], stop  # each ends where the next begins
    return spans


def read_varint(data: Data, pos: int, end: int) -> tuple[int, int]:
    """Value and the position after it; the value is -1 for an incomplete varint."""
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
    """An int64 from the unsigned value on the wire."""
    return value - (1 << 64) if value >= 1 << 63 else value


class FieldColumn(Struct):
    """The n-th field of each message that has so many. ``rows`` are those messages, in order.

    ``tag`` is the fields' tag, a single number where all have the same. ``value`` is the varint's or fixed field's
    bits; a length-delimited field lies in ``begin`` … ``end``, positions in the block's data.
    """

    rows: I64
    tag: npt.NDArray | int
    value: U64
    begin: I64
    end: I64

    def mask(self, *wanted: int) -> Bools | slice:
        """An index of the columns for the rows with one of these tags; a slice where those are all rows or none."""
        if isinstance(self.tag, int):
            return slice(None) if self.tag in wanted else slice(0)
        return np.asarray(np.logical_or.reduce([self.tag == this for this in wanted]), bool)


class Block:
    """A part of the data that holds many messages of one type, copied with padding to read beyond its end.

    Bytes are gathered and compared as bytes, which moves an eighth of the memory that 64-bit words would.
    """

    def __init__(self, data: Data, begin: int, end: int) -> None:
        begin, end = max(begin, 0), min(end, len(data))
        self.base = begin
        self.length = max(end - begin, 0)
        self.bytes = np.empty(self.length + _PADDING, np.uint8)
        self.bytes[:self.length] = np.frombuffer(data, np.uint8, self.length, begin)
        self.bytes[self.length:] = 0

    def peek_varint(self, wanted: int, begin: I64) -> tuple[I64, I64]:
        """The value of the first field where it has this (one-byte) tag and a value below 2**63, else -1;
        and the place after it, which may lie beyond the message's end.

        Spares walking through unwanted messages.
        """
        value, after = self._varints(begin + 1)
        is_wanted = (self.bytes.take(begin) == wanted) & (after < _NOWHERE)
        signed_value = value.view(np.int64)
        return (signed_value if is_wanted.all() else np.where(is_wanted, signed_value, -1)), after

    def walk(self, begin: I64, end: I64, broken: Bools) -> Iterator[FieldColumn]:
        """The first field of all messages, then the second of all, and so on.

        ``begin`` and ``end`` are positions in this block; ``broken`` (one per message) is set
        for those that are malformed. The fields such a message had before the damage are
        yielded; the caller decides about them. A message of more than ``MAX_FIELDS`` is malformed.
        """
        inside = (begin >= 0) & (begin <= end) & (end <= self.length)
        broken |= ~inside
        rows = np.flatnonzero(inside & (begin < end))
        pos, stop = begin[rows], end[rows]
        for _ in range(MAX_FIELDS):
            if not len(rows):
                return
            tags, value_pos = self._tags(pos)
            value, after = self._varints(value_pos)
            kind = tags & 7
            is_length, plain = np.equal(kind, LENGTH), np.equal(kind, VARINT)
            finish, bad = after, (after > stop) | (tags < 8)
            if np.any(is_length):
                # Lengths are compared before they are added, so nothing overflows.
                bad |= is_length & (value > (stop - after).view(np.uint64))
                finish = after + value.view(np.int64) * is_length
            if not np.all(is_length | plain):
                finish = finish.copy()
                bad |= ~(is_length | plain | np.equal(kind, FIXED64) | np.equal(kind, FIXED32))
                self._read_fixed(value_pos, stop, tags, value, finish, bad)
            if bad.any():
                broken[rows[bad]] = True
                ok = np.flatnonzero(~bad)
                rows, stop, value, after, finish = rows[ok], stop[ok], value[ok], after[ok], finish[ok]
                tags = tags if isinstance(tags, int) else tags[ok]
                if not len(rows):
                    return
            yield FieldColumn(rows, tags, value, after, finish)
            more = finish < stop
            pos = finish
            if not more.all():
                left = np.flatnonzero(more)
                rows, pos, stop = rows[left], pos[left], stop[left]
        broken[rows] = True

    def _tags(self, pos: I64) -> tuple[npt.NDArray | int, I64]:
        """Tags, one number where all are the same, 0 for malformed ones; and the positions after them."""
        tags, after = self.bytes.take(pos), pos + 1
        if (tags == (first := int(tags[0]))).all() and first < 0x80:
            return first, after
        long = np.flatnonzero(tags >= 0x80)  # field 16 and up: few
        if not len(long):
            return tags, after
        value, end = self._varints(pos[long])
        valid = end < _NOWHERE
        wide = tags.astype(np.uint64)
        wide[long] = np.where(valid, value, 0)
        after[long[valid]] = end[valid]
        return wide, after

    def _varints(self, begin: I64, at_most: int = _MAX_VARINT_BYTES) -> tuple[U64, I64]:
        """The varints that begin there and the positions after them, _NOWHERE where none ends in time."""
        byte = self.bytes.take(begin)
        value, after, shift = (byte & 0x7F).astype(np.uint64), begin + 1, 0
        goes_on = byte >= 0x80
        while count := np.count_nonzero(goes_on):
            shift += 7
            at_most -= 1
            if not at_most:
                after[goes_on] = _NOWHERE
            elif count < len(begin) // 4:
                some = np.flatnonzero(goes_on)
                rest, after[some] = self._varints(after[some], at_most)
                value[some] |= rest << np.uint64(shift)
            else:
                byte = self.bytes.take(after) * goes_on
                value |= (byte & 0x7F).astype(np.uint64) << np.uint64(shift)
                after += goes_on
                goes_on = byte >= 0x80
                continue
            break
        return value, after

    def _read_fixed(self, begin: I64, stop: I64, tags: npt.NDArray | int, value: U64, finish: I64, bad: Bools) -> None:
        """Correct, in place, the values at ``begin`` that were read as varints but are fixed32 or fixed64."""
        # A view of the eight bytes at every position, overlapping.
        words: U64 = np.ndarray((len(self.bytes) - 7,), "<u8", self.bytes, strides=(1,))
        tags = np.broadcast_to(tags, begin.shape)
        for wire_type, size, mask in ((FIXED64, 8, 0xFFFFFFFFFFFFFFFF), (FIXED32, 4, 0xFFFFFFFF)):
            rows = np.flatnonzero((tags & 7) == wire_type)
            finish[rows] = begin[rows] + size
            bad[rows] = (finish[rows] > stop[rows]) | (tags[rows] < 8)
            value[rows] = words[begin[rows]] & np.uint64(mask)

    def text(self, begin: int, end: int) -> str:
        return self.bytes[begin:end].tobytes().decode("utf-8", "replace")

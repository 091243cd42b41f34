"""One XPlane: its tables of names, its lines, and the events of a line as columns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
from msgspec import Struct, field

from gputop.trace import limits
from gputop.trace.builder import Names
from gputop.trace.int_map import IntMap
from gputop.trace.model import F64, I64
from gputop.trace.parallel import map_ordered
from gputop.trace.readers.content import Data
from gputop.trace.readers.xspace import fields as tags
from gputop.trace.readers.xspace.uniform_messages import UniformMessages, find_uniform
from gputop.trace.readers.xspace.wire import LENGTH, U64, Block, Bools, FieldColumn, Quota, read_fields, signed

_Values = TypeVar("_Values", I64, F64)
_U32 = npt.NDArray[np.uint32]

_ANY = 1 << 62
_AT_MOST = {tags.PLANE_LINE: limits.MAX_LINES, tags.PLANE_STAT: limits.MAX_PLANE_STATS,
            tags.PLANE_EVENT_METADATA: limits.MAX_METADATA, tags.PLANE_STAT_METADATA: limits.MAX_METADATA}
_STATS_ONLY = {tags.PLANE_STAT: limits.MAX_PLANE_STATS, tags.PLANE_STAT_METADATA: limits.MAX_PLANE_STATS}
_COUNTED = {tags.PLANE_LINE: "lines", tags.PLANE_STAT: "stats of planes", tags.PLANE_EVENT_METADATA: "names of events",
            tags.PLANE_STAT_METADATA: "names of stats"}

# Events decoded at a time. The columns of a chunk stay in the processor's cache, and the
# intermediate memory does not grow with the length of a line.
_CHUNK_EVENTS = 1 << 16
# Lines that are decoded together: shorter than this, and no further apart in the file.
_SHORT_LINE_EVENTS, _MAX_GAP_BYTES = 1 << 12, 1 << 20
_PS_PER_NS = 1000
_MAX_NS = 1 << 61  # a time beyond the year 2043 is damage, and sums of two still fit an int64


class XLine(Struct):
    id: int
    name: str
    timestamp_ns: int
    begin: I64 | _U32  # of its events in the file
    end: I64 | _U32
    whole: XLine | None = None  # the line that this is a part of


class XPlane(Struct):
    """A plane without its events. ``stats`` holds the stats of the plane itself, by name."""

    name: str
    event_names: dict[int, str]
    stat_names: dict[int, str]
    stats: dict[str, int | float | str]
    lines: list[XLine]
    damaged: bool
    surplus: dict[str, int] = field(default_factory=dict)  # what there is more of than is read, and how much
    span: tuple[int, int] = (0, 0)  # of the plane in the file


class Stats(Struct):
    """One stat of a chunk's events, a row for each occurrence: ``row`` is the event, ``value_tag`` the member of the
    oneof (0: none), ``value`` its bits or the length of a string, which begins at ``begin`` in ``block``.
    """

    row: I64
    value_tag: npt.NDArray[np.uint8]
    value: U64
    begin: I64
    block: Block

    def integers(self) -> tuple[I64, I64]:
        """Rows and values of the integers."""
        whole = (self.value_tag == tags.STAT_UINT64) | (self.value_tag == tags.STAT_INT64)
        return self._of(whole, self.value.view(np.int64))

    def floats(self) -> tuple[I64, F64]:
        """Rows and values of the doubles."""
        return self._of(self.value_tag == tags.STAT_DOUBLE, self.value.view(np.float64))

    def strings(self, names: Names, by_reference: IntMap) -> tuple[I64, I64]:
        """Rows and indices into ``names`` of the strings, inline or by reference."""
        out = by_reference(self.value.view(np.int64))
        other = self.value_tag != tags.STAT_REF
        if other.any():
            out[other] = -1
            for i in np.flatnonzero(self.value_tag == tags.STAT_STR).tolist():
                begin = int(self.begin[i])
                out[i] = names[self.block.text(begin, begin + int(self.value[i]))]
        return self._of(out >= 0, out)

    def rows_after(self, keep: Bools, row_after: I64) -> Stats:
        """The same without the events that are not to be kept; ``row_after`` is the new row of each event."""
        kept = np.flatnonzero(keep[self.row])
        return Stats(row_after[self.row[kept]], self.value_tag[kept], self.value[kept], self.begin[kept], self.block)

    @staticmethod
    def joined(pieces: Sequence[Stats]) -> Stats:
        """Join stats of one block, one after the other."""
        if len(pieces) == 1:
            return pieces[0]
        row, value_tag, value, begin = (np.concatenate([getattr(piece, column) for piece in pieces])
                                        for column in ("row", "value_tag", "value", "begin"))
        return Stats(row, value_tag, value, begin, pieces[0].block)

    def _of(self, which: Bools, values: _Values) -> tuple[I64, _Values]:
        return (self.row, values) if which.all() else (self.row[which], values[which])


class Chunk(Struct):
    """Events of a line, or of several, as columns. ``name`` indexes the reader's names, ``line`` the chunk's lines."""

    name: I64
    start_ns: I64
    end_ns: I64
    stats: dict[str, Stats] = field(default_factory=dict)
    line: I64 | None = None  # of one line


class Losses(Struct):
    """Number of events that were left out, by reason."""

    malformed: int = 0
    unnamed: int = 0

    def add(self, more: Losses) -> None:
        self.malformed += more.malformed
        self.unnamed += more.unnamed


class PlaneLines(NamedTuple):
    """Lines of a plane whose events are read.

    ``names`` maps metadata ids to indices of names; events without a name are left out and counted, as are malformed
    ones. ``stats`` names those wanted. ``skip`` maps the metadata ids of unwanted events to 1; those are not decoded.
    Short lines may be decoded ``together``: alone each costs as much as thousands of events.
    """

    plane: XPlane
    lines: Sequence[XLine]
    names: IntMap
    stats: Sequence[str]
    skip: IntMap | None = None
    together: bool = False


class Decoded(Struct, frozen=True):
    """Events of a source and what was lost of them; ``lines`` are those that the chunk's column ``line`` refers to, one
    where it has none."""

    source: PlaneLines
    lines: Sequence[XLine]
    chunk: Chunk
    lost: Losses


def read_plane(data: Data, begin: int, end: int, max_events: int = _ANY) -> XPlane:
    """The plane at this place of the data. Damage ends the reading and does not raise.

    Of more lines, names, stats, or events of a line than are read the first are kept, the rest counted in ``surplus``.
    """
    fields = read_fields(data, begin, end, (
        tags.PLANE_NAME, tags.PLANE_LINE, tags.PLANE_EVENT_METADATA, tags.PLANE_STAT_METADATA,
        tags.PLANE_STAT), _AT_MOST)
    stat_names, damaged_stats = _read_table(data, *fields.pairs(tags.PLANE_STAT_METADATA, whole=True))
    event_names, damaged_events = _read_table(data, *fields.pairs(tags.PLANE_EVENT_METADATA, whole=True))
    lines, damaged = [], fields.damaged or damaged_stats or damaged_events
    for line_begin, line_end in zip(*(a.tolist() for a in fields.pairs(tags.PLANE_LINE)), strict=True):
        line, cut = _read_line(data, line_begin, line_end, max_events)
        lines.append(line)
        damaged = damaged or cut
    stats = _read_stats(data, *fields.pairs(tags.PLANE_STAT, whole=True), stat_names)
    surplus = {what: fields.surplus[this] for this, what in _COUNTED.items() if this in fields.surplus}
    return XPlane(_text(data, fields.last(tags.PLANE_NAME)), event_names, stat_names, stats, lines, damaged, surplus,
                  (begin, end))


def event_count(lines: Iterable[XLine]) -> int:
    return sum(len(line.begin) for line in lines)


def plane_stats(data: Data, begin: int, end: int) -> dict[str, int | float | str]:
    """Stats alone of the plane at this place of the data."""
    fields = read_fields(data, begin, end, (tags.PLANE_STAT_METADATA, tags.PLANE_STAT), _STATS_ONLY,
                         steps=Quota(limits.OUTLINE_FIELDS))
    names, _ = _read_table(data, *fields.pairs(tags.PLANE_STAT_METADATA, whole=True))
    return _read_stats(data, *fields.pairs(tags.PLANE_STAT, whole=True), names)


def _read_line(data: Data, begin: int, end: int, max_events: int) -> tuple[XLine, bool]:
    fields = read_fields(data, begin, end, (
        tags.LINE_ID, tags.LINE_NAME, tags.LINE_DISPLAY_NAME, tags.LINE_TIMESTAMP_NS, tags.LINE_EVENT),
        {tags.LINE_EVENT: max_events})
    name = _text(data, fields.last(tags.LINE_DISPLAY_NAME)) or _text(data, fields.last(tags.LINE_NAME))
    events = fields.pairs(tags.LINE_EVENT, whole=True)
    number, timestamp_ns = (signed(fields.values.get(key, 0)) for key in (tags.LINE_ID, tags.LINE_TIMESTAMP_NS))
    if len(data) < 1 << 32:  # half the memory
        events = events[0].astype(np.uint32), events[1].astype(np.uint32)
    return XLine(number, name, timestamp_ns, *events), fields.damaged


def _read_table(data: Data, begin: I64, end: I64) -> tuple[dict[int, str], bool]:
    """Names by id from the entries of a metadata map, and whether some were damaged."""
    if not len(begin):
        return {}, False
    block = Block(data, int(begin[0]), int(end[-1]))
    broken = np.zeros(len(begin), bool)
    key = np.zeros(len(begin), np.int64)
    value = np.zeros((2, len(begin)), np.int64)  # begin and end; an entry may have none
    for fields in block.walk(begin - block.base, end - block.base, broken):
        matching = fields.mask(tags.MAP_KEY)
        key[fields.rows[matching]] = fields.value[matching].view(np.int64)
        matching = fields.mask(tags.MAP_VALUE)
        value[0, fields.rows[matching]], value[1, fields.rows[matching]] = fields.begin[matching], fields.end[matching]
    names = np.zeros((4, len(begin)), np.int64)
    for fields in block.walk(value[0], value[1], broken):
        for row, wanted in ((0, tags.METADATA_NAME), (2, tags.METADATA_DISPLAY_NAME)):
            matching = fields.mask(wanted)
            rows = fields.rows[matching]
            names[row, rows], names[row + 1, rows] = fields.begin[matching], fields.end[matching]
    raw = block.bytes.tobytes()
    table = {}
    for k, a, b, c, d, bad in zip(key.tolist(), *names.tolist(), broken.tolist(), strict=True):
        if not bad:
            table[k] = (raw[a:b] or raw[c:d]).decode("utf-8", "replace")
    return table, bool(broken.any())


def _read_stats(data: Data, begin: I64, end: I64, stat_names: dict[int, str]) -> dict[str, int | float | str]:
    """The stats of a plane by name, without those that have no value."""
    if not len(begin):
        return {}
    block, stat_id = Block(data, int(begin[0]), int(end[-1])), np.zeros(len(begin), np.int64)
    tag_, bits, text, _ = _walk_stats(block, begin - block.base, end - block.base, stat_id)
    stats = {}
    for i in range(len(begin)):
        value: int | float | str | None = None
        if tag_[i] == tags.STAT_DOUBLE:
            value = float(bits[i].view(np.float64))
        elif tag_[i] == tags.STAT_INT64:
            value = int(bits[i].view(np.int64))
        elif tag_[i] == tags.STAT_UINT64:
            value = int(bits[i])
        elif tag_[i] == tags.STAT_STR:
            value = block.text(int(text[i]), int(text[i]) + int(bits[i]))
        elif tag_[i] == tags.STAT_REF:
            value = stat_names.get(int(bits[i]))
        if value is not None:
            stats[stat_names.get(int(stat_id[i]), "")] = value
    return stats


def read_events(data: Data, sources: Iterable[PlaneLines], threads: ThreadPoolExecutor) -> Iterator[Decoded]:
    """The events of these sources in their order, in chunks that ``threads`` decode ahead."""
    return (decoded for decoded in map_ordered(threads, chain.from_iterable(
        _decodings(data, source) for source in sources)) if decoded is not None)


def _decodings(data: Data, source: PlaneLines) -> Iterator[Callable[[], Decoded | None]]:
    skip = source.skip
    codes = {name: code for code, name in enumerate(source.stats)}
    wanted = IntMap({i: codes[name] for i, name in source.plane.stat_names.items() if name in codes})

    def decode(some: Sequence[XLine]) -> Decoded | None:
        begin, end = (np.concatenate(column, dtype=np.int64) for column in (
            [ln.begin for ln in some], [ln.end for ln in some]))
        line = np.repeat(np.arange(len(some)), [len(ln.begin) for ln in some]) if len(some) > 1 else None
        block, lost = Block(data, int(begin[0]), int(end[-1])), Losses()
        begin, end = begin - block.base, end - block.base
        if skip is not None:
            keep = np.flatnonzero(skip(block.peek_varint(tags.EVENT_METADATA_ID, begin)[0]) != 1)
            begin, end, line = begin[keep], end[keep], None if line is None else line[keep]
        if not len(begin):
            return None
        if line is not None:  # those without events are no lines of the trace
            used, line = np.unique(line, return_inverse=True)
            some = [some[i] for i in used.tolist()]
        timestamp_ns = np.array([ln.timestamp_ns for ln in some], np.int64)
        rows = _EventBytes(begin, end, timestamp_ns if line is None else timestamp_ns[line], line)
        chunk = _decode_events(block, rows, source, wanted, lost)
        return Decoded(source, some, chunk, lost)

    return (partial(decode, some) for some in _portions(source.lines, source.together))


def _portions(lines: Sequence[XLine], together: bool) -> Iterator[list[XLine]]:
    """The lines' events in portions to be decoded at once: a part of a line, or short lines that follow each other."""
    group: list[XLine] = []
    count = 0
    for line in lines:
        n = len(line.begin)
        short = together and 0 < n < _SHORT_LINE_EVENTS
        if group and not (short and count + n <= _CHUNK_EVENTS
                          and int(line.begin[0]) - int(group[-1].end[-1]) < _MAX_GAP_BYTES):
            yield group
            group, count = [], 0
        if short:
            group.append(line)
            count += n
            continue
        for first in range(0, n, _CHUNK_EVENTS):
            part = slice(first, first + _CHUNK_EVENTS)
            yield [XLine(line.id, line.name, line.timestamp_ns, line.begin[part], line.end[part], line)]
    if group:
        yield group


class _EventBytes(NamedTuple):
    """Positions of the events of a chunk in its block."""

    begin: I64
    end: I64
    timestamp_ns: I64  # of each event's line, or of all of them
    line: I64 | None  # the lines' numbers, if there are several


def _decode_events(block: Block, events: _EventBytes, source: PlaneLines, wanted: IntMap, losses: Losses) -> Chunk:
    """Decode the events of a chunk. ``wanted`` maps a stat's id to its number in the source's ``stats``."""
    begin, end, timestamp_ns, line = events
    n = len(begin)
    broken, aggregate = np.zeros(n, bool), np.zeros(n, bool)
    metadata, offset, duration = (np.zeros(n, np.int64) for _ in range(3))
    columns = {tags.EVENT_METADATA_ID: metadata, tags.EVENT_OFFSET_PS: offset, tags.EVENT_DURATION_PS: duration}
    stats = _FoundStats(block, wanted)
    groups, others = find_uniform(block, begin, end)
    for alike in groups:
        for this, values in alike.numbers():
            _put(columns[this], alike.rows, values)
        stats.add_alike(alike)
    cut = np.zeros(len(others), bool)
    for fields in block.walk(begin[others], end[others], cut):
        rows = others[fields.rows]
        for this, column in columns.items():
            matching = fields.mask(this)
            _put(column, rows[matching], fields.value[matching].view(np.int64))
        stats.add(fields, rows, fields.mask(tags.EVENT_STAT))
        # offset and occurrences are members of one oneof: the later of the two is valid
        aggregate[rows[fields.mask(tags.EVENT_OCCURRENCES)]] = True
        if aggregate.any():
            aggregate[rows[fields.mask(tags.EVENT_OFFSET_PS)]] = False
    broken[others] = cut

    name = source.names(metadata)
    for times, least in ((offset, -_MAX_NS + 1), (duration, 0), (timestamp_ns, -_MAX_NS + 1)):
        if times.min() < least or times.max() >= _MAX_NS:
            broken |= (times < least) | (times >= _MAX_NS)
    unwanted = aggregate if source.skip is None else aggregate | (source.skip(metadata) == 1)
    losses.malformed += int(broken.sum())
    keep = ~broken & ~unwanted
    losses.unnamed += int((keep & (name < 0)).sum())
    keep &= name >= 0
    start_ns = timestamp_ns + offset // _PS_PER_NS
    end_ns = timestamp_ns + (offset + duration) // _PS_PER_NS
    if not keep.all():
        name, start_ns, end_ns = name[keep], start_ns[keep], end_ns[keep]
        line = line if line is None else line[keep]
    return Chunk(name, start_ns, end_ns, stats.decode(keep, source.stats), line)


class _FoundStats:
    """Collects the wanted stats of a chunk's events by their first field, the id; decodes all of them at the end."""

    def __init__(self, block: Block, wanted: IntMap) -> None:
        self._block, self._wanted = block, wanted
        # For each column of fields: events, ids (0: not known yet), and begin and end of what follows the id.
        self._found: list[tuple[I64, I64, I64, I64]] = []
        self._alike: dict[int, list[Stats]] = {}  # by the number of the stat

    def add_alike(self, alike: UniformMessages) -> None:
        ids = np.array([stat.stat_id for stat in alike.layout.stats], np.int64)
        for stat, number in zip(alike.layout.stats, self._wanted(ids).tolist(), strict=True):
            if number >= 0:
                n = len(alike.rows)
                begin = alike.begin + stat.begin if stat.tag & 7 == LENGTH else np.zeros(n, np.int64)
                self._alike.setdefault(number, []).append(
                    Stats(alike.rows, np.full(n, stat.tag, np.uint8), alike.value(stat), begin, self._block))

    def add(self, fields: FieldColumn, rows: I64, matching: Bools | slice) -> None:
        """The stats that are the fields ``matching``; ``rows`` are the events that have the fields."""
        rows, first, last = rows[matching], fields.begin[matching], fields.end[matching]
        if not len(rows):
            return
        # -1: the id is not the first field, so the whole stat has to be read
        peeked, after = self._block.peek_varint(tags.STAT_METADATA_ID, first)
        odd = (peeked < 0) | (after > last)
        any_odd = odd.any()
        maybe = np.flatnonzero((self._wanted(peeked) >= 0) | odd if any_odd else self._wanted(peeked) >= 0)
        if any_odd:
            peeked, after = np.where(odd, 0, peeked), np.where(odd, first, after)
        if len(maybe):
            self._found.append((rows[maybe], peeked[maybe], after[maybe], last[maybe]))

    def decode(self, keep: Bools, stats: Sequence[str]) -> dict[str, Stats]:
        """The stats by name, of the events in ``keep`` only; rows count those events."""
        walked = self._walk()
        row_after = None if keep.all() else np.cumsum(keep) - 1
        out = {}
        for number, name in enumerate(stats):
            pieces = [*self._alike.get(number, ()), *([walked[number]] if number in walked else ())]
            if row_after is not None:
                pieces = [piece.rows_after(keep, row_after) for piece in pieces]
            if any(len(piece.row) for piece in pieces):
                out[name] = Stats.joined(pieces)
        return out

    def _walk(self) -> dict[int, Stats]:
        """Stats of events that were walked, by the number of the stat."""
        if not self._found:
            return {}
        rows, stat_id, begin, end = (np.concatenate(column) for column in zip(*self._found, strict=True))
        value_tag, value, text_begin, broken = _walk_stats(self._block, begin, end, stat_id)
        code = self._wanted(stat_id).astype(np.int16)
        code[broken] = -1
        out = {}
        for number in np.unique(code[code >= 0]).tolist():
            where = np.flatnonzero(code == number)
            out[number] = Stats(rows[where], value_tag[where], value[where], text_begin[where], self._block)
        return out


def _walk_stats(block: Block, begin: I64, end: I64, stat_id: I64) -> tuple[npt.NDArray[np.uint8], U64, I64, Bools]:
    """The tags, bits and text begins of the values of these stats, and which are malformed; sets the ids that are
    there."""
    n = len(begin)
    broken, tag_ = np.zeros(n, bool), np.zeros(n, np.uint8)
    bits, text = np.zeros(n, np.uint64), np.zeros(n, np.int64)
    for fields in block.walk(begin, end, broken):
        matching = fields.mask(tags.STAT_METADATA_ID)
        _put(stat_id, fields.rows[matching], fields.value[matching].view(np.int64))
        matching = fields.mask(*tags.STAT_VALUES)
        _put(tag_, fields.rows[matching], np.broadcast_to(fields.tag, len(fields.rows))[matching])
        _put(bits, fields.rows[matching], fields.value[matching])
        _put(text, fields.rows[matching], fields.begin[matching])
    return tag_, bits, text, broken


def _put(column: np.ndarray, rows: I64, values: np.ndarray) -> None:
    """Set these rows, which are in order and distinct."""
    if len(rows) == len(column):
        column[...] = values
    else:
        column[rows] = values


def _text(data: Data, span: tuple[int, int] | None) -> str:
    return data[span[0]:span[1]].decode("utf-8", "replace") if span else ""

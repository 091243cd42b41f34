"""The file a timeline lives in: columns one after the other, and what describes them as JSON, at a place that whoever
writes it tells whoever reads it.

Columns are little-endian and lie at multiples of 8 bytes, ready to be mapped.
"""

from __future__ import annotations

import json
import mmap
import zlib
from collections.abc import Iterable
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from gputop.core.codec import parse, to_document
from gputop.core.errors import GputopError
from gputop.timeline.model import IdleGap, IdleTotal, Row

_ALIGN = 8


class Extent(NamedTuple):
    """Position of a description in the file, and its CRC-32."""

    offset: int
    length: int
    check: int


class Description(Struct):
    window_ns: tuple[int, int]
    paths: tuple[str, ...]
    simulated: bool
    events: int
    quality: tuple[tuple[str, str], ...]  # id and message of each note
    rows: tuple[Row, ...]
    bounds: list[tuple[int, int]]  # of each row: its first event, and the one after its last
    streams: dict[int, list[int]]  # of the row of each GPU: those of its streams
    idle_gaps: tuple[IdleGap, ...]
    idle_totals: tuple[IdleTotal, ...]
    basis: str  # what the totals are per: step, period or window
    period_s: float  # the mean length of that
    all: list[int]  # of each row: its track of spans
    kinds: list[list[tuple[int, int]]]  # of each row: a kind's code and its track
    edges: list[int]  # where each track begins
    no_counters: str = ""  # why a capture by gputop has no rows of samples
    pending: bool = False  # the rows are there; the critical path and the idle gaps are still being looked for


class Writer:
    """Writes columns to an open, seekable file, best an unbuffered one, so that closing it writes nothing. Raises
    OSError where writing fails."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._columns: dict[str, tuple[int, str, int]] = {}
        self._room: dict[str, int] = {}  # elements that a column can be extended by
        self._at = 0

    def column(self, name: str, dtype: npt.DTypeLike, pieces: Iterable[npt.NDArray], room: int = 0) -> None:
        """Write the pieces as one column, with room for ``room`` more elements behind it. Replaces an earlier column of
        that name."""
        kind = np.dtype(dtype).newbyteorder("<")
        self._put(bytes(-self._at % _ALIGN))
        offset = self._at
        for piece in pieces:
            self._put(np.ascontiguousarray(piece, kind).data)
        self._columns[name] = (offset, kind.str, (self._at - offset) // kind.itemsize)
        self._room[name] = room
        self._put(bytes(room * kind.itemsize))

    def count(self, name: str) -> int:
        return self._columns[name][2]

    def extend(self, name: str, piece: npt.NDArray) -> None:
        """Put more elements into the room of a column. Who reads by an earlier description does not see them."""
        offset, kind, count = self._columns[name]
        assert len(piece) <= self._room[name]
        self._file.seek(offset + count * np.dtype(kind).itemsize)
        self._write(np.ascontiguousarray(piece, kind).data)
        self._file.seek(self._at)
        self._columns[name] = offset, kind, count + len(piece)
        self._room[name] -= len(piece)

    def describe(self, about: object) -> Extent:
        """Write a description of what is there by now, for one who is told its place (:func:`mapped`)."""
        text = json.dumps({**to_document(about), "columns": self._columns}, allow_nan=False).encode()
        section = Extent(self._at, len(text), zlib.crc32(text))
        self._put(text)
        self._file.flush()
        return section

    def _put(self, data: bytes | memoryview) -> None:
        self._at += self._write(data)

    def _write(self, data: bytes | memoryview) -> int:
        """Returns how many bytes that were."""
        left = memoryview(data).cast("B") if len(data) else memoryview(b"")
        size = len(left)
        while len(left):  # an unbuffered file may write less than asked
            left = left[self._file.write(left):]
        return size


def mapped(file: BinaryIO, section: Extent) -> tuple[dict[str, npt.NDArray], dict[str, Any]]:
    """The columns, mapped read-only, and the description at ``section``, to which more may be being written. Does not
    move the file's position, which whoever writes it may share. Raises GputopError for an incomplete or other file."""
    try:
        whole = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
        text = whole[section.offset:section.offset + section.length].tobytes()
        if zlib.crc32(text) != section.check:
            raise ValueError("its description is damaged")
        about = parse(text)
        columns = {}
        for name, (start, dtype, count) in about.pop("columns").items():
            end = start + count * np.dtype(dtype).itemsize
            columns[name] = whole[start:end].view(dtype)
        return columns, about
    except (ValueError, OSError) as error:
        raise damaged(str(error)) from error


def damaged(reason: str) -> GputopError:
    return GputopError(f"This is not a gputop timeline: {reason}.",
                       "Open the trace instead; gputop creates a new timeline each time.")

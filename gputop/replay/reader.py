"""Looking into a recording: which samples there are, and any one of them."""

from __future__ import annotations

import contextlib
import os
import struct
import zlib
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from gputop.core.errors import GputopError, NoDataError, os_errors_as
from gputop.core.files import open_regular
from gputop.core.samples import NodeSample
from gputop.replay import format_of_0_1_0
from gputop.replay.format import (
    HEADER,
    MAGIC,
    MAX_RECORD_BYTES,
    RECORD,
    SAMPLE,
    SEGMENT,
    SYNC,
    TIME,
    VERSION,
    DamagedRecord,
    Decoder,
)
from gputop.text.units import clock_time, size

_FIRST_CHUNK_BYTES, _CHUNK_BYTES = 1 << 12, 1 << 20  # looked through for the next segment
_MAX_NOTES = 20


def open_recording(path: str | os.PathLike[str]) -> Recording:
    """A file that ``gputop record`` has written, as a context manager.

    ``len()`` is its number of samples, ``times_s`` their Unix times, ``sample(i)`` one of them: all readings of all
    GPUs, processes and the host, each with its unit and source or the reason why it has no value. Raises GputopError
    for a file that is no recording or cannot be read, NoDataError for one without a sample.
    """
    return Recording(Path(path))


def is_recording(path: str) -> bool:
    """Return whether it is a file that begins as one of ``gputop record``. Raises GputopError where it cannot be
    read."""
    if not Path(path).is_file():
        return False
    with os_errors_as(f"cannot read {path}"), open_regular(path) as file:
        return file.read(len(MAGIC)) == MAGIC


class Recording:
    """A recording as a list of samples, each found by number or time.

    ``times_s`` is the Unix time of each sample in the order of the file; ``notes`` says what is missing: a tail that
    was cut off, damage in the middle. Raises GputopError for a file that is no recording or is of a newer version,
    NoDataError for one without a sample. Not for several threads at once.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.times_s: array[float] = array("d")
        self.notes: tuple[str, ...] = ()
        self._segments: array[int] = array("q")  # per sample: where its segment begins
        self._latest_s: array[float] = array("d")  # per sample: the latest time up to it; never falls
        self._new_decoder: Callable[[], Decoder | format_of_0_1_0.OldDecoder] = Decoder  # of the file's version
        self._decoder: Decoder | format_of_0_1_0.OldDecoder = self._new_decoder()
        self._at = -1  # the sample the decoder stands at
        self._next = 0  # where the record after that one begins
        with contextlib.ExitStack() as opened:
            with os_errors_as(f"cannot read {path}", "Give a file written by `gputop record -o FILE`."):
                self._file: BinaryIO = opened.enter_context(open_regular(path))
                self._check_header()
                self._scan()
            opened.pop_all()

    def __len__(self) -> int:
        return len(self.times_s)

    def __enter__(self) -> Recording:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._file.close()

    def index_at(self, time_s: float) -> int:
        """The last sample at or before ``time_s``, the first where there is none."""
        return max(0, bisect_right(self._latest_s, time_s) - 1)

    def sample(self, index: int) -> NodeSample:
        """Sample ``index``. Cheap for the one after the last, else up to a segment is read again.

        Raises IndexError, and GputopError where the file can no longer be read.
        """
        segment = self._segments[index]
        try:
            if self._at < 0 or index < self._at or self._segments[self._at] != segment:
                self._at, self._next = bisect_left(self._segments, segment) - 1, segment
                self._decoder = self._new_decoder()
            while self._at < index:
                kind, payload, self._next = self._read(self._next)
                self._at += self._decoder.take(kind, payload)
            return self._decoder.sample()
        except (OSError, DamagedRecord) as error:
            self._at = -1
            raise GputopError(f"cannot read {self.path} at {clock_time(self.times_s[index])}: {error}",
                              "The file changed or was damaged after gputop opened it, or gputop did not write it."
                              ) from error

    # -- records ------------------------------------------------------------------------------

    def _read(self, offset: int) -> tuple[int, bytes, int]:
        """Kind and payload of the record at ``offset``, and where the next one begins. Raises Damaged."""
        self._file.seek(offset)
        return self._read_here(offset)

    def _read_here(self, offset: int) -> tuple[int, bytes, int]:
        head = self._file.read(RECORD.size)
        if len(head) < RECORD.size:
            raise DamagedRecord("it ends inside a record" if head else "it ends")
        kind, length, crc = RECORD.unpack(head)
        if length > MAX_RECORD_BYTES:
            raise DamagedRecord(f"a record of {length} bytes")
        payload = self._file.read(length)
        if len(payload) < length:
            raise DamagedRecord("it ends inside a record")
        if zlib.crc32(payload, zlib.crc32(head[:5])) != crc:
            raise DamagedRecord("a record does not match its checksum")
        return kind, payload, offset + RECORD.size + length

    def _check_header(self) -> None:
        raw = self._file.read(HEADER.size)
        if raw[:8] != MAGIC[:len(raw)]:
            raise GputopError(f"{self.path} is not a gputop recording",
                              "Give a file written by `gputop record -o FILE`.")
        if len(raw) < HEADER.size:
            raise self._empty()
        _, version, _, crc = HEADER.unpack(raw)
        if zlib.crc32(raw[:12]) != crc:
            raise GputopError(f"the header of {self.path} is damaged", "Copy the original file again.")
        if version > VERSION:
            raise GputopError(f"{self.path} has format {version}; this gputop reads formats up to {VERSION}",
                              "Replay the file with the gputop that wrote it, or a newer one.")
        self._new_decoder = format_of_0_1_0.OldDecoder if version == 1 else Decoder

    def _empty(self) -> NoDataError:
        return NoDataError(f"{self.path} contains no samples", "The file was truncated at its start. Record again.")

    def _scan(self) -> None:
        """Find all samples. Behind damage it goes on at the next segment."""
        size = self._file.seek(0, 2)
        offset = self._file.seek(HEADER.size)
        segment, damaged = -1, 0
        notes = []
        while offset < size:
            try:
                kind, payload, end = self._read_here(offset)
                if kind == SEGMENT:
                    segment = offset
                elif kind == SAMPLE:
                    if segment < 0:
                        raise DamagedRecord("a sample is outside of any segment")
                    self._add(TIME.unpack_from(payload)[0], segment)
                offset = end
            except (DamagedRecord, struct.error) as error:
                segment = -1
                following = self._find_segment(offset + 1)
                damaged += 1
                if damaged <= _MAX_NOTES:
                    notes.append(self._note(error, (following or size) - offset, following is None))
                offset = self._file.seek(following or size)
        if damaged > _MAX_NOTES:
            notes.append(f"the recording is damaged in {damaged - _MAX_NOTES:,} more places")
        self.notes = tuple(notes)
        if not self.times_s:
            raise self._empty()

    def _add(self, time_s: float, segment: int) -> None:
        if not -1e12 < time_s < 1e12:
            raise DamagedRecord(f"a sample of the time {time_s}")
        self.times_s.append(time_s)
        self._segments.append(segment)
        self._latest_s.append(max(time_s, self._latest_s[-1]) if self._latest_s else time_s)

    def _note(self, error: Exception, lost_bytes: int, to_the_end: bool) -> str:
        where = f"after {clock_time(self.times_s[-1])}" if self.times_s else "at its beginning"
        if to_the_end:
            return f"the recording is truncated or damaged {where} ({error}); everything before that is intact"
        return f"the recording is damaged {where} ({error}); gputop skipped {size(lost_bytes)}"

    def _find_segment(self, offset: int) -> int | None:
        """Return where the next whole SEGMENT record begins."""
        self._file.seek(offset)
        kept, size = b"", _FIRST_CHUNK_BYTES  # mostly it is near
        while chunk := self._file.read(size):
            size = min(2 * size, _CHUNK_BYTES)
            data = kept + chunk
            mark = data.find(SYNC)
            while mark >= 0:
                start = offset + mark - RECORD.size
                if start >= HEADER.size:
                    try:
                        if self._read(start)[0] == SEGMENT:
                            return start
                    except DamagedRecord:
                        pass
                mark = data.find(SYNC, mark + 1)
            kept = data[-len(SYNC):]
            offset += len(data) - len(kept)
            self._file.seek(offset + len(kept))
        return None

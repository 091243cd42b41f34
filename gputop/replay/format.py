"""Format of a recording, byte by byte.

A file is a header and then records, each with its length and CRC-32, written one after the
other and never changed::

    header   magic (8 bytes), version u16, reserved u16, CRC-32 of those 12 bytes
    record   kind u8, length u32, CRC-32 u32 of kind, length and payload; payload
    SEGMENT  a fixed mark: what follows needs nothing that stands before it
    SAMPLE   time f64 (Unix s); for each 16 KiB of the sample: length u32, a piece of a zlib stream

All numbers are little-endian. A sample is a :class:`~gputop.core.samples.NodeSample` as msgpack, with the names of
its fields: those that a reader does not know are skipped, as are kinds of records. The first 16 KiB of all samples of
a segment are one stream, flushed behind each sample, the second another one, and so on: zlib looks back 32 KiB, which
a sample may exceed, and what a sample has in common with the one before is there. A reader can find the next segment
behind damage. Version 1, of gputop 0.1.0, is read by :mod:`gputop.replay.format_of_0_1_0`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import struct
import time
import zlib
from collections.abc import Callable
from pathlib import Path

import msgspec

from gputop.core.codec import convert, encode, parse
from gputop.core.errors import GputopError
from gputop.core.files import Folder, writable_folder
from gputop.core.samples import NodeSample

MAGIC = b"\x89GTOPR\r\n"
VERSION = 2
HEADER = struct.Struct("<8sHHI")
RECORD = struct.Struct("<BII")
TIME = struct.Struct("<d")
_LENGTH = struct.Struct("<I")
_BLOCK_BYTES = 16 << 10

SEGMENT, SAMPLE = 1, 3
SYNC = bytes.fromhex("f39b1d5a0ec84672b1a7e35c8846d209")  # payload of SEGMENT; random, so not met by chance
MAX_RECORD_BYTES = 16 << 20
SEGMENT_SAMPLES = 600  # how much is lost with damage, and decoded for a seek
# Unpacked, of one sample and of a segment: eight GPUs take 31 kB and 19 MB. 20 kB of a file may hold 16 MB.
_MAX_SAMPLE_BYTES, _MAX_SEGMENT_BYTES = 4 << 20, 256 << 20
_LEVEL = 6  # 1.1 to 2.1 kB a sample of eight GPUs in 0.17 ms; level 1: 1.6 times as much in 0.12 ms
_SURROGATE = re.compile(rb"\\ud[89a-f][0-9a-f]{2}")


class DamagedRecord(Exception):
    """A record does not hold what it should."""


def header() -> bytes:
    start = HEADER.pack(MAGIC, VERSION, 0, 0)[:-4]
    return start + struct.pack("<I", zlib.crc32(start))


def record(kind: int, payload: bytes) -> bytes:
    head = struct.pack("<BI", kind, len(payload))
    return head + struct.pack("<I", zlib.crc32(payload, zlib.crc32(head))) + payload


class Encoder:
    """Turns samples into records, in the order in which they are to be read."""

    def __init__(self) -> None:
        self._samples = 0
        self._encoder = msgspec.msgpack.Encoder()
        self._streams: list[zlib._Compress] = []

    def encode(self, sample: NodeSample) -> bytes:
        begin = b""
        if self._samples % SEGMENT_SAMPLES == 0:
            self._streams = []
            begin = record(SEGMENT, SYNC)
        self._samples += 1
        try:
            raw = self._encoder.encode(sample)
        except UnicodeEncodeError:  # a lone surrogate is no text for msgpack
            raw = self._encoder.encode(convert(parse(_SURROGATE.sub(rb"\\ufffd", encode(sample))), NodeSample))
        payload = TIME.pack(sample.time_s)
        for i, offset in enumerate(range(0, len(raw), _BLOCK_BYTES)):
            if i == len(self._streams):
                self._streams.append(zlib.compressobj(_LEVEL))
            packed = self._streams[i].compress(raw[offset:offset + _BLOCK_BYTES])
            packed += self._streams[i].flush(zlib.Z_SYNC_FLUSH)
            payload += _LENGTH.pack(len(packed)) + packed
        return begin + record(SAMPLE, payload)


class Decoder:
    """Reads the records of one segment in their order."""

    def __init__(self) -> None:
        self._streams: list[zlib._Decompress] = []
        self._decoder = msgspec.msgpack.Decoder(NodeSample)
        self._raw = b""
        self._bytes = 0

    def take(self, kind: int, payload: bytes) -> bool:
        """Take over a record; return whether it is a sample. Raises :class:`DamagedRecord`."""
        if kind != SAMPLE:
            return False
        blocks: list[bytes] = []
        offset = TIME.size
        try:
            while offset < len(payload) and len(blocks) * _BLOCK_BYTES < _MAX_SAMPLE_BYTES:
                (length,) = _LENGTH.unpack_from(payload, offset)
                if len(blocks) == len(self._streams):
                    self._streams.append(zlib.decompressobj())
                stream, end = self._streams[len(blocks)], offset + _LENGTH.size + length
                blocks.append(stream.decompress(payload[offset + _LENGTH.size:end], _BLOCK_BYTES))
                if stream.unconsumed_tail:
                    raise DamagedRecord("a sample is too large")
                offset = end
        except (zlib.error, struct.error) as error:
            raise DamagedRecord(f"cannot be decoded: {error}") from error
        self._raw = b"".join(blocks)
        self._bytes += len(self._raw)
        if offset < len(payload) or self._bytes > _MAX_SEGMENT_BYTES:
            raise DamagedRecord("a sample is too large")
        return True

    def sample(self) -> NodeSample:
        """The sample of the last :meth:`take` that returned True."""
        try:
            return self._decoder.decode(self._raw)
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            raise DamagedRecord(f"cannot be decoded: {error}") from error


SYNC_PERIOD_S = 30.0  # what a crash of the machine, not of gputop, may lose


class RecordingGone(GputopError):
    """The file being written was removed: what is written from now on could not be read."""


class RecordingWriter:
    """A new recording at ``path`` (mode 0600), in ``folder`` where that is held open; never an existing one.

    Each sample is handed to the operating system at once, and to the disk every 30 s. Raises
    GputopError where the file exists or cannot be made.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic, folder: Folder | None = None) -> None:
        self.path = path
        self.samples = 0
        self.size_bytes = 0
        self._encoder = Encoder()
        self._clock = clock
        self._synced_s = clock()
        self._file = -1
        try:
            with contextlib.nullcontext(folder) if folder else writable_folder(path.parent, "-o FILE") as target_folder:
                self._file = target_folder.create(path.name, flags=os.O_APPEND)
                self._named = os.fstat(self._file).st_nlink > 0  # as most file systems tell
                with contextlib.suppress(OSError):  # its name is to outlast a power failure, too
                    os.fsync(target_folder.fd)
        except OSError as error:
            if error.errno == errno.EEXIST and error.filename == path.name:  # not one of its folders
                raise GputopError(f"{path} already exists; gputop never overwrites a recording",
                                  "Choose another name with -o, or remove the file.") from error
            raise GputopError(f"cannot write {path}: {error.strerror or error}",
                              "Choose a file in a writable folder: -o FILE.") from error
        self._write(header())

    def append(self, sample: NodeSample) -> None:
        """Add one sample. Raises GputopError where it does not fit, and the file then ends with the one before;
        :class:`RecordingGone` within 30 s after the file was removed."""
        self._write(self._encoder.encode(sample))
        self.samples += 1
        if self._clock() - self._synced_s >= SYNC_PERIOD_S:
            self._sync()
            if self._named and os.fstat(self._file).st_nlink == 0:
                self._end()
                raise RecordingGone(f"{self.path} was removed while gputop was writing it", "Record again.")

    def close(self) -> None:
        """Bring everything to the disk. Raises GputopError where the disk did not take it."""
        if self._file >= 0:
            try:
                self._sync()
            finally:
                self._end()

    def _write(self, data: bytes) -> None:
        if self._file < 0:
            raise GputopError(f"{self.path} is closed")
        left = memoryview(data)
        try:
            while left:
                left = left[os.write(self._file, left):]
        except OSError as error:
            with contextlib.suppress(OSError):  # a reader passes over half a record, too
                os.ftruncate(self._file, self.size_bytes)
            self._end()
            raise self._failed(error) from error
        self.size_bytes += len(data)

    def _sync(self) -> None:
        self._synced_s = self._clock()
        try:
            os.fsync(self._file)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # a pipe or device that knows no fsync
                self._end()
                raise self._failed(error) from error

    def _failed(self, error: OSError) -> GputopError:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        fix = "Free some space or record to another disk; " if full else "Check whether the disk is healthy; "
        return GputopError(f"the recording ended: cannot write {self.path}: {error.strerror or error}",
                           f"{fix}the {self.samples} samples before the error are saved and can be replayed.")

    def _end(self) -> None:
        file, self._file = self._file, -1
        if file >= 0:
            with contextlib.suppress(OSError):
                os.close(file)

"""Format of a recording, byte by byte.

A file is a header and then records, each with its length and CRC-32, written one after the
other and never changed::

    header   magic (8 bytes), version u16, reserved u16, CRC-32 of those 12 bytes
    record   kind u8, length u32, CRC-32 u32 of kind, length and payload; payload
    SEGMENT  a fixed mark: what follows needs nothing that stands before it
    SAMPLE   time f64 (Unix s); a piece of the segment's zlib stream, flushed behind each sample

All numbers are little-endian. A segment's stream holds its samples one after the other, each a
:class:`~gputop.core.samples.NodeSample` as msgpack, with the names of its fields: those that a reader does not know are
skipped, as are kinds of records. A reader can find the next segment behind damage. Version 1, of gputop 0.1.0, is read
by :mod:`gputop.replay.format_of_0_1_0`.
"""

from __future__ import annotations

import re
import struct
import zlib

import msgspec

from gputop.core.codec import convert, encode, parse
from gputop.core.samples import NodeSample

MAGIC = b"\x89GTOPR\r\n"
VERSION = 2
HEADER = struct.Struct("<8sHHI")
RECORD = struct.Struct("<BII")
TIME = struct.Struct("<d")

SEGMENT, SAMPLE = 1, 3
SYNC = bytes.fromhex("f39b1d5a0ec84672b1a7e35c8846d209")  # payload of SEGMENT; random, so not met by chance
MAX_RECORD_BYTES = 16 << 20
SEGMENT_SAMPLES = 600  # how much is lost with damage, and decoded for a seek
# Unpacked, of one sample and of a segment: eight GPUs take 31 kB and 19 MB. 20 kB of a file may hold 16 MB.
_MAX_SAMPLE_BYTES, _MAX_SEGMENT_BYTES = 4 << 20, 256 << 20
_LEVEL = 6  # 1.0 to 3.2 kB a sample of eight GPUs in 0.17 ms; level 1: 1.6 times as much in 0.12 ms
_SURROGATE = re.compile(rb"\\ud[89a-f][0-9a-f]{2}")


class Damaged(Exception):
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
        self._stream = zlib.compressobj(_LEVEL)

    def encode(self, sample: NodeSample) -> bytes:
        """The records that add ``sample`` to the file."""
        begin = b""
        if self._samples % SEGMENT_SAMPLES == 0:
            self._stream = zlib.compressobj(_LEVEL)
            begin = record(SEGMENT, SYNC)
        self._samples += 1
        try:
            raw = self._encoder.encode(sample)
        except UnicodeEncodeError:  # a lone surrogate is no text for msgpack
            raw = self._encoder.encode(convert(parse(_SURROGATE.sub(rb"\\ufffd", encode(sample))), NodeSample))
        packed = self._stream.compress(raw) + self._stream.flush(zlib.Z_SYNC_FLUSH)
        return begin + record(SAMPLE, TIME.pack(sample.time_s) + packed)


class Decoder:
    """Reads the records of one segment in their order."""

    def __init__(self) -> None:
        self._stream = zlib.decompressobj()
        self._decoder = msgspec.msgpack.Decoder(NodeSample)
        self._raw = b""
        self._bytes = 0

    def take(self, kind: int, payload: bytes) -> bool:
        """Take over a record; return whether it is a sample. Raises :class:`Damaged`."""
        if kind != SAMPLE:
            return False
        try:
            self._raw = self._stream.decompress(payload[TIME.size:], _MAX_SAMPLE_BYTES)
        except zlib.error as error:
            raise Damaged(f"cannot be decoded: {error}") from error
        self._bytes += len(self._raw)
        if self._stream.unconsumed_tail or self._bytes > _MAX_SEGMENT_BYTES:
            raise Damaged("a sample is too large")
        return True

    def sample(self) -> NodeSample:
        """The sample of the last :meth:`take` that returned True."""
        try:
            return self._decoder.decode(self._raw)
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            raise Damaged(f"cannot be decoded: {error}") from error

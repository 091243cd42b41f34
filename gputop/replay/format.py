"""Format of a recording, byte by byte.

A file is a header and then records, each with its length and CRC-32, written one after the
other and never changed::

    header   magic (8 bytes), version u16, reserved u16, CRC-32 of those 12 bytes
    record   kind u8, length u32, CRC-32 u32 of kind, length and payload; payload
    SEGMENT  a fixed mark: what follows needs nothing that stands before it
    DICTIONARY  strings and schemas used from here on (JSON, zlib)
    SAMPLE   time f64 (Unix s), count u32, deflated u8; the numbers of one sample

All numbers are little-endian. A *schema* is one object without its numbers and texts: a GPU's
readings, say, with metric, unit, source and reason of each. It is written once and then named
by its number. What is left of a sample is a list of numbers, stored as what differs from the
list before, each in the shortest form that gives back the very same float64. So equal samples
come out, and a reader can find the next segment behind damage. Kinds and fields that a reader
does not know are skipped.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from gputop.core.codec import encode
from gputop.core.samples import (
    AdapterSample,
    CgroupSample,
    GpuInfo,
    GpuProcess,
    GpuSample,
    HostProcess,
    HostSample,
    NodeSample,
    PodContainer,
    ProcessSample,
    Reading,
    XidEvent,
)

F64 = npt.NDArray[np.float64]

MAGIC = b"\x89GTOPR\r\n"
VERSION = 1
HEADER = struct.Struct("<8sHHI")
RECORD = struct.Struct("<BII")
SAMPLE_HEAD = struct.Struct("<dIB")  # time, count of numbers, whether they are deflated

SEGMENT, DICTIONARY, SAMPLE = 1, 2, 3
SYNC = bytes.fromhex("f39b1d5a0ec84672b1a7e35c8846d209")  # payload of SEGMENT; random, so not met by chance
MAX_RECORD_BYTES = 16 << 20
MAX_NUMBERS = 1 << 20

SEGMENT_SAMPLES = 600  # how much is lost with damage, and decoded for a seek
SEGMENT_DICTIONARY_BYTES = 4 << 20  # texts that never repeat must not fill memory

FIELDS: dict[str, tuple[str, ...]] = {
    c.__name__: c.__struct_fields__
    for c in (NodeSample, GpuSample, GpuInfo, GpuProcess, HostSample, HostProcess, CgroupSample, ProcessSample,
              XidEvent, AdapterSample, PodContainer)
}
READINGS = "readings"  # the schema of a mapping of metric ids to readings

# What stands in a schema for a value that comes from the sample's numbers.
FLOAT, INT, TEXT = "f", "i", "s"
_EXACT_INT = 1 << 53  # the largest that a float64 holds exactly


class Dictionary(Struct):
    """The texts and schemas that are named by their number from here on, in the order of their numbers."""

    texts: list[str]
    shapes: list[list[Any]]


def header() -> bytes:
    start = HEADER.pack(MAGIC, VERSION, 0, 0)[:-4]
    return start + struct.pack("<I", zlib.crc32(start))


def record(kind: int, payload: bytes) -> bytes:
    head = struct.pack("<BI", kind, len(payload))
    return head + struct.pack("<I", zlib.crc32(payload, zlib.crc32(head))) + payload


class Encoder:
    """Turns samples into records, in the order in which they are to be read."""

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self._samples = 0
        self._dictionary_bytes = 0
        self._previous: F64 = np.empty(0)
        self._texts: dict[str, int] = {}
        self._schemas: dict[tuple[Any, ...], int] = {}
        self._new_texts: list[str] = []
        self._new_schemas: list[list[Any]] = []
        self._numbers: list[float] = []

    def encode(self, sample: NodeSample) -> bytes:
        """The records that add ``sample`` to the file. Raises TypeError for a value of no known type."""
        out = []
        if self._samples % SEGMENT_SAMPLES == 0 or self._dictionary_bytes > SEGMENT_DICTIONARY_BYTES:
            self._begin()
            out.append(record(SEGMENT, SYNC))
        self._numbers = []
        self._part(sample)
        if self._new_texts or self._new_schemas:
            dictionary = encode(Dictionary(self._new_texts, self._new_schemas))
            self._dictionary_bytes += len(dictionary)
            self._new_texts, self._new_schemas = [], []
            out.append(record(DICTIONARY, zlib.compress(dictionary)))
        numbers = np.array(self._numbers, np.float64)
        packed = pack(numbers, self._previous)
        deflated = zlib.compress(packed, 1)
        small = len(deflated) < len(packed)
        head = SAMPLE_HEAD.pack(sample.time_s, len(numbers), small)
        out.append(record(SAMPLE, head + (deflated if small else packed)))
        self._previous = numbers
        self._samples += 1
        return b"".join(out)

    # Each of these appends the numbers of its value and returns what stands for it in the schema.

    def _item(self, value: Any) -> Any:
        if value is None or value is True or value is False:
            return value
        if isinstance(value, float):
            self._numbers.append(float(value))
            return FLOAT
        if isinstance(value, int):
            if -_EXACT_INT <= value <= _EXACT_INT:
                self._numbers.append(value)
                return INT
            return ("int", str(value))
        if isinstance(value, str):
            number = self._texts.get(value)
            if number is None:
                number = self._texts[value] = len(self._texts)
                self._new_texts.append(value)
            self._numbers.append(number)
            return TEXT
        if isinstance(value, Reading):
            return ("r", *self._reading(value))
        if isinstance(value, (tuple, list)):
            return ("t", *[self._item(v) for v in value])
        if isinstance(value, Mapping):
            if value and all(isinstance(r, Reading) for r in value.values()):
                return self._readings(value)
            return ("m", *[(key, self._item(v)) for key, v in value.items()])
        if type(value).__name__ in FIELDS:
            return self._part(value)
        raise TypeError(f"cannot record {value!r}")

    def _part(self, value: Any) -> tuple[str, str]:
        name = type(value).__name__
        position = self._place()
        names = FIELDS[name]
        items = tuple([self._item(getattr(value, field)) for field in names])
        self._numbers[position] = self._schema_number((name, names, items))
        return ("p", name)

    def _readings(self, readings: Mapping[str, Reading]) -> tuple[str, str]:
        position = self._place()
        items = tuple([(metric, *self._reading(r)) for metric, r in readings.items()])
        self._numbers[position] = self._schema_number((READINGS, items))
        return ("p", READINGS)

    def _reading(self, reading: Reading) -> tuple[str | None, str, str, str | None, bool]:
        value = reading.value
        if value is not None:
            self._numbers.append(value)
        slot = None if value is None else INT if isinstance(value, int) else FLOAT
        return (slot, reading.unit, reading.source or "", reading.reason, reading.coarse)

    def _place(self) -> int:
        """Room for the number of a schema, which stands before the numbers it needs."""
        self._numbers.append(0)
        return len(self._numbers) - 1

    def _schema_number(self, schema: tuple[Any, ...]) -> int:
        number = self._schemas.get(schema)
        if number is None:
            number = self._schemas[schema] = len(self._schemas)
            self._new_schemas.append(list(schema))
        return number


# Numbers: two bits each say how it is stored, then come all float32, all int32, all float64.
_SAME, _SINGLE, _MILLI, _DOUBLE = 0, 1, 2, 3
_SHIFTS = np.array([0, 2, 4, 6], np.uint8)


def pack(numbers: F64, previous: F64) -> bytes:
    """``numbers`` as what differs from ``previous``; bit for bit what :func:`unpack` gives back.

    A value goes as float32 or as thousandths in an int32 (a power in milliwatts) where
    that is exact, else as float64.
    """
    bits = numbers.view(np.uint64)
    with np.errstate(over="ignore", invalid="ignore"):
        single = numbers.astype(np.float32)
        thousandths = np.rint(numbers * 1000)
        milli = np.where(np.abs(thousandths) < 2**31, thousandths, 0).astype(np.int32)
        how = np.full(len(numbers), _DOUBLE, np.uint8)
        how[(milli / 1000).view(np.uint64) == bits] = _MILLI
        how[single.astype(np.float64).view(np.uint64) == bits] = _SINGLE
    common = min(len(numbers), len(previous))
    how[:common][bits[:common] == previous[:common].view(np.uint64)] = _SAME
    padded = np.zeros(-(-len(how) // 4) * 4, np.uint8)
    padded[: len(how)] = how
    tags = np.bitwise_or.reduce(padded.reshape(-1, 4) << _SHIFTS, axis=1)
    return b"".join((tags.astype(np.uint8).tobytes(), single[how == _SINGLE].astype("<f4").tobytes(),
                     milli[how == _MILLI].astype("<i4").tobytes(), numbers[how == _DOUBLE].astype("<f8").tobytes()))


def unpack(data: bytes, count: int, previous: F64) -> F64:
    """The inverse of :func:`pack`. Raises ValueError where ``data`` does not hold exactly that many."""
    if count > MAX_NUMBERS:
        raise ValueError(f"a sample of {count} numbers")
    tags = np.frombuffer(data, np.uint8, -(-count // 4))
    how = ((tags[:, None] >> _SHIFTS) & 3).ravel()[:count]
    offset = len(tags)
    numbers = np.zeros(count, np.float64)
    common = min(count, len(previous))
    if (how[common:] == _SAME).any():
        raise ValueError("a number refers to one that is not installed there")
    numbers[:common] = previous[:common]
    for tag, kind in ((_SINGLE, "<f4"), (_MILLI, "<i4"), (_DOUBLE, "<f8")):
        here = how == tag
        some = np.frombuffer(data, kind, int(here.sum()), offset)
        offset += some.nbytes
        numbers[here] = some / 1000 if tag == _MILLI else some
    if offset != len(data):
        raise ValueError(f"{len(data) - offset} bytes too many in a sample")
    return numbers

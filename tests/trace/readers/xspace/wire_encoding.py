"""Protobuf's wire format, written."""

from __future__ import annotations

from gputop.trace.readers.xspace.wire import FIXED64, VARINT, tag


def varint(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def encoded(number: int, kind: int, value: int | bytes) -> bytes:
    head = varint(tag(number, kind))
    if isinstance(value, bytes):
        return head + varint(len(value)) + value
    if kind == VARINT:
        return head + varint(value)
    return head + value.to_bytes(8 if kind == FIXED64 else 4, "little")

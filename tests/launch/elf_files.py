"""ELF files with chosen symbols."""

from __future__ import annotations

import struct


def elf_file(sections: list[tuple[int, int, int, int]], body: bytes = b"", *, loads: int = 1, at: int = 64,
          kind: int = 3) -> bytes:
    """An ELF file: ``sections`` are (type, offset, size, link), ``body`` follows the headers."""
    header = struct.pack("<16sHHIQQQIHHHHHH", b"\x7fELF\x02\x01", kind, 62, 1, 0, at, 64 + 56 * loads, 0, 64, 56,
                         loads, 64, len(sections), 0)
    segments = struct.pack("<IIQQQQQQ", 1, 5, 0, 0, 0, 0, 0, 0) * loads
    return header + segments + b"".join(
        struct.pack("<IIQQQQIIQQ", 0, type_, 0, 0, offset, size, link, 0, 0, 0)
        for type_, offset, size, link in sections) + body


def with_symbols(symbols: bytes, names: bytes, tables: int = 1) -> bytes:
    begin = 64 + 56 + 64 * (tables + 1)
    return elf_file([(3, begin, len(names), 0)] + [(2, begin + len(names), len(symbols), 0)] * tables, names + symbols)


def symbol(place: int, value: int) -> bytes:
    return struct.pack("<IBBHQQ", place, 0, 0, 1, value, 0)

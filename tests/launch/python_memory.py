"""The memory of an interpreter, as remote execution reads it."""

from __future__ import annotations

import ctypes
import struct

FIRST = {14: 89, 15: 105}
RUNTIME, NEWER, MAIN, THREAD = 0, 2048, 3072, 4096  # where they are in the made-up memory
SUPPORT, PENDING, PATH, PATH_BYTES, BREAKER, ENABLED = 600, 8, 12, 64, 24, 320
BREAKER_BEFORE = 0x0000_0123_4567_8911


class PythonMemory:
    """The parts of a CPython's memory that the protocol names, two interpreters in it."""

    def __init__(self, version: int = 0x030E03F0, *, cookie: bytes = b"xdebugpy", enabled: int = 1) -> None:
        self.block = ctypes.create_string_buffer(8192)
        self.at = ctypes.addressof(self.block)
        offsets = [0] * 128
        offsets[1], offsets[5] = version, 1500
        offsets[7], offsets[8], offsets[10] = 16, 24, 40
        first = FIRST.get(version >> 16 & 0xFF, 89)
        offsets[first:first + 6] = [BREAKER, SUPPORT, ENABLED, PENDING, PATH, PATH_BYTES]
        struct.pack_into("<128Q", self.block, RUNTIME, *offsets)
        self.block[RUNTIME:RUNTIME + 8] = cookie
        self.put("<Q", RUNTIME + 1500, self.at + NEWER)
        for interpreter, number, following in ((NEWER, 1, self.at + MAIN), (MAIN, 0, 0)):
            self.put("<q", interpreter + 16, number)
            self.put("<Q", interpreter + 24, following)
            self.put("<i", interpreter + ENABLED, enabled)
        self.put("<Q", MAIN + 40, self.at + THREAD)
        self.put("<Q", THREAD + BREAKER, BREAKER_BEFORE)

    def put(self, form: str, offset: int, value: int) -> None:
        struct.pack_into(form, self.block, offset, value)

    @property
    def pending(self) -> int:
        return int(struct.unpack_from("<i", self.block, THREAD + SUPPORT + PENDING)[0])

    @property
    def path(self) -> bytes:
        return ctypes.string_at(self.at + THREAD + SUPPORT + PATH)

    @property
    def breaker(self) -> int:
        return int(struct.unpack_from("<Q", self.block, THREAD + BREAKER)[0])

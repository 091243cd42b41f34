"""The bytes of a trace file, decompressed: its beginning, in chunks or all, within limits."""

from __future__ import annotations

import codecs
import mmap
import os
import re
import time
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from gputop.core import own_memory as memory
from gputop.core.errors import GputopError
from gputop.core.files import open_regular
from gputop.text.units import counted

Data = bytes | bytearray | mmap.mmap
GZIP = b"\x1f\x8b"
# UTF-16 by its mark, or by a bracket without one.
_UTF16 = re.compile(rb"(\xff\xfe|\xfe\xff)|(\0[\[{]\0)|[\[{]\0[^\0]\0")
_CHUNK_BYTES = 1 << 18
_PREFIX_BYTES = 1 << 16  # of a file, by which its format is known
_MEMORY_SHARE = 0.5  # share of the free memory for one trace
_CHECK_PERIOD_S = 0.05
_RESERVE = 0.2  # share of the limit
# gzip makes traces 8 to 40 times smaller, and zeros a thousand times. A file that unpacks to more than _SMALL_BYTES
# and to more than _MAX_RATIO times its size is no trace; nor is one of which so little lies on the disk.
_MAX_RATIO = 200
_SMALL_BYTES = 1 << 25


def memory_limit() -> float:
    """Bytes of memory that reading one trace may take: half of what is free."""
    return memory.free_bytes() * _MEMORY_SHARE


class MemoryWatch:
    """Limits the memory that decoding traces takes, and keeps a reserve free for other processes."""

    def __init__(self, limit_bytes: float) -> None:
        self.limit_bytes = limit_bytes
        self._begin_bytes = (memory.resident_bytes("self") or 0)
        self._next_s = 0.0

    def check(self, path: str) -> None:
        """Raises GputopError above the limit. Measures a few times a second only, in a tenth of a millisecond."""
        if self.limit_bytes == float("inf") or time.monotonic() < self._next_s:
            return
        self._next_s = time.monotonic() + _CHECK_PERIOD_S
        if (memory.resident_bytes("self") or 0) - self._begin_bytes > self.limit_bytes:
            raise too_big(path, self.limit_bytes)
        if memory.free_bytes() < self.limit_bytes * _RESERVE:
            raise GputopError(f"memory ran low while gputop read {path}: less than "
                              f"{self.limit_bytes * _RESERVE / 1e9:.1f} GB is left.",
                              "Analyze the trace on a machine with more memory, or capture for a shorter time.")


@contextmanager
def open_trace(path: Path) -> Iterator[BinaryIO]:
    """A file that may be a trace, for reading; raises GputopError where it cannot be read, or is a sparse file."""
    try:
        with open_regular(path) as file:
            if _is_sparse(file.fileno()):
                raise GputopError(f"{path} is a sparse file: most of it was never written.",
                                  "The capture or the copy failed. Repeat it.")
            yield file
    except OSError as error:
        raise unreadable(path, error) from error


def _is_sparse(descriptor: int) -> bool:
    state = os.fstat(descriptor)
    if state.st_size <= _SMALL_BYTES or state.st_size <= _MAX_RATIO * 512 * state.st_blocks:
        return False
    try:  # some file systems do not count blocks
        hole = os.lseek(descriptor, 0, os.SEEK_HOLE)
        os.lseek(descriptor, 0, os.SEEK_SET)
    except OSError:
        return False
    return hole < state.st_size


def read_prefix(path: Path) -> bytes:
    """The first bytes of a file's content, decompressed, and of text in UTF-8."""
    with open_trace(path) as file:
        begin = file.read(_PREFIX_BYTES)
    if not begin.startswith(GZIP):
        return next(as_utf8([begin]))
    damaged: set[str] = set()
    out = next(_decompressed(begin, iter(()), path, damaged), b"")
    if not out and damaged:
        raise GputopError(f"{path} is damaged: its data cannot be decompressed.", "Copy it again.")
    return next(as_utf8([out[:_PREFIX_BYTES]]))


def size_bytes(path: Path) -> int:
    """Raises GputopError where the file is gone."""
    try:
        return path.stat().st_size
    except OSError as error:
        raise unreadable(path, error) from error


def digest(path: Path) -> bytes:
    """A hash of the file's bytes as they are. Raises GputopError for files that cannot be read."""
    from hashlib import blake2b  # loads OpenSSL, which most traces do without

    hasher = blake2b(digest_size=16)
    with open_trace(path) as file:
        for piece in iter(lambda: file.read(_CHUNK_BYTES), b""):
            hasher.update(piece)
    return hasher.digest()


def read_chunks(path: Path, damaged: set[str]) -> Iterator[bytes]:
    """A file's content, decompressed, about 256 kB at a time.

    A gzip stream that is cut off or damaged ends early and adds the path to ``damaged``.
    Raises GputopError for files that cannot be read and for decompression bombs.
    """
    with open_trace(path) as file:
        raw = iter(lambda: file.read(_CHUNK_BYTES), b"")
        first = next(raw, b"")
        if first.startswith(GZIP):
            yield from _decompressed(first, raw, path, damaged)
        else:
            yield first
            yield from raw


def as_utf8(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Text in UTF-8, also of a file in UTF-16, as Windows' shells write what they redirect."""
    decoder = None
    for number, piece in enumerate(pieces):
        if not number and (match := _UTF16.match(piece)) is not None:
            name = "utf-16" if match[1] else "utf-16-be" if match[2] else "utf-16-le"
            decoder = codecs.getincrementaldecoder(name)("replace")
        yield piece if decoder is None else decoder.decode(piece).encode("utf-8", "replace")


def read_all(path: Path, damaged: set[str], limit_bytes: float) -> Data:
    """A file's whole content, decompressed. Raises as :func:`read_chunks`, and GputopError above ``limit_bytes``."""
    with open_trace(path) as file:
        if file.read(len(GZIP)) != GZIP:
            size = os.fstat(file.fileno()).st_size
            if size > limit_bytes:
                raise too_big(path, limit_bytes)
            data, count = mmap.mmap(-1, max(size, 1), mmap.MAP_PRIVATE), 0  # can be given back in parts
            with memoryview(data) as memory:  # a file that grows meanwhile is cut there
                while more := os.preadv(file.fileno(), [memory[count:size]], count):
                    count += more
            return data if count == len(data) else data[:count]
    out = bytearray()
    for piece in read_chunks(path, damaged):
        out += piece
        if len(out) > limit_bytes:
            raise too_big(path, limit_bytes)
    return out


def too_big(path: Path | str, limit_bytes: float) -> GputopError:
    return GputopError(f"Reading {path} needs more than {limit_bytes / 1e9:.1f} GB of memory, half of the free memory.",
                       "Analyze the trace on a machine with more memory, or capture for a shorter time.")


def _decompressed(piece: bytes, more: Iterator[bytes], path: Path, damaged: set[str]) -> Iterator[bytes]:
    """The content of all members of a gzip stream, up to the first damage."""
    stream = zlib.decompressobj(wbits=31)
    read = written = 0
    while piece:
        read += len(piece)
        while piece:
            if stream.eof:
                if not piece.startswith(GZIP):  # padding after the last member
                    return
                stream = zlib.decompressobj(wbits=31)
            before = stream.copy()
            try:
                out = stream.decompress(piece, _CHUNK_BYTES)
            except zlib.error:
                damaged.add(str(path))
                yield _before_damage(before, piece)
                return
            written += len(out)
            if written > _SMALL_BYTES and written > _MAX_RATIO * read:
                raise GputopError(f"{path} decompresses to more than {_MAX_RATIO} times its size, which is not "
                                  "plausible for a trace.",
                                  "If the file is a trace, decompress it with gunzip and use the result.")
            yield out
            piece = stream.unconsumed_tail or stream.unused_data
        piece = next(more, b"")
    if not stream.eof:
        damaged.add(str(path))


def _before_damage(stream: zlib._Decompress, piece: bytes) -> bytes:
    """The content of a piece up to the damage in it, which decompressing the piece as a whole would lose."""
    out = b""
    try:
        for begin in range(0, len(piece), 64):
            out += stream.decompress(piece[begin:begin + 64])
            if len(out) >= _CHUNK_BYTES:
                break
    except zlib.error:
        pass
    return out


def unreadable(path: Path, error: OSError) -> GputopError:
    return GputopError(f"cannot read {path}: {error.strerror or error}.", "Check the path and its permissions.")


def tpu_error(path: str, tpus: int) -> GputopError:
    """Error for a trace of so many TPUs: without what ran on them its host would seem to be all of it."""
    return GputopError(f"{path} is a trace of {counted(tpus, 'TPU')}, which gputop does not read.",
                       "Open the trace with XProf: pip install xprof; xprof --logdir FOLDER.")

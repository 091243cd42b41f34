"""The addresses of interpreter functions in a running process, from ELF symbols and /proc/PID/maps.

The process names the file, and its user may have put anything in its place: a pipe, a device, a damaged file of any
size. So it must be a regular file, of which the tables are read that are needed, up to a size; whatever a number in it
says, it leads nowhere outside the file, and nothing takes more than a few passes over a table.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Collection
from pathlib import Path
from typing import BinaryIO

from gputop.core.errors import GputopError
from gputop.core.files import folder_of_process, open_regular
from gputop.core.proc import Mapping, mappings, read_maps

_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")  # Elf64_Ehdr
_SECTION = struct.Struct("<IIQQQQIIQQ")  # Elf64_Shdr
_SEGMENT = struct.Struct("<IIQQQQQQ")  # Elf64_Phdr
_SYMBOL = struct.Struct("<IBBHQQ")  # Elf64_Sym
_DYNSYM, _SYMTAB, _PT_LOAD, _ET_DYN = 11, 2, 1, 3
_MAX_FILE_BYTES = 2 << 30  # an interpreter with all of a program in it
_MAX_SYMBOLS_BYTES, _MAX_NAMES_BYTES = 32 << 20, 128 << 20  # 1.4 million symbols; CPython has some 20,000
_MAX_SEGMENTS = 64  # that are loaded; usual are 4
_MAX_PLACES = 1000  # of one name in a table of names, where it stands once, or as the end of others
_END_OF_ADDRESSES = 1 << 62
_IN_PAGE = mmap.PAGESIZE - 1  # maps has whole pages: of 64 KiB with some kernels for aarch64


def functions_of(file: BinaryIO, names: Collection[str]) -> tuple[dict[str, int], list[tuple[int, int]], bool]:
    """Read from a 64-bit little-endian ELF file the addresses of ``names`` it defines, its loaded segments as (file
    offset, address), and whether it is loaded anywhere (a library or PIE). Raises OSError, ValueError."""
    size = file.seek(0, os.SEEK_END)

    def table(offset: int, length: int, max_bytes: int = _MAX_FILE_BYTES) -> bytes:
        if length > max_bytes or offset + length > size:
            raise ValueError("a damaged ELF file: its contents do not match its headers")
        file.seek(offset)
        data = file.read(length)
        if len(data) < length:
            raise ValueError("a damaged ELF file: it was truncated")
        return data

    header = _HEADER.unpack(table(0, _HEADER.size))
    if header[0][:6] != b"\x7fELF\x02\x01":
        raise ValueError("not a 64-bit little-endian ELF file")
    if (header[10] and header[9] != _SEGMENT.size) or (header[12] and header[11] != _SECTION.size):
        raise ValueError("a damaged ELF file: its headers have an unexpected size")
    loaded = [(s[2], s[3]) for s in _SEGMENT.iter_unpack(table(header[5], header[10] * _SEGMENT.size))
              if s[0] == _PT_LOAD]
    if len(loaded) > _MAX_SEGMENTS:
        raise ValueError(f"a damaged ELF file: {len(loaded)} loaded segments")
    sections = list(_SECTION.iter_unpack(table(header[6], header[12] * _SECTION.size)))
    addresses: dict[str, int] = {}
    for kind in (_DYNSYM, _SYMTAB):  # a file has at most one of each (gabi, "Special Sections")
        section = next((s for s in sections if s[1] == kind), None)
        if section is None:
            continue
        if section[6] >= len(sections):
            raise ValueError("a damaged ELF file: some symbols have no names")
        text = sections[section[6]]
        wanted = _places(table(text[4], text[5], _MAX_NAMES_BYTES), names)
        symbols = table(section[4], section[5] - section[5] % _SYMBOL.size, _MAX_SYMBOLS_BYTES)
        for name_offset, _, _, defined_in, value, _ in _SYMBOL.iter_unpack(symbols):
            if name_offset in wanted and defined_in and value:
                addresses[wanted[name_offset]] = value
    return addresses, loaded, header[1] == _ET_DYN


def _places(text: bytes, names: Collection[str]) -> dict[int, str]:
    """Offsets of ``names`` in a table of names."""
    places: dict[int, str] = {}
    for name in names:
        whole, begin = name.encode() + b"\0", -1
        for _ in range(_MAX_PLACES):
            begin = text.find(whole, begin + 1)
            if begin < 0:
                break
            places[begin] = name
    return places


def addresses_in(pid: int, names: Collection[str]) -> dict[str, int]:
    """Addresses in process ``pid`` of the functions ``names`` of CPython, in libpython or the executable itself. Raises
    GputopError where some are missing: it is no Python, or one without these symbols."""
    try:
        mapped = list(mappings(read_maps(pid)))
        executable = str(Path(f"/proc/{pid}/exe").readlink())
    except OSError:
        raise GputopError(f"process {pid} has ended", "Nothing was done.") from None
    library = next((m.path for m in mapped if m.path.rpartition("/")[2].startswith("libpython3") and ".so" in m.path),
                   None)
    for path in (library, executable):
        if path is None:
            continue
        try:
            with _opened(pid, path, path == library) as file:
                symbols, segments, anywhere = functions_of(file, names)
        except (OSError, ValueError) as error:
            raise GputopError(f"cannot read {path} of process {pid}: {error}",
                              "An update may have replaced it since the process started.") from None
        if len(symbols) < len(names):
            continue
        shift = _shift(mapped, path, segments) if anywhere else 0
        if shift is None:
            continue
        addresses = {name: shift + value for name, value in symbols.items()}
        if all(0 < address < _END_OF_ADDRESSES for address in addresses.values()):
            return addresses
    raise GputopError(f"process {pid} is not Python, or its Python has no symbol table",
                      "Name the Python process, not the shell or launcher that started it.")


def _opened(pid: int, path: str, is_library: bool) -> BinaryIO:
    """The file that a process has mapped. Raises OSError."""
    if not is_library:
        return open_regular(f"/proc/{pid}/exe", _MAX_FILE_BYTES)  # leads to the very file, whatever has its name now
    with folder_of_process(pid, Path(path).parent) as folder:
        return open_regular(Path(path).name, _MAX_FILE_BYTES, follow_links=False, folder_fd=folder.fd)


def _shift(mapped: list[Mapping], path: str, segments: list[tuple[int, int]]) -> int | None:
    """Distance by which a file's addresses are moved in the process; None where no mapping shows it."""
    by_page = {offset & ~_IN_PAGE: address & ~_IN_PAGE for offset, address in reversed(segments)}
    return next((m.start - by_page[m.offset] for m in mapped if m.path == path and m.offset in by_page), None)

"""The addresses of interpreter functions in a running process, from ELF symbols and /proc/PID/maps."""

from __future__ import annotations

import re
import struct
from collections.abc import Collection
from pathlib import Path

from gputop.core.errors import GputopError

_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")  # Elf64_Ehdr
_SECTION = struct.Struct("<IIQQQQIIQQ")  # Elf64_Shdr
_SEGMENT = struct.Struct("<IIQQQQQQ")  # Elf64_Phdr
_SYMBOL = struct.Struct("<IBBHQQ")  # Elf64_Sym
_DYNSYM, _SYMTAB, _PT_LOAD, _ET_DYN = 11, 2, 1, 3
_MAPPING = re.compile(r"([0-9a-f]+)-[0-9a-f]+ \S+ ([0-9a-f]+) \S+ \d+ +(/.*)")
_LIBPYTHON = re.compile(r"/libpython3[^/]*\.so[^/]*")


def functions_of(data: bytes, names: Collection[str]) -> tuple[dict[str, int], list[tuple[int, int]], bool]:
    """Of a 64-bit little-endian ELF file: the addresses of ``names`` it defines, its loaded segments as
    (file offset, address), and whether it is loaded anywhere (a library or PIE). Raises ValueError."""
    try:
        header = _HEADER.unpack_from(data)
        if header[0][:6] != b"\x7fELF\x02\x01":
            raise ValueError("not a 64-bit little-endian ELF file")
        segments = [_SEGMENT.unpack_from(data, header[5] + i * header[9]) for i in range(header[10])]
        sections = [_SECTION.unpack_from(data, header[6] + i * header[11]) for i in range(header[12])]
        wanted = {name.encode(): name for name in names}
        found: dict[str, int] = {}
        for section in sections:
            if section[1] not in (_DYNSYM, _SYMTAB):
                continue
            text = sections[section[6]][4]
            for name, _, _, defined_in, value, _ in _SYMBOL.iter_unpack(data[section[4]:section[4] + section[5]]):
                if defined_in and value:
                    label = data[text + name:data.index(b"\0", text + name)]
                    if label in wanted:
                        found[wanted[label]] = value
    except (struct.error, IndexError) as error:
        raise ValueError(f"a damaged ELF file: {error}") from None
    return found, [(s[2], s[3]) for s in segments if s[0] == _PT_LOAD], header[1] == _ET_DYN


def addresses_in(pid: int, names: Collection[str]) -> dict[str, int]:
    """Where process ``pid`` has the functions ``names`` of CPython, in libpython or the executable itself.

    Raises GputopError where some are missing: it is no Python, or one without these symbols.
    """
    try:
        maps = Path(f"/proc/{pid}/maps").read_text(errors="replace")
        executable = str(Path(f"/proc/{pid}/exe").readlink())
    except OSError:
        raise GputopError(f"process {pid} has ended", "Nothing was done.") from None
    mappings = [(int(m[1], 16), int(m[2], 16), m[3]) for m in _MAPPING.finditer(maps)]
    library = next((path for _, _, path in mappings if _LIBPYTHON.search(path)), None)
    for path, file in ((library, f"/proc/{pid}/root{library}"), (executable, f"/proc/{pid}/exe")):
        if path is None:
            continue
        try:
            found, segments, anywhere = functions_of(Path(file).read_bytes(), names)
        except (OSError, ValueError) as error:
            raise GputopError(f"{path} of process {pid} cannot be read: {error}",
                              "An update may have replaced it since the process started.") from None
        if len(found) < len(names):
            continue
        if not anywhere:
            return found
        for start, offset, mapped in mappings:
            for segment_offset, address in segments:
                if mapped == path and offset == segment_offset & ~0xFFF:
                    return {name: start - (address & ~0xFFF) + value for name, value in found.items()}
    raise GputopError(f"process {pid} is not Python, or its Python does not show its functions",
                      "Name the Python process itself, not the shell or launcher that started it.")

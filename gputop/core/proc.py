"""Reading /proc/PID of processes that may belong to anybody: a bounded number of bytes, parsed in linear time.

A process decides how long its maps, environment and command line are (prctl(2), PR_SET_MM): hundreds of megabytes cost
it nothing.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

COMMAND_BYTES = 1 << 16  # a command line is cut there
ENVIRON_BYTES = 1 << 20
MAPS_BYTES = 64 << 20  # a large job maps some ten thousand regions of a hundred bytes
_STATUS_BYTES = 1 << 20  # a process may be in 65,536 groups
_PART_BYTES = 1 << 16


def read(path: str, limit: int = 4096) -> bytes:
    """The file's first ``limit`` bytes. Raises OSError."""
    fd = os.open(path, os.O_RDONLY)
    try:
        parts = []
        while limit > 0 and (part := os.read(fd, min(limit, _PART_BYTES))):
            parts.append(part)
            limit -= len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)
    finally:
        os.close(fd)


def read_maps(pid: int | str, proc: Path = Path("/proc")) -> bytes:
    """Its /proc/PID/maps up to a bound. Raises OSError."""
    return read(f"{proc}/{pid}/maps", MAPS_BYTES)


def status_fields(pid: int | str, proc: Path = Path("/proc")) -> dict[bytes, bytes]:
    """Names and values of its /proc/PID/status. Raises OSError."""
    return dict(re.findall(rb"^(\w+):[ \t]*(.*)$", read(f"{proc}/{pid}/status", _STATUS_BYTES), re.MULTILINE))


class Mapping(NamedTuple):
    """A line of /proc/PID/maps (proc_pid_maps(5))."""

    start: int
    end: int
    permissions: str  # such as "r-xp"
    offset: int  # in the file
    path: str  # "" without one


def mappings(maps: bytes) -> Iterator[Mapping]:
    """The mappings of a process; lines that are none, such as the last one where the text was cut, are left out."""
    for line in maps.split(b"\n"):
        fields = line.split(None, 5)
        if len(fields) < 5:
            continue
        first, _, last = fields[0].partition(b"-")
        try:
            start, end, offset = int(first, 16), int(last, 16), int(fields[2], 16)
        except ValueError:
            continue
        path = os.fsdecode(fields[5]) if len(fields) > 5 else ""
        yield Mapping(start, end, fields[1].decode("ascii", "replace"), offset, path)

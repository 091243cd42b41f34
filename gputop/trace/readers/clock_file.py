"""The file ``gputop.clocks.json`` of a run folder: what the capture measured of the hosts' clocks.

It lies beside the traces; other tools ignore it. For each trace file, in nanoseconds: how far the host's
clock is ahead of the capturing machine's, the error of that, and when the recording began by the capturing
machine's clock, for servers that do not write that into the trace (docs/contributing/trace-notes.md, "Clocks").
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import asdict

from gputop.core.codec import parse
from gputop.core.files import read_regular, replacing

FILE = "gputop.clocks.json"
_SCHEMA = "gputop.clocks/1"
_MAX_BYTES = 16 << 20  # 150 bytes a host
_LIMIT_NS = 1 << 61  # as for times in traces: sums of two must fit an int64


class HostClock(Struct, frozen=True):
    """``offset_ns`` is the host's clock less ours, ``error_ns`` the error of that; ``began_ns`` is Unix time,
    None where the trace contains it."""

    offset_ns: int = 0
    error_ns: int = 0
    began_ns: int | None = None


def write_clocks(folder: Path, clocks: Mapping[str, HostClock]) -> None:
    """Write the clocks, by name of the trace file; raises OSError."""
    document = {"schema": _SCHEMA, "files": {name: asdict(clock) for name, clock in clocks.items()}}
    with replacing(folder / FILE) as file:
        file.write((json.dumps(document, indent=1) + "\n").encode())


def read_clocks(folder: Path) -> dict[str, HostClock]:
    """The clocks by name of the trace file; empty where there is no such file, or not a valid one."""
    try:
        document = parse(read_regular(folder / FILE, _MAX_BYTES))
        if document["schema"] != _SCHEMA:
            return {}
        return {str(name): _clock(about) for name, about in document["files"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def clocks_of(files: Sequence[Path]) -> dict[str, HostClock]:
    """The clocks of several trace files, by path; of one nothing is to be aligned."""
    folders = {folder: read_clocks(folder) for folder in {file.parent for file in files}} if len(files) > 1 else {}
    return {str(file): clock for file in files
            if (clock := folders.get(file.parent, {}).get(file.name.removesuffix(".gz")))}


def _clock(about: Any) -> HostClock:
    offset, error, began = about["offset_ns"], about["error_ns"], about["began_ns"]
    if not all(type(n) is int and abs(n) < _LIMIT_NS for n in (offset, error, 0 if began is None else began)):
        raise ValueError("not a number of nanoseconds")
    return HostClock(offset, abs(error), began)

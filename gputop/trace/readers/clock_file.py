"""The file ``gputop.clocks.json`` of a run folder: what the capture measured of the hosts' clocks.

It lies beside the traces; other tools ignore it. For each trace file, in nanoseconds: how far the host's
clock is ahead of the capturing machine's, the error of that, and when the recording began by the capturing
machine's clock, for servers that do not write that into the trace (docs/contributing/trace-notes.md, "Clocks").
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

from msgspec import Meta, Struct, field

from gputop.core.codec import convert, encode, parse
from gputop.core.files import read_regular, replacing

FILE = "gputop.clocks.json"
_MAX_BYTES = 16 << 20  # 150 bytes a host
_LIMIT_NS = 1 << 61  # as for times in traces: sums of two must fit an int64
_Ns = Annotated[int, Meta(gt=-_LIMIT_NS, lt=_LIMIT_NS)]


class HostClock(Struct, frozen=True):
    """``offset_ns`` is the host's clock less ours, ``error_ns`` the error of that; ``began_ns`` is Unix time,
    None where the trace contains it."""

    offset_ns: _Ns = 0
    error_ns: Annotated[int, Meta(ge=0, lt=_LIMIT_NS)] = 0
    began_ns: _Ns | None = None


class _ClocksFile(Struct, frozen=True, tag_field="schema", tag="gputop.clocks/1"):
    files: Mapping[str, HostClock] = field(default_factory=dict)


def write_clocks(folder: Path, clocks: Mapping[str, HostClock]) -> None:
    """Write the clocks, by name of the trace file; raises OSError."""
    with replacing(folder / FILE) as file:
        file.write(encode(_ClocksFile(clocks)) + b"\n")


def read_clocks(folder: Path) -> Mapping[str, HostClock]:
    """The clocks by name of the trace file; empty where there is no such file, or not a valid one."""
    with contextlib.suppress(OSError, ValueError):
        return convert(parse(read_regular(folder / FILE, _MAX_BYTES)), _ClocksFile).files
    return {}


def clocks_of(files: Sequence[Path]) -> dict[str, HostClock]:
    """The clocks of several trace files, by path; of one nothing is to be aligned."""
    folders = {folder: read_clocks(folder) for folder in {file.parent for file in files}} if len(files) > 1 else {}
    return {str(file): clock for file in files
            if (clock := folders.get(file.parent, {}).get(file.name.removesuffix(".gz")))}

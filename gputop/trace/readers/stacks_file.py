"""The file ``gputop.stacks.json`` of a run folder: the Python stacks that were sampled while its traces were captured.

It lies beside ``gputop.capture.json``; other tools ignore it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from msgspec import Struct, field, structs

from gputop.core.codec import convert, encode, parse
from gputop.core.files import read_regular, replacing
from gputop.core.host_stacks import StackFrame, StackSamples
from gputop.text.units import printable

FILE = "gputop.stacks.json"
_MAX_BYTES = 32 << 20


class StacksFile(Struct, frozen=True, tag_field="schema", tag="gputop.capture_stacks/1"):
    """Samples of processes by the name of their trace file, or the reason why there are none."""

    files: Mapping[str, StackSamples | str] = field(default_factory=dict)


def write_stacks(folder: Path, files: Mapping[str, StackSamples | str]) -> None:
    """Write it; raises OSError."""
    with replacing(folder / FILE) as file:
        file.write(encode(StacksFile(files)) + b"\n")


def read_stacks(folder: Path) -> StacksFile:
    """Read what was sampled beside the traces in a folder: nothing where there is no such file, or not a valid one."""
    with contextlib.suppress(OSError, ValueError):
        document = convert(parse(read_regular(folder / FILE, _MAX_BYTES)), StacksFile)
        return StacksFile({name: _printable(samples) for name, samples in document.files.items()})
    return StacksFile()


def stacks_of(paths: Sequence[str]) -> tuple[tuple[StackSamples, ...], str]:
    """The samples of the processes of these trace files, and why there are none ("": nobody tried)."""
    out: list[StackSamples] = []
    reasons: list[str] = []
    folders = {folder: read_stacks(folder) for folder in {Path(path).parent for path in paths}}
    for path in map(Path, paths):
        samples = folders[path.parent].files.get(path.name.removesuffix(".gz"), "")
        if isinstance(samples, StackSamples):
            out.append(samples)
        elif samples:
            reasons.append(samples)
    return tuple(out), "" if out else next(iter(reasons), "")


def _printable(samples: StackSamples | str) -> StackSamples | str:
    """The same with every text safe to show: the file may come from anywhere."""
    if isinstance(samples, str):
        return printable(samples)
    return structs.replace(
        samples, frames=tuple(StackFrame(printable(f.function), printable(f.file), f.line) for f in samples.frames),
        threads=tuple(structs.replace(thread, name=printable(thread.name)) for thread in samples.threads))

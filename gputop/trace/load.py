"""Any trace gputop can read, from its path: finding the files, telling the format, reading the bytes."""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path

import psutil

from gputop.errors import EXIT_USAGE, GputopError, NothingToSee
from gputop.trace.model import QualityNote, Trace

ACCEPTED = (
    "gputop reads <host>.xplane.pb (also .gz), a profile run's folder or a TensorBoard logdir, Chrome or kineto traces "
    "(.json, .json.gz), and Nsight Systems reports exported to .sqlite."
)
_GZIP, _SQLITE = b"\x1f\x8b", b"SQLite format 3\0"
_NSYS_SUFFIXES = (".nsys-rep", ".qdrep")
# Below a logdir; Keras' TensorBoard callback of TF 2.2 and older used <logdir>/train.
_RUN_PATTERNS = ("plugins/profile/*", "*/plugins/profile/*", "profile/*", "*")
_MEMORY_SHARE = 0.5  # of what is free, for one trace's bytes
_PIECE = 1 << 22


def load(paths: Sequence[Path | str]) -> Trace:
    """Read one trace from files or a folder; several files are the hosts or ranks of one job.

    Raises GputopError with cause and remedy for what is missing, unreadable, too big or in
    another format, NothingToSee where there is no trace or no event in it. Damage is no
    error as long as anything can be read: the trace then has the quality note "truncated".
    """
    if not paths:
        raise GputopError("No trace was given.", ACCEPTED, EXIT_USAGE)
    files: list[Path] = []
    notes: list[QualityNote] = []
    for path in map(Path, paths):
        files += _files_at(path, notes)
    files = list(dict.fromkeys(files))
    formats = {file: _format(file) for file in files}
    if len(set(formats.values())) > 1:
        raise GputopError(f"Traces of several formats cannot be read as one: {_listed(files)}.",
                          "Give those of one format at a time.", EXIT_USAGE)
    trace = _read(files, formats[files[0]])
    trace.quality = notes + trace.quality
    return trace


def _read(files: list[Path], format_: str) -> Trace:
    if format_ == "nsys":
        from gputop.trace.nsys import read_nsys

        if len(files) > 1:
            raise GputopError(f"Several Nsight Systems reports cannot be read as one: {_listed(files)}.",
                              "Give one at a time; `nsys profile` over a whole job makes one report of all its ranks.",
                              EXIT_USAGE)
        return read_nsys(files[0])
    contents = [(str(file), *_read_bytes(file)) for file in files]
    damaged = [path for path, _, cut in contents if cut]
    if format_ == "chrome":
        from gputop.trace.chrome import read_chrome

        return read_chrome([(path, data) for path, data, _ in contents], damaged=damaged)
    from gputop.trace.xspace import read_xspaces

    return read_xspaces([(path, re.sub(r"\.xplane\.pb(\.gz)?$|\.pb(\.gz)?$", "", Path(path).name), data)
                         for path, data, _ in contents], damaged=damaged)


def _files_at(path: Path, notes: list[QualityNote]) -> list[Path]:
    """The trace files a path stands for."""
    try:
        if path.is_dir():
            return _files_in(path, notes)
        if not path.exists():
            raise GputopError(f"{path} does not exist.", "Check the path; `gputop capture` makes a new trace.")
        if path.name.endswith(_NSYS_SUFFIXES):
            raise GputopError(f"{path} is an Nsight Systems report, which only Nsight Systems can open.",
                              f"Export it: nsys export --type sqlite -o {path.stem}.sqlite {path}")
        if not path.is_file():
            raise GputopError(f"{path} is neither a file nor a folder.", ACCEPTED)
    except OSError as error:
        raise _unreadable(path, error) from error
    return [path]


def _files_in(folder: Path, notes: list[QualityNote]) -> list[Path]:
    """A run's XSpaces, or those of the newest run below, or the folder's Chrome traces or report."""
    spaces = _xspaces(folder)
    if spaces:
        return spaces
    for pattern in _RUN_PATTERNS:
        runs = [(run, found) for run in folder.glob(pattern) if run.is_dir() and (found := _xspaces(run))]
        if runs:
            run, found = max(runs, key=lambda r: (max(f.stat().st_mtime_ns for f in r[1]), r[0].name))
            if len(runs) > 1:
                notes.append(QualityNote("newest_run", f"{folder} holds {len(runs)} profile runs; this is the newest, "
                                                       f"{run.name}."))
            return found
    for patterns in (("*.json", "*.json.gz"), ("*.sqlite",)):
        found = sorted(f for pattern in patterns for f in folder.glob(pattern) if f.is_file())
        found = [f for f in found if patterns[0] != "*.json" or _looks_like_chrome(f)]
        if found:
            return found
    reports = [f for suffix in _NSYS_SUFFIXES for f in sorted(folder.glob("*" + suffix))]
    if reports:
        return _files_at(reports[0], notes)
    raise NothingToSee(f"There is no trace in {folder}.", ACCEPTED)


def _xspaces(folder: Path) -> list[Path]:
    """The XSpaces in a run's folder, a plain file before its compressed copy."""
    found = {f.name.removesuffix(".gz"): f for f in sorted(folder.glob("*.xplane.pb.gz")) if f.is_file()}
    found.update({f.name: f for f in folder.glob("*.xplane.pb") if f.is_file()})
    return [found[name] for name in sorted(found)]


def _looks_like_chrome(path: Path) -> bool:
    """Whether a .json in a folder is a trace and not, say, a configuration."""
    head = _head(path)
    return b"traceEvents" in head or head.lstrip().startswith(b"[") or b"schemaVersion" in head


def _format(path: Path) -> str:
    head = _head(path)
    if not head:
        raise NothingToSee(f"{path} is empty.", "The capture or the copy failed; make it again. " + ACCEPTED)
    if head.startswith(_SQLITE):
        return "nsys"
    if head.lstrip(b"\xef\xbb\xbf \t\r\n")[:1] in (b"{", b"["):
        return "chrome"
    if path.name.removesuffix(".gz").endswith(".pb") or head[:1] == b"\x0a":  # an XSpace begins with its planes
        return "xspace"
    raise GputopError(f"{path} is in a format gputop does not know.", ACCEPTED)


def _head(path: Path, size: int = 1 << 16) -> bytes:
    """The first bytes of a file's content, decompressed."""
    try:
        with path.open("rb") as file:
            head = file.read(size)
    except OSError as error:
        raise _unreadable(path, error) from error
    if not head.startswith(_GZIP):
        return head
    try:
        return zlib.decompressobj(wbits=31).decompress(head, size)
    except zlib.error as error:
        raise GputopError(f"{path} is damaged: its data cannot be decompressed ({error}).", "Copy it again.") from error


def _read_bytes(path: Path) -> tuple[bytes, bool]:
    """A file's content, decompressed, and whether its compressed stream was cut off or damaged."""
    limit = int(psutil.virtual_memory().available * _MEMORY_SHARE)
    try:
        with path.open("rb") as file:
            if path.stat().st_size > limit:
                raise _too_big(path, limit)
            if file.read(2) != _GZIP:
                file.seek(0)
                return file.read(), False
            file.seek(0)
            return _decompress(iter(lambda: file.read(_PIECE), b""), path, limit)
    except OSError as error:
        raise _unreadable(path, error) from error


def _decompress(pieces: Iterable[bytes], path: Path, limit: int) -> tuple[bytes, bool]:
    """All members of a gzip stream, as far as they are sound, and never more than ``limit`` bytes."""
    out = bytearray()
    stream = zlib.decompressobj(wbits=31)
    try:
        for piece in pieces:
            while piece:
                if stream.eof:
                    if not piece.startswith(_GZIP):  # padding after the last member
                        return bytes(out), False
                    stream = zlib.decompressobj(wbits=31)
                out += stream.decompress(piece, _PIECE)
                if len(out) > limit:
                    raise _too_big(path, limit)
                piece = stream.unconsumed_tail or stream.unused_data
    except zlib.error:
        return bytes(out), True
    return bytes(out), not stream.eof


def _too_big(path: Path, limit: int) -> GputopError:
    return GputopError(f"{path} needs more than {limit / 1e9:.1f} GB of memory, half of what is free.",
                       "Analyse it on a machine with more memory, or capture for a shorter time.")


def _unreadable(path: Path, error: OSError) -> GputopError:
    return GputopError(f"{path} cannot be read: {error.strerror or error}.", "Check the path and its permissions.")


def _listed(files: Sequence[Path]) -> str:
    shown = ", ".join(str(f) for f in files[:4])
    return shown if len(files) <= 4 else f"{shown} and {len(files) - 4} more"

"""Any trace gputop can read, from its path: finding the files, telling the format, reading the bytes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from gputop.core.errors import EXIT_USAGE, GputopError, NoDataError
from gputop.trace.model import QualityNote, Trace
from gputop.trace.readers.content import memory_limit, read_all, read_chunks, read_prefix, too_big, unreadable

ACCEPTED = (
    "gputop reads <host>.xplane.pb (also .gz), a profile run's folder or a TensorBoard logdir, Chrome or kineto traces "
    "(.json, .json.gz), and Nsight Systems reports exported to .sqlite."
)
_SQLITE = b"SQLite format 3\0"
_NSYS_SUFFIXES = (".nsys-rep", ".qdrep")
# Below a logdir; Keras' TensorBoard callback of TF 2.2 and older used <logdir>/train.
_RUN_PATTERNS = ("plugins/profile/*", "*/plugins/profile/*", "profile/*", "*")
# Torch's TensorBoard handler names files <worker>.<time in ms or ns>.pt.trace.json[.gz].
_KINETO_NAME = re.compile(r"(.+)\.(\d{10,20})\.pt\.trace\.json(?:\.gz)?")
_EXPORT_NAME = re.compile(r"\.trace\.json(\.gz)?$|^perfetto_trace\.json(\.gz)?$")  # TensorBoard's and JAX's
_PERFETTO = "perfetto_trace.json"  # what JAX writes beside its own, of the same capture


def load(paths: Sequence[Path | str]) -> Trace:
    """Read one trace from files or a folder; several files are the hosts or ranks of one job.

    Raises GputopError with cause and remedy for what is missing, unreadable, too big or in
    another format, NoDataError where there is no trace or no event in it. Damage is no
    error as long as anything can be read: the trace then has the quality note "truncated".
    """
    if not paths:
        raise GputopError("No trace was given.", ACCEPTED, EXIT_USAGE)
    files: list[Path] = []
    notes: list[QualityNote] = []
    for path in map(Path, paths):
        files += _files_at(path, notes)
    formats: dict[Path, str] = {}
    unread: list[GputopError] = []
    for file in dict.fromkeys(files):
        try:
            formats[file] = _format(file)
        except GputopError as error:
            unread.append(error)
    if not formats:
        raise unread[0]
    notes += [QualityNote("unreadable_file", f"{error.message} It is left out.") for error in unread]
    _leave_out_exports(formats, notes)
    if len(set(formats.values())) > 1:
        raise GputopError(f"Traces of several formats cannot be read as one: {_listed(list(formats))}.",
                          "Give those of one format at a time.", EXIT_USAGE)
    trace = _read(list(formats), next(iter(formats.values())))
    trace.quality = notes + trace.quality
    return trace


def _leave_out_exports(formats: dict[Path, str], notes: list[QualityNote]) -> None:
    """An XSpace and a Chrome trace beside it are one capture, told twice."""
    folders = {file.parent for file, format_ in formats.items() if format_ == "xspace"}
    exports = [file for file, format_ in formats.items()
               if format_ == "chrome" and file.parent in folders and _EXPORT_NAME.search(file.name)]
    for file in exports:
        del formats[file]
    if exports:
        notes.append(QualityNote("same_capture", f"{_listed(exports)}: left out, the XSpace beside it holds the same "
                                                 "capture."))


def _read(files: list[Path], format_: str) -> Trace:
    limit = memory_limit()
    if format_ == "nsys":
        from gputop.trace.readers.nsys import read_nsys

        if len(files) > 1:
            raise GputopError(f"Several Nsight Systems reports cannot be read as one: {_listed(files)}.",
                              "Give one at a time; `nsys profile` over a whole job makes one report of all its ranks.",
                              EXIT_USAGE)
        if files[0].stat().st_size > limit:
            raise too_big(files[0], limit)
        return read_nsys(files[0])
    damaged: set[str] = set()
    if format_ == "chrome":
        from gputop.trace.readers.chrome.reader import read_chrome

        return read_chrome([(str(file), read_chunks(file, damaged)) for file in files], damaged=damaged,
                           limit_bytes=limit)
    from gputop.trace.readers.clock_file import read_clocks
    from gputop.trace.readers.xspace.reader import read_xspaces

    clocks = {folder: read_clocks(folder) for folder in {file.parent for file in files}} if len(files) > 1 else {}
    # One after the other: the bytes of a file are given back before those of the next are read.
    return read_xspaces(((str(file), re.sub(r"\.xplane\.pb(\.gz)?$|\.pb(\.gz)?$", "", file.name),
                          partial(read_all, file, damaged, limit)) for file in files),
                        damaged=damaged, limit_bytes=limit,
                        known_clocks={str(file): clock for file in files
                                      if (clock := clocks.get(file.parent, {}).get(file.name.removesuffix(".gz")))})


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
        raise unreadable(path, error) from error
    return [path]


def _files_in(folder: Path, notes: list[QualityNote]) -> list[Path]:
    """A run's XSpaces, or those of the newest run below, or the folder's Chrome traces or report."""
    for traces_in in (_xspaces, _chrome_traces):
        if found := traces_in(folder):
            return _newest_of_each_worker(found, notes)
        for pattern in _RUN_PATTERNS:
            runs = [(run, found) for run in folder.glob(pattern) if run.is_dir() and (found := traces_in(run))]
            # A capture that failed leaves empty files; the newest that holds something is meant.
            runs = [r for r in runs if any(f.stat().st_size for f in r[1])] or runs
            if runs:
                run, found = max(runs, key=lambda r: (max(f.stat().st_mtime_ns for f in r[1]), r[0].name))
                if len(runs) > 1:
                    notes.append(QualityNote("newest_run", f"{folder} holds {len(runs)} profile runs; this is the "
                                                           f"newest, {run.name}."))
                return _newest_of_each_worker(found, notes)
    if reports := sorted(f for f in folder.glob("*.sqlite") if f.is_file()):
        return reports
    if unexported := [f for suffix in _NSYS_SUFFIXES for f in sorted(folder.glob("*" + suffix))]:
        return _files_at(unexported[0], notes)
    raise NoDataError(f"There is no trace in {folder}.", ACCEPTED)


def _xspaces(folder: Path) -> list[Path]:
    return _plain_or_compressed(folder, "*.xplane.pb")


def _chrome_traces(folder: Path) -> list[Path]:
    found = [f for f in _plain_or_compressed(folder, "*.json") if _looks_like_chrome(f)]
    return [f for f in found if f.name.removesuffix(".gz") != _PERFETTO] or found


def _plain_or_compressed(folder: Path, pattern: str) -> list[Path]:
    """The files of that name, a plain file before its compressed copy."""
    found = {f.name.removesuffix(".gz"): f for f in sorted(folder.glob(pattern + ".gz")) if f.is_file()}
    found.update({f.name: f for f in folder.glob(pattern) if f.is_file()})
    return [found[name] for name in sorted(found)]


def _newest_of_each_worker(files: list[Path], notes: list[QualityNote]) -> list[Path]:
    """Torch's handler writes a file per worker and capture: the last capture of each."""
    newest: dict[str, tuple[int, Path]] = {}
    for file in files:
        named = _KINETO_NAME.fullmatch(file.name)
        worker, time = (named[1], int(named[2])) if named else (file.name, 0)
        newest[worker] = max(newest.get(worker, (0, file)), (time, file))
    if len(newest) < len(files):
        notes.append(QualityNote("newest_run", f"{files[0].parent} holds several captures of a worker; these are the "
                                               f"newest, {len(newest)} of {len(files)} files."))
    return [file for _, file in newest.values()]


def _looks_like_chrome(path: Path) -> bool:
    """Whether a .json in a folder is a trace and not, say, a configuration; what cannot be told is taken for one."""
    try:
        begin = read_prefix(path)
    except GputopError:
        return True
    return not begin or b"traceEvents" in begin or begin.lstrip().startswith(b"[") or b"schemaVersion" in begin


def _format(path: Path) -> str:
    begin = read_prefix(path)
    if not begin:
        raise NoDataError(f"{path} is empty.", "The capture or the copy failed; make it again. " + ACCEPTED)
    if begin.startswith(_SQLITE):
        return "nsys"
    if begin.lstrip(b"\xef\xbb\xbf \t\r\n")[:1] in (b"{", b"["):
        return "chrome"
    if path.name.removesuffix(".gz").endswith(".pb") or begin[:1] == b"\x0a":  # an XSpace begins with its planes
        return "xspace"
    raise GputopError(f"{path} is in a format gputop does not know.", ACCEPTED)


def _listed(files: Sequence[Path]) -> str:
    shown = ", ".join(str(f) for f in files[:4])
    return shown if len(files) <= 4 else f"{shown} and {len(files) - 4} more"

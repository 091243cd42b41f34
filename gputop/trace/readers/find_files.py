"""The trace files that a path stands for: a file, a run's folder, or a logdir with runs below it."""

from __future__ import annotations

from pathlib import Path

from gputop.core.errors import GputopError, NoDataError
from gputop.trace.model import QualityNote
from gputop.trace.readers.content import read_prefix, unreadable
from gputop.trace.readers.registry import ACCEPTED, FORMATS, Format

# Below a logdir. Keras' TensorBoard callback of TensorFlow 2.2 and older used <logdir>/train.
_RUN_PATTERNS = ("plugins/profile/*", "*/plugins/profile/*", "profile/*", "*")


def files_at(path: Path, notes: list[QualityNote]) -> list[Path]:
    """The trace files of a path. Appends to ``notes`` where there are more than are taken.

    Raises GputopError for what does not exist, cannot be read or has to be exported first, NoDataError
    for a folder without a trace.
    """
    try:
        if path.is_dir():
            return _files_in(path, notes)
        if not path.exists():
            raise GputopError(f"{path} does not exist.", "Check the path; `gputop capture` makes a new trace.")
        for format_ in FORMATS:
            if format_.raw_endings and path.name.endswith(format_.raw_endings):
                raise _not_exported(path, format_)
        if not path.is_file():
            raise GputopError(f"{path} is neither a file nor a folder.", ACCEPTED)
    except OSError as error:
        raise unreadable(path, error) from error
    return [path]


def _files_in(folder: Path, notes: list[QualityNote]) -> list[Path]:
    """The files of the first format that the folder, or the newest run below it, has any of."""
    for format_ in FORMATS:
        if found := _files_of(format_, folder):
            return _newest_of_each_worker(format_, found, notes)
        if format_.in_run_folders and (found := _newest_run(format_, folder, notes)):
            return _newest_of_each_worker(format_, found, notes)
    for format_ in FORMATS:
        for ending in format_.raw_endings:
            if raw := sorted(folder.glob("*" + ending)):
                raise _not_exported(raw[0], format_)
    raise NoDataError(f"There is no trace in {folder}.", ACCEPTED)


def _files_of(format_: Format, folder: Path) -> list[Path]:
    """The files of one format that lie in the folder itself, by name; a plain file instead of its compressed copy."""
    by_name: dict[str, Path] = {}
    for ending in (".gz", "") if format_.compressed else ("",):
        by_name.update({f.name.removesuffix(".gz"): f for f in folder.glob(format_.pattern + ending) if f.is_file()})
    found = [by_name[name] for name in sorted(by_name)]
    if format_.skipped is not None:
        found = [file for file in found if not format_.skipped(file, _prefix_or_nothing(file))]
    duplicate = format_.duplicate
    return [file for file in found if duplicate is None or not duplicate.fullmatch(file.name)] or found


def _prefix_or_nothing(file: Path) -> bytes:
    try:
        return read_prefix(file)
    except GputopError:
        return b""


def _newest_run(format_: Format, folder: Path, notes: list[QualityNote]) -> list[Path]:
    """The files of the newest run below the folder; empty where there is none."""
    for pattern in _RUN_PATTERNS:
        runs = [(run, found) for run in folder.glob(pattern) if run.is_dir() and (found := _files_of(format_, run))]
        # A capture that failed leaves empty files; the newest run with content is wanted.
        runs = [r for r in runs if any(f.stat().st_size for f in r[1])] or runs
        if runs:
            run, found = max(runs, key=lambda r: (max(f.stat().st_mtime_ns for f in r[1]), r[0].name))
            if len(runs) > 1:
                notes.append(QualityNote(
                    "newest_run", f"{folder} holds {len(runs)} profile runs; this is the newest, {run.name}."))
            return found
    return []


def _newest_of_each_worker(format_: Format, files: list[Path], notes: list[QualityNote]) -> list[Path]:
    """The last capture of each worker, where the format's file names tell worker and time."""
    newest: dict[str, tuple[int, Path]] = {}
    for file in files:
        named = format_.worker_capture.fullmatch(file.name) if format_.worker_capture is not None else None
        worker, time = (named[1], int(named[2])) if named else (file.name, 0)
        newest[worker] = max(newest.get(worker, (0, file)), (time, file))
    if len(newest) < len(files):
        notes.append(QualityNote(
            "newest_run", f"{files[0].parent} holds several captures of a worker; these are the newest, "
                          f"{len(newest)} of {len(files)} files."))
    return [file for _, file in newest.values()]


def _not_exported(path: Path, format_: Format) -> GputopError:
    what, fix = format_.raw_message
    return GputopError(f"{path} is {what}.", fix.format(stem=path.stem, path=path))

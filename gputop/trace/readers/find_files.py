"""The trace files that a path stands for: a file, a run's folder, or a logdir with runs below it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from msgspec import Struct

from gputop.core.errors import EXIT_USAGE, GputopError, NoDataError
from gputop.core.findings import TraceNote
from gputop.text.units import first_few
from gputop.trace.readers.content import read_prefix, unreadable
from gputop.trace.readers.formats import ACCEPTED, FORMATS, RAW_REPORTS, Format

# The profiler writes <logdir>/plugins/profile/<run>; Keras' TensorBoard callback puts <logdir>/train before it, and
# experiments lie in folders of folders.
_RUNS = "profile"
_PLUGINS = "plugins"
_PROBE = ".gputop-probe-"  # a test capture that a killed gputop left behind; the next capture removes it
_MAX_FOLDERS = 20_000  # visited below one logdir
_MAX_DEPTH = 16
_LISTED = 8  # runs named in a note or message


class Run(Struct, frozen=True):
    """A profile run below a logdir: its folder, what it is called there, its files, their format, and when the last was
    written."""

    folder: Path
    name: str
    files: tuple[Path, ...]
    format: Format
    written_ns: int


def files_at(path: Path, notes: list[TraceNote], run: str | None = None) -> list[Path]:
    """The trace files of a path, of a logdir those of its newest run or of the one called ``run``.

    Appends to ``notes`` where there are more than are taken. Raises GputopError for what does not exist, cannot be
    read or has to be exported first, NoDataError for a folder without a trace.
    """
    try:
        if path.is_dir():
            return _files_in(path, notes, run)
        if not path.exists():
            raise GputopError(f"{path} does not exist.", "Check the path, or record a new trace with `gputop capture`.")
        if not path.is_file():
            raise GputopError(f"{path} is neither a file nor a folder.", ACCEPTED)
    except OSError as error:
        raise unreadable(path, error) from error
    return [path]


def runs_at(path: Path) -> list[Run]:
    """The profile runs of a logdir, the newest first; none for anything else, such as the folder of one run."""
    return _first_format(path)[2] if path.is_dir() else []


def _files_in(folder: Path, notes: list[TraceNote], run: str | None) -> list[Path]:
    """The files of the first format that the folder has any of, or those of a run below it."""
    format_, files, runs = _first_format(folder)
    if runs:
        chosen = _newest(runs, folder, notes) if run is None else _called(run, runs, folder)
        return _newest_of_each_worker(chosen.format, list(chosen.files), notes)
    if format_ is not None:
        if run is not None:
            raise GputopError(f"{folder} contains a trace, not runs.", "Leave --run out.", EXIT_USAGE)
        return _newest_of_each_worker(format_, files, notes)
    if raw := sorted(file for file in folder.iterdir() if file.name.endswith(RAW_REPORTS)):
        return raw[:1]  # a message tells to export it
    raise NoDataError(f"There is no trace in {folder}.", ACCEPTED)


def _first_format(folder: Path) -> tuple[Format | None, list[Path], list[Run]]:
    """The first format that the folder itself has, with these files, or the runs below it where one of theirs is first.
    A logdir can hold runs of several formats, as of a TensorFlow and of a PyTorch job."""
    runs = _runs_below(folder)
    for format_ in FORMATS:
        if files := _files_of(format_, folder):
            return format_, files, []
        if any(run.format is format_ for run in runs):
            return None, [], runs
    return None, [], []


def _files_of(format_: Format, folder: Path) -> list[Path]:
    """The files of one format that lie in the folder itself, by name; a plain file instead of its compressed copy."""
    by_name: dict[str, Path] = {}
    for ending in (".gz", "") if format_.compressed else ("",):
        by_name.update({f.name.removesuffix(".gz"): f for f in folder.glob(format_.pattern + ending) if f.is_file()})
    files = [by_name[name] for name in sorted(by_name)]
    if format_.skipped is not None:
        files = [file for file in files if not format_.skipped(file, _prefix_or_nothing(file))]
    duplicate = format_.duplicate
    return [file for file in files if duplicate is None or not duplicate.fullmatch(file.name)] or files


def _prefix_or_nothing(file: Path) -> bytes:
    try:
        return read_prefix(file)
    except GputopError:
        return b""


def _runs_below(folder: Path) -> list[Run]:
    """The runs at any depth below the folder, the newest first; where there is none, folders right below it."""
    folders = list(_run_folders(folder)) or [child for child in folder.iterdir() if child.is_dir()]
    runs = []
    for run in folders:
        for format_ in FORMATS:
            if format_.in_run_folders and (files := _files_of(format_, run)):
                parts = [part for part in run.relative_to(folder).parts[:-1] if part not in (_RUNS, _PLUGINS)]
                runs.append(Run(run, "/".join((*parts, run.name)), tuple(files), format_,
                                max(file.stat().st_mtime_ns for file in files)))
                break
    # A capture that failed leaves empty files; runs with content are wanted.
    runs = [run for run in runs if any(file.stat().st_size for file in run.files)] or runs
    return sorted(runs, key=lambda run: (run.written_ns, run.folder.name), reverse=True)


def _run_folders(folder: Path) -> Iterator[Path]:
    """Folders in a folder called profile, at any depth; links to folders are not followed."""
    top = len(folder.parts)
    if folder.name == _RUNS:
        yield from (child for child in sorted(folder.iterdir()) if child.is_dir())
    for visited, (where, below, _) in enumerate(os.walk(folder, followlinks=False)):
        here = Path(where)
        below[:] = [name for name in below if not name.startswith(_PROBE)]
        if here.name == _RUNS and here != folder:
            yield from (here / name for name in sorted(below))
            below.clear()
        if visited >= _MAX_FOLDERS or len(here.parts) - top >= _MAX_DEPTH:
            below.clear()


def _newest(runs: list[Run], folder: Path, notes: list[TraceNote]) -> Run:
    if len(runs) > 1:
        notes.append(TraceNote(
            "newest_run", f"{folder} contains {len(runs)} profile runs; this is the newest, {runs[0].name}. Older "
                          f"runs: {_names(runs[1:])}. Use --run NAME to analyze one run, or --all for all runs."))
    return runs[0]


def _called(name: str, runs: list[Run], folder: Path) -> Run:
    """The run of that name, or of that last part of its name. Raises GputopError where there is none, or several."""
    named = [run for run in runs if run.name == name] or [run for run in runs if run.folder.name == name]
    if len(named) == 1:
        return named[0]
    wrong = f"Several runs in {folder} are named {name}" if named else f"No run in {folder} is named {name}"
    raise GputopError(f"{wrong}.", f"Available runs, newest first: {_names(named or runs)}.", EXIT_USAGE)


def _names(runs: list[Run]) -> str:
    return first_few([run.name for run in runs], _LISTED)


def _newest_of_each_worker(format_: Format, files: list[Path], notes: list[TraceNote]) -> list[Path]:
    """The last capture of each worker, where the format's file names tell worker and time."""
    newest: dict[str, tuple[int, Path]] = {}
    for file in files:
        named = format_.worker_capture.fullmatch(file.name) if format_.worker_capture is not None else None
        worker, time = (named[1], int(named[2])) if named else (file.name, 0)
        newest[worker] = max(newest.get(worker, (0, file)), (time, file))
    if len(newest) < len(files):
        notes.append(TraceNote(
            "newest_run", f"{files[0].parent} contains several captures of a worker; these are the newest "
                          f"({len(newest)} of {len(files)} files)."))
    return [file for _, file in newest.values()]

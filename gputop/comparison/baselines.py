"""Baselines: analyses that are kept in the logdir by name, for later runs to be compared with.

One is the document that ``analyze --json`` prints, in ``<logdir>/baselines/NAME.json``. It holds the length of each
step, so that a comparison of step times is as sure as one of the traces.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path

from msgspec import Struct

from gputop.analysis.results import Analysis
from gputop.core.codec import encode, parse
from gputop.core.errors import EXIT_USAGE, GputopError, os_errors_as
from gputop.core.files import open_regular, writable_folder
from gputop.core.samples import LAST_TIME_S

FOLDER = "baselines"
MAX_BASELINES = 500  # of those that are listed
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,63}")
_MAX_BYTES = 64 << 20


class SavedBaseline(Struct, frozen=True):
    """``median_s`` is the step time, null if there are no steps or the file cannot be read."""

    name: str
    time_s: float
    readable: bool
    paths: tuple[str, ...]
    median_s: float | None


class BaselinesDocument(Struct, frozen=True, tag_field="schema", tag="gputop.baselines/1"):
    baselines: tuple[SavedBaseline, ...]


def baseline_path(logdir: Path, name: str) -> Path:
    """Return where a baseline is or will be; raises GputopError (wrong usage) for what is no name."""
    if not _NAME.fullmatch(name):
        raise GputopError("the name of a baseline has only letters, digits, . _ and -", "For example --baseline main.",
                          EXIT_USAGE)
    return logdir.expanduser() / FOLDER / f"{name}.json"


def saved_baseline(logdir: Path, name: str) -> Path:
    """The file of a saved baseline. Raises GputopError that lists the saved ones where there is none of that name."""
    path = baseline_path(logdir, name)
    if not path.is_file():
        saved = ", ".join(path.stem for path in _files(logdir)) or "none"
        raise GputopError(f"there is no baseline {name} in {logdir}", f"Saved: {saved}. gputop analyze TRACE "
                          f"--save-baseline {name} saves one.")
    return path


def save_baseline(logdir: Path, name: str, analysis: Analysis, *, replace: bool) -> Path:
    """Keep an analysis; returns its file. Raises GputopError where there is one of that name, unless ``replace``, and
    where it cannot be written."""
    path = baseline_path(logdir, name)
    with (os_errors_as(f"cannot write {path}", "Choose a folder with --logdir."),
          writable_folder(path.parent, "--logdir") as folder):
        if folder.has(path.name) and not replace:
            raise GputopError(f"the baseline {name} already exists: {path}", "Add --replace, or choose another name.")
        with folder.replacing(path.name) as file:
            file.write(encode(analysis))
    return path


def baselines(logdir: Path) -> Iterator[tuple[str, float, Analysis | None]]:
    """Each baseline by name: when it was saved (Unix time), and what it holds, None where it cannot be read."""
    for path in _files(logdir):
        analysis = None
        with contextlib.suppress(OSError, ValueError, GputopError), open_regular(path, _MAX_BYTES) as file:
            analysis = Analysis.from_json(parse(file.read(_MAX_BYTES)), str(path))
        with contextlib.suppress(OSError):
            yield path.stem, min(path.stat().st_mtime, LAST_TIME_S), analysis  # any that its owner sets


def _files(logdir: Path) -> list[Path]:
    """List the files in a folder with names of baselines, by name."""
    folder = logdir.expanduser() / FOLDER
    with contextlib.suppress(OSError):
        return sorted(path for path in folder.glob("*.json") if _NAME.fullmatch(path.stem))[:MAX_BASELINES]
    return []

"""Bounds the folder of automatic captures: the oldest runs are removed first, and only those gputop marked."""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from collections.abc import Iterator
from pathlib import Path

from gputop.core.codec import parse
from gputop.core.files import Folder, open_regular, replacing, untrusted_ancestor
from gputop.trace.readers.capture_file import FILE as CAPTURE
from gputop.trace.readers.capture_file import OVERVIEW
from gputop.trace.readers.clock_file import FILE as CLOCKS
from gputop.trace.readers.stacks_file import FILE as STACKS

MARK = "gputop.black-box.json"
MAX_RUNS = 20
MAX_BYTES = 2 * 2**30
_TRACES = (".xplane.pb", ".pt.trace.json", OVERVIEW)
_MAX_NOTE_BYTES = 1 << 20
_SCHEMA = "gputop.black-box/1"


def mark_removable(run: Path, reason: str, time_s: float | None = None) -> None:
    """Note in a run's folder why it was captured: from then on it may be removed. Raises OSError."""
    note = {"schema": _SCHEMA, "reason": reason, "time_s": time.time() if time_s is None else time_s}
    with replacing(run / MARK) as file:
        file.write((json.dumps(note) + "\n").encode())


def remove_oldest(logdir: Path, max_runs: int = MAX_RUNS, max_bytes: float = MAX_BYTES) -> list[Path]:
    """Remove the oldest marked runs of a logdir beyond so many or so much, never the newest; returns the removed.

    Of a run only what gputop wrote is removed; a folder with anything else in it stays, with that. In a logdir that
    another user could exchange nothing is removed.
    """
    profiles = logdir / "plugins" / "profile"
    removed: list[Path] = []
    if untrusted_ancestor(profiles) is not None:
        return removed
    with contextlib.suppress(OSError), Folder(profiles) as parent:
        total = 0
        for i, (_, run) in enumerate(sorted(_marked_runs(parent), reverse=True)):
            with parent.enter(run) as folder:
                total += _trace_bytes(folder)
                if not i or (i < max_runs and total <= max_bytes):
                    continue
            remove_run(parent, run)
            removed.append(profiles / run)
    return removed


def remove_run(parent: Folder, run: str) -> list[str]:
    """Remove the traces of a run and what gputop wrote beside them, and its folder unless it holds anything else.

    Returns the names of those that could not be removed. Raises OSError where it cannot be entered.
    """
    with parent.enter(run) as folder:
        names = [name for name in folder.names() if name.endswith(_TRACES) or name in (CAPTURE, CLOCKS, MARK, STACKS)]
        for name in names:
            folder.remove(name)
        left = [name for name in names if folder.has(name)]
    parent.remove_folder(run)
    return left


def _marked_runs(parent: Folder) -> Iterator[tuple[float, str]]:
    """Time and name of the runs that gputop may remove: real folders with a note of this user's. Raises OSError."""
    for run in parent.names():
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, OverflowError):
            with parent.enter(run) as folder, open_regular(
                    MARK, _MAX_NOTE_BYTES, follow_links=False, owners=frozenset({os.geteuid()}),
                    folder_fd=folder.fd) as note:
                about = parse(note.read(_MAX_NOTE_BYTES))
            if about["schema"] == _SCHEMA and math.isfinite(time_s := float(about["time_s"])):
                yield time_s, run


def _trace_bytes(folder: Folder) -> int:
    total = 0
    for name in folder.names():
        if name.endswith(_TRACES):
            with contextlib.suppress(OSError):
                total += folder.state(name).st_size
    return total

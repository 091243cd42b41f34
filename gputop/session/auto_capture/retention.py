"""Bounds the folder of automatic captures: the oldest runs are removed first, and only those gputop marked."""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path

from gputop.trace.readers.clock_file import FILE as CLOCKS

MARK = "gputop.black-box.json"
MAX_RUNS = 20
MAX_BYTES = 2 * 2**30
_SCHEMA = "gputop.black-box/1"


def mark_removable(run: Path, reason: str, time_s: float | None = None) -> None:
    """Note in a run's folder why it was captured: from then on it may be removed. Raises OSError."""
    (run / MARK).write_text(json.dumps(
        {"schema": _SCHEMA, "reason": reason, "time_s": time.time() if time_s is None else time_s}) + "\n")


def remove_oldest(logdir: Path, max_runs: int = MAX_RUNS, max_bytes: float = MAX_BYTES) -> list[Path]:
    """Remove the oldest marked runs of a logdir beyond so many or so much, never the newest; returns the removed.

    Of a run only what gputop wrote is removed; a folder with anything else in it stays, with that.
    """
    runs: list[tuple[float, Path]] = []
    for note in (logdir / "plugins" / "profile").glob(f"*/{MARK}"):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            about = json.loads(note.read_text())
            if about["schema"] == _SCHEMA and not note.parent.is_symlink():
                runs.append((float(about["time_s"]), note.parent))
    runs.sort(reverse=True)
    removed, total = [], 0
    for i, (_, run) in enumerate(runs):
        total += sum(_size(file) for file in run.glob("*.xplane.pb"))
        if i and (i >= max_runs or total > max_bytes):
            _remove(run)
            removed.append(run)
    return removed


def _size(file: Path) -> int:
    with contextlib.suppress(OSError):
        return file.stat().st_size
    return 0


def _remove(run: Path) -> None:
    for file in (*run.glob("*.xplane.pb"), run / CLOCKS, run / MARK):
        with contextlib.suppress(OSError):
            file.unlink()
    with contextlib.suppress(OSError):  # there is something of somebody else's in it
        run.rmdir()

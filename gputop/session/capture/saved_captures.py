"""The captures that lie in a logdir, told apart by what stands beside them: no trace is read for a list.

A logdir may be on a slow file system and hold whatever others put there: the newest runs alone are looked at, what is
read of each is bounded, and nothing is followed or removed that could be exchanged.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from msgspec import Struct

from gputop.core.errors import GputopError, os_errors_as
from gputop.core.files import Folder, refuse_untrusted
from gputop.core.findings import Finding
from gputop.core.samples import LAST_TIME_S
from gputop.profiler.capture.records import CaptureRecord
from gputop.session.auto_capture import FOLDER as AUTO_CAPTURES
from gputop.session.auto_capture import remove_run
from gputop.text.commands import command_of, script_of
from gputop.trace.readers.capture_file import name_capture, read_capture

NOT_ANALYZED = "not analyzed yet"
MAX_RUNS = 256  # of each folder; a run is three round trips on a network file system
_SCRIPTS_OF = 16  # captures, the newest: their scripts are read before the first search for servers
_MAX_ABOUT_BYTES = 1 << 20  # of gputop.capture.json for a list; findings of an analysis take some ten kB
_TRACE = (".xplane.pb", ".pt.trace.json")  # of servers, and of kineto


class ListedCapture(Struct, frozen=True):
    """``first`` is the title of the first finding, or why there is none; ``name`` what the user calls it."""

    record: CaptureRecord
    first: str
    name: str = ""

    def contains(self, pattern: str) -> bool:
        """Return whether its name, job, address or first finding has this text."""
        text = f"{self.name} {self.record.job} {self.record.address} {self.first}"
        return pattern.casefold() in text.casefold()


def listed(record: CaptureRecord) -> ListedCapture:
    """A capture that this session has taken or opened."""
    if record.problem is not None:
        return ListedCapture(record, f"not analyzed: {record.problem.message}")
    return ListedCapture(record, _first(None if record.analysis is None else record.findings))


def _first(findings: tuple[Finding, ...] | None) -> str:
    return NOT_ANALYZED if findings is None else findings[0].title if findings else "no finding"


def saved_captures(logdir: Path) -> Iterator[ListedCapture]:
    """Yield a logdir's captures, automatic ones too, the newest first; blocks as long as its file system does."""
    runs: list[Path] = []
    for folder in (logdir, logdir / AUTO_CAPTURES):
        with contextlib.suppress(OSError, RuntimeError), Folder(
                folder.expanduser().absolute() / "plugins" / "profile") as profiles:
            runs += [profiles.path / name for name in sorted(profiles.names(), reverse=True)[:MAX_RUNS]]
    for run in sorted(runs, key=lambda run: run.name, reverse=True):  # TensorBoard names a run after its time
        with contextlib.suppress(OSError):
            if (capture := _read_run(run)) is not None:
                yield capture


def captured_scripts(logdir: Path) -> frozenset[str]:
    """The scripts of the jobs of this user's newest captures in a logdir; blocks as :func:`saved_captures`."""
    scripts = set()
    for capture in islice(saved_captures(logdir), _SCRIPTS_OF):
        with contextlib.suppress(OSError):
            if run_of(capture.record).lstat().st_uid == os.geteuid():
                scripts.add(script_of(command_of(capture.record.job)))
    return frozenset(scripts - {""})


def _read_run(run: Path) -> ListedCapture | None:
    """Read a run's folder; None where it has no trace. Raises OSError."""
    with Folder(run.parent) as parent, parent.enter(run.name) as folder:
        traces = sorted(name for name in folder.names() if name.endswith(_TRACE) and not name.startswith("."))
        if not traces:
            return None
        written_s = min(folder.state(traces[0]).st_mtime, LAST_TIME_S)  # any that its owner sets
    about = read_capture(run, _MAX_ABOUT_BYTES)
    if set(about.files) - set(traces):  # it tells of other traces
        about = type(about)()
    path = run / traces[0] if len(traces) == 1 else run
    time_s = written_s if about.time_s is None else about.time_s
    record = CaptureRecord(about.address, path, time_s, 0.0, 0.0, job=about.job, pid=about.pid,
                           started_s=about.started_s, saved_step_s=about.step_s)
    return ListedCapture(record, _first(about.findings), about.name)


def run_of(record: CaptureRecord) -> Path:
    """The run's folder, which a capture of several workers has as its path."""
    return record.path.parent if record.path.name.endswith(_TRACE) else record.path


def rename_capture(record: CaptureRecord, name: str) -> None:
    """Keep what the user calls a capture next to its traces. Raises GputopError where that is not possible, or another
    user could exchange the folder."""
    run = run_of(record)
    refuse_untrusted(run.parent, "--logdir")
    with os_errors_as(f"cannot name {run}", "To name a capture, you need write access to its folder."):
        name_capture(run, name)


def delete_capture(record: CaptureRecord) -> None:
    """Remove the traces of a capture and what gputop wrote beside them; the folder stays where it holds anything else.
    Raises GputopError where that is not possible, or another user could exchange the folder."""
    run = run_of(record)
    refuse_untrusted(run.parent, "--logdir")
    try:
        with Folder(run.parent) as parent:
            left = remove_run(parent, run.name)
    except FileNotFoundError:
        return
    except OSError as error:
        raise GputopError(f"cannot delete {run}: {error.strerror or error}", "Delete it manually.") from error
    if left:
        raise GputopError(f"cannot delete {run / left[0]}", "It belongs to another user, or the disk is read-only.")

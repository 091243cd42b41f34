"""The auto-capture: when a GPU dips, gputop captures by itself; seldom, and into a folder of bounded size.

It is called with each sample, and asks for a capture as a key press does.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from msgspec.structs import replace

from gputop.core.codec import parse
from gputop.core.errors import GputopError
from gputop.core.files import Folder, open_regular, replacing, untrusted_ancestor
from gputop.core.samples import NodeSample
from gputop.profiler.capture.records import CaptureRecord, CaptureStatus
from gputop.profiler.capture.request import CaptureQuestion, CaptureRequest
from gputop.session.auto_capture.dip_detector import Dip, Trigger
from gputop.session.options import AutoCaptureOptions, Options
from gputop.trace.readers.capture_file import FILE as CAPTURE
from gputop.trace.readers.capture_file import OVERVIEW
from gputop.trace.readers.clock_file import FILE as CLOCKS
from gputop.trace.readers.stacks_file import FILE as STACKS

if TYPE_CHECKING:
    from gputop.telemetry.history import History

FOLDER = "black-box"  # below the logdir
SETTLE_S = 15.0  # after a capture: it slows the job itself, and the job has to catch up


def held_before(record: CaptureRecord, dip_s: float) -> tuple[str, ...]:
    """Note on the time between a dip, which began at ``dip_s`` (Unix time), and the first event of its trace.

    Nothing where the trace was not analyzed, or does not tell when it was recorded.
    """
    trace = record.analysis.trace if record.analysis is not None else None
    if trace is None or trace.start_s is None or trace.start_s < dip_s:
        return ()
    return (f"the trace contains nothing before the dip: it starts {trace.start_s - dip_s:.1f} s after the dip",)


class CaptureHost(Protocol):
    """Interface that the auto-capture needs of whoever captures for it."""

    options: Options

    @property
    def status(self) -> CaptureStatus | None: ...

    def start_capture(self, request: CaptureRequest) -> CaptureQuestion | None:
        """Start a capture in the background; raises GputopError where none can start."""


class AutoCapture:
    """Starts a capture when a GPU dips. ``note`` is the newest remark for the user, ``count`` the captures so far.

    ``missed`` counts the dips during a capture and just after it, which may be due to its own cost: none is captured.
    """

    def __init__(self, host: CaptureHost, options: AutoCaptureOptions, clock: Callable[[], float]) -> None:
        self.options = options
        self.note = ""
        self.count = self.missed = 0
        self._host = host
        self._clock = clock
        self._trigger = Trigger(options.rule)
        self._last_dip_s: float | None = None
        self._settled_s = 0.0
        self._dip_began_s = 0.0  # of the dip that is captured, Unix time

    @property
    def logdir(self) -> Path:
        return self._host.options.logdir / FOLDER

    @property
    def done(self) -> bool:
        """Return whether it has captured as often as it may."""
        return self.count >= self.options.max_captures

    def state(self) -> str:
        """State for people, what matters most first: "auto-capture 1/20: 11:02:07 GPU 3: SM active 31% for 5 s"."""
        missed = f", {self.missed} during captures" if self.missed else ""
        return (f"auto-capture {self.count}/{self.options.max_captures}{missed}: "
                + (self.note or self.options.rule.text))

    def check(self, history: History, sample: NodeSample) -> None:
        """Check the newest sample for a dip; called on the sampler's thread, returns at once."""
        dip = self._trigger.check(history, sample)
        now_s = sample.time_s
        status = self._host.status
        if status is not None and status.begun:
            self._settled_s = now_s + SETTLE_S
        if dip is None:
            return
        gpu = next((g.info.label for g in sample.gpus if g.info.uuid == dip.uuid), dip.uuid)
        text = dip.text(gpu)
        begun = time.strftime("%H:%M:%S", time.localtime(dip.began_s))
        if now_s < self._settled_s:
            self.missed += 1
            self.note = (f"{begun} {text}: not captured, because a capture was running or ended less than "
                         f"{SETTLE_S:.0f} s ago")
        elif self.done:
            self.note = f"{begun} {text}: not captured, because the maximum number of captures was reached"
        elif self._last_dip_s is not None and 0 <= now_s - self._last_dip_s < self.options.min_interval_s:
            self.note = (f"{begun} {text}: not captured, because the last capture was "
                         f"{(now_s - self._last_dip_s) / 60:.0f} min ago")
        else:
            self._request_capture(dip, begun, text)

    def _request_capture(self, dip: Dip, begun: str, text: str) -> None:
        self._dip_began_s = dip.began_s
        try:
            self._host.start_capture(CaptureRequest(self._host.options.capture_s, self.logdir,
                                                    reason=f"{text} (since {begun})"))
        except GputopError as error:
            self.note = f"{begun} {text}: not captured: {error.message}"
            return
        self.count += 1
        self._last_dip_s = dip.now_s
        self.note = f"{begun} {text}"

    def finish(self, record: CaptureRecord, reason: str) -> CaptureRecord:
        """A capture of ours has ended: say why it was made, and bound the folder."""
        notices = (f"automatic capture: {reason}", *held_before(record, self._dip_began_s), *record.notices)
        run = record.path if record.path.is_dir() else record.path.parent
        try:
            mark_removable(run, reason)
        except OSError as error:
            notices = (*notices, f"gputop will not remove this capture automatically: {error.strerror or error}")
        for old in remove_oldest(self.logdir):
            notices = (*notices, f"removed to free disk space: {old}")
        return replace(record, notices=notices)


# -- the bounded folder: the oldest runs are removed first, and only those gputop marked ------------

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

"""How a timeline comes to the screen: from the last capture, from a finding, or from a file on the command line."""

from __future__ import annotations

import gc
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from rich.text import Text
from textual.binding import BindingType

from gputop.core.errors import EXIT_OK, GputopError
from gputop.core.findings import Finding
from gputop.session.gpu_numbers import GpuNumbers
from gputop.text.units import printable
from gputop.timeline.model import Range
from gputop.tui.keys import key
from gputop.tui.screens.dialogs import Popup, capture_text, finding_parts
from gputop.tui.terminal.terminal_app import TerminalApp

if TYPE_CHECKING:
    from gputop.profiler.capture.records import CaptureRecord
    from gputop.timeline.reader import Timeline
    from gputop.tui.app import GputopApp
    from gputop.tui.terminal.preferences import Preferences

Open = Callable[[Sequence[str], threading.Event], "Timeline"]


def _in_worker(paths: Sequence[str], stop: threading.Event) -> Timeline:
    from gputop.timeline.worker import timeline_in_worker

    return timeline_in_worker(paths, stop)


@dataclass(slots=True)
class TraceFile:
    """A trace to look at, with what is known about it already; once read, its timeline stays for the next look."""

    paths: tuple[str, ...]
    title: str
    findings: tuple[Finding, ...] = ()
    report: Text = field(default_factory=lambda: Text("The trace is being analysed."))
    analysed: bool = False  # findings and report are there
    open: Open = _in_worker
    timeline: Timeline | None = None

    def read(self, stop: threading.Event) -> Timeline:
        """Blocks; raises GputopError for what cannot be read, and when ``stop`` is set."""
        return self.open(self.paths, stop)

    def analyse(self, stop: threading.Event) -> bool:
        """Fill in findings and report, which says why where it cannot be done; blocks. False if ``stop`` was set."""
        from gputop.diagnosis.worker import analyze_in_worker

        try:
            document = analyze_in_worker(self.paths, stop)
        except GputopError as error:
            if stop.is_set():
                return False
            self.report = Text(f"{printable(error.message)}\n{printable(error.fix)}")
            return True
        self.report = Text(document["report"])
        self.findings = tuple(Finding.from_json(f) for f in document["findings"])
        self.analysed = True
        return True

    def all_findings(self) -> Iterator[Finding]:
        """The findings and what they explain."""
        waiting = list(self.findings)
        while waiting:
            finding = waiting.pop(0)
            yield finding
            waiting += finding.consequences

    def finding(self, id_: str | None) -> Finding | None:
        """The finding of this id; of one that another explains, that other."""
        return next((f for f in self.findings if id_ in f.ids), None)

    @property
    def titles(self) -> dict[str, str]:
        return {f.id: f.title for f in self.all_findings()}


# -- where a finding is -----------------------------------------------------------------------

# Findings about a kind of work: the longest range of it stands for them.
_KINDS: dict[str, frozenset[str]] = {
    **dict.fromkeys(("communication_exposed", "allreduce_count", "allreduce_slow", "collective_waiting"),
                    frozenset({"collective"})),
    **dict.fromkeys(("copies_excessive", "copies_pageable", "sync_copies"),
                    frozenset({"h2d", "d2h", "d2d", "p2p", "copy"})),
    **dict.fromkeys(("tensor_cores_unused", "fp16_fallback", "dims_unaligned", "replica_imbalance",
                     "gpu0_oversubscribed"), frozenset({"compute"})),
}
_LONGEST = 2_000  # ranges of a GPU that are looked at
_QUOTED = re.compile(r"[“\"'`]([^”\"'`]{4,80})[”\"'`]|\b([A-Za-z_][\w:/.]*(?:::|_|/)[\w:/.]+)")


def place_of(timeline: Timeline, finding: Finding) -> int | Range | None:
    """Where a finding from a trace can be seen: the index of its costliest bubble, or a range that stands for it.

    A range is one that its text names, else the longest of the kind of work it is about. None: no such place.
    """
    for ids in ({finding.id}, finding.ids):
        for i, bubble in enumerate(timeline.bubbles):
            if bubble.finding in ids:
                return i
    before = timeline.window_ns[0] - 1
    for match in _QUOTED.finditer(f"{finding.why} {finding.action}"):
        found = timeline.search(match[1] or match[2], 0, before)
        if found is not None:
            return found
    kinds = _KINDS.get(finding.id)
    if kinds is None:
        return None
    gpus = [row for row in timeline.rows if row.kind == "gpu" and (not finding.gpus or row.gpu in finding.gpus)]
    longest = [r for row in gpus for r in timeline.ranges(row.key, *timeline.window_ns, _LONGEST) if r.kind in kinds]
    return max(longest, key=lambda r: r.end_ns - r.start_ns, default=None)


class FindingPopup(Popup):
    """The details of a finding; t goes to its place on the timeline."""

    BINDINGS: ClassVar[list[BindingType]] = [key("t", "place", "on the timeline", "its place on the timeline")]

    def __init__(self, finding: Finding, go: Callable[[Finding], None], numbers: GpuNumbers | None = None) -> None:
        keys = ["t: on the timeline"] if finding.origin == "trace" else []
        keys += ["y: copy the code"] if finding.snippet else []
        super().__init__(finding.title, *finding_parts(finding, numbers), keys=keys)
        self._finding, self._go = finding, go

    def action_place(self) -> None:
        if self._finding.origin == "trace":
            self.dismiss()
            self._go(self._finding)
        else:
            self.notify("This is from the live figures: it has no place in a trace.", timeout=4)


# -- from the monitor -------------------------------------------------------------------------


def open_last(app: GputopApp, finding: Finding | None = None) -> None:
    """The timeline of the monitor's last capture, at the place of ``finding``; what it says where there is no trace."""
    record = app.session.last_capture
    if record is None:
        from gputop.tui.monitor.messages import no_capture

        app.notify(no_capture(app.session), timeout=5)
    elif app.session.replayed_snapshot is not None or record.problem is not None:
        app.push_screen(Popup("Last capture", capture_text(record)))
    else:
        from gputop.tui.timeline.screen import TimelineScreen

        app.trace = trace_of(record, app.trace)
        app.push_screen(TimelineScreen(app.trace, finding))


def trace_of(record: CaptureRecord, before: TraceFile | None) -> TraceFile:
    """The trace of a capture; ``before`` itself if it is of the same file, else that one is let go."""
    paths = (str(record.path),)
    if before is not None and before.paths == paths:
        return before
    if before is not None and before.timeline is not None:
        before.timeline.close()
    title = f"{record.path.parent.name}/{record.path.name}"  # a run folder of TensorBoard's is named after the time
    return TraceFile(paths, title, record.findings, capture_text(record), analysed=True)


# -- from the command line --------------------------------------------------------------------


class TimelineApp(TerminalApp):
    """Nothing but the timeline of some trace files."""

    TITLE = "gputop"
    CSS_PATH = "gputop.tcss"

    def __init__(self, trace: TraceFile, preferences: Preferences | None = None) -> None:
        super().__init__(preferences)
        self._trace = trace

    def on_mount(self) -> None:
        from gputop.tui.timeline.screen import TimelineScreen

        self.push_screen(TimelineScreen(self._trace), lambda _: self.exit(EXIT_OK))
        self.call_after_refresh(gc.freeze)  # as the monitor does: what is there by now stays


def show(paths: Sequence[str], preferences: Preferences | None = None) -> int:
    """Show the timeline of these files until the user has seen enough; returns the exit status."""
    trace = TraceFile(tuple(paths), ", ".join(Path(p).name or p for p in paths))
    status = TimelineApp(trace, preferences).run()
    return EXIT_OK if status is None else status

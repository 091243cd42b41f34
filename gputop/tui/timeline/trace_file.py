"""A trace that is shown as a timeline: its files, its findings and its report; the timeline once it has been read."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from msgspec import Struct, field
from rich.text import Text

from gputop.core.errors import GputopError
from gputop.core.findings import Finding
from gputop.text.units import printable

if TYPE_CHECKING:
    from gputop.diagnosis.worker import Diagnosis
    from gputop.profiler.capture.records import CaptureRecord
    from gputop.timeline.read_timeline import Timeline

OnRows = Callable[["Timeline"], None]
OnDiagnosis = Callable[["Diagnosis"], None]
Open = Callable[[Sequence[str], threading.Event, OnRows, "OnDiagnosis | None"], "Timeline"]


class TraceFile(Struct):
    """A trace with its findings, if they are known; once its timeline has been read it is kept."""

    paths: tuple[str, ...]
    title: str
    findings: tuple[Finding, ...] = ()
    report: Text = field(default_factory=lambda: Text("The trace is being analyzed."))
    analyzed: bool = False  # findings and report are there
    open: Open | None = None  # in place of a worker
    timeline: Timeline | None = None

    def read(self, stop: threading.Event, on_rows: OnRows) -> Timeline:
        """Read the timeline; blocks. ``on_rows`` is called with its rows, before the rest of it is there. Fills in
        findings and report where they are not known. Raises GputopError where that fails or ``stop`` is set."""
        from gputop.timeline.timeline_worker import timeline_in_worker

        try:
            return (self.open or timeline_in_worker)(self.paths, stop, on_rows, None if self.analyzed else self._take)
        except GputopError as error:
            if not self.analyzed and not stop.is_set():
                self.report = Text(f"{printable(error.message)}\n{printable(error.fix)}")
            raise

    def _take(self, diagnosis: Diagnosis) -> None:
        self.report = Text(diagnosis.report)
        self.findings = diagnosis.analysis.findings
        self.analyzed = True

    def all_findings(self) -> Iterator[Finding]:
        """The findings and their consequences."""
        waiting = list(self.findings)
        while waiting:
            finding = waiting.pop(0)
            yield finding
            waiting += finding.consequences

    def finding(self, id_: str | None) -> Finding | None:
        """The finding with this id, or the one that has it as a consequence."""
        return next((f for f in self.findings if id_ in f.ids), None)

    @property
    def titles(self) -> dict[str, str]:
        return {f.id: f.title for f in self.all_findings()}


def trace_of(record: CaptureRecord, before: TraceFile | None) -> TraceFile:
    """The trace of a capture: ``before`` if it is of the same file; otherwise that one is closed."""
    paths = (str(record.path),)
    if before is not None and before.paths == paths:
        return before
    if before is not None and before.timeline is not None:
        before.timeline.close()
    from gputop.tui.screens.details import capture_text

    title = f"{record.path.parent.name}/{record.path.name}"  # TensorBoard names a run folder after the time
    return TraceFile(paths, title, record.findings, capture_text(record), analyzed=True)

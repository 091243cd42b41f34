"""A trace that is shown as a timeline: its files, its findings, their places and its report; the timeline
once it has been read."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from msgspec import Struct, field
from rich.text import Text

from gputop.advice.registry import rule_of
from gputop.analysis.steps.training_loops import BATCH_WAIT
from gputop.core.errors import GputopError
from gputop.core.findings import Culprit, Finding
from gputop.text.units import printable
from gputop.timeline.model import Range

if TYPE_CHECKING:
    from gputop.diagnosis.worker import Diagnosis
    from gputop.profiler.capture.records import CaptureRecord
    from gputop.timeline.read_timeline import Timeline


class TraceFile(Struct):
    """A trace with its findings, if they are known; once its timeline has been read it is kept."""

    paths: tuple[str, ...]
    title: str
    findings: tuple[Finding, ...] = ()
    report: Text = field(default_factory=lambda: Text("The trace is being analyzed."))
    analyzed: bool = False  # findings and report are there
    timeline: Timeline | None = None

    def read(self, stop: threading.Event, on_rows: Callable[[Timeline], None]) -> Timeline:
        """Read the timeline; blocks. ``on_rows`` is called with its rows, before the rest of it is there. Fills in
        findings and report where they are not known. Raises GputopError where that fails or ``stop`` is set."""
        from gputop.timeline.timeline_worker import timeline_in_worker

        try:
            return timeline_in_worker(self.paths, stop, on_rows, None if self.analyzed else self._take)
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


_MAX_RANGES = 2_000  # ranges of a row that are searched
_LATE_LAUNCHES = "launch_bound"
_BATCH_WAIT = re.compile(BATCH_WAIT)
_QUOTED = re.compile(r"[“\"'`]([^”\"'`]{4,80})[”\"'`]|\b([A-Za-z_][\w:/.]*(?:::|_|/)[\w:/.]+)")


def place_of(timeline: Timeline, finding: Finding) -> int | Range | None:
    """Location of a finding from a trace: the index of an idle gap, or a range that stands for it.

    First the place of a culprit: the finding's gap that its event ends or, on the host, lies in, else the event itself.
    Where no culprit has one, the costliest gap; else a range that its text names, else the longest of the kind of work
    it is about. None: no such place.
    """
    for culprit in finding.culprits:
        named = _event_of(timeline, culprit)
        gap = _gap_of(timeline, finding, culprit, named)
        if gap is not None or named is not None:
            return named if gap is None else gap
    for i, idle_gap in enumerate(timeline.idle_gaps):
        if idle_gap.finding in finding.ids:
            return i
    before = timeline.window_ns[0] - 1
    for match in _QUOTED.finditer(f"{finding.why} {finding.action}"):
        match_range = timeline.search(match[1] or match[2], 0, before)
        if match_range is not None:
            return match_range
    rule = rule_of(finding.id, "trace")
    if rule is None or not rule.events:
        return None
    kind = "gpu" if any(row.kind == "gpu" for row in timeline.rows) else "thread"
    rows = [row for row in timeline.rows if row.kind == kind and (not finding.gpus or row.gpu in finding.gpus)]
    longest = [r for row in rows for r in timeline.ranges(row.key, *timeline.window_ns, _MAX_RANGES)
               if r.kind in rule.events]
    # Other threads' work for the input may be longer than the training loop's own wait for it.
    return max(longest, key=lambda r: (_BATCH_WAIT.match(r.name) is not None, _length_ns(r)), default=None)


def gap_before(timeline: Timeline, finding: Finding, event: Range) -> tuple[int, int] | None:
    """Idle time of the GPU that this event of a finding about late launches ends."""
    number = timeline.rows[event.row].gpu
    gpu = next((row.key for row in timeline.rows if row.kind == "gpu" and row.gpu == number), None)
    if finding.id != _LATE_LAUNCHES or gpu is None:
        return None
    gap = timeline.coverage.next_gap(gpu, event.start_ns, 1, back=True)
    return gap if gap is not None and gap[1] == event.start_ns else None


def _length_ns(span: Range) -> int:
    return span.end_ns - span.start_ns


def place_of_row(timeline: Timeline, table: str, row: Sequence[object]) -> Range | None:
    """Location of a row of a capture's tables: the longest segment of that name on the critical path, else the first
    event that its longest text names, else the path's longest segment of that kind."""
    texts = [cell for cell in row if isinstance(cell, str) and cell]
    path = next((path_row for path_row in timeline.rows if path_row.kind == "path"), None)
    if table == "Path" and texts and path is not None:
        segments = [r for r in timeline.ranges(path.key, *timeline.window_ns, _MAX_RANGES)
                    if r.name.startswith(texts[0])]
        named = max((r for r in segments if r.name.endswith(texts[-1])), key=_length_ns, default=None)
        beside = named or timeline.search(texts[-1], 0, timeline.window_ns[0] - 1)
        return beside or max(segments, key=_length_ns, default=None)
    return timeline.search(max(texts, key=len), 0, timeline.window_ns[0] - 1) if texts else None


def _event_of(timeline: Timeline, culprit: Culprit) -> Range | None:
    """The event of a culprit; of several that begin on the host together the one of its name."""
    if culprit.at_s is None:
        return None
    at_ns = round(culprit.at_s * 1e9)
    kind = "stream" if culprit.gpu is not None else "stage" if culprit.kind == "stage" else "thread"
    events = [r for row in timeline.rows if row.kind == kind and row.gpu == culprit.gpu
              if (r := timeline.at(row.key, at_ns)) is not None and r.start_ns == at_ns]
    return next((r for r in events if culprit.name in r.name or culprit.name in r.tf_op), events[0] if events else None)


def _gap_of(timeline: Timeline, finding: Finding, culprit: Culprit, event: Range | None) -> int | None:
    """The idle gap of the finding that is this culprit's: the one in which its line ran, or that its event ends."""
    for i, gap in enumerate(timeline.idle_gaps):
        if gap.finding not in finding.ids:
            continue
        if any(line.line == culprit.name for line in gap.python) if culprit.kind == "line" else event is not None and (
                gap.ends == (event.row, event.index) if culprit.gpu is not None else
                min(gap.end_ns, event.end_ns) > max(gap.start_ns, event.start_ns)):
            return i
    return None

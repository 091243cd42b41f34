"""Store of a session's results: the live advice, the captures with their findings, the events, all findings merged.

The merged findings are replaced, never changed in place. Two threads refresh them, the sampler's and the
capture's; a lock keeps them apart.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace

from gputop.advice.merge import merge_findings
from gputop.core.findings import Advice, Finding, ranked
from gputop.core.samples import NodeSample
from gputop.profiler.capture.records import CaptureRecord, Server
from gputop.session.event_log import EventLog
from gputop.session.gpu_numbers import GpuNumbers, numbers_of, on_node, unknown

if TYPE_CHECKING:
    from gputop.advice.live.user_rules import HeldConditions
    from gputop.ranks.model import RasReport
    from gputop.replay.snapshot_document import Snapshot
    from gputop.telemetry.history import History

LIVE_RULES_PERIOD_S = 2.0  # their windows are 10 s and longer
MAX_CAPTURES = 50  # an analysis takes some hundred kB
MAX_COMPARED = 20  # what a comparison needs of a trace takes up to some megabytes


class FindingStore:
    """Live advice, captures and merged findings of one session."""

    def __init__(self, clock: Callable[[], float], snapshot: Snapshot | None = None) -> None:
        """``snapshot``: a replayed one; its findings and its capture stand in for those of this session."""
        self.live = Advice()
        self.findings: tuple[Finding, ...] = ()
        self.events = EventLog()
        self.last_capture: CaptureRecord | None = None  # or the one that was opened since
        self.captures: tuple[CaptureRecord, ...] = ()  # analyzed ones, of this session or opened, oldest first
        self.captures_this_run: tuple[CaptureRecord, ...] = ()  # by this session, analyzed or not
        self.baseline: CaptureRecord | None = None  # "A", the capture that later ones are compared with
        self.gpu_numbers = unknown("no capture yet")  # which GPUs of this node the GPUs of the last capture are
        self._compared: tuple[Path, ...] = ()  # captures whose traces need not be read for a comparison, newest last
        self._clock = clock
        self._numbers: dict[Path, GpuNumbers] = {}  # those of each capture of this session
        self._frozen = snapshot is not None
        self._held: HeldConditions = {}  # by the user's own live rules
        self._opened = False  # the last capture was opened by the user, who wants to see it
        self._earlier = False  # the last capture is not of the job that runs now
        self.rules_ran_s = 0.0  # time of the sample on which the live rules ran last
        self._lock = threading.Lock()
        if snapshot is not None:
            self.live, self.findings, self.last_capture = snapshot.live, snapshot.findings, snapshot.capture
            if snapshot.capture is not None:
                self.captures = (snapshot.capture,)
                self.events.note_record(snapshot.capture)

    def run_live_rules(self, history: History, sample: NodeSample, interval_s: float,
                       ranks: RasReport | None = None, unprotected: tuple[int, ...] | None = None,
                       profiled: Mapping[int, float] | None = None) -> None:
        """Update the live advice, every 2 s at most; a replayed snapshot keeps its own. ``unprotected`` and
        ``profiled``: see :class:`~gputop.advice.live.node_view.NodeView`."""
        wait_s = LIVE_RULES_PERIOD_S - 0.5 * min(1.0, interval_s)  # ticks jitter
        if self._frozen or 0 <= sample.time_s - self.rules_ran_s < wait_s:
            return
        from gputop.advice.live.advise import live_advice

        self.rules_ran_s = sample.time_s
        self.live = live_advice(history, sample, self.live.findings, ranks, self._held, unprotected, profiled)
        self.refresh()

    def add_capture(self, record: CaptureRecord, servers: Sequence[Server], sample: NodeSample | None) -> None:
        """Add a finished capture of these servers; ``sample`` tells which GPUs of the node it means."""
        self._numbers[record.path] = numbers_of(record, servers, sample)
        self.captures_this_run = (*self.captures_this_run, record)[-MAX_CAPTURES:]
        self.open_capture(record, opened=False)

    def open_capture(self, record: CaptureRecord, *, opened: bool = True) -> None:
        """Show this capture: its findings, tables and timeline are those of the last capture from now on."""
        self._opened = opened
        self.gpu_numbers = self._numbers.get(record.path, unknown("the capture is from another session"))
        self.last_capture = record
        if record.problem is None:
            self.keep_capture(record)
        self.refresh()

    def keep_capture(self, record: CaptureRecord) -> None:
        if record.compared is not None:
            self._compared = (*(path for path in self._compared if path != record.path), record.path)[-MAX_COMPARED:]
        others = (one for one in self.captures if one.path != record.path)
        self.captures = tuple(map(self._bounded, sorted((*others, record), key=lambda one: one.time_s)))[-MAX_CAPTURES:]
        self.captures_this_run = tuple(map(self._bounded, self.captures_this_run))

    def capture_read(self, record: CaptureRecord) -> None:
        """An earlier capture has been read for a comparison: put what is known of it now in the place of what was."""
        self.keep_capture(record)
        if self.last_capture is not None and self.last_capture.path == record.path:
            self.last_capture = record
        if self.baseline is not None and self.baseline.path == record.path:
            self.baseline = record
        self.captures_this_run = tuple(record if one.path == record.path else one for one in self.captures_this_run)

    def _bounded(self, record: CaptureRecord) -> CaptureRecord:
        """The record without its data for a comparison, unless it is among the last ones read: so memory is bounded.
        A comparison then reads the trace again."""
        if record.compared is None or record.path in self._compared:
            return record
        return replace(record, compared=None)

    def drop_capture(self, path: Path) -> None:
        """Forget a capture whose files are deleted; where it was shown, the newest other one is."""
        self.captures = tuple(one for one in self.captures if one.path != path)
        self.captures_this_run = tuple(one for one in self.captures_this_run if one.path != path)
        if self.baseline is not None and self.baseline.path == path:
            self.baseline = None
        if self.last_capture is not None and self.last_capture.path == path:
            analyzed = [one for one in self.captures if one.analysis is not None]
            if analyzed:
                self.open_capture(analyzed[-1])
            else:
                self.last_capture, self.gpu_numbers = None, unknown("no capture yet")
                self.refresh()

    def mark_earlier(self, earlier: bool) -> None:
        """Mark whether the last capture is of another job than the one that runs now: its findings then stand behind
        the live ones, or before them if it was opened, and neither explains the other."""
        if earlier != self._earlier:
            self._earlier = earlier
            self.refresh()

    def refresh(self) -> None:
        """Merge the findings of the last capture with the live ones."""
        with self._lock:
            record = self.last_capture
            age_s = self._clock() - record.time_s if record else 0.0
            analysis = record.analysis if record else None
            numbers = self.gpu_numbers
            traced = tuple(on_node(f, numbers) for f in record.findings) if record else ()
            if self._earlier:
                now, before = ranked(self.live.findings), ranked(traced)
                self.findings = (*before, *now) if self._opened else (*now, *before)
            else:
                self.findings = merge_findings(traced, self.live.findings, age_s,
                                               allocators_known=analysis is not None and bool(analysis.memory),
                                               job_gpus=numbers.by_ordinal.values() if numbers.by_ordinal else None)
            self.events.note_findings(self.findings, self._clock())

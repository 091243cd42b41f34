"""What is being watched now: the sampler, its history, profiler servers, captures, findings.

A :class:`Session` owns every thread that touches hardware, sockets or files. Views read its
attributes, which are replaced and never changed in place, and ask it for actions; after each
change it calls the listeners, from whichever thread the change was made on.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from signal import Signals
from typing import TYPE_CHECKING, Literal

from gputop.advice.merge import merge_findings
from gputop.core.errors import GputopError
from gputop.core.findings import Advice, Finding
from gputop.core.samples import NodeSample, ProcessSample
from gputop.profiler.capture.records import CaptureRecord, CaptureStatus, Server
from gputop.replay.player import Player
from gputop.session.captures import analyse, capture_and_analyse, choose_servers, find_servers, servers_label
from gputop.session.event_log import EventLog
from gputop.session.gpu_numbers import GpuNumbers, gpu_numbers, job_process, on_node, unknown
from gputop.session.options import Options
from gputop.sources.base import Source
from gputop.telemetry.sampler import Sampler

if TYPE_CHECKING:
    from gputop.replay.snapshot import Snapshot
    from gputop.session.auto_capture.controller import AutoCapture
    from gputop.telemetry.history import History
    from gputop.telemetry.step_period import StepPeriodEstimate

DISCOVERY_PERIOD_S = 10.0
STEP_PERIOD_UPDATE_S = 10.0
CAPTURES_KEPT = 50  # an analysis is some hundred kB

Change = Literal["sample", "servers", "capture", "failed"]


class Session:
    """Everything that is known about the node, kept up to date by background threads."""

    def __init__(self, source: Source | Player, options: Options | None = None,
                 clock: Callable[[], float] = time.time, replayed_snapshot: Snapshot | None = None,
                 sampler: Sampler | None = None) -> None:
        """``replayed_snapshot``: a snapshot to show; its findings and its capture take the place of own ones.

        ``sampler``: of this source, started already, which waits to be connected.
        """
        self.source = source
        self.player = source if isinstance(source, Player) else None
        if self.player is not None:
            clock = self.player.now_s
        self.options = options or Options()
        self.sample: NodeSample | None = None
        self.history: History | None = None
        self.live = Advice()
        self.findings: tuple[Finding, ...] = ()
        self.step_period: StepPeriodEstimate | None = None  # None: not looked for yet
        self.events = EventLog()
        self.servers: tuple[Server, ...] = ()
        self.servers_known = False
        self.discovery_notes: tuple[str, ...] = ()
        self.status: CaptureStatus | None = None
        self.last_capture: CaptureRecord | None = None
        self.captures: tuple[CaptureRecord, ...] = ()  # those of this session that could be analysed, oldest first
        self.baseline: CaptureRecord | None = None  # the one that later ones are compared with, "A"
        self.gpu_numbers = unknown("no capture yet")  # what the GPUs of the last capture are on this node
        self.failure: GputopError | None = None
        self.auto_capture: AutoCapture | None = None
        if self.options.dips is not None and self.player is None:
            from gputop.session.auto_capture.controller import AutoCapture

            self.auto_capture = AutoCapture(self, self.options.dips)
        self.replayed_snapshot = replayed_snapshot
        if replayed_snapshot is not None:
            self.live, self.findings = replayed_snapshot.live, replayed_snapshot.findings
            self.last_capture = replayed_snapshot.capture
            self.servers, self.servers_known = replayed_snapshot.servers, True
            if replayed_snapshot.capture is not None:
                self.captures = (replayed_snapshot.capture,)
                self.events.note_record(replayed_snapshot.capture)
        self.clock = clock
        self.started_s = clock()
        self._listeners: list[Callable[[Change], None]] = []
        self._attached: list[str] = list(self.options.attach)
        self._stop_capture = threading.Event()
        self._captured: frozenset[str] = frozenset()  # addresses of the running or last capture
        self._started = False
        self._backfill_expected = False  # the sampler still has to say what it knows of the time before
        self._pending: list[NodeSample] = []  # those that came meanwhile
        self._report_servers = False  # somebody waits for the outcome of the next look
        self._rules_ran_s = 0.0  # time of the sample the live rules last looked at
        self._period_checked_s = 0.0  # and of the one the rhythm was last looked for
        self._closing = threading.Event()
        self._look_now = threading.Event()
        self._findings_lock = threading.Lock()
        self._sampler: Sampler | Player
        self._sampling = sampler is not None
        if isinstance(source, Player):
            source.connect(self.on_sample, self._on_failure)
            self._sampler = source
        else:
            self._sampler = sampler or Sampler(source, self.options.interval_s)

    # -- life ---------------------------------------------------------------------------------

    def listen(self, listener: Callable[[Change], None]) -> None:
        """Call ``listener`` after each change, from the thread that made it."""
        self._listeners.append(listener)

    def start(self) -> None:
        """Start the threads; once is enough."""
        if self._started:
            return
        self._started = True
        self._backfill_expected = self.player is None
        if not isinstance(self._sampler, Player):
            self._sampler.connect(self.on_sample, self._on_failure, self.on_backfill)
        if not self._sampling:
            self._sampler.start()
        if self.player is not None:
            return  # what runs on this node now has nothing to do with the recording
        threading.Thread(target=self._watch_servers, name="gputop-discovery", daemon=True).start()
        if self.auto_capture is not None:
            self.auto_capture.start()

    def close(self) -> None:
        """Stop everything; returns within half a second, whatever a driver or a server is doing."""
        self._closing.set()
        self._look_now.set()
        self._stop_capture.set()
        if self.auto_capture is not None:
            self.auto_capture.close()
        self._sampler.stop()

    def _notify(self, change: Change) -> None:
        if not self._closing.is_set():
            for listener in self._listeners:
                listener(change)

    # -- samples ------------------------------------------------------------------------------

    @property
    def known_gpus(self) -> NodeSample | None:
        """The newest sample; before the first, the GPUs alone where they have been seen and the host has not."""
        return self.sample or (None if isinstance(self._sampler, Player) else self._sampler.first_gpus)

    @property
    def interval_s(self) -> float:
        return self._sampler.interval_s

    def set_interval(self, seconds: float) -> None:
        self._sampler.set_interval(seconds)

    def on_sample(self, sample: NodeSample) -> None:
        """Bring history and findings up to this sample; called by the sampler's thread."""
        past = self.clock() - sample.time_s > 5 * max(1.0, self.interval_s)
        if self.history is None and (self._backfill_expected or not past):
            self.sample = sample
            self._notify("sample")  # the first frame need not wait for the import of NumPy
            if self._backfill_expected:
                self._pending.append(sample)  # history begins with the past
                return
        self._keep(sample)
        if past:
            return  # the past of a recording: nothing to judge or to draw yet
        self._run_live_rules(sample)
        if self.auto_capture is not None:
            self.auto_capture.look()
        self._notify("sample")
        self._update_step_period(sample)

    def on_backfill(self, samples: Sequence[NodeSample]) -> None:
        """Begin the history with what the source knows of the time before the first sample."""
        self._backfill_expected = False
        early, self._pending = self._pending, []
        for sample in (*(s for s in samples if not early or s.time_s < early[0].time_s), *early):
            self._keep(sample)
        if early:
            self._run_live_rules(early[-1])
            self._notify("sample")

    def _keep(self, sample: NodeSample) -> None:
        if self.history is None:
            from gputop.telemetry.history import History

            self.history = History()
        self.history.append(sample)
        self.events.note_sample(sample)
        self.sample = sample

    def _run_live_rules(self, sample: NodeSample) -> None:
        if self.replayed_snapshot is not None:
            return
        if 0 <= sample.time_s - self._rules_ran_s < 1.0 - 0.5 * min(1.0, self.interval_s):
            return
        from gputop.advice.live.advise import live_advice

        assert self.history is not None
        self._rules_ran_s = sample.time_s
        self.live = live_advice(self.history, sample, self.live.findings)
        self._refresh_findings()

    def _update_step_period(self, sample: NodeSample) -> None:
        """Look for the step's rhythm, now and then; it is on the screen with the next sample."""
        if self.replayed_snapshot is not None or 0 <= sample.time_s - self._period_checked_s < STEP_PERIOD_UPDATE_S:
            return
        from gputop.telemetry.step_period import estimate_step_period

        assert self.history is not None
        self._period_checked_s = sample.time_s
        self.step_period = estimate_step_period(self.history)

    def _on_failure(self, error: GputopError) -> None:
        self.failure = error
        self._notify("failed")

    def _refresh_findings(self) -> None:
        with self._findings_lock:  # the sampler's and the capture's thread both come here
            record = self.last_capture
            age_s = self.clock() - record.time_s if record else 0.0
            analysis = record.analysis if record else None
            numbers = self.gpu_numbers
            known = bool(numbers.by_ordinal)
            traced = tuple(on_node(f, numbers) for f in record.findings) if record else ()
            self.findings = merge_findings(traced, self.live.findings, age_s,
                                           allocators_known=bool(analysis and analysis.get("memory")),
                                           job_gpus=numbers.by_ordinal.values() if known else None)
            self.events.note_findings(self.findings, self.clock())

    # -- profiler servers ---------------------------------------------------------------------

    def attach(self, address: str) -> str:
        """Watch a profiler server, or several as ``--attach`` takes them; the first, as it is written here.

        Raises GputopError (usage) for what cannot be an address.
        """
        from gputop.profiler.client import parse_address
        from gputop.profiler.workers import addresses

        parsed = addresses([address]) or (parse_address(address),)  # nothing at all is no address either
        self._attached += [one for one in parsed if one not in self._attached]
        self._report_servers = True
        self._look_now.set()
        return parsed[0]

    def _watch_servers(self) -> None:
        while not self._closing.is_set():
            if self.sample is not None or self._attached:
                self.update_servers()
            # Until the first sample there are no processes to look at: look again soon.
            self._look_now.wait(DISCOVERY_PERIOD_S if self.sample is not None else 0.1)
            self._look_now.clear()

    def update_servers(self) -> None:
        """Look once which profiler servers there are; blocks for as long as they take to answer."""
        busy = self._captured if self.status is not None and self.status.running else ()
        try:
            servers, notes = find_servers(tuple(self._attached), self.source.profiler_endpoints(),
                                          self.options.discover and not self.source.simulated, busy)
        except GputopError as error:
            servers, notes = (), (f"{error.message} {error.fix}",)
        except Exception as error:  # noqa: BLE001  thread boundary: the next look may go well
            servers, notes = (), (f"looking for profiler servers failed, a fault of gputop: {error!r}",)
        from gputop.text.redaction import command

        servers = tuple(replace(s, description=command(s.description)) for s in servers)
        changed = (servers, notes) != (self.servers, self.discovery_notes) or not self.servers_known
        self.servers, self.discovery_notes, self.servers_known = servers, notes, True
        if changed or self._report_servers:
            self._report_servers = False
            self._notify("servers")

    # -- capture ------------------------------------------------------------------------------

    def start_capture(self, *, force: bool = False, reason: str = "") -> None:
        """Start a capture in the background; raises GputopError where none can start.

        Where several servers were asked for, of all of them at once. ``force``: as long as asked,
        whatever it costs the job. ``reason``: why the black box wants it.
        """
        if self.player is not None:
            raise GputopError("this is a recording: there is no job to capture from", "Run gputop on the node itself.")
        if self.status is not None and self.status.running:
            raise GputopError("a capture is running", "Press x to stop it and keep what it has.")
        servers = choose_servers(self.servers)
        answering = [s for s in servers if s.problem is None]
        self._captured = frozenset(s.address for s in answering)
        self._stop_capture.clear()
        self._set_status(CaptureStatus("connecting", servers_label(answering), self.options.capture_s))
        threading.Thread(target=self._capture, args=(servers, servers_label(answering), force, reason),
                         name="gputop-capture", daemon=True).start()

    def stop_capture(self) -> bool:
        """End the running capture early, its data kept. False if there was none."""
        if self.status is None or not self.status.running:
            return False
        self._stop_capture.set()
        return True

    def _set_status(self, status: CaptureStatus) -> None:
        self.status = replace(status, time_s=self.clock())
        self.events.note_capture(self.status)
        self._notify("capture")

    def add_capture(self, record: CaptureRecord, servers: Sequence[Server]) -> None:
        """A capture of these servers has come to its end."""
        self.gpu_numbers = self._gpu_numbers(record, servers)
        self.last_capture = record
        if record.problem is None:
            self.captures = (*self.captures, record)[-CAPTURES_KEPT:]
        self._refresh_findings()

    def _gpu_numbers(self, record: CaptureRecord, servers: Sequence[Server]) -> GpuNumbers:
        sample = self.sample
        if record.analysis is None or sample is None:
            return unknown("no analysis of the capture, or no look at the node yet")
        if len(servers) != 1:
            return unknown("several workers were captured at once, each with its own numbers")
        server = servers[0]
        local = server.address.rpartition(":")[0] in ("localhost", "127.0.0.1", "[::1]")
        process = job_process(sample.processes, server.pid, local)
        return gpu_numbers(process, [g.info for g in sample.gpus], [g["gpu"] for g in record.analysis.get("gpus", ())],
                           whole_node=sample.gpus_unwatched == 0)

    def signal(self, process: ProcessSample, number: Signals) -> None:
        """Send a signal to a process of the last look; raises GputopError where it must not or cannot be sent."""
        if self.player is not None:
            raise GputopError("nothing was sent: this is a recording", "Its processes are not those of now.")
        if self.source.simulated:
            raise GputopError("nothing was sent: this process is simulated", "Run gputop without --demo.")
        from gputop.session.process_signals import send

        send(process, number)

    def set_baseline(self, record: CaptureRecord | None) -> None:
        """Make ``record`` the capture that later ones are compared with; None: no longer any."""
        self.baseline = record

    def _record(self, servers: Sequence[Server], asked_s: float, force: bool, reason: str) -> CaptureRecord:
        """Capture and analyse; raises GputopError where there is no trace."""
        box, logdir = self.auto_capture, self.options.logdir
        if box is None:
            return capture_and_analyse(servers, asked_s, logdir, self._stop_capture, self._closing, self._set_status,
                                       force)
        if reason and (before := box.snapshot(servers, self._set_status)) is not None:
            return box.finish(analyse(before, self._closing), reason)
        with box.paused():
            record = capture_and_analyse(servers, asked_s, box.logdir if reason else logdir, self._stop_capture,
                                         self._closing, self._set_status, force)
        return box.finish(record, reason) if reason else record

    def _capture(self, servers: Sequence[Server], name: str, force: bool, reason: str) -> None:
        asked_s = self.options.capture_s
        try:
            record = self._record(servers, asked_s, force, reason)
        except GputopError as error:
            self._set_status(CaptureStatus("failed", name, asked_s, message=error.message, fix=error.fix))
            return
        except Exception as error:  # noqa: BLE001  thread boundary: the next capture must be possible
            self._set_status(CaptureStatus("failed", name, asked_s, message=f"gputop's own fault: {error!r}",
                                           fix="Please report this; the job itself goes on."))
            return
        self.add_capture(record, servers)
        if record.problem is None:
            self._set_status(CaptureStatus("done", name, asked_s, record.took_s, str(record.path)))
        else:
            self._set_status(CaptureStatus("failed", name, asked_s, record.took_s,
                                           f"{record.problem.message} (the trace is kept: {record.path})",
                                           record.problem.fix))

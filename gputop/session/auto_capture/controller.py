"""The auto-capture: when a GPU dips, gputop captures by itself; seldom, and into a folder of bounded size.

It is called with each sample, and asks for a capture as a key press does. With ``before_s`` it keeps the servers
recording continuously, for a trace of the seconds before the dip.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from msgspec.structs import replace

from gputop.core.errors import GputopError, NoDataError
from gputop.core.samples import NodeSample
from gputop.profiler.capture.choose_workers import MAX_WORKERS
from gputop.profiler.capture.records import CaptureRecord, CaptureStatus, Server
from gputop.profiler.capture.request import CaptureQuestion, CaptureRequest, require_no_question
from gputop.session.auto_capture.dip_detector import Dip, Trigger
from gputop.session.auto_capture.retention import mark_removable, remove_oldest
from gputop.session.captures import choose_servers, record_of_workers, risk_question, server_question, servers_label
from gputop.session.options import AutoCaptureOptions, Options

if TYPE_CHECKING:
    from gputop.profiler.capture.choose_workers import Choice
    from gputop.profiler.xprof.continuous import Continuous
    from gputop.telemetry.history import History

FOLDER = "black-box"  # below the logdir
SETTLE_S = 15.0  # after a capture: it slows the job itself, and the job has to catch up
_CHECK_PERIOD_S = 1.0
_RETRY_DELAY_S = 60.0
_MIN_BEFORE_S = 2.0  # less of the time before is not worth what it costs the job
_NOT_YET = "no continuous recording yet: "
_MARGIN_S = 1.0  # a dip is seen a sample after it began


def existing_folder(path: Path) -> Path:
    """The folder itself, or the nearest above it that exists."""
    return next(folder for folder in (path.absolute(), *path.absolute().parents) if folder.is_dir())


def held_before(record: CaptureRecord, dip_s: float) -> tuple[str, ...]:
    """Notes on what the trace of a dip that began at ``dip_s`` (Unix time) holds, by its first and last event.

    Nothing where the trace was not analyzed, or does not tell when it was recorded.
    """
    trace = record.analysis.trace if record.analysis is not None else None
    if trace is None or trace.start_s is None:
        return ()
    before_s, after_s = dip_s - trace.start_s, trace.start_s + trace.window_s - dip_s
    if before_s <= 0:
        return (f"the trace holds nothing before the dip: it begins {-before_s:.1f} s after the dip did",)
    missing = f", but for {trace.unrecorded_s:.1f} s between its parts" if trace.unrecorded_s else ""
    return (f"the trace holds the {before_s:.1f} s before the dip began and {max(0.0, after_s):.1f} s after{missing}",)


class CaptureHost(Protocol):
    """Interface that the auto-capture needs of whoever captures for it."""

    options: Options

    @property
    def servers(self) -> tuple[Server, ...]: ...

    @property
    def status(self) -> CaptureStatus | None: ...

    def start_capture(self, request: CaptureRequest) -> CaptureQuestion | None:
        """Start a capture in the background; raises GputopError where none can start."""

    def choose_workers(self, servers: Sequence[Server]) -> Choice:
        """The few of many workers that are worth a capture."""


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
        self._lock = threading.Lock()  # whoever talks to servers that record all the time
        self._continuous: Continuous | None = None
        self._part_s: float | None = None  # how long they are let record before they hand it over
        self.recorded: Choice | None = None  # of many workers those that record all the time
        self._dip_began_s = 0.0  # of the dip that is captured, Unix time
        self._next_attempt_s = 0.0  # of the session's clock: the next attempt to record all the time
        self._given_up = options.before_s <= 0
        self._keep_s = options.before_s + _MARGIN_S  # seconds before this moment that are to be kept
        self._closing = threading.Event()

    @property
    def logdir(self) -> Path:
        return self._host.options.logdir / FOLDER

    @property
    def done(self) -> bool:
        """Return whether it has captured as often as it may."""
        return self.count >= self.options.max_captures

    def state(self) -> str:
        """State for people, what matters most first: "auto-capture 1/20: 11:02:07 GPU 3: SM active 31% for 5 s"."""
        on = self._continuous is not None and self._continuous.on
        missed = f", {self.missed} during captures" if self.missed else ""
        return (f"auto-capture {self.count}/{self.options.max_captures}{missed}{' recording' if on else ''}: "
                + (self.note or self.options.rule.text))

    # -- dips ---------------------------------------------------------------------------------

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
            self.note = (f"{begun} {text}: not captured: a capture was running or ended less than "
                         f"{SETTLE_S:.0f} s ago")
        elif self.done:
            self.note = f"{begun} {text}: not captured: the limit of captures is reached"
        elif self._last_dip_s is not None and 0 <= now_s - self._last_dip_s < self.options.min_interval_s:
            self.note = (f"{begun} {text}: not captured: the last capture was "
                         f"{(now_s - self._last_dip_s) / 60:.0f} min ago")
        else:
            self._request_capture(dip, begun, text)

    def _request_capture(self, dip: Dip, begun: str, text: str) -> None:
        self._dip_began_s = dip.began_s
        try:
            self._host.start_capture(self._request(f"{text} (since {begun})"))
        except GputopError as error:
            self.note = f"{begun} {text}: not captured, {error.message}"
            return
        self.count += 1
        self._last_dip_s = dip.now_s
        self.note = f"{begun} {text}"

    def _request(self, reason: str = "") -> CaptureRequest:
        return CaptureRequest(self._host.options.capture_s, self.logdir, reason=reason)

    def finish(self, record: CaptureRecord, reason: str) -> CaptureRecord:
        """A capture of ours has ended: say why it was made, and bound the folder."""
        notices = (f"automatic capture: {reason}", *held_before(record, self._dip_began_s), *record.notices)
        run = record.path if record.path.is_dir() else record.path.parent
        try:
            mark_removable(run, reason)
        except OSError as error:
            notices = (*notices, f"it will not be removed automatically: {error.strerror or error}")
        for old in remove_oldest(self.logdir):
            notices = (*notices, f"removed to free disk space: {old}")
        return replace(record, notices=notices)

    # -- the time before ----------------------------------------------------------------------

    def start(self) -> None:
        """Begin to record all the time, where that was asked for."""
        if not self._given_up:
            threading.Thread(target=self._record_continuously, name="gputop-auto-capture", daemon=True).start()

    def close(self) -> None:
        """Returns at once; the watchdog ends what a server still records."""
        self._closing.set()
        continuous = self._continuous
        if continuous is not None:
            continuous.abandon()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Nothing is recorded all the time while the block runs: a server bears one session."""
        with self._lock:
            self._end_recording()
            yield

    def fetch_preceding(self, servers: Sequence[Server],
                        on_status: Callable[[CaptureStatus], None]) -> CaptureRecord | None:
        """The trace of the time before, not analyzed yet; None where there is none. Blocks."""
        with self._lock:
            continuous = self._continuous
            if continuous is None or not continuous.on or not set(continuous.pids) <= {s.address for s in servers}:
                return None
            recorded = [s for s in servers if s.address in continuous.pids]
            missing = tuple(f"no continuous recording: {s.address}" for s in servers if s not in recorded)
            on_status(CaptureStatus("receiving", servers_label(recorded), self.options.before_s))
            try:
                record = self._fetch_recording(continuous, recorded)
            except GputopError as error:
                self.note = f"no trace of the time before the dip: {error.message}"
                return None
            finally:
                self._continuous = self.recorded = None
                self._next_attempt_s = self._clock() + SETTLE_S
        on_status(CaptureStatus("analyzing", record.address, record.asked_s, record.took_s))
        return replace(record, notices=(*record.notices, *missing))

    def _fetch_recording(self, continuous: Continuous, servers: Sequence[Server]) -> CaptureRecord:
        """Raises GputopError."""
        if len(servers) > 1:
            from gputop.profiler.capture import multi_worker

            captured = multi_worker.fetch_preceding(continuous, self.logdir)
            return record_of_workers(servers_label(servers), captured.plan.asked_s, captured, ())
        (result,) = continuous.snapshot(self.logdir, [socket.gethostname()]).values()
        if isinstance(result, GputopError):
            raise result
        return CaptureRecord(result.address, result.path, time.time(), result.asked_s, result.took_s,
                             (*result.errors, *result.warnings))

    def _record_continuously(self) -> None:
        while not self._closing.wait(_CHECK_PERIOD_S):
            status = self._host.status
            if self._given_up or (status is not None and status.begun):
                continue
            with self._lock:
                try:
                    self._maintain()
                except GputopError as error:
                    self._end_recording()
                    self._next_attempt_s = self._clock() + _RETRY_DELAY_S
                    self.note = f"no continuous recording: {error.message}"
                except Exception as error:  # noqa: BLE001  thread boundary: captures after a dip go on
                    self._end_recording()
                    self._given_up = True
                    self.note = f"no continuous recording: a bug in gputop: {error!r}"
        with self._lock:
            self._end_recording()

    def _maintain(self) -> None:
        """Begin to record, or have a part of it set aside; raises GputopError."""
        from gputop.profiler.xprof.continuous import Unsupported, is_full

        if self._continuous is not None and self._part_s is not None:
            if is_full(self._continuous.state(), self._part_s, self._trigger.any_low):
                self._continuous.set_aside(existing_folder(self.logdir), self._keep_s)
            return
        if self.done or self._clock() < self._next_attempt_s:
            return
        try:
            chosen = choose_servers(self._host.servers)
        except NoDataError as error:  # perhaps none yet: looked at again within a second
            self.note = self.note or f"{_NOT_YET}{error.message}"
            return
        if self.note.startswith(_NOT_YET):
            self.note = ""
        require_no_question(server_question(chosen, self._request()))
        try:
            self._begin_recording([s for s in chosen if s.problem is None])
        except Unsupported:
            self._given_up = True
            raise

    def _begin_recording(self, servers: Sequence[Server]) -> None:
        from gputop.profiler.addresses import process_of
        from gputop.profiler.capture.footprint import job_pid
        from gputop.profiler.xprof.continuous import Continuous, Unsupported

        listening = [s for s in servers if process_of(s.address) is not None]
        if listening:
            raise Unsupported(f"PyTorch's profiler in process {listening[0].pid} keeps no recording",
                              "Without --dip-before gputop captures after a dip.")
        self.recorded = self._host.choose_workers(servers) if len(servers) > MAX_WORKERS else None
        if self.recorded is not None:
            servers = [s for s in servers if s.address in self.recorded.chosen]
        if (question := risk_question(servers, self._request())) is not None:
            self._given_up = True
            raise question.refusal()
        continuous = Continuous([(s.address, job_pid(s.address, s.pid)) for s in servers])
        if self._part_s is None:
            continuous.start()  # first: a server without it is not to be probed for nothing
            continuous.close()
            self._part_s = self._max_part_s(continuous)
        self._continuous = continuous
        continuous.start()
        for error in continuous.failed.values():
            self.note = f"no continuous recording: {error.message}"
        if self._closing.is_set():
            continuous.close()

    def _max_part_s(self, continuous: Continuous) -> float:
        """Seconds that all may record at a time, by a probe of each, as for any capture; raises GputopError."""
        from gputop.profiler.capture.multi_worker import max_safe_duration
        from gputop.profiler.ways import recorder_of

        recorders = [recorder_of(address, continuous.pids[address]) for address in continuous.addresses]
        chosen, errors = max_safe_duration(recorders, seconds=2 * self._keep_s, logdir=self.logdir,
                                           stop=self._closing)
        continuous.failed |= errors
        if chosen.chosen_s < 2 * _MIN_BEFORE_S:
            self._given_up = True
            raise GputopError(f"only {chosen.chosen_s / 2:.1f} s before the dip could be kept: {chosen.why}")
        return chosen.chosen_s / 2

    def _end_recording(self) -> None:
        continuous, self._continuous, self.recorded = self._continuous, None, None
        if continuous is not None:
            continuous.close()

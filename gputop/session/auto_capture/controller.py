"""The black box: a GPU dips, and gputop captures by itself; seldom, in a bounded folder, and told.

Fed with each sample. What it wants captured it asks the session for, as a key would. With
``before_s`` it keeps the servers recording all the time, for a trace of the seconds before the dip.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from gputop.core.errors import GputopError
from gputop.profiler.capture.records import CaptureRecord, CaptureStatus, Server
from gputop.session.auto_capture.dip_detector import Dip, Trigger
from gputop.session.auto_capture.dip_rules import Rule
from gputop.session.auto_capture.retention import mark, prune
from gputop.session.captures import choose_servers, record_of_workers, servers_label

if TYPE_CHECKING:
    from gputop.profiler.capture.continuous import Continuous
    from gputop.session.session import Session

FOLDER = "black-box"  # below the logdir
SETTLE_S = 15.0  # after a capture: it slows the job itself, and the job has to catch up
_TICK_S = 1.0
_RETRY_S = 60.0
_LEAST_BEFORE_S = 2.0  # less of the time before is not worth what it costs the job


@dataclass(frozen=True, slots=True)
class DipOptions:
    """What ``--on-dip`` and its like decided. ``before_s`` is 0 where nothing is to be recorded all the time."""

    rule: Rule
    every_s: float = 600.0
    most: int = 20
    before_s: float = 0.0


class AutoCapture:
    """Watches a session for dips. ``note`` is the last thing worth telling, ``count`` the captures so far."""

    def __init__(self, session: Session, options: DipOptions) -> None:
        self.options = options
        self.note = ""
        self.count = 0
        self._session = session
        self._trigger = Trigger(options.rule)
        self._last_s: float | None = None
        self._busy_until_s = 0.0
        self._lock = threading.Lock()  # whoever talks to servers that record all the time
        self._continuous: Continuous | None = None
        self._keep_s: float | None = None  # how long they are let record before it is dropped
        self._not_before_s = 0.0  # of the session's clock: the next attempt to record all the time
        self._given_up = options.before_s <= 0
        self._closing = threading.Event()

    @property
    def logdir(self) -> Path:
        return self._session.options.logdir / FOLDER

    @property
    def done(self) -> bool:
        """Whether it has captured as often as it may."""
        return self.count >= self.options.most

    def state(self) -> str:
        """For people, what matters most first: "auto-capture 1/20: 11:02:07 GPU 3: SM active 31% for 5 s"."""
        on = self._continuous is not None and self._continuous.on
        return (f"auto-capture {self.count}/{self.options.most}{' recording' if on else ''}: "
                + (self.note or self.options.rule.text))

    # -- dips ---------------------------------------------------------------------------------

    def look(self) -> None:
        """Look at the newest sample; called by the sampler's thread, returns at once."""
        session = self._session
        if session.history is None or session.sample is None:
            return
        dip = self._trigger.look(session.history)
        now_s = session.sample.time_s
        if session.status is not None and session.status.running:
            self._busy_until_s = now_s + SETTLE_S
        if dip is None or now_s < self._busy_until_s:
            return
        gpu = next((g.info.label for g in session.sample.gpus if g.info.uuid == dip.uuid), dip.uuid)
        text = dip.text(gpu)
        at = time.strftime("%H:%M:%S", time.localtime(dip.began_s))
        if self.done:
            self._tell(f"{at} {text}: not captured, that was often enough")
        elif self._last_s is not None and 0 <= now_s - self._last_s < self.options.every_s:
            self._tell(f"{at} {text}: not captured, the last was {(now_s - self._last_s) / 60:.0f} min ago")
        else:
            self._ask(dip, at, text)

    def _ask(self, dip: Dip, at: str, text: str) -> None:
        try:
            self._session.start_capture(reason=f"{text} (since {at})")
        except GputopError as error:
            self._tell(f"{at} {text}: not captured, {error.message}")
            return
        self.count += 1
        self._last_s = dip.now_s
        self._tell(f"{at} {text}")

    def _tell(self, note: str) -> None:
        self.note = note

    def finish(self, record: CaptureRecord, reason: str) -> CaptureRecord:
        """A capture of ours has ended: say why it was made, and bound the folder."""
        notices = (f"captured by itself: {reason}", *record.notices)
        run = record.path if record.path.is_dir() else record.path.parent
        try:
            mark(run, reason)
        except OSError as error:
            notices = (*notices, f"it will not be removed by itself: {error.strerror or error}")
        for old in prune(self.logdir):
            notices = (*notices, f"removed to make room: {old}")
        return replace(record, notices=notices)

    # -- the time before ----------------------------------------------------------------------

    def start(self) -> None:
        """Begin to record all the time, where that was asked for."""
        if not self._given_up:
            threading.Thread(target=self._record, name="gputop-auto-capture", daemon=True).start()

    def close(self) -> None:
        """Returns at once; the guard ends what a server still records."""
        self._closing.set()
        continuous = self._continuous
        if continuous is not None:
            continuous.abandon()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Nothing is recorded all the time while the block runs: a server bears one session."""
        with self._lock:
            self._end()
            yield

    def snapshot(self, servers: Sequence[Server], on_status: Callable[[CaptureStatus], None]) -> CaptureRecord | None:
        """The trace of the time before, not analysed yet; None where there is none. Blocks."""
        with self._lock:
            continuous = self._continuous
            if continuous is None or not continuous.on or not set(continuous.pids) <= {s.address for s in servers}:
                return None
            recorded = [s for s in servers if s.address in continuous.pids]
            missing = tuple(f"not recorded all the time: {s.address}" for s in servers if s not in recorded)
            on_status(CaptureStatus("receiving", servers_label(recorded), self.options.before_s))
            try:
                record = self._fetch(continuous, recorded)
            except GputopError as error:
                self._tell(f"no trace of the time before: {error.message}")
                return None
            finally:
                self._continuous = None
                self._not_before_s = self._session.clock() + SETTLE_S
        on_status(CaptureStatus("analysing", record.address, record.asked_s, record.took_s))
        return replace(record, notices=(*record.notices, *missing))

    def _fetch(self, continuous: Continuous, servers: Sequence[Server]) -> CaptureRecord:
        """Raises GputopError."""
        if len(servers) > 1:
            from gputop.profiler.capture.multi_worker import fetch_preceding

            captured = fetch_preceding(continuous, self.logdir)
            return record_of_workers(servers_label(servers), captured.plan.asked_s, captured, ())
        (result,) = continuous.snapshot(self.logdir, [socket.gethostname()]).values()
        if isinstance(result, GputopError):
            raise result
        return CaptureRecord(
            result.address, result.path, time.time(), result.asked_s, result.took_s,
            (*result.errors, *result.warnings), notices=(f"the {result.asked_s:.0f} s before, recorded all the time",))

    def _record(self) -> None:
        while not self._closing.wait(_TICK_S):
            status = self._session.status
            if self._given_up or (status is not None and status.running):
                continue
            with self._lock:
                try:
                    self._go_on()
                except GputopError as error:
                    self._end()
                    self._not_before_s = self._session.clock() + _RETRY_S
                    self._tell(f"not recording all the time: {error.message}")
                except Exception as error:  # noqa: BLE001  thread boundary: captures after a dip go on
                    self._end()
                    self._given_up = True
                    self._tell(f"not recording all the time, gputop's own fault: {error!r}")
        with self._lock:
            self._end()

    def _go_on(self) -> None:
        """Begin, look after, or drop what is recorded; raises GputopError."""
        from gputop.profiler.capture.continuous import Unsupported, drop_reason

        if self._continuous is not None and self._keep_s is not None:
            kept = self._continuous.kept()
            if drop_reason(kept, self._keep_s) and (not self._trigger.suspects or kept.seconds > 2 * self._keep_s):
                self._continuous.drop()
            return
        if self.done or self._session.clock() < self._not_before_s:
            return
        servers = [s for s in choose_servers(self._session.servers) if s.problem is None]
        try:
            self._begin(servers)
        except Unsupported:
            self._given_up = True
            raise

    def _begin(self, servers: Sequence[Server]) -> None:
        from gputop.profiler.capture.continuous import Continuous
        from gputop.profiler.capture.footprint import job_pid

        continuous = Continuous([(s.address, job_pid(s.address, s.pid)) for s in servers])
        if self._keep_s is None:
            continuous.start()  # first: a server without it is not to be probed for nothing
            continuous.close()
            self._keep_s = self._bearable_s(continuous)
        self._continuous = continuous
        continuous.start()
        for error in continuous.failed.values():
            self._tell(f"not recording all the time: {error.message}")
        if self._closing.is_set():
            continuous.close()

    def _bearable_s(self, continuous: Continuous) -> float:
        """How many seconds of all may be kept, by a probe of each, as for any capture; raises GputopError."""
        from gputop.profiler.capture.multi_worker import max_safe_duration

        servers = [(address, continuous.pids[address]) for address in continuous.addresses]
        chosen, errors = max_safe_duration(servers, seconds=2 * self.options.before_s, logdir=self.logdir,
                                           stop=self._closing)
        continuous.failed |= errors
        if chosen.chosen_s < 2 * _LEAST_BEFORE_S:
            self._given_up = True
            raise GputopError(f"only {chosen.chosen_s / 2:.1f} s could be kept: {chosen.why}")
        return chosen.chosen_s / 2

    def _end(self) -> None:
        continuous, self._continuous = self._continuous, None
        if continuous is not None:
            continuous.close()

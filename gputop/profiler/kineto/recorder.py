"""Records a running PyTorch process that is a client, by kineto's daemon mode."""

from __future__ import annotations

import os
import queue
import re
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import BinaryIO

from msgspec import Struct, field
from msgspec.structs import replace

from gputop.core.errors import GputopError
from gputop.core.files import UnsafeFile, open_regular
from gputop.core.proc import environ_of, read_maps
from gputop.profiler.discovery import rank_of
from gputop.profiler.kineto import guard
from gputop.profiler.kineto.clients import DaemonClient, client_of, is_same
from gputop.profiler.kineto.daemon import Daemon, DaemonEvent, serving
from gputop.profiler.kineto.folder import TRACE_PREFIX, SocketFolder, is_of_gputop
from gputop.profiler.kineto.protocol import RecordingConfig
from gputop.profiler.recording import (
    CaptureResult,
    EmptyTrace,
    Phase,
    Progress,
    RecorderLimits,
    RecordingOrder,
    TraceLost,
    end_of_recorded,
    pidfd_of,
)
from gputop.profiler.storage import MAX_COPY_BYTES, RunFolder, stops_copy

ENDING = ".pt.trace.json"  # as torch.profiler's own handler for TensorBoard names them
POLL_PERIOD_S = 5.0  # kineto's, unless a base config says otherwise, as gputop's does
_OWN_POLL_PERIOD_S = 1.0
_POLL_TIMEOUT_S = 2 * POLL_PERIOD_S + 5
_LEAD_S = 2.0  # beyond a poll: kineto looks at its requests once a second, and a loaded node is late
_WRITE_TIMEOUT_S = 10.0  # for the file, after the recording and a poll; while the job builds it the polls say so
_BUILD_TIMEOUT_S = 180.0
# Where kineto's thread is too late for the begin, on an overloaded node, it drops the request, and says from then on
# that it is ready; but also while it makes CUPTI ready, for the first time in a process.
_STARTS_WITHIN_S, _READY_POLLS, _ATTEMPTS = 2.5, 2, 3
# From the request to the begin: kineto's thread looks once a second, and may be late on a loaded node. Where it has to
# make CUPTI ready it gets the time that it takes by itself.
_LEAD_MS, _CUDA_LEAD_MS = 1250, 2000
_PERIOD_S, _FILE_PERIOD_S = 0.125, 0.02  # the file comes a second after the recording's end, or later
_FULL_AFTER_S = re.compile(r"\d{1,4}\.\d{3}")
# Resident memory of the job while 60,000 to 230,000 events became a trace (torch 2.13 on the CPU): 4.7 to 4.8 kB an
# event with the shapes of its inputs, 1.7 to 1.8 kB without.
_EVENT_BYTES, _BARE_EVENT_BYTES = 5000, 2000
HOLD_S_PER_EVENT = 0.5 / 25_000  # torch.profiler's end: 0.53 to 0.56 s for 27,000 events (torch 2.13 on the CPU)
_MAX_HOLD_S = 1.0
_SCAN_BYTES = 1 << 20
_EDGE_BYTES = 1 << 16  # at either end of a trace
_EVENT = re.compile(rb'"ph": "X",\s{0,16}"cat": "([a-z_]{1,40})"')
_TIME = re.compile(rb'"ts": (\d{1,16}(?:\.\d{1,9})?)')
_BASE = re.compile(rb'"baseTimeNanoseconds": (\d{1,20})')
_DEVICE, _CALLS = (b"kernel", b"gpu_memcpy", b"gpu_memset"), (b"cuda_runtime", b"cuda_driver")
_OVERLAP = 128  # bytes that two pieces share, so that no event is cut

_USUAL = RecorderLimits(job_bytes_per_byte=0.0, job_bytes_per_event=_EVENT_BYTES,
                        bare_bytes_per_event=_BARE_EVENT_BYTES, overview=False, stoppable=False, probe_s=0.2,
                        least_s=0.05, ending=ENDING, lead_s=_OWN_POLL_PERIOD_S + _LEAD_S, instead=guard.PASTE)
_MOST_DEVICE_EVENTS_PER_S = 500_000  # of a process: a GPU begins a kernel every two microseconds


class KinetoRecorder:
    """A :class:`~gputop.profiler.recording.Recorder` of one process, ``pid``."""

    def __init__(self, pid: int) -> None:
        self.pid: int = pid
        self.address = f"pid:{pid}"
        self._rest_s = 0.0  # at the end of a recording, in which no operator is recorded

    @cached_property  # finding the client reads many files, and each progress asks
    def limits(self) -> RecorderLimits:
        client = client_of(self.pid)
        if client is None:
            return _USUAL
        if client.holds:
            held = f"at the end of a longer capture, torch.profiler would pause the job for more than {_MAX_HOLD_S:g} s"
            return replace(_USUAL, events=_MAX_HOLD_S / HOLD_S_PER_EVENT, events_limit=held)
        limits = replace(_USUAL, most_device_events_per_s=_MOST_DEVICE_EVENTS_PER_S * _uses_cuda(self.pid))
        if client.folder is not None and is_of_gputop(client.folder):
            return limits
        return replace(limits, lead_s=POLL_PERIOD_S + _LEAD_S)

    def round_trip_s(self) -> float:
        self._client()
        return 0.0

    def record(self, recording: RecordingOrder, on_progress: Callable[[Progress], None],
               stop: threading.Event) -> CaptureResult:
        """``stop`` ends the wait for the job, and the copy; a recording that has begun is waited for."""
        client = self._client()
        self._rest_s = guard.rest_s()
        rank = (rank_of(environ_of(self.pid)) or "").replace(" ", "")[:32]
        host = recording.host_name or socket.gethostname()
        assert client.folder is not None
        with (RunFolder.create(recording.logdir, f"{host}_{rank}" if rank else host, recording.run, ENDING) as run,
              SocketFolder.open(self.pid, client.folder, client.uid) as folder,
              serving(folder, stop.is_set) as daemon, daemon.events_of(self.pid) as events,
              pidfd_of(self.pid) as pidfd):
            if not is_same(client):
                raise GputopError(f"process {self.pid} has ended", "Nothing was recorded.")
            return _Take(client, daemon, recording, on_progress, stop, events, self._rest_s, pidfd).run(run)

    def count_events(self, path: Path) -> tuple[int, int]:
        window = self.window_ns(path)
        seconds = (window[1] - window[0]) / 1e9 if window else 0.0
        with open_regular(path, follow_links=False) as file:
            return count_events(file, seconds / (seconds + self._rest_s) if seconds else 1.0)

    def window_ns(self, path: Path) -> tuple[int, int] | None:
        try:
            with open_regular(path, follow_links=False) as file:
                window = window_ns(file)
        except OSError:
            return None
        return window and (window[0], max(window[0] + 1, window[1] - round(1e9 * self._rest_s)))

    def _client(self) -> DaemonClient:
        """Raises GputopError where the process cannot be recorded now."""
        client = client_of(self.pid)
        if client is None:
            raise GputopError(f"no PyTorch process {self.pid} is waiting for gputop, or the process has ended",
                              f"To prepare the process (gputop asks first): gputop capture {self.pid}")
        if client.folder is None:
            raise unsafe(self.pid)
        return client


def _uses_cuda(pid: int) -> bool:
    try:
        return b"/libcuda.so" in read_maps(pid)
    except OSError:  # nobody knows
        return True


def unsafe(pid: int) -> GputopError:
    """The error of a client that any local user can command."""
    return GputopError(
        f"process {pid} runs with KINETO_USE_DAEMON but without KINETO_IPC_SOCKET_DIR. Any user of this node could "
        "then make it overwrite files, so gputop does not use this mode",
        "Restart it with gputop run, or without KINETO_USE_DAEMON so that gputop can turn it on safely.")


class _Take(Struct):
    """One recording of one process."""

    client: DaemonClient
    daemon: Daemon
    recording: RecordingOrder
    on_progress: Callable[[Progress], None]
    stop: threading.Event
    events: queue.SimpleQueue[DaemonEvent]
    rest_s: float
    pidfd: int  # of the process, -1: none
    token: str = field(default_factory=lambda: os.urandom(16).hex())  # in what the guard reports of this recording
    recorded_s: float = 0.0  # less than was asked for where it had its number of events before
    tells_end: bool = False
    fetched_s: float = 0.0  # monotonic
    begins_s: float = 0.0  # monotonic, when it was fetched: no clock that is set moves it
    busy_s: float = 0.0  # of the last poll that said that it records or builds
    polled: bool = False
    ready_polls: int = 0  # since the recording was to have begun
    attempts: int = 1

    def run(self, run: RunFolder) -> CaptureResult:
        """Raises GputopError."""
        pid, seconds, folder = self.client.pid, self.recording.seconds, self.daemon.folder
        config, self.recorded_s = self._config(), seconds
        file = config.written(self.client.own_pid)
        began = asked_s = time.monotonic()
        wait_s = max(0.0, config.start_ms / 1000 - time.time()) + _ATTEMPTS * (_POLL_TIMEOUT_S + seconds)
        request = guard.GuardRequest(self.token, file, seconds, wait_s, self.rest_s, self.recording.most_events)
        self.tells_end = "ends_s" in guard.when_idle(
            lambda: guard.ask_guard(self.daemon, self.client, request, self.events))
        try:
            self.daemon.register(pid, config)
            while not (self.fetched_s and folder.folder.has(file)):
                self._step(began)
                if not self.fetched_s:
                    self._check_fetched(asked_s)
                elif self.ready_polls >= _READY_POLLS and self.attempts < _ATTEMPTS and not folder.folder.has(file):
                    self.attempts, self.ready_polls, self.fetched_s = self.attempts + 1, 0, 0.0
                    asked_s = time.monotonic()
                    self.daemon.register(pid, config)
                else:
                    self._check_written(file)
        except ValueError as error:
            raise GputopError(str(error), "Start the job with gputop run.") from None
        finally:
            guard.let_go(self.daemon, self.client)
        written_s = time.time()
        fetched_s = written_s - (time.monotonic() - self.fetched_s)
        saving = Progress("saving", time.monotonic() - began)
        self.on_progress(saving)
        stopped = stops_copy(self.stop, lambda: self.on_progress(saving))
        with self._open(file) as source:
            size = os.fstat(source.fileno()).st_size
            path = run.adopt(source, Path(f"/proc/{pid}/root{folder.path}/{file}"), stopped)
        folder.folder.remove(file)
        with open_regular(path, follow_links=False) as trace:
            empty = not any(_events(trace))
            trace.seek(0)
            window = window_ns(trace)
        # Neither the wait for the begin nor that for the end of a recording that was full takes anything of the job.
        began_s = fetched_s if window is None else min(max(window[0] / 1e9, fetched_s), written_s - seconds)
        took_s = max(self.recorded_s, written_s - began_s - seconds + self.recorded_s)
        if empty:
            raise EmptyTrace(f"PyTorch's profiler recorded no activity in process {pid} for {seconds:g} s",
                             "Either the process is not training, or it is waiting for a GPU with seconds of queued "
                             f"work; in that case, capture for longer. The trace is in {path}", took_s)
        return CaptureResult(path, self.recorded_s, took_s, size, False, sent_s=written_s - took_s)

    def _config(self) -> RecordingConfig:
        order = self.recording
        return RecordingConfig(
            self.daemon.folder.path / f"{TRACE_PREFIX}{os.urandom(6).hex()}.json",
            max(1, round(1000 * (order.seconds + self.rest_s))), round((order.start_ns or 0) / 1e6),
            _CUDA_LEAD_MS if _uses_cuda(self.client.pid) else _LEAD_MS, shapes=order.shapes)

    def _check_fetched(self, began: float) -> None:
        """Raises GputopError where the process does not take the request."""
        pid, waited_s = self.client.pid, time.monotonic() - began
        if not is_same(self.client):
            raise GputopError(f"process {pid} has ended", "Nothing was recorded.")
        if self.polled and waited_s > _BUILD_TIMEOUT_S:
            raise GputopError(f"process {pid} has been busy with another recording for {waited_s:.0f} s",
                              "Its own torch.profiler or another tool is recording it. gputop recorded nothing.")
        if not self.polled and waited_s > _POLL_TIMEOUT_S:
            raise GputopError(
                f"PyTorch's profiler in process {pid} is not polling for requests, although its socket is open",
                f"The job is stopped, or the profiler's thread is hanging. Run py-spy dump --pid {pid} --native.")

    def _check_written(self, file: str) -> None:
        """Raises TraceLost where the file will not come."""
        pid, now = self.client.pid, time.monotonic()
        if not is_same(self.client) and not self.daemon.folder.folder.has(file):
            raise end_of_recorded(pid, self.pidfd) or TraceLost(
                f"process {pid} ended before its trace was written",
                "The trace is lost. Capture earlier, or for a shorter time.")
        due_s = self._over_s() + POLL_PERIOD_S + _WRITE_TIMEOUT_S
        if now > max(due_s, self.busy_s + POLL_PERIOD_S + _WRITE_TIMEOUT_S) or now > due_s + _BUILD_TIMEOUT_S:
            raise TraceLost(f"process {pid} accepted the request but wrote no trace in {now - self.fetched_s:.0f} s",
                            "The process is still running. Its own torch.profiler was busy, the node is overloaded, or "
                            f"the process cannot write to {self.daemon.folder.path} (disk full?).")

    def _step(self, began: float) -> None:
        """Wait a moment for what the process sends; tells how far it is. Raises GputopError where it was stopped
        before it began."""
        got = []
        over = self.fetched_s and time.monotonic() > self._over_s()
        try:
            got.append(self.events.get(timeout=_FILE_PERIOD_S if over else _PERIOD_S))
            while True:
                got.append(self.events.get_nowait())
        except queue.Empty:
            pass
        now, seconds = time.monotonic(), self.recording.seconds
        for event in got:
            if event.report is not None:
                state, detail = guard.read_report(event.report, self.token) or ("", "")
                if state == "ending" and self.daemon.withdraw(self.client.pid):
                    guard.raise_unless(self.client.pid, "ready", "ending", "")
                if state == "full" and _FULL_AFTER_S.fullmatch(detail):
                    self.recorded_s = min(seconds, max(_FILE_PERIOD_S, float(detail)))
                continue
            self.polled = True
            if event.start_ms:
                self.fetched_s, self.ready_polls = now, 0
                self.begins_s = now + max(0.0, event.start_ms / 1000 - time.time())
                if self.tells_end:
                    guard.tell_end(self.daemon, self.client, event.start_ms / 1000 + seconds + self.rest_s)
            if not event.ready:
                self.busy_s, self.ready_polls = now, 0
            elif self.fetched_s and now > self.begins_s + _STARTS_WITHIN_S:
                self.ready_polls += 1
        over = self.fetched_s and now > self._over_s()
        phase: Phase = "receiving" if over else "recording" if self.fetched_s and now > self.begins_s else "connecting"
        self.on_progress(Progress(phase, now - began))
        if self.stop.is_set() and not self.fetched_s:
            raise GputopError("the capture was stopped before the job was recorded", "")

    def _over_s(self) -> float:
        """End of the recording (monotonic)."""
        return self.begins_s + self.recording.seconds + self.rest_s

    def _open(self, file: str) -> BinaryIO:
        """The file that the process wrote. Raises GputopError for anything but a regular file of its user."""
        try:
            return open_regular(file, MAX_COPY_BYTES, follow_links=False, owners=frozenset({self.client.uid}),
                                folder_fd=self.daemon.folder.folder.fd)
        except OSError as error:
            raise TraceLost(f"gputop rejected the trace of process {self.client.pid}: {error.strerror or error}",
                            "Somebody exchanged it." if isinstance(error, UnsafeFile) else "Capture again.") from None


def count_events(file: BinaryIO, share: float = 1.0) -> tuple[int, int]:
    """Events of the host and of devices in kineto's JSON, by their beginnings; not decoded. Of CUPTI's, which are
    recorded in the rest as well, this ``share``. Raises OSError."""
    counts = Counter(_events(file))
    devices, calls = (sum(counts.pop(category, 0) for category in of) for of in (_DEVICE, _CALLS))
    return counts.total() + round(share * calls), round(share * devices)


def _events(file: BinaryIO) -> Iterator[bytes]:
    """The categories of the events. Raises OSError."""
    rest = b""
    while data := file.read(_SCAN_BYTES):
        text = rest + data
        end = 0
        for match in _EVENT.finditer(text):
            end = match.end()
            yield match[1]
        rest = text[max(end, len(text) - _OVERLAP):]


def window_ns(file: BinaryIO) -> tuple[int, int] | None:
    """Window from the first event in the file to the recording's end, which stands last. Raises OSError."""
    head = file.read(_EDGE_BYTES)
    file.seek(max(0, os.fstat(file.fileno()).st_size - _EDGE_BYTES))
    base, first = _BASE.search(head), _TIME.search(head)
    last = _TIME.findall(file.read(_EDGE_BYTES))
    if base is None or first is None or not last:
        return None
    begin, end = (int(base[1]) + round(float(us) * 1000) for us in (first[1], last[-1]))
    return (begin, end) if begin < end < 1 << 63 else None

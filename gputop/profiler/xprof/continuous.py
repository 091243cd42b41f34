"""Continuous profiling: a server records all the time, so that a trace can hold the seconds before an event.

TensorFlow 2.21 and JAX have it (``StartContinuousProfiling``, ``GetSnapshot``, ``StopContinuousProfiling``). Their
recording is no ring buffer: it grows in the job's memory until it is fetched or dropped, and it slows the job
as any capture does. A process bears one recording at a time. So gputop fetches it every so often, whereupon the server
begins a new one, and sets the fetched part aside on disk until newer ones cover the time that is wanted. While a server
hands over a part it records nothing: 0.2 s (TensorFlow 2.21 and JAX 0.10 on an idle machine) to some seconds.
It is off unless the user asks for it.

A recording does not end by itself, not even when its client is gone. A separate process, the watchdog, ends the
recordings when gputop ends in whatever way, when gputop hangs, and when gputop itself failed to end one. Two cases
remain: a machine or cgroup that kills both processes at once, and a server the watchdog cannot reach. There the
recording continues until the job ends.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar

from msgspec import Struct

from gputop.core.errors import GputopError
from gputop.core.files import unnamed_file
from gputop.core.memory import resident_bytes
from gputop.core.own_program import child_command
from gputop.profiler.recording import CaptureResult
from gputop.profiler.storage import RunFolder
from gputop.profiler.xprof import messages
from gputop.profiler.xprof.client import is_busy, save_response, set_options
from gputop.profiler.xprof.outline import recorded_window_ns, session_window_ns
from gputop.profiler.xprof.probe import call_within, load_grpc
from gputop.trace.readers.xspace.recordings import join_recordings

if TYPE_CHECKING:
    import grpc

_CALL_TIMEOUT_S = 10.0
_SNAPSHOT_TIMEOUT_S = 120.0  # gathering takes several times as long as recording where events are many
# The job's memory may grow so much before what is recorded is dropped: JAX 0.10 on the CPU grew by 100 MB a
# second, TensorFlow 2.21 by 1 to 10.
MAX_GROWTH_BYTES = 1 << 30
WATCHDOG_TIMEOUT_S = 60.0  # without a sign of life from gputop: it is suspended, or hangs
_WATCHDOG_START_TIMEOUT_S = 30.0
MAX_KEPT_BYTES = 1 << 30  # of one server's parts on disk
_RESTOP_DELAY_S = 1.0  # after an end: for a start that was on its way
_LINE_BYTES = 4096

_T = TypeVar("_T")


class Unsupported(GputopError):
    """This server has no continuous profiling."""


def _call(address: str, method: str, request: Any, timeout_s: float = _CALL_TIMEOUT_S) -> Any:
    """The answer, its XSpace as bytes; raises grpc.RpcError."""
    def work(channel: grpc.Channel) -> Any:
        call = channel.unary_unary(
            f"/{messages.SERVICE}/{method}", request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=messages.RawProfileResponse.FromString)
        return call(request, timeout=timeout_s)

    return call_within(address, timeout_s, work)


def stop_continuous(address: str, timeout_s: float = _CALL_TIMEOUT_S) -> bool:
    """End a server's continuous recording, its data dropped. False where there was none or it does not answer."""
    grpc = load_grpc()
    try:
        _call(address, "StopContinuousProfiling", messages.StopContinuousProfilingRequest(), timeout_s)
    except grpc.RpcError:
        return False
    return True


def watchdog() -> None:
    """The watchdog process: :func:`run_watchdog` with the time it is given."""
    run_watchdog(float(sys.argv[1]))


def run_watchdog(timeout_s: float) -> None:
    """The watchdog's main: it ends all recordings when its input closes or stays silent for ``timeout_s``.

    Its input has one message a line: ``on ADDRESS``, ``off ADDRESS``, ``end ADDRESS`` to end that one now, ``q`` to
    exit; any other line is a heartbeat.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # it ends when its work is done, within seconds of gputop's end
    load_grpc()
    print("ready", flush=True)
    unfinished_line = b""
    recording: set[str] = set()
    while True:
        readable, _, _ = select.select([0], [], [], timeout_s)
        received = os.read(0, _LINE_BYTES) if readable else b""
        if not received:
            _stop_twice(recording)
            return
        *lines, unfinished_line = (unfinished_line + received).split(b"\n")
        for line in lines:
            word, _, address = line.decode().partition(" ")
            if word == "q":
                return
            if word == "on":
                recording.add(address)
            elif word in ("off", "end"):
                recording.discard(address)
                if word == "end":
                    _stop_twice([address])


def _stop_twice(addresses: Collection[str]) -> None:
    _in_parallel(stop_continuous, addresses)
    time.sleep(_RESTOP_DELAY_S)
    _in_parallel(stop_continuous, addresses)


def _in_parallel(step: Callable[[str], _T], addresses: Collection[str]) -> dict[str, _T]:
    """``step`` for each of them, at the same time; what it returned by address."""
    if len(addresses) < 2:
        return {address: step(address) for address in addresses}
    with ThreadPoolExecutor(len(addresses), "gputop-continuous") as threads:
        return dict(zip(addresses, threads.map(step, addresses), strict=True))


class _WatchdogProcess:
    """The watchdog process, seen from gputop."""

    def __init__(self) -> None:
        command = child_command("gputop.profiler.xprof.continuous:watchdog", str(WATCHDOG_TIMEOUT_S))
        self._busy = False  # ends what gputop could not
        try:
            # A session of its own: what ends the terminal's processes is not to end this one.
            self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                            stderr=subprocess.DEVNULL, start_new_session=True)
        except OSError as error:
            raise GputopError(f"the watchdog of continuous profiling could not be started: {error}",
                              "Leave out --dip-before: a trace of the seconds after a dip needs no watchdog.") from None
        assert self.process.stdout is not None
        timer = threading.Timer(_WATCHDOG_START_TIMEOUT_S, self.process.kill)
        timer.start()
        try:
            ready = self.process.stdout.readline() == b"ready\n"
        finally:
            timer.cancel()
        if not ready:
            self.process.kill()
            self.process.wait()
            raise GputopError("the watchdog of continuous profiling did not start: without it a recording could "
                              "outlive gputop",
                              "Leave out --dip-before: a trace of the seconds after a dip needs no watchdog.")

    def heartbeat(self) -> bool:
        """Send a sign of life; False if the watchdog is gone."""
        return self.send(".") and self.process.poll() is None

    def end(self, address: str) -> None:
        """Let the watchdog end a recording that gputop could not end; it tries for some seconds."""
        self._busy = True
        self.send(f"end {address}")

    def dismiss(self) -> None:
        self.send("q")
        self.leave()
        if not self._busy:
            try:
                self.process.wait(5.0)
            except subprocess.TimeoutExpired:
                self.process.kill()

    def leave(self) -> None:
        """Close its input: unless it was dismissed, it then ends all recordings."""
        with contextlib.suppress(OSError):
            assert self.process.stdin is not None
            self.process.stdin.close()

    def send(self, word: str) -> bool:
        try:
            assert self.process.stdin is not None
            self.process.stdin.write(word.encode() + b"\n")
            self.process.stdin.flush()
        except (OSError, ValueError):
            return False
        return True


class RecordingState(Struct, frozen=True):
    """Age of a recording, and growth of the job's memory since its begin."""

    seconds: float
    growth_bytes: int | None


class _Part(Struct, frozen=True):
    """Part of a recording that a server has handed over: a file without a name, so that nothing is left behind."""

    file: BinaryIO
    sent_s: float  # Unix time of the request that began it
    seconds: float
    size: int

    def data(self) -> bytes:
        """Raises OSError."""
        self.file.seek(0)
        return self.file.read(self.size)


class Continuous:
    """Continuous recording of one server, or of several at once. Not safe from several threads; :meth:`close` ends it.

    ``failed`` are those that are not, or no longer, recorded, and why: the others go on.
    """

    def __init__(self, servers: Sequence[tuple[str, int | None]], clock: Callable[[], float] = time.monotonic) -> None:
        """``servers``: address, and pid where known."""
        self.pids, self._clock = dict(servers), clock
        self.failed: dict[str, GputopError] = {}
        self._sent_s: dict[str, float] = {}  # Unix time of the request to begin the part under way
        self._parts: dict[str, list[_Part]] = {address: [] for address in self.pids}  # set aside, the oldest first
        self._watchdog: _WatchdogProcess | None = None
        self._since_s: float | None = None
        self._began_bytes: dict[str, int | None] = {}
        self._recording: set[str] = set()

    @property
    def on(self) -> bool:
        return self._since_s is not None

    @property
    def addresses(self) -> list[str]:
        """Addresses of the servers that are to be recorded and have not failed."""
        return [address for address in self.pids if address not in self.failed]

    def start(self) -> None:
        """Begin to record; raises GputopError where no server can be, Unsupported where none ever could."""
        if self._watchdog is None:
            self._watchdog = _WatchdogProcess()  # before: from the first moment on there is one
        tried = self.addresses
        for address, error in _in_parallel(self._start, tried).items():
            if error is not None:
                self.failed[address] = error
        if not self._recording:
            self._dismiss()
            errors = [self.failed[address] for address in tried or self.pids]
            raise next((e for e in errors if not isinstance(e, Unsupported)), errors[0])
        self._since_s = self._clock()

    def _start(self, address: str) -> GputopError | None:
        assert self._watchdog is not None
        grpc = load_grpc()
        request = messages.ProfileRequest(session_id="gputop", host_name="gputop", emit_xspace=True)
        set_options(request.opts)
        self._watchdog.send(f"on {address}")
        self._sent_s[address] = time.time()
        try:
            _call(address, "StartContinuousProfiling", request)
        except grpc.RpcError as error:
            if error.code().name == "DEADLINE_EXCEEDED":  # it may have begun all the same
                self._watchdog.end(address)
            else:
                self._watchdog.send(f"off {address}")  # what another records there is none of its business
            return _explain(address, error.code().name, error.details() or "")
        self._recording.add(address)
        self._began_bytes[address] = resident_bytes(self.pids[address])
        return None

    def state(self) -> RecordingState:
        """State of the recording; sends the watchdog a sign of life. Raises GputopError if the watchdog is gone."""
        assert self._since_s is not None and self._watchdog is not None
        if not self._watchdog.heartbeat():
            self.close()
            raise GputopError("the watchdog of continuous profiling was ended, and so is the recording", "")
        growths = []
        for address in self._recording:
            now, began = resident_bytes(self.pids[address]), self._began_bytes[address]
            if now is not None and began is not None:
                growths.append(max(0, now - began))
        return RecordingState(self._clock() - self._since_s, max(growths, default=None))

    def sent_s(self, address: str) -> float:
        """Unix time of the request that began the oldest part there is."""
        parts = self._parts[address]
        return parts[0].sent_s if parts else self._sent_s[address]

    window_ns = staticmethod(session_window_ns)

    def kept_s(self, address: str) -> float:
        """Seconds of a server's recording that are set aside."""
        return sum(part.seconds for part in self._parts[address])

    def set_aside(self, folder: Path, keep_s: float) -> None:
        """Let the servers hand over what they have and begin a new part; keep the last ``keep_s`` at least.

        The parts are files without names in ``folder``. A server that cannot do so is left out; raises
        GputopError where none is left.
        """
        assert self._since_s is not None
        recorded_s = self._clock() - self._since_s
        for address, error in _in_parallel(lambda address: self._hand_over(address, folder, recorded_s, keep_s),
                                           list(self._recording)).items():
            if error is not None:
                self._end(address)
                self.failed[address] = error
        if not self._recording:
            self.close()
            raise next(reversed(self.failed.values()))
        self._since_s = self._clock()

    def _hand_over(self, address: str, folder: Path, recorded_s: float, keep_s: float) -> GputopError | None:
        grpc = load_grpc()
        sent_s = time.time()
        try:
            response = _call(address, "GetSnapshot", messages.GetSnapshotRequest(), _SNAPSHOT_TIMEOUT_S)
        except grpc.RpcError as error:
            return _explain(address, error.code().name, error.details() or "")
        parts = self._parts[address]
        # Without its window a part could not be told from the next one.
        if recorded_window_ns(response.xspace) is not None:
            with contextlib.suppress(OSError):  # the disk is full: the parts there are will do
                file = unnamed_file(folder)
                file.write(response.xspace)
                file.flush()
                parts.append(_Part(file, self._sent_s[address], recorded_s, len(response.xspace)))
        while parts and (sum(part.seconds for part in parts[1:]) >= keep_s
                         or sum(part.size for part in parts) > MAX_KEPT_BYTES):
            parts.pop(0).file.close()
        self._sent_s[address], self._began_bytes[address] = sent_s, resident_bytes(self.pids[address])
        return None

    def snapshot(self, logdir: Path, names: Sequence[str], run: str | None = None,
                 ) -> dict[str, CaptureResult | GputopError]:
        """Fetch what is recorded, end the recording, and save it below ``logdir``; what came of each address.

        ``names`` are those of the traces, in the order of :attr:`addresses`; ``run`` is their folder, where
        they are to share one that exists.
        """
        assert self._since_s is not None
        since_s, named = self._since_s, dict(zip(self.addresses, names, strict=True))

        def fetch(address: str) -> CaptureResult | GputopError:
            try:
                return self._fetch(address, since_s, logdir, named[address], run)
            except GputopError as error:
                return error

        results = _in_parallel(fetch, named)
        self.close()
        return results

    def _fetch(self, address: str, since_s: float, logdir: Path, name: str, run: str | None) -> CaptureResult:
        grpc = load_grpc()
        with RunFolder.create(logdir, name, run) as folder:
            recorded_s = self._clock() - since_s + self.kept_s(address)
            sent_s, started = time.time(), time.monotonic()
            try:
                response = _call(address, "GetSnapshot", messages.GetSnapshotRequest(), _SNAPSHOT_TIMEOUT_S)
            except grpc.RpcError as error:
                raise _explain(address, error.code().name, error.details() or "") from None
            took_s = time.monotonic() - started
            self._end(address)  # it goes on recording after a snapshot
            response = messages.RawProfileResponse(empty_trace=response.empty_trace and not self._parts[address],
                                                   xspace=self._with_parts(address, response.xspace))
            return save_response(address, folder, response, recorded_s, took_s, sent_s)

    def _with_parts(self, address: str, newest: bytes) -> bytes:
        """Bytes that were handed over just now, joined with the parts that were set aside."""
        with contextlib.suppress(OSError):
            older = [part.data() for part in reversed(self._parts[address])]
            if not newest or recorded_window_ns(newest) is not None:
                return join_recordings([data for data in (newest, *older) if data]) if older else newest
        return newest

    def close(self) -> None:
        """End the recording, and the watchdog once that has worked."""
        self._since_s = None
        _in_parallel(self._end, list(self._recording))
        for parts in self._parts.values():
            for part in parts:
                part.file.close()
            parts.clear()
        self._dismiss()

    def abandon(self) -> None:
        """Leave the end of the recording to the watchdog; returns at once, for a gputop that is about to exit."""
        watchdog, self._watchdog, self._since_s = self._watchdog, None, None
        if watchdog is not None:
            watchdog.leave()

    def _end(self, address: str) -> None:
        self._recording.discard(address)
        watchdog = self._watchdog
        if not stop_continuous(address):
            self.failed[address] = GputopError(f"{address} is gone, or does not end its recording on request", "")
            if watchdog is not None:
                watchdog.end(address)
        elif watchdog is not None:
            watchdog.send(f"off {address}")

    def _dismiss(self) -> None:
        watchdog, self._watchdog = self._watchdog, None
        if watchdog is not None:
            watchdog.dismiss()


def _explain(address: str, code: str, details: str) -> GputopError:
    if code == "UNIMPLEMENTED":
        return Unsupported(f"{address} has no continuous profiling (TensorFlow 2.21 and JAX have)",
                           "The trace is then of the seconds after a dip.")
    if is_busy(code, details):
        return GputopError(f"{address} is busy: another profiling session is running in that process",
                           "Wait for it to end. One that a killed gputop left behind ends with the job.")
    detail = f": {details[:300]}" if details else ""
    return GputopError(f"{address} answered {code} to continuous profiling{detail}", "See the job's own output.")


def is_full(recorded: RecordingState, max_s: float, any_low: bool) -> bool:
    """Return whether a part should be set aside now.

    Not while a GPU may be about to dip (``any_low``): nothing of the dip is to be missing, unless it takes too long.
    """
    too_large = recorded.growth_bytes is not None and recorded.growth_bytes > MAX_GROWTH_BYTES
    return (too_large or recorded.seconds >= max_s) and (not any_low or recorded.seconds >= 2 * max_s)

"""Continuous profiling: a server that records all the time, so that the seconds before an event can be had.

TensorFlow 2.21 and JAX have it (``StartContinuousProfiling``, ``GetSnapshot``, ``StopContinuousProfiling``). Their
recording is no ring: it grows until it is fetched or dropped, in the job's memory, and slows the job
as any capture does. So it is dropped and begun anew every so often, which costs little, and it is never
on without being asked for.

It does not end by itself, not even when the client is gone. A process of its own, the guard, sees to that:
it ends the recording when gputop ends, in whatever way, or stands still. What is left is a machine or cgroup
that kills both at once, or a guard that cannot reach the server any more: then the recording goes on until
the job ends.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gputop.errors import GputopError
from gputop.profiler import messages
from gputop.profiler.client import TRACER_LEVELS, CaptureResult, is_busy, save_response
from gputop.profiler.footprint import resident_bytes
from gputop.profiler.probe import load_grpc, open_channel
from gputop.profiler.storage import RunFolder
from gputop.text import bytes_

_CALL_TIMEOUT_S = 10.0
_SNAPSHOT_TIMEOUT_S = 120.0  # gathering takes several times as long as recording where events are many
# The job's memory may grow so much before what is recorded is dropped: JAX 0.10 on the CPU grew by 100 MB a
# second, TensorFlow 2.21 by 1 to 10.
MOST_GROWTH_BYTES = 1 << 30
GUARD_PATIENCE_S = 60.0  # without a sign of life from gputop: it is suspended, or hangs
_GUARD_START_S = 30.0
# As gputop.trace.worker: the user's working directory may not shadow modules.
_GUARD = """\
import sys
sys.path[:] = [p for p in sys.path if p] + [sys.argv[1]]
from gputop.profiler.continuous import guard
guard(sys.argv[2], float(sys.argv[3]))
"""


class Unsupported(GputopError):
    """This server has no continuous profiling."""


def _call(address: str, method: str, request: Any, timeout_s: float = _CALL_TIMEOUT_S) -> Any:
    """The answer, its XSpace as bytes; raises grpc.RpcError."""
    with open_channel(address) as channel:
        call = channel.unary_unary(
            f"/{messages.SERVICE}/{method}", request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=messages.RawProfileResponse.FromString)
        return call(request, timeout=timeout_s)


def stop_continuous(address: str, timeout_s: float = _CALL_TIMEOUT_S) -> bool:
    """End a server's continuous recording, its data dropped. False where there was none or it does not answer."""
    grpc = load_grpc()
    try:
        _call(address, "StopContinuousProfiling", messages.StopContinuousProfilingRequest(), timeout_s)
    except grpc.RpcError:
        return False
    return True


def guard(address: str, patience_s: float) -> None:
    """The guard's main: ends the recording once its stdin ends or stays silent for ``patience_s``."""
    import os
    import select
    import signal

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # it ends when its work is done, within seconds of gputop's end
    load_grpc()
    print("ready", flush=True)
    while True:
        readable, _, _ = select.select([0], [], [], patience_s)
        said = os.read(0, 64) if readable else b""
        if b"q" in said:
            return
        if not said:
            stop_continuous(address)
            time.sleep(1.0)  # a start that was on its way
            stop_continuous(address)
            return


class _Guard:
    """The guard as its owner sees it."""

    def __init__(self, address: str) -> None:
        command = [sys.executable, "-c", _GUARD, str(Path(__file__).resolve().parents[2]), address,
                   str(GUARD_PATIENCE_S)]
        try:
            # A session of its own: what ends the terminal's processes is not to end this one.
            self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                            stderr=subprocess.DEVNULL, start_new_session=True)
        except OSError as error:
            raise GputopError(f"the guard of continuous profiling could not be started: {error}",
                              "Leave out --dip-before: a trace of the seconds after a dip needs none.") from None
        assert self.process.stdout is not None
        timer = threading.Timer(_GUARD_START_S, self.process.kill)
        timer.start()
        try:
            ready = self.process.stdout.readline() == b"ready\n"
        finally:
            timer.cancel()
        if not ready:
            self.process.kill()
            self.process.wait()
            raise GputopError("the guard of continuous profiling did not start: without it the recording could outlive "
                              "gputop", "Leave out --dip-before: a trace of the seconds after a dip needs none.")

    def alive(self) -> bool:
        """Give a sign of life; False where the guard is gone."""
        return self._say(b".") and self.process.poll() is None

    def dismiss(self) -> None:
        self._say(b"q")
        with contextlib.suppress(OSError):
            assert self.process.stdin is not None
            self.process.stdin.close()
        try:
            self.process.wait(5.0)
        except subprocess.TimeoutExpired:
            self.process.kill()

    def _say(self, word: bytes) -> bool:
        try:
            assert self.process.stdin is not None
            self.process.stdin.write(word)
            self.process.stdin.flush()
        except (OSError, ValueError):
            return False
        return True


@dataclass(frozen=True, slots=True)
class Kept:
    """How a recording stands: for how long it has been on, and by how much the job has grown since."""

    seconds: float
    growth_bytes: int | None


class Continuous:
    """Continuous recording of one server. Not safe from several threads at once; :meth:`close` ends it."""

    def __init__(self, address: str, pid: int | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self.address, self._pid, self._clock = address, pid, clock
        self._guard: _Guard | None = None
        self._since_s: float | None = None
        self._began_bytes: int | None = None

    @property
    def on(self) -> bool:
        return self._since_s is not None

    def start(self) -> None:
        """Begin to record; raises Unsupported, or GputopError where the server is busy or gone."""
        if self._guard is None:
            self._guard = _Guard(self.address)  # before: from the first moment on there is one
        grpc = load_grpc()
        request = messages.ProfileRequest(session_id="gputop", host_name="gputop", emit_xspace=True)
        options = request.opts
        options.version = 1
        options.host_tracer_level, options.device_tracer_level, options.python_tracer_level = TRACER_LEVELS
        options.include_dataset_ops = options.enable_hlo_proto = True
        try:
            _call(self.address, "StartContinuousProfiling", request)
        except grpc.RpcError as error:
            if error.code().name == "DEADLINE_EXCEEDED":  # it may have begun all the same
                stop_continuous(self.address)
            self._dismiss()
            raise _explain(self.address, error.code().name, error.details() or "") from None
        self._since_s, self._began_bytes = self._clock(), resident_bytes(self._pid)

    def kept(self) -> Kept:
        """How much there is to be had now; a sign of life for the guard. Raises GputopError where the guard is gone."""
        assert self._since_s is not None and self._guard is not None
        if not self._guard.alive():
            self.close()
            raise GputopError("the guard of continuous profiling was ended: so is the recording", "")
        now = resident_bytes(self._pid)
        growth = None if now is None or self._began_bytes is None else max(0, now - self._began_bytes)
        return Kept(self._clock() - self._since_s, growth)

    def drop(self) -> None:
        """Drop what is recorded and begin anew; raises GputopError."""
        self._stop()
        self.start()

    def snapshot(self, logdir: Path, host: str) -> CaptureResult:
        """Fetch what is recorded as a trace below ``logdir``, and end the recording; raises GputopError."""
        assert self._since_s is not None
        grpc = load_grpc()
        run = RunFolder.create(logdir, host)
        recorded_s, sent_s, started = self._clock() - self._since_s, time.time(), time.monotonic()
        try:
            response = _call(self.address, "GetSnapshot", messages.GetSnapshotRequest(), _SNAPSHOT_TIMEOUT_S)
            took_s = time.monotonic() - started
            self.close()  # it goes on recording after a snapshot
            return save_response(self.address, run, response, recorded_s, took_s, sent_s)
        except grpc.RpcError as error:
            self.close()
            raise _explain(self.address, error.code().name, error.details() or "") from None
        finally:
            run.discard()

    def close(self) -> None:
        """End the recording, and the guard when that has worked."""
        if self._since_s is not None:
            self._stop()
        self._dismiss()

    def abandon(self) -> None:
        """Leave the end of it to the guard: at once, where gputop is on its way out."""
        guard_, self._guard, self._since_s = self._guard, None, None
        if guard_ is not None and guard_.process.stdin is not None:
            with contextlib.suppress(OSError):
                guard_.process.stdin.close()

    def _stop(self) -> None:
        self._since_s = None
        if not stop_continuous(self.address):
            # Gone, or it does not answer now: the guard tries again, and then ends.
            self.abandon()

    def _dismiss(self) -> None:
        guard_, self._guard = self._guard, None
        if guard_ is not None:
            guard_.dismiss()


def _explain(address: str, code: str, details: str) -> GputopError:
    if code == "UNIMPLEMENTED":
        return Unsupported(f"{address} has no continuous profiling (TensorFlow 2.21 and JAX have)",
                           "The trace is then of the seconds after a dip.")
    if is_busy(code, details):
        return GputopError(f"{address} is busy: another profiling session is running in that process",
                           "Wait for it to end. One that a killed gputop left behind ends with the job.")
    said = f": {details[:300]}" if details else ""
    return GputopError(f"{address} answered {code} to continuous profiling{said}", "See the job's own output.")


def too_much(kept: Kept, before_s: float) -> str | None:
    """Why what is recorded should be dropped now, as a person reads it; None while it may grow.

    It is let grow to twice ``before_s``: at any moment the last seconds are there, of which half are
    wanted at least on average.
    """
    if kept.growth_bytes is not None and kept.growth_bytes > MOST_GROWTH_BYTES:
        return f"the job has grown by {bytes_(kept.growth_bytes)}"
    return f"{kept.seconds:.0f} s are recorded" if kept.seconds >= 2 * before_s else None

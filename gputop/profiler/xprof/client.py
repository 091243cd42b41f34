"""Capturing a trace from a profiler server of TensorFlow or JAX.

The service is ``tensorflow.ProfilerService`` over plain gRPC. TensorFlow 2.21 and JAX hand the trace over in their
answer; TensorFlow up to 2.20 ignores that wish and writes a file on its own disk. One request serves both.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from msgspec import Struct
from msgspec.structs import replace

from gputop.core.errors import EXIT_USAGE, GputopError, os_errors_as
from gputop.core.files import read_regular
from gputop.profiler.addresses import machine_name
from gputop.profiler.recording import (
    CaptureResult,
    EmptyTrace,
    Progress,
    RecorderLimits,
    RecordingOrder,
    TraceLost,
    end_of_recorded,
    pidfd_of,
)
from gputop.profiler.storage import MAX_COPY_BYTES, RunFolder, stops_copy
from gputop.profiler.xprof import messages
from gputop.profiler.xprof.outline import count_events, map_file, map_open_file, outline, session_window_ns
from gputop.profiler.xprof.probe import close_channel, load_grpc, no_profiler_service, open_channel, probe
from gputop.profiler.xprof.server_disk import ServerDisk
from gputop.trace.readers.xspace.recordings import join_recordings

if TYPE_CHECKING:
    import grpc

_PROGRESS_PERIOD_S = 0.125  # between two reports of progress
_TERMINATE_TIMEOUT_S = 5.0
_MAX_SECONDS = 3600.0
_TRACER_LEVELS = (2, 1, 0)  # host, device, Python: the Python tracer slows the job down
# Steps and calls of the host alone, and with its operations (docs/contributing/trace-notes.md, "The profiler server").
_OVERVIEW_LEVELS, _HOST_LEVELS = (1, 0, 0), (2, 0, 0)
# Gathering what was recorded took three times as long as recording it on a job of tiny
# operations (TensorFlow 2.21); both limits below leave room for that.
_DEADLINE_FACTOR, _DEADLINE_EXTRA_S = 5.0, 60.0
_GRACE_FACTOR, _GRACE_EXTRA_S = 5.0, 30.0
_LATE_S = 1.0  # delay of our own clock after gRPC's


class XProfRecorder(Struct, frozen=True):
    """The :class:`~gputop.profiler.recording.Recorder` of a profiler server. ``pid`` is the server's process where
    known: it helps to fetch a trace that the server wrote itself."""

    address: str  # as parse_address returns it
    pid: int | None = None
    limits: ClassVar[RecorderLimits] = RecorderLimits()

    def round_trip_s(self) -> float:
        return probe(self.address)

    def record(self, recording: RecordingOrder, on_progress: Callable[[Progress], None],
               stop: threading.Event) -> CaptureResult:
        """A trace that a server wrote to its disk before it went away is not lost."""
        seconds, start_ns = recording.seconds, recording.start_ns
        if not 0.001 <= seconds <= _MAX_SECONDS:
            raise GputopError(f"a capture can last 0.001 to {_MAX_SECONDS:g} s, not {seconds:g}", exit_code=EXIT_USAGE)
        host = recording.host_name or machine_name(self.address)
        with RunFolder.create(recording.logdir, host, recording.run) as folder, pidfd_of(self.pid) as pidfd:
            on_progress(Progress("connecting", 0.0))
            probe(self.address)
            disk = ServerDisk.choose(folder, self.address, self.pid)
            wait_s = max(0.0, start_ns / 1e9 - time.time()) if start_ns is not None else 0.0
            call = _Call(self.address, seconds, _request(folder, disk, recording), wait_s)
            try:
                response = call.run(on_progress, stop)
            except TraceLost as error:
                lost = end_of_recorded(self.pid, pidfd) or error
                return _trace_on_server_disk(call, folder, disk, lost, stops_copy(stop))
            saving = Progress("saving", call.took_s)
            on_progress(saving)
            return _save(call, folder, disk, response, stops_copy(stop, lambda: on_progress(saving)))

    def count_events(self, path: Path) -> tuple[int, int]:
        return count_events(map_file(path))

    def window_ns(self, path: Path) -> tuple[int, int] | None:
        return session_window_ns(path)

    def join(self, parts: Sequence[Path]) -> bytes:
        return join_recordings([read_regular(part, MAX_COPY_BYTES) for part in reversed(parts)])


def _request(run: RunFolder, disk: ServerDisk, recording: RecordingOrder) -> Any:
    duration_ms = max(1, round(recording.seconds * 1000))
    request = messages.ProfileRequest(
        duration_ms=duration_ms, repository_root=disk.root, session_id=run.path.name, host_name=run.host,
        emit_xspace=True)
    set_options(request.opts, overview=recording.overview, operations=recording.operations)
    request.opts.duration_ms = duration_ms
    if recording.start_ns is not None:
        request.opts.start_timestamp_ns = recording.start_ns
    return request


def set_options(options: Any, *, overview: bool = False, operations: bool = False) -> None:
    """Set what is to be recorded, the same in every request of a grain."""
    levels = _TRACER_LEVELS if not overview else _HOST_LEVELS if operations else _OVERVIEW_LEVELS
    options.version = 1  # without it servers fall back to their own defaults
    options.host_tracer_level, options.device_tracer_level, options.python_tracer_level = levels
    options.include_dataset_ops = True
    options.enable_hlo_proto = not overview  # XProf's own views of XLA programs need it


class _Call:
    """One Profile call, watched from the calling thread. ``sent_s`` is Unix time."""

    def __init__(self, address: str, seconds: float, request: Any, wait_s: float = 0.0) -> None:
        """``wait_s``: about how long the server waits before it begins."""
        self.address = address
        self.seconds = seconds
        self.request = request
        self._until_s = wait_s + seconds
        self.took_s = 0.0
        self.sent_s = 0.0
        self._terminating: Any = None  # kept: gRPC cancels a call whose future is dropped

    @property
    def stopped_early(self) -> bool:
        """Return whether the recording was shorter than asked for, once :meth:`run` has ended."""
        return self._terminating is not None and self.took_s < self._until_s

    def run(self, report: Callable[[Progress], None], stop: threading.Event) -> Any:
        """The server's answer; raises GputopError."""
        grpc = load_grpc()
        timeout_s = self._until_s * _DEADLINE_FACTOR + _DEADLINE_EXTRA_S
        channel, call = open_channel(self.address), None
        try:
            profile = channel.unary_unary(
                f"/{messages.SERVICE}/Profile",
                request_serializer=lambda request: request.SerializeToString(),
                response_deserializer=messages.RawProfileResponse.FromString)
            started, self.sent_s = time.monotonic(), time.time()
            call = profile.future(self.request, timeout=timeout_s)
            try:
                self._watch(channel, call, started, report, stop, timeout_s + _LATE_S)
                self.took_s = time.monotonic() - started
                return call.result()
            except grpc.RpcError as error:
                self.took_s = time.monotonic() - started
                raise self._explain(error.code(), error.details() or "", self.took_s) from error
        finally:
            # The cancel has no effect once it is done; otherwise the server stops recording.
            close_channel(channel, call.cancel if call is not None else lambda: None)

    def _watch(
        self, channel: grpc.Channel, call: Any, started: float, report: Callable[[Progress], None],
        stop: threading.Event, timeout_s: float,
    ) -> None:
        """Wait for the answer. By our own clock, too: a server that keeps the connection busy delays gRPC's."""
        done = threading.Event()
        call.add_done_callback(lambda _call: done.set())
        hand_over_by = None
        while not done.wait(_PROGRESS_PERIOD_S):
            elapsed = time.monotonic() - started
            if elapsed > timeout_s:
                raise self._too_late(elapsed)
            if stop.is_set() and hand_over_by is None and elapsed < self._until_s:
                self._terminating = _terminate(channel, self.request.session_id)
                grace = _GRACE_EXTRA_S + _GRACE_FACTOR * elapsed
                hand_over_by = elapsed + grace
            if hand_over_by is not None and elapsed > hand_over_by:
                raise TraceLost(
                    f"{self.address} was asked to stop but did not send its trace within "
                    f"{grace:.0f} s; the call was canceled and the data is lost",
                    "The job may be short of CPU time or memory. Capture fewer seconds.")
            recording = elapsed < self._until_s and hand_over_by is None
            report(Progress("recording" if recording else "receiving", elapsed))

    def _too_late(self, took_s: float) -> TraceLost:
        return TraceLost(f"{self.address} did not send its trace within {took_s:.0f} s; the capture was canceled",
                         "Collecting so many events takes a long time. Capture fewer seconds.")

    def _explain(self, code: Any, details: str, took_s: float) -> GputopError:
        reason = f": {details[:300]}" if details else ""
        text = details.lower()
        if is_busy(code.name, details):
            return GputopError(
                f"{self.address} is busy: another profiling session is running in that process",
                "Wait for it to end. It can be a TensorBoard callback with profile_batch, Nsight or another capture.")
        if code.name == "UNIMPLEMENTED":
            return no_profiler_service(self.address)
        if code.name == "UNAVAILABLE":  # gRPC's own words, "Stream removed (Socket closed)", say no more
            return TraceLost(
                f"{took_s:.1f} s into the capture, before the trace arrived, the job at {self.address} ended or the "
                "connection was lost",
                "Check the job's output for the reason. If the node ran out of memory, capture fewer seconds, because "
                "a capture needs host memory.")
        if code.name == "DEADLINE_EXCEEDED":
            return self._too_late(took_s)
        if self.request.repository_root in details:
            return GputopError(
                f"{self.address} could not write the trace to its own disk ({self.request.repository_root}){reason}",
                "TensorFlow 2.20 and older writes traces itself. Use a --logdir that the job's user can write to.")
        if "deserializing response" in text or code.name == "RESOURCE_EXHAUSTED":
            return TraceLost(
                f"the trace from {self.address} is too large or damaged{reason}",
                "A protobuf message can hold at most 2 GB. Capture fewer seconds.")
        return GputopError(f"{self.address} answered {code.name}{reason}", "Check the job's output.")


def is_busy(code: str, details: str) -> bool:
    """Return whether a server refuses because its process is being profiled already."""
    text = details.lower()
    return code == "ALREADY_EXISTS" or ("another" in text and "profil" in text and "session" in text)


def _terminate(channel: grpc.Channel, session_id: str) -> Any:
    """Tell the server to end a session. Whether it worked shows in the Profile call, not here."""
    terminate = channel.unary_unary(
        f"/{messages.SERVICE}/Terminate", request_serializer=lambda request: request.SerializeToString())
    return terminate.future(messages.TerminateRequest(session_id=session_id), timeout=_TERMINATE_TIMEOUT_S)


def _save(call: _Call, run: RunFolder, disk: ServerDisk, response: Any, stopped: Callable[[], bool]) -> CaptureResult:
    """Save the trace, from the answer or from the server's disk; raises GputopError, EmptyTrace without an event."""
    if response.xspace:
        path = run.save(response.xspace)
        warnings = () if path == run.file else (
            f"gputop could not save the trace as {run.file} ({run.save_error}) and saved it as {path} instead",)
        return _result(call, path, response.xspace, warnings, empty=response.empty_trace)
    address = call.address
    try:
        trace = disk.find(address, run)
    except GputopError:
        if response.empty_trace:  # TensorFlow 2.21 has nothing to hand over then, and writes nothing
            raise _empty(address, None, (), call.took_s) from None
        raise
    try:
        path = run.adopt(trace.file, trace.path, stopped)
        with os_errors_as(f"the trace was saved as {run.file} but cannot be read", "Check the file system (`dmesg`, "
                          "quota, mount), then run `gputop analyze` on the file."), run.open_trace() as file:
            data = map_open_file(file)
        left = disk.clean_up(trace)
    finally:
        trace.close()
    return _result(call, path, data, (left,) if left else (), empty=response.empty_trace)


def _result(call: _Call, path: Path, data: bytes, warnings: tuple[str, ...], *, empty: bool) -> CaptureResult:
    """The result with the trace ``data``, which is saved; raises EmptyTrace where there is no event in it."""
    about = outline(data)
    if about.damaged:
        warnings = (*warnings, "the trace is truncated or damaged; gputop kept the readable part")
    if empty or not about.has_events:
        raise _empty(call.address, path, (*about.errors, *about.warnings), call.took_s)
    return CaptureResult(path, call.seconds, call.took_s, len(data), call.stopped_early, about.errors,
                         (*about.warnings, *warnings), call.sent_s)


def _trace_on_server_disk(
    call: _Call, run: RunFolder, disk: ServerDisk, lost: TraceLost, stopped: Callable[[], bool],
) -> CaptureResult:
    """The trace a server wrote to its disk before it went away; raises ``lost`` where there is none."""
    try:
        trace = disk.find(call.address, run)
        size = trace.size
        trace.close()
        if size == 0:
            raise lost
        result = _save(call, run, disk, messages.RawProfileResponse(), stopped)
    except (GputopError, OSError):
        raise lost from None
    return replace(result, warnings=(*result.warnings, f"{lost.message}; the server had already written this trace"))


def _empty(address: str, path: Path | None, messages: tuple[str, ...], took_s: float) -> EmptyTrace:
    words = f"; the profiler reported: {'; '.join(messages)[:500]}" if messages else ""
    kept = f" (kept as {path})" if path else ""
    return EmptyTrace(
        f"the trace from {address} contains no events{kept}{words}",
        "The job did nothing, or only ran Python, as while it traces a function, or its tracers are disabled. "
        "Capture for longer while the job trains.",
        took_s, path)

"""The simulated job's profiler server: the real gRPC service on loopback, in this process.

It behaves as TensorFlow 2.21's: one session at a time, a capture takes as long as asked, ``Terminate`` ends it early
and keeps its data, the XSpace comes in the response or, if the client does not ask for that, goes to the server's disk.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gputop.core.errors import GputopError
from gputop.profiler.xprof import messages
from gputop.profiler.xprof.probe import load_grpc

if TYPE_CHECKING:
    import grpc

# Captures loop time from start to end (nanoseconds of Unix time) and gives the XSpace.
Build = Callable[[int, int], bytes]

_MAX_SECONDS = 3600.0


class _Session:
    def __init__(self, session_id: str) -> None:
        self.id = session_id
        self.ended = threading.Event()


class SimulatedProfilerServer:
    """Serves what ``build`` makes. ``clock`` gives Unix seconds.

    Raises GputopError if no port of the loopback interface can be had.
    """

    def __init__(self, build: Build, clock: Callable[[], float] = time.time) -> None:
        self._grpc = load_grpc()
        self._build = build
        self._clock = clock
        self._lock = threading.Lock()
        self._session: _Session | None = None
        self._server = self._grpc.server(
            ThreadPoolExecutor(4, thread_name_prefix="gputop-simulated-profiler"),
            options=[("grpc.max_send_message_length", -1), ("grpc.so_reuseport", 0)])
        handlers = {"Profile": self._profile, "Terminate": self._terminate, "Monitor": self._monitor}
        # Requests arrive as bytes and are parsed in the handlers: grpc would log a bad one to
        # stderr, across the screen.
        self._server.add_generic_rpc_handlers((self._grpc.method_handlers_generic_handler(messages.SERVICE, {
            name: self._grpc.unary_unary_rpc_method_handler(handler) for name, handler in handlers.items()
        }),))
        try:
            port = self._server.add_insecure_port("127.0.0.1:0")
        except RuntimeError as error:  # what grpcio raises, in all versions
            raise self._no_port() from error
        if port == 0:  # and what old versions return instead
            raise self._no_port()
        self.address = f"127.0.0.1:{port}"
        self._server.start()

    @staticmethod
    def _no_port() -> GputopError:
        return GputopError("the simulated job's profiler server could not get a port on 127.0.0.1",
                           "Check that the loopback interface is up: ip addr show lo")

    def stop(self) -> None:
        """End a running session and the server. Waits for nobody."""
        with self._lock:
            if self._session is not None:
                self._session.ended.set()
        self._server.stop(0)

    def _parse(self, kind: Any, data: bytes, context: grpc.ServicerContext) -> Any:
        from google.protobuf.message import DecodeError

        try:
            return kind.FromString(data)
        except DecodeError as error:
            return context.abort(self._grpc.StatusCode.INTERNAL, f"the request cannot be parsed: {error}")

    def _profile(self, data: bytes, context: grpc.ServicerContext) -> bytes:
        code = self._grpc.StatusCode
        request = self._parse(messages.ProfileRequest, data, context)
        seconds = min((request.opts.duration_ms or request.duration_ms) / 1000, _MAX_SECONDS)
        session = _Session(request.session_id)
        with self._lock:
            busy = self._session is not None
            if not busy:
                self._session = session
        if busy:
            context.abort(code.ALREADY_EXISTS, "Another profile session running.")
        try:
            context.add_callback(session.ended.set)  # also called when the client goes away
            start_ns, began = int(self._clock() * 1e9), time.monotonic_ns()
            session.ended.wait(seconds)
            xspace = self._build(start_ns, start_ns + time.monotonic_ns() - began) if context.is_active() else b""
        finally:
            with self._lock:
                self._session = None
        if request.opts.version and not request.opts.device_tracer_level:
            space = messages.XSpace.FromString(xspace)  # with the device tracer off, as in an overview
            planes = [plane for plane in space.planes if not plane.name.startswith("/device:")]
            del space.planes[:]
            space.planes.extend(planes)
            xspace = bytes(space.SerializeToString())
        if request.emit_xspace:
            response = messages.RawProfileResponse(xspace=xspace)
        else:
            response = messages.RawProfileResponse()
            folder = Path(request.repository_root) / request.session_id
            try:
                folder.mkdir(parents=True, exist_ok=True)
                (folder / f"{request.host_name or 'localhost'}.xplane.pb").write_bytes(xspace)
            except OSError as error:
                context.abort(code.INTERNAL, f"cannot write the trace to {request.repository_root}: {error}")
        return bytes(response.SerializeToString())

    def _terminate(self, data: bytes, context: grpc.ServicerContext) -> bytes:
        request = self._parse(messages.TerminateRequest, data, context)
        with self._lock:
            if self._session is not None and self._session.id == request.session_id:
                self._session.ended.set()
        return bytes(messages.TerminateResponse().SerializeToString())

    def _monitor(self, data: bytes, context: grpc.ServicerContext) -> bytes:
        """Answer as every server does but TPUs'."""
        self._parse(messages.MonitorRequest, data, context)
        context.abort(self._grpc.StatusCode.UNIMPLEMENTED, "unimplemented.")
        return b""

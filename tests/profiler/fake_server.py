"""A profiler server of our own making, real gRPC on a loopback port, with every way to go wrong.

In this process as a context manager; as a script (``python -m tests.profiler.fake_server``)
in one of its own, where it prints its port and can be killed.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

import grpc

from tests import xspace_messages as messages


def make_xspace(events: int = 3, errors: tuple[str, ...] = (), warnings: tuple[str, ...] = (),
                window_ns: tuple[int, int] | None = None, name: str = "step") -> bytes:
    """A small XSpace: one host plane, ``events`` events, and the time of its recording where that is given."""
    space = messages.XSpace(errors=errors, warnings=warnings, hostnames=["fake"])
    plane = space.planes.add(name="/host:CPU")
    plane.event_metadata[1].id = 1
    plane.event_metadata[1].name = name
    line = plane.lines.add(id=-7, name="python", timestamp_ns=1_000)
    for index in range(events):
        line.events.add(metadata_id=1, offset_ps=index * 10, duration_ps=5)
    if window_ns is not None:
        session = space.planes.add(name="Task Environment")
        for index, (name, value) in enumerate(zip(("profile_start_time", "profile_stop_time"), window_ns, strict=True)):
            session.stat_metadata[index].id, session.stat_metadata[index].name = index, name
            session.stats.add(metadata_id=index, uint64_value=value)
    return bytes(space.SerializeToString())


Refusal = tuple[grpc.StatusCode, str]
EMPTY = make_xspace(events=0)
BUSY: Refusal = (grpc.StatusCode.UNAVAILABLE, "Another profiling session active.")
GONE: Refusal = (grpc.StatusCode.UNAVAILABLE, "Socket closed")


def in_turn(*answers: bytes | Refusal) -> Callable[[FakeProfiler, int], None]:
    """For ``on_call``: the trace or the refusal that answers each call, the last one from then on."""
    def answer(server: FakeProfiler, number: int) -> None:
        own = answers[min(number, len(answers) - 1)]
        if isinstance(own, bytes):
            server.xspace, server.refuse = own, None
        else:
            server.refuse = own

    return answer


def varint(number: int) -> bytes:
    out = b""
    while number >= 0x80:
        out, number = out + bytes([number & 0x7F | 0x80]), number >> 7
    return out + bytes([number])


@dataclass
class FakeProfiler:
    """What the server does with a Profile call, and what it saw."""

    xspace: bytes = field(default_factory=make_xspace)
    empty_trace: bool = False
    writes_disk: bool = False  # as TensorFlow up to 2.20
    writes_to: Path | None = None  # another disk than the one asked for
    hole_bytes: int = 0  # what it writes goes on with a field of so many bytes that take no room,
    after_hole: bytes = b""  # and then with this
    refuse: Refusal | None = None
    obeys_terminate: bool = True
    clock_ahead_s: float | None = None  # as TensorFlow 2.21: waits for its start by this clock, and tells the window
    has_service: bool = True
    on_call: Callable[[FakeProfiler, int], None] | None = None  # called with the number of each call, from 0, before it
    address: str = ""
    requests: list[Any] = field(default_factory=list)
    terminated: list[str] = field(default_factory=list)
    windows: list[tuple[float, float]] = field(default_factory=list)  # began, and was asked to begin, by its clock
    recording: threading.Event = field(default_factory=threading.Event)
    _sleeping: threading.Event = field(default_factory=threading.Event)
    _stop: threading.Event = field(default_factory=threading.Event)

    def profile(self, request: Any, context: grpc.ServicerContext) -> Any:
        if self.on_call is not None:
            self.on_call(self, len(self.requests))
        self.requests.append(request)
        stop = self._stop = threading.Event()
        self.recording.set()
        if self.refuse is not None:
            context.abort(*self.refuse)
        context.add_callback(stop.set)  # canceled by the client
        if self.clock_ahead_s is not None and request.opts.start_timestamp_ns:
            self._sleeping.wait(request.opts.start_timestamp_ns / 1e9 - time.time() - self.clock_ahead_s)
        began_s = time.time()
        stop.wait(request.opts.duration_ms / 1000)
        if self.clock_ahead_s is not None:
            self._new_window(began_s)
            self.windows.append((began_s, request.opts.start_timestamp_ns / 1e9))
        if self.writes_disk or self.writes_to:
            folder = (self.writes_to or Path(request.repository_root)) / request.session_id
            folder.mkdir(parents=True, exist_ok=True)
            self._write(folder / f"{request.host_name}.xplane.pb")
            return messages.RawProfileResponse(empty_trace=self.empty_trace)
        return messages.RawProfileResponse(empty_trace=self.empty_trace, xspace=self.xspace)

    def _new_window(self, began_s: float) -> None:
        if self.clock_ahead_s is not None:
            self.xspace = make_xspace(window_ns=(round((began_s + self.clock_ahead_s) * 1e9),
                                                 round((time.time() + self.clock_ahead_s) * 1e9)))

    def _write(self, path: Path) -> None:
        with path.open("wb") as file:
            file.write(self.xspace)
            if self.hole_bytes:
                file.write(b"\x7a" + varint(self.hole_bytes))  # field 15, length-delimited
                file.seek(self.hole_bytes, os.SEEK_CUR)
                file.write(self.after_hole)

    def terminate(self, request: Any, _context: grpc.ServicerContext) -> Any:
        self.terminated.append(request.session_id)
        if self.obeys_terminate:
            self._stop.set()
        return messages.TerminateResponse()


@contextmanager
def serve(profiler: FakeProfiler | None = None, host: str = "127.0.0.1", at: str = "") -> Iterator[FakeProfiler]:
    """Run a server in this process, on a free port of ``host`` or ``at`` an address; ``address`` then says where."""
    profiler = profiler or FakeProfiler()
    server = grpc.server(futures.ThreadPoolExecutor(4))
    methods = {
        name: grpc.unary_unary_rpc_method_handler(
            method,
            request_deserializer=getattr(messages, f"{request}Request").FromString,
            response_serializer=lambda message: message.SerializeToString(),
        )
        for name, request, method in (
            ("Profile", "Profile", profiler.profile), ("Terminate", "Terminate", profiler.terminate),
        )
    }
    service = messages.SERVICE if profiler.has_service else "some.OtherService"
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, methods),))
    port = server.add_insecure_port(quote(at, safe="/:") or f"{host}:0")
    profiler.address = at or f"127.0.0.1:{port}"
    server.start()
    try:
        yield profiler
    finally:
        profiler._stop.set()
        profiler._sleeping.set()
        server.stop(None).wait()


COMMAND = (sys.executable, "-m", "tests.profiler.fake_server")


@contextmanager
def serving_process(*command: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A process that prints a line once it listens, the address of its server; killed at the end."""
    with subprocess.Popen(command or COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process, process.stdout.readline().strip()
        finally:
            process.kill()


if __name__ == "__main__":
    with serve(host="[::]") as running:
        print(running.address, flush=True)
        sys.stdin.read()  # until the test ends

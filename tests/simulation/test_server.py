from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from gputop.simulation.server import SimulatedProfilerServer
from gputop.sources.simulated import SimulatedSource
from tests import xspace_messages as messages
from tests.profiler.capturing import capture
from tests.waiting import PATIENCE_S

LONG_MS = 600_000


class _Server:
    """A server whose captures say when they were asked for, and a channel to it."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, int]] = []
        self.running = threading.Event()
        self.server = SimulatedProfilerServer(self._build, self._clock)
        self.channel = grpc.insecure_channel(self.server.address)

    def _clock(self) -> float:
        self.running.set()  # read once a session has begun
        return 1_000.0

    def _build(self, start_ns: int, end_ns: int) -> bytes:
        self.asked.append((start_ns, end_ns))
        return messages.XSpace(hostnames=["here"]).SerializeToString()

    def call(self, method: str) -> Callable[..., Any]:
        return self.channel.unary_unary(f"/{messages.SERVICE}/{method}")

    def profile(self, session: str, duration_ms: int = LONG_MS, **fields: Any) -> Any:
        request = messages.ProfileRequest(session_id=session, emit_xspace=True, **fields)
        request.opts.duration_ms = duration_ms
        return self.call("Profile").future(request.SerializeToString(), timeout=PATIENCE_S)

    def terminate(self, session: str) -> None:
        self.call("Terminate")(messages.TerminateRequest(session_id=session).SerializeToString(), timeout=PATIENCE_S)


@pytest.fixture
def served() -> Iterator[_Server]:
    server = _Server()
    yield server
    server.channel.close()
    server.server.stop()


def _code(call: Any) -> grpc.StatusCode:
    with pytest.raises(grpc.RpcError) as caught:
        call.result() if hasattr(call, "result") else call()
    return caught.value.code()


def test_a_capture_takes_its_time_and_returns_its_xspace(served: _Server) -> None:
    response = messages.ProfileResponse.FromString(served.profile("a", 30).result())
    assert list(response.xspace.hostnames) == ["here"]
    (start, end), = served.asked
    assert start == 1_000 * 10**9
    assert end - start >= 30_000_000


def test_terminate_ends_the_session_of_that_name_and_keeps_its_data(served: _Server) -> None:
    call = served.profile("mine")
    assert served.running.wait(PATIENCE_S)
    served.terminate("someone else's")
    assert not call.done()
    served.terminate("mine")
    assert messages.ProfileResponse.FromString(call.result()).xspace.hostnames
    (start, end), = served.asked
    assert end - start < LONG_MS * 10**6


def test_one_session_at_a_time(served: _Server) -> None:
    first = served.profile("first")
    assert served.running.wait(PATIENCE_S)
    second = served.profile("second")
    assert _code(second) is grpc.StatusCode.ALREADY_EXISTS
    assert "Another profile session running" in second.details()
    served.terminate("first")
    first.result()
    served.profile("third", 1).result()  # free again


def test_a_client_that_goes_away_ends_its_session(served: _Server) -> None:
    call = served.profile("gone")
    assert served.running.wait(PATIENCE_S)
    call.cancel()
    for _ in range(200):  # its end is not announced: ask until the next session gets in
        following = served.profile("next", 1)
        if following.exception() is None:
            break
    assert following.exception() is None
    assert len(served.asked) == 1  # nothing was built for the one that left


def test_without_emit_xspace_the_file_goes_to_the_servers_disk(served: _Server, tmp_path: Path) -> None:
    request = messages.ProfileRequest(
        duration_ms=1, session_id="run", repository_root=str(tmp_path / "new"), host_name="node")
    response = served.call("Profile")(request.SerializeToString(), timeout=PATIENCE_S)
    assert not messages.ProfileResponse.FromString(response).HasField("xspace")
    written = (tmp_path / "new" / "run" / "node.xplane.pb").read_bytes()
    assert messages.XSpace.FromString(written).hostnames

    (tmp_path / "file").touch()
    request.repository_root = str(tmp_path / "file")
    refused = served.call("Profile").future(request.SerializeToString(), timeout=PATIENCE_S)
    assert _code(refused) is grpc.StatusCode.INTERNAL
    assert str(tmp_path / "file") in refused.details()


def test_monitor_and_nonsense_are_answered_as_tensorflow_does(served: _Server) -> None:
    monitor = served.call("Monitor").future(b"", timeout=PATIENCE_S)
    assert _code(monitor) is grpc.StatusCode.UNIMPLEMENTED
    for method in ("Profile", "Terminate"):
        assert _code(served.call(method).future(b"\xff\xff", timeout=PATIENCE_S)) is grpc.StatusCode.INTERNAL
    assert _code(served.call("GetSnapshot").future(b"", timeout=PATIENCE_S)) is grpc.StatusCode.UNIMPLEMENTED


def test_stopping_the_server_ends_a_session(served: _Server) -> None:
    call = served.profile("cut off")
    assert served.running.wait(PATIENCE_S)
    served.server.stop()
    error = call.exception()  # none if the answer was faster than the end of the connection
    assert error is None or error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED


def test_the_real_client_captures_the_running_job(tmp_path: Path) -> None:
    source = SimulatedSource("healthy")
    source.open()
    try:
        (address,) = source.profiler_endpoints()
        result = capture(address, seconds=0.7, logdir=tmp_path)
    finally:
        source.close()
    space = messages.XSpace.FromString(result.path.read_bytes())
    assert "/gputop:simulated" in {p.name for p in space.planes}
    assert all(any(len(line.events) for line in p.lines) for p in space.planes if p.name.startswith("/device:GPU"))

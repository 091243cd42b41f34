"""Scrapes over HTTP, and clients that are slow, many or hostile."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterator

import pytest

from gputop.core.errors import GputopError
from gputop.export import metrics_server
from gputop.export.metrics_server import MetricsServer, listen
from gputop.export.openmetrics import Exporter
from tests.fakes import StillSession
from tests.waiting import PATIENCE_S

HEAD = b"GET /metrics HTTP/1.1\r\nHost: x\r\n"
Send = Callable[[bytes], bytes]


@pytest.fixture
def exporter() -> Exporter:
    return Exporter(StillSession(gpus=2, ticks=2))


@pytest.fixture
def server(exporter: Exporter) -> Iterator[MetricsServer]:
    with contextlib.closing(MetricsServer(exporter, listen("127.0.0.1", 0))) as server:
        server.start()
        yield server


def connect(server: MetricsServer) -> socket.socket:
    host, _, port = server.address.rpartition(":")
    return socket.create_connection((host, int(port)), PATIENCE_S)


def rest(client: socket.socket) -> bytes:
    """All that comes until the server closes the connection."""
    out = b""
    with contextlib.suppress(ConnectionResetError):
        while data := client.recv(1 << 16):
            out += data
    return out


def ask(server: MetricsServer, request: bytes) -> tuple[int, bytes, bytes]:
    """Status, head and body of the answer."""
    with connect(server) as client:
        client.sendall(request)
        head, _, body = rest(client).partition(b"\r\n\r\n")
    return int(head.split()[1]), head.lower(), body


def test_the_format_is_the_one_that_the_client_accepts(server: MetricsServer) -> None:
    status, head, body = ask(server, HEAD + b"\r\n")
    assert status == 200 and b"text/plain; version=0.0.4" in head and b"gputop_gpu_power_watts{" in body
    assert b"# EOF" not in body and f"content-length: {len(body)}".encode() in head
    prometheus = b"application/openmetrics-text;version=1.0.0;q=0.8,text/plain;version=0.0.4;q=0.5,*/*;q=0.1"
    status, head, body = ask(server, HEAD + b"ACCEPT: " + prometheus + b"\r\n\r\n")
    assert status == 200 and b"application/openmetrics-text; version=1.0.0" in head and body.endswith(b"# EOF\n")


@pytest.mark.parametrize(("request_line", "expected"), [
    (b"GET / HTTP/1.1", 200), (b"GET /metrics?x=1 HTTP/1.0", 200), (b"HEAD /metrics HTTP/1.1", 200),
    (b"GET /metrics/ HTTP/1.1", 404), (b"GET /../etc/passwd HTTP/1.1", 404), (b"GET //metrics HTTP/1.1", 404),
    (b"POST /metrics HTTP/1.1", 405), (b"GET /metrics", 400), (b"GET /metrics SSH-2.0", 400),
    (b"\x16\x03\x01\x02\x00", 400), (b"", 400), (b"GET /" + b"a" * 9_000 + b" HTTP/1.1", 431),
])
def test_there_is_nothing_but_metrics_and_one_line_about_them(server: MetricsServer, exporter: Exporter,
                                                              request_line: bytes, expected: int) -> None:
    status, _, body = ask(server, request_line + b"\r\nX: y\r\n\r\n")
    assert status == expected and (body.count(b"\n") <= 1 or b"gputop_build_info" in body)
    assert exporter.requests == {expected: 1}
    if request_line.startswith(b"HEAD"):
        assert body == b""


def test_a_huge_header_is_refused_and_not_kept(server: MetricsServer) -> None:
    with connect(server) as client:
        with contextlib.suppress(OSError):  # it is closed while we send
            for _ in range(1000):
                client.sendall(b"X-Long: " + b"a" * 100_000)
        assert b"200" not in rest(client)[:20]
    assert ask(server, HEAD + b"\r\n")[0] == 200


def test_clients_that_never_finish_keep_nobody_out(server: MetricsServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_server, "MAX_CONNECTIONS", 4)
    with contextlib.ExitStack() as stack:
        slow = []
        for _ in range(12):
            client = stack.enter_context(connect(server))
            client.sendall(HEAD)  # and no end
            slow.append(client)
            assert ask(server, HEAD + b"\r\n")[0] == 200
        assert all(rest(client) == b"" for client in slow[:8])  # the oldest were closed


def test_a_request_has_a_time_limit(exporter: Exporter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_server, "DEADLINE_S", 0.05)
    with contextlib.closing(MetricsServer(exporter, listen("127.0.0.1", 0))) as server:
        server.start()
        with connect(server) as client:
            client.sendall(HEAD)
            assert rest(client) == b""
    assert exporter.requests == {}


def test_a_client_that_does_not_read_holds_up_no_other(server: MetricsServer, exporter: Exporter,
                                                       monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exporter, "render", lambda openmetrics: b"x" * (20 << 20))  # more than sockets buffer
    with connect(server) as client:
        client.sendall(HEAD + b"\r\n")
        assert client.recv(10) == b"HTTP/1.1 2"  # the answer has begun, and waits for us
        assert len(ask(server, HEAD + b"\r\n")[2]) == 20 << 20


def test_a_failed_rendering_is_an_answer_and_the_next_may_succeed(server: MetricsServer, exporter: Exporter,
                                                                  monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(exporter, "render", lambda openmetrics: 1 / 0)
        status, _, body = ask(server, HEAD + b"\r\n")
        assert (status, body) == (500, b"Internal Server Error\n")
    assert ask(server, HEAD + b"\r\n")[0] == 200


def test_many_scrapes_of_one_sample_are_rendered_once(server: MetricsServer, exporter: Exporter,
                                                      monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_server, "_RENDERED_S", float("inf"))
    assert len({ask(server, HEAD + b"\r\n")[2] for _ in range(5)}) == 1
    exporter._session.advance()
    assert b'gputop_http_requests_total{code="200"} 5.0' in ask(server, HEAD + b"\r\n")[2]


def test_after_its_end_nothing_listens(server: MetricsServer) -> None:
    server.close()
    with pytest.raises(OSError):
        connect(server)


def test_an_address_that_cannot_be_had_is_wrong_usage(server: MetricsServer) -> None:
    for host, port in (("127.0.0.1", int(server.address.rpartition(":")[2])), ("192.0.2.1", 9810), ("a" * 70, 1)):
        with pytest.raises(GputopError, match="cannot listen on") as caught:
            listen(host, port)
        assert caught.value.exit_code == 2

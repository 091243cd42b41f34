"""Serves metrics over HTTP, to clients that may be slow, many or hostile.

One thread with one event loop answers all connections, so that none holds up another, and none the sampler. A
request has a size and a time that it must not exceed. With too many connections the oldest is closed: a scrape
takes milliseconds, so the oldest one is not a scrape. A document is rendered at most once a second and sample.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from http import HTTPStatus
from typing import TYPE_CHECKING

from gputop.core.errors import EXIT_USAGE, GputopError

if TYPE_CHECKING:
    from gputop.export.openmetrics import Exporter

MAX_CONNECTIONS = 32
MAX_REQUEST_BYTES = 8192
DEADLINE_S = 10.0  # of a connection, from its beginning to the last byte of the answer; Prometheus's own is 10 s
_RENDERED_S = 1.0  # how long a rendered document stays
_TYPES = {True: "application/openmetrics-text; version=1.0.0; charset=utf-8",
          False: "text/plain; version=0.0.4; charset=utf-8"}
_ROOT = b"gputop: the metrics of this node are at /metrics\n"


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens there; port 0: at any free one. Raises GputopError."""
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET,
                                    backlog=MAX_CONNECTIONS)
    except (OSError, UnicodeError) as error:
        raise GputopError(f"cannot listen on {address_text(host, port)}: {getattr(error, 'strerror', None) or error}",
                          "Use a free port and an address of this machine: 127.0.0.1:PORT.", EXIT_USAGE) from error


def address_text(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class MetricsServer:
    """Answers ``GET /metrics`` on ``listener``, which it owns, until closed."""

    def __init__(self, exporter: Exporter, listener: socket.socket) -> None:
        self.address = address_text(*listener.getsockname()[:2])
        self._exporter = exporter
        self._listener = listener
        self._connections: dict[asyncio.Task[None], None] = {}  # the oldest first
        self._rendered: dict[bool, tuple[float, object, bytes]] = {}  # when, of which sample, the document
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), name="gputop-metrics", daemon=True)

    def start(self) -> None:
        """Begin; returns at once."""
        self._thread.start()

    def close(self) -> None:
        """Stop answering; connections are closed. Returns within half a second."""
        if self._thread.is_alive():
            self._ready.wait(0.5)
            if self._loop is not None and self._stop is not None:
                with contextlib.suppress(RuntimeError):  # the loop has ended
                    self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join(0.5)
        self._listener.close()

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        self._loop.set_exception_handler(lambda *_: None)  # it would write to the monitor's screen
        server = await asyncio.start_server(self._connected, sock=self._listener, limit=MAX_REQUEST_BYTES)
        self._ready.set()
        await self._stop.wait()
        server.close()  # asyncio.run then cancels the connections

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections[task] = None
        if len(self._connections) > MAX_CONNECTIONS:
            oldest = next(iter(self._connections))
            del self._connections[oldest]
            oldest.cancel()
        try:
            await asyncio.wait_for(self._converse(reader, writer), DEADLINE_S)
        except asyncio.CancelledError:
            pass  # it was the oldest, or gputop ends
        except Exception:  # noqa: BLE001  thread boundary: the client went away, was too slow, or met a fault of ours
            pass
        finally:
            self._connections.pop(task, None)
            writer.transport.abort()

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one request and close the connection."""
        try:
            request = await reader.readuntil(b"\r\n\r\n")
        except asyncio.LimitOverrunError:
            status, content_type, body = _refused(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
            is_head = False
        else:
            is_head = request.startswith(b"HEAD ")
            status, content_type, body = self._answer(request)
        self._exporter.requests[status] += 1
        head = (f"HTTP/1.1 {status.value} {status.phrase}\r\nContent-Type: {content_type}\r\n"
                f"Content-Length: {len(body)}\r\nX-Content-Type-Options: nosniff\r\nConnection: close\r\n\r\n")
        writer.transport.set_write_buffer_limits(0)  # drain then waits for the last byte
        writer.write(head.encode() + (b"" if is_head else body))
        await writer.drain()
        writer.close()
        await writer.wait_closed()

    def _answer(self, request: bytes) -> tuple[HTTPStatus, str, bytes]:
        line, _, headers = request.partition(b"\r\n")
        words = line.split(b" ")
        if len(words) != 3 or not words[2].startswith(b"HTTP/1."):
            return _refused(HTTPStatus.BAD_REQUEST)
        if words[0] not in (b"GET", b"HEAD"):
            return _refused(HTTPStatus.METHOD_NOT_ALLOWED)
        path = words[1].partition(b"?")[0]
        if path == b"/":
            return HTTPStatus.OK, "text/plain; charset=utf-8", _ROOT
        if path != b"/metrics":
            return _refused(HTTPStatus.NOT_FOUND)
        accepts = (value for name, _, value in (header.partition(b":") for header in headers.lower().split(b"\r\n"))
                   if name == b"accept")
        openmetrics = any(b"application/openmetrics-text" in value for value in accepts)
        try:
            return HTTPStatus.OK, _TYPES[openmetrics], self._document(openmetrics)
        except Exception:  # noqa: BLE001  thread boundary: the next scrape may succeed
            return _refused(HTTPStatus.INTERNAL_SERVER_ERROR)

    def _document(self, openmetrics: bool) -> bytes:
        now_s, sample = time.monotonic(), self._exporter.sample
        rendered = self._rendered.get(openmetrics)
        if rendered is None or rendered[1] is not sample or now_s - rendered[0] >= _RENDERED_S:
            rendered = self._rendered[openmetrics] = now_s, sample, self._exporter.render(openmetrics=openmetrics)
        return rendered[2]


def _refused(status: HTTPStatus) -> tuple[HTTPStatus, str, bytes]:
    return status, "text/plain; charset=utf-8", f"{status.phrase}\n".encode()

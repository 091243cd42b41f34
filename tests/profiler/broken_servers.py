"""What no gRPC library would serve: a connection that ends after so many bytes, an answer that lies about its size."""

from __future__ import annotations

import contextlib
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

_DATA, _HEADERS, _SETTINGS = 0, 1, 4  # RFC 9113, 6
_ACK, _END_HEADERS = 1, 4
_PREFACE_BYTES = 24
_TYPE = b"application/grpc"
# RFC 7541: status 200 is the 8th of the static table, content-type the 31st.
_RESPONSE_HEADERS = b"\x88\x0f\x10" + bytes([len(_TYPE)]) + _TYPE


class CuttingProxy:
    """Leads to a server, and ends each connection once ``cut_after`` bytes of the server's have passed.

    It passes ``at_once`` bytes at a time, and counts them in ``passed``, of the last connection.
    """

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self._target = host, int(port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.cut_after: int | None = None
        self.at_once = 1 << 16
        self.passed = 0
        self._last: socket.socket | None = None

    def run(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                self._last, self.passed = client, 0
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _serve(self, client: socket.socket) -> None:
        cut_after = self.cut_after
        with client, socket.create_connection(self._target) as server:
            threading.Thread(target=_pump, args=(client, server), daemon=True).start()
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            passed = 0
            while data := _receive(server, self.at_once):
                data = data if cut_after is None else data[:cut_after - passed]
                passed += len(data)
                if client is self._last:
                    self.passed = passed  # before the client has it and looks
                with contextlib.suppress(OSError):
                    client.sendall(data)
                if passed == cut_after:
                    break
            for end in (client, server):  # a close alone does not wake the other thread
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)


def _receive(end: socket.socket, most: int = 1 << 16) -> bytes:
    try:
        return end.recv(most)
    except OSError:
        return b""


def _pump(source: socket.socket, sink: socket.socket) -> None:
    while data := _receive(source):
        with contextlib.suppress(OSError):
            sink.sendall(data)


@contextlib.contextmanager
def cutting(target: str) -> Iterator[CuttingProxy]:
    proxy = CuttingProxy(target)
    thread = threading.Thread(target=proxy.run)
    thread.start()
    try:
        yield proxy
    finally:
        proxy.close()
        thread.join()


@contextlib.contextmanager
def announcing(size: int) -> Iterator[str]:
    """A server whose answer to any call begins as one of ``size`` bytes does, and goes no further."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        def answer() -> None:
            with contextlib.suppress(OSError):
                connection, _ = listener.accept()
                with connection:
                    connection.sendall(_frame(_SETTINGS, 0, 0, b""))
                    stream = _first_stream(connection)
                    connection.sendall(
                        _frame(_SETTINGS, _ACK, 0, b"") + _frame(_HEADERS, _END_HEADERS, stream, _RESPONSE_HEADERS)
                        + _frame(_DATA, 0, stream, struct.pack(">BI", 0, size)))
                    while connection.recv(1 << 16):  # until the client has had enough
                        pass

        thread = threading.Thread(target=answer)
        thread.start()
        try:
            yield f"127.0.0.1:{listener.getsockname()[1]}"
        finally:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            thread.join()


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def _first_stream(connection: socket.socket) -> int:
    """Read on to the first call's headers; its number."""
    with connection.makefile("rb") as received:
        received.read(_PREFACE_BYTES)
        while True:
            header = received.read(9)
            length, (kind, _, stream) = int.from_bytes(header[:3], "big"), struct.unpack(">BBI", header[3:])
            received.read(length)
            if kind == _HEADERS:
                return int(stream)


# Of these a server can send any number, and never answers (RFC 9113, 6.5, 6.7, 6.9 and 6.10).
FLOODS = {
    "pings": lambda: _frame(6, 0, 0, b"12345678"),
    "settings": lambda: _frame(_SETTINGS, 0, 0, b""),
    "window updates": lambda: _frame(8, 0, 0, struct.pack(">I", 1)),
    "headers without an end": lambda: _frame(9, 0, 1, b"\x00\x01a\x01b"),
    "one byte at a time": lambda: b"",
}


@contextlib.contextmanager
def flooding(what: str) -> Iterator[str]:
    """A server, in a process of its own, that begins as gRPC's do and then floods each connection with such frames."""
    command = [sys.executable, "-c", f"from tests.profiler.broken_servers import flood; flood({what!r})"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]) as server:
        try:
            yield f"127.0.0.1:{int(server.stdout.readline())}"
        finally:
            server.kill()


def flood(what: str) -> None:
    """The server's main: prints its port."""
    frames = FLOODS[what]() * 200

    def serve(connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            connection.sendall(_frame(_SETTINGS, 0, 0, b""))
            threading.Thread(target=lambda: _drain(connection), daemon=True).start()
            if what == "headers without an end":
                threading.Event().wait(0.3)  # until there is a call that they can be of
                connection.sendall(_frame(_HEADERS, 0, 1, b""))
            while True:
                connection.sendall(frames or b"\0")
                if not frames:
                    threading.Event().wait(0.05)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        print(listener.getsockname()[1], flush=True)
        while True:
            threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()


def _drain(connection: socket.socket) -> None:
    while _receive(connection):
        pass

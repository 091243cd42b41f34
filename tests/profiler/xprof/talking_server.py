"""A server that answers a connection with bytes it is given."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def talking(reply: bytes | None, close: bool = True) -> Iterator[tuple[str, list[bytes]]]:
    """A port that answers each connection with ``reply`` (None: nothing) and notes what it was sent."""
    listener = socket.create_server(("127.0.0.1", 0))
    heard: list[bytes] = []
    held: list[socket.socket] = []

    def accept() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            held.append(connection)
            if reply is not None:
                connection.sendall(reply)
            if close:
                connection.shutdown(socket.SHUT_WR)
                with contextlib.suppress(OSError):
                    heard.append(connection.recv(1000))

    thread = threading.Thread(target=accept)
    thread.start()
    try:
        yield f"127.0.0.1:{listener.getsockname()[1]}", heard
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()
        for connection in held:
            connection.close()

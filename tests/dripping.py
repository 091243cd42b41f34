"""A server that answers a piece at a time, so that a client with a timeout of each read waits for ever."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

from tests.listening import listening

_PIECES, _PAUSE_S = 300, 0.02
_HEAD = b"HTTP/1.1 200 OK\r\n"
_WHOLE = _HEAD + b"Content-Length: 2\r\n\r\n{}"
_CHUNKED = _HEAD + b"Transfer-Encoding: chunked\r\n\r\n"

# What comes first, what comes again and again, and what makes it a whole answer.
DRIPS = {
    "continue": (b"", b"HTTP/1.1 100 Continue\r\n\r\n", _WHOLE),
    "status": (b"HTTP/1.1 200 O", b"K", b"\r\nContent-Length: 2\r\n\r\n{}"),
    "header": (_HEAD + b"X: ", b"x", b"\r\nContent-Length: 2\r\n\r\n{}"),
    "headers of a continue": (b"HTTP/1.1 100 Continue\r\nX: ", b"x", b"\r\n\r\n" + _WHOLE),
    "chunk size": (_CHUNKED, b"0", b"2\r\n{}\r\n0\r\n\r\n"),
    "chunks": (_CHUNKED, b"1\r\n \r\n", b"2\r\n{}\r\n0\r\n\r\n"),
    "trailers": (_CHUNKED + b"2\r\n{}\r\n0\r\n", b"X: x\r\n", b"\r\n"),
    "body": (_HEAD + b"Content-Length: 302\r\n\r\n", b" ", b"{}"),
}


@contextlib.contextmanager
def dripping(way: str, *, pause_s: float = _PAUSE_S, pieces: int = _PIECES) -> Iterator[str]:
    """The address of a server that answers whole in the end: a client that waited for it all has an answer, which the
    caller takes for a failure. ``way`` is a key of :data:`DRIPS`."""
    first, again, last = DRIPS[way]
    gone = threading.Event()

    def serve(own: socket.socket) -> None:
        own.recv(1 << 16)
        own.sendall(first)
        for _ in range(pieces):
            own.sendall(again)
            if gone.wait(pause_s):
                return
        own.sendall(last)

    with listening(serve) as address:
        try:
            yield address
        finally:
            gone.set()

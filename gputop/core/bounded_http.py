"""HTTP connections of :mod:`http.client` that end: a request and its answer have a deadline and a number of bytes.

The timeout of a socket is of each of its reads. A server that sends a byte now and then, one "100 Continue" after the
other, headers, sizes of chunks or trailers holds up a client with such a timeout for ever.
"""

from __future__ import annotations

import errno
import http.client
import io
import socket
import time
from typing import Any


class AnswerLimits:
    """``end_s``: the time by ``time.monotonic`` at which all must be over; ``left_bytes``: that may come until then,
    headers and whatever is not content included."""

    def __init__(self, end_s: float, left_bytes: int) -> None:
        self.end_s, self.left_bytes = end_s, left_bytes

    def left_s(self) -> float:
        """Raises TimeoutError where no time is left."""
        left_s = self.end_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError(errno.ETIMEDOUT, "timed out")
        return left_s


class TooManyBytes(OSError):
    """More came than was to be read."""


class _Bounded(io.RawIOBase):
    """Stream of what comes over a socket. ``file`` is its own one, which keeps it open."""

    def __init__(self, connected: socket.socket, file: io.RawIOBase, limits: AnswerLimits) -> None:
        self._own, self._file, self._limits = connected, file, limits

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        self._own.settimeout(self._limits.left_s())
        size = self._file.readinto(buffer)
        self._limits.left_bytes -= size or 0
        if self._limits.left_bytes < 0:
            raise TooManyBytes(errno.EFBIG, "the answer is too large")
        return size

    def close(self) -> None:
        self._file.close()
        super().close()


class Connection(http.client.HTTPConnection):
    """``timeout`` is of all that is done, from now on; :meth:`bound` begins anew, for a connection that is kept."""

    default_bytes = 1 << 20

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.limits = AnswerLimits(time.monotonic() + float(self.timeout or 0), self.default_bytes)
        self._create_connection = self._open  # which HTTPConnection calls
        self.response_class = self._response  # type: ignore[assignment]  # a function that returns one

    def bound(self, end_s: float, most_bytes: int) -> None:
        self.limits.end_s, self.limits.left_bytes = end_s, most_bytes

    def connect(self) -> None:
        super().connect()
        self.sock.settimeout(self.limits.left_s())  # of a handshake

    def _open(self, address: tuple[str, int], *ignored: object) -> socket.socket:
        """Open a socket as socket.create_connection does, whose timeout is for each of a name's addresses."""
        failed: OSError = OSError("the host name has no address")
        for family, kind, protocol, _, socket_address in socket.getaddrinfo(*address, type=socket.SOCK_STREAM):
            opened = socket.socket(family, kind, protocol)
            try:
                opened.settimeout(self.limits.left_s())
                opened.connect(socket_address)
            except OSError as error:
                opened.close()
                failed = error
            else:
                return opened
        raise failed

    def send(self, data: Any) -> None:
        if self.sock is None:
            self.connect()
        rest = memoryview(data)
        while rest:
            self.sock.settimeout(self.limits.left_s())
            rest = rest[self.sock.send(rest[:1 << 16]):]

    def _response(self, connected: socket.socket, *arguments: Any, **options: Any) -> http.client.HTTPResponse:
        response = http.client.HTTPResponse(connected, *arguments, **options)
        response.fp.close()
        response.fp = io.BufferedReader(_Bounded(connected, connected.makefile("rb", buffering=0), self.limits))
        return response


class SecureConnection(http.client.HTTPSConnection, Connection):
    """The same by TLS."""

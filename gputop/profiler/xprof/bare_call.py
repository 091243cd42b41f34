"""One unary gRPC call over a bare socket, of which only the status is read: enough to ask what a server is.

The monitor asks every server that it finds, and the grpc package takes 14 MB from its import on. So it is imported for
the first capture, and here only where an answer cannot be read. HTTP/2 frames: RFC 9113; header blocks: RFC 7541;
gRPC in them: https://github.com/grpc/grpc/blob/master/doc/PROTOCOL-HTTP2.md.
"""

from __future__ import annotations

import socket
import struct
import time

# RFC 9113: the client's preface, followed by an empty SETTINGS frame. The server's first
# frame is SETTINGS too; gRPC's servers send it as soon as the connection stands.
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"
FRAME_HEADER_BYTES = 9
DATA, HEADERS, SETTINGS, PING, GOAWAY = 0, 1, 4, 6, 7
_ACK = _END_STREAM = 1
_END_HEADERS = 4
_STREAM = 1
_MAX_ANSWER_BYTES = 1 << 16  # of frames: an answer without a message takes some hundred


class Unreadable(Exception):
    """The answer is none that this module reads; the grpc package may."""


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def status_of(sock: socket.socket, authority: str, method: str, message: bytes, timeout_s: float) -> tuple[int, float]:
    """Call ``method`` ("/package.Service/Name") on a new connection; gRPC's status code and the seconds it took.

    Raises TimeoutError after ``timeout_s``, another OSError where the connection ends, Unreadable.
    """
    deadline = time.monotonic() + timeout_s
    fields = ((":method", "POST"), (":scheme", "http"), (":path", method), (":authority", authority),
              ("content-type", "application/grpc"), ("te", "trailers"))
    block = b"".join(b"\0" + _string(name) + _string(value) for name, value in fields)  # literals, never Huffman
    sock.settimeout(timeout_s)
    sock.sendall(PREFACE + frame(SETTINGS, _ACK, 0, b"") + frame(HEADERS, _END_HEADERS, _STREAM, block)
                 + frame(DATA, _END_STREAM, _STREAM, struct.pack(">BI", 0, len(message)) + message))
    began = time.monotonic()
    received = bytearray()
    for _ in range(_MAX_ANSWER_BYTES // FRAME_HEADER_BYTES):
        length = int.from_bytes(_take(sock, received, 3, deadline), "big")
        kind, flags, stream = struct.unpack(">BBI", _take(sock, received, 6, deadline))
        if length > _MAX_ANSWER_BYTES:
            raise Unreadable
        payload = _take(sock, received, length, deadline)
        if kind == PING and not flags & _ACK:
            sock.sendall(frame(PING, _ACK, 0, payload))
        elif kind == HEADERS and stream == _STREAM and flags & _END_STREAM:
            if flags != _END_STREAM | _END_HEADERS:  # padded, or in several frames
                raise Unreadable
            took_s = time.monotonic() - began
            sock.sendall(frame(GOAWAY, 0, 0, bytes(8)))
            return _status(payload), took_s
        elif kind == GOAWAY or (stream and kind not in (DATA, HEADERS)):
            raise Unreadable
    raise TimeoutError  # it keeps the connection busy


def _take(sock: socket.socket, received: bytearray, count: int, deadline: float) -> bytes:
    """The next ``count`` bytes, of those that were ``received`` already first."""
    while len(received) < count:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        sock.settimeout(left_s)
        more = sock.recv(4096)
        if not more:
            raise ConnectionResetError
        received += more
    out = bytes(received[:count])
    del received[:count]
    return out


def _string(text: str) -> bytes:
    """A string of a header block (RFC 7541, 5.2)."""
    raw = text.encode("ascii")
    return _integer(len(raw)) + raw


def _integer(value: int) -> bytes:
    """Encode an integer with a prefix of 7 bits (RFC 7541, 5.1)."""
    if value < 127:
        return bytes([value])
    out, value = b"\x7f", value - 127
    while value > 127:
        out, value = out + bytes([value % 128 | 128]), value // 128
    return out + bytes([value])


def _status(block: bytes) -> int:
    """``grpc-status`` of a header block. C's gRPC, which TensorFlow and JAX serve with, writes it as plain text."""
    pos = 0

    def integer(prefix: int) -> int:
        nonlocal pos
        value = block[pos] & (1 << prefix) - 1
        pos += 1
        if value == (1 << prefix) - 1:
            for shift in range(0, 28, 7):
                more = block[pos]
                pos += 1
                value += (more & 127) << shift
                if more < 128:
                    return value
            raise Unreadable
        return value

    def string() -> bytes:
        nonlocal pos
        huffman = block[pos] & 128
        length = integer(7)
        raw = block[pos: pos + length]
        pos += length
        return b"" if huffman else raw

    try:
        while pos < len(block):
            kind = block[pos]
            if kind & 128:  # a field of a table, none of which holds a status
                integer(7)
            elif kind & 0xE0 == 0x20:  # the table's size
                integer(5)
            else:
                name = string() if not integer(6 if kind & 64 else 4) else b""
                value = string()
                if name == b"grpc-status" and value.isdigit():
                    return int(value)
    except IndexError:
        pass
    raise Unreadable

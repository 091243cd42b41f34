"""Addresses of profiler servers, and a harmless probe of what answers there.

The probe has two steps, both with a bare socket. The first checks whether the other side speaks HTTP/2: that is
answered at once, and shows what speaks instead. The second calls a method of the profiler service with bytes that
cannot be parsed: a server that has the service refuses them (INTERNAL) before any of its own code runs, any other gRPC
server answers UNIMPLEMENTED. This was observed on TensorFlow 2.15 and 2.21 and on JAX 0.10. The service's other methods
tell less: ``Monitor`` is UNIMPLEMENTED on every server except those of TPUs, and ``Terminate`` of a session that does
not exist succeeds, but the server remembers the session for good. What answers in another way is asked once more by the
grpc package, which knows why. That package takes 14 MB from its import on, and the monitor asks every server that it
finds: so it is imported here only where an answer cannot be read, and for the first capture.
"""

from __future__ import annotations

import os
import queue
import re
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from gputop.core.errors import GputopError
from gputop.profiler.addresses import parse_address, split_address, unix_name
from gputop.profiler.xprof.messages import SERVICE

if TYPE_CHECKING:
    import grpc

HOW_TO_SERVE = "tf.profiler.experimental.server.start(PORT) or jax.profiler.start_server(PORT)"
_RIGHT_PORT = f"Use the port that the job passed to {HOW_TO_SERVE}."
# A protobuf message holds no more (https://protobuf.dev/programming-guides/proto-limits/): one that is announced as
# larger is refused before it takes any memory here.
_MAX_MESSAGE_BYTES = 2**31 - 1

_LATE_S = 0.25  # delay of our own clock after gRPC's, which tells more where it works
_CLOSE_S = 1.0

# Of gRPC's status codes those that a server answers to what it cannot parse.
_OK, _UNIMPLEMENTED, _INTERNAL = 0, 12, 13


def probe(address: str, timeout_s: float = 3.0) -> float:
    """Check that a profiler server answers at ``address``, without disturbing it; returns the seconds that one call
    takes there and back.

    Raises GputopError that names what is there instead, after at most about ``timeout_s`` per step.
    """
    address = parse_address(address)
    check_http2(address, timeout_s)
    return _check_service(address, timeout_s)


def check_http2(address: str, timeout_s: float, *, listen_only: bool = False) -> None:
    """Raise GputopError unless what answers at ``address`` begins to speak HTTP/2. ``listen_only`` sends nothing: for
    ports that nobody has named as a profiler server's."""
    deadline = time.monotonic() + timeout_s
    try:
        with _connect(address, timeout_s) as sock:
            if not listen_only:
                sock.sendall(PREFACE)
            first = _first_bytes(sock, deadline)
    except (ConnectionRefusedError, FileNotFoundError):
        raise GputopError(
            f"nothing listens at {address}",
            f"Start the profiler server in the job with {HOW_TO_SERVE}, and check the host and port.",
        ) from None
    except socket.gaierror as error:
        raise GputopError(f"unknown host {split_address(address)[0]!r}: {error.strerror}",
                          "Check the name, or use the host's IP address.") from None
    except TimeoutError:
        raise GputopError(
            f"no answer from {address} within {timeout_s:g} s",
            "Check the address. A firewall, or a container that does not publish the port, may drop the connection.",
        ) from None
    except OSError as error:
        raise GputopError(f"no connection to {address}: {error.strerror or error}", "Check host and network.") from None
    _judge(address, first, timeout_s)


def _connect(address: str, timeout_s: float) -> socket.socket:
    name = unix_name(address)
    if name is None:
        return socket.create_connection(split_address(address), timeout=timeout_s)
    sock = socket.socket(socket.AF_UNIX)
    try:
        sock.settimeout(timeout_s)
        sock.connect(name)
    except OSError:
        sock.close()
        raise
    return sock


def _first_bytes(sock: socket.socket, deadline: float) -> bytes | None:
    """The first bytes that the other side sends, enough for a frame header; None if it sends nothing."""
    received = bytearray()
    try:
        _receive(sock, received, FRAME_HEADER_BYTES, deadline)
    except TimeoutError:
        return bytes(received) or None
    except ConnectionError:  # closed or reset: it did not like our greeting
        pass
    return bytes(received)


def _judge(address: str, first: bytes | None, timeout_s: float) -> None:
    if first is None:
        raise GputopError(
            f"{address} accepted the connection but sent nothing for {timeout_s:g} s: it is not a profiler server, or "
            "its process is hanging", _RIGHT_PORT)
    if len(first) >= FRAME_HEADER_BYTES and first[3] == SETTINGS and first[5:9] == b"\0\0\0\0":
        return
    if first[:2] == b"\x15\x03":
        raise GputopError(f"{address} expects TLS, but profiler servers use unencrypted gRPC", _RIGHT_PORT)
    if first.startswith(b"HTTP/") or first.lstrip()[:1] == b"<":
        raise GputopError(f"{address} is a web server (TensorBoard, Jupyter, …), not a profiler server", _RIGHT_PORT)
    if first.startswith(b"SSH-"):
        raise GputopError(f"{address} is an SSH server, not a profiler server", _RIGHT_PORT)
    if not first:
        raise GputopError(f"{address} closed the connection immediately: it does not speak gRPC", _RIGHT_PORT)
    answer = first[:24].decode("ascii", "backslashreplace")
    raise GputopError(f"{address} does not speak gRPC; it answered {answer!r}", _RIGHT_PORT)


def _check_service(address: str, timeout_s: float) -> float:
    method, unparsable = f"/{SERVICE}/Terminate", b"\xff"
    try:
        with _connect(address, timeout_s) as sock:
            host = "localhost" if unix_name(address) is not None else address
            code, took_s = status_of(sock, host, method, unparsable, timeout_s)
    except TimeoutError:
        raise _no_answer(address, timeout_s) from None
    except (OSError, Unreadable):
        code, took_s = -1, 0.0
    if code not in (_OK, _UNIMPLEMENTED, _INTERNAL):
        code, took_s = _status_by_grpc(address, method, unparsable, timeout_s)
    if code == _UNIMPLEMENTED:
        raise no_profiler_service(address)
    return took_s


def _status_by_grpc(address: str, method: str, message: bytes, timeout_s: float) -> tuple[int, float]:
    """Status as :func:`status_of` has it, one of the three. Raises GputopError for any other.

    gRPC's own deadlines are kept by the threads that serve the connection: a server that floods it with frames, or
    sends headers without an end, delays them for as long as it likes. So the deadline is kept by a clock of our own.
    """
    grpc = load_grpc()
    channel = open_channel(address)
    answers: queue.SimpleQueue[tuple[Exception | None, float]] = queue.SimpleQueue()

    def call() -> None:
        start, failure = time.monotonic(), None
        try:
            channel.unary_unary(method)(message, timeout=timeout_s)
        except Exception as error:  # noqa: BLE001  raised by who waits
            failure = error
        answers.put((failure, time.monotonic() - start))

    threading.Thread(target=call, name="gputop-call", daemon=True).start()
    try:
        failure, took_s = answers.get(timeout=timeout_s + _LATE_S)
    except queue.Empty:
        raise _no_answer(address, timeout_s) from None
    finally:
        close_channel(channel)
    if failure is None:
        return _OK, took_s
    if not isinstance(failure, grpc.RpcError):
        raise failure
    code, details = failure.code(), failure.details() or ""
    if code == grpc.StatusCode.DEADLINE_EXCEEDED:
        raise _no_answer(address, timeout_s)
    if code.value[0] not in (_UNIMPLEMENTED, _INTERNAL):
        raise GputopError(f"{address} answered {code.name}: {details[:300]}", _RIGHT_PORT)
    return code.value[0], took_s


def _no_answer(address: str, timeout_s: float) -> GputopError:
    return GputopError(
        f"the gRPC server at {address} did not answer within {timeout_s:g} s",
        "The process may be stopped or short of CPU time. Check it and try again.")


def no_profiler_service(address: str) -> GputopError:
    return GputopError(
        f"{address} is a gRPC server without the profiler service (TensorFlow Serving, a tf.distribute worker, …)",
        _RIGHT_PORT)


def load_grpc() -> Any:
    """The grpc package, imported late; it must not write to the terminal, which the screen owns."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    import grpc

    return grpc


def open_channel(address: str) -> grpc.Channel:
    """A channel to ``address`` without TLS or HTTP proxy, which takes answers up to the largest protobuf message."""
    options = [
        ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
        ("grpc.enable_http_proxy", 0),  # clusters set http_proxy; it cannot reach the training nodes
        ("grpc.enable_retries", 0),
    ]
    # gRPC reads the name of a socket as a URI's path.
    target = address if unix_name(address) is None else quote(address, safe="/:")
    channel: grpc.Channel = load_grpc().insecure_channel(target, options=options)
    return channel


def close_channel(channel: grpc.Channel, before: Callable[[], object] = lambda: None) -> None:
    """Close a channel, after ``before``, in a thread of its own, which is waited for a moment: that can take as long
    as the other side likes."""
    def close() -> None:
        before()
        channel.close()

    thread = threading.Thread(target=close, name="gputop-close", daemon=True)
    thread.start()
    thread.join(_CLOSE_S)


# -- one unary gRPC call over a bare socket, of which only the status is read -----------------------

# HTTP/2 frames: RFC 9113; header blocks: RFC 7541; gRPC in them:
# https://github.com/grpc/grpc/blob/master/doc/PROTOCOL-HTTP2.md. The client's preface, followed by an empty SETTINGS
# frame. The server's first frame is SETTINGS too; gRPC's servers send it as soon as the connection stands.
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"
FRAME_HEADER_BYTES = 9
DATA, HEADERS, SETTINGS, PING, GOAWAY = 0, 1, 4, 6, 7
_ACK = _END_STREAM = 1
_END_HEADERS = 4
_STREAM = 1
# Two strings of a header block, each with its length before it (RFC 7541, 5.2): the name, and one to three digits.
_GRPC_STATUS = re.compile(rb"\x0bgrpc-status(?:\x01([0-9])|\x02([0-9]{2})|\x03([0-9]{3}))")
_MAX_ANSWER_BYTES = 1 << 16  # of frames: an answer without a message takes some hundred


class Unreadable(Exception):
    """The answer is none that :func:`status_of` reads; the grpc package may."""


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def status_of(sock: socket.socket, authority: str, method: str, message: bytes, timeout_s: float) -> tuple[int, float]:
    """Call ``method`` ("/package.Service/Name") on a new connection; gRPC's status code and the seconds it took. Raises
    TimeoutError after ``timeout_s``, another OSError where the connection ends, Unreadable."""
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
    _receive(sock, received, count, deadline)
    out = bytes(received[:count])
    del received[:count]
    return out


def _receive(sock: socket.socket, received: bytearray, count: int, deadline: float) -> None:
    """Receive until ``count`` bytes are there. Raises TimeoutError, and ConnectionError where the other side ends."""
    while len(received) < count:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        sock.settimeout(left_s)
        more = sock.recv(4096)
        if not more:
            raise ConnectionResetError
        received += more


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
    """``grpc-status`` of a header block. C's gRPC, which TensorFlow and JAX serve with, writes it as plain text, and
    no text of a header holds the lengths that it is found by. Raises Unreadable."""
    status = _GRPC_STATUS.search(block)
    if status is None:
        raise Unreadable
    return int(status[1] or status[2] or status[3])

"""Announcements of a job's processes to the gputop that started it: a profiler server's address, or why none."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
from collections.abc import Callable
from pathlib import Path

from msgspec import Struct

from gputop.core.codec import parse
from gputop.core.errors import GputopError
from gputop.launch.inside.gputop_serve import socket_name
from gputop.profiler import sockets
from gputop.profiler.addresses import parse_address, process_of, split_address
from gputop.text.units import printable

_CREDENTIALS = struct.Struct("3i")  # struct ucred: pid, uid, gid
_LONGEST_BYTES = 4096
_LOOPBACK, _PROC = "127.0.0.1", Path("/proc")


class Announcement(Struct, frozen=True):
    """``address`` is None where no server could be started; ``line`` is the whole message."""

    address: str | None
    line: str


class Announcements:
    """Receives what :mod:`gputop.launch.inside.gputop_serve` tells under ``token``, on a thread of its own.

    The socket has a name in the kernel, so no file is left behind. The kernel authenticates the sender;
    announcements of users other than root and ``user`` (default: gputop's own user) are ignored, and those of servers
    that the sender's user does not have.
    """

    def __init__(self, token: str, on_announcement: Callable[[Announcement], None], user: int | None = None) -> None:
        self._callback = on_announcement
        self._users = {0, os.getuid() if user is None else user}
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._socket.bind(socket_name("run", token))

    def start(self) -> None:
        threading.Thread(target=self._receive, name="gputop-announcements", daemon=True).start()

    def receive(self, timeout_s: float) -> Announcement | None:
        """The next announcement, instead of :meth:`start`; None if none comes within ``timeout_s``."""
        self._socket.settimeout(timeout_s)
        with contextlib.suppress(TimeoutError, BlockingIOError):
            while True:
                if (announcement := self._next()) is not None:
                    return announcement
        return None

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _receive(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                if (announcement := self._next()) is not None:
                    self._callback(announcement)

    def _next(self) -> Announcement | None:
        data, ancillary, _, _ = self._socket.recvmsg(_LONGEST_BYTES, socket.CMSG_SPACE(_CREDENTIALS.size))
        senders = [_CREDENTIALS.unpack(value)[:2] for level, kind, value in ancillary
                   if (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS)]
        if not senders or senders[0][1] not in self._users:
            return None
        try:
            message = parse(data)
            address = message["address"]
            if isinstance(address, str) and process_of(address) is not None:
                address = f"pid:{senders[0][0]}"  # in a PID namespace of its own it knows another number
            elif address is not None and not _is_served_by(address, senders[0][1]):
                return None
            return Announcement(None if address is None else printable(str(address)), printable(str(message["line"])))
        except (ValueError, KeyError, TypeError):
            return None


def _is_served_by(address: object, uid: int) -> bool:
    """Return whether a user listens at an address of this machine's loopback: gputop captures there without a question,
    and a job may announce the server of another user, or another machine."""
    try:
        host, port = split_address(parse_address(str(address)))
    except (GputopError, ValueError):
        return False
    return host == _LOOPBACK and sockets.listening_uids(_PROC, host, port) == {uid}

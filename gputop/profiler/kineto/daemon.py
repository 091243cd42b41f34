"""Answers the polls of kineto's clients for the time of a capture.

Who sends a datagram is told by the kernel (SO_PASSCRED), in the PIDs of gputop's own namespace; what the datagram says
of that is ignored. Only registered processes get a config, each once.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

from msgspec import Struct

from gputop.core.errors import GputopError
from gputop.profiler.kineto.folder import SocketFolder
from gputop.profiler.kineto.protocol import (
    GPUTOP,
    MAX_DATAGRAM_BYTES,
    RecordingConfig,
    decode,
    encode_config,
    is_client_name,
    poll_in,
)

_CREDENTIALS = struct.Struct("3i")  # struct ucred: pid, uid, gid
_LOCK_PERIOD_S = 0.2
_LOCK_TIMEOUT_S = 60.0
_DATAGRAMS_AT_ONCE = 64  # of one folder, before the others have their turn


class Event(Struct, frozen=True):
    """What a process sent: a poll, or the ``report`` of gputop's code in it. ``configured``: the poll was answered with
    the config that was registered."""

    pid: int
    ready: bool = False
    configured: bool = False
    report: bytes | None = None


class Daemon:
    """The daemon in one folder, from :func:`serving` on."""

    def __init__(self, folder: SocketFolder, socket_: socket.socket) -> None:
        self.folder, self._socket = folder, socket_
        self._configs: dict[int, bytes] = {}

    def fileno(self) -> int:
        return self._socket.fileno()

    def register(self, pid: int, config: RecordingConfig) -> None:
        """Give this config to the process at its next poll that is ready for one."""
        self._configs[pid] = encode_config(config.text())

    def withdraw(self, pid: int) -> None:
        self._configs.pop(pid, None)

    def receive(self) -> list[Event]:
        """What has come, answered; never blocks."""
        events = []
        for _ in range(_DATAGRAMS_AT_ONCE):
            try:
                data, ancillary, _, address = self._socket.recvmsg(
                    MAX_DATAGRAM_BYTES + 1, socket.CMSG_SPACE(_CREDENTIALS.size))
            except OSError:
                break
            event = self._handle(data, ancillary, address)
            if event is not None:
                events.append(event)
        return events

    def _handle(self, data: bytes, ancillary: Iterable[tuple[int, int, bytes]], address: object) -> Event | None:
        senders = [_CREDENTIALS.unpack(value)[:2] for level, kind, value in ancillary
                   if (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS) and len(value) == _CREDENTIALS.size]
        message = decode(data)
        if not senders or message is None:
            return None
        pid, uid = senders[0]
        if pid <= 0 or uid not in (self.folder.uid, 0):
            return None
        if message.type == GPUTOP:
            return Event(pid, report=message.body)
        poll = poll_in(message)
        name = address.rpartition("/")[2] if isinstance(address, str) else ""
        if poll is None or not is_client_name(name):
            return None
        config = self._configs.get(pid) if poll.ready else None
        sent = self.folder.send(self._socket, name, config if config is not None else encode_config(""))
        configured = sent and config is not None
        if configured:
            del self._configs[pid]
        return Event(pid, poll.ready, configured)


@contextlib.contextmanager
def serving(folder: SocketFolder, stopped: Callable[[], bool] = lambda: False) -> Iterator[Daemon]:
    """Be the daemon in a folder for the block; its socket is gone afterwards. Raises GputopError.

    Waits for another gputop that serves there, for as long as a capture usually takes.
    """
    deadline = time.monotonic() + _LOCK_TIMEOUT_S
    while not folder.lock():
        if stopped() or time.monotonic() > deadline:
            raise GputopError(f"another gputop captures from the jobs of {folder.path}", "Try again when it has ended.")
        time.sleep(_LOCK_PERIOD_S)
    folder.sweep()
    socket_, state = folder.bind()
    try:
        yield Daemon(folder, socket_)
    finally:
        folder.unbind(state)
        socket_.close()


def wait(daemons: Sequence[Daemon], timeout_s: float) -> list[Event]:
    """The next events of several daemons; none after ``timeout_s``."""
    waiting = select.poll()  # not select(2), which knows no descriptor above 1023
    for daemon in daemons:
        waiting.register(daemon.fileno(), select.POLLIN)
    ready = {descriptor for descriptor, _ in waiting.poll(max(0.0, timeout_s) * 1000)}
    return [event for daemon in daemons if daemon.fileno() in ready for event in daemon.receive()]

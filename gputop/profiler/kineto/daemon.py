"""Answers the polls of kineto's clients for the time of a capture.

Who sends a datagram is told by the kernel (SO_PASSCRED), in the PIDs of gputop's own namespace; what the datagram says
of that is ignored. Only registered processes get a config, each once.
"""

from __future__ import annotations

import contextlib
import os
import queue
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator

from msgspec import Struct
from msgspec.structs import replace

from gputop.core.errors import GputopError
from gputop.profiler import sockets
from gputop.profiler.kineto import protocol
from gputop.profiler.kineto.folder import SocketFolder, is_of_gputop

_LOCK_PERIOD_S = 0.2
_LOCK_TIMEOUT_S = 60.0
_DATAGRAMS_AT_ONCE, _MAX_EVENTS = 64, 256
_LEAST_LEAD_MS = 1000  # kineto looks at its requests once a second, and drops what it is too late for


class DaemonEvent(Struct, frozen=True):
    """Message of a process: a poll, or the ``report`` of gputop's code in it. ``start_ms``: the poll was answered with
    the config that was registered, and its recording begins at this Unix time."""

    pid: int
    ready: bool = False
    start_ms: int = 0
    report: bytes | None = None


class Daemon:
    """The daemon in one folder, from :func:`serving` on; its thread answers. For any number of threads that capture."""

    def __init__(self, folder: SocketFolder, socket_: socket.socket) -> None:
        self.folder, self._socket = folder, socket_
        self.users = 1  # blocks of :func:`serving`
        self._configs: dict[int, protocol.RecordingConfig] = {}
        self._listeners: dict[int, queue.SimpleQueue[DaemonEvent]] = {}
        self._turns: dict[int, threading.Lock] = {}
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="gputop-kineto", daemon=True)
        self._thread.start()

    @contextlib.contextmanager
    def events_of(self, pid: int) -> Iterator[queue.SimpleQueue[DaemonEvent]]:
        """Yield what the process sends during the block; waits for another thread's block for it."""
        with self._turns.setdefault(pid, threading.Lock()):
            events = self._listeners[pid] = queue.SimpleQueue()
            try:
                yield events
            finally:
                self._listeners.pop(pid, None)
                self._configs.pop(pid, None)

    def close(self) -> None:
        self._closing.set()
        self._socket.shutdown(socket.SHUT_RD)  # wakes the thread
        self._thread.join()
        self._socket.close()

    def _serve(self) -> None:
        waiting = select.poll()  # not select(2), which knows no descriptor above 1023
        waiting.register(self._socket.fileno(), select.POLLIN)
        while not self._closing.is_set():
            waiting.poll()
            for event in self.receive():
                listener = self._listeners.get(event.pid)
                if listener is not None and listener.qsize() < _MAX_EVENTS:
                    listener.put(event)

    def register(self, pid: int, config: protocol.RecordingConfig) -> None:
        """Give this config to the process at its next poll that is ready for one. Raises ValueError."""
        protocol.encode_config(config.text())
        self._configs[pid] = config

    def withdraw(self, pid: int) -> bool:
        """Take back the config of a process; returns whether it had not been given to it."""
        return self._configs.pop(pid, None) is not None

    def send(self, name: str, datagram: bytes) -> bool:
        """Send to another socket in the folder; returns whether it went. Never blocks."""
        return self.folder.send(self._socket, name, datagram)

    def receive(self) -> list[DaemonEvent]:
        """Answer and return what has come; never blocks."""
        events = []
        for _ in range(_DATAGRAMS_AT_ONCE):
            try:
                datagram = sockets.receive(self._socket, protocol.MAX_DATAGRAM_BYTES + 1)
            except OSError:
                break
            if (event := self._handle(*datagram)) is not None:
                events.append(event)
        return events

    def _handle(self, data: bytes, sender: tuple[int, int] | None, address: object) -> DaemonEvent | None:
        message = protocol.decode(data)
        if sender is None or message is None:
            return None
        pid, uid = sender
        if pid <= 0 or uid not in (self.folder.uid, 0):
            return None
        if message.type == protocol.GPUTOP:
            return DaemonEvent(pid, report=message.body)
        ready = protocol.takes_config(message)
        name = address.rpartition("/")[2] if isinstance(address, str) else ""
        if ready is None or not protocol.is_client_name(name):
            return None
        config = self._configs.pop(pid, None) if ready else None
        if config is None:
            # A client waits 90 ms for an answer and reads one at each poll: each that came later would delay all that
            # follow by a poll, for good. Clients that gputop has not made complain of polls without an answer.
            if not is_of_gputop(self.folder.path):
                self.folder.send(self._socket, name, protocol.encode_config(""))
            return DaemonEvent(pid, ready)
        now_ms = round(1000 * time.time())
        start_ms = config.start_ms if config.start_ms > now_ms + _LEAST_LEAD_MS else now_ms + config.lead_ms
        if self.folder.send(self._socket, name, protocol.encode_config(replace(config, start_ms=start_ms).text())):
            return DaemonEvent(pid, ready, start_ms)
        self._configs[pid] = config
        return DaemonEvent(pid, ready)


_served: dict[tuple[int, int], Daemon] = {}  # by device and inode of the folder
_serving_lock = threading.Lock()


@contextlib.contextmanager
def serving(folder: SocketFolder, stopped: Callable[[], bool] = lambda: False) -> Iterator[Daemon]:
    """Be the daemon in a folder for the block; its socket is gone afterwards. Raises GputopError. Processes with one
    folder share the daemon. Waits for another gputop that serves there, for as long as a capture usually takes."""
    state = os.fstat(folder.folder.fd)
    key = state.st_dev, state.st_ino
    deadline = time.monotonic() + _LOCK_TIMEOUT_S
    while True:
        with _serving_lock:
            daemon = _served.get(key)
            if daemon is not None:
                daemon.users += 1
                break
            if folder.lock():
                daemon = _served[key] = _start(folder)
                break
        if stopped() or time.monotonic() > deadline:
            raise GputopError(f"another gputop is using {folder.path}", "Try again when that capture has ended.")
        time.sleep(_LOCK_PERIOD_S)
    try:
        yield daemon
    finally:
        with _serving_lock:
            daemon.users -= 1
            if not daemon.users:
                del _served[key]
                daemon.folder.unbind()  # before it reads no more: who sends would wait
                daemon.close()
                daemon.folder.close()


def _start(folder: SocketFolder) -> Daemon:
    """Raises GputopError."""
    kept_folder = folder.duplicate()  # who came first may leave first
    try:
        kept_folder.sweep()
        return Daemon(kept_folder, kept_folder.bind())
    except BaseException:
        kept_folder.close()
        raise

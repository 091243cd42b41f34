"""The folder of a daemon's socket: in the job's root, of the job's user, closed to everybody else.

Its owner may put anything there and exchange what gputop put there; therefore gputop holds it open, follows no link in
it, and binds the socket with the rights of that user, in that user's root. The folder outlives a capture, because the
job's socket is in it. It goes once its job has ended: at the end of ``gputop run``, or when a later gputop sweeps.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import socket
import stat
import time
from pathlib import Path, PurePosixPath

from gputop.core.errors import GputopError, os_errors_as
from gputop.core.files import Folder, UnsafeFile, folder_of_process
from gputop.profiler.kineto import as_process
from gputop.profiler.kineto.protocol import CLIENT_PREFIX, DAEMON_NAME, MAX_FOLDER_CHARS
from gputop.text.units import printable

PLACE = PurePosixPath("/tmp")  # in the job's root: newer kineto writes traces below it, whatever else is set
CONFIG_NAME = "kineto.conf"
_LOCK_NAME = ".gputop-lock"
TRACE_PREFIX = "gputop-trace-"  # of the names of traces, until they are fetched
_PREFIX = "gputop-kineto-"
# The clients' base config: each poll is a file looked for, in a thread of kineto's. It polls every 5 s without it.
_BASE_CONFIG = b"ON_DEMAND_CONFIG_UPDATE_INTERVAL_SECS=1\n"
_UNUSED_MAX_AGE_S = 24 * 3600.0  # age of a folder that no job has put a socket into
_PARTIAL, _WRITTEN_MAX_AGE_S = ".tmp", 1800.0  # of a trace that kineto has not finished
_MAX_SWEPT = 256
_MAX_ENTRIES = 4096


def is_of_gputop(folder: PurePosixPath) -> bool:
    """Return whether gputop, or a job that it prepared, made a folder: its clients poll often and log nothing."""
    return folder.name.startswith(_PREFIX)


class SocketFolder:
    """A folder of sockets, held open; ``path`` is where its job sees it."""

    def __init__(self, path: PurePosixPath, folder: Folder, pid: int, uid: int) -> None:
        self.path, self.folder, self.pid, self.uid = path, folder, pid, uid
        self._bound: os.stat_result | None = None
        self._lock = -1

    @classmethod
    def create(cls, pid: int, uid: int) -> SocketFolder:
        """A new one in the root of process ``pid``, whose user is ``uid``. Raises GputopError."""
        name = f"{_PREFIX}{os.urandom(6).hex()}"

        def make() -> Folder:
            with folder_of_process(pid, Path(PLACE)) as temporary:
                folder = temporary.make(name)
                try:
                    with os.fdopen(folder.create(CONFIG_NAME, 0o644), "wb") as config:
                        config.write(_BASE_CONFIG)
                    if os.fstat(folder.fd).st_uid != uid:
                        raise UnsafeFile("somebody exchanged it", name)
                except OSError:
                    folder.remove(CONFIG_NAME)
                    folder.close()
                    temporary.remove_folder(name)
                    raise
            return folder

        with os_errors_as(f"cannot create a socket folder in {PLACE} of process {pid}",
                          f"{PLACE} must be a folder there, not a link, and have space for two files."):
            folder = as_process.with_rights(pid, uid, make)
        return cls(PLACE / name, folder, pid, uid)

    @classmethod
    def open(cls, pid: int, path: PurePosixPath, uid: int) -> SocketFolder:
        """Open the folder in which process ``pid`` of user ``uid`` has its socket. Raises GputopError, also where other
        users could bind a daemon's name there."""
        if len(str(path)) > MAX_FOLDER_CHARS or not path.is_absolute() or not str(path).isprintable():
            raise GputopError(f"the kineto socket of process {pid} is in {printable(str(path))}, a folder that gputop "
                              "cannot use", "KINETO_IPC_SOCKET_DIR must be an absolute path of at most "
                                            f"{MAX_FOLDER_CHARS} printable characters.")
        with os_errors_as(f"cannot enter {path}, the kineto socket folder of process {pid}",
                          "The folder was removed or is a link. Restart the job to make it usable."):
            folder = folder_of_process(pid, Path(path))
        state = os.fstat(folder.fd)
        if state.st_uid != uid or state.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            folder.close()
            raise GputopError(f"other users could send requests to kineto in process {pid}, because {path} belongs to "
                              "them or is writable for them",
                              "Set KINETO_IPC_SOCKET_DIR to a folder with mode 0700, or start the job with gputop run.")
        return cls(path, folder, pid, uid)

    def __enter__(self) -> SocketFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.unlock()
        self.folder.close()

    def duplicate(self) -> SocketFolder:
        """The same, to be closed by itself; :meth:`lock` is from now on the duplicate's."""
        folder = SocketFolder(self.path, self.folder.enter("."), self.pid, self.uid)
        folder._lock, self._lock = self._lock, -1
        return folder

    def unlock(self) -> None:
        if self._lock >= 0:
            self.folder.remove(_LOCK_NAME)
            os.close(self._lock)
            self._lock = -1

    def lock(self) -> bool:
        """Return whether this gputop is now the one that serves here, until :meth:`unlock` or :meth:`close`, or gputop
        ends. Others cannot hold it: its file can be opened by the job's user and root alone. Raises GputopError."""
        try:
            self._lock = self.folder.take(_LOCK_NAME, self.uid)
        except BlockingIOError:
            return False
        except OSError as error:
            raise GputopError(f"cannot lock {self.path} of process {self.pid}: {error.strerror or error}",
                              f"The folder must have space for {_LOCK_NAME}, a file of the job's user.") from None
        return True

    def bind(self) -> socket.socket:
        """The daemon's socket. Raises GputopError where another daemon has that name."""
        if self.answers(DAEMON_NAME):
            raise GputopError(f"another daemon, such as dynolog, serves the kineto sockets in {self.path}",
                              "Stop that daemon, or capture with its own tool (dyno gputrace).")
        daemon = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            daemon.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
            daemon.setblocking(False)
            as_process.run(self.pid, self.uid, lambda: daemon.bind(f"{self.path}/{DAEMON_NAME}"))
            self._bound = self.folder.state(DAEMON_NAME)
            return daemon
        except OSError as error:
            daemon.close()
            raise GputopError(f"cannot create a socket in {self.path} of process {self.pid}: {error.strerror or error}",
                              as_process.fix(error)) from None

    def unbind(self) -> None:
        """Remove the daemon's socket if it still is ours: a job would wait for one that nobody reads."""
        with contextlib.suppress(OSError):
            if self._bound is not None and os.path.samestat(self.folder.state(DAEMON_NAME), self._bound):
                self.folder.remove(DAEMON_NAME)

    def send(self, daemon: socket.socket, name: str, datagram: bytes) -> bool:
        """Send to the socket of that name, if it is the job's user's; returns whether it went. Never blocks."""
        try:
            with self.folder.socket(name, self.uid) as path:
                daemon.sendto(datagram, path)
        except OSError:  # its queue is full, or nobody has it open any more
            return False
        return True

    def sweep(self) -> None:
        """Remove the socket and the traces that a killed gputop left here. Only for the one that has the lock."""
        with contextlib.suppress(OSError):
            if not self.answers(DAEMON_NAME):
                self.folder.remove(DAEMON_NAME)
            for name in self.folder.names(_MAX_ENTRIES):
                if name.startswith(TRACE_PREFIX) and not self._is_being_written(name):
                    self.folder.remove(name)

    def _is_being_written(self, name: str) -> bool:
        """Return whether a recording that a killed gputop began may go on: kineto complains in the job's stderr of a
        file that it cannot rename. Raises OSError."""
        return name.endswith(_PARTIAL) and time.time() - self.folder.state(name).st_mtime < _WRITTEN_MAX_AGE_S

    def in_use(self) -> bool:
        """Return whether a job has a socket here; an empty folder that is young counts, its job may be starting."""
        try:
            names = self.folder.names(_MAX_ENTRIES)
            clients = [name for name in names if name.startswith(CLIENT_PREFIX)]
            if not clients:
                # The folder's own time is that of the last lock.
                made = self.folder.state(CONFIG_NAME) if CONFIG_NAME in names else os.fstat(self.folder.fd)
                return time.time() - made.st_mtime < _UNUSED_MAX_AGE_S
            return any(self.answers(name) for name in clients)
        except OSError:
            return True

    def remove(self) -> None:
        """Remove it with the files in it, as far as possible; no folder in it, which may be a mount of the user's."""
        with contextlib.suppress(OSError):
            for name in self.folder.names(_MAX_ENTRIES):
                self.folder.remove(name)
            with self.folder.enter("..") as above:
                if os.path.samestat(above.state(self.path.name), os.fstat(self.folder.fd)):
                    above.remove_folder(self.path.name)

    def answers(self, name: str) -> bool:
        """Return whether a process has the socket of that name open."""
        with contextlib.suppress(OSError), self.folder.socket(name) as path:
            try:
                with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probe:
                    probe.setblocking(False)
                    probe.connect(path)
            except OSError as error:
                # Nobody has it open; or it is a socket of streams, which is no daemon's.
                return error.errno not in (errno.ECONNREFUSED, errno.EPROTOTYPE)
            return True
        return False


def sweep(parent: Path = Path(PLACE)) -> None:
    """Remove from this machine's /tmp what killed gputops and jobs that have ended left; of other users only as root.
    Raises nothing, follows no link, and leaves alone what another gputop serves."""
    with contextlib.suppress(OSError), Folder(parent) as above:
        with os.scandir(above.fd) as entries:
            named = (entry.name for entry in entries if entry.name.startswith(_PREFIX))
            left = list(itertools.islice(named, _MAX_SWEPT))
        for name in left:
            with contextlib.suppress(OSError, GputopError), above.enter(name) as folder:
                uid = os.fstat(folder.fd).st_uid
                if os.geteuid() not in (0, uid):
                    continue
                stale = SocketFolder(PurePosixPath(parent) / name, folder, os.getpid(), uid)
                if not stale.lock():
                    continue
                try:
                    stale.sweep()
                    if not stale.in_use():
                        stale.remove()
                finally:
                    stale.unlock()

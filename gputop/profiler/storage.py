"""Traces on disk: run folders in a TensorBoard logdir.

Layout, as XProf and TensorBoard open it: ``<logdir>/plugins/profile/<run>/<host>.xplane.pb``.

gputop may run as root beside the jobs of others. Therefore a run's folder and its file are opened once, before the job
is recorded, and from then on used by their descriptors; a logdir that another user could exchange is refused.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import re
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import BinaryIO

from msgspec import Struct, field

from gputop.core import files
from gputop.core.errors import EXIT_USAGE, GputopError, os_errors_as
from gputop.profiler.stale_files import partial_name

TRACE = ".xplane.pb"
_RUN_NAME = "%Y_%m_%d_%H_%M_%S"  # TensorBoard's
_RESERVE_BYTES = 64 * 1024
# A server's own file is copied up to this size and up to the free space. TensorFlow up to 2.20 serializes its trace
# into one protobuf message of at most 2 GiB.
MAX_COPY_BYTES = 4 << 30
_RESERVED_PARTS, _RESERVED_BYTES = 20, 1 << 30  # left free by what another node sends: 5% of a disk, or 1 GiB
_COPY_AFTER_STOP_S = 60.0  # for the trace of a recording that was stopped early
_REPORT_PERIOD_S = 0.125


def stops_copy(stop: threading.Event, report: Callable[[], None] = lambda: None) -> Callable[[], bool]:
    """Make the test whether a copy is to end: ``stop`` was set while it went on, or so long before that it takes too
    long.

    A recording that was stopped early is kept: then ``stop`` is set before its copy begins. ``report`` is called about
    eight times a second, and may be what sets ``stop``.
    """
    ended_early, begun_s = stop.is_set(), time.monotonic()
    reported_s = begun_s

    def stopped() -> bool:
        nonlocal reported_s
        now_s = time.monotonic()
        if now_s - reported_s >= _REPORT_PERIOD_S:
            reported_s = now_s
            report()
        return stop.is_set() and (not ended_early or now_s - begun_s > _COPY_AFTER_STOP_S)

    return stopped


class RunFolder(Struct):
    """A run's folder and in it a file to write to, both held open before the job is disturbed.

    End it with :meth:`save` or :meth:`adopt`, and :meth:`discard` in any case, as the end of a ``with`` block does: it
    closes the descriptors.
    """

    path: Path
    host: str
    folder: files.Folder
    _partial: str  # name of the file in ``folder`` until it is whole
    _descriptor: int
    _made: list[Path] = field(default_factory=list)  # folders this capture made, outermost first
    _ending: str = TRACE
    save_error: str = ""  # why a trace was saved elsewhere

    @classmethod
    def create(cls, logdir: str | Path, host: str, run: str | None = None, ending: str = TRACE) -> RunFolder:
        """Make a new run folder; raises GputopError where the logdir cannot be written, or is not safe to write to.

        ``run`` is one that exists, of a capture of several hosts or grains: its maker removes it. ``ending`` is that of
        the file's name.
        """
        profiles = _profiles_of(logdir)
        host = re.sub(r"[^A-Za-z0-9._-]", "_", host) or "host"
        made: list[Path] = []
        try:
            with files.writable_folder(profiles, "--logdir") as parent:
                made += parent.made
                if run is None:
                    folder = _new_folder(parent, datetime.now().strftime(_RUN_NAME))
                    made.append(folder.path)
                else:
                    folder = parent.enter(run)
            try:
                partial, descriptor = _reserved(folder, host)
            except OSError:
                folder.close()
                raise
        except OSError as error:
            files.remove_empty(made)
            raise GputopError(
                f"cannot write traces to {logdir}: {error.strerror or error} ({profiles / (error.filename or '')})",
                "Choose a writable folder with --logdir DIR. The job was not disturbed.",
            ) from None
        return cls(folder.path, host, folder, partial, descriptor, made, ending)

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self.discard()

    @property
    def file(self) -> Path:
        return self.path / self.name

    @property
    def name(self) -> str:
        return f"{self.host}{self._ending}"

    @property
    def partial(self) -> Path:
        """The file until the trace in it is whole."""
        return self.path / self._partial

    def save(self, data: bytes) -> Path:
        """Write the trace, whole or not at all, and return where; raises GputopError. The job has paid for it by now:
        where the logdir cannot take it any more, it goes to another place, and ``save_error`` gives the reason."""
        try:
            return self.receive(io.BytesIO(data), len(data))  # shares the bytes, does not copy them
        except OSError as error:
            self.save_error = error.strerror or str(error)
        tried = _fallback_folders(self.path, len(data))
        for folder in tried:
            with contextlib.suppress(OSError, GputopError):
                return _save_below(folder, self.host, data)
        nor = f", or in {', '.join(map(str, tried))}" if tried else ""
        raise GputopError(
            f"the trace ({len(data) / 1e6:.1f} MB) could not be saved as {self.file}: {self.save_error}{nor}",
            "Free some space or choose another --logdir, and capture again; gputop left no partial files behind.")

    def adopt(self, source: BinaryIO, source_path: Path, stopped: Callable[[], bool] = lambda: False) -> Path:
        """Take over a trace that is open as ``source``: in place already, or copied. Raises GputopError that names
        ``source_path``, which stays as it is; also once ``stopped()``, and for a file that is too large."""
        with os_errors_as(
                f"the trace could not be copied from {source_path} to {self.file}",
                f"The trace is still at {source_path}. Free some space or choose another --logdir, or copy the trace "
                "manually and run `gputop analyze` on it."):
            if self._holds(source):
                self.folder.remove(self._partial)
                return self.file
            return self.receive(source, self._max_copy_bytes(source), stopped)

    def take_over(self, path: Path) -> Path:
        """:meth:`adopt` a file that gputop itself has written; raises GputopError."""
        with os_errors_as(f"cannot read {path}", "Check the file system."), files.open_regular(
                path, follow_links=False) as file:
            return self.adopt(file, path)

    def open_trace(self) -> BinaryIO:
        """The trace after :meth:`adopt`, for reading; raises OSError."""
        return files.open_regular(self.name, follow_links=False, folder_fd=self.folder.fd)

    def discard(self) -> None:
        """Close the descriptors and remove what this capture made, as far as it is empty. A saved trace stays."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
            self.folder.remove(self._partial)
            self.folder.close()
            files.remove_empty(self._made)

    def _holds(self, source: BinaryIO) -> bool:
        """Return whether ``source`` is the file at the trace's own name in this folder. Raises OSError."""
        try:
            return os.path.samestat(self.folder.state(self.name), os.fstat(source.fileno()))
        except FileNotFoundError:
            return False

    def free_bytes(self, *, reserve: bool = False) -> int:
        """Bytes that its file system still takes; with ``reserve``, so that others find room too. Raises OSError."""
        disk = os.fstatvfs(self.folder.fd)
        kept = min(disk.f_blocks * disk.f_frsize // _RESERVED_PARTS, _RESERVED_BYTES) if reserve else 0
        return disk.f_bavail * disk.f_frsize - kept

    def _max_copy_bytes(self, source: BinaryIO) -> int:
        """Number of bytes that may be copied; raises OSError where ``source`` is larger."""
        size = os.fstat(source.fileno()).st_size
        free = self.free_bytes()
        if size > MAX_COPY_BYTES:
            raise OSError(errno.EFBIG, f"the trace is too large ({size / 1e6:,.0f} MB; gputop copies at most "
                                       f"{MAX_COPY_BYTES / 1e6:,.0f} MB)")
        if size > free:
            raise OSError(errno.ENOSPC, f"the trace needs {size / 1e6:,.0f} MB, and {free / 1e6:,.0f} MB are free")
        return min(MAX_COPY_BYTES, free)

    def receive(self, source: files.Readable, max_bytes: int, stopped: Callable[[], bool] = lambda: False) -> Path:
        """Save what comes from ``source``, whole or not at all, and return where. Raises OSError, nothing partial left
        behind, also once ``stopped()``; and what ``source.read`` raises."""
        try:
            os.lseek(self._descriptor, 0, os.SEEK_SET)
            os.ftruncate(self._descriptor, 0)
            with os.fdopen(self._descriptor, "wb", closefd=False) as out:
                files.copy_bounded(source, out, max_bytes, stopped)
                out.flush()
                os.fsync(self._descriptor)
            if not os.path.samestat(self.folder.state(self._partial), os.fstat(self._descriptor)):
                raise OSError(errno.ESTALE, "the file was replaced while gputop was writing it", str(self.partial))
            if self.folder.has(self.name):
                raise FileExistsError(errno.EEXIST, "a trace with this name already exists", str(self.file))
            self.folder.move(self._partial, self.name, replace=False)
        except OSError:
            self.folder.remove(self._partial)
            raise
        return self.file


def _profiles_of(logdir: str | Path) -> Path:
    """The folder of the runs in a logdir; raises GputopError (usage)."""
    if "://" in str(logdir):
        raise GputopError(f"{logdir} is not a folder on this machine", "Give a local --logdir.", EXIT_USAGE)
    try:
        return Path(logdir).expanduser().absolute() / "plugins" / "profile"
    except (RuntimeError, OSError) as error:  # no such user; the working directory is gone
        raise GputopError(f"{logdir} is not a folder on this machine: {error}", "Give an absolute --logdir.",
                          EXIT_USAGE) from None


def _reserved(folder: files.Folder, host: str) -> tuple[str, int]:
    """Name and descriptor of a new file in ``folder`` that can be filled; raises OSError, nothing left behind."""
    name = partial_name(host)
    descriptor = folder.create(name)
    try:
        # A full disk or a spent quota lets files be made, not filled.
        with os.fdopen(descriptor, "wb", closefd=False) as file:
            file.write(bytes(_RESERVE_BYTES))
            file.flush()
            os.fsync(descriptor)
    except OSError:
        os.close(descriptor)
        folder.remove(name)
        raise
    return name, descriptor


def _fallback_folders(full: Path, size: int) -> list[Path]:
    """Folders with room for ``size`` bytes where a trace can go instead, other file systems first."""
    on_full_disk: dict[Path, bool] = {}
    for text in (os.environ.get("XDG_CACHE_HOME") or "~/.cache", tempfile.gettempdir(), "/var/tmp"):
        with contextlib.suppress(OSError, RuntimeError):  # it is not there; there is no home
            folder = Path(text).expanduser()
            if shutil.disk_usage(folder).free > size + _RESERVE_BYTES and files.untrusted_ancestor(folder) is None:
                on_full_disk[folder] = folder.stat().st_dev == full.stat().st_dev
    return sorted(on_full_disk, key=lambda folder: on_full_disk[folder])


def _save_below(folder: Path, host: str, data: bytes) -> Path:
    """Save in a new logdir below ``folder``; raises OSError or GputopError, nothing left behind."""
    logdir = tempfile.mkdtemp(prefix="gputop-traces-", dir=folder)
    try:
        with RunFolder.create(logdir, host) as run:
            return run.receive(io.BytesIO(data), len(data))
    except BaseException:
        shutil.rmtree(logdir, ignore_errors=True)
        raise


def _new_folder(parent: files.Folder, name: str) -> files.Folder:
    for attempt in range(1, 1000):
        with contextlib.suppress(FileExistsError):
            return parent.make(name if attempt == 1 else f"{name}_{attempt}")
    raise FileExistsError(errno.EEXIST, "no unused run name", str(parent.path / name))

"""Where traces land: run folders in a TensorBoard logdir, and fetching what a server wrote itself.

Layout, as XProf and TensorBoard open it: ``<logdir>/plugins/profile/<run>/<host>.xplane.pb``.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import secrets
import shutil
import tempfile
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import BinaryIO

from gputop.core.errors import EXIT_USAGE, GputopError
from gputop.profiler import sockets
from gputop.profiler.probe import is_local, split_address, unix_name
from gputop.profiler.stale_files import partial_name

_RUN_NAME = "%Y_%m_%d_%H_%M_%S"  # TensorBoard's
_PROC = Path("/proc")
_RESERVE_BYTES = 64 * 1024
_CHUNK_BYTES = 8 * 1024 * 1024


@dataclass
class RunFolder:
    """A run's folder, made before the job is disturbed, with a file in it that can be written.

    End it with :meth:`save`, :meth:`adopt` or :meth:`discard`.
    """

    path: Path
    host: str
    _temporary: Path
    _made: list[Path] = field(default_factory=list)  # folders this capture made, outermost first
    save_error: str = ""  # why a trace was saved elsewhere

    @classmethod
    def create(cls, logdir: str | Path, host: str, run: str | None = None) -> RunFolder:
        """Make a new run folder; raises GputopError where the logdir cannot be written.

        ``run`` is one that exists, of a capture of several hosts: who made it removes it.
        """
        if "://" in str(logdir):
            raise GputopError(f"{logdir} is not a folder of this machine", "Give a local --logdir.", EXIT_USAGE)
        try:
            profiles = Path(logdir).expanduser().absolute() / "plugins" / "profile"
        except (RuntimeError, OSError) as error:  # no such user; the working directory is gone
            raise GputopError(f"{logdir} is not a folder of this machine: {error}", "Give an absolute --logdir.",
                              EXIT_USAGE) from None
        host = re.sub(r"[^A-Za-z0-9._-]", "_", host) or "host"
        made: list[Path] = []
        partial: Path | None = None
        try:
            for above in (*reversed(profiles.parents), profiles):
                if not above.is_dir():
                    above.mkdir(exist_ok=True)
                    made.append(above)
            if run is None:
                path = _new_folder(profiles, datetime.now().strftime(_RUN_NAME))
                made.append(path)
            else:
                path = profiles / run
            partial = path / partial_name(host)
            with partial.open("xb") as file:
                # A full disk or a spent quota lets files be made, not filled.
                file.write(bytes(_RESERVE_BYTES))
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            if partial is not None:
                _remove_file(partial)
            _remove_empty(made)
            raise GputopError(
                f"cannot write traces to {logdir}: {error.strerror or error} ({error.filename or profiles})",
                "Choose a folder you can write to with --logdir DIR. The job was not disturbed.",
            ) from None
        return cls(path, host, partial, made)

    @property
    def file(self) -> Path:
        """Where the trace will be."""
        return self.path / f"{self.host}.xplane.pb"

    def save(self, data: bytes) -> Path:
        """Write the trace, whole or not at all, and say where; raises GputopError.

        The job has paid for it by now: where the logdir cannot take it any more, it goes to
        another place, and ``save_error`` says why.
        """
        try:
            return self._fill(io.BytesIO(data))  # shares the bytes, does not copy them
        except OSError as error:
            self.save_error = error.strerror or str(error)
        tried = _fallback_folders(self.path, len(data))
        for folder in tried:
            with contextlib.suppress(OSError, GputopError):
                return _save_below(folder, self.host, data)
        nor = f", nor in {', '.join(map(str, tried))}" if tried else ""
        raise GputopError(
            f"the trace ({len(data) / 1e6:.1f} MB) could not be saved as {self.file}: {self.save_error}{nor}",
            "Make room or choose another --logdir, and capture again; nothing partial was left behind.",
        )

    def adopt(self, source: Path) -> Path:
        """Take over a trace the server wrote: in place already, or copied from ``source``.

        Raises GputopError that names ``source``, which stays as it is.
        """
        try:
            if self.file.exists() and source.samefile(self.file):
                _remove_file(self._temporary)
                return self.file
            with source.open("rb") as opened:
                return self._fill(opened)
        except OSError as error:
            raise GputopError(
                f"the trace could not be copied from {source} to {self.file}: {error.strerror or error}",
                f"It stays at {source}: make room or choose another --logdir, or copy it by hand and run "
                "`gputop analyze` on it.",
            ) from None

    def discard(self) -> None:
        """Remove what this capture made, as far as it is empty and can be. Does nothing after a save."""
        _remove_file(self._temporary)
        _remove_empty(self._made)

    def _fill(self, source: BinaryIO) -> Path:
        """Raises OSError, nothing partial left behind."""
        try:
            with self._temporary.open("wb") as out:
                shutil.copyfileobj(source, out, _CHUNK_BYTES)
                out.flush()
                os.fsync(out.fileno())
            if self.file.exists():
                raise FileExistsError(17, "there is a trace already", str(self.file))
            self._temporary.rename(self.file)
        except OSError:
            _remove_file(self._temporary)
            raise
        return self.file


def _fallback_folders(full: Path, size: int) -> list[Path]:
    """Folders with room for ``size`` bytes where a trace can go instead, other file systems first."""
    found: dict[Path, bool] = {}
    for text in (os.environ.get("XDG_CACHE_HOME") or "~/.cache", tempfile.gettempdir(), "/var/tmp"):
        with contextlib.suppress(OSError, RuntimeError):  # it is not there; there is no home
            folder = Path(text).expanduser()
            if shutil.disk_usage(folder).free > size + _RESERVE_BYTES:
                found[folder] = folder.stat().st_dev == full.stat().st_dev
    return sorted(found, key=lambda folder: found[folder])


def _save_below(folder: Path, host: str, data: bytes) -> Path:
    """Save in a new logdir below ``folder``; raises OSError or GputopError, nothing left behind."""
    logdir = tempfile.mkdtemp(prefix="gputop-traces-", dir=folder)
    try:
        return RunFolder.create(logdir, host)._fill(io.BytesIO(data))
    except BaseException:
        shutil.rmtree(logdir, ignore_errors=True)
        raise


def _new_folder(parent: Path, name: str) -> Path:
    for attempt in range(1, 1000):
        path = parent / (name if attempt == 1 else f"{name}_{attempt}")
        try:
            path.mkdir()
        except FileExistsError:
            continue
        return path
    raise FileExistsError(17, "no free run name", str(parent / name))


def _remove_file(path: Path) -> None:
    """As far as it can be: a file system that failed a moment ago must not hide why."""
    with contextlib.suppress(OSError):
        path.unlink()


def _remove_empty(folders: list[Path]) -> None:
    for folder in reversed(folders):
        try:
            folder.rmdir()
        except OSError:  # not empty, or gone
            return


@dataclass(frozen=True, slots=True)
class ServerDisk:
    """Where a server that writes traces itself (TensorFlow up to 2.20) is told to write, and how to get there.

    ``root`` is ``repository_root`` as the server sees it. ``temporary``: a folder of its own
    under /tmp, to be removed afterwards.
    """

    root: str
    run: str
    host: str
    pid: int | None
    temporary: bool

    @classmethod
    def choose(cls, run: RunFolder, address: str, pid: int | None) -> ServerDisk:
        """The logdir where the server can write there (or is on another machine: file systems
        may be shared), else a folder under /tmp, which exists and is writable nearly everywhere."""
        if is_local(address):
            pid = pid or listening_pid(address)
            if pid is None or not _shares_files(pid):
                return cls(f"/tmp/gputop-{secrets.token_hex(8)}", run.path.name, run.host, pid, True)
        return cls(str(run.path.parent), run.path.name, run.host, pid, False)

    @property
    def file(self) -> str:
        """Path in the server's own view."""
        return f"{self.root}/{self.run}/{self.host}.xplane.pb"

    def find(self, address: str) -> Path:
        """The file the server wrote; raises GputopError naming where it was looked for."""
        places = [Path(self.file)]
        if self.pid is not None:
            places.append(Path(f"/proc/{self.pid}/root{self.file}"))
        looked = []
        for place in places:
            try:
                with place.open("rb"):
                    return place
            except OSError as error:
                looked.append(f"{place} ({error.strerror})")
        raise GputopError(
            f"{address} recorded the trace but wrote it to its own disk, as {self.file}; "
            f"it cannot be read from here: {' and '.join(looked)}",
            "TensorFlow up to 2.20 writes traces itself. Run gputop as the job's user (or root) on the job's "
            "machine, give a --logdir on a file system both share, or copy that file here and run "
            "`gputop analyze` on it.",
        )

    def clean_up(self, source: Path) -> str | None:
        """Remove a copied temporary trace; returns a warning where that is not allowed."""
        if not self.temporary:
            return None
        try:
            source.unlink()
        except OSError as error:
            return f"the server's own copy of the trace stays at {source}: {error.strerror}"
        with contextlib.suppress(OSError):
            source.parent.rmdir()
            source.parent.parent.rmdir()
        return None


def listening_pid(address: str) -> int | None:
    """The process that listens at an address of this machine, if it may be known."""
    import psutil

    name = unix_name(address)
    with contextlib.suppress(psutil.Error, OSError):
        if name is not None:
            pids = sockets.holders(_PROC, sockets.bound(_PROC, name)).values()
            return next((pid for holding in pids for pid in holding), None)
        port = split_address(address)[1]
        for connection in psutil.net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN and connection.laddr and connection.laddr[1] == port:
                return connection.pid
    return None


def _shares_files(pid: int) -> bool:
    """Whether the process sees our file system, and may write where we may."""
    import psutil

    try:
        uid = psutil.Process(pid).uids().effective
        same = Path(f"/proc/{pid}/ns/mnt").samefile("/proc/self/ns/mnt")
        same = same and Path(f"/proc/{pid}/root").samefile("/")
    except (psutil.Error, OSError):
        return False
    return same and uid in (0, os.geteuid())

"""The traces that a server writes to its own disk, as TensorFlow up to 2.20 does: where, and how they are fetched."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from msgspec import Struct

from gputop.core.errors import GputopError
from gputop.core.files import Folder, open_regular
from gputop.core.proc import effective_uid, shares_root
from gputop.profiler import sockets
from gputop.profiler.addresses import is_local, listening_pid, split_address, unix_name
from gputop.profiler.storage import RunFolder

_PROC = Path("/proc")


class ServerTrace(Struct):
    """A trace that a server wrote itself, held open with the folder it is in and the two above."""

    file: BinaryIO
    path: Path
    folders: list[Folder]

    @property
    def size(self) -> int:
        return os.fstat(self.file.fileno()).st_size

    def close(self) -> None:
        self.file.close()
        for folder in self.folders:
            folder.close()


class ServerDisk(Struct, frozen=True):
    """The path to which a server that writes traces itself (TensorFlow up to 2.20) is told to write.

    ``root`` is ``repository_root`` as the server sees it. ``temporary``: a folder of its own
    under /tmp, to be removed afterwards. ``uid`` is the server's user, None where that is not known.

    The server's user owns the file and may put anything in its place. It is read only if it is a regular file of
    that user, or of gputop's own, below folders that are entered one by one without following a link.
    """

    root: str
    run: str
    host: str
    pid: int | None
    temporary: bool
    uid: int | None = None

    @classmethod
    def choose(cls, run: RunFolder, address: str, pid: int | None) -> ServerDisk:
        """The logdir, if the server can write there or is on another machine (file systems may be shared); else a
        folder under /tmp, which exists and is writable nearly everywhere."""
        if is_local(address):
            pid = pid or listening_pid(address)
            if pid is None or not _shares_files(pid):
                return cls(f"/tmp/gputop-{secrets.token_hex(8)}", run.path.name, run.host, pid, True,
                           _server_uid(address, pid))
        return cls(str(run.path.parent), run.path.name, run.host, pid, False)

    @property
    def file(self) -> str:
        """Path in the server's own view."""
        return f"{self.root}/{self.run}/{self.host}.xplane.pb"

    def find(self, address: str, run: RunFolder) -> ServerTrace:
        """The file the server wrote, opened; raises GputopError naming where it was looked for and what was refused."""
        places: list[tuple[Path, Callable[[], list[Folder]]]] = [(Path(self.file), self._own_view)]
        if self.pid is not None:
            # The same folders in the server's own root. Its user may have made each of them.
            top, names = f"/proc/{self.pid}/root", [*Path(self.root).parts[1:], self.run]
            places.append((Path(f"{top}{self.file}"), lambda: _entered(Folder(top), names)))
        failures = []
        for path, open_folders in places:
            try:
                folders = open_folders()
            except OSError as error:
                failures.append(f"{path} ({error.strerror})")
                continue
            try:
                return ServerTrace(self._open(folders[-1], run), path, folders)
            except OSError as error:
                failures.append(f"{path} ({error.strerror})")
                for folder in folders:
                    folder.close()
        raise GputopError(
            f"{address} recorded the trace but wrote it to its own disk, as {self.file}; "
            f"it cannot be read from here: {' and '.join(failures)}",
            "TensorFlow 2.20 and older writes traces itself. Run gputop on the job's machine as the job's user or "
            "root, choose a --logdir on a shared file system, or copy the file here and run `gputop analyze` on it.")

    def _open(self, folder: Folder, run: RunFolder) -> BinaryIO:
        # In the run's own folder, which gputop made and nobody else may write, the owner does not matter.
        in_run_folder = os.path.samestat(os.fstat(folder.fd), os.fstat(run.folder.fd))
        owners = None if in_run_folder else frozenset({os.geteuid() if self.uid is None else self.uid})
        return open_regular(f"{self.host}.xplane.pb", follow_links=False, owners=owners, folder_fd=folder.fd)

    def _own_view(self) -> list[Folder]:
        """The folders above the file as gputop sees them, held open, outermost first; raises OSError."""
        root = Path(self.root)
        if not self.temporary:
            return _entered(Folder(root), [self.run])
        return _entered(Folder(root.parent), [root.name, self.run])

    def clean_up(self, trace: ServerTrace) -> str | None:
        """Remove a copied temporary trace; returns a warning where that is not allowed."""
        if not self.temporary:
            return None
        above, root, run = trace.folders[-3:]
        try:
            os.unlink(trace.path.name, dir_fd=run.fd)
        except OSError as error:
            return f"cannot remove the server's own copy of the trace at {trace.path}: {error.strerror}"
        root.remove_folder(self.run)
        above.remove_folder(Path(self.root).name)
        return None


def _entered(top: Folder, names: list[str]) -> list[Folder]:
    """``top`` and the folders below it, each entered without following a link; raises OSError, all closed again."""
    folders = [top]
    try:
        for name in names:
            folders.append(folders[-1].enter(name))
    except OSError:
        for folder in folders:
            folder.close()
        raise
    return folders


def _server_uid(address: str, pid: int | None) -> int | None:
    """The user of a server on this machine: that of its process, or of its socket; None where neither tells."""
    if pid is not None and (uid := effective_uid(pid)) is not None:
        return uid
    if unix_name(address) is not None:
        return None
    uids = sockets.listening_uids(_PROC, *split_address(address))
    return next(iter(uids)) if len(uids) == 1 else None


def _shares_files(pid: int) -> bool:
    """Return whether the process sees gputop's file system and may write where gputop may."""
    with contextlib.suppress(OSError):
        return shares_root(pid) and effective_uid(pid) in (0, os.geteuid())
    return False

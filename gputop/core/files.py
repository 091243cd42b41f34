"""The one place where files are opened and written, so that nobody's planted name is followed.

gputop runs as root beside other people's jobs, and reads and writes below folders that may belong to them. A name can
be a link to a file of root's, a pipe that blocks for ever, a device without an end, or change between a check and its
use. Therefore a file is opened first and judged afterwards by its descriptor, it is written under a name that did not
exist before and moved into place within a folder that is held open, and reading has an end that is known before.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Protocol

from gputop.core.errors import EXIT_USAGE, GputopError, os_errors_as

PRIVATE_FILE, PRIVATE_FOLDER = 0o600, 0o700
_KINDS = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device",
          stat.S_IFSOCK: "a socket", stat.S_IFLNK: "a symbolic link"}
_READ = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY  # non-blocking: the open of a pipe returns at once
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_COPY_BYTES = 1 << 20
_MAX_HOLDER_BYTES = 200
_MAX_DEPTH = 64  # of folders that are removed: each is held open meanwhile
_MAX_LINKS = 40  # as the kernel: path_resolution(7)


class UnsafeFile(OSError):
    """A file that is not what it should be: no regular file, too large, or of another user."""

    def __init__(self, reason: str, path: str | Path) -> None:
        super().__init__(None, reason, str(path))

    def __str__(self) -> str:
        return f"{self.filename}: {self.strerror}"


def open_regular(path: str | Path, max_bytes: int | None = None, *, follow_links: bool = True,
                 owners: frozenset[int] | None = None, folder_fd: int | None = None) -> BinaryIO:
    """Open a regular file for reading, in binary and buffered. Never blocks, and opens nothing else: a device does
    things when it is opened, and a job's user may mount one over a file.

    ``max_bytes`` bounds its size; a larger file is refused, a sparse one, too. ``follow_links``: whether the last
    part of the name may be a symbolic link. ``owners``: user ids that the file may belong to. ``folder_fd``: a
    folder that is held open, which ``path`` is relative to.

    Raises :class:`UnsafeFile`, or OSError as ``open`` does.
    """
    entry = os.open(path, os.O_PATH | os.O_CLOEXEC | (0 if follow_links else os.O_NOFOLLOW), dir_fd=folder_fd)
    try:
        state = os.fstat(entry)
        if not follow_links and stat.S_ISLNK(state.st_mode):
            raise UnsafeFile("it is a symbolic link", path)
        if not stat.S_ISREG(state.st_mode):
            raise UnsafeFile(f"it is {_KINDS.get(stat.S_IFMT(state.st_mode), 'no file')}, not a regular file", path)
        if owners is not None and state.st_uid not in owners:
            raise UnsafeFile(f"it belongs to another user (uid {state.st_uid})", path)
        if max_bytes is not None and state.st_size > max_bytes:
            raise UnsafeFile(
                f"it is too large ({state.st_size / 1e6:,.0f} MB; the maximum is {max_bytes / 1e6:,.0f} MB)", path)
        return os.fdopen(_reopened(entry, _READ, path), "rb")
    finally:
        os.close(entry)


def _reopened(entry: int, flags: int, path: str | Path) -> int:
    """A descriptor for reading or writing of what was opened by O_PATH and judged. Raises OSError, of ``path``."""
    try:
        return os.open(f"/proc/self/fd/{entry}", flags)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None


def read_regular(path: str | Path, max_bytes: int) -> bytes:
    """The whole content of a regular file of at most ``max_bytes``; raises as :func:`open_regular`. A file that grows
    meanwhile is cut there."""
    with open_regular(path, max_bytes) as file:
        return file.read(max_bytes)


def open_trusted(path: Path, max_bytes: int, *, follow_links: bool = True) -> BinaryIO:
    """Open a file whose content gputop obeys, such as settings: it belongs to this user or to root, and nobody else may
    write it. For root no other user may be able to exchange it, either (:func:`untrusted_ancestor`): sudo -E leaves
    HOME as it was, and the settings there are the user's, not root's.

    Raises :class:`UnsafeFile`, or OSError as :func:`open_regular`.
    """
    is_root = _is_root_of_the_machine()
    if is_root and (untrusted := untrusted_ancestor(path)) is not None:
        ancestor, reason = untrusted
        raise UnsafeFile(f"{'it' if ancestor == path.absolute() else ancestor} {reason}", path)
    file = open_regular(path, max_bytes, follow_links=follow_links, owners=frozenset({os.geteuid(), 0}))
    if os.fstat(file.fileno()).st_mode & (stat.S_IWOTH | (stat.S_IWGRP if is_root else 0)):
        file.close()
        raise UnsafeFile("it is writable by other users", path)
    return file


def folder_of_process(pid: int, path: Path, proc: Path = Path("/proc")) -> Folder:
    """A folder as a process sees it, held open. It is entered part by part: no link that the process's user made is
    followed, so it does not lead out of the process's root. Raises OSError."""
    if ".." in path.parts:
        raise UnsafeFile("it leads upwards", path)
    folder = Folder(proc / str(pid) / "root")
    for name in path.parts[1:]:
        with folder as above:
            folder = above.enter(name)
    return folder


class Folder:
    """A folder that is held open: what is done in it happens there, wherever its name leads meanwhile."""

    def __init__(self, path: str | Path) -> None:
        """Raises OSError where it is no folder or may not be entered."""
        self.path = Path(path)
        self.made: list[Path] = []  # the folders that were made for it, outermost first (writable_folder)
        self.fd = os.open(path, _FOLDER)

    def __enter__(self) -> Folder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def make(self, name: str, mode: int = PRIVATE_FOLDER) -> Folder:
        """A new folder in it, held open. Raises FileExistsError where the name is taken."""
        os.mkdir(name, mode, dir_fd=self.fd)
        return self.enter(name)

    def enter(self, name: str) -> Folder:
        """A folder in it that is no link, held open. Raises OSError."""
        inside = object.__new__(Folder)
        inside.path, inside.made = self.path / name, []
        inside.fd = os.open(name, _FOLDER | os.O_NOFOLLOW, dir_fd=self.fd)
        return inside

    def create(self, name: str, mode: int = PRIVATE_FILE, flags: int = 0) -> int:
        """A descriptor of a new file, for writing; ``flags``: more of open(2). Raises FileExistsError."""
        return os.open(name, _CREATE | flags, mode, dir_fd=self.fd)

    @contextmanager
    def socket(self, name: str, owner: int | None = None) -> Iterator[str]:
        """A path that leads to the UNIX socket of that name in it alone, and not to where a link of that name does.
        Raises OSError, ConnectionRefusedError for what is no socket, or not one of ``owner``."""
        entry = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self.fd)
        try:
            state = os.fstat(entry)
            if not stat.S_ISSOCK(state.st_mode) or owner not in (None, state.st_uid):
                raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
            yield f"/proc/self/fd/{entry}"
        finally:
            os.close(entry)

    def lock(self, name: str, holder: str) -> int | None:
        """A descriptor that holds a lock of that name in it until it is closed or the process ends, however it does.

        None on a file system without locks. ``holder`` is what others are told: raises BlockingIOError with it as the
        reason where the lock is held.
        """
        flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            descriptor = os.open(name, flags | os.O_CREAT | os.O_EXCL, PRIVATE_FILE, dir_fd=self.fd)
        except FileExistsError:
            descriptor = os.open(name, flags, dir_fd=self.fd)
        try:
            state = os.fstat(descriptor)
            if not stat.S_ISREG(state.st_mode):
                raise UnsafeFile("it is not a regular file", self.path / name)
            if state.st_nlink > 1:  # the other name's content would be lost
                raise UnsafeFile("it also has another name", self.path / name)
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(descriptor, 0)
            os.write(descriptor, holder.encode())
        except BlockingIOError as error:
            text = os.pread(descriptor, _MAX_HOLDER_BYTES, 0).decode(errors="replace")
            os.close(descriptor)
            raise BlockingIOError(error.errno, text or "an unknown process", str(self.path / name)) from None
        except OSError as error:
            os.close(descriptor)
            if error.errno in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
                return None
            raise
        return descriptor

    def take(self, name: str, uid: int) -> int:
        """A descriptor that locks a file of that name in it until it is closed or the process ends, however it does.

        The file is private and ``uid``'s: whoever can read the folder could lock the folder itself. Raises
        BlockingIOError where another process has the lock, and OSError, on a file system without locks, too.
        """
        try:
            descriptor = self.create(name)
            if os.fstat(descriptor).st_uid != uid:
                os.fchown(descriptor, uid, -1)
        except FileExistsError:
            with open_regular(name, follow_links=False, owners=frozenset({uid}), folder_fd=self.fd) as file:
                # For writing, which flock(2) needs on NFS; nothing is written.
                descriptor = _reopened(file.fileno(), os.O_WRONLY | os.O_CLOEXEC, self.path / name)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not os.path.samestat(self.state(name), os.fstat(descriptor)):  # its holder removed it meanwhile
                raise BlockingIOError(errno.EAGAIN, "it was just released", str(self.path / name))
        except OSError:
            os.close(descriptor)
            raise
        return descriptor

    def move(self, name: str, to: str, *, replace: bool = True) -> None:
        """Give a file in it another name. Not ``replace``: raises FileExistsError where that name is taken."""
        if replace:
            os.replace(name, to, src_dir_fd=self.fd, dst_dir_fd=self.fd)
            return
        try:
            os.link(name, to, src_dir_fd=self.fd, dst_dir_fd=self.fd, follow_symlinks=False)
        except FileExistsError:
            raise
        except OSError:  # a file system without hard links
            if self.has(to):
                raise FileExistsError(
                    errno.EEXIST, "a file with this name already exists", str(self.path / to)) from None
            os.replace(name, to, src_dir_fd=self.fd, dst_dir_fd=self.fd)
            return
        os.unlink(name, dir_fd=self.fd)

    @contextmanager
    def replacing(self, name: str, mode: int = PRIVATE_FILE) -> Iterator[BinaryIO]:
        """A new file that takes the place of ``name`` once it is whole and on the disk.

        After an exception nothing has changed. A symbolic link of that name is replaced, not followed. Raises OSError.
        ``mode``: of the file, whatever the umask takes away.
        """
        temporary = f".{name[:200]}.{os.urandom(6).hex()}"
        descriptor = self.create(temporary)
        try:
            with os.fdopen(descriptor, "wb") as file:
                yield file
                file.flush()
                if mode != PRIVATE_FILE:  # else as it was made: not every file system has modes
                    os.fchmod(file.fileno(), mode)
                os.fsync(file.fileno())
            self.move(temporary, name)
        except BaseException:
            self.remove(temporary)
            raise

    @contextmanager
    def making(self, name: str) -> Iterator[Folder]:
        """A new private folder that gets ``name`` once it is whole; nothing is left of it after an exception. Raises
        OSError, FileExistsError where something of that name already exists."""
        if self.has(name):
            raise FileExistsError(errno.EEXIST, "a file or folder with this name already exists", str(self.path / name))
        temporary = f".{name[:200]}.{os.urandom(6).hex()}"
        try:
            with self.make(temporary) as folder:
                yield folder
            os.rename(temporary, name, src_dir_fd=self.fd, dst_dir_fd=self.fd)
        except BaseException:
            self.remove_tree(temporary)
            raise

    def has(self, name: str) -> bool:
        """Return whether there is an entry of that name, a broken link included."""
        try:
            os.stat(name, dir_fd=self.fd, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return True

    def names(self, most: int | None = None) -> list[str]:
        """The names in it, of many the first ``most``; raises OSError."""
        with os.scandir(self.fd) as entries:
            return [entry.name for entry in itertools.islice(entries, most)]

    def state(self, name: str) -> os.stat_result:
        """The status of the entry of that name; of a link the link's own. Raises OSError."""
        return os.stat(name, dir_fd=self.fd, follow_symlinks=False)

    def remove(self, name: str) -> None:
        """Remove a file in it, as far as that can be done."""
        with contextlib.suppress(OSError):
            os.unlink(name, dir_fd=self.fd)

    def remove_folder(self, name: str) -> None:
        """Remove an empty folder in it, as far as that can be done."""
        with contextlib.suppress(OSError):
            os.rmdir(name, dir_fd=self.fd)

    def remove_tree(self, name: str, depth: int = _MAX_DEPTH) -> None:
        """Remove a folder in it with all that it holds, as far as that can be done, down to ``depth`` folders. No link
        is followed, but a mount is: not for a folder that another user can mount in."""
        try:
            inside = self.enter(name)
        except OSError:
            return
        with inside, contextlib.suppress(OSError):
            for entry in inside.names():
                if depth and stat.S_ISDIR(inside.state(entry).st_mode):
                    inside.remove_tree(entry, depth - 1)
                else:
                    inside.remove(entry)
        self.remove_folder(name)


def writable_folder(path: Path, option: str, *, make: bool = True) -> Folder:
    """A folder to write to, held open: the one way to a folder that gputop chose itself, or writes to for long.

    It is made, private, where there is none (``make``). Raises GputopError that names ``option`` where another user
    could exchange what is written there; asked before folders are made and once more when they are there. Raises
    OSError, what was made removed again.
    """
    refuse_untrusted(path, option)
    made = make_folders(path) if make else []
    try:
        folder = Folder(path)
        try:
            folder.made = made
            refuse_untrusted(path, option)
            if not os.path.samestat(os.fstat(folder.fd), path.stat()):
                raise OSError(errno.ESTALE, "it was replaced in the meantime", str(path))
        except BaseException:
            folder.close()
            raise
    except BaseException:
        remove_empty(made)
        raise
    return folder


def temporary_place() -> str:
    """The folder for temporary ones: TMPDIR, unless another user could exchange what is there, as with sudo -E."""
    import tempfile  # not for the first frame

    folder = tempfile.gettempdir()
    return folder if untrusted_ancestor(Path(folder)) is None else "/tmp"


def named_folder(path: Path) -> Folder:
    """A folder that the user named for one file, held open. It may be another user's, but on the way there no link of
    another user is followed as root: it could lead anywhere. Raises OSError."""
    if not _is_root_of_the_machine():
        return Folder(path)
    folder, links = Folder("/"), 0
    rest = list(reversed(path.absolute().parts[1:]))
    while rest:
        part = rest.pop()
        with folder as above:
            try:
                folder = above.enter(part)
                continue
            except OSError:
                if not stat.S_ISLNK(above.state(part).st_mode):
                    raise
            target = _root_s_link(above, part)
            links += 1
            if links > _MAX_LINKS:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
            folder = Folder("/") if target.is_absolute() else above.enter(".")
            rest += reversed([part for part in target.parts if part != "/"])
    folder.path = path
    return folder


def _root_s_link(folder: Folder, name: str) -> Path:
    """Target of a link in a folder. Raises :class:`UnsafeFile` unless it is root's."""
    link = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder.fd)
    try:
        owner = os.fstat(link).st_uid
        if owner != 0:
            raise UnsafeFile(f"it is a symbolic link of another user (uid {owner})", folder.path / name)
        return Path(os.readlink("", dir_fd=link))  # of the very link that was judged
    finally:
        os.close(link)


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A new private file that takes the place of ``path``, as :meth:`Folder.replacing`, in a :func:`named_folder`.
    Raises OSError."""
    with named_folder(path.parent) as folder, folder.replacing(path.name) as file:
        yield file


def write_file(path: Path, data: bytes, *, devices: bool = False) -> None:
    """Write a private file (0600), whole or not at all, in a folder that there is.

    ``devices``: the user named the path, which may then be a device or a pipe, such as /dev/stdout; those are written
    to and not replaced.

    Raises GputopError with the cause; no partial file is left behind.
    """
    with os_errors_as(f"cannot write {path}", "Choose a writable folder with enough free space."):
        if devices and (own_descriptor := _own_descriptor(path)) is not None:
            with os.fdopen(os.dup(own_descriptor), "wb", buffering=0) as stream:
                stream.write(data)
            return
        if devices and _is_special(path):
            # Not made and not cut: by now it may be a link to a file of root's.
            with os.fdopen(os.open(path, os.O_WRONLY | os.O_NOCTTY | os.O_CLOEXEC), "wb", buffering=0) as device:
                if _is_special(device.fileno()):
                    device.write(data)
                    return
        with replacing(path) as file:
            file.write(data)


def _own_descriptor(path: Path) -> int | None:
    """Descriptor that /dev/stdout or /dev/fd/N leads to. Redirected to a file, it may not be replaced."""
    try:
        target = path.readlink() if path.parent == Path("/dev") else path
        return int(target.name) if target.parent.resolve() == Path(f"/proc/{os.getpid()}/fd") else None
    except (OSError, ValueError):
        return None


def _is_special(file: Path | int) -> bool:
    try:
        mode = os.stat(file).st_mode  # noqa: PTH116  or a descriptor
    except OSError:
        return False
    return stat.S_ISCHR(mode) or stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)


def unnamed_file(folder: Path) -> BinaryIO:
    """A new file without a name on the file system of ``folder``: it is gone once it is closed. Raises OSError."""
    import tempfile  # not for the first frame

    return tempfile.TemporaryFile(dir=folder)


def make_folders(path: Path) -> list[Path]:
    """Make a folder and those above it, private; returns those that were not there before, outermost first. Raises
    OSError, what was made removed again."""
    made: list[Path] = []
    try:
        for folder in (*reversed(path.parents), path):
            if not folder.is_dir():
                with contextlib.suppress(FileExistsError):
                    folder.mkdir(mode=PRIVATE_FOLDER)
                    made.append(folder)
    except OSError:
        remove_empty(made)
        raise
    return made


def remove_empty(folders: list[Path]) -> None:
    """Remove folders that :func:`make_folders` made, the innermost first, up to the first that is not empty."""
    for folder in reversed(folders):
        try:
            folder.rmdir()
        except OSError:  # not empty, or gone
            return


class Readable(Protocol):
    def read(self, size: int, /) -> bytes: ...


def copy_bounded(source: Readable, target: BinaryIO, max_bytes: int,
                 stopped: Callable[[], bool] = lambda: False) -> int:
    """Copy to the end; returns the number of bytes. Raises OSError where there are more than ``max_bytes``, and
    InterruptedError once ``stopped()``."""
    copied = 0
    while data := source.read(min(_COPY_BYTES, max_bytes - copied + 1)):
        copied += len(data)
        if copied > max_bytes:
            raise OSError(errno.EFBIG, f"it contains more than {max_bytes / 1e6:,.0f} MB")
        if stopped():
            raise InterruptedError(errno.EINTR, "stopped")
        target.write(data)
    return copied


def untrusted_ancestor(path: Path) -> tuple[Path, str] | None:
    """The first folder or link on the way to ``path`` that another user could exchange, and why; None: there is none.

    Root trusts only what belongs to root and what nobody else may write. An ordinary user shares folders with a
    group, and works in folders of others, on purpose: only folders that everybody may write are refused then. A
    folder with the sticky bit, such as /tmp, is safe: what is below it is judged by its own owner. To be asked
    again once the folder has been made.
    """
    is_root = _is_root_of_the_machine()
    writable = stat.S_IWOTH | stat.S_IWGRP if is_root else stat.S_IWOTH
    for ancestor, state in _on_the_way(path):
        if is_root and state.st_uid != 0:
            return ancestor, f"belongs to another user (uid {state.st_uid})"
        if stat.S_ISDIR(state.st_mode) and state.st_mode & writable and not state.st_mode & stat.S_ISVTX:
            return ancestor, "is writable by other users"
    return None


def _is_root_of_the_machine() -> bool:
    """Return whether gputop runs as root, and not as the root of a user namespace (rootless containers, fakeroot). That
    one has the rights of an ordinary user outside, and sees the folders of root as those of nobody."""
    if os.geteuid() != 0:
        return False
    try:
        return Path("/proc/self/uid_map").read_text().split() == ["0", "0", "4294967295"]  # user_namespaces(7)
    except OSError:
        return True


def _on_the_way(path: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """The folders and the symbolic links that lead to ``path``, in order, as far as they exist."""
    current, links = Path("/"), 0
    yield current, current.lstat()
    rest = list(reversed(path.absolute().parts[1:]))
    while rest:
        part = rest.pop()
        if part == "..":
            current = current.parent
            continue
        entry = current / part
        try:
            state = entry.lstat()
            target = entry.readlink() if stat.S_ISLNK(state.st_mode) else None
        except OSError:
            return  # not there yet: it will be made in a folder that has been judged
        yield entry, state
        if target is None:
            current = entry
            continue
        links += 1
        if links > _MAX_LINKS:
            return
        if target.is_absolute():
            current = Path("/")
        rest += reversed([part for part in target.parts if part != "/"])


def refuse_untrusted(path: Path, option: str) -> None:
    """Raises GputopError where another user could exchange what gputop writes below ``path``."""
    untrusted = untrusted_ancestor(path)
    if untrusted is not None:
        folder, reason = untrusted
        raise GputopError(
            f"{path} is not safe to write to: {folder} {reason}, who could replace gputop's files",
            f"With {option}, choose a folder that only you and root can write to, for example in your home folder.",
            EXIT_USAGE)


def write_new_files(path: Path, stem: str, contents: Mapping[str, bytes]) -> list[Path]:
    """Write private files of one name and several endings to a folder, which is made where there is none; returns
    their paths. Where a name is taken, all get the first of ``stem-2``, ``stem-3``, … that is not.

    Raises GputopError, where another user could exchange what is written, too.
    """
    with (os_errors_as(f"cannot write to {path}", "Choose a writable folder with enough free space: --logdir DIR."),
          writable_folder(path, "--logdir") as folder):
        name, n = stem, 1
        while any(folder.has(name + ending) for ending in contents):
            n += 1
            name = f"{stem}-{n}"
        for ending, data in contents.items():
            with folder.replacing(name + ending) as file:
                file.write(data)
    return [path / (name + ending) for ending in contents]

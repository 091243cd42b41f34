"""What a hostile user of the node tries against the gputop of root that captures from their process."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path, PurePosixPath

import pytest

from gputop.core.errors import GputopError
from gputop.launch import attach, target
from gputop.profiler import sockets
from gputop.profiler.kineto import as_process, daemon
from gputop.profiler.kineto.clients import client_of, find_clients
from gputop.profiler.kineto.folder import SocketFolder, sweep
from tests.processes import asleep, once_ready
from tests.profiler.kineto.jobs import USER, fake_job, found, needs_root, opened, served
from tests.waiting import PATIENCE_S

# A process of that user, in namespaces of its own: there it may mount what it sees over what it likes.
_MOUNTING = """
import ctypes, os, signal, sys
libc = ctypes.CDLL(None, use_errno=True)
os.setgroups([]); os.setgid(12345); os.setuid(12345)
if libc.unshare(0x10020000) != 0: print("no namespaces", flush=True); sys.exit()  # CLONE_NEWUSER | CLONE_NEWNS
print("ready", flush=True)
for line in sys.stdin:
    source, over = line.split()
    print(libc.mount(source.encode(), over.encode(), None, 4096, None), flush=True)  # MS_BIND
"""


class _Mounting:
    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process, self.pid = process, process.pid

    def mount(self, source: Path, over: Path | PurePosixPath) -> None:
        self.process.stdin.write(f"{source} {over}\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "0\n"


def _if_allowed(code: str, *arguments: str) -> AbstractContextManager[subprocess.Popen[str]]:
    return once_ready(sys.executable, "-c", code, *arguments, or_skip="users may make no namespaces here")


@pytest.fixture
def mounting() -> Iterator[_Mounting]:
    with _if_allowed(_MOUNTING) as process:
        yield _Mounting(process)


@pytest.fixture
def of_root(place: Path) -> Path:
    """A folder that only root may write to."""
    folder = place / "root"
    folder.mkdir(mode=0o755)
    (folder / "kept").mkdir()
    (folder / "kept" / "file").write_text("kept")
    return folder


@needs_root
def test_nothing_is_made_in_a_folder_of_root_s_that_is_mounted_over_tmp(mounting, of_root):
    mounting.mount(of_root, Path("/tmp"))
    with pytest.raises(GputopError, match="cannot create a socket folder"):
        SocketFolder.create(mounting.pid, USER)
    job = target.Target(mounting.pid, "", USER, "", 0, True)
    with pytest.raises(GputopError, match="cannot write a script"), attach._script(job, "text"):
        pass
    assert [path.name for path in of_root.iterdir()] == ["kept"]


@needs_root
def test_what_is_mounted_in_the_folder_is_not_removed_with_it(mounting, of_root):
    with SocketFolder.create(mounting.pid, USER) as folder:
        inside = Path(f"/proc/{mounting.pid}/root{folder.path}/inside")
        inside.mkdir()
        mounting.mount(of_root, folder.path / "inside")
        assert (inside / "kept").exists()
        folder.remove()
        assert (of_root / "kept" / "file").exists()
        mounting.process.kill()
        mounting.process.wait()
        Path(folder.path, "inside").rmdir()
        folder.remove()
        assert not Path(folder.path).exists()


@needs_root
def test_a_folder_of_root_s_is_no_folder_of_a_user_s_socket(of_root):
    """Its name is the user's claim: it was bound in a mount namespace, where that was another folder."""
    (of_root / "dynolog").write_text("a program")
    with pytest.raises(GputopError, match="other users could send requests"):
        opened(of_root, uid=USER)
    assert (of_root / "dynolog").exists()


@needs_root
def test_root_s_groups_do_not_help_a_user(place):
    """The thread that binds has the user's rights, not those of root's groups."""
    before = os.getgroups()
    group = place / "group"
    group.mkdir()
    group.chmod(0o770)
    with asleep(user=USER, group=USER, extra_groups=[USER + 1]) as process:
        for own, allowed in ((os.getgid(), False), (USER, True), (USER + 1, True)):
            os.chown(group, 0, own)
            file = group / f"{own}"
            with contextlib.suppress(PermissionError):
                as_process.run(process.pid, USER, file.touch)
            assert file.exists() == allowed
    assert os.getgroups() == before


@needs_root
def test_a_link_of_a_user_leads_root_s_thread_through_nobody_s_proc(place):
    """Root could follow it into another container, whose root no user may enter; anybody may write to a /tmp there."""
    root = place / "container"
    (root / "tmp").mkdir(parents=True)
    (root / "tmp").chmod(0o777)
    folder = place / "f"
    folder.mkdir()
    os.chown(folder, USER, -1)
    chroot = "import os, sys; os.chroot(sys.argv[1]); print('ready', flush=True); sys.stdin.read()"
    with once_ready(sys.executable, "-c", chroot, str(root)) as of_root, \
            asleep(user=USER, group=USER) as job, opened(folder, job.pid, USER) as of_job:
        folder.rename(place / "moved")
        folder.symlink_to(f"/proc/{of_root.pid}/root/tmp")
        with pytest.raises(GputopError, match="cannot create a socket"):
            of_job.bind()
    assert not list((root / "tmp").iterdir())


_LOCKING = """
import fcntl, os, sys
os.setgroups([]); os.setgid(12346); os.setuid(12346)
folder = os.open(sys.argv[1], os.O_RDONLY)
fcntl.flock(folder, fcntl.LOCK_EX)
print("ready", flush=True)
for flags in (os.O_RDONLY, os.O_WRONLY):
    try:
        print(os.open(sys.argv[1] + "/.gputop-lock", flags))
    except OSError as error:
        print(type(error).__name__, flush=True)
sys.stdin.read()
"""


@needs_root
@pytest.mark.parametrize("uid", [0, USER])
def test_who_can_read_the_folder_cannot_lock_it(place, uid):
    os.chown(place, uid, -1)
    with contextlib.ExitStack() as locked, asleep(user=uid) as job:
        with opened(place, job.pid, uid) as folder, daemon.serving(folder):
            assert (place / ".gputop-lock").stat().st_uid == uid
            other = locked.enter_context(once_ready(sys.executable, "-c", _LOCKING, str(place)))
            assert [other.stdout.readline() for _ in range(2)] == ["PermissionError\n"] * 2
        assert not (place / ".gputop-lock").exists()
        with opened(place, job.pid, uid) as folder, daemon.serving(folder, lambda: True):
            pass


_KILLED = """
import sys
from tests.profiler.kineto.jobs import served
with served(sys.argv[1]):
    print("ready", flush=True)
    sys.stdin.read()
"""


def test_what_a_killed_gputop_leaves_hinders_nobody(place):
    """kill -9: its socket and its lock's file stay until the next one serves there."""
    place.chmod(0o700)
    with once_ready(sys.executable, "-c", _KILLED, str(place)), opened(place) as folder:
        assert not folder.lock()
    assert {path.name for path in place.iterdir()} == {"dynolog", ".gputop-lock"}
    with opened(place) as folder:
        with daemon.serving(folder, lambda: True):
            pass
        assert not list(place.iterdir())


@needs_root
def test_a_lock_that_is_root_s_by_a_mount_is_not_opened(mounting, of_root):
    with SocketFolder.create(mounting.pid, USER) as folder:
        lock = Path(f"/proc/{mounting.pid}/root{folder.path}/.gputop-lock")
        lock.touch()
        mounting.mount(of_root / "kept" / "file", folder.path / lock.name)
        with pytest.raises(GputopError, match=r"cannot lock .*: it belongs to another user"):
            folder.lock()
        mounting.process.kill()
        mounting.process.wait()
        folder.remove()
    assert (of_root / "kept" / "file").read_text() == "kept"


def _bound(name: str) -> socket.socket:
    own = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    own.bind(name)
    return own


def _forged(inode: int, name: str) -> socket.socket:
    """A socket whose name has a whole line of /proc/net/unix in it."""
    return _bound(f"\0x{inode}\n0: 00000002 00000000 00000000 0002 01 {inode} {name}")


def test_a_name_with_a_line_end_does_not_call_a_job_unsafe(place):
    with fake_job(place) as process:
        inode = next(iter(sockets.open_inodes(Path("/proc"), process.pid)))
        with _forged(inode, "@dynoconfigclient0"):
            assert found(process).folder == PurePosixPath(place)


def test_a_name_with_a_line_end_makes_nobody_a_client_or_a_server(place):
    with socket.socket() as stream:
        inode = os.fstat(stream.fileno()).st_ino
        with _forged(inode, f"{place}/dynoconfigclient0"):
            assert client_of(os.getpid()) is None
            assert os.getpid() not in [client.pid for client in find_clients()]
        with _forged(inode, f"{place}/server"):
            assert inode not in sockets.bound(Path("/proc"), f"{place}/server")
        with _bound(f"{place}/server") as own:
            assert sockets.bound(Path("/proc"), f"{place}/server") == {os.fstat(own.fileno()).st_ino}


def test_a_deep_folder_in_a_left_one_does_not_end_the_next_capture(place):
    left = place / "gputop-kineto-deep"
    left.mkdir()
    _bound(f"{left}/dynoconfigclient0").close()
    nest = "import os\nfor _ in range(3000): os.mkdir('d'); os.chdir('d')"  # deeper than a path can name
    subprocess.run([sys.executable, "-c", nest], cwd=left, check=True)
    try:
        sweep(place)
        assert (left / "d").exists()
    finally:
        subprocess.run(["rm", "-rf", str(left)], check=True)


def test_a_descriptor_that_a_job_sends_along_is_not_kept(place):
    with served(place) as server, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as client, \
            tempfile.TemporaryFile(dir=place) as sent:
        before = os.fstat(sent.fileno()).st_ino
        client.connect(str(place / "dynolog"))
        for _ in range(20):
            socket.send_fds(client, [b"x" * 64], [sent.fileno()] * 3)
        with server.events_of(os.getpid()) as events, _bound(str(place / "dynoconfigclient0")) as own:
            own.sendto((16).to_bytes(8, "little") + b"req".ljust(32, b"\0") + bytes(16), str(place / "dynolog"))
            events.get(timeout=PATIENCE_S)  # all before it have been read
        held = [fd for fd in os.listdir("/proc/self/fd")  # noqa: PTH208
                if os.path.exists(f"/proc/self/fd/{fd}") and os.stat(f"/proc/self/fd/{fd}").st_ino == before]  # noqa: PTH110, PTH116
        assert len(held) <= 1


_MANY = """
import os, signal, socket, sys
for n in range(int(sys.argv[2])):
    if os.fork() == 0:
        own = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        own.bind(f"{sys.argv[1]}/dynoconfigclient{n}")
        print(n, flush=True)
        signal.pause()
signal.pause()
"""


def test_many_clients_of_one_user_are_not_all_looked_at(place):
    with subprocess.Popen([sys.executable, "-c", _MANY, str(place), "80"], stdout=subprocess.PIPE, text=True,
                          start_new_session=True) as process:
        try:
            assert process.stdout is not None and len([process.stdout.readline() for _ in range(80)]) == 80
            ours = [client for client in find_clients() if client.folder == PurePosixPath(place)]
            assert 0 < len(ours) <= 64
        finally:
            os.killpg(process.pid, 9)


_NETWORK = """
import ctypes, os, signal, socket, sys
ctypes.CDLL(None).unshare(0x40000000)  # CLONE_NEWNET
stream, forging, client = socket.socket(), socket.socket(1, 2), socket.socket(1, 2)
inode = os.fstat(stream.fileno()).st_ino
forging.bind(f"\\0x{inode}\\n0: 00000002 00000000 00000000 0002 01 {inode} {sys.argv[1]}/f/dynoconfigclient1")
client.bind(f"{sys.argv[1]}/dynoconfigclient0")
print("ready", flush=True)
signal.pause()
"""


@needs_root
def test_names_in_another_network_are_the_kernel_s_too(place):
    own = os.stat("/proc/thread-self/ns/net").st_ino  # noqa: PTH116
    with once_ready(sys.executable, "-c", _NETWORK, str(place)) as process:
        assert found(process).folder == PurePosixPath(place)
    assert os.stat("/proc/thread-self/ns/net").st_ino == own  # noqa: PTH116


_FORGING = """
import ctypes, os, socket, struct, sys
os.setgroups([]); os.setgid(12345); os.setuid(12345)
if ctypes.CDLL(None).unshare(0x50000000) != 0: print("no namespaces", flush=True); sys.exit()  # CLONE_NEWUSER | NEWNET
inode, gputop, path = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3].encode()
name = struct.pack("=HH", 4 + len(path), 0) + path
body = struct.pack("=4xI8x", inode) + name
message = struct.pack("=IHHII", 16 + len(body), 20, 2, 0, 0) + body
kernel = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 4)
kernel.setblocking(False)
print("ready", flush=True)
while True:
    try:
        kernel.sendto(message.ljust(len(message) + 3 & ~3, b"\\0"), (gputop, 0))
    except OSError:
        pass
"""


@needs_root
def test_who_owns_a_network_does_not_answer_for_its_kernel(place):
    """There they may send messages to gputop's own socket: names for sockets of any process on the machine."""
    with socket.socket() as stream:
        inode = os.fstat(stream.fileno()).st_ino
        with _if_allowed(_FORGING, str(inode), str(os.getpid()), f"{place}/dynoconfigclient0") as process:
            for _ in range(200):
                assert inode not in sockets.unix_names(Path("/proc"), process.pid)


class _Kernel:
    """A socket to the kernel that others write to as well."""

    def __init__(self, *answers: tuple[bytes, int]) -> None:
        self._answers = list(answers)

    def recvfrom(self, _: int) -> tuple[bytes, tuple[int, int]]:
        answer, sender = self._answers.pop(0)
        return answer, (sender, 0)


def _netlink(kind: int, body: bytes) -> bytes:
    return sockets._HEADER.pack(sockets._HEADER.size + len(body), kind, 0, 0, 0) + body


def test_messages_of_others_are_no_answers_and_not_waited_for():
    done = _netlink(3, b""), 0
    answers = sockets._answers(_Kernel((_netlink(20, b"forged--"), 4711), (_netlink(20, b"kernel's"), 0), done))  # type: ignore[arg-type]
    assert list(answers) == [b"kernel's"]
    assert not list(sockets._answers(_Kernel(*[(_netlink(20, b"forged--"), 4711)] * 1000, done)))  # type: ignore[arg-type]


_CONTAINER = """
import ctypes, os, signal, sys
libc = ctypes.CDLL(None)
libc.unshare(0x20000)  # CLONE_NEWNS
libc.mount(None, b"/", None, 0x44000, None)  # MS_PRIVATE | MS_REC
assert libc.mount(b"proc", (sys.argv[1] + "/proc").encode(), b"proc", 0, None) == 0
os.chroot(sys.argv[1])
print("ready", flush=True)
signal.pause()
"""


@needs_root
def test_a_container_s_root_does_not_lead_out_by_proc(place, of_root):
    """With the host's PIDs in it /proc/PID/root is the host. Its own root may not go there, the host's may."""
    root = place / "container"
    for name in ("proc", "tmp/f"):
        (root / name).mkdir(parents=True)
    with _if_allowed(_CONTAINER, str(root)) as process, asleep() as of_host, \
            opened("/tmp/f", process.pid, 0) as folder:
        (root / "tmp/f").rename(root / "tmp/moved")
        (root / "tmp/f").symlink_to(f"/proc/{of_host.pid}/root{of_root}")
        with pytest.raises(GputopError, match="cannot create a socket"):
            folder.bind()
    assert [path.name for path in of_root.iterdir()] == ["kept"]

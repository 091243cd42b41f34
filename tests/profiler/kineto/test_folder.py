"""The folder of the sockets: whose it is, what is left in it, and which processes have a socket there."""

from __future__ import annotations

import errno
import os
import signal
import socket
import sys
from pathlib import Path, PurePosixPath

import pytest

from gputop.core.errors import GputopError
from gputop.profiler.kineto import daemon
from gputop.profiler.kineto.clients import client_of, is_same
from gputop.profiler.kineto.folder import SocketFolder, sweep
from gputop.profiler.kineto.protocol import RecordingConfig, encode
from tests.processes import asleep, once_ready
from tests.profiler.kineto.jobs import USER, fake_job, found, needs_root, opened, served
from tests.waiting import PATIENCE_S

_CHROOT = "import os, signal, sys; os.chroot(sys.argv[1]); {}; print('ready', flush=True); signal.pause()"


def test_a_new_folder_is_the_user_s_alone_and_goes_away():
    with SocketFolder.create(os.getpid(), os.getuid()) as folder:
        path = Path(folder.path)
        assert path.stat().st_mode & 0o777 == 0o700 and path.parent == Path("/tmp") and len(str(path)) <= 55
        assert "INTERVAL" in (path / "kineto.conf").read_text()
        folder.remove()
        assert not path.exists()


@needs_root
def test_another_user_s_socket_is_bound_with_that_user_s_rights():
    with asleep(user=USER, group=USER) as process, SocketFolder.create(process.pid, USER) as folder:
        path = Path(folder.path)
        assert path.stat().st_uid == USER
        with daemon.serving(folder):
            assert (path / "dynolog").stat().st_uid == USER
        assert not (path / "dynolog").exists()
        folder.remove()
    assert os.stat("/proc/self/root").st_ino == os.stat("/").st_ino  # gputop itself is where it was  # noqa: PTH116


@needs_root
def test_in_another_root_the_socket_has_the_name_that_the_job_sees(tmp_path):
    root = tmp_path / "root"
    (root / "tmp").mkdir(parents=True)
    (root / "tmp").chmod(0o1777)
    with once_ready(sys.executable, "-c", _CHROOT.format("os.setuid(12345)"), str(root)) as process, \
            SocketFolder.create(process.pid, USER) as folder, daemon.serving(folder) as server:
        assert (root / folder.path.relative_to("/") / "dynolog").is_socket()
        names = [line.split()[-1] for line in Path("/proc/net/unix").read_text().splitlines()]
        assert f"{folder.path}/dynolog" in names
        assert server.folder.path == folder.path


@needs_root
@pytest.mark.parametrize("target", ["/{host}", "../host"])
def test_a_link_for_tmp_does_not_lead_out_of_the_job_s_root(tmp_path, target):
    root, host = tmp_path / "root", tmp_path / "host"
    root.mkdir()
    host.mkdir()
    (root / "tmp").symlink_to(target.format(host=host))
    with once_ready(sys.executable, "-c", _CHROOT.format("pass"), str(root)) as process:
        with pytest.raises(GputopError, match="cannot create a socket folder"):
            SocketFolder.create(process.pid, USER)
        assert list(host.iterdir()) == []


@needs_root
def test_a_folder_exchanged_for_a_link_gets_no_socket_of_root_s(place):
    """The job's user owns the folder's name as well."""
    elsewhere = place / "root's"
    elsewhere.mkdir(mode=0o700)
    place.chmod(0o777)
    mine = place / "f"
    mine.mkdir(mode=0o700)
    os.chown(mine, USER, -1)
    with opened(mine, uid=USER) as folder:
        mine.rename(place / "moved")
        mine.symlink_to(elsewhere)
        with pytest.raises(GputopError, match="cannot create a socket"):
            folder.bind()
    assert list(elsewhere.iterdir()) == []


def test_a_path_that_is_relative_long_or_no_line_of_text_is_refused():
    """It would stand in a message, and in the commands that one advises."""
    for path in ("tmp/x", "/tmp/" + "x" * 60, "/tmp/x\nrm -rf ~"):
        with pytest.raises(GputopError, match="a folder that gputop cannot use") as caught:
            opened(path)
        assert caught.value.message.isprintable() and caught.value.fix.isprintable()


def test_sweeping_removes_what_ended_jobs_left_and_nothing_else(place):
    used, ended, used_now, young = (place / f"gputop-kineto-{name}" for name in ("used", "ended", "served", "young"))
    for folder in (used, ended, used_now, young):
        folder.mkdir(mode=0o700)
    with fake_job(used) as process, fake_job(used_now), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as stale:
        with fake_job(ended):
            pass
        stale.bind(str(used / "dynolog"))
        stale.close()
        with served(used_now):
            sweep(place)
            assert (used_now / "dynolog").is_socket()
        assert sorted(path.name[14:] for path in place.iterdir()) == ["served", "used", "young"]
        assert not (used / "dynolog").exists() and client_of(process.pid) is not None


def test_sweeping_follows_no_link(place):
    elsewhere = place / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "dynoconfigclient0").write_text("kept")
    (place / "gputop-kineto-x").symlink_to(elsewhere)
    sweep(place)
    assert (elsewhere / "dynoconfigclient0").exists()


def test_a_forked_child_is_no_client(place):
    with fake_job(place) as process:
        client = found(process)
        assert client.pid == client.own_pid == process.pid and client.folder == PurePosixPath(place)
        assert is_same(client)
    assert not is_same(client) and client_of(process.pid) is None

    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as own:
        own.bind(str(place / "dynoconfigclient00"))
        child = os.fork()
        if child == 0:
            signal.pause()
        try:
            assert client_of(os.getpid()) is not None
            assert client_of(child) is None
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def test_an_abstract_name_has_no_folder():
    with fake_job(Path("/tmp"), "abstract") as process:
        assert found(process).folder is None


def test_what_others_send_is_not_answered(place):
    """Neither processes that were not asked to record, nor sockets without a client's name, nor anything else."""
    body = (3).to_bytes(4, "little") + bytes(12)
    with served(place) as server, server.events_of(os.getpid()) as events:
        server.register(1, RecordingConfig(PurePosixPath("/tmp/x.json"), 1))
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as client:
            client.settimeout(10)
            client.bind(str(place / "dynoconfigclient0"))
            for datagram in (b"", bytes(5000), encode("ctxt", body), encode("req", body)):
                client.sendto(datagram, str(place / "dynolog"))
            event = events.get(timeout=PATIENCE_S)
            assert event.pid == os.getpid() and event.ready and not event.start_ms
            assert client.recv(4096)[40:] == b"" and events.empty()
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as nameless:
                nameless.sendto(encode("req", body), str(place / "dynolog"))
            client.sendto(encode("req", body), str(place / "dynolog"))
            assert events.get(timeout=PATIENCE_S).ready and events.empty()


def test_a_full_queue_of_a_client_does_not_hold_the_daemon(place):
    poll = encode("req", (3).to_bytes(4, "little") + bytes(12))
    with served(place) as server, server.events_of(os.getpid()) as events, \
            socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as client:
        client.bind(str(place / "dynoconfigclient0"))  # and reads nothing
        for _ in range(100):
            client.sendto(poll, str(place / "dynolog"))
            assert events.get(timeout=PATIENCE_S).pid == os.getpid()


def test_captures_in_one_folder_share_a_daemon(place):
    with served(place) as one:
        with served(place) as other:
            assert one is other
        assert (place / "dynolog").is_socket()
    assert not (place / "dynolog").exists()


def test_a_full_disk_leaves_no_folder(monkeypatch):
    made: list[str] = []
    real = os.mkdir

    def noted(path: str, *arguments: int, **options: int) -> None:
        made.append(str(path))
        real(path, *arguments, **options)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "mkdir", noted)
    monkeypatch.setattr(os, "fdopen", full)
    with pytest.raises(GputopError, match="No space left"):
        SocketFolder.create(os.getpid(), os.geteuid())
    (name,) = made
    assert not Path("/tmp", name).exists()

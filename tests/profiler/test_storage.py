"""Run folders and the files of servers, attacked as a hostile user would."""

from __future__ import annotations

import os
import shutil
import socket
import stat
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from gputop.core import files
from gputop.core.errors import EXIT_USAGE, GputopError
from gputop.core.files import Folder
from gputop.profiler import sockets, storage
from gputop.profiler.storage import RunFolder
from gputop.profiler.xprof import client, server_disk
from gputop.profiler.xprof.server_disk import ServerDisk
from tests.descriptors import open_below
from tests.listening import free_port
from tests.profiler.capturing import capture
from tests.profiler.fake_server import serving_process

ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to make files of another user")
BOB = 12345


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    path.write_bytes(b"for root alone")
    return path


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunFolder]:
    folder = RunFolder.create(tmp_path / "logs", "host")
    yield folder
    folder.discard()


class TestRunFolder:
    def test_a_run_folder_that_is_exchanged_while_the_server_records(self, run, tmp_path):
        """The attack: who owns a folder above puts a link in the place of the run folder, and waits."""
        (target := tmp_path / "root-only").mkdir()
        (target / run.name).write_bytes(b"precious")
        (target / run.partial.name).symlink_to(target / run.name)
        run.path.rename(tmp_path / "aside")
        run.path.symlink_to(target)
        run.save(b"trace")
        assert (target / run.name).read_bytes() == b"precious"
        assert (tmp_path / "aside" / run.name).read_bytes() == b"trace"

    @pytest.fixture(autouse=True)
    def _fallback(self, monkeypatch, tmp_path):
        monkeypatch.setattr(storage, "_fallback_folders", lambda *_: [tmp_path])

    def test_a_partial_file_that_is_exchanged_for_a_link(self, run, secret):
        run.partial.unlink()
        run.partial.symlink_to(secret)
        path = run.save(b"trace")
        assert secret.read_bytes() == b"for root alone" and not run.file.exists()
        assert path.read_bytes() == b"trace" and "replaced while gputop" in run.save_error

    def test_a_link_at_the_name_of_the_trace(self, run, secret):
        run.file.symlink_to(secret)
        path = run.save(b"trace")
        assert secret.read_bytes() == b"for root alone" and run.file.is_symlink()
        assert path.read_bytes() == b"trace" and "already" in run.save_error

    def test_what_is_made_is_private_and_what_was_there_keeps_its_mode(self, tmp_path):
        (logdir := tmp_path / "logs").mkdir()
        logdir.chmod(0o755)
        made = RunFolder.create(logdir, "host")
        path = made.save(b"trace")
        made.discard()
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert {stat.S_IMODE(folder.stat().st_mode) for folder in path.parents[:3]} == {0o700}
        assert stat.S_IMODE(logdir.stat().st_mode) == 0o755

    def test_a_logdir_that_everybody_can_write_is_refused_and_nothing_made(self, tmp_path):
        (shared := tmp_path / "shared").mkdir()
        shared.chmod(0o777)
        with pytest.raises(GputopError, match="is writable by other users") as caught:
            RunFolder.create(shared / "logs", "host")
        assert caught.value.exit_code == EXIT_USAGE and "--logdir" in caught.value.fix and not any(shared.iterdir())
        shared.chmod(0o1777)
        RunFolder.create(shared / "logs", "host").discard()

    @ROOT
    def test_a_logdir_of_another_user_is_refused_to_root_and_open_to_others(self, tmp_path, monkeypatch):
        (theirs := tmp_path / "theirs").mkdir()
        os.chown(theirs, BOB, -1)
        theirs.chmod(0o2775)
        with pytest.raises(GputopError, match="belongs to another user"):
            RunFolder.create(theirs / "logs", "host")
        assert not any(theirs.iterdir())
        monkeypatch.setattr(os, "geteuid", lambda: 4711)  # a colleague in a folder of the group
        RunFolder.create(theirs / "logs", "host").discard()

    @ROOT
    def test_a_logdir_that_is_exchanged_while_it_is_made(self, tmp_path, monkeypatch):
        (theirs := tmp_path / "theirs").mkdir()
        real = files.make_folders

        def exchange(path: Path) -> list[Path]:
            made = real(path)
            os.chown(path.parent, BOB, -1)
            return made

        monkeypatch.setattr(files, "make_folders", exchange)
        with pytest.raises(GputopError, match="belongs to another user"):
            RunFolder.create(theirs / "logs", "host")
        assert not any(theirs.iterdir())

    def test_no_descriptor_stays_open(self, tmp_path):
        for run in (None, "none"):
            try:
                made = RunFolder.create(tmp_path / "logs", "host", run)
            except GputopError:
                continue
            made.save(b"trace")
            made.discard()
        assert not open_below(tmp_path)


@ROOT
def test_root_saves_nothing_elsewhere_in_the_folder_of_a_user(tmp_path, monkeypatch):
    (cache := tmp_path / "cache").mkdir()
    os.chown(cache, BOB, -1)
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    assert cache not in storage._fallback_folders(tmp_path, 100)


def planted(folder: Path, kind: str, secret: Path) -> None:
    """What a hostile server puts where its trace should be."""
    folder.mkdir(parents=True)
    trace = folder / "host.xplane.pb"
    if kind == "link":
        trace.symlink_to(secret)
    elif kind == "pipe":
        os.mkfifo(trace)
    elif kind == "device":
        trace.symlink_to("/dev/zero")
    elif kind == "folder":
        trace.mkdir()
    elif kind == "linked folder":
        (secret.parent / "host.xplane.pb").write_bytes(b"for root alone")
        folder.rmdir()
        folder.symlink_to(secret.parent)


def _written(disk: ServerDisk) -> Path:
    (folder := Path(disk.root) / disk.run).mkdir(parents=True)
    (file := folder / "host.xplane.pb").write_bytes(b"trace")
    return file


class TestFilesOfServers:
    @pytest.fixture
    def disk(self, run, tmp_path) -> ServerDisk:
        return ServerDisk(str(tmp_path / "server"), run.path.name, "host", os.getpid(), True, os.geteuid())

    @pytest.mark.parametrize(("kind", "word"), [
        ("link", "symbolic link"), ("pipe", "a pipe"), ("device", "symbolic link"), ("folder", "a folder"),
        ("linked folder", "Not a directory|Too many levels")])
    def test_what_is_no_file_is_refused_at_once(self, disk, run, secret, kind, word):
        planted(Path(disk.root) / disk.run, kind, secret)
        with pytest.raises(GputopError, match=word):
            disk.find("127.0.0.1:1", run)

    @ROOT
    def test_a_hard_link_to_a_file_of_root_is_not_the_server_s(self, run, secret, tmp_path):
        folder = tmp_path / "server" / run.path.name
        folder.mkdir(parents=True)
        os.link(secret, folder / "host.xplane.pb")
        disk = ServerDisk(str(tmp_path / "server"), run.path.name, "host", None, True, BOB)
        with pytest.raises(GputopError, match="another user"):
            disk.find("127.0.0.1:1", run)
        os.chown(secret, BOB, -1)
        disk.find("127.0.0.1:1", run).close()

    @pytest.mark.parametrize(("size", "word"), [(6_000_000_000, "at most"), (3_000_000_000, "are free")])
    def test_a_file_that_is_too_large_is_not_copied(self, disk, run, size, word, monkeypatch):
        os.truncate(_written(disk), size)
        real = os.fstatvfs

        class Disk:
            f_bavail, f_frsize = 1_000_000, 1000

        monkeypatch.setattr(os, "fstatvfs", lambda fd: Disk if fd == run.folder.fd else real(fd))
        trace = disk.find("127.0.0.1:1", run)
        with pytest.raises(GputopError, match=word):
            run.adopt(trace.file, trace.path)
        trace.close()
        run.discard()
        assert not run.path.exists()

    def test_a_copy_is_stopped_and_leaves_nothing(self, disk, run):
        _written(disk)
        trace = disk.find("127.0.0.1:1", run)
        with pytest.raises(GputopError, match="stopped"):
            run.adopt(trace.file, trace.path, lambda: True)
        trace.close()
        assert not run.file.exists() and not run.partial.exists()

    def test_a_recording_that_was_stopped_early_is_copied_all_the_same_but_not_for_ever(self, monkeypatch):
        stop = threading.Event()
        going_on = storage.stops_copy(stop)
        assert not going_on()
        stop.set()
        assert going_on()
        after = storage.stops_copy(stop)
        assert not after()
        monkeypatch.setattr(client.time, "monotonic", lambda: float("inf"))
        assert after()

    def test_cleaning_up_happens_in_the_folder_that_was_read(self, disk, run, tmp_path):
        folder = _written(disk).parent
        trace = disk.find("127.0.0.1:1", run)
        folder.rename(tmp_path / "aside")
        (tmp_path / "precious").mkdir()
        (tmp_path / "precious" / "host.xplane.pb").write_bytes(b"precious")
        folder.symlink_to(tmp_path / "precious")
        assert disk.clean_up(trace) is None
        trace.close()
        assert (tmp_path / "precious" / "host.xplane.pb").exists() and not any((tmp_path / "aside").iterdir())


def test_the_user_of_a_server_is_known_by_its_socket():
    port = free_port()
    with socket.create_server(("127.0.0.1", port)):
        assert sockets.listening_uids(Path("/proc"), "127.0.0.1", port) == {os.geteuid()}
        assert server_disk._server_uid(f"127.0.0.1:{port}", None) == os.geteuid()
    assert not sockets.listening_uids(Path("/proc"), "127.0.0.1", port)


def test_of_sockets_at_one_port_that_counts_which_answers_at_the_address(tmp_path):
    """As the kernel chooses: that of the very address, else one of all addresses."""
    (tmp_path / "net").mkdir()
    head = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
    row = "   0: {}:1F90 00000000:0000 0A 00000000:00000000 00:00000000 00000000 {:5d}        0 7 1 0 100 0 0 10 0\n"
    order = sys.byteorder
    ipv4 = f"{int.from_bytes(bytes((127, 0, 0, 1)), order):08X}"
    ipv6 = "0" * 24 + f"{int.from_bytes(bytes((0, 0, 0, 1)), order):08X}"

    def uids(tcp, tcp6, host):
        (tmp_path / "net" / "tcp").write_text(head + "".join(row.format(*own) for own in tcp))
        (tmp_path / "net" / "tcp6").write_text(head + "".join(row.format(*own) for own in tcp6))
        return sockets.listening_uids(tmp_path, host, 8080)

    everywhere = [("0" * 8, 5)], [("0" * 32, 6)]
    assert uids([(ipv4, 1)], [(ipv6, 2)], "127.0.0.1") == {1} and uids([(ipv4, 1)], [(ipv6, 2)], "[::1]") == {2}
    assert uids([(ipv4, 1)], [(ipv6, 2)], "localhost") == {1, 2}
    assert uids(*everywhere, "127.0.0.1") == {5} and uids([], everywhere[1], "127.0.0.1") == {6}
    assert uids([*everywhere[0], (ipv4, 1)], everywhere[1], "127.0.0.1") == {1}
    assert uids(everywhere[0], [], "::1") == set()


HOSTILE = """
import os, sys
from pathlib import Path
from tests import xspace_messages as messages
from tests.profiler.fake_server import FakeProfiler, make_xspace, serve

class Hostile(FakeProfiler):
    def profile(self, request, context):
        folder = Path(request.repository_root) / request.session_id
        folder.mkdir(parents=True)
        trace = folder / (request.host_name + ".xplane.pb")
        if sys.argv[1] == "link":
            trace.symlink_to(sys.argv[2])
        elif sys.argv[1] == "pipe":
            os.mkfifo(trace)
        else:
            trace.write_bytes(xspace)
        print(request.repository_root, flush=True)
        return messages.ProfileResponse()

xspace = make_xspace()
with serve(Hostile()) as server:
    os.setgroups([]); os.setgid(12345); os.setuid(12345)
    print(server.address, flush=True)
    sys.stdin.read()
    os._exit(0)
"""


@ROOT
@pytest.mark.parametrize(("kind", "word"), [("link", "symbolic link"), ("pipe", "a pipe"), ("trace", None)])
def test_a_server_of_another_user_that_answers_without_data(kind, word, secret, logdir):
    """The whole attack: root captures from a server of bob's, which makes it open a path that bob owns."""
    with serving_process(sys.executable, "-c", HOSTILE, kind, str(secret)) as (server, address):
        if word is None:
            path = capture(address, seconds=0.01, logdir=logdir).path
            assert stat.S_IMODE(path.stat().st_mode) == 0o600 and path.stat().st_size
        else:
            with pytest.raises(GputopError, match=word):
                capture(address, seconds=0.01, logdir=logdir)
            assert not logdir.exists()
        root = Path(server.stdout.readline().strip())
        assert root.exists() == (word is not None), "what was copied is removed, with its folders"
        shutil.rmtree(root, ignore_errors=True)


def test_a_file_made_meanwhile_is_not_replaced(tmp_path):
    with Folder(tmp_path) as folder:
        os.close(folder.create("a"))
        (tmp_path / "b").write_bytes(b"theirs")
        with pytest.raises(FileExistsError):
            folder.move("a", "b", replace=False)
    assert (tmp_path / "b").read_bytes() == b"theirs"

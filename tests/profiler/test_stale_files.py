"""What a killed gputop leaves in a logdir, with processes that are really killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gputop.core.files import Folder
from gputop.profiler import stale_files
from gputop.profiler.capture.records import Server
from gputop.profiler.capture.request import CaptureRequest
from gputop.profiler.stale_files import probe_name, remove_stale_files
from gputop.profiler.storage import RunFolder
from gputop.session.capture.captures import CaptureRun, capture_and_analyze
from gputop.trace.readers.capture_file import FILE as CAPTURE
from tests.profiler.fake_server import serve

_LEAVES = """
import sys
from pathlib import Path
from gputop.profiler.stale_files import probe_name
from gputop.profiler.storage import RunFolder
print(RunFolder.create(sys.argv[1], "host").partial)
folder = Path(sys.argv[1]) / probe_name()
RunFolder.create(folder, "host")
print(folder, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def owner(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], Path, Path]]:
    """A process in the middle of a capture, its file and its folder."""
    with subprocess.Popen([sys.executable, "-c", _LEAVES, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                          text=True) as process:
        yield process, Path(process.stdout.readline().strip()), Path(process.stdout.readline().strip())
        process.kill()


@pytest.fixture
def dead(owner: tuple[subprocess.Popen[str], Path, Path]) -> tuple[Path, Path]:
    """The file and the folder of a process that was killed in the middle of a capture."""
    process, partial, folder = owner
    process.kill()
    process.wait()
    return partial, folder


def aged(path: Path, hours: float) -> Path:
    os.utime(path, (time.time() - hours * 3600,) * 2)
    return path


def test_a_gputop_killed_in_the_middle_of_a_capture(tmp_path: Path) -> None:
    with serve() as server:
        command = [sys.executable, "-m", "gputop", "capture", "--attach", server.address, "--seconds", "600",
                   "--logdir", str(tmp_path)]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as killed:
            assert any("recording" in line for line in killed.stderr)
            left = [*tmp_path.glob(".gputop-probe-*"), *tmp_path.glob("plugins/profile/*/.*.partial")]
            killed.send_signal(signal.SIGKILL)
        assert len(left) == 2 and all(path.exists() for path in left)
    with serve() as server:
        done = capture_and_analyze([Server(server.address)], CaptureRequest(0.1, tmp_path),
                                   CaptureRun(threading.Event(), threading.Event(), lambda _status: None))
    assert {p for p in tmp_path.rglob("*") if p.is_file()} == {done.path, done.path.with_name(CAPTURE)}
    assert list(tmp_path.iterdir()) == [tmp_path / "plugins"]
    assert list((tmp_path / "plugins" / "profile").iterdir()) == [done.path.parent]


def test_of_the_living_everything_stays(owner, tmp_path):
    process, partial, folder = owner
    own = RunFolder.create(tmp_path, "host")
    for path in (partial, folder, aged(own.partial, hours=100)):
        aged(path, hours=100)
    process.send_signal(signal.SIGSTOP)  # and of those that sleep
    remove_stale_files(tmp_path)
    assert partial.exists() and folder.exists() and own.partial.exists()
    own.discard()


def test_of_the_dead_all_goes_though_nobody_has_asked_how_they_ended(owner, tmp_path):
    process, partial, folder = owner
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # it stays a zombie
    remove_stale_files(tmp_path)
    assert not partial.parent.exists() and not folder.exists()
    assert (tmp_path / "plugins" / "profile").is_dir()


def test_a_later_process_with_its_number_does_not_keep_it(tmp_path):
    name = probe_name()
    start = name.rpartition("-")[2]
    (tmp_path / name).mkdir()
    (earlier := tmp_path / f"{name.removesuffix(start)}{int(start) - 1}").mkdir()
    remove_stale_files(tmp_path)
    assert (tmp_path / name).exists() and not earlier.exists()


def test_a_trace_beside_it_stays(dead, tmp_path):
    partial, _ = dead
    (trace := partial.parent / "other.xplane.pb").write_bytes(b"trace")
    remove_stale_files(tmp_path)
    assert not partial.exists() and trace.read_bytes() == b"trace"


@pytest.mark.parametrize(("hours", "gone"), [(6, False), (25, True), (-25, False)])
def test_of_other_hosts_only_what_is_too_old_to_be_of_a_capture(dead, tmp_path, monkeypatch, hours, gone):
    """Another host of a shared file system, or another container."""
    partial, folder = dead
    monkeypatch.setattr(stale_files.platform, "node", lambda: "another-host")
    for path in (partial, folder):
        aged(path, hours)
    remove_stale_files(tmp_path)
    assert (partial.exists(), folder.exists()) == (not gone, not gone)


def test_of_other_users_nothing(dead, tmp_path, monkeypatch):
    partial, folder = dead
    monkeypatch.setattr(stale_files.os, "geteuid", lambda: os.getuid() + 1)
    remove_stale_files(tmp_path)
    assert partial.exists() and folder.exists()


@pytest.mark.parametrize("unknown", ["no /proc", "the /proc of another namespace"])
def test_where_the_system_does_not_tell_who_lives_age_does(tmp_path, monkeypatch, unknown):
    if unknown == "no /proc":
        monkeypatch.setattr(stale_files, "_PROC", tmp_path / "none")
    else:
        monkeypatch.setattr(stale_files.os, "getpid", lambda: 1)
    (new := tmp_path / probe_name()).mkdir()
    (old := tmp_path / probe_name()).mkdir()
    aged(old, hours=25)
    remove_stale_files(tmp_path)
    assert new.exists() and not old.exists()
    assert new.name.partition(".")[2] != old.name.partition(".")[2]


def test_other_things_stay_and_what_cannot_be_removed_is_no_error(dead, tmp_path, monkeypatch):
    partial, folder = dead
    run = partial.parent
    others = [run / ".host.partial", run / ".rsync-partial", tmp_path / ".gputop-probe-12345678",
              run / partial.name[1:]]
    for other in others:
        other.touch()
    (link := tmp_path / f"{folder.name}0").symlink_to(run)  # named as of the dead
    real = Folder.remove
    monkeypatch.setattr(Folder, "remove", lambda self, name: None if self.path == run else real(self, name))
    remove_stale_files(tmp_path)
    assert all(other.exists() for other in others) and link.is_symlink() and partial.exists()
    assert not folder.exists(), "it goes on with the next"
    remove_stale_files(tmp_path / "nowhere")
    remove_stale_files(Path("~no-such-user-here/logs"))


def test_of_a_dead_probe_s_folder_links_are_removed_and_not_followed(dead, tmp_path):
    _, folder = dead
    (kept := tmp_path / "kept").mkdir()
    (kept / "file").touch()
    (folder / "link").symlink_to(kept)
    remove_stale_files(tmp_path)
    assert not folder.exists() and (kept / "file").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to make a folder of another user")
def test_in_a_logdir_that_another_user_could_exchange_nothing_is_removed(dead, tmp_path):
    partial, folder = dead
    os.chown(tmp_path / "plugins", 12345, -1)
    remove_stale_files(tmp_path)
    assert partial.exists() and folder.exists()

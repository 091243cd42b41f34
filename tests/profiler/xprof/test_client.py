"""Captures from a server of our own: delivery both ways, progress, stopping, and everything that goes wrong."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import socket
import subprocess
import sys
import threading
from pathlib import Path

import grpc
import psutil
import pytest

from gputop.core.errors import EXIT_USAGE, GputopError, NoDataError
from gputop.core.files import Folder
from gputop.profiler import storage
from gputop.profiler.addresses import listening_pid
from gputop.profiler.recording import Progress
from gputop.profiler.xprof import client, server_disk
from tests.profiler.capturing import capture
from tests.profiler.fake_server import FakeProfiler, make_xspace, serve
from tests.waiting import PATIENCE_S

LONG_S = 60.0  # never waited for: something ends the capture before


def everything_below(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*"))


def test_trace_in_the_response_is_saved_as_it_came(logdir):
    with serve(FakeProfiler(xspace=make_xspace(errors=("lost", "lost"), warnings=("careful",)))) as server:
        result = capture(server.address, seconds=0.05, logdir=logdir, host_name="node/7:x")
    assert result.path.name == "node_7_x.xplane.pb" and result.path.parents[1] == logdir / "plugins" / "profile"
    assert result.path.read_bytes() == server.xspace
    assert result.bytes == len(server.xspace)
    assert result.errors == ("lost",) and result.warnings == ("careful",)
    assert not result.stopped_early
    assert result.took_s >= 0.05
    assert everything_below(result.path.parent) == [result.path]


@pytest.mark.parametrize("name", ["unix:{tmp}/job 1%.sock", "unix-abstract:gputop-test {pid}"])
def test_by_way_of_a_socket_of_this_machine(logdir, tmp_path, name):
    """As ssh -L leads to the server of another machine, or a container's to that inside of it."""
    address = name.format(tmp=tmp_path, pid=os.getpid())
    with serve(at=address) as server:
        result = capture(address, seconds=0.05, logdir=logdir)
        assert listening_pid(address) == os.getpid()
    assert result.path.read_bytes() == server.xspace
    assert result.path.name == f"{socket.gethostname()}.xplane.pb"


def test_request_asks_for_what_both_kinds_of_server_need(logdir):
    with serve() as server:
        result = capture(server.address, seconds=0.05, logdir=logdir)
    (request,) = server.requests
    assert request.emit_xspace
    assert request.duration_ms == request.opts.duration_ms == 50
    assert request.opts.version == 1
    assert request.opts.host_tracer_level == 2 and request.opts.python_tracer_level == 0
    assert request.session_id == result.path.parent.name
    assert request.host_name == result.path.name.removesuffix(".xplane.pb")


def test_progress_is_reported_on_the_calling_thread(logdir):
    seen: list[tuple[int, Progress]] = []
    with serve() as server:
        capture(server.address, seconds=0.5, logdir=logdir,
                on_progress=lambda p: seen.append((threading.get_ident(), p)))
    assert {thread for thread, _ in seen} == {threading.get_ident()}
    phases = [p.phase for _, p in seen]
    assert list(dict.fromkeys(phases))[:2] == ["connecting", "recording"] and phases[-1] == "saving"
    elapsed = [p.elapsed_s for _, p in seen]
    assert elapsed == sorted(elapsed)


def test_two_captures_never_share_a_folder(logdir):
    with serve() as server:
        paths = {capture(server.address, seconds=0.01, logdir=logdir).path for _ in range(3)}
    assert len(paths) == 3


def test_stop_ends_early_and_keeps_the_data(logdir):
    stop = threading.Event()
    with serve() as server:
        result = capture(server.address, seconds=LONG_S, logdir=logdir, stop=stop,
                         on_progress=lambda p: p.phase == "recording" and stop.set())
        assert server.terminated == [result.path.parent.name]
    assert result.stopped_early
    assert result.took_s < LONG_S
    assert result.path.read_bytes() == server.xspace


def test_server_that_ignores_stop_is_canceled(logdir, monkeypatch):
    monkeypatch.setattr(client, "_GRACE_EXTRA_S", 0.2)
    stop = threading.Event()
    stop.set()
    with serve(FakeProfiler(obeys_terminate=False)) as server:
        with pytest.raises(GputopError, match="did not send"):
            capture(server.address, seconds=LONG_S, logdir=logdir, stop=stop)
        assert server._stop.wait(PATIENCE_S)  # the server was asked to stop
    assert not logdir.exists()


def test_failing_callback_leaves_nothing_behind(logdir):
    def fail(progress: Progress) -> None:
        raise KeyboardInterrupt

    with serve() as server, pytest.raises(KeyboardInterrupt):
        capture(server.address, seconds=LONG_S, logdir=logdir, on_progress=fail)
    assert not logdir.exists()


class TestServersThatWriteThemselves:
    def test_in_place(self, logdir, monkeypatch):
        monkeypatch.setattr(server_disk, "_shares_files", lambda pid: True)
        with serve(FakeProfiler(writes_disk=True, xspace=make_xspace(warnings=("w",)))) as server:
            result = capture(server.address, seconds=0.01, logdir=logdir)
            assert server.requests[0].repository_root == str(logdir / "plugins" / "profile")
        assert result.path.read_bytes() == server.xspace
        assert result.warnings == ("w",)
        assert everything_below(result.path.parent) == [result.path]

    def test_by_way_of_tmp_where_the_logdir_is_not_the_servers(self, logdir, monkeypatch):
        monkeypatch.setattr(server_disk, "_shares_files", lambda pid: False)
        with serve(FakeProfiler(writes_disk=True)) as server:
            result = capture(server.address, seconds=0.01, logdir=logdir)
            root = Path(server.requests[0].repository_root)
        assert root.parent == Path("/tmp") and not root.exists()
        assert result.path.read_bytes() == server.xspace

    def test_through_proc_into_another_root(self, logdir, monkeypatch, tmp_path):
        """As from a container: our own root stands for the server's, at a path only /proc/<pid>/root leads to."""
        run = storage.RunFolder.create(logdir, "host")
        elsewhere = tmp_path / "server"
        disk = server_disk.ServerDisk(str(elsewhere), run.path.name, "host", pid=None, temporary=False)
        with pytest.raises(GputopError) as caught:
            disk.find("127.0.0.1:1", run)
        assert disk.file in caught.value.message
        (elsewhere / run.path.name).mkdir(parents=True)
        Path(disk.file).write_bytes(b"trace")

        def not_there(_disk: server_disk.ServerDisk) -> list[Folder]:
            raise FileNotFoundError(2, "No such file or directory")

        monkeypatch.setattr(server_disk.ServerDisk, "_own_view", not_there)
        inside = server_disk.ServerDisk(disk.root, disk.run, disk.host, pid=os.getpid(), temporary=True)
        trace = inside.find("127.0.0.1:1", run)
        assert str(trace.path).startswith("/proc/")
        assert run.adopt(trace.file, trace.path).read_bytes() == b"trace"
        assert inside.clean_up(trace) is None
        trace.close()
        run.discard()
        assert not Path(disk.file).exists() and not elsewhere.exists()

    def test_out_of_reach_names_both_paths(self, logdir, tmp_path):
        with serve(FakeProfiler(writes_to=tmp_path / "other disk")) as server:
            with pytest.raises(GputopError, match="wrote it to its own disk") as caught:
                capture(server.address, seconds=0.01, logdir=logdir)
            expected = f"{server.requests[0].repository_root}/{server.requests[0].session_id}/"
        assert expected in caught.value.message
        assert "/proc/" in caught.value.message
        assert "gputop analyze" in caught.value.fix

    def test_refused_write(self, logdir, monkeypatch):
        monkeypatch.setattr(server_disk, "_shares_files", lambda pid: True)
        root = logdir / "plugins" / "profile"
        refusal = (grpc.StatusCode.INTERNAL, f"{root}; Permission denied")
        with serve(FakeProfiler(refuse=refusal)) as server, pytest.raises(GputopError, match="own disk") as caught:
            capture(server.address, seconds=0.01, logdir=logdir)
        assert "--logdir" in caught.value.fix


class TestFileSystemsThatFail:
    """A stale NFS handle, a failing disk: said with cause and fix, and the trace is kept."""

    @pytest.fixture
    def failing(self, monkeypatch):
        """Make a function of ``owner`` raise for the arguments that ``applies`` to."""
        def begin(owner, function, applies, number=errno.ESTALE):
            real = getattr(owner, function)

            def fail(*arguments, **options):
                if applies(*arguments):
                    raise OSError(number, os.strerror(number), str(arguments[0]))
                return real(*arguments, **options)

            monkeypatch.setattr(owner, function, fail)
        return begin

    @pytest.mark.parametrize("in_place", [True, False])
    def test_the_servers_own_file_is_named_and_kept(self, logdir, tmp_path, failing, in_place):
        run = storage.RunFolder.create(logdir, "host")
        source = run.file if in_place else tmp_path / "own.xplane.pb"
        source.write_bytes(b"trace")
        failing(storage.os.path if in_place else storage.files, "samestat" if in_place else "copy_bounded",
                lambda *_: True)
        with source.open("rb") as opened, pytest.raises(GputopError, match="Stale file handle") as caught:
            run.adopt(opened, source)
        run.discard()
        assert str(source) in caught.value.message and str(source) in caught.value.fix
        assert source.is_file()
        assert [p for p in everything_below(logdir) if p.name.endswith(".partial")] == []

    def test_a_full_disk_while_copying_names_the_copy_that_stays(self, logdir, tmp_path, failing):
        run = storage.RunFolder.create(logdir, "host")
        source = tmp_path / "own.xplane.pb"
        source.write_bytes(b"trace")
        failing(Folder, "move", lambda *_: True, errno.ENOSPC)
        with source.open("rb") as opened, pytest.raises(GputopError, match="No space") as caught:
            run.adopt(opened, source)
        run.discard()
        assert str(source) in caught.value.fix and source.read_bytes() == b"trace"
        assert not logdir.exists()

    def test_cleaning_up_never_hides_why(self, logdir, failing):
        failing(os, "unlink", lambda path: str(path).endswith(".partial"))
        with pytest.raises(GputopError, match="nothing listens"):
            capture("127.0.0.1:1", seconds=0.01, logdir=logdir)
        run = storage.RunFolder.create(logdir, "host")
        failing(Folder, "move", lambda *_: True, errno.ENOSPC)
        with pytest.raises(GputopError, match="No space"):
            run.save(b"trace")
        failing(Folder, "create", lambda folder, name: name.endswith(".partial"), errno.EDQUOT)
        with pytest.raises(GputopError, match="cannot write traces"):
            storage.RunFolder.create(logdir, "host")

    def test_a_saved_trace_that_cannot_be_read_again_is_named_and_all_copies_stay(self, logdir, failing, monkeypatch):
        monkeypatch.setattr(server_disk, "_shares_files", lambda pid: False)
        failing(storage.RunFolder, "open_trace", lambda *_: True)
        with serve(FakeProfiler(writes_disk=True)) as server:
            with pytest.raises(GputopError, match="cannot be read: Stale") as caught:
                capture(server.address, seconds=0.01, logdir=logdir)
            root = Path(server.requests[0].repository_root)
        try:
            assert len(list(root.rglob("*.xplane.pb"))) == 1
        finally:
            shutil.rmtree(root)
        (path,) = logdir.rglob("*.xplane.pb")
        assert str(path) in caught.value.message and "gputop analyze" in caught.value.fix
        assert path.stat().st_size == len(server.xspace)

    def test_a_trace_from_the_response_is_not_read_from_the_disk(self, logdir, failing):
        failing(Path, "stat", lambda path, *_: path.name.endswith(".xplane.pb") and path in path.parent.iterdir())
        with serve() as server:
            result = capture(server.address, seconds=0.01, logdir=logdir)
        assert result.bytes == len(server.xspace)


@pytest.mark.parametrize("flagged", [True, False])
@pytest.mark.parametrize("writes_disk", [True, False])
def test_trace_without_events_is_nothing_to_see_but_kept(logdir, flagged, writes_disk):
    xspace = make_xspace(events=0, errors=("CUPTI_ERROR_INSUFFICIENT_PRIVILEGES",))
    profiler = FakeProfiler(xspace=xspace, empty_trace=flagged, writes_disk=writes_disk)
    with serve(profiler) as server, pytest.raises(NoDataError, match="no events") as caught:
        capture(server.address, seconds=0.01, logdir=logdir)
    assert "CUPTI_ERROR_INSUFFICIENT_PRIVILEGES" in caught.value.message
    (path,) = logdir.rglob("*.xplane.pb")
    assert str(path) in caught.value.message
    assert path.read_bytes() == xspace


def test_nothing_at_all_in_the_response(logdir):
    profiler = FakeProfiler(xspace=b"", empty_trace=True)
    with serve(profiler) as server, pytest.raises(NoDataError, match="no events"):
        capture(server.address, seconds=0.01, logdir=logdir)
    assert not logdir.exists()


def test_damaged_trace_is_kept_and_said(logdir):
    with serve(FakeProfiler(xspace=make_xspace(events=200)[:-20])) as server:
        result = capture(server.address, seconds=0.01, logdir=logdir)
    assert any("damaged" in text for text in result.warnings)
    assert result.path.exists()


@pytest.mark.parametrize(("code", "details", "cause"), [
    ("INTERNAL", "Another profiling session active.", "is busy"),
    ("UNAVAILABLE", "Another profile session running.", "is busy"),
    ("ALREADY_EXISTS", "A profiling session is already running.", "is busy"),
    ("UNIMPLEMENTED", "", "without the profiler service"),
    ("UNAVAILABLE", "Socket closed", "the connection was lost"),
    ("DEADLINE_EXCEEDED", "", "did not send"),
    ("RESOURCE_EXHAUSTED", "Sent message larger than max", "too large"),
    ("INTERNAL", "out of luck", "INTERNAL: out of luck"),
])
def test_refusals_name_cause_and_fix(logdir, code, details, cause):
    refusal = (grpc.StatusCode[code], details)
    with serve(FakeProfiler(refuse=refusal)) as server, pytest.raises(GputopError, match=cause) as caught:
        capture(server.address, seconds=LONG_S, logdir=logdir)
    assert caught.value.fix
    assert not logdir.exists()


def test_deadline(logdir, monkeypatch):
    monkeypatch.setattr(client, "_DEADLINE_EXTRA_S", 0.3)
    monkeypatch.setattr(client, "_DEADLINE_FACTOR", 0.0)
    with serve() as server:
        with pytest.raises(GputopError, match="did not send"):
            capture(server.address, seconds=LONG_S, logdir=logdir)
        assert server._stop.wait(PATIENCE_S), "the server was told"
    assert not logdir.exists()


@pytest.mark.parametrize("force", [True, False])
def test_a_killed_gputop_leaves_nothing_running(logdir, force):
    with serve() as server:
        command = [sys.executable, "-m", "gputop", "capture", "--attach", server.address, "--seconds", "60",
                   "--logdir", str(logdir), *(["--force"] if force else [])]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as running:
            started = next(line for line in running.stderr if "gputop: recording" in line)
            children = psutil.Process(running.pid).children(recursive=True)
            assert not server._stop.is_set(), started
            running.kill()
        assert server._stop.wait(PATIENCE_S), "the call ended with its caller"
    assert children == []


class TestLogdir:
    @pytest.mark.parametrize("bad", ["file/below", "/proc/nope"])
    def test_unwritable_is_found_before_the_job_is_disturbed(self, tmp_path, bad):
        (tmp_path / "file").touch()
        with serve() as server, pytest.raises(GputopError, match="cannot write traces") as caught:
            capture(server.address, seconds=0.01, logdir=tmp_path / bad)
        assert "--logdir" in caught.value.fix
        assert server.requests == []
        assert everything_below(tmp_path) == [tmp_path / "file"]

    @pytest.mark.parametrize("logdir", ["gs://bucket/logs", "~no-such-user-here/logs"])
    def test_what_is_no_folder_is_wrong_usage(self, logdir):
        with pytest.raises(GputopError, match="not a folder") as caught:
            capture("localhost:1", logdir=logdir)
        assert caught.value.exit_code == EXIT_USAGE

    def test_failed_capture_leaves_what_was_there(self, logdir):
        kept = logdir / "plugins" / "profile" / "older"
        kept.mkdir(parents=True)
        with contextlib.suppress(GputopError):
            capture("127.0.0.1:1", logdir=logdir, seconds=0.01)
        assert everything_below(logdir / "plugins" / "profile") == [kept]

    @pytest.mark.parametrize(
        ("limit", "calls", "cause"), [(200_000, 1, "could not be saved"), (9_999, 0, "cannot write")]
    )
    def test_full_disk(self, logdir, limit, calls, cause):
        """A limit on file size stands for the full disk: writing fails in the middle of a file."""
        code = (
            "import resource, sys\n"
            "from gputop.core.errors import GputopError\n"
            "from tests.profiler.capturing import capture\n"
            f"resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))\n"
            "try:\n"
            "    capture(sys.argv[1], seconds=0.01, logdir=sys.argv[2])\n"
            "except GputopError as error:\n"
            "    print(error.message)\n"
        )
        with serve(FakeProfiler(xspace=make_xspace(events=60_000))) as server:
            done = subprocess.run([sys.executable, "-B", "-c", code, server.address, str(logdir)],
                                  capture_output=True, text=True)
        assert cause in done.stdout and "File too large" in done.stdout, done.stderr
        assert len(server.requests) == calls
        assert not logdir.exists()


@pytest.mark.parametrize("seconds", [0, -1, 1e9, float("nan")])
def test_impossible_durations_are_wrong_usage(logdir, seconds):
    with pytest.raises(GputopError, match="can last") as caught:
        capture("localhost:1", seconds=seconds, logdir=logdir)
    assert caught.value.exit_code == EXIT_USAGE

"""Probe, choice and capture against a server that misbehaves at each of them."""

from __future__ import annotations

import gzip
import os
import threading
from pathlib import Path

import grpc
import pytest

from gputop.core.errors import GputopError, NoDataError
from gputop.core.files import Folder
from gputop.profiler import storage
from gputop.profiler.capture import job_memory, safe_capture
from gputop.profiler.capture.plan import FreeResources, MemoryLimits, Plan
from gputop.profiler.xprof import client, server_disk
from tests.profiler.capturing import capture, capture_with_probe
from tests.profiler.fake_server import BUSY, EMPTY, GONE, FakeProfiler, in_turn, make_xspace, serve, serving_process

DATA = Path(__file__).parents[2] / "data"
MANY_EVENTS = make_xspace(events=100_000)
pytestmark = pytest.mark.usefixtures("quick")


def files_below(folder: Path) -> list[Path]:
    return [p for p in folder.rglob("*") if p.is_file()]


def durations_ms(server: FakeProfiler) -> list[int]:
    return [request.duration_ms for request in server.requests]


def test_a_quiet_job_is_recorded_as_long_as_asked(logdir):
    plans: list[Plan] = []
    phases: list[str] = []
    with serve() as server:
        result, plan, cost = capture_with_probe(server.address, seconds=0.4, logdir=logdir, on_plan=plans.append,
                                             on_progress=lambda p: phases.append(p.phase))
    assert durations_ms(server) == [50, 400]
    assert plans == [plan] and not plan.shortened and plan.probe.host_events == 3
    assert cost.call_s == result.took_s and cost.recorded_s == 0.4
    assert cost.memory_before_bytes is None, "the server is in our own process: no job to measure"
    assert files_below(logdir) == [result.path], "the probe is not kept"
    order = list(dict.fromkeys(phases))
    assert order[0] == "probing" and "recording" in order


def test_a_busy_job_is_recorded_for_less_with_the_reason(logdir):
    with serve(FakeProfiler(xspace=MANY_EVENTS)) as server:
        result, plan, _ = capture_with_probe(server.address, seconds=0.5, logdir=logdir)
    assert durations_ms(server)[:2] == [50, 200]
    assert (plan.asked_s, plan.chosen_s, plan.why) == (0.5, 0.2, "the job emits 2.0 M events/s")
    assert result.asked_s == 0.2


def test_once_the_probe_shows_the_steps_a_hundred_will_do(logdir, monkeypatch):
    """A real trace of Keras as the probe; the probes here are too short for the real figures."""
    monkeypatch.setattr("gputop.profiler.capture.plan._ENOUGH_S", 0.1)
    monkeypatch.setattr("gputop.profiler.capture.plan._ENOUGH_STEPS", 10)
    monkeypatch.setattr("gputop.profiler.capture.plan._CHEAP_EVENTS", 0)
    trace = gzip.decompress((DATA / "keras3_fast.xplane.pb.gz").read_bytes())
    with serve(FakeProfiler(xspace=trace)) as server:
        result, made, _ = capture_with_probe(server.address, seconds=0.9, logdir=logdir)
    assert made.enough and made.why.startswith("about 10 steps are enough, at ")
    assert made.probe.sure and result.asked_s == made.chosen_s == pytest.approx(10 * made.probe.step_s, abs=0.1001)


@pytest.mark.parametrize(("seconds", "force"), [(0.1, False), (0.4, True)])
def test_no_probe_where_it_is_short_or_forced(logdir, seconds, force, monkeypatch):
    monkeypatch.setattr(safe_capture, "free_resources", lambda *_: pytest.fail("nobody asked"))
    with serve(FakeProfiler(xspace=MANY_EVENTS)) as server:
        _, plan, _ = capture_with_probe(server.address, seconds=seconds, logdir=logdir, force=force)
    assert durations_ms(server) == [round(1000 * seconds)]
    assert plan.probe is None and plan.chosen_s == seconds and ("no probe" in plan.why) == force


@pytest.mark.parametrize(("empty", "chosen_s"), [(1, 0.2), (2, 0.2), (3, 0.5)])
def test_an_empty_probe_is_made_again_and_at_last_the_capture_goes_on(logdir, empty, chosen_s):
    with serve(FakeProfiler(on_call=in_turn(*[EMPTY] * empty, MANY_EVENTS))) as server:
        result, plan, _ = capture_with_probe(server.address, seconds=0.5, logdir=logdir)
    assert plan.chosen_s == chosen_s and ("no events" in plan.why) == (empty == 3)
    assert files_below(logdir)[:1] == [result.path]


def test_a_job_that_sleeps_on_is_nothing_to_see(logdir):
    with serve(FakeProfiler(xspace=EMPTY)) as server, pytest.raises(NoDataError):
        capture_with_probe(server.address, seconds=0.2, logdir=logdir)


def test_stopped_during_the_probe_keeps_the_probe(logdir, monkeypatch):
    monkeypatch.setattr(safe_capture, "PROBE_S", 60.0)
    stop = threading.Event()
    with serve() as server:
        result, plan, _ = capture_with_probe(server.address, seconds=300, logdir=logdir, stop=stop,
                                          on_progress=lambda p: p.phase == "probing" and stop.set())
        assert len(server.requests) == len(server.terminated) == 1
    assert result.path.parent.parent == logdir / "plugins" / "profile"
    assert files_below(logdir) == [result.path] and result.path.read_bytes() == server.xspace
    assert "stopped during the probe" in plan.why and plan.chosen_s < 60


def test_stopped_during_the_capture_keeps_the_capture(logdir):
    stop = threading.Event()
    with serve() as server:
        result, plan, cost = capture_with_probe(server.address, seconds=60, logdir=logdir, stop=stop,
                                             on_progress=lambda p: p.phase == "recording" and stop.set())
    assert result.stopped_early and plan.chosen_s == 60 and cost.recorded_s == result.took_s < 60
    assert files_below(logdir) == [result.path]


@pytest.mark.parametrize("busy_at", [0, 1])
@pytest.mark.parametrize("refusal", [BUSY, (grpc.StatusCode.ALREADY_EXISTS, "running")])
def test_busy_at_the_probe_or_after_it(logdir, busy_at, refusal):
    with serve(FakeProfiler(on_call=in_turn(*[make_xspace()] * busy_at, refusal))) as server:
        with pytest.raises(GputopError, match="is busy"):
            capture_with_probe(server.address, seconds=0.2, logdir=logdir)
        assert len(server.requests) == busy_at + 1
    assert not logdir.exists(), "nothing of the probe stays behind, nor what it needed"


def test_a_server_that_dies_after_the_probe_leaves_the_probe(logdir):
    with serving_process() as (process, address), \
            pytest.raises(GputopError, match=r"by SIGKILL.* only the probe of 0.05 s was saved") as caught:
        capture_with_probe(address, seconds=60, logdir=logdir, pid=process.pid,
                           on_progress=lambda p: p.phase == "recording" and process.kill())
    (kept,) = files_below(logdir)
    assert f"gputop analyze {kept}" in caught.value.fix
    assert kept.read_bytes() == make_xspace()


def test_the_job_s_memory_is_watched(logdir):
    with serving_process() as (process, address):
        _, _, cost = capture_with_probe(address, seconds=0.2, logdir=logdir, pid=process.pid)
    assert 1e6 < cost.memory_before_bytes <= cost.memory_peak_bytes
    assert cost.memory_after_bytes <= cost.memory_peak_bytes
    assert "the job's memory grew by" in cost.text()


@pytest.mark.parametrize(("limits", "cause"), [
    (MemoryLimits(6e9), "the job's memory had grown by "),
    (MemoryLimits(shared_bytes=3e9), "only 2.8 GiB of memory is free"),
    (MemoryLimits(job_bytes=3e9), "only 2.8 GiB of memory is left within the job's limit"),
    (MemoryLimits(9e12), ""),
])
def test_memory_that_runs_short_ends_the_recording(logdir, monkeypatch, limits, cause):
    size = iter(range(10**9, 10**12, 10**9))  # a gigabyte more at each sample, and less is free
    left = iter(range(9 * 10**9, 0, -10**9))
    monkeypatch.setattr(job_memory, "resident_bytes", lambda pid: next(size))
    monkeypatch.setattr(safe_capture, "free_resources", lambda *_: FreeResources(now := next(left, 1e9) - 1e6, now))
    monkeypatch.setattr(safe_capture, "memory_limits", lambda *_: limits)
    monkeypatch.setattr(safe_capture, "plan", lambda seconds, probe, *_: Plan(seconds, seconds, "as asked", probe))
    with serve() as server:
        result, plan, cost = capture_with_probe(server.address, seconds=60 if cause else 0.4, logdir=logdir)
    assert result.stopped_early == bool(cause) and result.path in files_below(logdir)
    if cause:
        assert 0 < plan.chosen_s < cost.recorded_s < 60 and plan.shortened and plan.overview_s < 20
        assert plan.why.startswith(f"ended early, because {cause}")


def test_a_slow_hand_over_is_reported():
    assert safe_capture.Cost(8.0, 4.0).text() == (
        "the capture call took 8.0 s to record 4.0 s: the profiler spent 4.0 s collecting the trace, which slowed the "
        "job")
    assert safe_capture.Cost(4.3, 4.0).text() == "the capture call took 4.3 s to record 4.0 s"
    assert safe_capture.Cost(4.3, 4.0).growth_bytes is None


def test_a_trace_a_hundred_times_the_estimate_of_the_probe_is_kept(logdir):
    with serve(FakeProfiler(on_call=in_turn(make_xspace(), make_xspace(events=200_000)))) as server:
        result, plan, _ = capture_with_probe(server.address, seconds=0.2, logdir=logdir)
    assert not plan.shortened and result.path.read_bytes() == server.xspace


def test_a_damaged_probe_counts_for_what_is_readable(logdir):
    with serve(FakeProfiler(on_call=in_turn(make_xspace(events=200)[:-20], make_xspace()))) as server:
        _, plan, _ = capture_with_probe(server.address, seconds=0.2, logdir=logdir)
    assert 150 < plan.probe.host_events <= 200


def test_a_probe_that_is_not_handed_over_is_given_up(logdir, monkeypatch):
    monkeypatch.setattr(client, "_DEADLINE_EXTRA_S", 0.2)
    monkeypatch.setattr(client, "_DEADLINE_FACTOR", 0.0)
    monkeypatch.setattr(safe_capture, "PROBE_S", 60.0)
    with serve() as server, pytest.raises(GputopError, match="did not send"):
        capture_with_probe(server.address, seconds=300, logdir=logdir)
    assert not logdir.exists()


@pytest.mark.parametrize(("free", "cause"), [
    (FreeResources(shared_bytes=1e6), "not enough memory"), (FreeResources(job_bytes=100), "the job's limit"),
    (FreeResources(disk_bytes=10), "not enough disk space"),
])
def test_refused_before_the_capture_where_it_would_not_fit(logdir, free, cause, monkeypatch):
    monkeypatch.setattr(safe_capture, "free_resources", lambda *_: free)
    with serve() as server:
        with pytest.raises(GputopError, match=cause) as caught:
            capture_with_probe(server.address, seconds=10, logdir=logdir)
        assert len(server.requests) == 1
    assert "--force" in caught.value.fix
    assert not logdir.exists()


@pytest.mark.parametrize("bad", ["file/below", "/proc/nope"])
def test_an_unwritable_logdir_is_named_as_it_was_given(tmp_path, bad):
    (tmp_path / "file").touch()
    with serve() as server, pytest.raises(GputopError, match="cannot write traces") as caught:
        capture_with_probe(server.address, seconds=10, logdir=tmp_path / bad)
    assert server.requests == [] and "probe" not in caught.value.message


class TestServersThatWriteThemselves:
    def test_probe_and_capture(self, logdir, monkeypatch):
        monkeypatch.setattr(server_disk, "_shares_files", lambda pid: True)
        with serve(FakeProfiler(writes_disk=True)) as server:
            result, plan, _ = capture_with_probe(server.address, seconds=0.2, logdir=logdir)
        assert plan.probe.host_events == 3
        assert files_below(logdir) == [result.path]

    def test_what_it_wrote_before_it_went_away_is_kept(self, logdir, monkeypatch):
        """The connection breaks between the writing and the answer."""
        monkeypatch.setattr(server_disk, "_shares_files", lambda pid: True)

        def write_and_vanish(server: FakeProfiler, number: int) -> None:
            if number == 1:
                run = max((logdir / "plugins" / "profile").iterdir())
                (run / f"{server.requests[-1].host_name}.xplane.pb").write_bytes(server.xspace)
                server.refuse = GONE

        with serve(FakeProfiler(writes_disk=True, on_call=write_and_vanish)) as server:
            result, _, _ = capture_with_probe(server.address, seconds=0.2, logdir=logdir)
        assert files_below(logdir) == [result.path]
        assert any("the connection was lost" in w and "had already written this trace" in w for w in result.warnings)


class TestDisksThatFill:
    @pytest.fixture
    def full(self, logdir, monkeypatch, tmp_path):
        """The logdir takes no whole trace; other places do."""
        real = Folder.move

        def move(folder: Folder, name: str, to: str, *, replace: bool = True) -> None:
            if folder.path.is_relative_to(logdir):
                raise OSError(28, "No space left on device", name)
            real(folder, name, to, replace=replace)

        monkeypatch.setattr(Folder, "move", move)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        (tmp_path / "cache").mkdir()

    def test_the_trace_goes_elsewhere_and_that_is_said(self, logdir, full, tmp_path):
        with serve() as server:
            result = capture(server.address, seconds=0.05, logdir=logdir)
        assert result.path.is_relative_to(tmp_path / "cache") and result.path.read_bytes() == server.xspace
        assert result.path.parents[1].name == "profile"
        assert result.path.parents[3].stat().st_mode & 0o077 == 0, "a trace is its user's own"
        (warning,) = result.warnings
        assert "No space left" in warning and str(result.path) in warning
        assert not logdir.exists()

    def test_nowhere_to_go(self, logdir, full, tmp_path, monkeypatch):
        monkeypatch.setattr(storage, "_fallback_folders", lambda *_: [tmp_path / "gone"])
        with serve() as server, pytest.raises(GputopError, match=r"No space left.*or in .*gone"):
            capture(server.address, seconds=0.05, logdir=logdir)
        assert not logdir.exists()

    def test_a_probe_is_not_left_elsewhere(self, logdir, full, tmp_path):
        with serve() as server, pytest.raises(GputopError, match=r"is full: even the probe"):
            capture_with_probe(server.address, seconds=0.3, logdir=logdir)
        assert files_below(tmp_path) == [] and len(server.requests) == 1


def test_places_for_a_trace_have_room_and_other_file_systems_come_first(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert tmp_path in storage._fallback_folders(tmp_path, 100)
    assert storage._fallback_folders(tmp_path, 2**60) == []
    devices = [p.stat().st_dev == Path("/proc").stat().st_dev for p in storage._fallback_folders(Path("/proc"), 100)]
    assert devices == sorted(devices)


def test_footprint_is_asked_about_the_real_place(logdir, monkeypatch):
    asked: list[object] = []
    real = job_memory.free_resources
    monkeypatch.setattr(safe_capture, "free_resources", lambda *a: asked.append(a) or real(*a))
    with serve() as server:
        capture_with_probe(server.address, seconds=0.2, logdir=logdir)
        assert set(asked) == {(server.address, os.getpid(), logdir)}

"""Continuous recording, and that it never outlives gputop."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import grpc
import pytest

from gputop.core.errors import GputopError
from gputop.profiler.xprof import continuous
from gputop.profiler.xprof.continuous import MAX_GROWTH_BYTES, Continuous, RecordingState, Unsupported, is_full
from gputop.profiler.xprof.outline import recorded_window_ns
from tests.profiler.fake_server import FakeProfiler, make_xspace, serve

DEADLINE_S = 30.0


def until(condition) -> None:
    """Wait for another process to have done something."""
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.05)


def test_the_time_before_becomes_a_trace(tmp_path):
    with serve(FakeProfiler(continuous=True)) as server:
        recording = Continuous([(server.address, os.getpid())])
        recording.start()
        assert recording.on and recording.state().seconds >= 0 and recording.state().growth_bytes is not None
        (result,) = recording.snapshot(tmp_path, ["node"]).values()
        assert not recording.on and not server.recording_all_the_time
    assert server.continuous_calls == ["start", "snapshot", "stop"]
    assert result.path.read_bytes() == make_xspace() and result.delivered == "response"
    assert result.path.parent.parent == tmp_path / "plugins" / "profile"


def windows(data: bytes) -> int:
    """How many recordings are in it."""
    return data.count(b"Task Environment")


class TestParts:
    """What a server hands over is kept until newer parts cover the time that is wanted."""

    def record(self, server: FakeProfiler, tmp_path: Path, *parts_s: float, keep_s: float) -> Continuous:
        now = [0.0]
        recording = Continuous([(server.address, None)], clock=lambda: now[0])
        recording.start()
        for seconds in parts_s:
            now[0] += seconds
            assert recording.state() == RecordingState(seconds, None)
            recording.set_aside(tmp_path, keep_s)
        now[0] += 3.0
        return recording

    def test_the_part_before_is_in_the_trace(self, tmp_path):
        with serve(FakeProfiler(continuous=True, clock_ahead_s=0.0)) as server:
            recording = self.record(server, tmp_path, 10.0, keep_s=10.0)
            sent_s = recording.sent_s(server.address)
            (result,) = recording.snapshot(tmp_path / "logs", ["node"]).values()
        assert server.continuous_calls == ["start", "snapshot", "snapshot", "stop"]
        assert result.asked_s == 13.0 and windows(result.path.read_bytes()) == 2
        begin, _ = recorded_window_ns(result.path.read_bytes())
        assert begin / 1e9 == pytest.approx(sent_s, abs=1.0), "the window is that of both"
        assert list(tmp_path.glob("*.*")) == [] and [p.name for p in tmp_path.iterdir()] == ["logs"]

    def test_no_more_parts_are_kept_than_are_wanted(self, tmp_path):
        with serve(FakeProfiler(continuous=True, clock_ahead_s=0.0)) as server:
            recording = self.record(server, tmp_path, 4.0, 4.0, 4.0, 4.0, 4.0, keep_s=10.0)
            assert recording.kept_s(server.address) == 12.0
            (result,) = recording.snapshot(tmp_path, ["node"]).values()
        assert result.asked_s == 15.0 and windows(result.path.read_bytes()) == 4

    def test_a_part_without_its_window_is_not_joined(self, tmp_path):
        with serve(FakeProfiler(continuous=True)) as server:
            recording = self.record(server, tmp_path, 10.0, keep_s=10.0)
            (result,) = recording.snapshot(tmp_path, ["node"]).values()
        assert result.asked_s == 3.0 and result.path.read_bytes() == make_xspace()

    def test_a_part_that_cannot_be_kept_is_missing_and_no_more(self, tmp_path):
        with serve(FakeProfiler(continuous=True, clock_ahead_s=0.0)) as server:
            recording = self.record(server, tmp_path / "gone", 10.0, keep_s=10.0)
            (result,) = recording.snapshot(tmp_path, ["node"]).values()
        assert result.asked_s == 3.0 and windows(result.path.read_bytes()) == 1

    def test_parts_have_a_limit_in_bytes(self, tmp_path, monkeypatch):
        monkeypatch.setattr(continuous, "MAX_KEPT_BYTES", len(make_xspace(window_ns=(1, 2))) + 40)
        with serve(FakeProfiler(continuous=True, clock_ahead_s=0.0)) as server:
            recording = self.record(server, tmp_path, 10.0, 10.0, keep_s=20.0)
            assert recording.kept_s(server.address) == 10.0
            recording.close()

    def test_a_server_that_hands_nothing_over_is_given_up(self, tmp_path):
        with serve(FakeProfiler(continuous=True)) as server:
            recording = self.record(server, tmp_path, keep_s=10.0)
            server.recording_all_the_time = False
            with pytest.raises(GputopError, match="NOT_FOUND"):
                recording.set_aside(tmp_path, 10.0)
            assert not recording.on


@pytest.mark.parametrize(("recorded", "any_low", "full"), [
    (RecordingState(9.9, None), False, False), (RecordingState(10.0, 0), False, True),
    (RecordingState(1.0, MAX_GROWTH_BYTES), False, False), (RecordingState(1.0, MAX_GROWTH_BYTES * 2), False, True),
    (RecordingState(10.0, 0), True, False), (RecordingState(20.0, 0), True, True)])
def test_how_much_is_recorded_at_a_time(recorded, any_low, full):
    assert is_full(recorded, 10.0, any_low) == full


def test_a_server_without_it_is_distinguished_from_a_busy_one(tmp_path):
    with serve(FakeProfiler()) as server, pytest.raises(Unsupported):
        Continuous([(server.address, None)]).start()
    with serve(FakeProfiler(continuous=True, recording_all_the_time=True)) as server:
        with pytest.raises(GputopError, match="is busy"):
            Continuous([(server.address, None)]).start()
        assert server.recording_all_the_time, "another's is left alone"
    with serve(FakeProfiler(continuous=True, refuse=(grpc.StatusCode.INTERNAL, "no"))) as server, \
            pytest.raises(GputopError, match="answered INTERNAL"):
        Continuous([(server.address, None)]).start()


def test_an_empty_snapshot_ends_the_recording_and_leaves_nothing(tmp_path):
    with serve(FakeProfiler(continuous=True, xspace=b"", empty_trace=True)) as server:
        recording = Continuous([(server.address, None)])
        recording.start()
        (error,) = recording.snapshot(tmp_path / "logs", ["node"]).values()
        assert "holds no events" in error.message
        assert not server.recording_all_the_time
    assert not (tmp_path / "logs").exists()


class TestSeveralServers:
    def test_are_recorded_at_once_and_handed_over_at_once(self, tmp_path):
        with serve(FakeProfiler(continuous=True)) as a, serve(FakeProfiler(continuous=True)) as b:
            recording = Continuous([(a.address, None), (b.address, os.getpid())])
            recording.start()
            assert a.recording_all_the_time and b.recording_all_the_time
            assert recording.state().growth_bytes is not None, "of the one that can be looked at"
            recording.set_aside(tmp_path, 1.0)
            recording.close()
            assert not a.recording_all_the_time and not b.recording_all_the_time
        assert a.continuous_calls == b.continuous_calls == ["start", "snapshot", "stop"]

    def test_one_that_cannot_does_not_spoil_the_rest(self, tmp_path):
        with serve(FakeProfiler()) as without, serve(FakeProfiler(continuous=True)) as able:
            recording = Continuous([(without.address, None), (able.address, None)])
            recording.start()
            assert recording.addresses == [able.address] and isinstance(recording.failed[without.address], Unsupported)
            recording.set_aside(tmp_path, 1.0)
            results = recording.snapshot(tmp_path, ["able"])
        assert list(results) == [able.address] and results[able.address].path.name == "able.xplane.pb"

    def test_where_none_can_the_likeliest_to_pass_is_reported(self):
        busy = FakeProfiler(continuous=True, recording_all_the_time=True)
        with serve(FakeProfiler()) as without, serve(busy), pytest.raises(GputopError, match="is busy"):
            Continuous([(without.address, None), (busy.address, None)]).start()

    def test_what_another_records_is_left_alone_by_the_guard(self):
        others, own = FakeProfiler(continuous=True, recording_all_the_time=True), FakeProfiler(continuous=True)
        with serve(others), serve(own):
            recording = Continuous([(others.address, None), (own.address, None)])
            recording.start()
            guard = recording._watchdog.process
            recording.abandon()
            assert guard.wait(DEADLINE_S) == 0
            assert others.recording_all_the_time and not own.recording_all_the_time
        assert others.continuous_calls == ["start"] and own.continuous_calls == ["start", "stop", "stop"]

    def test_one_that_does_not_end_on_request_is_ended_by_the_watchdog(self, tmp_path):
        deaf, good = FakeProfiler(continuous=True, deaf_to_stops=2), FakeProfiler(continuous=True)
        with serve(deaf), serve(good):
            recording = Continuous([(deaf.address, None), (good.address, None)])
            recording.start()
            guard = recording._watchdog.process
            deaf.refuse_snapshot = True
            recording.set_aside(tmp_path, 1.0)
            assert recording.addresses == [good.address] and good.recording_all_the_time
            recording.close()
            until(lambda: not deaf.recording_all_the_time)
            assert guard.wait(DEADLINE_S) == 0 and not good.recording_all_the_time


_OWNER = """\
import sys, time
from gputop.profiler.xprof.continuous import Continuous
recording = Continuous([(address, None) for address in sys.argv[1:]])
recording.start()
print(recording._watchdog.process.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP])
def test_the_watchdog_ends_it_when_gputop_is_killed(number):
    with serve(FakeProfiler(continuous=True)) as server, serve(FakeProfiler(continuous=True)) as other:
        command = [sys.executable, "-c", _OWNER, server.address, other.address]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[3]) as owner:
            try:
                guard = int(owner.stdout.readline())
                assert server.recording_all_the_time and other.recording_all_the_time
                owner.send_signal(number)
                until(lambda: not server.recording_all_the_time and not other.recording_all_the_time)
                until(lambda: server.continuous_calls.count("stop") == other.continuous_calls.count("stop") == 2)
                until(lambda: not _runs(guard))
            finally:
                owner.kill()


def _runs(pid: int) -> bool:
    """Whether it does; one that has ended and that nobody has asked about does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_the_watchdog_ends_it_when_gputop_hangs(monkeypatch):
    monkeypatch.setattr(continuous, "WATCHDOG_TIMEOUT_S", 0.2)
    with serve(FakeProfiler(continuous=True)) as server:
        recording = Continuous([(server.address, None)])
        recording.start()
        until(lambda: not server.recording_all_the_time)
        until(lambda: recording._watchdog.process.poll() is not None)
        with pytest.raises(GputopError, match="watchdog"):
            recording.state()
        assert not recording.on


def test_left_at_once_it_is_ended_by_the_guard():
    with serve(FakeProfiler(continuous=True)) as server:
        recording = Continuous([(server.address, None)])
        recording.start()
        recording.abandon()
        assert not recording.on
        until(lambda: not server.recording_all_the_time)


def test_without_a_guard_nothing_is_begun(monkeypatch):
    monkeypatch.setattr(continuous, "child_command", lambda *_: ["false"])
    with serve(FakeProfiler(continuous=True)) as server:
        with pytest.raises(GputopError, match="watchdog of continuous profiling did not start"):
            Continuous([(server.address, None)]).start()
        assert server.continuous_calls == []

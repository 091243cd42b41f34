"""The auto-capture over a session that is fed by the test, and a server of our own making."""

from __future__ import annotations

import contextlib
import json
import threading
from pathlib import Path

import pytest
from msgspec import structs

from gputop.analysis.results import Analysis, TraceSummary
from gputop.core.errors import GputopError
from gputop.core.samples import GpuInfo, GpuSample, HostSample, NodeSample, Reading
from gputop.profiler.capture.records import CaptureRecord, CaptureStatus, Server
from gputop.session import auto_capture
from gputop.session.auto_capture import (
    FOLDER,
    MARK,
    SETTLE_S,
    AutoCapture,
    held_before,
    mark_removable,
    parse_rule,
    remove_oldest,
)
from gputop.session.capture.capture_control import CaptureControl
from gputop.session.options import AutoCaptureOptions
from gputop.session.session import Options, Session
from tests.fakes import START_S, StillSource
from tests.profiler.fake_server import FakeProfiler, serve
from tests.records import replace
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.usefixtures("analysis_in_this_process")
RULE = parse_rule("sm<0.6*median for 5s")


class Fed(Session):
    """Its samples are the test's, its servers too; captures are real."""

    def __init__(self, dips: AutoCaptureOptions, logdir: Path, servers: tuple[Server, ...] = ()) -> None:
        self.now_s = START_S
        options = Options(logdir=logdir, auto_capture=dips, capture_s=0.2)
        super().__init__(StillSource(), options, clock=lambda: self.now_s)
        self.watch.servers, self.watch.servers_known = servers, True
        self.results.run_live_rules = lambda *_: None  # dips need none, and they took most of the time
        self.ended = threading.Event()
        self.listen(lambda change: change == "capture" and not self.control.status.running and self.ended.set())

    def go(self, seconds: int, *levels: float) -> None:
        for _ in range(seconds):
            self.now_s += 1
            gpus = tuple(GpuSample(GpuInfo(i, f"GPU-{i}", "H100"), {"sm_active": Reading(v, "ratio")})
                         for i, v in enumerate(levels))
            self.feed.on_sample(NodeSample(self.now_s, gpus, HostSample("node", {}), interval_s=1.0))

    def wait(self) -> None:
        assert self.ended.wait(PATIENCE_S)
        self.ended.clear()


@pytest.fixture
def captured(monkeypatch):
    """What the session was asked to capture, and why; nothing is."""
    asked: list[str] = []
    monkeypatch.setattr(CaptureControl, "start_capture", lambda self, request: asked.append(request.reason))
    return asked


def test_a_dip_is_captured_and_reported(tmp_path, captured):
    session = Fed(AutoCaptureOptions(RULE), tmp_path)
    session.go(120, 0.9, 0.9)
    assert session.control.auto_capture.state() == "auto-capture 0/20: sm<0.6*median for 5s"
    session.go(10, 0.9, 0.3)
    (reason,) = captured
    assert reason.startswith("GPU 1: SM active 30% for 5 s, usually 90% (since ")
    assert "1/20" in session.control.auto_capture.state() and "GPU 1" in session.control.auto_capture.note


def test_seldom_and_not_for_ever(tmp_path, captured):
    session = Fed(AutoCaptureOptions(RULE, min_interval_s=600, max_captures=2), tmp_path)
    for _ in range(4):  # a dip every 100 s
        session.go(60, 0.9)
        session.go(40, 0.2)
    assert len(captured) == 1 and "the last capture was" in session.control.auto_capture.note
    session.go(600, 0.9)
    session.go(10, 0.2)
    assert len(captured) == 2 and session.control.auto_capture.done
    session.go(700, 0.9)
    session.go(10, 0.2)
    assert len(captured) == 2 and "maximum number of captures" in session.control.auto_capture.note


def test_never_beside_another_capture_nor_for_what_that_cost(tmp_path, captured):
    session = Fed(AutoCaptureOptions(RULE), tmp_path)
    session.go(120, 0.9)
    session.control.status = CaptureStatus("recording", "a:1", 10.0)
    session.go(10, 0.2)
    session.control.status = replace(session.control.status, phase="done")
    session.go(int(SETTLE_S) - 2, 0.2)
    assert captured == []
    session.go(60, 0.9)
    session.go(10, 0.2)
    assert len(captured) == 1


def test_a_dip_just_after_a_capture_is_counted(tmp_path, captured):
    """It is not captured, as the capture itself may have caused it; but it is told."""
    session = Fed(AutoCaptureOptions(RULE), tmp_path)
    session.go(120, 0.9, 0.9)
    session.control.status = CaptureStatus("recording", "a:1", 10.0)
    session.go(1, 0.9, 0.9)
    session.control.status = replace(session.control.status, phase="done")
    session.go(8, 0.9, 0.2)
    assert captured == [] and session.control.auto_capture.missed == 1
    note = session.control.auto_capture.note
    assert "GPU 1" in note and "not captured, because a capture was running" in note
    assert session.control.auto_capture.state().startswith("auto-capture 0/20, 1 during captures: ")


def test_without_a_server_the_dip_is_reported(tmp_path):
    session = Fed(AutoCaptureOptions(RULE), tmp_path)
    session.go(120, 0.9)
    session.go(10, 0.2)
    auto_capture = session.control.auto_capture
    assert auto_capture.count == 0 and "not captured: no profiler server found" in auto_capture.note


def test_a_recording_has_none():
    from gputop.replay.player import Player

    class Replay(Session):
        def start(self) -> None: ...

    player = Player.__new__(Player)
    player.connect = lambda *_: None
    player.now_s = lambda: 0.0
    assert Replay(player, Options(auto_capture=AutoCaptureOptions(RULE))).control.auto_capture is None


def test_the_trace_goes_into_a_folder_of_its_own_with_the_reason(tmp_path):
    with serve(FakeProfiler()) as server:
        session = Fed(AutoCaptureOptions(RULE), tmp_path, (Server(server.address),))
        session.go(120, 0.9)
        session.go(8, 0.2)
        session.wait()
    record = session.results.last_capture
    assert record.path.is_relative_to(tmp_path / FOLDER / "plugins" / "profile")
    assert record.notices[0].startswith("automatic capture: GPU 0: SM active 20%")
    assert record.notices[0] in record.remarks
    assert json.loads((record.path.parent / MARK).read_text())["reason"].startswith("GPU 0")
    session.start_capture()
    with pytest.raises(GputopError, match="a capture is already running"):
        session.start_capture(structs.replace(session.control.request(), reason="x"))
    session.wait()


def test_of_many_workers_few_are_captured(tmp_path, monkeypatch):
    monkeypatch.setattr("gputop.profiler.capture.safe_capture.PROBE_S", 0.05)
    profilers = [FakeProfiler() for _ in range(9)]
    with contextlib.ExitStack() as stack:
        for profiler in profilers:
            stack.enter_context(serve(profiler))
        session = Fed(AutoCaptureOptions(RULE), tmp_path, tuple(Server(p.address, asked=True) for p in profilers))
        session.go(120, 0.9)
        session.go(8, 0.2)
        session.wait()
    few = [profilers[0], profilers[4], profilers[8]]
    assert not any(profiler.requests for profiler in profilers if profiler not in few)
    record = session.results.last_capture
    assert [w.address for w in record.workers] == [profiler.address for profiler in few]
    assert (record.path / MARK).is_file() and any("3 of 9 workers" in remark for remark in record.remarks)


def test_when_a_trace_begins_is_told_from_its_events_if_they_tell_it():
    record = CaptureRecord("a:1", Path("x"), 0.0, 10.0, 1.0)
    told = replace(record, analysis=Analysis(trace=TraceSummary(start_s=1001.2)))
    assert held_before(told, 1000.0) == ("the trace contains nothing before the dip: it starts 1.2 s after the dip",)
    assert held_before(told, 1001.3) == held_before(record, 1000.0) == ()
    assert held_before(replace(record, analysis=Analysis(trace=TraceSummary())), 1000.0) == ()


def run_folder(logdir: Path, name: str, size: int = 10, at_s: float | None = None) -> Path:
    run = logdir / "plugins" / "profile" / name
    run.mkdir(parents=True)
    (run / "host.xplane.pb").write_bytes(bytes(size))
    if at_s is not None:
        mark_removable(run, "dip", at_s)
    return run


class TestTheFolder:
    def test_the_oldest_go_first(self, tmp_path):
        runs = [run_folder(tmp_path, f"r{i}", at_s=1000.0 + i) for i in range(5)]
        assert remove_oldest(tmp_path, max_runs=2) == [runs[2], runs[1], runs[0]]
        assert [run.exists() for run in runs] == [False, False, False, True, True]

    def test_by_size_too_but_the_newest_stays(self, tmp_path):
        runs = [run_folder(tmp_path, f"r{i}", 100, 1000.0 + i) for i in range(3)]
        assert remove_oldest(tmp_path, max_bytes=50) == [runs[1], runs[0]] and runs[2].exists()

    def test_nothing_of_anybody_else_s(self, tmp_path):
        """Runs without the mark, with another's mark, and what else lies in a folder."""
        other = run_folder(tmp_path, "a")
        foreign = run_folder(tmp_path, "b")
        (foreign / MARK).write_text('{"schema": "else/1", "time_s": 1}')
        damaged = run_folder(tmp_path, "c")
        (damaged / MARK).write_text("{")
        for number, text in enumerate(("1" + "0" * 400, "[" * 100_000, "1e999", "{}")):
            (run_folder(tmp_path, f"c{number}") / MARK).write_text(json.dumps(
                {"schema": auto_capture._SCHEMA, "time_s": 0}).replace("0}", text + "}"))
        mine = run_folder(tmp_path, "d", at_s=1.0)
        (mine / "notes.txt").write_text("mine")
        linked = tmp_path / "plugins" / "profile" / "e"
        linked.symlink_to(run_folder(tmp_path / "far", "x", at_s=0.5))
        newest = run_folder(tmp_path, "f", at_s=2.0)
        assert remove_oldest(tmp_path, max_runs=1) == [mine]
        assert (mine / "notes.txt").exists() and not (mine / "host.xplane.pb").exists()
        for run in (other, foreign, damaged, newest, linked):
            assert (run / "host.xplane.pb").exists()

    def test_no_folder(self, tmp_path):
        assert remove_oldest(tmp_path / "nothing") == []


def test_samples_that_wait_for_the_backfill_are_not_checked(tmp_path, captured):
    session = Fed(AutoCaptureOptions(RULE), tmp_path)
    session.feed._backfill_expected = True
    session.go(10, 0.2)
    assert isinstance(session.control.auto_capture, AutoCapture) and session.feed.history is None and captured == []

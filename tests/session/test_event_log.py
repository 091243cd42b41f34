from __future__ import annotations

from pathlib import Path

import pytest

from gputop.core.findings import Finding, Gain
from gputop.core.samples import FAILED, LOST, GpuSample, NodeSample, Reading, XidEvent
from gputop.profiler.capture.records import CaptureRecord, CaptureStatus
from gputop.session.event_log import MAX_ENDED_EVENTS, REAPPEARANCE_S, EventLog
from tests.fakes import START_S, StillSession, node_sample
from tests.records import replace

FOUND = Finding(id="power_capped", severity="medium", title="GPU 0 is held at its power limit", why="why",
                evidence={}, action="do", source="test",
                gain=Gain(None, "how"), gpus=(0,), snippet=None)


def _with(sample: NodeSample, gpu: int, **change: object) -> NodeSample:
    gpus = [replace(g, **change) if g.info.index == gpu else g for g in sample.gpus]  # type: ignore[arg-type]
    return replace(sample, gpus=tuple(gpus))


def _all(log: EventLog) -> list[tuple[str, str, float, float, str]]:
    return sorted((m.kind, m.gpu, m.begin_s - START_S, m.end_s - START_S, m.text)
                  for m in log.between(0, START_S + 1e6))


def test_throttling_is_an_episode_that_short_breaks_do_not_end() -> None:
    log = EventLog()
    for tick in range(60):
        reasons = ("idle", "hw thermal") if tick in (10, 11, 14, 40) else ("idle",)
        log.note_sample(_with(node_sample(tick, 2), 1, clock_event_reasons=reasons))
    assert _all(log) == [("thermal", "1", 10, 14, "hw thermal"), ("thermal", "1", 40, 40, "hw thermal")]
    assert [m.begin_s - START_S for m in log.between(START_S + 12, START_S + 13)] == [10], "it went on meanwhile"
    assert log.between(START_S + 15, START_S + 40) == []


def test_a_hardware_slowdown_is_heat_only_where_it_is_hot() -> None:
    log = EventLog()
    for tick, (celsius, reasons) in enumerate(((60.0, ("hw slowdown",)), (90.0, ("hw slowdown", "hw thermal")))):
        sample = node_sample(10.0 * tick, 1)
        readings = {**sample.gpus[0].readings, "temperature_c": Reading(celsius, "°C"),
                    "temperature_slowdown_c": Reading(87.0, "°C")}
        log.note_sample(_with(sample, 0, clock_event_reasons=reasons, readings=readings))
    assert [(kind, text) for kind, _, _, _, text in _all(log)] == [
        ("power", "hw slowdown"), ("thermal", "hw slowdown"), ("thermal", "hw thermal")]


def test_faults_are_logged_once_and_counters_only_where_they_grow() -> None:
    log = EventLog()
    for tick in range(5):
        sample = node_sample(tick, 2)
        counts = {**sample.gpus[0].readings, "ecc_uncorrected": Reading(7.0 + 2 * (tick >= 3), "count")}
        xids = (XidEvent(START_S + 1.5, 79),) if tick >= 2 else ()
        sample = _with(sample, 0, readings=counts, xids=xids)
        # The instance of a GPU tells its events again.
        instance = replace(sample.gpus[0], info=replace(sample.gpus[0].info, uuid="MIG-1", mig=1), readings={})
        log.note_sample(replace(sample, gpus=(*sample.gpus, instance)))
    assert _all(log) == [("ecc", "0", 3, 3, "2 × memory error that ECC could not correct"),
                         ("xid", "0", 1.5, 1.5, "Xid 79")]


@pytest.mark.parametrize(("away", "marks"), [(LOST, [("lost", "0", 5, 11, "lost")]), (FAILED, [])])
def test_a_lost_gpu_is_marked_for_as_long_as_it_is_away(away: str, marks: list[tuple[object, ...]]) -> None:
    """``--source dcgm``: without the host engine nothing is known of the GPUs; they are not lost."""
    log = EventLog()
    for tick in range(20):
        log.note_sample(_with(node_sample(tick, 1), 0, state=away if 5 <= tick < 12 else "ok"))
    assert _all(log) == marks


def test_a_finding_is_marked_when_it_appears_and_when_it_was_long_away() -> None:
    log = EventLog()
    for time_s, there in ((10, True), (11, True), (20, False), (30, True), (31 + REAPPEARANCE_S, True)):
        log.note_findings((FOUND,) if there else (), START_S + time_s)
    assert [m[2] for m in _all(log)] == [10, 31 + REAPPEARANCE_S]


def test_a_capture_lasts_from_its_first_recorded_moment_to_its_last() -> None:
    log = EventLog()
    status = CaptureStatus("connecting", "host:6009", 10.0, time_s=START_S)
    log.note_capture(status)
    assert _all(log) == []
    for elapsed in (0.5, 4.0, 9.9):
        log.note_capture(replace(status, phase="recording", elapsed_s=elapsed, time_s=START_S + 3 + elapsed))
        assert _all(log) == [("capture", "", 3.0, pytest.approx(3 + elapsed), "capture of host:6009")]
    for phase in ("receiving", "analyzing", "done"):
        log.note_capture(replace(status, phase=phase, time_s=START_S + 30))  # type: ignore[arg-type]
    assert [m[3] for m in _all(log)] == [pytest.approx(12.9)]
    log.note_record(CaptureRecord("other:1", Path("t"), START_S + 100, 10.0, 12.0))
    assert _all(log)[1][2:] == (88, 100, "capture of other:1")


def test_going_back_in_a_recording_forgets_what_came_after() -> None:
    log = EventLog()
    for tick in range(40):
        log.note_sample(_with(node_sample(tick, 1), 0, clock_event_reasons=("power cap",) if tick > 20 else (),
                              xids=(XidEvent(START_S + 30, 13),) if tick > 30 else ()))
    log.note_findings((FOUND,), START_S + 35)
    assert {m[0] for m in _all(log)} == {"power", "xid", "finding"}
    log.note_sample(node_sample(25, 1))
    assert _all(log) == [("power", "0", 21, 25, "power cap")]
    log.note_sample(_with(node_sample(31, 1), 0, xids=(XidEvent(START_S + 30, 13),)))
    assert [m[0] for m in _all(log)] == ["power", "xid"], "played again, it happens again"


def test_memory_is_bounded() -> None:
    log = EventLog()
    sample = node_sample(0, 1)
    for i in range(MAX_ENDED_EVENTS + 500):
        log.note_sample(_with(replace(sample, time_s=START_S + 10 * i), 0, clock_event_reasons=("thermal",)))
    assert len(log.between(0, START_S + 1e9)) <= MAX_ENDED_EVENTS + 1


def test_a_session_keeps_marks_and_step_period() -> None:
    def throttle(gpu: GpuSample, tick: int) -> GpuSample:
        return replace(gpu, clock_event_reasons=("thermal",)) if tick == 100 and gpu.info.index == 2 else gpu

    session = StillSession(change=throttle)
    assert [(m.kind, m.gpu) for m in session.results.events.between(START_S + 99, START_S + 101)] == [("thermal", "2")]
    assert session.feed.step_period is not None and session.feed.step_period.period_s == pytest.approx(20.0, rel=0.02)
    session.control.set_status(CaptureStatus("recording", "h:1", 10.0, 1.0))
    now_s, events = session.feed.clock(), session.results.events
    assert [m.kind for m in events.between(now_s, now_s + 1)].count("capture") == 1
    for phase in ("receiving", "overview", "analyzing"):  # two recordings
        session.control.set_status(CaptureStatus(phase, "h:1", 10.0, 1.0))
    assert [m.kind for m in events.between(now_s, now_s + 1)].count("capture") == 2


def test_a_new_xid_at_each_tick_fills_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gputop.session.event_log.MAX_KNOWN_XIDS", 50)
    log = EventLog()
    for tick in range(200):
        log.note_sample(_with(node_sample(tick, 1), 0, xids=(XidEvent(START_S + tick, 48),)))
    assert len(log._xids) == 50


def test_an_engine_that_fails_does_not_mark_its_gpus_as_lost() -> None:
    """``--source dcgm``: without the host engine nothing is known of the GPUs; they are not lost."""
    log = EventLog()
    for tick in range(6):
        log.note_sample(_with(node_sample(tick, 1), 0, state=FAILED if tick > 2 else "ok"))
    assert not [mark for mark in log.between(-1e12, 1e12) if mark.kind == "lost"]

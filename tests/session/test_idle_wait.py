"""A capture that waits for GPUs to be idle again: when it begins, and how it is hurried, canceled and given up."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from msgspec import structs

from gputop.advice.live.advise import live_advice
from gputop.core.errors import GputopError
from gputop.core.findings import Finding
from gputop.profiler.capture.records import CaptureRecord, CaptureStatus, Server
from gputop.profiler.capture.request import CaptureRequest, answered
from gputop.session.capture import capture_control
from gputop.session.watched_node import LEAD_S, ExpectedIdle, IdleWait, WatchedNode, expected_idle
from gputop.sources.simulated import SimulatedSource
from gputop.telemetry.history import History
from tests.fakes import StillSession
from tests.records import replace
from tests.session.recurring_finding import returning
from tests.session.watched import Watched

NEXT = ExpectedIdle(frozenset(range(8)), 1040.0, 62.0, 1.0, 4.0)


# -- the decision -----------------------------------------------------------------------------------------

def test_what_is_expected_follows_from_the_finding() -> None:
    assert expected_idle([returning()], 1000.0) == NEXT
    assert expected_idle([returning(None)], 1000.0) is None, "irregular"
    assert expected_idle([], 1000.0) is None


def test_a_capture_keeps_what_returned_before_it_and_since_when_the_job_was_watched() -> None:
    """A simulated job whose GPUs wait for a checkpoint every 41 s, and the same job fixed, a minute after its start."""
    now_s, history, found = 1_800_000_000.0, History(), []
    source = SimulatedSource("slow-checkpoint", clock=lambda: now_s)
    source.open()
    for length_s in (300, 70):
        samples = list(source.backfill(now_s + 300, 1.0))[-length_s:]
        for number, sample in enumerate(samples):
            sample = replace(sample, time_s=now_s + number)
            history.append(sample)
        advice = live_advice(history, sample)
        node = WatchedNode(sample, history, 1.0, advice.findings, sample.time_s)
        found.append(node.live_steps([Server("127.0.0.1:1")]))
        now_s = sample.time_s + 1
        source.next_job()
    before, after = found
    assert before is not None and before.idle_period_s == pytest.approx(41, abs=2)
    assert before.idle_s == pytest.approx(5.2, abs=0.4)
    assert after is not None and (after.idle_s, after.idle_period_s) == (0.0, None)
    assert after.seen_s == pytest.approx(69, abs=2) and before.seen_s > 290


def test_it_begins_so_long_before_that_the_recording_runs_by_then() -> None:
    wait = IdleWait(NEXT, 10.0, 1000.0)
    assert wait.start_s == 1040 - LEAD_S - 1 and wait.text(1000.0) == "the idle time in about 40 s"
    assert not wait.over(wait.start_s - 0.1, NEXT) and wait.over(wait.start_s, None) and not wait.missed
    assert wait.text(1035.0) == "the idle time in about 5 s"
    assert IdleWait(replace(NEXT, spread_s=6.0), 2.0, 1000.0).start_s == pytest.approx(1040 - LEAD_S - 0.6)


def test_one_that_comes_too_soon_is_left_to_go_by() -> None:
    wait = IdleWait(replace(NEXT, begin_s=1002.0), 10.0, 1000.0)
    assert wait.begin_s == 1064.0
    assert not wait.over(1001.0, replace(NEXT, begin_s=1002.5)), "it is still expected"
    assert wait.begin_s == 1064.5
    assert not wait.over(1010.0, replace(NEXT, begin_s=1064.2)) and wait.over(1060.5, None)


def test_what_becomes_known_moves_it() -> None:
    wait = IdleWait(NEXT, 10.0, 1000.0)
    assert not wait.over(1010.0, replace(NEXT, begin_s=1050.0)) and wait.begin_s == 1050.0
    assert wait.over(1036.0, replace(NEXT, begin_s=1038.0)), "earlier than thought: at once"
    late = IdleWait(NEXT, 10.0, 1000.0)
    for now_s in range(1001, 1093):
        assert not late.over(float(now_s), replace(NEXT, begin_s=now_s + 62.0))
    assert late.over(1093.0, replace(NEXT, begin_s=1155.0)), "one period and a half have gone by"
    assert "none occurred" in late.missed


# -- the session ------------------------------------------------------------------------------------------

class WaitingSession:
    """A session with a server, and GPUs that are idle in 40 s; what would be captured is noted."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *findings: Finding, risk: str = "") -> None:
        self.session = session = StillSession()
        session.watch.servers_known = True
        session.watch.servers = (Server("127.0.0.1:6009", asked=True),)
        session.results.live = replace(session.results.live, findings=findings or (returning(),))
        session.results.rules_ran_s = session.feed.clock()
        self.watched, self.taken, self.risk = Watched(session), list[bool](), risk
        monkeypatch.setattr(capture_control.captures, "capture_and_analyze", self.capture)
        monkeypatch.setattr("gputop.profiler.discovery.crash_risk", lambda _: self.risk or None)
        session.control.update_node(session.watched_node)

    def capture(self, servers: Sequence[Server], request: CaptureRequest, *_: object) -> CaptureRecord:
        self.taken.append(request.force)
        raise GputopError("captured", "")

    @property
    def status(self) -> CaptureStatus | None:
        return self.session.control.status

    def until_captured(self) -> None:
        self.watched.until(lambda: self.status is not None and self.status.message == "captured")


def test_a_capture_waits_until_it_is_time(monkeypatch: pytest.MonkeyPatch) -> None:
    waiting = WaitingSession(monkeypatch)
    waiting.session.start_capture()
    assert waiting.status is not None and (waiting.status.phase, waiting.status.message) == (
        "waiting", "the idle time in about 40 s")
    assert waiting.status.running and not waiting.status.begun
    with pytest.raises(GputopError, match="a capture is already running"):
        waiting.session.start_capture()
    waiting.session.tick += 36  # seconds of the session's clock
    waiting.until_captured()
    assert waiting.taken == [False] and not waiting.session.control.capture_now()


def test_a_risk_is_asked_about_before_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    waiting = WaitingSession(monkeypatch, risk="it was seen to")
    waiting.session.start_capture()
    waiting.watched.until(lambda: waiting.status is None)
    question = waiting.session.control.take_question()
    assert question is not None and question.details == "it was seen to" and not waiting.taken
    waiting.session.start_capture(answered(question, "y"))
    assert waiting.status is not None and waiting.status.phase == "waiting"
    waiting.session.close()


def test_a_job_that_ends_ends_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    waiting = WaitingSession(monkeypatch)
    monkeypatch.setattr(capture_control, "_WAIT_POLL_S", 0.01)
    waiting.session.start_capture()
    waiting.session.watch.ended_server = waiting.session.watch.servers[0]
    waiting.until_captured()  # which says what is wrong


@pytest.mark.parametrize("case", ["forced", "automatic", "irregular", "another job", "another node"])
def test_these_do_not_wait(monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    waiting = WaitingSession(monkeypatch, returning(None if case == "irregular" else 40.0,
                                                    (7,) if case == "another job" else tuple(range(8))))
    session = waiting.session
    if case == "another job":
        first = session.feed.sample.processes[0]
        session.holding(replace(first, gpus={gpu: own for gpu, own in first.gpus.items() if gpu != 7}))
        session.watch.servers = (Server("127.0.0.1:6009", pid=first.local_pid or first.pid, asked=True),)
    elif case == "another node":
        session.watch.servers = (Server("n1:6009", asked=True),)
    session.control.update_node(session.watched_node)
    if case == "automatic":
        session.start_capture(structs.replace(session.control.request(), reason="GPU 0 dipped"))
    else:
        session.start_capture(session.control.request(force=case == "forced"))
    waiting.until_captured()
    assert len(waiting.taken) == 1


def test_dips_are_seen_while_a_capture_waits() -> None:
    status = CaptureStatus("waiting", "a", 10.0)
    assert not status.begun and replace(status, phase="recording").begun and not replace(status, phase="done").begun

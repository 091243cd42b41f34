"""Xid events through the real nvidia-ml-py, over the fake driver library."""

from __future__ import annotations

import itertools
import threading
from types import SimpleNamespace

import pynvml
import pytest

from gputop.core.samples import LOST, OK, XidEvent
from gputop.sources.nvml import xid_watch
from gputop.sources.nvml.xid_watch import MAX_EVENTS, XidWatch
from tests.nvml_fake import FakeNvml
from tests.sources.conftest import Clock
from tests.sources.nvml.nodes import Node
from tests.waiting import PATIENCE_S, until


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "gputop-nvml-xid"]


def test_an_xid_comes_with_its_gpu_and_its_time(fake: FakeNvml) -> None:
    node = Node(fake, "gpus 2")
    source, clock = node.source, node.clock
    assert fake.await_registered(0) and fake.await_registered(1)
    clock.advance(5)
    assert fake.xid(1, 79) == 1
    until(lambda: source.gpus[1].read(0.0).xids != ())
    sample = source.gpus[1].read(0.0)
    assert sample.xids == (XidEvent(clock.now_s, 79),)
    assert sample.xids_reason is None
    assert source.gpus[1].read(0.0).xids is sample.xids  # made anew only for a new event
    other = source.gpus[0].read(0.0)
    assert (other.xids, other.xids_reason, other.state) == ((), None, OK)
    fake.hang(1)
    assert source.gpus[1].xids() == (sample.xids, None)  # known while the GPU itself does not answer
    assert len(threads()) == 1


def test_a_gpu_that_hangs_when_it_is_to_be_watched_holds_up_no_other(
        fake: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(xid_watch, "WAIT_S", 0.02)
    source = Node(fake, "gpus 2", "fault nvmlDeviceRegisterEvents 0 1 1 hang 0", open_deadline_s=0.5).source
    assert fake.await_hanging(0) and source.gpus[0].info.uuid == "index:0"
    fake.xid(1, 31)
    until(lambda: [e.xid for e in source.gpus[1].read(0.0).xids] == [31])
    fake.release(0)
    assert source.gpus[0].read(0.0).xids_reason is None  # read() waits for it
    assert fake.xid(0, 79) == 1
    until(lambda: [e.xid for e in source.gpus[0].read(0.0).xids] == [79])


def test_a_gpu_that_is_lost_when_it_is_to_be_watched_is_lost(fake: FakeNvml) -> None:
    source = Node(fake, "gpus 2", "fault nvmlDeviceRegisterEvents 0 1 1 code 15").source
    assert [probe.read(0.0).state for probe in source.gpus] == [LOST, OK]
    assert fake.calls_after_lost(0) == 0


def test_a_flood_keeps_the_last_ones(fake: FakeNvml) -> None:
    source = Node(fake, "gpus 1").source
    assert fake.await_registered(0)
    for number in range(MAX_EVENTS + 5):
        fake.xid(0, 100 + number)
    until(lambda: [e.xid for e in source.gpus[0].read(0.0).xids] == list(range(105, 105 + MAX_EVENTS)))


def test_events_of_a_mig_instance(fake: FakeNvml) -> None:
    source = Node(fake, "gpus 1", "mig 0 0 9 1g.10gb 9728", "mig 0 1 2 1g.10gb 9728").source
    assert fake.await_registered(0)
    fake.xid(0, 13, gpu_instance=9)
    fake.xid(0, 79)
    until(lambda: len(source.gpus[0].read(0.0).xids) == 2)
    seen = [[event.xid for event in probe.read(0.0).xids] for probe in source.gpus]
    assert seen == [[13, 79], [13, 79], [79]]


@pytest.mark.parametrize(("function", "code", "word"), [
    ("nvmlDeviceRegisterEvents", 3, "not supported"),
    ("nvmlDeviceRegisterEvents", 4, "no permission"),
    ("nvmlDeviceGetSupportedEventTypes", 3, "not supported"),
])
def test_a_gpu_that_refuses_has_the_reason_and_the_others_are_watched(
        fake: FakeNvml, function: str, code: int, word: str) -> None:
    source = Node(fake, "gpus 2", f"refuse {function} {code} 0").source
    assert fake.await_registered(1)
    until(lambda: source.gpus[1].read(0.0).xids_reason is None)
    assert word in (source.gpus[0].read(0.0).xids_reason or "")


def test_a_driver_that_has_no_events_at_all(fake: FakeNvml) -> None:
    source = Node(fake, "gpus 1", "refuse nvmlEventSetCreate 3 0").source
    until(lambda: "nvmlEventSetCreate" in (source.gpus[0].read(0.0).xids_reason or ""))
    until(lambda: threads() == [])
    assert source.gpus[0].read(0.0).state == OK


def test_an_unknown_error_of_the_wait_backs_off_and_recovers(fake: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(xid_watch, "BACKOFF_S", 0.01)
    source = Node(fake, "gpus 1", "refuse nvmlEventSetWait_v2 999 0").source
    until(lambda: "unknown error" in (source.gpus[0].read(0.0).xids_reason or ""))
    until(lambda: fake.calls("nvmlEventSetWait_v2") >= 3)
    fake.allow_everything()
    fake.xid(0, 31)
    until(lambda: [e.xid for e in source.gpus[0].read(0.0).xids] == [31])
    assert source.gpus[0].read(0.0).xids_reason is None


@pytest.mark.parametrize("rule", ["refuse nvmlEventSetWait_v2 10 0", "xid storm"])
def test_a_wait_that_returns_at_once_does_not_make_the_thread_spin(
        fake: FakeNvml, monkeypatch: pytest.MonkeyPatch, rule: str) -> None:
    """By its own clock the thread waits once a second where it times out at once, or MAX_RETURNS times for events."""
    paused: list[float] = []
    enough = threading.Event()

    def pause(self: XidWatch, seconds: float) -> None:
        paused.append(seconds)
        if sum(paused) > 20.0:
            enough.set()
            self._stopped = True

    now_s = itertools.count()
    monkeypatch.setattr(XidWatch, "_pause", pause)
    monkeypatch.setattr(xid_watch, "time", SimpleNamespace(monotonic=lambda: sum(paused) + next(now_s) * 1e-6))
    if rule == "xid storm":
        monkeypatch.setattr(xid_watch.XidWatch, "_wait_call", lambda self: lambda *arguments: pynvml.NVML_SUCCESS)
        Node(fake, "gpus 1")
        expected = xid_watch.MAX_RETURNS
    else:
        Node(fake, "gpus 1", rule)
        expected = 1
    assert enough.wait(PATIENCE_S)
    assert len(paused) / sum(paused) == pytest.approx(expected, rel=0.06) and min(paused) > 0.99 / expected


def test_a_lost_gpu_leaves_the_others_watched(fake: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(xid_watch, "BACKOFF_S", 0.05)
    source = Node(fake, "gpus 2").source
    assert fake.await_registered(0) and fake.await_registered(1)
    fake.lose(0)
    source.gpus[0].read(0.0)  # its own thread finds it out
    fake.change("fault nvmlEventSetWait_v2 0 2 1000000 code 15")  # at the next wait, once
    fake.xid(1, 31)
    until(lambda: fake.calls("nvmlDeviceRegisterEvents", 1) == 2)
    until(lambda: fake.xid(1, 45) == 1)
    until(lambda: 45 in [e.xid for e in source.gpus[1].read(0.0).xids])
    assert source.gpus[1].read(0.0).xids_reason is None
    assert fake.calls("nvmlDeviceRegisterEvents", 0) == 1, "the handle of the lost GPU was used again"


def test_a_loss_that_no_gpu_admits_ends_the_watch_instead_of_spinning(
        fake: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(xid_watch, "BACKOFF_S", 0.01)
    source = Node(fake, "gpus 1", "refuse nvmlEventSetWait_v2 15 0").source
    until(lambda: threads() == [])
    assert fake.calls("nvmlEventSetWait_v2") == 1
    assert "restart gputop" in (source.gpus[0].read(0.0).xids_reason or "")


def leave_out(monkeypatch: pytest.MonkeyPatch, *functions: str) -> None:
    """Have an older driver, without these functions."""
    newest = pynvml._nvmlGetFunctionPointer

    def older(name: str) -> object:
        if name in functions:
            raise pynvml.NVMLError(13)
        return newest(name)

    monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer", older)


def test_drivers_from_before_mig_have_an_older_wait(fake: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    leave_out(monkeypatch, "nvmlEventSetWait_v2")
    source = Node(fake, "gpus 1").source
    assert fake.await_registered(0)
    fake.xid(0, 48)
    until(lambda: [e.xid for e in source.gpus[0].read(0.0).xids] == [48])


def test_a_driver_without_a_wait_has_the_reason(fake: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    leave_out(monkeypatch, "nvmlEventSetWait", "nvmlEventSetWait_v2")
    source = Node(fake, "gpus 1").source
    until(lambda: "too old" in (source.gpus[0].read(0.0).xids_reason or ""))
    until(lambda: threads() == [])


def test_closing_does_not_wait_and_the_thread_goes_by_itself(fake: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(xid_watch, "WAIT_S", 0.01)
    source = Node(fake, "gpus 1").source
    assert fake.await_registered(0)
    source.close()
    until(lambda: threads() == [])


def test_nothing_to_watch_costs_no_thread(fake: FakeNvml, clock: Clock) -> None:
    Node(fake, "gpus 2", "refuse nvmlDeviceRegisterEvents 3").source.close()
    assert threads() == []
    fake.configure()
    pynvml.nvmlInit()
    watch = XidWatch(pynvml, clock)
    watch.start()
    assert threads() == [] and watch.log("GPU-1") == ()
    assert "not registered" in (watch.reason("GPU-1") or "")

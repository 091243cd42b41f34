"""The thread that asks for the fleet again and again."""

from __future__ import annotations

import threading

import pytest

from gputop.advice.fleet.advise import FleetReport
from gputop.cluster.model import Fleet, FleetView
from gputop.core.errors import GputopError
from gputop.tui.cluster import cluster_app as app
from tests.cluster.fleets import fleet
from tests.waiting import PATIENCE_S


class _Collector:
    """Whose first answers cannot be used."""

    settled = False

    def __init__(self) -> None:
        self.go_on = threading.Event()
        self._outcomes = iter([GputopError("not there", "wait"), OverflowError("int too large"), KeyError("x")])

    def refresh(self, view: FleetView) -> Fleet:
        self.go_on.wait()
        if (outcome := next(self._outcomes, None)) is not None:
            raise outcome
        return fleet()


def test_an_answer_that_cannot_be_used_is_told_and_is_not_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread ended without a word, and the screen showed the same for ever."""
    monkeypatch.setattr(app, "SOON_S", 0.0)
    told: list[FleetReport | GputopError] = []
    there = threading.Event()

    def listen(answer: FleetReport | GputopError) -> None:
        told.append(answer)
        if isinstance(answer, FleetReport):
            there.set()

    collector = _Collector()
    asker = app.Asker(collector, lambda own: FleetReport(own, (), ()), FleetView(), 0.0)  # type: ignore[arg-type]
    try:
        asker.listen(listen)
        collector.go_on.set()
        assert there.wait(PATIENCE_S)
    finally:
        asker.close()
    assert [str(answer).partition("(")[0].partition("\n")[0] for answer in told[:3]] == [
        "not there", "processing an answer failed with an internal error in gputop: OverflowError",
        "processing an answer failed with an internal error in gputop: KeyError"]

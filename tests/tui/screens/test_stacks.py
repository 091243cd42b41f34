"""The stacks of the ranks in the monitor: read beside it, asked about first where that is due."""

from __future__ import annotations

import pytest

from gputop.core.errors import GputopError
from gputop.ranks import stacks
from gputop.tui.app import GputopApp
from gputop.tui.screens.dialogs import Confirm
from gputop.tui.screens.process_screens import StacksPopup
from tests.tui.found import box_text, piloted
from tests.tui.key_effects import HangingSession
from tests.tui.stages import session_of
from tests.tui.textual_private import message_text


@pytest.fixture
def session() -> HangingSession:
    """The one of all tests here, as at first."""
    session: HangingSession = session_of(HangingSession)
    session._listeners.clear()
    session.asked.clear()
    return session


def fail(pids: object, native: bool) -> None:
    raise GputopError("py-spy is not installed", "Install it.")


async def press(pilot: object, app: GputopApp, key: str) -> None:
    await pilot.press(key)  # type: ignore[attr-defined]
    await app.workers.wait_for_complete()
    await pilot.pause()  # type: ignore[attr-defined]


async def test_the_rank_that_stands_elsewhere_is_shown_and_copied(session: HangingSession) -> None:
    async with piloted(session) as (app, pilot):
        await press(pilot, app, "S")
        assert isinstance(app.screen, StacksPopup)
        text = box_text(app)
        assert "7 ranks in wrapper → all_reduce at train.py:112, 1 rank in load at data.py:40" in text
        assert "Check rank 5 (pid 105) first" in text
        await press(pilot, app, "y")
        assert app.clipboard.startswith("7 ranks in")
        await press(pilot, app, "n")
        assert isinstance(app.screen, Confirm) and session.asked == [("stacks", False)]
        await press(pilot, app, "y")
        assert session.asked[-1] == ("stacks", True) and isinstance(app.screen, StacksPopup)


async def test_the_flight_recorders_dumps_come_first(
        session: HangingSession, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "read_flight_recorder", lambda pids: ("Recorder: rank 5 did not launch it.", "   x"))
    async with piloted(session) as (app, pilot):
        await press(pilot, app, "S")
        text = box_text(app)
        assert 0 <= text.index("rank 5 did not launch it") < text.index("7 ranks in")


async def test_the_dumps_are_shown_where_the_stacks_cannot_be_read(
        session: HangingSession, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "read_stacks", fail)
    monkeypatch.setattr(session, "read_flight_recorder", lambda pids: ("Recorder: rank 5 did not launch it.",))
    async with piloted(session, notifications=True) as (app, pilot):
        await press(pilot, app, "S")
        assert "py-spy is not installed" in message_text(app)
        assert "rank 5 did not launch it" in box_text(app)


async def test_others_processes_are_asked_about_and_errors_are_told(
        session: HangingSession, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacks, "others_of", lambda pids: {100: 4242})
    async with piloted(session, notifications=True) as (app, pilot):
        await press(pilot, app, "S")
        assert isinstance(app.screen, Confirm) and session.asked == []
        await press(pilot, app, "n")
        assert not isinstance(app.screen, Confirm) and session.asked == []
        monkeypatch.setattr(session, "read_stacks", fail)
        await press(pilot, app, "S")
        await press(pilot, app, "y")
        assert "py-spy is not installed" in message_text(app)
        monkeypatch.setattr(type(session), "pids_to_read", ())
        await press(pilot, app, "S")
        assert "No process holds a GPU" in message_text(app)

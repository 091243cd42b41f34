"""The boxes over a screen: they fit every terminal, are broken anew when it changes, and name the keys that fit."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.text import Text
from textual import events
from textual.geometry import Region
from textual.pilot import Pilot

from gputop.session.process_signals import SIGNALS
from gputop.tui.app import GputopApp
from gputop.tui.monitor.findings_panel import ActionsPanel
from gputop.tui.monitor.process_panel import ProcessPanel
from gputop.tui.screens.details import process_text
from gputop.tui.screens.dialogs import Ask
from gputop.tui.screens.process_screens import SignalList, SignalScreen
from gputop.tui.widgets.dialog_frame import DialogFrame, WrappedText, wrap_hanging
from tests.tui.found import FoundSession, box_text, piloted, text_of
from tests.tui.goldens import cells
from tests.tui.goldens import text_of as screen_text
from tests.tui.scenes import Scene
from tests.tui.screens.signaling import SignalingSession, open_signals
from tests.tui.textual_private import draw_when_settled

OPENED = (120, 40)
SIZES = ((40, 12), (80, 24), (20, 5), (140, 50), (60, 8))
# Over the main screen, and over the processes.
BOXES = (("question_mark",), ("h",), ("i",), ("J",), ("a",), ("r", "enter"), ("tab", "enter"), ("tab", "K"),
         ("tab", "K", "question_mark"))


@given(st.lists(st.sampled_from(("a", "be", "straße", "漢字", "x" * 30, "  ", "   ", " ", "\n"))).map("".join),
       st.integers(2, 60))
def test_no_line_is_longer_than_its_room_and_nothing_is_lost(text: str, width: int) -> None:
    out = wrap_hanging(Text(text), width).plain
    assert all(cell_len(line) <= width for line in out.splitlines())
    assert re.sub(r"\s", "", out) == re.sub(r"\s", "", text)


def test_what_does_not_fit_stands_under_its_column() -> None:
    line = "label    12 GB  what there is to say about that"
    assert wrap_hanging(Text(line), 60).plain == line
    assert wrap_hanging(Text(line), 35).plain == "label    12 GB  what there is to\n                say about that"
    assert wrap_hanging(Text(line), 26).plain == \
        "label    12 GB  what there\n         is to say about\n         that", \
        "beside the figure there is no room"
    assert wrap_hanging(Text("path     /a/long/path/that/is/one/word"), 26).plain == \
        "path     /a/long/path/that\n         /is/one/word"
    styled = wrap_hanging(Text("one two", "bold"), 4)
    assert {styled.plain[span.start:span.end] for span in styled.spans} == {"one", "two"}


def frame_of(pilot: Pilot[Any]) -> DialogFrame:
    return pilot.app.screen.query_one(DialogFrame)


def assert_whole(pilot: Pilot[Any]) -> None:
    """The box is inside the screen with its border, and no line of it is cut."""
    frame = frame_of(pilot)
    assert frame.region in frame.screen.region
    lines = screen_text(cells(pilot.app)).splitlines()
    region = frame.region
    assert lines[region.y][region.x] == "╭" and lines[region.bottom - 1].startswith("╰", region.x)
    for widget in pilot.app.screen.query(WrappedText):
        assert widget.size.height == str(widget.text).count("\n") + 1
        assert all(cell_len(line) <= widget.size.width for line in str(widget.text).splitlines())


@pytest.mark.parametrize("keys", BOXES, ids="-".join)
async def test_a_box_that_is_open_follows_the_terminal(keys: tuple[str, ...]) -> None:
    app = GputopApp(FoundSession())
    draw_when_settled(app)
    async with app.run_test(size=OPENED) as pilot:
        await pilot.pause()
        app.query_one(ActionsPanel).focus()
        await pilot.press(*keys)

        async def resized(size: tuple[int, int]) -> tuple[Region, list[str]]:
            await pilot.resize_terminal(*size)
            await pilot.pause()
            assert_whole(pilot)
            return frame_of(pilot).region, [str(widget.text) for widget in app.screen.query(WrappedText)]

        first = await resized(OPENED)
        for size in SIZES:
            await resized(size)
        assert await resized(OPENED) == first


async def test_a_resized_box_stays_where_one_was_reading() -> None:
    async with piloted(FoundSession(), (120, 20)) as (app, pilot):
        await pilot.press("question_mark", "pagedown", "pagedown")
        await pilot.pause()

        def seen() -> set[str]:
            frame = frame_of(pilot)
            top = round(frame.scroll_y)
            return set(" ".join(box_text(app).splitlines()[top:top + frame.size.height]).split())

        before = seen()
        for size in ((60, 20), (200, 20), (40, 20), (120, 20)):
            await pilot.resize_terminal(*size)
            await pilot.pause()
            await pilot.pause()
            assert 0 < frame_of(pilot).scroll_y <= frame_of(pilot).max_scroll_y
            assert len(before & seen()) > 10, size
        await pilot.press("home")
        await pilot.resize_terminal(40, 12)
        await pilot.pause()
        assert frame_of(pilot).scroll_y == 0


async def test_keys_that_come_together_each_scroll() -> None:
    async with piloted(FoundSession(), (80, 24)) as (app, pilot):
        await pilot.press("question_mark")
        await pilot.pause()
        for key in ("down", "down", "down", "up"):
            app.post_message(events.Key(key, None))
        await pilot.pause()
        assert frame_of(pilot).scroll_y == 2


@pytest.mark.parametrize("size", [(20, 5), (40, 12), (80, 9), (120, 40)])
async def test_a_signal_can_be_chosen_and_sent_on_every_terminal(size: tuple[int, int]) -> None:
    session = SignalingSession()
    app = GputopApp(session)
    async with app.run_test(size=OPENED) as pilot:
        signals = await open_signals(app, pilot)
        await pilot.resize_terminal(*size)
        for number, _ in SIGNALS:
            await pilot.pause()
            assert f"› {number.value:>2} {number.name}" in screen_text(cells(app))
            await pilot.press("enter")
            await pilot.pause()
            shown = " ".join(text_of(signals).split())
            assert f"Send {number.name} to 41231?" in shown and "y: send" in shown and len(signals._lines) == \
                signals.size.height
            await pilot.press("n", "down")
        await pilot.click(SignalList, offset=(3, signals.line_of[len(SIGNALS) - 2]))
        await pilot.press("enter", "y")
        await pilot.pause()
        assert [number for _, number in session.sent] == [SIGNALS[-2][0]]


async def test_while_it_is_asked_no_key_is_named_that_does_nothing() -> None:
    async with piloted(SignalingSession(), (80, 24)) as (app, pilot):
        await open_signals(app, pilot)
        keys = str(frame_of(pilot).border_subtitle)
        assert keys == "   ".join(SignalScreen.KEYS)
        await pilot.press("enter")
        assert not frame_of(pilot).border_subtitle
        await pilot.press("n")
        assert str(frame_of(pilot).border_subtitle) == keys


async def test_keys_are_named_whole_or_not_at_all() -> None:
    async with piloted(FoundSession(), (80, 24)) as (app, pilot):
        app.query_one(ProcessPanel).focus()
        await pilot.press("enter")
        for width, shown in ((80, "K: signal…   y: copy the command   esc: close"), (40, "K: signal…   esc: close"),
                             (20, "esc: close")):
            await pilot.resize_terminal(width, 24)
            await pilot.pause()
            assert str(frame_of(pilot).border_subtitle) == shown
            assert f" {shown} " in screen_text(cells(app))


async def test_the_attach_box_says_all_at_40x12_and_asks_again() -> None:
    async with piloted(FoundSession(), (40, 12)) as (app, pilot):
        await pilot.press("a")
        await pilot.pause()
        assert isinstance(app.screen, Ask)
        assert_whole(pilot)
        text = screen_text(cells(app))
        assert "localhost:6009" in text and "gputop attach PID" in text and "enter: ok   esc: cancel" in text
        await pilot.press(*"nowhere", "enter")
        await pilot.pause()
        assert isinstance(app.screen, Ask)
        assert_whole(pilot)
        assert "nowhere" in box_text(app)


def test_what_the_simulation_cannot_know_of_a_process_says_why() -> None:
    scene = Scene("healthy", served=False)
    for width in (36, 76, 100):
        lines = str(process_text(scene.feed.sample.processes[0], 0.0, width=width)).splitlines()
        unknown = [line for line in lines if "N/A" in line]
        assert len(unknown) >= 2 and all(line.endswith("simulated") for line in unknown)

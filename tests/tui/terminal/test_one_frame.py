"""A frame of the monitor: drawn at once, of those widgets alone that were refreshed."""

from __future__ import annotations

from collections import Counter

import pytest
from textual.geometry import Size
from textual.screen import Screen
from textual.widget import Widget

from gputop.tui.app import GputopApp
from gputop.tui.terminal.textual_private import one_frame
from tests.fakes import StillSession
from tests.tui.found import piloted
from tests.tui.textual_private import DISPLAY, screen_strips


def frames_of(app: GputopApp, monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """What the app displays from now on."""
    frames: list[object] = []
    display = getattr(app, DISPLAY)
    monkeypatch.setattr(app, DISPLAY, lambda screen, update: (frames.append(update), display(screen, update)))
    return frames


async def test_a_sample_is_one_frame_which_is_drawn_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    session = StillSession(gpus=1)
    async with piloted(session) as (app, pilot):
        frames = frames_of(app, monkeypatch)
        session.advance()
        with one_frame(app):
            app._refresh_all()
            assert not frames
        assert len(frames) == 1
        await pilot.pause()
        assert len(frames) == 1, "nothing is left for Textual to draw"


async def test_what_needs_more_than_a_repaint_is_left_to_textual() -> None:
    session = StillSession(gpus=1)
    async with piloted(session) as (app, pilot):
        host = app.query_one("#host")
        with one_frame(app):
            host.styles.height = 2
            host.refresh(layout=True)
        await pilot.pause()
        assert host.size.height == 2
        before = screen_strips(app)[0].text
        await app.push_screen(Screen())
        session.advance()
        with one_frame(app):
            app._refresh_all()
        await pilot.pause()
        app.pop_screen()
        await pilot.pause()
        header = screen_strips(app)[0].text
        assert header[:20] == before[:20] and header != before, "it was covered, and has the time of the new sample"


async def test_before_the_screen_has_heard_of_a_new_size_it_is_left_to_textual(monkeypatch: pytest.MonkeyPatch) -> None:
    session = StillSession(gpus=1)
    async with piloted(session) as (app, pilot):
        frames = frames_of(app, monkeypatch)
        session.advance()
        with monkeypatch.context() as resized:
            resized.setattr(GputopApp, "size", Size(80, 24))
            with one_frame(app):
                app._refresh_all()
        assert not frames
        await pilot.pause()
        assert frames


async def test_only_what_has_changed_is_drawn_again(monkeypatch: pytest.MonkeyPatch) -> None:
    session = StillSession(gpus=1)
    async with piloted(session) as (app, pilot):
        drawn: Counter[str] = Counter()
        render_lines = Widget.render_lines
        monkeypatch.setattr(Widget, "render_lines", lambda widget, crop: (
            drawn.update([widget.id or type(widget).__name__]), render_lines(widget, crop))[1])
        session.advance()
        with one_frame(app):
            app._refresh_all()
        assert set(drawn) <= {"actions", "processes"}, "not the grounds and the boxes around them"
        app.theme = "textual-light"
        await pilot.pause()
        assert {"gpus", "gpus-box", "panels", "_default"} <= set(drawn), "in the colors of another theme they are"

"""The mouse in every list: a click selects, a second one opens, the wheel goes through it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from textual import events
from textual.pilot import Pilot
from textual.widget import Widget
from textual.widgets import DataTable

from gputop.tui.monitor.findings_panel import ActionsPanel
from gputop.tui.monitor.gpu_table import GpuTable
from gputop.tui.monitor.process_panel import ProcessPanel
from gputop.tui.screens.captures import SavedCaptures
from gputop.tui.screens.compare import CaptureList
from gputop.tui.screens.finding import FindingPopup
from gputop.tui.screens.process_screens import SignalList
from gputop.tui.timeline.idle_gap_list import IdleGapList
from tests.tui.key_effects import Stage, on_screen, screen
from tests.tui.scenes import Scene, with_sixteen
from tests.tui.stages import monitor
from tests.tui.textual_private import forward_to_screen


@dataclass(frozen=True)
class List:
    """``keys`` open it; its ``line`` is clicked, which is not selected; ``at`` says of it which one is."""

    at: Callable[[Any], Any]
    opened: Callable[[Any], Any]  # of the app, what changes once the selected line is clicked
    line: Callable[[Any], int]
    keys: tuple[str, ...] = ()
    wheels: Callable[[Any], Any] | None = None  # of the app, what the wheel changes; None: ``at``
    size: tuple[int, int] = (120, 40)


LISTS: dict[type[Widget], List] = {
    ActionsPanel: List(lambda p: p.selected.id, screen,
                       lambda p: p._line_ids.index(next(o for o in p._line_ids if o and o != p.selected.id)),
                       size=(120, 60)),
    ProcessPanel: List(lambda p: p.selected.pid, screen, lambda _: 2),
    SignalList: List(lambda s: s.index, lambda app: app.screen.query_one(SignalList).asked, lambda _: 4, ("tab", "K")),
    CaptureList: List(lambda c: c.index, on_screen(lambda s: (s._a, s._b)), lambda _: 0, ("B",),
                      on_screen(lambda s: s.query_one("#changes").scroll_target_y), (100, 20)),
    SavedCaptures: List(lambda c: c.index, screen, lambda _: 1, ("J",)),
    IdleGapList: List(lambda b: b.at, lambda app: len(app.screen.query_one(IdleGapList).entries), lambda _: 1,
                      ("t", "b")),
    DataTable: List(lambda t: t.cursor_row, screen, lambda _: 2, ("T", "1"),
                    lambda app: app.screen.query_one(DataTable).scroll_target_y, (100, 12)),
}


async def wheel(pilot: Pilot[int], widget: Widget, kind: type[events.MouseEvent]) -> None:
    """One notch over the middle of a widget."""
    x, y = widget.region.center
    where = {"x": int(x), "y": int(y), "screen_x": int(x), "screen_y": int(y)}
    forward_to_screen(pilot.app, kind(
        widget, delta_x=0, delta_y=0, button=0, shift=False, meta=False, ctrl=False, **where))
    await pilot.pause()


@pytest.mark.parametrize("kind", LISTS, ids=lambda kind: kind.__name__)
async def test_clicks_select_and_open_and_the_wheel_goes_on(kind: type[Widget], tmp_path: Path,
                                                            monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tried = LISTS[kind]
    async with monitor(Stage({}), tmp_path) as (app, pilot):
        await pilot.resize_terminal(*tried.size)
        await pilot.pause()
        app.query_one(ActionsPanel).focus()
        await pilot.press(*tried.keys)
        await app.workers.wait_for_complete()
        await pilot.pause()
        widget = app.screen.query_one(kind)
        line = tried.line(widget)
        place = (widget.content_region.x - widget.region.x + 4, widget.content_region.y - widget.region.y + line)
        before, closed = tried.at(widget), tried.opened(app)
        await pilot.click(widget, offset=place)
        await pilot.pause()
        assert tried.at(widget) != before and tried.opened(app) == closed, "a click on another line selects it"
        seen = tried.wheels or (lambda _: tried.at(widget))
        here = seen(app)
        there, back = (events.MouseScrollDown, events.MouseScrollUp)
        if tried.wheels is None and kind in (ProcessPanel, ActionsPanel, SavedCaptures, IdleGapList):
            there, back = back, there  # it may be the last
        await wheel(pilot, widget, there)
        assert seen(app) != here
        await wheel(pilot, widget, back)
        assert seen(app) == here
        if isinstance(widget, ActionsPanel):  # the selected one is unfolded: its first line has moved
            place = (place[0], widget.content_region.y - widget.region.y + widget._line_ids.index(tried.at(widget)))
        await pilot.click(widget, offset=place)
        await pilot.pause()
        assert tried.opened(app) != closed, "a click on the selected line opens it"


async def test_a_double_click_opens_the_finding_it_selects(tmp_path: Path) -> None:
    async with monitor(Stage({}), tmp_path) as (app, pilot):
        await pilot.resize_terminal(120, 60)
        await pilot.pause()
        panel = app.query_one(ActionsPanel)
        panel.focus()
        await pilot.press(*["up"] * 9)
        wanted = panel.findings[1]
        await pilot.click(panel, offset=(5, 1 + panel._line_ids.index(wanted.id)), times=2)
        await pilot.pause()
        assert isinstance(app.screen, FindingPopup) and app.screen._finding is wanted


async def test_the_wheel_scrolls_boxes_and_gpus(tmp_path: Path) -> None:
    sixteen = Stage({}, session=lambda: Scene(change=with_sixteen))
    async with monitor(sixteen, tmp_path) as (app, pilot):
        await pilot.resize_terminal(100, 26)
        await pilot.pause()
        box = app.query_one("#gpus-box")
        await wheel(pilot, app.query_one(GpuTable), events.MouseScrollDown)
        assert box.scroll_target_y > 0
        await pilot.press("question_mark")
        await pilot.pause()
        popup = app.screen.query_one("#popup")
        await wheel(pilot, popup, events.MouseScrollDown)
        assert popup.scroll_target_y > 0

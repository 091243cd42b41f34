from __future__ import annotations

import pytest

from gputop.core.samples import LOST, GpuSample, XidEvent
from gputop.session.event_log import EventLog
from gputop.telemetry.history import History
from gputop.tui.monitor.columns import ACTIVITY, figures_of, plan
from gputop.tui.monitor.gpu_table import GpuTable
from gputop.tui.monitor.lanes import LaneWindow, TimeView
from gputop.tui.monitor.visible_time import UNMEASURED, Slice, TimeCursor, gpu_in_slice
from gputop.tui.screens.dialogs import Popup
from tests.fakes import GIB, START_S, StillSession, history_of, node_sample
from tests.records import replace
from tests.tui.found import piloted

FIELDS = {field.key: field for field in plan(160)}


def test_the_figures_under_the_cursor_are_means_of_the_slice() -> None:
    gpu = node_sample(299, 1).gpus[0]
    past, mean_of_s = gpu_in_slice(history_of(300, 2), gpu, START_S + 100, 5.0, ())
    samples = [node_sample(tick, 1).gpus[0] for tick in range(100, 105)]
    assert mean_of_s == 5.0
    for metric in ("sm_active", "power_w", "pcie_rx_bytes_per_s", "temperature_c"):
        mean = sum(s[metric].value or 0.0 for s in samples) / 5
        assert past[metric].value == pytest.approx(mean, rel=1e-5) and "mean" in past[metric].source
    assert past["power_limit_w"].value == 700 and past["memory_used_bytes"].value == pytest.approx(71.2 * GIB)
    assert figures_of(past, ACTIVITY, FIELDS)["now"][0] == "10%"


def test_where_nothing_was_measured_nothing_is_made_up() -> None:
    gpu = replace(node_sample(299, 1).gpus[0], state=LOST, message="the GPU is lost")
    past, _ = gpu_in_slice(history_of(300, 2), gpu, START_S + 1000, 5.0, ())
    assert past["sm_active"].reason == UNMEASURED and past["power_w"].value is None
    figures = figures_of(past, ACTIVITY, FIELDS)
    assert "message" not in figures and figures["now"][0] == figures["power"][0] == figures["memory"][0] == "N/A"
    before, _ = gpu_in_slice(history_of(300, 2), gpu, START_S + 100, 5.0, ())
    assert before["sm_active"].value is not None, "lost by now, it was there then"
    assert past["fp64_active"].value is None, "not kept in history"


def test_events_of_the_slice_take_the_place_of_those_of_now() -> None:
    log, history = EventLog(), History()
    for tick in range(60):
        sample = node_sample(tick, 1)
        gpu = replace(sample.gpus[0], clock_event_reasons=("thermal",) if tick == 20 else ("power cap",),
                      xids=(XidEvent(START_S + 22, 63),) if tick > 22 else ())
        history.append(sample := replace(sample, gpus=(gpu,)))
        log.note_sample(sample)
    marks = log.between(START_S + 20, START_S + 25)
    past, _ = gpu_in_slice(history, gpu, START_S + 20, 5.0, marks)
    assert set(past.clock_event_reasons) == {"thermal", "power cap"} and [x.xid for x in past.xids] == [63]
    assert gpu_in_slice(history, gpu, START_S + 30, 5.0, [])[0].xids == ()


def test_the_title_says_how_long_a_mean_it_is() -> None:
    assert Slice(START_S, 5.0, 5.0).title("SM active", 80) == "SM active at 08:00:00, mean over 5 s (esc: now)"
    assert Slice(START_S, 0.5, 0.5).title("SM active", 40) == "SM active 08:00:00, mean over 0.5 s"
    assert Slice(START_S, 5.0, 600.0).title("SM active", 30) == "08:00:00, mean over 10 min"
    assert Slice(START_S, 5.0, 5.0).title("SM active", 10) == "08:00:00"


def test_where_history_is_coarser_than_the_slice_the_mean_says_so() -> None:
    history = history_of(300, raw_samples=50, tiers=((1.0, 60), (10.0, 100)))
    gpu = node_sample(299, 1).gpus[0]
    assert gpu_in_slice(history, gpu, START_S + 100, 5.0, ())[1] == 10.0
    assert gpu_in_slice(history, gpu, START_S + 280, 5.0, ())[1] == 5.0


def test_it_moves_within_what_is_kept_and_stays_on_screen() -> None:
    window, newest = LaneWindow.of(TimeView(5.0), START_S + 299, 20), START_S + 299
    cursor = TimeCursor()
    assert cursor.keep_on_screen(window, newest) is None
    cursor.move(0, window, START_S, newest)
    assert window.column(cursor.time_s or 0) == 18
    cursor.move(5, window, START_S, newest)
    assert window.column(cursor.time_s or 0) == 19, "the newest slice"
    cursor.move(-1000, window, START_S, newest)
    assert cursor.time_s == START_S + 2.5, "the oldest"
    end_s = cursor.keep_on_screen(window, newest)
    assert LaneWindow.of(TimeView(5.0, end_s), newest, 20).column(cursor.time_s) == 0
    cursor.time_s = START_S + 290
    early = LaneWindow.of(TimeView(5.0, START_S + 100), newest, 20)
    end_s = cursor.keep_on_screen(early, newest)
    assert LaneWindow.of(TimeView(5.0, end_s), newest, 20).column(cursor.time_s) == 19
    assert cursor.keep_on_screen(window, START_S + 100) is None and cursor.time_s is None, "a recording went back"


def _glyphs(table: GpuTable, y: int) -> str:
    return "".join(run[0] for part in table._panes if part.part for run in table.runs(part.part, y))


async def test_keys_move_the_cursor_over_all_gpus_and_esc_takes_it_away() -> None:
    session = StillSession(gpus=3)
    async with piloted(session, (80, 30)) as (app, pilot):
        table = app.query_one(GpuTable)
        now = figures_of(session.feed.sample.gpus[0], ACTIVITY, FIELDS)["now"][0]  # type: ignore[union-attr]
        assert now in _glyphs(table, 2) and "now" in _glyphs(table, 0)
        await pilot.press("v", "left", "left")
        window, begin = table.time.window, table.time.cursor.slice
        assert window is not None and begin is not None and window.column(begin.begin_s) == window.columns - 4
        assert table.time.end_s is None, "the picture goes on under it"
        assert "mean" in _glyphs(table, 0) and "▲" in _glyphs(table, 1)
        columns = {_glyphs(table, 2 + y).index("┃") for y in range(3 * table.rows.per_gpu)}
        assert columns == {_glyphs(table, 1).index("▲")}
        past, _ = gpu_in_slice(session.feed.history, session.feed.sample.gpus[0], begin.begin_s, begin.slice_s, ())  # type: ignore
        assert figures_of(past, ACTIVITY, FIELDS)["now"][0] in _glyphs(table, 2)
        await pilot.press("escape")
        assert table.time.cursor.slice is None and now in _glyphs(table, 2) and "┃" not in _glyphs(table, 2)
        await pilot.press("shift+left")
        assert table.time.cursor.time_s is not None
        await pilot.press("v")
        assert table.time.cursor.time_s is None
        await pilot.press("v", "end")
        assert table.time.cursor.time_s is None and table.time.end_s is None


async def test_it_stays_in_its_slice_while_time_goes_on_and_holds_the_picture_at_the_edge() -> None:
    session = StillSession(gpus=1)
    async with piloted(session, (120, 30)) as (app, pilot):
        table = app.query_one(GpuTable)
        await pilot.press("v")
        begin_s = table.time.cursor.slice.begin_s if table.time.cursor.slice else 0.0
        session.advance(100)
        await pilot.pause()
        assert table.time.cursor.slice is not None and table.time.cursor.slice.begin_s == begin_s
        assert table.time.end_s is None
        session.advance(400)
        await pilot.pause()
        assert table.time.cursor.slice.begin_s == begin_s and table.time.end_s is not None
        assert table.time.window is not None and table.time.window.column(begin_s) == 0
        await pilot.press("right_square_bracket", "right_square_bracket")
        window = table.time.window
        assert 0 <= window.column(table.time.cursor.time_s or 0) < window.columns, "zooming keeps it in view"
        assert table.time.cursor.slice.slice_s < 5.0
        await pilot.press("end")
        assert table.time.end_s is None and table.time.cursor.time_s is None


async def test_beyond_the_edge_the_cursor_scrolls() -> None:
    async with piloted(StillSession(ticks=2000, gpus=1), (80, 30)) as (app, pilot):
        table = app.query_one(GpuTable)
        await pilot.press("v", *["shift+left"] * 8)
        window = table.time.window
        assert table.time.end_s is not None and window is not None
        assert window.column(table.time.cursor.time_s or 0) == 0
        await pilot.press(*["shift+right"] * 12)
        assert table.time.end_s is None, "back at the newest sample it follows again"


async def test_a_click_puts_it_there_and_a_second_one_opens_the_gpu() -> None:
    async with piloted(StillSession(gpus=4), (120, 30)) as (app, pilot):
        table = app.query_one(GpuTable)
        await pilot.click(GpuTable, offset=(30, 2 + table.rows.per_gpu))
        window = table.time.window
        assert window is not None and table.time.cursor.slice is not None and table.selected == 1
        assert window.column(table.time.cursor.slice.begin_s) == 30 - 4
        await pilot.click(GpuTable, offset=(25, 2 + table.rows.per_gpu))
        assert window.column(table.time.cursor.slice.begin_s) == 25 - 4 and not isinstance(app.screen, Popup)
        await pilot.click(GpuTable, offset=(25, 2 + table.rows.per_gpu))
        assert isinstance(app.screen, Popup)
        await pilot.press("escape", "escape")
        assert table.time.cursor.slice is None
        await pilot.click(GpuTable, offset=(10, 1))
        assert table.time.cursor.slice is not None and table.selected == 1, "the axis takes it, too"


async def test_the_axis_shows_marks_with_a_legend_and_under_the_cursor_words() -> None:
    def throttle(gpu: GpuSample, tick: int) -> GpuSample:
        return replace(gpu, clock_event_reasons=("thermal",)) if 200 <= tick < 280 and gpu.info.index < 2 else gpu

    async with piloted(StillSession(gpus=3, change=throttle), (120, 30)) as (app, pilot):
        table = app.query_one(GpuTable)
        line = _glyphs(table, 1)
        assert "T" in line[:62] and "══" in line and " T heat" in line
        await pilot.press("v", *["left"] * 6)
        assert "T GPU 0-1: thermal" in _glyphs(table, 1)
        assert "hot" in _glyphs(table, 2) and "hot" not in _glyphs(table, 2 + 2 * table.rows.per_gpu)


async def test_without_room_for_an_axis_the_cursor_works_all_the_same() -> None:
    async with piloted(StillSession(gpus=2), (60, 12)) as (app, pilot):
        table = app.query_one(GpuTable)
        await pilot.press("v")
        assert not table.rows.has_axis and "mean" in _glyphs(table, 0) and "┃" in _glyphs(table, 1)


async def test_before_the_first_sample_its_keys_do_nothing() -> None:
    async with piloted(StillSession(ticks=0), (80, 24)) as (app, pilot):
        await pilot.press("v", "shift+left", "left", "escape", "left_square_bracket", "end")
        assert app.query_one(GpuTable).time.cursor.time_s is None

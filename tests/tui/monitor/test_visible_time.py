from __future__ import annotations

from gputop.telemetry.history import History
from gputop.tui.monitor.columns import plan
from gputop.tui.monitor.visible_time import VisibleTime
from tests.fakes import START_S, node_sample


def over_history(ticks: int, columns: int = 60) -> VisibleTime:
    time = VisibleTime()
    time.history, time.columns = History(), columns
    for tick in range(ticks):
        time.history.append(node_sample(tick, 1))
        time.advance()
    return time


def test_the_picture_is_as_short_as_the_history_until_the_user_zooms() -> None:
    time, history = VisibleTime(), History()
    width = next(field.width for field in plan(80) if field.key == "main")
    time.history, time.columns, spans = history, width, []
    for tick in range(400):
        history.append(node_sample(tick, 1))
        spans.append(time.shown_s)
        assert 0.8 * tick <= time.shown_s or time.shown_s >= 0.8 * time.span_s
    assert spans[0] == width, "a sample takes a column at first"
    assert spans == sorted(spans) and spans[-1] == width * 10.0
    time.end_s = 1.0
    assert time.shown_s == width * 10.0, "scrolled back"
    time.end_s = None
    for columns in range(80, 160):
        time.columns = next(field.width for field in plan(columns) if field.key == "main")
        assert time.shown_s <= 1.1 * 400, "hardly a column is for a time before the first sample"
    short = over_history(20, width)
    short.zoom(0)
    assert short.shown_s == width * 10.0, "the user has chosen the span"


def test_lanes_move_by_a_share_of_the_history_and_by_some_seconds_at_most() -> None:
    time, history = VisibleTime(), History()
    time.history, time.columns, ends = history, 1, []
    for tick in range(40):
        history.append(node_sample(tick, 1))
        time.advance()
        ends.append(round(time.lanes_end_s - START_S))  # type: ignore[operator]
    assert ends[:8] == [0, 1, 2, 3, 4, 5, 6, 6]
    assert {ends[25 + i] - ends[20 + i] for i in range(15)} == {5}  # never more than five seconds behind
    time.cursor.time_s = START_S + 10.0  # with the cursor on them, lanes and figures are of the same moment
    time.advance()
    assert time.lanes_end_s == START_S + 39


def test_scrolling_stays_in_the_history_and_follows_again_at_its_end() -> None:
    time = over_history(400)
    quarter = time.shown_s / 4
    time.scroll(-1)
    assert time.end_s == START_S + 399 - quarter
    time.scroll(-1000)
    assert time.end_s == START_S + quarter, "a quarter of the lane still has something"
    time.scroll(1000)
    assert time.end_s is None
    empty = VisibleTime()
    empty.scroll(-1)
    empty.move_cursor(0)
    assert empty.end_s is None and empty.window is None and empty.cursor.time_s is None


def test_zooming_ends_at_the_shortest_and_the_longest_span() -> None:
    time = VisibleTime()
    time.zoom(-100)
    shortest = time.span_s
    time.zoom(1)
    assert time.span_s > shortest == 60.0
    time.zoom(100)
    assert time.span_s == 12 * 3600.0


def test_a_narrow_lane_shows_the_same_time_in_longer_slices() -> None:
    time = over_history(400)
    assert time.view_of(60) is not None and time.view_of(60) == time.view
    assert time.view_of(10).slice_s * 10 >= time.shown_s > time.view.slice_s * 10


def test_the_cursor_is_kept_in_the_picture_and_leaves_with_follow() -> None:
    time = over_history(400)
    time.zoom(-1)
    time.move_cursor(0)
    assert time.cursor_column(60) == 58, "the newest whole slice"
    time.scroll(-70)
    assert time.cursor_column(60) == -12, "left of the picture, until that moves"
    assert time.update_cursor(None, node_sample(399, 1).gpus), "the slice there is read"
    assert time.cursor_column(60) == 0 and time.end_s is not None
    time.move_cursor(0)
    assert time.end_s is None and time.cursor.time_s is None and time.cursor_column(60) is None


def test_the_longest_interval_is_kept() -> None:
    time = VisibleTime()
    for interval_s in (1.0, 5.0, 0.5):
        time.note_interval(interval_s)
    assert time.longest_interval_s == 5.0

"""What fits a terminal of which size: each line of the screen belongs to a part, and no part is an empty box."""

from __future__ import annotations

import itertools

import pytest

from gputop.tui.monitor.columns import FURTHER_LANES, MAIN
from gputop.tui.monitor.layout import MAX_LANE_LINES, LaneLines, Layout, TableRows, layout

GPUS = (1, 2, 4, 5, 8, 16)
COLUMNS = (80, 100, 119, 120, 159, 160, 200, 240)
FIXED = 4  # header, host, job, keys
LEAST_ADVICE = 7


def advice_lines(found: Layout, lines: int) -> int:
    """What the recommendations are left with."""
    return lines - FIXED - found.table_lines - bool(found.hidden_gpus) - (found.process_lines or 0)


@pytest.mark.parametrize("gpus", GPUS)
@pytest.mark.parametrize("columns", COLUMNS)
def test_every_line_has_a_use_at_every_size_and_no_gpu_is_hidden_without_a_count(columns: int, gpus: int) -> None:
    for lines, processes in itertools.product(range(24, 71), (0, 1, 2, 8, 100)):
        found = layout(columns, lines, gpus, processes)
        advice = advice_lines(found, lines)
        no_line_for_each = advice - gpus < 14
        assert advice >= LEAST_ADVICE and (advice <= lines / 3 + 1 or no_line_for_each), (lines, found)
        assert found.rows.host_lines <= 1 and dict(found.rows.lanes).get("memory", 1) == 1, "they hardly change"
        if "narrow" in found.classes:
            rows = found.process_lines - (0 if found.bare_processes else 3)
            assert 1 <= rows <= max(1, processes), "no row of the process table is empty"
        else:
            assert found.process_lines is None
        shown = (found.table_lines - 1 - found.rows.has_axis - found.rows.host_lines) / found.rows.per_gpu
        assert shown + found.hidden_gpus == gpus
        assert not found.hidden_gpus or (found.rows.per_gpu == 1 and not found.rows.host_lines), (lines, found)
        assert gpus > 8 or not found.hidden_gpus


@pytest.mark.parametrize("unread", [frozenset(), frozenset({"tensor", "dram"}), frozenset(FURTHER_LANES)])
@pytest.mark.parametrize("gpus", GPUS)
def test_lanes_are_as_high_as_they_can_show_and_the_main_one_is_the_highest(gpus: int, unread: frozenset[str]) -> None:
    for lines in range(24, 71):
        found = layout(120, lines, gpus, processes=1, unread=unread)
        heights = dict(found.rows.lanes)
        assert len(heights) == len(found.rows.lanes) and found.rows.lanes[0].lane == MAIN
        assert all(1 <= height <= heights[MAIN] <= MAX_LANE_LINES for height in heights.values())
        assert all(heights.get(lane, 1) == 1 for lane in unread), "a reason takes one line"


def test_sixteen_gpus_on_a_small_screen_are_counted() -> None:
    found = layout(80, 24, gpus=16, processes=1)
    assert (found.hidden_gpus, found.table_lines, found.process_lines) == (7, 11, 1)


@pytest.mark.parametrize(("columns", "lines", "gpus", "lanes"), [
    (80, 24, 1, 6), (80, 24, 2, 2), (120, 40, 1, 6), (120, 40, 2, 6), (120, 40, 4, 3), (120, 40, 5, 2), (120, 40, 8, 1),
    (200, 50, 1, 9), (200, 50, 2, 6), (200, 50, 4, 6), (200, 50, 8, 2), (240, 70, 1, 9), (240, 70, 4, 6),
    (240, 70, 8, 3), (240, 70, 16, 1)])
def test_few_gpus_have_a_lane_for_each_metric(columns: int, lines: int, gpus: int, lanes: int) -> None:
    assert len(layout(columns, lines, gpus, processes=1).rows.lanes) == lanes


def test_what_cannot_be_read_leaves_its_lines_to_the_others() -> None:
    coarse = layout(120, 40, 1, 1, unread=frozenset({"tensor", "dram", "nvlink"}))
    heights, of_all = dict(coarse.rows.lanes), dict(layout(120, 40, 1, 1).rows.lanes)
    assert heights["tensor"] == heights["dram"] == 1 and heights["power"] > of_all["power"]
    assert "nvlink" not in heights


@pytest.mark.parametrize(("columns", "lines", "classes", "table_lines", "process_lines"), [
    (200, 19, {"short"}, 9, None),
    (200, 13, {"short", "low"}, 8, None),
    (200, 11, {"short", "low", "tiny"}, 9, None),
    (39, 60, {"narrow", "tiny"}, 42, 2),
    (20, 2, {"narrow", "short", "low", "tiny"}, 2, 2),
])
def test_smaller_terminals_hide_panels_and_leave_the_table_fewer_lines(
        columns: int, lines: int, classes: set[str], table_lines: int, process_lines: int | None) -> None:
    found = layout(columns, lines, gpus=8, processes=3)
    assert (found.classes, found.table_lines, found.process_lines) == (classes, table_lines, process_lines)


def test_one_process_takes_a_line_and_no_columns_from_the_recommendations() -> None:
    assert layout(120, 40, gpus=8, processes=1).process_lines == 1
    assert layout(120, 40, gpus=8, processes=2).process_lines is None
    assert layout(160, 40, gpus=8, processes=1).process_lines is None
    assert layout(39, 11, gpus=8, processes=1).classes == layout(39, 11, gpus=8, processes=2).classes


def test_without_gpus_the_lines_are_for_the_processes_and_the_recommendations() -> None:
    found = layout(120, 40, gpus=0, processes=30)
    assert (found.process_lines, found.rows.has_axis, found.hidden_gpus) == (13, False, 0)


def test_each_line_of_the_table_belongs_to_the_title_a_gpu_or_the_host() -> None:
    rows = TableRows((LaneLines(MAIN, 2), LaneLines("tensor", 1)), host_lines=2, has_axis=True)
    assert not rows.is_stacked and TableRows(tuple(LaneLines(lane, 1) for lane in FURTHER_LANES)).is_stacked
    assert rows.of_gpu == ((MAIN, 0), (MAIN, 1), ("tensor", 0))
    assert (rows.top, rows.lines(4), rows.lines(0)) == (2, 2 + 4 * 3 + 2, 2 + 3 + 2)
    assert [rows.gpu_at(y) for y in range(9)] == [-1, -1, 0, 0, 0, 1, 1, 1, 2]
    assert [rows.y_of(gpu) for gpu in range(3)] == [2, 5, 8]
    assert layout(120, 40, 8, 1).rows == layout(120, 40, 8, 3).rows, "the same lines, other panels"


def test_gpus_above_and_below_the_shown_lines_are_counted() -> None:
    rows = TableRows((LaneLines(MAIN, 2),), has_axis=True)
    assert rows.hidden(16, scrolled=0, shown=10) == (0, 12)
    assert rows.hidden(16, scrolled=2, shown=10) == (0, 11)
    assert rows.hidden(16, scrolled=3, shown=10) == (1, 11), "half of one counts as hidden"
    assert rows.hidden(16, scrolled=24, shown=10) == (11, 0)
    assert rows.hidden(2, scrolled=0, shown=10) == (0, 0)

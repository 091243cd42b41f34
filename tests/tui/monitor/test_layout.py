"""What fits a terminal of which size."""

from __future__ import annotations

import pytest

from gputop.tui.monitor.layout import layout


@pytest.mark.parametrize(("columns", "lines", "classes", "table_lines", "process_lines"), [
    (200, 60, set(), 47, None),
    (119, 60, {"narrow"}, 47, 6),
    (200, 19, {"short"}, 12, None),
    (200, 13, {"short", "low"}, 8, None),
    (80, 24, {"narrow"}, 11, 2),
    (200, 11, {"short", "low", "tiny"}, 10, None),
    (39, 60, {"narrow", "tiny"}, 59, 6),
    (20, 2, {"narrow", "short", "low", "tiny"}, 2, 2),
])
def test_smaller_terminals_hide_panels_and_leave_the_table_fewer_lines(
        columns: int, lines: int, classes: set[str], table_lines: int, process_lines: int | None) -> None:
    found = layout(columns, lines, gpus=8, processes=3)
    assert (found.classes, found.max_table_lines, found.process_lines) == (classes, table_lines, process_lines)


def test_one_process_takes_a_line_and_no_columns_from_the_recommendations() -> None:
    assert layout(120, 40, gpus=8, processes=1)[::4] == ({"narrow"}, 1)
    assert layout(120, 40, gpus=8, processes=2)[::4] == (set(), None)
    assert layout(160, 40, gpus=8, processes=1)[::4] == (set(), None)
    assert layout(39, 11, gpus=8, processes=1).classes == layout(39, 11, gpus=8, processes=2).classes


def test_the_processes_take_what_they_need_and_at_most_two_fifths() -> None:
    assert layout(100, 60, gpus=8, processes=1).process_lines == 1
    assert layout(100, 60, gpus=8, processes=100).process_lines == 18


@pytest.mark.parametrize("processes", [1, 2, 8, 100])
@pytest.mark.parametrize("gpus", [1, 2, 4, 8])
@pytest.mark.parametrize("lines", range(24, 80, 2))
def test_above_the_processes_there_is_room_for_a_recommendation(lines: int, gpus: int, processes: int) -> None:
    found = layout(110, lines, gpus, processes)
    assert found.process_lines is not None
    table = min(1 + found.has_axis + gpus * found.lines_per_gpu, found.max_table_lines)
    assert lines - 4 - table - found.process_lines >= 5  # header, host, job, keys; its frame and three lines

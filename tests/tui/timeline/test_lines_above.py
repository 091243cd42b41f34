"""The lines above the rows: the whole capture in small, the axis, the steps."""

from __future__ import annotations

import numpy as np
import pytest

from gputop.tui.timeline import descriptions
from gputop.tui.timeline.viewport import View
from tests.tui.found import line_text as text

MS = 1_000_000
STEPS = np.array([[i * 10 * MS, (i + 1) * 10 * MS] for i in range(40)], np.int64)
WHOLE = View.whole((0, 400 * MS))


@pytest.mark.parametrize("cells", [4, 20, 90, 200])
@pytest.mark.parametrize("view", [WHOLE, WHOLE.at(33 * MS, 21 * MS), WHOLE.at(399 * MS, 1000), WHOLE.at(5 * MS, MS)])
def test_lines_are_exactly_as_long_as_the_picture(cells: int, view: View) -> None:
    cover = np.linspace(0, 1, cells, dtype=np.float32)
    assert len(text(descriptions.overview(cover, view))) == cells
    assert len(text(descriptions.axis(view, cells, 35 * MS))) == cells
    for steps in (STEPS, STEPS[:0], STEPS[:1], STEPS[::3]):
        assert len(text(descriptions.steps_line(steps, view, cells, 35 * MS))) == cells
        assert len(descriptions.rules(steps, view, cells)) == cells


def test_steps_are_named_as_far_as_there_is_room() -> None:
    near = WHOLE.at(100 * MS, 30 * MS)
    named = " step 11  10.0 ms    step 12  10.0 ms    step 13  10.0 ms"
    assert text(descriptions.steps_line(STEPS, near, 60, None)).rstrip() == named
    assert text(descriptions.steps_line(STEPS, WHOLE, 200, None)).split()[:3] == ["1", "2", "3"]
    many = text(descriptions.steps_line(STEPS, WHOLE, 60, None)).split()
    assert many[0] == "1–5" and many[-1] == "36–40"
    assert [i + 1 for i in descriptions.drawn_steps(STEPS, WHOLE, 60)] == [1, 6, 11, 16, 21, 26, 31, 36]


def test_steps_that_take_less_than_a_cell_are_named() -> None:
    short = np.array([[390 * MS + i * MS // 10, 390 * MS + (i + 1) * MS // 10] for i in range(4)], np.int64)
    assert text(descriptions.steps_line(short, WHOLE, 60, None)).split() == ["1"]
    end = np.array([[399 * MS, 400 * MS]], np.int64)
    assert text(descriptions.steps_line(end, WHOLE, 60, None)).split() == ["1"]


def test_rules_stand_where_marked_steps_begin_and_the_last_one_ends() -> None:
    view = View.whole((0, 100 * MS))
    steps = STEPS[1:4]
    assert np.flatnonzero(descriptions.rules(steps, view, 100)).tolist() == [10, 20, 30, 40]
    assert not descriptions.rules(STEPS[:0], view, 100).any()


def test_which_step_a_moment_is_in() -> None:
    steps = STEPS[1:4]
    assert [descriptions.step_at(steps, t) for t in (0, 10 * MS, 25 * MS, 40 * MS)] == [None, 0, 1, None]
    assert descriptions.visible_steps(steps, View.whole((0, 10 * MS))) == range(0)
    assert list(descriptions.visible_steps(steps, WHOLE.at(15 * MS, 10 * MS))) == [0, 1]


def test_the_cursor_leaves_a_label_readable() -> None:
    plain = text(descriptions.axis(WHOLE, 100, None))
    on_label = text(descriptions.axis(WHOLE, 100, WHOLE.time(plain.index("ms"), 100)))
    assert on_label == plain
    assert text(descriptions.axis(WHOLE, 100, WHOLE.time(plain.index(" ms"), 100))) == plain, "nor is one torn in two"
    free = plain.index("  ") + 1
    assert text(descriptions.axis(WHOLE, 100, WHOLE.time(free + 0.5, 100)))[free] == "▼"


def test_the_part_on_screen_is_brought_out_however_short() -> None:
    cover = np.full(50, 0.5, np.float32)
    assert len(descriptions.overview(cover, WHOLE)) == 1
    assert [len(run[0]) for run in descriptions.overview(cover, WHOLE.at(200 * MS, 1000))] == [25, 1, 24]

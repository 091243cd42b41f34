from __future__ import annotations

import pytest

from gputop.render.step_bar import step_lines
from gputop.text.units import step_time
from tests.tui.found import line_text

STEP = {"input": 0.1, "h2d": 0.0, "compute": 0.2, "collectives": 0.05, "d2h": 0.0, "launch": 0.001, "host": 0.04,
        "idle": 0.009}


@pytest.mark.parametrize("width", [30, 60, 77, 99])
def test_the_bar_fills_its_room_in_proportion(width: int) -> None:
    bar, legend = step_lines(STEP, width)
    cells = sum(len(text) for text, _ in bar)
    assert cells == width - 1
    assert sum(len(text) for text, _ in legend) <= width
    blocks = [len(text) for text, _ in bar[1:]]
    assert blocks[1] == max(blocks) and abs(blocks[0] - sum(blocks) * 0.25) <= 1


def test_the_largest_part_is_named_first_and_what_is_nothing_not_at_all() -> None:
    text = line_text(step_lines(STEP, 90)[1])
    assert text.index("compute 50%") < text.index("input wait 25%")
    assert "H2D" not in text and "D2H" not in text


@pytest.mark.parametrize("width", [132, 200])
def test_the_legend_stands_beside_the_bar_where_it_has_room(width: int) -> None:
    (line,) = step_lines(STEP, width)
    text = line_text(line)
    assert len(text.rstrip()) < len(text) <= width and text.count("█") >= 30
    assert text.index("compute 50%") < text.index("input wait 25%") < text.index("other idle 2%")


def test_no_step_or_no_room_is_no_bar() -> None:
    assert step_lines({}, 100) == [] and step_lines(STEP, 20) == []


def test_the_median_stands_beside_a_mean_that_differs_by_a_tenth() -> None:
    assert step_time(0.643, 0.295) == "643 ms (median 295)" and step_time(1.2, 0.9) == "1.20 s (median 900 ms)"
    assert step_time(0.1, 0.095) == step_time(0.1, None) == "100 ms"
    assert step_lines({"compute": 0.643}, 120, 0.295)[0][0][0] == " Step time 643 ms (median 295) "

"""Shares and ranges as cells."""

from __future__ import annotations

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st
from rich.cells import cell_len

from gputop.timeline.model import KINDS
from gputop.tui.timeline import cells
from gputop.tui.timeline.cells import (
    BAR_CELLS,
    FULL,
    CellLine,
    bar_cells,
    draw_lines,
    least_bar_ns,
    put_bar,
    touched_cells,
)
from gputop.tui.timeline.viewport import View


def shares(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def kinds(n: int, name: str = "compute") -> np.ndarray:
    return np.full(n, KINDS.index(name), np.uint8)


def lane(cover: np.ndarray, of: np.ndarray, lines: int = 1, causes: np.ndarray | None = None,
         rules: np.ndarray | None = None, full: int = FULL) -> list[CellLine]:
    cells = len(cover) // 2
    causes = np.zeros((1, cells), np.uint8) if causes is None else causes[None]
    [drawn] = draw_lines(cover[None], of[None], [lines], causes, np.zeros(cells, np.bool_) if rules is None else rules,
                         full)
    return drawn


def drawn(cover: np.ndarray, lines: int = 1, **more: object) -> list[str]:
    return ["".join(line.glyphs) for line in lane(cover, kinds(len(cover)), lines, **more)]  # type: ignore[arg-type]


def test_the_height_is_the_share_and_a_little_is_not_nothing() -> None:
    cover = np.repeat(shares(0, 0.001, 0.25, 0.5, 0.75, 0.999, 1), 2)
    assert drawn(cover) == [" ▁▂▄▅▇▇"]
    assert drawn(cover, full=8) == [" ▁▂▄▆██"]
    assert drawn(np.repeat(shares(0.1, 0.5, 1), 2), lines=2) == ["  ▇", "▂██"]


def test_halves_of_a_cell_that_differ_are_seen() -> None:
    assert drawn(shares(1, 0, 0, 1, 1, 0.4, 0, 0.5)) == ["▌▐▙▗"]


def test_nothing_hangs_over_what_ends_a_line_below() -> None:
    assert drawn(shares(0.1, 0.6), lines=2)[0] == " "


def test_the_kind_of_a_cell_is_that_of_its_fuller_half() -> None:
    cover, of = shares(1, 0.2, 0.2, 1), np.array([1, 2, 1, 2], np.uint8)
    line = lane(cover, of)[0]
    assert [KINDS[code & cells.KIND_MASK] for code in line.codes.tolist()] == ["compute", "collective"]


def test_rules_and_causes_show_where_nothing_is() -> None:
    cover = np.repeat(shares(0, 1, 0), 2)
    line = lane(cover, kinds(6), rules=np.array([True, True, False]), causes=np.array([0, 0, 3], np.uint8))[0]
    assert "".join(line.glyphs) == "│▇ "
    plain = lane(cover, kinds(6))[0]
    for cell in range(3):
        assert cells.style_of(int(line.codes[cell])) != cells.style_of(int(plain.codes[cell])) or cell == 0


def test_rows_of_different_heights_are_drawn_at_once_as_alone() -> None:
    rng = np.random.default_rng(1)
    cover = rng.random((5, 40)).astype(np.float32) ** 3
    of = rng.integers(1, 10, (5, 40)).astype(np.uint8)
    causes = rng.integers(0, 4, (5, 20)).astype(np.uint8)
    rules = rng.random(20) < 0.2
    heights = [1, 3, 2, 1, 3]
    together = draw_lines(cover, of, heights, causes, rules)
    for i, height in enumerate(heights):
        alone = lane(cover[i], of[i], height, causes[i], rules)
        assert len(alone) == height
        for one, other in zip(together[i], alone, strict=True):
            assert one.glyphs == other.glyphs and (one.codes == other.codes).all()


def test_segments_are_runs_of_one_style() -> None:
    line = lane(np.repeat(shares(1, 1, 0, 1), 2), kinds(8))[0]
    assert [s.text for s in line.segments()] == ["▇▇", " ", "▇"]
    assert CellLine([], np.empty(0, np.int32)).segments() == []


@given(st.integers(-2000, 12_000), st.integers(0, 14_000), st.integers(1, 220))
def test_cells_of_a_range(start: int, length: int, cells: int) -> None:
    view = View(1_000, 11_000, (0, 20_000))
    end = start + length
    first, last = bar_cells(view, cells, start, end)
    low, high = touched_cells(view, cells, start, end)
    assert last - first < BAR_CELLS or length >= least_bar_ns(view, cells), "none that gets a bar is left out"
    if last > first:  # these cells lie within the range, but for an eighth at either end
        edge = view.span_ns / cells / 8 + 1
        assert first >= 0 and last <= cells
        assert start - edge <= view.start_ns + first * view.span_ns / cells or first == 0
        assert end + edge >= view.start_ns + last * view.span_ns / cells or last == cells
    if view.start_ns <= start < view.end_ns:
        assert 0 <= low < high <= cells, "even the shortest is to be seen"


def blank(cells: int, lines: int = 1) -> list[CellLine]:
    return [CellLine([" "] * cells, np.zeros(cells, np.int32)) for _ in range(lines)]


def test_a_bar_has_its_name_as_far_as_it_fits() -> None:
    [line] = blank(20)
    put_bar([line], 2, 14, "sgemm_128x64_nn", 1)
    assert "".join(line.glyphs) == "  ▏sgemm_128x…      "
    line.put(14, "▇▇▇▇▆", 1)
    put_bar([line], 14, 18, "sgemm", 1)
    assert "".join(line.glyphs)[14:] == "▇▇▇▇▆ ", "a letter and an ellipsis tell nothing, an empty bar looks like a gap"
    assert line.codes[2] & cells.BAR and not line.codes[1]


def test_bars_on_several_lines_leave_a_gap_above_and_name_themselves_once() -> None:
    lines = blank(12, 3)
    put_bar(lines, 0, 12, "sgemm", 1)
    assert ["".join(line.glyphs) for line in lines] == ["▆▇▇▇▇▇▇▇▇▇▇▇", "▏sgemm      ", "▏           "]


@given(st.text(max_size=30), st.integers(3, 20), st.integers(-5, 15))
@example("\U0001f3fb", 3, 0)
def test_names_of_any_letters_keep_the_width(name: str, length: int, at: int) -> None:
    from gputop.text.units import printable

    [line] = blank(16)
    put_bar([line], at, at + length, printable(name), 1)
    assert len(line.glyphs) == 16
    if at >= 0 and at + length <= 16:
        assert cell_len("".join(line.glyphs)) == 16


def test_every_code_has_a_style() -> None:
    for kind in range(len(KINDS)):
        for cause in range(9):
            for flags in (0, cells.RULED, cells.BAR, cells.BAR | cells.SELECTED, cells.SELECTED, cells.LINKED,
                          cells.BAR | cells.LINKED, cells.ROW, cells.ROW | cells.RULED):
                style = cells.style_of(kind | cause << cells.CAUSE_SHIFT | flags)
                assert style.color is not None and style.bgcolor is not None

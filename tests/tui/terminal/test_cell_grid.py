"""What is sent must leave the terminal with what was drawn, whatever was drawn, and be short."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gputop.tui.terminal.cell_grid import CellGrid
from gputop.tui.terminal.escape_codes import cursor_to, move, sgr_transition

WIDTH, HEIGHT = 12, 4
TEXTS = st.text(st.sampled_from("ab z▀█·…漢é\u0301⚡"), min_size=1, max_size=8)
SGRS = st.sampled_from(["", "1", "7", "38;2;1;2;3", "1;38;2;1;2;3;48;5;17", "31;44", "48;2;9;9;9", "4;90"])
WRITES = st.lists(st.tuples(st.integers(0, HEIGHT), st.integers(0, WIDTH - 1), SGRS, TEXTS), max_size=6)


def drawn(writes: list[tuple[int, int, str, str]]) -> str:
    """As rich draws: the address, each text with its whole style and a reset after it."""
    return "".join(f"\x1b[{y + 1};{x + 1}H" + (f"\x1b[{style}m{text}\x1b[0m" if style else text)
                   for y, x, style, text in writes)


def styled_cells(cells: CellGrid) -> list[list[tuple[str, object]]]:
    """What can be seen: the color of a space cannot."""
    from gputop.tui.terminal.cell_grid import _blank
    from gputop.tui.terminal.escape_codes import parse_sgr

    return [[(char, parse_sgr(_blank(style) if char == " " else style)) for char, style in zip(*rows, strict=True)]
            for rows in zip(cells._chars, cells._styles, strict=True)]


@given(st.lists(st.tuples(WRITES, st.booleans()), min_size=1, max_size=6))
def test_a_terminal_that_gets_the_updates_shows_what_was_drawn(frames: list[tuple[list, bool]]) -> None:
    ours, theirs = CellGrid(WIDTH, HEIGHT), CellGrid(WIDTH, HEIGHT)
    for writes, sent in frames:
        ours.feed(drawn(writes))
        if sent:  # the others are dropped
            theirs.feed(ours.update())
    theirs.feed(ours.update())
    assert styled_cells(theirs) == styled_cells(ours)
    assert ours.update() == ""


WIDE = 40  # columns: where moving pays
CELL = st.tuples(st.sampled_from(["38;2;1;2;3", "38;2;4;5;6;48;2;9;9;9", "1;31", ""]), st.sampled_from("▀ab "))
LANE = st.lists(CELL, min_size=WIDE, max_size=WIDE)


@given(LANE, st.integers(0, WIDE - 12), st.integers(1, 6), st.integers(0, 12), st.lists(CELL, min_size=6, max_size=6))
def test_a_lane_that_moved_is_moved_by_the_terminal(cells: list, begin: int, by: int, beyond: int, new: list) -> None:
    def put(row: list) -> str:
        return drawn([(1, x, style, char) for x, (style, char) in enumerate(row)])

    ours, theirs = CellGrid(WIDE, 3), CellGrid(WIDE, 3)
    ours.feed(put(cells))
    theirs.feed(ours.update())
    end = max(begin + by, WIDE - beyond)
    moved = [*cells[:begin], *cells[begin + by:end], *new[:by], *cells[end:]]
    ours.feed(put(moved))
    theirs.feed(ours.update())
    assert styled_cells(theirs) == styled_cells(ours)


@pytest.mark.parametrize("by", [1, 6])
def test_moving_a_lane_costs_its_new_cells_only(by: int) -> None:
    def lane(first: int) -> list[tuple[int, int, str, str]]:
        return [(1, 4 + x, f"38;2;{(first + x) * 37 % 251};80;80;48;2;{(first + x) * 53 % 241};40;40", "▀")
                for x in range(30)] + [(1, 36, "1", "45%")]

    cells, terminal = CellGrid(WIDE, 3), CellGrid(WIDE, 3)
    cells.feed(drawn(lane(0)))
    terminal.feed(cells.update())
    cells.feed(drawn(lane(by)))
    update = cells.update()
    terminal.feed(update)
    assert styled_cells(terminal) == styled_cells(cells)
    count = by if by > 1 else ""
    assert update.startswith(f"\x1b[2;5H\x1b[{count}P\x1b[{30 - by}C\x1b[{count}@") and len(update) < 50 + 36 * by


def test_lanes_that_moved_together_are_moved_one_below_the_other() -> None:
    def lanes(first: int) -> list[tuple[int, int, str, str]]:
        return [(y, 2 + x, f"38;2;{(first + x) * 37 % 251};80;{y}", "▀") for y in (0, 1, 3) for x in range(30)]

    cells, terminal = CellGrid(WIDE, 5), CellGrid(WIDE, 5)
    cells.feed(drawn(lanes(0)))
    terminal.feed(cells.update())
    cells.feed(drawn(lanes(2)))
    update = cells.update()
    terminal.feed(update)
    assert styled_cells(terminal) == styled_cells(cells)
    assert update.startswith("\x1b[1;3H\x1b[2P\x1b[B\x1b[2P\x1b[2B\x1b[2P\x1b[1;31H\x1b[2@\x1b[B\x1b[2@\x1b[2B\x1b[2@")


def test_the_cursor_is_moved_by_the_shortest_sequence() -> None:
    places = [(y, x) for y in (0, 1, 8, 12) for x in (0, 1, 9, 12, 38)]
    for y, x in places:
        for to_y, to_x in places:
            cells = CellGrid(40, 20)
            cells.feed(cursor_to(y, x) + (way := move(y, x, to_y, to_x)))
            assert cells.cursor == (to_x, to_y) and len(way) <= len(cursor_to(to_y, to_x))
    assert (move(3, 12, 7, 10), move(3, 12, 3, 10), move(-1, -1, 2, 4)) == ("\x1b[4B\b\b", "\b\b", "\x1b[3;5H")


def test_spans_of_one_style_are_drawn_at_once_and_bold_ends_without_naming_the_colors_again() -> None:
    cells = CellGrid(40, 4)
    cells.update()
    cells.feed(drawn([(y, x, style, text) for y in range(3)
                      for x, style, text in ((0, "1;38;2;9;9;9", "45%"), (8, "38;2;5;5;5", "12.5"))]))
    assert cells.update() == (
        "\x1b[1;9H\x1b[38;2;5;5;5m12.5\x1b[2;9H12.5\x1b[3;9H12.5"
        "\x1b[1H\x1b[1;38;2;9;9;9m45%\x1b[2H45%\x1b[3H45%\x1b[m\x1b[3;13H")
    assert sgr_transition("1;38;2;9;9;9;48;2;1;1;1", "38;2;9;9;9;48;2;1;1;1") == "\x1b[22m"


def test_only_what_differs_is_sent_and_with_the_fewest_codes() -> None:
    cells = CellGrid(40, 3)
    cells.feed("\x1b[H\x1b[1;38;2;9;9;9;48;2;1;1;1mGPU 0  45%\x1b[0m")
    cells.update()
    cells.feed("\x1b[H\x1b[1;38;2;9;9;9;48;2;1;1;1mGPU 0  46%\x1b[0m")
    assert cells.update() == "\x1b[1;9H\x1b[1;38;2;9;9;9;48;2;1;1;1m6\x1b[m\x1b[1;11H"
    cells.feed("\x1b[2H\x1b[38;2;9;9;9;48;2;1;1;1ma\x1b[0m\x1b[38;2;8;8;8;48;2;1;1;1mb\x1b[0m")
    update = cells.update()
    assert "\x1b[38;2;8;8;8mb" in update, "the ground stays"
    cells.feed("\x1b[2H\x1b[38;2;9;9;9;48;2;1;1;1ma\x1b[0m\x1b[38;2;8;8;8;48;2;1;1;1mb\x1b[0m")
    assert cells.update() == ""


def test_modes_the_clipboard_and_the_bell_pass_in_order_and_frames_are_bracketed_where_that_is_known() -> None:
    cells = CellGrid(10, 2)
    cells.feed("\x1b[?1049h\x1b[?25l\x1b]52;c;Zm9v\x07\x07")
    assert cells.update().startswith("\x1b[?1049h\x1b[?25l\x1b]52;c;Zm9v\x07\x07\x1b[1H")
    cells.feed("\x1b[?2026h\x1b[Hx\x1b[?2026l")
    update = cells.update()
    assert update.startswith("\x1b[?2026h\x1b[1H") and update.endswith("\x1b[?2026l")


def test_after_a_resize_and_when_asked_everything_is_drawn_again() -> None:
    cells = CellGrid(10, 2)
    cells.feed("\x1b[Habc\x1b[2Hdef")
    first = cells.update()
    cells.forget()
    assert cells.update() == first
    cells.resize(4, 1)
    cells.feed("\x1b[Habcdefg\x1b[9;9Hout of sight")
    assert re.sub(r"\x1b\[[\d;]*[Hm]", "", cells.update()) == "abcd"


def test_a_row_with_characters_of_unsure_width_is_sent_whole() -> None:
    cells = CellGrid(10, 1)
    cells.feed("\x1b[H漢字 abc")
    cells.update()
    cells.feed("\x1b[1;7Hx")
    assert "漢字 axc" in cells.update()
    cells.feed("\x1b[Habcd efg")
    assert "abcd efg" in cells.update()
    cells.feed("\x1b[1;1HA")
    assert re.sub(r"\x1b\[[\d;]*[Hm]", "", cells.update()) == "A", "and is an ordinary one again"


def test_what_a_list_points_with_is_one_cell_everywhere() -> None:
    cells = CellGrid(10, 1)
    cells.feed("\x1b[H› 1")
    cells.update()
    cells.feed("\x1b[H› 2")
    assert cells.update().startswith("\x1b[1;3H2\x1b["), "the row is not one of unsure width"


@pytest.mark.parametrize("torn", ["\x1b", "\x1b[", "\x1b[38;2", "\x1b]52;c;abc"])
def test_rubbish_does_no_harm(torn: str) -> None:
    cells = CellGrid(10, 2)
    cells.feed(torn)
    cells.feed("\x1b[2Hok")
    assert "ok" in cells.update()

"""Lines that are drawn anew each second; the line of keys does not work at each sample."""

from __future__ import annotations

import gc
import weakref

import pytest
from rich.segment import Segment
from textual.strip import Strip

from gputop.tui.widgets.cached_lines import DrawnLine, KeyLine
from tests.tui.found import line_text

PARTS = [Segment("GPU 0 "), Segment("45%"), Segment("  12.5")]


def test_a_line_is_freed_without_the_garbage_collector() -> None:
    gc.disable()
    try:
        line = DrawnLine(PARTS, 15)
        assert line.divide([15]) == [line]
        assert line.crop(0, 15) is line
        gone = weakref.ref(line)
        del line
        assert gone() is None
    finally:
        gc.enable()


def test_it_is_cut_as_any_strip() -> None:
    line, strip = DrawnLine(PARTS, 15), Strip(PARTS, 15)
    for cuts in ([15], [6, 15], [3, 6, 9], [20], [4, 20]):
        assert [part.text for part in line.divide(cuts)] == [part.text for part in strip.divide(cuts)]
    for start, end in ((0, 15), (3, 8), (0, 6), (9, 99), (15, 20), (8, 3)):
        assert (line.crop(start, end).text, line.crop(start, end).cell_length) == (
            strip.crop(start, end).text, strip.crop(start, end).cell_length)


def test_the_same_keys_are_laid_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    line, shown = KeyLine(), []
    monkeypatch.setattr(line, "show", shown.append)
    for width in (80, 80, 12, 12):
        line.show_keys([("c", "capture"), ("q", "quit"), ("h", "help")], width)
    assert [line_text(lines[0]) for lines in shown] == [" c capture  q quit  h help  ", " q quit  h help  "]

"""Numbers of a file's lines in the trace."""

from __future__ import annotations

import numpy as np

from gputop.trace.builder import TraceBuilder
from gputop.trace.int_map import IntMap
from gputop.trace.model import I64
from gputop.trace.readers.xspace.events import LineNumbers
from gputop.trace.readers.xspace.xplane import Chunk, Decoded, Losses, PlaneLines, XLine, XPlane

EMPTY = np.empty(0, np.int64)
PLANE = XPlane("/device:GPU:0", {}, {}, {}, [], False)


def line(number: int, whole: XLine | None = None) -> XLine:
    return XLine(number, f"Stream #{number}", 0, EMPTY, EMPTY, whole)


def decoded(lines: list[XLine], column: I64 | None = None) -> Decoded:
    source = PlaneLines(PLANE, lines, IntMap({}), ())
    return Decoded(source, lines, Chunk(EMPTY, EMPTY, EMPTY, line=column), Losses())


def test_a_line_of_a_later_recording_is_that_of_an_earlier_one() -> None:
    builder = TraceBuilder()
    numbers = LineNumbers(builder, "node", 3)
    numbers.begin_recording()
    first = line(1)
    assert numbers.of(decoded([line(1, first)]), 2) == numbers.of(decoded([line(1, first)]), 2) == 0, "two of its parts"
    assert numbers.of(decoded([line(1)]), 2) == 1, "another line of that id in this recording"
    numbers.begin_recording()
    assert numbers.of(decoded([line(1)]), 2) == 1 and numbers.of(decoded([line(7)]), 2) == 2
    assert [(own.host, own.gpu, own.name, own.rank) for own in builder.lines] == [
        ("node", 2, "Stream #1", 3), ("node", 2, "Stream #1", 3), ("node", 2, "Stream #7", 3)]


def test_events_of_several_lines_have_the_number_of_their_own() -> None:
    builder = TraceBuilder()
    numbers = LineNumbers(builder, "node", 0)
    of_events = numbers.of(decoded([line(4), line(9)], np.array([1, 0, 1])))
    assert isinstance(of_events, np.ndarray) and of_events.tolist() == [1, 0, 1]
    assert [own.gpu for own in builder.lines] == [-1, -1]

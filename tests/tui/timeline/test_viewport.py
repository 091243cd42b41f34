"""Which stretch of a trace is shown, and what stands on the axis."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gputop.tui.timeline.viewport import MIN_SPAN_NS, View, base_ns, every, moment, tick_step_ns, ticks

WINDOW = (1_000, 10_001_000)
WHOLE = View.whole(WINDOW)


@given(st.lists(st.tuples(st.sampled_from(["at", "zoom", "fit", "centered", "showing"]),
                          st.floats(-20, 20), st.integers(-5_000_000, 20_000_000), st.integers(1, 12_000_000))))
def test_no_change_leaves_the_window(changes: list[tuple[str, float, int, int]]) -> None:
    view = WHOLE
    for name, number, at, length in changes:
        match name:
            case "at":
                view = view.at(at, length)
            case "zoom":
                view = view.zoom(2**number, at)
            case "fit":
                view = view.fit(at, at + length)
            case "centered":
                view = view.centered(at)
            case "showing":
                view = view.showing(at, at + length)
        assert WINDOW[0] <= view.start_ns < view.end_ns <= WINDOW[1]
        assert view.span_ns >= MIN_SPAN_NS


def test_zooming_keeps_the_moment_under_the_pointer_in_its_column() -> None:
    view = WHOLE
    for _ in range(8):
        zoomed = view.zoom(0.5, 3_000_000)
        assert zoomed.span_ns == pytest.approx(view.span_ns / 2, abs=1)
        assert abs(zoomed.column(3_000_000, 100) - WHOLE.column(3_000_000, 100)) <= 1
        view = zoomed
    for _ in range(20):
        view = view.zoom(2, 3_000_000)
    assert view == WHOLE


def test_a_place_beyond_the_end_is_the_end_and_keeps_its_length() -> None:
    assert WHOLE.at(500_000, 1_000_000).start_ns == 500_000
    assert WHOLE.at(99_000_000, 1_000_000).end_ns == WINDOW[1]
    assert (WHOLE.at(-5, 1_000_000).start_ns, WHOLE.at(-5, 1_000_000).span_ns) == (WINDOW[0], 1_000_000)


def test_showing_moves_only_where_it_must() -> None:
    view = WHOLE.at(1_000_000, 1_000_000)
    assert view.showing(1_200_000, 1_300_000) is view
    moved = view.showing(5_000_000, 5_100_000)
    assert moved.span_ns == view.span_ns and moved.column(5_050_000, 100) == 50
    assert view.showing(4_000_000, 8_000_000).span_ns > 4_000_000, "what is longer than the view is fitted"


@pytest.mark.parametrize("span_ns", [200, 3_000, 47_123, 2_000_000, 999_999_999, 3_600_000_000_000])
@pytest.mark.parametrize("columns", [10, 60, 170])
@pytest.mark.parametrize("start_ns", [0, 123_456_789_012])
def test_tick_labels_never_touch_and_are_round(span_ns: int, columns: int, start_ns: int) -> None:
    window = (0, 10**13)
    view = View.whole(window).at(start_ns, span_ns)
    found = ticks(view, columns)
    assert all(column + len(label) < following for (column, label), (following, _) in pairwise(found))
    assert all(0 <= column < columns - len(label) for column, label in found)
    assert len({label for _, label in found}) == len(found)
    step = tick_step_ns(view.span_ns, columns)
    assert step % 10 ** (len(str(step)) - 1) == 0 and base_ns(view, columns) % step == 0


def test_ticks_say_where_they_are() -> None:
    view = View.whole((500, 1_000_000_500))
    assert ticks(view, 100) == [(20 * i, f"{200 * i} ms") for i in range(5)]
    far = View.whole((0, 10**10)).at(7_350_000_000, 100_000)
    assert base_ns(far, 100) <= 7_350_000_000 < base_ns(far, 100) + 20 * 100_000
    assert all(label.endswith("µs") for _, label in ticks(far, 100))


def test_a_moment_is_as_exact_as_what_it_is_said_of() -> None:
    assert moment(0) == "+0 s"
    assert moment(1_203_456_789, 1_000) == "+1.203 457 s"
    assert moment(1_203_456_789, 1) == "+1.203 456 789 s"
    assert moment(3_250_000, 100_000) == "+3.2 ms"
    assert moment(950, 1) == "+950 ns"


def test_marks_are_thinned_to_round_counts() -> None:
    assert [every(apart, 4) for apart in (10, 4, 3.9, 1, 0.5, 0.05)] == [1, 1, 2, 5, 10, 100]

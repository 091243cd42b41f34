from __future__ import annotations

import pytest

from gputop.session.event_log import LoggedEvent
from gputop.tui.monitor.columns import ACTIVITY
from gputop.tui.monitor.lanes import LaneWindow, TimeView
from gputop.tui.monitor.time_axis import (
    SIGNS,
    append_notes,
    axis,
    events_in_words,
    gpus_text,
    legend,
    metric_name,
    title,
)
from tests.fakes import START_S, gpu_sample
from tests.records import replace
from tests.tui.found import line_text as text

WINDOW = LaneWindow.of(TimeView(5.0), START_S + 299, 60)  # 300 s, the newest slice from 295 s on


def mark(kind: str, begin: float, end: float | None = None, what: str = "it", gpu: str = "") -> LoggedEvent:
    return LoggedEvent(kind, START_S + begin, START_S + (begin if end is None else end), what, gpu)  # type: ignore[arg-type]


def test_a_window_knows_its_columns() -> None:
    assert WINDOW.column(START_S) == 0 and WINDOW.column(START_S + 299.9) == 59 and WINDOW.column(START_S - 0.1) == -1
    assert WINDOW.begin_s(59) == START_S + 295
    assert LaneWindow.of(TimeView(5.0, START_S + 100), START_S + 299, 20).begin_s(19) == START_S + 100


def test_ticks_count_back_from_now_and_do_not_move() -> None:
    shown = text(axis(WINDOW, (), True, None))
    assert len(shown) == 60
    assert [shown.index(label) for label in ("┊-4m", "┊-3m", "┊-2m", "┊-1m")] == [11, 23, 35, 47]
    later = LaneWindow.of(TimeView(5.0), START_S + 304, 60)
    assert text(axis(later, (), True, None)) == shown


def test_scrolled_back_ticks_are_times_of_day() -> None:
    shown = text(axis(WINDOW, (), False, None))
    assert "┊08:01" in shown and shown.index("┊08:01") == WINDOW.column(START_S + 60)
    fine = LaneWindow.of(TimeView(0.5, START_S + 59), START_S + 299, 80)
    assert "┊08:00:40" in text(axis(fine, (), False, None))


def test_marks_are_letters_with_lines_for_as_long_as_they_last() -> None:
    shown = text(axis(WINDOW, [mark("capture", 100, 120), mark("xid", 180), mark("thermal", -50, 12)], True, None))
    assert shown[20:25] == "C━━━━" and shown[36] == "X" and shown[:3] == "T══"
    assert len(shown) == 60


def test_the_graver_mark_is_seen_and_no_line_hides_a_beginning() -> None:
    shown = text(axis(WINDOW, [mark("xid", 100), mark("finding", 100), mark("capture", 90, 130), mark("finding", 120)],
                      True, None))
    assert shown[18:27] == "C━X━━━F━━"


def test_a_power_limit_reached_all_day_leaves_the_times_to_be_read() -> None:
    shown = text(axis(WINDOW, [mark("power", -500, 300)], True, None))
    assert shown.startswith("P──") and "┊-2m" in shown and shown.endswith("─")


def test_a_label_is_left_out_rather_than_torn() -> None:
    shown = text(axis(WINDOW, [mark("finding", 5.0 * 36)], True, START_S + 5.0 * 24))
    assert "-2m" not in shown and "-3m" not in shown and "-4m" in shown
    assert shown[24] == "▲" and shown[36] == "F"


def test_what_is_not_on_screen_is_not_drawn() -> None:
    outside = [mark("xid", -10), mark("xid", 310), mark("power", -20, -10), mark("thermal", 400, 500)]
    assert text(axis(WINDOW, outside, True, START_S - 100)) == text(axis(WINDOW, (), True, None))


def test_every_kind_has_a_letter_of_its_own() -> None:
    assert len({letter for letter, *_ in SIGNS.values()}) == len(SIGNS)


def test_the_legend_names_only_what_is_there() -> None:
    assert text(legend([mark("capture", 1), mark("xid", 2), mark("xid", 3)])).split() == ["X", "Xid", "C", "capture"]
    assert legend(()) == []


def test_under_the_cursor_words_say_what_and_where() -> None:
    axis_notes = text(events_in_words([mark("thermal", 1, what="hw thermal", gpu=str(g)) for g in (0, 1, 2, 5)]
                      + [mark("xid", 1, what="Xid 79", gpu="3"), mark("capture", 1, what="capture of h:1\x1b[2J")]))
    assert axis_notes == " X GPU 3: Xid 79  T GPU 0-2,5: hw thermal  C capture of h:1\ufffd[2J "
    assert gpus_text({"0:1", "3", "4"}) == "GPU 3-4,0:1"


@pytest.mark.parametrize(("width", "end"), [(28, "…"), (100, " ")])
def test_what_stands_beside_the_axis_is_cut_to_the_line(width: int, end: str) -> None:
    axis_notes = legend([mark(kind, 1) for kind in SIGNS])
    line = text(append_notes([("    ", SIGNS["xid"][2]), ("x" * 10, SIGNS["xid"][2])], axis_notes, 16, width))
    assert len(line) == width and line.endswith(end)


def test_the_title_fits_and_names_metric_and_time() -> None:
    assert title("SM active", 240, None, 40) == "SM active, last 4 min"
    assert title("SM active", 240, None, 15) == "SM active 4 min"
    assert title("Power", 60, START_S + 60, 60) == "Power, 08:00:00 to 08:01:00 (end: back to now)"
    fine, coarse = gpu_sample(0, 1), gpu_sample(1, 1, fine=False)
    assert metric_name(ACTIVITY, [fine, coarse]) == "SM active (~ coarse)"
    assert metric_name(ACTIVITY, [coarse]) == "Util (coarse)"
    assert metric_name(ACTIVITY, [fine, replace(coarse, state="lost")]) == "SM active"
    assert metric_name("pcie_rx_bytes_per_s", [fine]) == "PCIe RX GB/s"

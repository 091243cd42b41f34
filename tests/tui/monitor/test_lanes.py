from __future__ import annotations

import itertools
import math

from gputop.core.samples import GpuSample
from gputop.render.palette import SHADES, STEPS, level_rgb
from gputop.render.time_slices import slice_for
from gputop.telemetry.history import History
from gputop.tui.monitor.lanes import LaneCache, LaneSignal, TimeView, blank_column, column
from tests.fakes import START_S, history_of, node_sample
from tests.records import replace

BUSY_HALF_OF_THE_TIME = [1.0] + [0.5] * 7  # share of samples reaching each of 8 levels
HALF_BUSY = [1.0] * 4 + [0.0] * 4
SM = LaneSignal("GPU-test-0", ("sm_active",))


def _luminance(rgb: tuple[int, int, int]) -> float:
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in (v / 255 for v in rgb)]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_one_row_shows_the_mean_as_height() -> None:
    assert [column(1, mean, [1.0] * 8)[0][0] for mean in (0.0, 0.3, 0.5, 1.0)] == ["▁", "▂", "▄", "█"]


def test_a_measured_zero_is_not_the_blank_of_no_sample() -> None:
    for rows in (1, 2, 4):
        assert column(rows, 0.0, [1.0] + [0.0] * 7) != blank_column(rows)


def test_any_activity_stands_out_and_a_measured_zero_is_dim() -> None:
    ground = _luminance(level_rgb(0, 0))
    for rows in (1, 2, 3, 4, 8):
        little, zero = (column(rows, mean, [1.0] + [0.0] * 7)[-1] for mean in (0.01, 0.0))
        colors = [[color.triplet for color in (cell[1].color, cell[1].bgcolor) if color is not None and color.triplet]
                  for cell in (little, zero)]
        most_of_little, most_of_zero = (max(_luminance(tuple(triplet)) for triplet in of) for of in colors)
        assert (most_of_little + 0.05) / (ground + 0.05) >= 3 and most_of_zero < 0.7 * most_of_little
        assert zero[0] == "▁" and little[0].strip()


def test_a_low_bar_has_no_ghost_of_its_own_level_behind_it() -> None:
    lowest = column(2, 0.04, [1.0] + [0.0] * 7)[-1]
    assert lowest[1].bgcolor is not None and lowest[1].bgcolor.triplet == level_rgb(0, 0)


def test_half_busy_and_busy_half_of_the_time_differ() -> None:
    for rows in (2, 3, 4):
        assert column(rows, 0.5, HALF_BUSY) != column(rows, 0.5, BUSY_HALF_OF_THE_TIME)


def test_slice_for_covers_the_span() -> None:
    assert slice_for(240, 57) == 5.0
    assert slice_for(240, 240) == 1.0
    assert slice_for(1e9, 10) == 600.0


def test_only_the_newest_columns_change_within_a_slice() -> None:
    history, lane, view = history_of(60), LaneCache(), TimeView(slice_s=5.0)
    assert lane.update(history, SM, view, 20, 1) == 20
    before = list(lane.columns)
    history.append(node_sample(60, 1))  # START_S is a multiple of 5 s: a new slice begins
    blank = 8  # before the first sample
    assert before[:blank] == [blank_column(1)] * blank
    assert lane.update(history, SM, view, 20, 1) == 20 - (blank - 1)
    assert list(lane.columns)[:-2] == before[1:-1]
    for tick in range(61, 71):
        history.append(node_sample(tick, 1))
    lane.update(history, SM, view, 20, 1)
    before = list(lane.columns)
    changed = []
    for tick in (71, 72, 73, 74):  # the sawtooth rises from 50 to 70%: the bar of the newest slice grows
        history.append(node_sample(tick, 1))
        changed.append(lane.update(history, SM, view, 20, 1))
    assert set(changed) == {0, 1}
    assert list(lane.columns)[:-1] == before[:-1] and lane.columns[-1] != before[-1]


def test_a_cached_lane_equals_one_drawn_at_once() -> None:
    history, grown = History(), LaneCache()
    view = TimeView(slice_s=2.0)
    for tick in range(100):
        history.append(node_sample(tick, 1))
        grown.update(history, SM, view, 30, 4)
    at_once = LaneCache()
    at_once.update(history, SM, view, 30, 4)
    assert list(grown.columns) == list(at_once.columns)
    assert math.isclose(grown.mean() or 0, at_once.mean() or 1)


def test_of_two_directions_the_busier_is_drawn() -> None:
    history = history_of(20)
    view = TimeView(slice_s=1.0, end_s=START_S + 19)
    both, rx = LaneCache(), LaneCache()
    both.update(history, LaneSignal("GPU-test-0", ("pcie_rx_bytes_per_s", "pcie_tx_bytes_per_s")), view, 20, 1)
    rx.update(history, LaneSignal("GPU-test-0", ("pcie_rx_bytes_per_s",)), view, 20, 1)
    assert both.mean() >= rx.mean()


def test_without_a_history_the_lane_is_blank() -> None:
    lane = LaneCache()
    assert lane.update(None, LaneSignal("x", ("sm_active",)), TimeView(), 7, 2) == 7
    assert list(lane.columns) == [blank_column(2)] * 7
    assert lane.mean() is None


def test_without_a_known_full_scale_there_is_no_level() -> None:
    def no_limit(gpu: GpuSample, tick: int) -> GpuSample:
        return replace(gpu, readings={m: r for m, r in gpu.readings.items() if m != "power_limit_w"})

    lane = LaneCache()
    lane.update(history_of(20, change=no_limit), LaneSignal("GPU-test-0", ("power_w",)), TimeView(slice_s=1.0), 10, 1)
    assert list(lane.columns) == [blank_column(1)] * 10 and lane.mean() is None


def test_a_sample_fills_its_interval_and_no_more() -> None:
    history, lane, signal = History(), LaneCache(), replace(SM, interval_s=5.0)
    for tick in (0, 5, 10, 15, 30, 35):  # every 5 s, with a gap of 15 s
        history.append(node_sample(tick, 1))
        lane.update(history, signal, TimeView(1.0), 40, 1)
    whole = LaneCache()
    whole.update(history, signal, TimeView(1.0), 40, 1)
    assert lane.columns == whole.columns
    blank = [column == blank_column(1) for column in lane.columns]
    assert blank[-1 - 35:] == [False] * 16 + [True] * 7 + [False] * 13


def test_the_ramp_rises_in_lightness_so_that_it_reads_without_hue() -> None:
    light = [_luminance(level_rgb(step)) for step in range(STEPS)]
    assert all(a < b for a, b in itertools.pairwise(light))


def test_a_shade_fades_from_the_ground() -> None:
    light = [_luminance(level_rgb(STEPS - 1, shade)) for shade in range(SHADES)]
    assert all(a < b for a, b in itertools.pairwise(light))

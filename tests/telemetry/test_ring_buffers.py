"""The ring of single samples and a tier of slices, each alone: two GPUs, a metric of each kind of scale."""

from __future__ import annotations

import math

import pytest

from gputop.telemetry.ring_buffers import LaneColumns, SampleRing, SliceGrid, Tier, _Addend

COLUMNS = LaneColumns(("ratio", "scaled", "free"), (1.0,), ("full",))
NAN = math.nan


def row(ratio: float, scaled: float = NAN, free: float = NAN) -> list[float]:
    """Values of two GPUs; the second has half of those of the first."""
    return [ratio, scaled, free, ratio / 2, scaled / 2, free / 2]


def ring_of(times_s: list[float], size: int = 4) -> SampleRing:
    ring = SampleRing(size, 2, COLUMNS)
    for number, time_s in enumerate(times_s):
        ring.append(time_s, row(number / 8), [8.0, 4.0], [number, 0])
    return ring


def test_the_oldest_sample_gives_way() -> None:
    ring = ring_of([1.0, 2.0, 3.0])
    assert (ring.kept, ring.overwritten_s, ring.times(0.0, 9.0)) == (3, -math.inf, [1.0, 2.0, 3.0])
    ring = ring_of([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    assert (ring.kept, ring.overwritten_s, ring.times(0.0, 9.0)) == (4, 2.0, [3.0, 4.0, 5.0, 6.0])
    assert ring.values(1, 0, 4.0, 6.0) == [3 / 16, 4 / 16, 5 / 16]
    assert ring.flags(0, 4.0, 5.0) == [3, 4]
    assert ring.all_values(0, 5.5, 6.0) == [[5 / 8], [5 / 16]]
    assert ring.all_values(0, 5.5, 6.0, scale=True) == [[8.0], [4.0]]


def test_the_ring_holds_no_more_than_an_hour_and_more_rows_once_samples_come_faster() -> None:
    ring = ring_of([1000.0 * i for i in range(9)], 7)
    assert (ring.size, ring.times(0.0, 9e9), ring.overwritten_s) == (4, [5e3, 6e3, 7e3, 8e3], 4000.0)
    for i in range(8):
        ring.append(8001.0 + i, row(0.5), [8.0, 4.0], [0, 0])
    assert (ring.size, ring.times(0.0, 9e9)) == (7, [8002.0 + i for i in range(7)])


def test_after_samples_are_dropped_the_next_take_their_rows() -> None:
    ring = ring_of([1.0, 2.0, 3.0, 4.0, 5.0])
    ring.forget_from(3.5)
    assert (ring.kept, ring.times(0.0, 9.0), ring.newest()[0][0]) == (2, [2.0, 3.0], 2 / 8)
    ring.append(3.5, row(1.0), [8.0, 4.0], [0, 0])
    assert ring.times(0.0, 9.0) == [2.0, 3.0, 3.5] and ring.overwritten_s == 1.0


def tier_of(samples: list[tuple[float, list[float]]]) -> Tier:
    tier = Tier(10.0, 3, 2, COLUMNS)
    for time_s, values in samples:
        tier.add(time_s, _Addend.of(values, [8.0, 4.0], COLUMNS))
    return tier


def test_a_slice_holds_the_sums_of_its_samples() -> None:
    tier = tier_of([(100.0, row(0.0, 2.0, 5.0)), (109.0, row(1.0, NAN, 15.0)), (110.0, row(0.5))])
    grid = SliceGrid(10, 2, 10.0)
    ratio = tier.lane(0, 0, grid, None, (100.0, 110.0))
    assert (ratio.count, ratio.mean) == ([2, 1], [0.5, 0.5])
    assert ratio.levels[0] == [0.5, 0, 0, 0, 0, 0, 0, 0.5] and ratio.resolution_s == 10.0
    scaled = tier.lane(1, 1, grid, None, (100.0, 110.0))
    assert (scaled.count, scaled.mean[0], scaled.full_scale) == ([1, 0], 1.0, 4.0)
    assert scaled.levels == [[0, 0, 1, 0, 0, 0, 0, 0], [0] * 8]
    free = tier.lane(0, 2, grid, None, (100.0, 110.0))
    assert (free.mean[0], free.full_scale) == (10.0, 15.0)
    assert tier.means(0, range(9, 12))[1] == pytest.approx([NAN, 0.25, 0.25], nan_ok=True)


def test_a_slice_is_continued_after_another_one() -> None:
    tier = tier_of([(100.0, row(0.0)), (110.0, row(1.0)), (105.0, row(1.0))])
    assert tier.lane(0, 0, SliceGrid(10, 2, 10.0), None, (100.0, 110.0)).count == [2, 1]


def test_a_row_holds_the_newest_of_its_slices() -> None:
    tier = tier_of([(time_s, row(0.5)) for time_s in (100.0, 110.0, 120.0, 130.0)])
    assert [not math.isnan(mean) for mean in tier.means(0, range(9, 15))[0]] == [False, False, True, True, True, False]
    assert tier.reach_s(130.0) == 110.0


def test_a_tier_whose_clock_was_set_back_forgets_what_begins_later() -> None:
    tier = tier_of([(time_s, row(0.5)) for time_s in (100.0, 110.0, 120.0)])
    tier.forget_from(121.0)
    assert tier.means(0, range(10, 13))[0] == [0.5] * 3, "the slice that the time lies in stays"
    tier.forget_from(115.0)
    assert [not math.isnan(mean) for mean in tier.means(0, range(10, 13))[0]] == [True, True, False]


def test_slices_finer_than_those_of_the_tier_end_with_the_samples() -> None:
    tier = tier_of([(100.0, row(0.5)), (107.0, row(0.5))])
    assert tier.lane(0, 0, SliceGrid(19, 4, 5.0), None, (100.0, 107.0)).count == [0, 2, 2, 0]
    assert tier.lane(0, 0, SliceGrid(19, 4, 5.0), None, (100.0, 104.0)).count == [0, 2, 0, 0]


@pytest.mark.parametrize(("slice_s", "divides"), [(10.0, True), (30.0, True), (25.0, False), (5.0, False)])
def test_only_slices_of_whole_ones_are_exact(slice_s: float, divides: bool) -> None:
    assert tier_of([]).divides(slice_s) == divides

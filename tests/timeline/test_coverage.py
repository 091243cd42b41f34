"""What covers the columns of a row, counted by hand."""

from __future__ import annotations

from itertools import accumulate

import numpy as np
import pytest

from gputop.timeline.coverage import Coverage, column_edges
from gputop.timeline.file_layout import Description
from gputop.timeline.model import KINDS

COMPUTE, H2D = KINDS.index("compute"), KINDS.index("h2d")
TRACKS = [[(10, 35)], [(10, 22), (29, 35)], [(22, 29)], []]


def test_the_kind_that_covers_most_of_a_column_is_shown_and_a_time_runs_since_the_begin_of_its_span() -> None:
    """Row 0 computes 10-22 and 29-35 and copies in between; row 1 has nothing."""
    spans = np.array([span for track in TRACKS for span in track], np.int64)
    before = [sum(end - start for start, end in track[:i]) for track in TRACKS for i in range(len(track))]
    coverage = Coverage(
        {"span_start": spans[:, 0], "span_end": spans[:, 1], "span_before": np.array(before, np.int64)},
        Description((0, 80), (), False, 0, (), (), [], {}, (), (), "step", 0.0, all=[0, 3],
                    kinds=[[(COMPUTE, 1), (H2D, 2)], [(COMPUTE, 3)]], edges=[0, *accumulate(map(len, TRACKS))]))
    share, kinds = coverage.picture([0, 1], 0, 50, 5)
    assert share[0].tolist() == pytest.approx([0, 1, 1, 0.5, 0]) and not share[1].any()
    assert kinds[0].tolist() == [0, COMPUTE, H2D, COMPUTE, 0] and not kinds[1].any()
    assert coverage.picture([0], 18, 26, 1)[1].tolist() == [[COMPUTE]], "of equal shares the first"
    assert [coverage.running_since(0, time) for time in (9, 10, 34, 35)] == [None, 10, 10, None]
    assert coverage.running_since(1, 20) is None


def coverage() -> Coverage:
    return coverage_of(TRACKS, [0, 3], [[(COMPUTE, 1), (H2D, 2)], [(COMPUTE, 3)]])


def coverage_of(tracks: Pairs, of_rows: list[int], kinds: Pairs) -> Coverage:
    spans = np.array([span for track in tracks for span in track], np.int64)
    before = [sum(end - start for start, end in track[:i]) for track in tracks for i in range(len(track))]
    return Coverage(
        {"span_start": spans[:, 0], "span_end": spans[:, 1], "span_before": np.array(before, np.int64)},
        Description((0, 80), (), False, 0, (), (), [], {}, (), (), "step", 0.0, all=of_rows, kinds=kinds,
                    edges=[0, *accumulate(map(len, tracks))]))


Pairs = list[list[tuple[int, int]]]


def test_columns_shorter_than_a_nanosecond_are_one_long() -> None:
    low, high = column_edges(10, 13, 6)
    assert (high - low == 1).all() and low[0] == 10 and high[-1] == 13


def test_a_time_runs_since_the_begin_of_the_span_it_is_in() -> None:
    assert [coverage().running_since(0, time) for time in (9, 10, 34, 35)] == [None, 10, 10, None]
    assert coverage().running_since(1, 20) is None


def test_gaps_lie_between_the_spans_of_the_row_alone() -> None:
    of_rows = coverage_of([[(0, 10), (12, 20), (50, 60)], [(70, 80)]], [0, 1], [[], []])
    assert of_rows.next_gap(0, -5, 1) == (10, 12) and of_rows.next_gap(0, -5, 3) == (20, 50)
    assert of_rows.next_gap(0, 10, 1) == (20, 50) and of_rows.next_gap(0, 20, 1) is None
    assert of_rows.next_gap(0, 60, 1, back=True) == (20, 50) and of_rows.next_gap(0, 20, 1, back=True) == (10, 12)
    assert of_rows.next_gap(1, 0, 1) is None, "one span has no gap"

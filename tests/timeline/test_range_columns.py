"""The ranges of rows as columns: two rows of hand-made events."""

from __future__ import annotations

import numpy as np
import pytest

from gputop.timeline.model import KINDS, Range
from gputop.timeline.range_columns import RangeColumns, Texts

EMPTY = np.empty(0, np.int64)
COMPUTE, COUNTER = KINDS.index("compute"), KINDS.index("counter")


def columns() -> RangeColumns:
    """Row 0: a kernel with an op and one within it; row 1: a launch of the first; row 2: a counter, sampled twice."""
    raw = b"gemm\nlaunch\nDense\n"
    return RangeColumns({
        "start": np.array([10, 12, 5, 0, 20], np.int64), "end": np.array([30, 14, 6, 10, 40], np.int64),
        "name": np.array([0, 0, 1, -1, -1], np.int32), "op": np.array([2, -1], np.int32),
        "kind": np.array([COMPUTE] * 3 + [COUNTER] * 2, np.uint8), "depth": np.array([0, 1, 0, 0, 0], np.uint8),
        "level": np.array([0.25, 1.0], np.float32), "link": np.array([2, -1, 0, -1, -1], np.int64),
    }, [(0, 2), (2, 3), (3, 5)], Texts({
        "text": np.frombuffer(raw, np.uint8), "text_end": np.array([5, 12, 18], np.int64),
        "folded": np.frombuffer(raw, np.uint8), "folded_end": np.array([5, 12, 18], np.int64)}))


def test_ranges_have_the_row_and_the_index_in_it() -> None:
    assert columns().ranges(0, np.array([0, 1])) == [
        Range(0, 0, 10, 30, "gemm", "compute", 0, "Dense"), Range(0, 1, 12, 14, "gemm", "compute", 1, "")]
    assert columns().range(1, 2) == Range(1, 0, 5, 6, "launch", "compute", 0, "") and columns().ranges(0, EMPTY) == []


def test_what_begins_and_what_runs_at_a_time() -> None:
    assert columns().begun(0, 11, 100) == (1, 2) and columns().begun(1, 0, 5) == (2, 2)
    assert columns().running(0, 13, since_ns=10, before=2).tolist() == [0, 1]
    assert columns().running(0, 20, since_ns=10, before=2).tolist() == [0]
    assert columns().running(0, 13, since_ns=12, before=2).tolist() == [1]
    assert columns().lengths(np.array([0, 2])).tolist() == [20, 1]


def test_a_link_leads_to_the_row_of_its_other_end() -> None:
    assert columns().linked(0, 0) == (1, 2) and columns().linked(1, 0) == (0, 0) and columns().linked(0, 1) is None


@pytest.mark.parametrize("further", [[], list(range(3, 20))])
def test_names_and_ops_are_compared_or_looked_up(further: list[int]) -> None:
    wanted = [2, *further]
    mask = np.zeros(21, np.bool_)
    mask[wanted] = True
    assert columns().named(0, 2, wanted, mask).tolist() == [0], "its op"
    assert columns().named(2, 3, wanted, mask).tolist() == []
    mask[:2] = True
    assert columns().named(0, 2, [0, 1, *wanted], mask).tolist() == [0, 1]
    assert columns().named(2, 3, [0, 1, *wanted], mask).tolist() == [2]


def test_levels_are_means_of_the_time_that_was_sampled() -> None:
    levels = columns().levels(2, 0, 40, 2)
    assert levels.tolist() == [0.25, 1.0] and np.isnan(columns().levels(2, 10, 20, 1)[0])
    assert columns().levels(2, 0, 40, 1)[0] == pytest.approx((10 * 0.25 + 20 * 1.0) / 30)

"""The interval of the ticks."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest

from gputop.sources.dcgm.client import TickPace


def after(gaps_s: Sequence[float], interval_s: float = 1.0) -> float:
    """The interval that is kept after ticks with these gaps."""
    pace = TickPace(interval_s)
    for tick_s in itertools.accumulate(gaps_s, initial=1_700_000_000.0):
        pace.note(tick_s)
    return pace.interval_s


def test_a_tick_is_noted_once() -> None:
    pace = TickPace(1.0)
    assert [pace.note(tick_s) for tick_s in (5.0, 5.0, 6.0, 5.0)] == [True, False, True, True]


@pytest.mark.parametrize(("gaps_s", "expected_s"), [
    ((), 1.0),
    ((0.1, 0.1), 1.0),  # two are no pace yet
    ((0.1, 0.11, 0.1), 0.1),
    ((7.0, 0.1, 0.11, 0.1), 0.1),  # the last three count
    ((0.1, 0.2, 0.1), 1.0),  # they do not agree
    ((1.2, 1.2, 1.2), 1.0),  # close to what it is
    ((5.0, 5.1, 5.0), 5.0),
    ((0.02, 0.02, 0.02), 0.1),  # DCGM's own limit
    ((-0.5, -0.5, -0.5), 1.0),  # a clock that is set back
])
def test_an_interval_follows_three_ticks_that_agree(gaps_s: Sequence[float], expected_s: float) -> None:
    assert after(gaps_s) == expected_s

"""The arithmetic of gains, by hand."""

from __future__ import annotations

import pytest

from gputop.advice import savings


def test_removing_a_wait_saves_its_length_and_no_more_than_the_step():
    assert savings.removed(0.03, 0.1) == pytest.approx(0.3)
    assert savings.removed(0.2, 0.1) == 1 and savings.removed(-0.1, 0.1) == 0 and savings.removed(1, 0) == 0


def test_work_at_three_times_the_rate_saves_two_thirds():
    assert savings.faster(0.06, 3, 0.1) == pytest.approx(0.4)
    assert savings.faster(0.06, 1, 0.1) == 0

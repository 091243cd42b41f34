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


def test_communication_hides_behind_free_compute_only():
    assert savings.overlapped(0.03, 0.5, 0.1) == pytest.approx(0.3)
    assert savings.overlapped(0.03, 0.01, 0.1) == pytest.approx(0.1)
    assert savings.overlapped(0.03, -0.01, 0.1) == 0


def test_merged_collectives_pay_their_latency_once():
    assert savings.merged(101, 1, 1e-4, 0.5, 0.1) == pytest.approx(0.05)
    assert savings.merged(1, 4, 1e-4, 1, 0.1) == 0


def test_a_transfer_at_the_wanted_rate():
    assert savings.at_rate(0.05, 0.01, 0.5, 0.1) == pytest.approx(0.2)
    assert savings.at_rate(0.01, 0.05, 1, 0.1) == 0


def test_equal_work_is_the_mean():
    assert savings.equalized({0: 0.09, 1: 0.03}, 0.1) == pytest.approx(0.3)
    assert savings.equalized({}, 0.1) == 0


def test_side_by_side_leaves_the_longest():
    assert savings.side_by_side(0.09, [0.03, 0.03, 0.03], 0.1) == pytest.approx(0.6)


def test_starting_at_once_saves_no_more_than_the_idle_time():
    assert savings.started_together(0.04, 0.1, 0.1) == pytest.approx(0.4)
    assert savings.started_together(0.04, 0.01, 0.1) == pytest.approx(0.1)

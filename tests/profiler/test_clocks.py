"""Bounds on a server's clock, against clocks whose difference is known."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gputop.profiler.clocks import SAME_MACHINE, ClockBounds, began_between, bounds_of_call, intersect

T0 = 1_700_000_000.0


def call(offset_s: float, there_s: float, gathering_s: float, recorded_s: float = 1.0) -> ClockBounds:
    """One capture from a server whose clock is ``offset_s`` ahead of ours."""
    began, ended = T0 + there_s + offset_s, T0 + there_s + recorded_s + offset_s
    received = T0 + there_s + recorded_s + gathering_s
    return bounds_of_call(T0, received, (round(began * 1e9), round(ended * 1e9)))


@given(offset=st.floats(-1e5, 1e5), there=st.floats(0, 0.5), gathering=st.floats(0, 30))
def test_the_true_offset_is_within(offset, there, gathering):
    bounds = call(offset, there, gathering)
    assert bounds.low_s - 1e-5 <= offset <= bounds.high_s + 1e-5
    assert bounds.width_s == pytest.approx(there + gathering, abs=1e-4)
    clock = bounds.clock(there)
    assert abs(clock.offset_ns / 1e9 - offset) <= clock.error_ns / 1e9 + 1e-5


def test_clocks_that_may_agree_are_taken_to():
    assert call(0.002, 0.005, 0.3).estimate_s() == 0.0
    assert call(3600.0, 0.005, 0.3).estimate_s(0.005) == pytest.approx(3600.0, abs=1e-3)
    assert call(-3600.0, 0.005, 0.3).estimate_s(0.005) == pytest.approx(-3600.0, abs=1e-3)
    assert SAME_MACHINE.clock().error_ns == 0


def test_a_second_capture_narrows_it():
    narrow = intersect(call(5.0, 0.010, 2.0), call(5.0, 0.100, 0.020))
    assert narrow is not None and narrow.low_s == pytest.approx(4.98, abs=1e-4)
    assert narrow.high_s == pytest.approx(5.010, abs=1e-4)
    assert intersect(None, narrow) == intersect(narrow, None) == narrow and intersect(None, None) is None


def test_a_clock_that_was_set_in_between():
    assert intersect(call(5.0, 0.01, 0.1), call(9.0, 0.01, 0.5)) == call(5.0, 0.01, 0.1)
    jumped = bounds_of_call(T0, T0 + 1.1, (round((T0 + 0.01) * 1e9), round((T0 + 61) * 1e9)))
    assert jumped.low_s <= jumped.high_s and jumped.width_s == pytest.approx(59.89, abs=1e-2)


def test_a_server_that_does_not_say_when_it_began():
    known = began_between(T0, T0 + 1.8, 1.0, T0 + 0.5)
    assert (known.began_ns, known.error_ns) == (round((T0 + 0.5) * 1e9), pytest.approx(0.3e9, abs=1e3))
    assert began_between(T0, T0 + 1.1, 1.0, None).began_ns == round(T0 * 1e9)
    assert began_between(T0, T0 + 0.5, 1.0, None).error_ns == 0, "stopped early"

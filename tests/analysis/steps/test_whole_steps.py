"""Cutting the time at anchors made by hand, rule by rule of the module's docstring."""

from __future__ import annotations

import numpy as np
import pytest

from gputop.analysis.steps.anchors import Anchors
from gputop.analysis.steps.start_up import COMPILING, StartUpSpan
from gputop.analysis.steps.whole_steps import WholeSteps, whole_steps
from gputop.trace.model import I64, Trace
from tests.records import replace
from tests.trace.build import Builder


def anchors(starts: list[int], *, length: int, edges: tuple[int, ...] = ()) -> Anchors:
    start = np.array(starts, np.int64)
    return Anchors("marks", "high", start, start + length, np.concatenate((start, np.array(edges, np.int64))))


def cut(marks: Anchors, trace: Trace | None = None, start_up: tuple[StartUpSpan, ...] = (), *,
        one_is_enough: bool = False, max_warm_up: int | None = None) -> WholeSteps:
    return whole_steps(Builder(gpus=0).build() if trace is None else trace, marks, start_up,
                       one_is_enough=one_is_enough, max_warm_up=max_warm_up)


def starts(steps: I64) -> list[int]:
    return steps[:, 0].tolist()


@pytest.mark.parametrize(("length", "one_is_enough", "last"), [(100, True, 200), (99, True, 200), (90, True, 100),
                                                             (100, False, 100)])
def test_the_last_event_is_a_step_only_if_each_ends_where_the_next_begins(length: int, one_is_enough: bool,
                                                                         last: int) -> None:
    steps = cut(anchors([0, 100, 200], length=length), one_is_enough=one_is_enough)
    assert starts(steps.bounds_ns)[-1] == last and steps.incomplete == (last == 100)


def test_an_edge_that_begins_no_step_ends_one() -> None:
    steps = cut(anchors([0, 100, 200], length=10, edges=(150, 260)))
    assert steps.bounds_ns.tolist() == [[0, 100], [100, 150], [200, 260]] and steps.incomplete == 0


def test_bounds_that_are_known_one_by_one_are_taken_as_they_are() -> None:
    bounds = np.array([[5, 50], [60, 90]], np.int64)
    assert cut(anchors([0], length=1)._replace(bounds_ns=bounds)).bounds_ns.tolist() == bounds.tolist()


def test_steps_that_touch_time_without_recording_are_left_out() -> None:
    trace = replace(Builder(gpus=0).build(), unrecorded_ns=((150, 210),))
    assert starts(cut(anchors([0, 100, 200, 300, 400], length=1), trace).bounds_ns) == [0, 300]


@pytest.mark.parametrize("name", ["ProfilerSession::CollectData", "$profiler.py:213 stop_trace"])
def test_the_step_in_which_the_profiler_ends_is_left_out_unless_it_is_the_only_one(name: str) -> None:
    trace = Builder(gpus=0).host(name, 0.25, 0.01).build()
    assert starts(cut(anchors([0, 100, 200, 300], length=1), trace).bounds_ns) == [0, 100]
    assert starts(cut(anchors([200, 300], length=1), trace).bounds_ns) == [200]


def test_leading_steps_of_a_start_are_warm_up_if_others_follow() -> None:
    compiling = StartUpSpan(COMPILING, 0, 180, "step")
    steps = cut(anchors([0, 100, 200, 300], length=1), start_up=(compiling,))
    assert starts(steps.bounds_ns) == [200] and starts(steps.warm_up_ns) == [0, 100]
    assert starts(cut(anchors([0, 100], length=1), start_up=(compiling,)).bounds_ns) == [0]


@pytest.mark.parametrize(("max_warm_up", "warm_up"), [(None, 2), (2, 2), (1, 0), (0, 0)])
def test_long_leading_steps_are_warm_up_up_to_the_limit(max_warm_up: int | None, warm_up: int) -> None:
    steps = cut(anchors([0, 900, 1500, 1600, 1700, 1800, 1900], length=1), max_warm_up=max_warm_up)
    assert len(steps.warm_up_ns) == warm_up and len(steps.bounds_ns) == 6 - warm_up


@pytest.mark.parametrize(("unit", "pauses", "left_out"), [("period", 1, 1), ("period", 2, 2), ("period", 3, 0),
                                                          ("step", 1, 0)])
def test_periods_with_a_pause_are_left_out_if_they_are_few(unit: str, pauses: int, left_out: int) -> None:
    lengths = [100] * (10 - pauses) + [600] * pauses
    steps = cut(anchors([0, *np.cumsum(lengths).tolist()], length=1)._replace(unit=unit))
    assert len(steps.bounds_ns) == 10 - left_out and steps.incomplete == 1 + left_out


def test_long_steps_behind_a_usual_one_are_no_warm_up() -> None:
    assert not len(cut(anchors([0, 100, 1000, 1900, 2800, 2900, 3000, 3100], length=1)).warm_up_ns)

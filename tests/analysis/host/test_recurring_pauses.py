from __future__ import annotations

import random

import pytest

from gputop.analysis.host.host_causes import recurring_share
from gputop.analysis.steps.steps import find_steps
from gputop.diagnosis.diagnose import analyze_trace
from gputop.trace.intervals import union
from tests.analysis.steps.pytorch_loop import Loop


def paused(at_one_place: bool) -> tuple[Loop, list[tuple[float, float]]]:
    """A loop that stands still for 3 ms in each step, after its optimizer's call or anywhere."""
    loop, dice, pauses = Loop(), random.Random(1), []
    for _ in range(30):
        place = 9 if at_one_place else dice.randrange(9)
        parts = (*[loop.forward] * 4, lambda: loop.op("aten::nll_loss"), *[loop.backward] * 3, loop.update, loop.zero)
        for k, run in enumerate(parts):
            run()
            if k == place:
                pauses.append((loop.now, loop.now + 3000))
                loop.sleep(3000)
    return loop, pauses


def shared(loop: Loop, pauses: list[tuple[float, float]]) -> float | None:
    trace = loop.b.build()
    steps = find_steps(trace)
    assert steps is not None
    return recurring_share(trace, steps, union([round(a * 1e3) for a, _ in pauses],
                                               [round(b * 1e3) for _, b in pauses]))


@pytest.mark.parametrize(("at_one_place", "share"), [(True, 1.0), (False, 0.0)])
def test_pauses_that_come_in_each_step_recur(at_one_place, share):
    loop, pauses = paused(at_one_place)
    assert shared(loop, pauses) == pytest.approx(share, abs=0.1)  # less those of the steps at the edges


@pytest.mark.parametrize("at_one_place", [True, False])
def test_only_those_are_the_loops_own_work(at_one_place):
    analysis = analyze_trace(paused(at_one_place)[0].b.build())
    assert ("step_gap_host" in {finding.id for finding in analysis.findings}) == at_one_place
    assert ("step_gap_host" in {one.id for one in analysis.abstained}) != at_one_place


def test_a_long_pause_at_the_place_of_short_ones_does_not_recur():
    """A thread that has no CPU now and then stops where Python pauses shortly anyway."""
    loop, pauses = Loop(), []
    for step in range(30):
        for run in (loop.forward, loop.forward, lambda: loop.op("aten::nll_loss"), loop.backward, loop.update,
                    loop.zero):
            run()
        pause_us = 20_000 if step % 10 == 5 else 150
        pauses.append((loop.now, loop.now + pause_us))
        loop.sleep(pause_us)
    share = shared(loop, pauses)
    assert share is not None and share < 0.1

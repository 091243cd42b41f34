"""Run-to-run variation: what the load of a node may explain of a change, and what it may not."""

from __future__ import annotations

import math

import numpy as np
import pytest

from gputop.comparison.compare import compare_sides
from gputop.comparison.sides import Side
from gputop.comparison.statistics import (
    CPU_DRIFT,
    GPU_DRIFT,
    LOAD_SPREAD,
    LOAD_SPREAD_MOST,
    UNEVEN_LOAD,
    Drift,
    drift_of,
    threads_spread,
)
from tests.comparison.sides import changed, side
from tests.records import replace


def on(of: Side, used: float | None, others: float | None, waited: float | None = None,
       asleep: float | None = None, *, allowed: float = 2.0, quota: float | None = None) -> Side:
    """The side in a job without GPUs that used so many CPUs, beside others."""
    cpus = {"allowed": allowed, "used": used, "others": others, "waited": waited, "asleep": asleep, "quota": quota,
            "children": 0.0}
    return changed(of, lambda document: document.update(
        gpus=[], trace={**document["trace"], "job_cpus": cpus}))


def effect(a: tuple[float | None, ...], b: tuple[float | None, ...]) -> float:
    return drift_of(on(side(0), *a), on(side(1), *b)).load


def test_a_node_that_is_not_full_explains_nothing():
    assert effect((0.5, 0.2), (0.5, 1.2)) == 0.0 == effect((None, None), (1.0, 1.0))
    a, b = on(side(0), 0.5, 0.2), on(side(1), 0.5, 1.2)
    assert drift_of(a, b) == Drift(CPU_DRIFT, CPU_DRIFT)
    assert drift_of(side(0), side(1)) == Drift(GPU_DRIFT, GPU_DRIFT)


def test_of_a_share_of_a_full_node_no_more_than_it_lacks_is_load():
    """Two of 64 CPUs are granted, and four are free."""
    a, b = on(side(0), 1.0, 60.0, allowed=64.0, quota=2.0), on(side(1), 1.0, 62.5, allowed=64.0, quota=2.0)
    assert drift_of(a, b).load == pytest.approx(math.log(2.0 / 1.5))


def test_without_waits_the_cpus_that_were_left_are_the_bound():
    assert effect((1.8, 0.2), (1.0, 1.0)) == pytest.approx(math.log(1.8 / 1.0))
    assert effect((1.0, 1.0), (1.8, 0.2)) == -effect((1.8, 0.2), (1.0, 1.0))
    assert effect((1.8, 0.2, 0.1), (1.0, 1.0)) == effect((1.8, 0.2), (1.0, 1.0)), "B's waits are not known"


def test_threads_that_hardly_waited_were_not_held_up():
    """A job that sleeps uses little, and who computes beside it takes the rest: that is no load of its own."""
    sleeps, computes = (0.1, 1.9, 0.05), (1.0, 1.0, 0.5)
    by_left = effect(sleeps[:2], computes[:2])
    assert by_left == pytest.approx(math.log(0.1 / 1.0))
    # A's steps are longer by the twentieth of the time that a thread waited, B's threads took half as long again.
    assert effect(sleeps, computes) == pytest.approx(math.log(1.5) + math.log1p(-0.05))
    # Waits of the job's own threads for each other, with nothing beside it, are no load.
    assert effect((2.0, 0.0, 6.0), (2.0, 0.0, 0.1)) == 0.0


@pytest.mark.parametrize(("cpus", "serial", "parallel"), [
    ((0.1, 1.9, 1.2, 0.3), 0.4, 0.3 + 0.1 * 0.7 / 1.3),  # 1.3 threads of those that were ready in 0.7 of the time
    ((0.2, 1.8, 3.0, 0.04), 0.24, 0.14),  # 3.3, and two CPUs
    ((0.1, 1.9, 0.0, 0.9), 1.0, 1.0),  # nothing waited
    ((1.9, 0.1, 2.0, 0.0), 1.0, 0.95),
])
def test_what_load_made_of_a_step_by_the_time_in_which_all_threads_sleep(cpus, serial, parallel):
    quiet = (1.0, 1.0, 0.0, 0.5)
    drift = drift_of(on(side(0), *quiet), on(side(1), *cpus))
    assert drift.by_threads and drift.loads == pytest.approx((-math.log(serial), -math.log(parallel)))
    assert drift.load == drift.loads[1] == -drift_of(on(side(1), *cpus), on(side(0), *quiet)).load
    busy_children = changed(on(side(1), *cpus), lambda document: document["trace"]["job_cpus"].update(children=0.3))
    assert not drift_of(on(side(0), *quiet), busy_children).by_threads
    # Captures of before, which do not know it, are judged as they were, and those that are compared with them.
    assert drift_of(on(side(0), *quiet), on(side(1), *cpus[:3])) == drift_of(
        on(side(0), *quiet[:3]), on(side(1), *cpus[:3]))


def test_a_job_that_mostly_sleeps_is_told_from_one_that_waits_for_a_cpu():
    """The figures of real captures next to eight processes: reads by one worker, twice, and by four."""
    steps = np.exp(0.3 * np.random.default_rng(2).standard_normal(40))
    slow, rerun, fast = [(mean_s, on(side(n, step_s=mean_s * steps), *cpus)) for n, (mean_s, *cpus) in enumerate((
        (0.181, 0.06, 1.94, 1.19, 0.29), (0.094, 0.1, 1.9, 0.64, 0.57), (0.039, 0.27, 1.73, 3.0, 0.03)))]
    for (a_s, a), (b_s, b) in ((slow, fast), (fast, slow), (rerun, fast), (slow, rerun), (rerun, slow)):
        change = "noise" if {a_s, b_s} == {0.181, 0.094} else "better" if b_s < a_s else "worse"
        assert compare_sides(a, b).verdict == change, (a_s, b_s)
    (_, a), (_, b) = slow, fast
    steps_s = a.analysis.steps.count * a.analysis.steps.mean_s
    for window_s, by_threads in ((1.9 * steps_s, True), (2.1 * steps_s, False)):
        part = changed(a, lambda document, window_s=window_s: document["trace"].update(window_s=window_s))
        assert drift_of(part, b).by_threads == by_threads, "the waits are of the whole recording"
    assert compare_sides(*(changed(of, lambda document: document["trace"]["job_cpus"].update(asleep=None))
                           for of in (a, b))).verdict == "noise", "without it, all may be load"


def test_each_side_varies_by_what_the_load_may_make_of_it_and_less_over_several_captures():
    a, b = on(side(0), 1.0, 1.0, 3.0), on(side(1), 1.9, 0.1, 0.1)
    drift = drift_of(a, b)
    assert (drift.a, drift.b) == (CPU_DRIFT, CPU_DRIFT)
    assert LOAD_SPREAD * math.log(2) > LOAD_SPREAD_MOST
    assert drift.load_spread == pytest.approx(math.hypot(LOAD_SPREAD_MOST, LOAD_SPREAD * math.log1p(0.1 / 1.9)))
    by_threads = [drift_of(*(on(side(n), *cpus, asleep) for n, (*cpus, asleep) in enumerate(sides))) for sides in (
        ((0.1, 1.9, 1.0, 0.1),) * 2, ((0.1, 1.9, 1.0, 0.1), (0.1, 1.9, 0.0, 0.9)))]
    most = threads_spread(a.analysis.steps.count)
    assert by_threads[0].load_spread == pytest.approx(math.hypot(most, most))
    assert by_threads[1].load_spread == pytest.approx(math.hypot(most, UNEVEN_LOAD * by_threads[1].load))
    assert threads_spread(5) > most > threads_spread(1000), "the load meets each step anew"
    four = drift_of(replace(a, repeats=(a, a, a)), b)
    assert four.a == pytest.approx(drift.a / 2) and four.b == drift.b and four.load_spread < drift.load_spread


@pytest.mark.parametrize(("fast", "cpus", "verdict"), [
    (1 / 29, (1.0, 1.0, 1.5), "better"),  # as much load on both sides
    (0.4, (1.0, 1.0, 1.5), "better"),
    (0.4, (0.4, 1.6, 4.0), "better"),  # although more load
    (0.6, (1.9, 0.1, 0.1), "noise"),  # less load, which may be all of it
    (1.0, (1.0, 1.0, 1.5), "noise"), (2.0, (0.5, 1.5, 3.0), "noise"),
    (2.5, (1.0, 1.0, 1.5), "worse"),
])
def test_a_loaded_node(fast, cpus, verdict):
    steps = np.exp(0.15 * np.random.default_rng(1).standard_normal(60))
    a = on(side(0, step_s=0.5 * steps), 1.0, 1.0, 1.5)
    b = on(side(1, step_s=0.5 * fast * steps[::-1]), *cpus)
    assert compare_sides(a, b).verdict == verdict
    back = {"better": "worse", "worse": "better"}
    assert compare_sides(b, a).verdict == back.get(verdict, verdict)


def test_a_difference_that_is_not_proven_is_called_probable_only_if_it_is():
    a = side(0, 40, spread=0.02)
    for mean_s, words in ((0.17, "Probably faster, not proven: "), (0.237, "Probably slower, not proven: "),
                          (0.205, "NOT PROVEN: ")):
        b = side(1, 40, mean_s=mean_s, spread=0.02)
        a_cpu, b_cpu = (on(one, 1.0, 0.5) for one in (a, b))
        found = compare_sides(a_cpu, b_cpu)
        assert found.verdict == "noise" and found.headline.startswith(words), found.headline
        assert found.to_json()["probably"] == (words.split()[1].strip(",") if words.startswith("P") else None)
    assert compare_sides(side(0), side(0)).probably is None

"""Wall time per training step: what lies between the steps decides where it can be told, and is not guessed."""

from __future__ import annotations

import numpy as np
import pytest

from gputop.comparison.compare import Comparison, compare_sides
from gputop.comparison.figures import ComparedRow, wall_row
from gputop.comparison.gates import exit_status, gates_of_comparison
from gputop.comparison.report_lines import text_report
from gputop.comparison.sides import Side, side_of_trace
from gputop.core.errors import EXIT_GATE, EXIT_NO_DATA, EXIT_OK
from gputop.diagnosis.diagnose import analyze_to_facts, compared_trace
from gputop.trace.model import F64
from tests.analysis.host.traces_of_epochs import MS, evaluate, train
from tests.analysis.host.wall_time_traces import two_grains
from tests.comparison.sides import changed, finding, side
from tests.records import replace
from tests.trace.build import Builder

OPPOSITE = {"better": "worse", "worse": "better"}


def job(step_ms: float, pause_ms: float, epochs: int = 6) -> Side:
    """Epochs of eight steps, each with an evaluation of 20 ms and a pause."""
    b, at = Builder(gpus=0), 0.0
    for _ in range(epochs):
        end = evaluate(b, train(b, at, 8, step_ms * MS) + 100, 4)
        at = end + pause_ms * MS
    train(b, at, 2, step_ms * MS)
    facts = analyze_to_facts(b.build())
    return side_of_trace("x.xplane.pb", facts.analysis, compared_trace(facts))


def paused(of: Side, pauses_s: F64, *, open_s: float = 0.0) -> Side:
    """The side with these pauses behind its steps, and one that is open at the end."""
    assert of.analysis is not None and of.analysis.steps is not None
    steps = of.analysis.steps.durations_s
    pauses = pauses_s[:len(steps) - 1].tolist()
    wall_s = sum(steps) + sum(pauses)
    parts = [{"id": "open", "time_s": open_s, "kind": "python"}] if open_s else []
    return changed(of, lambda document: document.update(wall_time={
        "total_s": wall_s + open_s, "recorded_s": wall_s + open_s,
        "parts": parts, "known_by": "profiler", "per_step_s": wall_s / len(steps),
        "pauses_s": pauses}))


def regular(count: int, every: int, length_s: float, first: int = 3) -> F64:
    out = np.zeros(count)
    out[first::every] = length_s
    return out


def wall(c: Comparison) -> ComparedRow:
    return next(row for row in c.rows if row.id == "wall_s")


def status(c: Comparison) -> int:
    return exit_status(gates_of_comparison(["regression:5%"], c))


def test_a_shorter_end_of_epochs_is_faster_by_wall_time():
    a, b = job(10, 300), job(10, 20)
    c = compare_sides(a, b)
    assert c.verdict == "better" and c.step is not None and c.step.verdict == "noise"
    assert "of wall time per training step" in c.headline and c.headline.startswith("FASTER, certain: 49.2 → 14.9 ms")
    assert "the step itself did not change: 10.0 → 10.0 ms" in c.headline
    assert a.analysis is not None and a.analysis.wall_time is not None
    assert wall(c).a == pytest.approx(a.analysis.wall_time.per_step_s)
    assert "wall time per training step        49.2 ms   14.9 ms" in text_report(c)
    (entry,) = (e for e in c.advice if e.id == "time_outside_steps")
    assert entry.per == "recording" and entry.fulfilled == "kept"
    assert entry.measured == pytest.approx(1 - 14.9 / 49.2, abs=0.01)
    assert "less of the recorded time; measured 70% less of the wall time per training step" in " ".join(
        text_report(c).split())
    assert (status(c), status(compare_sides(b, a))) == (EXIT_OK, EXIT_GATE)


def with_overview(step_ms: float, pause_ms: float) -> Side:
    """As :func:`job`, of which the detail shows no end of an epoch."""
    overview, detail, at = Builder(gpus=0), Builder(gpus=0), 0.0
    for _ in range(6):
        at = evaluate(overview, train(overview, at, 8, step_ms * MS) + 100, 4) + pause_ms * MS
    train(overview, at, 2, step_ms * MS)
    train(detail, 0, 10, step_ms * MS)
    trace = two_grains(detail, overview, by_s=1.0)
    facts = analyze_to_facts(trace)
    return side_of_trace("x.xplane.pb", facts.analysis, compared_trace(facts))


def test_what_only_the_overview_shows_is_compared():
    a, b = with_overview(16, 20), with_overview(8, 20 + 8 * 8.05)
    assert a.analysis is not None and a.analysis.wall_time is not None
    c = compare_sides(a, b)
    assert wall(c).a == pytest.approx(a.analysis.wall_time.per_step_s)
    assert c.step is not None and c.step.verdict == "better"
    assert wall(c).b == pytest.approx(wall(c).a, rel=0.1)
    assert c.verdict != "better", c.headline
    faster = compare_sides(with_overview(10, 300), with_overview(10, 20))
    assert faster.verdict == "better" and "of wall time per training step" in faster.headline
    (entry,) = (e for e in faster.advice if e.id == "time_outside_steps")
    assert entry.fulfilled == "kept"


def test_work_that_moved_to_the_end_of_the_epoch_is_no_improvement():
    c = compare_sides(job(16, 20), job(8, 20 + 8 * 8.05))
    assert c.step is not None and c.step.verdict == "better" and c.verdict == "noise"
    assert c.headline.startswith("NO CHANGE: the step became shorter (16.0 → 8.0 ms), but the wall time per training "
                                 "step did not: 20.9 → 20.8 ms")
    assert c.headline.endswith("the work moved out of the steps.") and "FASTER" not in text_report(c)
    back = compare_sides(job(8, 20 + 8 * 8.05), job(16, 20))
    assert back.verdict == "noise" and status(back) == EXIT_OK
    assert back.headline.endswith("the work moved from between the steps into them.")


def test_a_shorter_step_with_longer_wall_time_is_slower():
    c = compare_sides(job(16, 20), job(8, 400))
    assert c.verdict == "worse" and c.headline.startswith("SLOWER, certain: 20.9")
    assert "although the step became shorter: 16.0 → 8.0 ms" in c.headline and status(c) == EXIT_GATE


def test_few_pauses_tell_nothing():
    a, b = side(0, 40), side(1, 40, mean_s=0.15)
    for one, other in ((0.5, 2.5), (0.5, 0.5)):
        c = compare_sides(paused(a, regular(40, 30, one)), paused(b, regular(40, 30, other)))
        assert wall(c).verdict == "cannot be told" and "2 in A, 2 in B" in (wall(c).reason or "")
    assert c.verdict == "better"  # the step, and the wall time as far as it is known
    assert "gputop cannot tell if the wall time per training step changed: 2" in c.headline
    c = compare_sides(paused(a, regular(40, 30, 0.5)), paused(b, regular(40, 30, 2.5)))
    assert c.verdict == "cannot be told" and c.headline.startswith("CANNOT BE TOLD: the step became shorter")
    assert status(c) == EXIT_NO_DATA


def test_a_pause_that_is_open_at_an_edge_may_have_to_be_counted():
    a, b = paused(side(0, 40), regular(40, 4, 0.5)), side(1, 40)
    assert wall(compare_sides(a, paused(b, np.zeros(40)))).verdict == "better"
    assert wall(compare_sides(a, paused(b, np.zeros(40), open_s=5.0))).verdict == "cannot be told"


def test_several_captures_hold_more_pauses():
    def run(seed: int, length_s: float) -> Side:
        return paused(side(seed, 20), regular(20, 9, length_s))

    a, b = run(0, 2.0), run(1, 1.0)
    assert wall(compare_sides(a, b)).verdict == "cannot be told"
    many = compare_sides(replace(a, repeats=tuple(run(n, 2.0) for n in (2, 3, 4))),
                         replace(b, repeats=tuple(run(n, 1.0) for n in (5, 6, 7))))
    assert wall(many).verdict == "better" == many.verdict


def test_an_analysis_that_does_not_know_it_compares_as_before():
    a, b = side(0), paused(side(1, mean_s=0.15), regular(20, 4, 3.0))
    c = compare_sides(a, b)
    assert c.verdict == "better" and not any(row.id == "wall_s" for row in c.rows)
    assert c.headline == compare_sides(side(0), side(1, mean_s=0.15)).headline
    # Where nothing lies between the steps, they decide, and the sentence is theirs.
    same = compare_sides(paused(side(0), np.zeros(20)), paused(side(1, mean_s=0.15), np.zeros(20)))
    assert same.headline == c.headline and same.wall is None and wall(same).verdict == "better"


@pytest.mark.parametrize("kind", ["every 8 steps", "at random", "two kinds"])
def test_unchanged_jobs_are_rarely_called_changed(kind):
    rng = np.random.default_rng(4)

    def pauses(count: int) -> F64:
        if kind == "at random":
            return np.where(rng.random(count) < 0.1, rng.exponential(2.0, count), 0.0)
        out = regular(count, 8, 1.0, int(rng.integers(8))) * rng.normal(1, 0.1, count)
        return out + regular(count, 40, 4.0, int(rng.integers(40))) if kind == "two kinds" else out

    false = 0
    for count in (25, 60, 200):
        for seed in range(40):
            a, b = (paused(side(2 * seed + n, count, spread=0.02), pauses(count)) for n in (0, 1))
            row = wall_row(a, b)
            false += row.verdict in OPPOSITE
    assert false / 120 <= 0.05


@pytest.mark.parametrize("seed", range(30))
def test_swapping_the_sides_mirrors_the_verdict(seed):
    rng = np.random.default_rng(seed)
    sides = [paused(side(int(rng.integers(999)), 40, mean_s=float(rng.choice([0.1, 0.2])), spread=0.02),
                    regular(40, int(rng.choice([3, 8, 30, 50])), float(rng.choice([0.2, 0.8, 2.0])),
                            int(rng.integers(8))) * float(rng.choice([0, 1, 1]))) for _ in range(2)]
    there, back = compare_sides(*sides), compare_sides(*reversed(sides))
    assert OPPOSITE.get(there.verdict, there.verdict) == back.verdict
    assert OPPOSITE.get(wall(there).verdict, wall(there).verdict) == wall(back).verdict


def test_what_lies_at_an_edge_is_not_measured_by_wall_time_per_step():
    a = paused(side(0, 40, findings=[finding("unfinished_step", 0.4, per="recording")]), np.zeros(40), open_s=5.0)
    (entry,) = compare_sides(a, paused(side(1, 40), np.zeros(40))).advice
    assert entry.status == "gone" and entry.fulfilled == "cannot be told" and entry.reason is not None
    unknown = compare_sides(side(0, findings=[finding("time_outside_steps", 0.4, per="recording")]), side(1, mean_s=.1))
    assert unknown.advice[0].reason == "the wall time per training step of A or B is unknown"


def test_a_promise_on_the_step_and_one_on_the_recording_are_measured_each_by_its_own():
    a = paused(side(0, 40, findings=[finding("launch_bound", 0.5), finding("time_outside_steps", 0.5,
                                                                          per="recording")]), regular(40, 4, 0.8))
    entries = {e.id: e for e in compare_sides(a, paused(side(1, 40, mean_s=0.1), np.zeros(40))).advice}
    assert entries["launch_bound"].measured == pytest.approx(0.5, abs=0.03)
    assert entries["launch_bound"].outcome == "as promised"
    assert entries["time_outside_steps"].measured == pytest.approx(0.75, abs=0.03)
    assert entries["time_outside_steps"].together is not None

"""Idle gaps: where they are, their causes, what the host did, and that their sum is the figure of the analysis."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import pytest

from gputop.advice.trace.facts import TraceFacts
from gputop.analysis.what_if import graph
from gputop.analysis.what_if.replay import replay_window
from gputop.diagnosis.diagnose import analyze_to_facts
from gputop.simulation.loop import SimulatedLoop
from gputop.simulation.scenarios import find_scenario
from gputop.simulation.xspace import build_xspace
from gputop.timeline.idle_gap_work import IdlePeriod, host_work_in
from gputop.timeline.idle_gaps import rank_idle_gaps
from gputop.timeline.model import CAUSES, IdleTotal
from gputop.trace.model import Kind, Trace
from gputop.trace.readers.xspace.reader import read_xspaces
from tests.advice.labeled.cases import fault_case
from tests.advice.trace.stalls import fetching
from tests.advice.trace.traces import fill, healthy, input_bound, job, launch_bound, uneven
from tests.diagnosis.real_traces import facts_of, needs_data
from tests.records import replace
from tests.timeline.make import find_idle_gaps, timeline_of
from tests.trace.build import Builder, keras_steps

ALL = 10**6  # more than any of these traces has
MOST = 1_000


@cache
def labeled(fault: str) -> TraceFacts:
    case = fault_case(fault, "strong", 1)
    return analyze_to_facts(read_xspaces([(f"{case.name}.xplane.pb", "trainer-0", case.bytes())]))


def test_waiting_for_input():
    first, *others = find_idle_gaps(analyze_to_facts(input_bound().build()))
    assert (first.gpus, first.part, first.cause, first.finding) == ((0,), "input", "input", "input_bound")
    assert first.work[0].thread == "tf_data_private_threadpool/1" and first.work[0].role == "input"
    assert first.work[0].op == "Iterator::Root::Prefetch::Map"
    assert first.host == "tf_data_private_threadpool/1: Iterator::Root::Prefetch::Map 98%"
    assert first.ended_by == "loop_add_fusion_3, launched by launch 0"
    assert first.cost_ns == first.end_ns - first.start_ns >= 8_000_000
    assert all(b.cost_ns <= first.cost_ns for b in others)


def test_what_many_threads_of_a_pool_do_is_one_work():
    b = input_bound()
    for thread in range(2, 12):
        b.host("Decode", 20_000, 4_000 + 300 * thread, f"tf_data_private_threadpool/{thread}")
    found = [x for x in find_idle_gaps(analyze_to_facts(b.build())) if x.cause == "input"]
    second = min(found, key=lambda x: abs(x.start_ns - 20_000_000))
    pool = next(work for work in second.work if work.op == "Decode")
    assert (pool.thread, pool.threads, pool.role) == ("tf_data_private_threadpool (10 threads)", 10, "input")
    assert pool.time_ns == 5_950_000  # the mean


def test_python_between_the_steps():
    b = keras_steps(Builder(), 8, 20_000, 14_000)
    for i in range(8):
        b.run(0, 20_000 * i + 100, 13_800, launch=20_000 * i + 20, thread="python")
        b.host("SaveV2", 20_000 * i + 14_500, 4_000, "python")
    first = find_idle_gaps(analyze_to_facts(b.build()))[0]
    assert (first.part, first.cause, first.finding) == ("host", "gap", "step_gap_host")
    works = {work.op: work.time_ns for work in first.work}
    assert works["SaveV2"] == 4_000_000
    # From the call's end to SaveV2, from there to the next step's call, and nothing else.
    assert works[""] == pytest.approx(2_000_000, abs=200_000)
    assert first.host == "python: SaveV2 65%"


def test_late_launches():
    found = find_idle_gaps(analyze_to_facts(launch_bound().build()), ALL)
    amid_work = [b for b in found if b.start_ns > 0]  # what precedes the first kernel is the host's, and no finding's
    assert {b.finding for b in amid_work if b.cause == "dispatch"} <= {"launch_bound", "small_kernels"}
    by_cause = {b.cause for b in found if b.cost_ns > 25_000}
    assert "dispatch" in by_cause and found[0].work


def test_places_of_several_gpus_are_one():
    b = job(gpus=3)
    for gpu in range(3):
        for i in range(6):
            b.run(gpu, i * 20_000 + 100 + gpu, 9_000, launch=i * 20_000 + 50)
            b.run(gpu, i * 20_000 + 15_000 + 7 * gpu, 4_900, launch=i * 20_000 + 14_990)
    found = find_idle_gaps(analyze_to_facts(b.build()))
    inner = [b for b in found if b.cost_ns > 15_000_000]
    assert len(inner) == 5 and {b.gpus for b in inner} == {(0, 1, 2)}
    first = min(inner, key=lambda b: b.start_ns)
    assert (first.start_ns, first.end_ns) == (9_100_000, 15_014_000)
    assert first.cost_ns == sum(15_000_000 + 7_000 * gpu - 9_100_000 - 1_000 * gpu for gpu in range(3))


def test_gpus_by_turns_are_places_of_their_own():
    b = job(gpus=2)
    for i in range(6):
        b.run(0, i * 20_000 + 100, 9_900, launch=i * 20_000 + 10)
        b.run(1, i * 20_000 + 10_000, 9_950, launch=i * 20_000 + 20)
    found = [b for b in find_idle_gaps(analyze_to_facts(b.build())) if b.cause == "other_gpu"]
    assert {b.gpus for b in found} == {(0,), (1,)} and {b.part for b in found} == {"idle"}
    assert {(b.gpus, b.meanwhile[:14]) for b in found} == {((0,), "GPU 1 computes"), ((1,), "GPU 0 computes")}
    assert sum(b.cost_ns for b in found) > 85_000_000


def test_waiting_in_a_collective_for_the_last_gpu():
    b = job(gpus=3)
    for i in range(6):
        for gpu in range(3):
            work = 12_000 if gpu == 1 else 4_000
            begin = i * 20_000 + 100
            b.run(gpu, begin, work, launch=begin - 50)
            b.run(gpu, begin + work, i * 20_000 + 18_000 - begin - work, "ncclDevKernel_AllReduce_Sum_f32_RING_LL(x)",
                  kind=Kind.COLLECTIVE, launch=begin - 40)
            b.run(gpu, i * 20_000 + 18_000, 1_950, launch=begin - 30)
    facts = analyze_to_facts(b.build())
    found = [b for b in find_idle_gaps(facts) if b.cause == "collective_wait"]
    assert len(found) == 5 and {b.gpus for b in found} == {(0, 2)} and {b.part for b in found} == {"collectives"}
    assert {(b.end_ns - b.start_ns, b.cost_ns) for b in found} == {(8_000_000, 16_000_000)}
    assert {b.meanwhile for b in found} == {"GPU 1 computes for 100% of the gap"}
    assert found[0].ended_by.startswith("GPU 1, the last to reach ncclDevKernel_AllReduce")
    assert {b.finding for b in found} <= {id_ for f in facts.analysis.findings for id_ in [f.id]}


@pytest.mark.parametrize(("fault", "cause"), [
    ("step_gap_host", "gap"), ("retracing", "tracing"), ("eager_execution", "eager"), ("host_placement", "placement"),
    ("thread_contention", "dispatch"), ("sync_copies", "dispatch"), ("launch_bound", "dispatch"),
    ("serial_gpus", "other_gpu"), ("gpu0_oversubscribed", "collective_wait"),
])
def test_most_of_what_is_lost_belongs_to_the_fault_that_was_put_in(fault, cause):
    found = find_idle_gaps(labeled(fault), MOST)
    lost = sum(b.cost_ns for b in found)
    assert sum(b.cost_ns for b in found if b.finding == fault) > 0.75 * lost
    assert sum(b.cost_ns for b in found if b.cause == cause) > 0.75 * lost
    assert found[0].cause == cause or fault == "launch_bound"  # there the longest are between the steps


def test_a_thread_that_is_kept_from_launching_shows_no_event():
    first = find_idle_gaps(labeled("thread_contention"))[0]
    assert first.work[0].op == "" and first.work[0].role == "executor" and ": no event " in first.host


def scenario(name: str) -> Trace:
    loop = SimulatedLoop(find_scenario(name))
    begin = 20_000_000_000
    data = build_xspace(loop, begin, begin + 1_200_000_000, 1_700_000_000_000_000_000, "node")
    return read_xspaces([("node.xplane.pb", "node", data)])


@pytest.mark.parametrize(("name", "finding"), [
    ("input-bound", "input_bound"), ("gpu0-oversubscribed", "gpu0_oversubscribed"), ("launch-bound", "launch_bound"),
])
def test_the_simulated_jobs(name, finding):
    found = find_idle_gaps(analyze_to_facts(scenario(name)), MOST)
    lost = sum(b.cost_ns for b in found)
    assert sum(b.cost_ns for b in found if b.finding == finding) > 0.6 * lost
    assert len(found[0].gpus) >= (7 if name == "gpu0-oversubscribed" else 1)


def totals_agree(facts: TraceFacts, totals: Sequence[IdleTotal]) -> None:
    """The totals are the figures that the verdicts rest on."""
    parts, host = facts.analysis.breakdown, facts.host
    by_cause: dict[str, float] = {}
    for total in totals:
        assert total.s_per_step > 0 and total.gaps > 0
        by_cause[total.cause] = by_cause.get(total.cause, 0.0) + total.s_per_step
    if parts is not None and facts.analysis.gpus:
        assert by_cause.get("input", 0.0) == pytest.approx(parts.input, abs=1e-9)
        assert sum(time for cause, time in by_cause.items() if cause != "collective_wait") == pytest.approx(
            parts.input + parts.launch + parts.host + parts.idle, rel=1e-6, abs=1e-9)
    alike = host is not None and host.gap_host is None  # else the gaps are those of one rank
    # Ops on the host before the GPUs' first event are idle time, and no ground for a verdict on the steps.
    seen = facts.steps is None or facts.steps.bounds_ns[0][0] >= max(
        (timeline.window_ns[0] for timeline in facts.gpu_timelines), default=0)
    for cause in ("tracing", "eager", *(["placement"] if seen else []), "gap", "dispatch") if alike else ():
        assert by_cause.get(cause, 0.0) == pytest.approx(getattr(host, f"{cause}_s") or 0.0, rel=1e-6, abs=1e-9)
    if facts.waits is not None:
        waiting = facts.waits.waiting_s
        assert by_cause.get("collective_wait", 0.0) == pytest.approx(
            sum(waiting.values()) / max(1, len(facts.gpu_timelines)), rel=1e-6, abs=1e-9)


def consistent(facts: TraceFacts) -> None:
    """The sums are the breakdown's and the collectives' own, by part, and every field says what it may."""
    gaps = rank_idle_gaps(facts, ALL)
    totals, every = gaps.totals, [f.idle_gap for f in gaps.ranked]
    analysis = facts.analysis
    parts = analysis.breakdown
    if parts is not None and analysis.gpus:
        ran = sum(gpu.busy > 0 for gpu in analysis.gpus)
        idle = (parts.input + parts.launch + parts.host + parts.idle) * analysis.steps.count * ran
        assert sum(b.cost_ns for b in every if b.part != "collectives") / 1e9 == pytest.approx(idle, rel=1e-6, abs=1e-9)
    waits = facts.waits.waiting_s if facts.waits is not None else {}
    assert sum(b.cost_ns for b in every if b.part == "collectives") / 1e9 == pytest.approx(
        sum(waits.values()) * facts.steps_or_window, rel=1e-6, abs=1e-9)
    totals_agree(facts, totals)
    gpus = {gpu.gpu for gpu in analysis.gpus}
    for b in every:
        assert b.cause in CAUSES and b.part in ("input", "launch", "host", "idle", "collectives")
        assert set(b.gpus) <= gpus and len(set(b.gpus)) == len(b.gpus) > 0
        assert b.end_ns > b.start_ns and b.cost_ns <= len(b.gpus) * (b.end_ns - b.start_ns)
        assert b.finding is None or b.finding in {f.id for f in analysis.findings}
        assert all(0 < work.time_ns <= b.end_ns - b.start_ns for work in b.work)
    costs = [b.cost_ns for b in every]
    assert costs == sorted(costs, reverse=True)
    for few in (1, 10):  # the search that ends early finds as much
        assert [f.idle_gap.cost_ns for f in rank_idle_gaps(facts, few).ranked] == costs[:few]
    timeline = timeline_of(facts)
    assert min(len(every), 200) <= len(timeline.idle_gaps) <= min(len(every), 200 + 10 * len(totals))
    for total in timeline.idle_totals:  # none without a place of its own, where there is one
        assert any(map(total.holds, timeline.idle_gaps)) == any(map(total.holds, every))
    for built, idle_gap in zip(timeline.idle_gaps[:200], every, strict=False):
        assert built.cost_ns == idle_gap.cost_ns and (built.ends is None) == (built.ended_by == "")
        if built.ends is not None:
            ender = timeline.range(*built.ends)
            assert built.start_ns <= ender.start_ns <= built.end_ns
            assert ender.name in built.ended_by


@needs_data
@pytest.mark.parametrize("name", ["dlrm", "a100", "v100", "mfu", "h100"])
def test_real_traces_add_up(name):
    consistent(facts_of(name))


@pytest.mark.parametrize("make", [
    lambda: healthy(2).build(), lambda: input_bound().build(), lambda: launch_bound(2).build(),
    lambda: uneven(0, 2.0).build(),
], ids=["healthy", "input", "launch", "uneven"])
def test_made_traces_add_up(make):
    consistent(analyze_to_facts(make()))


def test_without_steps_the_window_counts():
    b = Builder()
    fill(b, 0, 0, 1_000, 96, 50)
    facts = analyze_to_facts(b.build())
    assert facts.analysis.steps is None
    consistent(facts)


def test_gaps_beyond_the_replayed_steps_belong_to_their_finding_too(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = analyze_to_facts(fetching(4, 400).build())
    monkeypatch.setattr(graph, "MAX_EVENTS", 200)
    part = replace(facts, replay=replay_window(facts.trace, facts.gpu_timelines, facts.steps))
    assert part.replayed_steps < facts.replayed_steps == facts.steps_or_window
    found = find_idle_gaps(part)
    assert found == find_idle_gaps(facts) and sum(gap.finding == "sync_copies" for gap in found) >= 4 * 5


def test_work_that_began_before_an_idle_period_counts_within_it() -> None:
    """Of periods in any order, which overlap."""
    b = Builder().run(0, 0, 1).host("outer", 10, 90).host("inner", 40, 30).host("other", 55, 20, "other thread")
    periods = [IdlePeriod(start * 1000, end * 1000, "gap", (0,)) for start, end in (
        (60, 80), (20, 30), (50, 60), (95, 120), (60, 65))]
    works = [{work.op: work.time_ns // 1000 for work in done} for done in host_work_in(b.build(), None, periods)]
    assert works == [{"inner": 10, "outer": 10, "other": 15}, {"outer": 10}, {"inner": 10, "other": 5}, {"outer": 5},
                     {"inner": 5, "other": 5}]


@pytest.mark.parametrize("b", [keras_steps(Builder(gpus=0), 5, 1_000, 900), Builder().run(0, 0, 100).run(0, 100, 100)])
def test_without_a_gpu_or_a_rest_there_is_no_place(b):
    assert find_idle_gaps(analyze_to_facts(b.build())) == ()

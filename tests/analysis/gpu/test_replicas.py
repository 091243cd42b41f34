from __future__ import annotations

from statistics import median

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gputop.analysis.gpu.device_time import timelines
from gputop.analysis.gpu.replicas import replicas
from gputop.analysis.results import Replicas
from gputop.analysis.steps.steps import find_steps
from gputop.core.findings import TraceNote
from gputop.diagnosis.diagnose import analyze_trace
from gputop.simulation.loop import SimulatedLoop
from gputop.simulation.scenarios import find_scenario
from gputop.simulation.xspace import build_xspace
from gputop.trace.model import Kind, TraceGpu
from gputop.trace.readers.xspace.reader import read_xspaces
from tests.analysis.gpu.replica_traces import STEPS, each_step, job
from tests.trace.build import Builder


def compared(b: Builder) -> Replicas:
    trace = b.build()
    return replicas(trace, timelines(trace), find_steps(trace))


def test_work_is_compared_with_the_median_of_the_others():
    b = job(4)
    for gpu, length in ((0, 400), (1, 100), (2, 110), (3, 90)):
        each_step(b, gpu, 50, length)
        each_step(b, gpu, 600, 50, name="nccl", kind=Kind.COLLECTIVE)
    each_step(b, 0, 500, 10, name="MemcpyH2D", kind=Kind.H2D, size=100)
    each_step(b, 1, 500, 10, name="MemcpyH2D", kind=Kind.H2D)
    r = compared(b)
    assert r.basis == "step" and r.work is not None and r.gpu0_ratio == 4
    assert [w.compute_s for w in r.work] == pytest.approx([400e-6, 100e-6, 110e-6, 90e-6])
    assert [w.compute_ratio for w in r.work] == pytest.approx([4, 100 / 110, 1.1, 90 / 110])
    assert [(w.kernels, w.copies, w.copied_bytes) for w in r.work] == [(1, 1, 100), (1, 1, None), (1, 0, 0), (1, 0, 0)]
    assert [w.kernels_ratio for w in r.work] == [1, 1, 1, 1] and [w.copies_ratio for w in r.work][:2] == [None, None]


def test_without_steps_the_window_counts_and_what_needs_steps_abstains():
    r = compared(Builder(gpus=2).run(0, 0, 30, launch=0).run(1, 30, 10, launch=0))
    assert r.basis == "window" and r.gpu0_ratio == 3 and r.first_kernel is None
    assert r.compute is not None and r.compute.exactly == (0, 1, 0) and r.compute.serial == 1
    assert r.missing == {"first_kernel": "no steps were found"}
    assert r.launches is not None and r.launches.delay_median_s is None and r.launches.order is None


def test_idle_and_single_gpus_are_not_compared():
    for b, reason in ((Builder(gpus=3).run(1, 0, 10), "only one GPU computes"),
                      (Builder(gpus=2).run(0, 0, 10, "MemcpyH2D", kind=Kind.H2D), "no GPU computes")):
        r = compared(b)
        assert r.work is None and r.compute is None and r.launches is None and r.gpu0_ratio is None
        assert set(r.missing) == {"work", "compute", "busy", "first_kernel", "launches"}
        assert all(reason in text for text in r.missing.values())


def test_ranks_of_several_hosts_keep_their_names_and_on_different_clocks_are_not_compared_in_time():
    trace = each_step(each_step(job(2), 0, 50, 10, launch=20), 1, 50, 20, launch=20).build()
    trace.gpus = [TraceGpu("a", 0, 0), TraceGpu("b", 0, 1)]
    trace.quality.append(TraceNote("no_common_clock", "…"))
    r = replicas(trace, timelines(trace), find_steps(trace))
    assert r.work is not None and [(w.gpu, w.host, w.rank) for w in r.work] == [(0, "a", 0), (1, "b", 1)]
    assert r.gpu0_ratio == 0.5 and r.compute is None and r.first_kernel is None and r.launches is None
    assert all("clock" in r.missing[part] for part in ("compute", "busy", "first_kernel", "launches"))


def test_collectives_that_wait_do_not_count_as_running_side_by_side():
    b = job(2)
    each_step(each_step(b, 0, 0, 400), 1, 400, 400)
    each_step(each_step(b, 0, 400, 450, name="nccl", kind=Kind.COLLECTIVE), 1, 800, 50, name="nccl",
              kind=Kind.COLLECTIVE)
    r = compared(b)
    assert r.compute is not None and r.busy is not None
    assert r.compute.serial == 1 and r.compute.exactly == pytest.approx((0.2, 0.8, 0))
    # GPU 1 is idle for the first 400 µs of a step; after that both are busy, one of them in vain.
    assert r.busy.exactly == pytest.approx((0.15, 0.4, 0.45))


def test_serial_gpus_launched_by_one_thread():
    b = job(3)
    for gpu in range(3):
        for k in range(4):
            each_step(b, gpu, 100 + gpu * 200 + k * 40, 40, launch=60 + gpu * 200 + k * 40, launch_length=4,
                      thread="python")
    r = compared(b)
    launches = r.launches
    assert launches is not None and launches.threads == {0: 1, 1: 1, 2: 1} and launches.shared_launches == 1
    assert launches.launches_per_turn == 4 and launches.steps == STEPS - 1  # the last step is not whole
    assert launches.delay_median_s == pytest.approx({0: 0, 1: 200e-6, 2: 400e-6})
    assert launches.span_median_s == pytest.approx({0: 120e-6, 1: 120e-6, 2: 120e-6})
    assert launches.order == (0, 1, 2) and launches.order_share == 1
    assert r.compute is not None and r.compute.serial == 1 and r.compute.serial_by_chance < 0.95
    skew = r.first_kernel
    assert skew is not None and skew.steps == STEPS - 1 and skew.last == {2: STEPS - 1}
    assert (skew.median_s, skew.p95_s) == pytest.approx((400e-6, 400e-6))
    assert skew.behind_median_s == pytest.approx({0: 0, 1: 200e-6, 2: 400e-6})


def test_launches_in_turns():
    b = job(2)
    for k in range(6):
        for gpu in range(2):
            at = 60 + k * 60 + gpu * 5
            each_step(b, gpu, at + 40, 40, launch=at, launch_length=4, thread="python")
    launches = compared(b).launches
    assert launches is not None and launches.launches_per_turn == 1 and launches.shared_launches == 1


def test_short_turns_beside_long_ones_count_for_little():
    b = Builder(gpus=2)
    launch = iter(range(0, 1000, 10))
    for gpu, run in ((0, 20), (1, 1), (0, 1), (1, 1), (0, 1), (1, 20)):
        for at in (next(launch) for _ in range(run)):
            b.run(gpu, at + 5, 4, launch=at, launch_length=2, thread="python")
    assert compared(b).launches.launches_per_turn == 20


def test_a_kernel_belongs_to_the_step_that_launched_it():
    """A deep queue: the kernels run in the step after the one that launched them."""
    b = job(2)
    each_step(each_step(b, 0, 1050, 20, launch=100), 1, 1250, 20, launch=110)
    skew = compared(b).first_kernel
    assert skew is not None and skew.median_s == pytest.approx(200e-6) and skew.steps == STEPS - 1


@pytest.mark.parametrize("behind", [30, 0])
def test_without_launches_first_kernels_go_by_their_start_and_those_that_start_together_have_no_last(behind):
    r = compared(each_step(each_step(job(2), 0, 50, 20), 1, 50 + behind, 20))
    assert r.launches is None and "does not show" in r.missing["launches"]
    assert r.first_kernel is not None and r.first_kernel.median_s == pytest.approx(behind * 1e-6)
    assert r.first_kernel.last == ({1: STEPS - 1} if behind else {})


def test_first_kernels_need_two_steps_with_all_gpus():
    b = each_step(job(2), 0, 50, 20).run(1, 60, 20)
    assert "fewer than two" in compared(b).missing["first_kernel"]
    one = Builder(gpus=2).host("train", 0, 100, step_num=1).run(0, 10, 20).run(1, 30, 20)
    assert compared(one).missing["first_kernel"] == "the trace has only one step"


launched = st.lists(st.tuples(
    st.integers(0, 2), st.integers(0, 4900), st.integers(1, 60), st.one_of(st.none(), st.integers(0, 900)),
    st.sampled_from(["python", "a", None])), min_size=1, max_size=30)


def made(events) -> Builder:
    b = job(3)
    for gpu, start, length, ahead, thread in events:
        launch = None if ahead is None else max(start - ahead, 0)
        b.run(gpu, start, length, launch=launch, launch_length=1, thread=thread and f"{thread}")
    return b


@given(launched)
def test_first_kernels_against_plain_search(events):
    trace = made(events).build()
    steps = find_steps(trace)
    assert steps is not None
    r = replicas(trace, timelines(trace), steps)
    own = {gpu: [e for e in events if e[0] == gpu] for gpu in {e[0] for e in events}}
    known = {gpu: [e for e in of if e[3] is not None] for gpu, of in own.items()}
    by_launch = all(len(known[gpu]) * 2 >= len(own[gpu]) and known[gpu] for gpu in own)
    if len(own) < 2:
        assert r.work is None
        return
    worst = []
    for a, b in steps.bounds_ns:
        first = []
        for gpu in own:
            keyed = [(max(e[1] - e[3], 0) if by_launch else e[1], e[1]) for e in (known if by_launch else own)[gpu]]
            inside = [pair for pair in keyed if a <= pair[0] * 1000 < b]
            first.append(min(inside)[1] if inside else None)
        if None not in first:
            worst.append(max(first) - min(first))
    if len(worst) < 2:
        assert r.first_kernel is None
    else:
        assert r.first_kernel is not None and r.first_kernel.steps == len(worst)
        assert r.first_kernel.median_s == pytest.approx(median(worst) * 1e-6)
    assert (r.launches is not None) == by_launch
    if r.launches is not None:
        threads = {gpu: {e[4] or f"launch {gpu}" for e in of} for gpu, of in known.items()}
        assert r.launches.threads == {gpu: len(names) for gpu, names in threads.items()}
        shared = [e for gpu, of in known.items() for e in of
                  if sum((e[4] or f"launch {gpu}") in names for names in threads.values()) > 1]
        assert r.launches.shared_launches == pytest.approx(len(shared) / sum(map(len, known.values())))


@settings(max_examples=25)
@given(launched, st.integers(0, 1000))
@example([(0, 0, 1, 0, "python"), (1, 386, 10, 150, "python"), (1, 386, 10, 150, "a")], 0)  # but for who launched them
def test_the_order_of_events_lines_and_names_does_not_matter(events, seed):
    b = made(events)
    assert analyze_trace(b.build()).to_json() == analyze_trace(b.build(shuffle=seed)).to_json()


@pytest.mark.parametrize(("scenario", "uneven"), [("gpu0-oversubscribed", True), ("healthy", False)])
def test_simulated_jobs(scenario, uneven):
    begin, loop = 20_000_000_000, SimulatedLoop(find_scenario(scenario))
    data = build_xspace(loop, begin, begin + 2_500_000_000, 1_700_000_000 * 10**9, "node")
    trace = read_xspaces([("node.xplane.pb", "node", data)])
    r = replicas(trace, timelines(trace), find_steps(trace))
    assert r.gpu0_ratio is not None and (r.gpu0_ratio > 1.5) == uneven and not r.missing
    assert r.compute is not None and r.compute.serial is not None
    assert (r.compute.serial > 0.4) == uneven  # GPU 0 works on alone while the others wait in their all-reduce
    assert r.launches is not None and set(r.launches.threads.values()) == {1} and r.launches.shared_launches == 0
    # The simulation starts the replicas' launch threads 40 µs after each other.
    assert r.launches.delay_median_s is not None and r.launches.delay_median_s[7] == pytest.approx(280e-6, rel=0.1)


@pytest.mark.parametrize("far", [10**6, 10**9, 10**12])
def test_events_that_lie_far_apart_break_nothing(far):
    """Damaged times: seconds, a quarter of an hour and a week and a half, in microseconds."""
    b = Builder(gpus=2)
    for gpu in range(2):
        b.run(gpu, gpu, 10, launch=0).run(gpu, far, far + gpu, launch=far - 5).run(gpu, 3 * far, 0)
        b.run(gpu, 5, far, "MemcpyH2D", kind=Kind.H2D, size=2**60)
    a = analyze_trace(b.build())
    assert a.replicas is not None and (a.replicas.compute is None) == (far == 10**12)
    assert ("longer than a day" in a.replicas.missing.get("compute", "")) == (far == 10**12)
    assert a.kernels is not None and a.kernels.time_s == pytest.approx((2 * far + 21) * 1e-6, rel=1e-6)


def test_steps_that_start_together_have_no_last():
    r = compared(each_step(each_step(job(2), 0, 50, 20), 1, 50, 20))
    assert r.first_kernel is not None and r.first_kernel.median_s == 0 and r.first_kernel.last == {}

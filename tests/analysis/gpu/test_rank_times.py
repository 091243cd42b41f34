"""The ranks of a job side by side, against figures reckoned by hand."""

from __future__ import annotations

import pytest

from gputop.analysis.gpu.breakdown import bounds_judged, idle_by_gpu
from gputop.analysis.gpu.collective_waits import collective_waits
from gputop.analysis.gpu.device_time import timelines
from gputop.analysis.gpu.rank_times import least_median_most, rank_times
from gputop.analysis.results import RankTimes
from gputop.analysis.steps.steps import find_steps
from gputop.diagnosis.diagnose import analyze_trace
from gputop.diagnosis.report import text_report
from gputop.trace.model import Kind
from tests.analysis.gpu.collective_names import NCCL
from tests.analysis.gpu.replica_traces import STEP, each_step, job
from tests.trace.build import Builder

LOADS = {0: 400, 1: 100, 2: 200, 3: 150}  # µs of compute; all meet at 500 for 50 µs of transfer


def uneven() -> Builder:
    b = job(4)
    for gpu, length in LOADS.items():
        each_step(b, gpu, 50, length)
        each_step(b, gpu, 50 + length, 500 - length, name=NCCL, kind=Kind.COLLECTIVE, stream=2)
    each_step(b, 1, 600, 30, name="MemcpyH2D", kind=Kind.H2D, stream=3)
    return b


def ranks(b: Builder) -> tuple[RankTimes, ...]:
    trace = b.build()
    gpu_timelines, steps = timelines(trace), find_steps(trace)
    idle = idle_by_gpu(trace, gpu_timelines, bounds_judged(trace, gpu_timelines, steps))
    return rank_times(trace, gpu_timelines, steps, collective_waits(trace, gpu_timelines, steps, idle))


def test_load_communication_waiting_and_the_rest_are_the_step() -> None:
    found = ranks(uneven())
    assert [r.load_s for r in found] == pytest.approx([400e-6, 130e-6, 200e-6, 150e-6])
    assert [r.waiting_s for r in found] == pytest.approx([0, 300e-6, 200e-6, 250e-6])
    assert [r.communication_s for r in found] == pytest.approx([100e-6] * 4)
    for r in found:
        assert r.load_s + r.communication_s + (r.waiting_s or 0) + r.other_s == pytest.approx(STEP * 1e-6)
    assert found[0].most_steps == sum(r.most_steps for r in found)


def test_the_ends_and_the_middle_are_shown() -> None:
    found = ranks(uneven())
    extremes = least_median_most(found)
    assert extremes.by == "load"
    assert [(word, r.gpu) for word, r in extremes.ranks] == [("least", 1), ("median", 3), ("most", 0)]
    assert [word for word, _ in least_median_most(found[:2]).ranks] == ["least", "most"]
    assert least_median_most(found[:1]).ranks == ()
    text = text_report(analyze_trace(uneven().build()), 80)
    assert [line.split()[:3] for line in text.splitlines() if line.startswith(("  least ", "  most "))
            ] == [["least", "GPU", "1"], ["most", "GPU", "0"]]


def test_a_rank_that_its_host_holds_up_is_found_by_its_waiting() -> None:
    b = job(4)
    for gpu, delay in ((0, 10), (1, 300), (2, 0), (3, 20)):  # the second begins late, with as much load as the others
        each_step(b, gpu, 50 + delay, 100)
        each_step(b, gpu, 150 + delay, 350 - delay, name=NCCL, kind=Kind.COLLECTIVE, stream=2)
    extremes = least_median_most(ranks(b))
    assert extremes.by == "waiting"
    assert [(word, r.gpu) for word, r in extremes.ranks] == [("least", 1), ("median", 3), ("most", 2)]
    text = text_report(analyze_trace(b.build()), 80)
    assert "The other ranks wait for the rank that waits least." in " ".join(text.split())
    assert "  by waiting  rank " in text and "  least       GPU 1 " in text


def test_what_cannot_be_told_is_not_told() -> None:
    assert ranks(Builder(gpus=2).run(0, 0, 30).run(1, 30, 10)) == ()  # no steps
    assert ranks(each_step(job(1), 0, 50, 100)) == ()  # one rank
    b = uneven()
    b.run(0, 700, 10, NCCL, kind=Kind.COLLECTIVE)  # one more than the others have
    without = ranks(b)
    assert all(r.communication_s >= 50e-6 for r in without)
    for r in without:
        assert r.load_s + r.communication_s + (r.waiting_s or 0) + r.other_s == pytest.approx(STEP * 1e-6)
    b = job(2)
    for gpu in (0, 1):
        each_step(b, gpu, 50, 100)
    assert [(r.waiting_s, r.communication_s) for r in ranks(b)] == [(None, 0.0), (None, 0.0)]

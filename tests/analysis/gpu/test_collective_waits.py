"""Exposed communication, split by hand into waiting and transfer."""

from __future__ import annotations

import numpy as np
import pytest

from gputop.analysis.gpu.breakdown import IdleByGpu, bounds_judged, idle_by_gpu
from gputop.analysis.gpu.collective_waits import CollectiveWaits, _holding_up, collective_waits
from gputop.analysis.gpu.device_time import timelines
from gputop.trace.intervals import union
from gputop.trace.model import Kind
from tests.analysis.gpu.collective_names import NCCL
from tests.trace.build import Builder


def waits(b: Builder) -> CollectiveWaits:
    trace = b.build()
    gpu_timelines = timelines(trace)
    idle = idle_by_gpu(trace, gpu_timelines, bounds_judged(trace, gpu_timelines, None))
    found = collective_waits(trace, gpu_timelines, None, idle)
    assert found is not None
    return found


def late(by: float = 300) -> Builder:
    """Three GPUs; 0 and 1 wait from 100 for GPU 2; then 50 µs of transfer."""
    b = Builder(gpus=3)
    for gpu in range(3):
        begin = 100 + (by if gpu == 2 else 0)
        b.run(gpu, 0, begin)
        b.run(gpu, begin, 150 + by - begin, NCCL, kind=Kind.COLLECTIVE, stream=2)
    return b


def test_waiting_and_transfer():
    w = waits(late())
    assert w.waiting_s == pytest.approx({0: 300e-6, 1: 300e-6, 2: 0})
    assert w.transfer_s == pytest.approx(dict.fromkeys(range(3), 50e-6)) and w.bare_s == pytest.approx(50e-6)
    assert w.late_s == pytest.approx({2: 300e-6}) and w.late_times == {2: 1} and w.count == 1
    assert w.durations_s == pytest.approx((50e-6,)) and w.allreduce_exposed == 1


def test_what_work_hides_does_not_count():
    b = late()
    b.run(0, 100, 300)  # GPU 0 computes while it waits, GPU 1 copies
    b.run(1, 100, 300, "MemcpyH2D", kind=Kind.H2D, stream=3)
    b.run(2, 410, 40)  # GPU 2 computes beside most of the transfer
    w = waits(b)
    assert w.waiting_s == pytest.approx({0: 0, 1: 0, 2: 0}) and sum(w.late_s.values()) == 0
    assert w.bare_s == pytest.approx(10e-6) and w.allreduce_exposed == pytest.approx(0.2)


def test_what_cannot_be_matched_says_why_and_without_collectives_there_is_nothing():
    b = late()
    b.run(0, 4_900, 10, NCCL, kind=Kind.COLLECTIVE)  # one more, and not at the window's edge
    for gpu in range(3):
        b.run(gpu, 5_000, 10, NCCL, kind=Kind.COLLECTIVE)
    w = waits(b)
    assert "different numbers" in w.unmatched["AllReduce"] and w.count == 0
    trace = Builder().run(0, 0, 10).build()
    assert collective_waits(trace, timelines(trace), None, IdleByGpu({}, {})) is None


@pytest.mark.parametrize("held_up", [True, False])
def test_lateness_by_late_launches_is_distinguished_from_lateness_by_more_work(held_up):
    b = Builder(gpus=2)
    for gpu in range(2):
        b.run(gpu, 10, 90, launch=0)
        b.run(gpu, 100, 50, NCCL, kind=Kind.COLLECTIVE, stream=2, launch=5)
    b.run(0, 150, 100, launch=20)
    b.run(0, 250, 350, NCCL, kind=Kind.COLLECTIVE, stream=2, launch=25)
    begin = 450 if held_up else 150  # either 300 late, or 300 more to do
    b.run(1, begin, 550 - begin, launch=begin - 5 if held_up else 20)
    b.run(1, 550, 50, NCCL, kind=Kind.COLLECTIVE, stream=2, launch=begin)
    w = waits(b)
    assert sum(w.late_s.values()) == pytest.approx(300e-6)
    assert w.late_by_host_s == pytest.approx(295e-6 if held_up else 0, abs=6e-6)
    assert w.held_up_s == (pytest.approx({1: 295e-6}, abs=6e-6) if held_up else {})
    assert {gpu: spans.total for gpu, spans in w.held_up.items()} == ({1: 300_000} if held_up else {})


def test_of_the_gaps_of_a_late_gpu_the_long_ones_hold_it_up_unless_there_are_only_short_ones():
    us = 1_000
    gaps = union([0, 100 * us, 900 * us], [2 * us, 700 * us, 905 * us])
    one = _holding_up(gaps, np.array([0]), np.array([1_000 * us]), np.array([550.0 * us]))
    assert list(zip(one.start.tolist(), one.end.tolist(), strict=True)) == [(100 * us, 700 * us)]
    many = union(np.arange(100) * 10 * us, np.arange(100) * 10 * us + 5 * us)
    assert _holding_up(many, np.array([0]), np.array([1_000 * us]), np.array([400.0 * us])).total == 500 * us
    assert not _holding_up(gaps, np.array([0]), np.array([0]), np.array([0.0])).total

from __future__ import annotations

import pytest

from gputop.trace.collectives import collectives
from gputop.trace.device_time import timelines
from gputop.trace.model import Kind
from gputop.trace.steps import find_steps
from tests.trace.build import Builder, keras_steps


def judged(b: Builder):
    trace = b.build()
    return collectives(trace, timelines(trace), find_steps(trace))


def reduce(b: Builder, gpu: int, start: float, end: float) -> None:
    b.run(gpu, start, end - start, "ncclKernel_AllReduce_RING_LL_Sum_float", kind=Kind.COLLECTIVE)


def test_the_shortest_is_the_transfer_and_the_rest_waits_for_the_last():
    b = keras_steps(Builder(gpus=3), 5, 1000, 900)
    for i in range(5):
        for gpu, start in ((0, 100), (1, 300), (2, 380)):
            reduce(b, gpu, i * 1000 + start, i * 1000 + 400)
    c = judged(b)
    assert c is not None and c.count_per_step == 1
    assert c.summed_s == pytest.approx(5 * (300 + 100 + 20) * 1e-6)
    assert c.transfer_s == pytest.approx(5 * 3 * 20e-6)
    assert c.waiting == pytest.approx(1 - 60 / 420)
    assert c.last_to_arrive == {2: 5}


def test_unequal_counts_are_not_matched():
    b = Builder(gpus=2)
    reduce(b, 0, 0, 10)
    reduce(b, 0, 20, 30)
    reduce(b, 0, 40, 50)
    reduce(b, 1, 0, 10)
    reduce(b, 1, 40, 50)
    c = judged(b)
    assert c is not None and c.waiting is None and "2 to 3" in (c.reason or "")
    assert c.summed_s == pytest.approx(50e-6)


def test_what_the_windows_edge_cut_off_on_one_gpu_is_left_out():
    b = Builder(gpus=2)
    reduce(b, 0, 0, 10)  # before the capture began on GPU 1
    for i in range(1, 4):
        reduce(b, 0, i * 10_000, i * 10_000 + 100)
        reduce(b, 1, i * 10_000 + 60, i * 10_000 + 100)
    c = judged(b)
    assert c is not None and c.transfer_s == pytest.approx(3 * 2 * 40e-6)
    assert c.waiting == pytest.approx(1 - 80 / 140) and c.last_to_arrive == {1: 3}
    assert c.summed_s == pytest.approx((10 + 3 * 140) * 1e-6)


def test_ends_more_than_a_millisecond_apart_are_not_matched():
    b = Builder(gpus=2)
    reduce(b, 0, 0, 100)
    reduce(b, 1, 0, 1200)
    c = judged(b)
    assert c is not None and c.transfer_s is None and "1.1 ms" in (c.reason or "")


def test_one_gpu_alone_tells_nothing_of_the_others():
    b = Builder()
    reduce(b, 0, 0, 10)
    c = judged(b)
    assert c is not None and c.waiting is None and "only one GPU" in (c.reason or "")


def test_none_without_collectives():
    assert judged(Builder().run(0, 0, 10)) is None

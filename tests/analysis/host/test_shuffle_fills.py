"""Shuffle buffers that fill, in a trace and in the looks of an overview."""

from __future__ import annotations

import pytest

from gputop.analysis.host.shuffle_fills import looks_of, shuffle_fills, waits_for_fills
from gputop.trace.model import Trace
from tests.records import replace
from tests.trace.build import Builder

PRODUCER, MAIN = "tf_data_iterator_get_next/1", "python"
SHUFFLE, BELOW = "Iterator::Root::BatchV2::Shuffle", "Iterator::Root::BatchV2::Shuffle::ParallelMapV2"
MS = 1e3  # in µs


def fill(b: Builder, begin: float, elements: int, each: float = 50.0, *, call: bool = True, step: str = "") -> float:
    """A buffer of so many elements fills; ``call``: its own call and that for the batch are recorded. Its end."""
    for i in range(elements):
        b.host(BELOW, begin + 1 + i * each, each - 2, PRODUCER)
    end = begin + elements * each + 1
    if call:
        b.host(SHUFFLE, begin, end - begin, PRODUCER)
        b.host("IteratorGetNextOp::DoCompute", begin - 2, end - begin + 4, "tf_Compute/1")
    return end


def train(b: Builder, begin: float, steps: int, batch: int = 16) -> float:
    """Steps of a full buffer: each element that it gives makes it draw one."""
    for _ in range(steps):
        for i in range(batch):
            b.host(SHUFFLE, begin + i * 20, 15, PRODUCER).host(BELOW, begin + i * 20 + 1, 10, PRODUCER)
        b.host("EagerExecute", begin, batch * 20 + 100, MAIN)
        begin += batch * 20 + 120
    return begin


def test_a_fill_has_as_many_elements_as_the_buffer():
    b = Builder(gpus=0)
    second = train(b, fill(b, 100, 400) + 10, 20) + 1000
    train(b, fill(b, second, 400) + 10, 20)
    trace = b.build(shuffle=3)
    fills = shuffle_fills(trace)
    assert [(one.elements, one.whole, one.stage) for one in fills] == [(400, True, "ParallelMapV2")] * 2
    assert [one.end_ns - one.start_ns for one in fills] == [pytest.approx(400 * 50e3, abs=2000)] * 2
    assert waits_for_fills(trace).total == pytest.approx(2 * 400 * 50e3, abs=5000)


@pytest.mark.parametrize("call", [True, False])
def test_a_loop_that_runs_on_does_not_wait(call):
    b = Builder(gpus=0)
    fill(b, 100, 400, call=call)
    waits = waits_for_fills(b.build()).total
    b.host("EagerExecute", 0, 10 * MS, MAIN)  # of another dataset, or of the next epoch
    assert waits_for_fills(b.build()).total == (waits if call else pytest.approx(waits - 9900e3, abs=3000))


def test_a_fill_that_is_cut_off_is_seen_by_its_draws():
    b = Builder(gpus=0)
    begun_before = fill(b, 0, 300, call=False)
    last = train(b, begun_before + 10, 10)
    fill(b, last + 500, 200, call=False)
    assert [(one.elements, one.whole) for one in shuffle_fills(b.build())] == [(300, False), (200, False)]


def test_a_full_buffer_and_a_pipeline_without_a_shuffle_fill_nothing():
    b = Builder(gpus=0)
    train(b, 0, 50)
    b.host(BELOW, 30 * MS, 10, PRODUCER)  # at the edge of the recording its call is not recorded
    for i in range(500):
        b.host("Iterator::Root::BatchV2::ParallelMapV2", 40 * MS + i * 20, 15, PRODUCER)
    assert shuffle_fills(b.build()) == () and waits_for_fills(b.build()).total == 0


def looked(*fills: bool) -> Trace:
    """An overview of a part in one piece, and looks of 20 ms, in some of which a buffer fills."""
    b = Builder(gpus=0).host("EagerExecute", 0, 400 * MS, MAIN)
    unrecorded, last = [], 500 * MS
    for number, filling in enumerate(fills):
        begin = (number + 2) * 500 * MS
        unrecorded.append((round(last * 1e3), round(begin * 1e3)))
        last = begin + 20 * MS
        if filling:
            fill(b, begin, 390, call=False)
        else:
            train(b, begin, 40)
    trace = b.build()
    return replace(trace, unrecorded_ns=tuple(unrecorded), profile_window_ns=(0, round(last * 1e3)))


def test_looks_tell_how_often_it_fills():
    looks = looks_of(looked(True, True, False, False, False, True, False, False))
    assert looks.filling == (True, True, False, False, False, True, False, False) and looks.rounds == 1
    assert {int(t) for t in looks.spans.end - looks.spans.start} == {20_000_000}
    assert looks_of(looked(False, True, False, True)).rounds == 2
    assert looks_of(Builder(gpus=0).host("EagerExecute", 0, 400 * MS, MAIN).build()).filling == ()

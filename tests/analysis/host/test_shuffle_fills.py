"""Shuffle buffers that fill, in a trace and in the samples of an overview."""

from __future__ import annotations

from pathlib import Path

import pytest

from gputop.analysis.host.shuffle_fills import OverviewSamples, sample_spans, samples_of, shuffle_fills, waits_for_fills
from gputop.trace.readers.load import load
from tests.analysis.host.traces_of_shuffles import BELOW, MAIN, MS, PRODUCER, fill, sampled, train
from tests.trace.build import Builder

DATA = Path(__file__).resolve().parents[2] / "data"


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


def test_looks_tell_how_often_it_fills():
    overview = sampled(True, True, False, False, False, True, False, False)
    samples, spans = samples_of(overview), sample_spans(overview)
    assert (samples.samples, samples.filling, samples.rounds) == (8, 3, 1)
    assert {int(t) for t in spans.end - spans.start} == {20_000_000}
    assert samples_of(sampled(False, True, False, True)).rounds == 2
    assert samples_of(sampled(False, True, None, True)).rounds == 1, "a thread without a CPU draws nothing"
    assert samples_of(Builder(gpus=0).host("EagerExecute", 0, 400 * MS, MAIN).build()) == OverviewSamples()


def test_a_real_fill_is_whole_in_its_call():
    trace = load([DATA / "keras3_shuffle.xplane.pb.gz"])  # shuffle(400) behind a map of single elements
    (one,) = shuffle_fills(trace)
    assert (one.elements, one.whole, one.stage) == (400, True, "ParallelMapV2")
    assert waits_for_fills(trace).total == pytest.approx(one.end_ns - one.start_ns, rel=0.01)
    assert shuffle_fills(load([DATA / "keras3_slow_input.xplane.pb.gz"])) == ()

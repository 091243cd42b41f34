"""The rule on shuffle buffers that fill at each epoch."""

from __future__ import annotations

import pytest

from gputop.trace.model import Trace
from tests.advice.trace.traces import abstained, findings, verdict
from tests.analysis.host.stack_samples import sampled as stacks_of
from tests.analysis.host.traces_of_epochs import train
from tests.analysis.host.traces_of_shuffles import MS, fill, sampled
from tests.analysis.host.traces_of_shuffles import train as full_buffer
from tests.trace.build import Builder


def with_fills(times: int, elements: int, overview: Trace | None = None) -> Trace:
    """Epochs of 20 steps of 10 ms, each after a fill of 50 µs an element."""
    b, begin = Builder(gpus=0), 100.0
    for _ in range(times):
        begin = fill(b, begin, elements) + 100
        train(b, begin, 20)
        begin += 20 * 10 * MS + 100
    if not times:
        train(b, 0, 40)
    trace = b.build()
    trace.overviews = {0: overview} if overview is not None else {}
    return trace


def test_a_fill_of_each_epoch_or_of_one():
    found = verdict(with_fills(3, 4000), "shuffle_refill")
    fill = found.longest
    assert (found.times, fill.elements, fill.whole, fill.stage) == (3, 4000, True, "ParallelMapV2")
    assert fill.seconds == pytest.approx(0.2, abs=1e-4) and found.share == pytest.approx(0.6 / 1.2, rel=0.02)
    assert found.claim == "at most" and found.seen.samples == 0
    finding = findings(with_fills(3, 4000))["shuffle_refill"]
    assert finding.severity == "high" and "4,000 elements" in finding.why and ".repeat()" in (finding.snippet or "")
    finding = findings(with_fills(1, 4000))["shuffle_refill"]  # one fill is told as once
    assert finding.title.startswith("The loop waits 200 ms for a shuffle buffer to fill (once")
    assert finding.severity != "high"
    assert "shuffle_refill" not in findings(with_fills(3, 100))  # a short fill is no finding


def test_looks_alone_name_it():
    found = verdict(with_fills(0, 0, sampled(False, True, False, False, True, False, True, False)), "shuffle_refill")
    assert (found.times, found.seen.samples, found.seen.filling, found.longest) == (3, 8, 3, None)
    assert found.seen.seconds == pytest.approx(4.0) and found.share == pytest.approx(1.5 / 4.4, rel=0.02)
    assert "shuffle_refill" in abstained(with_fills(0, 0, sampled(*[False] * 7, True)))
    none = with_fills(0, 0, sampled(*[False] * 8))
    assert "shuffle_refill" not in findings(none)


def test_fills_between_samples_are_saved_as_those_of_the_detail():
    """Python's stacks are those of steps all the time: a step waits for the fill."""
    b = Builder(gpus=0)
    train(b, 5000 * MS, 40)
    trace = b.build()
    trace.overviews = {0: sampled(False, True, False, False, True, False, True, False)}
    trace.origin_ns = 1000 * 10**9
    trace.stacks = (stacks_of({"MainThread": [(0.0, "train.py:3 main > tensorflow/execute.py:53 call")]}, 6.0),)
    finding = findings(trace)["shuffle_refill"]
    assert finding.gain.step_time == pytest.approx(finding.evidence["share_ratio"], rel=0.01)


def test_without_a_shuffle_a_slow_first_batch_is_none():
    b = Builder(gpus=0)
    full_buffer(b, 0, 5)
    for i in range(3000):  # as skip draws, or a generator
        b.host("Iterator::Root::BatchV2::Skip::ParallelMapV2", 10 * MS + i * 50, 45, "tf_data_iterator_get_next/1")
    b.host("IteratorGetNextOp::DoCompute", 10 * MS, 150 * MS, "tf_Compute/1")
    train(b, 200 * MS, 20)
    assert "shuffle_refill" not in findings(b.build())

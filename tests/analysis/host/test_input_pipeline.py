from __future__ import annotations

import pytest

from gputop.analysis.host.tf_data import input_pipeline, stage_self_times
from gputop.analysis.steps.steps import find_steps
from tests.trace.build import Builder, keras_steps


def test_wait_is_the_union_of_the_calls_within_steps():
    b = keras_steps(Builder(gpus=0), 4, 100, 90)
    for i in range(4):
        for replica in range(2):  # two iterators that wait at the same time are one wait
            b.host("IteratorGetNextOp::DoCompute", i * 100 + 10 + replica * 5, 30,
                   line=f"tf_data_iterator_get_next/{replica}")
    b.host("IteratorGetNextOp::DoCompute", 900, 500, line="tf_data_iterator_get_next/0")  # after the last step
    trace = b.build()
    waited = input_pipeline(trace, find_steps(trace))
    assert waited.wait_s_per_step == pytest.approx(35e-6) and waited.wait_ratio == pytest.approx(0.35)


def test_without_steps_the_share_is_of_the_window():
    b = Builder(gpus=0).host("IteratorGetNextOp::DoCompute", 0, 25).host("other", 0, 100)
    waited = input_pipeline(b.build(), None)
    assert waited is not None and waited.wait_ratio == pytest.approx(0.25) and "no steps were found" in waited.how


def test_ranks_are_averaged():
    b = Builder(gpus=0, format="chrome").host("ProfilerStep#1", 0, 100)
    b.host("enumerate(DataLoader)#_Iter.__next__", 0, 20, line="rank 0")
    b.host("enumerate(DataLoader)#_Iter.__next__", 30, 40, line="rank 1")
    trace = b.build()
    assert input_pipeline(trace, find_steps(trace)).wait_ratio == pytest.approx(0.3)


def test_no_input_events_is_none():
    assert input_pipeline(Builder(gpus=0).host("EagerExecute", 0, 10).build(), None) is None


def test_stages_count_their_own_time_only():
    b = Builder(gpus=0)
    b.host("Iterator::Root", 0, 100, line="get_next").host("Iterator::Root::Prefetch", 1, 98, line="get_next")
    b.host("Iterator::Root::Prefetch::BatchV2", 0, 100, line="pool")
    for i in range(4):
        b.host("Iterator::Root::Prefetch::BatchV2::Map", i * 20, 15, line="pool")
        b.host("Iterator::Root::Prefetch::BatchV2::Map::Interleave[0]::TFRecord", i * 20 + 2, 3, line="pool")
    stages = stage_self_times(b.build())
    assert stages == pytest.approx({"Map": 48e-6, "BatchV2": 40e-6, "TFRecord": 12e-6})
    assert next(iter(stages)) == "Map"

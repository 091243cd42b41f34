from __future__ import annotations

from pathlib import Path

import pytest

from gputop.analysis.host.tf_data import pipelines, python_s
from gputop.analysis.results import Pipeline, Stage
from gputop.trace.readers.load import load
from tests.analysis.host.tf_data_traces import CALLER, PRODUCER, ROOT, WORKERS, training
from tests.trace.build import Builder

DATA = Path(__file__).resolve().parents[2] / "data"


def stages(pipeline: Pipeline) -> dict[str, Stage]:
    return {stage.name: stage for stage in pipeline.stages}


def test_a_parallel_stage_costs_what_its_workers_do_not_what_is_waited_for_it():
    (found,) = pipelines(training().build())
    stage = stages(found)
    assert [s.name for s in found.stages] == ["Root", "Prefetch", "BatchV2", "ParallelMapV2", "Range"]
    assert stage["ParallelMapV2"].self_s == pytest.approx(700e-6)
    assert stage["ParallelMapV2"].function_s == pytest.approx(600e-6) and stage["ParallelMapV2"].workers == 2
    assert stage["ParallelMapV2"].cost_s_per_batch == pytest.approx(30e-6)
    assert stage["BatchV2"].cost_s_per_batch == pytest.approx(10e-6) and stage["BatchV2"].function_s is None
    assert stage["Root"].cost_s_per_batch == stage["Prefetch"].cost_s_per_batch == 0
    assert found.bounding == stage["ParallelMapV2"].path and found.bounding_s_per_batch == pytest.approx(30e-6)
    assert (found.dataset, found.batches, found.iterators) == ("PrefetchDataset:4 [8,2]", 10, 1)
    assert found.wait_s == pytest.approx(100e-6)


def test_a_function_that_only_passes_on_its_arguments_does_not_cost_what_is_waited_for_the_stage_below():
    b = training()
    for i in range(10):  # it starts no executor
        b.host("Iterator::Root::Prefetch::MapAndBatch", i * 100, 80, CALLER + "0", id=30, parent_id=2, parallelism=2)
        b.host("MapAndBatchProduce", i * 100, 80, "tf_data_iterator/9")
        b.host("Iterator::Root::Prefetch::MapAndBatch::Range", i * 100 + 2, 70, "tf_data_iterator/9", id=31)
    stage = {s.path: s for s in pipelines(b.build())[0].stages}["Root::Prefetch::MapAndBatch"]
    assert stage.self_s == pytest.approx(800e-6) and stage.function_s == pytest.approx(100e-6)
    assert stage.cost_s_per_batch == pytest.approx(5e-6)


def test_prefetch_is_empty_where_no_element_is_recorded():
    stage = stages(pipelines(training().build())[0])["Prefetch"]
    assert (stage.buffer_limit, stage.buffer_empty) == (2, 0.5)
    bare = Builder(gpus=0).host("Iterator::Root", 0, 9, id=1).host("Iterator::Root::Prefetch", 1, 5, id=2, parent_id=1)
    assert stages(pipelines(bare.build())[0])["Prefetch"].buffer_empty is None  # nothing tells the limit either


def test_stages_on_one_thread_bound_together():
    b = Builder(gpus=0)
    for i in range(4):
        b.host("Iterator::Root", i * 100, 90, CALLER, **ROOT).host("Iterator::Root::Map", i * 100 + 5, 70, CALLER, id=2)
        b.host("Iterator::Root::Map::TFRecord", i * 100 + 10, 30, CALLER, id=3)
    (found,) = pipelines(b.build())
    assert found.bounding == "Root::Map" and found.bounding_s_per_batch == pytest.approx(70e-6)


def test_iterators_of_an_interleave_are_one_stage_on_its_workers():
    b = Builder(gpus=0)
    for i in range(6):
        b.host("Iterator::Root", i * 100, 90, CALLER, **ROOT)
        b.host("Iterator::Root::ParallelInterleaveV4", i * 100 + 1, 80, CALLER, id=2, parent_id=1, parallelism=3)
        b.host(f"Iterator::Root::ParallelInterleaveV4[{i}]::FlatMap[0]::TFRecord", i * 100, 60, WORKERS[i % 2],
               id=10 + i)
    (found,) = pipelines(b.build())
    stage = stages(found)
    assert stage["TFRecord"].iterators == 6 and stage["TFRecord"].calls == 6
    assert stage["TFRecord"].parent is None  # FlatMap itself was not called in the window
    b.host("Iterator::Root::ParallelInterleaveV4[0]::FlatMap", 0, 70, WORKERS[0], id=9)
    stage = stages(pipelines(b.build())[0])
    assert stage["TFRecord"].workers == 3 and stage["TFRecord"].cost_s_per_batch == pytest.approx(20e-6)


def test_datasets_are_kept_apart_by_their_roots():
    b = training()
    for i in range(3):
        b.host("Iterator::Root", i * 100 + 50, 20, CALLER, id=51, name="PrefetchDataset:9", shapes="[4]")
        b.host("Iterator::Root::Prefetch", i * 100 + 51, 18, CALLER, id=52, parent_id=51)
        b.host("Iterator::Root::Prefetch::Shuffle", i * 100 + 50, 30, PRODUCER, id=54, parent_id=53)  # 53 did not run
        b.host("Iterator::Root::Prefetch", i * 100 + 80, 5, CALLER, id=62, parent_id=61)  # of either
    found = pipelines(b.build())
    assert [p.dataset for p in found] == ["PrefetchDataset:4 [8,2]", "PrefetchDataset:9 [4]", None]
    assert [p.batches for p in found] == [10, 3, 0]
    assert found[2].bounding is None and stages(found[2])["Shuffle"].cost_s_per_batch is None


def test_without_its_root_a_pipeline_is_counted_one_stage_below():
    b = Builder(gpus=0)
    for i in range(4):
        b.host("Iterator::Root::Prefetch", i * 100, 20, CALLER)
        b.host("Iterator::Root::Prefetch::Map", i * 100, 80, PRODUCER)
    (found,) = pipelines(b.build())
    assert found.batches == 4 and found.wait_s == pytest.approx(80e-6) and found.bounding == "Root::Prefetch::Map"
    b.host("Iterator::Root::Zip", 0, 5)  # its pipeline is not known
    assert pipelines(b.build())[0].batches == 0


def test_a_circle_of_parents_ends():
    b = Builder(gpus=0).host("Iterator::Root", 0, 9, id=1, name="A:1", shapes="")
    b.host("Iterator::Root::Map", 10, 9, id=2, parent_id=3).host("Iterator::Root::Map::Zip", 20, 9, id=3, parent_id=2)
    assert [len(p.stages) for p in pipelines(b.build())] == [3]
    assert pipelines(Builder(gpus=0).host("x", 0, 1).build()) == ()


@pytest.mark.parametrize("seed", range(3))
def test_order_tells_nothing(seed):
    assert pipelines(training().build(shuffle=seed)) == pipelines(training().build())


def test_a_real_slow_map_bounds_and_takes_what_the_step_waits():
    (found,) = pipelines(load([DATA / "keras3_slow_input.xplane.pb.gz"]))
    assert found.bounding == "Root::Map" and found.batches == 19
    assert found.bounding_s_per_batch == pytest.approx(0.0508, abs=0.001)  # the job sleeps 50 ms per batch
    assert found.wait_s == pytest.approx(0.964, abs=0.001)


def test_a_real_parallel_map_is_seen_on_its_workers():
    (found,) = pipelines(load([DATA / "keras3_host_work.xplane.pb.gz"]))
    stage = stages(found)  # TensorFlow fused map and batch
    assert found.bounding == stage["MapAndBatch"].path and stage["MapAndBatch"].parallelism == 2
    assert stage["MapAndBatch"].function_s and stage["MapAndBatch"].function_s > 5 * stage["MapAndBatch"].self_s
    assert stage["ParallelInterleaveV4"].parallelism == 2 and stage["Range"].workers == 2


def test_a_real_full_buffer_and_two_uses_of_a_dataset():
    (fast,) = pipelines(load([DATA / "keras3_fast.xplane.pb.gz"]))
    assert stages(fast)["Prefetch"].buffer_empty == 0 and stages(fast)["Prefetch"].buffer_limit == 2
    (both,) = pipelines(load([DATA / "keras3_validation.xplane.pb.gz"]))
    assert both.iterators > 1
    assert 0 < (stages(both)["Prefetch"].buffer_empty or 0) < 0.3  # each new iterator begins with an empty one


def test_of_too_many_paths_the_longest_are_kept():
    b = training()
    for i in range(1200):
        b.host(f"Iterator::Root::Odd{i}", 2000 + i, 0.5, CALLER)
    (found,) = pipelines(b.build())
    assert len(found.stages) == 512 and found.bounding == "Root::Prefetch::BatchV2::ParallelMapV2"


def test_refills_of_a_shuffle_and_python_in_functions_are_told():
    b = Builder(gpus=0)
    at = 0.0
    for i in range(120):
        long = 50_000.0 if i in (0, 60) else 100.0
        b.host("Iterator::Root", at, long + 20, line="tf_data_iterator_get_next/1", id=1, name="d")
        b.host("Iterator::Root::Shuffle", at + 5, long + 10, line="tf_data_iterator_get_next/1", id=2, parent_id=1)
        b.host("a/PyFunc:PyFunc", at + 10, 40, line="tf_data_iterator_get_next/1")
        b.host("model/PyFunc:PyFunc", at + 10, 40, line="tf_Compute/1")
        at += long + 100
    trace = b.build()
    (pipeline,) = pipelines(trace)
    assert [stage.refill_s for stage in pipeline.stages] == [None, pytest.approx(2 * 0.05001)]
    assert python_s(trace) == pytest.approx(120 * 40e-6)

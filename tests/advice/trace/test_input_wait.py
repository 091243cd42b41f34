"""Waiting for input."""

from __future__ import annotations

import pytest

from gputop.advice.trace_rules import TRACE_RULES
from gputop.core.captured_samples import JobCpus
from gputop.core.findings import Finding
from gputop.diagnosis.diagnose import analyze_trace
from tests.advice.trace.traces import STEP, STEPS, abstained, findings, healthy, input_bound, verdict
from tests.analysis.host.wall_time_traces import two_grains
from tests.trace.build import Builder, keras_steps


def test_input_bound():
    found = findings(input_bound())
    assert set(found) == {"input_bound"}
    f = found["input_bound"]
    assert f.severity == "high" and f.gpus == (0,) and f.gain.step_time == pytest.approx(0.4, abs=0.02)
    assert f.evidence["wait_s"] == pytest.approx(8e-3, rel=0.05)
    assert findings(input_bound(wait=900)) == {}  # a wait below five percent is no finding
    b = healthy()  # waiting while the GPUs work off their queue costs nothing
    for i in range(STEPS):
        b.host("IteratorGetNextOp::DoCompute", i * STEP + 200, STEP * 0.8, line="tf_data_iterator_get_next/1")
    assert "input_bound" not in findings(b)


@pytest.mark.parametrize(("stage", "words"), [
    ("Map", "num_parallel_calls"), ("ParallelMapV2", "cache"), ("BatchV2", "batch(batch_size, num_parallel_calls"),
    ("TFRecord", "interleave"), ("Generator", "TFRecordDataset"), ("Shuffle", "prefetch")])
def test_the_cure_fits_the_slowest_stage(stage, words):
    assert words in (findings(input_bound(stage=stage))["input_bound"].snippet or "")


def test_of_two_stages_with_as_much_self_time_none_is_blamed():
    def beside(own_us: float) -> Finding:
        b = input_bound(stage="Map")
        for i in range(STEPS):
            b.host("Iterator::Root::Prefetch::Shuffle", i * STEP, own_us, line="tf_data_private_threadpool/2")
        return findings(b)["input_bound"]

    little, much = beside(3_000), beside(14_000)
    assert "Map stage" in little.why and "num_parallel_calls" in (little.snippet or "")
    assert "stage" not in much.why and "slowest_stage_s" not in much.evidence


def test_input_on_the_cpu_alone():
    b = Builder(gpus=0)
    for i in range(5):
        b.host("train", i * 100, 99, step_num=i, _r=1)
        b.host("IteratorGetNextOp::DoCompute", i * 100 + 10, 50, line="tf_data_iterator_get_next/1")
    a = analyze_trace(b.build())
    assert [f.id for f in a.findings] == ["input_bound"]
    judged = {rule.id for rule in TRACE_RULES if "tensorflow" not in rule.silent_for}
    assert judged - set(abstained(a)) == {"input_bound", "time_outside_steps", "evaluation_share", "unfinished_step",
                                         "embedding_dense"}


@pytest.mark.parametrize(("rare_ms", "share"), [(20.0, 0.4), (17.0, (8 - 3) / 17), (11.0, None)])
@pytest.mark.parametrize("elements", [0, 40])
def test_what_recording_single_elements_adds_to_a_step_is_no_wait(rare_ms, share, elements):
    """Steps of 20 ms wait for 8 ms; an overview of the same job shows how long they take without the elements."""
    detail, rare = keras_steps(Builder(gpus=0), 12, 20_000, 19_900), Builder(gpus=0)
    for i in range(12):
        detail.host("IteratorGetNextOp::DoCompute", i * 20_000 + 100, 8_000, line="tf_Compute/1")
        for n in range(elements):
            detail.host("Iterator::Root::BatchV2::ParallelMapV2", i * 20_000 + n * 200, 150,
                        line="tf_data_private_threadpool/2")
    keras_steps(rare, 12, rare_ms * 1000, rare_ms * 1000 - 100)
    trace = two_grains(detail, rare, by_s=0.3)
    if share is None and elements:
        assert "9.0 ms" in abstained(trace)["input_bound"]
    else:
        found = verdict(trace, "input_bound")
        assert found.share == pytest.approx(share if elements else 0.4, rel=0.02)
        assert (found.recording_s == pytest.approx(0.003, rel=0.05)) == bool(elements and rare_ms == 17.0)


def test_input_abstains_without_its_events_without_gpu_data_and_on_a_single_step():
    missing = abstained(analyze_trace(healthy().build()))["input_bound"]
    assert "host_tracer_level" in missing and "if the job has any" in missing, "no fault of the capture"
    b = Builder(gpus=2)
    for i in range(5):
        b.host("train", i * 100, 99, step_num=i)
        b.host("IteratorGetNextOp::DoCompute", i * 100 + 10, 50)
    a = analyze_trace(b.build())
    assert a.breakdown is None and not a.findings
    assert "empty_device_plane" in {q.id for q in a.trace.quality}
    assert "GPU" in abstained(a)["input_bound"]
    one = Builder(gpus=0).host("train", 0, 100, step_num=1).host("IteratorGetNextOp::DoCompute", 0, 50)
    assert "second" in abstained(analyze_trace(one.build()))["input_bound"]


@pytest.mark.parametrize(("wait", "told"), [(60_000.0, True), (20_000.0, False)])
def test_a_wait_that_is_most_of_the_only_step_is_told_as_one(wait: float, told: bool):
    """Nobody knows whether such a wait returns."""
    b = Builder().host("ProfilerStep#1", 0, 100_000, step_num=1)
    b.host("IteratorGetNextOp::DoCompute", 10, wait, line="tf_data_iterator_get_next/1")
    for at in range(round(wait) + 50, 99_800, 100):
        b.run(0, at, 98, launch=at - 5, thread="python")
    f = findings(b).get("input_bound")
    assert (f is not None) == told
    if f is not None:
        assert f.gain.step_time == pytest.approx(0.6, abs=0.01) and f.gain.claim == "at most"


def test_several_waits_within_one_long_step_count():
    """One marked step that accumulates the gradients of four batches."""
    b = Builder()
    b.host("ProfilerStep#1", 0, 100_000, step_num=1)
    for i in range(4):
        b.host("enumerate(DataLoader)#_next_data", i * 25_000 + 10, 9_000)
        for k in range(80):
            t = i * 25_000 + 9_020 + 198 * k
            b.run(0, t, 196, launch=t - 5, thread="python")
    f = findings(b)["input_bound"]
    assert f.gain.step_time == pytest.approx(0.36, abs=0.03)


@pytest.mark.parametrize(("of", "is_found"), [("_SingleProcess", True), ("_MultiProcessing", False)])
def test_the_time_in_which_workers_hand_a_batch_over_is_no_wait_for_it(of: str, is_found: bool):
    b = Builder(format="chrome")
    for i in range(40):
        at = i * 2_000
        b.host(f"enumerate(DataLoader)#{of}DataLoaderIter.__next__", at, 400)
        for k in range(10):
            b.host("aten::addmm", at + 410 + 120 * k, 100)
            b.run(0, at + 500 + 120 * k, 5, launch=at + 490 + 120 * k, thread="python")
        b.host("Optimizer.step#SGD.step", at + 1_700, 250, annotation=1)
    f = findings(b)
    assert ("input_bound" in f) == is_found and f["launch_bound"].gain.step_time > 0.5


@pytest.mark.parametrize(("of", "cpus", "workers", "tells"), [
    ("_SingleProcessDataLoaderIter.__next__", None, 8, "num_workers=0"),
    ("_SingleProcessDataLoaderIter.__next__", JobCpus(4.0, used=1.0, others=0.1), 4, "num_workers=0"),
    ("_MultiProcessingDataLoaderIter.__next__", JobCpus(4.0, used=0.3, others=0.1, children=0.1),
     "2 * num_workers", ""),
    ("_MultiProcessingDataLoaderIter.__next__", JobCpus(2.0, used=0.2, others=1.8, children=1.7, ranks=0.0, gputop=0.0),
     2, "keep 1.7 of 2 CPUs busy"),
    ("_MultiProcessingDataLoaderIter.__next__", JobCpus(2.0, used=0.2, others=1.8, children=0.2, ranks=0.0, gputop=0.0),
     2, "None of the 2 CPUs is idle"),
], ids=["none", "none, few CPUs", "idle CPUs", "full CPUs", "CPUs of others"])
def test_what_to_do_about_pytorchs_loader(of: str, cpus: JobCpus | None, workers: int | str, tells: str):
    """Workers where there are none, more where CPUs are idle; memory is pinned for a GPU alone."""
    b = Builder(gpus=0, format="chrome")
    for i in range(12):
        b.host(f"enumerate(DataLoader)#{of}", i * 20_000, 12_000)
        b.host("aten::addmm", i * 20_000 + 12_010, 6_000)
        b.host("autograd::engine::evaluate_function: AddmmBackward0", i * 20_000 + 18_020, 900)
        b.host("Optimizer.step#SGD.step", i * 20_000 + 19_000, 900, annotation=1)
    b.host("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 240_100, 9_000)  # of a validation
    trace = b.build()
    trace.job_cpus = cpus
    f = findings(trace)["input_bound"]
    assert f"num_workers={workers}," in (f.snippet or "") and "pin_memory" not in (f.snippet or "")
    assert f.gain.claim == "at most" or workers != "2 * num_workers"  # how long a worker takes is not known
    assert tells in f.why and ("more workers" in f.action.lower()) == (tells != "num_workers=0")
    assert ("wait for CPUs" in f.action) == ("CPUs" in tells)
    if tells == "num_workers=0":  # of 21 ms the wait takes 12 and the CPUs all, so that on two of them half is left
        trace.job_cpus = JobCpus(2.0, used=1.0, others=0.1)
        assert findings(trace)["input_bound"].gain.step_time == pytest.approx(0.47, abs=0.02)
    trace.job_cpus = JobCpus(8.0, quota=1.0, used=0.95, others=0.1)
    alone = findings(trace)["input_bound"]  # one CPU: workers would take it from the model
    turns = "Single" in of
    assert (alone.snippet is None) == ("keeps the 1 CPU" in alone.why) == ("take turns" in alone.action) == turns
    trace.job_cpus = JobCpus(1.0, used=0.3, others=0.7)  # the one CPU is busy with others as well
    alone = findings(trace)["input_bound"]
    assert "CPU" in alone.why and "is idle" in alone.why and ("take turns" in alone.action) == turns


@pytest.mark.parametrize(("rows", "computes", "fix"), [
    (128, False, "BatchSampler"), (8, False, "num_workers"), (0, False, "num_workers"), (128, True, "num_workers")])
def test_rows_of_tensors_one_by_one_want_whole_batches(rows: int, computes: bool, fix: str):
    """As of a TensorDataset: workers would do the same work. A dataset that computes makes its samples."""
    b = Builder(gpus=0, format="chrome")
    for i in range(12):
        at = i * 20_000
        b.host("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", at, 12_000)
        for k in range(rows):
            b.host("aten::select", at + 10 + k * 80, 60)
            if computes:
                b.host("aten::uniform_", at + 71 + k * 80, 8)
        b.host("aten::stack", at + 10_500, 1_000)
        b.host("aten::addmm", at + 12_010, 6_000)
        b.host("autograd::engine::evaluate_function: AddmmBackward0", at + 18_020, 900)
        b.host("Optimizer.step#SGD.step", at + 19_000, 900, annotation=1)
    f = findings(b)["input_bound"]
    assert fix in (f.snippet or "") and (f"{rows} rows" in f.why) == (fix == "BatchSampler")


def test_the_batches_of_a_prediction_in_each_step_are_no_input_of_the_training():
    b = keras_steps(Builder(gpus=0), 13, 20_000, 5_000)
    for i in range(13):
        at = i * 20_000 + 8_000
        b.host("gradient_tape/m/MatMul:MatMul", at - 7_000, 1_000, "tf_Compute/1")
        b.host("IteratorGetNextOp::DoCompute", at, 6_000)
        b.host("EagerExecute", at + 6_100, 1_000, is_func=1, eager_op="__inference_one_step_on_data_distributed_3")
    assert "input_bound" not in findings(b) and "predict()" in findings(b)["step_gap_host"].why
    for i in range(13):  # the training's own, within its call
        b.host("IteratorGetNextOp::DoCompute", i * 20_000 + 10, 4_000, "tf_Compute/2")
    assert findings(b)["input_bound"].gain.step_time is not None


@pytest.mark.parametrize(("worker", "there"), [(False, True), (True, False)])
def test_batches_that_grain_makes_in_the_loop_are_input(worker, there):
    """Its iterators' calls hold one another; those of its workers' threads cost the loop nothing."""
    b = Builder(gpus=0)
    for i in range(12):
        at = i * 20_000
        line = "grain-prefetch/1" if worker else "python"
        b.host("_BatchDatasetIterator.__next__", at, 15_000, line=line)
        b.host("_MapDatasetIterator.__next__", at + 10, 14_000, line=line)
        b.host("PjitFunction(train_step)", at + 15_500, 4_000, line="python")
    found = findings(b)
    assert ("input_bound" in found) == there
    if there:
        f = found["input_bound"]
        assert f.gain.step_time == pytest.approx(0.75, abs=0.02) and "worker_count" in f"{f.action}{f.snippet}"

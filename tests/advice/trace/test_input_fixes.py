"""The cure for a slow tf.data pipeline by the stage that bounds it, and the step to expect."""

from __future__ import annotations

import pytest

from gputop.advice.trace.input_fixes import InputFix, keras_workers, suggest_fix, suggest_fix_by_name
from gputop.analysis.results import Pipeline, Stage
from gputop.core.captured_samples import JobCpus
from tests.advice.golden_words import same_as_golden


def pipeline(*stages: tuple[str, float, int], bounding: str = "", batches: int = 10, calls: int = 10,
             function: bool = False, empty: float | None = 1.0) -> Pipeline:
    """Stages under one another below Root, as (name, seconds per batch, workers); the costliest bounds."""
    made, path = [Stage("Root", "Root", None, batches, 0.0, None, 1, 0.0)], "Root"
    for name, cost, workers in stages:
        above, path = path, f"{path}::{name}"
        buffer = (2, empty) if name == "Prefetch" else (None, None)
        made.append(Stage(path, name, above, calls, cost * batches, cost * batches * workers if function else None,
                          workers, cost, buffer_limit=buffer[0], buffer_empty=buffer[1],
                          empty_s=buffer[1]))
    slow = max(made, key=lambda s: s.cost_s_per_batch or 0.0)
    return Pipeline("d", 1, batches, 1.0, tuple(made), bounding or slow.path, slow.cost_s_per_batch)


def cured(p: Pipeline, step: float = 0.1, wait: float = 0.06, per_step: float = 1.0, cpus: int | None = 8,
          job: JobCpus | None = None, python_s: float = 0.0) -> InputFix:
    found = suggest_fix(p, step, wait, per_step, cpus, python_s, job)
    assert found is not None
    return found


@pytest.mark.parametrize(("empty_s", "never"), [(0.05, True), (0.4, False), (None, False)])
def test_waits_with_a_full_buffer_are_no_late_batches(empty_s: float | None, never: bool) -> None:
    late = cured(pipeline(("Prefetch", 0, 1), ("Map", 0.001, 1), empty=empty_s))
    assert late.fast_enough and late.never_empty == never


@pytest.mark.parametrize(("stages", "wait", "unseen"), [
    ((("Map", 0.002, 1), ("Prefetch", 0, 1)), 0.06, True),
    ((("Map", 0.05, 1), ("Prefetch", 0, 1)), 0.06, False),  # it explains the wait
    ((("Prefetch", 0, 1), ("Map", 0.002, 1)), 0.06, False)])
def test_where_nothing_shows_what_fills_a_buffer_no_other_stage_is_blamed(stages, wait: float, unseen: bool) -> None:
    fix = cured(pipeline(*stages), wait=wait)
    assert ("no event of the stages that fill a prefetch buffer" in fix.tells) == unseen
    assert not unseen or ("Map" not in fix.tells and fix.claim == "at most")


def test_the_words_of_the_fixes(request):
    buffer = ("Prefetch", 0, 1)
    pipelines = [
        [("Map", 0.04, 1)], [buffer, ("Map", 0.1, 1)], [buffer, ("ParallelMapV2", 0.1, 2)],
        [("BatchV2", 0.0, 1), ("ParallelMapV2", 0.1, 2)], [buffer, ("ParallelMapV2", 0.1, 1)],
        [buffer, ("MapAndBatch", 0.1, 8)], [buffer, ("FlatMap", 0.0, 1), ("Map", 0.1, 1)],
        [buffer, ("ParallelInterleaveV4", 0, 1), ("Map", 0.1, 1)], [buffer, ("Generator", 0.1, 1)],
        [buffer, ("BatchV2", 0.1, 1)], [buffer, ("Shuffle", 0.1, 1)]]
    fixes = [cured(pipeline(*stages, calls=320), wait=0.05) for stages in pipelines]
    words = "\n----\n".join(f"{fix.action}\n{fix.tells.strip()}\n{fix.snippet}\n" for fix in fixes)
    same_as_golden("input_fixes", words, request)


@pytest.mark.parametrize(("threads", "crowded"), [(64, True), (4, True), (3, False), (2, False)])
def test_many_threads_on_two_cpus_are_too_many(threads, crowded):
    fix = cured(pipeline(("Prefetch", 0, 1), ("ParallelMapV2", 0.1, threads), function=True), cpus=2)
    assert (f"{threads} threads share 2 CPUs" in fix.action) == crowded and "AUTOTUNE" in fix.snippet


@pytest.mark.parametrize(("used", "waits"), [(0.1, True), (0.9, False)])
def test_python_that_waits_is_run_in_parallel_first(used, waits):
    """A job that hardly uses a CPU while its map's function runs: calls that sleep do not hold Python's lock."""
    c = cured(pipeline(("MapAndBatch", 0.08, 1), function=True), step=0.1, wait=0.08,
              job=JobCpus(4, used=used, others=0.1), python_s=0.8)
    assert ("num_parallel_calls=tf.data.AUTOTUNE" in c.snippet and "prefetch" in c.snippet) == waits
    assert ("mostly waits" in c.action) == ("private_threadpool_size = 16" in c.snippet) == waits
    assert c.step_s is not None and c.step_s < 0.04


@pytest.mark.parametrize(("stages", "workers"), [
    (("Prefetch", "FlatMap", "Generator"), True), (("Prefetch", "Repeat", "FlatMap", "Generator"), True),
    (("Prefetch", "BatchV2", "FlatMap", "Generator"), False),  # a dataset of the user's own, element by element
    (("Prefetch", "Map", "Generator"), False), (("Prefetch", "FlatMap", "TFRecord"), False)])
def test_batches_that_python_makes_for_keras_are_made_by_workers(stages, workers):
    own = pipeline(*((name, 0.1 if name in ("Generator", "TFRecord") else 0.0, 1) for name in stages))
    fix = cured(own)
    for keras, name in ((2, "Sequence"), (3, "PyDataset")):
        with_workers = keras_workers(fix, own, keras)
        assert ("workers=8" in with_workers.snippet and name in with_workers.action) == workers
        assert with_workers.step_s == fix.step_s and (workers or with_workers is fix)
        assert not workers or "TFRecord" not in with_workers.action + with_workers.snippet
    assert keras_workers(fix, None, 3) is fix


def test_python_in_a_map_gets_no_more_parallel_calls_whatever_cpus_are_free():
    p = pipeline(("Prefetch", 0, 1), ("ParallelMapV2", 0.1, 2), function=True)  # 2 s in the function
    found = suggest_fix(p, 0.1, 0.08, 1.0, 8, python_s=1.5)
    assert found is not None and "is Python" in found.action and "num_parallel_calls=" not in found.snippet
    assert "TFRecordWriter" in found.snippet
    assert "currently 2 on 8 CPUs" in suggest_fix(p, 0.1, 0.08, 1.0, 8, python_s=0.5).action
    p = pipeline(("Prefetch", 0, 1), ("ParallelMapV2", 0.1, 1), function=True)
    c = cured(p, wait=0.08, job=JobCpus(64, used=1.0, others=0.0), python_s=0.9)
    assert "is Python" in c.action and "num_parallel_calls=" not in c.snippet


def test_a_serial_map_runs_on_all_cpus_that_are_free():
    c = cured(pipeline(("Prefetch", 0, 1), ("Map", 0.1, 1)), wait=0.08)
    assert "1 thread" in c.action and c.step_s == pytest.approx(0.02)  # the rest of the step
    assert c.claim == "at most", "the trace does not tell what runs on the CPUs"
    assert cured(pipeline(("Prefetch", 0, 1), ("Map", 0.1, 1)), wait=0.08, cpus=2).step_s == pytest.approx(0.05)
    assert "100%" in c.tells and c.numbers == {"slowest_stage_s": 0.1, "pipeline_s": 0.1, "buffer_empty_ratio": 1.0}
    c = cured(pipeline(("Prefetch", 0, 1), ("Map", 0.1, 1)), wait=0.08, job=JobCpus(8, used=1.0, others=7.0))
    assert "No CPU is free" in c.action and "cache" in c.snippet
    assert c.step_s == pytest.approx(0.02), "what is cached needs no CPU"
    c = cured(pipeline(("Prefetch", 0, 1), ("Map", 0.0137, 1)), 0.0185, 0.0137)
    assert c.step_s is not None and 0.0185 - c.step_s <= 0.0137 + 1e-9 and "do not explain" not in c.how


@pytest.mark.parametrize(("job", "step_s"), [
    (JobCpus(64), 0.02),  # the rest of the step: nothing else is known to run
    (JobCpus(64, quota=2.0), 0.05),  # tf.data sees 64 CPUs, the quota grants two
    (JobCpus(2, used=1.1, others=0.0), 0.055),  # a step's CPU time, on two CPUs
    (JobCpus(8, used=1.1, others=6.0), 0.055),  # on the two that others leave
    (JobCpus(64, used=1.1, others=0.0), 0.02),
])
def test_more_threads_bring_no_more_than_the_cpus_that_are_free(job, step_s):
    c = cured(pipeline(("Prefetch", 0, 1), ("Map", 0.1, 1)), wait=0.08, cpus=64, job=job)
    assert c.step_s == pytest.approx(step_s) and "num_parallel_calls" in c.snippet and c.claim == "measured"


@pytest.mark.parametrize("stages", [
    (("Map", 0.0023, 1),), (("Prefetch", 0, 1), ("Map", 0.0023, 1)), (("Prefetch", 0, 1), ("ParallelMapV2", 0.0023, 2)),
    (("Prefetch", 0, 1), ("Generator", 0.0023, 1))])
def test_where_the_wait_is_longer_than_the_stages_take_the_wait_is_the_bound(stages):
    """Of many small elements tf.data's own time is most: a batched map brought 93% where its function took 9%."""
    c = cured(pipeline(*stages), 0.0185, 0.0137)
    assert c.step_s == pytest.approx(0.0185 - 0.0137) and c.claim == "at most"
    assert "the stages' times do not explain the wait" in c.how


def test_a_map_on_few_of_the_cpus_gets_more_and_single_elements_go_onto_batches():
    c = cured(pipeline(("Prefetch", 0, 1), ("ParallelMapV2", 0.1, 2)), wait=0.08)
    assert "currently 2 on 8 CPUs" in c.action and c.step_s == pytest.approx(0.025)
    c = cured(pipeline(("Prefetch", 0, 1), ("ParallelMapV2", 0.025, 8), function=True), cpus=2)
    assert (c.numbers or {})["slowest_stage_s"] == pytest.approx(0.1)
    assert c.step_s == pytest.approx(0.04) and "private_threadpool_size = 8" in c.snippet
    single = cured(pipeline(("Prefetch", 0, 1), ("ParallelMapV2", 0.1, 8), ("Range", 0, 1)))
    assert "fn_of_a_batch" not in single.snippet
    c = cured(pipeline(("Prefetch", 0, 1), ("BatchV2", 0.01, 1), ("Generator", 0.09, 1)), wait=0.08)
    assert "from_generator" in c.action and c.step_s == pytest.approx(0.02)


@pytest.mark.parametrize("stages", [
    (("FlatMap", 0.0, 1), ("Map", 0.1, 1)), (("Interleave", 0.1, 1),), (("TFRecord", 0.1, 1),), (("TextLine", 0.1, 1),),
    (("InterleaveV2", 0.0, 1), ("TFRecord", 0.1, 1))])
def test_files_are_read_side_by_side(stages):
    c = cured(pipeline(("Prefetch", 0, 1), *stages), wait=0.08, cpus=4)
    assert "interleave" in c.snippet and c.step_s == pytest.approx(0.025)


def test_buffers_several_batches_a_step_and_another_slow_segment():
    p = pipeline(("Prefetch", 0, 1), ("Map", 0.03, 1), empty=0.25)
    assert "prefetch(16)" in cured(p, 0.1, 0.06).snippet and cured(p, 0.1, 0.06).step_s == pytest.approx(0.04)
    assert "prefetch(16)" not in cured(p, 0.1, 0.08).snippet  # slower than the rest of the step
    assert cured(pipeline(("Prefetch", 0, 1), ("Map", 0.02, 1)), 0.08, 0.06, per_step=4, cpus=2).step_s == (
        pytest.approx(0.04))
    two = pipeline(("Prefetch", 0, 1), ("BatchV2", 0.1, 1), ("ParallelMapV2", 0.07, 8))
    assert cured(two, wait=0.09).step_s == pytest.approx(0.07)
    c = cured(pipeline(("Map", 0.04, 1)), 0.1, 0.04)
    assert c.step_s == pytest.approx(0.06) and c.numbers is not None and "buffer_empty_ratio" not in c.numbers
    assert c.snippet.startswith("ds = ds.prefetch(")


def test_without_costs_the_advice_is_general():
    assert suggest_fix(pipeline(("Prefetch", 0, 1)), 0.1, 0.06, 1, 8) is None
    assert suggest_fix_by_name(None).claim == "at most"
    assert suggest_fix_by_name(None).step_s is None and "prefetch" in suggest_fix_by_name("Shuffle").snippet
    assert "fn_of_a_batch" in suggest_fix_by_name("ParallelMapV2").snippet
    assert "num_parallel" in suggest_fix_by_name("Map").snippet
    for stage in ("Map", "Shuffle", "BatchV2", "TFRecord", "ParallelMapV2", None):
        assert "prefetch(" not in suggest_fix_by_name(stage, prefetches=True).snippet


def test_what_a_parallel_interleave_runs_is_parallel_already():
    c = cured(pipeline(("Prefetch", 0, 1), ("ParallelInterleaveV4", 0, 1), ("Map", 0.1, 1)))
    assert "interleave(" not in c.snippet and "ds.cache()" in c.snippet

"""Each rule on traces: where it must speak, where it must not, and where it cannot know."""

from __future__ import annotations

import pytest

from gputop.advice.trace_rules import TRACE_RULES
from gputop.analysis.results import Analysis
from gputop.core.findings import Finding
from gputop.diagnosis.diagnose import analyze_trace
from gputop.trace.model import Kind, MemoryKind
from tests.advice.trace.traces import (
    KERNEL,
    STEP,
    STEPS,
    copying,
    fill,
    healthy,
    input_bound,
    job,
    launch_bound,
    uneven,
)
from tests.trace.build import Builder, keras_steps

GIB = 2**30


def findings(b: Builder) -> dict[str, Finding]:
    return {f.id: f for f in analyze_trace(b.build()).findings}


def abstained(a: Analysis) -> dict[str, str]:
    return {x.id: x.missing for x in a.abstained}


@pytest.mark.parametrize("gpus", [1, 4])
def test_healthy_job_has_no_findings(gpus):
    assert findings(healthy(gpus)) == {}


# input_bound

def test_input_bound():
    found = findings(input_bound())
    assert set(found) == {"input_bound"}
    f = found["input_bound"]
    assert f.severity == "high" and f.gpus == (0,)
    assert f.gain.step_time == pytest.approx(0.4, abs=0.02)
    assert f.evidence["wait_s"] == pytest.approx(8e-3, rel=0.05)


@pytest.mark.parametrize(("stage", "words"), [
    ("Map", "num_parallel_calls"), ("ParallelMapV2", "cache"), ("BatchV2", "batch(batch_size, num_parallel_calls"),
    ("TFRecord", "interleave"), ("Generator", "TFRecordDataset"), ("Shuffle", "prefetch"),
])
def test_the_cure_fits_the_slowest_stage(stage, words):
    assert words in (findings(input_bound(stage=stage))["input_bound"].snippet or "")


def test_a_wait_below_five_percent_is_no_finding():
    assert findings(input_bound(wait=900)) == {}


def test_waiting_while_the_gpus_work_off_their_queue_costs_nothing():
    b = healthy()
    for i in range(STEPS):
        b.host("IteratorGetNextOp::DoCompute", i * STEP + 200, STEP * 0.8, line="tf_data_iterator_get_next/1")
    assert "input_bound" not in findings(b)


def test_input_on_the_cpu_alone():
    b = Builder(gpus=0)
    for i in range(5):
        b.host("train", i * 100, 99, step_num=i, _r=1)
        b.host("IteratorGetNextOp::DoCompute", i * 100 + 10, 50, line="tf_data_iterator_get_next/1")
    a = analyze_trace(b.build())
    assert [f.id for f in a.findings] == ["input_bound"]
    assert {rule.id for rule in TRACE_RULES} - set(abstained(a)) == {"input_bound"}


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


# launch_bound

@pytest.mark.parametrize("gpus", [1, 4])
def test_launch_bound(gpus):
    found = findings(launch_bound(gpus))
    assert set(found) == {"launch_bound"}
    f = found["launch_bound"]
    assert f.severity == "high" and f.gpus == tuple(range(gpus))
    # Keras does not compile steps under tf.distribute.
    assert ("jit_compile" if gpus == 1 else "auto_jit") in (f.snippet or "")
    assert f.evidence["kernel_median_s"] == pytest.approx(10e-6)
    if gpus == 1:
        assert f.evidence["launch_pace_s"] == pytest.approx(40e-6) and "launches one every 40.0 µs" in f.why
    assert f.gain.step_time == pytest.approx(0.75, abs=0.03)


def test_a_deep_queue_is_healthy_even_with_gaps():
    b = job()
    fill(b, 0, 0, STEP, 10, 30, queued=15_000)
    assert "launch_bound" not in findings(b)


def test_idle_that_input_explains_is_not_launching():
    assert "launch_bound" not in findings(input_bound())


def test_idle_behind_a_busier_gpu_is_not_launching():
    assert "launch_bound" not in findings(uneven(2, 3.0))


def test_host_work_between_steps_is_not_launching():
    b = Builder()
    for i in range(6):
        b.host("EagerExecute", i * 20_000, 8_000, is_func=1, eager_op="__inference_multi_step_on_iterator_42")
    fill(b, 0, 20, 8_000, 196, 4, queued=15)
    a = analyze_trace(b.build())
    assert a.breakdown is not None and a.breakdown.host > 0.5 * a.breakdown.total
    assert "launch_bound" not in {f.id for f in a.findings}


def test_launch_abstains_without_launches():
    b = job()
    for i in range(STEPS * 100):
        b.run(0, i * 200, 100, KERNEL)
    a = analyze_trace(b.build())
    assert "correlation" in abstained(a)["launch_bound"] and not a.findings


# replica_imbalance, gpu0_oversubscribed

@pytest.mark.parametrize(("heavy", "id_"), [(0, "gpu0_oversubscribed"), (2, "replica_imbalance")])
@pytest.mark.parametrize(("longer", "left"), [(True, 1.25), (False, 1.0)], ids=["a larger share", "work of its own"])
def test_imbalance(heavy, id_, longer, left):
    found = findings(uneven(heavy, 2.0, longer=longer))
    assert set(found) == {id_}
    f = found[id_]
    assert f.gpus == (heavy,) and f.evidence["ratio"] == pytest.approx(2.0, abs=0.05)
    assert ("do not have" in f.why) is not longer and f.gain.how.startswith("at most") is not longer
    assert f.gain.step_time == pytest.approx((2 - left) * 6 / 20, abs=0.02) and f.severity == "high"
    assert f"GPU {heavy} of the job" in f.title  # the job's own numbers: CUDA_VISIBLE_DEVICES renumbers
    assert "off GPU 0" not in f.action


def test_imbalance_below_ten_percent_is_no_finding():
    assert findings(uneven(0, 1.07, light=15_000)) == {}


def test_imbalance_that_saves_nothing_of_the_step_is_no_finding():
    assert not findings(uneven(0, 1.5, light=600)).keys() & {"gpu0_oversubscribed", "replica_imbalance"}


def test_an_unused_gpu_is_not_a_light_replica():
    b = healthy()
    trace = b.build()
    trace.gpus += [type(trace.gpus[0])("node", 1)]
    assert analyze_trace(trace).findings == ()
    b = job(4)
    fill(b, 0, 100, 18_000, 196, 4, queued=20)
    for gpu in (1, 2, 3):  # some odd kernel only
        fill(b, gpu, 100, 400, 196, 4, queued=20)
    assert not findings(b).keys() & {"gpu0_oversubscribed", "replica_imbalance"}


def test_waiting_in_collectives_is_no_work():
    b = job(2)
    fill(b, 0, 100, 9_000, 96, 4, queued=20)
    fill(b, 1, 100, 9_000, 96, 4, queued=20)
    for i in range(STEPS):
        b.run(0, i * STEP + 9_100, 9_000, "ncclDevKernel_AllReduce", kind=Kind.COLLECTIVE, launch=i * STEP + 9_050)
        b.run(1, i * STEP + 18_000, 100, "ncclDevKernel_AllReduce", kind=Kind.COLLECTIVE, launch=i * STEP + 9_050)
    assert not findings(b).keys() & {"gpu0_oversubscribed", "replica_imbalance"}


# copies_excessive

def test_pinned_copies_are_not_told_to_pin():
    f = findings(copying(Kind.H2D, 6_000))["copies_excessive"]
    assert f.severity == "high" and "fewer bytes" in f.action and "pageable" not in f.action
    assert f.evidence["pageable_ratio"] == 0
    assert f.evidence["h2d_bytes_per_s"] == pytest.approx(200e6 / 6e-3)
    assert f.evidence["h2d_bytes_per_step"] == pytest.approx(200e6, rel=0.25)  # six copies in five whole steps
    assert f.gain.step_time == pytest.approx(0.3, abs=0.02) and "or overlapped with compute" in f.gain.how


def test_copies_hide_behind_no_more_compute_than_there_is():
    f = findings(copying(Kind.H2D, 18_000))["copies_excessive"]
    assert f.gain.step_time == pytest.approx(0.9, abs=0.02)
    assert "overlap with the compute there is saves 9 %" in f.gain.how


def test_pageable_copies_are():
    (f,) = findings(copying(Kind.H2D, 6_000, MemoryKind.PAGEABLE))["copies_pageable"].consequences
    assert f.id == "copies_excessive" and "pageable" in f.action and f.evidence["pageable_ratio"] == 1


def test_unknown_memory_and_sizes_are_left_out():
    f = findings(copying(Kind.H2D, 6_000, MemoryKind.UNKNOWN, size=-1))["copies_excessive"]
    assert "pageable_ratio" not in f.evidence and "h2d_bytes_per_s" not in f.evidence
    assert "pinned already" not in f.why


def test_reading_back_has_its_own_cure():
    f = findings(copying(Kind.D2H, 2_500))["copies_excessive"]
    assert f.severity == "medium" and "Read results back less often" in f.action


def test_copies_within_the_gpu():
    f = findings(copying(Kind.D2D, 4_000))["copies_excessive"]
    assert "within the GPU" in f.why and "layouts" in f.action
    # They are known as a share of the device window alone.
    assert "of the device window" in f.title and "of the step" not in f"{f.title} {f.why}"
    assert f.evidence["d2d_of_window_ratio"] == f.gain.step_time


def test_small_or_hidden_copies_are_no_finding():
    assert findings(copying(Kind.H2D, 700)) == {}
    b = healthy()
    for i in range(STEPS):
        b.run(0, i * STEP + 100, 15_000, "MemcpyH2D", kind=Kind.H2D, stream=2, launch=i * STEP + 10)
    assert "copies_excessive" not in findings(b)


# batch_size_headroom

def with_memory(b: Builder, peak_gib: float, gpus: int = 1) -> Builder:
    for gpu in range(gpus):
        b.memory(5, f"GPU_{gpu}_bfc", int(peak_gib * GIB / 2), int((40 - peak_gib / 2) * GIB), int(peak_gib * GIB))
    return b


@pytest.mark.parametrize(("peak_gib", "factor"), [(1, 8), (8, 4), (17, 2)])
def test_headroom_keeps_below_ninety_percent(peak_gib, factor):
    f = findings(with_memory(launch_bound(), peak_gib))["batch_size_headroom"]
    assert f.evidence["factor"] == factor and factor * peak_gib <= 0.9 * 40
    assert f.gain.step_time == pytest.approx(0.75 * (1 - 1 / factor), abs=0.03)
    assert f.gain.per == "sample" and "assumes" in f.gain.how  # the step itself gets longer
    assert f.severity == "medium"  # launch_bound claims the same idle time


def test_few_kernels_make_nothing_high():
    def micro(kernels: int, steps: int) -> dict[str, Finding]:
        b = keras_steps(Builder(), steps, STEP, STEP - 50) if steps else Builder()
        for i in range(kernels):
            t = 50 + i * STEP * max(steps, 1) / kernels
            b.run(0, t, 10, KERNEL, launch=t - 8)
            b.host("gap", t + 20, 5)
        return findings(with_memory(b, 1))

    for kernels, steps in ((25, 0), (150, 2)):
        few = micro(kernels, steps)
        assert {f.severity for f in few.values()} == {"medium"} and set(few) == {"launch_bound", "batch_size_headroom"}
        assert all("kernels per GPU only" in f.why for f in few.values())
    many = micro(400, 0)
    assert many["launch_bound"].severity == "high" and "only" not in many["launch_bound"].why


def test_headroom_goes_by_the_fullest_gpu():
    b = with_memory(launch_bound(2), 4)
    b.memory(6, "GPU_1_bfc", 10 * GIB, 30 * GIB, 15 * GIB)
    assert findings(b)["batch_size_headroom"].evidence["factor"] == 2


@pytest.mark.parametrize("b", [
    with_memory(launch_bound(), 20),  # twice the batch might not fit
    with_memory(healthy(), 2),  # computes already
    with_memory(input_bound(), 2),  # a larger batch would wait for input just the same
], ids=["full", "busy", "input"])
def test_no_headroom(b):
    assert "batch_size_headroom" not in findings(b)


def test_headroom_abstains_without_the_allocator():
    a = analyze_trace(launch_bound().build())
    assert "GPU_<n>_bfc" in abstained(a)["batch_size_headroom"]
    partly = with_memory(launch_bound(2), 2, gpus=1)
    assert "batch_size_headroom" in abstained(analyze_trace(partly.build()))


def test_worst_comes_first():
    a = analyze_trace(with_memory(launch_bound(), 20 / 1.2).build())
    assert [f.id for f in a.findings] == ["launch_bound", "batch_size_headroom"]

"""Several GPUs: uneven work, work by turns, a staggered launch."""

from __future__ import annotations

import pytest

from gputop.advice.trace.job import Job
from gputop.advice.trace.multi_gpu import describe_replica_imbalance
from gputop.advice.trace.training_loop import CUSTOM, JAX, KERAS3, PYTORCH
from gputop.diagnosis.diagnose import analyze_trace, examine
from gputop.trace.model import Kind
from tests.advice.trace.traces import (
    KERNEL,
    NCCL,
    STEP,
    STEPS,
    fill,
    findings,
    healthy,
    job,
    launched_ahead,
    reducing,
    uneven,
    verdict,
)
from tests.trace.build import Builder


def by_turns(gpus: int, overlap: float) -> Builder:
    """Each GPU works 4 ms, then the next one, which begins ``overlap`` µs before the end."""
    b = job(gpus)
    for gpu in range(gpus):
        fill(b, gpu, 100 + gpu * (4_000 - overlap), 4_100 + gpu * (4_000 - overlap), 98, 2, queued=90)
    return b


@pytest.mark.parametrize(("overlap", "there"), [(0, True), (200, True), (3_000, False), (4_000, False)])
def test_gpus_by_turns(overlap, there):
    found = findings(by_turns(4, overlap))
    assert ("serial_gpus" in found) == there
    if there:
        f = found["serial_gpus"]
        assert f.gpus == (0, 1, 2, 3) and f.severity == "high"
        assert f.gain.step_time == pytest.approx(3 * (4_000 - overlap) / STEP, abs=0.02)


def staggered(each: float, shared: bool = True, gpus: int = 4) -> Builder:
    b = job(gpus)
    for i in range(STEPS):
        for gpu in range(gpus):
            behind = gpu * each
            for k in range(100):
                b.run(gpu, i * STEP + 100 + behind + k * 100, 98, KERNEL,
                      launch=i * STEP + 20 + behind + k * each / 100, launch_length=0.5,
                      thread="python" if shared else None)
            end = i * STEP + 100 + (gpus - 1) * each + 10_200
            b.run(gpu, i * STEP + 10_150 + behind, end - (i * STEP + 10_150 + behind), NCCL, kind=Kind.COLLECTIVE,
                  launch=i * STEP + 90 + behind)
    return b


@pytest.mark.parametrize(("each", "shared", "gpus", "there"), [
    (1_000, True, 4, True), (1_000, False, 4, True), (1_000, True, 2, True), (1_000, False, 2, False),
    (100, True, 4, False)])
def test_gpus_launched_one_after_the_other(each, shared, gpus, there):
    found = findings(staggered(each, shared, gpus))
    assert ("staggered_launch" in found) == there
    if there:
        f = found["staggered_launch"]
        assert f.gpus == tuple(range(1, gpus)) and f.gain.step_time == pytest.approx((gpus - 1) * each / STEP, abs=0.01)


def test_one_late_gpu_is_no_staggered_launch():
    assert "staggered_launch" not in findings(reducing(200, late=3_000))



@pytest.mark.parametrize(("heavy", "id_"), [(0, "gpu0_oversubscribed"), (2, "replica_imbalance")])
@pytest.mark.parametrize(("longer", "left"), [(True, 1.25), (False, 1.0)], ids=["a larger share", "work of its own"])
def test_imbalance(heavy, id_, longer, left):
    found = findings(launched_ahead(uneven(heavy, 2.0, longer=longer), "python"))
    assert set(found) == {id_}
    f = found[id_]
    assert f.gpus == (heavy,) and f.evidence["ratio"] == pytest.approx(2.0, abs=0.05)
    v = verdict(uneven(heavy, 2.0, longer=longer), id_)
    assert (v.heavy, v.own_work) == (heavy, not longer)
    assert f.gain.step_time == pytest.approx((2 - left) * 6 / 20, abs=0.02) and f.severity == "high"
    assert f"GPU {heavy} of the job" in f.title  # the job's own numbers: CUDA_VISIBLE_DEVICES renumbers


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

@pytest.mark.parametrize(("job", "there", "not_there"), [
    (Job("step", 0.1, "tensorflow", KERAS3, (0, 1), strategy="mirrored"), "model.compile", "MirroredStrategy()"),
    (Job("step", 0.1, "tensorflow", CUSTOM, (0, 1), strategy="mirrored"), "strategy.run", "MirroredStrategy()"),
    (Job("step", 0.1, "tensorflow", CUSTOM, (0, 1)), "MirroredStrategy()", "strategy.run"),
    (Job("step", 0.1, "pytorch", PYTORCH, (0, 1), strategy="ddp"), "DistributedSampler", "strategy"),
    (Job("step", 0.1, "jax", JAX, (0, 1)), "NamedSharding", "strategy"),
])
def test_the_code_for_even_batches_fits_the_job(job, there, not_there):
    code = describe_replica_imbalance(verdict(uneven(0, 2.0), "replica_imbalance"), job).snippet or ""
    assert there in code and not_there not in code


def test_a_job_whose_replicas_exchange_gradients_has_a_strategy():
    assert Job.of(examine(reducing(200).build())).strategy == "mirrored"
    assert Job.of(examine(healthy(2).build())).strategy == ""

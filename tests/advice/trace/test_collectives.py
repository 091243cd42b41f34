"""Collectives: exposed, waiting, too many, too slow."""

from __future__ import annotations

import pytest

from gputop.diagnosis.diagnose import analyze
from gputop.trace.model import Kind
from tests.advice.trace.traces import KERNEL, NCCL, STEP, STEPS, abstained, fill, findings, job, reducing, verdict
from tests.trace.build import Builder
from tests.trace.shares import NEEDS_SHARED, SHARED


@pytest.mark.parametrize(("transfer", "severity"), [(500, None), (800, "low"), (1_600, "medium"), (4_000, "high")])
def test_exposed_communication(transfer, severity):
    found = findings(reducing(transfer))
    assert {id_: f.severity for id_, f in found.items()} == (
        {} if severity is None else {"communication_exposed": severity})
    if severity:
        assert found["communication_exposed"].gain.step_time == pytest.approx(transfer / STEP, abs=0.005)


def test_communication_beside_compute_costs_nothing():
    assert findings(reducing(4_000, hidden=True)) == {}


def test_the_estimated_saving_is_at_most_the_compute_to_hide_behind():
    f = findings(reducing(15_000, compute=2_000))["communication_exposed"]
    assert f.gain.step_time == pytest.approx(0.1, abs=0.02)


@pytest.mark.parametrize(("late", "there"), [(400, False), (3_000, True)])
@pytest.mark.parametrize("gpus", [2, 4])
def test_waiting_for_a_late_gpu(late, there, gpus):
    found = findings(reducing(200, late=late, gpus=gpus))
    assert ("collective_waiting" in found) == there
    assert not found.keys() & {"communication_exposed", "allreduce_slow", "replica_imbalance"}
    if there:
        f = found["collective_waiting"]
        assert f.gpus == (gpus - 1,) and f.gain.step_time == pytest.approx(late / STEP, abs=0.01)
        v = verdict(reducing(200, late=late, gpus=gpus), "collective_waiting")
        assert v.alone and v.latest == gpus - 1


def test_gpus_that_take_turns_in_being_late_are_all_named():
    b = job(2)
    for i in range(STEPS):
        for gpu in (0, 1):
            behind = 3_000 if gpu == i % 2 else 0
            for k in range(100):
                b.run(gpu, i * STEP + 100 + behind + k * 100, 98, KERNEL, launch=i * STEP + 50 + behind + k * 100)
            b.run(gpu, i * STEP + 10_200 + behind, 3_100 - behind, NCCL, kind=Kind.COLLECTIVE, launch=i * STEP + 9_000)
    f = findings(b)["collective_waiting"]
    assert f.gpus == (0, 1) and f.gain.step_time == pytest.approx(0.15, abs=0.01)
    assert not verdict(b, "collective_waiting").alone


def test_one_gpu_of_the_job_cannot_tell_waiting_from_transfer():
    missing = abstained(reducing(4_000, gpus=1))
    assert len({missing[id_] for id_ in ("collective_waiting", "allreduce_slow")}) == 1


def test_what_one_rank_shows_is_said_of_that_rank():
    f = findings(reducing(4_000, gpus=1))["communication_exposed"]
    assert f.severity == "low" and f.gpus == (0,) and f.title.endswith("20 % of the step on GPU 0")
    assert "how much waits for other ranks" in f.why
    assert f.evidence["exposed_collectives_s"] == pytest.approx(4e-3, rel=0.01)
    assert "communication_exposed" not in findings(reducing(4_000, gpus=1, hidden=True))


def test_the_count_of_allreduces_needs_no_second_rank():
    f = findings(reducing(100, count=60, gpus=1, compute=10_000))["allreduce_count"]
    assert f.evidence["allreduces_per_step"] == 60


@pytest.mark.parametrize(("count", "transfer", "params", "there"), [
    (30, 60, None, False),  # few
    (60, 60, None, True),
    (60, 60, 2_000_000, True),  # 8 MB in all
    (60, 60, 200_000_000, False),  # 13 MB each: well packed
])
def test_many_small_allreduces(count, transfer, params, there):
    found = findings(reducing(transfer, count, link=True), params)
    assert ("allreduce_count" in found) == there
    if there:
        f = found["allreduce_count"]
        assert f.evidence["allreduces_per_step"] == count and f.evidence["needed_per_step"] == 1
        assert f.gain.step_time == pytest.approx((count - 1) * transfer / STEP, rel=0.05)
        assert [c.id for c in f.consequences] == ["communication_exposed"]


def uneven_allreduces(count: int, gpus: int = 1, hidden: bool = False) -> Builder:
    """Every fifth takes 2 µs and the others 50, as those that wait; with several GPUs the first runs one more."""
    b = job(gpus)
    for gpu in range(gpus):
        fill(b, gpu, 100, 20_000 if hidden else 8_000, 98, 2, queued=90)
        for i in range(STEPS):
            for k in range(count + (gpu == 0 and gpus > 1)):
                b.run(gpu, i * STEP + 8_100 + k * 55, 50 if k % 5 else 2, NCCL, kind=Kind.COLLECTIVE,
                      launch=i * STEP + 8_000, stream=2)
    return b


@pytest.mark.parametrize("gpus", [1, 2])
def test_many_exposed_allreduces_are_said_whatever_fewer_would_save(gpus):
    f = findings(uneven_allreduces(100, gpus))["allreduce_count"]
    assert f.severity == "low" and f.gain.step_time is None
    assert f.evidence["share_ratio"] == pytest.approx(0.2, abs=0.01)


def test_allreduces_that_compute_hides_or_that_are_few_are_no_remark():
    assert "allreduce_count" not in findings(uneven_allreduces(100, hidden=True))
    assert "allreduce_count" not in findings(uneven_allreduces(30))


def test_allreduces_that_may_be_large_are_not_judged_without_parameters():
    assert "--params" in abstained(reducing(400, 40, compute=2_000))["allreduce_count"]


@pytest.mark.parametrize(("params", "there"), [(2_000_000, True), (8_000_000, False), (None, False)])
def test_allreduce_against_its_bytes(params, there):
    # 4 ms; at 11.9 GB/s a ring of four takes 1.5 × 8 MB in 1.0 ms, or 32 MB in 4.0 ms.
    b = reducing(4_000, link=True)
    found = findings(b, params)
    assert ("allreduce_slow" in found) == there
    if there:
        f = found["allreduce_slow"]
        assert f.evidence["wanted_s"] == pytest.approx(1.5 * 8e6 / 11.9e9 + 50e-6, rel=0.01)
        assert [c.id for c in f.consequences] == ["communication_exposed"]
    if params is None:
        assert "--params" in abstained(b)["allreduce_slow"]


def test_the_link_must_be_known_and_waiting_is_never_slowness():
    assert "pinned" in abstained(reducing(4_000), 2_000_000)["allreduce_slow"]
    assert "allreduce_slow" not in findings(reducing(200, late=5_000, link=True), 2_000_000)


@pytest.mark.skipif(not (SHARED / "cases").is_dir(), reason=NEEDS_SHARED)
def test_kernels_of_expert_parallelism_are_exposed_communication():
    found = analyze([str(SHARED / "cases" / "deepep_dpsk.pt.trace.json.gz")])
    first = found.findings[0]
    assert first.id == "communication_exposed" and first.evidence["share_ratio"] == pytest.approx(0.67, abs=0.01)
    assert found.collectives is not None and [op.operation for op in found.collectives.operations] == ["AllToAll"]
    assert found.collectives.count_per_step == pytest.approx(16)

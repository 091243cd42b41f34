"""The labeled suite itself (its traces show what was put into them), and the advice on a part of it."""

from __future__ import annotations

import dataclasses
import json
from functools import cache
from pathlib import Path

import pytest

from benchmarks.advice import analysis_of, main
from gputop.analysis.results import Analysis
from tests.advice.evidence import check_evidence
from tests.advice.labeled.case import HIGH, LOW, MEDIUM, Case, ambient_fixes, call_ms, severity_window
from tests.advice.labeled.cases import fault_case
from tests.advice.labeled.faults import FAULTS
from tests.advice.labeled.healthy import healthy, missing
from tests.advice.labeled.jobs import LabeledJob
from tests.advice.labeled.pairs import pairs
from tests.advice.labeled.rules import ids_with_rules
from tests.advice.labeled.score import judge, summary
from tests.advice.labeled.truth import truth

HEALTHY = {case.name: case for case in healthy()}
MISSING = {case.name: case for case in missing()}
# One of each host style, clipped, with and without several GPUs.
TRUE = (
    "input_bound", "step_gap_host", "communication_exposed", "copies_excessive", "gpu0_oversubscribed", "serial_gpus",
    "retracing", "sync_copies")


@cache
def analyzed(name: str) -> tuple[Case, Analysis]:
    """A healthy job of this name, or the strong fault of this id, and what is said of it."""
    case = HEALTHY[name] if name in HEALTHY else fault_case(name, "strong", 1)
    return case, analysis_of(case)


def six_steps(case: Case) -> Case:
    """The case with a short trace: for what does not depend on the number of steps."""
    return dataclasses.replace(case, job=case.job.replace(steps=min(case.job.steps, 6)))


def findings(analysis: Analysis, wanted: str = "") -> list[tuple[str, str]]:
    """Ids and severities, also of the wanted one if it is told with its cause; the evidence is checked on the way."""
    check_evidence(analysis)
    return [(one.id, one.severity) for f in analysis.findings
            for one in (f, *(below for below in f.consequences if below.id == wanted and below.action in f.action))]


def test_there_is_a_fault_for_each_rule_on_traces() -> None:
    assert FAULTS.keys() == ids_with_rules(), (
        "in tests/advice/labeled: a function with the name of the id in faults_host.py, faults_gpu.py or "
        "faults_gpus.py, or the id in NOT_SIMULATED (rules.py)")


@pytest.mark.parametrize("name", [*TRUE, "healthy-eight-overlapped", "healthy-steps-per-execution",
                                  "healthy-one-gpu-keras2-old"])
def test_the_analysis_finds_what_was_put_into_the_trace(name: str) -> None:
    case, found = analyzed(name)
    real = truth(case.timeline)
    assert found.steps is not None and real.step_mean_s is not None
    assert abs(found.steps.count + found.steps.dropped - len(real.step_starts_ns)) <= 1
    assert found.steps.mean_s == pytest.approx(real.step_mean_s, rel=0.05)
    assert found.input is not None and found.input.wait_ratio == pytest.approx(real.wait_ratio, abs=0.02)
    assert len(found.gpus) == case.job.gpus + case.job.idle_gpus
    for gpu, own in zip(found.gpus, real.gpus, strict=False):
        shares = (gpu.busy, gpu.compute, gpu.collectives, gpu.collectives_exposed, gpu.copies)
        assert shares == pytest.approx((own.busy, own.compute, own.collectives, own.exposed, own.copies), abs=1e-6)
        assert gpu.kernels == own.kernels
        assert gpu.launch_delay_median_s == pytest.approx(own.launch_delay_s, rel=1e-2)
        for way, count in own.copied.items():
            assert (gpu.copies_count[way], gpu.copies_bytes[way]) == (count, own.copied_bytes[way])
            assert gpu.copies_s[way] == pytest.approx(own.copied_s[way])
    for gpu in found.gpus[case.job.gpus:]:
        assert (gpu.busy, gpu.kernels) == (0.0, 0)


@pytest.mark.parametrize(("dtype", "gpu", "family"), [("tf32", "A100", "cnn"), ("bf16", "H100", "transformer"),
                                                      ("fp16", "V100", "mlp")])
def test_matmuls_of_healthy_jobs_are_seen_on_tensor_cores(dtype: str, gpu: str, family: str) -> None:
    case = Case("types", "healthy", LabeledJob(3, dtype=dtype, gpu=gpu, family=family, kernels=120, steps=8))
    (use,), (own,) = analysis_of(case).gpus, truth(case.timeline).gpus
    assert use.tensor_core_time == pytest.approx(own.matmul_share, abs=1e-6)
    assert use.kernel_time_by_type is not None and use.kernel_time_by_type[dtype] >= own.matmul_share - 1e-6


def test_the_late_gpu_and_the_allocator_are_as_the_job_says() -> None:
    case, analysis = analyzed("collective_waiting")
    found, real = analysis.collectives, truth(case.timeline)
    assert found is not None and found.waiting == pytest.approx(real.collective_waiting, abs=0.02)
    assert found.count_per_step == pytest.approx(real.collectives_per_step, abs=0.6)
    case, analysis = analyzed("memory_pressure")  # the allocator is as full as the job says
    assert analysis.memory
    for use in analysis.memory:
        assert use.peak_bytes / use.capacity_bytes == pytest.approx(case.job.memory, abs=1e-3)


@pytest.mark.parametrize("id_", [i for i in FAULTS if i not in ("batch_size_headroom", "memory_pressure",
                                                                   "serial_gpus")])
def test_a_fault_costs_what_was_asked_for(id_: str) -> None:
    case = fault_case(id_, "strong", 1)
    assert case.shares[id_] == pytest.approx(0.32, abs=0.13) and case.must[id_][1] == HIGH


@pytest.mark.parametrize("id_", list(FAULTS)[1::4])
def test_what_must_not_be_said_is_not_true_either(id_: str) -> None:
    case = fault_case(id_, "strong", 1)
    assert not [other for other in case.must_not if case.ambient_share(other) >= 0.05]


@pytest.mark.parametrize("case", list(HEALTHY.values())[::6], ids=lambda case: case.name)
def test_healthy_jobs_have_nothing_to_fix(case: Case) -> None:
    case = six_steps(case)
    assert {id_ for id_ in ambient_fixes(case.job) if case.allows(id_)} <= {"xla_off"}  # which any job has some of


def test_a_trace_is_the_same_each_time_and_fast_to_make() -> None:
    one, other = (fault_case.__wrapped__("replica_imbalance", "weak", 4) for _ in range(2))
    assert one is not other and one.bytes() == other.bytes()
    assert one.bytes() != fault_case("replica_imbalance", "weak", 5).bytes()


def test_causes_add_up_to_their_share_of_the_step_and_pairs_name_the_larger_first() -> None:
    job = LabeledJob(1, compute_ms=50.0, run_ahead=0, gap_ms=0.0)
    step = call_ms(job)
    assert call_ms(job.replace(gap_ms=step)) == pytest.approx(2 * step, rel=0.05)
    assert call_ms(job.replace(prefetch=0, produce_ms=step)) == pytest.approx(2 * step, rel=0.05)
    assert call_ms(job.replace(launch_us=2 * step * 1000 / job.kernels)) == pytest.approx(2 * step, rel=0.05)
    case = next(case for case in pairs() if case.name == "pair-gap-input")  # pairs name the larger cause first
    assert case.main == ("step_gap_host",) and case.shares["step_gap_host"] > case.shares["input_bound"] > 0.05
    assert set(case.must) == {"step_gap_host", "input_bound"}


@pytest.mark.parametrize("id_", sorted(ids_with_rules()))
def test_strong_faults_are_found(id_: str) -> None:
    case, analysis = analyzed(id_)
    verdict = judge(case, findings(analysis, id_), ids_with_rules())
    assert id_ in verdict.hit and not verdict.false and not verdict.contradicted
    assert verdict.first_right is not False


@pytest.mark.parametrize("id_", sorted(ids_with_rules()))
def test_findings_of_weak_faults_rest_on_something(id_: str) -> None:
    check_evidence(analysis_of(six_steps(fault_case(id_, "weak", 1))))


@pytest.mark.parametrize("name", [
    "healthy-eight-overlapped", "healthy-tf32-by-default", "healthy-cpu-only", "healthy-unused-gpus",
    "healthy-big-batches-pinned", "healthy-callbacks-behind-queue", "healthy-near-memory-limit"])
def test_healthy_jobs_are_not_accused(name: str) -> None:
    case, analysis = analyzed(name)
    assert not judge(case, findings(analysis)).false


@pytest.mark.parametrize("case", MISSING.values(), ids=lambda case: case.name)
def test_a_rule_without_its_inputs_abstains(case: Case) -> None:
    case = six_steps(case)
    verdict = judge(case, findings(analysis_of(case)))
    assert not verdict.contradicted and not verdict.false


def _case(**labels: object) -> Case:
    return dataclasses.replace(Case("made", "fault", LabeledJob(1, steps=4, kernels=60)), **labels)  # type: ignore[arg-type]


def test_a_score_counts_what_is_found_missed_and_false() -> None:
    case = _case(
        windows={"input_bound": (MEDIUM, HIGH), "retracing": (MEDIUM, HIGH), "sync_copies": (None, LOW)},
        main=("input_bound",), consequences=frozenset(("launch_bound",)), must_not=frozenset(("xla_off",)),
        abstain=frozenset(("memory_pressure",)))
    verdict = judge(
        case, [("launch_bound", HIGH), ("input_bound", LOW), ("sync_copies", MEDIUM), ("xla_off", LOW),
        ("memory_pressure", LOW), ("serial_gpus", HIGH)])
    assert (verdict.hit, verdict.missed) == (("input_bound",), ("retracing",))
    assert verdict.severity_off == {"input_bound": LOW, "sync_copies": MEDIUM}
    assert set(verdict.false) == {"sync_copies", "serial_gpus"}
    assert verdict.contradicted == ("xla_off", "memory_pressure")
    assert (verdict.first, verdict.first_right) == ("launch_bound", False)
    document = summary([verdict])
    assert (document["recall"], document["precision"], document["main_cause_first"]) == (0.5, pytest.approx(1 / 3), 0.0)
    assert document["ids"]["input_bound"]["severity_off"] == 1 and document["ids"]["serial_gpus"]["false"] == 1
    case = _case(windows={"retracing": (MEDIUM, HIGH)}, main=("retracing",))  # a score leaves out ids without a rule
    verdict = judge(case, [], frozenset(("input_bound",)))
    assert verdict.missed == () and verdict.first_right is None
    assert judge(case, [], None).missed == ("retracing",)
    assert summary([])["recall"] is None
    assert severity_window(0.3) == (HIGH, HIGH)  # severities near a limit may be either
    assert severity_window(0.14) == (MEDIUM, HIGH) and severity_window(0.1) == (MEDIUM, MEDIUM)
    assert severity_window(0.055) == (None, MEDIUM) and severity_window(0.02) == (None, LOW)


def test_the_benchmark_prints_and_writes_its_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["--only", "input_bound-strong-1", "--all-ids", "-v", "--json", str(tmp_path / "advice.json")])
    printed = capsys.readouterr().out
    document = json.loads((tmp_path / "advice.json").read_text())
    assert document["cases"] == 1 and document["verdicts"][0]["wanted"] == ["input_bound"]
    assert f"recall                   {document['recall']:.3f}" in printed

"""Several GPUs: uneven work, work by turns, a staggered launch."""

from __future__ import annotations

import pytest

from gputop.advice.trace.job import CUSTOM, JAX, KERAS3, PYTORCH, Job
from gputop.advice.trace.multi_gpu import describe_replica_imbalance
from gputop.diagnosis.diagnose import analyze_to_facts, analyze_trace
from gputop.render.finding_text import culprits_text
from gputop.trace.model import Kind, LaunchShape
from tests.advice.trace.stalls import reducing, staggered
from tests.advice.trace.traces import KERNEL, STEP, STEPS, fill, findings, healthy, job, launched_ahead, uneven, verdict
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


@pytest.mark.parametrize(("each", "shared", "gpus", "there"), [
    (1_000, True, 4, True), (1_000, False, 4, True), (1_000, True, 2, True), (1_000, False, 2, False),
    (100, True, 4, False)])
def test_gpus_launched_one_after_the_other(each, shared, gpus, there):
    found = findings(staggered(each, shared, gpus))
    assert ("staggered_launch" in found) == there
    if there:
        f = found["staggered_launch"]
        assert f.gpus == tuple(range(1, gpus)) and f.gain.step_time == pytest.approx((gpus - 1) * each / STEP, abs=0.01)


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


OPS = {"model/embedding/Gather": 1_000.0, "model/block_0/attention/MatMul": 2_000.0,
       "model/block_1/attention/MatMul": 2_000.0, "model/mlp/MatMul": 3_000.0, "Adam/ResourceApplyAdam": 500.0}


def layered(heavy: int, factors: dict[str, float], *, blocks: float | None = 1.0, kernels: int = 4) -> Builder:
    """Four replicas of the same ops; on one of them each takes ``factors`` times as long, with ``blocks`` times as many
    blocks of threads (None: the trace tells none). A replica's ops are numbered on, as TensorFlow does."""
    b = job(4)
    for i in range(STEPS):
        for gpu in range(4):
            at = i * STEP + 100.0
            for op, time in OPS.items():
                length = time * (factors.get(op, 1.0) if gpu == heavy else 1.0) / kernels
                grid = round(1_000 * (blocks or 1) if gpu == heavy else 1_000)
                scope, _, rest = op.partition("/")
                for _ in range(kernels):
                    b.run(gpu, at, length, KERNEL, launch=i * STEP + 1, launch_length=0.5,
                          op=f"{scope}_{gpu}/{rest}" if gpu else op,
                          shape=None if blocks is None else LaunchShape((grid, 1, 1), (128, 1, 1)))
                    at += length + 1
    return b


def ahead(b: Builder) -> Builder:
    """The job is paced by its GPUs."""
    return launched_ahead(b, "python")


@pytest.mark.parametrize("heavy", [0, 2])
def test_where_a_layer_takes_longer_on_one_replica_it_is_named_by_how_much(heavy):
    found = findings(ahead(layered(heavy, {"model/mlp/MatMul": 2.0})))
    f = found["gpu0_oversubscribed" if heavy == 0 else "replica_imbalance"]
    own, = f.culprits
    assert own.name.endswith("mlp/MatMul") and own.more_on == f.gpus == (heavy,)
    assert own.time_s == pytest.approx(3_000e-6, rel=1e-3)  # twice as long as on the others
    assert culprits_text(f) == f"Longer on GPU {heavy} than on the others: {own.name} +3.0 ms per step"
    assert f.evidence["longer_alike_ratio"] == pytest.approx(3_000 / 8_500, abs=0.01)
    assert "No layer is to blame" not in f.why


def test_layers_that_take_longer_are_named_where_they_save_much():
    f = findings(ahead(layered(1, {"model/embedding/Gather": 3.0, "model/mlp/MatMul": 1.2})))["replica_imbalance"]
    assert [(own.name.rpartition("_1/")[2], own.time_s) for own in f.culprits] == [
        ("embedding/Gather", pytest.approx(2_000e-6, rel=1e-3)), ("mlp/MatMul", pytest.approx(600e-6, rel=1e-3))]
    assert findings(uneven(0, 1.07, light=15_000)) == {}  # imbalance that saves little is no finding
    assert not findings(uneven(0, 1.5, light=600)).keys() & {"gpu0_oversubscribed", "replica_imbalance"}
    assert "staggered_launch" not in findings(reducing(200, late=3_000))  # one late GPU is no staggered launch


@pytest.mark.parametrize(("blocks", "words"), [
    (1.0, "The GPU itself is slower"), (1.5, "a larger part of each batch"), (None, "the trace does not show which")])
def test_where_all_ops_take_longer_none_is_named(blocks, words):
    found = findings(ahead(layered(0, dict.fromkeys(OPS, 1.5), blocks=blocks)))
    slower = blocks == 1.0
    f = found["replica_imbalance" if slower else "gpu0_oversubscribed"]
    assert f.culprits == () and "not only those of one layer" in f.why and words in f.why
    assert f.evidence["longer_alike_ratio"] == pytest.approx(1.0) and ("nvidia-smi" in (f.snippet or "")) == slower
    if blocks is not None:
        assert f.evidence["blocks_ratio"] == pytest.approx(blocks)
    v = verdict(layered(0, dict.fromkeys(OPS, 1.5), blocks=blocks), f.id)
    # Of a slower GPU nothing can be dealt out to the others.
    saved = 0.5 * 8_500 if slower else (1.5 - 4.5 / 4) * 8_500
    assert v.share == pytest.approx(saved / STEP, rel=0.02)


def test_a_replica_that_runs_an_op_more_often_is_told_by_that_op():
    """More kernels, but of ops that the others run, too: as with longer sequences in its part of the batch."""
    b = job(3)
    for i in range(STEPS):
        for gpu in range(3):
            at = i * STEP + 100.0
            for op in ["cell/MatMul"] * (16 if gpu == 1 else 8) + ["head/MatMul"] * 2:
                b.run(gpu, at, 900.0, KERNEL, launch=i * STEP + 1, launch_length=0.5, op=op)
                at += 901
    v = verdict(b, "replica_imbalance")
    assert v.own_work and not v.alike
    f = findings(ahead(b))["replica_imbalance"]
    assert culprits_text(f) == "Longer on GPU 1 than on the others: cell/MatMul +7.2 ms per step"


def test_ops_without_names_are_compared_by_their_kernels():
    b = job(3)
    for i in range(STEPS):
        for gpu in range(3):
            at = i * STEP + 100.0
            for kernel in ("gemm", "softmax"):
                length = 4_000.0 * (1.5 if gpu == 1 and kernel == "softmax" else 1.0)
                b.run(gpu, at, length, kernel, launch=i * STEP + 1, launch_length=0.5)
                at += length + 1
    f = findings(ahead(b))["replica_imbalance"]
    assert f.culprits == () and f.evidence["longer_alike_ratio"] == pytest.approx(0.5)
    assert "No layer is to blame" not in f.why


def test_an_unused_gpu_and_waiting_in_collectives_are_no_work():
    b = healthy()
    trace = b.build()
    trace.gpus += [type(trace.gpus[0])("node", 1)]
    assert analyze_trace(trace).findings == ()
    b = job(4)
    fill(b, 0, 100, 18_000, 196, 4, queued=20)
    for gpu in (1, 2, 3):  # some odd kernel only
        fill(b, gpu, 100, 400, 196, 4, queued=20)
    assert not findings(b).keys() & {"gpu0_oversubscribed", "replica_imbalance"}
    b = job(2)  # waiting in collectives is no work
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
    (Job("step", 0.1, "jax", JAX, (0, 1)), "NamedSharding", "strategy")])
def test_the_code_for_even_batches_fits_the_job(job, there, not_there):
    code = describe_replica_imbalance(verdict(uneven(0, 2.0), "replica_imbalance"), job).snippet or ""
    assert there in code and not_there not in code


def test_a_job_whose_replicas_exchange_gradients_has_a_strategy():
    assert Job.of(analyze_to_facts(reducing(200).build())).strategy == "mirrored"
    assert Job.of(analyze_to_facts(healthy(2).build())).strategy == ""

"""Collectives: exposed, waiting, too many, too slow."""

from __future__ import annotations

import re

import pytest

from gputop.advice.trace.collectives import _moved
from gputop.analysis.results import CollectiveOp
from gputop.diagnosis.diagnose import analyze, analyze_to_facts, analyze_trace
from gputop.timeline.rows import rows_of
from gputop.trace.model import HloOp, Kind, Trace
from gputop.trace.readers.load import load
from tests.advice.trace.stalls import NCCL, reducing
from tests.advice.trace.traces import KERNEL, STEP, STEPS, abstained, fill, findings, job, verdict
from tests.records import replace
from tests.timeline.make import find_idle_gaps
from tests.trace.build import Builder, one_process_each
from tests.trace.shares import NEEDS_SHARED, SHARED


@pytest.mark.parametrize(("transfer", "severity"), [(500, None), (800, "low"), (1_600, "medium"), (4_000, "high")])
def test_exposed_communication(transfer, severity):
    found = findings(reducing(transfer))
    assert {id_: f.severity for id_, f in found.items()} == (
        {} if severity is None else {"communication_exposed": severity})
    if severity:
        assert found["communication_exposed"].gain.step_time == pytest.approx(transfer / STEP, abs=0.005)


def test_communication_saves_at_most_the_compute_to_hide_behind():
    assert findings(reducing(4_000, hidden=True)) == {}
    f = findings(reducing(15_000, compute=2_000))["communication_exposed"]
    assert f.gain.step_time == pytest.approx(0.1, abs=0.02)


def hold(b: Builder, in_use: int, gpus: int = 4) -> Builder:
    """TensorFlow's allocators, which hold so much at least."""
    for gpu in range(gpus):
        for i in range(STEPS):
            b.memory(i * STEP + 50, f"GPU_{gpu}_bfc", in_use + gpu, 10**10, 2 * in_use)
            b.memory(i * STEP + 9_000, f"GPU_{gpu}_bfc", 2 * in_use, 10**10, 2 * in_use)
    return b


def test_the_bytes_of_an_allreduce_by_what_the_gpus_always_hold():
    """24 MB with Adam's two slots: at most 8 MB to reduce, as 2 million parameters."""
    b = hold(reducing(4_000, link=True), 24_000_000).host("ResourceApplyAdam", 20, 5)
    f = findings(b)["allreduce_slow"]
    by_params = findings(reducing(4_000, link=True), 2_000_000)["allreduce_slow"]
    assert f.evidence["bytes_per_step"] == by_params.evidence["bytes_per_step"] == 8_000_000
    assert ("AllReduces of 8.0 MB per step (at most: the smallest memory use of a GPU was 24.0 MB, of which 2/3 is "
            "optimizer state") in f.why
    assert "(2.0 million parameters × 4 bytes) take 4.0 ms" in by_params.why
    assert "2 × 3/4 of the bytes at that rate" in f.why
    assert "allreduce_slow" not in findings(hold(reducing(4_000, link=True), 24_000_000))  # SGD keeps nothing: 24 MB


def test_the_bytes_of_an_allreduce_by_the_gradients_and_by_xlas_program():
    b = reducing(4_000, link=True)
    for i in range(STEPS):
        for k in range(4):
            b.host("torch::autograd::AccumulateGrad", i * STEP + 9_000 + k * 10, 5, elements=500_000)
    f = findings(b)["allreduce_slow"]
    assert f.evidence["bytes_per_step"] == 8_000_000 and "2.0 million gradient elements × 4 bytes" in f.why
    trace = reducing(4_000, link=True).build()
    trace.device.hlo[trace.device.kind == Kind.COLLECTIVE] = 0
    trace.hlo_ops.append(HloOp("jit(step)/add", "", None, 16_000_000, "all-reduce"))
    f = findings(trace)["allreduce_slow"]
    assert f.evidence["bytes_per_step"] == 8_000_000 and "from their message sizes" in f.why


@pytest.mark.skipif(not SHARED.exists(), reason=NEEDS_SHARED)
def test_the_parameters_of_real_jobs_by_their_allocators():
    """TensorFlow's tutorial of MNIST has 347,146 parameters, BERT-large 334 million; both train with Adam."""
    for name, parameters, within in (("mirrored_4v100_mnist", 347_146, 0.06), ("multiworker_8v100", 334e6, 0.01)):
        facts = analyze_to_facts(load([SHARED / "xplane_nvidia" / f"{name}.xplane.pb"]))
        gpus = {1: 0.0, 4: 0.0, 6: 0.0} if name.startswith("multi") else {0: 0.0, 1: 0.0, 2: 0.0, 3: 0.0}
        moved = _moved(facts, CollectiveOp("AllReduce", 1, 1.0, 1.0, None, gpus, None, None, None), 2)
        assert moved is not None and moved[0] == pytest.approx(4 * parameters, rel=within)


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


def test_what_one_rank_shows_is_said_of_that_rank():
    f = findings(reducing(4_000, gpus=1))["communication_exposed"]
    assert f.severity == "medium" and f.gpus == (0,) and f.title.endswith("20% of the step on GPU 0")
    assert "how much is waiting for other ranks" in f.why
    assert f.evidence["exposed_collectives_s"] == pytest.approx(4e-3, rel=0.01)
    assert "communication_exposed" not in findings(reducing(4_000, gpus=1, hidden=True))
    missing = abstained(reducing(4_000, gpus=1))  # one GPU of the job cannot tell waiting from transfer
    assert len({missing[id_] for id_ in ("collective_waiting", "allreduce_slow")}) == 1
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
        assert "communication_exposed" in {c.id for c in f.consequences}


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
def test_many_exposed_allreduces_of_which_fewer_save_nothing_are_claimed_once(gpus):
    a = analyze_trace(uneven_allreduces(100, gpus).build())
    by_id = {f.id: f for f in a.findings}
    assert "allreduce_count" not in by_id
    if gpus == 1:
        assert by_id["communication_exposed"].gain.step_time == pytest.approx(0.2, abs=0.01)
    else:  # which GPU the others wait for is unknown, so no rule claims them
        assert a.wall_time.unexplained.parts["collectives"] == pytest.approx(0.2 * a.breakdown.total, rel=0.02)


@pytest.mark.parametrize(("params", "there"), [(2_000_000, True), (8_000_000, False), (None, False)])
def test_allreduce_against_its_bytes(params, there):
    # 4 ms; at 11.9 GB/s a ring of four takes 1.5 × 8 MB in 1.0 ms, or 32 MB in 4.0 ms.
    b = reducing(4_000, link=True)
    found = findings(b, params)
    assert ("allreduce_slow" in found) == there
    if there:
        f = found["allreduce_slow"]
        assert f.evidence["wanted_s"] == pytest.approx(1.5 * 8e6 / 11.9e9 + 50e-6, rel=0.01)
        assert "communication_exposed" in {c.id for c in f.consequences}
    if params is None:
        assert "--params" in abstained(b)["allreduce_slow"]


def test_the_link_must_be_known_and_few_allreduces_are_not_told_to_be_fewer():
    assert "pinned" in abstained(reducing(4_000), 2_000_000)["allreduce_slow"]
    assert "allreduce_slow" not in findings(reducing(200, late=5_000, link=True), 2_000_000)
    assert "allreduce_count" not in findings(uneven_allreduces(100, hidden=True))
    assert "allreduce_count" not in findings(uneven_allreduces(30))
    assert "--params" in abstained(reducing(400, 40, compute=2_000))["allreduce_count"]


@pytest.mark.skipif(not (SHARED / "cases").is_dir(), reason=NEEDS_SHARED)
def test_kernels_of_expert_parallelism_are_exposed_communication():
    found = analyze([str(SHARED / "cases" / "deepep_dpsk.pt.trace.json.gz")])
    first = found.findings[0]
    assert first.id == "communication_exposed" and first.evidence["share_ratio"] == pytest.approx(0.67, abs=0.01)
    assert (first.severity, first.snippet) == ("medium", None)  # by what it saves at most; all may be waiting
    assert not re.search("gradient|backward", first.action)
    assert found.collectives is not None and [op.operation for op in found.collectives.operations] == ["AllToAll"]
    assert found.collectives.count_per_step == pytest.approx(16)


# -- a rank that its own host delays --------------------------------------------------------------------

def delayed(late_gpu: int | None, *, every: int = 1, gpus: int = 4, steps: int = 8, host: str | None = None,
            heavier: bool = False, late: float = 8_000, format: str = "xspace") -> Trace:
    """Steps of 10 ms, and of 18 ms in which the late GPU's host does something else for 8 ms before it launches, or in
    which it has so much more to compute (``heavier``). Each host waits for its GPU at the end of a step."""
    b, begin = Builder(gpus=gpus, format=format), 100.0
    for i in range(steps):
        slow = late_gpu is not None and i % every == 0
        length = 10_000 + (late if slow else 0)
        b.host("train_step", begin, length - 50, line="launch 0", is_func=1, step_num=i)
        for gpu in range(gpus):
            behind = late if slow and gpu == late_gpu else 0.0
            if behind and host is not None:
                b.host(host, begin + 20, behind, line=f"launch {gpu}")
            start = begin + 100 + (0 if heavier else behind)
            work = 7_000 + (behind if heavier else 0)
            b.run(gpu, start, work, KERNEL, launch=start - 20, launch_length=10)
            end = begin + length - 300
            b.run(gpu, start + work + 10, end - start - work - 10, NCCL, kind=Kind.COLLECTIVE, launch=start, stream=2)
            b.host("cudaStreamSynchronize", start + 20, end - start - 15, line=f"launch {gpu}")
        begin += length
    return one_process_each(b.build())


@pytest.mark.parametrize(("late_gpu", "format"), [(0, "xspace"), (1, "xspace"), (3, "nsys"), (2, "chrome")])
def test_a_rank_that_its_host_delays_is_named_and_its_delay_is_the_gain(late_gpu, format):
    found = analyze_trace(delayed(late_gpu, format=format)).findings
    f = found[0]
    assert f.id == "collective_waiting" and f.gpus == (late_gpu,) and f.severity == "high"
    assert f"The host of rank {late_gpu} delays GPU {late_gpu}" in f.title
    assert f.gain.step_time == pytest.approx(8 / 18, abs=0.03) and f.gain.by == "replay"
    assert "so Python is running or waiting" in f.why and f.evidence["no_event_s"] == pytest.approx(8e-3, rel=0.05)


def test_the_gap_of_the_late_gpu_belongs_to_the_finding_and_its_host_has_the_rank():
    trace = delayed(1)
    facts = analyze_to_facts(trace)
    gaps = find_idle_gaps(facts)
    late = [gap for gap in gaps if gap.gpus == (1,) and gap.end_ns - gap.start_ns > 7_000_000]
    assert len(late) >= 7 and {gap.finding for gap in late} == {"collective_waiting"}
    groups = {row.label: row.group for row in rows_of(trace).rows if row.kind == "thread"}
    assert groups["rank 1 launch 1"] == "Host node rank 1, GPU 1"


def test_what_the_late_host_ran_is_named_and_a_checkpoint_has_its_own_advice():
    f = findings(delayed(2, host="save_metrics"))["collective_waiting"]
    assert "save_metrics (8.0 ms)" in f.why and 'Look at "save_metrics" on rank 2' in f.action
    assert [c.name for c in f.culprits] == ["save_metrics"] and "no event" not in f.why
    f = findings(delayed(2, host="SaveV2"))["collective_waiting"]  # a late checkpoint has its own advice
    assert "Save less often" in f.action


def test_a_rank_that_is_late_every_few_steps_or_of_one_process():
    found = findings(delayed(1, every=4, steps=16))
    f = found["collective_waiting"]
    assert "The host of rank 1 delays GPU 1" in f.title and f.gain.step_time == pytest.approx(8 / 48, abs=0.03)
    assert "long_steps" not in found
    trace = delayed(1, late=900)  # GPUs of one process have no rank
    one = replace(trace, gpus=[replace(gpu, rank=0) for gpu in trace.gpus],
                  lines=[replace(line, rank=0) for line in trace.lines])
    f = findings(one)["collective_waiting"]
    assert f.title.startswith("The host delays GPU 1") and "rank" not in f.title


@pytest.mark.parametrize("job", [delayed(None), delayed(1, heavier=True)])
def test_even_ranks_and_one_with_more_work_are_not_delayed_by_a_host(job):
    waiting = verdict(job, "collective_waiting")
    assert waiting is None or waiting.held_up is None
    assert not any("host of rank" in f.title for f in findings(job).values())


@pytest.mark.skipif(not SHARED.exists(), reason=NEEDS_SHARED)
@pytest.mark.parametrize(("name", "rank", "least", "most"), [
    ("cases/ddp_sleep", 1, 0.6, 0.7), ("cases/ddp_sleepfirst", 1, 0.65, 0.71), ("cases/ddp_input", 2, 0.6, 0.66),
    ("torchrec_4v100", 2, 0.88, 0.92)])
def test_real_sets_of_ranks_name_the_one_that_its_host_delays(name, rank, least, most):
    found = analyze([str(path) for path in sorted((SHARED / name).glob("*.gz"))]).findings
    assert found[0].id == "collective_waiting" and found[0].gpus == (rank,)
    assert f"The host of rank {rank} delays GPU {rank}" in found[0].title
    assert least <= (found[0].gain.step_time or 0.0) <= most
    assert "input_bound" not in {f.id for f in found}


@pytest.mark.skipif(not SHARED.exists(), reason=NEEDS_SHARED)
@pytest.mark.parametrize("name", ["cases/ddp_healthy", "cases/ddp_gcall", "cases/ddp_sigterm"])
def test_real_sets_whose_hosts_are_alike_name_none(name):
    found = analyze([str(path) for path in sorted((SHARED / name).glob("*.gz"))]).findings
    assert not any("held_up_s" in f.evidence for f in found)


def gathering(op: str, around: str = "") -> Builder:
    """One rank of a job of PyTorch whose layers gather for 9 ms of each step; ``op`` launches that."""
    b = Builder(format="chrome")
    for i in range(STEPS):
        b.host(f"ProfilerStep#{i}", i * STEP, STEP - 1).host("cudaDeviceSynchronize", i * STEP + 130, STEP - 140)
        for k in range(8):
            at, host = i * STEP + 150 + k * 2_400, i * STEP + 5 + k * 14
            if around:
                b.host(around, host, 6)
            b.host(op, host + 1, 4)
            b.run(0, at, 1_100, "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
                  kind=Kind.COLLECTIVE, launch=host + 2, launch_length=1, thread="python")
            b.host("autograd::engine::evaluate_function: AddmmBackward0", host + 7, 4)
            b.run(0, at + 1_105, 1_290, KERNEL, launch=host + 8, launch_length=1, thread="python")
    return b


def test_activations_of_tensor_parallelism_are_no_parameters_to_prefetch():
    tensors = findings(gathering("_c10d_functional::all_gather_into_tensor", "Redistribute"))
    of_tensors = tensors["communication_exposed"]
    assert "activations" in of_tensors.action and "logits" not in of_tensors.title
    assert "init_device_mesh" in (of_tensors.snippet or "")
    sharded = findings(gathering("c10d::_allgather_base_", "FSDP::all_gather (l.0)"))["communication_exposed"]
    assert "parameters" in sharded.action and "activations" not in sharded.action
    assert "set_modules_to_forward_prefetch" in (sharded.snippet or "")


def gathering_logits(*, trains: bool = True, behind: bool = True) -> Builder:
    """One rank under tensor parallelism: 4 short gathers, each before a product, and a long one ``behind`` the last."""
    b, gather = Builder(format="chrome"), "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
    for i in range(STEPS):
        b.host(f"ProfilerStep#{i}", i * STEP, STEP - 1).host("aten::embedding", i * STEP + 2, 2)
        b.host("cudaDeviceSynchronize", i * STEP + 300, STEP - 310)
        for k in range(5):
            at, host, length = i * STEP + 150 + k * 1_400, i * STEP + 5 + k * 20, 9_000 if k == 4 else 1_000
            if k < 4 or behind:
                b.host("Redistribute", host, 6).host("_c10d_functional::all_gather_into_tensor", host + 1, 4)
            b.run(0, at, length, gather, kind=Kind.COLLECTIVE, launch=host + 2, launch_length=1, thread="python")
            if k < 4:
                b.host("aten::mm", host + 8, 4)
                b.run(0, at + 1_010, 350, KERNEL, launch=host + 9, launch_length=1, thread="python")
        if trains:
            b.host("autograd::engine::evaluate_function: MmBackward0", i * STEP + 200, 50, "autograd")
        b.run(0, i * STEP + 15_000, 4_000, KERNEL, launch=i * STEP + 210, launch_length=1, thread="autograd")
    return b


def test_gathered_logits_have_a_fix_of_their_own():
    f = findings(gathering_logits())["communication_exposed"]
    assert f.title == "Gathering the full logits takes 45% of the step on GPU 0"
    assert "loss parallel" in f.action and "loss_parallel" in (f.snippet or "")
    assert f.gain.claim == "at most" and f.gain.step_time == pytest.approx(0.45, abs=0.01)
    serves = findings(gathering_logits(trains=False))["communication_exposed"]
    assert "full logits" in serves.title and "argmax" in serves.action and serves.snippet is None
    assert "logits" not in findings(gathering_logits(behind=False))["communication_exposed"].title
    b = gathering_logits()
    for i in range(STEPS):
        b.host("aten::mm", i * STEP + 120, 4)
    assert "logits" not in findings(b)["communication_exposed"].title


def test_many_reductions_of_activations_are_no_gradients_to_pack():
    def reducing_activations(around: str) -> Builder:
        b = Builder(format="chrome")
        for i in range(STEPS):
            b.host(f"ProfilerStep#{i}", i * STEP, STEP - 1)
            for k in range(80):
                at = i * STEP + 50 + k * 240
                b.host(around, at, 30).host("autograd::engine::evaluate_function: AddmmBackward0", at + 35, 5)
                b.run(0, at + 40, 60, NCCL, kind=Kind.COLLECTIVE, launch=at + 10, thread="python")
                b.run(0, at + 105, 120, KERNEL, launch=at + 36, thread="python")
        return b

    def named(around: str) -> str:
        b = reducing_activations(around)
        return f"{findings(b).keys()} {abstained(b).keys()}"

    assert "allreduce_count" in named("c10d::allreduce_") and "allreduce_count" not in named("Redistribute")


@pytest.mark.parametrize(("kind", "name"), [
    (Kind.P2P, "Memcpy PtoP"), (Kind.COLLECTIVE, "ncclDevKernel_SendRecv"), (Kind.COMPUTE, "ampere_sgemm")])
def test_an_exchange_of_one_gpu_that_the_other_waits_for_is_named(kind, name):
    b, thread = Builder(gpus=2, format="chrome"), "python"
    for i in range(12):
        at = i * 20_000 + 50
        b.host(f"ProfilerStep#{i}", i * 20_000, 19_990, thread, step_num=i)
        for gpu in (0, 1):
            b.run(gpu, at, 5_000, KERNEL, launch=at - 40 + 10 * gpu, thread=thread)
            begin = at + 5_000 + 8_000 * gpu
            b.run(gpu, begin, at + 14_000 - begin, NCCL, kind=Kind.COLLECTIVE, launch=at + 200 + 10 * gpu, stream=2,
                  thread=thread)
            b.run(gpu, at + 14_000, 5_750, KERNEL, launch=at + 220 + 10 * gpu, thread=thread)
        b.run(1, at + 5_000, 8_000, name, kind=kind, launch=at + 100, thread=thread, size=200_000_000)
        b.host("cudaDeviceSynchronize", at + 400, 19_370, thread)
    first = analyze_trace(b.build()).findings[0]
    f = next(f for f in (first, *first.consequences) if f.id == "collective_waiting")
    exchanges = kind != Kind.COMPUTE  # else it computes more than the other, which stands above
    assert (first is f) == exchanges == f.action.startswith(f"Start {name} on GPU 1")
    assert ("Meanwhile, GPU 1 runs" in f.why) == exchanges and "the other GPU waits 8.0 ms" in f.why

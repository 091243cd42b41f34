"""PyTorch jobs on the CPU: small ops, threads, settings, and memory that each step leaves."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from gputop.analysis.results import Analysis
from gputop.core.captured_samples import JobCpus
from gputop.diagnosis.diagnose import analyze
from gputop.trace.model import Trace
from tests.advice.trace.traces import abstained, findings, verdict
from tests.analysis.host.stack_samples import sampled
from tests.records import replace
from tests.trace.build import Builder

DATA = Path(__file__).parents[2] / "data"
STEP, COUNT = 20_000.0, 10
NODE = "autograd::engine::evaluate_function: MulBackward0"
ALONE = JobCpus(8.0, used=1.0, others=0.1, children=0.0, ranks=0.0, gputop=0.05, held_up=0.01, waited=0.02, threads=1,
                cores=8, main=0.98)


def loop(*, ops: int = 0, length: float = 4.0, pause: float = 4.0, large: float = 0.0, large_name: str = "aten::addmm",
         in_optimizer: int = 0, closure: bool = False, **stats: Any) -> Builder:
    """Steps of 20 ms: ``ops`` small ops, one large op of ``large`` µs, then the optimizer with ops of its own. Or all
    of it runs in a ``closure`` that the optimizer calls."""
    b = Builder(gpus=0, format="chrome")
    for i in range(COUNT + 1):
        at = i * STEP
        b.host("aten::zeros", at, 3)
        for k in range(ops):
            b.host("aten::mul" if k % 3 else "aten::add", at + 10 + k * (length + pause), length)
        if large:
            b.host(large_name, at + STEP - 4_000 - large, large, **stats)
        b.host(f"{NODE}", at + STEP - 3_990, 30)
        before = STEP - 3_905 if closure else 0
        b.host("Optimizer.step#SGD.step", at + STEP - 3_900 - before, 3_800 + before, annotation=1)
        for k in range(in_optimizer):
            b.host("aten::add_", at + STEP - 3_890 + k * (length + pause), length)
    return b


def captured(b: Builder, cpus: JobCpus | None) -> Trace:
    trace = b.build()
    trace.job_cpus = cpus
    return trace


def passes(each: int, count: int) -> Builder:
    """Steps of 20 ms that sum up ``count`` passes, each of so many small ops and one that each pass has."""
    b = Builder(gpus=0, format="chrome")
    for i in range(COUNT + 1):
        for k in range(count):
            at = i * STEP + k * 4_500
            for op in range(each):
                b.host("aten::t", at + op * 60, 10).host("aten::addmm", at + op * 60 + 12, 45)
            b.host("aten::nll_loss_backward", at + 60 * each, 10)
        b.host("Optimizer.step#SGD.step", i * STEP + STEP - 300, 200, annotation=1)
    return b


# -- small ops --------------------------------------------------------------------------------------

def test_small_ops_of_several_passes_and_of_no_steps() -> None:
    assert "eager_execution" not in findings(passes(40, 4)) and "eager_execution" in findings(passes(160, 1))
    b = Builder(gpus=0, format="chrome")  # small ops of a recording without steps are judged as a whole
    for i in range(3_000):
        b.host(f"aten::op{i}", i * 8, 4)
    assert findings(b)["eager_execution"].evidence["small_ops_per_step"] == 3_000
    b.host("Optimizer.step#Adam.step", 6_000, 18_000, annotation=1)  # most of it is one update
    assert verdict(b, "eager_execution").optimizer_ratio == pytest.approx(0.75, abs=0.01)


def test_a_loop_of_small_ops_is_found_with_its_figures() -> None:
    job = loop(ops=1500)
    v = verdict(job, "eager_execution")
    assert v.ops_per_step == pytest.approx(1500, rel=0.02) and v.op_median_s == pytest.approx(4e-6)
    assert v.most_often == "aten::mul" and v.most_often_per_step == pytest.approx(1000, rel=0.02)
    assert v.wait_s == pytest.approx(12e-3, rel=0.03) and v.share == pytest.approx(0.59, abs=0.03)
    f = findings(job)["eager_execution"]
    assert f.severity == "high" and "torch.compile" in (f.snippet or "") and f.gain.by == "bound"
    assert {culprit.name for culprit in f.culprits} >= {"aten::mul", "aten::add"}
    assert "optimizer_ratio" not in f.evidence
    v = verdict(loop(ops=60, in_optimizer=450), "eager_execution")  # the optimizer's small ops have a fix of their own
    assert v.optimizer_ratio > 0.8
    assert "fused=True" in (findings(loop(ops=60, in_optimizer=450))["eager_execution"].snippet or "")
    v = verdict(loop(ops=1200, in_optimizer=40, closure=True), "eager_execution")  # a model in the optimizer's call
    assert v.optimizer_ratio < 0.1 and v.share == pytest.approx(0.5, abs=0.05)
    assert verdict(loop(ops=60, in_optimizer=450, closure=True), "eager_execution").optimizer_ratio > 0.8
    # Three quarters of the time the main thread has no CPU: of the rest nearly all are small ops.
    held_up = JobCpus(2.0, used=0.25, others=1.7, held_up=0.7, waited=0.7)
    assert verdict(captured(loop(ops=500), held_up), "eager_execution").share == pytest.approx(0.65, abs=0.06)


@pytest.mark.parametrize("job", [
    loop(ops=30), loop(ops=150), loop(ops=100, length=90, pause=20), loop(ops=40, length=4, pause=300), loop()],
    ids=["few", "a tenth", "large ops", "pauses of Python", "none"])
def test_a_job_whose_ops_compute_is_left_alone(job: Builder) -> None:
    assert "eager_execution" not in findings(job)


def paused(at_one_place: bool, length: float = 300) -> Builder:
    """Between forty ops of each step Python pauses for 0.3 ms at eight places."""
    b, dice = Builder(gpus=0, format="chrome"), random.Random(4)
    at = 0.0
    for _ in range(30):
        places = range(0, 40, 5) if at_one_place else dice.sample(range(40), 8)
        for k in range(40):
            b.host(f"aten::op{k}", at, 150)
            at += 155 + (length if k in places else 0)
        b.host(NODE, at, 3_000).host("Optimizer.step#SGD.step", at + 3_005, 1_000, annotation=1)
        at += 4_010
    return b


def test_short_pauses_of_python_in_each_step_are_the_gap() -> None:
    """As of np.histogram after each of a model's parameters; a thread without a CPU pauses anywhere."""
    f = findings(paused(True))["step_gap_host"]
    assert f.evidence["gap_s"] == pytest.approx(8 * 0.3e-3, rel=0.25)
    assert "step_gap_host" not in findings(paused(False))


@pytest.mark.parametrize(("at_one_place", "others", "blamed"), [
    (True, 0.0, True), (True, 0.7, True), (False, 0.0, True), (False, 0.7, False)])
def test_long_pauses_anywhere_in_a_step_are_the_jobs_where_it_has_a_cpu(at_one_place, others, blamed) -> None:
    cpus = JobCpus(1.0, used=1 - others, others=others, children=0.0, ranks=0.0, gputop=0.0, held_up=others, threads=1,
                   main=1 - others)
    trace = captured(paused(at_one_place, 1_500), cpus)
    assert ("step_gap_host" in findings(trace)) == blamed
    assert blamed or "while other programs are idle" in abstained(trace)["step_gap_host"]


def test_compiled_ops_and_those_of_a_gpu_are_no_small_ops() -> None:
    job = loop(ops=1500)
    for i in range(COUNT + 1):
        job.host("Torch-Compiled Region: 0/0", i * STEP + 5, 13_000)
    assert "eager_execution" not in findings(job)
    job = loop(ops=1500)  # a GPU that waits for launches is another finding
    job.gpus = 1
    for i in range(COUNT):
        job.run(0, i * STEP + 20, 5, launch=i * STEP + 12, thread="python")
    assert "eager_execution" not in findings(job)
    job = loop(ops=1500)  # a GPU that the recording left out is no job of the CPU
    for i in range(COUNT):
        job.host("cudaLaunchKernel", i * STEP + 11, 2)
    assert "eager_execution" not in findings(job)


def test_small_ops_name_the_line_that_starts_them() -> None:
    """The line runs in the large op and in the pauses as well: it is one loop's. Nine of ten samples have it."""
    trace = loop(ops=1500, large=1_000).build()
    trace.origin_ns = 1000 * 10 ** 9
    around = "train.py:90 <module> > train.py:40 fit"
    changes = [(at, f"{around} > model.py:{line} forward") for i in range(COUNT) for at, line in (
        (i * STEP / 1e6, 7), ((i + 0.9) * STEP / 1e6, 9))]
    trace.stacks = (sampled({"MainThread": changes}, COUNT * STEP / 1e6, rate_hz=1000.0),)
    first = findings(trace)["eager_execution"].culprits[0]
    assert (first.name, first.kind) == ("model.py:7 forward", "line")


@pytest.mark.parametrize(("layer", "blamed"), [("aten::gru", False), ("aten::rnn_tanh", False), ("aten::stack", True)])
def test_the_backward_pass_of_a_recurrent_layer_is_no_loop_that_can_be_rewritten(layer: str, blamed: bool) -> None:
    b = Builder(gpus=0, format="chrome")
    for i in range(COUNT + 1):
        at = i * STEP
        b.host(layer, at, 3_000, sequence=10 * i).host("aten::addmm", at + 10, 100, sequence=10 * i + 1)
        b.host(NODE, at + 3_100, 12_000, sequence=10 * i + 1).host("aten::ones_like", at + 3_080, 4)
        for k in range(1_400):
            b.host("aten::mul" if k % 2 else "aten::add_", at + 3_105 + 8 * k, 4)
        b.host("Optimizer.step#SGD.step", at + 16_000, 3_000, annotation=1)
    assert ("eager_execution" in findings(b)) == blamed


# -- threads ----------------------------------------------------------------------------------------

def test_one_thread_while_cores_are_idle() -> None:
    v = verdict(captured(loop(large=12_000), ALONE), "threads_unused")
    assert v.threads == 8 and (v.large_ratio, v.share) == pytest.approx((0.6, 0.525), abs=0.01)
    f = findings(captured(loop(large=12_000), ALONE))["threads_unused"]
    assert f.severity == "high" and "set_num_threads(8)" in (f.snippet or "") and f.culprits[0].name == "aten::addmm"
    # As torchrun starts them: one thread each.
    v = verdict(captured(loop(large=12_000), replace(ALONE, others=1.1, ranks=1.0)), "threads_unused")
    assert v.threads == 4


@pytest.mark.parametrize(("cpus", "large", "name"), [
    (replace(ALONE, others=6.9), 12_000, "aten::addmm"),  # others use the CPUs
    (replace(ALONE, used=3.9, main=1.0, threads=4), 12_000, "aten::addmm"),  # four threads
    (replace(ALONE, allowed=2.0, cores=1), 12_000, "aten::addmm"),  # two CPUs of one core
    (replace(ALONE, others=7.0, ranks=7.0), 12_000, "aten::addmm"),  # a rank for each CPU
    (replace(ALONE, quota=1.0), 12_000, "aten::addmm"),
    (ALONE, 12_000, "aten::index_put_"),  # does not divide
    (ALONE, 900, "aten::addmm"),
], ids=["others", "threads", "one core", "ranks", "quota", "serial op", "small op"])
def test_threads_that_would_not_help_are_not_advised(cpus: JobCpus, large: float, name: str) -> None:
    assert "threads_unused" not in findings(captured(loop(large=large, large_name=name), cpus))


def test_more_threads_than_cpus() -> None:
    many = JobCpus(2.0, used=1.9, others=0.05, children=0.0, ranks=0.0, gputop=0.02, held_up=0.6, waited=50.0,
                   threads=64, cores=2, main=0.1)
    v = verdict(captured(loop(large=12_000), many), "thread_oversubscription")
    assert (v.working, v.threads, v.ranks, v.share) == (64, 2, 1, 0.6)
    f = findings(captured(loop(large=12_000), many))["thread_oversubscription"]
    assert "set_num_threads(2)" in (f.snippet or "")
    ranks = replace(many, used=0.5, others=1.45, ranks=1.4, threads=2, waited=1.2)
    assert verdict(captured(loop(large=12_000), ranks), "thread_oversubscription").ranks == 4
    for fine in (replace(many, threads=2, waited=0.1, held_up=0.04), replace(many, threads=3, waited=0.3),
                 replace(many, held_up=0.01), replace(many, used=0.5, others=1.4)):
        assert "thread_oversubscription" not in findings(captured(loop(large=12_000), fine))


@pytest.mark.parametrize("cpus", [None, JobCpus(8.0, used=1.0, others=0.1, waited=0.0)])
def test_threads_are_not_judged_without_their_times(cpus: JobCpus | None) -> None:
    missing = abstained(captured(loop(large=12_000), cpus))
    assert {"threads_unused", "thread_oversubscription"} <= missing.keys() and "captures" in missing["threads_unused"]


# -- settings ---------------------------------------------------------------------------------------

def backward(checked: int, nodes: int = 20) -> Builder:
    """Steps whose backward pass has ``nodes``, of which so many look for NaN for a third of their time."""
    b = loop(large=1_000)
    for i in range(COUNT + 1):
        for k in range(nodes):
            at = i * STEP + 1_000 + k * 600
            b.host(NODE, at, 500)
            b.host("aten::mul", at + 10, 240)
            if k < checked:
                b.host("aten::isnan", at + 300, 100)
                b.host("aten::any", at + 410, 60)
                b.host("aten::item", at + 480, 10)
    return b


def test_anomaly_detection_left_on() -> None:
    v = verdict(backward(18), "anomaly_mode")
    assert v.nodes == pytest.approx(21, abs=0.1) and v.checked == pytest.approx(18 / 21, abs=0.01)
    assert v.checks_s == pytest.approx(18 * 190e-6, rel=0.02)
    assert findings(backward(18))["anomaly_mode"].severity == "high"
    assert "anomaly_mode" not in findings(backward(3)), "a loss that looks for NaN itself"


def test_products_in_64_bits() -> None:
    v = verdict(loop(large=12_000, float64=1), "double_precision")
    assert v.ratio == pytest.approx(0.6, abs=0.01) and v.share == pytest.approx(0.3, abs=0.01)
    assert "double_precision" not in findings(loop(large=12_000))
    assert "double_precision" not in findings(loop(large=12_000, large_name="aten::sort", float64=1))
    mixed = loop(large=6_000, float64=1)
    for i in range(COUNT + 1):
        mixed.host("aten::mm", i * STEP + 100, 6_000)
    assert "double_precision" not in findings(mixed), "half of the products are meant to have 64 bits"


@pytest.mark.parametrize("op", ["aten::_nnpack_spatial_convolution", "aten::_slow_conv2d_forward"])
def test_convolutions_without_onednn(op: str) -> None:
    v = verdict(loop(large=12_000, large_name=op, batch=16), "onednn_off")
    assert v.op == op and v.share == pytest.approx(0.6, abs=0.01)
    assert "onednn_off" not in findings(loop(large=12_000, large_name=op, batch=8)), "PyTorch does so by itself"
    assert "onednn_off" not in findings(loop(large=12_000, large_name=op, batch=16, float64=1))


# -- memory -----------------------------------------------------------------------------------------

def holding(per_step: int, *, every: int = 1, drops: int = 0) -> Builder:
    """Each step allocates and releases a megabyte, and keeps ``per_step`` bytes for good, each ``every``-th one."""
    b = loop(large=12_000)
    kept = 0
    for i in range(COUNT + 1):
        kept += per_step if i % every == 0 else 0
        kept = 0 if drops and i % drops == drops - 1 else kept
        for at, size in ((100, kept), (8_000, kept + 1_000_000), (17_000, kept)):
            b.memory(i * STEP + at, "rank 0: PyTorch host memory", size, -1, size)
    return b


def test_memory_that_each_step_leaves() -> None:
    v = verdict(holding(50_000), "memory_growth")
    assert v.per_step_bytes == 50_000 and v.bytes_per_s == pytest.approx(2.5e6) and v.on_host
    f = findings(holding(50_000))["memory_growth"]
    assert f.severity == "medium" and ".item()" in (f.snippet or "") and f.gain.step_time is None
    assert "profile_memory" in abstained(loop(large=12_000))["memory_growth"]


@pytest.mark.parametrize("job", [holding(0), holding(50_000, every=3), holding(50_000, drops=4), holding(100)],
                         ids=["level", "now and then", "a tooth", "a few bytes"])
def test_memory_that_does_not_grow_without_end(job: Builder) -> None:
    assert "memory_growth" not in findings(job)


def test_layers_of_one_pass_are_no_steps_that_keep_their_memory_or_take_longer() -> None:
    """A model that runs once: its layers repeat, keep their activations, and two of them have more to do."""
    b = Builder(gpus=0)
    at = 0
    for layer in range(12):
        for name in ("aten::layer_norm", "aten::linear", "aten::softmax", "aten::gelu", "aten::linear", "aten::add"):
            length = 4000 if layer in (3, 8) else 400
            b.host(name, at, length)
            at += length + 5
        b.memory(at, "rank 0: memory of GPU 0", (layer + 1) * 10_000_000, -1, 0)
    told = abstained(b)
    assert "layers of one pass" in told["memory_growth"] and "layers of one pass" in told["long_steps"]


# -- real jobs (tests/data/README.md) ---------------------------------------------------------------

def real(name: str) -> Analysis:
    return analyze(DATA / f"pytorch_{name}.pt.trace.json.gz")


def test_real_jobs_that_keep_their_outputs_and_that_detect_anomalies() -> None:
    """8 KiB of activations and 1,280 bytes of output a step."""
    f = findings(real("keeps_outputs"))["memory_growth"]
    assert f.evidence["grows_bytes_per_step"] == pytest.approx(8192 + 1280, rel=0.01)
    f = findings(real("anomaly"))["anomaly_mode"]  # a real job with anomaly detection
    assert f.evidence["checked_ratio"] > 0.5 and f.evidence["nodes_per_step"] == pytest.approx(71, abs=3)
    assert f.gain.at_least and f.severity == "high"


def test_the_start_of_a_real_job_that_compiles_by_torch_compile() -> None:
    """Forward and backward, which compiles in its first call: two minutes. What is compiled runs, and compiles not."""
    analysis = real("compile_start")
    start = next(note.message for note in analysis.trace.quality if note.id == "start")
    assert "torch.compile" in start and "XLA" not in start
    assert analysis.wall_time is not None and analysis.steps is not None and analysis.steps.count > 40
    parts = {(part.id, part.kind): part.time_s for part in analysis.wall_time.parts}
    assert parts["start", ""] == pytest.approx(119, abs=1) and "compilation" not in {kind for _, kind in parts}
    assert "retracing" not in findings(analysis)

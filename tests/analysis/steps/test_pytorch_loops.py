"""The steps of PyTorch loops that mark none, of invented loops and of real ones beside their own logs."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from gputop.analysis.host.wall_time import divide, wall_time
from gputop.analysis.steps.phases import EVALUATION, PREDICTION
from gputop.analysis.steps.pytorch_loops import batch_steps, op_sequence, optimizer_steps
from gputop.analysis.steps.steps import detect_steps, find_steps
from gputop.analysis.steps.torch_compilations import torch_builds
from gputop.diagnosis.diagnose import analyze, analyze_trace
from gputop.trace.readers.load import load
from gputop.trace.threads import MAIN, lines_of
from tests.analysis.steps.pytorch_loop import NODE, Loop

DATA = Path(__file__).parents[2] / "data"
NEXT = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"

# Steps that the job's own log holds within the recording, and their median in milliseconds.
LOGGED = {"workers0": (12, 281.91), "evalshare": (24, 25.97), "gan": (11, 100.27), "server": (31, 86.83),
          "ddpslow": (20, 99.11)}


def real(name: str) -> list[str]:
    return [str(path) for path in sorted(DATA.glob(f"pytorch_{name}*.gz"))]


def is_true(loop: Loop, shift: bool = False) -> None:
    """The steps found are those of the loop: as many, but for the first and last ones, and each begins with one; or, of
    a ``shift``, each at the same place of one."""
    steps = find_steps(loop.b.build())
    assert steps is not None
    assert len(loop.begins) - 3 <= steps.count + steps.times.dropped <= len(loop.begins)
    begins = np.array(loop.begins) * 1e3
    place = steps.edges_ns[:, 0] - begins[np.searchsorted(begins, steps.edges_ns[:, 0] + 20_000, side="right") - 1]
    period_ns = 1e9 * loop.period_s
    assert np.ptp(place) <= (0.3 if shift else 0.1) * period_ns and (shift or abs(place).max() <= 0.1 * period_ns)


@pytest.mark.parametrize("seed", range(24))
def test_steps_of_a_training_loop(seed):
    """Whatever it loads, accumulates, evaluates and sleeps, wherever it zeroes gradients, from its middle on."""
    loop, rng = Loop(seed), random.Random(1000 + seed)
    loads, micro = rng.random() < 0.5, rng.choice((1, 1, 2, 4))
    zeroes_first, evaluates, sleeps = rng.random() < 0.5, rng.choice((0, 4, 7)), rng.choice((0, 0, 300))
    optimizers, layers = rng.choice((1, 1, 2)), rng.choice((2, 6))
    if rng.random() < 0.5:
        loop.backward(rng.randint(1, layers)).update()  # of a step that had begun before
    for i in range(25):
        loop.step()
        if zeroes_first:
            loop.zero()
        for k in range(optimizers):
            for _ in range(micro):
                if loads:
                    loop.op(NEXT, 25)
                loop.forward(layers + k).op("aten::nll_loss").backward(layers + k)
            loop.update()
        if not zeroes_first:
            loop.zero()
        loop.sleep(sleeps)
        if evaluates and i % evaluates == evaluates - 1:
            for _ in range(10):
                if loads:
                    loop.op(NEXT, 25)
                loop.forward(layers).op("aten::argmax")
    is_true(loop)
    phase = EVALUATION if loads else PREDICTION
    assert set(find_steps(loop.b.build()).other_loops) == ({phase} if evaluates else set())


@pytest.mark.parametrize("seed", range(8))
def test_a_loop_without_an_optimizer(seed):
    """From batch to batch, or by the sequence of its ops."""
    loop, loads = Loop(seed), seed % 2
    for _ in range(20):
        loop.step()
        if loads:
            loop.op(NEXT, 30)
        loop.forward().op("aten::nll_loss").backward()
        for _ in range(6):
            loop.op("aten::sub_")
    is_true(loop, shift=not loads)
    steps = find_steps(loop.b.build())
    assert steps is not None and steps.times.unit == "step"
    assert ("batches" if loads else "a sequence of") in steps.times.anchor


def test_inference_has_periods_of_which_nothing_tells_what_they_are():
    loop = Loop()
    for _ in range(20):
        loop.step().op("aten::rand").forward().op("aten::softmax").op("aten::argmax").sleep(loop.random.uniform(0, 900))
    steps = find_steps(loop.b.build())
    assert steps is not None and steps.times.unit == "period" and steps.times.confidence == "low"
    assert steps.times.median_s == pytest.approx(loop.period_s, rel=0.1)


@pytest.mark.parametrize("name", ["Model_Forward", "forward", "nn.Module: LlamaForCausalLM_0"])
def test_what_repeats_within_one_forward_pass_is_a_layer(name):
    loop = Loop()
    for _ in range(20):
        loop.step().op("aten::rand").forward().op("aten::softmax").op("aten::argmax")
    assert find_steps(loop.b.build()) is not None
    loop.b.host(name, -1, loop.now + 2)
    assert find_steps(loop.b.build()) is None


def test_rollouts_of_random_length_end_with_the_optimizers_call():
    loop = Loop()
    for _ in range(20):
        loop.step()
        for _ in range(loop.random.randint(10, 40)):
            loop.forward(1).op("aten::argmax")
        loop.zero().forward().backward().update("Adam")
    is_true(loop)


def test_a_policy_that_acts_between_updates_predicts_also_at_the_edges_of_a_recording():
    loop = Loop()
    for _ in range(5):
        loop.step()
        for _ in range(120):
            loop.forward(1).op("aten::argmax")
        for _ in range(4):
            loop.zero().forward().backward().update("Adam")
    for _ in range(90):
        loop.forward(1).op("aten::argmax")
    a = analyze_trace(loop.b.build())
    shares = {part.id: part.time_s / a.wall_time.recorded_s for part in a.wall_time.parts}
    assert shares["prediction"] > 0.6 and "open" not in shares and "evaluation" not in shares
    finding = {f.id: f for f in a.findings}["evaluation_share"]
    assert "environments" in finding.action and finding.title.startswith("Prediction takes")


def test_between_the_steps_of_a_policy_that_acts_its_environments_take_the_time():
    """As DQN of stable-baselines3, which acts by its policy or at random."""
    loop = Loop()
    for i in range(40):
        loop.step().sleep(900)
        if i % 3 == 2:
            loop.forward(1).op("aten::argmax")
        loop.sleep(900).zero().forward().backward().update("Adam")
    finding = {f.id: f for f in analyze_trace(loop.b.build()).findings}["step_gap_host"]
    assert "vector environment" in finding.action


def test_a_closure_runs_within_the_optimizers_call():
    loop = Loop()
    for _ in range(12):
        loop.step()
        begin = loop.now
        for _ in range(4):
            loop.zero().forward().backward()
        loop.b.host("Optimizer.step#LBFGS.step", begin - 1, loop.now - begin)
        loop.now += 5
    is_true(loop)


def test_a_trainer_that_fetches_one_batch_ahead_and_runs_its_step_in_the_optimizers_call():
    loop = Loop()
    loop.op(NEXT, 25)
    for i in range(24):
        loop.step().op(NEXT, 25)
        begin = loop.now
        loop.zero().forward().op("aten::nll_loss").backward()
        loop.b.host("Optimizer.step#AdamW.step", begin - 1, loop.now - begin)
        loop.now += 5
        for _ in range(8 if i % 6 == 5 else 0):
            loop.op(NEXT, 25).forward()
    is_true(loop)
    assert EVALUATION in find_steps(loop.b.build()).other_loops


def test_a_backward_pass_on_the_engines_own_thread_tells_the_optimizers_apart():
    """As with GPUs: two optimizers of one name, of which the second trains more layers."""
    loop = Loop()
    for _ in range(16):
        loop.step()
        for layers in (2, 5):
            loop.zero().forward(layers)
            for _ in range(layers):
                loop.b.host(NODE.format("Addmm"), loop.now, 9, "pt_autograd_0")
                loop.now += 10
            loop.update("Adam")
        loop.sleep(loop.random.uniform(0, 100))
    is_true(loop)
    assert find_steps(loop.b.build()).times.anchor == "groups of 2 calls of Optimizer.step"


def test_pauses_behind_the_optimizers_call_are_no_part_of_the_next_step():
    loop = Loop()
    for i in range(30):
        loop.step().zero().forward().backward().update()
        if i % 10 == 9:
            loop.sleep(5000)  # torch.save
    trace, steps = detect_steps(loop.b.build())
    assert steps is not None
    wall = wall_time(divide(trace, (), steps))
    between = [part for part in wall.parts if part.id == "between"]
    assert sum(part.time_s for part in between) == pytest.approx(10e-3, rel=0.1)


@pytest.mark.parametrize("seed", range(12))
def test_where_nothing_repeats_there_are_no_steps(seed):
    loop = Loop(seed)
    names = ["sin", "cos", "exp", "relu", "tanh", "matmul", "sum", "sort", "softmax", "cumsum", "add", "mul"]
    for _ in range(900):
        loop.op(f"aten::{loop.random.choice(names)}")
    assert op_sequence(loop.b.build()) is None and find_steps(loop.b.build()) is None


def test_what_repeats_without_being_surely_a_step_is_none():
    """A token and the sequence that holds it, ops of two threads, and one op again and again."""
    tokens, a, b, one_op = Loop(), Loop(1), Loop(2), Loop()
    for _ in range(8):
        tokens.op("aten::randint")
        for _ in range(16):
            tokens.op("aten::embedding").forward().op("aten::argmax").op("aten::cat")
    for _ in range(20):
        a.op("aten::rand").forward().op("aten::argmax")
        b.op("aten::rand").forward().op("aten::argmax")
    for name, _, start, length, stats in b.b._host:
        a.b.host(name, start + 3, length, "worker", **stats)
    for _ in range(200):
        one_op.op("aten::mm")
    assert [op_sequence(loop.b.build()) for loop in (tokens, a, one_op)] == [None] * 3


def test_a_window_of_evaluation_alone_says_so():
    loop = Loop()
    loop.op(NEXT).forward().backward().update()
    for _ in range(30):
        loop.step().op(NEXT, 25).forward().op("aten::argmax")
    steps = find_steps(loop.b.build())
    assert steps is not None and steps.times.phase == EVALUATION
    assert steps.times.median_s == pytest.approx(loop.period_s, rel=0.1)


def test_many_slow_steps_at_the_begin_of_a_recording_are_no_start():
    loop = Loop()
    for i in range(30):
        loop.step().zero().forward().backward().update().sleep(900 if i < 10 else 0)
    steps = find_steps(loop.b.build())
    assert steps is not None and steps.times.dropped <= 1 and not steps.warm_up_ns


def test_few_calls_are_none():
    loop = Loop()
    for _ in range(2):
        loop.op(NEXT).forward().backward().update()
    trace = loop.b.build()
    assert optimizer_steps(trace) is None and batch_steps(trace) is None and op_sequence(trace) is None


@pytest.mark.parametrize("shuffle", [1, 2, 3])
def test_the_order_of_a_files_events_does_not_count(shuffle):
    loop = Loop(5)
    for i in range(15):
        loop.step().op(NEXT).forward().backward().update()
        for _ in range(6 if i % 5 == 4 else 0):
            loop.op(NEXT).forward()
    own, other = find_steps(loop.b.build()), find_steps(loop.b.build(shuffle=shuffle))
    assert own is not None and other is not None and own.bounds_ns == other.bounds_ns


# -- real jobs, from their middle -------------------------------------------------------------------------

@pytest.mark.parametrize("name", LOGGED)
def test_steps_of_real_jobs_are_those_of_their_logs(name):
    count, median_ms = LOGGED[name]
    _, steps = detect_steps(load(real(name)))
    assert count - 3 <= steps.count + steps.times.dropped <= count + 1
    assert 1e3 * steps.times.median_s == pytest.approx(median_ms, rel=0.1)


def test_a_real_evaluation_takes_the_time_that_the_log_says():
    analysis = analyze(real("evalshare"))
    time_s = sum(part.time_s for part in analysis.wall_time.parts if part.id == EVALUATION)
    assert time_s == pytest.approx(0.172, rel=0.2)


def test_a_loader_without_workers_is_what_its_job_waits_for():
    first = analyze(real("workers0")).findings[0]
    assert first.id == "input_bound" and first.severity == "high" and "num_workers" in (first.snippet or "")


def test_the_rank_that_sleeps_is_named():
    """It sleeps 60 ms before each step, on CPUs that others used as well; the other rank waits for it in gloo."""
    first = analyze(real("ddpslow")).findings[0]
    assert first.id == "step_gap_host" and "rank 1" in first.title and first.severity == "high"
    assert first.evidence["gap_s"] > 0.06


def test_a_function_that_is_compiled_at_each_step():
    trace = load(real("recompile"))
    (found,) = torch_builds(trace, lines_of(trace, MAIN))
    assert len(found.start_ns) == 2 and found.function == "0"
    first = analyze(real("recompile")).findings[0]
    assert first.id == "retracing" and "torch.compile" in first.title and "mark_dynamic" in (first.snippet or "")
    assert first.gain.step_time == pytest.approx(0.95, abs=0.04)


def test_a_server_that_waits_for_requests_has_no_finding():
    analysis = analyze(real("server"))
    assert not analysis.findings
    assert "next request" in {one.id: one.missing for one in analysis.abstained}["step_gap_host"]


def test_a_job_on_busy_cpus_has_no_finding_of_its_pauses():
    """Other programs took its CPUs: its pauses come anywhere. Its optimizer takes 29% of the step."""
    assert {f.id for f in analyze(real("gan")).findings if f.severity != "low"} == {"optimizer_unfused"}


def test_two_threads_that_run_ops_have_no_steps():
    a, b = Loop(1), Loop(2)
    for loop, line in ((a, "python"), (b, "worker")):
        for _ in range(20):
            loop.op("aten::rand").forward().op("aten::argmax")
        if line == "worker":
            for name, _, start, length, stats in loop.b._host:
                a.b.host(name, start + 3, length, line, **stats)
    assert op_sequence(a.b.build()) is None

"""JAX jobs: Python within a compiled function, and what is compiled anew. As traces of JAX 0.10 on a CPU look."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest

from gputop.advice.trace.host_work import StepGapHost, judge_step_gap_host
from gputop.analysis.results import GapLines, HostStacks, StackLine
from gputop.analysis.steps.jax_calls import first_calls
from gputop.analysis.steps.steps import find_overview_steps, find_steps
from gputop.diagnosis.diagnose import analyze_to_facts
from gputop.trace.model import HloOp, Trace
from tests.advice.trace.host_jobs import found
from tests.records import replace
from tests.trace.build import Builder

STEP = 26_000.0


def job(*, callback: str = "", callback_us: float = 0.0, compiled: int = 0, inner: bool = True) -> Builder:
    b = Builder(gpus=0)
    for i in range(12):
        at = i * STEP
        b.host("train", at, STEP - 200, step_num=i, _r=1)
        b.host("PjitFunction(step)", at + 50, STEP - 400)
        if inner:
            b.host("PjitFunction(step)", at + 52, STEP - 410)
        if i < compiled:
            b.host("backend_compile_and_load", at + 100, 15_000)
            b.host("PjRtCpuClient::Compile", at + 200, 14_000, line="tf_PjRtCompilerThreadPool/1")
        b.host("dot.1", at + 300, 2_000, line="tf_XLAEigen/1")
        if callback:
            b.host(callback, at + 2_400, callback_us, line="tf_XLAEigen/1")
            b.host(f"end: {callback}", at + 2_401 + callback_us, 0.1, line="tf_XLAEigen/1")
    return b


@pytest.mark.parametrize("callback", ["pure_callback.1", "io_callback.1", "debug_callback", "debug_print.3"])
def test_a_python_callback_within_the_step_is_the_finding(callback):
    findings = found(job(callback=callback, callback_us=20_000))
    f = next(iter(findings.values()))
    assert f.id == "host_placement" and f.severity == "high" and f.culprits[0].name == callback
    assert f.evidence["host_ops_s"] == pytest.approx(0.020, rel=0.01) and "GPU" not in f.title + f.why
    assert f.gain.step_time == pytest.approx(20 / 26, abs=0.02) and f.gain.claim == "about"
    by_python = job(callback=callback, callback_us=20_000)  # as JAX calls what holds callbacks
    for i in range(12):
        by_python.host("ExecuteReplicated.__call__", i * STEP + 2_000, STEP - 2_500)
    slower = found(by_python)["host_placement"].gain
    assert slower.claim == "at least" and slower.step_time == f.gain.step_time
    assert "without running Python" in slower.how
    recorded = job(callback=callback, callback_us=20_000)  # so many ops that the profiler makes their part longer
    for i in range(40_000):
        recorded.host("add.7", i * 7, 1, line="tf_XLAEigen/2", hlo=0, hlo_module="jit_step")
    assert found(recorded)["host_placement"].gain.claim == "at least"


@pytest.mark.parametrize(("name", "us"), [
    ("custom-call.3", 20_000), ("dot.2", 20_000), ("end: pure_callback.1", 20_000), ("pure_callback.1", 300)])
def test_what_a_compiled_function_computes_itself_is_none_and_neither_is_a_short_callback(name, us):
    assert "host_placement" not in found(job(callback=name, callback_us=us))


@pytest.mark.parametrize("inner", [True, False])
def test_each_compilation_counts_once(inner):
    """JAX records the call of a jitted function twice, one event within the other."""
    f = found(job(compiled=11, inner=inner))["retracing"]
    assert f.evidence["retracings_count"] == 11 == f.evidence["compilations_count"]


def loop(names: Sequence[str], count: int, period: float, apart: float, length: float) -> Trace:
    """So many times these calls, one after the other."""
    b = Builder(gpus=0)
    for i in range(count):
        for k, name in enumerate(names):
            b.host(f"PjitFunction({name})", i * period + k * apart, length)
    return b.build()


def eager(ops: int = 60, *, jitted: bool = True, steps: int = 12, logs: int = 0, gpus: int = 0) -> Builder:
    """Optax outside of jit: the gradient's function, then JAX's own ops one by one, each call recorded twice."""
    b = Builder(gpus=gpus)
    for i in range(steps):
        at = i * 8_000.0
        names = ["loss"] if jitted else []
        names += [("convert_element_type", "add", "multiply", "multiply", "true_divide", "sqrt")[k % 6]
                  for k in range(ops - 1)] + ["less"]
        if logs and i % logs == 0:
            names += ["mean", "mean"]
        for k, name in enumerate(names):
            begin = at + k * 100
            b.host(f"PjitFunction({name})", begin, 300 if name == "loss" and ops < 10 else 60)
            b.host(f"PjitFunction({name})", begin + 2, 55)
    return b


@pytest.mark.parametrize("logs", [0, 5])
def test_the_step_of_a_loop_with_eager_ops_is_its_period(logs):
    steps = find_steps(eager(logs=logs).build())
    assert steps is not None and steps.count == 11 and steps.times.median_s == pytest.approx(8e-3)
    assert steps.times.anchor == "calls of PjitFunction(loss)"


def test_an_op_of_jaxs_own_that_is_compiled_for_each_shape_is_no_step():
    """As arrays of changing lengths are joined: the step is the gradients' function."""
    b, at = Builder(gpus=0), 0.0
    for _ in range(8):
        for _ in range(4):
            b.host("PjitFunction(concatenate)", at, 9_000).host("backend_compile_and_load", at + 100, 8_000)
            at += 9_100
        b.host("PjitFunction(loss)", at, 2_000)
        at += 3_000
        for _ in range(2):
            b.host("PjitFunction(add)", at, 60)
            at += 100
    facts = find_steps(b.build())
    assert facts.times.anchor == "calls of PjitFunction(loss)" and facts.times.median_s == pytest.approx(39.6e-3)
    f = found(b)["retracing"]
    assert f.title.startswith("concatenate is compiled repeatedly") and "np.concatenate" in f.snippet
    assert "jax.jit" not in f.action + f.snippet


def helper(calls: int, *, missing: int = -1, ops: int = 40, regular: bool = True) -> Builder:
    """Optax without jit: of the user's functions only a helper is compiled, which each step calls several times. It
    does not repeat exactly, if not ``regular``."""
    b = Builder(gpus=0)
    names = random.Random(3)
    for i in range(12):
        step = ["dot_general", "add", "multiply", "sqrt"] * (ops // 4) + ["helper"] * (calls - (i == missing))
        if not regular:
            step = names.choices(step[:ops], k=ops) + step[ops:]
        for k, name in enumerate(step):
            b.host(f"PjitFunction({name})", i * 8_000.0 + k * 100, 60)
    return b


@pytest.mark.parametrize("calls", [1, 2, 5])
@pytest.mark.parametrize("missing", [-1, 6])
def test_calls_that_a_step_makes_at_once_are_one_step(calls, missing):
    """And as most of the step runs beside them, they do not hold it: what follows them is no pause."""
    steps = find_steps(helper(calls, missing=missing, regular=False).build())
    assert steps is not None and steps.times.anchor == "calls of PjitFunction(helper)" and not steps.call_ends_ns
    assert steps.count == (10 if calls == 1 and missing >= 0 else 11)
    assert steps.times.median_s == pytest.approx(8e-3)


def test_calls_in_groups_and_for_each_layer():
    """Spread evenly over a step that Python runs op by op: the step is the period of all calls."""
    steps = find_steps(loop((*["layer", "dot_general", "tanh"] * 12, "subtract", "multiply"), 12, 8_000, 210, 150))
    assert steps is not None and steps.times.anchor == "a loop of JAX's own ops"
    assert steps.count == 11 and steps.times.median_s == pytest.approx(8e-3)
    places = np.cumsum([1, 1, 1, 100, 1, 100, 1, 1, 1, 1, 100, 100, 1, 1, 100])
    assert len(first_calls(places)) == len(places)
    assert first_calls(np.cumsum([1, 100] * 6)).tolist() == [0, 1, 3, 5, 7, 9, 11]
    assert first_calls(np.arange(9)).tolist() == [*range(9)] and first_calls(np.arange(1)).tolist() == [0]


@pytest.mark.parametrize("ops", [0, 12])
def test_steps_between_which_the_job_saves_stay_steps(ops):
    """Five short steps, then a checkpoint that takes as long as fifty: they are not made at once."""
    b = Builder(gpus=0)
    for i in range(30):
        for k, name in enumerate(["train_step", *["add"] * ops]):
            b.host(f"PjitFunction({name})", i * 3_000.0 + i // 5 * 150_000 + k * 100, 60)
    steps = find_steps(b.build())
    assert steps is not None and steps.count >= 28 and steps.times.median_s == pytest.approx(3e-3)


def test_lines_that_run_the_ops_one_by_one_are_no_work_beside_the_model():
    """Python takes more than a millisecond from one op to the next, as it traces for a gradient."""
    b = Builder(gpus=0)
    for i in range(12):
        for k in range(40):
            b.host(f"PjitFunction({('dot_general', 'add', 'multiply', 'sqrt')[k % 4]})",
                   i * 20_000.0 + k * 300 + (k > 20) * 5_000, 200)
        b.host("PjitFunction(helper)", i * 20_000.0 + 19_000, 60)
    facts = analyze_to_facts(b.build())

    def judged(line: str, between_ops_s: float = 8e-3) -> object:
        gaps = (GapLines("eager", between_ops_s, 9, 9, (StackLine("t.py:6 forward", "/u/t.py", between_ops_s, 1.0),)),
                GapLines("gap", 9e-3, 9, 9, (StackLine(line, "/u/t.py", 9e-3, 1.0),)))
        return judge_step_gap_host(replace(facts, analysis=replace(
            facts.analysis, stacks=HostStacks(basis="step", gaps=gaps))))

    assert isinstance(judged("t.py:9 log"), StepGapHost)
    assert "one by one" in getattr(judged("t.py:6 forward"), "what", "")
    assert isinstance(judged("t.py:6 forward", 0.4e-3), StepGapHost)  # seen between ops by the error of the samples


def test_a_loop_of_jaxs_own_ops_is_the_step_where_it_repeats():
    ops = ("dot", "add", "tanh", "dot", "log_softmax", "transpose", "multiply", "subtract", "multiply", "subtract")
    steps = find_steps(loop(ops, 20, 1_000, 80, 60))
    assert steps is not None and steps.count == 19 and steps.times.median_s == pytest.approx(1e-3)
    steps = find_steps(loop(("matmul",), 20, 1_000, 0, 900))
    assert steps is not None and steps.times.anchor == "a loop of JAX's own ops" and steps.count == 19
    never_again = random.Random(3).choices(["add", "multiply", "sqrt", "sum"], k=400)
    for job in (loop(never_again, 1, 0, 100, 60), eager(jitted=False, logs=5).build()):
        assert find_steps(job) is None


@pytest.mark.parametrize(("ops", "fires"), [(6, False), (12, True), (24, True)])
def test_a_helper_that_hardly_takes_time_makes_no_loop_a_compiled_one(ops, fires):
    assert ("eager_execution" in found(helper(1, ops=ops))) == fires


@pytest.mark.parametrize(("jitted", "fires"), [(False, True), (True, False)])
def test_a_loop_without_jit_is_told_whatever_the_number_of_its_ops(jitted, fires):
    b = Builder()
    for i in range(20):
        for k, name in enumerate(("sin", "_cumsum_with_promotion", "add", "_where", "mean")):
            at = 1000 * i + 100 * k
            b.host(f"PjitFunction({name})", at, 90).run(0, at + 62, 9, launch=at + 55, thread="python")
        if jitted:  # then the few ops beside it are a callback's
            b.host("PjitFunction(train_step)", 1000 * i + 500, 400)
            b.run(0, 1000 * i + 600, 350, launch=1000 * i + 590, thread="python")
    result = found(b)
    assert ("eager_execution" in result) == fires
    if fires:
        assert "jax.jit" in result["eager_execution"].action and "already compiled" not in str(result)
        assert next(iter(result)) == "eager_execution"


def test_a_jitted_step_beside_which_a_few_ops_run_stays_and_large_ops_are_the_jobs_own_computing():
    assert find_steps(eager(ops=3).build()).times.anchor == "calls of PjitFunction(loss)"
    assert "eager_execution" not in found(eager(ops=3))
    b = eager()  # large ops one by one are the job's own computing
    for i in range(12):
        b.host("dot.1", i * 8_000.0 + 150, 5_800, line="tf_XLAEigen/1")
    f = found(b).get("eager_execution")
    assert f is None or f.evidence["share_ratio"] < 0.1


def test_ops_that_a_loop_runs_between_jitted_steps_are_work_between_them():
    """As of a loop that reads the norm of each parameter: 71% less without it, of which 41 were Python's own."""
    b = Builder(gpus=0)
    for i in range(12):
        at = i * 8_000.0
        b.host("PjitFunction(step)", at, 3_000)
        for k in range(10):
            begin = at + 3_100 + k * 490
            b.host("PjitFunction(norm)", begin, 300).host("PjitFunction(norm)", begin + 2, 290)
            b.host("np.asarray(jax.Array)", begin + 310, 150)
    assert found(b)["step_gap_host"].evidence["share_ratio"] == pytest.approx(5 / 8, abs=0.01)


@pytest.mark.parametrize("jitted", [True, False])
def test_an_update_outside_of_jit_is_the_finding(jitted):
    f = found(eager(jitted=jitted))["eager_execution"]
    assert f.severity == ("high" if jitted else "medium")  # without steps it is of the window
    assert not jitted or f.evidence["eager_ops_per_step"] == pytest.approx(60, abs=1)
    assert "a single jax.jit" in f.action and "tf." not in f"{f.action}{f.snippet}{f.why}"
    assert f.culprits[0].name in ("PjitFunction(multiply)", "multiply")
    assert f.evidence["share_ratio"] == pytest.approx(6.0 / 8.0, abs=0.03)


def learner(ops: bool = True, updates: int = 12) -> Builder:
    """A reinforcement learner: sixteen calls of its policy, which together take longer, then an update."""
    b = Builder(gpus=0)
    for i in range(updates):
        at = i * 20_000.0
        for k in range(16):
            b.host("PjitFunction(policy)", at + k * 1_000, 600)
            b.host("dot.1", at + k * 1_000 + 10, 400, line="tf_XLAEigen/1", **(
                {"hlo": 0, "hlo_module": "jit_policy"} if ops else {}))
        b.host("PjitFunction(update)", at + 16_500, 3_000)
        b.host("dot.2", at + 16_600, 2_800, line="tf_XLAEigen/1",
               **({"hlo": 1, "hlo_module": "jit_update"} if ops else {}))
    return b


def test_the_step_of_a_learner_is_its_update_and_not_a_call_of_the_policy():
    names = ("jit(policy)/dot_general", "jit(update)/transpose(jvp(loss))/dot_general")
    trace = replace(learner().build(), hlo_ops=[HloOp(name, "", None, None) for name in names])
    steps = find_steps(trace)
    assert steps is not None and steps.times.phase == "training"
    assert steps.times.anchor == "calls of PjitFunction(update)"
    assert steps.times.median_s == pytest.approx(20e-3) and not steps.other_loops
    overview = find_overview_steps(trace, learner(ops=False).build(), steps)  # which has no ops
    assert overview is not None and overview.times.anchor == steps.times.anchor and overview.count == steps.count
    # One update is no loop, and what is called more often beside it marks no steps.
    assert find_steps(replace(learner(updates=1).build(), hlo_ops=trace.hlo_ops)) is None


def queued(pause: float, ahead: int = 16) -> Builder:
    """A CPU job whose thread executes a step of 10 ms, pauses, and executes the next; Python queues up to ``ahead``,
    and every 50 steps one evaluation of 20 ms, whose result it reads: it waits for all that are queued."""
    b, now, done = Builder(gpus=0), 0.0, [0.0]
    for i in range(150):
        evaluates = i % 50 == 49
        for name, long in (("update", 10_000), ("evaluate", 20_000))[:1 + evaluates]:
            begin = max(now, done[-1] + pause)
            b.host(f"PjitFunction({name})", now, 100)
            b.host("ThunkExecutor::Execute", begin, long, "tf_XLAPjRtCpuClient/1")
            b.host("dot.1", begin + 10, long - 20, "tf_XLAPjRtCpuClient/1", hlo_module=f"jit_{name}")
            done.append(begin + long)
            now = max(now + 300, done[-ahead] if len(done) >= ahead else 0.0)
        if evaluates:
            b.host("np.asarray(jax.Array)", now, done[-1] - now)
            now = done[-1] + 100
    return b


def test_steps_that_python_queues_on_a_cpu_are_their_executions() -> None:
    """A read waits for all that are queued, which is no longer step: the evaluation takes 4% of the time."""
    trace = queued(pause=100).build()
    steps = find_steps(trace)
    assert steps is not None and steps.times.anchor.startswith("calls of PjitFunction(update), by their executions")
    assert steps.times.median_s == pytest.approx(0.0101, rel=0.01) and steps.times.p95_s < 0.011
    assert all(f.evidence["share_ratio"] < 0.05 for f in found(queued(pause=100)).values())


@pytest.mark.parametrize("job", [queued(pause=3_000), queued(pause=100, ahead=1)], ids=["Python", "each result"])
def test_steps_that_wait_for_python_or_each_result_are_its_calls(job: Builder) -> None:
    steps = find_steps(job.build())
    assert steps is not None and steps.times.anchor == "calls of PjitFunction(update)"


def test_where_a_shorter_sequence_repeats_in_a_longer_one_neither_is_the_step():
    assert find_steps(eager(jitted=False, logs=5).build()) is None

"""Retracing, eager execution, XLA."""

from __future__ import annotations

import pytest

from gputop.diagnosis.diagnose import analyze_trace
from gputop.trace.builder import add_eager_stats
from tests.advice.trace.host_jobs import chained, eager, found, gap, kernels, missing, retraced
from tests.advice.trace.traces import STEP, STEPS, findings
from tests.trace.build import Builder


@pytest.mark.parametrize(("share", "severity"), [(0.02, None), (0.1, "medium"), (0.4, "high")])
def test_retracing_at_every_call(share, severity):
    f = found(retraced(share)).get("retracing")
    assert (f.severity if f else None) == severity
    if f:
        assert f.gain.step_time == pytest.approx(share, abs=0.02)
        assert f.evidence["retracings_count"] == STEPS + 1 and f.evidence["tracings_ever_count"] == 13
        assert "train_step" in f.title and "reduce_retracing" in (f.snippet or "")
        assert "step_gap_host" not in found(retraced(share))


def test_a_function_traced_anew_is_the_same_steps_by_another_number_and_one_tracing_is_none():
    b = Builder(gpus=1)
    for i in range(9):
        at = i * STEP
        begin = STEP * 0.3 if i % 3 == 0 else 100.0
        traced = "traced-nonXla" if i % 3 == 0 else "notTraced-nonXla"
        b.host("train_step", at, STEP - 40, tf_function_call=traced, tracing_count=2 + i // 3)
        b.host("EagerExecute", at + begin - 30, STEP - begin - 20, is_func=1,
               eager_op=f"__inference_train_step_{i // 3}")
        kernels(b, i, begin, STEP - 30)
    a = analyze_trace(b.build())
    assert a.steps is not None and a.steps.count >= 7
    assert found(b)["retracing"].gain.step_time == pytest.approx(0.1, abs=0.03)
    assert "retracing" not in found(retraced(0.4, every=STEPS + 1))  # one tracing in the window is no retracing


def test_jax_compiling_at_every_call():
    b = Builder(gpus=0)
    for i in range(6):
        b.host("PjitFunction(step)", i * 1000, 800)
        if i > 1:
            b.host("backend_compile", i * 1000 + 100, 300)
        b.host("PjRtCpuExecutable::Execute", i * 1000 + 450, 300)
    f = found(b)["retracing"]
    assert f.title.startswith("step ") and "jax.jit" in (f.snippet or "")
    assert f.gain.step_time == pytest.approx(0.33, abs=0.1)


def test_a_model_that_runs_op_by_op_the_few_ops_of_a_callback_and_xla_that_is_on():
    f = found(eager(80, 60))["eager_execution"]
    assert f.severity == "high" and f.gain.step_time == pytest.approx(60 / 160, abs=0.03)
    assert f.evidence["eager_ops_per_step"] == 80 and "@tf.function" in (f.snippet or "")
    assert "eager_execution" not in found(eager(40, 60))  # below 50 a step
    assert "eager_execution" not in found(eager(80, 2))  # 2% of the step
    assert "eager_execution" not in found(gap(0.3))
    assert "EagerExecute" in missing(Builder(gpus=1).run(0, 0, 100, launch=0))["eager_execution"]
    assert "xla_off" not in found(chained(8, xla=True))  # where XLA is seen it is not off
    assert "xla_off" not in found(chained(8).run(0, STEP * 20, 5, "input_fusion_3", launch=STEP * 19))


@pytest.mark.parametrize(("row", "part", "severity"), [
    (2, 0.4, None), (4, 0.03, None), (4, 0.2, "medium"), (8, 0.4, "medium")])
def test_rows_of_elementwise_kernels(row, part, severity):
    f = found(chained(row, part=part)).get("xla_off")
    assert (f.severity if f else None) == severity
    if f:
        assert f.gain.step_time == pytest.approx(part * (1 - 1.5 / row), abs=0.01)
        assert "jit_compile" in (f.snippet or "")


@pytest.mark.parametrize("named", ["EagerExecute: {}", "EagerKernelExecute", "TFE_Py_FastPathExecute_C"])
def test_eager_execution_by_the_names_of_each_version(named):
    """``b`` of the newer version, rewritten as an older one records it."""
    b = eager(80, 60)
    events = []
    for name, line, start, length, stats in b._host:
        op = stats.get("eager_op")
        old = {key: value for key, value in stats.items() if key not in ("eager_op", "is_func")}
        events.append((name if op is None else named.format(op), line, start, length, old))
    trace = b.build()
    b._host[:] = events
    old_trace = b.build()
    add_eager_stats(old_trace.host, old_trace.names, _number(old_trace.names))
    assert "eager_execution" in findings(trace) and "eager_execution" in findings(old_trace)


def _number(names):
    def number(name):
        if name not in names:
            names.append(name)
        return names.index(name)
    return number

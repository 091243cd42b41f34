"""JAX jobs: Python within a compiled function, and what is compiled anew. As traces of JAX 0.10 on a CPU look."""

from __future__ import annotations

import pytest

from tests.advice.trace.host_jobs import found
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


@pytest.mark.parametrize("callback", ["pure_callback.1", "io_callback.1", "debug_callback"])
def test_a_python_callback_within_the_step_is_the_finding(callback):
    findings = found(job(callback=callback, callback_us=20_000))
    f = next(iter(findings.values()))
    assert f.id == "host_placement" and f.severity == "high" and f.culprits[0].name == callback
    assert f.evidence["host_ops_s"] == pytest.approx(0.020, rel=0.01) and "GPU" not in f.title + f.why
    assert f.gain.step_time == pytest.approx(20 / 26, abs=0.02)


@pytest.mark.parametrize("name", ["custom-call.3", "dot.2", "end: pure_callback.1"])
def test_what_a_compiled_function_computes_itself_is_none(name):
    assert "host_placement" not in found(job(callback=name, callback_us=20_000))


def test_a_short_callback_is_none():
    assert "host_placement" not in found(job(callback="pure_callback.1", callback_us=300))


@pytest.mark.parametrize("inner", [True, False])
def test_each_compilation_counts_once(inner):
    """JAX records the call of a jitted function twice, one event within the other."""
    f = found(job(compiled=11, inner=inner))["retracing"]
    assert f.evidence["retracings_count"] == 11 == f.evidence["compilations_count"]

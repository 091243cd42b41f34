"""What Python's thread does between a call of JAX and the work that it calls for."""

from __future__ import annotations

import pytest

from gputop.analysis.host.host_spans import host_spans
from tests.advice.trace.host_jobs import found
from tests.trace.build import Builder


def queued(late: float) -> Builder:
    """Calls of 100 µs each 10 ms, whose programs of 5 ms begin ``late`` µs after them; Python then reads the result."""
    b = Builder(gpus=0)
    for i in range(12):
        at = i * 10_000.0
        b.host("PjitFunction(update)", at, 100)
        b.host("ThunkExecutor::Execute", at + 100 + late, 5_000, "tf_XLAPjRtCpuClient/1")
        b.host("dot.1", at + 110 + late, 4_900, "tf_XLAPjRtCpuClient/1", hlo_module="jit_update")
        b.host("tsl::profiler::Sleep", at + 9_950, 10)
    return b


def test_a_call_whose_program_begins_late_is_no_gap_between_calls() -> None:
    assert "step_gap_host" not in found(queued(4_700.0))
    spans = host_spans(queued(4_700.0).build(), "node", runs_eagerly=False)
    assert spans.calls.total == pytest.approx(12 * 9_800e3, rel=0.02)
    spans = host_spans(queued(0.0).build(), "node", runs_eagerly=False)
    assert spans.calls.total == pytest.approx(12 * 5_100e3, rel=0.02)


@pytest.mark.parametrize(("tracer", "share"), [(True, 1.0), (False, 0.2)])
def test_python_that_a_tracer_slows_down_runs_ops_one_by_one_with_longer_pauses(tracer: bool, share: float) -> None:
    b = Builder(gpus=0)
    if tracer:
        b.host("$loop.py:5 body", 0, 100_000)
    for i in range(40):
        b.host(f"PjitFunction({'add' if i % 2 else 'multiply'})", i * 2_500.0, 500)
    eager = host_spans(b.build(), "node", runs_eagerly=True).eager
    assert eager.total == pytest.approx(share * 100_000e3, rel=0.05)

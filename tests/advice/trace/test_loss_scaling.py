"""What dynamic loss scaling costs."""

from __future__ import annotations

import pytest

from gputop.trace.model import Kind, Trace
from tests.advice.trace.traces import STEP, STEPS, findings, job, verdict
from tests.records import replace
from tests.trace.build import Builder


def on(b: Builder, capability: tuple[int, int] | None, name: str = "") -> Trace:
    trace = b.build()
    trace.gpus[:] = [replace(gpu, compute_capability=capability, name=name) for gpu in trace.gpus]
    return trace



def scaled(checks: int, op: str, wait: float = 0) -> Builder:
    """The host launches all up to the verdict at once, waits for its copy, and needs ``wait`` µs to launch on."""
    b = job()
    for i in range(STEPS):
        t, launch = i * STEP + 100, i * STEP + 20
        for k in range(80 + checks):
            name, length, of = (("Mul_GPU_DT_HALF_DT_HALF_kernel", 100, "gradient_tape/model/mul:Mul") if k < 80 else
                                ("IsFinite_GPU_DT_HALF_DT_BOOL_kernel", 10, f"{op}_{k}:IsFinite"))
            b.run(0, t, length, name, launch=launch + 2 * k, launch_length=1, op=of)
            t += length
        if wait:
            begun = launch + 2 * (80 + checks)
            b.run(0, t, 2, "MemcpyD2H", kind=Kind.D2H, launch=begun, launch_length=t + 4 - begun, size=1,
                  op="loss_scale/cond:If")
            t += 2 + wait
        then = t - 20 if wait else launch + 2 * (80 + checks)
        for k in range(80):
            b.run(0, t, 100, "Mul_GPU_DT_HALF_DT_HALF_kernel", launch=then + k, launch_length=1)
            t += 100
        b.host("cuStreamSynchronize", then + 81, t + 1 - then - 81, line="launch 0")
    return b


@pytest.mark.parametrize(("checks", "wait", "share"), [(20, 0, None), (120, 0, 0.06), (40, 600, 0.05)])
def test_loss_scaling_counts_its_checks_and_the_wait_for_the_verdict(checks, wait, share):
    found = findings(on(scaled(checks, "loss_scale_optimizer/IsFinite", wait), (7, 0)))
    if share is None:
        assert "loss_scaling" not in found
    else:
        f = found["loss_scaling"]
        assert f.gain.step_time == pytest.approx(share, abs=0.006)
        assert (f.evidence["verdict_wait_s"] > 0) == bool(wait)


def test_newer_gpus_are_advised_to_use_bfloat16():
    job = scaled(120, "loss_scale_optimizer/IsFinite")
    assert [verdict(on(job, capability), "loss_scaling").has_bf16 for capability in ((7, 0), (8, 0))] == [False, True]
    assert "BF16" in findings(on(job, (8, 0)))["loss_scaling"].action

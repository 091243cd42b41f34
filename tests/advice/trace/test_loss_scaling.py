"""What dynamic loss scaling costs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gputop.trace.model import Kind, Trace
from tests.advice.trace.traces import STEP, STEPS, findings, job
from tests.trace.build import Builder


def on(b: Builder, capability: tuple[int, int] | None, name: str = "") -> Trace:
    trace = b.build()
    trace.gpus[:] = [replace(gpu, compute_capability=capability, name=name) for gpu in trace.gpus]
    return trace



def scaled(checks: int, op: str, wait: float = 0) -> Builder:
    b = job()
    for i in range(STEPS):
        t = i * STEP + 100
        for _ in range(80):
            b.run(0, t, 100, "Mul_GPU_DT_HALF_DT_HALF_kernel", launch=t - 90, op="gradient_tape/model/mul:Mul")
            t += 100
        for k in range(checks):
            b.run(0, t, 10, "IsFinite_GPU_DT_HALF_DT_BOOL_kernel", launch=t - 90, op=f"{op}_{k}:IsFinite")
            t += 10
        if wait:
            b.run(0, t, 2, "MemcpyD2H", kind=Kind.D2H, launch=t - 20, launch_length=30, size=1, op="loss_scale/cond:If")
            t += 2 + wait
        for _ in range(80):
            b.run(0, t, 100, "Mul_GPU_DT_HALF_DT_HALF_kernel", launch=t - (20 if wait else 90))
            t += 100
    return b


@pytest.mark.parametrize(("checks", "wait", "share"), [(20, 0, None), (120, 0, 0.06), (40, 600, 0.05)])
def test_loss_scaling_counts_its_checks_and_the_wait_for_the_verdict(checks, wait, share):
    found = findings(on(scaled(checks, "loss_scale_optimizer/IsFinite", wait), (7, 0)))
    if share is None:
        assert "loss_scaling" not in found
    else:
        f = found["loss_scaling"]
        assert f.gain.step_time == pytest.approx(share, abs=0.006) and "static" in f.action
        assert (f.evidence["verdict_wait_s"] > 0) == bool(wait)


def test_newer_gpus_are_advised_to_use_bfloat16():
    assert "BF16" in findings(on(scaled(120, "loss_scale_optimizer/IsFinite"), (8, 0)))["loss_scaling"].action

"""The optimizer of a PyTorch job on a CPU that takes a large part of the step."""

from __future__ import annotations

import pytest

from gputop.diagnosis.diagnose import analyze_trace
from gputop.trace.model import Trace
from tests.advice.trace.traces import findings
from tests.analysis.host.stack_samples import sampled
from tests.trace.build import Builder

ID = "optimizer_unfused"


def job(update_us: float, name: str = "Adam", op: str = "aten::sqrt", tensors: int = 40) -> Trace:
    """Steps with a model of 4 ms and an optimizer of large tensors."""
    b, at = Builder(gpus=0), 0.0
    for i in range(12):
        b.host("aten::linear", at, 1500, sequence=i)
        for n in range(tensors):
            b.host("torch::autograd::AccumulateGrad", at + 1600 + n * 50, 5, sequence=1000)
        b.host("autograd::engine::evaluate_function: AddmmBackward0", at + 1600, 2400, sequence=i)
        b.host(f"Optimizer.step#{name}.step", at + 4100, update_us, annotation=1)
        for n in range(tensors):
            b.host(op, at + 4110 + n * update_us / (tensors + 1), update_us / (tensors + 2))
        at += 4200 + update_us
    return b.build()


def test_one_call_for_all_tensors_is_told_with_what_it_saves() -> None:
    f = findings(job(6000.0))[ID]
    assert "Adam updates 40 tensors" in f.why and "fused=True" in f.action and "accumulation" in f.action
    # As measured with 24 linear layers of 256 units and batches of 8: 49.7 to 22.8 ms of CPU time.
    assert f.gain.claim == "about" and f.gain.step_time == pytest.approx(6 / 10.2 * 0.75, abs=0.03)


@pytest.mark.parametrize("trace", [
    job(300.0), job(6000.0, op="aten::_fused_adam_"), job(6000.0, "Muon")], ids=["short", "fused", "without fused="])
def test_no_optimizer_is_blamed_that_is_short_or_has_no_such_call(trace: Trace) -> None:
    assert ID not in {id_ for f in analyze_trace(trace).findings for id_ in f.ids}


def test_its_share_is_that_outside_of_a_recording_that_makes_its_ops_longer() -> None:
    trace, changes = job(6000.0), []
    for n in range(240):  # a tenth of each step before the recording, and the recorded share in it
        begin, length = (n * 0.02, 0.02) if n < 228 else (4.56 + (n - 228) * 0.0102, 0.0102)
        changes += [(begin, "train.py:9 main > model.py:3 forward"),
                    (begin + length * (0.9 if n < 228 else 0.41), "train.py:12 main > torch/optim/adam.py:7 step")]
    trace.origin_ns = 1000 * 10**9
    trace.stacks = (sampled({"MainThread": changes}, 4.69, start_s=1000.0 - 4.56, rate_hz=1000.0),)
    f = findings(trace)[ID]
    assert f.title == "The optimizer takes 10% of the step" and f.gain.step_time == pytest.approx(0.075, abs=0.01)

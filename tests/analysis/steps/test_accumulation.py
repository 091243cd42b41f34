from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from gputop.analysis.steps.optimizer_calls import accumulation_note, steps_per_update
from gputop.analysis.steps.steps import find_steps
from gputop.trace.readers.load import load
from tests.advice.trace.traces import abstained, findings
from tests.trace.build import Builder, keras_steps

DATA = Path(__file__).parents[2] / "data"

UPDATE = "void at::native::multi_tensor_apply_kernel<Metadata<4>, FusedAdamMathFunctor<float>>(int)"
NORM = "void at::native::multi_tensor_apply_kernel<Metadata<1>, LpNormFunctor<float>>(int)"


def job(every: int = 4, *, calls: bool = True, mark: str = "ProfilerStep#{}", update: str = UPDATE,
        ahead: bool = False) -> Builder:
    """40 steps of 10 ms; every so many-th has an optimizer of 6 ms more. ``ahead``: the host has launched all of it
    within a tenth of that time."""
    b, now, pace = Builder(format="chrome"), 0.0, 0.1 if ahead else 1.0
    for i in range(40):
        last = i % every == every - 1
        length = 10_000 + 6_000 * last
        begin = now * pace
        b.host(mark.format(i), begin, (length - 1) * pace)
        b.run(0, now + 100, 9_700, launch=begin + 5, thread="python")
        if last:
            launch = begin + 9_700 * pace
            b.run(0, now + 9_850, 6_000, update, launch=launch, thread="python", launch_length=3)
            if calls:
                b.host("Optimizer.step#AdamW.step", launch - 20, 50)
        now += length
    return b


@pytest.mark.parametrize("calls", [True, False])
@pytest.mark.parametrize("mark", ["ProfilerStep#{}", "iteration {}", "batch {}"])
@pytest.mark.parametrize("ahead", [True, False])
def test_steps_that_accumulate_gradients_are_called_micro_batches(calls: bool, mark: str, ahead: bool) -> None:
    trace = job(calls=calls, mark=mark, ahead=ahead).build()
    steps = find_steps(trace)
    assert steps is not None and steps_per_update(trace, steps) == 4
    note, = accumulation_note(trace, steps)
    assert "one of 4 steps" in note.message
    assert 4 * steps.times.mean_s == pytest.approx(46e-3, rel=0.03)


@pytest.mark.parametrize("b", [job(1), job(update=NORM, calls=False), job(update="gemm", calls=False)])
def test_steps_with_an_optimizer_each_or_without_one_are_none(b: Builder) -> None:
    trace = b.build()
    steps = find_steps(trace)
    assert steps is not None and not accumulation_note(trace, steps)


def test_the_optimizer_of_every_fourth_micro_batch_makes_no_long_step() -> None:
    assert "long_steps" not in findings(job()) and "one of 4 steps" in abstained(job())["long_steps"]
    other = job(update="slow_kernel", calls=False)
    assert "Every 4th step" in findings(other)["long_steps"].title


def test_a_real_job_that_numbers_its_micro_batches() -> None:
    """An update is as long as its optimizer's calls are apart, by the file's own events."""
    path = DATA / "pytorch_micro_batches.pt.trace.json.gz"
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    updates = np.sort([event["ts"] for event in events if event["name"].startswith("Optimizer.step#")])
    trace = load([str(path)])
    steps = find_steps(trace)
    assert steps is not None and steps.times.anchor == 'rounds of ranges "micro_batch N"'
    first, last = (edge / 1e9 for edge in (steps.bounds_ns[0][0], steps.bounds_ns[-1][1]))
    assert steps.count == len(updates) - 2  # the first one's batches and what follows the last are not in the file
    assert (last - first) / steps.count == pytest.approx(float(np.diff(updates).mean()) / 1e6, rel=0.05)
    assert steps_per_update(trace, steps) is None


def test_keras_accumulates_in_a_branch_of_its_graph_and_with_pytorch_shows_updates_by_ops() -> None:
    """Names as TensorFlow 2.21 and Keras 3.15 write them."""
    b, torch = keras_steps(Builder(gpus=0), 20, 10_000, 9_000), Builder(gpus=0, format="chrome")
    for i in range(20):
        branch = "then/_32" if i % 4 == 3 else "else/_33"
        b.host(f"StatefulPartitionedCall/adam_w/cond/{branch}/adam_w/cond/AssignAddVariableOp_1:AssignAddVariableOp",
               i * 10_000 + 8_000, 100, line="tf_Compute/1")
        torch.host(f"ProfilerStep#{i}", i * 10_000, 9_990)
        torch.host("aten::_foreach_sqrt" if i % 2 else "aten::_foreach_add_", i * 10_000 + 8_000, 500)
    for trace, count in ((b.build(), 4), (torch.build(), 2)):
        steps = find_steps(trace)
        assert steps is not None and steps.times.median_s == pytest.approx(10e-3)  # as Keras counts
        assert steps_per_update(trace, steps) == count

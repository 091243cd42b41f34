"""Functions that TorchScript compiles: nothing marks it, and the process is silent meanwhile."""

from __future__ import annotations

from pathlib import Path

import pytest

from gputop.analysis.steps.start_up import SCRIPT, start_up_spans
from gputop.analysis.steps.torch_compilations import script_builds
from gputop.trace.readers.load import load
from tests.advice.trace.traces import findings
from tests.trace.build import Builder

DATA = Path(__file__).resolve().parents[2] / "data"


def scripted(pauses: list[float], *, mark: str = "fallback_function", beside: bool = False,
             inside: bool = False) -> Builder:
    """A loop whose scripted function is called after (or runs its ops after) a pause of so many ms; ``beside``: another
    thread has ops then."""
    b, now = Builder(gpus=0, format="chrome"), 0.0
    for step, pause in enumerate(pauses):
        b.host(f"ProfilerStep#{step}", now, pause * 1e3 + 20_000, annotation=1).host("aten::linear", now + 10, 9_000)
        begin, now = now + 9_100, now + 9_100 + pause * 1e3
        if beside:
            b.host("autograd::engine::evaluate_function: AddmmBackward0", begin, pause * 1e3, "pt_autograd_0")
        at = begin if inside else now
        b.host("delta", at, now - at + 1_000).host(mark, at + 1, now - at + 900).host("aten::relu", now + 10, 800)
        b.host("aten::linear", now + 1_100, 9_000)
        now += 10_900
    return b


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("mark", ["fallback_function", "<forward op>", "TensorExprDynamicGroup", "CudaFusionGroup"])
def test_the_first_calls_that_are_silent_are_a_start(mark, inside):
    (found,) = script_builds((b := scripted([300, 40, 0.1, 0.1, 0.1, 0.1], mark=mark, inside=inside)).build())
    assert (found.function, found.calls, found.by) == ("delta", 6, "TorchScript")
    assert ((found.end_ns - found.start_ns) / 1e6).tolist() == pytest.approx([300, 40], abs=0.2)
    assert [span.kind for span in start_up_spans(b.build())] == [SCRIPT, SCRIPT]


@pytest.mark.parametrize("job", [
    scripted([30, 31, 29, 30, 33, 30]),  # Python, before each call
    scripted([30]),
    scripted([300, 40, 0.1, 0.1], beside=True),
    scripted([300, 40, 0.1, 0.1], mark="aten::sub"),
])
def test_other_pauses_are_not_torchscripts(job):
    assert script_builds(job.build()) == ()


def test_what_is_compiled_in_call_after_call_is_told_with_its_fix():
    f = findings(scripted([80] * 9, inside=True))["retracing"]
    assert "Function delta of TorchScript is compiled repeatedly" in f.title
    assert "set_fusion_strategy" in (f.snippet or "") and f.gain.step_time == pytest.approx(0.8, abs=0.02)
    assert "retracing" not in findings(scripted([80, 80, 80] + [0.1] * 9, inside=True))


def test_a_real_function_of_pytorch_2_13():
    """In its first four steps no op ran for 44 and 53 ms before calls, and for 66, 41 and 44 ms in backward passes."""
    trace = load([DATA / "pytorch_torchscript.pt.trace.json.gz"])
    builds = {one.function: one for one in script_builds(trace)}
    assert builds.keys() == {"delta", "the backward pass"} and builds["delta"].calls == 6
    took = sum(int((one.end_ns - one.start_ns).sum()) for one in builds.values()) / 1e6
    assert took == pytest.approx(248, rel=0.02)
    assert sum(span.end_ns - span.start_ns for span in start_up_spans(trace)) / 1e6 == pytest.approx(took, abs=1)

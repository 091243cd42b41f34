"""Advice on windows that do not train."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from gputop.advice.trace.advise import with_evaluation_caveat
from gputop.analysis.results import StepTimes
from gputop.core.findings import Abstained, Finding, Gain
from gputop.diagnosis.diagnose import analyze_trace
from tests.advice.trace.host_jobs import chained


def finding(id_: str = "input_bound") -> Finding:
    return Finding(id=id_, severity="high", title="t", why="Why.", evidence={}, action="a", source="s",
                   gain=Gain(0.5, ""))


def steps(phase: str, **left_out: float) -> StepTimes:
    return StepTimes("a", "high", 3, 1, 1, 1, phase=phase, left_out_s=left_out)


@pytest.mark.parametrize("phase", ["evaluation", "prediction"])
def test_evaluation_softens_advice_and_says_what_to_do(phase):
    f = with_evaluation_caveat(finding(), steps(phase))
    assert isinstance(f, Finding) and f.severity == "medium"
    assert f.why.startswith("Why.") and phase in f.why
    assert with_evaluation_caveat(finding(), replace(steps(phase), count=2)).severity == "low"
    assert isinstance(with_evaluation_caveat(finding("batch_size_headroom"), steps(phase)), Abstained)


def test_training_unknown_phases_and_two_loops_get_no_caveat():
    for s in (steps("training", evaluation=1.0), steps("unknown"), None):
        assert with_evaluation_caveat(finding(), s) == finding()
    assert with_evaluation_caveat(None, steps("evaluation")) is None
    abstained = Abstained("x", "y")
    assert with_evaluation_caveat(abstained, steps("evaluation")) is abstained
    f = with_evaluation_caveat(finding(), steps("unknown", unknown=1.0))  # two loops of which none is known to train
    assert isinstance(f, Finding) and f.severity == "medium" and f.why != finding().why


def test_a_trace_of_an_evaluation():
    a = analyze_trace(chained(8, trains=False).build())
    assert "xla_off" not in {f.id for f in a.findings}
    assert "evaluation" in {x.id: x.missing for x in a.abstained}["xla_off"]

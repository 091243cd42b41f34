"""What the analysis finds between the steps of the simulated job, against what the simulation knows it did. The same of
the steps themselves: tests/simulation/test_xspace.py."""

from __future__ import annotations

import pytest

from gputop.diagnosis.diagnose import analyze
from gputop.diagnosis.report import text_report
from gputop.diagnosis.wall_text import wall_sentence
from gputop.render.finding_text import gain_text
from gputop.simulation.loop import SimulatedLoop, StepKind
from gputop.simulation.scenarios import find_scenario
from gputop.simulation.xspace import build_xspace
from tests.diagnosis.real_traces import DATA, analysis_of, needs_data

BEGIN_NS = 20_000_000_000


def captured_around(tmp_path, scenario, kind, before_s, length_s):
    """An analysis of the job from ``before_s`` before its first step of a kind on, by the job's clock, the begin of
    that step and those of the time that is captured."""
    loop = SimulatedLoop(scenario)
    first = next(s for s in loop.steps(BEGIN_NS, 10 * BEGIN_NS) if s.kind is kind)
    begin_ns = first.start_ns - int(before_s * 1e9)
    end_ns = begin_ns + int(length_s * 1e9)
    path = tmp_path / f"{kind.name}.xplane.pb"
    path.write_bytes(build_xspace(loop, begin_ns, end_ns, 1_700_000_000_000_000_000, "node"))
    return analyze([str(path)]), [s for s in loop.steps(begin_ns, end_ns) if s.start_ns >= begin_ns]


@pytest.mark.parametrize("scenario", ["healthy", "gpu0-oversubscribed", "input-bound"])
def test_the_evaluation_and_the_idle_time_behind_it_are_named(tmp_path, scenario):
    """An epoch ends with an evaluation and a checkpoint, for which all GPUs are idle: in panel, report and JSON."""
    analysis, steps = captured_around(tmp_path, find_scenario(scenario), StepKind.EVAL, 3.0, 13.0)
    evaluated_s, saved_s = (sum(s.next_ns - s.start_ns for s in steps if s.kind is kind) / 1e9
                            for kind in (StepKind.EVAL, StepKind.CHECKPOINT))
    assert saved_s > 1.9
    wall = analysis.wall_time
    assert sum(part.time_s for part in wall.parts) == pytest.approx(wall.total_s) == pytest.approx(13.0, abs=1.0)
    times_s = {part["id"]: part["time_s"] for part in analysis.to_json()["wall_time"]["parts"]}
    assert times_s["evaluation"] == pytest.approx(evaluated_s, rel=0.05)
    assert times_s["between"] + times_s["gpu_work"] == pytest.approx(saved_s, rel=0.02), "copied, then written"
    sentence, report = wall_sentence(wall), " ".join(text_report(analysis).split())
    for text in (sentence, report):
        assert "evaluation" in text and "saving checkpoints (SaveV2)" in text
    assert {"evaluation_share", "time_outside_steps"} <= {f.id for f in analysis.findings}


def test_a_capture_of_the_idle_time_names_the_checkpoint_and_the_fix_ends_it(tmp_path):
    scenario = find_scenario("slow-checkpoint")
    before, _ = captured_around(tmp_path, scenario, StepKind.CHECKPOINT, 3.5, 14.0)
    first = before.findings[0]
    assert first.severity != "low" and "saving checkpoints (SaveV2)" in first.title
    assert "time_outside_steps" in {first.id, *(f.id for f in first.consequences)}
    after, _ = captured_around(tmp_path, scenario.with_fix(), StepKind.CHECKPOINT, 3.5, 14.0)
    assert not [f for f in after.findings if f.severity != "low"]


@needs_data
def test_one_evaluation_in_a_recording_is_no_alarm() -> None:
    analysis = analysis_of(DATA / "loaded" / "demo-healthy-eval")
    assert {f.id: f.severity for f in analysis.findings} == {"evaluation_share": "low", "unfinished_step": "low"}
    assert analysis.findings[0].title == "One evaluation (validation) of 5.73 s in this recording"
    assert all(f.gain.step_time is None for f in analysis.findings)


@needs_data
def test_one_long_step_is_told_in_seconds_without_a_saving() -> None:
    (checkpoint,) = analysis_of(DATA / "loaded" / "demo-slow-checkpoint").findings
    assert checkpoint.title == "Step 2 of 15 takes 5.22 s longer, once in this recording: saving checkpoints (SaveV2)"
    assert (checkpoint.severity, gain_text(checkpoint), checkpoint.gain.step_time) == ("medium", "", None)

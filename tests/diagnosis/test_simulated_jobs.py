"""What the analysis finds in captures of the simulated job, against what the simulation knows it did."""

from __future__ import annotations

import pytest

from gputop.diagnosis.diagnose import analyze
from gputop.simulation.loop import TrainingLoop
from gputop.simulation.scenarios import find_scenario
from gputop.simulation.xspace import build_xspace
from tests.simulation.loop_truth import loop_truth

BEGIN_NS = 20_000_000_000
LENGTH_NS = 2_500_000_000


@pytest.mark.parametrize(("scenario", "findings"), [
    ("healthy", set()),
    ("input-bound", {"input_bound"}),
    ("gpu0-oversubscribed", {"gpu0_oversubscribed"}),
    ("slow-callback", {"step_gap_host"}),
    ("launch-bound", {"launch_bound", "batch_size_headroom"}),
])
def test_cause_and_figures(tmp_path, scenario, findings):
    loop = TrainingLoop(find_scenario(scenario))
    path = tmp_path / "node.xplane.pb"
    path.write_bytes(build_xspace(loop, BEGIN_NS, BEGIN_NS + LENGTH_NS, 1_700_000_000_000_000_000, "node"))
    a, truth = analyze([str(path)]), loop_truth(loop, BEGIN_NS, BEGIN_NS + LENGTH_NS)
    assert {f.id for f in a.findings if f.severity != "low"} == findings
    assert a.simulated and a.steps is not None and a.breakdown is not None and a.input is not None
    # One step more or less lies in the window, and batches differ in how long they take.
    assert a.steps.mean_s == pytest.approx(truth.step_s, rel=0.05)
    assert [gpu.compute_s_per_step for gpu in a.gpus] == pytest.approx(list(truth.compute_s), rel=0.03)
    assert a.input.wait_s_per_step == pytest.approx(truth.input_wait_s, rel=0.1)
    assert a.breakdown.h2d == pytest.approx(sum(truth.h2d_s) / len(truth.h2d_s), rel=0.05)
    assert a.collectives is not None and a.collectives.waiting is not None

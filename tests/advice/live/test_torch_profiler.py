"""PyTorch jobs whose own profiler is left on, or can be commanded by any local user."""

from __future__ import annotations

import pytest

from gputop.advice.live.torch_profiler import refused_capture
from gputop.core.findings import Abstained
from tests.advice.live.scene import Job, Scene, after

SCENE = Scene(jobs=(Job(pid=100, gpus=(0, 1)), Job(pid=200, gpus=(2,))), gpus=3)


@pytest.mark.parametrize(("profiled", "gpus", "severity", "title"), [
    ({200: 1.0}, (2,), "high", "torch.profiler is recording everything in process 200"),
    ({100: 0.3, 200: 0.06}, (0, 1), "medium", "torch.profiler is recording 30% of the steps of process 100"),
    ({7: 0.6}, (), "high", "torch.profiler is recording 60% of the steps of process 7")])
def test_the_job_that_records_most_is_named_with_its_gpus(profiled: dict[int, float], gpus: tuple[int, ...],
                                                          severity: str, title: str) -> None:
    (finding,) = [f for f in after(SCENE, 5, profiled=profiled).findings if f.id == "profiler_left_on"]
    assert (finding.gpus, finding.severity, finding.title) == (gpus, severity, title)
    assert finding.evidence == {"recorded_ratio": max(profiled.values())}
    assert finding.snippet is not None and "repeat=1" in finding.snippet


def test_a_few_steps_of_many_are_no_finding_and_a_refused_capture_is_the_same_one() -> None:
    advice = after(SCENE, 5, profiled={200: 0.02})
    assert all(one.id != "profiler_left_on" for one in (*advice.findings, *advice.abstained))
    assert "profiler_left_on" in {one.id for one in after(SCENE, 5).abstained}
    assert "profiler_left_on" not in {one.id for one in after(SCENE, 5, profiled={}).abstained}
    (live,) = [f for f in after(SCENE, 5, profiled={7: 0.3}).findings if f.id == "profiler_left_on"]
    assert refused_capture(7, 0.3) == live and refused_capture(7, 0.02) is None


# -- unprotected_profiler --------------------------------------------------------------------------------

def test_jobs_that_any_local_user_can_command_are_named_with_their_gpus() -> None:
    (finding,) = [f for f in after(SCENE, 5, unprotected=(200, 7)).findings if f.id == "unprotected_profiler"]
    assert finding.gpus == (2,) and finding.evidence == {"processes_count": 2.0} and "7, 200" in finding.why
    protected = after(SCENE, 5, unprotected=())
    assert all(one.id != "unprotected_profiler" for one in (*protected.findings, *protected.abstained))
    assert Abstained("unprotected_profiler", "a search for PyTorch's profilers in the processes of this node") in (
        after(SCENE, 5).abstained)

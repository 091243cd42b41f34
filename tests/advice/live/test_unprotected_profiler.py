"""Jobs whose profiler any local user can command."""

from __future__ import annotations

from gputop.core.findings import Abstained
from tests.advice.live.scene import Job, Scene, after

SCENE = Scene(jobs=(Job(pid=100, gpus=(0, 1)), Job(pid=200, gpus=(2,))), gpus=3)


def test_such_jobs_are_named_with_their_gpus() -> None:
    (finding,) = [f for f in after(SCENE, 5, unprotected=(200, 7)).findings if f.id == "unprotected_profiler"]
    assert finding.gpus == (2,) and finding.evidence == {"processes_count": 2.0}
    assert "7, 200" in finding.why


def test_a_node_without_them_has_no_finding() -> None:
    advice = after(SCENE, 5, unprotected=())
    assert all(f.id != "unprotected_profiler" for f in advice.findings)
    assert all(a.id != "unprotected_profiler" for a in advice.abstained)


def test_nothing_is_said_where_nobody_looked() -> None:
    assert Abstained("unprotected_profiler", "a search for PyTorch's profilers in the processes of this node") in (
        after(SCENE, 5).abstained)

"""The rank that is always last, in whole nodes: found with its place, and not found where that cannot be told."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from tests.advice.live.scene import Job, Scene, abstained, after, get, ids, only, verdict

LATE = {"gpu_util": 0.86, "sm_active": 0.70}
SLOW = {"sm_active": 0.90, "sm_clock_hz": 1.6e9, "tensor_active": 0.495}
USUAL = {"gpu_util": 1.0, "sm_active": 0.75, "tensor_active": 0.40, "power_w": 500.0}


def ranks(count: int = 8) -> Sequence[Job]:
    return [Job(pid=100 + rank, gpus=(rank,), command=f"python train.py --local-rank={rank}") for rank in range(count)]


def scene(figures: Mapping[str, float], jobs: Sequence[Job] | None = None, count: int = 8) -> Scene:
    return Scene(jobs=ranks(count) if jobs is None else jobs, gpus=count, other=USUAL, change=only(1, **figures))


def test_the_late_rank_and_its_process_and_the_slow_gpu_of_one_process() -> None:
    finding, seen = get(after(scene(LATE), 480), "slow_rank"), verdict(scene(LATE), 480, "slow_rank")
    assert finding.gpus == (1,) and finding.severity == "medium" and finding.snippet == "gputop stacks 101"
    assert (seen.rank.late, seen.peers, seen.host) == (True, (0, 2, 3, 4, 5, 6, 7), "test")
    assert finding.evidence["idle_ratio"] == pytest.approx(0.14) and finding.evidence["peers_idle_ratio"] == 0.0
    seen = verdict(scene(SLOW, [Job()]), 480, "slow_rank")  # the slow GPU of one process
    assert (seen.rank.late, seen.severity, seen.process) == (False, "low", None)
    assert seen.rank.clock == pytest.approx(1.6 / 1.98, rel=1e-3)


@pytest.mark.parametrize(("jobs", "count"), [
    (ranks(1), 1), (ranks(2), 2), ([Job(gpus=(1,)), Job(200, gpus=(2,), command="python other.py", user="bob")], 8),
    ([Job(command="vllm serve m --tensor-parallel-size 8")], 8),
    ([Job(), Job(200, gpus=(1,), command="python other.py", user="bob")], 8)])
def test_jobs_whose_ranks_cannot_be_compared(jobs: Sequence[Job], count: int) -> None:
    advice = after(scene(LATE, jobs, count), 480)
    assert "slow_rank" not in ids(advice) and "3 GPUs" in abstained(advice)["slow_rank"]


def test_it_abstains_without_its_figures_minutes_or_equals() -> None:
    for metric in ("sm_active", "tensor_active", "gpu_util"):
        advice = after(Scene(jobs=ranks(), other={**USUAL, metric: None}), 480)
        assert "slow_rank" not in ids(advice) and "minutes in which" in abstained(advice)["slow_rank"], metric
    advice = after(scene(LATE), 400)  # it needs minutes
    assert "slow_rank" not in ids(advice) and "7 min" in abstained(advice)["slow_rank"]
    assert "slow_rank" not in ids(after(scene({}), 480)) and "slow_rank" not in abstained(after(scene({}), 480))
    advice = after(scene({**LATE, "tensor_active": 0.3}), 480)
    assert "slow_rank" not in ids(advice) and "pipeline" in abstained(advice)["slow_rank"]

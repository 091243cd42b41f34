"""Device memory by live figures: reserved at the start, or nearly used up."""

from __future__ import annotations

import pytest

from gputop.core.samples import ENDED, HostProcess, HostSample, Reading
from tests.advice.live.scene import TOTAL, Job, Level, Scene, abstained, after, get, ids, only, read
from tests.records import replace


def test_memory_reserved_at_start_by_a_process() -> None:
    advice = after(Scene(jobs=[Job(gpus=range(4), memory=0.95 * TOTAL), Job(2, range(4, 8))]), 40)
    finding = get(advice, "memory_preallocated")
    assert finding.gpus == (0, 1, 2, 3) and finding.severity == "low"
    assert finding.snippet is not None and "TF_FORCE_GPU_ALLOW_GROWTH" in finding.snippet
    assert finding.evidence["memory_used_of_total_ratio"] == pytest.approx(0.95 + 0.5 / 80)
    assert ids(after(Scene(jobs=(), other={"memory_used_bytes": 0.95 * TOTAL}), 40)) == []


@pytest.mark.parametrize("used", [0.88 * TOTAL, lambda t: (0.92 + 0.02 * (t % 2)) * TOTAL])
def test_memory_that_moves_or_has_room_is_not_reserved(used: Level) -> None:
    assert "memory_preallocated" not in ids(after(Scene(other={"memory_used_bytes": used}), 40))


def two_jobs(free: float, moves: float = 0.02) -> Scene:
    """Two jobs on GPU 0 that leave ``free`` of its memory on average, and use ``moves`` more or less of it."""
    jobs = [Job(100, [0], memory=40e9), Job(200, [0], "python other.py", "bob", memory=30e9)]

    def used(t: float) -> float:
        return TOTAL * (1 - free + (moves / 2 if t % 10 < 5 else -moves / 2))

    return Scene(jobs=jobs, gpus=1, other={"memory_used_bytes": used})


@pytest.mark.parametrize(("free", "moves", "found"), [
    (0.019, 0.02, True), (0.022, 0.02, False), (0.019, 0.0051, True), (0.019, 0.0049, False)])
def test_two_jobs_compete_for_the_last_memory(free: float, moves: float, found: bool) -> None:
    advice = after(two_jobs(free, moves), 200)
    assert ("memory_pressure" in ids(advice)) == found
    if found:
        finding = get(advice, "memory_pressure")
        assert finding.severity == "medium" and finding.evidence["processes_count"] == 2.0
        assert "memory_preallocated" not in ids(advice)


def test_what_the_driver_keeps_is_not_free_and_what_one_job_holds_is_no_pressure() -> None:
    scene = two_jobs(0.03)
    assert "memory_pressure" not in ids(after(scene, 200))
    scene = replace(scene, other={**scene.other, "memory_reserved_bytes": 0.02 * TOTAL})
    assert "memory_pressure" in ids(after(scene, 200))
    full = after(Scene(jobs=[Job(memory=0.97 * TOTAL)]), 200)  # what one job holds says nothing about pressure
    assert "memory_pressure" not in ids(full) and "a capture shows the peak" in abstained(full)["memory_pressure"]
    half = after(Scene(), 200)  # what is not even mapped is not short
    assert "memory_pressure" not in abstained(half)
    young = after(Scene(), 20)
    assert "120 s of used and total memory" in abstained(young)["memory_pressure"]


# -- unlisted_memory ----------------------------------------------------------------------------------

HELD = {"memory_used_bytes": 0.7 * TOTAL}


def test_memory_of_an_idle_gpu_that_no_process_holds() -> None:
    advice = after(Scene(jobs=[Job(gpus=range(3))], gpus=4, change=only(3, **HELD)), 150)
    assert ids(advice) == ["unlisted_memory"]  # and not that it is unused
    finding = get(advice, "unlisted_memory")
    assert (finding.gpus, finding.severity) == ((3,), "low") and "another container" in finding.brief
    assert finding.title.startswith("GPU 3: 52.2G of memory in use") and "No problem found" in advice.limit
    ended = Job(200, [3], command="", memory=0.7 * TOTAL, reason=ENDED)
    left = get(after(Scene({3: 0.0}, jobs=[Job(gpus=range(3)), ended], gpus=5, change=only(4, **HELD)), 150),
               "unlisted_memory")
    assert left.gpus == (3,), "nobody is listed on GPU 4"
    assert left.severity == "low" and "process 200, which has ended" in left.brief


@pytest.mark.parametrize("scene", [
    Scene({0: 0.5}, jobs=(), gpus=1, other=HELD),  # somebody works there, unseen
    Scene({0: 0.0}, jobs=[Job(gpus=[0])], gpus=1, other=HELD),  # idle, but it has a process
    Scene(jobs=(), gpus=1, other={"memory_used_bytes": 0.05 * TOTAL}),  # a display
    Scene(jobs=(), gpus=1, change=lambda gpu, t: replace(gpu, processes_reason="no permission"), other=HELD),
], ids=["works", "held", "display", "unknown"])
def test_memory_that_has_an_owner_or_may_have_one(scene: Scene) -> None:
    assert "unlisted_memory" not in ids(after(scene, 150))


# -- host_memory_low ----------------------------------------------------------------------------------

def test_a_host_without_memory_names_its_largest_process() -> None:
    class Full(Scene):
        def host(self, t: float) -> HostSample:
            top = tuple(HostProcess(pid, "ana", f"python {pid}.py", read("sm_active", 0.5), Reading(pid * 1e9, "bytes"))
                        for pid in (7, 9))
            return replace(super().host(t), top_processes=top)

    finding = get(after(Full(host_used=0.99), 5), "host_memory_low")
    assert finding.severity == "medium" and "9.py (pid 9) with 8.4G" in finding.brief
    assert finding.title == "Host memory is nearly used up: 922G of 931G"
    assert "host_memory_low" not in ids(after(Scene(host_used=0.96), 5))  # 40 GB are left

"""The live rule about the host's CPU: all cores, those granted, one thread; and pauses that look like it."""

from __future__ import annotations

import pytest

from tests.advice.live.scene import Job, Scene, abstained, after, get, ids, play, two, verdict

WAITING = dict.fromkeys(range(8), 0.4)


@pytest.mark.parametrize(("cpu", "level", "found"), [
    (0.96, 0.4, True), (0.94, 0.4, False), (0.99, 0.79, True), (0.99, 0.81, False)])
def test_all_cores_full_while_gpus_wait(cpu: float, level: float, found: bool) -> None:
    advice = after(Scene(dict.fromkeys(range(8), level), cpu=cpu), 200)
    assert ("host_cpu_saturated" in ids(advice)) == found


def test_what_it_says() -> None:
    finding = get(after(Scene(WAITING, cpu=0.97, gpus=8), 200), "host_cpu_saturated")
    assert finding.severity == "medium" and finding.gpus == tuple(range(8))
    assert finding.evidence == pytest.approx(
        {"window_s": 120.0, "cpu_ratio": 0.97, "gpu_activity_ratio": 0.4, "cpu_cores": 64.0})


@pytest.mark.parametrize(("cores", "limit_cores", "found"), [
    (7.7, 8.0, True), (7.5, 8.0, False), (20.0, 8.0, False), (7.9, None, False)])
def test_the_cores_that_the_container_grants(cores: float, limit_cores: float | None, found: bool) -> None:
    """A gputop in a smaller container than the job's sees a limit that is not the job's."""
    advice = after(Scene(WAITING, cpu=0.2, jobs=[Job(cores=cores)], cpu_limit_cores=limit_cores), 200)
    assert ("host_cpu_saturated" in ids(advice)) == found
    if found:
        assert "8 CPU cores" in get(advice, "host_cpu_saturated").why


@pytest.mark.parametrize(("cores", "throttled", "found"), [
    (5.0, 0.3, True),  # in bursts: on average there is time left
    (5.0, 0.2, False),
    (7.8, 0.0, True),  # a cpuset throttles nothing
    (7.4, 0.0, False),
])
def test_what_the_jobs_control_group_grants(cores: float, throttled: float, found: bool) -> None:
    """Also where gputop itself, outside of the job, may use the whole node."""
    job = Job(cores=cores, granted_cores=8.0, throttled=throttled)
    advice = after(Scene(WAITING, cpu=0.2, jobs=[job]), 200)
    assert ("host_cpu_saturated" in ids(advice)) == found
    if found:
        finding = get(advice, "host_cpu_saturated")
        assert "8 CPU cores" in finding.why and "slurm 7" in finding.why
        assert finding.evidence["cpu_limit_cores"] == 8.0
        assert finding.evidence["cpu_of_limit_ratio"] == pytest.approx(cores / 8)
        assert finding.evidence.get("cpu_throttled_ratio") == (pytest.approx(throttled) if throttled else None)
        assert ("CPUThrottlingHigh" in finding.source) == bool(throttled)


def test_what_holds_up_each_rank_of_a_job_is_told_of_all_of_them() -> None:
    def ranks(cores: float, **more: float) -> list[Job]:
        return [Job(100 + gpu, (gpu,), f"python train.py --rank={gpu}", cores=cores, **more) for gpu in range(4)]

    of_group = verdict(Scene(WAITING, cpu=0.2, jobs=ranks(0.3, granted_cores=2.0, throttled=0.6)), 200,
                       "host_cpu_saturated")
    assert (of_group.limited_by, of_group.gpus) == ("quota", (0, 1, 2, 3))
    of_threads = verdict(Scene(WAITING, util=0.5, jobs=ranks(1.0), full_cores=4.0), 200, "host_cpu_saturated")
    assert (of_threads.limited_by, of_threads.gpus, of_threads.others) == ("thread", (0, 1, 2, 3), 3)
    assert verdict(Scene(WAITING, util=0.5, jobs=ranks(1.0), full_cores=2.0), 200, "host_cpu_saturated") is None


def test_the_throttling_near_its_threshold_does_not_come_and_go() -> None:
    job = Job(cores=5.0, granted_cores=8.0, throttled=lambda t: 0.29 if t < 250 else 0.20)
    _, advices = play(Scene(WAITING, cpu=0.2, jobs=[job], gpus=2), 500)
    seen = ["host_cpu_saturated" in ids(advice) for advice in advices]
    assert seen[240] and seen[-1]


@pytest.mark.parametrize(("cores", "full", "util", "found"), [
    (1.02, 1.0, 0.5, True),
    (0.85, 1.0, 0.5, False),  # no thread of the job fills a core
    (3.0, 1.0, 0.5, False),  # several threads at work: whose core is full is not known
    (1.02, 0.0, 0.5, False),  # it moves about, or waits
    (1.02, 5.0, 0.5, False),  # other programs fill cores too
    (1.02, 1.0, 0.95, False),  # a thread that polls while kernels run
])
def test_one_thread_at_its_limit(cores: float, full: float, util: float, found: bool) -> None:
    advice = after(Scene(WAITING, util=util, jobs=[Job(cores=cores)], full_cores=full), 200)
    assert ("host_cpu_saturated" in ids(advice)) == found
    if found:
        finding = get(advice, "host_cpu_saturated")
        assert "train.py (pid 100)" in finding.why and "1.0 CPU cores" in finding.why
        assert finding.evidence["full_core_share_ratio"] == 1.0 and finding.evidence["gpu_util_ratio"] == 0.5
    else:
        assert "low_sm_active" in ids(advice)


def test_compiling_and_checkpoints_fill_a_core_too() -> None:
    def writing(t: float) -> bool:
        return t % 300 >= 220 or t < 250  # compiles for 250 s, then saves for 80 s of each 300

    scene = two(lambda t: 0.0 if writing(t) else 0.9, Job(cores=1.0),
                full_cores=lambda t: 1.0 if writing(t) else 0.0, cpu=lambda t: 0.99 if writing(t) else 0.2,
                interval_s=2.0)
    _, advices = play(scene, 900)
    assert all("host_cpu_saturated" not in ids(a) for a in advices)


def test_without_figures_it_abstains() -> None:
    assert "the test says so" in abstained(after(Scene(WAITING, cpu=None), 200))["host_cpu_saturated"]
    assert "a compute process that holds a GPU" in abstained(after(Scene(jobs=(), cpu=0.99), 200))["host_cpu_saturated"]
    assert "startup" in abstained(after(Scene(WAITING, cpu=0.99), 60))["host_cpu_saturated"]
    busy = after(Scene(cpu=0.99), 200)  # the GPUs have no time left: nothing to say
    assert "host_cpu_saturated" not in ids(busy) and "host_cpu_saturated" not in abstained(busy)
    no_cores = after(Scene(WAITING, jobs=[Job(cores=1.0)], full_cores=None), 200)
    assert "host_cpu_saturated" not in ids(no_cores)

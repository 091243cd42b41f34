"""The live rules together: a healthy node, an idle one, other intervals, the contract."""

from __future__ import annotations

import json
import random
from itertools import pairwise

import pytest

from gputop.advice.live.advise import live_advice
from gputop.advice.live.node_view import gpus_text
from gputop.advice.live_rules import LIVE_RULES
from gputop.advice.registry import LIMITS, limit
from gputop.core.codec import convert, to_document
from gputop.core.findings import Finding
from gputop.core.samples import LOST, GpuSample
from gputop.telemetry.history import History
from tests.advice.live.scene import TOTAL, Job, Scene, abstained, after, ids, play
from tests.records import replace


def test_a_healthy_node_has_no_finding_at_any_time() -> None:
    rng = random.Random(3)
    scene = Scene({i: (lambda t: 0.8 + 0.15 * rng.random()) for i in range(8)})
    _, advice = play(scene, 200)
    assert {i for a in advice for i in ids(a)} == set()
    assert set(abstained(advice[-1])) == {"unprotected_profiler", "profiler_left_on", "slow_rank"}, (
        "nobody looked; it needs minutes")


def test_a_node_without_processes_and_the_first_tick_abstain() -> None:
    advice = after(Scene(jobs=()), 200)
    assert ids(advice) == []
    for rule in ("idle_gpu", "unused_gpu", "gpu0_oversubscribed", "shared_gpu", "memory_preallocated"):
        assert "a compute process that holds a GPU" in abstained(advice)[rule]
    advice = after(Scene(), 1)  # the first tick abstains and says for what
    assert ids(advice) == []
    assert set(abstained(advice)) == {"idle_gpu", "unused_gpu", "gpu0_oversubscribed", "power_capped",
                                      "clocks_limited", "unlisted_memory", "memory_preallocated", "no_fine_metrics",
                                      "memory_pressure", "thermal_throttled", "pcie_link_degraded",
                                      "pcie_saturated", "host_cpu_saturated", "spinning", "dram_bound", "low_sm_active",
                                      "recurring_idle", "below_own_best",
                                      "tensor_idle", "unprotected_profiler", "profiler_left_on", "slow_rank"}
    assert all(abstained(advice).values())
    def hide(gpu: GpuSample, t: float) -> GpuSample:
        return replace(gpu, processes=(), processes_reason="nvmlDeviceGetComputeRunningProcesses: no permission")

    advice = after(Scene(jobs=(), change=hide), 100)
    assert "no permission" in abstained(advice)["idle_gpu"]


@pytest.mark.parametrize("interval_s", [0.1, 0.5, 2.0, 5.0, 7.3, 10.0, 30.0, 60.0])
def test_it_works_at_other_intervals(interval_s: float) -> None:
    seconds = max(160.0, 6 * interval_s)
    scene = Scene({0: 0.95, 1: 0.3, 2: 0.3, 3: 0.0}, gpus=4, interval_s=interval_s)
    assert "idle_gpu" in ids(after(scene, seconds))
    scene = replace(scene, active={0: 0.95, 1: 0.3, 2: 0.3, 3: 0.3})
    advice = after(scene, seconds)
    assert ids(advice) == ["gpu0_oversubscribed"]
    assert set(abstained(advice)) == {"unprotected_profiler", "profiler_left_on"}
    scene = replace(scene, jobs=[Job(gpus=range(2))], active={})
    assert ids(after(scene, max(seconds, 7 * interval_s))) == ["unused_gpu"]


def test_late_ticks_at_a_slow_interval_are_judged_all_the_same() -> None:
    rng = random.Random(7)
    scene = Scene({0: 0.95} | dict.fromkeys(range(1, 8), 0.3), interval_s=10.0)
    history, times = History(), [10 * i + rng.uniform(-0.2, 0.2) for i in range(40)]
    for before, now in pairwise(times):
        sample = replace(scene.sample(now), interval_s=now - before)
        history.append(sample)
        if now > 70:
            assert ids(live_advice(history, sample)) == ["gpu0_oversubscribed"]
    assert "150 s" in abstained(after(Scene(interval_s=30.0), 60))["memory_preallocated"]


def test_findings_keep_the_contract() -> None:
    scene = Scene({0: 0.95, 6: 0.0, 7: 0.0} | dict.fromkeys(range(1, 6), 0.3), fine=False,
                  util=0.5, events=["power cap"],
                  jobs=[Job(memory=0.95 * TOTAL, gpus=range(7)), Job(200, [1], "python other.py", "bob", sm=0.3)],
                  other={"sm_clock_hz": 1.2e9},
                  change=lambda g, t: replace(g, state=LOST, message="lost: reset it") if g.info.index == 5 else g)
    advice = after(scene, 200)
    assert set(ids(advice)) >= {"hardware_error", "idle_gpu", "unused_gpu", "shared_gpu", "power_capped",
                                "memory_preallocated", "no_fine_metrics"}
    for finding in advice.findings:
        assert finding.origin == "live" and finding.gpus and finding.gain.how and finding.source
        assert finding.gain.step_time is None  # nothing live tells of steps
        assert all(isinstance(v, float) for v in finding.evidence.values())
        assert convert(json.loads(json.dumps(to_document(finding))), Finding) == replace(
            finding, evidence=dict(finding.evidence))
    assert [f.severity for f in advice.findings] == sorted(
        (f.severity for f in advice.findings), key=["high", "medium", "low"].index)


def test_leaving_is_further_than_entering() -> None:
    smaller_is_worse = {
        "idle_gpu.", "unused_gpu.", "power_capped.clock_", "low_sm_active.active_", "spinning.sm_", "spinning.tensor_",
        "spinning.dram_", "spinning.power_", "spinning.coarse_power_", "spinning.varies_", "tensor_idle.tensor_",
        "dram_bound.tensor_", "memory_pressure.free_", "pcie_saturated.medium_", "thermal_throttled.clock_",
        "thermal_throttled.high_", "host_cpu_saturated.waiting_", "network_bound.waiting_",
        "host_cpu_saturated.most_cores_", "spinning.traffic_", "spinning.nvlink_", "slow_rank.alike_",
        "tensor_idle.fp64_", "thermal_throttled.near_c_", "clocks_limited.clock_", "clocks_limited.set_",
        "host_memory_low.free_"}
    for name in [i.removesuffix("enter") for i in LIMITS if i.endswith("enter")]:
        enter, leave = limit(name + "enter"), limit(name + "leave")
        assert (leave > enter) if name in smaller_is_worse else (leave < enter)


def test_names_of_gpus() -> None:
    assert gpus_text([3]) == "GPU 3" and gpus_text([5, 0, 2, 1]) == "GPUs 0-2, 5"


def test_rules_are_pure() -> None:
    scene = Scene(dict.fromkeys(range(1, 8), 0.0))
    history, advice = play(scene, 150)
    version = history.version
    sample = scene.sample(149)
    assert live_advice(history, sample, advice[-2].findings) == live_advice(history, sample, advice[-2].findings)
    assert history.version == version and len(LIVE_RULES) == 29


def test_parts_of_a_divided_gpu_are_no_gpus_of_a_job() -> None:
    """GPU 0 in MIG mode: one instance works, the other is idle. No finding advises to use it, or to share better."""
    def divided(gpu: GpuSample, t: float) -> GpuSample:
        return replace(gpu, info=replace(gpu.info, index=0, mig=None if gpu.info.index == 0 else gpu.info.index - 1,
                                         mig_mode=gpu.info.index == 0))

    scene = Scene(gpus=3, active={0: 0.9, 1: 0.9, 2: 0.0}, jobs=(Job(gpus=(0, 1, 2)),), change=divided)
    _, advices = play(scene, 200)
    assert advices[-1].findings == ()
    whole = replace(scene, gpus=4, jobs=(Job(gpus=(0, 1, 2)), Job(200, [3])), change=lambda gpu, t: (
        gpu if gpu.info.index == 3 else divided(gpu, t)))
    assert after(whole, 200).limit.endswith("gputop does not judge the MIG instances of GPU 0.")
    missing = {a.id: a.missing for a in advices[-1].abstained}
    assert "MIG" in missing["idle_gpu"] and "MIG" in missing["gpu0_oversubscribed"]

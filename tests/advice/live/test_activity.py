"""Live rules about what the GPUs do: each on its fault, on what looks like it, on both sides of its limits."""

from __future__ import annotations

import random
from typing import Any

import pytest

from gputop.advice.live.advise import live_advice
from gputop.core.findings import Advice
from gputop.core.samples import LOST, GpuSample
from gputop.telemetry.history import History
from tests.advice.live.scene import STUCK, Job, Level, Scene, abstained, after, get, ids, only, play, read, two, verdict
from tests.records import replace


def eight(level: float, **other: Level | None) -> Advice:
    return after(Scene(dict.fromkeys(range(8), level), other=other), 200)


def four(first: float, others: float, **how: Any) -> Scene:
    return Scene({0: first} | dict.fromkeys(range(1, 4), others), gpus=4, interval_s=2.0, **how)


# -- low_sm_active ----------------------------------------------------------------------------------

@pytest.mark.parametrize(("rule", "sm", "other", "found"), [
    ("low_sm_active", 0.49, {}, True), ("low_sm_active", 0.51, {}, False), ("low_sm_active", 0.03, {}, True),
    ("low_sm_active", 0.015, {}, False),
    ("tensor_idle", 0.61, {"tensor_active": 0.0}, True), ("tensor_idle", 0.59, {"tensor_active": 0.0}, False),
    ("tensor_idle", 0.9, {"tensor_active": 0.0049}, True), ("tensor_idle", 0.9, {"tensor_active": 0.0051}, False),
    ("dram_bound", 0.9, {"dram_active": 0.61, "tensor_active": 0.1}, True),
    ("dram_bound", 0.9, {"dram_active": 0.59, "tensor_active": 0.1}, False),
    ("dram_bound", 0.9, {"dram_active": 0.7, "tensor_active": 0.29}, True),
    ("dram_bound", 0.9, {"dram_active": 0.7, "tensor_active": 0.31}, False)])
def test_both_sides_of_the_limits(rule: str, sm: float, other: dict[str, Level | None], found: bool) -> None:
    advice = eight(sm, **other)
    assert (rule in ids(advice)) == found and rule not in abstained(advice)


def test_low_activity_says_what_is_seen_and_names_a_busier_gpu_of_the_job() -> None:
    finding = get(after(Scene(dict.fromkeys(range(8), 0.2), util=0.4, full_cores=12.0), 200), "low_sm_active")
    assert finding.severity == "low" and finding.gpus == tuple(range(8))
    assert finding.evidence == pytest.approx(
        {"window_s": 120.0, "sm_active_ratio": 0.2, "gpu_util_ratio": 0.4, "full_cpu_cores": 12.0})
    storage = get(after(Scene(dict.fromkeys(range(8), 0.2), util=0.4, iowait=0.25), 200), "low_sm_active")
    assert storage.brief == "Idle 60% of the time; 16 CPU cores wait for storage."
    assert storage.evidence["blocked_cpu_cores"] == 16.0
    always = get(eight(0.2), "low_sm_active")
    assert "full_cpu_cores" not in always.evidence
    seen = verdict(Scene(dict.fromkeys(range(7), 0.3) | {7: 0.9}), 200, "low_sm_active")
    assert (seen.gpus, seen.busier_peers) == (tuple(range(7)), (7,))


def test_coarse_utilization_is_an_upper_bound_of_sm_activity() -> None:
    finding = get(after(Scene(fine=False, util=0.3), 200), "low_sm_active")
    assert "gpu_util_ratio" in finding.evidence and "sm_active_ratio" not in finding.evidence
    assert "30%" in finding.title
    high = after(Scene(fine=False, util=0.97), 200)
    assert "low_sm_active" not in ids(high) and "the test says so" in abstained(high)["low_sm_active"]


@pytest.mark.parametrize("scene", [
    four(0.4, 0.0),  # idle_gpu: those are not "low"
    four(0.95, 0.3),  # gpu0_oversubscribed
    four(0.3, 0.3, cpu=0.99),  # host_cpu_saturated
    four(0.3, 0.3, other={"pcie_rx_bytes_per_s": 50e9}),  # pcie_saturated
    four(0.15, 0.15, other=STUCK),  # spinning
], ids=["idle", "gpu0", "host", "pcie", "spinning"])
def test_a_known_cause_stands_alone(scene: Scene) -> None:
    for advice in play(scene, 130, start=130)[1]:
        low = [f for f in advice.findings if f.id == "low_sm_active"]
        causes = [f for f in advice.findings if f.id in (
            "idle_gpu", "gpu0_oversubscribed", "host_cpu_saturated", "pcie_saturated", "spinning")]
        assert causes and all(not set(f.gpus) & set(c.gpus) for f in low for c in causes)
        assert not low or low[0].gpus == (0,)  # only the one GPU that works, beside three idle ones


def test_one_of_two_jobs_works_little() -> None:
    jobs = [Job(100, range(4)), Job(200, range(4, 8), "python other.py", "bob")]
    advice = after(Scene({0: 0.95} | dict.fromkeys(range(1, 8), 0.3), jobs=jobs), 200)
    assert get(advice, "gpu0_oversubscribed").gpus == (0,) and get(advice, "low_sm_active").gpus == (4, 5, 6, 7)


def test_starting_up_is_not_low_activity() -> None:
    def compiling(t: float) -> float:
        return 0.0 if t < 170 else 0.9

    _, advices = play(two(compiling, Job(memory=3e10), interval_s=2.0), 360)
    assert all("low_sm_active" not in ids(a) for a in advices)
    young = after(Scene(dict.fromkeys(range(8), 0.2), jobs=[Job(since_s=150)]), 260)
    assert "startup" in abstained(young)["low_sm_active"]


def training_with_pauses(t: float) -> float:
    """Every 300 s: validation at 35% for 50 s, then 25 s in which a checkpoint is written."""
    phase = t % 300
    return 0.35 if 200 <= phase < 250 else 0.0 if 250 <= phase < 275 else 0.9


def test_validation_and_checkpoints_are_no_alarm() -> None:
    scene = two(training_with_pauses, cpu=lambda t: 0.97 if t % 300 >= 250 else 0.3, interval_s=2.0)
    _, advices = play(scene, 1000)
    assert {i for a in advices for i in ids(a)} == set()
    def saving(t: float) -> bool:
        return t % 400 >= 320  # 80 s

    scene = Scene(
        {0: lambda t: 0.05 if saving(t) else 0.9} | dict.fromkeys((1, 2), lambda t: 0.15 if saving(t) else 0.9),
        [Job(gpus=range(3))], 3, interval_s=2.0,
        other={"tensor_active": lambda t: 0.0 if saving(t) else 0.4, "power_w": lambda t: 130.0 if saving(t) else 600.0,
               "dram_active": lambda t: 0.0 if saving(t) else 0.3})
    _, advices = play(scene, 820)
    assert {i for a in advices for i in ids(a)} == set()


# -- spinning -----------------------------------------------------------------------------------------

def stuck(level: float = 0.15, seconds: float = 200, **other: Level | None) -> Advice:
    return after(Scene(dict.fromkeys(range(8), level), other=STUCK | other), seconds)


def test_gpus_that_wait_for_each_other_and_for_how_long() -> None:
    finding = get(stuck(), "spinning")
    assert finding.severity == "medium" and finding.gpus == tuple(range(8))
    assert finding.evidence["gpu_util_ratio"] == 1.0 and finding.evidence["sm_active_ratio"] == pytest.approx(0.15)
    assert finding.evidence["pcie_bytes_per_s"] == pytest.approx(4e5) and finding.snippet == "gputop stacks 100"
    long = get(stuck(seconds=400), "spinning")
    assert long.severity == "high" and long.evidence["lasts_s"] == 360.0  # it goes on and on, and nobody works
    began = stuck(seconds=400, tensor_active=lambda t: 0.4 if t < 200 else 0.0)
    assert get(began, "spinning").evidence["lasts_s"] == 120.0


@pytest.mark.parametrize(("metric", "just_below", "just_above"), [
    ("tensor_active", 0.0049, 0.006), ("dram_active", 0.019, 0.021), ("power_w", 314.0, 316.0),
    ("gpu_util", 0.981, 0.979)])
def test_real_work_at_low_occupancy_is_not_spinning(metric: str, just_below: float, just_above: float) -> None:
    assert "spinning" in ids(stuck(**{metric: just_below}))
    advice = stuck(**{metric: just_above})
    assert "spinning" not in ids(advice) and "low_sm_active" in ids(advice)


def test_more_sms_variation_and_traffic_are_work() -> None:
    assert "spinning" in ids(stuck(0.34)) and "spinning" not in ids(stuck(0.36))
    rng = random.Random(5)  # activity that varies is work
    scene = Scene(dict.fromkeys(range(8), lambda t: 0.15 * (1 + rng.uniform(-0.3, 0.3))), other=STUCK)
    assert "spinning" not in ids(after(scene, 200))
    scene = Scene(dict.fromkeys(range(8), 0.15), other=STUCK | {"pcie_rx_bytes_per_s": 4e7})
    seen = verdict(scene, 400, "spinning")
    assert seen.severity == "medium" and not seen.sure
    idle = stuck(nvlink_rx_bytes_per_s=1e6, nvlink_tx_bytes_per_s=1e6)  # traffic between GPUs is work
    assert get(idle, "spinning").evidence["nvlink_bytes_per_s"] == pytest.approx(2e6)
    assert "spinning" not in ids(stuck(nvlink_rx_bytes_per_s=6e7, nvlink_tx_bytes_per_s=6e7))


def test_some_wait_for_one_that_works() -> None:
    scene = Scene(dict.fromkeys(range(8), 0.15), other=STUCK,
                  change=only(3, sm_active=0.9, tensor_active=0.4, power_w=600.0))
    finding, seen = get(after(scene, 400), "spinning"), verdict(scene, 400, "spinning")
    assert finding.gpus == (0, 1, 2, 4, 5, 6, 7) and finding.severity == "medium"
    assert (seen.busy_gpus, seen.faulty_gpus) == ((3,), set()) and "GPU 3" in finding.why


def test_those_that_wait_for_a_lost_gpu_say_so() -> None:
    def lose(gpu: GpuSample, t: float) -> GpuSample:
        return replace(gpu, state=LOST, message="lost", readings={}) if gpu.info.index == 3 else gpu

    scene = Scene(dict.fromkeys(range(8), 0.15), other=STUCK, change=lose)
    advice = after(scene, 200)
    assert "GPU 3" in get(advice, "spinning").why and verdict(scene, 200, "spinning").faulty_gpus == {3}
    assert ids(advice)[0] == "hardware_error"


def test_spinning_from_coarse_figures_needs_a_gpu_far_from_any_work_and_none_without_figures() -> None:
    def coarse(**other: Level | None) -> Advice:
        return after(Scene(fine=False, other=STUCK | {"tensor_active": None, "dram_active": None} | other), 200)

    finding = get(coarse(), "spinning")
    assert finding.severity == "medium" and "sm_active_ratio" not in finding.evidence
    assert "spinning" not in ids(coarse(power_w=250.0)) and "spinning" not in ids(coarse(pcie_rx_bytes_per_s=4e7))
    assert "spinning" not in ids(coarse(nvlink_rx_bytes_per_s=2e8))
    assert "PCIe traffic" in abstained(coarse(pcie_rx_bytes_per_s=None))["spinning"]
    assert "power" in abstained(coarse(power_w=None))["spinning"]
    for metric in ("gpu_util", "tensor_active", "dram_active", "power_w"):  # spinning abstains without its figures
        advice = stuck(**{metric: None})
        assert "spinning" not in ids(advice) and "the test says so" in abstained(advice)["spinning"], metric


NO_PIPES = {"fp64_active": 0.0, "fp32_active": 0.0, "fp16_active": 0.0}


def test_a_kernel_that_waits_on_all_sms() -> None:
    finding = get(stuck(0.98, **NO_PIPES), "spinning")
    assert finding.severity == "medium" and finding.gpus == tuple(range(8))
    one = Scene({0: 0.98}, [Job(gpus=(0,))], gpus=1, other=STUCK | NO_PIPES)  # a kernel of one warp an SM looks so
    assert "spinning" not in ids(after(one, 400))


@pytest.mark.parametrize("other", [
    {"tensor_active": 0.5, "dram_active": 0.3, "power_w": 600.0},  # trains
    {"power_w": 480.0},  # hashes: integers in registers
    {"fp32_active": 0.04},  # single warps that compute
    {"fp64_active": None},  # it is not known what they compute
    {"dram_active": 0.7, "power_w": 450.0},  # a test of the memory
    {"pcie_rx_bytes_per_s": None}, {"pcie_rx_bytes_per_s": 4e7},
    {"nvlink_rx_bytes_per_s": 2e10, "nvlink_tx_bytes_per_s": 2e10},  # exchanges
], ids=["trains", "hashes", "fp32", "unknown", "memory test", "no PCIe", "PCIe", "NVLink"])
def test_busy_sms_that_are_no_wait(other: dict[str, Level | None]) -> None:
    assert "spinning" not in ids(stuck(0.98, 400, **NO_PIPES | other))


@pytest.mark.parametrize("command", ["python -m vllm.entrypoints.openai.api_server --tp 8", "vllm serve m",
                                     "python -m sglang.launch_server --tp 8", "/opt/tritonserver/bin/tritonserver"])
def test_servers_of_models_wait_for_requests(command: str) -> None:
    scene = Scene(dict.fromkeys(range(8), 0.15), [Job(command=command)], other=STUCK)
    advice = after(scene, 400)
    assert "spinning" not in ids(advice) and "inference server" in abstained(advice)["spinning"]
    other = replace(scene, jobs=[Job(command="python train.py --data /data/v.llm")])
    assert "spinning" in ids(after(other, 400))


# -- tensor_idle and dram_bound ---------------------------------------------------------------------

def test_unused_tensor_cores_are_said_with_care() -> None:
    finding = get(eight(0.9, tensor_active=0.0), "tensor_idle")
    assert finding.severity == "low"
    assert finding.evidence == pytest.approx({"window_s": 180.0, "sm_active_ratio": 0.9, "tensor_active_ratio": 0.0})
    recent = Scene(dict.fromkeys(range(8), 0.9), other={"tensor_active": lambda t: 0.4 if t < 60 else 0.0})
    assert "tensor_idle" not in ids(after(recent, 230))
    assert "tensor_idle" not in ids(eight(0.9, tensor_active=0.0, fp64_active=0.3))


def test_memory_bound_is_a_limit_and_missing_pipes_are_named() -> None:
    advice = eight(0.9, dram_active=0.75, tensor_active=0.0)
    assert ids(advice) == ["dram_bound"] and get(advice, "dram_bound").severity == "low"
    assert "limited by memory bandwidth" in advice.limit
    advice = eight(0.9, tensor_active=None, dram_active=None)  # missing pipes are named
    assert "tensor_active of GPU 0: the test says so" in abstained(advice)["tensor_idle"]
    assert "dram_active of GPU 0: the test says so" in abstained(advice)["dram_bound"]
    assert "tensor_active" in abstained(eight(0.9, tensor_active=None, dram_active=0.7))["dram_bound"]


# -- no_fine_metrics --------------------------------------------------------------------------------

def test_coarse_only_is_what_stays_so() -> None:
    advice = after(Scene(fine=False), 40)
    finding = get(advice, "no_fine_metrics")
    assert finding.gpus == tuple(range(8)) and "the test says so" in finding.why
    no_util = after(Scene(fine=False, other={"gpu_util": None}), 40)
    assert "no_fine_metrics" in abstained(no_util)
    scene = Scene(other={"sm_active": 0.9}, change=lambda g, t: g if t % 7 else replace(
        g, readings={**g.readings, "sm_active": read("sm_active", None)}))
    _, advice = play(scene, 60)
    assert all("no_fine_metrics" not in ids(a) for a in advice)
    # A prefilled history holds coarse utilization alone; GPM answers from the third tick on.
    history = History()
    for t in range(14):
        for_now = Scene(fine=False, other={"memory_used_bytes": None}).sample(t)
        history.append(for_now)
    for t in range(14, 30):
        sample = Scene(fine=t > 16).sample(t)
        history.append(sample)
        assert "no_fine_metrics" not in ids(live_advice(history, sample))

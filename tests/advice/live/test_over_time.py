"""The live rules over long times: signals at a limit, random nodes, the simulated jobs."""

from __future__ import annotations

import random
from itertools import pairwise
from math import sin

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gputop.advice.live.advise import live_advice
from gputop.core.findings import Advice, Finding
from gputop.core.samples import GpuSample
from gputop.session.watched_node import expected_idle
from gputop.simulation.loop import SimulatedLoop, StepKind
from gputop.simulation.scenarios import SCENARIOS
from gputop.sources.simulated import SimulatedSource
from gputop.telemetry.history import History
from tests.advice.live.scene import LINK, STUCK, TOTAL, Job, Level, Scene, ids, play
from tests.records import replace


def near(value: float, by: float = 0.04) -> Level:
    """Slow waves and noise around ``value``."""
    rng = random.Random(repr(value))
    return lambda t: value * (1 + by * sin(t / 40) + 0.5 * by * rng.uniform(-1, 1))


def pair(level: Level = 0.9, other: dict[str, Level | None] | None = None, **rest: object) -> Scene:
    scene = Scene({0: level, 1: level}, gpus=2, jobs=[Job(gpus=(0, 1), cores=1.0)], interval_s=6.0, other=other or {})
    return replace(scene, **rest)  # type: ignore[arg-type]


def hot(gpu: GpuSample, t: float) -> GpuSample:
    return replace(gpu, clock_event_reasons=("thermal",) if sin(t / 11) > 0.7 else ())  # a quarter of the time


HOVERING = {
    "low_sm_active": pair(near(0.5)),
    "low_sm_active by pauses": pair(lambda t: 0.0 if t % 200 < 50 else 0.4, {"pcie_rx_bytes_per_s": 6e8}),
    "spinning by traffic": pair(0.2, STUCK | {"pcie_rx_bytes_per_s": near(4.8e6, 0.1)}),
    "spinning": pair(near(0.35, 0.02), STUCK),
    "spinning by power": pair(0.2, STUCK | {"power_w": near(315.0)}),
    "spinning by tensor": pair(0.2, STUCK | {"tensor_active": near(0.005, 0.3)}),
    "spinning by dram": pair(0.2, STUCK | {"dram_active": near(0.02, 0.3)}),
    "spinning by variation": pair(near(0.2, 0.06), STUCK),
    "spinning coarse": pair(0.2, STUCK | {"tensor_active": None, "dram_active": None, "power_w": near(245.0)},
                            fine=False),
    "tensor_idle": pair(near(0.6), {"tensor_active": 0.0}),
    "tensor_idle by tensor": pair(0.9, {"tensor_active": near(0.005, 0.3)}),
    "dram_bound": pair(0.9, {"dram_active": near(0.6), "tensor_active": 0.1}),
    "dram_bound by tensor": pair(0.9, {"dram_active": 0.7, "tensor_active": near(0.3)}),
    "pcie_saturated": pair(0.7, {"pcie_rx_bytes_per_s": near(0.65 * LINK)}),
    "pcie_link_degraded": pair(0.9, {"pcie_max_bytes_per_s": lambda t: LINK / 2 if sin(t / 9) < 0.95 else LINK}),
    "memory_pressure": pair(0.9, {"memory_used_bytes": near(0.98 * TOTAL, 0.01)},
                            jobs=[Job(100, (0, 1)), Job(200, (0, 1), "python other.py", "bob")]),
    "host_cpu_saturated": pair(0.6, cpu=near(0.95, 0.02)),
    "host_cpu_saturated by activity": pair(near(0.8), cpu=0.99),
    "host_cpu_saturated by thread": pair(0.6, util=0.6, full_cores=lambda t: 1.0 if sin(t / 9) < 0.95 else 0.0),
    "host_cpu_saturated by cores": pair(0.6, util=0.6, full_cores=1.0, jobs=[Job(gpus=(0, 1), cores=near(0.9, 0.1))]),
    "thermal_throttled by slowdown": pair(0.9, {"sm_clock_hz": 1.5e9, "temperature_c": near(87.0, 0.01)},
                                          events=["hw slowdown"]),
    "clocks_limited": pair(0.9, {"sm_clock_hz": near(0.95 * 1.98e9, 0.01)}, events=["power brake"]),
    "clocks_limited by setting": pair(0.9, {"sm_clock_hz": near(0.8 * 1.98e9, 0.01)}, events=["application clocks"]),
    "host_memory_low": pair(0.9, host_used=near(0.965, 0.005)),
    "thermal_throttled": pair(0.9, {"sm_clock_hz": 1.5e9, "temperature_c": 88.0}, change=hot),
    "thermal_throttled by clock": pair(0.9, {"sm_clock_hz": near(0.95 * 1.98e9, 0.01), "temperature_c": 93.0},
                                       events=None),
}


@pytest.mark.parametrize("name", HOVERING)
def test_a_signal_at_the_limit_does_not_flicker(name: str) -> None:
    rule = name.split()[0]
    _, settled = play(HOVERING[name], 642, start=162)  # after start-up, ten minutes and more
    shown = [rule in ids(a) for a in settled]
    assert any(shown)  # it does get there
    assert sum(a != b for a, b in pairwise(shown)) <= 1
    severities = [f.severity for a in settled for f in a.findings if f.id == rule]
    assert sum(a != b for a, b in pairwise(severities)) <= 1


# -- random nodes ---------------------------------------------------------------------------------------

METRICS: dict[str, float] = {  # and what is the most of it
    "tensor_active": 1.0, "dram_active": 1.0, "gpu_util": 1.0, "power_w": 700.0, "power_limit_w": 700.0,
    "memory_used_bytes": TOTAL, "pcie_rx_bytes_per_s": LINK, "pcie_tx_bytes_per_s": LINK,
    "pcie_max_bytes_per_s": LINK, "sm_clock_hz": 1.98e9, "temperature_c": 100.0, "memory_reserved_bytes": 2e9,
}
RIVALS = [
    {"low_sm_active", "idle_gpu"}, {"low_sm_active", "unused_gpu"}, {"low_sm_active", "host_cpu_saturated"},
    {"low_sm_active", "spinning"}, {"low_sm_active", "tensor_idle"}, {"low_sm_active", "pcie_saturated"},
    {"tensor_idle", "dram_bound"}, {"tensor_idle", "spinning"}, {"dram_bound", "spinning"},
    {"pcie_saturated", "pcie_link_degraded"}, {"thermal_throttled", "power_capped"},
    {"clocks_limited", "thermal_throttled"}, {"clocks_limited", "power_capped"}, {"unlisted_memory", "unused_gpu"},
    {"memory_pressure", "memory_preallocated"}, {"idle_gpu", "spinning"}, {"idle_gpu", "unused_gpu"},
    {"low_sm_active", "network_bound"}, {"pcie_saturated", "network_bound"}, {"host_cpu_saturated", "network_bound"},
    {"host_cpu_saturated", "gpu0_oversubscribed"}, {"host_cpu_saturated", "idle_gpu"}]


def check(advice: Advice, gpus: int) -> None:
    gpus_of = {f.id: set(f.gpus) for f in advice.findings}
    assert len(gpus_of) == len(advice.findings)
    for rivals in RIVALS:
        a, b = rivals
        assert not gpus_of.get(a, set()) & gpus_of.get(b, set()), rivals
    if "gpu0_oversubscribed" in gpus_of and "low_sm_active" in gpus_of:
        assert not gpus_of["gpu0_oversubscribed"] & gpus_of["low_sm_active"]
    assert not set(gpus_of) & {a.id for a in advice.abstained}
    assert all(a.missing for a in advice.abstained)
    for finding in advice.findings:
        assert set(finding.gpus) <= set(range(gpus)) and finding.gpus
        assert all(v == v and abs(v) != float("inf") for v in finding.evidence.values())
    if advice.limit:
        assert not {f.severity for f in advice.findings if f.id in (
            "low_sm_active", "idle_gpu", "spinning", "host_cpu_saturated")}


@given(st.integers(0, 10**9))
@settings(max_examples=20)
def test_random_nodes_never_raise_and_never_contradict_themselves(seed: int) -> None:
    rng = random.Random(seed)
    gpus, interval_s = rng.choice([1, 2, 4]), rng.choice([2.0, 3.0, 7.3, 30.0, 60.0])

    def level(most: float) -> Level | None:
        kind = rng.random()
        if kind < 0.15:
            return None
        base, extreme = rng.random() * most, rng.choice([0.0, 0.01, 0.5, 0.99, 1.0]) * most
        if kind < 0.5:
            return extreme
        if kind < 0.75:
            return base
        cycle = rng.uniform(5, 400)
        return lambda t: base if t % cycle < cycle / 2 else extreme

    jobs = [Job(100 + n, rng.sample(range(gpus), rng.randint(1, gpus)), f"python {n}.py", memory=rng.random() * TOTAL,
                cores=rng.choice([0.3, 1.0, 8.0]), since_s=rng.choice([0.0, 0.0, 50.0]))
            for n in range(rng.choice([0, 1, 1, 2]))]

    def change(gpu: GpuSample, t: float) -> GpuSample:
        if gaps and rng.random() < 0.2:
            return replace(gpu, readings={})
        reasons = tuple(r for r in ("thermal", "power cap", "hw slowdown", "application clocks") if rng.random() < heat)
        return replace(gpu, clock_event_reasons=reasons,
                       info=replace(gpu.info, mig_mode=divided and gpu.info.index == 0))

    gaps, heat, divided = rng.random() < 0.2, rng.choice([0.0, 0.3, 1.0]), rng.random() < 0.15
    full, cpu = level(4.0), level(1.0)
    scene = Scene({i: level(1.0) or 0.0 for i in range(gpus)}, jobs, gpus, rng.random() < 0.8, 1.0,
                  {m: level(most) for m, most in METRICS.items() if rng.random() < 0.6},
                  None if rng.random() < 0.2 else (), change, interval_s, None, cpu, full,
                  rng.choice([None, 1.0, 8.0]))
    for advice in play(scene, max(190.0, 12 * interval_s))[1]:
        check(advice, gpus)


@pytest.mark.parametrize("interval_s", [0.1, 0.5, 5.0, 10.0, 60.0])
@pytest.mark.parametrize(("rule", "scene"), [
    ("low_sm_active", pair(0.3)), ("spinning", pair(0.2, STUCK)), ("tensor_idle", pair(0.9, {"tensor_active": 0.0})),
    ("dram_bound", pair(0.9, {"dram_active": 0.7, "tensor_active": 0.1})), ("host_cpu_saturated", pair(0.5, cpu=0.99)),
    ("pcie_saturated", pair(0.9, {"pcie_rx_bytes_per_s": 45e9})),
    ("pcie_link_degraded", pair(0.9, {"pcie_max_bytes_per_s": LINK / 4}))])
def test_other_intervals(rule: str, scene: Scene, interval_s: float) -> None:
    history = History()
    for sample in replace(scene, interval_s=interval_s).samples(max(200.0, 7 * interval_s)):
        history.append(sample)
    assert rule in ids(live_advice(history, sample))


# -- the simulated jobs -------------------------------------------------------------------------------------

def simulated(scenario: str, since_s: float = 0.0, interval_s: float = 4.0) -> list[Advice]:
    """The advice on ten minutes of it, of which the first two are a start, from ``since_s`` on."""
    now_s = 1_800_000_000.0
    source = SimulatedSource(scenario, clock=lambda: now_s)
    source.open()
    history, out = History(), []
    previous: tuple[Finding, ...] = ()
    samples = [sample for start_s in (now_s, now_s + 300) for sample in source.backfill(start_s, interval_s)]
    for number, sample in enumerate(samples):
        history.append(sample)
        if number * interval_s >= since_s:
            out.append(live_advice(history, sample, previous))
            previous = out[-1].findings
    return out


def test_a_healthy_job_and_one_that_works_half_of_the_time_have_no_alarm() -> None:
    advices = simulated("healthy")
    assert all(f.severity == "low" and f.id == "memory_preallocated" for a in advices for f in a.findings)
    assert "compute bound" in advices[-1].limit and "GPUs 0-7 are " in advices[-1].limit
    assert not any("fell" in advice.limit for advice in advices)  # its evaluations are too short
    for advice in simulated("slow-callback", 140):
        assert ids(advice) == ["memory_preallocated"] and "partly busy and not at any limit" in advice.limit


@pytest.mark.parametrize("scenario", ["input-bound", "launch-bound"])
def test_a_job_that_waits_works_little_and_a_trace_is_to_say_why(scenario: str) -> None:
    for advice in simulated(scenario, 140):
        assert set(ids(advice)) == {"low_sm_active", "memory_preallocated"} and advice.limit == ""


def test_gpu_0_is_the_one_cause() -> None:
    for advice in simulated("gpu0-oversubscribed", 140):
        assert ids(advice) == ["gpu0_oversubscribed", "memory_preallocated"]
    assert set(SCENARIOS) == {"healthy", "input-bound", "launch-bound", "gpu0-oversubscribed", "slow-callback",
                              "slow-checkpoint", "three-causes", "hang"}


def test_idle_time_that_returns_is_told_with_its_period_and_a_capture_can_wait_for_it() -> None:
    loop, last = SimulatedLoop(SCENARIOS["slow-checkpoint"]), simulated("slow-checkpoint", 599, 1.0)[-1]
    finding = last.findings[0]
    assert finding.id == "recurring_idle" and finding.severity == "medium" and finding.gpus == tuple(range(8))
    checkpoints = [s for s in loop.steps(0, 600 * 10**9) if s.kind is StepKind.CHECKPOINT]
    period_s = (checkpoints[-1].start_ns - checkpoints[0].start_ns) / 1e9 / (len(checkpoints) - 1)
    assert finding.evidence["idle_period_s"] == pytest.approx(period_s, rel=0.03)
    assert finding.evidence["idle_s"] == pytest.approx(5.2, abs=0.3)
    expected = expected_idle(last.findings, 1000.0)
    assert expected is not None and expected.gpus == frozenset(range(8))
    assert 1000.0 < expected.begin_s < 1000.0 + 1.1 * period_s and expected.spread_s < 3.0


def test_a_job_that_hangs_spins_while_the_gpu_that_it_waits_for_idles() -> None:
    advices = simulated("hang")
    assert all(set(ids(advice)) <= {"memory_preallocated", "low_sm_active"} for advice in advices[:55])
    assert "SM activity of GPUs 0-7 fell from" in advices[33].limit
    for advice in advices[70:]:
        assert set(ids(advice)) == {"spinning", "idle_gpu", "memory_preallocated"}

"""The rules about a fleet: the fault, a healthy job, and one of which too little is known."""

from __future__ import annotations

import pytest

from gputop.advice.fleet.advise import FleetFinding, fleet_advice
from gputop.cluster.model import IdleGpus, Job, LowClock
from tests.cluster.fleets import NOW, fleet, gpu, job, node, past
from tests.records import replace


def found(*jobs: Job) -> list[FleetFinding]:
    return list(fleet_advice(fleet(*jobs))[0])


def only(*jobs: Job) -> FleetFinding:
    (finding,) = found(*jobs)
    return finding


def test_a_job_that_holds_gpus_and_does_not_use_them() -> None:
    finding = only(job(idle_gpus=32, median=0.0, activity=0.0, history=past((136, 0.9), (42, 0.0))))
    assert (finding.id, finding.job, finding.severity, finding.label) == ("held_idle", "7", "high", "held, idle 42 min")
    assert NOW - finding.since_s == pytest.approx(42 * 60, abs=1) and finding.since_exact
    assert finding.gpu_hours_lost == pytest.approx(32 * 42 / 60, rel=0.01)
    finding = only(job(idle_gpus=32, median=0.0, history=past((180, 0.0))))
    assert not finding.since_exact and finding.label == "held, idle > 3.0 h"
    finding = only(job(idle_gpus=32, median=0.0, history=None))
    assert finding.gpu_hours_lost == 8.0 and not finding.since_exact


def test_one_gpu_that_worked_or_a_young_job_ends_the_idle_time() -> None:
    finding = only(job(idle_gpus=32, median=0.0, activity=0.0, history=past((180, 0.005)),
                       idle_history=past((120, 31.0), (60, 32.0))))
    assert finding.since_exact and NOW - finding.since_s == pytest.approx(3600, abs=1)
    young = {"idle_gpus": 32, "median": 0.0, "mapped": "node", "start_s": NOW - 300, "history": past((180, 0.0))}
    assert "held_idle" not in [f.id for f in found(job(**young))]
    finding = only(job(**{**young, "start_s": NOW - 1800, "history": past((150, None), (30, 0.0))}))
    assert finding.id == "held_idle" and NOW - finding.since_s == pytest.approx(1800, abs=180)


@pytest.mark.parametrize(("idle", "quiet", "watched", "ids"), [
    (32, 32, 32, {"held_idle"}), (16, 16, 32, {"partly_used_job"}), (16, 32, 16, set()), (8, 16, 24, set()),
    (0, 8, 24, set()), (0, 0, 24, set())])
def test_of_gpus_without_samples_for_a_part_of_the_time_nothing_is_said(idle: int, quiet: int, watched: int,
                                                                        ids: set[str]) -> None:
    findings, abstained = fleet_advice(fleet(job(idle_gpus=idle, idle=IdleGpus(quiet=quiet, seen=watched), median=0.0)))
    assert {finding.id for finding in findings} == ids
    assert any("have no samples for part" in own.missing for own in abstained) == (quiet > idle and watched < 32)


def test_a_job_that_uses_some_of_its_gpus() -> None:
    idle = gpu(0.0, "n1:7")
    finding = only(job(idle_gpus=16, median=0.45, mad=0.45, low_gpus=(idle,),
                       idle_history=past((120, 0.0), (60, 16.0))))
    assert (finding.id, finding.severity, finding.label) == ("partly_used_job", "high", "uses 16 of 32 GPUs")
    assert finding.places == ("n1:7",) and finding.gpu_hours_lost == pytest.approx(16.0, rel=0.05)


@pytest.mark.parametrize(("figures", "word"), [
    ({"sm_clock_hz": 1.1e9, "temperature_c": 88.0}, "too hot"),
    ({"sm_clock_hz": 1.1e9, "power_w": 699.0, "power_limit_w": 700.0}, "power is limited"),
    ({"sm_clock_hz": 1.1e9, "temperature_c": 85.0, "clock_reasons": 4.0}, "power is limited"),
    ({"sm_clock_hz": 1.1e9, "clock_reasons": 64.0}, "too hot"),
    ({"sm_clock_hz": 1.1e9}, "1100 MHz; the others run at 1980 MHz."),
    ({"sm_clock_hz": 1.98e9, "pcie_width": 4.0}, "4 lanes, and the others with 16"),
    ({"sm_clock_hz": 3.45e8, "clock_reasons": 1.0}, "shows the reason"),  # low because it has nothing to do
    ({"rows_remap_failed": 1.0, "sm_clock_hz": 1.1e9}, "1100 MHz"),  # what slows it now, before what may be old
    ({"rows_remap_failed": 1.0, "sm_clock_hz": 1.98e9}, "could not be replaced"),
    ({"ecc_uncorrected": 2.0}, "2 uncorrectable memory errors"),
    ({"xid": 79.0}, "Xid of this GPU is 79"),
    ({"sm_clock_hz": 1.98e9, "pcie_width": 16.0, "xid": 0.0, "temperature_c": 88.0}, "shows the reason"),
])
def test_a_straggler_has_its_reason(figures: dict[str, float], word: str) -> None:
    slow = gpu(0.55, history=past((60, 0.9), (120, 0.55)), **figures)
    finding = only(job(low_gpus=(slow,), peers={"sm_clock_hz": 1.98e9, "pcie_width": 16.0}))
    assert (finding.id, finding.severity, finding.label) == ("straggler_gpu", "high", "straggler n4:3")
    assert word in finding.why and finding.places == ("n4:3",)
    assert finding.gpu_hours_lost == pytest.approx(0.35 * 2, rel=0.05) and finding.since_exact


@pytest.mark.parametrize("changes", [
    {"mad": 0.1}, {"median": None}, {"gpus": 3, "nodes": 1}, {"low_gpus": (gpu(0.8),)}, {"low_gpus": (gpu(0.0),)},
    {"gpus": 4, "nodes": 1, "low_gpus": (gpu(0.5), gpu(0.5, "n4:2"))},
], ids=["spread", "no median", "too few", "near", "idle", "half of the job"])
def test_what_is_no_straggler(changes: dict[str, object]) -> None:
    assert found(job(**{"low_gpus": (gpu(0.55),), **changes})) == []


def low_clock(activity: float = 0.97, clock_hz: float = 1.29e9, **changes: float) -> LowClock:
    figures = {name: value for name, value in changes.items() if name not in ("mad_hz", "gpus", "low")}
    return LowClock(gpu=gpu(activity, history=past((180, activity)), **figures), clock_hz=clock_hz, median_hz=1.98e9,
                    mad_hz=changes.get("mad_hz", 1.5e7), gpus=int(changes.get("gpus", 32)),
                    low=int(changes.get("low", 1)), history=past((150, 1.98e9), (30, clock_hz)))


@pytest.mark.parametrize(("figures", "word"), [
    ({"clock_reasons": 4.0}, "The reason is that its power is limited."),
    ({"clock_reasons": 64.0}, "The reason is that it is too hot."),
    ({"clock_reasons": 2.0}, "application clocks are set low"),
    ({"power_w": 399.0, "power_limit_w": 400.0}, "that its power limit is lower than those of the other GPUs."),
    ({"power_w": 300.0, "power_limit_w": 400.0, "power_violation": 5e9}, "The reason is that its power is limited."),
    ({"thermal_violation": 5e9}, "The reason is that it is too hot."),
    ({"power_violation": 0.0, "xid": 79.0}, "GPU is 79"), ({"pcie_width": 4.0}, "4 lanes, and the others with 16")])
def test_a_busy_gpu_with_a_low_clock_is_what_the_others_wait_for(figures: dict[str, float], word: str) -> None:
    finding = only(job(low_clocks=(low_clock(**figures),), peers={"power_limit_w": 700.0, "pcie_width": 16.0}))
    assert (finding.id, finding.severity, finding.label) == ("low_clock_gpu", "high", "low clock n4:3")
    assert "Its SM clock is 1,290 MHz (5-minute mean) and has been low for 30 min." in finding.why
    assert word in finding.why and finding.places == ("n4:3",)
    assert NOW - finding.since_s == pytest.approx(1800, abs=1) and finding.since_exact
    assert finding.gpu_hours_lost == pytest.approx(0.5 * (1 - 1.29 / 1.98))


def test_a_low_clock_without_a_history_says_no_time_and_one_of_idle_time_does_not_count() -> None:
    finding = only(job(low_clocks=(replace(low_clock(), history=None),)))
    assert finding.since_s is None and finding.gpu_hours_lost is None and "(5-minute mean). The median" in finding.why
    own = low_clock()  # a low clock of a time in which the GPU idled does not count
    idled = replace(own, gpu=replace(own.gpu, history=past((170, 0.0), (10, 0.97))), history=past((180, 1.29e9)))
    assert NOW - only(job(low_clocks=(idled,))).since_s == pytest.approx(600, abs=1)
    low = low_clock(0.97, sm_clock_hz=1.29e9)  # a straggler with a low clock is found once
    own = job(low_gpus=(gpu(0.5, sm_clock_hz=1.29e9),), low_clocks=(low,), peers={"sm_clock_hz": 1.98e9})
    assert [f.id for f in found(own)] == ["straggler_gpu"]


@pytest.mark.parametrize("low", [
    low_clock(0.5), low_clock(clock_hz=1.75e9), low_clock(gpus=3), low_clock(clock_reasons=1.0), low_clock(0.1),
    low_clock(clock_hz=1.6e9, mad_hz=0.09e9)], ids=["works less", "near", "too few", "idle", "hardly busy", "spread"])
def test_what_is_no_low_clock(low: LowClock) -> None:
    assert found(job(low_clocks=(low,))) == []


@pytest.mark.parametrize("low", [low_clock(low=9), low_clock(mad_hz=0.12e9)], ids=["many", "spread"])
def test_clocks_that_differ_everywhere_are_no_outliers(low: LowClock) -> None:
    findings, abstained = fleet_advice(fleet(job(low_clocks=(low,))))
    assert findings == () and [a.id for a in abstained] == ["low_clock_gpu"]


def test_a_slow_node_explains_its_gpus_and_of_two_neither_is_slow() -> None:
    low = tuple(gpu(0.4, f"n2:{i}", past((120, 0.9), (60, 0.4))) for i in range(4))
    finding = only(job(low_gpus=low, low_nodes=(node(0.45),)))
    assert (finding.id, finding.places, finding.label) == ("slow_node", ("n2",), "slow node n2")
    assert finding.gpu_hours_lost == pytest.approx(0.45 * 8, rel=0.05)
    other = job(low_gpus=(*low, gpu(0.5, "n3:0")), low_nodes=(node(0.45),))
    assert [f.id for f in found(other)] == ["slow_node", "straggler_gpu"]
    assert found(other)[1].places == ("n3:0",)
    assert found(job(nodes=2, gpus=16, low_nodes=(node(0.45),))) == []  # of two nodes neither is the slow one
    assert found(job(low_nodes=(node(0.45), node(0.4, "n3")))) == []


def test_activity_that_fell_and_stayed_down() -> None:
    finding = only(job(activity=0.4, median=0.4, node_median=0.4, history=past((120, 0.9), (60, 0.4))))
    assert (finding.id, finding.label) == ("activity_drop", "fell 90% → 40%")
    assert finding.gpu_hours_lost == pytest.approx(32 * 0.5, rel=0.06)


@pytest.mark.parametrize("history", [
    past((170, 0.9), (10, 0.4)), past((10, 0.9), (170, 0.4)), past((120, 0.9), (60, 0.7)), past((120, 0.1), (60, 0.02)),
    past(*[(10, 0.9), (10, 0.1)] * 7, (40, 0.1)), past((60, 0.4), (120, 0.9)), past((20, None), (4, 0.9)),
    past((120, 0.9), (50, None), (4, 0.1)),
], ids=["just now", "a start", "little", "noise", "comes and goes", "rose", "young", "not measured"])
def test_what_is_no_drop(history: object) -> None:
    assert found(job(history=history)) == []


def test_on_shared_nodes_and_with_two_kinds_of_activity_nothing_is_judged() -> None:
    findings, abstained = fleet_advice(fleet(job(mapped="shared node", idle_gpus=32), job(mapped="shared node")))
    assert findings == () and {a.id for a in abstained} == {"held_idle", "partly_used_job", "slow_node",
                                                            "straggler_gpu", "low_clock_gpu", "activity_drop"}
    assert all("other jobs hold GPUs on the same nodes" in a.missing and "(2 jobs)" in a.missing for a in abstained)
    findings, abstained = fleet_advice(fleet(job(kind="mixed", median=None, low_gpus=(gpu(0.3),))))
    assert findings == () and {a.id for a in abstained} == {"slow_node", "straggler_gpu"}


def test_of_a_time_without_measurements_nothing_is_lost() -> None:
    idle = only(job(idle_gpus=32, median=0.0, history=past((60, 0.0), (100, None), (20, 0.0))))
    assert NOW - idle.since_s == pytest.approx(20 * 60, abs=121) and not idle.since_exact
    short = only(job(idle_gpus=32, median=0.0, history=past((60, 0.9), (100, 0.0), (4, None), (16, 0.0))))
    assert NOW - short.since_s == pytest.approx(120 * 60, abs=121) and short.since_exact
    fell = only(job(activity=0.4, median=0.4, node_median=0.4, history=past((60, 0.9), (100, None), (20, 0.4))))
    assert fell.id == "activity_drop" and fell.gpu_hours_lost == pytest.approx(32 * 0.5 * 22 / 60, rel=0.15)
    low = {"low_gpus": (gpu(0.5),), "low_nodes": (node(0.4),)}  # a job that has just begun has no straggler
    assert {f.id for f in found(job(**low))} == {"straggler_gpu", "slow_node"}
    assert found(job(**low, history=past((170, None), (8, 0.9)))) == []
    assert found(job(**low, start_s=NOW - 300)) == []
    findings, abstained = fleet_advice(fleet(job(**low, history=None)))
    assert findings == () and {a.id for a in abstained} == {"straggler_gpu", "slow_node", "activity_drop"}


def test_what_lost_most_stands_first_and_nothing_is_said_of_a_healthy_job() -> None:
    long = job(id="1", idle_gpus=32, median=0.0, history=past((60, 0.9), (120, 0.0)))
    short = job(id="2", idle_gpus=32, median=0.0, history=past((120, 0.9), (60, 0.0)))
    assert [f.job for f in found(short, long)] == ["1", "2"]
    assert fleet_advice(fleet(job())) == ((), ())  # nothing is said of a healthy job

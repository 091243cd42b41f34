"""Live rules about the link: full, degraded, idle on purpose, seen in 20-ms samples."""

from __future__ import annotations

import random

import pytest

from gputop.core.metrics import BYTES_PER_S
from gputop.core.samples import GpuInfo, GpuSample, Reading
from tests.advice.live.scene import LINK, Level, Scene, abstained, after, get, ids, only, play, verdict
from tests.records import replace

# -- pcie_saturated ---------------------------------------------------------------------------------


@pytest.mark.parametrize("metric", ["pcie_rx_bytes_per_s", "pcie_tx_bytes_per_s"])
@pytest.mark.parametrize(("share", "found"), [(0.66, True), (0.64, False)])
def test_a_full_link(metric: str, share: float, found: bool) -> None:
    advice = after(Scene(dict.fromkeys(range(8), 0.9), other={metric: share * LINK}), 40)
    assert ("pcie_saturated" in ids(advice)) == found


def test_a_full_link_matters_where_the_gpu_waits() -> None:
    other: dict[str, Level | None] = {"pcie_rx_bytes_per_s": 45e9}
    low = get(after(Scene(other=other), 40), "pcie_saturated")
    assert low.severity == "low" and low.evidence["traffic_of_link_ratio"] == pytest.approx(45 / 63)
    medium = get(after(Scene(dict.fromkeys(range(8), 0.5), other=other), 40), "pcie_saturated")
    assert medium.severity == "medium"
    assert verdict(Scene(other=other), 40, "pcie_saturated").worst.metric == "pcie_rx_bytes_per_s"


def coarse(rate: Level, every_s: float = 5.0) -> Scene:
    """20-ms samples, each shown until the next one."""
    def change(gpu: GpuSample, t: float) -> GpuSample:
        now = rate(t // every_s * every_s) if callable(rate) else rate
        readings = {m: Reading(now, BYTES_PER_S, "NVML 20 ms", coarse=True)
                    for m in ("pcie_rx_bytes_per_s", "pcie_tx_bytes_per_s")}
        return replace(gpu, readings={**gpu.readings, **readings})

    return Scene(dict.fromkeys(range(8), 0.5), change=change)


def test_20_ms_samples_count_only_if_there_are_enough() -> None:
    rng = random.Random(2)
    samples = [rng.uniform(40e9, 55e9) for _ in range(100)]
    scene = coarse(lambda t: samples[int(t) // 5])
    early = after(scene, 45)
    assert "pcie_saturated" not in ids(early) and "20-ms samples" in abstained(early)["pcie_saturated"]
    finding = get(after(scene, 130), "pcie_saturated")
    assert finding.evidence["window_s"] == 120.0 and "20 ms" in finding.why
    few = coarse(lambda t: samples[int(t) // 20], every_s=20.0)  # seven different ones
    advice = after(few, 130)
    assert "pcie_saturated" not in ids(advice) and "20-ms samples" in abstained(advice)["pcie_saturated"]


def test_missing_traffic_is_named() -> None:
    advice = after(Scene(other={"pcie_rx_bytes_per_s": None, "pcie_tx_bytes_per_s": None}), 40)
    assert "pcie_rx_bytes_per_s of GPU 0: the test says so" in abstained(advice)["pcie_saturated"]
    advice = after(Scene(other={"pcie_max_bytes_per_s": None}), 40)
    assert "pcie_max_bytes_per_s" in abstained(advice)["pcie_saturated"]
    assert "the test says so" in abstained(advice)["pcie_link_degraded"]


# -- pcie_link_degraded -----------------------------------------------------------------------------

HALF: dict[str, Level | None] = {"pcie_max_bytes_per_s": LINK / 2, "pcie_width": 8.0}


def test_a_link_with_half_of_its_lanes() -> None:
    finding = get(after(Scene(change=only(5, pcie_max_bytes_per_s=LINK / 2, pcie_width=8.0)), 70), "pcie_link_degraded")
    assert finding.gpus == (5,) and finding.severity == "low"
    assert "5 × 8" in finding.why and "5 × 16" in finding.why
    assert finding.evidence["link_bytes_per_s"] == pytest.approx(LINK / 2)
    busy = after(Scene(other=HALF | {"pcie_rx_bytes_per_s": 12e9}), 70)
    assert get(busy, "pcie_link_degraded").severity == "medium"
    advice = after(Scene(other=HALF | {"pcie_rx_bytes_per_s": 25e9}), 70)  # a full degraded link is one finding
    assert ids(advice) == ["pcie_link_degraded"]
    scene = Scene(change=lambda g, t: replace(g, info=GpuInfo(g.info.index, g.info.uuid, "H100")))
    assert "highest PCIe generation" in abstained(after(scene, 70))["pcie_link_degraded"]


def test_a_link_that_was_seen_for_seconds_is_not_judged() -> None:
    assert "not yet seen" in abstained(after(Scene(other=HALF), 40))["pcie_link_degraded"]


@pytest.mark.parametrize(("share", "found"), [(0.89, True), (0.91, False)])
def test_how_much_slower(share: float, found: bool) -> None:
    full = 32e9 * 128 / 130 / 8 * 16
    slower = Scene(change=only(5, pcie_max_bytes_per_s=share * full))
    assert ("pcie_link_degraded" in ids(after(slower, 70))) == found


def test_an_idle_link_runs_slower_on_purpose() -> None:
    """Generation 1 while the GPU does nothing, as NVML shows it."""
    def idle(t: float) -> bool:
        return t % 100 >= 60

    saving = Scene(dict.fromkeys((0, 1), lambda t: 0.0 if idle(t) else 0.9), gpus=2,
                   other={"pcie_max_bytes_per_s": lambda t: 4e9 if idle(t) else LINK})
    _, advices = play(saving, 400)
    assert all("pcie_link_degraded" not in ids(a) for a in advices)
    never = after(Scene(dict.fromkeys(range(8), 0.0), other={"pcie_max_bytes_per_s": 4e9}), 100)
    assert "idle links run slower" in abstained(never)["pcie_link_degraded"]

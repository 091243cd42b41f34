"""Live rules on the GPUs alone: each on its fault, on what looks like it, over time."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from gputop.core.findings import Finding
from gputop.core.samples import GpuSample
from tests.advice.live.scene import Scene, abstained, after, get, ids, play
from tests.records import replace

# -- power_capped -----------------------------------------------------------------------------------

def test_clocks_held_down_by_the_power_limit() -> None:
    advice = after(Scene(events=["power cap"], other={"power_w": 698.0, "sm_clock_hz": 1.6e9}), 40)
    finding = get(advice, "power_capped")
    assert finding.gpus == tuple(range(8)) and finding.severity == "low"
    assert finding.evidence["sm_clock_of_max_ratio"] == pytest.approx(1.6 / 1.98)
    assert finding.evidence["power_cap_share_ratio"] == 1.0
    low = after(Scene(events=["power cap"], other={"power_w": 300.0, "sm_clock_hz": 1.2e9}), 40)
    assert get(low, "power_capped").severity == "medium"
    assert "power_capped" in ids(after(Scene(events=None, other={"power_w": 695.0, "sm_clock_hz": 1.6e9}), 40))
    advice = after(Scene(other={"sm_clock_hz": None}), 40)  # without clocks it abstains
    assert "SM clock" in abstained(advice)["power_capped"]


@pytest.mark.parametrize(("events", "power", "clock"), [
    (["power cap"], 690.0, 1.9e9),  # capped, but hardly slower
    ([], 600.0, 1.4e9),  # slower for another reason
    (["idle"], 90.0, 0.3e9),  # idle
    (["thermal"], 500.0, 1.2e9),
])
def test_near_misses_of_the_power_limit(events: list[str], power: float, clock: float) -> None:
    assert "power_capped" not in ids(after(Scene(events=events, other={"power_w": power, "sm_clock_hz": clock}), 40))


def test_a_short_peak_is_no_cap_and_a_dip_does_not_end_one() -> None:
    def capped_in(spans: Sequence[tuple[float, float]]) -> Scene:
        def inside(t: float) -> bool:
            return any(a <= t < b for a, b in spans)

        return Scene(
            gpus=2,
            other={"power_w": lambda t: 699.0 if inside(t) else 500.0,
                   "sm_clock_hz": lambda t: 1.5e9 if inside(t) else 1.9e9},
            change=lambda g, t: replace(g, clock_event_reasons=("power cap",) if inside(t) else ()))

    assert all("power_capped" not in ids(a) for a in play(capped_in([(60, 70)]), 120)[1])
    _, advice = play(capped_in([(0, 100), (110, 200)]), 300)
    shown = ["power_capped" in ids(a) for a in advice]
    assert all(shown[40:200]) and not any(shown[235:])


def test_the_power_limit_is_compared_with_the_default_of_the_card() -> None:
    def capped(power_w: float, limit_w: float, default_w: float | None) -> Finding:
        scene = Scene(events=["power cap"], other={"power_w": power_w, "power_limit_w": limit_w, "sm_clock_hz": 1.2e9,
                                                   "power_limit_default_w": default_w})
        return get(after(scene, 40), "power_capped")

    low = capped(345.0, 350.0, 700.0)
    assert "350 W, which is below the card's default of 700 W" in low.brief and "raised" in low.action
    assert low.snippet == "sudo nvidia-smi -pl 700"
    usual = capped(698.0, 700.0, 700.0)
    assert "700 W, the card's default" in usual.brief and "raise" not in usual.action
    assert "Compare the limit" in capped(698.0, 700.0, None).action


# -- clocks_limited ---------------------------------------------------------------------------------

@pytest.mark.parametrize(("events", "clock", "active", "severity"), [
    (["hw slowdown", "power brake"], 0.99e9, 0.9, "high"), (["power brake"], 1.7e9, 0.9, "medium"),
    (["hw slowdown"], 0.35e9, 0.9, "high"), (["application clocks"], 1.0e9, 0.9, "low"),
    (["application clocks"], 1.7e9, 0.9, None),  # hardly slower
    (["power brake"], 1.97e9, 0.9, None), (["power brake"], 0.99e9, 0.1, None),  # slower, but idle
    (["idle"], 0.35e9, 0.9, None), ([], 1.0e9, 0.9, None), (["sync boost"], 1.0e9, 0.9, None)])
def test_clocks_that_a_fault_or_a_setting_holds_down(
        events: list[str], clock: float, active: float, severity: str | None) -> None:
    scene = Scene(dict.fromkeys(range(8), active), events=events, other={"sm_clock_hz": clock})
    advice = after(scene, 61)
    assert [f.severity for f in advice.findings if f.id == "clocks_limited"] == ([severity] if severity else [])
    assert "thermal_throttled" not in ids(advice)


def test_the_reason_of_a_low_clock_is_named_and_heat_is_told_first() -> None:
    brake = Scene(events=["hw slowdown", "power brake"], other={"sm_clock_hz": 0.99e9})
    assert get(after(brake, 61), "clocks_limited").title == "GPUs 0-7 at 50% of their maximum SM clock: power brake"
    unknown = get(after(replace(brake, events=["hw slowdown"]), 61), "clocks_limited")
    assert "hardware slowdown" in unknown.title and "at 60 °C" in unknown.brief
    setting = get(after(Scene(events=["application clocks"], other={"sm_clock_hz": 1e9}), 61), "clocks_limited")
    assert "clock setting" in setting.title and "nvidia-smi -rgc" in (setting.snippet or "")
    heat = after(Scene(events=["hw slowdown", "hw thermal"], other={"sm_clock_hz": 1e9, "temperature_c": 90.0}), 61)
    assert ids(heat) == ["thermal_throttled"]
    # A pause lowers the mean of the clock, but not the highest one.
    pause = Scene(events=["application clocks"], other={"sm_clock_hz": lambda t: 0.3e9 if t % 20 < 10 else 1.9e9})
    assert "clocks_limited" not in ids(after(pause, 61))
    assert "clock event reasons" in abstained(after(Scene(events=None), 61))["clocks_limited"]


# -- thermal_throttled ------------------------------------------------------------------------------

def hot(share: float, reason: str = "thermal", clock: float = 1.6e9, temperature: float = 88.0) -> Scene:
    """One in ``1 / share`` samples has the reason."""
    def change(gpu: GpuSample, t: float) -> GpuSample:
        active = share >= 1 or (share > 0 and t % round(1 / share) == 0)
        return replace(gpu, clock_event_reasons=(reason,) if active else ())

    return Scene(other={"sm_clock_hz": clock, "temperature_c": temperature}, change=change)


@pytest.mark.parametrize(("share", "clock", "found"), [
    (1.0, 1.6e9, True), (1 / 3, 1.6e9, True), (1 / 5, 1.6e9, False), (1.0, 0.94 * 1.98e9, True),
    (1.0, 0.96 * 1.98e9, False)])
def test_heat_holds_the_clocks_down(share: float, clock: float, found: bool) -> None:
    assert ("thermal_throttled" in ids(after(hot(share, clock=clock), 61))) == found


def test_heat_says_how_hot_and_how_slow_with_reasons_or_without() -> None:
    finding = get(after(hot(1.0), 61), "thermal_throttled")
    assert finding.severity == "medium" and finding.gpus == tuple(range(8))
    assert "88 °C" in finding.why and "92 °C" in finding.why and finding.evidence["thermal_share_ratio"] == 1.0
    assert get(after(hot(1.0, clock=1.2e9), 61), "thermal_throttled").severity == "high"
    assert "thermal_throttled" in ids(after(hot(1.0, "hw slowdown", temperature=88.0), 61))
    assert "thermal_throttled" not in ids(after(hot(1.0, "hw slowdown", temperature=70.0), 61))
    assert "thermal_throttled" not in ids(after(hot(1.0, "power cap", temperature=88.0), 61))
    scene = Scene(events=["thermal", "power cap"], other={"power_w": 699.0, "sm_clock_hz": 1.5e9})
    assert ids(after(scene, 61)) == ["thermal_throttled"]
    by_temperature = Scene(events=None, other={"sm_clock_hz": 1.5e9, "temperature_c": 93.0})
    assert "thermal_throttled" in ids(after(by_temperature, 61))
    cooler = replace(by_temperature, other={"sm_clock_hz": 1.5e9, "temperature_c": 90.0})
    assert "thermal_throttled" not in ids(after(cooler, 61))
    nothing = after(Scene(events=None, other={"temperature_slowdown_c": None}), 61)
    assert "clock event reasons" in abstained(nothing)["thermal_throttled"]

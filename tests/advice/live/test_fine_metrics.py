"""GPUs of which only coarse utilization is known."""

from __future__ import annotations

from gputop.advice.live.advise import live_advice
from gputop.telemetry.history import History
from tests.advice.live.scene import Scene, abstained, after, get, ids, play, read
from tests.records import replace


def test_coarse_only() -> None:
    advice = after(Scene(fine=False), 40)
    finding = get(advice, "no_fine_metrics")
    assert finding.gpus == tuple(range(8)) and "the test says so" in finding.why
    no_util = after(Scene(fine=False, other={"gpu_util": None}), 40)
    assert "no_fine_metrics" in abstained(no_util)


def test_the_first_blank_ticks_of_gpm_are_not_coarse_only() -> None:
    """A prefilled history holds coarse utilization alone; GPM answers from the third tick on."""
    history = History()
    for t in range(14):
        for_now = Scene(fine=False, other={"memory_used_bytes": None}).sample(t)
        history.append(for_now)
    for t in range(14, 30):
        sample = Scene(fine=t > 16).sample(t)
        history.append(sample)
        assert "no_fine_metrics" not in ids(live_advice(history, sample))


def test_a_missing_value_now_and_then_is_not_coarse_only() -> None:
    scene = Scene(other={"sm_active": 0.9}, change=lambda g, t: g if t % 7 else replace(
        g, readings={**g.readings, "sm_active": read("sm_active", None)}))
    _, advice = play(scene, 60)
    assert all("no_fine_metrics" not in ids(a) for a in advice)

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gputop.core.captured_samples import SURE, is_undersampled, steps_per_period
from gputop.core.samples import GpuSample, Reading
from gputop.simulation.loop import SimulatedLoop
from gputop.simulation.node import SimulatedNode
from gputop.simulation.scenarios import SCENARIOS
from gputop.telemetry import step_period
from gputop.telemetry.autocorrelation import MIN_SAMPLES
from gputop.telemetry.history import History
from gputop.telemetry.step_period import (
    TOO_FAST,
    UNMEASURED,
    StepPeriodEstimate,
    estimate_step_period,
    live_steps,
    max_interval_for,
)
from tests.fakes import node_sample
from tests.records import replace
from tests.simulation.loop_truth import loop_truth

F64 = npt.NDArray[np.float64]


def estimate(times_s: F64, values: F64) -> StepPeriodEstimate:
    """The estimate of values[n, gpu]."""
    return step_period.estimate(times_s.tolist(), values.T.tolist())


def steps(period_s: float, interval_s: float, samples: int, *, seed: int = 0, duty: float = 0.6, jitter: float = 0.02,
          uneven: float = 0.02, noise: float = 0.05, gpus: int = 8) -> tuple[F64, F64]:
    """A job that is busy for ``duty`` of each step, as the mean over each interval, as GPM reads it."""
    rng = np.random.default_rng(seed)
    lengths = period_s * np.exp(jitter * rng.standard_normal(int(1.5 * samples * interval_s / period_s) + 50))
    starts = np.concatenate([[0.0], np.cumsum(lengths)])
    knots = np.column_stack([starts[:-1], starts[:-1] + duty * lengths]).ravel()
    busy = np.concatenate([[0.0], np.cumsum(np.column_stack([duty * lengths, 0 * lengths]).ravel())])[:-1]
    times = interval_s * (np.arange(samples) + 3 + uneven * rng.uniform(-1, 1, samples))
    before = np.concatenate([[times[0] - interval_s], times[:-1]])
    active = (np.interp(times, knots, busy) - np.interp(before, knots, busy)) / (times - before)
    return times, active[:, None] + noise * rng.standard_normal((samples, gpus))


@given(interval_s=st.sampled_from([0.1, 0.5, 1.0]), samples_per_step=st.floats(2.7, 30), duty=st.floats(0.25, 0.8),
       jitter=st.floats(0, 0.03), uneven=st.floats(0, 0.15), seed=st.integers(0, 2**32 - 1),
       gpus=st.sampled_from([1, 2, 8]))
def test_the_step_is_found_and_not_its_multiples(interval_s: float, samples_per_step: float, duty: float, jitter: float,
                                                 uneven: float, seed: int, gpus: int) -> None:
    period_s = samples_per_step * interval_s
    found = estimate(*steps(period_s, interval_s, 300, seed=seed, duty=duty, jitter=jitter, uneven=uneven, noise=0.03,
                            gpus=gpus))
    assert found.period_s == pytest.approx(period_s, rel=0.05), found
    assert found.reason is None and 0.4 <= found.confidence <= 1 and len(found.gpus) == gpus


def _false_alarms(noise: str, samples: int, gpus: int, seeds: range) -> int:
    alarms = 0
    for seed in seeds:
        values = np.random.default_rng(seed).standard_normal((samples, gpus))
        if noise == "the same on all GPUs":
            values = np.repeat(values[:, :1], gpus, axis=1)
        elif noise == "a mean over ten samples":
            values = np.apply_along_axis(np.convolve, 0, values, np.ones(10), "same")
        elif noise == "a random walk":
            values = values.cumsum(axis=0)
        alarms += estimate(np.arange(samples, dtype=float), values).period_s is not None
    return alarms


@pytest.mark.parametrize("noise", ["white", "the same on all GPUs", "a mean over ten samples", "a random walk"])
@pytest.mark.parametrize(("samples", "gpus"), [(40, 1), (120, 8), (300, 2)])
def test_noise_has_no_step_period(noise: str, samples: int, gpus: int) -> None:
    """None of 50 notices 5% of false alarms with 92%, none of the 600 in all 1% with 99%."""
    assert not _false_alarms(noise, samples, gpus, range(50))


def test_a_higher_peak_in_a_longer_window_is_surer() -> None:
    sure = [estimate(*steps(4.0, 1.0, n, jitter=j)).confidence for n, j in ((300, 0.0), (300, 0.08), (80, 0.08))]
    assert sure[0] > sure[1] > sure[2] > 0.4


def test_why_there_is_none() -> None:
    times = np.arange(300.0)
    assert (estimate(times[:2], np.ones((2, 1))).reason or "").endswith("so far")
    assert estimate(times, np.full((300, 2), np.nan)).reason == UNMEASURED
    few = MIN_SAMPLES - 1
    assert estimate(times[:few], np.ones((few, 1))).reason == f"{few} of {few + 1} required samples so far"
    assert (estimate(times, np.full((300, 8), 0.97)).reason or "").startswith("flat")
    ramp = estimate(times, np.linspace(0, 1, 300)[:, None])
    assert ramp.period_s is None and ramp.interval_s == 1.0 and (ramp.shortest_s, ramp.longest_s) == (2.5, 60.0)


def test_what_repeats_within_two_and_a_half_samples_is_too_fast_and_its_double_is_not_reported() -> None:
    found = estimate(*steps(2.2, 1.0, 300, uneven=0.0, jitter=0.005))
    assert (found.period_s, found.reason) == (None, TOO_FAST)


def test_a_gap_and_missing_readings_do_no_harm() -> None:
    times, values = steps(4.0, 1.0, 300)
    values[50:60] = np.nan
    values[::7, 0] = np.nan
    kept = np.ones(300, bool)
    kept[120:123] = False
    assert estimate(times[kept], values[kept]).period_s == pytest.approx(4.0, rel=0.02)
    times[:150] -= 1000.0  # samples before a long pause do not count
    found = estimate(times, values)
    assert found.period_s == pytest.approx(4.0, rel=0.02) and found.longest_s == pytest.approx(30.0, rel=0.05)


def test_only_samples_of_the_present_interval_count() -> None:
    slow, slow_values = steps(3.7, 1.0, 200)
    quick, quick_values = steps(0.5, 0.1, 300)
    found = estimate(np.concatenate([slow, slow[-1] + quick]), np.concatenate([slow_values, quick_values]))
    assert found.interval_s == pytest.approx(0.1, rel=0.02) and found.period_s == pytest.approx(0.5, rel=0.02)


def test_a_pause_between_the_steps_does_not_hide_them() -> None:
    times, values = steps(0.37, 0.1, 1200, duty=0.9, noise=0.02)
    values[400:430] = 0.0  # a checkpoint: far more of a change than all the steps
    assert estimate(times, values).period_s == pytest.approx(0.37, rel=0.03)


def test_the_step_period_that_most_gpus_share_is_reported_with_its_gpus() -> None:
    times, job = steps(5.0, 1.0, 300, gpus=5)
    _, other = steps(8.3, 1.0, 300, seed=1, gpus=2)
    idle = np.zeros((300, 1))
    found = estimate(times, np.hstack([idle, other, job]))
    assert found.period_s == pytest.approx(5.0, rel=0.02) and found.gpus == (3, 4, 5, 6, 7)


def test_a_step_made_of_alike_parts_is_the_whole_step() -> None:
    times = np.arange(300.0)
    phase = times % 20
    micro_batches = np.where(phase < 16, 0.5 + 0.4 * np.cos(2 * np.pi * phase / 4), 0.0)
    found = estimate(times, micro_batches[:, None] + 0.02 * np.random.default_rng(0).standard_normal((300, 4)))
    assert found.period_s == pytest.approx(20.0, rel=0.02)


def _watch(scenario: str, interval_s: float, seconds: float, gpus: int) -> tuple[StepPeriodEstimate, float]:
    """What is found in a demo scenario, and how long its training steps really are."""
    loop = SimulatedLoop(SCENARIOS[scenario])
    node, history = SimulatedNode(loop), History()
    begin_ns = loop.epoch_start(1) + 10**9
    for i in range(round(seconds / interval_s)):
        start_ns = begin_ns + round(i * interval_s * 1e9)
        end_ns = begin_ns + round((i + 1) * interval_s * 1e9)
        history.append(node.sample([*range(gpus)], start_ns, end_ns, 1.8e9 + end_ns / 1e9, "simulated"))
    return estimate_step_period(history), loop_truth(loop, begin_ns, begin_ns + round(seconds * 1e9)).step_s


@pytest.mark.parametrize("scenario", ["gpu0-oversubscribed", "input-bound", "healthy"])
def test_the_steps_of_the_demo_show_at_a_tenth_of_a_second(scenario: str) -> None:
    found, step_s = _watch(scenario, 0.1, 40, gpus=8)
    assert found.period_s == pytest.approx(step_s, rel=0.03) and found.confidence > 0.8 and len(found.gpus) == 8
    assert steps_per_period(found.period_s, step_s) == 1 and not is_undersampled(step_s, found.interval_s or 0)


@pytest.mark.parametrize("scenario", sorted(SCENARIOS))
def test_at_one_hertz_they_are_too_fast_and_nothing_is_made_up(scenario: str) -> None:
    found, step_s = _watch(scenario, 1.0, 150, gpus=2)
    assert found.period_s is None and found.reason is not None
    assert found.shortest_s is not None and step_s < found.shortest_s and is_undersampled(step_s, found.interval_s or 0)


def test_steps_of_a_fifth_of_a_second_are_too_fast_for_the_shortest_interval() -> None:
    found, step_s = _watch("launch-bound", 0.1, 60, gpus=2)
    assert (found.period_s, found.reason) == (None, TOO_FAST) and step_s < 0.25


def test_power_is_taken_where_sm_activity_cannot_be_read() -> None:
    def coarse(gpu: GpuSample, tick: int) -> GpuSample:
        on = tick % 6 < 3
        return replace(gpu, readings={**gpu.readings, "sm_active": Reading.missing("ratio", "needs GPM"),
                                      "power_w": Reading(600.0 if on else 200.0, "W"),
                                      "gpu_util": Reading(1.0, "ratio", coarse=True)})

    history = History()
    for tick in range(200):
        history.append(node_sample(tick, 2, change=coarse))
    found = estimate_step_period(history)
    assert found.metric == "power_w" and found.period_s == pytest.approx(6.0, rel=0.02)
    assert estimate_step_period(History()).period_s is None


def test_the_last_minutes_are_told_one_by_one() -> None:
    def busy(gpu: GpuSample, tick: int) -> GpuSample:
        on = (tick % 6 < 3) if tick < 256 else (tick % 7 < 4)
        return replace(gpu, readings={**gpu.readings, "sm_active": Reading(0.9 if on else 0.2, "ratio")})

    history = History()
    for tick in range(640):
        history.append(node_sample(tick, 2, change=busy))
    found = live_steps(history)
    assert found is not None and found.confidence >= SURE and found.interval_s == pytest.approx(1.0)
    assert found.period_s[0] == pytest.approx(6.0, rel=0.02) and found.period_s[-1] == pytest.approx(7.0, rel=0.02)
    assert len(found.period_s) >= 5 and live_steps(History()) is None


def test_whole_steps_in_a_step_period() -> None:
    assert [steps_per_period(2.4, s) for s in (2.41, 0.6, 0.62, 0.8)] == [1, 4, None, 3]
    assert steps_per_period(2.4, 0.01) is None, "of so many steps none tells one number from the next"


def test_the_interval_that_shows_a_step() -> None:
    assert [max_interval_for(s) for s in (0.2, 0.26, 0.412, 2.5, 100.0)] == [None, 0.1, 0.1, 1.0, 10.0]

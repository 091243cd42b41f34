"""History against slow, obvious reference code, and in the situations that break ring buffers."""

from __future__ import annotations

import math
import random
import threading
from collections.abc import Mapping, Sequence

import numpy as np
import psutil
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from gputop.core.metrics import GPU_METRICS, LANE_METRICS, LEVELS, TENSOR_FLOP_PARTS, TENSOR_FLOP_UTIL
from gputop.core.samples import LOST, GpuInfo, GpuProcess, GpuSample, HostSample, NodeSample, ProcessSample, Reading
from gputop.telemetry.history import HOST_HISTORY_POINTS, RAW_SAMPLES, TIERS, History, Lane
from tests.fakes import cgroup_sample, node_sample
from tests.waiting import PATIENCE_S

START_S = 1_800_000_000.0
SMALL = {"raw_samples": 60, "tiers": ((1.0, 50), (10.0, 15), (60.0, 6))}
GIB = 2.0**30
Row = tuple[float, float, float]  # time, value, full scale; NaN is missing


def gpu(uuid: str, values: Mapping[str, float | None], **more: object) -> GpuSample:
    readings = {m: Reading(v, GPU_METRICS[m].unit) if v is not None and v == v
                else Reading.missing(GPU_METRICS[m].unit, "the test says so") for m, v in values.items()}
    return GpuSample(GpuInfo(0, uuid, "test"), readings, **more)  # type: ignore[arg-type]


def node(time_s: float, *gpus: GpuSample) -> NodeSample:
    return NodeSample(time_s, gpus, HostSample("test", {}))


def one(time_s: float, value: float | None, metric: str = "sm_active") -> NodeSample:
    return node(time_s, gpu("GPU-a", {metric: value}))


def reference(rows: Sequence[Row], first: int, slice_s: float, slices: int) -> list[dict[str, object]]:
    out = []
    for number in range(first, first + slices):
        here = [(v, scale) for t, v, scale in rows if math.floor(t / slice_s) == number and v == v]
        values = [v for v, _ in here]
        scaled = [(v, scale) for v, scale in here if scale == scale]
        levels = [0.0] * LEVELS
        for v, scale in scaled:
            level = int(np.float32(v) / np.float32(scale) * LEVELS)
            levels[max(0, min(LEVELS - 1, level))] += 1 / len(scaled)
        out.append({
            "count": len(values), "mean": sum(values) / len(values) if values else math.nan,
            "levels": levels,
        })
    return out


def assert_same(lane: Lane, expected: Sequence[Mapping[str, object]]) -> None:
    assert lane.count == [e["count"] for e in expected]
    for name in ("mean", "levels"):
        got = getattr(lane, name)
        np.testing.assert_allclose(got, np.array([e[name] for e in expected]), rtol=3e-5, atol=1e-7, err_msg=name)


def ticks(seed: int, count: int, gaps: bool = True) -> list[float]:
    """Times on a grid of 1/8 s, so that no slice boundary is a matter of rounding."""
    rng = random.Random(seed)
    time, out = 0, []
    for _ in range(count):
        time += rng.choice([1, 1, 1, 2, 3, 8]) if not gaps or rng.random() < 0.97 else rng.randrange(40, 600)
        out.append(START_S + time / 8)
    return out


def fill(history: History, times: Sequence[float], metric: str, seed: int) -> list[Row]:
    """Random readings with holes; returns what went in."""
    rng = random.Random(seed)
    scale_id = GPU_METRICS[metric].full_scale
    rows = []
    for time_s in times:
        value = math.nan if rng.random() < 0.1 else rng.random() * 1.1
        scale = {str: rng.choice([1.0, 1.0, 2.0, math.nan]), float: 1.0}.get(type(scale_id), math.nan)
        values = {metric: value}
        if isinstance(scale_id, str):
            values[scale_id] = scale
        history.append(node(time_s, gpu("GPU-other", {metric: 0.5}), gpu("GPU-a", values)))
        rows.append((time_s, value, scale if value == value else math.nan))
    return rows


@given(seed=st.integers(0, 10**6), count=st.integers(1, 60), slices=st.integers(1, 80),
       slice_s=st.sampled_from([0.125, 0.5, 1.0, 1.5, 2.0, 2.5, 7.0, 10.0, 60.0]),
       metric=st.sampled_from(["sm_active", "memory_used_bytes", "power_w"]), back=st.integers(0, 40))
def test_what_single_samples_hold_is_exact_at_any_slice(
        seed: int, count: int, slices: int, slice_s: float, metric: str, back: int) -> None:
    history = History(**SMALL)
    times = ticks(seed, count)
    rows = fill(history, times, metric, seed)
    last = math.floor(times[-1] / slice_s) - back
    lane = history.lane("GPU-a", metric, end_s=(last + 1) * slice_s, slice_s=slice_s, slices=slices)
    assert lane.start_s == pytest.approx([n * slice_s for n in range(last - slices + 1, last + 1)], abs=1e-6)
    assert_same(lane, reference(rows, last - slices + 1, slice_s, slices))


@given(seed=st.integers(0, 10**6), count=st.integers(61, 600),
       metric=st.sampled_from(["sm_active", "pcie_rx_bytes_per_s"]),
       tier=st.sampled_from(SMALL["tiers"]), parts=st.integers(1, 7), gaps=st.booleans())
def test_tiers_hold_the_same_as_the_samples_they_replace(
        seed: int, count: int, metric: str, tier: tuple[float, int], parts: int, gaps: bool) -> None:
    assume(parts < tier[1])  # a slice longer than what the tier keeps cannot be whole
    history = History(**SMALL)
    times = ticks(seed, count, gaps)
    rows = fill(history, times, metric, seed)
    slice_s = tier[0] * parts
    slices = max(1, (tier[1] - parts) // parts)  # as far back as this tier reaches
    last = math.floor(times[-1] / slice_s)
    lane = history.lane("GPU-a", metric, end_s=(last + 1) * slice_s, slice_s=slice_s, slices=slices)
    assert_same(lane, reference(rows, last - slices + 1, slice_s, slices))


def test_a_view_longer_than_the_fine_tier_takes_a_coarser_one_and_shows_it_in_each_slice() -> None:
    history = History(**SMALL)
    for i in range(100):
        history.append(one(START_S + i, (i // 10) / 10))
    lane = history.lane("GPU-a", "sm_active", end_s=START_S + 100, slice_s=2.0, slices=50)
    assert lane.resolution_s == 10.0
    np.testing.assert_allclose(lane.mean, [(i * 2 // 10) / 10 for i in range(50)], rtol=1e-6)
    np.testing.assert_allclose(np.sum(lane.levels, axis=1), 1.0)
    beyond = history.lane("GPU-a", "sm_active", end_s=START_S + 110, slice_s=2.0, slices=55)
    assert beyond.count[-5:] == [0] * 5  # the future is empty, also in the slice being filled


def test_slices_do_not_move_with_the_end() -> None:
    history = History(**SMALL)
    for i in range(40):
        history.append(one(START_S + i / 8, i / 40))
    whole = history.lane("GPU-a", "sm_active", end_s=START_S + 5, slice_s=0.5, slices=10)
    later = history.lane("GPU-a", "sm_active", end_s=START_S + 5.3, slice_s=0.5, slices=11)
    assert later.start_s[:-1] == whole.start_s
    assert later.mean[:-1] == whole.mean


def test_ticks_of_a_tenth_each_fall_into_a_slice_of_their_own() -> None:
    history = History(**SMALL)
    for i in range(60):
        history.append(one(START_S + i * 0.1, i / 60))
    lane = history.lane("GPU-a", "sm_active", end_s=START_S + 6.0, slice_s=0.1, slices=60)
    assert lane.count == [1] * 60
    np.testing.assert_allclose(lane.mean, np.arange(60) / 60, rtol=1e-6)


def test_the_estimate_of_the_tensor_cores_flops_is_that_of_the_samples() -> None:
    history = History(**SMALL)
    parts = [(0.5, 1.5e9, 2e9), (0.8, 2.2e9, 2e9), (0.5, None, 2e9), (0.5, 1.5e9, None), (0.5, 1.5e9, 0.0),
             (0.0, 1e9, 2e9)]
    samples = [node(START_S + i, gpu("GPU-a", dict(zip(TENSOR_FLOP_PARTS, values, strict=True))))
               for i, values in enumerate(parts)]
    for sample in samples:
        history.append(sample)
    kept = history.window("GPU-a", TENSOR_FLOP_UTIL, 100)[1]
    told = [sample.gpus[0][TENSOR_FLOP_UTIL].value for sample in samples]
    assert told == [pytest.approx(0.375), pytest.approx(0.88), None, None, None, 0.0]
    assert [None if math.isnan(v) else pytest.approx(v, rel=1e-6) for v in kept] == told
    lane = history.lane("GPU-a", TENSOR_FLOP_UTIL, end_s=START_S + 6, slice_s=1, slices=6)
    assert lane.full_scale == 1.0 and lane.count == [1, 1, 0, 0, 0, 1]


def test_what_is_not_a_number_does_not_spread() -> None:
    history = History(**SMALL)
    history.append(node(START_S, gpu("GPU-a", {"power_w": math.inf, "power_limit_w": 0.0})))
    history.append(node(START_S + 0.5, gpu("GPU-a", {"power_w": 300.0, "power_limit_w": 0.0})))
    lane = history.lane("GPU-a", "power_w", end_s=START_S + 1, slice_s=1.0, slices=1)
    assert (lane.count[0], lane.mean[0], lane.full_scale) == (1, 300.0, None)
    with pytest.raises(ValueError, match="must be finite"):
        history.append(one(math.nan, 0.5))


def test_scales_of_the_three_kinds() -> None:
    history = History(**SMALL)
    for i in range(4):
        history.append(node(START_S + i, gpu("GPU-a", {
            "temperature_c": 50.0, "memory_used_bytes": 10 * GIB, "memory_total_bytes": 80 * GIB,
            "nvlink_rx_bytes_per_s": 1e9 * (i + 1)})))
    ends = {"end_s": START_S + 4, "slice_s": 1.0, "slices": 4}
    assert history.lane("GPU-a", "temperature_c", **ends).full_scale == 100.0
    memory = history.lane("GPU-a", "memory_used_bytes", **ends)
    assert memory.full_scale == pytest.approx(80 * GIB)
    assert memory.levels[0] == [0, 1, 0, 0, 0, 0, 0, 0]
    link = history.lane("GPU-a", "nvlink_rx_bytes_per_s", **ends)
    assert link.full_scale == pytest.approx(4e9)
    assert np.argmax(link.levels, axis=1).tolist() == [2, 4, 6, 7]
    given_scale = history.lane("GPU-a", "nvlink_rx_bytes_per_s", full_scale=8e9, **ends)
    assert np.argmax(given_scale.levels, axis=1).tolist() == [1, 2, 3, 4]


def test_a_metric_without_a_scale_has_levels_beyond_the_single_samples_too() -> None:
    history = History(**SMALL)
    for i in range(200):
        history.append(one(START_S + i, 1.2e9 if i % 20 < 10 else 4e9, "nvlink_tx_bytes_per_s"))
    lane = history.lane("GPU-a", "nvlink_tx_bytes_per_s", end_s=START_S + 200, slice_s=20.0, slices=7)
    assert lane.resolution_s == 10.0
    assert lane.full_scale == 4e9
    np.testing.assert_allclose(lane.levels[-1], [0, 0, 0.5, 0, 0, 0, 0, 0.5])


def test_all_zero_is_the_lowest_level() -> None:
    history = History(**SMALL)
    history.append(one(START_S, 0.0, "nvlink_tx_bytes_per_s"))
    lane = history.lane("GPU-a", "nvlink_tx_bytes_per_s", end_s=START_S + 1, slice_s=1.0, slices=1)
    assert lane.levels == [[1, 0, 0, 0, 0, 0, 0, 0]]
    assert lane.full_scale is None


@pytest.mark.parametrize("back_s", [0.25, 7.0, 45.0, 500.0, 40_000.0])
def test_a_clock_set_back_forgets_the_future_and_goes_on(back_s: float) -> None:
    history = History(**SMALL)
    rows = [(START_S + i * 0.5, (i % 9) / 9, 1.0) for i in range(50)]
    for time_s, value, _ in rows:
        history.append(one(time_s, value))
    again_s = rows[-1][0] + 0.5 - back_s
    after = [(again_s + i * 0.5, (i % 7) / 7, 1.0) for i in range(80)]
    for time_s, value, _ in after:
        history.append(one(time_s, value))
    kept = [r for r in rows if r[0] < again_s] + after
    times, values = history.window("GPU-a", "sm_active", 20.0)
    wanted = [r for r in kept if r[0] >= kept[-1][0] - 20.0]
    assert times == [r[0] for r in wanted]
    np.testing.assert_allclose(values, [r[1] for r in wanted], rtol=1e-6)
    # Slices that hold none of the forgotten samples are exact.
    first, last = math.floor(again_s) + 1, math.floor(kept[-1][0])
    lane = history.lane("GPU-a", "sm_active", end_s=last + 1, slice_s=1.0, slices=last - first + 1)
    assert_same(lane, reference(kept, first, 1.0, last - first + 1))
    assert history.newest_s == kept[-1][0]


def test_a_jump_ahead_and_back_loses_only_the_jump() -> None:
    history = History(**SMALL)
    for i in range(10):
        history.append(one(START_S + i, 0.5))
    history.append(one(START_S + 1e7, 1.0))
    history.append(one(START_S + 10, 0.5))
    lane = history.lane("GPU-a", "sm_active", end_s=START_S + 11, slice_s=1.0, slices=12)
    assert sum(lane.count) >= 10  # the one row that the jump took may be among them
    assert np.nanmax(lane.mean) == 0.5
    assert history.window("GPU-a", "sm_active", 100)[1] == [0.5] * 10  # and the oldest, an hour before the jump


@settings(max_examples=40)
@given(steps=st.lists(st.tuples(st.floats(-100, 100), st.floats(0, 1)), min_size=1, max_size=150))
def test_any_sequence_of_times_leaves_sorted_consistent_data(steps: list[tuple[float, float]]) -> None:
    history = History(**SMALL)
    time_s = START_S
    for step_s, value in steps:
        time_s += step_s
        history.append(one(time_s, value))
    times, values = history.window("GPU-a", "sm_active", 1e6)
    assert times[-1] == time_s == history.newest_s
    assert (np.diff(times) >= 0).all() and len(times) == len(values) <= 60
    assert history.oldest_s is not None and history.oldest_s <= time_s
    for slice_s in (0.7, 1.0, 10.0):
        lane = history.lane("GPU-a", "sm_active", end_s=time_s + slice_s, slice_s=slice_s, slices=40)
        some = np.array(lane.count) > 0
        assert some.any()
        mean = np.array(lane.mean)[some]
        assert (mean >= -1e-6).all() and (mean <= 1 + 1e-6).all()
        np.testing.assert_allclose(np.sum(lane.levels, axis=1), some.astype(float), rtol=1e-5)


def test_a_gpu_that_comes_later_and_one_that_goes() -> None:
    history = History(**SMALL)
    for i in range(10):
        gpus = [gpu("GPU-a", {"sm_active": 0.25})] if i < 5 else [gpu("GPU-b", {"sm_active": 0.75})]
        history.append(node(START_S + i, *gpus))
    assert history.uuids == ("GPU-a", "GPU-b") and history.version == 10
    ends = {"end_s": START_S + 10, "slice_s": 1.0, "slices": 10}
    assert history.lane("GPU-a", "sm_active", **ends).count == [1] * 5 + [0] * 5
    assert history.lane("GPU-b", "sm_active", **ends).count == [0] * 5 + [1] * 5
    assert history.oldest_s == START_S


def test_before_the_first_sample_and_for_unknown_names() -> None:
    history = History(**SMALL)
    assert (history.newest_s, history.oldest_s, history.uuids, history.version) == (None, None, (), 0)
    lane = history.lane("GPU-a", "sm_active", end_s=START_S, slice_s=1.0, slices=3)
    assert lane.count == [0, 0, 0] and np.shape(lane.levels) == (3, LEVELS)
    assert history.window("GPU-none", "sm_active", 10) == ([], [])
    history.append(node(START_S))
    assert history.windows("sm_active", 10) == ([], []) and history.version == 1
    history.append(one(START_S, 0.5))
    with pytest.raises(KeyError):
        history.lane("GPU-a", "no such metric", end_s=START_S, slice_s=1.0, slices=1)
    with pytest.raises(ValueError, match="0 slices"):
        history.lane("GPU-a", "sm_active", end_s=START_S, slice_s=1.0, slices=0)
    with pytest.raises(ValueError, match="slices of"):
        history.lane("GPU-a", "sm_active", end_s=START_S, slice_s=math.nan, slices=1)


def test_window_ends_where_asked_and_is_a_copy() -> None:
    history = History(**SMALL)
    for i in range(100):
        history.append(one(START_S + i, i / 100))
    times, values = history.window("GPU-a", "sm_active", 5.0, end_s=START_S + 80)
    assert times == [START_S + i for i in range(75, 81)]
    values.clear()
    assert history.window("GPU-a", "sm_active", 0.0, end_s=START_S + 80)[1] == [np.float32(0.8)]
    assert history.window("GPU-a", "sm_active", 1000.0)[0][0] == START_S + 40  # single samples before are gone


def test_clock_events_and_holders() -> None:
    def sample(i: int, pids: Sequence[int], **more: object) -> NodeSample:
        none = Reading.missing("bytes", "the test says so")
        processes = tuple(GpuProcess(pid, "C", None, none, none) for pid in pids)
        return node(START_S + i, gpu("GPU-a", {}, processes=processes, **more))

    history = History(**SMALL)
    assert history.clock_event_share("GPU-a", ["power cap"], 10) is None
    for i in range(8):
        history.append(sample(i, [7] if i < 4 else [7, 8], clock_event_reasons=("power cap",) if i % 2 else ("idle",)))
    assert history.clock_event_share("GPU-a", ["power cap"], 7) == 0.5
    assert history.clock_event_share("GPU-a", ["power cap", "idle"], 7) == 1.0
    assert history.clock_event_share("GPU-a", ["thermal"], 7) == 0.0
    assert history.held_since("GPU-a", 7) == START_S and history.held_since("GPU-a", 8) == START_S + 4
    assert history.held_since("GPU-a", None) is None

    history.append(sample(8, [], processes_reason="no permission", clock_events_reason="not supported"))
    history.append(sample(9, [], state=LOST, message="gone"))
    assert history.held_since("GPU-a", 7) == START_S  # not seen is not gone
    assert history.clock_event_share("GPU-a", ["idle"], 1) is None
    assert history.last_ok_s("GPU-a") == START_S + 8
    history.append(sample(10, []))
    assert history.held_since("GPU-a", 7) is None and history.held_since("GPU-a", None) == START_S + 10


def test_reading_while_writing() -> None:
    """Each second has one value: a torn answer would mix two."""
    failed: list[BaseException] = []
    done = threading.Event()

    def read() -> None:
        try:
            while not done.is_set():
                newest_s = history.newest_s
                assert newest_s is not None
                lane = history.lane("GPU-a", "sm_active", end_s=newest_s + 1, slice_s=1.0, slices=20)
                if lane.resolution_s > 1:  # while this thread waited, the slices of a second were overwritten
                    continue
                some = np.array(lane.count) > 0
                mean, start_s = np.array(lane.mean)[some], np.array(lane.start_s)[some]
                np.testing.assert_allclose(mean, (start_s % 97) / 97, rtol=1e-5)
                times, values = history.window("GPU-a", "sm_active", 10)
                np.testing.assert_allclose(values, np.floor(times) % 97 / 97, rtol=1e-5)
        except BaseException as error:  # noqa: BLE001 - whatever it is, the test's thread shall see it
            failed.append(error)

    start = START_S - START_S % 97
    history = History(**SMALL)
    history.append(one(start, 0.0))
    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    for i in range(3000):
        history.append(one(start + i / 10, math.floor(start + i / 10) % 97 / 97))
    done.set()
    for reader in readers:
        reader.join(timeout=PATIENCE_S)
    assert not failed, failed[0]


def test_memory_is_bounded_and_taken_only_as_time_goes_on() -> None:
    assert RAW_SAMPLES >= 6000 and max(s * n for s, n in TIERS) >= 12 * 3600
    rng = random.Random(1)
    gpus = [gpu(f"GPU-{i}", {m: rng.random() for m in GPU_METRICS}) for i in range(16)]
    process = psutil.Process()
    before = process.memory_info().rss
    history = History(LANE_METRICS)
    history.append(node(START_S, *gpus))
    assert process.memory_info().rss - before < 2e6
    for i in range(1, 400):
        history.append(node(START_S + i * 300, *gpus))  # a day and more
    assert process.memory_info().rss - before < 16 * 1.7e6


def test_memory_is_nearly_level_after_an_hour() -> None:
    """A sample in ten seconds writes the same slices as ten, and the single samples are those of an hour, too."""
    history, process = History(), psutil.Process()
    gpus = [gpu(f"GPU-{i}", dict.fromkeys(GPU_METRICS, 0.5)) for i in range(16)]
    after = {}
    for i in range(10 * 360):
        history.append(node(START_S + i * 10, *gpus))
        after[i + 1] = process.memory_info().rss if (i + 1) % 360 == 0 else 0
    # 0.15 MB of each GPU's slices of a minute, 0.07 of its slices of ten seconds, and the host's points; the single
    # samples of ten hours take 0.25 more.
    assert after[3600] - after[360] < 16 * 0.3e6


def test_a_gpu_that_comes_when_samples_come_faster_has_the_newest_of_them_in_its_window() -> None:
    history = History(raw_samples=400, tiers=((60.0, 9),))
    for i in range(181):  # the 61 rows of an hour twice, then faster; the second GPU has been there for half an hour
        names = ("GPU-a", "GPU-b") if i >= 92 else ("GPU-a",)
        time_s = START_S + (60 * i if i < 122 else 7200 + i)
        history.append(node(time_s, *(gpu(name, {"sm_active": i / 200}) for name in names)))
    times, values = history.windows("sm_active", 3600.0)
    assert len(times) == 61 and values[1] == values[0] and values[0][-1] == pytest.approx(180 / 200)


# -- all GPUs at once, and the host ---------------------------------------------------------------

def test_a_full_scale_can_be_asked_for_as_a_window() -> None:
    history = History(**SMALL)
    for i in range(4):
        values = {"pcie_rx_bytes_per_s": 1e9, "pcie_max_bytes_per_s": None if i == 2 else 4e9 + i}
        history.append(node(START_S + i, gpu("GPU-a", values), *([gpu("GPU-b", values)] if i else [])))
    times, rates = history.windows("pcie_max_bytes_per_s", 2.0)
    assert [t - START_S for t in times] == [1, 2, 3] and np.shape(rates) == (2, 3)
    assert rates[0][0] == pytest.approx(4e9) and all(np.isnan(of[1]) for of in rates)
    with pytest.raises(KeyError):
        history.windows("memory_temperature_c", 2.0)


def test_the_host_is_kept_for_some_minutes() -> None:
    history = History(**SMALL)
    assert history.host(10.0) == []
    for i in range(HOST_HISTORY_POINTS + 5):
        cpu = Reading(0.5, "ratio") if i % 2 else Reading.missing("ratio", "the test says so")
        group = cgroup_sample(cpu_limit_cores=4.0, cpu_used_cores=1.0 if i % 2 else None, cpu_throttled_ratio=0.3)
        held = ProcessSample(7, "ana", "train", Reading(1.5, "count"), Reading(1.0, "bytes"), cgroup=group)
        sample = NodeSample(START_S + i, (), HostSample("test", {"cpu_ratio": cpu}, 2, (1.0, 0.1)), (held,))
        history.append(sample)
    last = history.host(1.0)
    assert [sample.time_s - START_S for sample in last] == [HOST_HISTORY_POINTS + 3, HOST_HISTORY_POINTS + 4]
    assert (last[0].cpu_ratio, last[1].cpu_ratio) == (0.5, None)
    assert last[0].full_cores == 1 and last[0].process_cores == {7: 1.5}
    assert [sample.process_granted_ratio for sample in last] == [{7: 0.25}, {}]
    assert last[1].process_throttled_ratio == {7: 0.3}
    assert len(history.host(1e9)) == HOST_HISTORY_POINTS
    assert history.host(1.0, end_s=START_S + 100)[-1].time_s == START_S + 100
    history.append(NodeSample(START_S + 50, (), HostSample("test", {})))  # the clock was set back
    points = history.host(1e9)
    assert points[-1].time_s == START_S + 50 and points[-1].full_cores is None and len(points) <= HOST_HISTORY_POINTS


def test_means_of_whole_slices_are_those_of_a_lane() -> None:
    history = History(raw_samples=50)
    assert history.slice_means("sm_active", 60.0, 3) == (0.0, [])
    for tick in range(400):
        if not 130 <= tick < 200:  # a whole minute without a sample
            history.append(node_sample(tick, 2))
    end_s, means = history.slice_means("sm_active", 60.0, 8)
    assert history.newest_s is not None and 0 <= history.newest_s - end_s < 60
    for gpu in range(2):
        lane = history.lane(history.uuids[gpu], "sm_active", end_s=end_s, slice_s=60.0, slices=8)
        assert means[gpu] == pytest.approx(lane.mean, nan_ok=True)
        assert sum(math.isnan(mean) for mean in means[gpu]) == sum(not count for count in lane.count) > 0
    assert all(math.isnan(mean) for mean in history.slice_means("sm_active", 7.0, 2)[1][0])


def test_the_lane_of_the_host_s_cpus_has_the_mean_of_each_slice() -> None:
    history = History(**SMALL)  # type: ignore[arg-type]
    for tick in range(20):
        ratio = Reading.missing("ratio", "the test says so") if tick == 3 else Reading(tick / 20, "ratio")
        history.append(NodeSample(START_S + tick, (), HostSample("test", {"cpu_ratio": ratio})))
    lane = history.host_cpu_lane(end_s=START_S + 20, slice_s=2.0, slices=12)
    assert lane.count == [0, 0, 2, 1, *[2] * 8] and lane.full_scale == 1.0
    assert lane.mean[2:5] == pytest.approx([0.025, 0.1, 0.225]) and lane.mean[-1] == pytest.approx(0.925)
    assert math.isnan(lane.mean[0]) and lane.levels[-1] == [0.0] * 7 + [1.0]


def test_missing_is_nan_and_never_zero() -> None:
    history = History(**SMALL)
    for i in range(5):
        history.append(one(START_S + i, None))
    lane = history.lane("GPU-a", "sm_active", end_s=START_S + 5, slice_s=1.0, slices=5)
    assert lane.count == [0] * 5
    assert np.isnan(lane.mean).all()
    assert not np.any(lane.levels)
    times, values = history.window("GPU-a", "sm_active", 60)
    assert len(times) == 5 and np.isnan(values).all()


def test_half_of_the_time_busy_is_not_half_busy() -> None:
    history = History(**SMALL)
    for i in range(20):
        history.append(node(START_S + i / 2, gpu("half the time", {"sm_active": float(i % 2)}),
                            gpu("half busy", {"sm_active": 0.5})))
    ends = {"end_s": START_S + 10, "slice_s": 10.0, "slices": 1}
    assert history.lane("half the time", "sm_active", **ends).levels == [[0.5, 0, 0, 0, 0, 0, 0, 0.5]]
    assert history.lane("half busy", "sm_active", **ends).levels == [[0, 0, 0, 0, 1, 0, 0, 0]]

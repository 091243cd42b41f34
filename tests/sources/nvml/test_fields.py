"""The table of NVML calls: what each gives, how often it is asked for, and what is implausible."""

from __future__ import annotations

import collections
import ctypes

import pynvml
import pytest

from gputop.core.metrics import COUNT, GPU_METRICS
from gputop.sources.nvml import status
from gputop.sources.nvml.fields import FIELDS
from gputop.sources.nvml.status import implausible_reason
from tests.nvml_fake import FakeNvml
from tests.sources.nvml.nodes import Node

SLOW = {
    "nvmlDeviceGetTotalEccErrors": 3 / 30.0,
    "nvmlDeviceGetRemappedRows": 1 / 30.0,
    "nvmlDeviceGetEnforcedPowerLimit": 1 / 10.0,
    "nvmlDeviceGetTemperatureThreshold": 1 / 10.0,
    "nvmlDeviceGetMaxClockInfo": 2 / 10.0,
    "field:82": 1 / 5.0,
    "nvmlDeviceGetEncoderUtilization": 1 / 2.0,
}  # calls per second of one GPU


def test_each_metric_of_the_table_is_in_its_unit(fake: FakeNvml) -> None:
    node = Node(
        fake, "gpus 1", "set memory_temperature 71", "set slowdown_temperature 87", "set encoder 11", "set decoder 22",
        "set ecc_corrected 5", "set ecc_uncorrected 2", "set ecc_uncorrected_lifetime 9", "set row_remap_pending 1",
        "set rows_remapped_corrected 3", "set rows_remapped_uncorrected 4")
    sample = node.sample()
    expected = {
        "memory_temperature_c": 71, "temperature_slowdown_c": 87, "encoder_util": 0.11, "decoder_util": 0.22,
        "ecc_corrected": 5, "ecc_uncorrected": 2, "ecc_uncorrected_lifetime": 9, "rows_remapped": 7,
        "row_remap_pending": 1, "row_remap_failed": 0}
    assert {metric: sample[metric].value for metric in expected} == expected
    assert {m for field in FIELDS for m in field.metrics} <= sample.readings.keys() <= GPU_METRICS.keys()


def test_power_of_the_moment_comes_before_its_average(fake: FakeNvml) -> None:
    settings = ("gpus 1", "set power_w 431", "set power_average_w 300")
    sample = Node(fake, *settings).sample()
    assert (sample["power_w"].value, sample["power_w"].source) == (431, "NVML, instant")
    assert fake.calls("nvmlDeviceGetPowerUsage") == fake.calls("field:185") == 0
    # A driver that does not know the field says that it is an invalid argument.
    sample = Node(fake, *settings, "refuse field:186 2").sample()
    assert sample["power_w"].value == 300
    assert "average" in sample["power_w"].source


def test_a_call_that_never_worked_gives_way_to_the_older_one(fake: FakeNvml) -> None:
    node = Node(fake, "gpus 1", "set power_average_w 300", "refuse field:186 999")
    powers = [node.sample(after_s=1.0)["power_w"].value for _ in range(4)]
    assert powers == [None, None, 300, 300]
    node = Node(fake, "gpus 1", "set power_w 431", "fault field:186 0 2 1 code 999")
    powers = [node.sample(after_s=1.0)["power_w"].value for _ in range(6)]
    assert powers == [431, None, None, None, None, None], "one that did work may come back"


def test_the_busier_decoder_counts(fake: FakeNvml) -> None:
    sample = Node(fake, "gpus 1", "set decoder 22", "set jpeg 80").sample()
    assert sample["decoder_util"].value == 0.8
    node = Node(fake, "gpus 1", "set decoder 22", "refuse nvmlDeviceGetJpgUtilization 3")
    sample = node.sample(after_s=2.0, times=5)
    assert sample["decoder_util"].value == 0.22
    assert fake.calls("nvmlDeviceGetJpgUtilization") == 1


@pytest.mark.parametrize(("call", "metric", "words"), [
    ("nvmlDeviceGetTotalEccErrors", "ecc_uncorrected", "ECC is off or not available on this board"),
    ("nvmlDeviceGetRemappedRows", "row_remap_failed", "does not support row remapping"),
    ("field:82", "memory_temperature_c", "field value 82"),
])
def test_what_a_board_lacks_is_said_and_asked_for_once(fake: FakeNvml, call: str, metric: str, words: str) -> None:
    node = Node(fake, "gpus 1", f"refuse {call} 3")
    calls = []
    for _ in range(3):
        sample = node.sample(after_s=31.0)
        calls.append(fake.calls(call))
    assert words in (sample[metric].reason or "")
    assert len(set(calls)) == 1


def test_slow_calls_keep_their_periods_and_do_not_fall_on_one_tick(fake: FakeNvml) -> None:
    node = Node(fake)
    node.samples()

    def count() -> collections.Counter[str]:
        return collections.Counter({call: sum(fake.calls(call, gpu) for gpu in range(8)) for call in SLOW})

    start, ticks = count(), []
    before = start
    for _ in range(600):  # a minute at 10 Hz
        node.samples(0.1)
        now = count()
        ticks.append((now - before).total())
        before = now
    for call, per_s in SLOW.items():
        assert (before - start)[call] == pytest.approx(60 * 8 * per_s, rel=0.2), call
    mean = sum(ticks) / len(ticks)
    assert max(ticks) <= 5 * mean, f"{max(ticks)} slow calls in a tick, {mean:.1f} on average"


def test_a_value_that_stays_is_not_made_anew(fake: FakeNvml) -> None:
    node = Node(fake, "gpus 1", "set util 73", "set power_w 431")
    first, second = node.sample(), node.sample(after_s=1.0)
    assert first["gpu_util"] is second["gpu_util"]
    assert first["power_w"] is second["power_w"]
    assert first["temperature_c"] is not second["temperature_c"]
    assert first.readings is not second.readings


@pytest.mark.parametrize(("metric", "value"), [
    ("gpu_util", 1.06), ("gpu_util", -0.01), ("sm_active", float("nan")), ("sm_active", 1e-120),
    ("temperature_c", 201.0), ("temperature_c", -51.0), ("power_w", 10_001.0), ("power_limit_w", 0.0),
    ("sm_clock_hz", 10.1e9), ("memory_used_bytes", float(65 << 40)), ("memory_total_bytes", 0.0),
    ("ecc_corrected", 4294967295.0), ("pcie_width", 255.0), ("row_remap_pending", 2.0),
    ("nvlink_rx_bytes_per_s", float("inf")), ("rows_remapped", 630_949_523.0), ("rows_remapped", 8193.0),
    ("ecc_uncorrected", 1_000_001.0), ("ecc_uncorrected_lifetime", 630_949_523.0),
])
def test_what_cannot_be_is_not_believed(metric: str, value: float) -> None:
    assert "impossible" in (implausible_reason(metric, value) or "")


@pytest.mark.parametrize(("metric", "value"), [
    ("gpu_util", 1.0), ("sm_active", 1.04), ("temperature_c", 95.0),
    ("power_w", 0.0), ("ecc_corrected", 70000.0), ("pcie_gen", 6.0), ("rows_remapped", 512.0),
    ("ecc_uncorrected", 3000.0), ("ecc_uncorrected_lifetime", 70000.0),
])
def test_what_is_rare_is_believed(metric: str, value: float) -> None:
    assert implausible_reason(metric, value) is None


def test_each_count_has_limits_of_its_own() -> None:
    assert {metric.id for metric in GPU_METRICS.values() if metric.unit == COUNT} <= status._BY_METRIC.keys()


def test_the_doubles_garbage_is_that_of_the_function_and_the_call(fake: FakeNvml) -> None:
    """A new call before it changes none of it: else what a test gets depends on what else gputop asks."""
    def power(*before: str) -> list[int]:
        fake.configure("gpus 1")
        pynvml.nvmlInit()
        handle = ctypes.c_void_p()
        assert fake._library.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(handle)) == 0
        fake.change("fault * 0 1 1 garbage random")
        found, other = ctypes.c_uint(), (ctypes.c_uint * 64)()
        for function in before:
            getattr(fake._library, function)(handle, ctypes.byref(other))
        answers = []
        for _ in range(3):
            assert fake._library.nvmlDeviceGetPowerUsage(handle, ctypes.byref(found)) == 0
            answers.append(found.value)
        return answers

    alone = power()
    assert power("nvmlDeviceGetUtilizationRates", "nvmlDeviceGetEnforcedPowerLimit") == alone
    assert len({*alone}) == 3

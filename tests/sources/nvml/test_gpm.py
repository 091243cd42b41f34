"""GPM and the PCIe ladder, over the fake driver library with its clock in the test's hand."""

from __future__ import annotations

import pytest

from gputop.core.samples import Reading
from gputop.sources.nvml import gpm, traffic
from gputop.sources.nvml.gpm import GPM_ONLY_METRICS
from tests.nvml_fake import FakeNvml
from tests.sources.nvml.nodes import Node

MIB = 1 << 20
RX, TX = "pcie_rx_bytes_per_s", "pcie_tx_bytes_per_s"


class OneGpu(Node):
    def __init__(self, fake: FakeNvml, *settings: str) -> None:
        super().__init__(fake, "gpus 1", *settings)


def near(reading: Reading, value: float) -> bool:
    return reading.value is not None and reading.value == pytest.approx(value, rel=1e-6)


def test_the_first_sample_has_no_value_and_says_why(fake: FakeNvml) -> None:
    sample = OneGpu(fake).sample()
    for _, metric, _ in gpm.METRICS:
        assert sample[metric].reason == gpm.FIRST


def test_units_and_directions(fake: FakeNvml) -> None:
    node = OneGpu(fake, "set sm_active 62.5", "set pcie_tx_mib 100", "set pcie_rx_mib 2000", "set nvlink_tx_mib 3000",
                  "set nvlink_rx_mib 4000")
    sample = node.sample(after_s=1.0, times=2)
    assert near(sample["sm_active"], 0.625)
    assert near(sample[TX], 100 * MIB)
    assert near(sample[RX], 2000 * MIB)
    assert near(sample["nvlink_tx_bytes_per_s"], 3000 * MIB)
    assert near(sample["nvlink_rx_bytes_per_s"], 4000 * MIB)
    assert {sample[m].source for _, m, _ in gpm.METRICS} == {"GPM"}
    assert sample.activity()[0] == "sm_active"


def test_the_tensor_cores_flops_are_an_estimate_from_what_was_read(fake: FakeNvml) -> None:
    node = OneGpu(fake, "set sm_clock 1485", "set sm_clock_max 1980")
    assert node.sample()["tensor_flop_util"].reason == f"Tensor active: {gpm.FIRST}"
    sample = node.sample(after_s=1.0)
    active = sample["tensor_active"].value
    assert active and near(sample["tensor_flop_util"], 0.75 * active)
    assert sample["tensor_flop_util"].source == "estimate from GPM, NVML"


def test_without_its_highest_clock_there_is_no_estimate_of_the_tensor_cores_flops(fake: FakeNvml) -> None:
    node = OneGpu(fake, "refuse nvmlDeviceGetMaxClockInfo 3")
    node.sample()
    assert (node.sample(after_s=1.0)["tensor_flop_util"].reason or "").startswith("SM clock max: ")


def test_each_sample_covers_the_time_since_the_last(fake: FakeNvml) -> None:
    node = OneGpu(fake, "set pcie_rx_mib 1000")
    for after_s in (0.0, 1.0, 0.5, 2.0):
        sample = node.sample(after_s=after_s)
    assert near(sample[RX], 1000 * MIB)
    assert fake.calls("nvmlGpmSampleGet") == 4


def test_samples_closer_than_100_ms_repeat_the_last_value_instead_of_0(fake: FakeNvml) -> None:
    node = OneGpu(fake, "set pcie_rx_mib 1000")
    node.sample()
    value = node.sample(after_s=1.0)[RX]
    assert node.sample(after_s=0.05)[RX] == value
    assert fake.calls("nvmlGpmSampleGet") == 2
    assert near(node.sample(after_s=0.06)[RX], 1000 * MIB)


def test_rounding_above_100_percent_is_capped(fake: FakeNvml) -> None:
    node = OneGpu(fake, "set sm_active 100.3")
    node.sample()
    assert node.sample(after_s=1.0)["sm_active"].value == 1.0


def test_a_refused_metric_is_pruned_alone(fake: FakeNvml) -> None:
    node = OneGpu(fake, "refuse gpm:5 3", "set sm_active 50")
    node.sample()
    for _ in range(2):
        sample = node.sample(after_s=1.0)
        assert "not supported" in (sample["tensor_active"].reason or "")
        assert near(sample["sm_active"], 0.5)
    assert fake.calls("gpm:5") == 1


@pytest.mark.parametrize("settings", [("gpm 0",), ("refuse gpm:60 3", "refuse gpm:61 3")])
def test_nvlink_without_gpm_comes_from_the_counters_of_all_links(fake: FakeNvml, settings: tuple[str, ...]) -> None:
    node = OneGpu(fake, *settings, "set nvlink_tx_mib 30000", "set nvlink_rx_mib 40000")
    sample = node.sample(after_s=1.0, times=3)
    assert near(sample["nvlink_tx_bytes_per_s"], 30000 * MIB)
    assert near(sample["nvlink_rx_bytes_per_s"], 40000 * MIB)
    assert sample["nvlink_rx_bytes_per_s"].source == traffic.SOURCE


def test_nvlink_that_nothing_gives_names_both_refusals_and_is_asked_for_once(fake: FakeNvml) -> None:
    node = OneGpu(fake, "refuse gpm:60 3", "refuse gpm:61 3", "refuse field:138 3")
    sample = node.sample(after_s=1.0, times=4)
    why = sample["nvlink_rx_bytes_per_s"].reason or ""
    assert "GPM metric 60" in why and "138/139" in why
    assert fake.calls("field:138") == 1


def test_a_damaged_answer_does_not_change_what_is_asked_for(fake: FakeNvml) -> None:
    node = OneGpu(fake, "set sm_active 50", "fault nvmlGpmMetricsGet 0 1 2 garbage ff")
    node.sample()
    for _ in range(2):
        assert node.sample(after_s=1.0)["sm_active"].value is None
        assert near(node.sample(after_s=1.0)["sm_active"], 0.5)


@pytest.mark.parametrize("pattern", ["ff", "a5", "random"])
def test_a_counter_that_cannot_be_is_no_rate(fake: FakeNvml, pattern: str) -> None:
    node = OneGpu(fake, "gpm 0", "set pcie_rx_mib 100", f"fault field:198 0 3 2 garbage {pattern}")
    rates = [node.sample(after_s=1.0)[RX] for _ in range(9)]
    assert rates[1].value is not None
    assert all(rate.value is None or near(rate, 100 * MIB) for rate in rates)
    assert "impossible" in (rates[2].reason or "")


def test_a_metric_without_data_comes_back(fake: FakeNvml) -> None:
    node = OneGpu(fake, "refuse gpm:2 21", "set sm_active 50")
    node.sample()
    assert node.sample(after_s=1.0)["sm_active"].reason
    fake.allow_everything()
    assert near(node.sample(after_s=1.0)["sm_active"], 0.5)


@pytest.mark.parametrize(("settings", "word"), [
    (("gpm 0",), "Hopper"),
    (("refuse nvmlGpmQueryDeviceSupport 13",), "R520"),
    (("refuse nvmlGpmSampleGet 4",), "permission"),
    (("set mig 1", "refuse nvmlGpmSampleGet 3"), "MIG"),
])
def test_without_gpm_the_reason_says_what_would_give_it(fake: FakeNvml, settings: tuple[str, ...], word: str) -> None:
    node = OneGpu(fake, *settings, "set util 80")
    sample = node.sample(after_s=1.0, times=2)
    for metric in GPM_ONLY_METRICS:
        assert word in (sample[metric].reason or "")
    assert sample.activity() == ("gpu_util", Reading(0.8, "ratio", "NVML", coarse=True))
    assert "GPM" not in node.source.label
    assert sample[RX].source == traffic.SOURCE


# -- the PCIe ladder ---------------------------------------------------------------------------


def test_counters_give_rates_in_their_directions(fake: FakeNvml) -> None:
    node = OneGpu(fake, "gpm 0", "set pcie_tx_mib 100", "set pcie_rx_mib 2000")
    assert "needs two" in (node.sample()[RX].reason or "")
    sample = node.sample(after_s=2.0)
    assert near(sample[TX], 100 * MIB)
    assert near(sample[RX], 2000 * MIB)
    assert fake.calls("nvmlDeviceGetPcieThroughput") == 0


@pytest.mark.parametrize(("bits", "seconds"), [(32, 50), (33, 100)], ids=["32 bits", "32 bits in a field of 64"])
def test_a_32_bit_counter_wraps(fake: FakeNvml, bits: int, seconds: int) -> None:
    # 1.0 x1: 250 MB/s, so that a second cannot hold more than one wrap.
    slow_link = ("set pcie_gen 1", "set pcie_width 1", "set pcie_tx_mib 10", "set pcie_rx_mib 100")
    node = OneGpu(fake, "gpm 0", f"set counter_bits {bits}", *slow_link)
    # 1000 s * 100 MiB/s: each 40.96 s are a wrap.
    rates = [node.sample(after_s=1.0)[RX] for _ in range(seconds)]
    assert all(near(rate, 100 * MIB) for rate in rates[1:])


def test_a_32_bit_counter_on_a_fast_link_is_not_trusted(fake: FakeNvml) -> None:
    node = OneGpu(fake, "gpm 0", "set counter_bits 32", "set pcie_rx_mib 9000", "set pcie_tx_mib 1")
    sample = node.sample(after_s=1.0, times=2)
    assert sample[RX].value is None
    sample = node.sample(after_s=1.0)
    assert sample[RX].source == traffic.WINDOW
    assert sample[RX].value == pytest.approx(9000 * MIB, rel=1e-3)


def test_traffic_faster_than_an_idle_link_of_unknown_maximum_is_believed(fake: FakeNvml) -> None:
    unknown = ("refuse nvmlDeviceGetMaxPcieLinkGeneration 3", "refuse nvmlDeviceGetMaxPcieLinkWidth 3")
    node = OneGpu(fake, "gpm 0", *unknown, "set pcie_gen 1", "set pcie_width 1", "set pcie_rx_mib 9000")
    node.sample()
    assert near(node.sample(after_s=1.0)[RX], 9000 * MIB)


def test_a_restarted_counter_is_no_traffic(fake: FakeNvml) -> None:
    node = OneGpu(fake, "gpm 0", "set counter_start 9007199254740992", "set pcie_rx_mib 100")
    node.sample()
    fake.change("set counter_start 0")
    assert "restarted" in (node.sample(after_s=1.0)[RX].reason or "")
    assert near(node.sample(after_s=1.0)[RX], 100 * MIB)


@pytest.mark.parametrize(("code", "tries"), [(6, 1), (999, 3), (21, 3)])
def test_counters_that_are_not_there_do_not_keep_the_call_from_being_tried(
        fake: FakeNvml, code: int, tries: int) -> None:
    """Drivers answer NOT_FOUND for a field that the GPU lacks; and one that never gives a value has not got it."""
    node = OneGpu(fake, "gpm 0", f"refuse field:197 {code}", f"refuse field:198 {code}", "set pcie_rx_mib 1500")
    readings = [node.sample(after_s=1.0)[RX] for _ in range(tries + 1)]
    assert near(readings[-1], 1500 * MIB) and readings[-1].source == traffic.WINDOW
    assert fake.calls("field:197") == tries


def test_counters_that_worked_are_not_given_up_for_a_fault_that_passes(fake: FakeNvml) -> None:
    node = OneGpu(fake, "gpm 0", "set pcie_rx_mib 100")
    node.sample()
    fake.change("refuse field:197 999")
    assert all("unknown error" in (node.sample(after_s=1.0)[RX].reason or "") for _ in range(5))
    fake.allow_everything()
    assert near(node.sample(after_s=1.0)[RX], 100 * MIB) and not fake.calls("nvmlDeviceGetPcieThroughput")


def test_the_20_ms_call_is_the_last_resort_and_rare(fake: FakeNvml) -> None:
    node = OneGpu(fake, "gpm 0", "refuse field:197 3", "refuse field:198 3", "set pcie_rx_mib 1500")
    assert node.sample()[RX].value is None
    assert fake.calls("nvmlDeviceGetPcieThroughput") == 0, "the first frame must not wait for it"
    sample = node.sample(after_s=1.0, times=10)
    assert sample[RX].source == traffic.WINDOW
    assert sample[RX].coarse
    assert sample[RX].value == pytest.approx(1500 * MIB, rel=1e-3)
    assert fake.calls("nvmlDeviceGetPcieThroughput") == 2 * 2
    assert fake.calls("field:197") == 1


def test_counters_are_read_once_a_second_however_fast_the_ticks(fake: FakeNvml) -> None:
    node = OneGpu(fake, "gpm 0", "set pcie_rx_mib 2000")
    sample = node.sample(after_s=0.1, times=50)
    assert near(sample[RX], 2000 * MIB)
    assert 5 <= fake.calls("field:198") <= 7


def test_no_way_at_all_names_every_refusal(fake: FakeNvml) -> None:
    node = OneGpu(fake, "gpm 0", "refuse nvmlDeviceGetFieldValues 13", "refuse nvmlDeviceGetPcieThroughput 3")
    node.sample()
    node.sample(after_s=1.0)
    why = node.sample(after_s=1.0)[RX].reason or ""
    assert "197/198" in why
    assert "nvmlDeviceGetPcieThroughput" in why
    assert fake.calls("nvmlDeviceGetPcieThroughput") == 1


@pytest.mark.parametrize(("generation", "lanes", "bytes_per_s"), [
    (1, 1, 0.25e9), (2, 16, 8e9), (3, 16, 15.75e9), (4, 16, 31.51e9), (5, 16, 63.02e9), (9, 16, None)])
def test_link_rates(generation: int, lanes: int, bytes_per_s: float | None) -> None:
    assert traffic.link_bytes_per_s(generation, lanes) == (bytes_per_s and pytest.approx(bytes_per_s, rel=1e-3))


def test_an_unknown_generation_has_no_rate() -> None:
    assert traffic.link_bytes_per_s(9, 16) is None

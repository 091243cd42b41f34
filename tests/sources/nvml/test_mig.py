"""MIG instances as devices of their own, over the fake driver library."""

from __future__ import annotations

from gputop.core.metrics import GPU_METRICS, TENSOR_FLOP_UTIL
from gputop.core.samples import FAILED, LOST, OK
from gputop.sources.nvml.mig import CHECK_PERIOD_S
from tests.nvml_fake import FakeNvml
from tests.sources.nvml.nodes import Node

MIB = 1 << 20
# GPU 0 in two parts, GPU 1 whole. The instances are GPUs 16 and 17 to the other settings.
DIVIDED = ("gpus 2", "mig 0 0 9 1g.10gb 9728", "mig 0 1 2 3g.40gb 40192", "process 16 500 2048 C -1")


def divided(fake: FakeNvml, *settings: str, gpus: tuple[str, ...] = ()) -> Node:
    return Node(fake, *DIVIDED, *settings, gpus=gpus)


def test_a_divided_gpu_is_followed_by_its_instances(fake: FakeNvml) -> None:
    infos = [probe.info for probe in divided(fake).gpus]
    assert [info.label for info in infos] == ["0", "0:0", "0:1", "1"]
    assert [info.mig_mode for info in infos] == [True, False, False, False]
    assert infos[1].uuid.startswith("MIG-")
    assert infos[2].name == "NVIDIA H100 80GB HBM3 MIG 3g.40gb"
    assert infos[1].pci_bus_id == infos[0].pci_bus_id
    assert divided(fake, gpus=("1", "MIG-7e570000")).labels == ["0:0", "1"]


def test_what_the_board_has_and_what_the_instance_has(fake: FakeNvml) -> None:
    node = divided(fake, "set sm_active 40 16", "set power_w 300 0")
    node.samples()
    board, small, large, whole = node.samples(1)
    assert board["power_w"].value == 300
    assert board["sm_active"].reason == "partitioned into MIG instances: see 0:0, 0:1"
    assert small["memory_total_bytes"].value == 9728 * MIB
    assert small["memory_used_bytes"].value == 9728 * MIB / 4
    assert abs((small["sm_active"].value or 0) - 0.4) < 1e-9 and small["sm_active"].source == "GPM"
    for metric in ("power_w", "temperature_c", "pcie_rx_bytes_per_s", "nvlink_tx_bytes_per_s", "sm_clock_hz"):
        assert small[metric].reason == "measured for the whole GPU: see GPU 0", metric
    assert small.clock_events_reason == "measured for the whole GPU: see GPU 0"
    assert "MIG" in (small["gpu_util"].reason or "")
    assert small.readings.keys() == GPU_METRICS.keys() - {TENSOR_FLOP_UTIL}
    assert small[TENSOR_FLOP_UTIL].reason == "SM clock: measured for the whole GPU: see GPU 0"
    assert (small.state, large.state, board.state, whole.state) == (OK, OK, OK, OK)
    assert whole["sm_active"].value is not None
    assert node.source.label.startswith("NVML + GPM")


def test_processes_are_listed_with_the_instance_only(fake: FakeNvml) -> None:
    node = divided(fake, "process 0 500 2048 C -1")
    board, small, large, _ = node.samples()
    assert board.processes == ()
    assert "0:0, 0:1" in (board.processes_reason or "")
    (process,) = small.processes
    assert (process.pid, process.mig, process.memory_bytes.value) == (500, 0, 2048 * MIB)
    assert process.sm_ratio.reason
    assert large.processes == () and large.processes_reason is None
    assert node.sample(1).processes is small.processes  # made once for a list


def test_an_instance_that_is_destroyed_says_so_and_the_rest_goes_on(fake: FakeNvml) -> None:
    node = divided(fake)
    node.samples()
    fake.change("unmig 0 0")
    samples = node.samples(1)
    assert [s.state for s in samples] == [OK, FAILED, OK, OK]
    assert "0:0 no longer exists" in samples[1].message and "Restart gputop" in samples[1].message
    assert node.sample(1) is samples[1]
    node.source.close()


def test_an_instance_that_was_replaced_is_found_out(fake: FakeNvml) -> None:
    node = divided(fake)
    fake.change("unmig 0 0")
    fake.change("mig 0 0 7 1g.10gb 9728")  # has the same number and the same handle, so no call fails
    assert node.sample(1, after_s=1).state == OK
    assert node.sample(1, after_s=CHECK_PERIOD_S).state == FAILED


def test_a_check_that_fails_for_another_reason_ends_nothing(fake: FakeNvml) -> None:
    node = divided(fake)
    fake.change("fault nvmlDeviceGetMigDeviceHandleByIndex 0 1 1 code 999")
    assert node.sample(1, after_s=CHECK_PERIOD_S + 1).state == OK


def test_memory_that_may_not_be_read_is_a_reason_not_the_end(fake: FakeNvml) -> None:
    node = divided(fake, "refuse nvmlDeviceGetMemoryInfo_v2 13 16", "refuse nvmlDeviceGetMemoryInfo 4 16")
    sample = node.sample(1, after_s=1, times=3)
    assert sample.state == OK
    assert "no permission" in (sample["memory_used_bytes"].reason or "")
    assert fake.calls("nvmlDeviceGetMemoryInfo", 16) == 1


def test_without_gpm_the_activity_is_missing_with_the_reason(fake: FakeNvml) -> None:
    sample = divided(fake, "gpm 0").sample(1)
    assert "no GPM" in (sample["sm_active"].reason or "")
    node = divided(fake, "refuse nvmlGpmMigSampleGet 4 16")
    sample = node.sample(1)
    assert sample.state == OK and "no permission" in (sample["sm_active"].reason or "")
    node.sample(1, after_s=1)
    assert fake.calls("nvmlGpmMigSampleGet", 16) == 1


def test_a_lost_board_takes_its_instances_with_it(fake: FakeNvml) -> None:
    node = divided(fake)
    fake.change("fault * 16 1 1 code 15")
    assert node.sample(1, after_s=1).state == LOST
    node.source.close()


def test_a_container_sees_its_own_instance_only(fake: FakeNvml) -> None:
    assert Node(fake, "gpus 1", "mig 0 3 9 1g.10gb 9728").labels == ["0", "0:3"]


def test_mig_mode_without_an_instance(fake: FakeNvml) -> None:
    node = Node(fake, "gpus 1", "set mig 1")
    (sample,) = node.samples()
    assert sample.info.mig_mode and "mig -lgi" in (sample["sm_active"].reason or "")
    node = divided(fake, "refuse nvmlDeviceGetMaxMigDeviceCount 4")
    assert node.labels == ["0", "1"]


def test_a_gpu_lost_during_the_search_for_its_instances(fake: FakeNvml) -> None:
    node = divided(fake, "refuse nvmlDeviceGetMigDeviceHandleByIndex 15 0")
    assert [sample.state for sample in node.samples()] == [LOST, OK]


def test_a_driver_that_leaves_the_profile_out_of_the_name(fake: FakeNvml) -> None:
    fake_name = "fault nvmlDeviceGetName 16 1 1 garbage 41"  # "AAAA…", no profile in it
    node = divided(fake, fake_name)
    assert node.gpus[1].info.name == "NVIDIA H100 80GB HBM3 MIG 1g.10gb"


def test_gpus_names_an_instance_or_the_whole_gpu(fake: FakeNvml) -> None:
    def chosen(*gpus: str) -> list[str]:
        return divided(fake, gpus=gpus).labels

    assert chosen("0") == ["0", "0:0", "0:1"]
    assert chosen("0:1") == ["0:1"]
    assert chosen("MIG-7e570000") == ["0:0"]
    assert chosen("1", "0:0") == ["0:0", "1"]

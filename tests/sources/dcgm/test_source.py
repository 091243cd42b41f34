"""``--source dcgm``: GPUs as a host engine lists them, against the contract double."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gputop.core.errors import EXIT_NO_DATA, GputopError
from gputop.core.metrics import GPU_METRICS, HOST_METRICS
from gputop.core.samples import FAILED, LOST, OK, GpuSample, Reading, XidEvent
from gputop.sources.dcgm import fields
from gputop.sources.dcgm.connection import Address
from gputop.sources.dcgm.engine_reader import REFUSED_RETRY_S
from gputop.sources.dcgm.source import DcgmSource
from tests.dcgm_double import PROFILING
from tests.dcgm_double.scene import Scene
from tests.waiting import PATIENCE_S


class Node(Scene):
    """The scene with a source on it."""

    source: DcgmSource

    def open(self, *gpus: str, watch: bool = False) -> None:
        self.source = DcgmSource(self.client, gpus, watch=watch, root=self.root)
        self.source.open()

    def sample(self, gpu: int = 0, after_s: float = 1.0, times: int = 1) -> GpuSample:
        """The last of some ticks, the answer of the engine awaited."""
        for _ in range(times):
            self.now_s += after_s
            if self.engine.alive:
                self.engine.update()
            self.client.request_update(self.now_s)
            assert self.client.wait(PATIENCE_S)
            sample = self.source.gpus[gpu].read(self.now_s)
        return sample

    def present(self, uuid: str = "GPU-1a2b", bus: str = "0000:00:00.0") -> None:
        """What this machine's driver shows of a GPU."""
        folder = self.root / "proc/driver/nvidia/gpus" / bus
        folder.mkdir(parents=True)
        (folder / "information").write_text(f"Model: \t\t NVIDIA A100\nIRQ:   \t\t 11\nGPU UUID: \t {uuid}\n")


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Node]]:
    nodes: list[Node] = []

    def new(**engine: object) -> Node:
        nodes.append(Node(tmp_path, **engine))  # type: ignore[arg-type]
        return nodes[-1]

    yield new
    for node in nodes:
        node.close()


@pytest.fixture
def node(make: Callable[..., Node]) -> Node:
    return make()


def test_every_field_in_the_unit_of_its_metric(node: Node) -> None:
    node.engine.watched_by_others(PROFILING)
    node.show({100: 1410, 101: 1593, 113: 1980, 150: 61, 140: 70, 155: 312.5, 158: 87, 164: 400.0, 203: 98, 206: 3,
               207: 4, 237: 4, 238: 16, 252: 1024, 253: 600, 250: 81920, 310: 5, 311: 1, 313: 2, 393: 3, 394: 4,
               395: 0, 396: 1, 1002: 0.44, 1003: 1.002, 1009: 12_000_000, 1010: 34_000_000})
    node.open()
    sample = node.sample(times=2)
    expected = {
        "sm_clock_hz": 1.41e9, "memory_clock_hz": 1.593e9, "sm_clock_max_hz": 1.98e9, "temperature_c": 61,
        "memory_temperature_c": 70, "power_w": 312.5, "temperature_slowdown_c": 87, "power_limit_w": 400,
        "gpu_util": 0.98, "encoder_util": 0.03, "decoder_util": 0.04, "pcie_gen": 4, "pcie_width": 16,
        "memory_used_bytes": 1 << 30, "memory_reserved_bytes": 600 << 20, "memory_total_bytes": 80 << 30,
        "ecc_corrected": 5, "ecc_uncorrected": 1, "ecc_uncorrected_lifetime": 2, "rows_remapped": 7,
        "row_remap_failed": 0, "row_remap_pending": 1, "sm_active": 0.44, "sm_occupancy": 1.0,
        "pcie_tx_bytes_per_s": 12e6, "pcie_rx_bytes_per_s": 34e6,
        "pcie_max_bytes_per_s": 16e9 * 128 / 130 / 8 * 16}
    for metric, value in expected.items():
        assert sample[metric].value == pytest.approx(value), metric
        assert sample[metric].source == "DCGM" and sample[metric].unit == GPU_METRICS[metric].unit
    assert [m for m in expected if sample[m].coarse] == ["gpu_util"]
    assert sample.state == OK and not node.engine.died_of_live_data


def test_every_metric_of_dcgm_is_one_of_gputop() -> None:
    assert fields.BY_METRIC.keys() <= GPU_METRICS.keys()
    assert len({*fields.PROFILING_IDS, *fields.FAST_IDS, *fields.LINK_IDS, *fields.SLOW_IDS}) == (
        len(fields.PROFILING_IDS) + len(fields.FAST_IDS) + len(fields.LINK_IDS) + len(fields.SLOW_IDS))


def test_gpus_have_nvml_s_numbers_and_what_dcgm_knows_of_them(node: Node) -> None:
    node.engine.figures |= {(0, 52): 3, (1, 52): 2, (0, 235): 5, (0, 236): 16}
    node.open()
    info = node.source.gpus[0].info
    assert (info.index, info.uuid, info.name, info.pci_bus_id) == (
        3, "GPU-0", "NVIDIA A100-SXM4-80GB", "00000000:00:00.0")
    assert (info.pcie_gen_max, info.pcie_width_max) == (5, 16) and node.source.gpus_present == 2


def test_a_choice_of_gpus(node: Node) -> None:
    node.engine.figures |= {(0, 52): 0, (1, 52): 1}
    node.open("GPU-1")
    assert [probe.info.uuid for probe in node.source.gpus] == ["GPU-1"] and node.source.gpus_present == 2
    with pytest.raises(GputopError, match="no such GPU"):
        node.open("7")


def test_ordinary_fields_are_watched_profiling_ones_only_with_consent(node: Node) -> None:
    node.open()
    assert {i for _, i in node.engine.watched()} == {*fields.FAST_IDS, *fields.LINK_IDS, *fields.SLOW_IDS}
    assert "no program watches field 1002: start gputop with --dcgm-watch" in (node.sample()["sm_active"].reason or "")
    node.source.close()
    assert not node.engine.watched() and not node.engine.clients


def test_with_consent_profiling_fields_go_in_a_group_of_their_own(node: Node) -> None:
    node.engine.gpus[1].profiling = None
    node.open(watch=True)
    sample = node.sample(times=2)
    assert sample["sm_active"].value == 0.5 and sample["power_w"].value == 3
    other = node.sample(1)
    assert other["power_w"].value == 3 and "profiling is not supported here" in (other["sm_active"].reason or "")
    groups = [set(ids) for _, ids in node.engine.clients[0].field_groups.values()]
    assert PROFILING in groups and all(group <= PROFILING or not group & PROFILING for group in groups)


def test_clock_event_reasons_are_decoded_as_nvml_s(node: Node) -> None:
    node.show({112: 0x4 | 0x20})
    node.open()
    assert node.sample().clock_event_reasons == ("power cap", "thermal")
    node.engine.stuck |= {(0, 112)}
    sample = node.sample(times=4)
    assert sample.clock_event_reasons == () and "field 112 was last updated" in (sample.clock_events_reason or "")
    assert sample.processes == () and "DCGM does not list processes" in (sample.processes_reason or "")


@pytest.mark.parametrize("skew_s", [0.0, -3600.0, 3600.0])
def test_xids_are_those_since_gputop_watches(node: Node, skew_s: float) -> None:
    clock = node.engine.clock
    node.engine.clock = lambda: clock() + skew_s
    node.engine.xid(0, 13)
    node.now_s += 5
    node.open()
    assert node.sample().xids == () and node.sample().xids_reason is None
    node.engine.xid(0, 79)
    first_s = node.engine.clock()
    node.sample()
    node.engine.xid(0, 79)
    sample = node.sample()
    assert sample.xids == (XidEvent(first_s, 79), XidEvent(first_s + 1, 79)) and node.sample(1).xids == ()
    node.engine.stop()
    lost = node.sample()
    assert len(lost.xids) == 2 and lost.xids_reason
    assert node.source.gpus[0].xids()[0] == lost.xids


def test_a_gpu_that_is_lost(node: Node) -> None:
    node.open()
    for i in fields.FAST_IDS:
        node.engine.samples.pop((0, i), None)
    node.engine.samples[0, 155] = type(node.engine.samples[1, 155])(0, 0, fields.GPU_IS_LOST)
    node.engine.stuck |= {(0, i) for i in fields.FAST_IDS}
    sample = node.sample(0)
    assert sample.state == LOST and "no longer responds on the PCIe bus" in sample.message
    assert node.sample(1).state == OK


def hopper(node: Node) -> None:
    node.show({63: 9 << 16})
    node.engine.figures |= {(0, 52): 0, (1, 52): 1}


def test_a_gpu_that_is_lost_at_the_start_takes_nothing_from_the_others(node: Node) -> None:
    hopper(node)
    node.engine.lost.add(0)
    node.open()
    other = node.sample(1, times=2)
    assert (other["sm_active"].value, other["tensor_active"].value, other["dram_active"].value) == (0.5, 0.5, 0.5)
    assert other["pcie_tx_bytes_per_s"].value == other["nvlink_rx_bytes_per_s"].value == 3
    lost = node.sample(0)
    assert lost.state == LOST and "no longer responds on the PCIe bus" in lost.message
    assert "estart gputop" not in lost.message, "it is shown again by itself"
    by_name = {probe.info.uuid: probe.info.name for probe in node.source.gpus}
    assert by_name["GPU-0"] == "GPU 0" and "A100" in by_name["GPU-1"]


def test_a_gpu_that_comes_back_has_the_profiling_fields_that_the_others_have(node: Node) -> None:
    hopper(node)
    node.engine.lost.add(0)
    node.open()
    place = [probe.info.uuid for probe in node.source.gpus].index("GPU-0")
    assert node.sample(place).state == LOST
    node.engine.lost.clear()
    sample = node.sample(place, times=round(REFUSED_RETRY_S) + 12)
    assert sample.state == OK and sample["power_w"].value == 3
    assert (sample["sm_active"].value, sample["tensor_active"].value, sample["dram_active"].value) == (0.5, 0.5, 0.5)
    assert sample["pcie_tx_bytes_per_s"].value == sample["nvlink_rx_bytes_per_s"].value == 3


def test_what_a_gpu_cannot_have_is_refused(node: Node) -> None:
    node.engine.watched_by_others(PROFILING)
    node.show({250: 80000, 252: 90000, 237: 0, 150: 199, 155: 1e9, 1002: 77.0, 100: 10**8, 203: 5000, 1009: 10**17,
               253: 10**15})
    node.open()
    sample = node.sample(times=2)
    assert "more than the GPU has" in (sample["memory_used_bytes"].reason or "")
    for metric in ("pcie_gen", "temperature_c", "power_w", "sm_active", "sm_clock_hz", "gpu_util",
                   "pcie_tx_bytes_per_s", "memory_reserved_bytes"):
        assert sample[metric].value is None and "impossible" in (sample[metric].reason or "")


def test_where_one_gpu_is_older_only_the_others_are_watched(node: Node) -> None:
    hopper(node)
    node.engine.figures[0, 63] = 8 << 16
    node.open()
    assert {gpu for gpu, i in node.engine.watched() if i in PROFILING} == {1}


def test_a_gpu_whose_driver_says_that_it_is_lost(node: Node) -> None:
    """The engine goes on: blanks for what was measured, zeros for some of the rest, no refusal."""
    hopper(node)
    node.show({140: 70, 395: 1})
    node.open()
    node.sample(0)
    node.engine.silent.add(0)
    samples = [node.sample(0) for _ in range(45)]
    silent_at = next(i for i, sample in enumerate(samples) if sample.state != OK)
    assert silent_at <= 4 and {s.state for s in samples[silent_at:silent_at + 30]} == {FAILED}
    assert "has no value since " in samples[silent_at].message and "reboot" not in samples[silent_at].message
    assert {s.state for s in samples[silent_at + 31:]} == {LOST}
    assert not samples[-1].readings and "no longer responds on the PCIe bus" in samples[-1].message
    assert node.sample(1).state == OK
    node.engine.silent.clear()
    node.sample(0)
    assert node.sample(0).state == OK and node.sample(0)["power_w"].value == 3


def test_a_gpu_that_the_driver_called_lost_before_gputop_began_is_not_ok(node: Node) -> None:
    hopper(node)
    node.engine.silent.add(0)
    node.open()
    place = [probe.info.uuid for probe in node.source.gpus].index("GPU-0")
    samples = [node.sample(place) for _ in range(6)]
    assert samples[-1].state == FAILED and "cannot be read: no value yet, requested since" in samples[-1].message
    assert not samples[-1].readings and node.sample(1 - place).state == OK


def divided(node: Node) -> None:
    """GPU 0 has two instances, NVML's 9 and 2; the engine's values of them are told apart."""
    node.engine.gpus[0].instances = {5: 9, 4: 2}
    node.engine.figures |= {(0, 52): 0, (1, 52): 1}
    for entity, used, active in ((1004, 1000, 0.2), (1005, 2000, 0.9)):
        node.engine.figures |= {(entity, 250): 40192, (entity, 252): used, (entity, 253): 10, (entity, 1002): active}
    node.engine.watched_by_others([1002], [1004, 1005, 1])


def test_mig_instances_follow_their_gpu(node: Node) -> None:
    divided(node)
    node.open()
    infos = [probe.info for probe in node.source.gpus]
    assert [info.label for info in infos] == ["0", "0:0", "0:1", "1"] and node.source.gpus_present == 2
    assert infos[0].mig_mode and infos[1].uuid == "MIG-GPU-0/2/0" and infos[1].name.endswith(" MIG 3g.40gb")
    node.sample()
    samples = [node.sample(place) for place in range(4)]
    assert [sample["sm_active"].value for sample in samples] == [None, 0.2, 0.9, 0.5]
    assert [sample["memory_used_bytes"].value for sample in samples[1:3]] == [1000 << 20, 2000 << 20]
    assert samples[1]["power_w"].reason == "measured for the whole GPU: see GPU 0" and samples[0]["power_w"].value == 3
    assert samples[0]["sm_active"].reason == "partitioned into MIG instances: see 0:0, 0:1"


def test_an_instance_that_is_listed_twice_is_one(node: Node) -> None:
    node.engine.gpus[0].instances = {4: 2, 5: 2}
    node.engine.figures |= {(0, 52): 0, (1, 52): 1}
    node.open()
    assert [probe.info.label for probe in node.source.gpus] == ["0", "0:0", "1"]


def test_one_mig_instance_can_be_chosen(node: Node) -> None:
    divided(node)
    node.open("0:1")
    assert [probe.info.label for probe in node.source.gpus] == ["0:1"]
    node.sample()
    assert node.sample()["sm_active"].value == 0.9


def test_the_instances_of_a_lost_gpu_are_lost(node: Node) -> None:
    divided(node)
    node.open()
    node.sample()
    node.engine.lost.add(0)
    node.sample(times=5)
    assert [node.sample(place).state for place in range(4)] == [LOST, LOST, LOST, OK]


@pytest.mark.parametrize(("capability", "driver", "version", "watched"), [
    (9 << 16, "550.54.15", "4.6.0", True), (10 << 16, "580.65", "3.3.9", True), (8 << 16, "550.54.15", "4.6.0", False),
    (9 << 16, "515.1", "4.6.0", False), (9 << 16, "", "4.6.0", False), (9 << 16, "550.54.15", "3.0.4", False),
    (1 << 60, "550.54.15", "4.6.0", False),
])
def test_where_the_engine_reads_through_gpm_a_watch_locks_nothing(
        make: Callable[..., Node], capability: int, driver: str, version: str, watched: bool) -> None:
    node = make(version=version) if not version.startswith("3.") else Node(make().root, 3, version=version)
    node.show({63: capability})
    for gpu in node.engine.gpus.values():
        gpu.driver = driver
    node.open()
    assert ({i for _, i in node.engine.watched()} >= PROFILING) == watched
    node.close()


@pytest.mark.parametrize(("numbers", "lost", "shown"), [
    ((0, 0), {0}, [1, 0]),  # after detach and attach a GPU that is gone keeps the number that another has now
    ((0, 0), set(), [0, 1]),
    ((10**12, 1), set(), [0, 1]), ((2**62, 1), set(), [0, 1]),  # which cannot be
])
def test_two_gpus_never_have_the_same_number(node: Node, numbers: tuple[int, int], lost: set[int],
                                             shown: list[int]) -> None:
    node.engine.figures |= {(gpu, 52): number for gpu, number in enumerate(numbers)}
    node.engine.lost |= lost
    node.open()
    assert [probe.info.index for probe in node.source.gpus] == shown


def test_consent_takes_the_counters_of_the_chosen_gpus_only(node: Node) -> None:
    node.engine.figures |= {(0, 52): 0, (1, 52): 1}
    node.open("1", watch=True)
    assert {gpu for gpu, i in node.engine.watched() if i in PROFILING} == {1}
    assert {gpu for gpu, _ in node.engine.watched()} == {1}


def test_names_of_the_engine_drive_no_terminal(node: Node) -> None:
    gpu = node.engine.gpus[0]
    gpu.name, gpu.driver, gpu.bus = "A100\x1b[2J\x07", "5\x1b]0;x\x07", "\x9b31m"
    node.open()
    info = node.source.gpus[0].info
    assert all(text.isprintable() for text in (info.name, info.pci_bus_id, node.source.label))


def test_gpus_without_a_uuid_are_told_apart(node: Node) -> None:
    node.engine.gpus[0].uuid = node.engine.gpus[1].uuid = ""
    node.engine.figures |= {(0, 52): 0, (1, 52): 1}
    node.open()
    assert len({probe.info.uuid for probe in node.source.gpus}) == 2
    assert [node.sample(place)["power_w"].value for place in (0, 1)] == [3, 3]


def test_an_engine_that_restarts(node: Node) -> None:
    node.open()
    node.sample()
    node.engine.stop()
    sample = node.sample()
    assert sample.state == FAILED and "the connection broke" in sample.message and not sample.readings
    node.engine.start()
    assert node.sample(0, 2.0).state == OK
    assert node.sample()["power_w"].value == 3


def test_an_engine_without_gpus(node: Node) -> None:
    node.engine.gpus.clear()
    with pytest.raises(GputopError, match="lists no GPU") as caught:
        node.open()
    assert caught.value.exit_code == EXIT_NO_DATA


def test_no_engine(node: Node) -> None:
    node.engine.stop()
    with pytest.raises(GputopError, match="no host engine answers") as caught:
        node.open()
    assert "systemctl start nvidia-dcgm" in caught.value.fix


def test_an_engine_that_hangs_when_opened(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gputop.sources.dcgm.source.OPEN_TIMEOUT_S", 0.05)
    node.engine.hang("dcgmGetAllDevices")
    with pytest.raises(GputopError, match="no answer within"):
        node.open()
    node.engine.release()


# -- whose host it is --------------------------------------------------------------------------------


def test_the_host_of_an_engine_on_this_machine(node: Node) -> None:
    node.open()
    assert "another machine" not in node.source.label, "nothing speaks for another"
    node.present("GPU-????????-????-????-????-????????????", "0000:01:00.0")  # a driver that does not tell UUIDs
    node.open()
    assert node.source.label == f"DCGM 4.6 host engine at {node.engine.address}, driver 550.54.15"
    assert node.source.host.read(0.0)["memory_total_bytes"].value


def test_a_tunnel_to_another_machine_does_not_pass_its_host_off_as_this_one(node: Node) -> None:
    node.present("GPU-77777777-7777-7777-7777-777777777777")
    node.open()
    host = node.source.host.read(0.0)
    assert host.hostname == node.engine.address
    for metric in HOST_METRICS:
        assert host[metric].value is None and "another machine" in (host[metric].reason or "")
    assert "on another machine" in node.source.label and node.source.host.processes(0.0, []) == ()


def test_the_uuid_decides(node: Node) -> None:
    for gpu, uuid in ((0, "GPU-aaaa"), (1, "GPU-bbbb")):
        node.engine.gpus[gpu].uuid = uuid
    node.present("GPU-bbbb", "0000:99:00.0")
    node.open()
    assert "another machine" not in node.source.label


def test_a_socket_is_of_this_machine(make: Callable[..., Node], tmp_path: Path) -> None:
    """Also where the driver shows no GPU, as in a container."""
    node = make(path=str(tmp_path / "nv.sock"))
    node.open()
    assert node.source.label.endswith(f"host engine at unix://{tmp_path}/nv.sock, driver 550.54.15")
    assert "another machine" not in (node.source.host.read(0.0)["cpu_ratio"].reason or "")


def test_an_address_of_another_machine(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    node.present("GPU-????", "0000:00:00.0")
    monkeypatch.setattr(Address, "reach", lambda self, timeout_s: False)
    node.open()
    assert "another machine" in node.source.label


def test_slow_watches_are_named_as_the_source(node: Node) -> None:
    node.engine.watched_by_others([1002])
    node.open()
    sample = node.sample()
    for _ in range(7):
        for _ in range(10):
            stuck = {(gpu, 1002) for gpu in node.engine.gpus}
            node.engine.stuck |= stuck
            sample = node.sample()
        node.engine.stuck -= stuck
        sample = node.sample()
    assert sample["sm_active"] == Reading(0.5, "ratio", "DCGM, every 11 s")


@pytest.mark.parametrize("index", [10**12, 2**62])
def test_a_number_that_cannot_be_is_not_shown(node: Node, index: int) -> None:
    node.engine.figures |= {(0, 52): index, (1, 52): 1}
    node.open()
    assert [probe.info.index for probe in node.source.gpus] == [0, 1]

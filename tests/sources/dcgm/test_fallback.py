"""The ladder: a fake driver with and without GPM above the contract double of a DCGM host engine."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gputop.core.samples import GpuSample, Reading
from gputop.sources.dcgm.connection import Address
from gputop.sources.dcgm.fallback import NvmlWithDcgmFallback
from gputop.sources.nvml.source import NvmlSource
from tests.commands.run_gputop import gputop
from tests.dcgm_double import PROFILING, Gpu, install
from tests.dcgm_double.scene import Scene
from tests.nvml_fake import FakeNvml, environment
from tests.sources.conftest import Clock
from tests.waiting import PATIENCE_S

RX, TX = "pcie_rx_bytes_per_s", "pcie_tx_bytes_per_s"


class Node:
    """The fake driver's GPUs, and a host engine on the same clock that lists them."""

    def __init__(self, fake: FakeNvml, root: Path, *settings: str, watch: bool = False, listed: bool = True) -> None:
        fake.configure("gpus 2", *settings)
        self.clock = Clock(fake)
        nvml = NvmlSource(clock=self.clock, wall_clock=self.clock)
        self.scene = Scene(root)
        self.made = 0
        self.source = NvmlWithDcgmFallback(nvml, self.connect, watch=watch)
        self.source.open()
        if listed:
            self.scene.engine.gpus = {i: Gpu(i, probe.info.uuid) for i, probe in enumerate(self.source.gpus)}

    def connect(self) -> object:
        self.made += 1
        return self.scene.client

    def sample(self, gpu: int = 0, times: int = 1) -> GpuSample:
        """The last of some ticks."""
        for _ in range(times):
            sample = self._tick(gpu)
        return sample

    def _tick(self, gpu: int) -> GpuSample:
        """The engine reads what is watched; the answer to the question of this tick is awaited."""
        self.clock.advance(1.0)
        self.scene.now_s += 1.0
        if self.scene.engine.alive:
            self.scene.engine.update()
        now_s = self.clock()
        first = [probe.read(now_s) for probe in self.source.gpus][gpu]
        if self.made and self.scene.client.wait(PATIENCE_S):
            return self.source.gpus[gpu].read(now_s)
        return first


@pytest.fixture
def node(fake: FakeNvml, tmp_path: Path) -> Iterator[Callable[..., Node]]:
    nodes: list[Node] = []

    def new(*settings: str, **options: bool) -> Node:
        nodes.append(Node(fake, tmp_path, *settings, **options))
        return nodes[-1]

    yield new
    for one in nodes:
        one.scene.close()
        one.source.close()


def test_with_gpm_dcgm_is_never_contacted(node: Callable[..., Node]) -> None:
    one = node()
    one.sample(times=2)
    assert not one.made, "both were without a value"
    one.sample(times=4)
    assert one.sample()["sm_active"].source == "GPM" and not one.made
    assert one.source.label.startswith("NVML + GPM, driver")


def test_without_gpm_what_somebody_watches_is_shown(node: Callable[..., Node]) -> None:
    one = node("gpm 0")
    one.scene.engine.watched_by_others([*PROFILING, 203])
    one.sample(times=2)
    sample = one.sample()
    assert sample["sm_active"] == Reading(0.5, "ratio", "DCGM")
    assert sample["fp16_active"] == Reading(0.5, "ratio", "DCGM")
    assert sample["power_w"].source.startswith("NVML"), "what NVML has is not replaced"
    assert sample["gpu_util"].coarse and sample["gpu_util"].source == "NVML"
    assert one.sample()[RX].source == "NVML counter"
    assert one.source.label.startswith("NVML + DCGM 4.6 host engine, driver ")
    assert one.made == 1 and not one.scene.engine.calls["dcgmWatchFields"]


def test_the_first_frame_waits_for_nothing(node: Callable[..., Node]) -> None:
    one = node("gpm 0")
    one.scene.engine.hang("dcgmConnect_v2")
    reading = one.source.gpus[0].read(1.0)["sm_active"]
    assert reading.reason == "this GPU has no GPM, which needs Hopper or newer; DCGM: not asked yet"
    assert one.scene.engine.await_hanging()
    assert one.source.gpus[0].read(2.0)["power_w"].value is not None


def test_nobody_watches_names_both_ways_out(node: Callable[..., Node]) -> None:
    one = node("gpm 0")
    assert one.sample()["sm_active"].reason == (
        "this GPU has no GPM, which needs Hopper or newer; DCGM: no program watches field 1002: start gputop with "
        "--dcgm-watch, or dcgm-exporter")
    assert not one.scene.engine.watched() and "DCGM" not in one.source.label


def test_with_consent_the_fields_are_watched_and_released(node: Callable[..., Node]) -> None:
    one = node("gpm 0", watch=True)
    sample = one.sample(1, times=4)
    assert sample["tensor_active"] == Reading(0.5, "ratio", "DCGM")
    assert {i for _, i in one.scene.engine.watched()} == PROFILING
    one.source.close()
    assert not one.scene.engine.watched() and not one.scene.engine.clients


def test_no_engine_is_said_beside_no_gpm(node: Callable[..., Node]) -> None:
    one = node("gpm 0")
    one.scene.engine.stop()
    address = one.scene.engine.address
    assert (one.sample()["dram_active"].reason or "").endswith(f"; DCGM: no host engine answers at {address}")
    assert one.sample()["power_w"].value is not None


def test_an_engine_of_another_machine_is_not_mixed_in(node: Callable[..., Node]) -> None:
    one = node("gpm 0", listed=False)
    one.scene.engine.watched_by_others(PROFILING)
    sample = one.sample(times=3)
    assert (sample["sm_active"].reason or "").endswith("DCGM: the host engine does not list this GPU")


def test_a_gpu_that_was_not_yet_asked_for_is_not_called_unlisted(node: Callable[..., Node]) -> None:
    one = node("gpm 0")
    one.source.gpus[0].read(1.0)
    assert one.scene.client.wait(PATIENCE_S)  # an answer for GPU 0 alone
    assert (one.source.gpus[1].read(1.0)["sm_active"].reason or "").endswith("DCGM: not asked yet")
    assert (one.sample(1)["sm_active"].reason or "").endswith("or dcgm-exporter")


def test_gpm_that_is_refused_later_is_replaced(node: Callable[..., Node], fake: FakeNvml) -> None:
    one = node()
    one.scene.engine.watched_by_others(PROFILING)
    one.sample(times=3)
    assert one.sample()["sm_active"].source == "GPM"
    fake.change("refuse nvmlGpmSampleGet 4")
    sample = one.sample(times=4)
    assert sample["sm_active"].source == "DCGM"


def test_pcie_prefers_dcgm_to_the_20_ms_window(node: Callable[..., Node]) -> None:
    one = node("gpm 0", "refuse field:197 3", "refuse field:198 3")
    for _ in range(3):
        coarse = one.sample()[RX]
    assert coarse.coarse and coarse.value is not None and coarse.source != "DCGM"
    one.scene.engine.watched_by_others(PROFILING)
    sample = one.sample(times=13)
    assert sample[RX] == Reading(3.0, "bytes/s", "DCGM") == sample[TX]


def test_a_stale_value_is_not_shown(node: Callable[..., Node]) -> None:
    one = node("gpm 0")
    one.scene.engine.watched_by_others(PROFILING)
    one.sample(times=3)
    one.scene.engine.watched_by_nobody_else()
    sample = one.sample(times=6)
    assert sample["sm_active"].value is None and "was last updated" in (sample["sm_active"].reason or "")
    assert "DCGM" not in one.source.label


def test_a_lost_gpu_stays_lost(node: Callable[..., Node], fake: FakeNvml) -> None:
    one = node("gpm 0")
    one.scene.engine.watched_by_others(PROFILING)
    one.sample(times=3)
    fake.lose(0)
    assert one.sample(0).state == "lost" and not one.sample(0).readings
    assert one.sample(1)["sm_active"].source == "DCGM"


def test_what_nvml_refuses_dcgm_may_have(node: Callable[..., Node]) -> None:
    one = node("gpm 0", "refuse nvmlDeviceGetPowerUsage 4", "refuse field:186 4", "refuse field:185 4")
    assert "DCGM" not in (one.sample()["power_w"].reason or "DCGM"), "no clutter where DCGM has it not"
    one.scene.engine.watched_by_others([155])
    sample = one.sample(times=12)
    assert sample["power_w"] == Reading(3.0, "W", "DCGM")


def test_mig_instances_have_dcgm_s_values_of_their_own(node: Callable[..., Node]) -> None:
    one = node("gpm 0", "mig 0 0 9 1g.10gb 9728", "mig 0 1 2 3g.40gb 40192")
    infos = [probe.info for probe in one.source.gpus]
    assert [info.label for info in infos] == ["0", "0:0", "0:1", "1"]
    one.scene.engine.gpus = {0: Gpu(0, infos[0].uuid, instances={4: 2, 5: 9}), 1: Gpu(1, infos[3].uuid)}
    one.scene.engine.figures |= {(1004, 1002): 0.2, (1005, 1002): 0.9, (1, 1002): 0.5}
    one.scene.engine.watched_by_others([1002], [1, 1004, 1005])
    for _ in range(3):
        samples = [one.sample(place) for place in range(4)]
    assert [sample["sm_active"].value for sample in samples] == [None, 0.9, 0.2, 0.5]
    assert "0:0" in (samples[0]["sm_active"].reason or "") and "DCGM" not in (samples[0]["sm_active"].reason or "")


def test_numbers_of_mig_instances_mean_nothing_on_another_machine(
        node: Callable[..., Node], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Address, "reach", lambda self, timeout_s: False)
    one = node("gpm 0", "mig 0 0 9 1g.10gb 9728", listed=False)
    one.scene.engine.gpus[0].instances = {5: 9}
    one.scene.engine.figures[1005, 1002] = 0.9
    one.scene.engine.watched_by_others([1002], [1005])
    sample = one.sample(1, times=3)
    assert sample["sm_active"].value is None and "does not list this GPU" in (sample["sm_active"].reason or "")


def test_in_a_snapshot_of_the_program(nvml_library: Path, tmp_path: Path) -> None:
    """The whole program over both fakes: the SM lane shows DCGM's values and says so."""
    root = tmp_path / "root"
    install(root, 4)
    bindings = root / "usr/share/datacenter-gpu-manager-4/bindings/python3"
    library = next(root.rglob("libdcgm.so.4"))
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        uuids = json.loads(_snapshot(nvml_library, "nvml", "--seconds", "0.1"))["gpus"]
        setting = {"port": port, "gpus": [{"id": g["index"], "uuid": g["uuid"]} for g in uuids],
                   "watched": sorted(PROFILING), "figures": {"1002": 0.625, "1004": 0.25}}
        for seconds in ("2", "20"):  # a loaded machine may take longer than two to connect, or miss the last sample
            document = json.loads(_snapshot(
                nvml_library, "auto", "--dcgm", f"127.0.0.1:{port}", "--dcgm-bindings", str(bindings),
                "--seconds", seconds, "--interval", str(float(seconds) / 20), DCGM_DOUBLE=json.dumps(setting),
                LD_LIBRARY_PATH=f"{nvml_library.parent}:{library.parent}"))
            readings = [gpu["readings"]["sm_active"] for gpu in document["gpus"]]
            if all(reading["value"] for reading in readings):
                break
    assert "DCGM 4.6 host engine" in document["source"]
    assert [(reading["value"], reading["source"]) for reading in readings] == [(0.625, "DCGM")] * 2


def _snapshot(library: Path, source: str, *arguments: str, **env: str) -> str:
    done = gputop("snapshot", "--format", "json", "--source", source, *arguments,
                  env={**environment(library, "gpus 2", "gpm 0"), **env})
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_pcie_counters_are_kept(node: Callable[..., Node]) -> None:
    one = node("gpm 0")
    one.scene.engine.watched_by_others(PROFILING)
    sample = one.sample(times=4)
    assert sample[RX].source == "NVML counter"

"""Opening GPUs: one that hangs, what becomes of it, and what is known of the others meanwhile."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from gputop.core.errors import EXIT_USAGE, GputopError
from gputop.core.samples import OK, GpuSample
from gputop.sources.nvml import devices as nvml_devices
from gputop.sources.nvml import xid_watch
from gputop.sources.nvml.devices import Device, numa_node
from gputop.sources.nvml.source import NvmlSource
from tests.nvml_fake import FakeNvml
from tests.sources.nvml.nodes import Node
from tests.waiting import PATIENCE_S

HANGS = ("gpus 3", "fault * 0 1 1 hang 0")


@pytest.fixture
def hung(fake: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeNvml]:
    monkeypatch.setattr(xid_watch, "WAIT_S", 0.02)
    yield fake
    for gpu in range(3):
        fake.release(gpu)


def opened(fake: FakeNvml, *settings: str, gpus: tuple[str, ...] = ()) -> NvmlSource:
    return Node(fake, *settings, gpus=gpus, environ={}, open_deadline_s=0.5).source


def read_in_thread(device: Device) -> queue.SimpleQueue[GpuSample | Exception]:
    answers: queue.SimpleQueue[GpuSample | Exception] = queue.SimpleQueue()

    def read() -> None:
        try:
            answers.put(device.read(0.0))
        except Exception as error:  # noqa: BLE001  thread boundary: the test looks at it
            answers.put(error)

    threading.Thread(target=read, daemon=True).start()
    return answers


def test_a_gpu_that_hangs_is_there_without_a_name_and_the_others_are_read(hung: FakeNvml) -> None:
    source = opened(hung, *HANGS)
    assert hung.await_hanging(0)
    sick, *well = source.gpus
    assert (sick.info.index, sick.info.uuid, sick.info.name) == (0, "index:0", "GPU 0")
    assert [device.read(0.0).state for device in well] == [OK, OK]
    assert source.gpus_present == 3 and source.label.startswith("NVML + GPM")


def test_reading_it_blocks_until_it_is_open_and_then_it_is_as_any_other(hung: FakeNvml) -> None:
    source = opened(hung, *HANGS)
    answers = read_in_thread(source.gpus[0])
    with pytest.raises(queue.Empty):
        answers.get(timeout=0.05)
    hung.release(0)
    sample = answers.get(timeout=PATIENCE_S)
    assert isinstance(sample, GpuSample)
    assert sample.state == OK and sample.info.uuid.startswith("GPU-1a2b3c00")
    assert source.gpus[0].info == sample.info
    assert sample.xids_reason is None, "its Xids are not asked for"


@pytest.mark.parametrize(("gpus", "labels"), [(("GPU-1a2b3c11",), ["1"]), (("0",), ["0"]), (("1-2",), ["1", "2"])])
def test_gpus_can_be_chosen_while_one_hangs(hung: FakeNvml, gpus: tuple[str, ...], labels: list[str]) -> None:
    assert [device.info.label for device in opened(hung, *HANGS, gpus=gpus).gpus] == labels


def test_a_uuid_of_none_of_the_others_may_be_its(hung: FakeNvml) -> None:
    with pytest.raises(GputopError, match="may be GPU 0, which does not respond") as caught:
        opened(hung, *HANGS, gpus=("GPU-1a2b3c00",))
    assert caught.value.exit_code == EXIT_USAGE


def test_closing_leaves_a_call_that_hangs_alone(hung: FakeNvml) -> None:
    source = opened(hung, *HANGS, gpus=("1",))
    assert hung.await_hanging(0)
    source.close()  # must neither wait for it nor shut NVML down under it
    hung.release(0)
    for thread in threading.enumerate():
        if thread.name == "gputop-nvml-open0":
            thread.join(PATIENCE_S)
            assert not thread.is_alive()
    assert hung.calls("nvmlGpmQueryDeviceSupport", 0) == 1, "NVML was shut down before it was done"


def test_a_divided_gpu_that_answers_late_shows_its_instances_after_a_restart(hung: FakeNvml) -> None:
    source = opened(hung, *HANGS, "mig 0 0 9 1g.10gb 9728")
    hung.release(0)
    sample = read_in_thread(source.gpus[0]).get(timeout=PATIENCE_S)
    assert isinstance(sample, GpuSample)
    assert sample.info.mig_mode and "Restart gputop" in (sample["sm_active"].reason or "")
    assert [device.info.label for device in source.gpus] == ["0", "1", "2"]


def test_a_fault_of_gputop_while_opening_is_that_gpus_alone(fake: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    make = nvml_devices.NvmlGpu

    def broken(nvml: object, handle: object, info: nvml_devices.GpuInfo, *args: object) -> object:
        if info.index == 1:
            raise ZeroDivisionError("a fault")
        return make(nvml, handle, info, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(nvml_devices, "NvmlGpu", broken)
    source = opened(fake, "gpus 3")
    assert source.gpus[0].probe is not None
    assert isinstance(read_in_thread(source.gpus[1]).get(timeout=PATIENCE_S), ZeroDivisionError)
    source.close()


# -- NUMA ------------------------------------------------------------------------------------------------

def board(root: Path, address: str, text: str) -> None:
    folder = root / "sys/bus/pci/devices" / address
    folder.mkdir(parents=True)
    (folder / "numa_node").write_text(text)


def test_the_numa_node_is_the_kernels(tmp_path: Path) -> None:
    board(tmp_path, "0000:3b:00.0", "1\n")
    board(tmp_path, "10001:5e:00.0", "3\n")
    board(tmp_path, "0000:86:00.0", "-1\n")
    board(tmp_path, "0000:87:00.0", "nonsense\n")
    assert numa_node("00000000:3B:00.0", tmp_path) == 1
    assert numa_node("00010001:5E:00.0", tmp_path) == 3
    for unknown in ("00000000:86:00.0", "00000000:87:00.0", "00000000:99:00.0", "", "x:y"):
        assert numa_node(unknown, tmp_path) is None


def test_each_gpu_knows_its_numa_node(fake: FakeNvml, tmp_path: Path) -> None:
    board(tmp_path, "0000:18:00.0", "1\n")
    assert [device.info.numa_node for device in Node(fake, "gpus 2", root=tmp_path).gpus] == [1, None]

"""Pairing the driver's PIDs with processes in here: only where nothing else is possible."""

from __future__ import annotations

from pathlib import Path

import pytest

from gputop.core.samples import GpuInfo
from gputop.sources.host.gpu_processes import device_minors, mapped_devices, match, opens_gpu
from tests.sources.host.proc_tree import ProcTree


@pytest.mark.parametrize(("listed", "mapped", "pairs"), [
    ({900: {0}}, {20: {0}}, {900: 20}),
    ({900: {0, 1}}, {20: {0, 1}}, {900: 20}),
    ({900: {0}, 901: {1}}, {20: {0}, 21: {1}}, {900: 20, 901: 21}),
    ({900: {0}, 901: {1}}, {21: {1}}, {901: 21}),
    ({900: {0}}, {}, {}),
    ({900: {0}}, {20: {1}}, {}),
    ({900: {0}}, {20: {0}, 21: {0}}, {}),  # two here on one device
    ({900: {0}, 901: {0}}, {20: {0}}, {}),  # one of the two is in another container
    ({900: {0}}, {20: {0, 1}}, {}),  # it works on a device where the driver sees no one unknown
    ({900: {0, 1}}, {20: {0}}, {}),
    ({900: {0, 1}}, {20: {0}, 21: {1}}, {}),
    ({900: {0, 1}, 901: {1}}, {20: {0, 1}, 21: {1}}, {}),
])
def test_match(listed: dict[int, set[int]], mapped: dict[int, set[int]], pairs: dict[int, int]) -> None:
    assert match(listed, mapped) == pairs


def test_devices_by_the_drivers_word(tmp_path: Path) -> None:
    tree = ProcTree(tmp_path)
    infos = [GpuInfo(i, f"GPU-{i}", "H100", f"00000000:{0x1B + i:02X}:00.0") for i in range(3)]
    assert device_minors(tmp_path, infos) == {}
    tree.add_driver([5, 2])
    (tmp_path / "driver/nvidia/gpus/0000:1d:00.0").mkdir()  # without its file
    (tmp_path / "driver/nvidia/gpus/odd").mkdir()
    (tmp_path / "driver/nvidia/gpus/odd/information").write_text("Device Minor: 9\n")
    assert device_minors(tmp_path, [*infos, GpuInfo(3, "GPU-3", "H100", "")]) == {0: 5, 1: 2}


def test_what_a_process_has_mapped_and_open(tmp_path: Path) -> None:
    tree = ProcTree(tmp_path)
    for pid in (20, 21, 22):
        tree.add(pid)
    tree.map_device(20, 0, 11)
    tree.map_device(21)  # the control device only, as monitors do
    tree.map_libraries(22, "/tmp/dev/nvidia3", "/tmp/x /dev/nvidia4", "/dev/nvidia" + "9" * 200)  # which is no device
    assert mapped_devices(tmp_path, [20, 21, 22, 23]) == {20: {0, 11}}
    tree.open_device(20, "/dev/null")
    assert not opens_gpu(tmp_path, 20)
    tree.open_device(20, "/dev/nvidiactl")
    assert opens_gpu(tmp_path, 20)
    with pytest.raises(OSError, match="No such file"):
        opens_gpu(tmp_path, 21)

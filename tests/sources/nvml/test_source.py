"""NvmlSource through the real nvidia-ml-py, over the fake driver library."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gputop.core.errors import EXIT_NO_DATA, EXIT_USAGE, GputopError, NoDataError
from gputop.core.metrics import GPU_METRICS
from gputop.core.samples import FAILED, LOST, OK
from gputop.sources.nvml.gpu import clock_events
from tests.nvml_fake import FakeNvml, environment
from tests.sources.nvml.nodes import Node

GIB = 1 << 30
MIB = 1 << 20


def test_all_gpus_with_identity_and_units(fake: FakeNvml) -> None:
    node = Node(fake, "set power_w 431.5", "set memory_used_mib 1024", "set util 73", "set pcie_gen 4", "set reasons 4")
    samples = node.samples()
    assert [s.info.index for s in samples] == list(range(8))
    assert len({s.info.uuid for s in samples}) == 8
    first = samples[0]
    assert first.state == OK
    assert first.info.name == "NVIDIA H100 80GB HBM3"
    assert first.info.pci_bus_id == "00000000:18:00.0"
    assert (first.info.pcie_gen_max, first.info.pcie_width_max) == (4, 16)
    values = {metric: reading.value for metric, reading in first.readings.items()}
    assert values["power_w"] == 431.5
    assert values["power_limit_w"] == 700
    assert values["memory_used_bytes"] == GIB
    assert values["memory_total_bytes"] == 80 * GIB
    assert values["memory_reserved_bytes"] == 600 * MIB
    assert values["gpu_util"] == 0.73
    assert first["gpu_util"].coarse
    assert values["sm_clock_hz"] == 1755e6
    assert values["sm_clock_max_hz"] == 1980e6
    assert values["memory_clock_hz"] == values["memory_clock_max_hz"] == 2619e6
    assert values["pcie_max_bytes_per_s"] == pytest.approx(31.5e9, rel=0.001)  # 4.0 x16
    assert first.clock_event_reasons == ("power cap",)
    assert node.source.label == "NVML + GPM, driver 580.65.06"
    assert first.readings.keys() <= GPU_METRICS.keys()
    assert all(reading.unit == GPU_METRICS[metric].unit for metric, reading in first.readings.items())


def test_older_calls_stand_in_for_newer_ones(fake: FakeNvml) -> None:
    sample = Node(
        fake, "gpus 1", "set memory_used_mib 1024", "set reasons 8", "refuse nvmlDeviceGetMemoryInfo_v2 13",
        "refuse nvmlDeviceGetCurrentClocksEventReasons 13", "refuse nvmlDeviceGetTemperature 26").sample()
    assert sample["memory_used_bytes"].value == (1024 + 600) * MIB
    assert "reserve" in sample["memory_used_bytes"].source
    assert sample["memory_reserved_bytes"].reason
    assert sample.clock_event_reasons == ("hw slowdown",)
    import pynvml

    # Older releases of nvidia-ml-py do not have the newer call.
    has_newer = hasattr(pynvml, "nvmlDeviceGetTemperatureV")
    assert (sample["temperature_c"].value is not None) == has_newer


def test_clock_events_that_cannot_be_read_are_not_shown_as_none(fake: FakeNvml) -> None:
    sample = Node(fake, "gpus 1", "refuse nvmlDeviceGetCurrentClocksEventReasons 3").sample(times=2)
    assert sample.clock_event_reasons == ()
    assert "not supported" in (sample.clock_events_reason or "")
    assert fake.calls("nvmlDeviceGetCurrentClocksEventReasons") == 1


def test_clock_event_names() -> None:
    assert clock_events(0) == ()
    assert clock_events(0x1) == ("idle",)
    assert clock_events(0x4 | 0x20 | 0x80) == ("power cap", "thermal", "power brake")


@pytest.mark.parametrize(("code", "word"), [(15, "Xid"), (16, "--gpu-reset -i 3")])
def test_a_lost_gpu_is_dropped_and_the_others_go_on(fake: FakeNvml, code: int, word: str) -> None:
    node = Node(fake)
    node.samples()
    fake.change(f"refuse nvmlDeviceGetUtilizationRates {code} 3")
    samples = node.samples(1)
    assert [s.state for s in samples] == [OK] * 3 + [LOST] + [OK] * 4
    assert word in samples[3].message
    assert samples[3]["power_w"].reason == samples[3].message
    fake.lose(3)
    assert node.sample(3, after_s=1).state == LOST
    node.source.close()
    assert fake.calls_after_lost(3) == 0, "the handle was used again"


def test_a_gpu_lost_before_the_start_is_shown(fake: FakeNvml) -> None:
    node = Node(fake, "gpus 3", "lost_after 0 1", "refuse nvmlDeviceGetHandleByIndex_v2 4 2")
    samples = node.samples()
    assert [s.state for s in samples] == [OK, LOST, FAILED]
    assert "/dev/nvidia2" in samples[2].message


def test_chosen_gpus(fake: FakeNvml) -> None:
    node = Node(fake, gpus=("2-3", "0"))
    assert node.labels == ["0", "2", "3"] and node.source.gpus_present == 8
    with pytest.raises(GputopError, match="--gpus 8: there is no such GPU") as caught:
        Node(fake, gpus=("0", "8"))
    assert caught.value.exit_code == EXIT_USAGE and "GPU-1a2b3c00" in caught.value.fix


def test_names_with_escape_codes_and_bytes_that_are_no_utf8(fake: FakeNvml) -> None:
    (probe,) = Node(fake, "gpus 1", r"name H100\xff\x1b[31m\x07 80GB").gpus
    assert probe.info.name == "H100\ufffd\ufffd[31m\ufffd 80GB"


@pytest.mark.parametrize(("code", "kind", "words"), [
    (9, NoDataError, ("kernel module", "--demo")),
    (12, NoDataError, ("libnvidia-ml.so.1", "--demo")),
    (18, GputopError, ("different versions", "Reboot")),
    (4, GputopError, ("no permission", "/dev/nvidiactl")),
    (8, GputopError, ("power cables", "nvidia-smi")),
    (998, GputopError, ("998", "nvidia-smi")),
])
def test_a_driver_that_cannot_be_opened(
        fake: FakeNvml, code: int, kind: type[GputopError], words: tuple[str, ...]) -> None:
    with pytest.raises(GputopError) as caught:
        Node(fake, f"init {code}")
    assert type(caught.value) is kind
    for word in words:
        assert word in str(caught.value)


def test_a_driver_without_gpus(fake: FakeNvml) -> None:
    with pytest.raises(NoDataError, match="cannot see any GPU"):
        Node(fake, "gpus 0")


def test_mig_mode_is_named_as_the_reason(fake: FakeNvml) -> None:
    sample = Node(fake, "gpus 1", "set mig 1", "refuse nvmlDeviceGetUtilizationRates 3").sample()
    assert "MIG" in (sample["gpu_util"].reason or "")


OPEN = """
from gputop.core.errors import GputopError
from gputop.sources.nvml.source import NvmlSource
import sys
assert "pynvml" not in sys.modules and "psutil" not in sys.modules
source = NvmlSource()
try:
    source.open()
except GputopError as error:
    print(error)
    raise SystemExit(error.exit_code)
print(source.label, len(source.gpus))
source.close()
"""


def run_opening(env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", OPEN], env=env, capture_output=True, text=True, timeout=60)


def test_no_library_at_all(tmp_path: Path) -> None:
    # An unusable file, so that a machine with a driver does not find its own either.
    (tmp_path / "libnvidia-ml.so.1").write_text("no library\n")
    done = run_opening({**os.environ, "LD_LIBRARY_PATH": str(tmp_path)})
    assert done.returncode == EXIT_NO_DATA, done.stderr
    assert "has no NVIDIA driver" in done.stdout
    assert "gputop --demo" in done.stdout


def test_a_process_of_its_own_finds_the_fake(nvml_library: Path) -> None:
    done = run_opening(environment(nvml_library, "gpus 2", "gpm 0", "driver 550.1"))
    assert done.stdout == "NVML, driver 550.1 2\n", done.stderr

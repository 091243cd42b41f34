"""The host: psutil's counters of the test's choice, made-up /proc/stat, and this machine."""

from __future__ import annotations

import os
import sys
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from gputop.core.metrics import HOST_METRICS
from gputop.sources.host.process_table import NOT_SCANNED_YET
from gputop.sources.host.process_table import PERIOD_S as TABLE_PERIOD_S
from gputop.sources.host.source import CORES_PERIOD_S, FIRST, PERIOD_S, PsutilHost
from tests.sources.host.proc_tree import TICKS_PER_S, ProcTree, Ticking

Disk = namedtuple("Disk", "read_bytes write_bytes")
Net = namedtuple("Net", "bytes_recv bytes_sent")


@pytest.fixture
def ticking() -> Ticking:
    return Ticking()


class FakePsutil(SimpleNamespace):
    """psutil's functions with figures of the test's choice."""

    def virtual_memory(self) -> Any:
        return SimpleNamespace(total=1000, available=400)

    def disk_io_counters(self, **_: object) -> Any:
        if isinstance(self.disks, Exception):
            raise self.disks
        return dict(self.disks)

    def net_io_counters(self, **_: object) -> Any:
        return dict(self.cards)


def cpu(root: Path, total: str, *cores: tuple[int, str]) -> None:
    """Write /proc/stat: user nice system idle iowait irq softirq steal guest guest_nice, in ticks."""
    lines = [f"cpu  {total}", *(f"cpu{n} {times}" for n, times in cores), "intr 1 2 3", "btime 1000"]
    (root / "proc/stat").write_text("\n".join(lines) + "\n")


def made_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ticking: Ticking) -> tuple[PsutilHost, FakePsutil]:
    fake = FakePsutil(
        disks={"vda": Disk(1000, 0), "vda1": Disk(1000, 0), "dm-0": Disk(1000, 0)},
        cards={"lo": Net(10**9, 10**9), "eth0": Net(500, 100), "bond0": Net(500, 100)},
    )
    for folder in ("block/vda", "class/net/eth0"):
        (tmp_path / "sys" / folder / "device").mkdir(parents=True)
    (tmp_path / "proc").mkdir()
    cpu(tmp_path, "100 0 50 800 50 0 0 0 30 0", *((n, "25 0 10 200 10 0 0 0 5 0") for n in range(4)))
    monkeypatch.setitem(sys.modules, "psutil", fake)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    return PsutilHost(clock=ticking, root=tmp_path), fake


def test_the_first_sample_has_no_rates_and_says_why(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ticking: Ticking
) -> None:
    host, _ = made_up(monkeypatch, tmp_path, ticking)
    sample = host.read(0.0)
    assert sample.readings.keys() == HOST_METRICS.keys()
    assert sample["memory_used_bytes"].value == 600
    assert sample["memory_total_bytes"].value == 1000
    assert sample.cpu_count == 4
    for metric in HOST_METRICS.keys() - {"memory_used_bytes", "memory_total_bytes"}:
        assert sample[metric].reason == FIRST


def test_rates_count_physical_devices_once_and_no_loopback(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ticking: Ticking
) -> None:
    host, fake = made_up(monkeypatch, tmp_path, ticking)
    host.read(0.0)
    ticking.now_s += 2.0
    # 100 ticks: 60 user of which 20 guest (counted in user), 10 system, 20 idle, 10 iowait.
    cpu(tmp_path, "160 0 60 820 60 0 0 0 50 0", (0, "25 0 10 200 10 0 0 0 5 0"))
    fake.disks = {"vda": Disk(5000, 600), "vda1": Disk(5000, 600), "dm-0": Disk(5000, 600)}
    fake.cards = {"lo": Net(2 * 10**9, 2 * 10**9), "eth0": Net(2500, 300), "bond0": Net(2500, 300)}
    values = {metric: reading.value for metric, reading in host.read(0.0).readings.items()}
    assert values["cpu_ratio"] == pytest.approx(0.7)
    assert values["iowait_ratio"] == pytest.approx(0.1)
    assert values["disk_read_bytes_per_s"] == 2000
    assert values["disk_write_bytes_per_s"] == 300
    assert values["net_rx_bytes_per_s"] == 1000
    assert values["net_tx_bytes_per_s"] == 100


def test_without_physical_devices_all_count_and_without_any_there_is_a_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ticking: Ticking
) -> None:
    host, fake = made_up(monkeypatch, tmp_path, ticking)
    fake.disks, fake.cards = {}, {"lo": Net(0, 0), "veth1": Net(100, 100)}
    host.read(0.0)
    ticking.now_s += 1.0
    fake.cards = {"lo": Net(0, 0), "veth1": Net(300, 100)}
    sample = host.read(0.0)
    assert sample["net_rx_bytes_per_s"].value == 200
    assert "does not report disk counters" in (sample["disk_read_bytes_per_s"].reason or "")


def test_a_counter_that_goes_back_is_no_rate(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ticking: Ticking) -> None:
    host, fake = made_up(monkeypatch, tmp_path, ticking)
    host.read(0.0)
    ticking.now_s += 1.0
    fake.disks = {"vda": Disk(10, 5)}
    sample = host.read(0.0)
    assert "went back" in (sample["disk_read_bytes_per_s"].reason or "")
    assert sample["disk_write_bytes_per_s"].value == 5


def test_what_psutil_cannot_read_is_missing_and_the_rest_is_not(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ticking: Ticking
) -> None:
    host, fake = made_up(monkeypatch, tmp_path, ticking)
    fake.disks = NotImplementedError("/proc/diskstats not available")
    fake.virtual_memory = lambda: {}["MemTotal"]
    sample = host.read(0.0)
    assert sample["disk_read_bytes_per_s"].reason == "psutil: /proc/diskstats not available"
    assert "MemTotal" in (sample["memory_used_bytes"].reason or "")
    assert sample["net_rx_bytes_per_s"].reason == FIRST


def test_each_core(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ticking: Ticking) -> None:
    host, _ = made_up(monkeypatch, tmp_path, ticking)
    assert host.read(0.0).core_ratios == ()
    ticking.now_s += 1.0
    cpu(tmp_path, "100 0 50 800 60 0 0 0 30 0",
        (0, "125 0 10 200 10 0 0 0 105 0"),  # busy, in a guest
        (1, "25 0 10 300 10 0 0 0 5 0"),
        (3, "25 0 43 233 44 0 0 0 5 0"),  # a third each: system, idle, iowait; and 2 went offline
        (10, "9 0 0 0 0 0 0 0 0 0"))  # came online: it has no sample before
    sample = host.read(0.0)
    assert sample.core_ratios == (1.0, 0.0, 0.33)
    assert sample.cpu_count == 4
    ticking.now_s += PERIOD_S
    cpu(tmp_path, "100 0 50 900 60 0 0 0 30 0", (0, "125 0 10 300 10 0 0 0 105 0"))
    sample = host.read(0.0)
    assert sample.core_ratios == (1.0, 0.0, 0.33), "over less time it is mostly rounding"
    assert sample.cpu_count == 1
    ticking.now_s += CORES_PERIOD_S
    assert host.read(0.0).core_ratios == (0.0,)


@pytest.mark.parametrize(
    "content", ["", "cpu\n", "cpu  1 2 3\n", "cpu  a b c d e f g h\n", "cpu 1 2 3 4 5\ncpuX 1 2 3 4 5\n"]
)
def test_a_stat_that_makes_no_sense(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ticking: Ticking, content: str
) -> None:
    host, _ = made_up(monkeypatch, tmp_path, ticking)
    host.read(0.0)
    ticking.now_s += 1.0
    (tmp_path / "proc/stat").write_text(content)
    sample = host.read(0.0)
    assert sample["cpu_ratio"].reason == sample["iowait_ratio"].reason == "/proc/stat is malformed"
    assert (sample.core_ratios, sample.cpu_count) == ((), None)
    (tmp_path / "proc/stat").unlink()
    ticking.now_s += 1.0
    assert host.read(0.0)["cpu_ratio"].reason == "/proc/stat: No such file or directory"


def test_within_one_kernel_tick_there_is_no_share(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ticking: Ticking
) -> None:
    host, _ = made_up(monkeypatch, tmp_path, ticking)
    host.read(0.0)
    ticking.now_s += 1.0
    assert host.read(0.0)["cpu_ratio"].reason == "the interval is too short"


def test_between_the_periods_the_last_sample_stays(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ticking: Ticking
) -> None:
    host, _ = made_up(monkeypatch, tmp_path, ticking)
    first = host.read(0.0)
    ticking.now_s += PERIOD_S / 2
    assert host.read(0.0) is first
    ticking.now_s += PERIOD_S
    assert host.read(0.0) is not first


def test_what_the_container_may_use(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ticking: Ticking) -> None:
    host, _ = made_up(monkeypatch, tmp_path, ticking)
    assert host.read(0.0).cgroup is None, "there are no control groups"
    (tmp_path / "proc/self").mkdir()
    (tmp_path / "proc/self/mountinfo").write_text("30 20 0:26 / /cg rw - cgroup2 cgroup2 rw\n")
    (tmp_path / "proc/self/cgroup").write_text("0::/\n")
    (tmp_path / "cg").mkdir()
    (tmp_path / "cg/cpu.max").write_text("max 100000\n")
    (tmp_path / "cg/cpu.stat").write_text("usage_usec 0\n")
    ticking.now_s += 1.0
    assert host.read(0.0).cpu_limit_cores is None, "all four cores, no quota"
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    ticking.now_s += 1.0
    assert host.read(0.0).cpu_limit_cores == 2.0
    (tmp_path / "cg/cpu.max").write_text("150000 100000\n")
    ticking.now_s += 1.0
    assert host.read(0.0).cpu_limit_cores == 2.0, "read every ten seconds"
    ticking.now_s += 10.0
    sample = host.read(0.0)
    assert sample.cpu_limit_cores == 1.5
    assert sample.cgroup is not None and sample.cgroup["cpu_limit_cores"].value == 1.5


def test_the_processes_that_use_most(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ticking: Ticking) -> None:
    host, _ = made_up(monkeypatch, tmp_path, ticking)
    host.read(0.0)
    assert host.processes(0.0, ()) == ()
    sample = host.read(0.0)
    assert sample.top_processes == () and sample.top_reason == NOT_SCANNED_YET, "not at the first tick"
    tree = ProcTree(tmp_path / "proc")
    for pid in range(10, 40):
        tree.add(pid, start=pid, ticks=0, cmdline=b"worker\0%d\0" % pid)
    for _ in range(2):
        ticking.now_s += PERIOD_S + 0.9
        host.processes(0.0, ())
        sample = host.read(0.0)
    assert len(sample.top_processes) == 8 and sample.top_reason is None, "those with most memory"
    assert {p.cpu_cores.reason for p in sample.top_processes} == {FIRST}
    for pid in range(10, 40):
        tree.add(pid, start=pid, ticks=5 * pid * TICKS_PER_S // 10, cmdline=b"worker\0%d\0" % pid)
    tree.add(20, start=999, ticks=10**6)  # another process by now
    ticking.now_s += TABLE_PERIOD_S
    host.processes(0.0, ())
    sample = host.read(0.0)
    top = sorted(sample.top_processes, key=lambda p: -(p.cpu_cores.value or 0.0))[:8]
    assert [p.pid for p in top] == list(range(39, 31, -1))
    elapsed_s = TABLE_PERIOD_S + PERIOD_S + 0.9
    assert top[0].command == "worker 39" and top[0].user == "4711"
    assert top[0].cpu_cores.value == pytest.approx(5 * 39 / 10 / elapsed_s)
    assert top[0].rss_bytes.value == 256 * os.sysconf("SC_PAGE_SIZE")


def test_this_machine(ticking: Ticking) -> None:
    host = PsutilHost(clock=ticking)
    host.read(0.0)
    ticking.now_s += 1.0
    sample = host.read(0.0)
    assert sample.hostname
    assert sample.cpu_count == psutil.cpu_count()
    assert all(0 <= ratio <= 1 for ratio in sample.core_ratios)
    total, used = sample["memory_total_bytes"].value, sample["memory_used_bytes"].value
    assert total is not None and used is not None and 0 < used < total

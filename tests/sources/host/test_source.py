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
from gputop.core.samples import HostSample
from gputop.sources.host.process_table import NOT_SCANNED_YET
from gputop.sources.host.process_table import PERIOD_S as TABLE_PERIOD_S
from gputop.sources.host.source import CORES_PERIOD_S, FIRST, PERIOD_S, PsutilHost
from tests.sources.host.proc_tree import TICKS_PER_S, ProcTree, Ticking

Disk = namedtuple("Disk", "read_bytes write_bytes")
Net = namedtuple("Net", "bytes_recv bytes_sent")


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


class MadeUp:
    """A host of four cores, a disk and a card, whose clock and psutil tests turn."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
        self.root, self.ticking = root, Ticking()
        self.psutil = FakePsutil(
            disks={"vda": Disk(1000, 0), "vda1": Disk(1000, 0), "dm-0": Disk(1000, 0)},
            cards={"lo": Net(10**9, 10**9), "eth0": Net(500, 100), "bond0": Net(500, 100)})
        for folder in ("block/vda", "class/net/eth0"):
            (root / "sys" / folder / "device").mkdir(parents=True)
        (root / "proc").mkdir()
        self.cpu("100 0 50 800 50 0 0 0 30 0", *((n, "25 0 10 200 10 0 0 0 5 0") for n in range(4)))
        monkeypatch.setitem(sys.modules, "psutil", self.psutil)
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
        self._host = PsutilHost(clock=self.ticking, root=root)

    def cpu(self, total: str, *cores: tuple[int, str]) -> None:
        """Write /proc/stat: user nice system idle iowait irq softirq steal guest guest_nice, in ticks."""
        lines = [f"cpu  {total}", *(f"cpu{n} {times}" for n, times in cores), "intr 1 2 3", "btime 1000"]
        (self.root / "proc/stat").write_text("\n".join(lines) + "\n")

    def read(self, after_s: float = 0.0) -> HostSample:
        self.ticking.now_s += after_s
        return self._host.read(0.0)

    def scan(self, after_s: float = 0.0) -> HostSample:
        """A sample after the processes were looked at, of which none holds a GPU."""
        self.ticking.now_s += after_s
        assert self._host.processes(0.0, ()) == ()
        return self._host.read(0.0)


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> MadeUp:
    return MadeUp(monkeypatch, tmp_path)


def test_the_first_sample_has_no_rates_and_says_why(host: MadeUp) -> None:
    sample = host.read()
    assert sample.readings.keys() == HOST_METRICS.keys()
    assert sample["memory_used_bytes"].value == 600
    assert sample["memory_total_bytes"].value == 1000
    assert sample.cpu_count == 4
    for metric in HOST_METRICS.keys() - {"memory_used_bytes", "memory_total_bytes"}:
        assert sample[metric].reason == FIRST


def test_rates_count_physical_devices_once_and_no_loopback(host: MadeUp) -> None:
    host.read()
    # 100 ticks: 60 user of which 20 guest (counted in user), 10 system, 20 idle, 10 iowait.
    host.cpu("160 0 60 820 60 0 0 0 50 0", (0, "25 0 10 200 10 0 0 0 5 0"))
    host.psutil.disks = {"vda": Disk(5000, 600), "vda1": Disk(5000, 600), "dm-0": Disk(5000, 600)}
    host.psutil.cards = {"lo": Net(2 * 10**9, 2 * 10**9), "eth0": Net(2500, 300), "bond0": Net(2500, 300)}
    values = {metric: reading.value for metric, reading in host.read(2.0).readings.items()}
    assert values["cpu_ratio"] == pytest.approx(0.7)
    assert values["iowait_ratio"] == pytest.approx(0.1)
    assert values["disk_read_bytes_per_s"] == 2000
    assert values["disk_write_bytes_per_s"] == 300
    assert values["net_rx_bytes_per_s"] == 1000
    assert values["net_tx_bytes_per_s"] == 100


def test_without_physical_devices_all_count_and_without_any_there_is_a_reason(host: MadeUp) -> None:
    host.psutil.disks, host.psutil.cards = {}, {"lo": Net(0, 0), "veth1": Net(100, 100)}
    host.read()
    host.psutil.cards = {"lo": Net(0, 0), "veth1": Net(300, 100)}
    sample = host.read(1.0)
    assert sample["net_rx_bytes_per_s"].value == 200
    assert "does not report disk counters" in (sample["disk_read_bytes_per_s"].reason or "")


def test_a_counter_that_goes_back_is_no_rate(host: MadeUp) -> None:
    host.read()
    host.psutil.disks = {"vda": Disk(10, 5)}
    sample = host.read(1.0)
    assert "went back" in (sample["disk_read_bytes_per_s"].reason or "")
    assert sample["disk_write_bytes_per_s"].value == 5


def test_what_psutil_cannot_read_is_missing_and_the_rest_is_not(host: MadeUp) -> None:
    host.psutil.disks = NotImplementedError("/proc/diskstats not available")
    host.psutil.virtual_memory = lambda: {}["MemTotal"]
    sample = host.read()
    assert sample["disk_read_bytes_per_s"].reason == "psutil: /proc/diskstats not available"
    assert "MemTotal" in (sample["memory_used_bytes"].reason or "")
    assert sample["net_rx_bytes_per_s"].reason == FIRST


def test_each_core(host: MadeUp) -> None:
    assert host.read().core_ratios == ()
    host.cpu("100 0 50 800 60 0 0 0 30 0",
             (0, "125 0 10 200 10 0 0 0 105 0"),  # busy, in a guest
             (1, "25 0 10 300 10 0 0 0 5 0"),
             (3, "25 0 43 233 44 0 0 0 5 0"),  # a third each: system, idle, iowait; and 2 went offline
             (10, "9 0 0 0 0 0 0 0 0 0"))  # came online: it has no sample before
    sample = host.read(1.0)
    assert sample.core_ratios == (1.0, 0.0, 0.33)
    assert sample.cpu_count == 4
    host.cpu("100 0 50 900 60 0 0 0 30 0", (0, "125 0 10 300 10 0 0 0 105 0"))
    sample = host.read(PERIOD_S)
    assert sample.core_ratios == (1.0, 0.0, 0.33), "over less time it is mostly rounding"
    assert sample.cpu_count == 1
    assert host.read(CORES_PERIOD_S).core_ratios == (0.0,)


@pytest.mark.parametrize(
    "content", ["", "cpu\n", "cpu  1 2 3\n", "cpu  a b c d e f g h\n", "cpu 1 2 3 4 5\ncpuX 1 2 3 4 5\n"]
)
def test_a_stat_that_makes_no_sense(host: MadeUp, content: str) -> None:
    host.read()
    (host.root / "proc/stat").write_text(content)
    sample = host.read(1.0)
    assert sample["cpu_ratio"].reason == sample["iowait_ratio"].reason == "/proc/stat is malformed"
    assert (sample.core_ratios, sample.cpu_count) == ((), None)
    (host.root / "proc/stat").unlink()
    assert host.read(1.0)["cpu_ratio"].reason == "/proc/stat: No such file or directory"


def test_within_one_kernel_tick_there_is_no_share(host: MadeUp) -> None:
    host.read()
    assert host.read(1.0)["cpu_ratio"].reason == "the interval is too short"


def test_between_the_periods_the_last_sample_stays(host: MadeUp) -> None:
    first = host.read()
    assert host.read(PERIOD_S / 2) is first
    assert host.read(PERIOD_S) is not first


def test_what_the_container_may_use(host: MadeUp, monkeypatch: pytest.MonkeyPatch) -> None:
    assert host.read().cgroup is None, "there are no control groups"
    (host.root / "proc/self").mkdir()
    (host.root / "proc/self/mountinfo").write_text("30 20 0:26 / /cg rw - cgroup2 cgroup2 rw\n")
    (host.root / "proc/self/cgroup").write_text("0::/\n")
    (host.root / "cg").mkdir()
    (host.root / "cg/cpu.max").write_text("max 100000\n")
    (host.root / "cg/cpu.stat").write_text("usage_usec 0\n")
    assert host.read(1.0).cpu_limit_cores is None, "all four cores, no quota"
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    assert host.read(1.0).cpu_limit_cores == 2.0
    (host.root / "cg/cpu.max").write_text("150000 100000\n")
    assert host.read(1.0).cpu_limit_cores == 2.0, "read every ten seconds"
    sample = host.read(10.0)
    assert sample.cpu_limit_cores == 1.5
    assert sample.cgroup is not None and sample.cgroup["cpu_limit_cores"].value == 1.5


def test_the_processes_that_use_most(host: MadeUp) -> None:
    host.read()
    sample = host.scan()
    assert sample.top_processes == () and sample.top_reason == NOT_SCANNED_YET, "not at the first tick"
    tree = ProcTree(host.root / "proc")
    for pid in range(10, 40):
        tree.add(pid, start=pid, ticks=0, cmdline=b"worker\0%d\0" % pid)
    for _ in range(2):
        sample = host.scan(PERIOD_S + 0.9)
    assert len(sample.top_processes) == 8 and sample.top_reason is None, "those with most memory"
    assert {p.cpu_cores.reason for p in sample.top_processes} == {FIRST}
    for pid in range(10, 40):
        tree.add(pid, start=pid, ticks=5 * pid * TICKS_PER_S // 10, cmdline=b"worker\0%d\0" % pid)
    tree.add(20, start=999, ticks=10**6)  # another process by now
    sample = host.scan(TABLE_PERIOD_S)
    top = sorted(sample.top_processes, key=lambda p: -(p.cpu_cores.value or 0.0))[:8]
    assert [p.pid for p in top] == list(range(39, 31, -1))
    elapsed_s = TABLE_PERIOD_S + PERIOD_S + 0.9
    assert top[0].command == "worker 39" and top[0].user == "4711"
    assert top[0].cpu_cores.value == pytest.approx(5 * 39 / 10 / elapsed_s)
    assert top[0].rss_bytes.value == 256 * os.sysconf("SC_PAGE_SIZE")


def test_this_machine() -> None:
    ticking = Ticking()
    host = PsutilHost(clock=ticking)
    host.read(0.0)
    ticking.now_s += 1.0
    sample = host.read(0.0)
    assert sample.hostname
    assert sample.cpu_count == psutil.cpu_count()
    assert all(0 <= ratio <= 1 for ratio in sample.core_ratios)
    total, used = sample["memory_total_bytes"].value, sample["memory_used_bytes"].value
    assert total is not None and used is not None and 0 < used < total

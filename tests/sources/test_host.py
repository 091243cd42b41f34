"""The host by psutil, and the processes that hold GPUs, against real processes and made-up /proc trees."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from gputop.metrics import HOST_METRICS
from gputop.samples import GpuInfo, GpuProcess, GpuSample, Reading
from gputop.sources import host_processes as hp
from gputop.sources.host import FIRST, PsutilHost
from gputop.sources.host_processes import ProcessTable, parse_stat

Cpu = namedtuple("Cpu", "user nice system idle iowait irq softirq steal guest guest_nice")
Disk = namedtuple("Disk", "read_bytes write_bytes")
Net = namedtuple("Net", "bytes_recv bytes_sent")


class Ticking:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def ticking() -> Ticking:
    return Ticking()


def on_gpus(*pids: int, gpus: int = 1) -> list[GpuSample]:
    held = tuple(
        GpuProcess(pid, "C", Reading(1.0, "bytes"), Reading.missing("ratio", "not sampled yet")) for pid in pids
    )
    return [GpuSample(GpuInfo(i, f"GPU-{i}", "H100"), {}, held) for i in range(gpus)]


# -- the host ------------------------------------------------------------------------------------


class FakePsutil(SimpleNamespace):
    """psutil's functions with figures of the test's choice."""

    def cpu_count(self) -> int:
        return 4

    def cpu_times(self) -> Cpu:
        return self.cpu

    def virtual_memory(self) -> Any:
        return SimpleNamespace(total=1000, available=400)

    def disk_io_counters(self, **_: object) -> Any:
        return dict(self.disks)

    def net_io_counters(self, **_: object) -> Any:
        return dict(self.cards)

    def boot_time(self) -> float:
        return 1.0


def made_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ticking: Ticking) -> tuple[PsutilHost, FakePsutil]:
    fake = FakePsutil(
        cpu=Cpu(100, 0, 50, 800, 50, 0, 0, 0, 30, 0),
        disks={"vda": Disk(1000, 0), "vda1": Disk(1000, 0), "dm-0": Disk(1000, 0)},
        cards={"lo": Net(10**9, 10**9), "eth0": Net(500, 100), "bond0": Net(500, 100)},
    )
    for folder in ("block/vda", "class/net/eth0"):
        (tmp_path / "sys" / folder / "device").mkdir(parents=True)
    monkeypatch.setitem(sys.modules, "psutil", fake)
    return PsutilHost(clock=ticking, root=tmp_path), fake


def test_first_look_has_no_rates_and_says_why(
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
    fake.cpu = Cpu(160, 0, 60, 820, 60, 0, 0, 0, 50, 0)
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
    assert "no disk counters" in (sample["disk_read_bytes_per_s"].reason or "")


def test_a_counter_that_goes_back_is_no_rate(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ticking: Ticking) -> None:
    host, fake = made_up(monkeypatch, tmp_path, ticking)
    host.read(0.0)
    ticking.now_s += 1.0
    fake.disks = {"vda": Disk(10, 5)}
    sample = host.read(0.0)
    assert "went back" in (sample["disk_read_bytes_per_s"].reason or "")
    assert sample["disk_write_bytes_per_s"].value == 5


def test_this_machine() -> None:
    host = PsutilHost()
    host.read(0.0)
    sample = host.read(0.0)
    assert sample.hostname
    assert sample.cpu_count == psutil.cpu_count()
    total, used = sample["memory_total_bytes"].value, sample["memory_used_bytes"].value
    assert total is not None and used is not None and 0 < used < total


# -- processes that exist -------------------------------------------------------------------------


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    """A process that burns CPU in a worker of its own, until its input is closed."""
    worker = "import sys\nprint('on', flush=True)\nwhile True: pass"
    script = (
        "import subprocess, sys\n"
        f"worker = subprocess.Popen([sys.executable, '-c', {worker!r}], stdout=subprocess.PIPE)\n"
        "worker.stdout.readline()\n"
        "print(worker.pid, flush=True)\n"
        "sys.stdin.read()\n"
        "worker.kill()\n"
        "worker.wait()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script, "train\x1b[31m.py"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    yield process
    assert process.stdin is not None and process.stdout is not None
    process.stdin.close()
    process.stdout.close()
    process.wait(timeout=30)


def worker_of(child: subprocess.Popen[bytes]) -> int:
    assert child.stdout is not None
    return int(child.stdout.readline())


def burnt_ticks(pid: int) -> int:
    stat = parse_stat(Path(f"/proc/{pid}/stat").read_bytes())
    assert stat is not None
    return stat.cpu_ticks


def test_a_real_process_with_a_worker(child: subprocess.Popen[bytes], ticking: Ticking) -> None:
    worker = worker_of(child)
    table = ProcessTable(psutil, ticking)
    (sample,) = table.read(on_gpus(child.pid))
    assert sample.command is not None and sample.command.endswith("train\ufffd[31m.py")
    assert sample.user == psutil.Process().username()
    assert sample.rss_bytes.value is not None and sample.rss_bytes.value > 1 << 20
    assert sample.threads == 1
    assert sample.parent_pid == os.getpid()
    assert sample.started_s is not None
    assert abs(sample.started_s - psutil.Process(child.pid).create_time()) < 1.0
    assert sample.cpu_cores.reason == hp.FIRST
    before = burnt_ticks(worker)
    while burnt_ticks(worker) < before + 5:  # it burns a core: 50 ms
        pass
    ticking.now_s += 1.0
    (sample,) = table.read(on_gpus(child.pid))
    assert sample.cpu_cores.value is not None
    assert sample.cpu_cores.value >= 0.05, "the worker's CPU is not in its parent's"


def test_a_worker_with_a_gpu_of_its_own_is_not_counted_twice(child: subprocess.Popen[bytes], ticking: Ticking) -> None:
    worker = worker_of(child)
    table = ProcessTable(psutil, ticking)
    table.read(on_gpus(child.pid, worker))
    before = burnt_ticks(worker)
    while burnt_ticks(worker) < before + 5:
        pass
    ticking.now_s += 1.0
    parent, of_worker = table.read(on_gpus(child.pid, worker))
    assert parent.cpu_cores.value == 0
    assert of_worker.cpu_cores.value is not None and of_worker.cpu_cores.value >= 0.05


def test_one_process_on_several_gpus_is_one_row(ticking: Ticking) -> None:
    (sample,) = ProcessTable(psutil, ticking).read(on_gpus(os.getpid(), gpus=3))
    assert sorted(sample.gpus) == [0, 1, 2]


def test_an_ended_process_and_a_zombie(ticking: Ticking) -> None:
    process = subprocess.Popen([sys.executable, "-c", "pass"], stdin=subprocess.DEVNULL)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # ended, not collected: a zombie
    table = ProcessTable(psutil, ticking)
    (sample,) = table.read(on_gpus(process.pid))
    assert sample.reason == hp.ZOMBIE
    assert sample.rss_bytes.value is None
    process.wait()
    (sample,) = table.read(on_gpus(process.pid))
    assert sample.reason == hp.ENDED
    assert sample.command is None


# -- processes that are made up -------------------------------------------------------------------


class FakeProcess:
    def __init__(self, pid: int) -> None:
        self.pid = pid

    def username(self) -> str:
        return "4711"  # what psutil says for a uid that has no name

    def cmdline(self) -> list[str]:
        if self.pid == 13:
            raise psutil.AccessDenied(13)
        return ["python", "train.py"] if self.pid != 14 else []

    def name(self) -> str:
        return "kworker"


PROC = SimpleNamespace(
    Process=FakeProcess,
    boot_time=lambda: 1000.0,
    ZombieProcess=psutil.ZombieProcess,
    NoSuchProcess=psutil.NoSuchProcess,
    AccessDenied=psutil.AccessDenied,
)


def add(proc: Path, pid: int, parent: int = 1, ticks: int = 0, start: int = 500, state: str = "S") -> None:
    folder = proc / str(pid)
    folder.mkdir(parents=True, exist_ok=True)
    fields = [state, parent, 0, 0, 0, 0, 0, 0, 0, 0, 0, ticks, 0, 0, 0, 20, 0, 7, 0, start, 0, 256]
    (folder / "stat").write_text(f"{pid} (a ) b (c) " + " ".join(map(str, fields)) + " 0 0\n")


def namespace(proc: Path, inode: int) -> None:
    (proc / "self/ns").mkdir(parents=True)
    (proc / "self/ns/pid").symlink_to(f"pid:[{inode}]")


def test_grandchildren_count_and_newcomers_only_from_then_on(tmp_path: Path, ticking: Ticking) -> None:
    hz = os.sysconf("SC_CLK_TCK")
    add(tmp_path, 10)
    add(tmp_path, 20, parent=10, ticks=5 * hz)
    add(tmp_path, 30, parent=20)
    table = ProcessTable(PROC, ticking, tmp_path)
    table.read(on_gpus(10))
    ticking.now_s += 2.0
    add(tmp_path, 10, ticks=hz)
    add(tmp_path, 20, parent=10, ticks=7 * hz)
    add(tmp_path, 30, parent=20, ticks=hz)
    (sample,) = table.read(on_gpus(10))
    assert sample.cpu_cores.value == 2.0  # (1 + 2 + 1) CPU seconds in 2 s
    assert sample.threads == 7
    assert sample.rss_bytes.value == 256 * os.sysconf("SC_PAGE_SIZE")
    assert sample.started_s == 1000.0 + 500 / hz
    add(tmp_path, 40, parent=10, ticks=1000 * hz)
    ticking.now_s += hp.TABLE_PERIOD_S
    assert table.read(on_gpus(10))[0].cpu_cores.value == 0  # what it used before it was met belongs to no interval
    ticking.now_s += 1.0
    add(tmp_path, 40, parent=10, ticks=1001 * hz)
    assert table.read(on_gpus(10))[0].cpu_cores.value == 1.0


def test_a_pid_that_now_belongs_to_another_process(tmp_path: Path, ticking: Ticking) -> None:
    add(tmp_path, 10, ticks=100_000, start=500)
    table = ProcessTable(PROC, ticking, tmp_path)
    table.read(on_gpus(10))
    ticking.now_s += 1.0
    add(tmp_path, 10, ticks=3, start=900)
    (sample,) = table.read(on_gpus(10))
    assert sample.cpu_cores.reason == hp.FIRST


def test_users_without_names_and_commands_that_may_not_be_read(tmp_path: Path, ticking: Ticking) -> None:
    for pid in (10, 13, 14):
        add(tmp_path, pid)
    plain, denied, kernel = ProcessTable(PROC, ticking, tmp_path).read(on_gpus(10, 13, 14))
    assert (plain.user, plain.command, plain.reason) == ("4711", "python train.py", None)
    assert (denied.user, denied.command, denied.reason) == ("4711", None, hp.DENIED)
    assert denied.rss_bytes.value is not None
    assert kernel.command == "[kworker]"


def test_host_pids_in_a_container(tmp_path: Path, ticking: Ticking) -> None:
    namespace(tmp_path, 4026532999)
    add(tmp_path, 10)  # the same number, some other process
    add(tmp_path, 11)
    (tmp_path / "11/fd").mkdir()
    (tmp_path / "11/fd/5").symlink_to("/dev/nvidia0")
    other, absent, same = ProcessTable(PROC, ticking, tmp_path).read(on_gpus(10, 12, 11))
    assert other.reason == absent.reason == hp.OTHER_NAMESPACE
    assert other.command is None
    assert same.command == "python train.py"


def test_a_process_hidden_by_hidepid(tmp_path: Path, ticking: Ticking) -> None:
    namespace(tmp_path, 4026531836)
    (sample,) = ProcessTable(PROC, ticking, tmp_path).read(on_gpus(os.getpid()))  # exists, but not in this /proc
    assert sample.reason == hp.HIDDEN


@pytest.mark.parametrize("text", [b"", b"1 (a", b"1 (a) S 2 3"])
def test_a_stat_cut_short(text: bytes) -> None:
    assert parse_stat(text) is None

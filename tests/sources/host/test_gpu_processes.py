"""The processes that hold GPUs: real ones, and made-up /proc trees."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from gputop.core.samples import ENDED, ZOMBIE, Reading
from gputop.sources.host import gpu_processes as hp
from gputop.sources.host.gpu_processes import GpuProcessTable, missing_process
from gputop.sources.host.proc_files import DENIED, parse_io, parse_stat
from gputop.sources.host.process_table import FIRST
from tests.records import replace
from tests.sources.host.proc_tree import SOME_NAMESPACE, TICKS_PER_S, ProcTree, Ticking, on_gpus
from tests.waiting import PATIENCE_S


@pytest.fixture
def ticking() -> Ticking:
    return Ticking()


# -- processes that exist -------------------------------------------------------------------------


@pytest.fixture
def child(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that burns CPU in a worker of its own, until its input is closed."""
    worker = "import sys\nprint('on', flush=True)\nwhile True: pass"
    script = (
        "import subprocess, sys\n"
        f"worker = subprocess.Popen([sys.executable, '-c', {worker!r}], stdout=subprocess.PIPE)\n"
        "worker.stdout.readline()\n"
        "print(worker.pid, flush=True)\n"
        "sys.stdin.read()\n"
        "worker.kill()\n"
        "worker.wait()\n")
    process = subprocess.Popen(
        [sys.executable, "-c", script, "train\x1b[31m.py"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "1,3", "NVIDIA_VISIBLE_DEVICES": "all"})
    yield process
    process.stdin.close()
    process.stdout.close()
    process.wait(timeout=PATIENCE_S)


def worker_of(child: subprocess.Popen[bytes]) -> int:
    return int(child.stdout.readline())


def burnt_ticks(pid: int) -> int:
    stat = parse_stat(Path(f"/proc/{pid}/stat").read_bytes())
    return stat.cpu_ticks


def test_a_real_process_with_a_worker(child: subprocess.Popen[bytes], ticking: Ticking) -> None:
    worker = worker_of(child)
    table = GpuProcessTable(ticking)
    (sample,) = table.read(on_gpus(child.pid))
    assert sample.command is not None and sample.command.endswith("train\ufffd[31m.py")
    assert sample.user == psutil.Process().username()
    assert sample.rss_bytes.value is not None and sample.rss_bytes.value > 1 << 20
    assert sample.threads == 1
    assert sample.parent_pid == os.getpid()
    assert sample.started_s is not None
    assert abs(sample.started_s - psutil.Process(child.pid).create_time()) < 1.0
    assert sample.cpu_cores.reason == FIRST
    assert sample.cuda_visible_devices == "1,3"
    assert not sample.reasons
    before = burnt_ticks(worker)
    while burnt_ticks(worker) < before + 5:  # it burns a core: 50 ms
        pass
    ticking.now_s += 1.0
    (sample,) = table.read(on_gpus(child.pid))
    assert sample.cpu_cores.value >= 0.05, "the worker's CPU is not in its parent's"


def test_a_worker_with_a_gpu_of_its_own_is_not_counted_twice(child: subprocess.Popen[bytes], ticking: Ticking) -> None:
    worker = worker_of(child)
    table = GpuProcessTable(ticking)
    table.read(on_gpus(child.pid, worker))
    before = burnt_ticks(worker)
    while burnt_ticks(worker) < before + 5:
        pass
    ticking.now_s += 1.0
    parent, of_worker = table.read(on_gpus(child.pid, worker))
    assert parent.cpu_cores.value == 0
    assert of_worker.cpu_cores.value is not None and of_worker.cpu_cores.value >= 0.05


def test_what_a_real_child_wrote_is_its_parents_once(tmp_path: Path, ticking: Ticking) -> None:
    """A child writes 1 MiB and is watched; then its parent collects it, and with it the kernel's counter."""
    written = 1 << 20
    writer = (
        "import os, sys\n"
        "fd = os.open(sys.argv[1], os.O_CREAT | os.O_WRONLY)\n"
        "sys.stdin.readline()\n"
        f"os.write(fd, b'x' * {written})\n"
        "print('written', flush=True)\n"
        "sys.stdin.readline()\n")
    script = (
        "import subprocess, sys\n"
        f"child = subprocess.Popen([sys.executable, '-c', {writer!r}, sys.argv[1]])\n"
        "print('on', flush=True)\n"
        "child.wait()\n"
        "print('collected', flush=True)\n"
        "sys.stdin.readline()\n")
    process = subprocess.Popen([sys.executable, "-c", script, str(tmp_path / "file")], stdin=subprocess.PIPE,
                               stdout=subprocess.PIPE)
    assert process.stdin is not None and process.stdout is not None

    def sample_cores() -> float | None:
        ticking.now_s += hp.TABLE_PERIOD_S
        (sample,) = table.read(on_gpus(process.pid))
        return sample.io_write_bytes_per_s.value

    assert process.stdout.readline() == b"on\n"
    table = GpuProcessTable(ticking)
    sample_cores()
    process.stdin.write(b"\n")
    process.stdin.flush()
    assert process.stdout.readline() == b"written\n"
    rate = sample_cores()
    process.stdin.write(b"\n")
    process.stdin.flush()
    assert process.stdout.readline() == b"collected\n"
    inherited = parse_io(Path(f"/proc/{process.pid}/io").read_bytes())
    collected = sample_cores()
    process.communicate(b"\n", timeout=PATIENCE_S)
    assert rate is not None and inherited is not None and collected is not None
    if rate > 0:  # a file system in memory has no storage to write to
        assert written <= rate * hp.TABLE_PERIOD_S <= inherited[1]
    assert collected * hp.TABLE_PERIOD_S < written / 2


def test_an_ended_process_and_a_zombie(ticking: Ticking) -> None:
    process = subprocess.Popen([sys.executable, "-c", "pass"], stdin=subprocess.DEVNULL)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # ended, not collected: a zombie
    table = GpuProcessTable(ticking)
    (sample,) = table.read(on_gpus(process.pid))
    assert sample.reason == ZOMBIE
    assert sample.rss_bytes.value is None
    process.wait()
    ticking.now_s += 1.0
    (sample,) = table.read(on_gpus(process.pid))
    assert sample.reason == sample.io_read_bytes_per_s.reason == ENDED
    assert sample.command is None


def test_of_a_process_that_has_ended_it_is_known_what_it_was(ticking: Ticking) -> None:
    process = subprocess.Popen(["sleep", "600"], stdin=subprocess.DEVNULL)
    table = GpuProcessTable(ticking)
    (sample,) = table.read(on_gpus(process.pid))
    assert sample.reason is None and sample.command == "sleep 600"
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    for why in (ZOMBIE, ENDED, ENDED):
        ticking.now_s += 1.0
        (sample,) = table.read(on_gpus(process.pid))
        assert (sample.command, sample.reason) == ("sleep 600", why) and sample.user
        process.wait()


# -- processes that are made up -------------------------------------------------------------------


@pytest.fixture
def proc(tmp_path: Path) -> ProcTree:
    return ProcTree(tmp_path)


def test_grandchildren_count_and_newcomers_only_from_then_on(proc: ProcTree, ticking: Ticking) -> None:
    hz = TICKS_PER_S
    proc.add(10)
    proc.add(20, parent=10, ticks=5 * hz, io=(10**6, 0))
    proc.add(30, parent=20)
    table = GpuProcessTable(ticking, proc.root)
    table.read(on_gpus(10))
    ticking.now_s += 2.0
    proc.add(10, ticks=hz, io=(0, 4000))
    proc.add(20, parent=10, ticks=7 * hz, io=(10**6 + 2000, 0))
    proc.add(30, parent=20, ticks=hz)
    (sample,) = table.read(on_gpus(10))
    assert sample.cpu_cores.value == 2.0  # (1 + 2 + 1) CPU seconds in 2 s
    assert (sample.io_read_bytes_per_s.value, sample.io_write_bytes_per_s.value) == (1000.0, 2000.0)
    assert sample.threads == 7
    assert sample.rss_bytes.value == 256 * os.sysconf("SC_PAGE_SIZE")
    assert sample.started_s == 1000.0 + 500 / hz
    proc.add(40, parent=10, ticks=1000 * hz, io=(10**9, 0))
    ticking.now_s += hp.TABLE_PERIOD_S
    (sample,) = table.read(on_gpus(10))  # what 40 used before it was met belongs to no interval
    assert sample.cpu_cores.value == sample.io_read_bytes_per_s.value == 0
    ticking.now_s += 1.0
    proc.add(40, parent=10, ticks=1001 * hz, io=(10**9 + 500, 0))
    (sample,) = table.read(on_gpus(10))
    assert (sample.cpu_cores.value, sample.io_read_bytes_per_s.value) == (1.0, 500.0)


def test_a_pid_that_now_belongs_to_another_process(proc: ProcTree, ticking: Ticking) -> None:
    proc.add(10, ticks=100_000, start=500, environ=b"CUDA_VISIBLE_DEVICES=0\0")
    table = GpuProcessTable(ticking, proc.root)
    table.read(on_gpus(10))
    ticking.now_s += 1.0
    proc.add(10, ticks=3, start=900, cmdline=b"other\0")
    (sample,) = table.read(on_gpus(10))
    assert sample.cpu_cores.reason == sample.io_read_bytes_per_s.reason == FIRST
    assert (sample.command, sample.cuda_visible_devices) == ("other", None)


def test_who_a_process_is(proc: ProcTree, ticking: Ticking) -> None:
    docker = f"0::/system.slice/docker-{'0123456789abcdef' * 4}.scope\n"
    proc.add(10, cgroup=docker, pids=(10, 7), environ=b"A=1\0CUDA_VISIBLE_DEVICES=\0NVIDIA_VISIBLE_DEVICES=all\0")
    proc.add(14, cmdline=b"", name=b"kworker")
    proc.add(15, uid=0)
    plain, kernel, root = GpuProcessTable(ticking, proc.root).read(on_gpus(10, 14, 15))
    assert (plain.user, plain.command, plain.reason) == ("4711", "python train.py", None)  # a uid without a name
    assert (plain.container, plain.container_pid) == ("docker 0123456789ab", 7)
    assert plain.cuda_visible_devices == ""  # set to nothing: it sees no GPU
    assert kernel.command == "[kworker]"
    assert (kernel.container, kernel.container_pid, kernel.cuda_visible_devices) == (None, None, None)
    assert root.user == "root"


def test_the_environment_is_read_again_only_after_another_program_was_started(proc: ProcTree, ticking: Ticking) -> None:
    proc.add(10, environ=b"CUDA_VISIBLE_DEVICES=0\0")
    table = GpuProcessTable(ticking, proc.root)
    table.read(on_gpus(10))
    proc.add(10, environ=b"CUDA_VISIBLE_DEVICES=1\0")
    ticking.now_s += hp.TABLE_PERIOD_S
    assert table.read(on_gpus(10))[0].cuda_visible_devices == "0"
    proc.add(10, environ=b"CUDA_VISIBLE_DEVICES=1\0", cmdline=b"exec\0")
    ticking.now_s += hp.TABLE_PERIOD_S
    assert table.read(on_gpus(10))[0].cuda_visible_devices == "1"


SITE = "/opt/venv/lib/python3.12/site-packages"
TENSORFLOW, JAX, PYTORCH = (f"{SITE}/{library}" for library in (
    "tensorflow/libtensorflow_framework.so.2", "jaxlib/_jax.so", "torch/lib/libtorch_cpu.so"))


@pytest.mark.parametrize(("libraries", "framework"), [
    ([TENSORFLOW], "tensorflow"), ([JAX], "jax"), ([PYTORCH], "pytorch"),
    ([TENSORFLOW, JAX], "jax"),  # which reads its input by tf.data
    ([TENSORFLOW, PYTORCH], ""), ([JAX, PYTORCH], ""),  # either may be there for its data loaders alone
    ([], ""), (["/home/ana/torch/libtorch_ops.so", "/data/tensorflow/weights.bin"], ""),
])
def test_the_framework_by_the_libraries(proc: ProcTree, ticking: Ticking, libraries: list[str], framework: str) -> None:
    proc.add(10)
    proc.map_libraries(10, "/usr/bin/python3.12", *libraries)
    (sample,) = GpuProcessTable(ticking, proc.root).read(on_gpus(10))
    assert sample.framework == framework


def test_the_libraries_are_looked_at_again_but_rarely(proc: ProcTree, ticking: Ticking) -> None:
    looks: list[str] = []

    def read(path: str, limit: int) -> bytes:
        looks.extend([path] * path.endswith("maps"))
        return Path(path).read_bytes()

    proc.add(10)
    table = GpuProcessTable(ticking, proc.root, read=read)
    found = [table.read(on_gpus(10))[0].framework]  # its maps cannot be read yet
    proc.map_libraries(10, TENSORFLOW)
    for scan in range(2, 100):
        if scan == 20:
            proc.map_libraries(10, TENSORFLOW, JAX)
        ticking.now_s += hp.TABLE_PERIOD_S
        found.append(table.read(on_gpus(10))[0].framework)
    assert (found[0], found[1], found[30], found[31]) == ("", "tensorflow", "tensorflow", "jax")
    assert len(looks) == 6
    proc.add(10, cmdline=b"python\0eval.py\0")  # another program in the same process
    proc.map_libraries(10, PYTORCH)
    ticking.now_s += hp.TABLE_PERIOD_S
    assert table.read(on_gpus(10))[0].framework == "pytorch"


def test_between_the_scans_only_the_gpus_are_new(proc: ProcTree, ticking: Ticking) -> None:
    proc.add(10)
    reads: list[str] = []
    table = GpuProcessTable(ticking, proc.root, read=lambda path, limit: reads.append(path) or Path(path).read_bytes())
    table.read(on_gpus(10))
    reads.clear()
    ticking.now_s += hp.UPDATE_PERIOD_S / 2
    (gpu,) = on_gpus(10)
    busy = replace(gpu, processes=(replace(gpu.processes[0], sm_ratio=Reading(0.5, "ratio")),))
    (sample,) = table.read([busy])
    assert sample.gpus[0].sm_ratio.value == 0.5
    assert reads == []
    proc.add(11)
    assert [p.command for p in table.read(on_gpus(10, 11))] == ["python train.py"] * 2  # a newcomer does not wait


def test_expensive_scans_come_less_often(proc: ProcTree, ticking: Ticking) -> None:
    for pid in range(10, 15):
        proc.add(pid)
    reads: list[str] = []

    def read(path: str, limit: int) -> bytes:
        reads.append(path)
        return Path(path).read_bytes()

    # Each read takes 5 ms of CPU: 10 ms for the two of a sample, 45 ms for the nine of the process table.
    table = GpuProcessTable(ticking, proc.root, read=read, cpu_clock=lambda: 0.005 * len(reads))
    table.read(on_gpus(10))
    for at_s, known, bystander in ((1.9, False, 1), (2.1, True, 1), (8.9, True, 1), (11.0, True, 2)):
        ticking.now_s = 100.0 + at_s
        (sample,) = table.read(on_gpus(10))
        assert (sample.cpu_cores.value is not None) == known, at_s
        assert sum(path.endswith("/11/stat") for path in reads) == bystander, at_s


def test_a_mig_instance_knows_more_than_the_gpu_it_is_part_of(proc: ProcTree, ticking: Ticking) -> None:
    proc.add(10)
    (whole,) = on_gpus(10)
    part = replace(whole, info=replace(whole.info, uuid="MIG-1", mig=1),
                   processes=(replace(whole.processes[0], mig=1),))
    for gpus in ([whole, part], [part, whole]):
        (sample,) = GpuProcessTable(ticking, proc.root).read(gpus)
        assert sample.gpus[0].mig == 1


def test_host_pids_in_a_container(tmp_path: Path, ticking: Ticking) -> None:
    proc = ProcTree(tmp_path, SOME_NAMESPACE)
    proc.add(10)  # the same number, some other process
    proc.add(11)
    proc.open_device(11)
    other, absent, same = GpuProcessTable(ticking, proc.root).read(on_gpus(10, 12, 11))
    assert other.reason == absent.reason == hp.OTHER_NAMESPACE
    assert other.command is None
    assert (same.command, same.local_pid, same.note) == ("python train.py", None, None)


def test_in_a_container_a_watched_process_is_that_of_its_own_proc(tmp_path: Path, ticking: Ticking) -> None:
    proc = ProcTree(tmp_path, SOME_NAMESPACE)
    proc.add(10)
    (sample,) = GpuProcessTable(ticking, proc.root).read([], watched=[10])
    assert (sample.command, sample.reason, sample.local_pid) == ("python train.py", None, None)


def test_in_a_container_another_users_process_may_be_it_or_not(
        tmp_path: Path, ticking: Ticking, monkeypatch: pytest.MonkeyPatch) -> None:
    def deny(proc: Path, pid: int) -> bool:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(hp, "opens_gpu", deny)  # as root no file of a test refuses to be read
    proc = ProcTree(tmp_path, SOME_NAMESPACE)
    proc.add(10)
    (sample,) = GpuProcessTable(ticking, proc.root).read(on_gpus(10))
    assert (sample.command, sample.reason) == (None, hp.OTHER_USERS)


def test_a_host_pid_is_matched_by_the_device_its_process_maps(tmp_path: Path, ticking: Ticking) -> None:
    proc = ProcTree(tmp_path, SOME_NAMESPACE)
    proc.add_driver([3, 0])  # the driver's minor numbers need not follow NVML's indices
    proc.add(10)  # the host's number is some other process's here
    proc.add(20, io=(0, 0))
    proc.map_device(20, 3)
    table = GpuProcessTable(ticking, proc.root)
    (sample,) = table.read(on_gpus(10))
    assert (sample.pid, sample.local_pid, sample.command) == (10, 20, "python train.py")
    assert sample.note == hp.MATCHED.format(10, 3)
    ticking.now_s += 1.0
    proc.add(20, io=(700, 0))
    (sample,) = table.read(on_gpus(10))
    assert sample.io_read_bytes_per_s.value == 700.0
    proc.remove(20)
    ticking.now_s += 1.0
    (sample,) = table.read(on_gpus(10))
    assert (sample.local_pid, sample.reason) == (None, hp.OTHER_NAMESPACE)


def test_no_match_is_guessed(tmp_path: Path, ticking: Ticking) -> None:
    proc = ProcTree(tmp_path, SOME_NAMESPACE)
    proc.add(20)
    proc.map_device(20, 0)
    (sample,) = GpuProcessTable(ticking, proc.root).read(on_gpus(10))
    assert sample.reason == hp.OTHER_NAMESPACE, "without the driver's word which device is which"
    proc.add_driver([0, 1])
    two = GpuProcessTable(ticking, proc.root).read(on_gpus(10, 11))
    assert [p.local_pid for p in two] == [None, None], "one of them is in another container"
    proc.add(21)
    proc.map_device(21, 0)
    (sample,) = GpuProcessTable(ticking, proc.root).read(on_gpus(10))
    assert sample.local_pid is None, "two processes here could be it"


def test_a_missing_process_has_the_reason_everywhere() -> None:
    sample = missing_process(7, {}, DENIED)
    readings = (sample.cpu_cores, sample.rss_bytes, sample.io_read_bytes_per_s, sample.io_write_bytes_per_s)
    assert {r.reason for r in readings} == {sample.reason} == set(sample.reasons.values()) == {DENIED}

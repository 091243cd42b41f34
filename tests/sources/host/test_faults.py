"""Every file of /proc/PID in every bad state, at every moment: one row may suffer, no other and no tick."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from gputop.core.samples import ENDED, ZOMBIE, ProcessSample
from gputop.sources.host import gpu_processes as hp
from gputop.sources.host import proc_files
from gputop.sources.host.gpu_processes import GpuProcessTable
from gputop.sources.host.proc_files import DENIED, UNPARSABLE
from tests.sources.host.proc_tree import ProcTree, Ticking, on_gpus

EIO = "could not be read: Input/output error"
SICK, CHILD, WELL = 4_194_301, 4_194_302, 4_194_303  # the highest PIDs: no process here is likely to have them

Read = Callable[[str, int], bytes]


def failing(code: int) -> Callable[[], bytes]:
    def fail() -> bytes:
        raise OSError(code, os.strerror(code))

    return fail


FAULTS: dict[str, Callable[[], bytes]] = {
    "missing": failing(errno.ENOENT), "ended": failing(errno.ESRCH), "denied": failing(errno.EACCES),
    "refused": failing(errno.EPERM), "broken": failing(errno.EIO),
    "empty": lambda: b"", "garbage": lambda: b"x y z\n" * 9, "not UTF-8": lambda: b"\xff\xfe\x80\n" * 9,
    "huge": lambda: b"x" * (2 << 20), "escape codes": lambda: b"\x1b[2J\x1b]0;boo\x07",
}

# What each fault does to the one thing that a file tells; the rest of the row stands.
STAT = {"missing": ENDED, "ended": ENDED, "denied": ENDED, "refused": ENDED, "broken": EIO}
REASON = {"missing": ENDED, "ended": ENDED, "denied": DENIED, "refused": DENIED, "broken": EIO}


def table_with(tree: ProcTree, ticking: Ticking, read: Read) -> GpuProcessTable:
    tree.add(SICK, environ=b"CUDA_VISIBLE_DEVICES=0\0")
    tree.add(CHILD, parent=SICK)
    tree.add(WELL, environ=b"CUDA_VISIBLE_DEVICES=1\0")
    # What reading costs in truth decides when it is done again.
    return GpuProcessTable(ticking, tree.root, cpu_clock=lambda: 0.0, read=read)


def assert_well(well: ProcessSample) -> None:
    assert (well.user, well.command, well.reason, well.cuda_visible_devices) == ("4711", "python train.py", None, "1")
    assert well.cpu_cores.value == well.io_read_bytes_per_s.value == 0.0
    assert not well.reasons


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("file", ["stat", "status", "cmdline", "cgroup", "environ", "io"])
def test_a_file_in_a_bad_state(tmp_path: Path, file: str, fault: str) -> None:
    ticking = Ticking()

    def read(path: str, limit: int) -> bytes:
        return FAULTS[fault]()[:limit] if path.endswith(f"/{SICK}/{file}") else proc_files.read(path, limit)

    table = table_with(ProcTree(tmp_path), ticking, read)
    table.read(on_gpus(SICK, WELL))
    ticking.now_s += 1.0
    sick, well = table.read(on_gpus(SICK, WELL))
    assert_well(well)
    shown = f"{sick.user}{sick.command}{sick.reason}{sick.container}{sick.cuda_visible_devices}{sick.reasons}"
    assert "\x1b" not in shown and len(shown) < 10_000
    if file == "stat":
        assert sick.reason == sick.cpu_cores.reason == sick.io_read_bytes_per_s.reason == STAT.get(fault, UNPARSABLE)
        assert (sick.user, sick.command, sick.rss_bytes.value) == (None, None, None)
        return
    assert sick.cpu_cores.value == 0.0 and sick.rss_bytes.value is not None
    if file == "status":
        assert (sick.user, sick.reasons["user"]) == (None, REASON.get(fault, UNPARSABLE))
    elif file == "cmdline":
        assert sick.reason == REASON.get(fault)
        assert (sick.command is None) == (fault in REASON)
        assert sick.cuda_visible_devices == "0"
        assert fault != "empty" or sick.command == "[a ) b (c]"
    elif file == "cgroup":
        assert (sick.container, sick.reasons.get("container")) == (None, REASON.get(fault))
    elif file == "environ":
        assert (sick.cuda_visible_devices, sick.reasons.get("cuda_visible_devices")) == (None, REASON.get(fault))
    else:
        assert sick.io_read_bytes_per_s.reason == sick.io_write_bytes_per_s.reason == REASON.get(fault, UNPARSABLE)


@pytest.mark.parametrize("victim", [SICK, CHILD])
def test_a_process_that_vanishes_between_any_two_reads(tmp_path: Path, victim: int) -> None:
    """Gone from its first, second, third … read on, until a run is over before it happens."""
    for moment in range(100):
        ticking = Ticking()
        reads = 0

        def read(path: str, limit: int, moment: int = moment) -> bytes:
            nonlocal reads
            if f"/{victim}/" in path:
                reads += 1
                if reads > moment:
                    raise ProcessLookupError(errno.ESRCH, "No such process")
            return proc_files.read(path, limit)

        tree = ProcTree(tmp_path / str(moment))
        table = table_with(tree, ticking, read)
        for _ in range(3):
            sick, well = table.read(on_gpus(SICK, WELL))
            ticking.now_s += 1.0
        assert_well(well)
        if reads <= moment:
            assert moment > 5
            return
        sick, well = table.read(on_gpus(SICK, WELL))
        if victim == SICK:
            assert sick.reason == ENDED and sick.cpu_cores.value is None
        else:
            assert sick.cpu_cores.value == sick.io_read_bytes_per_s.value == 0.0
    pytest.fail("the run does not end")


def test_a_process_that_comes_back_under_its_pid_between_any_two_reads(tmp_path: Path) -> None:
    """Another process takes the PID; its counters must not be reckoned against those of the one before."""
    for moment in range(30):
        ticking = Ticking()
        tree = ProcTree(tmp_path / str(moment))
        reads = 0

        def read(path: str, limit: int, moment: int = moment, tree: ProcTree = tree) -> bytes:
            nonlocal reads
            if f"/{SICK}/" in path:
                reads += 1
                if reads == moment:
                    tree.add(SICK, start=900, ticks=10**6, io=(10**9, 10**9), cmdline=b"other\0")
            return proc_files.read(path, limit)

        table = table_with(tree, ticking, read)
        for _ in range(4):
            sick, well = table.read(on_gpus(SICK, WELL))
            assert not sick.cpu_cores.value
            assert not sick.io_read_bytes_per_s.value or sick.io_read_bytes_per_s.value < 10**9
            ticking.now_s += 2.0
        assert_well(well)


def test_the_states_of_a_process_that_has_ended(tmp_path: Path) -> None:
    tree = ProcTree(tmp_path)
    for state, reason in (("Z", ZOMBIE), ("X", ZOMBIE), ("D", None), ("t", None)):
        tree.add(SICK, state=state)
        (sample,) = GpuProcessTable(Ticking(), tree.root).read(on_gpus(SICK))
        assert sample.reason == reason
        assert (sample.rss_bytes.value is None) == (reason is not None)


@pytest.mark.parametrize(("pid", "reason"), [(0, hp.NO_PID), (2**31, ENDED), (2**32 - 1, ENDED)])
def test_pids_that_no_process_can_have(tmp_path: Path, pid: int, reason: str) -> None:
    (sample,) = GpuProcessTable(Ticking(), ProcTree(tmp_path).root).read(on_gpus(pid))
    assert sample.reason == reason


def test_without_a_boot_time_the_start_is_not_known(tmp_path: Path) -> None:
    for content in ("cpu 1\n", "btime\n", "btime x\n"):
        tree = ProcTree(tmp_path / content.strip().replace(" ", ""))
        (tree.root / "stat").write_text(content)
        tree.add(SICK)
        (sample,) = GpuProcessTable(Ticking(), tree.root).read(on_gpus(SICK))
        assert sample.started_s is None and "boot" in sample.reasons["started_s"]
        assert sample.command == "python train.py"


def test_a_sick_gpu_lists_the_same_process_with_others(tmp_path: Path) -> None:
    tree = ProcTree(tmp_path)
    tree.add(WELL)
    hidden, well = GpuProcessTable(Ticking(), tree.root).read(on_gpus(1, WELL, gpus=[2, 5]))
    assert hidden.reason == hp.HIDDEN  # PID 1 exists, and this /proc does not show it
    assert sorted(well.gpus) == [2, 5]

"""What keeps a process from running, of real processes and of what the kernel says of others."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from gputop.core.proc import read_stat
from gputop.ranks.processes import Halt, ended_siblings, halt_of
from tests.processes import asleep
from tests.waiting import until


def until_in(pid: int, state: str) -> None:
    until(lambda: read_stat(pid).state == state, f"state {state} of process {pid}")


def test_a_process_that_is_stopped_and_one_that_goes_on() -> None:
    with asleep() as process:
        assert halt_of(process.pid) is None
        os.kill(process.pid, signal.SIGSTOP)
        until_in(process.pid, "T")
        assert halt_of(process.pid) == Halt(
            "stopped", f"is stopped (SIGSTOP or a debugger): kill -CONT {process.pid}")
        os.kill(process.pid, signal.SIGCONT)
        until_in(process.pid, "S")
        assert halt_of(process.pid) is None


def test_a_process_that_has_ended_and_that_nobody_waited_for() -> None:
    processes = [subprocess.Popen([sys.executable, "-c", code]) for code in ("pass", "import time; time.sleep(100)")]
    dead, alive = (process.pid for process in processes)
    try:
        until_in(dead, "Z")
        halt = halt_of(dead)
        assert halt is not None and halt.state == "ended" and f"(pid {os.getpid()})" in halt.text
        assert ended_siblings([alive], [dead, alive]) == [dead] and ended_siblings([], [dead]) == []
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert halt_of(dead) is None


@pytest.mark.parametrize(("state", "wchan", "tracer", "expected", "words"), [
    ("D", "nfs_wait_bit_killable", 0, "waiting", "is waiting in the kernel for a network file system (state D"),
    ("D", "io_schedule", 0, "waiting", "for a disk"), ("D", "0", 0, "waiting", "(state D)"),
    ("t", "ptrace_stop", 7, "stopped", "by a debugger (pid 7, gdb)"), ("T", "0", 0, "stopped", "kill -CONT 5"),
    ("D", "__refrigerator", 0, "frozen", "its control group"), ("S", "do_freezer_trap", 0, "frozen", "control group"),
    ("S", "futex_wait_queue", 0, None, ""), ("R", "0", 0, None, "")])
def test_what_the_kernel_says(tmp_path: Path, state: str, wchan: str, tracer: int, expected: str | None,
                              words: str) -> None:
    for pid, name, own in ((5, "python", state), (7, "gdb", "S")):
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / "stat").write_text(f"{pid} ({name}) {own} 1 " + " ".join("0" * 40))
        (tmp_path / str(pid) / "wchan").write_text(wchan if pid == 5 else "0")
        (tmp_path / str(pid) / "status").write_text(f"Name:\t{name}\nTracerPid:\t{tracer}\n")
    halt = halt_of(5, tmp_path)
    assert (None if halt is None else halt.state) == expected and words in (halt.text if halt else "")

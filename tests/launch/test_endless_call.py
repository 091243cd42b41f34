"""A job that plays along: it has the symbols that gputop looks for, and its code never returns, or its memory never
answers."""

from __future__ import annotations

import os
import platform
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gputop.core.errors import GputopError
from gputop.launch import deadline, ptrace
from gputop.launch.remote_exec import memory_of
from tests.launch.jobs import borrow
from tests.processes import once_ready
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64" or shutil.which("gcc") is None,
                                reason="x86-64 and a compiler")

_HOSTILE = """
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <sys/time.h>
#include <unistd.h>
int Py_AddPendingCall(int (*call)(void *), void *argument) { for (;;) { LOOP; } }
int PyRun_SimpleString(const char *text) { return 0; }
static void ignored(int number) { (void)number; }
static void *turning(void *unused) { for (;;) usleep(1000); return unused; }
int main(void) {
    pthread_t thread;
    struct itimerval often = {{0, 300}, {0, 300}};
    (void)often;
    pthread_create(&thread, 0, turning, 0);
    signal(SIGALRM, ignored);
    STORM;
    write(1, "ready\\n", 6);
    while (read(0, &thread, 1) != 0) {}
    return 7;
}
"""
_KINDS = {"calls": ("getppid()", ""), "computes": ("__asm__ volatile(\"\")", ""), "waits": ("pause()", ""),
          "signals": ("getppid()", "setitimer(ITIMER_REAL, &often, 0)")}
_ATTACH = """
import sys
from gputop.launch import ptrace
from tests.launch.jobs import borrow
next_stop = ptrace.Tracee.next_syscall_stop
def told(tracee, deadline):
    print("ready", flush=True)
    ptrace.Tracee.next_syscall_stop = next_stop
    next_stop(tracee, deadline)
ptrace.Tracee.next_syscall_stop = told
borrow(int(sys.argv[1]))
"""


@pytest.fixture(params=sorted(_KINDS))
def hostile(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    loop, storm = _KINDS[request.param]
    (tmp_path / "job.c").write_text(_HOSTILE.replace("LOOP", loop).replace("STORM", storm))
    subprocess.run(["gcc", "-O1", "-rdynamic", "-pthread", "-o", tmp_path / "job", tmp_path / "job.c"], check=True,
                   capture_output=True)
    with once_ready(str(tmp_path / "job")) as process:
        yield process


def _is_released(process: subprocess.Popen[str]) -> None:
    """Nobody holds a thread of it, and it ends as it does alone."""
    for task in Path(f"/proc/{process.pid}/task").iterdir():
        assert "TracerPid:\t0\n" in (task / "status").read_text()
    process.communicate()
    assert process.returncode == 7


def test_a_call_that_never_returns_ends_at_the_deadline(hostile, monkeypatch):
    monkeypatch.setattr(ptrace, "CALL_S", 0.2)
    with pytest.raises(GputopError, match="did not let gputop finish in time"):
        borrow(hostile.pid)
    _is_released(hostile)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_gputop_within_a_call_that_never_returns(hostile, number):
    with once_ready(sys.executable, "-c", _ATTACH, str(hostile.pid), stderr=subprocess.DEVNULL) as gputop:
        gputop.send_signal(number)
        assert gputop.wait(PATIENCE_S) == -number
    _is_released(hostile)


def test_memory_that_never_answers_is_given_up(monkeypatch):
    """As userfaultfd or FUSE make it: the read does not return."""
    monkeypatch.setattr(deadline, "_RELEASE_S", 0.05)
    reading, writing = os.pipe()
    descriptors: list[int] = []

    def read(own: int, _: deadline.Deadline) -> bytes:
        descriptors.append(own)
        return os.read(reading, 1)

    try:
        with memory_of(os.getpid()) as memory, pytest.raises(deadline.TooLate, match="is not responding"):
            deadline.in_time(os.getpid(), memory, read, 0.05)
        os.fstat(*descriptors)  # stays the thread's own until it has read
    finally:
        os.write(writing, b"x")
        os.close(writing)

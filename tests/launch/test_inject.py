"""Against real processes of this Python; each ends by itself when its standard input closes.

Their sleeps are the subject, as a sleeping thread is what is borrowed; no test waits by sleeping.
"""

from __future__ import annotations

import platform
import signal
import subprocess
import sys
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from gputop.core.errors import GputopError
from gputop.launch import inject, ptrace
from gputop.launch.inject import call_with_text
from gputop.launch.remote_exec import memory_of
from tests.launch.jobs import borrow, functions_of
from tests.processes import once_ready

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="x86-64 only")

_END = ("import os, sys, threading\n"
        "threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()\n")
# A loop of floating point whose sum shows each register that is not what it was, and sleeps as jobs have them.
_WORK = _END + """
import math, threading, time
def sleep():
    while True:
        before = time.monotonic()
        time.sleep(0.005)
        if time.monotonic() - before < 0.005:
            print("woken early", flush=True)
threading.Thread(target=sleep, daemon=True).start()
expected = math.fsum(math.sin(i) for i in range(1000))
print("ready", flush=True)
while True:
    if math.fsum(math.sin(i) for i in range(1000)) != expected:
        print("wrong sum", flush=True)
    time.sleep(0.001)
"""


def _python(code: str) -> AbstractContextManager[subprocess.Popen[str]]:
    return once_ready(sys.executable, "-c", code, stderr=subprocess.STDOUT)


def test_a_process_that_computes_and_sleeps_does_what_it_is_asked_and_goes_on_unharmed():
    with _python(_WORK) as process:
        for number in range(200):
            assert borrow(process.pid, f"print('asked', {number}, flush=True)") == 0
            assert process.stdout.readline() == f"asked {number}\n"  # in order, and nothing else


# Its one thread sleeps and sleeps on. Timers interrupt it, too: both are calls that the kernel makes anew.
_SLEEPS = ("import select, sys, time\nprint('ready', flush=True)\n"
           "while not select.select([sys.stdin], [], [], 0)[0]:\n    time.sleep(0.05)\n")
_GETS_SIGNALS = _END + ("import signal, time\nsignal.signal(signal.SIGALRM, lambda *_: None)\n"
                        "signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)\nprint('ready', flush=True)\n"
                        "while True: time.sleep(1)\n")


@pytest.mark.parametrize(("code", "times"), [(_SLEEPS, 20), (_GETS_SIGNALS, 50)], ids=["sleeps", "gets other signals"])
def test_one_thread_alone_is_borrowed_and_goes_on(code, times):
    with _python(code) as process:
        for number in range(times):
            assert borrow(process.pid, f"print({number}, flush=True)") == 0
            assert process.stdout.readline() == f"{number}\n"


@pytest.mark.parametrize(("run", "fix"), [(None, "Start the job with gputop run"), ("a1", "Try again once the job")])
def test_a_process_that_computes_in_python_alone_is_told_what_it_needs(run, fix, monkeypatch):
    monkeypatch.setattr(inject, "SEARCH_S", 0.1)
    monkeypatch.delenv("GPUTOP_RUN", raising=False)
    if run is not None:
        monkeypatch.setenv("GPUTOP_RUN", run)
    with _python("print('ready', flush=True)\nwhile True: pass\n") as process:
        with pytest.raises(GputopError, match=r"process \d+ is computing without system calls") as caught:
            borrow(process.pid, "print('asked')")
        assert caught.value.fix.startswith(fix)
        assert process.poll() is None


def test_a_call_that_does_not_return_is_given_up_and_the_thread_let_go(monkeypatch):
    monkeypatch.setattr(ptrace, "CALL_S", 0.05)
    code = _END + ("import ctypes, time\nlibc = ctypes.CDLL(None)\n"
                   "print('ready', flush=True)\nprint(ctypes.cast(libc.pause, ctypes.c_void_p).value, flush=True)\n"
                   "while True:\n    time.sleep(0.01)\n    print('on', flush=True)\n")
    with _python(code) as process:
        pause = int(process.stdout.readline())
        with pytest.raises(GputopError, match="did not let gputop finish in time"), memory_of(process.pid) as memory:
            call_with_text(process.pid, memory, pause, 0, b"")
        assert [process.stdout.readline() for _ in range(100)] == ["on\n"] * 100
        assert "TracerPid:\t0\n" in Path(f"/proc/{process.pid}/status").read_text()


def test_a_process_that_ends_meanwhile_is_no_fault_of_gputops():
    with _python(_WORK) as process:
        functions = functions_of(process.pid)
        with memory_of(process.pid) as memory:
            process.send_signal(signal.SIGKILL)
            process.wait()
            with pytest.raises(GputopError, match=f"process {process.pid} has ended"):
                call_with_text(process.pid, memory, *functions, b"")

"""What ends gputop, or the job, while gputop holds one of the job's threads.

An attacker forks a gputop for each moment of the window and sends it a signal in that moment. The job watches its own
state: sums, rounding mode and signal mask of the thread that is borrowed, the length of its sleeps, the products of one
that computes.
"""

from __future__ import annotations

import contextlib
import functools
import os
import platform
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from gputop.core.errors import GputopError
from gputop.core.proc import read_stat
from gputop.core.signal_handlers import signals_held
from gputop.launch import ptrace, target
from tests.launch.jobs import borrow
from tests.processes import once_ready
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="x86-64 only")

_JOB = """
import ctypes, math, os, select, signal, sys, threading, time
libm, libc = ctypes.CDLL("libm.so.6"), ctypes.CDLL(None)
threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
expected = math.fsum(math.sin(i) for i in range(1000))
def work(mode, block):
    libm.fesetround(mode)
    signal.pthread_sigmask(signal.SIG_BLOCK, block)
    mine = math.fsum(math.sin(i) for i in range(1000))
    ready.wait()
    while True:
        before = time.monotonic()
        SLEEP
        if time.monotonic() - before < 0.002:
            print("woken early", flush=True)
        if libm.fegetround() != mode:
            print("rounds otherwise", flush=True)
        if signal.pthread_sigmask(signal.SIG_BLOCK, []) != set(block):
            print("blocks other signals", flush=True)
        if math.fsum(math.sin(i) for i in range(1000)) != mine:
            print("wrong sum", flush=True)
ready = threading.Barrier(2)
idle = select.epoll()  # is not borrowed: such a wait cannot be made again
threading.Thread(target=work, args=(0x800, [signal.SIGUSR1, signal.SIGRTMAX]), daemon=True).start()
ready.wait()
print("ready", flush=True)
while True:
    idle.poll(0.01)
"""
_SLEEPS = {"clock_nanosleep": "time.sleep(0.002)", "poll": "libc.poll(None, 0, 3)",
           "relative": "libc.nanosleep((ctypes.c_long * 2)(0, 3000000), None)"}
# A single thread that computes in OpenBLAS, asks for its end by system calls that do not wait, and is borrowed at work.
_AT_WORK = """
import os, select, signal, sys
os.environ["OPENBLAS_NUM_THREADS"] = "1"
import numpy
asked = 0
values = numpy.random.default_rng(0).random((128, 128))
expected = (values @ values).tobytes()
print("ready", flush=True)
while True:
    if (values @ values).tobytes() != expected:
        print("wrong product", flush=True)
    if select.select([sys.stdin], [], [], 0)[0]:
        os._exit(0)
"""
_FULL = -1  # 32 calls wait for the job's main thread, which a loaded machine lets run late
_ATTACKER = """
import os, signal, sys
from gputop.core.errors import GputopError
from gputop.launch import ptrace
from tests.launch.jobs import borrow, functions_of
pid, number = int(sys.argv[1]), int(sys.argv[2])
functions_of(pid)  # once
request, pwrite, left = ptrace.Tracee.request, os.pwrite, 0
def strike():
    global left
    left -= 1
    if left == 0:
        os.kill(os.getpid(), number)
def struck(function):
    def around(*arguments):
        strike()
        try:
            return function(*arguments)
        finally:
            strike()
    return around
def attach(moment):
    global left
    left = moment
    ptrace.Tracee.request, os.pwrite = struck(request), struck(pwrite)
    return borrow(pid, "asked += 1")
ends, held = set(), 0
reading, writing = os.pipe()
def detach(tracee, deadline, detach=ptrace.Tracee.detach):
    detach(tracee, deadline)
    os.write(writing, b"d")
ptrace.Tracee.detach = detach
os.set_blocking(reading, False)
moment, code = 1, 0
while code != 3 and moment < 1000:
    child = os.fork()
    if child == 0:
        try:
            result = attach(moment)
            os._exit({0: 3 if left > 0 else 0, -1: 5}[result])
        except GputopError as error:
            print(error, flush=True)
            os._exit(4)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    try:
        released = bool(os.read(reading, 100))
    except BlockingIOError:
        released = False
    if code != 5:  # else the same moment again
        ends.add(code)
        held += not released
        moment += 1
print(moment - 1, held, *sorted(ends))
"""


def call(process: subprocess.Popen[str], code: str = "pass") -> None:
    """As gputop's own, in a thread: at its end the kernel releases the job, also where the call fails. A job that is
    killed while it is held could not be waited for."""
    result = _FULL
    while result == _FULL:
        with ThreadPoolExecutor(1) as thread:
            result = thread.submit(borrow, process.pid, code).result()
    assert result == 0


@pytest.fixture(params=[*sorted(_SLEEPS), "at work"])
def job(request: pytest.FixtureRequest) -> Iterator[subprocess.Popen[str]]:
    code = _AT_WORK if request.param == "at work" else "asked = 0\n" + _JOB.replace("SLEEP", _SLEEPS[request.param])
    with once_ready(sys.executable, "-c", code, stderr=subprocess.STDOUT) as process:
        yield process


def _attack(process: subprocess.Popen[str], number: int) -> list[int]:
    """The number of moments, of those in which the job was held at gputop's end, and the ends of gputop."""
    answer = subprocess.run([sys.executable, "-c", _ATTACKER, str(process.pid), str(int(number))], text=True,
                          capture_output=True, timeout=120, check=True).stdout
    return [int(word) for word in answer.split()]


def _unharmed(process: subprocess.Popen[str]) -> None:
    """The job answers, has said nothing of its own, and nobody holds it."""
    call(process, "print('alive', flush=True)")
    assert process.stdout.readline() == "alive\n"
    for task in Path(f"/proc/{process.pid}/task").iterdir():
        assert "TracerPid:\t0\n" in (task / "status").read_text()


@contextlib.contextmanager
def _struck(moment: int, *, before: Callable[[], object] = lambda: None,
            after: Callable[[], object] = lambda: None) -> Iterator[list[int]]:
    """Do that at the request to the kernel of this number; the value is how many requests are left until then."""
    request, left = ptrace.Tracee.request, [moment]

    def struck(tracee: ptrace.Tracee, *arguments: Any) -> None:
        left[0] -= 1
        if left[0] == 0:
            before()
        request(tracee, *arguments)
        if left[0] == 0:
            after()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ptrace.Tracee, "request", struck)
        yield left


# One that Python handles in one kind of sleep, and one that it does not in each: how a sleep is made again knows
# nothing of gputop's signals, and all of them are held alike (below).
@pytest.mark.parametrize(("job", "number"), [
    ("clock_nanosleep", signal.SIGINT), *((kind, signal.SIGTERM) for kind in (*_SLEEPS, "at work"))], indirect=["job"])
def test_a_signal_ends_gputop_after_it_has_released_the_job(job, number):
    moments, held, *ends = _attack(job, number)
    assert (moments > 30, held, ends) == (True, 0, [-number, 3])  # before and after each request of the window
    _unharmed(job)


def test_a_job_outlives_a_gputop_that_is_killed_at_any_moment(job):
    moments, held, *ends = _attack(job, signal.SIGKILL)
    assert (moments > 30, held > 30, ends) == (True, True, [-9, 3])
    _unharmed(job)


def test_signals_to_the_job_arrive_while_it_is_held(job, monkeypatch):
    """One for each moment: the job counts them all; a stop and a continuation change nothing."""
    monkeypatch.setattr(ptrace, "STOP_S", 1.0)
    call(job, "caught = 0\ndef count(*_):\n    global caught\n    caught += 1\n"
              "signal.signal(signal.SIGALRM, count)\nprint('set', flush=True)\n")
    assert job.stdout.readline() == "set\n"
    alarms = 0
    for number in (signal.SIGALRM, signal.SIGCONT):
        for moment in range(1, 25):
            with _struck(moment, before=functools.partial(os.kill, job.pid, number)) as left:
                call(job)
            alarms += number == signal.SIGALRM and left[0] <= 0
    call(job, "print('caught', caught > 0, flush=True)")
    # A signal's handler may run on the thread that sleeps, and ends a sleep as it does without gputop.
    assert next(line for line in job.stdout if line != "woken early\n") == "caught True\n"
    assert alarms > 10
    _unharmed(job)


@pytest.mark.parametrize("code", [_JOB.replace("SLEEP", _SLEEPS["poll"]), _AT_WORK], ids=["poll", "at work"])
def test_a_job_that_is_killed_while_it_is_held_is_no_fault_of_gputops(code):
    """Its status is left to whoever started it, also where its main thread is what is held."""
    for moment in range(2, 19, 2):
        with once_ready(sys.executable, "-c", code, stderr=subprocess.STDOUT) as job:
            kill = functools.partial(os.kill, job.pid, signal.SIGKILL)  # job.kill would look for the job's status
            with _struck(moment, before=kill) as left, contextlib.suppress(GputopError):  # it had just been released
                call(job)
            if left[0] > 0:  # it was released by fewer requests: it depends on where it was caught
                assert moment > 6
                break
            assert job.wait(PATIENCE_S) == -signal.SIGKILL


def test_an_exception_in_the_window_releases_the_job(job):
    for error in (KeyboardInterrupt, SystemExit, MemoryError):
        for moment in range(2, 20):
            with _struck(moment, after=Mock(side_effect=error)), pytest.raises(error):
                call(job)
    _unharmed(job)


def test_another_process_that_got_the_pid_is_left_alone(job):
    process = target.Target(job.pid, "python", os.getuid(), "ana", read_stat(job.pid).start - 1, True)
    with pytest.raises(GputopError, match="has ended"):
        target.check_same(process)


def test_held_signals_take_effect_afterwards():
    caught = []
    before = signal.signal(signal.SIGUSR1, lambda *_: caught.append("late"))
    try:
        with signals_held():
            assert {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1} <= (
                signal.pthread_sigmask(signal.SIG_BLOCK, []))
            signal.raise_signal(signal.SIGUSR1)
            os.kill(os.getpid(), signal.SIGUSR1)
            assert not caught
        assert caught
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert signal.SIGUSR1 not in signal.pthread_sigmask(signal.SIG_BLOCK, [])

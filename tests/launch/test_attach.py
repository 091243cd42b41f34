"""A server in a process that runs: of the tests' own Python and, where one is on the PATH, of Python 3.14, which is
asked in another way. With real frameworks: in test_real.py."""

from __future__ import annotations

import builtins
import ctypes
import os
import platform
import shutil
import socket
import subprocess
import sys
from contextlib import AbstractContextManager
from pathlib import Path
from types import SimpleNamespace

import pytest
from msgspec.structs import replace

from gputop.core.errors import GputopError
from gputop.core.own_memory import resident_bytes
from gputop.core.proc import read_stat
from gputop.launch import attach, remote_exec
from gputop.launch.target import Target
from gputop.profiler.discovery import Discovery
from tests.launch.jobs import environment, frameworks
from tests.processes import once_ready
from tests.waiting import PATIENCE_S, until

# Steps until its standard input closes; after "wait" its main thread waits for the next line in C.
# It sleeps, as jobs do: a call that the kernel has to make anew. No test waits for it.
_JOB = """
import os, sys, threading, time
import jax
compile = exec = bytes = False  # a job's main module may have such names
if "LISTEN" in os.environ:
    import socket
    own = socket.create_server(("", 0))
last = threading.Event()
def listen():
    for line in sys.stdin:
        waiting.set() if line == "wait\\n" else last.set()
    os._exit(7)
waiting = threading.Event()
threading.Thread(target=listen, daemon=True).start()
names = None
names = set(globals())
print("ready", flush=True)
while True:
    time.sleep(0.001)
    if set(globals()) != names:
        print("its names have changed", flush=True)
    if waiting.is_set():
        waiting.clear()
        print("waits", flush=True)
        last.wait()
        last.clear()
        print("goes on", flush=True)
"""


@pytest.fixture(scope="module", params=["own", "with remote execution"])
def python(request) -> str:
    """The tests' own, or one that has remote execution."""
    if request.param == "own":
        if platform.machine() != "x86_64" and sys.version_info < (3, 14):
            pytest.skip("x86-64 only")
        return sys.executable
    return _executes_remotely()


def _executes_remotely() -> str:
    for candidate in (sys.executable, shutil.which("python3.14")):
        if candidate and not subprocess.run([candidate, "-c", "import sys; sys.remote_exec"],
                                            capture_output=True, check=False).returncode:
            return candidate
    pytest.skip("no Python 3.14 or newer here")


def _job(*python: str, packages: Path, **environ: str) -> AbstractContextManager[subprocess.Popen[str]]:
    return once_ready(*python, "-c", _JOB, stderr=subprocess.PIPE, env=environment(packages, environ))


def _wait_in_c(process: subprocess.Popen[str]) -> None:
    print("wait", file=process.stdin, flush=True)
    assert process.stdout.readline() == "waits\n"


def _target(process: subprocess.Popen[str], *, same_network: bool = True) -> Target:
    started = read_stat(process.pid).start
    return Target(process.pid, "python", os.getuid(), "ana", started, same_network)


@pytest.fixture
def scripts(place: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of what the processes are to run, which other programs of gputop leave alone."""
    monkeypatch.setattr(attach, "_SCRIPTS", place)
    return place


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(attach, "probe", lambda _: None)  # these servers listen and say nothing
    return frameworks(tmp_path)


def test_it_serves_and_is_not_changed(python, packages, scripts):
    with _job(python, packages=packages) as process:
        for _ in range(5):
            announcement = attach.start_server(_target(process))
            host, _, port = announcement.address.rpartition(":")
            socket.create_connection((host, int(port)), 5).close()
        assert not any(scripts.iterdir())
        out, err = process.communicate()
    assert (out, process.returncode) == ("", 7)
    assert all(line.startswith("gputop: profiler server at ") for line in err.splitlines())


# Holds 64 MiB in blocks that malloc keeps once they are free, as one above them is not.
_HOARDER = """
import jax, sys, threading, time
blocks = [bytes(2048) for _ in range(32768)]
above = [bytes(2048) for _ in range(100)]
del blocks
threading.Thread(target=lambda: sys.stdin.read() or sys.exit(), daemon=True).start()
print("ready", flush=True)
while True:
    time.sleep(0.001)
"""


def test_it_gives_back_what_its_c_library_keeps(python, packages, monkeypatch):
    if platform.libc_ver()[0] != "glibc":
        pytest.skip("glibc only")
    with once_ready(python, "-c", _HOARDER, env=environment(packages, {})) as process:
        monkeypatch.setattr(attach, "_GIVE_BACK_TIMEOUT_S", PATIENCE_S)  # its request lapses after that
        before = resident_bytes(process.pid)
        attach.give_back(_target(process))
        until(lambda: resident_bytes(process.pid) < before - (48 << 20))  # the first half ends the wait for it
        assert process.poll() is None


def test_one_that_waits_in_c_is_let_be(python, packages, monkeypatch, scripts):
    monkeypatch.setattr(attach, "ANSWER_TIMEOUT_S", 0.3)
    with _job(python, packages=packages) as process:
        _wait_in_c(process)
        with pytest.raises(GputopError, match="did not answer within"):
            attach.start_server(_target(process))
        assert not any(scripts.iterdir())
        print("go on", file=process.stdin, flush=True)
        assert process.stdout.readline() == "goes on\n"
        assert process.communicate() == ("", "")  # not even a word of a script that is gone


def test_ctrl_c_takes_a_request_back(packages, monkeypatch, scripts):
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(attach.Announcements, "receive", interrupted)
    with _job(_executes_remotely(), packages=packages) as process:
        _wait_in_c(process)
        with pytest.raises(KeyboardInterrupt):
            attach.start_server(_target(process))
        assert not any(scripts.iterdir())
        assert process.communicate() == ("", "")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes networks")
def test_in_a_network_of_its_own_what_listened_before_is_not_taken_for_it(python, packages, monkeypatch):
    # What is said of a listener of a container that publishes nothing; nothing but that is known of these.
    monkeypatch.setattr(attach, "find_servers", lambda pids: Discovery((), ("it cannot be reached from here",)))
    apart = ["unshare", "--net"]
    if shutil.which("unshare") is None or subprocess.run([*apart, "true"], check=False).returncode:
        pytest.skip("no network of its own can be made here")
    with _job(*apart, python, packages=packages, LISTEN="1") as process:
        before = attach._listening(process.pid)
        assert len(before) == 1
        with pytest.raises(GputopError, match="cannot be reached from here") as caught:
            attach.start_server(_target(process, same_network=False))
        assert "was started anyway" in caught.value.fix
        assert len(attach._listening(process.pid) - before) == 1


def test_remote_execution_is_asked_for_where_there_is_one(packages, monkeypatch):
    monkeypatch.setattr(attach, "_add_pending_call", None)
    with _job(_executes_remotely(), packages=packages) as process:
        assert attach.start_server(_target(process)).address is not None
        with remote_exec.memory_of(process.pid) as memory:
            slot = remote_exec.find_slot(process.pid, memory)
            assert slot is not None and remote_exec._word(memory, slot.pending, 4) == 0


@pytest.mark.parametrize(("options", "environ"), [((), {"PYTHON_DISABLE_REMOTE_DEBUG": "1"}),
                                                  (("-X", "disable-remote-debug"), {})])
def test_where_remote_execution_is_switched_off_it_refuses(packages, options, environ, scripts):
    with _job(_executes_remotely(), *options, packages=packages, **environ) as process:
        with pytest.raises(GputopError, match="disabled in the job"):
            attach.start_server(_target(process))
        assert process.communicate() == ("", "")
    assert not any(scripts.iterdir())


def test_the_text_runs_in_a_main_module_with_names_of_its_own_and_binds_none(capfd):
    """nanoGPT has a setting ``compile``, and iterates over its own globals."""
    ran = []
    sys.modules["ran_in_main"] = SimpleNamespace(ran=ran)
    namespace = {"compile": True, "exec": 1, "bytes": "b", "__builtins__": builtins}
    try:
        for source in ("import ran_in_main\nran_in_main.ran.append(compile)\n", "raise ValueError\n"):
            exec(attach.silent_text(source, "text"), namespace)
    finally:
        del sys.modules["ran_in_main"]
    assert ran == [compile] and set(namespace) == {"compile", "exec", "bytes", "__builtins__"}
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("ended", [KeyboardInterrupt, SystemExit])
def test_a_request_of_remote_execution_is_taken_back_whatever_ends_gputop(monkeypatch, ended, scripts):
    """In memory of this process's own."""
    block = ctypes.create_string_buffer(600)
    at = ctypes.addressof(block)
    slot = remote_exec.Slot(path=at, path_bytes=512, pending=at + 520, eval_breaker=at + 528)
    monkeypatch.setattr(remote_exec, "find_slot", lambda pid, memory: slot)
    own = Target(os.getpid(), "python", os.geteuid(), "ana", read_stat(os.getpid()).start, True)
    with pytest.raises(ended), attach.running_in(own, "pass\n"):
        assert block.raw[520] == 1 and any(scripts.iterdir())
        raise ended
    assert block.raw[520] == 0 and not any(scripts.iterdir())

    block[520] = b"\1"  # another tool's
    with pytest.raises(GputopError, match="a request from another tool"), attach.running_in(own, "pass\n"):
        raise AssertionError
    assert block.raw[520] == 1


@pytest.mark.parametrize(("state", "cpu_ns", "words"), [
    ("R", (5_000_000, 47_000_000), "Its threads are running (42 ms of CPU time"),
    ("S", (5, 5), "the process is waiting or hanging. gputop's request may be the cause"),
    ("S", (None, None), "The operating system does not show whether the process is still running"),
    ("T", (5, 5), "is stopped"),
    ("Z", (5, None), "has since ended. If nothing else explains this, the request is the likely cause"),
])
def test_what_a_process_does_after_a_request_is_looked_at_before_it_is_told(monkeypatch, state, cpu_ns, words):
    times = iter(cpu_ns)
    stat = read_stat(os.getpid())
    monkeypatch.setattr(attach, "cpu_time_ns", lambda pid: next(times))
    monkeypatch.setattr(attach, "stat_of", lambda pid: replace(stat, state=state))
    assert words in attach.state_now(1, 0)

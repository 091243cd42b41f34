from __future__ import annotations

import os
import platform
import signal
import subprocess
import sys

import pytest

from gputop.core.errors import EXIT_NO_DATA, GputopError
from gputop.core.proc import read_stat
from gputop.launch import attach, serve, target
from gputop.ranks import processes
from tests.launch.jobs import GPUTOP
from tests.processes import asleep, once_ready

_AS_NOBODY = "import os, sys; os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
_EXAMINE = ("from pathlib import Path; from gputop.launch import target; import tempfile\n" + _AS_NOBODY +
            "with tempfile.NamedTemporaryFile('w') as yama:\n"
            "    yama.write(sys.argv[2]); yama.flush()\n"
            "    try:\n        print(target.examine(int(sys.argv[1]), yama=Path(yama.name)))\n"
            "    except target.GputopError as error:\n        print(error)\n")
_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes another user")


@pytest.fixture
def sleeper():
    with asleep() as process:
        yield process


def _refusal(pid: int) -> GputopError:
    with pytest.raises(GputopError) as caught:
        target.examine(pid)
    return caught.value


def test_a_process_without_a_framework(sleeper):
    refusal = _refusal(sleeper.pid)
    assert "(sleep 600) has neither TensorFlow, JAX nor PyTorch loaded" in refusal.message


def test_a_launcher_names_the_processes_that_train(tmp_path):
    library = tmp_path / "libtorch_cpu.so"
    library.write_bytes(b"\0" * 4096)
    train = tmp_path / "train.py"
    train.write_text(f"import mmap, sys\nfile = open({str(library)!r})\n"
                     "held = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)\n"
                     "print('up', flush=True)\nsys.stdin.read()")
    launcher = tmp_path / "torchrun"  # which has torch loaded itself
    launcher.write_text(train.read_text().replace(
        "print('up', flush=True)\n",
        "import subprocess\njob = subprocess.Popen([sys.executable, sys.argv[1], '--token=sk-live-4f8a9c2d7e1b'])\n"
        "print(job.pid, flush=True)\n"))
    started = [sys.executable, str(launcher), str(train)]
    for command in (started, ["sh", "-c", f"{' '.join(started)}; :"]):
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            lines = {process.stdout.readline().strip(), process.stdout.readline().strip()}
            (child,) = lines - {"up"}
            refusal = _refusal(process.pid)
            with pytest.raises(GputopError, match=f"process {child} that it started trains"):
                serve.examine(process.pid)
            process.communicate()
        assert f"is a launcher; process {child} that it started trains: train.py" in refusal.message
        assert refusal.fix == f"gputop capture {child}" and "4f8a9c2d" not in refusal.message


def test_a_process_that_has_got_the_pid_since_the_question_is_not_meant(sleeper):
    started = read_stat(sleeper.pid).start
    for meant, word in ((started, "neither TensorFlow, JAX nor PyTorch"), (started - 1, "another one has its PID")):
        with pytest.raises(GputopError, match=word):
            target.examine(sleeper.pid, started=meant)
        with pytest.raises(GputopError, match=word):
            serve.make_ready(sleeper.pid, started=meant)


def test_the_secrets_of_a_command_are_not_shown():
    with once_ready("x", "-u", "-c", "print('ready');input()", "--token=sk-live-4f8a9c2d7e1b",
                    executable=sys.executable) as process:
        message = _refusal(process.pid).message
    assert "4f8a9c2d7e1b" not in message and "(x -u -c print('ready');input()" in message


def test_no_process_and_one_that_has_ended():
    assert _refusal(2**22 + 1).exit_code == EXIT_NO_DATA
    with subprocess.Popen(["true"]) as ended:
        os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)  # a zombie until it is asked for
        assert "has ended" in _refusal(ended.pid).message


def test_a_process_of_the_kernel(tmp_path):
    # As /proc/2 is to root: no command line, and a link to no executable, which cannot be read.
    (tmp_path / "2").mkdir()
    (tmp_path / "2" / "status").write_text("Name:\tkthreadd\nState:\tS (sleeping)\nTracerPid:\t0\n")
    (tmp_path / "2" / "cmdline").write_bytes(b"")
    with pytest.raises(GputopError, match="process 2 is a kernel thread"):
        target.examine(2, proc=tmp_path)


def test_a_stopped_process(sleeper):
    sleeper.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, sleeper.pid, os.WSTOPPED | os.WNOWAIT)
    refusal = _refusal(sleeper.pid)
    assert "is stopped" in refusal.message and f"kill -CONT {sleeper.pid}" in refusal.fix


@pytest.mark.parametrize("machine", ["aarch64", "ppc64le"])
def test_a_machine_on_which_no_thread_is_borrowed(machine, monkeypatch):
    """Attaching to a Python before 3.14 ends here, before a thread of it is touched."""
    monkeypatch.setattr(platform, "machine", lambda: machine)
    with pytest.raises(GputopError, match=f"supports only x86-64, not {machine}") as caught:
        attach._add_pending_call(target.Target(os.getpid(), "python", os.geteuid(), "", 0, True), -1, "")
    assert "gputop run" in caught.value.fix


@pytest.mark.skipif(platform.machine() != "x86_64", reason="x86-64 only")
def test_a_process_that_is_debugged(sleeper):
    code = ("import sys; from gputop.launch.ptrace import Tracee\n"
            "Tracee(int(sys.argv[1])).seize(); print('ready', flush=True); sys.stdin.read()")
    with once_ready(sys.executable, "-c", code, str(sleeper.pid)) as debugger:
        assert f"process {debugger.pid} (a debugger, strace, …) is attached" in _refusal(sleeper.pid).message


def _error_for_nobody(pid: int, scope: str = "0") -> str:
    """The error that the user nobody gets for a process, on a node with this kernel.yama.ptrace_scope."""
    return subprocess.run([sys.executable, "-c", _EXAMINE, str(pid), scope], capture_output=True, text=True,
                          check=True).stdout


@_root
def test_a_process_of_another_user(sleeper):
    message = _error_for_nobody(sleeper.pid)
    assert f"process {sleeper.pid} belongs to root" in message and f"sudo gputop attach {sleeper.pid}" in message


@_root
@pytest.mark.parametrize(("scope", "message"), [
    ("0", "the kernel does not allow gputop to read process"),
    ("1", "kernel.yama.ptrace_scope is 1 on this node: only root can read non-child processes"),
    ("2", "kernel.yama.ptrace_scope is 2 on this node: only root can read other processes"),
    ("3", "kernel.yama.ptrace_scope is 3 on this node: until a reboot with another setting"),
])
def test_the_sysctl_and_its_value_are_named(scope, message):
    # A process of the same user that may not be traced, as where Yama forbids it: not dumpable (prctl(2)).
    code = ("import ctypes\n" + _AS_NOBODY + "ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)\n"
            "print('ready', flush=True); sys.stdin.read()")
    with once_ready(sys.executable, "-c", code) as process:
        error = _error_for_nobody(process.pid, scope)
    assert error.startswith(message)


class _Closed:
    """A folder of /proc whose files may not be opened."""

    def __truediv__(self, name: str) -> _Closed:
        return self

    def open(self, mode: str) -> None:
        raise PermissionError


@pytest.mark.parametrize(("capabilities", "message"), [
    ("00000000a80425fb", "this container lacks the capability SYS_PTRACE"),  # Docker's default set
    ("00000000a80c25fb", "the kernel does not allow gputop to read process 7, not even as root")])
@pytest.mark.parametrize("scope", ["0", "1", "2"])
def test_root_is_not_sent_to_become_root(tmp_path, monkeypatch, capabilities, message, scope):
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "status").write_text(f"Name:\tpython\nCapEff:\t{capabilities}\n")
    (tmp_path / "yama").write_text(scope)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    with pytest.raises(GputopError) as caught:
        processes.check_rights(7, _Closed(), 1000, "attach", target._ALTERNATIVE,  # type: ignore[arg-type]
                                    tmp_path, tmp_path / "yama")
    assert caught.value.message == message
    assert "sudo" not in caught.value.fix and "gputop run" in caught.value.fix


def test_the_command_says_why_not(sleeper):
    ended = subprocess.run([*GPUTOP, "attach", str(sleeper.pid), "--yes"], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert "neither TensorFlow, JAX nor PyTorch" in ended.stderr and "Traceback" not in ended.stderr
    assert subprocess.run([*GPUTOP, "attach", "x"], capture_output=True, check=False).returncode == 2

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import threading

import pytest

from gputop.core.errors import GputopError
from gputop.launch.job import TAIL_BYTES, StartedJob, wait_for_exit
from tests.launch.jobs import wait_for


def _job(tmp_path, script: str) -> StartedJob:
    return StartedJob(["bash", "-c", script], os.environ, tmp_path / "out" / "run.log")


def _ended(tmp_path, script: str) -> StartedJob:
    job = _job(tmp_path, script)
    assert job.ended.wait(60)
    return job


_FAMILY = """
import os, signal, sys
read, write = os.pipe()
who = "parent" if os.fork() else "child"
def tell(number, _):
    print(who, "got", signal.Signals(number).name[3:], flush=True)
def end(number, frame):
    if who == "child":
        tell(number, frame)
        os._exit(0)
    os.wait()
    os._exit(4)
signal.signal(signal.SIGTERM, tell)
signal.signal(signal.SIGINT, end)
if who == "child":
    os.write(write, b"1")
else:
    os.read(read, 1)
    print("ready", flush=True)
while True:
    signal.pause()
"""


def test_its_output_and_its_end(tmp_path):
    script = "echo one; echo two >&2; printf '10%%\\r20%%\\r'; echo; printf '\\e[31mred\\e[0m\\a'; exit 3"
    job = _ended(tmp_path, script)
    lines, end = job.tail(10)
    assert lines == ["one", "two", "20%", "red�"]
    assert end == job.log.stat().st_size
    assert job.tail(2)[0] == lines[-2:]
    assert (job.returncode, job.state()) == (3, "exited with status 3")
    assert stat.S_IMODE(job.log.stat().st_mode) == 0o600


@pytest.mark.parametrize(("written", "lines"), [
    ("\\e[1m 3/100\\e[0m \\e[32m━━\\e[0m\\e[37m━━\\e[0m", [" 3/100 ━━━━"]),  # Keras
    ("\\e]0;title\\a\\e]8;;file:///a\\e\\\\a\\e]8;;\\e\\\\ b\\e[K", ["a b"]),
    ("\\e[31", ["�[31"]),  # not whole
    ("\\n\\n", []),
])
def test_colors_go_and_what_else_is_no_text_is_seen(tmp_path, written, lines):
    job = _ended(tmp_path, f"printf '{written}'")
    assert job.tail(5)[0] == lines


def test_a_progress_bar_longer_than_the_tail(tmp_path):
    job = _ended(tmp_path, "seq -f 'epoch 1: %.0f' 10000 | tr '\\n' '\\r'")
    assert job.log.stat().st_size > TAIL_BYTES
    assert job.tail(5) == (["epoch 1: 10000"], job.log.stat().st_size)


def test_standard_input_is_empty(tmp_path):
    job = _ended(tmp_path, "cat; echo end")
    assert job.tail(5)[0] == ["end"]


def test_signals_reach_its_first_process_or_all_of_it(tmp_path):
    job = StartedJob([sys.executable, "-c", _FAMILY], os.environ, tmp_path / "run.log")
    wait_for(job, "ready")
    job.send(signal.SIGTERM)
    wait_for(job, "TERM")
    job.send(signal.SIGINT)
    assert job.ended.wait(60)
    assert job.returncode == 4
    assert job.tail(5)[0] == ["ready", "parent got TERM", "child got INT"]
    job.send(signal.SIGTERM)  # gone: no matter


def test_its_end_is_that_of_what_its_shell_started(tmp_path):
    fifo = tmp_path / "open"
    os.mkfifo(fifo)
    job = _job(tmp_path, f"exec 3> {fifo}; sleep 100; true")  # a child, which holds the other end open
    with fifo.open("rb") as held:
        job.end()
        assert job.ended.wait(60)
        assert held.read() == b""  # closed by all of them
    assert job.returncode == -signal.SIGTERM
    job.end()  # gone: no matter


def test_a_signal_that_ends_it_is_named(tmp_path):
    job = _ended(tmp_path, "kill -KILL $$")
    assert (job.returncode, job.state()) == (-9, "was terminated by SIGKILL")


def test_what_keeps_it_from_starting(tmp_path):
    there = tmp_path / "there"
    there.touch()
    with pytest.raises(GputopError, match="cannot write the job's output"):
        StartedJob(["true"], os.environ, there)
    no_program = tmp_path / "data"
    no_program.write_text("1")
    with pytest.raises(GputopError, match="cannot start") as caught:
        StartedJob([str(no_program)], os.environ, tmp_path / "log")
    assert caught.value.exit_code == 126
    assert not (tmp_path / "log").exists()


def test_after_the_monitor_the_rest_of_its_output_comes(tmp_path, capfdbinary):
    job = _job(tmp_path, f"echo before; until [ -e {tmp_path}/go ]; do sleep 0.01; done; echo after")
    wait_for(job, "before")
    lines: list[str] = []

    def say(line: str) -> None:
        lines.append(line)
        if "the job is still running" in line:
            (tmp_path / "go").touch()

    wait_for_exit(job, say)
    assert lines[0] == "before" and lines[-1].startswith("gputop: the job exited with status 0")
    assert capfdbinary.readouterr().out == b"after\n"


def test_signals_are_passed_on_while_it_is_waited_for(tmp_path):
    job = _job(tmp_path, "trap 'exit 9' USR1; echo ready; while :; do sleep 0.01; done")
    wait_for(job, "ready")
    before = signal.getsignal(signal.SIGUSR1)
    of_textual = signal.signal(signal.SIGCONT, lambda *_: None)

    def say(line: str) -> None:
        if "the job is still running" in line:
            assert signal.getsignal(signal.SIGCONT) == signal.SIG_DFL  # fg is not to bring the screen back
            threading.Thread(target=os.kill, args=(os.getpid(), signal.SIGUSR1)).start()

    wait_for_exit(job, say)
    assert job.returncode == 9
    assert signal.getsignal(signal.SIGUSR1) == before
    signal.signal(signal.SIGCONT, of_textual)


@pytest.mark.parametrize(("returncode", "ends"), [(5, 5), (-15, -15), (-9, -9), (-11, -11)])
def test_gputop_ends_as_the_job_did(returncode, ends):
    code = f"import os; from gputop.launch.job import exit_like; os._exit(exit_like({returncode}))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == ends

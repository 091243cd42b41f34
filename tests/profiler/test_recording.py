"""What is said of a process that ends while it is recorded."""

from __future__ import annotations

import subprocess
import sys

import pytest

from gputop.profiler import recording
from gputop.profiler.recording import TraceLost, end_of_recorded, pidfd_of


def ended(command: str) -> TraceLost | None:
    with (subprocess.Popen(["sh", "-c", f"read line; {command}"], stdin=subprocess.PIPE) as process,
          pidfd_of(process.pid) as pidfd):
        process.stdin.close()
        return end_of_recorded(process.pid, pidfd)


@pytest.mark.parametrize(("command", "how", "fix"), [
    ("kill -ABRT $$", "ended by SIGABRT while it was being recorded: the recording is the likely cause",
     "Please report this at"),
    ("kill -KILL $$", "ended by SIGKILL while it was being recorded", "because memory ran out"),
    ("kill -TERM $$", "ended by SIGTERM while it was being recorded, before its trace arrived", "the job's output"),
    ("exit 3", "ended with status 3 while it was being recorded, before its trace arrived", "the job's output"),
])
def test_how_a_recorded_process_ended_is_said(command: str, how: str, fix: str) -> None:
    error = ended(command)
    assert error is not None and error.message.endswith(how) and fix in error.fix


def test_what_is_not_known_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "end_of", lambda pid, pidfd: "")
    error = ended("exit 0")
    assert error is not None and error.message.endswith("while it was being recorded; how it ended is unknown")
    assert "the recording is the likely cause" in error.fix


def test_one_that_goes_on_has_not_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "_EXIT_S", 0.0)
    with (subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process,
          pidfd_of(process.pid) as pidfd):
        assert pidfd >= 0 and end_of_recorded(process.pid, pidfd) is None
        process.stdin.close()
    with pidfd_of(process.pid) as pidfd:
        assert pidfd == -1 and end_of_recorded(process.pid, pidfd) is None

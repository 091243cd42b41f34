"""Signals go to the process that was selected, or to none. Real processes, real pidfds."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from gputop.core.errors import GputopError
from gputop.core.samples import ProcessSample, Reading
from gputop.session.process_signals import SIGNALS, send
from gputop.sources.host import proc_files
from tests.processes import asleep
from tests.records import replace
from tests.waiting import PATIENCE_S

NONE = Reading.missing("bytes", "test")


def selected(pid: int) -> ProcessSample:
    """The process as the host's source sees it."""
    stat = proc_files.parse_stat(proc_files.read(f"/proc/{pid}/stat"))
    boot = next(int(line.split()[1]) for line in Path("/proc/stat").read_text().splitlines() if "btime" in line)
    return ProcessSample(pid, "me", "sleep", NONE, NONE, started_s=boot + stat.start / os.sysconf("SC_CLK_TCK"))


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    with asleep() as process:
        yield process


def test_stop_go_on_and_end(child: subprocess.Popen[bytes]) -> None:
    process = selected(child.pid)
    send(process, signal.SIGSTOP)
    _, status = os.waitpid(child.pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status)
    send(process, signal.SIGCONT)
    _, status = os.waitpid(child.pid, os.WCONTINUED)
    assert os.WIFCONTINUED(status)
    send(process, signal.SIGTERM)
    assert child.wait(PATIENCE_S) == -signal.SIGTERM
    with pytest.raises(GputopError, match="has ended"):
        send(process, signal.SIGTERM)


def test_a_later_process_of_the_same_number_gets_nothing(child: subprocess.Popen[bytes]) -> None:
    process = selected(child.pid)
    assert process.started_s is not None
    with pytest.raises(GputopError, match="another process"):
        send(replace(process, started_s=process.started_s - 60), signal.SIGKILL)
    with pytest.raises(GputopError, match="unknown"):
        send(replace(process, started_s=None, reason="hidden"), signal.SIGKILL)
    assert child.poll() is None


def test_processes_of_others_are_refused_by_name_and_roots_rights_are_used(child: subprocess.Popen[bytes],
                                                                           monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[int] = []
    process = selected(child.pid)
    monkeypatch.setattr(signal, "pidfd_send_signal", lambda _, n: sent.append(n))
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 54321)
    with pytest.raises(GputopError, match=rf"{child.pid} belongs to .*, and you are"):
        send(process, signal.SIGKILL)
    assert sent == []
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    send(process, signal.SIGKILL)
    assert sent == [signal.SIGKILL]


def test_what_the_kernel_refuses_is_said(child: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: int, __: signal.Signals) -> None:
        raise PermissionError

    monkeypatch.setattr(signal, "pidfd_send_signal", refuse)
    with pytest.raises(GputopError, match="kernel does not allow you"):
        send(selected(child.pid), signal.SIGTERM)


def test_neither_itself_nor_the_first_process() -> None:
    for pid in (os.getpid(), 1, 0):
        with pytest.raises(GputopError, match="not send signals"):
            send(ProcessSample(pid, "me", "x", NONE, NONE, started_s=1.0), signal.SIGKILL)


def test_the_number_where_gputop_runs_is_the_one_meant(child: subprocess.Popen[bytes]) -> None:
    process = replace(selected(child.pid), pid=4_000_000, local_pid=child.pid)
    send(process, signal.SIGKILL)
    assert child.wait(PATIENCE_S) == -signal.SIGKILL
    assert {number for number, _ in SIGNALS} == {signal.SIGINT, signal.SIGTERM, signal.SIGKILL, signal.SIGSTOP,
                                                 signal.SIGCONT}

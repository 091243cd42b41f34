"""A terminal that stops reading, for real: the program in it must sample, obey and end as if nothing were."""

from __future__ import annotations

import json
import os
import select
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.tui.terminals import PATIENCE_S, Terminal, terminal

# gputop over the simulated node, telling on a pipe about each sample what only its inside knows.
PROGRAM = """
import json, os, sys
from gputop.session.options import Options
from gputop.session.session import Session
from gputop.sources.simulated import SimulatedSource
from gputop.tui.app import GputopApp
from gputop.tui.monitor.gpu_table import GpuTable
from gputop.tui.terminal.textual_private import driver_of

pipe = int(sys.argv[1])
SimulatedSource.backfill = lambda *_: ()  # seconds of samples at this interval take seconds
session = Session(SimulatedSource("healthy"), Options(interval_s=0.05))
app = GputopApp(session)
samples = 0
last = None

def listener(change):
    global last, samples
    if change != "sample" or session.feed.sample is last:
        return
    last = session.feed.sample
    samples += 1
    line = getattr(driver_of(app), "_writer", None)
    tables = app.screen_stack[0].query(GpuTable) if app.is_running and app.screen_stack else ()
    os.write(pipe, (json.dumps({"samples": samples, "busy": bool(line and line.busy),
                                "metric": tables.first().metric if tables else ""}) + "\\n").encode())

session.listen(listener)
app.run()
session.close()
os._exit(0)
"""


class Reports:
    """What the program reports, sample by sample."""

    def __init__(self, fd: int) -> None:
        self._fd, self._rest = fd, b""
        self.now: dict[str, Any] = {"samples": 0, "metric": "", "busy": False}

    def next(self) -> dict[str, Any]:
        while b"\n" not in self._rest:
            assert select.select([self._fd], [], [], PATIENCE_S)[0], f"no sample any more after {self.now}"
            data = os.read(self._fd, 65536)
            assert data, f"it has ended after {self.now}"
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\n")
        self.now = json.loads(line)
        return self.now


@contextmanager
def reported_by_gputop(size: tuple[int, int] = (200, 60), **more: Any) -> Iterator[tuple[Terminal, Reports]]:
    ours, theirs = os.pipe()
    command = [sys.executable, "-c", PROGRAM, str(theirs)]
    with terminal(size, command=command, pass_fds=[theirs], **more) as there:
        os.close(theirs)
        there.until("What to do")
        there.until("snapshot")  # the footer: keys are read by now
        yield there, Reports(ours)
    os.close(ours)


def stall(there: Terminal, report: Reports) -> None:
    """Let it draw without reading, until the kernel takes no more; the keys are obeyed meanwhile."""
    full = 0
    while full < 6:  # samples in a row with the line full
        before = report.next()
        if not before["busy"]:
            there.press("m")
            while report.next()["metric"] == before["metric"]:
                pass
        full = full + 1 if report.now["busy"] else 0


@pytest.mark.parametrize("answers", [False, True], ids=["mute terminal", "terminal that answers"])
def test_nobody_reads_for_a_while_and_then_all_is_there_and_again_until_it_ends(answers: bool) -> None:
    with reported_by_gputop(answers=answers) as (there, report):
        there.until("SM active")
        if answers:
            while not there._answered:
                there.read(1.0)
        stall_before = report.next()["samples"]
        there.press("m")
        if not answers:  # where answers are awaited, nothing more is sent: the kernel never fills
            stall(there, report)
        held = len(there.raw)
        for i in range(30):
            if i % 2:
                there.press("m")
            there_now = report.next()
            assert answers or there_now["busy"]
        assert len(there.raw) == held and report.now["samples"] - stall_before >= 30, "sampling has gone on"
        # No frames were piled up: what had waited is one screen, not thirty.
        while there.read(0.04):  # less than from one sample to the next
            pass
        assert len(there.raw) - held < 80_000
        there.press("?")
        there.until("esc: close")
        there.press("\x1b")
        there.until(lambda text: "esc: close" not in text and "What to do" in text)
        if not answers:
            stall(there, report)
        there.press("q")
        while answers and there.program.poll() is None:
            there.read(0.1)
        assert there.ended() == 0 and there.given_back()
        assert answers or there.raw.endswith(b"\x1b[?1004l")


def test_a_closed_terminal_ends_it() -> None:
    with reported_by_gputop() as (there, report):
        stall(there, report)
        there.program.send_signal(1)  # SIGHUP, as the kernel sends when a terminal goes away
        assert there.ended() == 0

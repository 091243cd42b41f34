"""The main job on a real terminal, key by key: from the demo to its cause, and after a lost session to it again."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.tui.terminals import terminal

CAUSE = "Waits for input"


@pytest.mark.parametrize("size", [(80, 24)])
def test_from_the_demo_to_the_cause_and_back_after_a_lost_session(size: tuple[int, int], tmp_path: Path) -> None:
    logdir = ("--demo", "input-bound", "--logdir", str(tmp_path))
    with terminal(size, *logdir) as there:
        assert "c capture  a attach" in there.until("c: capture a trace")
        there.press("c")
        there.until("x stop")
        there.until(lambda text: re.search(r" [2-9]\.\d of ", text))
        there.press("x")
        found = there.until(lambda text: CAUSE in text and "step time" in text)
        assert re.search(r"saves (up to )?\d+ %", found) and "t timeline  T tables  J captures" in found
        there.press("\r")
        assert CAUSE in there.until("Evidence").splitlines()[0]
        there.press("q")  # escape may clear a notice first
        there.until("t timeline")
        there.press("t")
        there.until(lambda text: "gputop  SIMULATED  timeline" in text and "events" in text and "Reading" not in text)
        there.press("q")
        there.until("t timeline")
        there.press("T")
        there.until("Last capture")
        there.press("q")
        there.until("t timeline")
        there.press("J")
        there.until(lambda text: re.search(rf"● \d\d:\d\d:\d\d +\S+ ms/step +{CAUSE}", text))
        there.program.kill()  # the line was lost
    with terminal(size, *logdir) as there:
        there.until("c capture  a attach")
        there.press("J")
        there.until(lambda text: re.search(rf"\d\d:\d\d:\d\d +\S+ ms/step +{CAUSE}", text))
        there.press("\r")
        there.until(lambda text: "What to do · capture" in text and CAUSE in text and "step time" in text)
        there.press("q")
        assert there.ended() == 0 and there.given_back()

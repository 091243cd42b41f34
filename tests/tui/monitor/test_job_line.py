"""The line about the job: what it says of the auto-capture."""

from __future__ import annotations

from gputop.profiler.capture.records import Server
from gputop.tui.monitor import status_lines


def text(width: int, auto_capture: str) -> str:
    servers = (Server("127.0.0.1:6009", "TensorFlow 2.21.0, rank 0: python train.py"),)
    return "".join(t for t, _ in status_lines.job(
        status_lines.JobState(servers, True, auto_capture=auto_capture), 0.0, width))


def test_the_auto_capture_stands_before_the_command():
    line = text(160, "auto-capture 0/20: sm<0.6*median for 5s")
    assert line.index("127.0.0.1:6009") < line.index("auto-capture 0/20: sm<0.6") < line.index("train.py")
    assert "\x1b" not in text(160, "auto-capture: \x1b[31m"), "its note may hold what a server said"
    assert len(text(80, "auto-capture: " + "x" * 200)) <= 80
    assert "auto-capture" not in text(160, "")

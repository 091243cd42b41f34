"""The line about the job: what it says of the black box."""

from __future__ import annotations

from gputop.profiler.capture.records import Server
from gputop.tui.monitor import status_lines


def text(width: int, black_box: str) -> str:
    servers = (Server("127.0.0.1:6009", "TensorFlow 2.21.0, rank 0: python train.py"),)
    return "".join(t for t, _ in status_lines.job(servers, True, None, None, 0.0, width, None, black_box))


def test_the_black_box_stands_before_the_command():
    line = text(160, "black box 0/20: sm<0.6*median for 5s")
    assert line.index("127.0.0.1:6009") < line.index("black box 0/20: sm<0.6") < line.index("python train.py")
    assert "\x1b" not in text(160, "black box: \x1b[31m"), "its note may hold what a server said"
    assert len(text(80, "black box: " + "x" * 200)) <= 80
    assert "black box" not in text(160, "")

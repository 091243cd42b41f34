from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from dataclasses import replace

import pytest
from rich.color import ColorSystem

from gputop.samples import LOST, GpuSample
from gputop.tui.first_frame import color_system, paint
from tests.fakes import node_sample

ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


@pytest.mark.parametrize(("width", "height"), [(20, 5), (80, 24), (120, 40), (200, 50)])
def test_it_fits_the_screen_and_shows_the_figures(width: int, height: int) -> None:
    lines = ESCAPES.sub("", paint(node_sample(10), 1.0, width, height, ColorSystem.TRUECOLOR)).split("\r\n")
    assert len(lines) <= height
    assert all(len(line) <= width for line in lines)
    if width >= 80:
        assert "node-07" in lines[0] and "71.2/79.6" in lines[2] and "50%" in lines[2]


def test_without_colour_there_are_no_colour_sequences() -> None:
    assert "\x1b" not in paint(node_sample(10), 1.0, 100, 30, None)


def test_a_lost_gpu_and_doctored_names_are_harmless() -> None:
    def lose(gpu: GpuSample, tick: int) -> GpuSample:
        return replace(gpu, state=LOST, message="gone\x1b[2J", readings={}) if gpu.info.index == 2 else gpu

    text = paint(node_sample(10, change=lose), 1.0, 120, 40, None)
    assert "lost: gone�[2J" in text


@pytest.mark.parametrize(("env", "system"), [
    ({"COLORTERM": "truecolor", "TERM": "xterm"}, ColorSystem.TRUECOLOR),
    ({"TERM": "xterm-256color"}, ColorSystem.EIGHT_BIT), ({"TERM": "linux"}, ColorSystem.STANDARD),
    ({"COLORTERM": "truecolor", "NO_COLOR": "1"}, None),
])
def test_colours_follow_the_terminal(env: dict[str, str], system: ColorSystem | None,
                                     monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("COLORTERM", "TERM", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert color_system() == system


def test_nothing_heavy_is_imported_before_the_first_frame() -> None:
    program = ("import sys, gputop.cli, gputop.commands.monitor, gputop.session, gputop.sources.nvml\n"
               "import gputop.tui.first_frame\n"
               "print(sorted({'numpy', 'textual', 'grpc', 'google.protobuf', 'psutil'} & set(sys.modules)))")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def _read_until(terminal: int, wanted: str, seen: str = "", timeout_s: float = 60.0) -> str:
    deadline = time.monotonic() + timeout_s
    while wanted not in ESCAPES.sub("", seen):
        left = deadline - time.monotonic()
        assert left > 0 and select.select([terminal], [], [], left)[0], f"no {wanted!r} in {seen[-2000:]!r}"
        try:
            seen += os.read(terminal, 65536).decode(errors="replace")
        except OSError:  # the other side is gone
            return seen
    return seen


@pytest.mark.parametrize("ending", ["q", "ctrl-c", signal.SIGTERM, signal.SIGHUP])
def test_the_program_in_a_terminal_starts_draws_quits_and_gives_the_screen_back(ending: str | int) -> None:
    # Not pty.fork: where gRPC runs in this process, its handlers for a fork can deadlock or abort the child.
    terminal, theirs = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
    tty = os.ttyname(theirs)  # the first terminal that the leader of a new session opens becomes its own
    program = subprocess.Popen(
        ["/bin/sh", "-c", f'exec "$@" <{tty} >{tty} 2>&1', "sh", sys.executable, "-m", "gputop", "--demo", "healthy"],
        env={**os.environ, "TERM": "xterm-256color", "COLORTERM": "truecolor"}, start_new_session=True)
    seen = _read_until(terminal, "What to do")
    seen = _read_until(terminal, "SIMULATED", seen)
    seen = _read_until(terminal, "snapshot", seen)  # the footer: keys are read by now
    os.close(theirs)
    assert "\x1b[?1049h" in seen
    if isinstance(ending, str):
        os.write(terminal, b"q" if ending == "q" else b"\x03")
    else:
        program.send_signal(ending)
    tail = _read_until(terminal, "\0 never", timeout_s=60.0)
    os.close(terminal)
    assert program.wait(60) == 0
    assert "\x1b[?1049l" in tail and "\x1b[?25h" in tail
    assert "Traceback" not in tail

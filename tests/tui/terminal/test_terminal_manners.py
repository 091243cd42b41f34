"""What a terminal may do to gputop, and how gputop leaves it: over real pseudo-terminals."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.tui.terminals import Terminal, terminal
from tests.waiting import PATIENCE_S, until

FATAL = ("SIGQUIT", "SIGABRT", "SIGUSR1", "SIGUSR2", "SIGXCPU", "SIGALRM", "SIGVTALRM", "SIGPROF", "SIGSYS", "SIGTRAP",
         "SIGTERM", "SIGHUP")
DEMO = ("--demo", "healthy", "--interval", "5")  # at a second the past before the start takes a second more


def started(there: Terminal) -> None:
    """Follow the monitor from its first frame until it reads keys."""
    there.until("GPU SM active")
    with_table: list[bool] = []
    there.until(lambda text: with_table.append("GPU SM active" in text) or "What to do" in text)
    there.until("snapshot")  # the footer: keys are read by now
    assert there.raw.count(b"\x1b[?1049h") == 1, "Textual takes over the screen that is there"
    assert all(with_table), "and its first update is no empty screen"


def quit_well(there: Terminal, ending: str | signal.Signals = "q") -> None:
    """End it by a key or a signal, after which the terminal is as it was."""
    if isinstance(ending, str):
        there.press(ending)
    else:
        there.program.send_signal(ending)
    assert there.ended() == 0
    assert there.given_back()
    assert b"Traceback" not in there.raw


def catches_all(there: Terminal) -> bool:
    """Return whether each signal that would end it at once has a handler; two are sent one, which all of them have."""
    status = Path(f"/proc/{there.program.pid}/status").read_text()
    caught = int(status.partition("SigCgt:")[2].split()[0], 16)
    return all(caught >> signal.Signals[name] - 1 & 1 for name in FATAL)


def stopped(there: Terminal) -> bool:
    """Wait until the program has been stopped."""
    _, status = os.waitpid(there.program.pid, os.WUNTRACED)
    while there.read(0):
        pass
    return os.WIFSTOPPED(status)


@pytest.fixture(scope="module")
def shared() -> Iterator[Terminal]:
    """A monitor that the first tests share, started with SIGUSR1 ignored. The last of them ends it."""
    command = ["/bin/sh", "-c", f"trap '' USR1; exec {sys.executable} -m gputop {' '.join(DEMO)}"]
    with terminal((120, 40), command=command) as there:
        started(there)
        yield there


def test_a_storm_of_sizes_ends_in_a_whole_picture(shared: Terminal) -> None:
    for i in range(60):
        shared.resize(*((20, 5), (0, 0), (200, 60), (1, 1), (79, 23), (40, 12))[i % 6])
        shared.read(0.01)
    shared.resize(120, 40)
    # A picture may arrive in parts; in the end it fills the screen, no line more or less.
    shared.until(lambda text: "What to do" in text and "train.py" in text and "demo-node" in text
                 and len(text.splitlines()) == 40)


@pytest.mark.parametrize("number", [signal.SIGTSTP, signal.SIGSTOP])
def test_stopped_and_continued_it_is_there_again_and_the_terminal_as_it_was(
        shared: Terminal, number: signal.Signals) -> None:
    shared.program.send_signal(number)
    assert stopped(shared)
    if number == signal.SIGTSTP:
        assert shared.given_back(), "the shell gets its terminal as it was"
    shared.cells.feed("\x1b[H" + "\r\n".join("the shell's own text, all over the screen" for _ in range(40)))
    shared.program.send_signal(signal.SIGCONT)
    shared.until(lambda text: "What to do" in text and "the shell's" not in text)


def test_ctrl_z_too(shared: Terminal) -> None:
    shared.press("\x1a")
    assert stopped(shared) and shared.given_back()
    shared.cells.feed("\x1b[2J")
    shared.program.send_signal(signal.SIGCONT)
    shared.until("What to do")


def test_what_something_else_wrote_on_the_screen_goes_with_ctrl_l(shared: Terminal) -> None:
    shared.cells.feed("\x1b[H" + "\r\n".join("wall: the node goes down for maintenance" for _ in range(40)))
    shared.press("\x0c")
    shared.until(lambda text: "wall:" not in text and "What to do" in text)


def test_what_is_ignored_stays_ignored(shared: Terminal) -> None:
    shared.program.send_signal(signal.SIGUSR1)
    shared.press("?")
    shared.until("esc: close")
    shared.press("\x1b")
    shared.until(lambda text: "esc: close" not in text)


def test_escape_and_the_key_after_it_are_two_keys_even_when_they_are_read_at_once(shared: Terminal) -> None:
    """As a terminal sends alt and that key; so do a fast typist, and a slow link."""
    shared.press("i")
    shared.until("Profiler servers")
    shared.press("\x1b?")
    shared.until(lambda text: "The keys" not in text and "─ Help" in text and "Profiler servers" not in text)
    quit_well(shared, "\x1bq")


@pytest.mark.parametrize("size", [(0, 0), (1, 1)])
def test_it_runs_and_ends_in_a_terminal_of_any_size(size: tuple[int, int]) -> None:
    with terminal(size, *DEMO) as there:
        while b"\x1b[?2004h" not in there.raw:  # Textual reads keys
            assert there.read(PATIENCE_S), bytes(there.raw)
        quit_well(there)


def draws(there: Terminal) -> None:
    """Take the first frame, and what comes with it: a terminal that does not read would be another test."""
    while b"GPU SM active" not in there.raw:
        assert there.read(PATIENCE_S)
    while there.read(0.05):
        pass


@pytest.mark.parametrize(("number", "statuses"), [
    (signal.SIGTERM, {0, 128 + signal.SIGTERM}),  # 0 where Textual runs by now
    (signal.SIGQUIT, {-signal.SIGQUIT}),
])
def test_ended_right_after_the_first_frame_it_gives_the_terminal_back(
        number: signal.Signals, statuses: set[int]) -> None:
    with terminal((120, 40), *DEMO) as there:
        draws(there)
        assert catches_all(there)
        there.program.send_signal(number)
        assert there.ended() in statuses
        assert there.given_back()


HUNG = """
from gputop.session.session import Session
from gputop.sources.simulated import SimulatedSource
from gputop.tui.app import GputopApp

def hang(app, by):
    print("hangs", file=open("/dev/tty", "w"), flush=True)
    while True:
        pass

GputopApp.action_metric = hang
GputopApp(Session(SimulatedSource("healthy"))).run()
"""


def test_a_monitor_that_hangs_can_be_ended_and_gives_the_terminal_back() -> None:
    with terminal((120, 40), command=[sys.executable, "-c", HUNG]) as there:
        started(there)
        there.press("m")
        there.until("hangs")
        assert catches_all(there)
        there.program.send_signal(signal.SIGABRT)
        assert there.ended() == -signal.SIGABRT, "it ends by that signal"
        assert there.given_back()


def test_the_timeline_gives_the_terminal_back_too() -> None:
    trace = next((Path(__file__).parents[2] / "data").rglob("*.xplane.pb*"))
    with terminal((120, 40), "analyze", "--timeline", str(trace)) as there:
        while b"\x1b[?2004h" not in there.raw:  # Textual reads keys
            assert there.read(PATIENCE_S), bytes(there.raw)
        assert catches_all(there)
        there.program.send_signal(signal.SIGTERM)
        assert there.ended() == -signal.SIGTERM
        assert there.given_back()


FAULT = """
import sys
from gputop.tui.app import GputopApp
from gputop.cli import command

def crash(app, by):
    secret = "a-local-that-nobody-may-see"
    raise ValueError("on purpose, with --token hunter2 and \\x1b]0;a title\\x07")

GputopApp.action_metric = crash
sys.argv[1:] = ["--demo", "healthy", "--interval", "5"]
command()
"""


def test_a_fault_is_told_in_three_messages_with_a_file_to_attach(tmp_path: Path) -> None:
    with terminal((160, 40), command=[sys.executable, "-c", FAULT], env={"XDG_CACHE_HOME": str(tmp_path)}) as there:
        started(there)
        there.press("m")
        assert there.ended() == 1
        assert there.given_back()
        output = bytes(there.raw[there.raw.index(b"gputop: internal error in gputop"):]).decode()
        assert "\x1b[?1049l" not in output, "it stands on the terminal's screen"
    lines = output.strip().replace("\r\n  ", " ").splitlines()  # wrapped at the terminal's width
    assert len(lines) == 3 and all(line.startswith("gputop: ") and line.isprintable() for line in lines), output
    assert "ValueError: on purpose" in lines[0]
    report, = tmp_path.glob("gputop/fault-*.txt")
    assert str(report) in lines[1] and report.stat().st_mode & 0o777 == 0o600
    for text in (output, report.read_text()):
        assert "hunter2" not in text and "nobody-may-see" not in text and "\x1b" not in text
    assert "in crash" in report.read_text(), "it says where"


def test_on_a_terminal_that_cannot_place_text_it_is_one_snapshot_as_text() -> None:
    with terminal((120, 40), "--demo", "healthy", "--gpus", "0", "--interval", "0.2", env={"TERM": "dumb"}) as there:
        assert there.ended() == 0
        output = bytes(there.raw).decode()
        assert "TERM is dumb" in output and "one snapshot as text" in output and "What to do" in output
        assert "\x1b" not in output


@pytest.mark.parametrize(("more", "forbidden", "ending"), [
    ({"NO_COLOR": "1"}, rb"\x1b\[[0-9;]*\b(3[0-8]|4[0-8]|9[0-7])\b[0-9;]*m", "\x03"),
    ({"TERM": "xterm", "COLORTERM": ""}, rb"[34]8;[25];", signal.SIGTERM),
    ({"TERM": "xterm-256color", "COLORTERM": ""}, rb"[34]8;2;", signal.SIGHUP),
], ids=["none", "16", "256"])
def test_no_color_is_sent_that_the_terminal_does_not_have(
        more: dict[str, str], forbidden: bytes, ending: str | signal.Signals) -> None:
    """And each way to end the monitor that is no key of the footer gives the terminal back."""
    with terminal((120, 40), *DEMO, env=more) as there:
        started(there)
        there.press("?")
        there.until("esc: close")
        there.press("\x1b")
        there.until(lambda text: "esc: close" not in text)
        quit_well(there, ending)
        assert not re.findall(forbidden, bytes(there.raw))


def test_in_ascii_nothing_else_is_sent_and_the_locale_decides_and_messages_go_elsewhere(tmp_path: Path) -> None:
    program = f'exec {sys.executable} -m gputop {" ".join(DEMO)} 2>{tmp_path / "log"}'
    with terminal((120, 40), command=["/bin/sh", "-c", program], env={"LC_ALL": "de_DE.ISO-8859-1"}) as there:
        started(there)
        there.press("\x10")  # the command palette
        there.until("Search for commands")
        there.press("\x1b")
        there.until(lambda text: "Search for" not in text)
        quit_well(there)
        assert bytes(there.raw).isascii()
    assert (tmp_path / "log").read_text() == ""


def test_in_tmux_the_picture_is_what_was_drawn_and_the_shell_comes_back(tmp_path: Path) -> None:
    """tmux is a terminal not of our making: what it makes of what is sent is the truth."""
    import shutil

    if shutil.which("tmux") is None:
        pytest.skip("tmux is not installed")
    tmux = ["tmux", "-S", str(tmp_path / "socket"), "-f", "/dev/null"]

    def run(*arguments: str) -> str:
        return subprocess.run([*tmux, *arguments], capture_output=True, text=True, check=True, timeout=60).stdout

    def shown(*wanted: str) -> str:
        def seen() -> str:
            screen = run("capture-pane", "-p", "-t", "t")
            return screen if all(text in screen for text in wanted) else ""

        return until(seen, f"a screen with {wanted}")

    run("new-session", "-d", "-s", "t", "-x", "120", "-y", "40", "/bin/sh")
    try:
        run("send-keys", "-t", "t", f"PS1='ready> '; cd /; clear; PYTHONPATH={Path(__file__).parents[3]} "
            f"{sys.executable} -m gputop --demo healthy", "Enter")
        seen = shown("What to do", "train.py --model", "snapshot", "SIMULATED")
        lines = seen.splitlines()
        assert lines[0].startswith(" gputop") and lines[1].startswith("GPU SM active")
        for gpu in range(8):
            assert any(line.startswith(f" {gpu} ") and "76.4/79.6" in line for line in lines)
        for key in ("m", "M", "?"):
            run("send-keys", "-t", "t", key)
        shown("esc: close")
        run("send-keys", "-t", "t", "Escape")
        run("resize-window", "-t", "t", "-x", "80", "-y", "24")
        shown("What to do", "q quit")
        run("send-keys", "-t", "t", "q")
        assert "What to do" not in shown("ready>")
    finally:
        run("kill-server")

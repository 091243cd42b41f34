"""A fault of gputop's own: three lines, a private report, and nothing that may not be passed on."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from gputop.text import crash


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "gputop"


def fault(message: str) -> Exception:
    held = "a-local-that-nobody-may-see"
    try:
        try:
            raise KeyError(message)
        except KeyError as cause:
            raise ValueError(message) from cause
    except ValueError as error:
        assert held
        return error


def test_three_lines_and_a_private_file(cache: Path, capsys: pytest.CaptureFixture[str],
                                        monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["gputop", "--attach", "http://ana:hunter2@h:1", "--token=hunter2"])
    crash.tell(fault("1e999 with password=hunter2 \x1b]0;title\x07\n\u202e" + "x" * 1_000_000))
    err = capsys.readouterr().err
    lines = err.splitlines()
    assert len(lines) == 3 and all(line.isprintable() and len(line) < 500 for line in lines)
    report, = cache.iterdir()
    assert str(report) in lines[1] and crash.ISSUES in lines[2]
    assert report.stat().st_mode & 0o777 == 0o600 and cache.stat().st_mode & 0o777 == 0o700
    text = report.read_text()
    assert "ValueError" in text and "KeyError" in text and "in fault" in text and "--attach" in text
    assert len(text) < 2 * crash.REPORT_CHARS and all(line.isprintable() for line in text.split("\n"))
    assert "hunter2" not in err + text and "held =" not in text and "nobody-may-see\"" not in err


def test_old_reports_make_room(cache: Path) -> None:
    for _ in range(crash.KEPT_REPORTS + 5):
        newest = crash.write_report(fault("x"))
    assert len(list(cache.iterdir())) == crash.KEPT_REPORTS and newest.exists()


def test_a_cache_that_others_can_write_to_is_not_used(cache: Path, tmp_path: Path) -> None:
    """A planted link in a folder of somebody else's leads nowhere."""
    cache.mkdir()
    cache.chmod(0o777)
    report = crash.write_report(fault("x"))
    assert not list(cache.iterdir()) and report.stat().st_mode & 0o777 == 0o600
    assert report.parent.stat().st_mode & 0o777 == 0o700
    report.unlink()
    report.parent.rmdir()


def test_without_any_room_it_is_told_all_the_same(cache: Path, capsys: pytest.CaptureFixture[str],
                                                  monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: BaseException) -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(crash, "write_report", full)
    crash.tell(fault("x"))
    assert "No space left" in capsys.readouterr().err


def test_an_error_that_cannot_say_what_it_is(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    crash.tell(Mute())
    assert "Mute" in capsys.readouterr().err


def test_a_fault_in_a_thread_is_told_once(cache: Path, capsys: pytest.CaptureFixture[str],
                                          monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name in ((threading, "excepthook"), (sys, "excepthook"), (sys, "unraisablehook")):
        monkeypatch.setattr(module, name, getattr(module, name))
    crash.install_hooks()
    for _ in range(3):
        thread = threading.Thread(target=lambda: 1 / 0)
        thread.start()
        thread.join()
    err = capsys.readouterr().err
    assert err.count("ZeroDivisionError") == 1 and "Traceback" not in err


def test_a_command_that_fails_by_a_fault(tmp_path: Path) -> None:
    code = ("import sys, gputop.cli, gputop.commands.analyze as a\n"
            "def run(args):\n    key = 'a-local'\n    raise RuntimeError('token=hunter2')\n"
            "a.run = run\nsys.argv[1:] = ['analyze', 'x']\ngputop.cli.command()")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60,
                          env={**os.environ, "XDG_CACHE_HOME": str(tmp_path)})
    assert done.returncode == 1 and done.stdout == ""
    assert len(done.stderr.splitlines()) == 3 and "RuntimeError" in done.stderr
    assert "hunter2" not in done.stderr and "Traceback" not in done.stderr

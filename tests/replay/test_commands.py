"""``gputop record`` and ``gputop replay`` from outside."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from gputop.cli import main
from gputop.commands.arguments import parser
from gputop.core.samples import NodeSample
from gputop.core.signal_handlers import signal_handlers
from gputop.replay.parts import record
from gputop.replay.reader import Recording
from tests.fakes import StillSource, node_sample
from tests.records import replace
from tests.waiting import PATIENCE_S, until


def start(path: Path) -> subprocess.Popen[str]:
    """A recording without end of its own, when it says that it has begun."""
    process = subprocess.Popen(
        [sys.executable, "-u", "-m", "gputop", "record", "--demo", "--interval", "0.1", "-o", str(path)],
        stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None and "recording to" in process.stderr.readline()
    return process


def wait_for_bytes(process: subprocess.Popen[str], path: Path, size: int) -> None:
    """Until the file has so many."""
    until(lambda: process.poll() is not None or path.stat().st_size >= size)
    assert process.poll() is None


def test_record_then_replay(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "f.rec"
    assert main(["record", "--demo", "--seconds", "1", "--interval", "0.1", "--gpus", "0,3", "-o", str(path)]) == 0
    shown = capsys.readouterr()
    assert shown.out == "" and str(path) in shown.err and f"gputop replay {path}" in shown.err
    recording = Recording(path)
    assert 1 <= len(recording) <= 13, "a loaded machine takes fewer in a second"
    sample = recording.sample(0)
    assert sample.simulated and sample.source.startswith("SIMULATED") and [g.info.index for g in sample.gpus] == [0, 3]
    # A second one of the same name leaves the first as it is.
    before = path.read_bytes()
    assert main(["record", "--demo", "--seconds", "1", "-o", str(path)]) == 1
    assert "never overwrites" in capsys.readouterr().err and path.read_bytes() == before
    assert main(["replay", str(path)]) == 2  # pytest's stdout is no terminal
    assert "replay needs a terminal: standard output is not a terminal" in capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_it_in_order(tmp_path: Path, number: signal.Signals) -> None:
    path = tmp_path / "f.rec"
    with signal_handlers({number: signal.SIG_DFL}):  # whatever this suite was started under
        process = start(path)
    with process:
        wait_for_bytes(process, path, 3000)
        process.send_signal(number)
        assert process.wait(PATIENCE_S) == 0
        assert process.stderr is not None and "samples" in process.stderr.read()
    assert Recording(path).notes == ()


def test_a_kill_loses_at_most_the_last_sample(tmp_path: Path) -> None:
    path = tmp_path / "f.rec"
    with start(path) as process:
        wait_for_bytes(process, path, 5000)
        process.kill()
    recording = Recording(path)
    assert len(recording) >= 3 and all(recording.sample(i).simulated for i in range(len(recording)))


@pytest.mark.parametrize(("text", "status", "message"), [
    (None, 1, "cannot read"), ("", 3, "gputop:"), ("a note", 1, "recording"), ("<html>", 1, "damaged"),
    ('{"schema": "gputop.snapshot/9"}', 1, "of type gputop.snapshot/9"), ('{"schema": "gputop.snapsh', 1, "damaged"),
    ('{"traceEvents": []}', 1, "not a gputop document")])
def test_replay_of_what_is_neither_recording_nor_snapshot(
        text: str | None, status: int, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "x.json"
    if text is not None:
        file.write_text(text)
    assert main(["replay", str(file)]) == status
    shown = capsys.readouterr()
    assert shown.out == "" and message in shown.err and "x.json" in shown.err and "gputop:" in shown.err


def test_options() -> None:
    args = parser().parse_args(["replay", "f.rec", "--speed", "max", "--start", "90"])
    assert args.speed == math.inf and args.start == 90.0 and args.file == Path("f.rec")
    assert parser().parse_args(["replay", "f.rec"]).speed == 1.0
    assert parser().parse_args(["record", "-o", "f.rec"]).seconds is None


@pytest.mark.parametrize("args", [
    ["record"], ["record", "-o", "f", "--seconds", "0"], ["replay"], ["replay", "f", "--speed", "0"],
    ["replay", "f", "--speed", "fast"], ["replay", "f", "--speed", "nan"], ["replay", "f", "--start", "-1"],
    *(["record", "--demo", "-o", "f", *words] for words in (
        ["--rotate", "soon"], ["--rotate", "0d"], ["--rotate", "7"], ["--rotate", "1d,2d"],
        ["--rotate", "1d", "--keep", "x"], ["--rotate", "1d", "--keep", ""], ["--rotate=1d", "--keep=1e3"])),
])
def test_wrong_usage_is_2(args: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(args)
    assert caught.value.code == 2


def test_commands_are_recorded_without_their_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sample = node_sample(0, 1)
    process = replace(sample.processes[0], command="python train.py --token abcdef --lr 0.1")

    class OneLook:
        def __init__(self, source: object, interval_s: float, take: Callable[[NodeSample], None], *_: object) -> None:
            self._take = take

        def start(self) -> None:
            self._take(replace(sample, processes=(process,)))

        def stop(self) -> None: ...

    monkeypatch.setattr("gputop.replay.parts.Sampler", OneLook)
    path = tmp_path / "f.rec"
    record(StillSource(), 1.0, path, 1.0, threading.Event(), lambda text: None)
    assert Recording(path).sample(0).processes[0].command == "python train.py --token *** --lr 0.1"


@pytest.mark.parametrize(("command", "message"), [("replay", "it is a pipe, not a regular file"),
                                                  ("analyze", "is neither a file nor a folder")])
def test_a_pipe_is_refused_and_not_waited_for(command: str, message: str, tmp_path: Path,
                                              capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo(tmp_path / "file.json")
    assert main([command, str(tmp_path / "file.json")]) == 1
    assert message in capsys.readouterr().err

"""Signals while a capture or a recording runs."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path

import pytest

from gputop.cli import main
from tests.launch.jobs import GPUTOP

_HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@pytest.mark.parametrize(("status", "arguments"), [
    (0, ["capture", "--demo", "--seconds", "0.5", "--logdir", "{}"]),
    (3, ["capture", "--attach", "127.0.0.1:1", "--logdir", "{}"]),
    (0, ["capture", "--demo", "--interval", "0.1", "--on-dip", "sm<95% for 1s", "--seconds", "0.5", "--logdir",
         "{}"]),
    (0, ["record", "--demo", "--interval", "0.1", "--seconds", "0.3", "-o", "{}/file"]),
], ids=["capture", "nothing to capture", "on dip", "record"])
def test_what_handled_signals_before_does_so_again(status, arguments, tmp_path):
    before = {number: signal.getsignal(number) for number in _HANDLED}
    assert main([argument.format(tmp_path) for argument in arguments]) == status
    assert {number: signal.getsignal(number) for number in _HANDLED} == before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_capture_that_is_interrupted_keeps_its_data(number, tmp_path):
    with subprocess.Popen([*GPUTOP, "capture", "--demo", "--seconds", "60", "--force", "--json", "--logdir",
                           str(tmp_path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as capture:
        assert capture.stderr is not None
        assert any("recording" in line for line in capture.stderr)
        capture.send_signal(number)
        out, said = capture.communicate(timeout=60)
    assert capture.returncode == 0, said
    trace = Path(json.loads(out)["capture"]["path"])
    assert trace.is_file() and f"trace written: {trace}" in said

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path

import pytest

from gputop.errors import GputopError
from gputop.trace import worker
from gputop.trace.analysis import analyze
from gputop.trace.worker import analyze_in_worker

CAPTURE = Path(__file__).resolve().parents[1] / "data" / "keras3_slow_input.xplane.pb.gz"


def test_document_and_report_come_from_another_process(tmp_path, monkeypatch):
    (tmp_path / "selectors.py").write_text("raise RuntimeError('shadowed')")  # the user's own file of that name
    monkeypatch.chdir(tmp_path)
    document = analyze_in_worker([str(CAPTURE)])
    assert document["schema"] == "gputop.analysis/1" and document["findings"][0]["id"] == "input_bound"
    assert "Waits for input" in document["report"]


def test_the_childs_own_message_and_status_arrive(tmp_path):
    empty = tmp_path / "empty.xplane.pb"
    empty.write_bytes(b"")
    with pytest.raises(GputopError) as caught:
        analyze_in_worker([str(empty)])
    with pytest.raises(GputopError) as here:
        analyze([str(empty)])
    for attribute in ("message", "fix", "exit_code"):
        assert getattr(caught.value, attribute) == getattr(here.value, attribute)
    assert str(empty) in caught.value.message


def test_stop_ends_it(tmp_path):
    fifo = tmp_path / "never.xplane.pb"
    os.mkfifo(fifo)  # the reader would wait for ever, had nobody stopped it
    stop = threading.Event()
    stop.set()
    with pytest.raises(GputopError, match="stopped"):
        analyze_in_worker([str(fifo)], stop)


def replaced(monkeypatch, code: str) -> None:
    monkeypatch.setattr(worker, "_CHILD", code)


def test_a_child_killed_for_memory_is_told_apart(monkeypatch):
    replaced(monkeypatch, f"import os; os.kill(os.getpid(), {int(signal.SIGKILL)})")
    with pytest.raises(GputopError, match="memory"):
        analyze_in_worker(["x"])


def test_a_crash_gives_its_last_line(monkeypatch):
    replaced(monkeypatch, "import sys; print('half a doc'); raise ValueError('odd trace')")
    with pytest.raises(GputopError, match="status 1: ValueError: odd trace"):
        analyze_in_worker(["x"])


def test_output_larger_than_a_pipe_arrives_whole(monkeypatch):
    replaced(monkeypatch, "import json; print(json.dumps({'x': 'y' * 500000}))")
    assert len(analyze_in_worker(["x"])["x"]) == 500_000


def test_it_does_not_run_for_ever(monkeypatch):
    replaced(monkeypatch, "import threading; threading.Event().wait()")
    with pytest.raises(GputopError, match="not done"):
        analyze_in_worker(["x"], timeout_s=0.3)


def test_no_interpreter_to_start(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    with pytest.raises(GputopError, match="could not be started"):
        analyze_in_worker(["x"])

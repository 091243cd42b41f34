from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading

import pytest

from gputop.core.errors import GputopError
from gputop.core.signal_handlers import signal_handlers
from gputop.diagnosis import worker
from gputop.diagnosis.diagnose import analyze
from gputop.diagnosis.worker import AnalysisAhead, WorkerTask, analyze_in_worker, run_in_worker
from tests.diagnosis.real_capture import CAPTURE


def test_document_and_report_come_from_another_process(tmp_path, monkeypatch):
    (tmp_path / "selectors.py").write_text("raise RuntimeError('shadowed')")  # the user's own file of that name
    monkeypatch.chdir(tmp_path)
    found = analyze_in_worker([str(CAPTURE)])
    assert found.analysis == analyze([str(CAPTURE)]) and found.analysis.findings[0].id == "input_bound"
    assert "Input wait takes" in found.report


def test_a_process_that_was_begun_ahead_analyzes(monkeypatch):
    expected = analyze([str(CAPTURE)])
    monkeypatch.setattr(worker, "analyze_in_worker", None)
    with AnalysisAhead(threading.Event()) as ahead:
        ahead.begin()
        ahead.begin()
        assert ahead.analyze([str(CAPTURE)]).analysis == expected


def test_a_process_that_was_begun_in_vain_ends():
    with AnalysisAhead(threading.Event()) as ahead:
        ahead.begin()
    assert isinstance(ahead._diagnosis.exception(), GputopError)


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


@pytest.mark.parametrize("end", ["stop", "timeout", "ctrl-c"])
def test_the_child_does_not_outlive_the_call(tmp_path, monkeypatch, end):
    pid_file = tmp_path / "pid"
    replaced(monkeypatch, "import os, sys, threading\n"
             f"open({str(pid_file)!r}, 'w').write(f'{{os.getpid()}} {{os.getsid(0)}}\\n')\n"
             "threading.Event().wait()")

    class Stop(threading.Event):
        def is_set(self) -> bool:
            if end == "timeout" or not (pid_file.exists() and pid_file.read_text().endswith("\n")):
                return False
            if end == "ctrl-c":
                signal.raise_signal(signal.SIGINT)
            return True

    expected = KeyboardInterrupt if end == "ctrl-c" else GputopError
    # A suite that was started in the background ignores ctrl-c.
    with signal_handlers({signal.SIGINT: signal.default_int_handler}), pytest.raises(expected):
        analyze_in_worker(["x"], Stop(), timeout_s=3.0 if end == "timeout" else 60.0)
    pid, session = map(int, pid_file.read_text().split())
    assert session == pid, "ctrl-c in the terminal would hit it, too"
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_the_child_dies_with_a_killed_parent(tmp_path):
    fifo = tmp_path / "never"
    os.mkfifo(fifo)
    code = ("import sys; from gputop.diagnosis import worker\n"
            "worker.run_in_worker(worker.WorkerTask('tests.diagnosis.endless', tuple(sys.argv[1:])), str)")
    with subprocess.Popen([sys.executable, "-c", code, str(fifo)]) as parent:
        opened: list[int] = []
        writer = threading.Thread(target=lambda: opened.append(os.open(fifo, os.O_WRONLY)), daemon=True)
        writer.start()  # it opens when the child has come to read
        writer.join(60)
        parent.kill()
    assert opened
    poll = select.poll()
    poll.register(opened[0], 0)
    assert poll.poll(60_000) == [(opened[0], select.POLLERR)], "the reader lives on"
    os.close(opened[0])


def test_a_child_whose_parent_is_gone_does_not_begin():
    code = f"from gputop.diagnosis.worker import die_with; die_with({os.getpid() + 1}); print('began')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "")


def replaced(monkeypatch, code: str) -> None:
    monkeypatch.setattr(worker, "child_command", lambda *_: [sys.executable, "-c", code])


def test_output_larger_than_a_pipe_arrives_whole(monkeypatch):
    replaced(monkeypatch, "import json; print(json.dumps({'result': 'y' * 500000}))")
    assert len(run_in_worker(WorkerTask("m", ()), str)) == 500_000


@pytest.mark.parametrize(("code", "message"), [
    ("print('[' * 100_000)", "nested too deeply"), ("print('{}')", "null where an object belongs"),
    ("""print('{"result": {"analysis": {"trace": {}, "steps": 5}, "report": "", "limit": ""}}')""", "analysis.steps"),
    ("""print('{"result": {"analysis": {"trace": {"window_s": 1e999}}}}')""", "inf is not a number"),
    (f"import os; os.kill(os.getpid(), {int(signal.SIGKILL)})", "memory"),
    ("print('half a doc'); raise ValueError('odd trace')", "status 1: ValueError: odd trace"),
    ("import threading; threading.Event().wait()", "did not finish"),
])
def test_without_an_answer_of_its_form_it_is_said_what_is_wrong(monkeypatch, code, message):
    replaced(monkeypatch, code)
    with pytest.raises(GputopError, match=message):
        analyze_in_worker(["x"], timeout_s=0.3 if "threading" in code else 60.0)


def test_no_interpreter_to_start(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    with pytest.raises(GputopError, match="Could not start the analysis"):
        analyze_in_worker(["x"])

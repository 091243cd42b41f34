"""Stacks by the real py-spy, and what stands in its place when it misbehaves."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gputop.core.errors import GputopError
from gputop.ranks import stacks
from gputop.ranks.stacks import find_py_spy, is_ending, read_all, read_dump, read_stacks
from tests.processes import asleep

needs_py_spy = pytest.mark.skipif(find_py_spy() is None, reason="py-spy is not installed")
PROGRAM = """import threading
def waits():
    print("ready", flush=True)
    threading.Event().wait()
threading.Thread(target=threading.Event().wait, name="load\\x1b[2J").start()
waits()
"""


@pytest.fixture
def process(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    script = tmp_path / "train.py"
    script.write_text(PROGRAM)
    own = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True,
                           env={**os.environ, "RANK": "3"})
    try:
        assert own.stdout is not None and own.stdout.readline() == "ready\n"
        yield own
    finally:
        own.kill()
        own.wait()
        assert own.stdout is not None
        own.stdout.close()


@needs_py_spy
def test_a_real_process_is_read_while_it_runs_on(process: subprocess.Popen[str]) -> None:
    (own,) = read_all([process.pid, process.pid])
    assert own.label == f"rank 3 (pid {process.pid})" and own.problem is None and own.command.endswith("train.py")
    assert own.main is not None
    frame = next(f for f in own.main.frames if f.function == "waits")
    assert frame.file.endswith("/train.py") and frame.line == 4 and not frame.native
    assert all(thread.name.isprintable() for thread in own.threads) and len(own.threads) == 2
    os.kill(process.pid, signal.SIGSTOP)  # held by somebody: a job that was stopped
    try:
        assert read_stacks(process.pid)
    finally:
        os.kill(process.pid, signal.SIGCONT)


@needs_py_spy
def test_a_process_whose_main_thread_has_left_its_script_is_ending() -> None:
    for call, ending in (("atexit.register(waits)", True), ("waits()", False)):
        script = f"import atexit, time\ndef waits():\n    print('in', flush=True)\n    time.sleep(60)\n{call}"
        with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as process:
            try:
                assert process.stdout is not None and process.stdout.readline() == b"in\n"
                assert is_ending(process.pid) is ending
            finally:
                process.kill()
        assert not is_ending(process.pid), "it has ended"


@needs_py_spy
def test_native_frames_are_told_apart(process: subprocess.Popen[str]) -> None:
    main = next(thread for thread in read_stacks(process.pid, native=True) if thread.main)
    assert any(f.native for f in main.frames) and any(f.function == "waits" and not f.native for f in main.frames)
    assert process.poll() is None


@needs_py_spy
def test_what_cannot_be_read_is_the_problem_of_its_process(process: subprocess.Popen[str]) -> None:
    with asleep() as other:
        good, gone, no_python = read_all([process.pid, 2**22, other.pid])
    assert good.threads and gone.problem is not None and "no process" in gone.problem.message
    assert no_python.problem is not None and "Check that it is a running Python process" in no_python.problem.fix


@pytest.mark.parametrize(("script", "message"), [
    ("sleep 100", "did not finish"), ("yes", "more than"), ("echo '[{'", "damaged"),
    ("echo broken >&2; exit 3", "broken"), ("kill -9 $$", "could not read")])
def test_a_py_spy_that_misbehaves_is_ended(script: str, message: str, tmp_path: Path,
                                           monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "py-spy"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o700)
    monkeypatch.setattr(stacks, "TIMEOUT_S", 0.3 if "sleep" in script else 10.0)
    monkeypatch.setattr(stacks, "_MAX_BYTES", 1 << 20)
    with pytest.raises(GputopError, match=message):
        read_stacks(os.getpid(), program=str(program))


def test_without_py_spy_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacks, "find_py_spy", lambda: None)
    with pytest.raises(GputopError) as caught:
        read_all([os.getpid()])
    assert "pip install py-spy" in caught.value.fix


FRAME = {"name": "f\n", "filename": "/a/b.py", "line": -3, "module": None}
JSON = st.recursive(st.none() | st.booleans() | st.integers() | st.text(max_size=9),
                    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
                        st.sampled_from(["frames", "name", "line", "thread_name", "os_thread_id", "module"]), inner))


@given(st.lists(st.fixed_dictionaries({"frames": st.lists(st.just(FRAME) | JSON, max_size=3)}) | JSON, max_size=3))
def test_odd_dumps_are_refused_or_made_printable(document: object) -> None:
    try:
        threads = read_dump(json.dumps(document).encode(), 1)
    except GputopError:
        return
    assert all(f.function.isprintable() and (f.line or 1) > 0 for thread in threads for f in thread.frames)

"""The monitor beside a job: what it says of it, and that it does not leave it by mistake."""

from __future__ import annotations

import os
import signal
import subprocess

import pytest

from gputop.launch.job import Job
from gputop.profiler.capture.records import Server
from gputop.tui.monitor.findings_panel import ActionsPanel
from gputop.tui.run_app import Leave, Output, RunApp, job_line
from gputop.tui.widgets.cached_lines import LinesWidget
from gputop.tui.widgets.dialog_frame import WrappedText
from tests.fakes import StillSession
from tests.tui.textual_private import exits, messages

_PATIENT = "trap 'echo asked; exit 5' TERM; trap 'echo USR1' USR1; echo up; while :; do sleep 0.01; done"


@pytest.fixture
def job(tmp_path):
    started = Job(["bash", "-c", _PATIENT], os.environ, tmp_path / "run.log")
    _wait_for(started, "up")
    yield started
    started.send(signal.SIGTERM)
    started._process.wait()


def _wait_for(job: Job, text: str) -> None:
    subprocess.run(["timeout", "60", "bash", "-c", f"tail -f -n +1 {job.log} | grep -q -m1 {text}"], check=True)


def _text(widget: LinesWidget) -> str:
    return "".join(text for line in widget._lines for text, _ in line)


def _line(app: RunApp) -> str:
    return _text(app.query_one("#job", LinesWidget))


def _panel(app: RunApp) -> str:
    return _text(app.query_one(ActionsPanel))


async def _until(pilot, condition) -> None:
    for _ in range(2000):
        if condition():
            return
        await pilot.pause(0.005)
    raise AssertionError("it did not come to it")


async def test_the_job_line_tells_of_the_job_until_it_serves(job):
    app = RunApp(StillSession(), job)
    async with app.run_test(size=(160, 40)) as pilot:
        await _until(pilot, lambda: f"pid {job.pid} runs, no TensorFlow, JAX or PyTorch imported yet" in _line(app))
        job.set_server(None, "no profiler server in process 1: RuntimeError: why")
        await _until(pilot, lambda: "RuntimeError: why" in _line(app))
        job.set_server("127.0.0.1:6009", "")
        app.session.servers = (Server("127.0.0.1:6009", "python train.py", job.pid),)
        app.session._notify("servers")
        await _until(pilot, lambda: "● 127.0.0.1:6009" in _line(app))
        job.send(signal.SIGTERM)
        await _until(pilot, lambda: "ended with status 5" in _line(app))
        assert [m for m in messages(app) if "status 5" in m] == [
            "The job ended with status 5. l: its output, q: quit.\nasked"]
        await pilot.press("q")
        await _until(pilot, lambda: _left(app))


async def test_without_a_server_the_panel_says_what_is_waited_for(job):
    app = RunApp(StillSession(), job)
    async with app.run_test(size=(160, 40)) as pilot:
        waits = "c captures a trace after the job has imported TensorFlow, JAX or PyTorch"
        await _until(pilot, lambda: waits in _panel(app))
        job.set_server(None, "no profiler server in process 1: RuntimeError: why")
        await _until(pilot, lambda: "profiler server did not start" in _panel(app))
        job.send(signal.SIGTERM)
        await _until(pilot, lambda: "The job has ended: l shows its output." in _panel(app))


async def test_its_output_is_shown_as_it_grows(job):
    app = RunApp(StillSession(), job)
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.press("l")
        await _until(pilot, lambda: isinstance(app.screen, Output))
        output = app.screen.query_one(WrappedText)
        await _until(pilot, lambda: "up" in str(output.text))
        assert job.log.name in str(app.screen.query_one("#popup").border_title)
        job.send(signal.SIGUSR1)
        await _until(pilot, lambda: "USR1" in str(output.text))
        await pilot.press("escape")
        await _until(pilot, lambda: not isinstance(app.screen, Output))


def _left(app: RunApp) -> bool:
    return exits(app)


@pytest.mark.parametrize(("keys", "ended"), [(["q", "enter"], False), (["ctrl+c", "ctrl+c"], False),
                                             (["q", "k"], True)])
async def test_quitting_asks_what_is_to_become_of_the_job(job, keys, ended):
    app = RunApp(StillSession(), job)
    async with app.run_test(size=(120, 40)) as pilot:
        await _until(pilot, lambda: app.query("#keys"))
        for answer in ("escape", keys[1]):
            assert not _left(app)
            await pilot.press(keys[0])
            await _until(pilot, lambda: isinstance(app.screen, Leave))
            await pilot.press(answer)
            await _until(pilot, lambda: _left(app) or not isinstance(app.screen, Leave))
        assert _left(app)
    if ended:
        assert job._process.wait(60) == 5
    else:
        assert job.returncode is None


def test_what_comes_from_outside_is_made_safe(tmp_path):
    started = Job(["true", "\x1b[31m[bold]"], os.environ, tmp_path / "log")
    assert started.ended.wait(60)
    text = "".join(part for part, _ in job_line(started, 120))
    assert "\x1b" not in text and "[bold]" in text and "ended with status 0" in text

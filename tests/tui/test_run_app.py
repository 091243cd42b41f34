"""The monitor beside a job: what it says of it, and that it does not leave it by mistake."""

from __future__ import annotations

import os
import signal

import pytest

from gputop.launch.job import StartedJob
from gputop.profiler.capture.records import Server
from gputop.tui.run_app import Leave, Output, RunApp, job_line
from gputop.tui.screens.dialogs import Confirm
from gputop.tui.widgets.dialog_frame import WrappedText
from tests.fakes import StillSession
from tests.launch.jobs import wait_for
from tests.tui.found import line_text, text_of, until
from tests.tui.textual_private import exits, messages

_PATIENT = "trap 'echo asked; exit 5' TERM; trap 'echo USR1' USR1; echo up; while :; do sleep 0.01; done"


@pytest.fixture
def job(tmp_path):
    started = StartedJob(["bash", "-c", _PATIENT], os.environ, tmp_path / "run.log")
    wait_for(started, "up")
    yield started
    started.send(signal.SIGTERM)
    started._process.wait()


async def test_the_job_line_and_the_panel_tell_of_the_job_until_it_serves(job):
    app = RunApp(StillSession(), job)
    async with app.run_test(size=(160, 40)) as pilot:
        async def told(line: str, panel: str = "") -> None:
            await until(pilot, lambda: line in text_of(app._job) and panel in text_of(app._actions))

        await told(f"pid {job.pid} is running, no TensorFlow, JAX or PyTorch imported yet",
                   "Press c once the job has imported TensorFlow, JAX or PyTorch")
        job.set_server(None, "no profiler server in process 1: RuntimeError: why")
        await told("RuntimeError: why", "profiler server did not start")
        job.set_server("127.0.0.1:6009", "")
        app.session.watch.servers = (Server("127.0.0.1:6009", "python train.py", job.pid),)
        app.session._notify("servers")
        await told("● 127.0.0.1:6009")
        app.session.watch.servers = ()
        job.send(signal.SIGTERM)
        await told("exited with status 5", "The job has ended. Press l to see its output.")
        assert [m for m in messages(app) if "status 5" in m] == [
            "The job exited with status 5. l: output, q: quit.\nasked"]
        await pilot.press("q")
        await until(pilot, lambda: exits(app))


async def test_its_output_is_shown_as_it_grows(job):
    app = RunApp(StillSession(), job)
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.press("l")
        await until(pilot, lambda: isinstance(app.screen, Output))
        output = app.screen.query_one(WrappedText)
        await until(pilot, lambda: "up" in str(output.text))
        assert job.log.name in str(app.screen.query_one("#popup").border_title)
        job.send(signal.SIGUSR1)
        await until(pilot, lambda: "up\nUSR1" in str(output.text))
        await pilot.press("escape")
        await until(pilot, lambda: not isinstance(app.screen, Output))


@pytest.mark.parametrize(("keys", "ended"), [(["q", "enter"], False), (["ctrl+c", "ctrl+c"], False),
                                             (["q", "k"], True)])
async def test_quitting_asks_what_is_to_become_of_the_job(job, keys, ended):
    app = RunApp(StillSession(), job)
    async with app.run_test(size=(120, 40)) as pilot:
        await until(pilot, lambda: app.query("#keys"))
        for answer in ("escape", keys[1]):
            assert not exits(app)
            await pilot.press(keys[0])
            await until(pilot, lambda: isinstance(app.screen, Leave))
            await pilot.press(answer)
            await until(pilot, lambda: exits(app) or not isinstance(app.screen, Leave))
        assert exits(app)
    if ended:
        assert job._process.wait(60) == 5
    else:
        assert job.returncode is None


def test_what_comes_from_outside_is_made_safe(tmp_path):
    started = StartedJob(["true", "\x1b[31m[bold]"], os.environ, tmp_path / "log")
    assert started.ended.wait(60)
    text = line_text(job_line(started, 120))
    assert "\x1b" not in text and "[bold]" in text and "exited with status 0" in text


_SHOWS = ("trap 'exit 3' TERM; echo $0 $1 $PWD $GPUTOP_TEST $(cat /proc/self/oom_score_adj); "
          "while :; do sleep 0.01; done")


async def test_a_restart_asks_keeps_the_command_and_goes_on_in_the_log(tmp_path, monkeypatch):
    started = StartedJob(["bash", "-c", _SHOWS, "name", "an argument"], {**os.environ, "GPUTOP_TEST": "x"},
                         tmp_path / "run.log")
    app, captures = RunApp(StillSession(), started), []
    monkeypatch.setattr(app.session, "start_capture", captures.append)
    monkeypatch.setattr(app.session.control, "start_server", lambda *_: None)
    try:
        async with app.run_test(size=(120, 40)) as pilot:
            await until(pilot, lambda: app.query("#keys") and started.tail(5)[0])
            first, pid = started.tail(5)[0], started.pid
            started.set_server("127.0.0.1:6009", "")
            await pilot.press("R")
            await until(pilot, lambda: isinstance(app.screen, Confirm))
            await pilot.press("n")
            await until(pilot, lambda: not isinstance(app.screen, Confirm))
            assert started.pid == pid and not started.ended.is_set()
            await pilot.press("R")
            await until(pilot, lambda: isinstance(app.screen, Confirm))
            await pilot.press("y")
            await until(pilot, lambda: started.pid != pid and started.tail(9)[0].count(first[0]) == 2)
            again = started.tail(9)[0]
            assert again[0] == again[-1] == first[0] and "name an argument" in first[0] and " x " in first[0]
            assert "gputop: started again at" in again[-2] and started.addresses == []
            assert [m for m in messages(app) if "exited with status" in m] == []
            await until(pilot, lambda: any(f"restarted (pid {started.pid})" in m for m in messages(app)))
            # The capture waits for the job to train.
            started.set_server("127.0.0.1:6010", "")
            app.session.watch.servers = (Server("127.0.0.1:6010", "python train.py", started.pid, asked=True),)
            app.session.advance(2)
            app._refresh_all()
            assert captures == [] and "captured when it trains, x: cancel" in text_of(app._job)
            app.session.advance(70)
            app._refresh_all()
            assert len(captures) == 1
            app._refresh_all()
            assert len(captures) == 1
    finally:
        started.kill()
        started._process.wait()


async def test_a_job_that_does_not_end_can_be_killed(tmp_path):
    started = StartedJob(["bash", "-c", "trap 'echo no' TERM; echo up; while :; do sleep 0.01; done"], os.environ,
                         tmp_path / "run.log")
    app = RunApp(StillSession(), started)
    try:
        async with app.run_test(size=(160, 40)) as pilot:
            await until(pilot, lambda: app.query("#keys") and "up" in started.tail(5)[0])
            pid = started.pid
            for question, line in (("End the job", "was asked to exit (R: kill it)"), ("Kill it?", "")):
                await pilot.press("R")
                await until(pilot, lambda: isinstance(app.screen, Confirm))
                assert question in app.screen._question
                await pilot.press("y")
                await until(pilot, lambda line=line: not isinstance(app.screen, Confirm) and line in text_of(app._job))
            await until(pilot, lambda: started.pid != pid)
            await pilot.press("x")
            assert "gputop will not capture after the restart." in messages(app)
    finally:
        started.kill()
        started._process.wait()

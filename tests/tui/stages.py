"""The screens on which keys are tried."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path
from typing import Any

from textual.pilot import Pilot

from gputop.launch.job import StartedJob
from gputop.tui.run_app import RunApp
from gputop.tui.timeline.trace_file import TraceFile
from tests.tui.key_effects import Stage
from tests.tui.textual_private import draw_when_settled
from tests.tui.timelines import job_timeline
from tests.waiting import PATIENCE_S


@cache
def session_of(make: Callable[[], Any]) -> Any:
    return make()


@asynccontextmanager
async def monitor(stage: Stage, folder: Path) -> AsyncIterator[tuple[Any, Pilot[int]]]:
    """The app of a stage; what would end or suspend it is noted."""
    session = session_of(stage.session)
    session._listeners.clear()
    session.results.baseline = None
    session._job_restarted_s = None  # a test before may have restarted the job of the demo
    if session.results.captures:
        session.open_capture(session.results.captures[-1])  # a test before may have opened another one
    started = StartedJob(["sleep", "600"], os.environ, folder / "output.log") if stage.app is RunApp else None
    app = stage.app(session, started) if started is not None else stage.app(session)
    app.ends = False

    def end(*_: object) -> None:
        app.ends = True

    leave, app.exit = app.exit, end
    draw_when_settled(app)
    app.action_suspend_process = lambda: session.asked.append("suspend")
    app.action_redraw = lambda: session.asked.append("redraw")
    try:
        async with app.run_test(size=(100, 30), notifications=True) as pilot:
            await pilot.pause()
            if session.results.last_capture is not None:
                record = session.results.last_capture
                app.trace = TraceFile((str(record.path),), "node", record.findings, analyzed=True,
                                      timeline=job_timeline(steps=12))
            yield app, pilot
            app.exit = leave
    finally:
        if app.trace is not None and app.trace.timeline is not None:
            app.trace.timeline.close()
        if started is not None:
            started.send(signal.SIGKILL)
            started.ended.wait(PATIENCE_S)

"""From a running TensorFlow training job to its named cause, the way a user goes."""

from __future__ import annotations

import asyncio
import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from gputop.tui.app import GputopApp
from gputop.tui.monitor.findings_panel import ActionsPanel
from gputop.tui.widgets.cached_lines import LinesWidget
from tests.commands.run_gputop import gputop
from tests.fakes import StillSession
from tests.session.watched import Watched
from tests.tf_job import TfJob

pytestmark = pytest.mark.tensorflow


def captured(job: TfJob, logdir: Path) -> dict[str, Any]:
    """The document of ``gputop capture --json``; its median step is that which the job's own callback logged."""
    done = gputop("capture", "--attach", job.address, "--seconds", "2", "--logdir", str(logdir), "--json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    # In the recorded window: what gputop does before and after it takes the job's processors, too.
    began_s = document["trace"]["start_s"]
    ends = [t for t in job.step_times() if began_s <= t <= began_s + document["trace"]["window_s"]]
    steps_s = sorted(b - a for a, b in itertools.pairwise(ends))
    middle = len(steps_s) // 2  # of two steps at the edges either may have one that the other lacks
    assert 0.9 * steps_s[max(middle - 2, 0)] <= document["steps"]["median_s"] <= 1.1 * steps_s[:middle + 3][-1]
    return document


def test_slow_input_is_named_and_the_step_time_is_the_job_s_own(tf_slow_job: TfJob, tmp_path: Path) -> None:
    for number in range(5):
        document = captured(tf_slow_job, tmp_path / str(number))
        (waits,) = [gaps for gaps in document["stacks"]["gaps"] if gaps["gap"] == "input"]
        if waits["lines"]:  # on a loaded machine py-spy may see too little to name any: then there is another recording
            break
    # Tests beside this one may take the CPUs, which is then said first.
    first = next(f for f in document["findings"] if f["id"] != "cpu_contention")
    assert first["id"] == "input_bound" and first["severity"] == "high"
    assert waits["lines"][0]["line"]== "load.<lambda> (AutoGraph)", waits  # which sleeps
    capture = document["capture"]
    assert capture["chosen_s"] == 2 and capture["probe"]["host_events_per_s"] > 0
    assert capture["cost"]["memory_peak_bytes"] >= capture["cost"]["memory_before_bytes"] > 1e8
    parts = document["breakdown"]
    assert parts["compute"] is None, "no GPU in this trace: unknown, not 0"
    assert sum(p for p in parts.values() if p is not None) == pytest.approx(document["steps"]["mean_s"], rel=1e-6)


def test_fast_input_is_not_blamed(tf_fast_job: TfJob, tmp_path: Path) -> None:
    document = captured(tf_fast_job, tmp_path)
    assert "input_bound" not in [f["id"] for f in document["findings"]]


async def test_in_the_app_one_key_names_the_cause(tf_slow_job: TfJob, tmp_path: Path) -> None:
    session = StillSession(logdir=tmp_path)
    session.control.options = type(session.control.options)(logdir=tmp_path, capture_s=1.5)
    session.watch.attach(tf_slow_job.address)
    session.watch.update()
    app = GputopApp(session)
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.press("c")
        watched = Watched(session)
        # The capture runs on its own thread; the app's loop must stay free meanwhile.
        control = session.control
        await asyncio.to_thread(watched.until, lambda: control.status and not control.status.running)
        await pilot.pause()
        assert session.control.status is not None and session.control.status.phase == "done", session.control.status
        shown = ["".join(text for text, _ in line) for line in app.query_one(ActionsPanel)._lines]
        assert any("input" in line.lower() for line in shown), shown
        assert "step time" in "".join(text for text, _ in app.query_one("#job", LinesWidget)._lines[0])

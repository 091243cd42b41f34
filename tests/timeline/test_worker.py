"""The timeline of a trace made in another process: what arrives, and what it leaves behind."""

from __future__ import annotations

import os
import stat
import tempfile
import threading
from pathlib import Path

import pytest

from gputop.core.errors import GputopError
from gputop.diagnosis.worker import WorkerTask, analyze_in_worker, run_in_worker
from gputop.timeline import timeline_worker as worker
from gputop.timeline.read_timeline import Timeline
from gputop.timeline.timeline_worker import timeline_in_worker
from tests.diagnosis.real_capture import CAPTURE
from tests.timeline.make import timeline_of


def read_alone(path: Path, stop: threading.Event | None = None) -> Timeline:
    return timeline_in_worker([str(path)], stop or threading.Event(), lambda rows: None, None)


def test_it_arrives_whole_and_leaves_no_file(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    seen: list[os.stat_result] = []

    def check(task, *more, **named):
        seen.append(os.fstat(int(task.arguments[0])))
        return run_in_worker(task, *more, **named)

    monkeypatch.setattr(worker, "run_in_worker", check)
    timeline = read_alone(CAPTURE)
    from gputop.trace.readers.load import load

    own = timeline_of(load([str(CAPTURE)]))
    assert timeline.rows == own.rows and timeline.idle_gaps == own.idle_gaps and timeline.window_ns == own.window_ns
    assert timeline.ranges(0, *timeline.window_ns, 10**6) == own.ranges(0, *own.window_ns, 10**6)
    assert list(tmp_path.iterdir()) == []
    assert stat.S_IMODE(seen[0].st_mode) == 0o600 and seen[0].st_nlink == 0


def test_the_rows_come_before_the_analysis_and_the_trace_is_read_once_for_both():
    rows, said = [], []
    timeline = timeline_in_worker([str(CAPTURE)], threading.Event(), rows.append, said.append)
    assert len(rows) == 1 and rows[0].pending and rows[0].rows == timeline.rows and not timeline.pending
    assert rows[0].ranges(0, *timeline.window_ns, 10**6) == timeline.ranges(0, *timeline.window_ns, 10**6)
    there = analyze_in_worker([str(CAPTURE)])
    assert said[0].analysis == there.analysis and said[0].report == there.report


def test_the_readers_message_arrives(tmp_path):
    with pytest.raises(GputopError, match="does not exist"):
        read_alone(tmp_path / "none.xplane.pb")


def test_it_can_be_stopped(tmp_path):
    fifo = tmp_path / "never.xplane.pb"
    os.mkfifo(fifo)
    stop = threading.Event()
    stop.set()
    with pytest.raises(GputopError, match="The timeline was stopped"):
        read_alone(fifo, stop)


def test_no_place_for_the_file(monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", "/nonexistent")
    with pytest.raises(GputopError, match="Cannot write") as caught:
        read_alone(CAPTURE)
    assert "TMPDIR" in caught.value.fix


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_a_full_disk_is_said_by_the_worker():
    with open("/dev/full", "wb", buffering=0) as full, pytest.raises(  # noqa: PTH123
            GputopError, match="No space left on device") as caught:
        run_in_worker(WorkerTask("gputop.timeline.timeline_worker", (str(full.fileno()), "", str(CAPTURE)), "timeline",
                                 pass_fds=(full.fileno(),)), dict)
    assert "TMPDIR" in caught.value.fix

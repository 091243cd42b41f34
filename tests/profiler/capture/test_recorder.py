"""What is common to all ways to capture takes a way that is not XProf's: other files, no overview, no early end."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

from gputop.profiler.capture import job_memory
from gputop.profiler.capture.job_memory import Cost
from gputop.profiler.capture.multi_worker import capture_workers
from gputop.profiler.capture.plan import Plan
from gputop.profiler.capture.request import CaptureRequest
from gputop.profiler.capture.safe_capture import capture_with_probe
from gputop.profiler.recording import CaptureResult, EmptyTrace, Progress, Recorder, RecorderLimits, RecordingOrder
from gputop.profiler.storage import RunFolder
from tests.profiler.capturing import ignore

ENDING = ".pt.trace.json"
EVENTS_PER_S = 400_000  # a probe finds half a million events in 1.25 s


class FileRecorder:
    """Records by a file, as kineto does: it waits for the whole time, whatever is asked meanwhile."""

    limits = RecorderLimits(job_bytes_per_byte=0.0, job_bytes_per_event=2500.0, overview=False, stoppable=False,
                            ending=ENDING)

    def __init__(self, address: str) -> None:
        self.address, self.pid = address, os.getpid()
        self.recorded: list[RecordingOrder] = []

    def round_trip_s(self) -> float:
        return 0.0

    def record(self, recording: RecordingOrder, on_progress: Callable[[Progress], None],
               stop: threading.Event) -> CaptureResult:
        self.recorded.append(recording)
        folder = RunFolder.create(recording.logdir, recording.host_name or "node", recording.run, ENDING)
        sent_s = time.time()
        on_progress(Progress("recording", recording.seconds))
        try:
            path = folder.save(json.dumps({"seconds": recording.seconds}).encode())
        finally:
            folder.discard()
        return CaptureResult(path, recording.seconds, recording.seconds, path.stat().st_size, stopped_early=False,
                             sent_s=sent_s)

    def count_events(self, path: Path) -> tuple[int, int]:
        return round(EVENTS_PER_S * json.loads(path.read_bytes())["seconds"]), 0

    def window_ns(self, path: Path) -> tuple[int, int] | None:
        return None


def captured(recorder: Recorder, logdir: Path, stop: threading.Event | None = None) -> tuple[CaptureResult, Plan, Cost]:
    return capture_with_probe(recorder, CaptureRequest(10.0, logdir), ignore, ignore, stop or threading.Event())


def test_a_probe_a_plan_and_one_recording(tmp_path: Path) -> None:
    made = FileRecorder("pid:7")
    result, plan, cost = captured(made, tmp_path)
    assert [recording.seconds for recording in made.recorded] == [0.5, plan.chosen_s]
    assert plan.chosen_s == 1.0 and plan.overview_s == 0.0 and plan.probe is not None
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [result.path]
    assert result.path.name.endswith(ENDING) and cost.recorded_s == 1.0


class QuietAtFirst(FileRecorder):
    """Its job waits for a third of a second, and works then."""

    limits = replace(FileRecorder.limits, probe_s=0.2)

    def record(self, recording: RecordingOrder, on_progress: Callable[[Progress], None],
               stop: threading.Event) -> CaptureResult:
        if not self.recorded:
            self.recorded.append(recording)
            raise EmptyTrace("nothing", "wait", recording.seconds)
        return super().record(recording, on_progress, stop)


def test_a_short_probe_without_events_does_not_allow_a_recording_that_nothing_can_end(tmp_path: Path) -> None:
    made = QuietAtFirst("pid:7")
    _, plan, _ = captured(made, tmp_path)
    assert [recording.seconds for recording in made.recorded] == [0.2, 0.5, plan.chosen_s] and plan.shortened


def test_a_probe_that_is_all_there_is_keeps_the_ending_of_its_files(tmp_path: Path) -> None:
    stop = threading.Event()
    stop.set()
    result, plan, _ = captured(FileRecorder("pid:7"), tmp_path, stop)
    assert plan.why.startswith("stopped during the probe") and result.path.name == f"node{ENDING}"


def test_the_guard_does_not_say_that_it_ended_what_cannot_be_ended(tmp_path: Path,
                                                                   monkeypatch: pytest.MonkeyPatch) -> None:
    grown = iter(range(10**9, 10**12, 10**9))
    monkeypatch.setattr(job_memory, "resident_bytes", lambda pid: next(grown))
    _, plan, _ = captured(FileRecorder("pid:7"), tmp_path)
    assert plan.ended == "" and "ended early" not in plan.why


def test_several_processes_share_a_folder(tmp_path: Path) -> None:
    recorders = [FileRecorder("unix:/run/0"), FileRecorder("unix:/run/1")]
    done = capture_workers(recorders, CaptureRequest(0.5, tmp_path), ignore, ignore, threading.Event())
    assert [outcome.error for outcome in done.outcomes] == [None, None]
    assert {outcome.result.path.parent for outcome in done.captured if outcome.result} == {done.run_dir}

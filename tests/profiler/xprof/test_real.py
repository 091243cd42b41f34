"""Against a real TensorFlow training job."""

from __future__ import annotations

import itertools
import subprocess
import sys
import threading
import time

import pytest

from gputop.analysis.steps.steps import find_steps
from gputop.core.errors import GputopError
from gputop.profiler.capture import safe_capture
from gputop.profiler.capture.plan import MIN_CAPTURE_S, MemoryLimits
from gputop.profiler.capture.plan import plan as plan_capture
from gputop.profiler.discovery import Finder
from gputop.profiler.recording import SERVER_MULTIPLE
from gputop.profiler.xprof.outline import count_events
from gputop.profiler.xprof.probe import probe
from gputop.trace.readers.load import load
from tests import xspace_messages as messages
from tests.profiler.capturing import capture, capture_with_probe
from tests.records import replace
from tests.tf_job import start_tf_job
from tests.waiting import until

pytestmark = pytest.mark.tensorflow


def test_found_without_an_address(tf_fast_job):
    (server,) = [s for s in Finder().find().servers if s.pid == tf_fast_job.pid]
    assert server.address == tf_fast_job.address
    assert (server.framework, server.version) == ("TensorFlow", tf_fast_job.versions["tensorflow"])


def test_probe_leaves_the_job_free(tf_fast_job, tmp_path):
    assert probe(tf_fast_job.address) > 0
    result = capture(tf_fast_job.address, seconds=0.2, logdir=tmp_path)
    assert result.took_s >= 0.2  # nothing the probe sent ended the session


def test_trace_holds_the_jobs_steps(tf_slow_job, tmp_path):
    result = capture(tf_slow_job.address, seconds=1.5, logdir=tmp_path, pid=tf_slow_job.pid,
                     host_name="trainer")
    assert result.path.name == "trainer.xplane.pb" and result.path.parents[1] == tmp_path / "plugins" / "profile"
    space = messages.XSpace.FromString(result.path.read_bytes())
    (plane,) = [p for p in space.planes if p.name == "/host:CPU"]
    (python,) = [line for line in plane.lines if line.name == "python"]
    # Keras runs each step as a call of this function; the job's own callback logs when it ended.
    (session,) = [p for p in space.planes if p.name == "Task Environment"]
    facts = {session.stat_metadata[stat.metadata_id].name: stat.uint64_value for stat in session.stats}
    start_s = (facts["profile_start_time"] + python.timestamp_ns) / 1e9  # lines count from there
    begins_s = [
        start_s + event.offset_ps / 1e12
        for event in python.events
        if plane.event_metadata[event.metadata_id].name in ("one_step_on_iterator", "multi_step_on_iterator")
    ]
    assert len(begins_s) > 3
    logged_s = [end for end in tf_slow_job.step_times() if begins_s[0] < end <= begins_s[-1]]
    assert len(logged_s) == len(begins_s) - 1
    assert any("IteratorGetNext" in metadata.name for metadata in plane.event_metadata.values())


def test_stop_keeps_what_was_recorded(tf_fast_job, tmp_path):
    stop = threading.Event()
    result = capture(tf_fast_job.address, seconds=60, logdir=tmp_path, stop=stop,
                     on_progress=lambda p: p.elapsed_s > 0.5 and stop.set())
    assert result.stopped_early and result.took_s < 60
    assert messages.XSpace.FromString(result.path.read_bytes()).planes[0].lines


def test_a_killed_gputop_leaves_the_job_free(tf_fast_job, tmp_path):
    command = [sys.executable, "-m", "gputop", "capture", "--attach", tf_fast_job.address, "--seconds", "600",
               "--force", "--logdir", str(tmp_path / "killed")]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as running:
        assert any("recording" in line for line in running.stderr)
        running.kill()

    def free() -> bool:  # TensorFlow gathers what it has recorded before that
        try:
            return bool(capture(tf_fast_job.address, seconds=0.2, logdir=tmp_path / "next"))
        except GputopError as error:
            assert "busy" in error.message, error
            return False

    until(free, "a capture")
    tf_fast_job.wait_steps(2)


def test_one_capture_at_a_time(tf_fast_job, tmp_path):
    stop, recording = threading.Event(), threading.Event()
    first = threading.Thread(target=lambda: capture(
        tf_fast_job.address, seconds=60, logdir=tmp_path / "first", stop=stop,
        on_progress=lambda p: p.phase == "recording" and recording.set()))
    first.start()
    try:
        assert recording.wait(60)
        with pytest.raises(GputopError, match="busy"):
            capture(tf_fast_job.address, seconds=0.2, logdir=tmp_path / "second")
    finally:
        stop.set()
        first.join()
    assert not (tmp_path / "second").exists()
    assert len(list((tmp_path / "first").rglob("*.xplane.pb"))) == 1


def test_job_that_dies_while_it_is_recorded(tmp_path):
    with start_tf_job("fast", threads=1) as job, pytest.raises(GputopError, match="ended by SIGKILL while it was"):
        capture(job.address, seconds=60, logdir=tmp_path / "logs",
                on_progress=lambda p: p.phase == "recording" and job.kill())
    assert not (tmp_path / "logs").exists()


@pytest.fixture
def detail_alone(monkeypatch):
    """No overview of the rest of a long time that is asked for."""
    monkeypatch.setattr(safe_capture, "plan", lambda *args: replace(plan_capture(*args), overview_s=0.0))


def _pace(job, begin_s, end_s):
    """The job's steps per second, from its ready line on."""
    ends = [end for end in job.step_times() if begin_s <= end <= end_s]
    return len(ends) / (end_s - max(begin_s, ends[0]))


def test_a_job_of_tiny_ops_is_recorded_for_less_and_the_reason_is_its_rate(tmp_path, detail_alone, monkeypatch):
    asked_s, most_events = 100.0, 100_000
    monkeypatch.setattr("gputop.profiler.capture.plan.TARGET_EVENTS", most_events)
    began_s, planned_s = time.time(), []
    with start_tf_job("tiny ops", threads=1) as job:
        result, plan, cost = capture_with_probe(job.address, seconds=asked_s, logdir=tmp_path, pid=job.pid,
                                                on_plan=lambda _: planned_s.append(time.time()))
        job.wait_steps(2)  # it goes on as if nothing had been
    assert plan.probe is not None and plan.probe.device_events == 0
    assert plan.probe.events_per_s > most_events / asked_s
    assert plan.chosen_s < asked_s / 2 and "the job emits " in plan.why
    # A fast machine makes more than these in the shortest recording, a second. The rate changes with the other work on
    # the machine, as the job's own count of its steps shows.
    planned = plan.probe.events_per_s * plan.chosen_s
    assert plan.chosen_s == MIN_CAPTURE_S or planned <= most_events
    change = _pace(job, result.sent_s, result.sent_s + plan.chosen_s) / _pace(job, began_s, planned_s[-1])
    assert planned * change / 5 < sum(count_events(result.path.read_bytes())) < planned * change * 5
    assert cost.memory_before_bytes is not None and cost.growth_bytes is not None
    assert cost.growth_bytes < SERVER_MULTIPLE * result.bytes * 2, "what the refusal for want of memory rests on"
    assert list(tmp_path.rglob("*.xplane.pb")) == [result.path]


def test_of_a_job_of_small_steps_a_hundred_will_do(tf_fast_job, tmp_path, monkeypatch, detail_alone):
    asked_s = 100.0
    monkeypatch.setattr("gputop.profiler.capture.plan._CHEAP_EVENTS", 10_000)
    # How much the job may grow depends on what else this machine does.
    monkeypatch.setattr(safe_capture, "memory_limits", lambda *_: MemoryLimits())
    result, plan, _ = capture_with_probe(tf_fast_job.address, seconds=asked_s, logdir=tmp_path, pid=tf_fast_job.pid)
    assert plan.enough and plan.chosen_s < asked_s / 2 and " steps are enough, at " in plan.why
    assert 50 < plan.chosen_s / plan.probe.step_s < 200
    steps = find_steps(load([result.path]))
    assert steps is not None and steps.count > 1, "its pace may change while other work shares the machine"


def test_the_rest_of_the_time_is_an_overview_with_the_jobs_steps(tf_fast_job, tmp_path, monkeypatch):
    monkeypatch.setattr(safe_capture, "memory_limits", lambda *_: MemoryLimits())
    monkeypatch.setattr("gputop.profiler.capture.plan._ENOUGH_STEPS", 20)
    monkeypatch.setattr("gputop.profiler.capture.plan._ENOUGH_S", 0.5)
    monkeypatch.setattr("gputop.profiler.capture.plan._CHEAP_EVENTS", 0)
    monkeypatch.setattr("gputop.profiler.capture.plan._OVERVIEW_EVENTS", 500_000)
    result, plan, _ = capture_with_probe(tf_fast_job.address, seconds=3, logdir=tmp_path, pid=tf_fast_job.pid)
    ended_s = time.time()
    assert plan.enough and plan.overview_s >= 1 and not plan.ended
    trace = load([tmp_path])
    detail, overview = find_steps(trace), trace.overviews.get(0)
    assert overview is not None and detail is not None and trace.paths == [str(result.path)]
    seen = find_steps(overview)
    assert seen is not None and seen.count > detail.count, "most of the time is in it"
    begin_s = (overview.origin_ns + overview.window_ns[0]) / 1e9
    assert result.sent_s + plan.chosen_s < begin_s < ended_s, "after the detail, on one clock"
    end_s = (overview.origin_ns + overview.window_ns[1]) / 1e9
    logged = [t for t in tf_fast_job.step_times() if begin_s <= t <= end_s]
    assert abs(len(logged) - seen.count) <= 3, "steps as the job itself counts them"


def test_a_job_of_large_steps_is_recorded_in_full(tf_slow_job, tmp_path):
    _, plan, _ = capture_with_probe(tf_slow_job.address, seconds=2, logdir=tmp_path, pid=tf_slow_job.pid)
    assert plan.chosen_s == 2 and plan.why.startswith("full length, at ")
    ends = tf_slow_job.step_times()
    slowest_s = max(b - a for a, b in itertools.pairwise(ends[-60:]))
    if slowest_s < plan.probe.seconds / 4:  # else the machine is too busy for steps of a tenth of a second
        assert plan.probe.step_s is not None, "whole steps show in the probe"



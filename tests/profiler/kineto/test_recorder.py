"""Recordings of processes that speak kineto's protocol: some do, some do what an attacker would."""

from __future__ import annotations

import os
import queue
import socket
import threading
import time
from pathlib import Path, PurePosixPath
from types import SimpleNamespace

import pytest

from gputop.analysis.steps.steps import find_steps
from gputop.core.errors import GputopError
from gputop.core.proc import read_stat
from gputop.profiler import storage
from gputop.profiler.capture import safe_capture
from gputop.profiler.kineto import daemon, guard, jobs, recorder
from gputop.profiler.kineto.clients import DaemonClient
from gputop.profiler.kineto.recorder import KinetoRecorder
from gputop.profiler.recording import Progress, RecordingOrder, TraceLost
from gputop.trace.readers.load import load
from tests.profiler.capturing import capture_with_probe, capture_workers, ignore
from tests.profiler.kineto.fake_client import trace
from tests.profiler.kineto.jobs import USER, fake_job, needs_root, opened, served


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "POLL_PERIOD_S", 0.3)
    for limit in ("_POLL_TIMEOUT_S", "_WRITE_TIMEOUT_S", "_BUILD_TIMEOUT_S"):  # patient with what comes in the end
        monkeypatch.setattr(recorder, limit, 30.0)
    monkeypatch.setattr(recorder, "_PERIOD_S", 0.02)
    monkeypatch.setattr(recorder, "_LEAD_MS", 0)


def _record(process, logdir: Path, seconds: float = 0.2, on_progress=ignore, stop=None):
    return KinetoRecorder(process.pid).record(RecordingOrder(seconds, logdir), on_progress, stop or threading.Event())


def test_a_trace_lies_in_the_logdir_and_nothing_is_left_with_the_job(place, tmp_path):
    with fake_job(place) as process:
        result = _record(process, tmp_path)
        assert result.path == next(tmp_path.glob("plugins/profile/*/*.pt.trace.json"))
        steps = find_steps(load([result.path]))
        assert steps is not None and steps.times.median_s == pytest.approx(0.01, rel=0.2)
        assert result.path.stat().st_mode & 0o777 == 0o600
        left = {path.name[:16] for path in place.iterdir()}
        assert left == {"dynoconfigclient", f"gputop-guard-{process.pid}"[:16]}


def test_a_probe_chooses_the_length(place, tmp_path, monkeypatch):
    monkeypatch.setattr(safe_capture, "PROBE_S", 0.1)
    plans = []
    with fake_job(place) as process:
        _, plan, cost = capture_with_probe(f"pid:{process.pid}", seconds=1.1, logdir=tmp_path, on_plan=plans.append)
    assert plans[1:] == [plan] and plan.probe is not None and plan.overview_s == 0
    assert plan.probe.host_events == 20 and plan.probe.device_events == 0
    assert plan.probe.step_s == pytest.approx(0.01, rel=0.2)
    assert cost.memory_before_bytes is not None
    assert len(list(tmp_path.rglob("*.json"))) == 1  # the probe's is gone


def test_ranks_begin_together_and_are_named(place, tmp_path):
    """In one folder, too, as where the user has set KINETO_IPC_SOCKET_DIR for all of them."""
    with fake_job(place, RANK="0") as one, fake_job(place, RANK="1") as other:
        captured = _capture_workers([one, other], tmp_path)
    names = sorted(outcome.result.path.name for outcome in captured.outcomes if outcome.result is not None)
    assert [name.rpartition("_")[2] for name in names] == ["rank0.pt.trace.json", "rank1.pt.trace.json"]
    assert not (place / "dynolog").exists()


@pytest.fixture
def loses_patience(monkeypatch):
    """What does not come is given up soon; what is there already takes no longer on a loaded machine."""
    monkeypatch.setattr(recorder, "_STARTS_WITHIN_S", 0.2)
    monkeypatch.setattr(recorder, "_ATTEMPTS", 1)
    monkeypatch.setattr(recorder, "_WRITE_TIMEOUT_S", 5.0)


def test_what_one_rank_lacks_is_its_own(place, tmp_path, loses_patience):
    with fake_job(place) as one, fake_job(place, "no-file") as other:
        captured = _capture_workers([one, other], tmp_path)
    assert [(o.address, o.error is None) for o in captured.outcomes] == [
        (f"pid:{one.pid}", True), (f"pid:{other.pid}", False)]


def _capture_workers(processes, logdir: Path):
    return capture_workers([(f"pid:{p.pid}", None) for p in processes], seconds=0.3, logdir=logdir, force=True)


@pytest.mark.parametrize(("mode", "message", "limit"), [
    ("link", "symbolic link", ""), ("pipe", "a pipe", ""), ("folder", "a folder", ""), ("sparse", "too large", ""),
    ("no-file", "wrote no trace", "_WRITE_TIMEOUT_S"), ("busy", "busy with another recording", "_BUILD_TIMEOUT_S"),
    ("dies", "ended with status 1 while it was being recorded", ""),
    ("aborts", "by SIGABRT .* the likely cause", ""),
    ("unguarded", "nothing guards recordings", ""), ("cycles", "starts again in 12 steps", ""),
    ("profiling", "often takes two to three times", "_BETWEEN_TRIES_S"),
    ("ending", "is exiting", ""), ("ends", "is exiting", ""),
    ("silent", "is not polling for requests", "_POLL_TIMEOUT_S"), ("abstract", "Any user of this node", "")])
def test_what_is_no_trace_is_not_taken(place, tmp_path, loses_patience, monkeypatch, mode, message, limit):
    if limit:  # that passes, however long it is
        monkeypatch.setattr(guard if limit == "_BETWEEN_TRIES_S" else recorder, limit, 0.3)
    with fake_job(place, mode) as process, pytest.raises(GputopError, match=message) as raised:
        _record(process, tmp_path)
    assert raised.value.fix
    assert not list(tmp_path.rglob("*.json")) and not (place / "dynolog").exists()


def test_the_copy_of_a_large_trace_can_be_stopped(place, tmp_path, monkeypatch):
    """Its size is the job's choice. What is not copied stays with the job, as gputop says."""
    monkeypatch.setattr(storage, "_REPORT_PERIOD_S", 0.0)
    stop, reported = threading.Event(), []

    def on_progress(progress: Progress) -> None:
        reported.append(progress.phase)
        if reported.count("saving") == 3:
            stop.set()

    with fake_job(place, "large") as process, pytest.raises(GputopError, match="stopped") as raised:
        _record(process, tmp_path, on_progress=on_progress, stop=stop)
    assert reported.count("saving") == 3
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
    (left,) = place.glob("gputop-trace-*")
    assert left.name in raised.value.fix


def test_a_clock_that_is_set_back_does_not_prolong_the_wait(place, tmp_path, monkeypatch):
    """The start that ranks have in common is a time of day."""
    client = DaemonClient(os.getpid(), os.getpid(), os.geteuid(), PurePosixPath(place), False,
                          read_stat(os.getpid()).start)
    with served(place) as serves:
        take = recorder._Take(client, serves, RecordingOrder(1.0, tmp_path, start_ns=time.time_ns()), ignore,
                              threading.Event(), queue.SimpleQueue(), 0.25, -1)
        take.events.put(daemon.DaemonEvent(os.getpid(), True, round(1000 * time.time())))
        take._step(0.0)
        take._check_written("trace")
        now_s, day_s = time.time(), 86400.0
        monkeypatch.setattr(recorder, "time", SimpleNamespace(
            time=lambda: now_s - day_s, monotonic=lambda: take.begins_s + 60.0))
        with pytest.raises(TraceLost, match="wrote no trace"):
            take._check_written("trace")


@needs_root
def test_a_file_of_another_user_is_not_taken(place, tmp_path):
    (place / "secret").write_text("secret")
    os.chown(place / "secret", USER, -1)
    with fake_job(place, "hard-link") as process, pytest.raises(GputopError, match="another user"):
        _record(process, tmp_path)


def test_who_sends_is_told_by_the_kernel(place, tmp_path):
    with fake_job(place, "other-pids") as process:
        assert _record(process, tmp_path).bytes


def test_a_folder_that_others_can_write_is_refused(place, tmp_path):
    place.chmod(0o777)
    with fake_job(place) as process, pytest.raises(GputopError, match="other users could send requests"):
        _record(process, tmp_path)


def test_another_daemon_is_left_alone(place, tmp_path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as dynolog, fake_job(place) as process:
        dynolog.bind(str(place / "dynolog"))
        with pytest.raises(GputopError, match="another daemon"):
            _record(process, tmp_path)
        assert (place / "dynolog").exists()


def test_the_socket_of_a_killed_gputop_is_replaced(place, tmp_path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as stale:
        stale.bind(str(place / "dynolog"))
    (place / "gputop-trace-0_1.json").write_text("of the recording that it began")
    with fake_job(place) as process:
        assert _record(process, tmp_path).bytes
        assert not (place / "dynolog").exists() and not list(place.glob("gputop-trace-*"))


def test_two_gputops_take_turns(place, tmp_path):
    errors, threads = [], []

    def work(logdir: Path) -> None:
        try:
            assert _record(process, logdir).bytes
        except BaseException as error:  # noqa: BLE001
            errors.append(error)

    with fake_job(place) as process:
        for name in "ab":
            threads.append(threading.Thread(target=work, args=(tmp_path / name,)))
            threads[-1].start()
        for thread in threads:
            thread.join()
    assert errors == []
    assert len(list(tmp_path.rglob("*.json"))) == 2


def test_a_gputop_that_waits_for_another_one_gives_up(place, tmp_path, monkeypatch):
    monkeypatch.setattr(daemon, "_LOCK_TIMEOUT_S", 0.1)
    with fake_job(place) as process, opened(place, process.pid) as held:
        assert held.lock()
        with pytest.raises(GputopError, match="another gputop is using"):
            _record(process, tmp_path)


def test_stop_ends_the_wait_for_the_job(place, tmp_path):
    stop = threading.Event()
    with fake_job(place, "busy") as process, pytest.raises(GputopError, match="stopped before"):
        _record(process, tmp_path, 60.0, lambda _: stop.set(), stop)
    assert not (place / "dynolog").exists()


def test_a_recording_that_has_begun_is_waited_for(place, tmp_path):
    stop = threading.Event()
    with fake_job(place) as process:
        result = _record(process, tmp_path, 0.5, lambda p: p.phase == "recording" and stop.set(), stop)
    assert result.bytes and not result.stopped_early


def test_it_records_from_the_begin_that_the_job_was_told(place, tmp_path, monkeypatch):
    """Stacks and processors are sampled while it records."""
    monkeypatch.setattr(recorder, "_LEAD_MS", 200)
    phases: list[tuple[str, float]] = []
    with fake_job(place) as process:
        _record(process, tmp_path, 0.2, lambda progress: phases.append((progress.phase, progress.elapsed_s)))
    began_s = next(elapsed_s for phase, elapsed_s in phases if phase == "recording")
    assert phases[0][0] == "connecting" and began_s > 0.2 and phases[-1][0] == "saving"


@pytest.mark.parametrize(("mode", "seconds", "reason"), [
    ("bounded", 1.1, "full length, at most "), ("full", 0.1, "the job emits ")])
def test_a_short_capture_has_no_probe(place, tmp_path, mode, seconds, reason):
    with fake_job(place, mode) as process:
        result, plan, cost = capture_with_probe(f"pid:{process.pid}", seconds=1.1, logdir=tmp_path)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [result.path]
    assert plan.chosen_s == result.asked_s == cost.recorded_s == seconds and plan.why.startswith(reason)
    assert plan.probe is None and plan.shapes


def test_a_planned_recording_ends_at_a_number_of_events_too(place, tmp_path, monkeypatch):
    """A job may make many more of them than in its probe."""
    monkeypatch.setattr(safe_capture, "most_events", lambda *_: 0)
    with fake_job(place, "full") as process:
        _, plan, cost = capture_with_probe(f"pid:{process.pid}", seconds=1.1, logdir=tmp_path)
    assert plan.probe.seconds == plan.chosen_s == cost.recorded_s == 0.1
    assert "after 0.1 of 1.1 s, because the job emitted more events than in the probe" in plan.ended


def test_a_request_that_kineto_drops_is_made_again(place, tmp_path, monkeypatch):
    """As it does on an overloaded node: "start timestamp is in the past"."""
    monkeypatch.setattr(recorder, "_STARTS_WITHIN_S", 0.1)
    with fake_job(place, "drops") as process:
        assert _record(process, tmp_path).bytes
        with pytest.raises(GputopError, match="wrote no trace"):
            monkeypatch.setattr(recorder, "_ATTEMPTS", 2)
            monkeypatch.setattr(recorder, "_WRITE_TIMEOUT_S", 0.3)
            with fake_job(place, "drops") as other:
                _record(other, tmp_path)


def test_what_a_killed_gputop_left_is_removed_once_kineto_has_written_it(place, tmp_path):
    """A file that kineto cannot rename any more is an error in the job's stderr."""
    for name, age_s in (("gputop-trace-0_1.json.tmp", 0.0), ("gputop-trace-1_1.json.tmp", 3600.0),
                        ("gputop-trace-2_1.json", 0.0)):
        (place / name).touch()
        os.utime(place / name, (time.time() - age_s,) * 2)
    with fake_job(place) as process:
        _record(process, tmp_path)
    assert [path.name for path in place.glob("gputop-trace-*")] == ["gputop-trace-0_1.json.tmp"]


def test_a_job_that_ended_before_is_told(place, tmp_path):
    with fake_job(place) as process:
        pass
    with pytest.raises(GputopError, match="is waiting for gputop"):
        _record(process, tmp_path)


def test_a_job_is_listed_and_one_that_is_unsafe_named_as_such(place):
    with (fake_job(place, RANK="3") as process, fake_job(place, "abstract") as unsafe,
          fake_job(place, "unguarded") as unguarded):
        now = jobs.find_jobs()
        assert unguarded.pid not in [job.pid for job in now.servers], "it is made ready first"
        (job,) = [job for job in now.servers if job.pid == process.pid]
        assert unsafe.pid in now.unprotected and process.pid not in now.unprotected
    assert job.address == f"pid:{process.pid}" and job.about().startswith("PyTorch, rank 3: ")


def test_a_trace_says_when_it_was_recorded(tmp_path):
    path = tmp_path / "t.json"
    path.write_text(trace(1.0))
    base = 1790857026000000000
    assert KinetoRecorder(1).window_ns(path) == (base + 10**15, base + 10**15 + round(990010e3))
    for hostile in ("", "{}", '"baseTimeNanoseconds": 9, "ts": 5'):
        path.write_text(hostile)
        assert KinetoRecorder(1).window_ns(path) is None


def test_events_are_counted_wherever_the_pieces_end(tmp_path, monkeypatch):
    path = tmp_path / "t.json"
    for seconds, device, size, counts in (
            (1.0, False, 1 << 20, (200, 0)), (1.0, True, 1 << 20, (100, 100)), (0.1, False, 200, (20, 0)),
            (0.1, False, 333, (20, 0)), (0.1, False, 511, (20, 0))):
        path.write_text(trace(seconds, device))
        monkeypatch.setattr(recorder, "_SCAN_BYTES", size)
        with path.open("rb") as file:
            assert recorder.count_events(file) == counts

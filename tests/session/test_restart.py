"""The daily loop on real jobs: capture, end it, start it again, capture; and two jobs, of which one ends."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gputop.profiler import discovery
from gputop.profiler.capture.records import CaptureRecord, Server
from gputop.profiler.kineto import jobs
from gputop.session.capture.saved_captures import saved_captures
from gputop.session.options import Options
from gputop.session.session import Session
from tests.fakes import StillSource, node_sample
from tests.session.watched import Watched
from tests.tf_job import TfJob, start_tf_job
from tests.waiting import until

pytestmark = pytest.mark.tensorflow


class Loop:
    """A session that sees the jobs of this test only; other tests run theirs meanwhile."""

    def __init__(self, logdir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.pids: list[int] = []
        find = discovery.find_servers
        monkeypatch.setattr(discovery, "find_servers", lambda _pids: find(self.pids))
        monkeypatch.setattr(jobs, "find_jobs", lambda: jobs.Jobs((), ()))
        self.session = Session(StillSource(), Options(logdir=logdir, capture_s=1.0))  # type: ignore[arg-type]
        self.watched = Watched(self.session)

    def found(self, job: TfJob) -> Server:
        """Search until the job's server answers."""
        def server() -> Server | None:
            self.session.watch.update()
            return next((server for server in self.session.watch.servers if server.pid == job.pid), None)

        return until(server, "the job's server")

    def captured(self) -> CaptureRecord:
        """The record of a capture that needs no question."""
        assert self.session.start_capture() is None
        control = self.session.control
        self.watched.until(lambda: control.status is not None and not control.status.running)
        status, record = self.session.control.status, self.session.results.last_capture
        assert status is not None and status.phase == "done" and record is not None, status
        return record

    def see_end(self, end: Callable[[], None]) -> None:
        end()
        self.session.sample_updated(node_sample(1), "before_backfill")


@pytest.fixture(scope="module")
def fast_job() -> Iterator[TfJob]:
    """A job that trains only when it is woken. The last of the tests kills it."""
    with start_tf_job(threads=1) as job:
        job.pause()
        yield job


def test_of_two_jobs_the_other_is_not_captured_in_the_place_of_the_one_that_ended(
        fast_job: TfJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop(tmp_path, monkeypatch)
    session = loop.session
    other = fast_job
    with start_tf_job("small layers", threads=1) as job:
        job.pause()
        loop.pids += [job.pid, other.pid]
        loop.found(job)
        loop.found(other)
        question = session.start_capture()
        assert question is not None and question.kind == "job"
        assert {server.pid for server in question.servers} == {job.pid, other.pid}
        session.watch.choose_job(loop.found(job))
        assert session.watch.servers[0].pid == job.pid
        loop.see_end(job.kill)
        session.watch.update()
        question = session.start_capture()
        assert question is not None and question.kind == "job" and question.details.endswith("has ended.")
        assert [server.pid for server in question.servers] == [other.pid] and session.control.status is None


def test_a_job_that_is_started_again_is_captured_and_compared_without_a_question(
        fast_job: TfJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop(tmp_path, monkeypatch)
    session = loop.session
    job = fast_job
    port = int(job.address.rpartition(":")[2])
    loop.pids.append(job.pid)
    server = loop.found(job)
    assert server.user and server.started_s is not None and server.started_s <= time.time()
    with job.awake():
        before = loop.captured()
    assert (before.pid, before.started_s, before.uncaptured) == (job.pid, server.started_s, "")
    session.results.baseline = before
    assert not session.captured_before_restart
    loop.see_end(job.kill)
    assert session.watch.ended_server is not None and session.watch.ended_server.pid == job.pid
    with start_tf_job("slow input", threads=1, port=port) as again:  # another option of the same script, as a change is
        loop.pids[:] = [again.pid]
        server = loop.found(again)
        assert session.watch.ended_server is None and session.restarted_s == server.started_s
        assert session.captured_before_restart, "what was captured is of the job before"
        after = loop.captured()
        again.pause()
        assert after.pid == again.pid and not session.captured_before_restart
        assert {one.record.pid for one in saved_captures(tmp_path)} == {job.pid, again.pid}
        assert session.results.baseline is before
        assert [one.path for one in session.results.captures] == [before.path, after.path]

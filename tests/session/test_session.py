"""The session over a source of its own threads: samples, servers, captures and how each fails."""

from __future__ import annotations

import contextlib
import os
import subprocess
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from gputop.core.errors import GputopError, NoDataError
from gputop.profiler import discovery
from gputop.profiler.capture.records import CaptureRecord, Server, usable
from gputop.profiler.capture.request import CaptureQuestion, CaptureRequest, answered, require_no_question
from gputop.profiler.kineto import jobs as kineto_jobs
from gputop.session.capture import capture_control, server_watch
from gputop.session.capture.captures import FoundServers, choose_servers, find_servers, server_question
from gputop.session.session import Options, Session
from gputop.sources.simulated import SimulatedSource
from gputop.tui.monitor import messages
from tests.fakes import StillSession, StillSource, node_sample
from tests.records import replace
from tests.session.watched import Watched

REQUEST = CaptureRequest(1.0, Path("logs"))


@contextlib.contextmanager
def simulated(logdir: Path, **options: object) -> Iterator[tuple[Session, Watched]]:
    """A session of a simulated node that has found a server; closed at the end of the block."""
    session = Session(SimulatedSource("gpu0-oversubscribed"), Options(interval_s=0.5, logdir=logdir, **options))
    watched = Watched(session)
    session.start()
    try:
        watched.until(lambda: session.feed.sample is not None and session.watch.servers)
        yield session, watched
    finally:
        session.close()


def test_a_session_goes_from_samples_to_a_named_cause(tmp_path: Path) -> None:
    with simulated(tmp_path, capture_s=2.0) as (session, watched):
        phases: list[str] = []
        session.listen(lambda change: phases.append(session.control.status.phase) if session.control.status else None)
        session.start_capture()
        with pytest.raises(GputopError, match="a capture is already running"):
            session.start_capture()
        status = watched.captured()
        assert status.phase == "done", status
        assert {"recording", "analyzing", "done"} <= set(phases)
        record = session.results.last_capture
        assert record is not None and record.path.is_file() and record.step_s is not None
        findings = session.results.findings
        assert findings[0].id == "gpu0_oversubscribed" and findings[0].severity == "high"
        assert [f.id for f in findings].count("gpu0_oversubscribed") == 1, "live and trace are one entry"


def test_a_stopped_capture_keeps_its_data(tmp_path: Path, analysis_in_this_process: None) -> None:
    with simulated(tmp_path, capture_s=60.0) as (session, watched):
        session.start_capture()
        watched.until(lambda: session.control.status is not None and session.control.status.elapsed_s > 1.0)
        assert session.control.stop_capture()
        status = watched.captured()
        assert status.phase == "done", status
        assert session.results.last_capture is not None and session.results.last_capture.took_s < 60
        assert not session.control.stop_capture()


def test_a_logdir_that_cannot_be_written_fails_the_capture_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with simulated(tmp_path / "file" / "sub") as (session, watched):
        session.start_capture()
        status = watched.captured()
        assert status.phase == "failed" and "file" in status.message and status.fix
        before = session.feed.sample
        watched.until(lambda: session.feed.sample is not before)


def test_a_source_that_does_not_open_is_the_session_s_failure() -> None:
    class Closed(StillSource):
        def open(self) -> None:
            raise NoDataError("no NVIDIA driver", "gputop --demo")

    session = Session(Closed())
    watched = Watched(session)
    session.start()
    watched.until(lambda: session.failure is not None)
    assert session.failure is not None and session.failure.exit_code == 3
    session.close()


def test_the_backfill_enters_the_history_and_no_rule_runs_on_it() -> None:
    session = StillSession(ticks=0)
    changes: list[str] = []
    session.listen(changes.append)
    session.feed.clock = lambda: session.started_s + 1000
    session.advance(10)
    assert session.feed.history is not None and session.feed.history.newest_s is not None
    assert changes == []


def test_history_begins_with_what_the_source_knows_of_the_time_before() -> None:
    session = StillSession(ticks=0)
    first, second, *backfill = (node_sample(tick) for tick in (10, 11, 7, 8, 9, 12))
    session.feed.clock = lambda: first.time_s
    session.feed._backfill_expected = True
    changes: list[str] = []
    session.listen(changes.append)
    session.feed.on_sample(first)
    session.feed.on_sample(second)  # the source is slow to tell
    assert session.feed.sample is second and session.feed.history is None and changes == ["sample"] * 2
    session.feed.on_backfill(backfill)
    assert session.feed.sample is second and session.feed.history is not None
    assert session.feed.history.newest_s == second.time_s  # a sample later than the first is no backfill
    lane = session.feed.history.lane(second.gpus[0].info.uuid, "sm_active", end_s=second.time_s + 1, slice_s=1.0,
                                     slices=6)
    assert [int(n) for n in lane.count] == [0, 1, 1, 1, 1, 1]
    assert changes == ["sample"] * 3


def test_asked_for_servers_come_first_and_broken_ones_say_why() -> None:
    servers, *_ = find_servers(["nonsense:port"], {"127.0.0.1:6009": "simulated"}, discover=False)
    assert [s.problem is None for s in servers] == [False, True]
    with pytest.raises(NoDataError, match="nonsense"):
        choose_servers(servers)  # another job than the one asked for is left alone
    assert choose_servers(servers[1:])[0].address == "127.0.0.1:6009"
    servers, *_ = find_servers(["127.0.0.1:6009"], {"127.0.0.1:6009": "own"}, discover=False)
    assert servers == (Server("127.0.0.1:6009", "own", asked=True),)


def test_a_named_pytorch_process_is_known_as_one_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its GPUs are sampled, and its job is named, as if it had been found."""
    servers = tuple(discovery.ProfilerServer(f"pid:{pid}", pid, "bob", f"python {pid}.py", "PyTorch", "2.13.0")
                    for pid in (7, 8))
    monkeypatch.setattr(kineto_jobs, "find_jobs", lambda: kineto_jobs.Jobs(servers, ()))
    (server,) = find_servers(["pid:7"], {}, discover=False).servers
    assert (server.pid, server.asked) == (7, True) and "7.py" in server.description


def test_no_server_to_choose_says_how_to_start_one() -> None:
    with pytest.raises(NoDataError, match="no profiler server found") as caught:
        choose_servers([])
    assert "server.start(6009)" in caught.value.fix
    with pytest.raises(NoDataError, match="connection refused"):
        choose_servers([Server("127.0.0.1:1", problem="connection refused")])


def test_a_record_without_an_analysis_has_no_findings() -> None:
    record = CaptureRecord("a:1", Path("x"), 0.0, 1.0, 1.0)
    assert record.findings == () and record.step_s is None


def test_a_fault_of_gputop_ends_the_capture_and_not_the_session(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object, **_: object) -> CaptureRecord:
        raise PermissionError("no way")

    monkeypatch.setattr("gputop.session.capture.captures.capture_and_analyze", broken)
    session = StillSession()
    session.watch.servers = (Server("127.0.0.1:6009"),)
    watched = Watched(session)
    for _ in range(2):  # the second shows that another capture is possible
        session.start_capture()
        assert "no way" in watched.captured().message


def test_a_fault_of_the_discovery_of_servers_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object) -> None:
        raise UnicodeError("label too long")

    monkeypatch.setattr("gputop.session.capture.server_watch.find_servers", broken)
    session = StillSession()
    session.watch.update()
    assert session.watch.servers == () and "label too long" in session.watch.discovery_notes[0]


def test_several_servers_are_attached_at_once() -> None:
    session = StillSession(1)
    assert session.watch.attach("localhost:6009, node[1-2]:7") == "127.0.0.1:6009"
    session.watch.attach("node1:7")
    assert session.watch.attached == ["127.0.0.1:6009", "node1:7", "node2:7"]
    for nothing in (" ", ","):
        with pytest.raises(GputopError, match="not an address"):
            session.watch.attach(nothing)


def test_what_servers_are_called_hides_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    session = StillSession()
    found = (Server("127.0.0.1:6009", "python train.py --password hunter2", 1),)
    monkeypatch.setattr("gputop.session.capture.server_watch.find_servers", lambda *_: FoundServers(found))
    session.watch.update()
    assert session.watch.servers[0].description == "python train.py --password ***"


class TestServersOfOtherUsers:
    """Root beside a user's job: nothing is captured that nobody has named or agreed to."""

    BOB = Server("127.0.0.1:6009", "python train.py", 7, owner="bob")

    def test_only_a_named_one_is_captured_from(self) -> None:
        assert choose_servers([self.BOB]) == (self.BOB,)
        question = server_question([self.BOB], REQUEST)
        assert question is not None and question.servers == (self.BOB,)
        assert "belongs to user bob" in question.problem and "--attach 127.0.0.1:6009" in question.fix
        with pytest.raises(GputopError, match="belongs to user bob"):
            require_no_question(question)
        named = replace(self.BOB, asked=True)
        assert choose_servers([named]) == (named,) and server_question([named], REQUEST) is None

    def test_one_of_gputop_s_own_user_comes_first(self) -> None:
        own = Server("127.0.0.1:6010")
        assert choose_servers([self.BOB, own]) == (own,) and server_question([own], REQUEST) is None
        down = replace(own, problem="nobody there")
        assert server_question(choose_servers([self.BOB, down]), REQUEST) is not None

    def test_the_answer_counts_until_the_end_but_not_for_a_third_user(self, monkeypatch: pytest.MonkeyPatch) -> None:
        session = StillSession()
        found = [self.BOB]
        monkeypatch.setattr("gputop.session.capture.server_watch.find_servers", lambda *_: FoundServers(tuple(found)))
        session.watch.update()
        begun: list[Server] = []
        monkeypatch.setattr(session.control, "_begin_capture", lambda servers, *_: begun.extend(servers))
        question = session.start_capture()
        assert question is not None and question.kind == "other user" and not begun
        assert session.start_capture(answered(question, "y")) is None and len(begun) == 1
        session.watch.update()
        assert session.start_capture() is None and len(begun) == 2
        found[:] = [replace(self.BOB, owner="eve")]
        session.watch.update()
        question = session.start_capture()
        assert question is not None and "eve" in question.sentence and len(begun) == 2
        with pytest.raises(GputopError, match="belongs to user eve"):
            session.start_capture(structs.replace(session.control.request(), reason="GPU 0 dipped"))

    def test_discovery_marks_them(self, monkeypatch: pytest.MonkeyPatch) -> None:
        server = discovery.ProfilerServer("127.0.0.1:6009", 7, "bob", "python train.py", uid=os.geteuid() + 1)
        monkeypatch.setattr(discovery, "find_servers", lambda _pids: discovery.Discovery((server,)))
        monkeypatch.setattr(kineto_jobs, "find_jobs", lambda: kineto_jobs.Jobs((), ()))  # whatever runs here
        assert [s.owner for s in find_servers((), {}, True)[0]] == ["bob"]
        (named,) = find_servers(("127.0.0.1:6009",), {}, True)[0]
        assert named.asked and choose_servers([named]) == (named,)


def test_of_many_workers_a_few_are_proposed_and_all_are_possible(monkeypatch: pytest.MonkeyPatch) -> None:
    session = StillSession()
    addresses = [f"n{number}:6009" for number in range(9)]
    begun: list[tuple[list[str], tuple[str, ...]]] = []
    monkeypatch.setattr(session.control, "_begin_capture", lambda servers, request: begun.append(
        ([s.address for s in servers], request.notices)))
    session.watch.servers_known = True
    session.watch.servers = tuple(Server(address, asked=True) for address in addresses)
    question = session.start_capture()
    assert question is not None and question.kind == "workers" and "there are 9 workers" in question.problem
    session.start_capture(answered(question, "few"))
    session.start_capture(answered(question, "all"))
    session.start_capture(structs.replace(session.control.request(), reason="GPU 0 dipped"))  # there is nobody to ask
    session.watch.servers = session.watch.servers[:8]
    session.start_capture()
    few = [addresses[0], addresses[4], addresses[8]]
    assert [captured for captured, _ in begun] == [few, addresses, few, addresses[:8]]
    assert [bool(notices) for _, notices in begun] == [True, False, True, False]
    first, *others = session.watch.servers
    session.watch.servers = (replace(first, problem="down"), *others)
    with pytest.raises(NoDataError, match="is responding"):
        session.start_capture(structs.replace(session.control.request(), workers=frozenset(addresses[:1])))


@pytest.mark.parametrize("reason", ["", "GPU 0 dipped"])
def test_a_capture_that_may_end_the_job_waits_for_an_answer(monkeypatch: pytest.MonkeyPatch, reason: str) -> None:
    session = StillSession()
    watched, taken = Watched(session), list[list[str]]()

    def capture(servers: Sequence[Server], request: CaptureRequest, *_: object) -> CaptureRecord:
        taken.append([server.address for server in servers])
        raise GputopError("captured", "")

    monkeypatch.setattr(capture_control.captures, "capture_and_analyze", capture)
    monkeypatch.setattr("gputop.profiler.discovery.crash_risk", lambda _: "it was seen to")
    session.watch.servers_known = True
    down = Server("c:1", problem="down", asked=True)
    session.watch.servers = (Server("a:1", asked=True), Server("b:1", asked=True), down)
    request = structs.replace(session.control.request(force=True), reason=reason, workers=frozenset(("a:1", "b:1")),
                              notices=("why these",))
    session.start_capture(request)
    if reason:  # there is nobody to ask
        watched.until(lambda: session.control.status is not None and session.control.status.phase == "failed")
        status = session.control.status
        assert status is not None and status.message == "a capture may end the job: it was seen to"
        assert session.control.take_question() is None and not taken
        return
    watched.until(lambda: session.control.status is None)
    question = session.control.take_question()
    assert question is not None and (question.kind, question.details) == ("risk", "it was seen to") and not taken
    assert answered(question, "y") == structs.replace(request, accept_risk=True)
    session.start_capture(answered(question, "y"))
    watched.until(lambda: session.control.status is not None and session.control.status.message == "captured")
    assert taken == [["a:1", "b:1"]]


class Jobs:
    """A session that finds what it is told to; captures are noted, and so are questions."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.session = session = StillSession()
        self.begun: list[str] = []
        self._patch = monkeypatch
        monkeypatch.setattr(session.control, "_begin_capture",
                            lambda servers, *_: self.begun.append(servers[0].address))

    def search(self, *found: Server) -> None:
        self._patch.setattr(server_watch, "find_servers", lambda *_: FoundServers(found))
        self.session.watch.update()

    def capture(self, request: CaptureRequest | None = None) -> CaptureQuestion | None:
        return self.session.start_capture(request)

    def choose(self, key: str) -> CaptureQuestion | None:
        question = self.capture()
        assert question is not None
        return self.capture(answered(question, key))


@pytest.mark.parametrize("chosen", [True, False])
def test_a_job_that_has_ended_is_known_with_the_next_sample(chosen: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not only with the next search for servers, up to ten seconds later. Of one that nobody chose and that is not on
    the GPUs nothing is told."""
    jobs, job = Jobs(monkeypatch), subprocess.Popen(["sleep", "600"])
    session, server = jobs.session, Server("127.0.0.1:6009", "train.py", job.pid)
    jobs.search(server)
    if chosen:
        session.watch.choose_job(server)
    session.advance()
    assert session.watch.servers == (server,) and session.watch.ended_server is None
    job.kill()
    os.waitid(os.P_PID, job.pid, os.WEXITED | os.WNOWAIT)  # ended, and its parent has yet to take notice
    session.advance()
    assert session.watch.servers == () and session.watch.ended_server == (server if chosen else None)
    assert session.watch._search_now.is_set()
    job.wait()
    again = Server("127.0.0.1:6010", "train.py", os.getpid())
    jobs.search(again)
    assert session.watch.ended_server is None and session.watch.servers == (again,), "it was started again"
    assert (session.watch.job.restarted == again) is chosen


def test_the_end_of_the_job_on_the_gpus_is_told_until_another_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs, job = Jobs(monkeypatch), subprocess.Popen(["sleep", "600"])
    session, sample = jobs.session, node_sample(1)
    held = replace(sample.processes[0], pid=job.pid)
    session.control.update_node(replace(session.watched_node, sample=replace(sample, processes=(held,))))
    on_gpus, other = Server("127.0.0.1:2", "train.py", job.pid), Server("127.0.0.1:1", "eval.py", os.getpid())
    jobs.search(other, on_gpus)
    assert session.watch.servers == (on_gpus, other), "the line of the job shows the job on the GPUs"
    job.kill()
    job.wait()
    session.watch.drop_ended()
    assert session.watch.ended_server == on_gpus and session.watch.servers == (other,)
    question = session.watch.question(session.control.request())
    assert question is not None and question.servers == (other,), "the line of the job still shows the one that ended"
    jobs.search(other)
    assert session.watch.ended_server is None, "nobody chose it"


def test_the_end_of_a_named_job_does_not_make_way_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs, job = Jobs(monkeypatch), subprocess.Popen(["sleep", "600"])
    session, other = jobs.session, Server("127.0.0.1:2", "eval.py", os.getpid())
    named = Server("127.0.0.1:1", "train.py", job.pid, asked=True)
    jobs.search(named, other)
    job.kill()
    job.wait()
    session.advance()
    assert session.watch.ended_server == named and usable(session.watch.servers) == ()
    jobs.search(replace(named, problem="nothing listens there", pid=None), other)
    assert session.watch.ended_server == named and usable(session.watch.servers) == ()


def test_which_of_several_jobs_is_meant_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = Jobs(monkeypatch)
    train, worker, evaluate = (Server("127.0.0.1:2", "train.py", 8), Server("127.0.0.1:3", "train.py", 9),
                               Server("127.0.0.1:4", "eval.py", 10))
    jobs.search(train, worker, evaluate)
    question = jobs.capture()
    assert question is not None and question.servers == (train, evaluate) and not jobs.begun, (
        "two workers of one command are one job")
    jobs.capture(structs.replace(jobs.session.control.request(), reason="a dip"))
    assert jobs.begun == [train.address], "the auto-capture has nobody to ask"
    jobs.capture(answered(question, evaluate.address))
    assert jobs.session.watch.servers[0] == evaluate, "the line of the job shows it"
    jobs.search(Server("127.0.0.1:1", "new.py", 11), train, worker, evaluate)
    jobs.capture()
    assert jobs.begun[1:] == [evaluate.address] * 2, "also when the search finds another one first"


def test_one_job_that_was_captured_stays_the_one(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs, train = Jobs(monkeypatch), Server("127.0.0.1:2", "train.py", 8)
    jobs.search(train)
    jobs.capture()
    jobs.search(Server("127.0.0.1:1", "new.py", 11), train)
    jobs.capture()
    assert jobs.begun == ["127.0.0.1:2"] * 2


TRAIN = Server("127.0.0.1:1", "TensorFlow 2.21.0: python /home/ana/train.py --lr 1", 700001, user="ana")


@pytest.mark.parametrize("again", [
    {"pid": 700009},  # the same address
    {"pid": 700009, "address": "127.0.0.1:9"},  # the same command
    {"pid": 700009, "description": "python /home/ana/train.py --lr 2"},  # other options, as one tries a change
])
def test_a_restarted_job_is_gone_on_with(again: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    jobs, beside = Jobs(monkeypatch), Server("127.0.0.1:2", "python eval.py", 700002, user="ana")
    jobs.search(TRAIN, beside)
    assert jobs.choose(TRAIN.address) is None
    jobs.search(beside)
    assert jobs.session.restarted_s is None
    restarted = replace(TRAIN, started_s=1e9, **again)
    jobs.search(beside, restarted)
    assert jobs.session.watch.servers[0] == restarted and jobs.session.restarted_s == 1e9
    assert jobs.capture() is None and jobs.begun == [TRAIN.address, restarted.address]


@pytest.mark.parametrize("other", [
    {"owner": "eve", "user": "eve"},  # who has taken the port of the job that has ended
    {"user": "eve"},
    {"description": "python /home/eve/train.py --lr 1"},
    {"description": "python /home/ana/eval.py"},
    {"address": "127.0.0.1:9", "description": "python /home/ana/train.py --lr 2"},
    {"description": ""},
])
def test_another_user_or_script_is_asked_about(other: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = Jobs(monkeypatch)
    jobs.search(TRAIN)
    assert jobs.capture() is None and jobs.begun == [TRAIN.address]
    stranger = replace(TRAIN, pid=700009, started_s=1e9, **other)
    jobs.search(stranger)
    question = jobs.capture()
    assert question is not None and question.kind == "job" and question.servers == (stranger,)
    assert question.details == "The job at 127.0.0.1:1 has ended." and len(jobs.begun) == 1
    assert jobs.session.restarted_s is None
    with pytest.raises(GputopError, match="has ended"):
        jobs.capture(structs.replace(REQUEST, reason="GPU 0 dipped"))
    question = jobs.capture(answered(question, stranger.address))
    if stranger.owner:  # it is chosen out of a list, and its user is named before it is captured
        assert question is not None and question.kind == "other user" and "eve" in question.sentence
        assert len(jobs.begun) == 1
        assert jobs.capture(answered(question, "y")) is None
    assert jobs.begun == [TRAIN.address, stranger.address]


def test_a_worker_that_ran_beside_is_no_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs, beside = Jobs(monkeypatch), replace(TRAIN, address="127.0.0.1:2", pid=700002)
    jobs.search(TRAIN, beside)
    assert jobs.capture() is None
    jobs.search(beside)
    question = jobs.capture()
    assert question is not None and question.kind == "job" and question.servers == (beside,)


@pytest.mark.parametrize("taken", [
    replace(TRAIN, asked=True, pid=700009, owner="eve", user="eve"),
    replace(TRAIN, asked=True, pid=700009, description="python /home/ana/eval.py"),
    replace(TRAIN, asked=True, pid=None, user="", description="attached"),  # whose process may not be looked at
])
def test_who_takes_the_port_of_a_named_job_is_asked_about(taken: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = Jobs(monkeypatch)
    jobs.search(replace(TRAIN, asked=True))
    assert jobs.capture() is None and len(jobs.begun) == 1
    jobs.search(replace(TRAIN, asked=True, pid=700005, started_s=1e9))
    assert jobs.capture() is None and len(jobs.begun) == 2 and jobs.session.restarted_s == 1e9, "the job itself"
    jobs.search(taken)
    question = jobs.capture()
    assert question is not None and question.kind == "other job" and len(jobs.begun) == 2
    assert ("user eve" in question.details) is (taken.owner == "eve")
    assert ("cannot see its owner" in question.details) is (taken.pid is None)
    with pytest.raises(GputopError, match="another one now answers there"):
        jobs.capture(structs.replace(REQUEST, reason="GPU 0 dipped"))
    assert jobs.capture(answered(question, "y")) is None and len(jobs.begun) == 3
    jobs.search(taken)
    assert jobs.capture() is None and len(jobs.begun) == 4, "the answer counts"
    jobs.search(replace(TRAIN, asked=True))
    assert (jobs.capture() is None) is (taken.pid is None)


def test_no_to_another_user_s_job_leaves_the_list(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = Jobs(monkeypatch)
    bob, eve = (replace(TRAIN, address=f"127.0.0.1:{port}", pid=700000 + port, owner=name, user=name)
                for port, name in ((3, "bob"), (4, "eve")))
    jobs.search(bob, eve)
    question = jobs.choose(eve.address)
    assert question is not None and "eve" in question.sentence and not jobs.begun
    question = jobs.capture()
    assert question is not None and question.kind == "job" and set(question.servers) == {bob, eve}


def test_the_only_job_on_the_gpus_is_meant(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = Jobs(monkeypatch)
    sample = node_sample(1)
    on_gpus = replace(TRAIN, address="127.0.0.1:7", pid=sample.processes[0].pid, description="python big.py")
    jobs.session.control.update_node(replace(jobs.session.watched_node, sample=sample))
    jobs.search(TRAIN, on_gpus)
    assert jobs.capture() is None and jobs.begun == [on_gpus.address] and jobs.session.watch.servers[0] == on_gpus
    jobs.search(TRAIN, on_gpus, replace(TRAIN, address="127.0.0.1:8", pid=700008, description="python c.py"))
    assert jobs.session.watch.job.chosen is False


def test_an_address_at_which_nothing_answers_does_not_cost_the_job_that_does(monkeypatch: pytest.MonkeyPatch) -> None:
    session = StillSession()
    answers = {"127.0.0.1:1"}

    def find(attached: Sequence[str], *_: object) -> FoundServers:
        named = tuple(Server(a, "train.py", problem=None if a in answers else "nothing listens", asked=True)
                      for a in attached)
        return FoundServers((*named, TRAIN) if TRAIN.address not in attached else named)

    monkeypatch.setattr(server_watch, "find_servers", find)
    session.watch.update()
    session.watch.attach("localhost:5")
    session.watch.update()
    assert usable(session.watch.servers) == (TRAIN,) and session.watch.attached == []
    (typo,) = (s for s in session.watch.servers if s.address == "127.0.0.1:5")
    assert messages.attached(typo, session.watch.servers) == (
        "Could not attach to 127.0.0.1:5: nothing listens. Still attached to 127.0.0.1:1.")
    session.watch.update()
    assert session.watch.servers == (TRAIN,)
    session.watch.attach("localhost:1")
    session.watch.attach("localhost:6")
    session.watch.update()
    assert [s.address for s in usable(session.watch.servers)] == ["127.0.0.1:1"] and session.watch.attached == [
        "127.0.0.1:1"], "one that was named stays, too"
    answers.add("127.0.0.1:7")
    session.watch.attach("localhost:7")
    session.watch.update()
    assert [s.address for s in usable(session.watch.servers)] == ["127.0.0.1:1", "127.0.0.1:7"]


def test_a_listener_that_fails_ends_neither_the_others_nor_the_sampling(monkeypatch: pytest.MonkeyPatch) -> None:
    faults: list[BaseException | None] = []
    monkeypatch.setattr(threading, "excepthook", lambda fault: faults.append(fault.exc_value))
    session = Session(StillSource())
    heard: list[str] = []

    def fails(change: str) -> None:
        raise OSError(28, "No space left on device")

    session.listen(fails)
    session.listen(heard.append)
    for tick in (1, 2):
        session.feed.on_sample(node_sample(tick, 1))
    assert heard.count("sample") >= 2
    assert [str(fault) for fault in faults] == ["[Errno 28] No space left on device"] * len(heard)

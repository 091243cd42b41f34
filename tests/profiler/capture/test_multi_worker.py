"""Several servers captured at once, among them some that fail, hold up or have another clock."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import threading
from pathlib import Path

import pytest

from gputop.core.codec import to_document
from gputop.core.errors import GputopError, NoDataError
from gputop.profiler.capture import job_memory, multi_worker, safe_capture
from gputop.profiler.capture.facts import facts_of
from gputop.profiler.capture.multi_worker import each_once, per_worker, shortest_plan, trace_names
from gputop.profiler.capture.outcomes import MultiWorkerCapture, Outcome
from gputop.profiler.capture.plan import FreeResources, MemoryLimits, Plan
from gputop.profiler.capture.records import Server
from gputop.profiler.capture.request import CaptureRequest, answered, require_no_question
from gputop.session.capture.captures import CaptureRun, capture_and_analyze, risk_question
from gputop.trace.readers.clock_file import read_clocks
from tests.profiler.capturing import capture_workers, names_below, recorders_of
from tests.profiler.fake_server import BUSY, EMPTY, GONE, FakeProfiler, in_turn, make_xspace, serve
from tests.records import replace

pytestmark = pytest.mark.usefixtures("quick")


@pytest.fixture
def training(monkeypatch):
    """The servers count as training jobs of this machine."""
    monkeypatch.setattr(multi_worker, "is_training", lambda pid: True)


@contextlib.contextmanager
def serving(*profilers: FakeProfiler):
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(serve(p)) for p in profilers]


def addresses(servers) -> list[tuple[str, None]]:
    return [(s.address, None) for s in servers]


def test_one_run_folder_with_a_trace_of_each(logdir):
    with serving(FakeProfiler(), FakeProfiler(), FakeProfiler()) as servers:
        done = capture_workers(addresses(servers), seconds=0.3, logdir=logdir)
    assert [o.error for o in done.outcomes] == [None] * 3 and done.plan.chosen_s == 0.3
    ports = [s.address.rpartition(":")[2] for s in servers]
    assert names_below(logdir) == sorted([*(f"{trace_names(['127.0.0.1:1'])[0]}_{p}.xplane.pb" for p in ports),
                                          "gputop.clocks.json"])
    assert {o.result.path.parent for o in done.outcomes} == {done.run_dir}
    for server in servers:
        assert [r.duration_ms for r in server.requests] == [50, 300]
    assert len({r.session_id for s in servers for r in s.requests[1:]}) == 1


def test_all_workers_start_at_one_moment_by_their_own_clocks(logdir):
    """One clock is an hour ahead, one a day behind: a common Unix time would hold the first one's profiler for long."""
    with serving(*(FakeProfiler(clock_ahead_s=s) for s in (0.0, 3600.0, -86400.0))) as servers:
        done = capture_workers(addresses(servers), seconds=0.2, logdir=logdir)
        reported = [s.windows[1][1] - s.clock_ahead_s for s in servers]
    assert max(reported) - min(reported) < 1.0 and all(s.windows[1][1] > 0 for s in servers)
    clocks = read_clocks(done.run_dir)
    offsets = [clocks[f"{o.name}.xplane.pb"].offset_ns / 1e9 for o in done.outcomes]
    errors = [clocks[f"{o.name}.xplane.pb"].error_ns / 1e9 for o in done.outcomes]
    for offset, error, server in zip(offsets, errors, servers, strict=True):
        assert abs(offset - server.clock_ahead_s) <= error + 1e-6
    ahead = done.outcomes[1]
    assert f"the clock of {ahead.address} differs by {offsets[1]:+.3f} s; gputop corrected for this" in done.notes()
    assert any("started within" in note for note in done.notes())


def test_a_worker_whose_clock_is_unknown_is_not_asked_to_wait(logdir):
    """As where a port of this machine is a tunnel to another."""
    with serving(FakeProfiler(clock_ahead_s=3600.0), FakeProfiler(clock_ahead_s=0.0)) as servers:
        done = capture_workers(addresses(servers), seconds=0.05, logdir=logdir, force=True)
    assert [r.opts.start_timestamp_ns for s in servers for r in s.requests] == [0, 0]
    assert done.start_spread_s is not None


def test_jobs_of_this_machine_share_its_clock(logdir, training):
    with serving(FakeProfiler(clock_ahead_s=0.0), FakeProfiler(clock_ahead_s=0.0)) as servers:
        done = capture_workers(addresses(servers), seconds=0.05, logdir=logdir, force=True)
    (a,), (b,) = (s.requests for s in servers)
    assert a.opts.start_timestamp_ns == b.opts.start_timestamp_ns > 0
    assert all(o.clock.error_ns == 0 for o in done.outcomes)


def test_servers_that_do_not_tell_the_time_are_bounded_by_ours(logdir):
    """As TensorFlow up to 2.15."""
    with serving(FakeProfiler(), FakeProfiler()) as servers:
        done = capture_workers(addresses(servers), seconds=0.05, logdir=logdir, force=True)
    for outcome in done.outcomes:
        assert outcome.clock.began_ns == round(outcome.began_s * 1e9) and outcome.clock.error_ns < 5e9


@pytest.mark.parametrize("shares", [True, False])
def test_servers_that_write_to_their_own_disk(logdir, monkeypatch, shares):
    monkeypatch.setattr("gputop.profiler.xprof.server_disk._shares_files", lambda pid: shares)
    with serving(FakeProfiler(writes_disk=True), FakeProfiler(writes_disk=True)) as servers:
        done = capture_workers(addresses(servers), seconds=0.2, logdir=logdir)
    assert len(list(done.run_dir.glob("*.xplane.pb"))) == 2 and not list(done.run_dir.glob(".*"))


@pytest.mark.parametrize("spoiler", [
    FakeProfiler(refuse=BUSY), FakeProfiler(has_service=False), FakeProfiler(xspace=EMPTY)])
def test_one_that_fails_does_not_spoil_the_rest(logdir, spoiler):
    with serving(spoiler, FakeProfiler(), FakeProfiler()) as servers:
        done = capture_workers(addresses(servers), seconds=0.2, logdir=logdir)
        assert [o.error is None for o in done.outcomes] == [False, True, True]
        assert any(spoiler.address in note for note in done.notes())
    assert len(list(done.run_dir.glob("*.xplane.pb"))) in (2, 3), "an empty trace may be kept beside the others"


def test_a_server_that_is_gone_after_the_probe(logdir):
    with serving(FakeProfiler(on_call=in_turn(make_xspace(), GONE)), FakeProfiler()) as servers:
        done = capture_workers(addresses(servers), seconds=0.2, logdir=logdir)
    assert "the connection was lost" in done.outcomes[0].error.message and done.outcomes[1].result is not None


def test_where_none_works_the_reasons_of_all_are_reported_and_nothing_is_left(logdir):
    with serving(FakeProfiler(has_service=False)) as servers, pytest.raises(GputopError) as caught:
        capture_workers([*addresses(servers), ("127.0.0.1:1", None)], seconds=0.2, logdir=logdir)
    assert "none of the 2 workers" in caught.value.message and "127.0.0.1:1" in caught.value.message
    assert not logdir.exists()
    with serving(*(FakeProfiler(xspace=EMPTY) for _ in range(2))) as servers, \
            pytest.raises(GputopError) as caught:
        capture_workers(addresses(servers), seconds=0.2, logdir=logdir / "empty")
    assert caught.value.exit_code == NoDataError("").exit_code


def test_the_busiest_job_decides_for_all(logdir):
    plans: list[Plan] = []
    with serving(FakeProfiler(xspace=make_xspace(events=100_000)), FakeProfiler()) as servers:
        done = capture_workers(addresses(servers), seconds=0.5, logdir=logdir, on_plan=plans.append)
    assert plans == [replace(done.plan, overview_s=0.3)] and done.plan.chosen_s == 0.2
    assert done.plan.why == f"{servers[0].address}: the job emits 2.0 M events/s"
    assert [s.requests[1].duration_ms for s in servers] == [200, 200]


def test_overviews_of_several_workers_of_different_lengths_are_told():
    of_a, of_b = (Outcome(address, address, result=object(), overview_s=length) for address, length in (
        ("a:1", 8.0), ("b:1", 3.1)))
    chosen = Plan(10.0, 2.0, "of a test", overview_s=3.1)
    assert MultiWorkerCapture(Path(), chosen, (of_a, of_b)).notes() == (
        "gputop watched for rare events for 3.1 to 8 s, depending on the worker",)
    assert MultiWorkerCapture(Path(), chosen, (of_b,)).notes() == ()


def test_stopped_during_the_probes_keeps_the_probes(logdir, monkeypatch):
    monkeypatch.setattr(safe_capture, "PROBE_S", 60.0)
    stop = threading.Event()
    reports = itertools.count(1)
    with serving(FakeProfiler(), FakeProfiler()) as servers:
        done = capture_workers(addresses(servers), seconds=300, logdir=logdir, stop=stop,
                               on_progress=lambda _: next(reports) > 6 and stop.set())
        assert all(len(s.terminated) == 1 for s in servers)
    assert "stopped during the probes" in done.plan.why and len(done.captured) == 2
    assert len(list(done.run_dir.glob("*.xplane.pb"))) == 2


def test_stopped_while_recording_stops_all(logdir):
    stop = threading.Event()
    with serving(FakeProfiler(), FakeProfiler()) as servers:
        done = capture_workers(addresses(servers), seconds=60, logdir=logdir, stop=stop,
                                on_progress=lambda p: p.phase == "recording" and p.elapsed_s > 0.5 and stop.set())
    assert all(o.result.stopped_early for o in done.outcomes)


def test_a_job_that_grows_too_much_ends_it_for_all(logdir, monkeypatch):
    size = iter(range(10**9, 10**12, 10**9))
    monkeypatch.setattr(job_memory, "resident_bytes", lambda pid: next(size))
    monkeypatch.setattr(multi_worker, "memory_limits", lambda *_: MemoryLimits(6e9))
    monkeypatch.setattr(multi_worker, "plan",
                        lambda seconds, probe, *_, **__: Plan(seconds, seconds, "as asked", probe))
    with serving(FakeProfiler(), FakeProfiler()) as servers:
        done = capture_workers(addresses(servers), seconds=60, logdir=logdir)
    assert all(o.result.stopped_early for o in done.outcomes) and done.plan.chosen_s < 60
    assert "the job's memory had grown by" in done.plan.why


def test_the_slowest_worker_is_what_progress_tells(logdir):
    phases: list[str] = []
    with serving(FakeProfiler(), FakeProfiler()) as servers:
        capture_workers(addresses(servers), seconds=0.3, logdir=logdir, on_progress=lambda p: phases.append(p.phase))
    assert phases[0] == "probing" and "recording" in phases


def test_the_room_on_this_node_is_shared():
    assert per_worker(FreeResources(80.0, 10.0, 40.0, None), 4) == FreeResources(20.0, 10.0, 10.0, None)


def test_the_shortest_plan_names_its_worker():
    quiet, busy = Plan(10, 10, "as asked, 1"), Plan(10, 4.1, "the job emits 240 k events/s", notes=("n",))
    assert shortest_plan(10, [("a:1", quiet), ("b:2", busy)]) == Plan(10, 4.1, f"b:2: {busy.why}", notes=("n",))
    assert shortest_plan(10, [("a:1", quiet)]) == quiet and shortest_plan(10, []).chosen_s == 10


def test_names_of_traces_tell_the_workers_apart():
    assert trace_names(["a:1", "b:1"]) == ["a", "b"]
    assert trace_names(["a:1", "a:2", "[::ffff:0:1]:1"]) == ["a_1", "a_2", "::ffff:0:1"]
    here = socket.gethostname()
    assert trace_names(["unix:/run/a b/p.sock", "unix-abstract:p"]) == [f"{here}_run_a_b_p.sock", f"{here}_p"]


def test_few_steps_are_enough(logdir, monkeypatch):
    monkeypatch.setattr("gputop.profiler.capture.safe_capture.step_time", lambda *_: (0.001, True))
    monkeypatch.setattr("gputop.profiler.capture.plan._ENOUGH_S", 0.1)
    monkeypatch.setattr("gputop.profiler.capture.plan._CHEAP_EVENTS", 0)
    with serving(FakeProfiler(xspace=make_xspace(events=100_000))) as servers:
        done = capture_workers(addresses(servers), seconds=0.3, logdir=logdir)
    assert (done.plan.chosen_s, done.plan.enough) == (0.1, True)


def test_a_risk_that_nobody_has_accepted_is_not_taken(logdir, monkeypatch):
    monkeypatch.setattr("gputop.profiler.discovery.crash_risk", lambda pids: "beware")
    request = CaptureRequest(0.05, logdir, force=True)
    question = risk_question([Server("127.0.0.1:1", pid=os.getpid())], request)
    assert question is not None and question.kind == "risk"
    with pytest.raises(GputopError, match="beware"):
        require_no_question(question)
    assert risk_question([Server("127.0.0.1:1", pid=os.getpid())], answered(question, "y")) is None


def test_a_record_over_all_workers(logdir):
    with serving(FakeProfiler(), FakeProfiler()) as servers:
        record = capture_and_analyze(
            [*(Server(s.address, asked=True) for s in servers), Server("gone:1", problem="it sleeps", asked=True)],
            CaptureRequest(0.05, logdir, force=True),
            CaptureRun(threading.Event(), threading.Event(), lambda status: None))
    assert record.address == f"{servers[0].address} and 1 more" and record.path.is_dir()
    assert record.remarks[0] == "not captured: gone:1: it sleeps"
    assert [w["address"] for w in to_document(facts_of(record))["workers"]] == [s.address for s in servers]


def test_two_addresses_with_one_host_name_and_port_have_names_of_their_own():
    names = trace_names(["127.0.0.1:6009", "127.0.0.2:6009", "127.0.0.3:6009", "other:6009"])
    assert len(set(names)) == 4 and names[1] == f"{names[0]}_2" and names[2] == f"{names[0]}_3"


def test_one_server_by_two_addresses_is_captured_once(logdir):
    with serving(FakeProfiler()) as (server,):
        port = server.address.rpartition(":")[2]
        found = each_once(recorders_of([(f"127.0.0.1:{port}", None), (f"localhost:{port}", None), ("other:1", None)]))
        assert [(recorder.address, recorder.pid) for recorder in found] == [
            (f"127.0.0.1:{port}", os.getpid()), ("other:1", None)]
        done = capture_workers([(f"127.0.0.1:{port}", None), (f"localhost:{port}", None)], seconds=0.1, logdir=logdir)
    assert len(done.outcomes) == 1 and done.outcomes[0].error is None

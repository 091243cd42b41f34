"""What is said of a capture: why so long, and what it cost the job."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import pytest

from gputop.core.codec import to_document
from gputop.profiler.capture import job_memory
from gputop.profiler.capture.facts import facts_of
from gputop.profiler.capture.job_memory import Cost
from gputop.profiler.capture.plan import Plan, Probe
from gputop.profiler.capture.records import CaptureRecord, CaptureStatus, Server
from gputop.profiler.capture.request import CaptureRequest
from gputop.session.capture import captures
from gputop.session.capture.captures import CaptureRun, FoundServers, capture_and_analyze, find_named_servers, left_out
from tests.analyses import make_analysis
from tests.profiler.fake_server import FakeProfiler, make_xspace, serve
from tests.records import replace

SHORT = Plan(10.0, 4.1, "the job emits 240 k events/s", Probe(0.5, 0.8, 2_000_000, 120_000, 0), ("a note",))


def record(durations_s: list[float] | None = None, *, plan: Plan | None = SHORT) -> CaptureRecord:
    steps = {"count": len(durations_s), "durations_s": durations_s, "median_s": 1.0,
             "mean_s": 1.0} if durations_s else None
    return CaptureRecord("a:1", Path("x"), 0.0, 10.0, 5.0, analysis=make_analysis(steps=steps), plan=plan,
                         cost=Cost(8.0, 4.1, 10, 30, 20))


def test_remarks_give_reason_and_cost() -> None:
    assert record([0.1] * 8).remarks == (
        "4.1 s: the job emits 240 k events/s", "a note",
        "the capture call took 8.0 s to record 4.1 s: the profiler spent 3.9 s collecting the trace, which slowed the "
        "job; the job's memory grew by at most 20 B")
    assert CaptureRecord("a:1", Path("x"), 0.0, 10.0, 5.0).remarks == ()


@pytest.mark.parametrize(("durations", "reason"), [(None, "no complete steps"), ([1.3, 1.3], "2 complete steps")])
def test_too_few_steps_after_a_shortening_name_the_way_out(durations: list[float] | None, reason: str) -> None:
    (line,) = [r for r in record(durations).remarks if "complete steps" in r]
    assert line == f"gputop found {reason}; to capture longer: gputop capture --seconds 10 --force"
    full = replace(SHORT, chosen_s=10.0)
    assert not any("complete steps" in r for r in record(durations, plan=full).remarks), "it was as long as asked"


def test_a_trace_that_could_have_been_longer_names_what_it_may_miss() -> None:
    enough = replace(SHORT, enough=True)
    (line,) = [r for r in record([0.1] * 8, plan=enough).remarks if "rare" in r]
    assert line == ("rare events, such as a checkpoint, may be missing; to capture longer: "
                    "gputop capture --seconds 10 --force")
    assert sum("--force" in r for r in record([0.1], plan=enough).remarks) == 1


def test_both_grains_are_told_and_what_ended_them() -> None:
    both = replace(SHORT, overview_s=5.9, ended="gputop watched for rare events for 5.9 of 7 s (so).")
    remarks = record([0.1] * 8, plan=both).remarks
    assert remarks[0] == f"4.1 s in detail: {SHORT.why}; then 5.9 s of rare events" and remarks[1] == both.ended
    assert "less frequent events may be missing; to watch for longer: gputop capture --seconds 60" in (
        remarks)
    document = to_document(facts_of(record(plan=both)))
    assert (document["chosen_s"], document["overview_s"], document["ended"]) == (4.1, 5.9, both.ended)


def test_steps_that_grow_slower_under_the_profiler_are_reported() -> None:
    slower = record([0.10, 0.10, *[0.11] * 6, 0.15, 0.15])
    assert slower.remarks[-1] == "steps slowed down from 100 ms to 150 ms during the trace"
    cost = to_document(facts_of(slower))["cost"]
    assert cost["first_steps_s"] == 0.10 and cost["last_steps_s"] == 0.15
    assert record([0.10] * 10).steps_slowed_s == (0.10, 0.10)
    assert len(record([0.10] * 10).remarks) == 3
    assert record([0.10] * 9).steps_slowed_s is None


def test_json_has_what_was_asked_chosen_and_why() -> None:
    document = to_document(facts_of(record()))
    assert json.loads(json.dumps(document)) == document
    assert (document["asked_s"], document["chosen_s"], document["why"]) == (10.0, 4.1, SHORT.why)
    assert document["probe"]["host_events_per_s"] == 240_000
    assert document["cost"]["memory_peak_bytes"] == 30 and document["cost"]["first_steps_s"] is None


def test_the_length_and_its_reason_are_in_the_status(tmp_path: Path, analysis_in_this_process: None) -> None:
    seen: list[CaptureStatus] = []
    with serve(FakeProfiler(xspace=make_xspace(events=1_000))) as server:
        done = capture_and_analyze([Server(server.address)], CaptureRequest(0.3, tmp_path, force=True),
                                   CaptureRun(threading.Event(), threading.Event(), seen.append))
    assert [r.duration_ms for r in server.requests] == [300]
    assert all(s.chosen_s == 0.3 and "no probe" in s.why for s in seen)
    assert done.remarks[0] == "0.3 s: full length, no probe"
    assert done.problem is None


@pytest.mark.parametrize("attached", [(), (os.getppid(),)])
def test_a_job_that_gputop_may_ask_returns_what_it_keeps(tmp_path: Path, analysis_in_this_process: None,
                                                         monkeypatch: pytest.MonkeyPatch, attached: tuple[int, ...]):
    asked: list[int] = []
    monkeypatch.setattr("gputop.launch.serve.give_back", asked.append)
    size = iter(range(10**9, 10**12, 10**8))
    monkeypatch.setattr(job_memory, "resident_bytes", lambda _pid: next(size))
    with serve(FakeProfiler(xspace=make_xspace(events=1_000))) as server:
        capture_and_analyze([Server(server.address, pid=os.getppid())], CaptureRequest(0.3, tmp_path, force=True),
                            CaptureRun(threading.Event(), threading.Event(), lambda _: None, attached=attached))
    assert tuple(asked) == attached


def test_further_workers_are_told_where_none_was_named():
    a, b, other = Server("a:1"), Server("b:1", "TensorFlow: python b.py --token=abc"), Server("c:1", owner="ana")
    down = Server("d:1", problem="refused")
    assert left_out((a, b, other, down), (a,)) == (
        "1 other job with a profiler server was not captured: b:1; to capture another, use --attach.")
    assert left_out((a, b, other, down), (a,), job_chosen=True) == "", "the user knows of the others"
    assert left_out((a, other), (a,)) == left_out((replace(a, asked=True), b), (replace(a, asked=True),)) == ""
    workers = [replace(b, address=f"w{number}:1") for number in range(8)]
    assert left_out((*workers, a), workers[:1], job_chosen=True) == (
        "7 other workers of this job were not captured: w1:1, w2:1, w3:1, w4:1, w5:1, …; to capture several, use "
        "--attach.")


@pytest.mark.parametrize(("answers_at", "searches"), [(1, 1), (2, 2), (9, 3)])
def test_a_named_server_that_does_not_answer_is_looked_for_again(monkeypatch, answers_at, searches):
    made = []

    def find(attached, own, discover, busy=()):
        made.append(attached)
        return FoundServers((Server("a:1", problem=None if len(made) >= answers_at else "refused", asked=True),))

    monkeypatch.setattr(captures, "find_servers", find)
    waited = []
    ((server,), *_) = find_named_servers(("a:1",), {}, False, waited.append)
    assert len(made) == searches and sum(waited) <= 1.0 and (server.problem is None) == (answers_at <= 3)

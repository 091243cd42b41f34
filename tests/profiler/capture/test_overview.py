"""The overview after the detail, of servers that misbehave as it is made."""

from __future__ import annotations

import threading

import pytest

from gputop.profiler.capture import job_memory, overview, safe_capture
from gputop.profiler.capture.plan import MemoryLimits, Plan, overview_events
from gputop.profiler.recording import Progress
from gputop.profiler.storage import RunFolder
from tests.profiler.capturing import capture_with_probe, capture_workers, names_below
from tests.profiler.fake_server import BUSY, EMPTY, GONE, FakeProfiler, in_turn, make_xspace, serve

DETAIL = make_xspace(events=100_000)  # in a twentieth of a second: a tenth of a second of them is enough
SPARSE = make_xspace(events=7)
MARKS = make_xspace(events=100_000, name="ThreadpoolListener::StartRegion")
two_grains = in_turn(DETAIL, DETAIL, SPARSE)  # many events in the probe and in the detail, few in the overview


@pytest.fixture(autouse=True)
def overviews_of_few_events(quick, monkeypatch):
    monkeypatch.setattr("gputop.profiler.capture.plan.MIN_OVERVIEW_S", 0.1)
    monkeypatch.setattr("gputop.profiler.capture.plan._OVERVIEW_EVENTS", 75_000)
    monkeypatch.setattr("gputop.profiler.capture.plan.TARGET_EVENTS", 300_000)


def test_the_rest_of_the_time_is_an_overview_beside_the_detail(logdir):
    progress: list[Progress] = []
    plans: list[Plan] = []
    with serve(FakeProfiler(on_call=two_grains)) as server:
        result, plan, cost = capture_with_probe(server.address, seconds=0.4, logdir=logdir, on_plan=plans.append,
                                                on_progress=progress.append)
    assert [r.duration_ms for r in server.requests] == [50, 100, 150, 150], "the first part tells how little it costs"
    levels = [(r.opts.host_tracer_level, r.opts.device_tracer_level, r.opts.python_tracer_level)
              for r in server.requests]
    assert levels == [(2, 1, 0), (2, 1, 0), (1, 0, 0), (1, 0, 0)]
    assert [r.opts.enable_hlo_proto for r in server.requests] == [True, True, False, False]
    assert (plans[0].chosen_s, plans[0].overview_s) == (plan.chosen_s, plan.overview_s) == (0.1, 0.3)
    assert not plan.ended and cost.recorded_s == pytest.approx(0.4) and cost.call_s >= 0.4 > result.took_s
    host = result.path.name.removesuffix(".xplane.pb")
    assert names_below(logdir) == [f"{host}.overview.pb", f"{host}.xplane.pb"], "XProf takes *.xplane.pb for hosts"
    assert result.path.read_bytes() == DETAIL
    of_overview = [p for p in progress if p.phase == "overview"]
    assert of_overview
    assert of_overview[-1].elapsed_s > 0.25, "of all its parts"
    assert all(p.more for p in progress if p.phase in ("recording", "receiving", "saving"))


def test_a_job_that_makes_as_many_events_even_then_is_sampled_for_the_rest(logdir):
    progress: list[Progress] = []
    with serve(FakeProfiler(xspace=DETAIL)) as server:
        _, plan, cost = capture_with_probe(server.address, seconds=5, logdir=logdir, on_progress=progress.append)
    levels = [(r.opts.host_tracer_level, r.opts.device_tracer_level) for r in server.requests]
    samples = levels.count((2, 0))
    assert levels == [(2, 1)] * 2 + [(1, 0)] * (len(levels) - 2 - samples) + [(2, 0)] * samples and 4 <= samples <= 13
    assert {r.duration_ms for r in server.requests[-samples:]} == {5}, "of so many events as little as shows anything"
    assert plan.overview_s == pytest.approx(4.9, abs=0.11) and 0.1 < cost.recorded_s < 2
    assert "gputop watched for rare events for 0.1 of 4.9 s (" in plan.ended
    assert f"gputop took {samples} samples of 5 ms and did not see which ops ran between them." in plan.ended
    elapsed = [p.elapsed_s for p in progress if p.phase == "overview"]
    assert 3 < max(elapsed) <= 4.9


def test_memory_that_runs_short_ends_the_looks(logdir, monkeypatch):
    monkeypatch.setattr(safe_capture, "memory_limits", lambda *_: MemoryLimits(6e9))
    with serve(FakeProfiler(xspace=DETAIL)) as server:
        monkeypatch.setattr(job_memory, "resident_bytes",
                            lambda pid: 10**10 * sum((r.opts.host_tracer_level, r.opts.device_tracer_level) == (2, 0)
                                                     for r in server.requests))
        monkeypatch.setattr("gputop.profiler.capture.plan._SAMPLE_S", (0.3, 0.3))
        _, plan, _ = capture_with_probe(server.address, seconds=5, logdir=logdir)
    assert plan.overview_s < 2 and "(the job's memory had grown by 9.3 GiB). For the next" in plan.ended


def test_a_job_that_pauses_in_all_probes_has_an_overview_after_the_guard_ended_the_detail(logdir, monkeypatch):
    with serve(FakeProfiler(on_call=in_turn(EMPTY, EMPTY, EMPTY, DETAIL, SPARSE))) as server:
        monkeypatch.setattr(job_memory, "resident_bytes", lambda pid: 2**29 * (len(server.requests) == 4))
        _, plan, _ = capture_with_probe(server.address, seconds=4, logdir=logdir)
        lengths = [r.duration_ms for r in server.requests]
    assert "the job's memory had grown by 512 MiB" in plan.why and plan.overview_s > 1
    assert lengths[:5] == [50, 50, 50, 4000, 100] and len(names_below(logdir)) == 2


@pytest.mark.parametrize("parts", [(EMPTY, SPARSE), (SPARSE, EMPTY)], ids=["first", "second"])
def test_a_part_in_which_nothing_happens_was_watched_as_well(logdir, parts):
    with serve(FakeProfiler(on_call=in_turn(DETAIL, DETAIL, *parts))) as server:
        _, plan, _ = capture_with_probe(server.address, seconds=0.4, logdir=logdir)
    assert plan.overview_s == 0.3 and not plan.ended and len(names_below(logdir)) == 2


def test_the_marks_of_thread_pools_do_not_end_it(logdir, monkeypatch):
    marks = in_turn(DETAIL, DETAIL, MARKS)
    with serve(FakeProfiler(on_call=marks)) as server:
        _, plan, _ = capture_with_probe(server.address, seconds=0.4, logdir=logdir)
    assert plan.overview_s == 0.3 and not plan.ended and len(server.requests) == 4
    monkeypatch.setattr("gputop.profiler.capture.plan._MAX_OVERVIEW_EVENTS", 120_000)  # for memory and the analysis
    with serve(FakeProfiler(on_call=marks)) as server:
        _, plan, _ = capture_with_probe(server.address, seconds=5, logdir=logdir)
    assert " events a second). For" in plan.ended and "gputop took " in plan.ended


def test_stopped_in_the_overview_keeps_both(logdir):
    stop = threading.Event()
    with serve(FakeProfiler(on_call=two_grains)) as server:
        result, plan, _ = capture_with_probe(
            server.address, seconds=60, logdir=logdir, stop=stop,
            on_progress=lambda p: p.phase == "overview" and p.elapsed_s > 0.4 and stop.set())
        assert len(server.terminated) == 1
    assert len(names_below(logdir)) == 2 and result.path.read_bytes() == DETAIL
    assert 0.3 < plan.overview_s < 20 and not plan.ended, "who stopped it knows"


def test_stopped_in_the_detail_leaves_the_overview_out(logdir):
    stop = threading.Event()
    with serve(FakeProfiler(xspace=DETAIL)) as server:
        result, plan, _ = capture_with_probe(server.address, seconds=0.5, logdir=logdir, stop=stop,
                                             on_progress=lambda p: p.phase == "saving" and stop.set())
        assert len(server.requests) == 2
    assert names_below(logdir) == [result.path.name] and plan.overview_s == 0


@pytest.mark.parametrize(("refusal", "said"), [(BUSY, "is busy: another profiling session"),
                                               (GONE, "ended or the connection was lost")])
@pytest.mark.parametrize(("parts", "kept_s"), [(0, 0.0), (1, 0.15)])
def test_what_ends_the_overview_leaves_the_detail_and_is_said(logdir, refusal, said, parts, kept_s):
    with serve(FakeProfiler(on_call=in_turn(DETAIL, DETAIL, *[SPARSE] * parts, refusal))) as server:
        result, plan, _ = capture_with_probe(server.address, seconds=0.5, logdir=logdir)
    assert result.path.read_bytes() == DETAIL and plan.chosen_s == 0.1
    assert len(names_below(logdir)) == 1 + (kept_s > 0)
    assert plan.overview_s == pytest.approx(kept_s, abs=0.051) and said in plan.ended
    assert plan.ended.startswith("gputop watched for rare events for ")


def test_an_overview_without_events_is_said(logdir):
    with serve(FakeProfiler(on_call=in_turn(DETAIL, DETAIL, EMPTY))) as server:
        result, plan, _ = capture_with_probe(server.address, seconds=0.4, logdir=logdir)
    assert names_below(logdir) == [result.path.name] and plan.overview_s == 0
    assert "the job produced no events" in plan.ended


@pytest.mark.parametrize("chosen_s", [0.1, 30.0, 60.0])
def test_a_job_that_grows_too_much_ends_either_grain(logdir, monkeypatch, chosen_s):
    size = iter(range(10**9, 10**12, 10**9))  # a gigabyte more at each sample
    monkeypatch.setattr(job_memory, "resident_bytes", lambda pid: next(size))
    monkeypatch.setattr(safe_capture, "memory_limits", lambda *_: MemoryLimits(6e9))
    monkeypatch.setattr(safe_capture, "plan", lambda s, probe, *_: Plan(s, chosen_s, "so", probe,
                                                                        overview_s=s - chosen_s))
    with serve(FakeProfiler(on_call=two_grains)) as server:
        result, plan, _ = capture_with_probe(server.address, seconds=60, logdir=logdir)
    assert 0 < plan.overview_s < 20 and len(names_below(logdir)) == 2
    assert any(name.endswith(overview.OVERVIEW) for name in names_below(logdir))
    if chosen_s == 0.1:
        assert plan.chosen_s == 0.1 and plan.ended.startswith("gputop watched for rare events for ")
        assert "the job's memory had grown by" in plan.ended
    else:
        assert result.stopped_early and plan.chosen_s < 2
        assert plan.ended.startswith(f"gputop ended the recording after {plan.chosen_s:g} of 60 s, because the job's ")
        assert (": after that, gputop watched only for rare events. gputop watched for rare events for "
                f"{plan.overview_s:g} of ") in plan.ended


def test_who_ends_the_detail_wants_no_overview(logdir, monkeypatch):
    stop = threading.Event()
    monkeypatch.setattr(safe_capture, "plan", lambda s, probe, *_: Plan(s, 30.0, "so", probe, overview_s=30.0))
    with serve(FakeProfiler(on_call=two_grains)) as server:
        _, plan, _ = capture_with_probe(server.address, seconds=60, logdir=logdir, stop=stop,
                                        on_progress=lambda p: p.phase == "recording" and stop.set())
    assert plan.overview_s == 0 and not plan.ended and len(names_below(logdir)) == 1


def test_a_disk_that_does_not_take_the_overview(logdir, monkeypatch):
    real = RunFolder.create

    def create(logdir, host, run=None, ending=".xplane.pb"):
        if ending == overview.OVERVIEW:
            raise OSError(28, "No space left on device")
        return real(logdir, host, run, ending)

    monkeypatch.setattr(RunFolder, "create", create)
    with serve(FakeProfiler(on_call=two_grains)) as server:
        result, plan, _ = capture_with_probe(server.address, seconds=0.4, logdir=logdir)
    assert names_below(logdir) == [result.path.name] and plan.overview_s == 0 and "No space left" in plan.ended


def test_forced_it_is_all_detail(logdir):
    with serve(FakeProfiler(xspace=DETAIL)) as server:
        _, plan, _ = capture_with_probe(server.address, seconds=0.3, logdir=logdir, force=True)
        assert len(server.requests) == 1
    assert plan.overview_s == 0 and plan.chosen_s == 0.3


def test_each_of_several_workers_has_an_overview(logdir):
    with serve(FakeProfiler(on_call=two_grains)) as first, serve(FakeProfiler(on_call=two_grains)) as second:
        done = capture_workers([(first.address, None), (second.address, None)], seconds=0.4, logdir=logdir)
    assert [len(s.requests) for s in (first, second)] == [4, 4]
    assert (done.plan.chosen_s, done.plan.overview_s, done.plan.ended) == (0.1, 0.3, "")
    assert sorted(path.name for path in done.run_dir.glob("*.overview.pb")) == sorted(
        f"{outcome.name}.overview.pb" for outcome in done.outcomes)
    assert [o.cost.recorded_s for o in done.outcomes] == pytest.approx([0.4, 0.4])
    assert [o.overview_s for o in done.outcomes] == [0.3, 0.3] and "overview" not in " ".join(done.notes())
    assert set(names_below(logdir)) == {f"{o.name}{ending}" for o in done.outcomes for ending in (
        ".overview.pb", ".xplane.pb")} | {"gputop.clocks.json"}


def test_a_worker_that_refuses_its_overview_takes_none_from_the_others(logdir):
    refuses = in_turn(DETAIL, DETAIL, BUSY)
    with serve(FakeProfiler(on_call=two_grains)) as first, serve(FakeProfiler(on_call=refuses)) as second:
        done = capture_workers([(first.address, None), (second.address, None)], seconds=0.4, logdir=logdir)
    assert [o.overview_s for o in done.outcomes] == [0.3, 0.0] and all(o.error is None for o in done.outcomes)
    assert done.plan.overview_s == 0 and len(list(done.run_dir.glob("*.overview.pb"))) == 1
    assert done.plan.ended.startswith(f"{second.address}: gputop watched for rare events for 0 of 0.3 s (")
    assert "gputop watched for rare events for 0 to 0.3 s, depending on the worker" in done.notes()


def test_many_workers_share_what_an_analysis_bears():
    assert overview_events(10, 8)[0] == overview_events(10)[0]
    assert sum(overview_events(10, 8)) == sum(overview_events(10)) / 8
    assert overview_events(600, 100)[0] == overview_events(600, 50)[0] / 2 < overview_events(600)[0]

"""When NCCL is asked which rank did not come, and what is kept of its answers."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from gputop.advice.registry import limit
from gputop.core.errors import GputopError
from gputop.core.findings import Finding, Gain
from gputop.ranks import nccl_ras
from gputop.ranks.model import RasAnswer
from gputop.ranks.processes import environment
from gputop.ranks.ras_answers import read_json
from gputop.session import rank_watch, ras_worker
from gputop.session.rank_watch import RankWatch, following
from gputop.session.simulated_ranks import SimulatedRanks
from gputop.sources.simulated import SimulatedSource
from tests.fakes import node_sample
from tests.ranks.ras_double import Job, as_json
from tests.waiting import PATIENCE_S


def finding(id_: str) -> Finding:
    return Finding(id=id_, severity="medium", title="", why="", evidence={}, action="", gain=Gain(None, ""), source="")


def answer(*reduces: int, time_s: float = 0.0) -> RasAnswer:
    return read_json(as_json(Job(reduces)), time_s)


def test_it_asks_only_while_something_looks_like_a_hang() -> None:
    asked, go_on = threading.Semaphore(0), threading.Semaphore(0)

    def ask(pids: object, hosts: frozenset[str]) -> RasAnswer:
        asked.release()
        go_on.acquire()
        return answer(5, 4)

    watch = RankWatch(ask)
    try:
        watch.check([finding("power_capped")], node_sample(1))
        assert watch.report is None and not asked.acquire(blocking=False)
        watch.check([finding("spinning")], node_sample(1))  # returns though the answer is not there
        assert asked.acquire(timeout=PATIENCE_S)
        watch.check([], node_sample(2))  # all is well before it comes: it is not kept
        go_on.release()
    finally:
        watch.close()
    watch._thread.join(PATIENCE_S)
    assert not watch._thread.is_alive() and watch.report is None


def test_a_failure_is_told_and_is_no_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_watch, "PERIOD_S", 0.0)
    outcomes = iter([GputopError("nothing listens", "Start it."), ValueError("odd"), answer(5, 4)])
    there = threading.Event()

    def ask(pids: object, hosts: frozenset[str]) -> RasAnswer:
        outcome = next(outcomes, None)
        if isinstance(outcome, Exception):
            raise outcome
        if outcome is None:
            there.set()
            watch.close()
            return answer(5, 4, time_s=9.0)
        return outcome

    watch = RankWatch(ask)
    assert watch._next(None).problem == "nothing listens. Start it."
    assert "odd" in watch._next(None).problem
    watch.check([finding("spinning")], node_sample(1))
    assert there.wait(PATIENCE_S)
    watch._thread.join(PATIENCE_S)
    assert watch.report is not None and watch.report.first is not None and watch.report.last is not None


def test_the_first_of_equal_answers_is_kept() -> None:
    hosts = frozenset({"10.0.0.1"})
    report = following(None, answer(5, 4), hosts)
    report = following(report, answer(5, 4, time_s=20.0), hosts)
    report = following(report, answer(5, 4, time_s=40.0), hosts)
    assert (report.first.time_s, report.last.time_s) == (0.0, 40.0)
    report = following(report, answer(6, 6, time_s=60.0), hosts)
    assert report.first is not None and report.first.time_s == 60.0


def test_the_demo_has_asked_before_it_starts_so_that_the_hang_is_told_at_once() -> None:
    source = SimulatedSource("hang")
    source.open()
    ranks = SimulatedRanks(source)
    report = RankWatch(ranks.ask, ranks.hosts, ranks.earlier)._next(None)
    assert report.last.time_s - report.first.time_s >= limit("collective_hang.unchanged_s")
    source.next_job()  # its cure, which does not hang
    assert ranks.earlier() is None


def test_of_an_environment_only_what_is_asked_for_is_read(tmp_path: Path) -> None:
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "environ").write_bytes(b"TOKEN=secret\0NCCL_RAS_ADDR=localhost:1\0")
    assert environment(7, ["NCCL_RAS_ADDR", "NCCL_RAS_ENABLE"], tmp_path) == {"NCCL_RAS_ADDR": "localhost:1"}
    assert environment(8, ["NCCL_RAS_ADDR"], tmp_path) == {}


def test_the_monitor_has_answers_read_in_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    readers: list[object] = []
    monkeypatch.setattr(nccl_ras, "ask_job", lambda pids, hosts, read: readers.append(read) or answer(1))
    assert rank_watch._ask((7,), frozenset()) == answer(1)
    assert readers == [ras_worker.read_in_worker]


def test_what_ras_says_is_read_in_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def here(data: bytes, as_json: bool, time_s: float) -> RasAnswer:
        raise AssertionError

    data = as_json(Job((5, 4)))
    monkeypatch.setattr(ras_worker, "read_here", here)
    assert ras_worker.read_in_worker(data, True, 7.0) == read_json(data, 7.0)
    for hostile in (b"{" * (4 << 20), b"[" + b"{}," * (1 << 20)):
        with pytest.raises(GputopError, match=r"NCCL's answer is damaged"):
            ras_worker.read_in_worker(hostile, True, 7.0)
    with pytest.raises(GputopError, match=r"not NCCL's RAS"):
        ras_worker.read_in_worker(b"SSH-2.0\n", False, 7.0)
    monkeypatch.setattr(ras_worker, "_TIMEOUT_S", 0.0)
    with pytest.raises(GputopError, match="parsing of NCCL's answer did not finish") as late:
        ras_worker.read_in_worker(data, True, 7.0)
    assert "trace" not in str(late.value)

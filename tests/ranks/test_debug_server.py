"""PyTorch's debug servers: whom gputop asks, what it makes of the answers, and of hostile ones."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from gputop.core.errors import GputopError
from gputop.ranks import debug_server, flight_recorder, stacks
from gputop.ranks.debug_server import Answers, ask, compared, read_stacks, read_traceback
from gputop.ranks.desync import compare
from gputop.ranks.flight_recorder import read_dump
from gputop.ranks.flight_recorder_report import server_lines
from gputop.ranks.stack_groups import report
from gputop.ranks.stacks_document import StacksAnswers
from tests.dripping import DRIPS, dripping
from tests.ranks.debug_double import NCCL, OTHERS, Answer, names, recorder, serving
from tests.ranks.flight_dumps import NOW_S, document, entry, history

WAITS = history(3, then=[entry(4, state="started")])


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(debug_server, "_TIMEOUT_S", 60.0)  # the machine may be busy


@pytest.fixture
def with_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flight_recorder, "loaded_frameworks", lambda maps: frozenset({"pytorch"}))


def rank(number: int, **more: str) -> dict[str, str]:
    return {"RANK": str(number), **more}


def said(answers: Sequence[Answers]) -> str:
    return "\n".join(server_lines(answers, NOW_S))


def problem(answers: dict[str, list[Answer]] | None, **environ: str) -> str:
    """What is said of one process with these answers, next to a rank that answers."""
    with serving((rank(0), recorder(document(WAITS))), (rank(1, **environ), answers)) as pids:
        (job,) = ask(pids)
    assert [dump.rank for dump in job.dumps.dumps] == [0]
    (only,) = job.dumps.problems
    return only


def test_the_rank_that_did_not_come(with_torch: None) -> None:
    with serving((rank(0), recorder(document(WAITS))), (rank(1), recorder(document(history(3))))) as pids:
        answers = compared(ask(pids), ask(pids))
    (job,) = answers
    assert not job.moved and not job.dumps.problems
    assert compare(job.dumps.dumps)[0].verdict == "absent"
    assert "PyTorch's debug server: Rank 1 did not launch all_reduce 4" in said(answers)
    assert "Asked: ranks 0-1." in said(answers)
    (shown,) = map(StacksAnswers.of_servers, answers)
    assert shown.moved is False and shown.groups[0].apart[0].rank == 1


def test_a_rank_that_is_only_late_is_not_accused(with_torch: None) -> None:
    later = recorder(document(history(3)))
    later[NCCL] = [*later[NCCL], {"body": recorder(document(history(4)))[NCCL][0]["body"]}]
    with serving((rank(0), recorder(document(WAITS))), (rank(1), later)) as pids:
        answers = compared(ask(pids), ask(pids))
    assert answers[0].moved and "the ranks go on" in said(answers) and "did not launch" not in said(answers)
    assert StacksAnswers.of_servers(answers[0]).groups == ()


def test_the_gpu_may_go_on_while_the_host_waits(with_torch: None) -> None:
    body = recorder(document(WAITS))
    body[NCCL] = [*body[NCCL], {"body": recorder(document(history(4)))[NCCL][0]["body"]}]
    with serving((rank(0), body), (rank(1), recorder(document(history(3))))) as pids:
        assert compared(ask(pids), ask(pids))[0].moved


def test_a_rank_that_answers_once_does_not_count(with_torch: None) -> None:
    with serving((rank(0), recorder(document(WAITS))), (rank(1), recorder(document(history(3))))) as pids:
        both = ask(pids)
        alone = (Answers(both[0].pids, flight_recorder.Dumps(both[0].dumps.dumps[:1])),)
        (job,) = compared(alone, ask(pids))
    assert [dump.rank for dump in job.dumps.dumps] == [0] and "rank 1: answered only once" in job.dumps.problems


def test_a_recorder_that_shows_only_what_is_active(with_torch: None) -> None:
    waits = document([entry(4, state="scheduled", backend="gloo", record=3)], None)
    nothing = document([], None)
    del nothing["entries"]
    with serving((rank(0), recorder(waits, OTHERS)), (rank(1), recorder(nothing, OTHERS))) as pids:
        answers = compared(ask(pids), ask(pids))
    state = compare(answers[0].dumps.dumps)[0]
    assert (state.verdict, [own.rank for own in state.apart]) == ("inactive", [1])
    assert ("Rank 0 waits in all_reduce 4 of the group of all ranks. Rank 1 is in no collective of this group."
            in said(answers))
    assert "launched nothing" not in said(answers)


def test_two_ranks_in_different_collectives_of_what_is_active() -> None:
    def dump(number: int, *seqs: int) -> flight_recorder.Dump:
        body = recorder(document([entry(seq, state="scheduled", record=seq) for seq in seqs]))[NCCL][0]["body"]
        return read_dump(body.encode(), number, "x", only_active=True)

    assert compare([dump(0, 4), dump(1, 5), dump(2)])[0].verdict == "unclear"


def test_nccls_recorder_is_asked_before_the_others(with_torch: None) -> None:
    both = {**recorder(document([entry(1, backend="gloo")]), OTHERS), **recorder(document(WAITS)),
            "/handler/": [names("fr_trace_json", "dump_nccl_trace_json")]}
    empty = {**both, NCCL: [{"body": '{"version": "2.10", "pg_config": {}}'}]}
    with serving((rank(0), both), (rank(1), empty)) as pids:
        first, second = ask(pids)[0].dumps.dumps
    assert first.newest_record == 3 and second.newest_record == 0  # without NCCL the other one tells more


def test_processes_that_are_not_asked(with_torch: None) -> None:
    with serving((rank(0), None), (rank(1), None)) as pids:
        assert ask(pids) == ()
    assert "not asked, as no process runs one" in said(())
    assert "no debug server runs in it" in problem(None)
    with serving(({}, recorder(document(WAITS)))) as pids:
        (job,) = ask(pids)
    assert "names no rank" in job.dumps.problems[0]
    with serving((rank(0), recorder(document(WAITS))), (rank(0), recorder(document(WAITS)))) as pids:
        (job,) = ask(pids)
    assert not job.dumps.dumps and "several processes are rank 0" in job.dumps.problems[0]


@pytest.mark.parametrize(("answers", "words"), [
    ({"/handler/": [{"body": "{}"}]}, "does not answer like"), ({"/handler/": [{"body": "x"}]}, "does not answer like"),
    ({"/handler/": [names("ping")]}, "no handler"), ({"/handler/": [{"status": 404}]}, "answered 404"),
    ({"/handler/": [{"bytes": 1 << 20}]}, "too large"),
    ({"/handler/": [{"status": 302, "headers": {"Location": "http://127.0.0.1:1/"}}]}, "answered 302"),
    ({**recorder({}), NCCL: [{"status": 500}]}, "answered 500"),
    ({**recorder({}), NCCL: [{"body": "[1"}]}, "plain values"),
    ({**recorder({}), NCCL: [{"body": '{"version": "2.10", "entries": [1]}'}]}, "damaged"),
    ({**recorder({}), NCCL: [{"body": "{" * 500}]}, "damaged"),
    ({**recorder({}), NCCL: [{"body": "cos\nsystem\n(S'true'\ntR."}]}, "GLOBAL"),
])
def test_hostile_answers(answers: dict[str, list[Any]], words: str, with_torch: None) -> None:
    assert words in problem(answers)


def test_an_answer_has_an_end(with_torch: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(debug_server, "_MAX_BYTES", 100_000)
    assert "too large" in problem({**recorder({}), NCCL: [{"bytes": 200_000}]})
    monkeypatch.setattr(debug_server, "_TIMEOUT_S", 0.5)
    with serving((rank(0), {"/handler/": [{"drips": True}]})) as pids:
        assert "timed out" in ask(pids)[0].dumps.problems[0]


@pytest.mark.parametrize("way", DRIPS)
def test_a_server_that_answers_a_piece_at_a_time(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(debug_server, "_TIMEOUT_S", 0.2)
    with dripping(way) as address, pytest.raises((OSError, GputopError)):
        server = debug_server._Server(os.getpid(), Path("/proc"), port=int(address.rpartition(":")[2]))
        server.dump(0, debug_server.time.monotonic() + 0.2)


def test_nothing_is_sent_to_the_socket_of_another_process(tmp_path: Path, with_torch: None) -> None:
    path = str(tmp_path / "socket")
    with serving((rank(0, TORCH_WORKER_SERVER_SOCKET=path), recorder(document(WAITS))),
                 (rank(1), recorder(document(WAITS)))) as pids:
        own, other = pids
        port = next(debug_server._servers(other, Path("/proc"))).port
        for connect in (debug_server._Server(own, Path("/proc"), port=port)._connect_tcp,
                        debug_server._Server(other, Path("/proc"), path=path)._connect_unix):
            with pytest.raises(GputopError, match="another process listens"):
                connect(5.0)
        assert [dump.rank for dump in ask(pids)[0].dumps.dumps] == [0, 1]  # each at its own


def test_a_path_that_is_no_socket_of_the_job(tmp_path: Path, with_torch: None) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    assert "does not answer" in _unix(tmp_path / "missing") and "does not answer" in _unix(tmp_path / "link" / "socket")


def test_a_link_to_another_socket_is_not_followed(tmp_path: Path) -> None:
    """It would have root connect to any daemon's."""
    called: list[str] = []
    with socket.socket(socket.AF_UNIX) as daemon:
        daemon.bind(str(tmp_path / "daemon"))
        daemon.listen()
        daemon.settimeout(0.0)
        (tmp_path / "link").symlink_to("daemon")
        assert "does not answer" in _unix(tmp_path / "link")
        with pytest.raises(BlockingIOError):
            called.append(str(daemon.accept()))
    assert not called


def test_large_answers_are_read_one_at_a_time(with_torch: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixteen of 16 MB each became gigabytes."""
    together = threading.Barrier(2)
    met: list[bool] = []

    def read(*arguments: Any, **options: Any) -> flight_recorder.Dump:
        try:
            together.wait(1.0)
            met.append(True)
        except threading.BrokenBarrierError:
            met.append(False)
        return read_dump(*arguments, **options)

    monkeypatch.setattr(debug_server, "read_dump", read)
    with serving((rank(0), recorder(document(WAITS))), (rank(1), recorder(document(WAITS)))) as pids:
        assert len(ask(pids)[0].dumps.dumps) == 2
    assert met == [False, False]


def _unix(path: Path) -> str:
    server = debug_server._Server(os.getpid(), Path("/proc"), path=str(path))
    with pytest.MonkeyPatch.context() as patch, pytest.raises(GputopError) as raised:
        patch.setattr(debug_server, "_serves", lambda pid, proc: True)
        patch.setattr(debug_server, "rank_of_process", lambda pid, proc: 0)
        patch.setattr(debug_server, "_servers", lambda pid, proc: iter([server]))
        debug_server._of_process(os.getpid(), Path("/proc"))
    return raised.value.message


TRACEBACK = """Current thread 0x00007f01 (most recent call first):
  <no Python frame>

Thread 0x00007f02 [loader] (most recent call first):
  File "/usr/lib/python3.14/threading.py", line 359 in wait

Thread 0x00007f03 (most recent call first):
  File "/x/site-packages/torch/distributed/distributed_c10d.py", line 3245 in all_reduce
  File "/home/u/train.py", line 20 in step
  File "<frozen importlib._bootstrap>", line ??? in \x1b[2J
nonsense
"""


def test_stacks_of_a_rank_that_py_spy_cannot_read(with_torch: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacks, "find_py_spy", lambda: None)
    waits = {"/handler/": [names("ping", "dump_traceback")], "/handler/dump_traceback": [{"body": TRACEBACK}]}
    with serving((rank(0), waits), (rank(1), {"/handler/": [names("ping")]}), (rank(2), None)) as pids:
        first, second, third = read_stacks(pids)
        with pytest.raises(GputopError, match="not installed"):
            read_stacks(pids[1:])
    assert [thread.name for thread in first.threads] == ["loader", ""] and first.problem is None
    assert first.main is not None and [(f.function, f.line) for f in first.main.frames][:2] == [
        ("all_reduce", 3245), ("step", 20)]
    assert first.main.frames[2].line is None and "\x1b" not in first.main.frames[2].function
    assert second.problem is not None and third.problem is not None
    text = "\n".join(report([[first]]))
    assert "rank 0" in text and "all_reduce at train.py:20" in text
    assert "the stacks are by PyTorch's debug server, as py-spy, which reads stacks, is not installed." in text


def test_without_the_last_threads_none_is_the_main_one() -> None:
    assert all(not thread.main for thread in read_traceback(TRACEBACK + "...\n"))
    assert read_traceback("x" * 10_000_000) == () == read_traceback("")
    (one,) = read_traceback("Thread 0x1 (most recent call first):\n" + '  File "a", line 1 in f\n' * 100_000)
    assert len(one.frames) < 20_000
    assert read_traceback("Thread 0x1 (most recent call first):\n" + '  File "a", line 1 in ' * 100_000) == ()

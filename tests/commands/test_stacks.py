"""gputop stacks: what NCCL says and where the ranks stand, as text and as JSON, and when it asks first."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest

from gputop.cli import main
from gputop.commands import stacks as command
from gputop.ranks import processes, stacks
from gputop.ranks.nccl_ras import read_here
from gputop.session import ras_worker
from tests.commands.schema_problems import problems
from tests.ranks.flight_dumps import document, entry, history
from tests.ranks.rank_stacks import LOADS, WAITS, rank
from tests.ranks.ras_double import Job, serving

STUCK = Job((100, 99), first_pid=100)


@pytest.fixture(autouse=True)
def ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "_APART_S", 0.0)
    monkeypatch.setattr(stacks, "read_all", lambda pids, native=False: tuple(
        rank(i, LOADS if i else WAITS) for i in range(2)))


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    status = main(["stacks", *words])
    return status, capsys.readouterr().out


def test_the_rank_is_named_by_nccl_and_by_its_stack(capsys: pytest.CaptureFixture[str],
                                                    monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacks, "others_of", lambda pids: {})
    with serving(STUCK) as (address, _):
        monkeypatch.setenv("NCCL_RAS_ADDR", address)
        status = main(["stacks", "100", "101"])
        text, told = capsys.readouterr()
        assert told.count(f"NCCL's RAS at {address}") == 2 and "at most 20 s" in told
        assert status == 0 and "Rank 1 did not reach AllReduce 100" in text and "process 101" in text
        assert "1 rank in wrapper → all_reduce at train.py:112, 1 rank in load at data.py:40" in text
        status, text = run(capsys, "--json", "100", "101")
    document = json.loads(text)
    assert not problems("stacks", document)
    assert document["schema"] == "gputop.stacks/1" and document["nccl"]["absence"]["absent"] == [
        {"rank": 1, "host": "10.0.0.1", "pid": 101, "gpu": 5, "trouble": ""}]
    assert [own["pids"] for own in document["jobs"][0]["groups"]] == [[100], [101]]
    assert document["processes"][1]["threads"][1]["frames"][0]["function"] == "load"


@pytest.mark.parametrize(("jobs", "words"), [
    ([Job((100, 100))], "stuck inside a collective"), ([Job((100, 99)), Job((120, 119))], "the ranks continue"),
    ([Job((100, 100), version="2.27.7")], "does not show"), ([Job((100, 100), gone=frozenset({1}))], "not answer NCCL"),
])
def test_other_answers_of_nccl(jobs: list[Job], words: str, capsys: pytest.CaptureFixture[str],
                               monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ras_worker, "read_in_worker", read_here)  # another answer needs no process of its own
    with serving(*jobs) as (address, _):
        monkeypatch.setenv("NCCL_RAS_ADDR", address)
        assert words in run(capsys, "--yes", "100")[1]
        assert not problems("stacks", json.loads(run(capsys, "--yes", "--json", "100")[1]))


def test_without_nccl_and_without_py_spy(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_RAS_ADDR", "127.0.0.1:1")
    status, text = run(capsys, "--yes", "100")
    assert status == 0 and "NCCL 2.24 and newer" in text and "train.py:112" in text
    assert not problems("stacks", json.loads(run(capsys, "--yes", "--json", "100")[1]))
    monkeypatch.undo()
    monkeypatch.setenv("NCCL_RAS_ADDR", "127.0.0.1:1")
    monkeypatch.setattr(stacks, "find_py_spy", lambda: None)
    assert main(["stacks", "--yes", "100"]) == 1
    assert "pip install py-spy" in capsys.readouterr().err


def test_it_asks_before_it_holds_a_process_or_reads_anothers(capsys: pytest.CaptureFixture[str],
                                                             monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacks, "others_of", lambda pids: {100: 4242})
    assert main(["stacks", "100"]) == 2
    assert "no terminal to ask" in capsys.readouterr().err
    monkeypatch.setattr(stacks, "others_of", lambda pids: {})
    assert main(["stacks", "--native", "100"]) == 2
    assert "18 s" in capsys.readouterr().err
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", lambda question: "n")
    assert main(["stacks", "--native", "100"]) == 0
    assert "nothing was done" in capsys.readouterr().err


def test_dumps_of_the_flight_recorder_alone_and_next_to_the_other_witnesses(
        tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    waits = entry(4, state="started", line=20)
    for number, then in enumerate(([waits], [])):
        (tmp_path / f"nccl_trace_rank_{number}").write_bytes(pickle.dumps(document(history(3, then=then), 4), 2))
    files = [str(tmp_path / f"nccl_trace_rank_{number}") for number in (0, 1)]
    said = "PyTorch's flight recorder: Rank 1 did not launch all_reduce 4 of the group of all ranks."
    status, text = run(capsys, "--flight-recorder", *files)
    assert status == 0 and said in text and "ranks 2-3" in text and "NCCL" not in text
    monkeypatch.setenv("NCCL_RAS_ADDR", "127.0.0.1:1")
    for words in (["--yes", "100", "--flight-recorder", *files], ["--flight-recorder", *files]):
        shown = json.loads(run(capsys, "--json", *words)[1])
        assert not problems("stacks", shown)
        (job,) = shown["flight_recorder"]
        assert job["ranks"] == [0, 1] and job["missing_ranks"] == [2, 3]
        assert job["groups"][0]["verdict"] == "absent" and job["groups"][0]["apart"][0]["last"]["number"] == 3
    status, text = run(capsys, "--yes", "100", "--flight-recorder", *files)
    assert said in text and "NCCL 2.24 and newer" in text and "train.py:112" in text
    assert main(["stacks", "--flight-recorder", str(tmp_path / "rank_9")]) == 3
    assert "cannot open" in (err := capsys.readouterr().err) and "rank_9" in err


def test_a_node_without_a_job(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "training_processes", list)
    assert main(["stacks"]) == 3
    assert "Name the process" in capsys.readouterr().err


def test_the_stacks_of_a_demo_are_simulated_and_no_real_process_is_read(
        capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "training_processes", lambda: pytest.fail("real processes"))
    assert main(["--demo", "hang", "stacks"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("*** SIMULATED") and "Rank 5 did not reach AllReduce" in text and "dataset.py:41" in text
    assert main(["--demo", "hang", "stacks", "--json"]) == 0
    assert "SIMULATED" in json.loads(capsys.readouterr().out)["nccl"]["version"]
    assert main(["--demo", "healthy", "stacks"]) == 3 and "does not hang" in capsys.readouterr().err
    assert main(["--demo", "hang", "stacks", "1"]) == 2
    assert main(["--demo", "hang", "doctor"]) == 2 and ("gputop doctor does not work with "
                                                        "--demo") in capsys.readouterr().err
    assert main(["--demo", "doctor"]) == 2 and "gputop doctor does not work with --demo" in capsys.readouterr().err

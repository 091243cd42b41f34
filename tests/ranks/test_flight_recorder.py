"""Dumps of PyTorch's flight recorder: as files, of processes, and hostile ones."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from gputop.core.errors import GputopError
from gputop.ranks import flight_recorder
from gputop.ranks.flight_recorder import Dumps, rank_of_file, read_dump, read_files, read_of_processes
from tests.ranks.flight_dumps import document, entry, history, processes, save


@pytest.fixture
def with_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flight_recorder, "loaded_frameworks", lambda maps: frozenset({"pytorch"}))


def test_pickle_and_json_say_the_same(tmp_path: Path) -> None:
    entries = history(2, then=[entry(3, state="scheduled")])
    read = read_dump(pickle.dumps(document(entries), 2), 0, "x", 5.0)
    assert read == read_dump(json.dumps(document(entries)).encode(), 0, "x", 5.0)
    (group,) = read.groups
    assert (group.name, group.description, group.ranks, read.whole) == ("0", "default_pg", (0, 1), True)
    newest = group.collectives[-1]
    assert (newest.seq, newest.operation, newest.elements, newest.line) == (3, "all_reduce", 8, "train.py:10")
    assert not newest.started and group.collectives[0].completed


def nccl_entry(record: int, seq: int, operation: str, *, p2p_seq: int = 0, done: bool = True,
               **more: Any) -> dict[str, Any]:
    """As PyTorch 2.10 and newer write it for NCCL without timing: what started is never noted, and of what waits
    nothing."""
    entry_of = entry(seq, operation, state="completed" if done else "scheduled", record=record)
    return {**entry_of, "p2p_seq_id": p2p_seq, "time_discovered_started_ns": None, "retired": done,
            "thread_id": "140203", "thread_name": "pt_autograd_0", **more}


def test_what_nccl_writes() -> None:
    fsdp = {"process_group": ("7", "mesh_fsdp")}
    entries = [
        nccl_entry(0, 1, "all_reduce"),
        nccl_entry(1, 1, "_all_gather_base", **fsdp, duration_ms=1.5),
        nccl_entry(2, 2, "all_gather_into_tensor_coalesced", **fsdp, input_sizes=[[4], [2, 3]]),
        nccl_entry(3, 1, "send 0->1", p2p_seq=1, is_p2p=True), nccl_entry(4, 1, "recv 0<-1", p2p_seq=1, is_p2p=True),
        nccl_entry(5, 1, "coalesced", p2p_seq=1, input_sizes=[], output_sizes=[]),
        nccl_entry(6, 3, "_reduce_scatter_base", done=False, **fsdp), nccl_entry(7, 2, "all_reduce", done=False)]
    whole = {**document(entries, groups={"7": [0, 1]}), "comm_lib_version": "2.27.5",
             "nccl_comm_state": {"0x1": {"rank": "0"}},
             "pg_status": {"0": {"last_enqueued_collective": "2", "last_started_collective": "-1",
                                 "last_completed_collective": "1"}}}
    for data in (pickle.dumps(whole, 2), json.dumps(whole).encode()):
        read = read_dump(data, 0, "x", 5.0)
        of_all, mesh = read.groups
        assert [(c.seq, c.operation, c.ended) for c in of_all.collectives] == [
            (1, "all_reduce", True), (2, "all_reduce", False)]
        assert (mesh.name, mesh.description, mesh.ranks) == ("7", "mesh_fsdp", (0, 1))
        assert [(c.seq, c.elements, c.started) for c in mesh.collectives] == [
            (1, 8, True), (2, 10, True), (3, 8, False)]
        assert read.messages == 3


def test_a_json_document_of_an_empty_recorder_has_no_entries() -> None:
    read = read_dump(b'{"version": "2.10", "pg_config": {"0": {"ranks": "[0, 1]"}}, "pg_status": {}}', 0, "x", 5.0)
    assert read.only_active and not read.whole and read.groups[0].ranks == (0, 1)


def test_what_a_rank_starts_is_not_the_rank(with_torch: None) -> None:
    script = ("import subprocess, sys\n"
              "child = subprocess.Popen([sys.executable, '-c', 'print(flush=True); input()'])\n"
              "print(child.pid, flush=True)\ninput()")
    with subprocess.Popen([sys.executable, "-c", script], env={"RANK": "0"}, stdin=subprocess.PIPE,
                          stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as parent:
        assert parent.stdout is not None
        # The child's own line as well: until its program has begun it has no environment to read.
        lines = [parent.stdout.readline() for _ in range(2)]
        child = next(int(line) for line in lines if line.strip())
        assert flight_recorder.jobs_of([parent.pid, child])[0] == [[parent.pid]]
        assert flight_recorder.jobs_of([child])[0] == [[child]]  # the one that is named
        parent.communicate("\n\n")


@pytest.mark.parametrize(("name", "rank"), [
    ("nccl_trace_rank_12", 12), ("/a/b7/rank_3.json", 3), ("comm_lib_trace_rank_0", 0), ("dump-5.pickle.bak", 5)])
def test_the_rank_is_in_the_name(name: str, rank: int) -> None:
    assert rank_of_file(name) == rank
    with pytest.raises(GputopError, match="rank number"):
        rank_of_file("trace")


@pytest.mark.parametrize(("damaged", "words"), [
    ({}, "not a PyTorch"), ({"version": 2}, "not a PyTorch"), ({"version": "1.5", "entries": []}, "gputop reads 2.x"),
    ({"version": "2.1"}, "no readable entries"), ({"version": "2.1", "entries": "x"}, "no readable entries"),
    ({"version": "2.1", "entries": [1]}, "damaged"), ({"version": "2.1", "entries": [{}]}, "damaged"),
    ({"version": "2.1", "entries": [{**entry(1), "process_group": "0"}]}, "damaged"),
    ({"version": "2.1", "entries": [{**entry(1), "collective_seq_id": -1}]}, "damaged"),
    ({"version": "2.1", "entries": [{**entry(1), "collective_seq_id": True}]}, "damaged"),
    ({"version": "2.1", "entries": [{**entry(1), "collective_seq_id": 1 << 100}]}, "damaged"),
    ({"version": "2.1", "entries": [{**entry(1), "profiling_name": None}]}, "damaged"),
])
def test_damaged_dumps_are_refused(damaged: Any, words: str) -> None:
    for data in (pickle.dumps(damaged, 2), json.dumps(damaged).encode()):
        with pytest.raises(GputopError, match=words):
            read_dump(data, 0, "x", 5.0)


@pytest.mark.parametrize("odd", [
    {"input_sizes": None}, {"input_sizes": [[-1]]}, {"input_sizes": [8]}, {"input_sizes": [["8"]]}, {"frames": 3},
    {"frames": [3, {"filename": 3}, {"filename": "a.py", "line": "x"}]}, {"time_created_ns": "now"},
    {"record_id": "x"}, {"profiling_name": "\x1b[2J"}])
def test_what_is_odd_in_an_entry_is_unknown(odd: dict[str, Any]) -> None:
    read = read_dump(pickle.dumps(document([{**entry(1), **odd}]), 2), 0, "x", 5.0)
    assert "\x1b" not in read.groups[0].collectives[0].operation


def test_members_that_are_no_list_of_numbers_are_unknown() -> None:
    for ranks in ("[0, 1", "[" + "9" * 100 + "]", [0, 1], "", "[]"):
        damaged = {**document([entry(1)]), "pg_config": {"0": {"ranks": ranks}, "": {"ranks": "[0]"}, "x": 3}}
        assert read_dump(pickle.dumps(damaged, 2), 0, "x", 5.0).groups[0].ranks is None


def test_what_all_entries_share_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pickle of 120 kB holds 50,000 entries with 10,000 sizes of 64 dimensions each: hours, looked at one by one."""
    looked: list[object] = []
    for name in ("_product", "_line"):
        real = getattr(flight_recorder, name)
        monkeypatch.setattr(flight_recorder, name, lambda own, real=real: looked.append(own) or real(own))
    count = flight_recorder._Entries._count
    monkeypatch.setattr(flight_recorder._Entries, "_count", lambda self, own: looked.append(own) or count(self, own))
    shared = {**entry(1), "input_sizes": [[2] * 3] * 10_000, "frames": [{"filename": "a.py", "line": 7}] * 200}
    data = pickle.dumps({"version": "2.10", "entries": [shared, {**shared, "collective_seq_id": 2}] * 100}, 2)
    assert len(data) < 50_000
    (group,) = read_dump(data, 0, "x", 5.0).groups
    assert {(own.elements, own.line) for own in group.collectives} == {(80_000, "a.py:7")}
    assert len(looked) == 3


def test_a_list_of_sizes_that_is_a_size_elsewhere_is_not_mixed_up() -> None:
    sizes = [3, 4]
    entries = [{**entry(1), "input_sizes": sizes}, {**entry(2), "input_sizes": [sizes]}]
    (group,) = read_dump(pickle.dumps({"version": "2.10", "entries": entries}, 2), 0, "x", 5.0).groups
    assert [own.elements for own in group.collectives] == [None, 12]


def test_one_list_of_members_in_very_many_groups_is_refused() -> None:
    ranks = str([*range(50_000)])
    data = pickle.dumps({"version": "2.10", "entries": [],
                         "pg_config": {str(n): {"ranks": ranks} for n in range(1000)}}, 2)
    assert len(data) < 400_000
    with pytest.raises(GputopError, match="more group members than gputop can read"):
        read_dump(data, 0, "x", 5.0)


def test_names_of_megabytes_are_cut_before_they_are_looked_at() -> None:
    long = {**entry(1), "profiling_name": "nccl:" + "x" * 3_000_000 + ":y", "frames": [
        {"filename": "/" * 3_000_000 + "site-packages/torch/a.py", "line": 1}]}
    (group,) = read_dump(pickle.dumps({"version": "2.10", "entries": [long]}, 2), 0, "x", 5.0).groups
    (collective,) = group.collectives
    assert collective.operation == "x" * 200 and len(collective.line) < 210


def test_files_that_are_named(tmp_path: Path) -> None:
    paths = [save(tmp_path / f"rank_{rank}", history(2)) for rank in (0, 1)]
    os.mkfifo(tmp_path / "rank_2")
    (tmp_path / "rank_3").write_bytes(b"cos\nsystem\n(S'true'\ntR.")
    found = read_files([*paths, str(tmp_path / "rank_2"), str(tmp_path / "rank_3"), str(tmp_path / "rank_4")])
    assert [dump.rank for dump in found.dumps] == [0, 1]
    pipe, hostile, missing = found.problems
    assert "a pipe" in pipe and "GLOBAL" in hostile and "No such file" in missing
    with pytest.raises(GputopError, match="two dumps for rank 0"):
        read_files([paths[0], save(tmp_path / "again_0", [])])


@pytest.mark.parametrize("variable", ["TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE", "XDG_CACHE_HOME"])
def test_the_environment_of_a_process_names_its_dump(variable: str, tmp_path: Path, with_torch: None,
                                                     monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flight_recorder, "_OLD_DEFAULT", str(tmp_path / "none_"))
    prefix = tmp_path / "torch" / "comm_lib_trace_rank_"
    value = str(tmp_path) if variable == "XDG_CACHE_HOME" else str(prefix)
    prefix.parent.mkdir()
    with processes({"RANK": "0", variable: value}, {"RANK": "1", variable: value}) as pids:
        (nothing,) = read_of_processes(pids)
        assert not nothing.dumps and "no dump such as" in nothing.problems[0]
        save(Path(f"{prefix}0"), history(2))
        (found,) = read_of_processes(pids)
    assert [dump.rank for dump in found.dumps] == [0] and f"process {pids[1]}: no dump" in found.problems[0]


def test_dumps_that_are_not_taken_from_a_process(tmp_path: Path, with_torch: None,
                                                 monkeypatch: pytest.MonkeyPatch) -> None:
    def problem(environ: Mapping[str, str]) -> str:
        with processes(environ) as pids:
            (found,) = read_of_processes(pids)
        assert not found.dumps
        return found.problems[0]

    prefix = str(tmp_path / "d_")
    environ = {"RANK": "0", "TORCH_FR_DUMP_TEMP_FILE": prefix}
    real = save(tmp_path / "elsewhere", history(2))
    Path(f"{prefix}0").symlink_to(real)
    assert "symbolic link" in problem(environ)
    Path(f"{prefix}0").unlink()
    os.mkfifo(f"{prefix}0")
    assert "a pipe" in problem(environ)
    Path(f"{prefix}0").unlink()
    save(Path(f"{prefix}0"), history(2))
    os.utime(f"{prefix}0", (1e9, 1e9))
    assert "an earlier run" in problem(environ)
    (tmp_path / "link").symlink_to(tmp_path)
    assert "cannot open its dump" in problem({**environ, "TORCH_FR_DUMP_TEMP_FILE": f"{tmp_path}/link/d_"})
    assert "cannot open its dump" in problem({**environ, "TORCH_FR_DUMP_TEMP_FILE": f"{tmp_path}/x/../d_"})
    assert "relative" in problem({**environ, "TORCH_FR_DUMP_TEMP_FILE": "d_"})
    assert "not set a rank" in problem({"TORCH_FR_DUMP_TEMP_FILE": prefix})
    assert "not set a rank" in problem({**environ, "RANK": "9" * 5000}), "more digits than int() takes"
    monkeypatch.setattr(flight_recorder, "owner", lambda pid, proc: os.getuid() + 1)
    assert "another user" in problem(environ)


def test_jobs_are_told_apart(tmp_path: Path, with_torch: None) -> None:
    def environ(rank: int, port: int, folder: str) -> dict[str, str]:
        (tmp_path / folder).mkdir(exist_ok=True)
        return {"RANK": str(rank), "MASTER_ADDR": "a", "MASTER_PORT": str(port),
                "TORCH_FR_DUMP_TEMP_FILE": str(tmp_path / folder / "d_")}

    def read(*environs: dict[str, str]) -> tuple[Dumps, ...]:
        with processes(*environs) as pids:
            for own in environs:
                save(Path(own["TORCH_FR_DUMP_TEMP_FILE"] + own["RANK"]), history(2))
            return read_of_processes(pids)

    assert [[dump.rank for dump in own.dumps] for own in read(
        environ(0, 1, "a"), environ(1, 1, "a"), environ(0, 2, "b"))] == [[0, 1], [0]]
    shared = read(environ(0, 1, "a"), environ(0, 2, "a"))
    assert all(not own.dumps and "the same file" in own.problems[0] for own in shared)
    (doubled,) = read(environ(0, 1, "a"), environ(0, 1, "b"))
    assert not doubled.dumps and "several processes are rank 0" in doubled.problems[0]


def test_processes_without_pytorch_are_left_out() -> None:
    assert read_of_processes([os.getpid(), 2 ** 22 + 1]) == ()

"""Which processes are the ranks of a job on this node."""

from __future__ import annotations

from pathlib import Path

import pytest

from gputop.core.errors import GputopError
from gputop.launch import target

RANK = {"MASTER_ADDR": "n1", "MASTER_PORT": "29500", "RANK": "5", "WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"}


def _process(proc: Path, pid: int, parent: int, **change: str) -> None:
    folder = proc / str(pid)
    folder.mkdir()
    environ = {**RANK, **change}
    (folder / "environ").write_bytes(b"".join(f"{name}={value}\0".encode() for name, value in environ.items()))
    (folder / "stat").write_text(f"{pid} (python) S {parent} " + " ".join(["0"] * 20))


def test_where_the_ranks_meet_is_the_job_s_identity() -> None:
    assert target.meeting_address(RANK) == "n1:29500"
    assert target.ranks_elsewhere(RANK) == 8 and target.ranks_elsewhere({**RANK, "WORLD_SIZE": "8"}) == 0
    for change in ({"MASTER_ADDR": "localhost"}, {"MASTER_ADDR": "n1; rm x"}, {"MASTER_ADDR": "-oProxyCommand=x"},
                   {"RANK": ""}, {"MASTER_PORT": "9" * 9}, {"MASTER_ADDR": "$(x)"}):
        assert target.meeting_address({**RANK, **change}) is None
        assert target.ranks_elsewhere({**RANK, **change}) == 0
    assert target.ranks_elsewhere({**RANK, "LOCAL_WORLD_SIZE": "x"}) == 0


def test_ranks_are_found_by_it_and_their_children_are_not(tmp_path: Path, monkeypatch) -> None:
    _process(tmp_path, 10, 1, RANK="")  # the launcher
    _process(tmp_path, 12, 10, RANK="1")
    _process(tmp_path, 11, 10, RANK="0")
    _process(tmp_path, 13, 12, RANK="1")  # a worker of the DataLoader
    _process(tmp_path, 14, 1, RANK="0", MASTER_PORT="29501")  # of another job
    _process(tmp_path, 15, 10, RANK="2")  # has not imported torch
    monkeypatch.setattr(target, "is_pytorch", lambda pid: pid != 15)
    assert target.find_ranks("n1:29500", tmp_path) == [11, 12]
    assert target.meeting_addresses([], tmp_path) == {"n1:29500", "n1:29501"}
    assert target.meeting_addresses([14], tmp_path) == {"n1:29501"}


def test_ranks_of_several_users_are_nobody_s_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root sees the environment of all users, and anybody may claim to be a rank of the job."""
    _process(tmp_path, 11, 1, RANK="0")
    _process(tmp_path, 12, 1, RANK="1")
    monkeypatch.setattr(target, "is_pytorch", lambda pid: True)
    users = {11: 1000, 12: 1000}
    monkeypatch.setattr(target, "owner", lambda pid, proc: users[pid])
    assert target.find_ranks("n1:29500", tmp_path) == [11, 12]
    users[12] = 1001
    with pytest.raises(GputopError, match=r"several users \(uid 1000, 1001\)"):
        target.find_ranks("n1:29500", tmp_path)

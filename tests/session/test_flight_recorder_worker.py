"""The flight recorder's dumps, read in a process of its own for the monitor."""

from __future__ import annotations

from pathlib import Path

import pytest

from gputop.ranks import flight_recorder
from gputop.session import flight_recorder_worker
from gputop.session.flight_recorder_worker import read_in_worker
from tests.ranks.flight_dumps import entry, history, processes, save


@pytest.fixture
def with_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flight_recorder, "loaded_frameworks", lambda maps: frozenset({"pytorch"}))


def test_processes_without_pytorch_have_no_lines() -> None:
    with processes({"RANK": "0"}) as pids:
        assert read_in_worker(pids) == ()


def test_the_worker_answers_with_lines(tmp_path: Path, with_torch: None, capsys: pytest.CaptureFixture[str]) -> None:
    prefix = str(tmp_path / "d_")
    with processes(*({"RANK": str(rank), "TORCH_FR_DUMP_TEMP_FILE": prefix} for rank in (0, 1))) as pids:
        save(Path(f"{prefix}0"), history(3, then=[entry(4, state="started", line=20)]))
        save(Path(f"{prefix}1"), history(3))
        assert flight_recorder_worker.main(list(map(str, pids))) == 0
    assert "Rank 1 did not launch all_reduce 4" in capsys.readouterr().out


def test_a_worker_that_does_not_answer_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flight_recorder_worker, "_TIMEOUT_S", 0.0)
    (line,) = read_in_worker([1])
    assert "not asked" in line

"""Captures of PyTorch jobs in the list: their traces have another ending than those of servers."""

from __future__ import annotations

from pathlib import Path

from gputop.session.auto_capture import mark_removable, remove_oldest
from gputop.session.capture.saved_captures import delete_capture, rename_capture, saved_captures


def _run(logdir: Path, name: str) -> Path:
    run = logdir / "plugins" / "profile" / name
    run.mkdir(parents=True)
    (run / "node.pt.trace.json").write_text("{}")
    return run


def test_a_capture_of_a_pytorch_job_is_listed_named_and_deleted(tmp_path: Path) -> None:
    run = _run(tmp_path, "2026_01_01_00_00_00")
    (one,) = saved_captures(tmp_path)
    rename_capture(one.record, "before")
    assert [capture.name for capture in saved_captures(tmp_path)] == ["before"]
    delete_capture(one.record)
    assert not (run / "node.pt.trace.json").exists() and not list(saved_captures(tmp_path))


def test_old_automatic_captures_of_pytorch_jobs_are_removed(tmp_path: Path) -> None:
    runs = [_run(tmp_path, f"2026_01_01_00_00_0{n}") for n in range(3)]
    for n, run in enumerate(runs):
        mark_removable(run, "a dip", 1e9 + n)
    remove_oldest(tmp_path, max_runs=1)
    assert [run.exists() for run in runs] == [False, False, True]

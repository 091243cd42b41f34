"""The captures of a logdir as a list: from what lies beside the traces, and deleted with nothing else."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

import pytest

from gputop.core.codec import convert
from gputop.core.errors import GputopError
from gputop.core.findings import Finding
from gputop.profiler.capture.records import CaptureRecord
from gputop.session.auto_capture import mark_removable, remove_oldest
from gputop.session.capture import saved_captures
from gputop.session.capture.saved_captures import NOT_ANALYZED, delete_capture, listed, rename_capture, run_of
from gputop.trace.readers.capture_file import FILE, CaptureFile, write_capture
from tests.analyses import make_analysis
from tests.comparison.sides import finding
from tests.fakes import StillSession

SAID = (convert(finding("input_bound", 0.4), Finding),)


def run(logdir: Path, name: str, *traces: str, about: CaptureFile | None = None, time_s: float = 1e9) -> Path:
    folder = logdir / "plugins" / "profile" / name
    folder.mkdir(parents=True)
    for trace in traces:
        (folder / trace).write_bytes(b"no trace")
        os.utime(folder / trace, (time_s, time_s))
    if about is not None:
        write_capture(folder, about)
    return folder


def test_the_newest_first_with_what_is_known_of_each_and_none_is_read(tmp_path: Path) -> None:
    vm = "vm.xplane.pb"
    run(tmp_path, "2026_01_01_00_00_01", vm, about=CaptureFile(
        files={vm: None}, findings=SAID, address="a:1", job="train.py", time_s=2e9, step_s=0.5))
    run(tmp_path, "2026_01_01_00_00_02", vm)
    run(tmp_path, "2026_01_01_00_00_03", "a.xplane.pb", "b.xplane.pb", about=CaptureFile(findings=()))
    run(tmp_path, "2026_01_01_00_00_04", vm, about=CaptureFile(files={"other.xplane.pb": None}, findings=SAID))
    run(tmp_path, "2026_01_01_00_00_05", ".vm.xplane.pb", "overview.json")
    run(tmp_path / "black-box", "2026_01_01_00_00_06", vm)
    (tmp_path / "plugins" / "profile" / "2026_01_01_00_00_07").write_text("no folder")
    found = list(saved_captures.saved_captures(tmp_path))
    assert [run_of(one.record).name[-1] for one in found] == list("64321")
    assert [one.first for one in found] == [NOT_ANALYZED, NOT_ANALYZED, "no finding", NOT_ANALYZED, SAID[0].title]
    record = found[-1].record
    assert (record.job, record.address, record.time_s, record.step_s) == ("train.py", "a:1", 2e9, 0.5)
    assert found[0].record.time_s == 1e9, "that of the file"
    assert found[2].record.path.name == "2026_01_01_00_00_03", "several workers: the run's folder"
    assert list(saved_captures.saved_captures(tmp_path / "none")) == []


def test_the_scripts_of_this_users_captures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    vm = "vm.xplane.pb"
    for i, job in enumerate(("", "PyTorch 2.13.0: /usr/bin/python3 /home/a/train.py --lr 1", "python eval.py")):
        run(tmp_path, f"2026_01_01_00_00_0{i}", vm, about=CaptureFile(files={vm: None}, job=job))
    assert saved_captures.captured_scripts(tmp_path) == {"/home/a/train.py", "eval.py"}
    monkeypatch.setattr("os.geteuid", lambda: os.getuid() + 1)
    assert saved_captures.captured_scripts(tmp_path) == set(), "of another user: they name no job that is known here"


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="needs a file system that takes any time")
def test_a_time_that_no_calendar_has_ends_no_list() -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as logdir:
        run(Path(logdir), "r", "vm.xplane.pb", time_s=2**60)
        (found,) = saved_captures.saved_captures(Path(logdir))
    assert time.localtime(found.record.time_s).tm_year in (9999, 10000)


def test_only_the_newest_runs_are_looked_at_and_a_large_file_is_left_alone(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saved_captures, "MAX_RUNS", 2)
    monkeypatch.setattr(saved_captures, "_MAX_ABOUT_BYTES", 100)
    for i in range(4):
        run(tmp_path, f"r{i}", "vm.xplane.pb", about=CaptureFile(files={"vm.xplane.pb": None}, job="x" * 200))
    assert [(run_of(one.record).name, one.record.job) for one in saved_captures.saved_captures(tmp_path)] == [
        ("r3", ""), ("r2", "")]


def test_deleting_takes_what_gputop_wrote_and_leaves_the_rest(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("keep")
    mine, shared = run(tmp_path, "r1", "vm.xplane.pb", about=CaptureFile()), run(tmp_path, "r2", "vm.xplane.pb")
    (shared / "notes.txt").write_text("keep")
    for one in list(saved_captures.saved_captures(tmp_path)):
        delete_capture(one.record)
    assert not mine.exists() and [p.name for p in shared.iterdir()] == ["notes.txt"]
    delete_capture(CaptureRecord("", mine / "vm.xplane.pb", 0.0, 0.0, 0.0))  # it is gone: nothing to do
    (tmp_path / "elsewhere" / "r").mkdir(parents=True)
    (tmp_path / "elsewhere" / "r" / FILE).write_text("keep")
    (tmp_path / "plugins" / "profile" / "link").symlink_to(tmp_path / "elsewhere" / "r")
    with pytest.raises(GputopError, match="cannot delete"):
        delete_capture(CaptureRecord("", tmp_path / "plugins" / "profile" / "link", 0.0, 0.0, 0.0))
    assert (tmp_path / "elsewhere" / "r" / FILE).exists()


def test_an_opened_capture_is_shown_as_the_last_one_and_a_deleted_one_is_forgotten() -> None:
    session = StillSession()
    old, new = (CaptureRecord("a:1", Path(f"{name}/vm.xplane.pb"), time_s, 1.0, 1.0, analysis=make_analysis())
                for name, time_s in (("old", 1.0), ("new", 2.0)))
    session.capture_ended(new, ())
    session.open_capture(old)
    results = session.results
    assert results.last_capture is old and results.captures == (old, new) and results.captures_this_run == (new,)
    unread = CaptureRecord("", Path("unread/vm.xplane.pb"), 3.0, 0.0, 0.0)
    session.compare_captures(unread, new)
    assert results.captures == (old, new, unread) and results.baseline is unread and results.last_capture is old
    session.drop_capture(old)
    assert session.results.last_capture is new and session.results.captures == (new, unread)
    session.drop_capture(unread)
    assert session.results.baseline is None
    session.drop_capture(new)
    assert results.last_capture is None and results.findings == () and results.captures_this_run == ()


def test_a_capture_that_could_not_be_analyzed_says_so() -> None:
    record = CaptureRecord("a:1", Path("x.xplane.pb"), 0.0, 1.0, 1.0, problem=GputopError("no events", ""))
    assert listed(record).first == "not analyzed: no events"


def test_captures_of_pytorch_jobs_are_listed_named_deleted_and_removed_by_their_age(tmp_path: Path) -> None:
    """Their traces have another ending than those of servers."""
    runs = [run(tmp_path, f"2026_01_01_00_00_0{n}", "node.pt.trace.json") for n in range(4)]
    for n, folder in enumerate(runs[:3]):
        mark_removable(folder, "a dip", 1e9 + n)
    remove_oldest(tmp_path, max_runs=1)
    assert [folder.exists() for folder in runs] == [False, False, True, True]
    one, _ = saved_captures.saved_captures(tmp_path)
    rename_capture(one.record, "before")
    assert [capture.name for capture in saved_captures.saved_captures(tmp_path)] == ["before", ""]
    delete_capture(one.record)
    assert not (runs[3] / "node.pt.trace.json").exists() and len(list(saved_captures.saved_captures(tmp_path))) == 1


def test_a_name_stays_with_the_capture_and_is_found(tmp_path: Path) -> None:
    folder = run(tmp_path, "2026_01_01_00_00_00", "a.xplane.pb", about=CaptureFile(
        files={"a.xplane.pb": None}, address="h:1", job="train.py", step_s=0.25))
    [one] = saved_captures.saved_captures(tmp_path)
    rename_capture(one.record, " before\x1b[2J prefetch ")
    [named] = saved_captures.saved_captures(tmp_path)
    assert named.name == "before\ufffd[2J prefetch" and named.record == one.record, "all else stays"
    assert named.contains("PREFETCH") and named.contains("train") and not named.contains("evaluation")
    rename_capture(one.record, "")
    assert [again.name for again in saved_captures.saved_captures(tmp_path)] == [""]
    (folder / "gputop.capture.json").write_text("not ours")
    with pytest.raises(GputopError, match="cannot name"):
        rename_capture(one.record, "x")
    assert (folder / "gputop.capture.json").read_text() == "not ours"

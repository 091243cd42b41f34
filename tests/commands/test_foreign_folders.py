"""What root writes for long, or at a place gputop chose, goes through no link of a user."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from gputop.commands.run import _become
from gputop.core.errors import EXIT_USAGE, GputopError
from gputop.core.files import write_new_files
from gputop.launch.job import StartedJob, open_log
from gputop.replay.format import RecordingWriter, header
from gputop.replay.parts import Bounds, PartsWriter, Rotation
from tests.fakes import node_sample

_WRITERS: dict[str, Callable[[Path], object]] = {
    "record --rotate": lambda folder: PartsWriter(folder, Rotation(keep=Bounds(parts=1))).append(node_sample(0, 1)),
    "record": lambda folder: RecordingWriter(folder / "a.rec").close(),
    "the key s": lambda folder: write_new_files(folder, "a", {".json": b"{}"}),
    "run": lambda folder: StartedJob(["true"], os.environ, folder / "a.log").ended.wait(60),
    "run --headless": lambda folder: os.close(open_log(folder / "a.log")),
}
_OLD = "gputop-20200101T000000Z.rec"


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to make files of another user")
@pytest.mark.parametrize("below", ["", "new"])
@pytest.mark.parametrize("what", _WRITERS)
def test_root_refuses_a_folder_of_another_user_s_and_leaves_its_target(
        what: str, below: str, tmp_path: Path) -> None:
    (roots := tmp_path / "roots").mkdir()
    (roots / _OLD).write_bytes(header())  # --rotate removed such parts
    (home := tmp_path / "home").mkdir()
    (home / "out").symlink_to(roots)
    os.chown(home, 12345, -1)
    os.chown(home / "out", 12345, -1, follow_symlinks=False)
    with pytest.raises(GputopError, match="not safe to write to") as caught:
        _WRITERS[what](home / "out" / below)
    assert caught.value.exit_code == EXIT_USAGE and "belongs to another user" in caught.value.message
    assert [path.name for path in roots.iterdir()] == [_OLD]


@pytest.mark.parametrize("what", _WRITERS)
def test_new_folders_are_private(what: str, tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        _WRITERS[what](tmp_path / "a" / "b")
    finally:
        os.umask(before)
    assert [stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "a", tmp_path / "a" / "b")] == [0o700, 0o700]
    assert {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "a" / "b").iterdir()} == {0o600}


def test_a_job_does_not_start_where_its_output_has_no_place(tmp_path: Path) -> None:
    (tmp_path / "taken").touch()
    with pytest.raises(GputopError, match="cannot write the job's output"):
        _become("/bin/true", ["true"], {}, tmp_path / "taken")

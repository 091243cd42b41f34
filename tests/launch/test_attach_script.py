"""The script for Python 3.14 goes into the job's own /tmp, whatever the job's user has put there."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gputop.core.errors import GputopError
from gputop.launch.attach import _script
from gputop.launch.target import Target
from tests.processes import once_ready

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to make a process with another root")
_USER = 12345


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "root").mkdir()
    return tmp_path / "root"


@pytest.fixture
def job(root: Path) -> Iterator[Target]:
    """A process of another user in a root of its own."""
    code = f"import os, sys; os.chroot(sys.argv[1]); os.setuid({_USER}); print('ready', flush=True); input()"
    with once_ready(sys.executable, "-c", code, str(root)) as process:
        yield Target(process.pid, "job", _USER, "user", 0, True)


def test_it_is_there_for_the_job_alone_and_goes_away(root: Path, job: Target) -> None:
    (root / "tmp").mkdir()
    (root / "tmp").chmod(0o1777)
    with _script(job, "text") as script:
        (file,) = (root / "tmp").iterdir()
        assert script == Path("/tmp") / file.name and file.read_text() == "text"
        assert file.stat().st_uid == _USER and file.stat().st_mode & 0o777 == 0o600
    assert list((root / "tmp").iterdir()) == []


@pytest.mark.parametrize("target", ["/{host}", "../host", "/proc/self/root/{host}"])
def test_a_link_for_tmp_does_not_lead_out_of_the_job_s_root(
        root: Path, job: Target, tmp_path: Path, target: str) -> None:
    host = tmp_path / "host"
    host.mkdir()
    host.chmod(0o1777)  # a folder such as the host's /tmp: that user's rights alone would do
    (root / "tmp").symlink_to(target.format(host=str(host).lstrip("/")))
    with pytest.raises(GputopError, match="cannot write a script to /tmp") as caught, _script(job, "text"):
        pass
    assert "must not be a link" in caught.value.fix and list(host.iterdir()) == []

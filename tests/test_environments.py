"""Capturing from, and installed into, environments with another TensorFlow and with JAX."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from gputop.analysis.steps.steps import find_steps
from gputop.profiler.discovery import Finder
from gputop.trace.readers.load import load
from tests import environments
from tests.environments import JAX, TENSORFLOW_215, Environment, environment
from tests.jax_job import jax_job
from tests.profiler.capturing import capture
from tests.tf_job import start_tf_job


@pytest.fixture(scope="module")
def tensorflow() -> Environment:
    return environment(TENSORFLOW_215)


@pytest.fixture(scope="module")
def jax() -> Environment:
    return environment(JAX)


def check_inside(place: Environment, left_out: tuple[str, ...] = ()) -> None:
    """gputop of that environment breaks nobody's requirements, and is whole."""
    missing = [f" requires {name}, which is not installed." for name in left_out]
    said = place.run("-m", "pip", "check").stdout.splitlines()
    broken = [line for line in said if not line.endswith(tuple(missing)) or line.startswith("gputop")]
    assert said and broken in ([], ["No broken requirements found."])
    assert (place.python.parents[1] / "share/man/man1/gputop.1").is_file()
    assert "_gputop" in place.run("-m", "gputop", "completion", "zsh").stdout


def capture_inside(place: Environment, address: str, logdir: Path) -> None:
    """gputop of that environment captures."""
    done = place.run("-m", "gputop", "capture", "--attach", address, "--seconds", "1", "--json",
                     "--logdir", str(logdir))
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["schema"] == "gputop.analysis/1" and document["steps"]["count"] > 2
    assert Path(document["capture"]["path"]).is_file()


@pytest.mark.tensorflow
def test_tensorflow_215_writes_to_its_own_disk(tensorflow: Environment, tmp_path: Path) -> None:
    check_inside(tensorflow, TENSORFLOW_215.left_out)
    with start_tf_job("slow input", threads=1, python=str(tensorflow.python)) as job:
        assert job.versions["tensorflow"].startswith("2.15.")
        result = capture(job.address, seconds=1, logdir=tmp_path / "here", pid=job.pid)
        (server,) = [s for s in Finder().find([job.pid]).servers if s.pid == job.pid]
        capture_inside(tensorflow, job.address, tmp_path / "inside")
    assert result.path.is_relative_to(tmp_path / "here")
    steps = find_steps(load([result.path]))
    assert steps is not None and steps.count > 2
    assert (server.framework, server.version) == ("TensorFlow", job.versions["tensorflow"])


@pytest.mark.tensorflow
def test_jax_hands_the_trace_over(jax: Environment, tmp_path: Path) -> None:
    check_inside(jax)
    with jax_job(jax.python) as (address, pid, version):
        result = capture(address, seconds=1, logdir=tmp_path / "here", pid=pid)
        (server,) = [s for s in Finder().find([pid]).servers if s.pid == pid]
        capture_inside(jax, address, tmp_path / "inside")
    steps = find_steps(load([result.path]))
    assert steps is not None and steps.count > 2
    assert (server.framework, server.version) == ("JAX", version)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """What pip is run in: the tests' own Python, and an index that is not there."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(sys.executable)
    return tmp_path


def test_without_an_index_a_test_is_skipped(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:1/simple")
    for name in ("PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "PIP_NO_INDEX"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(pytest.skip.Exception, match="no package index can be reached"):
        environments._install(folder, "gputop-is-not-there==0")


def test_with_one_what_cannot_be_installed_fails(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environments, "index_answers", lambda _: True)
    (folder / "pyproject.toml").write_text("no project at all")
    with pytest.raises(pytest.fail.Exception, match="cannot be installed into"):
        environments._install(folder, "--no-deps", str(folder))

"""gputop is installed from its wheel and from its sdist, also on a machine without internet, as the page says."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email.parser import Parser
from importlib.util import find_spec
from pathlib import Path

import pytest

from gputop.core.version import __version__
from tests import environments
from tools import make_completion

ROOT = Path(__file__).parents[1]
_BUILD = "import os, sys, setuptools.build_meta as b; os.chdir(sys.argv[1]); getattr(b, sys.argv[2])(sys.argv[3])"
_PARTS = ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE", "gputop", "tools")


def _needs_build() -> None:
    """Skip without what a build needs; setuptools is not imported, as it replaces distutils for the whole process."""
    for module in ("setuptools", "shtab", "argparse_manpage"):
        if find_spec(module) is None:
            pytest.skip(f"{module} is not installed, which a build needs")


def _built(source: Path, what: str, folder: Path) -> Path:
    subprocess.run([sys.executable, "-c", _BUILD, str(source), f"build_{what}", str(folder)], check=True,
                   capture_output=True, timeout=300)
    (file,) = folder.glob("*.whl" if what == "wheel" else "*.tar.gz")
    return file


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sdist of these sources, unpacked: what a machine that builds from it has."""
    _needs_build()
    folder = tmp_path_factory.mktemp("sdist")
    source = folder / "source"
    source.mkdir()
    for part in _PARTS:
        copy, ignored = source / part, shutil.ignore_patterns("__pycache__", "completion")
        shutil.copytree(ROOT / part, copy, ignore=ignored) if (ROOT / part).is_dir() else shutil.copy(ROOT / part, copy)
    with tarfile.open(_built(source, "sdist", folder / "dist")) as packed:
        packed.extractall(folder)
    return folder / f"gputop_tf-{__version__}"


def test_the_wheel_of_the_sdist_has_each_file_of_the_package(unpacked: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(_built(unpacked, "wheel", tmp_path)) as wheel:
        names = set(wheel.namelist())
        described = Parser().parsestr(wheel.read(f"gputop_tf-{__version__}.dist-info/METADATA").decode())
    listed = subprocess.run(["git", "ls-files", "gputop"], cwd=ROOT, capture_output=True, text=True)
    assert {*listed.stdout.split()} <= names, "a file of gputop/ is not in the wheel: package-data in pyproject.toml"
    assert {"gputop/SKILL.md", "gputop/completion/build.txt"} <= names
    assert [name for name in names if name.endswith("share/man/man1/gputop.1")]
    assert described["Author"] and len(described.get_all("Project-URL", ())) >= 3
    links = re.findall(r"\]\(([^)]+)\)", described.get_payload())
    assert len(links) > 20 and all(link.startswith("https://") for link in links), "an index has no files of ours"


def test_it_is_installed_without_internet_as_the_page_says(unpacked: Path, tmp_path: Path,
                                                           monkeypatch: pytest.MonkeyPatch) -> None:
    page = (ROOT / "docs" / "start" / "install.md").read_text()
    collect, install = re.findall(r"^pip ((?:wheel|install --no-index) .*)$", page, re.M)
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path)], check=True, timeout=120)
    monkeypatch.chdir(unpacked)
    environments._pip(tmp_path, *collect.split())
    monkeypatch.chdir(tmp_path)
    shutil.move(unpacked / "wheels", tmp_path)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    for name in ("PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "PIP_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    environments._pip(tmp_path, *install.split())
    for words, expected in ((("--version",), f"gputop {__version__}\n"), (("skill",), "---\nname: gputop"),
                            (("completion", "man"), ".TH"), (("snapshot", "--demo", "--seconds", "0.2"), "SIMULATED")):
        done = subprocess.run([tmp_path / "bin" / "gputop", *words], capture_output=True, text=True, timeout=120)
        assert done.returncode == 0 and expected in done.stdout, done.stderr


def test_a_build_that_is_not_a_release_has_its_commit(tmp_path: Path) -> None:
    assert make_completion.build(tmp_path) == "commit unknown: built without git"

    def git(*words: str) -> str:
        name = ("-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false")
        return subprocess.run(["git", *name, *words], cwd=tmp_path, check=True, capture_output=True, text=True).stdout

    git("init", "-q")
    (tmp_path / "file").write_text("first")
    git("add", "file")
    git("commit", "-qm", "first")
    commit = git("rev-parse", "HEAD")[:12]
    assert make_completion.build(tmp_path) == f"commit {commit}, not a release"
    git("tag", f"v{__version__}")
    assert make_completion.build(tmp_path) == ""
    (tmp_path / "file").write_text("second")
    assert make_completion.build(tmp_path) == f"commit {commit} with changes, not a release"


def test_the_image_copies_what_a_build_needs(tmp_path: Path) -> None:
    """The Containerfile's own lines, without its base image: what it copies is built in a folder with nothing else."""
    copies = re.findall(r"^COPY (.*) /src/?(\S*)$", (ROOT / "Containerfile").read_text(), re.M)
    for parts, target in copies:
        for part in parts.split():
            copy = tmp_path / "src" / (target or part)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copytree(ROOT / part, copy) if (ROOT / part).is_dir() else shutil.copy(ROOT / part, copy)
    _needs_build()
    assert len(copies) == 3 and _built(tmp_path / "src", "wheel", tmp_path).name.startswith(f"gputop_tf-{__version__}")

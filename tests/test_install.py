"""gputop is installed: without internet as the page says, on Python 3.10 to 3.14 by pip, pipx and uv, from wheel and
sdist, and beside the pins of the frameworks.

``make test`` tries what takes seconds; ``make test-install``, which sets GPUTOP_TEST_INSTALL, all of it. What needs a
Python, a program or a package index that is not here skips. Pins are resolved by uv from what the index says of each
package: no framework is downloaded.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from datetime import date, timedelta
from email.parser import Parser
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

from gputop.core.version import __version__
from tests import environments
from tests.environments import checked, find_python, find_tool
from tools import make_completion

ROOT = Path(__file__).parents[1]
_BUILD = "import os, sys, setuptools.build_meta as b; os.chdir(sys.argv[1]); getattr(b, sys.argv[2])(sys.argv[3])"
_PARTS = ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE", "gputop", "tools")

PYTHONS = range(10, 15)
# Each with the Pythons that it has wheels for; the newest of those that have no version here.
FRAMEWORKS: dict[str, range] = {
    **{f"tensorflow==2.{minor}.*": range(10, 12) for minor in (13, 14, 15)},
    **{f"tensorflow==2.{minor}.*": range(10, 13) for minor in (16, 17, 18, 19)},
    **{f"tensorflow==2.{minor}.*": range(10, 14) for minor in (20, 21)},
    **{f"torch==2.{minor}.*": range(10, 14) for minor in (6, 7, 8)},
    **{f"torch==2.{minor}.*": PYTHONS for minor in range(9, 15)}, "torch==2.15.*": range(11, 15),
    "tensorflow[and-cuda]": range(10, 14), "torch": PYTHONS, "jax": PYTHONS, "jax[cuda12]": PYTHONS,
}
_OLDEST_AND_NEWEST = (("tensorflow==2.13.*", 10), ("tensorflow==2.21.*", 13), ("torch", 14), ("jax", 14))
# Textual wants a Rich and a Pygments of 2025; frameworks that bring older ones (Keras from 2024 on) take any.
_NEWER: dict[str, set[str]] = {"when it was released": {"rich", "pygments"}, "today": set()}
_ALL = bool(os.environ.get("GPUTOP_TEST_INSTALL"))
_PINS = [(name, minor) for name, pythons in FRAMEWORKS.items() for minor in pythons] if _ALL else _OLDEST_AND_NEWEST
_INSTALLS = [(minor, installer, kind) for minor in PYTHONS for installer in ("pip", "pipx", "uv")
             for kind in ("wheel", "sdist")] if _ALL else [(sys.version_info[1], "uv", "sdist")]


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


@pytest.fixture(scope="module")
def packed(unpacked: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The wheel and the sdist of these sources, as a release has them."""
    (sdist,) = unpacked.parent.glob("dist/*.tar.gz")
    return {"sdist": sdist, "wheel": _built(unpacked, "wheel", tmp_path_factory.mktemp("wheel"))}


def test_the_wheel_of_the_sdist_has_each_file_of_the_package(packed: dict[str, Path]) -> None:
    with zipfile.ZipFile(packed["wheel"]) as wheel:
        names = set(wheel.namelist())
        described = Parser().parsestr(wheel.read(f"gputop_tf-{__version__}.dist-info/METADATA").decode())
    listed = subprocess.run(["git", "ls-files", "gputop"], cwd=ROOT, capture_output=True, text=True)
    assert {*listed.stdout.split()} <= names, "a file of gputop/ is not in the wheel: package-data in pyproject.toml"
    assert {"gputop/SKILL.md", "gputop/completion/build.txt"} <= names
    assert [name for name in names if name.endswith("share/man/man1/gputop.1")]
    assert described["Author"] and len(described.get_all("Project-URL", ())) >= 3
    links = re.findall(r"\]\(([^)]+)\)", described.get_payload())
    assert len(links) > 20 and all(link.startswith("https://") for link in links), "an index has no files of ours"


@pytest.mark.skipif(not _ALL, reason="takes most of a minute: make test-install")
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


@pytest.mark.parametrize("minor, installer, kind", _INSTALLS)
def test_it_is_installed(minor: int, installer: str, kind: str, packed: dict[str, Path], tmp_path: Path) -> None:
    python, file = find_python(minor), packed[kind]
    if installer == "pip":
        checked(python, "-m", "venv", tmp_path)
        checked(tmp_path / "bin" / "pip", "install", "--disable-pip-version-check", "-q", file)
        program, environment = tmp_path / "bin" / "gputop", tmp_path
    elif installer == "pipx":
        checked(find_tool("pipx"), "install", "--python", python, file, PIPX_HOME=tmp_path,
                PIPX_BIN_DIR=tmp_path / "bin", PIPX_MAN_DIR=tmp_path / "man")
        program, environment = tmp_path / "bin" / "gputop", tmp_path / "venvs" / "gputop-tf"
    else:
        checked(find_tool("uv"), "tool", "install", "-q", "--no-python-downloads", "--python", python, file,
                UV_TOOL_DIR=tmp_path, UV_TOOL_BIN_DIR=tmp_path / "bin")
        program, environment = tmp_path / "bin" / "gputop", tmp_path / "gputop-tf"
    version = checked(program, "--version")
    assert version.startswith(f"gputop {__version__}\n") and f"Python 3.{minor}." in version
    assert checked(program, "skill").startswith("---\nname: gputop")
    assert ".TH" in checked(program, "completion", "man") and "complete" in checked(program, "completion", "bash")
    assert (environment / "share" / "man" / "man1" / "gputop.1").is_file()
    assert "SIMULATED" in checked(program, "snapshot", "--demo", "--seconds", "0.2")
    assert "input_bound" in checked(program, "rules", "list")
    if installer == "pipx":  # it puts the page where man looks for it
        assert (tmp_path / "man" / "man1" / "gputop.1").is_file()


def _resolved(requirements: tuple[str, ...], minor: int, *words: str | Path) -> str:
    return checked(find_tool("uv"), "pip", "compile", "-q", "--python", sys.executable, "--no-python-downloads",
                   "--no-header", "--no-annotate", "--only-binary", ":all:", "--python-version", f"3.{minor}", "-",
                   *words, stdin="\n".join(requirements))


@cache
def _released(framework: str) -> str:
    """The day after its last file came to the index."""
    lock = _resolved((framework,), FRAMEWORKS[framework][-1], "--no-deps", "--format", "pylock.toml")
    last = max(re.findall(r"upload-time = (\d{4}-\d\d-\d\d)", lock))
    return (date.fromisoformat(last) + timedelta(days=2)).isoformat()


@pytest.mark.parametrize("framework, minor", _PINS)
@pytest.mark.parametrize("when", ["when it was released", "today"])
def test_no_version_that_a_framework_pins_moves(framework: str, minor: int, when: str, packed: dict[str, Path],
                                                tmp_path: Path) -> None:
    environment = tmp_path / "versions.txt"
    environment.write_text(_resolved(
        (framework,), minor, *(() if when == "today" else ("--exclude-newer", _released(framework)))))
    there = {*environment.read_text().split("\n")}
    gputop = f"gputop-tf[stacks,export,parquet] @ {packed['wheel'].as_uri()}"
    _resolved((framework, gputop), minor, "-o", environment)  # as installers do, what is there stays if it fits
    moved = {line.split("==")[0] for line in there - {*environment.read_text().split("\n")}}
    assert len(there) > 5 and moved <= _NEWER[when], f"not what {framework} brought any more: {moved}"

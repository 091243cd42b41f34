"""Other people's training environments for tests: TensorFlow 2.15, JAX and PyTorch, each in one of its own.

Made once, with pip, below the environment the tests run in (or in GPUTOP_TEST_ENVIRONMENTS), and used again
from then on. Where there is no Python for it, or no package index can be reached, the tests that need one are
skipped, with the reason; GPUTOP_TEST_ENVIRONMENTS=off skips them, too. Where the index answers and something cannot
be installed, above all gputop itself, they fail. PyTorch for the CPU is in an index of its own: without it its tests
are skipped.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
_INSTALL_TIMEOUT_S = 600.0
_PIP = ("-m", "pip", "--disable-pip-version-check", "-q", "--retries", "1", "--timeout", "20")
# As pip does it, which takes twice as long.
_BUILD = "import os, sys, setuptools.build_meta as build; os.chdir(sys.argv[1]); build.build_wheel(sys.argv[2])"


@dataclass(frozen=True)
class Recipe:
    """``pythons`` are the minor versions of Python 3 that the requirements have wheels for.

    ``lent``: packages that the tests' own environment lends where it is of the same Python. ``left_out``: what these
    and the requirements want then and no test needs. ``index``: one more package index, which not every machine
    reaches; gputop is not installed beside them then.
    """

    name: str
    requirements: tuple[str, ...]
    pythons: tuple[int, ...]
    lent: tuple[str, ...]
    left_out: tuple[str, ...] = ()
    index: str = ""


# What gputop wants. Not NumPy and protobuf, about whose versions frameworks are particular.
_FOR_GPUTOP = ("grpcio", "linkify-it-py", "markdown-it-py", "mdit-py-plugins", "mdurl", "msgspec", "nvidia-ml-py",
               "platformdirs", "psutil", "pygments", "rich", "textual", "typing-extensions", "uc-micro-py")
TENSORFLOW_215 = Recipe(
    "tensorflow-2.15",
    ("tensorflow-cpu==2.15.1", "keras<2.16", "ml-dtypes<0.4", "numpy<2", "protobuf<5", "tensorboard<2.16",
     "wrapt<1.15"), (11, 10),
    (*_FOR_GPUTOP, "absl-py", "astunparse", "flatbuffers", "gast", "google-pasta", "h5py", "opt-einsum", "packaging",
     "setuptools", "six", "termcolor", "requests", "certifi", "charset-normalizer", "idna", "urllib3"),
    ("google-auth", "google-auth-oauthlib", "libclang", "markdown", "tensorboard-data-server", "tensorflow-estimator",
     "tensorflow-io-gcs-filesystem", "werkzeug", "wheel"))
JAX = Recipe("jax", ("jax",), (11, 12, 13, 14), (*_FOR_GPUTOP, "ml-dtypes", "numpy", "opt-einsum", "protobuf"))
# The wheels of the usual index bring CUDA's libraries, some gigabytes.
PYTORCH = Recipe(
    "pytorch", ("numpy", "torch==2.13.0+cpu"), (10, 11, 12, 13),
    ("jinja2", "markupsafe", "numpy", "setuptools", "typing-extensions"), index="https://download.pytorch.org/whl/cpu")


@dataclass(frozen=True)
class Environment:
    python: Path

    def run(self, *arguments: str, timeout_s: float = 120.0) -> subprocess.CompletedProcess[str]:
        """``python ARGUMENTS`` in it, away from this repository."""
        env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
        return subprocess.run([str(self.python), *arguments], capture_output=True, text=True, timeout=timeout_s,
                              cwd=self.python.parent, env=env)


def environment(recipe: Recipe) -> Environment:
    """The environment, gputop as it is now installed in it; skips the test where it cannot be had."""
    where = os.environ.get("GPUTOP_TEST_ENVIRONMENTS") or str(Path(sys.prefix) / "environments")
    if where == "off":
        pytest.skip("GPUTOP_TEST_ENVIRONMENTS=off")
    python = find_python(*recipe.pythons)
    digest = hashlib.sha256(repr((recipe, python)).encode()).hexdigest()[:8]
    folder = Path(where) / f"{recipe.name}-{digest}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = folder / ".made"
        if not done.exists():
            shutil.rmtree(folder, ignore_errors=True)
            lends = python == sys.executable and importlib.util.find_spec("pip") is not None
            problem = _do(python, "-m", "venv", *(["--without-pip"] if lends else []), str(folder))
            if problem:
                pytest.skip(f"{recipe.name}: no virtual environment: {problem}")
            if lends:
                _lend(folder, recipe.lent)
            index = ("--extra-index-url", recipe.index) if recipe.index else ()
            alone = ("--no-deps",) if lends and recipe.left_out else ()
            _install(folder, *index, *alone, "--only-binary=:all:", "--no-compile", *recipe.requirements,
                     needed=not recipe.index)
            done.touch()
        if not recipe.index:
            _install_gputop(folder)
    return Environment(folder / "bin" / "python")


def _install_gputop(folder: Path) -> None:
    """Install it unless the same is installed already."""
    wheel, installed = _wheel(folder), folder / ".gputop"
    if installed.exists() and installed.read_text() == str(wheel):
        return
    installed.unlink(missing_ok=True)
    for old in folder.glob("lib/python3.*/site-packages/gputop*"):  # pip would take one of the same version for it
        shutil.rmtree(old)
    _install(folder, "--no-compile", str(wheel))
    installed.write_text(str(wheel))


def _wheel(folder: Path) -> Path:
    """gputop as it is now, built once for all environments."""
    files = [ROOT / name for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE")]
    files += sorted(path for name in ("gputop", "tools") for path in (ROOT / name).rglob("*")
                    if path.is_file() and path.suffix != ".pyc")
    digest = hashlib.sha256()
    for file in files:
        digest.update(repr((str(file.relative_to(ROOT)), file.read_bytes())).encode())
    built = folder.parent / "gputop"
    wheels = built / digest.hexdigest()[:16]
    with (folder.parent / "gputop.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not any(wheels.glob("*.whl")):
            shutil.rmtree(built, ignore_errors=True)
            source = built / "source"  # a build leaves things behind where it is made
            for file in files:
                copy = source / file.relative_to(ROOT)
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(file, copy)
            if _do(sys.executable, "-c", _BUILD, str(source), str(wheels)):  # not every environment can build
                _pip(folder, "wheel", "--no-deps", "-w", str(wheels), str(source))
    (wheel,) = wheels.glob("*.whl")
    return wheel


def _lend(folder: Path, names: tuple[str, ...]) -> None:
    """Copy pip and other packages of the tests, which pip need not look for then. It replaces one of a version that
    the others cannot do with."""
    (packages,) = folder.glob("lib/python3.*/site-packages")
    for name in ("pip", *names):
        with suppress(metadata.PackageNotFoundError):
            for file in metadata.files(name) or ():
                lent, copy = Path(str(file.locate())), packages / file
                if lent.is_file() and ".." not in file.parts:
                    copy.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy2(lent, copy)


def _install(folder: Path, *what: str, needed: bool = True) -> None:
    _pip(folder, "install", *what, needed=needed)


def _pip(folder: Path, *command: str, needed: bool = True) -> None:
    """Run the pip in ``folder``. If it fails, so does the test; it is skipped if it is not ``needed`` or no index
    answers."""
    python = str(folder / "bin" / "python")
    problem = _do(python, *_PIP, *command)
    if not problem:
        return
    message = f"{command[-1]} cannot be installed into {folder.name}: {problem}"
    if not needed:
        pytest.skip(message)
    if index_answers(python):
        pytest.fail(message)
    pytest.skip(f"no package index can be reached; {message}")


def find_tool(name: str) -> str:
    """The path of a program beside the tests' Python, or on the PATH; skips the test without one."""
    found = shutil.which(name, path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
    return found or pytest.skip(f"no {name} here")


def checked(*command: str | Path, stdin: str = "", **env: str | Path) -> str:
    """What it prints. Where it fails, so does the test, unless no index answers."""
    done = subprocess.run([str(word) for word in command], input=stdin, capture_output=True, text=True, timeout=600,
                          env={**os.environ, **{name: str(value) for name, value in env.items()}})
    if done.returncode and not index_answers(sys.executable):
        pytest.skip("no package index can be reached")
    assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def index_answers(python: str) -> bool:
    """Whether pip gets what every index has, pip itself."""
    with tempfile.TemporaryDirectory() as folder:
        return not _do(python, *_PIP, "download", "--no-deps", "--no-cache-dir", "-d", folder, "pip")


def _do(*command: str) -> str:
    """What went wrong with it; nothing where nothing did."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_INSTALL_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return (done.stderr.strip().splitlines() or ["it left no message"])[-1][:300] if done.returncode else ""


def find_python(*minors: int) -> str:
    """A Python 3 of such a version: that of the tests, one on the PATH that runs, as not every pyenv shim does, or one
    of pyenv's; skips the test without one."""
    if sys.version_info[1] in minors:
        return sys.executable
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv") / "versions"
    places = [place for minor in minors
              for place in (shutil.which(f"python3.{minor}"), *sorted(pyenv.glob(f"3.{minor}.*/bin/python")))]
    found = next((str(place) for place in places if place and not _do(str(place), "-c", "import venv")), None)
    return found or pytest.skip(f"no Python {' or '.join(f'3.{minor}' for minor in minors)} here")

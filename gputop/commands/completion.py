"""``gputop completion``: completion scripts of shells and the man page, made while the package is built (setup.py); and
the rows of ``gputop --version`` besides the version, which name the build."""

from __future__ import annotations

import argparse
import platform
import re
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from gputop.core.errors import EXIT_OK, GputopError
from gputop.sources.host import proc_files
from gputop.text import console

FILES = {"bash": "gputop.bash", "zsh": "_gputop", "fish": "gputop.fish", "man": "gputop.1"}
BUILD = "build.txt"  # beside the completion scripts: what was built, empty for a release
WORKING_COPY = "a working copy, not a release"

_DRIVER = "/proc/driver/nvidia/version"
_PACKAGES = ("textual", "rich", "numpy", "msgspec", "psutil", "grpcio", "nvidia-ml-py")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", choices=tuple(FILES), metavar="|".join(FILES),
                        help="the shell, or man for the man page (roff)")


def folder() -> Path:
    return Path(__file__).parents[1] / "completion"


def run(args: argparse.Namespace) -> int:
    try:
        text = (folder() / FILES[args.what]).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise GputopError("The installation creates the completion scripts and the man page, but this copy is not "
                          "installed. In its folder: pip install .") from None
    console.write_text(text, end="")
    return EXIT_OK


def versions() -> Iterator[str]:
    """One line each for a build that is not a release, Python and the system, the packages, and NVIDIA's kernel
    driver."""
    try:
        copied = (folder().parents[1] / ".git").exists()  # where an installation has left the note of its own build
        yield from (WORKING_COPY if copied else (folder() / BUILD).read_text(encoding="utf-8")).splitlines()
    except FileNotFoundError:
        yield WORKING_COPY
    libc = " ".join(platform.libc_ver()).strip() or "C library unknown"
    yield f"Python {platform.python_version()}, Linux {platform.release()} {platform.machine()}, {libc}"
    yield ", ".join(f"{name} {_version(name)}" for name in _PACKAGES)
    yield f"NVIDIA driver {_driver()}"


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "(not installed)"


def _driver() -> str:
    try:
        text = proc_files.read(_DRIVER).decode("ascii", "replace")
    except OSError:
        return "not loaded"
    version = re.search(r"\b\d{3}\.[\d.]+\b", text)
    return version[0] if version else "loaded, version unknown"

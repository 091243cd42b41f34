"""The rows of ``gputop --version`` besides the version: what a report of a fault has to name."""

from __future__ import annotations

import platform
import re
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version

from gputop.commands.completion import folder
from gputop.sources.host import proc_files

BUILD = "build.txt"  # beside the completion scripts: what was built, empty for a release
WORKING_COPY = "a working copy, not a release"

_DRIVER = "/proc/driver/nvidia/version"
_PACKAGES = ("textual", "rich", "numpy", "msgspec", "psutil", "grpcio", "nvidia-ml-py")


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

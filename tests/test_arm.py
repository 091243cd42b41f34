"""gputop on aarch64 (Grace): its wheels are there, and what it declares of C is laid out as on x86-64."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.environments import checked, find_tool

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("python", ["3.10", "3.12"])
def test_all_that_gputop_needs_has_wheels_for_aarch64(python: str) -> None:
    """``manylinux_2_28``: glibc of RHEL 8 and newer."""
    if os.environ.get("GPUTOP_TEST_ENVIRONMENTS") == "off":
        pytest.skip("GPUTOP_TEST_ENVIRONMENTS=off")
    extras = [word for name in ("export", "parquet", "stacks") for word in ("--extra", name)]
    lock = checked(find_tool("uv"), "pip", "compile", "-q", "--no-python-downloads", "--only-binary", ":all:",
                   "--python-version", python, "--python-platform", "aarch64-manylinux_2_28", "--format", "pylock.toml",
                   *extras, ROOT / "pyproject.toml")
    wheels = {package["name"]: {wheel["url"].rpartition("/")[2] for wheel in package["wheels"]}
              for package in tomllib.loads(lock)["packages"]}
    compiled = {name for name, files in wheels.items() if any("aarch64" in file for file in files)}
    assert {"numpy", "msgspec", "grpcio", "protobuf", "psutil", "pyarrow", "py-spy"} <= compiled
    assert all(files and not any("x86_64" in file for file in files) for files in wheels.values())


def layouts(*python: str) -> dict[str, Any]:
    done = subprocess.run([*python, ROOT / "tests/arm_layouts.py"], capture_output=True, check=True, timeout=600,
                          cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)})
    document: dict[str, Any] = json.loads(done.stdout)
    return document


@pytest.mark.skipif("GPUTOP_ARM_PYTHON" not in os.environ, reason="no aarch64 Python (tests/arm_python.sh makes one)")
def test_every_module_is_imported_on_aarch64_and_structures_lie_as_on_x86_64() -> None:
    arm, here = layouts(*shlex.split(os.environ["GPUTOP_ARM_PYTHON"])), layouts(sys.executable)
    assert arm["machine"] == "aarch64" and arm["failed"] == here["failed"] == {}
    ours = {name for name in here["layouts"] if name.startswith("gputop.")}
    assert len(ours) > 25 and any(name.startswith("pynvml.") for name in here["layouts"])
    assert arm["layouts"] == here["layouts"]

"""gputop on aarch64 (Grace): its wheels are there, and what it declares of C is laid out as on x86-64."""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
PLAIN = "nvidia-ml-py"  # needs no wheel of a machine: without it there is no index
EXTRAS = ("export", "parquet", "stacks")


def resolved(folder: Path, python: str, *requirements: str) -> list[str]:
    """Return the names of the wheels for aarch64. Skips the test if no index answers, or not in time."""
    report = folder / f"{python}-{len(requirements)}.json"
    platforms = [word for name in ("manylinux2014_aarch64", "manylinux_2_28_aarch64") for word in ("--platform", name)]
    try:
        done = subprocess.run(
            [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q", "--retries", "1", "--timeout", "20",
             "install", "--dry-run", "--ignore-installed", "--target", folder / "none", "--only-binary=:all:",
             *platforms, "--implementation", "cp", "--python-version", python, "--report", report, *requirements],
            capture_output=True, text=True, timeout=300)
    except subprocess.TimeoutExpired:
        pytest.skip("the package index takes too long")
    if not report.exists():
        if requirements != (PLAIN,) and ("No matching distribution" in done.stderr or "conflict" in done.stderr):
            resolved(folder, python, PLAIN)
            pytest.fail(done.stderr)
        pytest.skip(f"no package index: {done.stderr.strip()[-200:]}")
    return [item["download_info"]["url"].rpartition("/")[2] for item in json.loads(report.read_bytes())["install"]]


@pytest.mark.skipif(importlib.util.find_spec("pip") is None, reason="no pip here")
@pytest.mark.parametrize("python", ["3.10", "3.12"])
def test_all_that_gputop_needs_has_wheels_for_aarch64(python: str, tmp_path: Path) -> None:
    if os.environ.get("GPUTOP_TEST_ENVIRONMENTS") == "off":
        pytest.skip("GPUTOP_TEST_ENVIRONMENTS=off")
    project: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = [*project["dependencies"], *(one for extra in EXTRAS for one in project["optional-dependencies"][extra])]
    # pip judges a condition by the Python that runs it, not by the one that is asked for.
    wheels = resolved(tmp_path, python, *(one.partition(";")[0] for one in needed))
    compiled = {name.partition("-")[0] for name in wheels if "aarch64" in name}
    assert {"numpy", "msgspec", "grpcio", "protobuf", "psutil", "pyarrow", "py_spy"} <= compiled
    assert not [name for name in wheels if "x86_64" in name or not name.endswith(".whl")]


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

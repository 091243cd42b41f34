"""gputop connects to what it was asked to and to servers of this machine; what is installed is held by hashes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.nvml_fake import build, environment
from tests.tui.terminals import Terminal

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "tests" / "data"
# Runs gputop in this process and notes each name that is looked up, each connection and each process that is started.
_RUN = """
import sys
log = open(sys.argv[1], "a", buffering=1)
loopback = ("127.", "::1", "localhost")
def note(event, arguments):
    if event == "socket.connect" and isinstance(arguments[1], tuple):
        text = str(arguments[1][0])
    elif event in ("socket.getaddrinfo", "socket.gethostbyname", "socket.gethostbyaddr"):
        text = str(arguments[0])
    elif event == "socket.sendto" and isinstance(arguments[1], tuple):
        text = str(arguments[1][0])
    elif event in ("subprocess.Popen", "os.posix_spawn", "os.exec", "os.system"):
        text = str(arguments[:2])
    else:
        return
    log.write(event + " " + text.replace(chr(10), " ") + chr(10))
sys.addaudithook(note)
sys.argv = ["gputop", *sys.argv[2:]]
from gputop.cli import command
command()
"""


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Eight GPUs of the fake driver."""
    folder = tmp_path_factory.mktemp("node")
    return {**environment(build(folder)), "PYTHONPATH": str(ROOT), "HOME": str(folder)}


def _strangers(log: Path) -> Iterator[str]:
    """What was noted that leads away from this machine, or starts a program that is not gputop's own."""
    for line in log.read_text().splitlines():
        event, _, text = line.partition(" ")
        own = (text.startswith(("127.", "::1", "localhost", "0.0.0.0")) if event.startswith("socket")
               else (sys.executable in text and ("gputop" in text or "multiprocessing" in text))
               or "['chronyc', '-c', 'tracking']" in text)  # which asks the chronyd of this machine
        if not own:
            yield line


@pytest.mark.parametrize("arguments", [
    ("snapshot", "--source", "nvml", "--seconds", "0.3", "--format", "json"), ("doctor",), ("config",),
    ("analyze", str(DATA / "jax_run" / "host.xplane.pb.gz")),
    ("compare", str(DATA / "v0_1_0" / "analysis.json"), str(DATA / "v0_1_0" / "analysis.json")),
], ids=lambda arguments: arguments[0])
def test_a_command_connects_to_nothing_elsewhere(tmp_path: Path, settings: dict[str, str],
                                                 arguments: tuple[str, ...]) -> None:
    log = tmp_path / "log"
    done = subprocess.run([sys.executable, "-c", _RUN, str(log), *arguments], env=settings, cwd=tmp_path,
                          capture_output=True, text=True)
    assert done.returncode in (0, 1), done.stderr
    assert done.stdout
    assert list(_strangers(log)) == []


def test_the_monitor_connects_to_nothing_elsewhere(tmp_path: Path, settings: dict[str, str]) -> None:
    log = tmp_path / "log"
    command = [sys.executable, "-c", _RUN, str(log), "--source", "nvml", "--interval", "0.1"]
    monitor = Terminal((120, 40), command, settings)
    try:
        monitor.until("H100")
        monitor.press("q")
        assert monitor.ended() == 0
    finally:
        monitor.close()
    assert list(_strangers(log)) == []


def test_a_connection_elsewhere_is_noted(tmp_path: Path, settings: dict[str, str]) -> None:
    log = tmp_path / "log"
    command = ["capture", "--attach", "192.0.2.1:9", "--seconds", "1", "--logdir", str(tmp_path)]
    subprocess.run([sys.executable, "-c", _RUN, str(log), *command], env=settings, cwd=tmp_path, capture_output=True)
    assert any("192.0.2.1" in line for line in _strangers(log))


# -- what is installed ------------------------------------------------------------------------------


def test_every_requirement_of_ci_is_held_by_hashes() -> None:
    text = (ROOT / "requirements" / "ci.txt").read_text().replace("\\\n", " ")
    lines = [line.split() for line in text.splitlines() if line and not line.startswith("#")]
    assert len(lines) > 40
    for line in lines:
        assert re.fullmatch(r"[a-z0-9-]+==[\w.]+", line[0]), line[0]
        assert any(re.fullmatch(r"--hash=sha256:[0-9a-f]{64}", word) for word in line), line[0]
    locked = {line[0].partition("==")[0] for line in lines}
    wanted = re.findall(r"^  ['\"]([a-zA-Z0-9-]+)>=", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert {"textual", "grpcio", "hypothesis", "tensorflow-cpu", "detect-secrets"} <= {name.lower() for name in wanted}
    assert {name.lower() for name in wanted} <= locked | {"tensorflow", "xprof"}
    assert "requirements/ci.txt" in (ROOT / ".ci" / "run").read_text()


def test_the_bill_of_materials_lists_what_is_installed(tmp_path: Path) -> None:
    needs = "Requires-Dist: Some.Library>=1 ; python_version > '3'\n"
    for name, requires in (("gputop_tf", needs), ("some_library", "")):
        folder = tmp_path / f"{name}-1.2.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.2\nLicense: MIT\n{requires}")
        (folder / "RECORD").write_text("x.py,sha256=abc,1\n")
    program = ROOT / "requirements" / "bill_of_materials.py"
    done = subprocess.run([sys.executable, "-S", str(program)], env={**os.environ, "PYTHONPATH": str(tmp_path)},
                          capture_output=True, text=True, check=True)
    bill = json.loads(done.stdout)
    assert (bill["bomFormat"], bill["specVersion"]) == ("CycloneDX", "1.5")
    (library,) = bill["components"]
    assert library["purl"] == "pkg:pypi/some-library@1.2" and library["licenses"] == [{"license": {"name": "MIT"}}]
    assert bill["metadata"]["component"]["purl"] == "pkg:pypi/gputop-tf@1.2"
    assert bill["dependencies"][0] == {"ref": "pkg:pypi/gputop-tf@1.2", "dependsOn": ["pkg:pypi/some-library@1.2"]}

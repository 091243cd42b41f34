"""gputop's own processes, and the commands it advises, import nothing from the folder they are started in."""

from __future__ import annotations

import ast
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from gputop.commands.record import user_unit
from gputop.core.own_program import child_command, gputop_command, pip_command
from gputop.doctor import driver, node
from gputop.doctor.driver_facts import DriverFacts, GpuFacts
from tests.source_trees import sources

_PLANTED = ("contextlib", "json", "linecache", "msgspec", "subprocess", "textual", "types", "warnings", "gputop")


@pytest.fixture
def trap(tmp_path: Path) -> Path:
    """A folder of anybody's whose modules leave a file behind."""
    folder = tmp_path / "trap"
    folder.mkdir()
    for name in _PLANTED:
        (folder / f"{name}.py").write_text("open('sprung', 'w').close()\nraise SystemExit(1)\n")
    return folder


def _run(folder: Path, command: list[str]) -> bool:
    """Whether the trap was sprung."""
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run(command, cwd=folder, env=environ, stdin=subprocess.DEVNULL, capture_output=True)
    return (folder / "sprung").exists()


@pytest.mark.parametrize("function", [
    ["gputop.diagnosis.worker:child", "1", "", "gputop", ""],
    ["gputop.doctor.driver_facts:child"],
    ["gputop.__main__:command", "--version"],
], ids=lambda function: function[0])
def test_a_process_of_gputop_imports_nothing_of_the_folder_it_is_started_in(trap: Path, function: list[str]) -> None:
    assert not _run(trap, child_command(*function))


def test_nor_do_the_commands_that_gputop_advises(trap: Path) -> None:
    assert not _run(trap, [*gputop_command(), "--version"])
    assert not _run(trap, [*pip_command(), "--version"])
    assert _run(trap, [sys.executable, "-m", "gputop", "--version"]), "the trap works"


def test_a_process_of_gputop_is_of_this_very_gputop(tmp_path: Path) -> None:
    """Not of another one that is installed, and with the arguments as they are."""
    other = tmp_path / "gputop"
    other.mkdir()
    (other / "__init__.py").write_text("raise SystemExit('another gputop')")
    done = subprocess.run([*child_command("gputop.__main__:command"), "--version"], capture_output=True, text=True,
                          env={**os.environ, "PYTHONPATH": str(tmp_path)}, cwd="/")
    assert done.stdout.startswith("gputop "), done.stderr


def test_the_program_is_named_by_a_path_that_leads_there_from_anywhere(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "bin" / "gputop"
    script.parent.mkdir()
    script.touch()
    monkeypatch.setattr(sys, "argv", ["bin/gputop"])
    assert gputop_command() == [str(script)]
    (tmp_path / "gputop").touch()  # anybody's, in the folder it is started in
    monkeypatch.setattr(sys, "argv", ["gputop"])
    assert gputop_command()[0] == sys.executable


def test_no_source_starts_a_module_or_code_of_its_own_by_another_way() -> None:
    """``-m`` and ``-c`` of Python stand in one file."""
    found = []
    for source in sources():
        literals = [node.value for node in source.nodes if isinstance(node, ast.Constant)]
        strings = [value for value in literals if isinstance(value, str)]
        executes = "sys.executable" in source.text
        if source.name != "core/own_program.py" and (
                any(re.search(r"-m (gputop|pip)\b", string) for string in strings)
                or (executes and any(re.fullmatch(r"-[a-zA-Z]*[mc]", string) for string in strings))):
            found.append(source.name)
    # "python -m gputop" is a way for users, whose folder it is.
    assert found == ["__main__.py"]


def test_the_doctor_and_the_unit_advise_no_such_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node.importlib, "import_module", lambda name: int("x"))
    gpu = GpuFacts(0, code=0, sm_active_reason="no permission")
    texts = [driver.sm_activity(DriverFacts(gpus=(gpu,))).fix, node.dependencies().fix,
             user_unit([*gputop_command(), "record"])]
    assert "sudo " in texts[0] and " pip install" in texts[1] and "ExecStart=" in texts[2]
    for text in texts:
        for line in text.splitlines():
            words = shlex.split(line, comments=True)
            if "-m" in words:
                at = words.index("-m")
                assert words[at - 1] in ("-P", "-I") and words[at + 1] == "pip", line

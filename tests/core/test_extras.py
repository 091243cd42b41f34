"""The line that installs an extra fits the way gputop was installed."""

from __future__ import annotations

from pathlib import Path

import pytest

from gputop.core.own_program import install_command


@pytest.mark.parametrize(("file", "line"), [
    ("pyvenv.cfg", "pip install py-spy"),
    ("pipx_metadata.json", "pipx inject gputop-tf py-spy"),
    ("uv-receipt.toml", "uv pip install --python '{}' py-spy"),
])
def test_the_line_is_of_the_tool_that_installed_gputop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, line: str
) -> None:
    (tmp_path / file).touch()
    monkeypatch.setattr("sys.prefix", str(tmp_path))
    assert install_command("stacks") == line.format(tmp_path)

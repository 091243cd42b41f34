"""What is private to Textual is used in one module only."""

from __future__ import annotations

import ast
from pathlib import Path

import gputop

ROOT = Path(gputop.__file__).parent


def test_one_module_alone_imports_what_is_private_to_textual() -> None:
    found = set()
    for path in ROOT.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [
                f"{node.module}.{alias.name}" for alias in node.names] if isinstance(node, ast.ImportFrom) else []
            if any(name.startswith("textual.") and "._" in name for name in names):
                found.add(path.relative_to(ROOT).as_posix())
    assert found == {"tui/terminal/textual_private.py"}

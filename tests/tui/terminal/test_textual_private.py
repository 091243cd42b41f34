"""What is private to Textual is used in one module only."""

from __future__ import annotations

import ast

from tests.source_trees import sources


def test_one_module_alone_imports_what_is_private_to_textual() -> None:
    found = set()
    for source in sources():
        for node in source.nodes:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [
                f"{node.module}.{alias.name}" for alias in node.names] if isinstance(node, ast.ImportFrom) else []
            if any(name.startswith("textual.") and "._" in name for name in names):
                found.add(source.name)
    assert found == {"tui/terminal/textual_private.py"}

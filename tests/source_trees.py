"""The sources of the package, read and parsed once for all tests that search them."""

from __future__ import annotations

import ast
import gc
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import gputop

PACKAGE = Path(gputop.__file__).parent


class Source(NamedTuple):
    """One module. ``name``: its path below the package; ``nodes``: what :func:`ast.walk` yields of ``tree``."""

    name: str
    text: str
    tree: ast.Module
    nodes: list[ast.AST]

    @property
    def folder(self) -> str:
        """The package it is in, or its own name."""
        return self.name.partition("/")[0]


@cache
def sources() -> tuple[Source, ...]:
    """All modules of the package, by path. Files whose tests call it share a process, see tests/conftest.py."""
    gc.disable()  # searching a million nodes while they are made takes longer than to make them
    try:
        return tuple(_sources())
    finally:
        gc.enable()


def _sources() -> Iterator[Source]:
    for path in sorted(PACKAGE.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        tree = ast.parse(text)
        yield Source(path.relative_to(PACKAGE).as_posix(), text, tree, list(ast.walk(tree)))


def dotted(node: ast.AST) -> str:
    """The name ``a.b.c`` of an attribute of a name; empty for attributes of anything else."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""

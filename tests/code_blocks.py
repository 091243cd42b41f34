"""The code blocks of Markdown documents."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from msgspec import Struct

ROOT = Path(__file__).resolve().parents[1]
# Of a block that takes something from one of them; it runs in a process of its own.
FRAMEWORKS = re.compile(r"^(?:import|from) (tensorflow|torch|jax|keras|lightning)\b", re.M)


class Block(Struct, frozen=True):
    document: Path
    line: int
    language: str
    text: str


def code_blocks(documents: Iterable[Path]) -> list[Block]:
    """All fenced blocks, in their order."""
    return [Block(document, text.count("\n", 0, fenced.start()) + 1, fenced[1], fenced[2])
            for document in documents for text in [document.read_text()]
            for fenced in re.finditer(r"^```(\w*)[^\n]*\n(.*?)^```", text, re.M | re.S)]


def parameters(blocks: Iterable[Block], *languages: str) -> list[Any]:
    """The blocks in these languages for ``pytest.mark.parametrize``, each named by its file and line."""
    return [pytest.param(block, id=f"{block.document.relative_to(ROOT)}:{block.line}")
            for block in blocks if block.language in languages]

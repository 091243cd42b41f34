"""The programs of ``tools`` as modules, for tests, and the pages that one of them makes."""

from __future__ import annotations

import sys
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[1]


def tool(name: str) -> ModuleType:
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        return import_module(name)
    finally:
        sys.path.remove(str(ROOT / "tools"))


@cache
def made_pages() -> dict[Path, str]:
    """All pages that come from the code, by their path in docs; the site has them all."""
    pages: dict[Path, str] = tool("make_reference").pages()
    return pages

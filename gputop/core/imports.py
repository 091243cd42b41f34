"""Imports that leave out what they can do without."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def without(name: str) -> Iterator[None]:
    """Make imports of this module fail within the block, as where it is not installed. One that is imported already
    stays, and who imports it after the block gets it."""
    if name in sys.modules:
        yield
        return
    sys.modules[name] = None  # type: ignore[assignment]  # an import of it fails, as Python's import system says
    try:
        yield
    finally:
        del sys.modules[name]
